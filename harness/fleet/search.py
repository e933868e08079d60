"""The search over a fleet: which candidate is built and measured next, by whom; and what is kept of it.

Each GPU has a lane, a thread with a process that asks servers (:mod:`.asking`). A lane stays with a product as long as
there is work on it, since its operands are on that GPU, and waits a while for what is still built of it; it takes the
next product that nobody works on, and at last helps others. So products are built in turns, as many at once as there
are lanes, of each step a candidate after the other. A candidate meets cuBLAS and the best so far in the same rounds.
The best of a step's shape, and its default, are then measured once more, longer and on other operands, as one GPU alone
does (:mod:`harness.tuning`). Lanes begin when the first candidates are built, whatever else is still prepared.
"""

from __future__ import annotations

import os
import secrets
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tvm

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.environment import ROOT, sources_digest
from tensorir_ladder.harness.fleet import asking, building
from tensorir_ladder.harness.fleet.asking import Tracker, Trouble
from tensorir_ladder.harness.fleet.building import BuiltCandidate, NotBuilt
from tensorir_ladder.harness.fleet.choices import chosen_of, keep_choice
from tensorir_ladder.harness.fleet.crew import Crew
from tensorir_ladder.harness.fleet.database import TvmDatabase
from tensorir_ladder.harness.fleet.errors import FleetError, require_rpc
from tensorir_ladder.harness.fleet.messages import Answer, Identity, Request
from tensorir_ladder.harness.fleet.processes import Process, ProcessLost
from tensorir_ladder.harness.fleet.ranking import ranked_by_model
from tensorir_ladder.harness.large_k import large_k_case
from tensorir_ladder.harness.race import RoundPlan, Rounds
from tensorir_ladder.harness.records import (
    Candidate,
    Environment,
    FleetRun,
    MeasuredOn,
    TunedConfig,
    check_writable,
    gpu_slug,
    now,
)
from tensorir_ladder.harness.tuning import (
    CONFIRMATION,
    CONFIRMATION_SEED,
    Database,
    Findings,
    TuningSpace,
    candidates,
    default_case,
    described,
    judged,
    kernels_digest,
)
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen.toolchain import CompileError
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.tuned_here import kernel_digest

PLAN = RoundPlan(rounds=9, warmup_ms=30.0, sample_ms=1.0)  # of a candidate, the best so far and cuBLAS
MEASURE_S, CONFIRM_S = 120.0, 240.0  # that one may take; a kernel that hangs takes longer
IDLE_S = 2.0  # without a job, before a server is left to others
STAY_S = 1.0  # without a job of the product at hand that is still being built, before another product is taken
SETTLE_S = 0.3  # until a server that was just started is free, which is known a moment before
REGISTER_S = 15.0  # until servers that were just started are known to the tracker
LAST_OF_ALL = 1e6  # urgency of what is asked for when all is measured
MOST_ATTEMPTS = 3  # to measure a candidate whose server, or process, ends meanwhile
FINALISTS = 3  # by their speed in the search; the default is measured with them
AHEAD = 4  # builds for each process that are asked for before a server can say what machine it has
FORESEEN = 2  # candidates before the last: from here on, what would be finalists' checks are built


class Watcher(Protocol):
    """Who is told how far a search is."""

    def say(self, line: str) -> None:
        """Take a line about what went wrong, or is done."""

    def lane(self, number: int, text: str) -> None:
        """Take what a GPU measures, and the best so far there."""

    def total(self, done: int, of: int) -> None:
        """Take how many measurements are done, of how many."""


@dataclass(frozen=True)
class Plans:
    """Say how much to measure, and who waits how long.

    The best ``candidates`` by the model, all if None. ``jobs`` processes build. A server that is gone is waited for for
    ``patience_s``; one that somebody else waits for is kept for ``turn_s``.
    """

    candidates: int | None = 8
    retune: bool = False
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    patience_s: float = 60.0
    turn_s: float = 10.0
    seed: int | None = None


@dataclass
class FleetSession:
    """Hold what searches of one command share, as :class:`harness.session.Session` is to those of one GPU."""

    out: Path
    command: str
    compiler: Versioned
    identity: dict[str, Any]
    versions: dict[str, str]
    run: str
    tree: dict[str, Any]

    def environment(self, rounds: Rounds) -> Environment:
        """Say where, when and with what rounds were taken."""
        state = {"before": rounds.before, "after": rounds.after}
        return Environment(
            **self.identity, **state, versions=self.versions, **self.tree, recorded_at=now(), run=self.run
        )


