"""Block tiles and thread tiles: splitting a contraction's loops and binding them to the GPU's grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import SerialLoop, SerialLoops, Threads
from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.inspection import is_constant, loop_extent, loop_name
from tensorir_ladder.schedules.tiles import ThreadTile

MOST_OF_Y = 65535  # blocks along blockIdx.y
K_TILES = 4  # of a pipeline in a loop whose trip count is known at run time only


@dataclass(frozen=True)
class TiledLoops:
    """The loops of a tiled contraction, by role, outermost first.

    ``block_*`` walk the grid's tiles, ``thread_*`` the threads of a block, ``k_outer`` the shared-memory
    tiles of the reduction, ``k_inner`` the steps inside one, ``register_*`` a thread's own outputs.
    """

    block_row: LoopRV
    block_column: LoopRV
    thread_row: LoopRV
    thread_column: LoopRV
    k_outer: LoopRV
    k_inner: LoopRV
    register_row: LoopRV
    register_column: LoopRV


def tile_contraction(sch: Schedule, rows: LoopRV, columns: LoopRV, reduction: LoopRV, tile: ThreadTile) -> TiledLoops:
    """Cut a contraction's three loops into block tiles, thread tiles and k tiles, and reorder them.

    ::

        before   for i < M:  for j < N:  for k < K:  C[i, j] += ...
        after    for block_row < M / block_m:  for block_column < N / block_n:
                   for thread_row < block_m / thread_m:  for thread_column < block_n / thread_n:
                     for k_outer < K / block_k:
                       for k_inner < block_k:
                         for register_row < thread_m:  for register_column < thread_n:  C[...] += ...

    Counts round up where they do not divide; TVM then guards the block with predicates
    (:func:`schedules.loops.pad_to_tile` avoids these). Loops around ``rows`` (a batch) stay outside.

    Raises
    ------
    IllegalTile : if the thread tile does not divide the block tile.
    """
    for role, block, thread in (("rows", tile.block_m, tile.thread_m), ("columns", tile.block_n, tile.thread_n)):
        if block % thread:
            raise IllegalTile(
                f"the block tile's {role} are not a multiple of the thread tile's",
                value=f"{block} and {thread}",
                remedy="make the first a multiple of the second",
            )
    threads_m, threads_n = tile.threads
    block_row, thread_row, register_row = sch.split(rows, [None, threads_m, tile.thread_m])
    block_column, thread_column, register_column = sch.split(columns, [None, threads_n, tile.thread_n])
    k_outer, k_inner = sch.split(reduction, [None, tile.block_k])
    loops = TiledLoops(
        block_row, block_column, thread_row, thread_column, k_outer, k_inner, register_row, register_column
    )
    sch.reorder(*vars(loops).values())
    return loops


def k_tiles_together(sch: Schedule, reduction: LoopRV, fewest: int = 1, together: int = K_TILES) -> int:
    """Return of how many k tiles a reduction's tiles should be a multiple: ``fewest``, or 4 of unknown numbers of them.

    A pipelined loop has a constant number of iterations. Where only run time knows how many k tiles there are, the
    pipeline is one of ``together``, filled and drained for each so many (:func:`pipelined_k_tiles`).
    """
    return fewest if is_constant(sch.get(reduction).extent) else together


def pipelined_k_tiles(sch: Schedule, k_outer: LoopRV, together: int = K_TILES) -> LoopRV:
    """Return the loop over k tiles to pipeline: the loop itself, or of unknown trip count, its innermost 4 iterations.

    ::

        before   for k_outer < (k + 255) // 256 * 4:  ...
        after    for turn < (k + 255) // 256:  for k_outer < 4:  ...         # returned: k_outer
    """
    return k_outer if is_constant(sch.get(k_outer).extent) else sch.split(k_outer, [None, together])[1]


def bind_grid(sch: Schedule, loops: SerialLoops) -> LoopRV:
    """Spread adjacent loops over the grid, one thread block per iteration.

    ::

        before   for batch:  for block_row:  for block_column:  ...
        after    for tile < batch·rows·columns, bound to blockIdx.x:  ...

    One grid dimension, in row-major order, because blockIdx.x alone reaches 2³¹ − 1 where blockIdx.y
    stops at 65535. Returns the fused loop.
    """
    tiles = sch.fuse(*loops) if len(loops) > 1 else loops[0]
    sch.bind(tiles, "blockIdx.x")
    return tiles


def bind_batched_grid(sch: Schedule, batch: Sequence[SerialLoop], tiles: SerialLoops) -> LoopRV:
    """Spread a batch of products over the grid, one behind the other, so that blocks that run together share operands.

    ::

        before   for batch:  for block_row:  for block_column:  ...
        after    for tile < batch·rows·columns, bound to blockIdx.x:  ...    # tile // (rows·columns) is the batch's
                 for b < batch, bound to blockIdx.y:
                   for tile < rows·columns, bound to blockIdx.x:  ...        # of numbers known at run time only

    Where a number of tiles is known at run time only, a batch of up to 65535 has a grid dimension of its own, so that
    no block divides by such a number to find its place; others are the innermost loops of the grid. Returns the
    innermost loop.
    """
    if not batch or all(is_constant(sch.get(loop).extent) for loop in tiles):
        return bind_grid(sch, [*batch, *tiles])
    count = math.prod(loop_extent(sch, loop) if is_constant(sch.get(loop).extent) else MOST_OF_Y + 1 for loop in batch)
    if count > MOST_OF_Y:
        sch.reorder(*tiles, *batch)
        return bind_grid(sch, [*tiles, *batch])
    sch.bind(sch.fuse(*batch) if len(batch) > 1 else batch[0], "blockIdx.y")
    return bind_grid(sch, tiles)


def raster_blocks(sch: Schedule, row: LoopRV, column: LoopRV, group: int) -> list[LoopRV]:
    """Let ``group`` rows of blocks run side by side, so that blocks that run together share operands in the L2 cache.

    ::

        before   for row < 32:  for column < 32:  ...
        after    for row_group < 4:  for column < 32:  for row_in_group < 8:  ...                # group = 8

    132 blocks at once then touch 8 rows and 17 columns of tiles instead of 5 and 32. A group that does not divide
    the rows is lowered to the next divisor. Where the number of rows is known at run time only, ``group`` columns run
    side by side in their place; where that of columns is, too, blocks run in row order. Returns the loops, for
    :func:`bind_grid`.

    Raises
    ------
    IllegalSchedule : if ``group`` is below 1.
    """
    if group < 1:
        raise IllegalSchedule(
            "a group of fewer than one row",
            loop=loop_name(sch, row),
            value=group,
            limit=1,
            remedy="give 1 for row order",
        )
    grouped, other = (row, column) if is_constant(sch.get(row).extent) else (column, row)
    if not is_constant(sch.get(grouped).extent):
        return [row, column]
    extent = loop_extent(sch, grouped)
    divisor = max(d for d in range(1, min(group, extent) + 1) if extent % d == 0)
    if divisor == 1:
        return [row, column]
    outer, inner = sch.split(grouped, [None, divisor])
    sch.reorder(outer, other, inner)
    return [outer, other, inner]


def bind_threads(sch: Schedule, row: SerialLoop, column: SerialLoop) -> None:
    """Run two nested loops as the threads of a block: ``row`` as threadIdx.y, ``column`` as threadIdx.x.

    Consecutive iterations of ``column`` become neighbouring lanes of a warp. Raises IllegalSchedule
    beyond 1024 threads.
    """
    threads = loop_extent(sch, row) * loop_extent(sch, column)
    if threads > 1024:
        raise IllegalSchedule(
            "more threads than a block can have",
            loop=f"{loop_name(sch, row)}, {loop_name(sch, column)}",
            value=threads,
            limit=1024,
            remedy="split the loops further",
        )
    sch.bind(row, "threadIdx.y")
    sch.bind(column, "threadIdx.x")


@dataclass(frozen=True)
class ElementLoops:
    """Loops of a block with one output element per thread: the fused grid loop and the thread loops."""

    grid: LoopRV
    thread_row: LoopRV
    thread_column: LoopRV


def bind_elements(sch: Schedule, block: SBlockRV, threads: Threads = (16, 16)) -> ElementLoops:
    """Give every output element of a block its own thread, ``threads`` (rows, columns) to a block.

    ::

        before   for i < M:  for j < N:  for k < K:  C[i, j] += ...
        after    for tile, bound to blockIdx.x:
                   for row < 16, bound to threadIdx.y:  for column < 16, bound to threadIdx.x:
                     for k < K:  C[...] += ...

    The last two spatial loops become rows and columns (a block with one spatial loop has one row),
    earlier ones join the grid. Ragged edges are predicated.
    """
    spatial = [
        loop for loop, iterator in zip(sch.get_loops(block), sch.get(block).iter_vars) if iterator.iter_type == 0
    ]
    if not spatial:
        raise IllegalSchedule(
            "a block without spatial loops has no output elements to spread",
            block=str(sch.get(block).name_hint),
            remedy="schedule it by its reduction loops",
        )
    if len(spatial) == 1:
        spatial = list(sch.split(spatial[0], [1, None]))
    *outer, rows, columns = spatial
    tile_row, thread_row = sch.split(rows, [None, threads[0]])
    tile_column, thread_column = sch.split(columns, [None, threads[1]])
    sch.reorder(*outer, tile_row, tile_column, thread_row, thread_column)
    grid = bind_grid(sch, [*outer, tile_row, tile_column])
    bind_threads(sch, thread_row, thread_column)
    return ElementLoops(grid, thread_row, thread_column)
