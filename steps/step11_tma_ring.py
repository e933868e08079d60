"""Step 11, TMA ring: one thread asks for whole tiles, and a barrier in memory counts their bytes.

Before, all threads of a block copied its tiles, 16 bytes each at a time: addresses, predicates and waits in every
thread, and a block barrier to tell all that all had waited. Hopper's tensor memory accelerator takes one instruction
of one thread for a box of up to 256 × 64 elements, swizzles it as wgmma reads it, fills what lies beyond the matrix
with zeros, and reports the bytes to an *mbarrier*. A schedule has no words for that: this is an explicit kernel in
TIRx (kernels/tma_ring.py)::

    fill all stages but the last                       # one thread; each stage's mbarrier expects their bytes
    for turn:                                          # of the ring; one phase bit, which flips with it
      for stage < stages:                              # written out: stage numbers are constants
        wait for the stage's mbarrier
        issue wgmma of tile k                          # returns at once
        wait until wgmma of tile k − 1 is done;  barrier
        fill the stage of tile k − 1 with tile k + stages − 1
    results → swizzled shared memory, where the ring was → TMA store

What changes: no copy loop, no predicates at ragged edges, registers for sums alone. One stage runs too, as the same
kernel without a pipeline: load and multiplication take turns.
Variants:
- tma_store (the default): results leave by TMA where it can store them: in 16 bits, in rows of multiples of 16 bytes.
- direct: each thread stores its own sums; so do other outputs in either variant.
- bounded: a debug build: a wait of more than two seconds names block, thread, role, barrier and phase, and traps.
Operands' rows must be multiples of 16 bytes, or they are refused: step 10 takes them.
What to expect: the multiplying threads spend nothing on loads; all of them still meet once per k tile.
It runs on an sm_90a only: without one its generated CUDA is verified by the emulator (emulator/).
"""

from __future__ import annotations

from tvm import tirx

from tensorir_ladder.kernels.epilogue import untaken
from tensorir_ladder.kernels.stamps import Stamps
from tensorir_ladder.kernels.tiles import RING_CHOICES, HopperTile
from tensorir_ladder.kernels.tma_ring import tma_ring
from tensorir_ladder.schedules.tiles import TileSet
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked


@checked
def kernel(problem: Matmul, config: Config, stamps: Stamps | None = None) -> tirx.PrimFunc:
    """Multiply by a ring of ``config.stages`` stages; with time stamps if asked for."""
    tma_store, bounded = config.variant != "direct", config.variant == "bounded"
    return tma_ring(problem, config.tile, config.stages, tma_store=tma_store, bounded=bounded, stamps=stamps)


# Step 10's block tiles in the same order, and their warpgroups.
TILES = TileSet.of(
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
    kernel=kernel,
    stamped=True,
    tiles=TILES,
    stages=4,
    tuning_stages=(3, 4, 5, 6),
    pipelined=True,
    refuses=untaken,
    variants=(
        Variant("tma_store", dtypes=HALVES, modelled=True),
        Variant("direct", dtypes=HALVES, modelled=True),
        Variant("bounded", dtypes=HALVES, debug=True),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
