"""One case's way from request to record, and the sets of cases that a command asks for."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.build import Case, Kernel, Lowered, compiled, executable, lower
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.measure import IEEE, Arena, Plan, Rounds, gpu_identity, versions
from tensorir_ladder.harness.models import depth
from tensorir_ladder.harness.models.time import bound, predict_tile
from tensorir_ladder.harness.peers import Entrant, PeerKind, admit, peer_versions
from tensorir_ladder.harness.records import (
    Candidate,
    DepthForecast,
    Environment,
    Record,
    RecordError,
    Resources,
    Verification,
    now,
    read_text,
    write_atomically,
)
from tensorir_ladder.harness.tuning import STAGE_SET, Search, TuningSpace
from tensorir_ladder.harness.verify import WrongResult, verify
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.tiles import ThreadTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps

ROOT = Path(__file__).resolve().parent.parent
MEASURING_SOURCES = ("harness/**/*.py", "schedules/**/*.py", "kernels/**/*.py", "steps/*.py")


def git_state(root: Path) -> tuple[str, bool]:
    """The revision a tree is at and whether it differs from it; ("unknown", True) outside git."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain"])
    try:
        revision, status = (
            subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
    # Results that this very run writes do not make the code dirty.
    changed = [line for line in status.splitlines() if "reports/results/" not in line]
    return revision.strip(), bool(changed)


def sources_digest(root: Path, patterns: Iterable[str] = MEASURING_SOURCES) -> str:
    """A digest of the Python sources that shape a measurement, to tell trees apart where git is absent."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class Session:
    """Everything that cases of one command share: compiler, GPU, output folder, git state, builds.

    ``revision`` and ``dirty`` are asked of git where no revision is given. ``tune_stages`` lets a best
    tile bring its own number of ring slots. ``peers`` are timed in the same rounds as each case. ``forecasts``
    puts what the depth model says into each record.
    """

    compiler: Compiler
    backend: GpuBackend
    out: Path
    command: str
    plan: Plan = field(default_factory=Plan)
    tune_stages: bool = True
    revision: str = ""
    dirty: bool = False
    peers: tuple[PeerKind, ...] = ()
    forecasts: bool = False

    def __post_init__(self) -> None:
        self._arenas: dict[tuple[Matmul, int], Arena] = {}
        self._tuned: dict[Case, tuple[Case, tuple[dict[str, Any], ...]]] = {}
        self._lowered: dict[Case, Kernel] = {}
        self._built: dict[Case, tuple[Kernel, Callable[..., Any]]] = {}
        self._entrants: dict[Matmul, list[Entrant]] = {}
        self._checked: set[Case] = set()
        self._forecasts: dict[Case, DepthForecast | None] = {}
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
        """Operands for a problem, others for another seed; those before are let go, and their peers with them."""
        if (problem, first_seed) not in self._arenas:
            self._arenas.clear()
            self._entrants.clear()
            self.backend.torch.cuda.empty_cache()
            self._arenas[problem, first_seed] = Arena(problem, self.backend, first_seed)
        return self._arenas[problem, first_seed]

    def entrants(self, case: Case) -> list[Entrant]:
        """The session's peers on the problem of a case, tuned and checked once; never refused, see ``admit``."""
        arena = self.arena(case.problem)
        if case.problem not in self._entrants:
            admitted = [entrant for kind in self.peers for entrant in admit(kind, arena, case.machine)]
            self._entrants[case.problem] = admitted
        return self._entrants[case.problem]

    def load(self, case: Case) -> tuple[Kernel, Callable[..., Any]]:
        """The compiled kernel of a case and its callable, built once."""
        if case not in self._built:
            kernel = compiled(self._lowered.pop(case, None) or lower(case), self.compiler)
            self._built[case] = kernel, executable(kernel)["main"]
        return self._built[case]

    def check(self, case: Case) -> None:
        """Build a case and check its output, once; raises what lowering, compiling and verifying raise."""
        if case not in self._checked:
            kernel, run = self.load(case)
            verify(kernel, self.backend, seeds=(0,), run=run)
            self._checked.add(case)

    def prebuild(self, cases: Iterable[Case]) -> None:
        """Lower cases one after the other and compile them side by side, into the build cache."""
        for build in self.start_builds(cases):
            build.result()

    def start_builds(self, cases: Iterable[Case]) -> list[concurrent.futures.Future[Kernel]]:
        """Lower cases and leave their compilation to threads; illegal ones are reported where they are loaded."""
        lowered = {case: kernel for case in cases if case not in self._built and (kernel := _lower_or_none(case))}
        self._lowered.update(lowered)
        return [self._builders.submit(compiled, kernel, self.compiler) for kernel in lowered.values()]

    def compile_together(self, kernels: Iterable[Lowered]) -> None:
        """Compile kernels side by side, into the build cache."""
        for build in [self._builders.submit(compiled, kernel, self.compiler) for kernel in kernels]:
            build.result()

    def tune(self, case: Case) -> Case:
        """The case with the best of its step's tiles, and the best stage count of STAGE_SET unless one was asked for.

        The search is :mod:`harness.tuning`'s, over this smaller space and without a confirmation, which the
        measurement that follows is. WrongResult where a candidate does not compute the product.
        """
        stages, tiles = case.step.stages if self.tune_stages else case.stages, case.step.tiles.best
        unchosen = replace(case, tile=tiles[0], stages=stages, tile_choice="best")
        if unchosen not in self._tuned:
            several = STAGE_SET if self.tune_stages and case.step.pipelined else (stages,)
            search = Search(self, unchosen, TuningSpace(tiles, several, (case.variant,), stages))
            ranked, outcome = search.run(), search.outcome()
            if wrong := [candidate for candidate in outcome if candidate.status == "wrong"]:
                raise WrongResult(wrong[0].why)
            self._tuned[unchosen] = ranked[0], tuple(map(_candidate_row, outcome))
        return self._tuned[unchosen][0]

    def measure(self, case: Case) -> Record:
        """Build, check and time one case beside cuBLAS, the step before and the peers; nothing is written yet."""
        return self.measure_together([case])[0]

    def measure_together(self, cases: Sequence[Case]) -> list[Record]:
        """Measure cases of one problem in the same rounds, a record each: then their times can be compared.

        cuBLAS, the steps before and the peers are timed once, for all records.
        """
        cases = [self.tune(case) if case.tile_choice == "best" else case for case in cases]
        checks = [verify(kernel, self.backend, run=run) for kernel, run in map(self.load, cases)]
        arena, entrants = self.arena(cases[0].problem), self.entrants(cases[0])
        before = {case: self._previous(case) for case in cases}
        earlier = dict.fromkeys(case for case in before.values() if case is not None and case not in cases)
        contenders = [(str(case), self.load(case)[1]) for case in cases]
        contenders += [*arena.cublas(cases[0].math), *((str(case), self.load(case)[1]) for case in earlier)]
        contenders += [(entrant.name, entrant.run) for entrant in entrants if entrant.run]
        rounds = arena.race(contenders, self.plan)
        own, (nn, nt, *others) = rounds.timings[: len(cases)], rounds.timings[len(cases) :]
        times = dict(zip(cases, own)) | {case: others.pop(0) for case in earlier}
        peers = tuple(entrant.peer(others.pop(0) if entrant.run else None) for entrant in entrants)
        return [
            self._record(
                case,
                self.load(case)[0],
                checked,
                times[case],
                (nn, nt),
                times.get(before[case]),
                rounds,
                peers=peers,
                depth=self.forecast(case) if self.forecasts else None,
            )
            for case, checked in zip(cases, checks)
        ]

    def forecast(self, case: Case) -> DepthForecast | None:
        """What the depth model says of a case's stage counts, worked out once; None for what it does not cover."""
        family = replace(case, stages=0)
        if family not in self._forecasts:
            try:
                self._forecasts[family] = depth.forecast(case, self._resources)
            except depth.NoForecast:
                self._forecasts[family] = None
        return self._forecasts[family]

    def _resources(self, case: Case) -> Resources:
        kernel = self._built[case][0] if case in self._built else compiled(lower(case), self.compiler)
        return kernel.resources

    def calibrate(self, problem: Matmul) -> Record:
        """cuBLAS against itself through the same path; the ratio must be 1."""
        arena = self.arena(problem)
        stored, _ = arena.cublas()
        rounds = arena.race([("cublas again", stored[1]), stored, (f"{stored[0]} once more", stored[1])], self.plan)
        own, first, second = rounds.timings
        a, b, c = arena.sets[0]
        error = self.backend.worst_error(c, self.backend.reference(problem, a, b))
        checked = Verification(True, self.backend.name, (), error, error, integers_exact=False)
        return self._record(None, None, checked, own, (first, second), None, rounds, problem)

    def _previous(self, case: Case) -> Case | None:
        """The step before on the same problem, with its default variant, if that takes the problem.

        With the case's tile and stages where both steps have tiles of one family, else with its own default.
        """
        steps = find_steps()
        earlier = [number for number in steps if number < case.step.number]
        if not earlier:
            return None
        step = steps[max(earlier)]
        variant = step.default_variant(case.machine.has_cp_async)
        if not step.takes(variant, case.problem.dtype, case.machine.has_cp_async):
            return None
        before = Case.default(step, case.problem, case.machine)
        if case.tile_choice == "best":
            return self.tune(replace(before, tile_choice="best"))
        chosen_for_it = case.tile_choice == "default" and step.tiles.choices
        same = step.tiles == case.step.tiles and not chosen_for_it
        stages = case.stages if step.pipelined else step.stages
        return replace(before, tile=case.tile, stages=stages, tile_choice=case.tile_choice) if same else before

    @staticmethod
    def _usual_stages(case: Case) -> int:
        usual = Case.default(case.step, case.problem, case.machine)
        return replace(case, stages=usual.stages).slots

    @staticmethod
    def _adds_pipeline(case: Case) -> bool:
        """Whether pipelining is what this case adds to the step before, so that its gain can be predicted."""
        before = find_steps().get(case.step.number - 1)
        threads_own_tiles = isinstance(case.tile, ThreadTile)
        return case.slots > 1 and threads_own_tiles and before is not None and not before.pipelined

    def environment(self, rounds: Rounds) -> Environment:
        """Where, when and with what the rounds were taken."""
        return Environment(
            **self.identity,
            before=rounds.before,
            after=rounds.after,
            versions={
                **versions(self.backend, self.compiler.version),
                **peer_versions(self.peers),
                "sources": sources_digest(ROOT),
            },
            revision=self.revision,
            dirty=self.dirty,
            recorded_at=now(),
        )

    def provenance(self, kernel: Kernel | None, arch: str, rounds: Rounds) -> dict[str, Any]:
        """The fields in which every record of a kernel says what was compiled, where it ran and how it was timed."""
        return {
            "source_sha256": kernel.source_sha256 if kernel else "",
            "cubin_sha256": kernel.cubin.sha256 if kernel else "",
            "arch": arch,
            "method": rounds.method,
            "environment": self.environment(rounds),
            "command": self.command,
        }

    def _record(
        self, case, kernel, checked, own, baseline, previous, rounds, problem=None, peers=(), depth=None
    ) -> Record:
        problem = problem or case.problem
        candidates = next((table for best, table in self._tuned.values() if best == case), ())
        prediction = predict_tile(kernel) if kernel and self._adds_pipeline(case) else None
        return Record(
            kind="step" if case else "calibration",
            step=case.step.number if case else 0,
            step_name=case.step.name if case else "cublas",
            variant=case.variant if case else "cublas",
            default_stages=not case or case.slots == self._usual_stages(case),
            default_variant=not case or case.variant == case.step.default_variant(case.machine.has_cp_async),
            **asdict(problem),
            math=case.math if case else IEEE,
            stages=case.slots if case else 1,
            tile=str(case.tile) if case else "",
            tile_choice=case.tile_choice if case else "given",
            timing=own,
            baseline=baseline,
            previous=previous,
            verification=checked,
            resources=kernel.resources if kernel else None,
            code=kernel.code if kernel else None,
            bound=bound(kernel, own.median_ms) if kernel else "unknown",
            predicted_gain_pct=round(prediction.gain_pct, 1) if prediction else None,
            candidates=candidates,
            **self.provenance(kernel, case.machine.arch if case else "", rounds),
            notes=kernel.warnings if kernel else (),
            peers=peers,
            depth=depth,
        )


def _candidate_row(candidate: Candidate) -> dict[str, Any]:
    """A candidate as records of the best tile list it: time_ms is None, with the reason, where it was not timed."""
    row = {"tile": candidate.tile, "stages": candidate.stages}
    timed = {"time_ms": candidate.times_ms[-1]} if candidate.times_ms else {"time_ms": None, "why": candidate.why}
    return row | timed


def _lower_or_none(case: Case) -> Kernel | None:
    try:
        return lower(case)
    except IllegalSchedule:
        return None  # reported where the case itself is loaded


class Journal:
    """Which cases of a command are done, on disk, so that the same command started again goes on.

    Cases are of any kind, told apart by their text. The file lies in the output folder and goes away when the
    command has finished all of them.
    """

    def __init__(self, out: Path, command: str, revision: str, cases: Sequence[Any]) -> None:
        plan = json.dumps([command, revision, [self._name(case) for case in cases]])
        self.path = out / f".unfinished-{hashlib.sha256(plan.encode()).hexdigest()[:16]}"
        self.done: set[str] = set()
        if self.path.is_file():
            try:
                done = json.loads(read_text(self.path))
            except json.JSONDecodeError:
                done = None
            if not isinstance(done, list) or not all(isinstance(case, str) for case in done):
                raise RecordError(f"{self.path} is not whole; delete it to start the command anew")
            self.done = set(done)

    def has(self, case: Any) -> bool:
        """Whether an earlier, interrupted run of this command measured the case."""
        return self._name(case) in self.done

    def add(self, case: Any) -> None:
        """Note a case whose record is on disk."""
        self.done.add(self._name(case))
        write_atomically(self.path, json.dumps(sorted(self.done)))

    @staticmethod
    def _name(case: Any) -> str:
        """What tells a case from the others of a command: its text, and how its tile was chosen where that differs."""
        return str(case) + getattr(case, "tile_choice", "")

    def finish(self) -> None:
        """Forget: all cases are done."""
        self.path.unlink(missing_ok=True)
