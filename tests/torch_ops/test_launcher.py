"""Launching explicit kernels: the plan read from TVM's host code, the driver's structures, and what is kept."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import tvm
from tvm.script import tirx as T

from support.cases import Outcome, hopper
from support.torch_stand_in import Library, Tensor, torch_stand_in
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.commands import BAD_INPUT
from tensorir_ladder.harness.host_time import LAUNCHES, ROUNDS, host_time_us
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import (
    LaunchPlan,
    MatrixRows,
    PlainBuffer,
    TensorMap,
    UnsupportedLaunch,
)
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.tiles import HopperTile, RoleTile
from tensorir_ladder.kernels.tma_ring import tma_ring
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import driver, launcher
from tensorir_ladder.torch_ops import prepared as api
from tensorir_ladder.torch_ops.driver import Driver, DriverError, LaunchAttribute, LaunchConfig, NoDriver, launch_config
from tensorir_ladder.torch_ops.launcher import CAPTURED_ROOMS, CompiledKernel, Launcher, Workspaces, load_kernel

TARGET = machine_for("sm_90a").target()
TILE = HopperTile.parse("128x256x64/2x1")
ROLES = RoleTile.parse("128x128x64/2x1")
PROBLEM = Matmul(512, 1024, 256, "bfloat16")


def plan_of(problem: Matmul, tile: HopperTile = TILE) -> LaunchPlan:
    """The plan of step 11's kernel."""
    return read(tma_ring(problem, tile, 4))


def read(function: tvm.tirx.PrimFunc) -> LaunchPlan:
    """The plan of any function."""
    return launch_plan(generate(tvm.IRModule({"main": function}), TARGET, launcher.TIR_PIPELINE))


@pytest.fixture(scope="module")
def plan() -> LaunchPlan:
    """A plan whose sizes all differ."""
    return plan_of(PROBLEM)


# What is read from the host's code


def test_a_plan_has_maps_and_extents_as_the_host_code_has_them(plan: LaunchPlan) -> None:
    common = {"swizzle": 3, "l2_promotion": 2}
    assert plan == LaunchPlan(
        "main_kernel",
        (
            TensorMap("A", "bfloat16", (256, 512), (512,), (64, 128), **common),
            TensorMap("B", "bfloat16", (1024, 256), (2048,), (64, 64), **common),
            TensorMap("C", "bfloat16", (1024, 512), (2048,), (64, 64), **common),
        ),
        (16, 1, 1),
        (256, 1, 1),
        (1, 1, 1),
        TILE.smem_bytes(2, 4),
    )
    assert plan.maps("C")


def test_plain_buffers_come_in_the_kernels_own_order() -> None:
    plan = plan_of(Matmul(512, 1024, 256, "float16", "nt", "float32"))
    assert [parameter.buffer for parameter in plan.parameters] == ["C", "A", "B"]
    assert plan.parameters[0] == PlainBuffer("C", "float32", (512, 1024))
    assert not plan.maps("C")


def test_clusters_and_kernels_that_wait_for_the_one_before() -> None:
    @T.prim_func
    def main(A_ptr: T.handle):
        A = T.match_buffer(A_ptr, (1024,), "float32", align=16)
        T.device_entry()
        rank = T.cta_id_in_cluster([2])
        block = T.cta_id([8])
        thread = T.thread_id([128])
        T.evaluate(T.ptx.griddepcontrol.wait())
        A[block * 128 + thread] = T.Cast("float32", rank)

    plan = read(main)
    assert (plan.grid, plan.block, plan.cluster) == ((8, 1, 1), (128, 1, 1), (2, 1, 1))
    assert plan.shared_bytes == 0
    assert plan.overlaps
    config = launch_config(plan, 7)
    attributes = [
        (config.attributes[i].id, list(config.attributes[i].value)[:3]) for i in range(config.attribute_count)
    ]
    assert attributes == [(4, [2, 1, 1]), (6, [1, 0, 0])]


def test_workspaces_are_what_is_no_matrix() -> None:
    problem = Matmul(256, 512, 2048, "float16")
    cut, whole = (persistent(problem, ROLES, 4, machine=hopper(count)) for count in (3, 2))
    plan = read(cut)
    sums = PlainBuffer("shared_sums", "float32", (3 * 128 * 128,))
    assert plan.workspaces == (PlainBuffer("flags", "int32", (6,)), sums)
    assert plan.maps("C")
    assert read(whole).workspaces == ()


