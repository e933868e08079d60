"""Copies at ragged edges in one instruction: cp.async fills with zeros what it does not read.

TVM lowers a conditional asynchronous copy to two instructions under opposite predicates: cp.async, or else a store of
zeros to shared memory. The instruction can do both: told to read fewer bytes than it writes, it fills the rest with
zeros (PTX ISA, cp.async, operand src-size), and reads nothing at all where that is 0.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call

from .vectorization import VECTOR_BYTES, dtype_bytes

COPY = "tirx.s_tir.cp_async_raw"
CONDITIONAL = 6  # arguments of a copy under a condition: both buffers and offsets, bytes, condition


def fill_with_zeros(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make each conditional asynchronous copy one instruction; part of the lowering pipeline, at its end.

    ::

        before   if inside: cp.async shared[16 bytes], global;   else: shared[16 bytes] = 0
        after    cp.async shared[16 bytes], global, inside ? 16 : 0 bytes
    """
    return tvm_ffi.structural_map(function, (ir.Call, _in_one))


def _in_one(call: ir.Call) -> ir.Call:
    if str(getattr(call.op, "name", "")) != COPY or len(call.args) != CONDITIONAL:
        return call
    shared, shared_offset, source, source_offset, size, inside = call.args
    count, item = int(size), dtype_bytes(str(call.ty))
    cached = "cg" if count == VECTOR_BYTES else "ca"
    name = f"ptx_cp_async_legacy_pred_{cached}_{count}_{item}_zero_fill"
    text = (
        f"__forceinline__ __device__ void {name}(void* shared, int to, void* source, int from, bool inside) {{\n"
        f"  unsigned int address = __cvta_generic_to_shared((char*)shared + to * {item});\n"
        f'  asm volatile("cp.async.{cached}.shared.global [%0], [%1], {count}, %2;"\n'
        f'    :: "r"(address), "l"((char*)source + (long long)from * {item}), "r"(inside ? {count} : 0) : "memory");\n'
        "}\n"
    )
    return cuda_func_call(name, shared, shared_offset, source, source_offset, inside, source_code=text)
