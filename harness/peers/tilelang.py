"""TileLang, whose product would be written in its language; it cannot be loaded beside the TVM we measure."""

from __future__ import annotations

import tvm

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import Machine
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, installed_version


def enter(_arena: Arena, _machine: Machine) -> list[Entrant]:
    """Say why TileLang does not take part.

    It is never imported: its wheel brings a package named tvm, and interleaved rounds need one process. With
    apache-tvm loaded, importing 0.1.15 stops at a symbol that only its own TVM has.

    Raises
    ------
    PeerMissing : where it is not installed.
    PeerFailed : where it is.
    """
    raise PeerFailed(
        f"tilelang {installed_version('tilelang')} brings a TVM of its own under the name tvm, which cannot be "
        f"loaded into the process that runs apache-tvm {tvm.__version__}"
    )


KIND = PeerKind("tilelang", "TileLang, or why it cannot run beside this TVM", ("tilelang",), enter, "tilelang")
