"""Forms for products of any shape: what steps 7 and 10 offer off the squares, and the tiles to choose among.

A step's own form shows one idea. These forms add what ragged, skinny and unaligned products need: they call the
compositions that :mod:`schedules.recipes` has for anyone's contraction, and the cost model plans parts, copies in front
and clusters. Steps list them as variants, so that ``bench``, calibration and ``choose_step`` find them by name:

- fitted (step 7): :func:`schedules.recipes.multiply_by_warps`.
- fitted (step 10): :func:`schedules.recipes.multiply_by_warpgroups`, operands copied by cp.async.
- boxes (step 10): the same with operands loaded and results stored by TMA, operands swapped where that fits better.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.isa import PANEL, SHARED_KIB, WGMMA_ROWS, WGMMA_WIDTHS, WIDEST
from tensorir_ladder.schedules.recipes import WARP_TILES, multiply_by_warpgroups, multiply_by_warps
from tensorir_ladder.schedules.tiles import Choice, SwappedWarpgroupTile, TileSet, WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import HALVES, Config, Variant


def by_warps(problem: Matmul, config: Config, planned: Planned) -> Schedule:
    """Multiply by warps on ordinary cores, as ``planned``."""
    sch = Schedule(problem.prim_func())
    multiply_by_warps(sch, sch.get_sblock("matmul"), config.tile, config.stages, planned, config.machine)
    return sch


def by_warpgroups(problem: Matmul, config: Config, planned: Planned, *, tensorize: bool = True) -> Schedule:
    """Multiply by warpgroups, as ``planned``; ``tensorize=False`` leaves the multiplication as loops."""
    sch = Schedule(problem.prim_func())
    block = sch.get_sblock("matmul")
    multiply_by_warpgroups(sch, block, config.tile, config.stages, planned, tensorize=tensorize)
    return sch


# Step 10's tiles, and three more.
WARPGROUP_TILES = TileSet.of(
    Choice(WarpgroupTile(block=(128, 256, 64), warpgroups=(2, 1)), stages=4),
    Choice(WarpgroupTile(block=(64, 128, 64), warpgroups=(1, 1)), stages=6),
    Choice(WarpgroupTile(block=(64, 64, 64), warpgroups=(1, 1)), stages=6),
    Choice(WarpgroupTile(block=(128, 128, 64), warpgroups=(2, 1)), stages=6),
    Choice(WarpgroupTile(block=(128, 192, 64), warpgroups=(2, 1)), stages=4),
    Choice(WarpgroupTile(block=(192, 128, 64), warpgroups=(3, 1)), stages=4),
    Choice(WarpgroupTile(block=(256, 128, 64), warpgroups=(4, 1)), stages=4),
    Choice(WarpgroupTile(block=(64, 256, 64), warpgroups=(1, 1)), stages=5),
    Choice(WarpgroupTile(block=(64, 192, 64), warpgroups=(1, 1)), stages=6),
    Choice(WarpgroupTile(block=(128, 64, 64), warpgroups=(2, 1)), stages=6),
    formula="warpgroups",
)
LONGEST_RING = 12


def any_width() -> Iterator[Choice]:
    """List tiles of up to three warpgroups side by side, whose instructions have any width that their registers hold.

    The width is along n or, with operands swapped, along m. Each tile comes with the longest ring that an H100 holds.
    These and WARPGROUP_TILES hold 0.997 of the fastest of 364 that 368 drawn shapes were timed with on an H200: those
    were rings of which two blocks may be resident, four warpgroups, and widths between without TMA as well.
    """
    for groups in (1, 2, 3):
        for width in range(16, WIDEST + 1, WGMMA_WIDTHS):
            across = WarpgroupTile(block=(WGMMA_ROWS * groups, width, PANEL), warpgroups=(groups, 1))
            swapped = SwappedWarpgroupTile(block=(width, WGMMA_ROWS * groups, PANEL), warpgroups=(1, groups))
            for tile in (across, swapped) if width >= PANEL else (swapped,):
                yield Choice(tile, min(LONGEST_RING, (SHARED_KIB[90] << 10) // tile.smem_bytes(itemsize=2)))


BOX_TILES = TileSet.of(WARPGROUP_TILES.default, *any_width(), formula="boxes")


BY_WARPS = (Variant("fitted", dtypes=("float32",), schedule=by_warps, needs_async_copy=True, tiles=WARP_TILES),)
BY_WARPGROUPS = tuple(
    Variant(name, dtypes=HALVES, schedule=by_warpgroups, needs_async_copy=True, fewest_stages=3, tiles=tiles)
    for name, tiles in (("fitted", WARPGROUP_TILES), ("boxes", BOX_TILES))
)
