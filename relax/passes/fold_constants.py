"""What depends on no input is computed once, when a module is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import tvm
from tvm import ir, relax
from tvm.ir.transform import PassContext
from tvm.target import Target

from tensorir_ladder.relax.graphs import is_call
from tensorir_ladder.relax.passes.legalize_scans import LegalizeScans
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes

SCANS = ("relax.cumsum", "relax.cumprod")  # whose functions are LegalizeScans'
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
MOST_BYTES = 64 << 20  # of a constant: as many as a mask of 8192 x 4096 tokens has in float16


@tvm.transform.module_pass(opt_level=0, name="FoldConstants")
class FoldConstants:
    """Compute on the CPU what a function computes from constants alone, and keep the results as constants.

    ::

        before   i = arange(512);  seen = less_equal(i[None, :], i[:, None]);  mask = where(seen, 0, -inf)
                 attention_bias(q, k, v, mask)
        after    attention_bias(q, k, v, constant)

    Positions, angles of rotary embeddings and masks of models as torch.export writes them are such. Taken are
    operators in dataflow whose results have known shapes and at most :data:`MOST_BYTES` bytes. Each call makes what its
    caller gets, or what is changed in place, anew. Comparisons of bools are left: LLVM refuses what TVM makes of them.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _Rewriter(mod)
        for name, function in mod.functions_items():
            found = _independent(function) if isinstance(function, relax.Function) else {}
            if found:
                rewriter.constants = _computed(found, _read_elsewhere(function, found))
                changed = relax.analysis.remove_all_unused(rewriter.visit_expr(function))
                rewriter.builder_.update_func(name, changed)
        return relax.transform.CanonicalizeBindings()(rewriter.builder_.get())


def _bindings(function: relax.Function) -> Iterator[relax.VarBinding]:
    """List what a function's dataflow binds to variables."""
    for block in function.body.blocks if isinstance(function.body, relax.SeqExpr) else []:
        if isinstance(block, relax.DataflowBlock):
            yield from (each for each in block.bindings if isinstance(each, relax.VarBinding))


def _independent(function: relax.Function) -> dict[relax.Var, relax.Call]:
    """List operators that constants alone go into, by their results, in the order in which they are computed."""
    found: dict[relax.Var, relax.Call] = {}

    def known(operand: relax.Expr) -> bool:
        if isinstance(operand, relax.Tuple):
            return all(map(known, operand.fields))
        if isinstance(operand, relax.ShapeExpr):
            return all(map(is_constant, operand.values))
        if isinstance(operand, relax.Var):
            return operand in found
        return isinstance(operand, ir.GenericConst) or is_constant(operand)

    written = _written(function)
    for binding in _bindings(function):
        call = binding.value
        if binding.var in written:
            continue
        is_operator = isinstance(call, relax.Call) and isinstance(call.op, ir.Op) and _is_pure(call.op)
        if is_operator and not _compares_bools(call) and _is_small(call.ty) and all(map(known, call.args)):
            found[binding.var] = call
    return found


def _written(function: relax.Function) -> set[relax.Var]:
    """List what a caller gets, or a call changes in place: each call of the function makes its own."""
    found: set[relax.Var] = set()

    def note(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Var):
            found.add(expr)

    relax.analysis.post_order_visit(function.body.body, note)
    for binding in [*_bindings(function)][::-1]:
        in_place = is_call(binding.value, "call_tir_inplace")
        is_output = binding.var in found or not isinstance(binding.var, relax.DataflowVar)
        if in_place or (is_output and isinstance(binding.value, (relax.Var, relax.Tuple))):
            relax.analysis.post_order_visit(binding.value, note)
        if is_output:
            found.add(binding.var)
    return found


def _is_pure(op: ir.Op) -> bool:
    """Tell operators whose results follow from their operands, and of which functions are made."""
    return bool(op.get_attr("FPurity")) and (op.get_attr("FLegalize") is not None or str(op.name) in SCANS)


def _compares_bools(call: relax.Call) -> bool:
    return is_call(call, *COMPARISONS) and str(call.args[0].ty.dtype) == "bool"


def _is_small(made: ir.Type) -> bool:
    if not isinstance(made, relax.TensorType) or not isinstance(made.shape, relax.ShapeExpr):
        return False
    count = 1
    for extent in made.shape.values:
        if not is_constant(extent):
            return False
        count *= int(extent)
    return 0 < count * dtype_bytes(str(made.dtype)) <= MOST_BYTES


def _read_elsewhere(function: relax.Function, found: Mapping[relax.Var, relax.Call]) -> list[relax.Var]:
    """List which of the results something else reads."""
    read: dict[relax.Var, None] = {}

    def note(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Var) and expr in found:
            read[expr] = None

    for binding in _bindings(function):
        if binding.var not in found:
            relax.analysis.post_order_visit(binding.value, note)
    relax.analysis.post_order_visit(function.body.body, note)
    return [*read]


def _computed(found: Mapping[relax.Var, relax.Call], wanted: list[relax.Var]) -> dict[relax.Call, relax.Expr]:
    """Compute results on the CPU; return each as a constant, by the call that makes it."""
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            made: dict[relax.Var, relax.Expr] = {}
            for var, call in found.items():
                made[var] = builder.emit(_Renamed(made).visit_expr(call))
            out = builder.emit_output(relax.Tuple([made[var] for var in wanted]))
        builder.emit_func_output(out)
    made_of = LegalizeScans()(builder.get())
    with PassContext():  # what is configured for the module's own target is not for this
        executable = tvm.compile(made_of, Target("llvm"))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return {found[var]: relax.const(result) for var, result in zip(wanted, machine["main"]())}


@relax.expr_functor.mutator
class _Renamed(relax.PyExprMutator):
    """Puts other variables in the place of some."""

    def __init__(self, names: Mapping[relax.Var, relax.Expr]) -> None:
        super().__init__()
        self.names = names

    def visit_var_(self, var: relax.Var) -> relax.Expr:  # what the mutator's base class calls it
        return self.names.get(var, var)

    visit_dataflow_var_ = visit_var_


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    """Puts constants in the place of the calls that make them."""

    constants: Mapping[relax.Call, relax.Expr] = MappingProxyType({})

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        return self.constants[call] if call in self.constants else super().visit_call_(call)
