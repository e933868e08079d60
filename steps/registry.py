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
    for path in sorted(folder.glob("step[0-9]*.py")):
        step = _read(path)
        if step.number in steps:
            raise MalformedStep(f"{path.name} and {steps[step.number].name}.py have one number; give it one of its own")
        steps[step.number] = step
    return dict(sorted(steps.items()))


def _read(path: Path) -> Step:
    name = f"{__package__}.{path.stem}"
    try:
        if path.parent == HERE:
            module = importlib.import_module(name)
        else:
            spec = importlib.util.spec_from_file_location(name, path)
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except (SyntaxError, ImportError, TypeError, ValueError) as error:
        raise MalformedStep(f"{path.name} cannot be imported: {error}") from error
    step = getattr(module, "STEP", None)
    if not isinstance(step, Step) or step.name != path.stem or not re.fullmatch(r"step\d+_\w+", path.stem):
        found = f"declares {step.name}" if isinstance(step, Step) else f"has {type(step).__name__} for STEP"
        raise MalformedStep(f"{path.name} {found}; it must declare STEP = Step(number, topic, …) as its name says")
    return step


def get_step(number: int) -> Step:
    """Return the step of that number; UnknownStep lists those there are."""
    steps = find_steps()
    if number not in steps:
        raise UnknownStep(f"no step {number}; there are {', '.join(map(str, steps))}")
    return steps[number]
