"""Contractions by warpgroups: tiles, panels in shared memory, tensorization and a pipeline with wgmma in flight.

A warpgroup's multiplication is asynchronous, as the copies are: it is *issued*, and must be *retired* before its
results are used or its operands overwritten. :func:`pipeline_warpgroups` gives the k loop this form::

    for k:  wait until tile k has landed;  barrier            # the gate (schedules/one_barrier.py)
            issue the multiplication of stage k % stages      # returns at once
            start filling stage (k + stages - 2) % stages     # while the tensor cores are busy
            retire tile k - 1                                 # at most one multiplication stays in flight
    retire the last tile

Why that is right: the stage filled in iteration k held tile k - 2, which every warpgroup retired in its iteration
k - 1, and all threads met at the barrier of iteration k in between. Tile k, which it is read as, has landed for
every thread that waited at the gate, and the barrier makes that all of them; ``fence.proxy.async`` behind the barrier
brings what they copied before the instruction's eyes. With nothing left in flight (``in_flight=0``) tile k is retired
at the end of its own iteration, and stage (k + stages - 1) % stages is filled, which held tile k - 1: one tile more is
on its way with as many stages, and the tensor cores wait at each barrier.

As pipeline stages: copies 0; gate and issue stages - 1 - in_flight; retire stages - 1. The retiring statement declares
reads of both operands, so that TVM gives them one stage per tile from the first copy to the last retirement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Operand, Positive, Threads
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile
from tensorir_ladder.schedules.inspection import (
    block_name,
    innermost_iterator,
    is_constant,
    loop_extent,
    loop_name,
    loops_below,
    operand_regions,
    realize_of,
    replaced,
    statements_under,
)
from tensorir_ladder.schedules.isa import PANEL, SWIZZLED_PIECES, VECTOR_BYTES, WARP
from tensorir_ladder.schedules.loops.layout import check_product, check_sums, contraction_loops, index_map, pad_to_tile
from tensorir_ladder.schedules.loops.tiling import (
    K_TILES,
    bind_batched_grid,
    k_tiles_together,
    pipelined_k_tiles,
    raster_blocks,
)
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes, vectorize_inner, widest_vector
from tensorir_ladder.schedules.memory.box_stores import storable_by_tma, store_by_tma
from tensorir_ladder.schedules.memory.staging import (
    KEPT,
    CooperativeFetch,
    accumulate_in_registers,
    drop_condition,
    fetch_cooperatively,
    initialize_before,
    inline_data_movement,
    stage_in_shared,
)
from tensorir_ladder.schedules.memory.swizzling import swizzle_rows
from tensorir_ladder.schedules.memory.tensor_maps import BoxFetch, fetch_by_tma, has_boxes
from tensorir_ladder.schedules.passes import replace_untraced, with_body, with_loop_body
from tensorir_ladder.schedules.pipeline.one_barrier import (
    RETIRE,
    RETIRE_FUNCTION,
    RETIRED,
    hide_reads,
    meet_behind_copies,
    place_behind,
    whole_buffer,
)
from tensorir_ladder.schedules.pipeline.pipelining import PipelinePlan, pipeline_loop
from tensorir_ladder.schedules.tensor_cores.fragments import FRAGMENT
from tensorir_ladder.schedules.tensor_cores.wgmma import LANES, Wgmma, keep_in_registers
from tensorir_ladder.schedules.tiles import WarpgroupTile

SCOPE = "shared.dyn"


@dataclass(frozen=True)
class WarpgroupLoops:
    """The loops of a contraction in warpgroup tiles, by role, outermost first."""

    block_row: LoopRV
    block_column: LoopRV
    group_row: LoopRV
    group_column: LoopRV
    k_outer: LoopRV
    row: LoopRV
    column: LoopRV
    k_inner: LoopRV


@dataclass(frozen=True)
class WarpgroupContraction:
    """A contraction staged for warpgroups: its loops, its blocks and its instruction.

    ``copies`` fill shared memory, one per operand, or ``boxes`` do; ``write_back`` stores a thread's results. The
    loops ``row``, ``column`` and ``k_inner`` are gone once :func:`multiply_by_wgmma` has put the instruction in their
    place.
    """

    loops: WarpgroupLoops
    copies: tuple[CooperativeFetch, ...]
    write_back: SBlockRV
    instruction: Wgmma
    boxes: tuple[BoxFetch, ...] = ()


def tile_for_warpgroups(
    sch: Schedule, rows: LoopRV, columns: LoopRV, reduction: LoopRV, tile: WarpgroupTile
) -> WarpgroupLoops:
    """Cut a contraction's three loops into block tiles, warpgroups' tiles and k tiles, and reorder them.

    ::

        before   for i < M:  for j < N:  for k < K:  C[i, j] += ...
        after    for block_row:  for block_column:  for group_row:  for group_column:
                   for k_outer < K / block_k:
                     for row < group_m:  for column < group_n:  for k_inner < block_k:  C[...] += ...

    Extents must divide (:func:`schedules.loops.pad_to_tile`). Of a tile whose operands are swapped ``column`` is
    outside ``row``, as the instruction has them.
    """
    groups_m, groups_n = tile.warpgroups
    block_row, group_row, row = sch.split(rows, [None, groups_m, tile.group_m])
    block_column, group_column, column = sch.split(columns, [None, groups_n, tile.group_n])
    k_outer, k_inner = sch.split(reduction, [None, tile.block_k])
    loops = WarpgroupLoops(block_row, block_column, group_row, group_column, k_outer, row, column, k_inner)
    sch.reorder(*vars(loops).values())
    if tile.swapped:
        sch.reorder(column, row)
    return loops


def accumulate_by_warpgroups(sch: Schedule, block: SBlockRV, group: LoopRV, instruction: Wgmma) -> SBlockRV:
    """Keep sums in the instruction's registers under the loop over warpgroups, and write them back behind the k loop.

    :func:`schedules.memory.accumulate_in_registers` and :func:`lay_out_accumulators` in one; returns the write-back,
    whose loops over a warpgroup's results are in the instruction's order, rows first.
    """
    write_back = accumulate_in_registers(sch, block, group, FRAGMENT)
    lay_out_accumulators(sch, block, instruction)
    if instruction.swapped:
        *_, row, column = loops_below(sch, write_back, group)
        sch.reorder(column, row)
    return write_back


def bind_warpgroups(sch: Schedule, loops: WarpgroupLoops) -> LoopRV:
    """Run a block's warpgroups as threadIdx.y; returns their loop."""
    group = sch.fuse(loops.group_row, loops.group_column)
    sch.bind(group, "threadIdx.y")
    return group


