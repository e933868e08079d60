"""The elementwise rule: right for what frameworks write, in vectors where rows allow, nothing launched for nothing."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import tvm
from tvm import relax, te, tirx

from support.functions import check_function
from support.legalized import Shape, legalized
from support.schedules_on_cpu import TARGET
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.elementwise import Elementwise
from tensorir_ladder.relax.rules.rule import NotTaken
from tensorir_ladder.schedules.workloads import Matmul

op, nn = relax.op, relax.op.nn


def rotated(x: relax.Expr, cos: relax.Expr, sin: relax.Expr) -> relax.Expr:
    """Rotary positions: x · cos + (−second half, first half) · sin."""
    first, second = (op.strided_slice(x, axes=[2], begin=[at], end=[at + 32]) for at in (0, 32))
    return x * cos + op.concat([op.negative(second), first], axis=-1) * sin


@dataclass(frozen=True)
class Case:
    """An expression, its inputs' shapes, sizes to try, and inputs with another dtype."""

    body: Callable[..., relax.Expr]
    shapes: tuple[Shape, ...]
    sizes: tuple[dict[str, int], ...] = ({},)
    dtype: str = "float16"
    dtypes: dict[str, str] = field(default_factory=dict)

    def functions(self) -> list[tirx.PrimFunc]:
        return legalized(self.body, *self.shapes, dtype=self.dtype, **self.dtypes)


OF_ROWS = ({"n": 0}, {"n": 1}, {"n": 33})
CASES = {
    "silu_cast": Case(lambda x: op.astype(nn.silu(x), "float32"), (("n", 16),), OF_ROWS),
    "gelu_reshape": Case(lambda x: op.reshape(nn.gelu(x), (16, 24)), ((8, 48),)),
    "swiglu": Case(lambda g, u: nn.silu(g) * u, (("n", 56), ("n", 56)), ({"n": 5},)),
    "bias_relu": Case(lambda x, b: nn.relu(x + b), ((7, 64), (64,)), dtype="bfloat16"),
    "ragged_bias": Case(lambda x, b: nn.relu(x + b), ((7, 9), (9,))),
    "symbolic_bias": Case(
        lambda x, b: nn.relu(x + b),
        (("n", "m"), ("m",)),
        (
            {"n": 3, "m": 8},
            {"n": 3, "m": 7},
            {"n": 70, "m": 64},
            {"n": 40, "m": 65},
            {"n": 1, "m": 1},
            {"n": 0, "m": 8},
        ),
    ),
    "symbolic_everything": Case(
        lambda x, y: x * y, (("n", "m"), ("n", "m")), ({"n": 5, "m": 5}, {"n": 16, "m": 130}), dtype="float32"
    ),
    "rope": Case(rotated, (("n", 4, 64), ("n", 1, 64), ("n", 1, 64)), ({"n": 3},)),
    "rope_transposed": Case(
        lambda x, cos, sin: op.permute_dims(rotated(x, cos, sin), [1, 2, 0]),
        (("n", 2, 64), ("n", 1, 64), ("n", 1, 64)),
        ({"n": 3}, {"n": 72}),
    ),
    "concat_aligned": Case(lambda x, y: op.concat([x, y], axis=1), ((8, 16), (8, 24))),
    "concat_ragged": Case(lambda x, y: op.concat([x, y], axis=1), ((8, 7), (8, 9))),
    "concat_transposed": Case(lambda x: op.concat([x, op.permute_dims(x, [1, 0])], axis=1), ((8, 8),)),
    "split": Case(lambda x: op.split(x, 2, axis=1), ((8, 16),)),
    "slice": Case(lambda x: op.strided_slice(x, axes=[1], begin=[2], end=[15], strides=[3]), ((8, 16),)),
    "pad": Case(lambda x: nn.pad(x, [0, 0, 1, 3]), ((8, 16),)),
    "mask": Case(lambda x, m: op.where(m, x, x * x), ((2, 5, 24), (5, 24)), dtypes={"x1": "bool"}),
    "heads_together": Case(lambda x: op.permute_dims(x, [0, 2, 1, 3]), ((2, "n", 4, 16),), ({"n": 5},)),
    "transpose": Case(lambda x: op.permute_dims(x, [1, 0]), ((70, 50),)),
    "transpose_of_tiles": Case(lambda x: op.permute_dims(x, [1, 0]), ((128, 192),)),
    "transpose_and_add": Case(
        lambda x, y: op.permute_dims(x, [0, 2, 1]) + y,
        ((2, "n", "m"), (2, "m", "n")),
        ({"n": 7, "m": 33}, {"n": 72, "m": 136}, {"n": 130, "m": 70}, {"n": 0, "m": 4}),
        dtype="float32",
    ),
    "transpose_of_bytes": Case(lambda x: op.permute_dims(x, [1, 0]), ((96, 80),), dtype="int8"),
    "transpose_of_doubles": Case(lambda x: op.permute_dims(x, [1, 0]), ((96, 80),), dtype="float64"),
    "channels_first": Case(lambda x: op.permute_dims(x, [0, 3, 1, 2]), ((2, 9, 9, 48),), dtype="bfloat16"),
    "scalar": Case(lambda x, y: x + y, ((), ()), dtype="float32"),
    "bytes": Case(lambda x, y: op.astype(x, "int8") + y, ((6, 40), (6, 40)), dtypes={"x1": "int8"}),
    "several_kernels": Case(lambda x: op.split(x, [3], axis=1), ((8, 16),)),
}
QUICK = ("symbolic_bias", "rope")


