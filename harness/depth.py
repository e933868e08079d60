"""How many stages a pipeline wants: what one k tile costs, what of a load's latency is hidden, what still fits.

First-order physics from rates measured by microbenchmarks (:mod:`harness.microbench`), and from the registers that
the compiler took; nothing is fitted to the kernels. Per k tile of one block, with n ring slots:

- the block's own way through the tile, ``path``: its instructions, issued by the warps of one scheduler in turn,
  the latency of shared memory that each k step's loads expose, and the barriers;
- the multiprocessor's work, ``resident`` blocks sharing it: instructions at one per clock and scheduler, or accesses
  to shared memory at one per clock, whichever takes longer;
- the wait: a tile's round trip, ``latency`` (with its share of the L2's bandwidth), has to fit into the time for
  which the tile is under way. With two barriers per tile a copy is issued before the wait for the tile that is
  used next, so that n tiles are under way at the wait: n · step ≥ latency + path. With one barrier it is issued
  after the wait: (n − 1) · step ≥ latency. Without a pipeline load and arithmetic take turns.

``step`` is the largest of these. A ring that is not written out costs the remainder of an index by n for the copies
and for the reads: one instruction where n is a power of two, some five that wait for each other elsewhere.
(Form: Little's law, and the load-and-use model of ALCOP, MLSys 2023.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.build import Case, Kernel
from harness.records import DepthForecast, Resources
from harness.rate_files import Curve, Rates
from schedules.vectorization import dtype_bytes
from schedules.workloads import accumulator_dtype

DEEPEST = 6  # stage counts that are forecast: beyond, nothing is left to hide on the GPUs measured
NO_SLOWER = 1.01  # the fewest stages within 1 % of the fastest are recommended: fewer leave memory to others
NEEDED = ("cp_async_latency_ns", "shared_latency_ns", "fma_latency_ns", "l2_read_gb_s", "barrier_ns", "launch_ns")
SCHEDULERS = 4  # of a multiprocessor, one instruction a clock each
REMAINDER = {True: (1, 1), False: (5, 4)}  # index % n, n a power of two or not: instructions, of these in a chain
COPY_INSTRUCTIONS = 3  # two addresses and the copy
LOOP_INSTRUCTIONS = 8  # counter, branch, commit, wait, barriers
UNROLLED_BY_COMPILER = 256  # multiply-adds of a thread in a k tile up to which nvcc 13.0 writes them out by itself


class NoForecast(ValueError):
    """A case that the model does not cover; the message says why."""


@dataclass(frozen=True)
class TileWork:
    """One k tile of one block, in instructions and bytes. Counts are per thread unless named otherwise.

    ``accesses`` are the block's accesses to shared memory of up to 128 bytes each, ``chain`` instructions that
    wait for each other before the tile's first load, ``steps`` the k steps whose loads expose their latency.
    """

    slots: int
    threads: int
    bytes: int
    instructions: float
    accesses: float
    chain: int
    steps: int
    barriers: int

    @property
    def warps(self) -> int:
        """Warps of the block."""
        return -(-self.threads // 32)


def tile_work(case: Case) -> TileWork:
    """The work of one k tile of a case's kernel."""
    tile, slots, itemsize = case.tile, case.slots, dtype_bytes(case.problem.dtype)
    threads = tile.threads[0] * tile.threads[1]
    multiply_adds = tile.thread_m * tile.thread_n * tile.block_k
    written_out = case.variant == "full" or multiply_adds <= UNROLLED_BY_COMPILER
    # A thread's row of A lies along k: the loads of four steps become one where the steps are written out.
    row_width = 16 // itemsize if written_out else 1
    row_loads = tile.thread_m * tile.block_k / row_width
    column_loads = tile.block_k * math.ceil(tile.thread_n * itemsize / 16)
    lanes_n = min(tile.threads[1], 32)
    copies = math.ceil(tile.smem_bytes(itemsize) / 16 / threads)
    rolled = slots > 1 and "unrolled" not in case.variant
    remainder, chain = REMAINDER[slots & (slots - 1) == 0] if rolled else (0, 0)
    return TileWork(
        slots=slots,
        threads=threads,
        bytes=tile.smem_bytes(itemsize),
        instructions=multiply_adds
        + row_loads
        + column_loads
        + copies * COPY_INSTRUCTIONS
        + 2 * remainder
        + LOOP_INSTRUCTIONS,
        accesses=-(-threads // 32)
        * (
            (tile.smem_bytes(itemsize) / 128 / -(-threads // 32) if slots == 1 else 0)  # cp.async needs no store
            + row_loads * _accesses(min(16, row_width * itemsize), 32 // lanes_n)
            + column_loads * _accesses(min(16, tile.thread_n * itemsize), lanes_n)
        ),
        chain=chain,
        steps=tile.block_k,
        barriers=1 if has_one_barrier(case) else 2,
    )


def _accesses(width: int, distinct: int) -> float:
    """Accesses to shared memory by one load of a warp, whose 32 lanes ask for ``distinct`` neighbouring vectors.

    An access moves 128 bytes. Loads of 16 bytes are served half a warp at a time, the halves apart even where
    both want the same (as the hardware counters of these kernels show).
    """
    halves = 2 if width == 16 else 1
    return halves * max(1.0, min(distinct, 32 // halves) * width / 128)


def has_one_barrier(case: Case) -> bool:
    """Whether a case's loop has the form with one barrier."""
    return case.slots > 1 and case.variant.startswith("one_barrier")


def path_ns(work: TileWork, rates: Rates) -> float:
    """One block's own way through one k tile, alone on its multiprocessor."""
    issue = work.instructions * max(1.0, work.warps / SCHEDULERS) / clock_ghz(rates)
    waiting = work.steps * rates.shared_latency_ns + work.chain * rates.fma_latency_ns
    return issue + waiting + work.barriers * at(rates.barrier_ns, work.threads)


def throughput_ns(work: TileWork, rates: Rates) -> float:
    """The multiprocessor's time for one k tile of one block, everything overlapped."""
    issue = work.instructions * work.warps / SCHEDULERS
    return max(issue, work.accesses) / clock_ghz(rates)


def step_ns(work: TileWork, rates: Rates, resident: int) -> float:
    """Time from one k tile to the next, for each of ``resident`` blocks of a multiprocessor."""
    return max(path_ns(work, rates), resident * throughput_ns(work, rates), wait_ns(work, rates, resident))


def wait_ns(work: TileWork, rates: Rates, resident: int) -> float:
    """The shortest time from tile to tile that leaves a tile the time of its round trip."""
    transfer = resident * work.bytes / (rates.l2_read_gb_s / rates.sms)
    if work.slots == 1:
        return rates.dram_latency_ns + transfer + path_ns(work, rates)
    if work.barriers == 1:
        return max((rates.cp_async_latency_ns + transfer) / (work.slots - 1), transfer)
    return max((rates.cp_async_latency_ns + transfer + path_ns(work, rates)) / work.slots, transfer)


def hidden_share(work: TileWork, rates: Rates, resident: int) -> float:
    """The part of a tile's round trip during which the multiprocessor has other work: 1 is all of it."""
    busy = max(path_ns(work, rates), resident * throughput_ns(work, rates))
    exposed = max(0.0, wait_ns(work, rates, resident) - busy)
    latency = rates.cp_async_latency_ns if work.slots > 1 else rates.dram_latency_ns
    return max(0.0, 1 - exposed * max(1, work.slots - 1) / latency)


def time_ms(case: Case, rates: Rates, blocks: int, blocks_per_sm: int) -> float:
    """Predicted time of a launch: waves of resident blocks, each with its fill; never below the compulsory traffic."""
    work, problem = tile_work(case), case.problem
    k_tiles = -(-problem.k // case.tile.block_k)
    per_sm = -(-blocks // rates.sms)
    resident = min(blocks_per_sm, per_sm)
    fill = rates.cp_async_latency_ns
    if per_sm > 4 * resident:  # many waves: blocks follow each other without a common end
        total = blocks / rates.sms / resident * k_tiles * step_ns(work, rates, resident) + fill
    else:
        waves, rest = divmod(per_sm, resident)
        total = waves * (k_tiles * step_ns(work, rates, resident) + fill)
        total += k_tiles * step_ns(work, rates, rest) + fill if rest else 0
    itemsize = dtype_bytes(problem.dtype)
    compulsory = (problem.m * problem.k + problem.k * problem.n) * itemsize
    compulsory += problem.m * problem.n * dtype_bytes(problem.out_dtype)
    return (max(total, compulsory / rates.copy_gb_s) + rates.launch_ns) / 1e6


def forecast(case: Case, resources_of: Callable[[Case], Resources]) -> DepthForecast:
    """What the model says of a case at 1, 2, … stages, as far as they fit and the reduction is long.

    ``resources_of`` compiles a case and says what the compiler took.

    Raises
    ------
    NoForecast : for a step without a pipeline, a variant whose loads are not cp.async, a dtype that is not
        summed in float32, or a machine whose rates were not measured.
    """
    rates = covered(case)
    depths = stage_counts(case)
    counted = [resources_of(replace(case, stages=stages)) for stages in depths]
    times = [
        time_ms(replace(case, stages=stages), rates, found.blocks, found.blocks_per_sm)
        for stages, found in zip(depths, counted)
    ]
    shares = [
        hidden_share(tile_work(replace(case, stages=stages)), rates, _resident(found, rates))
        for stages, found in zip(depths, counted)
    ]
    best = min(times)
    return DepthForecast(
        time_ms=tuple(times),
        occupancy=tuple(found.occupancy for found in counted),
        hidden=tuple(shares),
        fewest=next((stages for stages, share in zip(depths, shares) if share >= 1), depths[-1]),
        most=most_stages(case),
        recommended=next(stages for stages, time in zip(depths, times) if time <= best * NO_SLOWER),
    )


def covered(case: Case) -> Rates:
    """The rates for a case that the model covers; NoForecast says why it does not."""
    rates, variant = case.machine.rates, case.variant
    forms = ("async", "one_barrier", "unrolled_ring", "one_barrier_unrolled", "full")
    if not case.step.pipelined or variant not in forms or not case.machine.has_cp_async:
        raise NoForecast(f"{case.step.name}[{variant}] on {case.machine.arch}: only loops whose loads are cp.async")
    if accumulator_dtype(case.problem.dtype) != "float32":
        raise NoForecast(f"{case.problem.dtype}: only what is summed in float32")
    if rates is None or any(getattr(rates, name) is None for name in NEEDED):
        raise NoForecast(f"{case.machine.arch}: its rates were not measured; run python -m harness microbench there")
    return rates


def stage_counts(case: Case) -> list[int]:
    """The stage counts that are forecast for a case: 1 to DEEPEST, no more than fit, no more than k tiles."""
    k_tiles = -(-case.problem.k // case.tile.block_k)
    return list(range(1, max(1, min(DEEPEST, most_stages(case), k_tiles)) + 1))


def most_stages(case: Case) -> int:
    """Ring slots that fit a block's shared memory."""
    return case.machine.smem_per_block_bytes // case.tile.smem_bytes(dtype_bytes(case.problem.dtype))


def resources_of(kernels: Sequence[Kernel]) -> Callable[[Case], Resources]:
    """Look resources up among compiled kernels."""
    known = {kernel.case: kernel.resources for kernel in kernels}
    return lambda case: known[case]


def clock_ghz(rates: Rates) -> float:
    """Clocks of a multiprocessor in a nanosecond."""
    return rates.sm_clock_mhz / 1000


def at(curve: Curve, place: float) -> float:
    """A curve's value at a place, between its points on the straight line, beyond them the nearest one's."""
    points = list(zip(curve.at, curve.values))
    for (left, low), (right, high) in zip(points, points[1:]):
        if left <= place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return points[0][1] if place < points[0][0] else points[-1][1]


def _resident(found: Resources, rates: Rates) -> int:
    return min(found.blocks_per_sm, -(-found.blocks // rates.sms))
