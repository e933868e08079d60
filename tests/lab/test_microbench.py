"""Measured rates: their files and refusals, the kernels that measure them, and the command."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from support.cases import Outcome
from tensorir_ladder.harness.execution import gpu_machine
from tensorir_ladder.harness.machines import MACHINES, machine_for
from tensorir_ladder.harness.models import rate_files
from tensorir_ladder.harness.models.rate_files import (
    NEEDED,
    RATES,
    BadRates,
    Curve,
    Quantity,
    Rates,
    RatesFile,
    measured_gpus,
    path_of,
    rates_of,
    read_rates_file,
)
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, compile_cubin, require_compiler
from tensorir_ladder.lab import microbench
from tensorir_ladder.lab.microbench import (
    BENCHMARKS,
    PROBES,
    WGMMA_PROBES,
    Benchmark,
    UnsuitableGpu,
    build_probes,
    device_facts,
    probes_for,
    require_memory,
)
from tensorir_ladder.schedules.cost import CostRates
from tensorir_ladder.schedules.isa import MMA, TF32
from tensorir_ladder.schedules.tensor_cores.wgmma import Wgmma

Command = Callable[..., Outcome]
GPU = "NVIDIA Test 1"
# The instruction that each probe's loop is about; `nothing` has none.
INSTRUCTIONS = {
    "chase": "LDG.E.STRONG.GPU",
    "chase_shared": "LDS ",
    "fma_chain": "FFMA",
    "fma_many": "FFMA",
    "read_shared": "LDS.128",
    "meet": "BAR.SYNC",
    "copy": "LDG.E.128",
    "read": "LDG.E.128.STRONG.GPU",
    "round_trip": "LDGSTS.E.BYPASS.128",
    "stream_async": "LDGSTS.E.BYPASS.128",
    "mma_f16": "HMMA.16816.F32 ",
    "mma_tf32": "HMMA.1688.F32.TF32",
    "wgmma_f16": "HGMMA.64x256x16.F32",
}
# Tensor core instructions in all of a probe: 4 fragments of A times 1, 2 and 4 of B; 4 steps along k.
WRITTEN = {"mma_f16": 28, "mma_tf32": 28, "wgmma_f16": 4}
# How often the written-out loop has it, at the least: independent chains and loads that are one after the other.
REPEATED = {"chase": 8, "chase_shared": 16, "fma_chain": 32, "fma_many": 256, "read_shared": 8, "meet": 8, "copy": 4}
REPEATED |= {"mma_f16": 16, "mma_tf32": 16, "wgmma_f16": 4}


def quantity(value: float = 5.0, **changes: object) -> Quantity:
    plain = Quantity((value,), "", (), "made up", ((value, value * 1.1),), "abc", "2026-11-21T00:00:00")
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture
def file() -> RatesFile:
    """A whole file of a GPU that does not exist."""
    quantities = {name: quantity(float(place + 1)) for place, name in enumerate(NEEDED)}
    quantities["barrier_ns"] = quantity(medians=(10.0, 20.0), over="threads per block", at=(64, 128), samples=())
    return RatesFile("sm_90a", GPU, {"sms": 7, "l2_bytes": 1024}, quantities, {"driver": "1"})


def test_a_file_is_read_as_written(file: RatesFile, tmp_path: Path) -> None:
    path = file.save(tmp_path)
    assert path.name == "sm_90a-nvidia-test-1.json"
    assert read_rates_file(path) == file
    assert list(measured_gpus(tmp_path)) == [file]
    rates = rates_of("sm_90a", GPU, tmp_path)
    assert (rates.gpu, rates.sms, rates.l2_bytes) == (GPU, 7, 1024)
    assert [getattr(rates, name) for name in NEEDED] == [1.0, 2.0, 3.0, 4.0]
    assert rates.barrier_ns == Curve((64, 128), (10.0, 20.0))
    assert rates.launch_ns is None
    assert file.quantities["copy_gb_s"].spread_pct == pytest.approx(10)


def test_a_gpu_without_a_file_has_no_rates(file: RatesFile, tmp_path: Path) -> None:
    file.save(tmp_path)
    for arch, gpu in (("sm_90", GPU), ("sm_90a", "NVIDIA Test 2"), ("sm_90a", None)):
        assert rates_of(arch, gpu, tmp_path) is None


def test_a_machine_takes_the_rates_of_its_own_gpu(
    file: RatesFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_files, "RATES", tmp_path)
    file.save(tmp_path)
    machine = machine_for("sm_90a").of_gpu(GPU)
    rates = machine.rates
    assert (rates.copy_gb_s, rates.dram_latency_ns, rates.fp32_gflops, machine.multiprocessors) == (1.0, 2.0, 3.0, 7)
    assert machine_for("sm_90a").rates is None  # the H200's file is not in this folder


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda data: data.pop("quantities"), "quantities"),
        (lambda data: data.update(schema=99), "schema"),
        (lambda data: data.update(surplus=1), "surplus"),
        (lambda data: data.update(gpu="NVIDIA Other"), "NVIDIA Other"),
        (lambda data: data["quantities"].update(copy_gb_s=3), "got `int`"),
        (lambda data: data["quantities"]["copy_gb_s"].update(medians=["4"]), "Expected `float`"),
        (lambda data: data["quantities"]["copy_gb_s"].update(medians=[float("nan")]), "NaN"),
        (lambda data: data["quantities"]["copy_gb_s"].update(medians=[0.0]), "> 0"),
        (lambda data: data["quantities"]["copy_gb_s"].update(medians=[1.0, 2.0]), "2 medians"),
        (lambda data: data["quantities"]["copy_gb_s"].update(origin=""), "origin"),
        (lambda data: data["quantities"].pop("dram_latency_ns"), "lacks dram_latency_ns"),
        (lambda data: data["device"].pop("sms"), "lacks sms"),
    ],
)
def test_a_spoilt_file_is_refused_by_name(
    spoil: Callable[[dict], object], expected: str, file: RatesFile, tmp_path: Path
) -> None:
    path = file.save(tmp_path)
    data = json.loads(path.read_text())
    spoil(data)
    path.write_text(json.dumps(data))
    with pytest.raises(BadRates, match=expected) as refused:
        rates_of("sm_90a", GPU, tmp_path)
    assert str(path) in str(refused.value)
    assert "ladder microbench" in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_command_with_a_corrupt_file_is_refused_in_one_line(
    content: bytes, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of("sm_90a", "NVIDIA H200", tmp_path)
    path.write_bytes(content)
    monkeypatch.setattr(rate_files, "RATES", tmp_path)
    outcome = command("list")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert str(path) in line
    assert "microbench" in line


def test_the_committed_files_are_whole() -> None:
    files = list(measured_gpus())
    assert files
    for found in files:
        assert path_of(found.arch, found.gpu) == RATES / path_of(found.arch, found.gpu).name
        assert isinstance(rates_of(found.arch, found.gpu), Rates)
        assert {name for name, quantity in found.quantities.items() if quantity.samples} <= set(BENCHMARKS)
        assert set(found.quantities) <= {*BENCHMARKS, *CostRates.__dataclass_fields__}
    of_files = {(found.arch, found.gpu): found.device["sms"] for found in files}
    for machine in MACHINES.values():
        assert of_files.get((machine.arch, machine.gpu), machine.multiprocessors) == machine.multiprocessors


def test_every_quantity_is_known_to_the_models_and_declared_whole() -> None:
    fields = set(Rates.__dataclass_fields__)
    assert set(NEEDED) <= set(BENCHMARKS) <= fields
    assert fields - set(BENCHMARKS) == {"gpu", "sms", "l2_bytes"}
    for benchmark in BENCHMARKS.values():
        assert benchmark.how
        assert 0 < benchmark.plausible[0] < benchmark.plausible[1]
        annotation = Rates.__annotations__[benchmark.name]
        assert ("Curve" in annotation) == bool(benchmark.over), benchmark.name


# Kernels


def sass_of(probe: str, text: str) -> str:
    """One probe's part of a disassembly."""
    return re.split(r"Function : ", text.split(f"Function : {probe}_probe_kernel")[1])[0]


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_the_loops_are_still_in_the_machine_code(arch: str, compiler: Compiler, sass: Callable[[Cubin], str]) -> None:
    text = build_probes(machine_for(arch), compiler).mod.imports[0].inspect_source()
    whole = sass(compile_cubin(text, arch, compiler))
    assert set(INSTRUCTIONS) == {*PROBES, *WGMMA_PROBES} - {"nothing"}
    assert ("wgmma_f16_probe" in whole) == (arch == "sm_90a")
    for probe in sorted(set(probes_for(arch)) - {"nothing"}):
        instruction = INSTRUCTIONS[probe]
        code = sass_of(probe, whole)
        backwards = [
            (int(at, 16), int(to, 16)) for at, to in re.findall(r"/\*([0-9a-f]{4,})\*/ .*BRA\S* .*?0x([0-9a-f]+)", code)
        ]
        loops = [(to, at) for at, to in backwards if to < at]
        places = [
            int(at, 16) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code) if instruction in line + " "
        ]
        assert len(places) == WRITTEN.get(probe, len(places))
        longest = max((sum(low <= place <= high for place in places) for low, high in loops), default=0)
        assert longest >= REPEATED.get(probe, 1), f"{probe}: {instruction} {longest} times in a loop"
        assert not re.search(r"\b(LDL|STL)\b", code), f"{probe} spills"


