"""Relax modules drawn at random, of the operators that users' models have: one in the middle, others around it.

A module is a chain. Each operator of :data:`OPERATORS` takes the tensor at hand and returns the next one, or None where
it does not apply; weights, masks and indices become parameters. All of it follows from seed and number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, tirx
from tvm.relax import op as R

from tensorir_ladder.kernels.codegen.arithmetic import evaluate
from tensorir_ladder.lab.function_check import eps_of, is_float, numpy_of

FLOATS = ("float16", "float16", "float32", "float32", "bfloat16")
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 31, 32, 33, 64, 100)
MOST_ELEMENTS = 2**12  # of the first tensor: emulated threads are slow
MOST_GROWN = 2**14  # of any other
EPSILON = 1e-2  # of a norm: a row of 2 that are almost the same is as ill-conditioned as that is small

Draw = Callable[["Drawing", Any], Any]


@dataclass(frozen=True)
class ModuleParameter:
    """A parameter of a drawn module; its numbers are normal, positive or, as indices are, below ``most``."""

    shape: tuple[Any, ...]
    dtype: str
    positive: bool = False
    most: int | None = None

    def array(self, random: np.random.Generator, values: dict[tirx.Var, float]) -> np.ndarray:
        """Draw its numbers."""
        shape = [_size(extent, values) for extent in self.shape]
        dtype = numpy_of(self.dtype)
        if is_float(dtype):
            numbers = random.standard_normal(shape)
            return (np.abs(numbers) + 0.25 if self.positive else numbers).astype(dtype)
        if self.dtype == "bool":
            return random.integers(0, 2, shape).astype(dtype)
        least, most = (-3, 4) if self.most is None else (0, self.most)
        return random.integers(least, most, shape).astype(dtype)


@dataclass(frozen=True)
class DrawnModule:
    """A drawn module: its parameters, values of its symbolic extents to try, what it is made of."""

    number: int
    module: tvm.IRModule
    parameters: tuple[ModuleParameter, ...]
    symbols: tuple[tirx.Var, ...]
    sizes: tuple[dict[str, int], ...]
    arch: str
    features: tuple[str, ...]
    narrow: str

    @property
    def text(self) -> str:
        """The module in TVMScript, its target's architecture, and the sizes to try."""
        return " ".join(map(str, (self.module.script(), self.arch, *self.sizes)))

    def calls(self) -> list[list[np.ndarray]]:
        """Draw numbers for its parameters at each of the sizes."""
        random = np.random.default_rng(self.number)
        values: list[dict[tirx.Var, float]] = [{var: sizes[var.name] for var in self.symbols} for sizes in self.sizes]
        return [[parameter.array(random, one) for parameter in self.parameters] for one in values]


@dataclass
class Drawing:
    """A module in the making."""

    choose: random.Random
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)
    given: list[relax.Var] = field(default_factory=list)
    parameters: list[ModuleParameter] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    symbols: list[tirx.Var] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    dtypes: set[str] = field(default_factory=set)

    def operand(self, shape: Any, dtype: str, **numbers: Any) -> relax.Var:
        """Add a parameter."""
        self.parameters.append(ModuleParameter(tuple(shape), dtype, **numbers))
        self.given.append(relax.Var(f"p{len(self.given)}", relax.TensorType(tuple(shape), dtype)))
        return self.given[-1]

    def like(self, x: Any, shape: Any = None, **numbers: Any) -> relax.Var:
        """Add a parameter of a tensor's dtype and, without another one, of its shape."""
        return self.operand(shape_of(x) if shape is None else shape, dtype_of(x), **numbers)

    def emit(self, expression: Any) -> relax.Var:
        """Add an operation."""
        return self.builder.emit(expression)

    def axis(self, x: Any, least: int = 1) -> int | None:
        """Choose an axis of a constant extent of ``least`` or more; None where there is none."""
        axes = [axis for axis, extent in enumerate(shape_of(x)) if number_of(extent) >= least]
        return self.choose.choice(axes) if axes else None

    def size(self, x: Any) -> int:
        """Return how many elements a tensor has."""
        values: dict[tirx.Var, float] = {var: self.sizes[var.name] for var in self.symbols}
        return math.prod(_size(extent, values) for extent in shape_of(x))


