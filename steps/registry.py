"""Finds the steps by reading this folder: a new step is one new file, ``stepN_topic.py``, that declares ``STEP``."""

from __future__ import annotations

import copyreg
import functools
import importlib.util
import logging
import re
import sys
import traceback
from pathlib import Path

from tensorir_ladder.steps.step import Step, UnknownStep

HERE = Path(__file__).parent
log = logging.getLogger(__name__)


class MalformedStep(TypeError):
    """A file named like a step that is none."""


def find_steps(folder: Path = HERE) -> dict[int, Step]:
    """Return the steps of a folder, by number; a file that is not well-formed is left out, and logged once."""
    return dict(_find(folder)[0])


def malformed_steps(folder: Path = HERE) -> dict[str, MalformedStep]:
    """Return what is wrong with each file of a folder that is named like a step and is none, by the file's stem."""
    return dict(_find(folder)[1])


@functools.cache
def _find(folder: Path) -> tuple[dict[int, Step], dict[str, MalformedStep]]:
    steps: dict[int, Step] = {}
    malformed: dict[str, MalformedStep] = {}
    for path in sorted(folder.glob("step?*.py")):
        try:
            step = _read(path)
        except MalformedStep as error:
            malformed[path.stem] = error
            continue
        if twin := steps.get(step.number):
            same = MalformedStep(f"{path.name} and {twin.name}.py have one number; give it one of its own")
            malformed |= {path.stem: same, twin.name: same}
        steps[step.number] = step
    for text in dict.fromkeys(map(str, malformed.values())):
        log.warning("left out: %s", text)
    good = {number: step for number, step in sorted(steps.items()) if step.name not in malformed}
    return good, malformed


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
    except (Exception, SystemExit) as error:  # whatever a file may raise, its name has to be said
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise MalformedStep(f"{path.name}{_line(path, error)} cannot be imported: {what}") from error
    step = getattr(module, "STEP", None)
    if not isinstance(step, Step) or step.name != path.stem:
        found = f"declares {step.name}" if isinstance(step, Step) else f"has {type(step).__name__} for STEP"
        raise MalformedStep(f"{path.name} {found}; it must declare STEP = Step(number, topic, …) as its name says")
    return step


def _line(path: Path, error: BaseException) -> str:
    """Name the line of a file at which an error came up."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return f", line {lines[-1]}," if lines else ""


def get_step(number: int, folder: Path = HERE) -> Step:
    """Return the step of that number; UnknownStep lists those there are, MalformedStep says why one is none."""
    steps = find_steps(folder)
    if number not in steps:
        for stem, error in malformed_steps(folder).items():
            if re.match(rf"step{number}(?!\d)", stem):
                raise MalformedStep(str(error)) from error
        raise UnknownStep(f"no step {number}; there are {', '.join(map(str, steps))}")
    return steps[number]


# A step holds functions; in another process it is found again by its number.
copyreg.pickle(Step, lambda step: (get_step, (step.number,)))
