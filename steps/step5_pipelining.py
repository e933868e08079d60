"""Step 5, software pipelining: load the coming tiles while this one is multiplied.

Before, loading and computing took turns: N tiles cost N · (load + compute). Now each operand has a ring of
shared-memory slots, `stages` of them, and tile k + stages − 1 is on its way while tile k is multiplied:
N · max(load, compute), once the ring is filled::

    slots 0 .. stages−2 are filled                                  # prologue
    for k < N − stages + 1:
      start filling slot (k + stages−1) % stages                    # stage 0
      wait for slot k % stages;  multiply from it                   # stage stages−1
    multiply from the slots that remain                             # epilogue

Variants, compared by name:

- async: the copies are cp.async, which write shared memory behind the thread's back. The default.
- one_barrier: async with one barrier per tile instead of TVM's two (schedules/one_barrier.py says why one is
  enough); unrolled_ring: with a turn of the ring written out, slot numbers constant; one_barrier_unrolled: both.
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

from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.pipeline.pipelining import double_buffer, pipeline_loop
from tensorir_ladder.schedules.recipes.contraction import StagedContraction, stage_contraction
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import StepConfig

RING_FORMS = {
    "async": {},
    "one_barrier": {"one_barrier": True},
    "unrolled_ring": {"unroll_ring": True},
    "one_barrier_unrolled": {"one_barrier": True, "unroll_ring": True},
}
VARIANTS = (*RING_FORMS, "sync", "register_staged", "writeback", "double_buffer", "double_buffer_pipelined")
NEEDS_ASYNC_COPY, WITHOUT_ASYNC_COPY = tuple(RING_FORMS), "register_staged"
TUNED_VARIANTS = ("async", "one_barrier_unrolled")  # the plain form, and the one that costs least per tile
PIPELINED = True


def pipelined(problem: Matmul, config: StepConfig) -> tuple[Schedule, StagedContraction]:
    """Step 4 with its k loop pipelined as the variant says; the loops stay valid for the next step."""
    sch = Schedule(problem.prim_func())
    staged = stage_contraction(
        sch,
        sch.get_sblock("matmul"),
        config.tile,
        vectorize=True,
        scope=config.tile.shared_scope(dtype_bytes(problem.dtype), min(config.stages, config.k_tiles(problem))),
        through_registers=config.variant == "register_staged",
        product_per_tile=config.variant == "writeback",
    )
    if config.variant.startswith("double_buffer"):
        for copy in staged.copies:
            double_buffer(sch, copy.copy)
    if config.variant != "double_buffer":
        asynchronous = config.async_copy and config.variant in (*RING_FORMS, "writeback")
        form = RING_FORMS.get(config.variant, {}) if asynchronous else {}
        pipeline_loop(sch, staged.loops.k_outer, config.stages, asynchronous, **form)
    return sch, staged


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """Step 4 with its k loop pipelined."""
    return pipelined(problem, config)[0]


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
