"""Lowering of what TVM's own passes do not know: the compilation pipeline to name in ``tvm.compile``."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir.transform import Pass, Sequential
from tvm.target import Target

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import SHARED_SCOPES, UNROLL_RING
from tensorir_ladder.schedules.isa import MMA_ARCH
from tensorir_ladder.schedules.loops.early_launch import lower_early_launches, mark_early
from tensorir_ladder.schedules.loops.quotients import divide_without_carries, divide_without_signs
from tensorir_ladder.schedules.loops.residency import lower_residency, lower_resident_grids
from tensorir_ladder.schedules.loops.serpentine import lower_serpentines, required_ptxas_options
from tensorir_ladder.schedules.memory.box_stores import lower_box_stores
from tensorir_ladder.schedules.memory.swizzling import lower_swizzles
from tensorir_ladder.schedules.memory.workspaces import pass_workspaces
from tensorir_ladder.schedules.passes import PIPELINE, admit, needs_of, on_functions, root_of
from tensorir_ladder.schedules.pipeline.box_rings import lower_boxes
from tensorir_ladder.schedules.pipeline.first_fill import lower_first_fills
from tensorir_ladder.schedules.pipeline.one_barrier import SYNC, check_gates, drop_hidden_reads
from tensorir_ladder.schedules.pipeline.own_warp import lower_own_warps
from tensorir_ladder.schedules.pipeline.pipelining import required_pass_config
from tensorir_ladder.schedules.pipeline.zero_fill import lower_zero_fills
from tensorir_ladder.schedules.tensor_cores.fragments import compact_blocks, lower_fragments
from tensorir_ladder.schedules.tiles import TensorCoreTile, WarpgroupTile

INSTRUCTIONS: dict[str, type[TensorCoreTile] | type[WarpgroupTile]] = {
    "wgmma.mma_async": WarpgroupTile,
    "mma.sync": TensorCoreTile,
}
PTXAS_OPTIONS = "ptxas_options"  # attribute of a function that is lowered ahead: what required_ptxas_options returned
AWAITED = "async_wait_inflight_count"  # of what TVM makes of a pipeline: an attribute around what waits for copies


def unroll_rings() -> Pass:
    """Write out as many iterations of a pipelined loop as its ring has stages, so that stage numbers are constants.

    ::

        before   for k < 14, annotated unroll_ring = 3:      ... A_shared[k % 3] ...
        after    for turn < 4:
                   ... A_shared[0] ...;  ... A_shared[1] ...;  ... A_shared[2] ...
                 ... A_shared[0] ...;  ... A_shared[1] ...                         # the two that remain

    A pass over lowered functions. CUDA's own ``#pragma unroll 3`` would not do: the compiler does not see that
    a multiple of 3 leaves no remainder.
    """

    passes = [on_functions(_in_turns), tirx.transform.UnrollLoop(), tirx.transform.StmtSimplify()]
    return Sequential(passes)


def _in_turns(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return tvm_ffi.structural_map(function, (tirx.For, _turns))


def required_tir_pipeline(mod: ir.IRModule | tirx.PrimFunc) -> str:
    """Return the name for ``tvm.compile(..., tir_pipeline=name)`` that lowers a scheduled module as it was scheduled.

    Raises IllegalPipeline for hidden reads without a gate (:func:`schedules.pipeline.one_barrier.check_gates`).
    """
    check_gates(mod)
    return PIPELINE if needs_of(mod) else "s_tir"


def tir_pipeline() -> tuple[Pass, Pass, Pass]:
    """Make :data:`schedules.passes.PIPELINE`: TVM's own for scheduled functions, and what it lacks.

    Copies by TMA, fragments and swizzles are lowered as soon as buffers are compact, copies that fill with zeros,
    serpentine loops and rings at the end. What needs nothing of this comes out as TVM lowers it.
    """
    lower, finalize_host, finalize_device = tirx.get_tir_pipeline("s_tir")
    before = _compact()
    after = [
        *map(on_functions, (lower_residency, lower_first_fills, lower_zero_fills, lower_serpentines)),
        lower_own_warps,
        unroll_rings(),
        lower_early_launches,
    ]
    return Sequential([on_functions(mark_early), *before, lower, *after]), finalize_host, finalize_device


def _compact() -> list[Pass]:
    """List the passes up to compact buffers, and those that need these."""
    boxes = map(on_functions, (lower_resident_grids, lower_boxes, lower_box_stores))
    return [on_functions(_gated), compact_blocks(), *boxes, lower_fragments(), lower_swizzles()]


def lower_ahead(function: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Lower a scheduled function as far as it must be for TVM's stock pipeline to do the rest.

    ::

        before   tvm.compile(sch.mod, target, tir_pipeline=PIPELINE) under "tirx.use_async_copy"
        after    tvm.compile(lower_ahead(function, target), target)    # and relax.build: no name, no configuration

    The passes that change what is computed where have run then, with ours before and after; what the stock pipeline
    runs once more finds nothing left to do. It places all barriers that it sees a reason for: of asynchronous copies it
    sees none any more, so that theirs are placed here, but for those behind waits, which it adds in any case.

    Whoever compiles it gives CUDA's assembler the options that its attribute :data:`PTXAS_OPTIONS` lists, if any: the
    order of a serpentine walk is lost without them.

    A function without blocks in its root block, or without that, is returned as it is: one that is lowered already.

    Raises
    ------
    IllegalSchedule : for a target that is no CUDA device; IllegalPipeline for hidden reads without a gate
        (:func:`schedules.pipeline.one_barrier.check_gates`).
    """
    if target.kind.name != "cuda":
        raise IllegalSchedule(
            "a function is lowered ahead for CUDA alone",
            value=target.kind.name,
            limit="cuda",
            remedy="leave it to TVM's own pipeline",
        )
    if not _has_blocks(function):
        return function
    check_gates(function)
    scheduled = tvm.IRModule({"main": function})
    passed, count = pass_workspaces(scheduled), len(function.params)
    module = tirx.transform.BindTarget(target.with_host("llvm"))(passed)
    before = _compact()
    after = [on_functions(lower_residency), on_functions(lower_serpentines), unroll_rings(), divide_without_signs()]
    copies: list[Pass] = []
    if required_pass_config(function):
        barriers = [s_tir.transform.ThreadSync(scope) for scope in SHARED_SCOPES]
        inject = [s_tir.transform.InjectPTXAsyncCopy(), *map(on_functions, (lower_first_fills, lower_zero_fills))]
        copies = [*barriers, on_functions(_without_awaited), *inject]
    with tvm.transform.PassContext(config={"tirx.use_async_copy": True}):
        lowered = Sequential([*before, *_until_barriers(), *copies, *after])(module)["main"].without_attr("target")
    # Workspaces were arguments for as long as it took: TVM makes vectors of what it allocates itself, of which it then
    # copies no elements asynchronously.
    kept = [tirx.AllocBuffer(buffer) for buffer in lowered.params[count:]]
    body = tirx.SeqStmt([*kept, lowered.body]) if kept else lowered.body
    made = tirx.PrimFunc(lowered.params[:count], body, lowered.ret_type, lowered.attrs)
    if options := required_ptxas_options(function):
        made = made.with_attr(PTXAS_OPTIONS, list(options))
    return made.with_attr("tirx.is_scheduled", True)  # for dlight, by which relax.build would schedule it again


