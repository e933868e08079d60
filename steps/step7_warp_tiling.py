"""Step 7, warp tiling: lanes interleaved, multiply-adds in an order that spares the register file.

Before (step 6), arithmetic waited for its own operands. A warp was 2 x 16 threads with the default tile, each with
neighbouring outputs, whose operands came element by element. And a multiply-add reads three registers; where two of
them are in the same half of the register file its issue is held back, which Nsight Compute shows as dispatch stalls.
Now::

    for k_outer:
      A_shared = A[tile], rows padded;  B_shared = B[tile]   # by cp.async, one barrier per k tile
      for k_inner < block_k / slices, written out:
        a = A_shared[rows, k + 1];  b = B_shared[k + 1, columns]      # registers, for the next step; 16 bytes at once
        for row:  for column, backwards in odd rows:  C[row, column] += a[row] * b[column]

What changes: a warp has a tile of its own, whose rows and columns go round among its lanes. What they load at once
lies side by side, and rows that run along k begin in different banks since they are 16 bytes longer. Operands are
registers for a step of k. Threads with 128 outputs read them a step ahead, across k tiles too: only two such warps
fit a scheduler, which cannot hide each other's loads. In serpentine order each multiply-add shares an operand with
the one before, which the operand's reuse cache still holds; CUDA's assembler must be told to keep it (-O1). Blocks run
8 rows side by side, for the L2 cache. And a product with too few blocks is cut in slices of k among the warps of a
block, which add up their sums in the end: another order of additions.

Variants, compared by name:

- serpentine: all of it. The default.
- row_order: each row from its first column on, and the assembler as usual.
- unpadded: rows in shared memory as long as they are.
- no_raster: blocks row by row.
- in_turn: operands read when they are needed.
- fitted: for products of any shape; see steps/any_shape.py.

What to expect: the first of these kernels that is held back by multiply-adds rather than by their operands; most in
large products. Small ones gain by slices. Operands are float32; 16-bit ones are for tensor cores, in step 8.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.loops import (
    add_slices,
    bind_grid,
    bind_warps,
    interleave_lanes,
    pad_to_tile,
    raster_blocks,
    sum_slices,
    tile_for_warps,
    unroll_loop,
    vectorize_write_back,
    walk_serpentine,
)
from tensorir_ladder.schedules.memory import (
    accumulate_in_registers,
    align_operands,
    initialize_before,
    read_through_registers,
    stage_in_padded,
)
from tensorir_ladder.schedules.pipeline import pipeline_loop, pipeline_reads
from tensorir_ladder.schedules.tiles import Choice, TileSet, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.any_shape import BY_WARPS
from tensorir_ladder.steps.step import Config, Step, Variant, checked


@checked
def schedule(problem: Matmul, config: Config) -> Schedule:
    """Give each warp a tile of its own, and its lanes operands in registers; cp.async fills a ring of stages."""
    sch = Schedule(problem.prim_func())
    block, tile, variant = sch.get_sblock("matmul"), config.tile, config.variant
    stages = config.stages_of(problem)
    scope = tile.shared_scope(problem.itemsize, stages)
    align_operands(sch, block, tile.block)  # rows that cp.async cannot copy in vectors
    pad_to_tile(sch, block, tile.block)
    lanes = interleave_lanes(sch, block, tile.lanes)
    loops = tile_for_warps(sch, lanes, tile)
    sums, loops = sum_slices(sch, block, loops, scope)
    rows_together = 1 if variant == "no_raster" else 8
    grid = bind_grid(sch, raster_blocks(sch, loops.block_row, loops.block_column, rows_together))
    lane = bind_warps(sch, loops)
    if variant != "row_order":
        walk_serpentine(sch, loops.row)
    write_back = accumulate_in_registers(sch, sums, lane)
    vectorize_write_back(sch, write_back, lane, unroll_scalars=True)
    if tile.slices > 1:
        add_slices(sch, block, grid, tile.threads[0])
    for operand in (0, 1):
        stage_in_padded(sch, sums, operand, loops.k_outer, tile.threads, scope, pad=variant != "unpadded")
    for operand in (0, 1):
        read_through_registers(sch, sums, operand, loops.k_inner)
    initialize_before(sch, sums, loops.k_outer)
    reads_ahead = tile.steps_ahead > 0 and variant != "in_turn" and pipeline_reads(sch, loops.k_inner, stages)
    unroll_loop(sch, loops.k_inner)
    pipeline_loop(sch, loops.k_outer, stages, stages > 1, one_barrier=stages > 1, fill_ahead=reads_ahead)
    return sch


# In exploratory sweeps on an H200, not kept here, threads with 8x16 outputs that read operands ahead were fastest from
# 2048 on, with k tiles of 16: those of 32, written out, make warps wait for instructions. Two such blocks fill a
# multiprocessor's registers, as do four of 64x128 with 8x8. Below that, blocks are too few, and slices put more warps
# to work on each.
TILES = TileSet.of(
    Choice(WarpTile(block=(128, 128, 16), warp=(32, 128), thread=(8, 16)), stages=3),
    Choice(WarpTile(block=(64, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(32, 64, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=4),
    Choice(WarpTile(block=(32, 64, 64), warp=(32, 64), thread=(8, 8), slices=8), stages=3),
    Choice(WarpTile(block=(16, 32, 64), warp=(16, 32), thread=(4, 4), slices=4), stages=3),
    more=(
        WarpTile(block=(128, 256, 16), warp=(32, 128), thread=(8, 16)),
        WarpTile(block=(64, 128, 32), warp=(32, 128), thread=(8, 16), slices=2),
        WarpTile(block=(64, 128, 64), warp=(32, 128), thread=(8, 16), slices=4),
        WarpTile(block=(128, 128, 32), warp=(32, 64), thread=(8, 8)),
        WarpTile(block=(64, 128, 32), warp=(32, 64), thread=(8, 8), slices=2),
        WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=4),
        WarpTile(block=(128, 128, 32), warp=(64, 32), thread=(8, 8)),
        WarpTile(block=(32, 32, 32), warp=(32, 32), thread=(8, 4), slices=4),
        WarpTile(block=(32, 32, 64), warp=(32, 32), thread=(8, 4), slices=8),
        WarpTile(block=(16, 32, 64), warp=(16, 32), thread=(4, 4), slices=8),
        WarpTile(block=(16, 32, 32), warp=(16, 32), thread=(4, 4), slices=4),
    ),
)
STEP = Step(
    number=7,
    topic="warp_tiling",
    text=__doc__,
    schedule=schedule,
    tiles=TILES,
    stages=3,
    tuning_stages=(2, 3, 4),
    pipelined=True,
    variants=(
        *(
            Variant(name, dtypes=("float32",), needs_async_copy=True)
            for name in ("serpentine", "row_order", "unpadded", "no_raster", "in_turn")
        ),
        *BY_WARPS,
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
