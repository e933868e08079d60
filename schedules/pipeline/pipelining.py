"""Software pipelining: overlapping the loads of coming iterations with the arithmetic of this one.

TVM gives each statement of a pipelined loop a *pipeline stage* (how many iterations it runs behind the first) and an
*order* (its place in the body of the pipelined loop). Shared memory then holds a ring of several *stages* of each
operand, tile k in stage k % stages; a prologue fills them, an epilogue drains them::

    time        T1          T2          T3          T4        ...
    load        tile 0      tile 1      tile 2      tile 3           pipeline stage 0
    compute                             tile 0      tile 1           pipeline stage 2: three stages, two tiles ahead

TVM does the rewriting when it lowers the annotations that :func:`pipeline_loop` makes, and TVM's checks
come then, with empty block names; :func:`schedules.pipeline.check_pipeline` makes them at once,
and those TVM leaves out. :func:`schedules.pipeline.explain_pipeline` shows what was made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

from tvm import ir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.errors import IllegalPipeline, warn
from tensorir_ladder.schedules.inspection import (
    PIPELINE_STAGE,
    SHARED_SCOPES,
    UNROLL_RING,
    Statement,
    annotated_loops,
    in_registers,
    loop_extent,
    loop_name,
    statements_under,
)
from tensorir_ladder.schedules.passes import PIPELINE, needs_of, require_pipeline
from tensorir_ladder.schedules.pipeline.async_copies import COMPUTES, async_obstacle
from tensorir_ladder.schedules.pipeline.checks import (
    check_asynchronous,
    check_loop,
    check_pipeline,
    check_statements,
    shown,
    whole_number,
)
from tensorir_ladder.schedules.pipeline.dependences import LoopBody, async_race
from tensorir_ladder.schedules.pipeline.one_barrier import HIDES_READS, gate_copies, is_gate, retires
from tensorir_ladder.schedules.pipeline.own_buffers import separate_all

STAGE, ORDER, ASYNC = PIPELINE_STAGE, "software_pipeline_order", "software_pipeline_async_stages"
DOUBLE_BUFFER = "double_buffer_scope"

# Where a statement stands in the body of the pipelined loop. Registers are stored to shared memory before
# the next loads are issued into them, and a result is consumed before the next one overwrites it: then
# one stage of either is enough, and no index changes with the iteration, which registers cannot have.
PLACE_IN_BODY = {"gate": -1, "copy": 0, "load": 1, "epilogue": 2, "transform": 3, "compute": 4}
# A computation that runs on by itself is issued first, and retired last: copies are issued while it runs.
PLACE_IF_RETIRED = {**PLACE_IN_BODY, "compute": 0, "copy": 1, "load": 2, "epilogue": 3, "retire": 4}
# With an inner pipeline that is filled ahead: its body reads the last of this stage, then the gate admits the next
# tile, of which the first fragments are filled, and the copies may fill this stage again.
PLACE_AHEAD = {"body": 0, "gate": 1, "fill": 2, "copy": 3, "compute": 4}


@dataclass(frozen=True)
class PipelinePlan:
    """A loop's pipeline: TVM's lists, statement by statement, and what their lowering needs.

    ``statements`` and ``roles`` name the loop's statements and what they are to the pipeline: "load"
    (global memory to registers, on the way to shared memory), "copy" (an operand to shared memory or
    registers), "transform" (a cast or the like of a copied operand, or a reset), "compute" (uses operands),
    "epilogue" (uses what compute made, and no copy), "gate" (waits, in the form with one barrier), "retire" (waits for
    a computation that runs on by itself, :mod:`schedules.tensor_cores.warpgroup`), "fill" and "body" (of an inner
    pipeline that is filled ahead; its end computes). ``stage``, ``order`` and ``async_stages`` are TVM's lists (see the
    module's text), empty without a pipeline; ``stages`` counts those of each copied operand; ``needs_pipeline`` says
    that the schedule asked for what TVM's own pipeline would drop (:func:`schedules.passes.require_pipeline`).
    """

    loop: LoopRV
    stages: int
    statements: tuple[str, ...]
    roles: tuple[str, ...]
    stage: tuple[int, ...]
    order: tuple[int, ...]
    async_stages: tuple[int, ...]
    unroll_ring: bool = False
    needs_pipeline: bool = False

    @property
    def pass_config(self) -> dict[str, bool]:
        """Pass configuration without which asynchronous copies are lowered to ordinary ones."""
        return {"tirx.use_async_copy": True} if self.async_stages else {}

    @property
    def tir_pipeline(self) -> str:
        """Compilation pipeline that lowers the loop; TVM's own refuses what it would drop (:mod:`schedules.passes`)."""
        return PIPELINE if self.needs_pipeline or (self.unroll_ring and self.stages > 1) else "s_tir"


