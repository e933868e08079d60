"""Small models on the CPU: as they are defined, by LLVM, or each function as rules made it, in the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tensorir_ladder.harness.execution import NumpyArrays
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.verify import hold
from tensorir_ladder.harness.whole_models.arithmetic import DTYPE
from tensorir_ladder.harness.whole_models.building import RuleSet, build
from tensorir_ladder.harness.whole_models.definitions import Model
from tensorir_ladder.harness.whole_models.execution import Emulated, arrays, on_the_cpu
from tensorir_ladder.harness.whole_models.reference import draw_weights, expected


@dataclass(frozen=True)
class Checked:
    """Error and limit of the element that came nearest to its limit, and what ran, in words."""

    max_error: float
    tolerance: float
    kernels: str


def verify_model(
    model: Model,
    value: int,
    rules: RuleSet,
    machine: GpuSpec,
    backend: NumpyArrays,
    seed: int,
    emulated: bool,
    emulator_seed: int = 0,
) -> Checked:
    """Run a model at a value of its extent through TVM's virtual machine on the CPU, and check its output.

    ``emulated``: each function that ``rules`` scheduled runs as its CUDA in the emulator; otherwise
    the model runs by LLVM as it is defined, and the rules have no part in it. Raises WrongResult, and what building
    and the emulator raise.
    """
    module, shapes = model.exported(value)
    x = backend.normal(seed, model.shape(value), DTYPE)
    weights = {name: each.astype(DTYPE) for name, each in draw_weights(shapes, backend, seed + 1).items()}
    if not emulated:
        trial = expected(model, backend, x, weights, "float16")  # as the operators are defined
        error, limit = hold(partial(_into, on_the_cpu(module, ())), trial, backend)
        return Checked(error, limit, "by LLVM, as defined")
    built = build(model, value, rules, machine)
    stand_in = Emulated(built.fused, built.scheduled, rules.machine(machine), emulator_seed)
    running = on_the_cpu(built.fused, list(built.functions))
    trial = expected(model, backend, x, weights, built.sums)
    error, limit = hold(partial(_into, partial(running.instead, stand_in)), trial, backend)
    return Checked(error, limit, f"{stand_in.launched} kernels launched, sums of {built.sums}")


def _into(run: Any, *given: Any) -> None:
    *operands, output = given
    x, *weights = operands
    made = run(*arrays(x, dict(enumerate(weights)))).numpy()
    output[...] = made.reshape(output.shape)
