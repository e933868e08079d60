"""Operands of attention as exported models have them: parts of projections, repeated heads, masks of every making."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from support.attention_modules import (
    TURNED,
    Case,
    Emit,
    Emulation,
    Tensors,
    attend,
    by_tokens,
    drawn,
    expanded,
    heads_of,
    hidden_later,
    right,
)
from tensorir_ladder.kernels.attention_mask import Mask

BY_HEADS = dict.fromkeys("qkv", (2, 2, "n", 64))


def hiding(emit: Emit, seen: relax.Expr, fill: float = float("-inf")) -> relax.Expr:
    """A mask of bools as one that is added."""
    return emit(op.where(seen, relax.const(0, "float16"), relax.const(fill, "float16")))


def of_one_projection(emit: Emit, given: Tensors) -> relax.Expr:
    """As timm writes it."""
    (x,) = given.values()
    batch, tokens, columns = x.ty.shape
    turned = emit(op.permute_dims(emit(op.reshape(x, [batch, tokens, 3, columns // 192, 64])), [2, 0, 3, 1, 4]))
    parts = [
        emit(op.squeeze(emit(op.strided_slice(turned, [0], [place], [place + 1], [1])), [0])) for place in range(3)
    ]
    return attend(emit, *parts)


def of_rows_that_are_split(emit: Emit, given: Tensors) -> relax.Expr:
    """As GPT-2 has it."""
    (x,) = given.values()
    wide = emit(op.reshape(x, [1, x.ty.shape[0], x.ty.shape[1]]))
    parts = emit(op.split(wide, [128, 256], axis=2))
    return attend(emit, *(by_tokens(emit, emit(relax.TupleGetItem(parts, place))) for place in range(3)))


def taken(emit: Emit, given: Tensors) -> relax.Expr:
    """Three operands of one tensor [3, batch, heads, tokens, 64], by heads."""
    (x,) = given.values()
    return attend(emit, *(emit(op.take(x, relax.const(place, "int64"), axis=0)) for place in range(3)))


def one_head_for_all(emit: Emit, given: Tensors) -> relax.Expr:
    """As multi-query models have it."""
    batch, heads, tokens, head = given["q"].ty.shape
    k, v = (emit(op.broadcast_to(given[name], [batch, heads, tokens, head])) for name in "kv")
    return attend(emit, given["q"], k, v)


def scaled_before(emit: Emit, given: Tensors) -> relax.Expr:
    """As Whisper scales queries, and ``from_torch`` what torch is given for a scale."""
    q = emit(
        op.multiply(
            by_tokens(emit, emit(op.multiply(given["q"], relax.const(0.5, "float16")))), relax.const(4.0, "float16")
        )
    )
    return attend(emit, q, *(by_tokens(emit, given[name]) for name in "kv"))


def padded(emit: Emit, given: Tensors) -> relax.Expr:
    """As BERT's mask is made of [batch, keys]: gathered by ``arange``, and a mask that is always true, broadcast."""
    batch, _, tokens, _ = given["q"].ty.shape
    columns, rows = (emit(op.arange(0, extent, 1, "int64")) for extent in (tokens, batch))
    at = emit(op.reshape(rows, [batch, 1, 1, 1])), emit(op.reshape(columns, [1, 1, 1, tokens]))
    seen = emit(op.index_tensor(emit(op.astype(given["m"], "bool")), list(at)))
    always = emit(op.greater_equal(emit(op.reshape(columns, [1, 1, tokens, 1])), relax.const(0, "int64")))
    both = emit(op.bitwise_and(always, seen))
    wide = emit(op.broadcast_to(both, [batch, 1, tokens, tokens]))
    return attend(emit, given["q"], given["k"], given["v"], hiding(emit, wide))


def causal_and_padded(emit: Emit, given: Tensors) -> relax.Expr:
    """As Llama's mask is with padding."""
    batch, _, tokens, _ = given["q"].ty.shape
    places = emit(op.arange(0, tokens, 1, "int64"))
    causal = emit(op.less_equal(emit(op.expand_dims(places, 0)), emit(op.expand_dims(places, 1))))
    seen = emit(op.logical_and(causal, emit(op.reshape(given["m"], [batch, 1, 1, tokens]))))
    return attend(emit, given["q"], given["k"], given["v"], hiding(emit, seen, -65504.0))


def causal_by_offset(emit: Emit, given: Tensors) -> relax.Expr:
    """As with a cache: the last query is the last key's."""
    queries, keys = given["q"].ty.shape[2], given["k"].ty.shape[2]
    rows = emit(op.add(emit(op.arange(0, queries, 1, "int64")), relax.const(0, "int64")))
    rows = emit(op.expand_dims(emit(op.add(rows, relax.const(int(keys) - int(queries), "int64"))), 1))
    hidden = emit(op.greater(emit(op.arange(0, keys, 1, "int64")), rows))
    return attend(
        emit,
        given["q"],
        given["k"],
        given["v"],
        hiding(emit, emit(op.expand_dims(emit(op.logical_not(hidden)), [0, 1]))),
    )


