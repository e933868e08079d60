"""Work spread over processes that may crash or hang: each piece has a time limit, and what becomes of it is known."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
# A fresh interpreter: a process that has used CUDA, or has threads, cannot be copied.
CONTEXT = multiprocessing.get_context("spawn")
GRACE_S = 10  # for a process that was told to end


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Lost:
    """What is known of a piece of work whose process is gone: why, and what it said last that it was doing.

    ``hung``: it was killed for its time.
    """

    reason: str
    doing: str
    hung: bool = False


@dataclass
class _Worker(Generic[Item]):
    """A process with at most one piece of work, which it must have done by ``deadline``."""

    process: BaseProcess
    pipe: Connection
    item: Item | None = None
    doing: str = ""
    deadline: float = field(default=float("inf"))

    @classmethod
    def start(cls, work: Callable[[Item, Tell], Result]) -> _Worker[Item]:
        """A new process that waits for work."""
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(work, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, item: Item, limit_s: float) -> None:
        """Have a piece of work done from now on."""
        self.item, self.doing, self.deadline = item, "", time.monotonic() + limit_s
        self.pipe.send(item)

    def end(self) -> None:
        """Kill the process, whatever it does."""
        self.process.kill()
        self.process.join(GRACE_S)
        self.pipe.close()


def each_in_a_process(
    work: Callable[[Item, Tell], Result], items: Iterable[Item], jobs: int, limit_s: float
) -> Iterator[tuple[Item, Result | Lost]]:
    """``work(item, tell)`` of each item, in ``jobs`` processes side by side, in the order in which they are done.

    ``work`` is a module's function; items and results can be pickled; ``tell(text)`` says what it does next. A piece
    that takes more than ``limit_s`` seconds is killed; that, and a process that ends by itself or by an exception, is
    a :class:`Lost`. The next piece begins when the one before has been taken from the iterator; closing that ends all
    processes.
    """
    left = iter(items)
    workers: list[_Worker[Item]] = []
    try:
        for item in left:
            workers.append(_Worker.start(work))
            workers[-1].give(item, limit_s)
            if len(workers) == jobs:
                break
        while workers:
            worker, outcome = _next_done(workers, limit_s)
            yield worker.item, outcome
            following = next(left, None)
            if following is None or isinstance(outcome, Lost):
                worker.end()
                workers.remove(worker)
            if following is not None:
                if isinstance(outcome, Lost):
                    worker = _Worker.start(work)
                    workers.append(worker)
                worker.give(following, limit_s)
    finally:
        for worker in workers:
            worker.end()


def _next_done(workers: list[_Worker[Item]], limit_s: float) -> tuple[_Worker[Item], Result | Lost]:
    """The first worker that is done or beyond its time, and what became of its piece."""
    while True:
        first = min(workers, key=lambda worker: worker.deadline)
        ready = wait([worker.pipe for worker in workers], max(0.0, first.deadline - time.monotonic()))
        if not ready:
            return first, Lost(f"took more than {limit_s:.0f} s", first.doing, hung=True)
        worker = next(worker for worker in workers if worker.pipe in ready)
        try:
            done, value = worker.pipe.recv()
        except EOFError:
            worker.process.join(GRACE_S)
            return worker, Lost(f"its process ended with status {worker.process.exitcode}", worker.doing)
        if done:
            return worker, value
        worker.doing = value


def _serve(work: Callable[[Item, Tell], Result], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends this process

    def tell(text: str) -> None:
        """Have the parent know what is done next."""
        nonlocal doing
        doing = text
        pipe.send((False, text))

    while True:
        doing = ""
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, work(item, tell)))
        except Exception as error:
            pipe.send((True, Lost(f"{type(error).__name__}: {error}", doing)))
            raise
