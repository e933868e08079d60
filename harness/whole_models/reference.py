"""What models must give, and how far rounding may take each element from it: in float64, by numpy or torch.

Every value goes along with the variance of its error (:mod:`.arithmetic`). At the end an element may be off by SIGMAS
times the root of what has come together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorir_ladder.harness.execution import Backend
from tensorir_ladder.harness.verify import Trial, half_units
from tensorir_ladder.harness.whole_models.arithmetic import (
    DTYPE,
    SIGMAS,
    Arithmetic,
    ConvolutionSizes,
    Known,
    Weights,
)
from tensorir_ladder.harness.whole_models.definitions import THETA, Model, ResNetSize, Transformer
from tensorir_ladder.harness.whole_models.functions import Operation


def expected(model: Model, backend: Backend, x: Any, weights: Weights, sums: str = "float32") -> Trial:
    """Compute what a model must give of ``x``, and how far off each element may be with sums of that dtype."""
    arithmetic = Arithmetic(backend, sums)
    made = FORMS[model.kind](arithmetic, model.size, arithmetic.exact(x), weights)
    error = SIGMAS * backend.xp.sqrt(made.variance)
    limit = error + half_units(backend, abs(made.value) + error, DTYPE)
    shape = tuple(made.value.shape)
    rows = (-1, shape[-1])
    return Trial({"x": x, **weights}, made.value.reshape(*rows), limit.reshape(*rows), DTYPE)


def draw_weights(shapes: Mapping[str, tuple[int, ...]], backend: Backend, seed: int) -> dict[str, Any]:
    """Draw a model's parameters, of sizes with which values stay about as large as they come in."""
    return {name: _drawn(name, shape, backend, seed + number) for number, (name, shape) in enumerate(shapes.items())}


def _drawn(name: str, shape: tuple[int, ...], backend: Backend, seed: int) -> Any:
    if name in ("cos", "sin"):
        frequencies = THETA ** -(np.arange(shape[1]) / shape[1])
        return backend.given(getattr(np, name)(np.arange(shape[0])[:, None] * frequencies).astype(DTYPE))
    values = backend.normal(seed, shape, DTYPE)
    if len(shape) == 1:
        about = {"scale": 0.5, "weight": 1.0}.get(name.rpartition(".")[2], 0.0)
        return values * 0.125 + about
    fan_in = shape[1] if len(shape) == 2 else int(np.prod(shape[:-1])) / 2
    return values * float(fan_in**-0.5)


def _llama(a: Arithmetic, size: Transformer, x: Known, w: Weights) -> Known:
    x = x.reshape(*x.value.shape[1:])
    tokens, ends = x.value.shape[0], (size.heads, size.heads + size.kv_heads)
    heads = a.linear(a.norm(x, w["input_norm.weight"], size.eps), w["qkv.weight"]).reshape(tokens, -1, size.head)
    angles = w["cos"][:tokens], w["sin"][:tokens]
    q, k = a.rope(heads[:, : ends[0]], *angles), a.rope(heads[:, ends[0] : ends[1]], *angles)
    mixed = a.attention(q, k, heads[:, ends[1] :], size.scale, causal=True)
    x = a.added(x, a.linear(mixed, w["o.weight"]))
    both = a.linear(a.norm(x, w["post_norm.weight"], size.eps), w["gate_up.weight"])
    gate, up = both[:, : size.ffn], both[:, size.ffn :]
    return a.added(x, a.linear(a.multiplied(a.silu(gate), up), w["down.weight"]))


def _vit(a: Arithmetic, size: Transformer, x: Known, w: Weights) -> Known:
    batch, tokens, hidden = x.value.shape
    x = x.reshape(batch * tokens, hidden)
    normed = a.norm(x, w["norm1.weight"], size.eps, w["norm1.bias"])
    heads = a.linear(normed, w["qkv.weight"], w["qkv.bias"]).reshape(batch, tokens, 3 * size.heads, size.head)
    mixed = a.exact(a.backend.poisoned((batch, tokens, hidden), "float64"))
    for number in range(batch):
        own = heads[number]
        q, k, v = (own[:, part * size.heads : (part + 1) * size.heads] for part in range(3))
        made = a.attention(q, k, v, size.scale, causal=False)
        mixed.value[number], mixed.variance[number] = made.value, made.variance
    x = a.added(x, a.linear(mixed.reshape(batch * tokens, hidden), w["proj.weight"], w["proj.bias"]))
    wide = a.gelu(a.linear(a.norm(x, w["norm2.weight"], size.eps, w["norm2.bias"]), w["fc1.weight"], w["fc1.bias"]))
    return a.added(x, a.linear(wide, w["fc2.weight"], w["fc2.bias"]))


def _resnet(a: Arithmetic, size: ResNetSize, x: Known, w: Weights) -> Known:
    def folded(x: Known, name: str, conv: ConvolutionSizes) -> Known:
        made = a.convolved(x, w[f"{name}.weight"], conv)
        scaled = a.stored(made.scaled(a.backend.float64(w[f"{name}.scale"])))
        return a.added(scaled, a.exact(w[f"{name}.shift"]))

    x = a.pooled(a.relu(folded(x, "stem", size.stem)))
    for number, block in enumerate(size.bottlenecks):
        name, (first, second, third) = f"blocks.{number}", block.convolutions
        beside = folded(x, f"{name}.beside", block.beside) if block.beside else x
        x = a.relu(folded(a.relu(folded(x, f"{name}.conv1", first)), f"{name}.conv2", second))
        x = a.relu(a.added(folded(x, f"{name}.conv3", third), beside))
    pixels = x.value.shape[1] * x.value.shape[2]
    mean = Known(x.value.mean(1).mean(1), x.variance.mean(1).mean(1) / pixels)
    return a.linear(a.stored(mean), w["classes.weight"], w["classes.bias"])


def _mlp(a: Arithmetic, _size: Any, x: Known, w: Weights) -> Known:
    return a.linear(a.silu(a.linear(x, w["up.weight"])), w["down.weight"])


def _linear(a: Arithmetic, _size: Any, x: Known, w: Weights) -> Known:
    return a.linear(x, w["linear.weight"])


def _conv(a: Arithmetic, size: ConvolutionSizes, x: Known, w: Weights) -> Known:
    return a.convolved(x, w["weight"], size)


def _function(a: Arithmetic, operation: Operation, x: Known, w: Weights) -> Known:
    return operation.known(a, x, w)


FORMS = {
    "llama": _llama,
    "vit": _vit,
    "resnet": _resnet,
    "mlp": _mlp,
    "linear": _linear,
    "conv": _conv,
    "function": _function,
}
