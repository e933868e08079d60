"""Do work in processes that may crash or hang: each piece has a time limit, and costs itself alone.

No process outlives the one that asked for it, even if that is killed; folders that it leaves are swept by the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, TimeoutError, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

from tensorir_ladder.harness.fleet.working import PR_SET_PDEATHSIG
from tensorir_ladder.harness.records.writing import is_alive

Item = TypeVar("Item")
Result = TypeVar("Result")
Tell = Callable[[str], object]
# A fresh interpreter: a process that has used CUDA, or has threads, cannot be copied.
CONTEXT = multiprocessing.get_context("spawn")
FAILED = 1
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # of NumPy's; read when it is imported
NOTES = "tensorir-ladder-"  # and the process's number: a folder of what pieces of work say


@dataclass(frozen=True)
class Lost:
    """A piece of work whose process is gone: why, and what it said last that it was doing.

    ``hung``: it was killed for its time.
    """

    reason: str
    doing: str
    hung: bool = False


def each_in_a_process(
    work: Callable[[Item, Tell], Result], items: Iterable[Item], jobs: int, limit_s: float
) -> Iterator[tuple[Item, Result | Lost]]:
    """Do ``work(item, tell)`` of each item, in ``jobs`` processes side by side, in the order in which they are done.

    ``work`` is a module's function; items and results can be pickled; ``tell(text)`` says what it does next. A piece
    that takes more than ``limit_s`` seconds is killed; that, and a process that ends by itself or by an exception, is
    a :class:`Lost`. Closing the iterator ends all processes.
    """
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{NOTES}{os.getpid()}-") as notes, _one_thread_each():
        # Each process imports the work's module as it begins, all at once: later only one at a time takes a piece.
        pool = ProcessPool(jobs, initializer=_begin, initargs=(os.getpid(), work), context=CONTEXT)
        try:
            pieces = {}
            for number, item in enumerate(items):
                note = Path(notes, str(number))
                pieces[pool.schedule(_do, (work, item, note), timeout=limit_s)] = item, note
            for done in as_completed(pieces):
                item, note = pieces[done]
                yield item, _outcome(done, note, limit_s)
        finally:
            pool.stop()
            pool.join()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Have processes that are started meanwhile multiply and solve by one thread each.

    With as many threads as there are cores, 15 processes on 16 cores chose a kernel ten times as slowly.
    """
    before = {name: os.environ.get(name) for name in BLAS_THREADS}
    os.environ.update(dict.fromkeys(BLAS_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _begin(parent: int, _work: Callable[..., object]) -> None:
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way: for the initializer of a pool.

    More exactly, when the parent's thread ends that started it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked for
        os._exit(FAILED)


def _sweep(folder: Path) -> None:
    # What killed processes of this user have left.
    for path in folder.glob(f"{NOTES}*"):
        owner = re.match(rf"{NOTES}(\d{{1,9}})-", path.name)
        if owner and not is_alive(int(owner[1])) and not path.is_symlink() and path.stat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def _outcome(done: Future[Result], note: Path, limit_s: float) -> Result | Lost:
    try:
        return done.result()
    except TimeoutError:
        return Lost(f"took more than {limit_s:.0f} s", _read(note), hung=True)
    except ProcessExpired as gone:
        return Lost(_read(_failure(note)) or f"its process ended with status {gone.exitcode}", _read(note))


def _do(work: Callable[[Item, Tell], Result], item: Item, note: Path) -> Result:
    try:
        return work(item, note.write_text)
    except Exception as error:  # noqa: BLE001 - its process ends with it, and the caller is told
        # What failed may have spoiled its process for others, as a fault on a GPU does.
        traceback.print_exc()
        _failure(note).write_text(f"{type(error).__name__}: {error}")
        os._exit(FAILED)


def _failure(note: Path) -> Path:
    return note.with_suffix(".failure")


def _read(note: Path) -> str:
    return note.read_text() if note.exists() else ""
