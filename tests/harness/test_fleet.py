"""Tuning over several servers: a real tracker and two real servers that time on CPUs what LLVM built."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.s_tir import meta_schedule as ms

from support import imports
from support.cases import STEPS, Outcome, make_case, redeclare
from support.fake_gpu import FakeArena, FakeGpu
from tensorir_ladder.harness.build import Case, lower
from tensorir_ladder.harness.commands import tune
from tensorir_ladder.harness.fleet import hosting, serving, starting, working
from tensorir_ladder.harness.fleet.asking import Tracker
from tensorir_ladder.harness.fleet.building import CONFIG, BuiltCandidate, tuning_entry
from tensorir_ladder.harness.fleet.crew import Crew
from tensorir_ladder.harness.fleet.database import RECORDS, WORKLOADS, TvmDatabase
from tensorir_ladder.harness.fleet.errors import FleetError
from tensorir_ladder.harness.fleet.hosting import Host
from tensorir_ladder.harness.fleet.messages import Answer, Check, Identity, Module, Request
from tensorir_ladder.harness.fleet.processes import BuildSource, Process, ProcessLost
from tensorir_ladder.harness.fleet.ranking import modelled_costs, ranked_by_model, reached_by_model
from tensorir_ladder.harness.fleet.search import (
    FleetSearch,
    Plans,
    _first_of,
    _Job,
    _Task,
    _turns,
    _urgency,
    build_ahead,
)
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.race import RoundPlan
from tensorir_ladder.harness.records import FleetRun, RecordError, TunedConfig, decode, load_tuned, read_places
from tensorir_ladder.harness.tuning import Findings, TuningSpace, candidates, described
from tensorir_ladder.harness.verify import matmul_trial
from tensorir_ladder.schedules.tiles import Choice, ThreadTile
from tensorir_ladder.schedules.workloads import Matmul

psutil = pytest.importorskip("psutil")
pytest.importorskip("cloudpickle")
pytest.importorskip("tornado")

Command = Callable[..., Outcome]
SHAPE = (32, 32, 32)
DEVICES = [f"CPU-{os.uname().nodename}-cpu{number}" for number in range(2)]
TREE = {"revision": "abc", "dirty": False}


class Listener:
    """Keeps what a search tells; ``act`` is called at the n-th measurement, once."""

    def __init__(self, at: int = 0, act: Callable[[], object] = lambda: None) -> None:
        self.lines: list[str] = []
        self.lanes: dict[int, list[str]] = {}
        self.at, self.act, self.acted = at, act, False

    def say(self, line: str) -> None:
        self.lines.append(line)

    def lane(self, number: int, text: str) -> None:
        self.lanes.setdefault(number, []).append(text)
        if self.at and not self.acted and sum(map(len, self.lanes.values())) >= self.at:
            self.acted = True
            self.act()

    def total(self, done: int, of: int) -> None:
        assert 0 <= done <= of


def a_search(host: Host, out: Path, listener: Listener | None = None, **plans: object) -> FleetSearch:
    """A search on a host's servers."""
    asked = Plans(**{"candidates": 4, "jobs": 2, "patience_s": 30.0} | plans)
    return FleetSearch(host.tracker, "llvm", out, "a command", asked, listener or Listener(), "llvm", TREE, expected=2)


def cases_of(*shapes: tuple[int, int, int], step: int = 3) -> Callable[[Identity], list[Case]]:
    """Cases of a step, as a search asks for them."""
    return lambda _: [replace(make_case(step, shape), tile_choice="tuned") for shape in shapes]


def descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if lives(process)]


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: list[psutil.Process], limit_s: float = 5.0) -> None:
    """None of the processes runs after a moment."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    assert list(filter(lives, alive)) == []


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A tracker and two servers."""
    with Host("llvm", ["cpu0", "cpu1"], "tests") as running:
        yield running


# Without servers


def test_what_does_not_answer_is_no_tracker(tmp_path: Path, command: Command) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        arguments = ("tune", "--step", "3", "--size", "32", "--on", "llvm", "--out", str(tmp_path))
        outcome = command(*arguments, "--tracker", f"127.0.0.1:{port}")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert f"127.0.0.1:{port} does not answer (Connection refused)" in line
    assert "tvm.exec.rpc_tracker" in line


def test_another_service_is_no_tracker() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        tracker = Tracker("127.0.0.1", other.getsockname()[1], "k")
        thread = threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP"))
        thread.start()
        with pytest.raises(FleetError, match="no tracker"):
            tracker.summary()
        thread.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "2", "--tracker", "a:1"), "give one of them"),
        (("--gpus", "2", "--exhaustive", "--candidates", "3"), "give one of them"),
        (("--gpus", "2", "--budget", "3"), "--candidates"),
        (("--gpus", "2"), "--out"),
        (("--candidates", "3"), "--gpus or --tracker"),
        (("--gpus", "0"), "from 1 to 64"),
        (("--tracker", "host"), "no HOST:PORT"),
        (("--tracker", "host:70000"), "no HOST:PORT"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[str, ...], message: str, command: Command) -> None:
    outcome = command("tune", "--step", "3", "--size", "32", "--on", "llvm", *options)
    assert outcome.code == 2
    assert message in outcome.err


