"""Write results: records as lines appended to a file that all measurements of one kind and GPU share.

A line is on disk, whole, before :func:`append` returns. A process that dies while it writes leaves a torn line, which
readers pass over (:mod:`harness.records.reading`); the next record begins on a line of its own.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import msgspec

from tensorir_ladder.harness.records.names import RecordError
from tensorir_ladder.harness.records.strict import NotJson, parse

NEWLINE = b"\n"


def append(path: Path, record: object) -> str:
    """Append a record as one line of JSON; returns its place, ``FILE:LINE``. RecordError if the disk cannot take it.

    Safe where several processes append to one file: a lock keeps their lines apart. A record that would not fit is
    taken back, and the file stays as it was.
    """
    line = msgspec.json.encode(record) + NEWLINE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            before = file.readall()
            if before and not before.endswith(NEWLINE):
                line = NEWLINE + line  # what an interrupted write has left stays alone on its line
            write_through(file, line)
    except OSError as error:
        raise cannot_write(path, error) from error
    return f"{path}:{(before + line).count(NEWLINE)}"


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file under a temporary name, then rename it; RecordError if the folder cannot take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path) as file:
            write_through(file, content if isinstance(content, bytes) else content.encode())
            os.replace(file.name, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def check_writable(folder: Path) -> None:
    """Raise RecordError before anything is measured if ``folder`` cannot take a record; sweep what dead ones left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(".*.tmp"):
            owner = re.fullmatch(r"\..+\.(\d{1,9})\.tmp", path.name)
            if owner and not is_alive(int(owner[1])):
                path.unlink(missing_ok=True)
        with _temporary(folder / "write-test") as file:
            write_through(file, b"x" * 65536)
    except OSError as error:
        raise cannot_write(folder / "a record", error) from error


def check_appendable(path: Path, fields: Collection[str]) -> None:
    """Raise RecordError before the work if ``path`` cannot take its record, or holds others than such with ``fields``.

    A file that is not there yet is not made.
    """
    if path.suffix != ".jsonl" or path.name.startswith(".") or path.is_dir():
        raise RecordError(f"--out {path} is no file of records; give the name of a file of JSON lines, NAME.jsonl")
    check_writable(path.parent)
    if not path.exists():
        return
    if not path.is_file():
        raise RecordError(f"--out {path} is no ordinary file; give another --out")
    try:
        with path.open("ab+") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip() and not _has(line, f"{path}:{number}", fields):
                    lacking = f"line {number} lacks {' or '.join(fields)}"
                    raise RecordError(f"--out {path} holds other records ({lacking}); give another --out")
    except OSError as error:
        raise cannot_write(path, error) from error


def _has(line: bytes, place: str, fields: Collection[str]) -> bool:
    try:
        found = parse(line, place)
    except NotJson:
        return True  # what an interrupted write has left
    return isinstance(found, dict) and all(field in found for field in fields)


def is_alive(process: int) -> bool:
    """Tell if a process of this number runs here."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def write_through(file: FileIO, data: bytes) -> None:
    """Append to a file until the disk has it; OSError where it has not, and then the file is as it was."""
    before = os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())
    except OSError:
        os.ftruncate(file.fileno(), before)
        raise


def cannot_write(path: Path, error: OSError) -> RecordError:
    """Say which file could not be written and why."""
    return RecordError(
        f"cannot write {path.name} into {path.parent} ({error.strerror}); free space or give another --out"
    )


@contextmanager
def _temporary(path: Path) -> Iterator[FileIO]:
    """Open a new file beside ``path`` that says whose it is, and is gone afterwards."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb", buffering=0) as file:
            yield file
    finally:
        partial.unlink(missing_ok=True)
