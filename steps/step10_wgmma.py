"""Step 10, wgmma: tensor cores read operands from shared memory and run asynchronously.

In step 9, each warp loaded fragments of both operands into registers, and multiplied 16 × 8 × 16 elements at a time.
One wgmma of Hopper computes up to 64 × 256 × 16 for a warpgroup, which is four warps. It reads operands from shared
memory, needs registers for the sums only, and runs while the warps do something else::

    for k:
      wait until tile k has landed;  barrier
      issue wgmma of tile k                              # returns at once
      load a tile into the stage that tile k − 2 used    # cp.async, while the tensor cores multiply
      wait until wgmma of tile k − 1 is done

What changes: there are no ldmatrix and no operand fragments, tiles are larger, and when one wgmma ends, the next is
already queued. Operands are 16-bit, and the target is sm_90a. schedules/tensor_cores/warpgroup.py builds these loops.
A kernel in front copies operands to aligned rows if theirs are no multiples of 16 bytes.

Variants:

- rows: as above; results are stored row by row through shared memory. The default.
- in_flight: as rows, but each thread stores its sums directly.
- awaited: each iteration waits for its own wgmma; the ring then has room for one tile more in flight.
- fitted, boxes: for products of any shape; see steps/any_shape.py.

What to expect: larger tiles multiply more for each loaded element. Small products have too few tiles to fill the GPU.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.loops import bind_grid, pad_to_tile, raster_blocks
from tensorir_ladder.schedules.memory import align_operands, initialize_before
from tensorir_ladder.schedules.pipeline import hide_reads
from tensorir_ladder.schedules.tensor_cores import (
    accumulate_by_warpgroups,
    bind_warpgroups,
    instruction_for,
    multiply_by_wgmma,
    pipeline_warpgroups,
    spread_fragment,
    stage_in_panels,
    store_by_rows,
    tile_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import Choice, TileSet, WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.any_shape import BY_WARPGROUPS
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked


@checked
def schedule(problem: Matmul, config: Config, *, tensorize: bool = True) -> Schedule:
    """Pipeline wgmma over a ring of shared-memory stages; ``tensorize=False`` leaves the multiplication as loops."""
    sch = Schedule(problem.prim_func())
    block, tile = sch.get_sblock("matmul"), config.tile
    align_operands(sch, block, tile.block, vector_bytes=16, rounds=2)
    instruction = instruction_for(sch, block, tile)
    k_tiles = 2 if config.k_tiles(problem) == 1 else 1  # so that there is a loop to pipeline
    pad_to_tile(sch, block, [tile.block_m, tile.block_n, tile.block_k * k_tiles])
    rows, columns, reduction = sch.get_loops(block)
    loops = tile_for_warpgroups(sch, rows, columns, reduction, tile)
    grid = bind_grid(sch, raster_blocks(sch, loops.block_row, loops.block_column, 8))
    group = bind_warpgroups(sch, loops)
    write_back = accumulate_by_warpgroups(sch, block, group, instruction)
    # TVM stages only the rows of a product smaller than a tile, and operands behind them are then unaligned for wgmma.
    whole_tiles = problem.m >= tile.block_m and problem.n >= tile.block_n
    if config.variant == "rows" and whole_tiles:
        store_by_rows(sch, write_back, grid, tile.threads)
    spread_fragment(sch, write_back, group, vectorize=True)
    for operand, run in enumerate(instruction.run_lengths):
        stage_in_panels(sch, block, operand, loops.k_outer, tile.threads, run)
    spread_fragment(sch, initialize_before(sch, block, loops.k_outer), group)
    hide_reads(sch, block)  # wgmma reads shared memory asynchronously
    in_flight = 0 if config.variant == "awaited" else 1  # wgmma groups when an iteration ends
    enough = config.stages if config.k_tiles(problem) > config.stages else max(config.stages, in_flight + 2)
    pipeline_warpgroups(sch, loops.k_outer, enough, in_flight)
    if tensorize:
        multiply_by_wgmma(sch, loops, instruction)
    return sch


def schedule_for_cpu(problem: Matmul, config: Config) -> Schedule:
    """Make the same schedule with loops in the place of wgmma, which a CPU can run."""
    return schedule(problem, config, tensorize=False)


# The default has the widest instruction, and two warpgroups that share B. Smaller tiles fill more multiprocessors, or
# let two blocks share one.
TILES = TileSet.of(
    Choice(WarpgroupTile(block=(128, 256, 64), warpgroups=(2, 1)), stages=4),
    Choice(WarpgroupTile(block=(64, 128, 64), warpgroups=(1, 1)), stages=6),
    Choice(WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1)), stages=6),
    Choice(WarpgroupTile(block=(128, 128, 64), warpgroups=(2, 1)), stages=6),
    Choice(WarpgroupTile(block=(128, 192, 64), warpgroups=(2, 1)), stages=4),
    Choice(WarpgroupTile(block=(192, 128, 64), warpgroups=(3, 1)), stages=4),
    Choice(WarpgroupTile(block=(256, 128, 64), warpgroups=(4, 1)), stages=4),
    more=(
        WarpgroupTile(block=(256, 128, 64), warpgroups=(2, 1)),
        WarpgroupTile(block=(128, 64, 64), warpgroups=(2, 1)),
        WarpgroupTile(block=(64, 256, 64), warpgroups=(1, 1)),
    ),
    formula="warpgroups",
)
STEP = Step(
    number=10,
    topic="wgmma",
    text=__doc__,
    schedule=schedule,
    schedule_for_cpu=schedule_for_cpu,
    tiles=TILES,
    stages=4,
    tuning_stages=(4, 6),
    pipelined=True,
    variants=(
        Variant("rows", dtypes=HALVES, needs_async_copy=True, fewest_stages=3),
        Variant("in_flight", dtypes=HALVES, needs_async_copy=True, fewest_stages=3),
        Variant("awaited", dtypes=HALVES, needs_async_copy=True, fewest_stages=2),
        *BY_WARPGROUPS,
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
