"""Estimate the cycles of a product's schedule from its tile and its plan, for many schedules at once.

There is one formula for each way to multiply and to load operands: warps on SIMT cores, warpgroups whose threads copy,
and warpgroups that load by TMA. Schedules are arrays here, so that thousands are priced at once. If the machine has
regression trees (:mod:`.trees`), they correct the formula for the tail effects of each shape: the last tile, the last
round of blocks, the last k tile. Estimates rank schedules; results never depend on them.
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

# SIMT kernels by warps, fitted to 3,069 kernels on 259 shapes (float32, H200). On shapes left out of the fit, the
# kernel that the formula ranks first has 0.986 of the fastest one's speed (geometric mean).
SIMT_MULTIPLY_ADDS = 128  # per cycle of a multiprocessor
SIMT_TURNS = 1.1  # cycles per multiply-add with enough resident warps
SIMT_TO_HIDE, SIMT_BARRIERS = 0.23, 3.13  # factors of simt_warps_to_hide and barrier_cycles
SIMT_UNHIDDEN = 0.31  # fraction of min(compute, device memory time) that is not hidden
SIMT_ADDING = 1.38  # factor of adding parts at the L2 cache's rate
SIMT_STARTING = 3590  # cycles from a block's start to its first multiply-add, without instruction fetch
SIMT_AGAIN = 0.35  # fraction of the start-up cost that each later round of blocks pays
SIMT_IN_ALL = 0.956  # overall calibration factor, of 7,200 kernels on 400 products
# Factors of the cycles per multiply-add.
TALL_TURNS = 1.11  # warp tiles with more rows than columns
FEW_SUMS, FEW_SUMS_TURNS = 64, 1.47  # threads with fewer sums, which load more operands for each
DEEP_CODE, DEEP_TURNS = 2048, 1.04  # k tiles with at least so many unrolled multiply-adds a thread
AHEAD_TURNS = 0.95  # threads that load operands a step ahead
CODE_CYCLES = 0.98  # instruction fetch of an unrolled multiply-add, in each round of blocks
KEPT_CODE, FETCHED_CYCLES = 3750, 5.9  # instruction cache, in unrolled multiply-adds; fetch cycles of each past it
SHARED_BYTES_PER_CYCLE = 128
STRAIGHT_EDGE = 5.2  # cost of copying one element to shared memory, in multiply-adds
ONE_FIRST = 1.022  # factor if one operand is copied by a kernel in front and the other element by element
# Warpgroups whose threads copy, fitted to 1,434 kernels on 116 shapes and 200 shapes with one kernel each (float16,
# H200).
WGMMA_SPLIT_SECTORS = 1.8  # factor of loading rows that are no whole sectors: see :func:`_by_threads`
WGMMA_LOADS = 1.15  # factor of load_bytes_per_cycle
WGMMA_SCATTERED = 3.48  # factor of storing if each thread stores its own sums: products smaller than a tile
WGMMA_COPIED, WGMMA_FRONT = 0.84, 0.52  # kernel in front: factors of its bandwidth time and of copying_us


class _WarpgroupTimes(NamedTuple):
    """Fitted constants of warpgroup kernels, one set for each way to load operands. Fields may be arrays.

    ``unhidden``: fraction of min(multiplying, loading) of a k tile that is not hidden; ``reading``: fraction of
    min(device memory reads, k loop) that is not hidden. ``stored``: factor of stored_results_per_cycle. In cycles:
    ``latency`` of a k tile's load while others are in flight; ``filling`` from a block's start to its first k tile;
    ``starting`` of a kernel; ``part`` to add one part more. Slowdowns of stores: ``swapped`` operands, whose pairs of
    accumulators span two rows; ``astride``: rows that begin within a sector; ``ragged``: block_n is no whole panels.
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
    """Fitted cycles of a k tile that TMA loads. Fields may be arrays.

    ``line``: per cache line while one multiprocessor loads; ``l2_line``: while all load. ``fill``: shared-memory write
    of a 128-byte row; ``operands``: factor of wgmma's operand reads, which compete with these writes. ``least``:
    minimum of a k tile. ``sync``: for each doubling of the cluster.
    """

    line: Any
    l2_line: Any
    fill: Any
    operands: Any
    least: Any
    sync: Any


