"""The faces of the groups: what their stubs list exists, and what other rooms use is listed."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV

from support.cases import ROOT
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.faces import guarded, takes_schedule
from tensorir_ladder.schedules.loops import bind_elements, bind_grid, pad_to_tile, unroll_loop, vectorize_inner
from tensorir_ladder.schedules.memory import initialize_before, stage_in_shared
from tensorir_ladder.schedules.recipes import stage_contraction
from tensorir_ladder.schedules.tiles import TensorCoreTile, ThreadTile
from tensorir_ladder.schedules.workloads import Matmul, matmul_bias_relu

GROUPS = sorted(stub.parent.name for stub in (ROOT / "schedules").glob("*/__init__.pyi"))
OTHER_ROOMS = ("kernels", "relax", "steps", "torch_ops", "emulator", "harness", "reports", "lab")


def listed(group: str) -> dict[str, str]:
    """The names that a group's stub lists, each with the module that it comes from."""
    tree = ast.parse((ROOT / "schedules" / group / "__init__.pyi").read_text(encoding="utf-8"))
    return {name.asname or name.name: node.module for node in tree.body for name in node.names}


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """What a file imports from a module of a group: (group.module, name)."""
    prefix = "tensorir_ladder.schedules."
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            module = node.module.removeprefix(prefix)
            yield from ((module, name.name) for name in node.names if module.partition(".")[2])


def test_there_are_five_groups() -> None:
    assert GROUPS == ["loops", "memory", "pipeline", "recipes", "tensor_cores"]
    schedules = importlib.import_module("tensorir_ladder.schedules")
    assert {*GROUPS, "workloads", "tiles", "cost", "cycles", "plans", "isa", "errors"} == set(schedules.__all__)


@pytest.mark.parametrize("group", GROUPS)
def test_every_name_of_a_face_is_there_and_its_own_modules(group: str) -> None:
    face = importlib.import_module(f"tensorir_ladder.schedules.{group}")
    names = listed(group)
    assert sorted(face.__all__) == sorted(names)
    for name, module in names.items():
        own = importlib.import_module(f"tensorir_ladder.schedules.{group}.{module}")
        assert inspect.unwrap(getattr(face, name)) is inspect.unwrap(getattr(own, name))


def test_what_other_rooms_use_is_in_a_face() -> None:
    unlisted = set()
    for path in (path for room in OTHER_ROOMS for path in (ROOT / room).rglob("*.py")):
        for module, name in imports(path):
            found = getattr(importlib.import_module(f"tensorir_ladder.schedules.{module}"), name)
            group = module.partition(".")[0]
            if (inspect.isfunction(found) or inspect.isclass(found)) and name not in listed(group):
                unlisted.add(f"{module}.{name}, for {path.relative_to(ROOT)}")
    assert not unlisted


# The guard in front of functions that take a schedule


def planned() -> tuple[Schedule, SBlockRV]:
    sch = Schedule(Matmul(64, 64, 64).prim_func())
    return sch, sch.get_sblock("matmul")


def test_functions_of_every_group_that_take_a_schedule_are_guarded() -> None:
    for group in GROUPS:
        face = importlib.import_module(f"tensorir_ladder.schedules.{group}")
        for value in (getattr(face, name) for name in face.__all__):
            if takes_schedule(value):
                assert inspect.unwrap(value) is not value
                assert value.__doc__ == inspect.unwrap(value).__doc__
                assert inspect.signature(value) == inspect.signature(inspect.unwrap(value))


