"""Step 1, naive: one thread per output element.

The textbook loop nest, with one thread per output element. Each thread walks all of k and keeps its sum in a
register::

    for tile, bound to blockIdx.x:
      for row, column, bound to threadIdx.y, threadIdx.x:
        for k < K:  sum += A[i, k] * B[k, j]
        C[i, j] = sum

What is slow: every multiply-add needs two loads. Neighbouring threads load the same elements again and
again, and only the caches keep that from reaching device memory. Expect a small share of the peak.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.loops import bind_elements
from tensorir_ladder.schedules.memory import accumulate_in_registers, initialize_before
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config, Step, Variant, checked
from tensorir_ladder.steps.thread_tiles import THREAD_TILES


@checked
def schedule(problem: Matmul, config: Config) -> Schedule:
    """Assign one output to each thread; only the tile's number of threads is used."""
    sch = Schedule(problem.prim_func())
    block = sch.get_sblock("matmul")
    loops = bind_elements(sch, block, config.tile.threads)
    accumulate_in_registers(sch, block, loops.thread_column)
    initialize_before(sch, block, sch.get_loops(block)[-1])
    return sch


STEP = Step(
    number=1,
    topic="naive",
    text=__doc__,
    schedule=schedule,
    tiles=THREAD_TILES,
    tile_built=ThreadTile.one_output_per_thread,
    variants=(Variant("default"),),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