def test_a_persistent_kernel_launches_with_its_cluster_and_its_wait() -> None:
    plan = read(persistent(PROBLEM, ROLES, 4, KernelForm(overlapped=True), machine=hopper(132), blocks=2))
    assert (plan.grid, plan.block, plan.cluster, plan.overlaps) == ((32, 1, 1), (384, 1, 1), (2, 1, 1), True)


def test_what_is_no_single_launch_of_matrices_is_refused() -> None:
    @T.prim_func
    def scaled(A_ptr: T.handle, scale: T.float32):
        A = T.match_buffer(A_ptr, (1024,), "float32", align=16)
        T.device_entry()
        block = T.cta_id([8])
        thread = T.thread_id([128])
        A[block * 128 + thread] = scale

    with pytest.raises(UnsupportedLaunch, match=r"a parameter is no matrix .*scale"):
        read(scaled)


def test_what_is_known_at_run_time_only_is_refused() -> None:
    @T.prim_func
    def main(A_ptr: T.handle, count: T.int32):
        A = T.match_buffer(A_ptr, (1024,), "float32", align=16)
        T.device_entry()
        block = T.cta_id([count])
        thread = T.thread_id([128])
        A[block * 128 + thread] = T.float32(1)

    with pytest.raises(UnsupportedLaunch, match=r"known only at run time \(got count"):
        read(main)


def test_a_map_takes_the_rows_at_hand(plan: LaunchPlan) -> None:
    made = plan.parameters[0].of(MatrixRows(500, 255, 1024))
    assert (made.sizes, made.strides, made.box) == ((255, 500), (1024,), (64, 128))
    deep = TensorMap("A", "float16", (64, 512, 4), (512, 128), (64, 128, 1), 3)
    with pytest.raises(UnsupportedLaunch, match="rank 3, limit rank 2"):
        deep.of(MatrixRows(500, 255, 1024))
    batch = deep.of(MatrixRows(500, 255, 1024, 3, 512000))
    assert (batch.sizes, batch.strides, batch.box) == ((255, 500, 3), (1024, 512000), (64, 128, 1))


def test_a_plain_buffer_takes_no_other_rows() -> None:
    plain = PlainBuffer("C", "float32", (4, 8))
    plain.check(MatrixRows(4, 8, 32))
    PlainBuffer("C", "float32", (1, 8)).check(MatrixRows(1, 8, 48))
    for other in (MatrixRows(4, 8, 48), MatrixRows(4, 7, 32), MatrixRows(5, 8, 32)):
        with pytest.raises(UnsupportedLaunch, match="limit 4 x 8, side by side"):
            plain.check(other)


# The driver


