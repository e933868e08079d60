"""What a measurement depends on: the GPU by NVML, of which there is a stand-in, and the revision by git."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensorir_ladder.harness import environment
from tensorir_ladder.harness.environment import git_state, gpu_identity, gpu_state
from tensorir_ladder.harness.execution import NoGpu
from tensorir_ladder.harness.records import GpuState

GPUS = {"GPU-aaaa": "NVIDIA First", "GPU-bbbb": "NVIDIA Second"}


class FakeNvml:
    """Two GPUs in NVML's units: megahertz, milliwatts, degrees."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        """As pynvml's."""

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in GPUS:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetClockInfo(self, _gpu: str, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetPowerUsage(self, _gpu: str) -> int:
        return 123456

    def nvmlDeviceGetTemperature(self, _gpu: str, _sensor: int) -> int:
        return 41

    def nvmlDeviceGetName(self, gpu: str) -> str:
        return GPUS[gpu]

    def nvmlDeviceGetUUID(self, gpu: str) -> str:
        return gpu

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetPowerManagementLimit(self, _gpu: str) -> int:
        return 700000


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process that sees the second GPU alone, as CUDA_VISIBLE_DEVICES=1 leaves it."""
    seen = SimpleNamespace(uuid="bbbb", multi_processor_count=114)
    cuda = SimpleNamespace(current_device=lambda: 0, get_device_properties=lambda index: [seen][index])
    monkeypatch.setattr(environment, "pynvml", FakeNvml())
    monkeypatch.setattr(environment, "require_gpu", lambda: SimpleNamespace(cuda=cuda))
    return seen


def test_clocks_power_and_name_are_those_of_the_gpu_that_torch_sees(visible: SimpleNamespace) -> None:
    assert gpu_state() == GpuState(1980.0, 3201.0, 123.456, 41.0)
    assert gpu_identity() == {
        "multiprocessors": 114,
        "gpu": "NVIDIA Second",
        "gpu_uuid": "GPU-bbbb",
        "driver": "580.1",
        "power_limit_w": 700.0,
    }
    visible.uuid = "GPU-aaaa"  # with the prefix, as NVML writes it
    assert gpu_identity()["gpu"] == "NVIDIA First"


def test_a_gpu_that_nvml_does_not_know_is_named(visible: SimpleNamespace) -> None:
    visible.uuid = "cccc"
    with pytest.raises(NoGpu, match="cccc"):
        gpu_state()


def test_git_state_outside_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == ("unknown", True)
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == ("unknown", True)


def test_git_state_ignores_results_only(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    results = tmp_path / "reports" / "results"
    results.mkdir(parents=True)
    (results / "gpu-steps.jsonl").write_text("{}\n")
    (tmp_path / "code.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    revision = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == (revision, False)
    (results / "gpu-steps.jsonl").write_text("{}\n{}\n")
    assert git_state(tmp_path) == (revision, False)
    (tmp_path / "code.py").write_text("2")
    assert git_state(tmp_path) == (revision, True)
