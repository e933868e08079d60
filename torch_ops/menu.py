"""Estimate what a product takes by each kernel of a GPU's menu: one formula, corrected by trees.

A GPU's file (``costs/``, written by ``ladder calibrate``) has the menu, the formula's constants, the trees, and the
fastest kernel of each shape that was measured. All kernels are priced at once, as arrays.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from tvm.target import Target

from tensorir_ladder.gpus import COSTS, MODELLED, read
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.isa import PANEL, WGMMA_ROWS
from tensorir_ladder.schedules.trees import Trees
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.problem import KernelChoice
from tensorir_ladder.torch_ops.step_kernels import (
    EXCHANGED,
    FLEXIBLE,
    UPRIGHT,
    blocks_at_once,
    parse_kernel,
    stages_for,
    with_stages,
)

ITEMSIZE, SUM_BYTES = 2, 4  # bytes of an operand's element and of a sum
LINE, SECTOR, EIGHT = 64, 16, 8  # elements of a cache line and of its quarter; rows that wgmma takes at once
CORRECTED = 24  # kernels that the formula puts first, which the trees put in order
SHORTEST_PART = 256  # steps of the reduction in one part, at least
MOST_RESULTS = 40e6  # of a product that kernels of one tile a block are priced for: larger ones have many waves
ROLES, EXCHANGED_TILES, UPRIGHT_TILES, STREAMED = range(4)  # families

Positive = Annotated[float, msgspec.Meta(gt=0)]
Extent = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of :func:`microseconds`, fitted by ``ladder calibrate``; times in microseconds, rates per microsecond.

    ``launch`` of any kernel; ``waits`` more without early launch, ``cluster`` more in one. Of a k tile:
    ``multiply_adds`` of a multiprocessor; ``arriving_bytes`` at one of them, ``load_bytes`` while all load,
    ``straddling`` or ``lines`` times as long where rows begin within sectors or cache lines; ``zeros``, bytes of rows
    beyond the matrix; ``latency`` of a load; ``unhidden``, the part of the shorter of multiplying and loading that
    takes time; ``turn`` of a k tile, ``cluster_turn`` more for each doubling of a cluster. ``memory_bytes`` of the GPU,
    ``idle`` and ``uneven``: the powers by which memory is slower for few busy, or unevenly busy, multiprocessors;
    ``memory_unhidden`` as ``unhidden``. ``results`` stored by a multiprocessor; ``refill`` of each further round of
    blocks; ``join`` of parts, ``part`` more for each 64 × 64 sums; ``cut`` of the last wave, ``sums`` in bytes that a
    tile's owner reads. ``streamed_*`` of the kernel that streams weights: launch, bytes, the part that each row adds,
    and the factor for weights whose rows lie along the columns.
    """

    launch: Positive = 2.0
    waits: Positive = 0.5
    cluster: Positive = 0.2
    multiply_adds: Positive = 3.4e6
    arriving_bytes: Positive = 1.8e5
    load_bytes: Positive = 1.3e5
    straddling: Positive = 1.8
    lines: Positive = 1.3
    zeros: Positive = 1.3e5
    latency: Positive = 0.4
    unhidden: Positive = 0.2
    turn: Positive = 0.01
    cluster_turn: Positive = 0.01
    memory_bytes: Positive = 4.5e6
    idle: Positive = 0.2
    uneven: Positive = 0.2
    memory_unhidden: Positive = 0.3
    results: Positive = 1.5e4
    refill: Positive = 0.8
    join: Positive = 0.4
    part: Positive = 0.5
    cut: Positive = 1.5
    sums: Positive = 1.5e5
    streamed_launch: Positive = 3.0
    streamed_bytes: Positive = 3.0e6
    streamed_row: Positive = 0.03
    streamed_across: Positive = 1.1


