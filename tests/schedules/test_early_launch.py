"""Scheduled kernels that begin before the one before them has ended: what they wait for, and how they are launched."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir
from tvm.s_tir import Schedule
from tvm.target import Target

from support.cases import make_case
from tensorir_ladder.emulator.errors import KernelFault
from tensorir_ladder.harness.build import Kernel, compile_module, compiled, lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.schedules.loops import can_launch_early, launch_early
from tensorir_ladder.schedules.loops.early_launch import EARLY, FLAG, LAUNCH
from tensorir_ladder.schedules.loops.residency import KERNEL
from tensorir_ladder.schedules.passes import PIPELINE
from tensorir_ladder.schedules.pipeline import lower_ahead
from tensorir_ladder.schedules.recipes import stage_contraction
from tensorir_ladder.schedules.tiles import ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul

pytestmark = pytest.mark.filterwarnings("ignore:.*more would stay empty", "ignore:.*by a kernel in front")

WAITS = "tvm_builtin_ptx_griddepcontrol_wait();"
BY_WARPS = WarpTile(block=(32, 64, 16), warp=(32, 64), thread=(8, 8), slices=2)
BY_WARPGROUPS = WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1))
# Step, variant, a product of parts, whose kernel is behind, or also with operands copied in front, and so many kernels.
SEVERAL = [
    (7, "fitted", (70, 67, 1031), BY_WARPS, 2),
    (10, "fitted", (70, 67, 2051), BY_WARPGROUPS, 3),
    (10, "boxes", (128, 128, 2048), BY_WARPGROUPS, 2),
]


def several(step: int, variant: str, shape: tuple[int, int, int], tile, kernels: int) -> Kernel:
    """Lower a case of so many kernels."""
    kernel = lower(make_case(step, shape, variant, tile=tile, stages=3))
    assert kernel.launches == kernels
    return kernel


def launches(host: tvm.IRModule, name: str = "main") -> dict[str, list[str]]:
    """A host function's launches: kernels with their tags."""
    found: list[ir.Call] = []
    tvm_ffi.structural_walk(host[name], (ir.Call, found.append))
    calls = [call for call in found if call.op.same_as(LAUNCH)]
    return {str(call.args[0].value): [str(tag) for tag in call.attrs.launch_params] for call in calls}


def begins(text: str) -> list[str]:
    """The first statement of each kernel of a CUDA text."""
    return [found.strip() for found in re.findall(r"^extern \"C\" __global__ [^;{]*\{\n([^\n]*)\n", text, re.M)]


@pytest.mark.parametrize(("step", "variant", "shape", "tile", "kernels"), SEVERAL)
def test_each_kernel_waits_first_and_is_launched_with_the_flag(step, variant, shape, tile, kernels) -> None:
    kernel = several(step, variant, shape, tile, kernels)
    assert kernel.launched_early
    assert begins(kernel.cuda) == [WAITS] * kernels
    tags = launches(kernel.host)
    assert len(tags) == kernels
    for name, function in kernel.device.functions_items():
        assert tags[name.name_hint] == [str(tag) for tag in function.attrs[KERNEL]]
        assert tags[name.name_hint].count(FLAG) == 1
    program = compile_module(kernel.mod, kernel.machine, lambda _: b"", kernel.pass_config, kernel.tir_pipeline)
    assert program["main"]


@pytest.mark.emulator
@pytest.mark.parametrize(("step", "variant", "shape", "tile", "kernels"), SEVERAL)
def test_no_kernel_may_do_without_its_wait(step, variant, shape, tile, kernels) -> None:
    kernel = several(step, variant, shape, tile, kernels)
    verify(kernel, EmulatorBackend(), seeds=(0,))
    at = [found.start() for found in re.finditer(rf"^ *{re.escape(WAITS)}\n", kernel.cuda, re.M)]
    assert len(at) == kernels
    for place in at:
        text = kernel.cuda[:place] + kernel.cuda[place:].replace(WAITS, "", 1)
        with pytest.raises(KernelFault, match=r"missing griddepcontrol\.wait"):
            verify(replace(kernel, cuda=text), EmulatorBackend(), seeds=(0,))


