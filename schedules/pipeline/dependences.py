"""Which statements of a loop depend on which, and what of that a pipeline would break.

A pipeline runs statement s of iteration i at time (i + stage of s, order of s). Right is what keeps every two accesses
of one element in their order where one of them writes: read after write, write after read, write after write, within an
iteration and across iterations. TVM checks the first kind alone, within an iteration.

A buffer that only the loop uses keeps nothing from one iteration to the next: with several stages
(:func:`schedules.pipeline.checks.buffer_stages`) iteration i has stage i % stages, and with one TVM may lay other
buffers over it in between. Whatever is read of it must have been written in the same iteration, before, and under no
other condition.

Elements are told apart by arithmetic on the loops' variables. What depends on data, or cannot be told, counts as
touching every element when order is at stake, and as writing none when something has to be written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.analysis import detect_buffer_access_lca
from tvm.s_tir.schedule import LoopRV
from tvm.sym.analyzer import ProofStrength

from tensorir_ladder.schedules.inspection import (
    DEVICE_SCOPES,
    PIPELINE_STAGE,
    SHARED_SCOPES,
    Statement,
    body_parts,
    is_one,
    is_true,
    loops_of,
    scheduled_function,
    statements_of,
    terms_of,
    thread_tag,
)
from tensorir_ladder.schedules.pipeline.one_barrier import declares_read, is_gate, is_hidden_read, retires

PIPELINE_ORDER = "software_pipeline_order"
PURE = (0, 1)  # TVM's effect kinds of calls that touch no memory
STEPS = 200_000  # of TVM's solver for one claim: a limit of work, so that no answer depends on the machine's speed
MOST_COUNTED = 2**18  # elements of a copy that are counted one by one
COUNTED = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}

Loops = tuple[tuple[tirx.Var, ir.Range], ...]
Values = Mapping[tirx.Var, ir.Expr]


@dataclass(frozen=True)
class Access:
    """One read or write of a buffer, in terms of loop variables.

    ``region`` is a range per dimension, None where that depends on data. ``loops`` are those inside the pipelined loop,
    outermost first; ``conditions`` hold where the access happens, and ``certain`` says that nothing else decides it.
    ``place`` counts accesses in program order. The first ``rings`` dimensions tell the stages of an inner pipeline's
    buffer apart. ``visible`` says that TVM gets to know of it.
    """

    buffer: tirx.Var
    writes: bool
    region: tuple[ir.Range, ...] | None
    loops: Loops
    conditions: tuple[ir.Expr, ...]
    place: int
    certain: bool
    rings: int = 0
    visible: bool = True


@dataclass(frozen=True)
class Broken:
    """Two accesses that a pipeline would exchange: ``second`` is to come ``distance`` iterations after ``first``."""

    first: Statement
    second: Statement
    buffer: tirx.Var
    distance: int
    first_writes: bool
    second_writes: bool


class LoopBody:
    """The statements of a loop, and all that they access; nothing is changed."""

    def __init__(self, loop: tirx.For, around: Sequence[Any], homes: Mapping[tirx.Var, Any]) -> None:
        """Describe a loop: ``around`` are loops and blocks around it, ``homes`` where buffers will be allocated."""
        self.loop, self.around, self._homes = loop, around, homes
        self.statements = statements_of(loop)
        self.extent = int(loop.extent)
        self._tags = {each.loop_var: thread_tag(each) for each in loops_of(loop)}
        self._needed: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[tirx.Var, int]] = {}

    @classmethod
    def of(cls, sch: Schedule, loop: LoopRV) -> LoopBody:
        """Describe a loop of a schedule."""
        around, parent = [], sch.get_sref(loop).parent
        while parent is not None:
            around.append(parent.stmt)
            parent = parent.parent
        function, allocated = scheduled_function(sch), []
        tvm_ffi.structural_walk(function.body, (s_tir.SBlock, lambda block: allocated.extend(block.alloc_buffers)))
        homes = detect_buffer_access_lca(function)
        return cls(sch.get(loop), around, {buffer: homes[buffer] for buffer in allocated if buffer in homes})

    def aliases(self) -> list[tuple[tirx.Var, tirx.Var]]:
        """List pairs of arguments that may be one array: (written, read) in the loop, of one shape and dtype."""
        read = {region.source: None for statement in self.statements for region in statement.reads}
        found = []
        for one in (buffer for buffer in self.written if self._is_argument(buffer)):
            for other in (buffer for buffer in read if self._is_argument(buffer) and not buffer.same_as(one)):
                alike = tvm_ffi.structural_equal(list(one.shape), list(other.shape), map_free_vars=False)
                found += [(one, other)] if alike and one.dtype == other.dtype else []
        return found

    def with_alias(self, one: tirx.Var, other: tirx.Var) -> LoopBody:
        """Return the same loop with one buffer in the place of another."""
        swap = (tirx.Var, lambda var: other if var.same_as(one) else var)
        return LoopBody(tvm_ffi.structural_map(self.loop, swap), self.around, self._homes)

    def _is_argument(self, buffer: tirx.Var) -> bool:
        return buffer not in self._homes and buffer.scope() in DEVICE_SCOPES

    @cached_property
    def accesses(self) -> list[list[Access]]:
        """List what each statement accesses; what a gate and the like declare moves no data, and is left out."""
        reader, found = _Reader(self._ring_of), []
        values = _wrapped_values(self.loop)
        for statement in self.statements:
            start = len(reader.found)
            reader.read_statement(statement, (), values)
            found.append([] if is_gate(statement) else reader.found[start:])
        return found

    @cached_property
    def written(self) -> list[tirx.Var]:
        """Every buffer that a statement declares to write, once."""
        found: list[tirx.Var] = []
        for region in (region for statement in self.statements for region in statement.writes):
            if not any(region.source.same_as(buffer) for buffer in found):
                found.append(region.source)
        return found

    def beside(self, loop: tirx.For) -> LoopBody:
        """Describe another loop in the same place."""
        return LoopBody(loop, self.around, self._homes)

    def fills(self, statement: int, buffer: tirx.Var) -> bool:
        """Return whether a statement writes a buffer and reads nothing of it."""
        touched = [access.writes for access in self.accesses[statement] if access.buffer.same_as(buffer)]
        return bool(touched) and all(touched) and not self.statements[statement].reads_buffer(buffer)

    def covers_reads(self, buffer: tirx.Var, first: int = 0) -> bool:
        """Return whether all that statements from ``first`` on read of a buffer, they write before, each iteration."""
        accesses = [a for a in itertools.chain(*self.accesses[first:]) if a.buffer.same_as(buffer)]
        writes = [access for access in accesses if access.writes]
        return all(access.writes or self._covered(access, writes) for access in accesses)

    def carried(self) -> list[tirx.Var]:
        """List shared memory and registers that carry values from one iteration to the next, as running sums do.

        An iteration reads of them what it has not written before, and what the loop writes.
        """
        found = []
        for buffer in (buffer for buffer in self.written if buffer.scope() not in DEVICE_SCOPES):
            if self.outlives(buffer) and not self.covers_reads(buffer):
                found.append(buffer)
        return found

    def outlives(self, buffer: tirx.Var) -> bool:
        """Return whether TVM allocates the buffer outside the loop, so that it has one stage for all iterations."""
        home = self._homes.get(buffer)
        return home is None or any(home.same_as(stmt) for stmt in self.around)

    def stages(self, stage: Sequence[int], order: Sequence[int]) -> dict[tirx.Var, int]:
        """Return how many stages TVM gives each written buffer; see :func:`schedules.pipeline.checks.buffer_stages`."""
        kept = self.needed_stages(stage, order)
        for buffer in (buffer for buffer in kept if not self.outlives(buffer)):
            asked = any(self.statements[writer].wants_two_stages for writer in self._writers(buffer))
            kept[buffer] = max(kept[buffer], 2) if asked else kept[buffer]
        return kept

    def needed_stages(self, stage: Sequence[int], order: Sequence[int]) -> dict[tirx.Var, int]:
        """Return the same without what ``double_buffer_scope`` asks for."""
        lists = tuple(stage), tuple(order)
        if lists not in self._needed:
            self._needed[lists] = {buffer: self._stages_of(buffer, *lists) for buffer in self.written}
        return dict(self._needed[lists])

    def reads(self, statement: int, buffer: tirx.Var) -> bool:
        """Return whether TVM gets to know that a statement reads a buffer."""
        seen = (a for a in self.accesses[statement] if a.visible and not a.writes and a.buffer.same_as(buffer))
        return declares_read(self.statements[statement], buffer) or any(True for _ in seen)

    def hides(self, statement: int, buffer: tirx.Var) -> bool:
        """Return whether a statement reads a buffer, in a condition or an index, and declares no read of it."""
        reading = (access for access in self.accesses[statement] if not access.writes)
        return not self.statements[statement].reads_buffer(buffer) and any(a.buffer.same_as(buffer) for a in reading)

    def broken(self, stage: Sequence[int], order: Sequence[int]) -> Iterator[Broken]:
        """Yield what these lists would exchange: of every two statements and buffer, the smallest distance."""
        stages = self.stages(stage, order)
        for first, accesses in enumerate(self.accesses):
            for second, others in enumerate(self.accesses):
                for buffer in _shared(accesses, others) if first != second else ():
                    step = stages.get(buffer, 1)
                    distance = 0 if first < second else step
                    while (stage[first], order[first]) > (distance + stage[second], order[second]):
                        met = self._meeting(accesses, others, buffer, distance)
                        if met:
                            names = self.statements[first], self.statements[second]
                            yield Broken(*names, buffer, distance, met[0].writes, met[1].writes)
                            break
                        distance += step

    def uncovered(self, stage: Sequence[int], order: Sequence[int]) -> Iterator[tuple[Statement, tirx.Var]]:
        """Yield reads of buffers inside the loop that nothing is sure to write before, in the same iteration.

        Those of one statement alone, or of an inner pipeline, are its own affair while the loop gives them one stage.
        """
        stages = self.stages(stage, order)
        shared = [buffer for one, other in self._pairs() for buffer in _shared(one, other)]
        for index, statement in enumerate(self.statements):
            moves = is_gate(statement) or retires(statement) is not None
            for access in () if moves else self.accesses[index]:
                alone = access.rings or not any(access.buffer.same_as(buffer) for buffer in shared)
                own = self.outlives(access.buffer) or (alone and stages.get(access.buffer, 1) == 1)
                if not access.writes and not own and not self._covered(access):
                    yield statement, access.buffer

    def unsure(self, stage: Sequence[int], order: Sequence[int]) -> Iterator[tuple[int, int, tirx.Var]]:
        """Yield writer, reader and buffer where TVM gives one stage though two are needed.

        It asks whether a thread reads what it wrote itself, and not whether others did: ``near[t]``, ``near[7 - t]``.
        """
        for buffer in self.written:
            crossings = list(self._crossings(buffer, stage, order))
            doubtful = [pair for pair in crossings if not self._meet_now(*pair, same_thread=True)]
            asked = any(self.statements[writer].wants_two_stages for writer in self._writers(buffer))
            if self.stages(stage, order)[buffer] == 2 and doubtful and len(doubtful) == len(crossings) and not asked:
                yield next(pair for pair in doubtful if self._meet_now(*pair))

    def touch(self, first: Access, second: Access, distance: int | None, same_thread: bool = False) -> bool:
        """Return whether two accesses may meet in an element, the second so many iterations after the first.

        ``None`` is any distance from 1 on. ``same_thread`` asks it of one thread's accesses.
        """
        if distance != 0 and (distance or 1) >= self.extent:
            return False
        lived = distance == 0 or self.outlives(first.buffer)
        dims = None if lived else first.rings  # an inner ring apart, iterations meet in the memory they share
        if first.region is None or second.region is None or dims == 0:
            return True
        with ExitStack() as scope:
            analyzer, iteration = self._analyzer(), self.loop.loop_var
            away: int | tirx.Var = distance or 0
            if distance is None:
                away = tirx.Var("away", iteration.ty)
                analyzer.bind(away, ir.Range(1, self.extent))
            self._bind(analyzer, first.loops)
            analyzer.bind(iteration, ir.Range.from_min_extent(self.loop.min, self.extent - (distance or 0)))
            threads = () if same_thread else self.threads(first.buffer)
            threads += self._outer_axes() if threads else ()
            own = {self._tags[var]: var for var, _ in first.loops if same_thread and self._tags.get(var)}
            later = {var: own[tag] for var, _ in second.loops if (tag := self._tags.get(var)) in own}
            others = threads + tuple(loop for loop in second.loops if loop[0] not in later)
            later = self._fresh(analyzer, others, later | {iteration: iteration + away})
            for condition in (*first.conditions, *(_with(c, later) for c in second.conditions)):
                scope.enter_context(analyzer.constraint_scope(condition))
            pairs = list(zip(first.region, (_range_with(r, later) for r in second.region)))[:dims]
            apart = _any(_apart(one, other) for one, other in pairs)
            if analyzer.can_prove(apart):
                return False
            # Where both begin at the same element there is nothing to prove, which takes the solver long.
            start = {var: extent.min for var, extent in first.loops}
            begin = start | {later[var]: extent.min for var, extent in second.loops}
            begin |= {later[var]: var for var, _ in threads}
            if all(analyzer.can_prove_equal(_with(one.min, start), _with(other.min, begin)) for one, other in pairs):
                return True
            return not analyzer.can_prove(apart, ProofStrength.SYMBOLIC_BOUND)

    def threads(self, buffer: tirx.Var) -> Loops:
        """Return the threads around the loop, where the buffer is memory that they share; else none."""
        if buffer.scope() not in (*SHARED_SCOPES, *DEVICE_SCOPES):
            return ()
        return tuple(
            (stmt.loop_var, _range_of(stmt))
            for stmt in self.around
            if isinstance(stmt, tirx.For) and "thread" in thread_tag(stmt)
        )

    def _outer_axes(self) -> Loops:
        """Return the variables of blocks around the loop, which threads may have different values of."""
        blocks = (stmt for stmt in self.around if isinstance(stmt, s_tir.SBlock))
        return tuple((iterator.var, iterator.dom) for block in blocks for iterator in block.iter_vars)

    def _stages_of(self, buffer: tirx.Var, stage: Sequence[int], order: Sequence[int]) -> int:
        readers = [index for index in range(len(self.statements)) if self.reads(index, buffer)]
        count = max((stage[r] for r in readers), default=0) - min(stage[w] for w in self._writers(buffer)) + 1
        if not readers or self.outlives(buffer):
            return 1
        if count == 2 and not any(True for pair in self._crossings(buffer, stage, order) if self._meet_now(*pair)):
            return 1
        return max(count, 1)

    def _pairs(self) -> Iterator[tuple[list[Access], list[Access]]]:
        return itertools.permutations(self.accesses, 2)

    def _crossings(
        self, buffer: tirx.Var, stage: Sequence[int], order: Sequence[int]
    ) -> Iterator[tuple[int, int, tirx.Var]]:
        for writer in self._writers(buffer):
            for reader in range(len(self.statements)):
                crosses = order[writer] < order[reader] and stage[writer] < stage[reader]
                if crosses and self.reads(reader, buffer):
                    yield writer, reader, buffer

    def _meet_now(self, writer: int, reader: int, buffer: tirx.Var, same_thread: bool = False) -> bool:
        whole = not any(access.buffer.same_as(buffer) for access in self.accesses[reader])  # a gate reads all of it
        return whole or bool(self._meeting(self.accesses[writer], self.accesses[reader], buffer, 0, same_thread))

    def _writers(self, buffer: tirx.Var) -> list[int]:
        return [index for index, statement in enumerate(self.statements) if statement.writes_buffer(buffer)]

    def _meeting(
        self, accesses: list[Access], others: list[Access], buffer: tirx.Var, distance: int, same_thread: bool = False
    ) -> tuple[Access, Access] | None:
        """Find an access of either that may meet in an element of the buffer, one of them writing."""
        for one in (access for access in accesses if access.buffer.same_as(buffer)):
            for other in (access for access in others if access.buffer.same_as(buffer)):
                if (one.writes or other.writes) and self.touch(one, other, distance, same_thread):
                    return one, other
        return None

    def _covered(self, read: Access, writes: Sequence[Access] | None = None) -> bool:
        """Return whether all that is read was written before in the same iteration, whatever happens.

        By one of ``writes``, or anything in the loop.
        """
        if read.region is None:
            return False
        with ExitStack() as scope:
            analyzer = self._analyzer()
            self._bind(analyzer, ((self.loop.loop_var, _range_of(self.loop)), *read.loops))
            for condition in read.conditions:
                scope.enter_context(analyzer.constraint_scope(condition))
            points = []
            for number, dimension in enumerate(read.region):
                inside = tirx.Var(f"inside{number}", dimension.extent.ty)
                analyzer.bind(inside, ir.Range(0, dimension.extent))
                points.append(dimension.min + inside if not is_one(dimension.extent) else dimension.min)
            for point, extent in zip(points[read.rings :], read.buffer.shape):  # a read outside is nobody's
                scope.enter_context(analyzer.constraint_scope(tirx.all(point >= 0, point < extent)))
            claims = []
            for write in itertools.chain(*self.accesses) if writes is None else writes:
                if write.writes and write.buffer.same_as(read.buffer) and write.place < read.place:
                    claim = self._holds(write, read, points)
                    if claim is not None and analyzer.can_prove(claim):
                        return True
                    claims += [claim] if claim is not None else []
            return bool(claims) and _proved(analyzer, _any(claims))

    def _holds(self, write: Access, read: Access, points: list[ir.Expr]) -> ir.Expr | None:
        """Return the claim that points are among those that a write is sure to write; None where it is sure of none."""
        together = 0
        for one, other in zip(write.loops, read.loops):
            if not one[1].same_as(other[1]):  # a range of its own each time that a loop is read
                break
            together += 1
        own = (*self.threads(write.buffer), *write.loops[together:])
        if write.region is None or not write.certain or not all(_is_fixed(extent) for _, extent in own):
            return None
        mine = {var for var, _ in own}
        conditions = [part for condition in write.conditions for part in terms_of(condition)]
        varying = [condition for condition in conditions if any(var in mine for var in _variables(condition))]
        fixed = [condition for condition in conditions if not any(condition.same_as(other) for other in varying)]
        found = sym.estimate_region_lower_bound(list(write.region), dict(own), _all(varying))
        bounds = [(one.min_value, one.max_value) for one in found] if found else _box(write.region, own, varying)
        if bounds is None:
            return None
        return _all([*fixed, *(tirx.all(least <= p, p <= most) for (least, most), p in zip(bounds, points))])

    def _ring_of(self, buffer: tirx.Var, inner: tirx.For) -> int:
        """Return how many stages an inner pipeline gives a buffer; 0 for one that is not its own."""
        body = LoopBody(inner, (*self.around, self.loop, *_wrappers(self.loop)), self._homes)
        if body.outlives(buffer):
            return 0
        stage, order = (list(map(int, inner.annotations[key])) for key in (PIPELINE_STAGE, PIPELINE_ORDER))
        return body.stages(stage, order).get(buffer, 0)

    def _analyzer(self) -> sym.Analyzer:
        """Make an analyzer that knows the variables around the loop."""
        analyzer = sym.Analyzer()
        if analyzer.is_z3_enabled:
            analyzer.set_z3_rlimit(STEPS)
        for stmt in self.around:
            if isinstance(stmt, tirx.For):
                analyzer.bind(stmt.loop_var, _range_of(stmt))
            else:
                self._bind(analyzer, tuple((iterator.var, iterator.dom) for iterator in stmt.iter_vars))
        return analyzer

    def _bind(self, analyzer: sym.Analyzer, loops: Loops) -> None:
        for var, extent in loops:
            analyzer.bind(var, extent)

    def _fresh(self, analyzer: sym.Analyzer, loops: Loops, values: dict[tirx.Var, ir.Expr]) -> dict[tirx.Var, ir.Expr]:
        """Give loops variables of their own, for the second of two accesses."""
        for var, extent in loops:
            values[var] = tirx.Var(f"{var.name}_later", var.ty)
            analyzer.bind(values[var], _range_with(extent, values))
        return values


class _Reader:
    """Finds every access below a statement, in program order."""

    def __init__(self, ring_of: Callable[[tirx.Var, tirx.For], int]) -> None:
        self.found: list[Access] = []
        self._ring_of, self._places = ring_of, 0
        self._inner: Any = None
        self._certain, self._visible = True, True

    def read_statement(self, statement: Statement, loops: Loops, values: Values) -> None:
        """Read one statement of a loop; of an inner pipeline's parts, the iterations that each statement of it runs."""
        if not statement.part:
            self._read(statement.stmt, loops, (), values)
            return
        inner, outer = statement.stmt, self._inner
        stages = [int(stage) for stage in inner.annotations[PIPELINE_STAGE]]
        last, extent = max(stages), int(inner.extent)
        self._inner = inner
        for piece, stage in zip(statements_of(inner), stages):
            first, end = {
                "prologue": (0, min(last - stage, extent)),
                "body": (last - stage, extent - stage),
                "epilogue": (max(extent, last) - stage, extent),
            }[statement.part]
            if max(first, 0) < end:
                turns = ir.Range(inner.min + max(first, 0), inner.min + end)
                self.read_statement(piece, (*loops, (inner.loop_var, turns)), {**values, **_wrapped_values(inner)})
        self._inner = outer

    def _read(self, stmt: Any, loops: Loops, conditions: tuple[ir.Expr, ...], values: Values) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                if isinstance(part, tirx.Bind):
                    self._loads(part.value, loops, conditions, values)
                    values = {**values, part.var: _with(part.value, values)}
                else:
                    self._read(part, loops, conditions, values)
        elif isinstance(stmt, tirx.For):
            for bound in (stmt.min, stmt.extent):
                self._loads(bound, loops, conditions, values)
            here = (*loops, (stmt.loop_var, _range_with(_range_of(stmt), values)))
            self._read(stmt.body, here, conditions, values)
        elif isinstance(stmt, tirx.IfThenElse):
            self._loads(stmt.condition, loops, conditions, values)
            condition = _with(stmt.condition, values)
            self._under(stmt.then_case, loops, conditions, condition, values)
            if stmt.else_case is not None:
                self._under(stmt.else_case, loops, conditions, tirx.Not(condition), values)
        elif isinstance(stmt, s_tir.SBlockRealize):
            self._block(stmt, loops, conditions, values)
        elif isinstance(stmt, tirx.BufferStore):
            for expr in (stmt.value, *stmt.indices):
                self._loads(expr, loops, conditions, values)
            region = tuple(ir.Range.from_min_extent(_with(index, values), 1) for index in stmt.indices)
            self._note(stmt.buffer, True, region, loops, conditions)
        elif isinstance(stmt, tirx.AttrStmt):
            self._loads(stmt.value, loops, conditions, values)
            self._read(stmt.body, loops, conditions, values)
        elif isinstance(stmt, tirx.While):
            self._loads(stmt.condition, loops, conditions, values)
            self._unsure(stmt.body, loops, conditions, values)
        else:
            self._loads(stmt, loops, conditions, values)

    def _under(
        self, stmt: Any, loops: Loops, conditions: tuple[ir.Expr, ...], condition: ir.Expr, values: Values
    ) -> None:
        if _depends_on_data(condition):
            self._unsure(stmt, loops, conditions, values)
        else:
            self._read(stmt, loops, (*conditions, condition), values)

    def _unsure(self, stmt: Any, loops: Loops, conditions: tuple[ir.Expr, ...], values: Values) -> None:
        certain, self._certain = self._certain, False
        self._read(stmt, loops, conditions, values)
        self._certain = certain

    def _block(
        self, realize: s_tir.SBlockRealize, loops: Loops, conditions: tuple[ir.Expr, ...], values: Values
    ) -> None:
        block, visible = realize.block, self._visible
        self._visible = False  # blocks declare what they access, and TVM looks no further
        for expr in (realize.predicate, *realize.iter_values):
            self._loads(expr, loops, conditions, values)
        inner = dict(values)
        for iterator, value in zip(block.iter_vars, realize.iter_values):
            inner[iterator.var] = _with(value, values)
        predicate = _with(realize.predicate, values)
        certain = self._certain
        if _depends_on_data(predicate):
            self._certain = False
        elif not is_true(predicate):
            conditions = (*conditions, predicate)
        declared = [region.source for region in (*block.reads, *block.writes)] if is_opaque(block) else []
        start = len(self.found)
        if block.init is not None:
            first = [inner[i.var].equal(i.dom.min) for i in block.iter_vars if i.iter_type == tirx.IterVar.CommReduce]
            self._read(block.init, loops, (*conditions, *first), inner)
        self._read(block.body, loops, conditions, inner)
        if declared:
            self.found[start:] = [a for a in self.found[start:] if not any(a.buffer.same_as(b) for b in declared)]
            for writes, regions in ((False, block.reads), (True, block.writes)):
                for region in regions:
                    ranges = tuple(_range_with(dimension, inner) for dimension in region.region)
                    self._note(region.source, writes, ranges, loops, conditions)
        elif block.init is not None:
            self._drop_own_sums(start, block, loops, inner)
        self._certain, self._visible = certain, visible

    def _drop_own_sums(self, start: int, block: s_tir.SBlock, loops: Loops, values: Values) -> None:
        """Leave out reads of what a reduction sets to zero first, where it does so in every iteration."""
        sums = [values[i.var] for i in block.iter_vars if i.iter_type == tirx.IterVar.CommReduce]
        here = {var for var, _ in loops}
        if all(var in here for value in sums for var in _variables(value)):
            own = [region.source for region in block.writes]
            self.found[start:] = [
                a for a in self.found[start:] if a.writes or not any(a.buffer.same_as(buffer) for buffer in own)
            ]

    def _loads(self, expr: Any, loops: Loops, conditions: tuple[ir.Expr, ...], values: Values) -> None:
        """Note every load in an expression, under the conditions of the branches that it stands in."""

        def branches(call: ir.Call) -> Any:
            if not str(getattr(call.op, "name", "")).endswith("if_then_else"):
                return None
            condition, chosen, other = call.args
            self._loads(condition, loops, conditions, values)
            holds = _with(condition, values)
            for branch, decided in ((chosen, holds), (other, tirx.Not(holds))):
                more = () if _depends_on_data(decided) else (decided,)
                self._loads(branch, loops, (*conditions, *more), values)
            return tvm_ffi.WalkResult.SKIP

        def load(found: ir.TensorLoad) -> None:
            region = tuple(ir.Range.from_min_extent(_with(index, values), 1) for index in found.indices)
            self._note(found.source, False, region, loops, conditions)

        tvm_ffi.structural_walk(expr, [(ir.Call, branches), (ir.TensorLoad, load)], order="pre")

    def _note(
        self,
        buffer: tirx.Var,
        writes: bool,
        region: tuple[ir.Range, ...],
        loops: Loops,
        conditions: tuple[ir.Expr, ...],
    ) -> None:
        known = not any(_depends_on_data(bound) for dimension in region for bound in (dimension.min, dimension.extent))
        inner, self._places = self._inner, self._places + 1
        ring = self._ring_of(buffer, inner) if inner is not None else 0
        if ring:
            turn = tirx.floormod(inner.loop_var - inner.min, ring)
            region = (ir.Range.from_min_extent(turn, 1), *region)
        access = Access(buffer, writes, region if known else None, loops, conditions, self._places, self._certain)
        access = replace(access, rings=int(ring > 0), visible=self._visible)
        self.found.append(access)


