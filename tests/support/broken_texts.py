"""Kernels whose generated text is broken on purpose: the emulator has to say so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tensorir_ladder.emulator import EmulatedProgram, KernelFault
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.lowering import Generated
from tensorir_ladder.schedules.workloads import Matmul


def hold_caught(
    generated: Generated, change: Callable[[str], str], problem: Matmul, fault: str, right: int, orders: int
) -> None:
    """Run a product's kernel in ``right`` orders of threads, and its changed text until one order of many tells.

    What comes too late does so in some orders only. ``fault`` is a pattern of what is said.
    """
    draw = np.random.default_rng(7)
    a, b = (draw.integers(-3, 4, shape).astype(np.float16) for shape in ((problem.m, problem.k), problem.b_shape))
    columns = b.T if problem.layout == "nt" else b
    wanted = (a.astype(np.float64) @ columns.astype(np.float64)).astype(np.float16)

    def run(text: str, orders: int) -> None:
        program = EmulatedProgram("changed", text, (launch_plan(generated),), ("A", "B", "C"), operands=("A", "B"))
        for seed in range(orders):
            c = np.full(wanted.shape, np.nan, np.float16)
            program(a, b, c, seed=seed)
            np.testing.assert_array_equal(c, wanted)

    changed = change(generated.cuda)
    assert changed != generated.cuda
    run(generated.cuda, right)
    with pytest.raises((KernelFault, AssertionError), match=fault):
        run(changed, orders)
