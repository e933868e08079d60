"""The ladder's figures: one function each, from a section's records to a matplotlib figure. No files here."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tensorir_ladder.harness.records import Record
from tensorir_ladder.reports.cases import Shape, shape_label, shape_of
from tensorir_ladder.reports.counters import counted_groups, counted_name, stalls
from tensorir_ladder.reports.drawing import CUBLAS, MARKERS, PALETTE, STYLE, canvas, finish, mark, note, rounds_and_days
from tensorir_ladder.reports.selection import Results, Section, shown_gain
from tensorir_ladder.reports.table import CHOICE_TITLES, cublas_gflops, default_tiles, short_name, step_label

ROOF, PAST_CUBLAS = "#555555", "#E6EEF5"
BESIDE_OCTAVES = 0.085  # between markers of two steps at one intensity, so that none hides another
# The reasons that these kernels' warps wait for most, in the same colours in every figure.
STALLS = ("long scoreboard", "short scoreboard", "barrier", "dispatch stall", "wait", "mio throttle")


def gflops_figure(results: Results, section: Section) -> Figure:
    """Draw GFLOPS per step over the matrix size, default configuration beside the fastest, cuBLAS dashed."""

    def draw(axes: Axes, choice: str) -> None:
        lines = [section.line(step, choice) for step in section.steps]
        _draw_steps(axes, results, section, choice, lambda record: record.gflops)
        speeds = {shape[0]: cublas_gflops(lines, shape) for shape in section.sizes()}
        speeds = {size: speed for size, speed in speeds.items() if speed is not None}
        axes.plot([*speeds], [*speeds.values()], color=CUBLAS, linestyle="--", marker="x", label="cuBLAS", **STYLE)
        _mark_speeds(axes)

    return _size_panels(section, "Speed of each step", "GFLOPS (logarithmic)", draw)


def ratio_figure(results: Results, section: Section) -> Figure:
    """Draw speed relative to cuBLAS over the matrix size; the line at 1 is cuBLAS, what is past it is shaded."""

    def draw(axes: Axes, choice: str) -> None:
        axes.axhline(1.0, color=CUBLAS, linestyle="--", linewidth=1.4, label="cuBLAS")
        _draw_steps(axes, results, section, choice, lambda record: record.ratio_to_cublas)

    figure = _size_panels(section, "Speed relative to cuBLAS", "speed ÷ cuBLAS's speed, same rounds", draw)
    top = 1.12 * max([1.1, *(axes.dataLim.y1 for axes in figure.axes)])
    for axes in figure.axes:
        axes.set_ylim(0, top)
        axes.axhspan(1, top, color=PAST_CUBLAS, zorder=0)
        axes.text(0.98, 0.97, "faster than cuBLAS", transform=axes.transAxes, ha="right", va="top", fontsize=9)
    return figure


def climb_figure(results: Results, sections: Sequence[Section], sizes: Sequence[Shape]) -> Figure:
    """Draw the whole ladder in one panel: each step's ratio to cuBLAS at a few sizes, a line for each ladder."""
    figure, panels = canvas("The ladder, step by step", sections[0].gpu, height=4.6)
    (axes,) = panels
    axes.axhline(1.0, color=CUBLAS, linestyle="--", linewidth=1.4, label="cuBLAS")
    series = itertools.product(sections, sizes)
    for (section, size), color, marker in zip(series, itertools.cycle(PALETTE), itertools.cycle(MARKERS)):
        found = {step: section.line(step, "default", at=[size]).get(size) for step in section.steps}
        ratios = {step: record.ratio_to_cublas for step, record in found.items() if record}
        label = f"{section.dtype}, {shape_label(size)}³"
        axes.plot([*ratios], [*ratios.values()], color=color, marker=marker, label=label, **STYLE)
    steps = sorted({step for section in sections for step in section.steps})
    axes.set_xticks(steps, [f"{step}\n{short_name(results.step_name(step)).replace(' ', chr(10))}" for step in steps])
    axes.tick_params(axis="x", labelsize=7)
    axes.set_yscale("log")
    mark(axes.yaxis, (0.1, 0.2, 0.5, 1.0), "g")
    axes.set_ylabel("speed ÷ cuBLAS's (logarithmic)")
    low, high = axes.get_ylim()
    axes.set_ylim(low, 1.1 * high)
    axes.axhspan(1, 1.1 * high, color=PAST_CUBLAS, zorder=0)
    records = [record for section in sections for record in section.drawn()]
    return finish(figure, panels, f"Default configuration of each step. {rounds_and_days(records)}")


