"""A buffer for each tile, where a loop's tiles share one.

A pipeline keeps several iterations' tiles at once, in a ring that TVM makes of a buffer that one loop alone uses, and
fills once an iteration. Loops are written with fewer buffers than that: a scratch of two tiles, one after the other, or
one buffer for the tiles of several loops::

    before   for k:  near = x[k];  y[k] = near;  near = w[k];  z[k] = near
    after    for k:  near = x[k];  y[k] = near;  near_1 = w[k];  z[k] = near_1

Right is that where every iteration writes what it reads of the buffer, before, from the same tile
(:mod:`schedules.pipeline.dependences` proves it), and where nobody outside the loop reads what the loop has left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.inspection import DEVICE_SCOPES, body_parts, is_constant, replaced, scheduled_function
from tensorir_ladder.schedules.passes import replace_untraced, with_body, with_loop_body
from tensorir_ladder.schedules.pipeline.dependences import LoopBody

GIVING = "pipeline_loop of tiles that share a buffer"


def separate_buffers(sch: Schedule, loop: LoopRV) -> bool:
    """Give each tile of a loop a buffer, as the module's text shows; return whether one was given.

    Loops and blocks stay valid. Nothing is changed where a value may pass from one tile's statements to another's.
    """
    body = LoopBody.of(sch, loop)
    wrappers, parts = body_parts(body.loop)
    if wrappers or len(parts) != len(body.statements):  # a block around all, or an inner pipeline
        return False
    changed = list(parts)
    given: list[tirx.Var] = []
    for buffer in body.written:
        tiles = list(_tiles(body, buffer))
        keeps_first = not tiles or not body.outlives(buffer)
        for tile in tiles[keeps_first:]:
            shape = [int(extent) for extent in buffer.shape]
            name = f"{buffer.name}_{len(given) + 1}"
            given.append(tirx.decl_buffer(shape, buffer.dtype, name, scope=buffer.scope(), layout=None))
            for index in tile:
                changed[index] = replaced(changed[index], {buffer: given[-1]})
    if given:
        _replace(sch, body.loop, with_loop_body(body.loop, tirx.SeqStmt(changed)), given)
    return bool(given)


def _tiles(body: LoopBody, buffer: tirx.Var) -> Iterator[Sequence[int]]:
    """Yield the statements of each tile that a buffer holds in an iteration; nothing where one passes to another."""
    using = [i for i, found in enumerate(body.accesses) if any(access.buffer.same_as(buffer) for access in found)]
    fills = [i for i in using if body.fills(i, buffer)]
    constant = all(is_constant(extent) for extent in buffer.shape)
    if buffer.scope() in DEVICE_SCOPES or not constant or not fills or fills[0] != using[0]:
        return
    if (len(fills) == 1 and not body.outlives(buffer)) or not body.covers_reads(buffer):
        return
    if body.outlives(buffer) and not _independent(body, buffer):
        return
    starts = [index for index in fills if index == using[0] or body.covers_reads(buffer, index)]
    for start, end in itertools.pairwise([*starts, len(body.statements)]):
        yield [index for index in using if start <= index < end]


def _independent(body: LoopBody, buffer: tirx.Var) -> bool:
    """Return whether all else that uses the buffer is loops beside this one, which write what they read of it."""
    child: tirx.Stmt | s_tir.SBlock = body.loop
    for depth, parent in enumerate(body.around):
        parts = list(parent.body.seq) if isinstance(parent.body, tirx.SeqStmt) else [parent.body]
        others = [part for part in parts if not getattr(part, "block", part).same_as(child)]
        using = [part for part in others if _uses(part, buffer)]
        loops = [part for part in using if isinstance(part, tirx.For) and is_constant(part.extent)]
        if len(others) == len(parts) or len(loops) < len(using) or (depth and using):
            return False
        if not all(body.beside(each).covers_reads(buffer) for each in loops):
            return False
        child = parent
    return True


def _uses(stmt: tirx.Stmt, buffer: tirx.Var) -> bool:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(stmt, (tirx.Var, lambda var: found.append(var) if var.same_as(buffer) else None))
    return bool(found)


def _replace(sch: Schedule, loop: tirx.For, anew: tirx.For, given: list[tirx.Var]) -> None:
    """Put a loop in the place of another, and allocate its buffers in the function's outermost block."""
    root = scheduled_function(sch).body.block
    allocated = with_body(
        root,
        tvm_ffi.structural_map(root.body, (tirx.For, lambda each: anew if each.same_as(loop) else each)),
        alloc_buffers=[*root.alloc_buffers, *given],
    )
    blocks = {old: new for old, new in zip(_blocks(root), _blocks(allocated), strict=True) if not old.same_as(new)}
    name = str(sch.func_working_on.name_hint)
    replace_untraced(sch, sch.get_sref(sch.get_sblock(str(root.name_hint), name)), allocated, GIVING, blocks)


def _blocks(stmt: s_tir.SBlock) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, found.append))
    return found
