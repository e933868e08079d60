"""Rules that hold for every file."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schedules", "kernels", "steps", "harness", "reports")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_public_function_and_class_says_what_it_is(folder: str) -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not silent


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = {
        ".".join(("tensorir_ladder", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for folder in (*FOLDERS, "emulator", "torch_ops")
        for path in (ROOT / folder).rglob("*.py")
    }
    imports: dict[str, set[str]] = {}
    for name, path in files.items():
        found = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
        named = {(node.module, f"{node.module}.{alias.name}") for node in found for alias in node.names}
        imports[name] = {whole if whole in files else module for module, whole in named} & set(files)
    list(TopologicalSorter(imports).static_order())  # CycleError names the modules of one
