"""Contractions by warps on ordinary cores: lanes interleaved, operands padded, the reduction sliced among warps."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import SharedScope
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.loops.layout import pad_to_tile
from tensorir_ladder.schedules.loops.serpentine import walk_serpentine
from tensorir_ladder.schedules.loops.tiling import bind_batched_grid, raster_blocks
from tensorir_ladder.schedules.loops.vectorization import vectorize_write_back
from tensorir_ladder.schedules.loops.warps import (
    add_slices,
    bind_warps,
    check_warp_contraction,
    interleave_lanes,
    sum_slices,
    tile_for_warps,
)
from tensorir_ladder.schedules.memory.staging import (
    CooperativeFetch,
    accumulate_in_registers,
    check_runs_along_reduction,
    initialize_before,
    read_through_registers,
    stage_in_padded,
    stage_transposed,
)
from tensorir_ladder.schedules.tiles import WarpTile


@dataclass(frozen=True)
class WarpContraction:
    """A contraction by warps: the loops that steps go on with, and its blocks.

    ``copies`` fill shared memory, one per operand; ``write_back`` stores results to where the function wants them;
    ``total`` is the block that adds the slices up, None with one slice. ``steps`` are how many iterations of
    ``k_outer`` and ``k_inner`` are none of the padding's, for :func:`schedules.loops.end_within_tile`; None for a
    reduction whose length only run time knows.
    """

    grid: LoopRV
    lane: LoopRV
    k_outer: LoopRV
    k_inner: LoopRV
    copies: tuple[CooperativeFetch, ...]
    write_back: SBlockRV
    total: SBlockRV | None
    steps: int | None


def stage_for_warps(
    sch: Schedule,
    block: SBlockRV,
    tile: WarpTile,
    *,
    scope: SharedScope = "shared",
    serpentine: bool = True,
    pad: bool = True,
    raster: int = 8,
    transposed: bool = False,
) -> WarpContraction:
    """Tile a contraction over grid and warps, stage its operands in padded shared memory, accumulate in registers.

    ::

        before   for (batch,) i, j, k:  C[i, j] += A[i, k] * B[k, j]
        after    for tile, bound to blockIdx.x:  for slice and warp, lane, bound to threadIdx:
                   C_local = 0
                   for k_outer:
                     A_shared = A[tile];  B_shared = B[tile]                     # by all threads together
                     for k_inner < block_k / slices:
                       A_local = A_shared[...];  B_local = B_shared[...]          # one step of a thread's operands
                       for rows, columns, in serpentine order:  C_local += A_local * B_local
                   C = C_local                                  # or, with slices: S[slice] = C_local;  C = sum of S

    Ragged extents are padded on the fly (:func:`schedules.loops.pad_to_tile`); what follows elementwise is
    fused into the write-back.

    Parameters
    ----------
    scope : "shared" or "shared.dyn" (:meth:`WarpTile.shared_scope` chooses).
    serpentine : order a thread's multiply-adds so that each shares an operand with the one before
        (:mod:`schedules.loops.serpentine`).
    pad : pad rows that run along k (:func:`pad_rows`).
    raster : rows of blocks that run side by side (:func:`schedules.loops.raster_blocks`).
    transposed : turn the tile of a second operand whose rows run along k on its way to shared memory, element by
        element (:func:`schedules.memory.stage_transposed`): threads then keep one step of it in registers, not four.

    Raises
    ------
    IllegalTile : for another kind of tile, or one that does not divide (:meth:`WarpTile.misfits`).
    IllegalSchedule : for a block that is no product of two operands in batch, rows, columns and one reduction, or
        whose operands have not 4 bytes an element; to be ``transposed``, for one whose second operand's rows do not run
        along the reduction.
    """
    WarpTile.check_family(tile)
    tile.check_sound()
    check_warp_contraction(sch, block)
    if transposed:
        check_runs_along_reduction(sch, block, 1)
    extent = sch.get(sch.get_loops(block)[-1]).extent
    steps = tile.steps_of_part(int(extent)) if is_constant(extent) else None
    pad_to_tile(sch, block, [1] * (len(sch.get_loops(block)) - 3) + list(tile.block))
    lanes = interleave_lanes(sch, block, tile.lanes, transposed=transposed)
    loops = tile_for_warps(sch, lanes, tile, slices_in_turn=steps is not None and steps % tile.block_k > 0)
    computing, loops = sum_slices(sch, block, loops, scope)
    grid = bind_batched_grid(sch, loops.batch, raster_blocks(sch, loops.block_row, loops.block_column, raster))
    lane = bind_warps(sch, loops)
    if serpentine:
        walk_serpentine(sch, loops.row)
    write_back = accumulate_in_registers(sch, computing, lane)
    vectorize_write_back(sch, write_back, lane, unroll_scalars=True)
    total = block if loops.slices else None
    if total is not None:
        write_back = add_slices(sch, total, grid, tile.threads[0], len(loops.batch))
    first = stage_in_padded(sch, computing, 0, loops.k_outer, tile.threads, scope, pad)
    if transposed:
        second = stage_transposed(sch, computing, 1, loops.k_outer, tile.threads, scope)
    else:
        second = stage_in_padded(sch, computing, 1, loops.k_outer, tile.threads, scope, pad)
    for operand in (0, 1):
        read_through_registers(sch, computing, operand, loops.k_inner)
    initialize_before(sch, computing, loops.k_outer)
    steps_of_slice = None if steps is None else steps // tile.slices
    return WarpContraction(grid, lane, loops.k_outer, loops.k_inner, (first, second), write_back, total, steps_of_slice)
