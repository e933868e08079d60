"""Hardware counters of neighbouring steps, side by side: what a gain or a loss is made of."""

from __future__ import annotations

from harness.records import Counters

from .selection import Results, shape_label, shape_of
from .table import Table

STALLED = "stalled, warps per issue: "


def counters_tables(results: Results, step: int) -> list[Table]:
    """A table per case that was counted for this step and the step before, side by side."""
    return [_table(before, own) for before, own in counted_pairs(results, step)]


def counted_pairs(results: Results, step: int) -> list[tuple[Counters, Counters]]:
    """Pairs (step before, step) counted on the same case, smallest shape first."""
    pairs = [
        (before, own)
        for own in results.counters
        for before in results.counters
        if own.step == step and before.step == step - 1 and _case(before) == _case(own)
    ]
    return sorted(pairs, key=lambda pair: shape_of(pair[1]))


def stalls(counters: Counters) -> dict[str, float]:
    """Stall reasons by name, in warps per issued instruction; without those of a warp that could issue."""
    found = {name.removeprefix(STALLED): v for name, v in counters.values.items() if name.startswith(STALLED)}
    return {name: value for name, value in found.items() if name not in ("selected", "not selected")}


def _table(before: Counters, own: Counters) -> Table:
    rows = []
    for name, value in own.values.items():
        old = before.values[name]
        rows.append((name, _number(old), _number(value), f"{100 * (value / old - 1):+.0f} %" if old else "–"))
    header = ("counter", f"step {before.step}", f"step {own.step}", "change")
    note = f"One launch under Nsight Compute, {own.gpu}, revision {own.revision[:12]}: `{own.command}`."
    return Table(f"{shape_label(shape_of(own))}, tile {own.tile}", header, tuple(rows), note)


def _case(counters: Counters) -> tuple[object, ...]:
    return (counters.gpu, shape_of(counters), counters.tile, counters.dtype, counters.layout)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
