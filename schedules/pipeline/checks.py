"""Refusing pipelines that TVM refuses late, compiles to wrong results, or silently ignores."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import (
    Statement,
    blocks_outside,
    loop_extent,
    loop_name,
    scheduled_function,
    statements_under,
)
from tensorir_ladder.schedules.pipeline.async_copies import check_hazards
from tensorir_ladder.schedules.pipeline.one_barrier import (
    GATE,
    HIDES_READS,
    RETIRE,
    declares_read,
    hides_reads,
    is_gate,
)


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
        what TVM ignores:
            an asynchronous stage that no statement has.

    Warns (UserWarning) about what is legal and useless: more stages than iterations; a
    ``double_buffer_scope`` that changes nothing because the buffer has two stages already.
    """
    name, statements = loop_name(sch, loop), statements_under(sch, loop)
    stage, order = [int(value) for value in stage], [int(value) for value in order]
    _check_regions(name, statements)
    _check_lists(name, statements, stage, order)
    for producer, consumer, buffer in _dependences(statements):
        _check_dependence(name, statements, stage, order, producer, consumer, buffer)
    _check_single_stage(sch, loop, name, statements, stage, order)
    _check_async(name, statements, stage, order, list(async_stages))
    check_hazards(sch, loop, [s for s, at in zip(statements, stage) if at in async_stages])
    _check_gate(name, statements, stage, order, list(async_stages), buffer_stages(sch, loop, stage, order))
    _warn_useless(sch, loop, name, statements, stage, order)


def buffer_stages(sch: Schedule, loop: LoopRV, stage: Sequence[int], order: Sequence[int]) -> dict[str, int]:
    """Return how many stages TVM gives each buffer written under the loop, by name.

    The reader's pipeline stage − the writer's + 1 for buffers that live inside the loop; 1 for the others; and 1 where
    two would do but no writer stands before a reader of a later pipeline stage in the body, unless the writer asks
    for two (``double_buffer_scope``).
    """
    kept = _needed_stages(sch, loop, stage, order)
    for statement in statements_under(sch, loop):
        for region in statement.writes if _asks_for_two(statement) else []:
            name = str(region.source.name)
            kept[name] = max(kept[name], 1 if _outlives(sch, loop, region.source) else 2)
    return kept


def _needed_stages(sch: Schedule, loop: LoopRV, stage: Sequence[int], order: Sequence[int]) -> dict[str, int]:
    statements, kept = statements_under(sch, loop), {}
    for buffer in _written(statements):
        writers = [index for index, statement in enumerate(statements) if statement.writes_buffer(buffer)]
        readers = [index for index, statement in enumerate(statements) if declares_read(statement, buffer)]
        count = max((stage[r] for r in readers), default=0) - min(stage[w] for w in writers) + 1
        crossing = any(order[w] < order[r] and stage[w] < stage[r] for w in writers for r in readers)
        if not readers or _outlives(sch, loop, buffer) or (count == 2 and not crossing):
            count = 1
        kept[str(buffer.name)] = count
    return kept


def _check_lists(name: str, statements: list[Statement], stage: list[int], order: list[int]) -> None:
    count, blocks = len(statements), [statement.name for statement in statements]
    if count < 2:
        raise IllegalPipeline(
            "a loop with one statement has nothing to overlap",
            loop=name,
            block=blocks[0] if blocks else None,
            value=f"{count} statement(s)",
            limit="at least 2",
            remedy="stage an operand under this loop first, or pipeline another loop",
        )
    for what, values in (("stage", stage), ("order", order)):
        if len(values) != count:
            raise IllegalPipeline(
                f"one {what} per statement is needed: {', '.join(blocks)}",
                loop=name,
                value=f"{len(values)} values {values}",
                limit=count,
                remedy="use pipeline_loop, which makes the lists",
            )
    for index, value in enumerate(stage):
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


def _check_single_stage(
    sch: Schedule, loop: LoopRV, name: str, statements: list[Statement], stage: list[int], order: list[int]
) -> None:
    """Refuse reads of a buffer with one stage, since it outlives the loop, that come after it is written again."""
    for producer, consumer, buffer in _dependences(statements):
        behind = stage[consumer] - stage[producer]
        in_time = behind == 0 or (behind == 1 and order[consumer] < order[producer])
        if not in_time and _outlives(sch, loop, buffer):
            raise IllegalPipeline(
                f"{buffer.name} outlives the loop and has one stage: {statements[consumer].name!r} would read what a "
                f"later iteration of {statements[producer].name!r} wrote",
                loop=name,
                block=statements[consumer].name,
                value=f"{behind} stage(s) behind, order {order[consumer]} after {order[producer]}",
                remedy="give both the same stage, or order the reader before the writer, one stage behind",
            )


def _check_async(
    name: str, statements: list[Statement], stage: list[int], order: list[int], async_stages: list[int]
) -> None:
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


def _warn_useless(
    sch: Schedule, loop: LoopRV, name: str, statements: list[Statement], stage: list[int], order: list[int]
) -> None:
    extent, kept = loop_extent(sch, loop), buffer_stages(sch, loop, stage, order)
    for buffer, count in kept.items():
        if count > extent:
            warnings.warn(
                f"{count} stages of {buffer} for loop {name!r} of {extent} iterations: some are never filled",
                stacklevel=3,
            )
    for statement in statements:
        needed = [_needed_stages(sch, loop, stage, order)[str(region.source.name)] for region in statement.writes]
        if _asks_for_two(statement) and min(needed) > 1:
            warnings.warn(
                f"double_buffer_scope on {statement.name!r} has no effect: the pipeline on {name!r} has its stages",
                stacklevel=3,
            )


def _asks_for_two(statement: Statement) -> bool:
    return "double_buffer_scope" in _annotations(statement)


def _annotations(statement: Statement) -> set[str]:
    return {str(key) for block in statement.blocks for key in block.annotations}


def _dependences(statements: list[Statement]) -> Iterator[tuple[int, int, tirx.Var]]:
    """Yield every (writer, reader, buffer) in program order: positions of two statements of one iteration."""
    for producer, writing in enumerate(statements):
        for consumer in range(producer + 1, len(statements)):
            for region in writing.writes:
                if statements[consumer].reads_buffer(region.source):
                    yield producer, consumer, region.source


def _written(statements: list[Statement]) -> list[tirx.Var]:
    found: list[tirx.Var] = []
    for statement in statements:
        for region in statement.writes:
            if not any(region.source.same_as(buffer) for buffer in found):
                found.append(region.source)
    return found


def _outlives(sch: Schedule, loop: LoopRV, buffer: tirx.Var) -> bool:
    """Return whether a block outside the loop touches the buffer, or it is one of the function's own."""
    regions = [r for block in blocks_outside(sch, loop) for r in (*block.reads, *block.writes)]
    parameters = scheduled_function(sch).params
    return any(r.source.same_as(buffer) for r in regions) or any(p.same_as(buffer) for p in parameters)
