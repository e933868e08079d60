"""What a user might take instead of a step, beside it: peers measured in the same rounds."""

from __future__ import annotations

from harness.records import Peer, Record

from .selection import Section, Shape, by_product, natural, shape_label, shape_of
from .sweeps import speed_gain_pct
from .table import NOT_MEASURED, Table, gflops, percent


def peers_table(section: Section, step: int) -> Table | None:
    """What a user might take instead, measured in the same rounds as the step's fastest record of each shape."""
    hosts = _hosts(section, step)
    names = sorted({peer.name for record in hosts.values() for peer in record.peers}, key=natural)
    if not names:
        return None
    own = ("this step", *(f"{r.gflops:,.0f} ({r.ratio_to_cublas:.0%})" for r in hosts.values()))
    grid = [(name, *(_peer_cell(record, name) for record in hosts.values())) for name in names]
    lead = ("this step over the fastest peer", *(_lead(record) for record in hosts.values()))
    note = "GFLOPS (percent of the faster cuBLAS form), all in the rounds of this step's fastest record with peers: "
    note += "; ".join(f"{shape_label(shape)}: {_host_label(record)}" for shape, record in hosts.items()) + "."
    note += "".join(f"\n- {line}" for name in names for line in _peer_lines(hosts, name))
    return Table(f"Peers of step {step}", ("", *map(shape_label, hosts)), (own, *grid, lead), note)


def _hosts(section: Section, step: int) -> dict[Shape, Record]:
    """The fastest verified record with peers of each shape, smallest product first."""
    found: dict[Shape, Record] = {}
    for record in section.records:
        if record.step == step and record.peers and record.verification.passed:
            rival = found.get(shape_of(record))
            if rival is None or record.time_ms < rival.time_ms:
                found[shape_of(record)] = record
    return {shape: found[shape] for shape in by_product(found)}


def _host_label(record: Record) -> str:
    return f"{record.variant}, {record.tile}, {record.stages} stage{'s' * (record.stages > 1)}"


def _peer(record: Record, name: str) -> Peer | None:
    return next((peer for peer in record.peers if peer.name == name), None)


def _peer_cell(record: Record, name: str) -> str:
    peer = _peer(record, name)
    if peer is None:
        return NOT_MEASURED
    if peer.timing is None:
        return peer.status
    speed = gflops(shape_of(record), peer.timing.median_ms)
    return f"{speed:,.0f} ({record.fastest_baseline.median_ms / peer.timing.median_ms:.0%})"


def _lead(record: Record) -> str:
    """Speed gained over the fastest peer of a record, and which that is."""
    timed = [peer for peer in record.peers if peer.timing is not None]
    fastest = min(timed, key=lambda peer: peer.timing.median_ms, default=None)
    if fastest is None:
        return NOT_MEASURED
    return f"{percent(speed_gain_pct(fastest.timing.median_ms, record.time_ms))} ({fastest.name})"


def _peer_lines(hosts: dict[Shape, Record], name: str) -> list[str]:
    """What a peer's own tuning chose; and where it is missing or failed, why."""
    said: dict[str, list[str]] = {}
    for shape, record in hosts.items():
        if peer := _peer(record, name):
            words = f"chose {peer.config}" if peer.timing else f"is missing: {peer.why}"
            words = f"failed: {peer.why}" if peer.status == "failed" else words
            if peer.config or not peer.timing:
                said.setdefault(words, []).append(shape_label(shape))
    return [f"{name} {words} (at {', '.join(shapes)})" for words, shapes in said.items()]
