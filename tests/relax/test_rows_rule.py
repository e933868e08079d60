"""The rows rule: right for norms, softmax and reductions of any length, read once; what is no such chain is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx, topi
from tvm.script import tirx as T

from support.functions import check_function
from support.legalized import Shape, legalized
from support.schedules_on_cpu import TARGET
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.relax.rules.rows import Rows
from tensorir_ladder.relax.rules.rule import NotTaken
from tensorir_ladder.schedules.workloads import Matmul

op, nn = relax.op, relax.op.nn


@dataclass(frozen=True)
class Case:
    """An expression, its inputs' shapes, sizes to try; ``slack`` for those that round inside of one block."""

    body: Callable[..., relax.Expr]
    shapes: tuple[Shape, ...]
    sizes: tuple[dict[str, int], ...] = ({},)
    dtype: str = "float16"
    slack: float = 1.0

    def functions(self) -> list[tirx.PrimFunc]:
        """The functions with reductions in them."""
        functions = legalized(self.body, *self.shapes, dtype=self.dtype)
        return [function for function in functions if "T.init" in function.script()]


def normed(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    """RMS norm over the last axis."""
    return nn.rms_norm(x, w, axes=[-1])


LENGTHS = tuple({"n": n, "m": m} for n, m in ((3, 8), (2, 7), (1, 1032), (1, 1031), (1, 9000), (2, 1), (0, 8)))
CASES = {
    "softmax": Case(nn.softmax, (("n", 128),), ({"n": 0}, {"n": 1}, {"n": 33})),
    "softmax_ragged": Case(nn.softmax, ((3, 1001),), dtype="float32"),
    "softmax_long": Case(nn.softmax, ((2, 40000),), dtype="float32"),
    "softmax_symbolic": Case(lambda x: nn.softmax(op.astype(x, "float32")), ((2, "n", "m"),), LENGTHS),
    "softmax_of_columns": Case(lambda x: nn.softmax(x, axis=1), ((2, 19, 40),), dtype="float32"),
    "log_softmax": Case(lambda x: nn.log_softmax(x, axis=-1), ((4, 96),), dtype="float32"),
    "rms_norm": Case(normed, (("n", 4096), (4096,)), ({"n": 1}, {"n": 3})),
    "rms_norm_short": Case(normed, (("n", 20), (20,)), ({"n": 1}, {"n": 19}), dtype="bfloat16"),
    "rms_norm_after_add": Case(
        lambda x, r, w: normed(x + r, w), (("n", 256), ("n", 256), (256,)), ({"n": 3},), slack=2
    ),
    "layer_norm": Case(
        lambda x, w, b: nn.layer_norm(x, w, b, axes=[-1]), (("n", 1024), (1024,), (1024,)), ({"n": 3},), slack=16
    ),
    "layer_norm_of_two_axes": Case(
        lambda x, w, b: nn.layer_norm(x, w, b, axes=[-2, -1]), ((3, 4, 24), (4, 24), (4, 24)), dtype="float32"
    ),
    "mean": Case(lambda x: op.mean(x, axis=-1), (("n", 256),), ({"n": 3},)),
    "mean_of_images": Case(lambda x: op.mean(x, axis=[1, 2]), ((2, 7, 7, 64),)),
    "mean_of_channels": Case(lambda x: op.mean(x, axis=[0, 2, 3]), ((2, 6, 8, 8),), dtype="float32"),
    "variance": Case(lambda x: op.variance(x, axis=-1), ((4, 96),), dtype="float32"),
    "deviation": Case(lambda x: op.std(x, axis=-1), ((4, 96),), dtype="float32"),
    "sum_of_all": Case(op.sum, ((7, 33),), dtype="float32"),
    "sum_of_everything_symbolic": Case(op.sum, (("n", "m", 64, 3),), ({"n": 3, "m": 2}, {"n": 1, "m": 40})),
    "softmax_of_one": Case(lambda x: nn.softmax(x, axis=0), ((1, "n"),), ({"n": 5},)),
    "sum_kept": Case(lambda x: op.sum(x, axis=[1], keepdims=True), ((5, 33),), dtype="float32"),
    "sum_of_columns": Case(
        lambda x: op.sum(x, axis=0), (("n", "m"),), ({"n": 5, "m": 40}, {"n": 100, "m": 3}), dtype="float32"
    ),
    "prod": Case(lambda x: op.prod(x, axis=1), ((5, 9),), dtype="float32"),
    "max_of_bytes": Case(lambda x: op.max(x, -1), ((4, 96),), dtype="int8"),
    "argmax": Case(lambda x: op.argmax(x, -1), ((5, 130),), dtype="float32"),
    "argmax_of_halves": Case(lambda x: op.argmax(x, 0), ((70, 9),)),
    "argmin_long": Case(lambda x: op.argmin(x, -1), ((3, 1300),), dtype="float32"),
    "group_norm": Case(lambda x, w, b: nn.group_norm(x, w, b, 4, 1, [2, 3]), ((2, 16, 4, 4), (16,), (16,)), slack=16),
    "average_pool": Case(
        lambda x: nn.avg_pool2d(x, pool_size=(3, 3), strides=(2, 2), padding=(1, 1), layout="NHWC"), ((2, 9, 9, 24),)
    ),
    "vector_times_matrix": Case(lambda p, v: op.matmul(p, v), ((2, 1, "n"), (2, "n", 64)), ({"n": 37},), "float32"),
}
QUICK = ("softmax", "argmax", "rms_norm_after_add")


def emulated(name: str) -> object:
    """A case by its name: of the fast tier if it is a quick one."""
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.emulator)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [emulated(name) for name in CASES])
def test_functions_of_a_framework_compute_what_they_did(name: str) -> None:
    case = CASES[name]
    for function in case.functions():
        taken = Rows().take(function, TARGET)
        for sizes in case.sizes:
            launched = check_function(function, taken, TARGET, sizes, slack=case.slack).kernels
            assert len(launched) == (0 not in sizes.values())


