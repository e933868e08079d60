"""Read results: the files of a folder, line by line, and of each case the record that counts.

A line that is no record is left out, and a warning says where it is, which field is wrong and why: what an interrupted
write has left, or what somebody altered. The others count.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tensorir_ladder.harness.records.kinds import (
    Counters,
    FleetRun,
    Listing,
    ModelRecord,
    Mutants,
    Record,
    ShapeRecord,
    StreamRecord,
    Timeline,
    TunedConfig,
)
from tensorir_ladder.harness.records.names import RecordError
from tensorir_ladder.harness.records.strict import LONGEST_LINE, decode, parse
from tensorir_ladder.harness.records.writing import NEWLINE

RESULTS = Path(__file__).resolve().parents[2] / "reports" / "results"
KINDS = (Record, ShapeRecord, StreamRecord, Timeline, Counters, TunedConfig, Mutants, ModelRecord, FleetRun)
Kind = TypeVar(
    "Kind", Record, ShapeRecord, StreamRecord, Timeline, Counters, TunedConfig, Mutants, ModelRecord, FleetRun
)
Content = TypeVar("Content")
log = logging.getLogger(__name__)


def read_places(folder: Path, kind: type[Kind]) -> dict[str, Kind]:
    """Read every record of a kind by its place, ``FILE:LINE``, oldest first; leave out what is none, with a warning."""
    if not folder.is_dir():
        raise RecordError(f"no results folder {folder}; measure something first or give another folder")
    found: dict[str, Kind] = {}
    for path in sorted(folder.glob(f"[!.]*-{kind.FILE}.jsonl")):
        for place, line in _lines(path):
            try:
                found[place] = kind.from_json(line, place)
            except RecordError as error:
                _warn_of(str(error))
    return dict(sorted(found.items(), key=lambda item: item[1].rank[1]))


def bad_lines(folder: Path) -> list[str]:
    """Say of each line that is no record where it stands, which field is wrong and why."""
    kinds = {kind.FILE: kind for kind in KINDS}
    found = []
    for path in sorted(folder.glob("[!.]*.jsonl")):
        kind = kinds.get(path.stem.rpartition("-")[2])
        for place, line in _lines(path):
            try:
                kind.from_json(line, place) if kind else parse(line, place)
            except RecordError as error:
                found.append(str(error))
    return found


def read_place(place: str) -> Record:
    """Read the record at ``FILE:LINE``; RecordError where there is none."""
    file, _, number = place.rpartition(":")
    if not file or not re.fullmatch(r"[1-9]\d{0,8}", number):
        raise RecordError(f"{place} is no place of a record; give FILE.jsonl:LINE, lines from 1 on")
    line = dict(_lines(Path(file))).get(f"{Path(file)}:{number}")
    if line is None:
        raise RecordError(f"{file} has no line {number}; give the number of another")
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


def load_shapes(folder: Path = RESULTS) -> list[ShapeRecord]:
    """Read the newest clean record of each drawn shape, by GPU, dtype, group and seed."""
    return sorted(_newest_in(folder, ShapeRecord), key=lambda r: (r.family, r.shape))


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


def load_models(folder: Path = RESULTS) -> list[ModelRecord]:
    """Read the newest clean record of each model, by GPU and model, smallest extent first."""
    return sorted(_newest_in(folder, ModelRecord), key=lambda r: (r.environment.gpu, r.model, r.value))


def load_listings(folder: Path = RESULTS) -> list[Listing]:
    """Read every listing that ``compile --out`` has written into the folder, by step, default variant first."""
    paths = sorted((folder / "listings").glob("[!.]*.json"))
    found = [Listing.from_json(_read(path), str(path)) for path in paths]
    return sorted(found, key=lambda listing: (listing.step, not listing.default_variant, listing.variant))


def read_file(path: Path, kind: type[Content], remedy: str) -> Content:
    """Read a file of JSON as a type; RecordError names the file, what is wrong, and the remedy."""
    return decode(_read(path), kind, str(path), remedy)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _cannot_read(path, error) from error


def _cannot_read(path: Path, error: OSError) -> RecordError:
    return RecordError(f"cannot read {path} ({error.strerror}); give a record's path, or restore the file")


@functools.cache  # once a process
def _warn_of(why: str) -> None:
    log.warning("%s; left out", why)


def _newest_in(folder: Path, kind: type[Kind]) -> Iterable[Kind]:
    return newest(read_places(folder, kind)).values()


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    # The lines that are not empty, by place; of one that is too long only the beginning, which decoding refuses.
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    return
                rest = line
                while rest and not rest.endswith(NEWLINE):
                    rest = file.readline(LONGEST_LINE)
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise _cannot_read(path, error) from error
