"""Convolutions of few channels by overlapping rows of wgmma's operands: right at every edge, and refused otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.relax.frontend import nn
from tvm.target import Target

from support.functions import check_function
from support.stems import Stem
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.kernels.windows import Pixel, Windows, convolve_windows
from tensorir_ladder.relax.kernel_products import TmaContraction
from tensorir_ladder.relax.rules import Contraction, NotTaken, narrowed
from tensorir_ladder.relax.rules.rule import HOW
from tensorir_ladder.relax.windows import launched_by_windows
from tensorir_ladder.schedules.errors import IllegalWorkload

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})


def test_windows_are_taken_by_their_kernel_and_others_by_a_copied_image() -> None:
    taken, other = (Stem(32, 224, filters=64, stride=stride).function() for stride in (2, 1))
    assert "windows of 7x7" in str(TmaContraction().take(taken, TARGET).attrs[HOW])
    assert "image copied" in str(TmaContraction().take(other, TARGET).attrs[HOW])
    assert "image copied" in str(Contraction().take(taken, TARGET).attrs[HOW])


OTHERS = {
    "stride": Stem(stride=1, window=3),
    "epilogue": Stem(relu=True),
    "batch": Stem("batch"),
    "5 channels": Stem(channels=5),
    "5 columns": Stem(window=5),
    "20 filters": Stem(filters=20),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_convolutions_are_left(case: str) -> None:
    with pytest.raises(NotTaken):
        launched_by_windows(narrowed(OTHERS[case].function()), TARGET)


def test_what_does_not_fit_is_named() -> None:
    windows = Windows(1, 8, 8, 16, (7, 5), 3)
    with pytest.raises(IllegalWorkload, match="5 columns"):
        convolve_windows(windows, (1, 16, 16, 3), lambda *at: Pixel(at, None))
    assert replace(windows, taps=(7, 7)).misfit() == ""


CASES = {
    "7x7": Stem(2, 15),
    "two tiles, one image": Stem(1, 139, filters=16),
    "3x3, 2 channels": Stem(3, 21, 2, 64, window=3),
    "no zeros around, 5 rows": Stem(1, 15, window=7, filters=24, edge=0),
    "4x4, bfloat16": Stem(1, 22, 3, 8, window=4, dtype="bfloat16"),
}


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_convolution(case: str) -> None:
    written = CASES[case].function()
    made = TmaContraction().take(written, TARGET)
    assert "windows of" in str(made.attrs[HOW])
    check_function(written, made, TARGET)


@pytest.mark.emulator
def test_what_is_beside_a_window_does_not_reach_its_result() -> None:
    stem = Stem(1, 19, filters=16).function()
    image = np.ones((1, 19, 19, 3))
    image[0, 8, 8] = np.inf
    made = TmaContraction().take(stem, TARGET)
    check_function(stem, made, TARGET, arrays={"x": image, "weight": np.ones((7, 7, 3, 16))})


class Layer(nn.Module):
    """A convolution with a stride of 2, channels last."""

    def __init__(self) -> None:
        self.weight = nn.Parameter((7, 7, 3, 64), dtype="float16")

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Convolve."""
        made = tvm.relax.op.nn.conv2d(x._expr, self.weight._expr, 2, 3, data_layout="NHWC", kernel_layout="HWIO")
        return nn.op.wrap_nested(made, "conv")


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [False, True])
def test_convolutions_of_few_channels_are_right_on_the_gpu(windows: bool) -> None:
    """By a copied image, and by windows."""
    import torch

    mod = Layer().export_tvm(spec={"forward": {"x": nn.spec.Tensor([5, 224, 224, 3], "float16")}})[0]
    made = tvm.relax.get_pipeline("tensorir_ladder", target=TARGET, kernels=windows)(mod)
    said = " ".join(str(f.attrs[HOW]) for f in made.functions.values() if f.attrs and HOW in f.attrs)
    assert ("windows of 7x7" if windows else "image copied") in said
    run = tvm.relax.VirtualMachine(tvm.compile(made, TARGET), tvm.cuda())["forward"]
    random = torch.Generator("cuda").manual_seed(7)
    shapes = (5, 224, 224, 3), (7, 7, 3, 64)
    x, weight = (torch.randint(-1, 2, shape, generator=random, device="cuda").half() for shape in shapes)
    want = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2).float(), weight.permute(3, 2, 0, 1).float(), None, 2, 3)
    for _ in range(2):
        assert torch.equal(torch.from_dlpack(run(x, weight)), want.permute(0, 2, 3, 1).half())


@pytest.mark.compiler
def test_registers_are_enough(compiler: Compiler) -> None:
    kernel = convolve_windows(Windows(1, 112, 112, 128, (7, 7), 3), (1, 224, 224, 3), lambda *at: Pixel(at, None))
    text = generate(tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")}), TARGET, "tirx").cuda
    assert compile_cubin(text, "sm_90a", compiler).spill_bytes == 0
