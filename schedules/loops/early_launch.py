"""Kernels of a scheduled function that are launched while the one before them in the stream still runs.

Between two kernels a GPU waits until the last block has ended, what it wrote can be read, and the next launch has been
brought. By programmatic dependent launch these go on beside each other. A function of several kernels (operands copied
in front, parts added up behind) waits between them; one that is called again and again waits between calls. On an H200
a kernel took 0.22 us less so, of 16 float32 products by one kernel each, and 0.35 us less by two, of 17 (medians; none
took longer).

Blocks could begin sooner still, when all of the kernel before have begun (``griddepcontrol.launch_dependents``): one
kernel then took 0.58 us less. But such blocks come where there is room first, and lie unevenly: 15 of 67 products took
longer, up to 1.23 times as long (7298 x 322 x 165, 345 blocks where each multiprocessor has room for four).

TVM's runtime has a flag for such launches, which its passes never set, and its schedules have no word for the
instruction. Source: CUDA programming guide, "Programmatic dependent launch".
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.s_tir import Schedule
from tvm.script import tirx as T
from tvm.target import Target

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.loops.residency import KERNEL
from tensorir_ladder.schedules.passes import needs_of, require_pipeline

FLAG = "tirx.use_programtic_dependent_launch"  # sic: TVM's launch tag, without a value
EARLY = "kernels launched early"  # what a schedule needs our pipeline for
BEGINS_EARLY = "tensorir_ladder.begins_early"  # attribute of a function until its launches are flagged
FIRST_ARCH = 90  # whose grids can wait for each other
LAUNCH = ir.Op.get("tirx.call_ffi_kernel")


def can_launch_early(target: Target) -> bool:
    """Tell whether a target's kernels can wait for each other by themselves: sm_90 and newer."""
    arch = re.fullmatch(r"sm_(\d+)[af]?", str(target.attrs.get("arch", "")))
    return arch is not None and int(arch.group(1)) >= FIRST_ARCH


def launch_early(sch: Schedule) -> None:
    """Let each kernel of the function be launched while the one before it in the stream, whatever it is, still runs.

    ::

        before   copies<<<...>>>(A, A_pad)                # A_pad = A
                 product<<<...>>>(A_pad, B, C)            # when all blocks of copies have ended
        after    copies<<<..., early>>>(A, A_pad)         # wait until what is before has ended; A_pad = A
                 product<<<..., early>>>(A_pad, B, C)     # wait until copies has ended, and can be read; ...

    Each block waits before anything else, so that no kernel reads or writes what another still has to; kernels behind
    are ordered by the same wait. Changes nothing before the function is lowered (:func:`lower_early_launches`), which
    raises IllegalSchedule for a target older than sm_90: ask :func:`can_launch_early`. Lowered ahead
    (:func:`schedules.pipeline.lowering.lower_ahead`) its launches are ordinary ones, and so are its kernels.
    """
    require_pipeline(sch, EARLY)


def mark_early(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep what :func:`launch_early` asked for, which is taken off before TVM's passes; part of the lowering."""
    return function.with_attr(BEGINS_EARLY, 1) if EARLY in needs_of(function) else function


@tvm.transform.module_pass(opt_level=0, name="LowerEarlyLaunches")
def lower_early_launches(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Let kernels of the functions that :func:`mark_early` marked wait by themselves, and flag their launches.

    Raises IllegalSchedule for a target that cannot.
    """
    hosts = {name for name, function in mod.functions_items() if BEGINS_EARLY in (function.attrs or {})}
    early = {str(call.args[0].value) for name in hosts for call in _launches(mod[name])}
    changed = {}
    for name, function in mod.functions_items():
        if name.name_hint in early:
            _check_target(function)
            wait = tirx.Evaluate(T.ptx.griddepcontrol.wait())
            changed[name] = flag_kernel(function.with_body(tirx.SeqStmt([wait, function.body])))
        else:
            changed[name] = flag_launches(function.without_attr(BEGINS_EARLY)) if name in hosts else function
    return tvm.IRModule(changed, attrs=mod.attrs, global_infos=mod.global_infos)


def _check_target(kernel: tirx.PrimFunc) -> None:
    target = kernel.attrs["target"]
    if not can_launch_early(target):
        raise IllegalSchedule(
            "kernels that are launched early wait by an instruction that the target lacks",
            value=str(target.attrs.get("arch", target.kind.name)),
            limit=f"sm_{FIRST_ARCH} and newer",
            remedy="leave launch_early out where can_launch_early(target) is false",
        )


def flag_kernel(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Flag a lowered kernel as one that is launched early."""
    return kernel.with_attr(KERNEL, flagged(map(str, kernel.attrs[KERNEL])))


def flag_launches(host: tirx.PrimFunc) -> tirx.PrimFunc:
    """Flag all launches of a lowered host function."""

    def flag(call: ir.Call) -> ir.Expr:
        if not call.op.same_as(LAUNCH):
            return call
        tags = flagged(map(str, call.attrs.launch_params))
        return tirx.op.call_ffi_kernel(*call.args, launch_params=tags, ret_ty=call.ty)

    return tvm_ffi.structural_map(host, (ir.Call, flag))


def flagged(tags: Iterable[str]) -> list[str]:
    """Return launch tags with the flag, which takes no value; shared memory stays last."""
    *others, last = tags
    return [*others, FLAG, last]


def _launches(function: tirx.PrimFunc) -> list[ir.Call]:
    found: list[ir.Call] = []
    tvm_ffi.structural_walk(function, (ir.Call, lambda call: found.append(call) if call.op.same_as(LAUNCH) else None))
    return found