@pytest.mark.compiler
def test_wgmma_waits_only_for_the_group_before(compiler: Compiler, sass: Callable[[Cubin], str]) -> None:
    text = build_probes(machine_for("sm_90a"), compiler).mod.imports[0].inspect_source()
    code = sass_of("wgmma_f16", sass(compile_cubin(text, "sm_90a", compiler)))
    order = re.findall(r"(HGMMA|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d)", code)
    assert order == ["HGMMA"] * 4 + [f"WARPGROUP.DEPBAR.LE gsb0, 0x{pending}" for pending in (1, 0)]


@pytest.mark.parametrize(("dtype", "k"), [("float16", 16), ("float32", 8)])
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_sums_of_mma_are_those_of_its_fragments(dtype: str, k: int, columns: int) -> None:
    instruction = {"float16": MMA["float16"], "float32": TF32}[dtype]
    packed = k // 8
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 4 * 32 * 6 * packed)).astype(dtype)
    expected = np.zeros((2, 32))
    for warp in range(2):
        a, b = np.split(values[warp].astype("float64"), [4 * 32 * 4 * packed])
        a, b = a.reshape(4, 32, 4 * packed), b.reshape(4, 32, 2 * packed)
        whole_a = sum(np.array([[f[instruction.place_in_a(r, d)] for d in range(k)] for r in range(16)]) for f in a)
        whole_b = sum(
            np.array([[f[instruction.place_in_b(c, d)] for c in range(8)] for d in range(k)]) for f in b[:columns]
        )
        for (row, column), value in np.ndenumerate(whole_a @ whole_b):
            expected[warp, instruction.place_in_c(row, column)[0]] += value
    np.testing.assert_allclose(microbench.mma_sums(values, columns), expected.reshape(-1))


