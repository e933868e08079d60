"""The tensor memory accelerator: tensor maps made on the host, boxes copied by one thread's instruction.

A tensor map describes a matrix in global memory, row by row: its sizes, its rows' distance in bytes, and the box that
one instruction copies. Boxes here have rows of 128 bytes, whose eight 16-byte pieces lie permuted in shared memory by
the row's number modulo 8 (the 128-byte swizzle), as wgmma reads them. What a box has beyond the matrix is filled with
zeros on loads and left out on stores. Source: CUDA driver API, cuTensorMapEncodeTiled; PTX ISA, cp.async.bulk.tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Buffer, Var

from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import (
    PANEL,
    ROW_BYTES,
    TMA_LOAD,
    TMA_MULTICAST,
    TMA_STORE,
    TMA_STRIDE_BYTES,
    TMA_SWIZZLE_128B,
    VECTOR_BYTES,
    swizzled_piece,
)
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.memory.tensor_maps import encode_tensor_map
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS, Matmul

ALIGNING_STEP = "take step 10, which copies such rows to aligned ones first"
HINTED = ".L2::cache_hint"
# The L2 policy that createpolicy.fractional.L2::evict_first makes for the whole of a load: its lines are the first that
# others replace. Known as a constant from CUTLASS (TMA::CacheHintSm90::EVICT_FIRST).
EVICT_FIRST = 0x12F0000000000000


def rows_fit(columns: int, dtype: str) -> bool:
    """Tell whether rows of so many elements have a length that TMA takes."""
    return columns * dtype_bytes(dtype) % TMA_STRIDE_BYTES == 0


def straddles_lines(problem: Matmul) -> bool:
    """Tell whether B's rows are no multiples of 128 bytes: pieces of that size then come from two cache lines each."""
    return problem.b_shape[1] * dtype_bytes(problem.dtype) % ROW_BYTES != 0


def unreadable(problem: Matmul) -> str:
    """Name, in a clause, the operands whose rows TMA cannot step over; empty where it can read both."""
    operands = (("A", problem.k), ("B", problem.b_shape[1]))
    rows = [f"{name}'s of {columns}" for name, columns in operands if not rows_fit(columns, problem.dtype)]
    return f"TMA reads rows of multiples of {TMA_STRIDE_BYTES} bytes, not {' and '.join(rows)} elements" if rows else ""


def check_rows(problem: Matmul, remedy: str = ALIGNING_STEP) -> None:
    """Raise IllegalWorkload for operands whose rows TMA cannot step over; ``remedy`` says who takes them."""
    for name, columns in (("A", problem.k), ("B", problem.b_shape[1])):
        if not rows_fit(columns, problem.dtype):
            raise IllegalWorkload(
                f"TMA cannot read {name}, whose rows have {columns} elements of {problem.dtype}",
                value=f"{columns * dtype_bytes(problem.dtype)} bytes",
                limit=f"a multiple of {TMA_STRIDE_BYTES} bytes",
                remedy=remedy,
            )


def encode_map(name: str, matrix: Buffer, rows: int, columns: int = PANEL) -> Var:
    """Emit the host's encoding of a 16-bit matrix's tensor map, boxes of ``rows`` × ``columns``; returns the map.

    Rows of fewer than 64 columns lie 128 bytes apart in shared memory all the same, and swizzled as if whole: what lies
    between is left as it is, and counts for no barrier. A batch of matrices, a buffer of three dimensions, has boxes of
    one matrix each. Call it before ``T.device_entry()``. Kernels do not fetch maps ahead (prefetch.tensormap): 51 were
    as fast with it on an H100, three of one or two k tiles 1 to 3 % faster. Source: CUDA programming guide, tensor
    memory access, swizzle modes ("the full swizzle width"); an H200 does it for 8 to 56 columns, loads and stores.
    """
    sizes = list(matrix.shape)[::-1]
    strides = [dtype_bytes(matrix.dtype) * math.prod(map(int, sizes[:count])) for count in range(1, len(sizes))]
    box = (columns, rows, 1)[: len(sizes)]
    tensor_map = T.Var(name, ty=T.handle("tensormap").ty)
    T.Bind(T.tvm_stack_alloca("tensormap", 1), var=tensor_map)
    T.evaluate(encode_tensor_map(tensor_map, matrix, sizes, strides, box, TMA_SWIZZLE_128B))
    return tensor_map