@dataclass
class _Task:
    """One step's shape: what is to be measured, what is known, and who measures."""

    case: Case
    search: Findings
    database: Database
    journal: Any  # None of one that is done
    waiting: deque[Case]
    turn: int = 0  # in which its product is built
    writing: threading.Lock = field(default_factory=threading.Lock)  # of its journal
    builds: dict[Case, Future] = field(default_factory=dict)
    checks: dict[Case, Future] = field(default_factory=dict)  # with a long reduction
    best: Case | None = None
    running: int = 0
    attempts: Counter = field(default_factory=Counter)
    finalists: list[Case] = field(default_factory=list)
    tuned: TunedConfig | None = None
    failure: Exception | None = None

    @property
    def name(self) -> str:
        return f"{self.case.step.name} {self.case.problem.shape}"

    @property
    def done(self) -> bool:
        return self.tuned is not None or self.failure is not None

    @property
    def left(self) -> int:
        """Measurements that are still to be made, the finalists' among them."""
        return 0 if self.done else len(self.waiting) + self.running + 1

    @property
    def best_so_far(self) -> str:
        if self.best is None:
            return "none yet"
        known = self.search.found[self.best]
        return f"{known.name}, {known.ratios[-1]:.3f}"

    def built(self, case: Case) -> bool:
        return case in self.builds and self.builds[case].done()

    def checkable(self, case: Case) -> bool:
        return self.built(case) and case in self.checks and self.checks[case].done()

    @property
    def likely_finalists(self) -> list[Case]:
        """The fastest so far, the best of all its duels first, and the default."""
        leading = sorted(self.search.ranked()[:FINALISTS], key=lambda case: case != self.best)
        return list(dict.fromkeys([*leading, default_case(self.case)]))


@dataclass(frozen=True)
class _Job:
    task: _Task
    case: Case | None  # None: the finalists

    @property
    def cases(self) -> list[Case]:
        return list(self.task.finalists) if self.case is None else [self.case]

    def __str__(self) -> str:
        return f"{self.task.name} {described(self.case).name if self.case else 'the finalists'}"


def build_ahead(crew: Crew, place: str, compiler: str, plans: Plans, cases: Sequence[Case], lanes: int) -> None:
    """Have a crew begin, while servers start, with what a search of ``cases`` on ``lanes`` servers asks for first.

    AHEAD builds for each process. Of a search for another machine than that of ``cases`` nothing is ready then.
    """
    left, turns = AHEAD * plans.jobs, _turns(cases, lanes)
    for case, turn in zip(cases, turns):
        if left <= 0:
            break
        space = TuningSpace.of(case.step, case.machine.has_cp_async)
        crew.build(_first_of(turn), kernels_digest, compiler, case, space)
        for number, each in enumerate(_asked_first(case, candidates(case, space)[0], plans.candidates)):
            crew.build(_urgency(turn, number), building.build, each, place)
            left -= 1


