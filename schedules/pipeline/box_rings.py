"""Rings of boxes: what a pipelined loop becomes whose copies are the tensor memory accelerator's.

:func:`schedules.memory.fetch_by_tma` marks copies. When the function is lowered, the host gets the tensor maps, one
thread of each block the copies, and a stage two mbarriers: a *full* one, whose phase ends when all bytes of a tile have
arrived, and an *empty* one, whose phase ends when all warps that read the tile have retired it::

    before   for k, pipelined:  A_shared = A[tile k];  gate;  C += A_shared * B_shared;  retire tile k - 1
    after    host:  encode A_map, B_map
             ready the mbarriers
             for k, pipelined:
               one thread:  wait at empty[k % stages], from the second turn on
                            announce bytes at full[k % stages];  boxes of A and B -> stage k % stages
               wait at full[k % stages]
               C += A_shared * B_shared
               retire tile k - 1;  each warp arrives at empty[(k - 1) % stages], in each block that shares with it

A ring in a loop (:func:`schedules.loops.stay_resident` makes one) is readied in front of that loop; its mbarriers go on
from one run of the ring to the next.

The first turn's boxes, which no stage has to be left for, are asked for before any is waited for
(:func:`schedules.pipeline.first_fill.lower_first_fills`).

TVM's software pipeline moves these statements apart as it does the copies that they stand for, and its ring of stages
is that of the tiles: no wait for groups of copies is left. A pipeline without a computation that runs on by itself, and
is retired, has a block barrier in the place of empty mbarriers: all threads meet before a stage is filled again. The
one thread is of the first warp, which multiplies, too, or of a warp of its own (:mod:`schedules.pipeline.own_warp`).

Why that is right in a cluster: a block's boxes arrive in others' memory. It fills a stage when warps of all the blocks
that share something with it have arrived at its own empty mbarrier. Each block waits for all bytes that others send it,
and for all arrivals that are sent, so that none ends while something is on its way to it; and all meet before any of
them ends, so that none does while something of its own is on its way.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.script import tirx as T

from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import (
    PIPELINE_STAGE,
    SHARED_SCOPES,
    is_constant,
    loop_name,
    replaced,
    thread_tag,
)
from tensorir_ladder.schedules.isa import (
    ATOM_BYTES,
    PIECE_ROWS,
    TMA_LOAD,
    TMA_MULTICAST,
)
from tensorir_ladder.schedules.memory.swizzling import SWIZZLE
from tensorir_ladder.schedules.memory.tensor_maps import (
    BOXES,
    GRID,
    SHARED_BY,
    BoxMap,
    TensorMaps,
    check_tma,
    chosen_value,
    count_warps,
    element_address,
    has_boxes,
    hold_boxes,
    is_elected,
)
from tensorir_ladder.schedules.passes import require_pipeline, with_body, with_buffers, with_loop_body
from tensorir_ladder.schedules.pipeline.box_stamps import Marks
from tensorir_ladder.schedules.pipeline.one_barrier import GATE, RETIRE, RETIRED, SYNC, whole_buffer
from tensorir_ladder.schedules.pipeline.own_warp import BRINGS, OWN_WARP
from tensorir_ladder.schedules.tiles import SHORT_RING

FIRST_WARP = "is_elected"  # the condition of what one thread of the first warp does
WAIT, BOUNDED = "mbarrier_wait", "mbarrier_wait_bounded"
SECONDS = 2  # after which a bounded wait gives up
BOUNDED_WAITS = "bounded_waits"  # on a pipelined loop: the seconds
CLUSTER = "clusterCtaIdx.x"
ORDER, ASYNC = "software_pipeline_order", "software_pipeline_async_stages"  # TVM's annotations
# Of shared memory, for the mbarriers of a ring: so many that swizzled rows behind them begin at a multiple of it.
WORDS_BYTES = ATOM_BYTES

MBARRIER_IS_THROUGH = """
__forceinline__ __device__ bool mbarrier_is_through(void* barrier, int parity) {
  unsigned int through;
  asm volatile(
      "{\\n.reg .pred p;\\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\\n"
      "selp.u32 %0, 1, 0, p;\\n}"
      : "=r"(through) : "r"((unsigned int)__cvta_generic_to_shared(barrier)), "r"(parity) : "memory");
  return through;
}
"""
MBARRIER_WAIT = """
__forceinline__ __device__ void mbarrier_wait(void* barrier, int parity) {
  while (!mbarrier_is_through(barrier, parity)) {}
}
"""
BOUNDED_WAIT = """
__forceinline__ __device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__forceinline__ __device__ void mbarrier_wait_bounded(
    void* barrier, int parity, const char* role, int slot, int seconds) {
  const unsigned long long end = nanoseconds() + seconds * 1000000000ull;
  while (!mbarrier_is_through(barrier, parity)) {
    if (nanoseconds() > end) {
      printf("block %d: thread %d as %s waited %d s for barrier %d, phase %d\\n", (int)blockIdx.x,
             (int)threadIdx.x, role, seconds, slot, parity);
      __trap();
    }
  }
}
"""
# A lane for each of a cluster's blocks, at the barrier that has the same place in that block's memory.
_ARRIVE = """
__forceinline__ __device__ void mbarrier_arrive_in(void* barrier, unsigned int blocks) {
  const unsigned int rank = threadIdx.x % 32;
  if (blocks >> rank & 1) {
    unsigned int there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there) : "r"((unsigned int)__cvta_generic_to_shared(barrier)), "r"(rank));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(there) : "memory");
  }
}
"""


class _Shared(NamedTuple):
    """Blocks of a cluster that share a copy: how many, and how far apart their ranks are."""

    blocks: int
    apart: int

    @property
    def cluster(self) -> int:
        """The blocks that are a cluster for its sake."""
        return self.blocks * self.apart

    def place(self, rank: ir.Expr) -> ir.Expr:
        """Return which of them a block is."""
        return tirx.floormod(tirx.floordiv(rank, self.apart), self.blocks)

    def mask(self, rank: ir.Expr) -> ir.Expr:
        """Return a bit for each of them that shares with a block, itself included."""
        bits = sum(1 << self.apart * place for place in range(self.blocks))
        first = sym.Analyzer().simplify(rank - self.place(rank) * self.apart)
        return tirx.const(bits << int(first), "int32") if is_constant(first) else tirx.const(bits, "int32") << first


ALONE = _Shared(1, 1)


@dataclass(frozen=True)
class _Box:
    """Describe what arrives in a block by one instruction, or by one of each of the blocks that it is shared by.

    By which map, from where in the source to where in shared memory, and how many ``rows`` in all; the map's are those
    of one instruction, of which the last one may have fewer.
    """

    described: BoxMap
    first: tuple[ir.Expr, ...]
    place: ir.TensorLoad
    shared: _Shared
    rows: int

    @property
    def bytes(self) -> int:
        """Bytes that arrive, zeros beyond the source's edges included."""
        return self.rows * self.described.row_bytes


