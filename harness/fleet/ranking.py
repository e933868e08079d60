"""Put candidates in the order in which a cost model would measure them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.records import TunedConfig
from tensorir_ladder.harness.tuning import TuningSpace, candidates, described, identity
from tensorir_ladder.kernels.persistent import cluster_blocks
from tensorir_ladder.kernels.tma import straddles_lines
from tensorir_ladder.schedules import tiles
from tensorir_ladder.schedules.plans import choice_cost
from tensorir_ladder.schedules.tiles import ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.torch_ops.menu import ITEMSIZE, Kernels, Sizes, microseconds, read_menu
from tensorir_ladder.torch_ops.problem import KernelChoice
from tensorir_ladder.torch_ops.step_kernels import KERNELS

# Of one tile, a model hardly tells stage counts and variants apart. So the next of a tile is asked for when as many
# further tiles have been; more of them by warpgroups, where the most stages of a tile are nearly always its best.
TILES_BEFORE_ANOTHER, BY_WARPGROUPS = 2, 4
# Tiles whose blocks hide latency behind each other, so that what a stage more takes from others counts.
SHARING = (ThreadTile, WarpTile)


def modelled_costs(legal: Sequence[Case]) -> list[float]:
    """Price candidates of one step and product; good for an order of these.

    Of kernels that products of torch tensors are chosen from, microseconds by what that choice is made by
    (:mod:`torch_ops.menu`), which was fitted to them; else the cost that the step's tiles are chosen by
    (:mod:`schedules.plans`).
    """
    if legal and legal[0].step.number in KERNELS and legal[0].problem.itemsize == ITEMSIZE:
        return _microseconds(legal)
    return [
        choice_cost(
            case.step.tiles_of(case.variant),
            tiles.Choice(case.tile, case.stages_built),
            case.problem,
            case.machine.for_choices(),
            plans=case.form.plans,
        )
        for case in legal
    ]


def _microseconds(legal: Sequence[Case]) -> list[float]:
    problem, machine = legal[0].problem, legal[0].machine.for_choices()
    nt, constants = problem.layout == "nt", read_menu(machine.name).constants
    own = [_as_chosen(case) for case in legal]
    return microseconds(
        Kernels.of(own, machine.multiprocessors, nt), Sizes.of(problem), constants, machine.multiprocessors
    ).tolist()


def _as_chosen(case: Case) -> KernelChoice:
    """Return a case's kernel as the formula has it: with its clusters, and whether its last wave is cut."""
    kernel, tile = KERNELS[case.step.number], case.tile
    if kernel.stays:
        kernel = replace(kernel, blocks=cluster_blocks(case.problem, tile, straddles_lines(case.problem)))
        kernel = replace(kernel, cuts=kernel.takes(case.problem, tile, case.machine.for_choices()))
    return KernelChoice(kernel, tile, max(2, case.stages_built))  # with one stage nothing is on its way


def ranked_by_model(legal: Sequence[Case]) -> list[Case]:
    """Order candidates of one step and product, those first that the model expects to be fast.

    Those that it cannot tell apart come in turn. On tensor cores, of one tile the most stages come first: few blocks
    are on a multiprocessor, and what is on its way is all that hides latency. Then, of kernels whose blocks come and
    go, the most stages with which one block more is resident, which multiplies while another stores.

    ::

        tiles by cost        A          B          C          D        …
        asked for            1st, 3rd … 2nd, 5th … 4th …      7th …      first and further stage counts of each
        by warpgroups        1st, 6th … 2nd, 8th … 3rd …      4th …
    """
    costs = dict(zip(legal, modelled_costs(legal)))
    of_tiles: dict[object, list[Case]] = {}
    for case in legal:  # of equal cost, the likely ones stand first (TuningSpace.combinations)
        of_tiles.setdefault(case.tile, []).append(case)
    by_tile = [_within_tile(cases, costs) for cases in of_tiles.values()]
    by_tile.sort(key=lambda cases: min(map(costs.__getitem__, cases)))
    between = BY_WARPGROUPS if legal and isinstance(legal[0].tile, WarpgroupTile) else TILES_BEFORE_ANOTHER
    places = {
        case: (tile + between * number, tile) for tile, cases in enumerate(by_tile) for number, case in enumerate(cases)
    }
    return sorted(legal, key=places.__getitem__)


def reached_by_model(tuned: TunedConfig, most: int) -> float:
    """Judge the order by a search that measured a whole space: the speed of the best of its first ``most``.

    As a part of the speed of the best of all, both over cuBLAS in the search's first rounds.
    """
    machine, where = machine_for(tuned.arch), tuned.environment
    if where.multiprocessors:
        machine = machine.of_gpu(where.gpu, where.multiprocessors)
    problem = Matmul(tuned.m, tuned.n, tuned.k, tuned.dtype, tuned.layout, tuned.out_dtype)
    case = Case.default(find_steps()[tuned.step], problem, machine)
    legal, _ = candidates(case, TuningSpace.of(case.step, machine.has_cp_async))
    speeds = {identity(each): each.ratios[0] for each in tuned.candidates if each.ratios}
    first = [identity(described(each)) for each in ranked_by_model(legal)[:most]]
    return max(speeds.get(each, 0.0) for each in first) / max(speeds.values())


def _within_tile(cases: Sequence[Case], costs: dict[Case, float]) -> list[Case]:
    if isinstance(cases[0].tile, SHARING):
        return sorted(cases, key=costs.__getitem__)
    by_stages = sorted(cases, key=lambda case: (-case.stages_built, costs[case]))
    kernel = KERNELS.get(cases[0].step.number)
    if kernel and kernel.stays:
        return by_stages
    met: set[int] = set()
    new = [case for case in by_stages if not (_resident(case) in met or met.add(_resident(case)))]
    return [*new, *(case for case in by_stages if case not in new)]


def _resident(case: Case) -> int:
    """Count the blocks that a multiprocessor's shared memory holds at once."""
    shared = int(case.machine.for_choices().target.attrs["max_shared_memory_per_block"])
    return shared // case.tile.smem_bytes(case.problem.itemsize, case.stages_built)
