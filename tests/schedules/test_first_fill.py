"""Rings that are filled before the first wait: every wait for its own tile, the same results, refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tvm.s_tir import Schedule
from tvm.target import Target

from support.cases import make_case
from tensorir_ladder.harness.build import lower, lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend, emulated
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.passes import needs_of
from tensorir_ladder.schedules.pipeline import fill_before_waiting
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.tensor_cores import (
    multiply_by_wgmma,
    pipeline_warpgroups,
    stage_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul

pytestmark = pytest.mark.filterwarnings("ignore:.*more would stay empty")
TILE = WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1))


def product(k: int, stages: int, fills: bool, in_flight: int = 1, columns: int = 72) -> Schedule:
    """A product of ``k`` steps, its ring filled first or as TVM does."""
    sch = Schedule(Matmul(72, columns, k, "float16").prim_func())
    staged = stage_for_warpgroups(sch, sch.get_sblock("matmul"), TILE)
    plan = pipeline_warpgroups(sch, staged.loops.k_outer, stages, in_flight)
    if fills:
        fill_before_waiting(sch, staged.copies[0].rounds, plan)
    multiply_by_wgmma(sch, staged.loops, staged.instruction)
    return sch


def events(cuda: str) -> list[tuple[str, int]]:
    """Commits, waits with what they leave, and multiplications, in their order until the ring's loop."""
    kernel = cuda[cuda.rindex("__global__") :].split("for (int turn")[0]
    found = re.findall(r"(commit_group|wait_group_(\d+)|wgmma_m\d+)\w*\(", kernel)
    return [(name.split("_")[0], int(left or 0)) for name, left in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ahead", [False, True], ids=["our pipeline", "TVM's stock pipeline"])
@pytest.mark.parametrize(
    ("k", "stages", "in_flight"), [(64 * 16, 3, 1), (64 * 16, 5, 1), (64 * 16, 5, 0), (64 * 5, 6, 1), (64 * 2, 3, 1)]
)
def test_every_stage_is_requested_first_and_each_wait_is_for_its_own_tile(k, stages, in_flight, ahead) -> None:
    sch, k_tiles = product(k, stages, True, in_flight), k // 64
    if ahead:
        target = Target({"kind": "cuda", "arch": "sm_90a"})
        cuda = generate(type(sch.mod)({"main": lower_ahead(sch.mod["main"], target)}), target, "s_tir").cuda
    else:
        cuda = lower_schedule(sch, machine_for("sm_90a"), "first").cuda
    found = events(cuda)
    requested = sum(1 for name, _ in found if name == "commit")
    in_loop = k_tiles > min(stages, k_tiles)
    assert requested == (min(stages, k_tiles) - 1 if in_loop else k_tiles)
    assert [name for name, _ in found[:requested]] == ["commit"] * requested
    waits = [left for name, left in found if name == "wait"]
    assert waits == [requested - 1 - tile for tile in range(len(waits))]
    assert len(waits) == (in_flight if in_loop else k_tiles)


@pytest.mark.sampled(2)
@pytest.mark.emulator
@pytest.mark.parametrize(("k", "stages"), [(64 * 9, 3), (64 * 9, 4), (64 * 4, 6), (100, 3)])
def test_results_are_the_same_bit_for_bit(k: int, stages: int) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((72, k), (k, 72)))
    outputs = []
    for fills in (True, False):
        output = np.full((72, 72), np.nan, np.float16)
        emulated(lower_schedule(product(k, stages, fills), machine_for("sm_90a"), "first"))(a, b, output, seed=1)
        outputs.append(output)
    assert np.array_equal(*outputs)


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("shape", "tile", "stages", "layout", "dtype"),
    [
        ((72, 88, 200), "64x80x64/1x1", 3, "nn", "float16"),
        ((136, 200, 136), "128x176x64/2x1", 4, "nn", "float16"),
        ((200, 120, 72), "192x112x64/3x1", 4, "nn", "bfloat16"),
        ((72, 104, 520), "64x104x64/1x1", 6, "nt", "bfloat16"),
        ((72, 100, 520), "64x104x64/1x1", 6, "nn", "float16"),
        ((72, 72, 3000), "64x72x64/1x1", 3, "nn", "float16"),
        ((72, 264, 200), "64x256x64/1x4", 3, "nn", "float16"),  # the first operand is copied in one round
    ],
)
def test_the_fitted_form_is_right_with_any_width_by_the_eight(shape, tile, stages, layout, dtype) -> None:
    tile = WarpgroupTile.parse(tile)
    case = make_case(10, shape, "fitted", tile=tile, stages=stages, layout=layout, dtype=dtype)
    assert verify(lower(case), EmulatorBackend(), [3]).passed


def test_only_what_asked_for_it_is_changed() -> None:
    plain, filled = product(64 * 9, 4, False), product(64 * 9, 4, True)
    assert "a ring filled first" in needs_of(filled.mod)
    assert "a ring filled first" not in needs_of(plain.mod)
    assert events(lower_schedule(plain, machine_for("sm_90a"), "plain").cuda)[2] == ("wait", 0)  # TVM's: for all


def test_what_would_lose_its_mark_is_refused() -> None:
    sch = Schedule(Matmul(72, 72, 640, "float16").prim_func())
    staged = stage_for_warpgroups(sch, sch.get_sblock("matmul"), TILE)
    plan = pipeline_warpgroups(sch, staged.loops.k_outer, 4)
    rounds = staged.copies[0].rounds
    with pytest.raises(IllegalPipeline, match="4 iterations, 1 stages"):
        fill_before_waiting(sch, rounds, replace(plan, stages=1))
    with pytest.raises(IllegalPipeline, match="1 iterations, 4 stages"):
        fill_before_waiting(sch, sch.split(rounds, [None, 1])[1], plan)


def test_another_pipelines_plan_is_found_out_when_lowered() -> None:
    sch = Schedule(Matmul(72, 72, 64 * 9, "float16").prim_func())
    staged = stage_for_warpgroups(sch, sch.get_sblock("matmul"), TILE)
    plan = pipeline_warpgroups(sch, staged.loops.k_outer, 5)
    fill_before_waiting(sch, staged.copies[0].rounds, replace(plan, stages=3))
    multiply_by_wgmma(sch, staged.loops, staged.instruction)
    with pytest.raises(RuntimeError, match="got 4, limit 3"):
        lower_schedule(sch, machine_for("sm_90a"), "first")
