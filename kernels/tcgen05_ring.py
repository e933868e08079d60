"""Step 14's kernel: step 11's ring of stages, read by tcgen05.mma, with the sums in tensor memory."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.blackwell import TENSOR_ROWS, BlackwellTile
from tensorir_ladder.kernels.raster import grouped
from tensorir_ladder.kernels.ring import Barriers, check_stages
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.tcgen05 import (
    TensorMemory,
    TensorProduct,
    collect_rows,
    commit,
    fence_after,
    meet,
    store_rows,
)
from tensorir_ladder.kernels.tma import Matrices
from tensorir_ladder.kernels.tma_ring import MOST_STAGES, NEIGHBOURS
from tensorir_ladder.schedules.workloads import Matmul

READERS = 4  # warps that take the results from tensor memory
UNALIGNED_ROWS = "take step 9, which copies such rows to aligned ones first"


@on_a_short_stack
def tcgen05_ring(
    problem: Matmul, tile: BlackwellTile, stages: int, *, specialized: bool = False, bounded: bool = False
) -> tirx.PrimFunc:
    """``main(A, B, C)``: each block multiplies one output tile, k tile by k tile, from a ring of ``stages`` stages.

    ::

        allocate tensor memory for the sums                           # warp 0
        fill the first stages - 1 stages                              # one thread of warp 0, as all until "done"
        for turn:                                                     # of the ring; its parity is the barriers' phase
          for stage < stages:                                         # written out: stages are constants
            wait until the stage is full
            issue tcgen05.mma of this k tile; commit to "stage free"  # returns at once
            wait until the stage of the k tile before is free
            fill that stage                                           # with k tile + stages - 1
        commit to "tile done"
        wait for "tile done"                                          # every thread
        tensor memory -> registers -> shared memory -> TMA store      # each of four warps 32 rows

    ``specialized`` gives loads and multiplications a warp each, 4 and 5: a load waits for its own stage alone. With one
    stage nothing overlaps in either form. A ring has no more stages than there are k tiles. Ragged edges are TMA's;
    results that it cannot store (:func:`kernels.epilogue.can_store_by_tma`) leave from registers. ``bounded`` is the
    debug build of :class:`kernels.ring.Barriers`. Compiled for sm_100a, never run: no GPU or emulator has.

    Raises
    ------
    IllegalWorkload, IllegalTile, IllegalPipeline : as :func:`kernels.tma_ring.tma_ring` does.
    """
    epilogue.check_taken(problem, UNALIGNED_ROWS)
    check_stages(stages, 1, MOST_STAGES)
    product = TensorProduct.of(problem, tile)
    by_tma = epilogue.can_store_by_tma(problem, tile)
    tile_rows, tile_columns, k_tiles = tile.counts(problem)
    stages = min(stages, k_tiles)
    turns, rest = divmod(k_tiles, stages)
    ahead = max(stages - 1, 1)  # a stage is filled while the k tile after its own is multiplied, if there is another
    warps, producer, consumer = (READERS + 2, READERS, READERS + 1) if specialized else (READERS, 0, 0)

    @T.prim_func
    def main(A_ptr: T.handle, B_ptr: T.handle, C_ptr: T.handle):
        rows = T.meta_var((product.a.rows, product.b.rows, TENSOR_ROWS if by_tma else None))
        matrices = Matrices(problem, (A_ptr, B_ptr, C_ptr), rows)
        T.device_entry()
        block = T.cta_id([tile_rows * tile_columns])
        warp = T.warp_id([warps])
        lane = T.lane_id([32])
        thread = T.thread_id([warps * 32])
        pool = T.SMEMPool()
        ring = pool.alloc((tile.pool_bytes(2, stages),), "uint8", align=1024)
        full = Barriers(pool, stages, bounded)
        free = Barriers(pool, stages, bounded)
        done = Barriers(pool, 1, bounded)
        memory = TensorMemory(pool, tile.tensor_columns)
        pool.commit()
        place = T.meta_var(grouped(block, tile_rows, tile_columns, NEIGHBOURS))
        row: T.let = place[0] * tile.block_m
        column: T.let = place[1] * tile.block_n

        @T.inline
        def fill(stage, turn):
            """Load a k tile once its stage is free."""
            free.wait(stage, (turn + 1) % 2, "producer")  # over already in the ring's first turn
            corner = T.meta_var((row, column, (turn * stages + stage) * tile.block_k))
            product.load(matrices, corner, ring, stage, full)

        @T.inline
        def multiply(stage, turn):
            """Multiply a k tile; its stage is free when that is through."""
            full.wait(stage, turn % 2, "consumer")
            product.multiply(sums, a, b, stage, turn * stages + stage != 0)
            commit(free.at(stage))

        @T.inline
        def multiply_and_fill(stage, turn):
            """Multiply a k tile, and fill the stage of the one before."""
            multiply(stage, turn)
            if turn * stages + stage + ahead < k_tiles:
                fill((stage + ahead) % stages, turn + (stage + ahead) // stages)

        @T.inline
        def for_every_tile(act):
            """Emit ``act(stage, turn)`` for one k tile after the other."""
            for turn in T.serial(turns):
                for stage in T.unroll(stages):
                    act(stage, turn)
            for stage in T.unroll(rest):
                act(stage, turns)

        if warp == 0:
            memory.allocate()
        if thread == 0:
            full.initialize(1)
            free.initialize(1)
            done.initialize(1)
        meet()
        sums: T.let = memory.address
        a: T.let = product.a.descriptor(ring.ptr_to([0]))
        b: T.let = product.b.descriptor(ring.ptr_to([product.a.bytes]))
        if specialized and warp == producer and tma.elected():
            for_every_tile(fill)
        if warp == consumer and tma.elected():
            if specialized:
                for_every_tile(multiply)
            else:
                for stage in T.unroll(ahead):
                    fill(stage, 0)
                for_every_tile(multiply_and_fill)
            commit(done.at(0))
        T.cuda.warp_sync()  # an elected lane has left the others of its warp
        if warp < READERS:
            done.wait(0, 0, "reader")  # the ring is read by nobody any more: it takes the results
            fence_after()
            if by_tma:
                collect_rows(sums, product, problem.out_dtype, ring, warp, lane)
            else:
                store_rows(sums, product, matrices.c, row, column, warp, lane)
        meet()
        if warp == 0:
            memory.release(sums)
            if by_tma and tma.elected():
                epilogue.store_boxes(matrices.c_map, product, ring, 0, row, column)

    return main
