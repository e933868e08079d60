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
- fitted: serpentine, for shapes off the squares. Copies fill with zeros beyond ragged edges by themselves, without a
  branch. Where tiles are too few to fill the GPU, or bring too little at once, the reduction is cut in parts, which a
  second kernel adds up. An operand whose rows are no multiples of 16 bytes is copied straight from where it is,
  element by element, where that is sooner done than a copy of it in front; and results with such rows are collected
  in shared memory, so that neighbours are stored side by side. Tiles of a B stored [n, k] are transposed on their way:
  threads then read along columns, and not four steps ahead along k, for which they lack registers. The last k tile ends
  where the reduction does, for which slices have a k tile's steps in turn. Threads have 8x8 outputs at most, and
  registers for no more, so that as many blocks are resident as without such copies. From sm_90 on kernels are launched
  while the one before them still runs.

What to expect: the first of these kernels that is held back by multiply-adds rather than by their operands; most in
large products. Small ones gain by slices. Operands are float32; 16-bit ones are for tensor cores, in step 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from tensorir_ladder.schedules.cost import plan_by_warps, resident_blocks, warp_cycles, warp_parts
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.left_over import left_over
from tensorir_ladder.schedules.loops import (
    add_slices,
    bind_grid,
    bind_warps,
    can_launch_early,
    end_within_tile,
    interleave_lanes,
    keep_resident,
    launch_early,
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
    stage_transposed,
    store_through_shared,
)
from tensorir_ladder.schedules.pipeline import fill_with_zeros, pipeline_loop, pipeline_reads
from tensorir_ladder.schedules.recipes import add_parts, split_reduction
from tensorir_ladder.schedules.tiles import Choice, TileSet, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config, Step, Variant, checked