def test_sums_of_wgmma_are_those_of_its_fragments() -> None:
    values = np.random.default_rng(0).standard_normal((384, 64)).astype("float16")
    product = values[:128].astype("float64") @ values[128:].astype("float64").T
    instruction = Wgmma(64, 256, 64, "float16", "k", 128, 256)
    expected = np.zeros((2, 128))
    for (row, column), value in np.ndenumerate(product):
        expected[row // 64, instruction.fragment(row % 64, column)[0]] += value
    np.testing.assert_allclose(microbench.wgmma_sums(values), expected.reshape(-1))


@pytest.mark.parametrize(
    ("setups", "shape", "dtype", "flops"),
    [
        (microbench._mma_setups, (16, 4 * 32 * 12), "float16", 2 * 16 * 8 * 16),
        (microbench._mma_setups, (16, 4 * 32 * 6), "float32", 2 * 16 * 8 * 8),
        (microbench._wgmma_setups, (384, 64), "float16", 2 * 64 * 256 * 16),
    ],
)
def test_operations_are_those_that_a_launch_issues(
    setups: Callable, shape: tuple[int, int], dtype: str, flops: int
) -> None:
    for setup in setups(np.ones(shape, dtype), 7):
        blocks, threads, steps = (setup.launch[name] for name in ("grid", "threads", "steps"))
        if "width" in setup.launch:
            issued = blocks * threads // 32 * steps * 4 * setup.launch["width"]
        else:
            issued = blocks * threads // 128 * steps * 4
        assert issued * flops == 7 * setup.operations
        assert len(setup.sums) == threads


def test_a_gpu_without_cp_async_is_refused() -> None:
    with pytest.raises(UnsuitableGpu, match="sm_75 lacks; run on sm_80"):
        build_probes(machine_for("sm_75"), None)


def fake_torch(**changes: int) -> SimpleNamespace:
    """A torch whose driver reports an H200, but for the changes."""
    properties = {
        "multi_processor_count": 132,
        "L2_cache_size": 60 * 2**20,
        "shared_memory_per_block_optin": 227 * 1024,
        "shared_memory_per_multiprocessor": 228 * 1024,
        "max_threads_per_multi_processor": 2048,
        "regs_per_multiprocessor": 65536,
        "warp_size": 32,
        **changes,
    }
    return SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(**properties)))


