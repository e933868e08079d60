"""Hopper's warpgroup instruction: the multiplication, and its fragments.

``wgmma.mma_async`` multiplies 64 rows by n columns, 16 steps deep, for the four warps of a warpgroup. It reads both
operands from shared memory through 64-bit descriptors (:mod:`.panels`), and adds to registers while the warps go on.
Source: PTX ISA, "Asynchronous warpgroup level matrix instructions" (register fragments).
"""

from __future__ import annotations

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

_FENCE = """
__forceinline__ __device__ void {name}(float* sums) {{
#pragma unroll
  for (int i = 0; i < {count}; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
}}
"""


@dataclass(frozen=True)
class WarpgroupProduct(TileProduct):
    """The product as each warpgroup's instructions of 64 rows × ``columns``, one after the other along k.

    ``registers`` are the sums of a thread, those of one instruction together.
    """

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
        return replace(made, a=made.b, b=made.a, columns=tile.group_m, row_tiles=tile.group_n // WGMMA_ROWS)

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
        """The PTX instruction."""
        ptx = PTX_TYPES[self.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{STEP}.f32.{ptx}.{ptx}"

    def multiply(self, sums: Buffer, a: Expr, b: Expr, stage: Expr, accumulate: Expr) -> None:
        """Emit one k tile's instructions, committed as one group, which run on.

        ``a`` and ``b`` are the warpgroup's descriptors in stage 0; ``accumulate`` says whether there are sums to add
        to already. The sums must not be touched until :func:`retire`.
        """
        keep(sums)
        T.evaluate(T.ptx.wgmma.fence.sync.aligned())
        transposed = int(self.a.major == "n"), int(self.b.major == "n")
        for step in range(self.a.depth // STEP):
            added = accumulate if step == 0 else T.bool(True)
            for row_tile in range(self.row_tiles):
                first = row_tile * self.registers_per_tile
                own = [sums[first + i] for i in range(self.registers_per_tile)]
                rows = self.a.step_offset(step) + self.a.extent_offset(row_tile * WGMMA_ROWS)
                operands = (self.moved(a, stage, rows), self.moved(b, stage, self.b.step_offset(step)))
                T.evaluate(T.ptx[self.instruction](*own, *operands, added, 1, 1, *transposed))
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
