"""Products of transposed operands read these where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import tvm
from tvm import ir, relax, te, tirx
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import rewrite_functions
from tensorir_ladder.schedules.inspection import is_one


@tvm.transform.module_pass(opt_level=0, name="ReadTransposed")
class ReadTransposed:
    """Make products of operands whose last two axes are exchanged read them as they lie in memory.

    ::

        before   w_t = permute_dims(w);  matmul(x, w_t)
        after    call_tir(NT_matmul, x, w)            # sum over k of x[.., i, k] * w[.., j, k]

    What else reads ``w_t`` keeps it. TVM's ``FuseTransposeMatmul`` does this for the second operand, and fails where
    that is read elsewhere too, has one axis, or is the first operand as well (x times its own transpose).
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Untransposed(mod)
        return rewrite_functions(mod, rewriter, rewriter.visit_expr)


@relax.expr_functor.mutator
class _Untransposed(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        call = super().visit_call_(call)
        if call.op != ir.Op.get("relax.matmul") or min(operand.ty.ndim for operand in call.args) < 2:
            return call
        if isinstance(call.args[0].ty.shape[-1], tirx.IntImm) and call.args[0].ty.shape[-1] == 0:
            return call  # TVM writes zeros, where a sum over nothing would leave its output as it was
        sources = [self._transposed(operand) for operand in call.args]
        turned = [source is not None for source in sources]
        if not any(turned):
            return call
        operands = [operand if source is None else source for source, operand in zip(sources, call.args)]
        name = "".join("NT"[one] for one in turned) + "_matmul"
        product = partial(_product, turned=turned, dtype=call.ty.dtype, name=name)
        return self.builder_.call_te(product, *operands, primfunc_name_hint=name)

    def _transposed(self, operand: relax.Expr) -> relax.Expr | None:
        """Return what an operand is the transpose of in its last two axes; None for others."""
        made = self.lookup_binding(operand) if isinstance(operand, relax.Var) else operand
        if not isinstance(made, relax.Call) or made.op != ir.Op.get("relax.permute_dims"):
            return None
        count = operand.ty.ndim
        order = [*range(count)][::-1] if made.attrs.axes is None else [int(axis) % count for axis in made.attrs.axes]
        return made.args[0] if order == [*range(count - 2), count - 1, count - 2] else None


def _product(a: te.Tensor, b: te.Tensor, *, turned: Sequence[bool], dtype: ir.Type, name: str) -> te.Tensor:
    """Compute a @ b, each ``turned`` one of which lies transposed; axes before the last two broadcast.

    Extents are the operands': what Relax knows of the result has variables of its own in their place.
    """
    batch = [_broadcast(a, b, place) for place in range(-max(len(a.shape), len(b.shape)), -2)]
    shape = [*batch, a.shape[-1 if turned[0] else -2], b.shape[-2 if turned[1] else -1]]
    k = te.reduce_axis((0, a.shape[-2 if turned[0] else -1]), name="k")

    def place(operand: te.Tensor, batch: Sequence[tirx.Var], last: tuple[tirx.Var, ...]) -> ir.Expr:
        own = zip(operand.shape[:-2], batch[len(batch) - len(operand.shape) + 2 :])
        whole = [0 if is_one(extent) else axis for extent, axis in own]
        return operand(*whole, *last).astype(dtype)

    def element(*index: tirx.Var) -> ir.Expr:
        *batch, row, column = index
        first = place(a, batch, (k, row) if turned[0] else (row, k))
        return te.sum(first * place(b, batch, (column, k) if turned[1] else (k, column)), axis=k)

    return te.compute(shape, element, name=name)


def _broadcast(a: te.Tensor, b: te.Tensor, place: int) -> ir.Expr:
    """Return the extent of a broadcast axis, counted from the last."""
    own = [operand.shape[place] for operand in (a, b) if len(operand.shape) >= -place]
    return next((extent for extent in own if not is_one(extent)), own[0])
