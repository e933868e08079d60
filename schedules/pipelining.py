"""Software pipelining: overlapping the loads of coming iterations with the arithmetic of this one.

A pipelined loop's statements get a *stage* (how many iterations a statement runs behind the first) and
an *order* (its place in the body of the pipelined loop). Shared memory then holds several versions of
each operand, the *ring slots*; a prologue fills them, an epilogue drains them::

    time        T1          T2          T3          T4        ...
    load        tile 0      tile 1      tile 2      tile 3           stage 0
    compute                             tile 0      tile 1           stage 2: three slots, two tiles ahead

TVM does the rewriting when it lowers the annotations that :func:`pipeline_loop` makes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from .errors import IllegalPipeline
from .inspection import Statement, annotated_loops, loop_extent, loop_name, statements_under

STAGE, ORDER, ASYNC = (
    "software_pipeline_stage",
    "software_pipeline_order",
    "software_pipeline_async_stages",
)
DOUBLE_BUFFER = "double_buffer_scope"


@dataclass(frozen=True)
class Pipeline:
    """What was annotated on a loop, and what its lowering needs.

    ``statements`` names the loop's statements; ``stage``, ``order`` and ``async_stages`` are TVM's lists
    (see the module's text); ``slots`` is the number of ring slots of each shared operand.
    """

    loop: LoopRV
    slots: int
    statements: tuple[str, ...]
    stage: tuple[int, ...]
    order: tuple[int, ...]
    async_stages: tuple[int, ...]

    @property
    def pass_config(self) -> dict[str, bool]:
        """The pass configuration without which asynchronous copies are lowered to ordinary ones."""
        return {"tirx.use_async_copy": True} if self.async_stages else {}


def pipeline_loop(sch: Schedule, loop: LoopRV, stages: int = 3, async_copy: bool = True) -> Pipeline:
    """Overlap a loop's copies to shared memory with what uses them, ``stages`` ring slots per operand.

    ::

        before   for k:
                   A_shared = A[k];  B_shared = B[k]
                   C += A_shared * B_shared
        after    slots 0 .. stages-2 filled from A[0 ..], B[0 ..]            # prologue
                 for k < K - stages + 1:
                   slot (k + stages-1) % stages  filled from A, B at k + stages-1
                   C += slot k % stages
                 C += the remaining stages-1 slots                          # epilogue

    ``stages`` counts slots: 1 leaves the loop alone, n keeps n − 1 tiles ahead. With ``async_copy`` the
    copies are cp.async (sm_80 and newer; 4, 8 or 16 bytes each), which needs the pass configuration in
    the result::

        with tvm.transform.PassContext(config=pipeline.pass_config):
            tvm.compile(sch.mod, target)

    Copies staged through registers (:func:`schedules.caching.stage_through_registers`) run one stage
    deeper: global loads are issued one iteration before their registers are stored to shared memory.
    A statement that only consumes what the computing statement produced (a write-back) runs one stage
    after it. More stages than iterations warns, and as many slots as iterations are made.

    Raises
    ------
    IllegalPipeline : for fewer than 1 stage; for a loop without copies to shared memory, or without a
        statement that uses them.
    """
    name = loop_name(sch, loop)
    if not isinstance(stages, int) or stages < 1:
        raise IllegalPipeline(
            "stage count below 1", loop=name, value=stages, limit="at least 1", remedy="give 1 for no pipeline"
        )
    statements = statements_under(sch, loop)
    slots = min(stages, loop_extent(sch, loop))
    if slots < stages:
        warnings.warn(
            f"{stages} pipeline stages on loop {name!r} of {slots} iterations: {slots} used, more would stay empty",
            stacklevel=2,
        )
    if slots == 1:
        return Pipeline(loop, 1, tuple(s.name for s in statements), (), (), ())
    parts = _pipeline_parts(statements, name)
    stage, order = _stage_and_order(parts, slots)
    async_stages = (0,) if async_copy and not any(part.role == "load" for part in parts) else ()
    sch.annotate(loop, STAGE, list(stage))
    sch.annotate(loop, ORDER, list(order))
    if async_stages:
        sch.annotate(loop, ASYNC, list(async_stages))
    return Pipeline(loop, slots, tuple(part.name for part in parts), stage, order, async_stages)


def double_buffer(sch: Schedule, copy: SBlockRV) -> None:
    """Ask TVM for at least two versions of the buffer a copy block writes (``double_buffer_scope``).

    Read by the software pipeline only: without a pipeline the generated code does not change at all, and
    a pipeline of two or more slots has its versions already.
    """
    sch.annotate(copy, DOUBLE_BUFFER, 0)


def required_pass_config(mod: ir.IRModule | tirx.PrimFunc) -> dict[str, bool]:
    """The pass configuration a scheduled module needs to be lowered as it was scheduled.

    Read off the annotations: ``tirx.use_async_copy`` if any loop has asynchronous stages, else nothing.
    """
    return {"tirx.use_async_copy": True} if any(True for _ in annotated_loops(mod, ASYNC)) else {}


@dataclass(frozen=True)
class _Part:
    """One statement as the pipeline sees it. Roles: load (global→registers), copy (→shared), compute, write_back."""

    name: str
    role: str


def _pipeline_parts(statements: list[Statement], loop: str) -> list[_Part]:
    produced = [region.source for statement in statements if statement.fills_shared for region in statement.writes]
    loaded = [region.source for statement in statements if statement.fills_shared for region in statement.reads]

    def role(statement: Statement) -> str:
        if statement.fills_shared:
            return "copy"
        if any(region.source.same_as(buffer) for region in statement.writes for buffer in loaded):
            return "load"
        uses_copies = any(region.source.same_as(buffer) for region in statement.reads for buffer in produced)
        return "compute" if uses_copies else "write_back"

    parts = [_Part(statement.name, role(statement)) for statement in statements]
    for needed, problem in (
        ("copy", "nothing to load ahead: no copy to shared memory"),
        ("compute", "no use of the copies"),
    ):
        if not any(part.role == needed for part in parts):
            raise IllegalPipeline(
                f"{problem} among the loop's statements",
                loop=loop,
                value=[part.name for part in parts],
                remedy="stage operands with stage_in_shared(sch, block, operand, loop) first",
            )
    return parts


def _stage_and_order(parts: list[_Part], slots: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """TVM's stage and order lists.

    Slots are use stage − definition stage + 1. Registers are stored to shared memory before the next
    loads are issued into them, and a write-back runs before the next product overwrites its source:
    both then need one version only, and no index that changes with the iteration (registers cannot be
    indexed by one).
    """
    first_copy = 1 if any(part.role == "load" for part in parts) else 0
    compute = first_copy + slots - 1
    stage_of = {"load": 0, "copy": first_copy, "compute": compute, "write_back": compute + 1}
    place_of = {"copy": 0, "load": 1, "write_back": 2, "compute": 3}
    body = sorted(range(len(parts)), key=lambda index: place_of[parts[index].role])
    order = [0] * len(parts)
    for place, index in enumerate(body):
        order[index] = place
    return tuple(stage_of[part.role] for part in parts), tuple(order)
