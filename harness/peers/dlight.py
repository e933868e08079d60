"""TVM's own default GPU rules (dlight) on the same unscheduled TensorIR, compiled as our steps are.

dlight asks a target's name for tensor cores, and takes "sm_90a", which is what TVM detects, for a machine without any.
So there are two peers: what a user gets without saying more, and what the rules do for "sm_90".
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import tvm
import tvm_ffi
from tvm.s_tir import dlight
from tvm.target import Target

from tensorir_ladder.harness.build import compile_module
from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, checked, say
from tensorir_ladder.harness.race import TUNING
from tensorir_ladder.kernels.codegen.toolchain import compile_cubin, require_compiler
from tensorir_ladder.relax.rules.tensor_intrinsics import import_quickly
from tensorir_ladder.schedules.workloads import Matmul

NAMES = ("dlight", "dlight (sm_90)")
STORED = {"nn": "B[K,N]", "nt": "B[N,K]ᵀ"}


def rules() -> tuple[Any, ...]:
    """Return dlight's rules for GPUs, in the order in which its users apply them; the first that fits is taken."""
    gpu = dlight.gpu
    return gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback()


def scheduled(problem: Matmul, target: Target) -> tuple[tvm.IRModule, str]:
    """Let dlight schedule the product for ``target``; returns it, and the name of the rule that did, or PeerFailed."""
    for rule in rules():
        with target, import_quickly():  # where dlight looks for tensor cores
            mod = dlight.ApplyDefaultSchedule(rule)(tvm.IRModule({"main": problem.prim_func()}))
        if "tirx.is_scheduled" in mod["main"].attrs:
            return mod, type(rule).__name__
    raise PeerFailed(f"none of dlight's rules takes {problem.shape} {problem.dtype}")


def plain(machine: GpuSpec) -> GpuSpec:
    """Return the machine by the name that dlight can read: "sm_90" for "sm_90a"."""
    return replace(machine, arch=re.sub(r"\D+$", "", machine.arch))


def enter(arena: Arena, machine: GpuSpec) -> list[Entrant]:
    """Enter dlight for the detected target, and for its plain name where that gives another kernel.

    With the plain name, B may be stored either way, as for cuBLAS: the faster of both forms is entered, and named.
    """
    problem, named = arena.problem, plain(machine)
    say(f"dlight: compiling {problem.shape}")
    detected = scheduled(problem, machine.target())
    forms = {layout: scheduled(replace(problem, layout=layout), named.target()) for layout in STORED}
    usual = _entrant(arena, machine, NAMES[0], machine.arch, problem.layout, *detected)
    if tvm_ffi.structural_equal(detected[0]["main"].body, forms[problem.layout][0]["main"].body):
        return [usual]
    entrants = [_entrant(arena, machine, NAMES[1], named.arch, layout, *form) for layout, form in forms.items()]
    return [usual, _fastest(arena, [checked(entrant, arena) for entrant in entrants])]


def _entrant(arena: Arena, machine: GpuSpec, name: str, target: str, layout: str, mod: Any, rule: str) -> Entrant:
    """Compile by the compiler and with the flags of our own kernels; B is turned where the layout is another."""
    compiler = require_compiler()
    launch = compile_module(mod, machine, lambda source: compile_cubin(source, machine.arch, compiler).data)["main"]

    def turned(a: Any, b: Any, c: Any) -> None:
        launch(a, arena.turned(b), c)

    run = launch if layout == arena.problem.layout else turned
    return Entrant(name, run, f"rule gpu.{rule}, target {target}, {STORED[layout]}")


def _fastest(arena: Arena, forms: list[Entrant]) -> Entrant:
    right = [form for form in forms if form.run]
    if len(right) < 2:
        return (right or forms)[0]
    timings = arena.race([(form.config, form.run) for form in right], TUNING).timings
    return min(zip(timings, right), key=lambda pair: pair[0].median_ms)[1]


KIND = PeerKind("dlight", "TVM's default GPU rules, untuned", NAMES, enter)
