"""Write results: records as lines appended to a file that all measurements of one kind and GPU share.

A line is on disk, whole, before :func:`append` returns. A process that dies while it writes leaves a torn line, which
readers pass over (:mod:`harness.records.reading`); the next record begins on a line of its own.
"""

from __future__ import annotations

import fcntl
import os
from io import FileIO
from pathlib import Path

import msgspec

NEWLINE = b"\n"


class RecordError(ValueError):
    """A results file or folder that cannot be used; the message names the path and the remedy."""


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
            before = file.read()
            if before and not before.endswith(NEWLINE):
                line = NEWLINE + line  # what an interrupted write has left stays alone on its line
            try:
                _write_through(file, line)
            except OSError:
                os.ftruncate(file.fileno(), len(before))
                raise
    except OSError as error:
        raise _cannot_write(path, error) from error
    return f"{path}:{(before + line).count(NEWLINE)}"


def write_atomically(path: Path, text: str) -> Path:
    """Write a file under a temporary name, then rename it; RecordError if the folder cannot take it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with partial.open("wb", buffering=0) as file:
                _write_through(file, text.encode())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def check_writable(folder: Path) -> None:
    """Raise RecordError before anything is measured if ``folder`` cannot take a record."""
    probe = folder / f".write-test-{os.getpid()}"
    write_atomically(probe, "x" * 65536)
    probe.unlink()


def _write_through(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def _cannot_write(path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"cannot write {path.name} into {path.parent} ({error.strerror}); free space or give another --out"
    )
