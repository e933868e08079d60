"""The Python call on tensors: what it multiplies, copies, keeps and refuses.

Without a GPU stand-ins for torch and the driver show that a kernel gets the right matrices (see torch_stand_in.py);
the tests marked ``gpu`` show that products are right.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import tvm

from support.cases import STEPS, hopper
from support.estimated import only_kernels_of
from support.torch_stand_in import Library, Tensor, torch_stand_in
from tensorir_ladder.harness.execution import require_gpu
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.peers import call as call_peer
from tensorir_ladder.harness.records import load_records
from tensorir_ladder.harness.records.parts import Sentence
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, MatrixRows
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import NoCompiler
from tensorir_ladder.kernels.tiles import ClusterTile, RoleTile
from tensorir_ladder.schedules import plans
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import choice as choice_module
from tensorir_ladder.torch_ops import describe, kept, matmul
from tensorir_ladder.torch_ops import prepared as api
from tensorir_ladder.torch_ops.choice import choose
from tensorir_ladder.torch_ops.driver import Driver
from tensorir_ladder.torch_ops.errors import (
    FirstCallInCapture,
    NoTorch,
    OverlappingOutput,
    PaddedCopy,
    ScatteredRows,
    UnalignedOperand,
    UnsupportedGpu,
    WrongDevice,
    WrongDtype,
    WrongShape,
)
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.launcher import CompiledKernel
from tensorir_ladder.torch_ops.operands import Form, arrange
from tensorir_ladder.torch_ops.problem import Conditions, KernelChoice, Setting
from tensorir_ladder.torch_ops.shifted import Shifting
from tensorir_ladder.torch_ops.short_reductions import MOST_STEPS, Unaligned, fastest_tile
from tensorir_ladder.torch_ops.step_kernels import KERNELS, PERSISTENT
from tensorir_ladder.torch_ops.tuned_here import tuned

TARGET = machine_for("sm_90a").target()


# The heuristic

H200 = hopper(name="NVIDIA H200")


def test_what_was_measured_is_taken_on_that_gpu_alone() -> None:
    problem = Matmul(1024, 1024, 14336, "float16")
    chosen = choose(problem, H200)
    assert (chosen.kernel.step, str(chosen.tile), chosen.stages) == (12, "64x128x64/1x1", 8)
    assert choose(problem, replace(H200, name="NVIDIA H100 80GB HBM3")) != chosen


def test_every_tuned_choice_was_faster_in_the_same_rounds_than_its_step_s_successor() -> None:
    """A record times a step and the one before in the same rounds: the tuned choice is the one before, and faster."""
    for (m, n, k, dtype, layout), chosen in tuned("NVIDIA H200").items():
        problem = Matmul(m, n, k, dtype, layout)
        usual = plans.choose(STEPS[13].tiles, problem, machine_for("sm_90a").for_choices())
        label = f" {problem.shape} {dtype} {chosen.tile} {chosen.stages} stages"
        case = (13, (m, n, k), layout, dtype, str(usual.tile))
        compared = [
            record
            for record in load_records()
            if (record.step, record.shape, record.layout, record.dtype, record.tile) == case
            and record.previous.label.endswith(label)
        ]
        assert compared
        for record in compared:
            assert record.previous.label.startswith(f"step{chosen.kernel.step}_")
            assert median(record.previous.samples_ms) < median(record.timing.samples_ms)


def test_every_choice_fits_and_every_step_is_a_kernel() -> None:
    for number, kernel in enumerate((*KERNELS.values(), *PERSISTENT.values())):
        problem = Matmul(256, 512, 512, "float16", ("nn", "nt")[number % 2])
        assert KernelChoice(kernel, kernel.family.parse("64x128x64/1x1"), 6).build(problem, Setting(H200)).params


def test_rows_across_cache_lines_make_clusters() -> None:
    problem = Matmul(512, 520, 512, "float16")
    chosen = KernelChoice(KERNELS[13], RoleTile.parse("64x128x64/1x1"), 2)
    built = [chosen.build(problem, Setting(H200, straddles)) for straddles in (True, False)]
    assert ["cta_id_in_cluster" in str(function) for function in built] == [True, False]


def test_no_choice_for_another_target() -> None:
    with pytest.raises(IllegalTile, match="sm_80 has no wgmma fed by TMA"):
        choose(Matmul(64, 64, 64, "float16"), replace(H200, target=machine_for("sm_80").target()))


# How operands lie


def form(name: str, sizes: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: str = "float16") -> Form:
    """A form, contiguous unless strides say otherwise."""
    return Form(name, sizes, strides or (*(int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))),), dtype)


@pytest.mark.parametrize(
    ("b", "layout", "n", "k"),
    [
        (form("b", (64, 96)), "nn", 96, 64),
        (form("b", (64, 96), (1, 64)), "nt", 96, 64),
        (form("b", (63, 95)), "nn", 96, 64),
        (form("b", (63, 95), (1, 64)), "nt", 95, 64),
        (form("b", (64, 1)), "nt", 1, 64),  # both: as columns it need not be copied
        (form("b", (1, 96), (1, 1)), "nn", 96, 8),
        (form("b", (64, 96), (104, 1)), "nn", 96, 64),
    ],
)
def test_layout_and_sizes_of_the_kernel(b: Form, layout: str, n: int, k: int) -> None:
    operands = arrange(form("a", (32, b.sizes[0])), b, "float16")
    problem = operands.problem
    assert (problem.layout, problem.m, problem.n, problem.k) == (layout, 32, n, k)
    assert operands.shape == (32, b.sizes[1])


# The call, with stand-ins


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch that sees one GPU."""
    made = torch_stand_in()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture
