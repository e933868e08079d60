"""A step's code on its page: the changes since the step before, and the pipeline."""

from __future__ import annotations

import difflib
import re

from tensorir_ladder.harness.records import Listing
from tensorir_ladder.reports.table import Table

CONTEXT_LINES = 2
FOLD_ABOVE_LINES = 80
FEWEST_ALIKE = 0.2  # of two texts' lines: with fewer in common, a difference would be both texts once more
MULTIPLICATIONS = {
    "tcgen05": "tcgen05.mma, by one thread",
    "wgmma": "wgmma, by a warpgroup",
    "mma.sync": "mma.sync, by a warp",
}


def body_of(text: str) -> str:
    """A docstring below its first line, as Markdown: only the mark of a literal block differs."""
    return re.sub(r"::$", ":", text.partition("\n")[2].strip("\n"), flags=re.MULTILINE)


def aspects_table(before: Listing, after: Listing) -> Table:
    """A row per aspect that differs from the step before; the note names those that are equal."""
    old, new = _aspects(before), _aspects(after)
    values = {name: (old.get(name, "none"), new.get(name, "none")) for name in dict.fromkeys([*old, *new])}
    rows = [(name, *pair) for name, pair in values.items() if pair[0] != pair[1]]
    equal = [f"{name} ({pair[0]})" for name, pair in values.items() if pair[0] == pair[1]]
    note = f"Equal in both: {'; '.join(equal)}." if equal else ""
    return Table("What changed", ("", f"step {before.step}", f"step {after.step}"), tuple(rows), note, left=3)


def setting(listing: Listing) -> str:
    """Say for what problem, tile and GPU the code shown was generated."""
    stages = f", {listing.stages} stages" if listing.stages > 1 else ""
    case = f"{listing.shape}, {listing.dtype}, {listing.layout}, tile {listing.tile}{stages}"
    return f"The code is that of {case}, for {listing.arch}."


def differences(before: Listing, after: Listing) -> dict[str, str]:
    """Differences of TensorIR and of CUDA to the step before, by language."""
    texts = {"TensorIR": (before.tir, after.tir), "CUDA": (before.cuda, after.cuda)}
    return {name: difference(old, new, before, after) for name, (old, new) in texts.items()}


def difference(old: str, new: str, before: Listing, after: Listing) -> str:
    """A unified difference as a fenced block, folded where it is long; a sentence where nearly all lines differ."""
    names, texts = (before.step_name, after.step_name), (old.splitlines(), new.splitlines())
    lines = list(difflib.unified_diff(*texts, *names, n=CONTEXT_LINES, lineterm=""))
    if not lines:
        return "None: the text is the same."
    if _alike(*texts) < FEWEST_ALIKE:
        return f"Hardly a line is that of step {before.step}: compare the whole texts."
    text = "\n".join(["```diff", *lines, "```"])
    if len(lines) <= FOLD_ABOVE_LINES:
        return text
    return f"<details><summary>{len(lines)} lines</summary>\n\n{text}\n\n</details>"


def pipeline_table(listing: Listing) -> Table | None:
    """The lists annotated on the k loop, a row per statement; None where nothing is pipelined."""
    lists = {name.removeprefix("software_pipeline_"): value for name, value in listing.pipeline.items()}
    if not lists:
        return None
    asynchronous = lists.pop("async_stages", [])
    statements = lists.pop("statements")
    rows = tuple((name, *map(str, values)) for name, *values in zip(statements, *lists.values()))
    note = f"Asynchronous stages: {', '.join(map(str, asynchronous))}." if asynchronous else "No stage is asynchronous."
    return Table("Pipeline", ("statement of the k loop", *lists), rows, note)


def _aspects(listing: Listing) -> dict[str, str]:
    """All that is compared: the operands' dtype and what multiplies them, then what the listing names."""
    found = [name for mark, name in MULTIPLICATIONS.items() if mark in listing.tir]
    multiplied = {"operands": listing.dtype, "multiplication": (found or ["multiply-adds, by a thread"])[0]}
    return multiplied | listing.aspects


def _alike(old: list[str], new: list[str]) -> float:
    """The share of lines that two texts have in common, in the same order, whatever their indentation."""
    stripped = [[line.strip() for line in text] for text in (old, new)]
    return difflib.SequenceMatcher(None, *stripped, autojunk=False).ratio()
