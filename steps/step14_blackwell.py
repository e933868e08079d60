"""Step 14, Blackwell: one thread multiplies, and the sums are in tensor memory.

**Compiled for sm_100a, never run**: no such GPU was at hand, and no emulator has executed its code. Its instructions,
descriptors and resources are checked, and a test's model steps through its barriers; results and speed are not known.

Before (step 11), the sums of a tile filled the registers of the warps that multiply, each of which issued its part and
met the others once per k tile. Blackwell's *tcgen05.mma* is one thread's instruction, for all 128 rows of the block; it
adds to tensor memory, 512 columns of 128 lanes that a block allocates, and tells an mbarrier when it is through. So
the loop needs no block barrier: one thread keeps loads and multiplications going, and each stage of the ring has two
mbarriers, full and free (kernels/tcgen05_ring.py)::

    allocate tensor memory;  fill all stages but the last
    for turn:                                          # of the ring; one phase bit, which flips with it
      for stage < stages:                              # one thread, written out: stage numbers are constants
        wait until the stage is full
        issue tcgen05.mma of tile k; commit to the stage's "free"
        wait until the stage of tile k − 1 is free
        fill it with tile k + stages − 1
    commit to "done";  all wait for it
    tensor memory → registers → swizzled shared memory, where the ring was → TMA store

What changes: no sums in registers, hence tiles of 128 × 256 with room to spare; no barrier of the block in the loop;
descriptors of another format; results a row to a thread. One stage runs the loop without a pipeline.
Variants:
- ring (the default): one thread loads and multiplies.
- warp_specialized: a warp loads and another multiplies, so that neither waits for what only the other needs.
- bounded: ring as a debug build: a wait of more than two seconds says who waits for what, and traps.
Operands' rows must be multiples of 16 bytes, or they are refused: step 9 takes them. Results in float32, or in rows
that TMA cannot store, leave from registers.
What to expect: on machines without an sm_100a this step is compiled and says so; it is neither verified nor measured.
"""

from __future__ import annotations

from tvm import tirx

from tensorir_ladder.kernels.blackwell import BlackwellTile
from tensorir_ladder.kernels.epilogue import untaken
from tensorir_ladder.kernels.tcgen05_ring import tcgen05_ring
from tensorir_ladder.schedules.tiles import Choice, TileSet
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked


@checked
def kernel(problem: Matmul, config: Config) -> tirx.PrimFunc:
    """Multiply by a ring of ``config.stages`` stages."""
    choices = {"specialized": config.variant == "warp_specialized", "bounded": config.variant == "bounded"}
    return tcgen05_ring(problem, config.tile, config.stages, **choices)


# Nothing of this family has been measured: the order is Hopper's.
TILES = TileSet.of(
    Choice(BlackwellTile(block=(128, 256, 64)), stages=4),
    Choice(BlackwellTile(block=(128, 128, 64)), stages=6),
    Choice(BlackwellTile(block=(128, 64, 64)), stages=6),
    more=(BlackwellTile(block=(128, 192, 64)), BlackwellTile(block=(128, 128, 128))),
)
STEP = Step(
    number=14,
    topic="blackwell",
    text=__doc__,
    kernel=kernel,
    tiles=TILES,
    stages=4,
    tuning_stages=(3, 4, 5, 6),
    pipelined=True,
    arch=BlackwellTile.ARCH,
    never_run=True,
    refuses=untaken,
    variants=(
        Variant("ring", dtypes=HALVES),
        Variant("warp_specialized", dtypes=HALVES),
        Variant("bounded", dtypes=HALVES, debug=True),
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
