"""Energy: what turns on a made-up GPU draw by its counter, what records keep of it, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.cases import Outcome
from support.fake_gpu import FakeGpu
from support.reports_fixtures import environment, record
from tensorir_ladder.harness import energy, measure
from tensorir_ladder.harness import environment as gpu_environment
from tensorir_ladder.harness.commands import run as run_command
from tensorir_ladder.harness.energy import measure_energy
from tensorir_ladder.harness.environment import NoEnergyCounter
from tensorir_ladder.harness.race import Racecourse
from tensorir_ladder.harness.records import Energy, EnergyTurn, GpuState, Record, RecordError, bad_lines, load_records

Command = Callable[..., Outcome]
LOADS = {"ours": (0.2, 690.0, 1500.0), "cublas-nn": (0.25, 700.0, 1400.0), "cublas-nt": (0.5, 650.0, 1600.0)}
IDLE_W, REFRESH_MS, SETS = 80.0, 40.0, 2


class Gpu:
    """Stands in for torch's CUDA, NVML and the host's clock: launches queue, and draw watts while they run."""

    NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = 0
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self) -> None:
        self.now_ms = self.free_ms = 0.0
        self.begun = 0  # launches
        self.runs: list[tuple[float, float, str]] = []  # what ran until when
        self.captured: list[str] | None = None
        self.stands_still = False
        properties = SimpleNamespace(L2_cache_size=60 * 2**20, uuid="aaaa", multi_processor_count=1)
        self.cuda = SimpleNamespace(
            Stream=object,
            stream=contextlib.nullcontext,
            synchronize=lambda: self.wait(self.free_ms - self.now_ms),
            CUDAGraph=lambda: Graph(self),
            graph=self.capture,
            Event=lambda enable_timing: Event(self),
            current_device=lambda: 0,
            get_device_properties=lambda _device: properties,
        )

    def wait(self, ms: float) -> None:
        self.now_ms += max(0.0, ms)

    @contextlib.contextmanager
    def capture(self, graph: Graph, capture_error_mode: str) -> Any:
        self.captured = graph.labels
        yield
        self.captured = None

    def launch(self, label: str) -> Callable[..., None]:
        return lambda _operands: self.captured.append(label) if self.captured is not None else None

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, _gpu: str) -> str:
        return "NVIDIA Fake"

    def nvmlDeviceGetTotalEnergyConsumption(self, _gpu: str) -> int:
        """Take a tenth of a millisecond; say what was drawn until the last refresh, in millijoules."""
        self.wait(0.1)
        until, drawn = 0.0 if self.stands_still else self.now_ms // REFRESH_MS * REFRESH_MS, 0.0
        for start, end, label in self.runs:
            drawn += (LOADS[label][1] - IDLE_W) * max(0.0, min(end, until) - start)
        return round(drawn + IDLE_W * until)

    def state(self) -> GpuState:
        self.wait(5.0)
        (label,) = {label for start, end, label in self.runs if start <= self.now_ms < end}
        return GpuState(LOADS[label][2], 2619.0, 300.0, 61.0)


class Graph:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.labels = gpu, []

    def replay(self) -> None:
        gpu, start = self.gpu, max(self.gpu.now_ms, self.gpu.free_ms)
        gpu.begun += len(self.labels)
        gpu.free_ms = start + sum(LOADS[label][0] for label in self.labels)
        gpu.runs.append((start, gpu.free_ms, self.labels[0]))


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.now_ms, self.gpu.free_ms)

    def query(self) -> bool:
        return self.at <= self.gpu.now_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU that draws LOADS, whose counter is refreshed every REFRESH_MS."""
    made = Gpu()
    clock = SimpleNamespace(perf_counter=lambda: made.now_ms / 1e3, sleep=lambda seconds: made.wait(1e3 * seconds))
    monkeypatch.setattr(energy, "time", clock)
    monkeypatch.setattr(energy, "gpu_state", made.state)
    monkeypatch.setattr(gpu_environment, "pynvml", made)
    monkeypatch.setattr(gpu_environment, "require_gpu", lambda: made)
    return made


def measured(gpu: Gpu, turns: int) -> tuple[Energy, ...]:
    course = Racecourse(SimpleNamespace(torch=gpu), [(number,) for number in range(SETS)], 2**20)
    return measure_energy(course, [(label, gpu.launch(label)) for label in LOADS], turns)


def test_joules_follow_from_the_counter_and_the_launches(counting: Gpu) -> None:
    found = measured(counting, 3)
    assert [own.label for own in found] == list(LOADS)
    for own in found:
        ms, watts, clock = LOADS[own.label]
        assert len(own.turns) == 3
        for turn in own.turns:
            assert turn.watts == pytest.approx(watts, rel=0.003), "neither another's joules nor a pause"
            assert turn.us == pytest.approx(1e3 * ms)
            assert turn.joules == pytest.approx(watts * ms / 1e3, rel=0.003)
            assert (turn.sm_clock_mhz, turn.temperature_c) == (clock, 61.0)
            assert turn.launches == pytest.approx(1e3 / ms, rel=0.1)
            assert turn.launches % SETS == 0
    assert sum(turn.launches for own in found for turn in own.turns) < counting.begun, "those in front do not count"
    order = list(dict.fromkeys(label for _, _, label in counting.runs[-400:]))
    assert order[-1] == "cublas-nn", "the third time cublas-nt begins"


