"""What a product takes by each kernel of the call's menu, in microseconds: a formula for all, and what was measured.

Kernels differ by step, tile, clusters, and by whether the last wave of tiles is cut (:mod:`kernels.stream_k`).
:func:`microseconds` counts the same for all of them, so that they can be compared; its constants are a GPU's
(``costs/``), fitted to times of the menu on shapes drawn for that. What these times were beside the formula corrects it
for shapes near by (:meth:`Costs.estimate`). It is for an order: its constants have taken up what it leaves out.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from tensorir_ladder.kernels.tiles import HopperTile, RoleTile
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops.errors import DamagedFile
from tensorir_ladder.torch_ops.exchanged import (
    EIGHT,
    MOST_RESULTS,
    SECTOR,
    ExchangedRates,
    across_lines,
    all_tiles,
    exchanged_microseconds,
    exchanged_stages,
)
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.rates import MODELLED, read

if TYPE_CHECKING:
    from tensorir_ladder.torch_ops.choice import Choice

FOLDER = Path(__file__).parent / "costs"
ITEMSIZE, SUM_BYTES, LINE = 2, 4, 64  # bytes of an operand's element and of a sum; elements of a cache line
PANEL_RESULTS = 64 * 64  # of a box
CORRECTED = 32  # kernels that the formula puts first, among which measurements decide
NEAR, NEAR_WAVES = 1.2, 0.6  # how far measurements count: doublings of each extent, of the waves of tiles
NEAR_COLUMNS, ALIKE = 48, 0.1  # and of a kernel's own tile for its other widths: columns, and how much at most
NEAR_ROWS, NEAR_KIND = 0.5, 0.45  # of tiles of one block each: doublings of the width; groups, parts
NEAR_CLUSTER, OTHER_WAY = 0.6, 3.0  # doublings of a cluster's blocks, down and across; operands exchanged or not
OTHER_LINES = 0.3  # what it counts as, squared, if rows lie across cache lines in one product and not in the other
OTHER_SECTORS = 2.0  # and if they begin within sectors
NEAREST, VERY_NEAR = 0.7, 0.2  # so much counts only of products of nearly the same sizes, and how near
FAR = 0.03  # what counts less is left out
DOUBT = 0.15  # of measurements: as much weight as one of the very shape, if that kernel was the fastest there by far
SAME, UNSURE = 0.02, 0.05  # how far apart (squared) products are of which one tells half of the other; and doubt of it
DARE = 1.05  # how much dearer than its estimate a kernel counts for a product that was timed with others only
UNKNOWN = 0.04  # by what part a kernel is dearer of which nothing is known: of many guesses the least is too low
FEWEST_ROWS = 16  # fewer cost the same
PLACES = 8  # numbers of a shape's place

Positive = Annotated[float, msgspec.Meta(gt=0)]
Extent = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class KernelRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of :func:`microseconds`; times in microseconds, rates per microsecond.

    ``launch`` of any kernel, until its first k tile is there; ``waits`` more where it begins only after the kernel
    before it; ``ring`` more where all its threads load and multiply in turn (step 11), ``pair`` more for clusters of
    two. ``turn`` of a k tile in any kernel, ``ring_turn`` more in step 11's, ``pair_turn`` more in a cluster's.
    ``multiply_adds`` of a multiprocessor, times the tile's ``efficiency``; ``load_bytes`` of one multiprocessor and
    ``all_load_bytes`` of all together, ``straddling`` or ``lines`` times as many where a tile's rows lie across cache
    lines (:func:`.exchanged.across_lines`), be it that the operand's do, or that its width has them begin so (of a B
    stored [k, n]); ``latency`` of a
    load while many are under way; ``unhidden``, the part of the shorter of multiplying and loading that takes time.
    ``crowding``: how far blocks that begin early are crowded together where they are more than half of the
    multiprocessors (0: not; 1: as if these were all busy). ``results`` that a multiprocessor stores, ``writing_across``
    times as slowly where a tile's width is no whole cache lines; ``refill`` between tiles of blocks that do not stay.
    ``cut`` of the last wave, ``cut_first`` more where no wave is before it; ``sums`` in bytes that an owner reads.
    ``memory_bytes`` of the GPU, ``writing`` what a byte of results counts as; ``memory_unhidden``, the part of the
    shorter of reading and multiplying that takes time. ``streamed_launch`` and ``streamed_bytes`` of the kernel that
    streams weights; ``streamed_row``, the part that each row adds; ``streamed_across``, how much longer weights take
    whose rows lie along the columns.
    """

    launch: Positive
    waits: Positive
    ring: Positive
    pair: Positive
    turn: Positive
    ring_turn: Positive
    pair_turn: Positive
    multiply_adds: Positive
    load_bytes: Positive
    all_load_bytes: Positive
    straddling: Positive
    lines: Positive
    latency: Positive
    unhidden: Positive
    crowding: Positive
    results: Positive
    writing_across: Positive
    refill: Positive
    cut: Positive
    cut_first: Positive
    sums: Positive
    memory_bytes: Positive
    writing: Positive
    memory_unhidden: Positive
    streamed_launch: Positive
    streamed_bytes: Positive
    streamed_row: Positive
    streamed_across: Positive
    efficiency: dict[str, Positive]

    def efficiencies(self, block_m: np.ndarray, block_n: np.ndarray, block_k: np.ndarray) -> np.ndarray:
        """Return tiles' efficiencies: by their widths, between those of the same rows and k steps; else the median."""
        found = np.full(len(block_m), median([*self.efficiency.values()] or [1.0]))  # np's would import np.ma
        known: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for name, value in self.efficiency.items():
            rows, columns, steps = HopperTile.parse(name).block
            known.setdefault((rows, steps), []).append((columns, value))
        for (rows, steps), values in known.items():
            alike = (block_m == rows) & (block_k == steps)
            found[alike] = np.interp(block_n[alike], *zip(*sorted(values)))
        return found


class MeasuredShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of kernels for one product: places in the file's list of kernels, and microseconds."""

    m: Extent
    n: Extent
    k: Extent
    layout: str
    times: Annotated[tuple[tuple[int, Positive], ...], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"no layout {self.layout!r}")


class CostFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU's constants, the kernels that were measured, by their names, and on what shapes.

    Of kernels with exchanged operands, whose constants are ``exchanged``, names say the tile alone.
    """

    gpu: str
    origin: str
    rates: KernelRates
    exchanged: ExchangedRates
    kernels: tuple[str, ...]
    shapes: tuple[MeasuredShape, ...]

    def __post_init__(self) -> None:
        if not all(0 <= place < len(self.kernels) for shape in self.shapes for place, _ in shape.times):
            raise ValueError("times of a kernel that is not listed")
        self.tiles  # noqa: B018 - a tile that does not parse is an error of the file

    @property
    def tiles(self) -> list[int | None]:
        """The places of the kernels' tiles among :func:`.exchanged.all_tiles`; None of other kernels."""
        return [all_tiles().place(name) for name in self.kernels]


@functools.cache
def cost_file(gpu: str) -> CostFile:
    """Read a GPU's file, or that of ``rates.MODELLED`` where it has none; DamagedFile names a bad one."""
    files = {file.gpu: file for file in (read(path, CostFile) for path in sorted(FOLDER.glob("*.json")))}
    if MODELLED not in files:
        raise DamagedFile(f"{FOLDER} has no file of the {MODELLED}; restore it from git, or install the package again")
    return files.get(gpu, files[MODELLED])


