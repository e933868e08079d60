"""Which copies may be asynchronous: TVM lowers some to cp.async that is wrong, and some to calls that nobody answers.

A copy in an asynchronous stage becomes cp.async where it moves elements from global to shared memory, is zero outside a
predicate, and is 4, 8 or 16 bytes wide. TVM looks at no more than that, and so

- reads an index array past its end where rows are gathered under a predicate: that covers the copy, not its address;
- copies consecutive bytes where a vector has a stride;
- takes consecutive elements, copied one after the other by one thread, for a transfer that CUDA does not have, and so
  everything that no thread runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import DEVICE_SCOPES, Statement, loop_name, replaced, without_carries


@dataclass(frozen=True)
class Obstacle:
    """Why a copy cannot be asynchronous, and what to do instead."""

    problem: str
    remedy: str


CONVERTS = Obstacle(
    "a copy that is not a plain move from global to shared memory cannot be asynchronous",
    "move the conversion to a statement after the copy",
)
GATHERS = Obstacle(
    "cp.async would read the indices of gathered rows past their end: the predicate covers the copy alone",
    "pad the indices",
)
STRIDES = Obstacle(
    "cp.async would copy consecutive bytes, and its vectors are not of consecutive elements",
    "vectorize a loop over neighbours",
)
WALKS = Obstacle(
    "consecutive elements, copied one after the other by one thread, are no cp.async",
    "vectorize the loop over them, or spread the copy by fetch_cooperatively",
)
COMPUTES = Obstacle(
    "vectors computed into shared memory cannot stand beside asynchronous copies", "compute them as scalars"
)
UNBOUND = Obstacle(
    "no thread runs the copy, and cp.async is a thread's",
    "bind a loop around it to threads, or spread the copy by fetch_cooperatively",
)


def async_obstacle(sch: Schedule, loop: LoopRV, copy: Statement) -> Obstacle | None:
    """Return what keeps a statement of a loop from being an asynchronous copy, None where it may be one."""
    from_global = all(region.source.scope() in DEVICE_SCOPES for region in copy.reads)
    if not (copy.fills_shared and from_global and copy.is_pure_copy):
        return CONVERTS
    return async_hazard(sch, loop, copy)


def async_hazard(sch: Schedule, loop: LoopRV, copy: Statement) -> Obstacle | None:
    """Return what TVM would get wrong about a statement in an asynchronous stage, None for nothing.

    That is for what it takes for a copy into shared memory; all else is lowered as it is.
    """
    moves = list(_moves(copy.stmt)) if copy.fills_shared else []
    if any(move.gathers_under_predicate for move in moves):
        return GATHERS
    if moves and not _run_by_threads(sch, loop, copy.stmt):
        return UNBOUND
    if not all(move.vectors_are_consecutive for move in moves):
        return STRIDES
    return WALKS if any(move.walks_neighbours for move in moves) else None


def check_hazards(sch: Schedule, loop: LoopRV, copies: Sequence[Statement]) -> None:
    """Raise IllegalPipeline for the first of a loop's asynchronous statements that TVM would get wrong."""
    for copy in copies:
        if hazard := async_hazard(sch, loop, copy):
            raise IllegalPipeline(
                hazard.problem,
                loop=loop_name(sch, loop),
                block=copy.name,
                remedy=f"make it synchronous, or {hazard.remedy}",
            )


def pads_integers(copy: Statement) -> bool:
    """Return whether a copy is a whole number outside its predicate: TVM knows cp.async with zeros of floats only."""
    values = [value for move in _moves(copy.stmt) for value in move.choices]
    return any(isinstance(value.args[2], tirx.IntImm) for value in values)