# Fitted to 4,374 kernels on 259 shapes (float16, H200), with tiles of both orders of operands and clusters of up to
# eight. On shapes left out of the fit, the kernel ranked first has 0.973 of the fastest one's speed (geometric mean).
BY_THREADS = _WarpgroupTimes(
    0.53, 0.354, 0.897, LATENCY_CYCLES, 328, 2903, 311, swapped=1.39, astride=1.31, ragged=1.28
)
BY_FIRST_WARP = _WarpgroupTimes(0.204, 0.335, 0.631, 1902, 707, 3171, 337, swapped=1.24, astride=1.22, ragged=1.09)
FIRST_WARP = _BoxTimes(line=1.115, l2_line=1.667, fill=0.044, operands=1.443, least=276, sync=59)
BY_OWN_WARP = _WarpgroupTimes(0.342, 0.294, 0.614, 1128, 43, 3606, 475, swapped=1.2, astride=1.26, ragged=1.09)
OWN_WARP = _BoxTimes(line=1.133, l2_line=1.772, fill=1.229, operands=0.362, least=64, sync=32)
CLUSTERED = 0.91  # share of the multiprocessors that clusters of more than two can use: 120 of an H200's 132
GATHERING = 489  # cycles until a cluster's blocks find room together, in later rounds of blocks
STORING = 0.55  # share of storing that other resident blocks do not hide
ALIKE = 32  # near-duplicate tiles have equal block_m // 32 and block_n // 32, and equal block_k and threads


class Planned(NamedTuple):
    """A schedule's plan: all that it does besides its tile and stages.

    ``parts``: how many parts the reduction is split into, which a second kernel adds. ``copied``: which operands (A, B)
    a kernel in front copies to aligned rows: of whole 32-byte sectors for cp.async, of whole 128-byte lines for TMA.
    Rows that are not 16-byte aligned: warpgroups always copy them, SIMT copies them if ``copied`` says so. SIMT ignores
    it for aligned rows. ``boxes``: operands are loaded by TMA; ``own_warp``: by a separate producer warp. ``cluster``:
    (blocks down a column, which share B; blocks across a row, which share A).
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
    """A product's extents, numbers or arrays. ``b_row``: elements of a row of B; ``nt``: B is stored [n, k]."""

    m: Any
    n: Any
    k: Any
    b_row: Any
    nt: bool
    itemsize: int

    @classmethod
    def of(cls, problem: Matmul) -> ProductSizes:
        """Return a product's sizes."""
        return cls(problem.m, problem.n, problem.k, problem.b_shape[1], problem.layout == "nt", problem.itemsize)


