"""The kernel with roles for few rows: operands exchanged, so that B's columns fill the instruction's 64 rows."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.cluster_sums import ClusterSums, check_parts
from tensorir_ladder.kernels.epilogue import EIGHT
from tensorir_ladder.kernels.fused_epilogue import without
from tensorir_ladder.kernels.held import held
from tensorir_ladder.kernels.kernel_form import PLAIN_FORM, KernelForm
from tensorir_ladder.kernels.raster import ROWS_TOGETHER, grouped, of_batch
from tensorir_ladder.kernels.ring import RingState, check_stages
from tensorir_ladder.kernels.roles import (
    FEWEST_STAGES,
    MOST_SHARED_STAGES,
    MOST_STAGES,
    OVERLAPS,
    UNSAID,
    WARPS,
    Consumer,
    RoleBlock,
    SharedRing,
    await_all_read,
    await_consumers,
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
from tensorir_ladder.kernels.tiles import SwappedTile
from tensorir_ladder.kernels.tma import Maps, Matrices
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import PANEL, PTX_TYPES, ROW_BYTES, WARPGROUP, WGMMA_ROWS, wgmma_element
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import Matmul

CLUSTERED = 0.9  # of multiprocessors, those that clusters of more than two can have


@on_a_short_stack
def swapped(
    problem: Matmul,
    tile: SwappedTile,
    stages: int,
    form: KernelForm = PLAIN_FORM,
    *,
    batch: int = 1,
    broadcast: str = "",
) -> tirx.PrimFunc:
    """``main(A, B, C)``: each cluster multiplies one output tile as Cᵀ = Bᵀ · Aᵀ, its blocks a part of the reduction.

    ::

        A 16 × k, B k × n     64 rows of the instruction: of A, 48 of which do not exist    columns: 64 … 256 of B
        here                  64 rows of the instruction: columns of B                      columns: 16 rows of A

    Roles, stages and waits are those of :func:`kernels.warp_specialized.warp_specialized`; sums are transposed on their
    way to shared memory (``stmatrix.trans``).

    Where a tile has a ``cluster``, its blocks are output tiles beside and below each other, and share their loads as in
    :func:`kernels.warp_specialized.warp_specialized`.

    Consumers of large tiles have registers that the producer gives up
    (:attr:`kernels.tiles.SwappedTile.roles_exchange`), and results lie in the ring's memory where that makes room for
    another stage (:meth:`kernels.tiles.SwappedTile.results_in_ring`).

    Where a tile has ``parts``, each of so many blocks of a cluster multiplies as many of its k tiles, give or take one;
    then each adds up and stores a share of the results (:mod:`kernels.cluster_sums`), the same to the last bit each
    time. Those of the same part share their loads, where blocks do.

    Blocks are small: a multiprocessor holds several (:meth:`kernels.tiles.SwappedTile.resident`), whose loads are on
    their way together.

    ``batch`` and ``broadcast`` are as in :func:`kernels.warp_specialized.warp_specialized`.

    Of ``form``, ``overlapped`` and ``next_at_once`` are as in :func:`kernels.persistent.persistent`; ``bounded``,
    ``stamps``, ``finish`` and ``columns`` as in :func:`kernels.warp_specialized.warp_specialized`. Results of 16 bits
    and rows of multiples of 16 bytes leave by TMA, others of 16 bits row by row, all others, and those of parts, from
    registers.

    Raises
    ------
    IllegalWorkload, IllegalTile, IllegalPipeline : as there; IllegalTile also for more parts than k tiles,
    IllegalWorkload for a residual, and for more ``columns`` than the product has.
    """
    epilogue.check_taken(problem)
    if form.finish.residual:
        raise IllegalWorkload(
            "exchanged operands add no residual", value=str(tile), remedy="take a tile without exchanged operands"
        )
    tile.check_sound()
    check_stages(stages, FEWEST_STAGES, MOST_STAGES if tile.shared_by == 1 else MOST_SHARED_STAGES)
    product = WarpgroupProduct.swapped(problem, tile)
    turned, parts, (down, across) = tile.turned, tile.parts, tile.cluster
    tile_rows, tile_columns, k_tiles = tile.counts(problem)
    cluster_rows, cluster_columns = -(-tile_rows // down), -(-tile_columns // across)
    check_parts(parts, k_tiles)
    if form.overlapped:
        product = product.for_overlap(  # its A is B
            a_streams=cluster_rows == 1 and "B" not in broadcast,
            b_streams=cluster_columns == 1 and "A" not in broadcast,
        )
    load_rows = loaded_rows(product, down, across)
    width, in_boxes = epilogue.stored_columns(problem, form.columns), problem.out_dtype in PTX_TYPES
    by_tma = in_boxes and tma.rows_fit(width, problem.out_dtype) and parts == 1
    stages = _stages_of(problem, tile, stages)
    itemsize = dtype_bytes(problem.dtype)
    resident, in_ring = tile.resident(itemsize, stages), tile.results_in_ring(itemsize, stages)
    side_by_side = tile.warpgroups[0] == 1 < tile.consumers  # whose rows leave together
    at_end = form.overlapped and not form.next_at_once
    log = Log(form.stamps, ("producer", *(f"consumer {number}" for number in range(tile.consumers))))

    @T.prim_func
    def main(A_ptr: T.handle, B_ptr: T.handle, C_ptr: T.handle, bias_ptr: T.handle, second_ptr: T.handle):
        boxes_of = T.meta_var((*load_rows[::-1], tile.group_m if by_tma else None))
        matrices = Matrices(problem, (A_ptr, B_ptr, C_ptr), boxes_of, batch, columns=width, broadcast=broadcast)
        bias = T.meta_var(form.finish.bind(bias_ptr, width, second_ptr))
        log.bind()
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": resident})
        shared_by = T.meta_var(down * across)
        clusters = T.meta_var(cluster_rows * cluster_columns)
        here = RoleBlock(
            batch * clusters * shared_by * parts, tile.consumers, shared_by, across, form.overlapped, parts=parts
        )
        cluster = ClusterSums(tile, here, exchanged=True)
        pool = T.SMEMPool()
        shared = SharedRing(pool, stages, product.stage_bytes, tile.consumers, form.bounded, tile.result_bytes, in_ring)
        log.clocks("begin", here.number, here.thread == 0)
        shared.begin(here)
        if form.overlapped:
            begin_after_last(form.next_at_once)
        which = T.meta_var(of_batch(here.number // (parts * shared_by), clusters, batch))
        one = T.meta_var(matrices.of(held("held_matrix", which[0], form.overlapped and batch > 1)))
        maps = T.meta_var(Maps(one.b_map, one.a_map, one.c_map, one.c))
        place = T.meta_var(grouped(which[1], cluster_rows, cluster_columns, max(1, ROWS_TOGETHER // down)))
        row: T.let = (place[0] * down + here.below) * tile.block_m
        column: T.let = (place[1] * across + here.beside) * tile.block_n
        tile_corner = T.meta_var((held("held_row", row, form.overlapped), held("held_column", column, form.overlapped)))
        share = T.meta_var(cluster.share_of(k_tiles))
        if here.warpgroup == 0:  # the producer
            if tile.roles_exchange:
                give_up_registers()
            if here.warp == 0 and tma.elected():
                fill = RingState(stages, 1)  # 1: the ring's first turn waits for nobody
                loads = T.meta_var(log.role("producer", here.number))
                for k_tile in T.serial(share.k_tiles):
                    loads.wait("empty", shared.empty, fill, k_tile, "producer")
                    corner = T.meta_var((*tile_corner[::-1], (share.first + k_tile) * tile.block_k))
                    sharing = T.meta_var((here.of_its_columns, here.of_its_rows))
                    load_together(product, maps, corner, shared, fill.stage, k_tile, *sharing)  # returns at once
                    loads.mark("load issued", k_tile)
                    fill.advance()
                drain(shared.empty, fill, stages - UNSAID, here)
            say_done(here)
            cluster.meet()
            cluster.separate()
        else:  # a consumer
            if tile.roles_exchange:
                take_registers(tile)
            mine = Consumer(here, shared, product, turned)
            marks = T.meta_var(log.role("consumer 0", here.number, mine.number, here.thread % WARPGROUP == 0))
            for k_tile in T.serial(share.k_tiles):
                marks.wait("full", shared.full, mine.read, k_tile, "consumer")
                mine.multiply(marks, k_tile, k_tile != 0)  # issued; it runs on
                mine.retire_former(marks, k_tile, k_tile > 0)  # the stage of the k tile before is empty
            if at_end:
                let_next_begin()
            retire(mine.sums, 0)
            say_done(here)
            marks.mark("mma retired", share.k_tiles - 1)
            marks.mark("epilogue begins")
            if parts > 1:
                cluster.store(mine, shared.results, maps.c, tile_corner, form.finish, bias, not form.columns)
            else:
                # A warpgroup's rows are columns of the output.
                corner = T.meta_var((tile_corner[0] + mine.column, tile_corner[1] + mine.row))
                results = T.meta_var(mine.number * (tile.result_bytes // tile.consumers))
                form.finish.apply_down(bias, mine.sums, product, corner[1], here.warp, here.lane)
                if in_boxes:
                    if in_ring:
                        await_all_read(tile.consumers)
                    _collect(mine.sums, product, problem.out_dtype, shared.results, results, here.warp, here.lane)
                    marks.mark("sums free")
                    if by_tma:
                        T.ptx.fence.proxy.async_.shared__cta()
                        T.cuda.warpgroup_sync(1 + mine.number)
                        if here.warp == 0 and tma.elected():
                            _store(maps.c_map, product, shared.results, results, *corner, form.overlapped)
                    elif side_by_side:
                        await_consumers(tile.consumers)
                        sharing = T.meta_var((WARPS * tile.consumers, WARPS * mine.number + here.warp, here.lane))
                        behind = T.meta_var((corner[0], tile_corner[1]))
                        _store_rows(product, tile.consumers, shared.results, 0, maps.c, behind, *sharing)
                    else:
                        T.cuda.warpgroup_sync(1 + mine.number)
                        sharing = T.meta_var((WARPS, here.warp, here.lane))
                        _store_rows(product, 1, shared.results, results, maps.c, corner, *sharing)
                else:
                    _store_elements(mine.sums, product, maps.c, *corner, here.warp, here.lane)
            marks.mark("results stored", together=True)
        end_together(here)
        log.clocks("end", here.number, here.thread == 0, together=True)

    used = form.finish.pointers
    made = without(main, *(name for name in ("bias_ptr", "second_ptr") if not used[name]))
    return made.with_attr(OVERLAPS, True) if form.overlapped else made


def fits_at_once(problem: Matmul, tile: SwappedTile, machine: Machine, batch: int = 1) -> bool:
    """Tell whether each multiprocessor has one block at most."""
    return batch * _blocks(problem, tile) <= _places(machine, tile.cluster_size)


def fits_beside(problem: Matmul, tile: SwappedTile, stages: int, machine: Machine, batch: int = 1) -> bool:
    """Tell whether each multiprocessor has one block at most, and room for another: the next launch may begin at once.

    Else blocks that begin early take places beside the last kernel's, unevenly, which costs more than to begin late.
    """
    resident = tile.resident(dtype_bytes(problem.dtype), _stages_of(problem, tile, stages))
    return fits_at_once(problem, tile, machine, batch) and resident > 1


def _stages_of(problem: Matmul, tile: SwappedTile, stages: int) -> int:
    """Return how many of so many stages a ring has: no more than there are k tiles."""
    _, _, k_tiles = tile.counts(problem)
    return max(FEWEST_STAGES, min(stages, k_tiles))


def _blocks(problem: Matmul, tile: SwappedTile) -> int:
    """Count a product's blocks, those with it that its clusters have beyond its tiles."""
    down, across = tile.cluster
    clusters = -(-problem.m // (tile.block_m * down)) * -(-problem.n // (tile.block_n * across))
    return clusters * tile.cluster_size


def _places(machine: Machine, blocks: int) -> int:
    """Count the blocks that run at once in clusters of ``blocks``, one to a multiprocessor.

    A cluster's blocks lie in one part of the GPU, whose 14 to 18 multiprocessors leave some over.
    """
    share = 1.0 if blocks <= 2 else CLUSTERED
    return int(share * machine.multiprocessors / blocks) * blocks


def _box_bytes(product: WarpgroupProduct) -> int:
    return product.columns * ROW_BYTES


def _collect(
    sums: Buffer, product: WarpgroupProduct, dtype: str, into: Buffer, first: Expr, warp: Expr, lane: Expr
) -> None:
    """Emit the rounding of a warpgroup's sums, and their writing, transposed, into swizzled boxes from byte ``first``.

    A box has 64 of the output's columns, which are the rows of one instruction, in a row of 128 bytes for each of the
    instruction's columns. One ``stmatrix.trans`` stores two squares of 8 × 8 of a warp beside each other, or four: also
    those of the next eight columns.
    """
    packed = T.alloc_local((product.registers // 2,), "uint32")
    epilogue.pack(sums, packed, dtype)
    for row_tile in range(product.row_tiles):
        for square in range(0, product.columns // EIGHT, 2):
            squares = 2 * min(2, product.columns // EIGHT - square)
            row = square * EIGHT + (lane // 16 * EIGHT if squares == 4 else 0) + lane % EIGHT
            piece = tma.swizzled(row, warp * 16 + lane // EIGHT % 2 * EIGHT)
            start = row_tile * product.registers_per_tile // 2 + square * 2
            registers = (packed[start + i] for i in range(squares))
            place = into.ptr_to([first + row_tile * _box_bytes(product) + piece])
            T.evaluate(T.ptx[f"stmatrix.sync.aligned.m8n8.x{squares}.trans.shared.b16"](place, *registers))


def _store(
    tensor_map: Var, product: WarpgroupProduct, source: Buffer, first: Expr, row: Expr, column: Expr, overlapped: bool
) -> None:
    """Emit one thread's TMA stores of a warpgroup's boxes to the output's (row, column), and the wait for them."""
    for box in range(product.row_tiles):
        tma.store(tensor_map, column + box * PANEL, row, source.ptr_to([first + box * _box_bytes(product)]))
    T.evaluate(T.ptx.cp.async_.bulk.commit_group())
    tma.await_stores(read=overlapped)


def _store_rows(
    product: WarpgroupProduct,
    warpgroups: int,
    source: Buffer,
    first: Expr,
    output: Buffer | tma.PlainMatrix,
    corner: tuple[Expr, Expr],
    warps: int,
    warp: Expr,
    lane: Expr,
) -> None:
    """Emit a warp's stores of every ``warps``-th row of some warpgroups' boxes, side by side from ``corner`` on."""
    width = warpgroups * product.row_tiles * PANEL
    rows = epilogue.StagedRows(
        warps, -(-product.columns // warps), product.columns, width, box_bytes=_box_bytes(product)
    )
    epilogue.store_rows(source.ptr_to([first]), output, corner, lane, warp, rows)


def _store_elements(
    sums: Buffer,
    product: WarpgroupProduct,
    output: Buffer | tma.PlainMatrix,
    row: Expr,
    column: Expr,
    warp: Expr,
    lane: Expr,
) -> None:
    """Emit each thread's stores of its sums to the output's (row, column), one at a time: neighbours are rows apart."""
    for register in range(product.registers):
        row_tile, inside = divmod(register, product.registers_per_tile)
        down, across = wgmma_element(warp, lane, inside)
        epilogue.store_element(output, row + across, column + row_tile * WGMMA_ROWS + down, sums[register])
