"""Contractions by warps on ordinary cores: lanes interleaved, operands padded, the reduction sliced among warps."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Positive, SharedScope
from tensorir_ladder.schedules.cost import Machine, resident_blocks
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.inspection import innermost_iterator, is_constant, loop_extent
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.loops.early_launch import can_launch_early, launch_early
from tensorir_ladder.schedules.loops.last_tile import end_within_tile
from tensorir_ladder.schedules.loops.layout import contraction_loops, pad_to_tile
from tensorir_ladder.schedules.loops.residency import keep_resident
from tensorir_ladder.schedules.loops.serpentine import walk_serpentine
from tensorir_ladder.schedules.loops.tiling import bind_batched_grid, raster_blocks
from tensorir_ladder.schedules.loops.unrolling import unroll_loop
from tensorir_ladder.schedules.loops.vectorization import vectorize_write_back
from tensorir_ladder.schedules.loops.warps import (
    add_slices,
    bind_warps,
    check_warp_contraction,
    interleave_lanes,
    sum_slices,
    tile_for_warps,
)
from tensorir_ladder.schedules.memory.alignment import align_operands
from tensorir_ladder.schedules.memory.staging import (
    CooperativeFetch,
    accumulate_in_registers,
    check_runs_along_reduction,
    initialize_before,
    read_through_registers,
    stage_in_padded,
    stage_transposed,
    store_through_shared,
)
from tensorir_ladder.schedules.pipeline.pipelining import pipeline_loop, pipeline_reads
from tensorir_ladder.schedules.pipeline.zero_fill import fill_with_zeros
from tensorir_ladder.schedules.recipes.split_reduction import add_parts, check_parts, split_reduction
from tensorir_ladder.schedules.tiles import FLOAT_BYTES, FLOATS, Choice, TileSet, WarpTile

# Threads with 8x8 outputs are the fastest off the squares, with 4x4 for the smallest products: more of them are
# resident, they have registers for addresses of single elements, and a short reduction ends before the code of 8x16
# outputs has been fetched. Small blocks with few stages waste least of the last wave, tiles of 32 columns fit few
# columns, and k tiles of 16 fit short reductions. Chosen by times of 260 drawn shapes on an H200.
WARP_TILES = TileSet.of(
    Choice(WarpTile(block=(64, 128, 16), warp=(32, 64), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(64, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(128, 128, 16), warp=(32, 64), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(128, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=3),
    Choice(WarpTile(block=(64, 64, 16), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 64, 16), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 128, 32), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 128, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(128, 96, 32), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 64, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(64, 32, 32), warp=(64, 32), thread=(8, 8), slices=4), stages=3),
    Choice(WarpTile(block=(128, 32, 32), warp=(64, 32), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(128, 32, 32), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(128, 32, 16), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(256, 64, 16), warp=(64, 32), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(32, 64, 64), warp=(32, 64), thread=(8, 8), slices=8), stages=3),
    Choice(WarpTile(block=(16, 32, 64), warp=(16, 32), thread=(4, 4), slices=8), stages=3),
    formula="warps",
)


@dataclass(frozen=True)
class WarpContraction:
    """A contraction by warps: the loops that steps go on with, and its blocks.

    ``row`` is the loop over a thread's rows, inside of ``k_inner``. ``copies`` fill shared memory, one per operand;
    ``write_back`` stores results to where the function wants them; ``total`` is the block that adds the slices up, None
    with one slice. ``steps`` are how many iterations of ``k_outer`` and ``k_inner`` are none of the padding's, for
    :func:`schedules.loops.end_within_tile`; None for a reduction whose length only run time knows.
    """

    grid: LoopRV
    lane: LoopRV
    k_outer: LoopRV
    k_inner: LoopRV
    row: LoopRV
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
    raster: int = 8,
    transposed: bool = False,
    collected: bool = False,
    steps: Positive | None = None,
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
    raster : rows of blocks that run side by side (:func:`schedules.loops.raster_blocks`).
    transposed : turn the tile of a second operand whose rows run along k on its way to shared memory, element by
        element (:func:`schedules.memory.stage_transposed`): threads then keep one step of it in registers, not four.
    collected : collect results in shared memory and store neighbours side by side, for rows that are no whole vectors
        (:func:`schedules.memory.store_through_shared`); ``scope`` is "shared.dyn" then.
    steps : how many steps of the reduction are no padding; all of a constant one where None.

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
    if steps is None and is_constant(extent):
        steps = tile.steps_of_part(int(extent))
    pad_to_tile(sch, block, [1] * (len(sch.get_loops(block)) - 3) + list(tile.block))
    lanes = interleave_lanes(sch, block, tile.lanes, transposed=transposed)
    loops = tile_for_warps(sch, lanes, tile, slices_in_turn=steps is not None and steps % tile.block_k > 0)
    computing, loops = sum_slices(sch, block, loops, scope)
    grid = bind_batched_grid(sch, loops.batch, raster_blocks(sch, loops.block_row, loops.block_column, raster))
    lane = bind_warps(sch, loops)
    walk_serpentine(sch, loops.row)
    if collected and not loops.slices:
        store_through_shared(sch, computing, grid, tile.threads, scope)
    write_back = accumulate_in_registers(sch, computing, lane)
    vectorize_write_back(sch, write_back, lane, unroll_scalars=True)
    total = block if loops.slices else None
    if total is not None:
        write_back = add_slices(sch, total, grid, tile.threads[0], len(loops.batch), by_element=collected)
    first = stage_in_padded(sch, computing, 0, loops.k_outer, tile.threads, scope)
    if transposed:
        second = stage_transposed(sch, computing, 1, loops.k_outer, tile.threads, scope)
    else:
        second = stage_in_padded(sch, computing, 1, loops.k_outer, tile.threads, scope)
    for operand in (0, 1):
        read_through_registers(sch, computing, operand, loops.k_inner)
    initialize_before(sch, computing, loops.k_outer)
    steps_of_slice = None if steps is None else steps // tile.slices
    return WarpContraction(
        grid, lane, loops.k_outer, loops.k_inner, loops.row, (first, second), write_back, total, steps_of_slice
    )


def multiply_by_warps(
    sch: Schedule, block: SBlockRV, tile: WarpTile, stages: Positive, planned: Planned, machine: Machine
) -> WarpContraction:
    """Multiply float32 operands of any shape by warps: a whole kernel, with what ragged and skinny products need.

    ::

        before   for (batch,) i, j, k:  C[i, j] += A[i, k] * B[k, j]       # or B[j, k]; C is stored as f(C)
        after    A_pad = A                                                  # a kernel in front, of planned.copied
                 for part, tile, bound to blockIdx.x:  for slice and warp, lane, bound to threadIdx:
                   C_local = 0
                   for k_outer:                                             # a ring of ``stages``, filled by cp.async
                     A_shared = A_pad[tile];  B_shared = B[tile]            # zeros beyond ragged edges, no branch
                     for k_inner:  C_local += A_shared * B_shared           # ends with the reduction, written out
                   C = C_local                                              # or parts, which a second kernel adds up

    Next to :func:`stage_for_warps` and a pipeline:

    - ``planned.parts`` cut the reduction, where tiles are too few to fill the GPU (:func:`split_reduction`).
    - Operands whose rows are not whole 16-byte vectors are copied to aligned rows first where ``planned.copied`` says
      so (:func:`schedules.memory.align_operands`), and element by element to shared memory otherwise.
    - A second operand whose rows run along k is transposed on its way to shared memory, and never copied first.
    - Results in one part whose rows are not whole vectors are collected in shared memory, where there is room.
    - Registers are limited, so that as many blocks are resident as the tile allows
      (:func:`schedules.loops.keep_resident`).
    - The kernel starts early on targets that can do so (:func:`schedules.loops.launch_early`).

    ``stages`` are no more than a part has k tiles. ``planned`` says nothing else; :mod:`schedules.plans` chooses tiles
    and plans. ``machine`` has the target and its limits; :func:`schedules.cost.assumed_machine` makes one of a target.

    Raises
    ------
    IllegalSchedule : for extents that only run time knows; for fewer parts than one, or several of a product with a
        batch; and what :func:`stage_for_warps` raises.
    IllegalTile : for another kind of tile, or one that does not divide.
    """
    WarpTile.check_family(tile)
    tile.check_sound()
    check_parts(sch, block, planned.parts)
    *batch, _, columns, reduction = contraction_loops(sch, block)
    scattered = loop_extent(sch, columns) % FLOATS > 0 and planned.parts == 1
    transposed = innermost_iterator(sch, block, 1) == len(sch.get(block).iter_vars) - 1
    steps = tile.steps_of_part(loop_extent(sch, reduction), planned.parts)
    stages = min(stages, -(-steps // tile.block_k))
    room = int(machine.target.attrs["max_shared_memory_per_block"])
    collected = scattered and tile.collected_bytes(FLOAT_BYTES, stages) <= room
    copied = planned.copied[0], planned.copied[1] and not transposed
    whole = [
        *(1 for _ in batch),
        tile.block_m,
        tile.block_n,
        tile.block_k if planned.parts == 1 else steps * planned.parts,
    ]
    if any(copied):
        align_operands(sch, block, whole, row_bytes=[VECTOR_BYTES if first else 1 for first in copied])
    if planned.parts > 1:
        pad_to_tile(sch, block, whole)  # so that sums have whole rows
        split = split_reduction(sch, block, planned.parts, steps)
        add_parts(sch, split)
        block = split.partial
    scope = "shared.dyn" if collected else tile.shared_scope(FLOAT_BYTES, stages)
    staged = stage_for_warps(sch, block, tile, scope=scope, transposed=transposed, collected=collected, steps=steps)
    fill_with_zeros(sch, staged.row)
    keep_resident(sch, staged.row, resident_blocks(Choice(tile, stages), machine, FLOAT_BYTES))
    if stages > 1 or steps <= tile.block_k:  # else each step would ask
        end_within_tile(sch, staged.k_outer, staged.k_inner, steps // tile.slices)
    reads_ahead = tile.steps_ahead > 0 and pipeline_reads(sch, staged.k_inner, stages)
    unroll_loop(sch, staged.k_inner)
    pipeline_loop(sch, staged.k_outer, stages, stages > 1, one_barrier=stages > 1, fill_ahead=reads_ahead)
    if can_launch_early(machine.target):
        launch_early(sch)
    return staged
