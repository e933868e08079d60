"""What the call chooses, and by what: the formula, the measurements that correct it, and their file."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tvm

from support.cases import hopper
from support.roles import roles
from tensorir_ladder.harness.menu_fit import chosen_over_best, geometric_mean
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.fused_epilogue import PLAIN
from tensorir_ladder.kernels.persistent import cluster_blocks
from tensorir_ladder.kernels.roles import MOST_SHARED_STAGES, MOST_STAGES
from tensorir_ladder.kernels.stream_k import plan_for
from tensorir_ladder.kernels.tiles import RoleTile, most_stages, stages_of_one_tile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import estimates
from tensorir_ladder.torch_ops.call import choose_for
from tensorir_ladder.torch_ops.choice import EXCHANGED, UPRIGHT, choices, choose
from tensorir_ladder.torch_ops.errors import DamagedFile
from tensorir_ladder.torch_ops.estimates import Asked, CostFile, Estimates, MeasuredShape, cost_file
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.kernel_cost import Forms, KTile, microseconds
from tensorir_ladder.torch_ops.nearby import KERNEL, Measured, Nearby, kernel_places, product_places
from tensorir_ladder.torch_ops.one_tile import (
    CLUSTERS,
    OF_PARTS,
    all_tiles,
    named,
    one_tile_microseconds,
    one_tile_stages,
    stages_once,
)
from tensorir_ladder.torch_ops.operands import Form, arrange, output_rows

H200 = hopper(name="NVIDIA H200")
FILE = cost_file("NVIDIA H200")
ALL = list(choices())


def test_on_shapes_not_measured_what_is_chosen_is_as_fast_as_the_best_of_the_menu() -> None:
    found = chosen_over_best(FILE, ALL, H200)
    assert len(found) == sum(len(shape.times) > 1 for shape in FILE.shapes) > 400
    assert geometric_mean(found) >= 0.97


BLANK = msgspec.structs.replace(FILE, shapes=())


def told(problem: Matmul, **times: float) -> Estimates:
    """Estimates by the formulas and times of one product alone, of kernels by their places in the menu."""
    taken = tuple((int(place[1:]), us) for place, us in times.items())
    shape = MeasuredShape(m=problem.m, n=problem.n, k=problem.k, layout=problem.layout, times=taken)
    kernels = tuple(map(str, (*ALL, Streamed())))
    return Estimates(ALL, msgspec.structs.replace(BLANK, kernels=kernels, shapes=(shape,)), H200.multiprocessors)


def test_what_was_measured_of_this_very_shape_decides() -> None:
    """The formula's second is measured to be faster than its first, at one shape: there it is taken.

    Far away what the formula puts first is, or what it takes for as fast.
    """
    near, far = Matmul(1000, 1000, 1000, "float16"), Matmul(64, 8192, 256, "float16")
    formula = Estimates(ALL, BLANK, H200.multiprocessors)
    us = formula.times(near).menu
    first, second = us.argsort()[:2]
    found = told(near, **{f"_{first}": 1.2 * us[first], f"_{second}": 0.8 * us[second]})
    assert found.times(near).menu.argmin() == second
    assert found.times(near).menu[second] == 0.8 * us[second]
    us = formula.times(far).menu
    assert us[found.times(far).menu.argmin()] < 1.01 * us.min()


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("size", [1024, 2048, 4096, 8192])
def test_of_squares_that_were_timed_the_choice_is_among_the_fastest(size: int, layout: str) -> None:
    """Of 4096 nn an odd width once was chosen that had not been timed: it took 1.4 times as long as the fastest."""
    times = [each.times for each in FILE.shapes if (each.m, each.n, each.k, each.layout) == (size, size, size, layout)]
    if not times:
        pytest.skip(f"the file has no times of {size} {layout}")
    taken = {FILE.kernels[place]: us for place, us in times[0]}
    chosen = choose(Matmul(size, size, size, "float16", layout), H200)
    name = named(chosen.tile) if chosen.kernel in (UPRIGHT, EXCHANGED) else str(chosen)
    assert taken[name] <= 1.05 * min(taken.values())


def test_one_kernel_s_time_says_the_same_of_all_others_and_more_of_itself() -> None:
    """A time of the formula's first that is too slow: is it the kernel or the product? Some of both."""
    problem, near = Matmul(1000, 1000, 1000, "float16"), Matmul(1032, 1032, 1032, "float16")
    before = Estimates(ALL, BLANK, H200.multiprocessors).times(problem).menu
    first, *others = before.argsort()[:9]
    found = told(problem, **{f"_{first}": 1.3 * before[first]})
    after = found.times(problem).menu
    assert after[first] / before[first] == pytest.approx(1.3)
    strangers = [place for place in others if ALL[place].kernel.step != ALL[first].kernel.step]
    assert all(1 < after[place] / before[place] < 1.3 for place in strangers)
    assert 1 < found.times(near).menu[first] / Estimates(ALL, BLANK, 132).times(near).menu[first] < 1.35


