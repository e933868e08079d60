"""Processes of a fleet: each leads a group of its own, which ends with it, and with the process that started it.

A server is an interpreter of its own, whose environment is there before it imports anything. All others are copies of
one process, the :class:`BuildSource`, which has imported TVM for all of them, without torch: Linux shares its memory,
a copy is there in milliseconds, and many do not import at once. That is sound as TVM's own server is, which forks
sessions: what is imported starts no threads (:mod:`.shared_imports`), and touches no GPU.

Nothing here imports TVM: the command line starts processes before it does so itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

from tensorir_ladder.harness.fleet.working import FORK, PID_BYTES, WORK

PROGRAM = "tensorir_ladder.harness.fleet.working"
SHARED = ("tensorir_ladder.harness.fleet.shared_imports",)
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's threads are not copied, and builders are side by side already
PACKAGES = ("cloudpickle", "psutil", "tornado")
FORK_ATTEMPTS = 2
CLOSE_S = 5.0  # until who waits for an answer of a process that is killed has seen that


class ProcessLost(RuntimeError):
    """A process that ended, or was ended for its time, before it answered."""


def missing_packages() -> list[str]:
    """List the packages that TVM's RPC needs and that are not there."""
    return [name for name in PACKAGES if find_spec(name) is None]


def end_group(leader: int) -> None:
    """Kill the processes of a group, if there are any left; none for number 0."""
    if leader:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


class BuildSource:
    """A process that has imported ``modules``, and is copied where another is wanted; it is started again if it ends.

    It starts with :meth:`start`, or when it is first asked.
    """

    def __init__(self, modules: Sequence[str] = SHARED) -> None:
        self._modules, self._lock, self._closed = modules, threading.Lock(), False
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Its number; 0 where it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    def start(self) -> None:
        """Start it, unless it runs."""
        with self._lock:
            self._started()

    def fork(self, how: Mapping[str, Any], pipes: Sequence[int]) -> int:
        """Have it copied, with the ends of two pipes; return the copy's number. Lost where that does not succeed."""
        with self._lock:
            for _ in range(FORK_ATTEMPTS):
                if self._closed:
                    break
                with suppress(OSError):
                    source = self._started()
                    socket.send_fds(source, [json.dumps(how).encode()], pipes)
                    if answer := source.recv(PID_BYTES):
                        return int(answer)
                self._end()
        raise ProcessLost("it was closed" if self._closed else "no process can be started")

    def close(self) -> None:
        """End it for good; its copies go on."""
        self._closed = True
        end_group(self.pid)  # who waits for it sees that it ended
        with self._lock:
            self._end()

    def _started(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                modules, told = self._modules, {"env": os.environ | ONE_THREAD}
                self._process = _interpreter(FORK, (theirs.fileno(),), modules, told)
        return self._socket

    def _end(self) -> None:
        if self._process and self._socket:
            end_group(self.pid)
            self._process.wait()
            self._socket.close()
        self._process = self._socket = None


def _interpreter(what: str, pipes: tuple[int, ...], modules: Sequence[str], told: dict[str, Any]) -> subprocess.Popen:
    program = [sys.executable, "-m", PROGRAM, what, *map(str, pipes), *modules]
    return subprocess.Popen(program, pass_fds=pipes, start_new_session=True, **told)


@dataclass
class _AtWork:
    """A process that runs, and the ends of its pipes; ``interpreter`` where it is no copy of a source."""

    pid: int
    questions: Connection
    answers: Connection
    interpreter: subprocess.Popen | None = None

    @property
    def ended(self) -> bool:
        if self.interpreter:
            return self.interpreter.poll() is not None
        return self.answers.poll()  # nothing is asked: it is the end of the pipe that can be read

    def end(self) -> None:
        end_group(self.pid)
        if self.interpreter:
            self.interpreter.wait()
        self.questions.close()
        self.answers.close()


class Process:
    """A process that does what it is asked for, one thing after the other; it starts when it is first asked.

    It is a copy of ``source``, or without one an interpreter that imports ``modules`` as it begins, torch only where it
    is one of them. ``environment`` is there before. ``quiet``: what it prints is dropped, but with LADDER_DEBUG=1.
    ``behind``: a copy that leaves the processor to others that want it.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
        behind: bool = False,
        source: BuildSource | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self._environment, self._behind = dict(environment or {}), behind
        self._quiet = quiet and os.environ.get("LADDER_DEBUG", "0") in ("", "0")
        self._source, self._modules = source, modules
        self._at_work: _AtWork | None = None
        self._asking, self._starting, self._closed = threading.Lock(), threading.Lock(), False

    @property
    def pid(self) -> int:
        """Its number; 0 where it does not run."""
        return self._at_work.pid if self._at_work else 0

    @property
    def alive(self) -> bool:
        """True where it runs."""
        return self._at_work is not None and (self._asking.locked() or not self._at_work.ended)

    def start(self) -> None:
        """Start it, unless it runs; Lost where it was closed, or none can be started."""
        with self._asking:
            self._there()

    def ask(self, work: Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> Any:
        """Return ``work(*arguments)`` as it came out there, or raise what was raised; ``work`` is a module's function.

        Lost where the process ended before, or did not answer for ``limit_s`` seconds: it is ended then, and the next
        question starts another, but after :meth:`close`. Who asks while another thread does waits for its turn.
        """
        with self._asking:
            fine, answer = self._answered((work, arguments), limit_s)
        if not fine:
            raise answer
        return answer

    def _answered(self, question: tuple, limit_s: float | None) -> tuple[bool, Any]:
        try:
            there = self._there()
            there.questions.send(question)
            if there.answers.poll(limit_s):
                return there.answers.recv()
        except (EOFError, OSError) as error:
            self._end()
            raise ProcessLost("it was closed" if self._closed else "its process ended") from error
        self._end()
        raise ProcessLost(f"no answer for {limit_s:g} seconds")

    def _there(self) -> _AtWork:
        with self._starting:
            if self._at_work is not None and self._at_work.ended:
                self._end()
            if self._at_work is None and not self._closed:
                self._at_work = self._started()
            if self._closed or self._at_work is None:
                self._end()
                raise ProcessLost("it was closed")
            return self._at_work

    def _started(self) -> _AtWork:
        (there_reads, questions), (answers, there_writes) = os.pipe(), os.pipe()
        theirs = there_reads, there_writes
        mine = Connection(questions, readable=False), Connection(answers, writable=False)
        try:
            if self._source:
                how = {"environment": self._environment, "quiet": self._quiet, "behind": self._behind}
                return _AtWork(self._source.fork(how, theirs), *mine)
            told = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL if self._quiet else None)
            interpreter = _interpreter(WORK, theirs, self._modules, told | {"env": os.environ | self._environment})
            return _AtWork(interpreter.pid, *mine, interpreter)
        except BaseException:
            for end in mine:
                end.close()
            raise
        finally:
            for pipe in theirs:
                os.close(pipe)

    def close(self) -> None:
        """End it for good, with all that it started; whoever waits for its answer is told that it is Lost."""
        self._closed = True
        if pid := self.pid:  # who is just starting it sees that it is closed
            end_group(pid)
            if self._asking.acquire(timeout=CLOSE_S):  # so does who asks
                self._end()
                self._asking.release()

    def _end(self) -> None:
        there, self._at_work = self._at_work, None
        if there:
            there.end()
