"""Step 12, warp specialization: one warpgroup loads, the others multiply, and nobody waits for a block barrier.

Before, a thread that multiplies also loaded, and all threads met once per k tile, so that none would fill a stage that
another still read. Now a *producer* warpgroup does nothing but ask for tiles, and *consumer* warpgroups nothing but
multiply. Each stage has two mbarriers: *full* counts bytes, *empty* consumers' warps (kernels/warp_specialized.py)::

    producer, one thread:                      each consumer warpgroup:
      for each k tile:                           for each k tile:
        wait until its stage is empty              wait until its stage is full
        load it                                    issue wgmma of it                    # returns at once
                                                   wait until wgmma of the k tile before is done
                                                   say that one's stage is empty

What changes: the producer runs ahead as far as there are stages, whatever the consumers do; it gives its registers back
to the block (setmaxnreg), and the consumers take them.
Variants:
- roles (the default).
- bounded: a debug build: a wait of more than two seconds names block, thread, role, barrier and phase, and traps.
A tile with a cluster as its third field (64x72x64/1x1/4x2) has its blocks, 4 down and 2 across, load for each other
what they share, by TMA multicast: rows of A for those beside each other, columns of B for those below each other. With
a fourth field (64x88x64/1x1/1x1/7) each block of a cluster has a part of the reduction, and adds up and stores a share
of the results (kernels/cluster_sums.py).
A number as the third field (16x64x64/1x1/4) exchanges the operands, Cᵀ = Bᵀ · Aᵀ, for products of few rows: B's columns
are then the instruction's 64 rows, and each part of the reduction is a block of a cluster (kernels/swapped.py). With a
fourth (72x64x64/1x1/1/2x4) these tiles have such clusters, too.
At least two stages, since a consumer keeps one k tile's wgmma in flight. Rows that are no multiples of 16 bytes are
refused, as in step 11.
What to expect: the tensor cores hardly ever wait in the loop; what is left is before it and behind it.
It runs on an sm_90a only: without one its generated CUDA is verified by the emulator (emulator/).
"""

from __future__ import annotations

from tvm import tirx

from tensorir_ladder.kernels.epilogue import untaken
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.roles import FEWEST_STAGES
from tensorir_ladder.kernels.stamps import Stamps
from tensorir_ladder.kernels.stream_k import role_cost
from tensorir_ladder.kernels.swapped import swapped
from tensorir_ladder.kernels.tiles import ROLE_CHOICES, RoleTile
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.tiles import TileSet
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked


@checked
def kernel(problem: Matmul, config: Config, stamps: Stamps | None = None) -> tirx.PrimFunc:
    """Multiply by warpgroups with roles, and a ring of ``config.stages`` stages; with time stamps if asked for."""
    make = swapped if config.tile.swapped else warp_specialized
    return make(problem, config.tile, config.stages, KernelForm(bounded=config.variant == "bounded", stamps=stamps))


MORE_TILES = (
    RoleTile(block=(256, 128, 64), warpgroups=(2, 1)),
    RoleTile(block=(128, 64, 64), warpgroups=(2, 1)),
    RoleTile(block=(64, 256, 64), warpgroups=(1, 1)),
    RoleTile(block=(128, 192, 64), warpgroups=(2, 1)),
)
WIDE_TILES = (RoleTile(block=(256, 192, 64), warpgroups=(2, 1)), RoleTile(block=(256, 160, 64), warpgroups=(2, 1)))
STEP = Step(
    number=12,
    topic="warp_specialization",
    text=__doc__,
    kernel=kernel,
    stamped=True,
    tiles=TileSet.of(*ROLE_CHOICES, more=(*MORE_TILES, *WIDE_TILES), cost=role_cost),
    stages=4,
    tuning_stages=(3, 4, 6, 8),
    pipelined=True,
    refuses=untaken,
    variants=(
        Variant("roles", dtypes=HALVES, fewest_stages=FEWEST_STAGES),
        Variant("bounded", dtypes=HALVES, fewest_stages=FEWEST_STAGES, debug=True),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
