"""Drawing stage sweeps: one function per figure, from sweeps to a matplotlib figure. No files here."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tensorir_ladder.harness.records import Timing
from tensorir_ladder.reports.cases import grouped
from tensorir_ladder.reports.drawing import CUBLAS, MARKERS, PALETTE, STYLE, canvas, finish, mark, rounds_and_days
from tensorir_ladder.reports.judgement import is_held_out
from tensorir_ladder.reports.sweeps import StageSweep, StreamSweep
from tensorir_ladder.reports.table import gflops

MEASURED, MODEL, TRITON, CHOSEN = PALETTE[4], PALETTE[0], PALETTE[2], PALETTE[3]
COLUMNS = 3
# Points by whether their shape was held out; the legend keeps the look of the last.
LOOKS = {True: {"marker": "^", "markerfacecolor": "none", "markeredgewidth": 1.4}, False: {"marker": "o"}}


def speed_figure(sweeps: Sequence[StageSweep]) -> Figure:
    """Draw speed over stages, a panel per shape: measured with spread, model, cuBLAS, Triton's sweep."""

    def draw(axes: Axes, sweep: StageSweep) -> None:
        _draw_cublas(axes, sweep)
        if times := triton_sweep(sweep):
            speeds = [gflops(sweep.shape, time) for time in times.values()]
            axes.plot([*times], speeds, color=TRITON, marker="s", linestyle=":", label="Triton by num_stages", **STYLE)
        _draw_forecast(axes, sweep)
        _draw_measured(axes, sweep, partial(gflops, sweep.shape), MEASURED, "o", "measured")

    case = sweeps[0].case
    caption = f"{case[0].upper()}{case[1:]}. Bars: quartiles of the rounds. {_when(sweeps)}"
    return _panels("Speed over stages", sweeps, "GFLOPS", draw, caption)


def stage_variants_figure(sweeps: Sequence[StageSweep]) -> Figure:
    """Draw speed over stages of one step's variants with one tile, a panel per shape."""
    names = dict.fromkeys(sweep.variant for sweep in sweeps)  # in order, the default first
    looks = dict(zip(names, zip(itertools.cycle(PALETTE), itertools.cycle(MARKERS))))
    shapes = grouped(sorted(sweeps, key=lambda sweep: math.prod(sweep.shape)), lambda sweep: sweep.shape)

    def draw(axes: Axes, first: StageSweep) -> None:
        _draw_cublas(axes, first)
        for sweep in shapes[first.shape]:
            _draw_measured(axes, sweep, partial(gflops, sweep.shape), *looks[sweep.variant], sweep.variant)

    firsts = [own[0] for own in shapes.values()]
    caption = f"Step {sweeps[0].step}, tile {sweeps[0].tile}. Bars: quartiles of the rounds. {_when(sweeps)}"
    return _panels("Variants over stages", firsts, "GFLOPS", draw, caption)


def prediction_figure(sweeps: Sequence[StageSweep]) -> Figure:
    """Draw predicted against measured time of every swept point, held-out shapes marked apart."""
    figure, (axes,) = canvas("Predicted against measured time", sweeps[0].section.title, height=6.2)
    ends: list[float] = []
    for place, stages in enumerate(sorted({stages for sweep in sweeps for stages in sweep.times_ms})):
        color, label = PALETTE[place % len(PALETTE)], f"{stages} stage{'s' * (stages > 1)}"
        for held_out, look in LOOKS.items():
            own = [sweep for sweep in sweeps if is_held_out(sweep) == held_out and stages in sweep.times_ms]
            known = [(s.predicted_ms(stages), s.times_ms[stages]) for s in own if s.predicted_ms(stages) is not None]
            if known:
                predicted, measured = ([1e3 * milliseconds for milliseconds in column] for column in zip(*known))
                axes.plot(predicted, measured, linestyle="none", color=color, label=label, markersize=6, **look)
                ends += [*predicted, *measured]
    span = [0.8 * min(ends), 1.25 * max(ends)]
    axes.plot(span, span, color=CUBLAS, linewidth=1.0, label="equal")
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        mark(axis, [step * 10**power for power in range(-1, 7) for step in (1, 3)], ",g")
    axes.set_xlabel("predicted time of one launch, µs (logarithmic)")
    axes.set_ylabel("measured time of one launch, µs (logarithmic)")
    cases = ", ".join(dict.fromkeys(f"step {sweep.step} {sweep.variant}" for sweep in sweeps if sweep.forecast))
    marks = "Filled circles: development shapes; hollow triangles: held out."
    return finish(figure, [axes], f"{cases[0].upper()}{cases[1:]}; every tile and shape. {marks} {_when(sweeps)}")


