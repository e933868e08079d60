"""Which step's kernel, tile and stages to take for a product: by what each would cost, or by what was measured.

The cost is a count of clock cycles on one multiprocessor (:mod:`schedules.cost`), good enough to put choices into
order, no prediction. Where a GPU's measurements contradict it, ``tuned/`` has what was faster; each line there is a
record's (``reports/results``).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from tvm import tirx
from tvm.target import Target

from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.kernels.persistent import cluster_blocks, persistent
from tensorir_ladder.kernels.stream_k import plan_for
from tensorir_ladder.kernels.swapped import fits_beside, swapped
from tensorir_ladder.kernels.tiles import (
    RING_CHOICES,
    ROLE_CHOICES,
    ClusterTile,
    HopperTile,
    RoleTile,
    SwappedTile,
    at_once_choices,
    role_choices,
)
from tensorir_ladder.kernels.tma_ring import tma_ring
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules import tiles
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS, Matmul
from tensorir_ladder.torch_ops.estimates import Estimates, estimates_on
from tensorir_ladder.torch_ops.few_rows import Streamed, streams
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE
from tensorir_ladder.torch_ops.one_tile import all_tiles, one_tile_stages
from tensorir_ladder.torch_ops.rates import read
from tensorir_ladder.torch_ops.shifted import Shifting, fastest_shifting
from tensorir_ladder.torch_ops.short_reductions import MOST_STEPS, Unaligned, fastest_tile

ITEMSIZE = 2
UNSURE = 1.05  # by which a kernel that shifts rows must be faster: of 106 products 35 were 1.2 times as fast by it
Extent = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Setting:
    """Circumstances that a kernel is made for, beside its product.

    ``straddles``: rows of B lie across cache lines; ``finish``: what is done to sums before they are rounded;
    ``batch``: so many such products; ``any_rows``: the kernel takes any number of rows up to the product's. Both only
    where the kernel is ``flexible``. ``columns``: the output has so many, fewer than the product, and is stored as it
    lies; 0 where it has as many. Only where the kernel is ``narrowing``.
    """

    machine: Machine
    straddles: bool = False
    finish: Epilogue = PLAIN
    batch: int = 1
    any_rows: bool = False
    columns: int = 0


@dataclass(frozen=True)
class StepKernel:
    """A step's kernel, its tiles with their stages, and what it does that its cost depends on.

    ``build(problem, tile, stages, setting)`` makes the kernel. ``early``: its blocks begin before the kernel in front
    has ended; ``stays``: they have one tile after the other; ``cuts``: their last wave of tiles may be cut. ``blocks``:
    of a cluster, None where the setting says it. ``flexible``: it takes batches of products, and any number of rows.
    ``narrowing``: it stores to outputs of fewer columns than the product, whose rows TMA cannot step over.
    """

    step: int
    tiles: tuple[tiles.Choice, ...]
    build: Callable[[Matmul, HopperTile, int, Setting], tirx.PrimFunc]
    early: bool = False
    stays: bool = False
    cuts: bool = False
    blocks: int | None = 1
    flexible: bool = False
    narrowing: bool = False

    def takes(self, problem: Matmul, tile: HopperTile, machine: Machine) -> bool:
        """Tell whether the kernel is another for this product than that of whole tiles."""
        return not self.cuts or plan_for(problem, tile, machine, self.blocks or 1).helpers > 0


def _ring(problem: Matmul, tile: HopperTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    return tma_ring(problem, tile, stages, finish=setting.finish)


def _roles(problem: Matmul, tile: RoleTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    more = {"batch": setting.batch, "any_rows": setting.any_rows, "columns": setting.columns}
    return warp_specialized(problem, tile, stages, finish=setting.finish, **more)


def _persistent(
    problem: Matmul,
    tile: RoleTile,
    stages: int,
    setting: Setting,
    blocks: int | None = None,
    stream_k: bool = True,
) -> tirx.PrimFunc:
    """Its overlapped form: it waits for what is before it in the stream before it touches memory."""
    blocks = blocks or cluster_blocks(problem, tile, setting.straddles)
    sharing = {"machine": setting.machine, "blocks": blocks, "stream_k": stream_k}
    more = {"finish": setting.finish, "columns": setting.columns}
    return persistent(problem, tile, stages, **sharing, overlapped=True, **more)


def _exchanged(problem: Matmul, tile: SwappedTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    at_once = fits_beside(problem, tile, stages, setting.machine)
    more = {"finish": setting.finish, "columns": setting.columns}
    return swapped(problem, tile, stages, overlapped=True, next_at_once=at_once, **more)


def _upright(problem: Matmul, tile: RoleTile, stages: int, setting: Setting) -> tirx.PrimFunc:
    more = {"finish": setting.finish, "columns": setting.columns}
    return warp_specialized(problem, tile, stages, overlapped=True, **more)


def _kept_on(blocks: int, cuts: bool) -> StepKernel:
    """Make the form of step 13 that has clusters of so many blocks, and cuts or leaves the last wave.

    Blocks on their own take any width, so that a product's columns can be divided evenly.
    """
    build = functools.partial(_persistent, blocks=blocks, stream_k=cuts)
    menu = ROLE_MENU if blocks > 1 else (*ROLE_MENU, *WIDTHS, *PAIRS, *AT_ONCE)
    return StepKernel(13, menu, build, early=True, stays=True, cuts=cuts, blocks=blocks, narrowing=True)


# What the call's tiles are beside those that the steps choose among: found on shapes off the squares.
_MORE_ROLES = (
    ("128x192x64/2x1", 4),
    ("192x128x64/3x1", 4),
    ("256x128x64/2x1", 4),
    ("64x256x64/1x1", 5),
    ("64x192x64/1x1", 6),
    ("64x128x128/1x1", 4),
    ("128x64x64/2x1", 8),
    ("64x64x128/1x1", 6),
)
ROLE_MENU = (*ROLE_CHOICES, *(tiles.Choice(RoleTile.parse(tile), stages) for tile, stages in _MORE_ROLES))
WIDTHS = tuple(each for each in role_choices(by=8) if each.tile not in [one.tile for one in ROLE_MENU])
LARGE = 128 * 128  # results of a tile that is worth sharing in pairs: smaller ones are step 12's


def _in_pairs(alone: Iterable[tiles.Choice]) -> tuple[tiles.Choice, ...]:
    """Let blocks of tiles share loads in pairs: those below each other, then those beside each other."""
    named = [(each.tile, each.stages) for each in alone]
    return tuple(
        tiles.Choice(ClusterTile(tile.block, tile.warpgroups, cluster), stages)
        for cluster in ((2, 1), (1, 2))
        for tile, stages in named
    )


PAIRS = _in_pairs(each for each in role_choices(by=8) if each.tile.block_m * each.tile.block_n >= LARGE)
AT_ONCE = _in_pairs(at_once_choices())
RING_MENU = (*RING_CHOICES, tiles.Choice(HopperTile.parse("128x192x64/2x1"), 5))


class Lain(NamedTuple):
    """A product whose operands a kernel may read as they lie, or some of them: which kernel, its reduction says.

    ``more_us`` is what kernels that TMA loads for take beside their estimates: copies, and results stored row by row.
    ``unreadable`` are the operands whose rows TMA cannot step over, as :attr:`.operands.Operands.unreadable`.
    """

    problem: Matmul
    more_us: float
    unreadable: str = ""


KERNELS = {  # as each step is, which a tuned line names
    kernel.step: kernel
    for kernel in (
        StepKernel(13, ROLE_CHOICES, _persistent, early=True, stays=True, cuts=True, blocks=None, narrowing=True),
        StepKernel(12, ROLE_CHOICES, _roles, flexible=True, narrowing=True),
        StepKernel(11, RING_CHOICES, _ring),
    )
}
MENU = (
    replace(KERNELS[12], tiles=ROLE_MENU),
    *(_kept_on(blocks, cuts) for blocks in (1, 2) for cuts in (False, True)),
    replace(KERNELS[11], tiles=RING_MENU),
)
# Their tiles follow from the product: torch_ops/one_tile.py.
EXCHANGED = StepKernel(12, (), _exchanged, early=True, narrowing=True)
UPRIGHT = StepKernel(12, (), _upright, early=True, narrowing=True)


@dataclass(frozen=True)
class Choice:
    """A step's kernel with a tile and stages."""

    PIPELINE: ClassVar[str] = TIR_PIPELINE

    kernel: StepKernel
    tile: HopperTile
    stages: int

    def __str__(self) -> str:
        kernel = self.kernel
        said = [f"step {kernel.step}", str(self.tile), f"{self.stages} stages"]
        said += ["launched early"] if kernel.early else []
        if kernel.stays and kernel.blocks is not None:
            said.append("last wave cut" if kernel.cuts else "whole tiles")
            said += [f"clusters of {kernel.blocks}"] if kernel.blocks > 1 else []
        return ", ".join(said)

    def build(self, problem: Matmul, setting: Setting) -> tirx.PrimFunc:
        """Make the kernel for a problem."""
        return self.kernel.build(problem, self.tile, self.stages, setting)

    def takes(self, problem: Matmul, machine: Machine) -> bool:
        """Tell whether this is another kernel for the product than one of whole tiles."""
        return self.kernel.takes(problem, self.tile, machine)


