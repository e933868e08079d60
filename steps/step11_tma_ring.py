"""Step 11, TMA ring: one thread loads whole tiles, and mbarriers count their bytes.

In step 10 all threads of a block copied its tiles, 16 bytes each at a time. Every thread computed addresses and
predicates, and all met at a block barrier. Hopper's tensor memory accelerator (TMA) loads a box of up to 256 × 64
elements by one instruction of one thread. It swizzles the box for wgmma, fills elements beyond the matrix with zeros,
and counts the bytes at an *mbarrier*. TMA stores the results, too::

    fill all stages                                    # one thread; each stage's mbarrier expects its bytes
    for k:
      wait for the mbarrier "full" of tile k's stage
      issue wgmma of tile k                            # returns at once
      wait until wgmma of tile k − 1 is done; arrive at "empty" of its stage
      one thread: wait for that "empty"; load tile k − 1 + stages
    results → swizzled shared memory → TMA store, by one thread

What changes: two schedule functions, ``stage_by_tma`` and ``store_by_tma``. The loop has no copies, no predicates at
ragged edges and no block barrier. ``diff steps/step10_wgmma.py steps/step11_tma_ring.py`` shows all of it.

Variants:

- boxes: as above. The default. Results whose rows are not multiples of 16 bytes are stored row by row.
- rows: TMA loads operands; results are stored row by row through shared memory, as in step 10.
- tma_store, direct: the explicit kernel of a ring with one mbarrier per stage (kernels/tma_ring.py), and results by TMA
  or from registers. Its operands' rows must be multiples of 16 bytes.
- bounded: a debug build of boxes: a wait of more than two seconds names block, thread, barrier and phase, and traps.

What to expect: only one thread spends instructions on loads. Small tiles gain least: that thread waits for an empty
stage, and its warpgroup waits with it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import Schedule

from tensorir_ladder.kernels.epilogue import untaken
from tensorir_ladder.kernels.tiles import RING_CHOICES, HopperTile
from tensorir_ladder.kernels.tma_ring import tma_ring
from tensorir_ladder.schedules.loops import bind_grid, pad_to_tile, raster_blocks
from tensorir_ladder.schedules.memory import align_operands, initialize_before, storable_by_tma, store_by_tma
from tensorir_ladder.schedules.pipeline import bound_waits, hide_reads
from tensorir_ladder.schedules.stamps import Stamps
from tensorir_ladder.schedules.tensor_cores import (
    accumulate_by_warpgroups,
    bind_warpgroups,
    instruction_for,
    multiply_by_wgmma,
    pipeline_warpgroups,
    spread_fragment,
    stage_by_tma,
    store_by_rows,
    tile_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import TileSet
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked
from tensorir_ladder.steps.step10_wgmma import TILES


@checked
def schedule(problem: Matmul, config: Config, *, tensorize: bool = True) -> Schedule:
    """Pipeline wgmma over a ring that TMA fills; ``tensorize=False`` leaves the multiplication as loops."""
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
    if config.variant != "rows" and storable_by_tma(sch, write_back, grid):
        store_by_tma(sch, write_back, grid)
    elif whole_tiles:
        store_by_rows(sch, write_back, grid, tile.threads)
    spread_fragment(sch, write_back, group, vectorize=True)
    for operand, run in enumerate(instruction.run_lengths):
        stage_by_tma(sch, block, operand, loops.k_outer, run)
    spread_fragment(sch, initialize_before(sch, block, loops.k_outer), group)
    hide_reads(sch, block)  # wgmma reads shared memory asynchronously
    enough = config.stages if config.k_tiles(problem) > config.stages else max(config.stages, 3)
    pipeline_warpgroups(sch, loops.k_outer, enough)
    if config.variant == "bounded":
        bound_waits(sch, loops.k_outer)
    if tensorize:
        multiply_by_wgmma(sch, loops, instruction)
    return sch


def schedule_for_cpu(problem: Matmul, config: Config) -> Schedule:
    """Make the same schedule with loops in the place of wgmma, which a CPU can run."""
    return schedule(problem, config, tensorize=False)


@checked
def kernel(problem: Matmul, config: Config, stamps: Stamps | None = None) -> tirx.PrimFunc:
    """Multiply by the explicit kernel of a ring of ``config.stages`` stages; with time stamps if asked for."""
    return tma_ring(problem, config.tile, config.stages, tma_store=config.variant != "direct", stamps=stamps)


KERNEL_TILES = TileSet.of(
    *RING_CHOICES,
    more=(
        HopperTile(block=(256, 128, 64), warpgroups=(2, 1)),
        HopperTile(block=(128, 256, 64), warpgroups=(1, 2)),
        HopperTile(block=(128, 128, 128), warpgroups=(2, 1)),
        HopperTile(block=(128, 192, 64), warpgroups=(2, 1)),
        HopperTile(block=(64, 256, 64), warpgroups=(1, 1)),
    ),
)
STEP = Step(
    number=11,
    topic="tma_ring",
    text=__doc__,
    schedule=schedule,
    schedule_for_cpu=schedule_for_cpu,
    stamped=True,
    tiles=TILES,
    stages=4,
    tuning_stages=(3, 4, 5, 6),
    pipelined=True,
    refuses=untaken,
    variants=(
        Variant("boxes", dtypes=HALVES, fewest_stages=3),
        Variant("rows", dtypes=HALVES, fewest_stages=3),
        Variant("tma_store", dtypes=HALVES, kernel=kernel, tiles=KERNEL_TILES, modelled=True),
        Variant("direct", dtypes=HALVES, kernel=kernel, tiles=KERNEL_TILES, modelled=True),
        Variant("bounded", dtypes=HALVES, fewest_stages=3, debug=True),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