def test_an_open_port_has_to_be_asked_for(command: Command) -> None:
    outcome = command("serve", "--tracker", "192.0.2.1:9190", "--on", "llvm")
    assert outcome.code == 2
    assert "--host ADDRESS" in outcome.err


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    for name in ("nvmlInit", "nvmlDeviceGetCount"):
        monkeypatch.setattr(hosting.pynvml, name, lambda: 0)
    assert starting.visible_gpus(None) == starting.visible_gpus(2) == ["2", "3"]
    with pytest.raises(FleetError, match="--gpus 3: this host has 2"):
        starting.visible_gpus(3)


def spaces_of(step: int, shape: tuple[int, int, int], dtype: str = "float32") -> list[Case]:
    """The legal candidates of a step's space on an H200."""
    case = Case.default(STEPS[step], Matmul(*shape, dtype), machine_for("sm_90a").of_gpu("NVIDIA H200", 132))
    return candidates(case, TuningSpace.of(case.step))[0]


def test_the_model_asks_for_several_tiles_before_another_stage_count_of_one() -> None:
    legal = spaces_of(5, (512, 512, 512))
    ranked, costs = ranked_by_model(legal), dict(zip(legal, modelled_costs(legal)))
    assert sorted(map(str, ranked)) == sorted(map(str, legal))
    assert len({each.tile for each in ranked[:8]}) >= 4
    assert costs[ranked[0]] == min(costs.values())


def test_by_warpgroups_the_most_stages_of_a_tile_come_first_and_nearly_all_tiles() -> None:
    for step in (10, 11, 12, 13):
        legal = spaces_of(step, (1280, 1280, 14336), "float16")
        ranked = ranked_by_model(legal)
        assert sorted(map(str, ranked)) == sorted(map(str, legal))
        assert len({each.tile for each in ranked[:8]}) >= 6
        for tile in {each.tile for each in legal}:
            stages = [each.stages_built for each in ranked if each.tile == tile]
            assert stages[0] == max(stages)


def test_after_the_most_stages_comes_room_for_another_block_where_blocks_come_and_go() -> None:
    tile = "64x128x64/1x1"
    of_step = {step: ranked_by_model(spaces_of(step, (1280, 1280, 14336), "float16")) for step in (12, 13)}
    stages = {
        step: [each.stages_built for each in ranked if str(each.tile) == tile] for step, ranked in of_step.items()
    }
    assert stages == {12: [8, 4, 6, 3], 13: [8, 6, 4, 3]}


def test_kernels_of_the_call_are_ranked_by_times_even_where_a_ring_cannot_turn() -> None:
    for step in (12, 13):
        for shape in ((64, 64, 64), (8, 128, 64), (4096, 4096, 4096)):
            costs = modelled_costs(spaces_of(step, shape, "float16"))
            assert all(0 < cost < 1e6 for cost in costs)
    half, whole = (modelled_costs(spaces_of(10, (1024,) * 3, dtype)) for dtype in ("float16", "bfloat16"))
    assert half == whole


def test_of_the_recorded_searches_the_models_eight_hold_the_best() -> None:
    """Of tensor cores' steps, where whole spaces were measured: 98 % of the best's speed, and 95 % in each."""
    recorded = [each for each in load_tuned() if each.step >= 9 and each.seen == each.legal]
    assert recorded
    shares = [reached_by_model(tuned, 8) for tuned in recorded]
    assert min(shares) >= 0.95
    assert statistics.geometric_mean(shares) >= 0.98


# Who builds, and what is measured next


class Told:
    """Stands in for a process: notes what it is asked for, from when it is let go."""

    asked: ClassVar[list[object]]
    released: ClassVar[threading.Event]

    def __init__(self, **_how: object) -> None:
        self.fails = 1

    def start(self) -> None:
        self.released.wait(10)

    def ask(self, work: Callable[..., object], *arguments: object, limit_s: float | None = None) -> object:
        self.asked.append(arguments)
        if arguments == ("ends",) and self.fails:
            self.fails = 0
            raise ProcessLost("its process ended")
        return work(*arguments)

    def close(self) -> None:
        pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[Told]:
    """Crews of stand-ins, which do nothing before they are released."""
    Told.asked, Told.released = [], threading.Event()
    monkeypatch.setattr("tensorir_ladder.harness.fleet.crew.Process", Told)
    return Told