def emulated(name: str) -> object:
    """A case by its name: of the fast tier if it is a quick one."""
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.emulator)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [emulated(name) for name in CASES])
def test_functions_of_a_framework_compute_what_they_did(name: str) -> None:
    for function in CASES[name].functions():
        taken = Elementwise().take(function, TARGET)
        for sizes in CASES[name].sizes:
            launched = check_function(function, taken, TARGET, sizes).kernels
            assert bool(launched) == (0 not in sizes.values())


def cuda(function: tirx.PrimFunc) -> str:
    """The CUDA of a function that the rule takes, through TVM's own pipeline."""
    taken = Elementwise().take(function, TARGET).with_attr("global_symbol", "main")
    return generate(tvm.IRModule({"main": taken}), TARGET, "s_tir").cuda


@pytest.mark.parametrize(
    ("name", "vectors"),
    [("bias_relu", 3), ("ragged_bias", 2), ("rope", 5), ("concat_aligned", 3), ("swiglu", 9), ("heads_together", 6)],
)
def test_vectors_of_16_bytes_where_elements_are_consecutive(name: str, vectors: int) -> None:
    (function,) = CASES[name].functions()
    assert cuda(function).count("= *(uint4*)(") >= vectors


def test_a_mixture_of_widths_keeps_16_bytes_in_each_load() -> None:
    (function,) = legalized(lambda x: op.astype(x, "float32"), (64, 4096))
    text = cuda(function)
    assert "*(uint4*)(x0_0_local_ptr" in text
    assert "*(float4*)(compute_1_ptr" in text


def twice(values: te.Tensor, i: tirx.Var) -> tirx.Expr:
    """An element, added to itself."""
    return values[i] + values[i]


@pytest.mark.parametrize(("dtype", "columns"), [("float16", 48), ("int8", 48), ("int8", 72)])
def test_rows_in_reverse_are_not_gathered_into_vectors(dtype: str, columns: int) -> None:
    """Of 16-bit and shorter ones CUDA refuses that; a part of their indices is symbolic, so TVM forgets alignment."""
    n = tirx.Var("n", "int32")
    x = te.placeholder((n, columns), dtype, "x")
    function = te.create_prim_func([x, te.compute((n, columns), lambda i, j: x[n - 1 - i, j], "y")])
    taken = Elementwise().take(function, TARGET)
    text = generate(tvm.IRModule({"main": taken}), TARGET, "s_tir").cuda
    assert not re.search(r"make_uint\d\((\w+\[[^,]*\],?){3,}", text)
    for size in (1, 7):
        check_function(function, taken, TARGET, {"n": size}, runs=1)


def test_a_transpose_reads_and_writes_vectors_through_shared_memory() -> None:
    (function,) = CASES["transpose_of_tiles"].functions()
    text = cuda(function)
    assert "__shared__" in text
    for name in ("x0_0", "T_transpose_1"):
        assert re.search(rf"\*\(uint4\*\)\({name}_ptr", text)


def test_what_is_transposed_is_computed_before_it_is_staged() -> None:
    """All operands are read in vectors, once, and what they make is in one tile."""
    (function,) = CASES["rope_transposed"].functions()
    whole, *_ = (kernel for kernel in cuda(function).split("__global__") if "__shared__" in kernel)
    assert whole.count("__shared__") == 1
    assert len(re.findall(r"= \*\(uint4\*\)\(x\d_", whole)) == 10
    assert not re.search(r"= x\d_\d_ptr\[", whole)


def taken_by(rule: Elementwise, function: tirx.PrimFunc) -> str:
    """What the rule says to a function that it leaves."""
    with pytest.raises(NotTaken) as refused:
        rule.take(function, TARGET)
    return str(refused.value)


def test_what_is_not_elementwise_is_left() -> None:
    rule = Elementwise()
    assert "matmul" in taken_by(rule, Matmul(8, 8, 8).prim_func())
    a = te.placeholder((2**16, 2**16), "float16", "a")
    assert str(2**32) in taken_by(rule, te.create_prim_func([a, te.compute(a.shape, lambda i, j: a[i, j] + a[i, j])]))
    (scheduled,) = CASES["bias_relu"].functions()
    taken_by(rule, rule.take(scheduled, TARGET))
    value = te.placeholder((16,), "float32", "x")
    doubled: te.Tensor = value
    for _ in range(14):
        doubled = te.compute((16,), functools.partial(twice, doubled))
    assert "4000" in taken_by(rule, te.create_prim_func([value, doubled]))


def test_calls_that_32_bits_do_not_number_are_refused_by_the_function() -> None:
    (function,) = CASES["symbolic_everything"].functions()
    assert isinstance(v.read_source(function).prologue[0], tirx.AssertStmt)
    taken = Elementwise().take(function, TARGET).with_attr("global_symbol", "main")
    assert "beyond 32-bit indices" in str(generate(tvm.IRModule({"main": taken}), TARGET, "s_tir").host)


@pytest.mark.compiler
@pytest.mark.parametrize("name", [emulated(name) for name in ("swiglu", "rope", "bytes", "mask")])
def test_nvcc_takes_it_without_spills(name: str, compiler: Compiler) -> None:
    for function in CASES[name].functions():
        assert compile_cubin(cuda(function), "sm_90a", compiler).spill_bytes == 0