TILE = ThreadTile.parse("32x32x16/4x4")
MISUSES: dict[str, tuple[Callable[[Schedule, SBlockRV], Any], tuple[str, ...]]] = {
    "no schedule": (lambda sch, block: stage_contraction("sch", block, TILE), ("Schedule",)),
    "a name": (lambda sch, block: stage_contraction(sch, "matmul", TILE), ("'matmul'", "SBlockRV")),
    "another schedule's block": (lambda sch, block: stage_contraction(sch, planned()[1], TILE), ("another schedule",)),
    "a loop for a block": (lambda sch, block: stage_contraction(sch, sch.get_loops(block)[0], TILE), ("SBlockRV",)),
    "a block that computes nothing": (
        lambda sch, block: stage_contraction(sch, sch.get_sblock("root"), TILE),
        ("computes nothing",),
    ),
    "text for a tile": (lambda sch, block: stage_contraction(sch, block, "32x32x16/4x4"), ("MxNxK/TMxTN",)),
    "another tile": (
        lambda sch, block: stage_contraction(sch, block, TensorCoreTile.parse("64x64x32/32x32")),
        ("ThreadTile", "MxNxK/TMxTN"),
    ),
    "too many threads": (
        lambda sch, block: stage_contraction(sch, block, ThreadTile.parse("64x64x16/1x1")),
        ("4096", "1024"),
    ),
    "registers for shared memory": (
        lambda sch, block: stage_contraction(sch, block, TILE, scope="local"),
        ("'local'", "shared | shared.dyn"),
    ),
    "device memory for shared memory": (
        lambda sch, block: stage_contraction(sch, block, TILE, scope="global"),
        ("'global'", "shared | shared.dyn"),
    ),
    "operand 2": (lambda sch, block: stage_in_shared(sch, block, 2, sch.get_loops(block)[2]), ("got 2", "0 to 1")),
    "operand -1": (lambda sch, block: stage_in_shared(sch, block, -1, sch.get_loops(block)[2]), ("got -1", "0 to 1")),
    "no loops": (lambda sch, block: bind_grid(sch, []), ("at least 1",)),
    "0 threads": (lambda sch, block: bind_elements(sch, block, (0, 32)), ("got 0", "at least 1")),
    "33 x 33 threads": (lambda sch, block: bind_elements(sch, block, (33, 33)), ("33 x 33", "1024")),
    "vectors of 0": (lambda sch, block: vectorize_inner(sch, sch.get_loops(block)[1], 0), ("got 0", "at least 1")),
    "vectors of 64 bytes": (
        lambda sch, block: vectorize_inner(sch, sch.get_loops(block)[1], 16),
        ("16 elements", "16 bytes"),
    ),
    "what TVM refuses": (
        lambda sch, block: vectorize_inner(sch, sch.get_loops(block)[2], 4),
        ("vectorize_inner", "TVM", "data parallel"),
    ),
    "no reduction": (
        lambda sch, block: initialize_before(sch, sch.get_sblock("add_bias"), sch.get_loops("add_bias")[0]),
        ("initialize_before", "reduction"),
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_refused_and_changes_nothing(name: str) -> None:
    call, facts = MISUSES[name]
    sch = Schedule(matmul_bias_relu(Matmul(64, 64, 64)))
    block = sch.get_sblock("matmul")
    loops = sch.get_loops(block)
    before = sch.mod
    with pytest.raises(IllegalSchedule) as caught:
        call(sch, block)
    assert all(fact in str(caught.value) for fact in facts)
    assert caught.value.remedy
    assert tvm_ffi.structural_equal(sch.mod, before)
    assert [int(sch.get(loop).extent) for loop in loops] == [64, 64, 64]


def test_a_call_that_fails_halfway_leaves_schedule_trace_and_handles() -> None:
    sch, block = planned()
    loops = sch.get_loops(block)
    before, trace = sch.mod, str(sch.trace)
    with pytest.raises(IllegalSchedule, match="1024"):  # once the loops are cut
        stage_contraction(sch, block, ThreadTile.parse("64x64x16/1x1"))
    assert tvm_ffi.structural_equal(sch.mod, before)
    assert str(sch.trace) == trace
    assert [int(sch.get(loop).extent) for loop in loops] == [64, 64, 64]
    stage_contraction(sch, block, TILE)  # as if nothing had been tried
    with pytest.raises(IllegalSchedule):
        stage_contraction(sch, block, TILE)  # a second time


def test_mistakes_of_this_package_stay_what_they_are() -> None:
    def broken(sch: Schedule) -> None:
        sch.annotate(sch.get_sblock("matmul"), "half", 1)
        raise KeyError("done")

    sch, _ = planned()
    before = sch.mod
    with pytest.raises(KeyError):
        guarded(broken, IllegalSchedule)(sch)
    assert tvm_ffi.structural_equal(sch.mod, before)


def test_arrays_of_numpy_and_its_numbers_are_taken() -> None:
    sch, block = planned()
    assert pad_to_tile(sch, block, np.array([128, 64, 64]))
    assert unroll_loop(sch, sch.get_loops(block)[2], np.int64(4)) == 4
