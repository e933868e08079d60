"""Keep what an unfinished command has done, so that the same command started again goes on from there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from tensorir_ladder.harness.records.names import RecordError, path_name
from tensorir_ladder.harness.records.strict import decode
from tensorir_ladder.harness.records.writing import NEWLINE, cannot_write, write_through

if TYPE_CHECKING:
    from typing import Self

Entry = TypeVar("Entry")
REMEDY = "delete the file to start the command anew"


@dataclass(frozen=True)
class _Head:
    plan: str
    schema: Literal[1] = 1


class Journal(Generic[Entry]):
    """A file of JSON lines, ``.unfinished-NAME-DIGEST``: a plan's digest, then an entry for each part that is done.

    ``plan`` is all that the work follows from, as JSON has it: another plan has another file. ``entries`` are those
    that an interrupted run of the plan left, each read as a ``kind``; a line that was being written when that run was
    killed is taken off. One process has the file at a time, until it ends or leaves the ``with`` block.

    RecordError where another process has it, where it holds what is no entry, or where the folder takes no file.
    """

    def __init__(self, folder: Path, name: str, plan: Sequence[Any], kind: type[Entry]) -> None:
        digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
        self.path = folder / f".{path_name(f'unfinished-{name}-{digest[:16]}')}"
        self.entries: list[Entry] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _locked(self.path)
            self._read(_Head(digest), kind)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _read(self, head: _Head, kind: type[Entry]) -> None:
        try:
            *lines, torn = self._file.readall().split(NEWLINE)
            first = msgspec.json.encode(head)
            if lines and decode(lines[0], _Head, f"{self.path}:1", REMEDY) != head:
                raise RecordError(f"{self.path} is of another plan than its name says; {REMEDY}")
            if not lines and not first.startswith(torn):
                raise RecordError(f"{self.path} is no journal of an unfinished command; {REMEDY}")
            for number, line in enumerate(lines[1:], 2):
                self.entries.append(decode(line, kind, f"{self.path}:{number}", REMEDY))
            os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - len(torn))
            if not lines:
                write_through(self._file, first + NEWLINE)
        except BaseException:
            self._file.close()
            raise

    def add(self, entry: Entry) -> None:
        """Append an entry for a part that is done; it is on disk when this returns."""
        try:
            write_through(self._file, msgspec.json.encode(entry) + NEWLINE)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self.entries.append(entry)

    def finish(self) -> None:
        """Forget: all parts are done."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        """Let another process have the file; one without an entry goes away."""
        if not self._file.closed and not self.entries:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(path: Path) -> FileIO:
    """Open a file that no other process has; RecordError where one has it."""
    while True:
        file = path.open("ab+", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError as error:
            file.close()
            raise RecordError(
                f"another process runs this command into {path.parent} (it has {path.name}); wait for its end, or give "
                "another --out"
            ) from error
        except OSError:
            file.close()
            raise
        file.close()  # who had it has finished and removed it in between: take the next of that name
