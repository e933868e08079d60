"""Start servers on this host, a process for each GPU, and a tracker if there is none; watch them; end them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pynvml

from tensorir_ladder.harness.execution import arch_of
from tensorir_ladder.harness.fleet.asking import Tracker
from tensorir_ladder.harness.fleet.errors import FleetError, require_rpc
from tensorir_ladder.harness.fleet.processes import Process, ProcessLost
from tensorir_ladder.harness.fleet.serving import start_server
from tensorir_ladder.harness.fleet.starting import Parts
from tensorir_ladder.harness.fleet.tracking import start_tracker
from tensorir_ladder.harness.machines import DEFAULT_ARCH, GpuSpec, UnknownTarget, machine_for

if TYPE_CHECKING:
    from typing import Self

LOOPBACK = "127.0.0.1"
START_S = 120.0  # that starting may take: torch is imported
MOST_RESTARTS = 5  # of one process
LOOK_S = 0.3


def likely_machine(place: str, device: str) -> GpuSpec | None:
    """Describe the machine of a server's device before that server can; None where it takes more than NVML."""
    if place == "llvm":
        return machine_for(DEFAULT_ARCH)
    try:
        pynvml.nvmlInit()
        by_number = pynvml.nvmlDeviceGetHandleByIndex(int(device)) if device.isdigit() else None
        gpu = by_number or pynvml.nvmlDeviceGetHandleByUUID(device)
        arch = arch_of(*pynvml.nvmlDeviceGetCudaComputeCapability(gpu))
        return machine_for(arch).of_gpu(str(pynvml.nvmlDeviceGetName(gpu)))
    except (pynvml.NVMLError, UnknownTarget):
        return None


class Host:
    """Servers of this host under one key, watched: one that ends is started again, MOST_RESTARTS times at most.

    ``tracker`` is the one that they tell of themselves; a new one on the loopback where only its key is given.
    ``devices`` are a server each, as :class:`.starting.Parts` has them; so are ``parts``, where these were begun
    already. ``host`` is the address they listen at. ``say`` is told what ends. Leaving the ``with`` block ends all.
    """

    def __init__(
        self,
        place: str,
        devices: Sequence[str],
        tracker: Tracker | str,
        host: str = LOOPBACK,
        say: Callable[[str], None] = lambda line: None,
        parts: Parts | None = None,
    ) -> None:
        require_rpc()
        self._place, self._host, self._say = place, host, say
        self._parts = parts or Parts(place, devices)
        self._own = Process(quiet=True, source=self._parts.source) if isinstance(tracker, str) else None
        self._tracker = tracker if isinstance(tracker, Tracker) else Tracker(LOOPBACK, 0, tracker)
        self._servers = self._parts.servers
        self._names = {name: f"server {number} ({name})" for number, name in enumerate(devices)}
        self._restarts: dict[str, int] = {}
        self._ended, self._watching = threading.Event(), threading.Thread(target=self._watch, daemon=True)

    @property
    def tracker(self) -> Tracker:
        """The tracker that knows the servers."""
        return self._tracker

    @property
    def processes(self) -> dict[str, int]:
        """Numbers of the processes that serve, by device; that of the own tracker as "tracker"."""
        own = {"tracker": self._own.pid} if self._own else {}
        return own | {name: server.pid for name, server in self._servers.items()}

    @property
    def serving(self) -> bool:
        """True while a server runs, or may be started again."""
        return any(
            server.alive or self._restarts.get(name, 0) <= MOST_RESTARTS for name, server in self._servers.items()
        )

    def __enter__(self) -> Self:
        try:
            if not self._own:
                self._tracker.summary()  # is it there?
            for server in self._servers.values():
                server.start()
            with ThreadPoolExecutor(len(self._servers) + 1) as together:
                tracker = together.submit(self._begin_tracking)
                servers = [together.submit(self._first_start, name, tracker) for name in self._servers]
            for started in (tracker, *servers):
                started.result()
        except BaseException:
            self.close()
            raise
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End servers and tracker."""
        self._ended.set()
        if self._watching.is_alive():
            self._watching.join()
        if self._own:
            self._own.close()
        self._parts.close()

    def _begin_tracking(self) -> None:
        if self._own:
            self._tracker = Tracker(LOOPBACK, self._start_tracker(), self._tracker.key)

    def _first_start(self, name: str, tracker: Future[None]) -> None:
        """Have a server, which imports since it runs, serve as soon as the tracker does."""
        tracker.result()
        self._start_server(name)

    def _start_tracker(self) -> int:
        assert self._own is not None
        return self._started(partial(self._own.ask, start_tracker, LOOPBACK, self._tracker.port), "a tracker")

    def _start_server(self, name: str) -> int:
        address = None if self._host in (LOOPBACK, "0.0.0.0", "::") else self._host
        there = (self._tracker.host, self._tracker.port)
        ask = partial(self._servers[name].ask, start_server, self._place, self._host, there, self._tracker.key, address)
        return self._started(ask, self._names[name])

    def _started(self, ask: Callable[..., Any], what: str) -> Any:
        try:
            return ask(limit_s=START_S)
        except (ProcessLost, RuntimeError, ValueError, ImportError, OSError) as error:
            raise FleetError(f"{what} cannot be started ({str(error).strip().splitlines()[-1][:300]})") from error

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            if self._own and not self._own.alive:
                self._again("tracker", "the tracker", self._start_tracker)
            for name, server in self._servers.items():
                if not server.alive:
                    self._again(name, self._names[name], partial(self._start_server, name))

    def _again(self, key: str, what: str, start: Callable[[], int]) -> None:
        number = self._restarts.get(key, 0) + 1
        if number > MOST_RESTARTS + 1:
            return
        self._restarts[key] = number
        if number > MOST_RESTARTS:
            self._say(f"{what} ended {number} times and is not started again")
            return
        self._say(f"{what} ended; starting it again ({number} of at most {MOST_RESTARTS} times)")
        try:
            start()
        except FleetError as error:
            self._say(str(error))
