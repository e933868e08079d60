"""Cost of a tile on a machine: what it needs to know of a GPU, and formulas for an order of tiles, not measured.

Results never depend on it. What it needs to know of a GPU is data (:class:`CostRates`), read from that GPU's rates file
by whoever asks. How long do a product's block tiles take by tiles of threads (:func:`block_tile_cost`), on tensor
cores, with few rows too (:func:`contraction_cycles`), by kernels with roles (:func:`stream_k_cycles`)? Schedules that
may do something beside their tile are priced, and chosen, by :mod:`.plans`.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from tvm.target import Target

from tensorir_ladder.schedules.isa import (
    PARTITIONS,
    SHARED_KIB,
    WARP,
    WARPGROUP,
)
from tensorir_ladder.schedules.tiles import BlockTile, Choice, ThreadTile, WarpgroupTile, WarpTile
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
    writes of a copy, ``copying_us`` the shortest kernel in front.
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
    and of warpgroups, which say what the model leaves (:mod:`.cycles`); without them the model stands alone.
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
)
CLOCK_GHZ = 1.9  # of a multiprocessor, by which copying_gb_s becomes bytes per cycle
LATENCY_CYCLES = 1200  # from the issue of a cp.async to its data, while many others are on their way
ROUND_CYCLES = 3000  # from a block's last k tile to the first of the block behind it, as short products show it
DEVICE_LATENCY_CYCLES = 1700  # the same, of data in device memory, while that is busy
MMA_SHARE = 0.55  # of wgmma's multiply-adds that mma.sync does, its operands read by ldmatrix
CACHED_BYTES = 32 * 2**20  # of parts, which then find room in the L2 cache until they are added up
KEPT = 1024  # of what is asked again and again while choices are made
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
    adding = adding_cycles(m, n, parts, machine) if parts > 1 else 0.0
    return max(busy, device) + UNHIDDEN * min(busy, device) + LATENCY_CYCLES + adding


def adding_cycles(m: int, n: int, parts: Any, machine: Machine, longer: float = 1.0) -> Any:
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
