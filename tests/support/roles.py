"""Kernels whose warpgroups have roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.cases import STEPS, make_case
from tensorir_ladder.harness.build import Case, Kernel, lower
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.tiles import RoleTile

HOPPER = machine_for("sm_90a")


STEPS_WITH_ROLES = [
    (number, variant)
    for number in (12, 13)
    for variant in STEPS[number].variant_names
    if STEPS[number].is_explicit(variant)
]


def roles_case(
    number: int, shape: tuple[int, int, int], tile: str = "64x64x64/1x1", variant: str = "", sms: int = 0, **given: Any
) -> Case:
    """Ask for step 12 or 13 on Hopper, with ``sms`` multiprocessors."""
    variant = variant or next(name for other, name in STEPS_WITH_ROLES if other == number)
    case = make_case(number, shape, variant, tile=RoleTile.parse(tile), **given)
    return replace(case, machine=replace(HOPPER, multiprocessors=sms or 132))


def roles(*arguments: Any, **given: Any) -> Kernel:
    """Lower such a case."""
    return lower(roles_case(*arguments, **given))
