"""Functions as frameworks hand them to a rule: a table of TIR, small, without any schedule of ours.

Each is made anew by TE, topi, TVMScript or Relax's legalisation. ``FUNCTIONS`` has those around one sum of products,
which the normal form takes; ``OTHERS`` those that it must leave, with a word that the reason has to contain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te, tirx, topi
from tvm.relax.frontend import nn
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.kernels.codegen.arithmetic import evaluate
from tensorir_ladder.relax.rules.ranges import symbolic_extents


@dataclass(frozen=True)
class Function:
    """A function with its symbolic extents' values to try; ``left`` is in the reason why no product is made of it."""

    make: Callable[[], tirx.PrimFunc]
    sizes: tuple[Mapping[str, int], ...] = ({},)
    left: str = ""


FUNCTIONS: dict[str, Function] = {}
OTHERS: dict[str, Function] = {}


def function(*sizes: Mapping[str, int], left: str = "") -> Callable[[Callable[[], tirx.PrimFunc]], Callable]:
    """Enter what a function makes into the table, under its name."""

    def enter(make: Callable[[], tirx.PrimFunc]) -> Callable[[], tirx.PrimFunc]:
        (OTHERS if left else FUNCTIONS)[make.__name__] = Function(make, sizes or ({},), left)
        return make

    return enter


def operands_of(func: tirx.PrimFunc, sizes: Mapping[str, int], seed: int = 0) -> list[np.ndarray]:
    """Draw whole numbers from -2 to 2 for each parameter, so that sums are exact in float16; any bits for packed ones.

    Symbolic extents have the values that ``sizes`` gives by name. The result is drawn too: what is run must not
    depend on what it holds.
    """
    random, found = np.random.default_rng(seed), []
    values = {var: sizes[var.name] for var in symbolic_extents(func)}
    for parameter in func.params:
        shape = [int(evaluate(extent, values)) for extent in parameter.shape]
        dtype = str(parameter.dtype)
        if dtype in ("uint8", "uint32", "int32"):
            drawn = random.integers(0, 3 if dtype == "int32" else np.iinfo(dtype).max, shape)
        else:
            drawn = random.integers(-2, 3, shape)
        found.append(drawn.astype(numpy_dtype(dtype)))
    return found


def run_on_llvm(
    func: tirx.PrimFunc, *calls: list[np.ndarray], compiled: Callable = tvm.compile
) -> list[list[np.ndarray]]:
    """Run a function on copies of the operands of each call, and return them all, changed where it writes."""
    run, found = compiled(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))["main"], []
    for operands in calls:
        copies = [tvm.runtime.tensor(operand) for operand in operands]
        run(*copies)
        found.append([copy.numpy() for copy in copies])
    return found


