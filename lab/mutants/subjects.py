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
        tile = step.tile(self.variant, self.tile)
        return Case(step, Matmul(*self.shape, dtype, self.layout), self.variant, tile, machine, self.stages)

    def __str__(self) -> str:
        return f"{self.case} {self.layout}, {self.multiprocessors} multiprocessors"


_THREADS, _WARPS, _MMA = "8x16x16/4x4", "16x32x16/16x32/4x4/2", "32x32x32/16x32"
_GROUP, _GROUPS = "64x64x64/1x1", "128x64x64/2x1"
_FEW, _MANY = (17, 29, 108), (120, 120, 1128)  # seven k tiles; as many that each stage is filled six times
SUBJECTS = (
    *(
        Subject(5, variant, _FEW, _THREADS, 3)
        for variant in ("async", "one_barrier", "one_barrier_unrolled", "sync", "register_staged", "writeback")
    ),
    Subject(5, "unrolled_ring", _FEW, _THREADS, 4, layout="nt"),
    Subject(5, "double_buffer_pipelined", _FEW, _THREADS, 2),
    Subject(6, "full", _FEW, _THREADS, 3),
    Subject(6, "unroll4", _FEW, _THREADS, 3, layout="nt"),
    Subject(7, "serpentine", (31, 61, 108), _WARPS, 3),
    Subject(7, "row_order", (31, 60, 108), _WARPS, 3, layout="nt"),
    Subject(8, "default", (61, 59, 216), _MMA, 1),
    Subject(8, "tf32", (61, 60, 216), _MMA, 1),
    Subject(9, "fragments", (61, 56, 216), _MMA, 4),
    Subject(9, "shared", (61, 56, 216), _MMA, 4, layout="nt"),
    Subject(9, "any_m", (61, 59, 216), _MMA, 4),
    Subject(9, "tf32", (61, 60, 216), _MMA, 3),
    Subject(10, "rows", (120, 120, 488), _GROUP, 4),
    Subject(10, "fitted", (64, 120, 2056), _GROUP, 4, 4),  # the reduction in parts
    Subject(10, "in_flight", (120, 120, 488), _GROUP, 4, layout="nt"),
    Subject(10, "awaited", (120, 120, 488), _GROUP, 4),
    Subject(10, "boxes", _MANY, _GROUP, 3, 4),
    Subject(10, "boxes", (248, 184, 1128), _GROUPS, 5, 4, layout="nt"),  # clusters, and a ring that is filled later
    Subject(11, "boxes", _MANY, _GROUP, 3),
    Subject(11, "rows", _MANY, _GROUPS, 4, layout="nt"),
    Subject(11, "tma_store", _MANY, _GROUP, 3),
    Subject(11, "direct", _MANY, _GROUP, 3, layout="nt"),
    Subject(11, "bounded", _MANY, _GROUPS, 3),
    Subject(12, "own_warp", _MANY, _GROUPS, 3),
    Subject(12, "early", _MANY, _GROUP, 4, layout="nt"),
    Subject(12, "roles", _MANY, _GROUPS, 3),
    Subject(12, "bounded", _MANY, _GROUP, 3, layout="nt"),
    Subject(12, "roles", (13, 120, 1128), "16x128x64/1x2/1", 3),  # operands exchanged
    Subject(12, "roles", (21, 72, 2280), "24x64x64/1x1/2", 3, layout="nt"),
    Subject(12, "roles", (24, 136, 1128), "16x64x64/1x1/1/2x2", 3),  # blocks that share loads, half of them beyond C
    Subject(12, "roles", (64, 168, 1128), "64x104x64/1x1", 3),  # a panel loaded for a part of its columns
    Subject(13, "stream", (364, 248, 552), _GROUPS, 3, 5),  # two waves of whole tiles, and two tiles with helpers
    Subject(13, "overlapped", (184, 184, 552), _GROUP, 3, 4),
    Subject(13, "whole", (1090, 120, 264), _GROUP, 4, 3),  # more rows of tiles than one group has
    Subject(13, "multicast", (248, 184, 552), _GROUP, 3, 4, layout="nt"),
    Subject(13, "bounded", (184, 184, 552), _GROUP, 3, 3),
)
