"""Hold a kernel's output to a reference before anyone looks at its speed: the one place where results are checked.

A :class:`Trial` is made before the run: operands, drawn from a seed that the kernel's author cannot know, what they
must give, and how far off each element may be. :func:`hold` runs a kernel on it, into an output that is no product,
and then compares: operands, and memory around the output, byte by byte with what they were, the output element by
element.

The limit of an element is what rounding explains (:func:`rounding_limit`), from that element's own k products.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import ml_dtypes
import numpy as np

from tensorir_ladder.harness.batches import Batch, stored_shapes
from tensorir_ladder.harness.build import Kernel
from tensorir_ladder.harness.execution import GUARD_BYTES, Backend, StrayWrite, numpy_dtype
from tensorir_ladder.harness.records import Verification
from tensorir_ladder.schedules.workloads import Matmul, accumulator_dtype

IEEE = "ieee"  # float32 products without TF32; half precision multiplies exactly and adds in float32
TF32 = "tf32"  # operands rounded to 11 bits, products added in float32
PARTS = "parts"  # parts of a split k added in the output's dtype, as cuBLAS does: of our own kernels none
NORMAL, WHOLE, SPECIAL = "normal data", "small whole numbers", "special values"  # what trials are made of
SEED_OF_B = 1000  # added to the seed of A
SEEDS = 3  # of normal data; the first also draws the other trials
# Roundings of a sum of k products, in units of eps · (root sum square of the products + |sum|), each with room for the
# worst of 10⁹ elements. Measured on an H100 over 4·10⁶ elements, k from 16 to 65536 (eps · root sum square alone):
# multiply-adds one after the other 2.4 · √k at most, blocks of 16 on tensor cores 0.076 · k, TF32 operands 2⁻¹¹ · 3.2.
WALK = 2.0  # of √k
# Tensor cores add blocks of products to the sum and cut off what lies below its last place, always towards zero: that
# adds up, to at most one eps of the sum for each block. The smallest blocks, of sm_75, are of 4.
TRUNCATED_BLOCK = 4
# A block's products are aligned to the largest of block and sum before they are added, and each is cut off there: where
# few and unequal products cancel, that is more than cutting off the sum. Of 16 products, those of one instruction. They
# are aligned by their operands' exponents, and a denormal's is that of the smallest normal number, however small it is:
# on an H200 87 products of denormals and normal numbers, whose sum is -2.500186 units in the last place, gave -2.5, as
# where 25 bits are kept below the largest of these exponents; where fewer are, or of the products' own, they do not.
ALIGNED = 16
MOST_PARTS = 32  # that are rounded so
TF32_ROUNDING = 6 * 2.0**-11  # operands rounded to 11 bits: of the root sum square
LARGEST_NORMAL = 8  # no standard normal number of 10¹³ is larger
TINY = {"float16": 2.0**-24}  # what special rows are whole multiples of: denormals of float16, small in other dtypes
TINY_OTHERWISE = 2.0**-100
CHUNK = 2**26  # elements that are computed and compared at once: half a gigabyte in float64
CHUNKS_HELD = 12  # at most, of those that are computed from each other


def bytes_to_check(problem: Matmul, itemsize: int) -> int:
    """Count the bytes that a trial of a product takes beside its operands and output, at most."""
    a, b, c = (int(np.prod(shape)) for shape in stored_shapes(problem))
    return itemsize * (a + b) + 8 * (a + 4 * b + 2 * c + CHUNKS_HELD * min(CHUNK, max(a, c)))


class WrongResult(RuntimeError):
    """A kernel whose output is not the product, or that writes to its operands, or beside its output."""


@dataclass(frozen=True)
class Trial:
    """One run to be checked, made before it: ``run(*operands.values(), output)``.

    ``reference`` is the output in float64, ``limit`` how far from it each element may be; where the reference is
    infinite or NaN, so must the output be. The output is filled with ``poison`` first. ``data`` says in words what the
    operands are.
    """

    operands: Mapping[str, Any]
    reference: Any
    limit: Any
    out_dtype: str
    data: str = NORMAL
    poison: float = nan


def hold(run: Callable[..., Any], trial: Trial, backend: Backend) -> tuple[float, float]:
    """Run a kernel on a trial; return error and limit of the element that came nearest to its limit.

    Raise WrongResult for an operand, or memory around the output, that the kernel wrote to, and for any element beyond
    its limit.
    """
    before = {name: backend.copied(array) for name, array in trial.operands.items()}
    shape = tuple(trial.reference.shape)
    size, beside = int(np.prod(shape)), GUARD_BYTES // numpy_dtype(trial.out_dtype).itemsize
    room = backend.poisoned((size + 2 * beside,), trial.out_dtype, trial.poison)
    output, untouched = room[beside : beside + size].reshape(shape), backend.copied(room[:beside])
    try:
        run(*trial.operands.values(), output)
    except StrayWrite as stray:
        raise WrongResult(f"{stray}, on {trial.data}") from stray
    for where, edge in (("before", room[:beside]), ("behind", room[beside + size :])):
        if not backend.same_bytes(edge, untouched):
            raise WrongResult(f"memory {where} the output is not what it was before the run, on {trial.data}")
    for name, array in trial.operands.items():
        if not backend.same_bytes(array, before[name]):
            raise WrongResult(f"operand {name} is not what it was before the run, on {trial.data}")
    return check_output(trial, backend, output)


def check_output(trial: Trial, backend: Backend, output: Any) -> tuple[float, float]:
    """Compare an output with its trial's reference; see :func:`hold`."""
    shape, wrong, nearest, found = tuple(trial.reference.shape), 0, -1.0, (0.0, 0.0, "")
    for rows in _chunks(shape):
        ratios, beyond = _ratios(backend, output[rows], trial.reference[rows], trial.limit[rows])
        wrong, at = wrong + beyond, int(ratios.argmax())
        if float(ratios.reshape(-1)[at]) > nearest:
            nearest, at = float(ratios.reshape(-1)[at]), at + rows.start * int(np.prod(shape[1:]))
            place = tuple(map(int, np.unravel_index(at, shape)))
            got, must, limit = (float(values[place]) for values in (output, trial.reference, trial.limit))
            error = 0.0 if got == must else abs(got - must)
            found = error, limit, f"element {place} is {got:.6g}, must be {must:.6g}"
    error, limit, element = found
    if wrong:
        beyond = f"{element}; {wrong} of {np.prod(shape)} are off"
        raise WrongResult(f"worst error {error:.3g} on {trial.data}, limit {limit:.3g}: {beyond}")
    return error, limit


