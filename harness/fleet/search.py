"""The search over a fleet: which candidate is built and measured next, by whom; and what is kept of it.

Each GPU has a lane, a thread with a process that asks servers (:mod:`.asking`). A lane stays with a product as long as
there is work on it, since its operands are on that GPU; it takes the next product that nobody works on, and at last
helps others. A candidate meets cuBLAS and the best so far in the same rounds. The two best of a step's shape, and its
default, are then measured once more, longer and on other operands, as one GPU alone does (:mod:`harness.tuning`).
"""

from __future__ import annotations

import os
import secrets
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tvm

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.environment import ROOT, sources_digest
from tensorir_ladder.harness.fleet import asking, building
from tensorir_ladder.harness.fleet.asking import Tracker, Trouble
from tensorir_ladder.harness.fleet.building import Built, NotBuilt
from tensorir_ladder.harness.fleet.choices import chosen_of, keep_choice
from tensorir_ladder.harness.fleet.database import TvmDatabase
from tensorir_ladder.harness.fleet.messages import Answer, Identity, Request
from tensorir_ladder.harness.fleet.processes import FleetError, Lost, Process, require_rpc
from tensorir_ladder.harness.fleet.ranking import ranked_by_model
from tensorir_ladder.harness.race import Plan, Rounds
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

PLAN = Plan(rounds=9, warmup_ms=30.0, sample_ms=1.0)  # of a candidate, the best so far and cuBLAS
MEASURE_S, CONFIRM_S, BUILD_S = 120.0, 240.0, 300.0  # that one may take; a kernel that hangs takes longer
IDLE_LOOKS = 4  # at whether there is a job, half a second each, before a server is left to others
REGISTER_S = 15.0  # until servers that were just started are known to the tracker
MOST_ATTEMPTS = 3  # to measure a candidate whose server, or process, ends meanwhile
FINALISTS = 3  # by their speed in the search; the default is measured with them


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
    builds: dict[Case, Future] = field(default_factory=dict)
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


