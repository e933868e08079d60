"""Finish a product's sums while they are in registers: by a factor, a bias by columns, an activation."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels.codegen.launch_plan import BIAS, SECOND
from tensorir_ladder.kernels.held import named
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import PTX_TYPES, WGMMA_ROWS, wgmma_element
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

# Polynomial in |x|, constant term first: log2 of the normal distribution's tail beyond |x|. Fitted on [0, 5.5] by
# linear programming with weight 1 / (1 + 0.3 x²); decreases for all larger |x|. The error of gelu is at most 4e-7, and
# 1.2e-5 relative. It takes about half the instructions of CUDA's erff.
BEYOND = (
    -1.0,
    -1.1511404514312744,
    -0.4589337706565857,
    -0.05320458859205246,
    0.00791859533637762,
    -0.0006841222639195621,
    5.158362910151482e-06,
    4.834084393223748e-06,
    -3.176414793415461e-07,
)

_POWER = functools.reduce(lambda inner, each: f"({inner}) * t + {each!r}f", BEYOND[-2::-1], f"{BEYOND[-1]!r}f")
# gelu is the exact form, x times the normal distribution; silu is x · sigmoid(x). All let NaN through.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "relu": "return x < 0.0f ? 0.0f : x;",
        "gelu": f"const float t = fabsf(x), beyond = exp2f({_POWER}); return x * (x < 0.0f ? beyond : 1.0f - beyond);",
        "silu": "return x / (1.0f + expf(-x));",
    }
)
Vectors = Buffer | tuple[Buffer, ...] | None  # what a kernel reads an element of for each column
BIAS_DTYPES = (*PTX_TYPES, "float32")
_TYPES = {"float16": "half", "bfloat16": "nv_bfloat16"}
_ROUND_PAIR = """
__forceinline__ __device__ void round_pair_{ptx}({type}* rounded, float low, float high) {{
  asm("{{.reg .b32 pair; cvt.rn.{ptx}x2.f32 pair, %3, %2; mov.b32 {{%0, %1}}, pair;}}"
      : "=h"(*(unsigned short*)&rounded[0]), "=h"(*(unsigned short*)&rounded[1]) : "f"(low), "f"(high));
}}
"""
_ACTIVATE = "\n__forceinline__ __device__ float {name}(float x) {{ {body} }}\n"


def gelu(x: Expr) -> Expr:
    """Write gelu of a float32 expression, x times the normal distribution, by one exponential; NaN stays NaN."""
    power = tirx.const(BEYOND[-1], "float32")
    for coefficient in BEYOND[-2::-1]:
        power = power * tirx.abs(x) + tirx.const(coefficient, "float32")
    beyond = tirx.exp2(power)
    return x * tirx.Select(x < 0, beyond, tirx.const(1, "float32") - beyond)


@dataclass(frozen=True)
class Epilogue:
    """``activation(alpha · sum + bias[column])`` of each sum, in float32, before it is rounded; by default nothing.

    ``bias`` is the dtype of a bias of n elements, "" where there is none; ``activation`` one of ACTIVATIONS or "".
    Factor and activation are written into the kernel. With ``residual`` a matrix of the results' shape and dtype is
    added to what is rounded (:mod:`kernels.residual`); ``rectified``, sums with it that are below 0 become 0.

    Raises
    ------
    IllegalWorkload : on construction, for an unknown activation or bias dtype, a factor that is no finite number, and
        ``rectified`` without ``residual``.
    """

    alpha: float = 1.0
    bias: str = ""
    activation: str = ""
    residual: bool = False
    rectified: bool = False

    def __post_init__(self) -> None:
        for what, value, known in (
            ("activation", self.activation, ACTIVATIONS),
            ("dtype of a bias", self.bias, BIAS_DTYPES),
        ):
            if value and value not in known:
                raise IllegalWorkload(
                    f"unknown {what}", value=repr(value), limit=" | ".join(known), remedy="choose one of these, or none"
                )
        if not math.isfinite(self.alpha):
            raise IllegalWorkload("alpha is no finite number", value=self.alpha, remedy="give a finite factor")
        if self.rectified and not self.residual:
            raise IllegalWorkload(
                "only sums with a residual are rectified behind it",
                value="no residual",
                remedy='take activation="relu"',
            )

    @property
    def is_nothing(self) -> bool:
        """True where sums stay what they are until they are rounded."""
        return replace(self, residual=False, rectified=False) == PLAIN

    @property
    def pointers(self) -> dict[str, bool]:
        """Tell, by name, which of a kernel's parameters are used."""
        second = isinstance(self, Written) and bool(self.second)
        return {"bias_ptr": bool(self.bias), "second_ptr": second, "residual_ptr": self.residual}

    def bind(self, pointer: Var, columns: int, _second: Var | None = None) -> Vectors:
        """Emit the bias' buffer, ``columns`` elements behind a kernel's parameter; None where there is no bias."""
        return _vector(BIAS, pointer, columns, self.bias) if self.bias else None

    def apply(self, bias: Vectors, sums: Buffer, product: WarpgroupProduct, column: Expr, lane: Expr) -> None:
        """Emit a thread's work on all its sums, whose columns begin at ``column`` of the output."""
        if self.is_nothing:
            return
        for first in range(0, product.registers_per_tile, 4):
            added = self._added_to_pair(bias, column + wgmma_element(0, lane, first)[1])
            for row_tile in range(product.row_tiles):
                for below in (0, 2):  # the second pair is of the same columns, eight rows below
                    self._finish_pair(sums, row_tile * product.registers_per_tile + first + below, added)

    def apply_down(
        self, bias: Vectors, sums: Buffer, product: WarpgroupProduct, first: Expr, warp: Expr, lane: Expr
    ) -> None:
        """Emit the same for sums whose rows are the output's columns, from ``first`` on: operands were exchanged."""
        if self.is_nothing:
            return
        for row_tile in range(product.row_tiles):
            for below in (0, 2):
                row = wgmma_element(warp, lane, below)[0]
                added = self._added(bias, first + row_tile * WGMMA_ROWS + row)
                for inside in range(below, product.registers_per_tile, 4):
                    self._finish_pair(sums, row_tile * product.registers_per_tile + inside, (added, added))

    def apply_along(self, bias: Vectors, sums: Buffer, first: Expr, count: int, column: Expr) -> None:
        """Emit the same for ``count`` sums of a row, from the ``first`` on, whose columns begin at ``column``.

        ``count`` is even.
        """
        if self.is_nothing:
            return
        for i in range(0, count, 2):
            self._finish_pair(sums, first + i, self._added_to_pair(bias, column + i))

    def _added_to_pair(self, bias: Vectors, column: Expr) -> tuple[Any, Any]:
        return self._added(bias, column), self._added(bias, column + 1)

    def _added(self, bias: Vectors, column: Expr) -> Any:
        """Read what is added to the sums of a column."""
        if bias is None:
            return None
        return T.Bind(T.Cast("float32", bias[_within(bias, column)]))

    def _finish_pair(self, sums: Buffer, first: int | Expr, added: tuple[Any, Any]) -> None:
        """Emit the work on two sums that are neighbours in registers, from the ``first`` on."""
        for register, own in zip((first, first + 1), added):
            T.buffer_store(sums, self._value(sums[register], own), [register])

    def _value(self, value: Expr, added: Any) -> Expr:
        if self.alpha != 1:
            value = value * T.float32(self.alpha)
        if added is not None:
            value = value + added
        if self.activation:
            text = _ACTIVATE.format(name=self.activation, body=ACTIVATIONS[self.activation])
            value = T.cuda.func_call(self.activation, value, source_code=text, return_type="float32")
        return value


