"""A product of a short reduction whose rows TMA cannot step over: threads load them as they lie.

TMA wants rows that begin multiples of 16 bytes apart, and copies in front of a product cost a launch, and a turn
through memory. Where the whole reduction fits in shared memory, no ring is needed either: a block loads its rows of A
and columns of B once, multiplies once, and stores; what one block waits for, others on its multiprocessor hide.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Buffer

from tensorir_ladder.kernels import epilogue
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue, without
from tensorir_ladder.kernels.panels import TmaPanels
from tensorir_ladder.kernels.raster import grouped, of_batch
from tensorir_ladder.kernels.roles import OVERLAPS, begin_after_last
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.tiles import BLOCK_REGISTERS, INSTRUCTION_REGISTERS, MOST_RESIDENT, HopperTile
from tensorir_ladder.kernels.tma import PlainMatrix, one_matrix
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.isa import PANEL, PTX_TYPES, SHARED_KIB, WARP, WARPGROUP, WGMMA_ROWS
from tensorir_ladder.schedules.workloads import Matmul

PIECE = 8  # elements that a thread loads at once: 16 bytes, of two aligned pieces that are shifted against each other
# Pieces that a thread has on their way together: with more than FEW it takes longer to shift and to lay them down than
# more threads take to begin. 64x64x128 took 2.6 us with four, 3.0 with eight (220x151x73, H200).
FEW, AT_ONCE = 4, 8
PIECE_REGISTERS, BESIDE_REGISTERS = 8, 32  # what a piece takes, and addresses beside them
MOST_THREADS = 768  # of a block: with 1024 some products took 1.04 times as long
SWIZZLED_ROWS = 8  # after which a panel's swizzle repeats
MOST_ELEMENTS = 2**30  # of a matrix: places beside its last one are whole numbers of 32 bits, too
ROOM_BYTES = 1024  # of a multiprocessor's shared memory that each block takes beside its own

# A thread's pieces are below each other. In place of those beyond the matrix's edges it loads the first one, which
# nobody needs. Where one of a piece's two aligned ones is not whole within the matrix, elements are read one by one:
# beside it is somebody else's. These are waited for, so they are read when all others are on their way. Beyond the
# reduction there are zeros in shared memory.
_PIECES = """
__forceinline__ __device__ int skew_of(const unsigned short* from, int place) {
  return ((int)(unsigned long long)from / 2 + place) & 7;
}
__forceinline__ __device__ void read_elements(
    const unsigned short* from, int place, int extent, uint4& low, uint4& high) {
  const int first = place - skew_of(from, place);
  unsigned words[8] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (first + i >= 0 && first + i < extent) words[i / 2] |= (unsigned)from[first + i] << 16 * (i % 2);
  low = make_uint4(words[0], words[1], words[2], words[3]);
  high = make_uint4(words[4], words[5], words[6], words[7]);
}
__forceinline__ __device__ int first_place(const unsigned short* from) {
  return (unsigned long long)from & 15u ? 7 : 0;
}
__forceinline__ __device__ int place_of(const unsigned short* from, int row, int column, int rows, int columns) {
  return row < rows && column < columns ? row * columns + column : first_place(from);
}
__forceinline__ __device__ bool is_whole(const unsigned short* from, int place, int extent) {
  const int least = first_place(from), room = extent - 16 - least;
  return room >= 0 && (unsigned)(place - least) <= (unsigned)room;
}
template <int WIDTH, int STEP, int COUNT>
__forceinline__ __device__ void request_pieces(
    const unsigned short* from, int thread, int first_row, int first_column, int rows, int columns,
    uint4 (&low)[COUNT], uint4 (&high)[COUNT]) {
  const int own = first_row + thread / WIDTH, column = first_column + thread % WIDTH * 8;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int place = place_of(from, own + i * STEP, column, rows, columns);
    if (is_whole(from, place, rows * columns)) {
      const uint4* aligned = (const uint4*)(from + (place - skew_of(from, place)));
      low[i] = aligned[0];
      high[i] = aligned[1];
    }
  }
}
template <int WIDTH, int STEP, int COUNT>
__forceinline__ __device__ void read_edges(
    const unsigned short* from, int thread, int first_row, int first_column, int rows, int columns,
    uint4 (&low)[COUNT], uint4 (&high)[COUNT]) {
  const int own = first_row + thread / WIDTH, column = first_column + thread % WIDTH * 8;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int place = place_of(from, own + i * STEP, column, rows, columns);
    if (!is_whole(from, place, rows * columns)) read_elements(from, place, rows * columns, low[i], high[i]);
  }
}
template <int WIDTH, int STEP, int COUNT, int PANEL_BYTES, bool ALONG_K>
__forceinline__ __device__ void lay_pieces(
    unsigned char* into, const unsigned short* from, int thread, int panel_row, int first_row, int first_column,
    int rows, int columns, const uint4 (&low)[COUNT], const uint4 (&high)[COUNT]) {
  const int at = thread % WIDTH, own = panel_row + thread / WIDTH, left = columns - at * 8;
  const int column = min(first_column + at * 8, columns - 1);
  unsigned char* to = into + at / 8 * PANEL_BYTES + own * 128 + ((at % 8 ^ own % 8) << 4);
  unsigned masks[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    masks[i] = !ALONG_K || left > 2 * i + 1 ? 0xffffffffu : left == 2 * i + 1 ? 0xffffu : 0u;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int row = first_row + own + i * STEP, place = min(row, rows - 1) * columns + column;
    const int skew = skew_of(from, place);
    unsigned words[8] = {low[i].x, low[i].y, low[i].z, low[i].w, high[i].x, high[i].y, high[i].z, high[i].w};
#pragma unroll
    for (int word = 0; word < 6; ++word) words[word] = skew & 4 ? words[word + 2] : words[word];
#pragma unroll
    for (int word = 0; word < 5; ++word) words[word] = skew & 2 ? words[word + 1] : words[word];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      words[word] = __funnelshift_r(words[word], words[word + 1], skew % 2 * 16) & masks[word];
      words[word] = ALONG_K || row < rows ? words[word] : 0u;
    }
    *(uint4*)(to + i * STEP * 128) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
"""
# Both operands' tiles, in rounds: a round's pieces are all on their way before the first is laid down.
_LOAD = """
__forceinline__ __device__ void {name}(
    const void* a_matrix, const void* b_matrix, unsigned char* into, int thread, int a_row, int b_row, int b_column,
    int a_rows, int a_columns, int b_rows, int b_columns) {{
  const unsigned short *a = (const unsigned short*)a_matrix, *b = (const unsigned short*)b_matrix;
#pragma unroll
  for (int round = 0; round < {rounds}; ++round) {{
    const int a_down = round * {a_each} * {a_step}, b_down = round * {b_each} * {b_step};
    uint4 a_low[{a_each}], a_high[{a_each}], b_low[{b_each}], b_high[{b_each}];
    request_pieces<{a_width}, {a_step}, {a_each}>(a, thread, a_row + a_down, 0, a_rows, a_columns, a_low, a_high);
    request_pieces<{b_width}, {b_step}, {b_each}>(
        b, thread, b_row + b_down, b_column, b_rows, b_columns, b_low, b_high);
    read_edges<{a_width}, {a_step}, {a_each}>(a, thread, a_row + a_down, 0, a_rows, a_columns, a_low, a_high);
    read_edges<{b_width}, {b_step}, {b_each}>(b, thread, b_row + b_down, b_column, b_rows, b_columns, b_low, b_high);
    lay_pieces<{a_width}, {a_step}, {a_each}, {a_panel_bytes}, true>(
        into, a, thread, a_down, a_row, 0, a_rows, a_columns, a_low, a_high);
    lay_pieces<{b_width}, {b_step}, {b_each}, {b_panel_bytes}, {b_along_k}>(
        into + {a_bytes}, b, thread, b_down, b_row, b_column, b_rows, b_columns, b_low, b_high);
  }}
}}
"""


@on_a_short_stack
def unaligned(
    problem: Matmul,
    tile: HopperTile,
    *,
    overlapped: bool = False,
    finish: Epilogue = PLAIN,
    batch: int = 1,
    broadcast: str = "",
) -> tirx.PrimFunc:
    """``main(A, B, C)``: each block multiplies one output tile, its whole reduction at once; rows may have any length.

    ::

        each thread:          request 16 bytes of A or B, wherever they begin, a few times
                              shift them, and lay them down in shared memory, as panels
        fence; barrier
        the tile's warpgroups:  wgmma of all k steps; wait; round; results → where the operands were
        barrier
        each warp:            rows of the results → output

    A block has as many threads as request its operands at once, a few pieces each (:class:`Sharing`).

    Operands and output are whole matrices, without gaps between rows, which begin at any element.
    ``tile``'s k steps are at least the problem's; what lies beyond these is zero. Rows beyond A's last, and columns
    beyond B's, are others of their matrices, whose results nobody stores. Blocks' tiles follow each other as
    :func:`kernels.raster.grouped` says.

    ``overlapped`` blocks begin while the kernel before in the stream still runs, and let the next one's begin at once
    (:func:`kernels.roles.begin_after_last`). ``finish`` is done to the sums, the bias of as many elements as C has
    columns. ``batch`` and ``broadcast`` are as in :func:`kernels.warp_specialized.warp_specialized`; the matrices of a
    batch follow each other without gaps.

    Raises
    ------
    IllegalWorkload : for results of other dtypes than float16, bfloat16, float32, for a residual, and for a matrix of
        more than 2³⁰ elements.
    IllegalTile : for a reduction longer than the tile's k steps, columns of a warpgroup that are no whole panels of 64,
        more shared memory than a block may have, loads that no number of threads has an equal share of, and what the
        instruction has no form for.
    """
    tile.check_sound()
    epilogue.check_stored(problem, finish)
    if (largest := max(rows * columns for rows, columns in matrices_of(problem))) > MOST_ELEMENTS:
        raise IllegalWorkload(
            "a matrix of more elements than this kernel counts",
            value=largest,
            limit=MOST_ELEMENTS,
            remedy="multiply it in parts, or take step 12 or 13",
        )
    if problem.k > tile.block_k:
        raise IllegalTile(
            "the tile holds a part of the reduction only",
            value=f"{tile} of k = {problem.k}",
            limit=f"k up to {tile.block_k}",
            remedy="take a deeper tile, or a kernel with a ring",
        )
    if tile.group_n % PANEL:
        raise IllegalTile(
            "results are collected in whole boxes",
            value=f"{tile}: {tile.group_n} columns per warpgroup",
            limit=f"multiples of {PANEL}",
            remedy="take a wider tile",
        )
    held, most = shared_bytes(tile), SHARED_KIB[90] * 1024
    if held > most:
        raise IllegalTile("shared memory", value=f"{held} bytes for {tile}", limit=most, remedy="take a smaller tile")
    product = WarpgroupProduct.of(problem, tile)
    tile_rows, tile_columns, _ = tile.counts(problem)
    sharing, groups_n, multiplying = Sharing.of(product, tile), tile.warpgroups[1], tile.threads_per_block // WARPGROUP
    threads = sharing.threads
    staged = problem.out_dtype in PTX_TYPES
    shapes = [
        shape if batch == 1 or name in broadcast else (batch, *shape)
        for name, shape in zip("ABC", matrices_of(problem))
    ]
    dtypes = (problem.dtype, problem.dtype, problem.out_dtype)

    @T.prim_func
    def main(A_ptr: T.handle, B_ptr: T.handle, C_ptr: T.handle, bias_ptr: T.handle):
        a_matrix = T.match_buffer(A_ptr, shapes[0], dtypes[0], align=2)
        b_matrix = T.match_buffer(B_ptr, shapes[1], dtypes[1], align=2)
        c_matrix = T.match_buffer(C_ptr, shapes[2], dtypes[2], align=2)
        _name("A", a_matrix)
        _name("B", b_matrix)
        _name("C", c_matrix)
        bias = T.meta_var(finish.bind(bias_ptr, problem.n))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": resident(tile, sharing)})
        block = T.cta_id([batch * tile_rows * tile_columns])
        warpgroup = T.warpgroup_id([threads // WARPGROUP])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        thread = T.thread_id([threads])
        pool = T.SMEMPool()
        memory = pool.alloc((shared_bytes(tile),), "uint8", align=1024)
        pool.commit()
        sums = T.alloc_local((product.registers,), "float32")
        which = T.meta_var(of_batch(block, tile_rows * tile_columns, batch))
        a_one = T.meta_var(one_matrix(a_matrix, which[0]))
        b_one = T.meta_var(one_matrix(b_matrix, which[0]))
        c_one = T.meta_var(one_matrix(c_matrix, which[0]))
        place = T.meta_var(grouped(which[1], tile_rows, tile_columns))
        row: T.let = place[0] * tile.block_m
        column: T.let = place[1] * tile.block_n
        group_row: T.let = warpgroup // groups_n * tile.group_m
        group_column: T.let = warpgroup % groups_n * tile.group_n
        a: T.let = product.a.descriptor(memory.ptr_to([product.a.extent_offset(group_row)]))
        b: T.let = product.b.descriptor(memory.ptr_to([product.a.bytes + product.b.extent_offset(group_column)]))
        if overlapped:
            begin_after_last(True)
        _load(product, sharing, (a_one, b_one), memory, thread, (row, column))
        T.ptx.fence.proxy.async_.shared__cta()  # wgmma reads by another proxy than threads write by
        T.cuda.cta_sync()
        if warpgroup < multiplying:
            product.multiply(sums, a, b, 0, T.bool(False))
            retire(sums, 0)
            corner = T.meta_var((row + group_row, column + group_column))
            finish.apply(bias, sums, product, corner[1], lane)
            if staged:
                _await_all_read(multiplying)
                first = T.meta_var(warpgroup * product.result_bytes)
                epilogue.collect(sums, product, problem.out_dtype, memory, first, warp, lane)
            else:
                epilogue.store_fragments(sums, product, c_one, *corner, warp, lane, aligned=False)
        if staged:
            T.cuda.cta_sync()
            _store(product, tile, memory, c_one, (row, column), (warpgroup * 4 + warp, lane), threads)

    made = main if finish.bias else without(main, "bias_ptr")
    return made.with_attr(OVERLAPS, True) if overlapped else made


def matrices_of(problem: Matmul) -> tuple[tuple[int, int], ...]:
    """Return the shapes of A, B and C as they are stored."""
    return (problem.m, problem.k), problem.b_shape, (problem.m, problem.n)


def shared_bytes(tile: HopperTile) -> int:
    """Return a block's shared memory: both operands' panels, B's columns in whole ones, or results of 16 bits."""
    columns = -(-tile.block_n // PANEL) * PANEL
    return max((tile.block_m + columns) * tile.block_k, tile.block_m * columns) * 2


class Sharing(NamedTuple):
    """Share out the pieces of a block's operands among its threads: rows of ``widths`` pieces, of A and of B.

    Each thread has ``counts`` pieces, as many ``steps`` rows apart, and loads them in ``rounds``.
    """

    threads: int
    widths: tuple[int, int]
    counts: tuple[int, int]
    rounds: int

    @property
    def steps(self) -> tuple[int, int]:
        """Rows from one of a thread's pieces to the next."""
        a, b = (self.threads // width for width in self.widths)
        return a, b

    @property
    def registers(self) -> int:
        """About how many registers a thread needs while it loads."""
        return BESIDE_REGISTERS + PIECE_REGISTERS * sum(self.counts) // self.rounds

    @classmethod
    def of(cls, product: WarpgroupProduct, tile: HopperTile) -> Sharing:
        """Take the fewest threads that have at most FEW pieces each, or else the most that have all at once.

        Where none do, the most. Each has the registers that its pieces take, and its sums. Raises IllegalTile where no
        number of threads has equal shares.
        """
        sides = [(panels.rows, _width(panels)) for panels in (product.a, product.b)]
        found = [
            made
            for threads in range(tile.threads_per_block, MOST_THREADS + 1, WARPGROUP)
            if (made := cls._by(threads, sides)) is not None and BLOCK_REGISTERS // threads >= _registers(tile, made)
        ]
        if not found:
            raise IllegalTile(
                "no number of threads has an equal share of the operands' loads",
                value=f"{tile}: {sides[0][0]} x {sides[0][1]} and {sides[1][0]} x {sides[1][1]} pieces",
                limit=f"up to {MOST_THREADS} threads",
                remedy="take sides of 64 or 128, and fewer k steps",
            )
        at_once = [made for made in found if made.rounds == 1]
        return next((made for made in at_once if sum(made.counts) <= FEW), (at_once or found)[-1])

    @classmethod
    def _by(cls, threads: int, sides: Sequence[tuple[int, int]]) -> Sharing | None:
        uneven = any(threads % (width * SWIZZLED_ROWS) or rows % (threads // width) for rows, width in sides)
        if uneven:
            return None
        a, b = (rows * width // threads for rows, width in sides)
        rounds = [each for each in range(1, a + b) if a % each == b % each == 0 and (a + b) // each <= AT_ONCE]
        return cls(threads, (sides[0][1], sides[1][1]), (a, b), rounds[0]) if rounds else None


def resident(tile: HopperTile, sharing: Sharing) -> int:
    """Return how many blocks a multiprocessor holds at once, by shared memory and registers: 1 to 4."""
    by_memory = SHARED_KIB[90] * 1024 // (shared_bytes(tile) + ROOM_BYTES)
    return max(1, min(MOST_RESIDENT, by_memory, BLOCK_REGISTERS // (sharing.threads * _registers(tile, sharing))))


def _registers(tile: HopperTile, sharing: Sharing) -> int:
    """Return how many registers each thread has at least, for its pieces and for a warpgroup's sums."""
    return max(sharing.registers, tile.group_m * tile.group_n // WARPGROUP + INSTRUCTION_REGISTERS)


def _width(panels: TmaPanels) -> int:
    """Return the pieces that a row of an operand's tile has in memory."""
    return (panels.depth if panels.major == "k" else panels.extent) // PIECE


def _name(name: str, matrix: Buffer) -> None:
    IRBuilder.name(name, matrix)


def _await_all_read(warpgroups: int) -> None:
    """Emit the wait until a block's warpgroups have multiplied: the operands' memory then takes the results."""
    T.evaluate(T.ptx.bar.sync(T.uint32(1), T.uint32(warpgroups * WARPGROUP)))


def _load(
    product: WarpgroupProduct,
    sharing: Sharing,
    matrices: tuple[Buffer | PlainMatrix, Buffer | PlainMatrix],
    into: Buffer,
    thread: Expr,
    corner: tuple[Expr, Expr],
) -> None:
    """Emit a thread's loads of both operands' whole tiles; ``corner`` is the output tile's first row and column."""
    a, b = product.a, product.b
    (a_width, b_width), (a_step, b_step), rounds = sharing.widths, sharing.steps, sharing.rounds
    name = f"load_{a.rows}x{a_width}_{b.rows}x{b_width}_{b.major}"
    text = _LOAD.format(
        name=name,
        rounds=rounds,
        a_each=sharing.counts[0] // rounds,
        b_each=sharing.counts[1] // rounds,
        a_width=a_width,
        b_width=b_width,
        a_step=a_step,
        b_step=b_step,
        a_bytes=a.bytes,
        a_panel_bytes=a.panel_bytes,
        b_panel_bytes=b.panel_bytes,
        b_along_k="true" if b.major == "k" else "false",
    )
    b_corner = (corner[1], 0) if b.major == "k" else (0, corner[1])
    sizes = (int(size) for matrix in matrices for size in matrix.shape)
    sources = (matrix.ptr_to([0, 0]) for matrix in matrices)
    call = (*sources, into.ptr_to([0]), thread, corner[0], *b_corner, *sizes)
    T.evaluate(T.cuda.func_call(name, *call, source_code=_PIECES + text))


def _store(
    product: WarpgroupProduct,
    tile: HopperTile,
    memory: Buffer,
    output: Buffer | PlainMatrix,
    corner: tuple[Expr, Expr],
    place: tuple[Expr, Expr],
    threads: int,
) -> None:
    """Emit a warp's stores of its rows of all boxes of the tile, which begins at ``corner``; ``place``: warp, lane."""
    warps, count = threads // WARP, tile.warpgroups[0] * tile.warpgroups[1]
    for number, row_tile in itertools.product(range(count), range(product.row_tiles)):
        group_row, group_column = divmod(number, tile.warpgroups[1])
        row = corner[0] + group_row * tile.group_m + row_tile * WGMMA_ROWS
        first = number * product.result_bytes + row_tile * product.boxes_across * epilogue.BOX_BYTES
        behind = (row, corner[1] + group_column * tile.group_n)
        rows = epilogue.StagedRows(warps, -(-WGMMA_ROWS // warps), width=product.columns)
        epilogue.store_rows(memory.ptr_to([first]), output, behind, place[1], place[0], rows)
