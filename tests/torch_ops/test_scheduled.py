"""Kernels by schedules, for GPUs without wgmma and for float32: the call reaches them, and emulated they are right."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.target import Target

from support.torch_stand_in import Library, Tensor, torch_stand_in
from tensorir_ladder.emulator import find_host_compiler
from tensorir_ladder.gpus import cost_rates, estimated_rates
from tensorir_ladder.harness.commands.build import CALLED, ToBuild, called_machine
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.host_code import launch_plans
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, MatrixRows, PlainBuffer
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Cubin
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.lab.call_draws import ARCHES, DrawnCall, emulated_error
from tensorir_ladder.schedules.cost import assumed_machine
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import describe, kept, matmul
from tensorir_ladder.torch_ops import prepared as api
from tensorir_ladder.torch_ops.driver import Driver, DriverError
from tensorir_ladder.torch_ops.errors import PaddedCopy, ScatteredRows
from tensorir_ladder.torch_ops.launcher import CompiledKernel, Launcher, compile_kernel, load_kernel
from tensorir_ladder.torch_ops.problem import Setting
from tensorir_ladder.torch_ops.scheduled import WHOLE, ByWarps

EMULATED = pytest.mark.skipif(find_host_compiler() is None, reason="no C++ compiler, which the emulator needs")
DRAWN = (
    DrawnCall(Matmul(33, 40, 65, "float16", "nt", "float32"), Epilogue(-0.5, "float32", "relu"), 1, "", "sm_86"),
    DrawnCall(Matmul(48, 64, 128, "bfloat16", "nn", "bfloat16"), Epilogue(bias="bfloat16"), 3, "A", "sm_86"),
    DrawnCall(Matmul(31, 65, 33, "float32", "nt", "float32"), Epilogue(2.0, "float32", "gelu"), 1, "", "sm_90a"),
    DrawnCall(Matmul(17, 12, 100, "float32", "nn", "float32"), PLAIN, 3, "", "sm_120"),
    DrawnCall(Matmul(5, 64, 63, "float16", "nn", "float16"), Epilogue(activation="silu"), 3, "", "sm_80"),
    DrawnCall(Matmul(1, 9, 1, "float16", "nn", "float16"), Epilogue(2.0), 1, "", "sm_89"),
    DrawnCall(Matmul(16, 64, 2048, "float16", "nt", "float16"), Epilogue(1.0, "float32", "gelu"), 1, "", "sm_80"),
    DrawnCall(Matmul(9, 10, 40, "bfloat16", "nt", "float32"), PLAIN, 1, "", "sm_100"),
)


@EMULATED
@pytest.mark.sampled(3)
@pytest.mark.parametrize("drawn", DRAWN, ids=str)
def test_results_are_those_of_float64(drawn: DrawnCall) -> None:
    assert emulated_error(drawn) == ""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A driver of a GPU without wgmma, which multiplies what reaches it; kernels are lowered, not compiled."""
    monkeypatch.setitem(sys.modules, "torch", torch_stand_in())
    made = Library((8, 6), "NVIDIA GeForce RTX 3090", {16: 82, 97: 101376, 13: 1_695_000, 36: 9_751_000, 37: 384})
    _use(made, monkeypatch)
    yield made
    _forget()


def _forget() -> None:
    for cache in (api.prepared, api._loaded, api.gpu_machine):
        cache.cache_clear()


