"""Step 9, the asynchronous ring: tensor cores that do not wait for memory.

Before, every k tile was loaded, awaited, and then multiplied. Now step 5's ring is under the tensor cores:
cp.async fills `stages` slots of shared memory, with one barrier per k tile and slot numbers that are constants::

    for k:
      for k_step but the last:  ldmatrix of step + 1 from slot k % stages;  mma of step
      wait for tile k + 1;  barrier                         # everybody has read slot k % stages
      ldmatrix of the first step of tile k + 1
      start filling slot k % stages with tile k + stages    # cp.async
      mma of the last step

Variants, compared by name:

- fragments: two sets of fragments in registers as well: while one is multiplied, `ldmatrix` fills the other; the
  first one of the next k tile is filled behind the barrier in the middle of a tile. The default. It takes k tiles
  of an even number of steps of 16; others, and products of a single k tile, are as in "shared".
- shared: the ring in shared memory only.
- any_m: fragments, one kernel for any number of rows: predicates on A and C, and groups of columns run side by side.
- tf32: fragments, for float32 operands, each rounded to 11 bits.

What to expect: the loop's instructions are hardly more than `mma`, `ldmatrix` and cp.async; larger warp tiles use
each fragment more often, until registers run out. Without a GPU the schedule is verified before instructions
replace its innermost loops: the same tiles, copies, fragment layouts and pipeline, as plain TensorIR.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.isa import TF32
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.pipeline.pipelining import pipeline_loop, pipeline_reads
from tensorir_ladder.schedules.tensor_cores.mma import TensorizedContraction, tensorize_contraction, use_instruction
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import TENSOR_CORE_TILES, StepConfig

VARIANTS = ("fragments", "shared", "any_m", "tf32")
DTYPES = {variant: ("float32",) if variant == "tf32" else ("float16", "bfloat16") for variant in VARIANTS}
PIPELINED = True
NEEDS_ASYNC_COPY = VARIANTS
MATH = {"tf32": "tf32"}
TILES = TENSOR_CORE_TILES
STAGES = 4
TUNING_STAGES = (3, 4)


def contraction(problem: Matmul, config: StepConfig, any_m: bool) -> tuple[Schedule, TensorizedContraction]:
    """The schedule, all but the instructions."""
    sch = Schedule(problem.prim_func(any_m))
    slots = min(config.stages, config.k_tiles(problem))
    scope = config.tile.shared_scope(dtype_bytes(problem.dtype), slots)
    form = {"scope": scope, "hide_reads": slots > 1, "instruction": TF32 if config.variant == "tf32" else None}
    tensorized = tensorize_contraction(sch, sch.get_sblock("matmul"), config.tile, **form)
    loops = tensorized.loops
    ahead = config.variant != "shared" and pipeline_reads(sch, loops.k_step, slots)
    if slots > 1:
        pipeline_loop(sch, loops.k_outer, slots, True, one_barrier=True, unroll_ring=True, fill_ahead=ahead)
    return sch, tensorized


def schedule_before_tensorization(problem: Matmul, config: StepConfig) -> Schedule:
    """What LLVM can verify: everything but the instructions; any_m with the rows fixed, as TVM's CPU passes need."""
    return contraction(problem, config, any_m=False)[0]


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """Step 8 with its k loop pipelined."""
    sch, tensorized = contraction(problem, config, config.variant == "any_m")
    use_instruction(sch, tensorized)
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
