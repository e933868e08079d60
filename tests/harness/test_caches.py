"""The build caches: what is damaged is built again, what is another's is not used, and none is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorir_ladder.emulator import compiler
from tensorir_ladder.kernels.codegen import build_cache, toolchain
from tensorir_ladder.kernels.codegen.build_cache import BuildCache, cache_folder
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin

CACHE, CONTENT = BuildCache("tests"), b"what a compiler makes"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in the place of the user's, and a process that has said nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build_cache, "_OWN", [])
    build_cache._say.cache_clear()
    build_cache._sweep.cache_clear()
    return tmp_path / "tensorir-ladder" / "tests"


class Builder:
    """Makes the content, and counts how often."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content, self.times = content, 0

    def __call__(self) -> bytes:
        self.times += 1
        return self.content


@pytest.fixture
def builder() -> Builder:
    return Builder()


def get(builder: Builder, recipe: str = "a recipe") -> Path:
    """Ask for the content; it is right whatever happened."""
    kept = CACHE.get(recipe, ".so", builder)
    assert kept.content == CONTENT
    assert kept.path.read_bytes().startswith(CONTENT)
    return kept.path


def test_a_recipe_is_built_once(cache: Path, builder: Builder) -> None:
    assert get(builder) == get(builder)
    assert builder.times == 1
    get(builder, "another")
    assert builder.times == 2
    assert len(list(cache.iterdir())) == 2, "nothing but the builds"
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (cache, cache.parent))


def replaced_by_a_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    os.replace(path, target)
    path.symlink_to(target)


def renamed_from_another(path: Path) -> None:
    other = CACHE.get("another recipe", ".so", lambda: b"other code")
    os.replace(other.path, path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, 100 % path.stat().st_size),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(b"X" + path.read_bytes()[1:]),
        lambda path: path.write_bytes(path.read_bytes() + b"X"),
        lambda path: path.unlink(),
        replaced_by_a_link,
        renamed_from_another,
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["cut by a byte", "cut short", "empty", "altered", "longer", "gone", "a link", "another recipe's", "a pipe"],
)
def test_what_is_not_as_it_was_written_is_built_again(damage: Callable[[Path], object], builder: Builder) -> None:
    path = get(builder)
    damage(path)
    assert get(builder) == path
    assert builder.times == 2
    get(builder)
    assert builder.times == 2, "and is whole from then on"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("which", ["part", "whole"])