def gain_figure(results: Results, section: Section) -> Figure:
    """Draw the speed gained by each step over the one before, a bar per size, one panel per tile choice."""

    def lines(choice: str) -> dict[str, dict[Shape, Record]]:
        found = {step_label(results, step): section.line(step, choice) for step in section.steps}
        return {label: line for label, line in found.items() if _gains(line)}

    return _bar_panels(section, "Gain of each step over the one before", section.choices, lines)


def variants_figure(results: Results, section: Section, step: int) -> Figure:
    """Draw the speed each variant of a step gains over the step before, a bar per size that all were measured at."""

    choices = section.variant_choices(step)
    found = {choice: section.variant_lines(step, choice) for choice in choices}
    common = set.intersection(*(set(_gains(line)) for own in found.values() for line in own.values()))

    def lines(choice: str) -> dict[str, dict[Shape, Record]]:
        return {
            name.replace("_", "\n"): {shape: r for shape, r in line.items() if shape in common or not common}
            for name, line in found[choice].items()
        }

    title = f"Variants of step {step}, {short_name(results.step_name(step))}: gain over step {step - 1}"
    remark = " Sizes at which all of these variants were measured." if common else ""
    return _bar_panels(section, title, choices, lines, remark)


def roofline_figure(results: Results, section: Section, peak: dict) -> Figure:
    """Draw GFLOPS over arithmetic intensity: filled for the default tile, hollow for the fastest."""
    figure, (axes,) = canvas("Roofline", section.title, height=5.2)
    for step in section.steps:
        for choice in section.shown_choices:
            records = _verified(section, step, choice)
            style = {} if choice == "default" else {"markerfacecolor": "none"}
            label = step_label(results, step) if choice == section.shown_choices[0] else "_"
            aside = 2 ** (BESIDE_OCTAVES * (section.steps.index(step) - (len(section.steps) - 1) / 2))
            places = [aside * intensity(record) for record in records], [record.gflops for record in records]
            axes.plot(*places, linestyle="none", label=label, markersize=6.5, **step_look(step), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    compute, bandwidth = peak["peak_gflops"][section.arithmetic], peak["bandwidth_gb_s"]
    ridge, right = compute / bandwidth, 1.2 * axes.get_xlim()[1]
    left = ridge / 4
    axes.plot([left, ridge, right], [left * bandwidth, compute, compute], color=ROOF, linewidth=1.6)
    axes.set_xlim(left, right)
    note(axes, f"peak {compute:,.0f} GFLOPS", (right, compute), (-4, 4), "right")
    note(axes, f"{bandwidth:,.0f} GB/s", (left * 1.5, left * 1.5 * bandwidth), (8, -10))
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.6, high * 1.3)
    for shape in section.sizes():  # named at the foot of its column of points
        sample = next(record for record in section.records if shape_of(record) == shape)
        note(axes, f"{shape[0]}³", (intensity(sample), low / 1.6), (0, 4), "center")
    _mark_speeds(axes)
    mark(axes.xaxis, [2.0**power for power in range(16) if left <= 2**power <= right], "g")
    axes.set_xlabel("arithmetic intensity, FLOP per compulsory byte: A and B read once, C written once (logarithmic)")
    axes.set_ylabel("GFLOPS (logarithmic)")
    marks = "Steps of one size stand side by side, around their intensity. "
    marks += "Filled: default tile; hollow: fastest. " if len(section.shown_choices) > 1 else ""
    return finish(figure, [axes], marks + caption_of(_shown(section)))


