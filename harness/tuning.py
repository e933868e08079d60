"""Choose a step's configuration for one problem by measuring every candidate of a declared space.

The search is successive halving, heat by heat: short rounds over all candidates, longer ones over the fastest quarter,
and again.
Candidates meet in batches, each beside cuBLAS; what is compared is their speed relative to cuBLAS in the same
rounds, so that batches measured minutes apart, or in another process, can stand side by side. Each candidate's
output is checked before it is timed. The fastest are then measured once more, longer and on other operands,
because the best of many is partly the luckiest; that confirmation gives the margin and the verdict.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tvm

from tensorir_ladder.harness.build import Case, lower
from tensorir_ladder.harness.race import RoundPlan, Rounds
from tensorir_ladder.harness.records import (
    Candidate,
    Environment,
    Journal,
    RecordError,
    TunedConfig,
    gpu_slug,
    load_tuned,
    median_interval,
)
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen.toolchain import CompileError
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.tiles import BlockTile
from tensorir_ladder.steps.step import Step

HEATS = (
    RoundPlan(rounds=7, warmup_ms=20.0),
    RoundPlan(rounds=9, warmup_ms=50.0),
    RoundPlan(rounds=11, warmup_ms=100.0),
)
CONFIRMATION = RoundPlan(rounds=31, warmup_ms=250.0)
CONFIRMATION_SEED = 1_000_000  # beyond the operands of any search
BATCH = 24
SURVIVING = 4  # one in so many goes on to the next heat
FEWEST_SURVIVORS = 4
# A kernel beside itself differs by up to this much (the committed calibrations: 0.999 to 1.001).
RESOLUTION = 0.001
STAGE_SET = (2, 3, 4)  # what `--tile best` tries


@dataclass(frozen=True)
class TuningSpace:
    """Every combination of a tile, a number of stages and a variant that a search may choose among.

    The variants must compute the same, in the same order of additions; the first is the step's default.
    """

    tiles: tuple[BlockTile, ...]
    stages: tuple[int, ...]
    variants: tuple[str, ...]
    default_stages: int

    @classmethod
    def of(cls, step: Step, async_copy: bool = True) -> TuningSpace:
        """Take what a step lets tuning vary."""
        variants = step.tuned_variants(async_copy)
        return cls(step.tiles_of(variants[0]).tuning, step.tuning_stages, variants, step.stages)

    def combinations(self) -> Iterator[tuple[str, int, BlockTile]]:
        """List every variant, stage count and tile, likely ones first: an early stop has seen what matters most.

        The default variant before the others, then stages near the default before distant ones, then tiles in order.
        """
        near = sorted(self.stages, key=lambda stages: (abs(stages - self.default_stages), stages))
        return itertools.product(self.variants, near, self.tiles)

    @property
    def digest(self) -> str:
        """Tells two spaces apart, whatever the order in which they list the same things."""
        parts = [sorted(map(str, part)) for part in (self.tiles, self.stages, self.variants)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def candidates(case: Case, space: TuningSpace) -> tuple[list[Case], list[Candidate]]:
    """List the space's legal cases of ``case``'s problem, likely ones first, and the illegal ones with the reason.

    Leave out a configuration that builds what an earlier one builds: more stages than there are k tiles, and a
    variant of the pipeline where there is but one stage.
    """
    legal: dict[tuple[object, ...], Case] = {}
    illegal: dict[tuple[object, ...], Candidate] = {}
    for variant, stages, tile in space.combinations():
        candidate = replace(case, variant=variant, tile=tile, stages=stages)
        if len(space.stages) > 1:
            candidate = replace(candidate, stages=candidate.stages_built)
        what = (candidate.tile, candidate.stages_built, candidate.variant if candidate.stages_built > 1 else "")
        try:
            candidate.validate()
            legal.setdefault(what, candidate)
        except IllegalSchedule as refused:
            illegal.setdefault(what, described(candidate, "illegal", str(refused)))
    return list(legal.values()), list(illegal.values())


class Owner(Protocol):
    """Tell whoever records a tuned configuration who searched: a :class:`harness.session.Session`, or a fleet's."""

    out: Path
    command: str

    @property
    def identity(self) -> dict[str, Any]:
        """Name, driver and power limit of the GPU."""

    def environment(self, rounds: Rounds) -> Environment:
        """Say where, when and with what the rounds were taken."""