def library(torch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A driver that multiplies, and kernels that are lowered, not compiled."""
    made = Library()
    _use(made, monkeypatch)
    _forget()
    yield made
    _forget()


def _forget() -> None:
    for cache in (api.prepared, api._loaded, api.gpu_machine):
        cache.cache_clear()


def _simple(_problem: Matmul, _machine: Machine) -> KernelChoice:
    """Step 12's kernel for all: it is built fast, and is given the same matrices."""
    return KernelChoice(KERNELS[12], RoleTile.parse("64x64x64/1x1"), 4)


PLANS: dict[Any, LaunchPlan] = {}  # of kernels for the stand-in's GPU, each lowered once a process


def _use(
    library: Library, monkeypatch: pytest.MonkeyPatch, choosing: Callable[..., KernelChoice | Streamed] = _simple
) -> None:
    def chosen(problem: Matmul, machine: Machine, conditions: Conditions) -> KernelChoice | Streamed | Unaligned:
        unpadded = conditions.unpadded
        if choosing is _simple and unpadded and unpadded.problem.k <= MOST_STEPS:
            return Unaligned(fastest_tile(unpadded.problem, 132)[0])
        if choosing is _simple and conditions.batch == 1 and not conditions.any_rows:
            return _simple(problem, machine)
        return choose(problem, machine, conditions)

    def lowered(choice: KernelChoice | Streamed, problem: Matmul, setting: Setting, _compiler: Any) -> CompiledKernel:
        key = (str(choice), problem, replace(setting, machine=None))
        if key not in PLANS:
            module = tvm.IRModule({"main": choice.build(problem, setting)})
            PLANS[key] = launch_plan(generate(module, setting.machine.target, choice.PIPELINE))
        return CompiledKernel(PLANS[key], library.add(PLANS[key], problem, setting.finish))

    found = Driver(library)
    monkeypatch.setattr(api, "cuda_driver", lambda: found)
    monkeypatch.setattr(api, "choose", chosen)
    monkeypatch.setattr(api, "build_kernel", lowered)
    monkeypatch.setattr(api, "require_compiler", lambda: None)


def operand(seed: int, sizes: tuple[int, int], lies: str = "dense", dtype: str = "float16") -> Tensor:
    """Whole numbers that lie "dense", "transposed", in "wide" rows, or "both"."""
    rows, columns = sizes if lies in ("dense", "wide") else sizes[::-1]
    extra = 24 - columns % 8 if lies in ("wide", "both") else 0
    made = Tensor.integers(seed, (rows, columns + extra), dtype)[:, :columns]
    return made if lies in ("dense", "wide") else made.T


def with_gaps(rows: int, columns: int) -> Tensor:
    """An output of columns that TMA stores too many of, with a gap between its rows."""
    return Tensor.empty((rows, columns + 8 - columns % 8), "float16")[:, :columns]


def product_of(a: Any, b: Any, dtype: Any) -> np.ndarray:
    """The product in float64, rounded once."""
    return (a.array.astype(np.float64) @ b.array.astype(np.float64)).astype(dtype).astype(np.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize("b_lies", ["dense", "transposed", "wide", "both"])
@pytest.mark.parametrize("shape", [(64, 128, 64), (33, 17, 50), (1, 1, 1), (40, 95, 63), (24, 1, 9), (1, 72, 1)])
def test_kernels_get_the_right_matrices(
    library: Library, shape: tuple[int, int, int], b_lies: str, out_dtype: str
) -> None:
    m, n, k = shape
    a, b = operand(0, (m, k), "wide" if b_lies == "wide" else "dense"), operand(1, (k, n), b_lies)
    outs = [None, Tensor.empty((m, n), out_dtype), Tensor.empty((m, n + 24 - n % 8), out_dtype)[:, :n]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedCopy)
        for out in outs:
            for _ in range(2):
                got = matmul(a, b, out=out, out_dtype=tensor_dtype(out_dtype))
                assert out is None or got is out
                assert got.shape == (m, n)
                assert (got.array.astype(np.float64) == product_of(a, b, got.array.dtype)).all()


def tensor_dtype(name: str) -> Any:
    """A dtype of the stand-in's."""
    return Tensor.empty((1, 1), name).dtype


def test_dtype_of_the_result(library: Library) -> None:
    a, b = (Tensor.integers(seed, (16, 16), "bfloat16") for seed in (0, 1))
    assert matmul(a, b).array.dtype == ml_dtypes.bfloat16
    assert matmul(a, b, out=Tensor.empty((16, 16), "float32")).array.dtype == np.float32
    odd = operand(2, (16, 15), "transposed", "bfloat16")  # stored from registers: TVM's host code calls these uint16
    assert (matmul(a, odd).array.astype(np.float64) == product_of(a, odd, ml_dtypes.bfloat16)).all()


def test_the_chosen_kernel_gets_its_workspaces(
    library: Library, torch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last wave that is cut: each stream's launches have the same flags, those of a capture others."""
    _use(library, monkeypatch, choose)
    only_kernels_of(monkeypatch, "others")
    a, b = operand(0, (512, 8192)), operand(1, (8192, 64), "transposed")
    for stream, capturing in ((0, False), (0, False), (5, False), (5, True), (5, True), (0, False)):
        torch.cuda.stream, torch.cuda.capturing = stream, capturing
        assert (matmul(a, b).array.astype(np.float64) == product_of(a, b, np.float16)).all()
    assert library.kernels[0][0].overlaps
    first, again, other, captured, captured_again, last = library.flags
    assert first == again == last
    assert captured == captured_again
    assert len({first, other, captured}) == 3


def test_what_is_said_of_three_copies_has_room_in_a_record(library: Library) -> None:
    a, b = (Tensor.empty((8191, 8191), "float16") for _ in range(2))
    out = with_gaps(8191, 8191)
    (said,) = {describe(a, b, out=out)}
    assert said.count("copies") == 3
    assert msgspec.convert(said, Sentence) == said


def test_one_kernel_for_all_tensors_of_a_shape(library: Library) -> None:
    for seed in range(3):
        matmul(operand(seed, (64, 64)), operand(seed, (64, 64)))
    matmul(operand(0, (64, 64), "wide"), operand(1, (64, 64)))
    assert library.count("cuModuleLoadData") == 1
    matmul(operand(0, (64, 64)), operand(1, (64, 64), "transposed"))
    assert library.count("cuModuleLoadData") == 2


def test_nothing_is_encoded_for_the_same_tensors(library: Library) -> None:
    a, b, out = operand(0, (64, 64)), operand(1, (64, 64)), Tensor.empty((64, 64), "float16")
    for _ in range(3):
        matmul(a, b, out=out)
    assert library.count("cuTensorMapEncodeTiled") == 3
    assert library.count("cuLaunchKernelEx") == 3


def test_launches_go_to_the_current_stream(library: Library, torch: SimpleNamespace) -> None:
    a, b = operand(0, (64, 64)), operand(1, (64, 64))
    matmul(a, b)
    torch.cuda.stream = 4711
    matmul(a, b)
    assert library.streams == [0, 4711]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_is_one_launch(library: Library, batch: int, transposed: bool) -> None:
    a, b = Tensor.integers(0, (batch, 40, 72), "float16"), Tensor.integers(1, (batch, 72, 24), "float16")
    bias = Tensor.integers(2, (24,), "float16")
    if transposed:
        b = Tensor(Tensor.integers(1, (batch, 24, 72), "float16").array.swapaxes(1, 2), "float16")
    apart = Tensor.empty((batch, 48, 32), "float16")[:, :40, :24]
    for number, out in enumerate((None, Tensor.empty((batch, 40, 24), "float16"), apart)):
        got = matmul(a, b, out=out, bias=bias)
        assert got.shape == (batch, 40, 24)
        wanted = a.array.astype(np.float64) @ b.array.astype(np.float64) + bias.array
        assert (got.array.astype(np.float64) == wanted).all()
        assert library.count("cuLaunchKernelEx") == number + 1


# Operands' sizes, a slice of each that is given, and launches: of a product, and of copies of rows before it.
BATCHES: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...], Any, int]] = {
    "rows of any length": ((3, 5, 70), (), (3, 70, 9), (), 1),
    "long rows of any length": ((3, 5, 301), (), (3, 301, 9), (), 2),
    "results of any length": ((3, 5, 304), (), (3, 304, 9), (), 2),
    "one row each": ((3, 1, 301), (), (3, 301, 16), (), 2),
    "one column": ((3, 5, 304), (), (3, 304, 1), (), 1),
    "one b": ((3, 5, 304), (), (304, 16), (), 1),
    "one b, rows with gaps": ((3, 5, 304), (..., slice(4), slice(None)), (304, 16), (), 1),
    "one a": ((5, 304), (), (3, 304, 16), (), 1),
    "one a of any length": ((5, 301), (), (3, 301, 16), (), 2),
    "one of each": ((1, 5, 304), (), (1, 304, 16), (), 1),
    "heads": ((2, 5, 3, 304), (), (2, 304, 3, 16), (), 1),
    "heads of one batch": ((5, 3, 304), (), (304, 3, 16), (), 1),
    "heads of the same b": ((2, 3, 5, 304), (), (2, 1, 304, 16), (), 1),
    "a b for each head": ((2, 3, 5, 304), (), (3, 304, 16), (), 1),
    "more dimensions of b": ((3, 5, 304), (), (2, 3, 304, 16), (), 1),
    "every other": ((6, 5, 304), (slice(None, None, 2),), (3, 304, 16), (), 1),
    "a part of unaligned rows": ((3, 5, 301), (..., slice(100)), (3, 100, 16), (), 1),
}