def from_relax(module: nn.Module, shape: tuple[int | str, ...], dtype: str = "float16") -> tirx.PrimFunc:
    """Legalise and fuse a module's ``forward(x)``, and return the function with a reduction."""
    exported, _ = module.export_tvm({"forward": {"x": nn.spec.Tensor(list(shape), dtype)}})
    passes = [
        relax.transform.FuseTransposeMatmul(),
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
    exported = tvm.transform.Sequential(passes)(exported)
    (found,) = [f for f in exported.functions.values() if isinstance(f, tirx.PrimFunc) and "T.init" in f.script()]
    return found


def _product(
    m: object, n: object, k: object, dtype: str = "float32", summed: str | None = None, nt: bool = False
) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Return A, B and their product, with sums in ``summed``."""
    summed = summed or dtype
    a = te.placeholder((m, k), dtype, name="A")
    b = te.placeholder((n, k) if nt else (k, n), dtype, name="B")
    axis = te.reduce_axis((0, k), name="k")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        return te.sum(a[i, axis].astype(summed) * (b[j, axis] if nt else b[axis, j]).astype(summed), axis=axis)

    return a, b, te.compute((m, n), element, name="matmul")


def _elementwise(source: te.Tensor, element: Callable[[tirx.Expr, tuple[tirx.Var, ...]], tirx.Expr]) -> te.Tensor:
    return te.compute(source.shape, lambda *at: element(source(*at), at), name="after")


@function()
def matmul_f32() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(33, 20, 36)))


@function()
def matmul_f16() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(48, 40, 64, "float16")))


@function()
def matmul_bf16() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(16, 24, 32, "bfloat16")))


@function()
def matmul_i8() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(33, 20, 36, "int8", "int32", nt=True)))


@function({"m": 1}, {"m": 37})
def rows_any_i64() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(tirx.Var("m", "int64"), 24, 32, "float16", nt=True)))


@function({"n": 3}, {"n": 40})
def columns_any() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(17, tirx.Var("n", "int64"), 32, "float16")))


@function({"k": 1}, {"k": 50})
def reduction_any() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(17, 24, tirx.Var("k", "int64"), "float32")))


@function({"m": 5, "n": 9, "k": 13})
def all_any() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(*(tirx.Var(name, "int64") for name in "mnk"), "float16", "float32")))


class _Linear(nn.Module):
    def __init__(self, out: int = 24, bias: bool = True, after: Callable = lambda x: x) -> None:
        self.linear, self.after = nn.Linear(32, out, bias=bias, dtype="float16"), after

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.after(self.linear(x))


@function()
def linear_silu() -> tirx.PrimFunc:
    return from_relax(_Linear(after=nn.op.silu), (19, 32))


@function({"seq": 1}, {"seq": 21})
def linear_silu_any() -> tirx.PrimFunc:
    return from_relax(_Linear(after=nn.op.silu), (1, "seq", 32))


@function({"batch": 3, "seq": 7})
def linear_gelu_any_any() -> tirx.PrimFunc:
    return from_relax(_Linear(after=nn.op.gelu), ("batch", "seq", 32))


@function()
def linear_gelu_tanh() -> tirx.PrimFunc:
    return from_relax(_Linear(after=lambda x: nn.op.gelu(x, approximate="tanh")), (19, 32))


@function()
def linear_one_row() -> tirx.PrimFunc:
    return from_relax(_Linear(bias=False), (1, 1, 32))


@function({"seq": 5})
def linear_to_heads() -> tirx.PrimFunc:
    def heads(x: nn.Tensor) -> nn.Tensor:
        return nn.op.permute_dims(nn.op.reshape(x, (1, x.shape[1], 3, 8)), (0, 2, 1, 3))

    return from_relax(_Linear(after=heads), (1, "seq", 32))


@function({"seq": 5})
def linear_reshaped() -> tirx.PrimFunc:
    return from_relax(_Linear(after=lambda x: nn.op.reshape(x, (x.shape[1], 3, 8))), (1, "seq", 32))


@function()
def linear_cast() -> tirx.PrimFunc:
    return from_relax(_Linear(after=lambda x: nn.op.astype(x, "float32")), (2, 9, 32))


@function()
def linear_residual() -> tirx.PrimFunc:
    return from_relax(_Linear(32, after=lambda x: x + x * 0.5), (2, 9, 32))


@function()
def written_b_a() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 36), "float16", name="A"), te.placeholder((36, 28), "float16", name="B")
    k = te.reduce_axis((0, 36), name="k")
    return te.create_prim_func([a, b, te.compute((20, 28), lambda i, j: te.sum(b[k, j] * a[i, k], axis=k), name="C")])


@function()
def transposed_a() -> tirx.PrimFunc:
    a, b = te.placeholder((36, 20), "float16", name="A"), te.placeholder((36, 28), "float16", name="B")
    k = te.reduce_axis((0, 36), name="k")
    return te.create_prim_func([a, b, te.compute((20, 28), lambda i, j: te.sum(a[k, i] * b[k, j], axis=k), name="C")])


@function()
def transposed_result() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 36), "float16", name="A"), te.placeholder((36, 28), "float16", name="B")
    k = te.reduce_axis((0, 36), name="k")
    return te.create_prim_func([a, b, te.compute((28, 20), lambda j, i: te.sum(a[i, k] * b[k, j], axis=k), name="C")])


@function()
def transposed_after() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "float16")
    return te.create_prim_func([a, b, te.compute((28, 20), lambda j, i: c[i, j] * c[i, j], name="after")])


@function()
def heads_projected() -> tirx.PrimFunc:
    """A reduction over two dimensions, written in another order than they are stored in."""
    x, w = te.placeholder((20, 3, 8), "float16", name="x"), te.placeholder((28, 3, 8), "float16", name="w")
    d, h = te.reduce_axis((0, 8), name="d"), te.reduce_axis((0, 3), name="h")
    element = lambda i, j: te.sum(x[i, h, d] * w[j, h, d], axis=[d, h])  # noqa: E731
    return te.create_prim_func([x, w, te.compute((20, 28), element, name="C")])


@function()
def columns_from_one_on() -> tirx.PrimFunc:
    """An operand that is a part of a buffer, whose rows do not begin aligned."""
    a, b = te.placeholder((20, 40), "float16", name="A"), te.placeholder((32, 24), "float16", name="B")
    k = te.reduce_axis((0, 32), name="k")
    part = topi.strided_slice(a, [0, 1], [20, 33])
    return te.create_prim_func(
        [a, b, te.compute((20, 24), lambda i, j: te.sum(part[i, k] * b[k, j], axis=k), name="C")]
    )


@function()
def sums_up_to() -> tirx.PrimFunc:
    """Sums of the rows up to each, as a product with a triangle of ones that nothing is read for."""
    b, k = te.placeholder((20, 28), "float16", name="B"), te.reduce_axis((0, 20), name="k")
    ones = te.compute((20, 20), lambda i, k: tirx.Select(k <= i, tirx.const(1, "float16"), tirx.const(0, "float16")))
    return te.create_prim_func([b, te.compute((20, 28), lambda i, j: te.sum(ones[i, k] * b[k, j], axis=k), name="C")])


@function()
def named_epilogue() -> tirx.PrimFunc:
    a, k = te.placeholder((20, 36), "float16", name="A"), te.reduce_axis((0, 36), name="k")
    positive = topi.nn.relu(a)
    product = te.compute((20, 20), lambda i, j: te.sum(positive[i, k] * positive[j, k], axis=k), name="epilogue")
    return te.create_prim_func([a, topi.nn.relu(product)])


@function()
def times_its_transposed() -> tirx.PrimFunc:
    """A·Aᵀ: both operands are one buffer."""
    a, k = te.placeholder((20, 36), "float16", name="A"), te.reduce_axis((0, 36), name="k")
    return te.create_prim_func([a, te.compute((20, 20), lambda i, j: te.sum(a[i, k] * a[j, k], axis=k), name="C")])


@function()
def halved_inside() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 36), "float16", name="A"), te.placeholder((36, 28), "float16", name="B")
    k, half = te.reduce_axis((0, 36), name="k"), tirx.const(0.5, "float16")
    c = te.compute((20, 28), lambda i, j: te.sum(a[i, k] * b[k, j] * half, axis=k), name="C")
    return te.create_prim_func([a, b, c])


@function()
def scaled_inside() -> tirx.PrimFunc:
    """Weights of 8 bits, scaled by column and by groups of the reduction, multiplied in another order than stored."""
    a, b = te.placeholder((20, 32), "float16", name="A"), te.placeholder((28, 32), "int8", name="B")
    scale = te.placeholder((28, 4), "float16", name="scale")
    k = te.reduce_axis((0, 32), name="k")
    element = lambda i, j: te.sum(a[i, k] * b[j, k].astype("float16") * scale[j, k // 8], axis=k)  # noqa: E731
    return te.create_prim_func([a, b, scale, te.compute((20, 28), element, name="C")])


@function()
def scaled_by_column() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 32), "float16", name="A"), te.placeholder((28, 32), "int8", name="B")
    scale = te.placeholder((28,), "float16", name="scale")
    k = te.reduce_axis((0, 32), name="k")
    element = lambda i, j: te.sum(scale[j] * (a[i, k] * b[j, k].astype("float16")), axis=k)  # noqa: E731
    return te.create_prim_func([a, b, scale, te.compute((20, 28), element, name="C")])


@function()
def product_in_f16_cast() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 32), "float16", name="A"), te.placeholder((28, 32), "float16", name="B")
    k = te.reduce_axis((0, 32), name="k")
    element = lambda i, j: te.sum((a[i, k] * b[j, k]).astype("float32"), axis=k)  # noqa: E731
    return te.create_prim_func([a, b, te.compute((20, 28), element, name="C")])


@function()
def zero_points() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 32), "int8", name="A"), te.placeholder((28, 32), "int8", name="B")
    k = te.reduce_axis((0, 32), name="k")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        return te.sum((a[i, k].astype("int32") - 1) * (b[j, k].astype("int32") - 2), axis=k)

    return te.create_prim_func([a, b, te.compute((20, 28), element, name="C")])


@function({"m": 1}, {"m": 10})
def dequantised_int4() -> tirx.PrimFunc:
    """Weights of 4 bits, eight to a word along the reduction, unpacked by a block of its own in front."""
    m = tirx.Var("m", "int64")
    a, packed = te.placeholder((m, 64), "float16", name="A"), te.placeholder((24, 8), "uint32", name="packed")
    scale = te.placeholder((24, 2), "float16", name="scale")

    def weight(j: tirx.Var, k: tirx.Var) -> tirx.Expr:
        nibble = (packed[j, k // 8] >> (k % 8 * 4).astype("uint32")) & tirx.const(15, "uint32")
        return (nibble.astype("float16") - tirx.const(7, "float16")) * scale[j, k // 32]

    weights = te.compute((24, 64), weight, name="dequantize")
    k = te.reduce_axis((0, 64), name="k")
    product = te.compute((m, 24), lambda i, j: te.sum(a[i, k] * weights[j, k], axis=k), name="matmul")
    return te.create_prim_func([a, packed, scale, product])


@function()
def residual_first() -> tirx.PrimFunc:
    """R + A·B, the residual read in its own layout."""
    a, b, c = _product(20, 28, 36, "float16")
    r = te.placeholder((20, 28), "float16", name="R")
    return te.create_prim_func([r, a, b, te.compute((20, 28), lambda i, j: r[i, j] + c[i, j], name="T_add")])


@function()
def bias_by_a_copy() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "float16")
    bias = te.placeholder((28,), "float16", name="bias")
    wide = topi.broadcast_to(bias, (20, 28))
    return te.create_prim_func([a, b, bias, topi.nn.relu(topi.add(c, wide))])


@function()
def sums_of_i8() -> tirx.PrimFunc:
    """Sums and epilogue of 8 bits, which wrap where they are stored."""
    a, b, c = _product(20, 28, 36, "int8")
    return te.create_prim_func([a, b, topi.add(c, c)])


@function()
def clipped_to_i8() -> tirx.PrimFunc:
    a, b, c = _product(33, 20, 36, "int8", "int32", nt=True)
    scaled = topi.cast(c, "float32") * 0.25
    return te.create_prim_func([a, b, topi.cast(topi.clip(topi.round(scaled), -128, 127), "int8")])


@function()
def relu_before() -> tirx.PrimFunc:
    """Computed in front of the product, and padded with what is not zero: operands, not sums, are read beyond."""
    a, b = te.placeholder((20, 36), "float32", name="A"), te.placeholder((36, 28), "float32", name="B")
    before = te.compute((20, 36), lambda i, j: te.exp(a[i, j]) + 1.0, name="before")
    return te.create_prim_func([a, b, topi.matmul(before, b)])


@function()
def batched() -> tirx.PrimFunc:
    a, b = te.placeholder((3, 20, 32), "float16", name="A"), te.placeholder((3, 28, 32), "float16", name="B")
    return te.create_prim_func([a, b, topi.nn.batch_matmul(a, b)])


@function({"b": 2, "m": 9})
def batched_any() -> tirx.PrimFunc:
    batch, m = tirx.Var("b", "int64"), tirx.Var("m", "int64")
    a, b = te.placeholder((batch, m, 32), "float16", name="A"), te.placeholder((batch, 32, 28), "float16", name="B")
    k = te.reduce_axis((0, 32), name="k")
    element = lambda p, i, j: te.sum(a[p, i, k] * b[p, k, j], axis=k)  # noqa: E731
    return te.create_prim_func([a, b, te.compute((batch, m, 28), element, name="C")])


@function()
def batch_of_one_operand() -> tirx.PrimFunc:
    a, b = te.placeholder((3, 20, 32), "float16", name="A"), te.placeholder((32, 28), "float16", name="B")
    k = te.reduce_axis((0, 32), name="k")
    element = lambda p, i, j: te.sum(a[p, i, k] * b[k, j], axis=k)  # noqa: E731
    return te.create_prim_func([a, b, te.compute((3, 20, 28), element, name="C")])


def _heads(query: object, keys: object) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Return queries of 4 heads, keys or values of 2, and the latter repeated for each head."""
    q = te.placeholder((1, query, 4, 16), "float16", name="Q")
    kv = te.placeholder((1, keys, 2, 16), "float16", name="KV")
    return q, kv, topi.repeat(kv, 2, 2)


@function({"s": 1}, {"s": 19})
def attention_scores() -> tirx.PrimFunc:
    s = tirx.Var("s", "int64")
    q, kv, repeated = _heads(s, s)
    d = te.reduce_axis((0, 16), name="d")
    element = lambda h, i, j: te.sum(q[0, i, h, d] * repeated[0, j, h, d], axis=d)  # noqa: E731
    scores = te.compute((4, s, s), element, name="scores")
    return te.create_prim_func([q, kv, te.compute((4, s, s), lambda h, i, j: scores[h, i, j] * 0.25, name="scaled")])


@function({"s": 1}, {"s": 19})
def attention_values() -> tirx.PrimFunc:
    s = tirx.Var("s", "int64")
    p = te.placeholder((4, s, s), "float16", name="P")
    _, kv, repeated = _heads(s, s)
    j = te.reduce_axis((0, s), name="j")
    element = lambda i, h, d: te.sum(p[h, i, j] * repeated[0, j, h, d], axis=j)  # noqa: E731
    return te.create_prim_func([p, kv, te.compute((s, 4, 16), element, name="O")])


@function({"s": 19})
def attention_one_query() -> tirx.PrimFunc:
    s = tirx.Var("s", "int64")
    q, kv, repeated = _heads(1, s)
    d = te.reduce_axis((0, 16), name="d")
    element = lambda h, i, j: te.sum(q[0, i, h, d] * repeated[0, j, h, d], axis=d)  # noqa: E731
    return te.create_prim_func([q, kv, te.compute((4, 1, s), element, name="scores")])


@function()
def matrix_times_vector() -> tirx.PrimFunc:
    a, x = te.placeholder((40, 32), "float16", name="A"), te.placeholder((32,), "float16", name="x")
    k = te.reduce_axis((0, 32), name="k")
    return te.create_prim_func([a, x, te.compute((40,), lambda i: te.sum(a[i, k] * x[k], axis=k), name="y")])


@function()
def outer_product() -> tirx.PrimFunc:
    return te.create_prim_func(list(_product(20, 28, 1, "float32")))


@function()
def gathered_rows() -> tirx.PrimFunc:
    a, b = te.placeholder((3, 32), "float16", name="A"), te.placeholder((28, 32), "float16", name="B")
    rows = te.placeholder((20,), "int32", name="rows")
    taken = te.compute((20, 32), lambda i, k: a[rows[i], k], name="taken")
    k = te.reduce_axis((0, 32), name="k")
    element = lambda i, j: te.sum(taken[i, k] * b[j, k], axis=k)  # noqa: E731
    return te.create_prim_func([a, rows, b, te.compute((20, 28), element, name="C")])


def _convolution(convolve: Callable, data: tuple[object, ...], weight: tuple[int, ...], **options: object) -> list:
    x, w = te.placeholder(data, "float16", name="data"), te.placeholder(weight, "float16", name="weight")
    return [x, w, convolve(x, w, **options)]


@function({"n": 2})
def conv2d_nhwc() -> tirx.PrimFunc:
    shape = (tirx.Var("n", "int64"), 9, 10, 8)
    return te.create_prim_func(_convolution(topi.nn.conv2d_nhwc, shape, (3, 3, 8, 12), stride=2, padding=1, dilation=1))


@function()
def conv2d_nhwc_dilated() -> tirx.PrimFunc:
    return te.create_prim_func(
        _convolution(topi.nn.conv2d_nhwc, (2, 9, 10, 8), (3, 3, 8, 12), stride=1, padding=2, dilation=2)
    )


@function({"n": 2})
def conv2d_nchw_bias_relu() -> tirx.PrimFunc:
    shape = (tirx.Var("n", "int64"), 8, 9, 10)
    x, w, y = _convolution(topi.nn.conv2d_nchw, shape, (12, 8, 3, 3), stride=1, padding=1, dilation=1)
    bias = te.placeholder((1, 12, 1, 1), "float16", name="bias")
    return te.create_prim_func([x, w, bias, topi.nn.relu(topi.add(y, bias))])


@function()
def conv2d_1x1_nchw() -> tirx.PrimFunc:
    return te.create_prim_func(
        _convolution(topi.nn.conv2d_nchw, (2, 8, 7, 7), (12, 8, 1, 1), stride=1, padding=0, dilation=1)
    )


@function()
def conv1d_ncw() -> tirx.PrimFunc:
    return te.create_prim_func(_convolution(topi.nn.conv1d_ncw, (2, 8, 19), (12, 8, 3), padding=1))


@function()
def conv1d_nwc() -> tirx.PrimFunc:
    return te.create_prim_func(_convolution(topi.nn.conv1d_nwc, (2, 19, 8), (3, 8, 12), strides=2, padding="SAME"))


@function()
def conv3d_ndhwc() -> tirx.PrimFunc:
    return te.create_prim_func(
        _convolution(topi.nn.conv3d_ndhwc, (1, 5, 6, 7, 4), (3, 3, 3, 4, 12), stride=1, padding=1, dilation=1, groups=1)
    )


@function()
def conv3d_ncdhw() -> tirx.PrimFunc:
    return te.create_prim_func(
        _convolution(topi.nn.conv3d_ncdhw, (1, 4, 5, 6, 7), (12, 4, 3, 3, 3), stride=1, padding=1, dilation=1, groups=1)
    )


@function()
def conv2d_transpose_nchw() -> tirx.PrimFunc:
    return te.create_prim_func(
        _convolution(
            topi.nn.conv2d_transpose_nchw,
            (1, 4, 5, 6),
            (4, 12, 3, 3),
            strides=(2, 2),
            padding=(1, 1),
            out_dtype="float16",
            output_padding=(0, 0),
        )
    )


def _grouped_convolution(channels: int, groups: int, batch: object = 2) -> tirx.PrimFunc:
    weight = (channels, 8 // groups, 3, 3)
    options = {"stride": 1, "padding": 1, "dilation": 1, "groups": groups}
    return te.create_prim_func(_convolution(topi.nn.group_conv2d_nchw, (batch, 8, 7, 9), weight, **options))


@function({"n": 2})
def conv2d_grouped() -> tirx.PrimFunc:
    return _grouped_convolution(16, 2, tirx.Var("n", "int64"))


@function()
def loops_split() -> tirx.PrimFunc:
    """A product whose loops someone has split and reordered, unevenly."""
    sch = Schedule(te.create_prim_func(list(_product(20, 28, 36, "float16"))))
    i, j, k = sch.get_loops(sch.get_sblock("matmul"))
    (i0, i1), (k0, k1) = sch.split(i, [None, 8]), sch.split(k, [9, None])
    sch.reorder(k0, i0, j, i1, k1)
    return sch.mod["main"]


@function()
def loops_fused() -> tirx.PrimFunc:
    sch = Schedule(te.create_prim_func(list(_product(20, 28, 36, "float16"))))
    i, j, _ = sch.get_loops(sch.get_sblock("matmul"))
    sch.parallel(sch.fuse(i, j))
    return sch.mod["main"]


@function(left="no loop and no block")
def cumulative_sum() -> tirx.PrimFunc:
    x = te.placeholder((4, 8), "float32", name="x")
    return te.create_prim_func([x, topi.cumsum(x, axis=1)])


@function(left="one reduction")
def elementwise() -> tirx.PrimFunc:
    x = te.placeholder((4, 8), "float32", name="x")
    return te.create_prim_func([x, topi.tanh(x)])


@function(left="one reduction")
def softmax_after() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "float16")
    return te.create_prim_func([a, b, topi.nn.softmax(c)])


@function(left="one reduction")
def gate_and_up() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "float16")
    up = te.placeholder((36, 28), "float16", name="up")
    return te.create_prim_func([a, b, up, topi.multiply(topi.sigmoid(c), topi.matmul(a, up))])


