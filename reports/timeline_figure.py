"""Drawing one block's life: a panel per stage count, a row per stage and per role, time from left to right.

A role's row shows above what the tensor cores do for it, below what its threads do.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tensorir_ladder.harness.records import Timeline
from tensorir_ladder.reports.drawing import PALETTE, canvas, finish
from tensorir_ladder.reports.table import short_name
from tensorir_ladder.reports.timelines import (
    BOX,
    EMPTY_WAIT,
    EPILOGUE,
    FULL_WAIT,
    ROUNDING,
    Lives,
    Span,
    loads,
    multiplications,
    spans,
    waiting_roles,
)

EPILOGUE_COLOR, LOAD_COLOR, PRODUCT_COLOR, FULL_COLOR, BOX_COLOR, EMPTY_COLOR = PALETTE[:6]
ON_THEIR_WAY_COLOR = "#D9D9D9"
PRODUCTS = {True: (PRODUCT_COLOR, "wgmma"), False: ("#A6DCCB", "wgmma, end not seen")}  # by whether it was
SHOWN_K_TILES, LAST_K_TILES = 16, 3
ROW_INCHES, PANEL_INCHES, FRAME_INCHES = 0.25, 0.62, 1.6
NARROWEST, WIDEST = 0.3, 0.8  # of the right column, in parts of the left one
DIGIT_INCHES = 0.055  # a digit of a k tile's number
US = 1e-3  # of a nanosecond

Place = tuple[float, float]  # bottom and height, in rows


def timeline_figure(group: Lives) -> Figure:
    """Draw panels one above the other, on the same scales: the block's begin on the left, an epilogue on the right."""
    step, timelines = group.first.step, group.timelines
    heights = [PANEL_INCHES + ROW_INCHES * len(_rows(timeline)) for timeline in timelines]
    title = f"One block's life: step {step}, {short_name(group.first.step_name)}"
    figure, axes = canvas(title, group.title, FRAME_INCHES + sum(heights), rows=len(timelines), columns=2)
    begin, end = _windows(timelines)
    grid = axes[0].get_subplotspec().get_gridspec()
    grid.set_height_ratios(heights)
    grid.set_width_ratios([1, min(WIDEST, max(NARROWEST, end / begin))])
    for timeline, left, right in zip(timelines, axes[::2], axes[1::2]):
        left.set_xlim(0, begin * US)
        right.set_xlim(-end * US, 0)
        left.set_title(f"{timeline.stages} stage{'s' * (timeline.stages > 1)}", fontsize=10, loc="left")
        duration = timeline.duration_ns * US
        right.set_title(f"{duration:.1f} µs in all", fontsize=9, loc="right")
        _draw(left, timeline, 0)
        _draw(right, timeline, _epilogue_end(timeline))
    axes[-2].set_xlabel("µs since the block began")
    axes[-1].set_xlabel("µs to the epilogue's end")
    blocks = ", ".join(dict.fromkeys(f"block {t.block} of {t.blocks}" for t in timelines)).capitalize()
    caption = f"{blocks}; of {len(group.first.durations_ns)} runs the one with the median duration. "
    caption += "Numbers: k tiles. A load lasts until a warpgroup sees its bytes, a wgmma from when "
    caption += "its operands are there and the one before is done. In rows of roles that multiply: tensor cores above, "
    caption += "threads below."
    finish(figure, axes, caption)
    for panel in axes:
        panel.grid(False, axis="y")
        panel.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    return figure


def _windows(timelines: Iterable[Timeline]) -> tuple[float, float]:
    """Return the lengths of the begin and of the end that are shown, in ns.

    16 k tiles of the fastest; the first epilogue and the 3 k tiles before it of all.
    """
    begins, ends = [], []
    for timeline in timelines:
        products = _products(timeline)
        begins.append(max(own[:SHOWN_K_TILES][-1].end for own in products))
        end, begin = _epilogue_end(timeline), min(span.begin for span in _first_epilogues(timeline))
        before = [[span.begin for span in own if span.begin < begin][-LAST_K_TILES:] for own in products]
        ends.append(end - min(own[0] for own in before))
    return min(begins), max(ends)


