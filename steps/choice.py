"""Choose among the steps that are schedules: which step, form and tile a product should get on a machine."""

from __future__ import annotations

import math

from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.plans import candidates, choice_cost, choose
from tensorir_ladder.schedules.tiles import Choice
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.steps.step import Config, Step, Variant


def choose_step(problem: Matmul, machine: Machine) -> tuple[Step, Config]:
    """Return the step that should be the fastest schedule for a product, and the configuration to ask it for.

    It is the last step of the ladder that takes the operands and whose instructions the machine has, of those with
    forms for any shape where there are such; of these forms the cheapest, with the tile and stages that the cost model
    finds; or the step's default, where that has a cheaper tile, which divides the product. Nothing is measured::

        step, config = choose_step(Matmul(513, 1025, 4097), machine)
        sch = step.schedule(problem, config)
    """
    able = [
        (step, config)
        for step in find_steps().values()
        if not step.explicit and (config := _by_default(step, problem, machine))
    ]
    step, default = max(able, key=lambda found: (bool(_forms(found[0], problem, machine)), found[0].number))
    found = [(math.inf, default)]
    own = Choice(default.tile, default.stages)
    whole = problem.layout == "nn" and not any(
        size % extent for size, extent in zip((problem.m, problem.n, problem.k), own.tile.block)
    )
    for form in _forms(step, problem, machine):
        tiles = step.tiles_of(form.name)
        for best in candidates(tiles, problem, machine)[:1]:
            found.append((best.cycles, Config(form.name, best.choice.tile, best.choice.stages, machine)))
        if whole and own not in tiles.choices:  # by the formula alone: trees know the form's tiles
            found.append((choice_cost(tiles, own, problem, machine), default))
    return step, min(found, key=lambda each: each[0])[1]


def _by_default(step: Step, problem: Matmul, machine: Machine) -> Config | None:
    """Return how a step's default takes a product; None where it does not, or the machine lacks for it."""
    variant = step.default_variant(machine.has_cp_async)
    if not step.takes(variant, problem.dtype, machine.has_cp_async):
        return None
    chosen = choose(step.tiles_of(variant), problem, machine)
    return None if chosen.tile.missing(machine.target) else Config(variant, chosen.tile, chosen.stages, machine)


def _forms(step: Step, problem: Matmul, machine: Machine) -> list[Variant]:
    """List a step's forms for any shape that take a product's operands on a machine."""
    takes = [form for form in step.variants if step.takes(form.name, problem.dtype, machine.has_cp_async)]
    return [form for form in takes if form.plans]
