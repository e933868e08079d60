"""A pipeline as text: what runs when, in how many stages, and whether cp.async will really be emitted."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.inspection import (
    DEVICE_SCOPES,
    SHARED_SCOPES,
    Statement,
    in_registers,
    loop_extent,
    loop_name,
    statements_under,
)
from tensorir_ladder.schedules.isa import CP_ASYNC_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.memory.tensor_maps import has_boxes
from tensorir_ladder.schedules.pipeline.async_copies import async_hazard, pads_integers
from tensorir_ladder.schedules.pipeline.checks import buffer_stages, check_lists
from tensorir_ladder.schedules.pipeline.one_barrier import RETIRE, declares_read, hides_reads, is_gate
from tensorir_ladder.schedules.pipeline.own_warp import OWN_WARP

_ASKS = "loads its boxes"
_WAITS_FOR_EMPTY = "waits until its stage is empty"
_BOXES_ARRIVE = (
    "copies by TMA: one thread loads boxes; a stage is full when all bytes of its tile have arrived, and empty when "
    "all warps that read it have said so, in the first turn at once"
)


@dataclass(frozen=True)
class _Lists:
    """The annotations of one loop, as lists."""

    stage: list[int]
    order: list[int]
    asynchronous: list[int]

    @property
    def body(self) -> list[int]:
        """Statement positions in the order of the pipelined loop's body."""
        return sorted(range(len(self.stage)), key=lambda index: self.order[index])


def explain_pipeline(sch: Schedule, loop: LoopRV) -> str:
    """Explain the pipeline annotated on a loop: a table of statements, a time table, the code's shape.

    Four parts: statement | pipeline stage | order | async | writes | stages | bytes per iteration; which iteration each
    statement works on at T1, T2, …; prologue, body and epilogue as pseudo-code with waits and barriers;
    and, for every copy in an asynchronous stage, why cp.async will or will not be emitted (width, scope,
    predicate, dtype, configuration). A loop without annotations says so. Changes nothing, needs no target.

    Barriers inside a statement (threads that add up each other's sums) are not shown; and where the ring has as
    many stages as the loop has iterations, TVM needs one barrier less than is shown. A ring of boxes
    (:func:`schedules.memory.fetch_by_tma`) is shown with what is full and empty, and by role where a producer warp
    loads them.
    """
    statements, name = statements_under(sch, loop), loop_name(sch, loop)
    lists = _annotated(sch, loop)
    if lists is None:
        return _not_pipelined(sch, loop)
    kept = buffer_stages(sch, loop, lists.stage, lists.order)
    extent = loop_extent(sch, loop)
    parts = [
        f"pipeline on loop {name!r}, {extent} iterations, pipeline stages 0 to {max(lists.stage)}",
        _statement_table(statements, lists, kept),
        _time_table(statements, lists, extent),
        _pseudo_code(statements, lists, name, extent, _Boxes.of(sch, loop)),
    ]
    if has_boxes(sch, loop):
        return "\n\n".join([*parts, _BOXES_ARRIVE])
    preflight = [_preflight(sch, loop, s) for s, stage in zip(statements, lists.stage) if stage in lists.asynchronous]
    if preflight:
        parts.append("asynchronous copies (need the pass configuration tirx.use_async_copy):\n" + "\n".join(preflight))
    waiting = [
        (s, async_hazard(sch, loop, s)) for s, at in zip(statements, lists.stage) if at not in lists.asynchronous
    ]
    kept_waiting = [f"  {statement.name}: {hazard.problem}" for statement, hazard in waiting if hazard]
    if kept_waiting:
        parts.append("copies that must be synchronous:\n" + "\n".join(kept_waiting))
    return "\n\n".join(parts)


def time_table(sch: Schedule, loop: LoopRV) -> str:
    """Tell which iteration each statement of a pipelined loop works on at T1, T2, … (the time table alone)."""
    lists = _annotated(sch, loop)
    if lists is None:
        return _not_pipelined(sch, loop)
    return _time_table(statements_under(sch, loop), lists, loop_extent(sch, loop))


def pseudo_code(sch: Schedule, loop: LoopRV) -> str:
    """Write out prologue, body and epilogue of a pipelined loop (that part of :func:`explain_pipeline` alone)."""
    lists = _annotated(sch, loop)
    if lists is None:
        return _not_pipelined(sch, loop)
    name, extent = loop_name(sch, loop), loop_extent(sch, loop)
    return _pseudo_code(statements_under(sch, loop), lists, name, extent, _Boxes.of(sch, loop))


def _not_pipelined(sch: Schedule, loop: LoopRV) -> str:
    names = ", ".join(statement.name for statement in statements_under(sch, loop))
    return f"loop {loop_name(sch, loop)!r} is not pipelined: {names} take turns"


