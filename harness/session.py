"""Keep what the cases of one command share: compiler, GPU, operands, builds, provenance, and which are done."""

from __future__ import annotations

import concurrent.futures
import os
import secrets
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.build import Case, Kernel, Lowered, compiled, executable, lower
from tensorir_ladder.harness.built_schedules import BuiltSchedule
from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.environment import ROOT, git_state, gpu_identity, sources_digest, versions
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.large_k import LargeK, large_k_case
from tensorir_ladder.harness.race import MEASURING, Contender, RoundPlan, Rounds
from tensorir_ladder.harness.records import Environment, Journal, Verification, now
from tensorir_ladder.harness.roofline import Roofline, product_roofline
from tensorir_ladder.harness.verify import SEEDS, draw_seeds, verify
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.workloads import Matmul


@dataclass
class Session:
    """Builds, checks and keeps what the cases of one command share; writes nothing itself.

    ``revision`` and ``dirty`` are asked of git where no revision is given. ``run`` tells this session's records from
    those of others. ``seed`` is the first of those that data to check with are drawn from; fresh ones where it is None.
    """

    compiler: Compiler
    backend: GpuBackend
    out: Path
    command: str
    plan: RoundPlan = MEASURING
    revision: str = ""
    dirty: bool = False
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    seed: int | None = None

    def __post_init__(self) -> None:
        self._arenas: dict[tuple[Matmul, int], Arena] = {}
        self._lowered: dict[Case, Kernel] = {}
        self._built: dict[Case, tuple[Kernel, Callable[..., Any]]] = {}
        self._checked: set[Case] = set()
        self._large_k = LargeK(self.backend, lambda case: self.load(case)[1])
        self._said: set[str] = set()
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

    def verify(self, case: Case) -> Verification:
        """Build a case and check its output, and its configuration with a large k.

        Raises what lowering, compiling and verifying raise.
        """
        kernel, run = self.load(case)
        checked = verify(kernel, self.backend, draw_seeds(self.seed, SEEDS), run)
        return replace(checked, large_k=self._large_k.check(case, checked.seeds[0]))

    def check(self, case: Case, large_k: bool = False) -> None:
        """Build a case and check its output on one seed's data, once; with ``large_k`` its configuration's too."""
        seeds = draw_seeds(self.seed, 1)
        if case not in self._checked:
            kernel, run = self.load(case)
            verify(kernel, self.backend, seeds, run)
            self._checked.add(case)
        if large_k:
            self._large_k.check(case, seeds[0])

    def race(
        self,
        case: Case,
        contenders: list[Contender],
        plan: RoundPlan,
        first_seed: int = 0,
        peers: Container[str] = (),
        beside: Sequence[int] = (),
    ) -> Rounds:
        """Time contenders on a case's problem; ImpossibleTime, with its name, for one that cannot have done the work.

        Those of ``peers`` are another's, and may have: see :meth:`roofline`. ``beside``: the places of cuBLAS's forms.
        """
        rounds = self.arena(case.problem, first_seed).race(contenders, plan, beside)
        held_to = self.roofline(case, first_seed)
        for timing in rounds.timings:
            if timing.label not in peers:
                held_to.check(timing)
        return rounds

    def roofline(self, case: Case, first_seed: int = 0) -> Roofline:
        """Find what times on a case's problem are held to."""
        from_memory = self.arena(case.problem, first_seed).from_memory
        return self.said(product_roofline(case.machine, case.problem, case.math, from_memory))

    def said(self, found: Roofline) -> Roofline:
        """Say, once, what times cannot be held to."""
        if found.unchecked and found.unchecked not in self._said:
            self._said.add(found.unchecked)
            print(found.unchecked, file=sys.stderr)
        return found

    def start_builds(self, cases: Iterable[Case]) -> list[concurrent.futures.Future[Kernel]]:
        """Lower cases and leave their compilation to threads; illegal ones are reported where they are loaded."""
        lowered = {case: kernel for case in cases if case not in self._built and (kernel := _lower_or_none(case))}
        self._lowered.update(lowered)
        return self._start(lowered.values())

    def prebuild(self, cases: Iterable[Case]) -> None:
        """Lower cases one after the other and compile them side by side, into the build cache."""
        for build in self.start_builds(cases):
            build.result()

    def large_k_cases(self, cases: Iterable[Case]) -> list[Case]:
        """List the cases with a large k that verifying these cases will build."""
        found = (large_k_case(case, self.backend.name) for case in cases if case.tile_choice != "best")
        return [case for case in dict.fromkeys(found) if isinstance(case, Case)]

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
            run=self.run,
        )

    def provenance(
        self, kernel: Lowered | BuiltSchedule | None, rounds: Rounds, more_versions: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Fill the fields in which every record says what was compiled, where it ran and how it was timed."""
        digests = kernel.digests if kernel else dict.fromkeys(("source_sha256", "cubin_sha256", "arch"), "")
        return {
            **digests,
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
