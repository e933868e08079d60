"""The emulator beside compute-sanitizer: what tools print, who agrees, and how kernels get there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support import broken_kernels, call_kernels, schedule_kernels
from support.cases import Outcome as Ran
from support.driver_stand_in import emulated_driver
from tensorir_ladder.emulator import EmulatedProgram, LaunchPlan, PlainBuffer
from tensorir_ladder.harness.cli import as_typed
from tensorir_ladder.harness.execution import gpu_arch
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin
from tensorir_ladder.lab.gpu_program import GpuProgram
from tensorir_ladder.lab.sanitizer import agreement, launch, preparation, tools
from tensorir_ladder.lab.sanitizer.judgement import AGREE, CANNOT_SEE, DISAGREE, judge
from tensorir_ladder.lab.sanitizer.preparation import (
    NotPrepared,
    Prepared,
    folder_name,
    prepare_one,
    prepared_kernels,
)
from tensorir_ladder.lab.sanitizer.subjects import WRONG, Finding, SanitizedKernel, emulated_finding
from tensorir_ladder.lab.sanitizer.tools import (
    ALONE,
    CLEAN,
    FAILED,
    FOUND,
    HANG,
    RIGHT,
    STOPPED,
    TOOLS,
    ToolRun,
    read_outcome,
)
from tensorir_ladder.lab.traces.probe import PREAMBLE
from tensorir_ladder.schedules.workloads import Matmul

NAIVE = """
extern "C" __global__ void __launch_bounds__(16) product(float* __restrict__ A, float* __restrict__ B, \
float* __restrict__ C) {
  float sum = 0;
  for (int k = 0; k < 4; ++k) sum += A[threadIdx.y * 4 + k] * B[k * 4 + threadIdx.x];
  C[threadIdx.y * 4 + threadIdx.x] = sum;
}
"""
BROKEN = {"whole": ("", ""), "short": ("k < 4", "k < 3"), "beyond": ("sum = 0", "sum = A[16 + threadIdx.x]")}
NVCC = Compiler(Path("nvcc"), "none")


def subject_names() -> list[str]:
    """The kernels of this module, as ``--kernels MODULE`` finds them."""
    return list(BROKEN)


def subject(name: str) -> SanitizedKernel:
    """A naive product, or a broken one."""
    made = LaunchPlan("product", tuple(map(PlainBuffer, "ABC")), (1, 1, 1), (4, 4, 1))
    program = EmulatedProgram(name, PREAMBLE + NAIVE.replace(*BROKEN[name]), (made,), ("A", "B", "C"))
    return SanitizedKernel(name, program, Matmul(4, 4, 4), whole=name == "whole")


@pytest.fixture
def without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A "cubin" is the CUDA text."""
    monkeypatch.setattr(preparation, "compile_cubin", lambda text, _arch, _compiler: Cubin(text.encode(), 0, 0, 0))


@pytest.fixture
def kernels(tmp_path: Path, without_nvcc: None) -> list[Prepared]:
    """This module's kernels, prepared."""
    made = [prepare_one(__name__, name, tmp_path / "work", NVCC) for name in BROKEN]
    (tmp_path / "work" / preparation.MANIFEST).write_text(json.dumps([kernel.folder.name for kernel in made]))
    return made


# What tools print

RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at main_kernel+0x6d0
=========     and Write access at main_kernel+0x550 [2048 hazards]
=========
63 of 64 elements of the output are wrong
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
OVERRUN = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at main_kernel+0x2a0
=========     by thread (0,0,0) in block (7,0,0)
=========     Address 0x7f2c35203400 is out of bounds
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call.
=========
the GPU stopped the kernel: cuCtxSynchronize failed: CUDA_ERROR_LAUNCH_FAILED (719)
========= ERROR SUMMARY: 9 errors
"""
NO_ERROR = "========= COMPUTE-SANITIZER\nthe output is right\n========= ERROR SUMMARY: 0 errors\n"
NO_HAZARD = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
UNREADY = (
    "========= COMPUTE-SANITIZER\n========= Error: Target application terminated before first instrumented API call"
)


@pytest.mark.parametrize(
    ("tool", "text", "expected"),
    [
        (
            "racecheck",
            RACE,
            ToolRun(
                FOUND,
                1,
                "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
                "Error: Race reported between Read access at main_kernel+0x6d0",
            ),
        ),
        (
            "memcheck",
            OVERRUN,
            ToolRun(FOUND, 9, "ERROR SUMMARY: 9 errors", "Invalid __global__ read of size 16 bytes"),
        ),
        ("synccheck", NO_ERROR, ToolRun(CLEAN, 0, "ERROR SUMMARY: 0 errors")),
        ("racecheck", NO_HAZARD, ToolRun(CLEAN, 0, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")),
        ("memcheck", UNREADY, ToolRun(FAILED, first=UNREADY.splitlines()[1])),
        ("memcheck", "", ToolRun(FAILED, first="it printed nothing")),
        (ALONE, f"{launch.RIGHT}\n", ToolRun(RIGHT)),
        (ALONE, f"{launch.STOPPED}: call failed (700)", ToolRun(STOPPED, first=f"{launch.STOPPED}: call failed (700)")),
        (ALONE, f"3 of 9 {launch.WRONG}", ToolRun(tools.WRONG, 3, first=f"3 of 9 {launch.WRONG}")),
        (ALONE, "Traceback\nNoDriver: none", ToolRun(FAILED, first="NoDriver: none")),
    ],
)
def test_what_is_printed_is_read(tool: str, text: str, expected: ToolRun) -> None:
    assert read_outcome(tool, text) == expected


# Who agrees

SILENT = {ALONE: ToolRun(RIGHT), **dict.fromkeys(TOOLS, ToolRun(CLEAN, 0, "0 errors"))}
SOME = ToolRun(FOUND, 2, "2 errors")


@pytest.mark.parametrize(
    ("finding", "outcomes", "verdict", "why"),
    [
        (Finding("race", "a read after a write"), {"racecheck": SOME}, AGREE, "racecheck: 2 errors"),
        (Finding("race", "a read after a write"), {}, DISAGREE, "racecheck does not find it (alone on the GPU: right)"),
        (Finding("race", "a read after a write"), {"memcheck": SOME}, DISAGREE, "(memcheck: 2 errors)"),
        (Finding("race", "the read of a wgmma"), {}, CANNOT_SEE, "racecheck does not see what wgmma reads"),
        (Finding("race", "the read of a wgmma"), {"racecheck": SOME}, AGREE, "racecheck: 2 errors"),
        (Finding("race", "the write of a TMA load"), {}, CANNOT_SEE, "TMA's tensor copies"),
        (Finding("race", "a read"), {ALONE: ToolRun(HANG)}, CANNOT_SEE, "hangs on the GPU, and racecheck reports when"),
        (Finding("out of bounds", "a write of shared memory at"), {}, CANNOT_SEE, "not the arrays in it"),
        (Finding("out of bounds", "a read of 16 bytes outside"), {}, DISAGREE, "memcheck does not find it"),
        (Finding("misaligned", "x"), {"memcheck": SOME}, AGREE, "memcheck: 2 errors"),
        (Finding("missing proxy fence", "x"), {}, CANNOT_SEE, "proxy fence"),
        (Finding("deadlock", "x", True), {ALONE: ToolRun(HANG)}, AGREE, "alone on the GPU: hang"),
        (Finding("deadlock", "x", True), {}, DISAGREE, "alone on the GPU: right"),
        (Finding("deadlock", "x", False), {}, CANNOT_SEE, "in some orders of events"),
        (Finding(WRONG, "x"), {ALONE: ToolRun(tools.WRONG, 3)}, AGREE, "alone on the GPU: wrong"),
        (Finding(WRONG, "x"), {}, DISAGREE, "alone on the GPU: right"),
        (Finding(), {}, DISAGREE, "the emulator finds nothing"),
    ],
)
def test_broken_kernels_are_judged(finding: Finding, outcomes: dict[str, ToolRun], verdict: str, why: str) -> None:
    found, said = judge(finding, False, {**SILENT, **outcomes})
    assert found == verdict
    assert why in said


@pytest.mark.parametrize(
    ("finding", "outcomes", "expected"),
    [
        (Finding(), {}, (AGREE, "both find nothing")),
        (Finding(), {"racecheck": SOME}, (DISAGREE, "racecheck: 2 errors")),
        (Finding("race", "x"), {}, (DISAGREE, "emulator: race")),
        (Finding(), {"memcheck": ToolRun(FAILED, first="no ports")}, (DISAGREE, "memcheck: no ports")),
        (Finding(), {ALONE: ToolRun(HANG)}, (DISAGREE, "alone: hang")),
    ],
)
def test_whole_kernels_are_judged(finding: Finding, outcomes: dict[str, ToolRun], expected: tuple[str, str]) -> None:
    assert judge(finding, True, {**SILENT, **outcomes}) == expected


# Kernels


@pytest.mark.emulator
def test_the_emulator_says_what_is_wrong() -> None:
    assert emulated_finding(subject("whole")) == Finding()
    short = emulated_finding(subject("short"))
    assert (short.kind, short.always) == (WRONG, True)
    assert "of 16 elements" in short.text
    beyond = emulated_finding(subject("beyond"))
    assert (beyond.kind, beyond.always) == ("out of bounds", True)


@pytest.mark.emulator
def test_what_is_prepared_is_kept(kernels: list[Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [kernel.emulator.kind for kernel in prepared_kernels(tmp_path / "work")] == ["", WRONG, "out of bounds"]
    assert kernels[1].subject == subject("short")
    asked = []
    monkeypatch.setattr(preparation, "emulated_finding", lambda subject: asked.append(subject.name) or Finding("new"))
    assert prepare_one(__name__, "short", tmp_path / "work", NVCC).emulator.kind == WRONG
    assert asked == []
    monkeypatch.setitem(BROKEN, "short", ("k < 4", "k < 2"))
    assert prepare_one(__name__, "short", tmp_path / "work", NVCC).emulator.kind == "new"
    (kernels[0].folder / "emulator.json").unlink()  # as an interrupted preparation leaves it
    assert prepare_one(__name__, "whole", tmp_path / "work", NVCC).emulator.kind == "new"
    assert asked == ["short", "whole"]


@pytest.mark.parametrize("name", ["ring, whole", "step 13, bounded, whole", "step 9, tf32, no barrier"])
def test_a_kernel_is_read_as_it_was_saved(name: str, tmp_path: Path) -> None:
    saved = broken_kernels.subject(name)
    saved.save(tmp_path)
    assert Prepared(tmp_path).subject == saved


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("subject.json", "{}"),
        ("subject.json", "[1, 2"),
        ("subject.json", None),
        ("kernel.cu", None),
        ("kernel.cu", "int no_kernel;"),
    ],
)
def test_what_was_not_saved_is_refused(file: str, text: str | None, tmp_path: Path) -> None:
    subject("whole").save(tmp_path)
    (tmp_path / file).unlink() if text is None else (tmp_path / file).write_text(text)
    with pytest.raises(NotPrepared, match="holds no prepared kernel"):
        _ = Prepared(tmp_path).subject


@pytest.mark.emulator
def test_a_launch_says_how_it_went(kernels: list[Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    failing: dict[str, int] = {}

    def on_gpu(kernel: Prepared) -> GpuProgram:
        driver = emulated_driver(kernel.subject.program)
        driver.library.failing = failing
        return GpuProgram(kernel.subject.program, b"cubin", driver)

    monkeypatch.setattr(Prepared, "on_gpu", on_gpu)
    assert launch.launched(kernels[0]) == launch.RIGHT
    arrays = subject("short").arrays(launch.SEED)
    a, b, _ = arrays
    wrong = int(np.sum(a[:, :3] @ b[:3] != a @ b))
    assert launch.launched(kernels[1]) == f"{wrong} of 16 {launch.WRONG}"
    failing["cuCtxSynchronize"] = 719
    assert launch.launched(kernels[0]).startswith(f"{launch.STOPPED}: cuCtxSynchronize failed")


def test_names_name_kernels_and_folders() -> None:
    names = broken_kernels.subject_names()
    assert len({folder_name(name) for name in names}) == len(names)
    assert set(broken_kernels.BROKEN) < set(names)
    ring = broken_kernels.subject("cluster, a rank beyond the cluster")
    assert (ring.problem.shape, ring.whole) == ("128x64x768", False)
    assert ring.program.cuda.startswith(PREAMBLE)
    whole = broken_kernels.subject("step 12, bounded, whole")
    assert (whole.problem.shape, whole.whole) == ("130x72x200", True)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["ring, whole", "step 13, bounded, whole"])
def test_whole_kernels_are_clean(name: str) -> None:
    assert emulated_finding(broken_kernels.subject(name)) == Finding()


@pytest.mark.emulator
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("forms", "name"), [(forms, name) for forms in (call_kernels, schedule_kernels) for name in forms.subject_names()]
)
def test_forms_off_the_squares_are_clean(forms: ModuleType, name: str) -> None:
    made = forms.subject(name)
    assert made.whole
    assert emulated_finding(made) == Finding()


# Runs, with a stand-in for compute-sanitizer

STAND_IN = """#!/bin/sh
case "$*" in
  --help) echo "  --max-connections arg (=10)"; exit 0 ;;
  --version) echo "Version 2025.3.1.0"; exit 0 ;;
