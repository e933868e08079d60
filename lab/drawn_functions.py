"""Functions drawn at random as frameworks hand them to rules.

A function is products in any order of operands and axes, convolutions, reductions, chains of them by rows, or
elementwise; with casts, weights of few bits, epilogues, and extents that run time brings. All of it follows from
seed and number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm import te, tirx, topi

MOST_STEPS = 2**17  # multiplications, additions or elements of a function: emulated threads are slow
ROUNDINGS = 4  # of a drawn step in 16 bits, each of which may be off by its own half unit


@dataclass(frozen=True)
class DrawnFunction:
    """A drawn function: values of its symbolic extents to try, what it is made of, and how many steps round."""

    number: int
    function: tirx.PrimFunc
    sizes: tuple[dict[str, int], ...]
    arch: str
    features: tuple[str, ...]
    steps: int

    @property
    def text(self) -> str:
        """The function in TVMScript, its target's architecture, and the sizes to try."""
        return " ".join(map(str, (self.function.script(), self.arch, *self.sizes)))

    @property
    def slack(self) -> float:
        """Return by how many times the limit of one rounding its numbers may be off."""
        return 1.0 + ROUNDINGS * self.steps


@dataclass
class _Drawing:
    """A function in the making: its parameters, symbolic extents and their values."""

    choose: random.Random
    index: str
    features: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, tirx.Var] = field(default_factory=dict)
    inputs: list[te.Tensor] = field(default_factory=list)
    steps: int = 0

    def extent(self, name: str, value: int, symbolic: float = 0.2) -> Any:
        """Return an extent: a number, or with the given probability a symbol that has it as its value."""
        if name not in self.sizes:
            self.sizes[name] = value
            if self.choose.random() < symbolic:
                self.symbols[name] = tirx.Var(name, self.index)
                self.features.append("symbolic")
        return self.symbols.get(name, tirx.const(self.sizes[name], self.index))

    def operand(self, shape: list[Any], dtype: str) -> te.Tensor:
        """Add a parameter."""
        made = te.placeholder(shape, dtype, f"p{len(self.inputs)}")
        self.inputs.append(made)
        return made

    def maybe(self, probability: float, feature: str) -> bool:
        """Decide whether the function has a feature."""
        if self.choose.random() >= probability:
            return False
        self.features.append(feature)
        return True

    def one_of(self, *features: str) -> str:
        """Decide which of some features the function has."""
        chosen = self.choose.choice(features)
        self.features.append(chosen)
        return chosen


SIZES = (1, 2, 3, 5, 7, 8, 12, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 96, 100, 128, 130)


def _sizes(d: _Drawing, count: int) -> list[int]:
    """Draw extents whose product is within what the emulator can do."""
    found: list[int] = []
    for _ in range(count):
        room = MOST_STEPS // math.prod(found)
        found.append(d.choose.choice([size for size in SIZES if size <= room] or [1]))
    d.choose.shuffle(found)
    return found


def _epilogue(d: _Drawing, x: te.Tensor, most: int = 3) -> te.Tensor:
    """Add up to ``most`` elementwise steps behind a result."""
    for _ in range(d.choose.choice((0, 0, 1, 1, 2, most))):
        x = STEPS[d.one_of(*STEPS)](d, x)
        d.steps += 1
    return x


def _each(x: te.Tensor, element: Callable[..., Any], name: str) -> te.Tensor:
    return te.compute(x.shape, lambda *i: element(x(*i), *i), name)


def _is_float(x: te.Tensor) -> bool:
    return "float" in str(x.dtype)


def _with_last(d: _Drawing, x: te.Tensor) -> te.Tensor:
    bias = d.operand(list(x.shape[-1:]), str(x.dtype))
    return _each(x, lambda v, *i: v + bias(*i[-1:]), "biased")


def _with_same(d: _Drawing, x: te.Tensor) -> te.Tensor:
    other = d.operand(list(x.shape), str(x.dtype))
    first = d.choose.random() < 0.5
    return _each(x, lambda v, *i: other(*i) + v if first else v + other(*i), "added")


def _gated(d: _Drawing, x: te.Tensor) -> te.Tensor:
    other = d.operand(list(x.shape), str(x.dtype))
    return _each(x, lambda v, *i: v * other(*i), "gated")


