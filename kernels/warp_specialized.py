"""A kernel of warpgroups with roles: a producer that only loads, consumers that only multiply."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script import tirx as T

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.boxes import Boxes
from tensorir_ladder.kernels.cluster_sums import ClusterSums, check_parts
from tensorir_ladder.kernels.codegen.launch_plan import ROWS_PARAMETER
from tensorir_ladder.kernels.fused_epilogue import without
from tensorir_ladder.kernels.held import held
from tensorir_ladder.kernels.kernel_form import PLAIN_FORM, KernelForm
from tensorir_ladder.kernels.raster import ROWS_TOGETHER, grouped, of_batch
from tensorir_ladder.kernels.residual import Residual, add_residual, load_residual
from tensorir_ladder.kernels.ring import RingState, check_stages
from tensorir_ladder.kernels.roles import (
    FEWEST_STAGES,
    MOST_SHARED_STAGES,
    MOST_STAGES,
    OVERLAPS,
    UNSAID,
    Consumer,
    RoleBlock,
    SharedRing,
    await_all_read,
    begin_after_last,
    drain,
    end_together,
    give_up_registers,
    let_next_begin,
    load_together,
    loaded_rows,
    release,
    say_done,
    take_registers,
)
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.stamps import Log
from tensorir_ladder.kernels.tiles import RESULT_BOXES, ClusterTile, RoleTile
from tensorir_ladder.kernels.tma import Matrices
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import PTX_TYPES, WARPGROUP, WGMMA_ROWS
from tensorir_ladder.schedules.workloads import Matmul


@on_a_short_stack
def warp_specialized(
    problem: Matmul,
    tile: RoleTile,
    stages: int,
    form: KernelForm = PLAIN_FORM,
    *,
    batch: int = 1,
    broadcast: str = "",
) -> tirx.PrimFunc:
    """``main(A, B, C)``: each block multiplies one output tile; one of its warpgroups loads, the others multiply.

    ::

        producer, one thread:                              each consumer warpgroup:
          for each k tile:                                   for each k tile:
            wait until its stage is empty                      wait until its stage is full
            load it; its bytes make the stage full             issue wgmma of it                   # returns at once
                                                               wait for wgmma of the k tile before
                                                               that one's stage is empty, for my part
                                                             results -> shared memory -> TMA store

    Nobody waits for a block barrier: a consumer waits for bytes, the producer for consumers, each on the stage's own
    two barriers. Registers go where they are needed (``setmaxnreg``). At least two stages, since a consumer keeps one
    k tile's wgmma in flight. ``form`` is a :class:`kernels.kernel_form.KernelForm`. Edges, results, and of the form
    ``bounded``, ``stamps`` and ``finish`` are as in
    :func:`kernels.tma_ring.tma_ring`. A ``batch`` above 1 is as many products, and all buffers have it as their first
    dimension, except the bias, which is that of all, and operands that are ``broadcast``, "A" or "B", over products;
    tensor maps of three dimensions keep a tile within its product.

    Where stages leave results no room of their own, they lie in the ring's memory once all consumers have read it.

    Blocks of a cluster (:class:`kernels.tiles.ClusterTile`) load what they have in common, a share each or whole k
    tiles in turn, for all that read it (TMA multicast): rows of A for those beside each other, columns of B for those
    below each other. That spares the L2 cache reads, and rows that lie across its lines cost a load for all instead of
    one each. Blocks beyond the output load like the others, and store nothing. Such a ring may have 16 stages.

    Where such a tile has ``parts``, so many blocks of a cluster have one output tile, and each as many k tiles, give or
    take one; then each adds up and stores a share of the results (:mod:`kernels.cluster_sums`), in the same order each
    time. Those of the same part share their loads, where blocks do.

    ``overlapped`` and ``next_at_once`` are as in :func:`kernels.persistent.persistent`. Results of 16 bits whose rows
    TMA cannot step over are collected in the same memory, and stored row by row (:class:`kernels.boxes.Boxes`): also
    those of an output, and a bias, of fewer ``columns`` than the product, whose B was copied to longer rows; 0 says
    that there are as many. Such an output may begin at any element. Results of parts leave from registers.

    With ``any_rows`` the kernel takes any number of rows, in a further parameter, up to those of ``problem``: whoever
    launches it gives tensor maps of the rows at hand, and as many blocks as these have tiles
    (:meth:`kernels.codegen.launch_plan.LaunchPlan.of_rows`).

    Raises
    ------
    IllegalWorkload, IllegalTile, IllegalPipeline : as there, for stages below 2 or above 8; IllegalWorkload for a
        batch with a residual or any number of rows, for clusters with either, for any number of rows whose results
        cannot leave by TMA, and for more ``columns`` than the product has; IllegalTile also for more parts than k
        tiles.
    """
    tile.check_not_swapped()
    epilogue.check_taken(problem)
    tile.check_sound()
    (down, across), blocks = tile.cluster if isinstance(tile, ClusterTile) else (1, 1), tile.shared_by
    check_stages(stages, FEWEST_STAGES, MOST_STAGES if blocks == 1 else MOST_SHARED_STAGES)
    product, parts = WarpgroupProduct.of(problem, tile), tile.parts
    if tile.cluster_size > 1 and (form.finish.residual or form.any_rows):
        what = "clusters add no residual, and take no number of rows but their own"
        raise IllegalWorkload(what, value=f"{tile.cluster_size} blocks", remedy="take blocks on their own")
    width = epilogue.stored_columns(problem, form.columns)
    by_tma = epilogue.can_store_by_tma(replace(problem, n=width), tile) and parts == 1
    in_boxes = problem.out_dtype in PTX_TYPES
    if form.any_rows and not by_tma:
        raise IllegalWorkload(
            "results of any number of rows leave by TMA alone",
            value=f"rows of {width} of {problem.out_dtype}",
            limit="16-bit results, rows of multiples of 16 bytes",
            remedy="give 16-bit results and pad rows, or do without",
        )
    if batch > 1 and form.any_rows:
        raise IllegalWorkload(
            "a batch has a fixed number of rows",
            value=f"batch {batch}",
            remedy="do without any number of rows",
        )
    if batch > 1 and form.finish.residual:
        raise IllegalWorkload(
            "a batch has no residual", value=f"batch {batch}", remedy="add it afterwards, or multiply one by one"
        )
    tile_rows, tile_columns, k_tiles = tile.counts(problem)
    check_parts(parts, k_tiles)
    tile_rows, tile_columns = -(-tile_rows // down), -(-tile_columns // across)  # of clusters, where there are some
    tiles = tile_rows * tile_columns
    if form.overlapped:
        product = product.for_overlap(
            a_streams=tile_columns == 1 and "A" not in broadcast,
            b_streams=tile_rows == 1 and "B" not in broadcast and not form.any_rows,
        )
    load_rows = loaded_rows(product, across, down)
    widths = {"columns": width, "b_columns": product.b_columns, "c_columns": product.box_columns}
    stages = max(FEWEST_STAGES, min(stages, k_tiles))
    rectified = form.finish.rectified
    residual = Residual(problem, tile, product, rectified) if form.finish.residual else None
    at_end = form.overlapped and not form.next_at_once
    in_ring = parts > 1 or tile.boxes_in_ring(stages, product.stage_bytes)
    result_bytes = tile.sum_bytes if parts > 1 else tile.box_bytes
    tile.check_room(stages, product.stage_bytes, result_bytes, in_ring)
    log = Log(form.stamps, ("producer", *(f"consumer {number}" for number in range(tile.consumers))))

    @T.prim_func
    def main(
        A_ptr: T.handle,
        B_ptr: T.handle,
        C_ptr: T.handle,
        rows: T.int32,
        bias_ptr: T.handle,
        second_ptr: T.handle,
        residual_ptr: T.handle,
    ):
        boxes_of = T.meta_var((*load_rows, WGMMA_ROWS if by_tma else None))
        matrices = Matrices(problem, (A_ptr, B_ptr, C_ptr), boxes_of, batch, broadcast=broadcast, **widths)
        bias = T.meta_var(form.finish.bind(bias_ptr, width, second_ptr))
        added = T.meta_var(residual.bind(residual_ptr) if form.finish.residual else None)
        log.bind()
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        here = RoleBlock(tiles * batch * blocks * parts, tile.consumers, blocks, across, form.overlapped, parts=parts)
        cluster = ClusterSums(tile, here)
        pool = T.SMEMPool()
        shared = SharedRing(pool, stages, product.stage_bytes, tile.consumers, form.bounded, result_bytes, in_ring)
        log.clocks("begin", here.number, here.thread == 0)
        shared.begin(here)
        if form.overlapped:
            begin_after_last(form.next_at_once)
        which = T.meta_var(of_batch(here.number // (blocks * parts), tiles, batch))
        maps = T.meta_var(matrices.of(held("held_matrix", which[0], form.overlapped and batch > 1)))
        high = T.meta_var((rows + (tile.block_m - 1)) // tile.block_m if form.any_rows else tile_rows)
        place = T.meta_var(grouped(which[1], high, tile_columns, max(1, ROWS_TOGETHER // down)))
        row: T.let = (place[0] * down + here.below) * tile.block_m
        column: T.let = (place[1] * across + here.beside) * tile.block_n
        tile_corner = T.meta_var((held("held_row", row, form.overlapped), held("held_column", column, form.overlapped)))
        share = T.meta_var(cluster.share_of(k_tiles))
        if here.warpgroup == 0:  # the producer
            give_up_registers()
            if here.warp == 0 and tma.elected():
                fill = RingState(stages, 1)  # 1: the ring's first turn waits for nobody
                loads = T.meta_var(log.role("producer", here.number))
                for k_tile in T.serial(share.k_tiles):
                    loads.wait("empty", shared.empty, fill, k_tile, "producer")
                    corner = T.meta_var((*tile_corner, (share.first + k_tile) * tile.block_k))
                    sharing = T.meta_var((here.of_its_rows, here.of_its_columns))
                    load_together(product, maps, corner, shared, fill.stage, k_tile, *sharing)
                    loads.mark("load issued", k_tile)
                    fill.advance()
                if form.finish.residual:
                    load_residual(residual, added, tile_corner, shared, fill, loads, k_tiles)
                drain(shared.empty, fill, stages - UNSAID, here)
            say_done(here)
            cluster.meet()
            cluster.separate()
        else:  # a consumer
            take_registers(tile)
            mine = Consumer(here, shared, product, tile)
            marks = T.meta_var(log.role("consumer 0", here.number, mine.number, here.thread % WARPGROUP == 0))
            for k_tile in T.serial(share.k_tiles):
                marks.wait("full", shared.full, mine.read, k_tile, "consumer")
                mine.multiply(marks, k_tile, k_tile != 0)  # issued; it runs on
                mine.retire_former(marks, k_tile, k_tile > 0)  # the stage of the k tile before is empty
            if at_end:
                let_next_begin()
            retire(mine.sums, 0)
            if form.finish.residual:
                release(shared.empty, mine.last, here)  # a turn of the residual may want the stage
            say_done(here)
            marks.mark("mma retired", share.k_tiles - 1)
            marks.mark("epilogue begins")
            if parts > 1:
                cluster.store(mine, shared.results, maps.c, tile_corner, form.finish, bias, not form.columns)
            else:
                corner = T.meta_var((tile_corner[0] + mine.row, tile_corner[1] + mine.column))
                form.finish.apply(bias, mine.sums, product, corner[1], here.lane)
                if in_boxes:
                    packed = T.alloc_local((product.registers // 2,), "uint32")
                    boxes = Boxes(maps.c_map, product, shared.results, RESULT_BOXES, output=maps.c)
                    epilogue.pack(mine.sums, packed, problem.out_dtype)
                    if form.finish.residual:
                        add_residual(residual, packed, mine, marks, k_tiles)
                    if in_ring:
                        await_all_read(tile.consumers)
                    marks.mark("sums free")
                    for portion in T.unroll(boxes.portions):
                        marks.mark("box begins", portion)
                        boxes.store(packed, portion, *corner, mine.number, here.warp, here.lane)
                        marks.mark("box stored", portion)
                    boxes.finish(here)
                else:
                    lane = T.meta_var((here.warp, here.lane))
                    epilogue.store_fragments(mine.sums, product, maps.c, *corner, *lane, aligned=not form.columns)
            marks.mark("results stored", together=True)
        end_together(here)
        log.clocks("end", here.number, here.thread == 0, together=True)

    used = {**form.finish.pointers, ROWS_PARAMETER: form.any_rows}
    made = without(main, *(name for name, is_used in used.items() if not is_used))
    return made.with_attr(OVERLAPS, True) if form.overlapped else made
