"""Finds the steps by reading this folder: a new step is one new file, ``stepN_topic.py``, that declares ``STEP``."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path

from tensorir_ladder.steps.step import Step, UnknownStep

HERE = Path(__file__).parent


class MalformedStep(TypeError):
    """A file named like a step that is none."""


def find_steps(folder: Path = HERE) -> dict[int, Step]:
    """Return every step of a folder, by number; MalformedStep names a file that is not well-formed."""
    return dict(_find(folder))


@functools.cache
def _find(folder: Path) -> dict[int, Step]:
    steps: dict[int, Step] = {}
    for path in sorted(folder.glob("step?*.py")):
        step = _read(path)
        if step.number in steps:
            raise MalformedStep(f"{path.name} and {steps[step.number].name}.py have one number; give it one of its own")
        steps[step.number] = step
    return dict(sorted(steps.items()))


def _read(path: Path) -> Step:
    if not re.fullmatch(r"step\d+_\w+", path.stem):
        raise MalformedStep(f"{path.name} is not named stepN_topic.py; rename it")
    try:
        if path.parent == HERE:
            module = importlib.import_module(f"{__package__}.{path.stem}")
        else:
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None:
                raise ImportError("it is no Python file")
            module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
            spec.loader.exec_module(module)
    except Exception as error:  # whatever a file may raise, its name has to be said
        raise MalformedStep(f"{path.name} cannot be imported: {error}") from error
    step = getattr(module, "STEP", None)
    if not isinstance(step, Step) or step.name != path.stem:
        found = f"declares {step.name}" if isinstance(step, Step) else f"has {type(step).__name__} for STEP"
        raise MalformedStep(f"{path.name} {found}; it must declare STEP = Step(number, topic, …) as its name says")
    return step


def get_step(number: int) -> Step:
    """Return the step of that number; UnknownStep lists those there are."""
    steps = find_steps()
    if number not in steps:
        raise UnknownStep(f"no step {number}; there are {', '.join(map(str, steps))}")
    return steps[number]
