"""Bound a kernel's time from below by resource, and predict what a pipeline can gain.

First-order physics from a machine's measured rates; no constant is fitted to the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensorir_ladder.harness.batches import stored_shapes
from tensorir_ladder.harness.build import Kernel
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.models.rate_files import Rates, rates_of
from tensorir_ladder.harness.records import Record
from tensorir_ladder.harness.verify import IEEE
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import BlockTile, TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul, accumulator_dtype
from tensorir_ladder.steps.registry import find_steps


@dataclass(frozen=True)
class TilePrediction:
    """Times of one k tile on one multiprocessor, in nanoseconds, and the gain that follows."""

    load_ns: float
    compute_ns: float
    resident_blocks: int
    stages: int

    @property
    def sequential_ns(self) -> float:
        """load + compute, or the arithmetic of all resident blocks where that is longer."""
        return max(self.load_ns + self.compute_ns, self.resident_blocks * self.compute_ns)

    @property
    def pipelined_ns(self) -> float:
        """max(load / (stages − 1), compute of all resident blocks): a load has stages − 1 iterations' time."""
        return max(self.load_ns / max(self.stages - 1, 1), self.resident_blocks * self.compute_ns)

    @property
    def gain_pct(self) -> float:
        """Speed gained by the pipeline, in percent."""
        return 0.0 if self.stages == 1 else 100 * (self.sequential_ns / self.pipelined_ns - 1)


