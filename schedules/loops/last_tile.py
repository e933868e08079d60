"""The last tile of a loop that a tile does not divide, cut short where it ends."""

from __future__ import annotations

from tvm import ir, s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import loop_extent, loop_name, loops_of
from tensorir_ladder.schedules.passes import replace_untraced, with_loop_body


def end_within_tile(sch: Schedule, outer: LoopRV, inner: LoopRV, steps: int) -> None:
    """Let a loop over tiles and one over the steps of a tile end after so many steps in all, within the last tile.

    ::

        before   for k_outer < 9:  A_shared = A[tile];  for k_inner < 32:  C += A_shared[k_inner] * ...
        after    for k_outer < 9:  A_shared = A[tile];  for k_inner < 32:
                   if k_outer · 32 + k_inner < 264:  C += A_shared[k_inner] * ...                      # steps = 264

    What is left out are multiplications by zeros, where the reduction was padded (:func:`schedules.loops.pad_to_tile`):
    sums stay as they are, bit for bit. It costs nothing where ``inner`` is written out and ``outer`` pipelined: the
    pipeline's last tiles stand behind its loop, in which TVM proves the condition true. There they have only the
    instructions that are needed. Of 264 steps by tiles of 32 that saves a twelfth of the multiply-adds: on an H200 the
    float32 product 2902 x 540 x 264 takes 0.89 of its time before.

    Each block under ``inner`` gets the condition as its predicate; without a pipeline each step asks. ``steps`` are the
    reduction's own, before it was padded, shared out among slices (:class:`schedules.recipes.WarpContraction` says how
    many): with fewer, sums would lack the rest, which cannot be seen here. Loops and blocks stay valid. Not recorded in
    the schedule's trace: call it once blocks stand where they shall, before the loop is pipelined.

    Raises
    ------
    IllegalSchedule : for an ``inner`` that is not under ``outer``; for ``steps`` that do not end within the last tile.
    """
    tiles, length = loop_extent(sch, outer), loop_extent(sch, inner)
    stmt = sch.get(inner)
    if not any(loop.same_as(stmt) for loop in loops_of(sch.get(outer).body)):
        raise IllegalSchedule(
            "the steps of a tile are under the loop over tiles",
            loop=loop_name(sch, inner),
            value=f"not under {loop_name(sch, outer)}",
            remedy="pass the outer loop first",
        )
    if not (tiles - 1) * length < steps <= tiles * length:
        raise IllegalSchedule(
            "a loop ends within its last tile",
            loop=loop_name(sch, inner),
            value=f"{steps} steps of {tiles} tiles of {length}",
            limit=f"{(tiles - 1) * length + 1} to {tiles * length}",
            remedy="pass how many of the steps there are in all",
        )
    if steps == tiles * length:
        return
    within = sch.get(outer).loop_var * length + stmt.loop_var < steps
    replace_untraced(sch, sch.get_sref(inner), with_loop_body(stmt, _under(stmt.body, within)), "end_within_tile")


def _under(stmt: tirx.Stmt, condition: ir.Expr) -> tirx.Stmt:
    """Return loops and statements whose blocks, which stay the same, run under one condition more."""
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_under(each, condition) for each in stmt.seq])
    if isinstance(stmt, tirx.For):
        return with_loop_body(stmt, _under(stmt.body, condition))
    return s_tir.SBlockRealize(stmt.iter_values, tirx.And(stmt.predicate, condition), stmt.block)