class ScheduleArrays(NamedTuple):
    """Schedules as a structure of arrays that broadcast: first the fields of tiles, then those of plans.

    ``stage_bytes``: shared memory of each stage in use (0 for SIMT); ``held_bytes``: shared memory that does not depend
    on it (0 for warpgroups). ``warps_at_once``: warps of a multiprocessor that registers have room for. Of SIMT tiles:
    ``sums`` of a thread, ``tall`` warp tiles, ``ahead``: operands loaded a step ahead, ``turn``: k steps of a slice
    before the next slice's. Of warpgroups: rows ``group_m`` and columns ``group_n`` of each, ``across_groups`` next to
    each other, ``room`` for a producer warp. ``alike``: equal for near-duplicate tiles.
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
        """Describe tiles, with the default plan."""
        return cls(*np.array([_described(each, machine, itemsize) for each in choices]).reshape(-1, _TILE_FIELDS).T)

    def as_planned(self, planned: Sequence[Planned]) -> ScheduleArrays:
        """Return these tiles with a plan each."""
        rows = [(each.parts, *each.copied, each.boxes, *each.cluster, each.own_warp) for each in planned]
        return ScheduleArrays(*self[:_TILE_FIELDS], *np.array(rows, int).T)

    def as_first_axis(self, others: int) -> ScheduleArrays:
        """Reshape tiles to the first axis of arrays that have ``others`` more."""
        shape = (-1, *[1] * others)
        return ScheduleArrays(*(each.reshape(shape) for each in self[:_TILE_FIELDS]))

    def at(self, places: Any) -> ScheduleArrays:
        """Select schedules by index."""
        return ScheduleArrays(*(each[places] if np.ndim(each) else each for each in self))

    def blocks(self, sizes: ProductSizes) -> Any:
        """Count the blocks of one part of the reduction, rounded up to whole clusters."""
        down, across = self.block_m * self.down, self.block_n * self.across
        return ceildiv(sizes.m, down) * ceildiv(sizes.n, across) * (self.down * self.across)

    def k_tiles(self, k: Any) -> Any:
        """Count the k tiles of a part."""
        return ceildiv(ceildiv(k, self.block_k), self.parts)

    def resident(self, machine: Machine, stages: Any, own_warp: Any) -> Any:
        """Count the resident blocks of a multiprocessor with ``stages`` in use; at least one.

        Each of its four partitions holds whole warps in a quarter of the registers: at 104 registers a thread 16 warps
        fit, so two blocks of six. A producer warp (``own_warp``) takes a warpgroup's registers.
        """
        held = self.stage_bytes * stages + self.held_bytes
        by_shared = int(machine.target.attrs["max_shared_memory_per_block"]) // held
        by_registers = self.warps_at_once // ceildiv(self.threads + WARPGROUP * own_warp, WARP)
        return np.maximum(1, np.minimum(by_shared, by_registers))


_TILE_FIELDS = ScheduleArrays._fields.index("parts")  # the fields before describe tiles, the others plans


def _described(choice: Choice, machine: Machine, itemsize: int) -> tuple[int, ...]:
    tile, stages = choice.tile, choice.stages
    swapped = isinstance(tile, WarpgroupTile) and tile.swapped
    threads, held = tile.threads_per_block, tile.smem_bytes(itemsize, stages)
    registers = int(machine.target.attrs["registers_per_block"])
    warps_at_once = PARTITIONS * (registers // (PARTITIONS * WARP * tile.registers))
    alike = hash((swapped, tile.block_m // ALIKE, tile.block_n // ALIKE, tile.block_k, threads))
    if isinstance(tile, WarpTile):
        sums = tile.thread_m * tile.thread_n
        by_warps = tile.slices, sums, tile.warp[0] > tile.warp[1], tile.steps_ahead, tile.steps_in_turn
        return (*tile.block, threads, stages, 0, held, warps_at_once, *by_warps, 0, 0, 1, 0, 0, alike)
    if not isinstance(tile, WarpgroupTile):
        raise TypeError(f"no formula for {tile}")
    of_groups = tile.group_m, tile.group_n, tile.warpgroups[1], swapped, tile.leaves_a_warp
    return (*tile.block, threads, stages, held // stages, 0, warps_at_once, 1, 0, 0, 0, 1, *of_groups, alike)


def ceildiv(size: Any, extent: Any) -> Any:
    """Divide numbers or arrays of them, rounding up."""
    return -(-size // extent)


def cycles(kernels: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Return each schedule's cycles by its formula. All must be of one family: SIMT, copying threads, or TMA.

    Infinite for impossible plans, such as a cluster of more blocks than there are, and for copies that gain nothing.
    """
    if np.max(kernels.sums):
        return _by_warps(kernels, sizes, machine)
    return _by_boxes(kernels, sizes, machine) if np.max(kernels.boxes) else _by_threads(kernels, sizes, machine)


