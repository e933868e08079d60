"""Workloads bound by memory: elementwise blocks, row reductions, and chains of these over whole rows.

What limits them is the bytes on their way at any moment: a thread block keeps threads × vectors × 16 of them
for each tile it has asked for. Each function has two forms. "Direct" goes from global memory to registers.
"Staged" copies each tile to shared memory first, as a statement of the loop over tiles, which
:func:`schedules.pipeline.pipeline_loop` can then run ahead: with n stages, n − 1 tiles are on their way.

Threads combine their results through shared memory and plain reductions, not through TVM's cross-thread
reduction (``tvm_thread_allreduce``): TVM 0.27 cannot lower one that a pipeline has copied into its prologue
or epilogue, and what is written here runs on a CPU as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import (
    block_name,
    constant_shape,
    is_one,
    loop_extent,
    loop_extents,
    loops_below,
)
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.loops.layout import fused_index
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes, vectorize_inner
from tensorir_ladder.schedules.memory.staging import (
    CooperativeFetch,
    accumulate_in_registers,
    fetch_cooperatively,
    inline_data_movement,
    stage_in_shared,
)
from tensorir_ladder.schedules.tiles import STATIC_SHARED_BYTES

GROUPS = 16  # partial results that are left for every thread to add up by itself
COMBINING_BYTES = 2 * (1024 + GROUPS) * 4  # of two reductions over the most threads, beside the stages
MOST_UNROLLED = 8


@dataclass(frozen=True)
class BandwidthTile:
    """Tiles of a workload bound by memory: a block's ``threads``, 16-byte ``vectors`` of each in a tile, its ``tiles``.

    A tile of a row reduction is a chunk of a row, and a block has as many as its row needs; a tile of a chain
    over rows is a row. Written ``256x1x16``.
    """

    threads: int = 256
    vectors: int = 1
    tiles: int = 16

    def __post_init__(self) -> None:
        if min(self.threads, self.vectors, self.tiles) < 1 or self.threads > 1024 or self.threads % 32:
            raise IllegalSchedule(
                "illegal tile of a workload bound by memory",
                value=f"{self.threads} threads, {self.vectors} vectors, {self.tiles} tiles",
                limit="whole warps up to 1024 threads; vectors and tiles from 1 on",
                remedy="choose for example BandwidthTile(256, 1, 16)",
            )

    def __str__(self) -> str:
        return f"{self.threads}x{self.vectors}x{self.tiles}"

    def least_vectors(self, staging: object) -> int:
        """Return the vectors of a thread in one tile; two at least if staged.

        TVM 0.27 takes a loop of one iteration away, and would count what is in it as statements of the pipeline.
        """
        return max(self.vectors, 2 if staging else 1)


@dataclass(frozen=True)
class Staging:
    """Operands through shared memory, in as many ``stages`` as the loop will be pipelined with.

    Beyond 48 KiB the memory is dynamic. ``limit_bytes`` is the most that a block may have: 227 KiB on sm_90;
    the limits of other GPUs are in the CUDA programming guide (compute capabilities).
    """

    stages: int = 1
    limit_bytes: int = 227 * 1024

    def scopes(self, sch: Schedule, block: SBlockRV, stage_bytes: int) -> tuple[str, str]:
        """Return the storage scopes of the stages and of what is beside them; IllegalSchedule where they do not fit.

        Static memory stands beside dynamic stages of 48 KiB and more only: TVM asks the driver for more than 48 KiB
        where the dynamic part alone exceeds them, and a kernel just below could not be launched.
        """
        needed = self.stages * stage_bytes
        if needed > self.limit_bytes:
            raise IllegalSchedule(
                f"{self.stages} stage(s) of {stage_bytes} bytes are too much shared memory",
                block=block_name(sch, block),
                value=f"{needed} bytes",
                limit=self.limit_bytes,
                remedy="give fewer stages or a smaller tile, or leave staging out",
            )
        if needed + COMBINING_BYTES <= STATIC_SHARED_BYTES:
            return "shared", "shared"
        return "shared.dyn", "shared" if needed >= STATIC_SHARED_BYTES else "shared.dyn"


@dataclass(frozen=True)
class SpreadElements:
    """An elementwise block's loops, outermost first, and the copies of its operands to shared memory, if any.

    ``grid`` are the thread blocks, ``tiles`` the tiles of one (the loop to pipeline), ``vectors`` and
    ``thread`` what is inside a tile, ``width`` the elements of a vector.
    """

    grid: LoopRV
    tiles: LoopRV
    vectors: LoopRV
    thread: LoopRV
    width: int
    copies: tuple[CooperativeFetch, ...]


def spread_elements(
    sch: Schedule, block: SBlockRV, tile: BandwidthTile, staging: Staging | None = None
) -> SpreadElements:
    """Spread an elementwise block of any rank over the GPU, 16 bytes to a thread, neighbours side by side.

    ::

        before   for i, j, ...:  y[i, j, ...] = f(x[i, j, ...])
        direct   for grid, bound to blockIdx.x:  for tiles:  for vectors:  for thread, bound to threadIdx.x:
                   x_local = x[vector];  y_local = f(x_local);  y[vector] = y_local
        staged   for grid, bound to blockIdx.x:
                   for tiles:                                     # the loop to pipeline
                     x_shared = x[tile]                           # by all threads together
                     for vectors:  for thread:  x_local = x_shared[vector]; ... as above

    Vectors are narrower where the last dimension is no multiple of 16 bytes, down to scalars. Ragged ends are
    predicated. ``block`` stays valid.

    Raises
    ------
    IllegalSchedule : if the block reduces, reads more than one element of an operand for each of the output (a
        stencil), or its operands are not of the output's shape; if the stages of one block do not fit in shared memory.
    """
    stmt = _check_elementwise(sch, block)
    operands, width, vectors_per_tile = range(len(stmt.reads)), _lanes(stmt), tile.least_vectors(staging)
    tile_elements = tile.threads * vectors_per_tile * width
    stage_bytes = tile_elements * sum(dtype_bytes(region.source.dtype) for region in stmt.reads)
    scope, _ = staging.scopes(sch, block, stage_bytes) if staging else ("", "")
    elements, store = _one_iterator(sch, block)
    tiles = min(tile.tiles, -(-int(sch.get(elements).extent) // tile_elements))
    loops = sch.split(elements, [None, tiles, vectors_per_tile, tile.threads, width])
    grid, tiles_loop, vectors, thread, lane = loops
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    copies = [_stage(sch, block, operand, tiles_loop, tile.threads, scope) for operand in operands if staging]
    for operand in operands:
        _load_vectors(sch, block, operand, thread, width, staging)
    _store_vectors(sch, store, thread, width)
    sch.unroll(lane)
    _unroll_short(sch, vectors)
    return SpreadElements(grid, tiles_loop, vectors, thread, width, tuple(copies))


@dataclass(frozen=True)
class CombinedReduction:
    """A row reduction over threads: each thread's ``partial`` result, those of ``GROUPS`` groups, the ``total``."""

    partial: SBlockRV
    groups: SBlockRV
    total: SBlockRV


