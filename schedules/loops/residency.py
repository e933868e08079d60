"""How many blocks of a kernel a multiprocessor should hold at once, and registers that leave room for them.

CUDA's assembler gives a thread as many registers as it finds a use for: addresses of copies, computed once and kept, in
the main. A block of 128 threads with 64 sums each fits four times into a multiprocessor's registers with 128 of them
for each thread, and twice with 180. Told how many blocks are to fit, it computes these addresses anew, which takes few
instructions, and does not touch the rest.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import loop_name
from tensorir_ladder.schedules.passes import require_pipeline

RESIDENT = "resident_blocks"
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
