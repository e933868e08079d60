"""Quotients and remainders of sums whose small part carries nothing: what a vector's lanes must not seem to decide.

A convolution's reduction is one loop over taps and channels, so that its operand's place has quotients of that loop.
Where a k tile lies within one tap, all lanes of a vector have the same; TVM's simplification does not always find that,
and then loads a vector, and the condition that guards it, lane by lane, without cp.async.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, sym, tirx

from tensorir_ladder.schedules.inspection import without_carries
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


def _divided(function: tirx.PrimFunc) -> tirx.PrimFunc:
    analyzer = sym.Analyzer()

    def note(loop: tirx.For) -> None:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    tvm_ffi.structural_walk(function.body, (tirx.For, note))
    return function.with_body(without_carries(function.body, analyzer))
