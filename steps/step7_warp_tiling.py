"""Step 7, warp tiling: operands in registers, loads without bank conflicts, multiply-adds that reuse operands.

Before (step 6), each thread loaded its operands element by element, and multiply-adds waited for these loads. A
multiply-add also reads three registers. If two of them are in the same bank of the register file, it issues later:
Nsight Compute shows dispatch stalls. Now::

    for k_outer:
      A_shared = A[tile], rows padded;  B_shared = B[tile]   # by cp.async, one barrier per k tile
      for k_inner < block_k / slices, written out:
        a = A_shared[rows, k + 1];  b = B_shared[k + 1, columns]      # registers, for the next step; 16 bytes at once
        for row:  for column, backwards in odd rows:  C[row, column] += a[row] * b[column]

What changes:

- Each warp computes a tile. The tile's rows and columns are interleaved across the warp's lanes, so that one load
  instruction reads neighbouring addresses. Rows along k are padded by 16 bytes, so that they start in different banks
  of shared memory.
- The operands of one k step are in registers. Threads with 128 outputs load them one step ahead, also from one k tile
  to the next: only two such warps fit on a scheduler, too few to hide each other's latency.
- In serpentine order each multiply-add shares an operand with the previous one. The operand reuse cache still holds
  it. The assembler keeps this order only with -O1.
- Groups of 8 rows of blocks run at the same time and share operands in the L2 cache.
- If a product has too few blocks, the warps of a block share each k tile: each computes a slice of its steps, and they
  add their sums at the end. This changes the order of additions.

Variants, compared by name:

- serpentine: all of the above. The default.
- row_order: each row from left to right, with the assembler's usual options.
- unpadded: rows in shared memory without padding.
- no_raster: blocks in row-major order.
- in_turn: operands are loaded in the step that needs them.
- fitted: for products of any shape; see steps/any_shape.py.

What to expect: the first of these kernels whose limit is the multiply-add rate and not its loads. Large products gain
most; small ones gain from slices. Operands are float32; step 8 multiplies 16-bit operands on tensor cores.
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
    """Tile for warps, keep operands in registers, and fill a ring of shared-memory stages by cp.async."""
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


# Threads with 8x16 outputs are the fastest for squares from 2048 on (H200). Their k tiles have 16 steps: the code of
# 32, written out, stalls on instruction fetch. Two such blocks fill a multiprocessor's registers. Smaller products
# have too few blocks, and slices give each block more warps.
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
