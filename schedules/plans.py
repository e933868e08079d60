"""Choose a product's tile and what its schedule does beside it, among all that it may do.

All tiles and plans are priced at once (:mod:`.cycles`); of the tiles that come first trees say more, and which other
plans may be faster. Nothing is measured, and results never depend on it.
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

# Blocks below each other share B, beside each other A.
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4))
PARTS = (*range(1, 17), *range(18, 33, 2))
# Of bytes, what copies of rows are for, where the tile makes them whole.
UNITS: dict[Formula, int] = {"warps": VECTOR_BYTES, "warpgroups": SECTOR_BYTES, "boxes": ROW_BYTES}
SPLIT_PAYS = 0.95  # of the time of a whole reduction: what parts are modelled to save has to be more than the rest
FILLED = 4  # blocks of a multiprocessor in parts, more than which nothing is gained by
CORRECTED = 20  # tiles that a formula puts first, which trees put in order
PLANNED_AGAIN = 4  # of these, the cheapest, for which plans that differ in a single thing are asked for as well
KEPT = 64  # sets of tiles whose descriptions are kept


class PlannedTile(NamedTuple):
    """A schedule that a product may have, and about how many cycles it takes."""

    cycles: float
    choice: Choice
    planned: Planned


def choose(tiles: TileSet, problem: Matmul, machine: Machine, *, plans: bool = False) -> Choice:
    """Return the tile and stages of ``tiles`` that should be fastest for a product; the default where none is listed.

    Choices that the machine cannot hold are left out, or taken with fewer stages where it can hold none as it is.
    ``plans``: a schedule by them does what is best beside its tile (:func:`candidates`).
    """
    able = _fitting(tiles, machine, problem.itemsize)
    if not able.choices:
        return tiles.default
    if plans:
        return candidates(tiles, problem, machine)[0].choice
    if tiles.formula:
        priced = _Plans(able, tiles.formula, problem, machine).price_beside(able.described, (1,), CLUSTERS[:1])
        return able.choices[int(priced.reshape(len(able.choices), -1).min(axis=1).argmin())]
    return min(able.choices, key=lambda choice: (tiles.cost or block_tile_cost)(choice, problem, machine))


def choice_cost(tiles: TileSet, choice: Choice, problem: Matmul, machine: Machine, *, plans: bool = False) -> float:
    """Return what a product costs by a tile and stages, by what :func:`choose` goes by; good for an order."""
    if not tiles.formula:
        return (tiles.cost or block_tile_cost)(choice, problem, machine)
    alone = _Plans(_alone(choice, machine, problem.itemsize), tiles.formula, problem, machine)
    if plans:
        return alone.candidates()[0].cycles
    return float(alone.price_beside(alone.tiles.described, (1,), CLUSTERS[:1]).min())


def candidates(tiles: TileSet, problem: Matmul, machine: Machine) -> list[PlannedTile]:
    """Return the schedules of a product that are probably the fastest, these first, by tiles that a machine can hold.

    The CORRECTED tiles that their formula puts first, planned as it says; of tiles that are nearly the same only the
    first, since such were not timed beside each other. And for the PLANNED_AGAIN of these that trees say are the
    cheapest, plans that differ from that in a single thing, which were (``ladder calibrate``).
    """
    return _Plans(_fitting(tiles, machine, problem.itemsize), tiles.formula, problem, machine).candidates()


def cheapest_plan(formula: Formula, choice: Choice, problem: Matmul, machine: Machine) -> Planned:
    """Return what a product's schedule by a tile should do beside it."""
    return _Plans(_alone(choice, machine, problem.itemsize), formula, problem, machine).candidates()[0].planned


def able_plans(formula: Formula, choice: Choice, problem: Matmul, machine: Machine, parts: int) -> list[Planned]:
    """List all that a product's schedule by a tile can do in so many parts: copies first, clusters, a warp of its own.

    By warps copies mean nothing of rows that are whole vectors, nor of a B stored [n, k], and either is listed.
    """
    if formula == "warps":
        return [Planned(parts, (a, b)) for a in (True, False) for b in (True, False)]
    plans = _Plans(_alone(choice, machine, problem.itemsize), formula, problem, machine)
    priced = plans.price_beside(plans.tiles.described, (parts,), plans.clusters)[0, 0]
    return [
        Planned(parts, plans.made_whole(choice, plans.ways[way]), formula == "boxes", plans.clusters[cluster], own)
        for way, cluster in np.argwhere(np.isfinite(priced)).tolist()
        for own in plans.own_warps(choice)
    ]