def test_a_counter_that_is_missing_or_stands_still_is_refused(counting: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    counting.stands_still = True
    with pytest.raises(NoEnergyCounter, match="stands still"):
        measured(counting, 1)

    def refuse(_gpu: str) -> int:
        raise counting.NVMLError("Not Supported")

    monkeypatch.setattr(counting, "nvmlDeviceGetTotalEnergyConsumption", refuse)
    begun = counting.begun
    with pytest.raises(NoEnergyCounter, match=r"NVIDIA Fake .*Not Supported.*leave out --energy"):
        measured(counting, 1)
    assert counting.begun == begun


def drawn(label: str, watts: float, us: float, turns: int = 2) -> Energy:
    return Energy(label, (EnergyTurn(watts, us, 1000, 1500.0, 60.0),) * turns)


def with_energy(**changes: object) -> Record:
    """A record in whose race cuBLAS's NN was the faster, and NT where nothing pauses."""
    forms = (drawn("cuBLAS nn", 700.0, 220.0), drawn("cuBLAS nt", 700.0, 200.0))
    return replace(record(), energy=(drawn(record().timing.label, 630.0, 180.0), *forms), **changes)


def test_records_keep_energy_beside_cublas_that_is_faster_without_pause(tmp_path: Path) -> None:
    made = with_energy()
    made.save(tmp_path)
    record(5).save(tmp_path)
    assert list(load_records(tmp_path)) == [made, record(5)]
    assert not bad_lines(tmp_path)
    assert "energy" not in json.loads(record().to_json()), "as records were before"
    own, nn, nt = made.energy_rows
    assert own["joules"] == pytest.approx(630 * 180e-6)
    assert own["joules_to_cublas"] == pytest.approx(630 * 180 / (700 * 200))
    assert own["speed_to_cublas"] == pytest.approx(200 / 180)
    assert (nn["speed_to_cublas"], nt["speed_to_cublas"]) == (pytest.approx(200 / 220), 1.0)
    assert (own["launches"], own["turns"], own["sm_clock_mhz"]) == (2000, 2, 1500.0)


@pytest.mark.parametrize("others", [(), (drawn("cuBLAS nn", 700.0, 200.0, turns=3),)], ids=["alone", "other turns"])
def test_energy_that_nothing_stands_beside_is_no_record(others: tuple[Energy, ...]) -> None:
    text = json.loads(with_energy().to_json())
    text["energy"] = [text["energy"][0], *(json.loads(json.dumps(_plain(other))) for other in others)]
    with pytest.raises(RecordError, match="energy"):
        Record.from_json(json.dumps(text))


def _plain(own: Energy) -> dict[str, Any]:
    return {"label": own.label, "turns": [vars(turn) for turn in own.turns]}


def test_reports_show_energy_until_it_is_measured_anew(command: Command, tmp_path: Path) -> None:
    where = ("--results", str(tmp_path))
    assert command("energy", *where).code == 2
    with_energy().save(tmp_path)
    record(environment=environment(at="2026-11-22T10:00:00.000+00:00")).save(tmp_path)
    rows = json.loads(command("energy", "--json", *where).out)
    assert [row["contender"] for row in rows] == ["step4_vectorization", "cuBLAS nn", "cuBLAS nt"]
    shown = command("energy", *where).out
    assert all(text in shown for text in ("step 4 default", "0.1134", "0.810", "1.111", "1500"))
    (tmp_path / "README.md").write_text("<!-- results:begin -->\n<!-- results:end -->")
    assert command("readme", *where, "--readme", str(tmp_path / "README.md")).code == 0
    assert "0.1134" in (tmp_path / "README.md").read_text()


def test_run_records_and_prints_energy(
    gpu: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def take(_course: object, contenders: list[Any], turns: int) -> tuple[Energy, ...]:
        asked.append(([label for label, _ in contenders], turns))
        return tuple(drawn(label, 700.0, 100.0 + 10 * place, turns) for place, (label, _) in enumerate(contenders))

    monkeypatch.setattr(measure, "measure_energy", take)
    monkeypatch.setattr(run_command, "energy_counter", lambda: lambda: 0.0)
    shapes = ("--step", "5", "--shape", "64x64x64,128x64x64", "--out", str(tmp_path))
    outcome = command("run", *shapes, "--energy", "3")
    assert outcome.code == 0, outcome.err
    assert [len(labels) for labels, _ in asked] == [3, 3], "the step before takes no part"
    assert {turns for _, turns in asked} == {3}
    found = list(load_records(tmp_path))
    assert [[own.label for own in one.energy] for one in found] == [labels for labels, _ in asked]
    assert found[0].energy_rows[0]["speed_to_cublas"] == pytest.approx(1.1)
    assert "1.100" in outcome.out
    assert command("run", *shapes).code == 0
    assert len(asked) == 2


@pytest.mark.parametrize("more", ["--on llvm", "--on emulator", "--calibrate", "--again x.jsonl:1"])
def test_energy_is_refused_where_none_is_measured(more: str, command: Command) -> None:
    outcome = command("run", "--step", "9", "--size", "64", "--energy", "3", *more.split())
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert "--energy" in line


def test_a_gpu_without_a_counter_is_refused_before_anything_is_built(
    gpu: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise NoEnergyCounter("NVIDIA Fake does not tell")

    monkeypatch.setattr(run_command, "energy_counter", refuse)
    outcome = command("run", "--step", "5", "--size", "64", "--energy", "3", "--out", str(tmp_path))
    assert (outcome.code, outcome.out, outcome.err) == (2, "", "error: NVIDIA Fake does not tell\n")
    assert (gpu.loaded, gpu.races, list(tmp_path.iterdir())) == ([], [], [])
