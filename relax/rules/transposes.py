"""Elementwise functions that read along another axis than they write: through shared memory, both in whole lines."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, sym, tirx

from tensorir_ladder.relax.rules import vectors as v
from tensorir_ladder.relax.rules.computations import Computation, replaced
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

SIDE = 64  # of a tile, in elements
WIDE_SIDE = 32  # of elements beyond 4 bytes
SHORTEST = 16  # axes of fewer elements are not worth a tile
BANK_BYTES = 4
THREADS = 256


@dataclass(frozen=True)
class _Axes:
    """The axes of an output: ``read`` that operands lie along, the last one that it is written along, the others."""

    read: tirx.Var
    last: tirx.Var
    others: tuple[tirx.Var, ...]
    extents: dict[tirx.Var, ir.Expr]


def transposing_kernel(expressions: v.Expressions, output: Computation) -> tuple[tirx.Stmt, bool] | None:
    """Return a kernel for an output whose operands lie along another axis than its last; None for any other.

    Beside the kernel: whether it reads and writes vectors.

    ::

        before   for i, j:  y[i, j] = f(x[j, i], z[i, j])
        after    for tiles of 64 x 64, over blocks:
                   x_tile[j, i] = x[tile]            # threads along i, in vectors
                   y[tile] = f(x_tile[j, i], z)      # threads along j, in vectors

    Rows of the tile are padded by a bank, so that reading them across meets few banks twice. What is computed of
    operands that all lie along i is staged in their place.
    """
    names = {i.var: tirx.Var(str(i.var.name), "int32") for i in output.spatial}
    extents = {names[i.var]: expressions.extent(i.dom.extent) for i in output.spatial}
    if len(names) < 2:
        return None
    *axes, last = names.values()
    value = expressions.value(output.value, names)
    found = [(load, axis) for load in _read_across(expressions, value, last, extents) for axis in axes]
    across = [(load, axis) for load, axis in found if _lies_along(expressions, load, axis, extents)]
    if not across:
        return None
    axis = across[0][1]
    sides = [int(extents[one]) for one in (axis, last) if is_constant(extents[one])]
    if any(side < SHORTEST for side in sides):
        return None
    padded = [
        -(-int(e) // SIDE) * SIDE if one in (axis, last) else int(e) for one, e in extents.items() if is_constant(e)
    ]
    if math.prod(padded) > v.MOST_ELEMENTS:
        return None
    others = tuple(one for one in axes if not one.same_as(axis))
    staged = [load for load, along in across if along.same_as(axis)]
    kernel = _Kernel(expressions, output, value, _Axes(axis, last, others, extents), staged, names)
    return kernel.statement(), min(kernel.reading.lanes, kernel.writing.lanes) > 1


def _read_across(expressions: v.Expressions, value: ir.Expr, last: tirx.Var, extents: v.Values) -> list[ir.TensorLoad]:
    """List the loads that vary along the last axis and are not consecutive there, and that no condition guards."""
    lanes = v.Lanes(1, expressions, vector=last)
    for axis, extent in extents.items():
        lanes.bind(axis, extent)
    loads = [access.load for access in lanes.accesses([value]) if access.guard is None]
    return [load for load in loads if not _lies_along(expressions, load, last, extents)]


def _lies_along(expressions: v.Expressions, load: ir.TensorLoad, axis: tirx.Var, extents: v.Values) -> bool:
    analyzer = sym.Analyzer()
    for one, extent in extents.items():
        analyzer.bind(one, ir.Range.from_min_extent(tirx.const(0, "int32"), extent))
    address = analyzer.simplify(expressions.address(load.source, load.indices))
    return analyzer.can_prove_equal(replaced(address, {axis: axis + 1}) - address, 1)


class _Kernel:
    """The kernel of one output: tiles of ``side`` x ``side``, read along one axis and written along another."""

    def __init__(
        self,
        expressions: v.Expressions,
        output: Computation,
        value: ir.Expr,
        axes: _Axes,
        staged: Sequence[ir.TensorLoad],
        names: v.Values,
    ) -> None:
        self.axes, self.output = axes, output
        self.staged: list[ir.Expr] = list(staged)
        self.side = SIDE if all(dtype_bytes(str(load.source.dtype)) <= BANK_BYTES for load in staged) else WIDE_SIDE
        self.reading = self._lanes(expressions, axes.read, [(load.source, load.indices) for load in staged])
        indices = [names.get(index, index) for index in output.indices]
        indices = [index if str(index.ty.dtype) == "int32" else tirx.const(0, "int32") for index in indices]
        self.writing = self._lanes(expressions, axes.last, [(output.buffer, indices)])
        self.indices = [self._along(self.writing, axes.last, index) for index in indices]
        self.value = self.writing.simplified(self._along(self.writing, axes.last, value))
        if self._is_sooner_computed(value):
            self.staged = [value]

    def statement(self) -> tirx.Stmt:
        """Return the kernel; nothing is launched where there is nothing."""
        axes = self.axes
        tiles = [v.ceil_div(axes.extents[axis], self.side) for axis in (axes.read, axes.last)]
        counts = [*(axes.extents[axis] for axis in axes.others), *tiles]

        def of_block(block: ir.Expr) -> tirx.Stmt:
            *others, row, column = v.digits(block, counts)
            self.block = dict(zip(axes.others, others))
            self.corner = {axes.read: row * self.side, axes.last: column * self.side}
            return v.threads("threadIdx.x", THREADS, self._thread)

        kernel = v.threads("blockIdx.x", v.product(counts), of_block)
        total = v.product(axes.extents.values())
        return kernel if is_constant(total) else tirx.IfThenElse(total > 0, kernel, None)

    def _thread(self, thread: ir.Expr) -> tirx.Stmt:
        axes, side = self.axes, self.side
        tiles = []
        statements: list[tirx.Stmt] = []
        for value in self.staged:
            dtype = str(value.ty.dtype)
            pad = max(1, BANK_BYTES // dtype_bytes(dtype))
            name = value.source.name if isinstance(value, ir.TensorLoad) else self.output.buffer.name
            tile = tirx.decl_buffer((side * (side + pad),), dtype, f"{name}_tile", scope="shared")
            tiles.append((value, tile, side + pad))
            statements += [tirx.AllocBuffer(tile), *self._filled(value, tile, side + pad, thread)]
        local_row, local_vector = (tirx.Var(name, "int32") for name in ("local_row", "local_vector"))
        lanes, per_row = self.writing.lanes, side // self.writing.lanes

        def place(number: ir.Expr) -> v.Values:
            index = number * THREADS + thread
            row, vector = (kind(index, tirx.const(per_row, "int32")) for kind in (tirx.FloorDiv, tirx.FloorMod))
            return {
                **self.block,
                axes.read: self.corner[axes.read] + row,
                self.writing.vector: v.divided(self.corner[axes.last], lanes) + vector,
                local_row: row,
                local_vector: vector,
            }

        take = v.Take(self.writing, side * per_row // THREADS, place, self._inside(self.writing, place, axes.read))
        value = self._from_tiles(tiles, local_row, local_vector)
        accesses = self.writing.accesses([value])
        allocations, loads = take.fill(accesses)
        result = v.registers(f"{self.output.buffer.name}_local", take.count * lanes, str(self.output.buffer.dtype))

        def lane(read: v.Read, slot: ir.Expr, _place: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(result, read(value), [slot])

        stored = take.compute(accesses, lane, [(self.output.buffer, self.indices, result)])
        rest = [*allocations, tirx.AllocBuffer(result), *loads, v.barrier(), stored]
        return v.sequence([*statements, *rest])

    def _filled(self, value: ir.Expr, tile: tirx.Var, stride: int, thread: ir.Expr) -> list[tirx.Stmt]:
        """Load what a value needs along the axis that it lies along, and store it to shared memory as it lies."""
        axes, side, lanes = self.axes, self.side, self.reading.lanes
        per_row = side // lanes
        local_row, local_vector = (tirx.Var(name, "int32") for name in ("local_row", "local_vector"))

        def place(number: ir.Expr) -> v.Values:
            index = number * THREADS + thread
            row, vector = (kind(index, tirx.const(per_row, "int32")) for kind in (tirx.FloorDiv, tirx.FloorMod))
            return {
                **self.block,
                axes.last: self.corner[axes.last] + row,
                self.reading.vector: v.divided(self.corner[axes.read], lanes) + vector,
                local_row: row,
                local_vector: vector,
            }

        take = v.Take(self.reading, side * per_row // THREADS, place, self._inside(self.reading, place, axes.last))
        along = self.reading.simplified(self._along(self.reading, axes.read, value))
        accesses = self.reading.accesses([along])
        allocations, loads = take.fill(accesses)
        slot = local_row * stride + local_vector * lanes + self.reading.lane

        def lane(read: v.Read, _slot: ir.Expr, _place: ir.Expr) -> tirx.Stmt:
            return tirx.BufferStore(tile, read(along), [read(slot)])

        return [*allocations, *loads, take.compute(accesses, lane)]

    def _is_sooner_computed(self, value: ir.Expr) -> bool:
        """Return whether all that a value reads comes in vectors where it is read along, and some would not elsewhere.

        A tile of results is then enough, where each of the operands would have one.
        """
        along = self.reading.simplified(self._along(self.reading, self.axes.read, value))
        left = [access for access in self.writing.accesses([self.value]) if not self._is_staged(access.load)]
        gathered = [access for access in left if access.width == 1 and self._varies(self.writing, access)]
        return bool(gathered) and all(
            access.width > 1 or not self._varies(self.reading, access) for access in self.reading.accesses([along])
        )

    def _is_staged(self, load: ir.TensorLoad) -> bool:
        own = (self.writing.simplified(self._along(self.writing, self.axes.last, staged)) for staged in self.staged)
        return any(tvm_ffi.structural_equal(load, staged) for staged in own)

    @staticmethod
    def _varies(lanes: v.Lanes, access: v.VectorAccess) -> bool:
        return any(lanes.varies(index) for index in access.load.indices)

    def _from_tiles(self, tiles: Sequence[tuple[ir.Expr, tirx.Var, int]], row: tirx.Var, vector: tirx.Var) -> ir.Expr:
        """Return what is computed, with what was staged read from its tile."""
        column = vector * self.writing.lanes + self.writing.lane
        kept = [
            (
                self.writing.simplified(self._along(self.writing, self.axes.last, value)),
                tirx.BufferLoad(tile, [column * stride + row]),
            )
            for value, tile, stride in tiles
        ]

        def from_tile(value: ir.Expr) -> ir.Expr:
            return next((load for staged, load in kept if tvm_ffi.structural_equal(staged, value)), value)

        whole = from_tile(self.value)
        return whole if whole is not self.value else tvm_ffi.structural_map(self.value, (ir.TensorLoad, from_tile))

    def _inside(
        self, lanes: v.Lanes, place: Callable[[ir.Expr], v.Values], beside: tirx.Var
    ) -> Callable[[ir.Expr], ir.Expr | None]:
        """Return the condition for a vector to be inside the output: along its own axis, and beside it."""
        along = self.axes.read if lanes is self.reading else self.axes.last
        limits = {lanes.vector: v.divided(self.axes.extents[along], lanes.lanes), beside: self.axes.extents[beside]}
        whole = all(v.is_multiple(self.axes.extents[axis], self.side) for axis in (along, beside))

        def condition(number: ir.Expr) -> ir.Expr | None:
            at = place(number)
            return None if whole else functools.reduce(tirx.And, [at[var] < limit for var, limit in limits.items()])

        return condition

    def _along(self, lanes: v.Lanes, axis: tirx.Var, expression: ir.Expr) -> ir.Expr:
        return replaced(expression, {axis: lanes.vector * lanes.lanes + lanes.lane})

    def _lanes(
        self, expressions: v.Expressions, axis: tirx.Var, accesses: Sequence[tuple[tirx.Var, Sequence[ir.Expr]]]
    ) -> v.Lanes:
        """Return the widest vectors along an axis in which all accesses are consecutive and aligned."""
        count = VECTOR_BYTES // min(dtype_bytes(str(buffer.dtype)) for buffer, _ in accesses)
        count = min(count, self.side * self.side // THREADS)
        while True:
            lanes = v.Lanes(count, expressions)
            for other, extent in self.axes.extents.items():
                lanes.bind(other, extent)
            lanes.bind(lanes.vector, v.divided(self.axes.extents[axis], count))
            widths = [lanes.width(b, [self._along(lanes, axis, i) for i in indices]) for b, indices in accesses]
            if count == 1 or (v.is_multiple(self.axes.extents[axis], count) and min(widths) == count):
                return lanes
            count //= 2
