"""Products scheduled by warps, and small tiles for them."""

from __future__ import annotations

import warnings
from dataclasses import replace

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.recipes import WarpContraction, stage_for_warps
from tensorir_ladder.schedules.tiles import WarpTile

SMALL = WarpTile(block=(16, 32, 16), warp=(16, 32), thread=(4, 4))


SLICED = {slices: replace(SMALL, slices=slices) for slices in (1, 2, 4)} | {
    8: WarpTile(block=(32, 64, 16), warp=(32, 64), thread=(8, 8), slices=8)
}


AHEAD = WarpTile(block=(32, 128, 8), warp=(32, 128), thread=(8, 16))  # reads a step ahead


def staged(sch: Schedule, tile: WarpTile = SMALL, stages: int = 2, name: str = "matmul", **form) -> WarpContraction:
    """A contraction by warps, pipelined."""
    contraction = stage_for_warps(sch, sch.get_sblock(name), tile, scope=tile.shared_scope(4, stages), **form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more stages than k tiles
        pipeline_loop(sch, contraction.k_outer, stages, "auto")
    return contraction
