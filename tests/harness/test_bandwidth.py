"""Memory-bound workloads from request to record, on a made-up GPU that computes with numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.cases import Outcome
from support.fake_gpu import FakeArena, FakeGpu, gpu  # noqa: F401
from tensorir_ladder.harness import bandwidth, execution
from tensorir_ladder.harness.bandwidth import (
    WORKLOADS,
    BandwidthCase,
    bandwidth_cases,
    lower_workload,
    stages_built,
    verify_workload,
)
from tensorir_ladder.harness.commands.measuring import open_session
from tensorir_ladder.harness.execution import LlvmBackend
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.models.time import stream_bound
from tensorir_ladder.harness.race import RoundPlan, require_room, sets_needed
from tensorir_ladder.harness.records import load_streams
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen.toolchain import Cubin
from tensorir_ladder.schedules.errors import IllegalWorkload

H200 = machine_for("sm_90a")
H200_L2 = 60 * 2**20
Command = Callable[..., Outcome]


def case(workload: str = "softmax", variant: str = "staged", stages: int = 2, kib: int = 32) -> BandwidthCase:
    """A small case."""
    return bandwidth_cases([workload], [kib / 1024], [variant], [stages], "float32", H200)[0]


class FakeCourse(FakeArena):
    """A race without operands, with given times."""

    def __init__(self, _case: BandwidthCase, _backend: Any) -> None:
        pass

    def beside(self, _case: BandwidthCase) -> list[tuple[str, Any]]:
        return [("copy", print), ("copy, negated", print), ("torch", print)]


@pytest.fixture
def made_up(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The made-up GPU of the sessions, with a course for memory-bound workloads; kernels run through LLVM."""
    gpu.times |= {"copy": 3.0, "copy, negated": 1.0, "torch": 1.25, "direct": 1.0, "1 stage": 4.0, "2 stages": 2.0}

    def executable(kernel: Any) -> dict[str, Any]:
        run = LlvmBackend().load(kernel)

        def corrupted(x: np.ndarray, y: np.ndarray) -> None:
            run(x, y)
            gpu.corrupt(kernel.label, y)

        return {"main": corrupted}

    cubin = Cubin(b"\x7fELF", 40, 0, 0)
    monkeypatch.setattr(bandwidth, "executable", executable)
    monkeypatch.setattr(bandwidth, "compiled", lambda kernel, _compiler: replace(kernel, cubin=cubin))
    monkeypatch.setattr(bandwidth, "BandwidthCourse", FakeCourse)
    monkeypatch.setattr("tensorir_ladder.harness.commands.bandwidth.CPU_MIB", 0.03125)
    monkeypatch.setattr("tensorir_ladder.harness.commands.bandwidth.SIZES_MIB", "1")
    monkeypatch.setattr(bandwidth, "MIB", 32 * 1024)  # a "megabyte" that numpy is done with at once
    return gpu


ARGUMENTS = ("bandwidth", "--workload", "row_sum,scale_shift", "--stages", "1-2", "--mb", "1")


