"""Step 9, the asynchronous ring: tensor cores that do not wait for memory.

Before, every k tile was loaded, awaited, and then multiplied. Now step 5's ring is under the tensor cores:
cp.async fills `stages` slots of shared memory, with one barrier per k tile and slot numbers that are constants::

    slots 0 .. stages−2 are filled                                  # prologue
    for k < N − stages + 1:
      wait for slot k % stages;  barrier
      start filling slot (k + stages−1) % stages                    # cp.async
      for k_step:  ldmatrix from slot k % stages;  mma
    multiply from the slots that remain                             # epilogue

Variants, compared by name:

- fragments: two sets of fragments in registers as well: while one is multiplied, `ldmatrix` fills the other; the
  first one of the next k tile is filled behind the barrier in the middle of a tile. The default.
- shared: the ring in shared memory only.

What to expect: the loop's instructions are hardly more than `mma`, `ldmatrix` and cp.async; larger warp tiles use
each fragment more often, until registers run out. Without a GPU the schedule is verified before instructions
replace its innermost loops: the same tiles, copies, fragment layouts and pipeline, as plain TensorIR.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from schedules.pipelining import pipeline_loop
from schedules.tensorization import TensorizedContraction, tensorize_contraction, use_instruction
from schedules.vectorization import dtype_bytes
from schedules.workloads import Matmul
from steps.config import StepConfig
from steps.step8_tensor_cores import DTYPES, RASTER
from schedules.tensorization import TensorCoreTile

VARIANTS = ("shared",)
PIPELINED = True
NEEDS_ASYNC_COPY = VARIANTS


def contraction(problem: Matmul, config: StepConfig) -> tuple[Schedule, TensorizedContraction]:
    """The schedule, all but the instructions."""
    sch = Schedule(problem.prim_func())
    slots = min(config.stages, config.k_tiles(problem))
    scope = config.tile.shared_scope(dtype_bytes(problem.dtype), slots)
    block = sch.get_sblock("matmul")
    tensorized = tensorize_contraction(sch, block, config.tile, scope=scope, raster=RASTER, hide_reads=slots > 1)
    if slots > 1:
        pipeline_loop(sch, tensorized.loops.k_outer, slots, True, one_barrier=True, unroll_ring=True)
    return sch, tensorized


def schedule_before_tensorization(problem: Matmul, config: StepConfig) -> Schedule:
    """What can be verified without a GPU: everything but the instructions, as TensorIR."""
    return contraction(problem, config)[0]


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """Step 8 with its k loop pipelined."""
    sch, tensorized = contraction(problem, config)
    use_instruction(sch, tensorized)
    return sch


if __name__ == "__main__":
    from harness.cli import run_step

    run_step(__file__)
