"""Let kernels begin before the one before them in the stream has ended: programmatic dependent launch.

Such a kernel is launched as soon as multiprocessors have room, does what needs no data (barriers, tensor maps), and
waits by itself, with ``griddepcontrol.wait``, until the kernel before is done and its results can be read. TVM's
runtime has a flag for such launches, but its passes never set it; a pipeline of passes here does. Source: CUDA
programming guide, "Programmatic dependent launch".
"""

from __future__ import annotations

import functools

import tvm
from tvm import tirx
from tvm.tirx import compilation_pipeline

from tensorir_ladder.schedules.loops import flag_kernel, flag_launches
from tensorir_ladder.schedules.loops.residency import KERNEL

PIPELINE = "tirx_overlapping"


@tvm.transform.module_pass(opt_level=0, name="FlagOverlap")
def flag_overlap(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Flag every launch of a lowered module, in the kernels' attributes and where the host launches them."""
    changed = {
        name: flag_kernel(function) if KERNEL in (function.attrs or {}) else flag_launches(function)
        for name, function in mod.functions_items()
    }
    return tvm.IRModule(changed, attrs=mod.attrs)


@functools.cache
def register() -> str:
    """Make the pipeline known to TVM; returns its name."""

    def overlapping() -> tuple:
        lower, *finalize = tirx.get_tir_pipeline("tirx")
        return tvm.transform.Sequential([lower, flag_overlap]), *finalize

    compilation_pipeline.register_tir_pipeline(PIPELINE, overlapping)
    return PIPELINE