def _first_epilogues(timeline: Timeline) -> list[Span]:
    """Return each role's first epilogue; a persistent block has several."""
    return [own[0] for role in timeline.roles if (own := spans(timeline, role, EPILOGUE))]


def _epilogue_end(timeline: Timeline) -> float:
    return max(span.end for span in _first_epilogues(timeline))


def _products(timeline: Timeline) -> list[list[Span]]:
    return [own for role in timeline.roles if (own := multiplications(timeline, role))]


def _rows(timeline: Timeline) -> list[str]:
    return [*(f"stage {stage}" for stage in range(timeline.stages)), *waiting_roles(timeline)]


def _draw(axes: Axes, timeline: Timeline, origin: float) -> None:
    """Draw one panel; times are shown since ``origin``, in ns."""
    rows = _rows(timeline)
    axes.set_ylim(len(rows), 0)
    axes.set_yticks([row + 0.5 for row in range(len(rows))], rows if origin == 0 else [""] * len(rows), fontsize=8)
    axes.tick_params(axis="y", length=0)
    draw = partial(_bars, axes, origin)
    for span in loads(timeline):
        draw([span], (span.number % timeline.stages + 0.15, 0.7), LOAD_COLOR, "load, until seen", numbered=True)
    for row, role in enumerate(waiting_roles(timeline), timeline.stages):
        products, rounding = multiplications(timeline, role), spans(timeline, role, ROUNDING)
        upper, lower = (row + 0.08, 0.44), (row + 0.56, 0.3) if products else (row + 0.15, 0.7)
        for seen, look in PRODUCTS.items():
            draw([span for span in products if span.seen == seen], upper, *look, numbered=True)
        # Where results leave in boxes, the epilogue as a whole is the time until they are stored.
        leaving = (ON_THEIR_WAY_COLOR, "results leaving") if rounding else (EPILOGUE_COLOR, "epilogue")
        draw(spans(timeline, role, EPILOGUE), lower, *leaving)
        draw(rounding, lower, EPILOGUE_COLOR, "rounded")
        draw(spans(timeline, role, BOX), lower, BOX_COLOR, "a box stored")
        draw(spans(timeline, role, FULL_WAIT), lower, FULL_COLOR, "wait for a full stage")
        draw(spans(timeline, role, EMPTY_WAIT), lower, EMPTY_COLOR, "wait for an empty stage")
        begins = [(moment - origin) * US for moment in timeline.moments(role, "piece begins").values()]
        low, high = axes.get_xlim()
        if begins := [begin for begin in begins if low <= begin <= high]:
            axes.vlines(begins, row + 0.02, row + 0.98, color="black", linewidth=1.2, label="a tile begins")


def _bars(
    axes: Axes, origin: float, found: Iterable[Span], place: Place, color: str, label: str, numbered: bool = False
) -> None:
    """Draw spans as bars of one row that lie in the panel, with their numbers where these fit."""
    low, high = axes.get_xlim()
    shown = [((s.begin - origin) * US, (s.end - s.begin) * US, s.number) for s in found]
    shown = [(begin, length, number) for begin, length, number in shown if begin < high and begin + length > low]
    if not shown:
        return
    bars = [(begin, length) for begin, length, _ in shown]
    axes.broken_barh(bars, place, facecolor=color, edgecolor="white", linewidth=0.4, label=label)
    width_inches = axes.get_subplotspec().get_position(axes.figure).width * axes.figure.get_figwidth()
    for begin, length, number in shown if numbered else ():
        left, right = max(begin, low), min(begin + length, high)
        if (right - left) / (high - low) * width_inches > DIGIT_INCHES * (len(str(number)) + 0.5):
            middle = (left + right) / 2, place[0] + place[1] / 2
            axes.text(*middle, str(number), ha="center", va="center", fontsize=6, clip_on=True)
