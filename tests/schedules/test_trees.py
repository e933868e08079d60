"""Boosted regression trees: their sums, what is refused, and how they correct the model of schedules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tensorir_ladder import gpus
from tensorir_ladder.gpus import schedule_corrections, schedules_path
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.schedules import cost
from tensorir_ladder.schedules.cost import Machine, Planned
from tensorir_ladder.schedules.tiles import Choice, TileSet, WarpTile
from tensorir_ladder.schedules.trees import LEAF, Trees
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.choice import choose_step
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.torch_ops.errors import DamagedFile

# n <= 8: 1, else m <= 2: 10, else 100;  and a tree of one leaf.
TWO = Trees(features=("m", "n"), asks=(1, LEAF, 0, LEAF, LEAF, LEAF), at=(8.0, 1.0, 2.0, 10.0, 100.0, 0.5))


def test_what_all_trees_predict_is_added_up() -> None:
    rows = {"m": np.array([1, 2, 2.1, 9]), "n": np.array([8, 9, 9, 8]), "k": 7}
    assert TWO.predict(rows).tolist() == [1.5, 10.5, 100.5, 1.5]


def test_numbers_count_for_all_rows_and_alone_for_one() -> None:
    assert TWO.predict({"m": np.array([2, 3]), "n": 9}).tolist() == [10.5, 100.5]
    assert TWO.predict({"m": 3, "n": 9}).tolist() == [100.5]


def test_a_feature_that_is_compared_has_to_be_there() -> None:
    with pytest.raises(KeyError, match="n"):
        TWO.predict({"m": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("asks", (2, LEAF, 0, LEAF, LEAF, LEAF)),  # a third feature of two
        ("asks", (-2, LEAF, 0, LEAF, LEAF, LEAF)),
        ("asks", (1, LEAF, 0, LEAF, LEAF)),
        ("asks", (1, LEAF, 0, LEAF, 0, LEAF)),  # the last node has one side
        ("asks", (1, LEAF, 0, LEAF, LEAF, 0)),  # a tree without leaves
    ],
)
def test_trees_that_are_not_whole_are_refused(
    field: str, value: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {**msgspec.to_builtins(TWO), field: value}
    content = {"gpu": "NVIDIA Other", "origin": "", "warps": msgspec.to_builtins(TWO), "warpgroups": bad}
    (path := tmp_path / "trees.json").write_text(json.dumps(content))
    monkeypatch.setattr(gpus, "schedules_path", lambda _gpu: path)
    with pytest.raises(DamagedFile, match=rf"{path.name} is damaged .*restore it"):
        schedule_corrections.__wrapped__("NVIDIA Other")


def test_of_equal_costs_what_the_correction_says_decides() -> None:
    """The formula takes all tiles for the same; of those that are nearly the same only the first is asked about."""
    tiles = [WarpTile(block=(rows, 128, 16), warp=(32, 64), thread=(8, 8)) for rows in (64, 128)]
    choices = [Choice(tile, stages) for tile in tiles for stages in (2, 3)]
    asked = []

    def left(choice: Choice, *_: object) -> float:
        asked.append(choice)
        return 0.9 if choice.tile.block_m == 128 else 1.0

    tile_set = TileSet.of(*choices, cost=lambda *_: 1000.0, left_over=left)
    machine, problem = machine_for(DEFAULT_ARCH).for_choices(), Matmul(500, 500, 500)
    assert cost.choose(tile_set, problem, machine) == choices[2]
    assert asked == [choices[0], choices[2]]
    assert cost.choice_cost(tile_set, choices[2], problem, machine) == 900


def planning(plans_again: bool, fastest: Planned) -> TileSet:
    """Step 7's tiles, by whose trees one plan is much the fastest, whatever the tile."""
    tiles = find_steps()[7].tiles_of("fitted")

    def left(_choice: Choice, _problem: Matmul, _machine: Machine, planned: Planned, _cycles: float) -> float:
        return 0.1 if planned == fastest else 1.0

    return replace(tiles, left_over=left, plans_again=plans_again)


ODD = Matmul(442, 5967, 2243)  # rows of both are no whole vectors


