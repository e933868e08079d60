"""Fit the constants of the call's cost formula (:mod:`torch_ops.kernel_cost`) to times of its menu.

What counts is the order of kernels on each shape: an error that a shape's kernels share is forgiven for the most part,
and a kernel counts the less, the slower it is beside the shape's fastest. Of a shape's only time nobody knows whether
its kernel is slow or the shape: some of its error is forgiven, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.isa import PANEL
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.choice import Choice
from tensorir_ladder.torch_ops.estimates import Asked, CostFile, Estimates, MeasuredShape
from tensorir_ladder.torch_ops.few_rows import Streamed, streams
from tensorir_ladder.torch_ops.kernel_cost import Forms, KernelRates, KTile, microseconds, streaming_microseconds
from tensorir_ladder.torch_ops.one_tile import OneTileRates, all_tiles, one_tile_microseconds

EFFICIENCY = 0.85  # of tiles, to begin with; 1 at most
COMMON = 0.1  # what counts of an error that all of a shape's kernels share
FEW = 2.0  # and what is forgiven of it where they are few: as if so many more had none
PULL = 0.05  # of a constant towards what it begins with, in units of a time's error
STEP, LONGEST, ROUNDS, TRIES = 1e-4, 0.7, 60, 8  # of the logarithms of constants
FIXED = ("multiply_adds",)  # the tensor cores' rate is known
AT_MOST_ONE = ("crowding",)
FOLDS = 10
DIGITS = 4  # of constants that are kept
Named = tuple[MeasuredShape, tuple[tuple[str, float], ...]]  # a shape, and microseconds by names of kernels


class _Fit:
    """Times of all kernels on all shapes as arrays, and what the formula says of them for given constants."""

    def __init__(self, named: Sequence[Named], choices: Sequence[Choice], machine: Machine, start: KernelRates) -> None:
        by_name = {str(choice): choice for choice in choices}
        rows = [(place, shape, name, us) for place, (shape, times) in enumerate(named) for name, us in times]
        cut = [row for row in rows if row[2] in by_name]
        self.streamed = [row for row in rows if row[2] == str(Streamed())]
        self.start = start
        self.forms = Forms([by_name[name] for _, _, name, _ in cut], start, machine.multiprocessors)
        self.asked = Asked.all_of([row[1].asked for row in cut])
        ordered = [*cut, *self.streamed]
        self.shape, self.us = np.array([row[0] for row in ordered]), np.array([row[3] for row in ordered])
        best = np.full(len(named), np.inf)
        np.minimum.at(best, self.shape, self.us)
        self.weights = (best[self.shape] / self.us) ** 2
        whole = self.forms.block_n % PANEL == 0  # others lie between them
        self.tiles = sorted({tile for tile, is_whole in zip(self.forms.tiles, whole) if is_whole})
        self.names = [field for field in KernelRates.__struct_fields__ if field != "efficiency"]
        first = [getattr(start, name) for name in self.names]
        self.x = np.log([*first, *(start.efficiency.get(tile, EFFICIENCY) for tile in self.tiles)])

    def rates(self, x: np.ndarray) -> KernelRates:
        """Make constants of their logarithms, within what is possible."""
        values = np.exp(x).tolist()
        found = dict(zip(self.names, values))
        found |= {name: getattr(self.start, name) for name in FIXED}
        found |= {name: min(found[name], 1.0) for name in AT_MOST_ONE}
        efficiency = {tile: min(value, 1.0) for tile, value in zip(self.tiles, values[len(self.names) :])}
        return KernelRates(**found, efficiency=efficiency)

    def guess(self, x: np.ndarray) -> np.ndarray:
        """Return the formula's microseconds of all times; those of kernels that stream weights are the last."""
        rates = self.rates(x)
        forms = self.forms.rated(rates)
        m, n, k, nt, a_row, b_row = self.asked
        times = microseconds(forms, KTile(forms, a_row, b_row, nt), m, n, k)
        shapes = [shape for _, shape, _, _ in self.streamed]
        few = [streaming_microseconds(each.m, each.n, each.k, each.layout == "nt", rates) for each in shapes]
        return np.append(times, few)

    def errors(self, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return what is to be small: weighted logarithms of guessed over measured, and how far constants moved."""
        off = np.where(counts, np.log(self.guess(x) / self.us), 0.0)
        weights = np.where(counts, self.weights, 0.0)
        common = np.bincount(self.shape, weights * off) / (np.bincount(self.shape, weights) + FEW)
        return np.append(np.sqrt(weights) * (off - (1 - COMMON) * common[self.shape]), PULL * (x - self.x))


def _least_squares(errors: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Minimize the sum of squared errors from x on (Levenberg and Marquardt), by differences."""
    damping, found = 1e-2, errors(x)
    for _ in range(ROUNDS):
        slopes = np.stack([(errors(x + STEP * unit) - found) / STEP for unit in np.eye(len(x))], axis=1)
        normal, before = slopes.T @ slopes, found @ found
        for _ in range(TRIES):
            step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), slopes.T @ found)
            step = np.clip(step, -LONGEST, LONGEST)
            tried = errors(x + step)
            if tried @ tried < before:
                x, found, damping = x + step, tried, max(damping / 3, 1e-6)
                break
            damping *= 4
        if before - found @ found < 1e-6 * before:
            break
    return x


