"""The order of a thread's own multiply-adds, and keeping it.

A multiply-add reads three registers, and the register file of the GPUs measured here (sm_90) gives one instruction
one register from its even half and one from its odd half per cycle. What the instruction before it read in the same
operand need not be read again, if it stands in the operand's *reuse cache*. So a run of multiply-adds is fast if each
shares an operand with the one before::

    row by row       a0·b0  a0·b1  a0·b2  a0·b3 | a1·b0  a1·b1 ...      both operands change at the end of each row
    serpentine       a0·b0  a0·b1  a0·b2  a0·b3 | a1·b3  a1·b2 ...      one operand changes at each step

The compiler's optimizer would reorder all this for latency, and undo it: it has to be told not to
(:func:`required_ptxas_options`).
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import annotated_loops, loop_extent, loop_name
from tensorir_ladder.schedules.passes import require_pipeline, with_loop_body

SERPENTINE = "serpentine"


def walk_serpentine(sch: Schedule, loop: LoopRV) -> None:
    """Let the loops inside ``loop`` run backwards in every other iteration.

    ::

        before   for row < 8:  for column < 8:  C[row, column] += A[row] * B[column]
        after    for row < 8:  for column < 8:  C[row, c] += A[row] * B[c]     # c = column, 7 - column in odd rows

    Changes nothing but the order, when the function is lowered (:func:`lower_serpentines`).

    Raises
    ------
    IllegalSchedule : unless loops over independent outputs of one block, one inside the other, are all there is inside
        ``loop``.
    """
    name, inner = loop_name(sch, loop), _nest(sch.get(loop))
    realize = inner[-1].body if inner else None
    if not isinstance(realize, s_tir.SBlockRealize) or any(_sums_over(realize, other) for other in inner):
        raise IllegalSchedule(
            "loops over independent outputs, one inside the other, can be walked in another order, and nothing else",
            loop=name,
            value=f"{len(inner)} loops inside {loop_extent(sch, loop)} iterations",
            remedy="reorder reductions outside of this loop",
        )
    require_pipeline(sch, "loops walked serpentine")
    sch.annotate(loop, SERPENTINE, 1)


def lower_serpentines(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Write the indices of the loops that :func:`walk_serpentine` marked; part of the lowering pipeline."""
    return tvm_ffi.structural_map(function, (tirx.For, _reversed_when_odd))


def required_ptxas_options(mod: ir.IRModule | tirx.PrimFunc) -> tuple[str, ...]:
    """Return the options of CUDA's assembler without which a schedule's order of instructions is lost; often none.

    For loops walked serpentine ``-O1``: at its other levels ptxas moves multiply-adds across rows.
    """
    return ("-O1",) if any(True for _ in annotated_loops(mod, SERPENTINE)) else ()


def _nest(loop: tirx.For) -> list[tirx.For]:
    """Return the loops inside a loop, as far as each is all that the one around it does."""
    found, body = [], loop.body
    while isinstance(body, tirx.For):
        found.append(body)
        body = body.body
    return found


def _sums_over(realize: s_tir.SBlockRealize, loop: tirx.For) -> bool:
    """Look for a loop in what a block's reductions are bound to, and among its own loops."""
    found: list[bool] = []
    tvm_ffi.structural_walk(realize.block.body, (tirx.For, lambda own: found.append(True)))
    for iterator, value in zip(realize.block.iter_vars, realize.iter_values):
        if iterator.iter_type != tirx.IterVar.DataPar:
            tvm_ffi.structural_walk(value, (tirx.Var, lambda var: found.append(var.same_as(loop.loop_var))))
    return any(found)


def _reversed_when_odd(loop: tirx.For) -> tirx.For:
    """Let every loop inside a marked loop run backwards in its odd iterations."""
    if SERPENTINE not in loop.annotations:
        return loop
    odd = tirx.floormod(loop.loop_var, 2)

    def reverse(inner: tirx.For) -> tirx.For:
        place = inner.loop_var + odd * (inner.extent - 1 - 2 * inner.loop_var)
        index = (tirx.Var, lambda var: place if var.same_as(inner.loop_var) else var)
        return with_loop_body(inner, tvm_ffi.structural_map(inner.body, index))

    kept = {key: value for key, value in loop.annotations.items() if key != SERPENTINE}
    return with_loop_body(loop, tvm_ffi.structural_map(loop.body, (tirx.For, reverse)), kept)