def bound_waits(sch: Schedule, loop: LoopRV, seconds: int = SECONDS) -> None:
    """Make each wait at an mbarrier of a TMA ring print a message and trap after ``seconds``.

    ::

        before   wait at full[k % stages]
        after    wait at full[k % stages];  after 2 s: print block, thread, role, barrier and phase, and trap

    For debugging a kernel that hangs. ``loop`` is a pipelined loop whose copies are by TMA. Waiting warps read a clock,
    which makes the kernel slower. Nothing changes before the function is lowered.

    Raises
    ------
    IllegalPipeline : for a loop that is not pipelined or has no copies by TMA; for less than one second.
    """
    if PIPELINE_STAGE not in sch.get(loop).annotations or not has_boxes(sch, loop) or seconds < 1:
        raise IllegalPipeline(
            "waits that end are those of a pipelined loop whose copies are by TMA",
            loop=loop_name(sch, loop),
            value=f"{seconds} seconds",
            limit="at least 1",
            remedy="copy by fetch_by_tma and pipeline the loop first, or leave bound_waits out",
        )
    require_pipeline(sch, "waits that end")
    sch.annotate(loop, BOUNDED_WAITS, seconds)


def lower_boxes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Have one thread bring what :func:`fetch_by_tma` marked; part of the lowering pipeline, once buffers are compact.

    Raises
    ------
    IllegalPipeline : for a marked copy outside of a pipelined loop with a gate, beside copies of another kind, or
        behind another ring; for clusters whose computations nothing retires, of which two blocks share more than one
        copy, or of whose blocks some stay (:func:`schedules.loops.stay_resident`) and some do not; for threads beside
        each other that are no whole warps; for a target older than sm_90.
    """
    maps = TensorMaps("map")

    def lowered(grid: tirx.For) -> tirx.Stmt:
        if thread_tag(grid) != GRID or not _marked(grid):
            return grid
        around = _loops_around(grid.body)
        shared = {_shared_by(loop) for loop in _marked(grid)} - {ALONE}
        cluster = max((each.cluster for each in shared), default=1)
        _check_nested(grid, sorted(shared))
        if around and not (is_constant(grid.extent) and int(grid.extent) % cluster == 0):
            raise _no_ring(grid, f"clusters of {cluster} blocks of which {grid.extent} stay")
        kernel = _Kernel(cluster, tirx.floormod(grid.loop_var, cluster), sorted(shared), count_warps(grid), around)
        marks, made = Marks.of(function, grid.loop_var), []

        stored = marks.group("results stored", kernel.run)

        def ring(loop: tirx.For) -> tirx.Stmt:
            if PIPELINE_STAGE in loop.annotations and _marked(loop):
                made.append(_Ring(loop, maps, kernel, marks))
                lowered = made[0].lowered()
                return lowered if around else made[0].readied(lowered)
            if not around or not loop.loop_var.same_as(around[0].loop_var):
                return loop
            return made[0].readied(with_loop_body(loop, tirx.SeqStmt([loop.body, *stored])) if stored else loop)

        def retired(realize: s_tir.SBlockRealize) -> tirx.Stmt:
            ends = made and RETIRED in realize.block.annotations
            return tirx.SeqStmt([realize, *made[0].retired()]) if ends else realize

        body = tvm_ffi.structural_map(grid.body, (tirx.For, ring))
        if marks.words is not None:
            body = tvm_ffi.structural_map(body, (s_tir.SBlockRealize, retired))
            for last in [*([] if around else stored), _met(), *marks.clocks("end")]:
                body = _ended_by(body, last)
        if cluster > 1:
            body = _ended_by(body, tirx.Evaluate(T.ptx.barrier.cluster.wait.acquire.aligned()))
            place = tirx.Var("clusterCtaIdx_x", grid.loop_var.ty)
            axis = tirx.IterVar(None, place, tirx.IterVar.ThreadIndex, CLUSTER)
            body = tirx.For(place, 0, cluster, tirx.ForKind.THREAD_BINDING, body, axis)
        return with_loop_body(grid, body)

    if not _marked(function.body):
        return function
    check_tma(function)
    body = tvm_ffi.structural_map(function.body, (tirx.For, lowered))
    if left := _marked(body):
        raise _no_ring(left[0], "a copy by TMA stands in no pipelined loop of a grid's blocks")
    return maps.encoded_in(function.with_body(body))


def asks_for_boxes(stmt: tirx.Stmt) -> bool:
    """Return whether a thread of the first warp asks for boxes by a statement, of a stage that nobody has to leave."""
    if not isinstance(stmt, tirx.IfThenElse) or not _calls(stmt.condition, FIRST_WARP):
        return False
    return not _any(stmt, waits_for_boxes)


def meets(stmt: tirx.Stmt) -> bool:
    """Return whether a block's threads meet in a statement."""
    return _any(stmt, lambda inner: isinstance(inner.value, ir.Call) and inner.value.op.name == SYNC)


