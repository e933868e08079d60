"""Whatever needs our own passes is refused by TVM's pipelines, and what no trace holds is not replayed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from support.schedules_on_cpu import TARGET, run
from tensorir_ladder.harness.build import asynchronous_copies, lower_schedule
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen import lowering
from tensorir_ladder.kernels.codegen.lowering import cuda_compiler, generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.loops import walk_serpentine
from tensorir_ladder.schedules.memory import swizzle_rows
from tensorir_ladder.schedules.passes import PIPELINE, needs_of
from tensorir_ladder.schedules.pipeline import (
    PipelinePlan,
    pipeline_loop,
    pipeline_reads,
    required_pass_config,
    required_tir_pipeline,
)
from tensorir_ladder.schedules.recipes import stage_contraction, stage_for_warps
from tensorir_ladder.schedules.tensor_cores import (
    multiply_by_wgmma,
    pipeline_warpgroups,
    stage_for_warpgroups,
    tensorize_contraction,
    use_instruction,
)
from tensorir_ladder.schedules.tiles import TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul

ROOT = Path(__file__).parents[2]
ORDINARY, HALF = Matmul(64, 64, 96), Matmul(128, 128, 256, dtype="float16")


def ordinary(problem: Matmul = ORDINARY, **form: bool) -> tuple[Schedule, PipelinePlan]:
    """A product on ordinary cores, pipelined in a form."""
    sch = Schedule(problem.prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), ThreadTile(block=(32, 64, 32), thread=(4, 4)))
    return sch, pipeline_loop(sch, staged.loops.k_outer, 3, **form)


def swizzled() -> tuple[Schedule, PipelinePlan]:
    """The same, one of its tiles swizzled."""
    sch = Schedule(ORDINARY.prim_func())
    staged = stage_contraction(sch, sch.get_sblock("matmul"), ThreadTile(block=(32, 64, 32), thread=(4, 4)))
    swizzle_rows(sch, staged.copies[0].copy)
    return sch, pipeline_loop(sch, staged.loops.k_outer, 3)


def by_warps() -> tuple[Schedule, PipelinePlan]:
    """A product in warp tiles, its multiply-adds in serpentine order."""
    sch = Schedule(Matmul(32, 128, 64).prim_func())
    tile = WarpTile(block=(32, 128, 16), warp=(32, 128), thread=(8, 16))
    warps = stage_for_warps(sch, sch.get_sblock("matmul"), tile)
    ahead = pipeline_reads(sch, warps.k_inner, 3)
    return sch, pipeline_loop(sch, warps.k_outer, 3, one_barrier=True, fill_ahead=ahead)


def by_mma(stages: int = 3) -> tuple[Schedule, PipelinePlan | None]:
    """A product by mma.sync."""
    sch, plan = Schedule(HALF.prim_func()), None
    tile = TensorCoreTile(block=(64, 64, 32), warp=(32, 32))
    made = tensorize_contraction(sch, sch.get_sblock("matmul"), tile, hide_reads=stages > 1)
    if stages > 1:
        plan = pipeline_loop(sch, made.loops.k_outer, stages, one_barrier=True)
    use_instruction(sch, made.loops, made.loads, made.instruction)
    return sch, plan


def by_wgmma(pipelined: bool = True) -> tuple[Schedule, PipelinePlan | None]:
    """A product by wgmma."""
    sch = Schedule(HALF.prim_func())
    staged = stage_for_warpgroups(sch, sch.get_sblock("matmul"), WarpgroupTile(block=(128, 128, 64), warpgroups=(2, 1)))
    plan = pipeline_warpgroups(sch, staged.loops.k_outer, 3) if pipelined else None
    multiply_by_wgmma(sch, staged.loops, staged.instruction)
    return sch, plan


NEEDS = {
    "wgmma": (by_wgmma, "reads hidden from TVM"),
    "mma": (by_mma, "reads hidden from TVM"),
    "mma, one stage": (lambda: by_mma(1), "local.fragment"),
    "warp tiles": (by_warps, "loops walked serpentine"),
    "swizzled rows": (swizzled, "swizzled rows"),
    "a ring written out": (lambda: ordinary(unroll_ring=True), "a ring written out"),
}
UNTRACED = {
    "one barrier": (lambda: ordinary(one_barrier=True), r"pipeline_loop\(\.\.\., one_barrier=True\)"),
    "mma": (by_mma, r"pipeline_loop\(\.\.\., one_barrier=True\)"),
    "warp tiles": (by_warps, r"pipeline_loop\(\.\.\., one_barrier=True\)"),
    "wgmma": (by_wgmma, "pipeline_warpgroups"),
}
Make = Callable[[], tuple[Schedule, PipelinePlan | None]]


def cuda(mod: tvm.IRModule, pipeline: str | None = None) -> str:
    """The CUDA of a module under its pass configuration."""
    return generate(mod, TARGET, pipeline or required_tir_pipeline(mod), required_pass_config(mod)).cuda


def problem_of(sch: Schedule) -> Schedule:
    """A fresh schedule of what a schedule started from."""
    problems = (ORDINARY, HALF, Matmul(32, 128, 64))
    shape = tuple(int(extent) for extent in sch.mod["main"].params[2].shape)
    dtype = str(sch.mod["main"].params[0].dtype)
    return Schedule(next(p for p in problems if (p.m, p.n) == shape and p.dtype == dtype).prim_func())


# Lowering


@pytest.mark.parametrize(("make", "need"), NEEDS.values(), ids=NEEDS)
def test_tvms_own_pipeline_refuses_what_it_would_drop(make: Make, need: str) -> None:
    """wgmma compiled by it, with an error of 64; the others, slower than was asked for."""
    sch, plan = make()
    assert need in needs_of(sch.mod)
    assert required_tir_pipeline(sch.mod) == PIPELINE
    assert plan is None or plan.tir_pipeline == PIPELINE
    with pytest.raises(Exception, match=rf"{re.escape(need)}.*tir_pipeline='{PIPELINE}'"):
        tvm.compile(sch.mod, TARGET)
    assert "__global__" in cuda(sch.mod)


def test_what_needs_nothing_is_lowered_by_either_to_the_same_text() -> None:
    for form in ({}, {"one_barrier": True}):
        sch, plan = ordinary(**form)
        assert plan.tir_pipeline == required_tir_pipeline(sch.mod) == "s_tir"
        assert cuda(sch.mod, PIPELINE) == cuda(sch.mod)


def test_relax_refuses_it_too() -> None:
    builder, sch = relax.BlockBuilder(), by_wgmma()[0]
    a, b = (
        relax.Var(name, relax.TensorType(shape, "float16")) for name, shape in (("a", (128, 256)), ("b", (256, 128)))
    )
    with builder.function("main", [a, b]):
        product = builder.add_func(
            sch.mod["main"].with_attr({"global_symbol": "product", "tirx.is_scheduled": 1}), "product"
        )
        builder.emit_func_output(relax.call_tir(product, [a, b], relax.TensorType((128, 128), "float16")))
    with TARGET, pytest.raises(Exception, match=f"tir_pipeline='{PIPELINE}'"):
        tvm.compile(builder.get(), TARGET)
    with TARGET, cuda_compiler(lambda _: b""):
        assert relax.build(builder.get(), TARGET, tir_pipeline=PIPELINE)


@pytest.mark.parametrize("texts", [["one", "two", "one"], []], ids=len)
def test_texts_are_compiled_side_by_side(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, compiled = Barrier(2), []

    def compile_one(text: str, arch: str, _compiler: object) -> Cubin:
        if text not in compiled:
            compiled.append(text)
            meeting.wait(10)  # for the other text's thread
        return Cubin(f"{text} for {arch}".encode(), 0, 0, 0)

    def make() -> list[bytes]:
        return [bytes(tvm.get_global_func("tvm_callback_cuda_compile")(text)) for text in texts]

    monkeypatch.setattr(lowering, "compile_cubin", compile_one)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    made = lowering.compile_side_by_side(make, "sm_90a", Compiler(Path("nvcc"), ""))
    assert made == [f"{text} for sm_90a".encode() for text in texts]
    assert sorted(compiled) == sorted(set(texts))


def test_a_tile_on_ordinary_cores_is_swizzled_too() -> None:
    """It was not, without a word: its lowering was chosen by fragments."""
    sch, _ = swizzled()
    assert "^" in cuda(sch.mod)
    a, b = (np.arange(64 * 96, dtype="float32").reshape(shape) % 7 for shape in ((64, 96), (96, 64)))
    assert np.array_equal(run(sch, a, b, shape=(64, 64)), a @ b)


def test_a_need_is_named_once_and_the_remedy_last() -> None:
    sch = Schedule(Matmul(8, 8, 8).prim_func())
    row, column, k = sch.get_loops(sch.get_sblock("matmul"))
    sch.reorder(k, row, column)
    for loop in (row, row):
        walk_serpentine(sch, loop)
    assert needs_of(sch.mod) == ("loops walked serpentine",)


def test_hidden_reads_without_a_gate_are_not_lowered() -> None:
    """The instruction would read what is still being copied."""
    sch, _ = by_wgmma(pipelined=False)
    for refused in (lambda: required_tir_pipeline(sch.mod), lambda: cuda(sch.mod, PIPELINE)):
        with pytest.raises(Exception, match=r"reads are hidden from TVM.*one_barrier=True"):
            refused()
    with pytest.raises(IllegalPipeline):
        required_tir_pipeline(sch.mod)


@pytest.mark.emulator
@pytest.mark.parametrize(
    "make", [lambda: ordinary(one_barrier=True), by_mma, by_wgmma], ids=["ordinary", "mma", "wgmma"]
)
def test_the_pass_configuration_is_for_speed_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it copies are done when they are issued: nobody refuses that, since it is right."""
    sch, _ = make()
    monkeypatch.setattr("tensorir_ladder.harness.build.required_pass_config", lambda mod: {})
    kernel = lower_schedule(sch, machine_for("sm_90a"), "synchronous")
    assert not asynchronous_copies(kernel.body)
    program, (a, b, c) = EmulatorBackend().load(kernel), sch.mod["main"].params
    left, right = (
        np.random.default_rng(0).integers(-2, 3, list(map(int, x.shape))).astype(str(x.dtype)) for x in (a, b)
    )
    for _ in range(6):
        out = np.full(list(map(int, c.shape)), np.nan, str(c.dtype))
        program(left, right, out)
        assert np.array_equal(out, left.astype("float32") @ right.astype("float32"))


