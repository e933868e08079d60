"""Hardware counters of neighbouring steps, side by side: what a gain or a loss is made of."""

from __future__ import annotations

from collections.abc import Sequence

from tensorir_ladder.harness.records import Counters
from tensorir_ladder.reports.selection import Results, Section, natural, shape_label, shape_of
from tensorir_ladder.reports.table import Table

STALLED = "stalled, warps per issue: "
CEILING = "its instruction's ceiling, GFLOPS"
TENSOR_PIPE, TENSOR_INSTRUCTIONS = "tensor pipe busy, %", "tensor pipe: warps' instructions"
CONFLICTS_OF_LOADS = "bank conflicts of loads"
LARGEST_STALLS = 3


def counters_tables(results: Results, step: int, section: Section) -> list[Table]:
    """A table per case of a section that was counted for this step and the step before, side by side.

    Behind it, where the tensor pipe was counted, one of what separates them from their instruction's ceiling.
    """
    tables = []
    for group in counted_groups(results, step, section):
        before = group[0] if group[0].step < step else None
        tables.append(_table(before, *(counted for counted in group if counted.step == step)))
        if all(CEILING in counted.values and TENSOR_PIPE in counted.values for counted in group):
            tables.append(_ceiling_table(group))
    return tables


def counted_groups(results: Results, step: int, section: Section) -> list[list[Counters]]:
    """The step before, then this step's variants, counted on the same case: a group per case, smallest shape first.

    The step before is shown with the same tile, or with another where it was counted with that one alone, and by its
    default variant, or by the only one counted. A ladder's first step stands alone.
    """
    groups = []
    place = (section.gpu, section.dtype, section.layout)
    counted_here = [c for c in results.counters if (c.gpu, c.dtype, c.layout) == place]
    own = [c for c in counted_here if c.step == step]
    for case in sorted({_case(counted) for counted in own}, key=str):
        shape, tile = case
        earlier = [c for c in counted_here if c.step == step - 1 and shape_of(c) == shape]
        earlier = [c for c in earlier if c.tile == tile] or earlier
        usual = [c for c in earlier if c.variant == results.default_variant(step - 1)] or earlier[:1]
        variants = [counted for counted in own if _case(counted) == case]
        default = results.default_variant(step)
        variants.sort(key=lambda counted: (counted.variant != default, natural(counted.variant)))
        first = step - 1 not in section.steps
        groups += [[*usual[:1], *variants]] if usual or first else []
    return sorted(groups, key=lambda group: (shape_of(group[-1]), group[-1].tile))


def counted_name(group: list[Counters], counted: Counters) -> str:
    """``step 5``, or with its variant where a group has several of the step."""
    several = sum(other.step == counted.step for other in group) > 1
    return f"step {counted.step} {counted.variant}" if several else f"step {counted.step}"


def stalls(counters: Counters) -> dict[str, float]:
    """Stall reasons by name, in warps per issued instruction; without those of a warp that could issue."""
    found = {name.removeprefix(STALLED): v for name, v in counters.values.items() if name.startswith(STALLED)}
    return {name: value for name, value in found.items() if name not in ("selected", "not selected")}


def _table(before: Counters | None, *own: Counters) -> Table:
    """Counters of the step before and of this step's variants; those that only one of them has stand beside a dash."""
    rows = []
    group = [before, *own] if before else [*own]
    for name in dict.fromkeys(name for counted in (*own, *group) for name in counted.values):
        old = before.values.get(name) if before else None
        cells = [_number(old)] if before else []
        for counted in own:
            value = counted.values.get(name)
            change = f"{100 * (value / old - 1):+.0f} %" if old and value is not None else "–"
            cells += [_number(value), change] if before else [_number(value)]
        rows.append((name, *cells))
    names = [counted_name(group, counted) for counted in own]
    header = ("counter", *([f"step {before.step}"] if before else []))
    header += tuple(heading for name in names for heading in ((name, "change") if before else (name,)))
    return Table(_title(group), header, tuple(rows), _note(own))


def _ceiling_table(group: list[Counters]) -> Table:
    """Compare kernels with what their matrix instruction reaches alone, a column each."""
    columns = [_from_ceiling(counted) for counted in group]
    rows = tuple((name, *(column[name] for column in columns)) for name in columns[0])
    header = ("", *(counted_name(group, counted) for counted in group))
    note = (
        "The ceiling is that of the instruction alone, operands in registers (mma.sync) or in shared memory (wgmma), "
        "as `ladder microbench` measured it. A warp's instruction of the tensor pipe is one mma.sync, or "
        f"a warp's part of one wgmma. {_note(group)}"
    )
    return Table(f"{_title(group)}: from the ceiling of its instruction", header, rows, note)


def _from_ceiling(counted: Counters) -> dict[str, str]:
    """Tell how far a kernel is from its ceiling, and what its warps do beside the matrix instructions."""
    values = counted.values
    speed = 2 * counted.m * counted.n * counted.k / values["time, ns"]
    # wgmma is counted under gmma alone, or under both, by the profiler's release.
    matrix = max((value for name, value in values.items() if name.startswith(TENSOR_INSTRUCTIONS)), default=0.0)
    reasons = sorted(stalls(counted).items(), key=lambda reason: -reason[1])[:LARGEST_STALLS]
    loads, conflicts = (values.get(f"shared memory: {name}") for name in ("accesses by loads", CONFLICTS_OF_LOADS))
    return {
        "speed under the profiler, GFLOPS": _number(speed),
        "ceiling, GFLOPS": _number(values[CEILING]),
        "share of the ceiling": f"{100 * speed / values[CEILING]:.0f} %",
        "tensor pipe busy": _percent(values[TENSOR_PIPE]),
        "issue slots busy": _percent(values.get("issue slots busy, %")),
        "other instructions for each of the tensor pipe": _per(values.get("instructions issued"), matrix, less=1),
        "accesses to shared memory by loads for each": _per(loads, matrix),
        "of these, bank conflicts": _percent(100 * conflicts / loads if loads else None),
        "shared memory's pipe busy": _percent(values.get("shared memory: pipe busy, %")),
        "L2 hit rate": _percent(values.get("L2: hit rate, %")),
        "device memory busy": _percent(values.get("device memory: busy, %")),
        "warps wait most for (warps per issue)": ", ".join(f"{name} {value:.2f}" for name, value in reasons),
    }


def _note(own: Sequence[Counters]) -> str:
    commands = dict.fromkeys(f"revision {c.revision[:12]}: `{c.command}`" for c in own)
    return f"One launch under Nsight Compute, {own[0].gpu}, {'; '.join(commands)}."


def _title(group: list[Counters]) -> str:
    """Shape and tile; each step's own tile where they differ."""
    tiles = {counted.tile: counted.step for counted in group}
    if len(tiles) == 1:
        return f"{shape_label(shape_of(group[0]))}, tile {group[0].tile}"
    return f"{shape_label(shape_of(group[0]))}, " + ", ".join(f"step {n} tile {tile}" for tile, n in tiles.items())


def _case(counters: Counters) -> tuple[tuple[int, int, int], str]:
    return shape_of(counters), counters.tile


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


def _per(count: float | None, each: float, less: float = 0.0) -> str:
    return _number(count / each - less) if count is not None and each else "–"
