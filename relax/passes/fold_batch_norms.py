"""Batch norms of inference go into the weights of the convolutions in front of them."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import is_call, rewrite_functions
from tensorir_ladder.schedules.isa import PTX_TYPES

CONVOLUTIONS = tuple(f"nn.conv{rank}d" for rank in (1, 2, 3))
WIDE = "float32"
TAKEN = (*PTX_TYPES, WIDE)


@tvm.transform.module_pass(opt_level=0, name="FoldBatchNorms")
class FoldBatchNorms:
    """Fold batch norms of inference into the convolutions in front of them; write others as a scale and a shift.

    ::

        before   batch_norm(conv2d(x, w) + bias, gamma, beta, mean, var)                        # float16
        after    scale = gamma / sqrt(var + epsilon);  shift = beta + (bias - mean) * scale     # float32
                 folded = astype(w * scale, "float16")
                 astype(conv2d(x, folded, out_dtype="float32") + shift, "float16")

        before   batch_norm(x, gamma, beta, mean, var)          # behind no convolution, or what is read elsewhere too
        after    astype(x * scale + shift, "float16")                                           # in float32

    What is computed of weights depends on parameters alone: ``LiftTransformParams`` takes it out of a call. Weights of
    16 bits are rounded once more, results once, where a convolution and its batch norm round twice. Left are batch
    norms in training, and of float64. TVM's ``DecomposeOpsForInference`` rounds four times.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Folded(mod)
        return rewrite_functions(mod, rewriter, rewriter.rewritten)


@relax.expr_functor.mutator
class _Folded(relax.PyExprMutator):
    def rewritten(self, function: relax.Function) -> relax.Function:
        blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
        self.readers = {var: readers for block in blocks for var, readers in relax.analysis.udchain(block).items()}
        self.values = relax.analysis.get_var2val(function)
        return relax.analysis.remove_all_unused(self.visit_expr(function))

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        if not is_call(call, "nn.batch_norm") or call.attrs.training or str(call.args[0].ty.dtype) not in TAKEN:
            return super().visit_call_(call)
        convolution, bias = self._convolution(call)
        value = self._scaled(call) if convolution is None else self._in_weights(convolution, bias, call)
        made = self.builder_.emit(relax.op.astype(value, str(call.args[0].ty.dtype)))
        return relax.Tuple([made, *map(self.visit_expr, call.args[3:])])

    def _convolution(self, norm: relax.Call) -> tuple[relax.Call | None, relax.Expr | None]:
        """Return the convolution that nothing but a batch norm reads, and its bias; None where there is none."""
        found, bias = self._read_once(norm.args[0]), None
        if is_call(found, "add"):
            for one, other in (found.args, found.args[::-1]):
                if _is_of_channels(other, norm) and is_call(self._read_once(one), *CONVOLUTIONS):
                    found, bias = self._read_once(one), other
        if not is_call(found, *CONVOLUTIONS):
            return None, None
        layout = str(found.attrs.out_layout)
        plain = len(layout) == norm.args[0].ty.ndim and layout.index("C") == _axis(norm)
        return (found, bias) if plain else (None, None)

    def _read_once(self, var: relax.Expr) -> relax.Expr | None:
        """Return what makes a variable that is read once; None for others."""
        once = isinstance(var, relax.DataflowVar) and len(self.readers[var]) == 1
        return self.values.get(var) if once else None

    def _in_weights(self, convolution: relax.Call, bias: relax.Expr | None, norm: relax.Call) -> relax.Expr:
        emit, attrs = self.builder_.emit, convolution.attrs
        x, weight = map(self.visit_expr, convolution.args)
        channels = [weight.ty.shape[axis] if name == "O" else 1 for axis, name in enumerate(str(attrs.kernel_layout))]
        scale = emit(relax.op.reshape(self._scale(norm), channels))
        folded = emit(relax.op.astype(emit(self._wide(weight) * scale), str(weight.ty.dtype)))
        names = ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout", "out_layout")
        given = {name: getattr(attrs, name) for name in names}
        operator = getattr(relax.op.nn, str(convolution.op.name).rpartition(".")[2])
        made = emit(operator(x, folded, **given, out_dtype=WIDE))
        return emit(made + self._along_channels(self._shift(norm, bias), norm))

    def _scaled(self, norm: relax.Call) -> relax.Expr:
        emit = self.builder_.emit
        scaled = emit(self._wide(self.visit_expr(norm.args[0])) * self._along_channels(self._scale(norm), norm))
        return emit(scaled + self._along_channels(self._shift(norm, None), norm))

    def _scale(self, norm: relax.Call) -> relax.Expr:
        """Emit what each channel is multiplied by; anew for each reader, so that it becomes a part of its function."""
        emit, variance = self.builder_.emit, self._wide(self.visit_expr(norm.args[4]))
        deviation = emit(relax.op.sqrt(emit(variance + relax.const(float(norm.attrs.epsilon), WIDE))))
        one = relax.const(1, WIDE)
        return emit(relax.op.divide(self._wide(self.visit_expr(norm.args[1])) if norm.attrs.scale else one, deviation))

    def _shift(self, norm: relax.Call, bias: relax.Expr | None) -> relax.Expr:
        """Emit what is added to each channel."""
        emit = self.builder_.emit
        beta, mean = (self._wide(self.visit_expr(norm.args[place])) for place in (2, 3))
        if bias is not None:
            vector = emit(relax.op.reshape(self.visit_expr(bias), norm.args[3].ty.shape))
            mean = emit(mean - self._wide(vector))
        moved = emit(mean * self._scale(norm))
        return emit(beta - moved if norm.attrs.center else relax.op.negative(moved))

    def _along_channels(self, vector: relax.Expr, norm: relax.Call) -> relax.Expr:
        others = [axis for axis in range(norm.args[0].ty.ndim) if axis != _axis(norm)]
        return self.builder_.emit(relax.op.expand_dims(vector, others))

    def _wide(self, operand: relax.Expr) -> relax.Expr:
        if isinstance(operand, ir.GenericConst):
            return relax.const(operand.value.numpy().astype(WIDE), WIDE)
        return operand if str(operand.ty.dtype) == WIDE else self.builder_.emit(relax.op.astype(operand, WIDE))


def _axis(norm: relax.Call) -> int:
    return int(norm.attrs.axis) % norm.args[0].ty.ndim


def _is_of_channels(operand: relax.Expr, norm: relax.Call) -> bool:
    """Tell whether an operand has an element for each channel, and is broadcast along all else."""
    if not isinstance(operand.ty.shape, relax.ShapeExpr) or operand.ty.ndim < norm.args[0].ty.ndim - _axis(norm):
        return False
    channels = operand.ty.ndim - norm.args[0].ty.ndim + _axis(norm)
    extents, (count,) = operand.ty.shape.values, norm.args[3].ty.shape.values
    wanted = [count if axis == channels else tirx.const(1, "int64") for axis in range(len(extents))]
    return tvm_ffi.structural_equal([*extents], wanted)
