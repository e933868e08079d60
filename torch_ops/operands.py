"""Check how the tensors of a product lie in memory, and find what must be copied before a kernel can read it.

TMA steps over rows that begin multiples of 16 bytes apart, at an address that is one. It takes rows' lengths from the
tensor maps, which are made of the matrices at hand: a kernel for rows of 4096 elements multiplies rows of 4095 just as
well, with zeros for what is missing, once they lie 8192 bytes apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, MatrixRows
from tensorir_ladder.kernels.epilogue import PTX_TYPES, STORED
from tensorir_ladder.schedules.isa import ROW_BYTES, TMA_STRIDE_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.errors import OverlappingOutput, ScatteredRows, UnalignedOperand, WrongDtype, WrongShape

OPERANDS = (*PTX_TYPES, "float32")  # dtypes


@dataclass(frozen=True)
class Form:
    """A tensor without its address: its name in messages, sizes, strides in elements, and its dtype's name."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_bytes(self.dtype)

    @property
    def transposed(self) -> Form:
        """The matrix with its dimensions exchanged, in the same memory."""
        return Form(self.name, self.sizes[::-1], self.strides[::-1], self.dtype)

    @property
    def has_rows(self) -> bool:
        """True where elements of a row are side by side."""
        return self.strides[1] == 1 or self.sizes[1] == 1

    def rows(self) -> MatrixRows:
        """Describe the matrix as rows in memory; a single row is taken to reach to the next multiple of 16 bytes.

        Raises
        ------
        ScatteredRows : where elements of a row are apart, or rows lie upon each other.
        UnalignedOperand : for a part of a larger matrix whose rows do not begin multiples of 16 bytes apart.
        """
        (rows, columns), (stride, step) = self.sizes, self.strides
        if not self.has_rows or (rows > 1 and stride < columns):
            raise ScatteredRows(
                f"{self.name} has no rows that lie side by side in memory, one after the other",
                value=f"strides {stride}, {step}",
                limit=f"at least {columns}, and 1",
                remedy="call .contiguous() on it",
            )
        row_bytes = stride * self.itemsize if rows > 1 else _round_up(columns * self.itemsize, TMA_STRIDE_BYTES)
        if row_bytes % TMA_STRIDE_BYTES and stride != columns:
            raise UnalignedOperand(
                f"{self.name} is a part of a matrix whose rows TMA cannot step over",
                value=f"rows {row_bytes} bytes apart",
                limit=f"a multiple of {TMA_STRIDE_BYTES} bytes",
                remedy="call .contiguous() on it",
            )
        return MatrixRows(rows, columns, row_bytes)


def fits_tma(matrix: MatrixRows) -> bool:
    """Tell whether TMA can step over a matrix's rows, and over the matrices of a batch."""
    return matrix.row_bytes % TMA_STRIDE_BYTES == 0 and matrix.batch_bytes % TMA_STRIDE_BYTES == 0


def is_dense(matrix: MatrixRows, itemsize: int) -> bool:
    """Tell whether there are no gaps between a matrix's rows, nor between the matrices of a batch."""
    if matrix.batch > 1 and matrix.batch_bytes != matrix.rows * matrix.row_bytes:
        return False
    return matrix.all_rows == 1 or matrix.row_bytes == matrix.columns * itemsize


def padded(matrix: MatrixRows, itemsize: int) -> MatrixRows:
    """Lay a matrix out in rows that begin at multiples of 128 bytes, a row of a box each: each then is one line."""
    row_bytes = _round_up(matrix.columns * itemsize, ROW_BYTES)
    return _without_gaps(matrix.rows, matrix.columns, row_bytes, matrix.batch)


def _without_gaps(rows: int, columns: int, row_bytes: int, batch: int) -> MatrixRows:
    """Lay out a batch of matrices, each behind the last row of the one before."""
    return MatrixRows(rows, columns, row_bytes, batch, rows * row_bytes if batch > 1 else 0)


