"""Convolutions of 16 bits get their channels last, and transposes move to the ends of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, sym, tirx
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.graphs import is_call
from tensorir_ladder.schedules.inspection import is_constant, is_one
from tensorir_ladder.schedules.isa import PTX_TYPES

BY_ELEMENTS = (
    *("abs", "astype", "ceil", "clip", "cos", "erf", "exp", "floor", "log", "negative", "round", "rsqrt", "sigmoid"),
    *("sign", "sin", "sqrt", "square", "tanh", "trunc", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu"),
    *("nn.relu6", "nn.selu", "nn.silu", "nn.softplus", "add", "divide", "equal", "floor_divide", "greater"),
    *("greater_equal", "less", "less_equal", "logical_and", "logical_or", "maximum", "minimum", "mod", "multiply"),
    *("not_equal", "power", "subtract", "where"),
)
REDUCTIONS = ("max", "mean", "min", "prod", "sum")
POOLS = tuple(f"nn.{kind}_pool{rank}d" for rank in (1, 2, 3) for kind in ("max", "avg", "adaptive_avg"))
LAYOUTS = {3: ("NCW", "OIW"), 4: ("NCHW", "OIHW"), 5: ("NCDHW", "OIDHW")}
REWRITES = {  # the method that rewrites an operator
    **dict.fromkeys(BY_ELEMENTS, "by_elements"),
    **dict.fromkeys(REDUCTIONS, "reduced"),
    **dict.fromkeys(POOLS, "pooled"),
    **dict.fromkeys(("nn.layer_norm", "nn.group_norm", "nn.instance_norm"), "normalized"),
    **dict.fromkeys(("nn.softmax", "nn.log_softmax"), "along_axis"),
    **dict.fromkeys(("reshape", "squeeze"), "reshaped"),
    "image.resize2d": "resized",
    "concat": "concatenated",
    "split": "split",
    "strided_slice": "sliced",
    "nn.pad": "padded",
    "permute_dims": "turned",
}
Order = list[int]  # of a transpose: axis i of the result is axis order[i] of the operand


@tvm.transform.module_pass(opt_level=0, name="ChannelsLast")
class ChannelsLast:
    """Compute convolutions of 16 bits, and what is between them, with channels last.

    ::

        before   y = conv2d(x, w, "NCHW", "OIHW");  z = relu(y + reshape(bias, (1, c, 1, 1)));  conv2d(z, ...)
        after    x1 = permute_dims(x, (0, 2, 3, 1));  w1 = permute_dims(w, (2, 3, 1, 0))
                 y = conv2d(x1, w1, "NHWC", "HWIO");  z = relu(y + bias);  conv2d(z, ...)       # no transpose between

    A transpose behind a convolution, and one of the graph's own that brings channels to the front, moves behind what
    reads it: operators by elements, pools, reductions, norms, concatenations, splits, slices, paddings, and reshapes
    that keep apart what it moves apart. Two that undo each other vanish. All else reads what is transposed in front of
    it. Transposes of weights depend on parameters alone: ``LiftTransformParams`` takes them out of a call.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module that has such convolutions."""
        if not any(isinstance(one, relax.Function) and _has_convolutions(one) for one in mod.functions.values()):
            return mod
        mod = relax.transform.CanonicalizeBindings()(mod)
        rewriter = _Moved(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function) and _has_convolutions(function):
                rewriter.results = set()
                changed = relax.analysis.remove_all_unused(rewriter.visit_expr(function))
                rewriter.builder_.update_func(name, changed)
        return rewriter.builder_.get()


@relax.expr_functor.mutator
class _Moved(relax.PyExprMutator):
    """Writes operators of transposed operands as transposes of operators."""

    results: set[relax.Var]  # what has channels last because of this pass

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        call = super().visit_call_(call)
        if _is_convolution(call):
            return self._convolved(call)
        rewrite = REWRITES.get(str(call.op.name).removeprefix("relax.")) if isinstance(call.op, ir.Op) else None
        found = next(filter(None, map(self._transposed, _tensors(call))), None) if rewrite else None
        made = getattr(self, rewrite)(call, *found) if found else None
        return call if made is None else made

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        item = super().visit_tuple_getitem_(item)
        made = self._made(item.tuple_value)
        return made.fields[item.index] if isinstance(made, relax.Tuple) else item

    def _made(self, operand: relax.Expr) -> relax.Expr | None:
        """Return what makes an operand."""
        made: relax.Expr | None = operand
        while isinstance(made, relax.Var):
            made = self.lookup_binding(made)
        return made

    def _transposed(self, operand: relax.Expr) -> tuple[relax.Expr, Order] | None:
        """Return what an operand is made of by bringing channels to the front, and the order of axes; None else."""
        made = self._made(operand)
        if not is_call(made, "permute_dims") or _order(made) != _to_front(made.ty.ndim):
            return None
        return (made.args[0], _order(made)) if made.ty.ndim > 3 or made.args[0] in self.results else None

    def _in_front(self, made: relax.Expr) -> relax.Expr:
        """Return the transpose of what has channels last."""
        var = self.builder_.emit(made)
        self.results.add(var)
        return relax.op.permute_dims(var, _to_front(var.ty.ndim))

    def _with_channels_last(self, operand: relax.Expr, order: Order) -> relax.Expr:
        """Return an operand in the order that a transpose is made of."""
        found = self._transposed(operand)
        if found:
            return found[0]
        back = [order.index(axis) for axis in range(len(order))]
        if isinstance(operand, ir.GenericConst):
            return relax.const(np.ascontiguousarray(operand.value.numpy().transpose(back)), str(operand.ty.dtype))
        extents = _extents(operand)
        moved = [axis for axis in back if extents is None or not is_one(extents[axis])]
        if moved == sorted(moved):
            return self.builder_.emit(relax.op.reshape(operand, [extents[axis] for axis in back]))
        return self.builder_.emit(relax.op.permute_dims(operand, back))

    def _broadcast(self, operand: relax.Expr, order: Order) -> relax.Expr:
        """Return an operand of operators by elements in that order: a vector where it has an element for a channel."""
        missing, extents = len(order) - operand.ty.ndim, _extents(operand)
        if operand.ty.ndim == 0:
            return operand
        if missing and extents is None:
            whole = self.builder_.emit(relax.op.expand_dims(operand, [*range(missing)]))
            return self._with_channels_last(whole, order)
        if not missing and self._transposed(operand):
            return self._with_channels_last(operand, order)
        if extents is not None and all(map(is_one, [e for axis, e in enumerate(extents) if axis + missing != 1])):
            vector = self._made(operand)
            is_vector = is_call(vector, "reshape", "expand_dims") and vector.args[0].ty.ndim == 1
            count = extents[1 - missing] if missing < 2 else 1
            return vector.args[0] if is_vector else self._reshaped_to(operand, [count])
        return self._with_channels_last(self._reshaped_to(operand, [1] * missing + [*(extents or ())]), order)

    def _reshaped_to(self, operand: relax.Expr, shape: Sequence[ir.Expr | int]) -> relax.Expr:
        if len(shape) in (0, operand.ty.ndim):
            return operand
        if isinstance(operand, ir.GenericConst):
            return relax.const(operand.value.numpy().reshape([int(e) for e in shape]), str(operand.ty.dtype))
        return self.builder_.emit(relax.op.reshape(operand, shape))

    def _convolved(self, call: relax.Call) -> relax.Expr:
        x, weight = call.args
        space = LAYOUTS[x.ty.ndim][0][2:]
        moved = self._with_channels_last(x, _to_front(x.ty.ndim))
        kernel = self.builder_.emit(relax.op.permute_dims(weight, [*range(2, x.ty.ndim), 1, 0]))
        given = {name: getattr(call.attrs, name) for name in ("strides", "padding", "dilation", "groups", "out_dtype")}
        layouts = {"data_layout": f"N{space}C", "kernel_layout": f"{space}IO"}
        return self._in_front(_operator(call)(moved, kernel, **given, **layouts))

    def by_elements(self, call: relax.Call, _source: relax.Expr, order: Order) -> relax.Expr | None:
        if call.ty.ndim != len(order):
            return None
        tensors = set(_tensors(call))
        given = [self._broadcast(one, order) if one in tensors else one for one in call.args]
        return self._in_front(relax.Call(call.op, given, call.attrs, call.ty_args))

    def reduced(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr | None:
        axes = range(len(order)) if call.attrs.axis is None else [int(axis) % len(order) for axis in call.attrs.axis]
        made = _operator(call)(source, [order[axis] for axis in axes], call.attrs.keepdims)
        left = [axis for place, axis in enumerate(order) if place not in axes]
        if call.attrs.keepdims:
            return self._in_front(made)
        return made if left == sorted(left) else None

    def pooled(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr | None:
        layout = LAYOUTS[len(order)][0]
        if not layout == str(call.attrs.layout) == str(call.attrs.out_layout):
            return None
        names = ("output_size", "pool_size", "strides", "padding", "dilation", "ceil_mode", "count_include_pad")
        given = {name: getattr(call.attrs, name) for name in names if hasattr(call.attrs, name)}
        return self._in_front(_operator(call)(source, **given, layout=f"N{layout[2:]}C"))

    def resized(self, call: relax.Call, source: relax.Expr, _order: Order) -> relax.Expr | None:
        if str(call.attrs.layout) != "NCHW":
            return None
        names = ("roi", "method", "coordinate_transformation_mode", "rounding_method", "cubic_alpha", "cubic_exclude")
        given = {name: getattr(call.attrs, name) for name in (*names, "extrapolation_value", "out_dtype")}
        return self._in_front(_operator(call)(source, call.args[1], **given, layout="NHWC"))

    def normalized(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr | None:
        axes = [order[int(axis) % len(order)] for axis in call.attrs.axes]
        if axes != sorted(axes) and len(axes) > 1 and is_call(call, "nn.layer_norm"):
            return None  # weights would have to be transposed, too
        given = {name: getattr(call.attrs, name) for name in ("epsilon", "center", "scale")}
        if not is_call(call, "nn.layer_norm"):
            given["channel_axis"] = order[int(call.attrs.channel_axis) % len(order)]
        if is_call(call, "nn.group_norm"):
            given["num_groups"] = call.attrs.num_groups
        return self._in_front(_operator(call)(source, *call.args[1:], axes=axes, **given))

    def along_axis(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr:
        return self._in_front(_operator(call)(source, order[int(call.attrs.axis) % len(order)]))

    def concatenated(self, call: relax.Call, _source: relax.Expr, order: Order) -> relax.Expr:
        parts = [self._with_channels_last(part, order) for part in _tensors(call)]
        return self._in_front(relax.op.concat(parts, order[int(call.attrs.axis) % len(order)]))

    def split(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr:
        places = call.attrs.indices_or_sections
        places = int(places) if isinstance(places, tirx.IntImm) else [*places]
        made = self.builder_.emit(relax.op.split(source, places, order[int(call.attrs.axis) % len(order)]))
        parts = [self._in_front(relax.TupleGetItem(made, number)) for number in range(len(made.ty.fields))]
        return relax.Tuple([self.builder_.emit(part) for part in parts])

    def sliced(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr | None:
        if not isinstance(call.args[1], ir.Tuple):
            return None
        axes = [order[int(axis) % len(order)] for axis in call.args[1].fields]
        return self._in_front(relax.op.strided_slice(source, axes, *call.args[2:]))

    def padded(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr:
        width, attrs = [int(each) for each in call.attrs.pad_width], call.attrs
        moved = [width[2 * place + end] for place in map(order.index, range(len(order))) for end in (0, 1)]
        return self._in_front(relax.op.nn.pad(source, moved, attrs.pad_mode, attrs.pad_value))

    def turned(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr:
        both = [order[axis] for axis in _order(call)]
        return source if both == sorted(both) else relax.op.permute_dims(source, both)

    def reshaped(self, call: relax.Call, source: relax.Expr, order: Order) -> relax.Expr | None:
        """Reshape what a transpose is made of, if each of the result's axes is of axes that it keeps together."""
        before, after = _extents(call.args[0]), _extents(call)
        if before and after and tvm_ffi.structural_equal(before, after):
            return call.args[0]
        groups = _groups(before, after) if before and after else None
        if groups is None:
            return None
        places = [[order[axis] for axis in axes if not is_one(before[axis])] for axes, _ in groups]
        taken = sorted(axis for axes in places for axis in axes)
        if any(axes != taken[taken.index(axes[0]) :][: len(axes)] for axes in places if axes):
            return None
        firsts = [min(axes, default=-1) for axes in places]
        in_source = sorted(range(len(groups)), key=firsts.__getitem__)
        axes = [axis for group in in_source for axis in groups[group][1]]
        made, back = relax.op.reshape(source, [after[axis] for axis in axes]), [*map(axes.index, range(len(axes)))]
        if back == sorted(back):
            return made
        return self._in_front(made) if back == _to_front(len(back)) else None