def rounded(rates: Any) -> Any:
    """Round all constants to as many digits as a fit tells."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(each) for name, each in value.items()}
        return float(f"{value:.{DIGITS}g}")

    return type(rates)(**short({name: getattr(rates, name) for name in rates.__struct_fields__}))


def fit_rates(file: CostFile, choices: Sequence[Choice], machine: Machine) -> KernelRates:
    """Fit the constants to a file's times, from its own constants on; those of kernels not in ``choices`` are left."""
    named = [(shape, tuple((file.kernels[place], us) for place, us in shape.times)) for shape in file.shapes]
    fit = _Fit(named, choices, machine, file.rates)
    counts = np.isfinite(fit.guess(fit.x))
    return fit.rates(_least_squares(lambda x: fit.errors(x, counts), fit.x))


def fit_one_tile(file: CostFile, multiprocessors: int) -> OneTileRates:
    """Fit the constants of exchanged operands to a file's times of them, from its own constants on."""
    places, once = file.tiles, np.array(file.once)
    timed = [(each, old, us) for each in file.shapes for old, us in each.times if places[old] is not None]
    if not timed:
        return file.one_tile
    asked, us = Asked.all_of([shape.asked for shape, _, _ in timed]), np.array([us for _, _, us in timed])
    tiles = all_tiles().at(np.array([places[old] for _, old, _ in timed]), once[[old for _, old, _ in timed]])
    least = {id(shape): math.inf for shape, _, _ in timed}
    for shape, _, one in timed:
        least[id(shape)] = min(least[id(shape)], one)
    weights = np.array([least[id(shape)] for shape, _, _ in timed]) / us
    names = [name for name in OneTileRates.__struct_fields__ if name not in FIXED]
    first = np.log([getattr(file.one_tile, name) for name in names])

    def rates(x: np.ndarray) -> OneTileRates:
        return msgspec.structs.replace(file.one_tile, **dict(zip(names, np.exp(x).tolist())))

    def errors(x: np.ndarray) -> np.ndarray:
        guessed = one_tile_microseconds(tiles, *asked, multiprocessors, rates(x))
        known = np.isfinite(guessed)
        return np.append(weights * np.where(known, np.log(np.where(known, guessed, us) / us), 0.0), PULL * (x - first))

    return rates(_least_squares(errors, first))


def chosen_over_best(
    file: CostFile,
    choices: Sequence[Choice],
    machine: Machine,
    refit: bool = False,
    others: Sequence[CostFile] = (),
) -> list[float]:
    """Return, for each shape, how fast what would be chosen of its kernels was beside the fastest of them.

    As if the shape had not been measured; shapes with one time are left out. ``refit`` fits the constants to the others
    too; else they are the file's. ``others`` are files of other GPUs.
    """
    shares, tiles, once = [], file.tiles, file.once
    asked = [shape for shape in file.shapes if len(shape.times) > 1]
    for fold in range(FOLDS):
        left_out = {id(shape) for shape in asked[fold::FOLDS]}
        rest = tuple(shape for shape in file.shapes if id(shape) not in left_out)
        known = msgspec.structs.replace(file, shapes=rest)
        if refit:
            known = msgspec.structs.replace(
                known,
                rates=fit_rates(known, choices, machine),
                one_tile=fit_one_tile(known, machine.multiprocessors),
            )
        estimates = Estimates(choices, known, machine.multiprocessors, others)
        for shape in asked[fold::FOLDS]:
            taken: dict[Any, float] = {file.kernels[place]: us for place, us in shape.times}
            problem = Matmul(shape.m, shape.n, shape.k, "float16", shape.layout)
            times = estimates.times(problem, streamed=streams(problem))
            expected = dict(zip(map(str, estimates.kernels), times.menu.tolist()))
            timed = [(old, tiles[old]) for old, _ in shape.times if not once[old]]
            expected |= {file.kernels[old]: float(times.tiles[place]) for old, place in timed if place is not None}
            if able := [name for name in taken if name in expected]:
                shares.append(min(taken[name] for name in able) / taken[min(able, key=expected.__getitem__)])
    return shares


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(fmean(map(math.log, values)))
