"""TVM's intrinsics for mma.sync: what loads a warp's fragments, and what multiplies them.

All of them are made known to TVM when this is imported, as it is with the group, for a trace names them: it can be
replayed in a process that scheduled nothing itself. Each is described element by element, as the schedule has it, and
implemented by a call of CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

from tvm import ir, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import TensorIntrin
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from tensorir_ladder.schedules.inspection import FRAGMENT, SHARED_SCOPES
from tensorir_ladder.schedules.isa import MMA, TF32, WARP, MmaInstruction
from tensorir_ladder.schedules.pipeline.one_barrier import HIDES_READS
from tensorir_ladder.schedules.tensor_cores.fragments import registers_of

_LOAD = """
__forceinline__ __device__ void {name}(void* fragment, void*, const void* address{seen}) {{
  unsigned* r = (unsigned*)fragment;
  unsigned from = (unsigned)__cvta_generic_to_shared(address);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));{rounding}
}}
"""

# The instruction cuts the bits off that TF32 has not; to the nearest is half the error.
_ROUND_TO_TF32 = """
  for (int i = 0; i < 4; ++i) asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(r[i]));"""

_MULTIPLY = """
__forceinline__ __device__ void {name}(void* result, void*, const void* left, const void*,
                                                const void* right, const void*) {{
  float* c = (float*)result;
  const unsigned* a = (const unsigned*)left;
  const unsigned* b = (const unsigned*)right;
  asm("{ptx} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
"""


def load_intrinsic(instruction: MmaInstruction, operand: int, by_k: bool, scope: str, hide_reads: bool) -> str:
    """Return the name of the intrinsic that brings 16 rows (columns) of an operand to fragments.

    Where k is not the last dimension, the pieces are transposed on their way (``.trans``).
    """
    order = "by_k" if by_k else "across_k"
    return f"tensor_core_load_{operand}_{instruction.dtype}_{order}_{scope}_{'hidden' if hide_reads else 'seen'}"


def multiply_intrinsic(instruction: MmaInstruction) -> str:
    """Return the name of the intrinsic of two instructions side by side."""
    return f"{instruction.function}_multiply"


def _register() -> None:
    for instruction in (*MMA.values(), TF32):
        orders = (True, False) if instruction.transposes else (True,)
        for operand, by_k, scope in product((0, 1), orders, SHARED_SCOPES):
            described = _load_description(instruction, operand, by_k, scope)
            for hide_reads in (True, False):
                implemented = _load_implementation(instruction, operand, by_k, scope, hide_reads)
                name = load_intrinsic(instruction, operand, by_k, scope, hide_reads)
                TensorIntrin.register(name, described, implemented, override=True)
        described, implemented = _multiply_description(instruction), _multiply_implementation(instruction)
        TensorIntrin.register(multiply_intrinsic(instruction), described, implemented, override=True)


def _made(body: Callable[..., None], *names: str) -> tirx.PrimFunc:
    """Build a function of as many handles; as T.prim_func does from a text, in a tenth of the time."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        handles = [T.arg(name, T.handle()) for name in names]
        body(*handles)
    return builder.get()


@contextmanager
def _whole(written: tirx.Var, *read: tirx.Var) -> Iterator[None]:
    """Open the block of an intrinsic, which reads and writes all of its buffers."""
    with T.sblock("root"):
        T.reads([_all(buffer) for buffer in read])
        T.writes([_all(written)])
        yield


def _all(buffer: tirx.Var) -> ir.TensorRegion:
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]


def _fragment(handle: tirx.Var, registers: int, dtype: str) -> tirx.Var:
    return T.match_buffer(handle, (WARP, registers), dtype, scope=FRAGMENT, offset_factor=1)


def tile_size(instruction: MmaInstruction, by_k: bool) -> tuple[int, int]:
    """Return rows and columns of what an intrinsic loads, as it lies in shared memory."""
    return (instruction.M, instruction.k) if by_k else (instruction.k, instruction.M)


def _load_description(instruction: MmaInstruction, operand: int, by_k: bool, scope: str) -> tirx.PrimFunc:
    """Describe what a load does, as the schedule has it: element by element."""
    place = instruction.place_in_b if operand else instruction.place_in_a
    size, dtype = tile_size(instruction, by_k), instruction.dtype

    def body(tile_handle: tirx.Var, fragment_handle: tirx.Var) -> None:
        tile = T.match_buffer(tile_handle, size, dtype, scope=scope, offset_factor=1)
        fragment = _fragment(fragment_handle, instruction.operand_registers, dtype)
        with _whole(fragment, tile), T.grid(*size) as (i, j), T.sblock("load"):
            vi, vj = T.axis.remap("SS", [i, j])
            held = list(place(vi, vj) if by_k else place(vj, vi))
            T.reads(tile[vi, vj])
            T.writes(fragment[tuple(held)])
            T.buffer_store(fragment, tile[vi, vj], held)

    return _made(body, "tile_handle", "fragment_handle")


def _load_implementation(
    instruction: MmaInstruction, operand: int, by_k: bool, scope: str, hide_reads: bool
) -> tirx.PrimFunc:
    """Implement a load: each lane's part of ``ldmatrix``."""
    size, dtype, registers = tile_size(instruction, by_k), instruction.dtype, instruction.operand_registers
    rounding = "" if instruction.transposes else _ROUND_TO_TF32
    function = "tensor_core_load" + "_hidden" * hide_reads + "_transposed" * (not by_k) + "_rounded" * bool(rounding)
    seen = "" if hide_reads else f", {_ctype(dtype)} seen"
    source = _LOAD.format(name=function, trans="" if by_k else ".trans", seen=seen, rounding=rounding)

    def moved(fragment: tirx.Var, tile: tirx.Var, lane: tirx.Var) -> ir.Expr:
        at = tile[instruction.row_address(lane, operand, by_k)]
        read = [] if hide_reads else [at]  # a value nobody uses: the read that ThreadSync has to see
        parts = *registers_of(fragment, lane, 0, registers), tirx.address_of(at)
        return cuda_func_call(function, *parts, *read, source_code=source)

    def body(tile_handle: tirx.Var, fragment_handle: tirx.Var) -> None:
        stride = tirx.Var("stride", "int32")
        tile = T.match_buffer(tile_handle, size, dtype, scope=scope, offset_factor=1, strides=[stride, 1])
        fragment = _fragment(fragment_handle, registers, dtype)
        with _whole(fragment, tile):
            T.sblock_attr({HIDES_READS: 1} if hide_reads else {})
            with T.thread_binding(WARP, thread="threadIdx.x") as lane:
                T.evaluate(moved(fragment, tile, lane))

    return _made(body, "tile_handle", "fragment_handle")


def _multiplied(instruction: MmaInstruction, inside: Callable[[tirx.Var, tirx.Var, tirx.Var], None]) -> tirx.PrimFunc:
    """Build a function of both operands' fragments and the sums', ``inside`` its block."""
    registers, results = instruction.operand_registers, instruction.M * instruction.N // WARP

    def body(a_handle: tirx.Var, b_handle: tirx.Var, c_handle: tirx.Var) -> None:
        a, b = (_fragment(handle, registers, instruction.dtype) for handle in (a_handle, b_handle))
        c = _fragment(c_handle, results, instruction.accumulator)
        with _whole(c, c, a, b):
            inside(c, a, b)

    return _made(body, "a_handle", "b_handle", "c_handle")


def _multiply_description(instruction: MmaInstruction) -> tirx.PrimFunc:
    """Describe what both instructions do, as the schedule has it: element by element."""
    dtype, wide = instruction.dtype, instruction.accumulator

    def widened(value: ir.Expr) -> ir.Expr:
        return value if dtype == wide else tirx.Cast(wide, value)

    def inside(c: tirx.Var, a: tirx.Var, b: tirx.Var) -> None:
        with T.grid(instruction.M, instruction.N, instruction.k) as (i, j, s), T.sblock("multiply"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, s])
            in_a, in_b, in_c = (
                instruction.place_in_a(vi, vk),
                instruction.place_in_b(vj, vk),
                instruction.place_in_c(vi, vj),
            )
            T.reads(c[in_c], a[in_a], b[in_b])
            T.writes(c[in_c])
            T.buffer_store(c, c[in_c] + widened(a[in_a]) * widened(b[in_b]), list(in_c))

    return _multiplied(instruction, inside)


def _multiply_implementation(instruction: MmaInstruction) -> tirx.PrimFunc:
    """Implement both instructions: a call for each half of the columns."""
    registers, results = instruction.operand_registers, instruction.M * instruction.N // WARP
    source = _MULTIPLY.format(name=instruction.function, ptx=instruction.ptx)

    def half(c: tirx.Var, a: tirx.Var, b: tirx.Var, lane: tirx.Var, number: int) -> ir.Expr:
        parts = (
            *registers_of(c, lane, number * results // 2, results // 2),
            *registers_of(a, lane, 0, registers),
            *registers_of(b, lane, number * registers // 2, registers // 2),
        )
        return cuda_func_call(instruction.function, *parts, source_code=source)

    def inside(c: tirx.Var, a: tirx.Var, b: tirx.Var) -> None:
        with T.thread_binding(WARP, thread="threadIdx.x") as lane:
            T.evaluate(half(c, a, b, lane, 0))
            T.evaluate(half(c, a, b, lane, 1))

    return _multiplied(instruction, inside)


def _ctype(dtype: str) -> str:
    return {"float16": "half", "bfloat16": "nv_bfloat16", "float32": "float"}[dtype]


_register()
