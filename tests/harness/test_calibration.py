"""What is fitted to times: trees as scikit-learn says, constants, a menu; all judged on shapes that were left out."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import msgspec
import numpy as np
import pytest

from support.cases import hopper
from tensorir_ladder.harness.calibration import (
    FEW,
    GROWN,
    CallTimes,
    Times,
    _as_trees,
    call_shares_left_out,
    cover,
    fit_constants,
    grow,
    make_menu,
    menu_bytes,
    schedule_times,
    shares_left_out,
    with_fastest,
)
from tensorir_ladder.harness.call_menus import (
    CallMenus,
    TimedShape,
    call_menus_bytes,
    call_menus_path,
    candidates,
    draw_products,
    read_call_menus,
    with_times,
)
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.harness.records import RESULTS
from tensorir_ladder.harness.schedule_menus import read_menus
from tensorir_ladder.schedules.errors import DamagedFile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.few_rows import Streamed, streams
from tensorir_ladder.torch_ops.menu import Constants, Kernels, Menu, MenuFile, Sizes, microseconds, read_menu
from tensorir_ladder.torch_ops.step_kernels import FLEXIBLE, parse_kernel

sklearn_ensemble = pytest.importorskip("sklearn.ensemble", reason="scikit-learn grows trees: pip install -e '.[menu]'")
H200 = hopper(name="NVIDIA H200")


def times_of(rows: list[tuple[int, dict[str, float], float, float]]) -> Times:
    """Times of shapes: features, what is left of the logarithm, and the time without what the shape shares."""
    of, features, left, us = zip(*rows)
    numbers, values = np.array(of), np.array(us)
    named = {name: np.array([each[name] for each in features]) for name in features[0]}
    return Times(numbers, numbers, values, values / np.exp(np.array(left)), named)


def some_times(shapes: int = 200, kernels: int = 6) -> Times:
    """Times longer by exp(0.1) for a kernel's number above 3 where m is odd, and by something all a shape's share."""
    draw, rows = np.random.default_rng(1), []
    for shape in range(shapes):
        m, shared = int(draw.integers(1, 1000)), float(draw.normal())
        for kernel in range(kernels):
            left = 0.1 * (m % 2 and kernel > 3)
            rows.append((shape, {"odd": m % 2, "m": m, "kernel": kernel}, shared + left, float(np.exp(left))))
    return times_of(rows)


def test_trees_say_what_scikit_learn_says_of_them() -> None:
    draw = np.random.default_rng(0)
    rows, values = draw.normal(size=(3000, 4)), draw.normal(size=3000)
    values += np.where(rows[:, 1] > 0.3, rows[:, 2], -1)
    grown = sklearn_ensemble.HistGradientBoostingRegressor(**{**GROWN, "max_iter": 40}).fit(rows, values)
    unseen = draw.normal(size=(500, 4))
    told = _as_trees(grown, tuple("abcd")).predict(dict(zip("abcd", unseen.T)))
    np.testing.assert_allclose(told - told.mean(), (said := grown.predict(unseen)) - said.mean(), atol=0.01)


def test_what_a_shape_s_times_share_is_not_learned_and_the_rest_is() -> None:
    trees = grow(some_times())

    def told(odd: int, m: int, kernel: int) -> float:
        return float(trees.predict({"odd": odd, "m": m, "kernel": kernel})[0])

    slow, fast, even = told(1, 501, 5), told(1, 501, 1), told(0, 500, 5)
    assert slow - fast == pytest.approx(0.1, abs=0.03)
    assert abs(even) < 0.05


def test_shares_are_of_shapes_that_trees_have_not_seen() -> None:
    before, after = shares_left_out(some_times())
    assert len(before) == len(after) == 200
    assert statistics.fmean(after) > 0.999
    draw, rows = np.random.default_rng(2), []
    for shape in range(300):  # nothing to learn: trees must not seem to help
        for kernel in range(5):
            us = float(np.exp(0.1 * draw.normal()))
            rows.append((shape, {"draw": draw.normal(), "kernel": kernel}, float(np.log(us)), us))
    before, after = shares_left_out(times_of(rows))
    assert statistics.fmean(after) < statistics.fmean(before) + 0.02


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_schedules_are_chosen_better_by_trees_that_have_not_seen_their_shapes(dtype: str) -> None:
    times = schedule_times(
        read_menus(RESULTS / "h200-schedule-menus.json.xz"), dtype, machine_for(DEFAULT_ARCH).for_choices()
    )
    before, after = map(statistics.geometric_mean, shares_left_out(times))
    assert after > before + 0.004
    assert after > 0.98


@functools.cache
def recorded(every: int) -> CallMenus:
    """Each so many of the H200's shapes that were timed with several kernels."""
    menus = read_call_menus(call_menus_path(RESULTS, "NVIDIA H200"))
    several = [shape for shape in menus.shapes if len(shape.times) >= FEW]
    return msgspec.structs.replace(menus, shapes=tuple(several[::every]))