def _annotated(sch: Schedule, loop: LoopRV) -> _Lists | None:
    """Read a loop's annotations, None of a loop without any; IllegalPipeline for lists that do not fit the loop."""
    annotations = sch.get(loop).annotations
    if "software_pipeline_stage" not in annotations:
        return None
    keys = (f"software_pipeline_{key}" for key in ("stage", "order", "async_stages"))
    lists = _Lists(*([int(value) for value in annotations.get(key, [])] for key in keys))
    check_lists(loop_name(sch, loop), statements_under(sch, loop), lists.stage, lists.order)
    return lists


def _statement_table(statements: list[Statement], lists: _Lists, kept: dict[str, int]) -> str:
    rows: list[tuple[str, ...]] = [
        ("statement", "pipeline stage", "order", "async", "writes", "stages", "bytes per iteration")
    ]
    for index, statement in enumerate(statements):
        buffers = [region.source for region in statement.writes]
        near = any(b.scope() in SHARED_SCOPES or in_registers(b.scope()) for b in buffers) and not statement.accumulates
        rows.append(
            (
                statement.name,
                str(lists.stage[index]),
                str(lists.order[index]),
                "yes" if lists.stage[index] in lists.asynchronous else "no",
                ", ".join(f"{buffer.name} ({buffer.scope()})" for buffer in buffers),
                ", ".join(str(kept[str(buffer.name)]) for buffer in buffers),
                str(statement.elements * dtype_bytes(buffers[0].dtype)) if near and buffers else "–",
            )
        )
    return _aligned(rows)


def _time_table(statements: list[Statement], lists: _Lists, extent: int) -> str:
    """Tell which iteration each statement works on, time step by time step."""
    steps = max(lists.stage) + min(extent, 3)
    rows = [("time", *(f"T{step + 1}" for step in range(steps)), "")]
    for index, statement in enumerate(statements):
        tiles = [step - lists.stage[index] for step in range(steps)]
        more = "…" if steps - lists.stage[index] < extent else ""
        rows.append((statement.name, *(str(tile) if 0 <= tile < extent else "" for tile in tiles), more))
    return _aligned(rows)


def _pseudo_code(statements: list[Statement], lists: _Lists, name: str, extent: int, boxes: _Boxes | None) -> str:
    """Write out prologue, body and epilogue; ``statement[i]`` is a statement's iteration i."""
    deepest, memory = max(lists.stage), _SharedMemory()

    def time_step(step: int | None) -> list[str]:
        if boxes:
            return boxes.time_step(statements, lists, step, extent)
        return _time_step(statements, lists, step, extent, memory)

    lines = boxes.own_warp(statements, name, extent) if boxes and boxes.by_own_warp else []
    lines.append("prologue:")
    lines += boxes.first_fill(statements, min(deepest + 1, extent)) if boxes and not boxes.by_own_warp else []
    for step in range(min(deepest, extent)):
        lines += time_step(step)
    lines.append(f"body: for {name} in {deepest} .. {extent - 1}:" if extent > deepest else "body: none")
    if extent > deepest:
        memory.filled = memory.read = True  # by the iteration before
        lines += [line.replace("[now", f"[{name}") for line in time_step(None)]
    lines.append("epilogue:")
    for step in range(extent, extent + deepest):
        lines += time_step(step)
    return "\n".join(lines)


@dataclass(frozen=True)
class _Boxes:
    """A ring of boxes: does a producer warp load them, and do computations say which stages are empty?"""

    by_own_warp: bool
    retires: bool

    @classmethod
    def of(cls, sch: Schedule, loop: LoopRV) -> _Boxes | None:
        """Read a loop; None of one whose copies are no boxes."""
        if not has_boxes(sch, loop):
            return None
        retires = any(map(_retires, statements_under(sch, loop)))
        return cls(OWN_WARP in sch.get(loop).annotations, retires)

    def own_warp(self, statements: list[Statement], name: str, extent: int) -> list[str]:
        """Write the producer warp's loop, in front of the consumers'."""
        copies = [statement for statement in statements if statement.fills_shared]
        asked = [f"  {each.name}[{name}]: one thread {_WAITS_FOR_EMPTY}, and {_ASKS}" for each in copies]
        return [f"producer warp: for {name} in 0 .. {extent - 1}:", *asked, "consumer warpgroups:"]

    def time_step(self, statements: list[Statement], lists: _Lists, step: int | None, extent: int) -> list[str]:
        """Write out a time step: statements in the body's order with what they do to mbarriers, then the next copies.

        These are asked for a time step before their own, as soon as their stage is empty; the first turn's at once.
        """
        lines: list[str] = []
        for index in lists.body:
            statement, stage = statements[index], lists.stage[index]
            if statement.fills_shared or not (step is None or 0 <= step - stage < extent):
                continue
            tile = (f"now - {stage}" if stage else "now") if step is None else str(step - stage)
            said = ": wait until its stage is full" if is_gate(statement) else ""
            said = ": wait for the computation; its stage is empty" if _retires(statement) else said
            lines.append(f"  {statement.name}[{tile}]{said}")
        asks = step is None or max(lists.stage) < step + 1 < extent
        if self.by_own_warp or not asks:
            return lines
        waits, more = (f"{_WAITS_FOR_EMPTY}, and " if self.retires else ""), (", while there are any" * (step is None))
        tile = "now + 1" if step is None else str(step + 1)
        copies = [f"  {each.name}[{tile}]: one thread {waits}{_ASKS}{more}" for each in statements if each.fills_shared]
        return [*lines, *([] if self.retires else ["  barrier"]), *copies]

    def first_fill(self, statements: list[Statement], tiles: int) -> list[str]:
        """Write what is asked for before any of it is waited for."""
        copies = [each.name for each in statements if each.fills_shared]
        return [f"  {name}[0 .. {tiles - 1}]: one thread {_ASKS}" for name in copies]


