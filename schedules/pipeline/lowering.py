"""Lowering of pipelined loops after TVM's own passes: a compilation pipeline to name in ``tvm.compile``."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx
from tvm.ir.transform import Pass, Sequential
from tvm.tirx.compilation_pipeline import register_tir_pipeline

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import UNROLL_RING, annotated_loops, statements_of
from tensorir_ladder.schedules.loops.serpentine import SERPENTINE, lower_serpentines
from tensorir_ladder.schedules.memory.swizzling import lower_swizzles
from tensorir_ladder.schedules.passes import on_functions
from tensorir_ladder.schedules.pipeline.one_barrier import ONE_BARRIER, drop_hidden_reads, is_gate
from tensorir_ladder.schedules.tensor_cores.fragments import compact_blocks, has_fragments, lower_fragments

UNROLLED_RINGS = "tensorir_ladder_unrolled_rings"
FRAGMENTS = "tensorir_ladder_fragments"


def unroll_rings() -> Pass:
    """Write out as many iterations of a pipelined loop as its ring has stages, so that stage numbers are constants.

    ::

        before   for k < 14, annotated unroll_ring = 3:      ... A_shared[k % 3] ...
        after    for turn < 4:
                   ... A_shared[0] ...;  ... A_shared[1] ...;  ... A_shared[2] ...
                 ... A_shared[0] ...;  ... A_shared[1] ...                         # the two that remain

    A pass over lowered functions. CUDA's own ``#pragma unroll 3`` would not do: the compiler does not see that
    a multiple of 3 leaves no remainder.
    """

    passes = [on_functions(_in_turns), tirx.transform.UnrollLoop(), tirx.transform.StmtSimplify()]
    return Sequential(passes)


def _in_turns(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return tvm_ffi.structural_map(function, (tirx.For, _turns))


def required_tir_pipeline(mod: ir.IRModule | tirx.PrimFunc) -> str:
    """Return the name for ``tvm.compile(..., tir_pipeline=name)`` that lowers a scheduled module as it was scheduled.

    Raises IllegalPipeline for a loop that is marked as one with a single barrier and has no gate: a replayed trace
    brings the mark and the lists, and not what they belong to.
    """
    for loop in annotated_loops(mod, ONE_BARRIER):
        if not any(is_gate(statement) for statement in statements_of(loop)):
            raise IllegalPipeline(
                "the loop is marked as one with a single barrier, and has no gate",
                loop=str(loop.loop_var.name),
                remedy="call pipeline_loop(..., one_barrier=True) after replaying a trace, instead of replaying it",
            )
    if has_fragments(mod):
        return FRAGMENTS
    marked = (True for key in (UNROLL_RING, SERPENTINE) for _ in annotated_loops(mod, key))
    return UNROLLED_RINGS if any(marked) else "s_tir"


def _turns(loop: tirx.For) -> tirx.Stmt:
    """Write a loop with the annotation as whole turns of its ring, and the rest."""
    if UNROLL_RING not in loop.annotations:
        return loop
    stages, extent = int(loop.annotations[UNROLL_RING]), int(loop.extent)
    parts = []
    if extent >= stages:
        turn = tirx.Var("turn", loop.loop_var.ty)
        parts.append(
            tirx.For(turn, 0, extent // stages, tirx.ForKind.SERIAL, _written_out(loop, turn * stages, stages))
        )
    if extent % stages:
        parts.append(_written_out(loop, extent - extent % stages, extent % stages))
    return tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]


def _written_out(loop: tirx.For, first: ir.Expr | int, count: int) -> tirx.For:
    """Return ``count`` iterations of a loop from ``first`` on, to be written out."""
    place = tirx.Var("stage", loop.loop_var.ty)
    iteration = loop.min + first + place
    replaced = (tirx.Var, lambda var: iteration if var.same_as(loop.loop_var) else var)
    body = tvm_ffi.structural_map(loop.body, replaced)
    return tirx.For(place, 0, count, tirx.ForKind.UNROLLED, body)


def _unrolled_rings() -> tuple[Pass, Pass, Pass]:
    """Extend TVM's own pipeline for scheduled functions by serpentine loops, and rings written out."""
    lower, finalize_host, finalize_device = tirx.get_tir_pipeline("s_tir")
    after = [on_functions(lower_serpentines), unroll_rings()]
    return Sequential([lower, *after]), finalize_host, finalize_device


def _fragments() -> tuple[Pass, Pass, Pass]:
    """Lower fragments and swizzles as soon as buffers are compact, then go on as above."""
    lower, finalize_host, finalize_device = _unrolled_rings()
    before = [on_functions(drop_hidden_reads), compact_blocks(), lower_fragments(), lower_swizzles()]
    return Sequential([*before, lower]), finalize_host, finalize_device


register_tir_pipeline(UNROLLED_RINGS, _unrolled_rings)
register_tir_pipeline(FRAGMENTS, _fragments)