def test_of_shapes_left_out_of_everything_the_choice_is_nearly_the_fastest() -> None:
    """By a quarter of the shapes; by all of them it is 0.973 (`ladder calibrate --fit` prints it)."""
    formula, corrected = map(statistics.geometric_mean, call_shares_left_out(CallTimes(recorded(4))))
    assert corrected > formula > 0.94
    assert corrected > 0.96


def test_constants_of_another_gpu_are_found() -> None:
    """Launches that wait cost thrice as much there, sums of cut waves are read half as fast, memory is slower."""
    usual, call = read_menu("NVIDIA H200").constants, CallTimes(recorded(10))
    changes = {"waits": 3 * usual.waits, "sums": usual.sums / 2, "memory_bytes": usual.memory_bytes / 1.5}
    other = msgspec.structs.replace(usual, **changes)
    call.us = call.formula(other) * np.exp(0.01 * np.random.default_rng(1).standard_normal(len(call.us)))
    fitted = fit_constants(call, np.arange(len(call.us)))
    for name, value in changes.items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.5), name
    guessed = call.formula(fitted) / call.us
    assert np.std(np.log(guessed)) < 0.05


def test_a_menu_covers_the_fastest_kernels_first_and_always_what_flexible_calls_take() -> None:
    call = CallTimes(recorded(10))
    small, large = (cover(call, np.arange(len(call.of)), count) for count in (50, 200))
    assert large[:50] == small
    names = {str(call.kernels[place]) for place in small}
    assert {*FLEXIBLE, str(Streamed())} <= names

    def held(taken: list[int]) -> float:
        own = np.isin(call.kernel, taken)
        least, all_least = (np.full(int(call.of.max()) + 1, np.inf) for _ in range(2))
        np.minimum.at(least, call.of[own], call.us[own])
        np.minimum.at(all_least, call.of, call.us)
        return statistics.fmean(np.maximum(all_least / least, 0.85)[np.isfinite(all_least)])

    assert held(large) > held(small) > 0.9


def test_a_menu_s_file_is_read_as_it_was_made() -> None:
    menus = recorded(20)
    made = make_menu(CallTimes(menus))
    read = msgspec.json.decode(menu_bytes(made), type=MenuFile)
    assert msgspec.structs.replace(read, trees=made.trees) == made
    assert (read.trees.asks, read.trees.at) == (made.trees.asks, made.trees.at)
    assert menu_bytes(made).count(b"\n") > len(made.fastest)
    assert len(made.fastest) > 0.9 * len(menus.shapes)
    times = {(each.m, each.n, each.k, each.layout): dict(each.times) for each in menus.shapes}
    for each in made.fastest:
        own = {menus.kernels[place]: us for place, us in times[each.m, each.n, each.k, each.layout].items()}
        assert own[made.kernels[each.kernel]] == each.us
    assert Menu(made, H200.target, 132).times(Matmul(512, 512, 512, "float16")).min() > 0


