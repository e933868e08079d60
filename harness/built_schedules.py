"""Schedules' kernels as they are launched, kept by what they were made for, and loaded without scheduling them again.

Scheduling and lowering a case takes about half a second of one core, and its compilation more. Processes side by side
do that ahead, and who measures loads what they left: launches as data, and a cubin
(:mod:`kernels.codegen.kept_builds`). They follow from the case and its GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tensorir_ladder.harness.build import ARRAYS, Case, Kernel, compiled, lower
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.kernels.codegen.build_cache import BuildCache
from tensorir_ladder.kernels.codegen.host_code import read_launches
from tensorir_ladder.kernels.codegen.kept_builds import KeptBuilds, Sources
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, PlainBuffer, TensorMap, UnsupportedLaunch
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.memory.workspaces import pass_workspaces
from tensorir_ladder.torch_ops.driver import Driver, cuda_driver
from tensorir_ladder.torch_ops.launcher import CompiledKernel, KeptLaunches, load_kernel

HEAD_END = b"\n"  # a line of the launches, then the cubin
PATTERNS = (
    "harness/build.py",
    "harness/any_rows.py",
    "harness/machines.py",
    "schedules/**/*.py",
    "gpus/costs/*-schedules.json",
    "steps/*.py",
    "kernels/**/*.py",
    "gpus/*.py",
    "gpus/rates/*.json",
)
SOURCES = Sources(Path(__file__).parents[1], PATTERNS)


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device memory in which kernels leave results for those behind them."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe what a cubin is kept with."""

    names: tuple[str, ...]
    launches: tuple[msgspec.Raw, ...]
    memory: tuple[Memory, ...]
    source_sha256: str
    cubin_sha256: str
    arch: str


class BuiltSchedule(msgspec.Struct, frozen=True):
    """A schedule's kernels: ``launches`` in their order, of the matrices ``names`` and of ``memory``, and their cubin.

    ``digests``: the fields by which records say what was compiled.
    """

    names: tuple[str, ...]
    launches: tuple[LaunchPlan, ...]
    memory: tuple[Memory, ...]
    digests: dict[str, str]
    cubin: bytes


def _written(built: BuiltSchedule) -> bytes:
    launches = tuple(msgspec.Raw(launch.to_json()) for launch in built.launches)
    head = _Head(built.names, launches, built.memory, **built.digests)
    return msgspec.json.encode(head) + HEAD_END + built.cubin


def _read(content: bytes) -> BuiltSchedule:
    """Read what :func:`_written` wrote; ValueError, as msgspec's errors are, for anything else."""
    head, _, cubin = content.partition(HEAD_END)
    found = msgspec.json.decode(head, type=_Head)
    launches = tuple(LaunchPlan.from_json(bytes(launch)) for launch in found.launches)
    digests = {name: getattr(found, name) for name in ("source_sha256", "cubin_sha256", "arch")}
    return BuiltSchedule(found.names, launches, found.memory, digests, cubin)


SCHEDULES = KeptBuilds(BuildCache("schedules"), ".kernels", SOURCES, _written, _read)


def build_schedule(case: Case, compiler: Compiler) -> BuiltSchedule:
    """Return a case's kernels: those that are kept, or else new ones, which then are kept.

    Raises what lowering and compiling raise; UnsupportedLaunch for launches of anything but matrices, or that depend on
    a call's extents; TypeError for a step that is an explicit kernel.
    """
    if case.explicit:
        raise TypeError(f"{case} is an explicit kernel, which torch_ops.launcher compiles and launches")
    return SCHEDULES.get(_made_for(case), compiler, lambda: _built(compiled(lower(case), compiler)))


def find_schedule(case: Case, compiler: Compiler) -> BuiltSchedule | None:
    """Return the kernels that are kept; None where there are none, or none that can be read."""
    return SCHEDULES.find(_made_for(case), compiler)


def _made_for(case: Case) -> list[object]:
    return [case.step.name, case.variant, str(case.tile), case.stages, case.planned, case.problem, case.machine]


def _built(kernel: Kernel) -> BuiltSchedule:
    params = [str(parameter.name) for parameter in pass_workspaces(kernel.mod)["main"].params]
    shapes = [(tuple(map(int, buffer.shape)), str(buffer.dtype)) for buffer in kernel.workspaces]
    memory = tuple(Memory(name, *shape) for name, shape in zip(params[ARRAYS:], shapes, strict=True))
    launches = tuple(replace(launch, overlaps=kernel.launched_early) for launch in read_launches(kernel.host))
    others = [
        each for launch in launches for each in launch.parameters if not isinstance(each, PlainBuffer | TensorMap)
    ]
    if others:
        raise UnsupportedLaunch(
            "a parameter is no matrix", value=", ".join(map(str, others)), remedy="run it by harness.build.executable"
        )
    return BuiltSchedule(tuple(params[:ARRAYS]), launches, memory, kernel.digests, kernel.cubin.data)


class LoadedSchedule:
    """A schedule's kernels on torch's current GPU: ``loaded(a, b, c)`` puts their launches into its current stream.

    What the kernels leave for each other is zeros at first, and kept as long as this lives, and with it what a CUDA
    graph captured. Two calls must not run at once. Nothing is checked but the driver's status.
    """

    def __init__(self, built: BuiltSchedule, torch: Any, driver: Driver) -> None:
        self._torch, device = torch, torch.cuda.current_device()
        self._memory = [
            torch.zeros(each.shape, dtype=getattr(torch, each.dtype), device=device) for each in built.memory
        ]
        names = *built.names, *(each.name for each in built.memory)
        self._launches = [_Launch(built, launch, names, driver, device) for launch in built.launches]

    def __call__(self, *matrices: Any) -> None:
        stream = self._torch.cuda.current_stream().cuda_stream
        addresses = [array.data_ptr() for array in (*matrices, *self._memory)]
        for launch in self._launches:
            launch(stream, *addresses)


def load_schedule(built: BuiltSchedule, backend: GpuBackend) -> LoadedSchedule:
    """Load a schedule's kernels on the backend's GPU; raises DriverError."""
    return LoadedSchedule(built, backend.torch, cuda_driver())


class _Launch(KeptLaunches):
    """One of a schedule's launches, of all its matrices and memory by their addresses."""

    def __init__(
        self, built: BuiltSchedule, launch: LaunchPlan, names: Sequence[str], driver: Driver, device: int
    ) -> None:
        super().__init__(load_kernel(CompiledKernel(launch, built.cubin), driver, device), launch)
        self._names = names

    def _bind(self, stream: int, *addresses: int) -> Callable[[], int]:
        by_name = dict(zip(self._names, addresses, strict=True))
        return self._prepared(stream, [self._value(parameter, by_name) for parameter in self._plan.parameters])