def _by_warps(t: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Estimate SIMT kernels by warps.

    ::

        turn     = cycles of a multiply-add: more with few resident warps, few sums a thread, tall warp tiles, and
                   much unrolled code; the latency term is squared if operands are loaded a step ahead
        total    = the longer of computing, with a barrier for each k tile, and reading device memory
                   + a share of the shorter one + storing
                   + filling the ring and fetching instructions, a third of it in each later round of blocks
                   + (parts > 1) a second kernel that adds the parts
                   + unaligned operands: a copy in front, or element by element to shared memory
                   + a B stored [n, k], transposed element by element

    If one operand is much larger than the other, copying its rows element by element in each block takes less time
    than a copy in front.
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
    b_apart = np.asarray(b_row * itemsize % VECTOR_BYTES > 0) & (
        not nt
    )  # a B stored [n, k] is transposed by element, so that alignment does not matter
    a_first, b_first = a_apart & (t.a_copied > 0), b_apart & (t.b_copied > 0)
    a_straight, b_straight = a_apart & (t.a_copied == 0), b_apart & (t.b_copied == 0)
    # Copy instructions for each element of a tile.
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
    """Return :meth:`schedules.tiles.WarpTile.steps_of_part` of each schedule."""
    turns, whole = (ceildiv(k, t.parts * extent) * extent for extent in (t.slices * t.turn, t.block_k))
    cut = np.where((t.parts == 1) | (whole - turns >= SHORTER_PAYS * whole), turns, whole)
    return np.where((t.parts == 1) & (t.slices == 1), k, cut)


def _by_threads(t: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Estimate warpgroups whose threads copy operands, and that store results row by row.

    ::

        k tile   = the longer of multiplying and loading + a share of the shorter; loading is latency-bound with few
                   resident blocks, as in the last round
        loop     = tiles of the busiest multiprocessor · k tiles of a part · k tile
        total    = the longer of loop and reading both operands once from device memory + a share of the shorter
                   + storing, about half of it hidden by other resident blocks; more for a product smaller than the
                     tile, for rows that begin within sectors, and for tiles whose columns are no whole panels
                   + filling the ring in each round of blocks + starting
                   + (parts > 1) a second kernel that adds the parts
                   + copies in front

    Rows that are no multiple of 32 bytes load 1.8 times slower: the swizzle separates a sector's halves, and cp.async
    fetches it twice. Rows of whole sectors that straddle cache lines take no longer than others. Zero-filled rows and
    columns beyond the product take as long as loaded ones.
    """
    rates, (m, n, k, b_row, nt, itemsize) = machine.rates, sizes
    a, b, able = _copied(t, sizes, SECTOR_BYTES)
    a_longer = np.where((k * itemsize % SECTOR_BYTES > 0) & ~a.whole, WGMMA_SPLIT_SECTORS - 1, 0.0)
    b_longer = np.where((b_row * itemsize % SECTOR_BYTES > 0) & ~b.whole, WGMMA_SPLIT_SECTORS - 1, 0.0)
    wide = t.block_n if nt else ceildiv(t.group_n, PANEL) * PANEL * t.across_groups  # of [k, n] whole panels
    brought = t.block_m + np.minimum(m, t.block_m) * a_longer + wide + np.minimum(n, t.block_n) * b_longer
    loading = brought * t.block_k * itemsize / (WGMMA_LOADS * rates.load_bytes_per_cycle)
    k_tile = _KTile(t.blocks(sizes), machine.multiprocessors, loading, _multiplying(t, machine))
    found = _by_warpgroups(t, sizes, machine, k_tile, BY_THREADS)
    front = _copying(m * a.first + n * b.first, k, machine, itemsize, WGMMA_COPIED, WGMMA_FRONT)
    return np.where(able, found + front, np.inf)


def _by_boxes(t: ScheduleArrays, sizes: ProductSizes, machine: Machine) -> np.ndarray:
    """Estimate warpgroups that load by TMA: as :func:`_by_threads`, with a different cost of a k tile.

    ::

        loading  = cache lines, limited by one multiprocessor or by the L2 cache while all load; each block of a
                   cluster loads its share of a shared operand; + synchronizing the cluster
        working  = the longer of multiplying and of shared memory's traffic: rows that arrive, operands for wgmma
        total    = ... + in later rounds, waiting until a cluster's blocks find room together

    The grid has at least one cluster, and each block loads at least PIECE_ROWS rows of a shared operand.
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
    # B's rows written to shared memory: block_k of them for each panel if it is stored [k, n].
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
    """``first``: a kernel in front copies an operand's rows; ``whole``: the copy's rows are whole sectors or lines."""

    first: Any
    whole: Any


def _copied(t: ScheduleArrays, sizes: ProductSizes, row_bytes: int) -> tuple[_Rows, _Rows, Any]:
    """Return the rows of A and of B, and whether the plan's copies are legal and useful."""
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
    """Cost of a k tile in cycles: ``loading``, ``working`` on it, and ``meeting`` the cluster's other blocks.

    ``tiles``: block tiles of one part; ``multiprocessors`` that can run them; ``clustered``: blocks are in clusters.
    """

    tiles: Any
    multiprocessors: Any
    loading: Any
    working: Any
    meeting: Any = 0.0
    clustered: Any = False


def _multiplying(t: ScheduleArrays, machine: Machine) -> Any:
    """Return the tensor cores' cycles of a k tile."""
    return t.block_m * t.block_n * t.block_k / machine.rates.wgmma_multiply_adds_per_cycle


def _by_warpgroups(
    t: ScheduleArrays, sizes: ProductSizes, machine: Machine, k_tile: _KTile, times: _WarpgroupTimes
) -> np.ndarray:
    """Estimate warpgroups from what a k tile takes, without copies in front."""
    rates, (m, n, k, _, _, itemsize) = machine.rates, sizes
    split, in_boxes = np.asarray(t.parts) > 1, np.asarray(t.boxes) > 0
    k_tiles = np.maximum(t.k_tiles(k), 2)  # a single one is padded with a second one of zeros
    busiest = ceildiv(k_tile.tiles * t.parts, k_tile.multiprocessors)
    together = np.minimum(busiest, t.resident(machine, np.minimum(t.stages, k_tiles), t.own_warp))
    last = busiest % together  # blocks of the last round, which hide less
    # Stages of the ring without an outstanding load; then k tiles in flight per block.
    idle = np.where((np.asarray(t.own_warp) > 0) | (in_boxes & (t.stages <= SHORT_RING)), 1, 2)
    ahead = np.maximum(1, np.minimum(t.stages - idle, k_tiles))

    def one(blocks: Any) -> Any:
        """Return a k tile's cycles with ``blocks`` resident."""
        waiting, loading = times.latency / (blocks * ahead), k_tile.loading
        if np.max(t.boxes):  # lines arrive unevenly: a smooth maximum of throughput and latency
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
    """Return how many cache lines of A and of B a k tile's boxes touch; ``whole``: the rows are whole lines.

    A row that begins within a line may touch one line more. Averaged over the possible start offsets.
    """
    m, n, k, b_row, nt, itemsize = sizes

    def of_row(row_bytes: Any, grain: Any) -> Any:
        """Return the mean lines of a row that begins at a multiple of ``grain`` bytes."""
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
    """Return the cycles of a kernel in front that copies ``rows`` of k elements.

    ``share`` scales the bandwidth term, ``front`` the shortest kernel's time.
    """
    rates, copied_bytes = machine.rates, rows * k * itemsize
    longer = (share * 2 * copied_bytes / rates.copying_gb_s + front * 1e3 * rates.copying_us) * CLOCK_GHZ
    return np.where(copied_bytes > 0, longer, 0.0)


def planned_cycles(choice: Choice, problem: Matmul, machine: Machine, planned: Planned = ONE_PART) -> float:
    """Return one schedule's cycles by its formula, without trees (:func:`cycles`)."""
    arrays = ScheduleArrays.of([choice], machine, problem.itemsize).as_planned([planned])
    return float(cycles(arrays, ProductSizes.of(problem), machine)[0])


def features(t: ScheduleArrays, sizes: ProductSizes, machine: Machine, formula: Any) -> dict[str, Any]:
    """Return the trees' features of schedules by name, given their cycles by the ``formula``."""
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
    """Return the schedules' cycles by their formula, corrected by the machine's trees if it has some."""
    formula = cycles(kernels, sizes, machine)
    if machine.corrections is None or not len(formula):
        return formula
    trees = machine.corrections[0 if np.max(kernels.sums) else 1]
    return formula * np.exp(trees.predict(features(kernels, sizes, machine, formula)))