def _turns(cases: Sequence[Case], lanes: int) -> list[int]:
    """Number the turns in which products are built: in each as many as there are lanes, which work on them at once."""
    numbers = {problem: number for number, problem in enumerate(dict.fromkeys(case.problem for case in cases))}
    return [numbers[case.problem] // max(1, lanes) for case in cases]


def _first_of(turn: int) -> float:
    """Return the urgency of what a turn's candidates cannot be asked for without: with those of the turn before."""
    return turn - 1.0


def _urgency(turn: int, number: int) -> float:
    """Return the urgency of a step's candidate by its number: of all a turn's steps the first, then the second, …"""
    return turn + number / (number + 1)


def _asked_first(case: Case, legal: list[Case], most: int | None) -> list[Case]:
    """List what is measured: the best by the model, and always the default."""
    asked, default = ranked_by_model(legal)[:most], default_case(case)
    return asked if default in asked or default not in legal else [default, *asked]


class FleetSearch:
    """Tunes cases on all servers of a tracker's key; ``expected`` of them were just started.

    FleetError for a tracker, a key or servers that cannot be worked with, before anything is measured; RecordError for
    a folder that takes no records, and where another process writes the same searches there.
    """

    def __init__(
        self,
        tracker: Tracker,
        place: str,
        out: Path,
        command: str,
        plans: Plans,
        watcher: Watcher,
        compiler: str,
        tree: dict[str, Any],
        expected: int = 0,
        crew: Crew | None = None,
        begun: float | None = None,
    ) -> None:
        require_rpc()
        check_writable(out)
        self._tracker, self._place, self._out, self._command = tracker, place, out, command
        self._plans, self._watcher, self._compiler, self._tree = plans, watcher, compiler, tree
        self._expected, self._run = expected, secrets.token_hex(8)
        self._begun = time.monotonic() if begun is None else begun
        self._crew = crew or Crew(plans.jobs, expected)
        self._condition = threading.Condition()
        self._tasks: list[_Task] = []
        self._prepared = False
        self._first: tuple[str, Identity] | None = None  # server that a lane has taken
        self._like: Identity | None = None
        self._lanes: dict[int, Matmul | None] = {}  # those that measure; the product that each has on its GPU
        self._error: BaseException | None = None
        self._stopped = False
        self._why = ""  # the last lane had no server
        self._long: set[str] = set()  # files of checks with a long reduction that a server has found right
        self._known = self._lost = self._timed = self._measured = 0
        self._starting_s = 0.0
        self._busy_s: Counter[str] = Counter()
        self._checking_s: Counter[str] = Counter()
        self._waiting_s: Counter[str] = Counter()

    def run(self, cases: Callable[[Identity], list[Case]]) -> list[TunedConfig]:
        """Tune what ``cases`` names for the servers' GPU; return what was found, in that order.

        Every task is gone through; then the first failure of one is raised.
        """
        with ExitStack() as stack:
            stack.callback(self._end)
            self._start_lanes()
            self._like = self._identify()
            self._session = self._session_of(self._like)
            order = self._prepare(cases(self._like), stack)
            if self._tasks:
                self._measure()
            self._keep_choices([task for task in order if task.tuned])
            self._record(time.monotonic() - self._begun)
        for task in order:
            if task.failure:
                raise task.failure
        return [task.tuned for task in order if task.tuned]

    # Before measuring

    def _start_lanes(self) -> None:
        askers = self._crew.require_askers(self._count_servers())
        self._lanes = dict.fromkeys(range(len(askers)))
        for number, process in enumerate(askers):
            threading.Thread(target=self._lane, args=(number, process), daemon=True).start()

    def _count_servers(self) -> int:
        tracker, begun = self._tracker, time.monotonic()
        servers, free, _ = tracker.summary()
        while servers < self._expected and time.monotonic() - begun < REGISTER_S:
            time.sleep(asking.POLL_S)
            servers, free, _ = tracker.summary()
        settled = time.monotonic() + SETTLE_S
        while free < servers and time.monotonic() < settled:
            time.sleep(asking.POLL_S)
            servers, free, _ = tracker.summary()
        if not servers:
            keys = ", ".join(tracker.keys()) or "none"
            raise FleetError(
                f"tracker {tracker.address} knows no server of key {tracker.key!r} (keys there: {keys}); start some "
                f"with ladder serve --tracker {tracker.address} --key {tracker.key}"
            )
        taken = f", {servers - free} of them taken by others, who give them up in turn" if free < servers else ""
        since_s = time.monotonic() - self._begun
        self._watcher.say(
            f"{servers} servers of key {tracker.key!r} at tracker {tracker.address}, {since_s:.1f} s{taken}"
        )
        return servers

    def _identify(self) -> Identity:
        """Wait for the first lane that has a server; what that one is, the others' must be."""
        with self._condition:
            while not self._first and self._lanes and not self._error:
                self._condition.wait(0.5)
        if self._error:
            raise self._error
        if not self._first:
            raise FleetError(self._why)
        where, there = self._first
        here = replace(there, versions=there.versions | {"tvm": tvm.__version__}, sources=sources_digest(ROOT))
        if other := here.differs(there):
            raise FleetError(f"the server at {where} has {other.replace('the others have', 'this machine has')}")
        if (there.arch == "") != (self._place == "llvm"):
            runs = "the CPU, through LLVM" if not there.arch else "a GPU"
            raise FleetError(f"servers of key {self._tracker.key!r} run kernels on {runs}; give --on, or another --key")
        return there

    def _session_of(self, identity: Identity) -> FleetSession:
        names = ("gpu", "gpu_uuid", "driver", "power_limit_w", "multiprocessors")
        known = {name: getattr(identity, name) for name in names}
        compiler = {"nvcc" if self._place == "gpu" else "compiler": self._compiler}
        versions = identity.versions | compiler | {"sources": identity.sources}
        return FleetSession(self._out, self._command, Versioned(self._compiler), known, versions, self._run, self._tree)

    def _prepare(self, cases: Sequence[Case], stack: ExitStack) -> list[_Task]:
        """Make a task of each case, and have built, in their order, those that have no good result on disk."""
        spaces = [TuningSpace.of(case.step, case.machine.has_cp_async) for case in cases]
        turns = _turns(cases, len(self._lanes))
        digests = [
            self._crew.build(_first_of(turn), kernels_digest, self._compiler, case, space)
            for case, space, turn in zip(cases, spaces, turns)
        ]
        order = []
        for turn, *each in zip(turns, cases, spaces, digests):
            task = self._task(*each, stack)
            task.turn = turn
            order.append(task)
            if not task.done:
                self._begin(task)
        with self._condition:
            self._prepared = True
            self._condition.notify_all()
        if self._known:
            self._watcher.say(f"going on with an unfinished search: {self._known} candidates are known")
        return order

    def _begin(self, task: _Task) -> None:
        """Have a task's candidates built, and let lanes have it."""
        if not self._tasks:
            assert self._like is not None
            self._database = TvmDatabase(self._out / f"{gpu_slug(self._like.gpu)}-tvm")
        for number, case in enumerate((*([task.best] if task.best else []), *task.waiting)):
            self._want(task, case, number)
        with self._condition:
            self._known += len(task.search.found)
            self._tasks.append(task)
            self._condition.notify_all()

    def _task(self, case: Case, space: TuningSpace, digest: Future, stack: ExitStack) -> _Task:
        kernels = digest.result()
        if isinstance(kernels, NotBuilt):
            raise FleetError(f"{case.step.name} {case.problem.shape}: {kernels.why}")
        database = Database(self._session, case, space, kernels)
        with self._condition:  # in which lanes write what is read here
            kept = None if self._plans.retune else database.stored()
        legal = len(candidates(case, space)[0])
        wanted = legal if self._plans.candidates is None else min(self._plans.candidates, legal)
        journal, known = None, kept.candidates if kept else ()
        if not kept or kept.seen < wanted:
            kept, journal = None, stack.enter_context(database.journal())
            known = tuple(candidate for batch in journal.entries for candidate in batch) or known
        search = Findings(case, space, known)
        asked = _asked_first(case, search.legal, wanted)
        task = _Task(case, search, database, journal, deque(case for case in asked if case not in search.found))
        task.best, task.tuned = next(iter(search.ranked()), None), kept
        if kept:
            when = kept.environment.recorded_at
            self._watcher.say(f"{task.name}: tuned on {when}, reused (--retune measures anew)")
        return task

    def _want(self, task: _Task, case: Case, number: int = 0) -> None:
        """Have a candidate built, once, in the order of its number among the task's."""
        if case not in task.builds:
            task.builds[case] = self._crew.build(_urgency(task.turn, number), building.build, case, self._place)
            task.builds[case].add_done_callback(self._wake)

    def _want_check(self, task: _Task, case: Case) -> None:
        """Have a likely finalist built, and what checks its configuration with a long reduction, whatever the shape."""
        self._want(task, case)
        if case in task.checks:
            return
        long = large_k_case(case, self._place)
        if isinstance(long, str):
            task.checks[case] = Future()
            task.checks[case].set_result(None)
        else:
            task.checks[case] = self._crew.build(_urgency(task.turn, 0), building.build_check, long, self._place)
            task.checks[case].add_done_callback(self._wake)

    def _wake(self, _: object = None) -> None:
        with self._condition:
            self._condition.notify_all()

    # Measuring

    def _measure(self) -> None:
        with self._condition:
            while self._unfinished and self._lanes and not self._error:
                self._condition.wait(0.5)
                left = sum(task.left for task in self._tasks)
                self._watcher.total(self._measured, self._measured + left)
        if self._error:
            raise self._error
        if self._unfinished:
            raise FleetError("no server is left; what is measured is on disk, and the same command goes on from there")

    @property
    def _unfinished(self) -> bool:
        return not self._prepared or any(not task.done for task in self._tasks)

    def _lane(self, number: int, process: Process) -> None:
        """Measure on one server, and on another where that is lost, until all is done or none is to be had."""
        try:
            attempts = 0
            while self._goes_on and attempts < MOST_ATTEMPTS:
                taken = self._server_of(process)
                if isinstance(taken, Trouble):
                    attempts = MOST_ATTEMPTS if taken.none else attempts + 1
                    self._drop(number, taken.why, attempts)
                    continue
                self._greet(process, taken)
                if job := self._next(number, taken[1]):
                    attempts = 0
                    self._do(number, process, job, taken[1])
                else:  # nobody keeps a server from others while there is nothing to do
                    process.ask(asking.yield_server, self._tracker, self._plans.turn_s)
        except ProcessLost as error:
            if self._goes_on:  # otherwise the process that asks was ended with the search
                self._watcher.say(f"{error}; the other servers go on")
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._error = self._error or error
        with self._condition:
            self._lanes.pop(number, None)
            self._condition.notify_all()
        self._watcher.lane(number, "done")

    def _greet(self, process: Process, taken: tuple[str, Identity]) -> None:
        """Take note of a lane's first server, which is then prepared while the first candidates are built."""
        if not self._starting_s:
            with self._condition:
                self._first = self._first or taken
                self._condition.notify_all()
            process.ask(asking.prepare_server)

    @property
    def _goes_on(self) -> bool:
        return self._unfinished and not self._error and not self._stopped

    def _drop(self, number: int, why: str, attempts: int) -> None:
        """Say why a lane has no server; at the last attempt it ends."""
        if not self._goes_on:
            return
        with self._condition:
            self._why = why
            if attempts >= MOST_ATTEMPTS:
                self._lanes.pop(number, None)
                why += f"; {len(self._lanes)} other lanes go on"
        if self._lanes or self._first:  # otherwise it is why there is no search
            self._watcher.say(why)

    def _next(self, number: int, server: Identity) -> _Job | None:
        """Wait a moment for a job whose modules are built; None where there is none."""
        begun = time.monotonic()
        with self._condition:
            try:
                return self._awaited(number)
            finally:
                if self._starting_s:
                    self._waiting_s[server.gpu_uuid] += time.monotonic() - begun

    def _awaited(self, number: int) -> _Job | None:
        begun = time.monotonic()
        while self._goes_on and (idle_s := time.monotonic() - begun) < IDLE_S:
            if job := self._pick(number, leave=idle_s >= STAY_S):
                job.task.running += 1
                self._lanes[number] = job.task.case.problem
                return job
            self._condition.wait(STAY_S - idle_s if idle_s < STAY_S else IDLE_S - idle_s)
        return None

    def _pick(self, number: int, leave: bool = True) -> _Job | None:
        """Choose what to measure: of the product at hand, else of one that nobody has, else where most is left.

        Of a product first the candidates of all its tasks, then the finalists, whose operands are others. Unless it may
        ``leave`` it, nothing of others is taken while something of the product at hand is still to be built.
        """
        open_tasks = [task for task in self._tasks if not task.done]
        mine = self._lanes[number]
        others = {problem for lane, problem in self._lanes.items() if lane != number}
        left: Counter[Matmul] = Counter()
        for task in open_tasks:
            left[task.case.problem] += task.left

        def place(problem: Matmul) -> tuple[bool, bool, int]:
            return problem != mine, problem in others, -left[problem] if problem in others else 0

        for problem in sorted(left, key=place):
            tasks = [task for task in open_tasks if task.case.problem == problem]
            for task in tasks:
                ready = task.best is None or task.built(task.best)
                case = next((case for case in task.waiting if ready and task.built(case)), None)
                if case is not None:
                    task.waiting.remove(case)
                    return _Job(task, case)
            for task in tasks:
                if not task.waiting and not task.running and self._choose_finalists(task):
                    return _Job(task, None)
            still_built = [task for task in tasks if not task.done and (task.waiting or not task.running)]
            if problem == mine and still_built and not leave:
                return None
        return None

    def _choose_finalists(self, task: _Task) -> bool:
        """Choose what is measured at last, once; True when all of it is built."""
        if not task.finalists:
            try:
                task.search.require_timed()
            except (WrongResult, CompileError) as error:
                self._fail(task, error)
                return False
            task.finalists = task.likely_finalists
            for case in task.finalists:
                self._want_check(task, case)
        return all(map(task.checkable, task.finalists))

    def _foresee(self, task: _Task) -> None:
        """Have finalists' checks built before the last candidates are measured, so that no lane waits for them."""
        if len(task.waiting) <= FORESEEN:
            for case in task.likely_finalists:
                self._want_check(task, case)

    def _fail(self, task: _Task, error: Exception) -> None:
        task.failure = type(error)(f"{task.name}: {error}")
        self._watcher.say(str(task.failure))
        self._condition.notify_all()

    def _do(self, number: int, process: Process, job: _Job, server: Identity) -> None:
        """Do a job, put it back, or give it up."""
        task = job.task
        try:
            refused = {case: why for case in job.cases if (why := self._refused(task, case, not job.case))}
            cases = [case for case in job.cases if case not in refused]
            if not job.case and (why := refused.get(default_case(task.case))):
                with self._condition:
                    self._fail(task, CompileError(f"its default: {why}"))
            elif cases:
                rival = task.best if job.case else None
                duel = [rival] if rival not in (None, job.case) and not self._refused(task, rival) else []
                self._watcher.lane(number, f"{server.gpu_uuid} {job}; best {task.best_so_far}")
                self._ask(process, job, [*cases, *duel])
        finally:
            with self._condition:
                task.running -= 1
                self._condition.notify_all()

    def _ask(self, process: Process, job: _Job, cases: list[Case]) -> None:
        task, final = job.task, job.case is None
        built: list[BuiltCandidate] = [task.builds[case].result() for case in cases]
        checks = {case: check for case in cases if final and (check := task.checks[case].result())}
        checks = {case: check for case, check in checks.items() if check.module.file not in self._long}
        request = Request(
            problem=task.case.problem,
            math=task.case.math,
            modules=tuple(each.module for each in built),
            plan=CONFIRMATION if final else PLAN,
            first_seed=CONFIRMATION_SEED if final else 0,
            also=tuple(checks.values()),
            seed=self._plans.seed,
        )
        limit_s = CONFIRM_S if final else MEASURE_S
        self._starting_s = self._starting_s or time.monotonic() - self._begun
        try:
            answer = process.ask(asking.measure, self._tracker, request, self._plans.turn_s, limit_s=limit_s)
        except ProcessLost as error:
            answer = Trouble(str(error))
        labels = {each.module.label: case for case, each in zip(cases, built)}
        labels |= {check.module.label: case for case, check in checks.items()}
        with self._condition:
            if isinstance(answer, Trouble) or answer.status == "failed" or answer.wrong not in ("", *labels):
                self._again(job, answer.why)
                return
            self._busy_s[answer.identity.gpu_uuid] += answer.took_s
            self._checking_s[answer.identity.gpu_uuid] += answer.checking_s
            if answer.status == "wrong":
                self._note_wrong(job, labels[answer.wrong], answer.why)
            elif final:
                self._long |= {check.module.file for check in checks.values()}
                self._note_confirmed(task, cases, answer)
        if answer.status == "timed" and not final:
            self._note_timed(task, cases, answer)

    def _server_of(self, process: Process) -> tuple[str, Identity] | Trouble:
        wanted = max(1, len(self._lanes))
        try:
            return process.ask(asking.take_server, self._tracker, wanted, self._plans.patience_s, self._like)
        except ProcessLost as error:
            return Trouble(str(error))

    def _again(self, job: _Job, why: str) -> None:
        """Put a job back, or give it up."""
        if not self._goes_on:
            return
        task = job.task
        self._lost += 1
        task.attempts[job.case] += 1
        given_up = task.attempts[job.case] >= MOST_ATTEMPTS
        self._watcher.say(f"{job}: {why}" + ("; given up" if given_up else "; it is measured again"))
        why = f"not measured in {MOST_ATTEMPTS} attempts: {why}"
        if job.case and given_up:
            self._note(task, described(job.case, "not built", why), job.case)
        elif job.case:
            task.waiting.appendleft(job.case)
        elif given_up:
            self._fail(task, FleetError(why))

    # What is kept

    def _refused(self, task: _Task, case: Case, final: bool = False) -> str:
        """Note a candidate that could not be built, or with ``final`` what checks it; return why, empty of others."""
        results = [each.result() for each in (task.builds[case], *([task.checks[case]] if final else []))]
        why = next((result.why for result in results if isinstance(result, NotBuilt)), "")
        if why:
            with self._condition:
                self._note(task, described(case, "not built", why), case)
        return why

    def _note(self, task: _Task, candidate: Candidate, case: Case) -> None:
        with task.writing:
            task.journal.add((candidate,))
        with self._condition:
            task.search.found[case] = candidate
            self._measured += 1
            self._foresee(task)

    def _note_timed(self, task: _Task, cases: list[Case], answer: Answer) -> None:
        """Keep a candidate's times. Lanes do so side by side: a disk takes longer to write than others can wait."""
        own, *others = answer.timings
        rivals, forms = others[: len(cases) - 1], others[len(cases) - 1 :]
        cublas = min(forms, key=lambda timing: timing.median_ms)
        ratio = statistics.median(own.ratios_to(cublas))
        where = MeasuredOn(answer.identity.gpu_uuid, answer.before, answer.after)
        known = replace(described(cases[0]), times_ms=(own.median_ms,), ratios=(ratio,), measured_on=where)
        self._database.add(task.case.problem, task.builds[cases[0]].result().entry, own.median_ms / 1e3)
        self._note(task, known, cases[0])
        with self._condition:
            self._timed += 1
            if all(statistics.median(own.ratios_to(rival)) > 1 for rival in rivals):
                task.best = cases[0]
            self._foresee(task)

    def _note_wrong(self, job: _Job, wrong: Case, why: str) -> None:
        task = job.task
        self._watcher.say(f"{job}: wrong result: {why}")
        self._note(task, described(wrong, "wrong", why), wrong)
        if job.case and wrong != job.case:
            task.waiting.appendleft(job.case)
        task.finalists, task.best = [], next(iter(task.search.ranked()), None)
        if task.best:
            self._want(task, task.best)
        if wrong == default_case(task.case):
            self._fail(task, WrongResult(why))

    def _note_confirmed(self, task: _Task, cases: list[Case], answer: Answer) -> None:
        rounds = Rounds(answer.timings, answer.method, answer.before, answer.after)
        costs = {case: task.builds[case].result().cost for case in cases}
        task.database.owner = self._session_of(answer.identity)  # the GPU that confirmed
        tuned = task.database.save(task.search, judged(cases, rounds, costs.__getitem__), None)
        task.journal.finish()
        task.tuned = tuned
        self._choice_digest(task)
        self._measured += 1
        beside = f"{tuned.time_ms:.4f} ms, {tuned.ratio_to_cublas:.3f} of {tuned.fastest_baseline.label}"
        self._watcher.say(f"{task.name}: {tuned.verdict}, {tuned.winner.name}: {beside}")

    def _keep_choices(self, tasks: list[_Task]) -> None:
        """Write down, for products of torch tensors, what was found among the kernels that they choose from."""
        for task, digest in [(task, self._choice_digest(task)) for task in tasks]:
            if digest and isinstance(digest.result(), str):
                keep_choice(self._out, task.tuned, digest.result())

    def _choice_digest(self, task: _Task) -> Future | None:
        """Have the digest made of the kernel that products of torch tensors would take, if they choose from such."""
        chosen = chosen_of(task.case, task.tuned)
        return self._crew.build(LAST_OF_ALL, kernel_digest, *chosen) if chosen else None

    def _record(self, wall_s: float) -> None:
        if self._measured:
            FleetRun(
                gpu=self._like.gpu,
                gpu_uuids=tuple(self._busy_s),
                build_jobs=self._plans.jobs,
                searches=len(self._tasks),
                timed=self._timed,
                known=self._known,
                lost=self._lost + self._crew.lost,
                wall_s=wall_s,
                starting_s=self._starting_s,
                measuring_s=tuple(self._busy_s.values()),
                checking_s=tuple(self._checking_s[uuid] for uuid in self._busy_s),
                waiting_s=tuple(self._waiting_s[uuid] for uuid in self._busy_s),
                versions=self._session.versions,
                **self._tree,
                recorded_at=now(),
                command=self._command,
            ).save(self._out)

    def _end(self) -> None:
        self._stopped = True
        self._wake()
        self._crew.close()


class Versioned(NamedTuple):
    """A compiler, as far as records ask."""

    version: str