def _use(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered(choice: Any, problem: Matmul, setting: Any, _compiler: Any) -> CompiledKernel:
        function = choice.build(problem, setting)
        (plan,) = launch_plans(generate(tvm.IRModule({"main": function}), setting.machine.target, choice.PIPELINE))
        return CompiledKernel(plan, library.add(plan, problem, setting.finish))

    found = Driver(library)
    monkeypatch.setattr(api, "cuda_driver", lambda: found)
    monkeypatch.setattr(api, "build_kernel", lowered)
    monkeypatch.setattr(api, "require_compiler", lambda: None)
    _forget()


def drawn(seed: int, shape: tuple[int, ...], dtype: str = "float16", wide: int = 0) -> Tensor:
    """Whole numbers, in rows with so many more elements."""
    return Tensor.integers(seed, (*shape[:-1], shape[-1] + wide), dtype)[..., : shape[-1]]


CALLS = {
    "of any length": (drawn(0, (33, 65)), drawn(1, (65, 17)), None, 0),
    "turned": (drawn(0, (33, 65)), drawn(1, (17, 65)).T, None, 0),
    "float32": (drawn(0, (33, 65), "float32"), drawn(1, (65, 17), "float32"), None, 0),
    "slices": (drawn(0, (33, 64), wide=3), drawn(1, (17, 64), wide=8).T, None, 2),
    "into a slice": (drawn(0, (33, 64)), drawn(1, (64, 16)), drawn(2, (33, 16), wide=5), 1),
    "few rows of a slice": (drawn(0, (3, 64), wide=3), drawn(1, (64, 24)), None, 1),
    "a batch": (drawn(0, (3, 33, 40)), drawn(1, (3, 40, 20)), None, 0),
    "one a": (drawn(0, (33, 40)), drawn(1, (3, 40, 20)), None, 0),
    "rows of one product": (drawn(0, (3, 33, 40)), drawn(1, (40, 20)), None, 0),
    "matrices with gaps": (drawn(0, (6, 33, 40))[::2], drawn(1, (3, 40, 20)), None, 1),
    "one of each": (
        Tensor(np.broadcast_to(drawn(0, (33, 40)).array, (3, 33, 40)), "float16"),
        Tensor(np.broadcast_to(drawn(1, (40, 20)).array, (3, 40, 20)), "float16"),
        None,
        1,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernels_get_contiguous_matrices(library: Library, name: str) -> None:
    a, b, out, copied = CALLS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = matmul(a, b, out=out)
    wanted = (a.array.astype(np.float64) @ b.array.astype(np.float64)).astype(a.array.dtype)
    assert (got.array == wanted).all()
    assert out is None or got is out
    assert [each.category for each in caught] == [PaddedCopy] * (copied > 0)
    assert describe(a, b, out=out).count(" bytes)") == copied


def test_parts_are_added_up_by_a_second_launch() -> None:
    """Into memory that both launches have; a launch that fails is the last one."""
    parts = PlainBuffer("parts", "float32", (2, 8, 16))
    shapes = {"A": (8, 32), "B": (32, 16), "C": (8, 16)}
    matrix = {name: PlainBuffer(name, "float16", shape) for name, shape in shapes.items()}
    first = LaunchPlan("multiplying", (matrix["A"], matrix["B"], parts), (2, 1, 1), (32, 1, 1))
    second = LaunchPlan("adding", (matrix["C"], parts), (1, 1, 1), (32, 1, 1))
    launched: list[tuple[int, ...]] = []

    class Noting(Library):
        def _cuModuleGetFunction(self, function: Any, _module: Any, name: bytes) -> None:
            function._obj.value = len(name)

        def _cuLaunchKernelEx(self, _config: Any, function: Any, parameters: Any, _extra: Any) -> None:
            launched.append((function.value, *(ctypes.c_void_p.from_address(each).value for each in parameters)))

        def _cuModuleLoadData(self, _module: Any, _cubin: bytes) -> None:
            pass

    library = Noting()
    loaded = load_kernel(CompiledKernel(first, b"", (second,)), Driver(library), 0)
    assert not loaded.together.maps("C")
    launch = Launcher(loaded, {name: MatrixRows(*each.shape, each.shape[1] * 2) for name, each in matrix.items()})
    launch(0, 16, 32, 48, 64)
    assert launched == [(len("multiplying"), 16, 32, 64), (len("adding"), 48, 64)]
    library.failing["cuLaunchKernelEx"] = 1
    with pytest.raises(DriverError):
        launch(0, 16, 32, 48, 64)
    assert library.count("cuLaunchKernelEx") == 3


def test_one_kernel_for_all_tensors_of_a_shape(library: Library) -> None:
    a, b = drawn(0, (33, 64)), drawn(1, (64, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedCopy)
        for out in (None, drawn(2, (33, 16)), drawn(2, (33, 16), wide=5)):
            matmul(a, b, out=out)
    assert (library.count("cuModuleLoadData"), library.count("cuLaunchKernelEx")) == (1, 3)


def test_a_call_says_that_nothing_was_measured(library: Library) -> None:
    assert describe(drawn(0, (64, 64)), drawn(1, (64, 64))).endswith("stages, not measured on sm_86")
    assert describe(drawn(0, (4, 64)), drawn(1, (64, 64))).endswith("to registers, not measured on sm_86")


def test_float32_is_scheduled_on_hopper_too(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = Library()
    _use(hopper, monkeypatch)
    a, b = drawn(0, (40, 40), "float32"), drawn(1, (40, 40), "float32")
    assert (matmul(a, b, activation="relu").array == np.maximum(a.array @ b.array, 0)).all()
    assert describe(a, b).startswith("step 7, ")


def test_any_number_of_rows_and_scattered_rows_are_refused(library: Library) -> None:
    with pytest.raises(IllegalWorkload, match=r"any_m for float16 on sm_86.*do without any_m"):
        matmul(drawn(0, (40, 40)), drawn(1, (40, 40)), any_m=True)
    with pytest.raises(ScatteredRows, match="a has no rows that lie side by side"):
        matmul(drawn(0, (40, 48)).T, drawn(1, (40, 40)))


def test_what_is_built_ahead_is_what_a_call_asks_for(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same recipe, though the driver knows the memory otherwise."""
    asked, compiler = [], SimpleNamespace(version="13.0")

    def note(*made_for: Any) -> None:
        asked.append(kept.KERNELS.recipe(kept._made_for(*made_for[:3]), compiler))
        raise LookupError

    monkeypatch.setattr(api, "build_kernel", note)
    with pytest.raises(LookupError):
        matmul(drawn(0, (513, 511)), drawn(1, (512, 511)).T)
    ahead = ToBuild.on(called_machine(arch="sm_86"), Matmul(513, 512, 511, "float16", "nt"))
    assert asked == [kept.KERNELS.recipe(kept._made_for(*made_for), compiler) for made_for in ahead.kernels]
    assert api.gpu_machine(0).rates != called_machine(arch="sm_86").rates


@pytest.mark.parametrize("arch", ARCHES)
def test_each_family_has_rates(arch: str) -> None:
    estimated, own = cost_rates("NVIDIA Unheard Of", arch), cost_rates(None)
    assert (estimated == own) == (arch == "sm_90"), "an H200's are those of all Hopper GPUs"
    assert arch in CALLED
    assert machine_for(arch).for_choices().target.attrs["arch"] == arch


def test_the_driver_knows_the_memory() -> None:
    usual, slow = (cost_rates("NVIDIA Unheard Of", "sm_86", each).copying_gb_s for each in (0, 100))
    assert slow == 0.9 * 100 * 1.9 < usual
    assert estimated_rates("sm_87") == estimated_rates("sm_86")
    assert estimated_rates("sm_75") == {}


def test_kernels_of_serpentine_walks_are_assembled_in_their_order() -> None:
    """Without -O1 the assembler moves multiply-adds across rows."""
    choice = ByWarps(WHOLE, Planned())
    setting = Setting(assumed_machine(Target({"kind": "cuda", "arch": "sm_90a"})))
    function = choice.build(Matmul(256, 256, 64, "float32"), setting)
    asked: list[tuple[str, ...]] = []

    def noting(_source: str, _arch: str, _compiler: object, options: tuple[str, ...], kernel: str) -> Cubin:
        asked.append(options)
        return Cubin(b"", 1, 0, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorir_ladder.torch_ops.launcher.compile_cubin", noting)
        compile_kernel(function, setting.machine.target, None, choice.PIPELINE)
    assert asked == [("-O1",)]
