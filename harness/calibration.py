"""Calibrate choices to measured times: fit the formula's constants, pick a menu, grow the trees that correct both.

What counts is the order of kernels on each shape: an error that all of a shape's times share is mostly forgiven, and a
kernel counts the less, the slower it is compared with the shape's fastest. Every part is judged on shapes that were
left out of it. scipy fits the constants and scikit-learn grows the trees; choosing needs numpy alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from tensorir_ladder.harness.call_menus import CallMenus, TimedShape
from tensorir_ladder.harness.schedule_menus import ScheduleMenus, as_planned
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.cycles import ProductSizes, ScheduleArrays, cycles
from tensorir_ladder.schedules.cycles import features as schedule_features
from tensorir_ladder.schedules.trees import LEAF, Trees
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.menu import (
    Constants,
    Fastest,
    Kernels,
    MenuFile,
    Sizes,
    by_the_eight,
    features,
    microseconds,
)
from tensorir_ladder.torch_ops.problem import KernelChoice
from tensorir_ladder.torch_ops.step_kernels import FLEXIBLE, parse_kernel

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingRegressor

MENU = 600  # kernels of the call
FOLDS, FEW = 4, 4  # of shapes; kernels timed on a shape that is judged, or whose fastest is known
SLOWEST = 3.0  # times a shape's fastest, beyond which slower ones count alike
UNCOVERED = 0.85  # of the fastest: what a shape counts as that no kernel of the menu was timed on
COMMON, FEW_COMMON = 0.1, 2.0  # weight of an error common to a shape's times; more where these are few
PULL = 0.3  # of a constant towards its default, in units of a time's error
DIGITS = 4  # of constants, and behind the point of what leaves say
HEAD = "gpu", "multiprocessors", "origin", "constants", "menu", "kernels", "trees"  # of a menu's file
GROWN: dict[str, Any] = {
    "max_iter": 100,
    "learning_rate": 0.15,
    "max_leaf_nodes": 63,
    "min_samples_leaf": 15,
    "l2_regularization": 10,
    "max_features": 0.3,
    "early_stopping": False,
    "random_state": 0,
}


class Times(NamedTuple):
    """Measured times, an element each: of which shape, the time, the formula's, and what trees may ask, by name.

    ``group`` numbers shapes that are left out together.
    """

    of: np.ndarray
    group: np.ndarray
    us: np.ndarray
    formula: np.ndarray
    features: dict[str, np.ndarray]

    def at(self, places: np.ndarray) -> Times:
        """Return some of the times, in their order."""
        some = {name: values[places] for name, values in self.features.items()}
        return Times(self.of[places], self.group[places], self.us[places], self.formula[places], some)


def grow(times: Times) -> Trees:
    """Grow trees over what the formula leaves of the logarithms of times."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    counts = 1 / np.minimum(_slower(times.of, times.us), SLOWEST) ** 2
    left = np.log(times.us / times.formula)
    shared = np.bincount(times.of, counts * left) / np.maximum(np.bincount(times.of, counts), np.finfo(float).tiny)
    rows = np.stack(list(times.features.values()), axis=1)
    grown = HistGradientBoostingRegressor(**GROWN).fit(rows, left - shared[times.of], sample_weight=counts)
    return _as_trees(grown, tuple(times.features))


