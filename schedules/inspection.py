"""Reading a schedule: names, extents and the statements under a loop. Nothing here changes anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.errors import IllegalSchedule

UNROLL_RING = "unroll_ring"  # on a pipelined loop: stages of the ring, whose turn is to be written out
PIPELINE_STAGE = "software_pipeline_stage"
SHARED_SCOPES = ("shared", "shared.dyn")
FRAGMENT = "local.fragment"  # registers of a whole warp or warp group (schedules.tensor_cores.fragments)
DEVICE_SCOPES = ("global", "")
WARP_SCOPES = ("warp", "wmma.", "m16n8k8.")  # TVM's own for registers of a whole warp, or what they begin with


def in_registers(scope: str) -> bool:
    """Return whether a scope is registers, of a thread or of several together."""
    return scope in ("local", FRAGMENT) or scope.startswith(WARP_SCOPES)


def block_name(sch: Schedule, block: SBlockRV) -> str:
    """Return the block's name, for messages."""
    return str(sch.get(block).name_hint)


def loop_name(sch: Schedule, loop: LoopRV) -> str:
    """Return the name of the loop's variable, for messages."""
    return str(sch.get(loop).loop_var.name)


def loop_extent(sch: Schedule, loop: LoopRV) -> int:
    """Return the loop's trip count; IllegalSchedule where only run time knows it."""
    extent = sch.get(loop).extent
    if not is_constant(extent):
        raise IllegalSchedule(
            "the loop's extent is known at run time only",
            loop=loop_name(sch, loop),
            value=extent,
            limit="a constant",
            remedy="give the function constant shapes",
        )
    return int(extent)


def constant_shape(buffer: tirx.Var) -> list[int]:
    """Return a buffer's extents; IllegalSchedule where only run time knows one."""
    for extent in buffer.shape:
        if not is_constant(extent):
            raise IllegalSchedule(
                f"an extent of {buffer.name} is known at run time only",
                value=extent,
                limit="a constant",
                remedy="give the function constant shapes",
            )
    return [int(extent) for extent in buffer.shape]


def is_constant(extent: tirx.Expr) -> bool:
    """Return whether an extent is a number, and not known at run time only."""
    return isinstance(extent, tirx.IntImm)


def is_multiple(extent: tirx.Expr | int, size: int) -> bool:
    """Return whether an extent is a multiple of ``size``, for each value of what only run time knows."""
    return sym.Analyzer().can_prove_equal(tirx.floormod(extent, size), 0)


def is_one(number: object) -> bool:
    """Return whether an expression is the number 1."""
    return isinstance(number, tirx.IntImm) and int(number) == 1


def is_zero(number: object) -> bool:
    """Return whether an expression is the number 0."""
    return isinstance(number, tirx.IntImm) and int(number) == 0


def is_true(condition: object) -> bool:
    """Return whether a condition always holds, as far as it says so itself."""
    return isinstance(condition, tirx.IntImm) and bool(int(condition))


def replaced(expr: ir.Expr, values: Mapping[tirx.Var, ir.Expr | int]) -> ir.Expr:
    """Return an expression with values in the place of variables."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)))


def thread_tag(loop: tirx.For) -> str:
    """Return what a loop is bound to ("threadIdx.x"), "" if it is not bound."""
    return str(loop.thread_binding.thread_tag) if loop.thread_binding is not None else ""


def without_carries(value: Any, analyzer: sym.Analyzer) -> Any:
    """Divide and take remainders in an expression or statement without the parts of sums that cannot carry.

    ``(64·k + lane) % 384`` becomes ``k % 6 · 64 + lane``, and that ``// 128`` becomes ``k % 6 // 2``, where
    ``analyzer`` knows that a lane is below 64.
    """

    def quotient(found: tirx.FloorDiv) -> ir.Expr:
        parts = _parts(found, analyzer)
        return found if parts is None else parts[0] // (int(found.b) // parts[2])

    def remainder(found: tirx.FloorMod) -> ir.Expr:
        parts = _parts(found, analyzer)
        return found if parts is None else parts[0] % (int(found.b) // parts[2]) * parts[2] + parts[1]

    return tvm_ffi.structural_map(value, [(tirx.FloorDiv, quotient), (tirx.FloorMod, remainder)])


def loop_extents(sch: Schedule, block: SBlockRV) -> list[int]:
    """Return the trip counts of the loops around a block, outermost first."""
    return [loop_extent(sch, loop) for loop in sch.get_loops(block)]


def loops_below(sch: Schedule, block: SBlockRV, loop: LoopRV) -> list[LoopRV]:
    """Return the loops around ``block`` that are inside ``loop``, outermost first."""
    loops = sch.get_loops(block)
    target = sch.get(loop)
    depths = [depth for depth, candidate in enumerate(loops) if sch.get(candidate).same_as(target)]
    return loops[depths[0] + 1 :] if depths else loops


def operand_regions(sch: Schedule, block: SBlockRV) -> list[ir.TensorRegion]:
    """Return the regions that a reduction reads beside its own sums, in order."""
    stmt = sch.get(block)
    return [region for region in stmt.reads if not region.source.same_as(stmt.writes[0].source)]


def computed_operands(sch: Schedule, block: SBlockRV) -> list[int]:
    """Return which operands of a contraction (0, 1) are computed by blocks before it, and not just moved."""
    producers = {sch.get(p).writes[0].source: sch.get(p) for p in sch.get_producers(block)}
    sources = [region.source for region in operand_regions(sch, block)]
    return [
        at for at, source in enumerate(sources) if source in producers and not _moves_elements(producers[source].body)
    ]


def condition_of(sch: Schedule, block: SBlockRV) -> Any:
    """Return the condition under which a block runs, in terms of the loops around it; a constant where it always does.

    Conditions of blocks around it do not count.
    """
    return realize_of(sch, block).predicate


def realize_of(sch: Schedule, block: SBlockRV) -> s_tir.SBlockRealize:
    """Return a block with its condition and its iterators' values, in terms of the loops around it."""
    stmt, found = sch.get(block), []
    realizes = (s_tir.SBlockRealize, lambda realize: found.append(realize) if realize.block.same_as(stmt) else None)
    tvm_ffi.structural_walk(sch.mod, realizes)
    return found[0]


