"""On the GPU: the very cubin that was inspected, right at every shape, clean under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.cases import ROOT, SCHEDULED_VARIANTS, STEPS, THREAD_STEPS, Outcome, make_case, redeclare
from tensorir_ladder.harness.bandwidth import WORKLOADS, BandwidthCase, bandwidth_cases, lower_workload, verify_workload
from tensorir_ladder.harness.build import Case, Kernel, compiled, executable, lower
from tensorir_ladder.harness.environment import max_clocks
from tensorir_ladder.harness.execution import GpuBackend, gpu_arch, gpu_machine, gpu_present
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.measure import Measurer
from tensorir_ladder.harness.race import RoundPlan
from tensorir_ladder.harness.records import Record, load_records, load_streams, load_tuned, read_place
from tensorir_ladder.harness.roofline import product_roofline
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.verify import PARTS, WrongResult, verify, verify_launch
from tensorir_ladder.kernels.codegen.toolchain import compile_cubin, require_compiler
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.thread_tiles import DEFAULT, THREAD_TILES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_present(), reason="no GPU that torch sees")]

SHAPES = [
    ((256, 256, 256), "nn"),
    ((33, 17, 50), "nn"),
    ((1, 1, 1), "nn"),
    ((100, 52, 36), "nt"),
    ((300, 200, 17), "nn"),
]


@pytest.fixture(scope="module")
def backend() -> GpuBackend:
    """The GPU at hand."""
    return GpuBackend()


def build(step: int, shape: tuple[int, int, int], variant: str | None = None, **options: Any) -> Kernel:
    """A kernel compiled for the GPU at hand."""
    return compiled(lower(make_case(step, shape, variant, arch=gpu_arch(), **options)), require_compiler())


def output(kernel: Kernel, backend: GpuBackend) -> Any:
    """The kernel's output on fixed data."""
    problem = kernel.case.problem
    a = backend.normal(0, (problem.m, problem.k), problem.dtype)
    b = backend.normal(1, problem.b_shape, problem.dtype)
    c = backend.poisoned((problem.m, problem.n), problem.out_dtype)
    executable(kernel)["main"](a, b, c)
    backend.torch.cuda.synchronize()
    return c


@pytest.mark.parametrize(("shape", "layout"), SHAPES, ids=str)
@pytest.mark.parametrize(("step", "variant"), SCHEDULED_VARIANTS)
def test_every_step_and_variant_is_right(
    step: int, variant: str, shape: tuple[int, int, int], layout: str, backend: GpuBackend
) -> None:
    fewer = {"stages": 3} if variant == "tf32" else {}  # of float32 the default tile fits no more of
    result = verify(build(step, shape, variant, layout=layout, **fewer), backend)
    assert (result.passed, result.on) == (True, "gpu")
    assert result.max_error <= result.tolerance


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(128, 128, 128), (33, 17, 129), (34, 18, 130)], ids=str)
@pytest.mark.parametrize(("step", "variant"), [(1, None), (4, None), (5, "async"), (5, "register_staged"), (6, None)])
def test_half_precision_is_right(
    step: int, variant: str | None, shape: tuple[int, int, int], dtype: str, backend: GpuBackend
) -> None:
    assert verify(build(step, shape, variant, dtype=dtype), backend).passed


@pytest.mark.parametrize("tile", THREAD_TILES.tuning, ids=str)
def test_every_declared_tile_is_right(tile, backend: GpuBackend) -> None:
    for step in (2, 4, 6):
        assert verify(build(step, (257, 131, 100), tile=tile), backend, seeds=(0,)).passed


@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("variant", [variant for variant in STEPS[5].variant_names if variant != "writeback"])
def test_pipelined_equals_unpipelined_bit_for_bit(variant: str, stages: int, backend: GpuBackend) -> None:
    for k in sorted({16, 16 * stages, 16 * stages + 3, 400}):
        plain = output(build(4, (96, 132, k)), backend)
        pipelined = output(build(5, (96, 132, k), variant, stages=stages), backend)
        assert backend.torch.equal(plain, pipelined), f"k {k}"


@pytest.mark.parametrize("variant", STEPS[6].variant_names)
def test_unrolling_changes_little_and_nothing_wrong(variant: str, backend: GpuBackend) -> None:
    for shape in ((96, 132, 400), (33, 17, 50)):
        plain, unrolled = output(build(4, shape), backend), output(build(6, shape, variant), backend)
        backend.torch.testing.assert_close(unrolled, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["async", "one_barrier", "one_barrier_unrolled"])
def test_many_launches_give_the_same_bits(variant: str, backend: GpuBackend) -> None:
    # A race between copies and their use shows as an output that changes from launch to launch.
    kernel = build(5, (512, 512, 1024), variant)
    run = executable(kernel)["main"]
    a, b = backend.normal(0, (512, 1024), "float32"), backend.normal(1, (1024, 512), "float32")
    first, again = (backend.poisoned((512, 512), "float32") for _ in range(2))
    run(a, b, first)
    for _ in range(200):
        again.fill_(float("nan"))
        run(a, b, again)
        assert backend.torch.equal(first, again)


