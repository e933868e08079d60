"""One case's way from request to record, and the sets of cases that a command asks for."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.build import Case, Kernel, Lowered, compiled, executable, lower
from harness.execution import GpuBackend
from harness.measure import Arena, Plan, Rounds, gpu_identity, versions
from harness.model import bound, predict_tile
from harness.records import Environment, Record, RecordError, Verification, now, read_text, write_atomically
from harness.toolchain import Compiler
from harness.verify import verify
from schedules.errors import IllegalSchedule
from schedules.workloads import Matmul
from steps.config import STAGE_SET, TILE_SET
from steps.registry import find_steps

ROOT = Path(__file__).resolve().parent.parent
MATH = "ieee"  # float32 products without TF32; half precision multiplies exactly and adds in float32
TUNING, FINAL = Plan(rounds=7, warmup_ms=20.0), Plan(rounds=9, warmup_ms=50.0)
FINALISTS = 4


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


def sources_digest(root: Path) -> str:
    """A digest of the Python sources that shape a measurement, to tell trees apart where git is absent."""
    digest = hashlib.sha256()
    for folder in ("harness", "schedules", "steps"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class Session:
    """Everything that cases of one command share: compiler, GPU, output folder, git state, builds.

    ``revision`` and ``dirty`` are asked of git where no revision is given. ``tune_stages`` lets a best
    tile bring its own number of ring slots.
    """

    compiler: Compiler
    backend: GpuBackend
    out: Path
    command: str
    plan: Plan = field(default_factory=Plan)
    tune_stages: bool = True
    revision: str = ""
    dirty: bool = False

    def __post_init__(self) -> None:
        self._arenas: dict[Matmul, Arena] = {}
        self._tuned: dict[Case, tuple[Case, tuple[dict[str, Any], ...]]] = {}
        self._built: dict[Case, tuple[Kernel, Callable[..., Any]]] = {}
        if not self.revision:
            self.revision, self.dirty = git_state(ROOT)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Name, driver and power limit of the GPU."""
        return gpu_identity()

    def arena(self, problem: Matmul) -> Arena:
        """Operands for a problem; those of the problem before are let go."""
        if problem not in self._arenas:
            self._arenas.clear()
            self.backend.torch.cuda.empty_cache()
            self._arenas[problem] = Arena(problem, self.backend)
        return self._arenas[problem]

    def load(self, case: Case) -> tuple[Kernel, Callable[..., Any]]:
        """The compiled kernel of a case and its callable, built once."""
        if case not in self._built:
            kernel = compiled(lower(case), self.compiler)
            self._built[case] = kernel, executable(kernel)["main"]
        return self._built[case]

    def prebuild(self, cases: Iterable[Case]) -> None:
        """Lower cases one after the other and compile them side by side, into the build cache."""
        self.compile_together(kernel for kernel in map(_lower_or_none, cases) if kernel)

    def compile_together(self, kernels: Iterable[Lowered]) -> None:
        """Compile kernels side by side, into the build cache."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            waiting = [pool.submit(compiled, kernel, self.compiler) for kernel in kernels]
            for future in waiting:
                future.result()

    def tune(self, case: Case) -> Case:
        """The case with the fastest tile of the declared set, all tiles timed in the same rounds.

        Quick rounds over all tiles; then the fastest few once more, in every stage count of STAGE_SET
        where the case is pipelined and its stage count was not asked for. Outputs are checked before a
        tile may win; one that is illegal for the case is noted with the reason.
        """
        unchosen = replace(case, tile=TILE_SET[0], tile_choice="best")
        if unchosen not in self._tuned:
            self._tuned[unchosen] = self._tune(unchosen)
        return self._tuned[unchosen][0]

    def _tune(self, case: Case) -> tuple[Case, tuple[dict[str, Any], ...]]:
        legal, illegal = self._checked([case.with_tile(tile, "best") for tile in TILE_SET])
        times = self._quick_times(legal, TUNING)
        fastest = sorted(legal, key=lambda candidate: times[candidate])[:FINALISTS]
        stages = STAGE_SET if self.tune_stages and case.slots > 1 else (case.stages,)
        finalists, _ = self._checked([replace(candidate, stages=count) for candidate in fastest for count in stages])
        times.update(self._quick_times(finalists, FINAL))
        best = min(finalists, key=lambda candidate: times[candidate])
        table = [
            {"tile": str(c.tile), "stages": c.slots, "time_ms": times[c]} for c in sorted(times, key=lambda c: times[c])
        ]
        return best, (*table, *illegal)

    def _checked(self, candidates: list[Case]) -> tuple[list[Case], list[dict[str, Any]]]:
        """The candidates that are legal, built and verified once; and the others, each with the reason."""
        self.prebuild(candidates)
        legal, illegal = [], []
        for candidate in candidates:
            try:
                if candidate not in self._built:
                    kernel, run = self.load(candidate)
                    verify(kernel, self.backend, seeds=(0,), run=run)
                legal.append(candidate)
            except IllegalSchedule as refused:
                why = {"time_ms": None, "why": str(refused)}
                illegal.append({"tile": str(candidate.tile), "stages": candidate.slots, **why})
        return legal, illegal

    def _quick_times(self, candidates: list[Case], plan: Plan) -> dict[Case, float]:
        rounds = self.arena(candidates[0].problem).race([(str(c), self.load(c)[1]) for c in candidates], plan)
        return {candidate: timing.median_ms for candidate, timing in zip(candidates, rounds.timings)}

    def measure(self, case: Case) -> Record:
        """Build, check and time one case beside cuBLAS and the step before; nothing is written yet."""
        if case.tile_choice == "best":
            case = self.tune(case)
        kernel, run = self.load(case)
        checked = verify(kernel, self.backend, run=run)
        arena = self.arena(case.problem)
        previous = self._previous(case)
        contenders = [(str(case), run), *arena.cublas()]
        if previous is not None:
            contenders.append((str(previous), self.load(previous)[1]))
        rounds = arena.race(contenders, self.plan)
        own, nn, nt, *before = rounds.timings
        return self._record(case, kernel, checked, own, (nn, nt), before[0] if before else None, rounds)

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
        """The step before on the same problem, with its default variant and its own choice of tile."""
        steps = find_steps()
        earlier = [number for number in steps if number < case.step.number]
        if not earlier:
            return None
        step = steps[max(earlier)]
        variant = step.default_variant(case.machine.has_cp_async)
        before = Case(step, case.problem, variant, case.tile, case.machine, case.stages, case.tile_choice)
        return self.tune(before) if case.tile_choice == "best" else before

    @staticmethod
    def _adds_pipeline(case: Case) -> bool:
        """Whether pipelining is what this case adds to the step before, so that its gain can be predicted."""
        before = find_steps().get(case.step.number - 1)
        return case.slots > 1 and before is not None and not before.pipelined

    def environment(self, rounds: Rounds) -> Environment:
        """Where, when and with what the rounds were taken."""
        return Environment(
            **self.identity,
            before=rounds.before,
            after=rounds.after,
            versions=versions(self.backend, self.compiler.version) | {"sources": sources_digest(ROOT)},
            revision=self.revision,
            dirty=self.dirty,
            recorded_at=now(),
        )

    def _record(self, case, kernel, checked, own, baseline, previous, rounds, problem=None) -> Record:
        problem = problem or case.problem
        candidates = next((table for best, table in self._tuned.values() if best == case), ())
        prediction = predict_tile(kernel) if kernel and self._adds_pipeline(case) else None
        return Record(
            kind="step" if case else "calibration",
            step=case.step.number if case else 0,
            step_name=case.step.name if case else "cublas",
            variant=case.variant if case else "cublas",
            default_variant=not case or case.variant == case.step.default_variant(case.machine.has_cp_async),
            m=problem.m,
            n=problem.n,
            k=problem.k,
            layout=problem.layout,
            dtype=problem.dtype,
            out_dtype=problem.out_dtype,
            math=MATH,
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
            source_sha256=kernel.source_sha256 if kernel else "",
            cubin_sha256=kernel.cubin.sha256 if kernel else "",
            arch=case.machine.arch if case else "",
            method=rounds.method,
            environment=self.environment(rounds),
            command=self.command,
            notes=kernel.warnings if kernel else (),
        )


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
