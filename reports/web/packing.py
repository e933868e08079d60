"""Many texts that are much alike, in little room: each line is kept once, and a text is runs of them."""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from dataclasses import dataclass

from tensorir_ladder.harness.records import RecordError

LARGEST_BYTES = 2**24
MEMORY_BYTES = 2**27  # that unpacking may take


@dataclass(frozen=True)
class Packed:
    """Texts by their number, as static/compare.js puts them together.

    ``runs`` of a text are pairs, one after another: how many lines to skip from the end of the last run (or to go back,
    if negative), and how many to take.
    """

    lines: tuple[str, ...]
    runs: tuple[tuple[int, ...], ...]


def pack(texts: Iterable[str]) -> Packed:
    """Keep the lines of texts once each, and of each text the runs of them."""
    numbers: dict[str, int] = {}
    runs = [_runs([numbers.setdefault(line, len(numbers)) for line in text.split("\n")]) for text in texts]
    return Packed(tuple(numbers), tuple(runs))


def _runs(numbers: list[int]) -> tuple[int, ...]:
    found: list[int] = []
    place = 0
    for number in numbers:
        if found and number == place:
            found[-1] += 1
        else:
            found += [number - place, 1]
        place = number + 1
    return tuple(found)


def unpack_bytes(data: bytes, origin: str) -> bytes:
    """Decompress a file in xz's format; RecordError for one that is none, or larger than LARGEST_BYTES."""
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY_BYTES)
    try:
        content = reader.decompress(data, LARGEST_BYTES + 1)
    except lzma.LZMAError as error:
        raise RecordError(f"{origin} cannot be decompressed ({error}); restore it") from error
    if len(content) > LARGEST_BYTES:
        raise RecordError(f"{origin} has more than {LARGEST_BYTES} bytes when decompressed; restore it")
    if not reader.eof:
        raise RecordError(f"{origin} ends early; restore it")
    return content
