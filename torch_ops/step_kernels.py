"""The steps' kernels that a product of torch tensors may take, and how files name them.

::

    step 12, 128x192x64/2x1, 4 stages                                        a block to a tile
    step 13, 128x256x64/2x1, 4 stages, launched early, whole tiles           persistent; "last wave cut" is stream-K
    step 13, 128x256x64/2x1/2x1, 4 stages, launched early, whole tiles       the same, in clusters
    exchanged 16x128x64/1x2/4                                                step 12, operands swapped
    upright 64x96x64/1x1/2x2/2                                               step 12, in clusters or parts

The last two have as many stages as the product leaves room for: :func:`stages_for`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

from tvm import tirx

from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import cluster_blocks, persistent
from tensorir_ladder.kernels.roles import FEWEST_STAGES, MOST_SHARED_STAGES, MOST_STAGES
from tensorir_ladder.kernels.swapped import fits_beside, swapped
from tensorir_ladder.kernels.tiles import (
    ROLE_CHOICES,
    ClusterTile,
    RoleTile,
    SwappedTile,
    most_stages,
    stages_of_one_tile,
)
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.problem import KernelChoice, Setting, StepKernel

# Clusters lie within groups of 18 multiprocessors; of an H200's 132, these are the blocks that found room at once.
GROUP, GROUP_OF, SHORT_GROUP = 16, 18, 8
_NAME = re.compile(r"step (1[23]), (\S+), (\d) stages(?:, launched early, (whole tiles|last wave cut))?(?:, (.*))?")
PAIRS = "clusters of 2"
# Of any number of rows: few, since each is compiled once for all products of an n and a k.
FLEXIBLE = tuple(f"step 12, {each.tile}, {each.stages} stages" for each in ROLE_CHOICES)


def _batch(setting: Setting) -> dict[str, Any]:
    return {"batch": setting.batch, "broadcast": setting.broadcast}


def _roles(problem: Matmul, tile: RoleTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    form = KernelForm(setting.finish, setting.columns, setting.any_rows)
    return warp_specialized(problem, tile, stages, form, **_batch(setting))


def _persistent(
    problem: Matmul,
    tile: RoleTile,
    stages: int,
    setting: Setting,
    blocks: int | None = None,
    stream_k: bool = True,
) -> tirx.PrimFunc:
    """Make its early form: it waits for the kernel in front before it touches memory."""
    blocks = blocks or cluster_blocks(problem, tile, setting.straddles)
    form = KernelForm(setting.finish, setting.columns, overlapped=True)
    how = {"machine": setting.machine, "blocks": blocks, "stream_k": stream_k}
    return persistent(problem, tile, stages, form, **how, **_batch(setting))


def _exchanged(problem: Matmul, tile: SwappedTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    at_once = fits_beside(problem, tile, stages, setting.machine, setting.batch)
    form = KernelForm(setting.finish, setting.columns, overlapped=True, next_at_once=at_once)
    return swapped(problem, tile, stages, form, **_batch(setting))


def _upright(problem: Matmul, tile: RoleTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    form = KernelForm(setting.finish, setting.columns, overlapped=True)
    return warp_specialized(problem, tile, stages, form, **_batch(setting))


KERNELS = {  # as each step is, which a tuned line names
    kernel.step: kernel
    for kernel in (
        StepKernel(13, RoleTile, _persistent, early=True, stays=True, cuts=True, blocks=None),
        StepKernel(12, RoleTile, _roles),
    )
}
EXCHANGED = StepKernel(12, SwappedTile, _exchanged, early=True)
UPRIGHT = StepKernel(12, ClusterTile, _upright, early=True)
BY_WORD = {"exchanged": EXCHANGED, "upright": UPRIGHT}
# Step 13 with its clusters and its last wave decided: alone or in pairs, whole or cut.
PERSISTENT = {
    (blocks, cuts): replace(
        KERNELS[13], build=functools.partial(_persistent, blocks=blocks, stream_k=cuts), blocks=blocks, cuts=cuts
    )
    for blocks in (1, 2)
    for cuts in (False, True)
}


def parse_kernel(name: str) -> KernelChoice | Streamed:
    """Read a kernel's name in a file; its stages are 0 where :func:`stages_for` finds them.

    Raises ValueError for a name that is none, IllegalTile for a malformed tile.
    """
    if name == str(Streamed()):
        return Streamed()
    word, _, tile = name.partition(" ")
    if word in BY_WORD:
        return KernelChoice(BY_WORD[word], BY_WORD[word].family.parse(tile), 0)
    match = _NAME.fullmatch(name)
    if not match or match[5] not in (None, PAIRS) or (match[1] == "13") != bool(match[4]):
        raise ValueError(f"{name!r} names no kernel")
    kernel = PERSISTENT[2 if match[5] else 1, match[4] == "last wave cut"] if match[4] else KERNELS[12]
    family = ClusterTile if match[2].count("/") > 1 else RoleTile
    return KernelChoice(kernel, family.parse(match[2]), int(match[3]))


def name_kernel(choice: KernelChoice | Streamed) -> str:
    """Return a kernel's name in a file; see :func:`parse_kernel`."""
    if isinstance(choice, KernelChoice):
        for word, kernel in BY_WORD.items():
            if choice.kernel is kernel:
                return f"{word} {choice.tile}"
    return str(choice)


def stages_for(choice: KernelChoice, nt: bool, shares: bool) -> int:
    """Return the stages of a kernel of one tile a block, 0 where there is no room.

    ``nt``: B is stored [n, k]; ``shares``: several blocks of it share a multiprocessor.
    """
    tile = choice.tile
    most = MOST_STAGES if tile.shared_by == 1 else MOST_SHARED_STAGES
    if choice.kernel is UPRIGHT:
        return stages_of_one_tile(tile, most, nt)
    together = most_stages(tile, most, 2) if shares else 0
    return together if together > FEWEST_STAGES else most_stages(tile, most)


def blocks_at_once(cluster: int, multiprocessors: int) -> int:
    """Return how many blocks in clusters of a size a GPU holds at once, one to a multiprocessor."""
    clusters = multiprocessors // GROUP_OF * (GROUP // cluster) + SHORT_GROUP // cluster
    return clusters * cluster if cluster > 2 else multiprocessors


def with_stages(choice: KernelChoice, problem: Matmul, multiprocessors: int, batch: int = 1) -> KernelChoice:
    """Return a named kernel as it is built for a batch of a product."""
    if choice.stages:
        return choice
    tile = choice.tile
    down, across = tile.cluster
    clusters = batch * -(-problem.m // (tile.block_m * down)) * -(-problem.n // (tile.block_n * across))
    cluster = down * across * tile.parts
    shares = clusters * cluster > blocks_at_once(cluster, multiprocessors)
    return replace(choice, stages=stages_for(choice, problem.layout == "nt", shares))
