"""What a product gets where nobody names a tile: chosen among a family's, legal, and in keeping with its size."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.cases import EVERY_VARIANT, STEPS, THREAD_STEPS
from tensorir_ladder.harness.build import Case, Kernel, lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.machines import MACHINES, machine_for
from tensorir_ladder.harness.records import RESULTS, load_records, load_shapes, load_tuned
from tensorir_ladder.harness.schedule_menus import read_menus
from tensorir_ladder.harness.shapes import draw_shapes, scheduled_case
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.relax.rules import contraction
from tensorir_ladder.schedules import cost
from tensorir_ladder.schedules.cycles import Planned, planned_cycles
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.plans import cheapest_plan, choice_cost, choose
from tensorir_ladder.schedules.tiles import Choice, TileSet, WarpTile
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.steps.choice import choose_step
from tensorir_ladder.steps.step import Config
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
@given(shape=st.tuples(*[st.integers(1, 20000)] * 3), multiprocessors=st.integers(1, 200), plans=st.booleans())
def test_a_choice_is_legal_and_always_the_same(
    family: TileSet, dtype: str, shape: tuple[int, int, int], multiprocessors: int, plans: bool
) -> None:
    machine, plans = machine_of(multiprocessors), plans and bool(family.formula)
    first, again = (choose(family, Matmul(*shape, dtype), machine, plans=plans) for _ in range(2))
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
    whole, parts = (choose(STEPS[10].tiles_of("fitted"), problem, machine_of(), plans=plans) for plans in (False, True))
    assert area(parts) > area(whole)
    assert Case.default(STEPS[10], problem, H200).tile == whole.tile


def test_among_schedules_the_last_is_chosen_that_the_machine_runs() -> None:
    found = {}
    for arch in ("sm_75", "sm_80", "sm_90a"):
        for dtype in ("float32", "float16"):
            step, config = choose_step(Matmul(1000, 1000, 1000, dtype), machine_for(arch).for_choices())
            found[arch, dtype] = step.number
            assert not config.tile.violations(machine_for(arch).target(), dtype_bytes(dtype), config.stages)
    by_arch = {"sm_75": (6, 6), "sm_80": (7, 9), "sm_90a": (7, 10)}
    assert found == {(arch, dtype): n for arch, ns in by_arch.items() for dtype, n in zip(("float32", "float16"), ns)}


def test_a_shape_gets_the_form_that_fits_it() -> None:
    def chosen(*shape: int) -> str:
        return choose_step(Matmul(*shape), machine_of())[1].variant

    assert chosen(4096, 4096, 4096) == chosen(2048, 2048, 2048) == "serpentine"
    assert chosen(640, 480, 3840) == chosen(513, 1025, 4097) == chosen(4095, 4096, 4096) == "fitted"
    assert choose_step(Matmul(512, 512, 512), machine_for("sm_75").for_choices())[1].variant == "full"


def lowered_as_chosen(problem: Matmul) -> Kernel:
    return lower(scheduled_case(problem, H200))


def test_a_long_reduction_of_few_ragged_results_is_chosen_in_parts_and_lowered() -> None:
    """Its parts are added up by threads that keep a vector each, not all of the result."""
    problem = Matmul(145, 1997, 2130)
    for config in (choose_step(problem, machine_of())[1], Config("fitted", STEPS[7].tiles.choices[1].tile, 2, H200)):
        kernel = lower(Case(STEPS[7], problem, "fitted", config.tile, H200, config.stages))
        assert kernel.launches == 2
        assert kernel.most_local_bytes <= 1024


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.emulator)])
def test_what_is_chosen_for_drawn_shapes_is_lowered(seed: int, dtype: str) -> None:
    count = 3 if seed == 1 else 30
    for number, drawn in enumerate(draw_shapes("schedules", seed, count, dtype)):
        kernel = lowered_as_chosen(replace(drawn.problem, layout=LAYOUTS[number % 2]))
        assert kernel.most_local_bytes <= 2048


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "whole"), [("float32", 1), ("float16", 8)])
def test_what_is_chosen_for_small_shapes_is_right(dtype: str, whole: int, layout: str) -> None:
    """Drawn as others are, each extent a sixteenth."""
    drawn = [each.problem for each in draw_shapes("schedules", 3, 8, dtype)]
    extents = [[whole * max(1, size // (16 * whole)) for size in (each.m, each.n, each.k)] for each in drawn]
    small = [Matmul(*sizes, dtype, layout) for sizes in extents if math.prod(sizes) < 1e6]
    assert len(small) >= 4
    for problem in small:
        verify(lowered_as_chosen(problem), EmulatorBackend(), [3])


@pytest.mark.parametrize("size", [256, 512, 1024, 2048, 4096, 8192])
def test_squares_keep_the_tiles_that_they_were_measured_with(size: int) -> None:
    recorded = {
        (record.tile, record.stages)
        for record in load_records(RESULTS)
        if (record.step, record.variant, record.tile_choice, record.dtype) == (10, "rows", "default", "float16")
        and (record.m, record.n, record.k) == (size, size, size)
    }
    case = Case.default(STEPS[10], Matmul(size, size, size, "float16"), H200)
    assert recorded == {(str(case.tile), case.stages_built)}


def test_the_cheapest_by_the_model_is_near_the_fastest_that_was_measured() -> None:
    """Of the tiles that tuning step 10 has timed, on five shapes of an H200."""
    tuned = [each for each in load_tuned(RESULTS) if each.step == 10 and "H200" in each.environment.gpu]
    assert len(tuned) >= 5
    for each in tuned:
        problem = Matmul(each.m, each.n, each.k, each.dtype, each.layout)
        speeds = {(c.tile, c.stages): statistics.median(c.ratios) for c in each.candidates if c.ratios}

        def cycles(key: tuple[str, int], problem: Matmul = problem) -> float:
            choice = Choice(STEPS[10].tiles.kind.parse(key[0]), key[1])
            return choice_cost(STEPS[10].tiles, choice, problem, machine_of())

        assert speeds[min(speeds, key=cycles)] > 0.95 * max(speeds.values())


def test_cycles_by_warps_are_about_what_was_measured() -> None:
    """Of the tiles that tuning step 7 has timed on an H200: their order, and the time but for a launch."""
    tuned = [each for each in load_tuned(RESULTS) if each.step == 7 and "H200" in each.environment.gpu]
    assert len(tuned) >= 2
    listed = {str(choice.tile) for choice in STEPS[7].tiles_of("fitted").choices}
    for each in tuned:
        problem, timed = Matmul(each.m, each.n, each.k), {}
        for found in each.candidates:
            if found.ratios and found.tile in listed:
                choice = Choice(WarpTile.parse(found.tile), found.stages)
                us = warp_cycles(choice, problem) / cost.CLOCK_GHZ / 1e3
                timed[choice] = us, statistics.median(found.times_ms) * 1e3
        _, measured = min(timed.values())
        assert measured < 1.06 * min(us for _, us in timed.values())
        assert all(0.6 < measured / modelled < 1.6 for modelled, measured in timed.values())


def warp_cycles(choice: Choice, problem: Matmul) -> float:
    """What a product takes by the formula, in one part, rows that are no whole vectors copied first or not."""
    return choice_cost(TileSet.of(choice, formula="warps"), choice, problem, machine_of())


def by_the_formula(choice: Choice, problem: Matmul) -> Planned:
    """What the formula alone puts first of a schedule by warps."""
    return cheapest_plan("warps", choice, problem, replace(machine_of(), corrections=None))


EXTENTS = st.one_of(st.integers(1, 9000), st.integers(1, 80))


@pytest.mark.filterwarnings("ignore:copied to", "ignore:.*more would stay empty")
@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    dtype=st.sampled_from(["float32", "float16"]),
    layout=st.sampled_from(LAYOUTS),
)
@example(shape=(592, 8, 104), dtype="float32", layout="nt")
def test_every_shape_gets_what_can_be_built(shape: tuple[int, int, int], dtype: str, layout: str) -> None:
    case = scheduled_case(Matmul(*shape, dtype, layout), H200)
    assert lower(case).cuda
    parts = case.step.plan(case.problem, case.config).parts
    assert parts == 1 or parts * case.stages <= case.k_tiles


def test_rows_of_no_whole_sectors_cost_more_and_rows_across_lines_do_not() -> None:
    choice = STEPS[10].tiles.default
    lines, sectors, vectors = (  # rows of 16 lines, of 63 sectors, of 127 vectors
        planned_cycles(choice, Matmul(1024, size, size, "float16"), machine_of()) for size in (1024, 1008, 1016)
    )
    assert vectors > 1.1 * lines
    assert sectors <= lines


EARLY_US = 0.22  # that the recorded kernels took less than those that the formulas know, which were not launched early


@pytest.mark.parametrize(
    ("step", "variant", "dtype"), [(10, "fitted", "float16"), (10, "boxes", "float16"), (7, "fitted", "float32")]
)
def test_cycles_are_about_what_was_measured(step: int, variant: str, dtype: str) -> None:
    """Of drawn shapes on an H200, the tile that was chosen for each; in parts, those that the model finds now."""
    errors = []
    for each in load_shapes(RESULTS):
        if (each.group, each.dtype) != ("schedules", dtype) or "H200" not in each.environment.gpu:
            continue
        if not (named := re.fullmatch(rf"{variant} (\S+), \d+ stages?", each.config)):
            continue
        problem, tiles = Matmul(each.m, each.n, each.k, each.dtype), STEPS[step].tiles_of(variant)
        rings = [choice for choice in tiles.choices if str(choice.tile) == named[1]]  # which short reductions cut short
        if not rings:  # of a tile that is none of the menu's any more
            continue
        cycles = [choice_cost(tiles, ring, problem, machine_of(), plans=True) for ring in rings]
        us = min(cycles) / cost.CLOCK_GHZ / 1e3 - EARLY_US
        errors.append(math.log(us / (1e3 * statistics.median(each.timing.samples_ms))))
    assert len(errors) >= 40
    assert abs(statistics.mean(errors)) < 0.03
    assert statistics.mean(map(abs, errors)) < 0.07


@pytest.mark.parametrize(("dtype", "lost"), [("float16", 0.015), ("float32", 0.012)])
def test_what_is_chosen_is_near_the_fastest_that_was_timed(dtype: str, lost: float) -> None:
    """Of the menus that the models are fitted to, each fourth; geometric mean, where what is chosen was timed."""
    menus = getattr(read_menus(RESULTS / "h200-schedule-menus.json.xz"), dtype)[::4]
    over_best = []
    for *sizes, _, kernels in menus:
        times = {json.dumps(kernel): us for *kernel, us in kernels}
        if us := times.get(json.dumps(planned(Matmul(*sizes, dtype)))):
            over_best.append(us / min(times.values()))
    assert len(over_best) > 0.8 * len(menus)
    assert statistics.geometric_mean(over_best) < 1 + lost
    assert max(over_best) < 1.3


@pytest.mark.parametrize("shape", [(1511, 790, 68), (976, 1157, 75), (598, 2170, 97), (1708, 756, 131)], ids=str)
def test_short_reductions_are_not_filled_up_with_zeros(shape: tuple[int, int, int]) -> None:
    """Of float32: by k tiles of 32 they would be some 0.18 to 0.29 of what is multiplied."""
    _, made = choose_step(Matmul(*shape), machine_of())
    multiplied = -(-shape[2] // made.tile.block_k) * made.tile.block_k
    assert multiplied < 1.18 * shape[2]


def test_tiles_of_a_b_stored_n_k_were_faster_transposed() -> None:
    """Of shapes drawn by a seed of their own, in the same rounds as cuBLAS and as the same tiles along k.

    The tiles were what was chosen then; of twelve shapes others are since, in other parts, or by trees that know more.
    """
    faster, of_cublas, still = [], [], 0
    for *sizes, cublas_us, ((*chosen, us), (form, *_, without_us)) in read_menus(
        RESULTS / "h200-schedule-menus.json.xz"
    ).float32_nt:
        assert form == "untransposed"
        still += chosen == planned(Matmul(*sizes, "float32", "nt"))
        faster.append(without_us / us)
        of_cublas.append(cublas_us / us)
    assert still >= 20
    assert min(faster) > 1.1
    assert statistics.geometric_mean(faster) > 1.25
    assert statistics.geometric_mean(of_cublas) > 1


def test_the_rule_s_tiles_of_rows_along_k_were_faster_turned() -> None:
    """By the tile that the rule's cost takes of either menu, beside the fastest that was timed."""
    found: dict[tuple[int, ...], dict[tuple[str, str], float]] = {}
    for *sizes, cublas_us, kernels in read_menus(RESULTS / "h200-schedule-menus.json.xz").float32_rule:
        shares = found.setdefault(tuple(sizes), {})
        shares |= {(how, tile): cublas_us / us for how, tile, _, us in kernels}
    compared = []
    for sizes, shares in found.items():
        turned, before = (
            shares.get((how, str(min(menu, key=lambda each: _outputs_of(each, sizes)).tile)))
            for how, menu in (("turned", contraction.TURNED_TILES), ("along k", contraction.WARP_TILES))
        )
        if turned and before:
            compared.append(turned / before)
            assert turned > 0.95 * max(shares.values())
    assert len(compared) >= 4
    assert min(compared) > 1.2


