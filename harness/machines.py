"""The GPUs that this project knows, as data; nothing else in the project knows a GPU's name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.target import Target

from tensorir_ladder.harness.models.rate_files import Rates, rates_of
from tensorir_ladder.schedules import cost
from tensorir_ladder.torch_ops.rates import cost_rates

SMS_UNKNOWN = 108  # multiprocessors to choose tiles for where the machine was not measured: those of an A100


class UnknownTarget(ValueError):
    """An architecture that is not in the table."""


@dataclass(frozen=True)
class Machine:
    """One architecture. Limits are the architecture's (CUDA C++ programming guide, compute capabilities)."""

    arch: str
    gpu: str | None
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

    @property
    def sms(self) -> int | None:
        """Multiprocessors."""
        return self.rates and self.rates.sms

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
        return cost.Machine(self.target(), self.sms or SMS_UNKNOWN, cost_rates(self.gpu), self.has_cp_async)

    def of_gpu(self, name: str) -> Machine:
        """Return this machine with the rates of the GPU of that name; without rates where none were measured on it.

        Two GPUs of one architecture share its limits, not its multiprocessors, clocks and memory.
        """
        return self if name == self.gpu else replace(self, gpu=name)

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


def _machine(arch: str, smem_block_kib: int, smem_sm_kib: int, threads: int, blocks: int, **more: object) -> Machine:
    return Machine(
        arch,
        smem_per_block_bytes=smem_block_kib * 1024,
        smem_per_sm_bytes=smem_sm_kib * 1024,
        threads_per_sm=threads,
        blocks_per_sm=blocks,
        **{"gpu": None, **more},
    )  # type: ignore[arg-type]


MACHINES: dict[str, Machine] = {
    machine.arch: machine
    for machine in (
        _machine("sm_75", 64, 64, 1024, 16, has_cp_async=False),
        _machine("sm_80", 163, 164, 2048, 32),
        _machine("sm_86", 99, 100, 1536, 16),
        _machine("sm_89", 99, 100, 1536, 24),
        # Where no GPU is at hand, predictions for sm_90a are those for an H200.
        _machine("sm_90a", 227, 228, 2048, 32, gpu="NVIDIA H200"),
        _machine("sm_90", 227, 228, 2048, 32),
        _machine("sm_100a", 227, 228, 2048, 32),
        _machine("sm_120", 99, 100, 1536, 24),
    )
}
DEFAULT_ARCH = "sm_90a"


def machine_for(arch: str) -> Machine:
    """Look up an architecture; UnknownTarget lists those known."""
    if arch not in MACHINES:
        raise UnknownTarget(f"unknown arch {arch!r}; known: {', '.join(MACHINES)}")
    return MACHINES[arch]
