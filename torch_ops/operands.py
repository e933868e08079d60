"""Check how the tensors of a product lie in memory, and find what must be copied before a kernel can read it.

TMA steps over rows that begin multiples of 16 bytes apart, at an address that is one. It takes rows' lengths from the
tensor maps, which are made of the matrices at hand: a kernel for rows of 4096 elements multiplies rows of 4095 just as
well, with zeros for what is missing, once they lie 8192 bytes apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, MatrixRows
from tensorir_ladder.kernels.epilogue import PTX_TYPES, STORED
from tensorir_ladder.schedules.isa import ROW_BYTES, TMA_STRIDE_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.errors import OverlappingOutput, ScatteredRows, UnalignedOperand, WrongDtype, WrongShape


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

    def check_matrix(self) -> None:
        """Raise WrongShape for a tensor that has not two dimensions."""
        if len(self.sizes) != 2:
            raise WrongShape(
                f"{self.name} is no matrix", value=f"shape {self.sizes}", limit="2 dimensions", remedy="reshape it"
            )

    @property
    def one(self) -> Form:
        """One matrix of a batch."""
        return Form(self.name, self.sizes[1:], self.strides[1:], self.dtype)

    def batch_of(self, one: MatrixRows) -> MatrixRows:
        """Describe a batch of matrices that lie as one of them does; nothing of a batch is copied.

        Raises UnalignedOperand where rows or matrices do not begin multiples of 16 bytes apart, ScatteredRows where
        matrices lie upon each other.
        """
        apart = self.strides[0] * self.itemsize
        if not fits_tma(one) or one.columns * self.itemsize % TMA_STRIDE_BYTES or apart % TMA_STRIDE_BYTES:
            raise UnalignedOperand(
                f"{self.name} is a batch whose rows TMA cannot step over",
                value=f"rows of {one.columns * self.itemsize} bytes, {one.row_bytes} apart, matrices {apart} apart",
                limit=f"multiples of {TMA_STRIDE_BYTES} bytes",
                remedy="pad its rows, or multiply one by one",
            )
        if self.sizes[0] > 1 and apart < one.extent(self.itemsize):
            raise ScatteredRows(
                f"{self.name} has matrices that lie upon each other",
                value=f"{apart} bytes apart",
                limit=f"at least {one.extent(self.itemsize)}",
                remedy="call .contiguous() on it; of one matrix for all, multiply all rows of the other by it",
            )
        return replace(one, batch=self.sizes[0], batch_bytes=apart)

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
    """Tell whether TMA can step over a matrix's rows."""
    return matrix.row_bytes % TMA_STRIDE_BYTES == 0


def is_dense(matrix: MatrixRows, itemsize: int) -> bool:
    """Tell whether there are no gaps between a matrix's rows."""
    return matrix.rows == 1 or matrix.row_bytes == matrix.columns * itemsize


def padded(matrix: MatrixRows, itemsize: int) -> MatrixRows:
    """Lay a matrix out in rows that begin at multiples of 128 bytes, a row of a box each: each then is one line."""
    return MatrixRows(matrix.rows, matrix.columns, _round_up(matrix.columns * itemsize, ROW_BYTES))


def readable(matrix: MatrixRows, itemsize: int) -> MatrixRows:
    """Return the matrix itself, or the padded rows that it is copied to."""
    return matrix if fits_tma(matrix) else padded(matrix, itemsize)


