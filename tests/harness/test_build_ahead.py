"""``ladder build``: kernels of a file of shapes, built before they are called for, and found by the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.cases import Outcome
from support.torch_stand_in import Library, Tensor, torch_stand_in
from tensorir_ladder.harness.batches import Batch, stored_shapes
from tensorir_ladder.harness.commands import build
from tensorir_ladder.harness.commands.build import ToBuild, read_shapes
from tensorir_ladder.harness.commands.options import UsageError
from tensorir_ladder.harness.workers import Lost
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import call, kept, prepared
from tensorir_ladder.torch_ops.driver import Driver

Command = Callable[..., Outcome]


@pytest.fixture
def shapes(tmp_path: Path) -> Callable[[str], Path]:
    """Write a file of shapes."""

    def write(text: str) -> Path:
        path = tmp_path / "shapes.txt"
        path.write_text(text)
        return path

    return write


def test_a_file_names_products_each_once(shapes: Callable[[str], Path]) -> None:
    path = shapes("# mine\n\n64x96x128\n8x8x8 nt # small\n8x8x8 bfloat16 nt\n64x96x128 nn float16\n")
    assert read_shapes(path) == [
        Matmul(64, 96, 128, "float16"),
        Matmul(8, 8, 8, "float16", "nt"),
        Matmul(8, 8, 8, "bfloat16", "nt"),
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("64x64", "'64x64' is not MxNxK"),
        ("64x64x-64", "is not MxNxK"),
        ("64x64x64 tn", "'64x64x64 tn' is not"),
        ("64x64x64 nn nt", "is not MxNxK"),
        ("64x64x64 float64", "is not MxNxK"),
        ("64x64x64 float16 bfloat16", "is not MxNxK"),
        ("0x64x64", "illegal size m .got 0"),
        (f"64x{'9' * 30}x64", "30 digits"),
        ("\x00\xff", "is not MxNxK"),
    ],
)
def test_a_line_that_names_none_is_refused_by_its_number(line: str, named: str, shapes: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=f"shapes.txt:2.*{named}"):
        read_shapes(shapes(f"8x8x8\n{line}\n"))


def test_a_file_without_products_is_refused(shapes: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="names no product"):
        read_shapes(shapes("# none\n"))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[ToBuild]:
    """Build in this process, with nothing to compile; kernels that were "built" are kept."""
    done: list[ToBuild] = []

    def each(work: Any, items: list[ToBuild], _jobs: int, _limit_s: float) -> Iterator[tuple[ToBuild, Any]]:
        for item in items:
            if item.problem.m == 13:
                yield item, Lost("the compiler refused it", str(item))
                continue
            done.append(item)
            yield item, None

    monkeypatch.setattr(build, "each_in_a_process", each)
    monkeypatch.setattr(ToBuild, "is_kept", lambda one, _compiler: one in done)
    monkeypatch.setattr(toolchain, "require_compiler", lambda: SimpleNamespace(version="13.0"))
    return done


def test_what_is_kept_is_not_built_again(built: list[ToBuild], shapes: Callable[[str], Path], command: Command) -> None:
    first = command("build", "--shapes", str(shapes("8x8x8\n16x8x8\n")))
    assert (first.code, len(built)) == (0, 2)
    assert command("build", "--shapes", str(shapes("8x8x8\n16x8x8\n24x8x8 nt\n"))).code == 0
    assert [one.problem.m for one in built] == [8, 16, 24]
    assert {one.gpu for one in built} == {"NVIDIA H200"}


def test_a_kernel_that_is_not_built_is_named(
    built: list[ToBuild], shapes: Callable[[str], Path], command: Command
) -> None:
    outcome = command("build", "--shapes", str(shapes("8x8x8\n13x8x8 nt bfloat16\n24x8x8\n")))
    assert outcome.code == 2
    assert "13x8x8 nt bfloat16: the compiler refused it" in outcome.err
    assert [one.problem.m for one in built] == [8]


def test_what_would_not_be_found_again_is_not_begun(
    built: list[ToBuild], shapes: Callable[[str], Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    outcome = command("build", "--shapes", str(shapes("8x8x8\n")))
    assert (outcome.code, built) == (2, [])
    assert "build cache" in outcome.err


@pytest.mark.parametrize("name", ["NVIDIA Unheard Of"])
def test_a_gpu_that_nobody_measured_is_refused(name: str, shapes: Callable[[str], Path], command: Command) -> None:
    outcome = command("build", "--shapes", str(shapes("8x8x8\n")), "--gpu", name)
    assert outcome.code == 2
    assert name in outcome.err


def test_an_architecture_elsewhere_is_built_for(
    built: list[ToBuild], shapes: Callable[[str], Path], command: Command
) -> None:
    path = str(shapes("8x8x8\n8x8x8 float32\n"))
    outcome = command("build", "--shapes", path, "--arch", "sm_86")
    assert outcome.code == 0
    assert "RTX 3090 (sm_86, on which nothing was measured)" in " ".join(outcome.out.split())
    assert {(one.gpu, one.multiprocessors, one.arch) for one in built} == {("NVIDIA GeForce RTX 3090", 82, "sm_86")}
    refused = command("build", "--shapes", path, "--arch", "sm_75")
    assert refused.code == 2
    assert "the call has kernels for sm_80, " in refused.err


def transposed(tensor: Tensor) -> Tensor:
    """See a matrix the other way round."""
    return tensor.T


def recipe(*made_for: Any) -> str:
    """By what the call's kernel is kept: of a choice, a problem, a setting and a compiler."""
    *what, compiler = made_for
    return kept.KERNELS.recipe(kept._made_for(*what), compiler)


