"""Values of expressions in generated CUDA: whole numbers, none of them negative, read without running any text."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def value_of(expression: str, names: Mapping[str, int]) -> int:
    """The value of an expression without casts, for values of the names in it; ``&&`` and ``||`` are 0 or 1."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Compare):
            [compared], [right] = node.ops, node.comparators
            return int(OPERATORS[type(compared)](value(node.left), value(right)))
        if isinstance(node, ast.BoolOp):
            joined = all if isinstance(node.op, ast.And) else any
            return int(joined(value(each) for each in node.values))
        return names[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    text = expression.replace("&&", " and ").replace("||", " or ")
    return value(ast.parse(text.strip(), mode="eval").body)
