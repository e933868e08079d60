"""Cycles that a product's schedule takes by its tile and what it does beside it: formulas, and what trees add.

A formula for each way to multiply and to bring operands: by warps on ordinary cores, by warpgroups whose threads bring
operands, by warpgroups whose operands TMA brings as boxes. Schedules are priced as arrays, many at once. What formulas
leave of measured times depends on how a shape's tiles, rounds of blocks and k tiles end; trees (:mod:`.trees`) say that
where the machine has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorir_ladder.schedules.cost import (
    CLOCK_GHZ,
    LATENCY_CYCLES,
    PART_BYTES,
    STORED_BYTES,
    Machine,
    adding_cycles,
)
from tensorir_ladder.schedules.isa import (
    PANEL,
    PARTITIONS,
    PIECE_ROWS,
    ROW_BYTES,
    SECTOR_BYTES,
    VECTOR_BYTES,
    WARP,
    WARPGROUP,
    WGMMA_ROWS,
)
from tensorir_ladder.schedules.tiles import (
    SHORT_RING,
    SHORTER_PAYS,
    Choice,
    WarpgroupTile,
    WarpTile,
)
from tensorir_ladder.schedules.workloads import Matmul

# By warps on ordinary cores, fitted to an H200's times of 3,069 kernels on 259 shapes (30 of the slowest of seed 2049,
# others drawn, float32 of group schedules, seeds 7011, 7013 and 7015). Of shapes left out in turn, what it puts first
# has 0.986 of the speed of the fastest, 0.86 at worst.
SIMT_MULTIPLY_ADDS = 128  # of ordinary cores, per cycle of a multiprocessor
SIMT_TURNS = 1.1  # cycles of a multiply-add by warps, over what few warps make of it
SIMT_TO_HIDE, SIMT_BARRIERS = 0.23, 3.13  # of simt_warps_to_hide and barrier_cycles
SIMT_UNHIDDEN = 0.31  # of multiplying and of device memory's time, the shorter one
SIMT_ADDING = 1.38  # what adding parts up takes longer than storing and reading them at the cache's rate
SIMT_STARTING = 3590  # cycles until a round of blocks multiplies, but for its instructions
SIMT_AGAIN = 0.35  # of that, of each round behind the first: others multiply meanwhile
SIMT_IN_ALL = 0.956  # of all of it together, as 7,200 kernels of 400 products took in two later runs on H200s
TALL_TURNS = 1.11  # of warps with more rows than columns
FEW_SUMS, FEW_SUMS_TURNS = 64, 1.47  # threads with fewer sums read more operands for each: so many cycles for one
DEEP_CODE, DEEP_TURNS = 2048, 1.04  # of k tiles of so many multiply-adds, written out
AHEAD_TURNS = 0.95  # of threads that read operands a step ahead: as squares have it, the fit says 1.09
CODE_CYCLES = 0.98  # of a multiply-add that is written out, until a round of blocks has its instructions
KEPT_CODE, FETCHED_CYCLES = 3750, 5.9  # multiply-adds written out that stay cached, and cycles of each beyond
SHARED_BYTES_PER_CYCLE = 128
STRAIGHT_EDGE = 5.2  # instructions of an element that is copied by itself, where a multiply-add is one
ONE_FIRST = 1.022  # what multiplying takes longer where one operand is copied first, the other by element: of 20 shapes
# By warpgroups whose threads bring operands, fitted to an H200's times of 1,434 kernels on 116 shapes (34 of the
# slowest of an earlier seed, the others drawn, float16 of group schedules, seed 5201), operands copied first or not,
# and of 200 shapes by one kernel each (seed 2041); but for what storing takes longer.
WGMMA_SPLIT_SECTORS = 1.8  # what rows take longer that are no whole sectors: see :func:`_by_threads`
WGMMA_LOADS = 1.15  # of load_bytes_per_cycle
WGMMA_SCATTERED = 3.48  # what storing takes longer where each thread stores its sums: of products smaller than a tile
WGMMA_COPIED, WGMMA_FRONT = 0.84, 0.52  # of a copy's bytes and of copying_us, with the product's kernel behind it


class _WarpgroupTimes(NamedTuple):
    """Hold what a product by warpgroups takes, by who brings its operands; numbers or arrays.

    ``unhidden``: of what a k tile takes less (multiplying or loading), behind what takes longer. ``reading``: of
    reading device memory, or of the k tiles where they take less, that the other does not hide. ``stored``: of
    stored_results_per_cycle. In cycles: ``latency`` from asking for a k tile to its arrival, while others are on their
    way; ``filling`` from a block's start to its first k tile; ``starting`` of a kernel; ``part`` of each part, read
    behind the one before by the threads that add them up. What storing takes longer: ``swapped``, whose pairs of sums
    are two rows'; ``astride``, whose rows begin inside of sectors; ``ragged``, whose tile has columns beyond whole
    panels.
    """

    unhidden: Any
    reading: Any
    stored: Any
    latency: Any
    filling: Any
    starting: Any
    part: Any
    swapped: Any
    astride: Any
    ragged: Any


class _BoxTimes(NamedTuple):
    """Hold what k tiles that TMA brings take, in cycles but for ``operands``; numbers or arrays.

    ``line``: from one cache line that it reads of to the next; ``l2_line``: the same, where all multiprocessors ask for
    lines. ``fill``: of shared memory, while a row of 128 bytes arrives; ``operands``: of the cycles in which it gives
    wgmma its operands, the share that rows wait for. ``least``: of a k tile, its wait, its instructions one behind the
    other, and what is between them. ``sync``: of a k tile in a cluster, each time that this has twice as many blocks.
    """

    line: Any
    l2_line: Any
    fill: Any
    operands: Any
    least: Any
    sync: Any


# Fitted to an H200's times of 4,374 kernels on 259 shapes (float16 of group schedules): the slowest of seeds 2053 and
# 2054, drawn ones of seeds 7010, 7012 and 7014, many of them of few k tiles or of few rows; tiles of both orders of
# operands, in clusters of up to eight. Of shapes left out in turn what comes first has 0.973 of the speed of the
# fastest, 0.80 at worst. Unhidden and latency of BY_THREADS are those of an earlier fit, to larger products.
BY_THREADS = _WarpgroupTimes(
    0.53, 0.354, 0.897, LATENCY_CYCLES, 328, 2903, 311, swapped=1.39, astride=1.31, ragged=1.28
)
BY_FIRST_WARP = _WarpgroupTimes(0.204, 0.335, 0.631, 1902, 707, 3171, 337, swapped=1.24, astride=1.22, ragged=1.09)
FIRST_WARP = _BoxTimes(line=1.115, l2_line=1.667, fill=0.044, operands=1.443, least=276, sync=59)
BY_OWN_WARP = _WarpgroupTimes(0.342, 0.294, 0.614, 1128, 43, 3606, 475, swapped=1.2, astride=1.26, ragged=1.09)
OWN_WARP = _BoxTimes(line=1.133, l2_line=1.772, fill=1.229, operands=0.362, least=64, sync=32)
# Of multiprocessors, those that clusters of more than two can have: 120 of an H200's 132, of four as of eight.
CLUSTERED = 0.91
GATHERING = 489  # cycles until a cluster's blocks find room together, in rounds behind the first, beside other blocks
STORING = 0.55  # of storing, what other resident blocks do not hide
ALIKE = 32  # rows and columns by which tiles differ that are not nearly the same


class Planned(NamedTuple):
    """Say all that a schedule does beside its tile and stages, so that its cycles can be told apart from others'.

    ``parts`` of its reduction. ``copied``: which operands a kernel in front copies, by warpgroups to rows of whole
    sectors, by boxes of whole cache lines; rows that are no whole 16 bytes are copied whatever it says. By warps it is
    these rows alone that may be, and of others it says nothing. ``boxes``: TMA brings operands, by a warp of its own
    (``own_warp``) or not, in a ``cluster``: so many blocks below each other share B, so many beside each other A.
    """

    parts: int = 1
    copied: tuple[bool, bool] = (False, False)
    boxes: bool = False
    cluster: tuple[int, int] = (1, 1)
    own_warp: bool = False

    def __str__(self) -> str:
        said = [f"{self.parts} parts"] if self.parts > 1 else []
        said += [f"{operand} copied first" for operand, first in zip("AB", self.copied) if first]
        said += ["boxes"] if self.boxes else []
        said += ["a warp of its own"] if self.own_warp else []
        said += [f"clusters of {self.cluster[0]}x{self.cluster[1]}"] if self.cluster != (1, 1) else []
        return ", ".join(said) or "one part"


ONE_PART = Planned()


class ProductSizes(NamedTuple):
    """A product as formulas take it: numbers, or arrays of many products; ``b_row``: elements of a row of B."""

    m: Any
    n: Any
    k: Any
    b_row: Any
    nt: bool
    itemsize: int

    @classmethod
    def of(cls, problem: Matmul) -> ProductSizes:
        """Return a problem's sizes."""
        return cls(problem.m, problem.n, problem.k, problem.b_shape[1], problem.layout == "nt", problem.itemsize)