def shape_of(x: Any) -> list[Any]:
    """Return a tensor's extents."""
    return list(x.ty.shape)


def dtype_of(x: Any) -> str:
    """Return a tensor's dtype."""
    return str(x.ty.dtype)


def number_of(extent: Any) -> int:
    """Return a constant extent; 0 for one that run time brings."""
    return int(extent) if isinstance(extent, (int, tirx.IntImm)) else 0


def _size(extent: Any, values: dict[tirx.Var, float]) -> int:
    """Return an extent, where symbols have these values."""
    found = number_of(extent) or evaluate(extent, values)
    assert found, f"{extent}: no extent at {values}"
    return int(found)


def _constants(x: Any, places: slice) -> list[int]:
    """Return some of a tensor's extents; none where one is symbolic."""
    found = [number_of(extent) for extent in shape_of(x)[places]]
    return found if all(found) else []


def _scalar(value: float, x: Any) -> ir.GenericConst:
    return relax.const(value, dtype_of(x))


# Operators that move elements.
def _sliced(d: Drawing, x: Any) -> Any:
    axis = d.axis(x, 2)
    if axis is None:
        return None
    size = number_of(shape_of(x)[axis])
    begin = d.choose.choice((0, 0, d.choose.randrange(size - 1)))
    end, stride = d.choose.randint(begin + 1, size), d.choose.choice((1, 1, 2))
    return R.strided_slice(x, [axis], [begin], [end], [stride])


def _padded(d: Drawing, x: Any) -> Any:
    axis = d.axis(x)
    if axis is None:
        return None
    widths = [0] * (2 * len(shape_of(x)))
    widths[2 * axis], widths[2 * axis + 1] = d.choose.choice(((1, 1), (3, 0), (0, 2)))
    return R.nn.pad(x, widths)


def _joined(d: Drawing, x: Any) -> Any:
    axis = d.axis(x)
    if axis is None:
        return None
    other = shape_of(x)
    other[axis] = d.choose.choice((1, 3, number_of(other[axis])))
    both = [x, d.like(x, other)]
    return R.concat(both if d.choose.random() < 0.5 else both[::-1], axis=axis)


def _rotated(d: Drawing, x: Any) -> Any:
    """Exchange the halves of the rows, with one of them negative, as rotary embeddings do."""
    if len(_constants(x, slice(-1, None))) != 1 or number_of(shape_of(x)[-1]) % 2:
        return None
    half, axis = number_of(shape_of(x)[-1]) // 2, len(shape_of(x)) - 1
    first, second = (d.emit(R.strided_slice(x, [axis], [b], [b + half])) for b in (0, half))
    turned = d.emit(R.concat([d.emit(R.negative(second)), first], axis=axis))
    return R.add(d.emit(R.multiply(x, d.like(x))), d.emit(R.multiply(turned, d.like(x))))


def _taken(d: Drawing, x: Any) -> Any:
    axis = d.axis(x)
    if axis is None:
        return None
    shape = d.choose.choice(([1], [7], [2, 3]))
    indices = d.operand(shape, d.choose.choice(("int32", "int64")), most=number_of(shape_of(x)[axis]))
    return R.take(x, indices, axis=axis)


def _gathered(d: Drawing, x: Any) -> Any:
    axis = d.axis(x)
    if axis is None:
        return None
    return R.gather_elements(x, d.operand(shape_of(x), "int64", most=number_of(shape_of(x)[axis])), axis=axis)


