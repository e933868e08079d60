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

from tensorir_ladder.schedules.loops import (
    bind_grid,
    bind_threads,
    pad_to_tile,
    tile_contraction,
    vectorize_write_back,
)
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
    """Make step 3's copies and write-back as wide as alignment allows."""
    sch = Schedule(problem.prim_func())
    block, tile = sch.get_sblock("matmul"), config.tile
    pad_to_tile(sch, block, tile.block)  # ragged edges are filled up with zeros on the way to shared memory
    rows, columns, reduction = sch.get_loops(block)
    loops = tile_contraction(sch, rows, columns, reduction, tile)
    bind_grid(sch, [loops.block_row, loops.block_column])
    bind_threads(sch, loops.thread_row, loops.thread_column)
    write_back = accumulate_in_registers(sch, block, loops.thread_column)
    vectorize_write_back(sch, write_back, loops.thread_column)
    for operand in (0, 1):
        copy = stage_in_shared(sch, block, operand, loops.k_outer)
        inline_data_movement(sch, copy)
        fetch_cooperatively(sch, copy, loops.k_outer, tile.threads, vectorize=True)
    initialize_before(sch, block, loops.k_outer)
    return sch


STEP = Step(
    number=4,
    topic="vectorization",
    text=__doc__,
    schedule=schedule,
    tiles=THREAD_TILES,
    variants=(Variant("default"),),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