class Findings:
    """Hold what is known of a space's candidates so far: ``found``, by case.

    ``known`` are candidates that an earlier, unfinished search has timed. IllegalSchedule where the machine can run
    none of the space.
    """

    def __init__(self, case: Case, space: TuningSpace, known: tuple[Candidate, ...] = ()) -> None:
        self.problem = case.problem
        self.legal, self.illegal = candidates(case, space)
        if not self.legal:
            raise IllegalSchedule(
                f"{case.step.name} {case.problem.shape}: no candidate of the tuning space is legal",
                value=f"{len(self.illegal)} candidates",
                limit=self.illegal[0].why,
                remedy="add smaller tiles to the step's TileSet",
            )
        earlier = {identity(candidate): candidate for candidate in known}
        self.found = {case: earlier[key] for case in self.legal if (key := identity(described(case))) in earlier}

    def ranked(self, heat: int | None = None) -> list[Case]:
        """List the cases that were timed, those that came furthest first, then by their last speed over cuBLAS.

        With ``heat``, only cases timed in it, by their speed there.
        """
        if heat is not None:
            timed = [case for case, candidate in self.found.items() if len(candidate.ratios) > heat]
            return sorted(timed, key=lambda case: -self.found[case].ratios[heat])
        timed = [case for case, candidate in self.found.items() if candidate.ratios]
        return sorted(timed, key=lambda case: (-len(self.found[case].ratios), -self.found[case].ratios[-1]))

    def known(self, case: Case) -> Candidate:
        """Return what the search found of a case; a bare description where it did not meet it."""
        return self.found.get(case, described(case))

    def outcome(self) -> tuple[Candidate, ...]:
        """List every candidate that was seen: timed ones, best first, then refused ones, then illegal ones."""
        refused = [candidate for candidate in self.found.values() if not candidate.ratios]
        return (*(self.found[case] for case in self.ranked()), *refused, *self.illegal)

    def require_timed(self) -> None:
        """Raise WrongResult or CompileError where no candidate could be timed."""
        if not self.ranked():
            refused = sorted(self.found.values(), key=lambda candidate: candidate.status != "wrong")[0]
            error = WrongResult if refused.status == "wrong" else CompileError
            raise error(f"no candidate may be timed; {refused.name} is {refused.status}: {refused.why}")


