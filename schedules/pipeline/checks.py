"""Refusing pipelines that TVM refuses late, compiles to wrong results, or silently ignores."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalPipeline, warn
from tensorir_ladder.schedules.inspection import (
    Statement,
    body_parts,
    is_constant,
    is_one,
    is_true,
    loop_extent,
    loop_name,
    loops_of,
    pipelined_loop_around,
    scheduled_function,
)
from tensorir_ladder.schedules.pipeline.async_copies import check_hazards
from tensorir_ladder.schedules.pipeline.dependences import LoopBody, async_race
from tensorir_ladder.schedules.pipeline.lifetimes import remedy_of
from tensorir_ladder.schedules.pipeline.one_barrier import GATE, HIDES_READS, RETIRE, hides_reads, is_gate

MOST_STAGES = 64  # a ring of so many tiles, 4 KiB each, is more than any multiprocessor's shared memory


def check_pipeline(
    sch: Schedule, loop: LoopRV, stage: Sequence[int], order: Sequence[int], async_stages: Sequence[int] = ()
) -> None:
    """Raise for pipeline stage and order lists that cannot be right on this loop; nothing is changed.

    ``stage[i]`` and ``order[i]`` belong to the loop's i-th statement, as for TVM's annotations
    ``software_pipeline_stage`` and ``software_pipeline_order``.

    Raises
    ------
    IllegalPipeline : names the block, the loop, the value and the remedy, for

        what TVM refuses when it lowers (with empty block names):
            lists of the wrong length; a body of one statement; an order that repeats or leaves out a
            place; a statement in an earlier stage than one it depends on; dependent statements of one
            stage in the wrong order; an asynchronous stage other than 0.
        what TVM compiles to wrong results:
            negative stages; a computation ordered before two or more asynchronous copies (TVM waits for
            too few of them); reads hidden from TVM (:mod:`schedules.pipeline.one_barrier`) without their gate ordered
            first, with copies that nobody waits for, or of a single stage; a value read in a later pipeline stage
            than it is written, in a buffer that outlives the loop and so has one stage only; blocks whose reads
            and writes are left empty (by ``loop_partition``), for which TVM inserts neither waits nor barriers.
            the same of two arrays of one shape and dtype, where the function has no attribute ``tirx.noalias``;
            two accesses of one element that the lists would exchange, of any kind and across iterations, where they
            cannot be told apart (:mod:`schedules.pipeline.dependences`); reads of a buffer inside the loop that is not
            sure to be written in the same iteration; an asynchronous copy that another statement may meet in memory.
        what TVM ignores:
            an asynchronous stage that no statement has; a condition around the loop's whole body.
        what eats memory, or has no meaning:
            stages above :data:`MOST_STAGES`, since TVM writes out each; loops that are not serial, inside a pipelined
            one, or of an extent known at run time only; lists of anything but whole numbers (numpy's are).

    Warns (UserWarning) about what is legal and useless: more stages than iterations; a
    ``double_buffer_scope`` that changes nothing because the buffer has two stages already.
    """
    name = check_loop(sch, loop)
    stage, order, async_stages = (
        whole_numbers(what, values, name)
        for what, values in (("stage", stage), ("order", order), ("async_stages", async_stages))
    )
    body = LoopBody.of(sch, loop)
    statements = body.statements
    _check_regions(name, statements)
    check_statements(name, body)
    check_lists(name, statements, stage, order)
    for producer, consumer, buffer in _dependences(statements):
        _check_dependence(name, statements, stage, order, producer, consumer, buffer)
    kept = {str(buffer.name): count for buffer, count in body.stages(stage, order).items()}
    _check_gate(name, statements, stage, order, async_stages, kept)
    _check_order(name, body, stage, order)
    _check_async(name, body, stage, order, async_stages)
    _check_aliases(sch, name, body, stage, order, async_stages)
    check_hazards(sch, loop, [s for s, at in zip(statements, stage) if at in async_stages])
    _warn_useless(name, body, stage, order)


def check_loop(sch: Schedule, loop: LoopRV) -> str:
    """Return the loop's name; IllegalPipeline for one whose body cannot be taken apart into statements.

    That is a loop of another kind than serial (or unrolled), with an extent that is known at run time only or that
    is inside a pipelined one; and a body of something else than blocks under loops and conditions.
    """
    if not isinstance(sch, Schedule) or not isinstance(loop, LoopRV):
        raise IllegalPipeline(
            "a pipeline needs a schedule and one of its loops",
            value=f"{type(sch).__name__}, {type(loop).__name__}",
            limit="Schedule, LoopRV",
            remedy="pass what sch.get_loops(block) returns",
        )
    try:
        stmt, name = sch.get(loop), loop_name(sch, loop)
    except (RuntimeError, ValueError) as error:
        raise IllegalPipeline(
            "the loop is not in the schedule (any more)", remedy="pass what sch.get_loops(block) returns now"
        ) from error
    if outer := pipelined_loop_around(sch, loop):
        raise IllegalPipeline(
            f"loop {outer!r} around it is pipelined already, and its lists count this loop as one statement",
            loop=name,
            remedy="pipeline the inner loop first",
        )
    if stmt.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED):
        raise IllegalPipeline(
            "only iterations that come one after the other can overlap",
            loop=name,
            value=f"a {tirx.ForKind(stmt.kind).name.lower()} loop",
            limit="a serial loop",
            remedy="pipeline the loop that the copies and their use stand in",
        )
    for inner in (stmt, *loops_of(stmt.body)):
        if not is_constant(inner.extent) or (inner.step is not None and not is_one(inner.step)):
            what = "a step" if is_constant(inner.extent) else "an extent that is known at run time only"
            raise IllegalPipeline(
                f"loop {str(inner.loop_var.name)!r} has {what}",
                loop=name,
                value=str(inner.step if is_constant(inner.extent) else inner.extent),
                limit="a number of iterations, one after the other",
                remedy="pad the extent to a constant, or give the function constant shapes",
            )
    _check_parts(name, stmt)
    return name


def whole_numbers(what: str, values: Sequence[int], loop: str) -> list[int]:
    """Return a list of whole numbers, numpy's and TVM's too, as Python's; IllegalPipeline for anything else."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise IllegalPipeline(
            f"{what} is no list of whole numbers", loop=loop, value=shown(values), remedy="give one number a statement"
        )
    return [whole_number(what, value, loop) for value in values]


