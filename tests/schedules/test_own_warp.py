"""Boxes brought by a warp of their own: the same results, what each side does, and all that is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.script import tirx as T
from tvm.target import Target

from support.boxes import ALONE, BELOW, BESIDE, HOPPER, kernel_of
from support.functions import check_function
from tensorir_ladder.emulator.errors import KernelFault
from tensorir_ladder.harness.build import Lowered, lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.explain import pipelined_loops
from tensorir_ladder.harness.verify import verify_launch
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.pipeline import bring_by_own_warp, explain_pipeline, lower_ahead
from tensorir_ladder.schedules.pipeline.own_warp import lower_own_warps
from tensorir_ladder.schedules.tensor_cores import (
    WarpgroupContraction,
    multiply_by_wgmma,
    pipeline_warpgroups,
    stage_for_warpgroups,
    warpgroup,
)
from tensorir_ladder.schedules.tiles import WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
TURNS = re.compile(r"^( *)for \(int turn\w* = .*?^\1\}$", re.M | re.S)
RING = Matmul(136, 152, 1224, "float16"), "128x80x64/2x1", 3


def results_of(kernel: Lowered, problem: Matmul) -> np.ndarray:
    """Run a kernel on the emulator; its results' bits."""
    random = np.random.default_rng(7)
    a, b = (random.standard_normal(shape).astype("float16") for shape in ((problem.m, problem.k), problem.b_shape))
    found = np.full((problem.m, problem.n), np.nan, "float16")
    EmulatorBackend().load(kernel)(a, b, found)
    return found.view("uint16")


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("tile", "stages", "cluster", "parts"),
    [
        ("64x80x64/1x1", 4, ALONE, 1),
        ("128x80x64/2x1", 3, BELOW, 1),
        ("40x128x64swapped/1x2", 6, (2, 2), 1),
        ("64x64x64/1x1", 7, BESIDE, 3),
        ("192x64x64/3x1", 4, ALONE, 1),
    ],
)
def test_results_are_those_of_the_first_warp_bit_for_bit(tile, stages, cluster, parts) -> None:
    problem, results = Matmul(200, 168, 712, "float16"), []
    assert WarpgroupTile.parse(tile).leaves_a_warp
    for own_warp in (True, False):
        kernel = kernel_of(problem, tile, stages, cluster, parts, own_warp=own_warp)
        results.append(results_of(kernel, problem))
    np.testing.assert_array_equal(*results)


def test_one_side_brings_and_the_other_multiplies() -> None:
    kernel = kernel_of(*RING)
    bringing, multiplying = (turn.group() for turn in TURNS.finditer(kernel.body))
    assert bringing.count("expect_tx_shared") == multiplying.count("wgmma_m64n80k64") == 3
    assert "wgmma_m64" not in bringing
    assert "arrive_in" not in bringing
    assert "bulk_tensor" not in multiplying
    assert multiplying.count("mbarrier_arrive_in") == 3
    assert "__syncthreads" not in bringing + multiplying


def test_blocks_have_a_warp_more_that_no_later_barrier_waits_for() -> None:
    kernel = kernel_of(*RING)
    assert {axis: count for axis, count in kernel.launch.items() if axis.startswith("thread")} == {
        "threadIdx.x": 288,
        "threadIdx.y": 1,
    }
    assert "__launch_bounds__(288)" in kernel.cuda
    behind = kernel.body[kernel.body.index("is_warp((uint)8)") :]
    assert "__syncthreads" not in behind
    assert behind.count("meet_256()") == 3  # behind the ring, and around the results' stores


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dropped", "fault"),
    [
        (r"mbarrier_wait\([^\n]*\n(?=[^\n]*arrive_expect)", "race|overwrites|phase"),
        (r"mbarrier_arrive_in\([^\n]*\n", "deadlock"),
    ],
    ids=["nobody waits for a free stage", "nobody says that a stage is free"],
)
def test_the_emulator_sees_what_one_side_does_not_tell_the_other(dropped, fault) -> None:
    problem, *_ = RING
    kernel = kernel_of(*RING)
    start = kernel.cuda.index("if (is_warp((uint)8)")
    changed, count = re.subn(dropped, "", kernel.cuda[start:])
    assert count
    broken = replace(kernel, cuda=kernel.cuda[:start] + changed)
    with pytest.raises(KernelFault, match=fault):
        results_of(broken, problem)


@pytest.mark.emulator
def test_operands_that_threads_copy_need_the_fence_that_boxes_do_not(monkeypatch) -> None:
    problem = RING[0]
    assert "fence.proxy.async" not in wgmma_of(kernel_of(*RING))
    copied = kernel_of(*RING, variant="fitted")
    assert "fence.proxy.async" in wgmma_of(copied)
    results_of(copied, problem)
    monkeypatch.setattr(warpgroup, "has_boxes", lambda *_: True)
    with pytest.raises(KernelFault, match="missing proxy fence"):
        results_of(kernel_of(*RING, variant="fitted"), problem)


