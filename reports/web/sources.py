"""What the site is made from, read or made once for all its pages: records, steps, lowered kernels."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorir_ladder.reports.cases import slug
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.selection import Results, load
from tensorir_ladder.reports.timelines import Lives, lives

if TYPE_CHECKING:
    from tensorir_ladder.harness.build import Case, Kernel
    from tensorir_ladder.harness.records import Record
    from tensorir_ladder.steps.step import Step

ROOT = Path(__file__).resolve().parents[2]


@dataclass(eq=False)
class SiteSources:
    """Records that count, folders, the steps, and kernels that several pages show, each lowered once."""

    paths: Paths
    results: Results
    _kernels: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: Paths) -> SiteSources:
        """Read the records of a results folder; RecordError names the first that is none."""
        return cls(paths, load(paths.results))

    @functools.cached_property
    def gpus(self) -> dict[str, str]:
        """GPUs by slug ("h200"), the one with the most records first: what ``gpu`` in an address may be."""
        counted: dict[str, int] = {}
        for record in (*self.results.records, *self.results.models):
            counted[record.environment.gpu] = counted.get(record.environment.gpu, 0) + 1
        names = sorted(counted, key=lambda name: (-counted[name], name))
        return {slug(name): name for name in names}

    @functools.cached_property
    def steps(self) -> dict[int, Step]:
        """The ladder's steps by number, as they declare themselves."""
        from tensorir_ladder.steps.registry import find_steps

        return find_steps()

    def idea(self, step: int) -> str:
        """Return a step's idea, the part of its first line behind the colon: "load the coming tiles while …"."""
        return self.steps[step].title.partition(": ")[2] if step in self.steps else ""

    def again(self, record: Record) -> str:
        """Write the command that measures a record's case again, from the project's root for the committed records."""
        folder = self.paths.results
        inside = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
        return f"ladder run --again {shlex.quote((inside / self.results.places[record.key]).as_posix())}"

    @functools.cached_property
    def lives(self) -> list[Lives]:
        """Timelines, a case each with a timeline per stage count."""
        return lives(self.results)

    def kernel(self, case: Case) -> Kernel:
        """Lower a case to TIR and CUDA text, once for all pages; needs neither GPU nor compiler."""
        from tensorir_ladder.harness.build import lower

        if case not in self._kernels:
            self._kernels[case] = lower(case)
        return self._kernels[case]
