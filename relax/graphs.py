"""What passes over Relax graphs ask of an expression."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import ir, relax


def number(operand: relax.Expr) -> float | None:
    """Return the number that an operand is, a constant of one element; None for others."""
    if not isinstance(operand, ir.GenericConst) or not isinstance(operand.value, tvm.runtime.Tensor):
        return None
    values = operand.value.numpy()
    return float(values.item()) if values.size == 1 else None


def is_call(call: relax.Expr | None, *names: str) -> bool:
    """Tell if an expression calls an operator of Relax of one of these names, without their ``relax.``."""
    return isinstance(call, relax.Call) and any(call.op == ir.Op.get(f"relax.{name}") for name in names)


def rewrite_functions(
    mod: ir.IRModule, rewriter: relax.PyExprMutator, rewrite: Callable[[relax.Function], relax.Function]
) -> ir.IRModule:
    """Return a module whose Relax functions ``rewrite``, a method of a mutator, has changed, without unused values."""
    for name, function in mod.functions_items():
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(name, relax.analysis.remove_all_unused(rewrite(function)))
    return rewriter.builder_.get()


def of_weights(function: relax.Function) -> set[relax.Var]:
    """Return the variables of a function that its weights alone go into, these themselves among them.

    Weights are the parameters behind the first ``num_input``, an attribute that importers set; none without it.
    """
    inputs = int((function.attrs or {}).get("num_input", len(function.params)))
    found = {*function.params[inputs:]}
    for block in function.body.blocks:
        for binding in block.bindings:
            if isinstance(binding, relax.VarBinding) and isinstance(binding.value, relax.Call):
                read = relax.analysis.free_vars(binding.value)
                if read and all(var in found for var in read):
                    found.add(binding.var)
    return found
