"""The GPUs this project knows, as data. Nothing else in the project knows a GPU's name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.target import Target


class UnknownTarget(ValueError):
    """An architecture that is not in the table."""


@dataclass(frozen=True)
class Machine:
    """What one architecture offers. Limits are the architecture's (CUDA C++ programming guide, compute
    capabilities); rates and latencies are those of the GPU named, their origin beside them, else None.
    """

    arch: str
    gpu: str | None
    sms: int | None
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    threads_per_block: int = 1024
    warp_size: int = 32
    has_cp_async: bool = True
    fp32_gflops: float | None = None
    bandwidth_gb_s: float | None = None
    dram_latency_ns: float | None = None

    def target(self) -> Target:
        """The TVM target with this machine's limits, so that a schedule can be checked against it."""
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

    def of_gpu(self, name: str) -> Machine:
        """This machine where its rates were measured on a GPU of that name; else without rates.

        Two GPUs of one architecture share its limits, not its multiprocessors, clocks and memory.
        """
        if name == self.gpu:
            return self
        return replace(self, gpu=None, sms=None, fp32_gflops=None, bandwidth_gb_s=None, dram_latency_ns=None)

    def blocks_resident(self, threads: int, registers: int, smem_bytes: int) -> tuple[int, str]:
        """How many blocks of one kernel an SM holds at once, and what limits it.

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


def _machine(
    arch: str, smem_block_kib: int, smem_sm_kib: int, threads: int, blocks: int, **measured: object
) -> Machine:
    known = {"gpu": None, "sms": None, **measured}
    return Machine(
        arch,
        smem_per_block_bytes=smem_block_kib * 1024,
        smem_per_sm_bytes=smem_sm_kib * 1024,
        threads_per_sm=threads,
        blocks_per_sm=blocks,
        **known,
    )  # type: ignore[arg-type]


MACHINES: dict[str, Machine] = {
    machine.arch: machine
    for machine in (
        _machine("sm_75", 64, 64, 1024, 16, has_cp_async=False),
        _machine("sm_80", 163, 164, 2048, 32),
        _machine("sm_86", 99, 100, 1536, 16),
        _machine("sm_89", 99, 100, 1536, 24),
        # H200. The peak is arithmetic: 132 · 128 multiply-adds a clock at 1980 MHz. Bandwidth: a copy of device
        # memory, measured. Latency: pointers chased once through 256 MiB (637 cycles; 288 within the L2); the
        # program for that is not kept here.
        _machine(
            "sm_90a", 227, 228, 2048, 32,
            gpu="NVIDIA H200", sms=132, fp32_gflops=66900.0, bandwidth_gb_s=4300.0, dram_latency_ns=322.0,
        ),
        _machine("sm_90", 227, 228, 2048, 32),
        _machine("sm_100a", 227, 228, 2048, 32),
        _machine("sm_120", 99, 100, 1536, 24),
    )
}  # fmt: skip
DEFAULT_ARCH = "sm_90a"


def machine_for(arch: str) -> Machine:
    """The machine of an architecture; UnknownTarget lists those known."""
    if arch not in MACHINES:
        raise UnknownTarget(f"unknown arch {arch!r}; known: {', '.join(MACHINES)}")
    return MACHINES[arch]
