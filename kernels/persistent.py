"""Rung 13's kernel: as many blocks as run at once, each with one output tile after the other."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from schedules.workloads import Matmul

from . import epilogue, tma
from .config import LANES, RESULT_BOXES, ROWS, RoleTile
from .log import Log
from .partial_sums import PartialSums
from .raster import grouped
from .ring import Barriers, RingState, check_stages
from .roles import OVERLAPS, WARPS, begin_together, end_together, give_up_registers, release, take_registers
from .stamps import Stamps
from .stream import Pieces, plan_for
from .warp_specialized import FEWEST_STAGES, MOST_STAGES
from .wgmma import WarpgroupProduct, retire


def persistent(
    problem: Matmul,
    tile: RoleTile,
    stages: int,
    *,
    multiprocessors: int,
    blocks: int = 1,
    stream: bool = True,
    overlapped: bool = False,
    bounded: bool = False,
    group: int = 16,
    stamps: Stamps | None = None,
) -> tirx.PrimFunc:
    """``main(A, B, C, sums, flags)``: blocks that stay, and share all tiles' work out among themselves.

    ::

        producer, one thread:                     each consumer warpgroup:
          for each piece of my work:                for each piece of my work:
            fill slots with its k tiles               for the first k tiles, one box of results each:
            an owner: fill slots with                   issue wgmma; store a box of the *last* piece's results; retire
              the helpers' sums                       for the other k tiles:  issue wgmma; retire that before
                                                      a helper: hand over the sums
                                                      an owner: add the helpers' sums
                                                      round the results into half as many registers
                                                    store the last results

    The ring never runs dry between tiles, and the tensor cores have work while results leave. Which pieces there are
    says :func:`kernels.stream.plan_for` (``stream`` off: whole tiles only). ``sums`` (float32) and ``flags`` (int32,
    zeros before the first call and after each) are what helpers leave for owners: an element each where nothing is cut.

    ``overlapped`` blocks begin while the kernel before in the stream still runs, where it leaves them room: barriers
    are ready when it ends, and all wait for that before they touch memory (programmatic dependent launch; the function
    says so in its attribute :data:`kernels.roles.OVERLAPS`).

    ``blocks`` of 2 are clusters: two blocks, one above the other, each load half of their common B tile, for both
    (TMA multicast). ``multiprocessors`` is how many blocks run at once. Stages, edges, results, ``bounded`` and
    ``stamps`` are as in :func:`kernels.warp_specialized.warp_specialized`.

    Raises
    ------
    IllegalWorkload, IllegalTile, IllegalPipeline : as there; IllegalTile also for a B tile that a cluster cannot share.
    """
    tma.check_rows(problem)
    check_stages(stages, FEWEST_STAGES, MOST_STAGES)
    m, n, k, dtype, out_dtype = problem.m, problem.n, problem.k, problem.dtype, problem.out_dtype
    product = WarpgroupProduct.of(problem, tile)
    product.b.check_shares(blocks)
    by_tma = epilogue.can_store_by_tma(problem, tile)
    plan = plan_for(problem, tile, multiprocessors, blocks, stream)
    early = plan.shortest
    tile_columns = -(-n // tile.block_n)
    tile_rows = plan.tiles // tile_columns
    slots = max(FEWEST_STAGES, min(stages, plan.k_tiles))
    consumers, groups_n, group_m, group_n = tile.consumers, tile.groups_n, tile.group_m, tile.group_n
    block_m, block_n, block_k = tile.block
    a_panels, b_panels, slot_bytes = product.a, product.b, product.slot_bytes
    room = plan.pieces * blocks
    log = Log(stamps, ("producer", *(f"consumer {number}" for number in range(consumers))))

    @T.prim_func
    def main(A_ptr: T.handle, B_ptr: T.handle, C_ptr: T.handle, sums_ptr: T.handle, flags_ptr: T.handle):
        A = T.match_buffer(A_ptr, (m, k), dtype, align=16)
        B = T.match_buffer(B_ptr, problem.b_shape, dtype, align=16)
        C = T.match_buffer(C_ptr, (m, n), out_dtype, align=16)
        shared_sums = T.match_buffer(
            sums_ptr, (max(1, room * PartialSums.floats(product.registers, consumers)),), "float32", align=16
        )
        flags = T.match_buffer(flags_ptr, (max(1, room),), "int32", align=4)
        log.bind()
        a_map = T.meta_var(tma.encode_map("a_map", A, a_panels.rows))
        b_map = T.meta_var(tma.encode_map("b_map", B, b_panels.box_rows(blocks)))
        if by_tma:
            c_map = T.meta_var(tma.encode_map("c_map", C, ROWS))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        block = T.cta_id([plan.workers * blocks])
        if blocks > 1:
            member = T.cta_id_in_cluster([blocks])
        else:
            member = T.meta_var(0)
        warpgroup = T.warpgroup_id([1 + consumers])
        warp = T.warp_id_in_wg([WARPS])
        lane = T.lane_id([32])
        thread = T.thread_id([(1 + consumers) * LANES])
        pool = T.SMEMPool()
        ring = pool.alloc((slots * slot_bytes,), "uint8", align=1024)
        results = pool.alloc((consumers * RESULT_BOXES * epilogue.BOX_BYTES,), "uint8", align=1024)
        full = Barriers(pool, slots, bounded)
        empty = Barriers(pool, slots, bounded)
        pool.commit()
        log.clocks("begin", block, thread == 0)
        if thread == 0:
            full.initialize(1)
            empty.initialize(consumers * WARPS * blocks)
        begin_together(blocks)
        if overlapped:
            T.ptx.griddepcontrol.wait()
            T.ptx.griddepcontrol.launch_dependents()
        work = Pieces(plan, block // blocks)
        partial = PartialSums(shared_sums, flags, product.registers, consumers)
        helper = T.local_scalar("int32")
        helper = 0

        @T.inline
        def each_helper(act):
            helper = plan.first_helper(work.tile - plan.first_owned)
            while plan.begin(helper) < (work.tile - plan.first_owned + 1) * plan.cut:
                act(plan.piece(helper, work.tile - plan.first_owned) * blocks + member)
                helper = helper + 1

        if warpgroup == 0:
            give_up_registers()
            if warp == 0 and tma.elected():
                fill = RingState(slots, 1)
                loads = T.meta_var(log.role("producer", block, counts=True))

                @T.inline
                def fetch(piece):
                    partial.fetch(piece, ring, slot_bytes, full, empty, fill)

                while work.tile < plan.tiles:
                    place = T.meta_var(grouped(work.tile, tile_rows, tile_columns, max(1, group // blocks)))
                    row: T.let = (place[0] * blocks + member) * block_m
                    column: T.let = place[1] * block_n
                    for k_tile in T.serial(work.count):
                        loads.wait("empty", empty, fill, k_tile, "producer")
                        full.expect(fill.slot, slot_bytes)
                        first = T.meta_var(fill.slot * slot_bytes)
                        step = T.meta_var((work.first + k_tile) * block_k)
                        a_panels.load(a_map, row, step, ring, first, full.at(fill.slot))
                        b_panels.load_share(
                            b_map, column, step, ring, first + a_panels.bytes, full.at(fill.slot), member, blocks
                        )
                        loads.mark("load issued", k_tile)
                        fill.advance()
                    if plan.helpers > 0:
                        if work.first == plan.cut:
                            each_helper(fetch)
                    loads.advance(work.count)
                    work.advance()
        else:
            take_registers(consumers)
            sums = T.alloc_local((product.registers,), "float32")
            packed = T.alloc_local((product.registers // 2,), "uint32")
            last = T.local_scalar("int32")
            waiting = T.local_scalar("int32")
            old_row = T.local_scalar("int32")
            old_column = T.local_scalar("int32")
            last = 0
            waiting = 0
            old_row = 0
            old_column = 0
            consumer: T.let = warpgroup - 1
            own: T.let = thread % LANES
            group_row: T.let = consumer // groups_n * group_m
            group_column: T.let = consumer % groups_n * group_n
            a: T.let = a_panels.descriptor(ring.ptr_to([a_panels.extent_offset(group_row)]))
            b: T.let = b_panels.descriptor(ring.ptr_to([a_panels.bytes + b_panels.extent_offset(group_column)]))
            read = RingState(slots, 0)
            marks = T.meta_var(log.role("consumer 0", block, consumer, own == 0, counts=True))
            if by_tma:
                boxes = epilogue.Boxes(c_map, product, results, RESULT_BOXES)

            @T.inline
            def store(box):
                if by_tma:
                    if waiting > 0:
                        marks.mark("box begins", box - product.boxes, boxes=product.boxes)
                        boxes.store(packed, box, old_row, old_column, consumer, warp, lane)
                        marks.mark("box stored", box - product.boxes, boxes=product.boxes)
                        marks.mark("results stored", -1, only=box == product.boxes - 1)

            @T.inline
            def add(piece):
                partial.add(sums, ring, slot_bytes, full, empty, read, consumer, own, blocks)

            @T.inline
            def hand_over(piece):
                partial.hand_over(sums, piece, consumer, own)
                T.cuda.warpgroup_sync(warpgroup)
                if own == 0:
                    partial.raise_flag(piece)

            while work.tile < plan.tiles:
                marks.mark("piece begins")
                place = T.meta_var(grouped(work.tile, tile_rows, tile_columns, max(1, group // blocks)))
                row: T.let = (place[0] * blocks + member) * block_m + group_row
                column: T.let = place[1] * block_n + group_column
                for k_tile in T.unroll(early):
                    marks.wait("full", full, read, k_tile, "consumer")
                    product.multiply(sums, a, b, read.slot, T.bool(k_tile != 0))
                    marks.mark("mma issued", k_tile)
                    store(k_tile)
                    retire(sums, 1)
                    if k_tile > 0:
                        marks.mark("mma retired", k_tile - 1)
                        release(empty, last, lane, blocks)
                    last = read.slot
                    read.advance()
                for box in T.unroll(product.boxes - early):
                    store(early + box)
                for k_tile in T.serial(work.count - early):
                    marks.wait("full", full, read, early + k_tile, "consumer")
                    product.multiply(sums, a, b, read.slot, T.bool(True))
                    marks.mark("mma issued", early + k_tile)
                    retire(sums, 1)
                    marks.mark("mma retired", early + k_tile - 1)
                    release(empty, last, lane, blocks)
                    last = read.slot
                    read.advance()
                retire(sums, 0)
                marks.mark("mma retired", work.count - 1)
                release(empty, last, lane, blocks)
                waiting = 1
                if plan.helpers > 0:
                    if work.tile >= plan.first_owned:
                        if work.first == plan.cut:
                            each_helper(add)
                        else:
                            hand_over(plan.piece(work.worker, work.tile - plan.first_owned) * blocks + member)
                            waiting = 0
                if waiting > 0:
                    marks.mark("epilogue begins")
                    if by_tma:
                        epilogue.pack(sums, packed, out_dtype)
                    else:
                        epilogue.store_fragments(sums, product, C, row, column, warp, lane)
                    marks.mark("sums free")
                    marks.mark("results stored", only=not by_tma)
                old_row = row
                old_column = column
                marks.advance(work.count)
                work.advance()
            for box in T.unroll(product.boxes):
                store(box)
            if by_tma:
                boxes.finish(warp)
            marks.mark("results stored", -1, together=True, only=waiting > 0)
        end_together(blocks)
        log.clocks("end", block, thread == 0, together=True)

    return main.with_attr(OVERLAPS, True) if overlapped else main
