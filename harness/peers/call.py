"""The project's own Python call on tensors, :func:`torch_ops.matmul`: the kernel that it chooses, and its copies.

Timed like the others, in a CUDA graph: with what each call copies to padded rows where rows are no multiples of 16
bytes, and without the host's time, which ``ladder launch`` measures.
"""

from __future__ import annotations

from typing import Any

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.peers.entrant import Entrant, PeerKind
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.torch_ops import describe, matmul

# In records: as the call was named when the first were measured, so that old and new ones compare.
NAMES = ("kernels.matmul", "kernels.matmul(any_m=True)")


def enter(arena: Arena, _machine: GpuSpec) -> list[Entrant]:
    """Enter the call, and the call with kernels for any m; one that refuses the operands has failed, and says why."""
    return [entrant(arena, name) for name in NAMES]


def entrant(arena: Arena, name: str) -> Entrant:
    """Enter one of NAMES, with what it chose; not checked yet."""
    transposed, any_m = arena.problem.layout == "nt", name == NAMES[1]

    def run(a: Any, b: Any, c: Any) -> None:
        matmul(a, b.mT if transposed else b, out=c, any_m=any_m)

    a, b, c = arena.sets[0]
    try:
        return Entrant(name, run, describe(a, b.mT if transposed else b, out=c, any_m=any_m))
    except IllegalSchedule as refused:
        return Entrant(name, None, "", "failed", str(refused))


KIND = PeerKind(
    "call", "our own Python call on tensors, with the step and tile that it chooses", NAMES, enter, in_all=False
)
