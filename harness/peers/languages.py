"""Tilus and TileLang, whose products would be written in their languages; neither runs beside the TVM we measure."""

from __future__ import annotations

from collections.abc import Callable

import tvm

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import Machine
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, installed_version

# Found by running Tilus' matmul examples on the H200: 0.2.0 works with this release of tvm_ffi, in an environment that
# has no TVM.
NEEDED_FFI = "0.1.10"


def why_not_tilus(version: str, dtype: str) -> str:
    """Say why Tilus does not take part: by dtype, else by the tvm_ffi that it needs."""
    if dtype not in ("float16", "bfloat16"):
        return f"tilus {version}: its dot takes float16, bfloat16 and int8 (tensor cores), not {dtype}"
    ffi = installed_version("apache-tvm-ffi")
    return f"tilus {version} needs apache-tvm-ffi {NEEDED_FFI}; the TVM measured here runs on {ffi}"


def why_not_tilelang(version: str, _dtype: str) -> str:
    """Say why TileLang does not take part.

    It is never imported: its wheel brings a package named tvm, and interleaved rounds need one process. With
    apache-tvm loaded, importing 0.1.15 stops at a symbol that only its own TVM has.
    """
    return (
        f"tilelang {version} brings a TVM of its own under the name tvm, which cannot be "
        f"loaded into the process that runs apache-tvm {tvm.__version__}"
    )


def _kind(package: str, title: str, why_not: Callable[[str, str], str]) -> PeerKind:
    def enter(arena: Arena, _machine: Machine) -> list[Entrant]:
        # PeerMissing where it is not installed.
        raise PeerFailed(why_not(installed_version(package), arena.problem.dtype))

    return PeerKind(package, f"{title}, or why it cannot run beside this TVM", (package,), enter, package)


TILUS = _kind("tilus", "Tilus", why_not_tilus)
TILELANG = _kind("tilelang", "TileLang", why_not_tilelang)
