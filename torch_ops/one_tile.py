"""What a product takes by step 12's kernels of one tile a block, for every tile of them.

With operands exchanged (:mod:`kernels.swapped`), also of whole rows of B (:mod:`kernels.whole_rows`), or upright
(:mod:`kernels.warp_specialized`); by blocks on their own, or in clusters that share loads, the reduction, or both.
Tiles are many, and which is best follows from the product: so that choosing stays short, all are priced at once, as
arrays. Constants are a GPU's (``costs/``), fitted to times; :mod:`.kernel_cost` prices the other kernels.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from typing import Annotated, Any

import msgspec
import numpy as np

from tensorir_ladder.kernels.roles import FEWEST_STAGES, MOST_SHARED_STAGES, MOST_STAGES
from tensorir_ladder.kernels.tiles import (
    MOST_PARTS,
    ClusterTile,
    RoleTile,
    RowsTile,
    SwappedTile,
    most_stages,
    stages_of_one_tile,
    swapped_room,
)
from tensorir_ladder.schedules.isa import PANEL, WGMMA_ROWS
from tensorir_ladder.schedules.workloads import Matmul

EIGHT, MOST_ROWS = 8, 256  # an instruction's widths come by the eight
SIDES, DEPTHS = (
    ((64, 1), (128, 2), (192, 3), (256, 2)),
    (64, 128, 256),
)  # of an instruction's rows, with warpgroups; of k
DEEP_ROWS = 72  # of a tile whose k tiles may be deeper than a panel
MOST_SHARED_DEPTH = 128  # of k tiles that blocks of a cluster share
SHORTEST_PART = 256  # of the reduction
CLUSTERS = ((1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2))  # blocks that share loads: down, across
OF_PARTS = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1))  # and where the reduction has parts: so many blocks of each
MOST_SHARED_PARTS = 4
MOST_RESULTS = 40e6  # of a product that is worth a look: others have more tiles than a few waves
# Clusters lie within groups of multiprocessors. Of 132, this is what clusters of 3 to 8 blocks found room in at once.
GROUP, GROUP_OF, SHORT_GROUP = 16, 18, 8
ITEMSIZE = 2
AT_EDGES = 0.3  # what rows beyond a matrix count for where only some tiles have them
SECTOR = 16  # elements of a cache line's quarter, which memory is read by
# And the tile: how files name kernels. Stages follow from the product, as of whole rows do the columns.
EXCHANGED, UPRIGHT, IN_ROWS = "exchanged", "upright", "rows"
SIZES, SHARED = r"(?P<m>\d{1,3})x(?P<n>\d{1,3})x(?P<k>\d{1,3})", r"(?P<down>\d)x(?P<across>\d)"
_ONCE = r"(?:, (?P<stages>\d) stages)?"  # that its ring had when it was timed, where it has others now
_EXCHANGED = rf"{SIZES}/1x(?P<groups>\d)/(?P<parts>\d)(?:/(?!1x1){SHARED})?"
NAMES = (
    re.compile(rf"{EXCHANGED} {_EXCHANGED}"),
    re.compile(rf"{UPRIGHT} {SIZES}/(?P<groups>\d)x1/{SHARED}(?:/(?P<parts>[2-9]))?{_ONCE}"),
    re.compile(rf"{IN_ROWS} {_EXCHANGED}"),
)
KINDS = (EXCHANGED, UPRIGHT, IN_ROWS)

Positive = Annotated[float, msgspec.Meta(gt=0)]


class OneTileRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of :func:`one_tile_microseconds`, as those of :class:`.kernel_cost.KernelRates`.

    ``sharing`` more for clusters that share loads, and ``arriving_bytes`` of a multiprocessor, which they do not spare;
    ``zeros``, bytes of rows beyond a matrix; ``turn`` of a k tile through its stage; ``straddling`` and ``lines`` are
    those of :func:`across_lines`; ``join`` where the reduction has parts, ``part`` more for each 64 × 64 sums that a
    block reads of the others; ``refill`` of each further round of blocks; ``idle``, the power of the share of busy
    multiprocessors by which memory is slower, ``uneven``, that of the blocks they have beside the most that one has;
    ``results`` that a multiprocessor stores.
    """

    launch: Positive
    sharing: Positive
    join: Positive
    part: Positive
    multiply_adds: Positive
    unhidden: Positive
    load_bytes: Positive
    all_load_bytes: Positive
    arriving_bytes: Positive
    zeros: Positive
    turn: Positive
    straddling: Positive
    lines: Positive
    latency: Positive
    refill: Positive
    results: Positive
    memory_bytes: Positive
    memory_unhidden: Positive
    idle: Positive
    uneven: Positive


