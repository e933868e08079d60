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

What to expect: the first of these kernels that is held back by multiply-adds rather than by their operands; most in
large products. Small ones gain by slices. Operands are float32; 16-bit ones are for tensor cores, in step 8.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.loops.unrolling import unroll_loop
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.memory.alignment import align_operands
from tensorir_ladder.schedules.pipeline.pipelining import pipeline_loop, pipeline_reads
from tensorir_ladder.schedules.recipes.warp_tiling import stage_for_warps
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.config import WARP_TILES, StepConfig

FORMS = {
    "serpentine": {},
    "row_order": {"serpentine": False},
    "unpadded": {"pad": False},
    "no_raster": {"raster": 1},
    "in_turn": {},
}
VARIANTS = tuple(FORMS)
NEEDS_ASYNC_COPY = VARIANTS
PIPELINED = True
TILES = WARP_TILES
STAGES = 3
TUNING_STAGES = (2, 3, 4)
DTYPES = dict.fromkeys(VARIANTS, ("float32",))


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """A product by warps, its ring filled by cp.async, with one barrier per k tile."""
    sch = Schedule(problem.prim_func())
    align_operands(sch, sch.get_sblock("matmul"), config.tile.block)
    slots = min(config.stages, config.k_tiles(problem))
    scope = config.tile.shared_scope(dtype_bytes(problem.dtype), slots)
    staged = stage_for_warps(sch, sch.get_sblock("matmul"), config.tile, scope=scope, **FORMS[config.variant])
    wanted = config.tile.steps_ahead > 0 and config.variant != "in_turn"
    ahead = wanted and pipeline_reads(sch, staged.k_inner, slots)
    unroll_loop(sch, staged.k_inner)
    pipeline_loop(sch, staged.k_outer, slots, slots > 1, one_barrier=slots > 1, fill_ahead=ahead)
    return sch


if __name__ == "__main__":
    from tensorir_ladder.harness.cli import run_step

    run_step(__file__)