def _relu(d: _Drawing, x: te.Tensor) -> te.Tensor:
    return _each(x, lambda v, *_: te.max(v, tirx.const(0, str(x.dtype))), "relu")


def _clipped(d: _Drawing, x: te.Tensor) -> te.Tensor:
    return topi.clip(x, -3, 3)


def _halved(d: _Drawing, x: te.Tensor) -> te.Tensor:
    factor = tirx.const(0.5 if _is_float(x) else 3, str(x.dtype))
    return _each(x, lambda v, *_: v * factor, "scaled")


def _silu(d: _Drawing, x: te.Tensor) -> te.Tensor:
    return topi.multiply(x, topi.sigmoid(x)) if _is_float(x) else x


def _tanh(d: _Drawing, x: te.Tensor) -> te.Tensor:
    return topi.tanh(x) if _is_float(x) else x


def _cast(d: _Drawing, x: te.Tensor) -> te.Tensor:
    return topi.cast(x, d.choose.choice(("float32", "float16")))


def _transposed(d: _Drawing, x: te.Tensor) -> te.Tensor:
    axes = list(range(len(x.shape)))
    d.choose.shuffle(axes)
    return topi.transpose(x, axes)


STEPS: dict[str, Callable[[_Drawing, te.Tensor], te.Tensor]] = {
    "bias": _with_last,
    "residual": _with_same,
    "gate": _gated,
    "relu": _relu,
    "clip": _clipped,
    "scale": _halved,
    "silu": _silu,
    "tanh": _tanh,
    "cast": _cast,
    "transpose": _transposed,
}


