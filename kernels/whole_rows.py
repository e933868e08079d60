"""An operand whose k tiles are whole rows, loaded as they lie in memory and multiplied from registers.

Of a B stored [k, n] a k tile has rows of n elements. TMA takes twice the time and more for boxes of it, rows of 128
bytes, where these lie across cache lines and sectors. But a k tile of all columns is one piece of memory, which begins
with a line where B does: it is loaded as lines, whatever lies in them.

::

    B in memory, 3 lines        |0 0 0 1 1 1 2 2|2 3 3 3 4 4 4 5|5 5 6 6 6 7 7 7|      # k of each 16 bytes, n = 24
    in shared memory            as it lies: row k begins at k · 2n bytes

wgmma reads no such rows. ``ldmatrix`` does, each lane its row's 16 bytes, and transposes them on their way to the
registers that the instruction takes its 64 rows from (B's columns: operands are exchanged, :mod:`.swapped`). Rows of an
odd multiple of 16 bytes, as all are that begin within sectors, are eight in eight parts of the banks: no conflicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import tma
from tensorir_ladder.kernels.held import bound
from tensorir_ladder.kernels.roles import Consumer
from tensorir_ladder.kernels.wgmma import FRAGMENT, keep, retire
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.isa import PANEL, PIECE_ROWS, ROW_BYTES, STEP, WGMMA_ROWS
from tensorir_ladder.schedules.workloads import Matmul

if TYPE_CHECKING:
    from tensorir_ladder.kernels.tiles import RowsTile

ITEMSIZE = 2
HALVES = 2  # of a k tile: one is multiplied while the other is on its way to registers
WARP_ROWS = 16  # of the instruction's, that a warp has


def check_whole(problem: Matmul, tile: RowsTile) -> None:
    """Raise IllegalTile for a product whose B has no rows as the tile loads them."""
    if problem.layout != "nn" or problem.n != tile.block_n:
        raise IllegalTile(
            "the tile loads whole rows of a B stored [k, n]",
            value=f"{tile} of {problem.n} columns, layout {problem.layout}",
            limit=f"{tile.block_n} columns, layout nn",
            remedy="give a tile of the product's columns, or one that loads boxes",
        )


@dataclass(frozen=True)
class WholeRows:
    """A k tile of ``depth`` rows of ``columns`` elements, beside the panels of the other operand.

    It ``streams`` as :class:`kernels.panels.TmaPanels` do.
    """

    columns: int
    depth: int
    streams: bool = False

    @property
    def bytes(self) -> int:
        """Return what it takes in shared memory, where nothing lies between rows."""
        return self.columns * self.depth * ITEMSIZE

    @property
    def loaded_bytes(self) -> int:
        """Return the bytes that a load brings: all."""
        return self.bytes

    def shares(self, blocks: int) -> bool:
        """Tell whether so many blocks of a cluster can load as many lines each, for all of them."""
        return self.bytes // ROW_BYTES % blocks == 0

    def box_rows(self, blocks: int = 1) -> int:
        """Return the lines that each of so many blocks loads."""
        return self.bytes // ROW_BYTES // blocks

    def load(
        self,
        tensor_map: Var,
        _column: Expr,
        step: Expr,
        into: Buffer,
        offset: Expr,
        barrier: Expr,
        share: Expr = 0,
        blocks: int = 1,
        to: tma.Multicast | None = None,
    ) -> None:
        """Emit one thread's load of the k tile that begins at row ``step``: see :meth:`kernels.panels.Panels.load`."""
        lines = self.box_rows(blocks)
        line = step // PANEL * self.columns + share * lines
        place = into.ptr_to([offset + share * (lines * ROW_BYTES)])
        tma.load(tensor_map, 0, line, place, barrier, to or blocks, self.streams)

    def lane_offset(self, lane: Expr, column: Expr) -> Expr:
        """Return the byte of a k tile that a lane addresses for 16 rows, of ``column`` and of the eight behind it.

        ``ldmatrix`` moves four squares of 8 × 8: of the first eight rows, then of the second, each of both columns.
        """
        row = lane % PIECE_ROWS + lane // (2 * PIECE_ROWS) * PIECE_ROWS
        own = column + lane // PIECE_ROWS % 2 * PIECE_ROWS
        return (row * self.columns + T.min(own, self.columns - PIECE_ROWS)) * ITEMSIZE  # beyond the last: any

    def step_offset(self, step: int) -> int:
        """Return the bytes from the k tile's first rows to an instruction's."""
        return step * STEP * self.columns * ITEMSIZE


@T.meta_class
class RowsConsumer(Consumer):
    """A consumer warpgroup whose first operand comes in :class:`WholeRows`.

    ::

        for each k tile:
          wait until its stage is full
          for each half of it:
            ldmatrix: rows -> the half's registers
            issue wgmma of these                          # returns at once
            wait for wgmma of the half before             # after a first half: the k tile before is read
    """

    def _bind_operands(self) -> None:
        """Emit where the warpgroup's rows of A lie in a stage, and each lane's place of B's; and their registers."""
        product = self.product
        self.b = self._bind_descriptor("b", product.b, product.a.bytes + product.b.extent_offset(self.column))
        own = self.row + self.here.warp * WARP_ROWS
        self.places = [
            bound(f"place_{row_tile}", product.a.lane_offset(self.here.lane, own + row_tile * WGMMA_ROWS))
            for row_tile in range(product.row_tiles)
        ]
        self.steps = product.b.depth // STEP // HALVES
        count = self.steps * product.row_tiles * FRAGMENT
        self.halves = [T.alloc_local((count,), "uint32") for _ in range(HALVES)]

    @T.inline
    def multiply(self, marks, k_tile, accumulate):
        """Emit the wgmma of a k tile that is there, the second half of which runs on."""
        self._take(0)
        self._issue(0, accumulate)
        self._retire(1)
        if k_tile > 0:
            T.cuda.warp_sync()  # all lanes have read the k tile before
            self.say_empty(marks, k_tile - 1)
        self._take(1)
        self._issue(1, T.bool(True))
        marks.mark("mma issued", k_tile)
        self._retire(0)

    @T.inline
    def retire_former(self, marks, k_tile, is_one):
        """Emit the way to the next k tile; that before is retired already."""
        self.last = self.read.stage
        self.read.advance()

    def _take(self, half: int) -> None:
        """Emit the way of half a k tile to registers."""
        product, stage = self.product, self.read.stage * self.product.stage_bytes
        for step in range(self.steps):
            for row_tile, place in enumerate(self.places):
                down = product.a.step_offset(half * self.steps + step)
                source = self.shared.ring.ptr_to([stage + down + place])
                first = (step * product.row_tiles + row_tile) * FRAGMENT
                into = (self.halves[half][first + i] for i in range(FRAGMENT))
                T.evaluate(T.ptx.ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16(*into, source))

    def _issue(self, half: int, accumulate: Expr) -> None:
        """Emit half a k tile's instructions, as one group."""
        steps = range(half * self.steps, (half + 1) * self.steps)
        self.product.multiply_rows(self.sums, self.halves[half], self.b, self.read.stage, steps, accumulate)

    def _retire(self, half: int) -> None:
        """Emit the wait for the other half's instructions than the last ones': its registers are free then."""
        retire(self.sums, 1)
        keep(self.halves[half])