AnyChoice = Choice | Streamed | Unaligned | Shifting  # what multiplies


def choices(menu: Iterable[StepKernel] = MENU) -> Iterator[Choice]:
    """Yield every kernel with each of its tiles."""
    for kernel in menu:
        yield from (Choice(kernel, each.tile, each.stages) for each in kernel.tiles)


def of_one_tile(tile: RoleTile, stages: int) -> Choice:
    """Choose step 12's kernel of one tile a block: with its operands exchanged, or upright."""
    return Choice(EXCHANGED if tile.swapped else UPRIGHT, tile, stages)


def choose(
    problem: Matmul,
    machine: Machine,
    batch: int = 1,
    any_rows: bool = False,
    dense: bool = False,
    narrows: bool = False,
    rows: tuple[int, int] | None = None,
    lain: Lain | None = None,
    gaps: bool = False,
    exact: bool = True,
) -> AnyChoice:
    """Return what was measured to be fastest on this GPU; or else the choice that should take the least time.

    What the user measured (:mod:`.tuned_here`) goes before what we did; what should take the least time is kept for
    later processes (:mod:`.kept_choices`).
    ``batch`` and ``any_rows`` are those of :class:`Setting`; nothing of theirs was measured. Where operands are
    ``dense``, without gaps between rows, few rows may be taken by a kernel that streams the other operand; where it
    ``narrows``, results are stored to rows that TMA cannot step over, as not every kernel does. ``rows``: the elements
    that rows of A and B begin apart where the kernel reads them; without gaps if None. ``lain``: what a kernel may
    read as it lies instead, without copies. Where the output has ``gaps`` between its rows, no reduction is in parts,
    whose results TMA does not store: they would be copied. ``exact``: operands have the problem's sizes; else no rows
    are read whole. Raises IllegalTile where the GPU can hold no choice, with what is wrong with the first.
    """
    measured = tuned(machine.name).get((problem.m, problem.n, problem.k, problem.dtype, problem.layout))
    flexible = batch > 1 or any_rows
    if not flexible and problem.out_dtype == problem.dtype:
        from tensorir_ladder.torch_ops.tuned_here import tuned_here  # which needs the choices

        measured = tuned_here(problem, machine.name, machine.multiprocessors) or measured
    if measured and not flexible:
        return measured
    from tensorir_ladder.torch_ops.kept_choices import find_choice, keep_choice  # which needs the kernels

    gpu = str(machine.target), machine.name, machine.multiprocessors
    asked = problem, *gpu, batch, any_rows, dense, narrows, rows, lain, gaps, exact
    found = find_choice(*asked)
    if found is None:
        found = _cheapest(problem, machine, batch, any_rows, dense, narrows, rows, lain, gaps, exact)
        keep_choice(found, *asked)
    return found


