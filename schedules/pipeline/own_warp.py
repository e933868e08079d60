"""A warp of its own that brings a ring's boxes: what step 12 does, of a scheduled loop.

One of the threads that multiply brings a ring's boxes otherwise (:mod:`schedules.pipeline.box_rings`). All warps of a
warpgroup issue its instruction together, so that each of them waits in every iteration until that thread has waited for
a free stage and asked for its boxes: a few hundred cycles, longer than small tiles multiply::

    before   for k:   wait for tile k;  multiply;  one thread: wait for a free stage, bring tile k + stages - 2;  retire
    after    warp of its own:   for k:  wait for a free stage;  bring tile k + stages - 2
             the others:        for k:  wait for tile k;  multiply;  retire

Nothing is computed in another order, and the mbarriers say all that one side must know of the other. The warp runs as
far ahead as stages are free, so that a tile more is on its way. Source: "warp specialization" of NVIDIA's CUTLASS.

The loops are taken apart when all else is lowered, once TVM has put its barriers; those behind the loop are then for
the others alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import PIPELINE_STAGE, SHARED_SCOPES, loop_name, replaced
from tensorir_ladder.schedules.isa import WARP
from tensorir_ladder.schedules.memory.tensor_maps import elected, has_boxes
from tensorir_ladder.schedules.passes import require_pipeline, with_loop_body
from tensorir_ladder.schedules.pipeline.one_barrier import RETIRE, SYNC

OWN_WARP = "own_warp"  # on a pipelined loop whose copies a warp of its own brings
BRINGS = "is_elected_to_bring"  # the condition of what it does, which is the block's first warp's where nobody tells
MOST_THREADS = 1024  # of a block
LAUNCH = ir.Op.get("tirx.call_ffi_kernel")
THREADS = "threadIdx.x", "threadIdx.y", "threadIdx.z"

_OWN = """
__forceinline__ __device__ bool is_warp(unsigned int warp) {
  return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == warp;
}
"""


_WARP_MEETS = "\n__forceinline__ __device__ void warp_meets() { __syncwarp(); }\n"


def bring_by_own_warp(sch: Schedule, loop: LoopRV) -> None:
    """Let a warp of its own bring the boxes of a pipelined loop's copies.

    The module's text shows what becomes of it. Blocks have 32 threads more than the schedule binds. ``loop`` is one
    that :func:`schedules.pipeline.pipeline_loop` pipelined, whose copies are TMA's
    (:func:`schedules.memory.fetch_by_tma`) and whose computations run on by themselves and are retired
    (:func:`schedules.tensor_cores.pipeline_warpgroups`). Results are bit for bit the same. Nothing changes before the
    function is lowered; lowered ahead (:func:`schedules.pipeline.lower_ahead`), the first warp brings them as before.

    Raises
    ------
    IllegalPipeline : for a loop that is not pipelined, has copies of another kind, or retires nothing.
    """
    stmt = sch.get(loop)
    marks: set[str] = set()
    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, lambda block: marks.update(block.annotations)))
    missing = {
        "is not pipelined": PIPELINE_STAGE not in stmt.annotations,
        "has no copies by TMA": not has_boxes(sch, loop),
        "retires no computations": RETIRE not in marks,
    }
    if any(missing.values()):
        raise IllegalPipeline(
            "a warp of its own brings boxes of a ring whose computations run on by themselves",
            loop=loop_name(sch, loop),
            value="a loop that " + " and ".join(what for what, is_so in missing.items() if is_so),
            remedy="copy by fetch_by_tma and pipeline the loop by pipeline_warpgroups first",
        )
    require_pipeline(sch, "boxes brought by a warp of their own")
    sch.annotate(loop, OWN_WARP, 1)


@tvm.transform.module_pass(opt_level=0, name="LowerOwnWarps")
def lower_own_warps(mod: ir.IRModule, _context: tvm.transform.PassContext) -> ir.IRModule:
    """Give kernels whose boxes a warp of its own is to bring that warp, and the host's launches its threads.

    A pass over kernels and the host's functions that launch them.
    """
    kernels = {str(name.name_hint): _Kernel.of(function) for name, function in mod.functions_items()}
    threads = {name: kernel.threads for name, kernel in kernels.items() if kernel}
    if not threads:
        return mod

    def launched(call: ir.Call) -> ir.Expr:
        kernel = call.args[0].value if call.op.same_as(LAUNCH) else ""
        if kernel not in threads:
            return call
        tags = [str(tag) for tag in call.attrs.launch_params]
        arguments, first = list(call.args), len(call.args) - len(tags)
        for place, tag in enumerate(tags):
            if tag in THREADS:
                count = threads[kernel] if tag == THREADS[0] else 1
                arguments[first + place] = tirx.const(count, arguments[first + place].ty.dtype)
        return tirx.op.call_ffi_kernel(*arguments, launch_params=tags, ret_ty=call.ty)

    changed = {}
    for name, function in mod.functions_items():
        kernel = kernels[str(name.name_hint)]
        changed[name] = kernel.taken_apart() if kernel else tvm_ffi.structural_map(function, (ir.Call, launched))
    return tvm.IRModule(changed, attrs=mod.attrs, global_infos=mod.global_infos)


@dataclass(frozen=True)
class _Kernel:
    """A kernel with a ring to take apart: its function, and its blocks' variables and extents along each axis."""

    function: tirx.PrimFunc
    axes: dict[str, tuple[tirx.Var, int]]

    @classmethod
    def of(cls, function: tirx.PrimFunc) -> _Kernel | None:
        """Find a kernel that has something for a warp of its own to bring; None of any other function."""
        if not _brings(function.body):
            return None
        axes: dict[str, tuple[tirx.Var, int]] = {}

        def note(scope: tirx.AttrStmt) -> None:
            if _threads(scope):
                axes[_threads(scope)] = scope.node.var, int(scope.value)

        tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, note))
        return cls(function, axes)

    @property
    def others(self) -> int:
        """Threads that multiply."""
        return math.prod(extent for _, extent in self.axes.values())

    @property
    def threads(self) -> int:
        """Threads of a block; IllegalPipeline where there is no room for a warp more."""
        if self.others + WARP > MOST_THREADS:
            raise IllegalPipeline(
                "a block has no room for a warp of its own that brings boxes",
                value=f"{self.others} threads that multiply",
                limit=f"at most {MOST_THREADS - WARP}",
                remedy="choose a tile of fewer warpgroups, or leave bring_by_own_warp out",
            )
        return self.others + WARP

    def taken_apart(self) -> tirx.PrimFunc:
        """Write the kernel with its warp."""
        return self.function.with_body(self._scope(self.function.body, len(self.axes)))

    def _scope(self, stmt: tirx.Stmt, unbound: int) -> tirx.Stmt:
        """Go down to what threads execute, with as many of them as there are then; so many axes are not bound yet."""
        if isinstance(stmt, tirx.AttrStmt):
            value, tag = stmt.value, _threads(stmt)
            if tag:
                value = tirx.const(self.threads if tag == THREADS[0] else 1, "int32")
            return tirx.AttrStmt(stmt.node, stmt.attr_key, value, self._scope(stmt.body, unbound - bool(tag)))
        parts = list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt]
        first = next(place for place, part in enumerate(parts) if _brings(part))
        if unbound:
            return tirx.SeqStmt([*parts[:first], self._scope(parts[first], unbound), *parts[first + 1 :]])
        for part in parts[:first]:
            self._check_repeatable(part)
        common = [self._renumbered(part) for part in parts[:first]]
        return tirx.SeqStmt([*common, self._apart(parts[first:])])

    def _check_repeatable(self, stmt: tirx.Stmt) -> None:
        """Raise IllegalPipeline for what a warp more must not execute, too: stores to memory that threads share."""
        stored: list[tirx.Var] = []
        note = (
            tirx.BufferStore,
            lambda store: stored.append(store.buffer) if store.buffer.scope() != "local" else None,
        )
        tvm_ffi.structural_walk(stmt, note)
        if stored:
            raise IllegalPipeline(
                "a block stores before a ring whose boxes a warp of its own brings, which would do that, too",
                value=f"{stored[0].name}, in {stored[0].scope()} memory",
                limit="registers",
                remedy="store behind the ring, or leave bring_by_own_warp out",
            )

    def _apart(self, parts: list[tirx.Stmt]) -> tirx.Stmt:
        """Let the warp do what brings boxes, the others all else; what a cluster's blocks do together, both."""
        together = [part for part in parts if _is_of_cluster(part)]
        one = cuda_func_call("is_one_of_warp", source_code=elected("is_one_of_warp"), return_type="bool")
        own = [tirx.IfThenElse(one, _bringing(tirx.SeqStmt(parts), {}), None)]
        if together:
            own += [tirx.Evaluate(cuda_func_call("warp_meets", source_code=_WARP_MEETS)), *together]
        number = tirx.const(self.others // WARP, "uint32")
        is_own = cuda_func_call("is_warp", number, source_code=_OWN, return_type="bool")
        others = self._renumbered(self._met(_multiplying(tirx.SeqStmt(parts))))
        return tirx.IfThenElse(is_own, tirx.SeqStmt(own) if len(own) > 1 else own[0], others)

    def _met(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """Let barriers be for those that multiply."""
        name = f"meet_{self.others}"
        source = (
            f"\n__forceinline__ __device__ void {name}() {{\n"
            f'  asm volatile("bar.sync 1, {self.others};" ::: "memory");\n}}\n'
        )

        def met(call: ir.Call) -> ir.Expr:
            is_barrier = call.op.name == SYNC and call.args[0].value in SHARED_SCOPES
            return cuda_func_call(name, source_code=source) if is_barrier else call

        return tvm_ffi.structural_map(stmt, (ir.Call, met))

    def _renumbered(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """Count threads along one axis."""
        number, numbers, below = self.axes[THREADS[0]][0], {}, 1
        for tag in THREADS:
            if tag in self.axes:
                variable, extent = self.axes[tag]
                place = tirx.floordiv(number, below) if below > 1 else number
                below *= extent
                numbers[variable] = place if below == self.others else tirx.floormod(place, extent)
        return tvm_ffi.structural_map(stmt, (tirx.Var, lambda variable: numbers.get(variable, variable)))


def _threads(scope: tirx.AttrStmt) -> str:
    """Return which of a block's axes a scope binds, "" for another scope."""
    tag = str(scope.node.thread_tag) if scope.attr_key == "thread_extent" else ""
    return tag if tag in THREADS else ""


def _is_bringing(stmt: tirx.Stmt) -> bool:
    """Return whether a statement is what one thread does to bring boxes."""
    condition = stmt.condition if isinstance(stmt, tirx.IfThenElse) else None
    return isinstance(condition, ir.Call) and any(
        isinstance(argument, ir.StringImm) and argument.value == BRINGS for argument in condition.args
    )


def _brings(stmt: tirx.Stmt) -> bool:
    found: list[bool] = []
    tvm_ffi.structural_walk(stmt, (tirx.IfThenElse, lambda inner: found.append(_is_bringing(inner))))
    return any(found)


def _is_of_cluster(stmt: tirx.Stmt) -> bool:
    """Return whether blocks of a cluster meet by a statement."""
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    return isinstance(call, ir.Call) and "ptx.barrier_cluster" in call.op.name


def _bringing(stmt: tirx.Stmt, values: Mapping[tirx.Var, ir.Expr]) -> tirx.Stmt | None:
    """Return what brings boxes in a statement, None of one that brings none.

    The others keep its names, of loops and of bound values: they become others here, and values themselves.
    """
    if _is_bringing(stmt):
        return replaced(stmt.then_case, values)
    if not _brings(stmt):
        return None
    if isinstance(stmt, tirx.For):
        variable = tirx.Var(stmt.loop_var.name, stmt.loop_var.ty)
        body = _bringing(stmt.body, {**values, stmt.loop_var: variable})
        first, extent = replaced(stmt.min, values), replaced(stmt.extent, values)
        return tirx.For(variable, first, extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, replaced(stmt.value, values), _bringing(stmt.body, values))
    if isinstance(stmt, tirx.IfThenElse):
        cases = [_bringing(case, values) if case is not None else None for case in (stmt.then_case, stmt.else_case)]
        return tirx.IfThenElse(replaced(stmt.condition, values), cases[0] or tirx.Evaluate(0), cases[1])
    if not isinstance(stmt, tirx.SeqStmt):
        raise TypeError(f"boxes are brought in a statement that TVM 0.27 makes of no pipeline: {type(stmt).__name__}")
    kept, known = [], dict(values)
    for part in stmt.seq:
        if isinstance(part, tirx.Bind):
            known[part.var] = replaced(part.value, known)
        elif (own := _bringing(part, known)) is not None:
            kept.append(own)
    return tirx.SeqStmt(kept) if len(kept) > 1 else kept[0]


def _multiplying(stmt: tirx.Stmt) -> tirx.Stmt | None:
    """Return all of a statement but what brings boxes, None of one that does nothing else."""
    if _is_bringing(stmt):
        return None
    if not _brings(stmt):
        return stmt
    if isinstance(stmt, tirx.SeqStmt):
        parts = [part for part in map(_multiplying, stmt.seq) if part is not None]
        return (tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]) if parts else None
    if isinstance(stmt, tirx.IfThenElse):
        then, otherwise = (
            _multiplying(case) if case is not None else None for case in (stmt.then_case, stmt.else_case)
        )
        some = then is not None or otherwise is not None
        return tirx.IfThenElse(stmt.condition, then or tirx.Evaluate(0), otherwise) if some else None
    body = _multiplying(stmt.body)
    if body is None:
        return None
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)
    return with_loop_body(stmt, body)
