"""Quotients and remainders without carries: the same values, and free of what cannot decide them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tensorir_ladder.schedules.loops.quotients import divide_without_carries, divide_without_signs


def table(outer: int, inner: int, formula: str, *constants: int) -> tirx.PrimFunc:
    """A function that writes a formula of two loops' variables for each of their values."""
    make = {
        "tap": lambda x, y: (x * constants[0] + y) % constants[1] // constants[2],
        "place": lambda x, y: (x * constants[0] + y + constants[1]) % constants[2],
        "sums": lambda x, y: (y + x * constants[0] + (x % 3) * constants[1]) // constants[2] % constants[3],
        "less": lambda x, y: (x * constants[0] - y) // constants[1],
    }[formula]

    @T.prim_func(s_tir=True)
    def main(out: T.Buffer((outer, inner), "int32")):
        for x, y in T.grid(outer, inner):
            out[x, y] = make(x, y)

    return main


def values(function: tirx.PrimFunc, shape: tuple[int, int]) -> np.ndarray:
    """What the function writes."""
    out = tvm.runtime.tensor(np.full(shape, -77, "int32"))
    tvm.compile(tvm.IRModule({"main": function}), "llvm")["main"](out)
    return out.numpy()


def mentioned(function: tirx.PrimFunc) -> set[str]:
    """The variables of what it stores."""
    stored: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, stored.append))
    names: list[str] = []
    tvm_ffi.structural_walk(stored[0].value, (tirx.Var, lambda var: names.append(var.name)))
    return set(names)


@pytest.mark.parametrize(
    ("outer", "inner", "formula", "constants", "left"),
    [
        (18, 64, "tap", (64, 384, 128), {"x"}),
        (18, 64, "tap", (64, 192, 64), {"x"}),
        (18, 65, "tap", (64, 384, 128), {"x", "y"}),  # a lane that carries
        (18, 64, "place", (64, 0, 384), {"x", "y"}),
        (18, 56, "place", (64, 8, 384), {"x", "y"}),
        (18, 56, "place", (64, 320, 384), {"x", "y"}),
        (12, 32, "sums", (64, 32, 128, 5), {"x"}),
        (12, 33, "sums", (64, 32, 128, 5), {"x", "y"}),
        (9, 8, "less", (8, 16), {"x", "y"}),  # of less than nothing
    ],
)
def test_values_stay_and_what_cannot_carry_goes(
    outer: int, inner: int, formula: str, constants: tuple[int, ...], left: set[str]
) -> None:
    before = table(outer, inner, formula, *constants)
    after = divide_without_carries()(tvm.IRModule({"main": before}))["main"]
    assert (values(after, (outer, inner)) == values(before, (outer, inner))).all()
    assert mentioned(after) == left


@pytest.mark.parametrize(("first", "truncated"), [(0, True), (-7, False)])
def test_signs_are_left_out_where_there_are_none(first: int, truncated: bool) -> None:
    @T.prim_func(s_tir=True)
    def main(out_handle: T.handle):
        n = T.int32()
        out = T.match_buffer(out_handle, (8, n), "int32")
        for x, y in T.grid(8, n):
            out[x, y] = (x * n + y + first) // n * 100 + (x * n + y + first) % n

    made = divide_without_signs()(tvm.IRModule({"main": main}))["main"]
    found: list[object] = []
    tvm_ffi.structural_walk(made.body, ((tirx.Div, tirx.Mod), found.append))
    assert len(found) == (2 if truncated else 0)
    assert (values(made, (8, 5)) == values(main, (8, 5))).all()
