"""Choose among the steps that are schedules: which step, form and tile a product should get on a machine."""

from __future__ import annotations

from dataclasses import replace

from tensorir_ladder.schedules.cost import Machine, choice_cost, choose
from tensorir_ladder.schedules.tiles import Choice
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.steps.step import Config, Step


def choose_step(problem: Matmul, machine: Machine) -> tuple[Step, Config]:
    """Return the step that should be the fastest schedule for a product, and the configuration to ask it for.

    It is the last step of the ladder that takes the operands and whose instructions the machine has, with the tile and
    stages that the cost model finds for this shape; and the cheapest of its forms for shapes off the squares, in whose
    place the default stands, with the cheaper tile of both, where a form does nothing else. Nothing is measured::

        step, config = choose_step(Matmul(513, 1025, 4097), machine)
        sch = step.schedule(problem, config)
    """
    able = [
        (step, config)
        for step in find_steps().values()
        if not step.explicit
        and (config := _configured(step, step.default_variant(machine.has_cp_async), problem, machine))
    ]
    step, config = max(able, key=lambda found: found[0].number)
    priced = [(0.0, config)]
    for form in step.variants:
        if form.fits and (made := _configured(step, form.name, problem, machine)):
            fits = form.fits(problem, made)
            others = [made] if fits else [config, replace(made, variant=config.variant)]
            tiles, split = step.tiles_of(form.name), fits and form.splits_k
            tiles = tiles if fits else replace(tiles, launched_early=False)  # the default is not
            costs = [choice_cost(tiles, Choice(c.tile, c.stages), problem, machine, split=split) for c in others]
            priced += zip(costs, others)
    return step, min(priced[1:] or priced, key=lambda each: each[0])[1]


def _configured(step: Step, variant: str, problem: Matmul, machine: Machine) -> Config | None:
    """Return how a variant takes a product; None where it does not take the operands, or the machine lacks for it."""
    if not step.takes(variant, problem.dtype, machine.has_cp_async):
        return None
    chosen = choose(step.tiles_of(variant), problem, machine, split=step.variant(variant).splits_k)
    return None if chosen.tile.missing(machine.target) else Config(variant, chosen.tile, chosen.stages, machine)
