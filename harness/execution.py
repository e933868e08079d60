"""Run a kernel: on the GPU as compiled, or its scheduled TensorIR on the CPU through LLVM.

A third way, its generated CUDA on the CPU, is :mod:`harness.emulation`. All offer the same few operations, so that
checking is written once: make data, poison an output, run, and compare with a float64 reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import compilation_pipeline

from tensorir_ladder.harness.build import Kernel, executable
from tensorir_ladder.harness.machines import GpuSpec, machine_for
from tensorir_ladder.schedules.loops.serpentine import lower_serpentines
from tensorir_ladder.schedules.passes import admit, on_functions
from tensorir_ladder.schedules.pipeline.lowering import unroll_rings
from tensorir_ladder.schedules.pipeline.one_barrier import drop_hidden_reads, show_reads
from tensorir_ladder.schedules.tensor_cores.fragments import whole_fragments
from tensorir_ladder.schedules.workloads import Matmul

CPU_PIPELINE = "tensorir_ladder_serial"
ALIGNMENT = 64  # bytes, of arrays as TVM's runtime makes them
GUARD, GUARD_BYTES = 0xA5, 1 << 16  # what stands before and behind an array that a kernel may write to


class NoGpu(RuntimeError):
    """A GPU (or torch, to drive it) is demanded and there is none."""


class Backend(Protocol):
    """A place to run kernels. Arrays are the backend's own (numpy on the CPU, torch on the GPU)."""

    name: str

    def load(self, kernel: Kernel) -> Any:
        """Load the kernel as a callable ``run(a, b, c)``."""

    def normal(self, seed: int, shape: tuple[int, int], dtype: str) -> Any:
        """Draw standard normal values, rounded to ``dtype``."""

    def integers(self, seed: int, shape: tuple[int, int], dtype: str) -> Any:
        """Draw whole numbers from −2 to 2."""

    def poisoned(self, shape: tuple[int, ...], dtype: str, value: float = math.nan) -> Any:
        """Make an output in which every element is ``value``, which no right kernel leaves there."""

    def float64(self, array: Any) -> Any:
        """Convert an array to float64."""

    def given(self, array: np.ndarray) -> Any:
        """Take a numpy array of a dtype that the backend has."""

    def copied(self, array: Any) -> Any:
        """Copy an array."""

    def same_bytes(self, one: Any, other: Any) -> bool:
        """Compare two arrays of one shape and dtype bit by bit: a NaN equals itself, 0 and −0 differ."""

    @property
    def xp(self) -> Any:
        """The arrays' own module, numpy or torch; only what both have under one name is asked of it."""

    def reference(self, problem: Matmul, a: Any, b: Any) -> Any:
        """Compute the product in float64."""
        return self.float64(a) @ self.float64(b if problem.layout == "nn" else b.swapaxes(-1, -2))

    def worst_error(self, output: Any, reference: Any) -> float:
        """Find the largest absolute difference; NaN if any element is NaN."""
        return float(abs(self.float64(output) - reference).max())


class StrayWrite(RuntimeError):
    """A write beside an array: ``at`` is the first such byte, from the array's first on, of which it has ``nbytes``."""

    def __init__(self, number: int, at: int, nbytes: int) -> None:
        super().__init__(f"array {number}, of {nbytes} bytes, was written beside: byte {at}")
        self.number, self.at, self.nbytes = number, at, nbytes

    def __reduce__(self) -> tuple[type[StrayWrite], tuple[int, int, int]]:
        """Say how it is made again in another process."""
        return type(self), (self.number, self.at, self.nbytes)


class NumpyArrays(Backend):
    """The array operations of a :class:`Backend` on the CPU, by numpy."""

    def normal(self, seed: int, shape: tuple[int, int], dtype: str) -> np.ndarray:
        """See :class:`Backend`."""
        return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))

    def integers(self, seed: int, shape: tuple[int, int], dtype: str) -> np.ndarray:
        """See :class:`Backend`."""
        return np.random.default_rng(seed).integers(-2, 3, shape).astype(numpy_dtype(dtype))

    def poisoned(self, shape: tuple[int, ...], dtype: str, value: float = math.nan) -> np.ndarray:
        """See :class:`Backend`."""
        return np.full(shape, value, numpy_dtype(dtype))

    def float64(self, array: np.ndarray) -> np.ndarray:
        """See :class:`Backend`."""
        return array.astype(np.float64)

    def given(self, array: np.ndarray) -> np.ndarray:
        """See :class:`Backend`."""
        return array

    def copied(self, array: np.ndarray) -> np.ndarray:
        """See :class:`Backend`."""
        return array.copy()

    def same_bytes(self, one: np.ndarray, other: np.ndarray) -> bool:
        """See :class:`Backend`."""
        return np.array_equal(one.view(np.uint8), other.view(np.uint8))

    @property
    def xp(self) -> Any:
        """See :class:`Backend`."""
        return np


