"""Processes of a fleet: each leads a group of its own, which ends with it, and with the process that started it.

TVM's ``PopenWorker`` takes work to them. It does not end what they start: a server's session, or a compiler. Hence the
groups.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from tvm.support.popen_pool import PopenWorker

from tensorir_ladder.harness.lab.workers import PR_SET_PDEATHSIG
from tensorir_ladder.harness.records import RecordError

PACKAGES = ("cloudpickle", "psutil", "tornado")
EXTRA = ".venv/bin/python -m pip install -e '.[rpc]'"
PROGRAM = "tensorir_ladder.harness.fleet.working"
BEHIND, TORCH = "behind", "torch"  # what the program is told
LOOK_S = 0.5  # between two looks at whether the parent lives


class FleetError(RecordError):
    """A tracker, servers or processes that cannot be worked with."""


class Lost(RuntimeError):
    """A process that ended, or was ended for its time, before it answered."""


def require_rpc() -> None:
    """Raise FleetError, with the command that installs it, where TVM's RPC lacks a package."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise FleetError(f"no {missing[0]}, which TVM's RPC needs; {EXTRA}")


class _Worker(PopenWorker):
    """TVM's, for a program and an environment of ours."""

    def __init__(self, told: int | None, environment: dict[str, str], how: list[str]) -> None:
        super().__init__(stdout=told, stderr=told)
        self._environment, self._how = environment, how

    def _start(self) -> None:
        if self._proc is not None:
            return
        (answers, there_writes), (there_reads, questions) = os.pipe(), os.pipe()
        there = (there_reads, there_writes)
        program = [sys.executable, "-m", PROGRAM, *map(str, there), *self._how]
        told = {"stdout": self._stdout, "stderr": self._stderr}
        self._proc = subprocess.Popen(program, pass_fds=there, env=os.environ | self._environment, **told)
        for descriptor in there:
            os.close(descriptor)
        self._reader, self._writer = os.fdopen(answers, "rb"), os.fdopen(questions, "wb")


class Process:
    """A process that does what it is asked for, one thing after the other; it is started when it is first asked.

    ``environment`` is there when it imports TVM, which imports torch where there is one; only with ``torch``, since
    that takes longer than all else. ``quiet``: what it prints is dropped, but with LADDER_DEBUG=1. ``behind``: it
    leaves the processor to others that want it.
    """

    def __init__(
        self, environment: dict[str, str] | None = None, quiet: bool = False, behind: bool = False, torch: bool = False
    ) -> None:
        told = None if not quiet or os.environ.get("LADDER_DEBUG", "0") not in ("", "0") else subprocess.DEVNULL
        how = [BEHIND] * behind + [TORCH] * torch
        self._worker, self.pid = _Worker(told, environment or {}, how), 0
        self._asking, self._starting, self._closed = threading.Lock(), threading.Lock(), False

    @property
    def alive(self) -> bool:
        """True where it runs."""
        return bool(self.pid) and self._worker.is_alive()

    def ask(self, work: Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> Any:
        """Return ``work(*arguments)`` as it came out there; ``work`` is a module's function.

        Lost where the process ended before, or did not answer for ``limit_s`` seconds: it is ended then, and the next
        question starts another, but after :meth:`close`. Who asks while another thread does waits for its turn.
        """
        with self._asking:
            return self._ask(work, arguments, limit_s)

    def _ask(self, work: Callable[..., Any], arguments: tuple, limit_s: float | None) -> Any:
        try:
            with self._starting:
                if self._closed:
                    raise Lost("it was closed")
                if not self.alive:
                    self._end()
                    self._worker.send(_lead_group, [os.getpid()])  # which starts it
                    self.pid = self._worker.recv()
            self._worker.send(work, arguments, timeout=limit_s)
            return self._worker.recv()
        except TimeoutError:
            self._end()
            raise Lost(f"no answer for {limit_s:g} seconds") from None
        except (ChildProcessError, OSError, EOFError) as error:
            self._end()
            raise Lost("its process ended") from error
        except (AttributeError, TypeError, ValueError) as error:
            if not self._closed:
                raise
            raise Lost("it was closed") from error  # by another thread, in the middle of this

    def close(self) -> None:
        """End it for good, with all that it started; whoever waits for its answer is told that it is Lost."""
        self._closed = True
        end_group(self.pid)
        with self._starting:
            self._end()

    def _end(self) -> None:
        end_group(self.pid)
        self.pid = 0
        with suppress(AttributeError, ValueError):  # of two threads that do so at once
            self._worker.kill()


def end_group(leader: int) -> None:
    """Kill the processes of a group, if there are any left; none for number 0."""
    if leader:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _lead_group(parent: int) -> int:
    """Begin a group that ends with ``parent``; return its number."""
    os.setsid()
    os.register_at_fork(after_in_child=_end_with_leader)
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    return os.getpid()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    end_group(os.getpid())


def _end_with_leader() -> None:
    # A server's session would outlive a server that was killed, and keep its port and its GPU.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
