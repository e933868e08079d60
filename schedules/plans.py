"""Choose a product's tile and plan from all that its schedule can do, without measuring.

The formulas in :mod:`.cycles` rank all tiles with all plans; regression trees then rank the first CORRECTED tiles, and
plans close to theirs, again. Results never depend on the choice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensorir_ladder.schedules.cost import (
    Machine,
    block_tile_cost,
)
from tensorir_ladder.schedules.cycles import Planned, ProductSizes, ScheduleArrays, ceildiv, corrected_cycles, cycles
from tensorir_ladder.schedules.isa import (
    ROW_BYTES,
    SECTOR_BYTES,
    VECTOR_BYTES,
)
from tensorir_ladder.schedules.tiles import (
    Choice,
    Formula,
    TileSet,
    WarpgroupTile,
)
from tensorir_ladder.schedules.workloads import Matmul

# (down, across): blocks down a column share B, blocks across a row share A.
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4))
PARTS = (*range(1, 17), *range(18, 33, 2))
# Row alignment in bytes that a copy gives, if the tile's rows allow it.
UNITS: dict[Formula, int] = {"warps": VECTOR_BYTES, "warpgroups": SECTOR_BYTES, "boxes": ROW_BYTES}
SPLIT_PAYS = 0.95  # a reduction is split only if its estimate falls below this share of the whole one's
FILLED = 4  # parts are tried up to so many blocks per multiprocessor
CORRECTED = 20  # tiles that trees rank again
PLANNED_AGAIN = 4  # of these, tiles that also get neighbouring plans
KEPT = 64  # tile sets whose descriptions are cached


class PlannedTile(NamedTuple):
    """A tile with its stages and plan, and its estimated cycles."""

    cycles: float
    choice: Choice
    planned: Planned


def choose(tiles: TileSet, problem: Matmul, machine: Machine, *, plans: bool = False) -> Choice:
    """Return the tile and stages with the lowest estimate for a product; the default if the machine can hold none.

    If the machine can hold none of the choices with their stages, fewer stages are tried. ``plans``: each tile counts
    with its best plan (:func:`candidates`).
    """
    able = _fitting(tiles, machine, problem.itemsize)
    if not able.choices:
        return tiles.default
    if plans:
        return candidates(tiles, problem, machine)[0].choice
    if tiles.formula:
        priced = _Plans(able, tiles.formula, problem, machine).estimate_all(able.described, (1,), CLUSTERS[:1])
        return able.choices[int(priced.reshape(len(able.choices), -1).min(axis=1).argmin())]
    return min(able.choices, key=lambda choice: (tiles.cost or block_tile_cost)(choice, problem, machine))


def choice_cost(tiles: TileSet, choice: Choice, problem: Matmul, machine: Machine, *, plans: bool = False) -> float:
    """Return the estimate that :func:`choose` compares, of one tile and stages; use it for ranking only."""
    if not tiles.formula:
        return (tiles.cost or block_tile_cost)(choice, problem, machine)
    alone = _Plans(_one_tile(choice, machine, problem.itemsize), tiles.formula, problem, machine)
    if plans:
        return alone.candidates()[0].cycles
    return float(alone.estimate_all(alone.tiles.described, (1,), CLUSTERS[:1]).min())


def candidates(tiles: TileSet, problem: Matmul, machine: Machine) -> list[PlannedTile]:
    """Return the schedules of a product with the lowest estimates, in order, by tiles that the machine can hold.

    These are the CORRECTED tiles that the formula ranks first, with its best plan for each, without near-duplicates.
    Trees correct their estimates. The first PLANNED_AGAIN also get the plans that differ in a single field:
    ``ladder calibrate`` times such pairs, and the trees are fitted to them.
    """
    return _Plans(_fitting(tiles, machine, problem.itemsize), tiles.formula, problem, machine).candidates()


def cheapest_plan(formula: Formula, choice: Choice, problem: Matmul, machine: Machine) -> Planned:
    """Return the plan with the lowest estimate for a product and a tile."""
    return _Plans(_one_tile(choice, machine, problem.itemsize), formula, problem, machine).candidates()[0].planned


def able_plans(formula: Formula, choice: Choice, problem: Matmul, machine: Machine, parts: int) -> list[Planned]:
    """List all plans that a product's schedule can have with a tile and ``parts`` parts.

    SIMT schedules ignore ``copied`` for aligned rows and for a B stored [n, k]; both values are listed.
    """
    if formula == "warps":
        return [Planned(parts, (a, b)) for a in (True, False) for b in (True, False)]
    plans = _Plans(_one_tile(choice, machine, problem.itemsize), formula, problem, machine)
    priced = plans.estimate_all(plans.tiles.described, (parts,), plans.clusters)[0, 0]
    return [
        Planned(
            parts, plans.aligned_after_copy(choice, plans.ways[way]), formula == "boxes", plans.clusters[cluster], own
        )
        for way, cluster in np.argwhere(np.isfinite(priced)).tolist()
        for own in plans.own_warps(choice)
    ]


class _Tiles(NamedTuple):
    """Tiles with their stages, and the same as arrays."""

    choices: list[Choice]
    described: ScheduleArrays


def _one_tile(choice: Choice, machine: Machine, itemsize: int) -> _Tiles:
    return _Tiles([choice], ScheduleArrays.of([choice], machine, itemsize))


@functools.lru_cache(KEPT)
def _fitting(tiles: TileSet, machine: Machine, itemsize: int) -> _Tiles:
    """Return the choices that the machine can hold; with fewer stages if it can hold none of them as they are."""
    for fewer in range(max((choice.stages for choice in tiles.choices), default=0)):
        shorter = [Choice(choice.tile, choice.stages - fewer) for choice in tiles.choices if choice.stages > fewer]
        if legal := [each for each in shorter if not each.tile.violations(machine.target, itemsize, each.stages)]:
            return _Tiles(legal, ScheduleArrays.of(legal if tiles.formula else [], machine, itemsize))
    return _Tiles([], ScheduleArrays.of([], machine, itemsize))


@dataclass(frozen=True)
class _Plans:
    """The plans of one product's schedules with some tiles, estimated by one formula."""

    tiles: _Tiles
    formula: Formula
    problem: Matmul
    machine: Machine

    @functools.cached_property
    def sizes(self) -> ProductSizes:
        """The product's extents."""
        return ProductSizes.of(self.problem)

    @functools.cached_property
    def ways(self) -> tuple[tuple[bool, bool], ...]:
        """List which operands (A, B) may be copied to aligned rows; the first way wins ties.

        Warpgroups list required copies alone first, SIMT lists copying first.
        """
        problem, unit = self.problem, UNITS[self.formula]
        lengths = problem.k, problem.b_shape[1]
        must, may = ([length * problem.itemsize % each > 0 for length in lengths] for each in (VECTOR_BYTES, unit))
        if self.formula == "warps":  # the flag is ignored for aligned rows: True alone is listed
            of_a, of_b = ((True, False) if apart else (True,) for apart in may)
            return tuple((a, b) for a in of_a for b in (of_b if problem.layout == "nn" else (a,)))
        of_a, of_b = ((True,) if has_to else (False, True) if pays else (False,) for has_to, pays in zip(must, may))
        return tuple((a, b) for a in of_a for b in of_b)

    def aligned_after_copy(self, choice: Choice, copied: tuple[bool, bool]) -> tuple[bool, bool]:
        """Return which copies have rows of whole sectors or cache lines after padding to the tile."""
        if self.formula == "warps":
            return copied
        along = choice.tile.block_k, choice.tile.block_k if self.problem.layout == "nt" else choice.tile.block_n
        whole = [size * self.problem.itemsize % UNITS[self.formula] == 0 for size in along]
        return copied[0] and whole[0], copied[1] and whole[1]

    @functools.cached_property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """The clusters that the product has tiles for; the first is a single block."""
        if self.formula != "boxes":
            return CLUSTERS[:1]
        tiles = self.tiles.described
        rows, columns = ceildiv(self.problem.m, tiles.block_m).max(), ceildiv(self.problem.n, tiles.block_n).max()
        return tuple(each for each in CLUSTERS if each[0] <= rows and each[1] <= columns)

    def own_warps(self, choice: Choice) -> tuple[bool, ...]:
        """Return the values of ``own_warp`` that a tile can have."""
        roomy = self.formula == "boxes" and isinstance(choice.tile, WarpgroupTile) and choice.tile.leaves_a_warp
        return (False, True) if roomy else (False,)

    def most_parts(self, tiles: ScheduleArrays) -> np.ndarray:
        """Return the most parts of each tile: each has at least ``stages`` k tiles, and at least two."""
        return np.maximum(1, ceildiv(self.problem.k, tiles.block_k) // np.maximum(tiles.stages, 2))

    def estimate_all(
        self, tiles: ScheduleArrays, parts: Sequence[int], clusters: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """Estimate all plans of tiles: axes are tiles, parts, ways to copy operands, and clusters."""
        counts = np.array(parts).reshape(1, -1, 1, 1)
        a_copied, b_copied = np.array(self.ways).T.reshape(2, 1, 1, -1, 1)
        down, across = np.array(clusters).T.reshape(2, 1, 1, 1, -1)
        tried = tiles.as_first_axis(3)._replace(
            parts=counts, a_copied=a_copied, b_copied=b_copied, boxes=self.formula == "boxes", down=down, across=across
        )
        tried = tried._replace(own_warp=self.has_own_warp(tried))
        shape = len(tiles.block_m), len(parts), len(self.ways), len(clusters)
        return np.broadcast_to(cycles(tried, self.sizes, self.machine), shape)

    def has_own_warp(self, tried: ScheduleArrays) -> Any:
        """Return which schedules get a producer warp.

        Those whose registers allow it, and whose occupancy it does not lower from two or more blocks to one.
        """
        if self.formula != "boxes":
            return False
        stages = np.minimum(tried.stages, np.maximum(tried.k_tiles(self.problem.k), 2))
        first, own = (tried.resident(self.machine, stages, more) for more in (0, 1))
        return (tried.room > 0) & (own >= np.minimum(first, 2))

    def candidates(self) -> list[PlannedTile]:
        """See :func:`candidates`."""
        asked = self.likeliest()
        costs = self.corrected(asked)
        again = PLANNED_AGAIN if self.machine.corrections else 0  # without trees the formula's plan is the best
        cheapest = sorted(range(len(asked)), key=costs.__getitem__)[:again]
        others = [(asked[place][0], planned) for place in cheapest for planned in self.neighbours(*asked[place])]
        costs += self.corrected(others)
        found = [
            PlannedTile(cost, self.tiles.choices[number], planned)
            for cost, (number, planned) in zip(costs, asked + others)
            if math.isfinite(cost)
        ]
        return sorted(found, key=lambda planned: planned.cycles)

    def likeliest(self) -> list[tuple[int, Planned]]:
        """Return the tiles that the formula ranks first, as indices, with its best plan for each."""
        tiles, choices = self.tiles.described, self.tiles.choices
        if not choices:
            return []
        most, every = self.most_parts(tiles), np.arange(len(choices))
        blocks = ceildiv(self.problem.m, tiles.block_m) * ceildiv(self.problem.n, tiles.block_n)
        useful = min(most.max(), FILLED * self.machine.multiprocessors // blocks.min())
        counts = np.array([each for each in PARTS if each == 1 or each <= useful])
        clusters = self.clusters
        priced = self.estimate_all(tiles, counts.tolist(), clusters)
        by_parts = np.where(counts <= most[:, None], priced.min(axis=(2, 3)), np.inf)
        part = by_parts.argmin(axis=1)
        part = np.where(by_parts[every, part] < SPLIT_PAYS * by_parts[:, 0], part, 0)
        priced, parts = priced[every, part].reshape(len(choices), -1), counts[part]
        own = np.broadcast_to(self.has_own_warp(tiles._replace(parts=parts)), parts.shape)
        order = priced.min(axis=1).argsort(kind="stable")
        # Without near-duplicates.
        order = order[np.sort(np.unique(tiles.alike[order], return_index=True)[1])][:CORRECTED]
        found = []
        for number in order.tolist():
            way, cluster = divmod(int(priced[number].argmin()), len(clusters))
            copied, boxes = self.aligned_after_copy(choices[number], self.ways[way]), self.formula == "boxes"
            found.append((number, Planned(int(parts[number]), copied, boxes, clusters[cluster], bool(own[number]))))
        return found

    def corrected(self, planned: Sequence[tuple[int, Planned]]) -> list[float]:
        """Return the corrected estimates of tiles, given as indices, with a plan each."""
        if not planned:
            return []
        numbers, plans = zip(*planned)
        arrays = self.tiles.described.at(list(numbers)).as_planned(plans)
        return corrected_cycles(arrays, self.sizes, self.machine).tolist()

    def neighbours(self, number: int, planned: Planned) -> list[Planned]:
        """List a tile's plans that differ from one in a single field."""
        choice = self.tiles.choices[number]
        most = int(self.most_parts(self.tiles.described)[number])
        below, above = [n for n in PARTS if n < planned.parts], [n for n in PARTS if planned.parts < n <= most]
        others = [planned._replace(parts=parts) for parts in (*below[-1:], *above[:1])]
        others += [planned._replace(copied=self.aligned_after_copy(choice, way)) for way in self.ways]
        others += [planned._replace(own_warp=own) for own in self.own_warps(choice)]
        others += [planned._replace(cluster=cluster) for cluster in self.clusters]
        return [other for other in dict.fromkeys(others) if other != planned]
