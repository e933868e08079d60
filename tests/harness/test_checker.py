"""The checker itself: wrong outputs of every kind are caught, rounding is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cases import make_case
from tensorir_ladder.harness import verify as checker
from tensorir_ladder.harness.batches import Batch
from tensorir_ladder.harness.build import Kernel, lower
from tensorir_ladder.harness.execution import (
    GUARD_BYTES,
    LlvmBackend,
    StrayWrite,
    compile_serial,
    numpy_dtype,
    run_guarded,
)
from tensorir_ladder.harness.verify import (
    NORMAL,
    SEEDS,
    SPECIAL,
    WHOLE,
    Trial,
    WrongResult,
    check_output,
    epsilon,
    half_units,
    hold,
    matmul_trial,
    verify,
)
from tensorir_ladder.schedules.workloads import Matmul

SHAPE = (96, 130, 80)
DTYPES = ("float32", "float16", "bfloat16")
FIXED = (0, 1, 2)
CPU = LlvmBackend()
Run = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class ScaledBackend(LlvmBackend):
    """Normal data times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def normal(self, seed: int, shape: tuple[int, int], dtype: str) -> np.ndarray:
        return (super().normal(seed, shape, "float64") * self.factor).astype(numpy_dtype(dtype))


def kernel(shape: tuple[int, int, int] = SHAPE, dtype: str = "float32", layout: str = "nn") -> Kernel:
    """A kernel to be checked; what it would compute does not matter, a function stands in for it."""
    return lower(make_case(1, shape, dtype=dtype, layout=layout))


def product(a: np.ndarray, b: np.ndarray, layout: str = "nn") -> np.ndarray:
    """The product in float32, as a right kernel makes it."""
    with np.errstate(invalid="ignore"):
        return a.astype(np.float32) @ (b if layout == "nn" else b.T).astype(np.float32)


def altered(change: Callable[[np.ndarray], None]) -> Run:
    """A right kernel whose output is then changed."""

    def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        c[...] = product(a, b).astype(c.dtype)
        change(c)

    return run


def is_whole(*arrays: np.ndarray) -> bool:
    """Whether the data are the whole numbers."""
    return all(np.array_equal(array, np.rint(array)) for array in arrays)


