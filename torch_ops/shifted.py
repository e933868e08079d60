"""The kernel of products whose rows TMA cannot step over, for a long reduction: its blocks shift rows into place.

Kernels that TMA loads for read copies of such operands, made at each call. Beside few rows of the other operand a large
one is shifted by few blocks, and a copy, which goes through memory twice more, takes longer than the product.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.shifted_rows import PIECE, ShiftedRows
from tensorir_ladder.kernels.shifting import ROOMS, room_for, shifting
from tensorir_ladder.kernels.tiles import MOST_PARTS, ClusterTile
from tensorir_ladder.schedules.isa import PANEL, WGMMA_ROWS
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE
from tensorir_ladder.torch_ops.operands import Operands, fits_tma, is_dense
from tensorir_ladder.torch_ops.short_reductions import MOST_STEPS
from tensorir_ladder.torch_ops.step_kernels import blocks_at_once

if TYPE_CHECKING:
    from tvm import tirx

    from tensorir_ladder.torch_ops.problem import Setting

GROUPS = ((64, 1), (128, 2), (192, 3), (256, 2))  # a tile's rows, and the warpgroups that multiply them
SIDES = (*itertools.product(GROUPS, (64, 128)), ((64, 1), 256))  # with columns
FEWEST_K_TILES = 3  # of a part
# Microseconds: of a wave of tiles, beside its loop; of a wavefront, 128 bytes through a multiprocessor's shared memory;
# of a multiply-add of a multiprocessor; of a megabyte that all blocks load for a k tile, through the L2 cache, and of a
# megabyte from memory; what the shorter of loop and memory adds; of a launch that copies rows, and of a megabyte of
# them; of parts that are added up; of a box of results. Fitted to 1,283 times of 106 products on an H200 (four
# by hand, the others of any size, seeds 3101 and 3102, with rows that TMA cannot step over): 10 % off; the tile that
# they choose was 0.981 of the fastest.
WAVE, WAVEFRONT, MULTIPLY_ADD, LOADED, READ = 3.7, 0.000662, 2.93e-07, 0.125, 0.363
UNHIDDEN, COPY_LAUNCH, COPIED, JOIN, BOX = 0.346, 0.674, 0.9, 0.602, 0.273


@dataclass(frozen=True)
class Shifting:
    """The choice of this kernel with a tile, beside those of :class:`.choice.Choice`; it ``shifts`` these operands."""

    tile: ClusterTile
    shifts: str

    PIPELINE: ClassVar[str] = TIR_PIPELINE

    def __str__(self) -> str:
        return f"rows of {' and '.join(self.shifts)} shifted, {self.tile}, launched early"

    def at_any_element(self, problem: Matmul) -> str:
        """Return the matrices that may begin so: also an output whose rows TMA could not store."""
        return self.shifts + "C" * (problem.n % PIECE > 0)

    def copies(self, operands: Operands) -> bool:
        """Tell whether TMA loads an operand that must be copied for it."""
        return any(name not in self.shifts for name in operands.unreadable)

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Make the kernel for a problem of the operands' own sizes."""
        stages, ahead = room_for(problem, self.tile, self.shifts) or ROOMS[-1]  # the least, which the kernel refuses
        how = {"finish": setting.finish, "batch": setting.batch, "broadcast": setting.broadcast}
        return shifting(problem, self.tile, self.shifts, stages, ahead, overlapped=True, **how)


def shifts_rows(operands: Operands, out: MatrixRows) -> bool:
    """Tell whether the kernel takes operands, and an output that lies so, and is worth a look.

    Not a reduction so short that nothing need be copied for it (:mod:`.short_reductions`).
    """
    problem = operands.exact
    if not operands.are_copied or problem.k <= MOST_STEPS:
        return False
    if not is_dense(out, dtype_bytes(problem.out_dtype)):
        return False
    return all(fits_tma(matrix) or ShiftedRows.counts(matrix.shape) for matrix in (operands.a, operands.b))


class _Tiles(NamedTuple):
    """Tiles that fit, an element each, with what their blocks do for a k tile."""

    rows: np.ndarray
    columns: np.ndarray
    parts: np.ndarray
    wavefronts: np.ndarray
    at_once: np.ndarray


