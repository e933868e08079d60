"""Functions by themselves, as models have them: elementwise ones, norms and other rows, and products of few kinds.

Each takes ``x`` of any number of rows and float16 parameters, and gives float16. It says itself how Relax writes it,
how torch does, and what it must give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tensorir_ladder.harness.whole_models.arithmetic import Arithmetic, Known, Weights

WIDE, NARROW = "float32", "float16"
EPS = 1e-5


@dataclass(frozen=True)
class Operation:
    """One function of ``x`` [rows, \\*inner] and parameters: in Relax, as it must come out, and by torch.

    ``batched`` puts one extent in front of the rows. ``flops`` counts those of its product for each row.
    """

    name: str
    inner: tuple[int, ...]
    relax: Callable[..., nn.Tensor] = field(compare=False, repr=False)
    known: Callable[[Arithmetic, Known, Weights], Known] = field(compare=False, repr=False)
    torch: Callable[[Any, Any, Weights], Any] = field(compare=False, repr=False)
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    batched: int | None = None
    flops: int = 0

    def shape(self, rows: Any) -> tuple[Any, ...]:
        """Return the shape of ``x``."""
        return (*(() if self.batched is None else (self.batched,)), rows, *self.inner)


class OneOperation(nn.Module):
    """Make one function's output of ``x`` and its parameters."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        for name, shape in operation.parameters.items():
            setattr(self, name, nn.Parameter(shape, dtype=NARROW))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """See the class."""
        return self.operation.relax(x, **{name: getattr(self, name) for name in self.operation.parameters})


