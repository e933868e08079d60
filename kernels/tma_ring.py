"""Step 11's explicit kernel: TMA fills a ring with one mbarrier for each stage, and wgmma reads it."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.raster import grouped
from tensorir_ladder.kernels.ring import Barriers, check_stages
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.stamps import Log
from tensorir_ladder.kernels.tiles import HopperTile, RoleTile
from tensorir_ladder.kernels.tma import Matrices
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.isa import PANEL, WARPGROUP, WGMMA_ROWS
from tensorir_ladder.schedules.stamps import Stamps
from tensorir_ladder.schedules.workloads import Matmul

MOST_STAGES = 6
NEIGHBOURS = 8  # rows of tiles that blocks take side by side


@on_a_short_stack
def tma_ring(
    problem: Matmul,
    tile: HopperTile,
    stages: int,
    *,
    tma_store: bool = True,
    stamps: Stamps | None = None,
) -> tirx.PrimFunc:
    """``main(A, B, C)``: each block multiplies one output tile, k tile by k tile, from a ring of ``stages`` stages.

    ::

        fill the first stages - 1 stages                           # one thread; TMA, bytes counted by the mbarrier
        for turn:                                                  # of the ring; the phase bit flips after each
          for stage < stages:                                      # written out: stages are constants
            wait for the stage's mbarrier
            issue wgmma of this k tile                             # returns at once
            wait for wgmma of the k tile before;  block barrier    # so nobody reads that one's stage any more
            fill that stage                                        # with k tile + stages - 1
        results -> shared memory -> TMA store

    With one stage nothing overlaps: the k tile's own wgmma is awaited before its stage is filled. A ring has no more
    stages than there are k tiles. Ragged edges are TMA's: zeros on loads, left out on stores; what TMA cannot store
    (:func:`kernels.epilogue.can_store_by_tma`, or ``tma_store`` off) leaves from registers.
    ``stamps``: :mod:`kernels.stamps`.

    Raises
    ------
    IllegalWorkload : for operands whose rows are no multiples of 16 bytes.
    IllegalTile : for a dtype or layout that wgmma has no form for, and a :class:`kernels.tiles.RoleTile` of no whole
        panels.
    IllegalPipeline : for stages below 1 or above 6.
    """
    epilogue.check_taken(problem)
    check_stages(stages, 1, MOST_STAGES)
    if isinstance(tile, RoleTile) and tile.group_n % PANEL:
        raise IllegalTile(
            "a ring without roles loads and stores whole panels",
            value=f"{tile}: {tile.group_n} columns per warpgroup",
            limit=f"multiples of {PANEL}",
            remedy="give a HopperTile, or take step 12",
        )
    product = WarpgroupProduct.of(problem, tile)
    by_tma = tma_store and epilogue.can_store_by_tma(problem, tile)
    tile_rows, tile_columns, k_tiles = tile.counts(problem)
    stages = min(stages, k_tiles)
    turns, rest = divmod(k_tiles, stages)
    # One k tile's wgmma stays in flight while the next is issued, where there is another stage to read from.
    in_flight, ahead = (1, stages - 1) if stages > 1 else (0, 1)
    groups_n, group_m, group_n = tile.warpgroups[1], tile.group_m, tile.group_n
    threads = tile.threads_per_block
    log = Log(stamps, ("loads", *(f"warpgroup {number}" for number in range(threads // WARPGROUP))))

    @T.prim_func
    def main(A_ptr: T.handle, B_ptr: T.handle, C_ptr: T.handle):
        matrices = Matrices(
            problem, (A_ptr, B_ptr, C_ptr), (product.a.rows, product.b.rows, WGMMA_ROWS if by_tma else None)
        )
        log.bind()
        T.device_entry()
        block = T.cta_id([tile_rows * tile_columns])
        warpgroup = T.warpgroup_id([threads // WARPGROUP])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        thread = T.thread_id([threads])
        pool = T.SMEMPool()
        ring = pool.alloc((tile.pool_bytes(2, stages),), "uint8", align=1024)
        full = Barriers(pool, stages)
        pool.commit()
        sums = T.alloc_local((product.registers,), "float32")
        phase = T.local_scalar("int32")
        place = T.meta_var(grouped(block, tile_rows, tile_columns, NEIGHBOURS))
        row: T.let = place[0] * tile.block_m
        column: T.let = place[1] * tile.block_n
        loads: T.let = warpgroup * 4 + warp == 0  # the warp that elects the loading thread; it multiplies as well
        group_row: T.let = warpgroup // groups_n * group_m
        group_column: T.let = warpgroup % groups_n * group_n
        corner = T.meta_var((row + group_row, column + group_column))
        own = T.meta_var(log.role("warpgroup 0", block, warpgroup, thread % WARPGROUP == 0))

        @T.inline
        def fill(stage, k_tile):
            """Ask for a k tile's boxes of A and B; their bytes complete the stage's barrier as they arrive."""
            product.load(matrices, (row, column, k_tile * tile.block_k), ring, stage, full)
            log.role("loads", block).mark("load issued", k_tile)

        @T.inline
        def multiply(stage, k_tile):
            """Multiply a k tile, and fill the stage that is free then: the one of the k tile before."""
            own.mark("full wait begins", k_tile)
            full.wait(stage, phase, "consumer")
            own.mark("full wait ends", k_tile)
            product.multiply(sums, a, b, stage, k_tile != 0)  # issued; it runs on
            own.mark("mma issued", k_tile)
            retire(sums, in_flight)  # until the k tile before is multiplied
            own.mark("mma retired", k_tile - in_flight)
            own.mark("empty wait begins", k_tile - in_flight)
            T.cuda.cta_sync()  # by all warpgroups: only then may its stage be overwritten
            own.mark("empty wait ends", k_tile - in_flight)
            if loads and k_tile + ahead < k_tiles and tma.elected():
                fill((stage + ahead) % stages, k_tile + ahead)

        log.clocks("begin", block, thread == 0)
        if thread == 0:
            full.initialize(1)  # by the loading thread's announcement of bytes; these complete the phase
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        if loads and tma.elected():
            for stage in T.unroll(ahead):  # the prologue
                fill(stage, stage)
        a: T.let = product.a.descriptor(ring.ptr_to([product.a.extent_offset(group_row)]))
        b: T.let = product.b.descriptor(ring.ptr_to([product.a.bytes + product.b.extent_offset(group_column)]))
        phase = 0
        for turn in T.serial(turns):
            for stage in T.unroll(stages):
                multiply(stage, turn * stages + stage)
            phase = phase ^ 1
        for stage in T.unroll(rest):
            multiply(stage, turns * stages + stage)
        retire(sums, 0)
        own.mark("mma retired", k_tiles * in_flight - 1)  # -1: it was none
        own.mark("epilogue begins")
        if by_tma:
            T.cuda.cta_sync()  # the ring is read by nobody any more: it takes the results
            first = T.meta_var(warpgroup * product.result_bytes)
            epilogue.collect(sums, product, problem.out_dtype, ring, first, warp, lane)
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.warpgroup_sync(1 + warpgroup)
            if warp == 0 and tma.elected():
                epilogue.store_boxes(matrices.c_map, product, ring, first, *corner)
        else:
            epilogue.store_fragments(sums, product, matrices.c, *corner, warp, lane)
        own.mark("results stored", together=True)
        log.clocks("end", block, thread == 0)

    return main