@functools.cache
def _tiles(layout: str, shifts: str, multiprocessors: int) -> tuple[tuple[ClusterTile, ...], _Tiles]:
    """List the tiles for operands that lie so."""
    problem = Matmul(1023, 1023, 1023, "float16", layout)
    able = [ClusterTile((rows, columns, PANEL), (warpgroups, 1)) for (rows, warpgroups), columns in SIDES]
    made = [replace(tile, parts=parts) for tile in able for parts in range(1, MOST_PARTS + 1)]
    made = [tile for tile in made if not tile.misfits() and room_for(problem, tile, shifts)]
    found = [
        (*tile.block[:2], tile.parts, _wavefronts(tile, layout, shifts), blocks_at_once(tile.parts, multiprocessors))
        for tile in made
    ]
    return tuple(made), _Tiles(*np.array(found).T)


def _wavefronts(tile: ClusterTile, layout: str, shifts: str) -> float:
    """Count what goes through shared memory for a k tile, by the 128 bytes.

    An operand that is shifted is copied to it, read twice, and laid down; wgmma reads A's rows once, and B's columns
    once for each 64 rows.
    """
    width = (tile.block_n if layout == "nn" else PANEL) // PIECE
    a = tile.block_m * (3 + (PANEL // PIECE + 1) / (PANEL // PIECE) if "A" in shifts else 1)
    b = tile.block_n * (3 + (width + 1) / width if "B" in shifts else 1)
    return a + b + tile.block_m // WGMMA_ROWS * (WGMMA_ROWS + tile.block_n)


def fastest_shifting(problem: Matmul, unreadable: str, multiprocessors: int, batch: int = 1) -> tuple[Shifting, float]:
    """Return the choice that should take the least time, and its microseconds, copies of what it does not shift in it.

    It shifts the operands that are ``unreadable`` by TMA, "A", "B" or "AB", or of two such the larger, and the other is
    copied. Sizes do not say which they are: TMA reads rows of any length that gaps set multiples of 16 bytes apart.
    """
    larger = "A" if problem.m >= problem.n else "B"
    found = []
    for shifts in dict.fromkeys((unreadable, larger if len(unreadable) > 1 else unreadable)):
        made, tiles = _tiles(problem.layout, shifts, multiprocessors)
        us = _microseconds(problem, tiles, batch)
        copied = {"A": problem.m, "B": problem.n}
        for name in set(unreadable) - set(shifts):
            us = us + COPY_LAUNCH + COPIED * 2e-6 * batch * copied[name] * problem.k
        least = int(us.argmin())
        found.append((Shifting(made[least], shifts), float(us[least])))
    return min(found, key=lambda pair: pair[1])


def _microseconds(problem: Matmul, tiles: _Tiles, batch: int) -> np.ndarray:
    """Return about how long a batch takes by each tile, without copies; infinite where its parts are too short."""
    t, (m, n, k) = tiles, (problem.m, problem.n, problem.k)
    blocks = batch * -(-m // t.rows) * -(-n // t.columns) * t.parts
    waves, busy = -(-blocks // t.at_once), np.minimum(blocks, t.at_once)
    all_k_tiles = -(-k // PANEL)
    multiplied = t.rows * t.columns * (PANEL * MULTIPLY_ADD)
    loaded = (t.rows + t.columns) * (2 * PANEL * LOADED * 1e-6) * busy
    k_tile = np.maximum(np.maximum(WAVEFRONT * t.wavefronts, multiplied), loaded)
    loop = waves * (-(-all_k_tiles // t.parts) * k_tile + WAVE)
    reading = batch * (m * k + n * k + m * n) * 2e-6 * READ
    storing = BOX * waves * t.rows * t.columns / (t.parts * PANEL * PANEL)
    us = np.maximum(loop, reading) + UNHIDDEN * np.minimum(loop, reading) + JOIN * (t.parts > 1) + storing
    return np.where((t.parts == 1) | (all_k_tiles // t.parts >= FEWEST_K_TILES), us, np.inf)
