"""What a tensor core's instruction reads from shared memory: operands as panels, which TMA writes, and descriptors.

Hopper's wgmma and Blackwell's tcgen05.mma read the same panels, and describe them in formats of their own. Source: PTX
ISA, "Asynchronous warpgroup level matrix instructions" (matrix descriptor, strides, 128-byte swizzle).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import tma
from tensorir_ladder.kernels.held import moved
from tensorir_ladder.kernels.ring import Barriers
from tensorir_ladder.kernels.tiles import TmaTile
from tensorir_ladder.schedules import isa
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.isa import PANEL, ROW_BYTES
from tensorir_ladder.schedules.workloads import Matmul

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class TmaPanels(isa.Panels):
    """One operand's k tile in shared memory (:class:`schedules.isa.TmaPanels`), loaded by TMA: each panel is a box.

    An operand that ``streams`` is loaded once by the whole kernel: its lines are the first to leave the L2 cache. Where
    tiles' edges lie within lines, these are loaded once by either neighbour.
    """

    streams: bool = False

    def coordinates(self, panel: int, first: Expr, step: Expr) -> tuple[Expr, Expr]:
        """Column and row, in the matrix as stored, of a panel of the tile that begins at ``first`` and ``step``."""
        return (step + panel * PANEL, first) if self.major == "k" else (first + panel * PANEL, step)

    def shares(self, blocks: int) -> bool:
        """Return whether so many blocks of a cluster can load a share of the tile each, for all of them."""
        return (self.rows // 8 if self.shares_rows(blocks) else self.count) % blocks == 0

    def shares_rows(self, blocks: int) -> bool:
        """Return whether a share is some rows of every panel.

        Else it is some of the panels: of those along n, where all are whole and divide evenly.
        """
        return self.major == "k" or self.count % blocks != 0 or self.edge > 0

    def check_shares(self, blocks: int) -> None:
        """Raise IllegalTile where :meth:`shares` says no."""
        if not self.shares(blocks):
            raise IllegalTile(
                "a cluster cannot share this operand's tile",
                value=f"{self.rows} rows of {self.count} panels",
                limit=f"{blocks} blocks with whole panels, or with rows by the eight of each",
                remedy="choose another tile, or blocks on their own",
            )

    def box_rows(self, blocks: int = 1) -> int:
        """Rows of a TMA box where so many blocks of a cluster load a share of the tile each."""
        return self.rows // blocks if self.shares_rows(blocks) else self.rows

    def load(
        self,
        tensor_map: Var | tma.OneMatrix | tma.Edged,
        first: Expr,
        step: Expr,
        into: Buffer,
        offset: Expr,
        barrier: Expr,
        share: Expr = 0,
        blocks: int = 1,
        to: tma.Multicast | None = None,
    ) -> None:
        """Emit one thread's TMA loads of the tile to byte ``offset`` of shared memory, whose bytes a barrier counts.

        With more ``blocks``: of this block's ``share``, by multicast, each to all blocks of the cluster, whose barriers
        all count. Or ``to`` some of them, of a share or the whole.
        """
        by_rows, rows = self.shares_rows(blocks), self.box_rows(blocks)
        for box in range(self.count if by_rows else self.count // blocks):
            panel = box if by_rows else share * (self.count // blocks) + box
            first_row = share * rows if by_rows else 0
            column, row = self.coordinates(panel, first, step)
            place = into.ptr_to([offset + panel * self.panel_bytes + first_row * ROW_BYTES])
            given = to or blocks
            tma.load(self._map_of(tensor_map, panel), column, row + first_row, place, barrier, given, self.streams)

    def _map_of(self, tensor_map: Var | tma.OneMatrix | tma.Edged, panel: int | Expr) -> Var | tma.OneMatrix:
        if isinstance(tensor_map, tma.Edged):
            return tensor_map.edge if panel == self.count - 1 else tensor_map.whole
        return tensor_map

    def descriptor(self, address: Expr) -> Expr:
        """The descriptor of the operand at an address in shared memory, as an expression of 64 bits.

        In a cluster a shared address also names the block, in bits that are other fields of a descriptor.
        """
        window = T.bitwise_and(T.cuda.cvta_generic_to_shared(address), T.uint32(isa.ADDRESS_MASK))
        return T.bitwise_or(T.uint64(self.descriptor_bits), T.Cast("uint64", T.shift_right(window, T.uint32(4))))


@dataclass(frozen=True)
class TileProduct:
    """One k tile of a block: both operands' panels in a stage, A's, then B's, and the instruction's shape.

    ``columns`` are those of one instruction, ROWS its rows, of which it has ``row_tiles`` below each other. It
    ``holds`` descriptors in registers (:mod:`.held`) where launches overlap.
    """

    a: TmaPanels
    b: TmaPanels
    columns: int
    dtype: str
    row_tiles: int = 1
    holds: bool = False

    PANELS: ClassVar[type[TmaPanels]] = TmaPanels
    ROWS: ClassVar[int]
    PART: ClassVar[str]

    @classmethod
    def of(cls, problem: Matmul, tile: TmaTile) -> Self:
        """The product of a problem's tiles; IllegalTile for a dtype or layout that the instruction has no form for."""
        major = "k" if problem.layout == "nt" else "n"
        found = []
        if problem.dtype not in isa.PTX_TYPES:
            found.append(f"operands of {problem.dtype}, where it takes {' or '.join(isa.PTX_TYPES)}")
        if major == "n" and tile.group_n % PANEL and not tile.reads_parts_of_panels:
            found.append(f"{tile.group_n} columns {cls.PART} of a B stored [k, n] are not a multiple of {PANEL}")
        if found:
            raise IllegalTile(
                f"no {tile.INSTRUCTION} does this: " + "; ".join(found), remedy="choose another tile, dtype or layout"
            )
        a, b = cls.PANELS(tile.block_m, tile.block_k, "k"), cls.PANELS(tile.block_n, tile.block_k, major)
        return cls(a, b, tile.group_n, problem.dtype)

    def for_overlap(self, a_streams: bool, b_streams: bool) -> Self:
        """Return the same for launches that overlap: descriptors are held, and operands may stream.

        Other kernels of the steps keep the form that was measured.
        """
        a, b = replace(self.a, streams=a_streams), replace(self.b, streams=b_streams)
        return replace(self, a=a, b=b, holds=True)

    @property
    def stage_bytes(self) -> int:
        """Both operands' bytes: A's panels, then B's."""
        return self.a.bytes + self.b.bytes

    @property
    def loaded_bytes(self) -> int:
        """Return the bytes that make a stage full: both operands', less those of columns that a last panel lacks."""
        return self.a.loaded_bytes + self.b.loaded_bytes

    @property
    def b_columns(self) -> int:
        """Columns of B that panels along n have; a whole panel's where they run along k."""
        return PANEL if self.b.major == "k" else self.b.extent

    @property
    def box_columns(self) -> int:
        """Columns of a box of results: 64, or those of an instruction that has fewer."""
        return min(PANEL, self.columns)

    @property
    def boxes(self) -> int:
        """Boxes of ROWS × 64 results: a warpgroup's, or the block's where it has one instruction."""
        return self.row_tiles * self.boxes_across

    @property
    def boxes_across(self) -> int:
        """Boxes beside each other, the last of which may share columns with the one before."""
        return -(-self.columns // PANEL)

    def box_place(self, box: int | Expr) -> tuple[int | Expr, int | Expr]:
        """Return a box's row tile, and its first column: the last box ends where the instruction's columns do."""
        row_tile, column = box // self.boxes_across, box % self.boxes_across * PANEL
        if self.columns % PANEL == 0 or self.columns < PANEL:
            return row_tile, column
        return row_tile, (min if isinstance(box, int) else tirx.min)(column, self.columns - PANEL)

    def load(
        self,
        matrices: tma.Matrices | tma.Maps,
        place: tuple[Expr, Expr, Expr],
        ring: Buffer,
        stage: Expr,
        full: Barriers,
    ) -> None:
        """Emit one thread's loads of a k tile into a stage, which is full with the bytes of both operands.

        ``place`` is the tile's row of A, its column of B, and where it begins along k.
        """
        row, column, step = place
        first = stage * self.stage_bytes
        full.expect(stage, self.loaded_bytes)
        self.a.load(matrices.a_map, row, step, ring, first, full.at(stage))
        self.b.load(matrices.b_map, column, step, ring, first + self.a.bytes, full.at(stage))

    def moved(self, descriptor: Expr, stage: Expr, offset: int) -> Expr:
        """A descriptor of stage 0, moved to an offset in another stage: addresses are in units of 16 bytes."""
        units = (stage * self.stage_bytes + offset) // 16
        return moved(descriptor, units) if self.holds else descriptor + T.Cast("uint64", units)
