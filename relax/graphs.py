"""What passes over Relax graphs ask of an expression."""

from __future__ import annotations

import tvm
from tvm import ir, relax


def number(operand: relax.Expr) -> float | None:
    """Return the number that an operand is, a constant of one element; None for others."""
    if not isinstance(operand, ir.GenericConst) or not isinstance(operand.value, tvm.runtime.Tensor):
        return None
    values = operand.value.numpy()
    return float(values.item()) if values.size == 1 else None


def is_call(call: relax.Expr | None, name: str) -> bool:
    """Tell if an expression calls the operator ``relax.name``."""
    return isinstance(call, relax.Call) and call.op == ir.Op.get(f"relax.{name}")
