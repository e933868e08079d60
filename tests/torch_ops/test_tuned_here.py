"""Products take what this user tuned, on the same GPU, by the same TVM, for the same kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import tvm

from support.cases import hopper
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import tuned_here as module
from tensorir_ladder.torch_ops.choice import choose
from tensorir_ladder.torch_ops.problem import Conditions, KernelChoice
from tensorir_ladder.torch_ops.step_kernels import KERNELS
from tensorir_ladder.torch_ops.tuned_here import FILE, FOLDER, Found, keep, kernel_digest, tuned_here

PROBLEM = Matmul(512, 768, 1024, "float16")
H200 = hopper(name="NVIDIA H200")
WON = KernelChoice(KERNELS[12], RoleTile.parse("64x128x64/1x1"), 8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that the variable names."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for cached in (module.tuned_here, module._lines):
        cached.cache_clear()
    yield tmp_path
    for cached in (module.tuned_here, module._lines):
        cached.cache_clear()


def found(choice: KernelChoice = WON, **change: object) -> Found:
    """What tuning wrote of a choice."""
    fields = {"m": 512, "n": 768, "k": 1024, "dtype": "float16", "layout": "nn", "tile": str(choice.tile)}
    fields |= {"stages": choice.stages, "step": choice.kernel.step, "gpu": "NVIDIA H200", "tvm": tvm.__version__}
    fields |= {"kernel": kernel_digest(choice, PROBLEM, H200.multiprocessors), "ratio_to_cublas": 1.05}
    return msgspec.convert(fields | change, Found)


def test_what_was_tuned_is_taken_for_its_product_alone(folder: Path) -> None:
    usual = choose(PROBLEM, H200, Conditions(batch=2))
    keep(folder, found())
    assert choose(PROBLEM, H200) == WON
    assert choose(Matmul(512, 768, 1024, "bfloat16"), H200) != WON
    assert choose(PROBLEM, H200, Conditions(batch=2)) == usual


def test_of_several_steps_the_fastest_beside_cublas_is_taken_and_of_one_the_newest(folder: Path) -> None:
    slower = KernelChoice(KERNELS[13], RoleTile.parse("128x256x64/2x1"), 4)
    keep(folder, found(slower, ratio_to_cublas=1.2))
    keep(folder, found())
    keep(folder, found(slower, ratio_to_cublas=1.01))
    keep(folder, found())
    assert choose(PROBLEM, H200) == WON
    assert (folder / FILE).read_text().count("\n") == 3


@pytest.mark.parametrize("change", [{"tvm": "0.1"}, {"kernel": "0" * 16}])
def test_what_does_not_hold_any_more_is_not_used_and_that_is_said(
    change: dict[str, str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(folder, found(**change))
    assert tuned_here(PROBLEM, "NVIDIA H200", H200.multiprocessors) is None
    assert "not used" in caplog.text


def test_what_another_gpu_measured_is_not_used(folder: Path) -> None:
    keep(folder, found(gpu="NVIDIA H100 80GB HBM3"))
    assert tuned_here(PROBLEM, "NVIDIA H200", H200.multiprocessors) is None


@pytest.mark.parametrize("line", ["[", "{}", '{"m": 1e400}', "[" * 5000])
def test_a_line_that_is_none_is_left_out(line: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / FILE).write_text(line)
    keep(folder, found())
    assert choose(PROBLEM, H200) == WON
    assert f"{FILE}:1 is left out" in caplog.text


def test_a_folder_without_the_file_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert tuned_here(PROBLEM, "NVIDIA H200", H200.multiprocessors) is None
    assert caplog.text.count("cannot read") == 1