def test_the_cubin_that_was_inspected_is_the_one_that_runs(backend: GpuBackend) -> None:
    kernel = build(1, (64, 64, 64))
    negated = kernel.cuda.replace(" + (A_ptr", " - (A_ptr")
    assert negated != kernel.cuda
    other = compile_cubin(negated, kernel.case.machine.arch, require_compiler())
    assert other.sha256 != kernel.cubin.sha256
    plain, minus = output(kernel, backend), output(replace(kernel, cubin=other), backend)
    assert backend.torch.equal(plain, -minus)
    with pytest.raises(WrongResult):
        verify(replace(kernel, cubin=other), backend)


def test_wrong_outputs_are_caught_on_the_gpu(backend: GpuBackend) -> None:
    kernel = build(4, (256, 128, 64))
    right = executable(kernel)["main"]

    def stale_row(a: Any, b: Any, c: Any) -> None:
        right(a, b, c)
        c[-1] = float("nan")

    def swapped(a: Any, b: Any, c: Any) -> None:
        right(a, b, c)
        c[:32], c[32:64] = c[32:64].clone(), c[:32].clone()

    def dropped(a: Any, b: Any, c: Any) -> None:
        right(a, b, c)
        c -= a[:, -16:] @ b[-16:]

    assert verify(kernel, backend, run=right).passed
    for wrong in (lambda a, b, c: c.zero_(), lambda a, b, c: None, stale_row, swapped, dropped):
        with pytest.raises(WrongResult):
            verify(kernel, backend, run=wrong)


def test_operands_that_are_written_to_are_found_on_the_gpu(backend: GpuBackend) -> None:
    kernel = build(4, (256, 128, 64))
    right = executable(kernel)["main"]

    def zeroes_everything(a: Any, b: Any, c: Any) -> None:
        for array in (a, b, c):
            array.zero_()

    def spoils_b(a: Any, b: Any, c: Any) -> None:
        right(a, b, c)
        b[-1, -1] += 1

    for wrong, operand in ((zeroes_everything, "A"), (spoils_b, "B")):
        with pytest.raises(WrongResult, match=f"operand {operand}"):
            verify(kernel, backend, run=wrong)


def test_sums_in_16_bits_are_found_on_the_gpu(backend: GpuBackend) -> None:
    problem = Matmul(500, 300, 3000, "float16")

    def in_parts(a: Any, b: Any, c: Any) -> None:
        c.zero_()
        for start in range(0, problem.k, 300):
            c += a[:, start : start + 300] @ b[start : start + 300]

    with pytest.raises(WrongResult, match="normal data"):
        verify_launch(in_parts, problem, backend, "in parts")
    assert verify_launch(in_parts, problem, backend, "in parts", math=PARTS).passed


@pytest.mark.parametrize("step", [number for number, step in STEPS.items() if not step.never_run])
def test_every_step_is_right_where_k_is_large(step: int, backend: GpuBackend, tmp_path: Path) -> None:
    session = Session(require_compiler(), backend, tmp_path, "test")
    shape = (256, 256, 512)
    problem = make_case(step, shape).problem
    case = Case.default(STEPS[step], problem, gpu_machine())
    if case.lacks:
        pytest.skip(case.lacks)
    checked = session.verify(case)
    assert checked.special_values
    assert checked.large_k.endswith("x8192")


def test_the_driver_says_what_is_possible() -> None:
    clock_mhz, gb_s = max_clocks()
    assert 500 < clock_mhz < 5000
    assert 100 < gb_s < 20_000
    problem = Matmul(4096, 4096, 4096, "float16")
    known = product_roofline(gpu_machine(), problem, "ieee", 1.0)
    unknown = product_roofline(replace(gpu_machine(), gpu="a GPU without rates"), problem, "ieee", 1.0)
    assert known.unchecked == unknown.unchecked == ""
    assert 0.5 < known.gflops / unknown.gflops < 1.2


def test_a_record_is_whole(backend: GpuBackend, tmp_path: Path) -> None:
    plan = RoundPlan(rounds=7, warmup_ms=5.0)
    session = Session(require_compiler(), backend, tmp_path, "test", plan)
    measurer = Measurer(session)
    record = measurer.measure(make_case(5, (256, 256, 256), arch=gpu_arch()))
    assert read_place(record.save(tmp_path)) == record
    assert len(record.timing.samples_ms) == record.method.rounds >= 7
    assert [len(timing.samples_ms) for timing in (*record.baseline, record.previous)] == [record.method.rounds] * 3
    assert min(record.timing.samples_ms) > 0
    assert record.verification.passed
    assert record.verification.on == "gpu"
    assert record.cubin_sha256 == session.load(make_case(5, (256, 256, 256), arch=gpu_arch()))[0].cubin.sha256
    assert record.tile == str(DEFAULT.tile)
    assert record.environment.gpu
    assert record.environment.before.sm_clock_mhz > 0
    calibration = measurer.calibrate(Matmul(256, 256, 256))
    assert calibration.kind == "calibration"
    assert Record.from_json(calibration.to_json()) == calibration


