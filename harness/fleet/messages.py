"""What driver and servers tell each other: JSON, read as these types and no others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from tensorir_ladder.harness.race import RoundPlan
from tensorir_ladder.harness.records import GpuState, Method, Timing
from tensorir_ladder.harness.records.parts import Arch, Count, Extent, GpuName, Title
from tensorir_ladder.schedules.workloads import Matmul

# Functions of a server.
IDENTITY, PREPARE, MEASURE = (f"tensorir_ladder.{name}" for name in ("identity", "prepare", "measure"))


@dataclass(frozen=True)
class Identity:
    """A server's GPU and versions; ``arch`` is empty where it runs kernels on the CPU, through LLVM.

    ``sources`` digests what shapes a measurement (:func:`harness.environment.sources_digest`).
    """

    gpu: GpuName
    gpu_uuid: Title
    driver: Title
    power_limit_w: float
    multiprocessors: Count
    arch: Arch
    versions: dict[str, str]
    sources: str

    def differs(self, other: Identity) -> str:
        """Say in what another server's measurements could not stand beside this one's; empty where they can."""
        for what, own, its in (
            ("GPU", self.gpu, other.gpu),
            ("TVM", self.versions.get("tvm"), other.versions.get("tvm")),
            ("sources", self.sources, other.sources),
        ):
            if own != its:
                return f"{what} {its}, and the others have {own}"
        return ""


@dataclass(frozen=True)
class Module:
    """A built candidate: its name in messages, the file that it is uploaded as, and its kernels' own memory.

    ``path`` is the file on the driver's machine, which no server opens.
    """

    label: str
    file: str
    path: str
    workspaces: tuple[tuple[tuple[Extent, ...], str], ...] = ()


@dataclass(frozen=True)
class Check:
    """A module that is only run and checked, on its own product: a configuration's long reduction."""

    module: Module
    problem: Matmul


@dataclass(frozen=True)
class Request:
    """Check modules and time them on one product, in the same rounds as cuBLAS in both forms.

    Operands are drawn from ``first_seed`` on. ``math`` is the candidates' arithmetic.
    """

    problem: Matmul
    math: str
    modules: tuple[Module, ...]
    plan: RoundPlan
    first_seed: Count = 0
    also: tuple[Check, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """Answer a request: times of its modules and then of cuBLAS's forms, or which module is not right, and why.

    ``status`` "failed": the server could not measure, whatever the modules. All of it took ``took_s``, and checking
    outputs ``checking_s`` of that.
    """

    status: Literal["timed", "wrong", "failed"]
    identity: Identity
    why: str = ""
    wrong: str = ""
    timings: tuple[Timing, ...] = ()
    method: Method | None = None
    before: GpuState | None = None
    after: GpuState | None = None
    took_s: float = field(default=0.0)
    checking_s: float = field(default=0.0)


def file_name(content: bytes) -> str:
    """Name a module's file by its content."""
    return f"{hashlib.sha256(content).hexdigest()[:32]}.so"
