"""Workloads as TensorIR functions, without any schedule.

Every contraction accumulates in float32 (float64 for float64 inputs) and rounds once, at the end,
to its output dtype; elementwise workloads compute in that dtype too. Block names say what a block computes
("matmul", "conv2d"), so that a schedule can find it: ``sch.get_sblock("matmul")``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import ir, te, tirx

from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = ("nn", "nt")
MAX_ELEMENTS = 2**31
ROWS = "m"  # the variable that is the number of rows where it is known at run time only


def accumulator_dtype(dtype: str) -> str:
    """Return the dtype in which products of ``dtype`` are summed: float32, or float64 for float64."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class Matmul:
    """``C[m, n] = A[m, k] · B[k, n]`` (layout "nn") or ``A[m, k] · B[n, k]ᵀ`` (layout "nt").

    Sizes are numbers of elements, each at least 1; every one of m·n, m·k, n·k stays below 2³¹, because
    the kernels index with 32 bits. ``out_dtype`` is ``dtype`` where none is given.

    Raises
    ------
    IllegalWorkload : on construction, naming the value, the limit and the remedy.
    """

    m: int
    n: int
    k: int
    dtype: str = "float32"
    layout: str = "nn"
    out_dtype: str = ""

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", self.dtype)
        for role in ("m", "n", "k"):
            _check_size(role, getattr(self, role))
        for dtype in (self.dtype, self.out_dtype):
            _check_dtype(dtype)
        if self.layout not in LAYOUTS:
            raise IllegalWorkload(
                "unknown layout", value=repr(self.layout), limit=" | ".join(LAYOUTS), remedy="choose one of these"
            )
        for rows, cols in (("m", "n"), ("m", "k"), ("n", "k")):
            _check_elements(f"{rows}·{cols}", getattr(self, rows), getattr(self, cols))

    @property
    def flops(self) -> int:
        """Floating-point operations: 2·m·n·k."""
        return 2 * self.m * self.n * self.k

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the operands."""
        return dtype_bytes(self.dtype)

    @property
    def shape(self) -> str:
        """The sizes as text, ``MxNxK``."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def b_shape(self) -> tuple[int, int]:
        """Shape of B as stored: (k, n), or (n, k) when transposed."""
        return (self.k, self.n) if self.layout == "nn" else (self.n, self.k)

    def prim_func(self, any_m: bool = False) -> tirx.PrimFunc:
        """Return the unscheduled TensorIR function ``(A, B, C)``; its contraction is the block "matmul".

        With ``any_m`` it takes A and C of any number of rows, which its calls bring; m·n and m·k have to stay below
        2³¹ then, too.
        """
        a, b, sums = _sums(self, tirx.Var(ROWS, "int32") if any_m else None)
        return te.create_prim_func([a, b, _rounded(sums, self.out_dtype)])

    def check_padded(self, block: tuple[int, int, int]) -> None:
        """Raise IllegalWorkload where rounding m, n and k up to whole ``block`` tiles leads past 2³¹ elements.

        Indices are computed before they are compared with the sizes, so that what is padded has to fit as well.
        """
        m, n, k = (-(-size // extent) * extent for size, extent in zip((self.m, self.n, self.k), block))
        tile = "x".join(map(str, block))
        for what, elements in (("m·n", m * n), ("m·k", m * k), ("n·k", n * k)):
            if elements >= MAX_ELEMENTS:
                raise IllegalWorkload(
                    f"{what} of {self.shape}, padded to whole tiles of {tile}, is beyond 32-bit indexing",
                    value=elements,
                    limit=f"below {MAX_ELEMENTS}",
                    remedy="take smaller tiles, or split the product along one of its extents",
                )

    def transposed(self) -> Matmul:
        """Return this product with B stored in the other layout."""
        return replace(self, layout="nt" if self.layout == "nn" else "nn")


def matmul_bias_relu(problem: Matmul) -> tirx.PrimFunc:
    """Make ``C = max(A·B + bias[n], 0)`` as ``(A, B, bias, C)``: the block "matmul" with a two-block epilogue.

    ``bias`` has C's dtype; sums are rounded to it after the epilogue.
    """
    a, b, sums = _sums(problem)
    bias = te.placeholder((problem.n,), problem.out_dtype, name="bias")
    biased = te.compute(sums.shape, lambda i, j: sums[i, j] + bias[j].astype(sums.dtype), name="add_bias")
    relu = te.compute(sums.shape, lambda i, j: te.max(biased[i, j], tirx.const(0, sums.dtype)), name="relu")
    return te.create_prim_func([a, b, bias, _rounded(relu, problem.out_dtype)])


def gemm(problem: Matmul, alpha: float = 1.0, beta: float = 0.0) -> tirx.PrimFunc:
    """Make ``D = alpha·A·B + beta·C``: ``(A, B, C, D)``, or ``(A, B, D)`` with beta 0; blocks "matmul" and "scale".

    C and D have ``problem.out_dtype``; sums are scaled before they are rounded to it. Both factors are constants in the
    code. D may not be C.

    Raises
    ------
    IllegalWorkload : for factors that are no finite numbers, and for an alpha of 0.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            what = f"{name} is a constant in the code"
            raise IllegalWorkload(what, value=value, limit="finite", remedy="give a finite number")
    if alpha == 0:
        raise IllegalWorkload("there is no product to multiply with", value=0, remedy="give another alpha")
    a, b, sums = _sums(problem)
    c = te.placeholder(sums.shape, problem.out_dtype, name="C")
    factor, other = (tirx.const(float(value), sums.dtype) for value in (alpha, beta))

    def element(i: tirx.Var, j: tirx.Var) -> ir.Expr:
        scaled = factor * sums[i, j]
        return scaled + other * c[i, j].astype(sums.dtype) if beta else scaled

    scaled = te.compute(sums.shape, element, name="scale")
    return te.create_prim_func([a, b, *([c] if beta else []), _rounded(scaled, problem.out_dtype)])


def batched_matmul(batch: int, problem: Matmul) -> tirx.PrimFunc:
    """Make ``C[b] = A[b] · B[b]`` for ``batch`` products of one shape, as ``(A, B, C)``; block "matmul"."""
    _check_size("batch", batch)
    for role, rows, columns in (("m·n", "m", "n"), ("m·k", "m", "k"), ("n·k", "n", "k")):
        _check_elements(f"batch·{role}", batch, getattr(problem, rows), getattr(problem, columns))
    a = te.placeholder((batch, problem.m, problem.k), problem.dtype, name="A")
    b = te.placeholder((batch, *problem.b_shape), problem.dtype, name="B")
    k = te.reduce_axis((0, problem.k), name="k")
    wide = accumulator_dtype(problem.dtype)

    def element(p: tirx.Var, i: tirx.Var, j: tirx.Var) -> ir.Expr:
        other = b[p, k, j] if problem.layout == "nn" else b[p, j, k]
        return te.sum(a[p, i, k].astype(wide) * other.astype(wide), axis=k)

    product = te.compute((batch, problem.m, problem.n), element, name="matmul")
    return te.create_prim_func([a, b, _rounded(product, problem.out_dtype)])


def scale_shift(shape: Sequence[int], scale: float = 1.5, shift: float = 0.25, dtype: str = "float32") -> tirx.PrimFunc:
    """Make ``y = scale·x + shift``, any rank, constants in the code, as ``(x, y)``; block "scale_shift"."""
    x, wide = _elements(shape, dtype), accumulator_dtype(dtype)
    a, b = tirx.const(scale, wide), tirx.const(shift, wide)
    y = te.compute(x.shape, lambda *i: (a * x(*i).astype(wide) + b).astype(dtype), name="scale_shift")
    return te.create_prim_func([x, y])


def gelu(shape: Sequence[int], dtype: str = "float32") -> tirx.PrimFunc:
    """Make ``y = x/2 · (1 + erf(x/√2))``, the exact (erf) form, element by element, as ``(x, y)``; block "gelu"."""
    x, wide = _elements(shape, dtype), accumulator_dtype(dtype)
    half, one, root = (tirx.const(value, wide) for value in (0.5, 1.0, math.sqrt(0.5)))

    def element(*index: tirx.Var) -> ir.Expr:
        value = x(*index).astype(wide)
        return (half * value * (one + te.erf(value * root))).astype(dtype)

    return te.create_prim_func([x, te.compute(x.shape, element, name="gelu")])


def row_sum(rows: int, columns: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Make ``y[i] = sum over j of x[i, j]`` as ``(x, y)``; block "row_sum". The sums are of ``dtype``, rounded once."""
    x, wide = _elements((rows, columns), dtype), accumulator_dtype(dtype)
    j = te.reduce_axis((0, columns), name="j")
    sums = te.compute((rows,), lambda i: te.sum(x[i, j].astype(wide), axis=j), name="row_sum")
    return te.create_prim_func([x, _rounded(sums, dtype)])


def softmax(rows: int, columns: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Make ``y[i, j] = exp(x[i, j] − m[i]) / sum over j of exp(x[i, j] − m[i])``, m the row's maximum, as ``(x, y)``.

    Subtracting the maximum keeps every exponential at most 1, so that none overflows. Blocks "row_max",
    "exp_sum" and "softmax", in this order, each of which reads x.
    """
    x, wide = _elements((rows, columns), dtype), accumulator_dtype(dtype)
    j, k = (te.reduce_axis((0, columns), name=name) for name in ("j", "k"))
    largest = te.compute((rows,), lambda i: te.max(x[i, j].astype(wide), axis=j), name="row_max")

    def power(i: tirx.Var, column: tirx.Var) -> ir.Expr:
        return te.exp(x[i, column].astype(wide) - largest[i])

    total = te.compute((rows,), lambda i: te.sum(power(i, k), axis=k), name="exp_sum")
    y = te.compute((rows, columns), lambda i, c: (power(i, c) / total[i]).astype(dtype), name="softmax")
    return te.create_prim_func([x, y])


def depthwise_conv2d_nhwc(
    batch: int,
    height: int,
    width: int,
    channels: int,
    kernel: int = 3,
    stride: int = 1,
    padding: int = 1,
    dtype: str = "float32",
) -> tirx.PrimFunc:
    """Make a convolution by channel, data NHWC, weights HWC, as ``(data, weight, out)``; block "depthwise".

    Sizes and padding as in :func:`conv2d_nhwc`.
    """
    sizes = {"batch": batch, "height": height, "width": width, "channels": channels, "kernel": kernel, "stride": stride}
    out_height, out_width = _convolved(sizes, padding, dtype)
    data, source = _padded(batch, height, width, channels, padding, dtype)
    _check_elements("output", batch, out_height, out_width, channels)
    weight = te.placeholder((kernel, kernel, channels), dtype, name="weight")
    ry, rx = (te.reduce_axis((0, kernel), name=name) for name in ("ry", "rx"))
    wide = accumulator_dtype(dtype)
    out = te.compute(
        (batch, out_height, out_width, channels),
        lambda p, y, x, c: te.sum(
            source[p, y * stride + ry, x * stride + rx, c].astype(wide) * weight[ry, rx, c].astype(wide), axis=[ry, rx]
        ),
        name="depthwise",
    )
    return te.create_prim_func([data, weight, _rounded(out, dtype)])


def conv2d_nhwc(
    batch: int,
    height: int,
    width: int,
    channels_in: int,
    channels_out: int,
    kernel: int = 3,
    stride: int = 1,
    padding: int = 1,
    dtype: str = "float32",
) -> tirx.PrimFunc:
    """Make a 2-D convolution, data NHWC, weights HWIO, as ``(data, weight, out)``; block "conv2d".

    ``padding`` zeros are added on each side, so that the output has
    ``(height + 2·padding − kernel) // stride + 1`` rows, and columns likewise.
    """
    sizes = {"batch": batch, "height": height, "width": width, "channels in": channels_in}
    sizes |= {"channels out": channels_out, "kernel": kernel, "stride": stride}
    out_height, out_width = _convolved(sizes, padding, dtype)
    data, source = _padded(batch, height, width, channels_in, padding, dtype)
    _check_elements("output", batch, out_height, out_width, channels_out)
    weight = te.placeholder((kernel, kernel, channels_in, channels_out), dtype, name="weight")
    ry, rx = (te.reduce_axis((0, kernel), name=name) for name in ("ry", "rx"))
    rc = te.reduce_axis((0, channels_in), name="rc")
    wide = accumulator_dtype(dtype)
    out = te.compute(
        (batch, out_height, out_width, channels_out),
        lambda p, y, x, o: te.sum(
            source[p, y * stride + ry, x * stride + rx, rc].astype(wide) * weight[ry, rx, rc, o].astype(wide),
            axis=[ry, rx, rc],
        ),
        name="conv2d",
    )
    return te.create_prim_func([data, weight, _rounded(out, dtype)])


def _convolved(sizes: dict[str, int], padding: int, dtype: str) -> tuple[int, int]:
    """Return height and width of a convolution's output, once its sizes (by role), padding and dtype are checked."""
    for role, size in sizes.items():
        _check_size(role, size)
    _check_size("padding + 1", padding + 1)
    _check_dtype(dtype)
    window, stride = sizes["kernel"], sizes["stride"]
    out_height, out_width = ((sizes[side] + 2 * padding - window) // stride + 1 for side in ("height", "width"))
    _check_size("output height", out_height)
    _check_size("output width", out_width)
    return out_height, out_width


def _padded(
    batch: int, height: int, width: int, channels: int, padding: int, dtype: str
) -> tuple[te.Tensor, te.Tensor]:
    """Return the placeholder "data", and what it is with ``padding`` zeros around height and width."""
    shape = (batch, height + 2 * padding, width + 2 * padding, channels)
    _check_elements("data", *shape)
    data = te.placeholder((batch, height, width, channels), dtype, name="data")

    def element(p: tirx.Var, y: tirx.Var, x: tirx.Var, c: tirx.Var) -> ir.Expr:
        inside = tirx.all(y >= padding, y < height + padding, x >= padding, x < width + padding)
        return tirx.if_then_else(inside, data[p, y - padding, x - padding, c], tirx.const(0, dtype))

    return data, te.compute(shape, element, name="padded") if padding else data


def _elements(shape: Sequence[int], dtype: str) -> te.Tensor:
    """Return the input "x" of a workload that reads one tensor, once its extents and dtype are checked."""
    if not shape:
        raise IllegalWorkload("a tensor without extents", value="()", limit="at least one", remedy="give its shape")
    for position, size in enumerate(shape):
        _check_size(f"of extent {position}", size)
    _check_dtype(dtype)
    _check_elements("·".join(map(str, shape)), *shape)
    return te.placeholder(tuple(shape), dtype, name="x")


def _sums(problem: Matmul, rows: tirx.Var | None = None) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Return A, B and sums not yet rounded; ``rows`` in the place of m where it is known at run time only."""
    m = problem.m if rows is None else rows
    a = te.placeholder((m, problem.k), problem.dtype, name="A")
    b = te.placeholder(problem.b_shape, problem.dtype, name="B")
    k = te.reduce_axis((0, problem.k), name="k")
    wide = accumulator_dtype(problem.dtype)

    def element(i: tirx.Var, j: tirx.Var) -> ir.Expr:
        other = b[k, j] if problem.layout == "nn" else b[j, k]
        return te.sum(a[i, k].astype(wide) * other.astype(wide), axis=k)

    return a, b, te.compute((m, problem.n), element, name="matmul")


def _rounded(tensor: te.Tensor, dtype: str) -> te.Tensor:
    if tensor.dtype == dtype:
        return tensor
    return te.compute(tensor.shape, lambda *index: tensor(*index).astype(dtype), name="round")


def _check_elements(what: str, *extents: int) -> None:
    elements = math.prod(extents)
    if elements >= MAX_ELEMENTS:
        raise IllegalWorkload(
            f"a tensor of {what} elements is beyond 32-bit indexing",
            value=elements,
            limit=f"below {MAX_ELEMENTS}",
            remedy="split the product along one of its extents",
        )


def _check_size(role: str, size: object) -> None:
    if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 1:
        raise IllegalWorkload(
            f"illegal size {role}", value=repr(size), limit="at least 1", remedy="give a whole number"
        )


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise IllegalWorkload(
            "unknown dtype", value=repr(dtype), limit=" | ".join(DTYPES), remedy="choose one of these"
        )