def test_a_product_s_fastest_kernel_stands_in_its_gpu_s_menu() -> None:
    file, problem = read_menu("NVIDIA H200"), Matmul(520, 520, 520, "float16")
    menus = with_times(CallMenus("NVIDIA H200", 132, ""), problem, {FLEXIBLE[1]: 3.0, "exchanged 8x64x64/1x1/1": 2.0})
    own = with_fastest(file, menus, menus.shapes[0])
    assert (own.fastest[:-1], own.constants) == (file.fastest, file.constants)
    kernel = own.kernels[own.fastest[-1].kernel]
    assert (kernel, own.fastest[-1].us) == ("exchanged 8x64x64/1x1/1", 2.0)
    elsewhere = msgspec.structs.replace(menus, gpu="NVIDIA Other", multiprocessors=114)
    other = with_fastest(file, elsewhere, menus.shapes[0])
    assert (other.gpu, other.multiprocessors, len(other.fastest)) == ("NVIDIA Other", 114, 1)


def test_a_product_s_candidates_are_the_likeliest_of_all_families() -> None:
    menu, kinds = Menu(read_menu("NVIDIA H200"), H200.target, 132), set()
    for problem in draw_products(3, 4):
        taken = candidates(problem, menu, H200)
        names = [each.name for each in taken]
        assert len({*names}) == len(names) > 4
        assert (str(Streamed()) in names) == streams(problem)
        for each in taken[:: len(taken) - 1]:
            choice, product, setting = each.made_for
            assert (product, setting.machine.name) == (problem, "NVIDIA H200")
            assert isinstance(choice, Streamed) or choice.stages > 0
        kinds |= {name.split(",")[0].split(" ")[0] for name in names}
    assert {"step", "exchanged", "upright"} <= kinds


def test_products_are_drawn_by_their_seed() -> None:
    assert draw_products(3, 4) == draw_products(3, 4)
    assert len({*draw_products(3, 40)} & {*draw_products(4, 40)}) < 20
    assert all(problem.n % 8 == problem.k % 8 == 0 for problem in draw_products(5, 30))


def test_times_stand_next_to_those_of_other_products() -> None:
    one, two = Matmul(64, 64, 64, "float16"), Matmul(64, 128, 64, "float16", "nt")
    first = with_times(with_times(CallMenus("a GPU", 132, ""), one, {"x": 2.0}), two, {"y": 3.0})
    again = with_times(first, one, {"z": 2.34567})
    assert [(shape.m, shape.n, shape.times) for shape in again.shapes] == [
        (64, 64, ((2, 2.346),)),
        (64, 128, ((1, 3.0),)),
    ]
    assert again.kernels == ("x", "y", "z")


def test_a_file_of_another_gpu_or_none_is_damaged(tmp_path: Any) -> None:
    menus = CallMenus("NVIDIA H200", 132, "", ("x",), (TimedShape(8, 8, 8, "nn", ((0, 1.0),)),))
    (path := call_menus_path(tmp_path, "NVIDIA H200")).write_bytes(call_menus_bytes(menus))
    assert read_call_menus(path) == menus
    (path := call_menus_path(tmp_path, "NVIDIA H100")).write_bytes(call_menus_bytes(menus))
    with pytest.raises(DamagedFile, match=r"times of the NVIDIA H200, whose name"):
        read_call_menus(path)
    path.write_bytes(b"not xz")
    with pytest.raises(DamagedFile, match="is damaged"):
        read_call_menus(path)


def test_times_of_kernels_that_are_gone_are_left_out() -> None:
    shapes = (TimedShape(64, 64, 640, "nn", ((0, 1.0), (1, 2.0), (2, 3.0))),)
    menus = CallMenus("NVIDIA H200", 132, "", ("a kernel of before", FLEXIBLE[0], "exchanged 8x64x64/1x1/1"), shapes)
    call = CallTimes(menus)
    assert (call.kernel.tolist(), call.us.tolist()) == ([1, 2], [2.0, 3.0])
    sizes = Sizes.of(shapes[0].problem)
    kernels = Kernels.of([parse_kernel(menus.kernels[1])], 132, nt=False)
    assert math.isclose(call.formula(Constants())[0], microseconds(kernels, sizes, Constants(), 132)[0])