def infer_pipeline(
    sch: Schedule,
    loop: LoopRV,
    stages: int = 3,
    async_copy: bool | str = "auto",
    *,
    one_barrier: bool = False,
    unroll_ring: bool = False,
    fill_ahead: bool = False,
) -> PipelinePlan:
    """Work out stages, order and asynchronous stages from what the loop's statements read and write.

    Nothing is changed. A *copy* fills shared memory or registers, keeps no running sum, reads nothing
    that the loop computes, and is consumed by a later statement of the same loop; copies of copies run
    through registers on their way to shared memory. What uses copies computes; what lies between a copy
    and its use (a cast, a dequantisation) runs with the computation, and what uses results runs one pipeline
    stage after it, unless it, or something that it feeds, needs a copy as well (softmax: the maximum, then the row
    again): that runs with the computation, in program order. Works on any number of statements and copies,
    and on an inner loop over registers (:func:`pipeline_loop` of ``k_inner``, whose copies go from shared
    memory to registers).

    Parameters
    ----------
    stages : how many tiles of each copied operand the ring holds; 1 for no pipeline. More than the loop has
        iterations warns, and as many as it has are planned.
    async_copy : "auto" makes copies asynchronous where all of them only move elements from global to
        shared memory (cp.async; sm_80 and newer); True demands it; False forbids it.
    one_barrier : the form of :mod:`schedules.pipeline.one_barrier`: all copies as one statement, a gate, one barrier
        per iteration. Needs asynchronous copies, and nothing else that writes shared memory.
    unroll_ring : write out one turn of the ring, so that stage numbers are constants
        (:func:`schedules.pipeline.unroll_rings`).
    fill_ahead : fill the registers of an inner pipeline for the next iteration at the end of this one, instead of
        at the start of the next. Needs ``one_barrier``, and an inner pipeline of two stages with an even number of
        iterations, so that the registers filled ahead are not those still in use.

    Raises
    ------
    IllegalPipeline : for fewer than 1 stage; for a loop without copies or without their use; for a loop
        inside a pipelined one (the inner loop comes first); for ``async_copy=True`` where a copy cannot be
        asynchronous, naming it; for ``one_barrier`` where two are needed; for ``fill_ahead`` without the above.
    """
    name = check_loop(sch, loop)
    _check_flags(name, async_copy, one_barrier=one_barrier, unroll_ring=unroll_ring, fill_ahead=fill_ahead)
    body = LoopBody.of(sch, loop)
    statements = body.statements
    names = tuple(statement.name for statement in statements)
    gated = any(is_gate(statement) for statement in statements)
    needs_pipeline = bool(needs_of(sch.mod[sch.func_working_on]))
    stages = fitting_stages(sch, loop, stages)
    if stages == 1 and not gated:
        return PipelinePlan(loop, 1, names, (), (), (), (), needs_pipeline=needs_pipeline)
    roles = _roles(body, name)
    asynchronous = _asynchronous(sch, loop, body, roles, async_copy)
    if one_barrier or gated:
        _check_one_barrier(statements, roles, asynchronous and stages > 1, name)
    if one_barrier and not gated:
        names, roles = _with_gate(names, roles)
    if fill_ahead:
        roles = _ahead_roles(sch, loop, name, statements, roles)
    in_flight = next((left for left in map(retires, statements) if left is not None), 0)
    stage = _pipeline_stages(roles, stages, in_flight, fill_ahead, name)
    order = _order_of(roles, fill_ahead)
    async_stages = (0,) if asynchronous else ()
    return PipelinePlan(loop, stages, names, roles, stage, order, async_stages, unroll_ring, needs_pipeline)


def fitting_stages(sch: Schedule, loop: LoopRV, stages: int) -> int:
    """Return the stages that a loop can fill: no more than it has iterations, with a warning where fewer.

    Raises
    ------
    IllegalPipeline : for a stage count that is no whole number from 1 on.
    """
    name = check_loop(sch, loop)
    stages = whole_number("stage count", stages, name)
    if stages < 1:
        raise IllegalPipeline(
            "stage count below 1",
            loop=name,
            value=stages,
            limit="at least 1",
            remedy="give 1 for no pipeline",
        )
    fitting = min(stages, loop_extent(sch, loop))
    if fitting < stages:
        trips = f"loop {name!r} of {fitting} iterations"
        warn(f"{stages} pipeline stages on {trips}: {fitting} used, more would stay empty")
    return fitting


