"""Sums are computed once where what reads them repeats them."""

from __future__ import annotations

import math

import tvm
import tvm_ffi
from tvm import ir, relax
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import rewrite_functions
from tensorir_ladder.schedules.inspection import is_constant

INJECTIVE, SUM = 2, 4  # include/tvm/relax/op_attr_types.h: kInjective, which FuseOps puts behind no sum


@tvm.transform.module_pass(opt_level=0, name="KeepSumsSmall")
class KeepSumsSmall:
    """Have ``FuseOps`` leave what repeats sums of products out of the function that computes them.

    ::

        before   s = call_tir(conv2d, z, w);  t = call_tir(sigmoid, s)            # (n, 1, 1, c)
                 y = call_tir(multiply, x, t)                                     # (n, h, w, c)
        after    the same; FuseOps makes conv2d_sigmoid(z, w) and multiply(x, t)

    One function would compute the sums anew for each pixel (squeeze and excitation, added embeddings of time). Left is
    what also reads sums of the result's own size, to be fused with these.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module whose functions in TIR have their pattern."""
        rewriter = _Apart(mod)
        return rewrite_functions(mod, rewriter, rewriter.rewritten)


@relax.expr_functor.mutator
class _Apart(relax.PyExprMutator):
    def __init__(self, mod: ir.IRModule) -> None:
        super().__init__(mod)
        self.mod = mod

    def rewritten(self, function: relax.Function) -> relax.Function:
        blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
        self.readers = {var: readers for block in blocks for var, readers in relax.analysis.udchain(block).items()}
        self.sums: set[relax.Var] = set()  # and what is computed of them, an element of each
        self.repeating: set[relax.Call] = set()
        for block in blocks:
            for binding in block.bindings:
                self._note(binding)
        return self.visit_expr(function)

    def _note(self, binding: relax.Binding) -> None:
        """Note whether a binding computes sums, or something of sums, and whether it repeats them."""
        call = binding.value
        if not isinstance(call, relax.Call) or call.op != ir.Op.get("relax.call_tir") or len(call.args) != 2:
            return
        pattern = int((self.mod[call.args[0]].attrs or {}).get("op_pattern", SUM + 1))
        read = [operand for operand in call.args[1].fields if operand in self.sums]
        same = [operand for operand in read if _repeats(operand, binding.var) is False]
        if pattern == SUM or (pattern <= INJECTIVE and same):
            self.sums.add(binding.var)
        once = [operand for operand in same if len(self.readers[operand]) == 1]
        if pattern <= INJECTIVE and not once and any(_repeats(operand, binding.var) for operand in read):
            self.repeating.add(call)

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        if call not in self.repeating:
            return super().visit_call_(call)
        name, operands = call.args[0], self.visit_expr(call.args[1])
        function = self.mod[name].with_attr("op_pattern", INJECTIVE)
        return relax.Call(
            call.op, [self.builder_.add_func(function, name.name_hint), operands], call.attrs, call.ty_args
        )


def _repeats(operand: relax.Expr, result: relax.Expr) -> bool | None:
    """Tell whether a result has more elements than an operand; None where that is not known."""
    counts = []
    for one in (operand, result):
        if not isinstance(one.ty, relax.TensorType) or not isinstance(one.ty.shape, relax.ShapeExpr):
            return None
        extents = one.ty.shape.values
        symbolic = [extent for extent in extents if not is_constant(extent)]
        counts.append((symbolic, math.prod(int(extent) for extent in extents if is_constant(extent))))
    (own, count), (other, total) = counts
    return total > count if tvm_ffi.structural_equal(own, other) else None
