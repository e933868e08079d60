"""Passes over Relax modules that TVM's own pipeline lacks, or has with gaps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, sym, te, tirx
from tvm.ir.transform import PassContext

from tensorir_ladder.relax.rules.rule import OPAQUE
from tensorir_ladder.schedules.inspection import is_constant, is_one

MOST_EXTENT = 2**31 - 1
NARROW = re.compile(r"u?int\d+|float[468]_")  # dtypes that weights are kept in, and made wider ones of


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
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                changed = relax.analysis.remove_all_unused(rewriter.visit_expr(function))
                rewriter.builder_.update_func(name, changed)
        return rewriter.builder_.get()


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


@tvm.transform.module_pass(opt_level=0, name="DequantizeInProduct")
class DequantizeInProduct:
    """Put functions that make weights wide from few bits into the product that reads them.

    ::

        before   w = call_tir(dequantize, codes, scales);  call_tir(matmul, x, w)
        after    dequantize_matmul(x, codes, scales)       # to be fused by FuseTIR: one function

    By itself TVM fuses nothing before a product: wide weights would go to memory and come back in every call. Taken are
    functions without a reduction of operands of known shapes, some of few bits, all of them together smaller
    than the result, which nothing but a function with one sum of products reads.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        return _Joined(mod, _is_product, _is_narrow_to_wide).module()


