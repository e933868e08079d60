"""The record of emulator and compute-sanitizer beside each other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.lab.sanitizer.judgement import judge
from tensorir_ladder.harness.lab.sanitizer.preparation import Prepared
from tensorir_ladder.harness.lab.sanitizer.subjects import Finding
from tensorir_ladder.harness.lab.sanitizer.tools import ALONE, TOOLS, Outcome, kept_outcome


class BadAgreement(ValueError):
    """A file that is no record of emulator and compute-sanitizer."""


@dataclass(frozen=True)
class Row:
    """One kernel: what the emulator says, what each run says by its tool's name, and the verdict on both."""

    name: str
    whole: bool
    emulator: Finding
    runs: dict[str, Outcome]
    verdict: str
    why: str


def row_of(kernel: Prepared) -> Row:
    """Make a kernel's row of what is kept of its runs."""
    runs = {tool: found for tool in (ALONE, *TOOLS) if (found := kept_outcome(kernel, tool))}
    subject = kernel.subject
    return Row(subject.name, subject.whole, kernel.emulator, runs, *judge(kernel.emulator, subject.whole, runs))


def save(rows: Iterable[Row], provenance: Mapping[str, object], path: Path) -> None:
    """Write the record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**provenance, "kernels": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> list[Row]:
    """Read the rows of a record; BadAgreement for a file that is none."""
    try:
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
        return [_row(**kernel) for kernel in kernels]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadAgreement(f"{path} is no record of sanitize ({error}); give what --out wrote") from error


def _row(emulator: dict, runs: dict[str, dict], **fields: Any) -> Row:
    return Row(emulator=Finding(**emulator), runs={tool: Outcome(**run) for tool, run in runs.items()}, **fields)


def tally(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """Count the kernels of each kind of fault, by verdict; the kind of whole ones is "none"."""
    counted: dict[str, Counter[str]] = {}
    for row in rows:
        counted.setdefault(row.emulator.kind or "none", Counter())[row.verdict] += 1
    return counted
