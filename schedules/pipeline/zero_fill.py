"""Asynchronous copies that fill with zeros by themselves where their predicate is false.

TVM writes two instructions for a predicated copy, of which each thread executes one::

    @p cp.async [shared], [global], 4;    @!p st.shared [shared], 0

cp.async takes the number of bytes to read as an operand, and fills the rest with zeros: one instruction, and of 0 bytes
it reads nothing. That counts where elements are copied one by one, and instructions are what a loop waits for.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.passes import require_pipeline

ZERO_FILL = "zero_fill"
RAW_COPY, PREDICATED = "tirx.s_tir.cp_async_raw", 6  # TVM's call, and its arguments with a predicate


def fill_with_zeros(sch: Schedule, loop: LoopRV) -> None:
    """Let the predicated asynchronous copies of the kernel around ``loop`` fill with zeros, each by one instruction.

    ::

        before   if inside:  cp.async(A_shared[i, k], A[i, k])     else:  A_shared[i, k] = 0
        after    cp.async(A_shared[i, k], A[i, k], bytes = 4 if inside else 0)

    Changes nothing before the function is lowered (:func:`lower_zero_fills`). ``loop`` stays as it is.
    """
    require_pipeline(sch, "copies that fill with zeros")
    sch.annotate(loop, ZERO_FILL, 1)


def lower_zero_fills(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Rewrite the copies of a kernel that :func:`fill_with_zeros` marked; part of the lowering pipeline."""
    marked: list[tirx.For] = []

    def unmarked(loop: tirx.For) -> tirx.For:
        if ZERO_FILL not in loop.annotations:
            return loop
        marked.append(loop)
        kept = {key: value for key, value in loop.annotations.items() if key != ZERO_FILL}
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, kept)

    body = tvm_ffi.structural_map(function.body, (tirx.For, unmarked))
    return function.with_body(tvm_ffi.structural_map(body, (ir.Call, _filling))) if marked else function


def _filling(call: ir.Call) -> ir.Call:
    if call.op.name != RAW_COPY or len(call.args) != PREDICATED:
        return call
    to, to_offset, source, offset, size, predicate = call.args
    width, (to_type, source_type) = int(size), (str(pointer.ty.element_type.dtype) for pointer in (to, source))
    cached = "cg" if width == VECTOR_BYTES else "ca"
    name = f"ptx_cp_async_legacy_pred_{cached}_{width}_zero_fill"
    text = f"""
__forceinline__ __device__ void {name}(void* to, void* from, int predicate) {{
  unsigned int shared = __cvta_generic_to_shared(to);
  asm volatile("cp.async.{cached}.shared.global [%0], [%1], %2, %3;"
               :: "r"(shared), "l"(from), "n"({width}), "r"(predicate ? {width} : 0));
}}
"""
    # Addresses in a form that TVM moves when it puts several tiles into one array of shared memory.
    addresses = [
        tirx.call_intrin("handle", "tirx.tvm_access_ptr", tirx.type_annotation(dtype), pointer, place, width, access)
        for dtype, pointer, place, access in ((to_type, to, to_offset, 2), (source_type, source, offset, 1))
    ]
    return cuda_func_call(name, *addresses, predicate, source_code=text)
