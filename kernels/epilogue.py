"""From accumulators to the output: rounded, through shared memory and TMA, or straight from registers."""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from schedules.workloads import Matmul

from . import tma
from .config import PANEL, ROW_BYTES, ROWS, TmaTile
from .tcgen05 import TensorProduct, columns_at_once, load_row
from .wgmma import PTX_TYPES, TileProduct, WarpgroupProduct, fragment

BOX_BYTES = ROWS * ROW_BYTES


def can_store_by_tma(problem: Matmul, tile: TmaTile) -> bool:
    """Whether results can take TMA's way: 16 bits each, rows it can step over, instructions of whole boxes."""
    return problem.out_dtype in PTX_TYPES and tma.rows_fit(problem.n, problem.out_dtype) and tile.group_n % PANEL == 0


def round_pair(into: Expr, low: Expr, high: Expr, dtype: str) -> None:
    """Emit the rounding of two float32 to 16-bit ``dtype``, packed into 32 bits, ``low`` in the lower half."""
    T.evaluate(T.ptx[f"cvt.rn.{PTX_TYPES[dtype]}x2.f32"](into, high, low))


def collect(
    sums: Buffer, product: WarpgroupProduct, dtype: str, into: Buffer, first: Expr, warp: Expr, lane: Expr
) -> None:
    """Emit the rounding of a warpgroup's sums into swizzled boxes of 64 × 64 in shared memory, by ``stmatrix``.

    ``into`` are bytes, ``first`` the warpgroup's first; box after box along columns, then the next 64 rows. One
    ``stmatrix`` stores 16 × 16 elements of a warp, to the addresses of 16-byte pieces that its lanes give.
    """
    packed = T.alloc_local((4,), "uint32")
    for row_tile in range(product.row_tiles):
        for column in range(0, product.columns, 16):
            register = row_tile * product.registers_per_tile + column // 2
            for i in range(4):
                round_pair(packed[i], sums[register + 2 * i], sums[register + 2 * i + 1], dtype)
            box = row_tile * (product.columns // PANEL) + column // PANEL
            piece = tma.swizzled(warp * 16 + lane % 16, column % PANEL + lane // 16 * 8)
            address = into.ptr_to([first + box * BOX_BYTES + piece])
            T.evaluate(T.ptx.stmatrix.sync.aligned.m8n8.x4.shared.b16(address, *(packed[i] for i in range(4))))


def collect_rows(address: Expr, product: TensorProduct, dtype: str, into: Buffer, warp: Expr, lane: Expr) -> None:
    """Emit the rounding of sums in tensor memory into swizzled boxes of 128 × 64 in shared memory, a row each thread.

    ``into`` are bytes, box after box along columns. 16 bytes a store: those of eight lanes, whose rows follow each
    other, are in all 32 banks.
    """
    part, packed = T.alloc_local((PANEL,), "float32"), T.alloc_local((4,), "uint32")
    for box in range(product.columns // PANEL):
        load_row(part, address, warp, box * PANEL)
        for column in range(0, PANEL, 8):
            for i in range(4):
                round_pair(packed[i], part[column + 2 * i], part[column + 2 * i + 1], dtype)
            place = into.ptr_to([box * product.ROWS * ROW_BYTES + tma.swizzled(warp * 32 + lane, column)])
            T.evaluate(T.ptx["st.shared.v4.b32"](place, *(packed[i] for i in range(4))))


def store_boxes(tensor_map: Var, product: TileProduct, source: Buffer, first: Expr, row: Expr, column: Expr) -> None:
    """Emit one thread's TMA stores of results collected in boxes, to the output's (row, column), and the wait for them.

    Between both: a proxy fence by every thread that collected, then a barrier of these.
    """
    boxes, box_bytes = product.columns // PANEL, product.ROWS * ROW_BYTES
    for row_tile in range(product.row_tiles):
        for box in range(boxes):
            address = source.ptr_to([first + (row_tile * boxes + box) * box_bytes])
            tma.store(tensor_map, column + box * PANEL, row + row_tile * product.ROWS, address)
    T.evaluate(T.ptx.cp.async_.bulk.commit_group())
    T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))


@T.inline
def store_pair(output, row, column, low, high, packed):
    """Store two neighbouring results with one instruction, where a row of an even number of columns has them."""
    if row < output.shape[0] and column < output.shape[1]:
        if output.dtype == "float32":
            T.ptx["st.global.v2.f32"](output.ptr_to([row, column]), low, high)
        else:
            round_pair(packed[0], low, high, output.dtype)
            T.ptx["st.global.b32"](output.ptr_to([row, column]), packed[0])


@T.inline
def store_element(output, row, column, value):
    """Store one result where the output has that element."""
    if row < output.shape[0] and column < output.shape[1]:
        output[row, column] = T.Cast(output.dtype, value)


def store_sums(sums: Buffer, output: Buffer, place: Callable[[int], tuple[Expr, Expr]]) -> None:
    """Emit a thread's stores of its sums, the i-th at the output's ``place(i)``, less what is beyond its edges.

    Two neighbouring sums at once, where rows of an even number of columns keep them aligned.
    """
    pairs = int(output.shape[1]) % 2 == 0
    packed = T.alloc_local((1,), "uint32")
    for i in range(0, int(sums.shape[0]), 2 if pairs else 1):
        if pairs:
            store_pair(output, *place(i), sums[i], sums[i + 1], packed)
        else:
            store_element(output, *place(i), sums[i])


def store_fragments(
    sums: Buffer, product: WarpgroupProduct, output: Buffer, row: Expr, column: Expr, warp: Expr, lane: Expr
) -> None:
    """Emit each thread's stores (:func:`store_sums`) of its fragments to the output's (row, column)."""

    def place(register: int) -> tuple[Expr, Expr]:
        """Where a register's sum belongs."""
        row_tile, inside = divmod(register, product.registers_per_tile)
        own_row, own_column = fragment(warp, lane, inside)
        return row + row_tile * ROWS + own_row, column + own_column

    store_sums(sums, output, place)


def store_rows(
    address: Expr, product: TensorProduct, output: Buffer, row: Expr, column: Expr, warp: Expr, lane: Expr
) -> None:
    """Emit each thread's stores (:func:`store_sums`) of its row of tensor memory to the output's (row, column)."""
    count = columns_at_once(product.columns)
    part = T.alloc_local((count,), "float32")
    for first in range(0, product.columns, count):
        load_row(part, address, warp, first)
        store_sums(part, output, lambda i, first=first: (row + warp * 32 + lane, column + first + i))
