"""What a page says of a step's code: what changed since the step before, the pipeline, the variants."""

from __future__ import annotations

import difflib
import re

from tensorir_ladder.harness.records import Listing
from tensorir_ladder.reports.table import NOT_MEASURED, Table

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
    """For what problem, tile and GPU the code shown was generated."""
    stages = f", {listing.stages} stages" if listing.stages > 1 else ""
    case = f"{listing.shape}, {listing.dtype}, {listing.layout}, tile {listing.tile}{stages}"
    return f"The code is that of {case}, for {listing.arch}."


def code_blocks(before: Listing | None, after: Listing) -> list[str]:
    """TensorIR and CUDA: the difference to the step before, then the whole, folded."""
    blocks = []
    for name, language in (("TensorIR", "python"), ("CUDA", "cuda")):
        old, new = (getattr(item, "tir" if name == "TensorIR" else "cuda") if item else "" for item in (before, after))
        if before:
            blocks += [f"### {name}: difference to step {before.step}", difference(old, new, before, after)]
        blocks.append(_folded(f"{name}, whole ({len(new.splitlines())} lines)", language, new))
    return blocks


def difference(old: str, new: str, before: Listing, after: Listing) -> str:
    """A unified difference as a fenced block, folded where it is long; a sentence where nearly all lines differ."""
    names, texts = (before.step_name, after.step_name), (old.splitlines(), new.splitlines())
    lines = list(difflib.unified_diff(*texts, *names, n=CONTEXT_LINES, lineterm=""))
    if not lines:
        return "None: the text is the same."
    if _alike(*texts) < FEWEST_ALIKE:
        return f"Hardly a line is that of step {before.step}: compare the whole texts, here and on its page."
    text = "\n".join(lines)
    return _fence("diff", text) if len(lines) <= FOLD_ABOVE_LINES else _folded(f"{len(lines)} lines", "diff", text)


def pipeline_table(listing: Listing) -> Table | None:
    """The lists annotated on the k loop, a row per statement; None where nothing is pipelined."""
    lists = {name.removeprefix("software_pipeline_"): value for name, value in listing.pipeline.items()}
    if not lists:
        return None
    asynchronous = lists.pop("async_stages", [])
    statements = lists.pop("statements")
    rows = tuple((name, *map(str, values)) for name, *values in zip(statements, *lists.values()))
    note = f"Asynchronous stages: {_plain(asynchronous)}." if asynchronous else "No stage is asynchronous."
    return Table("Pipeline", ("statement of the k loop", *lists), rows, note)


def variants_code_table(listings: list[Listing]) -> Table:
    """What each variant's generated code has: versions, barriers, asynchronous copies, resources."""
    header = (
        "variant",
        "buffer versions",
        "barriers",
        "cp.async",
        "wait groups",
        "registers",
        "shared bytes",
        "occupancy",
    )
    rows = []
    for item in listings:
        code, used = item.code, item.resources
        facts = (code.shared_versions, code.barriers, code.cp_async, _plain(code.wait_groups) or "none")
        resources = (used.registers, used.smem_bytes, f"{used.occupancy:.0%}") if used else (NOT_MEASURED,) * 3
        rows.append((item.variant, *map(str, (*facts, *resources))))
    note = "Counted in the generated CUDA, in the k loop's body; registers and occupancy by the compiler."
    return Table("Variants", header, tuple(rows), note)


def _aspects(listing: Listing) -> dict[str, str]:
    """What is compared: the operands' dtype and what multiplies them, then what the listing names."""
    found = [name for mark, name in MULTIPLICATIONS.items() if mark in listing.tir]
    multiplied = {"operands": listing.dtype, "multiplication": (found or ["multiply-adds, by a thread"])[0]}
    return multiplied | listing.aspects


def _alike(old: list[str], new: list[str]) -> float:
    """The share of lines that two texts have in common, in the same order, whatever their indentation."""
    stripped = [[line.strip() for line in text] for text in (old, new)]
    return difflib.SequenceMatcher(None, *stripped, autojunk=False).ratio()


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _folded(summary: str, language: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{_fence(language, text)}\n\n</details>"
