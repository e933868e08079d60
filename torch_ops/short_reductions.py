"""The kernel of products whose rows TMA cannot step over, and whose reduction is short: it reads operands as they lie.

All other kernels read copies of such operands, at each call. Beside a short reduction the copies, and the launch that
makes them, take longer than the product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tensorir_ladder.kernels.codegen.launch_plan import Rows
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.kernels.unaligned import MOST_ELEMENTS, matrices_of, resident, shared_bytes, unaligned
from tensorir_ladder.schedules.isa import PANEL, SHARED_KIB
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE
from tensorir_ladder.torch_ops.operands import Operands, fits_tma, is_dense

if TYPE_CHECKING:
    from tvm import tirx

    from tensorir_ladder.torch_ops.choice import Setting

MOST_STEPS = 256  # of the reduction
SIDES = (((64, 64), (1, 1)), ((128, 64), (2, 1)), ((64, 128), (1, 2)), ((128, 128), (2, 1)))  # with warpgroups


@dataclass(frozen=True)
class Unaligned:
    """The choice of this kernel with a tile, beside those of :class:`.choice.Choice`."""

    tile: HopperTile

    PIPELINE: ClassVar[str] = TIR_PIPELINE

    def __str__(self) -> str:
        return f"rows as they lie, {self.tile}, launched early"

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Make the kernel for a problem of the operands' own sizes."""
        return unaligned(problem, self.tile, overlapped=True, finish=setting.finish)


def reads_as_they_lie(operands: Operands, out: Rows) -> bool:
    """Tell whether the kernel takes operands, and an output that lies so, of which others would copy one at least."""
    problem = operands.exact
    if operands.batch is not None or problem.k > MOST_STEPS:
        return False
    if any(rows * columns > MOST_ELEMENTS for rows, columns in matrices_of(problem)):
        return False
    itemsize, out_itemsize = dtype_bytes(problem.dtype), dtype_bytes(problem.out_dtype)
    lain = (operands.a, itemsize), (operands.b, itemsize), (out, out_itemsize)
    whole = fits_tma(out) and problem.n * out_itemsize % 16 == 0
    return (operands.are_copied or not whole) and all(is_dense(matrix, size) for matrix, size in lain)


@functools.cache
def tiles_for(problem: Matmul) -> tuple[HopperTile, ...]:
    """List the tiles that hold a product's whole reduction."""
    depth = -(-problem.k // PANEL) * PANEL
    tiles = (HopperTile((rows, columns, depth), groups) for (rows, columns), groups in SIDES)
    return tuple(tile for tile in tiles if tile.group_n % PANEL == 0 and shared_bytes(tile) <= SHARED_KIB[90] * 1024)


def tile_for(problem: Matmul, multiprocessors: int) -> HopperTile:
    """Choose a tile: the one whose blocks together have the least to load, where they are enough for the GPU."""
    tiles = tiles_for(problem)

    def cost(tile: HopperTile) -> float:
        rows, columns, _ = tile.counts(problem)
        places = multiprocessors * resident(tile)
        waves = max(1.0, rows * columns / places)
        return waves * (tile.block_m + tile.block_n) * resident(tile)

    return min(tiles, key=cost)
