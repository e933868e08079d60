"""``serve``: offer this host's GPUs to a tracker of TVM's RPC, for searches that others run."""

from __future__ import annotations

import argparse
import ipaddress
import time
from contextlib import suppress

from tensorir_ladder.harness.commands.printing import warn
from tensorir_ladder.harness.commands.tune import MOST_GPUS
from tensorir_ladder.harness.commands.values import UsageError, address, between
from tensorir_ladder.harness.fleet import asking, hosting
from tensorir_ladder.harness.fleet.errors import FleetError
from tensorir_ladder.harness.fleet.starting import devices

LOOK_S = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the tracker, the key, how many GPUs, and the address that they listen at."""
    parser.add_argument("--tracker", type=address, metavar="HOST:PORT", help="the tracker to tell (required)")
    parser.add_argument("--key", default="gpu", help="what searches ask the tracker for (gpu)")
    parser.add_argument("--gpus", type=between(1, MOST_GPUS), metavar="N", help="so many of this host's GPUs (all)")
    open_to = f"address to listen at; whoever reaches it can run any code here ({hosting.LOOPBACK}: this host only)"
    parser.add_argument("--host", default=hosting.LOOPBACK, metavar="ADDRESS", help=open_to)
    parser.add_argument("--on", choices=("gpu", "llvm"), default="gpu", help="where to run kernels (gpu)")


def run(options: argparse.Namespace, _command: str) -> int:
    """Serve until interrupted."""
    if options.tracker is None:
        raise UsageError("no --tracker HOST:PORT to tell; python -m tvm.exec.rpc_tracker --host 127.0.0.1 starts one")
    here = _is_loopback(options.host)
    if here and not _is_loopback(options.tracker[0]):
        raise UsageError(
            f"--tracker {options.tracker[0]} sends others to this host, and --host {options.host} lets nobody in; give "
            "--host ADDRESS if everyone who reaches that address may run code here"
        )
    tracker = asking.Tracker(*options.tracker, options.key)
    served = devices(options.on, options.gpus)
    if not here:
        warn(f"whoever reaches {options.host} can run any code as this user: TVM's RPC asks for no password")
    with hosting.Host(options.on, served, tracker, options.host, warn) as host:
        what = f"{len(served)} servers of key {options.key!r} tell tracker {tracker.address}"
        print(f"{what}; Ctrl-C ends them", flush=True)
        with suppress(KeyboardInterrupt):
            while host.serving:
                time.sleep(LOOK_S)
            raise FleetError("no server is left")
    return 0


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
