"""Which figures there are, and their files: PNGs that say which rows they were drawn from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure
from PIL import Image, UnidentifiedImageError

from tensorir_ladder.reports import drawing, figures, stage_figures, timeline_figure, timelines
from tensorir_ladder.reports.counters import counted_groups
from tensorir_ladder.reports.judgement import points
from tensorir_ladder.reports.selection import Results, Section, shape_of
from tensorir_ladder.reports.sweeps import (
    StageSweep,
    StreamSection,
    StreamSweep,
    by_case,
    several_variants,
    stage_sweeps,
    stream_sweeps,
)
from tensorir_ladder.reports.table import row

PEAKS = Path(__file__).parent / "peaks.json"


@dataclass(frozen=True)
class Plot:
    """One figure: its section, what it shows ("gflops", "step5-variants"), what it is drawn from, how.

    The digest is written into the PNG, so that a stale plot is found without drawing again: two machines'
    fonts need not agree to the byte.
    """

    section: Section | StreamSection | timelines.Lives
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
    """Every figure the results give: the ladder's section by section, then those of stage sweeps, then timelines."""
    yield from ladder_plots(results)
    yield from stage_plots(results)
    yield from timeline_plots(results)


def ladder_plots(results: Results) -> Iterator[Plot]:
    """The figures of the ladder, section by section."""
    for section in results.sections():
        if len(section.sizes()) < 2:
            continue  # a line needs two points; the tables say the rest
        peak = peaks().get(section.gpu)
        digest = _digest(_ladder_inputs(results, section, peak), figures)
        kinds: dict[str, Callable[[], Figure]] = {
            "gflops": lambda s=section: figures.gflops_figure(results, s),
            "ratio": lambda s=section: figures.ratio_figure(results, s),
        }
        if peak and section.arithmetic in peak["peak_gflops"]:
            kinds["roofline"] = lambda s=section, p=peak: figures.roofline_figure(results, s, p)
        if any(section.gains_at_sizes(step) for step in section.steps):
            kinds["gain"] = lambda s=section: figures.gain_figure(results, s)
        for step in section.steps:
            if counted_groups(results, step, section):
                kinds[f"step{step}-stalls"] = lambda s=section, n=step: figures.stalls_figure(results, s, n)
            if section.variant_choices(step) and section.gains_at_sizes(step):
                kinds[f"step{step}-variants"] = lambda s=section, n=step: figures.variants_figure(results, s, n)
        yield from (Plot(section, kind, digest, draw) for kind, draw in kinds.items())


def stage_plots(results: Results) -> Iterator[Plot]:
    """The figures of stage sweeps: products section by section, then memory-bound workloads."""
    for section in results.sections():
        sweeps = stage_sweeps(section)
        for own in by_case(sweeps).values():
            yield _stage_plot(speed_kind(own[0]), own, stage_figures.speed_figure)
        if any(points([sweep]) for sweep in sweeps):
            yield _stage_plot("stages-predicted", sweeps, stage_figures.prediction_figure)
        for own in several_variants(sweeps):
            kind = f"step{own[0].step}-stages-variants-{_slug(own[0].tile)}"
            yield _stage_plot(kind, own, stage_figures.stage_variants_figure)
    streams = stream_sweeps(results)
    for section in dict.fromkeys(sweep.section for sweep in streams):
        own = [sweep for sweep in streams if sweep.section == section]
        yield _stage_plot("stages-streams", own, stage_figures.streams_figure)


def timeline_plots(results: Results, step: int | None = None) -> Iterator[Plot]:
    """The figures of timelines, a case each; those of one step if it is given."""
    for group in timelines.lives(results, step):
        inputs = [dataclasses.asdict(timeline) for timeline in group.timelines]
        digest = _digest(inputs, timelines, timeline_figure)
        yield Plot(group, group.kind, digest, lambda group=group: timeline_figure.timeline_figure(group))


def speed_kind(sweep: StageSweep) -> str:
    """The kind of the figure that shows a case's speed over stages."""
    return f"step{sweep.step}-stages-{sweep.variant}-{_slug(sweep.tile)}"


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Draw every figure; returns the files."""
    return [plot.write(folder) for plot in plots(results)]


def peaks() -> dict[str, dict]:
    """Peak rates and bandwidth by GPU name, with their origin."""
    return json.loads(PEAKS.read_text())


def _stage_plot(kind: str, sweeps: Sequence[StageSweep] | Sequence[StreamSweep], draw: Callable[..., Figure]) -> Plot:
    """A figure of sweeps, with the digest of all that their records say."""
    inputs = [dataclasses.asdict(record) for sweep in sweeps for record in sweep.everything]
    return Plot(sweeps[0].section, kind, _digest(inputs, stage_figures), lambda: draw(sweeps))


def _slug(tile: str) -> str:
    """A tile as part of a file name."""
    return tile.replace("/", "_")


def _ladder_inputs(results: Results, section: Section, peak: dict | None) -> dict[str, Any]:
    """All that a section's figures are drawn from: rows, names, peaks."""
    records = section.drawn()
    return {
        # No figure of the ladder draws peers.
        "rows": [{key: value for key, value in row(record).items() if key != "peers"} for record in records],
        "cublas_ms": [record.fastest_baseline.median_ms for record in records],
        "rounds": [record.method.rounds for record in records],
        "names": {step: results.step_name(step) for step in section.steps},
        "stages": sorted([*key, stages] for key, stages in section.stages.items()),
        "peak": peak,
        "counters": [[counted.step, counted.tile, shape_of(counted), counted.values] for counted in results.counters],
    }


def _digest(inputs: object, *drawers: ModuleType) -> str:
    """sha256 of what a figure is drawn from, and of the code that draws it."""
    code = b"".join(Path(module.__file__).read_bytes() for module in (drawing, *drawers))
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode() + code).hexdigest()
