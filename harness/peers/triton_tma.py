"""Triton's persistent product by TMA: our own kernel, tuned over a declared list, half precision only.

Two forms: loops flattened and pipelined by Triton, or loads given to warps of their own by Triton's automatic warp
specialization, as far as Triton 3.6 has it for sm_90. See :mod:`harness.peers.triton` for what the two Triton peers
share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind
from tensorir_ladder.harness.peers.triton import BlockConfig, TritonCall, launch, load_kernel, tune
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import Matmul

ROW_BYTES = 16  # TMA steps over rows that are multiples of this
DTYPES = ("float16", "bfloat16")
# Rows, columns and depth of the tiles, warps; after each its (stages, parts in which C is stored). A tile of C stored
# whole is staged in shared memory whole, which costs the largest tiles a stage. Small tiles are for small products.
FLATTENED = (
    ((128, 256, 64, 8), ((3, 1), (3, 2), (4, 2))),
    ((256, 128, 64, 8), ((3, 1), (3, 2), (4, 2))),
    ((128, 128, 64, 8), ((4, 1), (4, 2))),
    ((128, 128, 64, 4), ((3, 1), (4, 1), (4, 2))),
    ((128, 64, 64, 4), ((4, 1),)),
    ((64, 128, 64, 4), ((4, 1), (5, 1))),
    ((64, 64, 64, 4), ((4, 1), (5, 1))),
    ((64, 64, 128, 4), ((3, 1), (4, 1))),
)
# Four warps, which Triton multiplies; more, and it leaves loads where they are. Halves it cannot divide.
SPECIALIZED = (
    ((128, 256, 64, 4), (3,)),
    ((256, 128, 64, 4), (3,)),
    ((128, 128, 64, 4), (3, 4)),
    ((64, 128, 64, 4), (4,)),
)


@dataclass(frozen=True)
class TmaConfig(BlockConfig):
    """One way to run the kernel: a :class:`BlockConfig`, and the most programs that take turns with the tiles.

    C is stored in ``parts`` (1 or 2) side by side. ``specialized`` gives loads to warps of their own.
    """

    parts: int = 1
    specialized: bool = False
    most_programs: int = 1

    def __str__(self) -> str:
        more = ", stored in halves" if self.parts == 2 else ""
        return super().__str__() + more + (", warp specialized" if self.specialized else "")

    def call(self, problem: Matmul, operands: tuple[Any, Any, Any]) -> TritonCall:
        """Describe one launch on ``operands`` and their sizes."""
        programs = min(self.most_programs, self.programs(problem))
        constants = self.constants | {"programs": programs, "transposed": problem.layout == "nt"}
        constants |= {"parts": self.parts, "specialized": self.specialized}
        given = operands if self.specialized else self._described(problem, operands)
        return TritonCall(programs, (*given, problem.m, problem.n, problem.k), constants)

    def _described(self, problem: Matmul, operands: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        from triton.tools.tensor_descriptor import TensorDescriptor

        b_block = (self.block_k, self.block_n) if problem.layout == "nn" else (self.block_n, self.block_k)
        blocks = ((self.block_m, self.block_k), b_block, (self.block_m, self.block_n // self.parts))
        return tuple(TensorDescriptor.from_tensor(each, list(block)) for each, block in zip(operands, blocks))


def declared_configs(problem: Matmul, most_programs: int) -> list[TmaConfig]:
    """List every configuration that is tuned over.

    PeerFailed for operands that are not half precision, or whose rows TMA cannot step over.
    """
    if problem.dtype not in DTYPES:
        raise PeerFailed(f"the persistent Triton kernel multiplies {' and '.join(DTYPES)}, not {problem.dtype}")
    rows = {"A": (problem.k, problem.dtype), "B": (problem.b_shape[1], problem.dtype)}
    for name, (elements, dtype) in (rows | {"C": (problem.n, problem.out_dtype)}).items():
        if (row := elements * dtype_bytes(dtype)) % ROW_BYTES:
            raise PeerFailed(f"rows of {name} take {row} bytes; TMA takes multiples of {ROW_BYTES}: pad them")
    plain = [TmaConfig(*block, *form, False, most_programs) for block, forms in FLATTENED for form in forms]
    own_warps = [TmaConfig(*block, count, 1, True, most_programs) for block, counts in SPECIALIZED for count in counts]
    return plain + own_warps


def load_tma_kernel() -> Any:
    """Import the kernel, and give Triton device memory for the descriptors that it makes; raises as ``load_kernel``."""
    kernel = load_kernel("tensorir_ladder.harness.peers.triton_tma_kernel")
    import torch
    import triton

    def room(size: int, _alignment: int, _stream: int | None) -> Any:
        return torch.empty(size, dtype=torch.int8, device="cuda")  # torch aligns it to 512 bytes

    triton.set_allocator(room)
    return kernel


def enter(arena: Arena, machine: GpuSpec) -> list[Entrant]:
    """Enter the fastest configuration of the list, with a program for each multiprocessor."""
    kernel = load_tma_kernel()
    properties = arena.backend.torch.cuda.get_device_properties(0)
    configs = declared_configs(arena.problem, properties.multi_processor_count)
    tuning = tune(kernel, arena, machine, configs)
    best = tuning.best()
    return [Entrant(KIND.name, launch(kernel, arena.problem, best), str(best), why=tuning.summary)]


KIND = PeerKind("triton_tma", "our own persistent Triton kernel by TMA, tuned", ("triton_tma",), enter, "triton")
