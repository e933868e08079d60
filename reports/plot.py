"""All figures there are, and their files: PNGs that say which records they were drawn from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, TypedDict

import matplotlib
import msgspec
from matplotlib.figure import Figure
from PIL import Image, UnidentifiedImageError

from tensorir_ladder.harness.records import path_name, read_file
from tensorir_ladder.reports import drawing, figures, shapes, stage_figures, timeline_figure, timelines
from tensorir_ladder.reports.cases import Shape, grouped
from tensorir_ladder.reports.counters import counted_groups
from tensorir_ladder.reports.judgement import points
from tensorir_ladder.reports.selection import Results, Section
from tensorir_ladder.reports.sweeps import StageSweep, StreamSection, StreamSweep, stage_sweeps, stream_sweeps

PEAKS = Path(__file__).parent / "peaks.json"
Positive = Annotated[int, msgspec.Meta(gt=0)] | Annotated[float, msgspec.Meta(gt=0)]


class Peak(TypedDict):
    """Bound what a GPU can do; ``peak_gflops`` by dtype and arithmetic."""

    peak_gflops: dict[str, Positive]
    bandwidth_gb_s: Positive
    origin: str


@dataclass(frozen=True)
class Plot:
    """One figure: its section, its kind ("gflops", "step5-variants"), how it is drawn.

    The digest is written into the PNG, so that a stale plot is found without drawing again: two machines'
    fonts need not agree to the byte.
    """

    section: Section | StreamSection | timelines.Lives | shapes.ShapeSection
    kind: str
    digest: str
    draw: Callable[[], Figure]

    @property
    def file_name(self) -> str:
        """Name the PNG."""
        return path_name(f"{self.section.slug}-{self.kind}.png")

    def write(self, folder: Path) -> Path:
        """Draw the figure into ``folder``; the same records give the same bytes on the same machine."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name is one
            self.draw().savefig(path, metadata={"Software": None, "Description": self.digest})
        return path

    def path(self, folder: Path) -> Path:
        """Draw the figure into ``folder`` unless it is there; returns its file."""
        return folder / self.file_name if self.is_current(folder) else self.write(folder)

    def is_current(self, folder: Path) -> bool:
        """Tell if the file in ``folder`` was drawn from these records by this code."""
        try:
            with Image.open(folder / self.file_name) as image:
                return image.info.get("Description") == self.digest
        except (FileNotFoundError, UnidentifiedImageError):
            return False


def plots(results: Results) -> Iterator[Plot]:
    """Yield every figure: the ladder's, section by section, those of stage sweeps, timelines, then drawn shapes."""
    yield from ladder_plots(results)
    yield from stage_plots(results)
    yield from timeline_plots(results)
    yield from shape_plots(results)


def ladder_plots(results: Results) -> Iterator[Plot]:
    """Yield the figures of the ladder, section by section."""
    for section in results.sections():
        if len(section.sizes()) < 2:
            continue  # a line needs two points; the tables say the rest
        peak = peaks().get(section.gpu)
        names = {step: results.step_name(step) for step in section.steps}
        drawn = [replace(record, peers=()) for record in section.drawn()]  # no figure of the ladder draws peers
        digest = _digest([drawn, names, peak, results.counters], figures)
        kinds: dict[str, Callable[[], Figure]] = {
            "gflops": partial(figures.gflops_figure, results, section),
            "ratio": partial(figures.ratio_figure, results, section),
        }
        if peak and section.arithmetic in peak["peak_gflops"]:
            kinds["roofline"] = partial(figures.roofline_figure, results, section, peak)
        if any(section.gains_at_sizes(step) for step in section.steps):
            kinds["gain"] = partial(figures.gain_figure, results, section)
        for step in section.steps:
            if counted_groups(results, step, section):
                kinds[f"step{step}-stalls"] = partial(figures.stalls_figure, results, section, step)
            if section.variant_choices(step) and section.gains_at_sizes(step):
                kinds[f"step{step}-variants"] = partial(figures.variants_figure, results, section, step)
        yield from (Plot(section, kind, digest, draw) for kind, draw in kinds.items())


