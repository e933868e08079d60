"""Cumulative sums and products as functions that a rule of ours takes."""

from __future__ import annotations

from functools import partial

import tvm
from tvm import ir, relax, te, tirx
from tvm.ir.transform import PassContext

from tensorir_ladder.schedules.inspection import is_one


@tvm.transform.module_pass(opt_level=0, name="LegalizeScans")
class LegalizeScans:
    """Make functions of cumulative sums and products that :class:`Scan` schedules.

    ::

        before   y = cumsum(x, axis=1)
        after    y = call_tir(cumsum, x)       # y[i, j] = sum over k of (x[i, k] if k <= j else 0); exclusive: k < j

    Without an axis all elements are scanned, in one row. Extents that Relax does not know are given names by a
    ``match_cast``; an operand whose number of axes is unknown stays. TVM's ``DispatchSortScan`` would put kernels of
    its own here, which race (docs/tvm.md).
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _LegalScans(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(name, rewriter.visit_expr(function))
        return rewriter.builder_.get()


@relax.expr_functor.mutator
class _LegalScans(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        operator = next((name for name in ("cumsum", "cumprod") if call.op == ir.Op.get(f"relax.{name}")), None)
        if operator is None or call.args[0].ty.ndim < 0:
            return call
        operand, axis = self._with_extents(call.args[0]), call.attrs.axis
        if axis is None:
            operand = self.builder_.emit(relax.op.flatten(operand))
        scan = partial(
            _scan,
            axis=0 if axis is None else int(axis) % operand.ty.ndim,
            dtype=str(call.ty.dtype),
            adds=operator == "cumsum",
            exclusive=bool(call.attrs.exclusive),
        )
        return self.builder_.call_te(scan, operand, primfunc_name_hint=operator)

    def _with_extents(self, operand: relax.Expr) -> relax.Expr:
        """Return an operand with a symbol for each extent, where its shape is unknown."""
        if isinstance(operand.ty.shape, relax.ShapeExpr):
            return operand
        symbols = [tirx.Var(f"n{place}", "int64") for place in range(operand.ty.ndim)]
        return self.builder_.match_cast(operand, relax.TensorType(symbols, operand.ty.dtype))


def _scan(x: te.Tensor, axis: int, dtype: str, adds: bool, exclusive: bool) -> te.Tensor:
    """Compute the sum or product of the elements up to each along an axis; of flags, whether any or all hold."""
    start = tirx.const(0 if adds else 1, dtype)

    def element(*index: ir.Expr) -> ir.Expr:
        value = x(*index)
        return value if str(x.dtype) == dtype else tirx.Cast(dtype, value)

    if is_one(x.shape[axis]):
        return te.compute(x.shape, lambda *index: start if exclusive else element(*index), name="scan")
    kind = (tirx.Add if adds else tirx.Mul) if dtype != "bool" else (tirx.Or if adds else tirx.And)
    reducer = te.comm_reducer(lambda one, other: kind(one, other), lambda _: start)  # which looks at its code
    step = te.reduce_axis((0, x.shape[axis]), name="step")

    def result(*index: tirx.Var) -> ir.Expr:
        taken = step < index[axis] if exclusive else step <= index[axis]
        return reducer(tirx.if_then_else(taken, element(*index[:axis], step, *index[axis + 1 :]), start), axis=step)

    return te.compute(x.shape, result, name="scan")
