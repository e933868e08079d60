"""Step 2, shared memory: a block's threads load each tile of A and B once, for all of them.

Before, each thread loaded its own operands, and every element of A was loaded by as many threads as a
block has columns. Now the block copies one tile of each operand to shared memory together, waits, and
multiplies from there::

    for k_outer < K / block_k:
      A_shared = A[tile];  B_shared = B[tile]      # each thread a few elements
      barrier
      for k_inner < block_k:  sum += A_shared[row, k] * B_shared[k, column]
      barrier

What changes: loads from global memory drop by the tile's width and height. The gain is much smaller than that
sounds; probably the caches did part of this already (no counter here shows it). What stays slow: two loads per
multiply-add, now from shared memory, and two barriers per tile at which loading and arithmetic wait for each
other.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.loops import bind_grid, bind_threads, pad_to_tile, tile_contraction
from tensorir_ladder.schedules.memory import (
    accumulate_in_registers,
    fetch_cooperatively,
    initialize_before,
    inline_data_movement,
    stage_in_shared,
)
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config, Step, Variant, checked
from tensorir_ladder.steps.thread_tiles import THREAD_TILES


@checked
def schedule(problem: Matmul, config: Config) -> Schedule:
    """Stage operands in shared memory, one output per thread."""
    sch = Schedule(problem.prim_func())
    block, tile = sch.get_sblock("matmul"), config.tile.one_output_per_thread()
    pad_to_tile(sch, block, tile.block)  # ragged edges are filled up with zeros on the way to shared memory
    rows, columns, reduction = sch.get_loops(block)
    loops = tile_contraction(sch, rows, columns, reduction, tile)
    bind_grid(sch, [loops.block_row, loops.block_column])
    bind_threads(sch, loops.thread_row, loops.thread_column)
    accumulate_in_registers(sch, block, loops.thread_column)
    for operand in (0, 1):
        copy = stage_in_shared(sch, block, operand, loops.k_outer)
        inline_data_movement(sch, copy)
        fetch_cooperatively(sch, copy, loops.k_outer, tile.threads)
    initialize_before(sch, block, loops.k_outer)
    return sch


STEP = Step(
    number=2,
    topic="shared_tiling",
    text=__doc__,
    schedule=schedule,
    tiles=THREAD_TILES,
    tile_built=ThreadTile.one_output_per_thread,
    variants=(Variant("default"),),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
