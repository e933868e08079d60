"""Values with the variance of their errors, and what models compute with them: in float64, by numpy or torch.

Each float16 that is stored adds half a unit in the last place, each sum what :mod:`harness.verify` allows one;
products, norms, activations and softmax pass variances on as their slopes say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorir_ladder.harness.bandwidth import erf
from tensorir_ladder.harness.execution import Backend
from tensorir_ladder.harness.verify import ALIGNED, TRUNCATED_BLOCK, WALK, epsilon

DTYPE = "float16"
MASKED = -3e38  # what softmax makes 0
SIGMAS = 8.0  # of errors that add up at random: none of 10⁹ elements is farther off
STEEPEST = 1.13  # slope of gelu and silu
FUNCTION_UNITS = 4  # halves of a unit that sigmoid, exponential or erf in float16 are off
TINIEST = 2.0**-25  # half of float16's smallest number
Weights = Mapping[str, Any]


@dataclass(frozen=True)
class ConvolutionSizes:
    """A convolution of a square picture, its padding half its window, so that a stride of 1 keeps the size."""

    size: int
    channels_in: int
    channels_out: int
    window: int
    stride: int = 1

    @property
    def padding(self) -> int:
        """Zeros around the picture."""
        return self.window // 2

    def __str__(self) -> str:
        stride = f"s{self.stride}" if self.stride > 1 else ""
        return f"{self.size}x{self.channels_in}-{self.channels_out}w{self.window}{stride}"


@dataclass(frozen=True)
class Known:
    """Values, and the variance of the error that what is computed may have."""

    value: Any
    variance: Any

    def __getitem__(self, index: Any) -> Known:
        return Known(self.value[index], self.variance[index])

    def reshape(self, *shape: int) -> Known:
        """Both in another shape."""
        return Known(self.value.reshape(*shape), self.variance.reshape(*shape))

    def scaled(self, by: Any) -> Known:
        """Both times an exact number."""
        return Known(self.value * by, self.variance * by * by)


class Arithmetic:
    """Computes with :class:`Known` values as float16 would, with sums of ``sums`` (float32 or float16)."""

    def __init__(self, backend: Backend, sums: str = "float32") -> None:
        self.backend, self.xp, self.sums = backend, backend.xp, sums
        self.unit = epsilon(DTYPE) / 2

    def exact(self, array: Any) -> Known:
        """Take an array as it is."""
        wide = self.backend.float64(array)
        return Known(wide, wide * 0)

    def stored(self, known: Known) -> Known:
        """Round to float16."""
        rounding = (self.unit * known.value) ** 2 / 3 + TINIEST**2
        return Known(known.value, known.variance + rounding)

    def added(self, a: Known, b: Known) -> Known:
        """Add, and store."""
        return self.stored(Known(a.value + b.value, a.variance + b.variance))

    def multiplied(self, a: Known, b: Known) -> Known:
        """Multiply element by element, and store."""
        variance = a.value**2 * b.variance + b.value**2 * a.variance
        return self.stored(Known(a.value * b.value, variance))

    def summed(self, value: Any, squares: Any, variance: Any, k: int) -> Known:
        """Store sums of ``k`` products, whose squares' sum is ``squares``; :func:`harness.verify.rounding_limit`."""
        steps = WALK * k**0.5 + (k / TRUNCATED_BLOCK + ALIGNED if self.sums == "float32" else 0)
        own = epsilon(self.sums) * steps * (self.xp.sqrt(squares) + abs(value))
        return self.stored(Known(value, variance + (own / SIGMAS) ** 2))

    def product(self, a: Known, b: Known) -> Known:
        """Multiply matrices."""
        a_squares, b_squares = a.value**2, b.value**2
        variance = a.variance @ b_squares + a_squares @ b.variance
        return self.summed(a.value @ b.value, a_squares @ b_squares, variance, a.value.shape[-1])

    def linear(self, x: Known, weight: Any, bias: Any = None) -> Known:
        """Multiply by a weight [out, in], and add a bias."""
        wide = self.backend.float64(weight).swapaxes(0, 1)
        squares = wide**2
        sums = x.value @ wide, x.value**2 @ squares, x.variance @ squares
        made = self.summed(*sums, wide.shape[0])
        return made if bias is None else self.added(made, self.exact(bias))

    def norm(self, x: Known, weight: Any, eps: float, bias: Any = None) -> Known:
        """Divide rows by their root mean square; with a bias by their standard deviation, less their mean."""
        value = x.value if bias is None else x.value - x.value.mean(-1)[..., None]
        factor = self.backend.float64(weight) / self.xp.sqrt((value**2).mean(-1) + eps)[..., None]
        shift = 0 if bias is None else self.backend.float64(bias)
        return self.stored(Known(value * factor + shift, x.variance * factor**2))

    def silu(self, x: Known) -> Known:
        """Multiply by the sigmoid."""
        return self._activated(x, x.value / (1 + self.xp.exp(-x.value)))

    def gelu(self, x: Known) -> Known:
        """Multiply by the normal distribution."""
        return self._activated(x, x.value / 2 * (1 + erf(self.xp, x.value * 0.5**0.5)))

    def _activated(self, x: Known, value: Any) -> Known:
        # 1 + erf, next to 0 of negative x, has the errors of 1.
        own = (FUNCTION_UNITS * self.unit * x.value) ** 2
        return self.stored(Known(value, STEEPEST**2 * x.variance + own))

    def softmax(self, scores: Known) -> Known:
        """Turn scores into weights that add up to 1 in each row, in float32, and store them."""
        powers = self.xp.exp(scores.value - self.xp.amax(scores.value, -1)[..., None])
        value = powers / powers.sum(-1)[..., None]
        squares = value**2
        together = (squares * scores.variance).sum(-1)[..., None]
        return self.stored(Known(value, squares * (scores.variance + together)))

    def rope(self, x: Known, cos: Any, sin: Any) -> Known:
        """Turn halves of heads [tokens, heads, head] by their tokens' angles [tokens, head / 2]."""
        half = x.value.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        c, s = (self.backend.float64(each)[:, None, :] for each in (cos, sin))
        turned = [
            self.added(self.stored(first.scaled(c)), self.stored(second.scaled(-s))),
            self.added(self.stored(second.scaled(c)), self.stored(first.scaled(s))),
        ]
        join = self.xp.concatenate
        return Known(join([each.value for each in turned], -1), join([each.variance for each in turned], -1))

    def attention(self, q: Known, k: Known, v: Known, scale: float, causal: bool) -> Known:
        """Attend, of [tokens, heads, head]; head by head, as scores of all of them may not fit."""
        tokens, heads, head = q.value.shape
        shared = heads // k.value.shape[1]
        made = self.exact(self.backend.poisoned((tokens, heads, head), "float64"))
        for number in range(heads):
            own, keys, values = q[:, number], k[:, number // shared], v[:, number // shared]
            turned = Known(keys.value.swapaxes(0, 1), keys.variance.swapaxes(0, 1))
            scores = self.product(own, turned).scaled(scale)
            if causal:
                later = ~self.xp.tril(scores.value == scores.value)
                scores.value[later] = MASKED
            mixed = self.product(self.softmax(scores), values)
            made.value[:, number], made.variance[:, number] = mixed.value, mixed.variance
        return made.reshape(tokens, heads * head)

    def convolved(self, x: Known, weight: Any, conv: ConvolutionSizes) -> Known:
        """Convolve pictures [batch, height, width, channels] with a weight [height, width, in, out]."""
        wide, zero = self.backend.float64(weight), 0.0
        x = self.padded(x, conv.padding, zero)
        value = squares = variance = zero
        for row in range(conv.window):
            for column in range(conv.window):
                part, own = self.strided(x, row, column, conv.window, conv.stride), wide[row, column]
                own_squares = own**2
                value = value + part.value @ own
                squares = squares + part.value**2 @ own_squares
                variance = variance + part.variance @ own_squares
        return self.summed(value, squares, variance, conv.window**2 * conv.channels_in)

    def padded(self, x: Known, by: int, value: float) -> Known:
        """Put pixels of a value around pictures."""
        if not by:
            return x
        batch, height, width, channels = x.value.shape
        shape = (batch, height + 2 * by, width + 2 * by, channels)
        wider = Known(self.backend.poisoned(shape, "float64", value), self.backend.poisoned(shape, "float64", 0.0))
        wider.value[:, by:-by, by:-by], wider.variance[:, by:-by, by:-by] = x.value, x.variance
        return wider

    @staticmethod
    def strided(x: Known, row: int, column: int, window: int, stride: int) -> Known:
        """Take of padded pictures what meets one element of a window."""
        last_row, last_column = (extent - window + 1 for extent in x.value.shape[1:3])
        return x[:, row : row + last_row : stride, column : column + last_column : stride]

    def pooled(self, x: Known) -> Known:
        """Take the largest of 3 x 3 pixels, every second one."""
        x = self.padded(x, 1, -float("inf"))
        parts = [self.strided(x, row, column, 3, 2) for row in range(3) for column in range(3)]
        found = parts[0]
        for part in parts[1:]:
            value, variance = self.xp.maximum(found.value, part.value), self.xp.maximum(found.variance, part.variance)
            found = Known(value, variance)
        return found

    def relu(self, x: Known) -> Known:
        """Take no less than 0."""
        return Known(x.value.clip(min=0), x.variance)
