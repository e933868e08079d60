"""From accumulators to the output: rounded, through shared memory and TMA, or straight from registers."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from schedules.workloads import Matmul

from . import tma
from .config import PANEL, ROW_BYTES, ROWS, HopperTile
from .wgmma import PTX_TYPES, WarpgroupProduct, fragment

BOX_BYTES = ROWS * ROW_BYTES


def can_store_by_tma(problem: Matmul, tile: HopperTile) -> bool:
    """Whether results can take TMA's way: 16 bits each, rows it can step over, warpgroups of whole boxes."""
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


def store_boxes(
    tensor_map: Var, product: WarpgroupProduct, source: Buffer, first: Expr, row: Expr, column: Expr
) -> None:
    """Emit one thread's TMA stores of what :func:`collect` left, to the output's (row, column), and the wait for them.

    Between both: a proxy fence by every thread, then the warpgroup's barrier.
    """
    boxes = product.columns // PANEL
    for row_tile in range(product.row_tiles):
        for box in range(boxes):
            address = source.ptr_to([first + (row_tile * boxes + box) * BOX_BYTES])
            tma.store(tensor_map, column + box * PANEL, row + row_tile * ROWS, address)
    T.evaluate(T.ptx.cp.async_.bulk.commit_group())
    T.evaluate(T.ptx.cp.async_.bulk.wait_group(0))


@T.inline
def store_through(memory, tensor_map, sums, product, dtype, warpgroup, warp, lane, row, column):
    """Store a warpgroup's sums through its part of ``memory``, which nobody else uses, to (row, column)."""
    collect(sums, product, dtype, memory, warpgroup * product.result_bytes, warp, lane)
    T.ptx.fence.proxy.async_.shared__cta()
    T.cuda.warpgroup_sync(1 + warpgroup)
    if warp == 0 and tma.elected():
        store_boxes(tensor_map, product, memory, warpgroup * product.result_bytes, row, column)


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


def store_fragments(
    sums: Buffer, product: WarpgroupProduct, output: Buffer, row: Expr, column: Expr, warp: Expr, lane: Expr
) -> None:
    """Emit each thread's stores of its own sums to the output's (row, column), less what is beyond its edges.

    Two neighbouring sums at once, where rows of an even number of columns keep them aligned.
    """
    pairs = int(output.shape[1]) % 2 == 0
    packed = T.alloc_local((1,), "uint32")
    for row_tile in range(product.row_tiles):
        for register in range(0, product.registers_per_tile, 2 if pairs else 1):
            own_row, own_column = fragment(warp, lane, register)
            place = (row + row_tile * ROWS + own_row, column + own_column)
            first = row_tile * product.registers_per_tile + register
            if pairs:
                store_pair(output, *place, sums[first], sums[first + 1], packed)
            else:
                store_element(output, *place, sums[first])
