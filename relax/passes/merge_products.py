"""Projections of one input become one product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, relax
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import is_call, of_weights
from tensorir_ladder.relax.rules import same_number
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import PTX_TYPES


@tvm.transform.module_pass(opt_level=0, name="MergeProducts")
class MergeProducts:
    """Multiply an input once by the weights of all linear layers whose results are then cut into heads.

    ::

        before   q = add(matmul(x, permute_dims(w_q)), b_q);  k = ...;  v = ...      # each reshaped next
        after    y = add(matmul(x, permute_dims(concat(w_q, w_k, w_v))), concat(b_q, b_k, b_v))
                 q, k, v = slices of y

    One product of many columns fills a GPU that three of few do not. The weights are joined by what depends on
    parameters alone: for modules in which that is lifted out (``pipeline(prepare=True)``). Taken are 16-bit layers
    of known columns, with or without a bias, whose weights are transposed, as PyTorch's, or not, as ONNX's. Results
    that nothing but reshapes read are merged; others are better finished in the epilogue of a product of their own.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Merged(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.groups = _groups(function)
                if rewriter.groups:
                    changed = relax.analysis.remove_all_unused(rewriter.visit_expr(function))
                    rewriter.builder_.update_func(name, changed)
        return relax.transform.CanonicalizeBindings()(rewriter.builder_.get())


@dataclass(frozen=True)
class _Layer:
    """A linear layer: the call that makes its result, its weights, their axis of its columns, and its bias, if any."""

    result: relax.Call
    weight: relax.Expr
    axis: int
    bias: relax.Expr | None

    @property
    def prepared(self) -> list[relax.Expr]:
        """List its weights and its bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def columns(self) -> int:
        return int(self.weight.ty.shape[self.axis])


def _groups(function: relax.Function) -> dict[relax.Call, tuple[relax.Expr, list[_Layer]]]:
    """List what is merged, by the call of each layer's result: the input, and all layers of the group."""
    values = relax.analysis.get_var2val(function)
    blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
    readers = {var: list(own) for block in blocks for var, own in relax.analysis.udchain(block).items()}
    weights = of_weights(function)
    by_input: dict[tuple[int, int, relax.Expr], list[tuple[int, _Layer]]] = {}
    bound = {binding.var: place for place, binding in enumerate(each for block in blocks for each in block.bindings)}
    for number, block in enumerate(blocks):
        for binding in block.bindings:
            if not is_call(getattr(binding, "value", None), "matmul"):
                continue
            x, turned = binding.value.args
            weight, axis = _transposed(values.get(turned), weights), 0
            if weight is None and turned in weights and _is_matrix(turned):
                weight, axis = turned, 1
            if weight is None:
                continue
            var, result, bias = binding.var, binding.value, None
            after = readers.get(var, ())
            if len(after) == 1 and is_call(add := values.get(after[0]), "add"):
                other = add.args[1] if add.args[0].same_as(var) else add.args[0]
                if other in weights and other.ty.ndim == 1 and same_number(other.ty.shape[0], weight.ty.shape[axis]):
                    var, result, bias = after[0], add, other
            layer, dtype = _Layer(result, weight, axis, bias), str(weight.ty.dtype)
            alike = all(str(each.ty.dtype) == dtype for each in (binding.value, result))
            if alike and readers.get(var) and all(is_call(values.get(reader), "reshape") for reader in readers[var]):
                by_input.setdefault((number, axis, x), []).append((bound[var], layer))
    found = {}
    for (*_, x), placed in by_input.items():
        first = min(place for place, _ in placed)  # where the product will stand
        layers = [layer for _, layer in placed if all(bound.get(each, -1) < first for each in layer.prepared)]
        if len(layers) > 1 and any(place == first and layer in layers for place, layer in placed):
            found |= {layer.result: (x, layers) for layer in layers}
    return found


def _transposed(made: relax.Expr | None, weights: set[relax.Var]) -> relax.Expr | None:
    """Return the weights that a call transposes; None for others than :func:`_is_matrix` takes."""
    taken = is_call(made, "permute_dims") and made.args[0] in weights and _is_matrix(made.args[0])
    return made.args[0] if taken else None


def _is_matrix(weight: relax.Expr) -> bool:
    """Tell if weights are a 16-bit matrix of known size."""
    shape = weight.ty.shape
    known = isinstance(shape, relax.ShapeExpr) and all(map(is_constant, shape.values))
    return known and weight.ty.ndim == 2 and str(weight.ty.dtype) in PTX_TYPES


@relax.expr_functor.mutator
class _Merged(relax.PyExprMutator):
    groups: Mapping[relax.Call, tuple[relax.Expr, Sequence[_Layer]]] = {}

    def __init__(self, mod: ir.IRModule) -> None:
        super().__init__(mod)
        self.made: dict[relax.Call, relax.Expr] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        if call not in self.groups:
            return super().visit_call_(call)
        if call not in self.made:
            self._merge(*self.groups[call])
        return self.made[call]

    def _merge(self, x: relax.Expr, layers: Sequence[_Layer]) -> None:
        """Emit a group's product, and note each layer's part of it."""
        emit, dtype, axis = self.builder_.emit, str(layers[0].weight.ty.dtype), layers[0].axis
        joined = emit(relax.op.concat([self.visit_expr(layer.weight) for layer in layers], axis=axis))
        product = emit(relax.op.matmul(self.visit_expr(x), joined if axis else emit(relax.op.permute_dims(joined))))
        if any(layer.bias is not None for layer in layers):
            biases = [
                emit(relax.op.zeros((layer.columns,), dtype)) if layer.bias is None else self.visit_expr(layer.bias)
                for layer in layers
            ]
            product = emit(relax.op.add(product, emit(relax.op.concat(biases, axis=0))))
        first, last = 0, product.ty.ndim - 1
        for layer in layers:
            cut = relax.op.strided_slice(product, [last], [first], [first + layer.columns])
            self.made[layer.result] = emit(cut)
            first += layer.columns
