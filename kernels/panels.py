"""What a tensor core's instruction reads from shared memory: operands as panels, which TMA writes, and descriptors.

Hopper's wgmma and Blackwell's tcgen05.mma read the same panels, and describe them in formats of their own. Source: PTX
ISA, "Asynchronous warpgroup level matrix instructions" (matrix descriptor, strides, 128-byte swizzle).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import tma
from tensorir_ladder.kernels.ring import Barriers
from tensorir_ladder.kernels.tiles import PANEL, ROW_BYTES, STEPS, TmaTile
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.workloads import Matmul

if TYPE_CHECKING:
    from typing import Self

PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}
SWIZZLED = 1 << 62  # in wgmma's descriptor: the 128-byte swizzle
ADDRESS_BITS = 0x3FFFF  # of a block's own shared memory
EIGHT_ROWS = 8 * ROW_BYTES  # the unit that the swizzle permutes


@dataclass(frozen=True)
class Panels:
    """One operand's k tile in shared memory: panels of rows of 64 16-bit elements, swizzled; a TMA box each.

    ``extent`` are A's rows or B's columns in the block tile, ``depth`` steps along k. ``major`` says what a row of a
    panel runs along: "k" for A and for a B stored [n, k], "n" for a B stored [k, n], which the instruction transposes.
    """

    extent: int
    depth: int
    major: str

    MODE: ClassVar[int] = SWIZZLED

    @property
    def count(self) -> int:
        """Panels of the tile."""
        return (self.depth if self.major == "k" else self.extent) // PANEL

    @property
    def rows(self) -> int:
        """Rows of a panel."""
        return self.extent if self.major == "k" else self.depth

    @property
    def panel_bytes(self) -> int:
        """Bytes of one panel, a multiple of 1024."""
        return self.rows * ROW_BYTES

    @property
    def bytes(self) -> int:
        """Bytes of the tile."""
        return self.count * self.panel_bytes

    def coordinates(self, panel: int, first: Expr, step: Expr) -> tuple[Expr, Expr]:
        """Column and row, in the matrix as stored, of a panel of the tile that begins at ``first`` and ``step``."""
        return (step + panel * PANEL, first) if self.major == "k" else (first + panel * PANEL, step)

    def shares(self, blocks: int) -> bool:
        """Whether so many blocks of a cluster can load a share of the tile each, for all of them."""
        return (self.rows // 8 if self.major == "k" else self.count) % blocks == 0

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
        return self.rows // blocks if self.major == "k" else self.rows

    def load(
        self,
        tensor_map: Var,
        first: Expr,
        step: Expr,
        into: Buffer,
        offset: Expr,
        barrier: Expr,
        share: Expr = 0,
        blocks: int = 1,
    ) -> None:
        """Emit one thread's TMA loads of the tile to byte ``offset`` of shared memory, whose bytes a barrier counts.

        With more ``blocks``: of this block's ``share``, by multicast, each to all blocks of the cluster, whose barriers
        all count. A share is some rows of every panel where panels run along k, some of the panels where along n.
        """
        along_k = self.major == "k"
        rows = self.box_rows(blocks)
        for box in range(self.count if along_k else self.count // blocks):
            panel = box if along_k else share * (self.count // blocks) + box
            first_row = share * rows if along_k else 0
            column, row = self.coordinates(panel, first + first_row if along_k else first, step)
            place = into.ptr_to([offset + panel * self.panel_bytes + first_row * ROW_BYTES])
            tma.load(tensor_map, column, row, place, barrier, blocks)

    def step_offset(self, step: int) -> int:
        """Bytes from the tile's first element to what the ``step``-th instruction along k reads."""
        if self.major == "n":
            return step * STEPS * ROW_BYTES
        panel, inside = divmod(step * STEPS, PANEL)
        return panel * self.panel_bytes + inside * 2

    def extent_offset(self, first: Expr) -> Expr:
        """Bytes to row (of A) or column (of B) ``first``, a multiple of 8, or of 64 where panels run along it."""
        return first * ROW_BYTES if self.major == "k" else first // PANEL * self.panel_bytes

    @property
    def descriptor_bits(self) -> int:
        """A descriptor's bits beside the address; distances are in units of 16 bytes.

        MODE has those of the instruction's own format: which swizzle, and how that is written.
        Stride: from one group of eight rows to the next. Leading: from one panel to the next, where panels run along
        n; not used (1) where they run along k.
        """
        leading = 1 if self.major == "k" else self.panel_bytes >> 4
        return self.MODE | (EIGHT_ROWS >> 4) << 32 | leading << 16

    def descriptor(self, address: Expr) -> Expr:
        """The descriptor of the operand at an address in shared memory, as an expression of 64 bits.

        In a cluster a shared address also names the block, in bits that are other fields of a descriptor.
        """
        window = T.bitwise_and(T.cuda.cvta_generic_to_shared(address), T.uint32(ADDRESS_BITS))
        return T.bitwise_or(T.uint64(self.descriptor_bits), T.Cast("uint64", T.shift_right(window, T.uint32(4))))