def test_the_most_urgent_is_built_first_and_nothing_twice(told: type[Told]) -> None:
    with Crew(1) as crew:
        late, soon = crew.build(5, str, "late"), crew.build(1, str, "soon")
        again, first = crew.build(0, str, "late"), crew.build(-1, str, "first")
        told.released.set()
        assert [future.result(10) for future in (late, soon, first)] == ["late", "soon", "first"]
    assert again is late
    assert told.asked == [("first",), ("soon",), ("late",)]


def test_a_build_whose_process_ends_is_done_again_and_one_that_fails_says_so(told: type[Told]) -> None:
    told.released.set()
    with Crew(1) as crew:
        assert crew.build(0, str, "ends").result(10) == "ends"
        assert crew.lost == 1
        with pytest.raises(ValueError, match="invalid literal"):
            crew.build(0, int, "x").result(10)
        assert crew.build(0, str, "goes on").result(10) == "goes on"


def test_what_is_built_ahead_is_what_the_search_asks_for_first(told: type[Told]) -> None:
    cases, plans = cases_of(SHAPE, (48, 32, 32), (64, 32, 32))(None), Plans(candidates=4, jobs=2)
    with Crew(1) as crew:
        build_ahead(crew, "llvm", "llvm", plans, cases, lanes=2)  # AHEAD builds for each of two processes: 8
        asked = [arguments for _, arguments in crew._asked]
        order = [crew._work.get()[4] for _ in asked]
    assert [each[0].problem.m for each in asked if each[1:] == ("llvm",)] == [32] * 5 + [48] * 5
    assert [each[1].problem.m for each in asked if each[0] == "llvm"] == [32, 48]  # digests
    assert [each[0] for each in order[:2]] == ["llvm", "llvm"]
    assert [each[0].problem.m for each in order[2:]] == [32, 48] * 5  # two products in turn, for two lanes


