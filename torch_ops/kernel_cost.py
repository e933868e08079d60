"""What a product takes by each of the explicit kernels, in microseconds: one formula for the call's whole menu.

Kernels differ by step, tile, clusters, and by whether the last wave of tiles is cut (:mod:`kernels.stream_k`). The
formula counts the same for all of them, so that they can be compared; its constants are a GPU's (:class:`KernelRates`,
``costs/``), fitted to times of the menu on shapes that were drawn for that. It is for an order: half its constants have
taken up what it leaves out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensorir_ladder.torch_ops.errors import DamagedFile
from tensorir_ladder.torch_ops.rates import MODELLED, read

COSTS = Path(__file__).parent / "costs"
ITEMSIZE, SUM_BYTES, LINE = 2, 4, 64  # bytes of an operand's element and of a sum; elements of a cache line


class KernelRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Constants of :func:`microseconds`; times in microseconds, rates per microsecond and multiprocessor.

    ``launch`` of any kernel, until its first k tile is there; ``waits`` more where it begins only after the kernel
    before it; ``ring`` more where all its threads load and multiply in turn (step 11). ``turn`` of a k tile, in any
    kernel, and ``ring_turn`` of step 11's; ``pair_turn`` of one that a cluster's two blocks load together.
    ``multiply_adds``, times the tile's ``efficiency`` (1 for tiles that were not fitted); ``load_bytes``, which count
    ``straddling`` times where rows lie across cache lines; ``unhidden``, the part of the shorter of both that takes
    time. ``results`` stored, by kernels that do not stay once a tile, by the others once; ``refill`` between tiles of
    those that do not stay. ``cut`` of the last wave, ``cut_first`` where no wave is before it; ``sums`` in bytes that
    an owner reads. ``memory_bytes`` of the whole GPU, and ``memory_unhidden``, the part of the shorter of reading and
    multiplying that takes time. ``streamed_launch``, ``streamed_bytes`` and ``streamed_row`` (a part of the time, for
    each row) of the kernel that streams weights (:mod:`.few_rows`).
    """

    launch: float
    waits: float
    ring: float
    turn: float
    ring_turn: float
    pair_turn: float
    multiply_adds: float
    load_bytes: float
    straddling: float
    unhidden: float
    results: float
    refill: float
    cut: float
    cut_first: float
    sums: float
    memory_bytes: float
    memory_unhidden: float
    streamed_launch: float
    streamed_bytes: float
    streamed_row: float
    efficiency: dict[str, float]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    gpu: str
    origin: str
    rates: KernelRates


@functools.cache
def kernel_rates(gpu: str) -> KernelRates:
    """Return a GPU's constants, or those of ``rates.MODELLED`` where it has none; DamagedFile names a bad file."""
    files = {file.gpu: file.rates for file in (read(path, _File) for path in sorted(COSTS.glob("*.json")))}
    if MODELLED not in files:
        raise DamagedFile(f"{COSTS} has no file of the {MODELLED}; restore it from git, or install the package again")
    return files.get(gpu, files[MODELLED])


@dataclass(frozen=True)
class Forms:
    """Kernels as the formula sees them, an element each: block tiles, clusters, and which kind each is.

    ``boxes`` are the fewest k tiles of a piece of a tile that is cut. ``stays``: persistent blocks; ``ring``: step 11.
    """

    block_m: np.ndarray
    block_n: np.ndarray
    block_k: np.ndarray
    blocks: np.ndarray
    boxes: np.ndarray
    efficiency: np.ndarray
    cuts: np.ndarray
    stays: np.ndarray
    ring: np.ndarray

    @classmethod
    def of(cls, choices: Sequence[Any], rates: KernelRates) -> Forms:
        """Describe choices (:class:`.choice.Choice`)."""
        tiles, kernels = [each.tile for each in choices], [each.kernel for each in choices]
        numbers = (
            [tile.block_m for tile in tiles],
            [tile.block_n for tile in tiles],
            [tile.block_k for tile in tiles],
            [kernel.blocks or 1 for kernel in kernels],
            [max(1, tile.group_m * tile.group_n // LINE**2) for tile in tiles],
        )
        efficiency = [rates.efficiency.get(str(tile), 1.0) for tile in tiles]
        flags = ([k.cuts for k in kernels], [k.stays for k in kernels], [k.step == 11 for k in kernels])
        return cls(*map(np.array, numbers), np.array(efficiency), *(np.array(flag, float) for flag in flags))


def microseconds(
    forms: Forms, m: Any, n: Any, k: Any, nt: Any, multiprocessors: int, rates: KernelRates, batch: int = 1
) -> np.ndarray:
    """Return about how long each kernel takes for ``batch`` products; ``nt`` for a B stored transposed.

    ::

        k tile   = the longer of multiplying and loading it, a part of the other, and a turn of the ring
        loop     = waves of tiles · k tiles · k tile;  of a cut last wave only the longest piece, and handing over
        in all   = the longer of the loop and reading both operands once, a part of the other, launch and storing

    Sizes may be arrays too, an element for each kernel.
    """
    f, r = forms, rates
    tiles = -(-m // (f.block_m * f.blocks)) * -(-n // f.block_n) * batch
    k_tiles = -(-k // f.block_k)
    workers = multiprocessors // f.blocks
    waves, owned = tiles // workers, tiles % workers
    multiplying = f.block_m * f.block_n * f.block_k / (r.multiply_adds * f.efficiency)
    a_factor = 1 + (r.straddling - 1) * (k % LINE != 0)
    b_factor = np.where(nt, a_factor, 1 + (r.straddling - 1) * (n % LINE != 0))
    loading = (f.block_m * a_factor + f.block_n * b_factor / f.blocks) * f.block_k * (ITEMSIZE / r.load_bytes)
    turn = r.turn + r.ring_turn * f.ring + r.pair_turn * (f.blocks - 1)
    k_tile = np.maximum(multiplying, loading) + r.unhidden * np.minimum(multiplying, loading) + turn
    # A cut last wave: in equal parts where workers are twice the tiles, else some of them help all the others.
    left = np.maximum(owned, 1)
    parts = np.maximum(1, np.minimum(workers // left, k_tiles // (2 * f.boxes)))
    helped = np.where(parts > 1, 1 / parts, left / np.minimum(workers, 2 * left))
    heard = np.maximum(parts - 1, 1)
    handing = r.cut + r.cut_first * (waves == 0) + heard * f.block_m * f.block_n * SUM_BYTES / r.sums
    loop = (waves + np.where(f.cuts > 0, helped, 1) * (owned > 0)) * k_tiles * k_tile + f.cuts * handing
    reading = (m + n) * k * (batch * ITEMSIZE / r.memory_bytes)
    rounds = np.where(f.stays > 0, 1, waves + (owned > 0))
    storing = rounds * f.block_m * f.block_n / r.results + (rounds - 1) * r.refill
    begin = r.launch + r.waits * (1 - f.stays) + r.ring * f.ring
    return np.maximum(loop, reading) + r.memory_unhidden * np.minimum(loop, reading) + storing + begin


def streaming_microseconds(rows: Any, columns: Any, k: Any, rates: KernelRates) -> Any:
    """Return about how long a product of few rows takes that streams its weights."""
    streaming = columns * k * ITEMSIZE / rates.streamed_bytes
    return rates.streamed_launch + streaming * (1 + rates.streamed_row * rows)