def _has_blocks(function: tirx.PrimFunc) -> bool:
    """Return whether a function is one that a schedule may have been made for."""
    root = root_of(function)
    found: list[s_tir.SBlock] = []
    if root is not None:
        tvm_ffi.structural_walk(root.body, (s_tir.SBlock, found.append))
    return bool(found)


def _until_barriers() -> list[Pass]:
    """List the passes of TVM's pipeline for scheduled functions up to what places barriers."""
    s, x = s_tir.transform, tirx.transform
    return [
        s.CanonicalizeLoop(),
        s.LowerCrossThreadReduction(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        s.LiftThreadBinding(),
        s.ManifestSharedMemoryLocalStage(),
        s.CompactBufferAllocation(),
        s.LowerAutoCopy(),
        s.UnifyThreadBinding(),
        s.LowerMatchBuffer(),
        s.StmtSimplify(),
        divide_without_carries(),
        s.InjectPermutedLayout(),
        s.AnnotateIrregularLoop(),
        s.InjectSoftwarePipeline(),
        s.TransformMmaBufferLayout(),
        s.LowerOpaqueBlock(),
        x.FlattenBuffer(),
        x.BF16ComputeLegalize(),
        x.NarrowDataType(32),
        s.LoopPartition(),
        x.VectorizeLoop(True),
        s.InjectVirtualThread(),
        s.InjectDoubleBuffer(),
        x.StorageRewrite(),
        s.LowerAsyncDMA(),
        s.HoistIfThenElse(),
        x.UnrollLoop(),
        s.RenormalizeSplitPattern(),
        x.StmtSimplify(),
        x.RemoveNoOp(),
        s.RewriteUnsafeSelect(),
    ]


def _gated(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let a function be lowered whose hidden reads have their gates, and whose instructions its target has."""
    check_gates(function)
    _check_instructions(function)
    return drop_hidden_reads(admit(function))


def _check_instructions(function: tirx.PrimFunc) -> None:
    """Raise IllegalSchedule for a tensor core instruction that the function's target lacks."""
    target, texts = (function.attrs or {}).get("target"), []
    calls = (ir.Call, lambda call: texts.append(str(call)) if _is_source(call) else None)
    if target is None or target.kind.name != "cuda":
        return
    tvm_ffi.structural_walk(function.body, calls)
    for instruction, family in INSTRUCTIONS.items():
        clause = family.missing(target)
        if clause and any(instruction in text for text in texts):
            raise IllegalSchedule(
                f"the target lacks an instruction of the schedule: {clause}",
                value=str(target.attrs.get("arch", target.kind.name)),
                limit=family.ARCH if family is WarpgroupTile else f"sm_{MMA_ARCH} and newer",
                remedy="compile for a target that has it, or schedule with another kind of tile",
            )


def _is_source(call: ir.Call) -> bool:
    return str(getattr(call.op, "name", "")) == "tirx.cuda.func_call"


def _without_awaited(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Take away the barriers behind waits for copies: TVM puts one behind each wait whenever it places barriers."""

    def bare(attribute: tirx.AttrStmt) -> tirx.AttrStmt:
        body = attribute.body
        if attribute.attr_key != AWAITED or not isinstance(body, tirx.SeqStmt) or not _is_barrier(body.seq[0]):
            return attribute
        rest = body.seq[1] if len(body.seq) == 2 else tirx.SeqStmt(list(body.seq[1:]))
        return tirx.AttrStmt(attribute.node, attribute.attr_key, attribute.value, rest)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.AttrStmt, bare)))


def _is_barrier(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, ir.Call) and stmt.value.op.name == SYNC


def _turns(loop: tirx.For) -> tirx.Stmt:
    """Write a loop with the annotation as whole turns of its ring, and the rest."""
    if UNROLL_RING not in loop.annotations:
        return loop
    stages, extent = int(loop.annotations[UNROLL_RING]), int(loop.extent)
    parts = []
    if extent >= stages:
        turn = tirx.Var("turn", loop.loop_var.ty)
        parts.append(
            tirx.For(turn, 0, extent // stages, tirx.ForKind.SERIAL, _written_out(loop, turn * stages, stages))
        )
    if extent % stages:
        parts.append(_written_out(loop, extent - extent % stages, extent % stages))
    return tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]


def _written_out(loop: tirx.For, first: ir.Expr | int, count: int) -> tirx.For:
    """Return ``count`` iterations of a loop from ``first`` on, to be written out."""
    place = tirx.Var("stage", loop.loop_var.ty)
    iteration = loop.min + first + place
    replaced = (tirx.Var, lambda var: iteration if var.same_as(loop.loop_var) else var)
    body = tvm_ffi.structural_map(loop.body, replaced)
    return tirx.For(place, 0, count, tirx.ForKind.UNROLLED, body)
