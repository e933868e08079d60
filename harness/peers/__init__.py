"""Peers: kernels that a user might take instead of ours, timed in the same rounds; see :class:`PeerKind`."""

from __future__ import annotations

from tensorir_ladder.harness.peers import call, dlight, metaschedule, metaschedule_space, triton, triton_tma
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, PeerMissing, admit, peer_versions

KINDS: dict[str, PeerKind] = {
    kind.name: kind
    for kind in (
        *(triton.KIND, triton.STAGES_KIND, triton_tma.KIND),
        *(dlight.KIND, metaschedule.KIND, metaschedule_space.KIND, call.KIND),
    )
}


class UnknownPeer(ValueError):
    """A name that is no peer; the message lists those there are."""


def find_peers(names: str) -> list[PeerKind]:
    """Find the kinds that "none", "all" or a list such as "triton,dlight" names, in the registry's order.

    A kind whose peers another one enters as well (triton within triton-stages) is left to that one. "all" is
    each peer once, without Triton's other stage counts and without what takes minutes. UnknownPeer for other names.
    """
    asked = {name.strip() for name in names.split(",")} - {"none"}
    if "all" in asked:
        asked = (asked - {"all"}) | {name for name, kind in KINDS.items() if kind.in_all}
    if unknown := sorted(asked - set(KINDS)):
        raise UnknownPeer(f"no peer {unknown[0]!r}; there are {', '.join(KINDS)}, or all, or none")
    chosen = [kind for name, kind in KINDS.items() if name in asked]
    return [kind for kind in chosen if not any(set(kind.peers) < set(other.peers) for other in chosen)]
