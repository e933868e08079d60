"""The tiles of Blackwell's explicit kernels, and every limit that they must keep.

Source: PTX ISA, "TensorCore 5th Generation Family Instructions" (shapes of kind::f16, tensor memory).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensorir_ladder.kernels.tiles import BARRIER_BYTES, TmaTile
from tensorir_ladder.schedules.isa import PANEL
from tensorir_ladder.schedules.tiles import WGMMA_REGISTERS, indivisible

TENSOR_ROWS = 128  # of one tcgen05.mma: tensor memory's lanes
TENSOR_COLUMNS = (32, 64, 128, 256, 512)  # of tensor memory, as many as can be allocated at once
ADDRESS_BYTES = 4  # of an address in tensor memory
LOADED_COLUMNS = 64  # of a row of sums that a thread takes from tensor memory at once, at most


@dataclass(frozen=True)
class BlackwellTile(TmaTile):
    """The block tile of one tcgen05.mma after the other: 128 rows, whose sums are in tensor memory.

    Written ``128x256x64``. A block has four warps for the results; each can read 32 of tensor memory's 128 lanes.
    """

    FORM: ClassVar[str] = "MxNxK"
    EXAMPLE: ClassVar[str] = "128x256x64"
    ARCH: ClassVar[str] = "sm_100a"
    INSTRUCTION: ClassVar[str] = "tcgen05.mma"

    @property
    def group_n(self) -> int:
        """Columns of one instruction: all of the block's."""
        return self.block_n

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory, 32 bits in each of 128 lanes, that the sums' allocation has."""
        return next(columns for columns in TENSOR_COLUMNS if columns >= self.block_n)

    @property
    def threads(self) -> tuple[int, int]:
        """The warps that take results from tensor memory, and their threads."""
        return TENSOR_ROWS // 32, 32

    @property
    def registers(self) -> int:
        """The part of a row of sums that a thread holds at once, the same rounded, and what addresses take."""
        return LOADED_COLUMNS * 3 // 2 + WGMMA_REGISTERS

    def misfits(self) -> list[str]:
        """Shapes that tcgen05.mma or TMA do not have."""
        found = indivisible(
            (
                ("columns of the block", self.block_n, "columns, tcgen05.mma's steps of width", 16),
                ("steps of the k tile", self.block_k, "elements in a swizzled row", PANEL),
            )
        )
        if self.block_m != TENSOR_ROWS:
            found.insert(0, f"{self.block_m} rows of the block, where one {self.INSTRUCTION} has {TENSOR_ROWS}")
        return found + self.oversized()

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Shared memory of a block: the ring, two barriers for each stage, one for the tile, and an address's word."""
        return super().smem_bytes(itemsize, stages) + (stages + 1) * BARRIER_BYTES + ADDRESS_BYTES
