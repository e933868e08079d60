"""Boosted regression trees: their sums, what is refused, and how they correct the model of schedules."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tensorir_ladder import gpus
from tensorir_ladder.gpus import schedule_corrections, schedules_path
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.cycles import Planned, planned_cycles
from tensorir_ladder.schedules.plans import able_plans, candidates, cheapest_plan
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


ODD = Matmul(442, 5967, 2243)  # rows of both are no whole vectors
MACHINE = machine_for(DEFAULT_ARCH).for_choices()
ALONE = replace(MACHINE, corrections=None)


def halving(**wanted: float) -> Machine:
    """A machine by whose trees schedules take half as long where all these features have these values."""
    asks, at = [], []
    for place, value in enumerate(wanted.values()):
        asks += [place, LEAF, place]  # smaller ones, then larger ones, else go on
        at += [value - 0.5, 0.0, value + 0.5]
    # The side of the smaller ones of the second question goes on; its larger side is a leaf that comes last.
    nodes = [*asks, LEAF, *([LEAF] * len(wanted))]
    trees = Trees(tuple(wanted), tuple(nodes), (*at, math.log(0.5), *([0.0] * len(wanted))))
    return replace(MACHINE, corrections=(trees, trees))


def test_what_trees_say_decides_among_tiles_that_the_formula_puts_first() -> None:
    tiles = find_steps()[7].tiles_of("fitted")
    first, *others = (each.choice for each in candidates(tiles, ODD, ALONE)[:8])
    other = next(choice for choice in others if choice.tile.block != first.tile.block)
    names = dict(zip(("block_m", "block_n", "block_k"), other.tile.block), threads=other.tile.threads_per_block)
    found = candidates(tiles, ODD, halving(**names))
    assert found[0].choice.tile.block == other.tile.block != first.tile.block
    assert [each.cycles for each in found] == sorted(each.cycles for each in found)


def test_of_tiles_that_are_nearly_the_same_one_is_a_candidate() -> None:
    tiles = find_steps()[10].tiles_of("boxes")
    found = {each.choice for each in candidates(tiles, Matmul(2000, 3000, 1000, "float16"), MACHINE)}
    alike = [(type(c.tile), c.tile.block_m // 32, c.tile.block_n // 32, c.tile.threads_per_block) for c in found]
    assert 4 < len(alike) == len(set(alike))


@pytest.mark.parametrize("changed", ["parts", "copied", "both"])
def test_what_trees_put_first_is_planned_where_it_differs_in_a_single_thing(changed: str) -> None:
    for choice in find_steps()[7].tiles_of("fitted").choices[1:4]:
        usual = cheapest_plan("warps", choice, ODD, ALONE)
        parts, a_copied = usual.parts + (changed != "copied"), usual.copied[0] ^ (changed != "parts")
        found = cheapest_plan("warps", choice, ODD, halving(parts=parts, a_copied=a_copied, b_copied=usual.copied[1]))
        wanted = Planned(parts, (a_copied, usual.copied[1]))
        assert (found == wanted) is (changed != "both")


def test_a_plan_costs_no_more_than_others_by_the_formula() -> None:
    for number, variant in ((7, "fitted"), (10, "fitted"), (10, "boxes")):
        problem = Matmul(442, 5967, 2243, "float32" if number == 7 else "float16")
        tiles = find_steps()[number].tiles_of(variant)
        choice = tiles.choices[1]
        found = cheapest_plan(tiles.formula, choice, problem, ALONE)
        others = able_plans(tiles.formula, choice, problem, ALONE, found.parts)
        assert found in others
        least = min(planned_cycles(choice, problem, ALONE, each) for each in others if each.own_warp == found.own_warp)
        assert planned_cycles(choice, problem, ALONE, found) == pytest.approx(least)


def test_the_schedule_does_what_it_was_priced_by() -> None:
    """One part of 658 blocks, of which 528 run at once, took 1.2 times as long on an H200 as two (seed 2065)."""
    problem, machine = Matmul(442, 5967, 2244), machine_for(DEFAULT_ARCH).for_choices()
    step, config = choose_step(problem, machine)
    assert step.plan(problem, config).parts == 2


@pytest.mark.parametrize(("step", "variant"), [(7, "fitted"), (10, "fitted"), (10, "boxes")])
def test_trees_know_all_that_they_ask_of_schedules(step: int, variant: str) -> None:
    """Of a product smaller than a tile, and one whose reduction is cut; their corrections are no more than that."""
    tiles = find_steps()[step].tiles_of(variant)
    for sizes in ((33, 72, 40), (129, 257, 8001)):
        problem = Matmul(*sizes, "float32" if step == 7 else "float16")
        for found in candidates(tiles, problem, MACHINE):
            assert 0.4 < found.cycles / planned_cycles(found.choice, problem, MACHINE, found.planned) < 2.5


def test_a_machine_without_corrections_goes_by_the_formulas_alone() -> None:
    tiles, problem = find_steps()[7].tiles_of("fitted"), Matmul(442, 5967, 2244)
    for found in candidates(tiles, problem, ALONE):
        assert found.cycles == planned_cycles(found.choice, problem, ALONE, found.planned)
    assert choose_step(problem, ALONE)[0].number == 7


def test_a_gpu_without_trees_of_its_own_has_the_modelled_one_s() -> None:
    assert schedules_path("NVIDIA H200").exists()
    assert schedule_corrections("../NVIDIA unheard of") == schedule_corrections("NVIDIA H200")