HEADS = ("heads", "heads of one batch")  # of tokens, in (batch, tokens, heads, columns)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_multiplied_however_they_lie(library: Library, name: str, transposed: bool) -> None:
    a_sizes, a_part, b_sizes, b_part, launches = BATCHES[name]
    a, b = Tensor.integers(0, a_sizes, "float16")[a_part], Tensor.integers(1, b_sizes, "float16")[b_part]
    if name in HEADS:
        a, b = (Tensor(each.array.swapaxes(-3, -2), "float16") for each in (a, b))
    if transposed:
        b = Tensor(np.ascontiguousarray(b.array.swapaxes(-1, -2)), "float16")
        b = Tensor(b.array.swapaxes(-1, -2), "float16")
    wanted = a.array.astype(np.float64) @ b.array.astype(np.float64)
    apart = Tensor.empty((*wanted.shape[:-2], wanted.shape[-2] + 1, wanted.shape[-1] + 3), "float16")
    outs = [None, Tensor.empty(wanted.shape, "float16"), apart[..., : wanted.shape[-2], : wanted.shape[-1]]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedCopy)
        for number, out in enumerate(outs):
            before = library.count("cuLaunchKernelEx")
            got = matmul(a, b, out=out)
            assert out is None or got is out
            assert got.shape == wanted.shape
            assert (got.array.astype(np.float64) == wanted).all()
            if not transposed and number < 2:
                assert library.count("cuLaunchKernelEx") - before == launches


@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_batches_that_no_kernel_reaches_are_copied_by_torch(library: Library, out_dtype: str) -> None:
    """A copy has as many matrices as it must, and what is behind a part of the output stays."""
    a = Tensor.integers(0, (2, 3, 5, 301), "float16")[..., :100]
    b = Tensor.integers(1, (2, 1, 101, 9), "float16")[:, :, :100]
    around = Tensor.empty((2, 4, 5, 10), out_dtype)
    with pytest.warns(PaddedCopy, match=r"copies at each call .*a \(6000 bytes\), b \(3600 bytes\), out \(\d+ bytes\)"):
        got = matmul(a, b, out=around[:, :3, :, :9])
    assert (got.array.astype(np.float64) == a.array.astype(np.float64) @ b.array.astype(np.float64)).all()
    assert np.isnan(around.array[:, 3]).all()
    assert np.isnan(around.array[..., 9]).all()
    assert describe(a, b).endswith("; copies a (6000 bytes), b (3600 bytes)")


@pytest.mark.parametrize("b_lies", ["dense", "transposed"])
def test_one_kernel_takes_any_number_of_rows(library: Library, b_lies: str) -> None:
    b = operand(1, (72, 136), b_lies)
    for m in (9, 40, 64, 65, 300):
        a = operand(0, (m, 72))
        assert (matmul(a, b, any_m=True).array.astype(np.float64) == product_of(a, b, np.float16)).all()
    assert library.count("cuModuleLoadData") == 1
    assert [grid[0] for grid in library.grids] == [3, 3, 3, 6, 15]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("any_m", [False, True])
@pytest.mark.parametrize("b_lies", ["dense", "transposed"])
def test_few_rows_are_streamed_where_matrices_have_no_gaps(
    library: Library, monkeypatch: pytest.MonkeyPatch, b_lies: str, any_m: bool
) -> None:
    """A kernel without tensor maps; with gaps in an operand or the output one that has them, and nothing is copied."""
    _use(library, monkeypatch, choose)
    only_kernels_of(monkeypatch, "others")
    m, n, k = 2, 1024, 2048
    a, b = operand(0, (m, k)), operand(1, (k, n), b_lies)
    apart = Tensor.empty((m, n + 8), "float16")[:, :n]
    wide = "both" if b_lies == "transposed" else "wide"
    for rows, weights, out, streamed in (
        (a, b, None, True),
        (operand(0, (m, k), "wide"), b, None, False),
        (a, operand(1, (k, n), wide), None, False),
        (a, b, apart, False),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error", PaddedCopy)
            got = matmul(rows, weights, out=out, any_m=any_m)
        assert (got.array.astype(np.float64) == product_of(rows, weights, np.float16)).all()
        assert (describe(rows, weights, out=out, any_m=any_m) == str(Streamed())) == streamed


def test_any_number_of_rows_has_few_tiles() -> None:
    tiles = {
        choose(Matmul(m, 4096, 4096, "float16"), H200, Conditions(any_rows=True)).tile for m in range(1, 10000, 97)
    }
    assert 1 < len(tiles) <= 4


def test_a_batch_takes_the_tile_that_fills_the_gpu() -> None:
    problem = Matmul(256, 256, 1024, "float16")
    one, many = (choose(problem, H200, Conditions(batch)) for batch in (2, 64))
    assert one.tile.block_m * one.tile.block_n < many.tile.block_m * many.tile.block_n


@pytest.mark.parametrize("bias_dtype", ["float16", "float32"])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (95, 64), (95, 320)])
def test_factor_bias_and_activation_reach_the_kernel(library: Library, n: int, k: int, bias_dtype: str) -> None:
    """With 95 columns and a long reduction the kernel has 96, and the bias is copied to as many."""
    a, b, bias = operand(0, (40, k)), operand(1, (k, n)), Tensor.integers(2, (n,), bias_dtype)
    wanted = np.maximum(0.5 * (a.array.astype(np.float64) @ b.array.astype(np.float64)) + bias.array, 0)
    for out in (None, Tensor.empty((40, n), "float16")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PaddedCopy)
            got = matmul(a, b, bias=bias, activation="relu", alpha=0.5, out=out)
        assert (got.array.astype(np.float64) == wanted.astype(np.float16)).all()
    assert library.count("cuModuleLoadData") == (2 if k == 320 else 1)  # the other copies rows


