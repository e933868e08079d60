"""From accumulators to the output: rounded, through shared memory by TMA or row by row, or straight from registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import tma
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.kernels.panels import TileProduct
from tensorir_ladder.kernels.tiles import RoleTile, TmaTile
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import (
    PANEL,
    PTX_TYPES,
    ROW_BYTES,
    VECTOR_BYTES,
    WARP,
    WGMMA_ROWS,
    swizzled_piece,
    wgmma_element,
)
from tensorir_ladder.schedules.workloads import Matmul

AT_ONCE = 4  # of a warp's short rows of results that are read before the first is stored
LONG = 128  # columns from which rows of results leave in pieces
# A warp's stores of rows of results, a pair of neighbours a lane. Where a row begins between two aligned pairs, pairs
# are moved on by one: its ends are stores of one element, by the first lane and the last. Lanes find out once what they
# have within the columns, for rows of either kind, so that no row branches.
_STORE_PAIRS = """
__forceinline__ __device__ void {name}(
    const unsigned char* results, void* matrix, int first, int lane, int row, int column, int rows, int columns) {{
#pragma unroll
  for (int box = 0; box < {boxes}; ++box, column += 64) {{
    const int left = min(columns - column, min({width} - 64 * box, 64)), at = 2 * lane;
    if (left <= 0) return;
    const bool pair_here = at + 1 < left, one_here = at + 1 == left;
    const bool pair_before = at > 0 && at < left, one_before = at > 0 && at == left;
    const bool begins = at == 0, ends = lane == 31 && left > 63;
#pragma unroll
    for (int turn = 0; turn < {count}; turn += {at_once}) {{
      unsigned pairs[{at_once}];
#pragma unroll
      for (int i = 0; i < {at_once}; ++i) {{
        const int own = first + (turn + i) * {apart};
        if ({all_held} || (turn + i < {count} && own < {held_rows}))
          pairs[i] = *(const unsigned*)(
              results + own * {row_bytes} + box * {box_bytes} + ((lane / 4 ^ own % 8) << 4) + lane % 4 * 4);
      }}
#pragma unroll
      for (int i = 0; i < {at_once}; ++i) {{
        const int own = first + (turn + i) * {apart};
        if ((!{all_held} && (turn + i >= {count} || own >= {held_rows})) || row + own >= rows) continue;
        unsigned short* to = (unsigned short*)matrix + ((long long)(row + own) * columns + column);
        const unsigned pair = pairs[i];
        if (((unsigned long long)to & 2u) == 0u) {{
          if (pair_here) *(unsigned*)(to + at) = pair;
          if (one_here) to[at] = (unsigned short)pair;
        }} else {{
          const unsigned moved = __funnelshift_r(__shfl_up_sync(0xffffffffu, pair, 1), pair, 16);
          if (pair_before) *(unsigned*)(to + at - 1) = moved;
          if (one_before) to[at - 1] = (unsigned short)moved;
          if (begins || ends) to[begins ? at : 63] = (unsigned short)(begins ? pair : pair >> 16);
        }}
      }}
    }}
  }}
}}
"""
# The same by pieces of 16 bytes that are aligned in the output, whose elements lie in two pieces of shared memory; the
# elements before the first of them and behind the last are stored one by one, each by a lane. A row of 256 columns is
# two instructions, and only at its ends are sectors of 32 bytes written in part, where pairs, 64 columns at a time, do
# so at the ends of each 64: an H200 stored results of 5302 x 4677 in 25 us instead of 48, by tiles of 128 columns in 33
# instead of 46, of 64 columns in 52 instead of 49. Nothing branches: all rows' reads are on their way together.
_STORE_PIECES = """
__forceinline__ __device__ void {name}(
    const unsigned char* results, void* matrix, int first, int lane, int row, int column, int rows, int columns) {{
  const int left = min(columns - column, {width}), at = lane % {pieces}, beside = lane / {pieces};
  if (left <= 0 || beside >= {together}) return;
#pragma unroll
  for (int turn = 0; turn < {turns}; ++turn) {{
    const int number = turn * {together} + beside, own = min(first + number * {apart}, {held_rows} - 1);
    const bool there = number < {count} && first + number * {apart} < {held_rows} && row + own < rows;
    const unsigned char* from = results + own * {row_bytes};
    unsigned short* to = (unsigned short*)matrix + ((long long)(row + own) * columns + column);
    const int before = -(int)((unsigned long long)to >> 1) & 7, begins = before + 8 * at;
    const int behind = left < before ? left : before + ((left - before) & ~7);
    const int single = at >= 8 ? behind + at - 8 : at < before ? at : left;
    const bool whole = there && begins + 8 <= left, alone = there && single < left;
    const int piece = min(at, {pieces} - 1), next = min(at + 1, {pieces} - 1), element = min(single, {width} - 1);
    const uint4 low = *(const uint4*)(from + piece / 8 * {box_bytes} + ((piece % 8 ^ own % 8) << 4));
    const uint4 high = *(const uint4*)(from + next / 8 * {box_bytes} + ((next % 8 ^ own % 8) << 4));
    const unsigned short value = *(const unsigned short*)(
        from + element / 64 * {box_bytes} + ((element / 8 % 8 ^ own % 8) << 4) + element % 8 * 2);
    unsigned words[8] = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int word = 0; word < 6; ++word) words[word] = before & 4 ? words[word + 2] : words[word];
#pragma unroll
    for (int word = 0; word < 5; ++word) words[word] = before & 2 ? words[word + 1] : words[word];
#pragma unroll
    for (int word = 0; word < 4; ++word) words[word] = __funnelshift_r(words[word], words[word + 1], before % 2 * 16);
    if (whole)
      asm volatile("st.global.v4.b32 [%0], {{%1, %2, %3, %4}};"  // which nvcc makes four stores of
                   :: "l"(to + begins), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]));
    if (alone) to[single] = value;
  }}
}}
"""
EIGHT = 8  # rows or columns of a square of stmatrix
STRIPS = 2  # of eight rows, that a warp has of an instruction's rows
PIECE = 8  # elements of 16 bits that a lane stores at once
STORED = (*PTX_TYPES, "float32")  # dtypes of results: rounded from float32 sums, or as these are
BOX_BYTES = WGMMA_ROWS * ROW_BYTES


def untaken(problem: Matmul) -> str:
    """Say, in a clause, why the explicit kernels take no such product; empty where they do."""
    if problem.out_dtype not in STORED:
        return f"results are stored as {', '.join(STORED)}, not {problem.out_dtype}"
    return tma.unreadable(problem)


def check_taken(problem: Matmul, remedy: str = tma.ALIGNING_STEP) -> None:
    """Raise IllegalWorkload for what :func:`untaken` names; ``remedy`` says who takes rows that TMA cannot read."""
    tma.check_rows(problem, remedy)
    check_stored(problem)


def check_stored(problem: Matmul, finish: Epilogue = PLAIN) -> None:
    """Raise IllegalWorkload for results of a dtype that the explicit kernels do not store, and for a residual.

    For kernels that add none.
    """
    if problem.out_dtype not in STORED:
        raise IllegalWorkload(
            "results that the explicit kernels do not store",
            value=problem.out_dtype,
            limit=" | ".join(STORED),
            remedy="store them as one of these, or take step 10",
        )
    if finish.residual:
        raise IllegalWorkload("this kernel adds no residual", value="residual", remedy="take step 12 or 13")


def stored_columns(problem: Matmul, columns: int) -> int:
    """Return the columns that an output has: the product's, or fewer; IllegalWorkload for more."""
    if not 0 <= columns <= problem.n:
        raise IllegalWorkload(
            "an output of more columns than the product", value=columns, limit=problem.n, remedy="give it fewer"
        )
    return columns or problem.n


