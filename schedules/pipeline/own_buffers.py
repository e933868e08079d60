"""A buffer for each tile, where tiles share one, or where code outside the loop reads the last one.

A pipeline keeps several iterations' tiles at once, in a ring that TVM makes of a buffer that one loop alone uses, and
fills once an iteration. Loops are written with fewer buffers than that: a scratch of two tiles, one after the other,
one buffer for the tiles of several loops, or a tile that is read again behind the loop. Each is rewritten here to
loops that can be pipelined, with the same results (:mod:`schedules.pipeline.lifetimes` checks that).
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import PIPELINE_STAGE, body_parts, replaced, scheduled_function
from tensorir_ladder.schedules.passes import replace_untraced, with_body, with_loop_body
from tensorir_ladder.schedules.pipeline.checks import check_loop
from tensorir_ladder.schedules.pipeline.dependences import LoopBody
from tensorir_ladder.schedules.pipeline.lifetimes import keeping_obstacle, sharing_obstacle, tiles


def separate_tiles(sch: Schedule, loop: LoopRV, buffer: str) -> tuple[str, ...]:
    """Give each tile that a loop keeps in ``buffer`` a buffer, and return the names of the new ones.

    ::

        before   for k:  near = x[k];  y[k] = near;  near = w[k];  z[k] = near          # two tiles an iteration
        after    for k:  near = x[k];  y[k] = near;  near_1 = w[k];  z[k] = near_1

        before   for k:  near = x[k];  y[k] = near                                      # two loops, one buffer
                 for j:  near = w[j];  z[j] = near
        after    for k:  near_1 = x[k];  y[k] = near_1
                 for j:  near = w[j];  z[j] = near

    ``buffer`` names shared memory or registers that every iteration fills before it uses them, from the same tile;
    outside the loop, only loops next to it may use it, which do the same. Loops and blocks stay valid.
    :func:`pipeline_loop` does this itself; call it in front of stage and order lists of your own.

    Raises
    ------
    IllegalPipeline : for a loop that no pipeline takes (:func:`check_pipeline`), for a name that is no buffer which the
        loop writes, and for tiles that cannot be separated, with the reason.
    """
    body, shared = _written_buffer(sch, loop, buffer)
    if obstacle := sharing_obstacle(body, shared):
        limit = "filled in each iteration before it is used; outside the loop, used by loops next to it that do so, too"
        remedy = "write the loop with a buffer for each tile"
        if not keeping_obstacle(body, shared):
            remedy = f"call keep_last_tile(sch, loop, {buffer!r}) first"
        raise _refusal(f"the tiles of {buffer} cannot be separated: {obstacle}", body, buffer, limit, remedy)
    return _separate(sch, body, [shared], "separate_tiles")


def keep_last_tile(sch: Schedule, loop: LoopRV, buffer: str) -> str:
    """Give a loop's tile a buffer, and copy the last iteration's to ``buffer``; return the name of the new one.

    ::

        before   for k:  near = x[k];  y[k] = near
                 z = near                                       # behind the loop: the last tile
        after    for k:  near_tile = x[k];  y[k] = near_tile;  if k == K - 1: near = near_tile
                 z = near

    A pipeline then keeps several stages of the new buffer, and one tile more in the old one. Code outside the loop
    stays as it is. Each statement that writes the tile gets a copy with its loops, unvectorized, at the loop's end:
    lists of your own have an entry for each, behind all others. A pipeline with ``one_barrier`` refuses it, in shared
    memory. Loops and blocks stay valid.

    Raises
    ------
    IllegalPipeline : for a loop that no pipeline takes (:func:`check_pipeline`), or that is pipelined already; for a
        name that is no buffer which the loop writes; and, with the reason, where the last iteration may leave in the
        buffer something else than the loop does: what reads it before writing it, or writes other elements by turns.
    """
    body, kept = _written_buffer(sch, loop, buffer)
    if PIPELINE_STAGE in body.loop.annotations:
        problem = f"the loop's lists have no entry for a copy of {buffer}"
        remedy = "call keep_last_tile first, then pipeline the loop"
        raise _refusal(problem, body, buffer, "a loop without a pipeline", remedy)
    if obstacle := keeping_obstacle(body, kept):
        limit = "the same elements written in each iteration, each before it is read"
        remedy = "fill the whole tile in each iteration before it is used, or load it again behind the loop"
        raise _refusal(f"the last tile of {buffer} cannot be kept: {obstacle}", body, buffer, limit, remedy)
    tile = _like(kept, f"{buffer}_tile")
    parts = body_parts(body.loop)[1]
    fills = [part for part, statement in zip(parts, body.statements) if statement.writes_buffer(kept)]
    own = [replaced(part, {kept: tile}) for part in parts]
    _replace(sch, body.loop, with_loop_body(body.loop, tirx.SeqStmt(own)), [tile], "keep_last_tile")
    last = tirx.EQ(body.loop.loop_var, body.loop.min + (body.extent - 1))
    copies = [tirx.IfThenElse(last, _copy(part, kept, tile), None) for part in fills]
    statements = [*body_parts(sch.get(loop))[1], *copies]
    changed = with_loop_body(sch.get(loop), tirx.SeqStmt(statements))
    replace_untraced(sch, sch.get_sref(loop), changed, "keep_last_tile")
    return str(tile.name)


def separate_all(sch: Schedule, loop: LoopRV) -> bool:
    """Give each tile of a loop a buffer, as :func:`separate_tiles` does, where it can; return whether one was given."""
    body = LoopBody.of(sch, loop)
    shared = [buffer for buffer in body.written if not sharing_obstacle(body, buffer)]
    return bool(shared and _separate(sch, body, shared, "pipeline_loop of tiles that share a buffer"))


def _separate(sch: Schedule, body: LoopBody, shared: Sequence[tirx.Var], by: str) -> tuple[str, ...]:
    changed = list(body_parts(body.loop)[1])
    given: list[tirx.Var] = []
    for buffer in shared:
        for tile in tiles(body, buffer)[not body.outlives(buffer) :]:
            given.append(_like(buffer, f"{buffer.name}_{len(given) + 1}"))
            for index in tile:
                changed[index] = replaced(changed[index], {buffer: given[-1]})
    _replace(sch, body.loop, with_loop_body(body.loop, tirx.SeqStmt(changed)), given, by)
    return tuple(str(buffer.name) for buffer in given)


def _written_buffer(sch: Schedule, loop: LoopRV, name: str) -> tuple[LoopBody, tirx.Var]:
    """Return the loop's body, and the buffer of that name which it writes."""
    check_loop(sch, loop)
    body = LoopBody.of(sch, loop)
    names = [str(buffer.name) for buffer in body.written]
    if names.count(name) != 1:
        problem = "several buffers of this name are" if name in names else "no such buffer is"
        remedy = "give the name of one buffer that a statement of the loop writes"
        raise _refusal(f"{problem} written in the loop", body, repr(name), " | ".join(names), remedy)
    return body, body.written[names.index(name)]


