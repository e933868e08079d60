"""Attention in Relax modules as launches of the fused kernel: which forms, what is left, right, linked, counted."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax import op

import tensorir_ladder
from support.attention_runs import by_head, right_and_bound
from support.relax_modules import functions_of
from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.execution import GpuBackend, LlvmBackend, numpy_dtype
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.whole_models import checking
from tensorir_ladder.harness.whole_models.building import RULES, BuiltModel, build
from tensorir_ladder.harness.whole_models.checking import verify_model
from tensorir_ladder.harness.whole_models.definitions import FAMILIES, LlamaLayer, Transformer
from tensorir_ladder.harness.whole_models.execution import Running
from tensorir_ladder.harness.whole_models.reference import draw_weights, expected
from tensorir_ladder.kernels.attention import BY_TOKEN, AttentionForm
from tensorir_ladder.kernels.attention import FORMS as OF_HEAD
from tensorir_ladder.kernels.codegen.host_code import HostRun, read_host
from tensorir_ladder.kernels.codegen.launch_plan import TensorMap, UnsupportedLaunch
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.kernels.codegen.toolchain import require_compiler
from tensorir_ladder.relax import attention as relax_attention
from tensorir_ladder.relax import fuse_operators
from tensorir_ladder.relax.attention import AttentionMatch, FuseAttention, attention_in
from tensorir_ladder.relax.rules import failures_kept
from tensorir_ladder.relax.rules.rule import BY, HOW, is_scheduled

MACHINE = machine_for("sm_90a")
TARGET = MACHINE.target()
CPU = tvm.target.Target({"kind": "llvm", "opt-level": 1})
slow = pytest.mark.emulator
TURNED = [0, 2, 1, 3]
Extent = int | str
Write = Callable[[relax.BlockBuilder, relax.Expr, relax.Expr, relax.Expr], relax.Expr]


def module(
    write: Write, q: Sequence[Extent], k: Sequence[Extent], v: Sequence[Extent] | None = None, dtype: str = "float16"
) -> tvm.IRModule:
    """A module whose ``forward`` gives what is written of q, k and v; an extent that is a name is run time's."""
    symbols = {each: tirx.Var(each, "int64") for each in (*q, *k, *(v or ())) if isinstance(each, str)}
    shapes = {"q": q, "k": k, "v": v or k}
    given = [
        relax.Var(name, relax.TensorType([symbols.get(extent, extent) for extent in shape], dtype))
        for name, shape in shapes.items()
    ]
    builder = relax.BlockBuilder()
    with builder.function("forward", given):
        with builder.dataflow():
            output = builder.emit_output(write(builder, *given))
        builder.emit_func_output(output)
    return builder.get()


def scored(
    value: Callable[[Any, tirx.Var, tirx.Var], Any], dtype: str = "float32"
) -> Callable[[relax.BlockBuilder, relax.Expr], relax.Expr]:
    """A function of each score, its query and its key, as a call of a function in TIR."""

    def compute(scores: te.Tensor) -> te.Tensor:
        return te.compute(scores.shape, lambda *at: value(scores(*at), at[-2], at[-1]).astype(dtype), name="scored")

    return lambda builder, scores: builder.emit_te(compute, scores, primfunc_name_hint="scored")


def masked(is_seen: Callable[[tirx.Var, tirx.Var], Any], fill: float = -3e38, scale: float = 0.125) -> Any:
    """Scores in float32, scaled where a query sees a key."""
    return scored(
        lambda score, i, j: tirx.if_then_else(
            is_seen(i, j), score.astype("float32") * tirx.const(scale, "float32"), tirx.const(fill, "float32")
        )
    )


