"""Swizzled shared memory: rows of a tile shifted against each other, so that a column's pieces lie in other banks.

Shared memory has 32 banks of 4 bytes, so that 8 pieces of 16 bytes can be read at once if they lie in different
eighths of 128 bytes. ``ldmatrix`` reads such pieces from 8 consecutive rows, at the same place of each: where
rows are a multiple of 128 bytes, all in the same banks. Swizzled, row r keeps its piece p at p xor r (modulo 8)::

    before   A_shared[r, 8·p + e]
    after    A_shared[r, 8·(p ^ (r % 8)) + e]            # rows of 128 bytes and more
             A_shared[r, 8·(p ^ (r // 2 % 4)) + e]       # rows of 64 bytes: two of them fill the banks

A bijection of each row, so that reads, writes and cp.async of 16 bytes stay as they are. TVM's own annotation for
this (``permuted_layout``) knows float16 and three row lengths, and does not see an address taken with ``address_of``.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import SHARED_SCOPES, block_name
from tensorir_ladder.schedules.isa import VECTOR_BYTES, swizzled_piece
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.passes import on_functions, require_pipeline

SWIZZLE = "swizzled_rows"


def swizzle_rows(sch: Schedule, copy: SBlockRV) -> None:
    """Shift the rows of the shared-memory tile that a copy fills; see the module's text. Needs :func:`lower_swizzles`.

    Raises
    ------
    IllegalSchedule : if the block writes no shared memory.
    """
    written = sch.get(copy).writes[0].source
    if written.scope() not in SHARED_SCOPES:
        raise IllegalSchedule(
            "only a tile in shared memory can be swizzled",
            block=block_name(sch, copy),
            value=written.scope() or "global",
            limit=", ".join(SHARED_SCOPES),
            remedy="pass a block that stage_in_shared made",
        )
    require_pipeline(sch, "swizzled rows")
    sch.annotate(copy, SWIZZLE, 1)


def lower_swizzles() -> tvm.transform.Pass:
    """Swizzle every access to the tiles that :func:`swizzle_rows` marked, in functions with compact buffers."""
    return on_functions(_swizzled)


def _swizzled(function: tirx.PrimFunc) -> tirx.PrimFunc:
    marked, analyzer = {}, sym.Analyzer()

    def has_pieces(tile: tirx.Var) -> bool:
        return int(tile.shape[-1]) * dtype_bytes(tile.dtype) % VECTOR_BYTES == 0

    def note_block(block: s_tir.SBlock) -> None:
        if SWIZZLE in block.annotations:
            # Of a tile narrower than it was meant, with rows that are no whole pieces, nothing can be shifted.
            marked.update({region.source: True for region in block.writes if has_pieces(region.source)})

    def note_loop(loop: tirx.For) -> None:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    def indices_of(buffer: tirx.Var, indices: list[ir.Expr]) -> list[ir.Expr]:
        vector = VECTOR_BYTES // dtype_bytes(buffer.dtype)
        *outer, row, column = indices
        pieces = int(buffer.shape[-1]) // vector
        # Simplified, so that neither row nor piece depends on the place in a vector.
        row = analyzer.simplify(_divided_by_pieces(row, vector, analyzer))
        piece, element = (analyzer.simplify(part) for part in (column // vector, column % vector))
        return [*outer, row, swizzled_piece(row, piece, pieces) * vector + element]

    def load(access: ir.TensorLoad) -> ir.Expr:
        return access.source[tuple(indices_of(access.source, access.indices))] if access.source in marked else access

    def store(access: tirx.BufferStore) -> tirx.Stmt:
        if access.buffer not in marked:
            return access
        return tirx.BufferStore(access.buffer, access.value, indices_of(access.buffer, access.indices))

    tvm_ffi.structural_walk(function.body, [(s_tir.SBlock, note_block), (tirx.For, note_loop)])
    if not marked:
        return function
    return tvm_ffi.structural_map(function, [(ir.TensorLoad, load), (tirx.BufferStore, store)])


def _divided_by_pieces(row: ir.Expr, vector: int, analyzer: sym.Analyzer) -> ir.Expr:
    """Write ``x // 192`` as ``x // 8 // 24``, where TVM can tell that the last 3 bits of x do not matter."""

    def divide_twice(quotient: tirx.FloorDiv) -> ir.Expr:
        divisor = quotient.b
        if not isinstance(divisor, tirx.IntImm) or int(divisor) % vector:
            return quotient
        return analyzer.simplify(quotient.a // vector) // (int(divisor) // vector)

    return tvm_ffi.structural_map(row, (tirx.FloorDiv, divide_twice))
