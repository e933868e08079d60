"""The tiles of Hopper's explicit kernels, what all kernels fed by TMA share, and every limit that they must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tvm.target import Target

from tensorir_ladder.schedules.loops.tiling import BlockTile, indivisible
from tensorir_ladder.schedules.workloads import Matmul

LANES = 128  # threads of a warpgroup
ROWS = 64  # of one wgmma
STEPS = 16  # of one wgmma or tcgen05.mma, along k
PANEL = 64  # 16-bit elements in a swizzled row of 128 bytes
ROW_BYTES = 128
WIDEST = 256  # columns of one wgmma or tcgen05.mma; rows of one TMA box
ADDRESSING_REGISTERS = 40  # what descriptors, barriers and loop counters take beside the accumulators
BARRIER_BYTES = 8
RESULT_BOXES = 2  # of 64 × 64 results, that a warpgroup of a kernel with roles has
# By consumer warpgroups: what a block's 65536 registers leave each of their threads beside a producer, in steps of 8.
CONSUMER_REGISTERS = {1: 240, 2: 232, 3: 160}
PRODUCER_REGISTERS = 40
BLOCK_REGISTERS = 65536


@dataclass(frozen=True)
class TmaTile(BlockTile):
    """What tiles that TMA loads have in common: the target that has their instruction, and the ring's bytes."""

    ARCH: ClassVar[str]
    INSTRUCTION: ClassVar[str]

    @property
    def group_n(self) -> int:
        """Columns of one instruction."""
        raise NotImplementedError

    @classmethod
    def missing(cls, target: Target) -> str:
        """A clause for every target but the one that has TMA and the instruction."""
        arch = str(target.attrs.get("arch", target.kind.name))
        return "" if arch == cls.ARCH else f"{arch} has no {cls.INSTRUCTION} fed by TMA, which is {cls.ARCH}'s"

    def counts(self, problem: Matmul) -> tuple[int, int, int]:
        """Rows and columns of tiles that a product's output has, and k tiles."""
        return tuple(-(-size // part) for size, part in zip((problem.m, problem.n, problem.k), self.block))

    def oversized(self) -> list[str]:
        """A clause for each side that is longer than a TMA box."""
        sides = (("rows", self.block_m), ("columns", self.block_n), ("k steps", self.block_k))
        return [f"{size} {side} of the block, limit {WIDEST} of a TMA box" for side, size in sides if size > WIDEST]

    def pool_bytes(self, itemsize: int, stages: int) -> int:
        """Shared memory of the ring's slots; results of 16 bits are collected in the same bytes afterwards."""
        return max(super().smem_bytes(itemsize, stages), self.block_m * self.block_n * 2)

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Shared memory of a block: :meth:`pool_bytes`, and a barrier for each slot."""
        return self.pool_bytes(itemsize, stages) + stages * BARRIER_BYTES

    def violations(self, target: Target, itemsize: int = 2, stages: int = 1) -> list[str]:
        """Every limit of ``target`` that this tile breaks, and operands that are not the instruction's."""
        found = super().violations(target, itemsize, stages)
        if itemsize != 2:
            found.insert(0, f"elements of {itemsize} bytes, where this {self.INSTRUCTION} multiplies 16-bit ones")
        return found


@dataclass(frozen=True)
class HopperTile(TmaTile):
    """The block tile, and how many consumer warpgroups (128 threads) share it along rows and along columns.

    Written ``128x256x64/2x1``: two warpgroups, each with 64 rows and all 256 columns.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    groups_m: int = 2
    groups_n: int = 1

    FORM: ClassVar[str] = "MxNxK/WGMxWGN"
    EXAMPLE: ClassVar[str] = "128x256x64/2x1"
    ARCH: ClassVar[str] = "sm_90a"
    INSTRUCTION: ClassVar[str] = "wgmma"

    @property
    def group_m(self) -> int:
        """Rows of one warpgroup."""
        return self.block_m // self.groups_m

    @property
    def group_n(self) -> int:
        """Columns of one warpgroup, which are its instruction's width."""
        return self.block_n // self.groups_n

    @property
    def threads(self) -> tuple[int, int]:
        """Consumer warpgroups, and their threads."""
        return self.groups_m * self.groups_n, LANES

    @property
    def registers(self) -> int:
        """Accumulators, and what addresses take."""
        return self.group_m * self.group_n // LANES + ADDRESSING_REGISTERS

    def misfits(self) -> list[str]:
        """Warpgroups that do not divide the block, and shapes that wgmma or TMA do not have."""
        found = indivisible(
            (
                ("rows of the block", self.block_m, "warpgroups along rows", self.groups_m),
                ("columns of the block", self.block_n, "warpgroups along columns", self.groups_n),
                ("rows per warpgroup", self.group_m, "rows of a wgmma", ROWS),
                ("columns per warpgroup", self.group_n, "columns, wgmma's steps of width", 8),
                ("steps of the k tile", self.block_k, "elements in a swizzled row", PANEL),
            )
        )
        if self.group_n > WIDEST:
            found.append(f"{self.group_n} columns per warpgroup, limit {WIDEST}")
        return found + self.oversized()


@dataclass(frozen=True)
class RoleTile(HopperTile):
    """The tile of kernels whose warpgroups have roles: a producer beside consumers, results in boxes of their own."""

    EXAMPLE: ClassVar[str] = "128x256x64/2x1"

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.groups_m * self.groups_n

    @property
    def threads(self) -> tuple[int, int]:
        """Warpgroups, the producer's with them, and their threads."""
        return self.consumers + 1, LANES

    @property
    def registers(self) -> int:
        """What every thread is launched with, so that all of a block's fit; roles then exchange some."""
        return min(BLOCK_REGISTERS // self.threads_per_block // 8 * 8, max(CONSUMER_REGISTERS.values()))

    @property
    def consumer_registers(self) -> int:
        """Accumulators, half as many for rounded results that wait to be stored, and what addresses take."""
        return self.group_m * self.group_n * 3 // (2 * LANES) + ADDRESSING_REGISTERS

    def misfits(self) -> list[str]:
        """Also more consumers than registers can be shared out among."""
        found = super().misfits()
        if self.consumers not in CONSUMER_REGISTERS:
            found.append(f"{self.consumers} consumer warpgroups, limit {max(CONSUMER_REGISTERS)}")
        elif self.consumer_registers > CONSUMER_REGISTERS[self.consumers]:
            found.append(f"{self.consumer_registers} registers a consumer, limit {CONSUMER_REGISTERS[self.consumers]}")
        return found

    def pool_bytes(self, itemsize: int, stages: int) -> int:
        """Shared memory of the ring's slots alone."""
        return BlockTile.smem_bytes(self, itemsize, stages)

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Shared memory of a block: slots, each with two barriers, and two boxes of results for each consumer."""
        boxes = self.consumers * RESULT_BOXES * ROWS * ROW_BYTES
        return self.pool_bytes(itemsize, stages) + boxes + 2 * stages * BARRIER_BYTES
