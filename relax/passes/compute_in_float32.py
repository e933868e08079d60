"""What TVM cannot compute in 16 bits is computed in float32."""

from __future__ import annotations

import tvm
from tvm import ir, relax
from tvm.ir.transform import PassContext


@tvm.transform.module_pass(opt_level=0, name="ComputeInFloat32")
class ComputeInFloat32:
    """Compute in float32 what TVM cannot compute in 16 bits: powers of bfloat16, and batch norms.

    ::

        before   power(x, y)
        after    astype(power(astype(x, "float32"), astype(y, "float32")), "bfloat16")

        before   batch_norm(x, gamma, beta, mean, var)                     # float16, not training
        after    astype((x - mean) / sqrt(var + epsilon) * gamma + beta, "float16")      # all of it in float32

    TVM's legalization fails at both. ``DecomposeOpsForInference`` rounds a batch norm four times; torch, once.
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
        if call.op == ir.Op.get("relax.nn.batch_norm") and not call.attrs.training:
            dtype = str(call.args[0].ty.dtype)
            return self._normalized(call) if dtype in ("float16", "bfloat16") else call
        return call

    def _normalized(self, call: relax.Call) -> relax.Expr:
        emit, channels = self.builder_.emit, call.args[0].ty.ndim
        others = [axis for axis in range(channels) if axis != int(call.attrs.axis) % channels]
        x, *vectors = map(self._wide, call.args)
        gamma, beta, mean, variance = (emit(relax.op.expand_dims(vector, others)) for vector in vectors)
        deviation = emit(relax.op.sqrt(emit(variance + relax.const(float(call.attrs.epsilon), "float32"))))
        made = emit(relax.op.divide(emit(x - mean), deviation))
        made = emit(made * gamma) if call.attrs.scale else made
        made = emit(made + beta) if call.attrs.center else made
        narrow = emit(relax.op.astype(made, str(call.args[0].ty.dtype)))
        return relax.Tuple([narrow, call.args[3], call.args[4]])

    def _wide(self, operand: relax.Expr) -> relax.Expr:
        if isinstance(operand, ir.GenericConst):
            return relax.const(operand.value.numpy().astype("float32"), "float32")
        return self.builder_.emit(relax.op.astype(operand, "float32"))
