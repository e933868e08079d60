"""Fused attention attacked: odd shapes in poisoned memory, hostile numbers, all orders, kernels broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from support.attention_runs import Form, check, compute, drawn, layouts_of, right_and_bound
from tensorir_ladder.kernels.attention import BY_HEAD, BY_TOKEN, TILE, Attention, AttentionTile

pytestmark = pytest.mark.emulator

SMALL = Attention(1, 300, 300, 2, 1, 64, "float16", 64**-0.5)
SEEDS = range(6)  # each completion twice: early, late, drawn
SHORT = AttentionTile(64, 64)


def any_rows(tile: AttentionTile = TILE, stages: int = 2, **changed: object) -> Form:
    """A kernel for any number of tokens, made for others than those it is given."""
    return Form(replace(SMALL, **changed), tile, stages, any_rows=True)


# Shapes

TOKENS = [(1, 1), (1, 16), (1, 300), (5, 129), (63, 65), (64, 64), (65, 63), (128, 128), (129, 5), (257, 127), (300, 1)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [AttentionTile(), SHORT, AttentionTile(192, 48)], ids=str)
def test_a_kernel_for_any_tokens_is_right_for_all(tile: AttentionTile, causal: bool) -> None:
    form = any_rows(tile, causal=causal)
    for seed, (queries, keys) in enumerate(TOKENS):
        check(form, replace(form.problem, batch=1 + seed % 2, queries=queries, keys=keys), seed)


def test_more_tokens_than_a_kernel_was_made_for_are_right() -> None:
    form = Form(replace(SMALL, queries=1, keys=1, causal=True), SHORT, any_rows=True)
    for seed, (batch, queries, keys) in enumerate([(3, 150, 200), (1, 200, 130), (2, 1, 257)]):
        check(form, replace(form.problem, batch=batch, queries=queries, keys=keys), seed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (70, 1), (130, 190), (190, 130)])
def test_a_kernel_for_its_own_tokens_is_right(queries: int, keys: int, causal: bool) -> None:
    check(Form(replace(SMALL, queries=queries, keys=keys, causal=causal), SHORT, 3), seed=queries)


@pytest.mark.parametrize(
    ("tile", "head", "stages"),
    [
        (AttentionTile(64, 16), 64, 2),
        (AttentionTile(64, 176), 128, 2),
        (AttentionTile(128, 128), 128, 2),
        (AttentionTile(128, 80), 128, 3),
        (AttentionTile(192, 64), 128, 4),
        (AttentionTile(64, 32), 64, 8),
    ],
    ids=str,
)
def test_every_kind_of_tile_is_right_in_all_orders(tile: AttentionTile, head: int, stages: int) -> None:
    form = any_rows(tile, stages, head=head, causal=True)
    for seed in SEEDS:
        check(form, replace(form.problem, queries=150 + seed, keys=290 - 20 * seed), seed)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("layout", [BY_TOKEN, BY_HEAD])
def test_heads_share_their_own_keys(heads: int, kv_heads: int, layout: str) -> None:
    names = ("q_layout", "k_layout", "v_layout", "o_layout")
    problem = replace(
        SMALL, batch=2, heads=heads, kv_heads=kv_heads, queries=66, keys=70, **dict.fromkeys(names, layout)
    )
    check(Form(problem, SHORT))


@pytest.mark.parametrize("layouts", [*product((BY_TOKEN, BY_HEAD), repeat=4)][1:-1:3], ids="-".join)
def test_each_operand_has_a_layout_of_its_own(layouts: tuple[str, str, str, str]) -> None:
    q, k, v, o = layouts
    problem = replace(SMALL, batch=2, heads=4, kv_heads=2, queries=70, keys=66)
    check(Form(replace(problem, q_layout=q, k_layout=k, v_layout=v, o_layout=o), SHORT))


# Numbers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head", [64, 128])
def test_bfloat16_is_right(head: int, causal: bool) -> None:
    form = any_rows(head=head, dtype="bfloat16", causal=causal)
    for seed in SEEDS:
        check(form, replace(form.problem, queries=70 + seed, keys=300 - 40 * seed), seed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_scores_do_not_overflow(dtype: str) -> None:
    form = any_rows(SHORT, dtype=dtype, causal=True)
    for seed, spread in enumerate([30.0, 100.0, 600.0]):
        check(form, form.problem, seed, drawn(form.problem, seed, spread))


@pytest.mark.parametrize("slope", [-40.0, 40.0, -3e4, 3e4])
def test_the_largest_score_may_come_first_or_last(slope: float) -> None:
    """Scores rise or fall from tile to tile: all sums so far, or all to come, count for nothing."""
    form = any_rows(SHORT, causal=True)
    given = drawn(form.problem, 0)
    given["Q"][..., 0] = 1
    given["K"][..., 0] = np.linspace(0, slope, form.problem.keys).astype(np.float16)[None, :, None]
    check(form, given=given)


def test_equal_scores_give_the_mean() -> None:
    form = any_rows(SHORT)
    given = drawn(form.problem, 0)
    given["K"][:] = given["K"][:, :1]
    check(form, given=given)
    given["Q"][:] = 0
    found = compute(form, given)
    np.testing.assert_allclose(found, np.broadcast_to(found[:, :, :1], found.shape), rtol=0, atol=0)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 50.0])
def test_other_scales_are_right(scale: float) -> None:
    check(Form(replace(SMALL, queries=70, keys=190, scale=scale, causal=True), SHORT))


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_a_bad_key_spoils_only_those_who_see_it(what: float) -> None:
    form = any_rows(AttentionTile(), causal=True)
    for at in (0, 70, 128, 299):
        given = drawn(form.problem, at)
        clean = right_and_bound(form.problem, given)
        given["K"][:, at] = what
        found = compute(form, given, seed=at)
        right, bound = (each[:, :, :at] for each in clean)
        assert (abs(found[:, :, :at] - right) <= bound).all()


def test_a_bad_query_spoils_its_own_row() -> None:
    form = any_rows(AttentionTile())
    given = drawn(form.problem, 0)
    right, bound = right_and_bound(form.problem, given)
    given["Q"][:, 77] = np.nan
    found = compute(form, given)
    others = np.arange(form.problem.queries) != 77
    assert np.isnan(found[:, :, 77]).all()
    assert (abs(found - right) <= bound)[:, :, others].all()


def test_a_query_that_sees_one_key_has_its_value() -> None:
    form = any_rows(AttentionTile(), causal=True)
    given = drawn(form.problem, 3, 5.0)
    found = compute(form, given)
    assert layouts_of(form.problem)["V"] == BY_TOKEN
    np.testing.assert_array_equal(found[:, :, 0], np.repeat(given["V"][:, 0], 2, axis=1).astype(np.float64))


def test_every_order_gives_the_same_to_the_last_bit() -> None:
    form = any_rows(SHORT, 3, causal=True)
    given = drawn(form.problem, 1)
    first = compute(form, given)
    for seed in range(1, 12):
        np.testing.assert_array_equal(compute(form, given, seed=seed, resident=1 + 7 * (seed % 2)), first)
