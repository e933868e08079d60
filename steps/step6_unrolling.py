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

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.loops import (
    bind_grid,
    bind_threads,
    pad_to_tile,
    tile_contraction,
    unroll_loop,
    vectorize_write_back,
)
from tensorir_ladder.schedules.memory import (
    accumulate_in_registers,
    fetch_cooperatively,
    initialize_before,
    inline_data_movement,
    stage_in_shared,
    stage_through_registers,
)
from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config, Step, Variant, checked
from tensorir_ladder.steps.thread_tiles import THREAD_TILES, TUNING_STAGES


@checked
def schedule(problem: Matmul, config: Config) -> Schedule:
    """Unroll the k_inner loop of step 5's default form by the variant's factor."""
    scope = config.tile.shared_scope(problem.itemsize, config.stages_of(problem))
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
        copy = stage_in_shared(sch, block, operand, loops.k_outer, scope)
        load = None if config.machine.has_cp_async else stage_through_registers(sch, copy, loops.k_outer)
        inline_data_movement(sch, load or copy)
        fetch_cooperatively(sch, copy, loops.k_outer, tile.threads, vectorize=True, load=load)
    initialize_before(sch, block, loops.k_outer)
    pipeline_loop(sch, loops.k_outer, config.stages, async_copy=config.machine.has_cp_async)

    unroll_loop(sch, loops.k_inner, STEP.variant(config.variant).unroll)
    return sch


STEP = Step(
    number=6,
    topic="unrolling",
    text=__doc__,
    schedule=schedule,
    tiles=THREAD_TILES,
    stages=3,
    tuning_stages=TUNING_STAGES,
    pipelined=True,
    variants=(
        Variant("full", unroll=None, modelled=True),
        Variant("none", unroll=1),
        Variant("unroll4", unroll=4),
        Variant("unroll8", unroll=8),
        Variant("unroll16", unroll=16),
        Variant("unroll32", unroll=32),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
