"""Put candidates in the order in which the cost model would measure them."""

from __future__ import annotations

from collections.abc import Sequence

from tensorir_ladder.harness.build import Case
from tensorir_ladder.schedules.cost import choice_cost
from tensorir_ladder.schedules.tiles import Choice, ThreadTile, WarpTile

# Of one tile, the model hardly tells stage counts and variants apart. So the next of a tile is asked for when as many
# further tiles have been.
TILES_BEFORE_ANOTHER = 2
# Tiles whose blocks hide latency behind each other, so that what a stage more takes from others counts.
SHARING = (ThreadTile, WarpTile)


def modelled_cost(case: Case) -> float:
    """Price a candidate by the cost that the step's tiles are chosen by (:mod:`schedules.cost`); good for an order."""
    machine, choice = case.machine.for_choices(), Choice(case.tile, case.stages_built)
    return choice_cost(case.step.tiles_of(case.variant), choice, case.problem, machine, split=case.form.splits_k)


def ranked_by_model(legal: Sequence[Case]) -> list[Case]:
    """Order candidates, those first that the model expects to be fast; those it cannot tell apart in turn.

    On tensor cores, of one tile the most stages come first: few blocks are on a multiprocessor, and what is on its way
    is all that hides latency.

    ::

        tiles by cost        A          B          C          D        …
        asked for            1st, 3rd … 2nd, 5th … 4th …      7th …      first and further stage counts of each
    """
    costs = {case: modelled_cost(case) for case in legal}
    of_tiles: dict[object, list[Case]] = {}
    for case in legal:  # of equal cost, the likely ones stand first (TuningSpace.combinations)
        of_tiles.setdefault(case.tile, []).append(case)

    def within_tile(case: Case) -> tuple[float, float]:
        return (costs[case], 0.0) if isinstance(case.tile, SHARING) else (-case.stages_built, costs[case])

    by_tile = [sorted(cases, key=within_tile) for cases in of_tiles.values()]
    by_tile.sort(key=lambda cases: min(map(costs.__getitem__, cases)))
    places = {
        case: (tile + TILES_BEFORE_ANOTHER * number, tile)
        for tile, cases in enumerate(by_tile)
        for number, case in enumerate(cases)
    }
    return sorted(legal, key=places.__getitem__)