def test_products_are_built_in_turns_of_as_many_as_there_are_lanes(told: type[Told]) -> None:
    shapes = [(m, 32, 32) for m in (32, 48, 64, 80)]
    cases = [case for shape in shapes for step in (3, 4) for case in cases_of(shape, step=step)(None)]
    assert _turns(cases, 1) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert _turns(cases, 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert _turns(cases, 8) == [0] * 8
    assert [case.problem.m for case in cases] == [32, 32, 48, 48, 64, 64, 80, 80]
    for turn in range(3):
        urgencies = [_urgency(turn, number) for number in range(1000)]
        assert urgencies == sorted(set(urgencies))
        assert _first_of(turn) < urgencies[0] <= urgencies[-1] < _urgency(turn + 1, 0)


def a_task(search: FleetSearch, shape: tuple[int, int, int], left: int) -> _Task:
    """A task of which two candidates are timed and ``left`` are built; so is what its finalists take."""
    (case,) = cases_of(shape)(None)
    findings = Findings(case, TuningSpace.of(case.step))
    timed, waiting = findings.legal[:2], deque(findings.legal[2 : 2 + left])
    findings.found |= {each: replace(described(each), times_ms=(1.0,), ratios=(0.5,)) for each in timed}
    task = _Task(case, findings, None, None, waiting, best=timed[0])
    done: Future = Future()
    done.set_result(BuiltCandidate(Module("built", "a.so", "/a.so"), (1, 1, 1), ""))
    task.builds = dict.fromkeys((*timed, *waiting), done)
    for each in task.likely_finalists:
        task.builds[each] = task.checks[each] = done
    search._tasks.append(task)
    return task


@pytest.fixture
def idle_search(told: type[Told], tmp_path: Path) -> FleetSearch:
    """A search whose processes do nothing."""
    place = (Tracker("127.0.0.1", 1, "k"), "llvm", tmp_path, "a command", Plans(jobs=1), Listener(), "llvm", TREE)
    return FleetSearch(*place)


def test_a_lane_waits_for_what_is_built_of_its_product_before_it_takes_another(idle_search: FleetSearch) -> None:
    search = idle_search
    mine, nobodys = (a_task(search, (m, 32, 32), 1) for m in (32, 48))
    search._lanes = {0: mine.case.problem}
    coming: Future = Future()
    mine.builds[mine.waiting[0]] = coming
    assert search._pick(0, leave=False) is None
    assert search._pick(0).task is nobodys
    coming.set_result(None)
    assert search._pick(0, leave=False).task is mine
    check: Future = Future()
    mine.checks[mine.likely_finalists[0]] = check
    assert search._pick(0, leave=False) is None
    check.set_result(None)
    job = search._pick(0, leave=False)
    assert (job.task, job.case) == (mine, None)
    mine.running = 1  # another lane has what was left
    assert search._pick(0, leave=False).task is nobodys


def test_a_configuration_meets_its_long_reduction_once(
    idle_search: FleetSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, asked = idle_search, []
    identity = Identity("a CPU", "CPU-1", "none", 0.0, 0, "", {}, "0")

    class Asker:
        def ask(self, _measure: object, _tracker: Tracker, request: Request, *_: object, **_named: object) -> Answer:
            asked.append([check.module.file for check in request.also])
            return Answer("timed" if len(asked) > 1 else "failed", identity)

    monkeypatch.setattr(search, "_note_confirmed", lambda *_: None)
    monkeypatch.setattr(FleetSearch, "_goes_on", True)
    for m in (32, 48, 64):
        task = a_task(search, (m, 32, 32), 0)
        search._choose_finalists(task)
        check: Future = Future()
        check.set_result(Check(Module("long", "long.so", "/long.so"), task.case.problem))
        task.checks = dict.fromkeys(task.finalists, check)
        search._ask(Asker(), _Job(task, None), task.finalists)
    assert [set(files) for files in asked] == [{"long.so"}, {"long.so"}, set()]  # the first has failed


def test_a_lane_finishes_a_product_before_the_next_and_helps_others_at_last(idle_search: FleetSearch) -> None:
    search = idle_search
    mine, others, nobodys = (a_task(search, (m, 32, 32), 1) for m in (32, 48, 64))
    search._lanes = {0: mine.case.problem, 1: others.case.problem}
    picked = []
    while (job := search._pick(0)) is not None:
        picked.append((job.task, job.case is None))
        search._lanes[0] = job.task.case.problem
        if job.case is None:
            job.task.failure = RuntimeError("done")
    assert picked == [(task, final) for task in (mine, nobodys, others) for final in (False, True)]


def test_the_machine_is_known_before_its_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"nvmlInit": None, "nvmlDeviceGetCudaComputeCapability": (9, 0), "nvmlDeviceGetName": "NVIDIA H200"}
    answers |= {"nvmlDeviceGetHandleByUUID": 1, "nvmlDeviceGetHandleByIndex": 1}
    for name, answer in answers.items():
        monkeypatch.setattr(hosting.pynvml, name, lambda *_, answer=answer: answer)
    expected = machine_for("sm_90a").of_gpu("NVIDIA H200", 132)
    assert hosting.likely_machine("gpu", "GPU-1") == hosting.likely_machine("gpu", "0") == expected
    monkeypatch.setattr(hosting.pynvml, "nvmlDeviceGetName", lambda _: "NVIDIA of tomorrow")
    assert hosting.likely_machine("gpu", "0") is None


# Processes


@pytest.fixture(scope="module")
def source() -> Iterator[BuildSource]:
    """A source of processes that imports little."""
    made = BuildSource(("json",))
    yield made
    made.close()


@pytest.fixture
def process(source: BuildSource) -> Iterator[Process]:
    """A copy of the source."""
    made = Process({"LADDER_DEVICE": "cpu9"}, source=source, behind=True)
    yield made
    made.close()


def test_a_copy_answers_in_an_environment_and_a_group_of_its_own(process: Process, source: BuildSource) -> None:
    assert process.ask(os.getenv, "LADDER_DEVICE") == "cpu9"
    assert process.ask(os.getpid) == process.ask(os.getpgrp) == process.pid != source.pid
    assert process.ask(os.getppid) == source.pid
    assert process.ask(os.nice, 0) == os.nice(0) + working.NICENESS
    assert process.ask(subprocess.run, ["false"]).returncode == 1  # what it starts is waited for
    assert process.alive


def test_what_is_raised_there_is_raised_here(process: Process) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        process.ask(int, "x")
    with pytest.raises(FileNotFoundError):
        process.ask(os.listdir, "/nowhere")
    assert process.ask(int, "7") == 7


def test_a_copy_that_takes_too_long_or_ends_is_lost_and_made_again(process: Process) -> None:
    first = process.ask(os.getpid)
    with pytest.raises(ProcessLost, match=r"no answer for 0\.2 seconds"):
        process.ask(time.sleep, 60, limit_s=0.2)
    assert not process.alive
    assert (second := process.ask(os.getpid)) != first
    with pytest.raises(ProcessLost, match="its process ended"):
        process.ask(os._exit, 3)
    os.kill(process.ask(os.getpid), signal.SIGKILL)
    while process.alive:
        time.sleep(0.01)
    assert process.ask(os.getpid) not in (first, second)


def test_a_source_that_is_killed_is_started_again_and_its_copies_go_on(source: BuildSource, process: Process) -> None:
    copy, killed = process.ask(os.getpid), source.pid
    os.kill(killed, signal.SIGKILL)
    other = Process(source=source)
    try:
        assert other.ask(os.getppid) == source.pid != killed
        assert process.ask(os.getpid) == copy
    finally:
        other.close()


def test_closing_ends_what_works_and_what_it_started() -> None:
    made = BuildSource(("json",))
    process = Process(source=made)
    told: list[str] = []

    def ask() -> None:
        try:
            process.ask(subprocess.run, ["sleep", "60"])
        except ProcessLost as error:
            told.append(str(error))

    asked = threading.Thread(target=ask)
    asked.start()
    while not any(each.name() == "sleep" for each in descendants()):
        time.sleep(0.01)
    alive = [each for each in descendants() if each.pid in (process.pid, made.pid) or each.name() == "sleep"]
    assert len(alive) == 3
    process.close()
    made.close()
    asked.join(5)
    assert told == ["it was closed"]
    assert_gone(alive)
    with pytest.raises(ProcessLost, match="it was closed"):
        process.ask(os.getpid)


@pytest.mark.emulator
def test_what_processes_share_starts_no_thread_and_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(imports.__file__).parents[1]))
    made = BuildSource()
    process = Process(source=made)
    try:
        assert process.ask(os.getppid) == made.pid
        assert len(os.listdir(f"/proc/{made.pid}/task")) == 1
        with pytest.raises(ImportError, match="torch"):
            process.ask(import_module, "torch")
        assert process.ask(imports.imported_to_lower, make_case(12, (256, 256, 256))) == []
    finally:
        process.close()
        made.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--gpus 2 --on llvm", ["cpu0", "cpu1"]),
        ("--on=llvm --gpus=1", ["cpu0"]),
        ("--step 3", None),
        ("--gpus 2 --on llvm --help", None),
        ("--gpus x --on llvm", None),
        ("--gpus 65 --on llvm", None),
        ("--gpus 2 --on elsewhere", None),
        ("--gpus 2 --tracker a:1 --on llvm", None),
        ("--tracker a:1 --key h200", []),
    ],
)
def test_a_first_look_at_the_options_finds_what_to_start(
    options: str, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(Process, "start", lambda self: started.append(self))
    monkeypatch.setattr(BuildSource, "start", lambda self: started.append(self))
    with tune.ahead(options.split()) as begun:
        assert (list(begun.parts.servers) if begun.parts else None) == expected
        assert len(started) == (0 if expected is None else len(expected) + 1)


WAITING_TVM = """
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / f"{sys.argv[1]}-{os.getpid()}.begun").touch()
until = time.monotonic() + 20
while len(list(here.glob("*.begun"))) < 4 and time.monotonic() < until:
    time.sleep(0.01)
raise ImportError("no tvm", name="tvm")
"""


def test_processes_start_before_the_command_line_imports_tvm(tmp_path: Path) -> None:
    """By a TVM whose import waits until four processes are at it, and then fails."""
    (tmp_path / "tvm.py").write_text(WAITING_TVM)
    command = [sys.executable, "-m", "tensorir_ladder.harness", "tune", "--gpus", "2", "--on", "llvm", "--step", "3"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([*command, "--out", str(tmp_path)], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no tvm" in ended.stderr
    assert sorted(path.name.split("-")[0] for path in tmp_path.glob("*.begun")) == ["fork", "tune", "work", "work"]


@pytest.mark.emulator
def test_only_servers_import_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import pathlib; pathlib.Path(__file__).with_name('imported').touch(); raise ImportError"
    )
    for modules in (("tvm",), ("torch", "tvm")):
        process = Process({"PYTHONPATH": str(tmp_path)}, modules=modules)
        try:
            assert process.ask(len, "ready") == 5
        finally:
            process.close()
        assert (tmp_path / "imported").exists() == ("torch" in modules)


# A GPU's server, on a made-up GPU


@pytest.fixture
def asked(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Answer]]:
    """Ask a made-up GPU's session to measure modules of a product, by label; numpy stands in for what they load."""
    known = {"gpu": "NVIDIA Fake", "gpu_uuid": "GPU-1", "driver": "1.0", "power_limit_w": 700.0, "multiprocessors": 132}
    problem = Matmul(*SHAPE)

    def module(path: str) -> dict[str, Callable[..., None]]:
        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray, *memory: object) -> None:
            with np.errstate(invalid="ignore"):
                c[...] = a.astype("float64") @ b
            gpu.corrupt(Path(path).stem, c)

        return {"main": run}

    def ask(*labels: str, **change: object) -> Answer:
        modules = tuple(Module(label, f"{label}.so", "") for label in labels)
        request = msgspec.json.encode(Request(problem, "ieee", modules, RoundPlan(rounds=5), **change)).decode()
        return decode(serving._measure("gpu", request), Answer, "the answer")

    monkeypatch.setattr(serving, "gpu_identity", lambda: known)
    monkeypatch.setattr("tensorir_ladder.harness.cublas.Arena", FakeArena)
    monkeypatch.setattr(tvm.runtime, "load_module", module)
    serving._place.cache_clear()
    yield ask
    serving._place.cache_clear()