class OneMatrix(NamedTuple):
    """A tensor map of a batch of matrices, and which of them: loads and stores take it as they do a matrix's map."""

    tensor_map: Var
    number: Expr


class Edged(NamedTuple):
    """The maps of an operand whose last panel has fewer columns: of its whole panels, if it has any, and of that."""

    whole: Var | OneMatrix | None
    edge: Var | OneMatrix

    def of(self, number: Expr) -> Edged:
        """Return those of one matrix of a batch."""
        whole = None if self.whole is None else OneMatrix(self.whole, number)
        return Edged(whole, OneMatrix(self.edge, number))


class PlainMatrix(NamedTuple):
    """One matrix of a batch that is reached by its address, for stores that take a matrix's buffer as well."""

    batch: Buffer
    number: Expr

    @property
    def shape(self) -> tuple[Expr, ...]:
        """Rows and columns."""
        return tuple(self.batch.shape)[1:]

    @property
    def dtype(self) -> str:
        """The dtype of an element."""
        return self.batch.dtype

    def place(self, indices: Sequence[Expr]) -> list[Expr]:
        """Return the indices of an element in the batch, of 64 bits where its elements are more than 31 can count."""
        large = 2 * math.prod(map(int, self.batch.shape)) >= MAX_ELEMENTS  # with places beyond the edges
        return [T.Cast("int64", self.number) if large else self.number, *indices]

    def ptr_to(self, indices: Sequence[Expr]) -> Expr:
        """Return the address of an element."""
        return self.batch.ptr_to(self.place(indices))


def one_matrix(matrix: Buffer, number: Expr) -> Buffer | PlainMatrix:
    """Return one matrix of a batch, or the matrix itself where it is none of a batch."""
    return matrix if len(matrix.shape) == 2 else PlainMatrix(matrix, number)


def map_of_one(tensor_map: Var | Edged | None, matrix: Buffer, number: Expr) -> Var | Edged | OneMatrix | None:
    """Return the map of one matrix of a batch, or the map itself where the ``matrix`` is none of a batch."""
    if tensor_map is None or len(matrix.shape) == 2:
        return tensor_map
    return tensor_map.of(number) if isinstance(tensor_map, Edged) else OneMatrix(tensor_map, number)


class Maps(NamedTuple):
    """The maps of A, B and C, and C itself."""

    a_map: Var | OneMatrix
    b_map: Var | OneMatrix | Edged
    c_map: Var | OneMatrix | None
    c: Buffer | PlainMatrix


class Multicast(NamedTuple):
    """Blocks of a cluster that one load arrives in: from the ``first``, each ``apart`` from the next.

    ``place`` is that of who loads among them.
    """

    blocks: int
    first: Expr = 0
    apart: int = 1
    place: Expr = 0

    @property
    def mask(self) -> Expr:
        """A bit for each of them."""
        bits = sum(1 << block * self.apart for block in range(self.blocks))
        if isinstance(self.first, int):
            return T.uint16(bits << self.first)
        return T.Cast("uint16", T.shift_left(bits, self.first))