def right(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """The product, rounded once."""
    c[...] = product(a, b).astype(c.dtype)


def zero(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Nothing but zeros."""
    c[...] = 0


def drop_last_k_tile(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """All but the last 16 steps of k."""
    c[...] = product(a[:, :-16], b[:-16]).astype(c.dtype)


def drop_last_k(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """All but the last step of k."""
    c[...] = product(a[:, :-1], b[:-1]).astype(c.dtype)


def repeat_first_k_tile(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """A stage used one tile too late: the first tile stands in for the second."""
    a, b = a.copy(), b.copy()
    a[:, 16:32], b[16:32] = a[:, :16], b[:16]
    right(a, b, c)


def transpose_tile(c: np.ndarray) -> None:
    """One 32×32 tile with rows and columns exchanged."""
    c[32:64, 64:96] = c[32:64, 64:96].T.copy()


def swap_tiles(c: np.ndarray) -> None:
    """Two tiles in each other's place."""
    c[:32, :64], c[32:64, :64] = c[32:64, :64].copy(), c[:32, :64].copy()


def leave_row_unwritten(c: np.ndarray) -> None:
    """The last row is never written: what was there before the run remains."""
    c[-1] = np.nan


def one_nan(c: np.ndarray) -> None:
    """A single NaN in the last element."""
    c[-1, -1] = np.nan


WRONG = {
    "zeros": zero,
    "all NaN": altered(lambda c: c.fill(np.nan)),
    "one NaN": altered(one_nan),
    "infinite element": altered(lambda c: c.__setitem__((0, 0), np.inf)),
    "swapped tiles": altered(swap_tiles),
    "transposed tile": altered(transpose_tile),
    "last k tile dropped": drop_last_k_tile,
    "last k dropped": drop_last_k,
    "stage used too late": repeat_first_k_tile,
    "unwritten row": altered(leave_row_unwritten),
    "shifted columns": altered(lambda c: c.__setitem__(slice(None), np.roll(c, 1, axis=1))),
    "sign": altered(lambda c: np.negative(c, out=c)),
    "nothing written": lambda a, b, c: None,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_outputs_are_caught(name: str, dtype: str) -> None:
    with pytest.raises(WrongResult, match="worst error"):
        verify(kernel(dtype=dtype), LlvmBackend(), run=WRONG[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounded_product_is_accepted(dtype: str) -> None:
    result = verify(kernel(dtype=dtype), LlvmBackend(), run=right)
    assert (result.passed, result.on, len(result.seeds)) == (True, "llvm", SEEDS)
    assert result.integers_exact
    assert result.special_values
    assert 0 < result.max_error <= result.tolerance


def test_seeds_are_drawn_anew_and_repeat_a_run() -> None:
    runs = [verify(kernel(), CPU, run=right) for _ in range(2)]
    assert runs[0].seeds != runs[1].seeds
    assert verify(kernel(), CPU, seeds=runs[0].seeds, run=right) == runs[0]


@pytest.mark.parametrize("shape", [(64, 64, 1), (33, 17, 300), (16, 16, 4096)], ids=str)
def test_any_order_of_summation_is_accepted(shape: tuple[int, int, int]) -> None:
    def sequential(order: slice) -> Run:
        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
            total = np.zeros(c.shape, np.float32)
            with np.errstate(invalid="ignore"):
                for column, row in zip(a.T[order], b[order]):
                    total += np.outer(column, row)
            c[...] = total

        return run

    checked = kernel(shape)
    for order in (slice(None), slice(None, None, -1)):
        assert verify(checked, LlvmBackend(), run=sequential(order)).passed


def test_a_row_left_from_the_previous_run_is_caught() -> None:
    kept: list[np.ndarray] = []

    def stale(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        right(a, b, c)
        if kept:
            c[5] = kept[0]
        kept[:] = [c[5].copy()]

    with pytest.raises(WrongResult, match=r"seed 1 .*--seed 1 repeats it"):
        verify(kernel(), LlvmBackend(), FIXED, run=stale)
    assert len(kept) == 1


def test_the_output_is_poisoned_anew_for_each_run() -> None:
    seen: list[bool] = []

    def lazy(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        seen.append(bool(np.isnan(c).all()))
        if len(seen) < len(FIXED):
            right(a, b, c)

    with pytest.raises(WrongResult, match=f"seed {FIXED[-1]}"):
        verify(kernel(), LlvmBackend(), FIXED, run=lazy)
    assert seen == [True] * len(FIXED)


@pytest.mark.parametrize(("at", "where"), [(-1, "before"), (0, "behind"), (5000, "behind")])
def test_memory_around_the_output_stays_as_it_was(at: int, where: str) -> None:
    def strays(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        right(a, b, c)
        room, first = c.base, GUARD_BYTES // c.itemsize
        room[first + at + (c.size if where == "behind" else 0)] = 1.0

    with pytest.raises(WrongResult, match=f"memory {where} the output is not what it was"):
        verify(kernel(), LlvmBackend(), FIXED, run=strays)


@pytest.mark.parametrize(("number", "index", "byte"), [(0, -1, -4), (2, 128, 512), (1, 130, 520)])
def test_a_compiled_function_that_writes_beside_an_array_is_found(number: int, index: int, byte: int) -> None:
    """TVM checks no index: such a write lands in whatever lies there."""
    function = tvm.script.from_source(f"""@T.prim_func(s_tir=True)
def main(a: T.Buffer(128, "float32"), b: T.Buffer(128, "float32"), c: T.Buffer(128, "float32")):
    with T.sblock("stray"):
        T.reads()
        T.writes({"abc"[number]}[0:128])
        {"abc"[number]}[{index}] = T.float32(1)
""")
    run = compile_serial(tvm.IRModule({"main": function}))["main"]
    given = [np.full(128, number, "float32") for number in range(3)]
    with pytest.raises(StrayWrite, match=rf"array {number}, of 512 bytes, was written beside: byte {byte}"):
        run_guarded(run, *given)


def test_each_seed_has_other_data_and_both_operands_differ() -> None:
    seen: list[np.ndarray] = []

    def watch(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        seen.extend((a, b))
        right(a, b, c)

    verify(kernel((32, 32, 32)), LlvmBackend(), run=watch)
    assert len(seen) == 2 * (SEEDS + 2)
    assert len({array.tobytes() for array in seen}) == len(seen)
    assert [is_whole(array) for array in seen] == [False] * 2 * SEEDS + [True] * 2 + [False] * 2
    assert [bool(np.isfinite(array).all()) for array in seen] == [True] * 2 * (SEEDS + 1) + [False] * 2


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_each_product_of_a_batch_has_data_of_its_own_and_special_values(layout: str) -> None:
    batch = Batch(9, 17, 12, "float16", layout, batch=3)
    for data in (NORMAL, WHOLE, SPECIAL):
        trial = matmul_trial(batch, CPU, 0, data)
        a, b = trial.operands["A"], trial.operands["B"]
        assert (a.shape, b.shape) == ((3, 9, 12), (3, *batch.b_shape))
        assert not any(np.array_equal(one[0], one[1]) for one in (a, b))
        assert np.isnan(trial.reference).any((1, 2)).tolist() == [data == SPECIAL] * 3
        hold(lambda a, b, c: np.copyto(c, rounded_product(batch, a, b)), trial, CPU)


def rounded_product(problem: Matmul, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product, rounded once."""
    with np.errstate(invalid="ignore"):
        return CPU.reference(problem, a, b).astype(numpy_dtype(problem.out_dtype))


def test_the_transposed_operand_is_not_mistaken() -> None:
    checked = kernel((64, 64, 64), layout="nt")
    assert verify(checked, LlvmBackend(), run=lambda a, b, c: np.copyto(c, product(a, b, "nt"))).passed
    with pytest.raises(WrongResult):
        verify(checked, LlvmBackend(), run=right)


def test_products_rounded_to_tf32_are_caught() -> None:
    def tf32(array: np.ndarray) -> np.ndarray:
        return ((array.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

    with pytest.raises(WrongResult, match="normal data"):
        verify(kernel(), LlvmBackend(), run=lambda a, b, c: np.copyto(c, product(tf32(a), tf32(b))))


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_caught_does_not_depend_on_the_size_of_the_data(dtype: str, factor: float) -> None:
    backend, checked = ScaledBackend(factor), kernel(dtype=dtype)
    assert verify(checked, backend, run=right).passed
    for name in ("zeros", "last k dropped", "swapped tiles"):
        with pytest.raises(WrongResult, match="normal data"):
            verify(checked, backend, run=WRONG[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 64, 1), (1, 300, 7)], ids=str)
def test_short_products_are_checked_too(shape: tuple[int, int, int], dtype: str) -> None:
    checked = kernel(shape, dtype)
    assert verify(checked, LlvmBackend(), run=right).passed
    for wrong in (zero, altered(lambda c: c.__imul__(c.dtype.type(1.05)))):
        with pytest.raises(WrongResult):
            verify(checked, LlvmBackend(), run=wrong)


@pytest.mark.parametrize("error", [1.0, 1e-3])
@pytest.mark.parametrize("k", [80, 4096])
def test_whole_numbers_are_compared_exactly(k: int, error: float) -> None:
    def off(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        right(a, b, c)
        if is_whole(a, b):
            c[3, 4] += error

    checked = kernel((16, 16, k))
    assert verify(checked, LlvmBackend(), run=right).passed
    with pytest.raises(WrongResult, match="small whole numbers"):
        verify(checked, LlvmBackend(), run=off)


def whole(reference: np.ndarray, dtype: str) -> Trial:
    """A trial of whole numbers whose product is given."""
    limit = np.where(abs(reference) <= 2 / epsilon(dtype), 0.0, half_units(CPU, abs(reference), dtype))
    return Trial({}, reference, limit, dtype, WHOLE)


def test_float16_whole_numbers_are_exact_up_to_2048() -> None:
    trial = matmul_trial(Matmul(60, 60, 4096, "float16"), CPU, 0, WHOLE)
    small = abs(trial.reference) <= 2048
    assert small.any()
    assert (trial.limit[small] == 0).all()
    output = trial.reference.astype(np.float16)
    check_output(trial, CPU, output)
    output[0, 0] = np.nextafter(output[0, 0], np.float16(np.inf))
    with pytest.raises(WrongResult, match=r"element \(0, 0\) .* 1 of 3600 are off"):
        check_output(trial, CPU, output)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_whole_numbers_beyond_the_exact_range_may_be_rounded_once(dtype: str) -> None:
    trial = whole(np.array([[3001.0, 4095.0, -2049.0, 1.0, 4097.0]]), dtype)
    rounded = trial.reference.astype(numpy_dtype(dtype))
    error, limit = check_output(trial, CPU, rounded)
    assert 0 < error <= limit
    for place in range(5):
        twice = rounded.copy()
        twice[0, place] = twice[0, place].astype(np.float64) + 2 * half_units(CPU, np.array([5000.0]), dtype)[0]
        with pytest.raises(WrongResult, match=rf"element \(0, {place}\)"):
            check_output(trial, CPU, twice)


def test_a_half_precision_product_kept_in_float32_is_held_to_float32() -> None:
    problem = Matmul(32, 32, 64, "float16", "nn", "float32")
    trial = matmul_trial(problem, CPU, 0)
    assert hold(right, trial, CPU)[0] > 0
    with pytest.raises(WrongResult):
        hold(lambda a, b, c: np.copyto(c, product(a, b).astype(np.float16)), trial, CPU)


def test_the_message_names_case_backend_seed_error_and_limit() -> None:
    with pytest.raises(WrongResult) as caught:
        verify(kernel(), LlvmBackend(), FIXED, run=zero)
    message = str(caught.value)
    for part in ("step1_naive[default]", "96x130x80", "float32", "llvm", "seed 0", "worst error", "limit"):
        assert part in message
    assert "\n" not in message


@given(k=st.integers(1, 400), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_operands_rounded_to_tf32_are_within_its_tolerance_alone(k: int, seed: int) -> None:
    problem = Matmul(33, 17, k)

    def in_tf32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        c[...] = product(rounded_to_tf32(a), rounded_to_tf32(b))

    def dropped(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        c[...] = product(rounded_to_tf32(a)[:, 1:], rounded_to_tf32(b)[1:])

    error, limit = hold(in_tf32, matmul_trial(problem, CPU, seed, math="tf32"), CPU)
    assert limit < 100 * error  # not so wide that anything passes
    for run, math in ((in_tf32, "ieee"), (dropped, "tf32")):
        with pytest.raises(WrongResult):
            hold(run, matmul_trial(problem, CPU, seed, math=math), CPU)


def on_tensor_cores(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply as an H200's tensor cores do: 16 products at a time, cut off 25 bits below the largest exponent of them.

    And of the sum; a product's is that of its operands, a denormal's that of the smallest normal number.
    """
    sums, exponents = np.zeros((len(a), b.shape[1])), [np.frexp(np.maximum(abs(each), 2.0**-14))[1] for each in (a, b)]
    wide = [each.astype("float64") for each in (a, b)]
    for first in range(0, a.shape[1], 16):
        block = slice(first, first + 16)
        products = wide[0][:, block, None] * wide[1][None, block]
        both = np.where(products == 0, -999, exponents[0][:, block, None] + exponents[1][None, block]).max(1)
        unit = 2.0 ** (np.maximum(both - 1, np.where(sums == 0, -999, np.frexp(sums)[1])) - 26)
        sums = (np.trunc(products / unit[:, None]).sum(1) + np.trunc(sums / unit)) * unit
    return sums.astype("float32")


@pytest.mark.parametrize("k", [1, 7, 87, 1000])
def test_what_tensor_cores_cut_off_of_denormals_is_within_the_limit(k: int) -> None:
    """Of 16-bit denormals they cut off far more than of as small a product of normal numbers."""
    problem = Matmul(96, 96, k, "float16", "nn", "float32")
    trial = matmul_trial(problem, CPU, 5, SPECIAL)
    with np.errstate(invalid="ignore"):
        sums = np.where(np.isfinite(trial.reference), on_tensor_cores(*trial.operands.values()), trial.reference)
    check_output(trial, CPU, sums.astype("float32"))
    lost = np.where(abs(trial.reference) < 2.0**-14, 0.0, sums)  # as if denormal operands were flushed
    with pytest.raises(WrongResult, match="special values"):
        check_output(trial, CPU, lost.astype("float32"))


def rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """Values rounded to 11 bits, halves away from zero, as cvt.rna.tf32 does."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


@given(row=st.integers(0, 32), column=st.integers(0, 16), sign=st.sampled_from([-1, 1]), times=st.floats(1.5, 100))
@settings(max_examples=40, deadline=None)
def test_one_element_beyond_its_own_limit_is_enough(row: int, column: int, sign: int, times: float) -> None:
    trial = matmul_trial(Matmul(33, 17, 50), CPU, 0)
    output = product(*trial.operands.values())
    check_output(trial, CPU, output)
    output[row, column] = trial.reference[row, column] + sign * times * trial.limit[row, column]
    with pytest.raises(WrongResult, match=rf"element \({row}, {column}\) .* 1 of 561 are off"):
        check_output(trial, CPU, output)


@given(
    size=st.floats(1e-30, 6e4),
    dtype=st.sampled_from(DTYPES),
    sign=st.sampled_from([-1, 1]),
)
def test_half_a_unit_is_what_rounding_once_may_be_off(size: float, dtype: str, sign: int) -> None:
    kind = numpy_dtype(dtype)
    rounded = np.float64(np.asarray(sign * size).astype(kind))
    half = half_units(CPU, np.array([size]), dtype)[0]
    assert abs(rounded - sign * size) <= half
    following = np.float64(np.nextafter(kind.type(rounded), kind.type(np.inf)))
    assert abs(following - rounded) <= 4 * half


def test_large_products_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Matmul(70, 33, 40, "float16", "nt")
    whole_trial = matmul_trial(problem, CPU, 3, SPECIAL)
    monkeypatch.setattr(checker, "CHUNK", 300)
    pieces = matmul_trial(problem, CPU, 3, SPECIAL)
    for one, other in ((whole_trial.reference, pieces.reference), (whole_trial.limit, pieces.limit)):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    output = np.nan_to_num(pieces.reference, nan=np.nan, posinf=np.inf, neginf=-np.inf).astype(np.float16)
    check_output(pieces, CPU, output)
    output[65, 7] = 3
    with pytest.raises(WrongResult, match=r"element \(65, 7\) is 3, .* 1 of 2310 are off"):
        check_output(pieces, CPU, output)
