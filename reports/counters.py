"""Hardware counters of neighbouring steps, side by side: what a gain or a loss is made of."""

from __future__ import annotations

from tensorir_ladder.harness.records import Counters
from tensorir_ladder.reports.cases import grouped, natural, shape_label, shape_of
from tensorir_ladder.reports.cells import Table, number, percent
from tensorir_ladder.reports.selection import Results, Section
from tensorir_ladder.reports.templating import Markdown, code

STALLED = "stalled, warps per issue: "
TENSOR, TENSOR_BUSY = "tensor pipe: ", "tensor pipe busy, %"


def counters_tables(results: Results, step: int, section: Section) -> list[Table]:
    """Make a table per case of a section that was counted for this step and the step before, side by side.

    Counters that only one of them has stand beside a dash.
    """
    return [_table(group, step) for group in counted_groups(results, step, section)]


def counted_groups(results: Results, step: int, section: Section) -> list[list[Counters]]:
    """Group the step before and this step's variants, counted on the same case, smallest shape first.

    The step before is shown with the same tile, or with another where it was counted with that one alone, and by its
    default variant, or by the only one counted. A ladder's first step stands alone.
    """
    groups = []
    place = (section.gpu, section.dtype, section.layout)
    counted_here = [c for c in results.counters if (c.gpu, c.dtype, c.layout) == place]
    own = [c for c in counted_here if c.step == step]
    for (shape, tile), variants in grouped(own, lambda counted: (shape_of(counted), counted.tile)).items():
        earlier = [c for c in counted_here if c.step == step - 1 and shape_of(c) == shape]
        earlier = [c for c in earlier if c.tile == tile] or earlier
        usual = [c for c in earlier if c.variant == results.default_variant(step - 1)] or earlier[:1]
        default = results.default_variant(step)
        variants.sort(key=lambda counted: (counted.variant != default, natural(counted.variant)))
        first = step - 1 not in section.steps
        groups += [[*usual[:1], *variants]] if usual or first else []
    return sorted(groups, key=lambda group: (shape_of(group[-1]), group[-1].tile))


def counted_name(group: list[Counters], counted: Counters) -> str:
    """Write ``step 5``, or with its variant where a group has several of the step."""
    several = sum(other.step == counted.step for other in group) > 1
    return f"step {counted.step} {counted.variant}" if several else f"step {counted.step}"


def stalls(counters: Counters) -> dict[str, float]:
    """Return the stall reasons by name, in warps per issued instruction; without those of a warp that could issue."""
    found = {name.removeprefix(STALLED): v for name, v in counters.values.items() if name.startswith(STALLED)}
    return {name: value for name, value in found.items() if name not in ("selected", "not selected")}


def shown_values(counted: Counters) -> dict[str, float]:
    """Return a case's counters by name, without instructions of a tensor pipe that was never busy.

    The hardware's counter of them counts some instructions of every warp, also of kernels that multiply in float32.
    """
    idle = not counted.values.get(TENSOR_BUSY)
    return {name: value for name, value in counted.values.items() if not (idle and name.startswith(TENSOR))}


def _table(group: list[Counters], step: int) -> Table:
    before = group[0] if group[0].step < step else None
    own = [counted for counted in group if counted.step == step]
    header = ["counter", *([f"step {before.step}"] if before else [])]
    for counted in own:
        header += [counted_name(group, counted), *(["change"] if before else [])]
    rows = []
    for name in dict.fromkeys(name for counted in (*own, *group) for name in shown_values(counted)):
        old = shown_values(before).get(name) if before else None
        cells = [_number(old)] if before else []
        for counted in own:
            value = shown_values(counted).get(name)
            change = 100 * (value / old - 1) if old and value is not None else None
            cells += [_number(value), *([percent(change, "+.0f")] if before else [])]
        rows.append((name, *cells))
    tiles = {counted.tile: counted.step for counted in group}
    case = f"tile {own[0].tile}" if len(tiles) == 1 else ", ".join(f"step {n} tile {tile}" for tile, n in tiles.items())
    commands = dict.fromkeys(Markdown("revision {}: {}").format(c.revision[:12], code(c.command)) for c in own)
    note = Markdown("One launch under Nsight Compute, {}, {}.").format(own[0].gpu, Markdown("; ").join(commands))
    return Table(f"{shape_label(shape_of(own[0]))}, {case}", tuple(header), tuple(rows), note)


def _number(value: float | None) -> str:
    return number(value, ",.0f" if value is not None and abs(value) >= 1000 else ".2f")
