"""What a product takes by every kernel that the call may take: formulas, corrected by what was measured.

A GPU's file (``costs/``) has the formulas' constants, and the times that these were fitted to: of kernels on shapes
drawn for that (``ladder menu``). Of the kernels that :mod:`.kernel_cost` and :mod:`.one_tile` put first, each is
corrected by what the times of products near by were beside the formulas (:mod:`.nearby`), and by trees, which say what
that leaves of times of products left out (:mod:`.left_over`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tensorir_ladder.schedules.trees import Trees
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops.errors import DamagedFile
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.kernel_cost import (
    LINE,
    Forms,
    KernelRates,
    KTile,
    Positive,
    microseconds,
    streaming_microseconds,
)
from tensorir_ladder.torch_ops.left_over import Kernels, features, trees_of
from tensorir_ladder.torch_ops.nearby import Expected, Measured, Nearby, by_the_eight, product_places
from tensorir_ladder.torch_ops.one_tile import (
    MOST_RESULTS,
    OneTileRates,
    all_tiles,
    one_tile_microseconds,
    stages_once,
)
from tensorir_ladder.torch_ops.rates import MODELLED, read

if TYPE_CHECKING:
    from tensorir_ladder.torch_ops.choice import Choice

FOLDER = Path(__file__).parent / "costs"
CORRECTED = 40  # kernels of each formula that it puts first: these are corrected
TOLD = 16  # of these, the likeliest fastest, which trees tell apart: so many were timed beside each other
DRAWS = 1000
CAUTION = 1.0  # standard deviations that a kernel counts as slower than is likely: of many guesses the least is low
RING, ROLES, EXCHANGED, UPRIGHT, STREAMED, IN_ROWS = range(6)  # families of kernels, which say nothing of each other
OF_ONE_TILE = np.array([EXCHANGED, UPRIGHT, IN_ROWS])  # of the kinds of tiles

Extent = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


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

    @property
    def asked(self) -> Asked:
        """The product as the formulas take it."""
        return Asked.of(Matmul(self.m, self.n, self.k, "float16", self.layout))


class Asked(NamedTuple):
    """A product as the formulas take it: whether B is stored transposed, and the elements that rows begin apart.

    A field may be an array, an element for each of many products.
    """

    m: Any
    n: Any
    k: Any
    nt: Any
    a_row: Any
    b_row: Any

    @classmethod
    def of(cls, problem: Matmul, rows: tuple[int, int] | None = None) -> Asked:
        """Ask for a problem; rows are without gaps where that is not said."""
        nt = problem.layout == "nt"
        return cls(problem.m, problem.n, problem.k, nt, *(rows or (problem.k, problem.k if nt else problem.n)))

    @classmethod
    def all_of(cls, products: Sequence[Asked]) -> Asked:
        """Ask for many products at once."""
        kinds = {"nt": bool}
        return cls(*(np.array([getattr(each, one) for each in products], kinds.get(one, int)) for one in cls._fields))

    def at(self, places: Any) -> Asked:
        """Return some of many products, in their order."""
        return Asked(*(each[places] for each in self))


class CostFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU's constants, the kernels that were measured, by their names, and on what shapes.

    Of step 12's kernels whose constants are ``one_tile``, names say the tile alone; behind a comma stages that it had
    when it was timed, where it has others now: another kernel, which tells of this one.
    """

    gpu: str
    multiprocessors: Extent
    origin: str
    rates: KernelRates
    one_tile: OneTileRates
    kernels: tuple[str, ...]
    shapes: tuple[MeasuredShape, ...]

    def __post_init__(self) -> None:
        if not all(0 <= place < len(self.kernels) for shape in self.shapes for place, _ in shape.times):
            raise ValueError("times of a kernel that is not listed")
        self.tiles  # noqa: B018 - a tile that does not parse is an error of the file

    @property
    def tiles(self) -> list[int | None]:
        """The places of the kernels' tiles among :func:`.one_tile.all_tiles`; None of other kernels."""
        return [all_tiles().place(name) for name in self.kernels]

    @property
    def once(self) -> list[int]:
        """The stages that the kernels were timed with where these were others than today's; else 0."""
        return [stages_once(name) for name in self.kernels]


def cost_file(gpu: str) -> CostFile:
    """Read a GPU's file, or that of ``rates.MODELLED`` where it has none; DamagedFile names a bad one."""
    files = _cost_files(FOLDER)
    if MODELLED not in files:
        raise DamagedFile(f"{FOLDER} has no file of the {MODELLED}; restore it from git, or install the package again")
    return files.get(gpu, files[MODELLED])


