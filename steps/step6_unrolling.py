"""Step 6, unrolling: write out the steps inside a k tile.

Before, the compiler met a loop over k_inner and decided by itself how far to unroll it. For large thread
tiles, and once cp.async is in the loop, it gives up early: then operands come from shared memory one float
at a time, and each step pays for its own indices. Now the schedule writes out the steps::

    for k_inner < block_k / factor:
      step 0; step 1; ... step factor−1       # constant offsets

What changes: operands that lie side by side are loaded four at a time, offsets become part of the
instruction, and loads can be moved up past the arithmetic of earlier steps. Small thread tiles gain next to
nothing: the compiler unrolled them already, and a factor that it would not have chosen costs some of that (8
here, of 16 steps). The larger tiles that reuse each load more often become usable, which is where the best
tile gets its speed. Factors: none, 4, 8, 16, 32, full; one beyond block_k means full.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.loops.unrolling import unroll_loop
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps import step5_pipelining
from tensorir_ladder.steps.config import StepConfig

FACTORS = {"full": None, "none": 1, "unroll4": 4, "unroll8": 8, "unroll16": 16, "unroll32": 32}
VARIANTS = tuple(FACTORS)
PIPELINED = True


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """Step 5's default variant with its k_inner loop unrolled by the variant's factor."""
    before = step5_pipelining.VARIANTS[0] if config.async_copy else step5_pipelining.WITHOUT_ASYNC_COPY
    sch, staged = step5_pipelining.pipelined(problem, replace(config, variant=before))
    unroll_loop(sch, staged.loops.k_inner, FACTORS[config.variant])
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
