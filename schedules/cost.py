"""Cost of a tile on a machine: one model for the steps' default tiles, for torch_ops' choice, and for the search.

It puts candidates into order without measuring them, no more: results never depend on it. What it needs to know of a
GPU is data (:class:`CostRates`), read from that GPU's rates file by whoever asks.

Three questions, each a function here:

- How long do a product's block tiles take (:func:`block_tile_cost`; on tensor cores, with few rows too,
  :func:`contraction_cycles`; by warps on ordinary cores :func:`warp_cycles`; of kernels with roles
  :func:`stream_k_cycles`)?
- Into how many parts should a long reduction go (:func:`parts_to_fill`, :func:`parts_for`,
  :func:`warp_parts`, :func:`wgmma_parts`)?
- Does copying operands to aligned rows first pay (:func:`sectors_first`, :func:`copied_first`)?

What these formulas leave of measured times, trees say for the tiles that come first (:mod:`.left_over`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from tvm.target import Target

from tensorir_ladder.schedules.isa import (
    PANEL,
    PARTITIONS,
    PIECE_ROWS,
    ROW_BYTES,
    SECTOR_BYTES,
    SHARED_KIB,
    VECTOR_BYTES,
    WARP,
    WARPGROUP,
    WGMMA_ROWS,
)
from tensorir_ladder.schedules.loops.early_launch import can_launch_early
from tensorir_ladder.schedules.tiles import SHORT_RING, BlockTile, Choice, ThreadTile, TileSet, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.trees import Trees
from tensorir_ladder.schedules.workloads import Matmul


@dataclass(frozen=True)
class CostRates:
    """Numbers that the model takes from a GPU's rates file, where each says how it came about.

    ``*_warps_to_hide`` and ``*_edge`` weigh latency and a tile's edges, for ordinary cores (simt) and tensor cores.
    Per cycle of a multiprocessor: multiply-adds of wgmma, bytes loaded while all load, bytes of a stream-K helper's
    sums handed over to device memory and read again by a tile's owner, results stored. ``hand_over_cycles`` until a
    flag raised by one block has let another read what it left; ``launch_cycles`` of a launch that waits for the end of
    the kernel before it; ``barrier_cycles`` of a k tile's block barrier that nothing hides. ``copying_gb_s`` reads and
    writes of a copy, ``copying_us`` the shortest kernel in front. ``shortest_part_k_tiles``: the fewest k tiles that a
    part of a split reduction was seen to pay with.
    """

    simt_warps_to_hide: float
    simt_edge: float
    tensor_warps_to_hide: float
    tensor_edge: float
    wgmma_multiply_adds_per_cycle: float
    load_bytes_per_cycle: float
    hand_over_bytes_per_cycle: float
    hand_over_cycles: float
    add_bytes_per_cycle: float
    stored_results_per_cycle: float
    launch_cycles: float
    barrier_cycles: float
    copying_gb_s: float
    copying_us: float
    shortest_part_k_tiles: int


@dataclass(frozen=True)
class Measured:
    """A tile and stages that were measured to be the fastest for a product of ``sizes`` (m, n, k), layout and dtype."""

    sizes: tuple[int, int, int]
    layout: str
    dtype: str
    choice: Choice


@dataclass(frozen=True)
class Machine:
    """A GPU as the model sees it: TVM target with limits, multiprocessors, rates, cp.async, and its name, if known.

    ``measured`` goes before what the model says, for those who ask for it. ``corrections``: trees for tiles of warps
    and of warpgroups, which say what the model leaves (:mod:`.left_over`); without them the model stands alone.
    """

    target: Target
    multiprocessors: int
    rates: CostRates
    has_cp_async: bool = True
    name: str = ""
    measured: tuple[Measured, ...] = ()
    corrections: tuple[Trees, Trees] | None = None

    def measured_choices(
        self, sizes: tuple[int | None, int | None, int | None], layout: str, dtype: str
    ) -> list[Choice]:
        """List what was measured to be the fastest for a product, of each family of tiles; none for unknown extents."""
        wanted = sizes, layout, dtype
        return [each.choice for each in self.measured if (each.sizes, each.layout, each.dtype) == wanted]


# Of a GPU of which nothing is known but its architecture: rates of sm_90, in round numbers, and its multiprocessors.
ASSUMED_MULTIPROCESSORS = 132
ASSUMED_RATES = CostRates(
    simt_warps_to_hide=4.0,
    simt_edge=11.0,
    tensor_warps_to_hide=0.5,
    tensor_edge=20.0,
    wgmma_multiply_adds_per_cycle=2048.0,
    load_bytes_per_cycle=60.0,
    hand_over_bytes_per_cycle=22.0,
    hand_over_cycles=2000.0,
    add_bytes_per_cycle=64.0,
    stored_results_per_cycle=16.0,
    launch_cycles=1200.0,
    barrier_cycles=100.0,
    copying_gb_s=4300.0,
    copying_us=3.0,
    shortest_part_k_tiles=16,
)
CLOCK_GHZ = 1.9  # of a multiprocessor, by which copying_gb_s becomes bytes per cycle
LATENCY_CYCLES = 1200  # from the issue of a cp.async to its data, while many others are on their way
ROUND_CYCLES = 3000  # from a block's last k tile to the first of the block behind it, as short products show it
DEVICE_LATENCY_CYCLES = 1700  # the same, of data in device memory, while that is busy
MMA_SHARE = 0.55  # of wgmma's multiply-adds that mma.sync does, its operands read by ldmatrix
SIMT_MULTIPLY_ADDS = 128  # of ordinary cores, per cycle of a multiprocessor
# Of products by warps on ordinary cores, fitted to an H200's times of 3,069 kernels on 259 shapes (30 of the slowest of
# seed 2049, others drawn, float32 of group schedules, seeds 7011, 7013 and 7015). Of shapes left out in turn, what it
# puts first has 0.986 of the speed of the fastest, 0.86 at worst.
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
CACHED_BYTES = 32 * 2**20  # of parts, which then find room in the L2 cache until they are added up
# Of products by warpgroups whose threads bring operands, fitted to an H200's times of 1,434 kernels on 116 shapes (34
# of the slowest of an earlier seed, the others drawn, float16 of group schedules, seed 5201), operands copied first or
# not, and of 200 shapes by one kernel each (seed 2041); but for what storing takes longer.
WGMMA_SPLIT_SECTORS = 1.8  # what rows take longer that are no whole sectors: see :func:`wgmma_cycles`
WGMMA_LOADS = 1.15  # of load_bytes_per_cycle
WGMMA_SCATTERED = 3.48  # what storing takes longer where each thread stores its sums: of products smaller than a tile
WGMMA_COPIED, WGMMA_FRONT = 0.84, 0.52  # of a copy's bytes and of copying_us, with the product's kernel behind it


class _WarpgroupTimes(NamedTuple):
    """Hold what a product by warpgroups takes, by who brings its operands.

    ``unhidden``: of what a k tile takes less (multiplying or loading), behind what takes longer. ``reading``: of
    reading device memory, or of the k tiles where they take less, that the other does not hide. ``stored``: of
    stored_results_per_cycle. In cycles: ``latency`` from asking for a k tile to its arrival, while others are on their
    way; ``filling`` from a block's start to its first k tile; ``starting`` of a kernel; ``part`` of each part, read
    behind the one before by the threads that add them up. What storing takes longer: ``swapped``, whose pairs of sums
    are two rows'; ``astride``, whose rows begin inside of sectors; ``ragged``, whose tile has columns beyond whole
    panels. ``boxes``: whether TMA brings them, and ``own_warp``: by a warp that does nothing else.
    """

    unhidden: float
    reading: float
    stored: float
    latency: float
    filling: float
    starting: float
    part: float
    swapped: float
    astride: float
    ragged: float
    boxes: bool = False
    own_warp: bool = False

    def held(self, stages: int) -> int:
        """Return the stages of a ring of so many that no tile is on its way to."""
        return 1 if self.own_warp or (self.boxes and stages <= SHORT_RING) else 2


class _BoxTimes(NamedTuple):
    """Hold what k tiles that TMA brings take, in cycles but for ``operands``.

    ``line``: from one cache line that it reads of to the next; ``l2_line``: the same, where all multiprocessors ask for
    lines. ``fill``: of shared memory, while a row of 128 bytes arrives; ``operands``: of the cycles in which it gives
    wgmma its operands, the share that rows wait for. ``least``: of a k tile, its wait, its instructions one behind the
    other, and what is between them. ``sync``: of a k tile in a cluster, each time that this has twice as many blocks.
    """

    line: float
    l2_line: float
    fill: float
    operands: float
    least: float
    sync: float


# Fitted to an H200's times of 4,374 kernels on 259 shapes (float16 of group schedules): the slowest of seeds 2053 and
# 2054, drawn ones of seeds 7010, 7012 and 7014, many of them of few k tiles or of few rows; tiles of both orders of
# operands, in clusters of up to eight. Of shapes left out in turn what comes first has 0.973 of the speed of the
# fastest, 0.80 at worst. Unhidden and latency of BY_THREADS are those of an earlier fit, to larger products.
BY_THREADS = _WarpgroupTimes(
    0.53, 0.354, 0.897, LATENCY_CYCLES, 328, 2903, 311, swapped=1.39, astride=1.31, ragged=1.28
)
BY_FIRST_WARP = _WarpgroupTimes(
    0.204, 0.335, 0.631, 1902, 707, 3171, 337, swapped=1.24, astride=1.22, ragged=1.09, boxes=True
)
FIRST_WARP = _BoxTimes(line=1.115, l2_line=1.667, fill=0.044, operands=1.443, least=276, sync=59)
BY_OWN_WARP = _WarpgroupTimes(
    0.342, 0.294, 0.614, 1128, 43, 3606, 475, swapped=1.2, astride=1.26, ragged=1.09, boxes=True, own_warp=True
)
OWN_WARP = _BoxTimes(line=1.133, l2_line=1.772, fill=1.229, operands=0.362, least=64, sync=32)
# Of a product by boxes: blocks below each other share B, beside each other A.
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4))
# Of multiprocessors, those that clusters of more than two can have: 120 of an H200's 132, of four as of eight.
CLUSTERED = 0.91
GATHERING = 489  # cycles until a cluster's blocks find room together, in rounds behind the first, beside other blocks
STORING = 0.55  # of storing, what other resident blocks do not hide
EARLY_CYCLES = 418  # that a kernel takes less when it is launched early: 0.22 us, as float32 products did
PARTS = (*range(1, 17), *range(18, 33, 2))
CORRECTED = 20  # choices that a formula puts first, whose cycles are corrected by what it leaves
PLANNED_AGAIN = 4  # of these, the cheapest, for which a set that plans again does
KEPT = 1024  # of what is asked again and again while choices are made
ALIKE = 32  # rows and columns by which tiles differ that are not nearly the same
SPLIT_PAYS = 0.95  # of the time of a whole reduction: what parts are modelled to save has to be more than the rest
PART_BYTES = 4  # of a sum that waits to be added up: float32
STORED_BYTES = 2  # of the results that stored_results_per_cycle counts: float16
HIDDEN = 0.6  # of what a k tile takes less (multiplying or loading), behind what takes longer
UNHIDDEN = 0.1  # of what the multiprocessors do while all wait for device memory, or of the memory's time otherwise


def assumed_machine(target: Target) -> Machine:
    """Return the machine that a target's architecture suggests: whoever knows the GPU passes a Machine of its own.

    Limits that the target states count, but for shared memory: TVM detects what a block has without asking for more,
    and the architecture's limit is higher.
    """
    arch = re.fullmatch(r"sm_(\d+)[af]?", str(target.attrs.get("arch", "")))
    number = int(arch.group(1)) if arch else 0
    stated = int(target.attrs.get("max_shared_memory_per_block", 48 * 1024))
    limits = {
        "max_threads_per_block": int(target.attrs.get("max_threads_per_block", 1024)),
        "registers_per_block": int(target.attrs.get("registers_per_block", 65536)),
        "max_shared_memory_per_block": max(stated, SHARED_KIB.get(number, 48) * 1024),
    }
    known = Target({"kind": target.kind.name, **({"arch": arch.group()} if arch else {}), **limits})
    return Machine(known, ASSUMED_MULTIPROCESSORS, ASSUMED_RATES, has_cp_async=number >= 80)


def choose(tiles: TileSet, problem: Matmul, machine: Machine, *, split: bool = False) -> Choice:
    """Return the tile and stages of ``tiles`` that should be fastest for a product; the default where none is listed.

    Choices that the machine cannot hold are left out, or taken with fewer stages where it can hold none as it is.
    ``split`` counts each block in the parts that a variant which splits the reduction makes of it. Where the set says
    what its formula leaves, that counts of the CORRECTED choices that the formula puts first; of those that are nearly
    the same, only of the first: such were not timed beside each other. Where it ``plans_again``, so it does for the
    PLANNED_AGAIN cheapest.
    """
    first = first_choices(tiles, problem, machine, split=split)

    def as_the_formula_plans(choice: Choice) -> float:
        return planned_cost(tiles, choice, problem, machine, _first_plan(tiles, choice, problem, machine, split))

    def cost(choice: Choice) -> float:
        return choice_cost(tiles, choice, problem, machine, split=split)

    if tiles.plans_again:
        first = sorted(first, key=as_the_formula_plans)[:PLANNED_AGAIN]
    return min(first, key=cost, default=tiles.default)


def first_choices(tiles: TileSet, problem: Matmul, machine: Machine, *, split: bool = False) -> list[Choice]:
    """List the choices whose cost is asked; see :func:`choose`."""
    able = _fitting(tiles.choices, machine.target, problem.itemsize)
    if tiles.left_over:
        first: dict[object, Choice] = {}
        for choice in sorted(able, key=lambda choice: _by_formula(tiles, choice, problem, machine, split)[0]):
            tile = choice.tile
            sizes = tile.block_m // ALIKE, tile.block_n // ALIKE, tile.block_k, tile.threads_per_block
            first.setdefault((type(tile), *sizes), choice)
        able = list(first.values())[:CORRECTED]
    return able


def choice_cost(tiles: TileSet, choice: Choice, problem: Matmul, machine: Machine, *, split: bool = False) -> float:
    """Return what a product costs by a tile and stages of a set; see :func:`choose` for ``split``."""
    if tiles.plans_again:
        planned = cheapest_plan(tiles, choice, problem, machine, split=split)
        return planned_cost(tiles, choice, problem, machine, planned)
    cycles, parts = _by_formula(tiles, choice, problem, machine, split)
    planned = tiles.plan(choice, problem, machine, parts) if tiles.left_over and tiles.plan else Planned(parts)
    return _corrected(tiles, choice, problem, machine, planned, cycles)


def cheapest_plan(tiles: TileSet, choice: Choice, problem: Matmul, machine: Machine, *, split: bool = False) -> Planned:
    """Return what a schedule by a tile of a set that plans should do beside it.

    That is what its formula puts first; of a set that ``plans_again`` what differs from that in a single thing, where
    that costs less by what the formula leaves: such were timed beside each other (``ladder calibrate``).
    Of 592 shapes in float32, left out in five turns, what is taken has 0.9879 of the fastest by this, 0.9873 without,
    and 83 are below 0.95 of cuBLAS instead of 87. In float16 it was 0.9846 and 0.9840, and half a second of thought.
    """
    first = _first_plan(tiles, choice, problem, machine, split)
    if not tiles.plans_again:
        return first
    plans = [first, *plans_beside(choice, problem, first, split=split)]
    return min(plans, key=lambda planned: planned_cost(tiles, choice, problem, machine, planned))


def plans_beside(choice: Choice, problem: Matmul, planned: Planned, *, split: bool) -> list[Planned]:
    """List the plans that differ from one in a single thing; in their parts where the reduction may be ``split``."""
    parts = parts_beside(choice, problem, planned.parts) if split else []
    ways = ways_to_plan(choice, problem, planned)
    others = [way for way in ways if sum(one != another for one, another in zip(way, planned)) == 1]
    return [*(planned._replace(parts=each) for each in parts), *others]


def planned_cost(tiles: TileSet, choice: Choice, problem: Matmul, machine: Machine, planned: Planned) -> float:
    """Return what a product costs by a tile and stages of a set when it is scheduled as ``planned``."""
    cycles = planned_cycles(choice, problem, machine, planned)
    return _corrected(tiles, choice, problem, machine, planned, cycles)


def _first_plan(tiles: TileSet, choice: Choice, problem: Matmul, machine: Machine, split: bool) -> Planned:
    """Return what the formula of a set that plans puts first."""
    _, parts = _by_formula(tiles, choice, problem, machine, split)
    return tiles.plan(choice, problem, machine, parts) if tiles.plan else Planned(parts)


def _corrected(
    tiles: TileSet, choice: Choice, problem: Matmul, machine: Machine, planned: Planned, cycles: float
) -> float:
    """Return the formula's cycles with what it leaves, less what an early launch saves."""
    left = tiles.left_over(choice, problem, machine, planned, cycles) if tiles.left_over else 1.0
    early = tiles.launched_early and can_launch_early(machine.target)
    return cycles * left - (EARLY_CYCLES if early else 0.0)