def folds(group: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the places of times that stay and of those that are left out, FOLDS times; groups are never parted."""
    fold = np.random.default_rng(0).integers(0, FOLDS, int(group.max(initial=0)) + 1)[group]
    for number in range(FOLDS):
        yield np.flatnonzero(fold != number), np.flatnonzero(fold == number)


def shares(of: np.ndarray, us: np.ndarray, estimated: np.ndarray, fastest: np.ndarray) -> list[float]:
    """Return, shape by shape, how fast the kernel with the least estimate is compared with the shape's ``fastest``."""
    order = np.lexsort((estimated, of))
    first = order[np.flatnonzero(np.diff(of[order], prepend=-1))]
    return (fastest[of[first]] / us[first]).tolist()


def shares_left_out(times: Times) -> tuple[list[float], list[float]]:
    """Return the shares of what would be chosen by the formula alone, and with trees grown over other shapes."""
    fastest = _least(times.of, times.us)
    corrected = np.log(times.formula)
    for stay, out in folds(times.group):
        if len(stay) and len(out):
            corrected[out] += grow(times.at(stay)).predict(times.at(out).features)
    judged = np.flatnonzero(np.bincount(times.of)[times.of] >= FEW)
    before, after = (
        shares(times.of[judged], times.us[judged], each[judged], fastest) for each in (np.log(times.formula), corrected)
    )
    return before, after


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(fmean(map(math.log, values)))


class CallTimes:
    """Times of a GPU's call kernels as arrays; those of kernels that the call no longer has are left out."""

    def __init__(self, menus: CallMenus) -> None:
        self.menus = menus
        self.kernels: dict[int, KernelChoice | Streamed] = {}
        for place, name in enumerate(menus.kernels):
            try:
                self.kernels[place] = parse_kernel(name)
            except ValueError:  # a kernel that was retired; IllegalTile is a ValueError
                continue
        rows = [
            (number, place, us)
            for number, shape in enumerate(menus.shapes)
            for place, us in shape.times
            if place in self.kernels
        ]
        of, kernel, us = (np.array(each) for each in zip(*rows))
        self.of, self.kernel, self.us = of, kernel, us
        sizes = [Sizes.of(shape.problem) for shape in menus.shapes]
        self.sizes = Sizes(*(np.array(each)[of] for each in zip(*sizes)))
        alike = np.stack([by_the_eight(self.sizes.m), *self.sizes[1:4]], axis=1)
        self.group = np.unique(alike, axis=0, return_inverse=True)[1].ravel()
        places = {place: number for number, place in enumerate(self.kernels)}
        described = [Kernels.of(list(self.kernels.values()), menus.multiprocessors, nt) for nt in (False, True)]
        at = np.array([places[each] for each in kernel.tolist()])
        nn, nt = (each.at(at) for each in described)
        self.described = Kernels(*(np.where(self.sizes.nt, second, first) for first, second in zip(nn, nt)))
        finite = np.isfinite(self.formula(Constants()))
        if not finite.all():  # other versions took them
            for name in ("of", "kernel", "us", "group"):
                setattr(self, name, getattr(self, name)[finite])
            self.sizes = Sizes(*(each[finite] for each in self.sizes))
            self.described = self.described.at(np.flatnonzero(finite))

    def formula(self, constants: Constants, places: Any = slice(None)) -> np.ndarray:
        """Return the formula's microseconds of all times, or of some."""
        sizes = Sizes(*(each[places] for each in self.sizes))
        return microseconds(self.described.at(places), sizes, constants, self.menus.multiprocessors)

    def times(self, constants: Constants) -> Times:
        """Return the times next to the formula's."""
        us = self.formula(constants)
        asked = features(self.described, self.sizes, us)
        rows = {name: np.broadcast_to(values, us.shape).astype(float) for name, values in asked.items()}
        return Times(self.of, self.group, self.us, us, rows)


def fit_constants(call: CallTimes, places: np.ndarray) -> Constants:
    """Fit the formula's constants to some of the times, of shapes with several."""
    from scipy.optimize import least_squares

    places = places[np.bincount(call.of)[call.of[places]] > 1]
    names = Constants.__struct_fields__
    first = np.log([getattr(Constants(), name) for name in names])
    of, us = call.of[places], call.us[places]
    counts = 1 / _slower(of, us) ** 2
    in_all = np.bincount(of, counts) + FEW_COMMON

    def constants(x: np.ndarray) -> Constants:
        return Constants(**dict(zip(names, np.exp(x).tolist())))

    def errors(x: np.ndarray) -> np.ndarray:
        off = np.log(call.formula(constants(x), places) / us)
        common = np.bincount(of, counts * off) / in_all
        return np.append(np.sqrt(counts) * (off - (1 - COMMON) * common[of]), PULL * (x - first))

    found = constants(least_squares(errors, first, max_nfev=30).x)
    return Constants(**{name: _rounded(getattr(found, name)) for name in names})


def cover(call: CallTimes, places: np.ndarray, count: int = MENU) -> list[int]:
    """Return the ``count`` kernels, by their places in the file, that together hold the most of all shapes' fastest.

    Greedy: each next kernel is the one that adds the most. Kernels for any number of rows are always among them, and
    so is the one that streams weights.
    """
    least = _least(call.of, call.us)
    gain = np.log(np.maximum(least[call.of] / call.us, UNCOVERED))
    held = np.full(len(least), math.log(UNCOVERED))
    places = places[np.bincount(call.of)[call.of[places]] >= FEW]
    by_kernel = {kernel: places[call.kernel[places] == kernel] for kernel in np.unique(call.kernel[places]).tolist()}
    taken = [place for place, each in call.kernels.items() if isinstance(each, Streamed) or str(each) in FLEXIBLE]

    def adds(kernel: int) -> float:
        times = by_kernel[kernel]
        return float(np.maximum(gain[times] - held[call.of[times]], 0).sum())

    def take(kernel: int) -> None:
        times = by_kernel.get(kernel, np.zeros(0, int))
        np.maximum.at(held, call.of[times], gain[times])

    for kernel in taken:
        take(kernel)
    waiting = [(-adds(kernel), kernel) for kernel in by_kernel if kernel not in taken]
    heapq.heapify(waiting)
    while waiting and len(taken) < count:
        _, kernel = heapq.heappop(waiting)
        added = adds(kernel)
        if waiting and added < -waiting[0][0]:  # others have taken its shapes since
            heapq.heappush(waiting, (-added, kernel))
        elif added > 0:
            taken.append(kernel)
            take(kernel)
    return taken


def call_shares_left_out(call: CallTimes) -> tuple[list[float], list[float]]:
    """Return the shares of what would be chosen from the menu by the formula alone, and with trees.

    Constants, menu and trees are of other shapes each time; the fastest is that of all kernels that were timed.
    """
    fastest = _least(call.of, call.us)
    found: tuple[list[float], list[float]] = [], []
    many = np.bincount(call.of)[call.of] >= FEW
    for stay, out in folds(call.group):
        times = call.times(fit_constants(call, stay))
        trees = grow(times.at(stay[np.bincount(call.of)[call.of[stay]] > 1]))
        out = out[many[out] & np.isin(call.kernel[out], cover(call, stay))]
        formula = np.log(times.formula[out])
        for shares_found, estimated in zip(found, (formula, formula + trees.predict(times.at(out).features))):
            shares_found += shares(call.of[out], call.us[out], estimated, fastest)
    return found


def make_menu(call: CallTimes) -> MenuFile:
    """Make a GPU's menu from all of its times."""
    everything = np.arange(len(call.of))
    constants = fit_constants(call, everything)
    times = call.times(constants)
    trees = grow(times.at(np.flatnonzero(np.bincount(call.of)[call.of] > 1)))
    chosen_among = cover(call, everything)
    order = np.lexsort((call.us, call.of))
    first = order[np.flatnonzero(np.diff(call.of[order], prepend=-1))]
    first = first[np.bincount(call.of)[call.of[first]] >= FEW]
    listed = list(dict.fromkeys([*chosen_among, *call.kernel[first].tolist()]))
    places = {kernel: place for place, kernel in enumerate(listed)}
    fastest = []
    for time in first.tolist():
        shape = call.menus.shapes[call.of[time]]
        kernel = places[int(call.kernel[time])]
        fastest.append(Fastest(shape.m, shape.n, shape.k, shape.layout, kernel, float(call.us[time])))
    menus = call.menus
    names = tuple(menus.kernels[each] for each in listed)
    head = menus.gpu, menus.multiprocessors, menus.origin, constants, names
    return MenuFile(*head, len(chosen_among), tuple(fastest), trees)


def schedule_times(menus: ScheduleMenus, dtype: str, machine: Machine) -> Times:
    """Return the times of schedules of a dtype next to the formulas'."""
    of, us, formula, asked = [], [], [], []
    for number, (*shape, _, kernels) in enumerate(getattr(menus, dtype)):
        problem = Matmul(*shape, dtype)
        sizes = ProductSizes.of(problem)
        rows = [(*as_planned(row, dtype), time) for *row, time in kernels]
        for by_boxes in (False, True):  # each have a formula
            some = [row for row in rows if row[1].boxes == by_boxes]
            if not some:
                continue
            choices, planned, times = zip(*some)
            arrays = ScheduleArrays.of(choices, machine, problem.itemsize).as_planned(planned)
            formula.append(cycles(arrays, sizes, machine))
            values = schedule_features(arrays, sizes, machine, formula[-1])
            asked.append({name: np.broadcast_to(value, len(some)).astype(float) for name, value in values.items()})
            of += [number] * len(some)
            us += times
    values = {name: np.concatenate([each[name] for each in asked]) for name in (asked[0] if asked else ())}
    shapes = np.array(of, int)
    return Times(shapes, shapes, np.array(us), np.concatenate([[], *formula]), values)


def _least(of: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Return each shape's least time."""
    least = np.full(int(of.max(initial=-1)) + 1, np.inf)
    np.minimum.at(least, of, us)
    return least


def _slower(of: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Return how many times its shape's least each time is."""
    return us / _least(of, us)[of]


def _as_trees(grown: HistGradientBoostingRegressor, names: tuple[str, ...]) -> Trees:
    """Write out what scikit-learn has grown, but for a number that it adds to all, which says nothing of an order."""
    asks: list[int] = []
    at: list[float] = []

    def walk(nodes: Any, place: int) -> None:
        node = nodes[place]
        leaf = bool(node["is_leaf"])
        asks.append(LEAF if leaf else int(node["feature_idx"]))
        at.append(round(float(node["value"]), DIGITS) if leaf else _short(node["num_threshold"]))
        if not leaf:
            walk(nodes, int(node["left"]))
            walk(nodes, int(node["right"]))

    for [tree] in grown._predictors:
        walk(tree.nodes, 0)
    return Trees(names, tuple(asks), tuple(at))


def _short(threshold: float) -> float:
    """Write a threshold in few digits, a whole one without a point."""
    value = float(f"{threshold:.6g}")
    return int(value) if value.is_integer() else value


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def with_fastest(file: MenuFile, menus: CallMenus, shape: TimedShape) -> MenuFile:
    """Return a menu with the fastest kernel of a timed shape; of another GPU's menu, with this shape's alone."""
    kernel, us = min(shape.times, key=lambda each: each[1])
    listed = list(dict.fromkeys([*file.kernels, menus.kernels[kernel]]))
    own = Fastest(shape.m, shape.n, shape.k, shape.layout, listed.index(menus.kernels[kernel]), us)
    others = file.fastest if file.gpu == menus.gpu else ()
    fastest = {(each.m, each.n, each.k, each.layout): each for each in (*others, own)}
    changed = {"kernels": tuple(listed), "fastest": tuple(fastest.values())}
    return msgspec.structs.replace(file, gpu=menus.gpu, multiprocessors=menus.multiprocessors, **changed)


def menu_bytes(file: MenuFile) -> bytes:
    """Write a menu as JSON, a line for each field and for each measured shape."""
    lines = [b'"%s": %s' % (name.encode(), msgspec.json.encode(getattr(file, name))) for name in HEAD]
    shapes = b",\n  ".join(map(msgspec.json.encode, file.fastest))
    return b"{\n " + b",\n ".join([*lines, b'"fastest": [\n  %s\n ]' % shapes]) + b"\n}\n"
