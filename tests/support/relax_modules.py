"""Ten Relax modules of the kinds that users compile, small: transformers, convolutions, losses, quantised weights.

Each is one function, ``forward``, of inputs and weights; a symbolic extent is given its value by :data:`SIZES`.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

SIZES = {"seq": 13, "batch": 3}


def exported(model: nn.Module, dtype: str, **inputs: tuple[list[int | str], str]) -> tvm.IRModule:
    """Make a module of a model of the frontend, its weights arguments of ``forward``."""
    model.to(dtype)
    specs = {name: nn.spec.Tensor(shape, kind) for name, (shape, kind) in inputs.items()}
    mod, _ = model.export_tvm(spec={"forward": specs})
    return mod


class Llama(nn.Module):
    """A decoder block: norms by rows, rotary places, attention of 4 heads over 2 pairs of keys and values, SwiGLU."""

    def __init__(self, hidden: int = 64, heads: int = 4, pairs: int = 2, inner: int = 96) -> None:
        self.heads, self.pairs, self.head = heads, pairs, hidden // heads
        self.norm = nn.RMSNorm(hidden, -1, 1e-5, bias=False)
        self.qkv = nn.Linear(hidden, (heads + 2 * pairs) * self.head, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.RMSNorm(hidden, -1, 1e-5, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, mask: nn.Tensor) -> nn.Tensor:
        """The block's output for one sequence."""
        x = op.add(x, self.o(self.attend(self.norm(x), cos, sin, mask)))
        gate, up = op.split(self.gate_up(self.norm2(x)), 2, axis=-1)
        return op.add(x, self.down(op.multiply(op.silu(gate), up)))

    def attend(self, x: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, mask: nn.Tensor) -> nn.Tensor:
        """Attention by products and a softmax in float32."""
        one, seq, _ = x.shape
        parts = op.reshape(self.qkv(x), (one, seq, self.heads + 2 * self.pairs, self.head))
        q, k, v = op.split(parts, [self.heads, self.heads + self.pairs], axis=2)
        q, k = (op.permute_dims(self.turned(part, cos, sin), [0, 2, 1, 3]) for part in (q, k))
        k, v = (op.repeat(part, self.heads // self.pairs, axis=1) for part in (k, op.permute_dims(v, [0, 2, 1, 3])))
        scores = op.matmul(q, op.permute_dims(k, [0, 1, 3, 2])) * 0.25
        weights = op.softmax(op.astype(op.add(scores, mask), "float32"), axis=-1)
        out = op.matmul(op.astype(weights, "float16"), v)
        return op.reshape(op.permute_dims(out, [0, 2, 1, 3]), (one, seq, self.heads * self.head))

    def turned(self, x: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor) -> nn.Tensor:
        """Rotary places."""
        low, high = op.split(x, 2, axis=-1)
        return op.add(op.multiply(x, cos), op.multiply(op.concat([op.negative(high), low], dim=-1), sin))


def llama_block() -> tvm.IRModule:
    """A Llama layer with a symbolic sequence, float16."""
    return exported(
        Llama(),
        "float16",
        x=([1, "seq", 64], "float16"),
        cos=(["seq", 1, 16], "float16"),
        sin=(["seq", 1, 16], "float16"),
        mask=([1, 1, "seq", "seq"], "float16"),
    )


class Vit(nn.Module):
    """An encoder block with biases, layer norms and GELU."""

    def __init__(self, hidden: int = 48, heads: int = 3) -> None:
        self.heads, self.head = heads, hidden // heads
        self.norm, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """The block's output for a batch of images in patches."""
        batch, patches, hidden = x.shape
        parts = op.reshape(self.qkv(self.norm(x)), (batch, patches, 3, self.heads, self.head))
        q, k, v = (op.squeeze(part, 0) for part in op.split(op.permute_dims(parts, [2, 0, 3, 1, 4]), 3, axis=0))
        weights = op.softmax(op.matmul(q, op.permute_dims(k, [0, 1, 3, 2])) * 0.25, axis=-1)
        out = op.reshape(op.permute_dims(op.matmul(weights, v), [0, 2, 1, 3]), (batch, patches, hidden))
        x = op.add(x, self.proj(out))
        return op.add(x, self.down(op.gelu(self.up(self.norm2(x)))))


def vit_block() -> tvm.IRModule:
    """A vision transformer's layer, two images of 17 patches, float16."""
    return exported(Vit(), "float16", x=([2, 17, 48], "float16"))


class Mlp(nn.Module):
    """Two layers with a bias and a ReLU between them."""

    def __init__(self, inner: int = 80) -> None:
        self.up, self.down = nn.Linear(40, inner), nn.Linear(inner, 24)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """The second layer's output."""
        return self.down(op.relu(self.up(x)))


def mlp() -> tvm.IRModule:
    """A perceptron of float32."""
    return exported(Mlp(), "float32", x=([33, 40], "float32"))


def mlp_bfloat16() -> tvm.IRModule:
    """A perceptron of bfloat16 whose rows are known at run time only."""
    return exported(Mlp(64), "bfloat16", x=(["batch", 40], "bfloat16"))


def conv_net() -> tvm.IRModule:
    """A residual block of convolutions with channels last, the mean of the image, a classifier; float16."""
    return made_of(
        {
            "x": ((2, 9, 9, 8), "float16"),
            "w1": ((16, 3, 3, 8), "float16"),
            "b1": ((1, 1, 1, 16), "float16"),
            "w2": ((16, 3, 3, 16), "float16"),
            "w3": ((16, 1, 1, 8), "float16"),
            "head": ((10, 16), "float16"),
        },
        _conv_net,
    )


def _conv_net(x, w1, b1, w2, w3, head):
    layout = {"data_layout": "NHWC", "kernel_layout": "OHWI", "out_layout": "NHWC"}
    y = relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w1, strides=2, padding=1, **layout), b1))
    y = relax.op.nn.conv2d(y, w2, padding=1, **layout)
    y = relax.op.nn.relu(relax.op.add(y, relax.op.nn.conv2d(x, w3, strides=2, **layout)))
    return relax.op.linear(relax.op.mean(y, axis=[1, 2]), head)


