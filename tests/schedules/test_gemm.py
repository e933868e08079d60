"""alpha, beta and batches in every family of schedules: the CUDA text, run by the emulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm.s_tir import Schedule

from support.tensor_cores import tensorize_pipelined
from support.warpgroups import scheduled
from support.warps import AHEAD, SLICED, staged
from tensorir_ladder.harness.build import lower_schedule
from tensorir_ladder.harness.emulation import emulated
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.recipes import stage_contraction
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import Matmul, gemm

HOPPER = machine_for("sm_90a")
ALPHA, BETA = 1.5, -0.5


def by_threads(problem: Matmul) -> Schedule:
    """Steps 2 to 6."""
    sch = Schedule(gemm(problem, ALPHA, BETA))
    tiled = stage_contraction(
        sch, sch.get_sblock("matmul"), ThreadTile(block=(16, 32, 8), thread=(2, 4)), vectorize=True
    )
    pipeline_loop(sch, tiled.loops.k_outer, 3)
    return sch


def by_warps(problem: Matmul, slices: int = 0) -> Schedule:
    """Step 7, reading ahead or in slices."""
    sch = Schedule(gemm(problem, ALPHA, BETA))
    staged(sch, SLICED[slices] if slices else AHEAD)
    return sch


def by_tensor_cores(problem: Matmul) -> Schedule:
    """Steps 8 and 9."""
    sch = Schedule(gemm(problem, ALPHA, BETA))
    tensorize_pipelined(sch, 3)
    return sch


def by_warpgroups(problem: Matmul) -> Schedule:
    """Step 10."""
    return scheduled(problem, function=gemm(problem, ALPHA, BETA))


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("family", "dtype", "out_dtype"),
    [
        (by_threads, "float32", "float32"),
        (by_warps, "float32", "float32"),
        (lambda problem: by_warps(problem, slices=2), "float32", "float32"),
        (by_tensor_cores, "float16", "float16"),
        (by_tensor_cores, "bfloat16", "float32"),
        (by_warpgroups, "float16", "float32"),
        (by_warpgroups, "bfloat16", "float16"),
    ],
    ids=["threads", "warps", "slices", "tensor cores", "tensor cores, float32", "warpgroups, float32", "warpgroups"],
)
def test_scaled_sums_are_added_in_registers(family: Callable[[Matmul], Schedule], dtype: str, out_dtype: str) -> None:
    """One kernel, no memory of its own, every output written once; rows and columns are ragged."""
    problem = Matmul(72, 80, 200, dtype, "nn", out_dtype)
    kernel = lower_schedule(family(problem), HOPPER, "gemm")
    assert kernel.workspaces == []
    assert kernel.cuda.count("__global__") == 2  # declared and defined
    random = np.random.default_rng(3)
    shapes = ((problem.m, problem.k), problem.b_shape, (problem.m, problem.n))
    stored = map(numpy_dtype, (dtype, dtype, out_dtype))
    a, b, c = (random.standard_normal(shape).astype(kind) for shape, kind in zip(shapes, stored))
    output = np.full(c.shape, np.nan, c.dtype)
    emulated(kernel)(a, b, c, output, seed=1)
    a, b, c, output = (matrix.astype(np.float64) for matrix in (a, b, c, output))
    expected = ALPHA * a @ b + BETA * c
    rounding = 1e-6 if out_dtype == "float32" else 1e-3
    np.testing.assert_allclose(output, expected, rtol=0, atol=rounding * np.abs(expected).max())