@functools.cache
def _cost_files(folder: Path) -> dict[str, CostFile]:
    return {file.gpu: file for file in (read(path, CostFile) for path in sorted(folder.glob("*.json")))}


def all_cost_files() -> list[CostFile]:
    """Return the files of all GPUs."""
    return [*_cost_files(FOLDER).values()]


def other_cost_files(gpu: str) -> list[CostFile]:
    """Return the files of all other GPUs."""
    return [each for each in all_cost_files() if each.gpu != gpu]


def estimates_on(gpu: str, choices: Sequence[Choice], multiprocessors: int) -> Estimates:
    """Make the estimates of a GPU by all files: of one that has none by the constants of ``rates.MODELLED``'s."""
    file = cost_file(gpu)
    own = file if file.gpu == gpu else msgspec.structs.replace(file, shapes=())
    return Estimates(choices, own, multiprocessors, other_cost_files(gpu), trees_of(gpu))


class Times(NamedTuple):
    """Microseconds of a product, infinite where a kernel cannot: by each of the menu, and by each tile of step 12's."""

    menu: np.ndarray
    tiles: np.ndarray


class Odds(NamedTuple):
    """Say how likely each kernel is the fastest for a product, as :class:`Times` has them, and what the choice loses.

    ``loss`` is the part of the chosen kernel's time by which the fastest is expected to be shorter.
    """

    menu: np.ndarray
    tiles: np.ndarray
    loss: float