def test_all_stages_of_a_size_are_raced_together_and_each_is_a_record(
    command: Command, made_up: FakeGpu, tmp_path: Path
) -> None:
    outcome = command(*ARGUMENTS, "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    assert [len(race) for race in made_up.races] == [6, 6]  # direct, two depths, the copy, torch
    records = load_streams(tmp_path)
    assert [(r.workload, r.variant, r.stages) for r in records] == [
        (name, variant, stages)
        for name in ("row_sum", "scale_shift")
        for variant, stages in (("direct", 1), ("staged", 1), ("staged", 2))
    ]
    direct, plain, pipelined = records[:3]
    assert direct.shape == (1, 8192)
    assert direct.bytes_moved == (8192 + 1) * 4
    assert (direct.ratio_to_copy, plain.ratio_to_copy, pipelined.ratio_to_copy) == (1.0, 0.25, 0.5)
    assert (direct.cp_async, plain.cp_async) == (0, 0)
    assert pipelined.cp_async == 1
    assert pipelined.barriers == 2
    assert all(r.verification.passed and r.torch.median_ms == 1.25 and r.bound == "latency" for r in records)
    assert "of copy" in outcome.out
    assert not list(tmp_path.glob(".unfinished*"))


def test_an_interrupted_command_goes_on(command: Command, made_up: FakeGpu, tmp_path: Path) -> None:
    def stop(labels: list[str]) -> None:
        if "scale_shift" in labels[0]:
            raise KeyboardInterrupt

    made_up.before_race = stop
    assert command(*ARGUMENTS, "--out", str(tmp_path)).code == 130
    assert {r.workload for r in load_streams(tmp_path)} == {"row_sum"}
    made_up.before_race = lambda labels: None
    outcome = command(*ARGUMENTS, "--out", str(tmp_path))
    assert "1 of 2 sizes are done" in outcome.out
    assert [labels[0].split("[")[0] for labels in made_up.races] == ["row_sum", "scale_shift"]
    assert len(load_streams(tmp_path)) == 6


def test_a_wrong_result_is_never_timed(command: Command, made_up: FakeGpu, tmp_path: Path) -> None:
    made_up.corrupt = lambda label, y: y.__setitem__(-1, y[-1] + 1) if "2 stages" in label else None
    outcome = command(*ARGUMENTS, "--out", str(tmp_path))
    assert outcome.code == 1
    assert "row_sum[staged] 1x8192 float32 2 stages" in outcome.err
    assert load_streams(tmp_path) == []
    assert made_up.races == []


@pytest.mark.parametrize("label", ["row_sum[staged] 1x8192 float32 2 stages", "copy, negated"])
def test_a_time_beyond_the_memorys_bandwidth_is_no_record(
    label: str, command: Command, made_up: FakeGpu, tmp_path: Path
) -> None:
    made_up.times[label] = 1e-7
    outcome = command(*ARGUMENTS, "--out", str(tmp_path))
    assert outcome.code == 2
    assert f"error: {label}" in outcome.err
    assert "GB/s" in outcome.err
    assert load_streams(tmp_path) == []


def test_a_workloads_input_must_be_what_it_was() -> None:
    wanted = case("scale_shift", "direct", 1)
    kernel, backend = lower_workload(wanted), LlvmBackend()
    right = backend.load(kernel)

    def spoils(x: np.ndarray, y: np.ndarray) -> None:
        right(x, y)
        x[-1] = -0.0

    with pytest.raises(WrongResult, match=r"seed 5 \(--seed 5 .*operand x is not what it was"):
        verify_workload(wanted, kernel, backend, spoils, seeds=(5,))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_small_values_are_held_to_limits_of_their_own(dtype: str) -> None:
    wanted = bandwidth_cases(["gelu"], [1 / 32], ["direct"], [1], dtype, H200)[0]
    kernel, backend = lower_workload(wanted), LlvmBackend()
    right = backend.load(kernel)

    def flushes(x: np.ndarray, y: np.ndarray) -> None:
        right(x, y)
        y[abs(y) < 1e-3] = 0

    assert verify_workload(wanted, kernel, backend, right).passed
    with pytest.raises(WrongResult, match="must be"):
        verify_workload(wanted, kernel, backend, flushes)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_wrong_outputs_are_caught(workload: str) -> None:
    wanted = case(workload, "direct", 1)
    kernel, backend = lower_workload(wanted), LlvmBackend()
    right = backend.load(kernel)

    def untouched(x: np.ndarray, y: np.ndarray) -> None:
        right(x, y)
        y.reshape(-1)[-1] = np.nan

    def scaled(x: np.ndarray, y: np.ndarray) -> None:
        right(x, y)
        y *= 1 + 1e-3

    assert verify_workload(wanted, kernel, backend, right).passed
    for wrong in (untouched, scaled, lambda x, y: None):
        with pytest.raises(WrongResult, match=workload):
            verify_workload(wanted, kernel, backend, wrong)


def test_pipelines_have_the_stages_asked_for_as_far_as_there_are_tiles() -> None:
    assert [stages_built(lower_workload(case("scale_shift", stages=count, kib=512))) for count in (1, 3, 5)] == [
        1,
        3,
        5,
    ]
    assert stages_built(lower_workload(case("scale_shift", stages=5, kib=16))) == 2


def test_what_limits_a_workload() -> None:
    nbytes = 4_300_000_000  # a second's bytes, a thousandth
    assert stream_bound(H200, nbytes, 1, 1.1) == "memory"
    assert stream_bound(H200, nbytes, 1, 2.1) == "latency"
    assert stream_bound(H200, nbytes, 10**12, 20.0) == "compute"
    assert stream_bound(machine_for("sm_80"), nbytes, 1, 1.1) == "unknown"


def test_operand_sets_exceed_the_cache_twice() -> None:
    assert sets_needed(2**30, H200_L2) == 2
    assert sets_needed(2 * 2**20, H200_L2) == 60
    assert sets_needed(2 * 2**20, H200_L2 // 2) == 30
    assert sets_needed(1, H200_L2) == 512


def test_operands_beyond_the_gpus_memory_are_refused_before_they_are_made() -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(mem_get_info=lambda: (2**30, 2**31)))
    require_room(torch, 2**30)
    with pytest.raises(IllegalWorkload, match="GiB free"):
        require_room(torch, 2**30 + 1)


def test_torchs_operators_compute_the_same() -> None:
    torch = pytest.importorskip("torch")
    for kind in WORKLOADS.values():
        x = torch.randn(8, 64)
        y = torch.full((8, 64)[: kind.output_dimensions], float("nan"))
        kind.operator(torch, x, y)
        torch.testing.assert_close(y.double(), kind.reference(torch, x.double()), rtol=1e-4, atol=1e-5)


# The command line without a GPU


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(execution, "gpu_present", lambda: False)
    monkeypatch.setattr("tensorir_ladder.harness.commands.bandwidth.CPU_MIB", 1 / 32)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_workloads_are_verified(command: Command, tmp_path: Path) -> None:
    outcome = command("bandwidth", "--stages", "2", "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert sum("worst error" in line for line in lines) == 8
    assert lines[-1].endswith("speed not measured: no GPU")
    assert "no record will be written" in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workload conv", "unknown workload (got 'conv', limit scale_shift | gelu | row_sum | softmax)"),
        ("--variant fast", "unknown variant (got 'fast', limit direct | staged)"),
        ("--dtype int8", "unknown dtype of a workload (got 'int8', limit float32 | float16)"),
        ("--stages 0", "--stages '0' names numbers below 1"),
        ("--stages x", "--stages 'x' is not a number"),
        ("--mb -1", "--mb '-1' names numbers below 1"),
        ("--mb many", "--mb 'many' is not a number"),
        ("--mb 8192", "beyond 32-bit indexing"),
        ("--arch sm_1", "unknown arch 'sm_1'"),
    ],
)
def test_bad_input_is_refused(arguments: str, message: str, command: Command) -> None:
    outcome = command("bandwidth", *arguments.split())
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert message in line


def test_a_workload_beyond_32_bits_is_refused_before_anything_is_built() -> None:
    with pytest.raises(IllegalWorkload, match="beyond 32-bit"):
        bandwidth_cases(["gelu"], [1, 8192], ["direct"], [1], "float32", H200)


def test_plans_are_the_sessions(made_up: FakeGpu, tmp_path: Path) -> None:
    session = open_session(SimpleNamespace(out=tmp_path, stages=None, revision="r"), "a command")
    record = bandwidth.measure_workloads(session, [case("gelu", "direct", 1)])[0]
    assert len(record.timing.samples_ms) == RoundPlan().rounds
    assert record.environment.revision == "r"
    assert record.bound in ("memory", "latency")