def test_each_finish_is_a_kernel_of_its_own(library: Library) -> None:
    a, b, bias = operand(0, (64, 64)), operand(1, (64, 64)), Tensor.integers(2, (64,), "float16")
    for given in ({}, {"alpha": 2}, {"bias": bias}, {"activation": "relu"}, {"alpha": 1}, {"bias": bias}):
        matmul(a, b, **given)
    assert library.count("cuModuleLoadData") == 4


def test_another_current_gpu_is_said_of_known_tensors(library: Library, torch: SimpleNamespace) -> None:
    a, b = operand(0, (64, 64)), operand(1, (64, 64))
    matmul(a, b)
    torch.cuda.device = 1
    with pytest.raises(WrongDevice, match=r"a is on another GPU .*\(got cuda:0, limit cuda:1\)"):
        matmul(a, b)


def test_gradients_are_refused_of_known_tensors(library: Library) -> None:
    a, b = operand(0, (8, 8)), operand(1, (8, 8))
    matmul(a, b)
    with pytest.raises(RuntimeError, match="records no gradients"):
        matmul(learned(), b, out=dense(8, 8))


def test_autograd_is_told_of_what_is_written(library: Library, torch: SimpleNamespace) -> None:
    a, b, out = operand(0, (8, 8)), operand(1, (8, 8)), dense(8, 8)
    matmul(a, b)
    assert torch.written == []
    matmul(a, b, out=out)
    assert torch.written == [out]


def test_copies_are_said_once_with_their_bytes(library: Library) -> None:
    a, b, out = operand(0, (40, 319)), operand(1, (319, 95)), with_gaps(40, 95)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            matmul(a, b, out=out)
    (one,) = said
    assert (one.category, one.filename) == (PaddedCopy, __file__)
    assert "a product 40x95x319 of float16 copies at each call what" in str(one.message)
    assert "a (40 rows of 638 bytes in 25600 bytes), b (319 rows of 190 bytes in 81664 bytes)" in str(one.message)
    assert "out (40 rows of 192 bytes in 10240 bytes)" in str(one.message)


@pytest.mark.parametrize("copied", [("a", "b"), ("b",)])
def test_copies_are_one_launch_before_the_product_and_one_behind_it(library: Library, copied: tuple[str, ...]) -> None:
    k = 319 if "a" in copied else 320
    a, b, out = operand(0, (40, k)), operand(1, (k, 95)), with_gaps(40, 95)
    for calls in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PaddedCopy)
            got = matmul(a, b, out=out)
        assert (got.array.astype(np.float64) == product_of(a, b, np.float16)).all()
        assert library.count("cuLaunchKernelEx") == 3 * calls
    copying, product = (
        next(kernel for kernel in library.kernels if (kernel[1] is None) == one) for one in (True, False)
    )
    assert copying[0].overlaps
    assert library.grids[0] != copying[0].grid
    assert library.count("cuModuleLoadData") == 2
    assert product[1].n == 96


@pytest.mark.sampled(3)
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(40, 95, 319), (1, 95, 319), (33, 130, 328), (7, 3, 513)])
def test_small_results_are_stored_to_rows_of_any_length(
    library: Library, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], out_dtype: str
) -> None:
    """By a kernel that stores elements: also where an output begins anywhere, not where its rows have gaps."""
    _use(library, monkeypatch, choose)
    only_kernels_of(monkeypatch, "tile")
    m, n, k = shape
    a, b, bias = operand(0, (m, k)), operand(1, (k, n)), Tensor.integers(2, (n,), "float32")
    apart = Tensor.empty((m, n + 24 - n % 8), out_dtype)[:, :n]
    begins_anywhere = Tensor.empty((m, n), out_dtype, offset=4)
    for number, out in enumerate((None, Tensor.empty((m, n), out_dtype), begins_anywhere, apart)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PaddedCopy)
            got = matmul(a, b, bias=bias, out=out, out_dtype=tensor_dtype(out_dtype))
            said = describe(a, b, out=out)
        wanted = (a.array.astype(np.float64) @ b.array.astype(np.float64) + bias.array).astype(got.array.dtype)
        assert (got.array == wanted).all()
        if number < 3:
            assert "copies out" not in said
            assert library.count("cuLaunchKernelEx") == 2 * (number + 1)
    assert "copies out" in said or m == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("b_lies", ["dense", "transposed"])
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(40, 95, 63), (1, 95, 63), (65, 7, 247), (33, 130, 255)])
def test_operands_of_a_short_reduction_are_read_as_they_lie(
    library: Library, shape: tuple[int, int, int], out_dtype: str, b_lies: str
) -> None:
    """By one launch, without a copy; matrices may begin at any element."""
    m, n, k = shape
    dtype = "float16" if out_dtype == "float32" else out_dtype
    first = 4 if out_dtype == "float32" else 2
    a, b = Tensor.integers(0, (m, k), dtype, offset=6), operand(1, (k, n), b_lies, dtype)
    for out in (None, Tensor.empty((m, n), out_dtype, offset=first)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", PaddedCopy)
            got = matmul(a, b, out=out, out_dtype=tensor_dtype(out_dtype))
            said = describe(a, b, out=got)
        assert "rows as they lie" in said
        assert (got.array.astype(np.float64) == product_of(a, b, got.array.dtype)).all()
    assert library.count("cuLaunchKernelEx") == 2
    assert library.count("cuModuleLoadData") == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("b_lies", ["dense", "transposed"])
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "shifts", "launches"),
    [
        ((40, 95, 327), "AB", 1),
        ((1, 95, 257), "B", 1),
        ((2, 95, 257), "B", 2),
        ((65, 7, 333), "A", 2),
        ((70, 136, 259), "A", 1),
    ],
)
def test_rows_of_a_long_reduction_are_shifted(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    shifts: str,
    launches: int,
    out_dtype: str,
    b_lies: str,
) -> None:
    """Those of operands that begin at any element; what TMA loads instead is copied, if it must be."""
    shifting = Shifting(ClusterTile.parse("64x64x64/1x1/1x1"), shifts)
    monkeypatch.setattr(choice_module, "fastest_shifting", lambda *_: (shifting, 0.0))
    _use(library, monkeypatch, choose)
    (m, n, k), dtype = shape, "float16" if out_dtype == "float32" else out_dtype
    if b_lies == "transposed" and "B" not in shifts and n % 8 == 0:
        launches = 2  # B's rows have k elements then
    a = Tensor.integers(0, (m, k), dtype, offset=6 if "A" in shifts else 0)
    b = operand(1, (k, n), b_lies, dtype)
    begins_anywhere = Tensor.empty((m, n), out_dtype, offset=4 if n % 8 else 0)
    for calls, out in enumerate((None, begins_anywhere), 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PaddedCopy)
            got = matmul(a, b, out=out, out_dtype=tensor_dtype(out_dtype))
            said = describe(a, b, out=got)
        assert f"rows of {' and '.join(shifts)} shifted" in said
        assert ("copies" in said) == (launches > 1)
        assert (got.array.astype(np.float64) == product_of(a, b, got.array.dtype)).all()
        assert library.count("cuLaunchKernelEx") == launches * calls


