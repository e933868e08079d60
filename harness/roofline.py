"""Refuse times that no kernel can take: fewer than its operations at the GPU's peak, or its bytes at its bandwidth.

Peak and bandwidth are those measured on the GPU (its rates file); without them, what its clocks, multiprocessors and
memory bus allow, by the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorir_ladder.harness.environment import max_clocks
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.models.time import compulsory_bytes
from tensorir_ladder.harness.records import Timing
from tensorir_ladder.harness.verify import IEEE
from tensorir_ladder.schedules.workloads import Matmul

MARGIN = 1.1  # what a GPU of the same name may do more than the one that was measured
HALVES, TF32, SINGLE, DOUBLE = "16 bits", "tf32", "float32", "float64"
# Operations of a multiprocessor in a clock, dense, a multiply-add as two (NVIDIA's architecture whitepapers).
PER_CLOCK = {
    "sm_75": {SINGLE: 128, HALVES: 1024, DOUBLE: 4},
    "sm_80": {SINGLE: 128, HALVES: 2048, TF32: 1024, DOUBLE: 128},
    "sm_86": {SINGLE: 256, HALVES: 1024, TF32: 512, DOUBLE: 4},
    "sm_89": {SINGLE: 256, HALVES: 1024, TF32: 512, DOUBLE: 4},
    "sm_90": {SINGLE: 256, HALVES: 4096, TF32: 2048, DOUBLE: 256},
    "sm_100": {SINGLE: 256, HALVES: 8192, TF32: 4096, DOUBLE: 256},
    "sm_120": {SINGLE: 256, HALVES: 1024, TF32: 512, DOUBLE: 4},
}


class ImpossibleTime(RuntimeError):
    """A measured time that the GPU cannot have taken for the work: something was not run, or not timed."""


@dataclass(frozen=True)
class Roofline:
    """Work to be done, and the rates that a GPU cannot exceed: None where neither a rates file nor the driver says."""

    flops: float
    nbytes: float
    gflops: float | None
    gb_s: float | None
    origin: str

    def refusal(self, timing: Timing) -> str:
        """Say why a time is impossible for the work; empty where it is possible."""
        for amount, most, unit in ((self.flops, self.gflops, "GFLOPS"), (self.nbytes, self.gb_s, "GB/s")):
            rate = amount / timing.median_ms / 1e6
            if most and rate > MARGIN * most:
                return (
                    f"{timing.label}: {timing.median_ms:.3g} ms would be {rate:.0f} {unit}, {self.origin} allows "
                    f"{most:.0f}: it did not do the work, or was not timed; nothing is recorded"
                )
        return ""

    def check(self, timing: Timing) -> None:
        """Raise ImpossibleTime for a time that is impossible."""
        if refusal := self.refusal(timing):
            raise ImpossibleTime(refusal)

    @property
    def unchecked(self) -> str:
        """A sentence on what cannot be checked on this GPU; empty where all is."""
        missing = [name for name, rate in (("peak", self.gflops), ("bandwidth", self.gb_s)) if rate is None]
        remedy = "ladder microbench measures both"
        return f"times are not held to the GPU's {' and '.join(missing)}: unknown here; {remedy}" if missing else ""


def product_roofline(machine: GpuSpec, problem: Matmul, math: str, from_memory: float) -> Roofline:
    """Hold a product's time to its operations and to what of its bytes, a share, does not come from the L2."""
    kind = {"float64": DOUBLE, "float32": SINGLE if math == IEEE else TF32}.get(problem.dtype, HALVES)
    return Roofline(problem.flops, from_memory * compulsory_bytes(problem), *_rates(machine, kind))


def stream_roofline(machine: GpuSpec, nbytes: float) -> Roofline:
    """Hold a time to so many bytes of device memory."""
    return Roofline(0, nbytes, *_rates(machine, SINGLE))


def _rates(machine: GpuSpec, kind: str) -> tuple[float | None, float | None, str]:
    if rates := machine.rates:
        halves = max(rates.mma_f16_gflops or 0, rates.wgmma_f16_gflops or 0) or None
        # TF32 runs at half the rate of 16 bits, whichever instruction multiplies; float64 nowhere faster than float32.
        peaks = {HALVES: halves, TF32: halves and halves / 2, SINGLE: rates.fp32_gflops, DOUBLE: rates.fp32_gflops}
        return peaks[kind], max(rates.copy_gb_s, rates.read_gb_s or 0), f"the rates file of {machine.gpu}"
    clock_mhz, gb_s = max_clocks()
    per_clock = PER_CLOCK.get(machine.arch.removesuffix("a"), {}).get(kind)
    gflops = per_clock * machine.multiprocessors * clock_mhz / 1e3 if per_clock and clock_mhz else None
    return gflops, gb_s, f"{machine.gpu} at its highest clocks"