def _weights(d: _Drawing, shape: list[Any], dtype: str, along: int) -> te.Tensor:
    """Add an operand of a product, of ``dtype`` once it is read: as it is, or made from fewer bits on the way."""
    if dtype not in ("float16", "bfloat16", "float32"):
        return d.operand(shape, dtype)
    how = d.one_of("as it is", "as it is", "as it is", "as it is", "relu before", "int8", "cast", "int4")
    known = isinstance(shape[along], tirx.IntImm) and int(shape[along]) % 8 == 0
    if how == "relu before":
        return _relu(d, d.operand(shape, dtype))
    if how == "int8":
        codes = d.operand(shape, "int8")
        scales = d.operand([extent for place, extent in enumerate(shape) if place != along], dtype)
        return te.compute(
            shape,
            lambda *i: codes(*i).astype(dtype) * scales(*(axis for place, axis in enumerate(i) if place != along)),
            "wide",
        )
    if how == "int4" and known and dtype != "bfloat16":
        words = d.operand([e // 8 if place == along else e for place, e in enumerate(shape)], "uint32")

        def unpacked(*i: tirx.Var) -> Any:
            place = [axis // 8 if at == along else axis for at, axis in enumerate(i)]
            bits = words(*place) >> (i[along] % 8 * 4).astype("uint32")
            return (bits & tirx.const(15, "uint32")).astype(dtype) - tirx.const(7, dtype)

        return te.compute(shape, unpacked, "unpacked")
    if how == "cast":
        return topi.cast(d.operand(shape, "float32" if dtype != "float32" else "float16"), dtype)
    return d.operand(shape, dtype)


def _product(d: _Drawing) -> te.Tensor:
    """Sums of products: operands and result with their axes in any order, with or without a batch."""
    m, n, k = _sizes(d, 3)
    batch = [d.choose.choice((1, 2, 3, 4)) for _ in range(d.choose.choice((0, 0, 0, 1, 2)))]
    names = {"m": m, "n": n, "k": k, **{f"b{place}": size for place, size in enumerate(batch)}}
    extents = {name: d.extent(name, size) for name, size in names.items()}
    batches = [name for name in names if name.startswith("b")]
    if batches:
        d.features.append("batch")
    orders = [_order(d, [*batches, *axes]) for axes in (("m", "k"), ("k", "n"), ("m", "n"))]
    shared = bool(batches) and d.maybe(0.3, "weights of all")
    if shared:
        orders[1] = [name for name in orders[1] if not name.startswith("b")]
    dtype = d.one_of("float16", "float16", "bfloat16", "float32", "float32", "int8")
    summed = "int32" if dtype == "int8" else d.choose.choice((dtype, "float32"))
    first = _weights(d, [extents[name] for name in orders[0]], dtype, orders[0].index("k"))
    second = _weights(d, [extents[name] for name in orders[1]], dtype, orders[1].index("k"))
    axis = te.reduce_axis((0, extents["k"]), "k")
    turned = d.maybe(0.2, "written B A")

    def element(*index: tirx.Var) -> Any:
        at = {**dict(zip(orders[2], index)), "k": axis}
        read = ((first, orders[0]), (second, orders[1]))
        factors = [one(*(at[name] for name in order)).astype(summed) for one, order in read]
        return te.sum(factors[turned] * factors[not turned], [axis])

    return _epilogue(d, te.compute([extents[name] for name in orders[2]], element, "product"))


def _order(d: _Drawing, names: list[str]) -> list[str]:
    """Return axes as they lie in memory: as written, the last two exchanged, or in any order."""
    how = d.choose.random()
    if how < 0.35:
        names = [*names[:-2], names[-1], names[-2]]
    elif how < 0.45:
        names = d.choose.sample(names, len(names))
    return names


def _convolution(d: _Drawing) -> te.Tensor:
    """A convolution with channels first or last, strided, padded, dilated, in groups."""
    channels, filters = d.choose.choice((3, 4, 8, 16)), d.choose.choice((4, 8, 12, 16, 24))
    size, kernel = d.choose.choice((5, 7, 8)), d.choose.choice((1, 2, 3))
    stride, padding = d.choose.choice((1, 1, 2)), d.choose.choice((0, 1))
    dtype = d.one_of("float16", "float32")
    batch = d.extent("batch", d.choose.choice((1, 2, 3)))
    how = d.one_of("conv nhwc", "conv nchw", "conv grouped", "conv 1d", "conv 3d", "conv depthwise")
    out = "float32" if d.choose.random() < 0.4 else dtype
    if how == "conv nhwc":
        data = d.operand([batch, size, size, channels], dtype)
        weight = d.operand([kernel, kernel, channels, filters], dtype)
        x = topi.nn.conv2d_nhwc(data, weight, stride, padding, 1, out_dtype=out)
    elif how == "conv nchw":
        data = d.operand([batch, channels, size, size], dtype)
        weight = d.operand([filters, channels, kernel, kernel], dtype)
        x = topi.nn.conv2d_nchw(data, weight, stride, padding, d.choose.choice((1, 2)), out_dtype=out)
    elif how == "conv grouped":
        data, weight = d.operand([batch, 8, size, size], dtype), d.operand([filters, 4, kernel, kernel], dtype)
        x = topi.nn.group_conv2d_nchw(data, weight, stride, padding, 1, 2, out_dtype=out)
    elif how == "conv depthwise":
        data, weight = d.operand([batch, 8, size, size], dtype), d.operand([8, 1, kernel, kernel], dtype)
        x = topi.nn.depthwise_conv2d_nchw(data, weight, stride, padding, 1, out_dtype=out)
    elif how == "conv 1d":
        data, weight = d.operand([batch, channels, 20], dtype), d.operand([filters, channels, kernel], dtype)
        x = topi.nn.conv1d_ncw(data, weight, stride, padding, 1, out_dtype=out)
    else:
        data, weight = d.operand([batch, 4, 5, 5, channels], dtype), d.operand([2, 2, 2, channels, 8], dtype)
        x = topi.nn.conv3d_ndhwc(data, weight, stride, padding, 1, 1, out_dtype=out)
    return _epilogue(d, x)


def _rows(d: _Drawing) -> te.Tensor:
    """Reductions of some axes, and chains of them."""
    count = d.choose.choice((1, 2, 2, 3))
    shape = [d.extent(f"n{place}", size, 0.3) for place, size in enumerate(_sizes(d, count))]
    dtype = d.one_of("float16", "bfloat16", "float32")
    x = _epilogue(d, d.operand(shape, dtype), 2)
    count = len(x.shape)
    axes = sorted(d.choose.sample(range(count), d.choose.randint(1, count)))
    kept = d.choose.random() < 0.5
    how = d.one_of("sum", "max", "min", "mean", "squares", "softmax", "log softmax", "rms norm", "layer norm", "argmax")
    d.steps += 1
    if how == "softmax":
        return topi.nn.softmax(x, axis=d.choose.randrange(count))
    if how == "log softmax" and count == 2:
        return topi.nn.log_softmax(x)
    if how in ("rms norm", "layer norm") and count > 1:
        last = [x.shape[-1]]
        scale = d.operand(last, str(x.dtype))
        if how == "rms norm" or str(x.dtype) == "bfloat16":  # which topi has no layer_norm of
            return _epilogue(d, topi.nn.rms_norm(x, scale, [count - 1]), 1)
        return _epilogue(d, topi.nn.layer_norm(x, scale, d.operand(last, str(x.dtype)), [count - 1]), 1)
    # Of bfloat16 TVM compiles none for a CPU, where results are compared.
    if how == "argmax" and str(x.dtype) != "bfloat16":
        return topi.argmax(x, axis=axes[0])
    if how in ("max", "min", "argmax"):
        return _epilogue(d, (topi.min if how == "min" else topi.max)(x, axes, kept))
    if how == "squares":
        x = _each(x, lambda v, *_: v * v, "squared")
    if how == "mean":
        wide = topi.cast(x, "float32")
        total = topi.sum(wide, axes, kept)
        return _epilogue(d, _each(total, lambda v, *_: v / 7, "mean"))
    return _epilogue(d, topi.sum(x, axes, kept))


def _elements(d: _Drawing) -> te.Tensor:
    """Elementwise chains, and what moves elements: transposes, slices, concatenations, gathers of rows, broadcasts."""
    count = d.choose.choice((1, 2, 3, 4))
    shape = [d.extent(f"n{place}", size, 0.3) for place, size in enumerate(_sizes(d, count))]
    dtype = d.one_of("float16", "bfloat16", "float32", "int8", "int32")
    x = given = d.operand(shape, dtype)
    how = d.one_of("plain", "plain", "reversed", "joined", "repeated", "broadcast", "where", "flattened")
    if how == "reversed":
        x = te.compute(shape, lambda *i: given(shape[0] - 1 - i[0], *i[1:]), "reversed")
    elif how == "joined":
        x = topi.concatenate([x, d.operand(shape, dtype)], axis=d.choose.randrange(count))
    elif how == "repeated":
        x = topi.repeat(x, d.choose.choice((2, 3)), axis=d.choose.randrange(count))
    elif how == "broadcast":
        other = d.operand([shape[-1]], dtype)
        x = te.compute([5, *shape], lambda _, *i: given(*i) + other(i[-1]), "broadcast")
    elif how == "where":
        other = d.operand(shape, dtype)
        x = te.compute(
            shape,
            lambda *i: tirx.if_then_else(given(*i) > other(*i), given(*i) - other(*i), tirx.const(1, dtype)),
            "where",
        )
    elif how == "flattened":
        x = topi.reshape(x, [math.prod(shape[1:], start=shape[0])])
    return _epilogue(d, x, 4)


KINDS: dict[str, Callable[[_Drawing], te.Tensor]] = {
    "product": _product,
    "convolution": _convolution,
    "rows": _rows,
    "elements": _elements,
}


def draw_function(choose: random.Random, number: int, arch: str) -> DrawnFunction:
    """Draw a function: half of them products."""
    drawing = _Drawing(choose, choose.choice(("int32", "int64")))
    kind = drawing.one_of("product", "product", "product", "convolution", "rows", "elements")
    result = KINDS[kind](drawing)
    if any(result.same_as(given) for given in drawing.inputs):  # a step that changes no whole numbers
        result = _each(result, lambda v, *_: v, "copied")
    function = te.create_prim_func([*drawing.inputs, result])
    symbolic = {name: drawing.sizes[name] for name in drawing.symbols}
    smaller = {name: choose.randint(1, size) for name, size in symbolic.items()}
    sizes = (symbolic, smaller) if symbolic else ({},)
    return DrawnFunction(number, function, sizes, arch, tuple(dict.fromkeys(drawing.features)), drawing.steps)