def _any(stmt: tirx.Stmt, holds: Callable[[tirx.Evaluate], bool]) -> bool:
    found: list[bool] = []
    tvm_ffi.structural_walk(stmt, (tirx.Evaluate, lambda inner: found.append(holds(inner))))
    return any(found)


def waits_for_boxes(stmt: tirx.Stmt) -> bool:
    """Return whether a statement is a wait at an mbarrier."""
    return isinstance(stmt, tirx.Evaluate) and (_calls(stmt.value, WAIT) or _calls(stmt.value, BOUNDED))


def _calls(value: ir.Expr, name: str) -> bool:
    """Return whether a value is a call of a CUDA function by its name."""
    return isinstance(value, ir.Call) and any(isinstance(arg, ir.StringImm) and arg.value == name for arg in value.args)


def _shared_by(loop: tirx.For) -> _Shared:
    """Return which blocks share what is copied in a loop over rows."""
    return _Shared(*map(int, loop.annotations[SHARED_BY])) if SHARED_BY in loop.annotations else ALONE


def _check_nested(grid: tirx.For, shared: list[_Shared]) -> None:
    """Raise IllegalPipeline unless two blocks of a cluster share one of its copies at most."""
    ends = 1
    for each in sorted(shared, key=lambda one: one.apart):
        if each.apart % ends:
            each_by = ", ".join(f"{one.blocks} blocks, {one.apart} apart" for one in shared)
            raise _no_ring(grid, f"copies of one kernel are shared by {each_by}")
        ends = each.cluster