def test_products_are_placed_by_rows_by_the_eight() -> None:
    """Rows come to a kernel by the eight: nine take what sixteen do. Few rows cost the same."""
    place = product_places(np.array([56, 49, 48, 57, 16, 9, 8]), 5120, 5120, True)
    assert [np.array_equal(one, place[0]) for one in place] == [True, True, False, False, False, False, False]
    assert np.array_equal(place[4], place[5])
    assert np.array_equal(place[4], place[6])


NOTHING = Measured(np.zeros((0, 8)), np.zeros(0, int), np.zeros((0, 1 + len(KERNEL))), np.zeros(0), np.zeros(0))


def test_times_of_many_products_are_told_by_the_nearest() -> None:
    """Each kernel has its own difference, the same for all products: found again with NEAREST times and with more."""
    draw = np.random.default_rng(0)
    kernels = kernel_places(0, *3 * draw.standard_normal((8, 30)), waves=1, beyond=(1, 1))
    own = 0.07 * draw.standard_normal(30)
    sizes = 2.0 ** draw.uniform(8, 9, (60, 3))
    products = product_places(*sizes.astype(int).T, False)
    of, kernel = np.repeat(np.arange(60), 30), np.tile(np.arange(30), 60)
    one_missing = ~((of == 7) & (kernel == 3))
    measured = Measured(
        products, of[one_missing], kernels[kernel[one_missing]], own[kernel[one_missing]], np.ones(60 * 30 - 1)
    )
    nearby = Nearby(measured)
    expected = nearby.expected(products[7], kernels)
    np.testing.assert_allclose(expected.off, own, atol=0.02)
    assert expected.deviation.max() < 0.05
    unknown = nearby.expected(products[7], kernel_places(1, *[0] * 8, waves=1, beyond=(1, 1))[None])
    assert unknown.deviation > 1.5 * expected.deviation.max()


def test_what_another_gpu_s_kernels_take_tells_some_of_it() -> None:
    """It tells less than this GPU's times do, and they go before it."""
    kernels = kernel_places(0, np.zeros(1), *[0] * 7, waves=1, beyond=(1, 1))
    product = product_places(100, 100, 100, False)
    slow, fast = (
        Measured(product[None], np.zeros(1, int), kernels, np.array([off]), np.ones(1)) for off in (0.1, -0.1)
    )
    alone, told, both = (Nearby(*given).expected(product, kernels) for given in ([slow], [NOTHING, slow], [fast, slow]))
    assert 0.05 < told.off < alone.off < 0.1
    assert alone.deviation < told.deviation < Nearby(NOTHING).expected(product, kernels).deviation
    assert both.off < -0.03


def test_where_nothing_was_measured_kernels_near_each_other_differ_alike() -> None:
    nothing = Nearby(NOTHING)
    kernels = kernel_places(0, np.array([0.0, 0.1, 4.0]), *[0] * 7, waves=1, beyond=(1, 1))
    off, covariance = nothing.expected(product_places(100, 100, 100, False), kernels)
    assert off.tolist() == [0, 0, 0]
    alike = covariance / covariance[0, 0]
    assert np.allclose(alike.diagonal(), 1)
    assert alike[0, 1] > 0.9 > 0.7 > alike[0, 2] > 0


def test_kernels_are_the_less_alike_the_farther_one_reaches_beyond_a_product() -> None:
    """What is multiplied for nothing is one tile's own: it tells little of a tile of the same size that fits."""
    whole, some, half = 1.0, 1.02, 1.5
    for beyond in ((np.array([whole, some, half]), 1), (1, np.array([whole, some, half]))):
        kernels = kernel_places(0, *[0] * 8, waves=1, beyond=beyond)
        covariance = Nearby(NOTHING).expected(product_places(100, 100, 100, False), kernels).covariance
        alike = covariance[0] / covariance[0, 0]
        assert 1 == alike[0] > alike[1] > 0.99 > 0.9 > alike[2] > 0