@pytest.mark.parametrize("b_lies", ["dense", "transposed"])
@pytest.mark.parametrize(
    ("shape", "gaps", "shifted"), [((48, 95, 327), "a", "B"), ((49, 95, 327), "b", "A"), ((1, 95, 327), "", "B")]
)
def test_rows_with_gaps_that_tma_steps_over_are_not_shifted(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    gaps: str,
    shifted: str,
    b_lies: str,
) -> None:
    """TMA loads them as they lie beside the other operand, which is shifted: nothing is copied."""
    fastest = choice_module.fastest_shifting
    monkeypatch.setattr(choice_module, "fastest_shifting", lambda *given: (fastest(*given)[0], 0.0))
    _use(library, monkeypatch, choose)
    m, n, k = shape
    a = operand(0, (m, k), "wide" if gaps == "a" else "dense")
    wide = "wide" if b_lies == "dense" else "both"
    b = operand(1, (k, n), wide if gaps == "b" else b_lies)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PaddedCopy)
        got = matmul(a, b)
        said = describe(a, b)
    assert f"rows of {shifted} shifted" in said
    assert (got.array.astype(np.float64) == product_of(a, b, got.array.dtype)).all()
    assert library.count("cuLaunchKernelEx") == 1


@pytest.mark.parametrize("lies", ["a long reduction", "gaps", "any number of rows", "rows that TMA reads"])
def test_other_operands_are_not_read_as_they_lie(library: Library, lies: str) -> None:
    k, n = (257 if lies == "a long reduction" else 64), (96 if lies == "rows that TMA reads" else 95)
    a, b = operand(0, (40, k), "wide" if lies == "gaps" else "dense"), operand(1, (k, n))
    any_m = lies == "any number of rows"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedCopy)
        assert "rows as they lie" not in describe(a, b, any_m=any_m)


def test_outputs_of_fewer_columns_than_the_kernel_has_are_stored_as_they_lie() -> None:
    """Not those of rows with gaps, or of as many columns."""
    operands = arrange(form("a", (3072, 64)), form("b", (64, 511)), "float16")
    assert operands.narrows()
    assert not operands.narrows(MatrixRows(3072, 511, 1024))
    assert not arrange(form("a", (8, 64)), form("b", (64, 512)), "float16").narrows()


