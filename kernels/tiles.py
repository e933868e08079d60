"""The tiles of Hopper's explicit kernels, what all kernels fed by TMA share, and every limit that they must keep."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tvm.target import Target

from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.isa import (
    PANEL,
    ROW_BYTES,
    SHARED_KIB,
    WARPGROUP,
    WGMMA_ROWS,
    WGMMA_WIDTHS,
    WIDEST,
    wgmma_misfits,
)
from tensorir_ladder.schedules.tiles import (
    BLOCK_REGISTERS,
    REGISTERS_PER_THREAD,
    WGMMA_REGISTERS,
    BlockTile,
    Choice,
    WarpgroupTile,
    indivisible,
)
from tensorir_ladder.schedules.workloads import Matmul

if TYPE_CHECKING:
    from typing import Self

BARRIER_BYTES = 8
RESULT_BOXES = 2  # of 64 × 64 results, that a warpgroup of a kernel with roles has
ENOUGH_STAGES = 6  # results give up room of their own for so many: with 3 stages kernels took up to 1.13 times as long
REGISTER_STEP = 8  # a thread's registers come in steps of so many
PRODUCER_REGISTERS = 40
MOST_CONSUMER_REGISTERS = 240
MOST_CONSUMERS = 3
INSTRUCTION_REGISTERS = 26  # beside an instruction's sums, for which ptxas takes no more than threads are launched with
MOST_PARTS = 8  # blocks of a cluster that every GPU with clusters can hold
SUM_BYTES = 4
SUM_PAD = 4  # floats behind a row of an exchanged tile's sums
MOST_RESIDENT = 4  # blocks of a swapped product's kernel that a multiprocessor is asked to hold at once


def _in_steps(registers: int) -> int:
    return registers // REGISTER_STEP * REGISTER_STEP


def _launch_registers(consumers: int) -> int:
    return min(_in_steps(BLOCK_REGISTERS // ((consumers + 1) * WARPGROUP)), MOST_CONSUMER_REGISTERS)


@dataclass(frozen=True)
class TmaTile(BlockTile):
    """A tile that TMA loads: the target that has its instruction, the sides of a box, and the ring's bytes."""

    ARCH: ClassVar[str]
    INSTRUCTION: ClassVar[str]

    @property
    def group_n(self) -> int:
        """Columns of one instruction."""
        raise NotImplementedError

    @property
    def reads_parts_of_panels(self) -> bool:
        """True where the kernel takes columns of a B stored [k, n], and of results, that are no whole panels."""
        return False

    @classmethod
    def missing(cls, target: Target) -> str:
        """Return a clause for every target but the one that has TMA and the instruction."""
        arch = str(target.attrs.get("arch", target.kind.name))
        return "" if arch == cls.ARCH else f"{arch} has no {cls.INSTRUCTION} fed by TMA, which is {cls.ARCH}'s"

    def counts(self, problem: Matmul) -> tuple[int, int, int]:
        """Return rows and columns of tiles that a product's output has, and k tiles."""
        return tuple(-(-size // part) for size, part in zip((problem.m, problem.n, problem.k), self.block))

    def oversized(self) -> list[str]:
        """Return a clause for each side that is longer than a TMA box."""
        sides = (("rows", self.block_m), ("columns", self.block_n), ("k steps", self.block_k))
        return [f"{size} {side} of the block, limit {WIDEST} of a TMA box" for side, size in sides if size > WIDEST]

    def pool_bytes(self, itemsize: int, stages: int) -> int:
        """Return the ring's shared memory; results of 16 bits are collected in the same bytes afterwards."""
        return max(BlockTile.smem_bytes(self, itemsize, stages), self.block_m * self.block_n * 2)

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Return the shared memory of a block: :meth:`pool_bytes`, and a barrier for each stage."""
        return self.pool_bytes(itemsize, stages) + stages * BARRIER_BYTES

    def violations(self, target: Target, itemsize: int = 2, stages: int = 1) -> list[str]:
        """Return every limit of ``target`` that this tile breaks, and operands that are not the instruction's."""
        found = BlockTile.violations(self, target, itemsize, stages)
        if itemsize != 2:
            found.insert(0, f"elements of {itemsize} bytes, where this {self.INSTRUCTION} multiplies 16-bit ones")
        return found


@dataclass(frozen=True)
class HopperTile(TmaTile, WarpgroupTile):
    """Warpgroups that share the block tile, as :class:`schedules.tiles.WarpgroupTile`, loaded by TMA.

    Written ``128x256x64/2x1``: two warpgroups, each with 64 rows and all 256 columns.
    """

    @property
    def cluster(self) -> tuple[int, int]:
        """Blocks of a cluster that share their loads: below each other, and beside; only some tiles have more."""
        return 1, 1

    @property
    def shared_by(self) -> int:
        """Blocks of a cluster that share their loads."""
        return self.cluster[0] * self.cluster[1]

    @property
    def group_n(self) -> int:
        """Columns of one warpgroup, which are its instruction's width."""
        return self.block_n // self.warpgroups[1]

    def misfits(self) -> list[str]:
        """Return what does not fit warpgroups, wgmma or TMA."""
        return WarpgroupTile.misfits(self) + self.oversized()


@dataclass(frozen=True)
class RoleTile(HopperTile):
    """The tile of kernels whose warpgroups have roles: a producer beside consumers, results in boxes of their own.

    With more fields, the text is another tile's: ``16x128x64/1x2/4`` a :class:`SwappedTile`'s, ``64x72x64/1x1/4x2``
    and ``64x88x64/1x1/1x1/7`` a :class:`ClusterTile`'s.
    """

    LEFT_OUT: ClassVar[str] = ""  # the last field where it says nothing, which texts may leave out

    @classmethod
    def _match(cls, text: str) -> re.Match[str] | None:
        return super()._match(text) or super()._match(text.strip() + cls.LEFT_OUT)

    def __str__(self) -> str:
        return super().__str__().removesuffix(self.LEFT_OUT)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a tile, of one of the classes below where the text is one's; IllegalTile shows the form of others."""
        if cls is RoleTile:
            for family in (SwappedTile, ClusterTile):
                if family._match(text):
                    return family.parse(text)
        return super().parse(text)

    @property
    def reads_parts_of_panels(self) -> bool:
        """True where no other warpgroup's columns begin within a panel."""
        return self.warpgroups[1] == 1

    @property
    def swapped(self) -> bool:
        """True where weights are the instruction's rows: a :class:`SwappedTile`."""
        return False

    @property
    def parts(self) -> int:
        """Blocks of a cluster that have a part of the reduction each; only some tiles have more than one."""
        return 1

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster: those that share loads, of each part of the reduction."""
        return self.parts * self.shared_by

    @property
    def sum_pitch(self) -> int:
        """Floats from one row of the tile's sums in shared memory to the next, where these are of parts.

        So many that no two threads of a warp store to the same bank: two columns each of 8 rows, half of them at once.
        """
        return self.block_n + (-self.block_n + 8) % 16

    @property
    def sum_bytes(self) -> int:
        """Shared memory of the tile's sums of a part."""
        return self.block_m * self.sum_pitch * SUM_BYTES

    def check_not_swapped(self) -> None:
        """Raise IllegalTile for a tile of a kernel that exchanges the operands."""
        if self.swapped:
            raise IllegalTile(
                "this kernel does not exchange the operands",
                value=str(self),
                limit=RoleTile.FORM,
                remedy="leave out the third field, or take step 12",
            )

    def check_whole(self) -> None:
        """Raise IllegalTile for a tile of a kernel that divides the reduction among blocks of a cluster."""
        if self.parts > 1:
            raise IllegalTile(
                "this kernel does not divide the reduction among a cluster's blocks",
                value=str(self),
                limit="1 part",
                remedy="leave out the last field, or take step 12",
            )

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.warpgroups[0] * self.warpgroups[1]

    @property
    def threads(self) -> tuple[int, int]:
        """Warpgroups, the producer's with them, and their threads."""
        return self.consumers + 1, WARPGROUP

    @property
    def registers(self) -> int:
        """Registers that every thread is launched with, so that all of a block's fit; roles then exchange some.

        The compiler takes no more than a role asks for, nor than the launch bounds leave.
        """
        return _launch_registers(self.consumers)

    @property
    def consumer_share(self) -> int:
        """Registers of a consumer's thread: what all were launched with, less the producer's, divided in steps of 8.

        A block's pool holds only what its threads were launched with and have given back: a consumer that asks for
        more than is there waits for ever.
        """
        left = _launch_registers(self.consumers) * (self.consumers + 1) - PRODUCER_REGISTERS
        return min(_in_steps(left // self.consumers), MOST_CONSUMER_REGISTERS)

    @property
    def consumer_registers(self) -> int:
        """Accumulators, and what addresses take."""
        return self.group_m * self.group_n // WARPGROUP + WGMMA_REGISTERS

    @property
    def late_registers(self) -> int:
        """Registers of a consumer whose rounded results, half as many as its sums, have registers of their own."""
        return self.consumer_registers + self.group_m * self.group_n // (2 * WARPGROUP)

    @property
    def leaves_late(self) -> bool:
        """True where a consumer has registers for one tile's results beside the next one's sums."""
        return self.late_registers <= self.consumer_share

    def misfits(self) -> list[str]:
        """Return also more consumers than registers can be shared out among."""
        found = super().misfits()
        if self.consumers > MOST_CONSUMERS:
            found.append(f"{self.consumers} consumer warpgroups, limit {MOST_CONSUMERS}")
        elif self.consumer_registers > self.consumer_share:
            found.append(f"{self.consumer_registers} registers a consumer, limit {self.consumer_share}")
        elif (one := self.group_n // 2 + INSTRUCTION_REGISTERS) > self.registers:
            found.append(f"{one} registers for one instruction, limit {self.registers} of a thread at launch")
        return found

    def pool_bytes(self, itemsize: int, stages: int) -> int:
        """Return the shared memory of the ring's stages alone.

        With B's columns in whole panels, as one stored [k, n] takes: more than one stored [n, k] does.
        """
        return stages * self.stage_bytes(itemsize)

    def stage_bytes(self, itemsize: int, nt: bool = False) -> int:
        """Return the shared memory of a stage; ``nt`` where it is known that B is stored [n, k]."""
        in_panels = self.reads_parts_of_panels and not nt
        columns = -(-self.block_n // PANEL) * PANEL if in_panels else self.block_n
        return (self.block_m + columns) * self.block_k * itemsize

    @property
    def box_bytes(self) -> int:
        """Shared memory of two boxes of results for each consumer."""
        return self.consumers * RESULT_BOXES * WGMMA_ROWS * ROW_BYTES

    @property
    def boxes_at_least(self) -> int:
        """Boxes of results that a consumer takes: one where these leave before the next tile's products, else two."""
        return RESULT_BOXES if self.leaves_late else 1

    def kept_bytes(self, itemsize: int, stages: int, boxes: int = 0) -> int:
        """Return the shared memory of a block whose results lie beside the ring, as those of blocks that stay do.

        Stages with two barriers each, and ``boxes`` for each consumer: as few as it can do with if 0.
        """
        result_bytes = self.box_bytes // RESULT_BOXES * (boxes or self.boxes_at_least)
        return self.pool_bytes(itemsize, stages) + result_bytes + 2 * stages * BARRIER_BYTES

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Return the shared memory of a block: results of its only tile lie in the ring where that has to be.

        Of a B stored [n, k]: one stored [k, n] may take more, whole panels, as kernels check (:meth:`check_room`).
        """
        pool, barriers = stages * self.stage_bytes(itemsize, nt=True), 2 * stages * BARRIER_BYTES
        beside = pool + self.box_bytes + barriers
        return beside if beside <= _room(1) else max(pool, self.box_bytes) + barriers

    def check_room(self, stages: int, stage_bytes: int, result_bytes: int, in_ring: bool = False) -> None:
        """Raise IllegalTile for a ring that is too large, with results beside it or, ``in_ring``, in its memory."""
        ring, barriers = stages * stage_bytes, 2 * stages * BARRIER_BYTES
        taken = (max(ring, result_bytes) if in_ring else ring + result_bytes) + barriers
        if taken > _room(1):
            raise IllegalTile(
                f"tile {self} is illegal: {taken} bytes of shared memory in {stages} stage(s)"
                + ("" if in_ring else ", with results beside them"),
                limit=_room(1),
                remedy="choose smaller tiles or fewer stages",
            )

    def boxes_in_ring(self, stages: int, stage_bytes: int) -> bool:
        """Tell whether boxes of a block's only tile lie in the ring's memory: where stages leave no room beside it."""
        return stages * (stage_bytes + 2 * BARRIER_BYTES) + self.box_bytes > _room(1)


@dataclass(frozen=True)
class ClusterTile(RoleTile):
    """The tile of kernels with roles whose blocks share their loads, the reduction, or both.

    Written ``64x72x64/1x1/4x2``: clusters of four blocks down and two across. Those beside each other load the same
    rows of A, those below each other the same columns of B, once for all of them (TMA multicast).

    With a fourth field, ``64x88x64/1x1/1x1/7``, the reduction is in 7 ``parts``, each a block of a cluster;
    ``192x152x64/3x1/2x1/2``: in 2 parts, each of two blocks below each other, which share their loads.
    """

    cluster: tuple[int, int] = (1, 1)
    parts: int = 1

    FORM: ClassVar[str] = "MxNxK/WGMxWGN/DOWNxACROSS/P"
    EXAMPLE: ClassVar[str] = "64x88x64/1x1/1x1/7"
    LEFT_OUT: ClassVar[str] = "/1"

    def misfits(self) -> list[str]:
        """Return also a cluster that is too large."""
        return super().misfits() + cluster_misfits(self.cluster, self.parts)

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Return the shared memory of a block: of parts, sums lie in the ring's memory, and there are no boxes."""
        if self.parts == 1:
            return super().smem_bytes(itemsize, stages)
        return max(stages * self.stage_bytes(itemsize, nt=True), self.sum_bytes) + 2 * stages * BARRIER_BYTES

    def kept_bytes(self, itemsize: int, stages: int, boxes: int = 0) -> int:
        """Return the shared memory of parts, for either form of B; else what results beside the ring take."""
        if self.parts == 1:
            return super().kept_bytes(itemsize, stages, boxes)
        return max(self.pool_bytes(itemsize, stages), self.sum_bytes) + 2 * stages * BARRIER_BYTES


def cluster_misfits(cluster: tuple[int, int], parts: int) -> list[str]:
    """Return a clause for more blocks, so many down and across of each part, than clusters of every GPU may have."""
    shared, found = cluster[0] * cluster[1], []
    if parts > MOST_PARTS:
        found.append(f"{parts} parts, limit {MOST_PARTS} blocks of a cluster")
    if shared > MOST_PARTS:
        found.append(f"{shared} blocks that share their loads, limit {MOST_PARTS} of a cluster")
    if not found and parts * shared > MOST_PARTS:
        found.append(f"{parts} parts of {shared} blocks that share their loads, limit {MOST_PARTS} blocks of a cluster")
    return found


@dataclass(frozen=True)
class SwappedTile(RoleTile):
    """The tile of the kernel with roles that exchanges the operands: Cᵀ = Bᵀ · Aᵀ, for products of few rows.

    Written ``16x128x64/1x2/4``: 16 rows and 128 columns of the output to a block, 64 columns to each of two warpgroups,
    and the reduction in 4 ``parts``, each a block of a cluster. B's columns are the instruction's 64 rows, and A's rows
    its columns, which come by the eight.

    With a fourth field, ``72x64x64/1x1/1/2x4``, a ``cluster`` is two blocks down and four across: those beside each
    other load the same rows of A, those below each other the same columns of B, once for all of them (TMA multicast).
    With both, ``152x192x64/1x3/2/2x1``, it is so many blocks of each part.
    """

    parts: int = 1
    cluster: tuple[int, int] = (1, 1)

    FORM: ClassVar[str] = "MxNxK/WGMxWGN/P/DOWNxACROSS"
    EXAMPLE: ClassVar[str] = "72x64x64/1x1/1/2x4"
    LEFT_OUT: ClassVar[str] = "/1x1"

    @property
    def swapped(self) -> bool:
        """True."""
        return True

    @property
    def reads_parts_of_panels(self) -> bool:
        """False: B's columns are the instruction's rows."""
        return False

    @property
    def turned(self) -> RoleTile:
        """The tile of the product as the instruction sees it: B's columns down, A's rows across."""
        return RoleTile((self.block_n, self.block_m, self.block_k), self.warpgroups[::-1])

    @property
    def registers(self) -> int:
        """Registers that every thread is launched with.

        As many as a consumer needs; an equal share of all where ``roles_exchange`` some.
        """
        return super().registers if self.roles_exchange else self.late_registers

    @property
    def instruction_rows(self) -> tuple[int, ...]:
        """The tile's rows that each of a consumer's instructions has: all, or half, where all take too many registers.

        Roles exchange registers, but ptxas holds an instruction to those of the launch (:data:`INSTRUCTION_REGISTERS`).
        """
        if self.group_m // 2 + INSTRUCTION_REGISTERS <= self.registers:
            return (self.group_m,)
        first = -(-self.group_m // (2 * WGMMA_WIDTHS)) * WGMMA_WIDTHS
        return (first, self.group_m - first)

    @property
    def roles_exchange(self) -> bool:
        """True where consumers need more registers than an equal share, and have them if the producer gives up some."""
        equal = min(BLOCK_REGISTERS // self.threads_per_block, REGISTERS_PER_THREAD)
        return self.late_registers > equal and self.consumer_registers <= self.consumer_share

    def misfits(self) -> list[str]:
        """Return what does not fit warpgroups, wgmma with its operands exchanged, TMA, or a cluster."""
        rows, columns = self.warpgroups
        sides = (
            ("rows of the block", self.block_m, "warpgroups along rows", rows),
            ("columns of the block", self.block_n, "warpgroups along columns", columns),
        )
        found = indivisible(sides) + self.oversized()
        if not found:
            clauses = wgmma_misfits(self.group_n, self.group_m, self.block_k)
            found += [f"with operands exchanged, {clause}" for clause in clauses]
        if self.consumers > MOST_CONSUMERS:
            found.append(f"{self.consumers} consumer warpgroups, limit {MOST_CONSUMERS}")
        return found + cluster_misfits(self.cluster, self.parts)

    @property
    def sum_pitch(self) -> int:
        """As of upright tiles; here a thread stores one sum at once, a warp 8 columns of every other of 8 rows."""
        return self.block_n + SUM_PAD

    @property
    def result_bytes(self) -> int:
        """Return the block's shared memory for results: in float32 where the sums are of parts, else rounded."""
        return self.sum_bytes if self.parts > 1 else self.block_m * self.block_n * 2

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Return the shared memory of a block: stages with two barriers each, and results, beside them or within."""
        ring, results = self.pool_bytes(itemsize, stages), self.result_bytes
        within = self.results_in_ring(itemsize, stages)
        return (max(ring, results) if within else ring + results) + 2 * stages * BARRIER_BYTES

    def kept_bytes(self, itemsize: int, stages: int, boxes: int = 0) -> int:
        """Return the shared memory of a block: there are none that stay."""
        return self.smem_bytes(itemsize, stages)

    def results_in_ring(self, itemsize: int, stages: int) -> bool:
        """Tell whether results lie in the ring's memory: those of parts, or where stages leave them none beside it."""
        beside = self.pool_bytes(itemsize, stages) + self.result_bytes + 2 * stages * BARRIER_BYTES
        return self.parts > 1 or beside > _room(1)

    def resident(self, itemsize: int, stages: int) -> int:
        """Return how many blocks a multiprocessor holds at once, by shared memory and registers: 1 to 4."""
        by_shared = (SHARED_KIB[90] + 1) * 1024 // (self.smem_bytes(itemsize, stages) + 1024)  # 1 KiB is the driver's
        by_registers = BLOCK_REGISTERS // (self.threads_per_block * (_in_steps(self.registers - 1) + REGISTER_STEP))
        return max(1, min(by_shared, by_registers, MOST_RESIDENT))


def most_stages(tile: RoleTile, most: int, blocks: int = 1) -> int:
    """Return how many stages a tile of 16-bit operands has room for where so many blocks share a multiprocessor.

    Beside its results, as of blocks that stay. 0 where there is no room.
    """
    return next((stages for stages in range(most, 0, -1) if tile.kept_bytes(2, stages) <= _room(blocks)), 0)


def stages_of_one_tile(tile: RoleTile, most: int, nt: bool) -> int:
    """Return how many stages a tile of 16-bit operands has where it is its block's only one, upright.

    As many as have room beside the results; where these are few, those that have room where the results lie in the
    ring's memory once it is read (:meth:`RoleTile.boxes_in_ring`), up to ENOUGH_STAGES. ``nt`` as of
    :meth:`RoleTile.stage_bytes`. 0 where there is no room.
    """
    results, each = tile.sum_bytes if tile.parts > 1 else tile.box_bytes, tile.stage_bytes(2, nt)
    counts = range(min(most, ENOUGH_STAGES), 0, -1)
    within = (stages for stages in counts if max(stages * each, results) + 2 * stages * BARRIER_BYTES <= _room(1))
    return max(most_stages(tile, most), next(within, 0))


def _room(blocks: int) -> int:
    return SHARED_KIB[90] * 1024 // blocks - (0 if blocks == 1 else 1024)


# Tiles with their stages, large ones first: what steps 11 to 13 choose among.
RING_CHOICES = (
    Choice(HopperTile(block=(128, 256, 64), warpgroups=(2, 1)), stages=4),
    Choice(HopperTile(block=(128, 128, 64), warpgroups=(2, 1)), stages=6),
    Choice(HopperTile(block=(64, 128, 64), warpgroups=(1, 1)), stages=6),
    Choice(HopperTile(block=(64, 64, 64), warpgroups=(1, 1)), stages=6),
)
ROLE_CHOICES = (
    Choice(RoleTile(block=(128, 256, 64), warpgroups=(2, 1)), stages=4),
    Choice(RoleTile(block=(128, 128, 64), warpgroups=(2, 1)), stages=6),
    Choice(RoleTile(block=(64, 128, 64), warpgroups=(1, 1)), stages=8),
    Choice(RoleTile(block=(64, 64, 64), warpgroups=(1, 1)), stages=8),
)
