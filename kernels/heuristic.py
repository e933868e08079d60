"""Which kernel, tile and stage count to take for a product: a table of candidates, and what each would cost.

The cost is a count of clock cycles on one multiprocessor, good enough to put candidates into order, no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tvm import tirx
from tvm.target import Target

from schedules.errors import IllegalTile
from schedules.workloads import Matmul

from .config import HopperTile
from .tma_ring import tma_ring

ITEMSIZE = 2
MULTIPLY_ADDS_PER_CYCLE = 2048  # of 16-bit wgmma on a multiprocessor: m64n256k16 takes 128 cycles
# What a loaded byte costs beside the multiplications that hide most of it: the one constant that sets large tiles
# before small ones. It is that of steps.config.HOPPER_TILES, set by hand after exploratory measurements on an H200.
CYCLES_PER_BYTE = 1 / 205


@dataclass(frozen=True)
class Candidate:
    """A kernel with a tile and ring slots, and what it costs beside multiplying, estimated in clock cycles.

    ``step_cycles`` of a k tile: waits and barriers that no other block on the multiprocessor hides. ``turn_cycles`` of
    an output tile: filling the ring and storing results, as far as they do not overlap with another tile's work.
    """

    kernel: Callable[[Matmul, HopperTile, int], tirx.PrimFunc]
    tile: HopperTile
    stages: int
    step_cycles: int
    turn_cycles: int

    def build(self, problem: Matmul) -> tirx.PrimFunc:
        """The kernel for a problem."""
        return self.kernel(problem, self.tile, self.stages)

    def cost(self, problem: Matmul, target: Target, multiprocessors: int) -> float:
        """Clock cycles of the multiprocessor with most tiles::

        tiles · k tiles · (multiply-adds / rate + bytes · cost of a byte + step_cycles / blocks resident)
          + ceil(tiles / blocks resident) · turn_cycles
        """
        block_m, block_n, block_k = self.tile.block
        tiles = -(-(-(-problem.m // block_m) * -(-problem.n // block_n)) // multiprocessors)
        resident = min(tiles, self._resident(target))
        multiply = block_m * block_n * block_k / MULTIPLY_ADDS_PER_CYCLE
        load = (block_m + block_n) * block_k * ITEMSIZE * CYCLES_PER_BYTE
        steps = tiles * -(-problem.k // block_k)
        return steps * (multiply + load + self.step_cycles / resident) + -(-tiles // resident) * self.turn_cycles

    def _resident(self, target: Target) -> int:
        """Blocks that a multiprocessor holds at once, by shared memory and registers."""
        smem = int(target.attrs["max_shared_memory_per_block"]) // self.tile.smem_bytes(ITEMSIZE, self.stages)
        registers = self.tile.registers * self.tile.threads_per_block
        return max(1, min(smem, int(target.attrs["registers_per_block"]) // registers))


CANDIDATES = tuple(
    Candidate(tma_ring, HopperTile.parse(tile), stages, step_cycles=100, turn_cycles=3000)
    for tile, stages in (
        ("128x256x64/2x1", 4),
        ("256x128x64/2x1", 4),
        ("128x128x64/2x1", 6),
        ("128x128x64/2x1", 3),
        ("64x128x64/1x1", 6),
        ("64x64x64/1x1", 6),
    )
)


def choose(
    problem: Matmul, target: Target, multiprocessors: int, candidates: Iterable[Candidate] = CANDIDATES
) -> Candidate:
    """The candidate of least cost among those that the target can hold; the first of equals.

    Raises IllegalTile where it can hold none, with what is wrong with the first.
    """
    candidates = list(candidates)
    violations = {each: each.tile.violations(target, ITEMSIZE, each.stages) for each in candidates}
    legal = [each for each in candidates if not violations[each]]
    if not legal:
        raise IllegalTile(
            "no kernel fits this target: " + "; ".join(violations[candidates[0]]), remedy="run on an sm_90a GPU"
        )
    return min(legal, key=lambda each: each.cost(problem, target, multiprocessors))
