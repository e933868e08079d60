"""The faces of the groups: what their stubs list exists, and what other rooms use is listed."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cases import ROOT

GROUPS = sorted(stub.parent.name for stub in (ROOT / "schedules").glob("*/__init__.pyi"))
OTHER_ROOMS = ("kernels", "steps", "torch_ops", "emulator", "harness", "reports")


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


def test_there_are_six_groups() -> None:
    assert GROUPS == ["loops", "memory", "pipeline", "recipes", "rules", "tensor_cores"]
    schedules = importlib.import_module("tensorir_ladder.schedules")
    assert {*GROUPS, "workloads", "tiles", "cost", "isa", "errors"} == set(schedules.__all__)


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