def conv_net_nchw() -> tvm.IRModule:
    """Convolutions with channels first: plain, by channel, in groups, a maximum of windows; float32."""
    return made_of(
        {
            "x": ((1, 4, 12, 10), "float32"),
            "w1": ((8, 4, 3, 3), "float32"),
            "depthwise": ((8, 1, 3, 3), "float32"),
            "grouped": ((8, 4, 1, 1), "float32"),
        },
        _conv_net_nchw,
    )


def _conv_net_nchw(x, w1, depthwise, grouped):
    y = relax.op.nn.relu(relax.op.nn.conv2d(x, w1, padding=1))
    y = relax.op.clip(relax.op.nn.conv2d(y, depthwise, padding=1, groups=8), 0.0, 6.0)
    y = relax.op.nn.max_pool2d(y, pool_size=(2, 2), strides=(2, 2))
    return relax.op.nn.conv2d(y, grouped, groups=2)


def embedding_loss() -> tvm.IRModule:
    """Tokens looked up, projected onto the vocabulary, and their cross entropy; float32, any number of tokens."""
    return made_of(
        {
            "tokens": (("seq",), "int32"),
            "targets": (("seq",), "int32"),
            "table": ((50, 32), "float32"),
            "head": ((50, 32), "float32"),
        },
        _embedding_loss,
    )


def _embedding_loss(tokens, targets, table, head):
    scores = relax.op.linear(relax.op.take(table, tokens, axis=0), head)
    return relax.op.nn.nll_loss(relax.op.nn.log_softmax(scores, axis=-1), targets, reduction="mean")


def quantised_linear() -> tvm.IRModule:
    """Weights of 8 bits with a scale a row, and of 4 bits, 8 to a word with a scale for 32 of them; float16."""
    return made_of(
        {
            "x": (("seq", 64), "float16"),
            "w8": ((48, 64), "int8"),
            "s8": ((48, 1), "float16"),
            "w4": ((40, 6), "uint32"),
            "s4": ((40, 2), "float16"),
        },
        _quantised_linear,
    )


def _quantised_linear(x, w8, s8, w4, s4):
    eight = relax.op.multiply(relax.op.astype(w8, "float16"), s8)
    y = relax.op.nn.relu(relax.op.linear(x, eight))
    four = relax.BlockBuilder.current().call_te(_unpacked, w4, s4, primfunc_name_hint="unpack")
    return relax.op.linear(y, four)


