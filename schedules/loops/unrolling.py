"""Unrolling loops by a factor."""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.arguments import SerialLoop
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import loop_extent, loop_name


def unroll_loop(sch: Schedule, loop: SerialLoop, factor: int | None = None) -> int:
    """Write out ``factor`` iterations of a loop in a row; ``None`` writes out all.

    ::

        before   for k < 16:  body(k)                                                    # factor = 4
        after    for k_outer < 4:  body(4·k_outer); body(4·k_outer + 1); ... body(4·k_outer + 3)

    Indices become constants, loads of one row can be merged into vectors, and the compiler can move
    loads above arithmetic. The factor is lowered to the largest divisor of the trip count that does not
    exceed it, so that no iteration needs a predicate. Returns the factor applied.

    Raises
    ------
    IllegalSchedule : if ``factor`` is below 1.
    """
    extent = loop_extent(sch, loop)
    if factor is not None and factor < 1:
        raise IllegalSchedule(
            "unroll factor below 1",
            loop=loop_name(sch, loop),
            value=factor,
            limit="at least 1",
            remedy="give 1 to leave the loop alone, None to unroll all of it",
        )
    applied = extent if factor is None else max(d for d in range(1, min(factor, extent) + 1) if extent % d == 0)
    if applied == extent:
        sch.unroll(loop)
    elif applied > 1:
        _, inner = sch.split(loop, [None, applied])
        sch.unroll(inner)
    return applied
