"""Sessions without a GPU: a made-up one that computes with numpy and whose times are given."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.cases import SMALL_TILES, STEPS, Outcome, make_case, redeclare, small_case
from support.fake_gpu import SHAPE, TIMES, Command, FakeArena, FakeBackend, FakeGpu, interrupted, stop_at
from tensorir_ladder.harness.batches import Batch
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import GpuSpec, machine_for
from tensorir_ladder.harness.measure import Measurer
from tensorir_ladder.harness.peers import Entrant, PeerKind, PeerMissing
from tensorir_ladder.harness.records import Record, load_records
from tensorir_ladder.harness.session import CaseJournal, Session
from tensorir_ladder.harness.tuning import STAGE_SET
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.toolchain import Cubin
from tensorir_ladder.schedules.tiles import TensorCoreTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.thread_tiles import DEFAULT, THREAD_TILES


def first_labels(gpu: FakeGpu) -> list[str]:
    """Who was measured, race by race."""
    return [labels[0].split("[")[0] for labels in gpu.races]


# Measuring


def test_a_case_is_measured_beside_cublas_and_the_step_before(measurer: Measurer, gpu: FakeGpu) -> None:
    case = make_case(5, SHAPE)
    record = measurer.measure(case)
    assert gpu.races == [[str(case), "cublas-nn", "cublas-nt", str(make_case(4, SHAPE))]]
    assert record.previous.label == str(make_case(4, SHAPE))
    assert record.time_ms == TIMES["step5"]
    assert record.ratio_to_cublas == TIMES["cublas"] / TIMES["step5"]
    assert record.improvement_over_previous_pct == pytest.approx(100 * (TIMES["step4"] / TIMES["step5"] - 1))
    assert (record.step, record.variant, record.default_variant, record.stages) == (5, "async", True, case.stages)
    assert (record.tile, record.tile_choice, record.candidates) == (str(DEFAULT.tile), "default", ())
    assert (record.verification.passed, record.verification.on) == (True, "gpu")
    assert (record.environment.revision, record.environment.dirty) == ("abc123", False)
    assert record.environment.versions["nvcc"] == "13.0"
    assert record.cubin_sha256 == Cubin(b"\x7fELF", 40, 0, 0).sha256
    assert record.predicted_gain_pct is not None
    assert record.code.shared_versions == case.stages
    assert Record.from_json(record.to_json()) == record


def test_a_command_s_records_share_its_run_and_say_how_they_were_launched(
    gpu: FakeGpu, command: Command, tmp_path: Path
) -> None:
    persistent = ("--step", "13", "--variant", "stream,overlapped", "--shape", "64x64x1024")
    for options in (persistent, ("--step", "1", "--variant", "default", "--size", "64")):
        assert command("run", *options, "--out", str(tmp_path)).code == 0
    found = {record.variant: record for record in load_records(tmp_path)}
    early = {name: record.early_launch for name, record in found.items()}
    assert early == {"stream": False, "overlapped": True, "default": False}
    assert found["overlapped"].launched_early
    stream, overlapped, naive = (found[name].environment.run for name in ("stream", "overlapped", "default"))
    assert len({stream, overlapped, naive, ""}) == 3
    assert stream == overlapped


def test_an_interrupted_command_that_goes_on_is_one_run(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    measure = ("run", "--step", "1-3", "--size", "64", "--out", str(tmp_path))
    gpu.before_race = stop_at(3)
    assert interrupted(command, *measure).code == 130
    gpu.before_race = lambda _labels: None
    assert command(*measure).code == 0
    assert [record.step for record in load_records(tmp_path)] == [1, 2, 3]
    assert len({record.environment.run for record in load_records(tmp_path)}) == 1


def test_rounds_go_on_for_a_case_and_not_for_the_step_before(measurer: Measurer, gpu: FakeGpu) -> None:
    measurer.measure(make_case(5, SHAPE))
    assert gpu.besides == [(1, 2)]
    measurer.measure_together([make_case(5, SHAPE, stages=stages) for stages in (2, 3)])
    assert gpu.besides[-1] == (2, 3)


def test_the_first_step_has_none_before(measurer: Measurer, gpu: FakeGpu) -> None:
    record = measurer.measure(make_case(1, SHAPE))
    assert len(gpu.races[0]) == 3
    assert record.previous is None
    assert record.improvement_over_previous_pct is None
    assert record.predicted_gain_pct is None


@pytest.mark.parametrize(
    ("step", "variant", "arch", "before"),
    [
        (2, None, "sm_90a", "step1_naive[default]"),
        (5, "sync", "sm_90a", "step4_vectorization[default]"),
        (5, "async", "sm_90a", "step4_vectorization[default]"),
        (6, "unroll8", "sm_90a", "step5_pipelining[async]"),
        (6, "unroll8", "sm_75", "step5_pipelining[register_staged]"),
    ],
)
def test_the_step_before_is_its_default_variant(
    step: int, variant: str | None, arch: str, before: str, measurer: Measurer, gpu: FakeGpu
) -> None:
    case = make_case(step, (33, 17, 50), variant, layout="nt", arch=arch, stages=2)
    record = measurer.measure(case)
    assert gpu.races[0][3].startswith(f"{before} 33x17x50")
    assert record.layout == "nt"
    # Only where loads newly run ahead is a gain predicted, and only on a machine whose rates are known.
    assert (record.predicted_gain_pct is not None) == (variant == "async")


@pytest.mark.parametrize(
    ("step", "dtype", "before"),
    [
        (7, "float32", f"step6_unrolling[full] 64x64x256 float32 {DEFAULT.tile} 3 stages"),
        (8, "float16", None),  # step 7 takes float32 only
        (9, "bfloat16", f"step8_tensor_cores[default] 64x64x256 bfloat16 {SMALL_TILES[TensorCoreTile]}"),
        (9, "float32", None),  # step 8 takes it where TF32 is asked for, not by default
        (10, "float16", str(Case.default(STEPS[9], Matmul(64, 64, 256, "float16"), machine_for("sm_90a")))),
    ],
)
def test_the_step_before_has_its_own_default_tile_where_it_is_tiled_otherwise(
    step: int, dtype: str, before: str | None, measurer: Measurer, gpu: FakeGpu
) -> None:
    variant = next(name for name in STEPS[step].variant_names if dtype in STEPS[step].variant(name).dtypes)
    case = small_case(step, (64, 64, 256), variant, dtype=dtype, stages=3)
    record = measurer.measure(replace(case, tile_choice="given"))
    assert (record.previous.label if record.previous else None) == before
    assert gpu.races[0][3:] == ([before] if before else [])
    assert record.predicted_gain_pct is None
    assert Record.from_json(record.to_json()) == record


def test_the_step_before_is_chosen_for_the_product_as_the_step_itself_is(measurer: Measurer, gpu: FakeGpu) -> None:
    problem, machine = Matmul(128, 128, 128, "float16"), machine_for("sm_90a")
    case, before = (Case.default(STEPS[number], problem, machine) for number in (9, 8))
    assert measurer.measure(case).previous.label == str(before)
    other = STEPS[8].tiles.default.tile
    assert other != before.tile
    assert measurer._previous(replace(case, tile=other, tile_choice="given")).tile == other


def test_the_step_before_is_left_out_where_the_machine_cannot_run_it(measurer: Measurer, gpu: FakeGpu) -> None:
    case = small_case(8, SHAPE, "tf32", arch="sm_80")
    assert measurer.measure(case).previous.label.startswith("step7_warp_tiling[serpentine]")
    before = replace(case, machine=machine_for("sm_75"))
    assert measurer._previous(before) is None


def test_the_best_of_another_family_is_compared_with_the_best_before(
    measurer: Measurer, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = STEPS[10].tiles.best[-2:], STEPS[9].tiles.best[-2:]
    redeclare(monkeypatch, 10, tiles=replace(STEPS[10].tiles, best=own))
    redeclare(monkeypatch, 9, tiles=replace(STEPS[9].tiles, best=other))
    gpu.times |= {f"{own[1]} 3 stages": 0.125, f"{other[1]} 2 stages": 0.375}
    record = measurer.measure(replace(make_case(10, (64, 64, 256)), tile_choice="best"))
    assert (record.tile, record.stages) == (str(own[1]), 3)
    assert record.previous.label == f"step9_async_ring[fragments] 64x64x256 float16 {other[1]} 2 stages"
    assert {(row["tile"], row["stages"]) for row in record.candidates} == {
        (str(tile), stages) for tile in own for stages in STAGE_SET
    }


def test_tf32_is_measured_against_cublas_with_tf32(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    places = ("--size", "64", "--out", str(tmp_path))
    assert command("run", "--step", "8", "--variant", "tf32", *places).code == 0
    (record,) = load_records(tmp_path)
    assert (record.variant, record.dtype, record.math) == ("tf32", "float32", "tf32")
    assert gpu.cublas_math == ["tf32"]
    assert command("run", "--step", "7,8", *places).code == 0
    assert gpu.cublas_math == ["tf32", "ieee", "ieee"]
    assert [(record.dtype, record.math) for record in load_records(tmp_path)][1:] == [
        ("float32", "ieee"),
        ("float16", "ieee"),
    ]


def test_an_explicit_kernel_is_measured_and_tuned_like_any_other(
    gpu: FakeGpu, measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (12, 13):
        redeclare(monkeypatch, number, tiles=replace(STEPS[number].tiles, best=STEPS[number].tiles.best[-2:]))
    case = small_case(13, (64, 64, 1024), stages=3)
    record = measurer.measure(case)
    assert Record.from_json(record.to_json()) == record
    assert (record.step_name, record.tile, record.stages) == ("step13_persistent", "64x64x64/1x1", 3)
    assert (record.code.barriers, record.code.shared_versions, record.code.wait_groups) == (1, 3, ())
    assert record.resources.smem_bytes == case.tile.smem_bytes(2, 3)
    assert record.previous.label.startswith("step12_warp_specialization[own_warp] 64x64x1024 float16")
    best = measurer.measure(replace(case, tile_choice="best"))
    assert {row["tile"] for row in best.candidates} == set(map(str, case.step.tiles.best))


def test_the_tolerance_of_a_measured_kernel_is_that_of_its_arithmetic(measurer: Measurer) -> None:
    checked = {v: measurer.measure(small_case(s, SHAPE, v)).verification for s, v in ((7, "serpentine"), (8, "tf32"))}
    assert checked["tf32"].tolerance > 20 * checked["serpentine"].tolerance


def test_warnings_of_the_schedule_are_noted(measurer: Measurer) -> None:
    record = measurer.measure(make_case(5, (64, 64, 16), stages=3))
    (note,) = record.notes
    assert "3 pipeline stages" in note


def test_builds_are_shared_within_a_session(measurer: Measurer, gpu: FakeGpu) -> None:
    for step in (4, 5, 5, 6):
        measurer.measure(make_case(step, SHAPE))
    assert len(gpu.loaded) == len(set(gpu.loaded)) == 4  # with step 3, the one before step 4


def test_a_wrong_result_is_never_timed(measurer: Measurer, gpu: FakeGpu) -> None:
    gpu.corrupt = lambda label, output: output.fill(0) if "step5" in label else None
    with pytest.raises(WrongResult, match=r"step5_pipelining\[async\]"):
        measurer.measure(make_case(5, SHAPE))
    assert gpu.races == []


def test_cublas_against_itself_is_a_record_of_its_own(measurer: Measurer, gpu: FakeGpu) -> None:
    record = measurer.calibrate(Matmul(*SHAPE))
    assert (record.kind, record.step, record.variant) == ("calibration", 0, "cublas")
    assert record.ratio_to_cublas == 1.0
    assert len(gpu.races[0]) == 3
    assert Record.from_json(record.to_json()) == record


# Peers


class FakePeers:
    """A right peer, and what was asked of it; one that is missing and one that is wrong beside it."""

    def __init__(self) -> None:
        self.entered: list[tuple[Matmul, str]] = []
        self.kinds = tuple(
            PeerKind(name, "made up", (name,), enter, "numpy")
            for name, enter in (("right", self.right), ("absent", self.absent), ("wrong", self.wrong))
        )

    def right(self, arena: FakeArena, machine: GpuSpec) -> list[Entrant]:
        self.entered.append((arena.problem, machine.arch))

        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
            c[...] = arena.backend.reference(arena.problem, a, b).astype(c.dtype)

        return [Entrant("right", run, "8x8, 4 warps")]

    def absent(self, _arena: FakeArena, _machine: GpuSpec) -> list[Entrant]:
        raise PeerMissing("absent is not installed")

    def wrong(self, _arena: FakeArena, _machine: GpuSpec) -> list[Entrant]:
        return [Entrant("wrong", lambda _a, _b, c: c.fill(0), "1x1")]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> FakePeers:
    """The made-up peers, in the place of the real ones."""
    fake = FakePeers()
    monkeypatch.setattr("tensorir_ladder.harness.peers.KINDS", {kind.name: kind for kind in fake.kinds})
    return fake


def test_peers_are_timed_in_the_same_rounds(measurer: Measurer, gpu: FakeGpu, peers: FakePeers) -> None:
    measurer.peers, gpu.times["right"] = peers.kinds, 1.25
    case = make_case(5, SHAPE)
    record = measurer.measure(case)
    assert gpu.races == [[str(case), "cublas-nn", "cublas-nt", str(make_case(4, SHAPE)), "right"]]
    right, absent, wrong = record.peers
    assert (right.status, right.config, right.timing.median_ms) == ("measured", "8x8, 4 warps", 1.25)
    assert record.ratio_of(right.timing) == TIMES["cublas"] / 1.25
    assert (absent.status, absent.why, absent.timing) == ("missing", "absent is not installed", None)
    assert (wrong.status, wrong.timing) == ("failed", None)
    assert "worst error" in wrong.why
    assert record.environment.versions["numpy"] == np.__version__
    assert record.previous.label == str(make_case(4, SHAPE))
    assert Record.from_json(record.to_json()) == record
    assert [peer.name for peer in measurer.measure(make_case(1, SHAPE)).peers] == ["right", "absent", "wrong"]


def test_peers_enter_once_for_each_problem(measurer: Measurer, peers: FakePeers) -> None:
    measurer.peers, other = peers.kinds, (32, 32, 32)
    for step, shape in ((1, SHAPE), (2, SHAPE), (1, other), (2, other)):
        measurer.measure(make_case(step, shape))
    assert peers.entered == [(Matmul(*SHAPE), "sm_90a"), (Matmul(*other), "sm_90a")]


def test_without_peers_none_are_asked_for(measurer: Measurer, peers: FakePeers) -> None:
    assert measurer.measure(make_case(1, SHAPE)).peers == ()
    assert peers.entered == []


def test_a_command_names_each_peer_it_was_asked_for(
    gpu: FakeGpu, peers: FakePeers, command: Command, tmp_path: Path
) -> None:
    gpu.times["right"] = 1.25
    arguments = ("--step", "4,5", "--size", "64", "--out", str(tmp_path))
    outcome = command("run", *arguments, "--peers", "all")
    assert outcome.code == 0
    assert outcome.out.count("right: 1.2500 ms, 80% of cuBLAS, 8x8, 4 warps") == 2
    assert outcome.out.count("absent: missing, absent is not installed") == 2
    assert outcome.out.count("wrong: failed, WrongResult: wrong on gpu") == 2
    assert [[peer.name for peer in record.peers] for record in load_records(tmp_path)] == [
        ["right", "absent", "wrong"]
    ] * 2
    assert len(peers.entered) == 1


@pytest.mark.parametrize("verb", ["run", "sweep"])
def test_an_unknown_peer_is_refused_before_anything_runs(
    verb: str, gpu: FakeGpu, command: Command, tmp_path: Path
) -> None:
    outcome = command(verb, "--step", "1", "--size", "64", "--peers", "cutlass", "--out", str(tmp_path / "new"))
    assert outcome.code == 2
    assert "no peer 'cutlass'; there are triton" in outcome.err
    assert (gpu.loaded, gpu.races, (tmp_path / "new").exists()) == ([], [], False)


def test_a_calibration_takes_no_peers(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    outcome = command("run", "--calibrate", "--size", "64", "--peers", "dlight", "--out", str(tmp_path))
    assert outcome.code == 2
    assert "--peers dlight: --calibrate measures cuBLAS against itself" in outcome.err


# The best tile


def test_the_fastest_tile_is_chosen_and_the_others_are_recorded(measurer: Measurer, gpu: FakeGpu) -> None:
    favourite = next(tile for tile in THREAD_TILES.best if tile != DEFAULT.tile)
    gpu.times[str(favourite)] = 0.5
    record = measurer.measure(replace(make_case(4, SHAPE), tile_choice="best"))
    assert (record.tile, record.tile_choice) == (str(favourite), "best")
    assert len(gpu.races[0]) == len([*THREAD_TILES.best, "cublas-nn", "cublas-nt"])
    assert len(gpu.races[1]) < len(gpu.races[0])
    assert {candidate["tile"] for candidate in record.candidates} == set(map(str, THREAD_TILES.best))
    assert record.candidates[0]["tile"] == str(favourite)
    times = [candidate["time_ms"] for candidate in record.candidates]
    assert times == sorted(times)
    # The step before brings its own best tile, and is the last of the race that counts.
    assert re.match(rf"step3_register_tiling\[default\] 64x64x64 float32 {re.escape(str(favourite))}", gpu.races[-1][3])
    assert Record.from_json(record.to_json()).candidates == record.candidates


def test_a_tile_that_is_illegal_is_noted_with_the_reason(measurer: Measurer, gpu: FakeGpu) -> None:
    case = make_case(5, (64, 64, 256), dtype="float64", stages=6)
    illegal = [
        t for t in THREAD_TILES.best if t.violations(case.machine.target(), 8, replace(case, tile=t).stages_built)
    ]
    assert 0 < len(illegal) < len(THREAD_TILES.best)
    measurer.tune_stages = False
    chosen = measurer.best(case)
    assert chosen.tile not in illegal
    noted = next(table for best, table in measurer._best.values() if best == chosen)
    refused = {candidate["tile"]: candidate["why"] for candidate in noted if candidate["time_ms"] is None}
    assert set(refused) == set(map(str, illegal))
    assert all("bytes of shared memory in 6 stage(s), limit 232448" in why for why in refused.values())


def test_a_wrong_tile_cannot_win(measurer: Measurer, gpu: FakeGpu) -> None:
    wrong = str(THREAD_TILES.best[3])
    gpu.times[wrong] = 0.1
    gpu.corrupt = lambda label, output: output.fill(0) if wrong in label else None
    with pytest.raises(WrongResult, match=re.escape(wrong)):
        measurer.best(make_case(3, SHAPE))
    assert not any(wrong in label for labels in gpu.races for label in labels)


def test_stages_are_tuned_unless_asked_for(measurer: Measurer, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    redeclare(monkeypatch, 5, tiles=replace(THREAD_TILES, best=THREAD_TILES.best[:5]))
    gpu.times[" 2 stages"] = 0.25
    assert measurer.best(make_case(5, (64, 64, 256))).stages == 2
    measurer.tune_stages = False
    assert measurer.best(make_case(5, (64, 64, 320))).stages == make_case(5, SHAPE).stages


# Commands: records as soon as they are made, interruptions, full disks


def test_run_writes_one_record_per_case_and_shows_them(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    outcome = command("run", "--step", "4-6", "--size", "32,64", "--out", str(tmp_path))
    assert outcome.code == 0
    records = list(load_records(tmp_path))
    assert [(record.m, record.step) for record in records] == [(size, step) for size in (32, 64) for step in (4, 5, 6)]
    assert {record.command for record in records} == {"ladder run --step 4-6 --size 32,64"}
    (file,) = tmp_path.iterdir()  # no journal, nothing half written
    assert len(file.read_text().splitlines()) == len(records)
    assert outcome.out.count("of cuBLAS") >= len(records)


def test_an_interrupted_run_loses_nothing_and_goes_on(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    arguments = ("run", "--step", "1-4", "--size", "64", "--out", str(tmp_path))
    gpu.before_race = stop_at(3)
    assert interrupted(command, *arguments).code != 0
    assert [record.step for record in load_records(tmp_path)] == [1, 2]
    assert first_labels(gpu) == ["step1_naive", "step2_shared_tiling"]
    gpu.before_race, gpu.races = lambda labels: None, []
    outcome = command(*arguments)
    assert outcome.code == 0
    assert "going on with an interrupted run: 2 of 4 cases are done" in outcome.out
    assert first_labels(gpu) == ["step3_register_tiling", "step4_vectorization"]
    assert [record.step for record in load_records(tmp_path)] == [1, 2, 3, 4]
    assert not list(tmp_path.glob(".*"))
    # Once all is done the same command measures anew.
    gpu.races = []
    assert "going on" not in command(*arguments).out
    assert len(gpu.races) == 4


def test_another_command_does_not_go_on_with_it(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    gpu.before_race = stop_at(2)
    assert interrupted(command, "run", "--step", "1-2", "--size", "64", "--out", str(tmp_path)).code != 0
    gpu.before_race, gpu.races = lambda labels: None, []
    outcome = command("run", "--step", "1-2", "--size", "64", "--layout", "nt", "--out", str(tmp_path))
    assert "going on" not in outcome.out
    assert len(gpu.races) == 2


def test_a_disk_that_fills_up_keeps_what_is_done(
    gpu: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("run", "--step", "1-3", "--size", "64", "--out", str(tmp_path))

    def fill(labels: list[str]) -> None:
        if labels[0].startswith("step2"):
            monkeypatch.setattr(os, "fsync", full)

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    gpu.before_race = fill
    with monkeypatch.context():
        outcome = command(*arguments)
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert "No space left on device" in line
    assert str(tmp_path) in line
    assert [record.step for record in load_records(tmp_path)] == [1]
    monkeypatch.setattr(os, "fsync", lambda _file: None)
    gpu.before_race, gpu.races = lambda labels: None, []
    assert "1 of 3 cases are done" in command(*arguments).out
    assert [record.step for record in load_records(tmp_path)] == [1, 2, 3]


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    gpu: FakeGpu, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    outcome = command("run", "--step", "1", "--size", "64", "--out", str(tmp_path / "file"))
    assert outcome.code == 2
    assert str(tmp_path / "file") in outcome.err
    assert "Traceback" not in outcome.err
    assert (outcome.out, gpu.races, gpu.loaded) == ("", [], [])


def test_a_wrong_result_shows_no_speed_and_leaves_no_record(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    gpu.corrupt = lambda label, output: output.fill(np.nan) if "step5" in label else None
    outcome = command("run", "--step", "4-5", "--size", "64", "--out", str(tmp_path))
    assert outcome.code == 1
    assert "error: wrong result: step5_pipelining[async]" in outcome.err
    assert "step5" not in outcome.out
    assert [record.step for record in load_records(tmp_path)] == [4]


def test_a_record_is_measured_again(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    command("run", "--step", "5", "--variant", "sync", "--stages", "2", "--shape", "33x17x50", "--out", str(tmp_path))
    (path,) = tmp_path.iterdir()
    (old,) = load_records(tmp_path)
    gpu.times["step5"] = 1.0
    outcome = command("run", "--again", f"{path}:1", "--out", str(tmp_path))
    assert outcome.code == 0
    first, second = (line for line in outcome.out.splitlines() if line.startswith(("old ", "new ")))
    assert first.startswith("old ")
    assert "2.0000 ms" in first
    assert "1.0000 ms" in second
    kept, new = load_records(tmp_path)
    assert kept == old
    assert (old.default_stages, new.default_stages) == (False, False)
    for name in ("step", "variant", "m", "n", "k", "layout", "dtype", "stages", "tile", "arch"):
        assert getattr(new, name) == getattr(old, name)


def test_a_sweep_measures_every_legal_combination(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    outcome = command(
        *[
            "sweep",
            "--step",
            "5",
            "--variant",
            "async",
            "--size",
            "64",
            "--tile",
            "64x64x16/4x4",
            "--stages",
            "1-3,2",
            "--out",
        ],
        str(tmp_path),
    )
    assert outcome.code == 0
    records = list(load_records(tmp_path))
    assert sorted(record.stages for record in records) == [1, 2, 3]
    assert {record.tile_choice for record in records} == {"given"}
    (race,) = gpu.races  # all stage counts in the same rounds, cuBLAS and the step before once
    assert [label.split()[0] for label in race] == [
        *["step5_pipelining[async]"] * 3,
        "cublas-nn",
        "cublas-nt",
        "step4_vectorization[default]",
    ]
    assert len({record.baseline for record in records}) == len({record.previous for record in records}) == 1
    (forecast,) = {record.depth for record in records}
    assert len(forecast.time_ms) == 4, "as many stages as there are k tiles"


def test_a_sweep_leaves_out_stage_counts_that_a_step_refuses(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    words = ["sweep", "--step", "10", "--variant", "rows,awaited", "--shape", "64x64x256", "--out", str(tmp_path)]
    words += ["--tile", "64x64x64/1x1", "--stages"]
    outcome = command(*words, "1-9")
    assert outcome.code == 0
    assert "3 of 8 combinations are illegal and left out" in outcome.out.splitlines()
    measured = sorted((record.variant, record.stages) for record in load_records(tmp_path))
    assert measured == [("awaited", 2), ("awaited", 3), ("awaited", 4), ("rows", 3), ("rows", 4)]
    refused = command(*words, "1")
    assert refused.code == 2
    assert refused.err.startswith("error: too few stages for step10_wgmma[rows] (got 1, limit at least 3)")


def test_a_gpu_without_a_compiler_is_refused(gpu: FakeGpu, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise toolchain.NoCompiler("no CUDA compiler found; pip install one")

    monkeypatch.setattr(toolchain, "require_compiler", missing)
    for verb in ("run", "verify"):
        outcome = command(verb, "--step", "4", "--size", "64", "--on", "gpu")
        assert outcome.code == 2
        assert outcome.err == "error: no CUDA compiler found; pip install one\n"
    assert gpu.races == []


def test_another_architecture_than_the_gpus_is_refused(gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    outcome = command("run", "--step", "4", "--size", "64", "--arch", "sm_80", "--out", str(tmp_path))
    assert outcome.code == 2
    assert "sm_80" in outcome.err


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 4, 4)], ids=str)
def test_small_problems_do_not_take_millions_of_operand_sets(shape: tuple[int, int, int]) -> None:
    class Counting(FakeBackend):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            give_memory(self)

        def normal(self, seed: int, shape: tuple[int, int], dtype: str) -> Any:
            Counting.made += 1
            if Counting.made > 40_000:
                raise MemoryError("more than 20000 operand sets")
            return SimpleNamespace(mT=SimpleNamespace(contiguous=lambda: None))

    assert len(Arena(Matmul(*shape), Counting()).sets) >= 2


def give_memory(backend: FakeBackend, l2_bytes: int = 60 * 2**20) -> None:
    """Let the made-up GPU have an L2 and free memory."""
    backend.torch.cuda.current_device = lambda: 0
    backend.torch.cuda.get_device_properties = lambda _device: SimpleNamespace(L2_cache_size=l2_bytes)
    backend.torch.cuda.mem_get_info = lambda: (2**34, 2**36)


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_a_batch_stands_beside_bmm_of_b_as_it_is_stored(layout: str) -> None:
    class Stored(np.ndarray):
        mT = property(lambda self: self.swapaxes(-1, -2))

        def contiguous(self) -> np.ndarray:
            return self.copy()

    class Batching(FakeBackend):
        def normal(self, seed: int, shape: tuple[int, ...], dtype: str) -> Any:
            return super().normal(seed, shape, dtype).view(Stored)

    backend, batch = Batching(), Batch(8, 6, 4, "float32", layout, batch=3)
    give_memory(backend, 2000)
    backend.torch.bmm = np.matmul
    arena = Arena(batch, backend)
    assert len(arena.sets) == 4, "of 1248 bytes each"
    ((name, run),) = arena.baseline()
    assert name == "torch.bmm"
    for a, b, c in arena.sets:
        run(a, b, c)
        assert (a.shape, b.shape, c.shape) == ((3, 8, 4), (3, *batch.b_shape), (3, 8, 6))
        np.testing.assert_allclose(c, backend.reference(batch, a, b), rtol=1e-5)


# The journal


def test_the_journal_remembers_until_it_is_finished(made: Session, tmp_path: Path) -> None:
    cases = [make_case(step, SHAPE) for step in (1, 2, 3)]
    with CaseJournal(made, "run", cases) as journal:
        assert not any(map(journal.has, cases))
        journal.add(cases[0])
        journal.add(cases[2])
    with CaseJournal(made, "run", cases) as again:
        assert [again.has(case) for case in cases] == [True, False, True]
        assert not again.has(replace(cases[0], tile_choice="best"))
        for other, plan in (
            (replace(made, command="another"), cases),
            (replace(made, revision="abd"), cases),
            (made, cases[:2]),
        ):
            with CaseJournal(other, "run", plan) as journal:
                assert not any(map(journal.has, cases))
        again.finish()
    assert list(tmp_path.iterdir()) == []


def test_two_commands_at_once_have_a_journal_each_and_one_command_has_no_second(
    gpu: FakeGpu, command: Command, tmp_path: Path
) -> None:
    arguments = ("run", "--step", "1-2", "--size", "64", "--out", str(tmp_path))
    other = ("run", "--step", "3", "--size", "64", "--out", str(tmp_path))
    outcomes: list[Outcome] = []

    def meanwhile(labels: list[str]) -> None:
        if labels[0].startswith("step2"):
            outcomes.extend(command(*words) for words in (arguments, other))

    gpu.before_race = meanwhile
    assert command(*arguments).code == 0
    same, another = outcomes
    assert same.code == 2
    assert "another process runs this command" in same.err
    assert str(tmp_path) in same.err
    assert another.code == 0
    assert sorted(record.step for record in load_records(tmp_path)) == [1, 2, 3]
    assert not list(tmp_path.glob(".*"))