def _unpacked(words: te.Tensor, scales: te.Tensor) -> te.Tensor:
    def element(i: tirx.Var, j: tirx.Var) -> tvm.ir.Expr:
        nibble = (words[i, j // 8] >> (j % 8 * 4).astype("uint32")) & tirx.const(15, "uint32")
        return (nibble.astype("float16") - tirx.const(7, "float16")) * scales[i, j // 32]

    return te.compute((40, 48), element, name="unpack")


def attention_batch() -> tvm.IRModule:
    """Attention with scores above the diagonal left out, batch and sequence both symbolic; float32."""
    return made_of(
        {
            "q": (("batch", 2, "seq", 16), "float32"),
            "k": (("batch", 2, "seq", 16), "float32"),
            "v": (("batch", 2, "seq", 16), "float32"),
        },
        _attention_batch,
    )


def _attention_batch(q, k, v):
    scores = relax.op.matmul(q, relax.op.permute_dims(k, [0, 1, 3, 2]))
    # What lies above the diagonal gets a weight of exp(-1e4) = 0.
    ones = relax.op.ones_like(scores)
    above = relax.op.subtract(ones, relax.op.tril(ones))
    lowered = relax.op.subtract(scores, relax.op.multiply(above, relax.const(1e4, "float32")))
    return relax.op.matmul(relax.op.nn.softmax(lowered, axis=-1), v)


def odds_and_ends() -> tvm.IRModule:
    """What few rules take: cumulative sums, sorted indices, a variance, a Gram matrix, a 1-D convolution by groups."""
    return made_of(
        {"x": ((6, 32), "float32"), "signal": ((2, 8, 20), "float32"), "taps": ((12, 8, 3), "float32")},
        _odds_and_ends,
    )


def _odds_and_ends(x, signal, taps):
    total = relax.op.cumsum(x, axis=1)
    order = relax.op.argsort(x, axis=1, dtype="int32")
    spread = relax.op.add(relax.op.variance(x, axis=[1]), relax.op.max(total, axis=[1]))
    gram = relax.op.matmul(x, relax.op.permute_dims(x))
    filtered = relax.op.nn.group_norm(
        relax.op.nn.conv1d(signal, taps, padding=1),
        relax.op.ones((12,), "float32"),
        relax.op.zeros((12,), "float32"),
        num_groups=3,
        channel_axis=1,
        axes=[2],
    )
    return relax.Tuple([total, order, spread, gram, filtered])


MODULES: dict[str, Callable[[], tvm.IRModule]] = {
    make.__name__: make
    for make in (
        llama_block,
        vit_block,
        mlp,
        mlp_bfloat16,
        conv_net,
        conv_net_nchw,
        embedding_loss,
        quantised_linear,
        attention_batch,
        odds_and_ends,
    )
}


def made_of(inputs: dict[str, tuple[tuple[int | str, ...], str]], body: Callable[..., relax.Expr]) -> tvm.IRModule:
    """Make a module of a function of tensors, given by shape and dtype; extents of one name are one symbol."""
    symbols = {
        extent: tirx.Var(extent, "int64") for shape, _ in inputs.values() for extent in shape if isinstance(extent, str)
    }
    parameters = [
        relax.Var(name, relax.TensorType([symbols.get(extent, extent) for extent in shape], dtype))
        for name, (shape, dtype) in inputs.items()
    ]
    builder = relax.BlockBuilder()
    with builder.function("forward", parameters):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(body(*parameters)))
        builder.emit_func_output(out)
    return builder.finalize()


def arrays_of(mod: tvm.IRModule, seed: int = 0) -> list[np.ndarray]:
    """Draw what ``forward`` is given, at :data:`SIZES`: halves of normal numbers, and indices below 50."""
    random, drawn = np.random.default_rng(seed), []
    for parameter in mod["forward"].params:
        shape = [SIZES[extent.name] if isinstance(extent, tirx.Var) else int(extent) for extent in parameter.ty.shape]
        name = str(parameter.ty.dtype)
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        values = random.integers(0, 50, shape) if dtype.kind in "iu" else random.standard_normal(shape) / 2
        drawn.append(values.astype(dtype))
    return drawn


def functions_of(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    """List a module's functions in TIR, by name."""
    return {name.name_hint: one for name, one in mod.functions_items() if isinstance(one, tirx.PrimFunc)}


def numbered(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give each parameter a name of its own: x times its own transpose has two called x, a split as many results."""
    own = {p: tirx.Var(f"{p.name}_{place}", p.ty) for place, p in enumerate(function.params)}
    return tvm_ffi.structural_map(function, (tirx.Var, lambda var: own.get(var, var)))
