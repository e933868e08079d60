"""Passes over modules; and what stops a schedule that needs ours from being lowered, or replayed, without them.

A schedule can ask for what TVM's own passes do not know: fragments, swizzled rows, a ring written out. TVM would drop
it without a word, and the kernel would be slower, or wrong. So whatever asks for such a thing says so by
:func:`require_pipeline`, and the schedule is lowered by the compilation pipeline :data:`PIPELINE` or not at all::

    tvm.compile(sch.mod, target)                            InternalError: ... "swizzled rows", "pass tir_pipeline=
    tvm.compile(sch.mod, target, tir_pipeline=PIPELINE)     lowered as it was scheduled

And a trace holds TVM's primitives only. What we change without one goes through :func:`replace_untraced`, at which
a replay stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV, StmtSRef

PIPELINE = "tensorir_ladder"
REMEDY = f"pass tir_pipeline={PIPELINE!r} (import tensorir_ladder.schedules.pipeline) to lower it"
# TVM's pass InjectPermutedLayout, which every pipeline for scheduled functions runs early, reads this annotation of a
# block: it takes numbers and names, and fails on a list, which its message shows.
GUARD = "permuted_layout"


def on_functions(change: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> tvm.transform.Pass:
    """Return a pass that puts ``change(function)`` in the place of each function, and bears its name."""

    @tvm.transform.module_pass(opt_level=0, name=change.__name__)
    def run(mod: ir.IRModule, _context: tvm.transform.PassContext) -> ir.IRModule:
        functions = {name: change(function) for name, function in mod.functions_items()}
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    return run


def require_pipeline(sch: Schedule, need: str) -> None:
    """Let every pipeline but :data:`PIPELINE` refuse the schedule from here on, naming ``need``, which it would drop.

    Traced: a replayed schedule, and one read from a file, is refused as well.
    """
    needs = needs_of(sch.mod[sch.func_working_on])
    if need not in needs:
        root = _root(sch)
        if needs:
            sch.unannotate(root, GUARD)
        sch.annotate(root, GUARD, [*needs, need, REMEDY])


def needs_of(mod: ir.IRModule | tirx.PrimFunc) -> tuple[str, ...]:
    """Return what a scheduled module or function needs :data:`PIPELINE` for, in the order in which it was asked for."""
    functions = [mod] if isinstance(mod, tirx.PrimFunc) else list(mod.functions.values())
    blocks = [root_of(function) for function in functions if isinstance(function, tirx.PrimFunc)]
    return tuple(str(need) for b in blocks if b and GUARD in b.annotations for need in list(b.annotations[GUARD])[:-1])


def admit(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let TVM's passes lower a function that :func:`require_pipeline` marked: the first step of our own pipelines."""
    block = root_of(function)
    if block is None or GUARD not in block.annotations:
        return function
    kept = {key: value for key, value in block.annotations.items() if key != GUARD}
    body = s_tir.SBlockRealize([], function.body.predicate, with_body(block, block.body, annotations=kept))
    return function.with_body(body)


def replace_untraced(
    sch: Schedule,
    place: StmtSRef,
    statement: tirx.Stmt,
    by: str,
    blocks: Mapping[s_tir.SBlock, s_tir.SBlock] | None = None,
) -> None:
    """Put a statement in the place of another. No trace holds that, so that replaying one fails here, naming ``by``.

    ``blocks`` are old blocks with what they become; all else inside that is the same object stays valid.
    """
    sch.state.replace(place, statement, dict(blocks or {}))
    stop = f"{by} changes what a trace does not hold: replay one that ends before, and call it then"
    root = _root(sch)
    block = sch.get(root)
    # An annotation that no trace makes, and that the trace removes again: TVM fails where it is not there.
    marked = with_body(block, block.body, annotations={**block.annotations, stop: 1})
    sch.state.replace(sch.get_sref(root), marked, {block: marked})
    sch.unannotate(root, stop)


def root_of(function: tirx.PrimFunc) -> s_tir.SBlock | None:
    """Return the outermost block of a function that is not lowered yet, None of one that is."""
    return function.body.block if isinstance(function.body, s_tir.SBlockRealize) else None


def with_loop_body(loop: tirx.For, body: tirx.Stmt, annotations: Mapping[str, object] | None = None) -> tirx.For:
    """Return a loop with another body and, where given, other annotations."""
    kept = loop.annotations if annotations is None else annotations
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, kept)


def with_body(
    block: s_tir.SBlock,
    body: tirx.Stmt,
    reads: list[ir.TensorRegion] | None = None,
    alloc_buffers: list[tirx.Var] | None = None,
    annotations: Mapping[str, object] | None = None,
) -> s_tir.SBlock:
    """Return a block with another body and, where given, other reads, allocations and annotations."""
    return s_tir.SBlock(
        block.iter_vars,
        block.reads if reads is None else reads,
        block.writes,
        block.name_hint,
        body,
        block.init,
        block.alloc_buffers if alloc_buffers is None else alloc_buffers,
        block.match_buffers,
        block.annotations if annotations is None else annotations,
    )


def with_buffers(
    stmt: tirx.Stmt,
    others: Mapping[tirx.Var, tirx.Var],
    place: Callable[[tirx.Var, Sequence[ir.Expr]], Sequence[ir.Expr]],
    allocate: bool = True,
) -> tirx.Stmt:
    """Return a statement with other buffers, whose elements are at ``place(buffer, indices)`` of those before.

    Blocks declare that they read and write all of them; they allocate them in the others' place, or the caller does.
    """

    def load(access: ir.TensorLoad) -> ir.Expr:
        if access.source not in others:
            return access
        return others[access.source][tuple(place(access.source, access.indices))]

    def store(access: tirx.BufferStore) -> tirx.Stmt:
        if access.buffer not in others:
            return access
        return tirx.BufferStore(others[access.buffer], access.value, list(place(access.buffer, access.indices)))

    def region(access: ir.TensorRegion) -> ir.TensorRegion:
        other = others.get(access.source)
        return access if other is None else other[tuple(slice(0, extent) for extent in other.shape)]

    def block(found: s_tir.SBlock) -> s_tir.SBlock:
        reads, writes = (list(map(region, regions)) for regions in (found.reads, found.writes))
        made = [others.get(buffer, buffer) for buffer in found.alloc_buffers if allocate or buffer not in others]
        name, init, matched = found.name_hint, found.init, found.match_buffers
        return s_tir.SBlock(found.iter_vars, reads, writes, name, found.body, init, made, matched, found.annotations)

    return tvm_ffi.structural_map(stmt, [(ir.TensorLoad, load), (tirx.BufferStore, store), (s_tir.SBlock, block)])


def _root(sch: Schedule) -> SBlockRV:
    """Return the outermost block of the function that a schedule works on."""
    name = str(sch.func_working_on.name_hint)
    return sch.get_sblock(str(sch.mod[name].body.block.name_hint), name)
