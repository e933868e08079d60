"""Relax modules of attention as exported models have it, run by the pipeline in the emulator, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
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
    window: int | None = None
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


def heads_of(x: np.ndarray) -> np.ndarray:
    """[batch, tokens, heads * 64] as [batch, heads, tokens, 64]."""
    return x.reshape(*x.shape[:2], -1, 64).transpose(0, 2, 1, 3)


def expanded(emit: Emit, given: Tensors) -> relax.Expr:
    """As Llama repeats heads."""

    def repeated(x: relax.Expr) -> relax.Expr:
        batch, heads, tokens, head = x.ty.shape
        wide = emit(op.broadcast_to(emit(op.expand_dims(x, 2)), [batch, heads, 3, tokens, head]))
        return emit(op.reshape(wide, [batch, heads * 3, tokens, head]))

    return attend(emit, given["q"], repeated(given["k"]), repeated(by_tokens(emit, given["v"])))


def hidden_later(queries: int, keys: int, later: int = 0, window: int | None = None) -> np.ndarray:
    """What hides keys that are later than a query, or before its window."""
    below = np.tri(queries, keys, later - (keys + queries if window is None else window), dtype=bool)
    return np.where(np.tri(queries, keys, later, dtype=bool) & ~below, 0, -np.inf)


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


class Emulation:
    """A case as the pipeline makes it: ``rules`` that took its functions; called with tensors, it gives the output."""

    def __init__(self, case: Case) -> None:
        watch = Watch()
        with PassContext(instruments=[watch.instrument()]):
            scheduled = relax.get_pipeline(LADDER, target=MACHINE.target())(case.module())
        functions = {each.name_hint: one for each, one in scheduled.functions_items() if is_scheduled(one)}
        self.rules = sorted(str(one.attrs[BY]) for one in functions.values() if BY in one.attrs)
        self.kernels = Emulated(watch.fused, scheduled, MACHINE)
        self.running = on_the_cpu(watch.fused, [*functions], "main")

    def __call__(self, given: Mapping[str, np.ndarray]) -> np.ndarray:
        return self.running.instead(self.kernels, *map(tvm.runtime.tensor, given.values())).numpy().astype("float64")