@pytest.mark.parametrize("changed", ["parts", "copied"])
def test_what_trees_put_first_is_planned_where_it_differs_in_a_single_thing(changed: str) -> None:
    machine = machine_for(DEFAULT_ARCH).for_choices()
    for choice in find_steps()[7].tiles_of("fitted").choices[1:4]:
        usual = cost.cheapest_plan(planning(False, Planned()), choice, ODD, machine, split=True)
        others = {
            "parts": usual._replace(parts=usual.parts + 1),
            "copied": usual._replace(copied=(not usual.copied[0], usual.copied[1])),
        }
        both = others["parts"]._replace(copied=others["copied"].copied)
        for again, asked, planned in (
            (True, others[changed], others[changed]),
            (False, others[changed], usual),  # of a set that does not
            (True, both, usual),  # which differs in two
        ):
            tiles = planning(again, asked)
            assert cost.cheapest_plan(tiles, choice, ODD, machine, split=True) == planned
            if again:
                assert cost.choice_cost(tiles, choice, ODD, machine, split=True) == cost.planned_cost(
                    tiles, choice, ODD, machine, planned
                )
        whole = cost.cheapest_plan(planning(True, usual._replace(parts=2)), choice, ODD, machine, split=False)
        assert whole.parts == 1, "a variant that does not split"


def test_a_tile_is_chosen_by_what_it_would_be_planned_to_do() -> None:
    """Of the tiles that are the cheapest as their formula plans, the one that another plan makes the cheapest."""
    machine, split = machine_for(DEFAULT_ARCH).for_choices(), True
    plain = planning(False, Planned())
    first, second = sorted(
        cost.first_choices(plain, ODD, machine, split=split),
        key=lambda choice: cost.choice_cost(plain, choice, ODD, machine, split=split),
    )[:2]
    usual = cost.cheapest_plan(plain, second, ODD, machine, split=split)
    wanted = usual._replace(parts=usual.parts + 1)

    def left(choice: Choice, _problem: Matmul, _machine: Machine, planned: Planned, _cycles: float) -> float:
        return 0.1 if (choice, planned) == (second, wanted) else 1.0

    assert cost.choose(replace(plain, left_over=left), ODD, machine, split=split) == first
    assert cost.choose(replace(plain, left_over=left, plans_again=True), ODD, machine, split=split) == second


def test_the_schedule_does_what_it_was_priced_by() -> None:
    """One part of 658 blocks, of which 528 run at once, took 1.2 times as long on an H200 as two (seed 2065)."""
    problem, machine = Matmul(442, 5967, 2244), machine_for(DEFAULT_ARCH).for_choices()
    step, config = choose_step(problem, machine)
    assert step.plan(problem, config).parts == 2


@pytest.mark.parametrize(("step", "variant"), [(7, "fitted"), (10, "fitted"), (10, "boxes")])
def test_trees_know_all_that_they_ask_of_schedules(step: int, variant: str) -> None:
    """Of a product smaller than a tile, and one whose reduction is cut; their corrections are no more than that."""
    tiles, machine = find_steps()[step].tiles_of(variant), machine_for(DEFAULT_ARCH).for_choices()
    for sizes in ((33, 72, 40), (129, 257, 8001)):
        problem = Matmul(*sizes, "float32" if step == 7 else "float16")
        cycles = tiles.cost(tiles.default, problem, machine)
        planned = tiles.plan(tiles.default, problem, machine, tiles.parts(problem, tiles.default, machine))
        assert 0.4 < tiles.left_over(tiles.default, problem, machine, planned, cycles) < 2.5


def test_a_machine_without_corrections_goes_by_the_model_alone() -> None:
    tiles, machine = find_steps()[7].tiles_of("fitted"), machine_for(DEFAULT_ARCH).for_choices()
    alone, problem = replace(machine, corrections=None), Matmul(442, 5967, 2244)
    assert tiles.left_over(tiles.default, problem, alone, Planned(), 1e5) == 1.0
    assert tiles.left_over(tiles.default, problem, machine, Planned(), 1e5) != 1.0
    assert choose_step(problem, alone)[0].number == 7


def test_a_gpu_without_trees_of_its_own_has_the_modelled_one_s() -> None:
    assert schedules_path("NVIDIA H200").exists()
    assert schedule_corrections("../NVIDIA unheard of") == schedule_corrections("NVIDIA H200")
