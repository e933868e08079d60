"""The project's own Python call on tensors, :func:`kernels.matmul`: the kernel that it chooses, and its copies.

Timed like the others, in a CUDA graph: with what each call copies to padded rows where rows are no multiples of 16
bytes, and without the host's time, which ``python -m harness launch`` measures.
"""

from __future__ import annotations

from typing import Any

from harness.measure import Arena
from harness.peers.entrant import Entrant, PeerFailed, PeerKind
from harness.targets import Machine
from kernels import describe, matmul
from kernels.errors import IllegalOperand, UnsupportedGpu

NAME = "kernels.matmul"


def enter(arena: Arena, _machine: Machine) -> list[Entrant]:
    """The call on the arena's operands; raises PeerFailed where it refuses them."""
    transposed = arena.problem.layout == "nt"

    def run(a: Any, b: Any, c: Any) -> None:
        """One product."""
        matmul(a, b.T if transposed else b, out=c)

    a, b, c = arena.sets[0]
    try:
        return [Entrant(NAME, run, describe(a, b.T if transposed else b, out=c))]
    except (IllegalOperand, UnsupportedGpu) as refused:
        raise PeerFailed(str(refused)) from refused


KIND = PeerKind("call", "our own Python call on tensors, with the rung and tile that it chooses", (NAME,), enter)
