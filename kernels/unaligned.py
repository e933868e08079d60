"""A product of a short reduction whose rows TMA cannot step over: threads load them as they lie.

TMA wants rows that begin multiples of 16 bytes apart, and copies in front of a product cost a launch, and a turn
through memory. Where the whole reduction fits in shared memory, no ring is needed either: a block loads its rows of A
and columns of B once, multiplies once, and stores; what one block waits for, others on its multiprocessor hide.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Buffer

from tensorir_ladder.kernels import epilogue
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue, without
from tensorir_ladder.kernels.raster import grouped
from tensorir_ladder.kernels.roles import OVERLAPS, begin_after_last
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.tiles import BLOCK_REGISTERS, MOST_RESIDENT, HopperTile
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.isa import PANEL, PTX_TYPES, SHARED_KIB, WARPGROUP, WGMMA_ROWS
from tensorir_ladder.schedules.tiles import WGMMA_REGISTERS
from tensorir_ladder.schedules.workloads import Matmul

PIECE = 8  # elements that a thread loads at once: 16 bytes, of two aligned pieces that are shifted against each other
AT_ONCE = 8  # pieces that a thread has on their way together
LOADING_REGISTERS = 96  # what that takes, and addresses
MOST_THREADS = 512  # of a block: with more, each has too few registers for so many pieces
MOST_ELEMENTS = 2**30  # of a matrix: places beside its last one are whole numbers of 32 bits, too
ROOM_BYTES = 1024  # of a multiprocessor's shared memory that each block takes beside its own

# What lies beyond a row is zero in shared memory. Where one of a piece's two aligned ones is not within the matrix,
# elements are read one by one: beside it is somebody else's.
_PIECES = """
__forceinline__ __device__ int skew_of(const unsigned short* from, int place) {
  return (int)((unsigned long long)(from + place) >> 1) & 7;
}
__forceinline__ __device__ void fetch_piece(
    const unsigned short* from, int row, int column, int rows, int columns, uint4& low, uint4& high) {
  const int extent = rows * columns, place = row * columns + column, skew = skew_of(from, place), first = place - skew;
  const bool inside = row < rows && column < columns;
  const bool whole = inside && first >= 0 && first + (skew ? 16 : 8) <= extent;
  low = high = make_uint4(0u, 0u, 0u, 0u);
  if (whole) low = *(const uint4*)(from + first);
  if (whole && skew) high = *(const uint4*)(from + first + 8);
  if (whole || !inside) return;
  unsigned words[8] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (first + i >= 0 && first + i < extent) words[i / 2] |= (unsigned)from[first + i] << 16 * (i % 2);
  low = make_uint4(words[0], words[1], words[2], words[3]);
  high = make_uint4(words[4], words[5], words[6], words[7]);
}
__forceinline__ __device__ void lay_piece(
    unsigned char* into, int panel_row, int piece, int panel_bytes, int skew, int left, uint4 low, uint4 high) {
  unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = skew & 4 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = skew & 2 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = skew & 1 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
    words[i] &= left > 2 * i + 1 ? 0xffffffffu : left == 2 * i + 1 ? 0xffffu : 0u;
  }
  *(uint4*)(into + piece / 8 * panel_bytes + panel_row * 128 + ((piece % 8 ^ panel_row % 8) << 4)) =
      make_uint4(words[0], words[1], words[2], words[3]);
}
"""
# Both operands' tiles, in rounds: a round's pieces are all on their way before the first is laid down.
_LOAD = """
__forceinline__ __device__ void {name}(
    const void* a, const void* b, unsigned char* into, int thread, int a_row, int b_row, int b_column,
    int a_rows, int a_columns, int b_rows, int b_columns) {{
  for (int round = 0; round < {rounds}; ++round) {{
    uint4 low[{a_each} + {b_each}], high[{a_each} + {b_each}];
#pragma unroll
    for (int i = 0; i < {a_each}; ++i) {{
      const int piece = (round * {a_each} + i) * {threads} + thread;
      if (piece < {a_pieces})
        fetch_piece((const unsigned short*)a, a_row + piece / {a_width}, piece % {a_width} * 8, a_rows, a_columns,
                    low[i], high[i]);
    }}
#pragma unroll
    for (int i = 0; i < {b_each}; ++i) {{
      const int piece = (round * {b_each} + i) * {threads} + thread;
      if (piece < {b_pieces})
        fetch_piece((const unsigned short*)b, b_row + piece / {b_width}, b_column + piece % {b_width} * 8, b_rows,
                    b_columns, low[{a_each} + i], high[{a_each} + i]);
    }}
#pragma unroll
    for (int i = 0; i < {a_each}; ++i) {{
      const int piece = (round * {a_each} + i) * {threads} + thread, row = piece / {a_width}, at = piece % {a_width};
      const int skew = skew_of((const unsigned short*)a, (a_row + row) * a_columns + at * 8);
      if (piece < {a_pieces})
        lay_piece(into, row, at, {a_panel_bytes}, skew, a_columns - at * 8, low[i], high[i]);
    }}
#pragma unroll
    for (int i = 0; i < {b_each}; ++i) {{
      const int piece = (round * {b_each} + i) * {threads} + thread, row = piece / {b_width}, at = piece % {b_width};
      const int skew = skew_of((const unsigned short*)b, (b_row + row) * b_columns + b_column + at * 8);
      if (piece < {b_pieces})
        lay_piece(into + {a_bytes}, row, at, {b_panel_bytes}, skew, b_columns - b_column - at * 8, low[{a_each} + i],
                  high[{a_each} + i]);
    }}
  }}
}}
"""
# A row of a box of results, by a warp, a pair of neighbours a lane: moved on by one where it begins beside a pair of
# aligned elements, so that all but the ends are stores of aligned pairs.
_STORE = """
__forceinline__ __device__ void store_box_row(
    const void* box, void* matrix, int box_row, int lane, int row, int column, int rows, int columns) {
  const int left = columns - column;
  if (row >= rows || left <= 0) return;
  unsigned short* to = (unsigned short*)matrix + (row * columns + column);
  unsigned pair = *(const unsigned*)((const unsigned char*)box + box_row * 128 + ((lane / 4 ^ box_row % 8) << 4) +
                                     lane % 4 * 4);
  int at = 2 * lane;
  if ((unsigned long long)to & 2u) {
    const unsigned before = __shfl_up_sync(0xffffffffu, pair, 1);
    if (lane == 31 && 63 < left) to[63] = (unsigned short)(pair >> 16);
    pair = before >> 16 | pair << 16;
    --at;
  }
  if (at < 0) {
    to[0] = (unsigned short)(pair >> 16);
  } else if (at + 1 < left) {
    *(unsigned*)(to + at) = pair;
  } else if (at < left) {
    to[at] = (unsigned short)pair;
  }
}
"""


@on_a_short_stack
def unaligned(
    problem: Matmul, tile: HopperTile, *, overlapped: bool = False, group: int = 16, finish: Epilogue = PLAIN
) -> tirx.PrimFunc:
    """``main(A, B, C)``: each block multiplies one output tile, its whole reduction at once; rows may have any length.

    ::

        each thread:    request 16 bytes of A or B, wherever they begin, eight times
                        shift them, and lay them down in shared memory, as panels
        fence; barrier
        each warpgroup: wgmma of all k steps; wait
                        round; results → shared memory, where the operands were → output, row by row

    A block has as many threads as request its operands at once, up to 512; those beyond the tile's warpgroups are done
    at the barrier.

    Operands and output are whole matrices, without gaps between rows, which begin at any element;
    results of float32 at multiples of 8 bytes.
    ``tile``'s k steps are at least the problem's; what lies beyond them is zero, as are rows beyond A's last and
    columns beyond B's. Blocks' tiles follow each other as :func:`kernels.raster.grouped` says.

    ``overlapped`` blocks begin while the kernel before in the stream still runs, and let the next one's begin at once
    (:func:`kernels.roles.begin_after_last`). ``finish`` is done to the sums, the bias of as many elements as C has
    columns.

    Raises
    ------
    IllegalWorkload : for results of other dtypes than float16, bfloat16, float32, for a residual, and for a matrix of
        more than 2³⁰ elements.
    IllegalTile : for a reduction longer than the tile's k steps, columns of a warpgroup that are no whole panels of 64,
        more shared memory than a block may have, and what the instruction has no form for.
    """
    tile.check_sound()
    if problem.out_dtype not in epilogue.STORED:
        raise IllegalWorkload(
            "results that the explicit kernels do not store",
            value=problem.out_dtype,
            limit=" | ".join(epilogue.STORED),
            remedy="store them as one of these",
        )
    if finish.residual:
        raise IllegalWorkload("this kernel adds no residual", value="residual", remedy="take step 12 or 13")
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
    threads, groups_n = threads_of(tile), tile.warpgroups[1]
    multiplying = tile.threads_per_block // WARPGROUP
    staged = problem.out_dtype in PTX_TYPES
    shapes = matrices_of(problem)
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
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": resident(tile)})
        block = T.cta_id([tile_rows * tile_columns])
        warpgroup = T.warpgroup_id([threads // WARPGROUP])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        thread = T.thread_id([threads])
        pool = T.SMEMPool()
        memory = pool.alloc((shared_bytes(tile),), "uint8", align=1024)
        pool.commit()
        sums = T.alloc_local((product.registers,), "float32")
        place = T.meta_var(grouped(block, tile_rows, tile_columns, group))
        row: T.let = place[0] * tile.block_m
        column: T.let = place[1] * tile.block_n
        group_row: T.let = warpgroup // groups_n * tile.group_m
        group_column: T.let = warpgroup % groups_n * tile.group_n
        a: T.let = product.a.descriptor(memory.ptr_to([product.a.extent_offset(group_row)]))
        b: T.let = product.b.descriptor(memory.ptr_to([product.a.bytes + product.b.extent_offset(group_column)]))
        if overlapped:
            begin_after_last(True)
        _load(product, a_matrix, b_matrix, memory, thread, threads, (row, column))
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
                T.cuda.warp_sync()  # a warp stores what it collected itself
                for box in range(product.boxes):
                    _store_box(product, box, memory, first, c_matrix, corner, warp, lane)
            else:
                epilogue.store_fragments(sums, product, c_matrix, *corner, warp, lane)

    made = main if finish.bias else without(main, "bias_ptr")
    return made.with_attr(OVERLAPS, True) if overlapped else made


def matrices_of(problem: Matmul) -> tuple[tuple[int, int], ...]:
    """Return the shapes of A, B and C as they are stored."""
    return (problem.m, problem.k), problem.b_shape, (problem.m, problem.n)


def shared_bytes(tile: HopperTile) -> int:
    """Return a block's shared memory: both operands' panels, B's columns in whole ones, or results of 16 bits."""
    columns = -(-tile.block_n // PANEL) * PANEL
    return max((tile.block_m + columns) * tile.block_k, tile.block_m * columns) * 2


def threads_of(tile: HopperTile) -> int:
    """Return a block's threads: so many that each requests AT_ONCE pieces of the operands, up to MOST_THREADS."""
    columns = -(-tile.block_n // PANEL) * PANEL
    pieces = (tile.block_m + columns) * tile.block_k // PIECE
    wanted = -(-pieces // (AT_ONCE * WARPGROUP)) * WARPGROUP
    return max(tile.threads_per_block, min(MOST_THREADS, wanted))


def resident(tile: HopperTile) -> int:
    """Return how many blocks a multiprocessor holds at once, by shared memory and registers: 1 to 4."""
    registers = max(LOADING_REGISTERS, tile.group_m * tile.group_n // WARPGROUP + WGMMA_REGISTERS)
    by_memory = SHARED_KIB[90] * 1024 // (shared_bytes(tile) + ROOM_BYTES)
    return max(1, min(MOST_RESIDENT, by_memory, BLOCK_REGISTERS // (threads_of(tile) * registers)))


def _name(name: str, matrix: Buffer) -> None:
    IRBuilder.name(name, matrix)


def _await_all_read(warpgroups: int) -> None:
    """Emit the wait until a block's warpgroups have multiplied: the operands' memory then takes the results."""
    T.evaluate(T.ptx.bar.sync(T.uint32(1), T.uint32(warpgroups * WARPGROUP)))


def _load(
    product: WarpgroupProduct,
    a_matrix: Buffer,
    b_matrix: Buffer,
    into: Buffer,
    thread: Expr,
    threads: int,
    corner: tuple[Expr, Expr],
) -> None:
    """Emit a thread's loads of both operands' whole tiles; ``corner`` is the output tile's first row and column."""
    a, b = product.a, product.b
    a_width, b_width = a.depth // PIECE, (b.depth if b.major == "k" else b.extent) // PIECE
    a_pieces, b_pieces = a.rows * a_width, b.rows * b_width
    a_own, b_own = -(-a_pieces // threads), -(-b_pieces // threads)
    rounds = -(-(a_own + b_own) // AT_ONCE)
    name = f"load_{a.rows}x{a_width}_{b.rows}x{b_width}"
    text = _LOAD.format(
        name=name,
        rounds=rounds,
        threads=threads,
        a_each=-(-a_own // rounds),
        b_each=-(-b_own // rounds),
        a_pieces=a_pieces,
        b_pieces=b_pieces,
        a_width=a_width,
        b_width=b_width,
        a_bytes=a.bytes,
        a_panel_bytes=a.panel_bytes,
        b_panel_bytes=b.panel_bytes,
    )
    b_corner = (corner[1], 0) if b.major == "k" else (0, corner[1])
    sizes = (int(size) for matrix in (a_matrix, b_matrix) for size in matrix.shape)
    sources = (matrix.ptr_to([0, 0]) for matrix in (a_matrix, b_matrix))
    call = (*sources, into.ptr_to([0]), thread, corner[0], *b_corner, *sizes)
    T.evaluate(T.cuda.func_call(name, *call, source_code=_PIECES + text))


def _store_box(
    product: WarpgroupProduct,
    box: int,
    memory: Buffer,
    first: Expr,
    output: Buffer,
    corner: tuple[Expr, Expr],
    warp: Expr,
    lane: Expr,
) -> None:
    """Emit a warp's stores of its rows of a box, which it has collected, to the output behind ``corner``."""
    row_tile, column = product.box_place(box)
    rows, columns = (int(size) for size in output.shape)
    place = memory.ptr_to([first + box * epilogue.BOX_BYTES])
    for below in range(WGMMA_ROWS // 4):
        box_row = warp * (WGMMA_ROWS // 4) + below
        row = corner[0] + row_tile * WGMMA_ROWS + box_row
        given = (box_row, lane, row, corner[1] + column, rows, columns)
        T.evaluate(T.cuda.func_call("store_box_row", place, output.ptr_to([0, 0]), *given, source_code=_STORE))