def climb_plot(results: Results, sections: Sequence[Section], sizes: Sequence[Shape]) -> Plot:
    """Return the figure of several ladders of one GPU at a few sizes, step by step."""
    drawn = [replace(record, peers=()) for section in sections for record in section.drawn()]
    names = {step: results.step_name(step) for section in sections for step in section.steps}
    draw = partial(figures.climb_figure, results, sections, sizes)
    return Plot(sections[0], "climb", _digest([drawn, names, list(sizes)], figures), draw)


def stage_plots(results: Results) -> Iterator[Plot]:
    """Yield the figures of stage sweeps: products section by section, then memory-bound workloads."""
    for section in results.sections():
        sweeps = stage_sweeps(section)
        for own in grouped(sweeps, lambda sweep: sweep.case).values():
            yield _stage_plot(speed_kind(own[0]), own, stage_figures.speed_figure)
        if points(sweeps):
            yield _stage_plot("stages-predicted", sweeps, stage_figures.prediction_figure)
        for (step, tile), own in grouped(sweeps, lambda sweep: (sweep.step, sweep.tile)).items():
            if len({sweep.variant for sweep in own}) > 1:
                kind = f"step{step}-stages-variants-{_slug(tile)}"
                yield _stage_plot(kind, own, stage_figures.stage_variants_figure)
    for own in grouped(stream_sweeps(results), lambda sweep: sweep.section).values():
        yield _stage_plot("stages-streams", own, stage_figures.streams_figure)


def timeline_plots(results: Results, step: int | None = None) -> Iterator[Plot]:
    """Yield the figures of timelines, a case each; those of one step if it is given."""
    for group in timelines.lives(results, step):
        digest = _digest(group.timelines, timelines, timeline_figure)
        yield Plot(group, group.kind, digest, partial(timeline_figure.timeline_figure, group))


def shape_plots(results: Results) -> Iterator[Plot]:
    """Yield the figures of drawn shapes, a group each, as drawn last."""
    for group in shapes.latest(results.shapes):
        section = shapes.ShapeSection(group)
        yield Plot(section, section.kind, _digest(group.records, shapes), partial(shapes.shapes_figure, section))


def speed_kind(sweep: StageSweep) -> str:
    """Name the kind of the figure that shows a case's speed over stages."""
    return f"step{sweep.step}-stages-{sweep.variant}-{_slug(sweep.tile)}"


def stage_curve(results: Results) -> Plot | None:
    """Return the figure of speed over stages that stands for all: a default variant's, over the most shapes."""
    cases = [own for section in results.sections() for own in grouped(stage_sweeps(section), lambda s: s.case).values()]
    if not cases:
        return None
    own = max(cases, key=lambda own: (own[0].default_variant, len(own)))
    return _stage_plot(speed_kind(own[0]), own, stage_figures.speed_figure)


def peaks() -> dict[str, Peak]:
    """Read peak rates and bandwidth by GPU name, with their origin; RecordError for a file that is damaged."""
    return read_file(PEAKS, dict[str, Peak], "restore it from git")


def _stage_plot(kind: str, sweeps: Sequence[StageSweep] | Sequence[StreamSweep], draw: Callable[..., Figure]) -> Plot:
    """Make a figure of sweeps, with the digest of all that their records say."""
    records = [record for sweep in sweeps for record in sweep.everything]
    return Plot(sweeps[0].section, kind, _digest(records, stage_figures), partial(draw, sweeps))


def _slug(tile: str) -> str:
    return tile.replace("/", "_")


def _digest(inputs: object, *drawers: ModuleType) -> str:
    """Compute the sha256 of what a figure is drawn from, and of the code that draws it."""
    code = b"".join(Path(module.__file__).read_bytes() for module in (drawing, *drawers))
    return hashlib.sha256(msgspec.json.encode(inputs) + code).hexdigest()
