"""Asynchronous copies that fill with zeros by themselves where their predicate is false.

TVM writes two instructions for a predicated copy, of which each thread executes one::

    @p cp.async [shared], [global], 4;    @!p st.shared [shared], 0

cp.async takes the number of bytes to read as an operand, and fills the rest with zeros: one instruction, and of 0 bytes
it reads nothing. That counts where elements are copied one by one, and instructions are what a loop waits for.

So do addresses. A thread copies its elements in rounds, a row further on in each, and of TVM's index nvcc makes an
addition and a 64-bit multiply-add for each of them; where a limit is compared with it, an addition more. What a round
adds is a constant once the rounds are written out: it stands by itself here, as bytes and on the limit's side::

    before   cp.async(..., &A[base + 16 * round * 6997], ...  row + 16 * round < 337)
    after    cp.async(..., &A[base] + 447808 * round bytes, ...  row < 337 - 16 * round)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.inspection import terms_of
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.passes import require_pipeline, with_loop_body

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
    rounds: list[tirx.Var] = []

    def unmarked(loop: tirx.For) -> tirx.For:
        if _only_copies(loop.body):
            rounds.append(loop.loop_var)
        if ZERO_FILL not in loop.annotations:
            return loop
        marked.append(loop)
        kept = {key: value for key, value in loop.annotations.items() if key != ZERO_FILL}
        return with_loop_body(loop, loop.body, kept)

    body = tvm_ffi.structural_map(function.body, (tirx.For, unmarked))
    if not marked:
        return function
    return function.with_body(tvm_ffi.structural_map(body, (ir.Call, lambda call: _filling(call, rounds))))


def _only_copies(stmt: tirx.Stmt) -> bool:
    """Return whether a statement is asynchronous copies and loops around them, which nvcc writes out."""
    if isinstance(stmt, tirx.SeqStmt):
        return all(_only_copies(each) for each in stmt.seq)
    if isinstance(stmt, tirx.For):
        return _only_copies(stmt.body)
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, ir.Call) and stmt.value.op.name == RAW_COPY


def _filling(call: ir.Call, rounds: Sequence[tirx.Var]) -> ir.Call:
    """Return a predicated copy as one instruction; a single element's address and limits apart by rounds."""
    if call.op.name != RAW_COPY or len(call.args) != PREDICATED:
        return call
    to, to_offset, source, offset, size, predicate = call.args
    width, (to_type, source_type) = int(size), (str(pointer.ty.element_type.dtype) for pointer in (to, source))
    cached = "cg" if width == VECTOR_BYTES else "ca"
    name, read, inside = f"ptx_cp_async_legacy_pred_{cached}_{width}", "from", "predicate"
    more: list[tuple[str, ir.Expr]] = []  # parameters besides, as CUDA declares them
    if width < VECTOR_BYTES:
        offset, ahead = _apart(offset, rounds)
        predicate, limits = _limits_apart(predicate, rounds)
        more.append(("long long ahead", ahead.astype("int64") * tvm.DataType(source_type).itemsize))
        read = "(char*)from + ahead"
        for count, (place, limit) in enumerate(limits):
            more += [(f"int place_{count}", place), (f"int limit_{count}", limit)]
            inside += f" && place_{count} < limit_{count}"
        name += f"_below_{len(limits)}"
    name += "_zero_fill"
    parameters = "".join(f", {declared}" for declared, _ in more)
    text = f"""
__forceinline__ __device__ void {name}(void* to, void* from, int predicate{parameters}) {{
  unsigned int shared = __cvta_generic_to_shared(to);
  asm volatile("cp.async.{cached}.shared.global [%0], [%1], %2, %3;"
               :: "r"(shared), "l"({read}), "n"({width}), "r"({inside} ? {width} : 0));
}}
"""
    # Addresses in a form that TVM moves when it puts several tiles into one array of shared memory.
    addresses = [
        tirx.call_intrin("handle", "tirx.tvm_access_ptr", tirx.type_annotation(dtype), pointer, place, width, access)
        for dtype, pointer, place, access in ((to_type, to, to_offset, 2), (source_type, source, offset, 1))
    ]
    return cuda_func_call(name, *addresses, predicate, *(value for _, value in more), source_code=text)


def _limits_apart(predicate: ir.Expr, rounds: Sequence[tirx.Var]) -> tuple[ir.Expr, list[tuple[ir.Expr, ir.Expr]]]:
    """Return what of a predicate is the same in all rounds, and the rest as pairs of a place and the limit above it.

    Of 32 bits, as the copy takes them: what is compared in 64 stays in the predicate.
    """
    same, limits = [], []
    for term in terms_of(predicate):
        narrow = isinstance(term, tirx.LT) and all(str(side.ty.dtype) == "int32" for side in (term.a, term.b))
        moved = narrow and [_apart(side, rounds) for side in (term.a, term.b)]
        if moved and any(not _is_zero(ahead) for _, ahead in moved):
            (place, of_place), (limit, of_limit) = moved
            limits.append((place, limit + of_limit - of_place))
        else:
            same.append(term)
    return functools.reduce(tirx.And, same) if same else tirx.const(True), limits


def _apart(value: ir.Expr, rounds: Sequence[tirx.Var]) -> tuple[ir.Expr, ir.Expr]:
    """Return an index as what it is in the first round and what rounds add; whole as the first if it is not linear."""
    zero = tirx.const(0, "int32")
    if not (found := list(sym.detect_linear_equation(value, list(rounds))) if rounds else []):
        return value, zero
    *factors, first = found
    return first, sum((factor * var for factor, var in zip(factors, rounds) if not _is_zero(factor)), zero)


def _is_zero(value: ir.Expr) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == 0