def _ended_by(stmt: tirx.Stmt, last: tirx.Stmt) -> tirx.Stmt:
    """Put a statement at the end of what a block's threads do."""
    if isinstance(stmt, tirx.For) and thread_tag(stmt):
        body = _ended_by(stmt.body, last)
        return with_loop_body(stmt, body)
    if isinstance(stmt, s_tir.SBlockRealize):
        block = with_body(stmt.block, _ended_by(stmt.block.body, last))
        return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, block)
    return tirx.SeqStmt([stmt, last])


def _no_ring(loop: tirx.For, problem: str) -> IllegalPipeline:
    return IllegalPipeline(
        problem,
        loop=str(loop.loop_var.name),
        remedy="pipeline the loop with pipeline_loop(..., one_barrier=True), with all copies by TMA, once in a block",
    )


def _loops_around(stmt: tirx.Stmt) -> list[tirx.For]:
    """Return the loops by which a block goes through its ring more than once, outermost first.

    Raises IllegalPipeline for a second ring of a block: its mbarriers would be where the first one's are, which other
    threads may still be waiting at.
    """
    if len(rings := _rings(stmt)) > 1:
        raise _no_ring(rings[1], f"a block goes through {len(rings)} rings of boxes")
    around: list[tirx.For] = []

    def note(loop: tirx.For) -> None:
        of_threads = loop.kind == tirx.ForKind.THREAD_BINDING or PIPELINE_STAGE in loop.annotations
        if not of_threads and _rings(loop.body) and not (is_constant(loop.extent) and int(loop.extent) == 1):
            around.append(loop)

    tvm_ffi.structural_walk(stmt, (tirx.For, note))
    return around[::-1]


def _rings(stmt: tirx.Stmt) -> list[tirx.For]:
    """Find the pipelined loops in a statement whose copies are marked."""
    found: list[tirx.For] = []
    note = (tirx.For, lambda loop: found.append(loop) if PIPELINE_STAGE in loop.annotations else None)
    tvm_ffi.structural_walk(stmt, note)
    return [loop for loop in found if _marked(loop)]


@dataclass(frozen=True)
class _Kernel:
    """Tell rings of the kernel around: its cluster's blocks, a block's place among them, who shares, its warps."""

    cluster: int
    rank: ir.Expr
    shared: list[_Shared]
    warps: int
    around: list[tirx.For]

    @property
    def is_last(self) -> ir.Expr:
        """True in a block's last pass through the ring."""
        ends = [loop.loop_var - loop.min == loop.extent - 1 for loop in self.around]
        return functools.reduce(tirx.all, ends, tirx.const(True, "bool"))

    @property
    def run(self) -> ir.Expr:
        """The number of a block's pass through the ring, from 0."""
        number = tirx.const(0, "int32")
        for loop in self.around:
            number = number * loop.extent + (loop.loop_var - loop.min)
        return number

    @property
    def sharing(self) -> int:
        """Blocks that share something with a block, itself included."""
        return 1 + sum(each.blocks - 1 for each in self.shared)

    @property
    def mask(self) -> ir.Expr:
        """A bit for each of these."""
        masks = [each.mask(self.rank) for each in self.shared]
        return functools.reduce(operator.or_, masks) if masks else tirx.const(1, "int32")


