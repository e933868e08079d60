"""TVM's MetaSchedule on the same unscheduled TensorIR: a search of so many seconds, its cost model random.

Its learned model needs xgboost, and pays only over many more trials. Trials are built and timed in processes of their
own; the best schedule found is then compiled as our steps are.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from unittest import mock

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Schedule
from tvm.target import Target

from tensorir_ladder.harness.build import compile_module
from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, say
from tensorir_ladder.kernels.codegen.toolchain import compile_cubin, require_compiler
from tensorir_ladder.schedules.tiles import STATIC_SHARED_BYTES
from tensorir_ladder.schedules.workloads import Matmul

BUDGET_S = 90.0  # of one product; a batch that has begun is ended
TRIALS_AT_ONCE = 32
UNTIMED_S = 1e9
# A trial whose build takes longer is passed over. By TVM's 30 seconds, 10 of 32 trials at 1024, written out at length,
# held up two thirds of the budget on 16 cores, to no end.
BUILD_S = 10.0
TIMED_MS = 20  # of a trial, at least; three times


def search_target(machine: GpuSpec) -> Target:
    """Limit the machine's target to the shared memory that is declared statically, as MetaSchedule's kernels do."""
    return replace(machine, smem_per_block_bytes=STATIC_SHARED_BYTES).target()


def timed_runner() -> ms.Runner:
    """Run trials one after the other on this machine's GPU, each with the L2 full of something else."""
    config = ms.runner.EvaluatorConfig(number=1, repeat=3, min_repeat_ms=TIMED_MS)
    return ms.runner.LocalRunner(timeout_sec=30, evaluator_config=config)


def search(
    problem: Matmul,
    target: Target,
    budget_s: float,
    builder: ms.Builder | str = "local",
    runner: ms.Runner | None = None,
) -> tuple[Schedule, int]:
    """Search for so many seconds; return the fastest schedule, and how many trials were timed; or raise PeerFailed."""
    mod = tvm.IRModule({"main": problem.prim_func()})
    database, deadline = ms.database.MemoryDatabase(), time.perf_counter() + budget_s
    runner, seed, timed = runner or timed_runner(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while time.perf_counter() < deadline:
            seed += 1
            options = {"builder": builder, "runner": runner, "database": database, "cost_model": "random"}
            counts = {"max_trials_global": TRIALS_AT_ONCE, "num_trials_per_iter": TRIALS_AT_ONCE, "seed": seed}
            counts |= {"num_tuning_cores": os.cpu_count()}  # else it needs psutil to count them
            ms.tune_tir(mod, target, folder, **counts, **options)
            timed = trials_timed(database)
            say(f"metaschedule: {timed} trials timed, {max(0, deadline - time.perf_counter()):.0f} s left")
    if not timed:
        raise PeerFailed(f"none of MetaSchedule's trials of {problem.shape} {problem.dtype} could be built and timed")
    return ms.tir_integration.compile_tir(database, mod, target), timed


def trials_timed(database: ms.Database) -> int:
    """Count the trials that ran; those that did not are kept with a time that none can take."""
    records = database.get_all_tuning_records()
    return sum(bool(record.run_secs) and float(record.run_secs[0]) < UNTIMED_S for record in records)


def enter(arena: Arena, machine: GpuSpec) -> list[Entrant]:
    """Enter the best schedule of a search, compiled by the compiler and with the flags of our own kernels."""
    compiler, problem = require_compiler(), arena.problem
    say(f"metaschedule: searching {problem.shape} {problem.dtype} for {BUDGET_S:.0f} s")
    # Side by side, one to a core; what takes long is given up.
    builder = ms.builder.LocalBuilder(max_workers=os.cpu_count(), timeout_sec=BUILD_S)
    path = os.pathsep.join([str(compiler.nvcc.parent), os.environ.get("PATH", "")])
    with mock.patch.dict(os.environ, {"TVM_CUDA_COMPILE_MODE": "nvcc", "PATH": path}):  # of the builders' processes
        found, trials = search(problem, search_target(machine), BUDGET_S, builder)
    program = compile_module(found.mod, machine, lambda source: compile_cubin(source, machine.arch, compiler).data)
    return [Entrant(KIND.name, program["main"], f"{trials} trials in {BUDGET_S:.0f} s, random cost model")]


KIND = PeerKind("metaschedule", "TVM's search, 90 seconds a product", ("metaschedule",), enter, in_all=False)
