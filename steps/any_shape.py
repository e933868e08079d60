"""Forms for products of any shape: what steps 7 and 10 offer off the squares, and the tiles to choose among.

A step's own form shows one idea. These forms add what ragged, skinny and unaligned products need: they call the
compositions that :mod:`schedules.recipes` has for anyone's contraction, and the cost model plans parts, copies in front
and clusters. Steps list them as variants, so that ``bench``, calibration and ``choose_step`` find them by name:

- fitted (step 7): :func:`schedules.recipes.multiply_by_warps`.
- fitted (step 10): :func:`schedules.recipes.multiply_by_warpgroups`, operands copied by cp.async.
- boxes (step 10): the same with operands brought by TMA, and operands swapped where that fits better.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.s_tir import Schedule

from tensorir_ladder.schedules.cost import (
    Planned,
    box_cycles,
    box_parts,
    cheapest_plan,
    plan_by_boxes,
    plan_by_warpgroups,
    plan_by_warps,
    warp_cycles,
    warp_parts,
    wgmma_cycles,
    wgmma_parts,
)
from tensorir_ladder.schedules.isa import PANEL, SHARED_KIB, WGMMA_ROWS, WGMMA_WIDTHS, WIDEST
from tensorir_ladder.schedules.left_over import left_over
from tensorir_ladder.schedules.recipes import multiply_by_warpgroups, multiply_by_warps
from tensorir_ladder.schedules.tiles import SHORT_RING, Choice, SwappedWarpgroupTile, TileSet, WarpgroupTile, WarpTile
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


# Threads with 8x8 outputs are the fastest off the squares, with 4x4 for the smallest products: more of them are
# resident, they have registers for addresses of single elements, and a short reduction ends before the code of 8x16
# outputs has been fetched. Small blocks with few stages waste least of the last wave, tiles of 32 columns fit few
# columns, and k tiles of 16 fit short reductions. Chosen by times of 260 drawn shapes on an H200.
WARP_TILES = TileSet.of(
    Choice(WarpTile(block=(64, 128, 16), warp=(32, 64), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(64, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(128, 128, 16), warp=(32, 64), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(128, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=3),
    Choice(WarpTile(block=(64, 64, 16), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 64, 16), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 128, 32), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 128, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(128, 96, 32), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(32, 64, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(64, 32, 32), warp=(64, 32), thread=(8, 8), slices=4), stages=3),
    Choice(WarpTile(block=(128, 32, 32), warp=(64, 32), thread=(8, 8), slices=4), stages=2),
    Choice(WarpTile(block=(128, 32, 32), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(128, 32, 16), warp=(64, 32), thread=(8, 8), slices=2), stages=2),
    Choice(WarpTile(block=(256, 64, 16), warp=(64, 32), thread=(8, 8)), stages=3),
    Choice(WarpTile(block=(32, 64, 64), warp=(32, 64), thread=(8, 8), slices=8), stages=3),
    Choice(WarpTile(block=(16, 32, 64), warp=(16, 32), thread=(4, 4), slices=8), stages=3),
    cost=warp_cycles,
    parts=warp_parts,
    plan=plan_by_warps,
    left_over=left_over,
    plans_again=True,
    launched_early=True,
)


def _choices(listed: tuple[tuple[int, str], ...]) -> tuple[Choice, ...]:
    """Read choices from lists of tiles, each with its stages."""
    return tuple(Choice(WarpgroupTile.parse(tile), stages) for stages, tiles in listed for tile in tiles.split())


# Step 10's tiles, three more, and widths between these, which waste less of the last wave or of which several blocks
# are resident. Left out are those whose last panel has 48 columns (112, 176, 240): they took 1.07 times as long as the
# cost model says (91 kernels on an H200).
USUAL = _choices(
    (
        (4, "128x256x64/2x1"),
        (6, "64x128x64/1x1 64x64x64/1x1 128x128x64/2x1"),
        (4, "128x192x64/2x1 192x128x64/3x1 256x128x64/4x1"),
        (5, "64x256x64/1x1"),
        (6, "64x192x64/1x1 128x64x64/2x1"),
    )
)
BETWEEN = _choices(
    (
        (6, "64x80x64/1x1 64x96x64/1x1 128x80x64/2x1 128x96x64/2x1"),
        (5, "128x144x64/2x1 128x160x64/2x1"),
        (4, "128x208x64/2x1 192x144x64/3x1 192x192x64/3x1 256x96x64/4x1"),
        (4, "64x64x64/1x1 64x80x64/1x1 64x96x64/1x1 64x128x64/1x1 128x64x64/2x1"),
        (3, "64x192x64/1x1 128x96x64/2x1 128x128x64/2x1"),
    )
)
WARPGROUP_TILES = TileSet.of(
    *USUAL,
    *BETWEEN,
    cost=wgmma_cycles,
    parts=wgmma_parts,
    plan=plan_by_warpgroups,
    left_over=left_over,
    launched_early=True,
)
LONGEST_RING = 12
WIDEST_OF_FOUR = 160  # columns of an instruction whose sums leave four warpgroups registers for addresses


def any_width() -> Iterator[Choice]:
    """List tiles of up to four warpgroups side by side, whose instructions have any width that their registers hold.

    The width is along n or, with operands swapped, along m. Each tile comes with the longest ring that an H100 holds,
    and with one so short that two blocks may be resident.
    """
    for groups in (1, 2, 3, 4):
        widest = WIDEST if groups < 4 else WIDEST_OF_FOUR
        for width in range(16, widest + 1, WGMMA_WIDTHS):
            across = WarpgroupTile(block=(WGMMA_ROWS * groups, width, PANEL), warpgroups=(groups, 1))
            swapped = SwappedWarpgroupTile(block=(width, WGMMA_ROWS * groups, PANEL), warpgroups=(1, groups))
            for tile in (across, swapped) if width >= PANEL else (swapped,):
                longest = min(LONGEST_RING, (SHARED_KIB[90] << 10) // tile.smem_bytes(itemsize=2))
                yield from (Choice(tile, stages) for stages in {longest, SHORT_RING})


BOX_TILES = TileSet.of(
    USUAL[0],
    *any_width(),
    cost=box_cycles,
    parts=box_parts,
    plan=plan_by_boxes,
    left_over=left_over,
    launched_early=True,
)


def _planned(tiles: TileSet, problem: Matmul, config: Config) -> Planned:
    """Return what the cost model plans for a product."""
    return cheapest_plan(tiles, Choice(config.tile, config.stages), problem, config.machine, split=True)


def _unlike_serpentine(problem: Matmul, config: Config) -> bool:
    """Tell whether a product by warps is computed otherwise than by step 7's default with the same tile."""
    planned = _planned(WARP_TILES, problem, config)
    whole = planned.parts == 1 and planned.copied == (True, True)
    return config.is_ragged(problem) or problem.layout == "nt" or not whole


def _unlike_rows(problem: Matmul, config: Config) -> bool:
    """Tell whether a product by warpgroups is computed otherwise than by step 10's default with the same tile."""
    return config.is_ragged(problem) or _planned(WARPGROUP_TILES, problem, config).parts > 1


BY_WARPS = (
    Variant(
        "fitted",
        dtypes=("float32",),
        schedule=by_warps,
        needs_async_copy=True,
        splits_k=True,
        tiles=WARP_TILES,
        fits=_unlike_serpentine,
    ),
)
BY_WARPGROUPS = tuple(
    Variant(
        name,
        dtypes=HALVES,
        schedule=by_warpgroups,
        needs_async_copy=True,
        fewest_stages=3,
        splits_k=True,
        tiles=tiles,
        fits=fits,
    )
    for name, tiles, fits in (
        ("fitted", WARPGROUP_TILES, _unlike_rows),
        ("boxes", BOX_TILES, lambda problem, config: True),
    )
)