def test_run_leaves_a_record_per_case(command: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = command("run", "--step", "4-5", "--size", "256", "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    records = list(load_records(tmp_path))
    assert [record.step for record in records] == [4, 5]
    assert all(record.verification.passed and record.ratio_to_cublas > 0 for record in records)
    assert records[1].previous.label.startswith("step4_vectorization")
    assert len(list(tmp_path.iterdir())) == 1


def test_verify_says_that_it_was_on_the_gpu(command: Callable[..., Outcome]) -> None:
    outcome = command("verify", "--step", "5", "--variant", "all", "--shape", "33x17x50", "--on", "gpu")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines().count("verified on the GPU") == len(STEPS[5].variant_names)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer on PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    arguments = ["verify", "--step", "1-6", "--variant", "all", "--shape", "96x80x72,33x17x50", "--on", "gpu"]
    checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    result = subprocess.run(
        [*checker, sys.executable, "-m", "harness", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("verified on the GPU") == 2 * sum(
        len(STEPS[number].variant_names) for number in THREAD_STEPS
    )


WORKLOAD_CASES = bandwidth_cases(
    list(WORKLOADS), [1], ["direct", "staged"], [1, 2, 3, 4, 5], "float32", machine_for("sm_90a")
)


@pytest.mark.parametrize("case", WORKLOAD_CASES, ids=str)
def test_every_stream_is_right(case: BandwidthCase, backend: GpuBackend) -> None:
    ragged = (case.shape[0] + 12,) if len(case.shape) == 1 else (13, case.shape[1] - 36)
    short = (5,) if len(case.shape) == 1 else (3, 5)
    for shape, dtype in ((case.shape, "float32"), (ragged, "float32"), (ragged, "float16"), (short, "float32")):
        here = replace(case, shape=shape, dtype=dtype, machine=gpu_machine())
        kernel = compiled(lower_workload(here), require_compiler())
        assert verify_workload(here, kernel, backend).passed


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_give_the_same_bits_at_every_depth_and_launch(workload: str, backend: GpuBackend) -> None:
    cases = [replace(case, machine=gpu_machine()) for case in WORKLOAD_CASES if case.workload == workload]
    staged = [case for case in cases if case.variant == "staged"]
    x = backend.normal(0, staged[0].shape, "float32")
    outputs = []
    for case in staged:
        run = executable(compiled(lower_workload(case), require_compiler()))["main"]
        for _ in range(50):
            outputs.append(backend.poisoned(case.output_shape, "float32"))
            run(x, outputs[-1])
    assert all(backend.torch.equal(outputs[0], other) for other in outputs[1:])


def test_bandwidth_leaves_a_record_per_case(command: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = command("bandwidth", "--mb", "1", "--stages", "1-2", "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    records = load_streams(tmp_path)
    assert {record.workload for record in records} == set(WORKLOADS)
    assert len(records) == 3 * len(WORKLOADS)
    for record in records:
        assert record.verification.on == "gpu"
        assert min(record.timing.samples_ms) > 0
        assert record.copy.median_ms > 0
        assert record.torch.median_ms > 0


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer on PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing_in_workloads(tool: str) -> None:
    checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    verifying = [
        sys.executable,
        "-m",
        "harness",
        "bandwidth",
        "--verify",
        "--mb",
        "1",
        "--stages",
        "1-3",
        "--on",
        "gpu",
    ]
    result = subprocess.run([*checker, *verifying], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("worst error") == 4 * len(WORKLOADS)


def test_a_small_space_is_tuned_reused_and_measured(
    command: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(THREAD_TILES, tuning=THREAD_TILES.tuning[4:8])
    redeclare(monkeypatch, 5, tiles=few, tuning_stages=(2, 3))
    arguments = ("--step", "5", "--size", "256", "--out", str(tmp_path))
    outcome = command("tune", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert "16 of 16 legal candidates seen" in outcome.out
    (tuned,) = load_tuned(tmp_path)
    assert tuned.verdict in ("confirmed", "tie")
    assert all(timing.median_ms > 0 for timing in tuned.confirmation)
    assert "reused" in command("tune", *arguments).out
    assert command("run", "--tile", "tuned", *arguments).code == 0
    (record,) = load_records(tmp_path)
    assert (record.tile, record.stages, record.tile_choice) == (tuned.winner.tile, tuned.winner.stages, "tuned")
