"""Keep what the cases of one command share: compiler, GPU, operands, builds, provenance, and which are done."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.build import Case, Kernel, Lowered, compiled, executable, lower
from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.environment import ROOT, git_state, gpu_identity, sources_digest, versions
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.race import Plan, Rounds
from tensorir_ladder.harness.records import Environment, Journal, now
from tensorir_ladder.harness.verify import verify
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.workloads import Matmul


@dataclass
class Session:
    """Builds, checks and keeps what the cases of one command share; writes nothing itself.

    ``revision`` and ``dirty`` are asked of git where no revision is given.
    """

    compiler: Compiler
    backend: GpuBackend
    out: Path
    command: str
    plan: Plan = field(default_factory=Plan)
    revision: str = ""
    dirty: bool = False

    def __post_init__(self) -> None:
        self._arenas: dict[tuple[Matmul, int], Arena] = {}
        self._lowered: dict[Case, Kernel] = {}
        self._built: dict[Case, tuple[Kernel, Callable[..., Any]]] = {}
        self._checked: set[Case] = set()
        if not self.revision:
            self.revision, self.dirty = git_state(ROOT)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Name, driver and power limit of the GPU."""
        return gpu_identity()

    @cached_property
    def _builders(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(os.cpu_count())

    def arena(self, problem: Matmul, first_seed: int = 0) -> Arena:
        """Put a problem's operands, drawn from ``first_seed`` on, on the GPU; those before are let go."""
        if (problem, first_seed) not in self._arenas:
            self._arenas.clear()
            self.backend.torch.cuda.empty_cache()
            self._arenas[problem, first_seed] = Arena(problem, self.backend, first_seed)
        return self._arenas[problem, first_seed]

    def load(self, case: Case) -> tuple[Kernel, Callable[..., Any]]:
        """Compile a case and load it as a callable, once."""
        if case not in self._built:
            kernel = compiled(self._lowered.pop(case, None) or lower(case), self.compiler)
            self._built[case] = kernel, executable(kernel)["main"]
        return self._built[case]

    def kernel(self, case: Case) -> Kernel:
        """Compile a case without loading it."""
        return self._built[case][0] if case in self._built else compiled(lower(case), self.compiler)

    def check(self, case: Case) -> None:
        """Build a case and check its output, once; raises what lowering, compiling and verifying raise."""
        if case not in self._checked:
            kernel, run = self.load(case)
            verify(kernel, self.backend, seeds=(0,), run=run)
            self._checked.add(case)

    def start_builds(self, cases: Iterable[Case]) -> list[concurrent.futures.Future[Kernel]]:
        """Lower cases and leave their compilation to threads; illegal ones are reported where they are loaded."""
        lowered = {case: kernel for case in cases if case not in self._built and (kernel := _lower_or_none(case))}
        self._lowered.update(lowered)
        return self._start(lowered.values())

    def prebuild(self, cases: Iterable[Case]) -> None:
        """Lower cases one after the other and compile them side by side, into the build cache."""
        for build in self.start_builds(cases):
            build.result()

    def compile_together(self, kernels: Iterable[Lowered]) -> None:
        """Compile kernels side by side, into the build cache."""
        for build in self._start(kernels):
            build.result()

    def _start(self, kernels: Iterable[Lowered]) -> list[concurrent.futures.Future]:
        return [self._builders.submit(compiled, kernel, self.compiler) for kernel in kernels]

    def environment(self, rounds: Rounds, more_versions: Mapping[str, str] | None = None) -> Environment:
        """Say where, when and with what the rounds were taken."""
        known = versions(self.backend, self.compiler.version) | dict(more_versions or {})
        return Environment(
            **self.identity,
            before=rounds.before,
            after=rounds.after,
            versions=known | {"sources": sources_digest(ROOT)},
            revision=self.revision,
            dirty=self.dirty,
            recorded_at=now(),
        )

    def provenance(
        self, kernel: Lowered | None, rounds: Rounds, more_versions: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Fill the fields in which every record says what was compiled, where it ran and how it was timed."""
        return {
            "source_sha256": kernel.source_sha256 if kernel else "",
            "cubin_sha256": kernel.cubin.sha256 if kernel else "",
            "arch": kernel.machine.arch if kernel else "",
            "method": rounds.method,
            "environment": self.environment(rounds, more_versions),
            "command": self.command,
        }


def _lower_or_none(case: Case) -> Kernel | None:
    try:
        return lower(case)
    except IllegalSchedule:
        return None  # reported where the case itself is loaded


class CaseJournal(Journal[str]):
    """The cases of a command that are done: their records are on disk.

    Cases are of any kind, told apart by their text.
    """

    def __init__(self, session: Session, name: str, cases: Sequence[Any]) -> None:
        plan = [session.command, session.revision, [_name(case) for case in cases]]
        super().__init__(session.out, name, plan, str)

    def has(self, case: Any) -> bool:
        """Tell whether an earlier, interrupted run of this command measured the case."""
        return _name(case) in self.entries

    def add(self, case: Any) -> None:
        """Note a case whose record is on disk."""
        super().add(_name(case))


def _name(case: Any) -> str:
    # How a tile was chosen tells apart cases whose text is the same.
    return str(case) + getattr(case, "tile_choice", "")
