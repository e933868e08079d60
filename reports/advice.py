"""Advice on stages by workload, with reasons: a table whose every word follows from records by the rules here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tensorir_ladder.harness.records import Resources
from tensorir_ladder.reports.cases import grouped
from tensorir_ladder.reports.cells import Table, percent, span
from tensorir_ladder.reports.sweeps import TIE_PCT, StageSweep, StreamSweep, speed_gain_pct, speed_lost_pct
from tensorir_ladder.reports.templating import Markdown

Sweep = StageSweep | StreamSweep
Says = Callable[[Sequence[Sweep]], str]

# A product's class by m·n·k, a memory-bound workload's by the bytes that it moves.
SMALL_PRODUCT, MEDIUM_PRODUCT = 512**3, 1536**3
SMALL_BYTES, LARGE_BYTES = 16 * 10**6, 256 * 10**6
HIDDEN = 0.9  # of the copy's rate: a direct form that reaches it is called one whose latency is hidden


def advice_table(sweeps: Sequence[Sweep]) -> Table:
    """Make a row per workload and size class; within a row, a line per size."""
    header = ("workload", "size", "measured on", "stages", "gain over 1 stage", "gain over direct", "bound by")
    products = fastest_products([sweep for sweep in sweeps if isinstance(sweep, StageSweep)])
    streams = [sweep for sweep in sweeps if isinstance(sweep, StreamSweep)]
    groups = grouped((*products, *streams), lambda sweep: (_workload(sweep), size_class(sweep)))
    grid = [(*names, *_figures(group), reasons(group)) for names, group in groups.items()]
    note = (
        f"Stages: the fewest within {TIE_PCT:g} % of the fastest measured; gains are theirs. A product is shown with "
        f"the variant and tile that were fastest at its size. Small: up to 512³, or less than "
        f"{SMALL_BYTES // 10**6} MB moved; large: beyond 1536³, or {LARGE_BYTES // 10**6} MB and more. Direct: from "
        "global memory to registers, nothing staged.\n\n"
        "**How the last column is told**, the first that holds. No staging: the direct form is within "
        f"{TIE_PCT:g} % of the fastest staged one; from {HIDDEN:.0%} of the copy's rate on its occupancy is named. "
        f"No pipeline: 1 stage is within {TIE_PCT:g} % of the fastest. Otherwise stages pay, and the bound of the "
        "record with these stages says what explains the time."
    )
    return Table(
        "Which workload wants how many stages, and why", (*header, "what pays"), tuple(grid), Markdown(note), left=8
    )


def fastest_products(sweeps: Sequence[StageSweep]) -> list[StageSweep]:
    """Pick per step and shape the sweep that reached the highest speed, smallest product first."""
    cases = grouped(sweeps, lambda sweep: (sweep.step, math.prod(sweep.shape), sweep.shape))
    return [min(own, key=lambda sweep: sweep.times_ms[sweep.best]) for _, own in sorted(cases.items())]


def size_class(sweep: Sweep) -> str:
    """Write ``small``, ``medium`` or ``large``."""
    if isinstance(sweep, StageSweep):
        work = math.prod(sweep.shape)
        return "small" if work <= SMALL_PRODUCT else "medium" if work <= MEDIUM_PRODUCT else "large"
    return "small" if sweep.bytes_moved < SMALL_BYTES else "medium" if sweep.bytes_moved < LARGE_BYTES else "large"


def reasons(group: Sequence[Sweep]) -> str:
    """Say what pays for the sweeps of one row; sizes are named where they differ in their reason."""
    told = grouped(group, lambda sweep: next(says for holds, says in RULES if holds(sweep)))
    sentences = []
    for says, sweeps in told.items():
        named = f"{', '.join(_size(sweep) for sweep in sweeps)}: " if len(told) > 1 else ""
        sentences.append(named + says(sweeps))
    return Markdown("<br>").join(sentences)


def _direct_is_as_fast(sweep: Sweep) -> bool:
    direct = sweep.direct_ms
    return direct is not None and speed_lost_pct(direct, sweep.times_ms[sweep.best]) <= TIE_PCT


def _direct_says(sweeps: Sequence[StreamSweep]) -> str:
    gains = [speed_gain_pct(sweep.times_ms[sweep.best], sweep.direct_ms) for sweep in sweeps]
    ratios = [sweep.direct.ratio_to_copy for sweep in sweeps]
    copy = span((100 * ratio for ratio in ratios), "%")
    text = f"no staging at all: the direct form, at {copy} of the copy's rate, is {_range(gains)} against the fastest "
    text += "staged one"
    if min(ratios) < HIDDEN:
        return text
    return f"{text}; its occupancy: {_occupancy([s.direct.resources for s in sweeps])}"


def _one_says(sweeps: Sequence[Sweep]) -> str:
    best = span((speed_lost_pct(sweep.times_ms[1], sweep.times_ms[sweep.best]) for sweep in sweeps), "%", digits=1)
    used, room = [sweep.resources(1) for sweep in sweeps], ""
    if None not in used:
        blocks = span((item.blocks_per_sm for item in used), "blocks")
        room = f", with room for {blocks} per multiprocessor, occupancy {_occupancy(used)}"
    return f"no pipeline: 1 stage is within {best} of the fastest{room}"


def _bound_by(bound: str) -> Callable[[Sweep], bool]:
    return lambda sweep: sweep.bound(sweep.preferred) == bound


def _stages_pay(why: str = "") -> Says:
    return lambda sweeps: f"stages pay, {_range([sweep.gain_over_one_pct for sweep in sweeps])}{why}"


# Reasons, the first that holds: when it holds for a sweep, and what it says of all sweeps that it holds for.
RULES: tuple[tuple[Callable[[Sweep], bool], Says], ...] = (
    (_direct_is_as_fast, _direct_says),
    (lambda sweep: sweep.preferred == 1, _one_says),
    (lambda sweep: sweep.gain_over_one_pct is None, lambda _: "not known: 1 stage was not measured"),
    (_bound_by("memory"), _stages_pay("; then traffic explains at least half of the time")),
    (_bound_by("compute"), _stages_pay("; then arithmetic at its peak explains at least half of the time")),
    (_bound_by("latency"), _stages_pay("; even so neither traffic nor arithmetic explains half of the time")),
    (lambda _: True, _stages_pay()),
)


def _figures(group: Sequence[Sweep]) -> tuple[str, ...]:
    """Write sizes, stages, gains and bounds of a row, a line per size."""
    lines = [
        (
            f"{sweep.size}, {sweep.variant}, {sweep.tile}" if isinstance(sweep, StageSweep) else sweep.size,
            str(sweep.preferred),
            percent(sweep.gain_over_one_pct),
            percent(sweep.gain_over_direct_pct),
            sweep.bound(sweep.preferred),
        )
        for sweep in group
    ]
    return tuple(Markdown("<br>").join(column) for column in zip(*lines))


def _occupancy(used: Sequence[Resources]) -> str:
    return span((100 * item.occupancy for item in used), "%")


def _workload(sweep: Sweep) -> str:
    return f"matmul, step {sweep.step}" if isinstance(sweep, StageSweep) else sweep.workload


def _size(sweep: Sweep) -> str:
    return sweep.size if isinstance(sweep, StageSweep) else "x".join(map(str, sweep.shape))


def _range(gains: Sequence[float]) -> str:
    """Write ``+3.0 % to +9.1 %``, or one gain where all read alike."""
    low, high = percent(min(gains)), percent(max(gains))
    return low if low == high else f"{low} to {high}"
