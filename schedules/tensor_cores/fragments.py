"""Fragments: a tile that a group of threads holds in its registers, each thread one *lane* of it.

A matrix instruction spreads its operands and results over the lanes of a warp (32) or a warp group (128). In a
schedule a fragment is an ordinary buffer in scope :data:`schedules.inspection.FRAGMENT`, whose last two dimensions are
(lane, register): ``transform_layout`` brings it there, loops over elements stay ordinary loops, and the CPU can run
them. On the GPU lane ``l`` is thread ``l``, and what remains for a thread to keep are its registers::

    before   C_frag[4, 8, 32, 8];  for lane, bound to threadIdx.x:  D[...] = C_frag[m, n, lane, r]
    after    C_frag[4, 8,  1, 8];  for lane, bound to threadIdx.x:  D[...] = C_frag[m, n,    0, r]

:func:`lower_fragments` is that step, for any number of lanes and registers. It runs after TVM has brought
buffers to their final extent and before it flattens them: each access still names its lane.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import FRAGMENT
from tensorir_ladder.schedules.passes import on_functions


def lower_fragments() -> tvm.transform.Pass:
    """Leave each thread the registers of its own lane; the module's text shows it.

    A pass over functions whose blocks are opaque and whose buffers are compact (:func:`compact_blocks`).

    Raises
    ------
    IllegalSchedule : for a fragment that is accessed with another lane than the thread's own
        (``threadIdx.x`` modulo the number of lanes), naming the buffer and the index. TVM hands on what a pass
        raises as RuntimeError, with the same text.
    """

    return on_functions(_without_lanes)


def registers_of(fragment: tirx.Var, lane: tirx.Var, first: int, count: int) -> tuple[ir.Expr, ir.Expr]:
    """Return the addresses of the first and the last of a lane's registers that an intrinsic uses, to be passed to it.

    The function called needs the first only. But TVM shrinks buffers to what it sees of their use, and would leave
    one register of a fragment whose others are reached through the first one's address.
    """
    return tirx.address_of(fragment[lane, first]), tirx.address_of(fragment[lane, first + count - 1])


def compact_blocks() -> tvm.transform.Pass:
    """Return TVM's own lowering up to compact buffers without aliases; what is lowered so far, it leaves as it is."""
    blocks = s_tir.transform
    return tvm.ir.transform.Sequential(
        [
            blocks.CanonicalizeLoop(),
            blocks.LowerCrossThreadReduction(),
            blocks.LowerInitBlock(),
            blocks.PlanAndUpdateBufferAllocationLocation(),
            blocks.ConvertBlocksToOpaque(),
            blocks.LiftThreadBinding(),
            blocks.ManifestSharedMemoryLocalStage(),
            blocks.CompactBufferAllocation(),
            blocks.LowerAutoCopy(),
            blocks.UnifyThreadBinding(),
            blocks.LowerMatchBuffer(),
            blocks.StmtSimplify(),
        ]
    )


def whole_fragments(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep fragments whole, as ordinary local buffers, for a target that runs one lane after the other (a CPU)."""
    whole = {
        fragment: tirx.decl_buffer(fragment.shape, fragment.dtype, fragment.name, scope="local")
        for fragment in _fragments(function)
    }
    return tvm_ffi.structural_map(function, (tirx.Var, lambda var: whole.get(var, var))) if whole else function


def _fragments(function: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the buffers in scope FRAGMENT that a function allocates."""
    found: list[tirx.Var] = []

    def note(block: s_tir.SBlock) -> None:
        found.extend(buffer for buffer in block.alloc_buffers if buffer.scope() == FRAGMENT)

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, note))
    return found


def _without_lanes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    fragments = _fragments(function)
    if not fragments:
        return function
    own = {fragment: _of_one_lane(fragment) for fragment in fragments}
    lanes = {own[fragment]: int(fragment.shape[-2]) for fragment in fragments}
    analyzer, threads = _threads(function)

    def check(buffer: tirx.Var, indices: list[ir.Expr]) -> list[ir.Expr]:
        """Refuse any lane but the thread's own."""
        own_lanes = [tirx.floormod(thread, lanes[buffer]) for thread in threads]
        if not any(analyzer.can_prove_equal(indices[-2], lane) for lane in own_lanes):
            raise IllegalSchedule(
                f"fragment {buffer.name} is accessed in another lane than the thread's own",
                value=str(indices[-2]),
                limit=f"threadIdx.x modulo {lanes[buffer]}",
                remedy="bind the loop over lanes to threadIdx.x, with as many threads as there are lanes",
            )
        return [*indices[:-2], tirx.const(0, "int32"), indices[-1]]

    def load(access: ir.TensorLoad) -> ir.Expr:
        return access.source[tuple(check(access.source, list(access.indices)))] if access.source in lanes else access

    def store(access: tirx.BufferStore) -> tirx.Stmt:
        if access.buffer not in lanes:
            return access
        return tirx.BufferStore(access.buffer, access.value, check(access.buffer, list(access.indices)))

    def region(access: ir.TensorRegion) -> ir.TensorRegion:
        if access.source not in lanes:
            return access
        *outer, _, registers = access.region
        return ir.TensorRegion(access.source, [*outer, ir.Range(0, 1), registers], access.ty)

    replace = (tirx.Var, lambda var: own.get(var, var))
    renamed = tvm_ffi.structural_map(function, replace)
    return tvm_ffi.structural_map(
        renamed, [(ir.TensorLoad, load), (tirx.BufferStore, store), (ir.TensorRegion, region)]
    )


def _of_one_lane(fragment: tirx.Var) -> tirx.Var:
    *outer, _, registers = fragment.shape
    return tirx.decl_buffer([*outer, 1, registers], fragment.dtype, fragment.name, scope="local")


def _threads(function: tirx.PrimFunc) -> tuple[sym.Analyzer, list[tirx.Var]]:
    """Return an analyzer that knows the loops' ranges, and threadIdx.x of each of a function's kernels."""
    analyzer, threads = sym.Analyzer(), []

    def note(loop: tirx.For) -> None:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
        if loop.kind == tirx.ForKind.THREAD_BINDING and str(loop.thread_binding.thread_tag) == "threadIdx.x":
            threads.append(loop.loop_var)

    tvm_ffi.structural_walk(function.body, (tirx.For, note))
    return analyzer, threads
