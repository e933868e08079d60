"""Which values a loop's buffer holds: several tiles in turn, or one that is read behind the loop.

A pipeline needs a ring for each tile, and TVM makes one of a buffer that one loop alone uses and fills once an
iteration. The functions of :mod:`schedules.pipeline.own_buffers` rewrite loops to that form; here is what they need
to be right, in words where it is missing, and which of them is the remedy for a refused pipeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tvm_ffi
from tvm import s_tir, tirx

from tensorir_ladder.schedules.inspection import DEVICE_SCOPES, Statement, body_parts, is_constant
from tensorir_ladder.schedules.pipeline.dependences import Access, LoopBody, is_opaque


def sharing_obstacle(body: LoopBody, buffer: tirx.Var) -> str:
    """Return why the tiles that share a buffer cannot have one each, "" where they can."""
    if found := _obstacle(body, buffer):
        return found
    using, fills = _using(body, buffer), _fills(body, buffer)
    if not fills or fills[0] != using[0]:
        return "no statement of the loop fills it before all others use it"
    if body.outlives(buffer):
        return "" if _independent(body, buffer) else "more than loops next to this one use it outside the loop"
    return "" if len(tiles(body, buffer)) > 1 else "nothing else uses it: one tile in one loop"


def keeping_obstacle(body: LoopBody, buffer: tirx.Var) -> str:
    """Return why a loop's last tile of a buffer cannot be copied to it by the last iteration, "" where it can."""
    if found := _obstacle(body, buffer):
        return found
    if not body.outlives(buffer):
        return "nothing outside the loop uses it"
    for statement, accesses in zip(body.statements, body.accesses):
        name, writes = statement.name, [access for access in accesses if access.writes]
        written = [access for access in writes if access.buffer.same_as(buffer)]
        if written and (len(written) < len(writes) or any(is_opaque(block) for block in statement.blocks)):
            return f"{name!r} does more than store elements of it"
        if not all(_same_each_iteration(body, access) for access in written):
            return f"{name!r} may write other elements in one iteration than in another"
    return ""


def tiles(body: LoopBody, buffer: tirx.Var) -> list[list[int]]:
    """List the statements of each tile that a buffer holds in an iteration: from what fills it to the next such."""
    using = _using(body, buffer)
    starts = [index for index in _fills(body, buffer) if index == using[0] or body.covers_reads(buffer, index)]
    bounds = itertools.pairwise([*starts, len(body.statements)])
    return [[index for index in using if start <= index < end] for start, end in bounds]


def remedy_of(body: LoopBody, buffer: tirx.Var, exchanged: Sequence[Statement] = ()) -> str:
    """Return the call that gives each of a buffer's tiles a ring, and "or"; "" where there is none.

    ``exchanged`` are two statements that a pipeline would exchange within an iteration: nothing is gained for one tile.
    """
    separable = not sharing_obstacle(body, buffer)
    if not separable and keeping_obstacle(body, buffer):
        return ""
    if exchanged:
        of_tiles = [[body.statements[index] for index in tile] for tile in tiles(body, buffer)]
        homes = [[place for place, tile in enumerate(of_tiles) if any(one is s for s in tile)] for one in exchanged]
        if homes[0] == homes[1]:
            return ""
    return f"call {'separate_tiles' if separable else 'keep_last_tile'}(sch, loop, {str(buffer.name)!r}), or "


def _obstacle(body: LoopBody, buffer: tirx.Var) -> str:
    """Return why the loop's accesses cannot go to another buffer, "" where they can."""
    wrappers, parts = body_parts(body.loop)
    if wrappers or len(parts) != len(body.statements):
        return "a block around the loop's whole body, or an inner pipeline, holds its statements"
    if buffer.scope() in DEVICE_SCOPES or not all(is_constant(extent) for extent in buffer.shape):
        return "it is no tile of constant shape in shared memory or registers"
    return "" if body.covers_reads(buffer) else "an iteration may read of it what it has not written before"


def _using(body: LoopBody, buffer: tirx.Var) -> list[int]:
    return [i for i, found in enumerate(body.accesses) if any(access.buffer.same_as(buffer) for access in found)]


def _fills(body: LoopBody, buffer: tirx.Var) -> list[int]:
    return [i for i in _using(body, buffer) if body.fills(i, buffer)]


def _same_each_iteration(body: LoopBody, write: Access) -> bool:
    if write.region is None or not write.certain:
        return False
    ranges = [*write.region, *(extent for _, extent in write.loops)]
    bounds = [bound for extent in ranges for bound in (extent.min, extent.extent)]
    return not any(_uses(expr, body.loop.loop_var) for expr in (*bounds, *write.conditions))


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


def _uses(node: object, var: tirx.Var) -> bool:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(node, (tirx.Var, lambda each: found.append(each) if each.same_as(var) else None))
    return bool(found)