@T.meta_class
class Matrices:
    """A kernel's operands and output, and their tensor maps; emit it before ``T.device_entry()``.

    ``pointers`` are the kernel's parameters, ``rows`` those of a TMA box of A, B and C; None leaves out C's map. Each
    is a ``batch`` of matrices if that is not 1, except what is ``broadcast``, "A" or "B", over all products. C may
    have fewer ``columns`` than the product. ``b_columns`` are the columns of B, stored [k, n], that a tile has: more
    maps where they are no whole panels of 64 (:class:`Edged`). ``c_columns`` are those of C's boxes.
    """

    def __init__(
        self,
        problem: Matmul,
        pointers: tuple[Var, Var, Var],
        rows: tuple[int, int, int | None],
        batch: int = 1,
        columns: int = 0,
        b_columns: int = PANEL,
        c_columns: int = PANEL,
        broadcast: str = "",
    ) -> None:
        shapes = ((problem.m, problem.k), problem.b_shape, (problem.m, columns or problem.n))
        dtypes = (problem.dtype, problem.dtype, problem.out_dtype)
        matched = []
        for name, pointer, shape, dtype in zip("ABC", pointers, shapes, dtypes):
            whole = shape if batch == 1 or name in broadcast else (batch, *shape)
            matched.append(T.match_buffer(pointer, whole, dtype, align=TMA_STRIDE_BYTES))
            IRBuilder.name(name, matched[-1])
        self.a, self.b, self.c = matched
        self.a_map = encode_map("a_map", self.a, rows[0])
        whole = encode_map("b_map", self.b, rows[1]) if b_columns >= PANEL else None
        edge = b_columns % PANEL
        self.b_map = Edged(whole, encode_map("b_edge_map", self.b, rows[1], edge)) if edge else whole
        self.c_map = None if rows[2] is None else encode_map("c_map", self.c, rows[2], c_columns)

    def of(self, number: Expr) -> Maps:
        """Return the maps, and the output, of one product of the batch; of no batch these are as they were."""
        both = ((self.a_map, self.a), (self.b_map, self.b), (self.c_map, self.c))
        return Maps(*(map_of_one(*each, number) for each in both), one_matrix(self.c, number))


def elected() -> Expr:
    """Tell whether this lane is the one that a converged warp elects to issue copies.

    The compiler knows ``elect.sync``, and that one lane is left; from ``thread == 0`` it makes a loop over lanes
    around every instruction that takes a tensor map.
    """
    return T.cuda.elect_sync() != T.uint32(0)


def _place(tensor_map: Var | OneMatrix, column: Expr, row: Expr) -> tuple[Expr, tuple[Expr, ...]]:
    if isinstance(tensor_map, OneMatrix):
        return T.address_of(tensor_map.tensor_map), (column, row, tensor_map.number)
    return T.address_of(tensor_map), (column, row)


def load(
    tensor_map: Var | OneMatrix,
    column: Expr,
    row: Expr,
    into: Expr,
    barrier: Expr,
    blocks: int | Multicast = 1,
    streams: bool = False,
) -> None:
    """Emit the copy of the box at (row, column) to shared memory at ``into``, a multiple of 1024 bytes.

    One thread's instruction, which returns at once; the box's bytes, zeros included, count down the mbarrier's expected
    bytes as they arrive. With more ``blocks`` it arrives in all of the cluster, or in those of a :class:`Multicast`, at
    the same place of each. What ``streams`` is read once, and leaves the L2 cache first.
    """
    address, place = _place(tensor_map, column, row)
    given = blocks if isinstance(blocks, Multicast) else Multicast(blocks)
    kind, more = (TMA_MULTICAST, [given.mask]) if given.blocks > 1 else (TMA_LOAD, [])
    if streams:
        kind, more = kind + HINTED, [*more, T.uint64(EVICT_FIRST)]
    T.evaluate(T.ptx[kind.format(len(place))](into, address, *place, barrier, *more))


def store(tensor_map: Var | OneMatrix, column: Expr, row: Expr, source: Expr) -> None:
    """Emit the copy of a box in shared memory to the matrix at (row, column), as part of this thread's bulk group."""
    address, place = _place(tensor_map, column, row)
    T.evaluate(T.ptx[TMA_STORE.format(len(place))](address, *place, source))


def await_stores(read: bool = False) -> None:
    """Emit the wait for all of this thread's bulk groups: until they are stored, or only ``read`` from shared memory.

    The latter is enough for a block to end: a kernel has ended once its stores have.
    """
    wait = T.ptx.cp.async_.bulk.wait_group
    T.evaluate(wait.read(0) if read else wait(0))


def swizzled(row: Expr, column: Expr) -> Expr:
    """Return the byte of the 16-byte piece of a box that begins at an element: permuted by the row modulo 8."""
    piece = column // (PANEL // 8)
    return row * ROW_BYTES + swizzled_piece(row, piece) * VECTOR_BYTES
