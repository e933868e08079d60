"""Step 7, warp tiling: lanes interleaved, multiply-adds in an order that spares the register file."""

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
