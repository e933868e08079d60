"""Hopper's warpgroup instruction: the multiplication, and its fragments.

``wgmma.mma_async`` multiplies 64 rows by n columns, 16 steps deep, for the four warps of a warpgroup. It reads both
operands from shared memory through 64-bit descriptors (:mod:`.panels`), and adds to registers while the warps go on.
Source: PTX ISA, "Asynchronous warpgroup level matrix instructions" (register fragments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.kernels.panels import TileProduct
from tensorir_ladder.kernels.tiles import HopperTile, SwappedTile
from tensorir_ladder.schedules.isa import PTX_TYPES, STEP, WARPGROUP, WGMMA_ROWS
from tensorir_ladder.schedules.workloads import Matmul

if TYPE_CHECKING:
    from typing import Self

FRAGMENT = WGMMA_ROWS * STEP // WARPGROUP // 2  # registers of a thread, of two elements each, that have A's rows
_KEEP = """
__forceinline__ __device__ void {name}({type}* {what}) {{
#pragma unroll
  for (int i = 0; i < {count}; ++i) asm volatile("" : "+{constraint}"({what}[i]) :: "memory");
}}
"""
_KINDS = {
    "float32": ("sums", "float", "f"),
    "uint32": ("pairs", "unsigned int", "r"),
}  # their name, type and constraint


@dataclass(frozen=True)
class WarpgroupProduct(TileProduct):
    """The product as each warpgroup's instructions of 64 rows × ``columns``, one after the other along k.

    ``registers`` are the sums of a thread, those of one instruction together.
    """

    shares: tuple[int, ...] = ()  # columns of each instruction, where none has all of them

    ROWS: ClassVar[int] = WGMMA_ROWS
    PART: ClassVar[str] = "per warpgroup"

    @classmethod
    def of(cls, problem: Matmul, tile: HopperTile) -> Self:
        """See :meth:`TileProduct.of`."""
        return replace(super().of(problem, tile), row_tiles=tile.group_m // WGMMA_ROWS)

    @classmethod
    def swapped(cls, problem: Matmul, tile: SwappedTile) -> Self:
        """The product with its operands exchanged: ``a`` are B's panels, ``b`` A's; raises as :meth:`of`."""
        made = super().of(problem, tile)
        row_tiles, shares = tile.group_n // WGMMA_ROWS, tile.instruction_rows
        return replace(made, a=made.b, b=made.a, columns=tile.group_m, row_tiles=row_tiles, shares=shares)

    @property
    def registers(self) -> int:
        """Accumulators of a thread."""
        return self.row_tiles * self.registers_per_tile

    @property
    def registers_per_tile(self) -> int:
        """Accumulators of a thread for one instruction's rows."""
        return WGMMA_ROWS * self.columns // WARPGROUP

    @property
    def result_bytes(self) -> int:
        """A warpgroup's results in 16 bits."""
        return self.registers * WARPGROUP * 2

    @property
    def instruction(self) -> str:
        """The PTX instruction of all columns."""
        return self._instruction(self.columns)

    def _instruction(self, columns: int) -> str:
        ptx = PTX_TYPES[self.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{columns}k{STEP}.f32.{ptx}.{ptx}"

    def multiply(self, sums: Buffer, a: Expr, b: Expr, stage: Expr, accumulate: Expr) -> None:
        """Emit one k tile's instructions, committed as one group, which run on.

        ``a`` and ``b`` are the warpgroup's descriptors in stage 0; ``accumulate`` says whether there are sums to add
        to already. The sums must not be touched until :func:`retire`.
        """
        transposed = int(self.a.major == "n"), int(self.b.major == "n")
        with _one_group(sums):
            for step in range(self.a.depth // STEP):
                added = accumulate if step == 0 else T.bool(True)
                for row_tile in range(self.row_tiles):
                    rows = self.a.step_offset(step) + self.a.extent_offset(row_tile * WGMMA_ROWS)
                    column = 0
                    for share in self.shares or (self.columns,):  # sums of all columns lie as one instruction's would
                        first = row_tile * self.registers_per_tile + column * WGMMA_ROWS // WARPGROUP
                        own = [sums[first + i] for i in range(share * WGMMA_ROWS // WARPGROUP)]
                        columns = self.b.step_offset(step) + self.b.extent_offset(column)
                        operands = (self.moved(a, stage, rows), self.moved(b, stage, columns))
                        T.evaluate(T.ptx[self._instruction(share)](*own, *operands, added, 1, 1, *transposed))
                        column += share

    def multiply_beside_ring(self, sums: Buffer, a: Expr, b: Expr, stage: Expr) -> None:
        """Emit the same where a ring's stages hold B's tile alone and A's lies beside it; sums begin with it."""

        def operands(step: int) -> tuple[Expr, ...]:
            return a + T.uint64(self.a.step_offset(step) // 16), self._b_in(stage, b, step)

        self._issue(sums, operands, T.bool(False), (int(self.a.major == "n"), int(self.b.major == "n")))

    def multiply_from_registers(self, sums: Buffer, packed: Buffer, b: Expr, stage: Expr, accumulate: Expr) -> None:
        """Emit the same where A is in registers, two elements in each of ``packed``, as accumulators lie.

        They must not be written to until :func:`retire`.
        """

        def operands(step: int) -> tuple[Expr, ...]:
            return *(packed[step * FRAGMENT + i] for i in range(FRAGMENT)), self._b_in(stage, b, step)

        keep(packed)
        self._issue(sums, operands, accumulate, (int(self.b.major == "n"),))
        keep(packed)

    def _b_in(self, stage: Expr, b: Expr, step: int) -> Expr:
        return b + T.Cast("uint64", (stage * self.b.bytes + self.b.step_offset(step)) // 16)

    def _issue(
        self,
        sums: Buffer,
        operands: Callable[[int], tuple[Expr, ...]],
        accumulate: Expr,
        transposed: tuple[int, ...],
    ) -> None:
        with _one_group(sums):
            for step in range(self.b.depth // STEP):
                added = accumulate if step == 0 else T.bool(True)
                own = [sums[i] for i in range(self.registers)]
                T.evaluate(T.ptx[self.instruction](*own, *operands(step), added, 1, 1, *transposed))


@contextmanager
def _one_group(sums: Buffer) -> Iterator[None]:
    """Emit what lies around instructions that add to ``sums`` and are awaited together."""
    keep(sums)
    T.evaluate(T.ptx.wgmma.fence.sync.aligned())
    yield
    T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
    keep(sums)


def retire(sums: Buffer, in_flight: int) -> None:
    """Emit the wait until at most ``in_flight`` groups of this warpgroup's instructions are unfinished."""
    T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(in_flight))
    keep(sums)


def keep(registers: Buffer) -> None:
    """Emit an empty instruction that uses each of them: the compiler moves no use of them across that place.

    It knows nothing of instructions that run on. Registers are a thread's sums, or 16-bit pairs.
    """
    count = int(registers.shape[0])
    what, kind, constraint = _KINDS[str(registers.dtype)]
    name = f"keep_{count}_{what}"
    text = _KEEP.format(name=name, what=what, type=kind, count=count, constraint=constraint)
    T.evaluate(T.cuda.func_call(name, registers.data, source_code=text))
