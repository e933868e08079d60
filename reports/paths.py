"""Folders of a set of reports: records that are read, the README and its pictures, and pages made on demand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tensorir_ladder.harness.records import RESULTS


@dataclass(frozen=True)
class Paths:
    """The folders of one set of reports; ``readme`` is None where no README belongs to the results.

    ``plots`` holds the pictures that the README shows; ``pages`` all that is drawn and written on demand.
    """

    results: Path
    pages: Path
    plots: Path
    readme: Path | None

    @property
    def figures(self) -> Path:
        """Name the folder of the pages' pictures."""
        return self.pages / "plots"

    @classmethod
    def of(cls, results: Path = RESULTS, readme: Path | None = None) -> Paths:
        """Take the committed layout for the committed results; for any other folder, everything inside it.

        So a report on somebody's own measurements never overwrites the committed ones.
        """
        results = Path(os.path.realpath(results))  # which a loop of links does not stop
        if results == RESULTS.resolve():
            out, readme = results.parent, readme or results.parent.parent / "README.md"
        else:
            out = results
        return cls(results, out / "pages", out / "plots", readme and Path(os.path.realpath(readme)))


def link(source: Path, target: Path) -> str:
    """Write a relative link to ``target`` as it stands in the file ``source``."""
    return Path(os.path.relpath(target, source.parent)).as_posix()
