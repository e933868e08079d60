"""Step 13's kernel: as many blocks as run at once, each with one output tile after the other."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script import tirx as T

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.boxes import Boxes, LateResults
from tensorir_ladder.kernels.codegen.launch_plan import PLANNED
from tensorir_ladder.kernels.fused_epilogue import without
from tensorir_ladder.kernels.held import held_alone
from tensorir_ladder.kernels.kernel_form import PLAIN_FORM, KernelForm
from tensorir_ladder.kernels.partial_sums import PartialSums
from tensorir_ladder.kernels.raster import ROWS_TOGETHER, grouped, of_batch
from tensorir_ladder.kernels.residual import Residual, add_residual, load_residual
from tensorir_ladder.kernels.ring import RingState, check_stages
from tensorir_ladder.kernels.roles import (
    FEWEST_STAGES,
    MOST_STAGES,
    OVERLAPS,
    Consumer,
    RoleBlock,
    SharedRing,
    begin_after_last,
    drain,
    end_together,
    give_up_registers,
    let_next_begin,
    load_together,
    loaded_rows,
    say_done,
    take_registers,
)
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.stamps import Log
from tensorir_ladder.kernels.stream_k import Pieces, TileRows, known_at_run_time, most_pieces, plan_for
from tensorir_ladder.kernels.tiles import RESULT_BOXES, RoleTile
from tensorir_ladder.kernels.tma import Matrices
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.isa import PTX_TYPES, WARPGROUP, WGMMA_ROWS
from tensorir_ladder.schedules.workloads import Matmul

MOST_TOGETHER = 2  # blocks of a cluster: of four, 120 of an H200's 132 multiprocessors had one


@on_a_short_stack
def persistent(
    problem: Matmul,
    tile: RoleTile,
    stages: int,
    form: KernelForm = PLAIN_FORM,
    *,
    machine: Machine,
    blocks: int = 1,
    stream_k: bool = True,
    batch: int = 1,
    broadcast: str = "",
) -> tirx.PrimFunc:
    """``main(A, B, C, sums, flags)``: blocks that stay, and share all tiles' work out among themselves.

    ::

        producer, one thread:                     each consumer warpgroup:
          for each piece of my work:                for each piece of my work:
            fill stages with its k tiles              for the first k tiles, one box of results each:
                                                        issue wgmma; store a box of the *last* piece's results; retire
                                                      for the other k tiles:  issue wgmma; retire that before
                                                      a helper: hand over the sums
                                                      an owner: add the helpers' sums
                                                      round the results into half as many registers
                                                    store the last results

    The ring never runs dry between tiles, and the tensor cores have work while results leave. Those of the largest
    tiles leave at once, since consumers have no registers to keep them beside the next sums; meanwhile the ring fills
    (:attr:`kernels.tiles.RoleTile.leaves_late`). Which pieces there are
    says :func:`kernels.stream_k.plan_for` for as many blocks as ``machine`` runs at once (``stream_k`` off: whole
    tiles only). Helpers leave ``sums`` (float32) and ``flags`` (int32, zeros before the first call and after each) for
    owners: an element each where nothing is cut.

    ``overlapped`` blocks begin while the kernel before in the stream still runs, where it leaves them room: barriers
    are ready when it ends, and all wait for that before they touch memory (programmatic dependent launch; the function
    says so in its attribute :data:`kernels.roles.OVERLAPS`). The next kernel's may begin once this one's last products
    are issued; with ``next_at_once``, which is nothing without ``overlapped``, from the start. At once pays only where
    the GPU has places for all blocks of both: else they take what places are left, unevenly, and an H200 takes up to
    1.25 times as long.

    ``blocks`` of 2 are clusters: two blocks, one above the other, each load half of their common B tile, for both
    (TMA multicast). The two blocks of a :class:`kernels.tiles.ClusterTile` load what they have in common, as in
    :func:`kernels.warp_specialized.warp_specialized`: of B, or beside each other of A, and of any width. Stages, edges,
    results, ``bounded``, ``stamps`` and ``finish`` are as there.

    Results, ``columns``, ``batch`` and ``broadcast`` are as in :func:`kernels.warp_specialized.warp_specialized`; all
    tiles of a batch are shared out among the blocks, whose rings have stages for k tiles of several of its products.

    With ``any_rows`` the kernel takes any number of rows, in a further parameter, and with it, as ``helpers`` and
    ``cut``, how the last wave is cut then (:func:`kernels.stream_k.plans_by_rows`): as many workers as the machine runs
    at once are launched for each, and have room for the pieces of any.

    Raises
    ------
    IllegalWorkload, IllegalTile, IllegalPipeline : as there; IllegalTile also for a B tile that a cluster cannot share,
        and for one with parts; IllegalWorkload for clusters with a residual or any number of rows, and for a batch with
        either.
    """
    tile.check_not_swapped()
    tile.check_whole()
    tile.check_sound()
    epilogue.check_taken(problem)
    if (total := blocks * tile.shared_by) > MOST_TOGETHER:
        raise IllegalTile(
            "clusters of so many blocks find no place on some multiprocessors, which then have no work",
            value=f"{total} blocks",
            limit=f"{MOST_TOGETHER}",
            remedy="take a smaller cluster, or step 12",
        )
    check_stages(stages, FEWEST_STAGES, MOST_STAGES)
    product = WarpgroupProduct.of(problem, tile)
    product.b.check_shares(blocks)
    if total > 1 and (form.finish.residual or form.any_rows):
        what = "clusters add no residual, and take no number of rows but their own"
        raise IllegalWorkload(what, value=f"{total} blocks", remedy="take blocks on their own")
    if batch > 1 and (form.finish.residual or form.any_rows):
        what = "a batch has no residual, and a fixed number of rows"
        raise IllegalWorkload(what, value=f"batch {batch}", remedy="multiply one by one")
    width = epilogue.stored_columns(problem, form.columns)
    by_tma = epilogue.can_store_by_tma(replace(problem, n=width), tile)
    in_boxes = problem.out_dtype in PTX_TYPES
    if form.any_rows and not by_tma:
        raise IllegalWorkload(
            "results of any number of rows leave by TMA alone",
            value=f"rows of {width} of {problem.out_dtype}",
            remedy="give 16-bit results and rows of multiples of 16 bytes",
        )
    down, across = tile.cluster[0] * blocks, tile.cluster[1]
    box_rows = (*loaded_rows(product, across, down), WGMMA_ROWS if by_tma else None)
    widths = {"columns": width, "b_columns": product.b_columns, "c_columns": product.box_columns}
    known = plan_for(problem, tile, machine, blocks, stream_k, batch)
    early = known.shortest if tile.leaves_late else 1  # k tiles beside which results leave
    tile_columns = -(-problem.n // (tile.block_n * across))
    if form.overlapped:
        tile_rows = -(-problem.m // (tile.block_m * down))
        product = product.for_overlap(
            a_streams=tile_columns == 1 and "A" not in broadcast,
            b_streams=tile_rows == 1 and "B" not in broadcast and not form.any_rows,
        )
    loaded = known.k_tiles if batch == 1 else known.k_tiles * -(-known.tiles // known.workers)  # k tiles of a worker
    stages = max(FEWEST_STAGES, min(stages, loaded))
    pieces = most_pieces(problem, tile, machine) if form.any_rows else known.pieces
    room, again = pieces * total, form.any_rows or known.tiles > known.workers
    workers = machine.multiprocessors if form.any_rows else known.workers
    floats = room * PartialSums.floats(product.registers, tile.consumers)
    rectified = form.finish.rectified
    residual = Residual(problem, tile, product, rectified) if form.finish.residual else None
    at_end = form.overlapped and not form.next_at_once
    count = tile.boxes_at_least
    if not by_tma and in_boxes and count < RESULT_BOXES:  # whole rows take the room of two, which a stage gives up
        count, stages = RESULT_BOXES, max(FEWEST_STAGES, stages - 1)
    result_bytes = tile.box_bytes // RESULT_BOXES * count
    tile.check_room(stages, product.stage_bytes, result_bytes)
    log = Log(form.stamps, ("producer", *(f"consumer {number}" for number in range(tile.consumers))))

    @T.prim_func
    def main(
        A_ptr: T.handle,
        B_ptr: T.handle,
        C_ptr: T.handle,
        sums_ptr: T.handle,
        flags_ptr: T.handle,
        bias_ptr: T.handle,
        second_ptr: T.handle,
        residual_ptr: T.handle,
        rows: T.int32,
        helpers: T.int32,
        cut: T.int32,
    ):
        shared_sums = T.match_buffer(sums_ptr, (max(1, floats),), "float32", align=16)
        flags = T.match_buffer(flags_ptr, (max(1, room * tile.consumers),), "int32", align=4)
        matrices = Matrices(problem, (A_ptr, B_ptr, C_ptr), box_rows, batch, broadcast=broadcast, **widths)
        bias = T.meta_var(form.finish.bind(bias_ptr, width, second_ptr))
        added = T.meta_var(residual.bind(residual_ptr) if form.finish.residual else None)
        log.bind()
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        here = RoleBlock(workers * total, tile.consumers, total, across, form.overlapped)
        pool = T.SMEMPool()
        shared = SharedRing(pool, stages, product.stage_bytes, tile.consumers, form.bounded, result_bytes)
        log.clocks("begin", here.number, here.thread == 0)
        shared.begin(here)
        if form.overlapped:
            begin_after_last(form.next_at_once)
        high = T.meta_var(
            TileRows(rows, tile.block_m).count if form.any_rows else known.tiles // (batch * tile_columns)
        )
        plan = T.meta_var(
            known_at_run_time(known, workers, high * tile_columns, helpers, cut) if form.any_rows else known
        )
        work = Pieces(plan, here.number // total)
        partial = PartialSums(shared_sums, flags, product.registers, tile.consumers, form.any_rows)
        if here.warpgroup == 0:  # the producer
            give_up_registers()
            if here.warp == 0 and tma.elected():
                fill = RingState(stages, 1)  # 1: the ring's first turn waits for nobody
                loads = T.meta_var(log.role("producer", here.number, counts=True))
                while work.tile < plan.tiles:
                    which = T.meta_var(of_batch(work.tile, high * tile_columns, batch))
                    maps = T.meta_var(matrices.of(held_alone("held_matrix", which[0], form.overlapped and batch > 1)))
                    place = T.meta_var(grouped(which[1], high, tile_columns, max(1, ROWS_TOGETHER // down)))
                    row: T.let = (place[0] * down + here.below) * tile.block_m
                    column: T.let = (place[1] * across + here.beside) * tile.block_n
                    own_row = T.meta_var(held_alone("held_row", row, form.overlapped))
                    own_column = T.meta_var(held_alone("held_column", column, form.overlapped))
                    for k_tile in T.serial(work.count):
                        loads.wait("empty", shared.empty, fill, k_tile, "producer")
                        corner = T.meta_var((own_row, own_column, (work.first + k_tile) * tile.block_k))
                        sharing = T.meta_var((here.of_its_rows, here.of_its_columns))
                        load_together(product, maps, corner, shared, fill.stage, k_tile, *sharing)
                        loads.mark("load issued", k_tile)
                        fill.advance()
                    if form.finish.residual:
                        if work.finishes():
                            load_residual(residual, added, (row, column), shared, fill, loads, work.count)
                    loads.advance(work.count)
                    work.advance()
                drain(shared.empty, fill, stages, here)
            say_done(here)
        else:  # a consumer
            take_registers(tile)
            mine = Consumer(here, shared, product, tile)
            own: T.let = here.thread % WARPGROUP
            marks = T.meta_var(log.role("consumer 0", here.number, mine.number, own == 0, counts=True))
            leaving = T.meta_var((matrices.c_map, product, shared.results, count, again, matrices.c))
            boxes = T.meta_var(Boxes(*leaving) if in_boxes else None)
            late = LateResults(boxes, mine, matrices if batch > 1 else None)

            @T.inline
            def add(piece):
                """Add what a helper handed over."""
                partial.add(mine, piece * total + here.member, own)

            @T.inline
            def hand_over(piece):
                """Leave the sums to the tile's owner."""
                partial.hand_over(mine, piece * total + here.member, own)
                late.waiting = 0

            while work.tile < plan.tiles:
                marks.mark("piece begins")
                which = T.meta_var(of_batch(work.tile, high * tile_columns, batch))
                place = T.meta_var(grouped(which[1], high, tile_columns, max(1, ROWS_TOGETHER // down)))
                row: T.let = (place[0] * down + here.below) * tile.block_m + mine.row
                column: T.let = (place[1] * across + here.beside) * tile.block_n + mine.column
                for k_tile in T.unroll(early):  # beside these the piece before stores its results, a box each
                    marks.wait("full", shared.full, mine.read, k_tile, "consumer")
                    mine.multiply(marks, k_tile, T.bool(k_tile != 0))
                    late.store(marks, k_tile)
                    mine.retire_former(marks, k_tile, k_tile > 0)
                for portion in T.unroll(max(0, late.portions - early)):
                    late.store(marks, early + portion)
                for k_tile in T.serial(work.count - early):
                    marks.wait("full", shared.full, mine.read, early + k_tile, "consumer")
                    mine.multiply(marks, early + k_tile, T.bool(True))
                    mine.retire_former(marks, early + k_tile, True)
                retire(mine.sums, 0)
                mine.say_empty(marks, work.count - 1)
                late.waiting = 1
                work.each_helper(add)  # an owner of a tile that was cut
                work.if_helping(hand_over)  # a helper, which then has no results of its own
                if late.waiting > 0:
                    marks.mark("epilogue begins")
                    form.finish.apply(bias, mine.sums, product, column, here.lane)
                    if in_boxes:
                        late.keep(row, column, problem.out_dtype, which[0])  # they leave beside the next piece
                        if form.finish.residual:
                            add_residual(residual, late.packed, mine, marks, work.count)
                        if not tile.leaves_late:
                            for portion in T.unroll(late.portions):
                                late.store(marks, portion)
                            late.waiting = 0
                    else:
                        corner = T.meta_var((row, column, here.warp, here.lane))
                        output = T.meta_var(matrices.of(which[0]).c)
                        epilogue.store_fragments(mine.sums, product, output, *corner, aligned=not form.columns)
                    marks.mark("sums free")
                    marks.mark("results stored", only=not in_boxes)
                marks.advance(work.count)
                work.advance()
            if at_end:
                let_next_begin()
            say_done(here)
            for portion in T.unroll(late.portions):  # of the last piece
                late.store(marks, portion)
            if in_boxes:
                boxes.finish(here)
            marks.mark("results stored", -1, together=True, only=late.waiting > 0)
        end_together(here)
        log.clocks("end", here.number, here.thread == 0, together=True)

    used = {**form.finish.pointers, **dict.fromkeys(PLANNED, form.any_rows)}
    made = without(main, *(name for name, is_used in used.items() if not is_used))
    return made.with_attr(OVERLAPS, True) if form.overlapped else made


def cluster_blocks(problem: Matmul, tile: RoleTile, wanted: bool) -> int:
    """Return how many blocks of a cluster share their B tile: 2 where wanted and possible, else 1.

    An odd number of panels along n is left to one block: it could be shared by rows, which was not measured. A tile
    that says itself what is shared is left as it is.
    """
    if tile.shared_by > 1:
        return 1
    b = WarpgroupProduct.of(problem, tile).b
    return 2 if wanted and b.shares(2) and (b.major == "k" or not b.shares_rows(2)) else 1