@tvm.transform.module_pass(opt_level=0, name="WidenInRows")
class WidenInRows:
    """Put functions that make numbers wider, element by element, into the reductions that read them.

    ::

        before   s = call_tir(scaled_and_masked, x);  call_tir(softmax, s)       # x is float16, s float32
        after    scaled_and_masked_softmax(x)              # to be fused by FuseTIR: one function

    TVM would fuse them with what comes before, a product say, which then writes twice the bytes, and the reductions
    read as many; by themselves they are a kernel of their own. Taken are functions without a reduction of one operand,
    which has the result's shape and a narrower dtype, if nothing but one function of rows reads the result.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        return _Joined(mod, _is_of_rows, _makes_wider).module()


@relax.expr_functor.mutator
class _Joined(relax.PyExprMutator):
    """Joins calls of one kind of function with those that make their operands, if these are of another kind."""

    def __init__(
        self,
        mod: ir.IRModule,
        reads: Callable[[tirx.PrimFunc], bool],
        makes: Callable[[tirx.PrimFunc], bool],
    ) -> None:
        super().__init__(mod)
        self.mod, self.reads, self.makes = mod, reads, makes
        self.readers: dict[relax.Var, list[relax.Var]] = {}

    def module(self) -> ir.IRModule:
        """Return the module with each Relax function rewritten."""
        for name, function in self.mod.functions_items():
            if isinstance(function, relax.Function):
                self.builder_.update_func(name, self.rewritten(function))
        return self.builder_.get()

    def rewritten(self, function: relax.Function) -> relax.Function:
        blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
        self.readers = {var: readers for block in blocks for var, readers in relax.analysis.udchain(block).items()}
        return relax.analysis.remove_all_unused(self.visit_expr(function))

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        read_once = [self._is_read_once(call, operand) for operand in _operands(call)]
        call = super().visit_call_(call)
        if not _calls(call, self.mod, self.reads):
            return call
        made = {}
        for place, (operand, once) in enumerate(zip(_operands(call), read_once)):
            source = self.lookup_binding(operand) if once else None
            if source is not None and _calls(source, self.mod, self.makes):
                made[place] = source
        return self._joined(call, made) if made else call

    def _is_read_once(self, call: relax.Call, operand: relax.Expr) -> bool:
        places = sum(operand.same_as(other) for other in _operands(call))
        return isinstance(operand, relax.DataflowVar) and len(self.readers[operand]) == places == 1

    def _joined(self, product: relax.Call, made: dict[int, relax.Call]) -> relax.Call:
        """Emit a call of a function that makes operands, by the place that each has, and the product of them."""
        parts = {place: _operands(made[place]) if place in made else [o] for place, o in enumerate(_operands(product))}
        given = {
            place: [relax.Var(f"operand{place}_{number}", part.ty) for number, part in enumerate(own)]
            for place, own in parts.items()
        }
        name = "_".join(one.args[0].name_hint for one in (*made.values(), product))
        builder = relax.BlockBuilder()
        with builder.function(name, [*chain(*given.values())], attrs={"Primitive": True}):
            with builder.dataflow():
                wide = [
                    builder.emit(relax.call_tir(made[place].args[0], own, made[place].ty_args[0]))
                    if place in made
                    else own[0]
                    for place, own in given.items()
                ]
                out = builder.emit_output(relax.call_tir(product.args[0], wide, product.ty_args[0]))
            builder.emit_func_output(out)
        function = relax.utils.copy_with_new_vars(builder.get()[name]).without_attr("global_symbol")
        return relax.Call(self.builder_.add_func(function, name), [*chain(*parts.values())])


def _operands(call: relax.Expr) -> list[relax.Expr]:
    """List what a call of a function in TIR is given; nothing for other calls."""
    of_function = isinstance(call, relax.Call) and call.op == ir.Op.get("relax.call_tir") and len(call.args) == 2
    return list(call.args[1].fields) if of_function else []


def _calls(call: relax.Expr, mod: ir.IRModule, kind: Callable[[tirx.PrimFunc], bool]) -> bool:
    return bool(_operands(call)) and kind(mod[call.args[0]])


def _is_product(function: tirx.PrimFunc) -> bool:
    """Tell whether a function has one reduction, of two operands."""
    reducing = [block for block in _blocks(function) if _reduces(block)]
    return len(reducing) == 1 and len(reducing[0].reads) == 2


def _is_of_rows(function: tirx.PrimFunc) -> bool:
    """Tell whether a function has reductions, none of them of several operands."""
    reducing = [block for block in _blocks(function) if _reduces(block)]
    return bool(reducing) and all(len(_read_by(block)) == 1 for block in reducing)


def _read_by(block: s_tir.SBlock) -> list[tirx.Var]:
    """List what a block reads as long as it reduces: in each of its steps another element."""
    steps = [iterator.var for iterator in block.iter_vars if iterator.iter_type == tirx.IterVar.CommReduce]
    found: list[tirx.Var] = []

    def note(load: ir.TensorLoad) -> None:
        if any(_has(index, step) for index in load.indices for step in steps):
            found.append(load.source)

    tvm_ffi.structural_walk(block.body, (ir.TensorLoad, note))
    return [buffer for place, buffer in enumerate(found) if not any(buffer.same_as(one) for one in found[:place])]


def _has(expression: ir.Expr, variable: tirx.Var) -> bool:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expression, (tirx.Var, found.append))
    return any(variable.same_as(one) for one in found)


def _makes_wider(function: tirx.PrimFunc) -> bool:
    """Tell whether a function computes each element of a wider result from the one of an operand like it."""
    buffers = [parameter for parameter in function.params if hasattr(parameter.ty, "shape")]
    if len(buffers) != 2 or len(function.params) != 2 or any(map(_reduces, _blocks(function))):
        return False
    operand, result = buffers
    alike = tvm_ffi.structural_equal(list(operand.shape), list(result.shape))
    narrower, wider = (tvm.DataType(str(buffer.dtype)).bits for buffer in buffers)
    return alike and narrower < wider and all(_reads_in_place(block) for block in _blocks(function))


def _reads_in_place(block: s_tir.SBlock) -> bool:
    """Tell whether a block reads each element at the place that it writes."""
    places: list[list[ir.Expr]] = []
    tvm_ffi.structural_walk(
        block.body,
        [
            (ir.TensorLoad, lambda load: places.append(list(load.indices))),
            (tirx.BufferStore, lambda store: places.append(list(store.indices))),
        ],
    )
    return all(tvm_ffi.structural_equal(place, places[0]) for place in places)


def _is_narrow_to_wide(function: tirx.PrimFunc) -> bool:
    """Tell whether a function copies operands of known shapes, some of few bits, to a larger result."""
    *operands, result = [parameter for parameter in function.params if hasattr(parameter.ty, "shape")]
    shapes = [extent for buffer in (*operands, result) for extent in buffer.shape]
    if not all(isinstance(extent, tirx.IntImm) for extent in shapes) or any(map(_reduces, _blocks(function))):
        return False
    narrow = any(NARROW.match(str(buffer.dtype)) for buffer in operands)
    return narrow and "float" in str(result.dtype) and sum(map(_bits, operands)) < _bits(result)


def _bits(buffer: tirx.Buffer) -> int:
    return math.prod(map(int, buffer.shape)) * tvm.DataType(str(buffer.dtype)).bits


def _blocks(function: tirx.PrimFunc) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, found.append))
    return found


def _reduces(block: s_tir.SBlock) -> bool:
    return any(iterator.iter_type == tirx.IterVar.CommReduce for iterator in block.iter_vars)