def test_a_call_is_described(library: Library) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedCopy)
        odd = describe(operand(0, (40, 319)), operand(1, (319, 95)), out=with_gaps(40, 95))
    assert odd.split("; ")[1:] == [
        "copies a (40 rows of 638 bytes in 25600 bytes)",
        "copies b (319 rows of 190 bytes in 81664 bytes)",
        "copies out (40 rows of 192 bytes in 10240 bytes)",
    ]
    assert "copies" not in describe(operand(0, (64, 64)), operand(1, (64, 64)))
    assert str(_simple(Matmul(64, 64, 64), H200)) == "step 12, 64x64x64/1x1, 4 stages"
    assert library.count("cuLaunchKernelEx") == 0


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_the_call_is_timed_as_a_peer(library: Library, layout: str) -> None:
    problem = Matmul(40, 95, 319, "float16", layout)
    a, b = operand(0, (40, 319)), operand(1, problem.b_shape)
    c = Tensor.empty((40, 95), "float16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedCopy)
        entrant, any_m = call_peer.enter(SimpleNamespace(problem=problem, sets=[(a, b, c)]), H200)
        entrant.run(a, b, c)
    assert "copies a (40 rows" in entrant.config
    assert (entrant.name, any_m.name) == call_peer.KIND.peers
    assert any_m.status == ("measured" if layout == "nn" else "failed")
    assert (c.array.astype(np.float64) == product_of(a, b if layout == "nn" else b.T, np.float16)).all()


def test_a_refused_call_is_a_peer_that_failed(library: Library) -> None:
    operands = [Tensor.empty((8, 8), "float64") for _ in range(3)]
    for entrant in call_peer.enter(SimpleNamespace(problem=Matmul(8, 8, 8), sets=[tuple(operands)]), H200):
        assert (entrant.status, entrant.run) == ("failed", None)
        assert "got float64 and float64" in entrant.why


def test_aligned_rows_are_not_copied(library: Library) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matmul(operand(0, (40, 63), "wide"), operand(1, (63, 95), "both"))


def test_captures_come_after_a_first_call(library: Library, torch: SimpleNamespace) -> None:
    a, b = operand(0, (64, 64)), operand(1, (64, 64))
    torch.cuda.capturing = True
    with pytest.raises(FirstCallInCapture, match=r"the first product 64x64x64 of float16 .* call it once before"):
        matmul(a, b)
    torch.cuda.capturing = False
    matmul(a, b)
    torch.cuda.capturing = True
    matmul(b, a)


# What is refused


def dense(*sizes: int, dtype: str = "float16", offset: int = 0) -> Tensor:
    """A contiguous tensor."""
    return Tensor.empty(sizes, dtype, offset=offset)


REFUSALS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "a is a ndarray; give a torch tensor", lambda: matmul(np.zeros((8, 8)), dense(8, 8))),
    (TypeError, "b is a list", lambda: matmul(dense(8, 8), [1])),
    (WrongDevice, r"b is not on a GPU \(got cpu, limit cuda\); call .cuda", lambda: matmul(dense(8, 8), on(-1))),
    (WrongDevice, r"out is not on a GPU", lambda: into(on(-1))),
    (WrongDevice, r"b is on another GPU .*\(got cuda:1, limit cuda:0\)", lambda: matmul(dense(8, 8), on(1))),
    (WrongShape, r"a is no matrix \(got shape \(8,\)", lambda: matmul(dense(8), dense(8, 8))),
    (WrongShape, r"b is no matrix \(got shape \(8,\)", lambda: matmul(dense(8, 8), dense(8))),
    (WrongShape, r"inner sizes .*\(got \(8, 16\) and \(8, 8\)", lambda: matmul(dense(8, 16), dense(8, 8))),
    (
        WrongShape,
        r"out has .*\(got \(8, 9\), limit \(8, 8\)",
        lambda: matmul(dense(8, 8), dense(8, 8), out=dense(8, 9)),
    ),
    (WrongDtype, "got float64 and float64", lambda: matmul(*[dense(8, 8, dtype="float64")] * 2)),
    (WrongDtype, "float16 and bfloat16", lambda: matmul(dense(8, 8), dense(8, 8, dtype="bfloat16"))),
    (WrongDtype, "do not store .got float64", lambda: matmul(*[dense(8, 8)] * 2, out_dtype=tensor_dtype("float64"))),
    (
        WrongDtype,
        "out has another dtype than out_dtype",
        lambda: into(dense(8, 8), out_dtype=tensor_dtype("float32")),
    ),
    (ScatteredRows, "a has no rows .*got strides 1, 16", lambda: matmul(dense(8, 16).T, dense(8, 8))),
    (ScatteredRows, "b has no rows", lambda: matmul(dense(8, 8), dense(8, 16)[:, ::2])),
    (ScatteredRows, "got strides 0, 1", lambda: matmul(repeated(), dense(8, 8))),
    (UnalignedOperand, "a is a part .*got rows 34 bytes apart", lambda: matmul(dense(8, 17)[:, :8], dense(8, 8))),
    (UnalignedOperand, "b is a part", lambda: matmul(dense(8, 8), dense(8, 17)[:, :8].T)),
    (
        UnalignedOperand,
        "out is a part",
        lambda: matmul(dense(8, 8), dense(8, 8), out=dense(8, 17)[:, :8]),
    ),
    (
        UnalignedOperand,
        "a begins .*2 bytes beyond a multiple of 16",
        lambda: matmul(dense(8, 8, offset=2), dense(8, 8)),
    ),
    (UnalignedOperand, "b begins .*8 bytes", lambda: matmul(dense(8, 8), dense(8, 8, offset=8))),
    (UnalignedOperand, "out begins", lambda: into(dense(8, 8, offset=4))),
    (OverlappingOutput, "out and a are in the same memory", lambda: shared(0)),
    (OverlappingOutput, "out and b are in the same memory", lambda: shared(1)),
    (
        WrongShape,
        r"not batches of as many .*\(2, 8, 8\) and \(3, 8, 8\)",
        lambda: matmul(dense(2, 8, 8), dense(3, 8, 8)),
    ),
    (WrongShape, r"not batches of as many .*\(0, 8, 8\)", lambda: matmul(dense(0, 8, 8), dense(8, 8))),
    (
        WrongShape,
        r"inner sizes .*\(2, 8, 8\) and \(2, 16, 8\)",
        lambda: matmul(dense(2, 8, 8), dense(2, 16, 8)),
    ),
    (
        WrongShape,
        r"out has .*\(got \(8, 8\), limit \(2, 8, 8\)",
        lambda: matmul(dense(2, 8, 8), dense(8, 8), out=dense(8, 8)),
    ),
    (
        ScatteredRows,
        "out has matrices that lie upon",
        lambda: matmul(dense(2, 8, 8), dense(2, 8, 8), out=dense(1, 8, 8).expand((2, 8, 8))),
    ),
    (ScatteredRows, "a has no rows", lambda: matmul(scattered(), dense(2, 8, 8))),
    (
        IllegalWorkload,
        "of any number of rows leave by TMA",
        lambda: finished(any_m=True, out_dtype=tensor_dtype("float32")),
    ),
    (
        IllegalWorkload,
        "a batch has a fixed number of rows .got batch 2",
        lambda: matmul(dense(2, 8, 8), dense(2, 8, 8), any_m=True),
    ),
    (TypeError, "bias is a int; give a torch tensor", lambda: finished(bias=3)),
    (WrongShape, r"bias has not one .*got \(9,\), limit \(8,\)", lambda: finished(bias=dense(9))),
    (WrongShape, r"bias has not one .*got \(1, 8\)", lambda: finished(bias=dense(1, 8))),
    (ScatteredRows, "bias' elements are not side by side .got 2", lambda: finished(bias=dense(16)[::2])),
    (
        WrongDtype,
        r"bias of another .*got bfloat16, limit float16 \| f",
        lambda: finished(bias=dense(8, dtype="bfloat16")),
    ),
    (WrongDevice, "bias is not on a GPU", lambda: finished(bias=Tensor.empty((8,), "float16", -1))),
    (IllegalWorkload, "unknown activation .got 'tanh'", lambda: finished(activation="tanh")),
    (TypeError, "alpha is a Tensor; give a number", lambda: finished(alpha=dense(1))),
    (IllegalWorkload, "alpha is no finite number .got nan", lambda: finished(alpha=float("nan"))),
    (OverlappingOutput, "out and bias are in the same memory", lambda: over_bias()),
    (IllegalWorkload, "illegal size k .got 0", lambda: matmul(dense(8, 0), dense(0, 8))),
    (IllegalWorkload, "m·n elements .*limit below 2147483648", lambda: matmul(huge(), huge().T)),
    (RuntimeError, "with out records no gradients", lambda: matmul(learned(), dense(8, 8), out=dense(8, 8))),
]


def into(out: Tensor, **more: Any) -> Tensor:
    """An 8 × 8 product into a tensor."""
    return matmul(dense(8, 8), dense(8, 8), out=out, **more)


def scattered() -> Tensor:
    """A batch of matrices whose columns are contiguous."""
    return Tensor(dense(2, 16, 8).array.swapaxes(1, 2), "float16")[:, :, :8]


def finished(**how: Any) -> Tensor:
    """An 8 × 8 product with more done to it."""
    return matmul(dense(8, 8), dense(8, 8), **how)


def over_bias() -> Tensor:
    """A product onto its own bias."""
    out = dense(8, 8)
    return finished(bias=out[1], out=out)


def on(device: int) -> Tensor:
    """An 8 × 8 tensor elsewhere."""
    return Tensor.empty((8, 8), "float16", device)


def repeated() -> Tensor:
    """Eight times the same row."""
    return Tensor(np.broadcast_to(dense(1, 8).array, (8, 8)), "float16")


def huge() -> Tensor:
    """Rows enough that a product with as many columns is beyond 31 bits; its memory is one row's."""
    row = dense(1, 8).array
    return Tensor(np.lib.stride_tricks.as_strided(row, (2**16, 8), (16, 2), writeable=False), "float16")


def learned() -> Tensor:
    """A tensor that requires gradients."""
    made = dense(8, 8)
    made.requires_grad = True
    return made


def shared(place: int) -> Tensor:
    """A product whose output begins within a (0) or b (1): both are rows of one matrix, the other operand is not."""
    memory, operands = dense(32, 8), [dense(8, 8), dense(8, 8)]
    operands[place] = memory[:8]
    return matmul(*operands, out=memory[4:12])


@pytest.mark.parametrize(("kind", "message", "call"), REFUSALS, ids=[message for _, message, _ in REFUSALS])
def test_bad_input_is_named(library: Library, kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message):
        call()
    assert library.count("cuLaunchKernelEx") == 0


def test_neighbouring_memory_does_not_overlap(library: Library) -> None:
    memory = dense(24, 8)
    matmul(memory[:8], memory[8:16], out=memory[16:])
    assert library.count("cuLaunchKernelEx") == 1


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_stand_in(gpus=0))
    with pytest.raises(UnsupportedGpu, match="there is no GPU that torch sees"):
        matmul(on(-1), on(-1))


