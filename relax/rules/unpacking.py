"""Weights of few bits, unpacked in float32: without a conversion of whole numbers, and nothing rounded on the way.

::

    before   weights[j, k] = (float16((q[j, k // 8] >> 4·(k % 8)) & 15) - 7) * scale[j, k // 32]       # in float16
    after    weights[j, k] = (bits(q & 15 << s | 2²³) · 2⁻ˢ - (2²³⁻ˢ + 7)) * float32(scale)             # in float32

The bits of a small number n, put s places high into the mantissa of 2²³, make the float32 2²³ + n·2ˢ. From there it is
one multiply-add to n less its zero point, exact where that is a whole number: fewer instructions, and no conversion,
which is slow. What float16 would have rounded (the product with the scale) is not.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx
from tvm.s_tir import Schedule

from tensorir_ladder.relax.rules.normal_form import Product
from tensorir_ladder.schedules.inspection import block_name, is_constant

MANTISSA, BIAS = 23, 127  # of float32
MOST_ZERO = 1 << 16  # of a zero point: 2²³ and a whole number as small have an exact sum, a fraction has not
NARROW = ("float16", "bfloat16")
STORED = ("uint32", "int32")


def unpacked_in_float32(product: Product, operand: int) -> Product:
    """Compute an operand in float32 that is unpacked from whole numbers in a block of its own; others stay.

    The product has to sum in float32 and read the operand through a cast: then no dtype but the operand's changes.
    """
    sch = product.sch
    buffer = sch.get(product.block).reads[operand].source
    function = sch.mod[sch.func_working_on]
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(
        function.body, (tirx.BufferStore, lambda s: found.append(s) if s.buffer.same_as(buffer) else None)
    )
    if len(found) != 1 or str(buffer.dtype) not in NARROW or not _unpacks(found[0].value):
        return product
    wide = tirx.decl_buffer(buffer.shape, "float32", name=str(buffer.name))

    def stored(store: tirx.BufferStore) -> tirx.Stmt:
        if store.buffer.same_as(buffer):
            return tirx.BufferStore(wide, _in_float32(store.value), store.indices)
        return store

    def read(cast: tirx.Cast) -> ir.Expr:
        inner = cast.value
        if isinstance(inner, ir.TensorLoad) and inner.source.same_as(buffer):
            return tirx.BufferLoad(wide, inner.indices)
        return cast

    body = tvm_ffi.structural_map(function.body, [(tirx.BufferStore, stored), (tirx.Cast, read)])
    body = tvm_ffi.structural_map(body, (tirx.Var, lambda var: wide if var.same_as(buffer) else var))
    sch = Schedule(function.with_body(body))
    block = sch.get_sblock(block_name(product.sch, product.block))
    *batch, rows, columns, reduction = sch.get_loops(block)
    return Product(sch, block, tuple(batch), rows, columns, reduction)


def _unpacks(value: ir.Expr) -> bool:
    """Return whether whole numbers become floating-point numbers in an expression."""
    casts: list[tirx.Cast] = []
    tvm_ffi.structural_walk(value, (tirx.Cast, lambda cast: casts.append(cast)))
    return any("int" in str(cast.value.ty.dtype) and "float" in str(cast.ty.dtype) for cast in casts)


def _in_float32(value: ir.Expr) -> ir.Expr:
    """Return an expression of narrow floats in float32."""
    if isinstance(value, tirx.FloatImm):
        return tirx.const(float(value.value), "float32")
    if isinstance(value, tirx.Sub) and isinstance(value.b, tirx.FloatImm):
        field, zero = _field(value.a), float(value.b.value)
        if field is not None and zero.is_integer() and abs(zero) <= MOST_ZERO:
            return _number(*field, zero)
    if isinstance(value, (tirx.Add, tirx.Sub, tirx.Mul)):
        return type(value)(_in_float32(value.a), _in_float32(value.b))
    if isinstance(value, tirx.Cast) and "int" in str(value.value.ty.dtype):
        field = _field(value)
        return value.value.astype("float32") if field is None else _number(*field, 0.0)
    return value.astype("float32")


def _field(value: ir.Expr) -> tuple[ir.Expr, ir.Expr, int] | None:
    """Recognise a cast of some bits of a stored number; returns it, how far up the bits begin, and their mask."""
    if not isinstance(value, tirx.Cast):
        return None
    masked = value.value
    if not isinstance(masked, tirx.BitwiseAnd) or str(masked.ty.dtype) not in STORED:
        return None
    if not is_constant(masked.b) or not isinstance(masked.a, tirx.RShift):
        return None
    mask = int(masked.b)
    few_ones = 0 < mask < 256 and not mask & (mask + 1)
    return (masked.a.a, masked.a.b, mask) if few_ones else None


def _number(stored: ir.Expr, by: ir.Expr, mask: int, zero: float) -> ir.Expr:
    """Make the float32 number of some bits, less a zero point; ``by`` is a number once loops are written out."""
    by = by.astype("int32")
    lowered = tirx.Select(by + mask.bit_length() > MANTISSA, tirx.const(16, "int32"), tirx.const(0, "int32"))
    stored, place = tirx.shift_right(stored, lowered.astype(str(stored.ty.dtype))), by - lowered
    field = tirx.const(mask, "uint32") << place.astype("uint32")
    bits = (stored.astype("uint32") & field) | tirx.const((BIAS + MANTISSA) << MANTISSA, "uint32")
    offset = _power(MANTISSA - place) + tirx.const(zero, "float32")
    return tirx.reinterpret("float32", bits) * _power(-place) - offset


def _power(exponent: ir.Expr) -> ir.Expr:
    """Make the float32 power of two of a small whole number."""
    return tirx.reinterpret("float32", (exponent + BIAS).astype("uint32") << tirx.const(MANTISSA, "uint32"))