class _Tiles:
    """Every tile that is offered, an element each, with its stages and the blocks that a multiprocessor holds.

    Stages and blocks in two rows: where each multiprocessor has one block, and where it has several; of tiles that are
    ``upright``, which have it to themselves, of a B stored [k, n] and [n, k]. An instruction has 64 rows and some
    ``width``: of tiles of exchanged operands these are the output's columns and rows, of upright ones its rows and
    columns. Those ``in_rows`` have all columns, of which there are no more than these, and more than the next smaller
    ones have.
    """

    def __init__(self) -> None:
        of_kinds = _exchanged_sizes(), _upright_sizes(), _rows_sizes()
        sizes = np.concatenate(of_kinds, axis=1)
        self.width, side, self.groups, self.depth, self.parts, self.down, self.across = sizes[:7]
        self.stages, self.held = sizes[7:9], sizes[9:11]
        self.kind = np.repeat(np.arange(len(KINDS)), [each.shape[1] for each in of_kinds])
        self.upright, self.in_rows = (self.kind == KINDS.index(kind) for kind in (UPRIGHT, IN_ROWS))
        self.side = side
        self.rows, self.columns = np.where(self.upright, (side, self.width), (self.width, side))
        self.shared = self.down * self.across > 1
        self.cluster = self.parts * self.down * self.across
        # An instruction reads its 64 rows of shared memory whatever its width: narrow ones are slower than their work.
        self.work = side * self.depth * np.maximum(self.width, (self.width + WGMMA_ROWS) / 2)
        self.shortest = self.depth * self.parts * np.maximum(2, SHORTEST_PART // self.depth)
        self.split = self.parts > 1

    @functools.cached_property
    def _places(self) -> dict[tuple[int, ...], int]:
        sizes = self.kind, self.rows, self.columns, self.depth, self.parts, self.down, self.across
        return {key: place for place, key in enumerate(zip(*(each.tolist() for each in sizes)))}

    def place(self, name: str) -> int | None:
        """Find a tile by what :func:`named` says of it: None for other kernels, and tiles that are not offered.

        Raises ValueError for a name without a tile. A file has hundreds: their tiles are not made for it.
        """
        if not name.startswith(KINDS):
            return None
        for kind, form in enumerate(NAMES):
            if match := form.fullmatch(name):
                sizes = {"parts": 1} | {field: int(value or 1) for field, value in match.groupdict().items()}
                if (sizes["m" if KINDS[kind] == UPRIGHT else "n"], sizes["groups"]) not in SIDES:
                    return None
                key = (sizes[field] for field in ("m", "n", "k", "parts", "down", "across"))
                return self._places.get((kind, *key))
        raise ValueError(f"{name!r} names no tile")

    def at(self, places: np.ndarray, once: np.ndarray | int = 0) -> _Tiles:
        """Return the tiles of some places, in their order, to be priced; with ``once`` so many stages where not 0."""
        made = copy.copy(self)
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                setattr(made, name, values[..., places])
        made.stages = np.where(np.asarray(once) > 0, once, made.stages)
        return made

    def ring(self, on_each: Any, nt: Any) -> np.ndarray:
        """Return the stages of each where a multiprocessor has so many blocks, and B is stored [n, k] or [k, n]."""
        return np.where(np.where(self.upright, nt, on_each > 1), self.stages[1], self.stages[0])

    def tile(self, place: int, n: int = 0) -> SwappedTile | ClusterTile:
        """Make the tile of a place: one of whole rows for a product of ``n`` columns, or of the most that it takes."""
        sizes = (self.rows, self.columns, self.depth, self.groups, self.parts, self.down, self.across)
        rows, columns, depth, groups, parts, down, across = (int(each[place]) for each in sizes)
        if self.upright[place]:
            return ClusterTile((rows, columns, depth), (groups, 1), (down, across), parts)
        if self.in_rows[place]:
            return RowsTile((rows, n or columns, depth), (1, groups), parts, (down, across))
        return SwappedTile((rows, columns, depth), (1, groups), parts, (down, across))

    def blocks(self, m: Any, n: Any) -> np.ndarray:
        """Count the blocks of a product, those with it that its clusters have beyond its tiles."""
        clusters = -(-m // (self.rows * self.down)) * -(-n // (self.columns * self.across))
        return clusters * self.cluster


def _exchanged_sizes() -> np.ndarray:
    """Return widths, sides, groups, k tiles, parts, clusters (2), stages (2) and held blocks (2) of exchanged tiles."""
    axes = np.arange(EIGHT, MOST_ROWS + 1, EIGHT), np.arange(len(SIDES)), DEPTHS, np.arange(1, MOST_PARTS + 1)
    clusters = np.array((*CLUSTERS, *OF_PARTS))
    kinds = np.meshgrid(*axes, np.arange(len(clusters)), indexing="ij")
    width, number, depth, parts, cluster = (axis.ravel() for axis in kinds)
    both = (parts > 1) & (depth == PANEL) & (parts <= MOST_SHARED_PARTS)
    both &= parts * clusters[cluster].prod(axis=1) <= MOST_PARTS
    sharing = np.where(cluster < len(CLUSTERS), (parts == 1) & (depth <= MOST_SHARED_DEPTH), both)
    offered = (cluster == 0) | sharing
    width, number, depth, parts, cluster = (axis[offered] for axis in (width, number, depth, parts, cluster))
    most = np.where(cluster == 0, MOST_STAGES, MOST_SHARED_STAGES)
    side, groups = np.array(SIDES)[number].T
    stages, held = swapped_room(width, side, depth, groups, parts, most)
    together = stages[1] > FEWEST_STAGES
    stages[1], held[1] = np.where(together, stages[1], stages[0]), np.where(together, held[1], held[0])
    able = (stages[0] > FEWEST_STAGES) & (held[0] > 0) & ((depth == PANEL) | (width <= DEEP_ROWS))
    return np.stack([width, side, groups, depth, parts, *clusters[cluster].T, *stages, *held])[:, able]


def _upright_sizes() -> np.ndarray:
    """Return the same of tiles with operands as they are, one block to a multiprocessor; see _Tiles of their stages."""
    found = []
    shared = [(cluster[::-1], 1) for cluster in CLUSTERS] + [((1, 1), parts) for parts in range(2, MOST_PARTS + 1)]
    shared += [
        (cluster, parts)
        for cluster, parts in itertools.product(OF_PARTS, range(2, MOST_SHARED_PARTS + 1))
        if cluster[0] * cluster[1] * parts <= MOST_PARTS
    ]
    kinds = itertools.product(range(EIGHT, MOST_ROWS + 1, EIGHT), SIDES, DEPTHS, shared)
    for width, (side, groups), depth, (cluster, parts) in kinds:
        both = parts > 1 and cluster != (1, 1)
        if depth > (PANEL if both else MOST_SHARED_DEPTH) or (depth > PANEL and width > DEEP_ROWS):
            continue
        tile = ClusterTile((side, width, depth), (groups, 1), cluster, parts)
        most = MOST_STAGES if tile.shared_by == 1 else MOST_SHARED_STAGES
        stages = [0 if tile.misfits() else stages_of_one_tile(tile, most, nt) for nt in (False, True)]
        if stages[0] > FEWEST_STAGES:
            found.append((width, side, groups, depth, parts, *cluster, *stages, 1, 1))
    return np.array(found).T


def _rows_sizes() -> np.ndarray:
    """Return the same of exchanged tiles of whole rows: stages and blocks of as many columns as there may be.

    Of fewer columns a tile has more stages, or is one of two blocks where it is priced as one with more stages.
    """
    found = []
    shared = [((down, 1), 1) for down in (1, 2, 4)] + [((1, 1), parts) for parts in range(2, MOST_PARTS + 1)]
    for width, (side, groups), (cluster, parts) in itertools.product(range(EIGHT, MOST_ROWS + 1, EIGHT), SIDES, shared):
        tile = RowsTile((width, side, PANEL), (1, groups), parts, cluster)
        if not tile.misfits():
            stages = [_stages_for(tile, on_each) for on_each in (1, 2)]
            if stages[0] > FEWEST_STAGES:
                held = (tile.resident(ITEMSIZE, each) for each in stages)
                found.append((width, side, groups, PANEL, parts, *cluster, *stages, *held))
    return np.array(found).T


def _stages_for(tile: RoleTile, on_each: int) -> int:
    """Return as many stages as a tile has room for where a multiprocessor has one block, or where it has several."""
    most = MOST_STAGES if tile.shared_by == 1 else MOST_SHARED_STAGES
    together = most_stages(tile, most, min(2, on_each))
    return together if together > FEWEST_STAGES else most_stages(tile, most)


all_tiles = functools.cache(_Tiles)


def across_lines(row: Any, width: Any, straddling: float, lines: float) -> Any:
    """Return how many times as long loads take of a matrix whose rows have so many elements, from a tile's column on.

    Tiles begin at multiples of their ``width``, 0 where that is whole lines. 1 where all pieces of 128 bytes are whole
    cache lines, ``lines`` where they lie across two, ``straddling`` where they also begin within sectors of 32 bytes.
    """
    return np.where(
        (row % SECTOR) + (width % SECTOR), straddling, np.where((row % PANEL) + (width % PANEL), lines, 1.0)
    )


def loaded_columns(columns: Any, nt: Any) -> Any:
    """Return how many columns of B a tile's loads count as: whole panels of a B stored [k, n].

    TMA asks for a panel along n row by row, so that one with fewer columns takes as long.
    """
    return np.where(nt, columns, -(-columns // PANEL) * PANEL)


def one_tile_microseconds(
    tiles: _Tiles,
    m: Any,
    n: Any,
    k: Any,
    nt: Any,
    a_row: Any,
    b_row: Any,
    multiprocessors: int,
    rates: OneTileRates,
) -> np.ndarray:
    """Return about how long a product takes by each tile; infinite where it cannot.

    Sizes, ``nt`` (B is stored transposed), and the elements that rows of A and B begin apart may be arrays, an element
    for each tile.

    ::

        k tile   = the longer of multiplying and loading it, of all blocks of a multiprocessor, and a part of the other
        loop     = k tiles · k tile, or what a ring of so many stages can have on its way
        in all   = the longer of the loop and reading both operands once, a part of the other, launch, joining, storing
    """
    r, t = rates, tiles
    a_factor = across_lines(a_row, 0, r.straddling, r.lines)
    # Of a B stored [k, n] tiles behind the first begin at multiples of their width.
    along = t.columns * t.upright * ~np.asarray(nt, bool) * (t.columns < n)
    b_factor = np.where(t.in_rows, 1.0, across_lines(b_row, along, r.straddling, r.lines))
    blocks = t.blocks(m, n)
    on_each, busy = _spread(t, blocks, multiprocessors)
    stages, held = t.ring(on_each, nt), np.where(on_each > 1, t.held[1], t.held[0])
    step = t.depth * ITEMSIZE  # bytes of a row in a k tile
    rounds = -(-on_each // held)
    columns = np.minimum(t.columns, n)
    b_columns = np.where(t.upright, loaded_columns(columns, nt), columns)
    # What blocks of a cluster share arrives in each of them, and is asked for by one of them at a time.
    asked = (np.minimum(t.rows, m) * a_factor / t.across + b_columns * b_factor / t.down) * step
    arriving = (t.rows + np.where(t.in_rows, columns, t.columns)) * step
    loading = np.maximum(asked * np.maximum(1 / r.load_bytes, busy / r.all_load_bytes), arriving / r.arriving_bytes)
    multiplying = t.work / r.multiply_adds
    # Zeros for rows beyond a matrix are written more slowly than rows arrive: to all tiles, or some at the edge.
    beyond_a = -m % t.rows * np.where(m < t.rows, 1, AT_EDGES)
    beyond_b = -n % t.columns * np.where(n < t.columns, 1, AT_EDGES) * nt
    beyond = (beyond_a + beyond_b) * step / r.zeros
    loaded = on_each * loading + beyond
    multiplied = on_each * multiplying
    k_tile = np.maximum(multiplied, loaded) + r.unhidden * np.minimum(multiplied, loaded) + r.turn
    loop = -(-k // (t.depth * t.parts)) * np.maximum(k_tile, rounds * r.latency / (stages - 1))
    slower = (multiprocessors / busy) ** r.idle * (on_each * busy / blocks) ** r.uneven
    reading = ((m + n) * k + m * n) * (ITEMSIZE / r.memory_bytes) * slower
    # Each block of a cluster adds and stores as large a share of its tile.
    joining = r.join * t.split + (t.parts - 1) / t.parts * t.width * t.side * (r.part / WGMMA_ROWS**2)
    storing = on_each * np.minimum(t.rows, m) * np.minimum(t.columns, n) / (r.results * t.parts)
    around = r.launch + r.sharing * t.shared + joining + storing + (rounds - 1) * r.refill
    us = np.maximum(loop, reading) + r.memory_unhidden * np.minimum(loop, reading) + around
    # Whole rows: there is a tile for them, they have no gaps, and more lanes than one of eight read from other banks.
    reads = ~np.asarray(nt, bool) & (n <= t.columns) & (n > t.columns - PANEL) & (b_row == n)
    reads = reads & (n % EIGHT == 0) & (k % EIGHT == 0) & (n % PANEL != 0)
    return np.where(((k >= t.shortest) | ~t.split) & (reads | ~t.in_rows), us, np.inf)


def one_tile_stages(problem: Matmul, place: int, multiprocessors: int) -> int:
    """Return the stages of a product's tile: fewer where a multiprocessor has several blocks."""
    tile = all_tiles().at(np.array([place]))
    on_each, _ = _spread(tile, tile.blocks(problem.m, problem.n), multiprocessors)
    if tile.in_rows[0]:
        return _stages_for(all_tiles().tile(place, problem.n), int(on_each[0]))
    return int(tile.ring(on_each, problem.layout == "nt")[0])


def _spread(tiles: _Tiles, blocks: np.ndarray, multiprocessors: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of a multiprocessor, and the multiprocessors that have one."""
    places = clusters_at_once(tiles.cluster, multiprocessors)
    return -(-blocks // places), np.minimum(blocks, places)


def clusters_at_once(cluster: Any, multiprocessors: int) -> Any:
    """Return how many blocks in clusters of so many a GPU holds at once, of which a multiprocessor holds one."""
    clusters = multiprocessors // GROUP_OF * (GROUP // cluster) + SHORT_GROUP // cluster
    return np.where(np.greater(cluster, 2), clusters * cluster, multiprocessors)


def stages_once(name: str) -> int:
    """Return the stages that a file's kernel was timed with where its tile has others now; 0 of all others."""
    match = NAMES[KINDS.index(UPRIGHT)].fullmatch(name)
    return int(match["stages"] or 0) if match else 0


def named(tile: RoleTile, once: int = 0) -> str:
    """Name the kernel in a GPU's file of times: with the stages that it had ``once`` if these are not 0."""
    if isinstance(tile, RowsTile):
        rows, _, steps = tile.block
        tile = SwappedTile((rows, tile.multiplied_n, steps), tile.warpgroups, tile.parts, tile.cluster)
        return f"{IN_ROWS} {tile}"
    return f"{EXCHANGED if tile.swapped else UPRIGHT} {tile}" + (f", {once} stages" if once else "")