def async_race(body: LoopBody, copies: Sequence[int]) -> tuple[int, int, tirx.Var] | None:
    """Find a copy that may not be asynchronous: what runs while it is under way may meet it in memory.

    Returns the positions of the copy and of the other statement, and the buffer. A statement that writes what a copy
    reads is behind it if it reads what the copy writes, since it waits for that.
    """
    for copy in copies:
        filled = [access.buffer for access in body.accesses[copy] if access.writes]
        for other in range(len(body.statements)):
            waits = any(body.reads(other, buffer) for buffer in filled)
            for mine in body.accesses[copy] if other != copy else ():
                for access in body.accesses[other]:
                    if not access.writes or not access.buffer.same_as(mine.buffer):
                        continue
                    early = body.touch(access, mine, None)  # the other one's of an earlier iteration
                    now = body.touch(mine, access, 0) and (mine.writes or not waits or other < copy)
                    late = not mine.writes and not waits and body.touch(mine, access, None)
                    if now or late or (early and not mine.writes):
                        return copy, other, mine.buffer
    return None


def _box(
    region: Sequence[ir.Range], loops: Loops, conditions: Sequence[ir.Expr]
) -> list[tuple[ir.Expr, ir.Expr]] | None:
    """Return the least and greatest index in each dimension, where loops visit all between; None where they may not.

    By counting, which takes on what affine maps do not: a split with a remainder, of several fused loops.
    """
    count = math.prod(int(extent.extent) for _, extent in loops)
    if count > MOST_COUNTED or any(not isinstance(extent.min, tirx.IntImm) for _, extent in loops):
        return None
    ranges = [np.arange(int(extent.min), int(extent.min) + int(extent.extent)) for _, extent in loops]
    values = {var: grid.ravel() for (var, _), grid in zip(loops, np.meshgrid(*ranges, indexing="ij"))}
    zero = {var: tirx.const(0, var.ty) for var, _ in loops}
    analyzer, offsets, around = sym.Analyzer(), [], []
    try:
        kept = np.all([np.broadcast_to(_counted(c, values), count) for c in conditions], axis=0) | np.zeros(count, bool)
        for dimension in region:
            fixed = _with(dimension.min, zero)
            varying = _counted(analyzer.simplify(dimension.min - fixed, 4), values)
            offsets.append(np.broadcast_to(varying, count)[kept])
            around.append((fixed, _counted(dimension.extent, {})))
    except _NotCounted:
        return None
    if not kept.any():
        return None
    visited = np.unique(np.stack(offsets), axis=1).shape[1]
    if visited < math.prod(int(offset.max() - offset.min() + 1) for offset in offsets) or any(
        extent > 1 and offset.min() != offset.max() for (_, extent), offset in zip(around, offsets)
    ):
        return None
    return [
        (fixed + int(offset.min()), fixed + int(offset.max()) + int(extent) - 1)
        for (fixed, extent), offset in zip(around, offsets)
    ]


