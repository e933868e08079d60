"""Step 5, software pipelining: load the coming tiles while this one is multiplied.

Before, loading and computing took turns: N tiles cost N · (load + compute). Now shared memory holds `stages` tiles of
each operand, and tile k + stages − 1 is on its way while tile k is multiplied: N · max(load, compute), once the first
stages are filled::

    stages 0 .. stages−2 are filled                                  # prologue
    for k < N − stages + 1:
      start filling stage (k + stages−1) % stages                    # statements of pipeline stage 0
      wait for stage k % stages;  multiply from it                   # the statement of pipeline stage stages−1
    multiply from the stages that remain                             # epilogue

TVM rewrites the loop so when it is lowered. It is told by two lists on the loop, with an entry for each of its three
statements, copy A, copy B and multiply: *stage*, how many iterations a statement runs behind the first; and *order*,
its place in the body of the new loop. A third list names the stages whose copies are asynchronous (cp.async).

Variants, compared by name:

- async: the copies are cp.async, which write shared memory behind the thread's back. The default.
- one_barrier: async with one barrier per tile instead of TVM's two (schedules/pipeline/one_barrier.py says why one is
  enough); unrolled_ring: with a turn of the ring of stages written out, their numbers constant;
  one_barrier_unrolled: both.
- sync: TVM's plain annotation. The thread itself carries each value from global to shared memory, and so
  waits for the load in the very iteration that should hide it: little or no gain.
- register_staged: global to registers in one iteration, registers to shared memory in the next: hides latency
  without cp.async, as far as one iteration's arithmetic is long enough to hide it.
- writeback: load, compute and write-back as stages 0, 1, 2; each tile's product is finished in registers of
  its own and added to the result one stage later. The overlap is async's; the addition is extra work.
- double_buffer(_pipelined): `double_buffer_scope` alone, and with the sync pipeline: no change.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules import pipeline, recipes
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
from tensorir_ladder.steps.thread_tiles import THREAD_TILES, TUNING_STAGES


@checked
def schedule(problem: Matmul, config: Config) -> Schedule:
    """Pipeline step 4's k loop."""
    if config.variant in OTHER_FORMS:
        return OTHER_FORMS[config.variant](problem, config)
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
        inline_data_movement(sch, copy)
        fetch_cooperatively(sch, copy, loops.k_outer, tile.threads, vectorize=True)
        if config.variant in ("double_buffer", "double_buffer_pipelined"):
            sch.annotate(copy, "double_buffer_scope", 0)
    initialize_before(sch, block, loops.k_outer)

    stages = pipeline.fitting_stages(sch, loops.k_outer, config.stages)
    if stages == 1 or config.variant == "double_buffer":
        return sch
    # Copy A, copy B, multiply. pipeline_loop(sch, loops.k_outer, stages) would find these lists by itself.
    stage, order = [0, 0, stages - 1], [0, 1, 2]
    async_stages = [0] if config.variant == "async" else []
    pipeline.check_pipeline(sch, loops.k_outer, stage, order, async_stages)
    sch.annotate(loops.k_outer, "software_pipeline_stage", stage)
    sch.annotate(loops.k_outer, "software_pipeline_order", order)
    if async_stages:
        sch.annotate(loops.k_outer, "software_pipeline_async_stages", async_stages)
    return sch


def ring_form(problem: Matmul, config: Config) -> Schedule:
    """Pipeline the loop with one barrier per tile, with its ring written out, or both."""
    form = STEP.variant(config.variant)
    sch, staged = step4(problem, config)
    ring = {"one_barrier": form.one_barrier, "unroll_ring": form.unrolled_ring}
    pipeline.pipeline_loop(sch, staged.loops.k_outer, config.stages, async_copy=True, **ring)
    return sch


def register_staged(problem: Matmul, config: Config) -> Schedule:
    """Split each copy into a load to registers and a store to shared memory, an iteration apart."""
    sch, staged = step4(problem, config, through_registers=True)
    pipeline.pipeline_loop(sch, staged.loops.k_outer, config.stages, async_copy=False)
    return sch


def writeback(problem: Matmul, config: Config) -> Schedule:
    """Finish each tile's product by itself, and add it to the result a stage later."""
    sch, staged = step4(problem, config, product_per_tile=True)
    pipeline.pipeline_loop(sch, staged.loops.k_outer, config.stages, async_copy=config.machine.has_cp_async)
    return sch


def step4(problem: Matmul, config: Config, **form: bool) -> tuple[Schedule, recipes.StagedContraction]:
    """Make step 4's schedule by its recipe, which has the forms that these variants start from."""
    sch = Schedule(problem.prim_func())
    scope = config.tile.shared_scope(problem.itemsize, config.stages_of(problem))
    block = sch.get_sblock("matmul")
    return sch, recipes.stage_contraction(sch, block, config.tile, vectorize=True, scope=scope, **form)


OTHER_FORMS = {
    "one_barrier": ring_form,
    "unrolled_ring": ring_form,
    "one_barrier_unrolled": ring_form,
    "register_staged": register_staged,
    "writeback": writeback,
}
STEP = Step(
    number=5,
    topic="pipelining",
    text=__doc__,
    schedule=schedule,
    tiles=THREAD_TILES,
    stages=3,
    tuning_stages=TUNING_STAGES,
    pipelined=True,
    variants=(
        Variant("async", needs_async_copy=True, tuned=True, modelled=True),
        Variant("one_barrier", needs_async_copy=True, one_barrier=True, modelled=True),
        Variant("unrolled_ring", needs_async_copy=True, unrolled_ring=True, modelled=True),
        Variant(
            "one_barrier_unrolled",
            needs_async_copy=True,
            one_barrier=True,
            unrolled_ring=True,
            tuned=True,
            modelled=True,
        ),
        Variant("sync"),
        Variant("register_staged"),
        Variant("writeback", note="Every tile's product is then added to the result in a statement of its own."),
        Variant("double_buffer", pipelined=False),
        Variant("double_buffer_pipelined"),
    ),
    without_async_copy="register_staged",
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
