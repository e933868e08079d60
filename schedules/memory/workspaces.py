"""Device memory that a function of several kernels keeps between them: found, counted, and passed in from outside.

TVM lets the function take such memory from a pool of its own at each call. The pool gives a block back to the driver
when another function asks for a larger one; a CUDA graph that captured the first function's launches then works in
memory that is no longer its own. Memory passed as an argument belongs to the caller, for as long as the caller wants.
"""

from __future__ import annotations

import math

from tvm import ir, s_tir, tirx

from tensorir_ladder.schedules.inspection import DEVICE_SCOPES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.passes import root_of, with_body
from tensorir_ladder.schedules.stamps import roles_of


def workspaces(mod: ir.IRModule) -> list[tirx.Var]:
    """Return the buffers in device memory that a scheduled module's function "main" allocates, in the order it does."""
    root = root_of(mod["main"])
    return [buffer for buffer in root.alloc_buffers if buffer.scope() in DEVICE_SCOPES] if root else []


def workspace_bytes(mod: ir.IRModule) -> int:
    """Return the bytes of all of them together."""
    return sum(math.prod(map(int, buffer.shape)) * dtype_bytes(buffer.dtype) for buffer in workspaces(mod))


def pass_workspaces(mod: ir.IRModule) -> ir.IRModule:
    """Make the memory between a function's kernels further arguments of it, behind the others.

    ::

        before   def main(A, B, C):         A_pad = alloc(...);  first kernel fills A_pad;  second reads it
        after    def main(A, B, C, A_pad):                       first kernel fills A_pad;  second reads it

    A module whose function keeps nothing is returned as it is.
    """
    function, passed = mod["main"], workspaces(mod)
    root = root_of(function)
    if root is None or not passed:
        return mod
    kept = [buffer for buffer in root.alloc_buffers if buffer not in passed]
    body = s_tir.SBlockRealize([], True, with_body(root, root.body, alloc_buffers=kept))
    behind = 1 if roles_of(function) else 0  # time stamps stay last
    params = list(function.params)
    params = [*params[: len(params) - behind], *passed, *params[len(params) - behind :]]
    changed = tirx.PrimFunc(params, body, function.ret_type, function.attrs)
    return ir.IRModule({name: changed if name.name_hint == "main" else other for name, other in mod.functions_items()})
