"""Block tiles and thread tiles: splitting a contraction's loops and binding them to the GPU's grid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.inspection import is_constant, loop_extent, loop_name

if TYPE_CHECKING:
    from typing import Self

REGISTERS_PER_THREAD = 255
ADDRESSING_REGISTERS = 24  # what indices and loop counters take beside the tile, seen in these kernels' cubins
STATIC_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class BlockTile:
    """What every family of tiles shares: the block tile, ``block_m`` × ``block_n`` outputs, ``block_k`` steps deep.

    A family adds the tiles inside it as further fields, and says how it is written (``FORM``, one group of
    capitals per field, in order), what cannot be divided (:meth:`misfits`), how many threads it takes and
    about how many registers each. Everything that chooses among tiles asks :meth:`violations`, and nothing else.
    """

    block_m: int
    block_n: int
    block_k: int

    FORM: ClassVar[str]
    EXAMPLE: ClassVar[str]

    def __post_init__(self) -> None:
        smallest = min(self._sizes)
        if smallest < 1:
            raise IllegalTile(
                f"tile {self} has an extent below 1", value=smallest, limit="at least 1", remedy="give whole numbers"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the family's ``FORM``; raises IllegalTile with the form expected."""
        match = re.fullmatch(re.sub("[A-Z]+", r"(\\d+)", cls.FORM), text.strip())
        if not match:
            raise IllegalTile(
                "malformed tile", value=repr(text), limit=cls.FORM, remedy=f"write for example {cls.EXAMPLE}"
            )
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        sizes = iter(self._sizes)
        return re.sub("[A-Z]+", lambda _: str(next(sizes)), self.FORM)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, part.name) for part in fields(self))

    @property
    def block(self) -> tuple[int, int, int]:
        """Extents of the block tile along rows, columns and the reduction."""
        return self.block_m, self.block_n, self.block_k

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
        """What a thread sums up, as text: how many outputs."""
        return str(self.block_m * self.block_n // self.threads_per_block)

    def misfits(self) -> list[str]:
        """What does not divide into what, one clause each; empty if the tile is sound."""
        raise NotImplementedError

    @classmethod
    def missing(cls, target: Target) -> str:
        """The instruction of these tiles that ``target`` lacks, as a clause; empty if it has all they need."""
        return ""

    def smem_bytes(self, itemsize: int, stages: int = 1) -> int:
        """Shared memory for both operands' tiles, ``itemsize`` bytes an element, in ``stages`` ring slots."""
        return (self.block_m + self.block_n) * self.block_k * itemsize * stages

    def shared_scope(self, itemsize: int, stages: int = 1) -> str:
        """The storage scope that holds the tiles: "shared" up to 48 KiB, beyond it "shared.dyn"."""
        return "shared" if self.smem_bytes(itemsize, stages) <= STATIC_SHARED_BYTES else "shared.dyn"

    def violations(self, target: Target, itemsize: int = 4, stages: int = 1) -> list[str]:
        """Every limit of ``target`` that this tile breaks, one clause each; empty if it is legal.

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
        """Raise IllegalTile with every violated limit of ``target``; see :meth:`violations`."""
        found = self.violations(target, itemsize, stages)
        if found:
            raise IllegalTile(
                f"tile {self} is illegal: " + "; ".join(found), remedy="choose smaller tiles or fewer stages"
            )


def indivisible(parts: Iterable[tuple[str, int, str, int]]) -> list[str]:
    """A clause for each (what, size, of what, part) whose size is not a multiple of its part."""
    return [f"{size} {what} are not a multiple of {part} {of}" for what, size, of, part in parts if size % part]


@dataclass(frozen=True)
class TileConfig(BlockTile):
    """The block tile that one thread block computes, and each thread's part of it.

    ``block_m`` × ``block_n`` outputs per block, ``block_k`` steps of the reduction per shared-memory
    tile, ``thread_m`` × ``thread_n`` outputs per thread. Written ``64x64x16/4x4``.
    """

    block_m: int = 64
    block_n: int = 64
    block_k: int = 16
    thread_m: int = 4
    thread_n: int = 4

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

    @property
    def outputs(self) -> str:
        """What a thread sums up, as text: its rows and columns."""
        return f"{self.thread_m} × {self.thread_n}"

    def misfits(self) -> list[str]:
        """Block tiles that thread tiles do not divide."""
        return indivisible(
            (f"{role} of the block", block, f"{role} per thread", thread)
            for role, block, thread in (
                ("rows", self.block_m, self.thread_m),
                ("columns", self.block_n, self.thread_n),
            )
        )

    def one_output_per_thread(self) -> TileConfig:
        """The same threads and block_k, each thread with one output: the tile before register tiling."""
        rows, columns = self.threads
        return TileConfig(rows, columns, self.block_k, 1, 1)


@dataclass(frozen=True)
class TiledLoops:
    """The loops of a tiled contraction, by role, outermost first.

    ``block_*`` walk the grid's tiles, ``thread_*`` the threads of a block, ``k_outer`` the shared-memory
    tiles of the reduction, ``k_inner`` the steps inside one, ``register_*`` a thread's own outputs.
    """

    block_row: LoopRV
    block_column: LoopRV
    thread_row: LoopRV
    thread_column: LoopRV
    k_outer: LoopRV
    k_inner: LoopRV
    register_row: LoopRV
    register_column: LoopRV


def tile_contraction(sch: Schedule, rows: LoopRV, columns: LoopRV, reduction: LoopRV, tile: TileConfig) -> TiledLoops:
    """Cut a contraction's three loops into block tiles, thread tiles and k tiles, and reorder them.

    ::

        before   for i < M:  for j < N:  for k < K:  C[i, j] += ...
        after    for block_row < M / block_m:  for block_column < N / block_n:
                   for thread_row < block_m / thread_m:  for thread_column < block_n / thread_n:
                     for k_outer < K / block_k:
                       for k_inner < block_k:
                         for register_row < thread_m:  for register_column < thread_n:  C[...] += ...

    Counts round up where they do not divide; TVM then guards the block with predicates
    (:func:`schedules.loops.layout.pad_to_tile` avoids these). Loops around ``rows`` (a batch) stay outside.

    Raises
    ------
    IllegalTile : if the thread tile does not divide the block tile.
    """
    for role, block, thread in (("rows", tile.block_m, tile.thread_m), ("columns", tile.block_n, tile.thread_n)):
        if block % thread:
            raise IllegalTile(
                f"the block tile's {role} are not a multiple of the thread tile's",
                value=f"{block} and {thread}",
                remedy="make the first a multiple of the second",
            )
    threads_m, threads_n = tile.threads
    block_row, thread_row, register_row = sch.split(rows, [None, threads_m, tile.thread_m])
    block_column, thread_column, register_column = sch.split(columns, [None, threads_n, tile.thread_n])
    k_outer, k_inner = sch.split(reduction, [None, tile.block_k])
    loops = TiledLoops(
        block_row, block_column, thread_row, thread_column, k_outer, k_inner, register_row, register_column
    )
    sch.reorder(*vars(loops).values())
    return loops


def bind_grid(sch: Schedule, loops: Sequence[LoopRV]) -> LoopRV:
    """Spread adjacent loops over the grid, one thread block per iteration.

    ::

        before   for batch:  for block_row:  for block_column:  ...
        after    for tile < batch·rows·columns, bound to blockIdx.x:  ...

    One grid dimension, in row-major order, because blockIdx.x alone reaches 2³¹ − 1 where blockIdx.y
    stops at 65535. Returns the fused loop.
    """
    tiles = sch.fuse(*loops) if len(loops) > 1 else loops[0]
    sch.bind(tiles, "blockIdx.x")
    return tiles


def raster_blocks(sch: Schedule, row: LoopRV, column: LoopRV, group: int) -> list[LoopRV]:
    """Let ``group`` rows of blocks run side by side, so that blocks that run together share operands in the L2 cache.

    ::

        before   for row < 32:  for column < 32:  ...
        after    for row_group < 4:  for column < 32:  for row_in_group < 8:  ...                # group = 8

    132 blocks at once then touch 8 rows and 17 columns of tiles instead of 5 and 32. A group that does not divide
    the rows is lowered to the next divisor. Where the number of rows is known at run time only, ``group`` columns run
    side by side in their place. Returns the loops, for :func:`bind_grid`.

    Raises
    ------
    IllegalSchedule : if ``group`` is below 1.
    """
    if group < 1:
        raise IllegalSchedule(
            "a group of fewer than one row",
            loop=loop_name(sch, row),
            value=group,
            limit=1,
            remedy="give 1 for row order",
        )
    grouped, other = (row, column) if is_constant(sch.get(row).extent) else (column, row)
    extent = loop_extent(sch, grouped)
    divisor = max(d for d in range(1, min(group, extent) + 1) if extent % d == 0)
    if divisor == 1:
        return [row, column]
    outer, inner = sch.split(grouped, [None, divisor])
    sch.reorder(outer, other, inner)
    return [outer, other, inner]


def bind_threads(sch: Schedule, row: LoopRV, column: LoopRV) -> None:
    """Run two nested loops as the threads of a block: ``row`` as threadIdx.y, ``column`` as threadIdx.x.

    Consecutive iterations of ``column`` become neighbouring lanes of a warp. Raises IllegalSchedule
    beyond 1024 threads.
    """
    threads = loop_extent(sch, row) * loop_extent(sch, column)
    if threads > 1024:
        raise IllegalSchedule(
            "more threads than a block can have",
            loop=f"{loop_name(sch, row)}, {loop_name(sch, column)}",
            value=threads,
            limit=1024,
            remedy="split the loops further",
        )
    sch.bind(row, "threadIdx.y")
    sch.bind(column, "threadIdx.x")


@dataclass(frozen=True)
class ElementLoops:
    """Loops of a block with one output element per thread: the fused grid loop and the thread loops."""

    grid: LoopRV
    thread_row: LoopRV
    thread_column: LoopRV


def bind_elements(sch: Schedule, block: SBlockRV, threads: tuple[int, int] = (16, 16)) -> ElementLoops:
    """Give every output element of a block its own thread, ``threads`` (rows, columns) to a block.

    ::

        before   for i < M:  for j < N:  for k < K:  C[i, j] += ...
        after    for tile, bound to blockIdx.x:
                   for row < 16, bound to threadIdx.y:  for column < 16, bound to threadIdx.x:
                     for k < K:  C[...] += ...

    The last two spatial loops become rows and columns (a block with one spatial loop has one row),
    earlier ones join the grid. Ragged edges are predicated.
    """
    spatial = [
        loop for loop, iterator in zip(sch.get_loops(block), sch.get(block).iter_vars) if iterator.iter_type == 0
    ]
    if not spatial:
        raise IllegalSchedule(
            "a block without spatial loops has no output elements to spread",
            block=str(sch.get(block).name_hint),
            remedy="schedule it by its reduction loops",
        )
    if len(spatial) == 1:
        spatial = list(sch.split(spatial[0], [1, None]))
    *outer, rows, columns = spatial
    tile_row, thread_row = sch.split(rows, [None, threads[0]])
    tile_column, thread_column = sch.split(columns, [None, threads[1]])
    sch.reorder(*outer, tile_row, tile_column, thread_row, thread_column)
    grid = bind_grid(sch, [*outer, tile_row, tile_column])
    bind_threads(sch, thread_row, thread_column)
    return ElementLoops(grid, thread_row, thread_column)
