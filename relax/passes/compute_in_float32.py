"""Powers of bfloat16 are computed in float32."""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.ir.transform import PassContext


@tvm.transform.module_pass(opt_level=0, name="ComputeInFloat32")
class ComputeInFloat32:
    """Compute powers of bfloat16 in float32: TVM's legalization fails at them.

    ::

        before   power(x, y)
        after    astype(power(astype(x, "float32"), astype(y, "float32")), "bfloat16")
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _InFloat32(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(name, rewriter.visit_expr(function))
        return rewriter.builder_.get()


@relax.expr_functor.mutator
class _InFloat32(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        call = super().visit_call_(call)
        if call.op == ir.Op.get("relax.power") and str(call.ty.dtype) == "bfloat16":
            wide = relax.op.power(*map(self._wide, call.args))
            return relax.op.astype(self.builder_.emit(wide), "bfloat16")
        return call

    def _wide(self, operand: relax.Expr) -> relax.Expr:
        if isinstance(operand, ir.GenericConst):
            return relax.const(operand.value.numpy().astype("float32"), "float32")
        return self.builder_.emit(relax.op.astype(operand, "float32"))