@dataclass(frozen=True)
class Operands:
    """A product's operands as they lie, and the problem that a kernel is made for.

    The problem's k, and its n with a B stored [k, n], are rounded up to what TMA takes as a row's length. ``batch`` is
    how many products there are, None where the operands have no such dimension.
    """

    problem: Matmul
    a: MatrixRows
    b: MatrixRows
    columns: int
    batch: int | None = None

    @property
    def exact(self) -> Matmul:
        """The product of the operands' own sizes."""
        return replace(self.problem, n=self.columns, k=self.a.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        """The product's rows and columns, of a batch behind their number."""
        matrix = (self.problem.m, self.columns)
        return matrix if self.batch is None else (self.batch, *matrix)

    @property
    def contiguous(self) -> MatrixRows:
        """An output without gaps between its rows."""
        row_bytes = self.columns * dtype_bytes(self.problem.out_dtype)
        return MatrixRows(self.problem.m, self.columns, row_bytes)

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
        return self.batch is None and self.columns < self.problem.n and dense

    def are_dense(self, out: MatrixRows | None = None) -> bool:
        """Tell whether operands, and an output, are whole matrices without gaps, as a kernel without maps wants them.

        None of a batch are.
        """
        problem, itemsize = self.problem, dtype_bytes(self.problem.dtype)
        lain = [(self.a, (problem.m, problem.k), itemsize), (self.b, problem.b_shape, itemsize)]
        if out is not None:
            lain.append((out, (problem.m, problem.n), dtype_bytes(problem.out_dtype)))
        return self.batch is None and all(
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
        made_for = MatrixRows(self.problem.m, columns, columns * itemsize)
        dense = out.rows == 1 or out.row_bytes == made_for.row_bytes
        return out if dense and out.columns == made_for.columns else made_for


def arrange(a: Form, b: Form, out_dtype: str) -> Operands:
    """Pair the operands of a product of (m, k) and (k, n); a B whose columns are its rows in memory is layout "nt".

    Or of a batch of them, (b, m, k) and (b, k, n).

    Raises
    ------
    WrongShape : for tensors that are no matrices, nor both batches of as many, or whose inner sizes differ.
    WrongDtype : for operands of other dtypes than float16 or bfloat16, or of two; for outputs that are not stored.
    ScatteredRows, UnalignedOperand : see :meth:`Form.rows`, :meth:`Form.batch_of`.
    IllegalWorkload : for sizes below 1, or indices beyond 31 bits.
    """
    batch = _batch(a, b)
    if batch is not None:
        one = arrange(a.one, b.one, out_dtype)
        return replace(one, a=a.batch_of(one.a), b=b.batch_of(one.b), batch=batch)
    for form in (a, b):
        form.check_matrix()
    (m, k), (inner, n) = a.sizes, b.sizes
    if k != inner:
        raise WrongShape(
            "the inner sizes of a and b differ", value=f"{a.sizes} and {b.sizes}", remedy="give (m, k) and (k, n)"
        )
    _check_dtypes(a.dtype, b.dtype, out_dtype)
    Matmul(m, n, k, a.dtype, "nn", out_dtype)  # sizes are checked before strides are looked at
    layout = _layout(b)
    stored = b if layout == "nn" else b.transposed
    whole = TMA_STRIDE_BYTES // a.itemsize
    problem = Matmul(m, _round_up(n, whole) if layout == "nn" else n, _round_up(k, whole), a.dtype, layout, out_dtype)
    return Operands(problem, a.rows(), stored.rows(), n)


def output_rows(out: Form, operands: Operands) -> MatrixRows:
    """Describe an output's rows; raises WrongShape for other sizes than the product's, and as :meth:`Form.rows`."""
    if operands.batch is None:
        out.check_matrix()
    if out.sizes != operands.shape:
        raise WrongShape(
            "out has another shape than the product", value=out.sizes, limit=operands.shape, remedy="give that"
        )
    return out.rows() if operands.batch is None else out.batch_of(out.one.rows())


def _batch(a: Form, b: Form) -> int | None:
    """Count the products that two tensors of three dimensions are; None for others."""
    if len(a.sizes) != 3 or len(b.sizes) != 3:
        return None
    if a.sizes[0] != b.sizes[0] or a.sizes[0] < 1:
        raise WrongShape(
            "a and b are not batches of as many matrices",
            value=f"{a.sizes} and {b.sizes}",
            remedy="give as many, 1 or more",
        )
    return a.sizes[0]


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
            f"{name} begins where TMA cannot read",
            value=f"{address:#x}, {address % TMA_STRIDE_BYTES} bytes beyond a multiple of {TMA_STRIDE_BYTES}",
            limit=f"multiples of {TMA_STRIDE_BYTES} bytes",
            remedy="call .clone() on it",
        )


def _layout(b: Form) -> str:
    """Name the layout by which of B's dimensions are its rows in memory; of both, one that need not be copied."""
    if b.has_rows and b.transposed.has_rows:
        return "nn" if fits_tma(b.rows()) else "nt"
    return "nt" if b.transposed.has_rows and not b.has_rows else "nn"


def _check_dtypes(a: str, b: str, out: str) -> None:
    if a not in PTX_TYPES or a != b:
        raise WrongDtype(
            "operands of dtypes that wgmma does not multiply here",
            value=f"{a} and {b}",
            limit=f"both {' or both '.join(PTX_TYPES)}",
            remedy="convert them with .to()",
        )
    if out not in STORED:
        raise WrongDtype(
            "an output that the kernels do not store", value=out, limit=" | ".join(STORED), remedy="choose one"
        )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
