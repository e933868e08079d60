"""Step 7, warp tiling: lanes interleaved, multiply-adds in an order that spares the register file.

Before, a thread's rows and columns lay side by side, so that the lanes of a warp read shared memory at a stride and
met in its banks, and the order of multiply-adds was the compiler's. Now warps have tiles of their own, and their
lanes take rows and columns in turn, columns four at a time::

    for k_outer:
      A_shared = A[tile];  B_shared = B[tile]                        # cp.async into a ring, one barrier per k tile
      for k_inner < block_k / slices:                                # written out
        A_reg = A_shared[rows of the lane];  B_reg = B_shared[columns of the lane]
        for row: for column, there and back:  C_reg += A_reg * B_reg     # each shares an operand with the one before

What changes: loads of a warp's operands without bank conflicts, fewer reads of the register file per multiply-add,
and `slices`: several groups of warps that sum parts of each k tile, for products with few outputs. Variants:

- serpentine: all of it, rows of a tile padded and neighbouring blocks on the same rows. The default.
- row_order: the multiply-adds row by row, which leaves their order to the compiler.
- unpadded: rows of shared memory without padding.
- no_raster: blocks in the order of the grid.

What to expect: float32 near the peak of the arithmetic units where outputs are many; larger thread tiles than before.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from schedules.pipelining import pipeline_loop
from schedules.unrolling import unroll_loop
from schedules.vectorization import dtype_bytes
from schedules.warp_tiling import stage_for_warps
from schedules.workloads import Matmul
from steps.config import WARP_TILES, StepConfig

FORMS = {
    "serpentine": {},
    "row_order": {"serpentine": False},
    "unpadded": {"pad": False},
    "no_raster": {"raster": 1},
}
VARIANTS = tuple(FORMS)
NEEDS_ASYNC_COPY = VARIANTS
PIPELINED = True
TILES = WARP_TILES
STAGES = 2
DTYPES = dict.fromkeys(VARIANTS, ("float32",))


def schedule(problem: Matmul, config: StepConfig) -> Schedule:
    """A product by warps, its ring filled by cp.async, with one barrier per k tile."""
    sch = Schedule(problem.prim_func())
    slots = min(config.stages, config.k_tiles(problem))
    scope = config.tile.shared_scope(dtype_bytes(problem.dtype), slots)
    staged = stage_for_warps(sch, sch.get_sblock("matmul"), config.tile, scope=scope, **FORMS[config.variant])
    unroll_loop(sch, staged.k_inner)
    pipeline_loop(sch, staged.k_outer, slots, slots > 1, one_barrier=slots > 1)
    return sch


if __name__ == "__main__":
    from harness.cli import run_step

    run_step(__file__)
