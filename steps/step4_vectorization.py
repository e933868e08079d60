"""Step 4, vectorization: move 16 bytes with each load and store.

Before, every float was loaded and stored by an instruction of its own. Now global loads, stores to shared
memory and the stores of the results move four floats at once, wherever rows are a multiple of four long
(else two, else one: alignment decides, openly)::

    A_shared[4 floats] = A[4 floats]
    C[4 floats] = sum[4 floats]

What changes: a quarter of the load and store instructions, and of their address arithmetic: a gain where
copying is a large part of the work (small matrices), hardly any where arithmetic is. With 8 × 4 outputs per
thread it even costs a little on large matrices, by no fault of the vectors: as many instructions, but the
compiler's code holds instructions back at dispatch more often (the counters' dispatch stalls). Conflicts for
register banks would do that; no counter here shows whether they do.
What stays slow: the thread still waits for its global loads before it can store them to shared memory, all
threads then wait at the barrier, and nobody computes meanwhile.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.recipes.contraction import stage_contraction
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import StepConfig

VARIANTS = ("default",)


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """Step 3 with copies and write-back as wide as alignment allows."""
    sch = Schedule(problem.prim_func())
    stage_contraction(sch, sch.get_sblock("matmul"), config.tile, vectorize=True)
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
