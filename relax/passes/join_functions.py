"""Functions that make numbers wider, put into those that read them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import chain

import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, tirx
from tvm.ir.transform import PassContext

NARROW = re.compile(r"u?int\d+|float[468]_")  # dtypes that weights are kept in, and made wider ones of


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