def test_turned_tiles_were_faster_than_the_default_form_on_squares_too() -> None:
    """Of a B stored [n, k]: the default form's 8x16 outputs a thread keep all in registers, and lose all the same."""
    forms = read_menus(RESULTS / "h200-schedule-menus.json.xz").float32_forms
    for *_, kernels in forms:
        fastest = {form: min(us for name, *_, us in kernels if name == form) for form in ("fitted", "serpentine")}
        assert fastest["fitted"] < 0.98 * fastest["serpentine"]
    of_cublas = {m: cublas_us / min(us for *_, us in kernels) for m, n, k, cublas_us, kernels in forms if m == n == k}
    assert min(of_cublas[side] for side in (2048, 4096, 8192)) > 0.9


def _outputs_of(choice: Choice, sizes: tuple[int, ...]) -> float:
    return cost.block_tile_cost(choice, Matmul(*sizes, "float32", "nt"), machine_of())


def planned(problem: Matmul) -> list[object]:
    """What is chosen for a product, as the menus have it: the form, its tile, and what the model plans besides."""
    step, config = choose_step(problem, machine_of())
    plan = step.plan(problem, config)
    rest: list[object] = [[int(copied) for copied in plan.copied]]
    if step.number == 10:
        rest += [[int(blocks) for blocks in plan.cluster], int(plan.own_warp)]
    return [config.variant, str(config.tile), config.stages, plan.parts, *rest]


