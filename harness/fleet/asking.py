"""Ask servers: find one by the tracker, take modules to it, and have them timed. Runs in processes of their own.

A process keeps its session, and with it operands and modules on the GPU, until somebody else waits for a server.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tensorir_ladder.harness.fleet.errors import FleetError
from tensorir_ladder.harness.fleet.messages import IDENTITY, MEASURE, PREPARE, Answer, Identity, Request
from tensorir_ladder.harness.records import RecordError, decode

ANSWER_S = 10.0  # that a tracker may take for an answer
POLL_S = 0.05
SESSION_S = 600  # a server ends a session that lasts longer, in which a kernel hangs, say
KEEP_S = 300.0  # so long a driver keeps one
LOOKS = 5  # in each turn, at whether others wait


@dataclass(frozen=True)
class Tracker:
    """Name where a tracker listens, and the key of its servers that are meant."""

    host: str
    port: int
    key: str

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return f"{self.host}:{self.port}"

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """Connect for a few questions; FleetError where there is no tracker, or it does not answer in time."""
        from tvm.rpc import base

        try:
            with socket.create_connection((self.host, self.port), timeout=ANSWER_S) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # questions go in two pieces
                connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                (magic,) = struct.unpack("<i", base.recvall(connection, 4))
                if magic != base.RPC_TRACKER_MAGIC:
                    raise FleetError(f"--tracker {self.address}: what listens there is no tracker of TVM's RPC")
                yield connection
        except (OSError, struct.error) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise FleetError(
                f"--tracker {self.address} does not answer ({why}); start one with python -m tvm.exec.rpc_tracker "
                f"--host {self.host} --port {self.port} --port-end {self.port + 1}, or have one started by --gpus"
            ) from error

    def summary(self) -> tuple[int, int, int]:
        """Count the key's servers, those that are free, and requests that wait; see :meth:`connected` for errors."""
        found = self._known()
        queue = found["queue_info"].get(self.key, {"free": 0, "pending": 0})
        servers = [each for each in found["server_info"] if each.get("key") == f"server:{self.key}"]
        return len(servers), int(queue["free"]), int(queue["pending"])

    def keys(self) -> list[str]:
        """List the keys of all servers that the tracker knows."""
        return sorted({str(each.get("key", "")).partition(":")[2] for each in self._known()["server_info"]})

    def _known(self) -> dict[str, Any]:
        from tvm.rpc import base

        with self.connected() as connection:
            _, found = _answer_to([base.TrackerCode.SUMMARY], connection)
        return found

    def request(self) -> tuple[str, int, str] | None:
        """Take a server: host, port and the word that opens it. None where none was free for ANSWER_S."""
        from tvm.rpc import base

        with self.connected() as connection:
            try:
                code, value = _answer_to([base.TrackerCode.REQUEST, self.key, "", 1], connection)
            except TimeoutError:
                return None  # the tracker passes over who has gone
            if code != base.TrackerCode.SUCCESS:
                raise FleetError(f"tracker {self.address} refused a request for {self.key!r}")
            host, port, word = value
        return host, int(port), word


def _answer_to(question: list, connection: socket.socket) -> Any:
    """Ask a tracker, whose answers come in two pieces: the second when the first was acknowledged, at once so."""
    from tvm.rpc import base

    base.sendjson(connection, question)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    return base.recvjson(connection)


@dataclass
class _Held:
    """The session of this process."""

    session: Any
    where: str
    identity: Identity
    since: float = field(default_factory=time.monotonic)
    looked: float = 0.0
    uploaded: set[str] = field(default_factory=set)


_held: _Held | None = None


@dataclass(frozen=True)
class Trouble:
    """Say why there is no answer; ``lost``: the server ended meanwhile; ``none``: there is no server to be had."""

    why: str
    none: bool = False