def test_odds_are_of_what_is_likely_the_fastest() -> None:
    """Of what was measured to take a tenth less than was likely; where nothing is known, the choice loses more."""
    problem, all_choices = Matmul(1000, 1000, 1000, "float16"), list(choices())
    nothing = msgspec.structs.replace(cost_file("NVIDIA H200"), shapes=())
    before = Estimates(all_choices, nothing, 132)
    names = [*map(str, before.kernels), *(named(all_tiles().tile(place)) for place in range(len(all_tiles().width)))]
    times = np.concatenate(before.times(problem))
    known = [place for place in times.argsort() if names[place] in nothing.kernels][:8]
    fast = known[0]
    measured = tuple(
        (nothing.kernels.index(names[place]), float(times[place]) * (0.9 if place == fast else 1)) for place in known
    )
    shape = MeasuredShape(problem.m, problem.n, problem.k, problem.layout, measured)
    odds = Estimates(all_choices, msgspec.structs.replace(nothing, shapes=(shape,)), 132).odds(problem)
    likely = np.concatenate([odds.menu, odds.tiles])
    assert likely.sum() == pytest.approx(1)
    assert likely[fast] > 0.5
    assert before.odds(problem).loss > 2 * odds.loss > 0


def test_a_width_of_no_whole_panels_costs_more_where_b_is_stored_by_rows() -> None:
    _, odd = forms("128x216x64/2x1")
    _, even = forms("128x256x64/2x1")
    nn, nt = (timed(odd, 4096, 4096, 4096, nt).min() / timed(even, 4096, 4096, 4096, nt).min() for nt in (False, True))
    assert nn > 1.1 > nt


def test_a_narrow_panel_is_loaded_like_a_whole_one() -> None:
    """Where B is stored by rows, 144 and 176 columns are three panels; stored transposed, they are what they are."""
    narrow, wide = (forms(f"128x{columns}x64/2x1")[1] for columns in (144, 176))
    by_rows, transposed = (
        [KTile(found, 4096, 4096, nt).brought.max() for found in (narrow, wide)] for nt in (False, True)
    )
    assert by_rows[0] == by_rows[1]
    assert transposed[0] < transposed[1]


def test_only_kernels_that_can_be_built_are_chosen() -> None:
    """A cut only where the plan has helpers, a cluster only where its blocks can share their B tile."""
    draw, seen = random.Random(0), set()
    for _ in range(400):
        m, n, k = (8 * round(math.exp(draw.uniform(0, math.log(1024)))) for _ in range(3))
        problem = Matmul(m, n, k, "float16", draw.choice(("nn", "nt")))
        chosen = choose(problem, H200)
        kernel = chosen.kernel
        seen.add((kernel.step, kernel.cuts, kernel.blocks, kernel is EXCHANGED, chosen.tile.shared_by > 1))
        assert not chosen.tile.misfits()
        assert not chosen.tile.violations(H200.target, 2, chosen.stages)
        if kernel.cuts:
            assert plan_for(problem, chosen.tile, H200, kernel.blocks).helpers
        if kernel.blocks > 1:
            assert cluster_blocks(problem, chosen.tile, True) == kernel.blocks
    assert len(seen) >= 6, "drawn shapes are taken by kernels of all kinds"


def test_the_tiles_that_are_priced_are_those_that_fit() -> None:
    """Their stages, and the blocks of a multiprocessor, are those of the tiles themselves; so is what is left out."""
    tiles, draw = all_tiles(), random.Random(3)
    for place in draw.sample(range(len(tiles.rows)), 60):
        tile, (stages, fewer) = tiles.tile(place), tiles.stages[:, place].tolist()
        most = MOST_STAGES if tile.cluster == (1, 1) else MOST_SHARED_STAGES
        assert not tile.violations(H200.target, 2, stages)
        assert not tile.violations(H200.target, 2, fewer)
        if tile.swapped:
            assert stages == most_stages(tile, most)
            assert fewer in (stages, most_stages(tile, most, blocks=2))
        else:  # of a B stored [k, n], and [n, k], which has no panels to fill
            assert [stages, fewer] == [stages_of_one_tile(tile, most, nt) for nt in (False, True)]
            assert most_stages(tile, most) <= stages <= fewer
        held = [tile.resident(2, each) if tile.swapped else 1 for each in (stages, fewer)]
        assert tiles.held[:, place].tolist() == held
        if tile.swapped:
            assert tiles.cluster[place] == tile.cluster_size
        assert tiles.place(named(tile)) == place
    assert tiles.place("exchanged 256x192x64/1x3/8") is tiles.place("step 12, whatever") is None


