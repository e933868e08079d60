"""The emulator does with every element what the GPU did: probes' recorded traces, and how they are recorded."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.cases import Outcome
from support.driver_stand_in import emulated_driver
from tensorir_ladder.emulator import compiler as host_compiler
from tensorir_ladder.harness.environment import gpu_identity
from tensorir_ladder.harness.execution import gpu_arch
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, compile_cubin
from tensorir_ladder.lab.gpu_program import GpuProgram
from tensorir_ladder.lab.traces import RECORDED, Probe, TraceError, difference, probes, read_trace, record
from tensorir_ladder.lab.traces.recording import ARCH, digest
from tensorir_ladder.torch_ops.driver import DriverError, cuda_driver

PROBES = {probe.name: probe for probe in probes()}
IDENTITY = {"gpu": "a GPU", "driver": "1.2"}
NVCC = Compiler(Path("nvcc"), "none")


def emulated_lines(probe: Probe, seed: int = 0) -> list[str]:
    """Run a probe in the emulator."""
    return probe.lines(lambda *arrays: probe.program(*arrays, seed=seed))


@pytest.mark.emulator
@pytest.mark.parametrize("name", PROBES)
def test_the_emulator_does_what_the_gpu_did(name: str) -> None:
    trace = read_trace(RECORDED, name)
    if trace is None:
        pytest.skip("not recorded; on an H100 or H200: ladder traces")
    probe = PROBES[name]
    assert trace.text_sha256 == digest(probe), "recorded of another probe; on an H100 or H200: ladder traces"
    for seed in range(3):  # asynchronous work early, late and drawn
        assert not difference(emulated_lines(probe, seed), trace.lines)


def test_every_trace_is_of_a_probe() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} <= set(PROBES)
    assert len(PROBES) == len(probes())


@pytest.mark.gpu
def test_the_gpu_does_what_it_did(tmp_path: Path, compiler: Compiler) -> None:
    if gpu_arch() != ARCH:
        pytest.skip(f"the probes have {ARCH}'s instructions; this is {gpu_arch()}")
    done = 0
    for probe, trace in record(probes(), compiler, gpu_identity(), cuda_driver(), tmp_path):
        recorded = read_trace(RECORDED, probe.name)
        if recorded is not None:
            assert not difference(trace.lines, recorded.lines), probe.name
            done += 1
    if not done:
        pytest.skip("nothing is recorded; ladder traces")


@pytest.mark.compiler
def test_probes_compile(compiler: Compiler) -> None:
    for text in {probe.program.cuda for probe in PROBES.values()}:
        assert compile_cubin(text, ARCH, compiler).spill_bytes == 0


# What a probe can tell


@pytest.mark.emulator
@pytest.mark.parametrize("name", [name for name in PROBES if name.startswith(("wgmma_a", "wgmma_b_"))])
def test_operands_come_from_places_of_their_own(name: str) -> None:
    places = [int(word) for line in emulated_lines(PROBES[name]) for word in line.split()]
    assert len(set(places)) == len(places)
    assert 0 <= min(places) <= max(places) < 8192


# Formulas of the emulator, changed to others, and probes that must show it; none is shown by another's change.
MISUNDERSTANDINGS = (
    {
        ("right = l % 4 * 2 + e", "right = l % 4 + 4 * e"): {"ldmatrix_x1", "stmatrix_x4_trans"},
        ("at ^ (at >> 3", "at ^ (at >> 4"): {"wgmma_a_k_128_0", "wgmma_a_mn_32_0", "wgmma_b_mn_64_0"},
        ("l / 4 + r % 2 * 8", "l / 4 * 2 + r % 2"): {"mma_f16_elements", "mma_tf32_elements"},
        ("return address ^ (address >> 3 & bits)", "return address ^ (address >> 3 & 16)"): {
            "tma_load_64_inside",
            "tma_store_128_inside",
        },
    },
    {
        ("width == 16 ? stride : leading", "width == 16 ? leading : stride"): {"wgmma_a_mn_none_0"},
        ("bits & 0xffffe000", "bits & 0xfffff000"): {"mma_tf32_bits"},
        ("position >= 0 && ", ""): {"tma_load_32_before_the_start"},
    },
    {("row % 16 / 8 + k / 8 * 2", "row % 16 / 8 * 2 + k / 8"): {"wgmma_f16_registers", "wgmma_bf16_registers"}},
    {("i % 16 / 8 * 2 + j % 2", "i % 16 / 8 + j % 2 * 2"): {"wgmma_f16_n8_sums", "wgmma_bf16_n64_sums"}},
)


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("changes", MISUNDERSTANDINGS, ids=["layouts", "rules", "registers", "sums"])
def test_another_layout_shows(
    changes: dict[tuple[str, str], set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: emulated_lines(PROBES[name]) for names in changes.values() for name in names}
    folder = shutil.copytree(host_compiler.DEVICE, tmp_path / "device")
    found = set()
    for path in folder.iterdir():
        text = path.read_text()
        found |= {change for change in changes if change[0] in text}
        path.write_text(functools.reduce(lambda text, change: text.replace(*change), changes, text))
    assert found == set(changes)
    monkeypatch.setattr(host_compiler, "DEVICE", folder)
    monkeypatch.setattr(host_compiler, "_device_digest", host_compiler._device_digest.__wrapped__)
    monkeypatch.setattr(host_compiler, "RUNTIME_FLAGS", (*host_compiler.RUNTIME_FLAGS, "-O0"))  # for one short run each
    for name, lines in before.items():
        assert difference(emulated_lines(PROBES[name]), lines), name


def test_a_difference_names_its_place() -> None:
    assert difference(["1 2", "3 4"], ["1 2", "3 4"]) == ""
    assert difference(["1 2", "3 4"], ["1 2", "3 5"]) == "line 1, word 1: 4, expected 5"
    assert difference(["1"], ["1", "2"]) == "1 lines, expected 2"
    assert difference(["1"], ["1 2"]) == "line 0: 1 words, expected 2"


# Recording


@pytest.fixture
def without_nvcc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No compiler runs: the texts that one was asked to compile."""
    texts: list[str] = []

    def compile_text(text: str, _arch: str, _compiler: Compiler) -> Cubin:
        texts.append(text)
        return Cubin(b"cubin", 0, 0, 0)

    monkeypatch.setattr("tensorir_ladder.lab.traces.recording.compile_cubin", compile_text)
    monkeypatch.setattr(Compiler, "version", "13.0")
    return texts


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["ldmatrix_x4", "mma_f16_sums", "tma_store_64_inside", "tma_multicast_128_inside"])
def test_launched_through_the_driver_it_is_the_same(name: str) -> None:
    probe = PROBES[name]
    driver = emulated_driver(probe.program)
    assert probe.lines(GpuProgram(probe.program, b"cubin", driver)) == emulated_lines(probe)
    assert driver.library.memory == {}


