"""Factor, bias and activation, done to sums before they are rounded, in the kernels of steps 12 and 13."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

from support.cases import hopper
from support.emulated_kernels import emulate
from tensorir_ladder.emulator import EmulatedProgram, TensorMap
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.fused_epilogue import ACTIVATIONS, BEYOND, PLAIN, Epilogue
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.stream_k import plan_for
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import RoleTile, SwappedTile
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE

TARGET = machine_for("sm_90a").target()
ROLES = RoleTile.parse("64x128x64/1x1")
WIDE, PARTS = RoleTile.parse("64x104x64/1x1"), SwappedTile.parse("72x128x64/1x1/2")
SMALL = RoleTile.parse("64x64x64/1x1")
HIGH, DEEP = RoleTile.parse("192x128x64/3x1"), RoleTile.parse("64x64x128/1x1")
TWO_ROWS = RoleTile.parse("128x64x64/1x1")
KERNELS: dict[str, Callable[..., Any]] = {
    "roles": lambda problem, finish: warp_specialized(problem, ROLES, 2, KernelForm(finish=finish)),
    "two row tiles": lambda problem, finish: warp_specialized(problem, TWO_ROWS, 2, KernelForm(finish=finish)),
    "swapped": lambda problem, finish: swapped(problem, PARTS, 2, KernelForm(finish=finish, overlapped=True)),
    "wide": lambda problem, finish: persistent(problem, WIDE, 2, KernelForm(finish=finish), machine=hopper(2)),
    "persistent": lambda problem, finish: persistent(problem, ROLES, 2, KernelForm(finish=finish), machine=hopper(2)),
}
REFERENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
FINISHES = [
    Epilogue(0.125, "float32", "gelu"),
    Epilogue(1.0, "", "relu"),
    Epilogue(0.5, "float16", "silu"),
    Epilogue(1.0, "bfloat16"),
]


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("shape", "layout", "out_dtype", "finish"),
    [
        *(((130, 200, 72), "nn", "float16", finish) for finish in FINISHES),
        *(((70, 131, 136), "nt", "float32", finish) for finish in FINISHES[:2]),  # with a bias, and without
    ],
    ids=str,
)
def test_results_are_those_of_float64(
    kernel: str, shape: tuple[int, int, int], layout: str, out_dtype: str, finish: Epilogue
) -> None:
    """By TMA and, of an odd number of columns in float32, from registers; ragged edges in both directions."""
    m, n, k = shape
    problem, draw = Matmul(m, n, k, "float16", layout, out_dtype), np.random.default_rng(0)
    a, b = draw.standard_normal((m, k)).astype(np.float16), draw.standard_normal(problem.b_shape).astype(np.float16)
    bias = draw.standard_normal(n).astype(numpy_dtype(finish.bias or "float32"))
    got = np.full((m, n), np.nan, numpy_dtype(out_dtype))
    emulate(KERNELS[kernel](problem, finish), {"A": a, "B": b, "C": got, "bias": bias})
    wide = b.astype(np.float64) if layout == "nn" else b.astype(np.float64).T
    wanted = finish.alpha * (a.astype(np.float64) @ wide) + (bias.astype(np.float64) if finish.bias else 0)
    wanted = REFERENCES[finish.activation](wanted)
    limit = {"float16": 2**-11, "float32": 2**-20}[out_dtype] * np.abs(wanted).max() + 1e-5
    assert float(np.abs(got.astype(np.float64) - wanted).max()) <= limit


IN_CLUSTERS: dict[str, Callable[[Matmul, Epilogue], Any]] = {
    "pairs": lambda problem, finish: warp_specialized(
        problem, RoleTile.parse("64x104x64/1x1/2x1"), 3, KernelForm(finish=finish, overlapped=True)
    ),
    "parts": lambda problem, finish: warp_specialized(
        problem, RoleTile.parse("64x104x64/1x1/1x1/3"), 3, KernelForm(finish=finish, overlapped=True)
    ),
    "exchanged parts": lambda problem, finish: swapped(problem, PARTS, 3, KernelForm(finish=finish, overlapped=True)),
    "exchanged pairs": lambda problem, finish: swapped(
        problem, SwappedTile.parse("72x64x64/1x1/1/1x2"), 3, KernelForm(finish=finish, overlapped=True)
    ),
    "results in the ring": lambda problem, finish: swapped(
        problem, SwappedTile.parse("200x128x64/1x2/1"), 5, KernelForm(finish=finish, overlapped=True)
    ),
    "upright, results in the ring": lambda problem, finish: warp_specialized(
        problem, RoleTile.parse("192x160x64/3x1/2x1"), 5, KernelForm(finish=finish, overlapped=True)
    ),
    "results that leave at once": lambda problem, finish: persistent(
        problem, RoleTile.parse("192x176x64/3x1/1x2"), 4, KernelForm(finish=finish), machine=hopper(2)
    ),
    "pairs that stay": lambda problem, finish: persistent(
        problem, RoleTile.parse("64x72x64/1x1/1x2"), 3, KernelForm(finish=finish), machine=hopper(4)
    ),
}


@pytest.mark.emulator
@pytest.mark.parametrize("kernel", IN_CLUSTERS)
def test_blocks_in_clusters_and_large_tiles_finish_their_own_results(kernel: str) -> None:
    problem, draw = Matmul(210, 200, 392, "float16", "nt"), np.random.default_rng(0)
    a, b = (draw.integers(-2, 3, sizes).astype(np.float16) for sizes in ((210, 392), (200, 392)))
    got, bias = np.full((210, 200), np.nan, np.float16), draw.integers(-9, 9, 200).astype(np.float32)
    emulate(IN_CLUSTERS[kernel](problem, Epilogue(0.5, "float32", "relu")), {"A": a, "B": b, "C": got, "bias": bias})
    assert (got == np.maximum(0.5 * (a.astype(np.float64) @ b.T.astype(np.float64)) + bias, 0)).all()


@pytest.mark.emulator
def test_helpers_sums_are_finished_once_by_the_owner() -> None:
    """Three tiles for two blocks: the last one's first k tiles are multiplied by the block that has none."""
    problem, draw = Matmul(180, 128, 512, "float16"), np.random.default_rng(0)
    function = persistent(problem, ROLES, 2, KernelForm(finish=Epilogue(0.5, "float32", "relu")), machine=hopper(2))
    assert plan_for(problem, ROLES, hopper(2)).helpers == 1
    a, b = (draw.integers(-2, 3, sizes).astype(np.float16) for sizes in ((180, 512), (512, 128)))
    got, bias = np.full((180, 128), np.nan, np.float16), draw.integers(-9, 9, 128).astype(np.float32)
    emulate(function, {"A": a, "B": b, "C": got, "bias": bias})
    assert (got == np.maximum(0.5 * (a.astype(np.float64) @ b) + bias, 0)).all()


