"""Depthwise convolutions with channels last: right at any extents, strides and edges, and what is left to others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
from tvm import relax, tirx

from support.functions import check_function
from support.relax_modules import functions_of, made_of, numbered
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.relax import fuse_operators
from tensorir_ladder.relax.rules.depthwise import Depthwise
from tensorir_ladder.relax.rules.rule import NotTaken

TARGET = machine_for("sm_90a").target()
Finish = Callable[[relax.Expr, relax.Expr, relax.Expr], relax.Expr]


def sums(y: relax.Expr, _bias: relax.Expr, _x: relax.Expr) -> relax.Expr:
    return y


def clipped(y: relax.Expr, bias: relax.Expr, _x: relax.Expr) -> relax.Expr:
    return relax.op.clip(relax.op.add(y, bias), 0, 6)


def residual(y: relax.Expr, bias: relax.Expr, x: relax.Expr) -> relax.Expr:
    return relax.op.nn.silu(relax.op.add(relax.op.add(y, bias), x))


def convolution(
    x: tuple[int | str, ...],
    window: tuple[int, ...],
    finish: Finish = clipped,
    dtype: str = "float16",
    filters: int = 0,
    **attrs: object,
) -> tirx.PrimFunc:
    """The function that the pipeline makes of a convolution of each channel, with channels last."""
    channels = int(x[-1])
    space = {1: "W", 2: "HW"}[len(window)]
    operator = getattr(relax.op.nn, f"conv{len(window)}d")
    layouts = {"data_layout": f"N{space}C", "kernel_layout": f"{space}IO", "groups": channels}
    filters = filters or channels
    shapes = {"x": (x, dtype), "w": ((*window, 1, filters), dtype), "b": ((filters,), dtype)}
    mod = made_of(shapes, lambda x, w, b: finish(operator(x, w, **layouts, **attrs), b, x))
    (function,) = functions_of(fuse_operators(TARGET)(mod)).values()
    return function


CASES: dict[str, Callable[[], tirx.PrimFunc]] = {
    "3x3": lambda: convolution((2, 9, 12, 16), (3, 3), padding=1),
    "7x7, residual": lambda: convolution((2, 9, 14, 24), (7, 7), residual, padding=3),
    "5x5, stride 2": lambda: convolution((2, 13, 11, 8), (5, 5), sums, padding=2, strides=2),
    "dilated": lambda: convolution((1, 12, 17, 20), (3, 3), padding=2, dilation=2),
    "no edges": lambda: convolution((1, 8, 13, 40), (3, 2), sums),
    "one edge, 3 pixels a step": lambda: convolution((1, 14, 19, 6), (3, 3), padding=(0, 2, 1, 0), strides=(1, 3)),
    "odd channels": lambda: convolution((2, 6, 7, 37), (3, 3), padding=1),
    "bfloat16": lambda: convolution((2, 7, 9, 18), (3, 3), dtype="bfloat16", padding=1),
    "float32": lambda: convolution((2, 7, 9, 12), (3, 3), residual, "float32", padding=1),
    "any batch": lambda: convolution(("n", 7, 9, 12), (3, 3), padding=1),
    "window of one row": lambda: convolution((2, 6, 11, 16), (1, 5), padding=(0, 2)),
    "one axis": lambda: convolution((3, 19, 16), (4,), padding=(1, 2)),
    "many channels": lambda: convolution((1, 4, 5, 272), (3, 3), padding=1),
}


@pytest.mark.emulator
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_function(case: str) -> None:
    written = CASES[case]()
    made = Depthwise().take(written, TARGET)
    for batch in (1, 3) if case == "any batch" else (0,):
        assert check_function(written, made, TARGET, {"n": batch} if batch else None).kernels


OTHERS: dict[str, Callable[[], tirx.PrimFunc]] = {
    "two filters a channel": lambda: convolution((2, 9, 12, 16), (3, 3), sums, filters=32),
    "strides and dilation": lambda: convolution((2, 19, 22, 16), (3, 3), strides=2, dilation=2),
    "window of one column": lambda: convolution((2, 11, 6, 16), (5, 1), padding=(2, 0)),
    "any width": lambda: convolution((2, 9, "w", 16), (3, 3), padding=1),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_are_left(case: str) -> None:
    with pytest.raises(NotTaken):
        Depthwise().take(OTHERS[case](), TARGET)


def test_images_and_results_move_in_vectors() -> None:
    written = numbered(convolution((32, 56, 56, 144), (3, 3), padding=1))
    made = Depthwise().take(written.with_attr("global_symbol", "main"), TARGET)
    *_, text = generate(tvm.IRModule({"main": made}), TARGET, "s_tir").cuda.split("__global__")
    assert "half4" in text or "uint4" in text
    assert "condval" not in text
