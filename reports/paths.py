"""Folders of a set of reports: records that are read, the README and its pictures, and pages made on demand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tensorir_ladder.harness.records import RESULTS


@dataclass(frozen=True)
class Paths:
    """The folders of one set of reports; ``documents`` have markers between which results are written.

    Those of the committed results are the README and the page with all tables; other results have what is named, or
    none. ``plots`` holds the pictures that they show; ``pages`` all that is drawn and written on demand.
    """

    results: Path
    pages: Path
    plots: Path
    documents: tuple[Path, ...]

    @property
    def site(self) -> Path:
        """Name the folder of the site, beside that of the pages."""
        return self.pages.with_name("site")

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
            out, root = results.parent, results.parent.parent
            documents = [readme] if readme else [root / "README.md", root / "docs" / "results.md"]
        else:
            out, documents = results, [readme] if readme else []
        return cls(results, out / "pages", out / "plots", tuple(Path(os.path.realpath(path)) for path in documents))


def link(source: Path, target: Path) -> str:
    """Write a relative link to ``target`` as it stands in the file ``source``."""
    return Path(os.path.relpath(target, source.parent)).as_posix()
