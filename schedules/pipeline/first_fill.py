"""The start of a ring whose computations run on by themselves: every tile it takes requested before any is waited for.

With a multiplication in flight (:func:`schedules.tensor_cores.warpgroup.pipeline_warpgroups`) TVM's prologue holds the
first iteration: it fills stages - 2 stages, waits, starts the multiplication, and fills one more. Its wait is for all
copies on their way, and the next one is requested behind it: a block that starts waits for memory twice, one time after
the other, and for more than it needs. Stages of an empty ring need not wait for anybody, though. So they are all filled
first, and each wait is for its own tile.

In steady state nothing changes. It counts where blocks start often or run shortly: with few k tiles, in many rounds.

Boxes of a ring (:mod:`schedules.pipeline.box_rings`) need no mark: each of its waits is for its own tile as it is, and
what a warp of its own brings is not behind any wait.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import loop_extent, loop_name
from tensorir_ladder.schedules.passes import require_pipeline, with_loop_body
from tensorir_ladder.schedules.pipeline.box_rings import asks_for_boxes, meets, waits_for_boxes
from tensorir_ladder.schedules.pipeline.pipelining import PipelinePlan

FILLS_FIRST = "fills_first"  # on a loop of a pipeline's copies: how many stages its ring has
COMMITS, WAITS, LEFT = "async_commit_queue_scope", "async_wait_queue_scope", "async_wait_inflight_count"  # TVM's


def fill_before_waiting(sch: Schedule, loop: LoopRV, plan: PipelinePlan) -> None:
    """Request all tiles of a pipeline's prologue before the first wait, and let each wait be for its own tile.

    ::

        before   fill 0; fill 1;  wait for 0 and 1;  start 0;  fill 2;   for k from 1 on: ...       # 4 stages
        after    fill 0; fill 1; fill 2;  wait for 0;  start 0;          for k from 1 on: ...
        before   fill 0; fill 1;  wait for 0 and 1;  start 0;  fill 2;  wait for 1;  start 1; ...  # 3 k tiles in all
        after    fill 0; fill 1; fill 2;  wait for 0;  start 0;         wait for 1;  start 1; ...

    ``loop`` is one of a copy's own, which the pipelined loop runs (:attr:`schedules.memory.CooperativeFetch.rounds`),
    and stays as it is: nothing changes before the function is lowered (:func:`lower_first_fills`). ``plan`` is what
    the pipeline was made by. Results are bit for bit the same.

    Raises
    ------
    IllegalPipeline : for a loop of one iteration, which is lowered away together with its mark; for a ring of one
        stage.
    """
    if loop_extent(sch, loop) < 2 or plan.stages < 2:
        raise IllegalPipeline(
            "a ring to fill first has 2 stages or more, and a loop in its copies that stays",
            loop=loop_name(sch, loop),
            value=f"{loop_extent(sch, loop)} iterations, {plan.stages} stages",
            limit="2 of both at least",
            remedy="pass a loop of the copy with more iterations, or leave it out",
        )
    require_pipeline(sch, "a ring filled first")
    sch.annotate(loop, FILLS_FIRST, plan.stages)


def lower_first_fills(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put boxes, and copies that :func:`fill_before_waiting` marked, in front of a prologue's waits; part of lowering.

    ::

        before   bring 0;  wait for 0;  start 0;  bring 1;  wait for 1;  start 1;  bring 2;  wait for 2; ...  # of boxes
        after    bring 0;  bring 1;  bring 2;  wait for 0;  start 0;  wait for 1;  start 1;  wait for 2; ...
    """
    function = function.with_body(tvm_ffi.structural_map(function.body, (tirx.SeqStmt, _boxes_first)))
    if not _stages_of(function.body):
        return function
    body = tvm_ffi.structural_map(function.body, (tirx.SeqStmt, _filled_first))
    return function.with_body(tvm_ffi.structural_map(body, (tirx.For, _unmarked)))


def _boxes_first(sequence: tirx.SeqStmt) -> tirx.Stmt:
    """Put what asks for boxes of an empty stage in front of the sequence's first wait for some."""
    parts = list(sequence.seq)
    wait = next((place for place, part in enumerate(parts) if waits_for_boxes(part)), len(parts))
    met = next((place for place in range(wait, len(parts)) if meets(parts[place])), len(parts))  # to leave a stage
    return _in_front(parts, wait, [place for place in range(wait, met) if asks_for_boxes(parts[place])])


def _in_front(parts: list[tirx.Stmt], wait: int, fills: list[int]) -> tirx.SeqStmt:
    """Move statements before a wait, with what their addresses are made of: such names stand for arithmetic alone."""
    early = [place for place in range(wait, max(fills, default=wait)) if isinstance(parts[place], tirx.Bind)] + fills
    left = [part for place, part in enumerate(parts) if place >= wait and place not in early]
    return tirx.SeqStmt([*parts[:wait], *(parts[place] for place in sorted(early)), *left])


def _filled_first(sequence: tirx.SeqStmt) -> tirx.Stmt:
    parts = list(sequence.seq)
    ring = next((place for place, part in enumerate(parts) if _is_ring(part)), len(parts))
    fills = [place for place, part in enumerate(parts[:ring]) if _is_attribute(part, COMMITS) and _stages_of(part)]
    waits = [place for place, part in enumerate(parts[:ring]) if _is_attribute(part, WAITS)]
    if not fills or not waits or fills[0] > waits[0]:  # the ring's own body waits first
        return sequence
    stages = max(_stages_of(parts[fills[0]]))
    if len(fills) > stages:
        raise IllegalPipeline(
            "more tiles are copied in a prologue than the ring has stages",
            value=len(fills),
            limit=stages,
            remedy="give fill_before_waiting the plan of this pipeline",
        )
    for tile, place in enumerate(waits):
        parts[place] = _waiting(parts[place], len(fills) - 1 - tile)
    return _in_front(parts, waits[0], [place for place in fills if place > waits[0]])


def _waiting(wait: tirx.Stmt, left: int) -> tirx.Stmt:
    """Return a wait that leaves so many copies on their way."""
    inner = wait.body
    if not _is_attribute(inner, LEFT):
        raise TypeError(f"a wait of another form than TVM 0.27 gives it: {inner}")
    return tirx.AttrStmt(wait.node, WAITS, wait.value, tirx.AttrStmt(inner.node, LEFT, left, inner.body))


def _is_attribute(stmt: tirx.Stmt, key: str) -> bool:
    return isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == key


def _is_ring(stmt: tirx.Stmt) -> bool:
    """Return whether a statement is the loop that goes on filling, behind the prologue."""
    return isinstance(stmt, tirx.For) and FILLS_FIRST not in stmt.annotations and bool(_stages_of(stmt))


def _stages_of(stmt: tirx.Stmt) -> list[int]:
    """Return what the marked loops in a statement say."""
    marked: list[int] = []

    def note(loop: tirx.For) -> None:
        marked.extend(int(value) for key, value in loop.annotations.items() if key == FILLS_FIRST)

    tvm_ffi.structural_walk(stmt, (tirx.For, note))
    return marked


def _unmarked(loop: tirx.For) -> tirx.For:
    if FILLS_FIRST not in loop.annotations:
        return loop
    kept = {key: value for key, value in loop.annotations.items() if key != FILLS_FIRST}
    return with_loop_body(loop, loop.body, kept)
