"""Advice on stages by workload, with reasons: a table whose every word follows from records by the rules here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorir_ladder.harness.records import Resources
from tensorir_ladder.reports.sweeps import TIE_PCT, StageSweep, StreamSweep, speed_gain_pct, speed_lost_pct
from tensorir_ladder.reports.table import Table, percent, span

Sweep = StageSweep | StreamSweep

# A product's class by m·n·k, a memory-bound workload's by the bytes that it moves.
SMALL_PRODUCT, MEDIUM_PRODUCT = 512**3, 1536**3
SMALL_BYTES, LARGE_BYTES = 16 * 10**6, 256 * 10**6
HIDDEN = 0.9  # of the copy's rate: a direct form that reaches it is called one whose latency is hidden

BOUNDS = (
    "**How the bound is told.** Each record says what bounds it, by `bound()` of harness/models/time.py. Two times "
    "that a kernel cannot undercut are worked out: its operations at the arithmetic peak (compute), and its traffic "
    "(memory), which is the larger of compulsory bytes at the bandwidth of device memory and, where operands are asked "
    "for again from shared memory or the first-level cache, those accesses at 128 bytes a clock and multiprocessor. "
    "The larger time is the bound if it explains at least half of the measured one; if neither does, the kernel waits: "
    "latency."
)


@dataclass(frozen=True)
class Rule:
    """One reason: when it holds for a sweep, and what it says of all sweeps it holds for, in their figures."""

    holds: Callable[[Sweep], bool]
    says: Callable[[Sequence[Sweep]], str]


def advice_table(products: Sequence[StageSweep], streams: Sequence[StreamSweep]) -> Table:
    """A row per workload and size class; within a row, a line per size."""
    header = ("workload", "size", "measured on", "stages", "gain over 1 stage", "gain over direct", "bound by")
    groups: dict[tuple[str, str], list[Sweep]] = {}
    for sweep in (*fastest_products(products), *streams):
        groups.setdefault((_workload(sweep), size_class(sweep)), []).append(sweep)
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
    return Table("Which workload wants how many stages, and why", (*header, "what pays"), tuple(grid), note, left=8)


def fastest_products(sweeps: Sequence[StageSweep]) -> list[StageSweep]:
    """Per step and shape the sweep that reached the highest speed, smallest product first."""
    found: dict[tuple, StageSweep] = {}
    for sweep in sweeps:
        case = (sweep.step, math.prod(sweep.shape), sweep.shape)
        rival = found.get(case)
        if rival is None or sweep.times_ms[sweep.best] < rival.times_ms[rival.best]:
            found[case] = sweep
    return [sweep for _, sweep in sorted(found.items(), key=lambda item: item[0])]


def copy_rate_sentence(sweeps: Sequence[StreamSweep]) -> str:
    """Count the large memory-bound workloads that come near the copy's rate, and name those that do not."""
    large = [sweep for sweep in sweeps if size_class(sweep) == "large"]
    if not large:
        return ""
    missed = [sweep for sweep in large if sweep.best_ratio_to_copy < HIDDEN]
    names = "; ".join(f"{sweep.workload} {_size(sweep)}: {sweep.best_ratio_to_copy:.1%}" for sweep in missed)
    text = f"Of {len(large)} cases that move {LARGE_BYTES // 10**6} MB or more, {len(large) - len(missed)} reach "
    return f"{text}{HIDDEN:.0%} of the copy's rate{'; the others: ' + names if missed else ''}."


def size_class(sweep: Sweep) -> str:
    """``small``, ``medium`` or ``large``."""
    if isinstance(sweep, StageSweep):
        work = math.prod(sweep.shape)
        return "small" if work <= SMALL_PRODUCT else "medium" if work <= MEDIUM_PRODUCT else "large"
    return "small" if sweep.bytes_moved < SMALL_BYTES else "medium" if sweep.bytes_moved < LARGE_BYTES else "large"


def reasons(group: Sequence[Sweep]) -> str:
    """Say what pays for the sweeps of one row; sizes are named where they differ in their reason."""
    told: dict[int, list[Sweep]] = {}
    for sweep in group:
        told.setdefault(next(place for place, rule in enumerate(RULES) if rule.holds(sweep)), []).append(sweep)
    sentences = []
    for place, sweeps in told.items():
        named = f"{', '.join(_size(sweep) for sweep in sweeps)}: " if len(told) > 1 else ""
        sentences.append(named + RULES[place].says(sweeps))
    return "<br>".join(sentences)


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


def _one_is_enough(sweep: Sweep) -> bool:
    return sweep.preferred == 1


def _one_says(sweeps: Sequence[Sweep]) -> str:
    best = span((speed_lost_pct(sweep.times_ms[1], sweep.times_ms[sweep.best]) for sweep in sweeps), "%", digits=1)
    return f"no pipeline: 1 stage is within {best} of the fastest{_residency(sweeps, 1)}"


def _one_is_unknown(sweep: Sweep) -> bool:
    return sweep.gain_over_one_pct is None


def _stages_pay(bound: str, left: str) -> Rule:
    def says(sweeps: Sequence[Sweep]) -> str:
        return f"stages pay, {_range([sweep.gain_over_one_pct for sweep in sweeps])}; {left}"

    return Rule(lambda sweep: sweep.bound(sweep.preferred) == bound, says)


RULES = (
    Rule(_direct_is_as_fast, _direct_says),
    Rule(_one_is_enough, _one_says),
    Rule(_one_is_unknown, lambda _: "not known: 1 stage was not measured"),
    _stages_pay("memory", "then traffic explains at least half of the time"),
    _stages_pay("compute", "then arithmetic at its peak explains at least half of the time"),
    _stages_pay("latency", "even so neither traffic nor arithmetic explains half of the time"),
    Rule(lambda _: True, lambda sweeps: f"stages pay, {_range([sweep.gain_over_one_pct for sweep in sweeps])}"),
)


def _figures(group: Sequence[Sweep]) -> tuple[str, ...]:
    """Sizes, stages, gains and bounds of a row, a line per size."""
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
    return tuple("<br>".join(column) for column in zip(*lines))


def _residency(sweeps: Sequence[Sweep], stages: int) -> str:
    """Blocks per multiprocessor and occupancy of sweeps, where all of them are known."""
    used = [sweep.resources(stages) for sweep in sweeps]
    if None in used:
        return ""
    blocks = span((item.blocks_per_sm for item in used), "blocks")
    return f", with room for {blocks} per multiprocessor, occupancy {_occupancy(used)}"


def _occupancy(used: Sequence[Resources]) -> str:
    return span((100 * item.occupancy for item in used), "%")


def _workload(sweep: Sweep) -> str:
    return f"matmul, step {sweep.step}" if isinstance(sweep, StageSweep) else sweep.workload


def _size(sweep: Sweep) -> str:
    return sweep.size if isinstance(sweep, StageSweep) else "x".join(map(str, sweep.shape))


def _range(gains: Sequence[float]) -> str:
    """``+3.0 % to +9.1 %``, or one gain where all read alike."""
    low, high = percent(min(gains)), percent(max(gains))
    return low if low == high else f"{low} to {high}"
