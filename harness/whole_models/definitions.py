"""Models by ``relax.frontend.nn``: a Llama layer, a ViT block, a ResNet-50, an MLP; and their linears and convolutions.

Weights are float16, drawn at random, of the shapes of the models that they are named after. One extent of each may be
any: rows of tokens, or a batch; one build takes all of its values, where the definition says that it is symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tensorir_ladder.harness.whole_models.arithmetic import DTYPE, MASKED, ConvolutionSizes
from tensorir_ladder.harness.whole_models.functions import OneOperation, operations
from tensorir_ladder.schedules.errors import IllegalWorkload

ENTRY = "forward"


@dataclass(frozen=True)
class Transformer:
    """Extents of a transformer's layer: of its stream, its heads, and its feed-forward part."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    eps: float = 1e-5

    @property
    def scale(self) -> float:
        """Return the factor that scores are multiplied by."""
        return self.head**-0.5


LLAMA_3_8B = Transformer(hidden=4096, heads=32, kv_heads=8, head=128, ffn=14336)
SMALL_LLAMA = Transformer(hidden=64, heads=4, kv_heads=2, head=16, ffn=96)
VIT_L = Transformer(hidden=1024, heads=16, kv_heads=16, head=64, ffn=4096, eps=1e-6)
SMALL_VIT = Transformer(hidden=64, heads=4, kv_heads=4, head=16, ffn=96, eps=1e-6)
POSITIONS, SMALL_POSITIONS, THETA = 8192, 64, 500_000.0
VIT_TOKENS, SMALL_VIT_TOKENS = 197, 10