def operations(small: bool) -> list[Operation]:
    """List the functions, of extents as large models have them, or of small ones."""

    def of(size: int) -> int:
        return max(size // 64, 8) if small else size

    heads, side = (8, 4) if small else (32, 64)
    return [*_elementwise(of(4096), heads, of(128), side), *_rows(of, heads, of(128)), *_products(of, heads)]


def _elementwise(hidden: int, heads: int, head: int, side: int) -> list[Operation]:
    half, inner, one = hidden // 2, (hidden,), {"b": (hidden,)}
    both = {"scale": (hidden,), "b": (hidden,)}

    def gated(x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(x, 2, axis=-1)
        return op.silu(gate) * up

    def swapped(x: nn.Tensor) -> nn.Tensor:
        first, second = op.split(x, 2, axis=-1)
        return op.concat([second, first], dim=-1)

    return [
        Operation("relu", inner, op.relu, lambda a, x, w: a.relu(x), lambda t, x, w: t.relu(x)),
        Operation("silu", inner, op.silu, lambda a, x, w: a.silu(x), lambda t, x, w: t.nn.functional.silu(x)),
        Operation("gelu", inner, op.gelu, lambda a, x, w: a.gelu(x), lambda t, x, w: t.nn.functional.gelu(x)),
        Operation(
            "bias",
            inner,
            lambda x, b: x + b,
            lambda a, x, w: a.added(x, a.exact(w["b"])),
            lambda t, x, w: x + w["b"],
            one,
        ),
        Operation(
            "bias_gelu",
            inner,
            lambda x, b: op.gelu(x + b),
            lambda a, x, w: a.gelu(a.added(x, a.exact(w["b"]))),
            lambda t, x, w: t.nn.functional.gelu(x + w["b"]),
            one,
        ),
        Operation(
            "scale_shift",
            inner,
            lambda x, scale, b: x * scale + b,
            lambda a, x, w: a.added(a.multiplied(x, a.exact(w["scale"])), a.exact(w["b"])),
            lambda t, x, w: t.addcmul(w["b"], x, w["scale"]),
            both,
        ),
        Operation(
            "swiglu",
            (7 * hidden,),
            gated,
            lambda a, x, w: a.multiplied(a.silu(x[..., : 7 * half]), x[..., 7 * half :]),
            lambda t, x, w: t.nn.functional.silu(x[..., : 7 * half]) * x[..., 7 * half :],
        ),
        Operation(
            "add_turned_halves",
            inner,
            lambda x: x + swapped(x),
            lambda a, x, w: a.added(x, _moved(x, lambda v: a.xp.concatenate([v[..., half:], v[..., :half]], -1))),
            lambda t, x, w: x + t.cat([x[..., half:], x[..., :half]], -1),
        ),
        Operation(
            "concat",
            inner,
            swapped,
            lambda a, x, w: _moved(x, lambda v: a.xp.concatenate([v[..., half:], v[..., :half]], -1)),
            lambda t, x, w: t.cat([x[..., half:], x[..., :half]], -1),
        ),
        Operation(
            "slice",
            inner,
            lambda x: op.split(x, [half], axis=-1)[1],
            lambda a, x, w: x[..., half:],
            lambda t, x, w: x[..., half:].contiguous(),
        ),
        Operation(
            "transpose",
            inner,
            lambda x: op.permute_dims(x, [1, 0]),
            lambda a, x, w: _moved(x, lambda v: v.swapaxes(0, 1)),
            lambda t, x, w: x.T.contiguous(),
        ),
        Operation(
            "heads",
            (heads, head),
            lambda x: op.permute_dims(x, [0, 2, 1, 3]),
            lambda a, x, w: _moved(x, lambda v: v.swapaxes(1, 2)),
            lambda t, x, w: x.transpose(1, 2).contiguous(),
            batched=1,
        ),
        Operation(
            "transpose_inner",
            (side, side),
            lambda x: op.permute_dims(x, [0, 2, 1]),
            lambda a, x, w: _moved(x, lambda v: v.swapaxes(1, 2)),
            lambda t, x, w: x.transpose(1, 2).contiguous(),
        ),
        Operation(
            "repeat",
            (heads // 4, head),
            lambda x: op.repeat(x, 4, axis=1),
            lambda a, x, w: x[:, [number // 4 for number in range(heads)]],
            lambda t, x, w: x.repeat_interleave(4, 1),
        ),
    ]


def _rows(of: Callable[[int], int], heads: int, head: int) -> list[Operation]:
    def softmax(x: nn.Tensor) -> nn.Tensor:
        return op.astype(op.softmax(op.astype(x, WIDE), axis=-1), NARROW)

    def rms(shape: tuple[int, ...]) -> Operation:
        return Operation(
            f"rms_norm-{shape[-1]}",
            shape,
            lambda x, weight: op.rms_norm(x, weight, -1, EPS),
            lambda a, x, w: a.norm(x, w["weight"], EPS),
            lambda t, x, w: t.nn.functional.rms_norm(x, w["weight"].shape, w["weight"], EPS),
            {"weight": shape[-1:]},
        )

    def layer(size: int) -> Operation:
        return Operation(
            f"layer_norm-{size}",
            (size,),
            lambda x, weight, b: op.layer_norm(x, size, weight, b, EPS),
            lambda a, x, w: a.added(a.norm(x, w["weight"], EPS, w["b"] * 0), a.exact(w["b"])),  # rounded in between
            lambda t, x, w: t.nn.functional.layer_norm(x, (size,), w["weight"], w["b"], EPS),
            {"weight": (size,), "b": (size,)},
        )

    def column_sum(a: Arithmetic, x: Known, _w: Weights) -> Known:
        return a.summed(x.value.sum(0), (x.value**2).sum(0), x.variance.sum(0), x.value.shape[0])

    return [
        *(
            Operation(
                f"softmax-{size}",
                (size,),
                softmax,
                lambda a, x, w: a.softmax(x),
                lambda t, x, w: t.softmax(x, -1, dtype=t.float32).to(x.dtype),
            )
            for size in (of(1024), of(4096), of(32000))
        ),
        *(rms(shape) for shape in ((of(4096),), (heads, head))),
        *(layer(size) for size in (of(1024), of(4096))),
        Operation(
            "row_mean",
            (of(4096),),
            lambda x: op.astype(op.sum(op.astype(x, WIDE), axis=-1) / of(4096), NARROW),
            lambda a, x, w: a.stored(_moved(x, lambda v: v.mean(-1))),
            lambda t, x, w: x.mean(-1, dtype=t.float32).to(x.dtype),
        ),
        Operation(
            "row_max",
            (of(4096),),
            lambda x: op.max(x, axis=-1),
            lambda a, x, w: _moved(x, lambda v: a.xp.amax(v, -1)),
            lambda t, x, w: x.amax(-1),
        ),
        Operation(
            "column_sum",
            (of(4096),),
            lambda x: op.astype(op.sum(op.astype(x, WIDE), axis=0), NARROW),
            column_sum,
            lambda t, x, w: x.sum(0, dtype=t.float32).to(x.dtype),
        ),
    ]


def _products(of: Callable[[int], int], batch: int) -> list[Operation]:
    def turned(weight: nn.Tensor) -> nn.Tensor:
        return op.permute_dims(weight, [1, 0])

    def linear(name: str, n: int, k: int, **of_it: Any) -> Operation:
        named = {"relax": lambda x, weight: op.matmul(x, turned(weight))}
        named["known"] = lambda a, x, w: a.linear(x, w["weight"])
        named["torch"] = lambda t, x, w: t.nn.functional.linear(x, w["weight"])
        parameters = {"weight": (n, k), **of_it.pop("more", {})}
        return Operation(name, (k,), **{**named, **of_it}, parameters=parameters, flops=2 * n * k)

    wide, ffn, odd, own, others = of(4096), of(14336), of(1000) + 1, of(128), of(1024)
    return [
        linear(f"linear-{wide}", wide, wide),
        linear(f"linear-{odd}", odd, odd),
        linear(
            "linear_gelu",
            ffn,
            wide,
            relax=lambda x, weight, b: op.gelu(op.matmul(x, turned(weight)) + b),
            known=lambda a, x, w: a.gelu(a.linear(x, w["weight"], w["b"])),
            torch=lambda t, x, w: t.nn.functional.gelu(t.nn.functional.linear(x, w["weight"], w["b"])),
            more={"b": (ffn,)},
        ),
        linear(
            "linear_residual",
            wide,
            wide,
            relax=lambda x, weight: x + op.matmul(x, turned(weight)),
            known=lambda a, x, w: a.added(x, a.linear(x, w["weight"])),
            torch=lambda t, x, w: x + t.nn.functional.linear(x, w["weight"]),
        ),
        Operation(
            "matmul",
            (wide,),
            lambda x, weight: op.matmul(x, weight),
            lambda a, x, w: a.product(x, a.exact(w["weight"])),
            lambda t, x, w: x @ w["weight"],
            {"weight": (wide, wide)},
            flops=2 * wide * wide,
        ),
        Operation(
            "batched",
            (own,),
            lambda x, weight: op.matmul(x, weight),
            lambda a, x, w: a.product(x, a.exact(w["weight"])),
            lambda t, x, w: x @ w["weight"],
            {"weight": (batch, own, others)},
            batched=batch,
            flops=2 * batch * own * others,
        ),
    ]


def _moved(known: Known, how: Callable[[Any], Any]) -> Known:
    """Move, or choose among, values and their variances alike."""
    return type(known)(how(known.value), how(known.variance))
