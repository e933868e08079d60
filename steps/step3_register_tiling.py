"""Step 3, register tiling: each thread computes a tile of outputs, kept in registers.

Before, a thread loaded two values from shared memory for each multiply-add. Now it computes
thread_m × thread_n outputs: it loads thread_m + thread_n values and uses each several times::

    for k_inner < block_k:
      for row < thread_m:  for column < thread_n:
        sum[row, column] += A_shared[row, k] * B_shared[k, column]

With 4 × 4 outputs that is 8 loads for 16 multiply-adds, and a block of the same number of threads covers
a tile 16 times as large, so that global loads drop again. This is the step with the largest gain once
there are enough tiles to fill the GPU. The smallest matrices lose: fewer, larger blocks leave most
multiprocessors idle. What stays slow: scalar loads and stores, and waiting at the barriers.
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
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config, Step, Variant, checked
from tensorir_ladder.steps.thread_tiles import THREAD_TILES


@checked
def schedule(problem: Matmul, config: Config) -> Schedule:
    """Compute a tile of outputs per thread; everything else as in step 2."""
    sch = Schedule(problem.prim_func())
    block, tile = sch.get_sblock("matmul"), config.tile
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
    number=3,
    topic="register_tiling",
    text=__doc__,
    schedule=schedule,
    tiles=THREAD_TILES,
    variants=(Variant("default"),),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
