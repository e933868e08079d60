"""A peer in a measurement: a launch that was checked and can be timed, or the reason why there is none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.records import Peer, Timing
from tensorir_ladder.harness.roofline import Roofline
from tensorir_ladder.harness.verify import verify_launch

LONGEST_REASON = 300


class PeerMissing(RuntimeError):
    """A peer that is not installed here, or cannot be loaded; the message says what to install."""


class PeerFailed(RuntimeError):
    """A peer that is installed and does not do the work; the message says why."""


@dataclass(frozen=True)
class Entrant:
    """One peer on one problem. ``run(a, b, c)`` launches it; None where ``status`` is "missing" or "failed".

    ``config`` is what the peer's own tuning chose, ``why`` the reason of its status, or what its tuning went
    through.
    """

    name: str
    run: Callable[[Any, Any, Any], Any] | None = None
    config: str = ""
    status: str = "measured"
    why: str = ""

    def peer(self, timing: Timing | None, held_to: Roofline | None = None) -> Peer:
        """Make the record's entry: that of a peer that failed, where it cannot have done the work in that time."""
        if timing and held_to and (refusal := held_to.refusal(timing)):
            return Peer(self.name, "failed", refusal[:LONGEST_REASON], self.config, None)
        return Peer(self.name, self.status, self.why, self.config, timing)


@dataclass(frozen=True)
class PeerKind:
    """A name of ``--peers``: the peers it enters, and the function that does.

    ``enter(arena, machine)`` returns an Entrant per name of ``peers``, in that order, without those that would be
    another's kernel again; it raises PeerMissing or PeerFailed where none of them can run. ``package`` is what it
    needs installed, "" for nothing more than we do. ``in_all``: the name "all" includes it.
    """

    name: str
    what: str
    peers: tuple[str, ...]
    enter: Callable[[Arena, GpuSpec], list[Entrant]]
    package: str = ""
    in_all: bool = True


def admit(kind: PeerKind, arena: Arena, machine: GpuSpec) -> list[Entrant]:
    """Enter the peers of a kind, each checked against the float64 reference and captured once as it will be timed.

    Never raises for a peer: one that is missing or fails, in whatever way, comes back without a launch and
    with the reason.
    """
    try:
        entrants = kind.enter(arena, machine)
    except PeerMissing as missing:
        return [Entrant(name, None, "", "missing", str(missing)) for name in kind.peers]
    except Exception as error:  # noqa: BLE001 - another project's code may raise anything; the record keeps it
        return [Entrant(name, None, "", "failed", reason(error)) for name in kind.peers]
    return [checked(entrant, arena) if entrant.run else entrant for entrant in entrants]


def installed_version(package: str) -> str:
    """Look up an installed package's version, without importing it; PeerMissing where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise PeerMissing(f"{package} is not installed") from error


def peer_versions(kinds: Iterable[PeerKind]) -> dict[str, str]:
    """Look up the versions of the packages that peers need, as far as they are installed."""
    found = {}
    for package in sorted({kind.package for kind in kinds} - {""}):
        with contextlib.suppress(PeerMissing):  # said where the peer enters
            found[package] = installed_version(package)
    return found


def reason(error: Exception) -> str:
    """Shorten an exception to one line, with its type where the message is not our own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # TVM's errors may begin with a traceback; the message is its last line.
    text = lines[-1 if lines[0].startswith("Traceback") else 0] if lines else "no message"
    return (text if isinstance(error, PeerFailed) else f"{type(error).__name__}: {text}")[:LONGEST_REASON]


def say(text: str) -> None:
    """Print a line of progress to stderr, beside the results."""
    print(text, file=sys.stderr, flush=True)


def checked(entrant: Entrant, arena: Arena) -> Entrant:
    """Check an entrant's output and capture it; returns it without a launch, and with the reason, where that fails."""
    try:
        verify_launch(entrant.run, arena.problem, arena.backend, entrant.name)
        arena.graph(entrant.run)
    except Exception as error:  # noqa: BLE001 - as in admit
        return replace(entrant, run=None, status="failed", why=reason(error))
    return entrant
