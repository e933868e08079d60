"""Products scheduled for warpgroups, and a check of what they compute on the CPU."""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from tensorir_ladder.harness.execution import compile_serial, numpy_dtype, run_guarded
from tensorir_ladder.schedules.tensor_cores import (
    multiply_by_wgmma,
    pipeline_warpgroups,
    stage_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul

SMALL = WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1))


def scheduled(
    problem: Matmul,
    tile: WarpgroupTile = SMALL,
    stages: int = 4,
    in_flight: int = 1,
    *,
    function=None,
    wgmma: bool = True,
) -> Schedule:
    """A product scheduled by hand, for functions that are no plain matmul."""
    sch = Schedule(function or problem.prim_func())
    staged = stage_for_warpgroups(sch, sch.get_sblock("matmul"), tile)
    pipeline_warpgroups(sch, staged.loops.k_outer, stages, in_flight)
    if wgmma:
        multiply_by_wgmma(sch, staged.loops, staged.instruction)
    return sch


def check_on_cpu(
    sch: Schedule,
    problem: Matmul,
    bias: bool = False,
    batch: int = 0,
    factors: tuple[float, float] | None = None,
) -> None:
    """Run a schedule through LLVM and compare with numpy; ``factors`` are alpha and beta."""
    random, stored, out = np.random.default_rng(1), numpy_dtype(problem.dtype), numpy_dtype(problem.out_dtype)
    outer = (batch,) if batch else ()
    a = random.standard_normal((*outer, problem.m, problem.k)).astype(stored)
    b = random.standard_normal((*outer, *problem.b_shape)).astype(stored)
    added = random.standard_normal(problem.n).astype(out)
    c = random.standard_normal((problem.m, problem.n)).astype(out)
    given = (a, b, *([added] if bias else []), *([c] if factors else []))
    poisoned = np.full((*outer, problem.m, problem.n), np.nan, out)
    *_, result = run_guarded(compile_serial(sch.mod)["main"], *given, poisoned)
    other = b if problem.layout == "nn" else np.swapaxes(b, -1, -2)
    expected = a.astype(np.float64) @ other.astype(np.float64)
    expected = np.maximum(expected + added, 0) if bias else expected
    expected = factors[0] * expected + factors[1] * c.astype(np.float64) if factors else expected
    error = np.abs(result.astype(np.float64) - expected.astype(np.float64)).max()
    rounding = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5}[problem.out_dtype]
    assert error < rounding * np.abs(expected).max()


def product_of_any_rows() -> tirx.PrimFunc:
    """Write C = A · B, 264 by 136, of as many rows as the call has."""

    @T.prim_func(s_tir=True)
    def main(a: T.handle, b: T.handle, c: T.handle, m: T.int32) -> None:
        A = T.match_buffer(a, (m, 264), "float16")
        B = T.match_buffer(b, (264, 136), "float16")
        C = T.match_buffer(c, (m, 136), "float32")
        for i, j, k in T.grid(m, 136, 264):
            with T.sblock("matmul"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vk, vj])

    return main
