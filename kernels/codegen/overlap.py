"""Let kernels begin before the one before them in the stream has ended: programmatic dependent launch.

Such a kernel is launched as soon as multiprocessors have room, does what needs no data (barriers, tensor maps), and
waits by itself, with ``griddepcontrol.wait``, until the kernel before is done and its results can be read. TVM's
runtime has a flag for such launches, but its passes never set it; a pipeline of passes here does. Source: CUDA
programming guide, "Programmatic dependent launch".
"""

from __future__ import annotations

import functools

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.tirx import compilation_pipeline

PIPELINE = "tirx_overlapping"
FLAG = "tirx.use_programtic_dependent_launch"  # sic
LAUNCH_PARAMS = "tirx.kernel_launch_params"
LAUNCH = ir.Op.get("tirx.call_ffi_kernel")


def flagged(tags: list[str]) -> list[str]:
    """Launch tags with the flag, which takes no value; shared memory stays last."""
    return [*tags[:-1], FLAG, tags[-1]]


@tvm.transform.module_pass(opt_level=0, name="FlagOverlap")
def flag_overlap(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Flag every launch of a lowered module, in the kernels' attributes and where the host launches them."""
    changed = {}
    for name, function in mod.functions_items():
        tags = function.attrs.get(LAUNCH_PARAMS)
        if tags is not None:
            changed[name] = function.with_attr(LAUNCH_PARAMS, flagged(list(tags)))
        else:
            changed[name] = tvm_ffi.structural_map(function, (ir.Call, _flag_launch))
    return tvm.IRModule(changed, attrs=mod.attrs)


def _flag_launch(call: ir.Call) -> ir.Expr:
    if not call.op.same_as(LAUNCH):
        return call
    tags = flagged([str(tag) for tag in call.attrs.launch_params])
    return tirx.op.call_ffi_kernel(*call.args, launch_params=tags, ret_ty=call.ty)


@functools.cache
def register() -> str:
    """Make the pipeline known to TVM; returns its name."""

    def overlapping() -> tuple:
        lower, *finalize = tirx.get_tir_pipeline("tirx")
        return tvm.transform.Sequential([lower, flag_overlap]), *finalize

    compilation_pipeline.register_tir_pipeline(PIPELINE, overlapping)
    return PIPELINE
