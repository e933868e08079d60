"""Operands of attention as exported models have them: parts of projections, repeated heads, masks of every making."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir.transform import PassContext
from tvm.relax import op

from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.whole_models.building import LADDER, Watch
from tensorir_ladder.harness.whole_models.execution import Emulated, on_the_cpu
from tensorir_ladder.kernels.attention_mask import Mask
from tensorir_ladder.relax.attention import AttentionMatch, attention_in
from tensorir_ladder.relax.rules.rule import BY, is_scheduled

MACHINE = machine_for("sm_90a")
TURNED = [0, 2, 1, 3]
BY_HEADS = dict.fromkeys("qkv", (2, 2, "n", 64))
BY_TOKENS = dict.fromkeys("qkv", (2, "n", 2, 64))
Tensors = Mapping[str, relax.Expr]
Emit = Callable[[relax.Expr], relax.Expr]


@dataclass(frozen=True)
class Case:
    """A way to write attention of some tensors, which of them the launch is to read, and what it is to compute."""

    write: Callable[[Emit, Tensors], relax.Expr]
    shapes: Mapping[str, tuple[int | str, ...]]
    read: tuple[str, ...]  # Q, K, V and the mask
    split: Callable[..., tuple[np.ndarray, ...]]  # what they are as [batch, heads, tokens, head]
    sees: Callable[..., np.ndarray] | None = None  # what is added to scores
    mask: Mask | None = None
    causal: bool = False
    from_end: bool = False
    scale: float = 0.125
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def module(self) -> tvm.IRModule:
        """The module."""
        symbols: dict[str, tirx.Var] = {}
        given = {}
        for name, shape in self.shapes.items():
            extents = [
                symbols.setdefault(each, tirx.Var(each, "int64")) if isinstance(each, str) else each for each in shape
            ]
            given[name] = relax.Var(name, relax.TensorType(extents, self.dtypes.get(name, "float16")))
        builder = relax.BlockBuilder()
        with builder.function("main", [*given.values()]):
            with builder.dataflow():
                output = builder.emit_output(self.write(builder.emit, given))
            builder.emit_func_output(output)
        return builder.get()

    def found(self) -> AttentionMatch:
        """What is found."""
        mod = self.module()
        (one,) = attention_in(mod["main"], mod).values()
        return one


def attend(emit: Emit, q: relax.Expr, k: relax.Expr, v: relax.Expr, bias: relax.Expr | None = None) -> relax.Expr:
    """Attention of operands by heads, as ``from_torch`` writes it."""
    q, k, v = (emit(op.permute_dims(each, TURNED)) for each in (q, k, v))
    made = emit(op.nn.attention(q, k, v, bias=bias))
    back = emit(op.permute_dims(emit(op.permute_dims(made, TURNED)), TURNED))
    return emit(op.reshape(back, [back.ty.shape[0], back.ty.shape[1], back.ty.shape[2] * back.ty.shape[3]]))


def by_tokens(emit: Emit, x: relax.Expr) -> relax.Expr:
    """[batch, tokens, heads * 64] by heads."""
    batch, tokens, columns = x.ty.shape
    return emit(op.permute_dims(emit(op.reshape(x, [batch, tokens, columns // 64, 64])), TURNED))


def hiding(emit: Emit, seen: relax.Expr, fill: float = float("-inf")) -> relax.Expr:
    """A mask of bools as one that is added."""
    return emit(op.where(seen, relax.const(0, "float16"), relax.const(fill, "float16")))


def heads_of(x: np.ndarray) -> np.ndarray:
    """[batch, tokens, heads * 64] as [batch, heads, tokens, 64]."""
    return x.reshape(*x.shape[:2], -1, 64).transpose(0, 2, 1, 3)


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


def expanded(emit: Emit, given: Tensors) -> relax.Expr:
    """As Llama repeats heads."""

    def repeated(x: relax.Expr) -> relax.Expr:
        batch, heads, tokens, head = x.ty.shape
        wide = emit(op.broadcast_to(emit(op.expand_dims(x, 2)), [batch, heads, 3, tokens, head]))
        return emit(op.reshape(wide, [batch, heads * 3, tokens, head]))

    return attend(emit, given["q"], repeated(given["k"]), repeated(by_tokens(emit, given["v"])))


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


def hidden_later(queries: int, keys: int, later: int = 0) -> np.ndarray:
    """What hides keys that are later than a query."""
    return np.where(np.tri(queries, keys, later, dtype=bool), 0, -np.inf)


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
    assert (one.causal, one.from_end, one.scale) == (case.causal, case.from_end, pytest.approx(case.scale))


def drawn(case: Case, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """What a case is given; the first keys are never hidden, so that each query sees one."""
    random = np.random.default_rng(1)
    found = {}
    for name, shape in case.shapes.items():
        extents = [sizes.get(each, each) for each in shape]
        dtype = case.dtypes.get(name, "float16")
        found[name] = random.normal(size=extents).astype(dtype)
        if dtype != "float16":
            found[name] = (random.random(extents) < 0.6).astype(dtype)
            found[name][..., 0] = 1
    return found


def right(case: Case, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Attention in float64, [batch, tokens, heads * 64]."""
    q, k, v = (each.astype("float64") for each in case.split(*given.values()))
    scores = q @ k.swapaxes(2, 3) * case.scale
    if case.sees:
        scores = scores + case.sees(given.get("m"), q.shape[2], k.shape[2])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    made = weights / weights.sum(-1, keepdims=True) @ v
    return made.transpose(0, 2, 1, 3).reshape(*made.shape[::2], -1)


@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_pipelines_make_one_launch_that_is_right(name: str) -> None:
    case, watch = CASES[name], Watch()
    with PassContext(instruments=[watch.instrument()]):
        scheduled = relax.get_pipeline(LADDER, target=MACHINE.target())(case.module())
    functions = {each.name_hint: one for each, one in scheduled.functions_items() if is_scheduled(one)}
    rules = sorted(str(one.attrs[BY]) for one in functions.values() if BY in one.attrs)
    assert rules == ["attention", *(["elementwise"] if case.dtypes.get("m") == "int64" else [])]  # a cast to bools
    emulated = Emulated(watch.fused, scheduled, MACHINE)
    running = on_the_cpu(watch.fused, [*functions], "main")
    for sizes in ({"b": 1, "n": 140}, {"b": 2, "n": 17}):
        given = drawn(case, sizes)
        made = running.instead(emulated, *map(tvm.runtime.tensor, given.values())).numpy()
        np.testing.assert_allclose(made.astype("float64"), right(case, given), atol=4e-3)
