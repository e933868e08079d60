"""Hopper's warpgroup instruction: operands in shared memory, descriptors, the multiplication, and its fragments.

``wgmma.mma_async`` multiplies 64 rows by n columns, 16 steps deep, for the four warps of a warpgroup. It reads both
operands from shared memory through 64-bit descriptors, and adds to registers while the warps go on. Source: PTX ISA,
"Asynchronous warpgroup level matrix instructions" (matrix descriptor, strides, 128-byte swizzle, register fragments).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from schedules.errors import IllegalTile
from schedules.workloads import Matmul

from . import tma
from .config import LANES, PANEL, ROW_BYTES, ROWS, STEPS, HopperTile, TmaTile

if TYPE_CHECKING:
    from typing import Self

PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}
SWIZZLED = 1 << 62  # in a descriptor: the 128-byte swizzle
EIGHT_ROWS = 8 * ROW_BYTES  # the unit that the swizzle permutes

_FENCE = """
__forceinline__ __device__ void {name}(float* sums) {{
#pragma unroll
  for (int i = 0; i < {count}; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
}}
"""


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

    def load(self, tensor_map: Var, first: Expr, step: Expr, into: Buffer, offset: Expr, barrier: Expr) -> None:
        """Emit one thread's TMA loads of the tile, a panel each, to byte ``offset`` of shared memory."""
        for panel in range(self.count):
            column, row = self.coordinates(panel, first, step)
            tma.load(tensor_map, column, row, into.ptr_to([offset + panel * self.panel_bytes]), barrier)

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
        """The descriptor of the operand at an address in shared memory, as an expression of 64 bits."""
        window = T.cuda.cvta_generic_to_shared(address)
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

    def moved(self, descriptor: Expr, slot: Expr, offset: int) -> Expr:
        """A descriptor of slot 0, moved to an offset in another slot: addresses are in units of 16 bytes."""
        return descriptor + T.Cast("uint64", (slot * self.slot_bytes + offset) // 16)


@dataclass(frozen=True)
class WarpgroupProduct(TileProduct):
    """The product as each warpgroup's instructions of 64 rows × ``columns``, one after the other along k.

    ``registers`` are the sums of a thread, those of one instruction together.
    """

    ROWS: ClassVar[int] = ROWS
    PART: ClassVar[str] = "per warpgroup"

    @classmethod
    def of(cls, problem: Matmul, tile: HopperTile) -> Self:
        """See :meth:`TileProduct.of`."""
        return replace(super().of(problem, tile), row_tiles=tile.group_m // ROWS)

    @property
    def registers(self) -> int:
        """Accumulators of a thread."""
        return self.row_tiles * self.registers_per_tile

    @property
    def registers_per_tile(self) -> int:
        """Accumulators of a thread for one instruction's rows."""
        return ROWS * self.columns // LANES

    @property
    def instruction(self) -> str:
        """The PTX instruction."""
        ptx = PTX_TYPES[self.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{STEPS}.f32.{ptx}.{ptx}"

    def multiply(self, sums: Buffer, a: Expr, b: Expr, slot: Expr, accumulate: Expr) -> None:
        """Emit one k tile's instructions, committed as one group, which run on.

        ``a`` and ``b`` are the warpgroup's descriptors in slot 0; ``accumulate`` says whether there are sums to add
        to already. The sums must not be touched until :func:`retire`.
        """
        keep(sums)
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        for step in range(self.a.depth // STEPS):
            added = accumulate if step == 0 else T.bool(True)
            for row_tile in range(self.row_tiles):
                first = row_tile * self.registers_per_tile
                own = [sums[first + i] for i in range(self.registers_per_tile)]
                rows = self.a.step_offset(step) + self.a.extent_offset(row_tile * ROWS)
                operands = (self.moved(a, slot, rows), self.moved(b, slot, self.b.step_offset(step)))
                T.evaluate(T.ptx[self.instruction](*own, *operands, added, 1, 1, 0, int(self.b.major == "n")))
        T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
        keep(sums)


def retire(sums: Buffer, in_flight: int) -> None:
    """Emit the wait until at most ``in_flight`` groups of this warpgroup's instructions are unfinished."""
    T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(in_flight))
    keep(sums)


def keep(sums: Buffer) -> None:
    """Emit an empty instruction that uses each sum: the compiler moves no use of them across that place.

    It knows nothing of instructions that run on.
    """
    count = int(sums.shape[0])
    name = f"keep_{count}_sums"
    T.evaluate(T.cuda.func_call(name, sums.data, source_code=_FENCE.format(name=name, count=count)))


def fragment(warp: Expr, lane: Expr, register: int) -> tuple[Expr, Expr]:
    """Row (of 64) and column of the sum that a lane of a warpgroup's warp has in a register of one instruction.

    A warp has 16 of the rows; a lane two neighbouring columns of each eight, in two rows eight apart.
    """
    row = warp * 16 + lane // 4 + register // 2 % 2 * 8
    return row, register // 4 * 8 + lane % 4 * 2 + register % 2