def _groups(before: Sequence[ir.Expr], after: Sequence[ir.Expr]) -> list[tuple[list[int], list[int]]] | None:
    """Pair axes with those that a reshape makes of them, as few at a time as have one product; None if unknown."""
    groups: list[tuple[list[int], list[int]]] = []
    olds, news = list(enumerate(before)), list(enumerate(after))
    same = sym.Analyzer().can_prove_equal
    while olds and news:
        (old, size), (new, made) = olds.pop(0), news.pop(0)
        if groups and is_one(size) and is_one(made):
            groups[-1][0].append(old)
            groups[-1][1].append(new)
            continue
        axes = [old], [new]
        while not same(size, made):
            if not (is_constant(size) and is_constant(made)):
                return None
            grown, rest = (axes[0], olds) if int(size) < int(made) else (axes[1], news)
            if not rest:
                return None
            axis, extent = rest.pop(0)
            grown.append(axis)
            if grown is axes[0]:
                size = size * extent
            else:
                made = made * extent
        groups.append(axes)
    if not groups or not all(is_one(extent) for _, extent in (*olds, *news)):
        return None
    groups[-1][0].extend(axis for axis, _ in olds)
    groups[-1][1].extend(axis for axis, _ in news)
    return groups


def _tensors(call: relax.Call) -> list[relax.Expr]:
    """List the tensors that an operator is given, by themselves or in a tuple."""
    given = [part for one in call.args for part in (one.fields if isinstance(one, relax.Tuple) else [one])]
    return [one for one in given if isinstance(one, relax.Expr) and isinstance(one.ty, relax.TensorType)]