def test_a_time_of_a_ring_that_had_fewer_stages_is_another_kernel_s() -> None:
    """It tells of today's kernel, as far as the formula knows of stages; but it is not what that one takes."""
    problem, tile = Matmul(4736, 776, 6184, "float16"), RoleTile.parse("192x160x64/3x1/2x1")
    place = all_tiles().place(named(tile, 3))
    assert place == all_tiles().place(named(tile))
    assert [stages_once(named(tile, once)) for once in (0, 3)] == [0, 3]
    assert stages_once("step 12, 192x160x64/3x1, 3 stages") == stages_once(named(RoleTile.parse("16x64x64/1x1/1"))) == 0
    file = cost_file(H200.name)
    guessed = Estimates(ALL[:1], msgspec.structs.replace(file, shapes=()), 132).times(problem).tiles[place]
    found = {}
    for once in (0, 3):
        shape = MeasuredShape(problem.m, problem.n, problem.k, "nn", ((0, 2 * guessed),))
        one = msgspec.structs.replace(file, kernels=(named(tile, once),), shapes=(shape,))
        found[once] = Estimates(ALL[:1], one, 132).times(problem).tiles[place]
    assert found[0] == 2 * guessed
    assert guessed < found[3] < found[0]
    earlier, now = (all_tiles().at(np.array([place]), once) for once in (3, 0))
    prices = [one_tile_microseconds(each, *Asked.of(problem), 132, file.one_tile)[0] for each in (earlier, now)]
    assert [each.ring(1, False).tolist() for each in (earlier, now)] == [[3], [4]]
    assert prices[0] >= prices[1]


def test_names_of_exchanged_tiles_say_which_blocks_share_loads() -> None:
    """Three fields where none do, as in files from before there were such clusters."""
    tiles = all_tiles()
    for text in ("72x64x64/1x1/1/2x4", "16x128x64/1x2/1/1x2", "16x128x64/1x2/4", "72x64x64/1x1/2/2x2"):
        place = tiles.place(f"exchanged {text}")
        assert place is not None
        assert (str(tiles.tile(place)), named(tiles.tile(place))) == (text, f"exchanged {text}")
    for unoffered in ("72x64x64/1x1/1/3x1", "72x64x128/1x1/2/1x2", "16x64x256/1x1/1/2x1", "16x128x64/1x1/1/1x2"):
        assert tiles.place(f"exchanged {unoffered}") is None
    for malformed in ("72x64x64/1x1/1/2", "72x64x64/1x1/1/2x4/1", "16x64x64/1x1/2/1x1", "72x64x64/1x1/"):
        with pytest.raises(ValueError, match=r"names no tile|malformed tile"):
            tiles.place(f"exchanged {malformed}")
    for upright in ("64x88x64/1x1/1x1/7", "64x72x64/1x1/4x1/2", "64x72x64/1x1/4x2"):
        place = tiles.place(f"upright {upright}")
        assert place is not None
        assert named(tiles.tile(place)) == f"upright {upright}"
        assert tiles.parts[place] * tiles.down[place] * tiles.across[place] in (7, 8)
    for unoffered in ("64x72x64/1x1/4x2/2", "64x88x64/1x1/1x1/9"):
        assert tiles.place(f"upright {unoffered}") is None
    with pytest.raises(ValueError, match="names no tile"):
        tiles.place("upright 64x88x64/1x1/1x1/1")
    with pytest.raises(ValueError, match="names no tile"):
        tiles.place(f"exchanged {upright}")
    of_kinds = [
        {*zip(*(each[(tiles.kind == kind) & ~tiles.split].tolist() for each in (tiles.down, tiles.across)))}
        for kind in range(3)
    ]
    assert of_kinds == [{*CLUSTERS}, {cluster[::-1] for cluster in CLUSTERS}, {(1, 1), (2, 1), (4, 1)}]
    both = tiles.shared & tiles.split
    assert {*zip(tiles.down[both].tolist(), tiles.across[both].tolist())} == {*OF_PARTS}
    assert tiles.cluster.max() == 8
    assert not both[tiles.in_rows].any()


