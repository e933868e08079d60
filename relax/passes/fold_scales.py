"""What a linear layer's results are multiplied by goes into its weights."""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import is_call, number, of_weights, rewrite_functions
from tensorir_ladder.schedules.isa import PTX_TYPES

WIDE = "float32"
MOST = 64


@tvm.transform.module_pass(opt_level=0, name="FoldScales")
class FoldScales:
    """Multiply a linear layer's weights and bias by the number that its results are multiplied by.

    ::

        before   q = multiply(add(matmul(x, permute_dims(w)), b), 0.125)
        after    w_s = astype(w * 0.125, "float16");  b_s = astype(b * 0.125, "float16")
                 q = add(matmul(x, permute_dims(w_s)), b_s)

    So the scale of queries becomes nothing in a call, and does not stand between projections and their heads
    (:class:`MergeProducts`): ``w_s`` and ``b_s`` depend on parameters alone, for modules in which that is lifted out
    (``pipeline(prepare=True)``). Taken are layers of 16 bits throughout, and numbers from 1 / :data:`MOST` to MOST, so
    that weights stay in range; they are rounded once more, results once less.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Folded(mod)
        return rewrite_functions(mod, rewriter, rewriter.rewritten)


@relax.expr_functor.mutator
class _Folded(relax.PyExprMutator):
    def rewritten(self, function: relax.Function) -> relax.Function:
        blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
        self.readers = {var: own for block in blocks for var, own in relax.analysis.udchain(block).items()}
        self.values = relax.analysis.get_var2val(function)
        self.weights = of_weights(function)
        return self.visit_expr(function)

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        if is_call(call, "multiply"):
            for made, scale in (tuple(call.args), tuple(call.args)[::-1]):
                factor = number(scale)
                usual = factor is not None and 1 / MOST <= abs(factor) <= MOST and made.ty.ndim == call.ty.ndim
                if usual and (found := self._layer(made)) is not None:
                    return self._scaled(*found, factor)
        return super().visit_call_(call)

    def _is_vector(self, operand: relax.Expr) -> bool:
        return operand in self.weights and operand.ty.ndim == 1 and str(operand.ty.dtype) in PTX_TYPES

    def _read_once(self, var: relax.Expr) -> relax.Expr | None:
        once = isinstance(var, relax.DataflowVar) and len(self.readers.get(var, ())) == 1
        return self.values.get(var) if once else None

    def _layer(self, result: relax.Expr) -> tuple[relax.Expr, relax.Expr, relax.Expr | None] | None:
        """Return input, weights and bias of the linear layer that makes a result for one reader; None for others."""
        made, bias = self._read_once(result), None
        if is_call(made, "add"):
            for one, other in (tuple(made.args), tuple(made.args)[::-1]):
                if self._is_vector(other) and is_call(self._read_once(one), "matmul"):
                    made, bias = self._read_once(one), other
                    break
        if not is_call(made, "matmul"):
            return None
        turned = self.values.get(made.args[1])
        if not is_call(turned, "permute_dims") or turned.args[0] not in self.weights or turned.args[0].ty.ndim != 2:
            return None
        dtypes = {str(each.ty.dtype) for each in (made, turned.args[0], *([] if bias is None else [bias]))}
        alike = len(dtypes) == 1 and dtypes <= {*PTX_TYPES}
        return (made.args[0], turned.args[0], bias) if alike else None

    def _scaled(self, x: relax.Expr, weight: relax.Expr, bias: relax.Expr | None, factor: float) -> relax.Expr:
        turned = self.builder_.emit(relax.op.permute_dims(self._times(weight, factor)))
        product = relax.op.matmul(self.visit_expr(x), turned)
        return product if bias is None else relax.op.add(self.builder_.emit(product), self._times(bias, factor))

    def _times(self, weights: relax.Expr, factor: float) -> relax.Expr:
        emit = self.builder_.emit
        wide = emit(relax.op.multiply(emit(relax.op.astype(weights, WIDE)), relax.const(factor, WIDE)))
        return emit(relax.op.astype(wide, str(weights.ty.dtype)))