# Replaying


@pytest.mark.parametrize(("make", "by"), UNTRACED.values(), ids=UNTRACED)
def test_a_replay_stops_where_the_trace_leaves_something_out(make: Make, by: str) -> None:
    """Replayed, mma with one barrier raced: lists and marks without their gate."""
    sch, _ = make()
    with pytest.raises(Exception, match=f"{by} changes what a trace does not hold"):
        sch.trace.apply_to_schedule(problem_of(sch), remove_postproc=False)
    with pytest.raises(Exception, match=f"{by} changes what a trace does not hold"):
        Trace.apply_json_to_schedule(sch.trace.as_json(), problem_of(sch))


REPLAYED = ("mma, one stage", "swizzled rows", "a ring written out")


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replayed_schedule_has_the_same_needs_and_cuda(name: str) -> None:
    sch, _ = NEEDS[name][0]()
    again = problem_of(sch)
    Trace.apply_json_to_schedule(sch.trace.as_json(), again)
    assert tvm_ffi.structural_equal(again.mod, sch.mod)
    assert needs_of(again.mod) == needs_of(sch.mod)
    assert cuda(again.mod) == cuda(sch.mod)


FRESH = """
import json, sys, tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace
given = json.load(sys.stdin)
start, done = (tvm.ir.load_json(given[key]) for key in ("start", "done"))
again = Schedule(start)
Trace.apply_json_to_schedule(tvm.ir.load_json(given["trace"]), again)
target, refused = tvm.target.Target(given["target"]), []
for mod in (done, again.mod):
    try:
        tvm.compile(mod, target)
    except Exception as error:
        refused.append(str(error))
import tensorir_ladder.schedules.pipeline
from tensorir_ladder.kernels.codegen.lowering import cuda_compiler, generate
texts = [generate(mod, target, "tensorir_ladder", {"tirx.use_async_copy": True}).cuda for mod in (done, again.mod)]
json.dump({"refused": refused, "texts": texts}, sys.stdout)
"""


def test_a_fresh_process_refuses_modules_and_traces_and_lowers_them_to_the_same_cuda() -> None:
    sch, _ = swizzled()
    given = {
        "start": tvm.ir.save_json(tvm.IRModule({"main": ORDINARY.prim_func()})),
        "done": tvm.ir.save_json(sch.mod),
        "trace": tvm.ir.save_json(sch.trace.as_json()),
        "target": {"kind": "cuda", "arch": "sm_90a"},
    }
    made = subprocess.run(
        [sys.executable, "-c", FRESH], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    found = json.loads(made.stdout)
    assert len(found["refused"]) == 2
    assert all(f"tir_pipeline='{PIPELINE}'" in text for text in found["refused"])
    assert found["texts"] == [cuda(sch.mod)] * 2


def test_schedules_are_changed_by_primitives_or_where_a_replay_stops() -> None:
    """What a trace does not hold is changed in one place, which makes a replay stop."""
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in ("schedules", "steps")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert [path.name for path, text in texts.items() if "state.replace(" in text] == ["passes.py"]