class LlvmBackend(NumpyArrays):
    """The scheduled module on the CPU: prologue, body, epilogue and the stages of buffers are really executed.

    The lowering passes are those of the GPU, in their order, less the ones about threads: thread-bound
    loops run as ordinary loops, one thread after the other, each doing the whole of a cooperative copy.
    Tiling, indices, predicates, vectors, stage and order lists and the stages of buffers are checked that way;
    barriers, waits for cp.async and opaque instructions are not: a tensorized step runs as it was scheduled before
    tensorization.
    """

    name = "llvm"

    def load(self, kernel: Kernel) -> Any:
        """See :class:`Backend`."""
        return guarded(compile_serial(kernel.schedule_for_cpu.mod)["main"])


def guarded(function: Callable[..., Any]) -> Callable[..., None]:
    """Make a function of TVM's one of numpy's arrays, by :func:`run_guarded`.

    It runs on copies, all of which are written back: a kernel that writes to its operands shows.
    """

    def call(*arrays: np.ndarray) -> None:
        for array, after in zip(arrays, run_guarded(function, *arrays)):
            np.copyto(array, after)

    return call


def run_guarded(function: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """Run a function of TVM's on copies of arrays, each between GUARD_BYTES of memory; return the copies.

    StrayWrite where the function wrote there.
    """
    rooms = [_aligned(array.nbytes + 2 * GUARD_BYTES) for array in arrays]
    tensors = []
    for room, array in zip(rooms, arrays):
        inside = tvm.runtime.from_dlpack(room[GUARD_BYTES : GUARD_BYTES + array.nbytes])
        tensors.append(inside._create_view(array.shape, str(array.dtype)))
        tensors[-1].copyfrom(np.ascontiguousarray(array))
    function(*tensors)
    for number, (room, array) in enumerate(zip(rooms, arrays)):
        written = room != GUARD
        written[GUARD_BYTES : GUARD_BYTES + array.nbytes] = False
        if written.any():
            raise StrayWrite(number, int(written.argmax()) - GUARD_BYTES, array.nbytes)
    return [tensor.numpy() for tensor in tensors]


def _aligned(nbytes: int) -> np.ndarray:
    """Return so many bytes, all GUARD, at an address that vectors may begin at."""
    room = np.full(nbytes + ALIGNMENT, GUARD, np.uint8)
    return room[-room.ctypes.data % ALIGNMENT :][:nbytes]


class GpuBackend(Backend):
    """The compiled kernel on the GPU that torch sees."""

    name = "gpu"

    def __init__(self) -> None:
        self.torch = require_gpu()

    def load(self, kernel: Kernel) -> Any:
        """See :class:`Backend`."""
        return executable(kernel)["main"]

    def normal(self, seed: int, shape: tuple[int, int], dtype: str) -> Any:
        """See :class:`Backend`."""
        generator = self.torch.Generator("cuda").manual_seed(seed)
        return self.torch.randn(shape, generator=generator, device="cuda").to(getattr(self.torch, dtype))

    def integers(self, seed: int, shape: tuple[int, int], dtype: str) -> Any:
        """See :class:`Backend`."""
        generator = self.torch.Generator("cuda").manual_seed(seed)
        return self.torch.randint(-2, 3, shape, generator=generator, device="cuda").to(getattr(self.torch, dtype))

    def poisoned(self, shape: tuple[int, ...], dtype: str, value: float = math.nan) -> Any:
        """See :class:`Backend`."""
        return self.torch.full(shape, value, device="cuda", dtype=getattr(self.torch, dtype))

    def float64(self, array: Any) -> Any:
        """See :class:`Backend`."""
        return array.double()

    def given(self, array: np.ndarray) -> Any:
        """See :class:`Backend`."""
        return self.torch.from_numpy(array).cuda()

    def copied(self, array: Any) -> Any:
        """See :class:`Backend`."""
        return array.clone()

    def same_bytes(self, one: Any, other: Any) -> bool:
        """See :class:`Backend`."""
        return self.torch.equal(one.view(self.torch.uint8), other.view(self.torch.uint8))

    @property
    def xp(self) -> Any:
        """See :class:`Backend`."""
        return self.torch


def numpy_dtype(dtype: str) -> np.dtype:
    """Return the numpy dtype of a TVM dtype name."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def require_gpu() -> Any:
    """Import torch, with a CUDA device; NoGpu says what is missing."""
    try:
        import torch
    except ImportError as error:
        raise NoGpu("no torch, which drives the GPU; .venv/bin/python -m pip install -e '.[gpu]'") from error
    if not torch.cuda.is_available():
        raise NoGpu("torch sees no CUDA device; run where there is one, or with --on llvm or --on emulator")
    return torch


def gpu_present() -> bool:
    """Tell whether kernels can run on a GPU here."""
    return not why_none()


def why_none() -> str:
    """Say why there is no GPU here, and the remedy; empty where there is one."""
    try:
        require_gpu()
    except NoGpu as missing:
        return str(missing)
    return ""


def gpu_arch() -> str:
    """Name the architecture of the GPU at hand, with the suffix of its own instructions from sm_90 on."""
    return arch_of(*require_gpu().cuda.get_device_capability())


def arch_of(major: int, minor: int) -> str:
    """Name the architecture of a compute capability; see :func:`gpu_arch`."""
    return f"sm_{major}{minor}" + ("a" if major in (9, 10) else "")


def gpu_machine() -> GpuSpec:
    """Describe the GPU at hand as its driver does, with measured rates only where they are this GPU's."""
    properties = device_properties(require_gpu())
    return machine_for(gpu_arch()).of_gpu(properties.name, properties.multi_processor_count)


def device_properties(torch: Any) -> Any:
    """Ask the driver for what torch's current GPU has: name, multiprocessors, L2, memory."""
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def compile_serial(mod: tvm.IRModule) -> tvm.runtime.Executable:
    """Compile a GPU-scheduled module for the CPU; see :class:`LlvmBackend`."""
    compilation_pipeline.PIPELINE_MAP[CPU_PIPELINE] = lambda: (
        _serial_pipeline,
        s_tir.pipeline.finalize_host_passes,
        s_tir.pipeline.finalize_device_passes,
    )
    return tvm.compile(mod, target="llvm", tir_pipeline=CPU_PIPELINE)


@tvm.transform.module_pass(opt_level=0, name="SerialPipeline")
def _serial_pipeline(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    blocks = s_tir.transform
    serial = on_functions(lambda function: tvm_ffi.structural_map(function, (tirx.For, _serial_loop)))
    before = [
        blocks.CanonicalizeLoop(),
        blocks.LowerCrossThreadReduction(),
        blocks.LowerInitBlock(),
        blocks.PlanAndUpdateBufferAllocationLocation(),
        blocks.ConvertBlocksToOpaque(),
        blocks.CompactBufferAllocation(),
        serial,
        blocks.LowerAutoCopy(),
        blocks.LowerMatchBuffer(),
        blocks.StmtSimplify(),
        blocks.InjectPermutedLayout(),
        blocks.AnnotateIrregularLoop(),
        blocks.InjectSoftwarePipeline(),
    ]
    after = [
        blocks.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        blocks.LoopPartition(),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.StorageRewrite(),
        blocks.HoistIfThenElse(),
        tirx.transform.UnrollLoop(),
        blocks.RenormalizeSplitPattern(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
        blocks.RewriteUnsafeSelect(),
        tirx.transform.CommonSubexprElim(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        blocks.LowerThreadAllreduce(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        tirx.transform.BF16StorageLegalize(),
    ]
    mod = tvm.IRModule(
        {
            name: whole_fragments(drop_hidden_reads(show_reads(admit(function))))
            for name, function in mod.functions_items()
        }
    )
    mod = tvm.ir.transform.Sequential(before)(mod)
    return tvm.ir.transform.Sequential([*after, on_functions(lower_serpentines), unroll_rings()])(
        _map_statements(mod, tirx.AttrStmt, _without_async)
    )


def _map_statements(mod: tvm.IRModule, kind: type, change: Any) -> tvm.IRModule:
    functions = {name: tvm_ffi.structural_map(function, (kind, change)) for name, function in mod.functions_items()}
    return tvm.IRModule(functions)


def _serial_loop(loop: tirx.For) -> tirx.For:
    if loop.kind != tirx.ForKind.THREAD_BINDING:
        return loop
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)


def _without_async(attribute: tirx.AttrStmt) -> tirx.Stmt:
    # Commits and waits: here copies are done when they are issued.
    return attribute.body if str(attribute.attr_key).startswith("async_") else attribute