def pipeline_loop(
    sch: Schedule,
    loop: LoopRV,
    stages: int = 3,
    async_copy: bool | str = "auto",
    *,
    one_barrier: bool = False,
    unroll_ring: bool = False,
    fill_ahead: bool = False,
) -> PipelinePlan:
    """Overlap a loop's copies with what uses them, ``stages`` stages per operand; infer, check, apply.

    ::

        before   for k:
                   A_shared = A[k];  B_shared = B[k]
                   C += A_shared * B_shared
        after    stages 0 .. stages-2 filled from A[0 ..], B[0 ..]            # prologue
                 for k < K - stages + 1:
                   stage (k + stages-1) % stages  filled from A, B at k + stages-1
                   C += stage k % stages
                 C += the remaining stages-1 stages                         # epilogue

    ``stages`` counts those of the ring: 1 leaves the loop alone, n keeps n − 1 tiles ahead. Tiles that share a
    buffer get one each first (:func:`separate_tiles`); a tile that is read outside the loop needs
    :func:`keep_last_tile` before. Asynchronous copies
    (cp.async: sm_80 and newer; 4, 8 or 16 bytes each) need the pass configuration in the result::

        with tvm.transform.PassContext(config=plan.pass_config):
            tvm.compile(sch.mod, target, tir_pipeline=plan.tir_pipeline)

    ``one_barrier``, ``unroll_ring`` and ``fill_ahead`` give the loop a form that costs less and does the same
    (see :func:`infer_pipeline`). Copies staged through registers (:func:`schedules.memory.stage_through_registers`)
    run one pipeline stage deeper: global loads are issued one iteration before their registers are stored to shared
    memory. The loop stays valid; called again, the last call counts (but a gate, once made, stays). Parameters and
    errors are those of :func:`infer_pipeline` and of :func:`check_pipeline`.
    """
    check_loop(sch, loop)
    trial, same = _anew(sch, loop)  # a refusal leaves the schedule as it was
    separated = separate_all(trial, same)
    plan = infer_pipeline(
        trial, same, stages, async_copy, one_barrier=one_barrier, unroll_ring=unroll_ring, fill_ahead=fill_ahead
    )
    _apply(plan, trial, check=True)
    if separated and plan.stage:
        separate_all(sch, loop)
    plan = replace(plan, loop=loop)
    _apply(plan, sch)
    return plan


def _anew(sch: Schedule, loop: LoopRV) -> tuple[Schedule, LoopRV]:
    """Return another schedule of what a schedule has made so far, and the same loop in it.

    ``sch.copy()`` would keep all handles, and fails on blocks that TVM has tensorized (0.27).
    """
    name, wanted = str(sch.func_working_on.name_hint), sch.get(loop)
    anew = Schedule(sch.mod)
    anew.work_on(name)
    blocks = [anew.get_sblock(str(sch.mod[name].body.block.name_hint), name)]
    for block in blocks:  # which grows on the way
        blocks += anew.get_child_blocks(block)
        for found in anew.get_loops(block):
            if anew.get(found).same_as(wanted):
                return anew, found
    raise IllegalPipeline(
        "no block stands in the loop", loop=loop_name(sch, loop), remedy="pipeline the loop that blocks are in"
    )


def pipeline_reads(sch: Schedule, loop: LoopRV, stages: int) -> bool:
    """Read the operands of an inner loop a step ahead, where the loop around it can then be filled ahead: if it did.

    ::

        before   for k:  a = A_shared[k];  C += a * ...
        after    a[0] = A_shared[0]
                 for k < K - 1:  a[(k + 1) % 2] = A_shared[k + 1];  C += a[k % 2] * ...
                 C += a[(K - 1) % 2] * ...

    ``stages`` are those of the loop around it, to whose :func:`pipeline_loop` the result is given as ``fill_ahead``.
    Nothing is changed with one stage, which holds no next tile to read from, or with an odd number of steps, after
    which the two stages of registers would have changed places.
    """
    possible = stages > 1 and loop_extent(sch, loop) % 2 == 0
    if possible:
        pipeline_loop(sch, loop, 2, False)
    return possible


