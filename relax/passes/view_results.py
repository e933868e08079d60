"""Return views of results that are reshaped last."""

from __future__ import annotations

import math

import tvm
from tvm import ir, relax, tirx
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import is_call, rewrite_functions
from tensorir_ladder.relax.rules import same_number


@tvm.transform.module_pass(opt_level=0, name="ViewResults")
class ViewResults:
    """Return a view of what a function of the module computes in the place of a reshaped copy.

    ::

        before   y = call_tir(matmul, x, w);  gv = call_tir(reshape, y);  return gv
        after    y = call_tir(matmul, x, w);  gv = memory.view(y, shape);  return gv

    TVM makes views of reshapes, but not of those that are results. Left as they are: reshapes of what a caller gave
    (results share no memory with operands), and of what is a result itself.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Views(mod)
        return rewrite_functions(mod, rewriter, rewriter.visit_expr)


@relax.expr_functor.mutator
class _Views(relax.PyExprMutator):
    def __init__(self, mod: ir.IRModule) -> None:
        super().__init__(mod)
        self.mod = mod

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:  # what the mutator's base class calls it
        source = None if isinstance(binding.var, relax.DataflowVar) else self._reshaped(binding.value)
        if isinstance(source, relax.DataflowVar) and self._is_computed(source):
            binding = relax.VarBinding(
                binding.var, relax.op.memory.view(source, binding.var.ty.shape, binding.var.ty.dtype)
            )
        super().visit_var_binding_(binding)

    def _reshaped(self, value: relax.Expr | None) -> relax.Expr | None:
        """Return the operand of a call of a function that reshapes it; None for other values."""
        given = value.args[1].fields if is_call(value, "call_tir") else ()
        tensors = [each for each in given if isinstance(each.ty, relax.TensorType)]
        if len(tensors) != 1:
            return None
        operand = tensors[0]
        alike = isinstance(value.ty, relax.TensorType) and operand.ty.dtype == value.ty.dtype
        whole = alike and same_number(
            *(math.prod(each.ty.shape.values, start=tirx.const(1, "int64")) for each in (operand, value))
        )
        return operand if whole and relax.analysis.has_reshape_pattern(self.mod[value.args[0]]) else None

    def _is_computed(self, operand: relax.Expr) -> bool:
        """Tell if an operand is what a function of the module wrote, seen through reshapes."""
        value = self.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        reshaped = self._reshaped(value)
        return is_call(value, "call_tir") if reshaped is None else self._is_computed(reshaped)
