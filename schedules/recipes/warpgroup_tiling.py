"""Contractions of any shape by warpgroups: wgmma, a reduction in parts, operands by cp.async or TMA, clusters."""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Positive
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.inspection import loop_extent
from tensorir_ladder.schedules.isa import ROW_BYTES, SECTOR_BYTES, VECTOR_BYTES
from tensorir_ladder.schedules.loops.early_launch import launch_early
from tensorir_ladder.schedules.loops.layout import contraction_loops, pad_to_tile
from tensorir_ladder.schedules.loops.tiling import bind_grid, raster_blocks
from tensorir_ladder.schedules.memory.alignment import align_operands
from tensorir_ladder.schedules.memory.box_stores import storable_by_tma, store_by_tma
from tensorir_ladder.schedules.memory.staging import initialize_before, longest_rounds
from tensorir_ladder.schedules.pipeline.first_fill import fill_before_waiting
from tensorir_ladder.schedules.pipeline.one_barrier import hide_reads
from tensorir_ladder.schedules.pipeline.own_warp import bring_by_own_warp
from tensorir_ladder.schedules.pipeline.zero_fill import fill_with_zeros
from tensorir_ladder.schedules.recipes.split_reduction import add_parts, check_parts, split_reduction
from tensorir_ladder.schedules.tensor_cores.warpgroup import (
    WarpgroupLoops,
    accumulate_by_warpgroups,
    bind_warpgroups,
    instruction_for,
    multiply_by_wgmma,
    pipeline_warpgroups,
    spread_fragment,
    stage_by_tma,
    stage_in_panels,
    store_by_rows,
    tile_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import WarpgroupTile

ROWS_TOGETHER = 8  # of blocks, which run side by side
FEWEST_STAGES = 3  # one is filled, one is read, one multiplication is in flight


def multiply_by_warpgroups(
    sch: Schedule,
    block: SBlockRV,
    tile: WarpgroupTile,
    stages: Positive,
    planned: Planned,
    *,
    tensorize: bool = True,
) -> WarpgroupLoops:
    """Multiply 16-bit operands of any shape by wgmma: a whole kernel, with what ragged and skinny products need.

    ::

        before   for (batch,) i, j, k:  C[i, j] += A[i, k] * B[k, j]       # or B[j, k]; C is stored as f(C)
        after    A_pad = A                                                  # a kernel in front, of planned.copied
                 for part, tile, bound to blockIdx.x:  for group, bound to threadIdx.y:
                   C_local = 0
                   for k_outer:                                             # a ring of ``stages``
                     A_shared = A_pad[tile];  B_shared = B[tile]            # by cp.async, or boxes by TMA
                     wgmma(C_local, A_shared, B_shared)                     # one stays in flight
                   C = C_local, row by row, or boxes by TMA                 # or parts, which a second kernel adds up

    Compared with :func:`schedules.tensor_cores.stage_for_warpgroups` and its pipeline:

    - ``planned.parts`` cut the reduction, where tiles are too few to fill the GPU (:func:`split_reduction`).
    - Operands whose rows are not whole 16-byte vectors are copied to aligned rows by a kernel in front; those that
      ``planned.copied`` names, to rows of whole sectors, or of whole cache lines with boxes.
    - Without ``planned.boxes`` all threads copy: copies fill with zeros beyond ragged edges without a branch, and all
      of the ring's first tiles are requested before the first wait.
    - With ``planned.boxes`` one thread issues TMA loads, in a warp of its own with ``planned.own_warp``. Rows that
      begin within a sector cost less then, and a kernel's start costs more. Results leave by TMA, too, where it can
      store them (:func:`schedules.memory.storable_by_tma`). The blocks of a ``planned.cluster``, so many below and so
      many next to each other, share the operands that they have in common.
    - The kernel starts early (:func:`schedules.loops.launch_early`).

    :mod:`schedules.plans` chooses tiles and plans. ``stages`` are at least 3, or as many as the reduction has k tiles;
    a reduction of a single k tile is padded to two. ``tensorize=False`` leaves the multiplication as loops, which any
    CPU can run. Returns the contraction's loops.

    Raises
    ------
    IllegalSchedule : for extents that only run time knows; for parts that :func:`split_reduction` refuses; for boxes
        that :func:`schedules.memory.fetch_by_tma` or a warp that :func:`schedules.pipeline.bring_by_own_warp` refuses.
    IllegalTile : for a tile, dtype or layout that the instruction does not have.
    IllegalPipeline : for too few stages.
    """
    WarpgroupTile.check_family(tile)
    check_parts(sch, block, planned.parts)
    *_, rows, columns, reduction = contraction_loops(sch, block)
    # Of a product smaller than a tile, TVM keeps rows that leave the operands behind them unaligned for wgmma.
    by_rows = loop_extent(sch, rows) >= tile.block_m and loop_extent(sch, columns) >= tile.block_n
    enough = stages if loop_extent(sch, reduction) > stages * tile.block_k else max(stages, FEWEST_STAGES)
    block = _align_and_split(sch, block, tile, planned)
    instruction = instruction_for(sch, block, tile)
    *batch, _, _, reduction = sch.get_loops(block)
    k_tiles = 2 if loop_extent(sch, reduction) <= tile.block_k else 1  # so that there is a loop to pipeline
    down, across = planned.cluster
    pad_to_tile(sch, block, [*(1 for _ in batch), tile.block_m * down, tile.block_n * across, tile.block_k * k_tiles])
    *batch, rows, columns, reduction = sch.get_loops(block)
    loops = tile_for_warpgroups(sch, rows, columns, reduction, tile)
    grid = bind_grid(sch, [*batch, *_cluster_side_by_side(sch, loops, planned.cluster)])
    group = bind_warpgroups(sch, loops)
    write_back = accumulate_by_warpgroups(sch, block, group, instruction)
    if planned.boxes and storable_by_tma(sch, write_back, grid):
        store_by_tma(sch, write_back, grid)
    elif by_rows and planned.parts == 1:
        store_by_rows(sch, write_back, grid, tile.threads, whole=True)
    spread_fragment(sch, write_back, group, vectorize=True)
    copies = []
    for operand, (run, blocks, apart) in enumerate(zip(instruction.run_lengths, (across, down), (1, across))):
        if planned.boxes:
            stage_by_tma(sch, block, operand, loops.k_outer, run, blocks, apart)
        else:
            copies.append(stage_in_panels(sch, block, operand, loops.k_outer, tile.threads, run))
    spread_fragment(sch, initialize_before(sch, block, loops.k_outer), group)
    hide_reads(sch, block)  # the instruction's, which reads shared memory by itself
    plan = pipeline_warpgroups(sch, loops.k_outer, enough)
    if planned.own_warp:
        bring_by_own_warp(sch, loops.k_outer)
    if not planned.boxes:
        rounds = longest_rounds(sch, copies)
        fill_with_zeros(sch, rounds)
        fill_before_waiting(sch, rounds, plan)
    launch_early(sch)
    if tensorize:
        multiply_by_wgmma(sch, loops, instruction)
    return loops


def _align_and_split(sch: Schedule, block: SBlockRV, tile: WarpgroupTile, planned: Planned) -> SBlockRV:
    """Copy unaligned rows to aligned ones first, and cut the reduction in parts; returns the block to tile."""
    batch = [1] * (len(sch.get_loops(block)) - 3)
    aligned = ROW_BYTES if planned.boxes else SECTOR_BYTES
    row_bytes = [aligned if first else VECTOR_BYTES for first in planned.copied]
    rounded = (*batch, tile.block_m, tile.block_n, tile.block_k * planned.parts)
    align_operands(sch, block, rounded, row_bytes=row_bytes, vector_bytes=16, rounds=2)
    if planned.parts == 1:
        return block
    split = split_reduction(sch, block, planned.parts, tile.block_k)
    add_parts(sch, split)
    return split.partial


def _cluster_side_by_side(sch: Schedule, loops: WarpgroupLoops, cluster: tuple[int, int]) -> list[LoopRV]:
    """Order a grid's loops so that the blocks of a cluster, below and next to each other, are the innermost."""
    if cluster == (1, 1):
        return raster_blocks(sch, loops.block_row, loops.block_column, ROWS_TOGETHER)
    rows, columns = (
        sch.split(loop, [None, blocks]) for loop, blocks in zip((loops.block_row, loops.block_column), cluster)
    )
    longer, shorter = (rows, columns) if cluster[0] >= cluster[1] else (columns, rows)
    order = [*raster_blocks(sch, longer[0], shorter[0], ROWS_TOGETHER // max(cluster)), rows[1], columns[1]]
    sch.reorder(*order)
    return order