def test_modules_are_timed_beside_cublas_on_the_gpu(asked: Callable[..., Answer], gpu: FakeGpu) -> None:
    gpu.times |= {"fast": 0.5, "slow": 2.0}
    answer = asked("fast", "slow")
    assert (answer.status, answer.why) == ("timed", "")
    assert [timing.label for timing in answer.timings] == ["fast", "slow", "cublas-nn", "cublas-nt"]
    assert [timing.median_ms for timing in answer.timings] == [0.5, 2.0, 1.0, 1.2]
    assert (answer.identity.gpu_uuid, answer.identity.arch) == ("GPU-1", "sm_90a")
    assert (answer.before.sm_clock_mhz, answer.after.power_w) == (1980.0, 200.0)
    asked("fast", first_seed=7)
    assert gpu.seeds == [0, 7]  # operands are kept until others are asked for


def test_a_module_that_is_wrong_is_named_and_not_timed(asked: Callable[..., Answer], gpu: FakeGpu) -> None:
    gpu.corrupt = lambda label, output: output.fill(0) if label == "wrong" else None
    answer = asked("right", "wrong")
    assert (answer.status, answer.wrong) == ("wrong", "wrong")
    assert "worst error" in answer.why
    assert gpu.races == []
    gpu.times["right"] = 1e-7
    answer = asked("right")
    assert (answer.status, answer.wrong) == ("wrong", "right")
    assert "did not do the work" in answer.why


