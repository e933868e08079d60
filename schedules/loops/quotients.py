"""Quotients and remainders of sums whose small part carries nothing: what a vector's lanes must not seem to decide.

A convolution's reduction is one loop over taps and channels, so that its operand's place has quotients of that loop.
Where a k tile lies within one tap, all lanes of a vector have the same; TVM's simplification does not always find that,
and then loads a vector, and the condition that guards it, lane by lane, without cp.async.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, sym, tirx

from tensorir_ladder.schedules.passes import on_functions


def divide_without_carries() -> tvm.transform.Pass:
    """Leave the part of a sum that cannot carry out of its quotients, and beside its remainders.

    ::

        before   (k_0 * 64 + lane) % 384 // 128        # of lane < 64
        after    k_0 % 6 // 2
        before   (k_0 * 64 + lane) % 384
        after    k_0 % 6 * 64 + lane

    A pass over functions whose blocks are opaque: ranges are those of loops.
    """
    return on_functions(_divided)


def without_carries(value: Any, analyzer: sym.Analyzer) -> Any:
    """Do the same to one expression or statement, by the ranges that ``analyzer`` knows."""

    def quotient(found: tirx.FloorDiv) -> ir.Expr:
        parts = _parts(found, analyzer)
        return found if parts is None else parts[0] // (int(found.b) // parts[2])

    def remainder(found: tirx.FloorMod) -> ir.Expr:
        parts = _parts(found, analyzer)
        return found if parts is None else parts[0] % (int(found.b) // parts[2]) * parts[2] + parts[1]

    return tvm_ffi.structural_map(value, [(tirx.FloorDiv, quotient), (tirx.FloorMod, remainder)])


def _divided(function: tirx.PrimFunc) -> tirx.PrimFunc:
    analyzer = sym.Analyzer()

    def note(loop: tirx.For) -> None:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    tvm_ffi.structural_walk(function.body, (tirx.For, note))
    return function.with_body(without_carries(function.body, analyzer))


def _parts(found: tirx.FloorDiv | tirx.FloorMod, analyzer: sym.Analyzer) -> tuple[ir.Expr, ir.Expr, int] | None:
    """Write what is divided as ``high * step + low``, where ``step`` divides the divisor and ``low`` is less than it.

    None where there is no such form.
    """
    if not isinstance(found.b, tirx.IntImm) or int(found.b) < 1:
        return None
    divisor, terms = int(found.b), _terms(found.a)
    for step in sorted({math.gcd(factor, divisor) for _, factor in terms} - {1}, reverse=True):
        high = [term * (factor // step) for term, factor in terms if factor % step == 0]
        low = [term * factor for term, factor in terms if factor % step]
        if high and (not low or analyzer.can_prove(tirx.all(sum(low) >= 0, sum(low) < step))):
            return sum(high[1:], high[0]), sum(low), step
    return None


def _terms(value: ir.Expr, factor: int = 1) -> list[tuple[ir.Expr, int]]:
    """List the terms of a sum, each with its constant factor."""
    match value:
        case tirx.Add():
            return [*_terms(value.a, factor), *_terms(value.b, factor)]
        case tirx.Mul() if isinstance(value.b, tirx.IntImm):
            return _terms(value.a, factor * int(value.b))
        case tirx.IntImm():
            return [(tirx.const(1, str(value.ty)), factor * int(value))]
        case _:
            return [(value, factor)]
