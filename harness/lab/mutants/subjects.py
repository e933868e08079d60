"""Kernels whose text is mutated: small, but with more k tiles than stages, ragged edges, and several tiles a block."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import get_step


@dataclass(frozen=True)
class Subject:
    """One kernel: a step's variant, the product, the tile, and how many multiprocessors its blocks share."""

    step: int
    variant: str
    shape: tuple[int, int, int]
    tile: str
    stages: int
    multiprocessors: int = 132
    layout: str = "nn"
    dtype: str | None = None

    @property
    def case(self) -> Case:
        """The case to build."""
        step = get_step(self.step)
        dtype = self.dtype or step.variant(self.variant).dtypes[0]
        machine = replace(machine_for(step.arch or DEFAULT_ARCH), multiprocessors=self.multiprocessors)
        tile = step.tiles.kind.parse(self.tile)
        return Case(step, Matmul(*self.shape, dtype, self.layout), self.variant, tile, machine, self.stages)


_THREADS, _WARPS, _MMA, _GROUP, _GROUPS = (
    "8x16x16/4x4",
    "16x32x16/16x32/4x4/2",
    "32x32x32/16x32",
    "64x64x64/1x1",
    "128x64x64/2x1",
)
_SMALL, _RAGGED = (17, 35, 100), (33, 35, 200)
SUBJECTS = (
    *(
        Subject(5, variant, _SMALL, _THREADS, 3)
        for variant in ("async", "one_barrier", "one_barrier_unrolled", "sync", "register_staged", "writeback")
    ),
    Subject(5, "unrolled_ring", _SMALL, _THREADS, 4, layout="nt"),
    Subject(5, "double_buffer_pipelined", _SMALL, _THREADS, 2),
    Subject(6, "full", _SMALL, _THREADS, 3),
    Subject(6, "unroll4", _SMALL, _THREADS, 3, layout="nt"),
    Subject(7, "serpentine", (33, 35, 100), _WARPS, 3),
    Subject(7, "row_order", (33, 36, 100), _WARPS, 3, layout="nt"),
    Subject(8, "default", _RAGGED, _MMA, 1),
    Subject(8, "tf32", _RAGGED, _MMA, 1),
    Subject(9, "fragments", (33, 40, 200), _MMA, 4),
    Subject(9, "shared", (33, 40, 200), _MMA, 4, layout="nt"),
    Subject(9, "any_m", _RAGGED, _MMA, 4),
    Subject(9, "tf32", (33, 36, 200), _MMA, 3),
    Subject(10, "rows", (130, 72, 456), _GROUP, 4),
    Subject(10, "rows", (64, 72, 2056), _GROUP, 4, 4),
    Subject(10, "in_flight", (130, 72, 456), _GROUP, 4, layout="nt"),
    Subject(10, "awaited", (130, 72, 456), _GROUP, 4),
    Subject(11, "tma_store", (130, 72, 456), _GROUP, 4),
    Subject(11, "direct", (130, 72, 456), _GROUP, 4, layout="nt"),
    Subject(11, "bounded", (130, 72, 456), _GROUPS, 4),
    Subject(12, "roles", (130, 72, 456), _GROUPS, 4),
    Subject(12, "bounded", (130, 72, 456), _GROUP, 4, layout="nt"),
    Subject(13, "stream", (260, 72, 456), _GROUPS, 4, 4),
    Subject(13, "overlapped", (200, 136, 456), _GROUP, 4, 3),
    Subject(13, "whole", (1090, 72, 264), _GROUP, 4, 3),
    Subject(13, "multicast", (130, 72, 456), _GROUP, 4, 6, layout="nt"),
    Subject(13, "bounded", (200, 136, 456), _GROUP, 3, 3),
)