class Estimates:
    """Estimate what products take on a GPU by each of the menu, ``kernels``, and by each of :func:`.all_tiles`.

    ``file`` has the GPU's constants and times, or those of the one most like it; ``others`` are of other GPUs, whose
    times tell something of this one's. ``trees`` say what both leave; nothing if None.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        file: CostFile,
        multiprocessors: int,
        others: Sequence[CostFile] = (),
        trees: Trees | None = None,
    ) -> None:
        self.kernels: list[Choice | Streamed] = [*choices, Streamed()]
        self.forms, self.one_tile = Forms(choices, file.rates, multiprocessors), file.one_tile
        self._k_tile = functools.cache(functools.partial(KTile, self.forms))
        self._trees = trees
        self.measured = self._remember(file)
        elsewhere = (Estimates(choices, each, each.multiprocessors).measured for each in others)
        self._nearby = Nearby(self.measured, *elsewhere)

    def times(
        self,
        problem: Matmul,
        batch: int = 1,
        streamed: bool = False,
        one_tile: bool = True,
        rows: tuple[int, int] | None = None,
    ) -> Times:
        """Estimate microseconds of ``batch`` products; of ``one_tile`` each only where that is asked for.

        The CORRECTED kernels that each formula puts first are corrected by what was measured, and all others left
        behind them; what one was measured to take for this very product, rows by the eight, stands. ``streamed`` allows
        the kernel that streams weights. ``rows``: the elements that rows of A and B begin apart; without gaps if None.
        Nothing was measured of batches.
        """
        asked = Asked.of(problem, rows)
        found = self._by_formulas(asked, batch, streamed, one_tile)
        if batch > 1:
            return found
        first, expected = self._expected(asked, found)
        factors = np.exp(expected.off + CAUTION * expected.deviation)
        for times, corrected, by in zip(found, first, np.split(factors, [len(first.menu)])):
            if len(corrected):
                times_of = times[corrected] * by
                np.maximum(times, times_of.max(), out=times)
                times[corrected] = times_of
        for place, us in self._taken.get(_product(*asked), ()):
            times, at = (found.menu, place) if place < len(found.menu) else (found.tiles, place - len(found.menu))
            if np.isfinite(times[at]):  # what may be taken here
                times[at] = us
        return found

    def odds(self, problem: Matmul, streamed: bool = False) -> Odds:
        """Estimate how likely each kernel is the fastest for a product, and what is lost by taking the chosen one.

        By DRAWS draws of all kernels' times, together, from what was measured near by.
        """
        asked = Asked.of(problem)
        formulas = self._by_formulas(asked, 1, streamed, one_tile=True)
        first, expected = self._expected(asked, formulas)
        likely = np.log(np.concatenate([times[places] for times, places in zip(formulas, first)])) + expected.off
        # Covariances of kernels that are nearly the same are singular but for rounding.
        values, vectors = np.linalg.eigh(expected.covariance)
        normal = np.random.default_rng(DRAWS).standard_normal((DRAWS, len(likely)))
        drawn = likely + normal @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
        fastest = np.bincount(drawn.argmin(axis=1), minlength=len(likely)) / DRAWS
        chosen = drawn[:, (likely + CAUTION * expected.deviation).argmin()]
        odds = Odds(*(np.zeros(len(times)) for times in formulas), float(1 - np.exp(drawn.min(axis=1) - chosen).mean()))
        odds.menu[first.menu], odds.tiles[first.tiles] = np.split(fastest, [len(first.menu)])
        return odds

    def _by_formulas(self, asked: Asked, batch: int, streamed: bool, one_tile: bool) -> Times:
        (m, n, k, nt, a_row, b_row), forms = asked, self.forms
        few = streaming_microseconds(m, n, k, nt, forms.rates) if streamed else np.inf
        menu = np.append(microseconds(forms, self._k_tile(a_row % LINE, b_row % LINE, nt), m, n, k, batch), few)
        tiles = np.full(len(all_tiles().width), np.inf)
        if one_tile and m * n <= MOST_RESULTS:
            tiles = one_tile_microseconds(all_tiles(), *asked, forms.multiprocessors, self.one_tile)
        return Times(menu, tiles)

    def _expected(self, asked: Asked, formulas: Times) -> tuple[Times, Expected]:
        """Return the places of the kernels that each formula puts first, and what all of these should differ by."""
        first = Times(np.sort(_first(formulas.menu)), _first(formulas.tiles))  # the menu's last streams weights
        kernels = self._kernels(np.append(first.menu, len(self.kernels) + first.tiles), asked.m, asked.n, asked.nt)
        expected = self._nearby.expected(product_places(*asked), kernels.places(asked.m, asked.n))
        if self._trees is None:
            return first, expected
        us = np.concatenate([times[places] for times, places in zip(formulas, first)])
        likeliest = np.argsort(np.log(us) + expected.off + CAUTION * expected.deviation)[:TOLD]
        rows = features(asked, kernels.at(likeliest), us[likeliest], expected.deviation[likeliest])
        told = self._trees.told(self._trees.named(rows))
        more = np.full(len(us), told.max(initial=0.0))  # of others, so that they stay behind
        more[likeliest] = told
        return first, expected._replace(off=expected.off + more)

    def left_out(self, number: int) -> LeftOut:
        """Return what is left of the times of one of the file's shapes, as if that product had not been measured."""
        own, measured = self._own, self.measured
        asked, times = own.asked.at(number), np.flatnonzero(measured.of == number)
        same = np.all([by_the_eight(own.asked.m) == by_the_eight(asked.m), *map(np.equal, own.asked[1:], asked[1:])], 0)
        expected = self._nearby.expected(measured.products[number], measured.kernels[times], np.flatnonzero(same))
        values = features(asked, own.kernels.at(times), own.us[times], expected.deviation)
        return LeftOut(values, measured.off[times] - expected.off, measured.slower[times])

    def _kernels(self, at: np.ndarray, m: Any, n: Any, nt: Any, once: Any = 0) -> Kernels:
        """Return kernels for one product, or one for each: places in the menu, the one that streams weights, tiles.

        ``once`` as of :meth:`.one_tile._Tiles.at`, of each.
        """
        count = len(self.kernels)
        streamed, tiles = np.count_nonzero(at < count - 1), np.count_nonzero(at < count)
        m, n, nt, once = (np.broadcast_to(each, len(at)) for each in (m, n, nt, once))
        f, t = self.forms.at(at[:streamed]), all_tiles().at(at[tiles:] - count, once[tiles:])
        former = all_tiles().at(at[tiles:] - count).ring(2, nt[tiles:]) / t.ring(2, nt[tiles:])
        waves = f.tiles_of(m[:streamed], n[:streamed]) / f.workers, t.blocks(m[tiles:], n[tiles:]) / f.multiprocessors
        one = np.ones(tiles - streamed)
        menu = (f.block_m, f.block_n, f.block_k, 1, f.down, f.across, f.cuts, f.stays, f.stages, 1, waves[0], 1)
        tile = t.rows, t.columns, t.depth, t.parts, t.down, t.across
        of_tiles = (*tile, 0, 0, t.ring(2, nt[tiles:]), t.held[1], waves[1], former)
        parts = (
            Kernels(np.where(f.ring, RING, ROLES), *(np.broadcast_to(each, streamed) for each in menu)),
            Kernels(STREAMED * one, *(one,) * 6, 0 * one, 0 * one, *(one,) * 4),
            Kernels(OF_ONE_TILE[t.kind], *(np.broadcast_to(each, len(t.kind)) for each in of_tiles)),
        )
        return Kernels(*map(np.concatenate, zip(*parts)))

    def _remember(self, file: CostFile) -> Measured:
        """Keep a file's times, and return them beside the formulas."""
        taken = self._taken_from(file)
        self._taken: dict[Asked, list[tuple[int, float]]] = {}
        of_today = zip(map(_product, *taken.asked), taken.at.tolist(), taken.us.tolist(), taken.once.tolist())
        for product, at, us, once in of_today:
            if not once:
                self._taken.setdefault(product, []).append((at, us))
        # The menu's come first, then those of streamed weights, then those of tiles.
        streamed, first_tile = np.searchsorted(taken.at, (len(self.kernels) - 1, len(self.kernels)))
        of_menu, of_streamed = taken.part(0, streamed), taken.part(streamed, first_tile)
        of_tiles = taken.part(first_tile, None)
        (m, n, k, nt, a_row, b_row), forms = of_menu.asked, self.forms.at(of_menu.at)
        tiles = all_tiles().at(of_tiles.at - len(self.kernels), of_tiles.once)
        guessed = (
            microseconds(forms, KTile(forms, a_row, b_row, nt), m, n, k),
            streaming_microseconds(*of_streamed.asked[:4], self.forms.rates),
            one_tile_microseconds(tiles, *of_tiles.asked, self.forms.multiprocessors, self.one_tile),
        )
        beside = taken.us / np.concatenate(guessed)
        known = beside > 0  # else a formula excludes the kernel: infinite; another version has timed it
        m, n = taken.asked.m[known], taken.asked.n[known]
        kernels = self._kernels(taken.at[known], m, n, taken.asked.nt[known], taken.once[known])
        self._own = _Own(Asked.all_of([shape.asked for shape in file.shapes]), kernels, taken.us[known] / beside[known])
        least = np.full(len(file.shapes), np.inf)
        np.minimum.at(least, taken.of, taken.us)
        slower = taken.us / least[taken.of]
        products = product_places(*self._own.asked)
        return Measured(products, taken.of[known], kernels.places(m, n), np.log(beside[known]), slower[known])

    def _taken_from(self, file: CostFile) -> _Taken:
        """Read a file's times of kernels that are offered, in the order of these."""
        names, count = {str(kernel): place for place, kernel in enumerate(self.kernels)}, len(self.kernels)
        place = np.array(
            [names.get(name, -1) if tile is None else count + tile for name, tile in zip(file.kernels, file.tiles)], int
        )
        times = [(row, kernel, us) for row, shape in enumerate(file.shapes) for kernel, us in shape.times]
        of, kernel, us = map(np.array, zip(*times)) if times else (np.zeros(0, int), np.zeros(0, int), np.zeros(0))
        order = np.argsort(place[kernel], kind="stable")
        order = order[place[kernel[order]] >= 0]
        asked = Asked.all_of([shape.asked for shape in file.shapes]).at(of[order])
        return _Taken(of[order], place[kernel[order]], us[order], asked, np.array(file.once, int)[kernel[order]])