def wgmma_of(kernel: Lowered) -> str:
    """The text of the function that issues a k tile's instructions."""
    text = kernel.cuda[kernel.cuda.index("void wgmma_m64") :]
    return text[: text.index("}")]


def staged(by_tma: bool = True) -> tuple[Schedule, WarpgroupContraction]:
    """A product by warpgroups, its loop still to be pipelined."""
    sch = Schedule(RING[0].prim_func())
    return sch, stage_for_warpgroups(sch, sch.get_sblock("matmul"), WarpgroupTile.parse(RING[1]), by_tma=by_tma)


def test_loops_whose_boxes_no_warp_of_its_own_can_bring_are_refused() -> None:
    sch, product = staged()
    before = sch.mod.script()
    with pytest.raises(IllegalPipeline, match="is not pipelined and retires no computations"):
        bring_by_own_warp(sch, product.loops.k_outer)
    assert sch.mod.script() == before
    sch, product = staged(by_tma=False)
    pipeline_warpgroups(sch, product.loops.k_outer, 3)
    with pytest.raises(IllegalPipeline, match="a loop that has no copies by TMA"):
        bring_by_own_warp(sch, product.loops.k_outer)


def test_a_block_without_room_for_a_warp_more_is_refused() -> None:
    sch = Schedule(Matmul(512, 128, 512, "float16").prim_func())
    product = stage_for_warpgroups(sch, sch.get_sblock("matmul"), WarpgroupTile.parse("256x128x64/4x2"), by_tma=True)
    pipeline_warpgroups(sch, product.loops.k_outer, 3)
    bring_by_own_warp(sch, product.loops.k_outer)
    multiply_by_wgmma(sch, product.loops, product.instruction)
    with pytest.raises(RuntimeError, match=r"no room for a warp .*1024 threads that multiply, limit at most 992"):
        lower_schedule(sch, HOPPER, "full")


@pytest.mark.emulator
def test_it_needs_no_step() -> None:
    problem, backend = RING[0], EmulatorBackend()
    sch, product = staged()
    pipeline_warpgroups(sch, product.loops.k_outer, RING[2])
    bring_by_own_warp(sch, product.loops.k_outer)
    multiply_by_wgmma(sch, product.loops, product.instruction)
    kernel = lower_schedule(sch, HOPPER, "no step")
    assert "is_warp" in kernel.body
    verify_launch(backend.load(kernel), problem, backend, kernel.label, seeds=(1, 2))
    check_function(problem.prim_func(), lower_ahead(sch.mod["main"], TARGET), TARGET)  # by the first warp


def test_what_a_warp_more_would_store_before_the_ring_is_refused() -> None:
    """The warp executes what stands there, too, by thread numbers that no buffer has room for."""

    @T.prim_func(s_tir=True)
    def main(a: T.handle) -> None:
        A = T.match_buffer(a, (128,), "float32")
        thread = T.launch_thread("threadIdx.x", 128)
        A[thread] = T.float32(0)
        if T.cuda.func_call("is_elected_to_bring", source_code="", return_type="bool"):
            T.evaluate(0)

    with pytest.raises(RuntimeError, match=r"stores before a ring .*A, in global memory, limit registers"):
        lower_own_warps(tvm.IRModule({"main": main}))


def of_ring(own_warp: bool) -> str:
    """What is said of a ring of boxes of 3 stages."""
    problem, tile, stages = RING
    kernel = kernel_of(problem, tile, stages, own_warp=own_warp)
    (loop,) = pipelined_loops(kernel)
    return explain_pipeline(kernel.schedule, loop)


def test_a_ring_of_boxes_is_explained_by_what_is_full_and_empty() -> None:
    said = of_ring(own_warp=False)
    assert "cp.async" not in said
    assert "wait_group" not in said
    body = said[said.index("body:") : said.index("epilogue:")]
    assert [line.split(": ")[-1] for line in body.splitlines()[1:] if ":" in line] == [
        "wait until its stage is full",
        "wait for the computation; its stage is empty",
        "one thread waits until its stage is empty, and loads its boxes, while there are any",
    ]
    assert "[0 .. 2]: one thread loads its boxes" in said


def test_a_producer_warp_is_explained_separately() -> None:
    own, others = of_ring(own_warp=True).split("consumer warpgroups:")
    assert own.count("loads its boxes") == 1
    assert "loads its boxes" not in others.split("copies by TMA")[0]
