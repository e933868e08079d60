"""Tiles: the part of a product that one thread block computes, and its shares of warps and threads.

One frozen dataclass for each way of sharing out. In code a tile has named fields; on the command line, in records and
in tables it is one text, the same fields in the same order, ``x`` inside a group and ``/`` between groups:

==================  ====================================================  ===============================
tile                in code                                               as text
==================  ====================================================  ===============================
of threads          ``ThreadTile(block=(32, 64, 16), thread=(4, 4))``     ``32x64x16/4x4``
of warps            ``WarpTile(block=(128, 128, 16), warp=(32, 128),      ``128x128x16/32x128/8x16/1``
                    thread=(8, 16), slices=1)``
of tensor cores     ``TensorCoreTile(block=(128, 128, 64),                ``128x128x64/64x64``
                    warp=(64, 64))``
of warpgroups       ``WarpgroupTile(block=(128, 256, 64),                 ``128x256x64/2x1``
                    warpgroups=(2, 1))``
==================  ====================================================  ===============================

``block`` is always the block tile: rows, columns, steps of the k tile. ``thread`` and ``warp`` are the rows and columns
of it that one thread or warp computes; ``warpgroups`` how many share it, along rows and along columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from tvm.target import Target

from tensorir_ladder.schedules import isa
from tensorir_ladder.schedules.errors import IllegalTile

if TYPE_CHECKING:
    from typing import Self

Formula = Literal["", "warps", "warpgroups", "boxes"]
REGISTERS_PER_THREAD = 255
STATIC_SHARED_BYTES = 48 * 1024
ADDRESSING_REGISTERS = 24  # what indices and loop counters take beside a thread's tile, seen in these kernels' cubins
FRAGMENT_REGISTERS = 22  # the same of mma: a warp tile of 64x96 takes 252 to 255 registers in all, and does not spill
SHORT_RING = 4  # stages of a ring of boxes (schedules/pipeline/box_rings.py) whose tiles are asked for sooner
WGMMA_REGISTERS = 40  # the same of wgmma: descriptors, copies' addresses or barriers, loop counters
BLOCK_REGISTERS = 65536  # of a multiprocessor: a block can have them all
SWAPPED_REGISTERS = 8  # beside these, where pairs of sums are two rows'
# So many outputs of a thread leave registers for 8 warps to a multiprocessor, two to a scheduler: too few to hide the
# latency of shared memory behind each other, as 16 warps of 64 outputs do.
OUTPUTS_TO_READ_AHEAD = 128
FLOAT_BYTES = 4  # of a WarpTile's operands and sums: two would share a bank of shared memory, were they smaller
SHORTER_PAYS = 0.01  # of the steps of a reduction's parts: what must be left out for parts of no whole k tiles
FLOATS = isa.VECTOR_BYTES // FLOAT_BYTES  # neighbouring columns of a thread, which it loads and stores at once


@dataclass(frozen=True)
class BlockTile:
    """The block tile: ``block`` = (rows, columns, steps of the k tile). Families of tiles add what is inside it.

    A family says how it is written (``FORM``, a group of capitals for each number, ``/`` between fields), what cannot
    be divided (:meth:`misfits`), how many threads it takes and about how many registers each. Everything that chooses
    among tiles asks :meth:`violations`, and nothing else.
    """

    block: tuple[int, int, int]

    FORM: ClassVar[str]
    EXAMPLE: ClassVar[str]

    def __post_init__(self) -> None:
        groups = [value if isinstance(value, tuple) else (value,) for value in vars(self).values()]
        sizes = [size for group in groups for size in group]
        if [len(group) for group in groups] != self._lengths() or not all(_is_whole(size) for size in sizes):
            raise IllegalTile(
                "a tile of other parts than its family's",
                value=", ".join(f"{name}={value!r}" for name, value in vars(self).items()),
                limit=self.FORM,
                remedy=f"give whole numbers, for example {self.parse(self.EXAMPLE)!r}",
            )
        if min(sizes) < 1:
            raise IllegalTile(
                f"tile {self} has an extent below 1",
                value=min(sizes),
                limit="at least 1",
                remedy="give whole numbers from 1 on",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the family's ``FORM``; IllegalTile shows it where the text is another."""
        match = cls._match(text)
        if not match:
            raise IllegalTile(
                "malformed tile", value=repr(text), limit=cls.FORM, remedy=f"write for example {cls.EXAMPLE}"
            )
        numbers = iter(map(int, match.groups()))
        groups = [tuple(next(numbers) for _ in range(length)) for length in cls._lengths()]
        fields: list[Any] = [group if len(group) > 1 else group[0] for group in groups]
        return cls(*fields)

    @classmethod
    def _match(cls, text: str) -> re.Match[str] | None:
        return re.fullmatch(re.sub("[A-Z]+", r"(\\d{1,18})", cls.FORM), text.strip())

    def __str__(self) -> str:
        return "/".join(
            "x".join(map(str, group if isinstance(group, tuple) else [group])) for group in vars(self).values()
        )

    @classmethod
    def _lengths(cls) -> list[int]:
        """Return how many numbers each field has."""
        return [group.count("x") + 1 for group in cls.FORM.split("/")]

    @property
    def block_m(self) -> int:
        """Rows of the block tile."""
        return self.block[0]

    @property
    def block_n(self) -> int:
        """Columns of the block tile."""
        return self.block[1]

    @property
    def block_k(self) -> int:
        """Steps of the k tile."""
        return self.block[2]

    @property
    def threads(self) -> tuple[int, int]:
        """Threads of one block: extents of threadIdx.y and threadIdx.x."""
        raise NotImplementedError

    @property
    def threads_per_block(self) -> int:
        """Threads of one block."""
        rows, columns = self.threads
        return rows * columns

    @property
    def registers(self) -> int:
        """About how many registers a thread needs: its tile, its operands and addressing."""
        raise NotImplementedError

    @property
    def steps_ahead(self) -> int:
        """Steps of the k tile whose operands a thread loads before it needs them, to hide latency by itself."""
        return 0

    @property
    def outputs(self) -> str:
        """Sums of a thread, as text: how many outputs."""
        return str(self.block_m * self.block_n // self.threads_per_block)

    def misfits(self) -> list[str]:
        """Return what does not divide, one clause each; empty if the tile is sound."""
        raise NotImplementedError

    @classmethod
    def check_family(cls, tile: BlockTile) -> None:
        """Raise IllegalTile for a tile of another family than this one."""
        if not isinstance(tile, cls):
            remedy = f"give for example {cls.EXAMPLE}"
            raise IllegalTile(f"not a {cls.__name__}", value=str(tile), limit=cls.FORM, remedy=remedy)

    def check_sound(self) -> None:
        """Raise IllegalTile with everything that does not divide."""
        if found := self.misfits():
            raise IllegalTile(f"tile {self} is illegal: " + "; ".join(found), remedy="choose multiples")

    @classmethod
    def missing(cls, target: Target) -> str:
        """Return a clause about the instruction of these tiles that ``target`` lacks; empty if it has all they need."""
        return ""

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Return the shared memory of both operands' tiles, ``itemsize`` bytes an element, in ``stages`` stages."""
        return (self.block_m + self.block_n) * self.block_k * itemsize * stages

    def shared_scope(self, itemsize: int, stages: int = 1) -> str:
        """Return the storage scope that holds the tiles: "shared" up to 48 KiB, beyond it "shared.dyn"."""
        return "shared" if self.smem_bytes(itemsize, stages) <= STATIC_SHARED_BYTES else "shared.dyn"

    def violations(self, target: Target, itemsize: int = 4, stages: int = 1) -> list[str]:
        """Return every limit of ``target`` that this tile breaks, one clause each; empty if it is legal.

        Limits a target does not state are taken as 1024 threads, 65536 registers and 48 KiB of shared memory.
        """
        found = [*filter(None, [self.missing(target)]), *self.misfits()]
        threads, max_threads = self.threads_per_block, int(target.attrs.get("max_threads_per_block", 1024))
        if threads > max_threads:
            found.append(f"{threads} threads per block, limit {max_threads}")
        if self.registers > REGISTERS_PER_THREAD:
            found.append(f"about {self.registers} registers per thread, limit {REGISTERS_PER_THREAD}")
        registers_per_block = int(target.attrs.get("registers_per_block", 65536))
        if self.registers <= REGISTERS_PER_THREAD and self.registers * threads > registers_per_block:
            found.append(f"about {self.registers * threads} registers per block, limit {registers_per_block}")
        smem = self.smem_bytes(itemsize, stages)
        max_smem = int(target.attrs.get("max_shared_memory_per_block", STATIC_SHARED_BYTES))
        if smem > max_smem:
            found.append(f"{smem} bytes of shared memory in {stages} stage(s), limit {max_smem}")
        return found

    def validate(self, target: Target, itemsize: int = 4, stages: int = 1) -> None:
        """Raise IllegalTile with the instruction that ``target`` lacks, or with every limit that the tile breaks."""
        if lacking := self.missing(target):
            raise IllegalTile(
                f"tile {self} needs what the target lacks: {lacking}",
                remedy="name one that has it (--arch), or take a step that does without",
            )
        found, misfits = self.violations(target, itemsize, stages), self.misfits()
        if found:
            remedies = ["choose multiples"] if misfits else []
            remedies += ["choose smaller tiles or fewer stages"] if len(found) > len(misfits) else []
            raise IllegalTile(f"tile {self} is illegal: " + "; ".join(found), remedy=", and ".join(remedies))


def indivisible(parts: Iterable[tuple[str, int, str, int]]) -> list[str]:
    """Return a clause for each (what, size, of what, part) whose size is not a multiple of its part."""
    return [f"{size} {what} are not a multiple of {part} {of}" for what, size, of, part in parts if size % part]


def _is_whole(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool)


class _ByThread(BlockTile):
    """Block tiles whose threads have ``thread`` = (rows, columns) of outputs each."""

    thread: tuple[int, int]

    @property
    def thread_m(self) -> int:
        """Rows of a thread."""
        return self.thread[0]

    @property
    def thread_n(self) -> int:
        """Columns of a thread."""
        return self.thread[1]

    @property
    def outputs(self) -> str:
        """Sums of a thread, as text: its rows and columns."""
        return f"{self.thread_m} × {self.thread_n}"


@dataclass(frozen=True)
class ThreadTile(_ByThread):
    """Threads that each compute ``thread`` = (rows, columns) of the block tile. Written ``64x64x16/4x4``."""

    thread: tuple[int, int]

    FORM: ClassVar[str] = "MxNxK/TMxTN"
    EXAMPLE: ClassVar[str] = "64x64x16/4x4"

    @property
    def threads(self) -> tuple[int, int]:
        """Threads of a block along rows and columns."""
        return self.block_m // self.thread_m, self.block_n // self.thread_n

    @property
    def registers(self) -> int:
        """Accumulators, one step's operands, addressing."""
        return self.thread_m * self.thread_n + self.thread_m + self.thread_n + ADDRESSING_REGISTERS

    def misfits(self) -> list[str]:
        """Return block tiles that thread tiles do not divide."""
        return indivisible(
            (
                ("rows of the block", self.block_m, "rows per thread", self.thread_m),
                ("columns of the block", self.block_n, "columns per thread", self.thread_n),
            )
        )

    def one_output_per_thread(self) -> ThreadTile:
        """Return the tile with the same threads and block_k, each thread with one output: before register tiling."""
        rows, columns = self.threads
        return ThreadTile(block=(rows, columns, self.block_k), thread=(1, 1))


@dataclass(frozen=True)
class WarpTile(_ByThread):
    """Warps that each compute ``warp`` of the block tile, whose lanes have ``thread`` outputs each.

    ``slices`` groups of warps share the block tile: each sums its own part of every k tile, and their sums are added
    in the end. Written ``128x128x32/32x64/8x8/1``. A warp's tile is 32 threads' tiles.
    """

    warp: tuple[int, int]
    thread: tuple[int, int]
    slices: int = 1

    FORM: ClassVar[str] = "MxNxK/WMxWN/TMxTN/S"
    EXAMPLE: ClassVar[str] = "128x128x32/32x64/8x8/1"

    @property
    def lanes(self) -> tuple[int, int]:
        """A warp's threads along rows and columns."""
        return self.warp[0] // self.thread_m, self.warp[1] // self.thread_n

    @property
    def warps(self) -> tuple[int, int]:
        """Warps of one slice along rows and columns."""
        return self.block_m // self.warp[0], self.block_n // self.warp[1]

    @property
    def threads(self) -> tuple[int, int]:
        """Warps of all slices (threadIdx.y) and their lanes (threadIdx.x)."""
        rows, columns = self.warps
        return rows * columns * self.slices, isa.WARP

    def steps_of_part(self, k: int, parts: int = 1) -> int:
        """Return how many steps of a reduction of ``k`` are computed in each of its parts.

        A whole one has its own; slices, which have steps in turn, as many as each other. One of several parts has whole
        k tiles, so that its rows begin with a cache line, unless a hundredth of them can be left out: 25 schedules took
        0.98 of the time so, where less was to leave out 6 took 1.02 (geometric means, on an H200).
        """
        if parts == 1 and self.slices == 1:
            return k
        turn = self.slices * self.steps_in_turn
        steps, tiles = (-(-k // (parts * whole)) * whole for whole in (turn, self.block_k))
        return steps if parts == 1 or tiles - steps >= SHORTER_PAYS * tiles else tiles

    @property
    def steps_in_turn(self) -> int:
        """Steps of k that a slice has before it is the next slice's turn: a vector, where its share is whole ones."""
        return math.gcd(FLOATS, self.block_k // self.slices)

    @property
    def steps_ahead(self) -> int:
        """1 for threads with so many outputs that few warps fit; 0 where warps hide each other's loads."""
        return 1 if self.thread_m * self.thread_n >= OUTPUTS_TO_READ_AHEAD else 0

    @property
    def registers(self) -> int:
        """Accumulators, the operands of one step and of those read ahead, addressing."""
        operands = (self.thread_m + self.thread_n) * (1 + self.steps_ahead)
        return self.thread_m * self.thread_n + operands + ADDRESSING_REGISTERS

    @property
    def outputs(self) -> str:
        """Sums of a thread, as text: its rows and columns, and how many others sum the same."""
        return super().outputs + (f", in {self.slices} slices" if self.slices > 1 else "")

    def misfits(self) -> list[str]:
        """Return what does not divide: blocks into warps, warps into 32 threads, k tiles into slices."""
        found = indivisible(
            (
                ("rows of the block", self.block_m, "rows per warp", self.warp[0]),
                ("columns of the block", self.block_n, "columns per warp", self.warp[1]),
                ("rows of a warp", self.warp[0], "rows per thread", self.thread_m),
                ("columns of a warp", self.warp[1], "columns per thread", self.thread_n),
                ("columns of a thread", self.thread_n, "columns of a vector", FLOATS),
                ("steps of the k tile", self.block_k, "slices", self.slices),
            )
        )
        rows, columns = self.lanes
        if rows * columns != isa.WARP:
            found.append(f"{rows} x {columns} threads of a warp, which has {isa.WARP}")
        if self.slices > 1:
            outputs = self.block_m * self.block_n
            adding = ("outputs of the block", outputs, "threads that add its slices up", self.threads_per_block)
            found += indivisible([adding]) if not found else []
        return found

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Return at most how much shared memory it takes: both operands' tiles, rows padded, in ``stages`` stages.

        TVM keeps a stage more of what is read ahead. Slices' sums take the place of one operand's stages in the end,
        which TVM makes the larger.
        """
        rows = self._row_bytes(itemsize, stages)
        return self.collected_bytes(itemsize, stages) if self.slices > 1 else (self.block_m + self.block_n) * rows

    def collected_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Return at most how much shared memory it takes with all results in it in the end, as slices' sums are."""
        rows = self._row_bytes(itemsize, stages)
        sums = FLOAT_BYTES * self.slices * self.block_m * self.block_n
        return max((self.block_m + self.block_n) * rows, min(self.block_m, self.block_n) * rows + sums)

    def _row_bytes(self, itemsize: int, stages: int) -> int:
        kept = stages + (self.steps_ahead if stages > 1 else 0)
        return (self.block_k + self._padding(itemsize)) * itemsize * kept

    def _padding(self, itemsize: int) -> int:
        """Elements by which a row along k is made longer to be an odd number of 16-byte vectors."""
        extra = isa.VECTOR_BYTES // itemsize
        return (extra - self.block_k) % (2 * extra)

    def shared_scope(self, itemsize: int, stages: int = 1) -> str:
        """Return "shared.dyn" with several slices, whose sums TVM lets take the operands' place; else as usual."""
        return "shared.dyn" if self.slices > 1 else super().shared_scope(itemsize, stages)


@dataclass(frozen=True)
class TensorCoreTile(BlockTile):
    """Warps that each multiply ``warp`` = (rows, columns) of the block tile by mma. Written ``128x128x32/64x64``."""

    warp: tuple[int, int]

    FORM: ClassVar[str] = "MxNxK/WMxWN"
    EXAMPLE: ClassVar[str] = "128x128x32/64x64"

    @property
    def warps(self) -> tuple[int, int]:
        """Warps of a block along rows and columns."""
        return self.block_m // self.warp[0], self.block_n // self.warp[1]

    @property
    def threads(self) -> tuple[int, int]:
        """Threads of a block as (warps, lanes): extents of threadIdx.y and threadIdx.x."""
        return self.warps[0] * self.warps[1], isa.WARP

    @property
    def registers(self) -> int:
        """Accumulators, operand fragments of one step of 16 (2 bytes an element), addresses: what it takes at least.

        A second set of fragments, where the schedule asks for one, is the compiler's to fit in.
        """
        rows, columns = self.warp
        return rows * columns // isa.WARP + (rows + columns) * 16 // 2 // isa.WARP + FRAGMENT_REGISTERS

    @classmethod
    def missing(cls, target: Target) -> str:
        """Return a clause for a target that is older than the instructions."""
        arch = re.fullmatch(r"sm_(\d+)a?", str(target.attrs.get("arch", "")))
        if not arch or int(arch.group(1)) >= isa.MMA_ARCH:
            return ""
        return f"{arch.group()} has no mma of these shapes, which begin with sm_{isa.MMA_ARCH}"

    def misfits(self) -> list[str]:
        """Return block tiles that warp tiles, and warp tiles that instructions, do not divide."""
        rows, columns = self.warp
        return indivisible(
            (
                ("rows of the block", self.block_m, "rows per warp", rows),
                ("columns of the block", self.block_n, "columns per warp", columns),
                ("rows per warp", rows, "rows of an instruction", isa.MmaInstruction.M),
                ("columns per warp", columns, "columns of two instructions", isa.MmaInstruction.N),
                ("steps of a k tile", self.block_k, "steps of an instruction", isa.STEP),
            )
        )


@dataclass(frozen=True)
class WarpgroupTile(BlockTile):
    """Warpgroups (128 threads) that share the block tile: so many along rows, and so many along columns.

    Written ``128x256x64/2x1``: two warpgroups, each with 64 rows and all 256 columns, its instruction's width.
    """

    warpgroups: tuple[int, int]

    FORM: ClassVar[str] = "MxNxK/WGMxWGN"
    EXAMPLE: ClassVar[str] = "128x256x64/2x1"
    ARCH: ClassVar[str] = isa.WGMMA_ARCH
    INSTRUCTION: ClassVar[str] = "wgmma"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a tile, a :class:`SwappedWarpgroupTile` where the text is one's; IllegalTile shows the other form."""
        if cls is WarpgroupTile and SwappedWarpgroupTile._match(text):
            return cast("Self", SwappedWarpgroupTile.parse(text))
        return super().parse(text)

    @property
    def swapped(self) -> bool:
        """True where columns of the product are the instruction's rows: a :class:`SwappedWarpgroupTile`."""
        return False

    @property
    def group_m(self) -> int:
        """Rows of one warpgroup."""
        return self.block_m // self.warpgroups[0]

    @property
    def group_n(self) -> int:
        """Columns of one warpgroup, which are its instruction's width."""
        return self.block_n // self.warpgroups[1]

    @property
    def threads(self) -> tuple[int, int]:
        """Warpgroups (threadIdx.y) and their threads (threadIdx.x)."""
        return self.warpgroups[0] * self.warpgroups[1], isa.WARPGROUP

    @property
    def registers(self) -> int:
        """Accumulators, and what addresses take."""
        return self.group_m * self.group_n // isa.WARPGROUP + WGMMA_REGISTERS

    @property
    def leaves_a_warp(self) -> bool:
        """True where a warp more, which multiplies nothing, leaves the others registers for their sums.

        It costs as much as a warpgroup: each of a multiprocessor's four parts has a quarter of all registers, which its
        warps share out alike.
        """
        groups = self.warpgroups[0] * self.warpgroups[1] + 1
        share = BLOCK_REGISTERS // (groups * isa.WARPGROUP)
        return self.registers + (SWAPPED_REGISTERS if self.swapped else 0) <= share

    def misfits(self) -> list[str]:
        """Return warpgroups that do not divide the block, and shapes the instruction does not have."""
        rows, columns = self.warpgroups
        parts = (
            ("rows of the block", self.block_m, "warpgroups along rows", rows),
            ("columns of the block", self.block_n, "warpgroups along columns", columns),
        )
        return indivisible(parts) + isa.wgmma_misfits(self.group_m, self.group_n, self.block_k)

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Return at most how much shared memory it takes: columns of each warpgroup in whole panels, of B [k, n]."""
        columns = -(-self.group_n // isa.PANEL) * isa.PANEL * self.warpgroups[1]
        return (self.block_m + columns) * self.block_k * itemsize * stages

    def shared_scope(self, itemsize: int, stages: int = 1) -> str:
        """Return "shared.dyn": the instruction's panels need 1024-byte boundaries, which begin there."""
        return "shared.dyn"

    @classmethod
    def missing(cls, target: Target) -> str:
        """Return a clause for every target but the one that has the instruction."""
        arch = str(target.attrs.get("arch", target.kind.name))
        return "" if arch == cls.ARCH else f"{arch} has no {cls.INSTRUCTION}, which is {cls.ARCH}'s"

    def violations(self, target: Target, itemsize: int = 2, stages: int = 1) -> list[str]:
        """Return every limit of ``target`` that this tile breaks, and operands that are not the instruction's."""
        found = super().violations(target, itemsize, stages)
        if itemsize != 2:
            found.insert(0, f"elements of {itemsize} bytes, where this {self.INSTRUCTION} multiplies 16-bit ones")
        return found


@dataclass(frozen=True)
class SwappedWarpgroupTile(WarpgroupTile):
    """Warpgroups whose instruction multiplies B by A: its rows, 64 and more, are columns of the product.

    Written ``104x64x64swapped/1x1``: a warpgroup with 104 rows, its instruction's width, and 64 columns. For products
    whose rows a multiple of 8 fits better than one of 64, and for few rows.
    """

    FORM: ClassVar[str] = "MxNxKswapped/WGMxWGN"
    EXAMPLE: ClassVar[str] = "104x64x64swapped/1x1"

    def __str__(self) -> str:
        block, warpgroups = super().__str__().split("/")
        return f"{block}swapped/{warpgroups}"

    @property
    def swapped(self) -> bool:
        """True: see the class."""
        return True

    def misfits(self) -> list[str]:
        """Return warpgroups that do not divide the block, and shapes the instruction does not have, swapped."""
        rows, columns = self.warpgroups
        parts = (
            ("rows of the block", self.block_m, "warpgroups along rows", rows),
            ("columns of the block", self.block_n, "warpgroups along columns", columns),
        )
        clauses = isa.wgmma_misfits(self.group_n, self.group_m, self.block_k)
        return indivisible(parts) + [f"with operands swapped, {clause}" for clause in clauses]


@dataclass(frozen=True)
class Choice:
    """A tile with its stages: how many k tiles of both operands a block keeps in shared memory."""

    tile: BlockTile
    stages: int


@dataclass(frozen=True, eq=False)
class TileSet:
    """The tiles that a step takes, and which of them are chosen among. Steps that are tiled alike share one.

    Without measuring, :func:`schedules.plans.choose` takes one of ``choices``, or the ``default``, by the ``formula``
    of that name in :mod:`schedules.cycles`: of tiles of warps on ordinary cores; of warpgroups whose threads bring
    operands; of warpgroups whose operands TMA brings as boxes; without a name by ``cost(choice, problem, machine)``,
    :func:`schedules.cost.block_tile_cost` if None. ``best`` are those that ``--tile best`` measures, and ``tuning``
    those that ``tune`` does, in likely order. Two sets are the same if they are the same object.
    """

    default: Choice
    choices: tuple[Choice, ...]
    best: tuple[BlockTile, ...]
    tuning: tuple[BlockTile, ...]
    formula: Formula = ""
    cost: Callable[..., float] | None = None

    @classmethod
    def of(
        cls,
        *choices: Choice,
        more: Iterable[BlockTile] = (),
        formula: Formula = "",
        cost: Callable[..., float] | None = None,
    ) -> Self:
        """Make a set of ``choices``, the first of which is the default; ``more`` are for tuning only."""
        best = tuple(dict.fromkeys(choice.tile for choice in choices))
        tuning = tuple(dict.fromkeys((*best, *more)))
        return cls(choices[0], choices, best, tuning, formula, cost)

    @property
    def kind(self) -> type[BlockTile]:
        """The family that all its tiles belong to."""
        return type(self.default.tile)
