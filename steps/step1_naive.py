"""Step 1, naive: one thread per output element.

The loop nest as mathematics writes it, spread over the GPU: every output element gets a thread of its
own, which walks the whole of k and keeps its sum in a register::

    for tile, bound to blockIdx.x:
      for row, column, bound to threadIdx.y, threadIdx.x:
        for k < K:  sum += A[i, k] * B[k, j]
        C[i, j] = sum

What is slow: every multiply-add needs two loads. Neighbouring threads load the same elements again and
again, and only the caches keep that from reaching device memory. Expect a small share of the peak.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.loops.tiling import bind_elements
from tensorir_ladder.schedules.memory.staging import accumulate_in_registers, initialize_before
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import StepConfig

VARIANTS = ("default",)


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """One output per thread; of the tile only the number of threads matters."""
    sch = Schedule(problem.prim_func())
    block = sch.get_sblock("matmul")
    loops = bind_elements(sch, block, config.tile.threads)
    accumulate_in_registers(sch, block, loops.thread_column)
    initialize_before(sch, block, sch.get_loops(block)[-1])
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
