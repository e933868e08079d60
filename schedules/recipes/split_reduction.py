"""Splitting a reduction over the grid: more blocks for products with few outputs and a long sum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm_ffi
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Positive, ThreadCount
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import block_name, is_constant, loop_extent, loops_below
from tensorir_ladder.schedules.loops.layout import contraction_loops, pad_to_tile, reindex_along_rows
from tensorir_ladder.schedules.loops.tiling import bind_grid
from tensorir_ladder.schedules.memory.staging import ADDS_PARTS, accumulate_in_registers, initialize_before


@dataclass(frozen=True)
class SplitReduction:
    """A contraction in two steps: ``partial`` sums the parts (part, rows, columns, reduction), ``total`` adds them."""

    partial: SBlockRV
    total: SBlockRV


def check_parts(sch: Schedule, block: SBlockRV, parts: int) -> None:
    """Raise IllegalSchedule for fewer parts of a block's reduction than one."""
    if parts < 1:
        raise IllegalSchedule(
            "a reduction has one part or more",
            block=block_name(sch, block),
            value=parts,
            limit="at least 1",
            remedy="give 1 to leave it whole",
        )


def split_reduction(sch: Schedule, block: SBlockRV, parts: int, step: Positive = 1) -> SplitReduction:
    """Sum a contraction's reduction in ``parts`` parts, which another step adds up.

    ::

        before   for i, j:  for k < K:  C[i, j] += A[i, k] * B[k, j]
        after    for part:  for i, j:  for k < K / parts:  P[part, i, j] += A'[part, i, k] * B'[part, k, j]
                 for i, j:  for part:  C[i, j] += P[part, i, j]

    The first step is a batched product, with ``part`` as its batch, and can be scheduled as one; the second is a kernel
    of its own (:func:`add_parts`, called before the first step's loops are bound). P is float32 in device memory, which
    the function allocates. Parts are multiples of ``step``, the last one filled up with zeros. Sums are rounded
    differently from a single one.

    Raises
    ------
    IllegalSchedule : for a block with fewer than three loops; for fewer than 2 parts, or parts of less than one step.
    """
    *batch, _, _, reduction = contraction_loops(sch, block)
    steps = -(-loop_extent(sch, reduction) // step)
    if parts < 2 or parts > steps or batch:
        raise IllegalSchedule(
            "a reduction is split in two parts or more, each with a step to sum, of a block without batch",
            block=block_name(sch, block),
            value=f"{parts} parts of {steps} steps",
            limit=f"2 to {steps}",
            remedy="leave the reduction whole",
        )
    pad_to_tile(sch, block, [1, 1, parts * step])
    rows, columns, reduction = sch.get_loops(block)
    part, inner = sch.split(reduction, [parts, None])
    partial = sch.rfactor(part, 0)
    for operand in (0, 1):
        reindex_along_rows(sch, partial, operand)
    rows, columns, part, inner = sch.get_loops(partial)
    sch.reorder(part, rows, columns, inner)
    sch.annotate(block, ADDS_PARTS, 1)
    return SplitReduction(partial, block)


def add_parts(sch: Schedule, split: SplitReduction, threads: ThreadCount = 256) -> LoopRV:
    """Give each thread a few neighbouring outputs, whose parts it adds up; fuses what follows elementwise.

    ::

        before   for i, j:  for part:  C[i, j] += P[part, i, j];      D[i, j] = f(C[i, j])
        after    for tile, bound to blockIdx.x:  for thread < 256, bound to threadIdx.x:
                   for part:  C_local[vector] += P[part, vector]
                   D[vector] = f(C_local[vector])

    Returns the loop over threads.
    """
    rows, columns, part = sch.get_loops(split.total)
    stored = [sch.get(sch.get_loops(after)[-1]).extent for after in sch.get_consumers(split.total)]
    # Of rows that are cut short when they are stored, too: lanes store vectors, or single elements, side by side.
    lengths = [loop_extent(sch, columns), *(int(extent) for extent in stored if is_constant(extent))]
    vector = max(width for width in (4, 2, 1) if math.gcd(*lengths) % width == 0)
    whole = is_constant(sch.get(rows).extent)
    whole &= all(tvm_ffi.structural_equal(extent, sch.get(columns).extent) for extent in stored)
    if whole:
        tile, thread, outputs = sch.split(sch.fuse(rows, columns), [None, threads, vector])
        sch.reorder(part, outputs)
        write_back = accumulate_in_registers(sch, split.total, thread)
    else:  # TVM does not see that a vector lies in one row of so many, and a thread would keep all of them
        columns, outputs = sch.split(columns, [None, vector])
        sch.reorder(part, outputs)
        # Before threads have their loop: TVM 0.27 gives a write-back that it makes under threads of which some have no
        # outputs no condition for those, where rows are not cut short.
        write_back = accumulate_in_registers(sch, split.total, columns)
        tile, thread = sch.split(sch.fuse(rows, columns), [None, threads])
    bind_grid(sch, [tile])
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(outputs)
    start = initialize_before(sch, split.total, part)
    if vector > 1:  # a single output's copies have no loop of their own
        for block in (start, write_back):
            sch.vectorize(loops_below(sch, block, thread)[-1])
    return thread