def test_tiles_of_whole_rows_are_named_by_the_most_columns_that_they_take() -> None:
    """Their times tell of all such products; the tile itself has the product's columns, and as many stages as fit."""
    tiles = all_tiles()
    for text, n, made in (
        ("88x192x64/1x3/3", 152, "88x152x64rows/1x3/3"),
        ("16x64x64/1x1/1/4x1", 24, "16x24x64rows/1x1/1/4x1"),
        ("40x256x64/1x2/2", 200, "40x200x64rows/1x2/2"),
    ):
        place = tiles.place(f"rows {text}")
        assert place is not None
        assert tiles.in_rows[place]
        assert (str(tiles.tile(place, n)), named(tiles.tile(place, n))) == (made, f"rows {text}")
        stages = one_tile_stages(Matmul(tiles.rows[place] * 4, n, 4096, "float16"), place, 132)
        assert stages == most_stages(tiles.tile(place, n), 8 if tiles.down[place] == 1 else 16)
    for unoffered in ("72x64x64/1x1/1/2x4", "72x64x128/1x1/1", "248x192x64/1x3/1"):
        assert tiles.place(f"rows {unoffered}") is None


@pytest.mark.parametrize("n", [8, 56, 72, 152, 200, 248])
def test_whole_rows_are_offered_where_one_tile_has_all_of_them(n: int) -> None:
    """And to no B that is transposed, has gaps between rows, or rows that lie in the same banks."""
    tiles, multiprocessors, rates = all_tiles(), 132, FILE.one_tile
    of = tiles.in_rows

    def offered(n: int, k: int, nt: bool, b_row: int) -> set[int]:
        us = one_tile_microseconds(tiles, 1000, n, k, nt, k, b_row, multiprocessors, rates)
        return set(tiles.columns[of & np.isfinite(us)].tolist())

    assert offered(n, 4096, False, n) == {-(-n // 64) * 64}
    assert not offered(n, 4096, True, 4096)
    assert not offered(n, 4096, False, n + 8)
    assert not offered(n + 1, 4096, False, n + 1)
    assert not offered(n, 4095, False, n)
    assert not offered(-(-n // 64) * 64, 4096, False, -(-n // 64) * 64)
    assert not offered(n + 256, 4096, False, n + 256)


def test_a_long_reduction_of_few_columns_reads_whole_rows() -> None:
    """Of operands that have the problem's sizes: a kernel reads B as lines, of which there are no others."""
    problem = Matmul(1056, 152, 8136, "float16")
    taken = choose(problem, H200)
    assert (taken.kernel, taken.tile.in_rows, taken.tile.block_n) == (EXCHANGED, True, 152)
    assert not choose(replace(problem, layout="nt"), H200).tile.in_rows


@pytest.mark.parametrize(
    ("k", "n", "step", "any_m", "whole"),
    [
        (8136, 152, 152, False, True),
        (8136, 152, 160, False, False),  # gaps between rows of B
        (8135, 152, 152, False, False),  # A is copied to longer rows, and B has none for these
        (8136, 151, 151, False, False),  # B is
        (8136, 152, 152, True, False),
    ],
)
def test_whole_rows_are_read_of_operands_that_lie_so(k: int, n: int, step: int, any_m: bool, whole: bool) -> None:
    operands = arrange(Form("a", (1056, k), (k, 1), "float16"), Form("b", (k, n), (step, 1), "float16"), "float16")
    choice, _, _ = choose_for(operands, PLAIN, any_m, H200)
    assert choice.tile.in_rows == whole


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((40, 264, 520), "16x64x64/1x1/1/2x4"),
        ((13, 72, 520), "16x64x64/1x1/3"),
        ((70, 264, 520), "64x88x64/1x1/1x1/5"),
    ],
    ids=str,
)
def test_blocks_are_counted_as_they_are_launched(shape: tuple[int, int, int], tile: str) -> None:
    """Clusters are whole, also where the output ends within one."""
    tiles = all_tiles()
    place, kernel = tiles.place(named(RoleTile.parse(tile))), roles(12, shape, tile, layout="nt", stages=3)
    assert tiles.blocks(*shape[:2])[place] == kernel.blocks
    assert tiles.cluster[place] == kernel.launch["clusterCtaIdx.x"]


def test_few_tiles_exchange_the_operands_and_even_shares_of_columns_have_their_width() -> None:
    """Shapes of the menu's measurements, by what was fastest there."""
    wide = choose(Matmul(414, 4096, 14336, "float16", "nt"), H200)
    assert wide.kernel is EXCHANGED
    assert -(-414 // wide.tile.block_m) * wide.tile.block_m < 450, "rows are shared out evenly"
    even = choose(Matmul(1704, 5720, 4648, "float16"), H200)
    assert (even.kernel.step, even.tile.block_n % 64 > 0) == (13, True)


def test_a_long_reduction_of_few_tiles_goes_in_parts_with_its_operands_as_they_are() -> None:
    """88 columns are an instruction's as they are, and 128 of exchanged operands."""
    taken = choose(Matmul(872, 88, 6704, "float16", "nt"), H200)
    assert taken.kernel is UPRIGHT
    assert taken.tile.parts > 4
    for batch, any_rows in ((2, False), (1, True)):
        assert choose(Matmul(872, 88, 6704, "float16", "nt"), H200, batch, any_rows).tile.parts == 1


@pytest.mark.parametrize(("shape", "layout"), [((872, 88, 6704), "nn"), ((16, 1024, 4096), "nt")], ids=str)
def test_outputs_with_gaps_between_rows_are_stored_as_they_lie(shape: tuple[int, int, int], layout: str) -> None:
    """TMA steps over gaps; results of parts would be copied, which leave by plain addresses."""
    m, n, k = shape
    b = Form("b", (k, n), (n, 1) if layout == "nn" else (1, k), "float16")
    operands = arrange(Form("a", (m, k), (k, 1), "float16"), b, "float16")
    for row, in_parts in ((n, True), (2 * n, False)):
        out = output_rows(Form("out", (m, n), (row, 1), "float16"), operands)
        choice, problem, setting = choose_for(operands, PLAIN, False, H200, out)
        assert (choice.tile.parts > 1) == in_parts
        made = generate(tvm.IRModule({"main": choice.build(problem, setting)}), H200.target, "tirx")
        assert operands.output(launch_plan(made), out) is out


def test_few_rows_exchange_the_operands() -> None:
    """Weights fill the instruction's rows; where they are few, the reduction goes in parts. Not of batches."""
    few, fewer = (Matmul(16, n, 4096, "float16", "nt") for n in (14336, 1024))
    taken, split = choose(few, H200), choose(fewer, H200)
    assert taken.kernel is split.kernel is EXCHANGED
    assert taken.tile.block_m in (8, 16)
    assert taken.tile.parts == 1
    assert split.tile.parts > 1
    assert "launched early" in str(taken)
    for batch, any_rows in ((2, False), (1, True)):
        assert choose(few, H200, batch, any_rows).kernel is not EXCHANGED
    assert choose(Matmul(1024, 6144, 4096, "float16", "nt"), H200).kernel is not EXCHANGED


def forms(tile: str) -> tuple[dict[str, int], Forms]:
    """All kernels with one tile, and their places by what they are called in describing them."""
    found = [choice for choice in ALL if str(choice.tile) == tile]
    names = {str(each).split(", ", 3)[-1]: place for place, each in enumerate(found)}
    return names | {f"step {each.kernel.step}": place for place, each in enumerate(found)}, Forms(
        found, FILE.rates, 132
    )


def timed(found: Forms, m: int, n: int, k: int, nt: bool = False) -> np.ndarray:
    """The formula's microseconds for one product."""
    return microseconds(found, KTile(found, k, k if nt else n, nt), m, n, k)


def test_kernels_cost_what_they_do_beside_their_tiles_work() -> None:
    places, found = forms("128x256x64/2x1")
    us = timed(found, 1024, 2048, 4096)  # 64 tiles: a wave, and no crowd
    early, pairs = us[places["launched early, whole tiles"]], us[places["launched early, whole tiles, clusters of 2"]]
    assert us[places["step 12"]] - early == pytest.approx(FILE.rates.waits)
    assert us[places["step 11"]] > us[places["step 12"]]
    assert pairs != early
    assert np.isinf(timed(found, 1024, 2048, 64)[places["launched early, last wave cut"]])


def test_a_b_tile_of_one_panel_is_not_shared() -> None:
    places, found = forms("64x64x64/1x1")
    shared = places["launched early, whole tiles, clusters of 2"]
    stored = [timed(found, 4096, 4096, 4096, nt)[shared] for nt in (False, True)]
    assert [math.isinf(us) for us in stored] == [True, False]


def test_ragged_rows_take_longer() -> None:
    places, found = forms("128x128x64/2x1")
    whole, ragged = (timed(found, 4096, n, 4096) for n in (4096, 4088))
    assert (ragged[places["step 12"]]) > whole[places["step 12"]]


def test_rows_with_gaps_between_them_cost_what_their_distances_do() -> None:
    """Rows of 4088 elements that begin whole cache lines apart are loaded as fast as any."""
    _, found = forms("128x128x64/2x1")
    whole = microseconds(found, KTile(found, 4096, 4096, True), 4096, 4096, 4088)
    assert (whole < timed(found, 4096, 4096, 4088, nt=True)).all()


def test_kernels_are_chosen_by_the_rows_that_they_read() -> None:
    """Those of copies begin whole cache lines apart; those of operands that TMA reads lie where they are."""

    def matrix(name: str, rows: int, columns: int, apart: int = 0) -> Form:
        return Form(name, (rows, columns), (apart or columns, 1), "float16")

    copied = arrange(matrix("a", 100, 1001), matrix("b", 1001, 600), "float16")
    assert copied.steps == (1024, 600)
    sliced = arrange(matrix("a", 100, 1000, 1088), matrix("b", 1000, 600, 4096), "float16")
    assert sliced.steps == (1088, 4096)


def test_a_tile_that_was_not_fitted_has_the_efficiency_of_others() -> None:
    """Between those of its rows and k steps; where there are none, the median."""
    rates = FILE.rates
    known = [rates.efficiency[f"128x{columns}x64/2x1"] for columns in (128, 192)]
    between, strange = rates.efficiencies(*(np.array(each) for each in ((128, 64), (160, 64), (64, 192))))
    assert between == pytest.approx(sum(known) / 2)
    assert strange == np.median([*rates.efficiency.values()])


def test_a_gpu_without_a_file_has_the_modelled_one_s() -> None:
    assert cost_file("NVIDIA Other") == cost_file("NVIDIA H200")
    assert cost_file("NVIDIA H100 80GB HBM3").rates != cost_file("NVIDIA H200").rates, "an H100 was measured"
    other = replace(H200, name="NVIDIA Other")
    for problem in (Matmul(640, 480, 320, "float16"), Matmul(2048, 2048, 2048, "float16")):
        assert choose(problem, other, 2) == choose(problem, H200, 2), "of batches nothing was measured: constants alone"


@pytest.mark.parametrize(
    "change",
    [
        {"rates": {}},
        {"shapes": [{"m": 8, "n": 8, "k": 8, "layout": "nn", "times": [[10**6, 1.0]]}]},
        {"shapes": [{"m": 8, "n": 8, "k": 8, "layout": "tn", "times": [[0, 1.0]]}]},
        {"shapes": [{"m": 8, "n": 8, "k": 8, "layout": "nn", "times": [[0, -1.0]]}]},
        {"shapes": [{"m": 8, "n": 8, "k": 8, "layout": "nn", "times": []}]},
        {"kernels": ["exchanged 16x64x64"], "shapes": []},
        {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_file_of_costs_is_named(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads((estimates.FOLDER / "nvidia-h200.json").read_text())
    path = tmp_path / "nvidia-h200.json"
    path.write_text(json.dumps(whole | change))
    monkeypatch.setattr(estimates, "FOLDER", tmp_path)
    with pytest.raises(DamagedFile, match=r"nvidia-h200\.json is damaged"):
        cost_file("NVIDIA H200")
    path.unlink()
    with pytest.raises(DamagedFile, match="has no file of the NVIDIA H200"):
        cost_file("NVIDIA H200")


def test_the_file_names_kernels_of_the_menu() -> None:
    """Times of a kernel that the menu has no more would be kept in vain."""
    known = {*map(str, ALL), str(Streamed())}
    assert all(name in known or all_tiles().place(name) is not None for name in FILE.kernels)
    assert isinstance(FILE, CostFile)
