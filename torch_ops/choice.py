"""Choose the kernel of a product: what was measured for its very shape, or else what should be fastest.

In this order: what the user's ``ladder tune`` found (:mod:`.tuned_here`), what we measured to be fastest for the shape,
and the best of the GPU's menu by one formula and one correction (:mod:`.menu`). Operands that TMA cannot read may be
taken by a kernel that reads them unaligned instead (:mod:`.short_reductions`, :mod:`.shifted`). For GPUs other than
Hopper's, and for float32, see :mod:`.scheduled`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS, Matmul
from tensorir_ladder.torch_ops.few_rows import Streamed, streams
from tensorir_ladder.torch_ops.menu import Menu, Sizes, menu_of
from tensorir_ladder.torch_ops.problem import Conditions, KernelChoice
from tensorir_ladder.torch_ops.scheduled import ByWarps, Scheduled
from tensorir_ladder.torch_ops.shifted import Shifting, fastest_shifting
from tensorir_ladder.torch_ops.short_reductions import MOST_STEPS, Unaligned, fastest_tile
from tensorir_ladder.torch_ops.tuned_here import tuned, tuned_here

ALONE = Conditions()
KEPT = 4096  # choices
UNSURE = 1.05  # by which a kernel that shifts rows must be faster: of 106 products 35 were 1.2 times as fast by it

AnyChoice = KernelChoice | Streamed | Unaligned | Shifting | Scheduled | ByWarps  # what multiplies


def choose(problem: Matmul, machine: Machine, conditions: Conditions = ALONE) -> AnyChoice:
    """Return the kernel that was measured to be fastest for a product on this GPU, or else should be.

    Batches, and kernels for any number of rows, are estimated: nothing was measured of them. Raises IllegalTile where
    the GPU can hold no kernel of its menu.
    """
    if not conditions.any_rows and conditions.batch == 1:
        found = None
        if problem.out_dtype == problem.dtype:
            found = tuned_here(problem, machine.name, machine.multiprocessors)
        found = found or tuned(machine.name).get((problem.m, problem.n, problem.k, problem.dtype, problem.layout))
        if found:
            return found
    return _choose(problem, machine, conditions)


@functools.lru_cache(KEPT)
def _choose(problem: Matmul, machine: Machine, conditions: Conditions) -> AnyChoice:
    menu = menu_of(str(machine.target), machine.name, machine.multiprocessors)
    chosen, us = _of_menu(menu, problem, machine, conditions)
    if conditions.unpadded:
        unaligned, unaligned_us = _unaligned(conditions, machine.multiprocessors)
        if unaligned_us < us + conditions.unpadded.more_us:
            return unaligned
    return chosen


def _of_menu(
    menu: Menu, problem: Matmul, machine: Machine, conditions: Conditions
) -> tuple[KernelChoice | Streamed, float]:
    """Return the kernel of the menu to take, and its microseconds: measured, or else estimated."""
    rows, batch, one = conditions.rows, conditions.batch, conditions.batch == 1
    streaming = conditions.dense and one and streams(problem)
    if (
        not conditions.any_rows
        and one
        and Sizes.of(problem, rows) == Sizes.of(problem)
        and (found := menu.fastest(problem))
    ):
        choice, _ = found
        able = streaming if isinstance(choice, Streamed) else not (conditions.gaps and choice.tile.parts > 1)
        if able and choice.takes(problem, machine):
            return found
    able = menu.flexible if conditions.any_rows else ~menu.streamed & ~(conditions.gaps & menu.in_parts)
    us = menu.times(problem, batch, rows, able | (streaming & menu.streamed))
    place = next(place for place in us.argsort() if menu.kernels[place].takes(problem, machine, batch))
    return menu.built(menu.kernels[place], problem, batch), float(us[place])


def _unaligned(conditions: Conditions, multiprocessors: int) -> tuple[Unaligned | Shifting, float]:
    """Return the kernel that reads operands unaligned, and its microseconds: by the reduction's length."""
    operands = conditions.unpadded
    if operands.problem.k > MOST_STEPS:
        shifting, us = fastest_shifting(operands.problem, operands.unreadable, multiprocessors, conditions.batch)
        return shifting, us * UNSURE
    tile, us = fastest_tile(operands.problem, multiprocessors, conditions.batch)
    return Unaligned(tile), us


def of_any_rows(problem: Matmul, tile: RoleTile) -> Matmul:
    """Return the product of the same n and k with the most rows, in whole tiles, that a kernel for any number takes.

    Raises IllegalWorkload where ``problem`` has more.
    """
    most = (MAX_ELEMENTS - 1) // max(problem.n, problem.k) // tile.block_m * tile.block_m
    if problem.m > most:
        raise IllegalWorkload(
            "more rows than a kernel for any number takes", value=problem.m, limit=most, remedy="do without any_m"
        )
    return replace(problem, m=most)
