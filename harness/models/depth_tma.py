"""The depth model of step 11: a ring that TMA fills and wgmma reads. :mod:`harness.models.depth` asks it and forecasts.

Per k tile of one block, with n stages, from measured rates and the widths of the architecture:

- ``multiply``: its operations at wgmma's rate, or its bytes through shared memory's port where that takes longer: TMA
  writes a tile once, and each wgmma reads its 64 rows of A and all its columns of B. Both go by the clock that the
  power limit leaves while so many multiprocessors multiply: that of wgmma's own measured ceiling, never above the clock
  of other work;
- ``load``: one thread's request to device memory, and the tile's bytes into the multiprocessor at its width. Measured
  rates of the L2 do not bound it: they are of reads that nobody shares, and blocks that ask for the same lines at the
  same time get more. A stage is filled once the multiplication before is done and a barrier is passed, beside the one
  that runs: a load has (n − 1) tiles' time, so that (n − 1) · step ≥ load + barrier. With one stage they take turns:
  step = load + barrier + multiply;
- blocks that share a multiprocessor share its tensor cores, its port and its width.

A block also waits for its first tile, and its results leave, at the same width, after its loop. What a launch costs
beyond an empty one (tensor maps, barriers), it leaves out: products of a few microseconds take longer.

How it came about: no number is fitted, but it was not blind. Its form was settled on the sweeps of step 11 at 8192³ and
at 1024x1024x14336, which therefore judge nothing: an earlier form, with a load bound by the L2's measured rate, was up
to 27 % too slow there.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.models.rate_files import Rates
from tensorir_ladder.harness.records import Resources
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.schedules.isa import WGMMA_ROWS
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

NEEDED = ("cp_async_latency_ns", "barrier_ns", "launch_ns", "wgmma_f16_gflops", "shared_bytes_per_clock")
# Of a multiprocessor of sm_90 in a clock: operations on 16-bit operands (a multiply-add is two), bytes from the L2.
TENSOR_OPERATIONS, WIDTH_BYTES = 4096, 64


@dataclass(frozen=True)
class BlockWork:
    """One block where it runs: of each k tile its operations, and bytes loaded and through shared memory's port.

    ``resident`` blocks share a multiprocessor of ``active`` ones.
    """

    stages: int
    k_tiles: int
    operations: float
    loaded_bytes: float
    port_bytes: float
    result_bytes: float
    barrier_ns: float
    resident: int
    active: int


def covers(case: Case) -> bool:
    """Return whether the case is step 11's kernel, without roles, in a form that is timed."""
    return type(case.tile) is HopperTile and case.form.modelled


def block_work(case: Case, found: Resources, rates: Rates, barrier_ns: float) -> BlockWork:
    """Count the work of one block of a case, of which the compiler took ``found``."""
    tile, problem, itemsize = case.tile, case.problem, dtype_bytes(case.problem.dtype)
    groups = tile.warpgroups[0] * tile.warpgroups[1]
    loaded = (tile.block_m + tile.block_n) * tile.block_k * itemsize
    read = groups * (tile.group_m // WGMMA_ROWS) * (WGMMA_ROWS + tile.group_n) * tile.block_k * itemsize
    return BlockWork(
        stages=case.stages_built,
        k_tiles=case.k_tiles,
        operations=2 * tile.block_m * tile.block_n * tile.block_k,
        loaded_bytes=loaded,
        port_bytes=loaded + read,
        result_bytes=tile.block_m * tile.block_n * dtype_bytes(problem.out_dtype),
        barrier_ns=barrier_ns,
        resident=min(found.blocks_per_sm, -(-found.blocks // rates.sms)),
        active=min(found.blocks, rates.sms),
    )


def clock_ghz(work: BlockWork, rates: Rates) -> float:
    """Count clocks in a nanosecond while the active multiprocessors multiply."""
    return min(rates.sm_clock_mhz / 1e3, rates.wgmma_f16_gflops / (work.active * TENSOR_OPERATIONS))


def multiply_ns(work: BlockWork, rates: Rates) -> float:
    """Time a k tile's multiplication, alone on its multiprocessor."""
    clocks = max(work.operations / TENSOR_OPERATIONS, work.port_bytes / rates.shared_bytes_per_clock)
    return clocks / clock_ghz(work, rates)


def transfer_ns(work: BlockWork, rates: Rates, bytes_moved: float) -> float:
    """Time so many bytes between the L2 and one multiprocessor."""
    return bytes_moved / WIDTH_BYTES / clock_ghz(work, rates)


def load_ns(work: BlockWork, rates: Rates) -> float:
    """Time a k tile from its request until it is there."""
    return rates.cp_async_latency_ns + transfer_ns(work, rates, work.loaded_bytes)


def busy_ns(work: BlockWork, rates: Rates) -> float:
    """Time the way from one k tile to the next of each resident block, were every tile there when it is needed."""
    return work.resident * multiply_ns(work, rates)


def wait_ns(work: BlockWork, rates: Rates) -> float:
    """Find the shortest time from tile to tile that leaves a load its time."""
    turn = load_ns(work, rates) + work.barrier_ns
    waited = turn + multiply_ns(work, rates) if work.stages == 1 else turn / (work.stages - 1)
    return max(waited, transfer_ns(work, rates, work.resident * work.loaded_bytes))


def hidden_share(work: BlockWork, rates: Rates) -> float:
    """Find the part of a load during which tensor cores have other work: 1 is all of it."""
    if work.stages == 1:
        return 0.0
    exposed = max(0.0, wait_ns(work, rates) - busy_ns(work, rates))
    return max(0.0, 1 - exposed * (work.stages - 1) / load_ns(work, rates))


def total_ns(work: BlockWork, rates: Rates, blocks: int) -> float:
    """Time a launch: blocks one after the other on each multiprocessor, each with its first load and its results."""
    step = max(busy_ns(work, rates), wait_ns(work, rates))
    block = work.k_tiles * step + load_ns(work, rates) + transfer_ns(work, rates, work.result_bytes)
    return -(-blocks // rates.sms) / work.resident * block + rates.launch_ns