def _retires(statement: Statement) -> bool:
    return any(RETIRE in block.annotations for block in statement.blocks)


@dataclass
class _SharedMemory:
    """Shared memory since the last barrier: has it been filled, has it been read?"""

    filled: bool = False
    read: bool = False

    def barrier(self) -> None:
        """Let all threads meet: what was filled can be read, what was read can be filled."""
        self.filled = self.read = False


def _time_step(
    statements: list[Statement], lists: _Lists, step: int | None, extent: int, memory: _SharedMemory
) -> list[str]:
    """Write out a time step's statements in the body's order, each after what it waits for; ``None`` is the body's."""
    due = [index for index in lists.body if step is None or 0 <= step - lists.stage[index] < extent]
    lines: list[str] = []
    fills = [index for index in due if statements[index].fills_shared]
    committed = [index for index in fills if lists.stage[index] in lists.asynchronous]
    waits = {index: _in_flight(lists, copy, index, step, extent) for index, copy in _awaited(statements, lists, due)}
    for index in due:
        stage = lists.stage[index]
        tile = f"now - {stage}" if stage else "now"
        shown = tile if step is None else str(step - stage)
        producers = _producers(statements, index)
        if waits and index == min(waits, key=due.index):  # one wait, for all that follows
            lines.append(f"wait_group {min(waits.values())}; barrier")
            memory.barrier()
        elif (producers and memory.filled) or (index in fills and memory.read):
            lines.append("barrier")
            memory.barrier()
        memory.filled |= index in fills and stage not in lists.asynchronous
        memory.read |= bool(producers) and not (is_gate(statements[index]) or hides_reads(statements[index]))
        commit = "; commit_group" if index in committed[-1:] else ""
        lines.append(f"{statements[index].name}[{shown}]{commit}")
    return [f"  {line}" for line in lines]


def _awaited(statements: list[Statement], lists: _Lists, due: list[int]) -> list[tuple[int, int]]:
    """Return the statements of a time step that read asynchronous copies, each with the first of these copies."""
    readers = [(i, [c for c in _producers(statements, i) if lists.stage[c] in lists.asynchronous]) for i in due]
    return [(reader, copies[0]) for reader, copies in readers if copies]


def _in_flight(lists: _Lists, copy: int, reader: int, step: int | None, extent: int) -> int:
    """Count the groups committed after the one that a reader needs: what it may leave in flight."""
    issued_this_step = lists.order[copy] < lists.order[reader]
    behind = lists.stage[reader] - lists.stage[copy]
    if step is None:
        return behind if issued_this_step else behind - 1
    if step < max(lists.stage) and not issued_this_step:
        return 0  # TVM cannot prove that the iteration before issued a copy, and waits for all
    committed = min(step - lists.stage[copy] + issued_this_step, extent)
    return committed - (step - lists.stage[reader]) - 1


def _producers(statements: list[Statement], reader: int) -> list[int]:
    """Return the copies to shared memory that a statement reads from, as far as TVM knows."""
    return [
        index
        for index, producer in enumerate(statements)
        if index != reader
        and producer.fills_shared
        and any(declares_read(statements[reader], region.source) for region in producer.writes)
    ]


def _preflight(sch: Schedule, loop: LoopRV, statement: Statement) -> str:
    """Say why TVM will lower this copy to cp.async, or why not."""
    if hazard := async_hazard(sch, loop, statement):
        return f"  {statement.name}: must be synchronous: {hazard.problem}"
    itemsize = dtype_bytes(statement.writes[0].source.dtype)
    width = statement.vector * itemsize
    obstacles = []
    if not statement.fills_shared:
        obstacles.append("it does not write shared memory")
    if not all(region.source.scope() in DEVICE_SCOPES for region in statement.reads):
        obstacles.append("it does not read global memory")
    if not statement.is_pure_copy:
        obstacles.append("it computes or converts on the way, or pads with something else than zero")
    if width not in CP_ASYNC_BYTES:
        obstacles.append(f"{width} bytes a thread is none of {', '.join(map(str, CP_ASYNC_BYTES))}")
    if obstacles:
        return f"  {statement.name}: no cp.async, because " + "; ".join(obstacles)
    padded = ", but ordinary copies where it pads: TVM knows zeros of floats only" if pads_integers(statement) else ""
    return f"  {statement.name}: cp.async of {width} bytes{padded}"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
