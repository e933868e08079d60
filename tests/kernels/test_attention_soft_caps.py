"""Soft caps of fused attention in the emulator: beside masks, of large scores, in every form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.attention_runs import Form, check, drawn, lowered
from tensorir_ladder.kernels.attention import FORMS, Attention, AttentionTile
from tensorir_ladder.kernels.attention_mask import Mask
from tensorir_ladder.schedules.errors import IllegalWorkload

SMALL = Attention(1, 150, 150, 2, 1, 64, "float16", 64**-0.5, causal=True, soft_cap=50.0)
SHORT = AttentionTile(64, 64)
slow = pytest.mark.emulator


@pytest.mark.parametrize("cap", [0.0, -50.0, 1e-4, 1e7, float("nan")])
def test_other_caps_are_named(cap: float) -> None:
    with pytest.raises(IllegalWorkload, match="soft cap"):
        replace(SMALL, soft_cap=cap)


@slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cap", [0.5, 50.0, 1e6])
def test_small_and_large_scores_are_capped(cap: float, dtype: str) -> None:
    """From far below the cap to where every tanh is 1 or -1."""
    form = Form(replace(SMALL, soft_cap=cap, dtype=dtype), SHORT, any_rows=True)
    for seed, spread in enumerate([0.1, 1.0, 8.0, 100.0]):
        check(form, form.problem, seed, drawn(form.problem, seed, spread))


@slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("mask", [Mask("bool", ("batch",)), Mask("float16"), Mask("float32", ("heads", "queries"))])
@pytest.mark.parametrize("window", [None, 20])
def test_capped_scores_are_masked(mask: Mask, window: int | None) -> None:
    """What a mask adds or hides is not capped."""
    problem = replace(SMALL, batch=2, keys=170, mask=mask, window=window, soft_cap=4.0)
    check(Form(problem, SHORT), given=drawn(problem, 2, 2.0))


@slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("head", FORMS)
def test_heads_of_other_sizes_are_right_with_a_window_and_a_cap(head: int) -> None:
    form = FORMS[head][0]
    check(Form(replace(SMALL, head=head, window=100), form.tile, form.stages))


# Broken on purpose: what, replaced by what

BROKEN = {
    "scores left uncapped": ("tanh_approx((mine_scores_ptr[5]", "((mine_scores_ptr[5]"),
    "other scores capped": ("tanh_approx((mine_scores_ptr[5]", "tanh_approx((mine_scores_ptr[4]"),
}


@slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str) -> None:
    form = Form(replace(SMALL, soft_cap=2.0), SHORT, any_rows=True)
    text = lowered(form).cuda
    assert text.count(BROKEN[name][0]) == 2
    with pytest.raises(AssertionError, match="results are wrong"):
        check(form, given=drawn(form.problem, 0, 2.0), text=text.replace(*BROKEN[name]))
