"""What a step can be asked for: tile, stages, variant. One source of truth for steps, sweeps and tuners."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

from schedules.tensorization import TensorCoreTile
from schedules.tiling import BlockTile, TileConfig
from schedules.warp_tiling import WarpTile
from schedules.warpgroup import WarpgroupTile
from schedules.workloads import Matmul

# Chosen after an exploratory sweep of 29 tiles on an H200. Step 4 was within 5 % of its best tile at 1024 with two of
# them, and pipelining (3 slots, mean of 256, 512 and 1024) gained +87 % with this one, +8 % with the other,
# 64x64x32/8x4. 64x64x16/4x4, where step 4 reached 0.93 of its best, gained +59 %. That sweep is not kept here.
DEFAULT_TILE = TileConfig(32, 64, 16, 4, 4)
# 3 rather than 4, which is faster at 256 and 512, because with 4 step 6 was 3 % slower than step 5 at 1024.
DEFAULT_STAGES = 3

# What `--tile best` chooses among, for every step and size: small tiles that fill the GPU where outputs are
# few, large ones that use each loaded element more often, and several depths of the k tile; and, for the
# steps that pipeline, the number of ring slots.
TILE_SET = tuple(
    TileConfig.parse(text)
    for text in (
        "16x32x32/2x2",
        "16x32x64/2x2",
        "32x32x16/4x4",
        "32x32x32/4x2",
        "32x32x32/4x4",
        "32x64x16/4x4",
        "32x64x32/4x4",
        "32x64x32/8x4",
        "64x32x32/4x2",
        "64x32x32/4x4",
        "64x64x16/4x4",
        "64x64x32/4x4",
        "64x64x16/8x4",
        "64x64x32/8x4",
        "128x64x16/8x4",
        "128x64x32/8x4",
        "64x128x32/8x4",
        "64x128x16/8x8",
        "64x128x32/8x8",
    )
)
STAGE_SET = (2, 3, 4)

# What `tune` adds to the set above: thin k tiles (8 steps), so that large tiles and deep rings fit together, and
# thread tiles of 8x8, which load least per multiply-add. An exploratory sweep on an H200, not kept here, showed
# 64x64x8/8x4 ahead at 1024 and beyond, and thread tiles of 8x16 far behind: the first has neighbours here.
TUNING_TILES = (
    *TILE_SET,
    *(
        TileConfig.parse(text)
        for text in (
            "32x64x8/4x4",
            "32x64x8/8x4",
            "64x32x8/8x4",
            "64x64x8/4x4",
            "64x64x8/8x4",
            "64x128x8/8x4",
            "128x64x8/8x4",
            "64x64x8/8x8",
            "64x64x16/8x8",
            "64x128x8/8x8",
            "128x64x8/8x8",
            "128x64x16/8x8",
            "128x128x8/8x8",
            "128x128x16/8x8",
        )
    ),
)
# 1 slot is no pipeline; more than 6 are not tried.
TUNING_STAGES = (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class TileFamily:
    """The tiles of steps that are tiled alike: how they are written, and which are chosen among.

    ``default`` needs no choice; ``best`` is what ``--tile best`` measures, ``tuning`` what ``tune`` measures, in
    likely order.
    """

    kind: type[BlockTile]
    default: BlockTile
    best: tuple[BlockTile, ...]
    tuning: tuple[BlockTile, ...]

    @classmethod
    def of(cls, kind: type[BlockTile], best: str, more: str = "") -> TileFamily:
        """A family from tiles as text, separated by blanks; the first is the default, ``more`` is for tuning only."""
        first = tuple(map(kind.parse, best.split()))
        return cls(kind, first[0], first, (*first, *map(kind.parse, more.split())))


THREAD_TILES = TileFamily(TileConfig, DEFAULT_TILE, TILE_SET, TUNING_TILES)

# For warps. In exploratory sweeps on an H200, not kept here, thread tiles of 8x8 with k tiles of 32 were ahead from
# 2048 on: 128x128 and 64x128 blocks fill a multiprocessor's registers with two or four of them. Below that, blocks are
# too few, and slices put more warps to work on each.
WARP_TILES = TileFamily.of(
    WarpTile,
    "128x128x32/32x64/8x8/1 64x128x32/32x64/8x8/1 64x128x32/32x64/8x8/2 32x64x32/32x64/8x8/4 32x64x64/32x64/8x8/8 "
    "32x32x32/32x32/8x4/4 16x32x64/16x32/4x4/4",
    "128x64x32/32x64/8x8/1 64x128x16/32x64/8x8/1 128x128x16/32x64/8x8/1 64x64x32/32x64/8x8/2 "
    "64x128x32/64x64/8x16/4 32x64x32/32x32/8x4/4 32x32x64/32x32/8x4/8 16x32x32/16x32/4x4/4 64x64x32/32x32/8x4/1",
)

# For tensor cores. Warp tiles of 64x64 load least from shared memory for each instruction among those that leave
# room for a second set of fragments; those of 64x96 fit one set only. Small block tiles fill the GPU where outputs are
# few.
TENSOR_CORE_TILES = TileFamily.of(
    TensorCoreTile,
    "128x128x32/64x64 128x256x32/64x64 256x128x32/64x64 128x256x64/64x64 256x128x64/64x64 128x64x64/64x32 "
    "64x128x64/32x64 64x64x64/32x32",
    "128x128x64/64x64 128x160x32/64x80 128x192x32/64x96 192x128x32/96x64 128x128x32/64x32 128x128x64/64x32 "
    "128x64x64/32x32 64x64x32/32x32",
)

# For warpgroups. The default has the widest instruction, and two warpgroups that share B. Three warpgroups bring the
# least per multiplication; smaller tiles leave room for two blocks to a multiprocessor, or fill more of them.
WARPGROUP_TILES = TileFamily.of(
    WarpgroupTile,
    "128x256x64/64x256 256x128x64/128x128 256x128x64/64x128 128x192x64/64x192 128x128x64/64x128 64x128x64/64x128",
    "192x256x64/64x256 128x128x64/128x128 64x256x64/64x256 128x64x64/64x64 64x64x64/64x64",
)


@dataclass(frozen=True)
class StepConfig:
    """How to build a step.

    ``stages`` are ring slots of each shared operand, for the steps that pipeline (others ignore it).
    ``async_copy`` says whether the target has cp.async. ``variant`` is one of the step's VARIANTS.
    """

    variant: str
    tile: BlockTile = field(default=DEFAULT_TILE)
    stages: int = DEFAULT_STAGES
    async_copy: bool = True

    def k_tiles(self, problem: Matmul) -> int:
        """How many k tiles the problem has: no more ring slots than that are used."""
        return -(-problem.k // self.tile.block_k)


@dataclass(frozen=True)
class TuningSpace:
    """What a search may choose among: every combination of a tile, a number of ring slots and a variant.

    The variants must compute the same, in the same order of additions; the first is the step's default.
    """

    tiles: tuple[BlockTile, ...]
    stages: tuple[int, ...]
    variants: tuple[str, ...]
    default_stages: int = DEFAULT_STAGES

    def configurations(self) -> tuple[StepConfig, ...]:
        """Every combination, likely ones first: a search that is stopped early has seen what matters most.

        The default variant before the others, then slots near the default before distant ones, then tiles in order.
        """
        near = sorted(self.stages, key=lambda stages: (abs(stages - self.default_stages), stages))
        return tuple(
            StepConfig(variant, tile, stages)
            for variant, stages, tile in itertools.product(self.variants, near, self.tiles)
        )

    @property
    def digest(self) -> str:
        """Tells two spaces apart, whatever the order in which they list the same things."""
        parts = [sorted(map(str, part)) for part in (self.tiles, self.stages, self.variants)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
