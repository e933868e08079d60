"""Check a kernel's output before anyone looks at its speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tensorir_ladder.harness.build import Kernel
from tensorir_ladder.harness.execution import Backend, numpy_dtype
from tensorir_ladder.harness.records import Verification
from tensorir_ladder.schedules.workloads import Matmul, accumulator_dtype

IEEE = "ieee"  # float32 products without TF32; half precision multiplies exactly and adds in float32
SEEDS = (0, 1, 2)
TF32_ROUNDING = 2.0**-11  # the largest relative error of an operand rounded to 11 bits


class WrongResult(RuntimeError):
    """A kernel whose output is not the product."""


def tolerance(problem: Matmul, scale: tuple[float, float], math: str = IEEE) -> float:
    """Bound the error that rounding explains, from the output's own scale.

    Summing k rounded products one after the other makes an error that grows like a random walk: a few
    times eps · √k of the output's root mean square, eps being the accumulator's. Rounding the result to
    its dtype adds half a unit in the last place of the largest output. With TF32 ``math`` each product has
    the errors of its two rounded operands before it is summed: they too add up like a random walk, as the products
    themselves do, to a few times that relative error of the output's root mean square; where products are few, twice
    that of the largest output bounds them. All with a factor that leaves room for the worst of 10⁸ elements, and far
    below one dropped element of k.
    """
    rms, largest = scale
    accumulate = 8 * epsilon(accumulator_dtype(problem.dtype)) * np.sqrt(problem.k) * rms
    round_operands = 0.0 if math == IEEE else TF32_ROUNDING * (8 * rms + 2 * largest)
    return float(accumulate + round_operands + epsilon(problem.out_dtype) * largest)


def check_output(
    problem: Matmul, backend: Backend, output: Any, reference: Any, exact: bool, math: str = IEEE
) -> tuple[float, float]:
    """Compare an output with its float64 reference; return (worst error, tolerance).

    ``exact`` data are small whole numbers, of which every sum is exact: the output must equal the
    reference rounded to its dtype. Raise WrongResult; NaN anywhere is wrong.
    """
    error = backend.worst_error(output, reference)
    scale = backend.scale(reference)
    limit = _integer_rounding(problem, scale[1]) if exact else tolerance(problem, scale, math)
    if not error <= limit:
        data = "small whole numbers" if exact else "normal data"
        raise WrongResult(f"worst error {error:.3g} on {data}, limit {limit:.3g}")
    return error, limit


def check_run(
    run: Callable[[Any, Any, Any], Any], problem: Matmul, backend: Backend, seed: int, exact: bool, math: str = IEEE
) -> tuple[float, float]:
    """Run ``run(a, b, c)`` on data drawn from a seed, into NaN, and check its output; see :func:`check_output`."""
    make = backend.integers if exact else backend.normal
    a = make(seed, (problem.m, problem.k), problem.dtype)
    b = make(seed + 1000, problem.b_shape, problem.dtype)
    output = backend.poisoned((problem.m, problem.n), problem.out_dtype)
    run(a, b, output)
    return check_output(problem, backend, output, backend.reference(problem, a, b), exact, math)


def verify(kernel: Kernel, backend: Backend, seeds: tuple[int, ...] = SEEDS, run: Any = None) -> Verification:
    """:func:`verify_launch` of a kernel; ``run`` stands in for it where it is loaded already."""
    case = kernel.case
    return verify_launch(run or backend.load(kernel), case.problem, backend, str(case), seeds, case.math)


def verify_launch(
    run: Callable[[Any, Any, Any], Any],
    problem: Matmul,
    backend: Backend,
    name: str,
    seeds: tuple[int, ...] = SEEDS,
    math: str = IEEE,
) -> Verification:
    """Run ``run(a, b, c)`` on fresh normal data for each seed and on small whole numbers, and check each output.

    The output is filled with NaN before each run, so that an element that nobody writes is found; ``math`` says how
    much rounding is allowed.
    Raise WrongResult, which begins with ``name``.
    """
    worst, limit = 0.0, 0.0
    for seed, exact in (*((seed, False) for seed in seeds), (seeds[0], True)):
        try:
            error, allowed = check_run(run, problem, backend, seed, exact, math)
        except WrongResult as wrong:
            raise WrongResult(f"{name} on {backend.name}, seed {seed}: {wrong}") from None
        if not exact and error / max(allowed, 1e-300) >= worst / max(limit, 1e-300):
            worst, limit = error, allowed
    return Verification(True, backend.name, tuple(seeds), worst, limit, integers_exact=True)


def _integer_rounding(problem: Matmul, largest: float) -> float:
    """Bound whole numbers' error: 0 up to 2 / eps of the output's dtype; beyond, half a unit in the last place."""
    unit = epsilon(problem.out_dtype)
    return 0.0 if largest <= 2 / unit else unit / 2 * largest


def epsilon(dtype: str) -> float:
    """Return the distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
