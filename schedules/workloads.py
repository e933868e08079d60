"""What is computed: workloads as TensorIR functions, without any schedule.

Every contraction accumulates in float32 (float64 for float64 inputs) and rounds once, at the end,
to its output dtype. Block names say what a block computes ("matmul", "conv2d"), so that a schedule
can find it: ``sch.get_sblock("matmul")``.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace

from tvm import te, tirx

from .errors import IllegalWorkload

DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = ("nn", "nt")
MAX_ELEMENTS = 2**31


def accumulator_dtype(dtype: str) -> str:
    """The dtype in which products of ``dtype`` are summed: float32, or float64 for float64."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class Matmul:
    """``C[m, n] = A[m, k] · B[k, n]`` (layout "nn") or ``A[m, k] · B[n, k]ᵀ`` (layout "nt").

    Sizes are numbers of elements, each at least 1; every one of m·n, m·k, n·k stays below 2³¹, because
    the kernels index with 32 bits. ``out_dtype`` defaults to ``dtype``.

    Raises
    ------
    IllegalWorkload : on construction, naming the value, the limit and the remedy.
    """

    m: int
    n: int
    k: int
    dtype: str = "float32"
    layout: str = "nn"
    out_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.out_dtype is None:
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
    def shape(self) -> str:
        """The sizes as text, ``MxNxK``."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def b_shape(self) -> tuple[int, int]:
        """Shape of B as stored: (k, n), or (n, k) when transposed."""
        return (self.k, self.n) if self.layout == "nn" else (self.n, self.k)

    def prim_func(self) -> tirx.PrimFunc:
        """The unscheduled TensorIR function ``(A, B, C)``; its contraction is the block "matmul"."""
        return te.create_prim_func(list(_matmul_tensors(self)))

    def transposed(self) -> Matmul:
        """The same product with B stored in the other layout."""
        return replace(self, layout="nt" if self.layout == "nn" else "nn")


def matmul_bias_relu(problem: Matmul) -> tirx.PrimFunc:
    """``C = max(A·B + bias[n], 0)`` as ``(A, B, bias, C)``: the block "matmul" with a two-block epilogue."""
    a, b, product = _matmul_tensors(problem)
    bias = te.placeholder((problem.n,), problem.out_dtype, name="bias")
    shape = (problem.m, problem.n)
    biased = te.compute(shape, lambda i, j: product[i, j] + bias[j], name="add_bias")
    zero = tirx.const(0, problem.out_dtype)
    return te.create_prim_func([a, b, bias, te.compute(shape, lambda i, j: te.max(biased[i, j], zero), name="relu")])


def batched_matmul(batch: int, problem: Matmul) -> tirx.PrimFunc:
    """``C[b] = A[b] · B[b]`` for ``batch`` products of one shape, as ``(A, B, C)``; block "matmul"."""
    _check_size("batch", batch)
    for role, rows, columns in (("m·n", "m", "n"), ("m·k", "m", "k"), ("n·k", "n", "k")):
        _check_elements(f"batch·{role}", batch, getattr(problem, rows), getattr(problem, columns))
    a = te.placeholder((batch, problem.m, problem.k), problem.dtype, name="A")
    b = te.placeholder((batch, *problem.b_shape), problem.dtype, name="B")
    k = te.reduce_axis((0, problem.k), name="k")
    wide = accumulator_dtype(problem.dtype)

    def element(p, i, j):
        other = b[p, k, j] if problem.layout == "nn" else b[p, j, k]
        return te.sum(a[p, i, k].astype(wide) * other.astype(wide), axis=k)

    product = te.compute((batch, problem.m, problem.n), element, name="matmul")
    return te.create_prim_func([a, b, _rounded(product, problem.out_dtype)])


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
    """A 2-D convolution, data NHWC, weights HWIO, as ``(data, weight, out)``; block "conv2d".

    ``padding`` zeros are added on each side, so that the output has
    ``(height + 2·padding − kernel) // stride + 1`` rows, and columns likewise.
    """
    sizes = {"batch": batch, "height": height, "width": width, "channels in": channels_in}
    sizes |= {"channels out": channels_out, "kernel": kernel, "stride": stride}
    for role, size in sizes.items():
        _check_size(role, size)
    _check_size("padding + 1", padding + 1)
    _check_dtype(dtype)
    out_height, out_width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    _check_size("output height", out_height)
    _check_size("output width", out_width)
    _check_elements("data", batch, height + 2 * padding, width + 2 * padding, channels_in)
    _check_elements("output", batch, out_height, out_width, channels_out)
    data = te.placeholder((batch, height, width, channels_in), dtype, name="data")
    weight = te.placeholder((kernel, kernel, channels_in, channels_out), dtype, name="weight")

    def padded_element(p, y, x, c):
        inside = tirx.all(y >= padding, y < height + padding, x >= padding, x < width + padding)
        return tirx.if_then_else(inside, data[p, y - padding, x - padding, c], tirx.const(0, dtype))

    padded_shape = (batch, height + 2 * padding, width + 2 * padding, channels_in)
    source = te.compute(padded_shape, padded_element, name="padded") if padding else data
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


def _matmul_tensors(problem: Matmul) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    a = te.placeholder((problem.m, problem.k), problem.dtype, name="A")
    b = te.placeholder(problem.b_shape, problem.dtype, name="B")
    k = te.reduce_axis((0, problem.k), name="k")
    wide = accumulator_dtype(problem.dtype)

    def element(i, j):
        other = b[k, j] if problem.layout == "nn" else b[j, k]
        return te.sum(a[i, k].astype(wide) * other.astype(wide), axis=k)

    product = te.compute((problem.m, problem.n), element, name="matmul")
    return a, b, _rounded(product, problem.out_dtype)


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
