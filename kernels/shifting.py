"""The kernel with roles for rows that TMA cannot step over: producer warps shift them (:mod:`.shifted_rows`).

Kernels that TMA loads for read a copy of such an operand. The copy goes through memory twice before the product reads
it once more: beside few rows of the other operand it takes longer than the product. Here each block copies what it
needs itself to its own shared memory, and shifts it there. Shared memory's bandwidth is the limit then, and an operand
that many blocks read is shifted by each of them; a copy in front is better for it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.boxes import Boxes
from tensorir_ladder.kernels.cluster_sums import ClusterSums, check_parts
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue, without
from tensorir_ladder.kernels.held import held
from tensorir_ladder.kernels.raster import grouped, of_batch
from tensorir_ladder.kernels.ring import RingState, check_stages
from tensorir_ladder.kernels.roles import (
    FEWEST_STAGES,
    MOST_STAGES,
    OVERLAPS,
    Consumer,
    RoleBlock,
    SharedRing,
    begin_after_last,
    end_together,
    say_done,
)
from tensorir_ladder.kernels.roles import WARPS as GROUP_WARPS
from tensorir_ladder.kernels.shifted_rows import WARPS, ShiftedRows
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.stamps import Log
from tensorir_ladder.kernels.tiles import (
    BLOCK_REGISTERS,
    INSTRUCTION_REGISTERS,
    MOST_CONSUMER_REGISTERS,
    REGISTER_STEP,
    RESULT_BOXES,
    ClusterTile,
)
from tensorir_ladder.kernels.tma import OneMatrix, PlainMatrix, map_of_one, one_matrix
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.isa import (
    ATOM_BYTES,
    PANEL,
    PTX_TYPES,
    SHARED_KIB,
    TMA_STRIDE_BYTES,
    WARPGROUP,
    WGMMA_ROWS,
)
from tensorir_ladder.schedules.workloads import Matmul

PRODUCERS = WARPS // GROUP_WARPS  # warpgroups
SHIFTING_REGISTERS = 72  # of a producer's thread at most
ALIGNED = TMA_STRIDE_BYTES // 2  # elements that rows which TMA steps over are multiples of
MOST_BYTES = SHARED_KIB[90] * 1024  # of a block's shared memory
SHIFTS = ("A", "B", "AB")  # the operands whose rows are shifted
# Stages of the ring, and k tiles that are on their way: the first that a block has room for. Both hide latency.
ROOMS = ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2))


@on_a_short_stack
def shifting(
    problem: Matmul,
    tile: ClusterTile,
    shifts: str,
    stages: int,
    ahead: int,
    *,
    finish: Epilogue = PLAIN,
    overlapped: bool = False,
    batch: int = 1,
    broadcast: str = "",
) -> tirx.PrimFunc:
    """``main(A, B, C)``: as :mod:`.warp_specialized`; two warpgroups of each block shift operands' rows.

    ::

        producers, each warp:                              consumers: as there, and
          for each k tile:                                   a fence, so that wgmma reads what threads wrote
            its rows of ``ahead`` k tiles are on their way
            wait until the first is there, and its stage empty
            shift its rows, lay them down in the stage
            say so; one thread's TMA load is of the other operand

    ``shifts`` names the operands whose rows begin anywhere: "A", "B" or "AB". They are whole matrices without gaps
    between rows, which begin at any element. Of an operand that it does not name rows are by the 8 elements,
    those of the problem or a few more (a copy, whose tensor map says how long they are). The output has no gaps either.
    Each of the ``parts`` of a :class:`kernels.tiles.ClusterTile` has its share of the reduction.

    ``finish``, ``overlapped``, ``batch`` and ``broadcast`` are as in :func:`kernels.unaligned.unaligned`.

    Raises
    ------
    IllegalWorkload : for no operand, or another, to shift; results of other dtypes than float16, bfloat16, float32; a
        residual; a matrix of more than 2³¹ elements, with 512 rows beyond its last.
    IllegalTile : for blocks that share loads, rows or columns that eight warps have no equal share of, more shared
        memory or registers than there are, more parts than k tiles, a B stored [k, n] that TMA loads by columns that
        are no whole panels, and what the instruction has no form for.
    IllegalPipeline : for stages, or k tiles ahead, below 2 or above 8.
    """
    lain = _lain(problem, shifts)
    epilogue.check_stored(problem, finish)
    tile.check_not_swapped()
    tile.check_sound()
    check_stages(stages, FEWEST_STAGES, MOST_STAGES)
    check_stages(ahead, FEWEST_STAGES, MOST_STAGES, "k tiles on their way")
    if found := misfits(problem, tile, shifts, stages, ahead):
        remedy = "take another tile"
        if shared_bytes(problem, tile, shifts, stages, ahead) > MOST_BYTES and max(stages, ahead) > FEWEST_STAGES:
            remedy += ", or fewer stages or k tiles ahead"
        raise IllegalTile("the tile is none of this kernel's: " + "; ".join(found), remedy=remedy)
    product, parts = WarpgroupProduct.of(problem, tile), tile.parts
    tile_rows, tile_columns, k_tiles = tile.counts(problem)
    check_parts(parts, k_tiles)
    rows = _shifted(product, lain, shifts)
    for each in rows.values():
        each.check()
    dtypes = problem.dtype, problem.dtype, problem.out_dtype
    of_a, of_b, output = (
        shape if batch == 1 or name in broadcast else (batch, *shape)
        for name, shape in zip("ABC", (*lain, (problem.m, problem.n)))
    )
    by_tma = epilogue.can_store_by_tma(problem, tile) and parts == 1
    in_boxes, aligned = problem.out_dtype in PTX_TYPES, problem.n % ALIGNED == 0
    if overlapped:
        product = product.for_overlap(
            a_streams=tile_columns == 1 and "A" not in broadcast, b_streams=tile_rows == 1 and "B" not in broadcast
        )
    stages = max(FEWEST_STAGES, min(stages, k_tiles))
    producer_registers, consumer_registers = _registers(tile)
    log = Log(None, ("consumer 0",))

    @T.prim_func
    def main(A_ptr: T.handle, B_ptr: T.handle, C_ptr: T.handle, bias_ptr: T.handle):
        a_matrix = T.match_buffer(A_ptr, of_a, dtypes[0], align=2 if "A" in shifts else TMA_STRIDE_BYTES)
        b_matrix = T.match_buffer(B_ptr, of_b, dtypes[1], align=2 if "B" in shifts else TMA_STRIDE_BYTES)
        c_matrix = T.match_buffer(C_ptr, output, dtypes[2], align=TMA_STRIDE_BYTES if aligned else 2)
        maps = T.meta_var(_maps(product, shifts, (a_matrix, b_matrix, c_matrix)))
        c_map = T.meta_var(tma.encode_map("c_map", c_matrix, WGMMA_ROWS, product.box_columns) if by_tma else None)
        bias = T.meta_var(finish.bind(bias_ptr, problem.n))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        kinds = T.meta_var({"overlapped": overlapped, "producers": PRODUCERS, "parts": parts})
        here = RoleBlock(batch * tile_rows * tile_columns * parts, tile.consumers, **kinds)
        cluster = ClusterSums(tile, here)
        which = T.meta_var(of_batch(here.number // parts, tile_rows * tile_columns, batch))
        own_matrix = T.meta_var(held("held_matrix", which[0], overlapped and batch > 1))
        a_one = T.meta_var(one_matrix(a_matrix, own_matrix))
        b_one = T.meta_var(one_matrix(b_matrix, own_matrix))
        c_one = T.meta_var(one_matrix(c_matrix, own_matrix))
        pool = T.SMEMPool()
        own_maps = T.meta_var(_maps_of_one(maps, (a_matrix, b_matrix), own_matrix))
        loading = _Loading(pool, product, rows, (a_one, b_one), own_maps, ahead)
        results = T.meta_var((tile.sum_bytes, True) if parts > 1 else ())
        shared = SharedRing(
            pool, stages, product.stage_bytes, tile.consumers, False, *results, arrivals=loading.arrivals
        )
        shared.begin(here)
        if overlapped:
            begin_after_last(True)
        place = T.meta_var(grouped(which[1], tile_rows, tile_columns))
        row: T.let = place[0] * tile.block_m
        column: T.let = place[1] * tile.block_n
        corner = T.meta_var((held("held_row", row, overlapped), held("held_column", column, overlapped)))
        share = T.meta_var(cluster.share_of(k_tiles))
        if here.warpgroup % (1 + tile.consumers) == 0:  # the first and the last are the producers
            T.ptx["setmaxnreg.dec.sync.aligned.u32"](producer_registers)
            warp: T.let = here.warpgroup // (1 + tile.consumers) * GROUP_WARPS + here.warp
            fill = RingState(stages, 1)
            slot = RingState(ahead, 0)
            for turn in T.serial(share.k_tiles + ahead):
                if turn >= ahead:
                    step: T.let = (share.first + turn - ahead) * tile.block_k
                    T.ptx.cp.async_.wait_group(ahead - 1)
                    shared.empty.wait(fill.stage, fill.phase, "producer")
                    T.cuda.warp_sync()  # also the copies of the warp's other lanes are there
                    loading.load(shared, fill.stage, warp, (*corner, step))
                    loading.lay(shared, fill.stage, slot.stage, (warp, here.lane), (*corner, step))
                    T.cuda.warp_sync()
                    if here.lane == 0:
                        shared.full.arrive(fill.stage)
                    fill.advance()
                if turn < share.k_tiles:
                    next_step: T.let = (share.first + turn) * tile.block_k
                    loading.request(slot.stage, (warp, here.lane), (*corner, next_step))
                T.ptx.cp.async_.commit_group()  # also an empty one: groups are counted
                slot.advance()
            say_done(here)
            cluster.meet()
            cluster.separate()
        else:  # a consumer
            T.ptx["setmaxnreg.inc.sync.aligned.u32"](consumer_registers)
            mine = Consumer(here, shared, product, tile)
            marks = T.meta_var(log.role("consumer 0", here.number))
            for k_tile in T.serial(share.k_tiles):
                shared.full.wait(mine.read.stage, mine.read.phase, "consumer")
                # Here, and not behind the producers' writing: there it waits for their copies that are on their way.
                T.ptx.fence.proxy.async_.shared__cta()
                mine.multiply(marks, k_tile, k_tile != 0)
                mine.retire_former(marks, k_tile, k_tile > 0)
            retire(mine.sums, 0)
            say_done(here)
            if parts > 1:
                cluster.store(mine, shared.results, c_one, corner, finish, bias, aligned)
            else:
                own = T.meta_var((corner[0] + mine.row, corner[1] + mine.column))
                finish.apply(bias, mine.sums, product, own[1], here.lane)
                if in_boxes:
                    packed = T.alloc_local((product.registers // 2,), "uint32")
                    leaving = T.meta_var(map_of_one(c_map, c_matrix, own_matrix))
                    boxes = Boxes(leaving, product, shared.results, RESULT_BOXES, output=c_one)
                    epilogue.pack(mine.sums, packed, problem.out_dtype)
                    for portion in T.unroll(boxes.portions):
                        boxes.store(packed, portion, *own, mine.number, here.warp, here.lane)
                    boxes.finish(here)
                else:
                    lane = T.meta_var((here.warp, here.lane))
                    epilogue.store_fragments(mine.sums, product, c_one, *own, *lane, aligned=aligned)
        end_together(here)

    made = main if finish.bias else without(main, "bias_ptr")
    return made.with_attr(OVERLAPS, True) if overlapped else made


def misfits(problem: Matmul, tile: ClusterTile, shifts: str, stages: int, ahead: int) -> list[str]:
    """Return what keeps a tile from being this kernel's, one clause each."""
    product = WarpgroupProduct.of(problem, tile)
    rows = _shifted(product, _lain(problem, shifts), shifts)
    found = [
        f"{each.panels.rows} rows of {each.width} pieces of {name} are no equal share of {WARPS} warps"
        for name, each in rows.items()
        if not each.fits
    ]
    if tile.shared_by > 1:
        found.append(f"{tile.shared_by} blocks share loads, which these do not")
    launched, consumer = _launched(tile), _registers(tile)[1]
    if (taken := tile.group_n // 2 + INSTRUCTION_REGISTERS) > launched:
        found.append(f"{taken} registers for one instruction, limit {launched} of a thread at launch")
    if tile.consumer_registers > consumer:
        found.append(f"{tile.consumer_registers} registers a consumer, limit {consumer}")
    if "B" not in rows and (edge := product.b.edge):
        found.append(f"a last panel of {edge} columns of a B stored [k, n], which TMA loads by {PANEL}")
    if (held_bytes := shared_bytes(problem, tile, shifts, stages, ahead)) > MOST_BYTES:
        found.append(f"{held_bytes} bytes of shared memory, limit {MOST_BYTES}")
    return found


def shared_bytes(problem: Matmul, tile: ClusterTile, shifts: str, stages: int, ahead: int) -> int:
    """Return the shared memory of a block: what is copied, and behind it the ring, its barriers and results.

    Less is taken of a B stored [n, k] by columns that are no whole panels: :meth:`kernels.tiles.RoleTile.pool_bytes`.
    """
    rows = _shifted(WarpgroupProduct.of(problem, tile), _lain(problem, shifts), shifts)
    copied = ahead * sum(each.bytes for each in rows.values())
    return -(-copied // ATOM_BYTES) * ATOM_BYTES + tile.kept_bytes(2, stages, RESULT_BOXES)


def room_for(problem: Matmul, tile: ClusterTile, shifts: str) -> tuple[int, int] | None:
    """Return the stages, and the k tiles ahead, that a block has room for; None where the tile does not fit at all."""
    return next((room for room in ROOMS if not misfits(problem, tile, shifts, *room)), None)


def _lain(problem: Matmul, shifts: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of A and B: as they are stored, or as they are copied to longer rows."""
    if shifts not in SHIFTS:
        limit = " | ".join(map(repr, SHIFTS))
        raise IllegalWorkload(
            "no operands to shift", value=repr(shifts), limit=limit, remedy="name one, or take step 12"
        )
    a, b = (
        (rows, columns if name in shifts else -(-columns // ALIGNED) * ALIGNED)
        for name, (rows, columns) in zip("AB", ((problem.m, problem.k), problem.b_shape))
    )
    return a, b


def _shifted(
    product: WarpgroupProduct, lain: tuple[tuple[int, int], tuple[int, int]], shifts: str
) -> dict[str, ShiftedRows]:
    of_both = zip("AB", (product.a, product.b), lain)
    return {name: ShiftedRows(panels, shape) for name, panels, shape in of_both if name in shifts}


def _launched(tile: ClusterTile) -> int:
    """Return the registers that every thread is launched with."""
    most = BLOCK_REGISTERS // ((PRODUCERS + tile.consumers) * WARPGROUP)
    return min(MOST_CONSUMER_REGISTERS, most // REGISTER_STEP * REGISTER_STEP)


def _registers(tile: ClusterTile) -> tuple[int, int]:
    """Return the registers of a producer's thread and of a consumer's, which has what the former give up."""
    launched = _launched(tile)
    producer = min(SHIFTING_REGISTERS, launched)
    left = (PRODUCERS + tile.consumers) * launched - PRODUCERS * producer
    return producer, min(MOST_CONSUMER_REGISTERS, left // tile.consumers // REGISTER_STEP * REGISTER_STEP)


def _maps(product: WarpgroupProduct, shifts: str, matrices: tuple[Buffer, Buffer, Buffer]) -> dict[str, Var]:
    """Name the matrices, and emit the tensor map of the operand that TMA loads, if there is one."""
    for name, matrix in zip("ABC", matrices):
        IRBuilder.name(name, matrix)
    return {
        name: tma.encode_map(f"{name.lower()}_map", matrix, panels.box_rows())
        for name, matrix, panels in zip("AB", matrices, (product.a, product.b))
        if name not in shifts
    }


def _maps_of_one(
    maps: dict[str, Var], matrices: tuple[Buffer, Buffer], number: Expr
) -> dict[str, Var | OneMatrix | None]:
    """Return the maps of one product of a batch."""
    return {name: map_of_one(each, matrices["AB".index(name)], number) for name, each in maps.items()}


@T.meta_class
class _Loading:
    """Bring a block's k tiles into its ring: the rows of some operands shifted, the other operand by TMA.

    ``ahead`` k tiles of copied pieces have room in ``copied``, A's before B's. A *corner* is a k tile's place: the
    tile's first row and column, and the step along k; ``by`` are a producer's warp and lane.
    """

    def __init__(
        self,
        pool: T.SMEMPool,
        product: WarpgroupProduct,
        rows: dict[str, ShiftedRows],
        matrices: tuple[Buffer | PlainMatrix, Buffer | PlainMatrix],
        maps: dict[str, Var | OneMatrix],
        ahead: int,
    ) -> None:
        self.product, self.rows, self.maps, self.ahead = product, rows, maps, ahead
        self.matrices = dict(zip("AB", matrices))
        self.copied = pool.alloc((ahead * sum(each.bytes for each in rows.values()),), "uint8", align=128)
        IRBuilder.name("copied", self.copied)
        self.panels = {"A": product.a, "B": product.b}
        self.loaded = sum(self.panels[name].loaded_bytes for name in maps)

    @property
    def arrivals(self) -> int:
        """Arrivals that make a stage full: of each producer's warp, and of the thread that says what TMA brings."""
        return WARPS + (1 if self.maps else 0)

    @T.inline
    def load(self, shared, stage, warp, corner):
        """Emit one thread's TMA loads of a k tile of the operand that is not shifted."""
        if self.loaded > 0:
            if warp == 0 and tma.elected():
                shared.full.expect(stage, self.loaded)
                self._load(shared, stage, corner)

    def _load(self, shared: SharedRing, stage: Expr, corner: tuple[Expr, ...]) -> None:
        for name, tensor_map in self.maps.items():
            place = stage * self.product.stage_bytes + self._behind(name)
            first = corner["AB".index(name)]
            self.panels[name].load(tensor_map, first, corner[2], shared.ring, place, shared.full.at(stage))

    def request(self, slot: Expr, by: tuple[Expr, Expr], corner: tuple[Expr, ...]) -> None:
        """Emit a lane's copies of its warp's rows of a k tile to one of the slots."""
        for name, each in self.rows.items():
            first = corner["AB".index(name)]
            each.request(self.matrices[name], self._slot(name, slot), *by, first, corner[2])

    def lay(self, shared: SharedRing, stage: Expr, slot: Expr, by: tuple[Expr, Expr], corner: tuple[Expr, ...]) -> None:
        """Emit a lane's laying down of its warp's rows of a k tile, from a slot in a stage."""
        for name, each in self.rows.items():
            into = shared.ring.ptr_to([stage * self.product.stage_bytes + self._behind(name)])
            each.lay(self.matrices[name], self._slot(name, slot), into, *by, corner["AB".index(name)], corner[2])

    def _behind(self, name: str) -> int:
        """Return where an operand's panels begin in a stage."""
        return 0 if name == "A" else self.product.a.bytes

    def _slot(self, name: str, slot: Expr) -> Expr:
        first = 0 if name == "A" or "A" not in self.rows else self.ahead * self.rows["A"].bytes
        return self.copied.ptr_to([first + slot * self.rows[name].bytes])
