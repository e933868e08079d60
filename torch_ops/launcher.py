"""Compile, load and launch explicit kernels: what a launch needs is made once for each set of addresses, and kept.

TVM's host function checks its arguments and encodes tensor maps at every call. Here a call finds its launch in a cache
and hands it to the driver.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import tvm
from tvm import tirx
from tvm.target import Target

from tensorir_ladder.kernels.codegen.host_code import launch_plans
from tensorir_ladder.kernels.codegen.launch_plan import (
    GIVEN,
    LaunchPlan,
    MatrixRows,
    PlainBuffer,
    RowCount,
    TensorMap,
    UnsupportedLaunch,
)
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.schedules.pipeline.lowering import PTXAS_OPTIONS
from tensorir_ladder.torch_ops.driver import Driver, launch_config

if TYPE_CHECKING:
    import torch

Parameter = TensorMap | PlainBuffer | RowCount
TIR_PIPELINE = "tirx"
FLAGS = "int32"  # the dtype of workspaces that are zeros between launches
CACHED_LAUNCHES = 512  # of one kernel; one takes less than 1 KiB
CAPTURED_ROOMS = 4  # of one kernel, for captures that may still go on


class CompiledKernel(NamedTuple):
    """A kernel as it is launched, and its cubin; ``behind`` are launches of further kernels in it, in their order."""

    plan: LaunchPlan
    cubin: bytes
    behind: tuple[LaunchPlan, ...] = ()


def compile_kernel(
    function: tirx.PrimFunc, target: Target, compiler: Compiler, pipeline: str = TIR_PIPELINE
) -> CompiledKernel:
    """Lower a kernel by TVM's passes of that name and compile it, once per CUDA text: cubins are kept on disk.

    Raises UnsupportedLaunch for what :func:`kernels.codegen.host_code.launch_plans` cannot read, CompileError from the
    compiler.
    """
    generated = generate(tvm.IRModule({"main": function}), target, pipeline)
    plan, *behind = launch_plans(generated)
    options = tuple(map(str, (function.attrs or {}).get(PTXAS_OPTIONS, ())))
    cubin = compile_cubin(generated.cuda, str(target.attrs["arch"]), compiler, options, kernel=plan.kernel)
    return CompiledKernel(plan, cubin.data, tuple(behind))


class Room(NamedTuple):
    """Memory for all of a kernel's workspaces, in their order. Who launches keeps it until the launch is recorded."""

    addresses: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]


