"""Calls of a function whose extents run time brings: refused where 32-bit indices would wrap without a word."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm_ffi
from tvm import ir, tirx

from tensorir_ladder.schedules.inspection import DEVICE_SCOPES, is_constant
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS

PADDING = 4096  # indices that whole tiles and groups of them lead beyond an extent, at most
TILE = 256  # and that whole tiles alone do
LONGEST_ROW = 2**18  # elements behind an extent, of several further extents, beyond which they are rows as well


def limit_indices(function: tirx.PrimFunc, numbered: bool = True) -> tirx.PrimFunc:
    """Return a lowered function that refuses calls whose indices would not fit into 32 bits, when they are made.

    ::

        before   def f(A: (m, 4096), ...):                                           launch ...
        after    def f(A: (m, 4096), ...):  assert (m + 4096) * 4096 < 2**31, "...";  launch ...

    So many elements may each parameter and each workspace have whose extents are known at run time only, such an extent
    rounded up: kernels count whole tiles, and groups of them, before they compare with what there is. An extent
    in front of rows, as images of 197 rows of 4096 elements have, is rounded up by as many as have these rows. Of
    several such extents of a buffer the last two are rounded up to a tile; those before them count a batch. Functions
    whose extents are 64 bits wide count so as well, and are returned as they are. ``numbered`` is :func:`limit_of`'s.
    """
    allocated: list[tirx.Var] = []
    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, lambda made: allocated.append(made.buffer)))
    buffers = [p for p in function.params if hasattr(p.ty, "shape")] + [
        b for b in allocated if b.scope() in DEVICE_SCOPES
    ]
    checks = [limit_of(buffer, numbered) for buffer in buffers if _symbolic(buffer)]
    return function.with_body(tirx.SeqStmt([*checks, function.body])) if checks else function


def _symbolic(buffer: tirx.Var) -> list[tirx.Expr]:
    """List a buffer's extents that only run time knows, of those that are counted in 32 bits."""
    return [extent for extent in buffer.shape if not is_constant(extent) and str(extent.ty.dtype) == "int32"]


def limit_of(buffer: tirx.Var, numbered: bool = True) -> tirx.AssertStmt:
    """Assert that a buffer's elements can be counted; no product of fewer of its extents passes 63 bits either.

    ``numbered``: kernels number elements, and compare these numbers. Those that compare rows and columns apart reach
    the last element that 32 bits number, whatever a tile's places beyond it would be: nothing is read or written there.
    So several extents that are known at run time only, the last among them and none of them 1, are counted as they are:
    rows and columns are then at most half as many as elements, and have room for whole tiles.
    """
    symbolic = [extent for extent in buffer.shape if not is_constant(extent)]
    several = len(symbolic) > 1
    places = range(-len(buffer.shape), 0)
    paddings = [(TILE if place >= -2 else 0) if several else _padding(buffer.shape[place:][1:]) for place in places]
    fits = _counted(buffer, paddings, MAX_ELEMENTS - 1)
    if several and not numbered and not is_constant(buffer.shape[-1]):
        exact = _counted(buffer, [0] * len(buffer.shape), MAX_ELEMENTS)
        fits = tirx.any(fits, tirx.all(exact, *(extent > 1 for extent in symbolic)))
    said = f"{buffer.name}, padded to whole tiles, has {MAX_ELEMENTS} elements or more, beyond 32-bit indices"
    # In TVM 0.27 the constructor's first two parameters have each other's names.
    return tirx.AssertStmt(fits, ir.StringImm("ValueError"), [ir.StringImm(said)])


def _padding(behind: Sequence[tirx.Expr]) -> int:
    """Return how far whole tiles lead beyond an extent, by the extents behind it; symbolic ones stand alone."""
    if not all(map(is_constant, behind)):
        return PADDING
    rows, elements = 1, math.prod(map(int, behind))
    for extent in behind[:-1]:
        if elements <= LONGEST_ROW:
            break
        rows, elements = rows * int(extent), elements // int(extent)
    return -(-PADDING // rows)


def _counted(buffer: tirx.Var, paddings: Sequence[int], most: int) -> tirx.Expr:
    """Return whether a buffer has at most so many elements, each symbolic extent padded."""
    elements, fits = tirx.const(1, "int64"), []
    for extent, padding in zip(buffer.shape, paddings):
        wide = tirx.Cast("int64", extent) if str(extent.ty.dtype) != "int64" else extent
        elements *= wide if is_constant(extent) else wide + padding
        fits.append(elements <= most)
    return tirx.all(*fits)