def test_results_astride_sectors_take_longer_than_more_results_that_fill_them() -> None:
    choice = STEPS[10].tiles.choices[3]
    assert choice.tile.block_m == choice.tile.block_n == 128
    astride, whole = (Matmul(4096, 4096 - fewer, 64, "float16", "nt") for fewer in (8, 0))
    assert planned_cycles(choice, astride, machine_of()) > 1.05 * planned_cycles(choice, whole, machine_of())


@pytest.mark.parametrize(
    ("shape", "copied"),
    [
        ((8154, 395, 6519), (False, True)),
        ((8154, 396, 6519), (False, True)),
        ((8156, 395, 6520), (True, True)),
        ((240, 9001, 2047), (True, False)),
    ],
)
def test_the_smaller_operand_alone_is_copied_first(shape: tuple[int, int, int], copied: tuple[bool, bool]) -> None:
    """Of rows that are no whole vectors; those that are count as copied."""
    choice = Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=2), 2)
    assert by_the_formula(choice, Matmul(*shape)).copied == copied


def test_a_round_of_blocks_costs_less_than_the_first() -> None:
    """Of a reduction so short that starting is most of it: two rounds take less than twice what one takes."""
    choice = Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=2), 2)
    resident = cost.resident_blocks(choice, machine_of(), 4)
    once, twice = (warp_cycles(choice, Matmul(64 * 132, 64 * resident * rounds, 64)) for rounds in (1, 2))
    assert 1.3 * once < twice < 1.8 * once