@pytest.mark.compiler
def test_structures_are_those_of_the_drivers_header(compiler: Compiler, tmp_path: Path) -> None:
    facts = {
        "sizeof(CUlaunchConfig)": ctypes.sizeof(LaunchConfig),
        "offsetof(CUlaunchConfig, blockDimX)": LaunchConfig.block.offset,
        "offsetof(CUlaunchConfig, sharedMemBytes)": LaunchConfig.shared_bytes.offset,
        "offsetof(CUlaunchConfig, hStream)": LaunchConfig.stream.offset,
        "offsetof(CUlaunchConfig, attrs)": LaunchConfig.attributes.offset,
        "offsetof(CUlaunchConfig, numAttrs)": LaunchConfig.attribute_count.offset,
        "sizeof(CUlaunchAttribute)": ctypes.sizeof(LaunchAttribute),
        "offsetof(CUlaunchAttribute, value)": LaunchAttribute.value.offset,
        "sizeof(CUtensorMap)": driver.TENSOR_MAP_BYTES,
        f"{driver.TENSOR_MAP_ALIGNMENT} % alignof(CUtensorMap)": 0,
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": driver.CLUSTER_EXTENTS,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": driver.OVERLAPS_PREVIOUS,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": driver.MAX_DYNAMIC_SHARED_BYTES,
        "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED": driver.ALLOW_LARGE_CLUSTERS,
        "CU_TENSOR_MAP_DATA_TYPE_FLOAT16": driver.TENSOR_MAP_DTYPES["float16"],
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": driver.TENSOR_MAP_DTYPES["bfloat16"],
        "CU_TENSOR_MAP_DATA_TYPE_FLOAT32": driver.TENSOR_MAP_DTYPES["float32"],
        "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK": api.LIMITS["max_threads_per_block"],
        "CU_DEVICE_ATTRIBUTE_WARP_SIZE": api.LIMITS["thread_warp_size"],
        "CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK": api.LIMITS["registers_per_block"],
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": api.LIMITS["max_shared_memory_per_block"],
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": api.MULTIPROCESSORS,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": api.CAPABILITY[0],
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": api.CAPABILITY[1],
    }
    checks = "\n".join(f'static_assert({name} == {value}, "{name}");' for name, value in facts.items())
    (tmp_path / "facts.cu").write_text(f"#include <cstddef>\n#include <cuda.h>\n{checks}\n")
    command = [compiler.nvcc, "-c", tmp_path / "facts.cu", "-o", tmp_path / "facts.o"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_failed_call_is_named() -> None:
    library = Library()
    library.failing["cuModuleLoadData"] = 1
    with pytest.raises(DriverError, match=r"^cuModuleLoadData failed: CUDA_ERROR_INVALID_VALUE \(1\)$") as caught:
        Driver(library).load(b"", LaunchPlan("k", (), (1, 1, 1), (1, 1, 1), (1, 1, 1), 0))
    assert (caught.value.call, caught.value.status) == ("cuModuleLoadData", 1)


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libno_such_driver.so.1")
    with pytest.raises(NoDriver, match=r"no CUDA driver \(libno_such_driver.so.1\)"):
        driver.cuda_driver.__wrapped__()


def test_a_thread_enters_a_gpus_context_once() -> None:
    library = Library()
    found = Driver(library)
    for _ in range(2):
        found.enter(0)
    other = threading.Thread(target=found.enter, args=(0,))
    other.start()
    other.join()
    assert (library.count("cuDevicePrimaryCtxRetain"), library.count("cuCtxSetCurrent")) == (1, 2)


# Launching


def launcher_of(plan: LaunchPlan, library: Library) -> Launcher:
    """A launcher of dense matrices."""
    loaded = load_kernel(CompiledKernel(plan, library.add(plan, PROBLEM)), Driver(library), 0)
    shapes = {"A": (512, 256), "B": (256, 1024), "C": (512, 1024)}
    return Launcher(loaded, {name: MatrixRows(*shape, shape[1] * 2) for name, shape in shapes.items()})


def matrices() -> list[Tensor]:
    """A, B and C for it."""
    return [
        Tensor.integers(0, (512, 256), "bfloat16"),
        Tensor.integers(1, (256, 1024), "bfloat16"),
        Tensor.empty((512, 1024), "bfloat16"),
    ]


def test_maps_are_encoded_once_for_the_same_addresses(plan: LaunchPlan) -> None:
    library, tensors = Library(), matrices()
    launch = launcher_of(plan, library)
    assert library.count("cuFuncSetAttribute") == 1
    for _ in range(3):
        launch(0, *(tensor.data_ptr() for tensor in tensors))
    assert library.count("cuTensorMapEncodeTiled") == 3
    assert library.count("cuLaunchKernelEx") == 3
    a, b, c = (tensor.array.astype("float64") for tensor in tensors)
    assert (c == (a @ b).astype(tensors[2].array.dtype).astype("float64")).all()


def test_other_addresses_and_streams_have_their_own_launches(plan: LaunchPlan) -> None:
    library, tensors = Library(), matrices()
    launch = launcher_of(plan, library)
    a, b, c = (tensor.data_ptr() for tensor in tensors)
    other = Tensor.empty((512, 1024), "bfloat16")
    for stream, output in ((5, c), (6, c), (5, other.data_ptr()), (5, c)):
        launch(stream, a, b, output)
    assert library.streams == [5, 6, 5, 5]
    assert library.count("cuTensorMapEncodeTiled") == 9


def test_the_cache_has_an_end(plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "CACHED_LAUNCHES", 2)
    library, (a, b, c) = Library(), matrices()
    launch = launcher_of(plan, library)
    for stream in (1, 2, 3, 1):
        launch(stream, a.data_ptr(), b.data_ptr(), c.data_ptr())
    assert library.count("cuTensorMapEncodeTiled") == 12


def test_a_failed_launch_is_named(plan: LaunchPlan) -> None:
    library = Library()
    launch = launcher_of(plan, library)
    library.failing["cuLaunchKernelEx"] = 1
    with pytest.raises(DriverError, match="cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE"):
        launch(0, *(tensor.data_ptr() for tensor in matrices()))


def test_every_buffer_of_the_kernel_is_asked_for(plan: LaunchPlan) -> None:
    library = Library()
    loaded = load_kernel(CompiledKernel(plan, library.add(plan, PROBLEM)), Driver(library), 0)
    with pytest.raises(UnsupportedLaunch, match=r"further buffers \(got B, C\)"):
        Launcher(loaded, {"A": MatrixRows(512, 256, 512)})


def test_addresses_must_be_those_of_all_matrices(plan: LaunchPlan) -> None:
    with pytest.raises(ValueError, match="shorter"):
        launcher_of(plan, Library())(0, 16, 32)


# Workspaces

CUT = (PlainBuffer("flags", "int32", (4,)), PlainBuffer("shared_sums", "float32", (256,)))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch that sees one GPU."""
    made = torch_stand_in()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def test_flags_are_zeros_and_sums_are_as_long_as_the_kernels(torch: SimpleNamespace) -> None:
    flags, sums = Workspaces(CUT, int).of(0, Tensor.empty((1,), "float16")).tensors
    assert (flags.shape, flags.array.dtype, flags.array.any()) == ((4,), "int32", False)
    assert (sums.shape, sums.array.dtype) == ((256,), "float32")


def test_each_stream_has_its_workspaces_for_good(torch: SimpleNamespace) -> None:
    kept, like = Workspaces(CUT, int), Tensor.empty((1,), "float16")
    first, other, again = (kept.of(stream, like) for stream in (1, 2, 1))
    assert first is again
    assert not set(first.addresses) & set(other.addresses)


def test_a_capture_has_workspaces_of_its_own_for_each_stream(torch: SimpleNamespace) -> None:
    captures = iter([1, 1, 1, 2])
    kept, like = Workspaces(CUT, lambda _stream: next(captures)), Tensor.empty((1,), "float16")
    before = kept.of(1, like)
    torch.cuda.capturing = True
    first, again, beside, next_graph = (kept.of(stream, like) for stream in (1, 1, 2, 1))
    torch.cuda.capturing = False
    assert first is again
    assert len({room.addresses for room in (before, first, beside, next_graph)}) == 4
    assert kept.of(1, like) is before


def test_workspaces_of_old_captures_are_given_back(torch: SimpleNamespace) -> None:
    captures = iter(range(100))
    kept, like = Workspaces(CUT, lambda _stream: next(captures)), Tensor.empty((1,), "float16")
    torch.cuda.capturing = True
    tensors = [weakref.ref(kept.of(1, like).tensors[0]) for _ in range(50)]
    assert sum(tensor() is not None for tensor in tensors) == CAPTURED_ROOMS


def test_threads_share_a_streams_workspaces(torch: SimpleNamespace) -> None:
    kept, like, rooms = Workspaces(CUT, int), Tensor.empty((1,), "float16"), []
    begin = threading.Barrier(8)

    def call() -> None:
        """As all others, at once."""
        begin.wait()
        rooms.append(kept.of(1, like))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({room.addresses for room in rooms}) == 1


# The command that shows what a launch costs


def test_host_time_is_per_call() -> None:
    calls = []
    taken = host_time_us(lambda: calls.append(time.sleep(1e-5)), lambda: None)
    assert taken >= 10
    assert len(calls) == 1 + LAUNCHES * ROUNDS


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--step", "5"), "no explicit kernel"), (("--step", "11", "--size", "64"), "GPU")]
)
def test_the_command_says_what_it_cannot_do(
    command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    def missing() -> None:
        raise execution.NoGpu("torch sees no GPU")

    monkeypatch.setattr(execution, "require_gpu", missing)
    outcome = command("launch", *arguments)
    assert outcome.code == BAD_INPUT
    assert said in outcome.err


@pytest.mark.gpu
@pytest.mark.parametrize("case", [("11", "512x512x512"), ("13", "128x128x8192")])
def test_the_command_names_every_way_to_launch(command: Callable[..., Outcome], case: tuple[str, str]) -> None:
    """Of step 13 a last wave that is cut, with workspaces."""
    outcome = command("launch", "--step", case[0], "--shape", case[1])
    assert outcome.code == 0
    for way in ("executable", "the launcher", "torch_ops.matmul", "torch.mm"):
        assert way in outcome.out
