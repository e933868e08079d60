"""MetaSchedule in the space of this project's rules, ranked by the steps' cost: 64 trials of a float32 product.

What a user of MetaSchedule gets by :mod:`relax.rules.space`; TVM's own space is :mod:`.metaschedule`.
"""

from __future__ import annotations

import os
import tempfile
from unittest import mock

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, PeerMissing, say
from tensorir_ladder.harness.peers.metaschedule import trials_timed
from tensorir_ladder.kernels.codegen.toolchain import require_compiler
from tensorir_ladder.relax.rules import (
    CheapestFirst,
    TileCost,
    contraction_space,
    import_quickly,
    local_builder,
    local_runner,
)
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.workloads import Matmul

TRIALS, AT_ONCE = 64, 32
BUILD_S, RUN_S = 60.0, 30.0  # of a trial at most
TIMED_MS = 40  # of a trial, at least


def search(
    problem: Matmul, machine: GpuSpec, target: Target, builder: ms.builder.Builder, runner: ms.runner.Runner
) -> tuple[tvm.tirx.PrimFunc, int]:
    """Search for TRIALS; return the function of the fastest, and how many were timed. PeerFailed where none was."""
    mod, model = tvm.IRModule({"main": problem.prim_func()}), TileCost(machine.for_choices())
    how = {"space": contraction_space(), "strategy": CheapestFirst(model), "cost_model": model, "seed": 1}
    counts = {"max_trials_global": TRIALS, "num_trials_per_iter": AT_ONCE, "num_tuning_cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder, import_quickly():
        database = ms.tune_tir(mod, target, folder, builder=builder, runner=runner, **how, **counts)
    if not (timed := trials_timed(database)):
        raise PeerFailed(f"no trial of {problem.shape} {problem.dtype} in the rules' space could be built and timed")
    return ms.tir_integration.compile_tir(database, mod, target).mod["main"], timed


def enter(arena: Arena, machine: GpuSpec) -> list[Entrant]:
    """Enter the fastest of the trials, compiled as it was measured."""
    problem = arena.problem
    if problem.dtype != "float32":
        raise PeerMissing("the space is of ordinary cores: float32")
    compiler, target = require_compiler(), machine.target()
    say(f"{KIND.name}: {TRIALS} trials of {problem.shape} {problem.dtype}")
    builder = local_builder(max_workers=os.cpu_count(), timeout_sec=BUILD_S)
    config = ms.runner.EvaluatorConfig(number=3, repeat=1, min_repeat_ms=TIMED_MS)
    path = os.pathsep.join([str(compiler.nvcc.parent), os.environ.get("PATH", "")])
    with mock.patch.dict(os.environ, {"TVM_CUDA_COMPILE_MODE": "nvcc", "PATH": path}):
        runner = local_runner(timeout_sec=RUN_S, evaluator_config=config)
        found, trials = search(problem, machine, target, builder, runner)
        program = tvm.compile(lower_ahead(found, target), target)
    return [Entrant(KIND.name, program["main"], f"{trials} trials, ranked by the steps' cost")]


KIND = PeerKind(
    "metaschedule-space",
    "TVM's search in the rules' space, 64 trials, a minute",
    ("metaschedule-space",),
    enter,
    in_all=False,
)
