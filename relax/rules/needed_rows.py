"""Reductions of the rows alone that a function's results read: a slice behind a sum is one of what is summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.computations import (
    MOST_NODES,
    Computation,
    analyzer_for,
    inlined,
    loads_in,
    nodes_inlined,
    replaced,
    same_number,
    simplified,
    step_of,
)
from tensorir_ladder.schedules.inspection import is_one, is_zero


@dataclass(frozen=True)
class _Taken:
    """Name the elements read along an axis of a buffer: the one at ``step * i + first`` for each i below ``extent``."""

    step: int
    first: ir.Expr
    extent: ir.Expr

    def is_whole(self, extent: ir.Expr) -> bool:
        """Return whether these are all elements, in order, of an axis with this extent."""
        return self.step == 1 and is_zero(self.first) and same_number(self.extent, extent)

    def is_within(self, extent: ir.Expr) -> bool:
        """Return whether an axis with this extent has all of these elements."""
        last = self.element(self.extent - tirx.const(1, str(self.extent.ty.dtype)))
        least, most = (self.first, last) if self.step > 0 else (last, self.first)
        analyzer = analyzer_for(())
        return analyzer.can_prove(least >= 0) and analyzer.can_prove(most < extent)

    def is_same(self, other: _Taken) -> bool:
        """Return whether the same elements are read in the same order."""
        parts = ((self.first, other.first), (self.extent, other.extent))
        return self.step == other.step and all(same_number(*both) for both in parts)

    def element(self, number: ir.Expr) -> ir.Expr:
        """Return where the element with this number is."""
        return number * tirx.const(self.step, str(number.ty.dtype)) + self.first

    def number(self, index: ir.Expr) -> ir.Expr:
        """Return the number of the element at an index."""
        if is_one(self.extent):
            return tirx.const(0, str(index.ty.dtype))
        offset = index - self.first if self.step > 0 else self.first - index
        return offset if abs(self.step) == 1 else tirx.FloorDiv(offset, tirx.const(abs(self.step), index.ty.dtype))


_Rows = tuple[_Taken, ...]  # for each axis of a reduction's buffers


def with_needed_rows(source: v.Source) -> v.Source:
    """Return a function whose reductions are of the rows that its results read, in the results' order.

    ::

        before   for i, k:  s[i] += x[i, k];           for i:  y[i] = s[2 * i + 3]
        after    for i, k:  s[i] += x[2 * i + 3, k];   for i:  y[i] = s[i]

    Slices with any begin and stride, flips and single rows; a function that reads rows otherwise (gathered, or other
    ones in two places) stays as it is.
    """
    moved: dict[tirx.Var, tuple[tirx.Var, _Rows]] = {}
    plain = [computation for computation in source.computations if not v.is_reduction(computation)]
    readers = [output for output in source.outputs if not v.is_reduction(output)]
    changed: dict[tirx.Var, Computation] = {}
    for block in reversed(_blocks(source.computations)):
        rows = None if any(c in source.outputs for c in block) else _rows_read(block, readers, plain)
        if rows is None or all(taken.is_whole(extent) for taken, extent in zip(rows, block[0].buffer.shape)):
            readers += block
            continue
        made = _reduced_to(block, rows)
        for old, new in zip(block, made):
            moved[old.buffer], changed[old.buffer] = (new.buffer, rows), new
        readers += made
    if not moved:
        return source
    computations = tuple(_reading(changed.get(c.buffer, c), moved) for c in source.computations)
    stored = [output.buffer for output in source.outputs]
    outputs = tuple(c for buffer in stored for c in computations if c.buffer.same_as(buffer))
    return dataclasses.replace(source, computations=computations, outputs=outputs)


def _blocks(computations: Sequence[Computation]) -> list[list[Computation]]:
    """List the reductions in order, those that one block computes together."""
    blocks: list[list[Computation]] = []
    for computation in filter(v.is_reduction, computations):
        if blocks and blocks[-1][0].is_beside(computation):
            blocks[-1].append(computation)
        else:
            blocks.append([computation])
    return blocks


def _rows_read(
    block: Sequence[Computation], readers: Sequence[Computation], plain: Sequence[Computation]
) -> _Rows | None:
    """Return the rows of a reduction that all its readers read; None where these are no slice, or several."""
    own = [computation.buffer for computation in block]
    found: list[_Rows] = []
    for reader in readers:
        if nodes_inlined(reader, plain) > MOST_NODES:
            return None
        analyzer = analyzer_for(reader.iterators)
        for load in loads_in(simplified(inlined(reader.value, plain), analyzer)):
            if not any(load.source.same_as(buffer) for buffer in own):
                continue
            axes = [_taken(index, reader.iterators) for index in load.indices]
            found.append(tuple(axis for axis in axes if axis is not None))
            if len(found[-1]) < len(axes):
                return None
            if not all(taken.is_within(extent) for taken, extent in zip(found[-1], load.source.shape)):
                return None  # a pad, whose condition keeps from reading what is not there
    same = all(one.is_same(other) for rows in found for one, other in zip(rows, found[0]))
    return found[0] if found and same else None


def _taken(index: ir.Expr, iterators: Sequence[tirx.IterVar]) -> _Taken | None:
    moving = [iterator for iterator in iterators if v.uses(index, [iterator.var])]
    if len(moving) > 1 or loads_in(index):
        return None
    if not moving:
        return _Taken(1, index, tirx.const(1, str(index.ty.dtype)))
    (iterator,) = moving
    first = analyzer_for(()).simplify(replaced(index, {iterator.var: tirx.const(0, str(iterator.var.ty.dtype))}))
    step = step_of(index, iterator.var)
    straight = analyzer_for(iterators).can_prove_equal(index, iterator.var * step + first)
    return _Taken(step, first, iterator.dom.extent) if step and straight else None


def _reduced_to(block: Sequence[Computation], rows: _Rows) -> list[Computation]:
    """Return a reduction over the rows that are read alone; what it reads of its own buffers is still of the old."""
    first = block[0]
    at: dict[tirx.Var, ir.Expr] = {}
    own: dict[tirx.Var, tirx.IterVar] = {}
    for index, taken in zip(first.indices, rows):
        if isinstance(index, tirx.Var):
            number = tirx.Var(str(index.name), str(index.ty.dtype))
            if is_one(taken.extent):
                at[index] = taken.first
            else:
                at[index] = taken.element(number)
                own[index] = tirx.IterVar(ir.Range(0, taken.extent), number, tirx.IterVar.DataPar)
    shape = [taken.extent for taken in rows]
    return [
        dataclasses.replace(
            computation,
            buffer=tirx.decl_buffer(shape, str(computation.buffer.dtype), str(computation.buffer.name)),
            indices=tuple(own[i].var if i in own else tirx.const(0, str(i.ty.dtype)) for i in computation.indices),
            value=replaced(computation.value, at),
            start=None if computation.start is None else replaced(computation.start, at),
            spatial=tuple(own[i.var] for i in computation.spatial if i.var in own),
        )
        for computation in block
    ]


def _reading(computation: Computation, moved: dict[tirx.Var, tuple[tirx.Var, _Rows]]) -> Computation:
    """Return a computation that reads what reductions were moved to."""
    analyzer = analyzer_for(computation.iterators)

    def there(load: ir.TensorLoad) -> ir.TensorLoad:
        if load.source not in moved:
            return load
        buffer, rows = moved[load.source]
        return tirx.BufferLoad(buffer, [analyzer.simplify(t.number(i)) for t, i in zip(rows, load.indices)])

    return dataclasses.replace(computation, value=tvm_ffi.structural_map(computation.value, (ir.TensorLoad, there)))