def _apply(plan: PipelinePlan, sch: Schedule, check: bool = False) -> None:
    """Gate the loop if planned, check the plan's lists if told to, and annotate them in the place of earlier ones."""
    loop, statements = plan.loop, statements_under(sch, plan.loop)
    for key in (STAGE, ORDER, ASYNC, UNROLL_RING):
        if key in sch.get(loop).annotations:
            sch.unannotate(loop, key)
    if "gate" in plan.roles and not any(is_gate(statement) for statement in statements):
        roles = _roles(LoopBody.of(sch, loop), loop_name(sch, loop))
        gate_copies(sch, loop, [index for index, role in enumerate(roles) if role == "copy"])
    if plan.stages == 2 and "retire" not in plan.roles:
        _keep_two_stages(sch, loop)
    if plan.stage and check:
        check_pipeline(sch, loop, plan.stage, plan.order, plan.async_stages)
    if plan.stage:
        sch.annotate(loop, STAGE, list(plan.stage))
        sch.annotate(loop, ORDER, list(plan.order))
    if plan.async_stages:
        sch.annotate(loop, ASYNC, list(plan.async_stages))
    if plan.stage and plan.unroll_ring:
        require_pipeline(sch, "a ring written out")
        sch.annotate(loop, UNROLL_RING, plan.stages)


def _keep_two_stages(sch: Schedule, loop: LoopRV) -> None:
    """Ask for the second stage, which TVM leaves out where all it sees of the reads is a gate before the copies."""
    statements = statements_under(sch, loop)
    if any(HIDES_READS in block.annotations for statement in statements for block in statement.blocks):
        copies = [block for statement in statements if statement.fills_shared for block in statement.blocks]
        for block in (block for block in copies if DOUBLE_BUFFER not in block.annotations):
            double_buffer(sch, sch.get_sblock(str(block.name_hint), str(sch.func_working_on.name_hint)))


def double_buffer(sch: Schedule, copy: SBlockRV) -> None:
    """Ask TVM for at least two stages of the buffer a copy block writes (``double_buffer_scope``).

    Read by the software pipeline only: without a pipeline the generated code does not change at all, and
    a pipeline of two or more stages has them already.
    """
    sch.annotate(copy, DOUBLE_BUFFER, 0)


def required_pass_config(mod: ir.IRModule | tirx.PrimFunc) -> dict[str, bool]:
    """Return the pass configuration that a scheduled module needs to be lowered as it was scheduled.

    Read off the annotations: ``tirx.use_async_copy`` if any loop has asynchronous stages, else nothing.
    """
    return {"tirx.use_async_copy": True} if any(True for _ in annotated_loops(mod, ASYNC)) else {}


def _check_flags(name: str, async_copy: bool | str, **flags: bool) -> None:
    """Raise for arguments that are neither of their values."""
    for what, value in flags.items():
        if not isinstance(value, bool):
            raise IllegalPipeline(
                f"{what} is neither true nor false",
                loop=name,
                value=shown(value),
                limit="True | False",
                remedy="choose one",
            )
    if not isinstance(async_copy, bool) and not (isinstance(async_copy, str) and async_copy == "auto"):
        raise IllegalPipeline(
            "unknown async_copy", loop=name, value=shown(async_copy), limit="True | False | 'auto'", remedy="choose one"
        )


def _pipeline_stages(
    roles: tuple[str, ...], stages: int, in_flight: int, fill_ahead: bool, loop: str
) -> tuple[int, ...]:
    """Return each statement's pipeline stage: how many iterations it runs behind the first."""
    first_copy = 1 if "load" in roles else 0
    compute = first_copy + stages - 1 - in_flight
    if in_flight and compute <= first_copy:
        raise IllegalPipeline(
            "computations in flight across the barrier need a stage each, beside those of copies and computation",
            loop=loop,
            value=f"{stages} stages",
            limit=f"at least {in_flight + 2}",
            remedy="give more stages, or leave none in flight",
        )
    stage_of = {
        "load": 0,
        "copy": first_copy,
        "gate": compute,
        "transform": compute,
        "fill": compute,
        "body": compute + 1,  # one later, and the ring no longer, since the gate is between reads and copies
        "compute": compute + fill_ahead,
        "epilogue": compute + 1,
        "retire": compute + in_flight,
    }
    return tuple(stage_of[role] for role in roles)


def _order_of(roles: tuple[str, ...], fill_ahead: bool) -> tuple[int, ...]:
    """Return each statement's place in the body of the pipelined loop."""
    places = PLACE_IF_RETIRED if "retire" in roles else PLACE_AHEAD if fill_ahead else PLACE_IN_BODY
    body = sorted(range(len(roles)), key=lambda index: places[roles[index]])
    return tuple(body.index(index) for index in range(len(roles)))