class _NotCounted(Exception):
    """An expression holds a variable or an operation that no count knows."""


def _counted(expr: Any, values: Mapping[tirx.Var, np.ndarray]) -> Any:
    """Evaluate an expression for many values of its variables at once."""
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tirx.Var) and expr in values:
        return values[expr]
    if isinstance(expr, tirx.Not):
        return np.logical_not(_counted(expr.a, values))
    if isinstance(expr, tirx.Cast):
        return _counted(expr.value, values)
    if type(expr) in COUNTED:
        return COUNTED[type(expr)](_counted(expr.a, values), _counted(expr.b, values))
    raise _NotCounted


def _shared(accesses: list[Access], others: list[Access]) -> list[tirx.Var]:
    """Return the buffers that two statements access, one of them writing."""
    found: list[tirx.Var] = []
    for one in accesses:
        meets = any((one.writes or other.writes) and one.buffer.same_as(other.buffer) for other in others)
        if meets and not any(one.buffer.same_as(buffer) for buffer in found):
            found.append(one.buffer)
    return found


def _wrappers(loop: tirx.For) -> list[s_tir.SBlock]:
    """Return the blocks between a loop and its statements."""
    return [realize.block for realize in body_parts(loop)[0]]


def _wrapped_values(loop: tirx.For) -> dict[tirx.Var, ir.Expr]:
    """Return what the variables of these blocks stand for."""
    values: dict[tirx.Var, ir.Expr] = {}
    for realize in body_parts(loop)[0]:
        for iterator, value in zip(realize.block.iter_vars, realize.iter_values):
            values[iterator.var] = _with(value, values)
    return values