def _by_formula(tiles: TileSet, choice: Choice, problem: Matmul, machine: Machine, split: bool) -> tuple[float, int]:
    """Return what a product costs by the formula alone, and the parts of its reduction."""
    return _priced(tiles.cost or block_tile_cost, tiles.parts or parts_for, choice, problem, machine, split)


@functools.lru_cache(KEPT)
def _priced(
    cost: Callable[..., float],
    parts_of: Callable[..., int],
    choice: Choice,
    problem: Matmul,
    machine: Machine,
    split: bool,
) -> tuple[float, int]:
    """Do the work of :func:`_by_formula`, once for what is asked again while one product's choice is made."""
    parts = parts_of(problem, choice, machine) if split else 1
    return cost(choice, problem, machine, parts), parts


def _fitting(choices: Sequence[Choice], target: Target, itemsize: int) -> list[Choice]:
    """Return the choices that a target can hold; with fewer stages where it can hold none of them as it is."""
    for fewer in range(max((choice.stages for choice in choices), default=0)):
        shorter = [Choice(choice.tile, choice.stages - fewer) for choice in choices if choice.stages > fewer]
        if legal := [each for each in shorter if not each.tile.violations(target, itemsize, each.stages)]:
            return legal
    return []


def block_count(problem: Matmul, tile: BlockTile) -> int:
    """Return how many block tiles the output has."""
    return -(-problem.m // tile.block_m) * -(-problem.n // tile.block_n)


def block_tile_cost(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> float:
    """Return what a product costs with one block to a block tile, in outputs: good for an order, no time.

    A multiprocessor's time is the outputs that fall to it, dearer where few warps hide each other's latencies
    and where tiles are small, whose edges load more for each output::

        ceil(blocks / multiprocessors) · block_m · block_n
          · (1 + warps_to_hide / warps resident) · (1 + edge · (1 / block_m + 1 / block_n))

    A warp that reads one step ahead counts twice: it hides latency as two do. ``ladder table`` shows what
    the choice costs against tuning.
    """
    tile = choice.tile
    ordinary = isinstance(tile, (ThreadTile, WarpTile))
    rates = machine.rates
    hide = rates.simt_warps_to_hide if ordinary else rates.tensor_warps_to_hide
    edge = rates.simt_edge if ordinary else rates.tensor_edge
    per_multiprocessor = -(-block_count(problem, tile) * parts // machine.multiprocessors)
    resident = resident_blocks(choice, machine, problem.itemsize)
    warps = min(per_multiprocessor, resident) * tile.threads_per_block / WARP * (1 + tile.steps_ahead)
    edges = 1 + edge * (1 / tile.block_m + 1 / tile.block_n)
    return per_multiprocessor / parts * tile.block_m * tile.block_n * (1 + hide / warps) * edges


def contraction_cycles(
    choice: Choice,
    sizes: tuple[int, int, int],
    machine: Machine,
    *,
    batch: int = 1,
    parts: int = 1,
    itemsize: int = 2,
    result_bytes: int = 2,
    filled: int | None = None,
) -> float:
    """Return about how many cycles a product of ``sizes`` (m, n, k) takes on tensor cores; good for an order.

    ::

        k tile   = the longer of multiplying and loading it, and what the other does not hide
        loop     = tiles of the busiest multiprocessor · k tiles of a part · k tile
        busy     = loop + storing, less multiplying that one resident block does while another stores
                   + from block to block and ring to ring, less while others run
        device   = reading both operands once + writing the results, which takes no less than storing unhidden
        in all   = the longer of busy and device, and a little of the other
                   + filling the first ring + (parts > 1) adding them up by another kernel

    Loading is as fast as the L2 cache, or as what is on its way allows (:data:`LATENCY_CYCLES`), and so is reading,
    which is of columns where rows are few. Rows that a tile has beyond m are multiplied, and not loaded. Few rows make
    a product wait for device memory, whatever its tile: then parts and narrow tiles that fill the GPU are the cheapest.
    A product of few k tiles waits for its results to be stored (``result_bytes`` each, what is read beside them
    counted): then tiles of which several blocks are resident are cheaper, since one stores while another multiplies.
    ``filled`` is after how many k tiles the ring is filled anew, by default only for the next tile. Parts are added up
    out of the L2 cache where they find room there.
    """
    (m, n, k), tile, rates = sizes, choice.tile, machine.rates
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n) * batch * parts
    k_tiles = max(math.ceil(math.ceil(k / tile.block_k) / parts), 1)
    busiest = -(-tiles // machine.multiprocessors)
    together = min(busiest, resident_blocks(Choice(tile, min(choice.stages, k_tiles)), machine, itemsize))
    rounds = -(-busiest // together)
    brought = (min(m, tile.block_m) + min(n, tile.block_n)) * tile.block_k * itemsize
    by_wgmma = isinstance(tile, WarpgroupTile)
    ahead = together * max(1, min(choice.stages - (2 if by_wgmma else 1), k_tiles))  # k tiles on their way
    loading = brought / min(rates.load_bytes_per_cycle, ahead * brought / LATENCY_CYCLES)
    share = 1.0 if by_wgmma else MMA_SHARE
    multiplying = tile.block_m * tile.block_n * tile.block_k / (rates.wgmma_multiply_adds_per_cycle * share)
    k_tile = max(multiplying, loading) + (1 - HIDDEN) * min(multiplying, loading)
    loop = busiest * k_tiles * k_tile
    stored_bytes = busiest * min(m, tile.block_m) * min(n, tile.block_n) * result_bytes
    storing = stored_bytes / (rates.stored_results_per_cycle * STORED_BYTES)
    hidden = (1 - 1 / together) * (1 - 1 / rounds) * min(loop - busiest * k_tiles * loading, storing)
    columns_on_their_way = min(tiles, machine.multiprocessors) * ahead * min(n, tile.block_n) * tile.block_k * itemsize
    per_cycle = rates.copying_gb_s / CLOCK_GHZ
    reading = batch * (m + n) * k * itemsize / min(per_cycle, columns_on_their_way / DEVICE_LATENCY_CYCLES)
    fills = rounds * (math.ceil(k_tiles / (filled or k_tiles)) - 1)
    waiting = ((rounds - 1) * ROUND_CYCLES + fills * LATENCY_CYCLES) / together
    busy = loop + storing - hidden + waiting
    device = reading + max(batch * m * n * result_bytes / per_cycle, storing - hidden)
    adding = _adding_cycles(m, n, parts, machine) if parts > 1 else 0.0
    return max(busy, device) + UNHIDDEN * min(busy, device) + LATENCY_CYCLES + adding


def wgmma_cycles(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> float:
    """Return about how many cycles a product takes by warpgroups, its reduction in ``parts``; a TileSet's ``cost``.

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
                   + operands that are copied first (:func:`sectors_first`), without what their rows are rounded up by

    A row that is no whole number of sectors and is not copied takes nearly twice as long. In wgmma's swizzled panels
    the halves of a sector that such a row puts into two pairs of 16 bytes lie apart, and cp.async brings the sector
    once for each: 1.5 times the sectors where every other row begins inside of one, as Nsight Compute counts them.
    Rows of whole sectors that straddle cache lines were measured to take no longer than others. Rows and columns that
    the tile has beyond the product, and those that fill its last panel, are copies of no bytes, which take as long.
    """
    return float(_by_warpgroups(choice, problem, machine, [parts], _ways_to_copy(problem, choice.tile)).min())


def sectors_first(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> tuple[bool, bool]:
    """Return of both operands whether a kernel in front should copy them to rows of whole sectors.

    What :func:`wgmma_cycles` is the least with. Rows of no whole vectors are copied whatever this says: it is True for
    them where the tile, to which copies are rounded up, makes them whole sectors.
    """
    ways = _ways_to_copy(problem, choice.tile)
    cheapest = ways[_by_warpgroups(choice, problem, machine, [parts], ways).argmin()]
    return _mended(problem, choice.tile, cheapest)


def box_cycles(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> float:
    """Return about how many cycles a product takes by warpgroups whose operands TMA brings; a TileSet's ``cost``.

    As :func:`wgmma_cycles`, but for what a k tile takes, and by the best of a few plans (:func:`box_plan`)::

        loading  = asking for cache lines, by one multiprocessor or, where that takes longer, by all that are busy;
                   of an operand that a cluster shares, each block asks for its share; meeting its other blocks
        working  = the longer of multiplying, and shared memory's rows that arrive and operands that wgmma reads
        in all   = ... + for each round behind the first, where others are resident, a cluster's blocks that wait
                   until they find room together

    A row that begins inside of a cache line has a part of one line more: of rows of all offsets that come to pass, as
    often as they end in the next one. Source: what was measured.
    """
    return float(_by_boxes(choice, problem, machine, [parts], _box_plans(problem, choice.tile)).min())


class BoxPlan(NamedTuple):
    """Say how operands come by TMA: which are copied first, to rows of whole cache lines, and which blocks share what.

    ``cluster``: so many blocks below each other share B, so many beside each other A.
    """

    copied: tuple[bool, bool]
    cluster: tuple[int, int]


class Planned(NamedTuple):
    """Say all that a schedule does beside its tile and stages, so that its cycles can be told apart from others'.

    ``copied``: which operands are copied first, by warpgroups those to rows of whole sectors, by boxes of whole cache
    lines; rows that are no whole vectors are copied whatever it says. By warps it is these rows alone that may be, and
    of others it says nothing. ``boxes``: TMA brings operands, in
    ``cluster`` as :class:`BoxPlan` has it, by a warp of its own or not.
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


def plan_by_warps(choice: Choice, problem: Matmul, machine: Machine, parts: int) -> Planned:
    """Return what a schedule by warps does in so many parts; a TileSet's ``plan``."""
    return Planned(parts, copied_first(choice, problem, machine, parts))


def plan_by_warpgroups(choice: Choice, problem: Matmul, machine: Machine, parts: int) -> Planned:
    """Return the same of warpgroups whose threads bring operands."""
    return Planned(parts, sectors_first(choice, problem, machine, parts))


def plan_by_boxes(choice: Choice, problem: Matmul, machine: Machine, parts: int) -> Planned:
    """Return the same of warpgroups whose operands TMA brings."""
    copied, cluster = box_plan(choice, problem, machine, parts)
    return Planned(parts, copied, True, cluster, has_own_warp(choice, problem, machine, parts))


def ways_to_plan(choice: Choice, problem: Matmul, planned: Planned) -> list[Planned]:
    """List all that a product's schedule by a tile can do in as many parts, by warps, warpgroups or boxes as planned.

    Copies of operands first, clusters of blocks, and a warp of its own that brings boxes. What means nothing stays as
    it is planned.
    """
    tile = choice.tile
    if isinstance(tile, WarpTile):
        of_a, of_b = unaligned_rows(problem, VECTOR_BYTES)
        of_b = of_b and problem.layout == "nn"  # else its tiles are transposed on their way
        ways = [
            (first if of_a else planned.copied[0], second if of_b else planned.copied[1])
            for first, second in _ways_to_copy_vectors(problem)
        ]
        return [planned._replace(copied=copied) for copied in dict.fromkeys(ways)]
    if not planned.boxes:
        ways = _ways_to_copy(problem, tile)
        return [planned._replace(copied=_mended(problem, tile, copied)) for copied in ways]
    return [
        Planned(planned.parts, _mended(problem, tile, plan.copied, ROW_BYTES), True, plan.cluster, own)
        for plan in _box_plans(problem, tile)
        for own in ((False, True) if _warpgroups(choice).leaves_a_warp else (False,))
    ]


def parts_beside(choice: Choice, problem: Matmul, parts: int) -> list[int]:
    """List the numbers of parts just below and just above, as far as a reduction has k tiles for the stages of each."""
    most = max(1, -(-problem.k // choice.tile.block_k) // max(choice.stages, 2))
    below, above = ([each for each in PARTS if each < parts], [each for each in PARTS if parts < each <= most])
    return [*below[-1:], *above[:1]]


def planned_cycles(choice: Choice, problem: Matmul, machine: Machine, planned: Planned) -> float:
    """Return about how many cycles a product takes by the formulas when it is scheduled as ``planned``."""
    parts, copied = planned.parts, planned.copied
    if isinstance(choice.tile, WarpTile):
        return _by_warps(choice, problem, machine, parts, copied)
    of_a, of_b = unaligned_rows(problem, VECTOR_BYTES)  # which are copied whatever is planned
    copied = copied[0] or of_a, copied[1] or of_b
    if not planned.boxes:
        return float(_by_warpgroups(choice, problem, machine, [parts], [copied]).min())
    plans = [BoxPlan(copied, planned.cluster)]
    return float(_by_boxes_of(choice, problem, machine, [parts], plans, own_warp=planned.own_warp).min())


def has_own_warp(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> bool:
    """Return whether a warp of its own should bring a product's boxes (:func:`pipeline.bring_by_own_warp`).

    Where its registers are there and it takes a multiprocessor no second block, which hides as much.
    """
    if not _warpgroups(choice).leaves_a_warp:
        return False
    k_tiles = max(math.ceil(math.ceil(problem.k / choice.tile.block_k) / parts), 2)
    built = Choice(choice.tile, min(choice.stages, k_tiles))
    first, own = (resident_blocks(built, machine, problem.itemsize, more_groups) for more_groups in (0, 1))
    return own >= min(first, 2)


def box_plan(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> BoxPlan:
    """Return what :func:`box_cycles` is the least with; rows of no whole 16 bytes are copied, whatever this says."""
    plans = _box_plans(problem, choice.tile)
    best = plans[_by_boxes(choice, problem, machine, [parts], plans).argmin()]
    return best._replace(copied=_mended(problem, choice.tile, best.copied, ROW_BYTES))


def box_parts(problem: Matmul, choice: Choice, machine: Machine) -> int:
    """Return into how many parts a reduction by boxes should go; each has at least as many k tiles as stages."""
    plans = _box_plans(problem, choice.tile)
    return _cheapest_parts(problem, choice, lambda parts: _by_boxes(choice, problem, machine, parts, plans).min(axis=0))


def warp_cycles(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> float:
    """Return about how many cycles a product takes by warps on ordinary cores, its reduction in ``parts``.

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

    A TileSet's ``cost``; what is cheaper of the last two counts (:func:`copied_first`).
    """
    return min(_by_warps(choice, problem, machine, parts, copied) for copied in _ways_to_copy_vectors(problem))


def copied_first(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> tuple[bool, bool]:
    """Return of both operands whether a kernel in front should copy them to rows of whole vectors.

    True for rows that are whole vectors as they are. The other way is copying rows to shared memory element by element,
    every time that a block needs them: of an operand much larger than the other one, that is sooner done than a copy of
    it. Of a B stored [n, k] it says what it says of A, and means nothing.
    """
    ways = _ways_to_copy_vectors(problem)
    return min(ways, key=lambda copied: _by_warps(choice, problem, machine, parts, copied))


def warp_parts(problem: Matmul, choice: Choice, machine: Machine) -> int:
    """Return into how many parts a reduction by warps should go; each has at least as many k tiles as stages."""
    return _cheapest_parts(
        problem, choice, lambda counts: [warp_cycles(choice, problem, machine, parts) for parts in counts]
    )


def wgmma_parts(problem: Matmul, choice: Choice, machine: Machine) -> int:
    """Return into how many parts a reduction by warpgroups should go; each has at least as many k tiles as stages."""
    ways = _ways_to_copy(problem, choice.tile)
    return _cheapest_parts(
        problem, choice, lambda parts: _by_warpgroups(choice, problem, machine, parts, ways).min(axis=0)
    )


def _cheapest_parts(problem: Matmul, choice: Choice, cycles: Callable[[list[int]], Sequence[float]]) -> int:
    """Return the cheapest number of parts, by a function that prices a list of them."""
    most = max(1, -(-problem.k // choice.tile.block_k) // max(choice.stages, 2))
    counts = [parts for parts in PARTS if parts <= most]
    found = dict(zip(counts, cycles(counts)))
    best = min(found, key=found.__getitem__)
    return best if found[best] < SPLIT_PAYS * found[1] else 1


def _by_warps(choice: Choice, problem: Matmul, machine: Machine, parts: int, copied: tuple[bool, bool]) -> float:
    tile, rates, itemsize = choice.tile, machine.rates, problem.itemsize
    if not isinstance(tile, WarpTile):
        raise TypeError(f"{tile} is no tile of warps on ordinary cores")
    m, n, k = problem.m, problem.n, problem.k
    unaligned = unaligned_rows(problem, VECTOR_BYTES)
    k_of_part = tile.steps_of_part(k, parts)
    transposed = problem.layout == "nt"  # B, element by element, whatever its rows are
    if transposed:
        unaligned = unaligned[0], False
    blocks, resident = block_count(problem, tile) * parts, resident_blocks(choice, machine, itemsize)
    busiest = -(-blocks // machine.multiprocessors)
    last = busiest % resident  # blocks of the last round, which hide less
    turns = sum(
        count * _turns(tile, there, rates) for count, there in ((busiest - last, resident), (last, last)) if count
    )
    multiplying = turns * tile.block_m * tile.block_n * k_of_part / SIMT_MULTIPLY_ADDS
    in_front = [apart and first for apart, first in zip(unaligned, copied)]
    straight = [apart and not first for apart, first in zip(unaligned, copied)]
    front = _copying_cycles((m * in_front[0] + n * in_front[1]) * k * itemsize, machine)
    one_by_one = [math.gcd(row * itemsize, VECTOR_BYTES) for row in (k, problem.b_shape[1])]
    # Of a few elements each or single ones, for each element of a tile.
    copies = [itemsize / width if apart else 0.0 for width, apart in zip(one_by_one, straight)]
    if transposed:
        copies[1] = 1.0
    if any(in_front) and any(straight):
        multiplying *= ONE_FIRST
    multiplying *= 1 + STRAIGHT_EDGE * (copies[0] / tile.block_n + copies[1] / tile.block_m)
    rounds = -(-busiest // resident)
    multiplying += rounds * -(-k_of_part // tile.block_k) * SIMT_BARRIERS * rates.barrier_cycles
    written_out = _written_out(tile) * choice.stages
    first_round = SIMT_STARTING + CODE_CYCLES * written_out + FETCHED_CYCLES * max(0.0, written_out - KEPT_CODE)
    starting = first_round * (1 + SIMT_AGAIN * (rounds - 1))
    per_cycle = rates.copying_gb_s / CLOCK_GHZ
    memory = ((m + n) * k + m * n) * itemsize / per_cycle
    storing = busiest * min(m, tile.block_m) * min(n, tile.block_n) / rates.stored_results_per_cycle
    adding = _adding_cycles(m, n, parts, machine, SIMT_ADDING) if parts > 1 else 0.0
    if tile.slices > 1:  # their sums, written to shared memory
        adding += busiest * tile.slices * tile.block_m * tile.block_n * 4 / SHARED_BYTES_PER_CYCLE
    longer, shorter = max(multiplying, memory), min(multiplying, memory)
    return SIMT_IN_ALL * (front + longer + SIMT_UNHIDDEN * shorter + starting + storing + adding)


def _turns(tile: WarpTile, blocks: int, rates: CostRates) -> float:
    """Return a multiply-add's cycles by warps, with so many blocks on a multiprocessor; 1 if no core ever waited."""
    waited = SIMT_TO_HIDE * rates.simt_warps_to_hide * WARP / (blocks * tile.threads_per_block)
    reading = FEW_SUMS_TURNS if tile.thread_m * tile.thread_n < FEW_SUMS else 1.0
    reading *= AHEAD_TURNS if tile.steps_ahead else 1.0
    reading *= DEEP_TURNS if _written_out(tile) >= DEEP_CODE else 1.0
    reading *= TALL_TURNS if tile.warp[0] > tile.warp[1] else 1.0
    return SIMT_TURNS * reading * (1 + waited ** (1 + tile.steps_ahead))


def _written_out(tile: WarpTile) -> float:
    """Return how many multiply-adds of a thread are written out, of a k tile."""
    return tile.thread_m * tile.thread_n * tile.block_k / tile.slices


def unaligned_rows(problem: Matmul, row_bytes: int) -> tuple[bool, bool]:
    """Return of both operands whether their rows are no multiples of so many bytes."""
    a, b = (length * problem.itemsize % row_bytes for length in (problem.k, problem.b_shape[1]))
    return bool(a), bool(b)


def _ways_to_copy_vectors(problem: Matmul) -> list[tuple[bool, bool]]:
    """List which of both operands may have rows of whole vectors: see :func:`copied_first`. The first way wins ties."""
    of_a, of_b = ([True, False] if apart else [True] for apart in unaligned_rows(problem, VECTOR_BYTES))
    return [(first, second) for first in of_a for second in (of_b if problem.layout == "nn" else [first])]


def _ways_to_copy(problem: Matmul, tile: BlockTile, row_bytes: int = SECTOR_BYTES) -> list[tuple[bool, bool]]:
    """List which of both operands may be copied first; the first way copies only what has to be, and wins ties."""
    must, may = unaligned_rows(problem, VECTOR_BYTES), unaligned_rows(problem, row_bytes)
    of_a, of_b = (
        [True] if has_to else [False, True] if split and whole else [False]
        for has_to, split, whole in zip(must, may, _mended(problem, tile, (True, True), row_bytes))
    )
    return [(first, second) for first in of_a for second in of_b]


def _mended(
    problem: Matmul, tile: BlockTile, copied: tuple[bool, bool], row_bytes: int = SECTOR_BYTES
) -> tuple[bool, bool]:
    """Return of both operands whether copies of them have rows of whole ``row_bytes``: rounded up to the tile."""
    along_n = tile.block_n if problem.layout == "nn" else tile.block_k
    of_a, of_b = (
        first and extent * problem.itemsize % row_bytes == 0 for first, extent in zip(copied, (tile.block_k, along_n))
    )
    return of_a, of_b


def _box_plans(problem: Matmul, tile: BlockTile) -> list[BoxPlan]:
    """List how a product's operands can be brought by TMA, that which does the least first.

    Of clusters those that the product has tiles for, and whose blocks each have rows of a box to bring.
    """
    ways, rows = _ways_to_copy(problem, tile, ROW_BYTES), -(-problem.m // tile.block_m)
    columns, rows_of_b = -(-problem.n // tile.block_n), tile.block_k if problem.layout == "nn" else tile.block_n
    clusters = [
        (down, across)
        for down, across in CLUSTERS
        if (down == 1 or (down <= rows and rows_of_b >= down * PIECE_ROWS))
        and (across == 1 or (across <= columns and tile.block_m >= across * PIECE_ROWS))
    ]
    return [BoxPlan(copied, cluster) for copied in ways for cluster in clusters]


def _by_warpgroups(
    choice: Choice, problem: Matmul, machine: Machine, parts: Sequence[int], ways: Sequence[tuple[bool, bool]]
) -> np.ndarray:
    """Return the cycles of each way to copy operands first (rows), with each number of parts (columns)."""
    tile, rates, itemsize = _warpgroups(choice), machine.rates, problem.itemsize
    m, n, k = problem.m, problem.n, problem.k
    front, loading = [], []
    for copied in ways:
        copied_bytes = (m * copied[0] + n * copied[1]) * k * itemsize
        front.append(_copying_cycles(copied_bytes, machine, WGMMA_COPIED, WGMMA_FRONT))
        # Rows that begin inside of sectors.
        inside = zip(unaligned_rows(problem, SECTOR_BYTES), _mended(problem, tile, copied))
        longer = [WGMMA_SPLIT_SECTORS - 1 if split and not mended else 0.0 for split, mended in inside]
        rows, columns = min(m, tile.block_m), min(n, tile.block_n)
        # Of a B stored [k, n] whole panels.
        wide = -(-tile.group_n // PANEL) * PANEL * tile.warpgroups[1] if problem.layout == "nn" else tile.block_n
        brought = (tile.block_m + rows * longer[0] + wide + columns * longer[1]) * tile.block_k * itemsize
        loading.append(brought / (WGMMA_LOADS * rates.load_bytes_per_cycle))
    k_tile = _KTile(block_count(problem, tile), machine.multiprocessors, _column(loading), _multiplying(tile, rates))
    return _column(front) + _warpgroup_cycles(choice, problem, machine, np.array(parts), k_tile, BY_THREADS)


def _warpgroups(choice: Choice) -> WarpgroupTile:
    if not isinstance(choice.tile, WarpgroupTile):
        raise TypeError(f"{choice.tile} is no tile of warpgroups")
    return choice.tile


def _column(values: Sequence[float]) -> np.ndarray:
    return np.array(values, float)[:, None]


def _multiplying(tile: WarpgroupTile, rates: CostRates) -> float:
    """Return a k tile's cycles of the tensor cores."""
    return tile.block_m * tile.block_n * tile.block_k / rates.wgmma_multiply_adds_per_cycle


class _KTile(NamedTuple):
    """Hold what k tiles take, an array's rows by how they are brought: how many block tiles there are of them.

    ``multiprocessors``: those that can have some. In cycles: ``loading`` one, ``working`` on it, ``meeting`` others.
    ``clustered``: whether blocks are in clusters.
    """

    tiles: Any
    multiprocessors: Any
    loading: Any
    working: float
    meeting: Any = 0.0
    clustered: Any = False


def _warpgroup_cycles(
    choice: Choice, problem: Matmul, machine: Machine, parts: np.ndarray, k_tile: _KTile, times: _WarpgroupTimes
) -> np.ndarray:
    """Return the cycles of a product by warpgroups: of ways to bring k tiles (rows) and numbers of parts (columns)."""
    tile, rates, itemsize = _warpgroups(choice), machine.rates, problem.itemsize
    m, n, k = problem.m, problem.n, problem.k
    # A single k tile has a second behind it, of zeros, so that there is a loop to pipeline.
    k_tiles = np.maximum(np.ceil(math.ceil(k / tile.block_k) / parts), 2)
    busiest = np.ceil(k_tile.tiles * parts / k_tile.multiprocessors)
    more = int(times.own_warp)
    held = {count: resident_blocks(Choice(tile, count), machine, itemsize, more) for count in _rings(choice, k_tiles)}
    together = np.minimum(busiest, [held[count] for count in _rings(choice, k_tiles)])
    last = busiest % together  # blocks of the last round, which hide less
    whole = (busiest - last) * _k_tile_cycles(choice, together, k_tiles, k_tile, times)
    loop = k_tiles * (whole + last * _k_tile_cycles(choice, np.maximum(last, 1), k_tiles, k_tile, times))
    stored = busiest * min(m, tile.block_m) * min(n, tile.block_n) * np.where(parts > 1, PART_BYTES, itemsize)
    storing = stored / (times.stored * rates.stored_results_per_cycle * STORED_BYTES)
    storing = storing * np.where(n * np.where(parts > 1, PART_BYTES, itemsize) % SECTOR_BYTES > 0, times.astride, 1.0)
    if tile.block_n % PANEL and not tile.swapped:
        storing = storing * times.ragged
    if m < tile.block_m or n < tile.block_n:
        storing = storing * np.where(parts == 1, WGMMA_SCATTERED, 1.0)
    elif tile.swapped:
        storing = storing * np.where(parts == 1, times.swapped, 1.0)
    per_cycle = rates.copying_gb_s / CLOCK_GHZ
    reading, writing = (m + n) * k * itemsize / per_cycle, m * n * itemsize / per_cycle
    looped = np.maximum(loop, reading) + times.reading * np.minimum(loop, reading)
    rounds = np.ceil(busiest / together)
    filling = rounds * times.filling + np.where((together > 1) & k_tile.clustered, (rounds - 1) * GATHERING, 0.0)
    adding = np.where(parts > 1, _adding_cycles(m, n, parts, machine) + parts * times.part, 0.0)
    return looped + (storing + writing) * (STORING + (1 - STORING) / together) + filling + times.starting + adding


def _k_tile_cycles(
    choice: Choice, resident: np.ndarray, k_tiles: np.ndarray, k_tile: _KTile, times: _WarpgroupTimes
) -> np.ndarray:
    """Return what a k tile takes while a multiprocessor has so many blocks."""
    ahead = resident * np.maximum(1, np.minimum(choice.stages - times.held(choice.stages), k_tiles))  # on their way
    waiting, working = times.latency / ahead, k_tile.working
    # Whose lines are asked for one by one arrives unevenly: neither limit is reached beside the other.
    loading = np.cbrt(k_tile.loading**3 + waiting**3) if times.boxes else np.maximum(k_tile.loading, waiting)
    loading = loading + k_tile.meeting
    return np.maximum(working, loading) + times.unhidden * np.minimum(working, loading)


def _rings(choice: Choice, k_tiles: np.ndarray) -> list[int]:
    """Return the stages of a choice where so many k tiles are all."""
    return [min(choice.stages, int(count)) for count in k_tiles]


def _by_boxes(
    choice: Choice, problem: Matmul, machine: Machine, parts: Sequence[int], plans: Sequence[BoxPlan]
) -> np.ndarray:
    """Return the cycles of each plan (rows) with each number of parts (columns)."""
    own = np.array([has_own_warp(choice, problem, machine, count) for count in parts])
    if own.all() or not own.any():
        return _by_boxes_of(choice, problem, machine, parts, plans, own_warp=bool(own.any()))
    first, by_own = (_by_boxes_of(choice, problem, machine, parts, plans, own_warp=either) for either in (False, True))
    return np.where(own, by_own, first)


def _by_boxes_of(
    choice: Choice,
    problem: Matmul,
    machine: Machine,
    parts: Sequence[int],
    plans: Sequence[BoxPlan],
    *,
    own_warp: bool,
) -> np.ndarray:
    """Return the same, by the first warp or by one of its own."""
    times, box = (BY_OWN_WARP, OWN_WARP) if own_warp else (BY_FIRST_WARP, FIRST_WARP)
    tile, (m, n, k) = _warpgroups(choice), (problem.m, problem.n, problem.k)
    counts = np.array(parts)
    copied, (down, across) = np.array([plan.copied for plan in plans]), np.array([plan.cluster for plan in plans]).T
    cluster = down * across
    room = np.where(cluster > 2, int(machine.multiprocessors * CLUSTERED) // cluster * cluster, machine.multiprocessors)
    whole_m, whole_n = tile.block_m * down, tile.block_n * across  # of a cluster
    tiles = np.ceil(m / whole_m) * np.ceil(n / whole_n) * cluster
    bytes_first = (copied * [m, n]).sum(axis=1) * k * problem.itemsize
    front = [_copying_cycles(float(first), machine, WGMMA_COPIED, WGMMA_FRONT) for first in bytes_first]
    ways = dict.fromkeys(plan.copied for plan in plans)
    lines_of = {way: _lines(problem, tile, _mended(problem, tile, way, ROW_BYTES)) for way in ways}
    lines = np.array([lines_of[plan.copied] for plan in plans])
    rows_of_b = min(n, tile.block_n)
    if problem.layout == "nn":  # panels, of each instruction its own
        rows_of_b = min(-(-n // PANEL), -(-tile.group_n // PANEL) * tile.warpgroups[1]) * tile.block_k
    asked = _column(lines[:, 0] / across + lines[:, 1] / down)
    busy = np.minimum(tiles[:, None] * counts, room[:, None]) / machine.multiprocessors
    loading = asked * np.maximum(box.line, box.l2_line * busy)
    wide, high = (tile.group_m, tile.group_n) if tile.swapped else (tile.group_n, tile.group_m)
    groups = tile.warpgroups[0] * tile.warpgroups[1]
    read = groups * high // WGMMA_ROWS * (WGMMA_ROWS + wide) * tile.block_k * problem.itemsize / SHARED_BYTES_PER_CYCLE
    moving = box.operands * read + box.fill * (min(m, tile.block_m) + rows_of_b)
    working = max(_multiplying(tile, machine.rates), moving, box.least)
    meeting = box.sync * np.log2(cluster)[:, None]
    k_tile = _KTile(tiles[:, None], room[:, None], loading, working, meeting, cluster[:, None] > 1)
    return _column(front) + _warpgroup_cycles(choice, problem, machine, counts, k_tile, times)


def _lines(problem: Matmul, tile: WarpgroupTile, whole: tuple[bool, bool]) -> tuple[float, float]:
    """Return about how many cache lines a k tile's boxes have of A and of B, whose rows may be ``whole`` lines."""

    def of_row(row_bytes: int, grain: int) -> float:
        """Lines of a row that begins at any multiple of ``grain`` bytes in one."""
        return 1 + max(0, row_bytes - grain) / ROW_BYTES

    itemsize, n = problem.itemsize, min(problem.n, tile.block_n)
    apart = [
        ROW_BYTES if is_whole else math.gcd(length * itemsize, ROW_BYTES)
        for is_whole, length in zip(whole, (problem.k, problem.b_shape[1]))
    ]
    of_a = min(problem.m, tile.block_m) * of_row(ROW_BYTES, apart[0])
    if problem.layout != "nn":
        return of_a, n * of_row(ROW_BYTES, apart[1])
    panels, rest = divmod(min(problem.n, tile.group_n), PANEL)
    grain = math.gcd(tile.block_n * itemsize, apart[1])
    of_columns = panels * of_row(ROW_BYTES, grain) + (of_row(rest * itemsize, grain) if rest else 0.0)
    return of_a, tile.warpgroups[1] * tile.block_k * of_columns


def _copying_cycles(copied_bytes: float, machine: Machine, share: float = 1.0, front: float = 1.0) -> float:
    """Return the cycles of a kernel in front that reads and writes so many bytes; none of none.

    ``share`` of the bytes' time counts, and ``front`` of the shortest kernel's.
    """
    rates = machine.rates
    if not copied_bytes:
        return 0.0
    return (share * 2 * copied_bytes / rates.copying_gb_s + front * 1e3 * rates.copying_us) * CLOCK_GHZ


def _adding_cycles(m: int, n: int, parts: Any, machine: Machine, longer: float = 1.0) -> Any:
    """Return the cycles of a kernel that adds up parts, and of storing and reading them; an array's of an array.

    ``longer``: how many times as long as the L2 cache needs for them, or device memory where it has no room for them.
    """
    rates, sums = machine.rates, 2 * parts * m * n * PART_BYTES
    by_cache = rates.add_bytes_per_cycle * machine.multiprocessors
    fast = np.where(sums <= 2 * CACHED_BYTES, by_cache, rates.copying_gb_s / CLOCK_GHZ)
    return rates.launch_cycles + LATENCY_CYCLES + longer * sums / fast


@functools.lru_cache(KEPT)
def resident_blocks(choice: Choice, machine: Machine, itemsize: int, more_groups: int = 0) -> int:
    """Return how many blocks of a choice a multiprocessor holds at once, one at least; with so many warpgroups more.

    Each of its four parts has a fourth of its registers and of its warps, and none has a part of a warp: of 104
    registers 16 warps fit, two blocks of six and not three, which CUDA's assembler would make room for by spilling.
    """
    tile, limits = choice.tile, machine.target.attrs
    by_shared = int(limits["max_shared_memory_per_block"]) // tile.smem_bytes(itemsize, choice.stages)
    warps_of_part = int(limits["registers_per_block"]) // (PARTITIONS * WARP * tile.registers)
    by_registers = PARTITIONS * warps_of_part // -(-(tile.threads_per_block + more_groups * WARPGROUP) // WARP)
    return max(1, min(by_shared, by_registers))


def parts_to_fill(tiles: int, multiprocessors: int, steps: int, least: int = 1) -> int:
    """Return into how many parts a reduction should go, so that the blocks of all ``tiles`` fill the GPU together.

    As many as run at once with one block to a multiprocessor, since a block more would make all wait for a second
    round; each with ``least`` of the ``steps`` k tiles or more. 1 where the tiles alone fill more than half of it::

        32 tiles, 132 multiprocessors, 224 k tiles    4 parts of 56 k tiles: 128 blocks
    """
    return max(1, min(multiprocessors // tiles, steps // least))


def parts_for(problem: Matmul, choice: Choice, machine: Machine) -> int:
    """Return how many parts a split reduction has: each of no fewer k tiles than pay, nor than there are stages."""
    k_tiles = -(-problem.k // choice.tile.block_k)
    shortest = max(choice.stages, int(machine.rates.shortest_part_k_tiles))
    return parts_to_fill(block_count(problem, choice.tile), machine.multiprocessors, k_tiles, shortest)


class SharedOut(Protocol):
    """Tiles shared out among persistent blocks: the part of :class:`kernels.stream_k.StreamKPlan` that cost needs."""

    k_tiles: int
    helpers: int
    cut: int

    @property
    def waves(self) -> int:
        """Whole waves, in which each worker has a tile."""

    @property
    def owned(self) -> int:
        """Tiles of the last wave."""


def stream_k_cycles(plan: SharedOut, block: tuple[int, int, int], rates: CostRates) -> float:
    """Return the cycles that a plan takes with blocks of (m, n, k), without what all plans have in common.

    A k tile takes what multiplying it or loading it takes, whichever is longer. Owners that have had no whole tile
    before end together with their helpers, and then wait for the sums.
    """
    m, n, k = block
    k_tile = max(m * n * k / rates.wgmma_multiply_adds_per_cycle, (m + n) * k * 2 / rates.load_bytes_per_cycle)
    waves = plan.waves * plan.k_tiles * k_tile
    if not plan.helpers:
        return waves + (plan.k_tiles * k_tile if plan.owned else 0)
    sums = m * n * 4
    heard = -(-plan.helpers // plan.owned)
    given = -(-plan.owned // plan.helpers)
    helper = plan.owned * plan.cut / plan.helpers * k_tile + given * sums / rates.hand_over_bytes_per_cycle
    owner = (plan.k_tiles - plan.cut) * k_tile
    adding = heard * sums / rates.add_bytes_per_cycle + (0 if plan.waves else rates.hand_over_cycles)
    return waves + (max(helper, owner + adding) if plan.waves else max(helper, owner) + adding)