class Forms:
    """Kernels as the formula sees them on a GPU, an element each: their choices' tiles, clusters and kinds."""

    def __init__(self, choices: Sequence[Choice], rates: KernelRates, multiprocessors: int) -> None:
        tiles, kernels = [each.tile for each in choices], [each.kernel for each in choices]
        # Of tiles in clusters, what each block has: how well it multiplies is the same.
        self.multiprocessors, self.tiles = multiprocessors, [str(HopperTile(t.block, t.warpgroups)) for t in tiles]
        self.block_m, self.block_n, self.block_k = (np.array([tile.block[axis] for tile in tiles]) for axis in range(3))
        self.stages = np.array([each.stages for each in choices])
        self.blocks = np.array([kernel.blocks or 1 for kernel in kernels])
        self.down, self.across = (np.array([tile.cluster[axis] for tile in tiles]) for axis in (0, 1))
        self.down = self.down * self.blocks
        self.cuts, self.stays = (np.array([getattr(k, kind) for k in kernels]) for kind in ("cuts", "stays"))
        self.ring = np.array([kernel.step == 11 for kernel in kernels])
        # What follows of them, whatever the product is.
        self.rows, self.wide = self.block_m * self.down, self.block_n * self.across
        self.together = self.down * self.across
        self.workers = multiprocessors // self.together
        self.leaves, self.whole = ~self.stays, ~self.cuts
        self.shortest = np.array([max(1, tile.group_m * tile.group_n // PANEL_RESULTS) for tile in tiles])
        self.ragged = self.block_n % LINE != 0  # tiles begin within cache lines
        self.unshared = (self.blocks > 1) & (self.block_n % (self.blocks * LINE) != 0)
        self._rate(rates)

    def rated(self, rates: KernelRates) -> Forms:
        """Return the same kernels on a GPU of other rates."""
        made = copy.copy(self)
        made._rate(rates)
        return made

    def _rate(self, rates: KernelRates) -> None:
        self.rates = rates
        self.efficiency = rates.efficiencies(self.block_m, self.block_n, self.block_k)
        self.sums_us = self.block_m * self.block_n * (SUM_BYTES / rates.sums)
        self.begin = rates.launch + rates.waits * self.leaves + rates.ring * self.ring
        self.begin = self.begin + rates.pair * (self.together - 1)

    def at(self, places: np.ndarray) -> Forms:
        """Return the kernels at some places, in their order."""
        made = copy.copy(self)
        made.tiles = [self.tiles[place] for place in places]
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                setattr(made, name, values[places])
        return made

    def alike(self) -> np.ndarray:
        """Return, for each two kernels, how much one's times say of the other: their tiles' widths alone may differ."""
        clusters = self.blocks, self.down, self.across
        kinds = np.stack([self.block_m, self.block_k, *clusters, self.cuts, self.stays, self.ring], axis=1)
        same = (kinds[:, None] == kinds).all(-1)
        apart = (self.block_n[:, None] - self.block_n) / NEAR_COLUMNS
        return np.where(apart == 0, same * 1.0, same * ALIKE * np.exp(-0.5 * apart**2))

    def log_waves(self, m: Any, n: Any, batch: int = 1) -> np.ndarray:
        """Return how many waves of tiles there are, as a power of two."""
        return np.log2(-(-m // self.rows) * -(-n // self.wide) * batch / self.workers)

    def waves(self, m: Any, n: Any, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Count the whole waves of tiles, and the tiles of the last one that is not whole."""
        return np.divmod(-(-m // self.rows) * -(-n // self.wide) * batch, self.workers)


class KTile:
    """Hold what a k tile takes in each kernel, where rows of the operands lie so: multiplying, loading, and its turn.

    ``all_busy`` is its time while all multiprocessors load. ``n``, ``k`` and ``nt`` (B is stored transposed) say which
    rows lie across cache lines.
    """

    def __init__(self, forms: Forms, n: Any, k: Any, nt: Any) -> None:
        f, r = forms, forms.rates
        a_factor = across_lines(k, 0, r.straddling, r.lines)
        b_factor = np.where(nt, a_factor, across_lines(n, f.block_n, r.straddling, r.lines))
        self.rates, self.written = r, 1 + (r.writing_across - 1) * f.ragged
        self.multiplying = f.block_m * f.block_n * f.block_k / (r.multiply_adds * f.efficiency)
        self.brought = (f.block_m * a_factor / f.across + f.block_n * b_factor / f.down) * f.block_k * ITEMSIZE
        self.arriving = r.latency / (f.stages - 1)
        self.turn = r.turn + r.ring_turn * f.ring + r.pair_turn * (f.together - 1)
        self.all_busy = self.time(np.array(f.multiprocessors))
        self.impossible = f.unshared & ~np.asarray(nt, bool)

    def time(self, busy: np.ndarray) -> np.ndarray:
        """Return the microseconds of a k tile while so many multiprocessors are busy."""
        rate = np.maximum(1 / self.rates.load_bytes, busy * (1 / self.rates.all_load_bytes))
        loading = np.maximum(self.brought * rate, self.arriving)
        shorter = self.rates.unhidden * np.minimum(self.multiplying, loading)
        return np.maximum(self.multiplying, loading) + shorter + self.turn


def microseconds(forms: Forms, k_tile: KTile, m: Any, n: Any, k: Any, batch: int = 1) -> np.ndarray:
    """Return about how long each kernel takes for ``batch`` products.

    ::

        k tile   = the longer of multiplying and loading it, a part of the other, and a turn of the ring
        loop     = waves of tiles · k tiles · k tile;  of a cut last wave only the longest piece, and handing over
        in all   = the longer of the loop and reading both operands once, a part of the other, launch and storing

    A last wave that is not whole has the GPU's bandwidth for fewer multiprocessors. Sizes may be arrays too, an element
    for each kernel. Infinite where a last wave cannot be cut, or a cluster cannot share its B tile: of a B stored
    [k, n] each of its blocks loads whole panels.
    """
    f, r = forms, forms.rates
    k_tiles = -(-k // f.block_k)
    waves, owned = f.waves(m, n, batch)
    first, some = waves == 0, owned > 0
    # Blocks that begin early take the places that the kernel before leaves; where these are few, near each other.
    alone = owned * f.together
    crowded = f.stays & first & (alone > f.multiprocessors / 2)
    busy = alone + min(r.crowding, 1.0) * (crowded * (f.multiprocessors - alone))
    # A cut last wave: in equal parts where workers are twice the tiles, else some of them help all the others.
    left = np.maximum(owned, 1)
    parts = np.maximum(1, np.minimum(f.workers // left, k_tiles // (2 * f.shortest)))
    share = np.where(parts > 1, 1 / parts, left / np.minimum(f.workers, 2 * left))
    handing = r.cut + r.cut_first * first + np.maximum(parts - 1, 1) * f.sums_us
    last = some * (f.whole * k_tile.time(busy) + f.cuts * share * k_tile.all_busy)
    loop = k_tiles * (waves * k_tile.all_busy + last) + f.cuts * handing
    reading = ((m + n) * k + m * n * r.writing * k_tile.written) * (batch * ITEMSIZE / r.memory_bytes)
    rounds = f.stays + f.leaves * (waves + some)
    stored = np.minimum(f.block_m, m) * np.minimum(f.block_n, n) * (1 / r.results) * k_tile.written
    storing = rounds * (stored + r.refill) - r.refill
    in_all = np.maximum(loop, reading) + r.memory_unhidden * np.minimum(loop, reading) + storing + f.begin
    uncuttable = f.cuts & (~some | (owned == f.workers) | (k_tiles < 4 * f.shortest))
    return np.where(uncuttable | k_tile.impossible, np.inf, in_all)


def streaming_microseconds(m: int, n: int, k: int, nt: bool, rates: KernelRates) -> float:
    """Return about how long a product of few rows or columns takes that streams the other operand."""
    streaming = max(m, n) * k * (ITEMSIZE / rates.streamed_bytes) * (1 + rates.streamed_row * min(m, n))
    along = nt or m > n  # rows of A, streamed for few columns, run along k as well
    return rates.streamed_launch + streaming * (1.0 if along else rates.streamed_across)


class Costs:
    """Estimate what a product takes by each kernel on a GPU: ``choices``, and :class:`Streamed` behind them."""

    def __init__(self, choices: Sequence[Choice], file: CostFile, multiprocessors: int) -> None:
        self.choices: list[Choice | Streamed] = [*choices, Streamed()]
        self.forms = Forms(choices, file.rates, multiprocessors)
        self.exchanged = file.exchanged
        self._k_tile = functools.cache(functools.partial(KTile, self.forms))
        self._timed = {_same(shape.m, shape.n, shape.k, shape.layout == "nt") for shape in file.shapes}
        self._remember(file)
        self._remember_exchanged(file)

    def _remember(self, file: CostFile) -> None:
        """Keep by what part each time of the file differs from the formula's, beside the others of its shape."""
        named = {str(choice): place for place, choice in enumerate(self.choices)}
        places = [named.get(name, -1) for name in file.kernels]
        shapes = [shape for shape in file.shapes if any(places[old] >= 0 for old, _ in shape.times)]
        taken = [
            (row, places[old], us) for row, shape in enumerate(shapes) for old, us in shape.times if places[old] >= 0
        ]
        self._shapes = np.array([_place(each.m, each.n, each.k, each.layout == "nt") for each in shapes])
        self._measured: dict[tuple[int, int, int, bool], list[tuple[int, float]]] = {}  # of these products
        for row, place, us in taken:
            each = shapes[row]
            self._measured.setdefault(_same(each.m, each.n, each.k, each.layout == "nt"), []).append((place, us))
        self._off, self._weights, self._waves = np.zeros((3, len(self.choices), len(shapes)))
        self._common, self._compared = np.zeros((2, len(shapes)))
        if not shapes:
            return
        rows, at, us = np.array([t[0] for t in taken]), np.array([t[1] for t in taken]), np.array([t[2] for t in taken])
        sizes = [np.array([getattr(shape, side) for shape in shapes]) for side in "mnk"]
        nt = np.array([shape.layout == "nt" for shape in shapes])
        streamed = [
            streaming_microseconds(*size, self.forms.rates) for size in zip(*(side.tolist() for side in sizes), nt)
        ]
        explicit = at < len(self.choices) - 1
        m, n, k, b_nt = (side[rows[explicit]] for side in (*sizes, nt))
        forms = self.forms.at(at[explicit])
        guessed = np.array(streamed)[rows]
        guessed[explicit] = microseconds(forms, KTile(forms, n, k, b_nt), m, n, k)
        self._common, self._compared, off, weights = _beside_the_formula(rows, self._shapes, us, guessed)
        self._off[at, rows], self._weights[at, rows] = off, weights
        self._waves[:-1] = self.forms.log_waves(sizes[0][:, None], sizes[1][:, None]).T
        # What a tile of one width took says something of the next width, too.
        alike = self.forms.alike()
        counted = alike @ self._weights[:-1]
        self._off[:-1] = (alike @ (self._weights[:-1] * self._off[:-1])) / np.maximum(counted, 1e-9)
        self._weights[:-1] = np.minimum(counted, 1.0)

    def _remember_exchanged(self, file: CostFile) -> None:
        """Keep by what part times of exchanged operands differ from the formula's: each shape's, and its tiles'."""
        tiles, places = all_tiles(), file.tiles
        timed = [
            (shape, place, us) for shape in file.shapes for old, us in shape.times if (place := places[old]) is not None
        ]
        shapes = list(dict.fromkeys((each.m, each.n, each.k, each.layout == "nt") for each, _, _ in timed))
        numbers = {shape: row for row, shape in enumerate(shapes)}
        rows = np.array([numbers[each.m, each.n, each.k, each.layout == "nt"] for each, _, _ in timed], int)
        at, us = np.array([place for _, place, _ in timed], int), np.array([us for _, _, us in timed])
        m, n, k, nt = np.array(shapes, int).reshape(-1, 4)[rows].T
        guessed = exchanged_microseconds(tiles.at(at), m, n, k, nt, self.forms.multiprocessors, file.exchanged)
        self._exchanged_measured: dict[tuple[int, int, int, bool], list[tuple[int, float]]] = {}
        for each, place, taken in timed:
            of = _same(each.m, each.n, each.k, each.layout == "nt")
            self._exchanged_measured.setdefault(of, []).append((place, taken))
        self._exchanged_shapes = np.array([_place(*shape) for shape in shapes]).reshape(-1, PLACES)
        self._exchanged_common, self._exchanged_compared, off, weights = _beside_the_formula(
            rows, self._exchanged_shapes, us, guessed
        )
        self._exchanged_of, self._exchanged_off, self._exchanged_weights = rows, off, weights
        kind = tiles.groups / NEAR_KIND, np.log2(tiles.depth), tiles.parts / NEAR_KIND, tiles.upright * OTHER_WAY
        cluster = np.log2(tiles.down) / NEAR_CLUSTER, np.log2(tiles.across) / NEAR_CLUSTER
        self._tile_places = np.stack((np.log2(tiles.width) / NEAR_ROWS, *kind, *cluster), axis=1)
        self._exchanged_places = self._tile_places[at]

    def exchanged_times(self, problem: Matmul) -> np.ndarray:
        """Estimate microseconds of all tiles of exchanged operands (:mod:`.exchanged`).

        As :meth:`estimate` corrects them by what was measured: all of them, and the likeliest each on its own.
        """
        m, n, k, nt = problem.m, problem.n, problem.k, problem.layout == "nt"
        times = exchanged_microseconds(all_tiles(), m, n, k, nt, self.forms.multiprocessors, self.exchanged)
        apart = _apart(self._exchanged_shapes, _place(m, n, k, nt))
        times *= math.exp(_level(apart, self._exchanged_common, self._exchanged_compared)[0])
        near = _nearness(apart)
        first = np.argpartition(times, CORRECTED)[:CORRECTED]
        close = np.flatnonzero(near[self._exchanged_of] > FAR)
        own, others = self._tile_places[first], self._exchanged_places[close]
        apart = (own**2).sum(1)[:, None] + (others**2).sum(1) - 2 * (own @ others.T)  # squared
        weights = np.exp(-0.5 * apart) * (near[self._exchanged_of[close]] * self._exchanged_weights[close])
        times *= math.exp(UNKNOWN)
        times[first] *= np.exp(_known(weights, self._exchanged_off[close] - UNKNOWN))
        same = _same(m, n, k, nt)
        if same in self._timed:
            times *= DARE
        for place, us in self._exchanged_measured.get(same, ()):
            times[place] = us
        return times

    def exchanged_choice(self, problem: Matmul, narrows: bool = False) -> tuple[float, RoleTile | None, int]:
        """Find the tile of one block, and its stages, that should be fastest, and its microseconds (:mod:`.exchanged`).

        Infinite, and None, for products of more than MOST_RESULTS results: others are faster there. Where it
        ``narrows``, storing to rows that TMA cannot step over, only tiles of exchanged operands.
        """
        if problem.m * problem.n > MOST_RESULTS:
            return math.inf, None, 0
        times = self.exchanged_times(problem)
        if narrows:
            times = np.where(all_tiles().upright, np.inf, times)
        least = int(times.argmin())
        stages = exchanged_stages(problem, least, self.forms.multiprocessors)
        return float(times[least]), all_tiles().tile(least), stages

    def _guess(self, m: int, n: int, k: int, nt: bool, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return the formula's microseconds of each choice, and its waves of tiles, as a power of two."""
        forms = self.forms
        times = microseconds(forms, self._k_tile(n % LINE, k % LINE, nt), m, n, k, batch)
        streamed = streaming_microseconds(m, n, k, nt, forms.rates)
        return np.append(times, streamed), np.append(forms.log_waves(m, n, batch), 0.0)

    def estimate(self, problem: Matmul, batch: int = 1, streamed: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Estimate microseconds: the places of the choices in the order in which to take them, and their times.

        Of the CORRECTED that the formula puts first each is corrected by what it was measured to take, beside the
        formula, for other products: the nearer their sizes, waves and raggedness, the more they count. What one was
        measured to take for this product, or one of as many rows by the eight, stands. ``streamed`` allows the kernel
        that streams weights.
        """
        m, n, k, nt = problem.m, problem.n, problem.k, problem.layout == "nt"
        times, waves = self._guess(m, n, k, nt, batch)
        if not streamed:
            times[-1] = np.inf
        order = np.argsort(times)
        first, rest = order[:CORRECTED], order[CORRECTED:]
        guessed = times[first]
        if len(self._shapes) and batch == 1:
            apart = _apart(self._shapes, _place(m, n, k, nt))
            near = _nearness(apart)
            times *= math.exp(_level(apart, self._common, self._compared)[0])
            close = np.ix_(first, np.flatnonzero(near > FAR))
            apart = apart[close[1]] + ((self._waves[close] - waves[first, None]) / NEAR_WAVES) ** 2
            weights = _nearness(apart) * self._weights[close]
            times *= math.exp(UNKNOWN)
            guessed = times[first] * np.exp(_known(weights, self._off[close] - UNKNOWN))
            same = _same(m, n, k, nt)
            if same in self._timed:
                times *= DARE
                guessed *= DARE
            for place, us in self._measured.get(same, ()):
                guessed[first == place] = us
        order = np.argsort(guessed)
        return np.append(first[order], rest), np.append(guessed[order], times[rest])


def _beside_the_formula(
    shape: np.ndarray, places: np.ndarray, us: np.ndarray, guessed: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what is known of shapes at ``places`` from times, as logarithms beside the formula's.

    Of each shape, by what part all its times differ, and what that counts as: only where kernels were compared. Of each
    time, by what part it differs beside that, and what it counts as: the more, the nearer to its shape's fastest. A
    shape's only time differs from what is known of shapes near by, and counts as far as that is known.
    """
    shapes = len(places)
    least = np.full(shapes, np.inf)
    np.minimum.at(least, shape, us)
    # Infinite: a kernel that the formula excludes and another version has timed.
    known = np.isfinite(guessed)
    weights = np.where(known, (least[shape] / us) ** 2, 0.0)
    off = np.log(us / np.where(known, guessed, us))
    common = np.bincount(shape, weights * off, shapes) / np.maximum(np.bincount(shape, weights, shapes), 1e-9)
    compared = np.bincount(shape, minlength=shapes) > 1
    alone, others = places[~compared], places[compared]
    counts = np.ones(shapes)
    apart = ((alone[:, None] - others) ** 2).sum(-1)
    common[~compared], counts[~compared] = _level(apart, common[compared], np.ones(len(others)))
    off -= common[shape]
    weights *= counts[shape]
    return np.where(compared, common, 0.0), compared * 1.0, off, weights


def _level(apart: np.ndarray, common: np.ndarray, compared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what all kernels take longer for a product, by other products so far apart (squared), and how sure it is.

    The nearest say it, and others where none are near: whether a kernel that was measured is beside one that was not
    depends on it.
    """
    near = np.exp(-0.5 * apart) / (1 + apart / SAME)
    total = near @ compared
    return near @ common / (total + UNSURE), total / (total + UNSURE)


def _known(weights: np.ndarray, off: np.ndarray) -> np.ndarray:
    """Return what kernels should differ by: the mean of what their times did; the less, the less these count."""
    return (weights * off).sum(1) / (weights.sum(1) + DOUBT)


def _nearness(apart: np.ndarray) -> np.ndarray:
    """Return what times count for of products so far apart (squared): those of nearly the same sizes most."""
    return (1 - NEAREST) * np.exp(-0.5 * apart) + NEAREST * np.exp((-0.5 / VERY_NEAR**2) * apart)


def _apart(places: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return squared distances."""
    off = places - place
    return np.einsum("ij,ij->i", off, off)


def _same(m: int, n: int, k: int, nt: bool) -> tuple[int, int, int, bool]:
    """Return what products share of which a kernel's time is the same: more rows than eight come to it by the eight."""
    return m if m <= EIGHT else -(-m // EIGHT) * EIGHT, n, k, nt


def _place(m: int, n: int, k: int, nt: bool) -> np.ndarray:
    """Place a product among others, so that squared distances say how little one tells of the other."""
    sizes = (math.log2(size) / NEAR for size in (max(m, FEWEST_ROWS), n, k))
    lines = (OTHER_LINES**0.5 * flag for flag in (nt, n % LINE != 0, k % LINE != 0))
    return np.array([*sizes, *lines, *(OTHER_SECTORS**0.5 * (row % SECTOR != 0) for row in (k if nt else n, k))])