def piece(*axes: int, begin: int = 0, end: int | None = None, step: int = 1) -> Callable[[relax.Expr], relax.Expr]:
    """A slice, the same along each of some axes: elements from the end are left out with a negative ``end``."""

    def sliced(y: relax.Expr) -> relax.Expr:
        ends = [y.ty.shape[axis] + (end or 0) for axis in axes]
        return op.strided_slice(y, axes, [begin] * len(axes), ends, [step] * len(axes))

    return sliced


def then(body: Callable[..., relax.Expr], after: Callable[[relax.Expr], relax.Expr]) -> Callable[..., relax.Expr]:
    """What comes of one function after the other."""
    return lambda *operands: after(relax.BlockBuilder.current().emit(body(*operands)))


def by_channel(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    """A causal convolution of each of 24 channels: three results more than there are tokens."""
    return nn.conv1d(x, w, padding=3, groups=24)


BEHIND: dict[str, tuple[Callable[..., relax.Expr], tuple[Shape, ...], int, str]] = {
    # name: a reduction, its operands, an axis of its rows, the dtype
    "convolution_by_channel": (by_channel, ((1, 24, 16), (24, 1, 4)), 2, "float16"),
    "convolution_in_groups": (lambda x, w: nn.conv1d(x, w, padding=3, groups=4), ((1, 8, 16), (8, 2, 4)), 2, "float32"),
    "image_by_channel": (lambda x, w: nn.conv2d(x, w, padding=2, groups=8), ((1, 8, 7, 7), (8, 1, 3, 3)), 3, "float16"),
    "largest_of_windows": (lambda x: nn.max_pool2d(x, (3, 3), padding=(1, 1)), ((1, 8, 9, 9),), 3, "float16"),
    "mean_of_windows": (lambda x: nn.avg_pool2d(x, (3, 3), layout="NHWC"), ((1, 11, 11, 8),), 1, "float32"),
    "softmax": (nn.softmax, ((12, 40),), 0, "float16"),
    "layer_norm": (lambda x, w, b: nn.layer_norm(x, w, b, axes=[-1]), ((12, 40), (40,), (40,)), 0, "float32"),
    "rms_norm": (normed, ((12, 40), (40,)), 0, "float16"),
    "argmax": (lambda x: op.argmax(x, -1), ((12, 40),), 0, "float32"),
}
SLICES: dict[str, tuple[str, Callable[[int], Callable[[relax.Expr], relax.Expr]]]] = {
    "shorter": ("strided_slice", lambda axis: piece(axis, end=-3)),
    "later": ("strided_slice", lambda axis: piece(axis, begin=2)),
    "every_other": ("strided_slice", lambda axis: piece(axis, begin=1, step=2)),
    "one": ("strided_slice", lambda axis: piece(axis, begin=3, end=-1, step=20)),
    "turned": ("flip", lambda axis: lambda y: op.flip(y, axis=axis)),
}


@pytest.mark.sampled(5)
@pytest.mark.emulator
@pytest.mark.parametrize("how", SLICES)
@pytest.mark.parametrize("name", BEHIND)
def test_a_slice_behind_a_reduction_reduces_the_rows_in_it(name: str, how: str) -> None:
    body, shapes, axis, dtype = BEHIND[name]
    joins, made = SLICES[how]
    (function,) = legalized(then(body, made(axis)), *shapes, dtype=dtype, joins=joins)
    taken = Rows().take(function, TARGET)
    assert check_function(function, taken, TARGET, runs=1, slack=16 if "norm" in name else 4).kernels


def test_a_causal_convolution_by_channel_stores_its_tokens_alone() -> None:
    """As Mamba's and wav2vec2's are exported; TVM fuses this slice itself."""
    (function,) = legalized(then(by_channel, piece(2, end=-3)), (1, 24, 16), (24, 1, 4))
    assert check_function(function, Rows().take(function, TARGET), TARGET, runs=1).kernels


@pytest.mark.emulator
def test_slices_along_two_axes_and_of_the_result_of_a_result() -> None:
    pooled = then(lambda x: nn.avg_pool2d(x, (3, 3)), then(piece(2, 3, begin=1), lambda y: y * y))
    (function,) = legalized(pooled, (1, 4, 9, 9), dtype="float32", joins="strided_slice")
    assert check_function(function, Rows().take(function, TARGET), TARGET, runs=1).kernels


def padded(rows: te.Tensor, before: int) -> te.Tensor:
    """Eight rows, with zeros in front of them and one behind."""

    def row(i: tirx.Var) -> tvm.ir.Expr:
        there = tirx.all(i >= before, i < 8 + before)
        return tirx.if_then_else(there, rows[i - before], tirx.const(0, "float32"))

    return te.compute((8 + before + 1,), row, name="padded")


def test_rows_that_no_slice_gives_are_left() -> None:
    """Gathered ones, two slices of one sum, a part of the columns or of rows that are results as well, and a pad."""
    (gathered,) = legalized(
        lambda x, i: op.take(relax.BlockBuilder.current().emit(nn.softmax(x)), i, axis=0),
        (12, 40),
        (5,),
        joins="take",
        x1="int64",
    )
    not_taken(gathered)
    (columns,) = legalized(then(nn.softmax, piece(1, end=-3)), (12, 40), joins="strided_slice")
    not_taken(columns)
    x, k = te.placeholder((8, 64), name="x"), te.reduce_axis((0, 64), "k")
    rows = te.compute((8,), lambda i: te.sum(x[i, k], axis=k), name="rows")
    halves = te.compute((4,), lambda i: rows[i] + rows[i + 4], name="halves")
    assert "halves" in not_taken(te.create_prim_func([x, halves]))
    first = te.compute((4,), lambda i: rows[i] * 2.0, name="first")
    refused = not_taken(te.create_prim_func([x, rows, first]))
    assert all(part in refused for part in ("first", "got 4", "limit 8"))
    for before in (0, 2):  # rows that are not there are not read, and not those of the slice that a pad looks like
        assert "padded" in not_taken(te.create_prim_func([x, padded(rows, before)]))


LONG = {
    "sum_of_all": (Case(op.sum, ((200000,),), dtype="float32"), 2),
    "mean_of_no_even_parts": (Case(lambda x: op.mean(x, axis=1), ((2, 200003),), dtype="float32"), 2),
    "softmax_of_columns": (Case(lambda x: nn.softmax(x, axis=0), ((1301, 20),), dtype="float32"), 5),
    "argmax": (Case(lambda x: op.argmax(x, -1), ((3, 100000),), dtype="float32"), 2),
    "mean_of_pixels": (Case(lambda x: op.mean(x, axis=[0, 1, 2]), ((2, 50, 40, 24),), dtype="float32"), 2),
}


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("name", LONG)
def test_few_long_rows_are_reduced_by_many_blocks(name: str) -> None:
    case, kernels = LONG[name]
    (function,) = case.functions()
    launched = check_function(function, Rows().take(function, TARGET), TARGET, runs=2).kernels
    assert len(launched) == kernels


@pytest.mark.emulator
@pytest.mark.parametrize("all_of", [True, False])
def test_flags_are_reduced(all_of: bool) -> None:
    flags = te.placeholder((5, 70), "bool", "flags")
    function = te.create_prim_func([flags, (topi.all if all_of else topi.any)(flags, axis=1)])
    one = np.ones((5, 70), bool) if all_of else np.zeros((5, 70), bool)
    one[2, 33] = not all_of
    assert check_function(function, Rows().take(function, TARGET), TARGET, arrays={"flags": one}).kernels


def cuda(function: tirx.PrimFunc) -> str:
    """The CUDA of a function that the rule takes, through TVM's own pipeline."""
    taken = Rows().take(function, TARGET).with_attr("global_symbol", "main")
    return generate(tvm.IRModule({"main": taken}), TARGET, "s_tir").cuda


def test_a_row_is_read_once_in_vectors_and_reduced_by_shuffles() -> None:
    (function,) = CASES["layer_norm"].functions()
    text = cuda(function)
    read = re.findall(r"\*\(uint4\*\)\(x0_0_ptr", text)
    threads = int(re.findall(r"__launch_bounds__\((\d+)\)", text)[0])
    assert len(read) * threads * 8 == 1024
    assert "__shfl_xor_sync" in text


def test_what_two_passes_need_is_computed_once() -> None:
    (function,) = legalized(nn.softmax, ("n", 64), dtype="float32")
    text = cuda(function)
    assert text.count("expf(") == 4 * len(re.findall(r"\*\(float4\*\)\(x0_0_ptr", text))


def test_many_short_rows_share_a_block_and_long_ones_do_not() -> None:
    for columns, rows in ((8, 128), (128, 16), (4096, 1)):
        (function,) = legalized(nn.softmax, ("n", columns))
        text = cuda(function)
        assert ("threadIdx.y" in text) == (rows > 1)


def not_taken(function: tirx.PrimFunc) -> str:
    """What the rule says to a function that it leaves."""
    with pytest.raises(NotTaken) as refused:
        Rows().take(function, TARGET)
    return str(refused.value)


def test_what_is_no_chain_over_rows_is_left() -> None:
    assert "contraction" in not_taken(Matmul(8, 8, 8).prim_func())
    (add,) = legalized(lambda x, y: x + y, (8, 8), (8, 8))
    assert "without a reduction" in not_taken(add)
    x, z = (te.placeholder((8, 64), name=name) for name in "xz")
    k, j = te.reduce_axis((0, 64), "k"), te.reduce_axis((0, 8), "j")
    rows = te.compute((8,), lambda i: te.sum(x[i, k], axis=k), name="rows")
    columns = te.compute((64,), lambda i: te.sum(z[j, i], axis=j), name="columns")
    both = te.compute((8, 64), lambda i, c: rows[i] + columns[c], name="both")
    assert "columns" in not_taken(te.create_prim_func([x, z, both]))
    shifted = te.compute((8, 64), lambda i, c: x[i, c] - rows[(i + 1) % 8], name="shifted")
    not_taken(te.create_prim_func([x, shifted]))


@T.prim_func(s_tir=True)
def running(a: T.Buffer((8, 4), "float32"), b: T.Buffer((8,), "float32")) -> None:
    """Each sum goes on from the first."""
    for i, k in T.grid(8, 4):
        with T.sblock("running"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                b[vi] = T.float32(0)
            b[vi] = b[T.int32(0)] + a[vi, vk]


def test_a_sum_of_other_sums_is_left() -> None:
    assert "running" in not_taken(running)


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize(
    "name",
    [
        emulated(name)
        for name in ("softmax_symbolic", "layer_norm", "rms_norm_after_add", "argmin_long", "mean_of_images")
    ],
)
def test_nvcc_takes_it_without_spills(name: str, compiler: Compiler) -> None:
    for function in CASES[name].functions():
        assert compile_cubin(cuda(function), "sm_90a", compiler).spill_bytes == 0