@function(left="products of two operands")
def row_sum() -> tirx.PrimFunc:
    x = te.placeholder((20, 28), "float32", name="x")
    return te.create_prim_func([x, topi.sum(x, axis=1)])


@function(left="products of two operands")
def sum_of_squares() -> tirx.PrimFunc:
    x = te.placeholder((20, 28), "float32", name="x")
    return te.create_prim_func([x, topi.sum(x * x, axis=1)])


@function(left="products of two operands")
def sum_of_sums() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 36), "float32", name="A"), te.placeholder((36, 28), "float32", name="B")
    k = te.reduce_axis((0, 36), name="k")
    return te.create_prim_func([a, b, te.compute((20, 28), lambda i, j: te.sum(a[i, k] + b[k, j], axis=k), name="C")])


@function(left="begin with 0")
def max_plus() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 36), "float32", name="A"), te.placeholder((36, 28), "float32", name="B")
    k = te.reduce_axis((0, 36), name="k")
    return te.create_prim_func([a, b, te.compute((20, 28), lambda i, j: te.max(a[i, k] + b[k, j], axis=k), name="C")])


@function(left="in groups")
def depthwise() -> tirx.PrimFunc:
    return te.create_prim_func(
        _convolution(topi.nn.depthwise_conv2d_nchw, (1, 8, 9, 10), (8, 1, 3, 3), stride=1, padding=1, dilation=1)
    )


