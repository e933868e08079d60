"""Be a process of a fleet: ``python -m tensorir_ladder.harness.fleet.working``, as :mod:`.processes` starts it.

It does what it is asked for through two pipes, one thing after the other, in a group of its own, and ends with who asks
it. Or it is the source of such processes: it imports what all of them need, once, and is copied for each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

WORK, FORK = "work", "fork"  # what the program is told to do
TORCH = "torch"  # the one module that may be absent: who needs it says so better
NICENESS = 10  # of who builds, beside who measures
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MOST_BYTES = 65536  # of what a source is told: an environment's additions
PID_BYTES = 32


def main() -> None:
    """Work on the pipes, or fork at the socket, whose numbers come first; import the modules that follow at once."""
    what, *rest = sys.argv[1:]
    if what == WORK:
        _work(int(rest[0]), int(rest[1]), rest[2:])
    else:
        _import(rest[1:])
        _fork_when_asked(socket.socket(fileno=int(rest[0])))


def _import(modules: Sequence[str]) -> None:
    if TORCH not in modules:
        # To import it fails then, as where there is none: TVM imports it, it takes seconds, and only servers need it.
        sys.modules[TORCH] = None  # type: ignore[assignment]
    gc.disable()  # of what is imported nothing goes, and looking for what does takes long
    for name in modules:
        with suppress(*([ImportError] if name == TORCH else [])):
            import_module(name)
    gc.enable()


def _work(questions: int, answers: int, modules: Sequence[str] | None = None) -> None:
    """Answer questions, until nobody can ask any more: this group then ends, in the middle of what it does.

    An interpreter of its own imports ``modules`` first.
    """
    os.register_at_fork(after_in_child=_end_with_leader)
    threading.Thread(target=_end_with_asker, args=(questions,), daemon=True).start()
    if modules is not None:
        _import(modules)
    reader, writer = Connection(questions, writable=False), Connection(answers, readable=False)
    with suppress(EOFError, BrokenPipeError):  # nobody asks any more, which the other thread sees as well
        while True:
            writer.send(_answer(reader))


def _answer(reader: Connection) -> tuple[bool, Any]:
    try:
        work, arguments = reader.recv()
    except ImportError as error:  # of what is asked for
        return False, error
    try:
        return True, work(*arguments)
    except Exception as error:  # noqa: BLE001 - raised where the answer is asked for
        own = type(error).__module__ == "builtins"  # of others nobody knows if they can be sent
        return False, error if own else RuntimeError(f"{type(error).__name__}: {error}")


def _end_with_asker(questions: int) -> None:
    end = select.poll()
    end.register(questions, 0)  # nothing but its end is waited for
    end.poll()
    os.killpg(0, signal.SIGKILL)


def _end_with_leader() -> None:
    # A server's session would outlive a server that was killed, and keep its port and its GPU.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _fork_when_asked(asked: socket.socket) -> None:
    """Fork a process for each pair of pipes that comes through a socket, and answer with its number."""
    gc.freeze()  # else each collection in a copy would copy the memory of all that was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is forgotten at once
    while True:
        told, pipes, *_ = socket.recv_fds(asked, MOST_BYTES, 2)
        if not told:
            return
        if not (pid := os.fork()):
            asked.close()
            _be_forked(json.loads(told), *pipes)
        with suppress(ProcessLookupError, PermissionError):  # where it has done so
            os.setpgid(pid, pid)
        for pipe in pipes:
            os.close(pipe)
        asked.sendall(str(pid).encode())


def _be_forked(how: dict[str, Any], questions: int, answers: int) -> None:
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(how["environment"])
        if how["behind"]:
            os.nice(NICENESS)
        if how["quiet"]:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.dup2(nowhere, sys.stderr.fileno())
        _work(questions, answers)
    except BaseException:  # noqa: BLE001 - it must not go on as the source would
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    with suppress(OSError, KeyboardInterrupt):
        main()