def test_trials_are_kept_for_the_next_module_and_drawn_anew_before_one_is_called_wrong(
    asked: Callable[..., Answer], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, str]] = []

    def draw(problem: Matmul, backend: object, seed: int, data: str, math: str) -> object:
        drawn.append((seed, data))
        return matmul_trial(problem, backend, seed, data, math)

    monkeypatch.setattr(serving, "matmul_trial", draw)
    for label in ("one", "two"):
        assert asked(label).status == "timed"
    assert len(drawn) == len(set(drawn)) == 3
    place = serving._place("gpu")
    for trial in place._trials.values():
        trial.reference[...] += 1.0  # as a module might that writes where it should not
    assert asked("three").status == "timed"
    assert len(drawn) == 6
    gpu.corrupt = lambda label, output: output.fill(0) if label == "four" else None
    assert asked("four").wrong == "four"
    monkeypatch.setattr(place, "_room", lambda: 0)
    gpu.corrupt = lambda label, output: None
    drawn.clear()
    for label in ("five", "six"):
        assert asked(label).status == "timed"
    assert len(drawn) == 6


def test_what_goes_wrong_on_the_server_is_told(asked: Callable[..., Answer], gpu: FakeGpu) -> None:
    def fail(_labels: list[str]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.before_race = fail
    answer = asked("one")
    assert (answer.status, answer.wrong) == ("failed", "")
    assert "illegal memory access" in answer.why


# TVM's database


def entry_of(number: int, shape: tuple[int, int, int]) -> tuple[Case, str]:
    case = make_case(number, shape)
    return case, tuning_entry(lower(case), "gpu")


def test_tvm_reads_the_database_and_schedules_by_it(tmp_path: Path) -> None:
    slow, fast = entry_of(1, (64, 64, 64)), entry_of(3, (64, 64, 64))
    database = TvmDatabase(tmp_path)
    for (case, entry), seconds in ((slow, 2e-3), (fast, 1e-3), (entry_of(1, (32, 64, 64)), 1e-4)):
        database.add(case.problem, entry, seconds)
    opened = ms.database.JSONDatabase(work_dir=str(tmp_path))
    assert len(opened) == 3
    case = fast[0]
    mod = tvm.IRModule({"main": case.problem.prim_func()})
    found = opened.query_tuning_record(mod, case.machine.target(), "main")
    assert float(found.run_secs[0]) == pytest.approx(1e-3)
    assert tvm_ffi.structural_equal(
        opened.query_ir_module(mod, case.machine.target(), "main"), lower(case).schedule.mod
    )


def test_what_no_trace_holds_is_named_in_one(tmp_path: Path) -> None:
    for number in (10, 12):
        case, entry = entry_of(number, (256, 256, 256))
        TvmDatabase(tmp_path).add(case.problem, entry, 1e-3 / number)
        opened = ms.database.JSONDatabase(work_dir=str(tmp_path))
        mod = tvm.IRModule({"main": case.problem.prim_func()})
        sch = opened.query_schedule(mod, case.machine.target(), "main")
        named = str(sch.get(sch.get_sblock("matmul")).annotations[CONFIG])
        assert named == f"{case.step.name} {case.variant} {case.tile} {case.stages_built}"
    assert (tmp_path / WORKLOADS).read_text().count("\n") == 1


def test_a_torn_line_is_taken_off(tmp_path: Path) -> None:
    case, entry = entry_of(1, (32, 32, 32))
    TvmDatabase(tmp_path).add(case.problem, entry, 1e-3)
    for name in (WORKLOADS, RECORDS):
        with (tmp_path / name).open("a") as file:
            file.write((tmp_path / name).read_text()[:50])
    TvmDatabase(tmp_path).add(case.problem, entry, 2e-3)
    assert len(TvmDatabase(tmp_path).opened()) == 2


def test_a_full_disk_leaves_the_database_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, entry = entry_of(1, (32, 32, 32))
    database = TvmDatabase(tmp_path)
    database.add(case.problem, entry, 1e-3)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RecordError, match="No space left on device"):
        database.add(case.problem, entry, 2e-3)
    assert len(database.opened()) == 1