def test_the_driver_must_agree_with_the_table() -> None:
    assert device_facts(fake_torch(), machine_for("sm_90a"))["sms"] == 132
    with pytest.raises(UnsuitableGpu, match=r"smem_per_sm_bytes = 1024, harness/machines.py has 233472 for sm_90a"):
        device_facts(fake_torch(shared_memory_per_multiprocessor=1024), machine_for("sm_90a"))


def test_too_little_memory_is_refused_before_anything_is_measured() -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(mem_get_info=lambda: (2**31, 2**34)))
    with pytest.raises(UnsuitableGpu, match=r"2\.0 GiB of device memory are free, the microbenchmarks need 4"):
        require_memory(torch)


# Measuring


def made_up(samples: list[float], plausible: tuple[float, float] = (1, 10)) -> Benchmark:
    return Benchmark("launch_ns", "made up", "", plausible, lambda _: iter([(None, samples)]))


def test_a_quantity_is_the_median_and_keeps_its_samples() -> None:
    found = microbench.measure_quantity(None, made_up([3.0, 9.0, 2.0]), "abc")
    assert (found.medians, found.at, found.samples) == ((3.0,), (), ((3.0, 9.0, 2.0),))
    assert (found.origin, found.revision) == ("made up", "abc")


def test_what_was_chosen_is_part_of_the_origin() -> None:
    benchmark = replace(made_up([3.0]), measure=lambda _: iter([(None, [3.0], "; the fastest: 8 warps")]))
    found = microbench.measure_quantity(None, benchmark, "abc")
    assert (found.origin, found.medians, found.at) == ("made up; the fastest: 8 warps", (3.0,), ())


@pytest.mark.parametrize("value", [0.01, 11.0, float("nan")])
def test_what_cannot_be_believed_is_not_recorded(value: float) -> None:
    with pytest.raises(WrongResult, match=r"launch_ns = .* is not between 1 and 10: not recorded"):
        microbench.measure_quantity(None, made_up([value]), "abc")