esac
echo "$*" >> CALLS
case "$*" in
  *synccheck*beyond) sleep 60 ;;
  *memcheck*beyond)
    echo "========= Invalid __global__ read of size 4 bytes"
    echo "========= ERROR SUMMARY: 2 errors" ;;
  *racecheck*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
  *) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compute-sanitizer on PATH that says what it is told to; its calls are in the file "calls" beside it."""
    path = tmp_path / "bin" / "compute-sanitizer"
    path.parent.mkdir()
    path.write_text(STAND_IN.replace("CALLS", str(path.parent / "calls")))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path


def alone_says(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, ToolRun]) -> list[str]:
    """Have runs without a tool end so, by the kernel's name; returns the names of those run."""
    run_tool, asked = tools.run_tool, []

    def run(kernel: Prepared, tool: str, sanitizer: str, limit_s: float) -> ToolRun:
        if tool != ALONE:
            return run_tool(kernel, tool, sanitizer, 2)
        asked.append(kernel.subject.name)
        return outcomes[kernel.subject.name]

    monkeypatch.setattr(tools, "run_tool", run)
    return asked


@pytest.mark.emulator
def test_runs_are_kept_and_hangs_end(kernels: list[Prepared], sanitizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = alone_says(monkeypatch, {"whole": ToolRun(RIGHT), "short": ToolRun(HANG), "beyond": ToolRun(FAILED)})
    found = {
        (kernel.subject.name, tool): outcome for kernel, tool, outcome in tools.look_at_all(kernels, str(sanitizer), 2)
    }
    assert len(asked) == 3
    assert {name for name, _ in found} == set(BROKEN)
    assert [tool for name, tool in found if name == "short"] == [ALONE]  # tools report when a kernel ends
    assert found["whole", "racecheck"].status == CLEAN
    assert found["beyond", "memcheck"] == ToolRun(
        FOUND, 2, "ERROR SUMMARY: 2 errors", "Invalid __global__ read of size 4 bytes"
    )
    assert found["beyond", "synccheck"] == ToolRun(HANG, summary="not done after 2 s")
    calls = (sanitizer.parent / "calls").read_text().splitlines()
    assert len(calls) == 6
    assert all("--print-limit 20 --max-connections 64" in call for call in calls)
    list(tools.look_at_all(kernels, str(sanitizer), 2))
    assert asked[3:] == ["beyond"]  # what failed is tried again
    assert len((sanitizer.parent / "calls").read_text().splitlines()) == 6
    (kernels[0].folder / "kernel.cubin").write_bytes(b"another")
    list(tools.look_at_all(kernels, str(sanitizer), 2))
    assert len((sanitizer.parent / "calls").read_text().splitlines()) == 9


@pytest.mark.emulator
def test_a_run_without_a_driver_fails(kernels: list[Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nor one with a GPU's driver
    outcome = tools.run_tool(kernels[0], ALONE, "", 120)
    assert outcome.status == FAILED
    assert "torch_ops.driver." in outcome.first


@pytest.mark.gpu
@pytest.mark.emulator
def test_memcheck_sees_what_the_emulator_sees(tmp_path: Path, compiler: Compiler) -> None:
    if not shutil.which(tools.COMMAND):
        pytest.skip(f"no {tools.COMMAND}, which comes with the CUDA toolkit")
    if gpu_arch() != preparation.ARCH:
        pytest.skip(f"cubins are for {preparation.ARCH}; this is {gpu_arch()}")
    made = [prepare_one(__name__, name, tmp_path, compiler) for name in BROKEN]
    list(tools.look_at_all(made, tools.require_sanitizer(), 4))
    assert [agreement.row_of(kernel).verdict for kernel in made] == [AGREE] * 3


@pytest.mark.emulator
def test_the_command_compares(
    command: Callable[..., Ran],
    kernels: list[Prepared],
    sanitizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone_says(
        monkeypatch, {"whole": ToolRun(RIGHT), "short": ToolRun(tools.WRONG, 5), "beyond": ToolRun(tools.WRONG, 9)}
    )
    monkeypatch.setattr("tensorir_ladder.lab.commands.sanitize.execution.require_gpu", lambda: None)
    monkeypatch.setattr("tensorir_ladder.lab.commands.sanitize.gpu_identity", lambda: {"gpu": "a GPU", "driver": "1.2"})
    arguments = ("sanitize", "--work", str(tmp_path / "work"), "--jobs", "2", "--revision", "abc")
    outcome = command(*arguments, "--out", str(tmp_path / "record.jsonl"))
    assert outcome.code == 0
    record = json.loads((tmp_path / "record.jsonl").read_text())
    assert (record["gpu"], record["sanitizer"], record["revision"]) == ("a GPU", "Version 2025.3.1.0", "abc")
    by_name = {kernel["name"]: kernel for kernel in record["kernels"]}
    assert [by_name[name]["verdict"] for name in BROKEN] == [AGREE] * 3
    assert by_name["beyond"]["runs"]["synccheck"]["status"] == HANG
    for tool in ("memcheck", "racecheck"):  # the tool that is for it has not seen it, as kept
        path = kernels[2].folder / f"{tool}.json"
        path.write_text(json.dumps({"cubin": kernels[2].digest, "outcome": {"status": CLEAN}}))
    outcome = command(*arguments)
    assert outcome.code == 5
    assert "beyond: disagree: memcheck does not find it (alone on the GPU: wrong)\n" in outcome.out
    shown = command("sanitize", "--show", str(tmp_path / "record.jsonl"))
    assert shown.code == 0
    assert all(word in shown.out for word in ("the emulator finds", "wrong result", "out of bounds", "none"))


def test_what_is_missing_is_named(command: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = command("sanitize", "--work", str(tmp_path))
    assert (outcome.code, outcome.err) == (
        2,
        as_typed(f"error: {tmp_path} holds no prepared kernels; prepare them: ladder sanitize --prepare\n"),
    )
    with pytest.raises(NotPrepared, match=r"tests\.nothing names no kernels"):
        preparation.subject_names("tests.nothing")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tools.NoSanitizer, match="no compute-sanitizer on PATH; it comes with the CUDA toolkit"):
        tools.require_sanitizer()
    (tmp_path / "other.jsonl").write_text("{}")
    shown = command("sanitize", "--show", str(tmp_path / "other.jsonl"))
    assert (shown.code, shown.err) == (
        2,
        f"error: {tmp_path}/other.jsonl is no record of sanitize (Object missing required field `kernels`); "
        "give what --out wrote\n",
    )
    assert "--jobs: '0' is not a whole number from 1 to " in command("sanitize", "--jobs", "0").err


def test_kinds_are_counted() -> None:
    row = agreement.AgreementRow("one", False, Finding("race"), {}, AGREE, "")
    counted = agreement.tally([row, replace(row, verdict=CANNOT_SEE), replace(row, emulator=Finding(), whole=True)])
    assert {kind: dict(counts) for kind, counts in counted.items()} == {
        "race": {AGREE: 1, CANNOT_SEE: 1},
        "none": {AGREE: 1},
    }