def test_another_gpu_is_said(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(Library((7, 5)), monkeypatch)
    with pytest.raises(UnsupportedGpu, match=r"Hopper's \(got sm_75, limit sm_80 or newer\); call torch.matmul"):
        matmul(dense(8, 8), dense(8, 8))


def test_a_missing_compiler_is_said(library: Library, monkeypatch: pytest.MonkeyPatch, no_compiler: None) -> None:
    from tensorir_ladder.kernels.codegen.toolchain import require_compiler

    monkeypatch.setattr(api, "require_compiler", require_compiler)
    with pytest.raises(NoCompiler, match="no CUDA compiler found"):
        matmul(dense(8, 8), dense(8, 8))


@pytest.mark.parametrize("room", ["torch_ops.call", "kernels.persistent"])
def test_importing_imports_neither_torch_nor_what_is_above(room: str) -> None:
    above = ["torch", *(f"tensorir_ladder.{name}" for name in ("harness", "steps", "reports", "emulator"))]
    check = f"import sys, tensorir_ladder.{room}; print([name for name in {above} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# On the GPU


@pytest.fixture
def real() -> Any:
    """Torch, on an sm_90."""
    torch = require_gpu()
    if torch.cuda.get_device_capability() != api.HOPPER:
        pytest.skip("no sm_90")
    return torch


def random(torch: Any, seed: int, sizes: tuple[int, int], lies: str, dtype: str) -> Any:
    """Normal values that lie as those of :func:`operand`."""
    rows, columns = sizes if lies in ("dense", "wide") else sizes[::-1]
    extra = 24 - columns % 8 if lies in ("wide", "both") else 0
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn((rows, columns + extra), generator=generator, device="cuda").to(getattr(torch, dtype))
    return made[:, :columns] if lies in ("dense", "wide") else made[:, :columns].T


def check_real(torch: Any, got: Any, a: Any, b: Any) -> None:
    """Close to the product in float64, by the scale of its elements and the rounding of the result."""
    wanted = a.double() @ b.double()
    tolerance = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-16}[got.dtype]
    error = float((got.double() - wanted).abs().max())
    assert error <= tolerance * float(wanted.abs().max()) + 1e-5 * a.shape[1] ** 0.5


GPU_SHAPES = [
    (256, 512, 320),
    (1, 1, 1),
    (33, 17, 50),
    (300, 264, 200),
    (1, 4095, 4097),
    (1023, 1025, 513),
    (129, 8, 8),
    (100, 4095, 4097),
    (4097, 100, 4095),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tensorir_ladder.torch_ops.errors.PaddedCopy")
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("b_lies", ["dense", "transposed", "wide", "both"])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_products_are_right(real: Any, shape: tuple[int, int, int], b_lies: str, dtype: str, out_dtype: str) -> None:
    m, n, k = shape
    a = random(real, 0, (m, k), "wide" if b_lies == "both" else "dense", dtype)
    b = random(real, 1, (k, n), b_lies, dtype)
    kind = getattr(real, out_dtype)
    surrounded = real.full((m, n + 24 - n % 8), 7.0, device="cuda", dtype=kind)
    for out in (None, real.full((m, n), float("nan"), device="cuda", dtype=kind), surrounded[:, :n]):
        check_real(real, matmul(a, b, out=out, out_dtype=kind), a, b)
    assert bool((surrounded[:, n:] == 7).all())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tensorir_ladder.torch_ops.errors.PaddedCopy")
@pytest.mark.parametrize(
    "shape", [(256, 256, 256), (200, 95, 63), (200, 95, 263), (1023, 1025, 513), (128, 64, 8192), (100, 4095, 4097)]
)
def test_a_captured_product_reads_what_is_there_when_it_is_replayed(real: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = random(real, 0, (m, k), "dense", "float16"), random(real, 1, (k, n), "dense", "float16")
    matmul(a, b)
    real.cuda.synchronize()
    graph = real.cuda.CUDAGraph()
    with real.cuda.graph(graph):
        got = matmul(a, b)
    for seed in (2, 3, 4):
        a.copy_(random(real, seed, (m, k), "dense", "float16"))
        graph.replay()
        real.cuda.synchronize()
        check_real(real, got, a, b)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tensorir_ladder.torch_ops.errors.PaddedCopy")
@pytest.mark.parametrize("shape", [(40, 95, 63), (1029, 1025, 201), (1023, 1025, 513), (100, 4095, 4097)])
def test_odd_operands_and_outputs_may_begin_anywhere(real: Any, shape: tuple[int, int, int]) -> None:
    """Those of rows that are copied, or stored by elements."""
    m, n, k = shape

    def beyond(first: int, seed: int, sizes: tuple[int, int]) -> tuple[Any, Any]:
        """Drawn elements so many behind the first of some memory, and the memory."""
        room = real.full((sizes[0] * sizes[1] + 16,), 7.0, dtype=real.float16, device="cuda")
        made = room[first : first + sizes[0] * sizes[1]].view(sizes)
        made.copy_(random(real, seed, sizes, "dense", "float16"))
        return room, made

    for first in (1, 5, 8):
        (_, a), (_, b), (room, out) = beyond(first, 0, (m, k)), beyond(3, 1, (k, n)), beyond(first, 2, (m, n))
        check_real(real, matmul(a, b, out=out), a, b)
        assert bool((room[:first] == 7).all())
        assert bool((room[first + m * n :] == 7).all())


@pytest.mark.gpu
def test_a_first_call_in_a_capture_is_refused(real: Any) -> None:
    a = random(real, 0, (104, 104), "dense", "float16")
    with pytest.raises(FirstCallInCapture), real.cuda.graph(real.cuda.CUDAGraph()):
        matmul(a, a)
    check_real(real, matmul(a, a), a, a)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(120, 136, 72), (128, 64, 8192), (1, 4096, 1000)])
