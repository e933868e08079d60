"""A library that export_library wrote, run by the C++ program of the docs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.frontend import nn
from tvm.target import Target

PROGRAM = Path(__file__).resolve().parents[2] / "docs" / "run_model.cpp"
FOLDERS = [Path(tvm.__file__).parent / "lib", Path(tvm_ffi.__file__).parent / "lib"]
LIBRARIES = ("tvm_runtime", "tvm_runtime_extra", "tvm_ffi")


class Layer(nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        self.inner = nn.Linear(64, 8)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Multiply and add."""
        return self.inner(x)


def exported(path: Path) -> None:
    """A library of a layer whose weights, all a half, are in it."""
    mod, parameters = Layer().export_tvm(spec={"forward": {"x": nn.spec.Tensor([2, 64], "float32")}})
    weights = {name: np.full([int(each) for each in given.shape], 0.5, "float32") for name, given in parameters}
    bound = relax.transform.BindParams("forward", weights)(mod)["forward"]
    mod = tvm.IRModule({"main": bound.with_attr("global_symbol", "main")})
    tvm.compile(mod, Target("llvm")).export_library(str(path))


def test_the_program_of_the_docs_runs_an_exported_library(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    exported(tmp_path / "model.so")
    include = Path(tvm_ffi.__file__).parent / "include"
    command = [compiler, "-std=c++17", "-O1", str(PROGRAM), "-o", str(tmp_path / "run_model"), f"-I{include}"]
    command += [f"-L{folder}" for folder in FOLDERS] + ["-Wl,--no-as-needed", *(f"-l{name}" for name in LIBRARIES)]
    command += [f"-Wl,-rpath,{folder}" for folder in FOLDERS]
    subprocess.run(command, check=True, timeout=300)
    run = [tmp_path / "run_model", tmp_path / "model.so", "cpu", "2", "64"]
    assert subprocess.run(run, check=True, capture_output=True, text=True, timeout=60).stdout.split() == ["32.5"] * 4
    assert subprocess.run(run[:1], capture_output=True, timeout=60).returncode == 2