class _Tiles(NamedTuple):
    """Hold tiles with their stages, and what formulas see of them."""

    choices: list[Choice]
    described: ScheduleArrays


def _alone(choice: Choice, machine: Machine, itemsize: int) -> _Tiles:
    return _Tiles([choice], ScheduleArrays.of([choice], machine, itemsize))


@functools.lru_cache(KEPT)
def _fitting(tiles: TileSet, machine: Machine, itemsize: int) -> _Tiles:
    """Return the choices that a target can hold; with fewer stages where it can hold none of them as it is."""
    for fewer in range(max((choice.stages for choice in tiles.choices), default=0)):
        shorter = [Choice(choice.tile, choice.stages - fewer) for choice in tiles.choices if choice.stages > fewer]
        if legal := [each for each in shorter if not each.tile.violations(machine.target, itemsize, each.stages)]:
            return _Tiles(legal, ScheduleArrays.of(legal if tiles.formula else [], machine, itemsize))
    return _Tiles([], ScheduleArrays.of([], machine, itemsize))


@dataclass(frozen=True)
class _Plans:
    """The search for what a product's schedule does, by some tiles and their formula."""

    tiles: _Tiles
    formula: Formula
    problem: Matmul
    machine: Machine

    @functools.cached_property
    def sizes(self) -> ProductSizes:
        """The product's."""
        return ProductSizes.of(self.problem)

    @functools.cached_property
    def ways(self) -> tuple[tuple[bool, bool], ...]:
        """Which of both operands may be copied first; the first way copies what has to be, and wins ties."""
        problem, unit = self.problem, UNITS[self.formula]
        lengths = problem.k, problem.b_shape[1]
        must, may = ([length * problem.itemsize % each > 0 for length in lengths] for each in (VECTOR_BYTES, unit))
        if self.formula == "warps":  # by which rows that are whole vectors count as copied
            of_a, of_b = ((True, False) if apart else (True,) for apart in may)
            return tuple((a, b) for a in of_a for b in (of_b if problem.layout == "nn" else (a,)))
        of_a, of_b = ((True,) if has_to else (False, True) if pays else (False,) for has_to, pays in zip(must, may))
        return tuple((a, b) for a in of_a for b in of_b)

    def made_whole(self, choice: Choice, copied: tuple[bool, bool]) -> tuple[bool, bool]:
        """Return which operands' copies have rows of whole sectors or cache lines: they are rounded up to the tile."""
        if self.formula == "warps":
            return copied
        along = choice.tile.block_k, choice.tile.block_k if self.problem.layout == "nt" else choice.tile.block_n
        whole = [size * self.problem.itemsize % UNITS[self.formula] == 0 for size in along]
        return copied[0] and whole[0], copied[1] and whole[1]

    @functools.cached_property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """The clusters that the product's blocks may be in; the first is a block alone."""
        if self.formula != "boxes":
            return CLUSTERS[:1]
        tiles = self.tiles.described
        rows, columns = ceildiv(self.problem.m, tiles.block_m).max(), ceildiv(self.problem.n, tiles.block_n).max()
        return tuple(each for each in CLUSTERS if each[0] <= rows and each[1] <= columns)

    def own_warps(self, choice: Choice) -> tuple[bool, ...]:
        """Return whether a warp of its own may bring a tile's operands."""
        roomy = self.formula == "boxes" and isinstance(choice.tile, WarpgroupTile) and choice.tile.leaves_a_warp
        return (False, True) if roomy else (False,)

    def most_parts(self, tiles: ScheduleArrays) -> np.ndarray:
        """Return the most parts of each tile: each has as many k tiles as there are stages."""
        return np.maximum(1, ceildiv(self.problem.k, tiles.block_k) // np.maximum(tiles.stages, 2))

    def price_beside(
        self, tiles: ScheduleArrays, parts: Sequence[int], clusters: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """Price tiles in each number of parts, by all ways to copy operands, in each form of cluster: four axes.

        A warp of its own brings boxes where its registers are there and it takes a multiprocessor no second block,
        which hides as much.
        """
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
        """Return which schedules have a warp of their own."""
        if self.formula != "boxes":
            return False
        stages = np.minimum(tried.stages, np.maximum(tried.k_tiles(self.problem.k), 2))
        first, own = (tried.resident(self.machine, stages, more) for more in (0, 1))
        return (tried.room > 0) & (own >= np.minimum(first, 2))

    def candidates(self) -> list[PlannedTile]:
        """Return what :func:`candidates` does."""
        asked = self.likeliest()
        costs = self.corrected(asked)
        again = PLANNED_AGAIN if self.machine.corrections else 0  # else the formula has said all that it can
        cheapest = sorted(range(len(asked)), key=costs.__getitem__)[:again]
        others = [(asked[place][0], planned) for place in cheapest for planned in self.beside(*asked[place])]
        costs += self.corrected(others)
        found = [
            PlannedTile(cost, self.tiles.choices[number], planned)
            for cost, (number, planned) in zip(costs, asked + others)
            if math.isfinite(cost)
        ]
        return sorted(found, key=lambda planned: planned.cycles)

    def likeliest(self) -> list[tuple[int, Planned]]:
        """Return the tiles, by their number, that the formula puts first, and what it plans."""
        tiles, choices = self.tiles.described, self.tiles.choices
        if not choices:
            return []
        most, every = self.most_parts(tiles), np.arange(len(choices))
        blocks = ceildiv(self.problem.m, tiles.block_m) * ceildiv(self.problem.n, tiles.block_n)
        useful = min(most.max(), FILLED * self.machine.multiprocessors // blocks.min())
        counts = np.array([each for each in PARTS if each == 1 or each <= useful])
        clusters = self.clusters
        priced = self.price_beside(tiles, counts, clusters)
        by_parts = np.where(counts <= most[:, None], priced.min(axis=(2, 3)), np.inf)
        part = by_parts.argmin(axis=1)
        part = np.where(by_parts[every, part] < SPLIT_PAYS * by_parts[:, 0], part, 0)
        priced, parts = priced[every, part].reshape(len(choices), -1), counts[part]
        own = np.broadcast_to(self.has_own_warp(tiles._replace(parts=parts)), parts.shape)
        order = priced.min(axis=1).argsort(kind="stable")
        # Of tiles that are nearly the same the first.
        order = order[np.sort(np.unique(tiles.alike[order], return_index=True)[1])][:CORRECTED]
        found = []
        for number in order.tolist():
            way, cluster = divmod(int(priced[number].argmin()), len(clusters))
            copied, boxes = self.made_whole(choices[number], self.ways[way]), self.formula == "boxes"
            found.append((number, Planned(int(parts[number]), copied, boxes, clusters[cluster], bool(own[number]))))
        return found

    def corrected(self, planned: Sequence[tuple[int, Planned]]) -> list[float]:
        """Price tiles, by their number, as each is planned, with what trees say."""
        if not planned:
            return []
        numbers, plans = zip(*planned)
        arrays = self.tiles.described.at(list(numbers)).as_planned(plans)
        return corrected_cycles(arrays, self.sizes, self.machine).tolist()

    def beside(self, number: int, planned: Planned) -> list[Planned]:
        """List the plans of a tile that differ from one in a single thing."""
        choice = self.tiles.choices[number]
        most = int(self.most_parts(self.tiles.described)[number])
        below, above = [n for n in PARTS if n < planned.parts], [n for n in PARTS if planned.parts < n <= most]
        others = [planned._replace(parts=parts) for parts in (*below[-1:], *above[:1])]
        others += [planned._replace(copied=self.made_whole(choice, way)) for way in self.ways]
        others += [planned._replace(own_warp=own) for own in self.own_warps(choice)]
        others += [planned._replace(cluster=cluster) for cluster in self.clusters]
        return [other for other in dict.fromkeys(others) if other != planned]