# With servers


@pytest.mark.emulator
def test_candidates_are_measured_and_kept(host: Host, tmp_path: Path) -> None:
    listener = Listener()
    found = a_search(host, tmp_path, listener).run(cases_of(SHAPE, (48, 32, 32)))
    assert [(tuned.m, tuned.seen, tuned.verdict != "alone") for tuned in found] == [
        (32, 5, True),
        (48, 5, True),
    ]  # four by the model, and the default
    for tuned in found:
        timed = [candidate for candidate in tuned.candidates if candidate.status == "timed"]
        assert {candidate.measured_on.gpu_uuid for candidate in timed} <= set(DEVICES)
        assert tuned.winner in tuned.candidates
        assert tuned.default in [timing.label for timing in tuned.confirmation]
    told = {text.split()[0] for texts in listener.lanes.values() for text in texts}
    assert told <= {*DEVICES, "done"}
    assert sorted(load_tuned(tmp_path), key=lambda tuned: tuned.m) == found
    (run,) = read_places(tmp_path, FleetRun).values()
    assert 0 < run.starting_s < run.wall_s
    assert all(0 < checking < busy < run.wall_s for checking, busy in zip(run.checking_s, run.measuring_s))
    assert len(run.waiting_s) == len(run.gpu_uuids)
    (database,) = tmp_path.glob("*-tvm")
    assert len(ms.database.JSONDatabase(work_dir=str(database))) == 10
    again = Listener()
    assert a_search(host, tmp_path, again).run(cases_of(SHAPE, (48, 32, 32))) == found
    assert {*again.lanes[0], *again.lanes[1]} == {"done"}
    more = a_search(host, tmp_path, again, candidates=6).run(cases_of(SHAPE))
    assert (more[0].seen, len(ms.database.JSONDatabase(work_dir=str(database)))) == (7, 12)


@pytest.mark.emulator
def test_the_same_winner_twice(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three candidates of which one takes a fraction of the others' time."""
    tiles = tuple(ThreadTile.parse(text) for text in ("16x16x16/1x1", "32x32x16/4x4", "32x32x8/1x1"))
    redeclare(monkeypatch, 3, tiles=replace(STEPS[3].tiles, choices=(), default=Choice(tiles[0], 1), tuning=tiles))
    winners = [
        a_search(host, tmp_path, candidates=None, retune=True).run(cases_of((96, 96, 96)))[0].winner for _ in range(2)
    ]
    assert winners[0].tile == winners[1].tile == "32x32x16/4x4"


@pytest.mark.emulator
def test_two_searches_share_a_trackers_servers(host: Host, tmp_path: Path) -> None:
    found: dict[str, list[TunedConfig]] = {}

    told = Listener()

    def search(name: str, listener: Listener) -> None:
        found[name] = a_search(host, tmp_path / name, listener, turn_s=0.1).run(cases_of(SHAPE, (48, 32, 32)))

    other = threading.Thread(target=search, args=("other", told))
    search("one", Listener(2, other.start))
    other.join()
    assert re.search("2 servers of key 'tests' .*, [12] of them taken by others", told.lines[0])
    assert {name: len(tuned) for name, tuned in found.items()} == {"one": 2, "other": 2}


@pytest.mark.emulator
def test_two_searches_do_not_write_the_same_journal(host: Host, tmp_path: Path) -> None:
    second: list[BaseException] = []

    def run_another() -> None:
        try:
            a_search(host, tmp_path).run(cases_of(SHAPE))
        except RecordError as error:
            second.append(error)

    a_search(host, tmp_path, Listener(2, run_another), turn_s=0.1).run(cases_of(SHAPE))
    assert "another process runs this command" in str(second[0])


@pytest.mark.emulator
def test_another_key_is_no_server(host: Host, tmp_path: Path) -> None:
    search = a_search(host, tmp_path)
    search._tracker, search._expected = replace(host.tracker, key="h200"), 0
    with pytest.raises(FleetError, match=r"no server of key 'h200' \(keys there: tests\)"):
        search.run(cases_of(SHAPE))


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("change", [{"gpu": "another GPU"}, {"versions": {"tvm": "0.1"}}, {"sources": "0" * 16}])
def test_a_server_unlike_the_others_is_left_out(change: dict, host: Host, tmp_path: Path) -> None:
    listener = Listener()
    search = a_search(host, tmp_path, listener, patience_s=2.0)
    seen: list[Identity] = []

    def cases(like: Identity) -> list[Case]:
        seen.append(like)
        search._like = replace(like, **change)  # as if the first server had been of that kind
        return cases_of(SHAPE)(like)

    with pytest.raises(FleetError, match="no server is left"):
        search.run(cases)
    told = [line for line in listener.lines if "left out" in line]
    assert len(told) == 2
    assert all(str(next(iter(change.values()))) in line or "0.1" in line for line in told)


@pytest.mark.emulator
def test_a_full_disk_ends_the_search_in_one_line_and_it_goes_on(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill() -> None:
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))

    with pytest.raises(RecordError, match="No space left on device"):
        a_search(host, tmp_path, Listener(4, fill)).run(cases_of(SHAPE))
    monkeypatch.undo()
    listener = Listener()
    (tuned,) = a_search(host, tmp_path, listener).run(cases_of(SHAPE))
    assert tuned.seen == 5
    assert any("going on with an unfinished search" in line for line in listener.lines)


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("part", ["server", "session", "tracker", "asker", "builder", "source", "both servers"])
def test_what_is_killed_is_made_good(part: str, tmp_path: Path) -> None:
    """Killed with -9 in the middle of measurements: all candidates are measured all the same, and nothing is left."""
    before = {process.pid for process in descendants()}
    listener = Listener()
    with Host("llvm", ["cpu0", "cpu1"], "kills", say=listener.say) as host:
        search = a_search(host, tmp_path, listener, candidates=6)
        listener.at, listener.act = 3, partial(kill, part, host, search)
        (tuned,) = search.run(cases_of(SHAPE))
        alive = descendants()
    assert listener.acted
    assert (tuned.seen, {candidate.status for candidate in tuned.candidates} - {"illegal"}) == (7, {"timed"})
    assert_gone([process for process in alive if process.pid not in before])


