"""TVM's own default GPU rules (dlight) on the same unscheduled TensorIR, compiled as our steps are."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir import dlight
from tvm.target import Target

from tensorir_ladder.harness.build import compile_module
from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import Machine
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, say
from tensorir_ladder.kernels.codegen.toolchain import compile_cubin, require_compiler
from tensorir_ladder.schedules.workloads import Matmul


def rules() -> tuple[Any, ...]:
    """Return dlight's rules for GPUs, in the order in which its users apply them; the first that fits is taken."""
    gpu = dlight.gpu
    return gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback()


def scheduled(problem: Matmul, target: Target) -> tuple[tvm.IRModule, str]:
    """Let dlight schedule the product for ``target``; returns it, and the name of the rule that did, or PeerFailed."""
    function = problem.prim_func()
    with target:
        rule = next((rule for rule in rules() if rule.apply(function, target, False) is not None), None)
        if rule is None:
            raise PeerFailed(f"none of dlight's rules takes {problem.shape} {problem.dtype}")
        return dlight.ApplyDefaultSchedule(rule)(tvm.IRModule({"main": function})), type(rule).__name__


def enter(arena: Arena, machine: Machine) -> list[Entrant]:
    """Enter dlight's kernel, compiled by the compiler and with the flags of our own kernels."""
    compiler = require_compiler()
    say(f"dlight: compiling {arena.problem.shape}")
    mod, rule = scheduled(arena.problem, machine.target())
    executable = compile_module(mod, machine, lambda source: compile_cubin(source, machine.arch, compiler).data)
    return [Entrant("dlight", executable["main"], f"rule gpu.{rule}")]


KIND = PeerKind("dlight", "TVM's default GPU rules, untuned", ("dlight",), enter)
