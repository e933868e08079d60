"""Kernels that were built before: found by what they were made for, and made again where anything differs."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm

from support.cases import hopper
from tensorir_ladder.kernels.codegen import build_cache
from tensorir_ladder.kernels.codegen.build_cache import digest_sources
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import LaunchPlan, PlainBuffer, Real, RowCount, TensorMap
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.kernels.fused_epilogue import Epilogue
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import kept
from tensorir_ladder.torch_ops.kept import build_kernel
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE, CompiledKernel
from tensorir_ladder.torch_ops.problem import KernelChoice, Setting
from tensorir_ladder.torch_ops.step_kernels import KERNELS

MAP = TensorMap("A", "float16", (64, 32), (128,), (64, 32), swizzle=3)
PARAMETERS = (MAP, PlainBuffer("flags", "int32", (7,)), RowCount(), Real(0.1, "float32"), 3)
PLAN = LaunchPlan("main_kernel", PARAMETERS, (4, 1, 1), (128, 1, 1), (2, 1, 1), 1024, True)
CUBIN = b"\x7fELF\n of \n lines"
BUILT = CompiledKernel(PLAN, CUBIN, (replace(PLAN, kernel="behind"),))
CHOICE = KernelChoice(KERNELS[12], RoleTile.parse("64x128x64/1x1"), 4)
PROBLEM, SETTING = Matmul(64, 128, 64, "float16"), Setting(hopper(name="NVIDIA H200"))


def nvcc(version: str = "13.0") -> Compiler:
    """A compiler that nobody runs."""
    made = Compiler(Path("/bin/true"), "toolkit")
    vars(made)["version"] = version
    return made


@pytest.fixture(autouse=True)
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An empty cache, and what was made for it."""
    made: list[Any] = []

    def compile_kernel(*made_of: Any) -> CompiledKernel:
        made.append(made_of)
        return BUILT

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build_cache, "_OWN", [])
    build_cache._say.cache_clear()
    build_cache._sweep.cache_clear()
    monkeypatch.setattr(kept, "compile_kernel", compile_kernel)
    monkeypatch.setattr(KernelChoice, "build", lambda *_made_for: None)
    return made


def build(
    choice: KernelChoice = CHOICE, problem: Matmul = PROBLEM, setting: Setting = SETTING, version: str = "13.0"
) -> None:
    """Ask for a kernel; it is right whatever happened."""
    assert build_kernel(choice, problem, setting, nvcc(version)) == BUILT


def test_a_kernel_is_made_once(builds: list[Any]) -> None:
    for _ in range(3):
        build()
    assert len(builds) == 1


OTHERS = [
    {"choice": replace(CHOICE, kernel=KERNELS[13])},
    {"choice": replace(CHOICE, tile=RoleTile.parse("64x64x64/1x1"))},
    {"choice": replace(CHOICE, stages=5)},
    {"problem": replace(PROBLEM, m=65)},
    {"problem": replace(PROBLEM, dtype="bfloat16")},
    {"problem": replace(PROBLEM, layout="nt")},
    {"problem": replace(PROBLEM, out_dtype="float32")},
    {"setting": replace(SETTING, straddles=True)},
    {"setting": replace(SETTING, batch=2)},
    {"setting": replace(SETTING, any_rows=True)},
    {"setting": replace(SETTING, finish=Epilogue(alpha=2.0))},
    {"setting": replace(SETTING, finish=Epilogue(activation="relu"))},
    {"setting": replace(SETTING, machine=hopper(114, "NVIDIA H200"))},
    {"version": "13.1"},
]


def test_a_kernel_for_anything_else_is_another(builds: list[Any]) -> None:
    for number, other in enumerate(OTHERS, 1):
        build(**other)
        assert len(builds) == number, other


@pytest.mark.parametrize("package", ["tvm", "tvm_ffi"])
def test_another_version_makes_its_own(package: str, builds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setattr(importlib.import_module(package), "__version__", "0.0.1")
    build()
    assert len(builds) == 2


def test_other_sources_make_their_own_and_edited_ones_keep_nothing(
    builds: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "ring.py"
    source.write_text("one")
    monkeypatch.setattr(kept.SOURCES, "root", tmp_path)
    monkeypatch.setattr(kept.SOURCES, "loaded", digest_sources(tmp_path, kept.SOURCES.patterns))
    build()
    source.write_text("another")
    for _ in range(2):
        build()
    assert len(builds) == 4, "what is built of edited sources is built again"
    source.write_text("one")
    build()
    assert len(builds) == 4


def test_what_is_damaged_or_no_kernel_is_made_again(builds: list[Any], tmp_path: Path) -> None:
    build()
    (path,) = (tmp_path / "tensorir-ladder" / "kernels").iterdir()
    os.truncate(path, 100)
    build()
    assert len(builds) == 2
    for content in (
        b"",
        b"\n",
        b"{}\ncubin",
        b"not JSON\ncubin",
        PLAN.to_json().replace(b'"RowCount"', b'"os"') + b"\n",
    ):
        build_cache._write(path, content)  # with the digest that it should have
        build()
    assert len(builds) == 7
    build()
    assert len(builds) == 7


def test_without_a_cache_kernels_are_made_and_that_is_said(
    builds: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    for _ in range(2):
        build()
    assert len(builds) == 1, "kept by this process alone"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: build cache ")


def test_a_plan_is_read_as_it_was_written() -> None:
    assert LaunchPlan.from_json(PLAN.to_json()) == PLAN
    assert b"\n" not in PLAN.to_json()
    for text in (b"", b"[]", b"{}", PLAN.to_json()[:-1], PLAN.to_json().replace(b'"Real"', b'"Unreal"')):
        with pytest.raises(ValueError, match=r"."):
            LaunchPlan.from_json(text)


REAL = [
    (CHOICE, Matmul(1 << 20, 128, 64, "float16"), Setting(hopper(), any_rows=True)),
    (replace(CHOICE, kernel=KERNELS[13]), Matmul(104, 168, 3912, "bfloat16"), Setting(hopper())),
]


@pytest.mark.parametrize(("choice", "problem", "setting"), REAL, ids=["any rows", "workspaces"])
def test_a_real_kernel_s_plan_is_read_as_it_was_written(
    choice: KernelChoice, problem: Matmul, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    module = tvm.IRModule({"main": choice.build(problem, setting)})
    plan = launch_plan(generate(module, setting.machine.target, TIR_PIPELINE))
    assert plan.workspaces or RowCount() in plan.parameters
    assert LaunchPlan.from_json(plan.to_json()) == plan