@dataclass(frozen=True)
class _Job:
    task: _Task
    case: Case | None  # None: the finalists

    @property
    def cases(self) -> list[Case]:
        return list(self.task.finalists) if self.case is None else [self.case]

    def __str__(self) -> str:
        return f"{self.task.name} {described(self.case).name if self.case else 'the finalists'}"


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
    ) -> None:
        require_rpc()
        check_writable(out)
        self._tracker, self._place, self._out, self._command = tracker, place, out, command
        self._plans, self._watcher, self._compiler, self._tree = plans, watcher, compiler, tree
        self._expected, self._run = expected, secrets.token_hex(8)
        self._condition = threading.Condition()
        self._tasks: list[_Task] = []
        self._lanes: dict[int, Matmul | None] = {}  # those that measure; the product that each has on its GPU
        self._error: BaseException | None = None
        self._stopped = False
        self._builders: list[Process] = []
        self._own_builder = threading.local()
        self._known = self._lost = self._timed = self._measured = 0
        self._busy_s: dict[str, float] = {}

    def run(self, cases: Callable[[Identity], list[Case]]) -> list[TunedConfig]:
        """Tune what ``cases`` names for the servers' GPU; return what was found, in that order.

        Every task is gone through; then the first failure of one is raised.
        """
        begun = time.monotonic()
        with ExitStack() as stack:
            self._pool = ThreadPoolExecutor(self._plans.jobs)
            stack.callback(self._end)
            lanes = self._count_servers()
            for _ in range(self._plans.jobs):
                self._pool.submit(self._build, building.warm_up)
            self._askers = [Process() for _ in range(lanes)]
            stack.callback(lambda: [process.close() for process in self._askers])
            self._like = self._identify(self._askers[0])
            self._session = self._session_of(self._like)
            order = self._prepare(cases(self._like), stack)
            if self._tasks:
                self._database = TvmDatabase(self._out / f"{gpu_slug(self._like.gpu)}-tvm")
                self._measure()
                self._record(time.monotonic() - begun)
            self._keep_choices([task for task in order if task.tuned])
        for task in order:
            if task.failure:
                raise task.failure
        return [task.tuned for task in order if task.tuned]

    # Before measuring

    def _count_servers(self) -> int:
        tracker, begun = self._tracker, time.monotonic()
        servers, free, _ = tracker.summary()
        while servers < self._expected and time.monotonic() - begun < REGISTER_S:
            time.sleep(asking.POLL_S)
            servers, _, _ = tracker.summary()
        if free < servers:  # one that was just started is known a moment before it is free
            time.sleep(asking.POLL_S)
            servers, free, _ = tracker.summary()
        if not servers:
            keys = ", ".join(tracker.keys()) or "none"
            raise FleetError(
                f"tracker {tracker.address} knows no server of key {tracker.key!r} (keys there: {keys}); start some "
                f"with ladder serve --tracker {tracker.address} --key {tracker.key}"
            )
        taken = f", {servers - free} of them taken by others, who give them up in turn" if free < servers else ""
        self._watcher.say(f"{servers} servers of key {tracker.key!r} at tracker {tracker.address}{taken}")
        return servers

    def _identify(self, process: Process) -> Identity:
        found = self._server_of(process)
        for _ in range(MOST_ATTEMPTS - 1):
            if isinstance(found, Trouble) and not found.none:
                found = self._server_of(process)
        if isinstance(found, Trouble):
            raise FleetError(found.why)
        there = found[1]
        here = replace(there, versions=there.versions | {"tvm": tvm.__version__}, sources=sources_digest(ROOT))
        if other := here.differs(there):
            raise FleetError(f"the server at {found[0]} has {other.replace('the others have', 'this machine has')}")
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
        """Make a task of each case, and begin to build those that have no good result on disk."""
        spaces = [TuningSpace.of(case.step, case.machine.has_cp_async) for case in cases]
        digests = [
            self._pool.submit(self._build, kernels_digest, self._compiler, case, space)
            for case, space in zip(cases, spaces)
        ]
        order = [self._task(*each, stack) for each in zip(cases, spaces, digests)]
        self._tasks = [task for task in order if not task.done]
        self._known = sum(len(task.search.found) for task in self._tasks)
        if self._known:
            self._watcher.say(f"going on with an unfinished search: {self._known} candidates are known")
        for task in self._tasks:
            for case in (*([task.best] if task.best else []), *task.waiting):
                self._want(task, case)
        return order

    def _task(self, case: Case, space: TuningSpace, digest: Future, stack: ExitStack) -> _Task:
        kernels = digest.result()
        if isinstance(kernels, NotBuilt):
            raise FleetError(f"{case.step.name} {case.problem.shape}: {kernels.why}")
        database = Database(self._session, case, space, kernels)
        kept = None if self._plans.retune else database.stored()
        legal = len(candidates(case, space)[0])
        wanted = legal if self._plans.candidates is None else min(self._plans.candidates, legal)
        journal, known = None, kept.candidates if kept else ()
        if not kept or kept.seen < wanted:
            kept, journal = None, stack.enter_context(database.journal())
            known = tuple(candidate for batch in journal.entries for candidate in batch) or known
        search = Findings(case, space, known)
        asked, default = ranked_by_model(search.legal)[:wanted], default_case(case)
        if default in search.legal and default not in asked:
            asked = [default, *asked[:-1]]
        task = _Task(case, search, database, journal, deque(case for case in asked if case not in search.found))
        task.best, task.tuned = next(iter(search.ranked()), None), kept
        if kept:
            when = kept.environment.recorded_at
            self._watcher.say(f"{task.name}: tuned on {when}, reused (--retune measures anew)")
        return task

    def _want(self, task: _Task, case: Case, with_large_k: bool = False) -> None:
        """Have a candidate built, with what checks its configuration with a long reduction if that is wanted."""
        task.builds[case] = self._pool.submit(self._build, building.build, case, self._place, with_large_k)
        task.builds[case].add_done_callback(self._wake)

    def _wake(self, _: object = None) -> None:
        with self._condition:
            self._condition.notify_all()

    def _build(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Have this thread's own process do it; one that ended is started again."""
        why = "the search ended"
        for _ in range(MOST_ATTEMPTS):
            if self._stopped:
                break
            if not hasattr(self._own_builder, "process"):
                self._own_builder.process = Process(behind=True)
                self._builders.append(self._own_builder.process)
            try:
                return self._own_builder.process.ask(work, *arguments, limit_s=BUILD_S)
            except Lost as error:
                self._lost, why = self._lost + 1, f"{error}, while it was built"
        return NotBuilt(why)

    # Measuring

    def _measure(self) -> None:
        self._lanes = dict.fromkeys(range(len(self._askers)))
        for number, process in enumerate(self._askers):
            threading.Thread(target=self._lane, args=(number, process), daemon=True).start()
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
        return any(not task.done for task in self._tasks)

    def _lane(self, number: int, process: Process) -> None:
        """Measure on one server, and on another where that is lost, until all is done or none is to be had."""
        try:
            attempts = 0
            while self._goes_on and attempts < MOST_ATTEMPTS:
                taken = self._server_of(process)
                if isinstance(taken, Trouble):
                    attempts = MOST_ATTEMPTS if taken.none else attempts + 1
                    self._drop(number, taken.why, attempts)
                elif job := self._next(number):
                    attempts = 0
                    self._do(number, process, job, taken[1])
                else:  # nobody keeps a server from others while there is nothing to do
                    process.ask(asking.yield_server, self._tracker, self._plans.turn_s)
        except Lost as error:
            if self._goes_on:  # otherwise the process that asks was ended with the search
                self._watcher.say(f"{error}; the other servers go on")
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._error = self._error or error
        with self._condition:
            self._lanes.pop(number, None)
            self._condition.notify_all()
        self._watcher.lane(number, "done")

    @property
    def _goes_on(self) -> bool:
        return self._unfinished and not self._error and not self._stopped

    def _drop(self, number: int, why: str, attempts: int) -> None:
        """Say why a lane has no server; at the last attempt it ends."""
        if not self._goes_on:
            return
        with self._condition:
            if attempts >= MOST_ATTEMPTS:
                self._lanes.pop(number, None)
                why += f"; {len(self._lanes)} other lanes go on"
        self._watcher.say(why)

    def _next(self, number: int) -> _Job | None:
        """Wait a moment for a job whose modules are built; None where there is none."""
        with self._condition:
            for _ in range(IDLE_LOOKS):
                if not self._goes_on:
                    return None
                if job := self._pick(number):
                    job.task.running += 1
                    self._lanes[number] = job.task.case.problem
                    return job
                self._condition.wait(0.5)
        return None

    def _pick(self, number: int) -> _Job | None:
        """Choose what to measure: of the product at hand, else of one that nobody has, else where most is left."""
        mine = self._lanes[number]
        others = {problem for lane, problem in self._lanes.items() if lane != number}

        def place(task: _Task) -> tuple[bool, bool, int]:
            problem = task.case.problem
            return problem != mine, problem in others, -len(task.waiting)

        open_tasks = sorted((task for task in self._tasks if not task.done), key=place)
        for task in open_tasks:
            ready = task.best is None or task.built(task.best)
            case = next((case for case in task.waiting if ready and task.built(case)), None)
            if case is not None:
                task.waiting.remove(case)
                return _Job(task, case)
        for task in open_tasks:
            if not task.waiting and not task.running and self._choose_finalists(task):
                return _Job(task, None)
        return None

    def _choose_finalists(self, task: _Task) -> bool:
        """Choose what is measured at last, once; True when all of it is built."""
        if not task.finalists:
            ranked = task.search.ranked()
            try:
                task.search.require_timed()
            except (WrongResult, CompileError) as error:
                self._fail(task, error)
                return False
            leading = sorted(ranked[:FINALISTS], key=lambda case: case != task.best)
            task.finalists = list(dict.fromkeys([*leading, default_case(task.case)]))
            for case in task.finalists:
                self._want(task, case, with_large_k=True)
        return all(map(task.built, task.finalists))

    def _fail(self, task: _Task, error: Exception) -> None:
        task.failure = type(error)(f"{task.name}: {error}")
        self._watcher.say(str(task.failure))
        self._condition.notify_all()

    def _do(self, number: int, process: Process, job: _Job, server: Identity) -> None:
        """Do a job, put it back, or give it up."""
        task = job.task
        try:
            refused = [case for case in job.cases if self._refused(task, case)]
            cases = [case for case in job.cases if case not in refused]
            if not job.case and default_case(task.case) in refused:
                with self._condition:
                    self._fail(task, CompileError(f"its default: {task.builds[refused[0]].result().why}"))
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
        built: list[Built] = [task.builds[case].result() for case in cases]
        request = Request(
            problem=task.case.problem,
            math=task.case.math,
            modules=tuple(each.module for each in built),
            plan=CONFIRMATION if final else PLAN,
            first_seed=CONFIRMATION_SEED if final else 0,
            also=tuple(each.large_k for each in built if each.large_k) if final else (),
            seed=self._plans.seed,
        )
        limit_s = CONFIRM_S if final else MEASURE_S
        try:
            answer = process.ask(asking.measure, self._tracker, request, self._plans.turn_s, limit_s=limit_s)
        except Lost as error:
            answer = Trouble(str(error))
        labels = {each.module.label: case for case, each in zip(cases, built)}
        labels |= {each.large_k.module.label: case for case, each in zip(cases, built) if each.large_k}
        with self._condition:
            if isinstance(answer, Trouble) or answer.status == "failed" or answer.wrong not in ("", *labels):
                self._again(job, answer.why)
                return
            busy = self._busy_s.get(answer.identity.gpu_uuid, 0.0)
            self._busy_s[answer.identity.gpu_uuid] = busy + answer.took_s
            if answer.status == "wrong":
                self._note_wrong(job, labels[answer.wrong], answer.why)
            elif final:
                self._note_confirmed(task, cases, answer)
            else:
                self._note_timed(task, cases, answer)

    def _server_of(self, process: Process) -> tuple[str, Identity] | Trouble:
        wanted, like = max(1, len(self._lanes)), getattr(self, "_like", None)
        try:
            return process.ask(asking.take_server, self._tracker, wanted, self._plans.patience_s, like)
        except Lost as error:
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

    def _refused(self, task: _Task, case: Case) -> bool:
        """Note a candidate that could not be built; True for one."""
        built = task.builds[case].result()
        if isinstance(built, NotBuilt):
            with self._condition:
                self._note(task, described(case, "not built", built.why), case)
        return isinstance(built, NotBuilt)

    def _note(self, task: _Task, candidate: Candidate, case: Case) -> None:
        task.search.found[case] = candidate
        task.journal.add((candidate,))
        self._measured += 1

    def _note_timed(self, task: _Task, cases: list[Case], answer: Answer) -> None:
        own, *others = answer.timings
        rivals, forms = others[: len(cases) - 1], others[len(cases) - 1 :]
        cublas = min(forms, key=lambda timing: timing.median_ms)
        ratio = statistics.median(own.ratios_to(cublas))
        where = MeasuredOn(answer.identity.gpu_uuid, answer.before, answer.after)
        known = replace(described(cases[0]), times_ms=(own.median_ms,), ratios=(ratio,), measured_on=where)
        self._database.add(task.case.problem, task.builds[cases[0]].result().entry, own.median_ms / 1e3)
        self._note(task, known, cases[0])
        self._timed += 1
        if all(statistics.median(own.ratios_to(rival)) > 1 for rival in rivals):
            task.best = cases[0]

    def _note_wrong(self, job: _Job, wrong: Case, why: str) -> None:
        task = job.task
        self._watcher.say(f"{job}: wrong result: {why}")
        self._note(task, described(wrong, "wrong", why), wrong)
        if job.case and wrong != job.case:
            task.waiting.appendleft(job.case)
        task.finalists, task.best = [], next(iter(task.search.ranked()), None)
        if task.best and task.best not in task.builds:
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
        self._measured += 1
        beside = f"{tuned.time_ms:.4f} ms, {tuned.ratio_to_cublas:.3f} of {tuned.fastest_baseline.label}"
        self._watcher.say(f"{task.name}: {tuned.verdict}, {tuned.winner.name}: {beside}")

    def _keep_choices(self, tasks: list[_Task]) -> None:
        """Write down, for products of torch tensors, what was found among the kernels that they choose from."""
        made = [
            (self._pool.submit(self._build, kernel_digest, *chosen), found)
            for task in tasks
            if (chosen := chosen_of(task.case, task.tuned)) and (found := task.tuned)
        ]
        for digest, tuned in made:
            if isinstance(digest.result(), str):
                keep_choice(self._out, tuned, digest.result())

    def _record(self, wall_s: float) -> None:
        if self._measured:
            FleetRun(
                gpu=self._like.gpu,
                gpu_uuids=tuple(self._busy_s),
                build_jobs=self._plans.jobs,
                searches=len(self._tasks),
                timed=self._timed,
                known=self._known,
                lost=self._lost,
                wall_s=wall_s,
                measuring_s=tuple(self._busy_s.values()),
                versions=self._session.versions,
                **self._tree,
                recorded_at=now(),
                command=self._command,
            ).save(self._out)

    def _end(self) -> None:
        self._stopped = True
        self._wake()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._builders:
            process.close()


class Versioned(NamedTuple):
    """A compiler, as far as records ask."""

    version: str
