"""Products of few rows: right for any stored form of the weights, any rows, any raggedness, and loaded in vectors."""

from __future__ import annotations

import re

import pytest
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.s_tir import Schedule

from support.functions import check_function
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.relax.rules import Decode, NotTaken, lowered_for_few_rows
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.recipes import WeightsTile, stream_weights
from tensorir_ladder.schedules.workloads import Matmul, batched_matmul, conv2d_nhwc, matmul_bias_relu, row_sum

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


def half(m: int, n: int, k: int, layout: str = "nt", dtype: str = "float16") -> tirx.PrimFunc:
    """A product of 16-bit floats."""
    return Matmul(m=m, n=n, k=k, dtype=dtype, layout=layout).prim_func()


def packed(
    m: int | str,
    n: int,
    k: int,
    bits: int = 4,
    store: str = "uint32",
    group: int = 32,
    dtype: str = "float16",
    nk: bool = True,
    bias: bool = False,
    zero: float | None = None,
) -> tirx.PrimFunc:
    """x · W as Relax modules of quantized weights write it: unpacked and scaled by blocks of their own, 64-bit indices.

    W is packed along k, a scale to ``group`` of it; sums are of ``dtype``; ``nk`` stores [n, k], else [k, n].
    """
    per = tvm.DataType(store).bits // bits
    rows = tirx.Var(m, "int64") if isinstance(m, str) else tirx.const(m, "int64")
    wide, deep = tirx.const(n, "int64"), tirx.const(k, "int64")

    def placed(j: tirx.Var, p: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        return (j, p) if nk else (p, j)

    x = te.placeholder((rows, deep), dtype, name="x")
    q = te.placeholder(placed(wide, tirx.const(-(-k // per), "int64")), store, name="q")
    s = te.placeholder(placed(wide, tirx.const(-(-k // group), "int64")), dtype, name="s")
    middle = tirx.const(float((1 << bits - 1) - 1 if per > 1 else 0) if zero is None else zero, dtype)

    def unpacked(*index: tirx.Var) -> tirx.Expr:
        j, p = placed(*index)
        stored = q[placed(j, p // per)]
        if per > 1:
            mask = tirx.const((1 << bits) - 1, store)
            stored = tirx.bitwise_and(tirx.shift_right(stored, (p % per * bits).astype(store)), mask)
        return stored.astype(dtype)

    def scaled(*index: tirx.Var) -> tirx.Expr:
        j, p = placed(*index)
        return (values[index] - middle) * s[placed(j, p // group)]

    values = te.compute(placed(wide, deep), unpacked, name="compute")
    weights = te.compute(values.shape, scaled, name="dequantize")
    r = te.reduce_axis((0, deep), name="k")
    product = te.compute((rows, wide), lambda i, j: te.sum(x[i, r] * weights[placed(j, r)], axis=r), name="matmul")
    if not bias:
        return te.create_prim_func([x, q, s, product])
    b = te.placeholder((wide,), dtype, name="b")
    out = te.compute(product.shape, lambda i, j: te.max(product[i, j] + b[j], tirx.const(0, dtype)), name="add")
    return te.create_prim_func([x, q, s, b, out])


def mixed(m: int, n: int, k: int, rows: str, weights: str, sums: str, nk: bool = True) -> tirx.PrimFunc:
    """A product of two dtypes, without scales."""
    x = te.placeholder((m, k), rows, name="x")
    w = te.placeholder((n, k) if nk else (k, n), weights, name="w")
    r = te.reduce_axis((0, k), name="k")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        return te.sum(x[i, r].astype(sums) * (w[j, r] if nk else w[r, j]).astype(sums), axis=r)

    return te.create_prim_func([x, w, te.compute((m, n), element, name="matmul")])


def gated(m: int, n: int, k: int) -> tirx.PrimFunc:
    """A residual and silu(gate) * up · W: what a layer's second product is, its rows computed."""
    gates = te.placeholder((m, 2 * k), "float16", name="gates")
    w = te.placeholder((n, k), "float16", name="w")
    residual = te.placeholder((m, n), "float16", name="residual")
    rows = te.compute((m, k), lambda i, p: gates[i, p] * te.sigmoid(gates[i, p]) * gates[i, p + k], name="act")
    r = te.reduce_axis((0, k), name="k")
    product = te.compute((m, n), lambda i, j: te.sum(rows[i, r] * w[j, r], axis=r), name="matmul")
    return te.create_prim_func([gates, w, residual, te.compute((m, n), lambda i, j: product[i, j] + residual[i, j])])


def chosen(m: int, n: int, k: int) -> tirx.PrimFunc:
    """Weights of two matrices, and a row that is a 2 where neither is."""
    x = te.placeholder((m, k), "float16", name="x")
    w, v = (te.placeholder((n, k), "float16", name=name) for name in "wv")

    def element(j: tirx.Var, p: tirx.Var) -> tirx.Expr:
        return tirx.if_then_else(p % 3 < j, w[j, p], tirx.if_then_else(p < 7, v[j, p], tirx.const(2.0, "float16")))

    picked = te.compute((n, k), element, name="picked")
    r = te.reduce_axis((0, k), name="k")
    product = te.compute((m, n), lambda i, j: te.sum(x[i, r] * picked[j, r], axis=r), name="matmul")
    return te.create_prim_func([x, w, v, product])


CASES = {
    "one row": half(1, 64, 1024),
    "rows and columns that no tile divides": half(3, 100, 1000),
    "fewer sums than threads, in groups": half(1, 512, 2048, dtype="float32"),
    "odd extents": half(2, 37, 101),
    "bfloat16": half(2, 64, 256, dtype="bfloat16"),
    "float32": half(4, 64, 256, dtype="float32"),
    "weights along the columns": half(1, 64, 1024, "nn"),
    "ragged, along the columns": half(5, 100, 300, "nn"),
    "odd, along the columns": half(2, 37, 101, "nn"),
    "float32 along the columns": half(8, 64, 100, "nn", "float32"),
    "a matrix and three vectors": half(72, 3, 128),
    "a matrix and three vectors, along the columns": half(72, 3, 128, "nn"),
    "one column": half(2, 1, 300, dtype="float32"),
    "a vector of 8": half(1, 8, 8),
    "a sum of 3": half(1, 64, 3),
    "batched": batched_matmul(6, Matmul(m=1, n=48, k=64, dtype="float16", layout="nt")),
    "batched, along the columns": batched_matmul(6, Matmul(m=1, n=64, k=48, dtype="float16")),
    "bias and ReLU": matmul_bias_relu(Matmul(m=2, n=48, k=256, dtype="float16", layout="nt")),
    "int4": packed(1, 96, 512),
    "int4, bias, ReLU": packed(4, 96, 512, bias=True),
    "int4 along the columns": packed(3, 64, 256, nk=False),
    "int4 with a zero point between": packed(1, 64, 256, zero=7.5),
    "int4 in bytes": packed(1, 96, 512, store="uint8"),
    "int4, ragged": packed(3, 35, 344),
    "int4 and bfloat16": packed(1, 64, 256, dtype="bfloat16"),
    "int8, packed": packed(1, 96, 512, bits=8),
    "int8": packed(1, 96, 512, bits=8, store="int8"),
    "int8, a scale to a column": packed(2, 96, 512, bits=8, store="int8", group=512),
    "int8 and int8": mixed(2, 33, 128, "int8", "int8", "int32"),
    "uint8 and int8, along the columns": mixed(1, 33, 128, "uint8", "int8", "int32", nk=False),
    "int8 without a scale, ragged": mixed(2, 33, 96, "float16", "int8", "float16"),
    "float16 for float32, ragged": mixed(2, 40, 96, "float32", "float16", "float32"),
    "rows that are computed": gated(3, 45, 100),
    "weights that are chosen": chosen(2, 37, 100),
    "int8 along the columns": packed(1, 96, 300, bits=8, store="int8", group=30, nk=False),
}


FAST = (
    "odd extents",
    "fewer sums than threads, in groups",
    "ragged, along the columns",
    "a matrix and three vectors",
    "one column",
    "bias and ReLU",
)
FAST = (
    *FAST,
    "int8 without a scale, ragged",
    "rows that are computed",
    "weights that are chosen",
    "int4, bias, ReLU",
    "int4 along the columns",
    "int8, a scale to a column",
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.emulator) for name in CASES]
)
def test_products_of_few_rows_are_right(name: str) -> None:
    taken = Decode().take(CASES[name], TARGET)
    assert len(check_function(CASES[name], taken, TARGET, runs=2).kernels) == 1


@pytest.mark.emulator
@pytest.mark.parametrize(
    "function",
    [Matmul(m=1, n=64, k=256, dtype="float16", layout="nt").prim_func(any_m=True), packed("m", 64, 256)],
    ids=["float16", "int4"],
)
def test_one_function_has_bodies_for_ranges_of_rows(function: tirx.PrimFunc) -> None:
    taken = lowered_for_few_rows(function, TARGET)
    launched = {m: check_function(function, taken, TARGET, {"m": m}, runs=1).kernels for m in (0, 1, 2, 3, 8, 11)}
    assert launched.pop(0) == ()
    assert len({kernels for m, kernels in launched.items() if m <= 8}) == 4, launched
    assert launched[8] == launched[11]  # more rows than asked for: slow, and right


@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_a_matrix_may_be_known_at_run_time_only(n: int) -> None:
    function = Matmul(m=1, n=n, k=2048, dtype="float16", layout="nt").prim_func(any_m=True)
    check_function(function, Decode().take(function, TARGET), TARGET, {"m": 77}, runs=1)


@pytest.mark.emulator
def test_lengths_of_a_cache_may_be_known_at_run_time_only() -> None:
    """One query over keys and values of any number: the columns, or the sum, are ragged as it comes."""
    length = tirx.Var("n", "int64")
    q = te.placeholder((4, 1, 32), "float16", name="q")
    keys = te.placeholder((2, length, 32), "float16", name="keys")
    k = te.reduce_axis((0, 32), name="k")
    scores = te.compute((4, 1, length), lambda h, i, j: te.sum(q[h, i, k] * keys[h // 2, j, k], axis=k), name="qk")
    weights = te.placeholder((4, 1, length), "float16", name="weights")
    values = te.placeholder((2, length, 32), "float16", name="values")
    j = te.reduce_axis((0, length), name="j")
    out = te.compute((4, 1, 32), lambda h, i, d: te.sum(weights[h, i, j] * values[h // 2, j, d], axis=j), name="pv")
    for function in (te.create_prim_func([q, keys, scores]), te.create_prim_func([weights, values, out])):
        taken = Decode().take(function, TARGET)
        for n in (1, 33, 100):
            check_function(function, taken, TARGET, {"n": n}, runs=1)


@pytest.mark.parametrize(
    ("function", "vectors"),
    [
        (half(1, 4096, 4096), 8),
        (half(1, 4096, 4096, "nn"), 8),
        (packed(1, 4096, 4096), 8),
        (packed(1, 1024, 4096, bits=8, store="int8"), 4),
        (half(1, 1000, 1000), 4),
    ],
    ids=["along k", "along the columns", "int4", "int8", "ragged"],
)
def test_weights_are_loaded_in_many_vectors_before_the_first_is_used(function: tirx.PrimFunc, vectors: int) -> None:
    source = tvm.compile(tvm.IRModule({"main": Decode().take(function, TARGET)}), TARGET).mod.imports[0]
    before_first_use = source.inspect_source().split("rf_local_ptr[0] = (")[0]
    weights = str(function.params[1].name)
    loaded = re.findall(rf"= \*\(\w+4\*\)\({weights}_ptr", before_first_use)
    assert len(loaded) >= vectors, before_first_use[-3000:]


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize(
    "function", [half(1, 4096, 4096), half(8, 4096, 4096), packed(4, 4096, 4096)], ids=["one row", "eight", "int4"]
)
def test_nvcc_keeps_all_in_registers(function: tirx.PrimFunc, compiler: Compiler) -> None:
    module = tvm.compile(tvm.IRModule({"main": Decode().take(function, TARGET)}), TARGET)
    cubin = compile_cubin(module.mod.imports[0].inspect_source(), "sm_90a", compiler)
    assert cubin.spill_bytes == 0
    assert cubin.registers <= 128


@pytest.mark.parametrize(
    "function",
    [half(9, 64, 64), conv2d_nhwc(1, 8, 8, 16, 16), row_sum(4, 64), Matmul(m=1, n=64, k=64).prim_func(any_m=True)],
    ids=["nine rows", "a convolution", "a sum of rows", "rows known at run time only"],
)
def test_other_functions_are_left(function: tirx.PrimFunc) -> None:
    with pytest.raises(NotTaken):
        Decode().take(function, TARGET)
    assert Decode().apply(function, TARGET) is None


def test_a_tile_whose_sums_cannot_be_shared_out_is_refused() -> None:
    sch = Schedule(half(3, 64, 256))
    before = sch.mod
    with pytest.raises(IllegalTile, match="3 x 4 sums"):
        stream_weights(sch, sch.get_sblock("matmul"), WeightsTile(3, 4, 1, (1, 8, 1), 32, 6))
    assert tvm_ffi.structural_equal(before, sch.mod)
