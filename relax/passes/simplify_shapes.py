"""Extents by the bounds of symbols, and slices up to these."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, relax, sym, te, tirx
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.rules.rule import OPAQUE
from tensorir_ladder.schedules.inspection import is_constant

MOST_EXTENT = 2**31 - 1


@tvm.transform.module_pass(opt_level=0, name="SimplifyShapes")
class SimplifyShapes:
    """Simplify extents by the bounds of symbols that torch.export gives, which Relax leaves aside.

    ::

        before   y: (max(min(1, n) + n - 1, 0),) = ...;   z: of unknown shape = subtract(y, x)       # n is 2 or more
        after    y1: (n,) = match_cast(y);                z: (n,) = subtract(y1, x)

    The bounds are the function's attributes ``tir_var_lower_bound`` and ``tir_var_upper_bound``; extents are 0 or more
    without. A call with other extents than the simplified ones fails in ``match_cast``, when it is made. Slices with
    symbolic bounds are legalized here: TVM refuses axis -1, and bounds that are no extent (docs/tvm.md, "Slices up to
    a symbol").
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _SimpleShapes(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(name, rewriter.rewritten(function))
        return rewriter.builder_.get()


@relax.expr_functor.mutator
class _SimpleShapes(relax.PyExprMutator):
    def rewritten(self, function: relax.Function) -> relax.Expr:
        """Return a function with the extents of what its operators read simplified."""
        attributes = function.attrs or {}
        low, high = (attributes.get(f"tir_var_{which}_bound", {}) for which in ("lower", "upper"))
        self.analyzer = sym.Analyzer()
        for symbol in relax.analysis.free_symbolic_vars(function.body) + relax.analysis.defined_symbolic_vars(function):
            least, most = int(low.get(symbol.name, 0)), int(high.get(symbol.name, MOST_EXTENT))
            self.analyzer.bind(symbol, ir.Range(least, most + 1), allow_override=True)
        return self.visit_expr(function)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, ir.Op):
            return call
        operands = [self._simplified(operand) for operand in call.args]
        if not all(map(tvm_ffi.structural_equal, operands, call.args)):
            call = relax.Call(call.op, operands, call.attrs, call.ty_args)
        return self._sliced(call) if call.op == ir.Op.get("relax.strided_slice") else call

    def _simplified(self, operand: relax.Expr) -> relax.Expr:
        """Return an operand whose extents are as short as the bounds let them be."""
        known = isinstance(operand, relax.Var) and isinstance(operand.ty, relax.TensorType)
        if not known or not isinstance(operand.ty.shape, relax.ShapeExpr):
            return operand
        written = operand.ty.shape.values
        extents = [self.analyzer.simplify(extent) for extent in written]
        if all(map(tvm_ffi.structural_equal, extents, map(sym.Analyzer().simplify, written))):
            return operand
        return self.builder_.match_cast(operand, relax.TensorType(extents, operand.ty.dtype))

    def _sliced(self, call: relax.Call) -> relax.Expr:
        """Legalize a slice whose bounds have symbols, and whose extents Relax knows."""
        call = self.builder_.normalize(call)
        operand, *lists = call.args
        if not all(isinstance(one, ir.Tuple) for one in lists) or not isinstance(call.ty.shape, relax.ShapeExpr):
            return call
        axes, begins, ends, *given = ([*one.fields] for one in lists)
        strides = given[0] if given else [tirx.const(1, "int64")] * len(axes)
        if all(map(is_constant, (*begins, *ends))) or not all(is_constant(one) and int(one) > 0 for one in strides):
            return call
        places = [int(axis) % operand.ty.ndim for axis in axes]
        shape = [self.analyzer.simplify(extent) for extent in call.ty.shape.values]
        extents, zero = operand.ty.shape.values, tirx.const(0, "int64")
        firsts = [
            self.analyzer.simplify(tirx.Max(tirx.Select(begin < 0, begin + extents[place], begin), zero))
            for place, begin in zip(places, begins)
        ]

        def part(x: te.Tensor, firsts: list[ir.Expr], shape: list[ir.Expr]) -> te.Tensor:
            def element(*index: tirx.Var) -> ir.Expr:
                taken = list(index)
                for place, first, stride in zip(places, firsts, strides):
                    taken[place] = first + index[place] * stride
                return x(*taken)

            return te.compute(shape, element, name="slice")

        # FuseTIR fails on functions of numbers.
        attributes = {"op_pattern": OPAQUE}
        return self.builder_.call_te(
            part, operand, firsts, shape, primfunc_name_hint="strided_slice", primfunc_attrs=attributes
        )
