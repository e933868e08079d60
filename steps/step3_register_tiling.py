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

from tensorir_ladder.schedules.recipes.contraction import stage_contraction
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import StepConfig

VARIANTS = ("default",)


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """A tile of outputs per thread; everything else as in step 2."""
    sch = Schedule(problem.prim_func())
    stage_contraction(sch, sch.get_sblock("matmul"), config.tile)
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
