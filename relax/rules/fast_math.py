"""Powers, sines and cosines written so that they are right in CUDA that is compiled with ``--use_fast_math``.

TVM compiles with that flag. It makes ``powf(x, y)`` ``exp2(y * log2(x))``, which is NaN for every negative ``x`` and
loses ``y * log2(x)`` units in the last place; ``sinf`` and ``cosf`` become the hardware's, which round the angle in
turns: at 4096 radians, where rotary embeddings are, they are off by 2e-4.
"""

from __future__ import annotations

import math

import tvm_ffi
from tvm import ir, tirx

MOST_FACTORS = 4  # of a power written as a product: each is the base once more, with all that is computed for it
TURN = (
    201 / 32,
    253 / 2**17,
    2 * math.pi - 201 / 32 - 253 / 2**17,
)  # 2 pi; 8 bits, exact times 65,536


def survive_fast_math(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose powers, sines and cosines are right for every operand under ``--use_fast_math``.

    ::

        before   pow(x, 2)   pow(x, -0.5)   pow(x, y)                               sin(x)
        after    x * x       rsqrt(x)       float32(pow(float64(x), float64(y)))    sin(x - n * 2 pi),  n whole

    Whole and half powers of up to 4 factors are products and roots, in float32 for 16-bit floats; like PyTorch's, the
    root of -infinity is NaN and that of -0 is -0. Other powers are computed in float64, which the flag leaves alone,
    and are what C's ``pow`` gives: for negative bases, zeros, infinities and NaN. Angles are right to 5e-7 up to
    400,000 radians. What is in float64 stays, except for products and roots.
    """

    def changed(call: ir.Call) -> ir.Expr:
        name, dtype = getattr(call.op, "name", ""), str(call.ty.dtype)
        if name == "tirx.pow":
            base, exponent = call.args
            return _power(base, exponent, dtype)
        if name in ("tirx.sin", "tirx.cos") and dtype == "float32":
            return ir.Call(call.op, [_within_a_turn(call.args[0])], ret_ty=call.ty)
        return call

    body = tvm_ffi.structural_map(function.body, (ir.Call, changed))
    return function if body.same_as(function.body) else function.with_body(body)


def _power(base: ir.Expr, exponent: ir.Expr, dtype: str) -> ir.Expr:
    known = _number(exponent)
    wide = "float64" if dtype == "float64" else "float32"
    if known is not None and (2 * known).is_integer() and abs(known) <= MOST_FACTORS:
        return _cast(_product_and_root(_cast(base, wide), known, wide), dtype)
    if dtype == "float64":
        return tirx.pow(base, exponent)
    precise = [_cast(_cast(operand, "float32"), "float64") for operand in (base, exponent)]
    return _cast(_cast(tirx.pow(*precise), "float32"), dtype)


def _product_and_root(base: ir.Expr, exponent: float, dtype: str) -> ir.Expr:
    """Write a power as factors: those of a negative one are reciprocals, none of which overflows before the result."""
    whole = int(abs(exponent))
    one = tirx.const(1, dtype)
    factors = [base if exponent > 0 else one / base] * whole
    if whole != abs(exponent):
        factors.append(tirx.sqrt(base) if exponent > 0 else tirx.rsqrt(base))
    while len(factors) > 1:  # by pairs, so that equal ones are computed once
        pairs = [left * right for left, right in zip(factors[::2], factors[1::2])]
        factors = pairs + factors[2 * len(pairs) :]
    return factors[0] if factors else one


def _within_a_turn(angle: ir.Expr) -> ir.Expr:
    turns = tirx.floor(angle * tirx.const(1 / (2 * math.pi), "float32") + tirx.const(0.5, "float32"))
    for part in TURN:
        angle = angle - turns * tirx.const(part, "float32")
    return angle


def _number(exponent: ir.Expr) -> float | None:
    """Return what a constant is, through conversions; None for anything else."""
    while isinstance(exponent, tirx.Cast):
        exponent = exponent.value
    return float(exponent.value) if isinstance(exponent, (tirx.IntImm, tirx.FloatImm)) else None


def _cast(expression: ir.Expr, dtype: str) -> ir.Expr:
    return expression if str(expression.ty.dtype) == dtype else tirx.Cast(dtype, expression)
