"""How many blocks of a kernel run at once: registers that leave room for several, and grids of no more than that.

CUDA's assembler gives a thread as many registers as it finds a use for: addresses of copies, computed once and kept, in
the main. A block of 128 threads with 64 sums each fits four times into a multiprocessor's registers with 128 of them
for each thread, and twice with 180. Told how many blocks are to fit, it computes these addresses anew, which takes few
instructions, and does not touch the rest.

A block that starts has nothing to multiply until its first tile has arrived. Where as many blocks as run at once do all
the work, a warp that only copies goes on with the next piece's tiles while the others still store results.
"""

from __future__ import annotations

import tvm_ffi
from tvm import sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.script import tirx as T

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import is_constant, loop_name, replaced, thread_tag
from tensorir_ladder.schedules.passes import require_pipeline, with_loop_body

RESIDENT = "resident_blocks"
STAYS = "blocks_that_stay"  # on a grid's loop
GRID = "blockIdx.x"
KERNEL = "tirx.kernel_launch_params"  # TVM's attribute of a function that is a kernel
LEAST_BLOCKS = "tirx.launch_bounds_min_blocks_per_sm"  # TVM's attribute for __launch_bounds__(threads, blocks)


def keep_resident(sch: Schedule, loop: LoopRV, blocks: int) -> None:
    """Let a multiprocessor's registers suffice for ``blocks`` blocks of the kernel around ``loop`` at once.

    ::

        before   __global__ void __launch_bounds__(128) kernel(...)         # 180 registers: 2 blocks
        after    __global__ void __launch_bounds__(128, 4) kernel(...)      # 128 registers: 4 blocks

    Changes nothing before the function is lowered (:func:`lower_residency`). More than registers suffice for makes
    the assembler put sums in memory: ask :attr:`schedules.tiles.BlockTile.registers` first.

    Raises
    ------
    IllegalSchedule : for less than one block.
    """
    if blocks < 1:
        raise IllegalSchedule(
            "a multiprocessor holds one block at least",
            loop=loop_name(sch, loop),
            value=blocks,
            limit="at least 1",
            remedy="leave keep_resident out",
        )
    require_pipeline(sch, "registers for so many blocks")
    sch.annotate(loop, RESIDENT, blocks)


def stay_resident(sch: Schedule, grid_loop: LoopRV, blocks: int) -> None:
    """Make blocks persistent: ``blocks`` of them process all tiles of a grid, one after the other.

    ::

        before   for tile < 512, bound to blockIdx.x:  ...
        after    for block < 132, bound to blockIdx.x:
                   for piece < (511 - block) // 132 + 1:
                     ...                                                     # of tile piece * 132 + block
                     barrier

    ``grid_loop`` is any schedule's loop over blockIdx.x, of any extent. ``blocks`` should be the number that the GPU
    runs at once. Nothing changes before the function is lowered (:func:`lower_resident_grids`), and results are bit for
    bit the same.

    A pipeline of copies by cp.async starts again with each piece. A TMA ring with a producer warp
    (:func:`schedules.pipeline.bring_by_own_warp`) does not: it loads the next piece's first tiles while the other warps
    store results. The ring and the results of :func:`schedules.memory.store_by_tma` then need separate shared memory,
    so fewer stages fit. On an H200 this made step 12 1.02 times as fast at 4096³ and 1.13 times as fast at
    8192x8192x512 (128x256x64, 3 stages instead of 4).

    Raises
    ------
    IllegalSchedule : for less than one block, and for a loop that is not bound to blockIdx.x.
    """
    tag = thread_tag(sch.get(grid_loop))
    if blocks < 1 or tag != GRID:
        raise IllegalSchedule(
            "blocks that stay go through the iterations of a grid's loop",
            loop=loop_name(sch, grid_loop),
            value=f"{blocks} blocks, a loop bound to {tag or 'nothing'}",
            limit=f"at least 1, {GRID}",
            remedy="pass the loop that bind_grid returned, and as many blocks as run at once",
        )
    require_pipeline(sch, "blocks that stay")
    sch.annotate(grid_loop, STAYS, blocks)


def lower_resident_grids(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put the loop over pieces inside blocks that :func:`stay_resident` marked; part of the lowering pipeline.

    All threads meet behind a piece: its results may be in shared memory where the next one's copies go.
    """

    def lowered(grid: tirx.For) -> tirx.For:
        if STAYS not in grid.annotations:
            return grid
        kept = {key: value for key, value in grid.annotations.items() if key != STAYS}
        blocks, tiles, of_type = int(grid.annotations[STAYS]), grid.extent, grid.loop_var.ty
        if is_constant(tiles) and int(tiles) <= blocks:
            return with_loop_body(grid, grid.body, kept)
        block, piece = tirx.Var(grid.loop_var.name, of_type), tirx.Var("piece", of_type)
        # No condition around the body: TVM puts no barriers under one.
        pieces = sym.Analyzer().simplify(tirx.floordiv(tiles - 1 - block, blocks) + 1)
        if is_constant(tiles) and int(tiles) % blocks == 0:
            pieces = int(tiles) // blocks

        def inside(stmt: tirx.Stmt) -> tirx.Stmt:
            if isinstance(stmt, tirx.For) and thread_tag(stmt):
                return with_loop_body(stmt, inside(stmt.body))
            body = replaced(stmt, {grid.loop_var: piece * blocks + block})
            met = tirx.Evaluate(T.tvm_storage_sync("shared"))
            return tirx.For(piece, 0, pieces, tirx.ForKind.SERIAL, tirx.SeqStmt([body, met]))

        return tirx.For(block, grid.min, blocks, grid.kind, inside(grid.body), grid.thread_binding, kept)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, lowered)))


def lower_residency(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Say of kernels that :func:`keep_resident` marked how many blocks are to fit; part of the lowering pipeline."""
    if KERNEL in (function.attrs or {}):  # split from its host's part already
        asked = _asked(function.body)
        return function.with_attr(LEAST_BLOCKS, max(asked)) if asked else function

    def bounded(stmt: tirx.AttrStmt) -> tirx.Stmt:
        if stmt.attr_key != "thread_extent" or str(stmt.node.thread_tag) != "blockIdx.x":
            return stmt
        asked = _asked(stmt.body)
        body = least_blocks(max(asked), stmt.body) if asked else stmt.body
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)

    return tvm_ffi.structural_map(function, (tirx.AttrStmt, bounded))


def _asked(body: tirx.Stmt) -> list[int]:
    marked: list[tirx.For] = []
    tvm_ffi.structural_walk(body, (tirx.For, marked.append))
    return [int(loop.annotations[RESIDENT]) for loop in marked if RESIDENT in loop.annotations]


def least_blocks(blocks: int, body: tirx.Stmt) -> tirx.Stmt:
    """Return a kernel's body that says how many blocks a multiprocessor is to hold at once."""
    return tirx.AttrStmt(0, LEAST_BLOCKS, blocks, body)