class ScheduleArrays(NamedTuple):
    """Schedules as formulas see them: arrays that go together by numpy's rules, of tiles and of what is planned.

    ``more_threads`` of a warp of its own. ``stage_bytes`` of shared memory for each stage, and ``held_bytes`` of all.
    ``warps_at_once``: those that registers have room for. By warps: ``sums`` of a thread, ``tall`` warps, operands read
    ``ahead``, steps that a slice has in ``turn``. By warpgroups: ``group_m`` and ``group_n`` of each, ``across_groups``
    side by side, ``room`` for a warp of its own.
    """

    block_m: Any
    block_n: Any
    block_k: Any
    threads: Any
    stages: Any
    stage_bytes: Any
    held_bytes: Any
    warps_at_once: Any
    slices: Any
    sums: Any
    tall: Any
    ahead: Any
    turn: Any
    group_m: Any
    group_n: Any
    across_groups: Any
    swapped: Any
    room: Any
    alike: Any
    parts: Any = 1
    a_copied: Any = False
    b_copied: Any = False
    boxes: Any = False
    down: Any = 1
    across: Any = 1
    own_warp: Any = False

    @classmethod
    def of(cls, choices: Sequence[Choice], machine: Machine, itemsize: int) -> ScheduleArrays:
        """Describe tiles; what is planned is a single part, and nothing besides."""
        return cls(*np.array([_described(each, machine, itemsize) for each in choices]).reshape(-1, _TILE_FIELDS).T)

    def as_planned(self, planned: Sequence[Planned]) -> ScheduleArrays:
        """Return schedules by these tiles, as each is planned."""
        rows = [(each.parts, *each.copied, each.boxes, *each.cluster, each.own_warp) for each in planned]
        return ScheduleArrays(*self[:_TILE_FIELDS], *np.array(rows, int).T)

    def as_first_axis(self, others: int) -> ScheduleArrays:
        """Return these tiles as the first axis of arrays that have so many ``others``."""
        shape = (-1, *[1] * others)
        return ScheduleArrays(*(each.reshape(shape) for each in self[:_TILE_FIELDS]))

    def at(self, places: Any) -> ScheduleArrays:
        """Return some of the schedules, all of whose fields are arrays of one length."""
        return ScheduleArrays(*(each[places] if np.ndim(each) else each for each in self))

    def blocks(self, sizes: ProductSizes) -> Any:
        """Count a product's blocks in one part; a cluster's are there even where the product has no tile for them."""
        down, across = self.block_m * self.down, self.block_n * self.across
        return ceildiv(sizes.m, down) * ceildiv(sizes.n, across) * (self.down * self.across)

    def k_tiles(self, k: Any) -> Any:
        """Count the k tiles of a part."""
        return ceildiv(ceildiv(k, self.block_k), self.parts)

    def resident(self, machine: Machine, stages: Any, own_warp: Any) -> Any:
        """Count the blocks that a multiprocessor holds at once, one at least, of so many stages that hold something.

        Each of its four parts has a fourth of its registers and of its warps, and none has a part of a warp: of 104
        registers 16 warps fit, two blocks of six and not three, which CUDA's assembler would make room for by spilling.
        """
        held = self.stage_bytes * stages + self.held_bytes
        by_shared = int(machine.target.attrs["max_shared_memory_per_block"]) // held
        by_registers = self.warps_at_once // ceildiv(self.threads + WARPGROUP * own_warp, WARP)
        return np.maximum(1, np.minimum(by_shared, by_registers))


