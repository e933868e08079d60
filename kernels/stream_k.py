"""Stream-K: share all tiles' k tiles out among as many workers as the GPU holds at once.

Tiles that are no multiple of the workers leave a last wave in which some have nothing to do. There, the first k tiles
of each tile are taken over by these *helpers*, evenly; each tile's *owner* multiplies the rest and adds the helpers'
sums. Helpers begin with that, owners end with it, so that nobody waits long. Source of the idea: Osama et al.,
"Stream-K: Work-centric parallel decomposition for dense matrix-matrix multiplication" (PPoPP 2023); here only the last
wave is cut, at the same k for all its tiles, so that blocks that run together read the same parts of the operands.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.schedules.cost import CostRates, Machine, stream_k_cycles
from tensorir_ladder.schedules.isa import PANEL, WGMMA_ROWS
from tensorir_ladder.schedules.tiles import Choice
from tensorir_ladder.schedules.workloads import Matmul

PLANNED_ROWS = 2048  # rows beyond which a kernel for any number of them cuts nothing: TVM is slow with long tables
WORTHWHILE = 0.98  # of the time without: what cutting must save at least


@dataclass(frozen=True)
class StreamKPlan:
    """Tiles and k tiles, the workers, and how the last wave is cut.

    ``helpers`` workers, the first, multiply the first ``cut`` k tiles of the last wave's ``owned`` tiles; the workers
    behind them own one of these each. 0 helpers: the last wave is left as it is. No piece has fewer than ``shortest``
    k tiles, except where all reductions are as short.
    """

    tiles: int
    k_tiles: int
    workers: int
    shortest: int
    helpers: int = 0
    cut: int = 0

    @property
    def waves(self) -> int:
        """Whole waves, in which each worker has a tile."""
        return self.tiles // self.workers

    @property
    def owned(self) -> int:
        """Tiles of the last wave."""
        return self.tiles % self.workers

    @property
    def first_owned(self) -> int:
        """The first tile of the last wave."""
        return self.waves * self.workers

    @property
    def pieces(self) -> int:
        """Room for the helpers' pieces, by :meth:`piece`."""
        return self.helpers + self.owned if self.helpers else 0

    @property
    def cuts(self) -> bool:
        """Tell whether the last wave is cut, or may be."""
        return not isinstance(self.helpers, int) or self.helpers > 0

    def begin(self, helper: int | Expr) -> int | Expr:
        """Return where a helper's k tiles begin in the row of all last tiles' first ``cut``; takes expressions too.

        Near a tile's edge it is moved there.
        """
        even = helper * (self.owned * self.cut) // _at_least_one(self.helpers)
        left = even % _at_least_one(self.cut)
        moved = _choose(self.cut - left < self.shortest, even - left + self.cut, even)
        return _choose(left < self.shortest, even - left, moved)

    def first_helper(self, tile: int | Expr) -> int | Expr:
        """Find the first helper that multiplies for a tile, counted from the last wave's first."""
        guess = tile * self.helpers // _at_least_one(self.owned)
        after = _choose(self.begin(guess + 1) > tile * self.cut, guess, guess + 1)
        return _choose(self.begin(guess) > tile * self.cut, guess - 1, after)

    @staticmethod
    def piece(helper: int | Expr, tile: int | Expr) -> int | Expr:
        """Number a helper's piece of a tile, as no other piece: both grow along the row of k tiles."""
        return helper + tile


def _at_least_one(number: int | Expr) -> int | Expr:
    return max(number, 1) if isinstance(number, int) else tirx.max(number, 1)


def _choose(condition: bool | Expr, yes: int | Expr, no: int | Expr) -> int | Expr:
    if isinstance(condition, bool):
        return yes if condition else no
    return tirx.Select(condition, yes, no)