class _Ring:
    """A pipelined loop whose copies one thread brings, with an mbarrier for each stage that is full, and one to refill.

    ::

        for tile:  all: wait for its bytes
                   multiply
                   one thread: wait until tile - 2 is retired by all warps that read it;  bring tile + stages - 2
                   retire tile - 1;  each warp says so to the blocks that fill its stage, where one waits for it

    Where computations are not retired, as they do not run on by themselves, all threads meet before a stage is filled.

    In short rings the two last lines change places, and a tile's stage is filled as soon as it is retired itself::

                   retire tile - 1;  each warp says so
                   one thread: wait until tile - 1 is retired by all warps that read it;  bring tile + stages - 1

    Then a tile more is on its way; but warps, and blocks of a cluster, wait for each other in every iteration: longer
    rings were slower by it (64 x 192 x 64 in 6 stages by clusters, 784 x 1704 x 4048: 0.8 times as fast on an H200).
    A tile fewer on its way, for blocks to wait less for each other, made rings of 5 stages 0.89 times as fast, longer
    ones 0.98 to 1.00 times (42 kernels in clusters on an H200): what is on its way counts.

    TVM would count a stage more for that order, so that the ring's tiles get their stages here (:meth:`_with_stages`).
    """

    def __init__(self, loop: tirx.For, maps: TensorMaps, kernel: _Kernel, marks: Marks) -> None:
        self.loop, self.maps, self.kernel, self.marks = loop, maps, kernel, marks
        parts, places = self._parts(loop.body), list(map(int, loop.annotations[PIPELINE_STAGE]))
        annotated = [part.block.annotations if isinstance(part, s_tir.SBlockRealize) else {} for part in parts]
        gates = [number for number, each in enumerate(annotated) if GATE in each]
        self.retires = RETIRE in annotated[-1]
        if len(gates) != 1:
            raise _no_ring(loop, "nobody waits in this loop for what TMA brings")
        if kernel.cluster > 1 and not self.retires:
            raise _no_ring(loop, "a cluster's blocks do not hear when computations of others are done")
        # What reads tiles declares it to TVM at the gate and where it retires: later statements hold none.
        self.stages = max(places[gates[0]], places[-1] if self.retires else 0) + 1
        self.words = tirx.decl_buffer((WORDS_BYTES // 8,), "uint64", "arrivals", scope="shared.dyn", layout=None)
        self.tile = loop.loop_var - loop.min
        turn, self.stage = (part(self.tile, self.stages) for part in (tirx.floordiv, tirx.floormod))
        before = tirx.floordiv(loop.extent - self.stage + self.stages - 1, self.stages)  # a stage's fillings in a run
        self.turn = turn + kernel.run * before if kernel.around else turn
        refilled = is_constant(loop.extent) and int(loop.extent) > self.stages
        simple = (
            len(parts) == len(places) == 4 and annotated[-1].get(RETIRE) == 1
        )  # copies, gate, multiplication, retire
        self.own_warp = OWN_WARP in loop.annotations
        self.number = kernel.run * loop.extent + self.tile  # of a k tile, over all runs
        self.in_flight = int(annotated[-1].get(RETIRE, 0))
        self.seconds = int(loop.annotations.get(BOUNDED_WAITS, 0))
        self.tiles: list[tirx.Var] = []
        self.sooner = self.stages <= SHORT_RING and refilled and simple and not self.own_warp

    def lowered(self) -> tirx.For:
        """Write the loop."""
        loop, body = self.loop, self.loop.body
        kept = {key: value for key, value in loop.annotations.items() if key not in (ASYNC, OWN_WARP)}
        if self.sooner or self.kernel.around:
            body, self.tiles = self._with_stages(body)
        if self.sooner:
            kept |= self._places(body)
        return with_loop_body(loop, self._body(body), kept)

    def readied(self, outermost: tirx.For) -> tirx.Stmt:
        """Ready the mbarriers in front of the outermost loop that goes through the ring."""
        # TVM gives buffers that only a loop uses stages of its own count: these are used in front of it, too. And
        # behind it, where a block comes back to them: its results must not be where the next run's tiles arrive.
        used = [hold_boxes(element_address(tile[tuple(0 for _ in tile.shape)])) for tile in self.tiles]
        parts = [*self.marks.clocks("begin"), *used, self._ready(), outermost, *(used if self.kernel.around else [])]
        if self.kernel.cluster > 1:  # the wait is at the kernel's end
            parts.append(tirx.Evaluate(T.ptx.barrier.cluster.arrive.relaxed.aligned()))
        block = s_tir.SBlock([], [], [], "ring", tirx.SeqStmt(parts), alloc_buffers=[self.words, *self.tiles])
        return s_tir.SBlockRealize([], True, block)

    def _places(self, body: tirx.Stmt) -> dict[str, list[int]]:
        """Return the statements' pipeline stages and their order: copies last, and a tile ahead of what is retired."""
        stages: list[int] = []
        order: list[tuple[int, int]] = []
        for part in self._parts(body):
            marks = part.block.annotations if isinstance(part, s_tir.SBlockRealize) else {}
            copies, retires = bool(_marked(part)), RETIRE in marks
            stages.append(0 if copies else self.stages if retires else self.stages - 1)
            order.append((3 if copies else 2 if retires else 0 if GATE in marks else 1, len(order)))
        return {PIPELINE_STAGE: stages, ORDER: [sorted(order).index(place) for place in order]}

    def _with_stages(self, body: tirx.Stmt) -> tuple[tirx.Stmt, list[tirx.Var]]:
        """Give the tiles that the loop fills as many stages as the ring has; return the body and the new tiles.

        ::

            before   A_shared[panel, row, element]
            after    A_shared[tile % stages, panel, row, element]         # allocated outside of the loop
        """
        tiles: dict[tirx.Var, tirx.Var] = {}

        def note(block: s_tir.SBlock) -> None:
            for buffer in block.alloc_buffers:
                if buffer.scope() in SHARED_SCOPES:
                    shape = (self.stages, *buffer.shape)
                    tiles[buffer] = tirx.decl_buffer(
                        shape, buffer.dtype, buffer.name, scope=buffer.scope(), layout=None
                    )

        tvm_ffi.structural_walk(body, (s_tir.SBlock, note))
        body = with_buffers(body, tiles, lambda _, indices: [self.stage, *indices], allocate=False)
        return body, list(tiles.values())

    def _parts(self, body: tirx.Stmt) -> list[tirx.Stmt]:
        while isinstance(body, s_tir.SBlockRealize) and GATE not in body.block.annotations:
            body = body.block.body
        return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]

    def _body(self, body: tirx.Stmt) -> tirx.Stmt:
        if isinstance(body, s_tir.SBlockRealize) and GATE not in body.block.annotations:
            return s_tir.SBlockRealize([], body.predicate, with_body(body.block, self._body(body.block.body)))
        return tirx.SeqStmt([self._statement(part) for part in self._parts(body)])

    def _statement(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if _marked(stmt):
            return self._brought(stmt)
        marks = stmt.block.annotations if isinstance(stmt, s_tir.SBlockRealize) else {}
        if GATE in marks:
            waited = self._wait(self._full, self.turn % 2, "consumer")
            begins, ends = (self.marks.group(f"full wait {event}", self.number) for event in ("begins", "ends"))
            return _instead(stmt, *begins, waited, *ends)
        if RETIRE in marks:
            arrive = cuda_func_call(
                "mbarrier_arrive_in", self._empty(self.stage), self.kernel.mask, source_code=_ARRIVE
            )
            refilled = tirx.any(self.tile + self.stages < self.loop.extent, tirx.Not(self.kernel.is_last))
            told = tirx.IfThenElse(refilled, tirx.Evaluate(arrive), None)
            # Of a run's last ones it is seen behind the loop, where all are retired.
            seen = True if self.kernel.around else self.tile + self.in_flight < self.loop.extent
            return _instead(stmt, self._retired(stmt.block), *self.marks.group("mma retired", self.number, seen), told)
        issued = self.marks.group("mma issued", self.number)
        return _instead(stmt, stmt.block.body, *issued) if issued and isinstance(stmt, s_tir.SBlockRealize) else stmt

    def retired(self) -> list[tirx.Stmt]:
        """Stamp that a run's computations are all retired, behind the statement that does it."""
        last = self.kernel.run * self.loop.extent + self.loop.extent
        left = [] if self.kernel.around else range(self.in_flight, 0, -1)
        seen = [mark for before in left for mark in self.marks.group("mma retired", last - before)]
        return [*seen, *self.marks.group("epilogue begins", self.kernel.run)]

    def _wait(self, barrier: Callable[[ir.Expr], ir.Expr], parity: ir.Expr, role: str) -> tirx.Stmt:
        """Wait for a phase of the stage's mbarrier to end; where waits are bounded, say who does."""
        name, more, text = WAIT, [], MBARRIER_WAIT
        if self.seconds:
            name, more, text = BOUNDED, [ir.StringImm(role), self.stage, self.seconds], BOUNDED_WAIT
        source = MBARRIER_IS_THROUGH + text
        return tirx.Evaluate(cuda_func_call(name, barrier(self.stage), parity, *more, source_code=source))

    def _retired(self, block: s_tir.SBlock) -> tirx.Stmt:
        """Retire what a stage's refilling waits for: of a run's last tiles all, where the next run fills stages again.

        In one run nobody waits for these: their computations are retired behind the loop.
        """
        if not self.kernel.around or not int(block.annotations[RETIRE]):
            return block.body
        is_last = self.loop.extent <= self.tile + int(block.annotations[RETIRE])
        retire_all = T.ptx.wgmma.wait_group.sync.aligned(0)
        return tirx.IfThenElse(is_last, tirx.Evaluate(retire_all), block.body)

    def _ready(self) -> tirx.Stmt:
        """Ready the mbarriers.

        A full one's phase ends with one arrival and the bytes that it announces; an empty one's with those of all the
        warps that read the stage.
        """
        counts = {self._full: 1, **({self._empty: self.kernel.sharing * self.kernel.warps} if self.retires else {})}
        made = [
            tirx.Evaluate(T.ptx.mbarrier.init.shared.b64(barrier(stage), T.uint32(count)))
            for barrier, count in counts.items()
            for stage in range(self.stages)
        ]
        fence, met = T.ptx.fence.proxy.async_.shared__cta(), [_met()]
        if self.kernel.cluster > 1:
            # Of memory the arrival says nothing: it would be a fence for the whole GPU.
            cluster = T.ptx.barrier.cluster
            fence = T.ptx.fence.mbarrier_init.release.cluster()
            met = [tirx.Evaluate(cluster.arrive.relaxed.aligned()), tirx.Evaluate(cluster.wait.acquire.aligned())]
        parts = tirx.SeqStmt(
            [tirx.IfThenElse(is_elected(FIRST_WARP), tirx.SeqStmt(made), None), tirx.Evaluate(fence), *met]
        )
        return s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "ready", parts))

    def _brought(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """Let one thread announce the bytes of all boxes, and ask for its share of these, once the stage is free."""
        boxes = list(_boxes(stmt, {}))
        filled: list[ir.TensorRegion] = []
        tvm_ffi.structural_walk(stmt, (s_tir.SBlock, lambda block: filled.extend(map(whole_buffer, block.writes))))
        size = T.uint32(sum(box.bytes for box in boxes))
        expected = T.ptx.mbarrier.arrive.expect_tx.shared.b64(self._full(self.stage), size)
        asked = [tirx.Evaluate(expected), *map(self._loaded, boxes), *self.marks.loading("load issued", self.number)]
        free = [_met()]
        if self.retires:
            begins, ends = (self.marks.loading(f"empty wait {event}", self.number) for event in ("begins", "ends"))
            free = [*begins, self._wait(self._empty, (self.turn + 1) % 2, "producer"), *ends]
        again = tirx.any(self.stages <= self.tile, self.kernel.run > 0)
        refilled = tirx.IfThenElse(again, tirx.SeqStmt(free) if len(free) > 1 else free[0], None)
        one = is_elected(BRINGS if self.own_warp else FIRST_WARP)
        parts = [tirx.IfThenElse(one, tirx.SeqStmt([*([refilled] if self.retires else []), *asked]), None)]
        made = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], filled, "boxes", stmt))
        return _instead(made, *([] if self.retires else [refilled]), *parts)

    def _loaded(self, box: _Box) -> tirx.Stmt:
        """Ask for a block's share of a box: the same rows in each block, but for what the last one of them has left."""
        share, place = box.described.rows, box.shared.place(self.kernel.rank)
        whole, left = divmod(box.rows, share)
        asked = tirx.Evaluate(self._load(box, box.described, place * share))
        if whole == box.shared.blocks:
            return asked
        rest = tirx.Evaluate(self._load(box, replace(box.described, rows=left), whole * share)) if left else None
        if rest is not None and whole + 1 < box.shared.blocks:
            rest = tirx.IfThenElse(place == whole, rest, None)
        return tirx.IfThenElse(place < whole, asked, rest)

    def _load(self, box: _Box, described: BoxMap, row: ir.Expr | int) -> ir.Expr:
        first, place = box.first, box.place
        kind, more = TMA_LOAD, []
        if box.shared.blocks > 1:
            mask = tirx.Cast("uint16", box.shared.mask(self.kernel.rank))
            kind, more = TMA_MULTICAST, [mask]
            first = (*first[:-2], first[-2] + row, first[-1])
            place = place.source[(*place.indices[:-2], place.indices[-2] + row, place.indices[-1])]
        load, tensor_map = T.ptx[kind.format(len(first))], tirx.address_of(self.maps.of(described))
        return load(element_address(place), tensor_map, *first[::-1], self._full(self.stage), *more)

    def _full(self, stage: ir.Expr | int) -> ir.Expr:
        return element_address(self.words[stage])

    def _empty(self, stage: ir.Expr | int) -> ir.Expr:
        return element_address(self.words[stage + self.stages])


