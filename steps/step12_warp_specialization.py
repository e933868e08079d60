"""Step 12, warp specialization: a producer warp loads, consumer warpgroups multiply.

In step 11 one thread of a multiplying warpgroup also waited for an empty stage and loaded it. Its warpgroup waited
with it, since four warps issue a wgmma together. Now a *producer* warp only loads, and *consumer* warpgroups only
multiply. Each stage has two mbarriers: *full* counts bytes, *empty* counts the consumer warps that have read it::

    producer, one thread:                      each consumer warpgroup:
      for each k tile:                           for each k tile:
        wait until its stage is empty              wait until its stage is full
        load it                                    issue wgmma of it                    # returns at once
                                                   wait until wgmma of the k tile before is done
                                                   say that one's stage is empty

What changes: one schedule function, ``bring_by_own_warp``. The producer runs ahead as far as there are stages.

Variants:

- own_warp: as above. The default.
- early: the same, with early launch (PDL): it starts while the previous kernel in the stream still runs.
- roles: the explicit kernel that products of torch tensors choose (kernels/warp_specialized.py): its producer is a
  whole warpgroup, which gives registers back to the block (setmaxnreg) for the consumers to take.
- bounded: a debug build of own_warp: a wait of more than two seconds names block, thread, role, barrier and phase, and
  traps.

The explicit kernel takes tiles of more fields. With a cluster as the third (64x72x64/1x1/4x2) its blocks, 4 down and 2
across, load for each other what they share, by TMA multicast: rows of A for those beside each other, columns of B for
those below each other. With a fourth (64x88x64/1x1/1x1/7) each block of a cluster has a part of the reduction, and adds
up and stores a share of the results (kernels/cluster_sums.py). A number as the third field (16x64x64/1x1/4) exchanges
the operands, Cᵀ = Bᵀ · Aᵀ, for products of few rows: B's columns are then the instruction's 64 rows, and each part of
the reduction is a block of a cluster (kernels/swapped.py). With a fourth (72x64x64/1x1/1/2x4) these tiles have such
clusters, too. Its operands' rows must be multiples of 16 bytes.

What to expect: the tensor cores hardly ever wait in the loop. The first load and the epilogue remain.
"""

from __future__ import annotations

from tvm import tirx
from tvm.s_tir import Schedule

from tensorir_ladder.kernels.epilogue import untaken
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.roles import FEWEST_STAGES
from tensorir_ladder.kernels.stream_k import role_cost
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import ROLE_CHOICES, RoleTile
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.loops import bind_grid, launch_early, pad_to_tile, raster_blocks
from tensorir_ladder.schedules.memory import align_operands, initialize_before, storable_by_tma, store_by_tma
from tensorir_ladder.schedules.pipeline import bound_waits, bring_by_own_warp, hide_reads
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
    """Let a producer warp fill step 11's ring; ``tensorize=False`` leaves the multiplication as loops."""
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
    if storable_by_tma(sch, write_back, grid):
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
    bring_by_own_warp(sch, loops.k_outer)
    if config.variant == "early":
        launch_early(sch)
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
    """Multiply by the explicit kernel of warpgroups with roles, on ``config.stages`` stages; stamped if asked."""
    make = swapped if config.tile.swapped else warp_specialized
    return make(problem, config.tile, config.stages, KernelForm(stamps=stamps))


MORE_TILES = (
    RoleTile(block=(256, 128, 64), warpgroups=(2, 1)),
    RoleTile(block=(128, 64, 64), warpgroups=(2, 1)),
    RoleTile(block=(64, 256, 64), warpgroups=(1, 1)),
    RoleTile(block=(128, 192, 64), warpgroups=(2, 1)),
)
WIDE_TILES = (RoleTile(block=(256, 192, 64), warpgroups=(2, 1)), RoleTile(block=(256, 160, 64), warpgroups=(2, 1)))
KERNEL_TILES = TileSet.of(*ROLE_CHOICES, more=(*MORE_TILES, *WIDE_TILES), cost=role_cost)
STEP = Step(
    number=12,
    topic="warp_specialization",
    text=__doc__,
    schedule=schedule,
    schedule_for_cpu=schedule_for_cpu,
    stamped=True,
    tiles=TILES,
    stages=4,
    tuning_stages=(3, 4, 6, 8),
    pipelined=True,
    refuses=untaken,
    variants=(
        Variant("own_warp", dtypes=HALVES, fewest_stages=3),
        Variant("early", dtypes=HALVES, fewest_stages=3),
        Variant("roles", kernel=kernel, tiles=KERNEL_TILES, tuned=True, dtypes=HALVES, fewest_stages=FEWEST_STAGES),
        Variant("bounded", dtypes=HALVES, fewest_stages=3, debug=True),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