def whole_number(what: str, value: object, loop: str) -> int:
    """Return a whole number, numpy's or TVM's too, as Python's; IllegalPipeline for anything else."""
    if isinstance(value, tirx.IntImm) and str(value.ty.dtype) != "bool":
        value = int(value)
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or abs(number) >= 2**31:
        raise IllegalPipeline(
            f"{what} is no whole number",
            loop=loop,
            value=value if isinstance(value, float) else shown(value),
            limit="a whole number of 32 bits",
            remedy="give a Python or numpy integer",
        )
    return number


def shown(value: object) -> str:
    """Show a value in a message, however long it is."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"a number of {value.bit_length()} bits"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _check_parts(name: str, stmt: tirx.For) -> None:
    """Refuse statements that TVM would count or rewrite otherwise than they stand there."""
    wrappers, parts = body_parts(stmt)
    for part in parts:
        found: list[object] = []
        tvm_ffi.structural_walk(part, (s_tir.SBlock, found.append))
        kinds = (tirx.Bind, tirx.DeclBuffer, tirx.AllocBuffer, tirx.Break, tirx.Continue, tirx.Return)
        foreign: list[tirx.Stmt] = []
        tvm_ffi.structural_walk(part, (kinds[1:], foreign.append))
        if not found or foreign:
            odd = foreign[0] if foreign else part
            raise IllegalPipeline(
                "a statement is no block under loops and conditions, so that its dependences cannot be told",
                loop=name,
                value=type(odd).__name__,
                limit="blocks under loops and conditions",
                remedy="put it into a block (T.sblock), or outside of the loop",
            )
    direct = [part for part in parts if isinstance(part, s_tir.SBlockRealize) and len(parts) > 1]
    for realize in direct:
        block = realize.block
        several = isinstance(block.body, tirx.SeqStmt) or block.init is not None
        if several and is_true(realize.predicate) and block.writes:
            raise IllegalPipeline(
                "TVM counts what stands in a block directly under the loop as statements of the loop",
                loop=name,
                block=str(block.name_hint),
                value="several statements",
                limit="1",
                remedy="put a loop around the block (sch.add_unit_loop), or split it",
            )
    for realize in wrappers:
        if not is_true(realize.predicate):
            raise IllegalPipeline(
                "TVM leaves out the condition of a block around the loop's whole body",
                loop=name,
                block=str(realize.block.name_hint),
                value=str(realize.predicate),
                limit="no condition",
                remedy="move the condition into the statements",
            )


def buffer_stages(sch: Schedule, loop: LoopRV, stage: Sequence[int], order: Sequence[int]) -> dict[str, int]:
    """Return how many stages TVM gives each buffer written under the loop, by name.

    The reader's pipeline stage − the writer's + 1 for buffers that live inside the loop; 1 for the others; and 1 where
    two would do but no writer stands before a reader of a later pipeline stage in the body, unless the writer asks
    for two (``double_buffer_scope``).
    """
    loop_extent(sch, loop)  # a number, or it is refused
    body = LoopBody.of(sch, loop)
    check_lists(loop_name(sch, loop), body.statements, list(stage), list(order))
    return {str(buffer.name): count for buffer, count in body.stages(stage, order).items()}


def check_statements(name: str, body: LoopBody) -> None:
    """Raise IllegalPipeline for a loop of fewer than two statements, and name the ``if`` that makes one of several."""
    count, blocks = len(body.statements), [statement.name for statement in body.statements]
    parts = body_parts(body.loop)[1]
    if count < 2 and isinstance(parts[0], tirx.IfThenElse):
        raise IllegalPipeline(
            "an if holds the loop's whole body, which counts as one statement",
            loop=name,
            block=blocks[0] if blocks else None,
            value=f"if {parts[0].condition}",
            limit="at least 2 statements",
            remedy="give each statement the condition: if c: load, then if c: use",
        )
    if count < 2:
        raise IllegalPipeline(
            "a loop with one statement has nothing to overlap",
            loop=name,
            block=blocks[0] if blocks else None,
            value=f"{count} statement(s)",
            limit="at least 2",
            remedy="stage an operand under this loop first, or pipeline another loop",
        )


def check_lists(name: str, statements: list[Statement], stage: list[int], order: list[int]) -> None:
    """Raise IllegalPipeline for stages and orders that are not one for each statement, or have no meaning."""
    count, blocks = len(statements), [statement.name for statement in statements]
    for what, values in (("stage", stage), ("order", order)):
        if len(values) != count:
            raise IllegalPipeline(
                f"one {what} per statement is needed: {', '.join(blocks)}",
                loop=name,
                value=f"{len(values)} values {reprlib.repr(values)}",
                limit=count,
                remedy="use pipeline_loop, which makes the lists",
            )
    for index, value in enumerate(stage):
        if value > MOST_STAGES:
            raise IllegalPipeline(
                "TVM writes out an iteration for each stage before the loop and behind it",
                loop=name,
                block=blocks[index],
                value=f"stage {value}",
                limit=f"at most {MOST_STAGES}",
                remedy="give fewer stages; no memory holds so many tiles",
            )
        if value < 0:
            raise IllegalPipeline(
                "negative stage, which TVM compiles to wrong results",
                loop=name,
                block=blocks[index],
                value=value,
                limit="at least 0",
                remedy="number stages from 0",
            )
    for index, value in enumerate(order):
        if not 0 <= value < count or value in order[:index]:
            raise IllegalPipeline(
                "order repeats or leaves out a place",
                loop=name,
                block=blocks[index],
                value=f"{value} in {order}",
                limit=f"each of 0 to {count - 1} once",
                remedy="give every statement a place of its own",
            )


def _check_regions(name: str, statements: list[Statement]) -> None:
    for statement in statements:
        for block in (*statement.wrappers, *statement.blocks):
            if not block.writes and not {GATE, RETIRE} & set(block.annotations):
                raise IllegalPipeline(
                    "the block declares no writes, so that TVM sees no dependence and inserts no wait",
                    loop=name,
                    block=str(block.name_hint) or statement.name,
                    remedy="do not pipeline what loop_partition left behind; split the loop instead",
                )


def _check_dependence(
    name: str,
    statements: list[Statement],
    stage: list[int],
    order: list[int],
    producer: int,
    consumer: int,
    buffer: tirx.Var,
) -> None:
    what = f"{statements[consumer].name!r} reads {buffer.name} from {statements[producer].name!r}"
    if stage[producer] > stage[consumer]:
        raise IllegalPipeline(
            f"{what}, which runs in a later stage",
            loop=name,
            block=statements[consumer].name,
            value=f"stage {stage[consumer]}",
            limit=f"at least {stage[producer]}",
            remedy="give the reader the same stage or a later one",
        )
    if stage[producer] == stage[consumer] and order[producer] > order[consumer]:
        raise IllegalPipeline(
            f"{what} of the same stage, which is ordered after it",
            loop=name,
            block=statements[consumer].name,
            value=f"order {order[consumer]}",
            limit=f"above {order[producer]}",
            remedy="order writers before readers within a stage",
        )


def _check_order(name: str, body: LoopBody, stage: list[int], order: list[int]) -> None:
    """Refuse what would exchange two accesses of one element, or leave a read with what another iteration wrote."""
    for broken in body.broken(stage, order):
        first, second, buffer = broken.first.name, broken.second.name, broken.buffer.name
        when = f"{broken.distance} iteration(s) later" if broken.distance else "in the same iteration"
        own = remedy_of(body, broken.buffer, () if broken.distance else (broken.first, broken.second))
        if not broken.first_writes and body.outlives(broken.buffer) and broken.distance:
            raise IllegalPipeline(
                f"{buffer} outlives the loop and has one stage: {first!r} would read what a later iteration of "
                f"{second!r} wrote",
                loop=name,
                block=first,
                value=f"{second!r} {when}, stages {stage}, order {order}",
                remedy=f"{own}use another buffer than {buffer} outside the loop, or give both the same stage, or order "
                "the reader before the writer, one stage behind",
            )
        did, does = (("writes" if writes else "reads") for writes in (broken.first_writes, broken.second_writes))
        raise IllegalPipeline(
            f"{first!r} {did} {buffer} and {second!r} {does} it {when}, which the pipeline would run first",
            loop=name,
            block=second,
            value=f"stages {stage}, order {order}",
            limit="accesses in their order, unless it can be told that they never meet in an element",
            remedy=f"{own}give both the same stage and their order in the loop, or each a buffer of its own",
        )
    for writing, reading, buffer in body.unsure(stage, order):
        raise IllegalPipeline(
            f"{body.statements[reading].name!r} reads {buffer.name} as other threads wrote it in "
            f"{body.statements[writing].name!r}, which TVM overlooks, so that it gives {buffer.name} one stage",
            loop=name,
            block=body.statements[reading].name,
            value=f"stages {stage}, order {order}",
            limit="two stages",
            remedy="give the pipeline a stage more, or annotate the writer's block with double_buffer_scope",
        )
    for reader, buffer in body.uncovered(stage, order):
        writers = " and ".join(repr(statement.name) for statement in body.statements if statement.writes_buffer(buffer))
        raise IllegalPipeline(
            f"{reader.name!r} reads of {buffer.name} what {writers} may not have written in the same iteration, and a "
            f"buffer inside the loop keeps nothing of earlier ones",
            loop=name,
            block=reader.name,
            value=f"stages {stage}, order {order}",
            limit="reads of what each iteration is sure to write",
            remedy="write all of it in every iteration (zeros outside a bound), or use the buffer outside the loop "
            "too, which gives it one stage for all iterations",
        )


def _check_async(name: str, body: LoopBody, stage: list[int], order: list[int], async_stages: list[int]) -> None:
    statements = body.statements
    for number in async_stages:
        if number not in stage:
            raise IllegalPipeline(
                "no statement has this asynchronous stage, and TVM would ignore it",
                loop=name,
                value=number,
                limit=f"one of {sorted(set(stage))}",
                remedy="name a stage that copies have",
            )
        if number != 0:
            raise IllegalPipeline(
                "TVM counts asynchronous copies of stage 0 only, and refuses others when it lowers",
                loop=name,
                value=f"asynchronous stage {number}",
                limit=0,
                remedy="number the copies' stage 0, or leave it synchronous",
            )
        copies = [index for index, value in enumerate(stage) if value == number]
        check_asynchronous(name, body, [index for index in copies if statements[index].fills_shared])
        for producer, consumer, _ in _dependences(statements):
            later = [copy for copy in copies if order[copy] > order[consumer]]
            if producer in copies and stage[consumer] > number and later and len(copies) > 1:
                place = "between" if len(later) < len(copies) else "before"
                raise IllegalPipeline(
                    f"it is ordered {place} {len(copies)} separate asynchronous copies, and TVM would wait for too few",
                    loop=name,
                    block=statements[consumer].name,
                    value=f"order {order[consumer]}, copies at {[order[copy] for copy in later]}",
                    remedy="order copies first, or merge them into one statement with sch.merge",
                )
            if producer in copies and consumer in copies and statements[producer].fills_shared:
                raise IllegalPipeline(
                    f"it reads what {statements[producer].name!r} copies in the same asynchronous stage, which is not "
                    f"waited for",
                    loop=name,
                    block=statements[consumer].name,
                    value=f"stage {number}",
                    limit=f"at least {number + 1}",
                    remedy="give the reader a later stage, or leave the copies synchronous",
                )


def _check_aliases(
    sch: Schedule, name: str, body: LoopBody, stage: list[int], order: list[int], async_stages: list[int]
) -> None:
    """Refuse lists that are wrong where a function without ``tirx.noalias`` gets one array twice."""
    if (scheduled_function(sch).attrs or {}).get("tirx.noalias"):
        return
    for written, read in body.aliases():
        one = body.with_alias(written, read)
        copies = [at for at, value in enumerate(stage) if value in async_stages and one.statements[at].fills_shared]
        if next(one.broken(stage, order), None) or async_race(one, copies):
            raise IllegalPipeline(
                f"{written.name} and {read.name} may be one array, the pipeline reads elements before it writes them",
                loop=name,
                value=f"stages {stage}, order {order}",
                limit="a function with the attribute tirx.noalias",
                remedy='give the function T.func_attr({"tirx.noalias": True}) and arrays that do not overlap, or leave '
                "the pipeline out",
            )


def check_asynchronous(name: str, body: LoopBody, copies: Sequence[int]) -> None:
    """Raise IllegalPipeline for copies that something may meet in memory while they are under way."""
    if found := async_race(body, copies):
        copy, other, buffer = found
        raise IllegalPipeline(
            f"it cannot be asynchronous: {body.statements[other].name!r} may touch elements of {buffer.name} while the "
            f"copy is under way",
            loop=name,
            block=body.statements[copy].name,
            value="an asynchronous copy",
            remedy=f"{remedy_of(body, buffer)}pass async_copy=False, or give the other statement a buffer of its own",
        )
    for copy in copies:
        for index, statement in enumerate(body.statements):
            for region in body.statements[copy].writes:
                if index != copy and body.hides(index, region.source):
                    raise IllegalPipeline(
                        f"it reads {region.source.name} without declaring so, and TVM would not wait for the "
                        f"asynchronous copy {body.statements[copy].name!r}",
                        loop=name,
                        block=statement.name,
                        remedy="pass async_copy=False, or read it in the block's body",
                    )


def _check_gate(
    name: str,
    statements: list[Statement],
    stage: list[int],
    order: list[int],
    async_stages: list[int],
    kept: dict[str, int],
) -> None:
    """Refuse reads that TVM cannot see without a gate before them, and before the copies over what they read.

    A statement of pipeline stage s and order o runs, for tile i, at time (i + s, o). A reader must run after the gate
    of its own tile; and between it and the copy that fills its stage again, ``kept`` tiles later, must be some tile's
    gate.
    """
    gates = [index for index, statement in enumerate(statements) if is_gate(statement)]
    for reader in (index for index, statement in enumerate(statements) if hides_reads(statement)):
        producers = [producer for producer, consumer, _ in _dependences(statements) if consumer == reader]
        copies = [producer for producer in producers if statements[producer].fills_shared]
        if HIDES_READS in _annotations(statements[reader]) and not copies:
            continue  # nothing of this loop's: the copies are an outer loop's
        stages = [kept[str(region.source.name)] for copy in copies for region in statements[copy].writes]
        first = [
            gate
            for gate in gates
            if (stage[gate], order[gate]) < (stage[reader], order[reader])
            and all(_gate_between(stage, order, reader, gate, copy, min(stages)) for copy in copies)
        ]
        awaited = all(stage[copy] in async_stages and stage[copy] < stage[reader] for copy in copies)
        several = all(count > 1 for count in stages)
        if not first or not awaited or not several:
            raise IllegalPipeline(
                "its reads are hidden from TVM, which would put no barrier between them and the next copies",
                loop=name,
                block=statements[reader].name,
                value=f"order {order}, stages {stage}, asynchronous {async_stages}",
                limit="asynchronous copies in two stages at least, and the gate ordered before copies and readers",
                remedy="use pipeline_loop(..., one_barrier=True), which makes the lists",
            )


def _gate_between(stage: list[int], order: list[int], reader: int, gate: int, copy: int, stages: int) -> bool:
    """Look for a gate, of whichever tile, between a reader and the copy that fills the reader's stage again."""
    next_gate = (stage[reader] + (order[gate] < order[reader]), order[gate])
    return next_gate < (stage[copy] + stages, order[copy])


def _warn_useless(name: str, body: LoopBody, stage: list[int], order: list[int]) -> None:
    needed = body.needed_stages(stage, order)
    for buffer, count in body.stages(stage, order).items():
        if count > body.extent:
            loop = f"loop {name!r} of {body.extent} iterations"
            warn(f"{count} stages of {buffer.name} for {loop}: some are never filled")
    for statement in (statement for statement in body.statements if statement.wants_two_stages):
        if min(needed[region.source] for region in statement.writes) > 1:
            warn(f"double_buffer_scope on {statement.name!r} has no effect: the pipeline on {name!r} has its stages")


def _annotations(statement: Statement) -> set[str]:
    return {str(key) for block in statement.blocks for key in block.annotations}


def _dependences(statements: list[Statement]) -> Iterator[tuple[int, int, tirx.Var]]:
    """Yield every (writer, reader, buffer) in program order: positions of two statements of one iteration."""
    for producer, writing in enumerate(statements):
        for consumer in range(producer + 1, len(statements)):
            for region in writing.writes:
                if statements[consumer].reads_buffer(region.source):
                    yield producer, consumer, region.source