def by_products(
    middle: Callable[[relax.BlockBuilder, relax.Expr], relax.Expr] = lambda builder, scores: scores,
    repeats: int = 1,
    by_token: bool = True,
    back: bool = True,
    axis: int = -1,
    out: str | None = None,
) -> Write:
    """Attention as two products, with a softmax and ``middle`` between them, of operands by tokens or by heads."""

    def write(builder: relax.BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
        if repeats > 1:
            k, v = (builder.emit(op.repeat(each, repeats, axis=2 if by_token else 1)) for each in (k, v))
        k = builder.emit(op.permute_dims(k, [0, 2, 3, 1] if by_token else [0, 1, 3, 2]))
        if by_token:
            q, v = (builder.emit(op.permute_dims(each, TURNED)) for each in (q, v))
        scores = middle(builder, builder.emit(op.matmul(q, k)))
        weights = builder.emit(op.nn.softmax(scores, axis=axis))
        if weights.ty.dtype != v.ty.dtype:
            weights = builder.emit(op.astype(weights, str(v.ty.dtype)))
        made = builder.emit(op.matmul(weights, v, out_dtype=out))
        return builder.emit(op.permute_dims(made, TURNED)) if back else made

    return write


def operator(scale: float | None = None, mask: str | None = None, back: bool = False) -> Write:
    """Attention by TVM's operator."""

    def write(builder: relax.BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
        made = builder.emit(op.nn.attention(q, k, v, scale=scale, causal_mask=mask))
        return builder.emit(op.permute_dims(made, TURNED)) if back else made

    return write


def wider(write: Write, axis: int = 2, place: int = 1) -> Write:
    """What is written of keys and values whose heads are repeated by a shape with one more axis, behind ``axis``."""

    def repeated(builder: relax.BlockBuilder, x: relax.Expr, times: int) -> relax.Expr:
        shape = list(x.ty.shape)
        thin = builder.emit(op.expand_dims(x, axis + place))
        inside = [*shape[: axis + place], times, *shape[axis + place :]]
        wide = builder.emit(op.broadcast_to(thin, inside))
        return builder.emit(op.reshape(wide, [*shape[:axis], shape[axis] * times, *shape[axis + 1 :]]))

    def written(builder: relax.BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
        times = int(q.ty.shape[axis]) // int(k.ty.shape[axis])
        return write(builder, q, *(repeated(builder, each, times) for each in (k, v)))

    return written


def times(number: float, dtype: str = "float16") -> Any:
    """Scores times a number, by Relax's operator."""
    return lambda builder, scores: builder.emit(op.multiply(relax.const(number, dtype), scores))


def capped(number: float) -> Any:
    """Scores capped as Gemma 2 does it: over a number, their tanh, times the number."""

    def middle(builder: relax.BlockBuilder, scores: relax.Expr) -> relax.Expr:
        inner = builder.emit(op.divide(scores, relax.const(number, "float16")))
        return builder.emit(op.multiply(builder.emit(op.tanh(inner)), relax.const(number, "float16")))

    return middle


def over(number: float) -> Any:
    """Scores over a number, then as float32."""
    return lambda b, scores: b.emit(op.astype(b.emit(op.divide(scores, relax.const(number, "float16"))), "float32"))


# Which forms


@dataclass(frozen=True)
class Form:
    """A way to write attention: what is written of which shapes, and what is to be found."""

    write: Write
    q: tuple[Extent, ...]
    k: tuple[Extent, ...]
    scale: float
    causal: bool
    layouts: str  # of q, k, v and o: t by tokens, h by heads
    dtype: str = "float16"
    soft_cap: float | None = None

    def module(self) -> tvm.IRModule:
        """The module."""
        return module(self.write, self.q, self.k, dtype=self.dtype)


TOKENS, HEADS = ("b", "n", 4, 64), ("b", 4, "n", 64)
FORMS = {
    "operator": Form(operator(), TOKENS, TOKENS, 0.125, False, "tttt"),
    "operator, causal": Form(operator(0.3, "TopLeft"), TOKENS, TOKENS, 0.3, True, "tttt"),
    "operator, causal, keys of another number": Form(
        operator(0.3, "TopLeft"), TOKENS, ("b", "m", 4, 64), 0.3, True, "tttt"
    ),
    "operator, the last queries are the last keys": Form(
        operator(None, "BottomRight", back=True), (2, 20, 4, 128), (2, 20, 4, 128), 128**-0.5, True, "ttth"
    ),
    "operator of what lies by heads": Form(
        lambda b, *heads: operator(0.3, "TopLeft", back=True)(b, *(b.emit(op.permute_dims(x, TURNED)) for x in heads)),
        HEADS,
        HEADS,
        0.3,
        True,
        "hhhh",
    ),
    "products, scores as they are": Form(by_products(), TOKENS, TOKENS, 1.0, False, "tttt"),
    "products by heads": Form(
        by_products(times(0.125), by_token=False, back=False), HEADS, HEADS, 0.125, False, "hhhh"
    ),
    "products by heads, back by tokens": Form(by_products(over(8), by_token=False), HEADS, HEADS, 0.125, False, "hhht"),
    "cast and causal": Form(by_products(masked(lambda i, j: j <= i)), TOKENS, TOKENS, 0.125, True, "tttt"),
    "causal, the other way round": Form(
        by_products(
            scored(
                lambda score, i, j: tirx.Select(
                    j > i, tirx.const(-6e4, "float16"), tirx.const(2, "float16") * score / tirx.const(16, "float16")
                ),
                "float16",
            )
        ),
        TOKENS,
        TOKENS,
        0.125,
        True,
        "tttt",
    ),
    "causal by a strict comparison": Form(
        by_products(lambda b, s: times(0.5, "float32")(b, masked(lambda i, j: i + 1 > j, scale=0.25)(b, s))),
        TOKENS,
        TOKENS,
        0.125,
        True,
        "tttt",
    ),
    "heads that share keys": Form(
        by_products(masked(lambda i, j: j <= i), repeats=4), ("b", "n", 8, 64), ("b", "n", 2, 64), 0.125, True, "tttt"
    ),
    "heads that share keys, by heads": Form(
        by_products(times(0.125), repeats=2, by_token=False), ("b", 4, "n", 64), ("b", 2, "m", 64), 0.125, False, "hhht"
    ),
    "heads that share keys, by a wider shape": Form(
        wider(operator(None, "TopLeft")), ("b", "n", 8, 64), ("b", "n", 2, 64), 0.125, True, "tttt"
    ),
    "heads that share keys, by heads and a wider shape": Form(
        wider(by_products(times(0.125), by_token=False), axis=1),
        ("b", 6, "n", 64),
        ("b", 2, "m", 64),
        0.125,
        False,
        "hhht",
    ),
    "capped": Form(
        by_products(lambda b, s: over(1)(b, capped(5)(b, times(0.125)(b, s)))),
        TOKENS,
        TOKENS,
        0.125,
        False,
        "tttt",
        soft_cap=5,
    ),
    "capped by a function, causal": Form(
        by_products(
            lambda b, s: masked(lambda i, j: j <= i, scale=5.0)(b, scored(lambda x, i, j: te.tanh(x / 40))(b, s))
        ),
        TOKENS,
        TOKENS,
        0.125,
        True,
        "tttt",
        soft_cap=5,
    ),
    "bfloat16": Form(operator(), (3, "n", 2, 64), (3, "m", 2, 64), 0.125, False, "tttt", "bfloat16"),
    "known": Form(by_products(times(0.125)), (2, 17, 4, 64), (2, 33, 4, 64), 0.125, False, "tttt"),
}


def found_in(mod: tvm.IRModule) -> list[AttentionMatch]:
    """What is found in a module's ``forward``."""
    return [*attention_in(mod["forward"], mod).values()]


def layouts_of(one: AttentionMatch) -> str:
    """Layouts of q, k, v and o, a letter each."""
    return "".join(
        "t" if each == BY_TOKEN else "h" for each in (*(o.layout for o in (one.q, one.k, one.v)), one.o_layout)
    )


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_found_with_their_sources(name: str) -> None:
    form = FORMS[name]
    mod = form.module()
    (one,) = found_in(mod)
    assert [each.source for each in (one.q, one.k, one.v)] == [*mod["forward"].params]
    assert layouts_of(one) == form.layouts
    assert (one.scale, one.causal) == (pytest.approx(form.scale, rel=1e-3), form.causal)
    assert one.soft_cap == form.soft_cap
    problem = one.problem()
    assert (problem.heads, problem.kv_heads) == tuple(
        shape[1 if form.layouts[place] == "h" else 2] for place, shape in enumerate((form.q, form.k))
    )
    assert one.known == (not any(isinstance(extent, str) for extent in (*form.q, *form.k)))


def drawn(form: Form, sizes: dict[str, int], seed: int) -> list[np.ndarray]:
    """Operands of a form."""
    random = np.random.default_rng(seed)
    shapes = [[sizes.get(extent, extent) for extent in shape] for shape in (form.q, form.k, form.k)]
    return [random.normal(size=shape).astype(numpy_dtype(form.dtype)) for shape in shapes]


def right(one: AttentionMatch, operands: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What found attention must give of its sources, as the result is to lie, and how far off it may be."""
    q, k = (by_head(array, each.layout) for array, each in zip(operands, (one.q, one.k)))
    problem = replace(one.problem(), batch=q.shape[0], queries=q.shape[2], keys=k.shape[2])
    return tuple(by_head(each, one.o_layout) for each in right_and_bound(problem, dict(zip("QKV", operands))))


@pytest.mark.sampled(4)
@slow
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.dtype == "float16"])
def test_what_is_found_is_what_tvm_computes(name: str) -> None:
    form = FORMS[name]
    mod = form.module()
    (one,) = found_in(mod)
    operands = drawn(form, {"b": 2, "n": 9, "m": 5}, seed=3)
    run = relax.VirtualMachine(tvm.compile(mod, CPU), tvm.cpu())["forward"]
    made = run(*map(tvm.runtime.tensor, operands)).numpy().astype("float64")
    np.testing.assert_allclose(made, right(one, operands)[0], atol=0.04)  # scores and weights of float16


def read_twice(builder: relax.BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
    """Weights that are given as well."""
    scores = builder.emit(op.matmul(q, builder.emit(op.permute_dims(k, [0, 1, 3, 2]))))
    weights = builder.emit(op.nn.softmax(scores))
    return relax.Tuple([builder.emit_output(weights), builder.emit(op.matmul(weights, v))])


def with_bias(builder: relax.BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
    """An operand beside the scores."""
    bias = relax.const(np.ones((1, 4, 20, 20), "float16"))
    return builder.emit(op.nn.attention(q, k, v, bias=bias))


def added(builder: relax.BlockBuilder, scores: relax.Expr) -> relax.Expr:
    """A mask that is an operand."""
    return builder.emit(op.add(scores, relax.const(np.ones((20, 20), "float16"))))


KNOWN = (1, 20, 4, 64)
LEFT: dict[str, tuple[Callable[[], tvm.IRModule], str]] = {
    "keys that lie turned": (
        lambda: module(
            lambda b, q, k, v: b.emit(op.matmul(b.emit(op.nn.softmax(b.emit(op.matmul(q, k)))), v)),
            (1, 4, 20, 64), (1, 4, 64, 20), (1, 4, 20, 64),
        ),
        "neither by tokens nor by heads",
    ),
    "a window of later keys, too": (
        lambda: module(lambda b, q, k, v: b.emit(op.nn.attention(q, k, v, window_size=4)), KNOWN, KNOWN), "window"
    ),
    "weights read twice": (lambda: module(read_twice, (1, 4, 20, 64), (1, 4, 20, 64)), "elsewhere"),
    "a mask that is scaled": (
        lambda: module(by_products(lambda b, s: times(0.5)(b, added(b, s))), KNOWN, KNOWN), "0.5"
    ),
    "a softmax of columns": (lambda: module(by_products(axis=-2), KNOWN, KNOWN), "-2"),
    "results of float32": (lambda: module(by_products(out="float32"), KNOWN, KNOWN), "float32"),
    "a mask that lets a later key through": (
        lambda: module(by_products(masked(lambda i, j: j <= i + 1)), KNOWN, KNOWN), "done to scores"
    ),
    "the keys from the query on": (
        lambda: module(by_products(masked(lambda i, j: j >= i)), KNOWN, KNOWN), "done to scores"
    ),
    "masked scores with weight": (
        lambda: module(by_products(masked(lambda i, j: j <= i, fill=-100.0)), KNOWN, KNOWN), "-100"
    ),
    "another function": (lambda: module(by_products(scored(lambda s, i, j: te.exp(s))), KNOWN, KNOWN), "done"),
    "scores capped twice": (
        lambda: module(by_products(lambda b, s: capped(4)(b, capped(9)(b, s))), KNOWN, KNOWN), "twice"
    ),
    "a mask that is capped": (
        lambda: module(by_products(lambda b, s: b.emit(op.tanh(added(b, s)))), KNOWN, KNOWN), "capped with"
    ),
    "a choice that is capped": (
        lambda: module(by_products(lambda b, s: b.emit(op.tanh(masked(lambda i, j: j <= i)(b, s)))), KNOWN, KNOWN),
        "done",
    ),
    "a cap below 0": (lambda: module(by_products(capped(-4)), KNOWN, KNOWN), "-4"),
    "scores by their place": (
        lambda: module(by_products(scored(lambda s, i, j: s * (i - j).astype("float16"))), KNOWN, KNOWN), "done"
    ),
    "a negative scale": (lambda: module(by_products(times(-0.5)), KNOWN, KNOWN), "-0.5"),
    "a head of 72": (lambda: module(operator(), (1, 20, 4, 72), (1, 20, 4, 72)), "72"),
    "float32": (lambda: module(operator(), KNOWN, KNOWN, dtype="float32"), "float32"),
    "values of another head": (lambda: module(operator(), KNOWN, KNOWN, (1, 20, 4, 128)), "64 and 128"),
    "another batch": (lambda: module(operator(), TOKENS, ("c", "n", 4, 64)), "b and c"),
    "one query": (lambda: module(operator(), (1, 1, 4, 64), (1, "m", 4, 64)), "few queries"),
    "no keys": (lambda: module(operator(), ("b", 20, 4, 64), ("b", 0, 4, 64)), "no elements"),
    "no batch": (lambda: module(operator(), (0, "n", 4, 64), (0, "n", 4, 64)), "no elements"),
    "heads known at run time only": (lambda: module(operator(0.1), (1, 20, "h", 64), (1, 20, "h", 64)), "run time"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_taken_stays_as_it_was(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = LEFT[name]
    mod = make()
    with caplog.at_level(logging.DEBUG, relax_attention.LOG.name):
        changed = FuseAttention(TARGET)(mod)
    (said,) = [record.getMessage() for record in caplog.records if record.name == relax_attention.LOG.name]
    assert reason in said
    tvm.ir.assert_structural_equal(changed, mod)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100a"])
def test_other_gpus_are_left(arch: str) -> None:
    mod = FORMS["operator"].module()
    tvm.ir.assert_structural_equal(FuseAttention(tvm.target.Target({"kind": "cuda", "arch": arch}))(mod), mod)


def test_other_products_are_no_attention_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    mod = module(lambda b, q, k, v: b.emit(op.matmul(b.emit(op.matmul(q, k)), v)), (1, 4, 20, 20), (1, 4, 20, 20))
    with caplog.at_level(logging.DEBUG, relax_attention.LOG.name):
        assert found_in(mod) == []
    assert not caplog.records


def test_heads_that_are_repeated_in_another_order_are_not_shared() -> None:
    mod = module(wider(operator(), place=0), (1, 20, 4, 64), (1, 20, 2, 64))  # heads 0, 1, 0, 1
    (one,) = found_in(mod)
    assert (one.k.sharing, one.problem().kv_heads) == (1, 4)


@pytest.mark.parametrize("broken", ["attention", "computations_of"])
def test_what_fails_leaves_attention_and_is_said(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise AttributeError("a defect")

    monkeypatch.setattr(relax_attention, broken, fails)
    mod = FORMS["cast and causal"].module()
    with failures_kept() as failures:
        changed = FuseAttention(TARGET)(mod)
    tvm.ir.assert_structural_equal(changed, mod)
    assert [(each.rule, each.error) for each in failures] == [("attention", "AttributeError: a defect")]


# As a launch


def launched(mod: tvm.IRModule) -> tuple[tirx.PrimFunc, Generated]:
    """The one function that attention becomes, and its code."""
    function = FuseAttention(TARGET)(mod)["attention"]
    return function, generate(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), TARGET, "s_tir")


def host_run(made: Generated, batch: int, queries: int, keys: int) -> HostRun:
    """The launches of a call."""
    return read_host(made.host, {"batch": batch, "queries": queries, "keys": keys})


@pytest.fixture(scope="module")
def of_any_tokens() -> tuple[tirx.PrimFunc, Generated]:
    """Heads that share keys, batch, queries and keys known at run time only."""
    return launched(FORMS["heads that share keys, by heads"].module())


def test_maps_are_of_the_tokens_at_hand(of_any_tokens: tuple[tirx.PrimFunc, Generated]) -> None:
    function, made = of_any_tokens
    assert (is_scheduled(function), function.attrs[BY]) == (True, "attention")
    for batch, queries, keys in ((1, 1, 1), (3, 129, 7), (5, 300, 1000)):
        (launch,) = host_run(made, batch, queries, keys).launches
        maps = {each.buffer: each for each in launch.parameters if isinstance(each, TensorMap)}
        assert {name: each.sizes for name, each in maps.items()} == {
            "Q": (64, queries, 4 * batch),
            "K": (64, keys, 2 * batch),
            "V": (64, keys, 2 * batch),
            "O": (4 * 64, queries, batch),
        }
        assert maps["Q"].strides == (128, 128 * queries)
        assert maps["O"].strides == (512, 512 * queries)
        told = [each for each in launch.parameters if isinstance(each, int)]
        assert told == [batch, keys, queries]  # TVM has a kernel's numbers by name
        assert launch.grid == (min(4 * batch * -(-queries // 128), 132), 1, 1)


def test_calls_of_nothing_launch_nothing_and_none_have_no_keys(of_any_tokens: tuple[tirx.PrimFunc, Generated]) -> None:
    _, made = of_any_tokens
    for nothing in ((0, 5, 5), (5, 0, 5), (5, 0, 0)):
        assert host_run(made, *nothing).launches == ()
    with pytest.raises(UnsupportedLaunch, match="no keys"):
        host_run(made, 5, 5, 0)


def test_calls_beyond_32_bits_are_refused(of_any_tokens: tuple[tirx.PrimFunc, Generated]) -> None:
    _, made = of_any_tokens
    most = 2**31 // (4 * 64)
    (launch,) = host_run(made, 1, most // 2, 1).launches
    assert launch.grid[0] == 132
    with pytest.raises(UnsupportedLaunch, match="Q, padded"):
        host_run(made, 1, most - 1, 1)
    with pytest.raises(UnsupportedLaunch, match="K, padded"):
        host_run(made, 1, 1, 2 * most - 1)


def test_known_tokens_need_no_numbers() -> None:
    _, made = launched(FORMS["known"].module())
    (launch,) = host_run(made, 0, 0, 0).launches
    assert launch.grid == (2 * 4, 1, 1)
    assert not [each for each in launch.parameters if isinstance(each, int)]


def check_emulated(form: Form, sizes: dict[str, int], seed: int) -> None:
    """Run the launch in the emulator, its result poisoned before; fail where this is not right."""
    mod = form.module()
    (one,), (function, made) = found_in(mod), launched(mod)
    operands = drawn(form, sizes, seed)
    wanted, bound = right(one, operands)
    output = np.full(wanted.shape, np.nan, dtype=operands[0].dtype)
    extents = (
        sizes.get(extent, extent) for extent in (one.q.extents[0], *(each.extents[2] for each in (one.q, one.k)))
    )
    numbers = [sizes[extent.name] if isinstance(extent, tirx.Var) else int(extent) for extent in extents]
    run = host_run(made, *numbers)
    names = tuple(str(parameter.name) for parameter in function.params)
    EmulatedProgram("attention", made.cuda, run.launches, names, (), MACHINE.multiprocessors, names[:-1])(
        *operands, output, seed=seed
    )
    assert (abs(output.astype("float64") - wanted) <= bound).all(), sizes


EMULATED = {
    "heads that share keys": ((1, 1, 1), (2, 130, 130), (1, 300, 300)),
    "heads that share keys, by heads": ((2, 70, 200), (1, 5, 129)),
    "operator, causal, keys of another number": ((1, 140, 70), (1, 70, 140)),
    "operator, the last queries are the last keys": ((2, 20, 20),),
    "bfloat16": ((3, 65, 129),),
    "known": ((2, 17, 33),),
}


@pytest.mark.sampled(3)
@slow
@pytest.mark.parametrize("name", EMULATED)
def test_results_are_right_for_any_tokens(name: str) -> None:
    for batch, queries, keys in EMULATED[name]:
        check_emulated(FORMS[name], {"b": batch, "n": queries, "m": keys}, seed=queries)


CHOSEN = {
    f"{form.tile.rows} queries of heads of {head}": (head, form) for head, forms in OF_HEAD.items() for form in forms
}


@pytest.mark.sampled(3)
@slow
@pytest.mark.parametrize("name", CHOSEN)
def test_every_form_that_may_be_chosen_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for tokens known at run time only, whatever it is chosen for."""
    head, chosen = CHOSEN[name]
    monkeypatch.setattr(relax_attention, "form_for", lambda *_: chosen)
    shapes = ("b", "n", 2, head), ("b", "m", 1, head)
    form = Form(by_products(masked(lambda i, j: j <= i), repeats=2), *shapes, 0.125, True, "tttt")
    function, _ = launched(form.module())
    assert said_of(chosen) in function.attrs[HOW]
    check_emulated(form, {"b": 1, "n": 200, "m": 300}, seed=head)
    check_emulated(form, {"b": 2, "n": 5, "m": 1}, seed=head + 1)


def said_of(form: AttentionForm) -> str:
    """How a line about a function tells of its form."""
    return f"{form.tile.rows} queries, {form.tile.keys} keys, {form.stages} stages"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("q", "k", "rows"),
    [
        ((1, 128, 32, 128), (1, 128, 32, 128), 64),
        ((2, 512, 32, 128), (2, "m", 32, 128), 128),
        ((1, "n", 32, 128), (1, "n", 32, 128), 128),
        ((4, 4096, 16, 64), (4, 4096, 16, 64), 192),
        (("b", 4096, 16, 64), ("b", 4096, 16, 64), 128),
        ((64, 197, 16, 64), (64, 197, 16, 64), 128),
    ],
)
def test_the_form_is_chosen_by_the_extents_that_are_known(
    q: tuple[Extent, ...], k: tuple[Extent, ...], rows: int
) -> None:
    mod = module(operator(), q, k)
    (one,) = found_in(mod)
    form = one.form(MACHINE.multiprocessors)
    assert form.tile.rows == rows
    function, made = launched(mod)
    assert said_of(form) in function.attrs[HOW]
    sizes = [4 if isinstance(extent, str) else extent for extent in (*q[:2], k[1])]
    (launch,) = host_run(made, *sizes).launches
    assert launch.grid[0] == min(sizes[0] * q[2] * math.ceil(sizes[1] / form.tile.rows), MACHINE.multiprocessors)


# In the pipeline


def test_a_model_has_one_function_for_it_and_explain_names_it() -> None:
    mod = FAMILIES["vit-block"].models(False)[0].exported(1)[0]
    fused = functions_of(fuse_operators(TARGET, kernels=True)(mod))
    assert [name for name, one in fused.items() if is_scheduled(one)] == ["attention"]
    assert not any("softmax" in name for name in fused)
    assert sum("matmul" in name for name in fused) == 4
    without = functions_of(fuse_operators(TARGET)(mod))
    assert sum("matmul" in name for name in without) == 6


def test_attention_is_explained() -> None:
    mod = FORMS["heads that share keys"].module()
    (row,) = tensorir_ladder.explain(mod, TARGET).rows
    assert (row.rule, row.left) == ("attention", ())
    assert "causal" in row.how
    again = fuse_operators(TARGET, kernels=True)(mod)
    assert [row.rule for row in tensorir_ladder.explain(again, TARGET).rows] == ["already scheduled"]


@slow
def test_attention_may_be_left_to_schedules() -> None:
    mod = relax.get_pipeline("tensorir_ladder", target=TARGET, kernels=False)(FORMS["operator"].module())
    assert "external_mods" not in (mod.attrs or {})
    assert not any(one.attrs[BY] == "attention" for one in functions_of(mod).values() if BY in one.attrs)


def test_two_layers_share_a_kernel_and_tvms_stock_pipeline_links_it() -> None:
    def twice(builder: relax.BlockBuilder, q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
        return operator()(builder, operator()(builder, q, k, v), k, v)

    mod = relax.get_pipeline("tensorir_ladder", target=TARGET)(module(twice, TOKENS, TOKENS))
    (function,) = functions_of(mod).values()
    (kernel,) = function.attrs["tensorir_ladder.kernels"]
    texts = [each.inspect_source() for each in tvm.compile(mod, TARGET).mod.imports[0].imports]
    assert sum(f" {kernel}(" in text for text in texts) == 1


SIZE = Transformer(hidden=128, heads=2, kv_heads=1, head=64, ffn=96)
LAYER = replace(
    FAMILIES["llama-layer"].models(True)[0],
    size=SIZE,
    module=lambda: LlamaLayer(SIZE, 256),
    shape=lambda seq: (1, seq, SIZE.hidden),
)


@slow
def test_a_layer_with_it_is_right_and_has_it_counted_as_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[BuiltModel] = []
    monkeypatch.setattr(checking, "build", lambda *given: built.append(build(*given)) or built[0])
    found = verify_model(LAYER, 140, RULES["ladder"], MACHINE, LlvmBackend(), 7, emulated=True)
    (one,) = [function for function in built[0].functions.values() if function.attention]
    assert one.rule.startswith("ladder: attention (TMA")
    assert found.max_error <= found.tolerance


# On a GPU


ON_GPU = {
    "heads that share keys": ((1, 1, 1), (1, 7, 7), (2, 130, 130), (1, 129, 129), (3, 300, 300), (1, 1000, 1000)),
    "heads that share keys, by heads": ((2, 70, 200), (1, 1, 129), (1, 5, 1000), (9, 128, 64)),
    "operator, causal, keys of another number": ((1, 140, 70), (1, 70, 140), (2, 500, 1)),
    "operator, the last queries are the last keys": ((2, 20, 20),),
    "products by heads": ((1, 64, 64), (70, 65, 65)),
    "bfloat16": ((3, 65, 129), (3, 1, 1), (3, 700, 300)),
    "known": ((2, 17, 33),),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_results_are_right_on_the_gpu(name: str, tmp_path: Path) -> None:
    """As a user of TVM compiles it, and from an exported library; empty calls between the others."""
    torch = pytest.importorskip("torch")
    form = FORMS[name]
    mod = form.module()
    (one,) = found_in(mod)
    executable = tvm.compile(relax.get_pipeline("tensorir_ladder", target=TARGET)(mod), TARGET)
    executable.export_library(str(tmp_path / "attention.so"))

    def on_gpu(array: np.ndarray) -> Any:
        return torch.from_numpy(array.astype("float32")).cuda().to(getattr(torch, form.dtype))

    for loaded in (executable, tvm.runtime.load_module(str(tmp_path / "attention.so"))):
        run = relax.VirtualMachine(loaded, tvm.cuda())["forward"]
        for batch, queries, keys in ON_GPU[name]:
            operands = drawn(form, {"b": batch, "n": queries, "m": keys}, seed=queries)
            given, (wanted, bound) = [on_gpu(each) for each in operands], right(one, operands)
            for _ in range(2):
                made = torch.from_dlpack(run(*given)).double().cpu().numpy()
                assert (abs(made - wanted) <= bound).all(), (batch, queries, keys)
        if not one.known:
            nothing = drawn(form, {"b": 2, "n": 0, "m": 0}, seed=0)
            made = run(*(tvm.runtime.empty(each.shape, form.dtype, tvm.cuda()) for each in nothing))  # docs/tvm.md
            assert 0 in made.shape


@pytest.mark.gpu
def test_a_layer_is_right_on_the_gpu_at_any_length() -> None:
    backend = GpuBackend()
    built = build(LAYER, 7, RULES["ladder"], MACHINE, require_compiler())
    running = Running(built.executable, list(built.functions), tvm.cuda())
    for tokens in (1, 7, 16, 17, 128, 129, 256):
        x = backend.normal(tokens, LAYER.shape(tokens), "float16")
        weights = draw_weights(LAYER.exported(tokens)[1], backend, 5)
        trial = expected(LAYER, backend, x, weights, built.sums)
        made = backend.torch.from_dlpack(running(x, *weights.values())).double().reshape(trial.reference.shape)
        assert (abs(made - trial.reference) <= trial.limit).all(), tokens
