"""One barrier per iteration of a pipelined loop, where TVM's lowering makes two.

TVM's pass for barriers does not know that a ring's stages are different memory: between the reads of one stage
and the copies into another it puts a second barrier, which protects nothing. This module gives a loop the form
that needs one only (the multistage loop of NVIDIA's CUTLASS has it)::

    before   for k:                                    after   for k:
               A_shared = A[k]                                   copies:  A_shared = A[k];  B_shared = B[k]
               B_shared = B[k]                                   arrived                    # the gate
               C += A_shared * B_shared                          C += A_shared * B_shared   # reads TVM cannot see
                                                               left                               # one barrier, once

and pipelined, in the order gate, copies, computation::

    for k:  wait until tile k has landed;  barrier             # before the gate, which is all that waits
            start filling stage (k - 1) % stages                # last read before this barrier, by everybody
            C += stage k % stages

Why that is right: a stage is filled in the iteration after the one that read it last, and all threads meet at the
barrier in between; it is read in the iteration whose gate waited for it. The barrier behind the loop keeps whatever
comes next (another turn of a loop around this one, other data in the same memory) from what is still being read: TVM
puts none there, since it cannot see those reads. What goes wrong without the gate: with hidden reads and copies
ordered first, a fast thread overwrites what a slow one still reads
(:func:`schedules.pipeline.check_pipeline` refuses it).

A block marked :data:`HIDES_READS` will hide its reads by itself, with the instruction that replaces it, and is left as
it is (:mod:`schedules.tensor_cores.mma`); what its loop waits for, the gate alone says (:func:`drop_hidden_reads`).

A trace does not hold any of this: a replay stops here (:func:`schedules.passes.replace_untraced`).

What it costs: copies are issued after the wait instead of before it, so that with n stages n − 1 tiles are under way
while threads wait, not n. Where latency is what a kernel waits for, give it one stage more.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import (
    FRAGMENT,
    SHARED_SCOPES,
    Statement,
    annotated_loops,
    loop_name,
    statements_of,
    statements_under,
)
from tensorir_ladder.schedules.passes import replace_untraced, require_pipeline, with_body, with_loop_body

GATE = "pipeline_gate"
GATE_FUNCTION = "pipeline_arrived"
RETIRE_FUNCTION = "pipeline_retire_"
ONE_BARRIER = "one_barrier"
READ_FUNCTION = "pipeline_read_"
RETIRE = "pipeline_retire"  # on a block that waits for all but so many computations that run on by themselves
RETIRED = "all_retired"  # on the block behind a pipelined loop that waits for all of them
GATING = "pipeline_loop(..., one_barrier=True)"
HIDES_READS = "hides_reads"  # on a block whose instruction will hide its reads by itself, once it is tensorized
SYNC = "tirx.tvm_storage_sync"
CUDA_TYPES = {
    "float32": "float",
    "float16": "half",
    "bfloat16": "nv_bfloat16",
    "float64": "double",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int32": "int",
}


def hide_reads(sch: Schedule, block: SBlockRV) -> None:
    """Mark a block whose instruction will read shared memory by addresses, which TVM's pass for barriers cannot see.

    Such a block is right only in a loop with a gate (:func:`gate_copies`); :func:`check_gates` looks for it.
    """
    require_pipeline(sch, "reads hidden from TVM")
    sch.annotate(block, HIDES_READS, 1)


def gate_copies(sch: Schedule, loop: LoopRV, copies: list[int]) -> None:
    """Merge a loop's copies into one statement, put a gate behind them, and hide what reads them from ThreadSync.

    The module's text shows it. ``copies`` are positions among the loop's statements
    (:func:`schedules.inspection.statements_under`), each a copy into shared memory. Loops and blocks stay
    valid. Not recorded in the schedule's trace.

    Raises
    ------
    IllegalPipeline : for a copied operand that is read under a vectorized loop, or in a dtype without a CUDA
        name here: those reads cannot be hidden; and for a loop that has a gate already.
    """
    name, stmt, statements = loop_name(sch, loop), sch.get(loop), statements_under(sch, loop)
    if any(is_gate(statement) for statement in statements):
        raise IllegalPipeline("the loop has its gate already", loop=name, remedy="start from a fresh schedule")
    buffers = [region.source for index in copies for region in statements[index].writes]
    parts = list(stmt.body.seq)
    filling = [part for part in parts if any(_is_part(statements[index], part) for index in copies)]
    using = [part for part in parts if not any(part.same_as(other) for other in filling)]
    reused: dict[s_tir.SBlock, s_tir.SBlock] = {}
    for statement in statements:
        if any(statement.reads_buffer(buffer) for buffer in buffers):
            _check_can_hide(name, statement, buffers)
            visible = [block for block in statement.blocks if HIDES_READS not in block.annotations]
            reused |= {block: _hiding(block, buffers) for block in visible if block not in reused}
    hidden = [tvm_ffi.structural_map(part, (s_tir.SBlock, lambda block: reused.get(block, block))) for part in using]
    copying = tirx.SeqStmt(filling) if len(filling) > 1 else filling[0]
    merged = tirx.For(tirx.Var("copies", "int32"), 0, 1, tirx.ForKind.SERIAL, copying)
    body = tirx.SeqStmt([merged, _gate(statements, copies), *hidden])
    replace_untraced(sch, sch.get_sref(loop), with_loop_body(stmt, body), GATING, reused)
    _meet_behind(sch, loop)
    sch.annotate(loop, ONE_BARRIER, 1)


def meet_behind_copies(sch: Schedule, loop: LoopRV, copies: list[int]) -> None:
    """Give a loop of one iteration its gate, and a barrier behind it: what TVM puts there in a pipeline.

    As :func:`gate_copies`, for copies that are not asynchronous.
    """
    gate_copies(sch, loop, copies)
    stmt = sch.get(loop)
    filling, gate, *using = stmt.body.seq
    body = tirx.SeqStmt([filling, gate, _barrier("met"), *using])
    replace_untraced(sch, sch.get_sref(loop), with_loop_body(stmt, body), GATING)


def is_gate(statement: Statement) -> bool:
    """Return whether a statement is the gate that :func:`gate_copies` made."""
    return any(GATE in block.annotations for block in statement.blocks)


def retires(statement: Statement) -> int | None:
    """Return how many computations a statement leaves in flight; None if it waits for none."""
    left = [int(block.annotations[RETIRE]) for block in statement.blocks if RETIRE in block.annotations]
    return left[0] if left else None


def hides_reads(statement: Statement) -> bool:
    """Return whether a statement reads shared memory in a way that ThreadSync cannot see."""
    found: list[ir.Call] = []
    for block in statement.blocks:
        tvm_ffi.structural_walk(
            block.body, (ir.Call, lambda call: found.append(call) if is_hidden_read(call) else None)
        )
    return bool(found) or any(HIDES_READS in block.annotations for block in statement.blocks)


def is_hidden_read(call: ir.Call) -> bool:
    """Return whether a call is a read that :func:`gate_copies` hid; its second argument is the read's address."""
    return _called(call).startswith(READ_FUNCTION)


