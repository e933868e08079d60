"""How batches of matrices are seen: as one product of more rows, as one batch, or copied first."""

from __future__ import annotations

from typing import Any

import pytest

from tensorir_ladder.torch_ops.batches import Batches
from tensorir_ladder.torch_ops.operands import Form, is_dense
from tensorir_ladder.torch_ops.short_reductions import reads_as_they_lie


def form(name: str, sizes: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: str = "float16") -> Form:
    """A form, contiguous unless strides say otherwise."""
    found, step = [], 1
    for size in sizes[::-1]:
        found.append(step)
        step *= size
    return Form(name, sizes, strides or tuple(found[::-1]), dtype)


def batches(a: Any, b: Any, out: Any = None) -> Batches:
    """Of sizes, or of sizes and strides."""
    a, b, out = (
        None if each is None else form(name, *(each if isinstance(each[0], tuple) else (each,)))
        for name, each in (("a", a), ("b", b), ("out", out))
    )
    return Batches.of(a, b, out, "float16")


@pytest.mark.parametrize(
    ("a", "b", "out", "seen"),
    [
        ((64, 32), (32, 16), None, (1, 64, "")),
        ((8, 64, 32), (32, 16), None, (1, 512, "")),
        ((8, 64, 32), (1, 32, 16), None, (1, 512, "")),
        ((8, 64, 32), ((8, 32, 16), (0, 16, 1)), None, (1, 512, "")),
        ((8, 64, 32), ((32, 16), (1, 32)), None, (1, 512, "")),
        ((2, 4, 64, 32), (2, 1, 32, 16), None, (2, 256, "")),
        ((2, 4, 64, 32), (2, 4, 32, 16), None, (8, 64, "")),
        ((2, 4, 64, 32), (32, 16), None, (1, 512, "")),
        ((64, 32), (8, 32, 16), None, (8, 64, "A")),
        ((3, 64, 32), (2, 1, 32, 16), None, (2, 192, "A")),
        ((1, 64, 32), (8, 32, 16), None, (8, 64, "A")),
        (((8, 64, 32), (0, 32, 1)), (8, 32, 16), None, (8, 64, "A")),
        (((8, 64, 32), (4096, 32, 1)), (32, 16), None, (8, 64, "B")),  # gaps between matrices
        ((8, 64, 32), (32, 16), ((8, 64, 16), (2048, 16, 1)), (8, 64, "B")),  # of the output
        (((8, 64, 32), (32, 256, 1)), (8, 32, 16), None, (8, 64, "")),  # heads of one batch's tokens
        (((8, 1, 33), (33, 33, 1)), (8, 33, 16), None, (8, 1, "")),
        ((2**19, 1024, 8), (8, 8), None, (2**19, 1024, "B")),  # more rows than indices of 31 bits
    ],
    ids=str,
)
def test_what_has_the_same_b_is_rows_and_all_else_a_batch(a: Any, b: Any, out: Any, seen: tuple) -> None:
    found = batches(a, b, out)
    assert not found.copies
    operands, rows = found.arranged()
    assert (operands.batch, operands.problem.m, operands.broadcast) == seen
    assert operands.shape == found.out.sizes
    assert rows.shape == (operands.problem.m, operands.columns)
    assert (operands.contiguous == rows) == (out is None)
    assert is_dense(operands.contiguous, 2)


@pytest.mark.parametrize(
    ("a", "b", "out", "copied"),
    [
        (((2, 3, 5, 64), (960, 64, 192, 1)), (2, 3, 64, 8), None, {"a": (960, 320, 64, 1)}),  # heads of two batches
        (((3, 5, 60), (335, 67, 1)), (3, 60, 8), None, {"a": (320, 64, 1)}),  # rows within 16 bytes
        ((2, 3, 5, 64), (3, 64, 8), None, {"b": (1536, 512, 8, 1)}),
        ((2, 3, 5, 64), ((2, 1, 64, 8), (576, 9, 9, 1)), None, {"b": (512, 512, 8, 1)}),  # one for all rows
        ((3, 5, 64), ((3, 64, 9), (585, 1, 65)), None, {"b": (576, 1, 64)}),  # as it lies, by columns
        ((3, 5, 64), (3, 64, 8), ((3, 5, 8), (45, 9, 1)), {"out": (40, 8, 1)}),
        ((3, 5, 64), (3, 64, 8), ((3, 5, 8), (8, 8, 1)), {"out": (40, 8, 1)}),  # rows of one in another
    ],
    ids=str,
)
def test_what_is_no_batch_is_copied(a: Any, b: Any, out: Any, copied: dict[str, tuple[int, ...]]) -> None:
    found = batches(a, b, out)
    assert {name: copy.strides for name, (_, copy) in found.copies.items()} == copied


def test_outputs_between_the_rows_of_each_other_are_stored_in_place() -> None:
    found = batches((8, 64, 32), (8, 32, 16), ((8, 64, 16), (16, 128, 1)))
    assert not found.copies
    _, rows = found.arranged()
    assert (rows.row_bytes, rows.batch_bytes) == (256, 32)


@pytest.mark.parametrize(
    ("a", "b", "taken"),
    [((3, 40, 63), (3, 63, 95), True), ((40, 63), (3, 63, 95), True), ((3, 40, 257), (3, 257, 95), False)],
)
def test_short_reductions_of_a_batch_are_read_as_they_lie(a: Any, b: Any, taken: bool) -> None:
    operands, out = batches(a, b).arranged()
    assert reads_as_they_lie(operands, out) == taken
