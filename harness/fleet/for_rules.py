"""What was tuned, for the rules: the machine that they choose tiles for, with the tiles that won on it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import tvm

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.records import TunedConfig, load_tuned
from tensorir_ladder.harness.tuning import TuningSpace, kernels_digest
from tensorir_ladder.schedules import cost
from tensorir_ladder.schedules.tiles import Choice
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps

log = logging.getLogger(__name__)


def tuned_machine(machine: GpuSpec, folder: Path) -> cost.Machine:
    """Return a machine for ``rules(target, machine)`` that knows what ``ladder tune --out FOLDER`` found on its GPU.

    Of products that a schedule (steps 1 to 10) was tuned for, the rules then take the winner's tile and stages. What
    another GPU, another TVM or other kernels were tuned to is left out; the latter two with a warning. RecordError for
    a folder that cannot be read.
    """
    own = [tuned for tuned in load_tuned(folder) if tuned.environment.gpu == machine.gpu]
    return replace(machine.for_choices(), measured=tuple(_measured(own, machine)))


def _measured(found: list[TunedConfig], machine: GpuSpec) -> Iterator[cost.Measured]:
    steps = find_steps()
    for tuned in found:
        step, made_by = steps.get(tuned.step), tuned.environment.versions
        if step is None or step.is_explicit(tuned.winner.variant) or tuned.math != "ieee":
            continue
        case = Case.default(
            step, Matmul(tuned.m, tuned.n, tuned.k, tuned.dtype, tuned.layout, tuned.out_dtype), machine
        )
        space = TuningSpace.of(step, machine.has_cp_async)
        if made_by.get("tvm") != tvm.__version__:
            why = f"TVM {made_by.get('tvm')}, and this is {tvm.__version__}"
        elif kernels_digest(made_by.get("nvcc", ""), case, space) != tuned.kernels_digest:
            why = "other kernels than this version makes"
        else:
            choice = Choice(step.tile(tuned.winner.variant, tuned.winner.tile), tuned.winner.stages)
            yield cost.Measured(tuned.shape, tuned.layout, tuned.dtype, choice)
            continue
        log.warning("%s %s was tuned by %s: not used", step.name, case.problem.shape, why)