def stalls_figure(results: Results, section: Section, step: int) -> Figure:
    """Draw why warps wait, before and after a step: stacked reasons, a bar per variant, a group per case."""
    groups = counted_groups(results, step, section)
    title = f"Why warps wait: {step_label(results, step)}"
    bars = [counters for group in groups for counters in group]
    figure, (axes,) = canvas(title, section.title, height=1.6 + 0.42 * len(bars))
    names = [counted_name(group, counters) for group in groups for counters in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    places = [place + 0.35 * number for place, number in enumerate(numbers)]
    others = sorted({name for c in bars for name in stalls(c)} - set(STALLS))
    starts = [0.0] * len(bars)
    for reason, color in zip([*STALLS, "other reasons"], PALETTE):
        summed = [reason] if reason in STALLS else others
        widths = [sum(stalls(c).get(part, 0.0) for part in summed) for c in bars]  # older records have fewer reasons
        axes.barh(places, widths, left=starts, color=color, edgecolor="#333333", linewidth=0.4, label=reason)
        starts = [start + width for start, width in zip(starts, widths)]
    cases = [f"{shape_of(c)[0]}³ {name}" for c, name in zip(bars, names)]
    tiles = list(dict.fromkeys(c.tile for c in bars))
    cases = [f"{case}\n{c.tile}" if len(tiles) > 1 else case for case, c in zip(cases, bars)]
    labels = [f"{case}, {c.values['time, ns'] / 1e3:,.0f} µs" for case, c in zip(cases, bars)]
    axes.set_yticks(places, labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("stalled warps per issued instruction")
    told = f"tile {tiles[0]}" if len(tiles) == 1 else "tiles differ, as named"
    return finish(figure, [axes], f"Nsight Compute, one launch each, {bars[0].gpu}; {told}.")


def _mark_speeds(axes: Axes) -> None:
    """Mark a logarithmic axis of GFLOPS at 1, 2 and 5 of each power of ten; two marks at least are in sight."""
    marks = [step * 10**power for power in range(1, 7) for step in (1, 2, 5)]
    axes.set_yscale("log")
    mark(axes.yaxis, marks, ",.0f")
    low, high = axes.get_ylim()
    if sum(low <= mark <= high for mark in marks) < 2:
        below, above = [mark for mark in marks if mark < low], [mark for mark in marks if mark > high]
        axes.set_ylim(below[-1] if below else low, above[0] if above else high)


def intensity(record: Record) -> float:
    """Count operations per byte that must move at least: A and B read once, C written once."""
    m, n, k = record.m, record.n, record.k
    moved = (m * k + k * n) * _itemsize(record.dtype) + m * n * _itemsize(record.out_dtype)
    return 2 * m * n * k / moved


def caption_of(records: Sequence[Record]) -> str:
    """Say of the records that a figure draws what was measured, with which default tiles, and when."""
    tiles = default_tiles(records)
    return (f"Default tile {tiles}. " if tiles else "") + rounds_and_days(records)


def _size_panels(section: Section, title: str, ylabel: str, draw: Callable[[Axes, str], None]) -> Figure:
    """Draw panels side by side, the default configuration and the fastest, the matrix size on a logarithmic axis."""
    figure, panels = canvas(title, section.title, height=4.9, columns=len(section.shown_choices), sharey=True)
    sizes = [shape[0] for shape in section.sizes()]
    for axes, choice in zip(panels, section.shown_choices):
        draw(axes, choice)
        axes.set_title(CHOICE_TITLES[choice], fontsize=10)
        axes.set_xscale("log", base=2)
        mark(axes.xaxis, sizes, ".0f")
        axes.set_xlim(sizes[0] / 2**0.25, sizes[-1] * 2**0.25)
        axes.set_xlabel("m = n = k (logarithmic)")
    panels[0].set_ylabel(ylabel)
    return finish(figure, panels, caption_of(_shown(section)))


def _bar_panels(
    section: Section,
    title: str,
    choices: list[str],
    lines: Callable[[str], dict[str, dict[Shape, Record]]],
    remark: str = "",
) -> Figure:
    """Draw panels one above the other, a group of bars per line, a bar per size, each with its number.

    ``remark`` ends the caption.
    """
    height = 1.4 + 2.6 * len(choices)
    figure, panels = canvas(title, section.title, height, rows=len(choices), sharey=True)
    found = {choice: lines(choice) for choice in choices}
    measured = {shape for groups in found.values() for line in groups.values() for shape in line}
    shapes = [shape for shape in section.sizes() if shape in measured]
    width, shades = 0.84 / max(1, len(shapes)), matplotlib.colormaps["Blues"](np.linspace(0.15, 1, len(shapes)))
    for axes, choice in zip(panels, choices):
        groups = found[choice]
        for index, shape in enumerate(shapes):
            offset = (index - (len(shapes) - 1) / 2) * width
            gains = {place + offset: _gains(line).get(shape) for place, line in enumerate(groups.values())}
            gains = {place: gain for place, gain in gains.items() if gain is not None}
            if gains:
                look = {"color": shades[index], "edgecolor": "#333333", "linewidth": 0.4, "label": str(shape[0])}
                bars = axes.bar([*gains], [gain / 100 for gain in gains.values()], width * 0.92, bottom=1, **look)
                labels = [f"{gain:+.0f}" if round(gain) else "0" for gain in gains.values()]
                axes.bar_label(bars, labels, rotation=90, fontsize=7, padding=2)
        axes.axhline(1, color=CUBLAS, linewidth=0.8)
        axes.set_xticks(range(len(groups)), groups, fontsize=9)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.set_title(CHOICE_TITLES[choice], fontsize=10)
        axes.set_ylabel("speed gained, % (logarithmic)")
    _scale_gains(panels[0])
    shown = [record for groups in found.values() for line in groups.values() for record in line.values()]
    return finish(figure, panels, f"A bar per m = n = k. {caption_of(shown)}{remark}")


def _scale_gains(axes: Axes) -> None:
    """Make the axis logarithmic, so that twice as fast is as far up as half as fast is down; marked in percent."""
    axes.set_yscale("log")
    low, high = min(axes.dataLim.y0, 1), max(axes.dataLim.y1, 1.05)
    room = (high / low) ** 0.28  # for the numbers at the bars' ends
    low, high = low / room if low < 1 else low, high * room
    axes.set_ylim(low, high)
    marks = [0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10]
    marks = [place for place in marks if low <= place <= high and (high < 2.5 or place not in (0.8, 0.9, 1.1, 1.2))]
    mark(axes.yaxis, marks, "g")
    axes.yaxis.set_ticklabels([f"{100 * (place - 1):+.0f}" if place != 1 else "0" for place in marks])


def _draw_steps(axes: Axes, results: Results, section: Section, choice: str, value: Callable[[Record], float]) -> None:
    for step in section.steps:
        records = _verified(section, step, choice)
        speeds = [value(record) for record in records]
        axes.plot([record.m for record in records], speeds, label=step_label(results, step), **step_look(step), **STYLE)


def step_look(step: int) -> dict[str, str]:
    """Return a step's colour and marker, the same in every figure."""
    return {"color": PALETTE[(step - 1) % len(PALETTE)], "marker": MARKERS[(step - 1) % len(MARKERS)]}


def _verified(section: Section, step: int, choice: str) -> list[Record]:
    """Return the records of a line that have a place on an axis of sizes and passed their check."""
    return [record for record in section.line(step, choice, at=section.sizes()).values() if record.verification.passed]


def _shown(section: Section) -> list[Record]:
    """List the records of the lines that a figure of the whole ladder draws."""
    return [r for choice in section.shown_choices for step in section.steps for r in _verified(section, step, choice)]


def _gains(line: dict[Shape, Record]) -> dict[Shape, float]:
    return {shape: gain for shape, record in line.items() if (gain := shown_gain(record)) is not None}


def _itemsize(dtype: str) -> int:
    return math.ceil(int(re.search(r"\d+", dtype)[0]) / 8)
