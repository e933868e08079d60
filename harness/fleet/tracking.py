"""TVM's tracker, in a process of a fleet."""

from __future__ import annotations

import threading

PORTS = (9190, 9999)


def start_tracker(host: str, port: int = 0) -> int:
    """Track in this process until it ends; return the port: ``port``, or a free one."""
    from tvm.rpc.tracker import PopenTrackerServerState

    from tensorir_ladder.harness.fleet.serving import end_after

    ports = (port, port + 1) if port else PORTS
    state = PopenTrackerServerState(host, *ports, silent=True, reuse_addr=bool(port))  # see serving
    PopenTrackerServerState.current = state
    threading.Thread(target=end_after, args=(state.thread,), daemon=True).start()
    return state.port
