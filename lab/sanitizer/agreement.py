"""The record of emulator and compute-sanitizer beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorir_ladder.harness.records import append
from tensorir_ladder.lab.sanitizer.judgement import judge
from tensorir_ladder.lab.sanitizer.preparation import Prepared
from tensorir_ladder.lab.sanitizer.subjects import Finding
from tensorir_ladder.lab.sanitizer.tools import ALONE, TOOLS, ToolRun, kept_outcome


class BadAgreement(ValueError):
    """A file that is no record of emulator and compute-sanitizer."""


@dataclass(frozen=True)
class AgreementRow:
    """One kernel: what the emulator says, what each run says by its tool's name, and the verdict on both."""

    name: str
    whole: bool
    emulator: Finding
    runs: dict[str, ToolRun]
    verdict: str
    why: str


@dataclass(frozen=True)
class _Kernels:
    kernels: list[AgreementRow]


def row_of(kernel: Prepared) -> AgreementRow:
    """Make a kernel's row of what is kept of its runs."""
    runs = {tool: found for tool in (ALONE, *TOOLS) if (found := kept_outcome(kernel, tool))}
    subject = kernel.subject
    return AgreementRow(
        subject.name, subject.whole, kernel.emulator, runs, *judge(kernel.emulator, subject.whole, runs)
    )


def save(rows: Iterable[AgreementRow], provenance: Mapping[str, object], path: Path) -> None:
    """Append the record to a file of JSON lines."""
    append(path, {**provenance, "kernels": list(rows)})


def read(path: Path) -> list[AgreementRow]:
    """Read the rows of a file's newest record; BadAgreement where it holds none."""
    try:
        *_, newest = path.read_bytes().splitlines()
        return msgspec.json.decode(newest, type=_Kernels).kernels
    except (OSError, ValueError, RecursionError) as error:
        raise BadAgreement(f"{path} is no record of sanitize ({error}); give what --out wrote") from error


def tally(rows: Iterable[AgreementRow]) -> dict[str, Counter[str]]:
    """Count the kernels of each kind of fault, by verdict; the kind of whole ones is "none"."""
    counted: dict[str, Counter[str]] = {}
    for row in rows:
        counted.setdefault(row.emulator.kind or "none", Counter())[row.verdict] += 1
    return counted
