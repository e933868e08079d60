"""What several test files share: building cases, running commands, and skipping what this machine lacks."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# Before numpy is loaded: its products of small matrices are few, and its threads wait for more of them at full speed.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# As in a shell where the environment is active, so that commands are shown by their names alone.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])

import pytest
import tvm
import tvm_ffi.structural
from tvm.s_tir.schedule import _type_checker

from support.cases import UNOPTIMISED, Outcome
from support.sampling import sample
from tensorir_ladder.emulator import find_host_compiler
from tensorir_ladder.emulator.errors import NoHostCompiler
from tensorir_ladder.harness import build
from tensorir_ladder.harness.cli import main
from tensorir_ladder.harness.execution import gpu_present
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, NoCompiler, disassemble, find_compiler

# Lowering is pure and is most of what tests spend, so each case is lowered once a process. Here, before any module has
# taken the function by name. A test that replaces what a schedule calls must clear it: build.lower.cache_clear().
build.lower = functools.lru_cache(maxsize=512)(build.lower)

# What follows from types alone, which TVM works out at every call.
_type_checker._dispatcher = functools.cache(_type_checker._dispatcher)
tvm_ffi.structural._callback_type_to_type_index = functools.cache(tvm_ffi.structural._callback_type_to_type_index)

# TVM's parser asks inspect for the source of all frames of the stack, of which pytest has many. Of files that are none,
# "<ast>" and the like, inspect looks through all modules each time.
_sources: dict[str, str] = {}
_nowhere: set[str] = set()
_getmodule, _getsourcefile = inspect.getmodule, inspect.getsourcefile


def _module_of(thing: Any, _filename: str | None = None) -> ModuleType | None:
    file = thing.f_code.co_filename if inspect.isframe(thing) else ""
    if file in _nowhere:
        return None
    found = _getmodule(thing, _filename)
    if found is None and file.startswith("<"):
        _nowhere.add(file)
    return found


def _source_of(thing: Any) -> str | None:
    file = thing.f_code.co_filename if inspect.isframe(thing) else ""
    found = _sources.get(file) or _getsourcefile(thing)
    if found and file:
        _sources[file] = found
    return found


_module_of.__wrapped__, _source_of.__wrapped__ = _getmodule, _getsourcefile  # type: ignore[attr-defined]
inspect.getmodule, inspect.getsourcefile = _module_of, _source_of

# What is loaded by now stays, so that nobody looks for garbage in it; and there is memory for more between the looks.
gc.freeze()
gc.set_threshold(20_000, 20, 50)


HOST_COMPILER = find_host_compiler()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let all cases of sampled tests run."""
    text = "run every case of the tests that are marked sampled"
    parser.addoption("--every-case", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of sampled tests, of which more say much the same."""
    if config.getoption("every_case"):
        return
    cases: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]][item.nodeid] = item
    left_out: set[pytest.Item] = set()
    for found in cases.values():
        (one_in,) = next(iter(found.values())).get_closest_marker("sampled").args
        left_out |= {found[name] for name in found.keys() - sample(found, one_in)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[Any]:
    """Let the processes of one run share a cache of builds that is the run's own."""
    if hasattr(config, "workerinput"):  # of pytest-xdist, which has the environment of who started it
        return (yield)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what needs a compiler or a GPU that is not here."""
    if item.get_closest_marker("emulator") and find_host_compiler() is None:
        pytest.skip("no C++ compiler, which the emulator needs")
    if item.get_closest_marker("compiler") and find_compiler() is None:
        pytest.skip(f"no CUDA compiler; {toolchain.INSTALL_HINT}")
    if item.get_closest_marker("browser") and "browser" not in item.config.getoption("markexpr"):
        pytest.skip("the site in a browser is tested by itself: pytest -m browser")
    if item.get_closest_marker("gpu") and not gpu_present():
        pytest.skip("no GPU that torch sees")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[Any]:
    """Skip what turns out to need a C++ compiler on a machine that has none."""
    try:
        return (yield)
    except NoHostCompiler as missing:
        if HOST_COMPILER is not None:
            raise
        pytest.skip(str(missing))


@pytest.fixture(autouse=True, scope="session")
def unoptimised_cpu_code() -> Iterator[None]:
    """Have LLVM leave what TVM lowered as it is: optimising it took half of the tests' time."""
    compile_module = tvm.compile

    def compile_quickly(mod: tvm.IRModule, target: Any = None, **options: Any) -> tvm.runtime.Executable:
        return compile_module(mod, target=UNOPTIMISED if target == "llvm" else target, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tvm, "compile", compile_quickly)
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run ``ladder ARGUMENTS`` in this process."""

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            code = main(list(arguments))
        except SystemExit as left:  # argparse leaves this way
            code = left.code
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any nvcc."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(toolchain, "wheel_folders", list)


@pytest.fixture
def compiler() -> Compiler:
    """The compiler of this machine."""
    found = find_compiler()
    if found is None:
        pytest.skip(f"no CUDA compiler; {toolchain.INSTALL_HINT}")
    return found


@pytest.fixture
def sass() -> Callable[[Cubin], str]:
    """Disassemble a cubin; skip, with the tool's name, where the tool is missing."""

    def text(cubin: Cubin) -> str:
        try:
            return disassemble(cubin)
        except NoCompiler as missing:
            pytest.skip(str(missing))

    return text
