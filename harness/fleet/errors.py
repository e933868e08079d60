"""What a fleet cannot work with, and what TVM's RPC needs."""

from __future__ import annotations

from tensorir_ladder.harness.fleet.processes import missing_packages
from tensorir_ladder.harness.records import RecordError

EXTRA = ".venv/bin/python -m pip install -e '.[rpc]'"


class FleetError(RecordError):
    """A tracker, servers or processes that cannot be worked with."""


def require_rpc() -> None:
    """Raise FleetError, with the command that installs it, where TVM's RPC lacks a package."""
    if missing := missing_packages():
        raise FleetError(f"no {missing[0]}, which TVM's RPC needs; {EXTRA}")
