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

from tensorir_ladder.schedules.recipes.contraction import stage_contraction
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import StepConfig

VARIANTS = ("default",)


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """One output per thread, operands staged in shared memory; ragged edges are padded on the fly."""
    sch = Schedule(problem.prim_func())
    stage_contraction(sch, sch.get_sblock("matmul"), config.tile.one_output_per_thread())
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