def lay_out_accumulators(sch: Schedule, block: SBlockRV, instruction: Wgmma) -> None:
    """Bring a block's output, the accumulators, to the instruction's order of lanes and registers.

    ::

        before   C_local[i, j]
        after    C_local[i / rows, j / columns, lane, register]     # (lane, register) of (i % rows, j % columns)
    """
    m, n = instruction.outputs
    outer = len(sch.get(block).writes[0].region) - 2

    def place(*index: tirx.Var) -> tuple:
        *batch, i, j = index
        return (*batch, i // m, j // n, *instruction.fragment(i % m, j % n))

    sch.transform_layout(block, ("write", 0), index_map(outer + 2, place))


def lay_out_panels(sch: Schedule, copy: SBlockRV) -> None:
    """Cut the rows of a tile in shared memory into panels of 128 swizzled bytes, as the instruction reads them.

    ::

        before   A_shared[i, k] = A[i, k]
        after    A_shared[k / 64, i, k % 64] = A[i, k]              # 16-byte pieces of a row permuted
    """
    outer = len(sch.get(copy).writes[0].region) - 2
    sch.transform_layout(copy, ("write", 0), index_map(outer + 2, _in_panels))
    swizzle_rows(sch, copy)


def _in_panels(*index: tirx.Var) -> tuple:
    *batch, row, element = index
    return (*batch, element // PANEL, row, element % PANEL)


def lay_out_own_panels(sch: Schedule, copy: SBlockRV, width: Positive) -> None:
    """Give each instruction panels of its own, of a stored [k, n] operand whose instructions read no whole panels.

    ::

        before   for k, j < 528:  B_shared[k, j] = B[k, j]
        after    for own < 3, panel < 3, k, element < 64:                               # width = 176
                   j = own * 176 + panel * 64 + element
                   B_shared[own, panel, k, element] = B[k, j] if panel * 64 + element < 176 else 0

    ``width`` is how many columns an instruction has, of which the rows hold a multiple. What the last panel has beyond
    is zeros, and read by nobody. The block is one that copies a whole operand, under no loop yet; pieces of 16 bytes
    are permuted as by :func:`lay_out_panels`.

    Raises
    ------
    IllegalTile : for rows whose length only run time knows.
    """
    shape = sch.get(copy).writes[0].source.shape
    if not is_constant(shape[-1]):
        raise IllegalTile(
            "columns that are no whole panels need rows of a known length",
            value=f"{width} columns of {shape[-1]}",
            limit=f"multiples of {PANEL}",
            remedy=f"choose a tile whose warpgroups have a multiple of {PANEL} columns",
        )
    rank = len(shape)
    if int(shape[-1]) > width:  # of a single instruction's columns TVM would drop the first index
        apart = index_map(rank, lambda *index: (*index[:-2], index[-1] // width, index[-2], index[-1] % width))
        sch.transform_block_layout(copy, apart)
        sch.transform_layout(copy, ("write", 0), apart)
        rank += 1
    sch.transform_layout(copy, ("write", 0), index_map(rank, _in_panels), pad_value=0.0)
    swizzle_rows(sch, copy)


def _copy_where_read(sch: Schedule, copy: SBlockRV, width: int) -> None:
    """Write what :func:`lay_out_own_panels` copies as one choice, which asynchronous copies know: an element or zero.

    ::

        before   0 if panel == 2 and 48 <= element else (B[k, j] if k < K else 0)
        after    B[k, j] if panel * 64 + element < 176 and k < K else 0
    """
    block = sch.get(copy)
    *_, panel, _, element = (iterator.var for iterator in block.iter_vars)
    condition, value = panel * PANEL + element < width, block.body.value.args[2]
    if isinstance(value, ir.Call) and str(value.op.name).endswith("if_then_else"):  # ragged rows or columns, too
        condition, value = tirx.all(condition, value.args[0]), value.args[1]
    zero = tirx.const(0.0, str(block.body.buffer.dtype))
    chosen = tirx.if_then_else(condition, value, zero)
    stored = tirx.BufferStore(block.body.buffer, chosen, block.body.indices)
    changed = with_body(block, stored)
    replace_untraced(sch, sch.get_sref(copy), changed, "lay_out_own_panels", {block: changed})


def stage_in_panels(
    sch: Schedule, block: SBlockRV, operand: Operand, loop: LoopRV, threads: Threads, run: Positive = PANEL
) -> CooperativeFetch:
    """Copy an operand's k tile to shared memory by all threads, in panels as the instruction reads them.

    :func:`schedules.memory.stage_in_shared`, :func:`lay_out_panels` and
    :func:`schedules.memory.fetch_cooperatively` in one. ``operand`` counts from 0. ``run`` is how many elements of a
    row one instruction reads: where these are no whole panels, :func:`lay_out_own_panels` takes the second's place.
    """
    return fetch_cooperatively(sch, _copy_in_panels(sch, block, operand, loop, run), loop, threads, vectorize=True)


def stage_by_tma(
    sch: Schedule,
    block: SBlockRV,
    operand: Operand,
    loop: LoopRV,
    run: Positive = PANEL,
    blocks: int = 1,
    apart: int = 1,
) -> BoxFetch:
    """Copy an operand's k tile to shared memory as :func:`stage_in_panels` does, each panel by one instruction of TMA.

    :func:`schedules.memory.fetch_by_tma` is what takes :func:`schedules.memory.fetch_cooperatively`'s place, and says
    what ``blocks`` and ``apart`` are, and what it raises. Both operands' copies must be TMA's.
    """
    return fetch_by_tma(sch, _copy_in_panels(sch, block, operand, loop, run), loop, blocks, apart)


def _copy_in_panels(sch: Schedule, block: SBlockRV, operand: int, loop: LoopRV, run: int) -> SBlockRV:
    """Stage an operand in panels; the copy's loops are panels (of each instruction), rows and a row's elements."""
    if run % PANEL == 0:
        copy = stage_in_shared(sch, block, operand, loop, SCOPE)
        lay_out_panels(sch, copy)
        inline_data_movement(sch, copy)
        *_, row, element = loops_below(sch, copy, loop)
        panel, element = sch.split(element, [None, PANEL])
        sch.reorder(panel, row, element)
    else:
        copy = sch.cache_read(block, operand, SCOPE)
        lay_out_own_panels(sch, copy, run)
        sch.compute_at(copy, loop, preserve_unit_loops=True)
        inline_data_movement(sch, copy)
        _copy_where_read(sch, copy, run)
    return copy


def spread_fragment(sch: Schedule, block: SBlockRV, loop: LoopRV, vectorize: bool = False) -> int:
    """Let each thread of a warpgroup do what a block does to its own accumulators.

    ::

        before   for i < 64:  for j < 256:  D[i, j] = C_local[..., lane(i, j), register(i, j)]
        after    for lane < 128, bound to threadIdx.x:
                   for eight < 32:  for half < 2:  for pair < 2:      # its registers, in their order
                     D[...] = C_local[..., lane, 4 * eight + 2 * half + pair]

    ``loop`` is the loop around the block's own. ``vectorize`` stores pairs at once where alignment allows; returns the
    width.
    """
    *_, i, j = loops_below(sch, block, loop)
    tile, warp, half, row = sch.split(i, [None, 4, 2, 8])
    eight, quad, pair = sch.split(j, [None, 4, 2])
    sch.reorder(warp, row, quad, tile, eight, half, pair)
    sch.bind(sch.fuse(warp, row, quad), "threadIdx.x")
    for inner in (tile, eight, half):
        sch.unroll(inner)
    width = min(widest_vector(sch, block, pair), 2) if vectorize else 1
    if width == 2:
        vectorize_inner(sch, pair, width)
    else:
        sch.unroll(pair)
    return width


def keep_rows_apart(sch: Schedule, block: SBlockRV) -> bool:
    """Let a contraction's result be plain rows and columns first, where rows or columns are several dimensions of it.

    ::

        before   D[i // 56, i % 56, j] = f(C[i, j])                         # an image's rows
        after    D'[i, j] = f(C[i, j]);  D[i // 56, i % 56, j] = D'[i, j]     # for store_by_rows to bring to its place

    :func:`store_by_rows` would otherwise collect a tile in the result's form, of which most is not used. Call it before
    the block is tiled. Returns whether anything changed.
    """
    last = block
    while consumers := sch.get_consumers(last):
        (last,) = consumers
    if all(isinstance(dimension.min, tirx.Var) for dimension in sch.get(last).writes[0].region[-2:]):
        return False
    sch.annotate(sch.reindex(last, ("write", 0)), KEPT, 1)
    return True


def store_by_rows(
    sch: Schedule, write_back: SBlockRV, loop: LoopRV, threads: Threads, *, whole: bool = False
) -> CooperativeFetch | None:
    """Collect a block tile's results in shared memory, and store them from there row by row.

    ::

        before   D[i, j] = f(C_local[...])                       # each thread its pairs, 16 bytes of a row at a time
        after    D_shared[i, j] = f(C_local[...])                # swizzled; where the ring was
                 D[i, j] = D_shared[i, j]                        # whole rows, by all threads together

    ``loop`` is the grid's, under which both stand. Call it before :func:`spread_fragment`. Rows of the output that are
    no multiples of 16 bytes are stored in narrower pieces. An output with rows of less than that has none worth
    collecting: nothing is changed, and None returned.

    ``whole`` collects what lies beyond the output's edges, too, which takes no condition for each pair, and does not
    store it: for tiles no larger than the output. It counts where ``f`` reads nothing but the sums.
    """
    output = sch.get(write_back).writes[0].source
    if int(output.shape[-1]) * dtype_bytes(output.dtype) < VECTOR_BYTES:
        return None
    if consumers := sch.get_consumers(write_back):
        (rows,) = consumers  # what keep_rows_apart has made
        sch.set_scope(write_back, 0, SCOPE)
    else:
        rows = sch.cache_write(write_back, 0, SCOPE)
    sch.reverse_compute_at(rows, loop, preserve_unit_loops=True)
    swizzle_rows(sch, write_back)
    *_, row, column = loops_below(sch, rows, loop)
    vectors = loop_extent(sch, column) * dtype_bytes(output.dtype) // VECTOR_BYTES
    in_vectors = not int(output.shape[-1]) * dtype_bytes(output.dtype) % VECTOR_BYTES
    if in_vectors and loop_extent(sch, column) % PANEL == 0 and WARP % vectors and vectors % WARP:
        # Warps would store parts of rows, cut anywhere: 64 columns of several instead, as an H200 was faster by.
        panel, column = sch.split(column, [None, PANEL])
        sch.reorder(panel, row, column)
    if whole and all(region.source.scope() == FRAGMENT for region in sch.get(write_back).reads):
        drop_condition(sch, write_back, "store_by_rows")
    stored = fetch_cooperatively(sch, rows, loop, threads, vectorize=True)
    if stored.width * dtype_bytes(output.dtype) < VECTOR_BYTES:
        # Many rounds of little each: a swizzle's turn of them written out, so that addresses are constants apart.
        sch.unroll(sch.split(stored.rounds, [None, math.gcd(loop_extent(sch, stored.rounds), SWIZZLED_PIECES)])[1])
    return stored


def stage_for_warpgroups(
    sch: Schedule,
    block: SBlockRV,
    tile: WarpgroupTile,
    *,
    raster: int = 8,
    store_rows: bool = False,
    k_tiles: Positive = K_TILES,
    by_tma: bool = False,
) -> WarpgroupContraction:
    """Tile a contraction for warpgroups and stage its operands as the instruction reads them.

    ::

        before   for (batch,) i, j, k:  C[i, j] += A[i, k] * B[k, j]          # or B[j, k]; C, D float32 or rounded
        after    for tile, bound to blockIdx.x:  for group, bound to threadIdx.y:
                   C_local = 0
                   for k_outer:
                     A_shared = A[tile];  B_shared = B[tile]                 # panels, by all threads together
                     for row, column, k_inner:  C_local += A_shared * B_shared
                   D = f(C_local)                                            # casts, bias, activation fused

    Ragged extents are padded on the fly; of a reduction whose length only run time knows, ``k_outer`` is the innermost
    loop (:func:`schedules.loops.tiling.pipelined_k_tiles`). Follow with :func:`pipeline_warpgroups` and
    :func:`multiply_by_wgmma`; without the latter any CPU can run it.

    Parameters
    ----------
    raster : rows of blocks that run before the next column does (:func:`schedules.loops.raster_blocks`).
    store_rows : bring results into rows in shared memory before they are stored (:func:`store_by_rows`).
    k_tiles : how many of a number that only run time knows are one pipeline, which is filled and drained for each.
    by_tma : let one thread bring operands by TMA (:func:`stage_by_tma`), instead of all by cp.async, and store results
        by it where it can (:func:`schedules.memory.store_by_tma`).

    Raises
    ------
    IllegalTile : for a tile, dtype or layout that the instruction does not have.
    IllegalSchedule : for a block with fewer than three loops; with ``by_tma`` for operands that are no boxes.
    """
    loops_of_block = contraction_loops(sch, block)
    instruction = instruction_for(sch, block, tile)
    *batch, rows, columns, reduction = loops_of_block
    k_tile = tile.block_k * k_tiles_together(sch, reduction, together=k_tiles)
    if pad_to_tile(sch, block, [1] * len(batch) + [tile.block_m, tile.block_n, k_tile]):
        *batch, rows, columns, reduction = sch.get_loops(block)
    loops = tile_for_warpgroups(sch, rows, columns, reduction, tile)
    raster_loops = raster_blocks(sch, loops.block_row, loops.block_column, raster)
    grid = bind_batched_grid(sch, batch, raster_loops)
    group = bind_warpgroups(sch, loops)
    write_back = accumulate_by_warpgroups(sch, block, group, instruction)
    if by_tma and storable_by_tma(sch, write_back, grid):
        store_by_tma(sch, write_back, grid)
    elif store_rows:
        store_by_rows(sch, write_back, grid, tile.threads)
    spread_fragment(sch, write_back, group, vectorize=True)
    runs = list(enumerate(instruction.run_lengths))
    copies: tuple[CooperativeFetch, ...] = ()
    boxes: tuple[BoxFetch, ...] = ()
    if by_tma:
        boxes = tuple(stage_by_tma(sch, block, operand, loops.k_outer, run) for operand, run in runs)
    else:
        copies = tuple(stage_in_panels(sch, block, operand, loops.k_outer, tile.threads, run) for operand, run in runs)
    spread_fragment(sch, initialize_before(sch, block, loops.k_outer), group)
    hide_reads(sch, block)
    loops = replace(loops, k_outer=pipelined_k_tiles(sch, loops.k_outer, k_tiles))
    return WarpgroupContraction(loops, copies, write_back, instruction, boxes)


def instruction_for(sch: Schedule, block: SBlockRV, tile: WarpgroupTile) -> Wgmma:
    """Return the instruction by which a tile multiplies a block's operands.

    Raises
    ------
    IllegalTile : where there is none.
    IllegalSchedule : for a block that is no sum of A[rows, k] * B[k, columns], each widened before they are multiplied.
    """
    WarpgroupTile.check_family(tile)
    check_product(sch, block)
    operands, reduction = operand_regions(sch, block), sch.get(block).iter_vars[-1].var
    if innermost_iterator(sch, block, 0) != len(sch.get(block).iter_vars) - 1:
        raise IllegalTile(
            "no wgmma reads a first operand whose rows run across the reduction",
            block=block_name(sch, block),
            value=str(operands[0]),
            limit="A[rows, k]",
            remedy="transpose the operand first, or call tensorize_contraction",
        )
    used: list[bool] = []
    tvm_ffi.structural_walk(operands[1].region[-1].min, (tirx.Var, lambda var: used.append(var.same_as(reduction))))
    b_major = "k" if any(used) else "n"
    b_rows = tile.block_n if b_major == "k" else tile.block_k
    dtype = str(operands[0].source.dtype)
    rows, columns = (tile.group_n, tile.group_m) if tile.swapped else (tile.group_m, tile.group_n)
    instruction = Wgmma(rows, columns, tile.block_k, dtype, b_major, tile.block_m, b_rows, tile.swapped)
    check_sums(sch, block, "float32")
    return instruction


def pipeline_warpgroups(
    sch: Schedule, k_outer: LoopRV, stages: int = 4, in_flight: int = 1, *, unroll_ring: bool = True
) -> PipelinePlan:
    """Keep ``stages`` k tiles in shared memory, copies ahead of and ``in_flight`` multiplications behind the barrier.

    The module's text shows the loop and says why it is right. With two k tiles in all nothing is left in flight, since
    that takes three stages; a single one is copied and multiplied without a pipeline
    (:func:`schedules.pipeline.one_barrier.meet_behind_copies`). ``unroll_ring`` writes out a turn of the ring, so that
    stages are constant addresses; left out, addresses take fewer registers, which tiles of three warpgroups need.

    Raises
    ------
    IllegalPipeline : for ``in_flight`` other than 0 or 1; for fewer stages than in_flight + 2; for a single k tile that
        TMA brings.
    """
    if in_flight not in (0, 1):
        raise IllegalPipeline(
            "multiplications in flight across the barrier", value=in_flight, limit="0 or 1", remedy="choose one of both"
        )
    if stages < in_flight + 2:
        raise IllegalPipeline(
            "one stage is filled, one is read, and each multiplication in flight needs one more",
            loop=loop_name(sch, k_outer),
            value=f"{stages} stages, {in_flight} in flight",
            limit=f"at least {in_flight + 2} stages",
            remedy="give more stages",
        )
    if loop_extent(sch, k_outer) == 1:
        return _single_tile(sch, k_outer)
    _retire_in(sch, k_outer, min(in_flight, loop_extent(sch, k_outer) - 2))
    return pipeline_loop(
        sch, k_outer, min(stages, loop_extent(sch, k_outer)), True, one_barrier=True, unroll_ring=unroll_ring
    )


def _single_tile(sch: Schedule, k_outer: LoopRV) -> PipelinePlan:
    """Let threads meet between the copies of a single k tile and its multiplication."""
    statements = statements_under(sch, k_outer)
    if has_boxes(sch, k_outer):
        raise IllegalPipeline(
            "a single k tile is no pipeline, which copies by TMA take",
            loop=loop_name(sch, k_outer),
            value=1,
            limit="at least 2 k tiles",
            remedy="pad the reduction to two k tiles, or let all threads copy (by_tma=False, stage_in_panels)",
        )
    meet_behind_copies(sch, k_outer, [at for at, statement in enumerate(statements) if statement.fills_shared])
    names = tuple(statement.name for statement in statements_under(sch, k_outer))
    return PipelinePlan(k_outer, 1, names, (), (), (), (), needs_pipeline=True)


def multiply_by_wgmma(sch: Schedule, loops: WarpgroupLoops, instruction: Wgmma) -> SBlockRV:
    """Put the instruction in the place of a pipelined contraction's inner loops, and retire the last one behind them.

    ::

        before   for k_outer:  ...;  for row, column, k_inner:  C_local += A_shared * B_shared;  retire
        after    for k_outer:  ...;  wgmma(C_local, A_shared, B_shared);  retire
                 retire all

    Where TMA brings the operands, the instruction needs no fence. Returns the block of the instruction.
    """
    if has_boxes(sch, loops.k_outer):
        instruction = replace(instruction, fenced=False)
    computing = sch.blockize(loops.column if instruction.swapped else loops.row)
    sch.tensorize(computing, instruction.register())
    hide_reads(sch, computing)
    place_behind(sch, loops.k_outer, _retire_all(sch, computing, instruction), "multiply_by_wgmma")
    return computing


def _retire_in(sch: Schedule, loop: LoopRV, in_flight: int) -> None:
    """Append to the k loop a statement that waits for all but ``in_flight`` multiplications."""
    stmt = sch.get(loop)
    filled = [region for statement in statements_under(sch, loop) for region in statement.writes]
    regions = [whole_buffer(region) for region in filled if region.source.scope() == SCOPE]
    name = f"{RETIRE_FUNCTION}{in_flight}"
    source = (
        f"__forceinline__ __device__ void {name}() {{\n"
        f'  asm volatile("wgmma.wait_group.sync.aligned {in_flight};" ::: "memory");\n}}\n'
    )
    call = tirx.Evaluate(cuda_func_call(name, source_code=source))
    block = s_tir.SBlock([], regions, [], "retire", call, annotations={RETIRE: in_flight})
    parts = list(stmt.body.seq) if isinstance(stmt.body, tirx.SeqStmt) else [stmt.body]
    body = tirx.SeqStmt([*parts, s_tir.SBlockRealize([], True, block)])
    replace_untraced(sch, sch.get_sref(loop), with_loop_body(stmt, body), "pipeline_warpgroups")


def _retire_all(sch: Schedule, computing: SBlockRV, instruction: Wgmma) -> s_tir.SBlockRealize:
    """Make a statement that waits for every multiplication, and after which the compiler may use the accumulators.

    Each accumulator is an operand of it, or the compiler could move their uses to before the wait.
    """
    region, count = _region_of(sch, computing), instruction.registers
    name = f"{RETIRE_FUNCTION}all_{count}"
    source = (
        f"__forceinline__ __device__ void {name}(void* accumulators) {{\n  float* c = (float*)accumulators;\n"
        f'  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");\n'
        f"{keep_in_registers(count)}\n}}\n"
    )
    lane = tirx.Var("lane", "int32")
    *outer, _, _ = (dimension.min for dimension in region.region)
    address = tirx.address_of(region.source[(*outer, lane, tirx.const(0, "int32"))])
    call = tirx.Evaluate(cuda_func_call(name, address, source_code=source))
    thread = tirx.IterVar(None, tirx.Var("threadIdx.x", "int32"), tirx.IterVar.ThreadIndex, "threadIdx.x")
    lanes = tirx.For(lane, 0, LANES, tirx.ForKind.THREAD_BINDING, call, thread)
    return s_tir.SBlockRealize(
        [], True, s_tir.SBlock([], [region], [region], "retired", lanes, annotations={RETIRED: 1})
    )


def _region_of(sch: Schedule, block: SBlockRV) -> ir.TensorRegion:
    """Return the region that a block writes, in terms of the loops around it."""
    stmt, realize = sch.get(block), realize_of(sch, block)
    values = {iterator.var: value for iterator, value in zip(stmt.iter_vars, realize.iter_values)}
    return replaced(stmt.writes[0], values)