@dataclass(frozen=True)
class TileProduct:
    """What a block multiplies per k tile: both operands' panels in a slot, A's, then B's, and the instruction's shape.

    ``columns`` are those of one instruction, ROWS its rows, of which it has ``row_tiles`` below each other.
    """

    a: Panels
    b: Panels
    columns: int
    dtype: str
    row_tiles: int = 1

    PANELS: ClassVar[type[Panels]] = Panels
    ROWS: ClassVar[int]
    PART: ClassVar[str]

    @classmethod
    def of(cls, problem: Matmul, tile: TmaTile) -> Self:
        """The product of a problem's tiles; IllegalTile for a dtype or layout that the instruction has no form for."""
        major = "k" if problem.layout == "nt" else "n"
        found = []
        if problem.dtype not in PTX_TYPES:
            found.append(f"operands of {problem.dtype}, where it takes {' or '.join(PTX_TYPES)}")
        if major == "n" and tile.group_n % PANEL:
            found.append(f"{tile.group_n} columns {cls.PART} of a B stored [k, n] are not a multiple of {PANEL}")
        if found:
            raise IllegalTile(
                f"no {tile.INSTRUCTION} does this: " + "; ".join(found), remedy="choose another tile, dtype or layout"
            )
        a, b = cls.PANELS(tile.block_m, tile.block_k, "k"), cls.PANELS(tile.block_n, tile.block_k, major)
        return cls(a, b, tile.group_n, problem.dtype)

    @property
    def slot_bytes(self) -> int:
        """Both operands' bytes: A's panels, then B's."""
        return self.a.bytes + self.b.bytes

    @property
    def boxes(self) -> int:
        """Boxes of ROWS × 64 results: a warpgroup's, or the block's where it has one instruction."""
        return self.row_tiles * self.columns // PANEL

    def load(
        self,
        matrices: tma.Matrices | tma.Maps,
        place: tuple[Expr, Expr, Expr],
        ring: Buffer,
        slot: Expr,
        full: Barriers,
        share: Expr = 0,
        blocks: int = 1,
    ) -> None:
        """Emit one thread's loads of a k tile into a slot, which is full with the bytes of both operands.

        ``place`` is the tile's row of A, its column of B, and where it begins along k; of B a cluster's blocks load a
        ``share`` each (:meth:`Panels.load`).
        """
        row, column, step = place
        first = slot * self.slot_bytes
        full.expect(slot, self.slot_bytes)
        self.a.load(matrices.a_map, row, step, ring, first, full.at(slot))
        self.b.load(matrices.b_map, column, step, ring, first + self.a.bytes, full.at(slot), share, blocks)

    def moved(self, descriptor: Expr, slot: Expr, offset: int) -> Expr:
        """A descriptor of slot 0, moved to an offset in another slot: addresses are in units of 16 bytes."""
        return descriptor + T.Cast("uint64", (slot * self.slot_bytes + offset) // 16)
