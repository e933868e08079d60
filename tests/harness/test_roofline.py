"""Times that no kernel can take are refused, with the contender's name, and nothing is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest

from support.cases import ROOT, make_case
from support.fake_gpu import SHAPE, Command, FakeGpu
from tensorir_ladder.harness import environment, roofline
from tensorir_ladder.harness.machines import GpuSpec, machine_for
from tensorir_ladder.harness.measure import Measurer
from tensorir_ladder.harness.peers import Entrant, PeerKind
from tensorir_ladder.harness.records import Timing, load_records, load_streams
from tensorir_ladder.harness.roofline import MARGIN, ImpossibleTime, product_roofline, stream_roofline
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.tuning import Search, TuningSpace
from tensorir_ladder.schedules.workloads import Matmul

H200 = machine_for("sm_90a").of_gpu("NVIDIA H200")
LARGE = Matmul(4096, 4096, 4096, "float16")
NOTHING = 1e-7  # ms: what an empty launch would take at best


def least_ms(machine: GpuSpec, problem: Matmul, math: str = "ieee", from_memory: float = 0.0) -> float:
    """The time below which a product is refused."""
    found = product_roofline(machine, problem, math, from_memory)
    low, high = 1e-9, 1e9
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if found.refusal(Timing("x", (middle,))) else (low, middle)
    return high


@pytest.mark.parametrize(("dtype", "math", "peak"), [
    ("float16", "ieee", 881479),
    ("bfloat16", "ieee", 881479),
    ("float32", "ieee", 65889),
    ("float32", "tf32", 440740),
])  # fmt: skip
def test_the_peak_is_that_of_the_dtype(dtype: str, math: str, peak: float) -> None:
    problem = Matmul(4096, 4096, 4096, dtype)
    assert least_ms(H200, problem, math) == pytest.approx(problem.flops / peak / 1e6 / MARGIN, rel=1e-3)


def test_short_products_are_held_to_the_bytes_that_no_cache_has() -> None:
    problem = Matmul(8192, 8192, 1, "float16")
    nbytes = 2 * (2 * 8192 + 8192**2)
    for share in (1.0, 0.5):
        assert least_ms(H200, problem, from_memory=share) == pytest.approx(
            share * nbytes / 4463.2 / 1e6 / MARGIN, rel=1e-3
        )
    assert stream_roofline(H200, 4.5e9).refusal(Timing("x", (0.9,)))
    assert not stream_roofline(H200, 4.5e9).refusal(Timing("x", (1.0,)))


def test_without_rates_the_drivers_clocks_say_what_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = machine_for("sm_90a").of_gpu("NVIDIA H100 Unmeasured", 132)
    monkeypatch.setattr(roofline, "max_clocks", lambda: (1980.0, 3352.0))
    assert least_ms(h100, LARGE) == pytest.approx(LARGE.flops / (132 * 4096 * 1.98e9) * 1e3 / MARGIN, rel=1e-3)
    monkeypatch.setattr(roofline, "max_clocks", lambda: (None, None))
    unknown = product_roofline(h100, LARGE, "ieee", 1.0)
    assert not unknown.refusal(Timing("x", (NOTHING,)))
    assert "peak and bandwidth: unknown here; ladder microbench" in unknown.unchecked


def test_clocks_that_the_driver_does_not_tell_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}

    def clock(_gpu: Any, which: int) -> int:
        if which not in told:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return told[which]

    monkeypatch.setattr(environment, "_nvml_handle", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxClockInfo", clock)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryBusWidth", lambda _gpu: 5120)
    assert environment.max_clocks() == (1980.0, pytest.approx(3352, rel=1e-3))
    del told[pynvml.NVML_CLOCK_MEM]
    assert environment.max_clocks() == (1980.0, None)


@pytest.mark.parametrize("label", ["step4", "step3", "cublas-nt"])
def test_an_impossible_time_is_no_record(label: str, gpu: FakeGpu, measurer: Measurer) -> None:
    gpu.times[label] = NOTHING
    with pytest.raises(ImpossibleTime, match=rf"^{label}.*GFLOPS, the rates file of NVIDIA H200 allows 65889"):
        measurer.measure(make_case(4, SHAPE))


def test_a_command_refuses_it_and_leaves_what_was_measured(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    gpu.times["64x64x64"] = NOTHING
    outcome = command("run", "--step", "4", "--shape", "32x32x32,64x64x64", "--out", str(tmp_path))
    assert outcome.code == 2
    assert "error: step4_vectorization[default] 64x64x64" in outcome.err
    assert [record.shape for record in load_records(tmp_path)] == [(32, 32, 32)]


def test_a_peer_with_an_impossible_time_has_failed(gpu: FakeGpu, made: Session) -> None:
    def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):
            c[...] = a @ b

    gpu.times |= {"idle": NOTHING, "honest": 1.0}
    entrants = [Entrant("idle", run, "one"), Entrant("honest", run, "two")]
    kind = PeerKind("both", "", ("idle", "honest"), lambda arena, machine: entrants)
    record = Measurer(made, peers=(kind,)).measure(make_case(4, SHAPE))
    assert [(peer.name, peer.status) for peer in record.peers] == [("idle", "failed"), ("honest", "measured")]
    assert "GFLOPS" in record.peers[0].why
    assert record.peers[0].timing is None


def test_a_search_is_not_won_by_doing_nothing(gpu: FakeGpu, made: Session) -> None:
    case = make_case(4, SHAPE)
    gpu.times[str(case)] = NOTHING
    with pytest.raises(ImpossibleTime, match="step4"):
        Search(made, case, TuningSpace((case.tile,), (1,), (case.variant,), 1)).run()


def test_a_calibration_is_checked_and_held_to_it_too(gpu: FakeGpu, measurer: Measurer) -> None:
    record = measurer.calibrate(Matmul(*SHAPE))
    assert record.verification.seeds
    assert record.verification.max_error <= record.verification.tolerance
    gpu.times["cublas again"] = NOTHING
    with pytest.raises(ImpossibleTime, match="cublas again"):
        measurer.calibrate(Matmul(*SHAPE))


def test_every_time_on_record_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "max_clocks", lambda: (1980.0, 3352.0))  # of an H100, which has no rates file
    records = list(load_records(ROOT / "reports" / "results"))
    assert len(records) > 300
    for record in records:
        problem = Matmul(record.m, record.n, record.k, record.dtype, record.layout, record.out_dtype)
        machine = machine_for(record.arch or "sm_90a").of_gpu(record.environment.gpu, 132)
        # Of two sets of operands or more the L2, of 60 MiB, has as much as it can hold.
        nbytes = roofline.compulsory_bytes(problem) * record.method.operand_sets
        held_to = product_roofline(machine, problem, record.math, max(0.0, 1 - 60 * 2**20 / nbytes))
        peers = [peer.timing for peer in record.peers if peer.timing]
        for timing in (record.timing, *record.baseline, *([record.previous] if record.previous else []), *peers):
            assert not held_to.refusal(timing), held_to.refusal(timing)
    for stream in load_streams(ROOT / "reports" / "results"):
        machine = machine_for("sm_90a").of_gpu(stream.environment.gpu, 132)
        nbytes = stream.bytes_moved * stream.method.operand_sets
        held_to = stream_roofline(machine, stream.bytes_moved * max(0.0, 1 - 60 * 2**20 / nbytes))
        for timing in (stream.timing, stream.copy, *([stream.torch] if stream.torch else [])):
            assert not held_to.refusal(timing), held_to.refusal(timing)
