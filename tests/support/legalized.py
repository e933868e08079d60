"""Relax's operators as the functions that TVM makes of them: legalised, and fused where one follows another."""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import relax, tirx

from support.relax_modules import made_of

Shape = tuple[int | str, ...]
ELEMENTWISE = 0  # include/tvm/relax/op_attr_types.h


def legalized(
    body: Callable[..., relax.Expr], *shapes: Shape, dtype: str = "float16", joins: str = "", **dtypes: str
) -> list[tirx.PrimFunc]:
    """Return the functions of an expression of ``x0``, ``x1``, ... with these shapes; a name is a symbolic extent.

    ``dtypes`` are of inputs that have another than ``dtype``; a function named ``joins`` is fused with what comes
    before it, which TVM does to elementwise ones alone. No two parameters of a function have one name.
    """
    names = [f"x{number}" for number in range(len(shapes))]
    module = made_of({name: (shape, dtypes.get(name, dtype)) for name, shape in zip(names, shapes)}, body)
    r = relax.transform
    module = tvm.ir.transform.Sequential([r.LegalizeOps(), r.AnnotateTIROpPattern(), r.FoldConstant()])(module)
    for name, function in module.functions_items():
        if name.name_hint == joins:
            module[name] = function.with_attr("op_pattern", ELEMENTWISE)
    module = tvm.ir.transform.Sequential([r.FuseOps(), r.FuseTIR()])(module)
    return [_with_names(f) for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]


def _with_names(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give each parameter a name of its own."""
    renamed = {p: tirx.Var(f"{p.name}_{place}", p.ty) for place, p in enumerate(function.params)}
    body = tvm_ffi.structural_map(function.body, (tirx.Var, lambda var: renamed.get(var, var)))
    return tirx.PrimFunc(list(renamed.values()), body, function.ret_type, function.attrs)
