"""What a product takes by each kernel of the call's menu, in microseconds: one formula for all.

Kernels differ by step, tile, clusters, and by whether the last wave of tiles is cut (:mod:`kernels.stream_k`).
:func:`microseconds` counts the same for all of them, so that they can be compared; its constants are a GPU's
(``costs/``), fitted to times of the menu on shapes drawn for that. It is for an order: its constants have taken up what
it leaves out. :mod:`.one_tile` prices the other tiles of step 12; :mod:`.estimates` corrects both by what was measured.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.torch_ops.one_tile import across_lines, loaded_columns

if TYPE_CHECKING:
    from tensorir_ladder.torch_ops.choice import Choice

ITEMSIZE, SUM_BYTES, LINE = 2, 4, 64  # bytes of an operand's element and of a sum; elements of a cache line
PANEL_RESULTS = 64 * 64  # of a box

Positive = Annotated[float, msgspec.Meta(gt=0)]


class KernelRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of :func:`microseconds`; times in microseconds, rates per microsecond.

    ``launch`` of any kernel, until its first k tile is there; ``waits`` more where it begins only after the kernel
    before it; ``ring`` more where all its threads load and multiply in turn (step 11), ``pair`` more for clusters of
    two. ``turn`` of a k tile in any kernel, ``ring_turn`` more in step 11's, ``pair_turn`` more in a cluster's.
    ``multiply_adds`` of a multiprocessor, times the tile's ``efficiency``; ``load_bytes`` of one multiprocessor and
    ``all_load_bytes`` of all together, ``straddling`` or ``lines`` times as many where a tile's rows lie across cache
    lines (:func:`.one_tile.across_lines`), be it that the operand's do, or that its width has them begin so (of a B
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

    def tiles_of(self, m: Any, n: Any, batch: int = 1) -> np.ndarray:
        """Count the tiles of products; those that a cluster's blocks have together count as one."""
        return -(-m // self.rows) * -(-n // self.wide) * batch

    def waves(self, m: Any, n: Any, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Count the whole waves of tiles, and the tiles of the last one that is not whole."""
        return np.divmod(self.tiles_of(m, n, batch), self.workers)


class KTile:
    """Hold what a k tile takes in each kernel, where rows of the operands lie so: multiplying, loading, and its turn.

    ``all_busy`` is its time while all multiprocessors load. The elements that rows of A and B begin apart, and ``nt``
    (B is stored transposed), say which lie across cache lines.
    """

    def __init__(self, forms: Forms, a_row: Any, b_row: Any, nt: Any) -> None:
        f, r = forms, forms.rates
        a_factor = across_lines(a_row, 0, r.straddling, r.lines)
        b_factor = across_lines(b_row, f.block_n * ~np.asarray(nt, bool), r.straddling, r.lines)
        b_columns = loaded_columns(f.block_n, nt)
        self.rates, self.written = r, 1 + (r.writing_across - 1) * f.ragged
        self.multiplying = f.block_m * f.block_n * f.block_k / (r.multiply_adds * f.efficiency)
        self.brought = (f.block_m * a_factor / f.across + b_columns * b_factor / f.down) * f.block_k * ITEMSIZE
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


def streaming_microseconds(m: Any, n: Any, k: Any, nt: Any, rates: KernelRates) -> Any:
    """Return about how long a product of few rows or columns takes that streams the other operand."""
    more, few = np.maximum(m, n), np.minimum(m, n)
    streaming = more * k * (ITEMSIZE / rates.streamed_bytes) * (1 + rates.streamed_row * few)
    along = np.asarray(nt, bool) | (m > n)  # rows of A, streamed for few columns, run along k as well
    return rates.streamed_launch + streaming * np.where(along, 1.0, rates.streamed_across)
