"""The kernel of a product of few rows, or of few columns: the schedule of :class:`rules.Decode`, which streams weights.

It reaches its operands by their addresses: they lie side by side, without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tvm import te, tirx

from tensorir_ladder.kernels.fused_epilogue import gelu
from tensorir_ladder.schedules.workloads import Matmul, accumulator_dtype

if TYPE_CHECKING:
    from tensorir_ladder.schedules.cost import Machine
    from tensorir_ladder.torch_ops.problem import Setting

MOST_ROWS = 8  # or columns, whichever are fewer


def streams(problem: Matmul) -> bool:
    """Tell whether a product has so few rows, or columns, that the other operand's elements are used once or twice."""
    return min(problem.m, problem.n) <= MOST_ROWS


def is_of_vectors(problem: Matmul) -> bool:
    """Tell whether two of a product's sizes are 1: it has an operand of one element, or one result."""
    return (problem.m, problem.n, problem.k).count(1) > 1


@dataclass(frozen=True)
class Streamed:
    """The choice of this kernel, beside those of :class:`.choice.Choice`."""

    PIPELINE: ClassVar[str] = "s_tir"

    def __str__(self) -> str:
        return "weights streamed to registers"

    def takes(self, _problem: Matmul, _machine: Machine, _batch: int = 1) -> bool:
        """Return True: weights are streamed in one way for all products."""
        return True

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Schedule and lower a product of few rows or columns; NotTaken for all others."""
        from tensorir_ladder.relax.rules import Decode, Rows  # here: most calls take other kernels

        rule = Rows() if is_of_vectors(problem) else Decode()
        return rule.schedule(finished_matmul(problem, setting), setting.machine.target)


def finished_matmul(problem: Matmul, setting: Setting) -> tirx.PrimFunc:
    """Write ``C = activation(alpha · A·B + bias)``, rounded once, as ``(A, B, C)`` or ``(A, B, bias, C)``.

    A batch is the first dimension of C, and of each operand that is not broadcast.
    """
    m, n, k, wide, finish = problem.m, problem.n, problem.k, accumulator_dtype(problem.dtype), setting.finish
    batch = (setting.batch,) if setting.batch > 1 else ()
    of_a, of_b = (() if name in setting.broadcast else batch for name in "AB")
    a = te.placeholder((*of_a, m, k), problem.dtype, name="A")
    b = te.placeholder((*of_b, *problem.b_shape), problem.dtype, name="B")
    bias = te.placeholder((n,), finish.bias, name="bias") if finish.bias else None
    inner = te.reduce_axis((0, k), name="k")

    def product(*place: tirx.Var) -> tirx.PrimExpr:
        *one, i, j = place
        row = (inner, j) if problem.layout == "nn" else (j, inner)
        left, right = a[(*one[: len(of_a)], i, inner)], b[(*one[: len(of_b)], *row)]
        return te.sum(left.astype(wide) * right.astype(wide), axis=inner)

    sums = te.compute((*batch, m, n), product, name="matmul")

    def finished(*place: tirx.Var) -> tirx.PrimExpr:
        value = sums[place]
        if finish.alpha != 1:
            value = value * tirx.const(finish.alpha, wide)
        if bias is not None:
            value = value + bias[place[-1]].astype(wide)
        return _activated(value, finish.activation, wide).astype(problem.out_dtype)

    c = te.compute((*batch, m, n), finished, name="C")
    return te.create_prim_func([a, b, *([] if bias is None else [bias]), c])


def _activated(x: tirx.PrimExpr, activation: str, dtype: str) -> tirx.PrimExpr:
    """Write what :data:`kernels.fused_epilogue.ACTIVATIONS` has as CUDA: NaN passes through each."""
    zero, one = (tirx.const(value, dtype) for value in (0.0, 1.0))
    if activation == "relu":
        return tirx.Select(x < zero, zero, x)
    if activation == "gelu":
        return gelu(x)
    if activation == "silu":
        return x / (one + te.exp(-x))
    return x
