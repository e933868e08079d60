"""The same models by torch, as its users write them: what ours are timed beside, eager and by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorir_ladder.harness.whole_models.arithmetic import ConvolutionSizes
from tensorir_ladder.harness.whole_models.definitions import Model, ResNetSize, Transformer
from tensorir_ladder.harness.whole_models.functions import Operation

Weights = Mapping[str, Any]


def forms(torch: Any, model: Model) -> dict[str, Callable[..., Any]]:
    """List torch's forms of a model by name, each ``form(x, weights)``, of weights that :func:`stored` has stored.

    "torch" is the model; "torch, rest" is it without attention's products and softmax; a linear layer has two forms,
    its weight stored either way.
    """
    make = FORMS[model.kind]
    if model.kind == "linear":
        return {
            "torch": lambda x, w: torch.nn.functional.linear(x, w["linear.weight"]),
            "torch, turned": lambda x, w: x @ w["linear.weight, turned"],
        }
    found = {"torch": lambda x, w: make(torch, model.size, x, w, True)}
    if model.tokens is not None:
        found["torch, rest"] = lambda x, w: make(torch, model.size, x, w, False)
    return found


def stored(model: Model, weights: Weights) -> dict[str, Any]:
    """Store weights as torch wants them: of convolutions [out, in, height, width], channels last in memory."""
    if model.kind == "linear":
        weight = weights["linear.weight"]
        return {**weights, "linear.weight, turned": weight.T.contiguous()}
    if model.kind not in ("resnet", "conv"):
        return dict(weights)
    # A view of memory in that order would do, but for cuDNN, which then turns it in each call.
    return {name: _channels_last(each) if each.ndim == 4 else each for name, each in weights.items()}


def _channels_last(weight: Any) -> Any:
    return weight.permute(3, 0, 1, 2).contiguous().permute(0, 3, 1, 2)


def _rms_norm(torch: Any, x: Any, weight: Any, eps: float) -> Any:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _rope(torch: Any, x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _llama(torch: Any, size: Transformer, x: Any, w: Weights, attend: bool) -> Any:
    functional = torch.nn.functional
    batch, tokens, _ = x.shape
    normed = _rms_norm(torch, x, w["input_norm.weight"], size.eps)
    heads = functional.linear(normed, w["qkv.weight"]).view(batch, tokens, -1, size.head)
    q, k, v = heads.split([size.heads, size.kv_heads, size.kv_heads], 2)
    cos, sin = (w[name][:tokens, None] for name in ("cos", "sin"))
    q, k = _rope(torch, q, cos, sin), _rope(torch, k, cos, sin)
    if attend:
        turned = (each.transpose(1, 2) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
        q = mixed.transpose(1, 2)
    x = x + functional.linear(q.reshape(batch, tokens, -1), w["o.weight"])
    gate, up = functional.linear(_rms_norm(torch, x, w["post_norm.weight"], size.eps), w["gate_up.weight"]).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, w["down.weight"])


def _vit(torch: Any, size: Transformer, x: Any, w: Weights, attend: bool) -> Any:
    functional = torch.nn.functional
    batch, tokens, hidden = x.shape

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, (hidden,), w[f"{name}.weight"], w[f"{name}.bias"], size.eps)

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    q, k, v = linear(norm(x, "norm1"), "qkv").view(batch, tokens, 3, size.heads, size.head).unbind(2)
    if attend:
        turned = (each.transpose(1, 2) for each in (q, k, v))
        q = functional.scaled_dot_product_attention(*turned).transpose(1, 2)
    x = x + linear(q.reshape(batch, tokens, hidden), "proj")
    return x + linear(functional.gelu(linear(norm(x, "norm2"), "fc1")), "fc2")


def _resnet(torch: Any, size: ResNetSize, x: Any, w: Weights, _attend: bool) -> Any:
    functional = torch.nn.functional

    def folded(x: Any, name: str, conv: ConvolutionSizes) -> Any:
        made = functional.conv2d(x, w[f"{name}.weight"], None, conv.stride, conv.padding)
        scale, shift = (w[f"{name}.{part}"][:, None, None] for part in ("scale", "shift"))
        return torch.addcmul(shift, made, scale)

    x = functional.relu(folded(x.permute(0, 3, 1, 2), "stem", size.stem))
    x = functional.max_pool2d(x, 3, 2, 1)
    for number, block in enumerate(size.bottlenecks):
        name, (first, second, third) = f"blocks.{number}", block.convolutions
        beside = folded(x, f"{name}.beside", block.beside) if block.beside else x
        x = functional.relu(folded(x, f"{name}.conv1", first))
        x = functional.relu(folded(x, f"{name}.conv2", second))
        x = functional.relu(folded(x, f"{name}.conv3", third) + beside)
    return functional.linear(x.mean((2, 3)), w["classes.weight"], w["classes.bias"])


def _mlp(torch: Any, _size: Any, x: Any, w: Weights, _attend: bool) -> Any:
    functional = torch.nn.functional
    return functional.linear(functional.silu(functional.linear(x, w["up.weight"])), w["down.weight"])


def _linear(torch: Any, _size: Any, x: Any, w: Weights, _attend: bool) -> Any:
    return torch.nn.functional.linear(x, w["linear.weight"])


def _conv(torch: Any, size: ConvolutionSizes, x: Any, w: Weights, _attend: bool) -> Any:
    made = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w["weight"], None, size.stride, size.padding)
    return made.permute(0, 2, 3, 1)


def _function(torch: Any, operation: Operation, x: Any, w: Weights, _attend: bool) -> Any:
    return operation.torch(torch, x, w)


FORMS = {
    "llama": _llama,
    "vit": _vit,
    "resnet": _resnet,
    "mlp": _mlp,
    "linear": _linear,
    "conv": _conv,
    "function": _function,
}
