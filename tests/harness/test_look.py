"""The commands that look at a step: show, explain, diff and doctor, and a step's own file at a glance."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tensorir_ladder.emulator import compiler as host_compiler
from tensorir_ladder.harness.commands import doctor
from tensorir_ladder.steps.registry import find_steps

Command = Callable[..., Any]
EXPLICIT = [number for number, step in find_steps().items() if step.explicit]


def test_a_step_alone_is_one_variant_at_a_glance(command: Command) -> None:
    outcome = command("run", "--step", "5", "--shape", "64x64x128", "--on", "llvm")
    assert outcome.code == 0
    assert len(re.findall("worst error", outcome.out)) == 1, "the default variant alone"
    assert re.search(r"^time +T1 +T2 +T3", outcome.out, re.M)
    assert re.search(r"^matmul_update {9,}0", outcome.out, re.M), "two tiles later than the copies"
    assert re.search(r"recorded on NVIDIA H200, of cuBLAS: 256³ \d\.\d\d", outcome.out)
    assert len(outcome.out.splitlines()) <= 25
    for line in re.findall(r"^  ladder (.*?)  ", outcome.out, re.M):
        assert line.split()[0] in ("diff", "explain", "run", "show")


def test_what_it_says_to_type_next_works(command: Command) -> None:
    out = command("run", "--step", "4", "--shape", "64x64x128", "--on", "llvm").out
    lines = re.findall(r"^  ladder (.*?)  ", out, re.M)
    assert lines
    for line in lines:
        assert command(*line.split()).code == 0


def test_show_prints_the_schedule_first_and_no_preamble(command: Command) -> None:
    outcome = command("show", "5:sync", "--show", "cuda", "--shape", "64x64x128")
    source, _, cuda = outcome.out.partition("\n# the generated CUDA")
    assert "def schedule(problem: Matmul" in source
    assert cuda.count("__global__") == 1
    assert "#include" not in cuda
    assert "cp_async" not in cuda, "the variant asked for"


@pytest.mark.parametrize("form", ["tir", "lowered"])
def test_show_prints_tensorir(command: Command, form: str) -> None:
    assert "T.prim_func" in command("show", "4", "--show", form, "--shape", "64x64x128").out


@pytest.mark.parametrize("number", EXPLICIT)
def test_an_explicit_kernel_has_a_source_and_no_loop_to_explain(command: Command, number: int) -> None:
    assert "def kernel(" in command("show", str(number)).out
    outcome = command("explain", str(number))
    assert outcome.code == 0
    assert "no loop is annotated" in outcome.out


@pytest.mark.parametrize("stages", [2, 4])
def test_explain_tells_the_pipeline_of_any_number_of_stages(command: Command, stages: int) -> None:
    out = command("explain", "5", "--stages", str(stages)).out
    assert f"pipeline stages 0 to {stages - 1}" in out
    assert len(re.findall(r"^  A_shared\[\d\]$", out.partition("body:")[0], re.M)) == stages - 1, "in the prologue"


def test_explain_says_what_is_not_pipelined(command: Command) -> None:
    assert "take turns" in command("explain", "4").out


def test_diff_of_schedules_is_the_lesson(command: Command) -> None:
    out = command("diff", "4", "5").out
    assert re.search(r'^\+ +sch.annotate\(loops.k_outer, "software_pipeline_stage"', out, re.M)
    assert "no difference" in command("diff", "5:double_buffer", "4", "--show", "cuda").out


@pytest.mark.parametrize("name", ["five", "5:", "5:no_such", "99"])
def test_what_names_no_kernel_is_refused(command: Command, name: str) -> None:
    assert command("show", name).code == 2
    assert command("diff", "4", name).code == 2


def test_several_sizes_are_not_looked_at_together(command: Command) -> None:
    assert command("explain", "5", "--size", "64,128").code == 2


def test_code_is_coloured_on_a_terminal_only(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in command("show", "2").out
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[" in command("show", "2").out


def test_doctor_names_what_is_missing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("doctor").code == 0
    monkeypatch.setattr(host_compiler.shutil, "which", lambda _name: None)
    outcome = command("doctor")
    assert outcome.code == 0, "nothing that every command needs"
    assert re.search(r"C\+\+ compiler.*none.*install g\+\+", outcome.out)


def test_doctor_compares_with_the_pins(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.1.15" if name == "apache-tvm-ffi" else "0.27.0.post1")
    outcome = command("doctor")
    assert outcome.code == 2
    assert re.search(r"apache-tvm-ffi +│ 0\.1\.15", outcome.out)
    remedies = " ".join(line.split("│")[-2].strip() for line in outcome.out.splitlines() if line.startswith("│"))
    assert ".venv/bin/python -m pip install apache-tvm-ffi==0.1.14.post1" in remedies


def test_a_long_check_is_announced(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    from tensorir_ladder.harness.commands import kernels

    arguments = ("verify", "--step", "2", "--shape", "64x64x64", "--on", "llvm")
    assert "minutes" not in command(*arguments).err
    monkeypatch.setattr(kernels, "SPEEDS", {"llvm": (2e3, 2e3)})
    assert re.search(r"about \d+ minutes", command(*arguments).err)