def readable(matrix: MatrixRows, itemsize: int) -> MatrixRows:
    """Return the matrix itself, or the padded rows that it is copied to."""
    return matrix if fits_tma(matrix) else padded(matrix, itemsize)


@dataclass(frozen=True)
class Operands:
    """A product's operands as they lie, and the problem that a kernel is made for.

    The problem's k, and its n with a B stored [k, n], are rounded up to what TMA takes as a row's length. ``batch`` is
    how many products there are, all with the same A or B where that is no batch. ``outer`` are the dimensions that the
    result has before its last two: those of the batch, and rows that lie in several dimensions.
    """

    problem: Matmul
    a: MatrixRows
    b: MatrixRows
    columns: int
    batch: int = 1
    outer: tuple[int, ...] = ()

    @property
    def exact(self) -> Matmul:
        """The product of the operands' own sizes."""
        return replace(self.problem, n=self.columns, k=self.a.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's sizes."""
        return (*self.outer, self.problem.m * self.batch // prod(self.outer), self.columns)

    @property
    def broadcast(self) -> str:
        """The operands that are one matrix for all products of a batch: "A", "B", both of them or none."""
        if self.batch == 1:
            return ""
        return "".join(name for name, matrix in (("A", self.a), ("B", self.b)) if matrix.batch == 1)

    @property
    def contiguous(self) -> MatrixRows:
        """An output without gaps between its rows."""
        row_bytes = self.columns * dtype_bytes(self.problem.out_dtype)
        return _without_gaps(self.problem.m, self.columns, row_bytes, self.batch)

    @property
    def straddles(self) -> bool:
        """True where rows of B that a kernel reads begin within cache lines."""
        return readable(self.b, dtype_bytes(self.problem.dtype)).row_bytes % ROW_BYTES != 0

    @property
    def steps(self) -> tuple[int, int]:
        """The elements that rows of A and of B begin apart where a kernel that TMA loads for reads them."""
        itemsize = dtype_bytes(self.problem.dtype)
        a, b = (readable(matrix, itemsize).row_bytes // itemsize for matrix in (self.a, self.b))
        return a, b

    @property
    def unreadable(self) -> str:
        """The operands whose rows TMA cannot step over: "A", "B", both of them or none."""
        return "".join(name for name, matrix in (("A", self.a), ("B", self.b)) if not fits_tma(matrix))

    @property
    def are_copied(self) -> bool:
        """True where a kernel that TMA loads for reads a copy of an operand."""
        return self.unreadable != ""

    def narrows(self, out: MatrixRows | None = None) -> bool:
        """Tell whether an output has fewer columns than the problem, in rows without gaps, as it has if none is given.

        Then kernels store it as it lies; to an output of other rows it is copied.
        """
        itemsize = dtype_bytes(self.problem.out_dtype)
        dense = out is None or is_dense(out, itemsize)
        return self.columns < self.problem.n and dense

    def are_dense(self, out: MatrixRows | None = None) -> bool:
        """Tell whether operands, and an output, are whole matrices without gaps, as a kernel without maps wants them.

        None of a batch are.
        """
        problem, itemsize = self.problem, dtype_bytes(self.problem.dtype)
        lain = [(self.a, (problem.m, problem.k), itemsize), (self.b, problem.b_shape, itemsize)]
        if out is not None:
            lain.append((out, (problem.m, problem.n), dtype_bytes(problem.out_dtype)))
        return self.batch == 1 and all(
            matrix.shape == shape and is_dense(matrix, element_bytes) for matrix, shape, element_bytes in lain
        )

    def output(self, plan: LaunchPlan, out: MatrixRows) -> MatrixRows:
        """Find the rows that a kernel stores: ``out`` itself, or what must be copied to it.

        TMA stores into any rows that it can step over, 16 bytes at least: into a row of one element it stored eight on
        an H200. Without it a kernel stores into the rows that it was made for.
        """
        itemsize = dtype_bytes(self.problem.out_dtype)
        if plan.maps("C"):
            whole = fits_tma(out) and out.columns * itemsize % TMA_STRIDE_BYTES == 0
            return out if whole else padded(out, itemsize)
        columns = plan.columns("C")
        made_for = _without_gaps(self.problem.m, columns, columns * itemsize, self.batch)
        dense = out.rows == 1 or out.row_bytes == made_for.row_bytes
        return out if dense and out.columns == made_for.columns else made_for


def arrange(a: Form, b: Form, out_dtype: str) -> Operands:
    """Pair the operands of a product of (m, k) and (k, n); a B whose columns are its rows in memory is layout "nt".

    Sizes were checked (:meth:`torch_ops.batches.Batches.of`).

    Raises
    ------
    WrongDtype : for operands of other dtypes than :data:`OPERANDS`, or of two; for outputs that are not stored.
    ScatteredRows, UnalignedOperand : see :meth:`Form.rows`.
    IllegalWorkload : for sizes below 1, or indices beyond 31 bits.
    """
    (m, k), n = a.sizes, b.sizes[1]
    check_dtypes(a.dtype, b.dtype, out_dtype)
    Matmul(m, n, k, a.dtype, "nn", out_dtype)  # sizes are checked before strides are looked at
    layout, stored = ("nt", b.transposed) if is_turned(b) else ("nn", b)
    whole = TMA_STRIDE_BYTES // a.itemsize
    problem = Matmul(m, _round_up(n, whole) if layout == "nn" else n, _round_up(k, whole), a.dtype, layout, out_dtype)
    return Operands(problem, a.rows(), stored.rows(), n)


def check_bias(bias: Form, operands: Operands) -> None:
    """Raise WrongShape, ScatteredRows or WrongDtype for what is no bias of the product's columns."""
    if bias.sizes != (operands.columns,):
        raise WrongShape(
            "bias has not one element for each column", value=bias.sizes, limit=(operands.columns,), remedy="give that"
        )
    if bias.strides != (1,) and operands.columns > 1:
        raise ScatteredRows(
            "bias' elements are not side by side", value=bias.strides[0], limit=1, remedy="call .contiguous() on it"
        )
    if bias.dtype not in (operands.problem.out_dtype, "float32"):
        raise WrongDtype(
            "a bias of another dtype than the output's",
            value=bias.dtype,
            limit=" | ".join(dict.fromkeys((operands.problem.out_dtype, "float32"))),
            remedy="convert it with .to()",
        )


def overlap(name: str, out: tuple[int, int], operand: tuple[int, int]) -> OverlappingOutput:
    """Make the error for an output that shares addresses with an operand; ranges are first and behind last."""
    return OverlappingOutput(
        f"out and {name} are in the same memory",
        value=f"bytes {out[0]:#x} to {out[1]:#x}, and {operand[0]:#x} to {operand[1]:#x}",
        remedy="give another tensor as out",
    )


def check_address(name: str, address: int) -> None:
    """Raise UnalignedOperand for an address that is no multiple of 16."""
    if address % TMA_STRIDE_BYTES:
        raise UnalignedOperand(
            f"{name} begins where neither TMA nor vectors of 16 bytes can",
            value=f"{address:#x}, {address % TMA_STRIDE_BYTES} bytes beyond a multiple of {TMA_STRIDE_BYTES}",
            limit=f"multiples of {TMA_STRIDE_BYTES} bytes",
            remedy="call .clone() on it",
        )


def is_turned(b: Form) -> bool:
    """Tell whether B's columns are its rows in memory: layout "nt"; where both are, whether rows had to be copied."""
    return b.transposed.has_rows and (not b.has_rows or b.sizes[0] > 1)


def check_dtypes(a: str, b: str, out: str) -> None:
    """Raise WrongDtype for operands and an output that the kernels do not take."""
    if a not in OPERANDS or a != b:
        raise WrongDtype(
            "operands of dtypes that the kernels do not multiply",
            value=f"{a} and {b}",
            limit=f"both {' or both '.join(OPERANDS)}",
            remedy="convert them with .to()",
        )
    if out not in STORED:
        raise WrongDtype(
            "an output that the kernels do not store", value=out, limit=" | ".join(STORED), remedy="choose one"
        )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