class Search(Findings):
    """Successive halving over a space's candidates, on one GPU; those that are known already are not timed again."""

    def __init__(self, session: Session, case: Case, space: TuningSpace, known: tuple[Candidate, ...] = ()) -> None:
        super().__init__(case, space, known)
        self.session = session

    def run(
        self, enough: Callable[[], bool] = lambda: False, after_batch: Callable[[str], None] = lambda _: None
    ) -> list[Case]:
        """Time the candidates, heat by heat; return those that were timed, best first.

        Stops before the batch at which ``enough`` says so, though not before the first. ``after_batch`` is told, in
        words, how far it is. WrongResult or CompileError where none could be timed.
        """
        field = self.legal
        for heat, plan in enumerate(HEATS):
            waiting = [case for case in field if self._waits_for(case, heat)]
            with contextlib.closing(self._built_ahead(waiting)) as batches:
                for batch in batches:
                    if self.ranked() and enough():
                        return self.ranked()
                    self._time(batch, plan)
                    done = sum(not self._waits_for(case, heat) for case in field)
                    after_batch(f"heat {heat + 1} of {len(HEATS)}: {done} of {len(field)} candidates")
            self.require_timed()
            timed = self.ranked(heat)
            field = timed[: max(FEWEST_SURVIVORS, -(-len(timed) // SURVIVING))]
        return self.ranked()

    def _waits_for(self, case: Case, heat: int) -> bool:
        known = self.found.get(case)
        return known is None or (known.status == "timed" and len(known.ratios) <= heat)

    def _built_ahead(self, cases: list[Case]) -> Iterator[list[Case]]:
        # Each batch is built when its turn comes; the compiler works on the next one meanwhile.
        batches = [cases[start : start + BATCH] for start in range(0, len(cases), BATCH)]
        building = self.session.start_builds(batches[0]) if batches else []
        try:
            for batch, coming in zip(batches, [*batches[1:], []]):
                concurrent.futures.wait(building)
                building = self.session.start_builds(coming)
                yield batch
        finally:  # a search that stops early leaves no compiler running beside the confirmation
            for build in building:
                build.cancel()
            concurrent.futures.wait(building)

    def _time(self, batch: list[Case], plan: RoundPlan) -> None:
        running = [case for case in batch if self._passes(case)]
        if not running:
            return
        own = [(str(case), self.session.load(case)[1]) for case in running]
        cublas = self.session.arena(self.problem).cublas(running[0].math)
        *timings, stored, transposed = self.session.race(running[0], [*own, *cublas], plan).timings
        cublas_ms = min(stored.median_ms, transposed.median_ms)
        for case, timing in zip(running, timings):
            known = self.known(case)
            times, ratios = (*known.times_ms, timing.median_ms), (*known.ratios, cublas_ms / timing.median_ms)
            self.found[case] = replace(known, times_ms=times, ratios=ratios)

    def _passes(self, case: Case) -> bool:
        # One that is not right is noted with the reason, and never timed.
        try:
            self.session.check(case)
        except (IllegalSchedule, CompileError) as refused:
            self.found[case] = described(case, "not built", str(refused))
        except WrongResult as wrong:
            self.found[case] = described(case, "wrong", str(wrong))
        else:
            return True
        return False


@dataclass(frozen=True)
class Confirmation:
    """Winner, runner-up and verdict of the second measurement; :class:`harness.records.TunedConfig` has the figures."""

    winner: Case
    runner_up: Case | None
    verdict: str
    margin_pct: float | None
    margin_interval_pct: tuple[float, ...]
    rounds: Rounds


def confirm(session: Session, ranked: list[Case], default: Case) -> Confirmation:
    """Measure the two best of a search and the default again, on operands of their own, beside cuBLAS.

    The fastest is set against the second: each round gives one ratio of their times. Where the median ratio's
    interval does not lie clear of 1, by RESOLUTION, it is a tie, and the cheaper of the two is taken.
    """
    contenders = list(dict.fromkeys([*ranked[:2], default]))
    for case in contenders:
        session.check(case, large_k=True)
    own = [(str(case), session.load(case)[1]) for case in contenders]
    cublas = session.arena(default.problem, CONFIRMATION_SEED).cublas(default.math)
    rounds = session.race(default, [*own, *cublas], CONFIRMATION, CONFIRMATION_SEED)
    return judged(contenders, rounds, partial(cost, session))


def judged(contenders: list[Case], rounds: Rounds, price: Callable[[Case], tuple[int, int, int]]) -> Confirmation:
    """Find winner, runner-up and verdict in rounds of contenders, in their order, and of cuBLAS's forms behind them.

    ``price`` says which of two is the cheaper, as :func:`cost` does.
    """
    times = dict(zip(contenders, rounds.timings))
    by_speed = sorted(contenders, key=lambda case: times[case].median_ms)
    if len(by_speed) == 1:
        return Confirmation(by_speed[0], None, "alone", None, (), rounds)
    fastest, second = by_speed[:2]
    ratios = [slow / fast for fast, slow in zip(times[fastest].samples_ms, times[second].samples_ms)]
    verdict = "confirmed" if median_interval(ratios)[0] > 1 + RESOLUTION else "tie"
    winner, runner_up = by_speed[:2] if verdict == "confirmed" else sorted(by_speed[:2], key=price)
    ratios = [other / own for own, other in zip(times[winner].samples_ms, times[runner_up].samples_ms)]
    margins = tuple(100 * (bound - 1) for bound in (statistics.median(ratios), *median_interval(ratios)))
    order = [winner, runner_up, *(case for case in contenders if case not in (winner, runner_up))]
    rounds = replace(rounds, timings=(*(times[case] for case in order), *rounds.timings[len(contenders) :]))
    return Confirmation(winner, runner_up, verdict, margins[0], margins[1:], rounds)


def cost(session: Session, case: Case) -> tuple[int, int, int]:
    """Price a configuration, to be compared in this order: stages, shared bytes of a block, registers."""
    kernel = session.load(case)[0]
    return case.stages_built, kernel.smem_bytes, kernel.cubin.registers if kernel.cubin else 0


def default_case(case: Case) -> Case:
    """Return the step's default configuration for a case's problem, as :func:`candidates` would write it."""
    default = replace(Case.default(case.step, case.problem, case.machine), tile_choice=case.tile_choice)
    return replace(default, stages=default.stages_built)


def tune(
    session: Session,
    case: Case,
    budget_s: float | None = None,
    retune: bool = False,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> TunedConfig:
    """Find the best configuration of ``case``'s step for its problem: on disk if that is still good, else by measuring.

    What is on disk is good for the same space, kernels and versions, if it saw the whole space or as much as
    ``budget_s`` seconds allow; ``retune`` measures all the same. After each batch the search is on disk, and an
    interrupted one is gone on with. After ``budget_s`` seconds the search stops, and what it has is confirmed.
    RecordError names a file that is damaged; WrongResult or CompileError where no candidate can be timed.
    """
    started, space = clock(), TuningSpace.of(case.step, case.machine.has_cp_async)
    database = Database(session, case, space, kernels_digest(session.compiler.version, case, space))
    stored = None if retune else database.stored()
    if stored and (stored.seen == stored.legal or (budget_s or math.inf) <= (stored.budget_s or 0)):
        say(f"tuned on {stored.environment.recorded_at}, reused (--retune measures anew)")
        return stored
    with database.journal() as journal:
        known = tuple(candidate for batch in journal.entries for candidate in batch)  # of each the last counts
        search = Search(session, case, space, known or (stored.candidates if stored else ()))
        if search.found:
            say(f"going on with an unfinished search: {len(search.found)} of {len(search.legal)} candidates are known")
        kept = set(search.found.values()) if known else set()

        def after_batch(where: str) -> None:
            journal.add(tuple(candidate for candidate in search.found.values() if candidate not in kept))
            kept.update(search.found.values())
            best = [search.found[case] for case in search.ranked()[:1]]
            say(where + "".join(f"; best {found.name}, {found.ratios[-1]:.3f} of cuBLAS" for found in best))

        ranked = search.run(lambda: budget_s is not None and clock() - started >= budget_s, after_batch)
        tuned = database.save(search, confirm(session, ranked, default_case(case)), budget_s)
        journal.finish()
    return tuned


def tuned_case(session: Session, case: Case) -> Case:
    """Return ``case`` as it was tuned on this GPU, among the kernels and with the versions at hand.

    RecordError with the command that tunes it where it was not: what won among other kernels, or with another TVM or
    compiler, is not used.
    """
    problem, tuned = case.problem, _stored(session, case)
    space = TuningSpace.of(case.step, case.machine.has_cp_async)
    if tuned is None:
        lacking = f"was not tuned on this GPU (not in {session.out})"
    elif tuned.kernels_digest != kernels_digest(session.compiler.version, case, space):
        made_by = ", ".join(f"{name} {tuned.environment.versions.get(name)}" for name in ("tvm", "nvcc"))
        lacking = f"was tuned with other kernels or versions ({made_by}) on {tuned.environment.recorded_at}: not used"
    else:
        winner = tuned.winner
        tile = case.step.tile(winner.variant, winner.tile)
        chosen = replace(case, variant=winner.variant, tile=tile, stages=winner.stages)
        chosen.validate()
        return chosen
    output = "" if problem.out_dtype == problem.dtype else f" --out-dtype {problem.out_dtype}"
    named = f"--step {case.step.number} --shape {problem.shape} --dtype {problem.dtype}"
    again = f"{named}{output} --layout {problem.layout}"
    raise RecordError(f"{case.step.name} {problem.shape} {problem.dtype} {lacking}; run ladder tune {again} first")


def _stored(owner: Owner, case: Case) -> TunedConfig | None:
    """Read the newest tuned configuration of a case; RecordError where its winner is none of its candidates."""
    problem = case.problem
    shape = (problem.m, problem.n, problem.k)
    key = (owner.identity["gpu"], case.step.number, *shape, problem.layout, problem.dtype, problem.out_dtype)
    tuned = next((tuned for tuned in load_tuned(owner.out) if tuned.key == key), None)
    if tuned and tuned.winner not in tuned.candidates:
        raise RecordError(
            f"{owner.out}: {case.step.name} {problem.shape} was tuned to {tuned.winner.name!r}, which is none of "
            "its candidates; restore the file from git, or tune again with --retune"
        )
    return tuned


class Database:
    """One case's tuned configuration, and the journal of its unfinished search."""

    def __init__(self, owner: Owner, case: Case, space: TuningSpace, kernels: str) -> None:
        self.owner, self.case, self.space, self.kernels = owner, case, space, kernels

    def stored(self) -> TunedConfig | None:
        """Read what is on disk, if it was found in the same space among the same kernels."""
        found = _stored(self.owner, self.case)
        same = found and (found.space_digest, found.kernels_digest) == (self.space.digest, self.kernels)
        return found if same else None

    def journal(self) -> Journal[tuple[Candidate, ...]]:
        """Open what an interrupted search of the same space and kernels has found, a batch an entry."""
        gpu, step, problem = gpu_slug(self.owner.identity["gpu"]), self.case.step.number, self.case.problem
        plan = [gpu, step, asdict(problem), self.space.digest, self.kernels]
        return Journal(self.owner.out, f"tune-{gpu}-step{step}-{problem.shape}", plan, tuple[Candidate, ...])

    def save(self, search: Findings, confirmed: Confirmation, budget_s: float | None) -> TunedConfig:
        """Write down the outcome."""
        problem, default, runner_up = self.case.problem, default_case(self.case), confirmed.runner_up
        tuned = TunedConfig(
            step=self.case.step.number,
            step_name=self.case.step.name,
            **asdict(problem),
            math=self.case.math,
            arch=self.case.machine.arch,
            winner=search.known(confirmed.winner),
            runner_up=search.known(runner_up) if runner_up else None,
            verdict=confirmed.verdict,
            margin_pct=confirmed.margin_pct,
            margin_interval_pct=confirmed.margin_interval_pct,
            default=str(default),
            confirmation=confirmed.rounds.timings,
            legal=len(search.legal),
            candidates=search.outcome(),
            space={
                "tiles": [str(tile) for tile in self.space.tiles],
                "stages": list(self.space.stages),
                "variants": list(self.space.variants),
            },
            space_digest=self.space.digest,
            kernels_digest=self.kernels,
            budget_s=budget_s,
            method=confirmed.rounds.method,
            environment=self.owner.environment(confirmed.rounds),
            command=self.owner.command,
        )
        tuned.save(self.owner.out)
        return tuned


def kernels_digest(compiler: str, case: Case, space: TuningSpace) -> str:
    """Digest what the default configuration is lowered to in every variant of the space, and the versions.

    ``compiler``: its version.

    It tells a search's kernels from others: a change to the schedules shows in these texts, one to their comments
    does not.
    """
    default = default_case(case)
    texts = [lower(replace(default, variant=variant)).source_sha256 for variant in space.variants]
    parts = [*texts, tvm.__version__, compiler]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def described(case: Case, status: str = "timed", why: str = "") -> Candidate:
    """Name a case's configuration, and what became of it."""
    return Candidate(case.variant, str(case.tile), case.stages_built, status, why=why)


def identity(candidate: Candidate) -> tuple[str, str, int]:
    """Return what tells a candidate from others of its space."""
    return candidate.variant, candidate.tile, candidate.stages