def take_server(
    tracker: Tracker, wanted: int, patience_s: float, like: Identity | None = None
) -> tuple[str, Identity] | Trouble:
    """Take a server, unless this process has one; return where it is, and what.

    Where others have all servers this waits for as long as it takes; where there are fewer than ``wanted``, for
    ``patience_s``. A server whose measurements cannot stand beside those of ``like`` is kept and left out.
    """
    global _held
    try:
        if _held is None:
            _held = _opened(*_free_server(tracker, wanted, patience_s))
    except _NoServer as error:
        return Trouble(str(error), none=True)
    except RecordError as error:
        return Trouble(str(error))
    if other := like and like.differs(_held.identity):
        return Trouble(f"the server at {_held.where} has {other}; it is left out", none=True)
    return _held.where, _held.identity


def prepare_server() -> bool:
    """Have the server that :func:`take_server` took begin what its first measurement would wait for."""
    try:
        return _held is not None and bool(_held.session.get_function(PREPARE)())
    except Exception:  # noqa: BLE001 - TVM's, of a connection that ended; who measures next is told
        let_go()
        return False


def measure(tracker: Tracker, request: Request, turn_s: float) -> Answer | Trouble:
    """Have a request answered by the server that :func:`take_server` took; see :func:`yield_server`."""
    held = _held
    if held is None:
        return Trouble("no server was taken")
    try:
        answer = _answer(held, request)
    except RecordError as error:
        let_go()
        return Trouble(f"an answer that is none: {error}")
    except Exception as error:  # noqa: BLE001 - TVM's, of a connection that ended; the driver is told
        let_go()
        return Trouble(f"the server at {held.where} ended: {_last_line(error)}")
    if answer.status == "failed":  # a GPU on which a kernel failed takes no other until its process ends
        let_go()
    yield_server(tracker, turn_s)
    return answer


def yield_server(tracker: Tracker, turn_s: float) -> None:
    """Let a server go that was held for KEEP_S, or for ``turn_s`` while somebody else waits for one."""
    if _held is None:
        return
    now = time.monotonic()
    age = now - _held.since
    if age > turn_s and now - _held.looked > turn_s / LOOKS:
        _held.looked = now
        if _others_wait(tracker):
            let_go()
    if age > KEEP_S:
        let_go()


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


def let_go() -> None:
    """End the session, so that its server is free."""
    global _held
    _held = None


class _NoServer(FleetError):
    """Fewer servers than are looked for, for too long."""


def _answer(held: _Held, request: Request) -> Answer:
    for module in (*request.modules, *(check.module for check in request.also)):
        if module.file not in held.uploaded:
            held.session.upload(bytearray(Path(module.path).read_bytes()), module.file)
            held.uploaded.add(module.file)
    text = held.session.get_function(MEASURE)(msgspec.json.encode(request).decode())
    return decode(str(text), Answer, f"the answer of {held.where}")


def _opened(host: str, port: int, word: str) -> _Held:
    from tvm import rpc

    try:
        session = rpc.connect(host, port, word, session_timeout=SESSION_S)
        text = str(session.get_function(IDENTITY)())
    except Exception as error:  # TVM's, of many kinds
        raise FleetError(f"the server at {host}:{port} is none of ladder serve ({_last_line(error)})") from error
    if text.startswith('{"error"'):
        raise FleetError(f"the server at {host}:{port} cannot measure: {msgspec.json.decode(text)['error'][:200]}")
    return _Held(session, f"{host}:{port}", decode(text, Identity, f"the server at {host}:{port}"))


def _free_server(tracker: Tracker, wanted: int, patience_s: float) -> tuple[str, int, str]:
    """Wait for a free server: as long as it takes while others have them, ``patience_s`` where there are too few."""
    short_since = time.monotonic()
    while True:
        try:
            servers, free, _ = tracker.summary()
            if (free or servers >= wanted) and (taken := tracker.request()):
                return taken
        except FleetError as error:  # one that is started anew is back soon
            servers, why = 0, str(error)
        else:
            why = f"tracker {tracker.address} knows {servers} servers of key {tracker.key!r}, {wanted} are wanted"
        if servers >= wanted:
            short_since = time.monotonic()
        elif time.monotonic() - short_since > patience_s:
            raise _NoServer(f"no server for {patience_s:g} s: {why}")
        time.sleep(POLL_S)


def _others_wait(tracker: Tracker) -> bool:
    try:
        return tracker.summary()[2] > 0
    except FleetError:
        return False  # a tracker that is gone does not end a session