def test_each_quantity_is_on_disk_before_the_next_and_the_others_stay(
    file: RatesFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = SimpleNamespace(device={"sms": 7}, settle=lambda: None)
    monkeypatch.setattr(microbench, "Bench", lambda _machine, _compiler: bench)
    monkeypatch.setattr(microbench, "GpuBackend", lambda: None)
    monkeypatch.setattr(microbench, "gpu_identity", lambda: {"gpu": GPU})
    monkeypatch.setattr(microbench, "gpu_state", lambda: SimpleNamespace(sm_clock_mhz=1.0))
    monkeypatch.setattr(microbench, "versions", lambda _backend, _nvcc: {})
    path = file.save(tmp_path)
    machine, compiler = machine_for("sm_90a").of_gpu(GPU, 7), SimpleNamespace(version="13.0")
    plan = [made_up([4.0]), replace(made_up([6.0]), name="block_start_ns"), replace(made_up([99.0]), name="read_gb_s")]
    running = microbench.measure_rates(machine, compiler, plan, tmp_path, {"revision": "abc"})
    for name, value in (("launch_ns", 4.0), ("block_start_ns", 6.0)):
        found = next(running)
        assert (found[0], found[1].medians, found[2]) == (name, (value,), path)
        assert read_rates_file(path).quantities[name].medians == (value,)
    with pytest.raises(WrongResult, match="read_gb_s = 99"):
        next(running)
    kept = read_rates_file(path)
    assert set(kept.quantities) == {*file.quantities, "launch_ns", "block_start_ns"}
    assert kept.quantities["copy_gb_s"] == file.quantities["copy_gb_s"]


# The command


def test_without_a_gpu_the_command_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = command("microbench")
    assert (outcome.code, outcome.out) == (2, "")
    assert "no torch, which drives the GPU" in outcome.err


def test_what_another_architecture_has_is_left_out_and_said(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []
    monkeypatch.setattr("tensorir_ladder.harness.execution.gpu_machine", lambda: machine_for("sm_120").of_gpu(GPU, 7))
    monkeypatch.setattr("tensorir_ladder.kernels.codegen.toolchain.require_compiler", lambda: None)
    monkeypatch.setattr(
        "tensorir_ladder.lab.commands.microbench.measure_rates",
        lambda _machine, _compiler, plan, *_: measured.extend(plan) or (),
    )
    outcome = command("microbench", "--only", "wgmma_f16_gflops,mma_f16_gflops", "--out", str(tmp_path))
    assert (outcome.code, [benchmark.name for benchmark in measured]) == (0, ["mma_f16_gflops"])
    assert outcome.out == "wgmma_f16_gflops: not measured, only sm_90a has the instruction; this is sm_120\n"


def test_an_unknown_quantity_is_refused_with_those_known(command: Command) -> None:
    outcome = command("microbench", "--only", "copy_gb_s,nonsense")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--only 'nonsense' is no quantity" in outcome.err
    assert all(name in outcome.err for name in BENCHMARKS)


def test_list_says_which_gpus_have_rates(command: Command) -> None:
    outcome = command("list")
    assert re.search(r"^rates of NVIDIA H200 \(sm_90a\): \d+ measured by microbench$", outcome.out, re.M)


@pytest.mark.gpu
def test_two_quick_quantities_are_measured(command: Command, tmp_path: Path) -> None:
    outcome = command("microbench", "--only", "fma_latency_ns,barrier_ns", "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    (found,) = measured_gpus(tmp_path)
    assert set(found.quantities) == {"fma_latency_ns", "barrier_ns"}
    assert found.gpu == gpu_machine().gpu
    assert all(len(values) == microbench.ROUNDS for values in found.quantities["barrier_ns"].samples)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mma_f16_gflops", "mma_tf32_gflops", "wgmma_f16_gflops"])
def test_a_tensor_core_ceiling_is_measured(name: str, command: Command, tmp_path: Path) -> None:
    machine = gpu_machine()
    outcome = command("microbench", "--only", name, "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    if not BENCHMARKS[name].runs_on(machine.arch):
        assert f"{name}: not measured" in outcome.out
        return
    (found,) = measured_gpus(tmp_path)
    assert "; the fastest of" in found.quantities[name].origin
    assert len(found.quantities[name].samples[0]) == microbench.ROUNDS


@pytest.mark.gpu
def test_sums_that_lack_steps_are_refused_on_the_gpu() -> None:
    bench = microbench.Bench(gpu_machine(), require_compiler())
    values = microbench._normal((16, 4 * 32 * 12), "float16")
    operands = microbench.words_on_gpu(bench.torch, values)
    bench.launch("mma_f16", threads=32, steps=100, width=4, source=operands)
    one_step = bench.torch.from_numpy(microbench.mma_sums(values[:1], 4)).float().cuda()
    bench.expect_near("mma_f16", 100 * one_step)
    with pytest.raises(WrongResult, match="probe mma_f16 is off by"):
        bench.expect_near("mma_f16", 150 * one_step)


@pytest.mark.gpu
def test_an_output_that_is_not_right_is_refused_on_the_gpu() -> None:
    bench = microbench.Bench(gpu_machine(), require_compiler())
    bench.launch("fma_chain", steps=1000)
    bench.expect("fma_chain", 1, 1000)
    with pytest.raises(WrongResult, match="probe fma_chain left"):
        bench.expect("fma_chain", 1, 1001)