def _cheapest(
    problem: Matmul,
    machine: Machine,
    batch: int,
    any_rows: bool,
    dense: bool,
    narrows: bool,
    rows: tuple[int, int] | None,
    lain: Lain | None,
    gaps: bool,
    exact: bool,
) -> AnyChoice:
    """Return the choice that should take the least time; see :func:`choose`."""
    flexible = batch > 1 or any_rows
    estimates = _estimates(str(machine.target), machine.name, machine.multiprocessors, flexible)
    streamed = dense and batch == 1 and streams(problem)
    times = estimates.times(problem, batch, streamed, one_tile=not flexible, rows=rows)
    if gaps:
        times.tiles[all_tiles().split] = math.inf
    if not exact:
        times.tiles[all_tiles().in_rows] = math.inf
    chosen = next(place for place in times.menu.argsort() if _able(estimates.kernels[place], problem, machine, narrows))
    least = int(times.tiles.argmin())
    if lain:
        found, us = _as_it_lies(lain, machine.multiprocessors)
        if us < min(times.tiles[least], times.menu[chosen]) + lain.more_us:
            return found
    if times.tiles[least] < times.menu[chosen]:
        return of_one_tile(all_tiles().tile(least, problem.n), one_tile_stages(problem, least, machine.multiprocessors))
    return estimates.kernels[chosen]


