"""Append what was measured to TVM's JSON database, which MetaSchedule reads: workloads, and tuning records of them.

TVM's own writer leaves half a line where it is killed or the disk is full, and cannot read that again. Here a line is
on disk whole, or the file is as it was.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

from tvm.s_tir import meta_schedule as ms

from tensorir_ladder.harness.fleet.building import workload_of
from tensorir_ladder.harness.records import RecordError
from tensorir_ladder.harness.records.writing import NEWLINE, cannot_write, write_through
from tensorir_ladder.schedules.workloads import Matmul

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"  # TVM's names in a work_dir


class TvmDatabase:
    """A folder that ``ms.database.JSONDatabase(work_dir=…)`` opens; RecordError where it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers: dict[Matmul, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (WORKLOADS, RECORDS):
                with _locked(folder / name) as file:
                    _cut_torn_line(file)
        except OSError as error:
            raise cannot_write(folder / RECORDS, error) from error

    def add(self, problem: Matmul, entry: str, seconds: float) -> None:
        """Append a tuning record, as :func:`.building.tuning_entry` made it, with its run time."""
        trace, _, target, arguments = json.loads(entry)
        record = [self._number(problem), [trace, [seconds], target, arguments]]
        self._append(RECORDS, record)

    def _number(self, problem: Matmul) -> int:
        """Return the number of a product's workload, which is its line, and append it where there is none."""
        if problem not in self._numbers:
            workload = workload_of(problem).as_json()
            path = self.folder / WORKLOADS
            try:
                with _locked(path) as file:
                    known = [line for line in file.readall().split(NEWLINE) if line]
                    own = json.dumps(workload).encode()
                    hashes = [json.loads(line)[0] for line in known]
                    if workload[0] not in hashes:
                        write_through(file, own + NEWLINE)
                        hashes.append(workload[0])
            except OSError as error:
                raise cannot_write(path, error) from error
            except (ValueError, IndexError, TypeError) as error:
                raise RecordError(f"{path} is no workload table of TVM's ({error}); delete or restore it") from error
            self._numbers[problem] = hashes.index(workload[0])
        return self._numbers[problem]

    def _append(self, name: str, value: object) -> None:
        path = self.folder / name
        try:
            with _locked(path) as file:
                write_through(file, json.dumps(value).encode() + NEWLINE)
        except OSError as error:
            raise cannot_write(path, error) from error

    def opened(self) -> ms.database.JSONDatabase:
        """Open it by TVM."""
        return ms.database.JSONDatabase(work_dir=str(self.folder))


def _locked(path: Path) -> FileIO:
    """Open a file for reading and appending; nobody else of this project has it until it is closed."""
    file = path.open("ab+", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
    except OSError:
        file.close()
        raise
    return file


def _cut_torn_line(file: FileIO) -> None:
    """Take off what a writer that was killed has left of a line."""
    whole = file.readall()
    with suppress(ValueError):
        os.ftruncate(file.fileno(), whole.rindex(NEWLINE) + 1 if NEWLINE in whole else 0)
