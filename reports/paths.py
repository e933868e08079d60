"""Where records are read, and where pages, plots and the README that follow from them lie."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from harness.records import RESULTS


@dataclass(frozen=True)
class Paths:
    """The folders of one set of reports."""

    results: Path
    pages: Path
    plots: Path
    readme: Path

    @classmethod
    def of(cls, results: Path = RESULTS, readme: Path | None = None) -> Paths:
        """The committed layout for the committed results; for any other folder, everything inside it.

        So a report on somebody's own measurements never overwrites the committed ones.
        """
        results = results.resolve()
        committed = results == RESULTS.resolve()
        out = results.parent if committed else results
        home = out.parent if committed else out
        return cls(results, out / "pages", out / "plots", (readme or home / "README.md").resolve())


def link(source: Path, target: Path) -> str:
    """A relative link to ``target`` as written in the file ``source``."""
    return Path(os.path.relpath(target, source.parent)).as_posix()