@dataclass(frozen=True)
class SpreadReduction:
    """A row reduction, a row to a thread block: its loops and blocks, and the copy to shared memory, if any.

    ``chunks`` walk the row (the loop to pipeline); ``write_back`` stores the row's result.
    """

    grid: LoopRV
    chunks: LoopRV
    thread: LoopRV
    reduction: CombinedReduction
    write_back: SBlockRV
    copy: CooperativeFetch | None


def spread_reduction(
    sch: Schedule, block: SBlockRV, tile: BandwidthTile, staging: Staging | None = None
) -> SpreadReduction:
    """Give each row of a reduction over the last axis to one thread block, which walks it in chunks.

    ::

        before   for i:  for k:  y[i] += x[i, k]
        after    for i, bound to blockIdx.x:
                   for chunks:                                              # the loop to pipeline, if staged
                     x_shared = x[i, chunk]                                 # staged only, by all threads together
                     for thread, bound to threadIdx.x:  for vectors:  partial[thread] += x_shared[...]
                   groups[g] = sum of the partial results of group g        # through shared memory
                   y[i] = sum of the groups, by every thread; stored by the first

    Any number of dimensions before the last. Of ``tile`` threads and vectors count. What follows the
    reduction elementwise (a cast) is fused into the store. The order of additions is not that of the plain
    loop, so that results differ from it by rounding; it does not depend on ``staging``.

    Raises
    ------
    IllegalSchedule : if the block is no reduction over one last axis of one operand; if the stages do not fit
        in shared memory.
    """
    stmt = _check_row_reduction(sch, block)
    columns, width = loop_extents(sch, block)[-1], _lanes(stmt)
    threads, vectors_per_chunk = _busy_threads(tile, columns, width, staging), tile.least_vectors(staging)
    chunk = threads * vectors_per_chunk * width
    stage_bytes = chunk * dtype_bytes(stmt.reads[0].source.dtype)
    scope, beside = staging.scopes(sch, block, stage_bytes) if staging else ("", "shared")
    reduction = _split_reduction(sch, block, [-(-columns // chunk), vectors_per_chunk, threads, width])
    rows = sch.get_loops(block)[0]
    sch.compute_at(reduction.groups, rows, preserve_unit_loops=True)
    rows = sch.merge(sch.get_loops(reduction.partial)[0], rows)
    sch.bind(rows, "blockIdx.x")
    chunk_loop, vectors, thread, lane = loops_below(sch, reduction.partial, rows)
    sch.reorder(chunk_loop, thread, vectors, lane)
    sch.bind(thread, "threadIdx.x")
    copy = _stage(sch, reduction.partial, 0, chunk_loop, threads, scope) if staging else None
    _load_vectors(sch, reduction.partial, 0, vectors, width, staging)
    sch.unroll(lane)
    _unroll_short(sch, vectors)
    _combine(sch, reduction, rows, threads, beside)
    write_back = accumulate_in_registers(sch, block, rows)
    _spread_over_threads(sch, write_back, rows, threads)
    return SpreadReduction(rows, chunk_loop, thread, reduction, write_back, copy)


@dataclass(frozen=True)
class SpreadRows:
    """A chain of row-wise blocks, a thread block to several rows: its loops and blocks, and the copy, if any.

    ``rows`` are the rows of a thread block (the loop to pipeline); ``reductions`` stand in the order in which
    they run.
    """

    grid: LoopRV
    rows: LoopRV
    thread: LoopRV
    reductions: tuple[CombinedReduction, ...]
    copy: CooperativeFetch | None


def spread_rows(
    sch: Schedule, block: SBlockRV, reductions: Sequence[SBlockRV], tile: BandwidthTile, staging: Staging | None = None
) -> SpreadRows:
    """Compute a chain over rows, as softmax is one, with each row read from global memory once if staged.

    ::

        before   for i, k:  m[i] = max(m[i], x[i, k])                         # reductions, in program order
                 for i, k:  s[i] += f(x[i, k], m[i])
                 for i, j:  y[i, j] = g(x[i, j], m[i], s[i])                  # ``block``
        after    for grid, bound to blockIdx.x:
                   for rows:                                                  # the loop to pipeline, if staged
                     x_shared = x[i, :]                                       # staged only: the whole row
                     m = max of x_shared;  s = sum of f(x_shared, m)          # each as in spread_reduction
                     for vectors:  for thread:  y[i, vector] = g(x_shared[vector], m, s)

    Direct, each block reads the row again, which the first-level cache then holds. ``block`` and reductions
    read one operand in common and are two-dimensional over rows and columns. Of ``tile``, threads and tiles
    (rows of a thread block) count.

    Raises
    ------
    IllegalSchedule : if a reduction is none over the last axis, or ``block`` is no elementwise function of
        the operand and of the reductions; if the stages, of a whole row each, do not fit in shared memory.
    """
    operand = _check_chain(sch, block, reductions)
    stmt, (row_count, columns) = sch.get(block), loop_extents(sch, block)
    width = _lanes(stmt)
    threads = _busy_threads(tile, columns, width, staging)
    vectors = -(-columns // (threads * width))
    stage_bytes = columns * dtype_bytes(stmt.reads[operand].source.dtype)
    scope, beside = staging.scopes(sch, block, stage_bytes) if staging else ("", "shared")
    rows_per_block = min(tile.tiles, row_count)
    row, column = sch.get_loops(block)
    sch.split(row, [None, rows_per_block])
    _, thread, lane = sch.split(column, [vectors, threads, width])
    combined: list[CombinedReduction] = []
    for reduction in reversed(reductions):
        parts = _split_reduction(sch, reduction, [vectors, threads, width])
        for part in (parts.total, parts.groups):
            sch.compute_at(part, sch.get_loops(block)[1], preserve_unit_loops=True)
        _, partial_rows = sch.split(sch.get_loops(parts.partial)[0], [None, rows_per_block])
        sch.merge(partial_rows, sch.get_loops(block)[1])
        combined.insert(0, parts)
    grid, rows = sch.get_loops(block)[:2]
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    copy = _stage(sch, combined[0].partial, 0, rows, threads, scope) if staging else None
    for parts in combined:
        _spread_partial(sch, parts, rows, width, staging, beside)
        sch.set_scope(parts.total, 0, "local")
    if vectors > 1 or not staging:  # see BandwidthTile.least_vectors
        _load_vectors(sch, block, operand, thread, width, staging)
        _store_vectors(sch, sch.cache_write(block, 0, "local"), thread, width)
    sch.unroll(lane)
    return SpreadRows(grid, rows, thread, tuple(combined), copy)


def _check_elementwise(sch: Schedule, block: SBlockRV) -> s_tir.SBlock:
    stmt = sch.get(block)
    shapes = [constant_shape(region.source) for region in (*stmt.writes, *stmt.reads)]
    wide = [str(region) for region in stmt.reads if not all(is_one(dimension.extent) for dimension in region.region)]
    if wide:
        raise IllegalSchedule(
            "no elementwise block: it reads several elements of an operand for one of the output",
            block=block_name(sch, block),
            value=wide[0],
            limit="one element",
            remedy="write neighbours as operands of their own, or schedule the block with bind_elements",
        )
    if _reduces(stmt) or not stmt.reads or any(shape != shapes[0] for shape in shapes):
        raise IllegalSchedule(
            "no elementwise block: it reduces, or its operands are not all of the output's shape",
            block=block_name(sch, block),
            value=f"output and operands {shapes}",
            remedy="use spread_reduction or spread_rows for rows, bind_elements for the rest",
        )
    return stmt


def _check_row_reduction(sch: Schedule, block: SBlockRV) -> s_tir.SBlock:
    stmt = sch.get(block)
    *outer, last = [iterator.iter_type for iterator in stmt.iter_vars]
    over_last = last == tirx.IterVar.CommReduce and outer and all(kind == tirx.IterVar.DataPar for kind in outer)
    if not over_last or not stmt.reads or not stmt.reads[0].region[-1].min.same_as(stmt.iter_vars[-1].var):
        raise IllegalSchedule(
            "no reduction over the last axis of its first operand alone",
            block=block_name(sch, block),
            remedy="transpose the operand, or schedule the block with bind_elements",
        )
    return stmt


def _check_chain(sch: Schedule, block: SBlockRV, reductions: Sequence[SBlockRV]) -> int:
    """Return which of the block's reads is the operand in common; IllegalSchedule where there is no such chain."""
    operands = [_check_row_reduction(sch, reduction).reads[0].source for reduction in reductions]
    stmt, extents = sch.get(block), loop_extents(sch, block)
    found = [
        position
        for position, region in enumerate(stmt.reads)
        if operands and all(region.source.same_as(operand) for operand in operands)
    ]
    aligned = len(extents) == 2 and all(loop_extents(sch, reduction) == extents for reduction in reductions)
    if _reduces(stmt) or not aligned or len(found) != 1:
        raise IllegalSchedule(
            "no chain over rows: the last block must be elementwise, of two dimensions, reading what all others reduce",
            block=block_name(sch, block),
            value=f"{len(reductions)} reduction(s)",
            remedy="use spread_elements for elementwise blocks, spread_reduction for one reduction",
        )
    return found[0]


def _reduces(stmt: s_tir.SBlock) -> bool:
    return any(iterator.iter_type != tirx.IterVar.DataPar for iterator in stmt.iter_vars)


def _lanes(stmt: s_tir.SBlock) -> int:
    """Return a vector's elements: 16 bytes of the widest dtype, narrowed until each operand's rows are a multiple."""
    regions = [region for region in (*stmt.reads, *stmt.writes) if len(region.source.shape) == len(_widest(stmt))]
    width = VECTOR_BYTES // max(dtype_bytes(region.source.dtype) for region in regions)
    return math.gcd(width, *(constant_shape(region.source)[-1] for region in regions))


def _widest(stmt: s_tir.SBlock) -> list[int]:
    """Return the shape of the operand or output with most dimensions."""
    return max((list(region.source.shape) for region in (*stmt.reads, *stmt.writes)), key=len)


def _one_iterator(sch: Schedule, block: SBlockRV) -> tuple[LoopRV, SBlockRV]:
    """Make one loop over all elements of an elementwise block; returns their block and the one that stores them.

    Operands and result are read and computed as if they had one dimension, the result in registers.
    """
    operands, extents = len(sch.get(block).reads), loop_extents(sch, block)
    if len(extents) == 1:
        store = sch.cache_write(block, 0, "local")
    else:
        sch.transform_block_layout(block, fused_index([list(range(len(extents)))], extents))
        for operand in range(operands):
            sch.reindex(block, ("read", operand))
        store = sch.reindex(block, ("write", 0))
        sch.set_scope(block, 0, "local")
    (elements,) = sch.get_loops(block)
    return elements, store


def _busy_threads(tile: BandwidthTile, columns: int, width: int, staging: Staging | None) -> int:
    """Return as many of the tile's threads as have a vector each of a row (two if staged), in whole groups.

    A thread without any element would pass on a partial result that nobody has set.
    """
    threads = max(1, min(tile.threads, columns // (width * BandwidthTile(vectors=1).least_vectors(staging))))
    return threads // GROUPS * GROUPS or threads


def _stage(sch: Schedule, block: SBlockRV, operand: int, loop: LoopRV, threads: int, scope: str) -> CooperativeFetch:
    copy = stage_in_shared(sch, block, operand, loop, scope)
    inline_data_movement(sch, copy)
    return fetch_cooperatively(sch, copy, loop, (1, threads), vectorize=True)


def _load_vectors(
    sch: Schedule, block: SBlockRV, operand: int, loop: LoopRV, width: int, staging: Staging | None
) -> None:
    """Load what one iteration of ``loop`` reads of an operand to registers, in vectors.

    From shared memory in halves, which nvcc joins again: were each access to a shared buffer a vector of one
    width, TVM 0.27 would retype the buffer and then fail on the cp.async that fills it.
    """
    width = width // 2 if staging else width
    if width < 2:
        return
    load = sch.cache_read(block, operand, "local", consumer_blocks=[block])
    if not staging:
        inline_data_movement(sch, load)
    sch.compute_at(load, loop)
    outer = vectorize_inner(sch, loops_below(sch, load, loop)[-1], width)
    if staging:
        sch.unroll(outer)


def _store_vectors(sch: Schedule, store: SBlockRV, loop: LoopRV, width: int) -> None:
    """Store what one iteration of ``loop`` has computed in registers as one vector."""
    sch.reverse_compute_at(store, loop)
    if width > 1:
        vectorize_inner(sch, loops_below(sch, store, loop)[-1], width)


def _unroll_short(sch: Schedule, loop: LoopRV) -> None:
    """Write a short loop out, so that its loads are independent; a long one stays as it is."""
    if loop_extent(sch, loop) <= MOST_UNROLLED:
        sch.unroll(loop)


def _split_reduction(sch: Schedule, block: SBlockRV, extents: list[int]) -> CombinedReduction:
    """Cut a row reduction into each thread's part, groups of these, and the total; rows become one loop."""
    *rows, columns = sch.get_loops(block)
    if len(rows) > 1:
        sch.fuse(*rows)
    *_, thread, _ = sch.split(columns, extents)
    partial = sch.rfactor(thread, factor_axis=0)
    _, group = sch.split(sch.get_loops(block)[-1], [None, min(GROUPS, extents[-2])])
    groups = sch.rfactor(group, factor_axis=0)
    for part in (partial, groups):
        sch.set_scope(part, 0, "local")
    return CombinedReduction(partial, groups, block)


def _spread_partial(
    sch: Schedule, reduction: CombinedReduction, rows: LoopRV, width: int, staging: Staging | None, scope: str
) -> None:
    """Bind the loops of each thread's part of a whole row: (vectors, thread, lane)."""
    vectors, thread, lane = loops_below(sch, reduction.partial, rows)
    sch.reorder(thread, vectors, lane)
    sch.bind(thread, "threadIdx.x")
    if loop_extent(sch, vectors) > 1 or not staging:  # see BandwidthTile.least_vectors
        _load_vectors(sch, reduction.partial, 0, vectors, width, staging)
    sch.unroll(lane)
    _unroll_short(sch, vectors)
    _combine(sch, reduction, rows, loop_extent(sch, thread), scope)


def _combine(sch: Schedule, reduction: CombinedReduction, rows: LoopRV, threads: int, scope: str) -> None:
    """Pass the partial results to the groups, and those of the groups to the total, through shared memory."""
    _spread_over_threads(sch, reduction.groups, rows, threads, keep=1)
    for consumer in (reduction.groups, reduction.total):
        passed = sch.cache_read(consumer, 0, scope, consumer_blocks=[consumer])
        _spread_over_threads(sch, passed, rows, threads)


def _spread_over_threads(sch: Schedule, block: SBlockRV, rows: LoopRV, threads: int, keep: int | None = None) -> None:
    """Give each of a block's elements to a thread of its own; only the first ``keep`` loops are elements (all)."""
    loops = loops_below(sch, block, rows)[:keep] or [sch.add_unit_loop(block)]
    elements = sch.fuse(*loops) if len(loops) > 1 else loops[0]
    _, thread = sch.split(elements, [None, threads])
    sch.bind(thread, "threadIdx.x")
