"""Sliding windows of fused attention in the emulator: the steps a tile takes, its edges, masks beside them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from support.attention_runs import Form, check, compute, drawn, lowered, right_and_bound
from tensorir_ladder.kernels.attention import BY_HEAD, TILE, Attention, AttentionTile
from tensorir_ladder.kernels.attention_mask import Mask
from tensorir_ladder.schedules.errors import IllegalWorkload

SMALL = Attention(1, 300, 300, 2, 1, 64, "float16", 64**-0.5, causal=True, window=24)
SHORT = AttentionTile(64, 64)
slow = pytest.mark.emulator


def any_rows(window: int, tile: AttentionTile = SHORT, stages: int = 2, **changed: object) -> Form:
    """A kernel for any number of tokens, made for others than those it is given."""
    return Form(replace(SMALL, window=window, queries=1, keys=1, **changed), tile, stages, any_rows=True)


def test_other_windows_are_named() -> None:
    with pytest.raises(IllegalWorkload, match=r"window.*not causal"):
        replace(SMALL, causal=False)
    with pytest.raises(IllegalWorkload, match=r"window.*0"):
        replace(SMALL, window=0)


@slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("window", [1, 24, 65, 299, 5000])
@pytest.mark.parametrize("tile", [SHORT, TILE, AttentionTile(64, 16), AttentionTile(192, 48)], ids=str)
def test_windows_of_every_size_are_right(tile: AttentionTile, window: int) -> None:
    check(Form(replace(SMALL, window=window), tile), seed=window)


@slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("window", [1, 30, 100])
def test_queries_and_keys_may_be_of_different_numbers(window: int, from_end: bool) -> None:
    """With more queries than keys some see no key: the last ones, or from the end the first ones."""
    form = any_rows(window, from_end=from_end)
    for seed, (queries, keys) in enumerate([(1, 1), (1, 300), (70, 200), (200, 70), (300, 1), (130, 129)]):
        check(form, replace(form.problem, batch=1 + seed % 2, queries=queries, keys=keys), seed)


@slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_heads_share_keys_in_a_window(dtype: str) -> None:
    problem = replace(SMALL, batch=2, heads=6, kv_heads=2, queries=150, keys=150, dtype=dtype, k_layout=BY_HEAD)
    check(Form(problem, SHORT, 3))


@slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bool", "float16"])
@pytest.mark.parametrize("along", [("batch",), ("batch", "queries")], ids="-".join)
def test_a_window_takes_a_mask(along: tuple[str, ...], dtype: str) -> None:
    """Queries whose window is all padding give zeros."""
    problem = replace(SMALL, batch=2, queries=150, keys=150, mask=Mask(dtype, along))
    given = drawn(problem, 5)
    given["M"][0, ..., :70] = False if dtype == "bool" else -np.inf
    check(Form(problem, SHORT), given=given)
    assert (compute(Form(problem, SHORT), given)[0, :, :70] == 0).all()


@slow
def test_steps_below_the_window_are_not_read() -> None:
    """Not even values that are no numbers spoil a result."""
    form = any_rows(40)
    problem = replace(form.problem, queries=300, keys=300)
    given = drawn(problem, 0)
    right, bound = right_and_bound(problem, given)
    for name in "KV":
        given[name][:, :64] = np.nan
    rows = slice(128, None)
    off = abs(compute(form, given, problem) - right)[:, :, rows]
    assert (off <= bound[:, :, rows]).all()


@slow
def test_large_scores_below_the_window_count_for_nothing() -> None:
    given = drawn(SMALL, 0)
    given["Q"][..., 0] = 1
    given["K"][..., 0] = np.linspace(3e4, -3e4, 300).astype(np.float16)[None, :, None]
    check(Form(SMALL, SHORT), given=given)


# Broken on purpose: what, replaced by what

BROKEN = {
    "tiles begin a step late": (r"- 227\)", "- 163)"),
    "no key of the first step left out": (r"if \(.*\* 32\) (?!.*step).*\{", "if (0) {"),
    "no key of a later step left out": (r"if \(.*\* 32\) .*step.*\{", "if (0) {"),
    "a key too few left out": (r"(mine_scores_ptr\[5\] = .*) <= 364\)", r"\1 <= 365)"),
    "a key too many left out": (r"(mine_scores_ptr\[5\] = .*) <= 364\)", r"\1 <= 363)"),
}


@slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str) -> None:
    form = any_rows(100, AttentionTile(128, 64))
    text = lowered(form).cuda
    start = text.rindex('extern "C" __global__')
    kernel, changes = re.subn(*BROKEN[name], text[start:])
    assert changes
    with pytest.raises(AssertionError, match="results are wrong"):
        check(form, replace(form.problem, queries=390, keys=390), text=text[:start] + kernel)