def terms_of(condition: ir.Expr) -> list[ir.Expr]:
    """Return what must hold, all of it, for a condition to hold."""
    return [*terms_of(condition.a), *terms_of(condition.b)] if isinstance(condition, tirx.And) else [condition]


def innermost_iterator(sch: Schedule, block: SBlockRV, operand: int) -> int:
    """Return the position among a block's iterators of the last one that an operand's innermost index uses."""
    return max(iterators_of(sch, block, operand)[-1])


def iterators_of(sch: Schedule, block: SBlockRV, operand: int) -> list[set[int]]:
    """Return for each dimension of an operand the positions of the block's iterators that its index uses."""
    iterators = [iterator.var for iterator in sch.get(block).iter_vars]
    found = []
    for extent in operand_regions(sch, block)[operand].region:
        used: list[tirx.Var] = []
        tvm_ffi.structural_walk(extent.min, (tirx.Var, used.append))
        places = enumerate(iterators)
        found.append({place for place, iterator in places if any(var.same_as(iterator) for var in used)})
    return found


@dataclass(frozen=True)
class Statement:
    """One statement directly under a loop: its leaf blocks, what they read and write, how often they run.

    ``stmt`` is the statement itself (for the parts of an inner pipeline, its loop). ``elements`` counts how often its
    blocks run in one iteration of the loop (threads and vector lanes included): the elements that the iteration writes,
    where the statement is a copy. ``vector`` is the extent of its widest vectorized loop, 1 without one. ``wrappers``
    are blocks around its blocks; ``part`` says which of an inner pipeline's three statements it is, and ``idle`` which
    of the blocks do not run in that part.
    """

    stmt: tirx.Stmt
    blocks: tuple[s_tir.SBlock, ...]
    wrappers: tuple[s_tir.SBlock, ...] = ()
    elements: int | ir.Expr = 1
    vector: int = 1
    part: str = ""
    idle: tuple[s_tir.SBlock, ...] = ()

    @property
    def name(self) -> str:
        """Names of its blocks, joined by "+", and the part of an inner pipeline."""
        names = "+".join(str(block.name_hint) for block in self.blocks)
        return f"{names} ({self.part})" if self.part else names

    @property
    def reads(self) -> list[ir.TensorRegion]:
        """Every region that its blocks read."""
        return [region for block in self._running for region in block.reads]

    @property
    def writes(self) -> list[ir.TensorRegion]:
        """Every region that its blocks write."""
        return [region for block in self._running for region in block.writes]

    @property
    def _running(self) -> list[s_tir.SBlock]:
        return [block for block in self.blocks if not any(block.same_as(other) for other in self.idle)]

    def reads_buffer(self, buffer: tirx.Var) -> bool:
        """Return whether one of its blocks reads ``buffer``."""
        return any(region.source.same_as(buffer) for region in self.reads)

    def writes_buffer(self, buffer: tirx.Var) -> bool:
        """Return whether one of its blocks writes ``buffer``."""
        return any(region.source.same_as(buffer) for region in self.writes)

    @property
    def accumulates(self) -> bool:
        """True where it keeps a running sum: a reduction, or reads what it writes."""
        reduces = any(i.iter_type == tirx.IterVar.CommReduce for block in self._running for i in block.iter_vars)
        return reduces or any(self.reads_buffer(region.source) for region in self.writes)

    @property
    def is_pure_copy(self) -> bool:
        """True where it only moves elements (zero outside a predicate), of one dtype: what cp.async can do."""
        return all(_moves_elements(block.body) for block in self.blocks)

    @property
    def wants_two_stages(self) -> bool:
        """True where a block asks for two stages of what it writes, whatever the pipeline needs."""
        return any("double_buffer_scope" in block.annotations for block in self.blocks)

    @property
    def fills_shared(self) -> bool:
        """True where it only writes shared memory, from somewhere else."""
        return bool(self.writes) and all(region.source.scope() in SHARED_SCOPES for region in self.writes)