def _boxes(stmt: tirx.Stmt, at: dict[tirx.Var, ir.Expr]) -> Iterator[_Box]:
    """Find the boxes of copies: one for each iteration of the loops around those over rows."""
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _boxes(part, at)
    elif isinstance(stmt, tirx.For) and BOXES in stmt.annotations:
        yield _box(stmt, at)
    elif isinstance(stmt, tirx.For) and _marked(stmt):
        for iteration in range(int(stmt.extent)):
            yield from _boxes(stmt.body, {**at, stmt.loop_var: stmt.min + iteration})
    else:
        loops: list[tirx.For] = []
        tvm_ffi.structural_walk(stmt, (tirx.For, loops.append))
        raise _no_ring(loops[0], "a copy of another kind stands beside one by TMA")


def _box(rows: tirx.For, at: dict[tirx.Var, ir.Expr]) -> _Box:
    at, inner, columns, analyzer = {**at, rows.loop_var: rows.min}, rows.body, 1, sym.Analyzer()
    while isinstance(inner, tirx.For):
        at[inner.loop_var] = inner.min
        columns *= int(inner.extent)
        inner = inner.body
    values = {iterator.var: replaced(value, at) for iterator, value in zip(inner.block.iter_vars, inner.iter_values)}
    store, (_, load) = inner.block.body, chosen_value(inner.block.body.value)
    first, place = (
        tuple(analyzer.simplify(replaced(replaced(index, values), at)) for index in indices)
        for indices in (load.indices, store.indices)
    )
    if width := int(rows.annotations[BOXES]):
        columns = min(columns, width - int(place[-3]) * columns)
    shared = _shared_by(rows)
    height = int(rows.extent)
    share = -(-height // (shared.blocks * PIECE_ROWS)) * PIECE_ROWS if shared.blocks > 1 else height
    described = BoxMap(load.source, share, columns, SWIZZLE in inner.block.annotations)
    return _Box(described, first, store.buffer[place], shared, height)


def _marked(stmt: tirx.Stmt) -> list[tirx.For]:
    """Find the loops in a statement that :func:`fetch_by_tma` marked."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(stmt, (tirx.For, lambda loop: found.append(loop) if BOXES in loop.annotations else None))
    return found


def _instead(realize: s_tir.SBlockRealize, *parts: tirx.Stmt) -> tirx.Stmt:
    """Return a block with other statements, as one: TVM counts a pipeline's, and takes two in a block for two."""
    body = parts[0]
    if len(parts) > 1:
        body = tirx.For(tirx.Var("once", "int32"), 0, 1, tirx.ForKind.SERIAL, tirx.SeqStmt(list(parts)))
    return s_tir.SBlockRealize(realize.iter_values, realize.predicate, with_body(realize.block, body))


def _met() -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", SYNC, "shared"))