def _operator(call: relax.Call) -> Callable[..., relax.Expr]:
    """Return the function that makes calls of an operator."""
    made: object = relax.op
    for part in str(call.op.name).split(".")[1:]:
        made = getattr(made, part)
    return made


def _extents(operand: relax.Expr) -> list[ir.Expr] | None:
    return [*operand.ty.shape.values] if isinstance(operand.ty.shape, relax.ShapeExpr) else None


def _to_front(axes: int) -> Order:
    """Return the order of a transpose that brings channels from the last place to the second."""
    return [0, axes - 1, *range(1, axes - 1)]


def _order(call: relax.Call) -> Order:
    axes = call.args[0].ty.ndim
    return [*range(axes)][::-1] if call.attrs.axes is None else [int(axis) % axes for axis in call.attrs.axes]


def _is_convolution(call: relax.Expr) -> bool:
    """Tell whether this is a convolution of 16 bits with channels in front."""
    if not is_call(call, "nn.conv1d", "nn.conv2d", "nn.conv3d") or str(call.args[0].ty.dtype) not in PTX_TYPES:
        return False
    attrs, (data, kernel) = call.attrs, LAYOUTS[call.args[0].ty.ndim]
    return data == str(attrs.data_layout) == str(attrs.out_layout) and kernel == str(attrs.kernel_layout)


def _has_convolutions(function: relax.Function) -> bool:
    found: list[relax.Expr] = []
    relax.analysis.post_order_visit(function, lambda node: found.append(node) if _is_convolution(node) else None)
    return bool(found)
