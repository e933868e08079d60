"""Stream-K: share all tiles' k tiles out among as many workers as the GPU holds at once.

Tiles that are no multiple of the workers leave a last wave in which some have nothing to do. There, the first k tiles
of each tile are taken over by these *helpers*, evenly; each tile's *owner* multiplies the rest and adds the helpers'
sums. Helpers begin with that, owners end with it, so that nobody waits long. Source of the idea: Osama et al.,
"Stream-K: Work-centric parallel decomposition for dense matrix-matrix multiplication" (PPoPP 2023); here only the last
wave is cut, at the same k for all its tiles, so that blocks that run together read the same parts of the operands.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.isa import PANEL, WGMMA_ROWS
from tensorir_ladder.schedules.tiles import Choice
from tensorir_ladder.schedules.workloads import Matmul

MULTIPLY_ADDS = 2048  # of 16-bit elements, per cycle of a multiprocessor: wgmma's rate
LOAD_BYTES = 60  # per cycle of a multiprocessor while all load; measured with tiles of 128 × 128 on an H200
HAND_OVER_BYTES = 22  # a helper's sums to device memory, measured: 128 KB in some 6000 cycles
HAND_OVER_CYCLES = 2000  # until a flag raised by one block has let another read what it left
ADD_BYTES = 64  # an owner's reading of them
STORED_RESULTS = 16  # per cycle of a multiprocessor, measured: 128 × 256 in some 2000 cycles
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

    def begin(self, helper: int | Expr) -> int | Expr:
        """Return where a helper's k tiles begin in the row of all last tiles' first ``cut``; takes expressions too.

        Near a tile's edge it is moved there.
        """
        even = helper * (self.owned * self.cut) // max(self.helpers, 1)
        left = even % max(self.cut, 1)
        moved = _choose(self.cut - left < self.shortest, even - left + self.cut, even)
        return _choose(left < self.shortest, even - left, moved)

    def first_helper(self, tile: int | Expr) -> int | Expr:
        """Find the first helper that multiplies for a tile, counted from the last wave's first."""
        guess = tile * self.helpers // max(self.owned, 1)
        after = _choose(self.begin(guess + 1) > tile * self.cut, guess, guess + 1)
        return _choose(self.begin(guess) > tile * self.cut, guess - 1, after)

    @staticmethod
    def piece(helper: int | Expr, tile: int | Expr) -> int | Expr:
        """Number a helper's piece of a tile, as no other piece: both grow along the row of k tiles."""
        return helper + tile


def _choose(condition: bool | Expr, yes: int | Expr, no: int | Expr) -> int | Expr:
    if isinstance(condition, bool):
        return yes if condition else no
    return tirx.Select(condition, yes, no)


def plan_stream_k(
    tiles: int, k_tiles: int, block: tuple[int, int, int], workers: int, shortest: int, cuts: bool = True
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
    if parts > 1:
        cuttings = [k_tiles // parts * (parts - 1)]
        helpers = owned * (parts - 1)
    else:
        cuttings, helpers = range(shortest, k_tiles - shortest + 1), min(workers - owned, owned)
    candidates = [StreamKPlan(tiles, k_tiles, workers, shortest, helpers, cut) for cut in cuttings]
    best = min(candidates, key=lambda candidate: cycles(candidate, block))
    return best if cycles(best, block) < WORTHWHILE * cycles(plan, block) else plan


def plan_for(
    problem: Matmul, tile: RoleTile, multiprocessors: int, blocks: int = 1, cuts: bool = True, batch: int = 1
) -> StreamKPlan:
    """Plan a ``batch`` of products with a tile; workers are clusters of ``blocks`` along rows.

    Results of a piece leave beside the first k tiles of the next, a box each: no piece has fewer.
    """
    tiles = -(-problem.m // (tile.block_m * blocks)) * -(-problem.n // tile.block_n) * batch
    k_tiles = -(-problem.k // tile.block_k)
    boxes = max(1, tile.group_m * tile.group_n // (WGMMA_ROWS * PANEL))
    return plan_stream_k(tiles, k_tiles, tile.block, multiprocessors // blocks, min(boxes, k_tiles), cuts)


def reckoned_cycles(problem: Matmul, tile: RoleTile, multiprocessors: int, cuts: bool, batch: int = 1) -> float:
    """What a batch of products takes with a tile, for choosing among tiles: the plan, and the last results' way out."""
    plan = plan_for(problem, tile, multiprocessors, cuts=cuts, batch=batch)
    return cycles(plan, tile.block) + tile.block_m * tile.block_n / STORED_RESULTS


def role_cost(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> float:
    """Return what a product costs by warpgroups with roles, for choosing among tiles, in cycles."""
    return reckoned_cycles(problem, choice.tile, machine.multiprocessors, cuts=False)


def cut_role_cost(choice: Choice, problem: Matmul, machine: Machine, parts: int = 1) -> float:
    """Return the same where the last wave may be cut."""
    return reckoned_cycles(problem, choice.tile, machine.multiprocessors, cuts=True)


def cycles(plan: StreamKPlan, block: tuple[int, int, int]) -> float:
    """Reckon the cycles of a plan with blocks of (m, n, k), without what all plans have in common.

    A k tile takes what multiplying it or loading it takes, whichever is longer. Owners that have had no whole tile
    before end together with their helpers, and then wait for the sums.
    """
    m, n, k = block
    k_tile = max(m * n * k / MULTIPLY_ADDS, (m + n) * k * 2 / LOAD_BYTES)
    waves = plan.waves * plan.k_tiles * k_tile
    if not plan.helpers:
        return waves + (plan.k_tiles * k_tile if plan.owned else 0)
    sums = m * n * 4
    heard = -(-plan.helpers // plan.owned)
    given = -(-plan.owned // plan.helpers)
    helper = plan.owned * plan.cut / plan.helpers * k_tile + given * sums / HAND_OVER_BYTES
    owner = (plan.k_tiles - plan.cut) * k_tile
    adding = heard * sums / ADD_BYTES + (0 if plan.waves else HAND_OVER_CYCLES)
    return waves + (max(helper, owner + adding) if plan.waves else max(helper, owner) + adding)


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

    @T.inline
    def _help(self):
        self.tile = self.plan.first_owned + (self.end - 1) // max(self.plan.cut, 1)
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
