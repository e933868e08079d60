"""What a product gets where nobody names a tile: chosen among a family's, legal, and in keeping with its size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cases import EVERY_VARIANT, STEPS, THREAD_STEPS
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.machines import MACHINES, machine_for
from tensorir_ladder.schedules import cost
from tensorir_ladder.schedules.cost import choose
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import Choice, TileSet
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.thread_tiles import THREAD_TILES

H200 = machine_for("sm_90a")
FAMILIES = {
    "warps": (STEPS[7].tiles, "float32"),
    "mma": (STEPS[8].tiles, "float16"),
    "wgmma": (STEPS[10].tiles, "float16"),
    "tma": (STEPS[11].tiles, "float16"),
}
each_family = pytest.mark.parametrize(("family", "dtype"), FAMILIES.values(), ids=FAMILIES)
SHAPES = [
    (1, 1, 1),
    (33, 17, 50),
    (64, 64, 64),
    (1, 8192, 4096),
    (129, 257, 8191),
    (1000, 1000, 1000),
    (8192, 8192, 8192),
]
CHOOSING = [(step, variant) for step, variant in EVERY_VARIANT if step not in THREAD_STEPS]


def machine_of(multiprocessors: int = 132, **limits: int) -> cost.Machine:
    """An H200 with so many multiprocessors, or with other limits."""
    return replace(replace(H200, **limits).for_choices(), multiprocessors=multiprocessors)


def area(choice: Choice) -> int:
    """Outputs of a choice's block tile."""
    return choice.tile.block_m * choice.tile.block_n


def area_of(family: TileSet, size: int, dtype: str) -> int:
    """Outputs of the tile that is chosen for a square product."""
    return area(choose(family, Matmul(size, size, size, dtype), machine_of()))


def test_without_choices_the_default_is_taken() -> None:
    problem = Matmul(512, 512, 512)
    assert THREAD_TILES.choices == ()
    assert choose(THREAD_TILES, problem, machine_of()) == THREAD_TILES.default
    for number in THREAD_STEPS:
        case = Case.default(STEPS[number], problem, H200)
        assert (case.tile, case.stages) == (THREAD_TILES.default.tile, THREAD_TILES.default.stages)


@each_family
def test_what_no_target_can_hold_is_not_chosen(family: TileSet, dtype: str) -> None:
    problem = Matmul(4096, 4096, 4096, dtype)
    assert choose(family, problem, machine_of()) == family.default
    itemsize = dtype_bytes(dtype)
    for kib in range(8, 228, 8):
        machine = machine_of(smem_per_block_bytes=kib * 1024)
        legal = [each for each in family.choices if not each.tile.violations(machine.target, itemsize, each.stages)]
        chosen = choose(family, problem, machine)
        if legal:
            assert chosen in legal
        elif not chosen.tile.violations(machine.target, itemsize, chosen.stages):  # with fewer stages than declared
            assert chosen.stages < max(each.stages for each in family.choices if each.tile == chosen.tile)
        else:
            assert chosen == family.default
            assert all(each.tile.violations(machine.target, itemsize, 1) for each in family.choices)


@each_family
@settings(max_examples=60, deadline=None)
@given(shape=st.tuples(*[st.integers(1, 20000)] * 3), multiprocessors=st.integers(1, 200), split=st.booleans())
def test_a_choice_is_legal_and_always_the_same(
    family: TileSet, dtype: str, shape: tuple[int, int, int], multiprocessors: int, split: bool
) -> None:
    machine = machine_of(multiprocessors)
    first, again = (choose(family, Matmul(*shape, dtype), machine, split=split) for _ in range(2))
    assert first == again
    assert first in family.choices
    assert not first.tile.violations(machine.target, dtype_bytes(dtype), first.stages)


@each_family
def test_few_outputs_get_a_small_tile_and_many_the_large_one(family: TileSet, dtype: str) -> None:
    areas = list(map(area, family.choices))
    assert area_of(family, 16, dtype) == min(areas)
    assert area_of(family, 16384, dtype) == max(areas)
    # Powers of two: no wave of blocks is left half empty by chance.
    chosen = [area_of(family, 2**power, dtype) for power in range(4, 15)]
    assert chosen == sorted(chosen)


@each_family
def test_fewer_multiprocessors_are_filled_by_larger_tiles(family: TileSet, dtype: str) -> None:
    problem = Matmul(1024, 1024, 1024, dtype)
    few, many = (choose(family, problem, machine_of(count)) for count in (1, 1000))
    assert area(few) > area(many)


def test_a_reduction_that_is_split_affords_larger_tiles() -> None:
    problem = Matmul(256, 256, 65536, "float16")
    whole, parts = (choose(STEPS[10].tiles, problem, machine_of(), split=split) for split in (False, True))
    assert area(parts) > area(whole)
    chosen = [Case.default(STEPS[10], problem, H200, variant).tile for variant in ("whole", "rows", "")]
    assert chosen == [whole.tile, parts.tile, parts.tile]


@pytest.mark.parametrize(("step", "variant"), CHOOSING)
def test_what_is_chosen_can_be_built_wherever_the_step_can(step: int, variant: str) -> None:
    able = []
    for machine in MACHINES.values():
        cases = [
            Case.default(STEPS[step], Matmul(*shape, dtype, layout), machine, variant)
            for shape in SHAPES
            for dtype in STEPS[step].variant(variant).dtypes
            for layout in ("nn", "nt")
        ]
        if all(case.lacks for case in cases):
            continue
        able.append(machine.arch)
        for case in cases:
            case.validate()
            assert any(case.tile == each.tile and case.stages <= each.stages for each in case.step.tiles.choices)
    own = STEPS[step].arch or ("sm_90a" if step >= 10 else "")
    assert able == ([own] if own else [arch for arch in MACHINES if arch != "sm_75"])
