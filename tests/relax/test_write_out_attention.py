"""Attention that the fused kernel does not take: products on tensor cores and a softmax, right for any tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from support.attention_modules import (
    Case,
    Emit,
    Emulation,
    Tensors,
    attend,
    drawn,
    expanded,
    heads_of,
    hidden_later,
    right,
)
from tensorir_ladder.relax.passes import WriteOutAttention


def by_heads(emit: Emit, given: Tensors) -> relax.Expr:
    """Attention with a mask that is added, if there is one."""
    return attend(emit, *(given[name] for name in "qkv"), given.get("m"))


def causal(mask: str) -> Callable[[Emit, Tensors], relax.Expr]:
    """Causal attention of operands by tokens."""

    def write(emit: Emit, given: Tensors) -> relax.Expr:
        made = emit(op.nn.attention(*(given[name] for name in "qkv"), scale=0.5, causal_mask=mask))
        return emit(op.reshape(made, [made.ty.shape[0], made.ty.shape[1], made.ty.shape[2] * made.ty.shape[3]]))

    return write


def repeated(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Heads that share keys and values, each with its own."""
    return q, np.repeat(k, 3, 1), np.repeat(heads_of(v), 3, 1)


def by_token(*operands: np.ndarray) -> tuple[np.ndarray, ...]:
    """Operands by tokens as they are by heads."""
    return tuple(each.transpose(0, 2, 1, 3) for each in operands)


CASES = {
    "heads of 72": Case(by_heads, dict.fromkeys("qkv", (2, 2, "n", 72)), (), lambda *given: given, scale=72**-0.5),
    "heads of 20, a mask": Case(
        by_heads,
        dict.fromkeys("qkv", (2, 2, "n", 20)) | {"m": (2, 1, 1, "n")},
        (),
        lambda q, k, v, m: (q, k, v),
        lambda m, *_: m,
        scale=20**-0.5,
    ),
    "float32": Case(
        by_heads,
        dict.fromkeys("qkv", (1, 2, "n", 64)),
        (),
        lambda *given: given,
        dtypes=dict.fromkeys("qkv", "float32"),
    ),
    "one query": Case(expanded, {"q": (1, 6, 1, 64), "k": (1, 2, "n", 64), "v": (1, "n", 128)}, (), repeated),
    "causal": Case(
        causal("TopLeft"), dict.fromkeys("qkv", (2, "n", 2, 24)), (), by_token, lambda _, i, j: hidden_later(i, j),
        scale=0.5,
    ),
    "causal, the last query sees all": Case(
        causal("BottomRight"),
        {"q": (1, 9, 2, 72)} | dict.fromkeys("kv", (1, 30, 2, 72)),
        (),
        by_token,
        lambda _, i, j: hidden_later(i, j, j - i),
        scale=0.5,
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_out_is_right(name: str) -> None:
    case = CASES[name]
    run = Emulation(case)
    assert "attention" not in run.rules
    products = [rule for rule in run.rules if rule in ("contraction", "decode")]
    assert len(products) == 2
    assert "rows" in run.rules
    for sizes in ({"n": 70}, {"n": 17}):
        given = drawn(case, sizes)
        np.testing.assert_allclose(run(given), right(case, given), atol=4e-3)


def test_heads_that_share_keys_are_rows_of_one_product() -> None:
    mod = WriteOutAttention()(CASES["one query"].module())
    products = [
        binding.value
        for binding in mod["main"].body.blocks[0].bindings
        if getattr(binding.value, "op", None) == op.matmul(relax.const([[1.0]]), relax.const([[1.0]])).op
    ]
    rows = [[int(product.args[0].ty.shape[axis]) for axis in range(3)] for product in products]
    assert rows == [[1, 2, 3]] * 2


@pytest.mark.emulator
def test_a_query_that_sees_no_key_gives_numbers() -> None:
    case = CASES["heads of 20, a mask"]
    given = drawn(case, {"n": 17})
    given["m"][1] = -np.inf
    assert np.isfinite(Emulation(case)(given)).all()