def _roles(body: LoopBody, loop: str) -> tuple[str, ...]:
    """Return each statement's role in the pipeline; see :class:`PipelinePlan`."""
    statements, carried = body.statements, body.carried()
    copies = [statement for index, statement in enumerate(statements) if _is_copy(index, statements, carried)]
    roles: list[str] = []
    for statement in statements:
        fed_by = [role for role, earlier in zip(roles, statements) if _feeds(earlier, statement)]
        if is_gate(statement):
            roles.append("gate")
        elif retires(statement) is not None:
            roles.append("retire")
        elif statement in copies:
            feeds_copy = any(_feeds(statement, later) for later in copies if later is not statement)
            roles.append("load" if feeds_copy and not statement.fills_shared else "copy")
        elif "compute" in fed_by or "epilogue" in fed_by:
            carries = _carries(statement, statements, carried)
            needed_now = carries or _holds_copies(statement, statements, copies)
            roles.append("compute" if needed_now else "epilogue")
        elif (fed_by or not statement.reads) and not statement.accumulates and _is_used(statement, statements):
            roles.append("transform")
        else:
            roles.append("compute")
    if "copy" not in roles:
        _refuse_without_copies(body, carried, loop)
    if "compute" not in roles:
        raise IllegalPipeline(
            "no use of the copies among the loop's statements",
            loop=loop,
            value=[statement.name for statement in statements],
            remedy="stage operands with stage_in_shared(sch, block, operand, loop) first",
        )
    return tuple(roles)


def _refuse_without_copies(body: LoopBody, carried: list[tirx.Var], loop: str) -> NoReturn:
    """Raise IllegalPipeline for a loop without copies, naming the value between iterations that makes one none."""
    check_statements(loop, body)
    problem = "no copy to shared memory or registers among the loop's statements"
    remedy = "stage operands with stage_in_shared(sch, block, operand, loop) first"
    for statement in (each for each in body.statements if each.reads and not each.accumulates):
        for buffer in carried:
            fills, reads = statement.writes_buffer(buffer), statement.reads_buffer(buffer)
            others = [each for each in body.statements if each is not statement]
            used = [each.name for each in others if each.reads_buffer(buffer)]
            made = [each.name for each in others if each.writes_buffer(buffer)]
            if fills and used:
                problem = f"{statement.name!r} fills {buffer.name}, which {used[0]!r} reads in the next iteration"
                remedy = "load each tile in the iteration that uses it, before its use: the pipeline loads ahead"
            elif reads and made:
                problem = f"{statement.name!r} reads {buffer.name}, which {made[0]!r} writes in the iteration before"
    raise IllegalPipeline(
        f"nothing to load ahead: {problem}",
        loop=loop,
        value=[statement.name for statement in body.statements],
        remedy=remedy,
    )


def _is_copy(index: int, statements: list[Statement], carried: list[tirx.Var]) -> bool:
    statement, earlier = statements[index], statements[:index]
    scopes = [region.source.scope() for region in statement.writes]
    near = all(scope in SHARED_SCOPES or in_registers(scope) for scope in scopes)
    inputs = [producer for producer in earlier if _feeds(producer, statement)]
    from_copies = all(_is_copy(statements.index(producer), statements, carried) for producer in inputs)
    from_copies &= not _reads_any(statement, carried)
    # A transform reads shared memory that the loop fills; a copy through registers reads registers only.
    through_registers = all(not producer.fills_shared for producer in inputs)
    used = any(_feeds(statement, later) for later in statements[index + 1 :])
    return near and used and bool(statement.reads) and from_copies and through_registers and not statement.accumulates


def _holds_copies(statement: Statement, statements: list[Statement], copies: list[Statement]) -> bool:
    """Return whether a statement, or one that it feeds, reads a copy, so that it has to run while the copy is kept.

    In softmax the row's maximum is a result, but the sum of exponentials needs the row once more.
    """
    later = statements[statements.index(statement) + 1 :]
    reads_copy = any(_feeds(copy, statement) for copy in copies)
    return reads_copy or any(_feeds(statement, user) and _holds_copies(user, statements, copies) for user in later)