def statements_under(sch: Schedule, loop: LoopRV) -> list[Statement]:
    """Return the statements of a loop's body, in program order."""
    return statements_of(sch.get(loop))


def statements_of(loop: tirx.For) -> list[Statement]:
    """Return the same of the loop itself, where there is no schedule at hand."""
    return [statement for part in body_parts(loop)[1] for statement in _statements(part)]


def body_parts(loop: tirx.For) -> tuple[list[s_tir.SBlockRealize], list[tirx.Stmt]]:
    """Return the blocks that wrap a loop's whole body, outermost first, and what stands in it, in program order."""
    body, wrappers = loop.body, []
    while isinstance(body, s_tir.SBlockRealize) and _blocks(body.block.body):
        wrappers.append(body)
        body = body.block.body
    return wrappers, list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def scheduled_function(sch: Schedule) -> tirx.PrimFunc:
    """Return the function a schedule works on (``sch.work_on``; "main" by default)."""
    return sch.mod[sch.func_working_on]


def pipelined_loop_around(sch: Schedule, loop: LoopRV) -> str | None:
    """Return the name of a pipelined loop around ``loop``, None if there is none."""
    parent = sch.get_sref(loop).parent
    while parent is not None:
        if isinstance(parent.stmt, tirx.For) and PIPELINE_STAGE in parent.stmt.annotations:
            return str(parent.stmt.loop_var.name)
        parent = parent.parent
    return None


def loops_of(stmt: tirx.Stmt) -> list[tirx.For]:
    """Return every loop in a statement, itself included."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(stmt, (tirx.For, found.append), order="pre")
    return found


def annotated_loops(mod: ir.IRModule | tirx.PrimFunc, key: str) -> Iterator[tirx.For]:
    """Return every loop of a module or function that carries the annotation ``key``, outermost first."""
    functions = [mod] if isinstance(mod, tirx.PrimFunc) else list(mod.functions.values())
    found: list[tirx.For] = []
    for function in functions:
        if isinstance(function, tirx.PrimFunc):
            tvm_ffi.structural_walk(
                function.body,
                (tirx.For, lambda loop: found.append(loop) if key in loop.annotations else None),
                order="pre",
            )
    return iter(found)


def _statements(stmt: tirx.Stmt) -> list[Statement]:
    """Return one statement; three for a loop that is pipelined itself, which TVM rewrites before the one around it."""
    statement = _statement(stmt)
    if isinstance(stmt, tirx.For) and PIPELINE_STAGE in stmt.annotations:
        stages = [int(stage) for stage in stmt.annotations[PIPELINE_STAGE]]
        first, last = (_blocks_in_stage(stmt, stages, end) for end in (min(stages), max(stages)))
        idle = {"prologue": last, "body": (), "epilogue": first}
        return [replace(statement, part=part, idle=blocks) for part, blocks in idle.items()]
    return [statement]


def _blocks_in_stage(loop: tirx.For, stages: list[int], stage: int) -> tuple[s_tir.SBlock, ...]:
    """Return the leaf blocks of a pipelined loop's statements that are in one pipeline stage."""
    return tuple(block for s, at in zip(statements_of(loop), stages) if at == stage for block in s.blocks)


def _statement(stmt: tirx.Stmt) -> Statement:
    vectors = [1]

    def note(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.VECTORIZED:
            vectors.append(int(loop.extent))

    tvm_ffi.structural_walk(stmt, (tirx.For, note))
    leaves = _leaf_blocks(stmt)
    wrappers = [block for block in _blocks(stmt) if not any(block.same_as(leaf) for leaf in leaves)]
    return Statement(stmt, tuple(leaves), tuple(wrappers), _executions(stmt), max(vectors))


def _executions(stmt: tirx.Stmt) -> int | ir.Expr:
    """Count how often a statement's blocks are run: a number, or an expression where an extent is none."""
    if isinstance(stmt, tirx.For):
        return (int(stmt.extent) if is_constant(stmt.extent) else stmt.extent) * _executions(stmt.body)
    if isinstance(stmt, tirx.SeqStmt):
        return sum(_executions(part) for part in stmt.seq)
    if isinstance(stmt, s_tir.SBlockRealize) and _blocks(stmt.block.body):
        return _executions(stmt.block.body)
    return 1


def _moves_elements(body: tirx.Stmt) -> bool:
    """Recognise ``target[...] = source[...]``, or the same with ``source[...] if inside else 0``."""
    if not isinstance(body, tirx.BufferStore):
        return False
    value = body.value
    while isinstance(value, ir.Call) and str(value.op.name).endswith("if_then_else"):  # padding of padding
        value, otherwise = value.args[1], value.args[2]
        if not isinstance(otherwise, (tirx.FloatImm, tirx.IntImm)) or float(otherwise.value) != 0:
            return False
    return isinstance(value, ir.TensorLoad) and value.source.dtype == body.buffer.dtype


def _blocks(stmt: tirx.Stmt) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, lambda block: found.append(block)))
    return found


def _leaf_blocks(stmt: tirx.Stmt) -> list[s_tir.SBlock]:
    return [block for block in _blocks(stmt) if not _blocks(block.body)]


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
