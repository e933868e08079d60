"""Trees that are grown over times: as scikit-learn says, and of use to choices that were not timed."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.fake_gpu import Command
from tensorir_ladder.harness.commands import menu as menu_command
from tensorir_ladder.harness.grown_trees import (
    GROWN,
    Times,
    as_trees,
    call_times,
    grow,
    schedule_times,
    shares_by_trees,
    trees_text,
)
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.harness.records import RESULTS
from tensorir_ladder.harness.schedule_menus import menus_bytes, menus_path, read_menus
from tensorir_ladder.schedules.trees import read_trees
from tensorir_ladder.schedules.workloads import Matmul
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
        read_menus(RESULTS / "h200-schedule-menus.json.xz"), dtype, machine_for(DEFAULT_ARCH).for_choices()
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


def test_trees_are_grown_beside_a_gpu_s_file_and_the_choice_takes_them(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cost_file("NVIDIA H200")
    few = [shape for shape in file.shapes if len(shape.times) > 3][::40]
    small = msgspec.structs.replace(file, shapes=tuple(few))
    monkeypatch.setattr(menu_command, "all_cost_files", lambda: [small])
    monkeypatch.setattr(menu_command, "other_cost_files", lambda _: [])
    monkeypatch.setattr(menu_command, "FEWEST_GROWN", 40)
    menus = read_menus(RESULTS / "h200-schedule-menus.json.xz")
    menus = msgspec.structs.replace(menus, float16=menus.float16[::8], float32=menus.float32[::8])
    menus_path(tmp_path, menus.gpu).write_bytes(menus_bytes(menus))
    outcome = command("menu", "--grow", str(tmp_path), "--out", str(tmp_path))
    assert outcome.code == 0, outcome
    assert outcome.out.count("by trees grown over the others") == 3
    grown = {path.name for path in (tmp_path / "grown").iterdir()}
    assert grown == {"nvidia-h200.json", "nvidia-h200-warps.json", "nvidia-h200-warpgroups.json"}
    trees = read_trees(tmp_path / "grown" / "nvidia-h200.json")
    problem = Matmul(1000, 1000, 1000, "float16")
    with_trees, without = (Estimates(list(choices()), small, 132, (), each).times(problem) for each in (trees, None))
    changed = with_trees.tiles != without.tiles
    assert (
        np.count_nonzero(changed & np.isfinite(without.tiles)) + np.count_nonzero(with_trees.menu != without.menu) > 0
    )


def test_growing_is_refused_where_there_is_nothing_to_grow_over(command: Command, tmp_path: Path) -> None:
    for more in (("--dry-run",), ("--drawn", "50")):
        refused = command("menu", "--grow", "--out", str(tmp_path), *more)
        assert (refused.code, more[0] in refused.err) == (2, True)
    nothing = command("menu", "--grow", str(tmp_path), "--out", str(tmp_path))
    assert (nothing.code, "schedule-menus.json.xz" in nothing.err) == (2, True)
    (tmp_path / "h200-schedule-menus.json.xz").write_bytes(b"not xz")
    damaged = command("menu", "--grow", str(tmp_path), "--out", str(tmp_path))
    assert (damaged.code, "is damaged" in damaged.err) == (2, True)
    assert not (tmp_path / "grown").exists()
