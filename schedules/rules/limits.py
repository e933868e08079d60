"""Calls of a function whose extents run time brings: refused where 32-bit indices would wrap without a word."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from tensorir_ladder.schedules.inspection import DEVICE_SCOPES, is_constant
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS

PADDING = 4096  # indices that whole tiles and groups of them lead beyond an extent, at most
TILE = 256  # and that whole tiles alone do


def limit_indices(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a lowered function that refuses calls whose indices would not fit into 32 bits, when they are made.

    ::

        before   def f(A: (m, 4096), ...):                                           launch ...
        after    def f(A: (m, 4096), ...):  assert (m + 4096) * 4096 < 2**31, "...";  launch ...

    So many elements may each parameter and each workspace have whose extents are known at run time only, such an extent
    rounded up: kernels count whole tiles, and groups of them, before they compare with what there is. Of several such
    extents of a buffer the last two are rounded up to a tile; those before them count a batch. Functions whose extents
    are 64 bits wide count so as well, and are returned as they are.
    """
    allocated: list[tirx.Var] = []
    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, lambda made: allocated.append(made.buffer)))
    buffers = [p for p in function.params if hasattr(p.ty, "shape")] + [
        b for b in allocated if b.scope() in DEVICE_SCOPES
    ]
    checks = [limit_of(buffer) for buffer in buffers if _symbolic(buffer)]
    return function.with_body(tirx.SeqStmt([*checks, function.body])) if checks else function


def _symbolic(buffer: tirx.Var) -> list[tirx.Expr]:
    """List a buffer's extents that only run time knows, of those that are counted in 32 bits."""
    return [extent for extent in buffer.shape if not is_constant(extent) and str(extent.ty.dtype) == "int32"]


def limit_of(buffer: tirx.Var) -> tirx.AssertStmt:
    """Assert that a buffer's elements can be counted; no product of fewer of its extents passes 63 bits either."""
    elements, fits = tirx.const(1, "int64"), []
    several = sum(not is_constant(extent) for extent in buffer.shape) > 1
    for place, extent in enumerate(buffer.shape, start=-len(buffer.shape)):
        wide = tirx.Cast("int64", extent) if str(extent.ty.dtype) != "int64" else extent
        padding = PADDING if not several else TILE if place >= -2 else 0
        elements *= wide if is_constant(extent) else wide + padding
        fits.append(elements < MAX_ELEMENTS)
    said = f"{buffer.name}, padded to whole tiles, has {MAX_ELEMENTS} elements or more, beyond 32-bit indices"
    # In TVM 0.27 the constructor's first two parameters have each other's names.
    return tirx.AssertStmt(tirx.all(*fits), ir.StringImm("ValueError"), [ir.StringImm(said)])
