"""Contractions cut for warps on ordinary cores: lanes interleaved, and the k tile sliced among groups of warps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Count, Positive, SharedScope
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import (
    block_name,
    innermost_iterator,
    is_multiple,
    loop_extent,
    loops_below,
    operand_regions,
)
from tensorir_ladder.schedules.isa import WARP
from tensorir_ladder.schedules.loops.layout import check_index_dtypes, index_map
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes, vectorize_write_back
from tensorir_ladder.schedules.memory.staging import ADDS_PARTS, accumulate_in_registers, initialize_before
from tensorir_ladder.schedules.tiles import FLOAT_BYTES, FLOATS, WarpTile


@dataclass(frozen=True)
class LaneLoops:
    """The loops of a contraction whose rows and columns are interleaved among lanes, outermost first.

    ``row_group`` and ``column_group`` count what a thread has of rows and columns, ``lane_row`` and ``lane_column``
    the threads of a warp, ``vector`` neighbouring columns (none where a thread has every ``lanes``-th column).
    """

    batch: tuple[LoopRV, ...]
    row_group: LoopRV
    lane_row: LoopRV
    column_group: LoopRV
    lane_column: LoopRV
    vector: tuple[LoopRV, ...]
    reduction: LoopRV


@dataclass(frozen=True)
class WarpTileLoops:
    """The loops of a contraction in warp tiles, by role, outermost first.

    ``slices`` and ``vector`` are one loop or none: none with one slice, or with columns dealt out one by one.
    ``row``, ``column`` and ``vector`` walk a thread's own outputs.
    """

    batch: tuple[LoopRV, ...]
    block_row: LoopRV
    block_column: LoopRV
    slices: tuple[LoopRV, ...]
    warp_row: LoopRV
    warp_column: LoopRV
    lane_row: LoopRV
    lane_column: LoopRV
    k_outer: LoopRV
    k_inner: LoopRV
    row: LoopRV
    column: LoopRV
    vector: tuple[LoopRV, ...]

    def __iter__(self) -> Iterator[LoopRV]:
        """Iterate over the loops, outermost first."""
        for loops in vars(self).values():
            yield from loops if isinstance(loops, tuple) else (loops,)

    def of_another(self, loops: Sequence[LoopRV]) -> WarpTileLoops:
        """Give the same roles to the loops of another block, which stand in the same order."""
        own, found = iter(loops), {}
        for role, ours in vars(self).items():
            found[role] = tuple(islice(own, len(ours))) if isinstance(ours, tuple) else next(own)
        return replace(self, **found)


def interleave_lanes(
    sch: Schedule,
    block: SBlockRV,
    lanes: tuple[int, int],
    vector: Positive = FLOATS,
    *,
    transposed: bool = False,
) -> LaneLoops:
    """Deal a contraction's rows and columns out to the lanes of a warp in turn, columns ``vector`` at a time.

    ::

        before   for i < M:  for j < N:  for k < K:  C[i, j] += A[i, k] * B[k, j]
        after    for row_group:  for lane_row < 4:                        # i = row_group · 4 + lane_row
                   for column_group:  for lane_column < 8:  for v < 4:    # j = (column_group · 8 + lane_column) · 4 + v
                     for k < K:  C'[...] += A'[row_group, lane_row, k] * B'[k, column_group, lane_column, v]

    What lanes load at once then lies side by side in shared memory: no two in one bank. The primed buffers are new;
    copies to shared memory and the write-back inline them (:func:`schedules.memory.inline_data_movement`,
    :func:`schedules.memory.accumulate_in_registers`). Where the second operand's rows run along k (``B[j, k]``) its
    columns are dealt out one by one, and B' keeps k innermost; ``transposed``: ``vector`` at a time there, too, for a
    tile whose rows shall run along columns (:func:`schedules.memory.stage_transposed`).

    ``block`` has any number of batch loops, rows, columns and one reduction; ``lanes`` are (rows, columns).

    Raises
    ------
    IllegalSchedule : for a block that is no product of two operands, 4 bytes an element, in such loops; for extents
        that the lanes do not divide (:func:`schedules.loops.pad_to_tile` makes them fit).
    """
    check_warp_contraction(sch, block)
    rank = len(sch.get_loops(block))
    by_columns = innermost_iterator(sch, block, 1) == rank - 2
    width = vector if by_columns or transposed else 1
    _check_lanes(sch, block, (lanes[0], lanes[1] * width))
    rows, columns = lanes

    def deal(*index: tirx.Var) -> tuple[tirx.PrimExpr, ...]:
        *batch, i, j, k = index
        turn = columns * width
        column = (j // turn, j % turn // width, *([j % width] if width > 1 else []))
        return (*batch, i // rows, i % rows, *column, k)

    sch.transform_block_layout(block, index_map(rank, deal))
    for access in (("read", 0), ("read", 1), ("write", 0)):
        sch.reindex(block, access)
    if by_columns:
        _put_reduction_first(sch, block)
    *outer, reduction = sch.get_loops(block)
    batch, (row_group, lane_row, column_group, lane_column, *vectors) = outer[: rank - 3], outer[rank - 3 :]
    return LaneLoops(tuple(batch), row_group, lane_row, column_group, lane_column, tuple(vectors), reduction)


def tile_for_warps(sch: Schedule, lanes: LaneLoops, tile: WarpTile, *, slices_in_turn: bool = False) -> WarpTileLoops:
    """Cut interleaved loops into block tiles, slices of the k tile, warps and a thread's own outputs; reorder them.

    ::

        before   for row_group:  for lane_row:  for column_group:  for lane_column:  for v < 4:  for k < K:  C' += ...
        after    for block_row:  for block_column:  for slice:  for warp_row:  for warp_column:
                   for lane_row:  for lane_column:
                     for k_outer < K / block_k:  for k_inner < block_k / slices:
                       for row < thread_m:  for column < thread_n / 4:  for v < 4:  C' += ...

    ``lanes`` are those that :func:`interleave_lanes` made for ``tile.lanes``; extents must divide. A slice has
    neighbouring steps of a k tile. ``slices_in_turn``: a vector of them, then the next slice has one
    (:attr:`WarpTile.steps_in_turn`), so that all have as many steps of a k tile that ends early
    (:func:`schedules.loops.end_within_tile`).

    Raises
    ------
    IllegalTile : for another kind of tile, or one that does not divide (:meth:`schedules.tiles.WarpTile.misfits`).
    """
    WarpTile.check_family(tile)
    tile.check_sound()
    block_row, warp_row, row = sch.split(lanes.row_group, [None, tile.warps[0], tile.thread_m])
    columns = tile.thread_n // prod(loop_extent(sch, loop) for loop in lanes.vector)
    block_column, warp_column, column = sch.split(lanes.column_group, [None, tile.warps[1], columns])
    steps = tile.block_k // tile.slices
    if tile.slices == 1:
        slices: list[LoopRV] = []
        k_outer, k_inner = sch.split(lanes.reduction, [None, steps])
    elif slices_in_turn:
        turns = [steps // tile.steps_in_turn, tile.slices, tile.steps_in_turn]
        k_outer, turn, *slices, step = sch.split(lanes.reduction, [None, *turns])
        sch.reorder(*slices, turn, step)
        k_inner = sch.fuse(turn, step)
    else:
        k_outer, *slices, k_inner = sch.split(lanes.reduction, [None, tile.slices, steps])
    loops = WarpTileLoops(
        batch=lanes.batch,
        block_row=block_row,
        block_column=block_column,
        slices=tuple(slices),
        warp_row=warp_row,
        warp_column=warp_column,
        lane_row=lanes.lane_row,
        lane_column=lanes.lane_column,
        k_outer=k_outer,
        k_inner=k_inner,
        row=row,
        column=column,
        vector=lanes.vector,
    )
    sch.reorder(*loops)
    return loops


def bind_warps(sch: Schedule, loops: WarpTileLoops) -> LoopRV:
    """Run warps as threadIdx.y, those of all slices, and their lanes as threadIdx.x; returns the loop over lanes."""
    warp = sch.fuse(*loops.slices, loops.warp_row, loops.warp_column)
    lane = sch.fuse(loops.lane_row, loops.lane_column)
    sch.bind(warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    return lane


def sum_slices(
    sch: Schedule, block: SBlockRV, loops: WarpTileLoops, scope: SharedScope
) -> tuple[SBlockRV, WarpTileLoops]:
    """Let each slice of the k tile sum by itself, as the groups of warps that share a block tile do.

    ::

        before   for slice:  ...  for k_outer:  for k_inner:  C += A * B
        after    for slice:  ...  for k_outer:  for k_inner:  S[slice] += A * B       # the returned block and loops
                 C = sum of S                                                         # ``block``, for add_slices

    S is in ``scope``, shared memory. With a single slice nothing changes, and ``block`` and ``loops`` are returned.
    """
    if not loops.slices:
        return block, loops
    (slices,) = loops.slices
    partial = sch.rfactor(slices, 0)
    sch.set_scope(partial, 0, scope)
    sch.annotate(block, ADDS_PARTS, 1)
    return partial, loops.of_another(sch.get_loops(partial))


def add_slices(
    sch: Schedule,
    total: SBlockRV,
    grid: LoopRV,
    warps: Positive,
    batches: Count = 0,
    *,
    by_element: bool = False,
) -> SBlockRV:
    """Add up what :func:`sum_slices` left in shared memory, and store it with what follows elementwise.

    ::

        after    for warp, lane, bound to threadIdx:  C_local = sum over slices of S[slice];  D = f(C_local)

    Each of the block's ``warps`` has as many of the tile's outputs. None may be left without: TVM's predicate for the
    write-back would let it store to the next block's outputs. ``total`` is the block that sum_slices was given,
    ``grid`` the loop over block tiles, ``batches`` the number of batch loops. ``by_element``: lanes have neighbouring
    columns, for outputs whose rows are no whole vectors, which lanes would store a vector apart from each other.
    Returns the write-back. Raises IllegalSchedule for a ``total`` of other loops.
    """
    sch.reverse_compute_at(total, grid, preserve_unit_loops=True)
    part, *outer = loops_below(sch, total, grid)
    if not 4 <= len(outer) - batches <= 5:
        raise IllegalSchedule(
            "a total of slices has rows and columns by groups and lanes",
            block=block_name(sch, total),
            value=f"{len(outer)} loops, {batches} of them of the batch",
            limit="4 or 5 loops besides the batch's",
            remedy="pass the block that sum_slices was given, and how many batch loops it has",
        )
    batch, (row_group, lane_row, column_group, lane_column, *vector) = outer[:batches], outer[batches:]
    turns = [*batch, row_group, column_group]
    count = loop_extent(sch, row_group) * loop_extent(sch, column_group)
    if vector and by_element:
        columns = sch.fuse(column_group, lane_column, *vector)
        width, vector = min(loop_extent(sch, columns), WARP), []
        row_turn, lane_row = sch.split(lane_row, [None, WARP // width])
        column_turn, lane_column = sch.split(columns, [None, width])
        turns = [*batch, row_group, row_turn, column_turn]
    elif vector and count % warps:  # more warps than vectors per lane: parts of vectors
        parts = 2 if count * 2 % warps == 0 else FLOATS
        among_warps, *vector = sch.split(*vector, [parts, None])
        turns.append(among_warps)
    sch.reorder(*turns, lane_row, lane_column, part, *vector)
    _, warp = sch.split(sch.fuse(*turns), [None, warps])
    lane = sch.fuse(lane_row, lane_column)
    sch.bind(warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    write_back = accumulate_in_registers(sch, total, lane)
    vectorize_write_back(sch, write_back, lane)
    sch.unroll(part)
    initialize_before(sch, total, part)
    return write_back


def check_warp_contraction(sch: Schedule, block: SBlockRV) -> None:
    """Raise IllegalSchedule for a block that is no product of 4-byte elements with rows, columns and one reduction."""
    check_index_dtypes(sch, block)
    stmt, name = sch.get(block), block_name(sch, block)
    reduces = [iterator.iter_type == tirx.IterVar.CommReduce for iterator in stmt.iter_vars]
    expected = [False] * (len(reduces) - 1) + [True]
    if len(reduces) < 3 or reduces != expected or len(sch.get_loops(block)) != len(reduces):
        raise IllegalSchedule(
            "a contraction by warps has rows, columns and then one reduction, each a loop",
            block=name,
            value=f"{len(sch.get_loops(block))} loops, {sum(reduces)} of them reductions",
            limit="at least 3 loops, the last one a reduction",
            remedy="call flatten_contraction first, or schedule this block with bind_elements",
        )
    dtypes = [str(region.source.dtype) for region in operand_regions(sch, block)]
    if len(dtypes) != 2 or any(dtype_bytes(dtype) != FLOAT_BYTES for dtype in dtypes):
        raise IllegalSchedule(
            f"a contraction by warps on ordinary cores has two operands of {FLOAT_BYTES} bytes an element",
            block=name,
            value=" and ".join(dtypes),
            limit="float32",
            remedy="use stage_contraction for other dtypes, or tensorize_contraction for 16-bit ones",
        )


def _check_lanes(sch: Schedule, block: SBlockRV, turn: tuple[int, int]) -> None:
    *_, rows, columns, _ = sch.get_loops(block)
    extents = sch.get(rows).extent, sch.get(columns).extent
    if any(size < 1 or not is_multiple(extent, size) for extent, size in zip(extents, turn)):
        raise IllegalSchedule(
            "rows and columns cannot be dealt out evenly to lanes",
            block=block_name(sch, block),
            value=f"{extents[0]} x {extents[1]}",
            limit=f"multiples of {turn[0]} x {turn[1]}",
            remedy="call pad_to_tile first",
        )


def _put_reduction_first(sch: Schedule, block: SBlockRV) -> None:
    """Store the second operand step by step: its dimension along the reduction before those along columns."""
    region, reduction = operand_regions(sch, block)[1].region, sch.get(block).iter_vars[-1].var
    rank = len(region)
    (step,) = [place for place, dimension in enumerate(region) if dimension.min.same_as(reduction)]
    columns = [iterator.var for iterator in sch.get(block).iter_vars[-4:-1]]
    first = min(place for place, dimension in enumerate(region) if any(dimension.min.same_as(c) for c in columns))
    order = [*range(first), step, *(place for place in range(first, rank) if place != step)]
    sch.transform_layout(block, ("read", 1), index_map(rank, lambda *index: [index[place] for place in order]))
