"""Tiles drawn at random, of any size that their family can express within reason: far beyond what steps tune over.

A tile is drawn from its parts upwards (a thread's outputs, threads, warps), so that most divide as they must; now and
then one of its numbers is made one that may not fit. Whatever breaks a limit of the machine is for the step to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensorir_ladder.kernels.tiles import ClusterTile, HopperTile, RoleTile, SwappedTile
from tensorir_ladder.schedules import isa
from tensorir_ladder.schedules.tiles import (
    FLOATS,
    BlockTile,
    SwappedWarpgroupTile,
    TensorCoreTile,
    ThreadTile,
    WarpgroupTile,
    WarpTile,
)

Choose = Callable[[Sequence[Any]], Any]
ODD_ONE_OUT = 8  # one tile of so many has a number that was not made to fit


def draw_tile(choose: Choose, kind: type[BlockTile]) -> BlockTile:
    """Draw a tile of a family, each part by ``choose(choices)``; KeyError for a family that has no way to be drawn."""
    tile = DRAWN[kind](choose, kind)
    return _with_another_number(choose, tile) if not choose(range(ODD_ONE_OUT)) else tile


def _with_another_number(choose: Choose, tile: BlockTile) -> BlockTile:
    fields = [group if isinstance(group, tuple) else (group,) for group in vars(tile).values()]
    group = choose(range(len(fields)))
    at = choose(range(len(fields[group])))
    other = max(1, choose((fields[group][at] + 1, fields[group][at] - 1, fields[group][at] // 2, *range(1, 9))))
    fields[group] = (*fields[group][:at], other, *fields[group][at + 1 :])
    return type(tile)(*(numbers if len(numbers) > 1 else numbers[0] for numbers in fields))


def _of_threads(choose: Choose, kind: type[ThreadTile]) -> ThreadTile:
    thread = choose((1, 2, 3, 4, 4, 5, 6, 8)), choose((1, 2, 3, 4, 4, 6, 8, 12))
    threads = choose((1, 2, 3, 4, 5, 8, 16)), choose((1, 2, 4, 7, 8, 16, 32))
    return kind((thread[0] * threads[0], thread[1] * threads[1], choose((1, 3, 4, 8, 12, 16, 32, 40))), thread)


def _of_warps(choose: Choose, kind: type[WarpTile]) -> WarpTile:
    thread = choose((1, 2, 3, 4, 4, 6, 8)), FLOATS * choose((1, 1, 2, 3, 4))
    rows = choose((1, 2, 4, 8, 16, 32))
    warp = thread[0] * rows, thread[1] * (isa.WARP // rows)
    slices = choose((1, 1, 2, 3, 4, 8))
    block = warp[0] * choose((1, 2, 3, 4)), warp[1] * choose((1, 2, 3)), slices * choose((1, 2, 4, 6, 8, 16))
    return kind(block, warp, thread, slices)


def _of_tensor_cores(choose: Choose, kind: type[TensorCoreTile]) -> TensorCoreTile:
    warp = isa.MmaInstruction.M * choose((1, 2, 3, 4)), isa.MmaInstruction.N * choose((1, 2, 3, 4, 5, 6))
    steps = isa.STEP * choose((1, 2, 3, 4, 5, 8))
    return kind((warp[0] * choose((1, 2, 3, 4)), warp[1] * choose((1, 2, 3, 4)), steps), warp)


def _of_either_order(choose: Choose, kind: type[WarpgroupTile]) -> WarpgroupTile:
    """Draw one of four with its operands swapped: what would be its columns are rows, and its rows columns."""
    tile = _of_warpgroups(choose, kind)
    if choose(range(4)):
        return tile
    return SwappedWarpgroupTile((tile.block_n, tile.block_m, tile.block_k), tile.warpgroups[::-1])


def _of_warpgroups(choose: Choose, kind: type[WarpgroupTile]) -> WarpgroupTile:
    groups = choose((*[(1, 1), (2, 1), (3, 1), (1, 2)] * 3, (1, 3), (4, 1), (2, 2)))
    rows, steps = isa.WGMMA_ROWS * choose((1, 1, 1, 1, 2, 3)), isa.PANEL * choose((1, 1, 1, 1, 2, 3))
    widest = isa.WIDEST // groups[1]
    columns = choose((*range(isa.WGMMA_WIDTHS, widest + 1, isa.WGMMA_WIDTHS), *[64, 64, 128] * 4))
    return kind((groups[0] * rows, groups[1] * columns, steps), groups)


def _of_roles(choose: Choose, kind: type[RoleTile]) -> RoleTile:
    """Draw one of four with its operands exchanged, and two in clusters, which not every kernel with roles takes."""
    if choose(range(4)):
        upright = _of_warpgroups(choose, kind)
        return ClusterTile(upright.block, upright.warpgroups, *_shared(choose)) if choose((0, 0, 1)) else upright
    groups = choose((*[(1, 1), (1, 2), (1, 3)] * 3, (2, 1), (1, 4)))
    rows = isa.WGMMA_WIDTHS * choose((1, 1, 2, 2, 3, 4, 5, 6, 8, 8, 13, 16, 32))
    columns, steps = isa.WGMMA_ROWS * choose((1, 1, 1, 2, 3)), isa.PANEL * choose((1, 1, 1, 2))
    block = groups[0] * rows, groups[1] * columns, steps
    cluster, parts = _shared(choose)
    return SwappedTile(block, groups, parts, cluster)


def _shared(choose: Choose) -> tuple[tuple[int, int], int]:
    """Draw a cluster, whose blocks share loads, the reduction, or both: blocks down and across, and parts."""
    kind = choose(("shared", "parts", "both"))
    if kind == "both":
        return choose(((1, 2), (2, 1), (2, 2), (1, 3), (4, 1), (1, 4))), choose((2, 2, 2, 3, 4))
    if kind == "shared":
        return (choose((1, 1, 2, 2, 3, 4, 8)), choose((1, 2, 2, 3, 4, 5))), 1
    return (1, 1), choose((1, 1, 1, 2, 2, 3, 4, 5, 8, 9))


DRAWN: dict[type[BlockTile], Callable[[Choose, Any], BlockTile]] = {
    ThreadTile: _of_threads,
    WarpTile: _of_warps,
    TensorCoreTile: _of_tensor_cores,
    WarpgroupTile: _of_either_order,
    HopperTile: _of_warpgroups,
    RoleTile: _of_roles,
}
