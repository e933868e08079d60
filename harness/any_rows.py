"""Kernels whose number of rows is known at run time only, bound to the number of one call."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, sym, tirx

from tensorir_ladder.schedules.workloads import ROWS


def takes_any_rows(device: tvm.IRModule) -> bool:
    """Return whether a lowered function's kernels are told the number of rows at each launch."""
    return any(param.name == ROWS for function in device.functions.values() for param in function.params)


def launched_with_rows(host: tvm.IRModule, device: tvm.IRModule, rows: int) -> dict[str, tvm.IRModule]:
    """Make a lowered function's "host" and "device" with the launches of a call with so many rows.

    For those who read what is launched: figures, the emulator. The text and the cubin are the same for every number.
    """
    bound: dict[str, ir.Expr] = {}  # the host's, some of which kernels are told
    for function in host.functions.values():
        tvm_ffi.structural_walk(function.body, (tirx.Bind, lambda stmt: bound.update({stmt.var.name: stmt.value})))
    bound[ROWS] = tirx.IntImm("int32", rows)
    return {
        part: tvm.IRModule({name: _launched(function, bound) for name, function in mod.functions_items()})
        for part, mod in (("host", host), ("device", device))
    }


def _launched(function: tirx.PrimFunc, bound: dict[str, ir.Expr]) -> tirx.PrimFunc:
    # Launches get numbers in the places of variables that are bound.
    def known_value(var: tirx.Var) -> ir.Expr:
        return number(bound[var.name]) if var.name in bound else var

    def number(value: ir.Expr) -> ir.Expr:
        if str(value.ty) != "int32":
            return value
        return sym.Analyzer().simplify(tvm_ffi.structural_map(value, (tirx.Var, known_value)))

    def launch(call: ir.Call) -> ir.Call:
        if getattr(call.op, "name", "") != "tirx.call_ffi_kernel":
            return call
        kernel, *values = call.args
        return ir.Call(call.op, [kernel, *map(number, values)], call.attrs, call.ty_args, ret_ty=call.ty)

    def extent(attribute: tirx.AttrStmt) -> tirx.AttrStmt:
        if attribute.attr_key != "thread_extent":
            return attribute
        return tirx.AttrStmt(attribute.node, attribute.attr_key, number(attribute.value), attribute.body)

    return tvm_ffi.structural_map(function, [(ir.Call, launch), (tirx.AttrStmt, extent)])