def _as_it_lies(lain: Lain, multiprocessors: int) -> tuple[Unaligned | Shifting, float]:
    """Return the choice that reads operands as they lie, and its microseconds: by the reduction's length."""
    if lain.problem.k > MOST_STEPS:
        shifting, us = fastest_shifting(lain.problem, lain.unreadable, multiprocessors)
        return shifting, us * UNSURE
    tile, us = fastest_tile(lain.problem, multiprocessors)
    return Unaligned(tile), us


def _able(choice: Choice | Streamed, problem: Matmul, machine: Machine, narrows: bool) -> bool:
    """Tell whether a choice is another than one of whole tiles, and stores what narrows."""
    stores = not narrows or isinstance(choice, Streamed) or choice.kernel.narrowing
    return stores and choice.takes(problem, machine)


@functools.cache
def _estimates(target_text: str, gpu: str, multiprocessors: int, flexible: bool) -> Estimates:
    """Prepare what a target can hold, whatever the product is; see :func:`choose`.

    The target is given as its text, which is the same for two of the same GPU, unlike the objects.
    """
    target = Target(json.loads(target_text))
    able = list(choices([KERNELS[12]] if flexible else MENU))
    violations = [each.tile.violations(target, ITEMSIZE, each.stages) for each in able]
    legal = [each for each, found in zip(able, violations) if not found]
    if not legal:
        raise IllegalTile(
            "no kernel fits this target: " + "; ".join(violations[0]),
            remedy="run on an sm_90a GPU",
        )
    return estimates_on(gpu, legal, multiprocessors)


def of_any_rows(problem: Matmul, tile: HopperTile) -> Matmul:
    """Return the product of the same n and k with the most rows, in whole tiles, that a kernel for any number takes.

    Raises IllegalWorkload where ``problem`` has more.
    """
    most = (MAX_ELEMENTS - 1) // max(problem.n, problem.k) // tile.block_m * tile.block_m
    if problem.m > most:
        raise IllegalWorkload(
            "more rows than a kernel for any number takes", value=problem.m, limit=most, remedy="do without any_m"
        )
    return replace(problem, m=most)


class Tuned(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a GPU's file: a product, and what was fastest."""

    m: Extent
    n: Extent
    k: Extent
    dtype: str
    layout: str
    step: int
    tile: str
    stages: Extent

    def __post_init__(self) -> None:
        if self.step not in KERNELS:
            raise ValueError(f"no kernel of step {self.step}")
        if isinstance(self.choice.tile, RoleTile) and self.choice.tile.swapped:
            raise ValueError(f"step {self.step} takes no tile of exchanged operands by such a line, as {self.tile} is")

    @property
    def choice(self) -> Choice:
        """The kernel, tile and stages."""
        kernel = KERNELS[self.step]
        return Choice(kernel, type(kernel.tiles[0].tile).parse(self.tile), self.stages)


@functools.cache
def tuned(gpu: str) -> dict[tuple[int, int, int, str, str], Choice]:
    """Read what was measured to be faster on a GPU than what costs least, by m, n, k, dtype and layout."""
    wanted = gpu.lower().replace(" ", "-")
    lines = [line for path in TUNED.glob("*.json") if path.stem == wanted for line in read(path, list[Tuned])]
    return {(line.m, line.n, line.k, line.dtype, line.layout): line.choice for line in lines}
