"""Cost of a tile on a machine: one model for the steps' default tiles, for torch_ops' choice, and for the search.

It puts candidates into order without measuring them, no more: results never depend on it. What it needs to know of a
GPU is data (:class:`CostRates`), read from that GPU's rates file by whoever asks.

Three questions, each a function here:

- How long do a product's block tiles take (:func:`block_tile_cost`; on tensor cores, with few rows too,
  :func:`contraction_cycles`; of kernels with roles :func:`stream_k_cycles`)?
- Into how many parts should a long reduction go (:func:`parts_to_fill`, :func:`parts_for`)?
- Does copying operands to aligned rows first pay (:func:`copying_pays`)?
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm.target import Target

from tensorir_ladder.schedules.isa import SHARED_KIB, WARP
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import BlockTile, Choice, ThreadTile, TileSet, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul


@dataclass(frozen=True)
class CostRates:
    """Numbers that the model takes from a GPU's rates file, where each says how it came about.

    ``*_warps_to_hide`` and ``*_edge`` weigh latency and a tile's edges, for ordinary cores (simt) and tensor cores.
    Per cycle of a multiprocessor: multiply-adds of wgmma, bytes loaded while all load, bytes of a stream-K helper's
    sums handed over to device memory and read again by a tile's owner, results stored. ``hand_over_cycles`` until a
    flag raised by one block has let another read what it left; ``launch_cycles`` of a launch that waits for the end of
    the kernel before it; ``barrier_cycles`` of a k tile's block barrier that nothing hides. ``aligned_tflops`` and
    ``straddling_tflops`` of one product with rows that are whole cache lines and with rows that are not;
    ``copying_gb_s`` reads and writes of a copy, ``copying_us`` the shortest kernel in front. ``shortest_part_k_tiles``:
    the fewest k tiles that a part of a split reduction was seen to pay with.
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
    aligned_tflops: float
    straddling_tflops: float
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

    ``measured`` goes before what the model says, for those who ask for it.
    """

    target: Target
    multiprocessors: int
    rates: CostRates
    has_cp_async: bool = True
    name: str = ""
    measured: tuple[Measured, ...] = ()

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
    aligned_tflops=730.0,
    straddling_tflops=480.0,
    copying_gb_s=4300.0,
    copying_us=3.0,
    shortest_part_k_tiles=16,
)
CLOCK_GHZ = 1.9  # of a multiprocessor, by which copying_gb_s becomes bytes per cycle
LATENCY_CYCLES = 1200  # from the issue of a cp.async to its data, while many others are on their way
ROUND_CYCLES = 3000  # from a block's last k tile to the first of the block behind it, as short products show it
DEVICE_LATENCY_CYCLES = 1700  # the same, of data in device memory, while that is busy
MMA_SHARE = 0.55  # of wgmma's multiply-adds that mma.sync does, its operands read by ldmatrix
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
    ``split`` counts each block in the parts that :func:`parts_for` makes of it.
    """

    def cost(choice: Choice) -> float:
        parts = parts_for(problem, choice, machine) if split else 1
        return (
            tiles.cost(choice, problem, machine, parts)
            if tiles.cost
            else block_tile_cost(choice, problem, machine, parts)
        )

    return min(_fitting(tiles.choices, machine.target, dtype_bytes(problem.dtype)), key=cost, default=tiles.default)


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
    resident = _resident(choice, machine, dtype_bytes(problem.dtype))
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
    ``filled`` is after how many k tiles the ring is filled anew, by default only for the next tile.
    """
    (m, n, k), tile, rates = sizes, choice.tile, machine.rates
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n) * batch * parts
    k_tiles = max(math.ceil(math.ceil(k / tile.block_k) / parts), 1)
    busiest = -(-tiles // machine.multiprocessors)
    together = min(busiest, _resident(Choice(tile, min(choice.stages, k_tiles)), machine, itemsize))
    rounds = -(-busiest // together)
    brought = (min(m, tile.block_m) + min(n, tile.block_n)) * tile.block_k * itemsize
    by_wgmma = isinstance(tile, WarpgroupTile)
    ahead = together * min(choice.stages - (2 if by_wgmma else 1), k_tiles)  # k tiles on their way
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
    adding = 0.0
    if parts > 1:
        sums = 2 * parts * m * n * 4 / (rates.add_bytes_per_cycle * machine.multiprocessors)
        adding = rates.launch_cycles + LATENCY_CYCLES + sums
    return max(busy, device) + UNHIDDEN * min(busy, device) + LATENCY_CYCLES + adding


def _resident(choice: Choice, machine: Machine, itemsize: int) -> int:
    """Return how many blocks of a choice a multiprocessor holds at once, one at least."""
    tile, limits = choice.tile, machine.target.attrs
    by_shared = int(limits["max_shared_memory_per_block"]) // tile.smem_bytes(itemsize, choice.stages)
    by_registers = int(limits["registers_per_block"]) // (tile.registers * tile.threads_per_block)
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


def copying_pays(operations: float, copied_bytes: float, rates: CostRates, share: float = 1.0) -> bool:
    """Return whether a product is sooner done if operands whose rows straddle cache lines are copied to whole lines.

    ::

        lost    = share · operations · (1 / straddling_tflops − 1 / aligned_tflops)
        copying = 2 · copied_bytes / copying_gb_s + copying_us
        on an H200   4088³, both operands copied:  lost 97 µs, copying 34 µs        1024³:  lost 1.5 µs, copying 5 µs

    ``operations`` are two per multiply-add; ``copied_bytes`` are read once and written once. ``share`` is the part of
    the operands that straddles: what each of them costs was not measured, so that they count alike.
    """
    lost_us = share * operations * (1 / rates.straddling_tflops - 1 / rates.aligned_tflops) / 1e6
    return lost_us > 2 * copied_bytes / rates.copying_gb_s / 1e3 + rates.copying_us


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