def _ratios(backend: Backend, output: Any, reference: Any, limit: Any) -> tuple[Any, int]:
    """Relate each element's error to its limit, infinite where it has no number; count those beyond."""
    xp, output = backend.xp, backend.float64(output)
    with np.errstate(all="ignore"):
        error = abs(output - reference)
        right = (error <= limit) | (output == reference) | (xp.isnan(output) & xp.isnan(reference))
        ratios = error / (limit + 1e-300)
        ratios = xp.where(right & ~xp.isfinite(ratios), 0.0, xp.where(xp.isnan(ratios), np.inf, ratios))
    return ratios, int((~right).sum())


def _chunks(shape: Sequence[int], columns: int = 1) -> Iterator[slice]:
    """Cut an array by rows, so that no piece, or that of another with so many columns, has more than CHUNK elements."""
    step = max(1, CHUNK // max(columns, int(np.prod(shape[1:]))))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def matmul_trial(problem: Matmul, backend: Backend, seed: int, data: str = NORMAL, math: str = IEEE) -> Trial:
    """Draw the operands of a product, or of each product of a batch, and compute what they must give.

    ``data`` is NORMAL; WHOLE, small whole numbers, of which every sum is exact, so that the output must be the sum
    rounded once; or SPECIAL, with NaN, infinities, denormals and tiny rows among normal numbers. ``math``, one of
    IEEE, TF32 and PARTS, says what rounding is allowed.
    """
    if isinstance(problem, Batch):
        return _batch_trial(problem, backend, seed, data, math)
    draw = backend.integers if data == WHOLE else backend.normal
    a = draw(seed, (problem.m, problem.k), problem.dtype)
    b = draw(seed + SEED_OF_B, problem.b_shape, problem.dtype)
    columns = b if problem.layout == "nn" else b.T
    if data == SPECIAL:
        _make_tiny(problem, backend, a, columns, seed)
    reference, limit = _expected(problem, backend, a, columns, data, math)
    if data == SPECIAL:
        _make_infinite(problem, backend, a, columns, seed, reference)
        limit = backend.xp.where(backend.xp.isfinite(reference), limit, 0.0)
    return Trial({"A": a, "B": b}, reference, limit, problem.out_dtype, data, 1.0 if data == SPECIAL else nan)


def _batch_trial(problem: Batch, backend: Backend, seed: int, data: str, math: str) -> Trial:
    """Stack the trials of a batch's products, each drawn from a different seed."""
    seeds = range(seed, seed + 2 * SEED_OF_B * problem.batch, 2 * SEED_OF_B)
    trials = [matmul_trial(problem.one, backend, each, data, math) for each in seeds]
    stack = backend.xp.stack
    operands = {name: stack([trial.operands[name] for trial in trials]) for name in trials[0].operands}
    reference, limit = (stack([getattr(trial, name) for trial in trials]) for name in ("reference", "limit"))
    return replace(trials[0], operands=operands, reference=reference, limit=limit)


def _expected(problem: Matmul, backend: Backend, a: Any, b: Any, data: str, math: str) -> tuple[Any, Any]:
    """Compute the product and each element's limit in float64."""
    shape, b = (problem.m, problem.n), backend.float64(b)
    squares = b * b if data != WHOLE else b
    lifted = _lifted(backend, b, problem.dtype) ** 2 if data == SPECIAL else squares
    reference, limit = backend.poisoned(shape, "float64"), backend.poisoned(shape, "float64")
    for rows in _chunks(shape, problem.k):
        some = backend.float64(a[rows])
        reference[rows] = some @ b
        size = abs(reference[rows])
        if data == WHOLE:
            exact = size <= 2 / epsilon(problem.out_dtype)
            limit[rows] = backend.xp.where(exact, 0.0, half_units(backend, size, problem.out_dtype))
        else:
            spread = aligned = backend.xp.sqrt((some * some) @ squares)
            if data == SPECIAL:
                aligned = backend.xp.sqrt(_lifted(backend, some, problem.dtype) ** 2 @ lifted)
            limit[rows] = rounding_limit(problem, backend, size, spread, math, aligned)
    return reference, limit


def _lifted(backend: Backend, values: Any, dtype: str) -> Any:
    """Return magnitudes, of denormals the smallest normal number: by what tensor cores align products."""
    least = float(ml_dtypes.finfo(numpy_dtype(dtype)).smallest_normal)
    return backend.xp.where(values == 0, 0.0, abs(values).clip(min=least))


def rounding_limit(
    problem: Matmul, backend: Backend, size: Any, spread: Any, math: str = IEEE, aligned: Any = None
) -> Any:
    """Bound the error that rounding explains, element by element, from |sum| and the products' root sum square.

    - Each of k additions rounds a partial sum, by up to half an eps of it, eps being the accumulator's. Of products of
      either sign, partial sums are about the root sum square of all products, and both they and their roundings are
      random walks: a few times eps · √k of that, and of the sum where it is larger. In any order of additions; in
      several parts, less.
    - Tensor cores (16-bit operands and TF32) do not round but cut off: eps of the partial sum for each block of
      products, always towards zero, so that it grows as k; and each product at what is largest where it is added, of
      whose magnitudes ``aligned`` is the root sum square (``spread`` if None): denormal operands count as normal ones.
    - With TF32 ``math``, products have the errors of two rounded operands, which add up as the products do.
    - float32 denormals may be flushed to 0, operands, products or sums: nvcc is told to use fast math.
    - At the end half a unit in the last place of the output, there where the sum with all its errors may lie.
    """
    sums = accumulator_dtype(problem.dtype)
    truncates = problem.dtype in ("float16", "bfloat16") or math == TF32
    steps = WALK * problem.k**0.5 + (problem.k / TRUNCATED_BLOCK if truncates else 0)
    error = epsilon(sums) * steps * (spread + size)
    if truncates:
        error = error + epsilon(sums) * ALIGNED * ((spread if aligned is None else aligned) + size)
    if math == TF32:
        error = error + TF32_ROUNDING * spread
    if math == PARTS:
        error = error + MOST_PARTS * half_units(backend, spread + size, problem.out_dtype)
    error = error + LARGEST_NORMAL * problem.k * float(ml_dtypes.finfo(numpy_dtype(sums)).smallest_normal)
    return error + half_units(backend, size + error, problem.out_dtype)


def half_units(backend: Backend, size: Any, dtype: str) -> Any:
    """Compute half a unit in the last place of a dtype, of each of some magnitudes in float64."""
    kind = ml_dtypes.finfo(numpy_dtype(dtype))
    exponents = backend.xp.frexp(size.clip(min=float(kind.smallest_normal)))[1]
    return backend.xp.exp2(backend.float64(exponents) - (kind.nmant + 2))


def _make_tiny(problem: Matmul, backend: Backend, a: Any, b: Any, seed: int) -> None:
    """Make every fourth row of A and column of B tiny, and one column of A denormal."""
    unit = TINY.get(problem.dtype, TINY_OTHERWISE)
    rows, columns = a[seed % 4 :: 4], b[:, (seed + 1) % 4 :: 4]
    for part in (rows, columns):
        part[...] = (backend.float64(part) * 4).round() * unit
    if problem.k > 1:
        least = float(ml_dtypes.finfo(numpy_dtype(problem.dtype)).smallest_subnormal)
        column = a[:, seed % (problem.k - 1)]  # never the last, which meets an infinity: it may be flushed to 0
        column[...] = (backend.float64(column) * 4).round() * least


def _make_infinite(problem: Matmul, backend: Backend, a: Any, b: Any, seed: int, reference: Any) -> None:
    """Put infinities and NaN into A and B, and what IEEE 754 makes of them into their rows and columns of the product.

    An infinity stands in the last row of A and column of B, at the last k: where tiles end, what is padded with zeros
    must not meet it. At least one row and one column have neither.
    """
    draw = np.random.default_rng(seed)
    rows, columns = [], []
    if problem.m > 1:
        rows.append(problem.m - 1)
        a[-1, -1] = np.inf
    if problem.n > 1:
        columns.append(problem.n - 1)
        b[-1, -1] = -np.inf
    if problem.m > 2:
        rows.append(int(draw.integers(problem.m - 1)))
        a[rows[-1], int(draw.integers(problem.k))] = nan
    if problem.n > 2:
        columns.append(int(draw.integers(problem.n - 1)))
        b[int(draw.integers(problem.k)), columns[-1]] = nan
    # Not by a library's product, which may treat zeros, and so 0 · inf, in a way of its own.
    wide_a, wide_b = backend.float64(a), backend.float64(b)
    with np.errstate(invalid="ignore"):
        for row in rows:
            reference[row] = (wide_a[row][:, None] * wide_b).sum(0)
        for column in columns:
            reference[:, column] = (wide_a * wide_b[:, column]).sum(1)


def check_run(
    run: Callable[[Any, Any, Any], Any],
    problem: Matmul,
    backend: Backend,
    seed: int,
    data: str = NORMAL,
    math: str = IEEE,
) -> tuple[float, float]:
    """Run ``run(a, b, c)`` on a trial drawn from a seed; see :func:`matmul_trial` and :func:`hold`."""
    return hold(run, matmul_trial(problem, backend, seed, data, math), backend)


def draw_seeds(first: int | None = None, count: int = SEEDS) -> tuple[int, ...]:
    """Return ``count`` seeds from ``first`` on; where that is None, from one that nobody can know beforehand."""
    first = int.from_bytes(os.urandom(4), "big") // 2 if first is None else first
    return tuple(range(first, first + count))


def verify(
    kernel: Kernel, backend: Backend, seeds: Sequence[int] = (), run: Callable[..., Any] | None = None
) -> Verification:
    """:func:`verify_launch` of a kernel; ``run`` stands in for it where it is loaded already."""
    case = kernel.case
    return verify_launch(run or backend.load(kernel), case.problem, backend, str(case), seeds, case.math)


def verify_launch(
    run: Callable[[Any, Any, Any], Any],
    problem: Matmul,
    backend: Backend,
    name: str,
    seeds: Sequence[int] = (),
    math: str = IEEE,
    draw: Callable[[Matmul, Backend, int, str, str], Trial] = matmul_trial,
) -> Verification:
    """Run ``run(a, b, c)`` on normal data of each seed, and on whole numbers and special values of the first.

    Without ``seeds``, SEEDS fresh ones; the record has them. ``math`` says how much rounding is allowed; ``draw`` makes
    the trials. Raise WrongResult, which begins with ``name`` and says which seed repeats it.
    """
    seeds = tuple(seeds) or draw_seeds()
    found = []
    for seed, data in (*((seed, NORMAL) for seed in seeds), (seeds[0], WHOLE), (seeds[0], SPECIAL)):
        try:
            found.append(hold(run, draw(problem, backend, seed, data, math), backend))
        except WrongResult as wrong:
            raise WrongResult(f"{name} on {backend.name}, seed {seed} (--seed {seed} repeats it): {wrong}") from None
    error, limit = max(found[: len(seeds)], key=lambda pair: pair[0] / pair[1])
    return Verification(True, backend.name, seeds, error, limit, integers_exact=True, special_values=True)


def epsilon(dtype: str) -> float:
    """Return the distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(numpy_dtype(dtype)).eps)