class Sizes(NamedTuple):
    """A product as the formula takes it: ``nt`` where B is stored [n, k]; elements between rows of A and B.

    Fields may be arrays, an element for each of many products.
    """

    m: Any
    n: Any
    k: Any
    nt: Any
    a_row: Any
    b_row: Any

    @classmethod
    def of(cls, problem: Matmul, rows: tuple[int, int] | None = None) -> Sizes:
        """Return a problem's sizes; its rows have no gaps if ``rows`` is None."""
        nt = problem.layout == "nt"
        return cls(problem.m, problem.n, problem.k, nt, *(rows or (problem.k, problem.k if nt else problem.n)))


class Kernels(NamedTuple):
    """Kernels as the formula sees them, an element each.

    ``slots``: the clusters that the GPU holds at once with one block to a multiprocessor. ``stages`` of the ring and
    ``held``, the blocks that a multiprocessor holds, where several share one.
    """

    family: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    depth: np.ndarray
    parts: np.ndarray
    down: np.ndarray
    across: np.ndarray
    cuts: np.ndarray
    stays: np.ndarray
    slots: np.ndarray
    stages: np.ndarray
    held: np.ndarray

    @classmethod
    def of(cls, choices: list[KernelChoice | Streamed], multiprocessors: int, nt: bool) -> Kernels:
        """Describe choices as :func:`.step_kernels.parse_kernel` reads them; ``nt``: B is stored [n, k]."""
        return cls(*np.array([_described(each, multiprocessors, nt) for each in choices], float).reshape(-1, 12).T)

    def at(self, places: np.ndarray) -> Kernels:
        """Return some of them, in their order."""
        return Kernels(*(each[places] for each in self))

    @property
    def cluster(self) -> np.ndarray:
        """Blocks of a cluster."""
        return self.down * self.across * self.parts

    def tiles(self, m: Any, n: Any) -> np.ndarray:
        """Count a product's tiles; those that a cluster's blocks have together count as one."""
        return np.ceil(m / (self.rows * self.down)) * np.ceil(n / (self.columns * self.across))


def _described(choice: KernelChoice | Streamed, multiprocessors: int, nt: bool) -> tuple[float, ...]:
    if isinstance(choice, Streamed):
        return (STREAMED, *(1,) * 6, 0, 0, multiprocessors, 2, 1)
    tile, kernel = choice.tile, choice.kernel
    family = {EXCHANGED: EXCHANGED_TILES, UPRIGHT: UPRIGHT_TILES}.get(kernel, ROLES)
    down, across = tile.cluster
    down *= kernel.blocks or 1
    cluster = down * across * tile.parts
    slots = blocks_at_once(cluster, multiprocessors) // cluster
    stages = choice.stages or stages_for(choice, nt, shares=True)
    held = tile.resident(ITEMSIZE, stages) if kernel is EXCHANGED else 1
    return (family, *tile.block, tile.parts, down, across, kernel.cuts, kernel.stays, slots, stages, held)