def predict_tile(kernel: Kernel) -> TilePrediction | None:
    """Set N·(load + compute) against N·max(load, compute), per k tile.

    None where the machine was not measured, where no load runs ahead (no cp.async), where the arithmetic
    is not float32, and for tiles of warps. Barriers, a copy's instructions and the latency of shared memory are left
    out: they cost the sequential form more, so that gains exceed the prediction where resident blocks' arithmetic
    should have hidden the loads already (+0 % where a multiprocessor holds many). :mod:`.depth` counts them.

    load = latency + bytes of both operand tiles / (bandwidth per multiprocessor); compute =
    2·block_m·block_n·block_k operations / (peak per multiprocessor). Blocks resident on the same
    multiprocessor hide each other's loads, so their arithmetic adds up while their loads overlap
    (the form of ALCOP, MLSys 2023, section on its analytical model).
    """
    rates, tile, resources = kernel.case.machine.rates, kernel.case.tile, kernel.resources
    if resources is None or rates is None or not isinstance(tile, ThreadTile):
        return None
    if not kernel.code.cp_async or accumulator_dtype(kernel.case.problem.dtype) != "float32":
        return None
    load_ns, compute_ns = tile_times(tile, kernel.case.problem.dtype, rates, rates.fp32_gflops)
    resident = min(resources.blocks_per_sm, -(-resources.blocks // rates.sms))
    return TilePrediction(
        load_ns=load_ns,
        compute_ns=compute_ns,
        resident_blocks=resident,
        stages=min(kernel.case.stages_built, kernel.code.shared_versions),
    )


def tile_times(
    tile: BlockTile, dtype: str, rates: Rates, gflops: float, gb_s: float | None = None
) -> tuple[float, float]:
    """Time one k tile on one multiprocessor by itself, in ns: its load, and its arithmetic at the GPU's ``gflops``.

    The load is a latency and the bytes of both operand tiles at the multiprocessor's share of ``gb_s``, by default
    the rate of a copy.
    """
    bytes_per_ns, flops_per_ns = (gb_s or rates.copy_gb_s) / rates.sms, gflops / rates.sms
    tile_bytes = (tile.block_m + tile.block_n) * tile.block_k * dtype_bytes(dtype)
    load_ns = rates.dram_latency_ns + tile_bytes / bytes_per_ns
    return load_ns, 2 * tile.block_m * tile.block_n * tile.block_k / flops_per_ns


def instruction_ceiling(rates: Rates, tile: type[BlockTile], math: str) -> float | None:
    """Look up the GFLOPS of the instruction alone that a family of tiles multiplies with; None where not measured.

    ``wgmma`` for tiles of warpgroups, scheduled or explicit; ``mma.sync`` for other tensor core tiles; multiply-adds
    for all others.
    bfloat16 goes by the ceiling measured with float16: the instructions have one shape and one rate.
    """
    if issubclass(tile, (WarpgroupTile, HopperTile)):
        return rates.wgmma_f16_gflops
    if issubclass(tile, TensorCoreTile):
        return rates.mma_f16_gflops if math == IEEE else rates.mma_tf32_gflops
    return rates.fp32_gflops if issubclass(tile, (ThreadTile, WarpTile)) else None


def ceiling_share(record: Record) -> float | None:
    """Relate a measured step's speed to :func:`instruction_ceiling` of the GPU that it ran on, as measured there.

    None for what is no step, for sums in float64, and where no ceiling was measured.
    """
    step = find_steps().get(record.step)
    if step is None or not record.arch or accumulator_dtype(record.dtype) != "float32":
        return None
    rates = rates_of(record.arch, record.environment.gpu)
    ceiling = rates and instruction_ceiling(rates, step.tiles.kind, record.math)
    return record.gflops / ceiling if ceiling else None


def bound(kernel: Kernel, time_ms: float) -> str:
    """Name what limits a measured kernel: "compute", "memory", "latency"; "unknown" where no ceiling was measured.

    Two times it cannot undercut: its operations at its instruction's ceiling; and its traffic, compulsory bytes at
    device-memory bandwidth or, without tensor cores, the operands its threads ask for at 128 bytes per clock and
    multiprocessor where that is longer. If the larger of the two explains at least half of the time, it is the
    bound; else the kernel waits: latency.
    """
    case = kernel.case
    rates = case.machine.rates
    ceiling = rates and instruction_ceiling(rates, type(case.tile), case.math)
    if not ceiling:
        return "unknown"
    floors_ms = {
        "compute": case.problem.flops / ceiling / 1e6,
        "memory": compulsory_bytes(case.problem) / rates.copy_gb_s / 1e6,
    }
    if isinstance(case.tile, (ThreadTile, WarpTile)):
        tile = case.tile_built
        accesses = _wavefronts(case.problem.flops / 2, tile, case.machine.warp_size, dtype_bytes(case.problem.dtype))
        floors_ms["memory"] = max(floors_ms["memory"], accesses / (rates.sms * rates.sm_clock_mhz * 1e3))
    return _explained(floors_ms, time_ms)


def compulsory_bytes(problem: Matmul) -> int:
    """Count the bytes of both operands once, and of the result once."""
    a, b, c = map(math.prod, stored_shapes(problem))
    return (a + b) * dtype_bytes(problem.dtype) + c * dtype_bytes(problem.out_dtype)


def stream_bound(machine: GpuSpec, bytes_moved: int, flops: int, time_ms: float) -> str:
    """Name what limits a workload that reads and writes each byte once; words and rule as in :func:`bound`.

    Its floors: bytes at device-memory bandwidth, and operations at the float32 peak. A fusable pair counts
    as two operations there, an exponential as one, so that "compute" is said too rarely rather than too often.
    """
    if (rates := machine.rates) is None:
        return "unknown"
    floors_ms = {"compute": flops / rates.fp32_gflops / 1e6, "memory": bytes_moved / rates.copy_gb_s / 1e6}
    return _explained(floors_ms, time_ms)


def _explained(floors_ms: dict[str, float], time_ms: float) -> str:
    limit = max(floors_ms, key=lambda name: floors_ms[name])
    return limit if floors_ms[limit] >= time_ms / 2 else "latency"


def _wavefronts(multiply_adds: float, tile: ThreadTile | WarpTile, warp_size: int, itemsize: int) -> float:
    """Count 128-byte accesses to shared memory or first-level cache that a warp's operands need, over the problem.

    A warp covers ``lanes_n`` neighbouring columns of threads and the rows that remain; lanes that read
    the same element share one access.
    """
    lanes_n = tile.lanes[1] if isinstance(tile, WarpTile) else min(tile.threads[1], warp_size)
    lanes_m = warp_size // lanes_n
    steps = multiply_adds / (warp_size * tile.thread_m * tile.thread_n)
    # A load instruction moves at most 16 bytes a lane and costs at least one access.
    per_step = sum(
        max(lanes * own * itemsize / 128, own * itemsize / 16)
        for lanes, own in ((lanes_m, tile.thread_m), (lanes_n, tile.thread_n))
    )
    return steps * per_step
