"""Grow the trees that say what formulas leave of measured times (:mod:`schedules.trees`), by scikit-learn.

What counts is the order of kernels on each shape: what all of a shape's times have in common is taken off before, and a
kernel counts the less, the slower it is beside the shape's fastest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensorir_ladder.harness.schedule_menus import ScheduleMenus, as_planned
from tensorir_ladder.schedules import left_over
from tensorir_ladder.schedules.cost import Machine, planned_cycles
from tensorir_ladder.schedules.trees import LEAF, Trees, TreesFile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.estimates import Estimates

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingRegressor

SLOWEST = 3.0  # times a shape's fastest, beyond which slower ones count alike
DIGITS = 4  # behind the point, of what leaves say
FOLDS, FEW = 5, 4  # of shapes, and kernels of one that is judged
FILES = {"float32": left_over.WARPS, "float16": left_over.WARPGROUPS}
# Found by what is chosen of shapes left out in turn; more trees, or larger ones, gain little.
GROWN: dict[str, Any] = {
    "max_iter": 300,
    "learning_rate": 0.08,
    "max_leaf_nodes": 31,
    "min_samples_leaf": 15,
    "l2_regularization": 10,
    "max_features": 0.3,
    "early_stopping": False,
    "random_state": 0,
}


class Times:
    """Collect times to grow trees over: what trees may ask, what is left of each one's logarithm, and of what shape."""

    def __init__(self) -> None:
        self.features: dict[str, list[Any]] = defaultdict(list)
        self.left: list[float] = []
        self.us: list[float] = []
        self.of: list[int] = []

    def add(self, shape: int, features: Mapping[str, Any], left: float, us: float) -> None:
        """Add a kernel's time: of the shape of this number, in any unit that its other times have, too."""
        for name, value in features.items():
            self.features[name].append(value)
        self.of.append(shape)
        self.left.append(left)
        self.us.append(us)

    def some(self, places: np.ndarray) -> Times:
        """Return some of the times, in their order."""
        made = Times()
        for place in places.tolist():
            features = {name: values[place] for name, values in self.features.items()}
            made.add(self.of[place], features, self.left[place], self.us[place])
        return made


def grow(times: Times) -> Trees:
    """Grow trees over what is left of the logarithms of times."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    left, us, of = np.array(times.left), np.array(times.us), np.array(times.of)
    least = np.full(of.max() + 1, np.inf)
    np.minimum.at(least, of, us)
    counts = 1 / np.minimum(us / least[of], SLOWEST) ** 2
    shared = np.bincount(of, counts * left) / np.maximum(np.bincount(of, counts), np.finfo(float).tiny)
    rows = np.array(list(times.features.values()), float).T
    grown = HistGradientBoostingRegressor(**GROWN).fit(rows, left - shared[of], sample_weight=counts)
    return as_trees(grown, tuple(times.features))


def shares_by_trees(times: Times) -> tuple[list[float], list[float]]:
    """Return how fast what would be chosen of each shape's kernels was beside the fastest of them.

    Without trees, and by trees grown over the shapes of other FOLDS; of shapes with a few kernels.
    """
    of, us = np.array(times.of), np.array(times.us)
    without = np.log(us) - np.array(times.left)
    fold, by_trees = np.random.default_rng(0).integers(0, FOLDS, of.max() + 1)[of], without.copy()
    for number in range(FOLDS):
        out = np.flatnonzero(fold == number)
        if len(out) and len(out) < len(of):
            trees = grow(times.some(np.flatnonzero(fold != number)))
            by_trees[out] += trees.told(trees.named(times.some(out).features))
    some = [places for shape in np.unique(of) if len(places := np.flatnonzero(of == shape)) >= FEW]
    before, after = (
        [float(us[places].min() / us[places[likely[places].argmin()]]) for places in some]
        for likely in (without, by_trees)
    )
    return before, after


def as_trees(grown: HistGradientBoostingRegressor, features: Sequence[str]) -> Trees:
    """Write out what scikit-learn has grown, but for a number that it adds to all, which says nothing of an order."""
    asks: list[int] = []
    at: list[float] = []
    skips: list[int] = []
    roots: list[int] = []

    def walk(nodes: Any, place: int) -> None:
        node, mine = nodes[place], len(asks)
        leaf = bool(node["is_leaf"])
        asks.append(LEAF if leaf else int(node["feature_idx"]))
        at.append(round(float(node["value"]), DIGITS) if leaf else float(f"{node['num_threshold']:.6g}"))
        skips.append(0)
        if not leaf:
            walk(nodes, int(node["left"]))
            skips[mine] = len(asks) - mine
            walk(nodes, int(node["right"]))

    for [tree] in grown._predictors:
        roots.append(len(asks))
        walk(tree.nodes, 0)
    return Trees(tuple(features), tuple(asks), tuple(at), tuple(skips), tuple(roots))


def call_times(estimates: Estimates, watched: Callable[[Iterable[int]], Iterable[int]] = iter) -> Times:
    """Collect what is left of the times in a GPU's file, each shape's as if it had not been measured.

    ``watched`` goes through the shapes and may show how far it is.
    """
    times = Times()
    for number in watched(np.unique(estimates.measured.of).tolist()):
        features, left, slower = estimates.left_out(number)
        rows = {name: np.broadcast_to(values, left.shape) for name, values in features.items()}
        for place in range(len(left)):
            each = {name: float(values[place]) for name, values in rows.items()}
            times.add(number, each, float(left[place]), float(slower[place]))
    return times


def schedule_times(menus: ScheduleMenus, dtype: str, machine: Machine) -> Times:
    """Collect what is left of the times of schedules of a dtype."""
    times = Times()
    for number, (*sizes, _, kernels) in enumerate(getattr(menus, dtype)):
        problem = Matmul(*sizes, dtype)
        for *kernel, us in kernels:
            choice, planned = as_planned(kernel, dtype)
            cycles = planned_cycles(choice, problem, machine, planned)
            values = left_over.features(choice, problem, machine, planned, cycles)
            times.add(number, values, math.log(us / cycles), us)
    return times


def trees_text(trees: Trees, origin: str) -> str:
    """Write trees as a file has them, a line for each list."""
    lists = msgspec.to_builtins(trees)
    lines = ",\n".join(f'  "{name}": {msgspec.json.encode(values).decode()}' for name, values in lists.items())
    head = msgspec.json.encode(TreesFile(origin, trees).origin).decode()
    return f'{{\n "origin": {head},\n "trees": {{\n{lines}\n }}\n}}\n'