PLAIN = Epilogue()


@dataclass(frozen=True)
class Written(Epilogue):
    """Makes ``value`` of each sum: an expression of ``total``, the sum, and of ``elements`` of vectors, by its column.

    Its arithmetic is done as it is written, roundings between included; its dtype is the results'. The vectors are the
    bias and, of a kernel that takes it, one of dtype ``second``.
    """

    value: Expr | None = None
    total: Var | None = None
    elements: tuple[Var, ...] = ()
    second: str = ""

    def bind(self, pointer: Var, columns: int, second: Var | None = None) -> Vectors:
        """Emit the buffers of the vectors, of ``columns`` elements each."""
        found = [_vector(BIAS, pointer, columns, self.bias)] if self.bias else []
        if self.second:
            found.append(_vector(SECOND, second, columns, self.second))
        return tuple(found)

    def _added(self, bias: Vectors, column: Expr) -> tuple[Expr, ...]:
        def element(vector: Buffer) -> Expr:
            return T.Bind(vector[_within(vector, column)])

        return tuple(map(element, bias))

    def _finish_pair(self, sums: Buffer, first: int | Expr, added: tuple[Any, Any]) -> None:
        """Emit the same; where a sum is rounded to 16 bits first, both are rounded together."""
        totals = [T.Bind(sums[first + i]) for i in (0, 1)]
        rounded = {dtype: _rounded_pair(totals, dtype) for dtype in self._roundings()}
        for i, (total, own) in enumerate(zip(totals, added)):
            halves = {dtype: pair[i] for dtype, pair in rounded.items()}
            T.buffer_store(sums, self._value_of(total, own, halves), [first + i])

    def _value_of(self, total: Expr, added: tuple[Expr, ...], rounded: Mapping[str, Expr]) -> Expr:
        given = {self.total: total, **dict(zip(self.elements, added))}

        def cast(written: tirx.Cast) -> Expr:
            return rounded.get(str(written.ty.dtype), written) if written.value.same_as(total) else written

        callbacks = (Var, lambda var: given.get(var, var)), (tirx.Cast, cast)
        return T.Cast("float32", tvm_ffi.structural_map(self.value, callbacks))

    def _roundings(self) -> list[str]:
        """List the 16-bit dtypes that a sum is rounded to first."""
        found: list[tirx.Cast] = []
        tvm_ffi.structural_walk(self.value, (tirx.Cast, found.append))
        dtypes = (str(cast.ty.dtype) for cast in found if cast.value.same_as(self.total))
        return [dtype for dtype in dict.fromkeys(dtypes) if dtype in PTX_TYPES]


