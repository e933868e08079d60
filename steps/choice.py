"""Choose among the steps that are schedules: which step, form and tile a product should get on a machine."""

from __future__ import annotations

from dataclasses import replace

from tensorir_ladder.schedules.cost import Machine, choose
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.steps.step import Config, Step, UnsupportedDtype


def choose_step(problem: Matmul, machine: Machine) -> tuple[Step, Config]:
    """Return the step that should be the fastest schedule for a product, and the configuration to ask it for.

    It is the last step of the ladder that takes the operands and whose instructions the machine has, with the tile and
    stages that the cost model finds for this shape; and its form for shapes off the squares, where that does anything
    else than the default. Nothing is measured::

        step, config = choose_step(Matmul(513, 1025, 4097), machine)
        sch = step.schedule(problem, config)

    Raises
    ------
    UnsupportedDtype : for operands that no schedule takes.
    """
    for step in sorted(find_steps().values(), key=lambda step: -step.number):
        variant = step.default_variant(machine.has_cp_async)
        if step.explicit or not step.takes(variant, problem.dtype, machine.has_cp_async):
            continue
        config = _configured(step, variant, problem, machine)
        if config.tile.missing(machine.target):
            continue
        for form in step.variants:
            if form.fits and step.takes(form.name, problem.dtype, machine.has_cp_async):
                fitted = _configured(step, form.name, problem, machine)
                return step, fitted if form.fits(problem, fitted) else replace(fitted, variant=variant)
        return step, config
    raise UnsupportedDtype(f"no step that is a schedule takes operands in {problem.dtype}")


def _configured(step: Step, variant: str, problem: Matmul, machine: Machine) -> Config:
    chosen = choose(step.tiles_of(variant), problem, machine, split=step.variant(variant).splits_k)
    return Config(variant, chosen.tile, chosen.stages, machine)