def kill(part: str, host: Host, search: FleetSearch) -> None:
    """Kill a part of a fleet, or both servers."""
    servers = [pid for name, pid in host.processes.items() if name != "tracker"]
    sessions = [child.pid for pid in servers for child in psutil.Process(pid).children()]
    crew = search._crew
    pids = {
        "server": servers[:1],
        "both servers": servers,
        "session": sessions[:1],
        "tracker": [host.processes["tracker"]],
        "asker": [once_started(crew.askers[0])] if part == "asker" else [],
        "builder": [once_started(crew.builders[0])] if part == "builder" else [],
        "source": [once_started(crew.source)] if part == "source" else [],
    }[part]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def once_started(process: Process | BuildSource) -> int:
    """Return a process's number. Before it has one that is 0, by which os.kill means the group that tests run in."""
    for _ in range(600):
        if pid := process.pid:
            return pid
        time.sleep(0.05)
    raise AssertionError("it does not start")


def test_a_process_has_its_environment_before_it_imports_tvm() -> None:
    """Importing TVM looks for GPUs, of which a server is to see its own, without touching the driver."""
    process = Process({"LADDER_DEVICE": "cpu7"} | starting.UNTOUCHED)
    try:
        began_with = process.ask(Path("/proc/self/environ").read_text).split("\0")
    finally:
        process.close()
    assert {"LADDER_DEVICE=cpu7", "PYTORCH_NVML_BASED_CUDA_CHECK=1"} <= set(began_with)
    assert "LADDER_DEVICE" not in os.environ


@pytest.mark.emulator
def test_a_server_that_does_not_come_back_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "MOST_RESTARTS", 0)
    listener = Listener()
    with Host("llvm", ["cpu0", "cpu1"], "kills", say=listener.say) as host:
        search = a_search(host, tmp_path, listener, candidates=6, patience_s=2.0)
        listener.at, listener.act = 3, partial(kill, "server", host, search)
        (tuned,) = search.run(cases_of(SHAPE))
        until = time.monotonic() + 10  # the other server may have ended the search before this one is missed
        while not any("is not started again" in line for line in listener.lines) and time.monotonic() < until:
            time.sleep(0.05)
    assert tuned.seen == 7
    assert any("is not started again" in line for line in listener.lines)


@pytest.mark.emulator
def test_a_driver_that_is_killed_leaves_nothing_running_and_goes_on(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "tensorir_ladder.harness", "tune", "--step", "3", "--shape", "32x32x32"]
    command = [*module, "--on", "llvm", "--gpus", "2", "--candidates", "6", "--jobs", "2", "--out", str(tmp_path)]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    database = tmp_path / "never"
    for _ in range(2400):
        database = next(tmp_path.glob("*-tvm/database_tuning_record.json"), database)
        if database.exists() and database.read_text().count("\n") >= 2:
            break
        time.sleep(0.05)
    left = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.communicate()
    assert len(left) >= 8  # two servers, a source; of its copies a tracker, two that build, two that ask
    assert_gone(left)
    known = database.read_text().count("\n")
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "going on with an unfinished search" in again.stderr
    assert json.loads(next(tmp_path.glob("*-fleet.jsonl")).read_text())["timed"] <= 7 - known + 1
    (tuned,) = load_tuned(tmp_path)
    assert tuned.seen == 7