def constant_causal(emit: Emit, given: Tensors) -> relax.Expr:
    """A mask that was folded to a constant."""
    tokens = int(given["q"].ty.shape[2])
    bias = np.where(np.tri(tokens, dtype=bool), 0, -np.inf).astype("float16")
    return attend(emit, given["q"], given["k"], given["v"], relax.const(bias[None, None]))


def windowed(width: int) -> Callable[[Emit, Tensors], relax.Expr]:
    """As Mistral's mask is: ``key > query - width`` and ``key <= query``, the last query that of the last key."""

    def write(emit: Emit, given: Tensors) -> relax.Expr:
        queries, keys = given["q"].ty.shape[2], given["k"].ty.shape[2]
        columns = emit(op.expand_dims(emit(op.arange(0, keys, 1, "int64")), 0))
        rows = emit(op.expand_dims(emit(op.arange(keys - queries, keys, 1, "int64")), 1))
        near = emit(op.greater(columns, emit(op.subtract(rows, relax.const(width, "int64")))))
        seen = emit(op.bitwise_and(near, emit(op.less_equal(columns, rows))))
        if "m" in given:
            seen = emit(op.bitwise_and(seen, emit(op.reshape(given["m"], [2, 1, 1, keys]))))
        else:
            seen = emit(op.expand_dims(seen, [0, 1]))
        return attend(emit, given["q"], given["k"], given["v"], hiding(emit, seen))

    return write


def by_operator(emit: Emit, given: Tensors) -> relax.Expr:
    """A window by TVM's operator, of operands by tokens."""
    made = emit(op.nn.attention(given["q"], given["k"], given["v"], causal_mask="BottomRight", window_size=9))
    return emit(op.reshape(made, [2, 20, 128]))


def constant_window(emit: Emit, given: Tensors) -> relax.Expr:
    """A mask of bools that was folded to a constant."""
    seen = hidden_later(20, 36, 16, 9) == 0
    return attend(emit, given["q"], given["k"], given["v"], hiding(emit, relax.const(seen[None, None])))


def by_position(emit: Emit, given: Tensors) -> relax.Expr:
    """A bias for each head, the same for the whole batch."""
    return attend(emit, given["q"], given["k"], given["v"], emit(op.expand_dims(given["m"], 0)))


def written_out(emit: Emit, given: Tensors) -> relax.Expr:
    """Products and a softmax of scores to which a mask is added."""
    scores = emit(op.matmul(given["q"], emit(op.permute_dims(given["k"], [0, 1, 3, 2]))))
    scores = emit(op.add(emit(op.multiply(scores, relax.const(0.125, "float16"))), given["m"]))
    weights = emit(op.nn.softmax(scores))
    made = emit(op.permute_dims(emit(op.matmul(weights, given["v"])), TURNED))
    return emit(op.reshape(made, [made.ty.shape[0], made.ty.shape[1], made.ty.shape[2] * made.ty.shape[3]]))


def hidden_keys(mask: np.ndarray) -> np.ndarray:
    """[batch, keys], as what is added to scores."""
    return np.where(mask[:, None, None] != 0, 0, -np.inf)


