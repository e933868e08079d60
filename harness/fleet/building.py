"""Build candidates in processes of their own: a library to upload, and what TVM's database keeps of the schedule."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tvm
import tvm_ffi
from tvm.s_tir import Schedule, Trace
from tvm.s_tir import meta_schedule as ms

from tensorir_ladder.harness.build import Case, Kernel, UnsupportedCase, compile_module, compiled, lower
from tensorir_ladder.harness.execution import compile_serial
from tensorir_ladder.harness.fleet.messages import Check, Module, file_name
from tensorir_ladder.kernels.codegen.build_cache import BuildCache
from tensorir_ladder.kernels.codegen.toolchain import CompileError, require_compiler
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.memory.workspaces import pass_workspaces
from tensorir_ladder.schedules.workloads import Matmul

Result = TypeVar("Result")
MODULES = BuildCache("modules")
CONFIG = "tensorir_ladder.config"  # annotation of a trace that names a configuration


@dataclass(frozen=True)
class BuiltCandidate:
    """A candidate ready to be measured, and what it costs beside its time.

    ``cost`` as :func:`harness.tuning.cost` has it; ``entry`` is a tuning record of TVM's database, without its run
    time.
    """

    module: Module
    cost: tuple[int, int, int]
    entry: str


@dataclass(frozen=True)
class NotBuilt:
    """A candidate that cannot be built, and why."""

    why: str


def build(case: Case, place: str) -> BuiltCandidate | NotBuilt:
    """Build a case for a server of ``place``, "gpu" or "llvm"."""

    def built() -> BuiltCandidate:
        kernel, module = _module(case, place)
        cost = case.stages_built, kernel.smem_bytes, kernel.cubin.registers if kernel.cubin else 0
        return BuiltCandidate(module, cost, tuning_entry(kernel, place))

    return _or_why(built)


def build_check(long: Case, place: str) -> Check | NotBuilt:
    """Build a configuration's case with a long reduction (:mod:`harness.large_k`), to be run and checked."""
    return _or_why(lambda: Check(_module(long, place)[1], long.problem))


def _or_why(build: Callable[[], Result]) -> Result | NotBuilt:
    try:
        return build()
    except (IllegalSchedule, UnsupportedCase, CompileError) as refused:
        return NotBuilt(str(refused))
    except Exception as error:  # noqa: BLE001 - TVM's, of many kinds: one candidate, not the search
        return NotBuilt(f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}")


def _module(case: Case, place: str) -> tuple[Kernel, Module]:
    kernel = lower(case)
    if place == "gpu":
        kernel = compiled(kernel, require_compiler())
    made_from = [place, kernel.cuda, kernel.cubin.sha256 if kernel.cubin else "", tvm.__version__, str(case)]
    kept = MODULES.get(made_from, ".so", lambda: _library(kernel, place))
    shapes = kernel.workspaces if place == "gpu" else []
    memory = tuple((tuple(map(int, buffer.shape)), str(buffer.dtype)) for buffer in shapes)
    return kernel, Module(str(case), file_name(kept.content), str(kept.path), memory)


def _library(kernel: Kernel, place: str) -> bytes:
    on_cpu = place == "llvm"
    executable = compile_serial(kernel.schedule_for_cpu.mod) if on_cpu else _gpu_executable(kernel)
    with tempfile.TemporaryDirectory(prefix="tensorir-ladder-") as folder:
        path = Path(folder, "module.so")
        executable.export_library(str(path))
        return path.read_bytes()


def _gpu_executable(kernel: Kernel) -> Any:
    used: list[str] = []

    def deliver(source: str) -> bytes:
        used.append(source)
        return kernel.cubin.data

    mod = pass_workspaces(kernel.mod)
    executable = compile_module(mod, kernel.machine, deliver, kernel.pass_config, kernel.tir_pipeline)
    if set(used) != {kernel.cuda}:
        # Without a driver TVM keeps the text, which a server would have to compile.
        raise CompileError(
            "TVM puts cubins into modules only where there is NVIDIA's driver (libcuda); tune where it is installed"
            if not used
            else f"TVM generated other CUDA text for {kernel.label} than the text that was compiled"
        )
    return executable


def tuning_entry(kernel: Kernel, place: str) -> str:
    """Return a tuning record of TVM's database, as JSON, with a run time of 0 to be replaced.

    Its trace is the schedule's own where replaying it gives that schedule. Explicit kernels have none, and of some
    schedules it does not hold all: then it is one annotation of the block, which names the configuration.
    """
    case = kernel.case
    workload = workload_of(case.problem)
    trace = _own_trace(kernel) or _named_trace(case)
    target = tvm.target.Target("llvm") if place == "llvm" else kernel.machine.target()
    arguments = ms.arg_info.ArgInfo.from_prim_func(case.problem.prim_func())
    return json.dumps(ms.database.TuningRecord(trace, workload, [0.0], target, arguments).as_json())


def workload_of(problem: Matmul) -> ms.database.Workload:
    """Return a product as a workload of TVM's database."""
    return ms.database.Workload(tvm.IRModule({"main": problem.prim_func()}))


def _own_trace(kernel: Kernel) -> Trace | None:
    if kernel.explicit:
        return None
    own = kernel.schedule
    try:
        again = Schedule(kernel.case.problem.prim_func())
        own.trace.apply_to_schedule(again, remove_postproc=False)
    except (RuntimeError, ValueError, IndexError):  # at what schedules.passes.replace_untraced marked
        return None
    return own.trace if tvm_ffi.structural_equal(again.mod, own.mod) else None


def _named_trace(case: Case) -> Trace:
    sch = Schedule(case.problem.prim_func())
    sch.annotate(sch.get_sblock("matmul"), CONFIG, f"{case.step.name} {case.variant} {case.tile} {case.stages_built}")
    return sch.trace
