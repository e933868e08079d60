"""Root mean square norms that are written out become TVM's operator."""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import is_call, number, rewrite_functions
from tensorir_ladder.relax.rules import same_number


@tvm.transform.module_pass(opt_level=0, name="RecogniseNorms")
class RecogniseNorms:
    """Make one operator of a norm by the root mean square, as models of transformers write it.

    ::

        before   w = astype(x, float32);  r = rsqrt(mean(power(w, 2), axis=-1) + epsilon)
                 y = multiply(weight, astype(multiply(w, r), float16))
        after    y = nn.rms_norm(x, weight, epsilon)

    Written out, it is a kernel for each time that ``w`` is read, and the product before writes ``w``, of twice the
    bytes. The power may be a product of ``w`` with itself; ``x`` of float32 is not cast. The operator rounds once;
    written out, the norm is rounded before it is multiplied by the weight, too.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Norms(mod)
        return rewrite_functions(mod, rewriter, rewriter.visit_expr)


@relax.expr_functor.mutator
class _Norms(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        call = super().visit_call_(call)
        if is_call(call, "multiply"):
            for weight, normed in _both_ways(call):
                if (found := self._normed(normed)) is not None and _is_weight(weight, found[0]):
                    return relax.op.nn.rms_norm(found[0], weight, -1, found[1])
        return call

    def _made(self, operand: relax.Expr, name: str) -> relax.Call | None:
        """Return the call of an operator that makes an operand; None if another does."""
        made = self.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        return made if is_call(made, name) else None

    def _normed(self, operand: relax.Expr) -> tuple[relax.Expr, float] | None:
        """Return what is divided by its root mean square, and epsilon; None for what is none."""
        narrowed = self._made(operand, "astype")
        scaled = self._made(operand if narrowed is None else narrowed.args[0], "multiply")
        for wide, root in _both_ways(scaled):
            inverse = self._made(root, "rsqrt")
            mean = None if inverse is None else self._made(inverse.args[0], "add")
            for average, epsilon in _both_ways(mean):
                if (added := number(epsilon)) is not None and self._is_mean_square(average, wide):
                    widened = self._made(wide, "astype")
                    source = wide if widened is None else widened.args[0]
                    return (source, added) if source.ty.dtype == operand.ty.dtype else None
        return None

    def _is_mean_square(self, average: relax.Expr, wide: relax.Expr) -> bool:
        mean = self._made(average, "mean")
        if mean is None or not mean.attrs.keepdims or mean.attrs.axis is None:
            return False
        if [int(axis) % wide.ty.ndim for axis in mean.attrs.axis] != [wide.ty.ndim - 1]:
            return False
        if (power := self._made(mean.args[0], "power")) is not None:
            return power.args[0].same_as(wide) and number(power.args[1]) == 2
        square = self._made(mean.args[0], "multiply")
        return square is not None and all(factor.same_as(wide) for factor in square.args)


def _both_ways(call: relax.Call | None) -> list[tuple[relax.Expr, relax.Expr]]:
    """List a call's two operands in either order; nothing for no call."""
    return [] if call is None else [(call.args[0], call.args[1]), (call.args[1], call.args[0])]


def _is_weight(weight: relax.Expr, source: relax.Expr) -> bool:
    """Tell a vector of an element for each of the last axis', of the dtype of what it is multiplied with."""
    known = isinstance(weight.ty, relax.TensorType) and isinstance(weight.ty.shape, relax.ShapeExpr)
    known = known and isinstance(source.ty.shape, relax.ShapeExpr) and weight.ty.dtype == source.ty.dtype
    return known and weight.ty.ndim == 1 and same_number(weight.ty.shape[0], source.ty.shape[source.ty.ndim - 1])