def microseconds(
    kernels: Kernels, sizes: Sizes, constants: Constants, multiprocessors: int, batch: int = 1
) -> np.ndarray:
    """Return about how long each kernel takes for ``batch`` products: good for an order.

    ::

        k tile   = the longer of multiplying and loading it, a part of the other, and a turn of the ring
        loop     = waves of tiles · k tiles · k tile; a cut last wave takes its longest piece, and handing over sums
        in all   = the longer of the loop and reading both operands once, a part of the other
                   + launch + storing + refilling between rounds of blocks + joining parts

    Few busy multiprocessors share the bandwidth of all. A product of few rows or columns whose weights are streamed
    takes as long as these are read. Sizes may be arrays, an element for each kernel. Infinite for kernels that cannot
    take the product: pairs that would share less than whole panels of B stored [k, n], and parts that are too short.
    """
    t, c, (m, n, k, nt, a_row, b_row) = kernels, constants, sizes
    nt, exchanged = np.asarray(nt, bool), t.family == EXCHANGED_TILES
    tiles, step = t.tiles(m, n) * batch, t.depth * ITEMSIZE
    waves, last = np.divmod(tiles, t.slots)
    some, busy = last > 0, np.minimum(last * t.cluster / multiprocessors, 1.0)
    width, side = np.where(exchanged, (t.rows, t.columns), (t.columns, t.rows))
    # wgmma reads its 64 rows of shared memory whatever its width is.
    multiplying = side * t.depth * np.maximum(width, (width + WGMMA_ROWS) / 2) / c.multiply_adds
    along = t.columns * (~exchanged & ~nt & (t.columns < n))  # where rows of B's tiles begin
    a_lines, b_lines = _lines(a_row, 0, c), _lines(b_row, along, c)
    b_columns = np.where(nt | exchanged, np.minimum(t.columns, n), np.ceil(t.columns / PANEL) * PANEL)
    loaded = (np.minimum(t.rows, m) * a_lines / t.across + b_columns * b_lines / t.down) * step
    arriving = (t.rows + t.columns) * step / c.arriving_bytes
    beyond = (np.maximum(0, t.rows - m) + np.maximum(0, t.columns - n) * nt) * step / c.zeros
    turn = c.turn + c.cluster_turn * np.log2(t.cluster)

    def k_tile(busy: Any, together: Any) -> np.ndarray:
        loading = np.maximum(loaded * busy / c.load_bytes, arriving) + beyond
        loading = np.maximum(loading, c.latency / ((t.stages - 1) * together))
        return np.maximum(multiplying, loading) + c.unhidden * np.minimum(multiplying, loading) + turn

    k_tiles = np.ceil(k / (t.depth * t.parts))
    whole = k_tile(1.0, np.clip(np.ceil(tiles / t.slots), 1, t.held))
    owned = np.maximum(last, 1)
    piece = np.maximum(last / t.slots, 1 / np.maximum(1, np.minimum(t.slots // owned, k_tiles / 8)))
    ending = some * np.where(t.cuts > 0, whole * piece, k_tile(busy, 1))
    loop = k_tiles * (waves * whole + ending) + t.cuts * (c.cut + t.rows * t.columns * SUM_BYTES / c.sums)
    first = waves == 0
    slower = np.where(first, np.maximum(busy, 1e-3) ** -c.idle * (t.slots / np.maximum(tiles, 1)) ** c.uneven, 1.0)
    reading = ((m + n) * k + m * n) * (batch * ITEMSIZE / c.memory_bytes) * slower
    rounds = waves + some
    stored = np.minimum(t.rows, m) * np.minimum(t.columns, n) / (c.results * t.parts)
    storing = np.where(t.stays > 0, stored, rounds * stored + (np.ceil(rounds / t.held) - 1) * c.refill)
    joining = (t.parts > 1) * c.join + (1 - 1 / t.parts) * side * width * (c.part / WGMMA_ROWS**2)
    early = (t.stays > 0) | (t.family != ROLES)
    around = storing + joining + c.launch + c.waits * ~early + c.cluster * (t.cluster > 1)
    us = np.maximum(loop, reading) + c.memory_unhidden * np.minimum(loop, reading) + around
    unshared = (t.family == ROLES) & (t.down > 1) & ~nt & (t.columns % (t.down * LINE) != 0)
    short = (t.parts > 1) & (k < t.parts * np.maximum(2 * t.depth, SHORTEST_PART))
    large = (t.family > ROLES) & (batch * m * n > MOST_RESULTS)
    us = np.where(unshared | short | large, np.inf, us)
    return np.where(t.family == STREAMED, _streaming(sizes, c), us)


def _lines(row: Any, width: Any, constants: Constants) -> Any:
    """Return how many times as long loads take whose rows lie across cache lines; tiles begin at multiples of width."""
    across = np.where((row % LINE) + (width % LINE), constants.lines, 1.0)
    return np.where((row % SECTOR) + (width % SECTOR), constants.straddling, across)


def _streaming(sizes: Sizes, constants: Constants) -> Any:
    (m, n, k, nt, *_), c = sizes, constants
    more, few = np.maximum(m, n), np.minimum(m, n)
    along = np.asarray(nt, bool) | (m > n)  # rows of A, streamed for few columns, run along k as well
    streaming = more * k * (ITEMSIZE / c.streamed_bytes) * (1 + c.streamed_row * few)
    return c.streamed_launch + streaming * np.where(along, 1.0, c.streamed_across)


def features(kernels: Kernels, sizes: Sizes, us: np.ndarray, batch: int = 1) -> dict[str, Any]:
    """Return by name what the trees ask of kernels for a product, numbers or arrays; ``us`` by the formula.

    A batch is to them one product of all rows, of which only the edges of tiles are those of each: they were grown over
    single products.
    """
    t, (m, n, k, nt, a_row, b_row) = kernels, sizes
    waves = batch * t.tiles(m, n) / t.slots
    down, across = np.ceil(m / t.rows), np.ceil(n / t.columns)
    return {
        **t._asdict(),
        "m": batch * m,
        "n": n,
        "k": k,
        "nt": nt,
        "a_across_lines": np.mod(a_row, LINE) != 0,
        "b_across_lines": np.mod(b_row, LINE) != 0,
        "a_within_sectors": np.mod(a_row, SECTOR) != 0,
        "b_within_sectors": np.mod(b_row, SECTOR) != 0,
        "waves": waves,
        "last_wave": np.mod(waves, 1),
        "unfilled": np.ceil(waves) / waves,
        "rows_of_last": np.mod(m, t.rows),
        "columns_of_last": np.mod(n, t.columns),
        "columns_of_last_line": np.mod(n, LINE),
        "k_of_last_line": np.mod(k, LINE),
        "rows_beyond": down * t.rows / m,
        "columns_beyond": across * t.columns / n,
        "last_down": np.mod(down, t.down),
        "last_across": np.mod(across, t.across),
        "k_tiles": np.ceil(k / (t.depth * t.parts)),
        "tile": t.rows * t.columns,
        "results": batch * np.asarray(m, float) * n,
        "operands": batch * (np.asarray(m, float) + n) * k,
        "formula_us": us,
    }


class Fastest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A measured shape: its fastest kernel, by its place in the file's list, and microseconds."""

    m: Extent
    n: Extent
    k: Extent
    layout: str
    kernel: int
    us: Positive

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"no layout {self.layout!r}")


class MenuFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU's menu: names of kernels, the first ``menu`` of which are chosen among, and all that chooses among them."""

    gpu: str
    multiprocessors: Extent
    origin: str
    constants: Constants
    kernels: tuple[str, ...]
    menu: int
    fastest: tuple[Fastest, ...]
    trees: Trees

    def __post_init__(self) -> None:
        if not 0 < self.menu <= len(self.kernels):
            raise ValueError(f"a menu of {self.menu} of {len(self.kernels)} kernels")
        if not all(0 <= each.kernel < len(self.kernels) for each in self.fastest):
            raise ValueError("a shape's fastest kernel is not listed")


def read_menu(gpu: str) -> MenuFile:
    """Read a GPU's menu, or that of ``gpus.MODELLED`` where it has none; DamagedFile names a bad file."""
    path = path_of(gpu)
    return read(path if path.exists() else path_of(MODELLED), MenuFile)


def path_of(gpu: str) -> Path:
    """Return where a GPU's menu lies."""
    return COSTS / f"{gpu.lower().replace(' ', '-').replace('/', '-')}.json"


def by_the_eight(m: Any) -> Any:
    """Round rows up to what kernels take: beyond eight they come by the eight."""
    return np.where(np.asarray(m) <= EIGHT, m, -(-np.asarray(m) // EIGHT) * EIGHT)


class Menu:
    """The kernels that products may take on a GPU, and what each is estimated to take.

    ``streamed``, ``in_parts`` and ``flexible`` tell which kernels of ``kernels`` stream weights, sum the reduction in
    parts, and take any number of rows.

    Raises IllegalTile where the target can hold none, with what is wrong with the first.
    """

    def __init__(self, file: MenuFile, target: Target, multiprocessors: int, gpu: str = "") -> None:
        self._file, self._multiprocessors = file, multiprocessors
        choices = [parse_kernel(name) for name in file.kernels[: file.menu]]
        violations = [_violations(each, target) for each in choices]
        self.kernels = [each for each, found in zip(choices, violations) if not found]
        if not any(isinstance(each, KernelChoice) for each in self.kernels):
            raise IllegalTile("no kernel fits this target: " + "; ".join(violations[0]), remedy="run on an sm_90a GPU")
        self.streamed = np.array([isinstance(each, Streamed) for each in self.kernels])
        self.in_parts = np.array([isinstance(each, KernelChoice) and each.tile.parts > 1 for each in self.kernels])
        self.flexible = np.array([str(each) in FLEXIBLE for each in self.kernels])
        self._arrays = functools.cache(functools.partial(Kernels.of, self.kernels, multiprocessors))
        own = file.fastest if gpu == file.gpu else ()
        self._fastest = {(int(by_the_eight(each.m)), each.n, each.k, each.layout): each for each in own}
        self._fastest |= {(each.m, each.n, each.k, each.layout): each for each in own}

    def times(
        self, problem: Matmul, batch: int = 1, rows: tuple[int, int] | None = None, able: np.ndarray | None = None
    ) -> np.ndarray:
        """Estimate microseconds of each kernel; infinite where it cannot take the product, or is not ``able``.

        The trees put the CORRECTED kernels that the formula puts first in order; all others stay behind these.
        """
        sizes = Sizes.of(problem, rows)
        arrays = self._arrays(sizes.nt)
        us = microseconds(arrays, sizes, self._file.constants, self._multiprocessors, batch)
        us = us if able is None else np.where(able, us, np.inf)
        first = np.argsort(us)[:CORRECTED]
        first = first[np.isfinite(us[first])]
        trees = self._file.trees
        corrected = us[first] * np.exp(trees.predict(features(arrays.at(first), sizes, us[first], batch)))
        us = np.maximum(us, corrected.max(initial=0.0))
        us[first] = corrected
        return us

    def fastest(self, problem: Matmul) -> tuple[KernelChoice | Streamed, float] | None:
        """Return the kernel that was measured to be fastest for this very shape, and its microseconds.

        Or for its rows rounded up to the eight that kernels take.
        """
        shape = problem.n, problem.k, problem.layout
        found = self._fastest.get((problem.m, *shape)) or self._fastest.get((int(by_the_eight(problem.m)), *shape))
        if found is None:
            return None
        return self.built(parse_kernel(self._file.kernels[found.kernel]), problem), found.us

    def built(self, choice: KernelChoice | Streamed, problem: Matmul, batch: int = 1) -> KernelChoice | Streamed:
        """Return a kernel with the stages that it has for a batch of a product."""
        return (
            with_stages(choice, problem, self._multiprocessors, batch) if isinstance(choice, KernelChoice) else choice
        )


def _violations(choice: KernelChoice | Streamed, target: Target) -> list[str]:
    if isinstance(choice, Streamed):
        return []
    return choice.tile.violations(target, ITEMSIZE, choice.stages or stages_for(choice, nt=False, shares=False))


@functools.cache
def menu_of(target_text: str, gpu: str, multiprocessors: int) -> Menu:
    """Prepare a GPU's menu; the target is given as its text, which is the same for two of the same GPU."""
    return Menu(read_menu(gpu), Target(json.loads(target_text)), multiprocessors, gpu)