def _refusal(problem: str, body: LoopBody, buffer: str, limit: str, remedy: str) -> IllegalPipeline:
    return IllegalPipeline(problem, loop=str(body.loop.loop_var.name), value=buffer, limit=limit, remedy=remedy)


def _like(buffer: tirx.Var, name: str) -> tirx.Var:
    shape = [int(extent) for extent in buffer.shape]
    return tirx.decl_buffer(shape, buffer.dtype, name, scope=buffer.scope(), layout=None)


def _copy(fill: tirx.Stmt, kept: tirx.Var, tile: tirx.Var) -> tirx.Stmt:
    """Return a statement that copies what ``fill`` writes, by the same loops and threads, with variables of its own.

    No loop is vectorized: TVM fails on vectors that are stored to shared memory next to asynchronous copies.
    """
    variables: list[tirx.Var] = []
    tvm_ffi.structural_walk(fill, (tirx.For, lambda loop: variables.append(loop.loop_var)))
    tvm_ffi.structural_walk(fill, (s_tir.SBlock, lambda block: variables.extend(each.var for each in block.iter_vars)))

    def store(found: tirx.BufferStore) -> tirx.Stmt:
        return tirx.BufferStore(kept, tile[tuple(found.indices)], found.indices)

    def loop(found: tirx.For) -> tirx.Stmt:
        kind = tirx.ForKind.SERIAL if found.kind == tirx.ForKind.VECTORIZED else found.kind
        return tirx.For(found.loop_var, found.min, found.extent, kind, found.body, found.thread_binding)

    def block(found: s_tir.SBlock) -> s_tir.SBlock:
        reads = [ir.TensorRegion(tile, region.region, region.ty) for region in found.writes]
        return s_tir.SBlock(found.iter_vars, reads, found.writes, f"{found.name_hint}_last", found.body)

    own = replaced(fill, {var: tirx.Var(var.name, var.ty) for var in variables})
    return tvm_ffi.structural_map(own, [(tirx.BufferStore, store), (tirx.For, loop), (s_tir.SBlock, block)])


def _replace(sch: Schedule, loop: tirx.For, anew: tirx.For, given: Sequence[tirx.Var], by: str) -> None:
    """Put a loop in the place of another, and allocate its buffers in the function's outermost block."""
    root = scheduled_function(sch).body.block
    allocated = with_body(
        root,
        tvm_ffi.structural_map(root.body, (tirx.For, lambda each: anew if each.same_as(loop) else each)),
        alloc_buffers=[*root.alloc_buffers, *given],
    )
    blocks = {old: new for old, new in zip(_blocks(root), _blocks(allocated), strict=True) if not old.same_as(new)}
    name = str(sch.func_working_on.name_hint)
    replace_untraced(sch, sch.get_sref(sch.get_sblock(str(root.name_hint), name)), allocated, by, blocks)


def _blocks(stmt: s_tir.SBlock) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, found.append))
    return found
