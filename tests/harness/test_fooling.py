"""Kernels made to fool the checker are refused; right ones, in whatever order they sum, are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from support.cases import make_case
from tensorir_ladder.harness.build import Kernel, lower
from tensorir_ladder.harness.execution import LlvmBackend
from tensorir_ladder.harness.verify import PARTS, SPECIAL, WrongResult, hold, matmul_trial, verify, verify_launch
from tensorir_ladder.schedules.workloads import Matmul

Run = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
HALVES = ("float16", "bfloat16")
SHAPE = (96, 130, 256)
SEEDS = 5  # that each right order of sums is tried with


def kernel(
    shape: tuple[int, int, int] = SHAPE, dtype: str = "float32", out_dtype: str = "", variant: str = "default"
) -> Kernel:
    """A kernel to be checked; a function stands in for what it would compute."""
    case = make_case(1, shape, dtype=dtype)
    return lower(type(case)(**{**vars(case), "problem": Matmul(*shape, dtype, "nn", out_dtype)}))


def refused(run: Run, checked: Kernel) -> str:
    """Why a function is no kernel's stand-in."""
    with pytest.raises(WrongResult) as caught:
        verify(checked, LlvmBackend(), run=run)
    return str(caught.value)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product in float32."""
    with np.errstate(all="ignore"):
        return a.astype(np.float32) @ b.astype(np.float32)


def right(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """The product, rounded once."""
    c[...] = product(a, b).astype(c.dtype)


def zeroes_everything(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Nothing is left to compare with."""
    for array in (a, b, c):
        array[...] = 0