def _reshaped(d: Drawing, x: Any) -> Any:
    """Merge two axes, or split one."""
    shape = shape_of(x)
    if len(shape) > 1 and d.choose.random() < 0.6:
        place = d.choose.randrange(len(shape) - 1)
        return R.reshape(x, [*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :]])
    constant = [(axis, number_of(extent)) for axis, extent in enumerate(shape)]
    parts = [(axis, factor) for axis, size in constant for factor in (2, 3, 4) if size and size % factor == 0]
    if not parts or len(shape) > 4:
        return None
    axis, factor = d.choose.choice(parts)
    split = [factor, number_of(shape[axis]) // factor]
    return R.reshape(x, [*shape[:axis], *d.choose.sample(split, 2), *shape[axis + 1 :]])


def _permuted(d: Drawing, x: Any) -> Any:
    return R.permute_dims(x, d.choose.sample(range(len(shape_of(x))), len(shape_of(x))))


def _expanded(d: Drawing, x: Any) -> Any:
    return R.expand_dims(x, d.choose.randint(0, len(shape_of(x)))) if len(shape_of(x)) < 5 else None


def _repeated(d: Drawing, x: Any) -> Any:
    axis = d.axis(x)
    return None if axis is None else R.repeat(x, 2, axis)


def _flipped(d: Drawing, x: Any) -> Any:
    axis = d.axis(x)
    return None if axis is None else R.flip(x, axis)


def _split(d: Drawing, x: Any) -> Any:
    """Multiply one half by the sigmoid of the other, as GLU does; whole numbers by each other."""
    axes = [axis for axis, extent in enumerate(shape_of(x)) if number_of(extent) and number_of(extent) % 2 == 0]
    if not axes:
        return None
    halves = d.emit(R.split(x, 2, d.choose.choice(axes)))
    first, gate = (d.emit(relax.TupleGetItem(halves, place)) for place in (0, 1))
    return R.multiply(first, d.emit(R.sigmoid(gate)) if "float" in dtype_of(x) else gate)


# Elementwise operators.
def _biased(d: Drawing, x: Any) -> Any:
    return R.add(x, d.like(x, shape_of(x)[-1:]))


def _by_channel(d: Drawing, x: Any) -> Any:
    """Multiply by a vector along any axis."""
    axis = d.choose.randrange(len(shape_of(x)))
    vector = d.like(x, [shape_of(x)[axis], *[1] * (len(shape_of(x)) - axis - 1)])
    return d.choose.choice((R.multiply, R.subtract))(x, vector)


def _residual(d: Drawing, x: Any) -> Any:
    return d.choose.choice((R.add, R.multiply, R.maximum))(d.like(x), x)


def _quotient(d: Drawing, x: Any) -> Any:
    return R.divide(x, d.like(x, positive=True))


def _activated(d: Drawing, x: Any) -> Any:
    return d.choose.choice((R.nn.relu, R.nn.silu, R.nn.gelu, R.nn.gelu_tanh, R.sigmoid, R.tanh, R.erf))(x)


def _function(d: Drawing, x: Any) -> Any:
    """Apply a function of floating-point numbers within its range."""
    how = d.choose.choice(("exp", "log", "sin", "cos", "clip", "abs", "softplus", "negative"))
    if how == "exp":
        return R.exp(d.emit(R.clip(x, -4, 4)))
    if how == "log":
        return R.log(d.emit(R.add(d.emit(R.abs(x)), _scalar(0.25, x))))
    if how == "clip":
        return R.clip(x, -1.5, 2)
    if how == "softplus":
        return R.log(d.emit(R.add(d.emit(R.exp(d.emit(R.clip(x, -8, 8)))), _scalar(1.0, x))))
    if how in ("sin", "cos"):
        return getattr(R, how)(d.emit(R.clip(x, -6, 6)))
    return getattr(R, how)(x)


def _cast(d: Drawing, x: Any) -> Any:
    return R.astype(x, d.choose.choice([dtype for dtype in ("float16", "float32") if dtype != dtype_of(x)]))


def _power(d: Drawing, x: Any) -> Any:
    """Raise numbers of both signs to whole powers, and positive ones to others."""
    whole = d.choose.random() < 0.6
    base = x if whole else d.emit(R.add(d.emit(R.abs(x)), _scalar(0.25, x)))
    base = d.emit(R.clip(base, -4, 4))
    how = d.choose.choice(("constant", "constant", "tensor", "vector"))
    if how == "constant":
        return R.power(base, _scalar(d.choose.choice((2, 3, 2, 1, 0, 4) if whole else (0.5, -0.5, 1.5, 0.3, -1)), x))
    shape = shape_of(x) if how == "tensor" else shape_of(x)[-1:]
    if not whole:
        return R.power(base, d.like(x, shape))
    exponents = d.emit(R.astype(d.operand(shape, "int32", most=4), dtype_of(x)))
    return R.power(base, exponents)


def _root(d: Drawing, x: Any) -> Any:
    positive = d.emit(R.add(d.emit(R.multiply(x, x)), _scalar(EPSILON, x)))
    return d.choose.choice((R.sqrt, R.rsqrt))(positive)


# Masks.
def _mask(d: Drawing, x: Any) -> Any:
    """Make a mask of a tensor's shape, of parameters: flags, comparisons, both."""
    how = d.choose.choice(("flags", "row of flags", "compared", "with a number", "indices"))
    if how in ("flags", "row of flags"):
        return d.operand(shape_of(x) if how == "flags" else shape_of(x)[-1:], "bool")
    compare = d.choose.choice((R.greater, R.less, R.less_equal, R.greater_equal, R.equal, R.not_equal))
    if how == "compared":
        return d.emit(compare(d.like(x), d.like(x)))
    if how == "with a number":
        return d.emit(compare(d.like(x), _scalar(0.0, x)))
    one = d.operand(shape_of(x)[-1:], "int64")
    return d.emit(compare(one, d.operand(shape_of(x), "int64")))


def _masked(d: Drawing, x: Any) -> Any:
    """Choose by a mask made of others by and, or, not."""
    mask = _mask(d, x)
    for _ in range(d.choose.choice((0, 1, 2))):
        combine = d.choose.choice((R.logical_and, R.logical_or, R.logical_xor))
        mask = d.emit(combine(mask, _mask(d, x)))
        if d.choose.random() < 0.4:
            mask = d.emit(R.logical_not(mask))
    how = d.choose.choice(("where", "where a number", "multiplied"))
    if how == "multiplied":
        return R.multiply(x, d.emit(R.astype(mask, dtype_of(x))))
    other = d.like(x) if how == "where" else _scalar(-100.0, x)
    return R.where(mask, *d.choose.sample((x, other), 2))


# Reductions, norms, scans.
def _reduced(d: Drawing, x: Any) -> Any:
    axes = d.choose.sample(range(len(shape_of(x))), d.choose.randint(1, len(shape_of(x))))
    how = d.choose.choice((R.sum, R.mean, R.max, R.min, R.variance))
    return how(x, sorted(axes), d.choose.random() < 0.5)


def _softmax(d: Drawing, x: Any) -> Any:
    return d.choose.choice((R.nn.softmax, R.nn.softmax, R.nn.log_softmax))(x, d.choose.randrange(len(shape_of(x))))


def _layer_norm(d: Drawing, x: Any) -> Any:
    last = shape_of(x)[-1:]
    if len(shape_of(x)) < 2:
        return None
    return R.nn.layer_norm(x, d.like(x, last), d.like(x, last), [-1], EPSILON)


def _rms_norm(d: Drawing, x: Any) -> Any:
    if len(shape_of(x)) < 2:
        return None
    return R.nn.rms_norm(x, d.like(x, shape_of(x)[-1:]), [-1], EPSILON)


def _group_norm(d: Drawing, x: Any) -> Any:
    shape = shape_of(x)
    channels = number_of(shape[1]) if len(shape) > 2 else 0
    groups = [count for count in (1, 2, 4) if channels and channels % count == 0]
    if not groups:
        return None
    vectors = d.like(x, shape[1:2]), d.like(x, shape[1:2])
    return R.nn.group_norm(x, *vectors, d.choose.choice(groups), 1, list(range(2, len(shape))), EPSILON)


def _norm_as_exported(d: Drawing, x: Any) -> Any:
    """Normalize rows in float32 by a square, as transformers' models do."""
    wide = x if dtype_of(x) == "float32" else d.emit(R.astype(x, "float32"))
    square = d.emit(R.power(wide, relax.const(2.0, "float32")))
    mean = d.emit(R.add(d.emit(R.mean(square, [-1], True)), relax.const(EPSILON, "float32")))
    normal = d.emit(R.multiply(wide, d.emit(R.rsqrt(mean))))
    normal = normal if dtype_of(x) == "float32" else d.emit(R.astype(normal, dtype_of(x)))
    return R.multiply(d.like(x, shape_of(x)[-1:]), normal)


def _batch_norm(d: Drawing, x: Any) -> Any:
    """Normalize by stored vectors as exported, with channels in any place."""
    shape, axis = shape_of(x), d.choose.randrange(len(shape_of(x)))
    behind = [1] * (len(shape) - axis - 1)

    def vector(positive: bool = False) -> Any:
        given = d.like(x, [shape[axis]], positive=positive)
        return d.emit(R.reshape(given, [shape[axis], *behind])) if behind else given

    variance = d.emit(R.add(vector(True), _scalar(1e-3, x)))
    centred = d.emit(R.subtract(x, vector()))
    if d.choose.random() < 0.5:
        scaled = d.emit(R.divide(centred, d.emit(R.sqrt(variance))))
    else:
        scaled = d.emit(R.multiply(centred, d.emit(R.rsqrt(variance))))
    return R.add(d.emit(R.multiply(scaled, vector())), vector())


def _scanned(d: Drawing, x: Any) -> Any:
    axis = d.choose.randrange(len(shape_of(x)))
    if d.choose.random() < 0.4:
        x = d.operand(shape_of(x), d.choose.choice(("int64", "int32", "bool")))
        return R.cumsum(x, axis, d.choose.choice(("int64", "int32")), exclusive=d.choose.random() < 0.3)
    if d.choose.random() < 0.3:
        return R.cumprod(d.emit(R.tanh(x)), axis)
    return R.cumsum(x, axis)


def _place_of_most(d: Drawing, x: Any) -> Any:
    """Find the places of the largest or smallest of a parameter: those of a result depend on its roundings."""
    axis = d.choose.randrange(len(shape_of(x)))
    return d.choose.choice((R.argmax, R.argmin))(d.like(x), axis, d.choose.random() < 0.5)


# Products.
def _linear(d: Drawing, x: Any) -> Any:
    outputs, k = d.choose.choice((1, 2, 8, 17, 32)), shape_of(x)[-1]
    if not number_of(k):
        return None
    if d.choose.random() < 0.5:
        return R.matmul(x, d.like(x, [k, outputs]))
    return R.matmul(x, d.emit(R.permute_dims(d.like(x, [outputs, k]), [1, 0])))


def _scores(d: Drawing, x: Any) -> Any:
    """Multiply by a transposed tensor of the same shape, mask, and multiply by a third: attention as exported."""
    shape = shape_of(x)
    if len(shape) < 2 or not all(map(number_of, shape[-2:])):
        return None
    turned = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    scores = d.emit(R.matmul(x, d.emit(R.permute_dims(d.like(x), turned))))
    scores = d.emit(R.multiply(scores, _scalar(number_of(shape[-1]) ** -0.5, x)))
    masked = d.emit(R.where(_mask(d, scores), scores, _scalar(-1e4, x)))
    return R.matmul(d.emit(R.nn.softmax(masked)), d.like(x))


# Convolutions and pools.
def _causal(d: Drawing, x: Any) -> Any:
    """Convolve along the last axis, padded and cropped."""
    found = _constants(x, slice(-2, None))
    if len(shape_of(x)) != 3 or not found:
        return None
    channels, length = found
    width, groups = d.choose.choice((1, 2, 4)), d.choose.choice((channels, channels, 1))
    made = d.emit(R.nn.conv1d(x, d.like(x, [channels, channels // groups, width]), padding=width - 1, groups=groups))
    return R.strided_slice(made, [2], [0], [length])


def _convolved(d: Drawing, x: Any) -> Any:
    """Convolve images: 1 by 1, depthwise, in groups, ordinary."""
    found = _constants(x, slice(-3, None))
    if len(shape_of(x)) != 4 or not found:
        return None
    channels = found[0]
    groups = d.choose.choice([1, channels, *(count for count in (2, 4) if channels % count == 0)])
    filters = groups * d.choose.choice((1, 1, 3))
    kernel, stride, padding = d.choose.choice((1, 1, 2, 3)), d.choose.choice((1, 1, 2)), d.choose.choice((0, 1))
    if min(found[1:]) + 2 * padding < kernel:
        return None
    weight = d.like(x, [filters, channels // groups, kernel, kernel])
    return R.nn.conv2d(x, weight, (stride, stride), (padding, padding), groups=groups)


def _pooled(d: Drawing, x: Any) -> Any:
    found = _constants(x, slice(2, None))
    if len(shape_of(x)) not in (3, 4) or not found:
        return None
    kind, two = d.choose.choice(("max_pool", "avg_pool")), len(found) == 2
    window, stride, padding = (d.choose.choice(sizes) for sizes in ((2, 3), (1, 2), (0, 1)))
    if min(found) < window:
        return None
    pool = getattr(R.nn, f"{kind}{len(found)}d")
    if not two:
        return pool(x, window, stride, padding)
    return pool(x, (window, window), (stride, stride), (padding, padding), ceil_mode=d.choose.random() < 0.3)


def _adaptively_pooled(d: Drawing, x: Any) -> Any:
    found = _constants(x, slice(2, None))
    if len(shape_of(x)) not in (3, 4) or not found:
        return None
    if len(found) == 1:
        return R.nn.adaptive_avg_pool1d(x, d.choose.randint(1, found[0]))
    return R.nn.adaptive_avg_pool2d(x, d.choose.choice(((1, 1), tuple(d.choose.randint(1, size) for size in found))))


def _squeezed_and_excited(d: Drawing, x: Any) -> Any:
    found = _constants(x, slice(1, None))
    if len(shape_of(x)) != 4 or not found:
        return None
    channels, inner = found[0], d.choose.choice((1, 4))
    pooled = d.choose.random() < 0.5
    y = d.emit(R.nn.adaptive_avg_pool2d(x, (1, 1)) if pooled else R.mean(x, [2, 3], True))
    for weights in ((inner, channels), (channels, inner)):
        y = d.emit(R.nn.conv2d(y, d.like(x, [*weights, 1, 1])))
        if d.choose.random() < 0.5:
            y = d.emit(R.add(y, d.like(x, [1, weights[0], 1, 1])))
        y = d.emit(R.nn.silu(y)) if weights[0] == inner and weights[1] == channels else y
    return R.multiply(d.emit(R.sigmoid(y)), x)


MOVES: dict[str, Draw] = {
    "slice": _sliced,
    "pad": _padded,
    "concat": _joined,
    "rotate": _rotated,
    "take": _taken,
    "gather": _gathered,
    "reshape": _reshaped,
    "permute": _permuted,
    "expand": _expanded,
    "repeat": _repeated,
    "flip": _flipped,
    "split": _split,
}
ELEMENTWISE: dict[str, Draw] = {
    "bias": _biased,
    "by channel": _by_channel,
    "residual": _residual,
    "quotient": _quotient,
    "activation": _activated,
    "function": _function,
    "cast": _cast,
    "power": _power,
    "root": _root,
    "mask": _masked,
    "batch norm": _batch_norm,
}
MIDDLES: dict[str, Draw] = {
    "reduction": _reduced,
    "softmax": _softmax,
    "layer norm": _layer_norm,
    "rms norm": _rms_norm,
    "group norm": _group_norm,
    "norm as exported": _norm_as_exported,
    "scan": _scanned,
    "argmax": _place_of_most,
    "linear": _linear,
    "attention": _scores,
    "causal conv": _causal,
    "conv2d": _convolved,
    "pool": _pooled,
    "adaptive pool": _adaptively_pooled,
    "squeeze and excite": _squeezed_and_excited,
}
NOT_OF_BFLOAT16 = ("argmax", "power", "layer norm", "group norm", "norm as exported")  # which TVM has none of
OPERATORS: dict[str, Draw] = {**MOVES, **ELEMENTWISE, **MIDDLES}
RANKS = {"causal conv": 3, "conv2d": 4, "squeeze and excite": 4, "group norm": 4, "pool": 4, "adaptive pool": 4}


def draw_module(choose: random.Random, number: int, arch: str) -> DrawnModule:
    """Draw a module: up to two operators, one of :data:`MIDDLES`, and up to three behind it."""
    d = Drawing(choose)
    middle = choose.choice(list(MIDDLES))
    rank = RANKS.get(middle) or choose.choice((1, 2, 2, 3, 3, 4))
    x = d.operand(_first_shape(d, rank, fixed=middle in RANKS), choose.choice(FLOATS))
    d.features.append(dtype_of(x))
    d.dtypes.add(dtype_of(x))
    around = {**MOVES, **ELEMENTWISE}
    names = [
        *(choose.choice(list(ELEMENTWISE if middle in RANKS else around)) for _ in range(choose.choice((0, 0, 1, 2)))),
        middle,
        *(choose.choice(list(around)) for _ in range(choose.choice((0, 1, 1, 2, 3)))),
    ]
    with d.builder.function("main", pure=True, private=False):
        with d.builder.dataflow():
            for name in names:
                x = _applied(d, name, x)
            result = d.builder.emit_output(x)
        d.builder.emit_func_output(result, d.given)
    smaller = {name: choose.randint(1, size) for name, size in d.sizes.items()}
    if d.sizes:
        d.features.append("symbolic")
    return DrawnModule(
        number,
        d.builder.get(),
        tuple(d.parameters),
        tuple(d.symbols),
        (d.sizes, smaller) if d.sizes else ({},),
        arch,
        tuple(dict.fromkeys(d.features)),
        max(d.dtypes, key=eps_of),
    )


def _first_shape(d: Drawing, rank: int, fixed: bool) -> list[Any]:
    """Draw extents; the first may be symbolic, and the second where no operator needs it."""
    shape: list[Any] = []
    for axis in range(rank):
        room = max(1, MOST_ELEMENTS // math.prod(map(int, shape)) // (4 if axis == 0 else 1))
        shape.append(d.choose.choice([size for size in EXTENTS if size <= room]))
    d.choose.shuffle(shape)
    for axis, name in enumerate(("n", "m")[: 1 if fixed else min(2, rank - 1)]):
        if d.choose.random() < 0.25:
            d.sizes[name] = shape[axis]
            shape[axis] = tirx.Var(name, "int64")
            d.symbols.append(shape[axis])
    return shape


def _applied(d: Drawing, name: str, x: Any) -> Any:
    """Apply an operator, where it applies to such a tensor and leaves it small enough."""
    floating = "float" in dtype_of(x)
    if not shape_of(x):  # no axes to draw
        return x
    if (not floating and name not in MOVES) or (dtype_of(x) == "bfloat16" and name in NOT_OF_BFLOAT16):
        return x
    parameters = len(d.given)
    made = OPERATORS[name](d, x)
    if made is None:
        del d.given[parameters:], d.parameters[parameters:]
        return x
    made = d.emit(made)
    if d.size(made) > MOST_GROWN:  # nothing uses it
        return x
    d.features.append(name)
    d.dtypes.update(dtype for dtype in (dtype_of(made),) if "float" in dtype)
    return made
