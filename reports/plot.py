"""Which figures there are, and their files: PNGs that say which rows they were drawn from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image, UnidentifiedImageError

from . import figures
from .counters import counted_pairs
from .selection import Results, Section, shape_of
from .table import row

PEAKS = Path(__file__).parent / "peaks.json"


@dataclass(frozen=True)
class Plot:
    """One figure: its section, what it shows ("gflops", "step5-variants"), what it is drawn from, how.

    The digest is written into the PNG, so that a stale plot is found without drawing again: two machines'
    fonts need not agree to the byte.
    """

    section: Section
    kind: str
    digest: str
    draw: Callable[[], Figure]

    @property
    def file_name(self) -> str:
        """The PNG's name."""
        return f"{self.section.slug}-{self.kind}.png"

    def write(self, folder: Path) -> Path:
        """Draw the figure into ``folder``; the same rows give the same bytes on the same machine."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        self.draw().savefig(path, metadata={"Software": None, "Description": self.digest})
        return path

    def is_current(self, folder: Path) -> bool:
        """Whether the file in ``folder`` was drawn from these rows by this code."""
        try:
            with Image.open(folder / self.file_name) as image:
                return image.info.get("Description") == self.digest
        except (FileNotFoundError, UnidentifiedImageError):
            return False


def plots(results: Results) -> Iterator[Plot]:
    """Every figure the results give, section by section."""
    for section in results.sections():
        if not section.choices:
            continue
        peak = peaks().get(section.gpu)
        digest = _digest(results, section, peak)
        kinds: dict[str, Callable[[], Figure]] = {
            "gflops": lambda s=section: figures.gflops_figure(results, s),
            "ratio": lambda s=section: figures.ratio_figure(results, s),
            "roofline": lambda s=section, p=peak: figures.roofline_figure(results, s, p),
        }
        if max(section.steps) > 1:
            kinds["gain"] = lambda s=section: figures.gain_figure(results, s)
        for step in section.steps:
            if counted_pairs(results, step):
                kinds[f"step{step}-stalls"] = lambda s=section, n=step: figures.stalls_figure(results, s, n)
            if section.variant_choices(step):
                kinds[f"step{step}-variants"] = lambda s=section, n=step: figures.variants_figure(results, s, n)
        yield from (Plot(section, kind, digest, draw) for kind, draw in kinds.items())


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Draw every figure; returns the files."""
    return [plot.write(folder) for plot in plots(results)]


def peaks() -> dict[str, dict]:
    """Peak rates and bandwidth by GPU name, with their origin."""
    return json.loads(PEAKS.read_text())


def _digest(results: Results, section: Section, peak: dict | None) -> str:
    """sha256 of all a section's figures are drawn from: rows, names, peaks, and the drawing code."""
    inputs = {
        # No figure draws peers.
        "rows": [{k: v for k, v in row(record).items() if k != "peers"} for record in section.records],
        "cublas_ms": [record.fastest_baseline.median_ms for record in section.records],
        "rounds": [record.method.rounds for record in section.records],
        "names": {step: results.step_name(step) for step in section.steps},
        "stages": sorted([*key, stages] for key, stages in section.stages.items()),
        "peak": peak,
        "counters": [[counted.step, counted.tile, shape_of(counted), counted.values] for counted in results.counters],
    }
    code = Path(figures.__file__).read_bytes()
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode() + code).hexdigest()
