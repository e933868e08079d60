"""Convolutions of few channels: copied to vectors where that is sooner, and right whatever follows them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.target import Target

from support.functions import check_function
from support.stems import Stem
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.relax.rules import few_channels
from tensorir_ladder.relax.rules.contraction import Contraction
from tensorir_ladder.relax.rules.few_channels import with_wide_pixels
from tensorir_ladder.relax.rules.rule import HOW, NotTaken
from tensorir_ladder.schedules.cost import assumed_machine

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images, too, which would be multiplied as they are."""
    monkeypatch.setattr(few_channels, "ELEMENTS_PER_CYCLE", 1e-6)


def test_a_large_image_is_copied_by_vectors_and_a_small_one_is_not() -> None:
    large, small = Stem(32, 224, filters=64), Stem(1, 32, filters=64)
    made = [Contraction().take(each.function().with_attr("global_symbol", "stem"), TARGET) for each in (large, small)]
    said = [str(each.attrs[HOW]) for each in made]
    assert "wgmma" in said[0]
    assert ["image copied" in each for each in said] == [True, False]
    assert [str(each.attrs["global_symbol"]) for each in made] == ["stem", "stem"]


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


@pytest.mark.sampled(3)
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
