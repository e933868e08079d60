"""Products of :func:`torch_ops.matmul` on GPUs without wgmma, and of float32, drawn at random.

Each goes as a call would: choice, kernel and launch. Small ones run in the emulator, against float64; larger ones are
compiled by nvcc.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm

from tensorir_ladder.emulator import EmulatedProgram, KernelFault
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.workers import Tell
from tensorir_ladder.kernels.codegen.host_code import launch_plans
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import CompileError, require_compiler
from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.lab.draws import Draws, Outcome
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops.batches import Batches
from tensorir_ladder.torch_ops.launcher import compile_kernel, with_parameters_of
from tensorir_ladder.torch_ops.operands import OPERANDS, Form
from tensorir_ladder.torch_ops.prepared import choose_for

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
ON_HOPPER = "sm_90a"  # float32 alone
SIZES = (1, 2, 5, 8, 9, 12, 16, 17, 31, 33, 48, 63, 64, 65, 100, 128, 130)
DEPTHS = (1, 3, 7, 8, 16, 24, 33, 63, 64, 65, 96, 100, 127, 128, 200, 257)
LONG = (1024, 1536, 2048)  # of which few results are cut in parts
LARGE = (1, 7, 16, 64, 100, 197, 512, 1000, 1024, 2047, 4096)
UNITS = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-20}


@dataclass(frozen=True)
class DrawnCall:
    """A product with its epilogue, a batch with operands that are broadcast, and the architecture."""

    problem: Matmul
    finish: Epilogue
    batch: int
    broadcast: str
    arch: str

    def __str__(self) -> str:
        one, batch = self.problem, f", {self.batch} with {self.broadcast or 'nothing'} broadcast"
        return f"{one.shape} {one.layout} {one.dtype} to {one.out_dtype}, {self.finish}, {self.arch}{batch}"


def draw_call(seed: int, number: int, small: bool, arch: str = "") -> DrawnCall:
    """Draw a product that the emulator runs in a second, or a large one, for an architecture or any of them."""
    choose = random.Random(f"{seed} {number}").choice
    arch = arch or choose((*ARCHES, ON_HOPPER))
    dtype = "float32" if arch == ON_HOPPER else choose(OPERANDS)
    m, n, k = choose(SIZES if small else LARGE), choose(SIZES if small else LARGE), choose(DEPTHS if small else LARGE)
    if small and m * n < 4096 and choose((False, True)):
        k = choose(LONG)
    out = choose((dtype, "float32"))
    biased = Epilogue(-0.5, "float32", "relu"), Epilogue(bias=out, activation="gelu")
    finish = choose((PLAIN, PLAIN, *biased, Epilogue(activation="silu"), Epilogue(2.0)))
    batch = choose((1, 1, 1, 3))
    broadcast = choose(("", "A")) if batch > 1 else ""  # one B for all makes rows of one product
    return DrawnCall(Matmul(m, n, k, dtype, choose(LAYOUTS), out), finish, batch, broadcast, arch)


def made_for(drawn: DrawnCall) -> tuple[Any, Matmul, Any]:
    """Choose as the call does for contiguous tensors."""
    problem, batch = drawn.problem, drawn.batch
    a_batch, b_batch = ((batch,) if batch > 1 and name not in drawn.broadcast else () for name in "AB")
    m, n, k = problem.m, problem.n, problem.k
    a = Form("a", (*a_batch, m, k), (*(m * k for _ in a_batch), k, 1), problem.dtype)
    steps = (n, 1) if problem.layout == "nn" else (1, k)
    b = Form("b", (*b_batch, k, n), (*(k * n for _ in b_batch), *steps), problem.dtype)
    batches = Batches.of(a, b, None, problem.out_dtype, dense=True)
    assert not batches.copies
    return choose_for(batches.arranged()[0], drawn.finish, False, machine_for(drawn.arch).for_choices())


def emulated_error(drawn: DrawnCall) -> str:
    """Run a product in the emulator; say what is wrong with it, if anything."""
    choice, problem, setting = made_for(drawn)
    target = setting.machine.target
    made = generate(tvm.IRModule({"main": choice.build(problem, setting)}), target, choice.PIPELINE)
    draw = np.random.default_rng(0)
    batch = (setting.batch,) if setting.batch > 1 else ()
    of_a, of_b = (() if name in setting.broadcast else batch for name in "AB")
    shapes = (*of_a, problem.m, problem.k), (*of_b, *problem.b_shape)
    a, b = (draw.integers(-2, 3, shape).astype(_dtype(problem.dtype)) for shape in shapes)
    columns = b if problem.layout == "nn" else b.swapaxes(-1, -2)
    columns[..., -1, 0] = np.nan
    bias = draw.standard_normal(problem.n).astype(_dtype(drawn.finish.bias or "float32"))
    got = np.full((*batch, problem.m, problem.n), -1, _dtype(problem.out_dtype))
    given = {"A": a, "B": b, "C": got} | ({"bias": bias} if drawn.finish.bias else {})
    launches = launch_plans(made)
    rooms = with_parameters_of(launches[0], launches[1:]).workspaces
    names = (*given, *(room.buffer for room in rooms))
    memory = tuple((room.shape, _dtype(room.dtype)) for room in rooms)
    operands = tuple(name for name in given if name != "C")
    EmulatedProgram("a call", made.cuda, launches, names, memory, operands=operands)(*given.values())
    sums = drawn.finish.alpha * (a.astype(np.float64) @ columns.astype(np.float64))
    wanted = _activated(sums + (bias.astype(np.float64) if drawn.finish.bias else 0), drawn.finish.activation)
    found = got.astype(np.float64)
    if (np.isnan(found) != np.isnan(wanted)).any():
        return "NaN in other places"
    number = ~np.isnan(wanted)
    error, largest = (np.max(abs(each[number]), initial=0) for each in (found - wanted, wanted))
    return "" if error <= UNITS[problem.out_dtype] * largest + 1e-6 else f"an error of {error:.3g} at {largest:.3g}"


def run_calls(draws: Draws, tell: Tell) -> list[Outcome]:
    """Run drawn products in the emulator where ``draws.emulate`` is not 0; else compile them."""
    outcomes = []
    for number in draws.numbers:
        drawn = draw_call(draws.seed, number, bool(draws.emulate), draws.arch)
        tell(str(drawn))
        try:
            wrong = emulated_error(drawn) if draws.emulate else compiled_as(drawn)
            outcomes.append(Outcome(number, "wrong" if wrong else "right", f"{drawn}: {wrong}"))
        except (KernelFault, CompileError, ValueError) as error:
            outcomes.append(Outcome(number, "failed", f"{drawn}: {type(error).__name__}: {error}"))
    return outcomes


def compiled_as(drawn: DrawnCall) -> str:
    """Compile a product's kernel for its architecture; CompileError says that nvcc does not."""
    choice, problem, setting = made_for(drawn)
    compile_kernel(choice.build(problem, setting), setting.machine.target, require_compiler(), choice.PIPELINE)
    return ""


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _activated(x: np.ndarray, activation: str) -> np.ndarray:
    if activation == "gelu":
        return x / 2 * (1 + np.vectorize(math.erf)(x / 2**0.5))
    return {"relu": np.where(x < 0, 0, x), "silu": x / (1 + np.exp(-x)), "": x}[activation]