@function(left="in groups")
def conv2d_of_narrow_groups() -> tirx.PrimFunc:
    return _grouped_convolution(8, 4)


@function(left="products of two operands")
def wrapping_products() -> tirx.PrimFunc:
    a, b = te.placeholder((20, 36), "int8", name="A"), te.placeholder((36, 28), "int8", name="B")
    k = te.reduce_axis((0, 36), name="k")
    element = lambda i, j: te.sum((a[i, k] * b[k, j]).astype("int32"), axis=k)  # noqa: E731
    return te.create_prim_func([a, b, te.compute((20, 28), element, name="C")])


@function(left="wrap inside")
def wrapping_epilogue() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "int8")
    return te.create_prim_func([a, b, topi.nn.relu(topi.add(c, c))])


@function(left="strides")
def rows_apart() -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def product(a: T.handle, b: T.Buffer((36, 28), "float32"), c: T.Buffer((20, 28), "float32")) -> None:
        stride = T.int32()
        matrix = T.match_buffer(a, (20, 36), "float32", strides=(stride, 1))
        for i, j, k in T.grid(20, 28, 36):
            with T.sblock("product"):
                v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    c[v_i, v_j] = T.float32(0)
                c[v_i, v_j] = c[v_i, v_j] + matrix[v_i, v_k] * b[v_k, v_j]

    return product


