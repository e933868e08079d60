"""Trees that are grown over times: as scikit-learn says, and of use to choices that were not timed."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tensorir_ladder.harness.grown_trees import (
    GROWN,
    Times,
    as_trees,
    call_times,
    grow,
    read_menus,
    schedule_times,
    shares_by_trees,
    trees_text,
)
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.harness.records import RESULTS
from tensorir_ladder.schedules.trees import read_trees
from tensorir_ladder.torch_ops.choice import choices
from tensorir_ladder.torch_ops.estimates import Estimates, cost_file

sklearn_ensemble = pytest.importorskip("sklearn.ensemble", reason="scikit-learn grows trees: pip install -e '.[menu]'")


def some_times(shapes: int = 200, kernels: int = 6) -> Times:
    """Times whose left-over is 0.1 for a kernel's number above 3 where m is odd, and something all a shape's share."""
    draw, times = np.random.default_rng(1), Times()
    for shape in range(shapes):
        m, shared = int(draw.integers(1, 1000)), float(draw.normal())
        for kernel in range(kernels):
            left = shared + 0.1 * (m % 2 and kernel > 3)
            times.add(shape, {"odd": m % 2, "m": m, "kernel": kernel}, left, float(np.exp(left - shared)))
    return times


def test_trees_say_what_scikit_learn_says_of_them() -> None:
    draw = np.random.default_rng(0)
    rows, values = draw.normal(size=(3000, 4)), draw.normal(size=3000)
    values += np.where(rows[:, 1] > 0.3, rows[:, 2], -1)
    grown = sklearn_ensemble.HistGradientBoostingRegressor(**{**GROWN, "max_iter": 40}).fit(rows, values)
    unseen = draw.normal(size=(500, 4))
    told = as_trees(grown, "abcd").told(unseen)
    np.testing.assert_allclose(told - told.mean(), (said := grown.predict(unseen)) - said.mean(), atol=0.01)


def test_what_a_shape_s_times_share_is_not_learned_and_the_rest_is(tmp_path: Path) -> None:
    trees = grow(some_times())

    def told(odd: int, m: int, kernel: int) -> float:
        return float(trees.told(trees.named({"odd": odd, "m": m, "kernel": kernel}))[0])

    slow, fast, even = told(1, 501, 5), told(1, 501, 1), told(0, 500, 5)
    assert slow - fast == pytest.approx(0.1, abs=0.03)
    assert abs(even) < 0.05
    (path := tmp_path / "grown.json").write_text(trees_text(trees, "here"))
    assert read_trees(path) == trees


def test_shares_are_of_shapes_that_trees_have_not_seen() -> None:
    before, after = shares_by_trees(some_times())
    assert len(before) == len(after) == 200
    assert statistics.fmean(after) > 0.999
    noise, draw = Times(), np.random.default_rng(2)
    for shape in range(300):  # nothing to learn: trees must not seem to help
        for kernel in range(5):
            us = float(np.exp(0.1 * draw.normal()))
            noise.add(shape, {"draw": draw.normal(), "kernel": kernel}, float(np.log(us)), us)
    before, after = shares_by_trees(noise)
    assert statistics.fmean(after) < statistics.fmean(before) + 0.02


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_schedules_are_chosen_better_by_trees_that_have_not_seen_their_shapes(dtype: str) -> None:
    times = schedule_times(
        read_menus(RESULTS / "schedule-menus.json.xz"), dtype, machine_for(DEFAULT_ARCH).for_choices()
    )
    before, after = map(statistics.geometric_mean, shares_by_trees(times))
    assert after > before + 0.004
    assert after > 0.98


def test_times_of_a_shape_are_left_as_if_it_had_not_been_measured() -> None:
    """Wrong times of one product change what is left of its own times, by as much, and nothing that is expected."""
    file = cost_file("NVIDIA H200")
    some = file.shapes[:: len(file.shapes) // 60]
    number = next(place for place, shape in enumerate(some) if len(shape.times) > 3)
    wrong = msgspec.structs.replace(some[number], times=tuple((place, 1.5 * us) for place, us in some[number].times))
    shapes = (*some[:number], wrong, *some[number + 1 :])
    left = []
    for each in (some, shapes):
        estimates = Estimates(list(choices()), msgspec.structs.replace(file, shapes=tuple(each)), 132)
        times = call_times(estimates)
        left.append(np.array(times.left)[np.array(times.of) == number])
    np.testing.assert_allclose(left[1], left[0] + np.log(1.5), atol=1e-9)