def spoils_a_row(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """A row of A is written over the next, and the product of that is right."""
    a[1:2] = a[:1]
    right(a, b, c)


def spoils_b_afterwards(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """The product is right, and one element of B is gone."""
    right(a, b, c)
    b[-1, -1] += b.dtype.type(1)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("run", [zeroes_everything, spoils_a_row, spoils_b_afterwards])
def test_a_kernel_that_writes_to_its_operands_is_refused(run: Run, dtype: str) -> None:
    assert f"operand {'B' if run is spoils_b_afterwards else 'A'}" in refused(run, kernel(dtype=dtype))


@T.prim_func(s_tir=True)
def zeroes_its_input(a: T.Buffer((4,), "float32"), c: T.Buffer((4,), "float32")):
    for i in range(4):
        with T.sblock("zero"):
            c[i] = a[i]
            a[i] = T.float32(0)


def test_writes_to_operands_are_seen_through_llvm() -> None:
    schedule = SimpleNamespace(mod=tvm.IRModule({"main": zeroes_its_input.with_attr("global_symbol", "main")}))
    run = LlvmBackend().load(SimpleNamespace(schedule_for_cpu=schedule))
    a, c = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    run(a, c)
    assert (a.tolist(), c.tolist()) == ([0, 0, 0, 0], [0, 1, 2, 3])


def rounded_every_32_steps(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Sums are kept in 16 bits between k tiles."""
    total = np.zeros(c.shape, np.float32)
    kind = np.float16 if c.dtype.itemsize > 2 else c.dtype
    for start in range(0, a.shape[1], 32):
        total = (total + product(a[:, start : start + 32], b[start : start + 32])).astype(kind).astype(np.float32)
    c[...] = total.astype(c.dtype)


def off_below_one(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Values below 1 are 32 units in the last place too large."""
    right(a, b, c)
    values = c.astype(np.float32)
    unit = 2.0 ** (np.frexp(values)[1] - (11 if c.dtype == np.float16 else 8))
    c[...] = np.where(abs(values) < 1, values + 32 * unit, values).astype(c.dtype)


def flushes_small_values(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Values below 1/100 are 0."""
    right(a, b, c)
    c[abs(c.astype(np.float32)) < 1e-2] = 0


def flushes_tiny_values(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Values below 2⁻¹⁴, float16's smallest normal number, are 0."""
    right(a, b, c)
    c[abs(c.astype(np.float32)) < 2**-14] = 0


def rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """Values rounded to 11 bits."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def operands_in_tf32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Operands lose 13 bits before they are multiplied."""
    c[...] = product(rounded_to_tf32(a), rounded_to_tf32(b)).astype(c.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [SHAPE, (48, 64, 1024), (16, 32, 4096)], ids=str)
def test_sums_kept_in_16_bits_are_refused(shape: tuple[int, int, int], dtype: str) -> None:
    refused(rounded_every_32_steps, kernel(shape, dtype))
    refused(rounded_every_32_steps, kernel(shape, dtype, "float32"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [SHAPE, (48, 64, 1024), (96, 96, 4096)], ids=str)
def test_small_values_that_are_off_are_refused(shape: tuple[int, int, int], dtype: str) -> None:
    for run in (off_below_one, flushes_small_values, flushes_tiny_values):
        refused(run, kernel(shape, dtype))


@pytest.mark.parametrize("out_dtype", HALVES)
@pytest.mark.parametrize("shape", [SHAPE, (48, 64, 1024), (48, 64, 16)], ids=str)
def test_operands_rounded_to_tf32_are_refused_where_the_output_has_16_bits(
    shape: tuple[int, int, int], out_dtype: str
) -> None:
    refused(operands_in_tf32, kernel(shape, "float32", out_dtype))


def sequential(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for column, row in zip(a.T.astype(np.float32), b.astype(np.float32)):
        total += np.outer(column, row)
    return total


def backwards(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return sequential(a[:, ::-1], b[::-1])


def split(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Four parts of k, summed on their own."""
    parts = zip(np.array_split(a, 4, axis=1), np.array_split(b, 4))
    return sum((sequential(*part) for part in parts), np.zeros((a.shape[0], b.shape[1]), np.float32))


def pairwise(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    products = a.astype(np.float32)[:, :, None] * b.astype(np.float32)[None]
    while products.shape[1] > 1:
        if products.shape[1] % 2:
            products = np.concatenate([products, np.zeros_like(products[:, :1])], axis=1)
        products = products[:, ::2] + products[:, 1::2]
    return products[:, 0]


def truncated(block: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Blocks of products as tensor cores add them: aligned to the largest, and cut off there and at the end."""

    def cut(values: np.ndarray, exponent: np.ndarray, bits: int) -> np.ndarray:
        unit = np.exp2(exponent - np.float64(bits))
        return np.trunc(values / unit) * unit

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if not (np.isfinite(a.astype(np.float32)).all() and np.isfinite(b.astype(np.float32)).all()):
            return product(a, b)
        a, b = a.astype(np.float64), b.astype(np.float64)
        total = np.zeros((a.shape[0], b.shape[1]))
        for start in range(0, a.shape[1], block):
            parts = [total, *(np.outer(a[:, k], b[k]) for k in range(start, min(start + block, a.shape[1])))]
            largest = np.frexp(np.maximum(np.max(np.abs(parts), axis=0), 1e-300))[1]
            summed = sum(cut(part, largest, 24) for part in parts)
            total = cut(summed, np.frexp(np.where(summed == 0, 1, summed))[1], 24)
        return total.astype(np.float32)

    return run


ORDERS = {
    "sequential": sequential,
    "backwards": backwards,
    "split": split,
    "pairwise": pairwise,
    "library": product,
    "truncated by 16": truncated(16),
    "truncated by 4": truncated(4),
}


def of_many_seeds(order: Callable[[np.ndarray, np.ndarray], np.ndarray], checked: Kernel) -> Iterator[bool]:
    def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            c[...] = order(a, b).astype(c.dtype)

    for seed in range(SEEDS):
        yield verify(checked, LlvmBackend(), seeds=(1000 * seed, 1000 * seed + 1), run=run).passed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("dtype", "out_dtype"), [("float16", ""), ("bfloat16", ""), ("float16", "float32")], ids=str)
@pytest.mark.parametrize("shape", [(16, 24, 500), (33, 17, 30)], ids=str)
def test_every_order_of_sums_is_accepted_in_16_bits(
    shape: tuple[int, int, int], dtype: str, out_dtype: str, order: str
) -> None:
    assert all(of_many_seeds(ORDERS[order], kernel(shape, dtype, out_dtype)))


@pytest.mark.parametrize("order", [name for name in ORDERS if "truncated" not in name])
@pytest.mark.parametrize("shape", [(16, 24, 500), (33, 17, 30), (3, 2, 2), (5, 4, 1)], ids=str)
def test_every_order_of_sums_is_accepted_in_float32(shape: tuple[int, int, int], order: str) -> None:
    assert all(of_many_seeds(ORDERS[order], kernel(shape, "float32")))
    assert all(of_many_seeds(ORDERS[order], kernel(shape, "float32", "float16")))


def spread_infinity(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Zeros that pad a tile of k meet the last infinity of A: 0 · ∞ goes into all rows above."""
    right(a, b, c)
    with np.errstate(all="ignore"):
        c[:-1] += (a[-1, -1].astype(np.float32) * np.float32(0)).astype(c.dtype)


def largest_for_infinity(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """What is infinite becomes the largest finite number."""
    right(a, b, c)
    most = np.array(3e38 if c.dtype.itemsize > 2 or c.dtype != np.float16 else 65504).astype(c.dtype)
    infinite = np.isinf(c.astype(np.float32))
    c[infinite] = np.copysign(most, c[infinite])


def zero_for_nan(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """A maximum with 0, which drops NaN, and adds it again: NaN is 0."""
    right(a, b, c)
    c[np.isnan(c.astype(np.float32))] = 0


def wrong_sign(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Infinities have the other sign."""
    right(a, b, c)
    infinite = np.isinf(c.astype(np.float32))
    c[infinite] = -c[infinite]


def flushes_denormals(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Denormal operands are taken for 0."""
    least = np.float64(2.0**-14 if a.dtype == np.float16 else 2.0**-126)
    kept = [np.where(abs(each.astype(np.float64)) < least, 0, each).astype(each.dtype) for each in (a, b)]
    with np.errstate(all="ignore"):
        right(*kept, c)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("run", [spread_infinity, largest_for_infinity, zero_for_nan, wrong_sign])
@pytest.mark.parametrize("shape", [(33, 17, 50), (5, 6, 1)], ids=str)
def test_nan_and_infinity_must_arrive_where_ieee_says(run: Run, shape: tuple[int, int, int], dtype: str) -> None:
    assert "special values" in refused(run, kernel(shape, dtype))


def test_float16_denormals_may_not_be_flushed_and_float32_ones_may() -> None:
    for out_dtype in ("float16", "float32"):
        refused(flushes_denormals, kernel((33, 17, 50), "float16", out_dtype))
    for dtype in ("float32", "bfloat16"):
        assert verify(kernel((33, 17, 50), dtype), LlvmBackend(), run=flushes_denormals).passed


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 3), (2, 1, 2), (5, 6, 1), (40, 33, 70)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
def test_special_values_are_what_they_are_called(shape: tuple[int, int, int], dtype: str) -> None:
    for seed in range(8):
        trial = matmul_trial(Matmul(*shape, dtype), LlvmBackend(), seed, SPECIAL)
        a, b, wanted = (array.astype(np.float64) for array in (*trial.operands.values(), trial.reference))
        rows, columns = ((~np.isfinite(each)).any(axis) for each, axis in ((a, 1), (b, 0)))
        # What is touched by an infinity or a NaN is neither, and nothing else is.
        np.testing.assert_array_equal(np.isfinite(wanted), ~(rows[:, None] | columns))
        assert not rows.all()
        assert not columns.all()
        assert (np.isinf(a).sum(), np.isinf(b).sum()) == (int(shape[0] > 1), int(shape[1] > 1))
        with np.errstate(all="ignore"):
            naive = (a[:, :, None] * b[None]).sum(1)
        np.testing.assert_allclose(wanted, naive, rtol=1e-9, atol=1e-9 * abs(a[np.isfinite(a)]).max())


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "nn"), ("float16", "nt"), ("bfloat16", "nn")])
@pytest.mark.parametrize(("step", "shape"), [(2, (33, 17, 50)), (5, (70, 41, 45)), (6, (17, 33, 129))], ids=str)
def test_padding_by_zeros_lets_no_infinity_through(
    step: int, shape: tuple[int, int, int], dtype: str, layout: str
) -> None:
    checked = lower(make_case(step, shape, dtype=dtype, layout=layout))
    run, backend = LlvmBackend().load(checked), LlvmBackend()
    for seed in range(4):
        hold(run, matmul_trial(checked.case.problem, backend, seed, SPECIAL), backend)


def test_cublas_alone_may_add_parts_of_k_in_16_bits() -> None:
    def in_parts(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            c[...] = 0
            for part in np.array_split(np.arange(a.shape[1]), 8):
                c[...] = (c.astype(np.float32) + product(a[:, part], b[part]).astype(np.float16)).astype(np.float16)

    problem = Matmul(64, 40, 3000, "float16")
    assert verify_launch(in_parts, problem, LlvmBackend(), "cublas", math=PARTS).passed
    with pytest.raises(WrongResult):
        verify_launch(in_parts, problem, LlvmBackend(), "ours")