@checked
def schedule(problem: Matmul, config: Config) -> Schedule:
    """Give each warp a tile of its own, and its lanes operands in registers; cp.async fills a ring of stages."""
    sch = Schedule(problem.prim_func())
    tile, variant = config.tile, config.variant
    fit = fit_of(problem, config)
    steps = tile.steps_of_part(problem.k, fit.parts)
    stages = min(config.stages, -(-config.k_tiles(problem) // fit.parts))
    scope = "shared.dyn" if fit.collected else tile.shared_scope(problem.itemsize, stages)
    block = align_and_split(sch, tile, fit, steps)
    pad_to_tile(sch, block, [*(1 for _ in sch.get_loops(block)[:-3]), *tile.block])
    lanes = interleave_lanes(sch, block, tile.lanes, transposed=fit.transposed)
    loops = tile_for_warps(sch, lanes, tile, slices_in_turn=variant == "fitted" and steps % tile.block_k > 0)
    sums, loops = sum_slices(sch, block, loops, scope)
    rows_together = 1 if variant == "no_raster" else 8
    grid = bind_grid(sch, [*loops.batch, *raster_blocks(sch, loops.block_row, loops.block_column, rows_together)])
    lane = bind_warps(sch, loops)
    if variant != "row_order":
        walk_serpentine(sch, loops.row)
    if fit.collected and tile.slices == 1:
        store_through_shared(sch, sums, grid, tile.threads, scope)
    if variant == "fitted":
        fill_with_zeros(sch, loops.row)
        keep_resident(sch, loops.row, resident_blocks(Choice(tile, stages), config.machine, problem.itemsize))
    write_back = accumulate_in_registers(sch, sums, lane)
    vectorize_write_back(sch, write_back, lane, unroll_scalars=True)
    if tile.slices > 1:
        add_slices(sch, block, grid, tile.threads[0], len(loops.batch), by_element=fit.collected)
    for operand, transposed in ((0, False), (1, fit.transposed)):
        if transposed:
            stage_transposed(sch, sums, operand, loops.k_outer, tile.threads, scope)
        else:
            stage_in_padded(sch, sums, operand, loops.k_outer, tile.threads, scope, pad=variant != "unpadded")
    for operand in (0, 1):
        read_through_registers(sch, sums, operand, loops.k_inner)
    initialize_before(sch, sums, loops.k_outer)
    if variant == "fitted" and (stages > 1 or steps <= tile.block_k):  # else each step would ask
        end_within_tile(sch, loops.k_outer, loops.k_inner, steps // tile.slices)
    reads_ahead = tile.steps_ahead > 0 and variant != "in_turn" and pipeline_reads(sch, loops.k_inner, stages)
    unroll_loop(sch, loops.k_inner)
    pipeline_loop(sch, loops.k_outer, stages, stages > 1, one_barrier=stages > 1, fill_ahead=reads_ahead)
    if variant == "fitted" and can_launch_early(config.machine.target):
        launch_early(sch)
    return sch


@dataclass(frozen=True)
class Fit:
    """Say how a product that the tiles do not fit is computed: its reduction in ``parts``; which operands are
    ``copied`` first where their rows are no whole vectors; results with such rows ``collected`` in shared memory; tiles
    of a B that is stored [n, k] ``transposed``, element by element, whatever its rows are."""

    parts: int = 1
    copied: tuple[bool, bool] = (True, True)
    collected: bool = False
    transposed: bool = False


def fit_of(problem: Matmul, config: Config) -> Fit:
    """Return what the variant "fitted" does; the others copy first, and do no more."""
    if config.variant != "fitted":
        return Fit()
    planned = STEP.plan(problem, config)
    scattered = problem.n * problem.itemsize % VECTOR_BYTES and planned.parts == 1
    results = config.tile.collected_bytes(problem.itemsize, config.stages_of(problem))
    room = results <= int(config.machine.target.attrs["max_shared_memory_per_block"])
    transposed = problem.layout == "nt"
    a_copied, b_copied = planned.copied
    return Fit(planned.parts, (a_copied, b_copied and not transposed), bool(scattered and room), transposed)


def align_and_split(sch: Schedule, tile: WarpTile, fit: Fit, steps: int) -> SBlockRV:
    """Bring rows that cp.async cannot copy in vectors to aligned ones, and cut the reduction; return what to tile.

    Each of several parts has so many steps.
    """
    block = sch.get_sblock("matmul")
    rounded = (tile.block_m, tile.block_n, tile.block_k if fit.parts == 1 else steps * fit.parts)
    if any(fit.copied):
        align_operands(sch, block, rounded, row_bytes=[VECTOR_BYTES if first else 1 for first in fit.copied])
    if fit.parts == 1:
        return block
    pad_to_tile(sch, block, rounded)  # so that sums have whole rows
    split = split_reduction(sch, block, fit.parts, steps)
    add_parts(sch, split)
    return split.partial


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
# Off the squares, threads with 8x8 outputs were the fastest on each of 41 drawn shapes, or 4x4 on the smallest: more of
# them fit, they have registers for the addresses of single elements, and short reductions end before so much code as
# that of 8x16 outputs has been brought. Small blocks of few stages leave least of the last wave: 64x64x32 in two slices
# and two stages, of which a multiprocessor holds four, was the fastest of 36 choices on 5 of 40 other shapes, and had
# 0.89 of the fastest one's speed on average. Few columns want tiles of 32. Of a short reduction much may be zeros: 68
# elements are three tiles of 32, 0.29 of which are none of the operands'. Of 39 shapes of 65 to 299 the two of 16 were
# the fastest on 26, up to 1.21 times as fast as all others (1.05 over all 39). Of 124 shapes that wanted them most the
# two of 128x32 in two slices and that of 256x64 were the fastest on 30, up to 1.13 times as fast. More do not help:
# without 96x64x32, 96x128x32 and 128x64x32 in two slices, and 128x64x16, whose times are the least predictable, what it
# takes is 1.003 times as fast, and 20 of 259 shapes are below 0.92 of cuBLAS instead of 24, though the fastest of all
# that was timed is 0.998 times as fast (of shapes left out in turn, on an H200). Nor do boxes by TMA help (a map for
# each fourth row of A, which so begin at 16 bytes, and B brought to such rows by a kernel in front): on 130 shapes with
# some 8 such kernels each the fastest of them was 0.92 times as fast as the fastest of these where no rows are whole
# vectors, 0.99 where those of B are, 1.01 where both are.
FITTED = TileSet.of(
    Choice(WarpTile(block=(64, 128, 16), warp=(32, 64), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(64, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(128, 128, 16), warp=(32, 64), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(128, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=3),
    Choice(WarpTile(block=(64, 64, 16), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 64, 16), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 128, 32), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 128, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(128, 96, 32), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 64, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(64, 32, 32), warp=(64, 32), thread=(8, 8), slices=4), stages=3),
    Choice(WarpTile(block=(128, 32, 32), warp=(64, 32), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(128, 32, 32), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(128, 32, 16), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(256, 64, 16), warp=(64, 32), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(32, 64, 64), warp=(32, 64), thread=(8, 8), slices=8), stages=3),
    Choice(WarpTile(block=(16, 32, 64), warp=(16, 32), thread=(4, 4), slices=8), stages=3),
    cost=warp_cycles,
    parts=warp_parts,
    plan=plan_by_warps,
    left_over=left_over,
    plans_again=True,
    launched_early=True,
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
        Variant(
            "fitted",
            dtypes=("float32",),
            needs_async_copy=True,
            splits_k=True,
            tiles=FITTED,
            fits=lambda problem, config: config.is_ragged(problem) or fit_of(problem, config) != Fit(),
        ),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
