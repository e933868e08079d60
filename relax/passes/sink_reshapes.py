"""Reshapes around linear layers move out of the way of what follows."""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import is_call, number, rewrite_functions
from tensorir_ladder.relax.rules import same_number

UNARY = ("nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.relu", "sigmoid", "tanh", "erf", "exp", "negative", "sqrt", "astype")
BINARY = ("add", "subtract", "multiply", "divide", "power")


@tvm.transform.module_pass(opt_level=0, name="SinkReshapes")
class SinkReshapes:
    """Compute in the shape before a reshape that joins all axes but the last, and reshape the result.

    ::

        before   a = reshape(x, (rows, k));  y = reshape(add(matmul(a, w), bias), (batch, tokens, n));  gelu(y)
        after    y = add(matmul(x, w), bias);  gelu(y)

    Such reshapes stand around each linear layer that torch's decompositions write as ``addmm``. TVM fuses nothing
    behind the second one with the product. Results are reshaped further down; two reshapes in a row become one, or none
    where the shape is what it was.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Sinks(mod)
        return relax.transform.CanonicalizeBindings()(rewrite_functions(mod, rewriter, rewriter.visit_expr))


@relax.expr_functor.mutator
class _Sinks(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        call = super().visit_call_(call)
        if is_call(call, "reshape"):
            return self._once(call)
        if not isinstance(call.op, ir.Op) or not isinstance(getattr(call.ty, "shape", None), relax.ShapeExpr):
            return call
        sources = [self._before_joining(operand) for operand in call.args]
        if is_call(call, "matmul"):
            sources[1] = None
        if any(source is not None for source in sources) and self._is_alike(call, sources):
            operands = [operand if source is None else source for source, operand in zip(sources, call.args)]
            made = self.builder_.emit(relax.Call(call.op, operands, call.attrs, call.ty_args))
            return relax.op.reshape(made, call.ty.shape)
        return call

    def _once(self, call: relax.Call) -> relax.Expr:
        """Reshape what is reshaped already at once, or not at all."""
        inner = self.lookup_binding(call.args[0]) if isinstance(call.args[0], relax.Var) else None
        if not is_call(inner, "reshape") or self._joined(call) is not None:
            return call
        source, wanted = inner.args[0], call.args[1]
        if not isinstance(wanted, relax.ShapeExpr):
            return call
        return source if _same_shape(source, wanted.values) else relax.op.reshape(source, wanted)

    def _before_joining(self, operand: relax.Expr) -> relax.Expr | None:
        """Return what an operand was before all its axes but the last were joined; None for other operands."""
        made = self.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        return self._joined(made) if is_call(made, "reshape") else None

    def _joined(self, reshape: relax.Call) -> relax.Expr | None:
        """Return the operand of a reshape that joins all its axes but the last; None for other reshapes."""
        source, wanted = reshape.args
        shape = source.ty.shape
        if not isinstance(shape, relax.ShapeExpr) or not isinstance(wanted, relax.ShapeExpr):
            return None
        joins = len(wanted.values) == 2 < len(shape.values)
        return source if joins and same_number(shape.values[-1], wanted.values[-1]) else None

    def _is_alike(self, call: relax.Call, sources: list[relax.Expr | None]) -> bool:
        """Tell if a call computes the same for each row of its operands before their axes were joined."""
        if is_call(call, "matmul"):
            return sources[0] is not None and call.args[1].ty.ndim == 2  # weights of all rows
        if any(is_call(call, name) for name in UNARY):
            return True
        if not any(is_call(call, name) for name in BINARY):
            return False
        first = next(source for source in sources if source is not None)
        return all(
            number(operand) is not None or operand.ty.ndim == 1
            if source is None
            else _same_shape(source, first.ty.shape.values)
            for source, operand in zip(sources, call.args)
        )


def _same_shape(operand: relax.Expr, wanted: list[tvm.tirx.PrimExpr]) -> bool:
    shape = operand.ty.shape
    known = isinstance(shape, relax.ShapeExpr) and len(shape.values) == len(wanted)
    return known and all(map(same_number, shape.values, wanted))
