"""Tilus, whose product would be written in its language; it runs neither float32 nor beside the TVM we measure."""

from __future__ import annotations

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import Machine
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, installed_version

# Found by running its matmul examples on the H200: 0.2.0 works with this release of tvm_ffi, in an environment
# that has no TVM.
NEEDED_FFI = "0.1.10"


def enter(arena: Arena, _machine: Machine) -> list[Entrant]:
    """Say why Tilus does not take part.

    Raises
    ------
    PeerMissing : where it is not installed.
    PeerFailed : where it is.
    """
    version, dtype = installed_version("tilus"), arena.problem.dtype
    if dtype not in ("float16", "bfloat16"):
        raise PeerFailed(f"tilus {version}: its dot takes float16, bfloat16 and int8 (tensor cores), not {dtype}")
    ffi = installed_version("apache-tvm-ffi")
    raise PeerFailed(f"tilus {version} needs apache-tvm-ffi {NEEDED_FFI}; the TVM measured here runs on {ffi}")


KIND = PeerKind("tilus", "Tilus, or why it cannot run beside this TVM", ("tilus",), enter, "tilus")