@pytest.mark.parametrize(
    ("problem", "b", "copies"),
    [
        (Matmul(1721, 491, 111, "float16"), Tensor.empty((111, 491), "float16"), False),
        (Matmul(40, 95, 319, "float16"), Tensor.empty((319, 95), "float16"), True),
        (Matmul(40, 96, 64, "float16", "nt"), transposed(Tensor.empty((96, 64), "float16")), False),
        (Matmul(1, 4096, 520, "bfloat16"), Tensor.empty((520, 4096), "bfloat16"), False),
        (Batch(300, 500, 700, "float16", batch=16), Tensor.empty((16, 700, 500), "float16"), True),
        (Batch(197, 96, 319, "float16", batch=64), Tensor.empty((64, 319, 96), "float16"), False),
    ],
)
def test_the_call_asks_for_the_kernel_that_is_built_ahead(
    problem: Matmul, b: Tensor, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same recipe, on the GPU that its driver describes."""
    monkeypatch.setitem(sys.modules, "torch", torch_stand_in())
    found, asked = Driver(Library()), []
    monkeypatch.setattr(prepared, "cuda_driver", lambda: found)
    monkeypatch.setattr(prepared, "require_compiler", lambda: SimpleNamespace(version="13.0"))

    def note(*made_for: Any) -> None:
        asked.append(recipe(*made_for))
        raise LookupError

    monkeypatch.setattr(prepared, "build_kernel", note)
    for cache in (prepared.prepared, prepared._loaded, prepared.gpu_machine):
        cache.cache_clear()
    with pytest.raises(LookupError):
        call.matmul(Tensor.empty(stored_shapes(problem)[0], problem.dtype), b)
    prepared.gpu_machine.cache_clear()
    ahead = ToBuild(problem, "NVIDIA H200", 132).made_for
    assert asked == [recipe(*ahead, SimpleNamespace(version="13.0"))]
    others = [str(choice) for choice, *_ in ToBuild(problem, "NVIDIA H200", 132).kernels[1:]]
    assert others == ["rows copied"] * copies


@pytest.mark.compiler
@pytest.mark.emulator
def test_kernels_are_built_and_found_again(
    shapes: Callable[[str], Path], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = shapes("64x64x64\n64x64x128 nt\n40x63x320\n")
    assert command("build", "--shapes", str(path), "--jobs", "2").code == 0
    files = list((tmp_path / "tensorir-ladder" / "kernels").iterdir())
    assert len(files) == 4  # one copies rows

    def lost(_work: Any, items: list[ToBuild], *_: Any) -> Iterator[tuple[ToBuild, Lost]]:
        yield from ((item, Lost("", "")) for item in items)

    monkeypatch.setattr(build, "each_in_a_process", lost)
    assert command("build", "--shapes", str(path)).code == 0
    files[0].write_bytes(b"")
    assert command("build", "--shapes", str(path)).code == 2
