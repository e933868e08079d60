"""Operators of Relax as functions: those that no rule schedules as TVM writes them, and activations in float32."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

from tvm import ir, relax, te, tirx

from tensorir_ladder.kernels.fused_epilogue import gelu
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import PTX_TYPES

WIDE = "float32"
Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def legalizations() -> dict[str, Legalize]:
    """Return what ``relax.transform.LegalizeOps`` is given in the place of TVM's own."""
    pools = {f"relax.nn.adaptive_avg_pool{axes}d": _adaptive_pool for axes in (1, 2, 3)}
    return pools | dict.fromkeys(ACTIVATIONS, _activation)


def _activation(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Write an activation of 16-bit floats in float32, rounded once.

    ::

        before   y = x * (0.5h + half(erf(float(x * 0.7h))) * 0.5h)       # of halves, five times rounded
        after    y = half(gelu(float(x)))

    TVM's are of the operand's dtype in each step. Other dtypes, and operands of unknown shape, are TVM's.
    """
    x = call.args[0]
    if str(x.ty.dtype) not in PTX_TYPES or not isinstance(x.ty.shape, relax.ShapeExpr):
        return call.op.get_attr("FLegalize")(builder, call)
    activation, name = ACTIVATIONS[str(call.op.name)], str(call.op.name).rsplit(".", 1)[-1]

    def computed(x: te.Tensor) -> te.Tensor:
        def element(*index: tirx.Var) -> ir.Expr:
            return activation(x(*index).astype(WIDE)).astype(x.dtype)

        return te.compute(x.shape, element, name=name)

    return builder.call_te(computed, x, primfunc_name_hint=name)


def _gelu_tanh(x: ir.Expr) -> ir.Expr:
    """Write x / (1 + exp(-2 u)), which is x (1 + tanh u) / 2."""
    return x / (_wide(1) + tirx.exp(_wide(-2 * (2 / math.pi) ** 0.5) * (x + _wide(0.044715) * x * x * x)))


def _silu(x: ir.Expr) -> ir.Expr:
    return x / (_wide(1) + tirx.exp(-x))


def _sigmoid(x: ir.Expr) -> ir.Expr:
    return _wide(1) / (_wide(1) + tirx.exp(-x))


def _wide(number: float) -> ir.Expr:
    return tirx.const(number, WIDE)


ACTIVATIONS = {
    "relax.nn.gelu": gelu,
    "relax.nn.gelu_tanh": _gelu_tanh,
    "relax.nn.silu": _silu,
    "relax.sigmoid": _sigmoid,
}


def _adaptive_pool(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Write means of windows of different lengths as sums over the longest one, each masked to its own.

    ::

        before   for i, k in range(length(i)):   s[i] += x[start(i) + k]
        after    for i, k in range(longest):     s[i] += x[start(i) + k] if k < length(i) else 0

    The bounds of TVM's loop depend on ``i``, which no rule, ours or dlight's, schedules. Windows of one length, and
    those of extents that only run time knows, are TVM's.
    """
    layout = str(call.attrs.layout)
    axes = [place for place, name in enumerate(layout) if name not in "NC"]
    extents = [call.args[0].ty.shape[axis] for axis in axes]
    sizes = extents if call.attrs.output_size is None else [*call.attrs.output_size]
    plain = layout == str(call.attrs.out_layout) and all(map(is_constant, extents)) and len(layout) == len(axes) + 2
    if not plain or all(int(extent) % int(size) == 0 for extent, size in zip(extents, sizes)):
        return call.op.get_attr("FLegalize")(builder, call)
    spans = {axis: (int(extent), int(size)) for axis, extent, size in zip(axes, extents, sizes)}

    def pooled(x: te.Tensor) -> te.Tensor:
        return _masked_means(x, spans)

    return builder.call_te(pooled, call.args[0], primfunc_name_hint=str(call.op.name).rsplit(".", 1)[-1])


def _masked_means(x: te.Tensor, spans: dict[int, tuple[int, int]]) -> te.Tensor:
    """Compute the mean of each window; ``spans`` has the extent and the number of windows of their axes."""
    shape = [spans[axis][1] if axis in spans else extent for axis, extent in enumerate(x.shape)]
    longest = {axis: max(_end(i, *span) - _start(i, *span) for i in range(span[1])) for axis, span in spans.items()}
    steps = {axis: te.reduce_axis((0, length), name=f"k{axis}") for axis, length in longest.items()}

    def lengths(index: tuple[tirx.Var, ...]) -> dict[int, ir.Expr]:
        return {axis: _end(index[axis], *span) - _start(index[axis], *span) for axis, span in spans.items()}

    def total(*index: tirx.Var) -> ir.Expr:
        own = lengths(index)
        inside = functools.reduce(tirx.And, [steps[axis].var < own[axis] for axis in spans])
        place = [
            _start(one, *spans[axis]) + steps[axis].var if axis in spans else one for axis, one in enumerate(index)
        ]
        return te.sum(tirx.if_then_else(inside, x(*place), tirx.const(0, x.dtype)), axis=[*steps.values()])

    sums = te.compute(shape, total, name="adaptive_pool_sum")

    def mean(*index: tirx.Var) -> ir.Expr:
        return sums(*index) / functools.reduce(operator.mul, lengths(index).values()).astype(x.dtype)

    return te.compute(shape, mean, name="adaptive_pool_avg")


def _start(window: ir.Expr | int, extent: int, windows: int) -> ir.Expr | int:
    return window * extent // windows


def _end(window: ir.Expr | int, extent: int, windows: int) -> ir.Expr | int:
    return ((window + 1) * extent + windows - 1) // windows