class Workspaces:
    """A kernel's device memory between launches: a set for each stream, whose launches follow each other.

    A kernel whose blocks hand sums to each other (:mod:`kernels.partial_sums`) needs room for these, and flags that are
    zeros before the first launch and that every launch leaves as zeros. Room is made at a stream's first launch, and
    kept as long as the kernel.

    What a CUDA graph launches may be replayed in any stream, beside launches of the one where it was captured: a graph
    has memory of its own, a set for each stream of its capture, whose flags it lowers once at each replay, before the
    first of these launches. ``capture_of(stream)`` numbers the capture that a stream takes part in; who forgets a
    capture that goes on makes new room, whose flags are lowered as well.
    """

    def __init__(self, buffers: tuple[PlainBuffer, ...], capture_of: Callable[[int], int]) -> None:
        self.buffers, self._capture_of = buffers, capture_of
        self._by_stream: dict[int, Room] = {}
        self._captured: dict[tuple[int, int], Room] = {}

    def __bool__(self) -> bool:
        return bool(self.buffers)

    def of(self, stream: int, like: torch.Tensor) -> Room:
        """Give room to a launch in torch's current stream, whose address is given, on the GPU of a tensor."""
        import torch

        if torch._C._cuda_isCurrentStreamCapturing():  # torch.cuda's asks whether there is CUDA, each time
            return self._of_capture((self._capture_of(stream), stream), like)
        # Of two threads' first launches one makes the room that both take.
        return self._by_stream.get(stream) or self._by_stream.setdefault(stream, self._made(like))

    def _of_capture(self, key: tuple[int, int], like: torch.Tensor) -> Room:
        """Give the room of a capture's stream. It is kept until the capture has ended, lest the graph reuse it."""
        if (room := self._captured.get(key)) is None:
            for oldest in list(self._captured)[: 1 - CAPTURED_ROOMS]:
                self._captured.pop(oldest, None)
            room = self._captured[key] = self._made(like)
        return room

    def _made(self, like: torch.Tensor) -> Room:
        """Make new memory; only flags are filled."""
        import torch

        tensors = []
        for buffer in self.buffers:
            make = like.new_zeros if buffer.dtype == FLAGS else like.new_empty
            tensors.append(make((prod(buffer.shape),), dtype=getattr(torch, buffer.dtype)))
        return Room(tuple(tensor.data_ptr() for tensor in tensors), tuple(tensors))


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in a GPU's memory, and its workspaces there; ``label`` names it.

    ``behind`` are kernels that are launched after it, on the same matrices and workspaces.
    """

    driver: Driver
    device: int
    plan: LaunchPlan
    function: ctypes.c_void_p
    workspaces: Workspaces
    label: str = ""
    behind: tuple[LoadedKernel, ...] = ()

    @property
    def together(self) -> LaunchPlan:
        """The plan, with the parameters of what is launched behind it, too."""
        return with_parameters_of(self.plan, [each.plan for each in self.behind])


def with_parameters_of(plan: LaunchPlan, behind: Sequence[LaunchPlan]) -> LaunchPlan:
    """Return a plan with the parameters of those behind it, each once."""
    found = [parameter for each in (plan, *behind) for parameter in each.parameters]
    return replace(plan, parameters=tuple(dict.fromkeys(found))) if behind else plan


def load_kernel(kernel: CompiledKernel, driver: Driver, device: int, label: str = "") -> LoadedKernel:
    """Load a kernel on a GPU, for good; raises DriverError."""
    driver.enter(device)
    workspaces = Workspaces(with_parameters_of(kernel.plan, kernel.behind).workspaces, driver.capture)
    first, *behind = (
        LoadedKernel(driver, device, plan, driver.load(kernel.cubin, plan), workspaces, label)
        for plan in (kernel.plan, *kernel.behind)
    )
    return replace(first, behind=tuple(behind))


class KeptLaunches:
    """Launches a loaded kernel by a plan of its own: what a launch needs is made once for each set of addresses."""

    def __init__(self, loaded: LoadedKernel, plan: LaunchPlan) -> None:
        self._kernel, self._plan = loaded, plan
        self._bound = functools.lru_cache(CACHED_LAUNCHES)(self._bind)
        self._entered, self._enter, self._device = loaded.driver.entered, loaded.driver.enter, loaded.device

    def __call__(self, stream: int, *addresses: int) -> None:
        if self._device not in self._entered.devices:
            self._enter(self._device)
        if status := self._bound(stream, *addresses)():
            raise self._kernel.driver.error("cuLaunchKernelEx", status)

    def _bind(self, stream: int, *addresses: int) -> Callable[[], int]:
        """Prepare the launch of these addresses.

        The stream is part of it, so that no thread changes what another is launching.
        """
        raise NotImplementedError

    def _value(self, parameter: Parameter, addresses: Mapping[str, int]) -> Any:
        """Make the value that the driver is given for a parameter: of a buffer, by its address."""
        address = addresses[parameter.buffer]
        if isinstance(parameter, TensorMap):
            return self._kernel.driver.encode(parameter, address)
        return ctypes.c_void_p(address)

    def _prepared(self, stream: int, values: Sequence[Any]) -> Callable[[], int]:
        """Prepare a launch with parameters of these values."""
        parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        parameters.values = values  # what they point to lives as long
        config, launch = ctypes.pointer(launch_config(self._plan, stream)), self._kernel.driver.library.cuLaunchKernelEx
        return functools.partial(launch, config, self._kernel.function, parameters, None)


class Launcher(KeptLaunches):
    """Launches a loaded kernel for matrices that lie in memory as ``matrices`` says, in the order of its arguments.

    ``launcher(stream, *addresses)``, the matrices' and behind them those of :attr:`workspaces`, puts a launch into a
    stream, which is a CUstream's address (0: the default stream), and returns before it runs. Nothing is checked but
    the driver's status: addresses must be multiples of 16, of memory that the GPU can reach. ``check(*addresses)`` may
    refuse some; it is asked when they are seen for the first time. It only launches, so that it may be called while a
    CUDA graph is captured; it may be called by several threads at once.

    Raises UnsupportedLaunch, when made, for matrices that the kernel cannot reach so; DriverError.
    """

    def __init__(
        self,
        loaded: LoadedKernel,
        matrices: Mapping[str, MatrixRows],
        check: Callable[..., object] = lambda *_addresses: None,
    ) -> None:
        rows = matrices["A"].rows
        super().__init__(loaded, loaded.plan.of_rows(rows))
        self._names = (*matrices, *(buffer.buffer for buffer in loaded.workspaces.buffers))
        self._parameters = _with_matrices(loaded.plan, matrices)
        self._rows, self._check, self.workspaces = rows, check, loaded.workspaces
        self._behind = [Launcher(each, matrices) for each in loaded.behind]

    def _bind(self, stream: int, *addresses: int) -> Callable[[], int]:
        self._check(*addresses)
        by_name = dict(zip(self._names, addresses, strict=True))
        first = self._prepared(stream, [self._value(parameter, by_name) for parameter in self._parameters])
        if not self._behind:
            return first
        return functools.partial(_launched, [first, *(each._bind(stream, *addresses) for each in self._behind)])

    def _value(self, parameter: Parameter, addresses: Mapping[str, int]) -> Any:
        """Make the value of a parameter, which may be the number of rows."""
        return ctypes.c_int32(self._rows) if isinstance(parameter, RowCount) else super()._value(parameter, addresses)


def _launched(launches: Sequence[Callable[[], int]]) -> int:
    """Launch one after another; return the driver's first status that is no success, or 0."""
    return next(filter(None, (launch() for launch in launches)), 0)


def _with_matrices(plan: LaunchPlan, matrices: Mapping[str, MatrixRows]) -> list[Parameter]:
    """Fit a plan's parameters to the matrices at hand; workspaces are as the plan has them."""
    if missing := {parameter.buffer for parameter in plan.parameters} & set(GIVEN) - set(matrices):
        raise UnsupportedLaunch(
            "the kernel takes further buffers", value=", ".join(sorted(missing)), remedy="give matrices for them"
        )
    made: list[Parameter] = []
    for parameter in plan.parameters:
        if isinstance(parameter, TensorMap):
            made.append(parameter.of(matrices[parameter.buffer]))
            continue
        if isinstance(parameter, PlainBuffer) and parameter.buffer in matrices:
            parameter.check(matrices[parameter.buffer])
        made.append(parameter)
    return made