@dataclass(frozen=True)
class _Move:
    """One block of a copy: the loops around it, what its iterators are in terms of them, its store and its load.

    ``choices`` are the predicates around the load, outermost first: each (predicate, what is copied, padding).
    """

    loops: tuple[tirx.For, ...]
    values: dict[tirx.Var, ir.Expr]
    store: tirx.BufferStore
    choices: tuple[ir.Call, ...]
    load: ir.TensorLoad

    @property
    def gathers_under_predicate(self) -> bool:
        """True where a predicate's variables index an array, whose element then says what is copied."""
        guarded = [var for choice in self.choices for var in _found(choice.args[0], tirx.Var)]
        inner = [load for index in self.load.indices for load in _found(index, ir.TensorLoad)]
        used = [var for load in inner for index in load.indices for var in _found(index, tirx.Var)]
        return any(var.same_as(other) for var in used for other in guarded)

    @property
    def vectors_are_consecutive(self) -> bool:
        """True where every lane of a vectorized loop is one element behind the lane before it, in both buffers."""
        return all(
            self._goes_on(*self._lanes(loop, lane), lane)
            for loop in self.loops
            if loop.kind == tirx.ForKind.VECTORIZED
            for lane in range(1, int(loop.extent))
        )

    @property
    def walks_neighbours(self) -> bool:
        """True where a loop of one thread goes from its first element to the next one, in both buffers."""
        first = {loop.loop_var: loop.min for loop in self.loops}
        return any(
            self._goes_on(self._at({**first, loop.loop_var: loop.min + 1}), self._at(first), 1)
            for loop in self.loops
            if loop.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED) and int(loop.extent) > 1
        )

    def _at(self, iterations: dict[tirx.Var, ir.Expr]) -> dict[tirx.Var, ir.Expr]:
        """Return the iterators' values in given iterations of loops, and the loops' own (no iterators are needed)."""
        return {**iterations, **{iterator: replaced(value, iterations) for iterator, value in self.values.items()}}

    def _lanes(self, loop: tirx.For, lane: int) -> tuple[dict[tirx.Var, ir.Expr], dict[tirx.Var, ir.Expr]]:
        """Return the same in a lane of a vector, and in its first one.

        What counts lanes from a multiple of them is written as just that, from which TVM proves more: iterators, and
        what is divided, as (256·a + 32·b + 4·c + lane) // 12.
        """
        analyzer, extent = sym.Analyzer(), int(loop.extent)
        values = {iterator: _counting_lanes(value, loop) for iterator, value in self.values.items()}
        there, here = (
            {**at, **{iterator: replaced(value, at) for iterator, value in values.items()}}
            for at in ({loop.loop_var: loop.min + lane}, {loop.loop_var: loop.min})
        )
        for iterator in self.values:
            counts = analyzer.can_prove_equal(there[iterator] - here[iterator], lane)
            if counts and analyzer.can_prove_equal(tirx.floormod(here[iterator], extent), 0):
                there[iterator], here[iterator] = iterator * extent + lane, iterator * extent
        return there, here

    def _goes_on(self, there: dict[tirx.Var, ir.Expr], here: dict[tirx.Var, ir.Expr], elements: int) -> bool:
        """Return whether it is so many elements from one place to another, in both buffers; the iterators' values."""
        analyzer = sym.Analyzer()
        for indices in (self.store.indices, self.load.indices):
            places = ([without_carries(replaced(index, at), analyzer) for index in indices] for at in (there, here))
            *outer, last = (later - sooner for later, sooner in zip(*places))
            if not all(analyzer.can_prove_equal(step, 0) for step in outer):
                return False
            if not analyzer.can_prove_equal(last, elements):
                return False
        return True


def _counting_lanes(expr: ir.Expr, loop: tirx.For) -> ir.Expr:
    """Write what is divided, where it counts a vector's lanes from a multiple of them, as whole vectors and a lane."""
    analyzer, extent = sym.Analyzer(), int(loop.extent)
    vectors: list[tuple[ir.Expr, tirx.Var]] = []

    def rewritten(division: tirx.FloorDiv | tirx.FloorMod) -> ir.Expr:
        lane, first = loop.loop_var, replaced(division.a, {loop.loop_var: loop.min})
        counts = analyzer.can_prove_equal(division.a - first, lane - loop.min)
        if not counts or not analyzer.can_prove_equal(tirx.floormod(first, extent), 0):
            return division
        known = (vector for start, vector in vectors if analyzer.can_prove_equal(start, first))
        vector = next(known, None)
        if vector is None:
            vector = tirx.Var(f"vector_{len(vectors)}", lane.ty)
            vectors.append((first, vector))
        return type(division)(vector * extent + lane - loop.min, division.b)

    for kind in (tirx.FloorDiv, tirx.FloorMod):
        expr = tvm_ffi.structural_map(expr, (kind, rewritten))
    return expr


def _moves(stmt: tirx.Stmt | None, loops: tuple[tirx.For, ...] = (), values: dict | None = None) -> Iterator[_Move]:
    """Find a statement's stores of what it loads, each with the loops and the iterators around it."""
    values = values or {}
    if isinstance(stmt, tirx.For):
        yield from _moves(stmt.body, (*loops, stmt), values)
    elif isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _moves(part, loops, values)
    elif isinstance(stmt, tirx.IfThenElse):
        for case in (stmt.then_case, stmt.else_case):
            yield from _moves(case, loops, values)
    elif isinstance(stmt, s_tir.SBlockRealize):
        own = {iterator.var: value for iterator, value in zip(stmt.block.iter_vars, stmt.iter_values)}
        yield from _moves(stmt.block.body, loops, {**values, **{k: replaced(v, values) for k, v in own.items()}})
    elif isinstance(stmt, tirx.BufferStore):
        choices, value = [], stmt.value
        while isinstance(value, ir.Call) and str(value.op.name).endswith("if_then_else"):
            choices.append(value)
            value = value.args[1]
        if isinstance(value, ir.TensorLoad):
            yield _Move(loops, values, stmt, tuple(choices), value)


def _run_by_threads(sch: Schedule, loop: LoopRV, stmt: tirx.Stmt) -> bool:
    """Return whether a loop in or around a statement under ``loop`` is bound to threads or blocks."""
    around, place = [sch.get(loop)], sch.get_sref(loop).parent
    while place is not None:
        around.append(place.stmt)
        place = place.parent
    loops = [*_found(stmt, tirx.For), *(other for other in around if isinstance(other, tirx.For))]
    return any(other.kind == tirx.ForKind.THREAD_BINDING for other in loops)


def _found(node: ir.Expr | tirx.Stmt, kind: type) -> list:
    found: list = []
    tvm_ffi.structural_walk(node, (kind, found.append))
    return found