def is_opaque(block: s_tir.SBlock) -> bool:
    """Return whether a block's accesses are known from what it declares only: calls that get addresses, other views."""
    found: list[ir.Call] = []

    def note(call: ir.Call) -> Any:
        if is_hidden_read(call):
            return tvm_ffi.WalkResult.SKIP
        if not _is_pure(call) or str(call.op.name).endswith(("address_of", "buffer_data")):
            found.append(call)
        return None

    tvm_ffi.structural_walk(block.body, (ir.Call, note), order="pre")
    return bool(found) or bool(block.match_buffers)


def _depends_on_data(expr: Any) -> bool:
    """Return whether an expression is more than arithmetic on loop variables."""
    found: list[Any] = []
    tvm_ffi.structural_walk(expr, ((ir.TensorLoad, ir.Call, tirx.Let), found.append))
    return any(not isinstance(node, ir.Call) or not _is_pure(node) for node in found)


def _is_pure(call: ir.Call) -> bool:
    kind = getattr(call.op, "get_attr", lambda _: None)("TCallEffectKind")
    return kind is not None and int(kind) in PURE


def _variables(expr: Any) -> list[tirx.Var]:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, found.append))
    return found


def _with(expr: Any, values: Values) -> Any:
    """Return an expression with values in the place of variables."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var))) if values else expr


def _range_with(extent: ir.Range, values: Values) -> ir.Range:
    return ir.Range.from_min_extent(_with(extent.min, values), _with(extent.extent, values))


def _range_of(loop: tirx.For) -> ir.Range:
    return ir.Range.from_min_extent(loop.min, loop.extent)


def _apart(one: ir.Range, other: ir.Range) -> ir.Expr:
    """Return the claim that two ranges have nothing in common."""
    if is_one(one.extent) and is_one(other.extent):
        return tirx.NE(one.min, other.min)
    return tirx.any(one.min + one.extent <= other.min, other.min + other.extent <= one.min)


def _is_fixed(extent: ir.Range) -> bool:
    return isinstance(extent.extent, tirx.IntImm) and int(extent.extent) > 0


def _all(claims: Sequence[ir.Expr]) -> ir.Expr:
    return tirx.all(*claims) if claims else tirx.const(True, "bool")


def _any(claims: Any) -> ir.Expr:
    claims = list(claims)
    return tirx.any(*claims) if claims else tirx.const(False, "bool")


def _proved(analyzer: sym.Analyzer, claim: ir.Expr) -> bool:
    return analyzer.can_prove(claim) or analyzer.can_prove(claim, ProofStrength.SYMBOLIC_BOUND)
