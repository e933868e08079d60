"""The kernel of products whose rows TMA cannot step over, and whose reduction is short: it reads operands as they lie.

Kernels that TMA loads for read copies of such operands, made at each call: beside a short reduction the copies, and the
launch that makes them, may take longer than the product.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.kernels.unaligned import MOST_ELEMENTS, Sharing, matrices_of, resident, shared_bytes, unaligned
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.isa import PANEL, PTX_TYPES, SHARED_KIB, TMA_STRIDE_BYTES, VECTOR_BYTES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE
from tensorir_ladder.torch_ops.operands import Operands, fits_tma, is_dense

if TYPE_CHECKING:
    from tvm import tirx

    from tensorir_ladder.torch_ops.problem import Setting

MOST_STEPS = 256  # of the reduction
SIDES = (((64, 64), (1, 1)), ((128, 64), (2, 1)), ((64, 128), (1, 2)), ((128, 128), (2, 1)))  # with warpgroups
# Microseconds: of a launch; of a turn of loads, which blocks that a multiprocessor holds at once take together, and of
# each panel behind a row's first; of a box of results; of a megabyte that all blocks load.
LAUNCH, TURN, PANEL_TURN, BOX, LOADED = 1.124, 0.609, 0.397, 0.609, 0.087
# And beside the estimates of other kernels: of a launch that copies rows; of a megabyte of them, of less of which its
# square root counts, since little is not waited for by the byte; and so of results that are stored row by row. These
# were fitted to 44 drawn products on an H200, those above to 85 others, by up to four tiles each, beside five other
# kernels: single times are 6 and 5 % off; what they choose was 0.982 of the fastest.
COPY_LAUNCH, COPIED, BY_ROWS = 1.37, 0.45, 0.70


@dataclass(frozen=True)
class Unaligned:
    """The choice of this kernel with a tile, beside those of :class:`.choice.Choice`."""

    tile: HopperTile

    PIPELINE: ClassVar[str] = TIR_PIPELINE

    def __str__(self) -> str:
        return f"rows as they lie, {self.tile}, launched early"

    def at_any_element(self, _problem: Matmul) -> str:
        """Return the matrices that may begin so: all."""
        return "ABC"

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Make the kernel for a problem of the operands' own sizes."""
        batch = {"batch": setting.batch, "broadcast": setting.broadcast}
        return unaligned(problem, self.tile, overlapped=True, finish=setting.finish, **batch)


def reads_as_they_lie(operands: Operands, out: MatrixRows) -> bool:
    """Tell whether the kernel takes operands, and an output that lies so, where TMA does not read or store all of them.

    Results of float32 never leave by TMA.
    """
    problem = operands.exact
    if problem.k > MOST_STEPS:
        return False
    if any(rows * columns > MOST_ELEMENTS for rows, columns in matrices_of(problem)):
        return False
    itemsize, out_itemsize = dtype_bytes(problem.dtype), dtype_bytes(problem.out_dtype)
    lain = (operands.a, itemsize), (operands.b, itemsize), (out, out_itemsize)
    return (operands.are_copied or _stored_by_rows(problem) > 0) and all(is_dense(*each) for each in lain)


def _stored_by_rows(problem: Matmul) -> int:
    """Return the bytes of results that kernels which would store them by TMA store row by row."""
    row_bytes = problem.n * dtype_bytes(problem.out_dtype)
    return problem.m * row_bytes if problem.out_dtype in PTX_TYPES and row_bytes % TMA_STRIDE_BYTES else 0


def more_microseconds(operands: Operands) -> float:
    """Return about how long it takes other kernels to copy what TMA cannot read, and to store rows that it cannot."""
    copied = [matrix for matrix in (operands.a, operands.b) if not fits_tma(matrix)]
    megabytes = sum(matrix.all_rows * matrix.row_bytes for matrix in copied) / 1e6
    stored = operands.batch * _stored_by_rows(operands.exact) / 1e6
    copying = COPY_LAUNCH * bool(copied) + COPIED * max(megabytes, math.sqrt(megabytes))
    return copying + BY_ROWS * math.sqrt(stored)


@functools.cache
def tiles_for(problem: Matmul) -> tuple[HopperTile, ...]:
    """List the tiles that hold a product's whole reduction."""
    depth = -(-problem.k // PANEL) * PANEL
    tiles = (HopperTile((rows, columns, depth), groups) for (rows, columns), groups in SIDES)
    return tuple(tile for tile in tiles if shared_bytes(tile) <= SHARED_KIB[90] * 1024)


def fastest_tile(problem: Matmul, multiprocessors: int, batch: int = 1) -> tuple[HopperTile, float]:
    """Return the tile that should take the least time for a batch of a product, and its microseconds."""
    times = {tile: microseconds(problem, tile, multiprocessors, batch) for tile in tiles_for(problem)}
    return min(times.items(), key=lambda found: found[1])


def microseconds(problem: Matmul, tile: HopperTile, multiprocessors: int, batch: int = 1) -> float:
    """Return about how long a batch takes; good for an order, and beside the other kernels' estimates."""
    sharing = Sharing.of(WarpgroupProduct.of(problem, tile), tile)
    rows, columns, _ = tile.counts(problem)
    blocks, loaded = batch * rows * columns, sum(sharing.counts) * sharing.threads * VECTOR_BYTES
    on_each, together = -(-blocks // multiprocessors), resident(tile, sharing)
    loading = TURN * -(-on_each // together) * sharing.rounds
    loading += PANEL_TURN * (tile.block_k // PANEL - 1) * on_each / together
    storing = BOX * on_each * tile.block_m * tile.block_n / (PANEL * PANEL)
    return LAUNCH + loading + storing + LOADED * blocks * loaded / 1e6