def show_reads(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Undo the hiding, for a target that is not CUDA: reads are reads again, and gates do nothing.

    ::

        before   pipeline_arrived();  C += pipeline_read_float32(address_of(A_shared[i, k])) * ...
        after    C += A_shared[i, k] * ...
    """
    show = (ir.Call, lambda call: call.args[1].args[0] if is_hidden_read(call) else call)
    drop = (tirx.Evaluate, lambda stmt: tirx.Evaluate(0) if _only_waits(stmt.value) else stmt)
    return tvm_ffi.structural_map(function, [show, drop])


def check_gates(mod: ir.IRModule | tirx.PrimFunc) -> None:
    """Raise IllegalPipeline for a loop that is marked as one with a single barrier and has no gate, or reads without.

    That is, for a block whose reads TVM cannot see (:func:`hide_reads`) outside of such a loop.
    """
    gated: list[s_tir.SBlock] = []
    for loop in annotated_loops(mod, ONE_BARRIER):
        if not any(is_gate(statement) for statement in statements_of(loop)):
            raise IllegalPipeline(
                "the loop is marked as one with a single barrier, and has no gate",
                loop=str(loop.loop_var.name),
                remedy=f"call {GATING}, which makes both",
            )
        gated += _hiding_blocks(loop)
    functions = [mod] if isinstance(mod, tirx.PrimFunc) else list(mod.functions.values())
    for function in functions:
        for block in _hiding_blocks(function.body) if isinstance(function, tirx.PrimFunc) else ():
            if not any(block.same_as(other) for other in gated):
                raise IllegalPipeline(
                    "its reads are hidden from TVM, which would put no barrier between them and the copies",
                    block=str(block.name_hint),
                    remedy=f"call {GATING} for the loop that copies what it reads (of warpgroups: pipeline_warpgroups)",
                )


def _hiding_blocks(body: tirx.Stmt) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    note = (s_tir.SBlock, lambda block: found.append(block) if HIDES_READS in block.annotations else None)
    tvm_ffi.structural_walk(body, note)
    return found


def drop_hidden_reads(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Leave it to the gate to declare what is read by blocks that hide their reads: one wait, at the gate.

    ::

        before   arrived reads A_shared;  load, marked hides_reads, reads A_shared, writes A_frag
        after    arrived reads A_shared;  load reads nothing, writes A_frag

    TVM puts its wait before the first statement that declares such a read. In a pipeline that fills fragments
    ahead, that would be half a k tile too early.
    """

    def drop(block: s_tir.SBlock) -> s_tir.SBlock:
        if HIDES_READS not in block.annotations:
            return block
        return with_body(block, block.body, _visible_reads(block))

    return tvm_ffi.structural_map(function, (s_tir.SBlock, drop))


def declares_read(statement: Statement, buffer: tirx.Var) -> bool:
    """Return whether a statement reads a buffer and TVM gets to know it."""
    declared = [region for block in statement.blocks for region in _visible_reads(block)]
    return statement.reads_buffer(buffer) and any(region.source.same_as(buffer) for region in declared)


def _visible_reads(block: s_tir.SBlock) -> list[ir.TensorRegion]:
    """Return the reads of a block that TVM gets to know: of one that hides its reads, not those of shared memory."""
    hiding = HIDES_READS in block.annotations
    return [region for region in block.reads if not hiding or region.source.scope() not in SHARED_SCOPES]


def whole_buffer(region: ir.TensorRegion) -> ir.TensorRegion:
    """Return the region that is all of a region's buffer."""
    return ir.TensorRegion(region.source, [ir.Range(0, extent) for extent in region.source.shape], region.ty)


def _only_waits(value: ir.Expr) -> bool:
    name = _called(value)
    return name in (GATE_FUNCTION, SYNC) or name.startswith(RETIRE_FUNCTION)


def _called(value: ir.Expr) -> str:
    """Return the name of the CUDA function or of the barrier that an expression calls, "" if it calls none."""
    operator = str(getattr(value.op, "name", "")) if isinstance(value, ir.Call) else ""
    return str(value.args[0].value) if operator == "tirx.cuda.func_call" else operator if operator == SYNC else ""


def _gate(statements: list[Statement], copies: list[int]) -> s_tir.SBlockRealize:
    """Make a statement that reads every copied operand as a whole, and does nothing."""
    regions = [whole_buffer(region) for index in copies for region in statements[index].writes]
    # An empty function, because TVM removes a statement that does nothing, together with its wait.
    nothing = cuda_func_call(GATE_FUNCTION, source_code=f"__forceinline__ __device__ void {GATE_FUNCTION}() {{}}\n")
    block = s_tir.SBlock([], regions, [], "arrived", tirx.Evaluate(nothing), annotations={GATE: 1})
    return s_tir.SBlockRealize([], True, block)


def place_behind(sch: Schedule, loop: LoopRV, statement: tirx.Stmt, by: str) -> None:
    """Put a statement behind a loop, as the next one of what the loop stands in. Loops and blocks stay valid.

    ``by`` names what does so, for :func:`schedules.passes.replace_untraced`.
    """
    stmt, parent = sch.get(loop), sch.get_sref(loop).parent
    around = parent.stmt
    parts = list(around.body.seq) if isinstance(around.body, tirx.SeqStmt) else [around.body]
    place = next(index for index, part in enumerate(parts) if part.same_as(stmt)) + 1
    body = tirx.SeqStmt([*parts[:place], statement, *parts[place:]])
    if isinstance(around, tirx.For):
        replace_untraced(sch, parent, with_loop_body(around, body), by)
    else:
        changed = with_body(around, body)
        replace_untraced(sch, parent, changed, by, {around: changed})


def _meet_behind(sch: Schedule, loop: LoopRV) -> None:
    """Put a barrier that TVM can see behind a loop."""
    place_behind(sch, loop, _barrier("left"), GATING)


def _barrier(name: str) -> s_tir.SBlockRealize:
    """Make a statement in which a block's threads meet."""
    barrier = s_tir.SBlock([], [], [], name, tirx.Evaluate(tirx.call_intrin("int32", SYNC, "shared")))
    return s_tir.SBlockRealize([], True, barrier)


def _hiding(block: s_tir.SBlock, buffers: list[tirx.Var]) -> s_tir.SBlock:
    """Turn a block's reads of ``buffers`` into calls on their addresses, which ThreadSync skips."""

    def hide(load: ir.TensorLoad) -> ir.Expr:
        if not any(load.source.same_as(buffer) for buffer in buffers):
            return load
        dtype = str(load.source.dtype)
        name, ctype = READ_FUNCTION + dtype, CUDA_TYPES[dtype]
        source = f"__forceinline__ __device__ {ctype} {name}(const {ctype}* address) {{ return *address; }}\n"
        return cuda_func_call(name, tirx.address_of(load), source_code=source, return_type=dtype)

    return with_body(block, tvm_ffi.structural_map(block.body, (ir.TensorLoad, hide)))


def _check_can_hide(loop: str, statement: Statement, buffers: list[tirx.Var]) -> None:
    for block in (block for block in statement.blocks if HIDES_READS not in block.annotations):
        matched = [
            str(match.source.source.name) for match in block.match_buffers if _among(match.source.source, buffers)
        ]
        if matched:
            raise IllegalPipeline(
                "an instruction's reads of shared memory are seen by ThreadSync, which would keep its two barriers",
                loop=loop,
                block=str(block.name_hint),
                value=matched[0],
                remedy="leave one_barrier out, or take tensorize_contraction, whose instructions hide their reads",
            )
    for block in (block for block in statement.blocks if HIDES_READS not in block.annotations):
        reads = any(_among(region.source, buffers) for region in block.reads)
        if reads and any(region.source.scope() == FRAGMENT for region in block.writes):
            raise IllegalPipeline(
                "an instruction that reads shared memory in the open cannot stand in a loop with one barrier",
                loop=loop,
                block=str(block.name_hint),
                remedy="pass hide_reads=True to tensorize_contraction or load_fragments (for wgmma call "
                "hide_reads(sch, block)), or leave one_barrier out",
            )
    if statement.vector > 1:
        raise IllegalPipeline(
            "reads of shared memory under a vectorized loop cannot be hidden from ThreadSync",
            loop=loop,
            block=statement.name,
            value=f"vectors of {statement.vector}",
            remedy="leave one_barrier out, or do not vectorize what reads the copies",
        )
    dtypes = [str(region.source.dtype) for region in statement.reads if any(region.source.same_as(b) for b in buffers)]
    unknown = [dtype for dtype in dtypes if dtype not in CUDA_TYPES]
    if unknown:
        raise IllegalPipeline(
            "reads of this dtype cannot be hidden from ThreadSync",
            loop=loop,
            block=statement.name,
            value=unknown[0],
            limit=", ".join(CUDA_TYPES),
            remedy="leave one_barrier out",
        )


def _among(buffer: tirx.Var, buffers: list[tirx.Var]) -> bool:
    return any(buffer.same_as(other) for other in buffers)


def _is_part(statement: Statement, part: tirx.Stmt) -> bool:
    """Return whether a statement of the loop is this part of its body."""
    single = tirx.For(tirx.Var("_", "int32"), 0, 1, tirx.ForKind.SERIAL, part)
    return any(block.same_as(other) for s in statements_of(single) for block in s.blocks for other in statement.blocks)
