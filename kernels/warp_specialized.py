"""Rung 12's kernel: a producer warpgroup that only loads, consumer warpgroups that only multiply."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from schedules.workloads import Matmul

from . import epilogue, tma
from .config import LANES, RESULT_BOXES, ROWS, RoleTile
from .log import Log
from .raster import grouped
from .ring import Barriers, RingState, check_stages
from .roles import WARPS, begin_together, give_up_registers, release, take_registers
from .stamps import Stamps
from .wgmma import WarpgroupProduct, retire

FEWEST_STAGES, MOST_STAGES = 2, 8


def warp_specialized(
    problem: Matmul,
    tile: RoleTile,
    stages: int,
    *,
    bounded: bool = False,
    group: int = 16,
    stamps: Stamps | None = None,
) -> tirx.PrimFunc:
    """``main(A, B, C)``: each block multiplies one output tile; one of its warpgroups loads, the others multiply.

    ::

        producer, one thread:                              each consumer warpgroup:
          for each k tile:                                   for each k tile:
            wait until its slot is empty                       wait until its slot is full
            load it; the slot's bytes make it full             issue wgmma of it                   # returns at once
                                                               wait for wgmma of the k tile before
                                                               that one's slot is empty, for my part
                                                             results -> shared memory -> TMA store

    Nobody waits for a block barrier: a consumer waits for bytes, the producer for consumers, each on the slot's own two
    barriers. Registers go where they are needed (``setmaxnreg``). At least two slots, since a consumer keeps one
    k tile's wgmma in flight. Edges, results, ``bounded`` and ``stamps`` are as in :func:`kernels.tma_ring.tma_ring`.

    Raises
    ------
    IllegalWorkload, IllegalTile, IllegalPipeline : as there, for stages below 2 or above 8.
    """
    tma.check_rows(problem)
    check_stages(stages, FEWEST_STAGES, MOST_STAGES)
    m, n, k, dtype, out_dtype = problem.m, problem.n, problem.k, problem.dtype, problem.out_dtype
    product = WarpgroupProduct.of(problem, tile)
    by_tma = epilogue.can_store_by_tma(problem, tile)
    k_tiles, tile_rows, tile_columns = -(-k // tile.block_k), -(-m // tile.block_m), -(-n // tile.block_n)
    slots = max(FEWEST_STAGES, min(stages, k_tiles))
    consumers, groups_n, group_m, group_n = tile.consumers, tile.groups_n, tile.group_m, tile.group_n
    block_m, block_n, block_k = tile.block
    a_panels, b_panels, slot_bytes = product.a, product.b, product.slot_bytes
    log = Log(stamps, ("producer", *(f"consumer {number}" for number in range(consumers))))

    @T.prim_func
    def main(A_ptr: T.handle, B_ptr: T.handle, C_ptr: T.handle):
        A = T.match_buffer(A_ptr, (m, k), dtype, align=16)
        B = T.match_buffer(B_ptr, problem.b_shape, dtype, align=16)
        C = T.match_buffer(C_ptr, (m, n), out_dtype, align=16)
        log.bind()
        a_map = T.meta_var(tma.encode_map("a_map", A, a_panels.rows))
        b_map = T.meta_var(tma.encode_map("b_map", B, b_panels.rows))
        if by_tma:
            c_map = T.meta_var(tma.encode_map("c_map", C, ROWS))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        block = T.cta_id([tile_rows * tile_columns])
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
            empty.initialize(consumers * WARPS)
        begin_together(1)
        place = T.meta_var(grouped(block, tile_rows, tile_columns, group))
        row: T.let = place[0] * block_m
        column: T.let = place[1] * block_n
        if warpgroup == 0:
            give_up_registers()
            if warp == 0 and tma.elected():
                fill = RingState(slots, 1)
                loads = T.meta_var(log.role("producer", block))
                for k_tile in T.serial(k_tiles):
                    loads.wait("empty", empty, fill, k_tile, "producer")
                    full.expect(fill.slot, slot_bytes)
                    first = T.meta_var(fill.slot * slot_bytes)
                    a_panels.load(a_map, row, k_tile * block_k, ring, first, full.at(fill.slot))
                    b_panels.load(b_map, column, k_tile * block_k, ring, first + a_panels.bytes, full.at(fill.slot))
                    loads.mark("load issued", k_tile)
                    fill.advance()
        else:
            take_registers(consumers)
            sums = T.alloc_local((product.registers,), "float32")
            last = T.local_scalar("int32")
            last = 0
            consumer: T.let = warpgroup - 1
            group_row: T.let = consumer // groups_n * group_m
            group_column: T.let = consumer % groups_n * group_n
            a: T.let = a_panels.descriptor(ring.ptr_to([a_panels.extent_offset(group_row)]))
            b: T.let = b_panels.descriptor(ring.ptr_to([a_panels.bytes + b_panels.extent_offset(group_column)]))
            read = RingState(slots, 0)
            own = T.meta_var(log.role("consumer 0", block, consumer, thread % LANES == 0))
            for k_tile in T.serial(k_tiles):
                own.wait("full", full, read, k_tile, "consumer")
                product.multiply(sums, a, b, read.slot, k_tile != 0)
                own.mark("mma issued", k_tile)
                retire(sums, 1)
                if k_tile > 0:
                    own.mark("mma retired", k_tile - 1)
                    release(empty, last, lane, 1)
                last = read.slot
                read.advance()
            retire(sums, 0)
            own.mark("mma retired", k_tiles - 1)
            own.mark("epilogue begins")
            if by_tma:
                packed = T.alloc_local((product.registers // 2,), "uint32")
                boxes = epilogue.Boxes(c_map, product, results, RESULT_BOXES)
                epilogue.pack(sums, packed, out_dtype)
                own.mark("sums free")
                for box in T.unroll(product.boxes):
                    own.mark("box begins", box)
                    boxes.store(packed, box, row + group_row, column + group_column, consumer, warp, lane)
                    own.mark("box stored", box)
                boxes.finish(warp)
            else:
                epilogue.store_fragments(sums, product, C, row + group_row, column + group_column, warp, lane)
            own.mark("results stored", together=True)
        log.clocks("end", block, thread == 0, together=True)

    return main
