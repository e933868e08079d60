"""Hardware counters of neighbouring steps, side by side: what a gain or a loss is made of."""

from __future__ import annotations

from harness.records import Counters

from .selection import Results, Section, natural, shape_label, shape_of
from .table import Table

STALLED = "stalled, warps per issue: "


def counters_tables(results: Results, step: int, section: Section) -> list[Table]:
    """A table per case of a section that was counted for this step and the step before, side by side."""
    return [_table(*group) for group in counted_groups(results, step, section)]


def counted_groups(results: Results, step: int, section: Section) -> list[list[Counters]]:
    """The step before, then this step's variants, counted on the same case: a group per case, smallest shape first.

    The step before is shown by its default variant, as its listing names it, or by the only one counted.
    """
    groups = []
    place = (section.gpu, section.dtype, section.layout)
    own = [c for c in results.counters if c.step == step and (c.gpu, c.dtype, c.layout) == place]
    for case in sorted({_case(counted) for counted in own}, key=str):
        earlier = [c for c in results.counters if c.step == step - 1 and _case(c) == case]
        usual = [c for c in earlier if c.variant == _default_variant(results, step - 1)] or earlier[:1]
        variants = [counted for counted in own if _case(counted) == case]
        default = _default_variant(results, step)
        variants.sort(key=lambda counted: (counted.variant != default, natural(counted.variant)))
        groups += [[*usual, *variants]] if usual else []
    return sorted(groups, key=lambda group: (shape_of(group[0]), group[0].tile))


def counted_name(group: list[Counters], counted: Counters) -> str:
    """``step 5``, or with its variant where a group has several of the step."""
    several = sum(other.step == counted.step for other in group) > 1
    return f"step {counted.step} {counted.variant}" if several else f"step {counted.step}"


def _default_variant(results: Results, step: int) -> str:
    listing = results.listing(step)
    return listing.variant if listing else ""


def stalls(counters: Counters) -> dict[str, float]:
    """Stall reasons by name, in warps per issued instruction; without those of a warp that could issue."""
    found = {name.removeprefix(STALLED): v for name, v in counters.values.items() if name.startswith(STALLED)}
    return {name: value for name, value in found.items() if name not in ("selected", "not selected")}


def _table(before: Counters, *own: Counters) -> Table:
    rows = []
    for name, old in before.values.items():
        cells = [_number(old)]
        for counted in own:
            value = counted.values[name]
            cells += [_number(value), f"{100 * (value / old - 1):+.0f} %" if old else "–"]
        rows.append((name, *cells))
    names = [counted_name([before, *own], counted) for counted in own]
    header = ("counter", f"step {before.step}", *(heading for name in names for heading in (name, "change")))
    commands = dict.fromkeys(f"revision {c.revision[:12]}: `{c.command}`" for c in own)
    note = f"One launch under Nsight Compute, {before.gpu}, {'; '.join(commands)}."
    return Table(f"{shape_label(shape_of(before))}, tile {before.tile}", header, tuple(rows), note)


def _case(counters: Counters) -> tuple[object, ...]:
    return (counters.gpu, shape_of(counters), counters.tile, counters.dtype, counters.layout)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
