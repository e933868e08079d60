"""A step's own code, as a difference to that of the step before."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tensorir_ladder.reports.web.page import highlight
from tensorir_ladder.steps.step import Step

ROOT = Path(__file__).parents[3]
AROUND = 2  # unchanged lines shown on either side of a change
SIGNS = {"+ ": "added", "- ": "removed", "  ": "same"}
# Explicit kernels hand over to a builder: what is compared is its body, and of step 14 the ring itself.
BUILDERS = {
    13: "persistent.persistent",
    14: "tcgen05_ring.tcgen05_ring",
}


@dataclass(frozen=True)
class CodeLine:
    """A line of a difference: "added", "removed", "same" or "gap", where lines were left out; its text, coloured."""

    change: str
    text: Markup


def source_of(make: Callable[..., Any]) -> str:
    """Return a function's source without decorators, annotations of its own docstring and comments at its begin."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(make)))
    lines = text.splitlines()
    tree = ast.parse(text).body[0]
    first = tree.lineno - 1
    if ast.get_docstring(tree):
        doc = tree.body[0]
        del lines[doc.lineno - 1 : doc.end_lineno]
    return "\n".join(lines[first:])


def step_source(step: Step) -> tuple[str, str]:
    """Return the file, relative to the project, and the source in which a step's idea stands."""
    if step.number in BUILDERS:
        module, name = BUILDERS[step.number].split(".")
        from importlib import import_module

        make = getattr(import_module(f"tensorir_ladder.kernels.{module}"), name)
        return f"kernels/{module}.py", source_of(make)
    return f"steps/{step.name}.py", source_of(step.maker(step.variants[0].name))


def difference(before: str, after: str) -> list[CodeLine]:
    """Compare two sources line by line; what is the same far from any change is left out."""
    old, new = before.splitlines(), after.splitlines()
    coloured = {"-": _coloured(before), "+": _coloured(after)}
    found: list[CodeLine] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for place, group in enumerate(matcher.get_grouped_opcodes(AROUND)):
        if place or group[0][3]:
            found.append(CodeLine("gap", Markup("…")))
        for tag, old_from, old_to, new_from, new_to in group:
            if tag == "equal":
                found += [CodeLine("same", coloured["+"][line]) for line in range(new_from, new_to)]
            else:
                found += [CodeLine("removed", coloured["-"][line]) for line in range(old_from, old_to)]
                found += [CodeLine("added", coloured["+"][line]) for line in range(new_from, new_to)]
    return found


def whole(source: str) -> list[CodeLine]:
    """Show a source as it is, for a step without one before it."""
    return [CodeLine("same", line) for line in _coloured(source)]


def parts(source: str, wanted: Sequence[tuple[str, str]]) -> str:
    """Cut parts out of a source, each from the first line behind the last part that has a text to one that has another.

    An empty text stands for the first line that is indented less. Lines that only leave time stamps are left out.
    """
    lines = [line for line in source.splitlines() if not re.search(r"\.(?:mark|clocks)\(", line)]
    found, at = [], 0
    for begin, end in wanted:
        first = next(place for place in range(at, len(lines)) if begin in lines[place])
        depth = len(lines[first]) - len(lines[first].lstrip())
        if end:
            at = next(place for place in range(first, len(lines)) if end in lines[place]) + 1
        else:
            inside = range(first + 1, len(lines))
            at = next((n for n in inside if lines[n] and len(lines[n]) - len(lines[n].lstrip()) < depth), len(lines))
        found.append(textwrap.dedent("\n".join(lines[first:at])))
    return "\n…\n".join(found)


def _coloured(source: str) -> list[Markup]:
    """Colour a whole source and take it apart into lines, each with its own elements."""
    inside = str(highlight(source, "python")).split("<code>", 1)[1].rsplit("</code>", 1)[0]
    return [Markup(line) for line in inside.split("\n")][: len(source.splitlines())]
