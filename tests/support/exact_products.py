"""Products whose operands are small whole numbers: their sums are exact, in whatever order they are added."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.schedules.workloads import Matmul

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def drawn(problem: Matmul, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw both operands."""
    numbers = np.random.default_rng(seed)
    shapes = (problem.m, problem.k), problem.b_shape
    a, b = (numbers.integers(-3, 4, shape).astype(NUMPY[problem.dtype]) for shape in shapes)
    return a, b


def expected(problem: Matmul, seed: int = 0) -> np.ndarray:
    """Multiply them by numpy, and round once."""
    a, b = (each.astype(np.float64) for each in drawn(problem, seed))
    return (a @ (b if problem.layout == "nn" else b.T)).astype(NUMPY[problem.out_dtype])


def hold_caught(
    run: Callable[[str], np.ndarray], wanted: np.ndarray, text: str, broken: str, instead: str, fault: str
) -> None:
    """Break a kernel's text, and hold that the emulator names the ``fault``, or, of none, that the product is wrong."""
    assert broken in text
    if fault:
        with pytest.raises(KernelFault, match=fault):
            run(text.replace(broken, instead))
    else:
        assert not np.array_equal(run(text.replace(broken, instead)), wanted)
