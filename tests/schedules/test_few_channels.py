"""Convolutions of few channels: copied to vectors where that is sooner, and right whatever follows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.target import Target

from support.functions import check_function
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.schedules.cost import assumed_machine
from tensorir_ladder.schedules.rules import few_channels
from tensorir_ladder.schedules.rules.contraction import Contraction
from tensorir_ladder.schedules.rules.few_channels import with_wide_pixels
from tensorir_ladder.schedules.rules.rule import HOW, NotTaken

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})


@dataclass(frozen=True)
class Stem:
    """A convolution of an image, channels last, with zeros around it, and a bias and a relu behind it."""

    batch: int | str = 2
    size: int = 15
    channels: int = 3
    filters: int = 40
    window: int = 7
    stride: int = 2
    dilation: int = 1
    dtype: str = "float16"
    relu: bool = False

    def function(self) -> tirx.PrimFunc:
        """Write it as frameworks do."""
        batch = tirx.Var(self.batch, "int32") if isinstance(self.batch, str) else self.batch
        reach, edge = self.dilation * (self.window - 1), self.window // 2
        places = (self.size + 2 * edge - reach - 1) // self.stride + 1
        x = te.placeholder((batch, self.size, self.size, self.channels), self.dtype, "x")
        weight = te.placeholder((self.window, self.window, self.channels, self.filters), self.dtype, "weight")
        bias = te.placeholder((self.filters,), self.dtype, "bias")

        def padded(n: tirx.Var, h: tirx.Var, w: tirx.Var, c: tirx.Var) -> tirx.PrimExpr:
            inside = tirx.all(h >= edge, h < edge + self.size, w >= edge, w < edge + self.size)
            return tirx.if_then_else(inside, x[n, h - edge, w - edge, c], tirx.const(0, self.dtype))

        side = self.size + 2 * edge
        image = te.compute((batch, side, side, self.channels), padded, "padded")
        taps = [te.reduce_axis((0, extent)) for extent in (self.window, self.window, self.channels)]

        def summed(n: tirx.Var, h: tirx.Var, w: tirx.Var, o: tirx.Var) -> tirx.PrimExpr:
            row, column, channel = taps
            down, across = h * self.stride + row * self.dilation, w * self.stride + column * self.dilation
            return te.sum(image[n, down, across, channel] * weight[row, column, channel, o], axis=taps)

        made = te.compute((batch, places, places, self.filters), summed, "conv")
        if not self.relu:
            return te.create_prim_func([x, weight, made])
        zero = tirx.const(0, self.dtype)
        after = te.compute(made.shape, lambda *at: te.max(made(*at) + bias[at[-1]], zero), "relu")
        return te.create_prim_func([x, weight, bias, after])


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images, too, which would be multiplied as they are."""
    monkeypatch.setattr(few_channels, "ELEMENTS_PER_CYCLE", 1e-6)


def test_a_large_image_is_copied_by_vectors_and_a_small_one_is_not() -> None:
    large, small = Stem(32, 224, filters=64), Stem(1, 32, filters=64)
    said = [str(Contraction().take(each.function(), TARGET).attrs[HOW]) for each in (large, small)]
    assert "wgmma" in said[0]
    assert ["image copied" in each for each in said] == [True, False]


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(("channels", "piece"), [(3, "ca_8"), (6, "cg_16")])
def test_windows_are_brought_by_asynchronous_copies(channels: int, piece: str) -> None:
    made = Contraction().take(Stem(8, 30, channels).function(), TARGET)
    *_, text = generate(tvm.IRModule({"main": made}), TARGET, "s_tir").cuda.split("__global__")
    assert f"cp_async_legacy_{piece}" in text.replace("pred_", "")
    assert "condval" not in text


OTHERS = {
    "whole vectors": Stem(channels=4),
    "many channels": Stem(channels=9),
    "one channel": Stem(channels=1),
    "dilated": Stem(dilation=2, window=3, stride=1),
    "gaps between windows": Stem(window=1),
    "float32": Stem(dtype="float32"),
}


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("case", OTHERS)
def test_other_convolutions_are_multiplied_as_they_are(case: str) -> None:
    with pytest.raises(NotTaken, match="few channels"):
        with_wide_pixels(OTHERS[case].function(), assumed_machine(TARGET), TARGET)


CASES = {
    "7x7, stride 2": Stem(),
    "3x3, bfloat16, relu": Stem(window=3, stride=1, channels=2, filters=24, dtype="bfloat16", relu=True),
    "5 channels": Stem(channels=5, window=5, relu=True),
    "one image": Stem(1, 21, window=3, stride=3, filters=64),
    "any batch": Stem("batch", window=3, relu=True),
}


@pytest.mark.emulator
@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("case", CASES)
def test_copied_images_give_the_same(case: str) -> None:
    written = CASES[case].function()
    made = Contraction().take(written, TARGET)
    assert "image copied" in str(made.attrs[HOW])
    for batch in (1, 3) if CASES[case].batch == "batch" else (0,):
        check_function(written, made, TARGET, {"batch": batch} if batch else None)


@pytest.mark.emulator
@pytest.mark.usefixtures("_always")
def test_what_is_beside_a_window_does_not_reach_its_result() -> None:
    """An infinite pixel would, times a weight of zero that no window has."""
    stem = Stem(1, 9, window=3, stride=1, filters=16)
    image = np.ones((1, 9, 9, 3))
    image[0, 4, 4] = np.inf
    made = Contraction().take(stem.function(), TARGET)
    assert "image copied" in str(made.attrs[HOW])
    check_function(stem.function(), made, TARGET, arrays={"x": image, "weight": np.ones((3, 3, 3, 16))})