def can_store_by_tma(problem: Matmul, tile: TmaTile) -> bool:
    """Tell whether results can leave by TMA: 16 bits each, rows it can step over.

    Of kernels without roles also instructions of whole boxes: those with roles let boxes share columns, or have one
    narrower box.
    """
    fits = tile.group_n % PANEL == 0 or isinstance(tile, RoleTile)
    return problem.out_dtype in PTX_TYPES and tma.rows_fit(problem.n, problem.out_dtype) and fits


def round_pair(into: Expr, low: Expr, high: Expr, dtype: str) -> None:
    """Emit the rounding of two float32 to 16-bit ``dtype``, packed into 32 bits, ``low`` in the lower half."""
    T.evaluate(T.ptx[f"cvt.rn.{PTX_TYPES[dtype]}x2.f32"](into, high, low))


def pack(sums: Buffer, packed: Buffer, dtype: str) -> None:
    """Emit the rounding of all sums to 16-bit ``dtype``, two to a register: the sums' registers are free then."""
    for pair in range(int(packed.shape[0])):
        round_pair(packed[pair], sums[2 * pair], sums[2 * pair + 1], dtype)


def write_box(
    packed: Buffer, product: WarpgroupProduct, box: int, into: Buffer, first: Expr, warp: Expr, lane: Expr
) -> None:
    """Emit the writing of one swizzled box of 64 × 64 results to shared memory, at byte ``first``, by ``stmatrix``.

    Boxes go along columns, then to the next 64 rows. Where columns are no multiple of 64, the last box in a row begins
    within the one before, and has the same results there; fewer columns than 64 are one narrower box. One ``stmatrix``
    stores 16 × 16 elements of a warp, or 16 × 8, to the addresses of 16-byte pieces that its lanes give.
    """
    row_tile, column = product.box_place(box)
    start = (row_tile * product.columns + column) // 4
    for square in range(-(-product.box_columns // 16)):
        eights = 2 * min(2, product.box_columns // 8 - 2 * square)  # squares of 8 × 8: four, or two at an odd edge
        registers = (packed[start + square * 4 + i] for i in range(eights))
        place = into.ptr_to([first + piece_of(square, warp, lane)])
        T.evaluate(T.ptx[f"stmatrix.sync.aligned.m8n8.x{eights}.shared.b16"](place, *registers))


def piece_of(square: int, warp: Expr, lane: Expr) -> Expr:
    """Return the byte of a swizzled box that a lane names for a square of 16 × 16 elements of its warp's rows."""
    return tma.swizzled(warp * 16 + lane % 16, square * 16 + lane // 16 * 8)


def strip_bytes(product: WarpgroupProduct) -> int:
    """Return the bytes of a warp's strip of results: EIGHT rows of all columns, as :func:`write_strip` leaves it."""
    return EIGHT * product.boxes_across * ROW_BYTES


def write_strip(
    packed: Buffer, product: WarpgroupProduct, strip: int | Expr, into: Buffer, first: Expr, lane: Expr
) -> None:
    """Emit a warp's writing of one of its strips, EIGHT rows of all columns, to shared memory, at byte ``first``.

    Each row tile has STRIPS of each warp, the upper rows and the lower ones. A row's pieces are swizzled as a box's,
    and its columns beyond the first 64 follow at once.
    """
    eights = product.columns // EIGHT
    start = strip // STRIPS * (product.registers_per_tile // 2) + strip % STRIPS
    done = 0
    while done < eights:
        together = min(4, 1 << (eights - done).bit_length() - 1)  # squares of 8 × 8 of one instruction: four, two, one
        row, piece = lane % EIGHT, done + lane // EIGHT % together
        own = row * (product.boxes_across * ROW_BYTES) + swizzled_piece(row, piece) * VECTOR_BYTES
        place = into.ptr_to([first + own])
        registers = (packed[start + STRIPS * (done + i)] for i in range(together))
        T.evaluate(T.ptx[f"stmatrix.sync.aligned.m8n8.x{together}.shared.b16"](place, *registers))
        done += together


def collect(
    sums: Buffer, product: WarpgroupProduct, dtype: str, into: Buffer, first: Expr, warp: Expr, lane: Expr
) -> None:
    """Emit the rounding of a warpgroup's sums, and their writing into boxes from byte ``first`` of shared memory."""
    packed = T.alloc_local((product.registers // 2,), "uint32")
    pack(sums, packed, dtype)
    for box in range(product.boxes):
        write_box(packed, product, box, into, first + box * BOX_BYTES, warp, lane)


def store_boxes(tensor_map: Var, product: TileProduct, source: Buffer, first: Expr, row: Expr, column: Expr) -> None:
    """Emit one thread's TMA stores of results collected in boxes, to the output's (row, column), and the wait for them.

    Between both: a proxy fence by every thread that collected, then a barrier of these.
    """
    for box in range(product.boxes):
        store_box(tensor_map, product, box, source.ptr_to([first + box * product.ROWS * ROW_BYTES]), row, column)
    T.evaluate(T.ptx.cp.async_.bulk.commit_group())
    tma.await_stores()


def store_box(tensor_map: Var, product: TileProduct, box: int, address: Expr, row: Expr, column: Expr) -> None:
    """Emit the TMA store of one box to its place in the product's part of the output, which begins at row, column."""
    row_tile, first_column = product.box_place(box)
    tma.store(tensor_map, column + first_column, row + row_tile * product.ROWS, address)


@T.inline
def store_pair(output, row, column, low, high, packed):
    """Store two neighbouring results with one instruction, where a row of an even number of columns has them."""
    if row < output.shape[0] and column < output.shape[1]:
        if output.dtype == "float32":
            T.ptx["st.global.v2.f32"](output.ptr_to([row, column]), low, high)
        else:
            round_pair(packed[0], low, high, output.dtype)
            T.ptx["st.global.b32"](output.ptr_to([row, column]), packed[0])


def _store_at(output: Buffer | tma.PlainMatrix, place: list[Expr], value: Expr) -> None:
    """Emit one element's store."""
    if isinstance(output, tma.PlainMatrix):
        T.buffer_store(output.batch, value, output.place(place))
    else:
        T.buffer_store(output, value, place)


@T.inline
def store_element(output, row, column, value):
    """Store one result where the output has that element."""
    if row < output.shape[0] and column < output.shape[1]:
        _store_at(output, [row, column], T.Cast(output.dtype, value))


@T.inline
def store_four(sums, first, output, row, column, aligned):
    """Store four neighbouring results of a row that exists, from the ``first`` of ``sums`` on, less those beyond it.

    At once, where the output begins ``aligned``, at a multiple of 16 bytes, and its rows are by the four.
    """
    if aligned and int(output.shape[1]) % 4 == 0:
        if column < output.shape[1]:
            if output.dtype == "float32":
                four = T.meta_var([sums[first + i] for i in (0, 1, 2, 3)])
                T.ptx["st.global.v4.f32"](output.ptr_to([row, column]), *four)
            else:
                packed = T.alloc_local((2,), "uint32")
                round_pair(packed[0], sums[first], sums[first + 1], output.dtype)
                round_pair(packed[1], sums[first + 2], sums[first + 3], output.dtype)
                T.ptx["st.global.v2.b32"](output.ptr_to([row, column]), packed[0], packed[1])
    else:
        for i in T.unroll(4):
            store_element(output, row, column + i, sums[first + i])


def store_sums(
    sums: Buffer, output: Buffer | tma.PlainMatrix, place: Callable[[int], tuple[Expr, Expr]], aligned: bool = True
) -> None:
    """Emit a thread's stores of its sums, the i-th at the output's ``place(i)``, less what is beyond its edges.

    Two neighbouring sums at once, where the output begins ``aligned`` and rows of an even number of columns are, too.
    """
    pairs = aligned and int(output.shape[1]) % 2 == 0
    packed = T.alloc_local((1,), "uint32")
    for i in range(0, int(sums.shape[0]), 2 if pairs else 1):
        if pairs:
            store_pair(output, *place(i), sums[i], sums[i + 1], packed)
        else:
            store_element(output, *place(i), sums[i])


def store_fragments(
    sums: Buffer,
    product: WarpgroupProduct,
    output: Buffer | tma.PlainMatrix,
    row: Expr,
    column: Expr,
    warp: Expr,
    lane: Expr,
    aligned: bool = True,
) -> None:
    """Emit each thread's stores (:func:`store_sums`) of its fragments to the output's (row, column)."""

    def place(register: int) -> tuple[Expr, Expr]:
        row_tile, inside = divmod(register, product.registers_per_tile)
        own_row, own_column = wgmma_element(warp, lane, inside)
        return row + row_tile * WGMMA_ROWS + own_row, column + own_column

    store_sums(sums, output, place, aligned)


class StagedRows(NamedTuple):
    """A warp's share of 16-bit results in shared memory: ``count`` rows, ``apart`` from each other, of ``held_rows``.

    Rows have 128 bytes, with pieces swizzled by eight rows, and begin ``row_bytes`` after one another. Columns beyond
    64 are ``box_bytes`` further on. ``width``: columns, a multiple of 8 up to 256.
    """

    apart: int
    count: int
    held_rows: int = WGMMA_ROWS
    width: int = PANEL
    row_bytes: int = ROW_BYTES
    box_bytes: int = BOX_BYTES


def store_rows(
    results: Expr,
    output: Buffer | tma.PlainMatrix,
    corner: tuple[Expr, Expr],
    lane: Expr,
    first: Expr,
    rows: StagedRows,
) -> None:
    """Emit a warp's stores of ``rows`` from shared memory to the output, whose rows may have any length.

    ``results``: the address of what belongs to the output's ``corner``; ``first``: the warp's first row. Rows and
    columns beyond the output's edge are not stored. Call it after a barrier of the threads that wrote the rows.
    """
    name = "_".join(["store_rows", *map(str, rows)])
    if rows.width < LONG:
        at_once = min(AT_ONCE, rows.count)
        held = rows.count % at_once == 0 and (rows.apart == 1 or rows.apart * rows.count == rows.held_rows)
        shares = {"boxes": -(-rows.width // PANEL), "at_once": at_once, "all_held": "true" if held else "false"}
        text = _STORE_PAIRS.format(name=name, **rows._asdict(), **shares)
    else:
        pieces = rows.width // PIECE
        together = WARP // pieces
        shares = {"pieces": pieces, "together": together, "turns": -(-rows.count // together)}
        text = _STORE_PIECES.format(name=name, **rows._asdict(), **shares)
    given = (results, output.ptr_to([0, 0]), first, lane, *corner, *(int(size) for size in output.shape))
    T.evaluate(T.cuda.func_call(name, *given, source_code=text))
