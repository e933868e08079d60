"""Rules that hold for every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import requires
from pathlib import Path

import pytest

from support.sampling import sample

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("schedules", "kernels", "relax", "gpus", "steps", "torch_ops", "harness", "reports", "emulator", "lab")


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a module, and public methods of these; what is nested in functions is none."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_functions_and_classes_say_what_they_are(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in paths
        for node in public(ast.parse(path.read_text(encoding="utf-8")).body)
        if not ast.get_docstring(node)
    ]
    assert not silent


def test_nothing_that_is_read_can_run_code() -> None:
    """No pickles, which run what they hold; no text is executed; other processes are given arguments, not a shell."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    found = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            bad = forbidden & {name.partition(".")[0] for name in names}
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                options = {word.arg: ast.unparse(word.value) for word in node.keywords}
                bad |= {called} & {"eval", "exec", "os.system", "os.popen", "torch.load"}
                bad |= {name for name in ("allow_pickle", "shell") if options.get(name) == "True"}
            found += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in bad]
    assert not found


def test_what_only_tests_and_development_need_is_imported_by_neither_library_nor_programs() -> None:
    wanted = [re.match(r"([\w-]+).*; extra == \"(?:test|dev)\"", line) for line in requires("tensorir-ladder") or []]
    only_there = {match[1].removeprefix("pytest-").replace("-", "_") for match in wanted if match} - {"tensorir_ladder"}
    assert "pytest" in only_there
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not only_there & {name.partition(".")[0] for name in names}, path


def module_name(path: Path) -> str:
    return ".".join(("tensorir_ladder", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


FILES = {module_name(path): path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def imported(name: str) -> set[str]:
    """The modules of ours that a file imports: at its top, inside functions, and for types alone."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: relative imports are not read here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found |= {whole if whole in FILES else str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if module.partition(".")[0] == "tensorir_ladder"} - {name}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: imported(name) & set(FILES) for name in FILES}
    list(TopologicalSorter(graph).static_order())  # CycleError names the modules of one


# What each room may import, besides itself. Steps are programs, too: the last lines of each call the command line.
MAY_IMPORT = {
    "schedules": set(),
    "kernels": {"schedules"},
    "relax.rules": {"schedules"},
    "relax": {"schedules", "kernels", "torch_ops.menu", "torch_ops.problem"},
    "gpus": {"schedules"},
    "emulator": {"kernels"},
    "torch_ops": {"schedules", "kernels", "relax.rules", "gpus"},
    "steps": {"schedules", "kernels", "harness.cli"},
    "harness": {"schedules", "kernels", "relax", "emulator", "gpus", "torch_ops", "steps"},
    "lab": {"schedules", "kernels", "relax", "emulator", "gpus", "torch_ops", "steps", "harness"},
    "reports": {"schedules", "kernels", "steps", "harness"},
}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_those_below_them(room: str) -> None:
    """The package's own root gives names of any room: nothing inside takes one from there."""
    own = [name for name in FILES if f"{name}.".startswith(f"tensorir_ladder.{room}.")]
    own = [name for name in own if room != "relax" or not name.startswith("tensorir_ladder.relax.rules")]
    assert own
    allowed = tuple(f"tensorir_ladder.{below}." for below in (room, *MAY_IMPORT[room]))
    above = [f"{name} imports {module}" for name in own for module in imported(name)]
    assert not [line for line in above if not f"{line.rpartition(' ')[2]}.".startswith(allowed)]


def test_what_is_installed_is_every_room_but_the_laboratory() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'^    "tensorir_ladder\.([\w.]+)",$', text, re.M))
    folders = {".".join(path.parent.relative_to(ROOT).parts) for f in FOLDERS for path in (ROOT / f).rglob("*.py")}
    assert listed == {folder for folder in folders if folder.partition(".")[0] != "lab"}


# What runs code out of what it reads: nothing that lies on a disk is trusted so far.
UNTRUSTED = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "eval", "exec", "allow_pickle"}


def names(node: ast.AST) -> set[str]:
    """The names that a node imports, calls or gives as an argument's."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").partition(".")[0]}
    if isinstance(node, ast.Call):
        return {node.func.id} if isinstance(node.func, ast.Name) else set()
    return {node.arg} if isinstance(node, ast.keyword) and node.arg else set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_that_is_read_is_run(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {', '.join(bad)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (bad := names(node) & UNTRUSTED)
    ]
    assert not found


@pytest.mark.parametrize(("count", "one_in", "kept"), [(1, 4, 1), (12, 4, 3), (13, 4, 4), (5, 1, 5)])
def test_a_sample_has_its_size_and_is_the_same_always(count: int, one_in: int, kept: int) -> None:
    names = [f"case[{number}-{number % 3}]" for number in range(count)]
    found = sample(names, one_in)
    assert len(found) == kept
    assert found <= set(names)
    assert found == sample(names[::-1], one_in)


def test_a_sample_does_not_take_one_parameters_value_alone() -> None:
    names = [f"case[{one}-{other}]" for one in "abcdefgh" for other in ("nn", "nt")]
    assert {name[-3:-1] for name in sample(names, 2)} == {"nn", "nt"}