ROUNDED: dict[str, Callable[[Matmul, Epilogue], Any]] = {
    "roles": lambda problem, finish: warp_specialized(problem, ROLES, 2, KernelForm(finish=finish)),
    "three warpgroups, two turns": lambda problem, finish: warp_specialized(
        problem, HIGH, 2, KernelForm(finish=finish)
    ),
    "persistent": lambda problem, finish: persistent(problem, ROLES, 2, KernelForm(finish=finish), machine=hopper(2)),
    "results in the ring": lambda problem, finish: warp_specialized(
        problem, RoleTile.parse("192x128x64/3x1"), 5, KernelForm(finish=finish)
    ),
    "results that leave at once": lambda problem, finish: persistent(
        problem, RoleTile.parse("192x192x64/3x1"), 4, KernelForm(finish=finish), machine=hopper(2)
    ),
    "deep": lambda problem, finish: persistent(problem, DEEP, 3, KernelForm(finish=finish), machine=hopper(3)),
}


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize("kernel", ROUNDED)
def test_a_residual_is_added_to_what_is_rounded(kernel: str, rectified: bool, dtype: str) -> None:
    """Ragged edges, helpers and owners; the sum is rounded, and its sum with the residual once more."""
    problem, draw = Matmul(200, 264, 1032, dtype, "nt"), np.random.default_rng(0)
    a, b, r = (draw.integers(-9, 10, s).astype(numpy_dtype(dtype)) for s in ((200, 1032), (264, 1032), (200, 264)))
    got = np.full((200, 264), np.nan, numpy_dtype(dtype))
    r[3, 5] = np.nan
    finish = Epilogue(residual=True, rectified=rectified)
    emulate(ROUNDED[kernel](problem, finish), {"A": a, "B": b, "C": got, "R": r})
    sums = (a.astype(np.float32) @ b.astype(np.float32).T).astype(numpy_dtype(dtype))
    want = sums.astype(np.float32) + r.astype(np.float32)
    want = (np.maximum(want, 0) if rectified else want).astype(numpy_dtype(dtype))
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_sums_without_a_residual_have_their_activation() -> None:
    with pytest.raises(IllegalWorkload, match='activation="relu"'):
        Epilogue(rectified=True)