@pytest.mark.parametrize(
    ("arch", "early"), [("sm_80", False), ("sm_89", False), ("sm_90", True), ("sm_90a", True), ("sm_100f", True)]
)
def test_older_targets_cannot(arch: str, early: bool) -> None:
    assert can_launch_early(Target({"kind": "cuda", "arch": arch})) is early


def test_older_machines_launch_one_behind_the_other() -> None:
    kernel = lower(make_case(7, (70, 67, 1031), "fitted", tile=BY_WARPS, stages=3, arch="sm_80"))
    assert kernel.launches > 1
    assert not kernel.launched_early
    assert "griddepcontrol" not in kernel.cuda
    assert not any(FLAG in tags for tags in launches(kernel.host).values())


def staged(early: bool) -> Schedule:
    """A product on ordinary cores."""
    sch = Schedule(Matmul(64, 64, 96).prim_func())
    stage_contraction(sch, sch.get_sblock("matmul"), ThreadTile(block=(32, 64, 32), thread=(4, 4)))
    if early:
        launch_early(sch)
    return sch


def test_other_functions_of_a_module_are_left_alone() -> None:
    early, usual = (staged(each).mod["main"] for each in (True, False))
    mod = tvm.IRModule({"early": early, "usual": usual.with_attr("global_symbol", "usual")})
    made = generate(mod, machine_for("sm_90a").target(), PIPELINE)
    assert made.cuda.count(f"  {WAITS}") == 1
    flags = [FLAG in tags for name in ("early", "usual") for tags in launches(made.host, name).values()]
    assert flags == [True, False]


def test_it_is_refused_for_older_targets() -> None:
    with pytest.raises(RuntimeError, match=r"launched early .*sm_80, limit sm_90 and newer"):
        generate(staged(early=True).mod, machine_for("sm_80").target(), PIPELINE)


def test_tvms_own_pipeline_refuses_it() -> None:
    with pytest.raises(tvm.error.InternalError, match=EARLY):
        tvm.compile(staged(early=True).mod, machine_for("sm_90a").target(), tir_pipeline="s_tir")


def test_lowered_ahead_its_launches_are_ordinary() -> None:
    target = machine_for("sm_90a").target()
    made = lower_ahead(staged(early=True).mod["main"], target)
    usual = lower_ahead(staged(early=False).mod["main"], target)
    tvm.ir.assert_structural_equal(made, usual)


@pytest.mark.gpu
@pytest.mark.parametrize(("step", "variant", "shape", "tile", "kernels"), SEVERAL)
def test_called_again_and_again_they_are_right_on_a_gpu(step, variant, shape, tile, kernels, compiler) -> None:
    """Each call's kernels write to the same memory as the one's before, whose last kernel may still run."""
    kernel, gpu = compiled(several(step, variant, shape, tile, kernels), compiler), GpuBackend()
    verify(kernel, gpu, seeds=(0,))
    run, problem = gpu.load(kernel), kernel.case.problem
    shapes = (problem.m, problem.k), problem.b_shape
    drawn = [[(2 * seed + place, shape) for place, shape in enumerate(shapes)] for seed in range(8)]
    given = [[gpu.normal(*each, problem.dtype) for each in operands] for operands in drawn]
    found = [gpu.poisoned((problem.m, problem.n), problem.out_dtype) for _ in given]
    alone = [gpu.poisoned((problem.m, problem.n), problem.out_dtype) for _ in given]
    for (a, b), c in zip(given, alone):
        run(a, b, c)
        gpu.torch.cuda.synchronize()
    for (a, b), c in zip(given, found):
        run(a, b, c)
    gpu.torch.cuda.synchronize()
    for one, other in zip(alone, found):
        np.testing.assert_array_equal(one.cpu().numpy(), other.cpu().numpy())