def test_a_folder_that_others_can_write_is_not_used(
    mode: int, which: str, cache: Path, builder: Builder, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = get(builder)
    (cache if which == "part" else cache.parent).chmod(mode)
    for _ in range(3):
        assert get(builder).parent not in (planted.parent, cache)
    assert builder.times == 2, "this process keeps its own"
    (line,) = capsys.readouterr().err.splitlines()
    assert str(cache.parent) in line
    assert "chmod go-w" in line


def test_a_folder_of_another_user_is_not_used(
    cache: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    get(builder)
    monkeypatch.setattr(build_cache.os, "geteuid", lambda: os.getuid() + 1)
    assert cache not in get(builder).parents
    (line,) = capsys.readouterr().err.splitlines()
    assert "another user" in line


def no_room(*_arguments: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("place", ["a file", "full", "gone"])
def test_a_cache_that_cannot_be_written_is_done_without(
    place: str,
    cache: Path,
    builder: Builder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if place == "a file":
        cache.parent.touch()
    elif place == "gone":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    else:
        write, sync = build_cache._write, os.fsync

        def write_or_not(path: Path, content: bytes) -> Path:
            with monkeypatch.context() as patch:
                patch.setattr(build_cache.os, "fsync", no_room if path.parent == cache else sync)
                return write(path, content)

        monkeypatch.setattr(build_cache, "_write", write_or_not)
    for _ in range(3):
        get(builder)
    assert builder.times == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: build cache ")
    assert not (cache.is_dir() and list(cache.iterdir())), "nothing half-written stays"


def test_a_user_without_a_home_does_without(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setattr(Path, "home", homeless)
    get(builder)
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_folder() == Path.home() / ".cache" / "tensorir-ladder"


def test_many_that_build_the_same_at_once_leave_one_whole_file(cache: Path) -> None:
    def build(number: int) -> bytes:
        def made() -> bytes:
            time.sleep(0.01)
            return bytes([number]) * 100_000

        return CACHE.get("contended", ".so", made).content

    with ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(build, range(32)))
    assert all(len(set(content)) == 1 and len(content) == 100_000 for content in contents)
    (path,) = cache.iterdir()
    assert CACHE.get("contended", ".so", lambda: pytest.fail("built again")).path == path


def test_a_cache_that_is_too_large_loses_what_is_longest_unused(
    cache: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [get(builder, f"recipe {number}") for number in range(4)]
    left = cache / "left-by-a-killed-process.tmp"
    left.touch()
    for age, path in enumerate([*paths[:3], left]):
        os.utime(path, (0, time.time() - (10 - age) * build_cache.UNUSED_S))
    monkeypatch.setattr(build_cache, "MOST_BYTES", sum(path.stat().st_size for path in paths[:2]))
    build_cache._sweep.cache_clear()
    get(builder, "one more")
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert not left.exists()


def test_a_damaged_cubin_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def nvcc(_compiler: Compiler, _source: str, folder: Path, output: str, *_flags: str) -> str:
        runs.append(output)
        (folder / output).write_bytes(b"\x7fELF\n of \n lines")
        return "Used 8 registers"

    monkeypatch.setattr(toolchain, "run_nvcc", nvcc)
    nobody = Compiler(Path("/bin/true"), "toolkit")
    vars(nobody)["version"] = "0"
    first = compile_cubin("text", "sm_80", nobody)
    assert (first.data, first.registers) == (b"\x7fELF\n of \n lines", 8)
    (path,) = (tmp_path / "tensorir-ladder" / "cubins").iterdir()
    os.truncate(path, path.stat().st_size // 2)
    assert [compile_cubin("text", "sm_80", nobody) for _ in range(2)] == [first, first]
    assert len(runs) == 2


def test_a_damaged_library_is_linked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_one(command: list[str]) -> None:
        made.append(Path(command[-1]).name)
        Path(command[-1]).write_bytes(b"\x7fELF")

    monkeypatch.setattr(compiler, "_compile", compile_one)
    monkeypatch.setattr(compiler, "_version", lambda _compiler: "0")
    monkeypatch.setattr(compiler, "require_host_compiler", lambda: "g++")
    library = compiler.kernel_library("text", True)
    for kinds in (["kernel.so"], ["runtime.so"], ["kernel.h.gch", "kernel.so"]):
        made.clear()
        damaged = [path for kind in kinds for path in tmp_path.rglob(f"*.{kind}")]
        for path in damaged:
            os.truncate(path, 3)
        assert compiler.kernel_library("text", True) == library
        assert made == [f"built.{kind}" for kind in kinds]
        assert all(path.read_bytes().startswith(b"\x7fELF") for path in damaged)


@pytest.mark.emulator
def test_a_library_that_was_cut_short_ends_no_run(tmp_path: Path) -> None:
    # In processes of their own: none may have the file that is cut short in its memory.
    code = "import sys; from tensorir_ladder.harness.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "verify", "--step", "1", "--size", "16", "--on", "emulator"]
    sizes = []
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        sizes.append({path: path.stat().st_size for path in tmp_path.rglob("*.kernel.so")})
        for path, size in sizes[0].items():
            os.truncate(path, size // 3)
    assert sizes[0]
    assert all(sizes[1][path] > size // 2 for path, size in sizes[0].items()), "built again"


@pytest.mark.skipif(shutil.which("sh") is None, reason="no sh to make a compiler of")
def test_a_host_compiler_that_does_not_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., object]
) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    outcome = command("verify", "--step", "1", "--size", "16", "--on", "emulator")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert str(tmp_path / "g++") in line