def test_a_residual_that_cannot_be_added_is_refused() -> None:
    finish = Epilogue(residual=True)
    for problem, tile in (
        (Matmul(64, 64, 64, "float16", out_dtype="float32"), ROLES),
        (Matmul(64, 64, 64, "float16"), RoleTile.parse("64x128x64/1x2")),
        (Matmul(64, 208, 64, "float16"), RoleTile.parse("64x104x64/1x1")),  # columns of no whole panels
    ):
        with pytest.raises(IllegalWorkload, match="residual"):
            warp_specialized(problem, tile, 2, KernelForm(finish=finish))
    with pytest.raises(IllegalWorkload, match="residual"):
        warp_specialized(Matmul(64, 64, 64, "float16"), ROLES, 2, KernelForm(finish=finish), batch=2)
    with pytest.raises(IllegalWorkload, match="residual"):
        persistent(Matmul(64, 64, 64, "float16"), ROLES, 2, KernelForm(finish=finish), machine=hopper(2), blocks=2)


@pytest.mark.emulator
@pytest.mark.parametrize("m", [1, 130, 1100])
def test_a_kernel_for_any_number_of_rows_takes_this_one(m: int) -> None:
    """Do by hand what the launcher does: maps of the rows at hand, a block for each of their tiles, their number."""
    n, k, draw = 72, 40, np.random.default_rng(0)
    function = warp_specialized(Matmul(64 * 100, n, k, "float16"), SMALL, 2, KernelForm(any_rows=True))
    made = generate(tvm.IRModule({"main": function}), TARGET, TIR_PIPELINE)
    launch = launch_plan(made).of_rows(m)
    rows = {"A": MatrixRows(m, k, 2 * k), "B": MatrixRows(k, n, 2 * n), "C": MatrixRows(m, n, 2 * n)}
    parameters = (each.of(rows[each.buffer]) if isinstance(each, TensorMap) else m for each in launch.parameters)
    launch = replace(launch, parameters=tuple(parameters))
    a, b = (draw.integers(-2, 3, size).astype(np.float16) for size in ((m, k), (k, n)))
    got = np.full((m, n), np.nan, np.float16)
    EmulatedProgram("any rows", made.cuda, (launch,), ("A", "B", "C"))(a, b, got)
    assert (got == a.astype(np.float64) @ b).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernel", KERNELS)
def test_without_it_kernels_are_what_they_were(kernel: str) -> None:
    problem = Matmul(128, 128, 128, "float16")
    plain, biased = (KERNELS[kernel](problem, finish) for finish in (PLAIN, Epilogue(bias="float16")))
    assert "bias" not in str(plain)
    assert len(biased.params) == len(plain.params) + 1
    assert [parameter.name for parameter in biased.params][-1] == "bias"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"activation": "tanh"}, "unknown activation .got 'tanh', limit relu | gelu | silu"),
        ({"bias": "float64"}, "unknown dtype of a bias .got 'float64'"),
        ({"alpha": math.inf}, "alpha is no finite number .got inf"),
        ({"alpha": math.nan}, "alpha is no finite number .got nan"),
    ],
)
def test_what_there_is_not_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(IllegalWorkload, match=said.replace("|", r"\|")):
        Epilogue(**given)


def test_every_activation_has_a_reference() -> None:
    assert set(REFERENCES) == {"", *ACTIVATIONS}


def test_gelus_exponential_is_the_normal_distribution() -> None:
    x = np.concatenate([np.linspace(-12, 12, 20001), [-3e38, -1e4, -60.0, 0.0, 60.0, 3e38, np.inf, np.nan]])
    x = x.astype("float32")
    with np.errstate(all="ignore"):
        power = np.full_like(x, BEYOND[-1])
        for coefficient in map(np.float32, BEYOND[-2::-1]):
            power = power * np.abs(x) + coefficient
        beyond = np.exp2(power)
        found = (x * np.where(x < 0, beyond, 1 - beyond)).astype("float64")
    wanted = np.array([each * math.erfc(-each / math.sqrt(2)) / 2 for each in x.astype("float64")])
    near = np.isclose(found, wanted, rtol=1.5e-5, atol=0, equal_nan=True)
    assert (near | (np.abs(found - wanted) < 3e-8)).all()
    assert (np.abs(found - wanted)[np.abs(x) < 12] < 1e-6).all()
