"""The value of a TIR expression when its variables are known: what a host function computes before it launches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from tvm.ir import Expr, PrimType, Var

from tensorir_ladder.kernels.codegen.launch_plan import UnsupportedLaunch

Number = int | float
OPERATIONS: dict[str, Callable[[Number, Number], Number]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "Min": min,
    "Max": max,
    **{name: getattr(operator, name.lower()) for name in ("EQ", "NE", "LT", "LE", "GT", "GE")},
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "BitwiseAnd": operator.and_,
    "BitwiseOr": operator.or_,
    "BitwiseXor": operator.xor,
}


def evaluate(expression: Expr, values: Mapping[Var, Number]) -> Number | None:
    """Compute a scalar expression from its variables' values; None where it depends on anything that has none.

    Raises
    ------
    UnsupportedLaunch : where a whole number leaves the range of its type, which would wrap without a word.
    """
    found = _evaluated(expression, values)
    if isinstance(found, int) and isinstance(expression.ty, PrimType):
        low, high = _range(str(expression.ty.dtype))
        if not low <= found < high:
            raise UnsupportedLaunch(
                f"a whole number of {expression.ty.dtype} is out of its range, in {expression}",
                value=found,
                limit=f"below {high}",
                remedy="call it with smaller extents",
            )
    return found


def _evaluated(expression: Expr, values: Mapping[Var, Number]) -> Number | None:
    kind = type(expression).__name__
    if isinstance(expression, Var):
        return values.get(expression)
    if kind in ("IntImm", "FloatImm"):
        return expression.value
    if kind in ("And", "Or"):
        sides = [evaluate(side, values) for side in (expression.a, expression.b)]
        decides = kind == "Or"  # one side is enough for it
        if any(side is not None and bool(side) == decides for side in sides):
            return int(decides)
        return None if None in sides else int(not decides)
    if kind == "Not":
        side = evaluate(expression.a, values)
        return None if side is None else int(not side)
    if kind == "Cast":
        value, real = evaluate(expression.value, values), "float" in str(expression.ty.dtype)
        return None if value is None else float(value) if real else int(value)
    if kind == "Select" or (kind == "Call" and expression.op.name == "prim.if_then_else"):
        choice = (
            expression.args
            if kind == "Call"
            else (
                expression.condition,
                expression.true_value,
                expression.false_value,
            )
        )
        condition = evaluate(choice[0], values)
        return None if condition is None else evaluate(choice[1 if condition else 2], values)
    if kind in ("Div", "Mod") or kind in OPERATIONS:
        left, right = evaluate(expression.a, values), evaluate(expression.b, values)
        return None if left is None or right is None else _applied(kind, left, right)
    return None


def _applied(kind: str, left: Number, right: Number) -> Number:
    if kind in OPERATIONS:
        found = OPERATIONS[kind](left, right)
        return int(found) if isinstance(found, bool) else found
    if isinstance(left, float) or isinstance(right, float):
        return left / right
    quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    return quotient if kind == "Div" else left - quotient * right


def _range(dtype: str) -> tuple[int, int]:
    """Return the least whole number of a dtype, and the first beyond it."""
    if dtype == "bool":
        return 0, 2
    bits = int(dtype.lstrip("uint") or 64)
    return (0, 2**bits) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