def _rounded_pair(sums: Sequence[Expr], dtype: str) -> Buffer:
    """Emit the rounding of two sums to 16 bits by one instruction.

    ptxas (13.0) fuses two instructions of one sum each, and places the fused one where wgmma writes the sums, before
    the wait for it: the kernel then rounds unfinished sums, or ptxas serializes all its wgmma.
    """
    rounded = named("rounded", T.alloc_local((2,), dtype))
    text = _ROUND_PAIR.format(type=_TYPES[dtype], ptx=PTX_TYPES[dtype])
    T.evaluate(T.cuda.func_call(f"round_pair_{PTX_TYPES[dtype]}", rounded.data, *sums, source_code=text))
    return rounded


def _within(vector: Buffer, column: Expr) -> Expr:
    """Return a column, or the last for those beyond, whose results are not stored: without a branch."""
    return tirx.min(column, vector.shape[0] - 1)


def _vector(name: str, pointer: Var, columns: int, dtype: str) -> Buffer:
    vector = T.match_buffer(pointer, (columns,), dtype, align=dtype_bytes(dtype))
    IRBuilder.name(name, vector)
    return vector


def without(function: tirx.PrimFunc, *unused: str) -> tirx.PrimFunc:
    """Take parameters that a kernel does not use from its signature, by their names."""
    kept = [parameter for parameter in function.params if parameter.name not in unused]
    return tirx.PrimFunc(kept, function.body, function.ret_type, function.attrs)
