"""Quotients and remainders of sums whose small part carries nothing: what a vector's lanes must not seem to decide.

A convolution's reduction is one loop over taps and channels, so that its operand's place has quotients of that loop.
Where a k tile lies within one tap, all lanes of a vector have the same; TVM's simplification does not always find that,
and then loads a vector, and the condition that guards it, lane by lane, without cp.async.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, sym, tirx

from tensorir_ladder.schedules.inspection import is_constant, is_zero, without_carries
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


def divide_without_signs() -> tvm.transform.Pass:
    """Divide by numbers that only run time knows as the GPU does, where neither side is negative.

    ::

        before   blockIdx.x // columns         # rounds down: with a remainder, signs to compare, and a choice
        after    blockIdx.x / columns          # rounds to zero, which is the same

    A pass over lowered functions, whose parameters' extents are not negative. TVM would know as much of the latter, but
    no more once it has given a name to what they are part of.
    """
    return on_functions(_unsigned)


def _unsigned(function: tirx.PrimFunc) -> tirx.PrimFunc:
    analyzer = sym.Analyzer()

    def bind(var: tirx.Var, extent: ir.Expr) -> None:
        analyzer.bind(var, ir.Range.from_min_extent(tirx.const(0, str(var.ty.dtype)), extent), allow_override=True)

    def note_loop(loop: tirx.For) -> None:
        if is_zero(loop.min):
            bind(loop.loop_var, loop.extent)

    def note_thread(attribute: tirx.AttrStmt) -> None:
        if attribute.attr_key == "thread_extent":
            bind(attribute.node.var, attribute.value)

    def note_extent(var: tirx.Var) -> None:
        analyzer.update(var, sym.ConstIntBound(0, sym.ConstIntBound.POS_INF))

    def note_named(bound: tirx.Bind) -> None:
        if "int" in str(getattr(bound.value.ty, "dtype", "")) and analyzer.can_prove(bound.value >= 0):
            note_extent(bound.var)

    def divided(division: tirx.FloorDiv | tirx.FloorMod) -> ir.Expr:
        if is_constant(division.b) or not all(analyzer.can_prove(side >= 0) for side in (division.a, division.b)):
            return division
        truncated = tirx.truncdiv if isinstance(division, tirx.FloorDiv) else tirx.truncmod
        return truncated(division.a, division.b)

    for parameter in function.params:
        for extent in getattr(parameter, "shape", ()):
            tvm_ffi.structural_walk(extent, (tirx.Var, note_extent))
    noted = [(tirx.For, note_loop), (tirx.AttrStmt, note_thread), (tirx.Bind, note_named)]
    tvm_ffi.structural_walk(function.body, noted, order="pre")
    return function.with_body(tvm_ffi.structural_map(function.body, ((tirx.FloorDiv, tirx.FloorMod), divided)))


def _divided(function: tirx.PrimFunc) -> tirx.PrimFunc:
    analyzer = sym.Analyzer()

    def note(loop: tirx.For) -> None:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    tvm_ffi.structural_walk(function.body, (tirx.For, note))
    return function.with_body(without_carries(function.body, analyzer))
