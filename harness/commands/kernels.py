"""Lower the cases that a command names with their warnings, compile and verify them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from tensorir_ladder import emulator
from tensorir_ladder.harness import emulation, execution
from tensorir_ladder.harness.build import Case, Kernel, compiled, lower
from tensorir_ladder.harness.commands import NOT_VERIFIED
from tensorir_ladder.harness.commands.options import runs_on_gpu
from tensorir_ladder.harness.commands.printing import warn
from tensorir_ladder.harness.execution import Backend
from tensorir_ladder.harness.large_k import LargeK
from tensorir_ladder.harness.verify import draw_seeds, verify
from tensorir_ladder.kernels.codegen import toolchain

PLACES = {
    "gpu": "on the GPU",
    "llvm": "on the CPU (TensorIR through LLVM)",
    "emulator": "on the CPU (generated CUDA through the emulator)",
}

# Measured on two cores of a cloud machine, and good for no more than an estimate: multiply-adds a second, of ordinary
# cores and of tensor cores. A check runs a product so often that is timed here, seeds and kinds of data together.
SPEEDS = {"llvm": (2e9, 2e9), "emulator": (1e7, 2e8)}
RUNS = 5
LONG_S = 30.0

_large_k: dict[str, dict[Case, str]] = {}  # by backend: the sizes of a command share configurations
_warned: set[str] = set()  # a step's variants share their warnings, which are worth saying once


def lowered(case: Case) -> Kernel:
    """Lower a case; each warning of the schedule is printed once."""
    kernel = lower(case)
    for warning in kernel.warnings:
        if warning not in _warned:
            _warned.add(warning)
            warn(warning)
    return kernel


def built(case: Case) -> Kernel:
    """Lower a case, and compile it where there is a compiler."""
    compiler, kernel = toolchain.find_compiler(), lowered(case)
    return compiled(kernel, compiler) if compiler else kernel


def backend_for(options: argparse.Namespace, verified_on: tuple[str, ...]) -> Backend:
    """Choose where a kernel runs: where ``--on`` says, else the GPU, else the first of ``verified_on`` that is here.

    The emulator is here where there is a C++ compiler.
    """
    if runs_on_gpu(options):
        return execution.GpuBackend()
    lacking = {"gpu"} if emulator.find_host_compiler() else {"gpu", "emulator"}
    here = [name for name in verified_on if name not in lacking]
    name = options.on if options.on != "auto" else next(iter(here), "llvm")
    return emulation.EmulatorBackend(options.emulator_seed) if name == "emulator" else execution.LlvmBackend()


def verify_one(kernel: Kernel, backend: Backend, options: argparse.Namespace, remark: str) -> int:
    """Verify a kernel and print the one line that says how; return 0, or 3 where it cannot be verified."""
    step = kernel.case.step
    if why_not := step.unverified(kernel.case.variant, backend.name, kernel.machine.arch):
        if "emulator" in step.verified_on(kernel.case.variant) and not emulator.find_host_compiler():
            why_not += ", which needs a C++ compiler: install g++"
        done = f"compiled for {kernel.machine.arch}, " if kernel.cubin else ""
        print(f"{kernel.case}\n{done}not verified: {why_not}{'; ' + remark if remark else ''}", flush=True)
        return NOT_VERIFIED
    _announce(kernel, backend.name)
    result = verify(kernel, backend, draw_seeds(options.seed))
    long = LargeK(backend, partial(_loaded, backend), _large_k.setdefault(backend.name, {}))
    large_k = long.check(kernel.case, result.seeds[0])
    exact = "whole numbers exact, NaN and infinities as IEEE 754 says"
    also = "" if large_k == kernel.case.problem.shape else f"; {large_k if ' ' in large_k else f'also {large_k}'}"
    print(f"{kernel.case}: worst error {result.max_error:.2g}, tolerance {result.tolerance:.2g}, {exact}{also}")
    before = ", before tensorization" if backend.name == "llvm" and step.tensorized else ""
    print(f"verified {PLACES[backend.name]}{before}{'; ' + remark if remark else ''}", flush=True)
    return 0


def _announce(kernel: Kernel, backend: str) -> None:
    """Say before a check that takes long how long that may be, and the size that takes half a minute."""
    if backend not in SPEEDS:
        return
    problem, step = kernel.case.problem, kernel.case.step
    speed = SPEEDS[backend][step.tensorized or kernel.explicit]
    seconds = RUNS * problem.m * problem.n * problem.k / speed
    if seconds > LONG_S:
        size = 64 * int((LONG_S * speed / RUNS) ** (1 / 3) / 64)
        about = f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.0f} hours"
        warn(f"{kernel.case} takes about {about} {PLACES[backend]}; --size {size} takes half a minute")


def _loaded(backend: Backend, case: Case) -> Callable[..., Any]:
    kernel = lower(case)
    return backend.load(compiled(kernel, toolchain.require_compiler()) if backend.name == "gpu" else kernel)


def why_on_the_cpu(on: str) -> str:
    """Say why kernels run on the CPU: there is no GPU, ``--on`` does not want it, or it is not of the steps' kind."""
    if not execution.gpu_present():
        return "no GPU"
    return f"--on {on}" if on in ("llvm", "emulator") else f"the GPU here is {execution.gpu_arch()}"