def test_few_columns_are_given_a_tile_that_leaves_few_of_its_own_empty() -> None:
    """149 columns: two tiles of 128 were 0.74 of cuBLAS on an H200, five of 32 were 0.95."""
    step, config = choose_step(Matmul(6146, 149, 521), machine_of())
    covered = -(-149 // config.tile.block_n) * config.tile.block_n
    assert (step.number, config.variant) == (7, "fitted")
    assert covered <= 192


def test_parts_added_up_one_behind_the_other_are_fewer() -> None:
    """A reduction of few results: each part more is read later, whatever it holds."""
    problem = Matmul(64, 64, 64 * 256, "float16")
    few, many = (
        planned_cycles(Choice(STEPS[10].tiles.choices[2].tile, 6), problem, machine_of(), Planned(parts))
        for parts in (16, 32)
    )
    assert few < many


@pytest.mark.parametrize(
    ("shape", "tiles", "parts"), [((622, 467, 5767), 20, 13), ((382, 1021, 6957), 24, 11), ((126, 2391, 4533), 19, 13)]
)
def test_a_reduction_has_as_many_parts_as_fill_the_gpu(shape: tuple[int, int, int], tiles: int, parts: int) -> None:
    """Of 132 multiprocessors with room for two blocks each: one part more would begin another round."""
    choice, problem = Choice(WarpTile(block=(128, 128, 16), warp=(32, 64), thread=(8, 8)), 3), Matmul(*shape)
    assert cost.block_count(problem, choice.tile) == tiles
    assert tiles * parts <= 2 * 132 < tiles * (parts + 1)
    assert by_the_formula(choice, problem).parts == parts


def test_step_10_s_tiles_are_among_those_of_any_shape() -> None:
    own, every = STEPS[10].tiles.choices, STEPS[10].tiles_of("fitted").choices
    assert every[: len(own)] == own
    assert not any(each.tile.violations(H200.target(), 2, each.stages) for each in every)


@pytest.mark.sampled(4)
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
            listed = case.step.tiles_of(case.variant).choices
            assert any(case.tile == each.tile and case.stages <= each.stages for each in listed)
    own = STEPS[step].arch or ("sm_90a" if step >= 10 else "")
    assert able == ([own] if own else [arch for arch in MACHINES if arch != "sm_75"])
