"""Step 13, persistent blocks: store one tile's results while computing the next.

Before, each block had one tile: it began with an empty ring, and the tensor cores waited while results were rounded and
stored. Now there are as many blocks as run at once, and each goes through its share of the work
(kernels/persistent.py)::

    producer:  fill stages with the k tiles of all pieces, one after the other   # runs on into the next piece
    consumer:  for each piece:
                 for its first k tiles:  issue wgmma;  store a box of the last piece's results;  retire
                 for the others:         issue wgmma;  retire the one before
                 round the results into half as many registers, which frees the sums'

What changes: one ring for all tiles; results wait as 16-bit pairs in registers until the tensor cores have work again.
Where tiles are no multiple of the blocks, the last wave is cut (stream-K): blocks without a tile multiply the first
k tiles for those that have one, and leave their sums in device memory.
Variants:
- stream (the default): as above; the last wave is cut where that is reckoned to pay (kernels/stream_k.py).
- overlapped: blocks are launched while the kernel before in the stream still runs, and wait by themselves for its end
  (programmatic dependent launch): a launch's latency is hidden, where another kernel was launched before. What loops
  need is held in registers, and an operand that is loaded once leaves the L2 cache first.
- whole: tiles are never cut.
- multicast: clusters of two blocks, one above the other; each loads half of their B tile, for both. Where a B tile is
  one panel, which cannot be halved, the same as stream. Stream does so itself with rows that straddle cache lines,
  each piece of which is read from two. A tile with a third field (128x208x64/2x1/1x2) says the pair itself: of any
  width, below each other (2x1) or beside (1x2, which share rows of A), each loading every other k tile for both.
- bounded: a debug build: a wait of more than two seconds names block, thread, role, barrier and phase, and traps.
Sums that helpers add are rounded differently from one sum. Rows that are no multiples of 16 bytes are refused.
What to expect: large products gain what the last wave and the epilogues took, small ones little.
This step is a kernel, not a schedule: in a loop nest, a tile's results are stored before the next tile is multiplied.
``stay_resident`` makes the blocks of step 12's schedule persistent, so that the next tile is loaded while results are
stored. On an H200 (128x256x64, 3 stages, fp16) it is 1.02 times as fast as step 12 at 4096³ and 1.13 times at
8192x8192x512, and reaches 0.96 and 0.80 of this kernel's speed with 4 stages.
It runs on an sm_90a only: without one its generated CUDA is verified by the emulator (emulator/).
"""

from __future__ import annotations

from tvm import tirx

from tensorir_ladder.kernels.epilogue import untaken
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import cluster_blocks, persistent
from tensorir_ladder.kernels.roles import FEWEST_STAGES
from tensorir_ladder.kernels.stream_k import cut_role_cost
from tensorir_ladder.kernels.tiles import ROLE_CHOICES
from tensorir_ladder.kernels.tma import straddles_lines
from tensorir_ladder.schedules.stamps import Stamps
from tensorir_ladder.schedules.tiles import TileSet
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Step, Variant, checked
from tensorir_ladder.steps.step12_warp_specialization import MORE_TILES


@checked
def kernel(problem: Matmul, config: Config, stamps: Stamps | None = None) -> tirx.PrimFunc:
    """Multiply by persistent blocks, and a ring of ``config.stages`` stages; with time stamps if asked for."""
    variant, shared = config.variant, config.variant == "multicast" or straddles_lines(problem)
    # The next kernel begins at once, as it was recorded.
    form = KernelForm(
        overlapped=variant == "overlapped", next_at_once=True, bounded=variant == "bounded", stamps=stamps
    )
    return persistent(
        problem,
        config.tile,
        config.stages,
        form,
        machine=config.machine,
        blocks=cluster_blocks(problem, config.tile, shared),
        stream_k=variant != "whole",
    )


STEP = Step(
    number=13,
    topic="persistent",
    text=__doc__,
    kernel=kernel,
    stamped=True,
    tiles=TileSet.of(*ROLE_CHOICES, more=MORE_TILES, cost=cut_role_cost),
    stages=4,
    tuning_stages=(3, 4, 6, 8),
    pipelined=True,
    refuses=untaken,
    variants=tuple(
        Variant(name, dtypes=HALVES, fewest_stages=FEWEST_STAGES, debug=name == "bounded")
        for name in ("stream", "overlapped", "whole", "multicast", "bounded")
    ),
)


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
