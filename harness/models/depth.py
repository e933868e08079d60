"""How many stages a pipeline wants: what one k tile costs, what of a load's latency is hidden, what still fits.

First-order physics from rates measured by microbenchmarks (:mod:`lab.microbench`), from counts in the machine
code and from the registers that the compiler took; no constant is fitted to a kernel's time. Per k tile of one block,
with n stages:

- the block's own way through the tile, ``path``: its instructions, issued by the warps of one scheduler in turn,
  the latency of shared memory that each k step's loads expose, the barriers, and without a pipeline the load;
- ``busy``: its own way, and the work of the other resident blocks, each at one instruction per clock and scheduler or
  one access to shared memory per clock, whichever takes longer (none of a block's own waiting is taken to be covered);
- the wait: a tile's round trip, its ``latency`` as measured while every multiprocessor asks for as many bytes, has
  to fit into the time for which the tile is under way. With two barriers per tile a copy is issued before the wait
  for the tile that is used next, so that n tiles are under way at the wait: n · step ≥ latency + path. With one
  barrier it is issued after the wait: (n − 1) · step ≥ latency.

``step`` is the larger of ``busy`` and the wait's share. A ring that is not written out costs each tile the loop's own
instructions, and the remainders of two indices by n where n is no power of two. Deeper rings also cost residents:
shared memory and registers. (Little's law, and the load-and-use form of ALCOP, MLSys 2023.)

Step 11, whose loads are TMA's and whose products are wgmma's, has a model of its own (:mod:`harness.models.depth_tma`).

How it came about: the form was settled on square sizes of 512, 1024, 2048 and 4096. The shapes that
:mod:`reports.judgement` holds out set no constant, but they were not blind either: an earlier form's misses on them had
been seen, and 768 was among the sizes at which ``busy`` was held against measured times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.models import depth_tma
from tensorir_ladder.harness.models.rate_files import Curve, Rates
from tensorir_ladder.harness.models.time import compulsory_bytes
from tensorir_ladder.harness.records import DepthForecast, Resources
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import ThreadTile

DEEPEST = 6  # stage counts that are forecast
NO_SLOWER = 1.01  # the fewest stages within 1 % of the fastest are recommended: fewer leave memory to others
NEEDED = (
    *("cp_async_latency_ns", "cp_async_loaded_latency_ns", "shared_latency_ns", "fma_latency_ns"),
    *("l2_read_gb_s", "barrier_ns", "launch_ns"),
)
SCHEDULERS = 4  # of a multiprocessor, one instruction a clock each
# Counted in the machine code that nvcc 13.0 makes of these loops for sm_90a, beside multiply-adds and shared loads.
COPY_INSTRUCTIONS = 3  # two addresses and the copy
LOOP_INSTRUCTIONS = 24  # of one turn of the loop: addresses of a stage, counter, branch, commit, wait, barriers
REMAINDER_INSTRUCTIONS, REMAINDER_CHAIN = 13, 4  # both stages' index % n, n no power of two; of these in a chain
UNROLLED_BY_COMPILER = 256  # multiply-adds of a thread in a k tile up to which nvcc 13.0 writes them out by itself


class NoForecast(ValueError):
    """A case that the model does not cover; the message says why."""


@dataclass(frozen=True)
class TileWork:
    """One k tile of one block, in instructions and bytes. Counts are per thread unless named otherwise.

    ``accesses`` are the block's accesses to shared memory of up to 128 bytes each, ``chain`` instructions that
    wait for each other before the tile's first load, ``steps`` the k steps whose loads expose their latency.
    """

    stages: int
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
    """Count the work of one k tile of a case's kernel."""
    tile, stages, itemsize = case.tile, case.stages_built, dtype_bytes(case.problem.dtype)
    threads = tile.threads[0] * tile.threads[1]
    warps = -(-threads // 32)
    multiply_adds = tile.thread_m * tile.thread_n * tile.block_k
    written_out = case.form.unroll is None or multiply_adds <= UNROLLED_BY_COMPILER
    # A thread's row of A lies along k: the loads of four steps become one where the steps are written out.
    row_width = 16 // itemsize if written_out else 1
    row_loads = tile.thread_m * tile.block_k / row_width
    column_loads = tile.block_k * math.ceil(tile.thread_n * itemsize / 16)
    lanes_n = min(tile.threads[1], 32)
    copies = math.ceil(tile.smem_bytes(itemsize) / 16 / threads)
    turn = stages if case.form.unrolled_ring else 1
    remainder = turn < stages and stages & (stages - 1) != 0
    return TileWork(
        stages=stages,
        threads=threads,
        bytes=tile.smem_bytes(itemsize),
        instructions=multiply_adds
        + row_loads
        + column_loads
        + copies * COPY_INSTRUCTIONS
        + LOOP_INSTRUCTIONS / turn
        + REMAINDER_INSTRUCTIONS * remainder,
        accesses=(tile.smem_bytes(itemsize) / 128 if stages == 1 else 0)  # cp.async needs no store
        + warps * row_loads * _accesses(min(16, row_width * itemsize), 32 // lanes_n)
        + warps * column_loads * _accesses(min(16, tile.thread_n * itemsize), lanes_n),
        chain=REMAINDER_CHAIN * remainder,
        steps=tile.block_k,
        barriers=1 if stages > 1 and case.form.one_barrier else 2,
    )


def _accesses(width: int, distinct: int) -> float:
    """Count accesses to shared memory by one load of a warp, whose 32 lanes ask for ``distinct`` neighbouring vectors.

    An access moves 128 bytes. Loads of 16 bytes are served half a warp at a time, the halves apart even where
    both want the same (as the hardware counters of these kernels show).
    """
    halves = 2 if width == 16 else 1
    return halves * max(1.0, min(distinct, 32 // halves) * width / 128)


def path_ns(work: TileWork, rates: Rates) -> float:
    """Time one block's own way through one k tile, alone on its multiprocessor; without a pipeline load and all."""
    issue = work.instructions * max(1.0, work.warps / SCHEDULERS) / clock_ghz(rates)
    waiting = work.steps * rates.shared_latency_ns + work.chain * rates.fma_latency_ns
    load = rates.dram_latency_ns if work.stages == 1 else 0.0
    return load + issue + waiting + work.barriers * at(rates.barrier_ns, work.threads)


def throughput_ns(work: TileWork, rates: Rates) -> float:
    """Time one k tile of one block on its multiprocessor, everything overlapped."""
    issue = work.instructions * work.warps / SCHEDULERS
    return max(issue, work.accesses) / clock_ghz(rates)


def step_ns(work: TileWork, rates: Rates, resident: int) -> float:
    """Time the way from one k tile to the next, for each of ``resident`` blocks of a multiprocessor."""
    return max(busy_ns(work, rates, resident), wait_ns(work, rates, resident))


def busy_ns(work: TileWork, rates: Rates, resident: int) -> float:
    """Time a block's own way, and the work of the others, were every tile there when it is needed."""
    return path_ns(work, rates) + (resident - 1) * throughput_ns(work, rates)


def wait_ns(work: TileWork, rates: Rates, resident: int) -> float:
    """Find the shortest time from tile to tile that leaves a tile the time of its round trip."""
    asked = resident * work.bytes
    transfer = asked / (rates.l2_read_gb_s / rates.sms)
    if work.stages == 1:
        return transfer
    if work.barriers == 1:
        return max(latency_ns(asked, rates) / (work.stages - 1), transfer)
    return max((latency_ns(asked, rates) + path_ns(work, rates)) / work.stages, transfer)


def latency_ns(asked: float, rates: Rates) -> float:
    """Time a tile's round trip, all multiprocessors asking for ``asked`` bytes at once; as measured, and on beyond."""
    curve = rates.cp_async_loaded_latency_ns
    if asked <= curve.at[-1]:
        return at(curve, asked)
    slope = (curve.values[-1] - curve.values[-2]) / (curve.at[-1] - curve.at[-2])
    return curve.values[-1] + slope * (asked - curve.at[-1])


def hidden_share(work: TileWork, rates: Rates, resident: int) -> float:
    """Find the part of a tile's round trip during which the multiprocessor has other work: 1 is all of it."""
    if work.stages == 1:
        return 0.0
    exposed = max(0.0, wait_ns(work, rates, resident) - busy_ns(work, rates, resident))
    return max(0.0, 1 - exposed * (work.stages - 1) / latency_ns(resident * work.bytes, rates))


def time_ms(case: Case, rates: Rates, blocks: int, blocks_per_sm: int) -> float:
    """Predict a launch's time: waves of resident blocks, each with its fill; never below the compulsory traffic."""
    work = tile_work(case)
    per_sm = -(-blocks // rates.sms)
    resident = min(blocks_per_sm, per_sm)
    total = per_sm / resident * (case.k_tiles * step_ns(work, rates, resident) + rates.cp_async_latency_ns)
    return (max(total, compulsory_bytes(case.problem) / rates.copy_gb_s) + rates.launch_ns) / 1e6


def forecast(case: Case, resources_of: Callable[[Case], Resources]) -> DepthForecast:
    """Predict a case at 1, 2, … stages, as far as they fit and the reduction is long.

    ``resources_of`` compiles a case and says what the compiler took.

    NoForecast for a step without a pipeline, a variant whose loads are neither cp.async nor step 11's, operands that
    are not float32 or not copied in 16-byte vectors (but for step 11's), or a machine whose rates were not measured.
    """
    rates = covered(case)
    predict = _by_tma if depth_tma.covers(case) else _by_threads
    depths = stage_counts(case)
    counted = [resources_of(replace(case, stages=stages)) for stages in depths]
    predicted = [predict(replace(case, stages=stages), rates, found) for stages, found in zip(depths, counted)]
    times, shares = zip(*predicted)
    best = min(times)
    return DepthForecast(
        time_ms=times,
        occupancy=tuple(found.occupancy for found in counted),
        hidden=shares,
        fewest=next((stages for stages, share in zip(depths, shares) if share >= 1), depths[-1]),
        most=most_stages(case),
        recommended=next(stages for stages, time in zip(depths, times) if time <= best * NO_SLOWER),
    )


def _by_threads(case: Case, rates: Rates, found: Resources) -> tuple[float, float]:
    resident = min(found.blocks_per_sm, -(-found.blocks // rates.sms))
    share = hidden_share(tile_work(case), rates, resident)
    return time_ms(case, rates, found.blocks, found.blocks_per_sm), share


def _by_tma(case: Case, rates: Rates, found: Resources) -> tuple[float, float]:
    work = depth_tma.block_work(case, found, rates, at(rates.barrier_ns, case.tile.threads_per_block))
    total = max(depth_tma.total_ns(work, rates, found.blocks), compulsory_bytes(case.problem) / rates.copy_gb_s)
    return total / 1e6, depth_tma.hidden_share(work, rates)


def covered(case: Case) -> Rates:
    """Return the rates for a case that the model covers; NoForecast says why it does not."""
    needed = depth_tma.NEEDED if depth_tma.covers(case) else NEEDED
    if not depth_tma.covers(case):
        _check_threads_copy(case)
    rates = case.machine.rates
    if rates is None or any(getattr(rates, name) is None for name in needed):
        unmeasured = f"{case.machine.gpu} ({case.machine.arch})"
        raise NoForecast(f"{unmeasured}: its rates were not measured; on that GPU, run ladder microbench")
    return rates


def _check_threads_copy(case: Case) -> None:
    variant = case.variant
    if not isinstance(case.tile, ThreadTile):
        form = f"threads have tiles of their own, {ThreadTile.FORM}"
        raise NoForecast(f"{case.step.name}[{variant}]: only step 11, as it is timed, and steps whose {form}")
    if not case.step.pipelined or not case.form.modelled or not case.machine.has_cp_async:
        raise NoForecast(f"{case.step.name}[{variant}] on {case.machine.arch}: only loops whose loads are cp.async")
    if case.problem.dtype != "float32":
        raise NoForecast(f"{case.problem.dtype}: only float32 operands")
    problem = case.problem
    rows = (problem.k, problem.n) if problem.layout == "nn" else (problem.k,)
    if any(row % 4 for row in rows):
        raise NoForecast(f"{problem.shape} {problem.layout}: only operands whose rows are whole 16-byte vectors")


def stage_counts(case: Case) -> list[int]:
    """List a case's stage counts to forecast: from the variant's fewest to DEEPEST, what fits, or the k tiles."""
    fewest = min(case.form.fewest_stages, case.k_tiles)
    return list(range(fewest, max(fewest, min(DEEPEST, most_stages(case), case.k_tiles)) + 1))


def most_stages(case: Case) -> int:
    """Count the stages that fit a block's shared memory."""
    itemsize, room = dtype_bytes(case.problem.dtype), case.machine.smem_per_block_bytes
    return next(stages for stages in itertools.count() if case.tile.smem_bytes(itemsize, stages + 1) > room)


def stage_bytes(case: Case) -> int:
    """Count the shared bytes that one more stage costs, in a ring so deep that nothing else takes the same bytes."""
    itemsize = dtype_bytes(case.problem.dtype)
    return case.tile.smem_bytes(itemsize, DEEPEST + 1) - case.tile.smem_bytes(itemsize, DEEPEST)


def clock_ghz(rates: Rates) -> float:
    """Count a multiprocessor's clocks in a nanosecond."""
    return rates.sm_clock_mhz / 1000


def at(curve: Curve, place: float) -> float:
    """Read a curve at a place, between its points on the straight line, beyond them as the nearest one."""
    return float(np.interp(place, curve.at, curve.values))