def test_a_kernel_that_was_built_before_is_found_and_right(
    real: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = shape
    a, b = random(real, 0, (m, k), "dense", "float16"), random(real, 1, (k, n), "transposed", "float16")
    wanted = matmul(a, b)
    _forget()
    monkeypatch.setattr(kept, "compile_kernel", lambda *_: pytest.fail("lowered again"))
    got = matmul(a, b)
    check_real(real, got, a, b)
    assert bool((got == wanted).all())
    _forget()


@pytest.mark.gpu
def test_products_wait_for_what_is_before_them_in_the_current_stream(real: Any) -> None:
    b, stream = random(real, 1, (512, 512), "dense", "float16"), real.cuda.Stream()
    a, wanted = real.zeros_like(b), random(real, 0, (512, 512), "dense", "float16")
    matmul(a, b)
    real.cuda.synchronize()
    with real.cuda.stream(stream):
        real.cuda._sleep(20_000_000)  # some 10 ms, in which a launch in another stream would read zeros
        a.copy_(wanted)
        got = matmul(a, b)
    stream.synchronize()
    check_real(real, got, wanted, b)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tensorir_ladder.torch_ops.errors.PaddedCopy")
@pytest.mark.parametrize(
    "shape",
    [
        (256, 256, 256),
        (128, 64, 8192),
        (1024, 1024, 14336),
        (2304, 2304, 4096),
        (31, 333, 1001),
        (201, 95, 121),
        (1023, 1025, 513),
        (2301, 2303, 4097),
    ],
)
def test_products_in_a_row_read_what_the_one_before_wrote(real: Any, shape: tuple[int, int, int]) -> None:
    """Overlapped launches: the second begins while the first runs, and multiplies its result."""
    m, n, k = shape
    a, b = random(real, 0, (m, k), "dense", "bfloat16"), random(real, 1, (k, n), "dense", "bfloat16")
    c = random(real, 2, (n, k), "dense", "bfloat16")
    between, after = real.empty((m, n), dtype=real.bfloat16, device="cuda"), []
    for _ in range(20):
        between.fill_(float("nan"))
        matmul(a, b, out=between)
        after.append(matmul(between, c, out_dtype=real.float32))
    wanted = (between.double() @ c.double()).float()
    check_real(real, between, a, b)
    for got in after:
        assert float((got - wanted).abs().max()) <= 2**-12 * float(wanted.abs().max())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tensorir_ladder.torch_ops.errors.PaddedCopy")
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("bias_dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(256, 512, 320), (33, 95, 50), (128, 64, 8192), (1000, 4096, 1024)])
def test_sums_are_finished_as_torch_does(
    real: Any, shape: tuple[int, int, int], bias_dtype: str, activation: str | None
) -> None:
    m, n, k = shape
    a, b = random(real, 0, (m, k), "dense", "float16"), random(real, 1, (k, n), "dense", "float16")
    bias = random(real, 2, (1, n), "dense", bias_dtype)[0]
    wanted = 0.25 * (a.double() @ b.double()) + bias.double()
    if activation:
        wanted = getattr(real.nn.functional, activation)(wanted)
    got = matmul(a, b, bias=bias, activation=activation, alpha=0.25)
    error = float((got.double() - wanted).abs().max())
    assert error <= 2**-10 * float(wanted.abs().max()) + 1e-5 * k**0.5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tensorir_ladder.torch_ops.errors.PaddedCopy")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 256, 256, 256),
        (7, 200, 264, 72),
        (64, 512, 512, 128),
        (3, 130, 8, 1024),
        (64, 197, 197, 64),
        (16, 300, 500, 700),
        (5, 33, 65, 301),
        (40, 1, 129, 333),
    ],
)
def test_batches_are_right(real: Any, shape: tuple[int, int, int, int], transposed: bool) -> None:
    batch, m, n, k = shape
    a = random(real, 0, (batch * m, k), "dense", "float16").view(batch, m, k)
    b = random(real, 1, (batch * n, k), "dense", "float16").view(batch, n, k).transpose(1, 2)
    if not transposed:
        b = b.contiguous()
    around = real.full((batch, m + 3, n + 8), 7.0, device="cuda", dtype=real.float16)
    for out in (None, around[:, :m, :n]):
        got = matmul(a, b, out=out)
        for number in range(batch):
            check_real(real, got[number], a[number], b[number])
    assert bool((around[:, m:] == 7).all())
    assert bool((around[:, :, n:] == 7).all())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::tensorir_ladder.torch_ops.errors.PaddedCopy")
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", BATCHES)
def test_broadcast_batches_are_right(real: Any, name: str, out_dtype: str) -> None:
    a_sizes, a_part, b_sizes, b_part, _ = BATCHES[name]
    a, b = (
        random(real, seed, (int(np.prod(sizes[:-1])), sizes[-1]), "dense", "float16").view(sizes)[part]
        for seed, (sizes, part) in enumerate(((a_sizes, a_part), (b_sizes, b_part)))
    )
    if name in HEADS:
        a, b = (each.transpose(-3, -2) for each in (a, b))
    got, wanted = matmul(a, b, out_dtype=getattr(real, out_dtype)), a.double() @ b.double()
    assert float((got.double() - wanted).abs().max()) <= 2**-10 * float(wanted.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("b_lies", ["dense", "transposed"])
def test_any_number_of_rows_is_right(real: Any, b_lies: str) -> None:
    b = random(real, 1, (520, 264), b_lies, "bfloat16")
    for m in (1, 63, 64, 65, 1000, 2048, 2049, 7777):
        a = random(real, 0, (m, 520), "dense", "bfloat16")
        check_real(real, matmul(a, b, any_m=True), a, b)


@pytest.mark.gpu
def test_streams_and_graphs_beside_each_other_have_their_own_workspaces(real: Any) -> None:
    a, b = random(real, 0, (128, 8192), "dense", "float16"), random(real, 1, (8192, 64), "dense", "float16")
    wanted = matmul(a, b)
    check_real(real, wanted, a, b)
    real.cuda.synchronize()
    graph = real.cuda.CUDAGraph()
    with real.cuda.graph(graph):
        matmul(a, b)
        captured = matmul(a, b)  # in the same memory, with the flags that the first has left
    streams, results = [real.cuda.Stream() for _ in range(3)], []
    for _ in range(50):
        graph.replay()
        for stream in streams:
            with real.cuda.stream(stream):
                results.append(matmul(a, b))
    real.cuda.synchronize()
    for got in (captured, *results):
        assert float((got - wanted).abs().max()) <= 2**-10 * float(wanted.abs().max())


@pytest.mark.gpu
def test_another_thread_may_call(real: Any) -> None:
    a, results = random(real, 0, (128, 128), "dense", "float16"), []
    thread = threading.Thread(target=lambda: results.append(matmul(a, a)))
    thread.start()
    thread.join()
    check_real(real, results[0], a, a)


@pytest.mark.gpu
def test_real_tensors_are_refused_alike(real: Any) -> None:
    a = random(real, 0, (64, 64), "dense", "float16")
    for kind, call in (
        (WrongDevice, lambda: matmul(a.cpu(), a)),
        (WrongDtype, lambda: matmul(a.float(), a.float())),
        (UnalignedOperand, lambda: matmul(a.flatten()[1:4033].view(63, 64), a)),
        (OverlappingOutput, lambda: matmul(a, a, out=a)),
        (ScatteredRows, lambda: matmul(a[:, ::2], a[:32])),
        (IllegalWorkload, lambda: matmul(a[:0], a)),
    ):
        with pytest.raises(kind):
            call()
    grown = a.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="records no gradients"):
        matmul(grown, a, out=real.empty_like(a))
    with real.no_grad():
        check_real(real, matmul(grown, a), a, a)


def test_without_torch_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NoTorch, match=r"torch is not installed; .*pip install"):
        matmul([[1.0]], [[1.0]])
