"""Step 10, wgmma: the warpgroup's instruction, fed from shared memory and never waited for at once.

Before, each warp loaded fragments of both operands into registers and multiplied 16 × 8 × 16 at a time, waiting for
what it had just loaded. Hopper's wgmma multiplies 64 × up to 256 × 16 for four warps together: it reads operands from
shared memory by itself, keeps only its sums in registers, and runs on while the warps do something else::

    for k:
      wait until tile k has landed;  barrier
      issue wgmma of tile k                              # returns at once
      start filling the slot of tile k − 2               # cp.async, while the tensor cores multiply
      wait until wgmma of tile k − 1 is done

What changes: no ldmatrix, no operand fragments, larger tiles, and tensor cores that have the next tile's work queued
when they finish this one's. It takes 16-bit operands and an sm_90a; schedules/warpgroup.py says why the loop is right.
Variants:
- rows (the default): as above; results are stored row by row through shared memory. Where tiles are too few to fill the
  GPU, a long reduction is cut in parts, each summed by blocks of its own and added up by a second kernel.
- whole: the same, never cut. in_flight: results are stored as threads have them. awaited: each multiplication is
  awaited in its own iteration; one tile more is on its way in as many slots.
A kernel in front copies operands to aligned rows: theirs are no multiples of 16 bytes, or of 128 where that pays.
What to expect: larger tiles multiply more per element brought; small products have too few for all multiprocessors.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.memory.alignment import align_operands, worthwhile_row_bytes
from tensorir_ladder.schedules.recipes.split_reduction import add_parts, split_reduction
from tensorir_ladder.schedules.tensor_cores.warpgroup import (
    WarpgroupContraction,
    multiply_by_wgmma,
    pipeline_warpgroups,
    stage_for_warpgroups,
)
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import WARPGROUP_TILES, StepConfig

IN_FLIGHT = {"rows": 1, "whole": 1, "in_flight": 1, "awaited": 0}
VARIANTS = tuple(IN_FLIGHT)
FEWEST_STAGES = {variant: tiles + 2 for variant, tiles in IN_FLIGHT.items()}
SPLIT, BY_ROWS = ("rows",), ("rows", "whole")
NEEDS_ASYNC_COPY = VARIANTS
PIPELINED = True
DTYPES = dict.fromkeys(VARIANTS, ("float16", "bfloat16"))
TILES = WARPGROUP_TILES
STAGES, TUNING_STAGES = 4, (4, 6)


def pipelined(problem: Matmul, config: StepConfig) -> tuple[Schedule, WarpgroupContraction]:
    """Tiles, panels, ring and epilogue, with the multiplication still as loops."""
    sch, tile = Schedule(problem.prim_func()), config.tile
    block = sch.get_sblock("matmul")
    parts = config.parts(problem) if config.variant in SPLIT else 1
    rounded, lines = (tile.block_m, tile.block_n, tile.block_k * parts), worthwhile_row_bytes(sch, block)
    align_operands(sch, block, rounded, row_bytes=lines, vector_bytes=16, rounds=2)
    if parts > 1:
        split = split_reduction(sch, block, parts, tile.block_k)
        add_parts(sch, split)
        block = split.partial
    # Of a product smaller than a tile, TVM keeps rows that leave the operands behind them unaligned for wgmma.
    by_rows = parts == 1 and config.variant in BY_ROWS and problem.m >= tile.block_m and problem.n >= tile.block_n
    staged = stage_for_warpgroups(sch, block, tile, store_rows=by_rows)
    in_flight, short = IN_FLIGHT[config.variant], config.k_tiles(problem) <= config.stages
    pipeline_warpgroups(sch, staged, max(config.stages, in_flight + 2) if short else config.stages, in_flight)
    return sch, staged


def schedule_before_tensorization(problem: Matmul, config: StepConfig) -> Schedule:
    """What can be verified without a GPU: everything but the instruction, as TensorIR."""
    return pipelined(problem, config)[0]


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """A product by warpgroups, pipelined around wgmma."""
    sch, staged = pipelined(problem, config)
    multiply_by_wgmma(sch, staged)
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
