"""The architectures that this project knows, as data; nothing else in the project knows a GPU's name.

A GPU's multiprocessors come from its driver (:func:`harness.execution.gpu_machine`). Where none is at hand, the
architecture is that of one GPU, which the table names.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tvm.target import Target

from tensorir_ladder.gpus import cost_rates, schedule_corrections
from tensorir_ladder.harness.models.rate_files import Rates, rates_of
from tensorir_ladder.schedules import cost


class UnknownTarget(ValueError):
    """An architecture that is not in the table."""


@dataclass(frozen=True)
class GpuSpec:
    """One GPU. Limits are its architecture's (CUDA C++ programming guide, compute capabilities)."""

    arch: str
    gpu: str
    multiprocessors: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    threads_per_block: int = 1024
    warp_size: int = 32
    has_cp_async: bool = True

    @property
    def rates(self) -> Rates | None:
        """Rates measured on the GPU named; None where there are none, BadRates where the file is not whole."""
        return rates_of(self.arch, self.gpu)

    def target(self) -> Target:
        """Make the TVM target with this machine's limits, so that a schedule can be checked against it."""
        return Target(
            {
                "kind": "cuda",
                "arch": self.arch,
                "max_threads_per_block": self.threads_per_block,
                "max_shared_memory_per_block": self.smem_per_block_bytes,
                "thread_warp_size": self.warp_size,
                "registers_per_block": self.registers_per_sm,
            }
        )

    def for_choices(self) -> cost.Machine:
        """Return the machine as the cost model and the steps see it."""
        rates, corrections = cost_rates(self.gpu, self.arch), schedule_corrections(self.gpu)
        return cost.Machine(
            self.target(), self.multiprocessors, rates, self.has_cp_async, self.gpu, corrections=corrections
        )

    def of_gpu(self, name: str, multiprocessors: int | None = None) -> GpuSpec:
        """Return the machine that another GPU of this architecture is: its limits, and multiprocessors of its own.

        ``multiprocessors`` are those that its driver or a record counts; without them, those of this machine or of the
        GPU's rates file. Raises UnknownTarget where none of these has them.
        """
        if multiprocessors is None:
            multiprocessors = self.multiprocessors if name == self.gpu else _multiprocessors_measured(self.arch, name)
        return replace(self, gpu=name, multiprocessors=multiprocessors)

    def blocks_resident(self, threads: int, registers: int, smem_bytes: int) -> tuple[int, str]:
        """Count the blocks of one kernel that an SM holds at once, and name what limits them.

        Registers are allocated per warp in units of 256, shared memory in units of 128 bytes with 1 KiB
        a block reserved by the system from sm_80 on (CUDA's occupancy calculator).
        """
        warps = -(-threads // self.warp_size)
        registers_per_warp = -(-registers * self.warp_size // 256) * 256
        reserved = 1024 if self.has_cp_async else 0
        smem = -(-(smem_bytes + reserved) // 128) * 128
        limits = {
            "threads": self.threads_per_sm // (warps * self.warp_size),
            "registers": (self.registers_per_sm // registers_per_warp // 4 * 4) // warps if registers else 10**6,
            "shared memory": self.smem_per_sm_bytes // smem if smem else 10**6,
            "blocks": self.blocks_per_sm,
        }
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit], limit


def _multiprocessors_measured(arch: str, gpu: str) -> int:
    if rates := rates_of(arch, gpu):
        return rates.sms
    raise UnknownTarget(f"{gpu} ({arch}): its multiprocessors are not known here; on that GPU, run ladder microbench")


def _machine(
    arch: str, gpu: str, multiprocessors: int, smem_block_kib: int, smem_sm_kib: int, threads: int, blocks: int
) -> GpuSpec:
    smem = {"smem_per_block_bytes": smem_block_kib * 1024, "smem_per_sm_bytes": smem_sm_kib * 1024}
    cp_async = {"has_cp_async": arch != "sm_75"}
    return GpuSpec(arch, gpu, multiprocessors, **smem, threads_per_sm=threads, blocks_per_sm=blocks, **cp_async)


# The GPU named is the one that stands for its architecture where none is at hand (NVIDIA's data sheets).
MACHINES: dict[str, GpuSpec] = {
    machine.arch: machine
    for machine in (
        _machine("sm_75", "Tesla T4", 40, 64, 64, 1024, 16),
        _machine("sm_80", "NVIDIA A100-SXM4-80GB", 108, 163, 164, 2048, 32),
        _machine("sm_86", "NVIDIA GeForce RTX 3090", 82, 99, 100, 1536, 16),
        _machine("sm_89", "NVIDIA GeForce RTX 4090", 128, 99, 100, 1536, 24),
        _machine("sm_90a", "NVIDIA H200", 132, 227, 228, 2048, 32),
        _machine("sm_90", "NVIDIA H200", 132, 227, 228, 2048, 32),
        _machine("sm_100a", "NVIDIA B200", 148, 227, 228, 2048, 32),
        _machine("sm_100", "NVIDIA B200", 148, 227, 228, 2048, 32),
        _machine("sm_120", "NVIDIA GeForce RTX 5090", 170, 99, 100, 1536, 24),
    )
}
DEFAULT_ARCH = "sm_90a"


@functools.cache
def choosing_machine(gpu: str, multiprocessors: int, arch: str = DEFAULT_ARCH) -> cost.Machine:
    """Describe a GPU as the call's choice sees it: one object, for which it keeps its choices."""
    return replace(machine_for(arch).of_gpu(gpu, multiprocessors).for_choices(), corrections=None)


def machine_for(arch: str) -> GpuSpec:
    """Look up an architecture; UnknownTarget lists those known."""
    if arch not in MACHINES:
        raise UnknownTarget(f"unknown arch {arch!r}; known: {', '.join(MACHINES)}")
    return MACHINES[arch]
