"""Functions of the shapes that TVM's own tests of dlight have, written anew and small: what its users schedule today.

Attention and projections of a token, weights of 4 and 3 bits in each layout, norms, softmax, reductions inside and
outside, gathers of pages and experts, transposes, convolutions of patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from tvm import te, tirx, topi
from tvm.script import tirx as T


@dataclass(frozen=True)
class Function:
    """A function, values of its symbolic extents, and operands that cannot be drawn."""

    make: Callable[[], tirx.PrimFunc]
    sizes: Mapping[str, int] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


FUNCTIONS: dict[str, Function] = {}


def function(arrays: Mapping[str, np.ndarray] | None = None, **sizes: int) -> Callable:
    """Enter what a function makes into the table, under its name."""

    def enter(make: Callable[[], tirx.PrimFunc]) -> Callable[[], tirx.PrimFunc]:
        FUNCTIONS[make.__name__] = Function(make, sizes, arrays or {})
        return make

    return enter


def operand(shape: tuple, dtype: str, name: str) -> te.Tensor:
    """Make a parameter."""
    return te.placeholder(shape, dtype, name)


def total(shape: tuple, length: object, element: Callable, name: str = "total") -> te.Tensor:
    """Make a sum of ``element(*indices, k)`` over k below ``length``."""
    k = te.reduce_axis((0, length), "k")
    return te.compute(shape, lambda *i: te.sum(element(*i, k), [k]), name)


def wide(x: te.Tensor) -> te.Tensor:
    """Make float32 of a tensor."""
    return topi.cast(x, "float32")


N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


@function()
def patches_by_conv3d() -> tirx.PrimFunc:
    x, w = operand((9, 3, 2, 6, 6), "float16", "x"), operand((40, 3, 2, 6, 6), "float16", "w")
    return te.create_prim_func([x, w, topi.nn.conv3d_ncdhw(x, w, 1, 0, 1, 1)])


@function()
def heads_to_a_row() -> tirx.PrimFunc:
    x = operand((1, 8, 3, 16), "float16", "x")
    return te.create_prim_func([x, topi.reshape(topi.transpose(x, (0, 2, 1, 3)), (1, 3, 128))])


@function()
def one_row_sum() -> tirx.PrimFunc:
    x = operand((1, 6144), "float32", "x")
    return te.create_prim_func([x, topi.sum(x, 1)])


@function(
    {"indptr": np.array([0, 2, 5]), "places": np.array([3, 1, 4, 0, 2])},
    pages=5,
    length=40,
)
def gathered_pages() -> tirx.PrimFunc:
    pages, length = tirx.Var("pages", "int32"), tirx.Var("length", "int32")
    kept, indptr = operand((pages, 2, 3, 16), "float16", "kept"), operand((3,), "int32", "indptr")
    places = operand((5,), "int32", "places")
    out = te.compute(
        (2, 3, length), lambda layer, head, i: kept[places[indptr[1] + i // 16], layer, head, i % 16], "values"
    )
    return te.create_prim_func([kept, indptr, places, out])


@function(n=37)
def scores_of_one_query() -> tirx.PrimFunc:
    q, k = operand((1, 8, 1, 64), "float16", "q"), operand((1, 8, N, 64), "float16", "k")
    mask = operand((1, 1, 1, N), "float16", "mask")
    scores = total((1, 8, 1, N), 64, lambda b, h, i, j, c: q[b, h, i, c] * k[b, h, j, c], "scores")
    scaled = te.compute(scores.shape, lambda *i: scores(*i) * tirx.const(0.125, "float16"), "scaled")
    least = tirx.const(-65504, "float16")
    masked = te.compute(
        scores.shape,
        lambda b, h, i, j: te.min(te.max(scaled[b, h, i, j], least), mask[b, 0, i, j]).astype("float32"),
        "masked",
    )
    return te.create_prim_func([q, k, mask, masked])


@function(n=37)
def values_of_one_query() -> tirx.PrimFunc:
    weights, v = operand((1, 8, 1, N), "float32", "weights"), operand((1, 8, N, 64), "float32", "v")
    out = total((1, 8, 1, 64), N, lambda b, h, i, c, j: weights[b, h, i, j] * v[b, h, j, c])
    return te.create_prim_func([weights, v, out])


@function(n=5)
def vector_times_batch() -> tirx.PrimFunc:
    w, x = operand((64, 1, 48), "float32", "w"), operand((1, 64, N), "float32", "x")
    out = total((1, 1, N * 48), 64, lambda b, one, j, k: x[b, k, j // 48] * w[k, one, j % 48])
    return te.create_prim_func([w, x, out])


@function()
def matrix_times_short_vector() -> tirx.PrimFunc:
    w, x = operand((40, 24), "float32", "w"), operand((24,), "float32", "x")
    return te.create_prim_func([w, x, total((40,), 24, lambda i, k: w[i, k] * x[k])])


def four_bits(words: te.Tensor, scales: te.Tensor, shape: tuple[int, int], along: int, group: int = 32) -> te.Tensor:
    """Unpack 8 weights of 4 bits from a word, with a scale for each ``group`` of them along an axis."""

    def element(*i: tirx.Var) -> tirx.Expr:
        packed = [axis // 8 if place == along else axis for place, axis in enumerate(i)]
        scaled = [axis // group if place == along else axis for place, axis in enumerate(i)]
        bits = (words(*packed) >> (i[along] % 8 * 4).astype("uint32")) & tirx.const(15, "uint32")
        return (bits.astype("float16") - tirx.const(7, "float16")) * scales(*scaled)

    return te.compute(shape, element, "weights")


@function()
def four_bits_along_k() -> tirx.PrimFunc:
    words, scales = operand((48, 16), "uint32", "words"), operand((48, 4), "float16", "scales")
    x, weights = operand((1, 1, 128), "float16", "x"), four_bits(words, scales, (48, 128), 1)
    return te.create_prim_func(
        [words, scales, x, total((1, 1, 48), 128, lambda b, i, j, k: x[b, i, k] * weights[j, k])]
    )


@function()
def four_bits_along_k_in_float32_with_residual() -> tirx.PrimFunc:
    words, scales = operand((48, 16), "uint32", "words"), operand((48, 4), "float16", "scales")
    x, weights = operand((1, 1, 128), "float16", "x"), four_bits(words, scales, (48, 128), 1)
    rest = operand((1, 1, 48), "float16", "rest")
    sums = total(
        (1, 1, 48), 128, lambda b, i, j, k: x[b, i, k].astype("float32") * weights[j, k].astype("float32"), "sums"
    )
    out = te.compute(sums.shape, lambda *i: rest(*i) + sums(*i).astype("float16"), "out")
    return te.create_prim_func([words, scales, x, rest, out])


@function()
def four_bits_along_columns() -> tirx.PrimFunc:
    words, scales = operand((64, 12), "uint32", "words"), operand((64, 3), "float16", "scales")
    x, weights = operand((1, 64), "float16", "x"), four_bits(words, scales, (64, 96), 1)
    return te.create_prim_func([words, scales, x, total((1, 96), 64, lambda i, j, k: x[i, k] * weights[k, j])])


@function()
def four_bits_packed_down() -> tirx.PrimFunc:
    words, scales = operand((16, 48), "uint32", "words"), operand((4, 48), "float16", "scales")
    x, weights = operand((1, 1, 128), "float16", "x"), four_bits(words, scales, (128, 48), 0)
    sums = total((1, 1, 48), 128, lambda b, i, j, k: x[b, i, k] * weights[k, j], "sums")
    return te.create_prim_func([words, scales, x, topi.sigmoid(sums)])


@function(batch=5)
def four_bits_of_few_rows() -> tirx.PrimFunc:
    batch = tirx.Var("batch", "int64")
    words, scales = operand((48, 16), "uint32", "words"), operand((48, 4), "float16", "scales")
    x, weights = operand((batch, 1, 128), "float16", "x"), four_bits(words, scales, (48, 128), 1)
    out = total((batch, 1, 48), 128, lambda b, i, j, k: x[b, i, k] * weights[j, k])
    return te.create_prim_func([words, scales, x, out])


@function()
def zero_points_of_four_bits() -> tirx.PrimFunc:
    words, zeros = operand((16, 48), "uint32", "words"), operand((4, 6), "uint32", "zeros")
    scales, x = operand((4, 48), "float16", "scales"), operand((1, 1, 128), "float16", "x")
    fifteen = tirx.const(15, "uint32")

    def weight(k: tirx.Var, j: tirx.Var) -> tirx.Expr:
        zero = ((zeros[k // 32, j // 8] >> (j % 8 * 4).astype("uint32")) & fifteen) + tirx.const(1, "uint32")
        code = (words[k // 8, j] >> (k % 8 * 4).astype("uint32")) & fifteen
        return (code.astype("float16") - zero.astype("float16")) * scales[k // 32, j]

    weights = te.compute((128, 48), weight, "weights")
    out = total((1, 1, 48), 128, lambda b, i, j, k: x[b, i, k] * weights[k, j])
    return te.create_prim_func([words, zeros, scales, x, out])


@function({"experts": np.array([5, 2])})
def rows_of_experts() -> tirx.PrimFunc:
    x, w = operand((1, 64), "float16", "x"), operand((8, 40, 64), "float16", "w")
    experts = operand((2,), "int32", "experts")
    out = total((2, 40), 64, lambda e, j, k: x[0, k] * w[experts[e], j, k])
    return te.create_prim_func([x, w, experts, out])


@function(m=11)
def few_columns() -> tirx.PrimFunc:
    x, w = operand((M, 64), "float16", "x"), operand((15, 64), "float16", "w")
    return te.create_prim_func([x, w, total((M, 15), 64, lambda i, j, k: x[i, k] * w[j, k])])


@function()
def bytes_to_words() -> tirx.PrimFunc:
    x, w = operand((32, 64), "int8", "x"), operand((48, 64), "int8", "w")
    out = total((32, 48), 64, lambda i, j, k: x[i, k].astype("int32") * w[j, k].astype("int32"))
    return te.create_prim_func([x, w, out])


@function(n=19)
def four_bits_of_many_rows_with_residual() -> tirx.PrimFunc:
    words, scales = operand((48, 16), "uint32", "words"), operand((48, 4), "float16", "scales")
    x, rest = operand((1, N, 128), "float16", "x"), operand((1, N, 48), "float16", "rest")
    weights = four_bits(words, scales, (48, 128), 1)
    sums = total((1, N, 48), 128, lambda b, i, j, k: x[b, i, k] * weights[j, k], "sums")
    half = te.compute(sums.shape, lambda *i: sums(*i) * tirx.const(0.5, "float16") + rest(*i), "half")
    return te.create_prim_func([words, scales, x, rest, half])


@function(n=7)
def repeated_keys() -> tirx.PrimFunc:
    keys, q = operand((1, N, 2, 32), "float16", "keys"), operand((1, 8, 1, 32), "float16", "q")
    repeated = te.compute((1, 8, N, 32), lambda b, h, j, c: keys[b, j, h // 4, c], "repeated")
    out = total((1, 8, 1, N), 32, lambda b, h, i, j, c: q[b, h, i, c] * repeated[b, h, j, c])
    return te.create_prim_func([keys, q, out])


@function(n=9, m=21)
def softmax_to_float16() -> tirx.PrimFunc:
    x = operand((1, 4, N, M), "float32", "x")
    return te.create_prim_func([x, topi.cast(topi.nn.softmax(x, -1), "float16")])


@function()
def softmax_of_a_vocabulary() -> tirx.PrimFunc:
    x = operand((1, 1, 4000), "float32", "x")
    return te.create_prim_func([x, topi.nn.softmax(x, -1)])


@function()
def softmax_inside() -> tirx.PrimFunc:
    x = operand((2, 40, 24), "float32", "x")
    return te.create_prim_func([x, topi.nn.softmax(x, 1)])


@function(n=5)
def layer_norm_to_float16() -> tirx.PrimFunc:
    x, w, b = operand((1, N, 96), "float32", "x"), operand((96,), "float32", "w"), operand((96,), "float32", "b")
    return te.create_prim_func([x, w, b, topi.cast(topi.nn.layer_norm(x, w, b, [2]), "float16")])


@function(n=5)
def rms_norm_in_float32() -> tirx.PrimFunc:
    x, w = operand((1, N, 96), "float16", "x"), operand((96,), "float16", "w")
    squares = total((1, N), 96, lambda b, i, k: x[b, i, k].astype("float32") * x[b, i, k].astype("float32"), "squares")
    out = te.compute(
        x.shape,
        lambda b, i, j: (
            w[j].astype("float32")
            * (x[b, i, j].astype("float32") / te.sqrt(squares[b, i] / 96.0 + tirx.const(1e-5, "float32")))
        ).astype("float16"),
        "normed",
    )
    return te.create_prim_func([x, w, out])


@function()
def rms_norm_of_one_row() -> tirx.PrimFunc:
    x, w = operand((1, 1, 96), "float16", "x"), operand((96,), "float16", "w")
    squares = total((1,), 96, lambda i, k: wide(x)[0, i, k] * wide(x)[0, i, k], "squares")
    scaled = te.compute(
        (1, 96),
        lambda i, j: (wide(x)[0, i, j] * te.rsqrt(squares[i] / 96.0 + 1e-5)).astype("float16") * w[j],
        "normed",
    )
    return te.create_prim_func([x, w, scaled])


@function()
def group_norm() -> tirx.PrimFunc:
    x, w, b = operand((1, 64), "float32", "x"), operand((64,), "float32", "w"), operand((64,), "float32", "b")
    apart = topi.reshape(x, (1, 8, 8))
    mean = te.compute((1, 8), lambda i, g: topi.sum(apart, 2)[i, g] / 8.0, "mean")
    squares = topi.sum(topi.multiply(apart, apart), 2)
    spread = te.compute((1, 8), lambda i, g: squares[i, g] / 8.0 - mean[i, g] * mean[i, g], "spread")
    out = te.compute(
        (1, 64),
        lambda i, c: (x[i, c] - mean[i, c // 8]) * te.rsqrt(spread[i, c // 8] + 1e-5) * w[c] + b[c],
        "normed",
    )
    return te.create_prim_func([x, w, b, out])


@function(batch=3, vocabulary=75)
def log_sum_exp_of_chunks() -> tirx.PrimFunc:
    batch, vocabulary = tirx.Var("batch", "int64"), tirx.Var("vocabulary", "int64")
    chunks, x = (vocabulary + 31) // 32, operand((batch, vocabulary), "float32", "x")
    least = tirx.const(-3e38, "float32")
    padded = te.compute(
        (batch, chunks, 32),
        lambda b, c, j: tirx.if_then_else(c * 32 + j < vocabulary, x[b, c * 32 + j], least),
        "padded",
    )
    largest = topi.max(padded, 2)
    j = te.reduce_axis((0, 32), "j")
    zero = tirx.const(0, "float32")
    sums = te.compute(
        (batch, chunks),
        lambda b, c: te.sum(
            tirx.if_then_else(c * 32 + j < vocabulary, te.exp(padded[b, c, j] - largest[b, c]), zero), [j]
        ),
        "sums",
    )
    return te.create_prim_func([x, te.compute((batch, chunks), lambda b, c: te.log(sums[b, c]) + largest[b, c], "lse")])


@function()
def reduction_outside() -> tirx.PrimFunc:
    x = operand((64, 40), "float32", "x")
    return te.create_prim_func([x, topi.sum(x, 0)])


@function()
def reduction_inside_broadcast() -> tirx.PrimFunc:
    x = operand((40, 64), "float32", "x")
    return te.create_prim_func([x, topi.multiply(x, topi.sum(x, 1, keepdims=True))])


@function()
def transposed() -> tirx.PrimFunc:
    x = operand((50, 70), "float32", "x")
    return te.create_prim_func([x, topi.transpose(x)])


@function()
def four_bits_transposed() -> tirx.PrimFunc:
    words, scales = operand((16, 40), "uint32", "words"), operand((4, 40), "float16", "scales")
    return te.create_prim_func([words, scales, topi.transpose(four_bits(words, scales, (128, 40), 0))])


@function()
def three_bits_transposed() -> tirx.PrimFunc:
    words, scales = operand((12, 40), "uint32", "words"), operand((3, 40), "float16", "scales")

    def weight(k: tirx.Var, j: tirx.Var) -> tirx.Expr:
        bits = (words[k // 10, j] >> (k % 10 * 3).astype("uint32")) & tirx.const(7, "uint32")
        return (bits.astype("float16") - tirx.const(3, "float16")) * scales[k // 40, j]

    return te.create_prim_func([words, scales, topi.transpose(te.compute((120, 40), weight, "weights"))])


@function(m=30)
def a_scan_of_tvms_own() -> tirx.PrimFunc:
    """Calls a packed function, as TVM's sort and scan by Thrust do: nothing to schedule."""

    @T.prim_func(s_tir=True)
    def scan(a: T.handle, b: T.handle) -> None:
        m = T.int64()
        A = T.match_buffer(a, (m,), "float32")
        B = T.match_buffer(b, (m,), "float32")
        with T.sblock("scan"):
            T.reads(A[0:m])
            T.writes(B[0:m])
            T.evaluate(T.call_packed("a.scan", A.data, B.data, m))

    return scan