PADDING = {"m": (2, "n")}
BY_BATCH = Mask("bool", ("batch",))
CASES = {
    "one projection": Case(
        of_one_projection, {"x": ("b", "n", 384)}, ("x",) * 3, lambda x: tuple(map(heads_of, np.split(x, 3, 2)))
    ),
    "one projection, known": Case(
        of_one_projection, {"x": (2, 17, 384)}, ("x",) * 3, lambda x: tuple(map(heads_of, np.split(x, 3, 2)))
    ),
    "rows that are split": Case(
        of_rows_that_are_split,
        {"x": ("n", 384)},
        ("x",) * 3,
        lambda x: tuple(map(heads_of, np.split(x[None], 3, 2))),
    ),
    "one tensor by heads": Case(taken, {"x": (3, 2, 2, 20, 64)}, ("x",) * 3, lambda x: tuple(x)),
    "repeated heads": Case(
        expanded,
        {"q": (2, 6, "n", 64), "k": (2, 2, "n", 64), "v": (2, "n", 128)},
        ("q", "k", "v"),
        lambda q, k, v: (q, np.repeat(k, 3, 1), np.repeat(heads_of(v), 3, 1)),
    ),
    "one head for all": Case(
        one_head_for_all,
        {"q": (2, 4, "n", 64)} | dict.fromkeys("kv", (2, 1, "n", 64)),
        ("q", "k", "v"),
        lambda q, k, v: (q, np.repeat(k, 4, 1), np.repeat(v, 4, 1)),
    ),
    "queries that are scaled": Case(
        scaled_before,
        dict.fromkeys("qkv", (2, "n", 128)),
        ("q", "k", "v"),
        lambda *given: tuple(map(heads_of, given)),
        scale=0.25,
    ),
    "padding": Case(
        padded,
        BY_HEADS | PADDING,
        ("q", "k", "v", "lv4"),
        lambda q, k, v, m: (q, k, v),
        lambda m, *_: hidden_keys(m),
        BY_BATCH,
        dtypes={"m": "int64"},
    ),
    "causal, with padding": Case(
        causal_and_padded,
        BY_HEADS | PADDING,
        ("q", "k", "v", "m"),
        lambda q, k, v, m: (q, k, v),
        lambda m, queries, keys: hidden_keys(m) + hidden_later(queries, keys),
        BY_BATCH,
        causal=True,
        dtypes={"m": "bool"},
    ),
    "causal, the last query sees all": Case(
        causal_by_offset,
        {"q": (1, 2, 20, 64), "k": (1, 2, 36, 64), "v": (1, 2, 36, 64)},
        ("q", "k", "v"),
        lambda q, k, v: (q, k, v),
        lambda _, queries, keys: hidden_later(queries, keys, keys - queries),
        causal=True,
        from_end=True,
    ),
    "causal, a constant": Case(
        constant_causal,
        dict.fromkeys("qkv", (1, 2, 20, 64)),
        ("q", "k", "v"),
        lambda q, k, v: (q, k, v),
        lambda _, queries, keys: hidden_later(queries, keys),
        causal=True,
    ),
    "a window": Case(
        windowed(9),
        BY_HEADS,
        ("q", "k", "v"),
        lambda q, k, v: (q, k, v),
        lambda _, queries, keys: hidden_later(queries, keys, 0, 9),
        causal=True,
        window=9,
    ),
    "a window, with padding, the last query sees the last key": Case(
        windowed(30),
        {"q": (2, 2, 20, 64), "k": (2, 2, 36, 64), "v": (2, 2, 36, 64), "m": (2, 36)},
        ("q", "k", "v", "m"),
        lambda q, k, v, m: (q, k, v),
        lambda m, queries, keys: hidden_keys(m) + hidden_later(queries, keys, 16, 30),
        Mask("bool", ("batch",), even_keys=True),
        causal=True,
        from_end=True,
        window=30,
        dtypes={"m": "bool"},
    ),
    "a window by the operator": Case(
        by_operator,
        dict.fromkeys("qkv", (2, 20, 2, 64)),
        ("q", "k", "v"),
        lambda *given: tuple(each.transpose(0, 2, 1, 3) for each in given),
        lambda _, queries, keys: hidden_later(queries, keys, 0, 9),
        causal=True,
        window=9,
    ),
    "a window, a constant": Case(
        constant_window,
        {"q": (1, 2, 20, 64), "k": (1, 2, 36, 64), "v": (1, 2, 36, 64)},
        ("q", "k", "v"),
        lambda q, k, v: (q, k, v),
        lambda _, queries, keys: hidden_later(queries, keys, 16, 9),
        causal=True,
        from_end=True,
        window=9,
    ),
    "a bias by position": Case(
        by_position,
        BY_HEADS | {"m": (2, "n", "n")},
        ("q", "k", "v", "m"),
        lambda q, k, v, m: (q, k, v),
        lambda m, *_: m[None],
        Mask("float16", ("heads", "queries")),
    ),
    "a mask that is added, written out": Case(
        written_out,
        dict.fromkeys("qkv", (2, 2, 20, 64)) | {"m": (2, 1, 1, 20)},
        ("q", "k", "v", "m"),
        lambda q, k, v, m: (q, k, v),
        lambda m, *_: m,
        Mask("float16", ("batch",), even_keys=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operands_are_found_where_they_lie(name: str) -> None:
    case = CASES[name]
    one = case.found()
    read = [one.q.source, one.k.source, one.v.source, *([one.mask.source] if one.mask else [])]
    assert tuple(each.name for each in read) == case.read
    assert (one.mask.kind if one.mask else None) == case.mask
    assert (one.causal, one.from_end, one.window) == (case.causal, case.from_end, case.window)
    assert one.scale == pytest.approx(case.scale)


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_pipelines_make_one_launch_that_is_right(name: str) -> None:
    case = CASES[name]
    run = Emulation(case)
    casts = ["elementwise"] if case.dtypes.get("m") == "int64" else []
    assert run.rules == ["attention", *casts]
    for sizes in ({"b": 1, "n": 140}, {"b": 2, "n": 17}):
        given = drawn(case, sizes)
        np.testing.assert_allclose(run(given), right(case, given), atol=4e-3)
