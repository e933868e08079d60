"""Passes over modules, made of what changes a function."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import ir, tirx


def on_functions(change: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> tvm.transform.Pass:
    """Return a pass that puts ``change(function)`` in the place of each function, and bears its name."""

    @tvm.transform.module_pass(opt_level=0, name=change.__name__)
    def run(mod: ir.IRModule, _context: tvm.transform.PassContext) -> ir.IRModule:
        return tvm.IRModule({name: change(function) for name, function in mod.functions_items()})

    return run