@function(left="exactly one element")
def part_of_the_result() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "float16")
    return te.create_prim_func([a, b, te.compute((10, 28), lambda i, j: c[i, j], name="part")])


@function(left="exactly one element")
def result_repeated() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "float16")
    return te.create_prim_func([a, b, te.compute((2, 20, 28), lambda p, i, j: c[i, j], name="repeated")])


@function(left="several sums")
def result_and_its_neighbour() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "float16")
    return te.create_prim_func([a, b, te.compute((20, 28), lambda i, j: c[i, j] + c[19 - i, j], name="mirrored")])


@function(left="one result")
def two_results() -> tirx.PrimFunc:
    a, b, c = _product(20, 28, 36, "float16")
    return te.create_prim_func([a, b, c, topi.nn.relu(c)])


@function(left="several blocks write one buffer")
def start_apart() -> tirx.PrimFunc:
    sch = Schedule(te.create_prim_func(list(_product(20, 28, 36, "float16"))))
    block = sch.get_sblock("matmul")
    sch.decompose_reduction(block, sch.get_loops(block)[-1])
    return sch.mod["main"]


@function(left="scheduled already")
def scheduled() -> tirx.PrimFunc:
    sch = Schedule(te.create_prim_func(list(_product(20, 28, 36, "float16"))))
    sch.bind(sch.get_loops(sch.get_sblock("matmul"))[0], "blockIdx.x")
    return sch.mod["main"]


@function(left="goes on from")
def without_a_start() -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def accumulate(
        a: T.Buffer((20, 36), "float32"), b: T.Buffer((36, 28), "float32"), c: T.Buffer((20, 28), "float32")
    ) -> None:
        for i, j, k in T.grid(20, 28, 36):
            with T.sblock("update"):
                v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
                c[v_i, v_j] = c[v_i, v_j] + a[v_i, v_k] * b[v_k, v_j]

    return accumulate


@function(left="reads what it changes")
def added_in_place() -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def add(
        a: T.Buffer((20, 36), "float32"), b: T.Buffer((36, 28), "float32"), c: T.Buffer((20, 28), "float32")
    ) -> None:
        product = T.sblock_alloc_buffer((20, 28), "float32")
        for i, j, k in T.grid(20, 28, 36):
            with T.sblock("product"):
                v_i, v_j, v_k = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    product[v_i, v_j] = T.float32(0)
                product[v_i, v_j] = product[v_i, v_j] + a[v_i, v_k] * b[v_k, v_j]
        for i, j in T.grid(20, 28):
            with T.sblock("add"):
                v_i, v_j = T.axis.remap("SS", [i, j])
                c[v_i, v_j] = c[v_i, v_j] + product[v_i, v_j]

    return add
