"""Masks of fused attention in the emulator: bools and numbers, along each axis, ragged keys, rows that see no key."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from support.attention_runs import Form, check, compute, drawn, lowered
from tensorir_ladder.kernels.attention import BY_HEAD, BY_TOKEN, FORMS, TILE, Attention, AttentionTile, form_for
from tensorir_ladder.kernels.attention_mask import AXES, Mask
from tensorir_ladder.schedules.errors import IllegalWorkload

SMALL = Attention(2, 70, 70, 2, 1, 64, "float16", 64**-0.5)
SHORT = AttentionTile(64, 64)
ALONG = [axes for count in range(len(AXES) + 1) for axes in combinations(AXES, count)]
DTYPES = ["bool", "float16", "bfloat16", "float32"]
PADDING = Mask("bool", ("batch",))
slow = pytest.mark.emulator


def test_other_masks_are_named() -> None:
    with pytest.raises(IllegalWorkload, match=r"dtypes.*int8"):
        Mask("int8")
    with pytest.raises(IllegalWorkload, match=r"axes.*keys"):
        Mask("bool", ("keys",))
    with pytest.raises(IllegalWorkload, match="from the end"):
        replace(SMALL, from_end=True)
    with pytest.raises(IllegalWorkload, match="mask"):
        replace(SMALL, batch=1, queries=2**17, keys=2**17, mask=Mask("bool", ("queries",)))


def test_a_step_has_fewer_keys_where_a_mask_needs_the_registers() -> None:
    assert form_for(128, 132, mask=Mask("float16")) == FORMS[128][0]
    assert form_for(128, 132, mask=Mask("float32")).tile == AttentionTile(128, 64)


@slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("along", ALONG, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_along_each_axis_are_right(dtype: str, along: tuple[str, ...]) -> None:
    for seed, (queries, keys, even) in enumerate([(70, 150, True), (70, 150, False), (65, 79, False)]):
        mask = Mask(dtype, along, even_keys=even)
        check(Form(replace(SMALL, queries=queries, keys=keys, mask=mask), SHORT), seed=seed)


@slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("along", [("batch",), AXES], ids="-".join)
@pytest.mark.parametrize("tile", [TILE, AttentionTile(192, 48), AttentionTile(64, 80)], ids=str)
def test_a_kernel_for_any_tokens_takes_a_mask(tile: AttentionTile, along: tuple[str, ...], dtype: str) -> None:
    form = Form(replace(SMALL, mask=Mask(dtype, along)), tile, any_rows=True)
    for seed, (batch, queries, keys) in enumerate([(1, 1, 1), (2, 140, 300), (3, 5, 129)]):
        check(form, replace(form.problem, batch=batch, queries=queries, keys=keys), seed)


@slow
@pytest.mark.parametrize("mask", [PADDING, Mask("float16", even_keys=True)], ids=lambda mask: mask.dtype)
def test_heads_of_128_take_a_mask_in_the_form_that_is_chosen(mask: Mask) -> None:
    form = form_for(128, 132, mask=mask)
    problem = replace(SMALL, head=128, queries=130, keys=290, mask=mask, causal=True)
    check(Form(problem, form.tile, form.stages))


@slow
@pytest.mark.parametrize("dtype", ["bool", "float16"])
@pytest.mark.parametrize("first", [False, True], ids=["last keys", "first keys"])
def test_padding_may_fill_whole_steps(dtype: str, first: bool) -> None:
    """Queries see no key of the first step, or of the last."""
    problem = replace(SMALL, queries=70, keys=200, mask=Mask(dtype, ("batch",)))
    given = drawn(problem, 3)
    place = np.arange(200) >= 150 if first else np.arange(200) < 20
    seen = np.stack([place, place[::-1]])[:, None, None]
    given["M"] = seen if dtype == "bool" else np.where(seen, 0, -np.inf).astype(np.float16)
    check(Form(problem, SHORT), given=given)


@slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("along", [("batch",), ("batch", "queries")], ids="-".join)
def test_rows_that_see_no_key_are_zeros(dtype: str, along: tuple[str, ...]) -> None:
    problem = replace(SMALL, keys=130, mask=Mask(dtype, along))
    given = drawn(problem, 4)
    given["M"][1, :, -3:] = 0 if dtype == "bool" else -np.inf
    found = compute(Form(problem, SHORT), given)
    rows = slice(None) if along == ("batch",) else slice(-3, None)
    assert (found[1, :, rows] == 0).all()
    check(Form(problem, SHORT), given=given)


@slow
@pytest.mark.parametrize("any_rows", [False, True])
@pytest.mark.parametrize("mask", [None, PADDING], ids=["", "padding"])
@pytest.mark.parametrize(("queries", "keys"), [(70, 200), (200, 70), (130, 130), (1, 90)])
def test_the_last_query_sees_all_keys(queries: int, keys: int, mask: Mask | None, any_rows: bool) -> None:
    """With more queries than keys the first see none."""
    problem = replace(SMALL, queries=queries, keys=keys, causal=True, from_end=True, mask=mask)
    made = replace(problem, queries=3, keys=2, batch=1) if any_rows else problem
    check(Form(made, SHORT, any_rows=any_rows), problem)


@slow
def test_causal_attention_takes_padding() -> None:
    problem = replace(SMALL, queries=150, keys=150, causal=True, mask=PADDING)
    given = drawn(problem, 5)
    given["M"][0, ..., :70] = False  # in front, so that the first queries see nothing
    for tile in (SHORT, TILE):
        check(Form(problem, tile), given=given)


def test_a_mask_for_all_queries_is_read_by_votes() -> None:
    text = lowered(Form(replace(SMALL, keys=300, mask=PADDING), TILE)).cuda
    assert text.count("= vote(") == 2 * TILE.keys // 32  # of the first step and the others
    assert "pair(" in lowered(Form(replace(SMALL, mask=Mask("bool", even_keys=True)), TILE)).cuda


@slow
@pytest.mark.parametrize("layout", [BY_TOKEN, BY_HEAD])
@pytest.mark.parametrize("head", [32, 80, 96, 256])
def test_heads_of_other_sizes_are_right(head: int, layout: str) -> None:
    """What lies beside a head in memory, another one or no number, is in no result, and nothing beyond is written."""
    form = form_for(head, 132)
    lying = dict.fromkeys(("q_layout", "k_layout", "v_layout", "o_layout"), layout)
    problem = replace(SMALL, head=head, queries=130, keys=150, causal=True, **lying)
    for mask in (None, PADDING):
        made = replace(problem, mask=mask, queries=1, keys=1)
        check(Form(made, form.tile, form.stages, True), replace(problem, mask=mask))