def streams_figure(sweeps: Sequence[StreamSweep]) -> Figure:
    """Draw bandwidth over stages of memory-bound workloads, a panel per workload and size; the copy is the line."""

    def draw(axes: Axes, sweep: StreamSweep) -> None:
        axes.axhline(sweep.copy_gb_s, color=CUBLAS, linestyle="--", linewidth=1.4, label="copy of as many bytes")
        if sweep.torch_gb_s:
            axes.axhline(sweep.torch_gb_s, color=TRITON, linestyle=":", linewidth=1.8, label="torch's operator")
        if sweep.direct:
            axes.axhline(sweep.direct.gb_s, color=CHOSEN, linestyle="-.", linewidth=1.4, label="direct, nothing staged")
        _draw_measured(axes, sweep, sweep.bandwidth_gb_s, MEASURED, "o", "staged")

    caption = f"Bytes: every input read once, every output written once. Bars: quartiles of the rounds. {_when(sweeps)}"
    return _panels("Memory-bound workloads over stages", sweeps, "GB/s", draw, caption)


def triton_sweep(sweep: StageSweep) -> dict[int, float]:
    """Return Triton's time by its num_stages: the median over the records whose rounds it shared."""
    peers = [peer for record in sweep.records for peer in record.peers if peer.timing is not None]
    found = [(match, peer) for peer in peers if (match := re.fullmatch(r"triton-(\d+)stages?", peer.name))]
    counts = grouped(found, lambda pair: int(pair[0][1]))
    return {n: statistics.median(peer.timing.median_ms for _, peer in pairs) for n, pairs in sorted(counts.items())}


def _draw_cublas(axes: Axes, sweep: StageSweep) -> None:
    axes.axhline(gflops(sweep.shape, sweep.cublas_ms), color=CUBLAS, linestyle="--", linewidth=1.4, label="cuBLAS")


def _draw_forecast(axes: Axes, sweep: StageSweep) -> None:
    """Draw the model's curve up to the deepest stage count measured, and a ring where it recommends to stop."""
    forecast = sweep.forecast
    if forecast is None:
        return
    times = forecast.time_ms[: max(record.stages for record in sweep.records)]
    speeds = [gflops(sweep.shape, time) for time in times]
    axes.plot(range(1, len(times) + 1), speeds, color=MODEL, marker="", label="model", linewidth=1.8)
    if forecast.recommended in sweep.times_ms:
        place, speed = forecast.recommended, gflops(sweep.shape, sweep.times_ms[forecast.recommended])
        ring = {"markerfacecolor": "none", "markeredgewidth": 2.0, "markersize": 13, "linestyle": "none"}
        axes.plot([place], [speed], marker="o", color=CHOSEN, label="recommended by the model", **ring)


def _draw_measured(
    axes: Axes, sweep: StageSweep | StreamSweep, rate: Callable[[float], float], color: str, marker: str, label: str
) -> None:
    """Draw medians as points, quartiles as bars; ``rate`` turns milliseconds into the axis's unit."""
    timings = {record.stages: record.timing for record in sweep.records if record.verification.passed}
    middle = [rate(timing.median_ms) for timing in timings.values()]
    quartiles = [_quartiles(timing) for timing in timings.values()]
    below = [max(0.0, value - rate(high)) for value, (_, high) in zip(middle, quartiles)]
    above = [max(0.0, rate(low) - value) for value, (low, _) in zip(middle, quartiles)]
    bars = {"elinewidth": 1.2, "capsize": 3}
    axes.errorbar([*timings], middle, [below, above], color=color, marker=marker, label=label, **bars, **STYLE)


def _panels(
    title: str,
    sweeps: Sequence[StageSweep] | Sequence[StreamSweep],
    unit: str,
    draw: Callable[[Axes, StageSweep | StreamSweep], None],
    caption: str,
) -> Figure:
    """Draw a panel per sweep, stages from left to right, speed from zero: a small gain must look small."""
    workloads = Counter(sweep.workload for sweep in sweeps if isinstance(sweep, StreamSweep))
    columns = max(workloads.values()) if workloads else min(COLUMNS, len(sweeps))
    rows = math.ceil(len(sweeps) / columns)
    figure, panels = canvas(title, sweeps[0].section.title, 1.9 + 2.3 * rows, rows, columns)
    for axes, sweep in zip(panels, sweeps):
        draw(axes, sweep)
        name = f"{sweep.workload}\n{sweep.size}" if isinstance(sweep, StreamSweep) else sweep.size
        held_out = isinstance(sweep, StageSweep) and is_held_out(sweep)
        axes.set_title(name + (" (held out)" if held_out else ""), fontsize=10)
        axes.set_ylim(bottom=0, top=1.12 * axes.dataLim.y1)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    deepest = round(max(axes.dataLim.x1 for axes in panels[: len(sweeps)]))  # Triton's sweep may go deeper than ours
    for place, axes in enumerate(panels):
        axes.set_xlim(0.6, deepest + 0.4)
        axes.set_xticks(range(1, deepest + 1))
        if place >= len(sweeps):
            axes.set_visible(False)
        if place % columns == 0:
            axes.set_ylabel(unit)
        if place + columns >= len(sweeps):
            axes.set_xlabel("stages")
    return finish(figure, panels[: len(sweeps)], caption)


def _quartiles(timing: Timing) -> tuple[float, float]:
    if len(timing.samples_ms) < 2:
        return timing.median_ms, timing.median_ms
    low, _, high = statistics.quantiles(timing.samples_ms, n=4)
    return low, high


def _when(sweeps: Sequence[StageSweep] | Sequence[StreamSweep]) -> str:
    return rounds_and_days([record for sweep in sweeps for record in sweep.everything])
