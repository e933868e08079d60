"""What a product gets where nobody names a tile: chosen among a family's, legal, and in keeping with its size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cases import EVERY_VARIANT, STEPS, THREAD_STEPS
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.machines import MACHINES, Machine, machine_for
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import TileSet
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


def outputs(family: TileSet, size: int, dtype: str, machine: Machine = H200) -> int:
    """Outputs of the tile that is chosen for a square product."""
    tile, _ = family.choose(Matmul(size, size, size, dtype), machine.target(), machine.sms)
    return tile.block_m * tile.block_n


def test_without_choices_there_is_none_and_the_step_says_its_own() -> None:
    problem = Matmul(512, 512, 512)
    assert THREAD_TILES.choices == ()
    assert THREAD_TILES.choose(problem, H200.target(), 132) is None
    for number in THREAD_STEPS:
        assert STEPS[number].default_for(problem, H200.target(), 132) == (
            THREAD_TILES.default.tile,
            STEPS[number].stages,
        )


@each_family
def test_what_no_target_can_hold_is_not_chosen(family: TileSet, dtype: str) -> None:
    problem = Matmul(4096, 4096, 4096, dtype)
    ample, _ = family.choose(problem, H200.target(), 132)
    assert ample == family.default
    for kib in range(8, 228, 8):
        target = replace(H200, smem_per_block_bytes=kib * 1024).target()
        legal = [choice for choice in family.choices if not choice[0].violations(target, dtype_bytes(dtype), choice[1])]
        chosen = family.choose(problem, target, 132)
        if legal:
            assert chosen in legal
        elif chosen:  # with fewer slots than any has that is declared
            tile, slots = chosen
            assert not tile.violations(target, dtype_bytes(dtype), slots)
            assert slots < max(count for other, count in family.choices if other == tile)
        else:
            assert all(tile.violations(target, dtype_bytes(dtype), 1) for tile, _ in family.choices)


@each_family
@settings(max_examples=60, deadline=None)
@given(shape=st.tuples(*[st.integers(1, 20000)] * 3), multiprocessors=st.integers(1, 200), split=st.booleans())
def test_a_choice_is_legal_and_always_the_same(
    family: TileSet, dtype: str, shape: tuple[int, int, int], multiprocessors: int, split: bool
) -> None:
    first, again = (family.choose(Matmul(*shape, dtype), H200.target(), multiprocessors, split=split) for _ in range(2))
    assert first == again
    assert first in family.choices
    tile, slots = first
    assert not tile.violations(H200.target(), dtype_bytes(dtype), slots)


@each_family
def test_few_outputs_get_a_small_tile_and_many_the_large_one(family: TileSet, dtype: str) -> None:
    areas = [tile.block_m * tile.block_n for tile, _ in family.choices]
    assert outputs(family, 16, dtype) == min(areas)
    assert outputs(family, 16384, dtype) == max(areas)
    # Powers of two: no wave of blocks is left half empty by chance.
    chosen = [outputs(family, 2**power, dtype) for power in range(4, 15)]
    assert chosen == sorted(chosen)


@each_family
def test_fewer_multiprocessors_are_filled_by_larger_tiles(family: TileSet, dtype: str) -> None:
    problem = Matmul(1024, 1024, 1024, dtype)
    few, many = (family.choose(problem, H200.target(), count)[0] for count in (1, 1000))
    assert few.block_m * few.block_n > many.block_m * many.block_n


def test_a_reduction_that_is_split_affords_larger_tiles() -> None:
    problem = Matmul(256, 256, 65536, "float16")
    (whole, _), (parts, _) = (
        STEPS[10].tiles.choose(problem, H200.target(), 132, split=split) for split in (False, True)
    )
    assert parts.block_m * parts.block_n > whole.block_m * whole.block_n
    assert [STEPS[10].default_for(problem, H200.target(), 132, variant)[0] for variant in ("whole", "rows", "")] == [
        whole,
        parts,
        parts,
    ]


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
            assert any(case.tile == tile and case.stages <= slots for tile, slots in case.step.tiles.choices)
    own = STEPS[step].arch or ("sm_90a" if step >= 10 else "")
    assert able == ([own] if own else [arch for arch in MACHINES if arch != "sm_75"])
