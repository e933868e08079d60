"""Copies of rows: every element arrives, and nothing is written between rows that are somebody's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, MatrixRows, PlannedNumber
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.kernels.copied_rows import Job, blocks_of, copied_rows, cutting, numbers_of, padding
from tensorir_ladder.torch_ops.operands import padded

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
NAMES = ("source_0", "target_0", "source_1", "target_1")
POISON, UNTOUCHED = 0x7FFF, 0x5A5A


@cache
def lowered() -> Generated:
    """The kernel's text and launch, for matrices of all sizes."""
    return generate(tvm.IRModule({"main": copied_rows()}), TARGET, "tirx")


def plan_of(jobs: Sequence[Job]) -> LaunchPlan:
    """The launch of these jobs."""
    plan, numbers = launch_plan(lowered()), numbers_of(jobs)
    filled = [numbers[each.buffer] if isinstance(each, PlannedNumber) else each for each in plan.parameters]
    return replace(plan, parameters=tuple(filled), grid=(blocks_of(jobs), 1, 1))


def run(jobs: Sequence[Job], arrays: Sequence[np.ndarray], seed: int = 0) -> None:
    """Copy from and to these arrays in the emulator, which watches their edges."""
    given = [*arrays, *(np.zeros(8, np.uint16) for _ in range(4 - len(arrays)))]
    program = EmulatedProgram(
        "copies", lowered().cuda, (plan_of(jobs),), NAMES, operands=[name for name in NAMES if "source" in name]
    )
    program(*given, seed=seed)


def drawn(seed: int, units: int) -> np.ndarray:
    """So many units, drawn."""
    return np.random.default_rng(seed).integers(0, 2**15 - 1, units).astype(np.uint16)


SHAPES = [(1, 1), (5, 1), (40, 63), (2, 65), (33, 1001), (257, 17), (700, 3)]

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_padded(shape: tuple[int, int]) -> None:
    rows, columns = shape
    source = MatrixRows(rows, columns, columns * 2)
    target = padded(source, 2)
    given, room = drawn(0, rows * columns), np.full(rows * target.row_bytes // 2, UNTOUCHED, np.uint16)
    run([padding(source, target, 2)], [given, room])
    np.testing.assert_array_equal(room.reshape(rows, -1)[:, :columns], given.reshape(rows, columns))


def test_two_matrices_are_padded_by_one_launch() -> None:
    matrices = [MatrixRows(40, 63, 126), MatrixRows(63, 1295, 2590)]
    rooms = [padded(each, 2) for each in matrices]
    given = [drawn(seed, each.rows * each.columns) for seed, each in enumerate(matrices)]
    made = [np.full(each.rows * each.row_bytes // 2, UNTOUCHED, np.uint16) for each in rooms]
    jobs = [padding(source, target, 2) for source, target in zip(matrices, rooms)]
    assert jobs[0].blocks > 1
    for seed in range(3):
        run(jobs, [given[0], made[0], given[1], made[1]], seed)
        for each, values, room in zip(matrices, given, made):
            found = room.reshape(each.rows, -1)[:, : each.columns]
            np.testing.assert_array_equal(found, values.reshape(each.shape))
            room[:] = UNTOUCHED


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_cut(shape: tuple[int, int], gap: int, itemsize: int) -> None:
    """What is between the room's rows does not arrive, and nothing is written between the output's."""
    rows, columns = shape
    row_bytes = columns * itemsize if not gap else -(-(columns + gap) * itemsize // 16) * 16
    target = MatrixRows(rows, columns, row_bytes)
    source, units = padded(target, itemsize), columns * itemsize // 2
    room = np.full((rows, source.row_bytes // 2), POISON, np.uint16)
    room[:, :units] = drawn(1, rows * units).reshape(rows, units)
    out = np.full((rows, row_bytes // 2), UNTOUCHED, np.uint16)
    flat = out.reshape(-1)
    run([cutting(source, target, itemsize)], [room.reshape(-1), flat])
    found = flat.reshape(rows, -1)
    np.testing.assert_array_equal(found[:, :units], room[:, :units])
    assert (found[:, units:] == UNTOUCHED).all()


@pytest.mark.parametrize("begins", [1, 3, 8, 13])
def test_addresses_may_be_any(begins: int) -> None:
    """Of a source or a target that begins within 16 bytes: what is before it is neither read nor written."""
    rows, columns = 21, 75
    dense = MatrixRows(rows, columns, columns * 2)
    room = padded(dense, 2)
    given, made = drawn(2, rows * columns), np.full(rows * room.row_bytes // 2, POISON, np.uint16)
    _run_from(padding(dense, room, 2), (given, made), (begins, 0))
    np.testing.assert_array_equal(made.reshape(rows, -1)[:, :columns], given.reshape(rows, columns))
    back = np.full(rows * columns, UNTOUCHED, np.uint16)
    _run_from(cutting(room, dense, 2), (made, back), (0, begins))
    np.testing.assert_array_equal(back, given)


def _run_from(job: Job, arrays: tuple[np.ndarray, np.ndarray], begins: tuple[int, int]) -> None:
    """Copy where the arrays lie so many units into their memory, whose first units must stay as they are."""
    lain = [np.concatenate([np.full(first, UNTOUCHED, np.uint16), array]) for array, first in zip(arrays, begins)]
    text = lowered().cuda
    for name, first in zip(("source", "target"), begins):
        text = text.replace(f"&({name}_0_ptr[0])", f"&({name}_0_ptr[{first}])")
    program = EmulatedProgram("copies", text, (plan_of([job]),), NAMES, operands=("source_0", "source_1"))
    program(*lain, *(np.zeros(8, np.uint16) for _ in range(2)))
    for array, made, first in zip(arrays, lain, begins):
        assert (made[:first] == UNTOUCHED).all()
        array[:] = made[first:]
