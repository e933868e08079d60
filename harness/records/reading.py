"""Read results: the files of a folder, line by line, and of each case the record that counts.

A record that is not as it should be is refused, by file and line. A line that is no whole JSON is what an interrupted
write has left: it is passed over, and a warning says where it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from tensorir_ladder.harness.records.kinds import Counters, Listing, Record, StreamRecord, Timeline, TunedConfig
from tensorir_ladder.harness.records.writing import NEWLINE, RecordError

RESULTS = Path(__file__).resolve().parents[2] / "reports" / "results"
Kind = TypeVar("Kind", Record, StreamRecord, Timeline, Counters, TunedConfig)
log = logging.getLogger(__name__)


def read_places(folder: Path, kind: type[Kind]) -> dict[str, Kind]:
    """Read every record of a kind by its place, ``FILE:LINE``, oldest first; RecordError names what is none."""
    if not folder.is_dir():
        raise RecordError(f"no results folder {folder}; measure something first or give another folder")
    found: dict[str, Kind] = {}
    for path in sorted(folder.glob(f"[!.]*-{kind.FILE}.jsonl")):
        whole, torn = _lines(path)
        found |= {f"{path}:{number}": kind.from_json(line, f"{path}:{number}") for number, line in whole.items()}
        for number in torn:
            _warn_of(f"{path}:{number}")
    return dict(sorted(found.items(), key=lambda item: item[1].rank[1]))


def torn_lines(folder: Path) -> list[str]:
    """Find the places of lines that are no whole JSON."""
    return [f"{path}:{number}" for path in sorted(folder.glob("[!.]*.jsonl")) for number in _lines(path)[1]]


def read_place(place: str) -> Record:
    """Read the record at ``FILE:LINE``; RecordError where there is none."""
    file, _, number = place.rpartition(":")
    if not file or not number.isdecimal():
        raise RecordError(f"{place} is no place of a record; give FILE.jsonl:LINE, lines from 1 on")
    line = _lines(Path(file))[0].get(int(number))
    if line is None:
        raise RecordError(f"{file} has no whole line {number}; give the number of another")
    return Record.from_json(line, place)


def newest(places: dict[str, Kind]) -> dict[str, Kind]:
    """Keep of each key the record that counts: the one of the highest rank, the later line of equals."""
    best: dict[tuple[object, ...], str] = {}
    for place, record in places.items():
        rival = best.get(record.key)
        if rival is None or record.rank >= places[rival].rank:
            best[record.key] = place
    return {place: places[place] for place in best.values()}


def load_records(folder: Path = RESULTS) -> Iterator[Record]:
    """Read every record of a step and every calibration, oldest first."""
    yield from read_places(folder, Record).values()


def load_streams(folder: Path = RESULTS) -> list[StreamRecord]:
    """Read the newest clean record of each memory-bound case, by workload, shape and stages."""
    return sorted(_newest_in(folder, StreamRecord), key=lambda r: (r.workload, r.shape, r.variant, r.stages))


def load_timelines(folder: Path = RESULTS) -> list[Timeline]:
    """Read the newest clean timeline of each case, by step, shape and stages."""
    return sorted(_newest_in(folder, Timeline), key=lambda t: (t.step, str(t.family), t.stages))


def load_counters(folder: Path = RESULTS) -> list[Counters]:
    """Read the newest counters of each case, by step, shape and tile."""
    return sorted(_newest_in(folder, Counters), key=lambda c: (c.step, c.m, c.n, c.k, c.tile))


def load_tuned(folder: Path = RESULTS) -> list[TunedConfig]:
    """Read the newest tuned configuration of each case, by GPU, step and size."""
    order = _newest_in(folder, TunedConfig)
    return sorted(order, key=lambda t: (t.environment.gpu, t.dtype, t.layout, t.step, t.m * t.n * t.k, t.m, t.n))


def load_listings(folder: Path = RESULTS) -> list[Listing]:
    """Read every listing that ``compile --out`` has written into the folder, by step, default variant first."""
    paths = sorted((folder / "listings").glob("[!.]*.json"))
    found = [Listing.from_json(_read(path), str(path)) for path in paths]
    return sorted(found, key=lambda listing: (listing.step, not listing.default_variant, listing.variant))


def read_text(path: Path) -> str:
    """Read a results file; RecordError names the file where it cannot be read or is not text."""
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"cannot read {path} ({error}); restore the file") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path} ({error}); give a record's path, or restore the file") from error


@functools.cache  # once a process
def _warn_of(place: str) -> None:
    log.warning("%s is not whole, as an interrupted write leaves it, and passed over", place)


def _newest_in(folder: Path, kind: type[Kind]) -> Iterable[Kind]:
    return newest(read_places(folder, kind)).values()


def _lines(path: Path) -> tuple[dict[int, bytes], list[int]]:
    # The lines that are whole JSON, by number from 1 on; and the numbers of those that are torn.
    whole: dict[int, bytes] = {}
    torn = []
    for number, line in enumerate(_read(path).split(NEWLINE), 1):
        if not line.strip():
            continue
        try:
            msgspec.json.decode(line, type=msgspec.Raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # of brackets in brackets without end
            torn.append(number)
        else:
            whole[number] = line
    return whole, torn