_TILE_FIELDS = ScheduleArrays._fields.index("parts")  # before what is planned


def _described(choice: Choice, machine: Machine, itemsize: int) -> tuple[int, ...]:
    tile, stages = choice.tile, choice.stages
    block_m, block_n, block_k = tile.block
    threads = tile.threads_per_block
    held = tile.smem_bytes(itemsize, stages)
    warps_at_once = PARTITIONS * (
        int(machine.target.attrs["registers_per_block"]) // (PARTITIONS * WARP * tile.registers)
    )
    kind = WarpTile, WarpgroupTile
    alike = hash((kind.index(type(tile)) if type(tile) in kind else 2, block_m // ALIKE, block_n // ALIKE, block_k))
    alike = hash((alike, threads))
    if isinstance(tile, WarpTile):
        sums = tile.thread_m * tile.thread_n
        by_warps = tile.slices, sums, tile.warp[0] > tile.warp[1], tile.steps_ahead, tile.steps_in_turn
        return (*tile.block, threads, stages, 0, held, warps_at_once, *by_warps, 0, 0, 1, 0, 0, alike)
    if not isinstance(tile, WarpgroupTile):
        raise TypeError(f"no formula for {tile}")
    of_groups = tile.group_m, tile.group_n, tile.warpgroups[1], tile.swapped, tile.leaves_a_warp
    return (*tile.block, threads, stages, held // stages, 0, warps_at_once, 1, 0, 0, 0, 1, *of_groups, alike)


def ceildiv(size: Any, extent: Any) -> Any:
    """Divide numbers or arrays of them, rounding up."""
    return -(-size // extent)


def cycles(kernels: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Return about how many cycles each schedule takes of a product by its formula; of arrays of sizes, of each one's.

    Infinite for what a schedule cannot do, or what would change nothing: a copy of rows that are whole sectors, or
    that the tile would not make whole; a cluster of more blocks than there are.
    """
    if np.max(kernels.sums):
        return _by_warps(kernels, sizes, machine)
    return _by_boxes(kernels, sizes, machine) if np.max(kernels.boxes) else _by_threads(kernels, sizes, machine)


def _by_warps(t: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Price products by warps on ordinary cores.

    ::

        turn     = a multiply-add, longer where few warps hide each other's latencies, where threads have few sums,
                   where warps are tall, and where much is written out; where operands are read a step ahead, the
                   square of what waits counts
        in all   = the longer of multiplying, with a barrier for each k tile, and device memory's time
                   + a part of the other + storing
                   + filling the ring and bringing the instructions, for each round of blocks behind the first a
                     third as long, since others multiply meanwhile
                   + (parts > 1) adding up by another kernel
                   + operands whose rows are no whole vectors: copied by a kernel in front, or element by element;
                   a B stored [n, k], whose tiles are transposed: element by element

    Of an operand much larger than the other one, copying rows to shared memory element by element, every time that a
    block needs them, is sooner done than a copy of it in front.
    """
    rates, (m, n, k, b_row, nt, itemsize) = machine.rates, sizes
    of_part = _steps_of_part(t, k)
    resident = t.resident(machine, t.stages, 0)
    busiest = ceildiv(t.blocks(sizes) * t.parts, machine.multiprocessors)
    last = busiest % resident  # blocks of the last round, which hide less
    written_out = t.sums * t.block_k / t.slices
    turn = SIMT_TURNS * np.where(t.sums < FEW_SUMS, FEW_SUMS_TURNS, 1.0) * np.where(t.ahead, AHEAD_TURNS, 1.0)
    turn = turn * np.where(written_out >= DEEP_CODE, DEEP_TURNS, 1.0) * np.where(t.tall, TALL_TURNS, 1.0)

    def waited(blocks: Any) -> Any:
        few = SIMT_TO_HIDE * rates.simt_warps_to_hide * WARP / (blocks * t.threads)
        return 1 + np.where(t.ahead, few * few, few)

    turns = turn * ((busiest - last) * waited(resident) + last * waited(np.maximum(last, 1)))
    multiplying = turns * t.block_m * t.block_n * of_part / SIMT_MULTIPLY_ADDS
    a_apart = np.asarray(k * itemsize % VECTOR_BYTES > 0)
    b_apart = np.asarray(b_row * itemsize % VECTOR_BYTES > 0) & (not nt)  # else transposed on its way
    a_first, b_first = a_apart & (t.a_copied > 0), b_apart & (t.b_copied > 0)
    a_straight, b_straight = a_apart & (t.a_copied == 0), b_apart & (t.b_copied == 0)
    # Of a few elements each or single ones, for each element of a tile.
    a_copies = np.where(a_straight, itemsize / np.gcd(k * itemsize, VECTOR_BYTES), 0.0)
    b_copies = 1.0 if nt else np.where(b_straight, itemsize / np.gcd(b_row * itemsize, VECTOR_BYTES), 0.0)
    longer = 1 + STRAIGHT_EDGE * (a_copies / t.block_n + b_copies / t.block_m)
    multiplying = multiplying * np.where((a_first | b_first) & (a_straight | b_straight), ONE_FIRST, 1.0) * longer
    rounds = ceildiv(busiest, resident)
    multiplying = multiplying + rounds * ceildiv(of_part, t.block_k) * (SIMT_BARRIERS * rates.barrier_cycles)
    in_all = written_out * t.stages
    first_round = SIMT_STARTING + CODE_CYCLES * in_all + FETCHED_CYCLES * np.maximum(0.0, in_all - KEPT_CODE)
    starting = first_round * (1 + SIMT_AGAIN * (rounds - 1))
    memory = ((m + n) * k + m * n) * itemsize / (rates.copying_gb_s / CLOCK_GHZ)
    storing = busiest * np.minimum(m, t.block_m) * np.minimum(n, t.block_n) / rates.stored_results_per_cycle
    adding = np.where(t.parts > 1, adding_cycles(m, n, t.parts, machine, SIMT_ADDING), 0.0)
    slices = busiest * t.slices * t.block_m * t.block_n * PART_BYTES / SHARED_BYTES_PER_CYCLE  # in shared memory
    adding = adding + np.where(t.slices > 1, slices, 0.0)
    longest, shorter = np.maximum(multiplying, memory), np.minimum(multiplying, memory)
    front = _copying(m * a_first + n * b_first, k, machine, itemsize)
    return SIMT_IN_ALL * (front + longest + SIMT_UNHIDDEN * shorter + starting + storing + adding)


def _steps_of_part(t: ScheduleArrays, k: Any) -> Any:
    """Return what :meth:`schedules.tiles.WarpTile.steps_of_part` says of each schedule."""
    turns, whole = (ceildiv(k, t.parts * extent) * extent for extent in (t.slices * t.turn, t.block_k))
    cut = np.where((t.parts == 1) | (whole - turns >= SHORTER_PAYS * whole), turns, whole)
    return np.where((t.parts == 1) & (t.slices == 1), k, cut)


def _by_threads(t: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Price products by warpgroups whose threads bring operands.

    Of the forms that store their results row by row::

        k tile   = the longer of multiplying and loading it, and more than half of the other; loading is slower
                   while fewer blocks are resident, as in the last round
        loop     = tiles of the busiest multiprocessor · k tiles of a part · k tile
        in all   = the longer of loop and reading both operands once from device memory, and a part of the other
                   + storing and writing the results, of which about half is hidden behind other resident blocks;
                     storing takes longer where a product smaller than the tile is not stored row by row, where rows
                     begin inside of sectors, and of tiles whose columns are no whole panels
                   + filling the ring for each round + starting
                   + (parts > 1) adding them up by another kernel, part after part
                   + operands that are copied first, without what their rows are rounded up by

    A row that is no whole number of sectors and is not copied takes nearly twice as long. In wgmma's swizzled panels
    the halves of a sector that such a row puts into two pairs of 16 bytes lie apart, and cp.async brings the sector
    once for each: 1.5 times the sectors where every other row begins inside of one, as Nsight Compute counts them.
    Rows of whole sectors that straddle cache lines were measured to take no longer than others. Rows and columns that
    the tile has beyond the product, and those that fill its last panel, are copies of no bytes, which take as long.
    """
    rates, (m, n, k, b_row, nt, itemsize) = machine.rates, sizes
    a, b, able = _copied(t, sizes, SECTOR_BYTES)
    a_longer = np.where((k * itemsize % SECTOR_BYTES > 0) & ~a.whole, WGMMA_SPLIT_SECTORS - 1, 0.0)
    b_longer = np.where((b_row * itemsize % SECTOR_BYTES > 0) & ~b.whole, WGMMA_SPLIT_SECTORS - 1, 0.0)
    wide = t.block_n if nt else ceildiv(t.group_n, PANEL) * PANEL * t.across_groups  # of a B stored [k, n] whole panels
    brought = t.block_m + np.minimum(m, t.block_m) * a_longer + wide + np.minimum(n, t.block_n) * b_longer
    loading = brought * t.block_k * itemsize / (WGMMA_LOADS * rates.load_bytes_per_cycle)
    k_tile = _KTile(t.blocks(sizes), machine.multiprocessors, loading, _multiplying(t, machine))
    found = _by_warpgroups(t, sizes, machine, k_tile, BY_THREADS)
    front = _copying(m * a.first + n * b.first, k, machine, itemsize, WGMMA_COPIED, WGMMA_FRONT)
    return np.where(able, found + front, np.inf)


def _by_boxes(t: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Price products by warpgroups whose operands TMA brings: as :func:`_by_threads`, but for what a k tile takes.

    ::

        loading  = asking for cache lines, by one multiprocessor or, where that takes longer, by all that are busy;
                   of an operand that a cluster shares, each block asks for its share; meeting its other blocks
        working  = the longer of multiplying, and shared memory's rows that arrive and operands that wgmma reads
        in all   = ... + for each round behind the first, where others are resident, a cluster's blocks that wait
                   until they find room together

    Of clusters those that the product has tiles for, and whose blocks each have rows of a box to bring. Source: what
    was measured.
    """
    m, n, k, _, nt, itemsize = sizes
    times = _WarpgroupTimes(*(np.where(t.own_warp, *both) for both in zip(BY_OWN_WARP, BY_FIRST_WARP)))
    box = _BoxTimes(*(np.where(t.own_warp, *both) for both in zip(OWN_WARP, FIRST_WARP)))
    a, b, able = _copied(t, sizes, ROW_BYTES)
    b_rows = t.block_n if nt else t.block_k
    able = able & ((t.down == 1) | ((t.down <= ceildiv(m, t.block_m)) & (b_rows >= t.down * PIECE_ROWS)))
    able = able & ((t.across == 1) | ((t.across <= ceildiv(n, t.block_n)) & (t.block_m >= t.across * PIECE_ROWS)))
    cluster, all_of_them = t.down * t.across, machine.multiprocessors
    room = np.where(cluster > 2, int(all_of_them * CLUSTERED) // cluster * cluster, all_of_them)
    blocks, columns = t.blocks(sizes), np.minimum(n, t.block_n)
    a_lines, b_lines = _lines(t, sizes, a.whole, b.whole)
    busy = np.minimum(blocks * t.parts, room) / all_of_them
    loading = (a_lines / t.across + b_lines / t.down) * np.maximum(box.line, box.l2_line * busy)
    # Rows of B in shared memory: of panels, if it is stored [k, n], of each instruction its own.
    arriving = columns if nt else np.minimum(ceildiv(n, PANEL), ceildiv(t.group_n, PANEL) * t.across_groups) * t.block_k
    wide, high = np.where(t.swapped, (t.group_m, t.group_n), (t.group_n, t.group_m))
    groups = t.threads // WARPGROUP
    read = groups * high // WGMMA_ROWS * (WGMMA_ROWS + wide) * t.block_k * itemsize / SHARED_BYTES_PER_CYCLE
    moving = box.operands * read + box.fill * (np.minimum(m, t.block_m) + arriving)
    working = np.maximum(np.maximum(_multiplying(t, machine), moving), box.least)
    k_tile = _KTile(blocks, room, loading, working, box.sync * np.log2(cluster), cluster > 1)
    found = _by_warpgroups(t, sizes, machine, k_tile, times)
    front = _copying(m * a.first + n * b.first, k, machine, itemsize, WGMMA_COPIED, WGMMA_FRONT)
    return np.where(able, found + front, np.inf)


class _Rows(NamedTuple):
    """Say of an operand's rows whether a kernel in front copies them, and whether they are then ``whole`` units."""

    first: Any
    whole: Any


def _copied(t: ScheduleArrays, sizes: ProductSizes, row_bytes: int) -> tuple[_Rows, _Rows, Any]:
    """Return what becomes of both operands' rows, and whether copies have to be, or change anything."""
    _, _, k, b_row, nt, itemsize = sizes
    rows, able = [], np.array(True)
    for length, copied, along in ((k, t.a_copied, t.block_k), (b_row, t.b_copied, t.block_k if nt else t.block_n)):
        must, may = (np.asarray(length * itemsize % unit > 0) for unit in (VECTOR_BYTES, row_bytes))
        makes_whole = np.asarray(along * itemsize % row_bytes == 0)
        first = must | (np.asarray(copied) > 0)
        rows.append(_Rows(first, first & makes_whole))
        able = able & (~first | must | (may & makes_whole))
    return rows[0], rows[1], able


class _KTile(NamedTuple):
    """Hold what k tiles take: how many block tiles there are of them.

    ``multiprocessors``: those that can have some. In cycles: ``loading`` one, ``working`` on it, ``meeting`` others.
    ``clustered``: whether blocks are in clusters.
    """

    tiles: Any
    multiprocessors: Any
    loading: Any
    working: Any
    meeting: Any = 0.0
    clustered: Any = False


def _multiplying(t: ScheduleArrays, machine: Machine) -> Any:
    """Return a k tile's cycles of the tensor cores."""
    return t.block_m * t.block_n * t.block_k / machine.rates.wgmma_multiply_adds_per_cycle


def _by_warpgroups(
    t: ScheduleArrays, sizes: ProductSizes, machine: Machine, k_tile: _KTile, times: _WarpgroupTimes
) -> np.ndarray:
    """Price products by warpgroups, given what a k tile takes; operands that are copied first are not counted."""
    rates, (m, n, k, _, _, itemsize) = machine.rates, sizes
    split, in_boxes = np.asarray(t.parts) > 1, np.asarray(t.boxes) > 0
    k_tiles = np.maximum(t.k_tiles(k), 2)  # a single one has a second behind it, of zeros
    busiest = ceildiv(k_tile.tiles * t.parts, k_tile.multiprocessors)
    together = np.minimum(busiest, t.resident(machine, np.minimum(t.stages, k_tiles), t.own_warp))
    last = busiest % together  # blocks of the last round, which hide less
    not_asked_for = np.where((np.asarray(t.own_warp) > 0) | (in_boxes & (t.stages <= SHORT_RING)), 1, 2)
    ahead = np.maximum(1, np.minimum(t.stages - not_asked_for, k_tiles))  # stages of a block that are on their way

    def one(blocks: Any) -> Any:
        """Return a k tile's cycles while a multiprocessor has so many blocks."""
        waiting, loading = times.latency / (blocks * ahead), k_tile.loading
        if np.max(t.boxes):  # whose lines arrive unevenly: neither limit is reached beside the other
            loading = np.cbrt(loading * loading * loading + waiting * waiting * waiting)
        else:
            loading = np.maximum(loading, waiting)
        loading = loading + k_tile.meeting
        return np.maximum(k_tile.working, loading) + times.unhidden * np.minimum(k_tile.working, loading)

    loop = k_tiles * ((busiest - last) * one(together) + last * one(np.maximum(last, 1)))
    sum_bytes = np.where(split, PART_BYTES, itemsize)
    stored = busiest * np.minimum(m, t.block_m) * np.minimum(n, t.block_n) * sum_bytes
    storing = stored / (times.stored * rates.stored_results_per_cycle * STORED_BYTES)
    storing = storing * np.where(n * sum_bytes % SECTOR_BYTES > 0, times.astride, 1.0)
    storing = storing * np.where((t.block_n % PANEL > 0) & (np.asarray(t.swapped) == 0), times.ragged, 1.0)
    by_element = (m < t.block_m) | (n < t.block_n)
    astray = np.where(by_element, WGMMA_SCATTERED, np.where(t.swapped, times.swapped, 1.0))
    storing = storing * np.where(split, 1.0, astray)
    per_cycle = rates.copying_gb_s / CLOCK_GHZ
    reading, writing = (m + n) * k * itemsize / per_cycle, m * n * itemsize / per_cycle
    looped = np.maximum(loop, reading) + times.reading * np.minimum(loop, reading)
    rounds = ceildiv(busiest, together)
    filling = rounds * times.filling + np.where((together > 1) & k_tile.clustered, (rounds - 1) * GATHERING, 0.0)
    adding = np.where(split, adding_cycles(m, n, t.parts, machine) + t.parts * times.part, 0.0)
    return looped + (storing + writing) * (STORING + (1 - STORING) / together) + filling + times.starting + adding


def _lines(t: ScheduleArrays, sizes: ProductSizes, a_whole: Any, b_whole: Any) -> tuple[Any, Any]:
    """Return about how many cache lines a k tile's boxes have of A and of B, whose rows may be ``whole`` lines.

    A row that begins inside of a cache line has a part of one line more: of rows of all offsets that come to pass, as
    often as they end in the next one.
    """
    m, n, k, b_row, nt, itemsize = sizes

    def of_row(row_bytes: Any, grain: Any) -> Any:
        """Lines of a row that begins at any multiple of ``grain`` bytes in one."""
        return 1 + np.maximum(0, row_bytes - grain) / ROW_BYTES

    a_apart, b_apart = (
        np.where(whole, ROW_BYTES, np.gcd(length * itemsize, ROW_BYTES))
        for whole, length in ((a_whole, k), (b_whole, b_row))
    )
    of_a = np.minimum(m, t.block_m) * of_row(ROW_BYTES, a_apart)
    if nt:
        return of_a, np.minimum(n, t.block_n) * of_row(ROW_BYTES, b_apart)
    columns = np.minimum(n, t.group_n)
    grain = np.gcd(t.block_n * itemsize, b_apart)
    rest = columns % PANEL
    of_columns = columns // PANEL * of_row(ROW_BYTES, grain) + np.where(rest > 0, of_row(rest * itemsize, grain), 0.0)
    return of_a, t.across_groups * t.block_k * of_columns


def _copying(rows: Any, k: Any, machine: Machine, itemsize: int, share: float = 1.0, front: float = 1.0) -> Any:
    """Return the cycles of a kernel in front that reads and writes so many rows of k elements; none of none.

    ``share`` of the bytes' time counts, and ``front`` of the shortest kernel's.
    """
    rates, copied_bytes = machine.rates, rows * k * itemsize
    longer = (share * 2 * copied_bytes / rates.copying_gb_s + front * 1e3 * rates.copying_us) * CLOCK_GHZ
    return np.where(copied_bytes > 0, longer, 0.0)


def planned_cycles(choice: Choice, problem: Matmul, machine: Machine, planned: Planned = ONE_PART) -> float:
    """Return about how many cycles a product takes by its formula alone, scheduled as ``planned``; see :func:`cycles`.

    Rows that are no whole 16 bytes are copied first by warpgroups, whatever is planned.
    """
    arrays = ScheduleArrays.of([choice], machine, problem.itemsize).as_planned([planned])
    return float(cycles(arrays, ProductSizes.of(problem), machine)[0])


def features(t: ScheduleArrays, sizes: ProductSizes, machine: Machine, formula: Any) -> dict[str, Any]:
    """Return by name what trees may ask of schedules for a product, and of their cycles by the ``formula``."""
    m, n, k, b_row, _, itemsize = sizes
    down, across = ceildiv(m, t.block_m), ceildiv(n, t.block_n)
    resident = t.resident(machine, t.stages, t.own_warp)
    of_each = down * across * t.parts / machine.multiprocessors
    rounds = of_each / resident
    busiest, warps = np.ceil(of_each), t.threads // WARP
    multiplied = busiest * t.block_m * t.block_n * ceildiv(k, t.parts)  # by the busiest multiprocessor
    straight = [
        (length * itemsize % VECTOR_BYTES > 0) & (np.asarray(first) == 0)
        for length, first in ((k, t.a_copied), (b_row, t.b_copied))
    ]
    return {
        "m": m,
        "n": n,
        "k": k,
        "a_apart": np.gcd(k * itemsize, 2 * SECTOR_BYTES) // itemsize,
        "b_apart": np.gcd(b_row * itemsize, 2 * SECTOR_BYTES) // itemsize,
        "b_panels": n % PANEL,
        "k_panels": k % PANEL,
        "results": m * n,
        "operands": (m + n) * k,
        "block_m": t.block_m,
        "block_n": t.block_n,
        "block_k": t.block_k,
        "block": t.block_m * t.block_n,
        "threads": t.threads,
        "slices": t.slices,
        "swapped": t.swapped,
        "stages": t.stages,
        "parts": t.parts,
        "a_copied": t.a_copied,
        "b_copied": t.b_copied,
        "boxes": t.boxes,
        "down": t.down,
        "across": t.across,
        "own_warp": t.own_warp,
        "resident": resident,
        "blocks": of_each,
        "last_blocks": of_each % 1,
        "rounds": rounds,
        "last_round": rounds % 1,
        "unfilled": np.ceil(rounds) / rounds,
        "busiest": busiest,
        "uneven": busiest / of_each,
        "warps": np.minimum(busiest, resident) * warps,
        "last_warps": ((busiest - 1) % resident + 1) * warps,
        "multiplied": multiplied,
        "beside_multiplying": formula / multiplied,
        "intensity": m * n * k / ((m + n) * k + m * n),
        "straight": straight[0] + 2 * straight[1],
        "k_tiles": t.k_tiles(k),
        "rows_of_last": m % t.block_m,
        "columns_of_last": n % t.block_n,
        "rows_beyond": down * t.block_m / m,
        "columns_beyond": across * t.block_n / n,
        "last_down": down % t.down,
        "last_across": across % t.across,
        "cycles": formula,
    }


def corrected_cycles(kernels: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Return the cycles of schedules with what trees say their formula leaves; without trees the formula's alone."""
    formula = cycles(kernels, sizes, machine)
    if machine.corrections is None or not len(formula):
        return formula
    trees = machine.corrections[0 if np.max(kernels.sums) else 1]
    return formula * np.exp(trees.predict(features(kernels, sizes, machine, formula)))
