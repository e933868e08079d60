"""Drawn shapes, group by group: a table of how they stand beside cuBLAS, and a picture with a point for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from tensorir_ladder.harness.records import ShapeGroup, ShapeRecord, shape_text
from tensorir_ladder.reports.cases import grouped, slug
from tensorir_ladder.reports.cells import Table
from tensorir_ladder.reports.drawing import CUBLAS, PALETTE, canvas, finish, mark, note, rounds_and_days

RATIOS = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)  # marked, as far as there are such
MOST_NAMED = 12  # in a picture
BESIDE = (
    ("left", (5, -3)),
    ("right", (-5, -3)),
    ("left", (5, -12)),
    ("right", (-5, -12)),
    ("left", (5, 5)),
    ("right", (-5, 5)),
)
POINT = 4  # pixels from a point's middle that no name may hide
GAP = 8  # pixels between names side by side, which else read as one, and from a name to an axis


@dataclass(frozen=True)
class ShapeSection:
    """One group of drawn shapes, as pictures and their files name it."""

    group: ShapeGroup

    @property
    def title(self) -> str:
        """Say in words what is shown, GPU first."""
        own = self.group.summary
        return f"{own['gpu']}, {own['dtype']}, group {own['group']}, seed {own['seed']}"

    @property
    def slug(self) -> str:
        """Write what is drawn as part of a file name."""
        own = self.group.summary
        return slug(own["gpu"], own["dtype"])

    @property
    def kind(self) -> str:
        """The kind of its picture, as part of a file name."""
        own = self.group.summary
        return f"shapes-{own['group']}-{own['seed']}"


def rows(groups: Iterable[ShapeGroup]) -> list[dict[str, Any]]:
    """Return one object for each group, as JSON has it."""
    return [group.summary for group in groups]


def latest(groups: Iterable[ShapeGroup]) -> list[ShapeGroup]:
    """Return of each GPU, dtype and group what the seed measured last has drawn."""

    def measured(group: ShapeGroup) -> str:
        return max(record.environment.recorded_at for record in group.records)

    kinds = grouped(groups, lambda group: group.records[0].family[:-1])
    return [max(own, key=measured) for own in kinds.values()]


def shapes_table(groups: Sequence[ShapeGroup]) -> Table:
    """Make a row a group: its shapes' speeds beside cuBLAS, and the worst three by name."""
    header = ("GPU", "dtype", "group", "worst shapes", "seed", "shapes", "geometric mean", "worst", "at least 1")
    lines = []
    for group in groups:
        own = group.summary
        worst = ", ".join(f"{shape_text(record.shape)} {record.ratio_to_cublas:.2f}" for record in group.losers[:3])
        speeds = (f"{own['geomean']:.3f}", f"{own['worst']:.3f}", f"{own['share_at_least_1']:.0%}")
        lines.append((own["gpu"], own["dtype"], own["group"], worst, str(own["seed"]), str(own["count"]), *speeds))
    text = (
        "Shapes that nobody tuned, drawn by a seed; speed over the faster form of cuBLAS, of batches over torch.bmm on "
        "the same tensors, in the same rounds. Most of the call's kernels are launched while the one before them still "
        "runs, and so are an H200's schedules; cuBLAS launches none so."
    )
    return Table("Drawn shapes", header, tuple(lines), text, left=4)


def shapes_figure(section: ShapeSection) -> Figure:
    """Draw the ratio to the baseline over arithmetic intensity, a point a shape; the worst that lose are named."""
    records, losers, own = section.group.records, section.group.losers, section.group.summary
    baseline = records[0].baseline_name
    figure, panels = canvas(f"Drawn shapes beside {baseline}", section.title, height=5.6)
    (axes,) = panels
    axes.axhline(1.0, color=CUBLAS, linestyle="--", linewidth=1.4, label=baseline)
    winners = [record for record in records if record.ratio_to_cublas >= 1]
    for some, color, label in ((winners, PALETTE[2], "at least as fast"), (losers, PALETTE[3], "slower")):
        places = [record.intensity for record in some], [record.ratio_to_cublas for record in some]
        axes.plot(*places, "o", color=color, markersize=4, label=f"{label}: {len(some)}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    mark(axes.yaxis, RATIOS, "g")
    axes.margins(x=0.12, y=0.1)  # room for names
    axes.set_xlabel("operations for each byte of operands and result (logarithmic)")
    axes.set_ylabel(f"speed ÷ {baseline}'s speed, same rounds (logarithmic)")
    named = " Slower ones are named, the worst first, where a name finds room." if losers else ""
    caption = f"{own['count']} shapes, geometric mean {own['geomean']:.3f}.{named} {rounds_and_days(records)}"
    finish(figure, panels, caption)
    _name(figure, axes, losers[:MOST_NAMED], records)
    return figure


def _name(figure: Figure, axes: Axes, some: Sequence[ShapeRecord], records: Sequence[ShapeRecord]) -> None:
    """Write shapes beside their points, each where it hides no point and no other name, and leaves no axis."""
    figure.draw_without_rendering()
    places = axes.transData.transform([(record.intensity, record.ratio_to_cublas) for record in records])
    hidden = [Bbox.from_extents(x - POINT, y - POINT, x + POINT, y + POINT) for x, y in places]
    height = axes.transData.transform((1.0, 1.0))[1]
    hidden.append(Bbox.from_extents(axes.bbox.x0, height - POINT, axes.bbox.x1, height + POINT))  # the line of cuBLAS
    for record in some:
        for align, offset in BESIDE:
            place = record.intensity, record.ratio_to_cublas
            text = note(axes, shape_text(record.shape), place, offset, align)
            text.set_in_layout(False)
            box = text.get_window_extent()
            apart = Bbox.from_extents(box.x0 - GAP, box.y0, box.x1 + GAP, box.y1)
            inside = axes.bbox.x0 < apart.x0 and apart.x1 < axes.bbox.x1 and axes.bbox.y0 + POINT < box.y0
            if inside and not box.count_overlaps(hidden):
                hidden.append(apart)
                break
            text.remove()