def _carries(statement: Statement, statements: list[Statement], carried: list[tirx.Var]) -> bool:
    """Tell if a statement makes a value of the next iteration out of this one's, other than a sum of its own.

    What only reads such a value, a store say, may run later, ahead of the statement that changes it.
    """
    others = [other for other in statements if other is not statement]
    apart = [v for v in carried if statement.accumulates and not any(other.writes_buffer(v) for other in others)]
    own = [value for value in carried if value not in apart]
    goes_on = any(statement.writes_buffer(value) for value in own) or any(_feeds(statement, other) for other in others)
    return goes_on and _reads_any(statement, own)


def _reads_any(statement: Statement, buffers: list[tirx.Var]) -> bool:
    return any(statement.reads_buffer(buffer) for buffer in buffers)


def _is_used(statement: Statement, statements: list[Statement]) -> bool:
    return any(_feeds(statement, later) for later in statements[statements.index(statement) + 1 :])


def _feeds(producer: Statement, consumer: Statement) -> bool:
    """Return whether one statement writes what another reads; parts of one inner pipeline are one statement here."""
    same = producer.blocks[0].same_as(consumer.blocks[0])
    return not same and any(consumer.reads_buffer(region.source) for region in producer.writes)


def _asynchronous(sch: Schedule, loop: LoopRV, body: LoopBody, roles: tuple[str, ...], wanted: bool | str) -> bool:
    statements, name = body.statements, loop_name(sch, loop)
    copies = [statement for statement, role in zip(statements, roles) if role in ("load", "copy")]
    obstacles = [(copy, found) for copy in copies if (found := async_obstacle(sch, loop, copy))]
    # TVM 0.27 fails on vectors that are computed into shared memory beside cp.async.
    vectors = [statement for statement in statements if statement.fills_shared and statement.vector > 1]
    obstacles += [(statement, COMPUTES) for statement in vectors if statement not in copies]
    if wanted is True and obstacles:
        statement, found = obstacles[0]
        raise IllegalPipeline(
            found.problem,
            loop=name,
            block=statement.name,
            remedy=f"pass async_copy='auto', or {found.remedy}",
        )
    places = [index for index, role in enumerate(roles) if role in ("load", "copy")]
    if wanted is True:
        check_asynchronous(name, body, places)
    return bool(wanted) and not obstacles and async_race(body, places) is None


def _check_one_barrier(statements: list[Statement], roles: tuple[str, ...], asynchronous: bool, loop: str) -> None:
    """Refuse one barrier where no wait stands at it, or where the threads share something else than the copies."""
    if not asynchronous:
        raise IllegalPipeline(
            "one barrier per iteration needs asynchronous copies in at least two stages, which are awaited at it",
            loop=loop,
            block=next(statement.name for statement, role in zip(statements, roles) if role in ("load", "copy")),
            remedy="leave one_barrier out, or make the copies plain moves from global to shared memory",
        )
    for statement, role in zip(statements, roles):
        if role != "copy" and any(region.source.scope() in SHARED_SCOPES for region in statement.writes):
            raise IllegalPipeline(
                "it writes shared memory that other threads read, which takes a barrier of its own",
                loop=loop,
                block=statement.name,
                remedy="leave one_barrier out",
            )


def _with_gate(names: tuple[str, ...], roles: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names and roles once the copies are one statement with a gate behind it."""
    others = [(name, role) for name, role in zip(names, roles) if role != "copy"]
    copies = "+".join(name for name, role in zip(names, roles) if role == "copy")
    return (copies, "arrived", *(name for name, _ in others)), ("copy", "gate", *(role for _, role in others))


def _ahead_roles(
    sch: Schedule, loop: LoopRV, name: str, statements: list[Statement], roles: tuple[str, ...]
) -> tuple[str, ...]:
    """Tell the roles of an inner pipeline's parts apart; IllegalPipeline where it cannot be filled ahead."""
    parts = [statement.part for statement in statements if statement.part]
    inner = annotated_loops(tirx.PrimFunc([], sch.get(loop).body), STAGE)
    even = all(int(part.extent) % 2 == 0 and max(map(int, part.annotations[STAGE])) == 1 for part in inner)
    if "gate" not in roles or parts != ["prologue", "body", "epilogue"] or len(statements) > 5 or not even:
        raise IllegalPipeline(
            "nothing can be filled ahead: it takes copies with a gate, and one inner pipeline of an even trip count",
            loop=name,
            value=[statement.name for statement in statements],
            remedy="pass one_barrier=True, and call pipeline_loop(sch, inner_loop, 2) first, or leave fill_ahead out",
        )
    others = len(roles) - len(parts)
    return (*roles[:others], "fill", "body", "compute")