@pytest.mark.emulator
def test_a_kernel_that_the_gpu_stops_is_an_error() -> None:
    probe = PROBES["ldmatrix_x1"]
    driver = emulated_driver(probe.program)
    driver.library.failing["cuCtxSynchronize"] = 700
    with pytest.raises(DriverError, match=r"cuCtxSynchronize failed: .* \(700\)"):
        probe.lines(GpuProgram(probe.program, b"cubin", driver))


@pytest.mark.emulator
def test_recording_goes_on_where_it_stopped(tmp_path: Path, without_nvcc: list[str]) -> None:
    probe = PROBES["cp_async_zeros"]

    def recorded(wanted: Probe, identity: dict[str, str] = IDENTITY) -> list[str]:
        """Record it; returns the texts that were compiled for that."""
        without_nvcc.clear()
        ((_, trace),) = record([wanted], NVCC, identity, emulated_driver(wanted.program), tmp_path)
        assert trace == read_trace(tmp_path, wanted.name)
        assert trace.lines == emulated_lines(wanted)
        return list(without_nvcc)

    assert recorded(probe) == [probe.program.cuda]
    assert recorded(probe) == []
    assert recorded(probe, {**IDENTITY, "gpu": "another"}) == [probe.program.cuda]
    other = replace(probe, inputs={"in": np.zeros_like(probe.inputs["in"])})
    assert recorded(other) == [probe.program.cuda]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("{}")
    with pytest.raises(TraceError, match=r"one\.json is no trace \(.*probe.*\); delete it and record again"):
        read_trace(tmp_path, "one")


@pytest.mark.emulator
def test_the_command_compares_what_it_records(
    command: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_nvcc: list[str]
) -> None:
    commands = "tensorir_ladder.lab.commands.traces"
    monkeypatch.setattr(f"{commands}.execution.require_gpu", lambda: None)
    monkeypatch.setattr(f"{commands}.execution.gpu_arch", lambda: ARCH)
    monkeypatch.setattr(f"{commands}.gpu_identity", lambda: IDENTITY)
    monkeypatch.setattr(f"{commands}.toolchain.require_compiler", lambda: NVCC)
    monkeypatch.setattr(f"{commands}.cuda_driver", lambda: emulated_driver(PROBES["addresses"].program))
    outcome = command("traces", "--only", "addresses", "--out", str(tmp_path))
    assert (outcome.code, outcome.out) == (0, f"1 traces in {tmp_path}\nthe emulator does the same in 1 of 1\n")
    path = tmp_path / "addresses.json"
    path.write_text(path.read_text().replace("1088 1088 1", "1088 1088 2"))
    outcome = command("traces", "--only", "addresses", "--out", str(tmp_path))
    assert outcome.code == 5
    assert outcome.out.startswith("addresses: the emulator differs at line 0, word 3: 1, expected 2\n")


def test_the_command_refuses_what_it_cannot_do(
    command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("traces", "--only", "nothing").err == (
        "error: --only nothing: no probe has that in its name; leave it out for all\n"
    )
    monkeypatch.setattr("tensorir_ladder.lab.commands.traces.execution.require_gpu", lambda: None)
    monkeypatch.setattr("tensorir_ladder.lab.commands.traces.execution.gpu_arch", lambda: "sm_80")
    outcome = command("traces")
    assert outcome.code == 2
    assert "the GPU here is sm_80, and the probes have sm_90a's instructions" in outcome.err