class LlamaLayer(nn.Module):
    """Make a layer's output of ``x`` [1, seq, hidden]: causal attention over these tokens, SwiGLU, both with residuals.

    Queries, keys and values are one product, gate and up another, as inference engines have them.
    """

    def __init__(self, size: Transformer, positions: int) -> None:
        self.size = size
        self.input_norm = nn.RMSNorm(size.hidden, -1, size.eps, bias=False, dtype=DTYPE)
        self.qkv = nn.Linear(size.hidden, (size.heads + 2 * size.kv_heads) * size.head, bias=False, dtype=DTYPE)
        self.o = nn.Linear(size.heads * size.head, size.hidden, bias=False, dtype=DTYPE)
        self.post_norm = nn.RMSNorm(size.hidden, -1, size.eps, bias=False, dtype=DTYPE)
        self.gate_up = nn.Linear(size.hidden, 2 * size.ffn, bias=False, dtype=DTYPE)
        self.down = nn.Linear(size.ffn, size.hidden, bias=False, dtype=DTYPE)
        self.cos = nn.Parameter((positions, size.head // 2), dtype=DTYPE)
        self.sin = nn.Parameter((positions, size.head // 2), dtype=DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        size = self.size
        heads = _heads(self.qkv(self.input_norm(x)), size.heads + 2 * size.kv_heads)
        q, k, v = op.split(heads, [size.heads, size.heads + size.kv_heads], axis=2)
        q, k = (op.tensor_expr_op(_rope, "rope", [each, self.cos, self.sin]) for each in (q, k))
        k, v = (op.repeat(each, size.heads // size.kv_heads, axis=2) for each in (k, v))
        x = x + self.o(_attention(q, k, v, size.scale, causal=True))
        gate, up = op.split(self.gate_up(self.post_norm(x)), 2, axis=-1)
        return x + self.down(op.silu(gate) * up)


class VitBlock(nn.Module):
    """Make a block's output of ``x`` [batch, tokens, hidden]: attention of all tokens, gelu, both with residuals."""

    def __init__(self, size: Transformer) -> None:
        self.size = size
        self.norm1 = nn.LayerNorm(size.hidden, eps=size.eps, dtype=DTYPE)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, dtype=DTYPE)
        self.proj = nn.Linear(size.hidden, size.hidden, dtype=DTYPE)
        self.norm2 = nn.LayerNorm(size.hidden, eps=size.eps, dtype=DTYPE)
        self.fc1 = nn.Linear(size.hidden, size.ffn, dtype=DTYPE)
        self.fc2 = nn.Linear(size.ffn, size.hidden, dtype=DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        heads = self.size.heads
        q, k, v = op.split(_heads(self.qkv(self.norm1(x)), 3 * heads), 3, axis=2)
        x = x + self.proj(_attention(q, k, v, self.size.scale, causal=False))
        return x + self.fc2(op.gelu(self.fc1(self.norm2(x))))


class Mlp(nn.Module):
    """Make ``down(silu(up(x)))`` of ``x`` [rows, hidden]."""

    def __init__(self, hidden: int, ffn: int) -> None:
        self.up = nn.Linear(hidden, ffn, bias=False, dtype=DTYPE)
        self.down = nn.Linear(ffn, hidden, bias=False, dtype=DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        return self.down(op.silu(self.up(x)))


class OneLinear(nn.Module):
    """Make one linear layer's output of ``x`` [rows, k]."""

    def __init__(self, n: int, k: int) -> None:
        self.linear = nn.Linear(k, n, bias=False, dtype=DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        return self.linear(x)


class OneConvolution(nn.Module):
    """Make one convolution's output of ``x`` [batch, height, width, channels]."""

    def __init__(self, conv: ConvolutionSizes) -> None:
        self.conv = conv
        self.weight = nn.Parameter((conv.window, conv.window, conv.channels_in, conv.channels_out), dtype=DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        return _convolve(x, self.weight, self.conv)


class FoldedConvolution(nn.Module):
    """Convolve, then scale and shift each channel, which is what inference leaves of a batch norm."""

    def __init__(self, conv: ConvolutionSizes) -> None:
        self.conv = conv
        self.weight = nn.Parameter((conv.window, conv.window, conv.channels_in, conv.channels_out), dtype=DTYPE)
        self.scale = nn.Parameter((conv.channels_out,), dtype=DTYPE)
        self.shift = nn.Parameter((conv.channels_out,), dtype=DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        return _convolve(x, self.weight, self.conv) * self.scale + self.shift


@dataclass(frozen=True)
class ResNetSize:
    """Extents of a ResNet of bottlenecks: pixels of a side, blocks of each stage, the first stage's width, classes."""

    pixels: int = 224
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    @property
    def stem(self) -> ConvolutionSizes:
        """The first convolution; a pooling follows it."""
        return ConvolutionSizes(self.pixels, 3, self.width, 7, 2)

    @property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """The residual blocks, in their order."""
        side, channels, found = self.pixels // 4, self.width, []
        for stage, count in enumerate(self.blocks):
            for number in range(count):
                found.append(Bottleneck(side, channels, self.width << stage, 2 if stage and not number else 1))
                side, channels = side // found[-1].stride, found[-1].channels_out
        return tuple(found)

    @property
    def convolutions(self) -> tuple[ConvolutionSizes, ...]:
        """All convolutions, in their order."""
        blocks = [each for block in self.bottlenecks for each in (*block.convolutions, block.beside) if each]
        return (self.stem, *blocks)


@dataclass(frozen=True)
class Bottleneck:
    """A residual block: 1x1, 3x3 and 1x1 convolutions beside the input, or beside a convolution of it."""

    size: int
    channels_in: int
    width: int
    stride: int

    @property
    def channels_out(self) -> int:
        """Four times the width."""
        return 4 * self.width

    @property
    def convolutions(self) -> tuple[ConvolutionSizes, ...]:
        """The three in turn."""
        return (
            ConvolutionSizes(self.size, self.channels_in, self.width, 1),
            ConvolutionSizes(self.size, self.width, self.width, 3, self.stride),
            ConvolutionSizes(self.size // self.stride, self.width, self.channels_out, 1),
        )

    @property
    def beside(self) -> ConvolutionSizes | None:
        """The input's own, where its extents are not the output's."""
        if self.stride == 1 and self.channels_in == self.channels_out:
            return None
        return ConvolutionSizes(self.size, self.channels_in, self.channels_out, 1, self.stride)


class ResidualBlock(nn.Module):
    """Make a bottleneck's output."""

    def __init__(self, size: Bottleneck) -> None:
        self.conv1, self.conv2, self.conv3 = map(FoldedConvolution, size.convolutions)
        self.beside = FoldedConvolution(size.beside) if size.beside else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        made = self.conv3(op.relu(self.conv2(op.relu(self.conv1(x)))))
        return op.relu(made + (self.beside(x) if self.beside else x))


class ResNet(nn.Module):
    """Make class scores of pictures ``x`` [batch, height, width, 3]."""

    def __init__(self, size: ResNetSize) -> None:
        self.stem = FoldedConvolution(size.stem)
        self.blocks = nn.ModuleList([ResidualBlock(block) for block in size.bottlenecks])
        self.classes = nn.Linear(size.bottlenecks[-1].channels_out, size.classes, dtype=DTYPE)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        x = _relax(relax.op.nn.max_pool2d, op.relu(self.stem(x)), (3, 3), (2, 2), (1, 1), layout="NHWC", name="pool")
        for block in self.blocks:
            x = block(x)
        x = _relax(relax.op.mean, op.astype(x, "float32"), [1, 2], name="mean")
        return self.classes(op.astype(x, DTYPE))


def _heads(x: nn.Tensor, count: int) -> nn.Tensor:
    batch, tokens, channels = x.shape
    return op.reshape(x, (batch, tokens, count, channels // count))


def _attention(q: nn.Tensor, k: nn.Tensor, v: nn.Tensor, scale: float, causal: bool) -> nn.Tensor:
    """Attend, by two products and a softmax in float32: [batch, tokens, heads, head] to [batch, tokens, hidden]."""

    def scored(scores: te.Tensor) -> te.Tensor:
        def score(*at: tirx.Var) -> tirx.PrimExpr:
            value = scores(*at).astype("float32") * scale
            return tirx.if_then_else(at[-1] <= at[-2], value, tirx.const(MASKED, "float32")) if causal else value

        return te.compute(scores.shape, score, name="scored")

    batch, tokens, heads, head = q.shape
    q, v = (op.permute_dims(each, [0, 2, 1, 3]) for each in (q, v))
    scores = op.tensor_expr_op(scored, "scored", [op.matmul(q, op.permute_dims(k, [0, 2, 3, 1]))])
    weights = op.astype(op.softmax(scores, axis=-1), DTYPE)
    return op.reshape(op.permute_dims(op.matmul(weights, v), [0, 2, 1, 3]), (batch, tokens, heads * head))


def _rope(x: te.Tensor, cos: te.Tensor, sin: te.Tensor) -> te.Tensor:
    """Turn the halves of each head against each other by their token's angles."""
    half = int(x.shape[-1]) // 2

    def turned(batch: tirx.Var, token: tirx.Var, head: tirx.Var, at: tirx.Var) -> tirx.PrimExpr:
        own = x[batch, token, head, at] * cos[token, at % half]
        first = own - x[batch, token, head, at + half] * sin[token, at % half]
        second = own + x[batch, token, head, at - half] * sin[token, at % half]
        return tirx.if_then_else(at < half, first, second)

    return te.compute(x.shape, turned, name="rope")


def _convolve(x: nn.Tensor, weight: nn.Tensor, conv: ConvolutionSizes) -> nn.Tensor:
    layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
    strides, padding = (conv.stride, conv.stride), (conv.padding, conv.padding)
    return _relax(relax.op.nn.conv2d, x, weight, strides, padding, **layouts, name="conv2d")


def _relax(function: Callable[..., Any], *arguments: Any, name: str, **named: Any) -> nn.Tensor:
    given = [each._expr if isinstance(each, nn.Tensor) else each for each in arguments]
    return op.wrap_nested(function(*given, **named), name)


@dataclass(frozen=True)
class Model:
    """A model to build: its module, its input's shape by the free extent, and what that extent is called.

    ``kind`` names the functions of :mod:`.reference` and :mod:`.eager` that compute the same. ``symbolic``: one build
    takes all values of the extent; otherwise each needs its own. ``tokens`` is the extent by which scores of attention
    are known: its name or its number, or None.
    """

    name: str
    kind: str
    size: Any
    extent: str
    module: Callable[[], nn.Module] = field(compare=False, repr=False)
    shape: Callable[[Any], tuple[Any, ...]] = field(compare=False, repr=False)
    symbolic: bool = True
    tokens: str | int | None = None
    most: int = 2**31 - 1

    def exported(self, value: int) -> tuple[tvm.IRModule, dict[str, tuple[int, ...]]]:
        """Make the Relax module, and the shapes of its parameters by name, in their order.

        ``value`` is the extent where it is no symbol.
        """
        shape = [*self.shape(self.extent if self.symbolic else value)]
        mod, parameters = self.module().export_tvm({ENTRY: {"x": nn.spec.Tensor(shape, DTYPE)}})
        return mod, {name: tuple(map(int, parameter.shape)) for name, parameter in parameters}

    def flops(self, value: int) -> int:
        """Count two for each multiplication of products and convolutions, of attention's all tokens with all."""
        return FLOPS[self.kind](self, value)

    def check(self, value: int) -> None:
        """Raise IllegalWorkload for a value that the model does not take."""
        if not 1 <= value <= self.most:
            raise IllegalWorkload(
                f"{self.name} takes no such {self.extent}",
                value=value,
                limit=f"1 to {self.most}",
                remedy=f"give another --{self.extent}",
            )


def _linear_flops(shapes: Iterable[tuple[int, int]], rows: int) -> int:
    return 2 * rows * sum(n * k for n, k in shapes)


def _transformer_flops(size: Transformer, rows: int, tokens: int, gated: bool) -> int:
    qkv, wide = (size.heads + 2 * size.kv_heads) * size.head, size.heads * size.head
    shapes = [(qkv, size.hidden), (size.hidden, wide), ((1 + gated) * size.ffn, size.hidden), (size.hidden, size.ffn)]
    return _linear_flops(shapes, rows) + 4 * rows * tokens * wide


def _convolution_flops(convolutions: Iterable[ConvolutionSizes], batch: int) -> int:
    return sum(
        2 * batch * (conv.size // conv.stride) ** 2 * conv.channels_out * conv.window**2 * conv.channels_in
        for conv in convolutions
    )


FLOPS: dict[str, Callable[[Model, int], int]] = {
    "llama": lambda model, seq: _transformer_flops(model.size, seq, seq, gated=True),
    "vit": lambda model, batch: _transformer_flops(model.size, batch * model.tokens, model.tokens, gated=False),
    "resnet": lambda model, batch: (
        _convolution_flops(model.size.convolutions, batch)
        + 2 * batch * model.size.bottlenecks[-1].channels_out * model.size.classes
    ),
    "mlp": lambda model, seq: _linear_flops([model.size] * 2, seq),
    "linear": lambda model, rows: _linear_flops([model.size], rows),
    "conv": lambda model, batch: _convolution_flops([model.size], batch),
    "function": lambda model, rows: model.size.flops * rows,
}
LINEARS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SMALL_LINEARS = ((96, 64), (64, 96))
SMALL_RESNET = ResNetSize(pixels=32, blocks=(1, 1), width=8, classes=16)


def _llama(small: bool) -> list[Model]:
    size, positions = (SMALL_LLAMA, SMALL_POSITIONS) if small else (LLAMA_3_8B, POSITIONS)
    shape = lambda seq: (1, seq, size.hidden)  # noqa: E731
    model = Model("llama-layer", "llama", size, "seq", lambda: LlamaLayer(size, positions), shape, most=positions)
    return [replace(model, tokens="seq")]


def _vit(small: bool) -> list[Model]:
    size, tokens = (SMALL_VIT, SMALL_VIT_TOKENS) if small else (VIT_L, VIT_TOKENS)
    shape = lambda batch: (batch, tokens, size.hidden)  # noqa: E731
    return [Model("vit-block", "vit", size, "batch", lambda: VitBlock(size), shape, tokens=tokens)]


def _resnet(small: bool) -> list[Model]:
    size = SMALL_RESNET if small else ResNetSize()
    shape = lambda batch: (batch, size.pixels, size.pixels, 3)  # noqa: E731
    return [Model("resnet50", "resnet", size, "batch", lambda: ResNet(size), shape, symbolic=False, most=1024)]


def _mlp(small: bool) -> list[Model]:
    hidden, ffn = (64, 96) if small else (4096, 11008)
    return [Model("mlp", "mlp", (hidden, ffn), "seq", lambda: Mlp(hidden, ffn), lambda seq: (seq, hidden))]


def _linears(small: bool) -> list[Model]:
    return [
        Model(
            f"linear-{n}x{k}", "linear", (n, k), "rows", lambda n=n, k=k: OneLinear(n, k), lambda rows, k=k: (rows, k)
        )
        for n, k in (SMALL_LINEARS if small else LINEARS)
    ]


def _convolutions(small: bool) -> list[Model]:
    return [
        Model(
            f"conv-{conv}",
            "conv",
            conv,
            "batch",
            lambda conv=conv: OneConvolution(conv),
            lambda batch, conv=conv: (batch, conv.size, conv.size, conv.channels_in),
            symbolic=False,
            most=1024,
        )
        for conv in dict.fromkeys((SMALL_RESNET if small else ResNetSize()).convolutions)
    ]


def _functions(small: bool) -> list[Model]:
    return [
        Model(f"function-{each.name}", "function", each, "rows", lambda each=each: OneOperation(each), each.shape)
        for each in operations(small)
    ]


@dataclass(frozen=True)
class Family:
    """Say what a name of ``--model`` means: models, small or of their own size, and values of their free extent."""

    models: Callable[[bool], list[Model]]
    extent: str
    values: tuple[int, ...]
    small_values: tuple[int, ...]


FAMILIES = {
    "llama-layer": Family(_llama, "seq", (1, 16, 128, 512, 2048, 8192), (7,)),
    "vit-block": Family(_vit, "batch", (1, 8, 32), (1,)),
    "resnet50": Family(_resnet, "batch", (32,), (1,)),
    "mlp": Family(_mlp, "seq", (1, 16, 128, 512, 2048, 8192), (7,)),
    "llama-linears": Family(_linears, "rows", (1, 16, 64, 128, 512, 2048, 8192), (7,)),
    "resnet50-convs": Family(_convolutions, "batch", (32,), (1,)),
    "functions": Family(_functions, "rows", (4096,), (7,)),
}