class LeftOut(NamedTuple):
    """Hold what is left of a product's times when those of others say what they can: arrays, an element for each time.

    ``features`` by name; the logarithm of the time over what it was expected to be, and how many times the product's
    fastest it is.
    """

    features: dict[str, Any]
    left: np.ndarray
    slower: np.ndarray


class _Own(NamedTuple):
    """Hold the file's shapes as they are asked for, and of each time its kernel and the formula's microseconds."""

    asked: Asked
    kernels: Kernels
    us: np.ndarray


class _Taken(NamedTuple):
    """Times of a file, an element each: of which of its shapes, by which kernel, microseconds, and what was asked.

    Kernels are places in the menu, or behind it those of tiles; stages that these had ``once``, or 0.
    """

    of: np.ndarray
    at: np.ndarray
    us: np.ndarray
    asked: Asked
    once: np.ndarray

    def part(self, first: int, end: int | None) -> _Taken:
        """Return some in a row."""
        some = slice(first, end)
        return _Taken(self.of[some], self.at[some], self.us[some], self.asked.at(some), self.once[some])


def _product(m: int, n: int, k: int, nt: bool, a_row: int, b_row: int) -> Asked:
    """Tell products apart for which a kernel takes different times."""
    return Asked(int(by_the_eight(m)), int(n), int(k), bool(nt), int(a_row), int(b_row))


def _first(times: np.ndarray) -> np.ndarray:
    """Return the places of the CORRECTED least times, of those that are finite."""
    first = np.argpartition(times, min(CORRECTED, len(times) - 1))[:CORRECTED]
    return first[np.isfinite(times[first])]
