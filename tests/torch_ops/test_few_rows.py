"""The call's kernel for few rows or columns: right on the emulator, with all that finishes its sums."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import tvm

from support.cases import hopper
from support.estimated import only_kernels_of
from tensorir_ladder.emulator import EmulatedProgram, find_host_compiler
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.relax.rules import NotTaken
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.choice import choose
from tensorir_ladder.torch_ops.few_rows import Streamed, streams
from tensorir_ladder.torch_ops.problem import Conditions, Setting

SLOW = pytest.mark.emulator
FAST = pytest.mark.skipif(find_host_compiler() is None, reason="no C++ compiler, which the emulator needs")
H200 = hopper(name="NVIDIA H200")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FINISHES = (
    PLAIN,
    Epilogue(-0.5, "float32", "relu"),
    Epilogue(bias="float16", activation="gelu"),
    Epilogue(activation="silu"),
)
PROBLEMS = (
    Matmul(1, 96, 264, "float16", "nt"),
    Matmul(8, 40, 136, "bfloat16", "nn"),
    Matmul(3, 65, 72, "float16", "nt", "float32"),
    Matmul(77, 5, 128, "float16", "nt"),
    Matmul(50, 8, 64, "float16", "nn"),
)


def activated(x: np.ndarray, activation: str) -> np.ndarray:
    """An activation in float64."""
    if activation == "gelu":
        return x / 2 * (1 + np.vectorize(math.erf)(x / 2**0.5))
    return {"relu": np.where(x < 0, 0, x), "silu": x / (1 + np.exp(-x)), "": x}[activation]


CASES = [
    pytest.param(problem, finish, id=f"{problem.shape} {problem.layout} {finish}", marks=FAST if fast else SLOW)
    for number, problem in enumerate(PROBLEMS)
    for place, finish in enumerate(FINISHES)
    for fast in (number == place,)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("problem", "finish"), CASES)
def test_results_are_those_of_float64(problem: Matmul, finish: Epilogue) -> None:
    draw, kind = np.random.default_rng(0), DTYPES[problem.dtype]
    a, b = (draw.integers(-2, 3, shape).astype(kind) for shape in ((problem.m, problem.k), problem.b_shape))
    columns = b if problem.layout == "nn" else b.T
    columns[-1, 0] = np.nan
    bias = draw.standard_normal(problem.n).astype(DTYPES[finish.bias or "float32"])
    function = Streamed().build(problem, Setting(H200, finish=finish))
    made = generate(tvm.IRModule({"main": function}), H200.target, Streamed.PIPELINE)
    got = np.full((problem.m, problem.n), -1, DTYPES[problem.out_dtype])
    given = {"A": a, "B": b, "C": got} | ({"bias": bias} if finish.bias else {})
    launch = launch_plan(made)
    assert {parameter.buffer for parameter in launch.parameters} == set(given)
    EmulatedProgram("few rows", made.cuda, (launch,), tuple(given))(*given.values())
    sums = finish.alpha * (a.astype(np.float64) @ columns.astype(np.float64)) + (
        bias.astype(np.float64) if finish.bias else 0
    )
    wanted = activated(sums, finish.activation)
    assert (np.isnan(got.astype(np.float64)) == np.isnan(wanted)).all()
    unit = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-20}[problem.out_dtype]
    assert np.nanmax(abs(got.astype(np.float64) - wanted)) <= unit * np.nanmax(abs(wanted)) + 1e-6


def test_only_dense_operands_of_few_rows_or_columns_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    only_kernels_of(monkeypatch, "others")
    few, many = Matmul(2, 4096, 4096, "float16", "nt"), Matmul(9, 4096, 4096, "float16", "nt")
    assert choose(few, H200, Conditions(dense=True)) == Streamed()
    assert choose(Matmul(4096, 2, 4096, "float16", "nt"), H200, Conditions(dense=True)) == Streamed()
    for problem, dense, batch in ((few, False, 1), (many, True, 1), (few, True, 2)):
        assert choose(problem, H200, Conditions(batch, dense=dense)) != Streamed()
    assert [streams(problem) for problem in (few, many)] == [True, False]


def test_more_rows_are_refused() -> None:
    with pytest.raises(NotTaken, match="weights are streamed for few rows"):
        Streamed().build(Matmul(9, 64, 64, "float16"), Setting(H200))
