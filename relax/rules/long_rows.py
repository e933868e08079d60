"""Few long rows, cut into parts that blocks of their own reduce: a kernel for the parts, and one that joins them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from tvm import ir, tirx

from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.computations import Computation, replaced
from tensorir_ladder.relax.rules.elementwise import elementwise_kernels
from tensorir_ladder.relax.rules.reductions import Reduction, stands_along_rows
from tensorir_ladder.schedules.inspection import is_constant

MOST_PARTS = 512
LONG_ROW = 2**16  # elements from which a row is cut, where neighbours are of one row
LEAST_PART = 2**13
MANY_ROWS = 64  # with so many, a block for each is enough
LONG_COLUMN = 2**10  # the same where neighbours are of neighbouring rows
LEAST_COLUMN_PART = 2**7
MANY_COLUMNS = 2**14

Kernels = Callable[[v.Source, Sequence[Reduction], v.Values], tuple[tirx.Stmt, bool]]


def in_parts(source: v.Source, reductions: Sequence[Reduction], kernels: Kernels) -> tirx.Stmt | None:
    """Return kernels for a function of few long rows; None for any other.

    ::

        before   for i, k:  s[i] += x[i, k];                      for i, j:  y[i, j] = x[i, j] / s[i]
        after    for i, part, k:  parts[i, part] += x[i, part * length + k]        # a kernel
                 for i, part:     s[i] += parts[i, part]                           # a kernel, and what has rows only
                 for i, j:        y[i, j] = x[i, j] / s[i]                         # a kernel

    The first two are for each reduction, by ``kernels``, which makes those of rows.
    """
    first = reductions[0].computations[0]
    extents = [iterator.dom.extent for iterator in first.iterators]
    if not all(map(is_constant, extents)) or not first.reduction:
        return None
    rows, length = _count(first.spatial), _count(first.reduction)
    names: dict[tirx.Var, ir.Expr] = {
        i.var: tirx.Var(str(i.var.name), "int32") for c in source.computations for i in c.iterators
    }
    across = stands_along_rows(v.Expressions(source, source.extents), reductions[0], names)
    parts = _parts(rows, length, across)
    if parts < 2:
        return None
    plain = tuple(computation for computation in source.computations if not v.is_reduction(computation))
    own = [buffer for reduction in reductions for buffer in reduction.buffers if buffer not in source.buffers()]
    made: list[tirx.Stmt] = [tirx.AllocBuffer(buffer) for buffer in own]
    source = dataclasses.replace(source, workspaces=tuple(own))
    results = tuple(computation for computation in source.outputs if not v.is_reduction(computation))
    of_rows = tuple(result for result in results if _count(result.spatial) == rows)
    for reduction in reductions:
        partial, joined = _cut(reduction, length, parts, across)
        buffers = tuple(partial.buffers)
        known = dataclasses.replace(source, workspaces=(*source.workspaces, *buffers))
        made += map(tirx.AllocBuffer, buffers)
        for one, stored in ((partial, ()), (joined, of_rows if reduction is reductions[-1] else ())):
            computations = (*plain, *one.computations)
            step = dataclasses.replace(known, computations=computations, outputs=(*one.computations, *stored))
            made.append(kernels(step, [one], source.extents)[0])
    if left := tuple(result for result in results if result not in of_rows):
        last = dataclasses.replace(source, computations=plain, outputs=left)
        made.append(elementwise_kernels(last, source.extents)[0])
    return v.sequence(made)


def _count(iterators: Sequence[tirx.IterVar]) -> int:
    return math.prod(int(iterator.dom.extent) for iterator in iterators)


def _parts(rows: int, length: int, across: bool) -> int:
    """Return into how many parts rows are cut: enough for the GPU, none too short, of one length if it can be."""
    if across:
        many, long, least = rows >= MANY_COLUMNS, LONG_COLUMN, LEAST_COLUMN_PART
        most = min(MOST_PARTS, -(-MANY_COLUMNS * 8 // rows))
    else:
        many, long, least, most = rows >= MANY_ROWS, LONG_ROW, LEAST_PART, MOST_PARTS // rows
    if many or length < long:
        return 1
    most = min(most, length // least)
    even = [parts for parts in range(most // 2 + 1, most + 1) if length % parts == 0 and length // parts % v.WHOLE == 0]
    return max(even, default=most)


def _cut(reduction: Reduction, length: int, parts: int, across: bool) -> tuple[Reduction, Reduction]:
    """Return the reduction of each part to a workspace, and the one that joins the parts of a row."""
    first = reduction.computations[0]
    dtype = str(first.reduction[0].var.ty.dtype)
    each = -(-length // parts)
    part, element = tirx.Var("part", dtype), tirx.Var("element", dtype)
    number = part * each + element
    lengths = [iterator.dom.extent for iterator in first.reduction]
    taken = dict(zip([i.var for i in first.reduction], v.digits(number, lengths)))
    terms = [replaced(term, taken) for term in reduction.terms]
    if each * parts != length:
        there = number < tirx.const(length, dtype)
        terms = [tirx.if_then_else(there, term, begin) for term, begin in zip(terms, reduction.begins)]
    spatial = [iterator.var for iterator in first.spatial]
    shape = [iterator.dom.extent for iterator in first.spatial]
    count = tirx.const(parts, dtype)
    place, extents = ([part, *spatial], [count, *shape]) if across else ([*spatial, part], [*shape, count])
    kind = tirx.IterVar
    part_axis = kind(ir.Range(0, count), part, kind.DataPar)
    partial, joined, joined_terms = [], [], []
    again = tirx.Var("part", dtype)
    again_axis = kind(ir.Range(0, count), again, kind.CommReduce)
    for computation, summed, begin in zip(reduction.computations, reduction.dtypes, reduction.begins):
        buffer = tirx.decl_buffer(extents, summed, f"{computation.buffer.name}_parts")
        load = tirx.BufferLoad(buffer, [again if one.same_as(part) else one for one in place])
        element_axis = kind(ir.Range(0, tirx.const(each, dtype)), element, kind.CommReduce)
        axes = (part_axis, *first.spatial) if across else (*first.spatial, part_axis)
        partial.append(Computation(computation.name, buffer, tuple(place), begin, begin, axes, (element_axis,)))
        joined.append(dataclasses.replace(computation, value=load, reduction=(again_axis,)))
        joined_terms.append(load)
    of_parts = dataclasses.replace(
        reduction, computations=tuple(partial), terms=tuple(terms), starts=(None,) * len(partial)
    )
    return of_parts, dataclasses.replace(reduction, computations=tuple(joined), terms=tuple(joined_terms))
