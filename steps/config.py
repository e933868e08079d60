"""What a step can be asked for: tile, stages, variant. One source of truth for steps, sweeps and tuners."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field, replace

from tvm.target import Target

from tensorir_ladder.kernels.blackwell import BlackwellTile
from tensorir_ladder.kernels.stream import reckoned_cycles
from tensorir_ladder.kernels.tiles import HopperTile, RoleTile
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.recipes.split_reduction import parts_to_fill
from tensorir_ladder.schedules.tiles import BlockTile, TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.choice import RING_CHOICES, ROLE_CHOICES

# Chosen after an exploratory sweep of 29 tiles on an H200. Step 4 was within 5 % of its best tile at 1024 with two of
# them, and pipelining (3 slots, mean of 256, 512 and 1024) gained +87 % with this one, +8 % with the other,
# 64x64x32/8x4. 64x64x16/4x4, where step 4 reached 0.93 of its best, gained +59 %. That sweep is not kept here.
DEFAULT_TILE = ThreadTile(block=(32, 64, 16), thread=(4, 4))
# 3 rather than 4, which is faster at 256 and 512, because with 4 step 6 was 3 % slower than step 5 at 1024.
DEFAULT_STAGES = 3

# What `--tile best` chooses among, for every step and size: small tiles that fill the GPU where outputs are
# few, large ones that use each loaded element more often, and several depths of the k tile; and, for the
# steps that pipeline, the number of ring slots.
TILE_SET = tuple(
    ThreadTile.parse(text)
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
        ThreadTile.parse(text)
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

# The fewest k tiles that a part of a split reduction has. Its sums, in float32, are written and read again: as many
# bytes as the default warpgroup tile's operands of 5 k tiles; and another kernel adds them up. 56 k tiles were measured
# to pay, at 1024x1024x14336 on an H200; fewer were not tried.
SHORTEST_PART = 16


def _blocks(problem: Matmul, tile: BlockTile) -> int:
    """How many block tiles the output has."""
    return -(-problem.m // tile.block_m) * -(-problem.n // tile.block_n)


def _parts(problem: Matmul, tile: BlockTile, slots: int, multiprocessors: int) -> int:
    """How many parts a split reduction has."""
    shortest = max(slots, SHORTEST_PART)
    return parts_to_fill(_blocks(problem, tile), multiprocessors, -(-problem.k // tile.block_k), shortest)


@dataclass(frozen=True)
class TileFamily:
    """The tiles of steps that are tiled alike: how they are written, and which are chosen among.

    ``default`` is for a product of which nothing is known; ``best`` is what ``--tile best`` measures, ``tuning`` what
    ``tune`` measures, in likely order. ``choices`` are tiles with their ring slots, from which :meth:`choose` takes
    one without measuring.
    """

    kind: type[BlockTile]
    default: BlockTile
    best: tuple[BlockTile, ...]
    tuning: tuple[BlockTile, ...]
    choices: tuple[tuple[BlockTile, int], ...] = ()
    warps_to_hide: float = 0.0
    edge: float = 0.0

    @classmethod
    def of(cls, kind: type[BlockTile], choices: str, more: str, *, warps_to_hide: float, edge: float) -> TileFamily:
        """A family from text, blanks between: ``choices`` as tile@slots, the first the default, ``more`` for tuning."""
        pairs = [choice.split("@") for choice in choices.split()]
        chosen = tuple((kind.parse(tile), int(slots)) for tile, slots in pairs)
        tiles = tuple(dict.fromkeys(tile for tile, _ in chosen))
        return cls(
            kind, tiles[0], tiles, (*tiles, *map(kind.parse, more.split())), chosen, float(warps_to_hide), float(edge)
        )

    def choose(
        self, problem: Matmul, target: Target, multiprocessors: int, *, split: bool = False
    ) -> tuple[BlockTile, int] | None:
        """The tile and ring slots that should be fastest for a product, by what its blocks cost; None without choices.

        A multiprocessor's time is the outputs that fall to it, dearer where few warps hide each other's latencies
        and where tiles are small, whose edges load more for each output::

            ceil(blocks / multiprocessors) · block_m · block_n
              · (1 + warps_to_hide / warps resident) · (1 + edge · (1 / block_m + 1 / block_n))

        A warp that reads one step ahead counts twice: it hides latency as two do.

        ``split`` counts each block in the parts that :func:`schedules.recipes.split_reduction.parts_to_fill` makes of
        it.
        Both constants are a family's own. They were set by hand so that exploratory measurements on an H200, not kept
        here, come out in the right order; ``python -m reports table`` shows what the choice costs against tuning.
        """

        def cost(choice: tuple[BlockTile, int]) -> float:
            """What a choice's blocks cost, in the parts that each makes."""
            tile, slots = choice
            parts = _parts(problem, tile, slots, multiprocessors) if split else 1
            return self._cost(tile, slots, problem, target, multiprocessors, parts)

        return min(self._fitting(target, dtype_bytes(problem.dtype)), key=cost, default=None)

    def _fitting(self, target: Target, itemsize: int) -> list[tuple[BlockTile, int]]:
        """The choices that a target can hold; with fewer ring slots where it can hold none of them as it is."""
        for fewer in range(max((slots for _, slots in self.choices), default=0)):
            shorter = [(tile, slots - fewer) for tile, slots in self.choices if slots > fewer]
            if legal := [choice for choice in shorter if not choice[0].violations(target, itemsize, choice[1])]:
                return legal
        return []

    def _cost(
        self, tile: BlockTile, slots: int, problem: Matmul, target: Target, multiprocessors: int, parts: int
    ) -> float:
        per_multiprocessor = -(-_blocks(problem, tile) * parts // multiprocessors)
        smem = int(target.attrs["max_shared_memory_per_block"])
        fits = min(
            smem // tile.smem_bytes(dtype_bytes(problem.dtype), slots),
            int(target.attrs["registers_per_block"]) // (tile.registers * tile.threads_per_block),
        )
        warps = min(per_multiprocessor, max(1, fits)) * tile.threads_per_block / 32 * (1 + tile.steps_ahead)
        edges = 1 + self.edge * (1 / tile.block_m + 1 / tile.block_n)
        return per_multiprocessor / parts * tile.block_m * tile.block_n * (1 + self.warps_to_hide / warps) * edges


THREAD_TILES = TileFamily(ThreadTile, DEFAULT_TILE, TILE_SET, TUNING_TILES)

# For warps. In exploratory sweeps on an H200, not kept here, threads with 8x16 outputs that read operands ahead were
# fastest from 2048 on, with k tiles of 16: those of 32, written out, make warps wait for instructions. Two such blocks
# fill a multiprocessor's registers, as do four of 64x128 with 8x8. Below that, blocks are too few, and slices put more
# warps to work on each.
WARP_TILES = TileFamily.of(
    WarpTile,
    "128x128x16/32x128/8x16/1@3 64x128x32/32x64/8x8/1@2 32x64x32/32x64/8x8/4@4 32x64x64/32x64/8x8/8@3 "
    "16x32x64/16x32/4x4/4@3",
    "128x256x16/32x128/8x16/1 64x128x32/32x128/8x16/2 64x128x64/32x128/8x16/4 128x128x32/32x64/8x8/1 "
    "64x128x32/32x64/8x8/2 64x64x32/32x64/8x8/4 128x128x32/64x32/8x8/1 32x32x32/32x32/8x4/4 32x32x64/32x32/8x4/8 "
    "16x32x64/16x32/4x4/8 16x32x32/16x32/4x4/4",
    warps_to_hide=4,
    edge=11,
)

# For tensor cores. Warp tiles of 64x64 load least from shared memory for each instruction among those that leave
# room for a second set of fragments; those of 64x96 fit one set only. Small block tiles fill the GPU where outputs are
# few.
TENSOR_CORE_TILES = TileFamily.of(
    TensorCoreTile,
    "128x128x64/64x64@3 128x64x64/64x32@4 64x128x64/32x64@4 64x64x64/32x32@4",
    "128x128x32/64x64 128x256x32/64x64 256x128x32/64x64 128x64x64/32x32",
    warps_to_hide=0.5,
    edge=20,
)

# For warpgroups. The default has the widest instruction, and two warpgroups that share B. Three warpgroups bring the
# least per multiplication; smaller tiles leave room for two blocks to a multiprocessor, or fill more of them.
WARPGROUP_TILES = TileFamily.of(
    WarpgroupTile,
    "128x256x64/2x1@4 64x128x64/1x1@6 64x64x64/1x1@6",
    "256x128x64/2x1 256x128x64/4x1 128x128x64/2x1 128x64x64/2x1 64x256x64/1x1",
    warps_to_hide=0.5,
    edge=20,
)

# For explicit kernels. The same block tiles in the same order, and their warpgroups.
HOPPER_TILES = TileFamily.of(
    HopperTile,
    RING_CHOICES,
    "256x128x64/2x1 128x256x64/1x2 128x128x128/2x1 128x192x64/2x1 64x256x64/1x1",
    warps_to_hide=0.5,
    edge=20,
)

# For Blackwell. Nothing of this family has been measured: the order and both constants are Hopper's.
BLACKWELL_TILES = TileFamily.of(
    BlackwellTile,
    "128x256x64@4 128x128x64@6 128x64x64@6",
    "128x192x64 128x128x128",
    warps_to_hide=0.5,
    edge=20,
)


@dataclass(frozen=True)
class RoleTileFamily(TileFamily):
    """Tiles of kernels whose warpgroups have roles, chosen by :func:`kernels.stream.reckoned_cycles`.

    ``cuts``: whether the last wave may be cut.
    """

    cuts: bool = False

    def _cost(
        self, tile: RoleTile, slots: int, problem: Matmul, target: Target, multiprocessors: int, parts: int
    ) -> float:
        return reckoned_cycles(problem, tile, multiprocessors, self.cuts)


_MORE_ROLE_TILES = "256x128x64/2x1 128x64x64/2x1 64x256x64/1x1 128x192x64/2x1"
ROLE_TILES = RoleTileFamily.of(RoleTile, ROLE_CHOICES, _MORE_ROLE_TILES, warps_to_hide=0, edge=0)
PERSISTENT_TILES = replace(ROLE_TILES, cuts=True)


@dataclass(frozen=True)
class StepConfig:
    """How to build a step.

    ``stages`` are ring slots of each shared operand, for the steps that pipeline (others ignore it).
    ``async_copy`` says whether the target has cp.async. ``variant`` is one of the step's VARIANTS.
    ``multiprocessors`` are the target's, for steps that choose by them how many blocks to make (default: an H200's).
    """

    variant: str
    tile: BlockTile = field(default=DEFAULT_TILE)
    stages: int = DEFAULT_STAGES
    async_copy: bool = True
    multiprocessors: int = 132

    def k_tiles(self, problem: Matmul) -> int:
        """How many k tiles the problem has: no more ring slots than that are used."""
        return -(-problem.k // self.tile.block_k)

    def parts(self, problem: Matmul) -> int:
        """How many parts a split reduction has, each of SHORTEST_PART k tiles or more, and no fewer than ring slots."""
        return _parts(problem, self.tile, self.stages, self.multiprocessors)


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
