"""Step 10, wgmma: the warpgroup's instruction, fed from shared memory and never waited for at once.

Before, each warp loaded fragments of both operands into registers and multiplied 16 × 8 × 16 at a time, waiting for
what it had just loaded. Hopper's wgmma multiplies 64 × up to 256 × 16 for four warps together: it reads operands from
shared memory by itself, keeps only its sums in registers, and runs on while the warps do something else::

    for k:
      wait until tile k has landed;  barrier
      issue wgmma of tile k                              # returns at once
      start filling the stage of tile k − 2              # cp.async, while the tensor cores multiply
      wait until wgmma of tile k − 1 is done

What changes: no ldmatrix, no operand fragments, larger tiles, and tensor cores that have the next tile's work queued
when they finish this one's. It takes 16-bit operands and an sm_90a; schedules/tensor_cores/warpgroup.py proves it.
Variants:
- rows (the default): as above; results are stored row by row through shared memory. Where tiles are too few to fill the
  GPU, a long reduction is cut in parts, each summed by blocks of its own and added up by a second kernel.
- fitted: for shapes off the squares: as many parts as the cost model finds, copies that fill with zeros beyond ragged
  edges by themselves, without a branch, all of them requested before the first wait; tiles of any width by the eight;
  kernels that are launched while the one before them still runs.
- boxes: as fitted, but operands are brought by the tensor memory accelerator, box by box, by one thread's instructions
  (step 11's idea as a schedule function), in a warp of its own where registers are left (step 12's): rows that begin
  inside of sectors cost less, a kernel's start costs more.
  Blocks side by side share the operands that they have in common where that pays. Tiles have any width by the eight,
  or, with operands swapped, any height: B's columns are then the instruction's 64 rows.
- whole: as rows, never cut. in_flight: results are stored as threads have them. awaited: each multiplication is
  awaited in its own iteration; one tile more is on its way in as many stages.
A kernel in front copies operands whose rows are no multiples of 16 bytes to rows that are; and each operand whose rows
are no multiples of 32 bytes, a sector, where that pays.
What to expect: larger tiles multiply more per element brought; small products have too few for all multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.cost import (
    Planned,
    box_cycles,
    box_parts,
    plan_by_boxes,
    plan_by_warpgroups,
    wgmma_cycles,
    wgmma_parts,
)
from tensorir_ladder.schedules.isa import (
    PANEL,
    ROW_BYTES,
    SECTOR_BYTES,
    SHARED_KIB,
    VECTOR_BYTES,
    WGMMA_ROWS,
    WGMMA_WIDTHS,
    WIDEST,
)
from tensorir_ladder.schedules.left_over import left_over
from tensorir_ladder.schedules.loops import bind_grid, launch_early, pad_to_tile, raster_blocks
from tensorir_ladder.schedules.memory import (
    align_operands,
    initialize_before,
    longest_rounds,
)
from tensorir_ladder.schedules.pipeline import bring_by_own_warp, fill_before_waiting, fill_with_zeros, hide_reads
from tensorir_ladder.schedules.recipes import add_parts, split_reduction
from tensorir_ladder.schedules.tensor_cores import (
    WarpgroupLoops,
    accumulate_by_warpgroups,
    bind_warpgroups,
    instruction_for,
    multiply_by_wgmma,
    pipeline_warpgroups,
    spread_fragment,
    stage_by_tma,
    stage_in_panels,
    store_by_rows,
    tile_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import SHORT_RING, Choice, SwappedWarpgroupTile, TileSet, WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked


@checked
def schedule(problem: Matmul, config: Config, *, tensorize: bool = True) -> Schedule:
    """Multiply by warpgroups, pipelined around wgmma; ``tensorize=False`` leaves the multiplication as loops."""
    sch = Schedule(problem.prim_func())
    tile, planned = config.tile, STEP.plan(problem, config)
    block = align_and_split(sch, tile, planned)
    instruction = instruction_for(sch, block, tile)
    *part, _, _, reduction = sch.get_loops(block)
    k_tiles = 2 if int(sch.get(reduction).extent) <= tile.block_k else 1  # so that there is a loop to pipeline
    down, across = planned.cluster
    pad_to_tile(sch, block, [*(1 for _ in part), tile.block_m * down, tile.block_n * across, tile.block_k * k_tiles])
    *part, rows, columns, reduction = sch.get_loops(block)
    loops = tile_for_warpgroups(sch, rows, columns, reduction, tile)
    grid = bind_grid(sch, [*part, *cluster_side_by_side(sch, loops, planned.cluster)])
    group = bind_warpgroups(sch, loops)
    write_back = accumulate_by_warpgroups(sch, block, group, instruction)
    # Of a product smaller than a tile, TVM keeps rows that leave the operands behind them unaligned for wgmma.
    whole_tiles = problem.m >= tile.block_m and problem.n >= tile.block_n
    if config.variant in ("rows", "whole", "fitted", "boxes") and planned.parts == 1 and whole_tiles:
        store_by_rows(sch, write_back, grid, tile.threads, whole=config.variant in ("fitted", "boxes"))
    spread_fragment(sch, write_back, group, vectorize=True)
    copies = []
    for operand, (run, blocks, apart) in enumerate(zip(instruction.run_lengths, (across, down), (1, across))):
        if config.variant == "boxes":
            stage_by_tma(sch, block, operand, loops.k_outer, run, blocks, apart)
        else:
            copies.append(stage_in_panels(sch, block, operand, loops.k_outer, tile.threads, run))
    spread_fragment(sch, initialize_before(sch, block, loops.k_outer), group)
    hide_reads(sch, block)  # the instruction's, which reads shared memory by itself
    in_flight = 0 if config.variant == "awaited" else 1  # multiplications that nobody has waited for
    enough = config.stages if config.k_tiles(problem) > config.stages else max(config.stages, in_flight + 2)
    plan = pipeline_warpgroups(sch, loops.k_outer, enough, in_flight)
    if planned.own_warp:
        bring_by_own_warp(sch, loops.k_outer)
    if config.variant == "fitted":
        rounds = longest_rounds(sch, copies)
        fill_with_zeros(sch, rounds)
        fill_before_waiting(sch, rounds, plan)
    if config.variant in ("fitted", "boxes"):
        launch_early(sch)
    if tensorize:
        multiply_by_wgmma(sch, loops, instruction)
    return sch


def schedule_for_cpu(problem: Matmul, config: Config) -> Schedule:
    """Make everything but the instruction, as TensorIR: what can be verified without a GPU."""
    return schedule(problem, config, tensorize=False)


def cluster_side_by_side(sch: Schedule, loops: WarpgroupLoops, cluster: tuple[int, int]) -> list[LoopRV]:
    """Order a grid's loops so that the blocks of a cluster, below and beside each other, are the innermost."""
    if cluster == (1, 1):
        return raster_blocks(sch, loops.block_row, loops.block_column, 8)
    rows, columns = (
        sch.split(loop, [None, blocks]) for loop, blocks in zip((loops.block_row, loops.block_column), cluster)
    )
    longer, shorter = (rows, columns) if cluster[0] >= cluster[1] else (columns, rows)
    order = [*raster_blocks(sch, longer[0], shorter[0], 8 // max(cluster)), rows[1], columns[1]]
    sch.reorder(*order)
    return order


def align_and_split(sch: Schedule, tile: WarpgroupTile, planned: Planned) -> SBlockRV:
    """Copy rows that are unaligned to aligned ones first, and cut the reduction in parts; returns the block to tile."""
    block, aligned = sch.get_sblock("matmul"), ROW_BYTES if planned.boxes else SECTOR_BYTES
    row_bytes = [aligned if first else VECTOR_BYTES for first in planned.copied]
    rounded = (tile.block_m, tile.block_n, tile.block_k * planned.parts)
    align_operands(sch, block, rounded, row_bytes=row_bytes, vector_bytes=16, rounds=2)
    if planned.parts == 1:
        return block
    split = split_reduction(sch, block, planned.parts, tile.block_k)
    add_parts(sch, split)
    return split.partial


# The default has the widest instruction, and two warpgroups that share B. Three warpgroups bring the least per
# multiplication; smaller tiles leave room for two blocks to a multiprocessor, or fill more of them.
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
    cost=wgmma_cycles,
    plan=plan_by_warpgroups,
)
# Widths between, for what these leave of the last wave, and rings so short that blocks share a multiprocessor. Those
# whose last panel has 48 columns (112, 176, 240) took 1.07 times as long as the model says, 1.10 where rows of B
# are no whole sectors (91 kernels on an H200; why is not known). Without them what is chosen has 0.985 of the speed of
# the best of 94 shapes in one part, 0.976 with them.
BETWEEN = tuple(
    Choice(WarpgroupTile.parse(tile), stages)
    for stages, tiles in (
        (6, "64x80x64/1x1 64x96x64/1x1 128x80x64/2x1 128x96x64/2x1"),
        (5, "128x144x64/2x1 128x160x64/2x1"),
        (4, "128x208x64/2x1 192x144x64/3x1 192x192x64/3x1 256x96x64/4x1"),
        (4, "64x64x64/1x1 64x80x64/1x1 64x96x64/1x1 64x128x64/1x1 128x64x64/2x1"),
        (3, "64x192x64/1x1 128x96x64/2x1 128x128x64/2x1"),
    )
    for tile in tiles.split()
)
FITTED = TileSet.of(
    *TILES.choices,
    Choice(WarpgroupTile(block=(64, 256, 64), warpgroups=(1, 1)), stages=5),
    Choice(WarpgroupTile(block=(64, 192, 64), warpgroups=(1, 1)), stages=6),
    Choice(WarpgroupTile(block=(128, 64, 64), warpgroups=(2, 1)), stages=6),
    *BETWEEN,
    cost=wgmma_cycles,
    parts=wgmma_parts,
    plan=plan_by_warpgroups,
    left_over=left_over,
    launched_early=True,
)
# By boxes any width by the eight is as good as another: of the instruction's columns, along n or, operands swapped,
# along m. With the longest ring that an H100 holds, and one of which two blocks may share a multiprocessor.
LONGEST_RING = 12
WIDEST_OF_FOUR = 160  # columns of an instruction whose sums leave four warpgroups registers for addresses


def any_width() -> Iterator[Choice]:
    """List tiles of up to four warpgroups side by side, whose instructions have any width that their registers hold."""
    for groups in (1, 2, 3, 4):
        widest = WIDEST if groups < 4 else WIDEST_OF_FOUR
        for width in range(16, widest + 1, WGMMA_WIDTHS):
            across = WarpgroupTile(block=(WGMMA_ROWS * groups, width, PANEL), warpgroups=(groups, 1))
            swapped = SwappedWarpgroupTile(block=(width, WGMMA_ROWS * groups, PANEL), warpgroups=(1, groups))
            for tile in (across, swapped) if width >= PANEL else (swapped,):
                longest = min(LONGEST_RING, (SHARED_KIB[90] << 10) // tile.smem_bytes(itemsize=2))
                yield from (Choice(tile, stages) for stages in {longest, SHORT_RING})


BOXES = TileSet.of(
    TILES.default,
    *any_width(),
    cost=box_cycles,
    parts=box_parts,
    plan=plan_by_boxes,
    left_over=left_over,
    launched_early=True,
)
STEP: Step = Step(
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
        Variant("rows", dtypes=HALVES, needs_async_copy=True, fewest_stages=3, splits_k=True),
        Variant("whole", dtypes=HALVES, needs_async_copy=True, fewest_stages=3),
        Variant("in_flight", dtypes=HALVES, needs_async_copy=True, fewest_stages=3),
        Variant("awaited", dtypes=HALVES, needs_async_copy=True, fewest_stages=2),
        Variant(
            "fitted",
            dtypes=HALVES,
            needs_async_copy=True,
            fewest_stages=3,
            splits_k=True,
            tiles=FITTED,
            fits=lambda problem, config: config.is_ragged(problem) or STEP.plan(problem, config).parts > 1,
        ),
        Variant(
            "boxes",
            dtypes=HALVES,
            needs_async_copy=True,
            fewest_stages=3,
            splits_k=True,
            tiles=BOXES,
            fits=lambda problem, config: True,
        ),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
