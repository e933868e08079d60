"""TVM's parser finds the frames of imports at once, and leaves nothing behind."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tvm

from tensorir_ladder.relax.rules.tensor_intrinsics import IMPORTING, import_quickly

SOURCE = """
from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def copy(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
    for i in range(16):
        with T.sblock("copied"):
            at = T.axis.spatial(16, i)
            B[at] = A[at]
"""


class Searched(ModuleType):
    """A module that counts how often somebody asks for its file."""

    times = 0

    @property
    def __file__(self) -> str:
        Searched.times += 1
        return "searched.py"


def parsed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[tvm.tirx.PrimFunc, int]:
    """Import a module that holds TVMScript; return its function, and how often all of sys.modules was searched."""
    (folder / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, "searched", Searched("searched"))
    Searched.times = 0
    function = importlib.import_module(name).copy
    monkeypatch.delitem(sys.modules, name)
    return function, Searched.times


def test_modules_are_not_searched_for_the_frames_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IMPORTING:  # which the tests have in the cache from the start
        monkeypatch.delitem(inspect.modulesbyfile, f"<frozen {name}>", raising=False)
    for each in ("getmodule", "getsourcefile"):  # without what the tests remember
        monkeypatch.setattr(inspect, each, inspect.unwrap(getattr(inspect, each)))
    usual, many = parsed("usual_script", tmp_path, monkeypatch)
    with import_quickly():
        quick, few = parsed("quick_script", tmp_path, monkeypatch)
    assert few < many / 2
    tvm.ir.assert_structural_equal(usual, quick)
    assert not any(name.startswith("<frozen importlib") for name in inspect.modulesbyfile)
