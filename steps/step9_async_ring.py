"""Step 9, the asynchronous ring: tensor cores that do not wait for memory.

Before, every k tile was loaded, awaited, and then multiplied. Now step 5's ring is under the tensor cores:
cp.async fills `stages` k tiles in shared memory, with one barrier per k tile and stage numbers that are constants::

    for k:
      for k_step but the last:  ldmatrix of step + 1 from stage k % stages;  mma of step
      wait for tile k + 1;  barrier                         # everybody has read stage k % stages
      ldmatrix of the first step of tile k + 1
      start filling stage k % stages with tile k + stages   # cp.async
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
from tensorir_ladder.schedules.loops import bind_grid, pad_to_tile, raster_blocks
from tensorir_ladder.schedules.pipeline import pipeline_loop, pipeline_reads
from tensorir_ladder.schedules.tensor_cores import (
    accumulate_fragment,
    fitting_instruction,
    load_fragments,
    stage_in_swizzled,
    tile_to_warps,
    use_instruction,
    zero_fragment,
)
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked
from tensorir_ladder.steps.step8_tensor_cores import ROWS_TOGETHER, TILES


@checked
def schedule(problem: Matmul, config: Config, *, tensorize: bool = True) -> Schedule:
    """Pipeline step 8's k loops; ``tensorize=False`` leaves the instructions' loops as they are."""
    # TVM's passes for the CPU need the rows fixed.
    sch = Schedule(problem.prim_func(any_m=config.variant == "any_m" and tensorize))
    block, tile = sch.get_sblock("matmul"), config.tile
    instruction = fitting_instruction(sch, block, TF32 if config.variant == "tf32" else None)
    stages = config.stages_of(problem)
    scope = tile.shared_scope(problem.itemsize, stages)
    pad_to_tile(sch, block, tile.block)
    rows, columns, reduction = sch.get_loops(block)
    loops = tile_to_warps(sch, rows, columns, reduction, tile, instruction)
    bind_grid(sch, raster_blocks(sch, loops.block_row, loops.block_column, max(1, ROWS_TOGETHER // tile.block_m)))
    accumulate_fragment(sch, block, loops, instruction)
    for operand in (0, 1):
        transposed = not instruction.transposes  # on the way to shared memory, since ldmatrix cannot
        stage_in_swizzled(sch, block, operand, loops.k_outer, tile.threads, scope, k_last=transposed)
    loads = [load_fragments(sch, block, operand, loops.k_step, instruction, stages > 1) for operand in (0, 1)]
    for loop in (loops.k_step, loops.fragment_row, loops.fragment_column):
        sch.unroll(loop)
    zero_fragment(sch, block, loops)
    # The idea: fragments are read a step ahead, shared memory is filled by cp.async some k tiles ahead.
    reads_ahead = config.variant != "shared" and pipeline_reads(sch, loops.k_step, stages)
    if stages > 1:
        pipeline_loop(sch, loops.k_outer, stages, True, one_barrier=True, unroll_ring=True, fill_ahead=reads_ahead)
    if tensorize:
        use_instruction(sch, loops, loads, instruction)
    return sch


def schedule_for_cpu(problem: Matmul, config: Config) -> Schedule:
    """Make everything but the instructions, as TensorIR: what can be verified without a GPU."""
    return schedule(problem, config, tensorize=False)


STEP = Step(
    number=9,
    topic="async_ring",
    text=__doc__,
    schedule=schedule,
    schedule_for_cpu=schedule_for_cpu,
    tiles=TILES,
    stages=4,
    tuning_stages=(3, 4),
    pipelined=True,
    variants=(
        Variant("fragments", dtypes=HALVES, needs_async_copy=True),
        Variant("shared", dtypes=HALVES, needs_async_copy=True),
        Variant("any_m", dtypes=HALVES, needs_async_copy=True),
        Variant("tf32", dtypes=("float32",), math="tf32", needs_async_copy=True),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