def plan_stream_k(
    tiles: int,
    k_tiles: int,
    block: tuple[int, int, int],
    workers: int,
    shortest: int,
    rates: CostRates,
    cuts: bool = True,
) -> StreamKPlan:
    """Share ``tiles`` of ``k_tiles`` each, of blocks (m, n, k), out among ``workers``; cut them where that is cheaper.

    ::

        2048 tiles of 128 k tiles, 132 workers    15 waves; the last has 68 tiles, cut after 62 k tiles for 64 helpers
        64 tiles of 224 k tiles, 132 workers      no whole wave; 64 owners and 64 helpers, 112 k tiles each

    With ``cuts`` off, nothing is cut. Needs four times ``shortest`` k tiles.
    """
    plan = StreamKPlan(tiles, k_tiles, min(workers, tiles), shortest)
    owned = tiles % workers
    if not cuts or not owned or k_tiles < 4 * shortest or workers == owned:
        return plan
    parts = max(1, min(workers // owned, k_tiles // (2 * shortest)))
    helpers = owned * (parts - 1) if parts > 1 else min(workers - owned, owned)

    def cut_at(cut: int) -> StreamKPlan:
        return StreamKPlan(tiles, k_tiles, workers, shortest, helpers, cut)

    def cycles(cut: int) -> float:
        return stream_k_cycles(cut_at(cut), block, rates)

    if parts > 1:
        cut = k_tiles // parts * (parts - 1)
    else:  # the farther the cut, the longer helpers take and the shorter owners: cycles fall, then rise
        before_last = range(shortest, k_tiles - shortest)
        cut = shortest + bisect_left(before_last, True, key=lambda cut: cycles(cut + 1) >= cycles(cut))
    return cut_at(cut) if cycles(cut) < WORTHWHILE * stream_k_cycles(plan, block, rates) else plan


def plan_for(
    problem: Matmul, tile: RoleTile, machine: Machine, blocks: int = 1, cuts: bool = True, batch: int = 1
) -> StreamKPlan:
    """Plan a batch of a product with a tile; workers are clusters of ``blocks`` along rows, or those of the tile.

    Results of a piece leave beside the first k tiles of the next, a box each: no piece has fewer.
    """
    down, across = tile.cluster[0] * blocks, tile.cluster[1]
    tiles = batch * -(-problem.m // (tile.block_m * down)) * -(-problem.n // (tile.block_n * across))
    k_tiles = -(-problem.k // tile.block_k)
    boxes = max(1, tile.group_m // WGMMA_ROWS * -(-tile.group_n // PANEL))
    workers, shortest = machine.multiprocessors // (down * across), min(boxes, k_tiles)
    return plan_stream_k(tiles, k_tiles, tile.block, workers, shortest, machine.rates, cuts)


@functools.lru_cache(256)
def plans_by_rows(problem: Matmul, tile: RoleTile, machine: Machine) -> tuple[StreamKPlan, ...]:
    """Plan products of 1, 2, ... rows of tiles with the columns and steps of ``problem``, to :data:`PLANNED_ROWS`."""
    counts = range(1, PLANNED_ROWS // tile.block_m + 1)
    return tuple(plan_for(replace(problem, m=count * tile.block_m), tile, machine) for count in counts)


def most_pieces(problem: Matmul, tile: RoleTile, machine: Machine) -> int:
    """Return the room for pieces that a kernel for any number of rows needs."""
    return max(plan.pieces for plan in plans_by_rows(problem, tile, machine))


def known_at_run_time(plan: StreamKPlan, workers: int, tiles: Expr, helpers: Expr, cut: Expr) -> StreamKPlan:
    """Return a plan whose numbers a kernel is told; emits their binding."""
    return replace(plan, tiles=T.Bind(tiles), workers=workers, helpers=helpers, cut=cut)


def plan_cost(plan: StreamKPlan, tile: RoleTile, rates: CostRates) -> float:
    """Return the cycles of a plan, and of the last results' way out, for choosing among tiles."""
    return stream_k_cycles(plan, tile.block, rates) + tile.block_m * tile.block_n / rates.stored_results_per_cycle


def role_cost(choice: Choice, problem: Matmul, machine: Machine) -> float:
    """Return what a product costs by warpgroups with roles, a tile to a block; a TileSet's ``cost``."""
    return plan_cost(plan_for(problem, choice.tile, machine, cuts=False), choice.tile, machine.rates)


def cut_role_cost(choice: Choice, problem: Matmul, machine: Machine) -> float:
    """Return what a product costs by persistent blocks, whose last wave may be cut; a TileSet's ``cost``."""
    return plan_cost(plan_for(problem, choice.tile, machine), choice.tile, machine.rates)


@T.meta_class
class TileRows:
    """Keep the count of rows of tiles in a register: TVM's arithmetic on a number it does not know leaves 32 bits."""

    def __init__(self, rows: Expr, height: int) -> None:
        self.count = T.local_scalar("int32")
        self._begin(rows, height)

    @T.inline
    def _begin(self, rows, height):
        self.count = (rows + (height - 1)) // height


@T.meta_class
class Pieces:
    """One worker's pieces, one after the other: which tile, its first k tile, and how many; none left: ``tile`` is
    the number of tiles.
    """

    def __init__(self, plan: StreamKPlan, worker: Expr) -> None:
        self.plan, self.worker = plan, worker
        self.tile = T.local_scalar("int32")
        self.first = T.local_scalar("int32")
        self.count = T.local_scalar("int32")
        self.whole = T.local_scalar("int32")
        self.begin = T.local_scalar("int32")
        self.end = T.local_scalar("int32")
        self.helper = T.local_scalar("int32")
        self._begin()

    @T.inline
    def _begin(self):
        self.tile = 0
        self.first = 0
        self.count = self.plan.k_tiles
        self.whole = self.worker
        self.begin = 0
        self.end = 0
        self.helper = 0
        if self.plan.helpers > 0:
            if self.worker < self.plan.helpers:
                self.begin = self.plan.begin(self.worker)
                self.end = self.plan.begin(self.worker + 1)
        self.advance()

    @T.inline
    def advance(self):
        """Emit the step to the next piece: a helper's, from the last one on; then whole tiles; then the owned one."""
        if self.end > self.begin:
            self._help()
        else:
            self.tile = self.whole
            self.first = 0
            self.count = self.plan.k_tiles
            if self.plan.helpers > 0:
                if self.whole >= self.plan.first_owned:
                    self._own()
            self.whole = self.whole + self.plan.workers

    @T.inline
    def each_helper(self, act):
        """Emit, for the owner of a tile, ``act(piece)`` for one after the other of those that helpers leave it."""
        if self.plan.helpers > 0:
            if self.first == self.plan.cut:
                self.helper = self.plan.first_helper(self.tile - self.plan.first_owned)
                while self.plan.begin(self.helper) < (self.tile - self.plan.first_owned + 1) * self.plan.cut:
                    act(self.plan.piece(self.helper, self.tile - self.plan.first_owned))
                    self.helper = self.helper + 1

    @T.inline
    def if_helping(self, act):
        """Emit, for who has a part of another's tile, ``act(piece)``."""
        if self.plan.helpers > 0:
            if self.tile >= self.plan.first_owned:
                if self.first != self.plan.cut:
                    act(self.plan.piece(self.worker, self.tile - self.plan.first_owned))

    def finishes(self) -> Expr | bool:
        """Tell whether who has this piece also finishes its tile: a helper does not."""
        if not self.plan.cuts:
            return True
        return T.Or(self.tile < self.plan.first_owned, self.first == self.plan.cut)

    @T.inline
    def _help(self):
        self.tile = self.plan.first_owned + (self.end - 1) // _at_least_one(self.plan.cut)
        self.first = T.max(self.begin - (self.tile - self.plan.first_owned) * self.plan.cut, 0)
        self.count = self.end - (self.tile - self.plan.first_owned) * self.plan.cut - self.first
        self.end = self.end - self.count

    @T.inline
    def _own(self):
        if self.worker < self.plan.helpers:
            self.tile = self.plan.tiles
        else:
            self.tile = T.min(self.whole - self.plan.helpers, self.plan.tiles)
            self.first = self.plan.cut
            self.count = self.plan.k_tiles - self.plan.cut
