"""Who works for a search: processes that build, one for each core, and processes that ask servers, one for each GPU."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from typing import TYPE_CHECKING, Any

from tensorir_ladder.harness.fleet.building import NotBuilt
from tensorir_ladder.harness.fleet.errors import require_rpc
from tensorir_ladder.harness.fleet.processes import BuildSource, Process, ProcessLost

if TYPE_CHECKING:
    from typing import Self

BUILD_S = 300.0  # that a build may take
MOST_ATTEMPTS = 3  # to build, where the process ends meanwhile
LAST = float("inf")  # urgency of what tells a thread to end


class Crew:
    """Start ``jobs`` processes that build and ``askers`` that ask at once, while servers start elsewhere.

    They are copies of ``source``, or of one of its own. Leaving the ``with`` block, or :meth:`close`, ends them all.
    """

    def __init__(self, jobs: int, askers: int = 0, source: BuildSource | None = None) -> None:
        require_rpc()
        self._own_source = None if source else BuildSource()
        self.source = source or self._own_source
        self.lost, self._closed = 0, False
        self._work: PriorityQueue[tuple[float, int, Future, Callable[..., Any], tuple]] = PriorityQueue()
        self._numbers = itertools.count()
        self._asked: dict[tuple[Callable[..., Any], tuple], Future] = {}
        self.builders = [Process(behind=True, source=self.source) for _ in range(jobs)]
        for process in self.builders:
            threading.Thread(target=self._build, args=(process,), daemon=True).start()
        self.askers: list[Process] = []
        self.require_askers(askers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def require_askers(self, number: int) -> list[Process]:
        """Return so many processes that ask; those that lack are started."""
        while len(self.askers) < number:
            self.askers.append(Process(source=self.source))
            threading.Thread(target=_start, args=(self.askers[-1],), daemon=True).start()
        return self.askers[:number]

    def build(self, urgency: float, work: Callable[..., Any], *arguments: Any) -> Future:
        """Have a process do ``work(*arguments)``, once: the least ``urgency`` first, then what was asked for first.

        NotBuilt where no process lives to do it.
        """
        known = self._asked.get((work, arguments))
        if known is None:
            known = self._asked[work, arguments] = Future()
            self._work.put((urgency, next(self._numbers), known, work, arguments))
        return known

    def close(self) -> None:
        """End all processes; what was not built is not."""
        self._closed = True
        for number in range(len(self.builders)):
            self.build(LAST, int, number)  # which nobody does any more: who waits for work is woken
        for process in (*self.builders, *self.askers):
            process.close()
        if self._own_source:
            self._own_source.close()

    def _build(self, process: Process) -> None:
        _start(process)
        while not self._closed:
            _, _, future, work, arguments = self._work.get()
            try:
                future.set_result(self._built(process, work, arguments))
            except Exception as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)

    def _built(self, process: Process, work: Callable[..., Any], arguments: tuple) -> Any:
        """Have a process do it; one that ended is started again."""
        why = "the search ended"
        for _ in range(MOST_ATTEMPTS):
            if self._closed:
                break
            try:
                return process.ask(work, *arguments, limit_s=BUILD_S)
            except ProcessLost as error:
                self.lost, why = self.lost + 1, f"{error}, while it was built"
        return NotBuilt(why)


def _start(process: Process) -> None:
    try:
        process.start()
    except ProcessLost:
        return  # ended by who closes it; or else started again when it is asked
