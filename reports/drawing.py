"""Parts that every figure shares: colours, panels under one title, and the caption with one legend below them."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, NullLocator

from tensorir_ladder.harness.records import Record, StreamRecord

# Okabe and Ito's palette, which colour-blind readers can tell apart; black is kept for cuBLAS, and a brown darker than
# all others stands in for yellow, which is weak on white.
PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#661100")
MARKERS = "os^Dvph"
CUBLAS = "#000000"
STYLE = {"linewidth": 1.8, "markersize": 5.5}
CAPTION_COLUMNS = 125


def canvas(
    title: str, subtitle: str, height: float, rows: int = 1, columns: int = 1, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make an empty figure, 9 inches wide, and its panels row by row."""
    figure = Figure(figsize=(9, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
    figure.suptitle(f"{title}\n{subtitle}", fontsize=12)
    return figure, list(axes.flat)


def mark(axis: Axis, places: Sequence[float], form: str) -> None:
    """Mark an axis at these places and nowhere between, numbers in a format."""
    axis.set_major_locator(FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(f"{{x:{form}}}")


def note(
    axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], align: str = "left"
) -> Annotation:
    """Write a text beside a place; the offset is in points."""
    return axes.annotate(text, place, xytext=offset, textcoords="offset points", ha=align, fontsize=9)


def rounds_and_days(records: Sequence[Record | StreamRecord]) -> str:
    """Say how many rounds the records are medians of, and when they were measured."""
    rounds = sorted({record.method.rounds for record in records})
    days = sorted({record.environment.recorded_at[:10] for record in records})
    count = "–".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    return f"Median of {count} rounds. Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}."


def finish(figure: Figure, panels: list[Axes], caption: str) -> Figure:
    """Add the caption and one legend below the panels, and a quiet grid."""
    labelled = dict(itertools.chain.from_iterable(zip(*reversed(axes.get_legend_handles_labels())) for axes in panels))
    count = len(labelled)
    figure.legend(
        labelled.values(),
        labelled,
        title=textwrap.fill(caption, CAPTION_COLUMNS),
        loc="outside lower center",
        ncols=count if count <= 5 else math.ceil(count / 2),
        fontsize=9,
        title_fontsize=8.5,
        frameon=False,
    )
    for axes in panels:
        axes.grid(True, axis="both" if axes.get_xscale() == "log" else "y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure
