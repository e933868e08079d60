"""Copies to shared memory by the tensor memory accelerator (TMA): which are boxes, and a mark on these.

A tensor map, which the host makes of a buffer, says how the buffer's rows lie in device memory, and how large a *box*
is that one instruction copies. The instruction is one thread's. Rows of 128 bytes arrive permuted as
:func:`schedules.memory.swizzle_rows` has them, and what a box has beyond the buffer arrives as zeros. The bytes that
arrive count down an *mbarrier*, at which whoever reads the box waits::

    before   for k, pipelined:  all threads: A_shared = A[tile k]                  # cp.async
                                gate;  C += A_shared * B_shared
    after    for k, pipelined:  one thread: announce the bytes of tile k at mbarrier k % stages;  a box of A -> A_shared
                                gate: wait at mbarrier k % stages;  C += A_shared * B_shared

The copy stays TensorIR that any CPU can run until the function is lowered (:mod:`schedules.pipeline.box_rings`). What
it saves: threads compute no addresses and issue no copies; of rows that begin inside of sectors cp.async brings sectors
twice, whose halves lie apart in swizzled rows; and blocks of a cluster can share what they read.

Sources: CUDA driver API, cuTensorMapEncodeTiled; PTX ISA, "cp.async.bulk.tensor", "Parallel synchronization: mbarrier".
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.script import tirx as T

from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule
from tensorir_ladder.schedules.inspection import (
    DEVICE_SCOPES,
    SHARED_SCOPES,
    block_name,
    is_constant,
    loop_extent,
    loops_below,
    loops_of,
    replaced,
    terms_of,
    thread_tag,
)
from tensorir_ladder.schedules.isa import (
    PIECE_ROWS,
    ROW_BYTES,
    TMA_ARCH,
    TMA_L2_PROMOTION_128B,
    TMA_STRIDE_BYTES,
    TMA_SWIZZLE_128B,
    VECTOR_BYTES,
    WARP,
    WIDEST,
)
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.memory.swizzling import SWIZZLE
from tensorir_ladder.schedules.passes import require_pipeline, with_body

GRID = "blockIdx.x"
BOXES = "rows_of_a_box"  # on a loop over rows: how many columns of panels side by side are copied, 0 for all
MOST_DIMENSIONS = 5  # of a tensor map
BOX_BYTES = 128  # what a box's place in shared memory is a multiple of
MOST_BLOCKS = 8  # of a cluster, on any GPU that has clusters
_BEYOND_FIRST = "  if (threadIdx.x >= 32 || threadIdx.y != 0 || threadIdx.z != 0) return false;\n"
_HOLDS = "\n__forceinline__ __device__ void holds_boxes(void* tile) {}\n"
SHARED_BY = "blocks_that_share_a_box"  # on the same loop: how many, and how far apart their numbers are


@dataclass(frozen=True)
class BoxFetch:
    """A copy that TMA makes: its block, and the loop over the rows of a box."""

    copy: SBlockRV
    rows: LoopRV


def has_boxes(sch: Schedule, loop: LoopRV) -> bool:
    """Return whether TMA brings copies under a loop (:func:`fetch_by_tma`): then it brings all of them."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(
        sch.get(loop), (tirx.For, lambda inner: found.append(inner) if BOXES in inner.annotations else None)
    )
    return bool(found)


def fetch_by_tma(sch: Schedule, copy: SBlockRV, loop: LoopRV, blocks: int = 1, apart: int = 1) -> BoxFetch:
    """Let one thread bring what a copy under ``loop`` copies to shared memory, box by box, by TMA.

    ::

        before   for panel:  for row < 128:  for element < 64:  A_shared[panel, row, element] = A[...] or 0
        after    for panel:  one thread:  a box of 128 rows of 64 elements -> A_shared[panel]

    What :func:`schedules.memory.fetch_cooperatively` is with all threads. The two innermost loops of the copy are the
    rows and columns of a box, loops between them and ``loop`` are boxes. ``loop`` must be pipelined with a gate
    (:func:`schedules.pipeline.pipeline_loop` with ``one_barrier``), and all of its copies be TMA's: the module's text
    shows what becomes of it. Nothing but the form of the innermost loop changes before the function is lowered.

    With ``blocks`` of 2 to 8, so many blocks copy the same: each brings a share of every box's rows to all of them
    (multicast), so that each row is read once. Their numbers are ``apart`` from each other, and the largest
    ``blocks * apart`` of a kernel's copies are its cluster, blocks that run side by side::

        A's blocks = 2               block 0:  rows 0 to 63 of A's box  -> A_shared of blocks 0 and 1
                                     block 1:  rows 64 to 127           -> A_shared of blocks 0 and 1
        B's blocks = 2, apart = 2    block 0:  rows 0 to 31 of B's box  -> B_shared of blocks 0 and 2
                                     block 2:  rows 32 to 63            -> B_shared of blocks 0 and 2
                                     and blocks 2 and 3 of A, 1 and 3 of B alike

    Shares are the same multiple of eight rows, but for the last one, which is what the box has left. A stage is filled
    anew once the computations of all blocks that share something with it are retired, which takes a
    pipeline that retires them (:func:`schedules.tensor_cores.pipeline_warpgroups`).

    Raises
    ------
    IllegalSchedule : for a copy that is no box of a matrix in device memory: of other elements than those beside and
        below each other, in rows that are no multiple of 16 bytes or more than 256 elements; swizzled rows that are not
        128 bytes; more than 256 rows, or boxes that leave the next one at no multiple of 128 bytes (1,024 where rows
        are swizzled); a source whose rows are no multiple of 16 bytes apart, or columns from which boxes begin that are
        none; a condition that is neither the source's edge nor the end of an instruction's columns
        (:func:`schedules.tensor_cores.warpgroup.lay_out_own_panels`), or other values than zeros beyond; ``blocks``
        that copy something else each, that the grid's are no multiple of, or for each of which a box has no eight rows,
        or whose rows are no multiple of eight.
    """
    own, block = loops_below(sch, copy, loop), sch.get(copy)
    if len(own) < 2 or len(own) == len(sch.get_loops(copy)):
        raise _no_box(sch, copy, "it has no loops over rows and columns of its own under the loop", f"{len(own)} loops")
    if unknown := [str(sch.get(each).extent) for each in own if not is_constant(sch.get(each).extent)]:
        raise _no_box(sch, copy, "its loops have extents that only run time knows", unknown, "constants")
    rows, columns = own[-2:]
    width = _check_box(sch, copy, block, rows, columns)
    if blocks != 1:
        _check_shared(sch, copy, own, block, blocks, apart)
    _, vector = sch.split(columns, [None, VECTOR_BYTES // dtype_bytes(block.writes[0].source.dtype)])
    sch.vectorize(vector)
    require_pipeline(sch, "copies by TMA")
    sch.annotate(rows, BOXES, width)
    if blocks != 1:
        sch.annotate(rows, SHARED_BY, [blocks, apart])
    return BoxFetch(copy, rows)


def _no_box(sch: Schedule, copy: SBlockRV, problem: str, value: object, limit: object = None) -> IllegalSchedule:
    return IllegalSchedule(
        f"TMA cannot copy this: {problem}",
        block=block_name(sch, copy),
        value=value,
        limit=limit,
        remedy="spread the copy over the block's threads (fetch_cooperatively)",
    )


def _check_box(sch: Schedule, copy: SBlockRV, block: s_tir.SBlock, rows: LoopRV, columns: LoopRV) -> int:
    """Raise IllegalSchedule for what is no box; return how many columns of an instruction are copied, 0 for all."""
    choices, load = chosen_value(block.body.value)
    if not isinstance(load, ir.TensorLoad):
        raise _no_box(sch, copy, "it moves no elements as they are", block.body.value, "source[...], or that or 0")
    source, target = load.source, block.body.buffer
    scopes, itemsize = (source.scope(), target.scope()), dtype_bytes(target.dtype)
    if scopes[0] not in DEVICE_SCOPES or scopes[1] not in SHARED_SCOPES:
        raise _no_box(sch, copy, "it is from and to other memory", scopes, "from device memory to shared memory")
    if not 2 <= len(source.shape) <= MOST_DIMENSIONS:
        raise _no_box(sch, copy, "dimensions of the source", len(source.shape), f"2 to {MOST_DIMENSIONS}")
    pitch = source.shape[-1] * itemsize
    if not sym.Analyzer().can_prove_equal(tirx.floormod(pitch, TMA_STRIDE_BYTES), 0):
        limit = f"a multiple of {TMA_STRIDE_BYTES} bytes"
        raise _no_box(sch, copy, f"rows of {source.name} are apart", f"{pitch} bytes", limit)
    height, row_bytes = loop_extent(sch, rows), loop_extent(sch, columns) * itemsize
    swizzled = SWIZZLE in block.annotations
    if height > WIDEST or loop_extent(sch, columns) > WIDEST:
        raise _no_box(sch, copy, "a box's rows and columns", (height, loop_extent(sch, columns)), f"{WIDEST} of both")
    if row_bytes % VECTOR_BYTES or (swizzled and row_bytes != ROW_BYTES):
        limit = f"{ROW_BYTES} where rows are swizzled" if swizzled else f"a multiple of {VECTOR_BYTES}"
        raise _no_box(sch, copy, "bytes of a box's rows", row_bytes, limit)
    if height % PIECE_ROWS if swizzled else height * row_bytes % BOX_BYTES:
        limit = f"a multiple of {PIECE_ROWS} rows" if swizzled else f"a multiple of {BOX_BYTES} bytes"
        raise _no_box(sch, copy, "a box after which the next begins elsewhere", f"{height} rows", limit)
    if not _goes_along(sch.get(rows), sch.get(columns), block, load):
        raise _no_box(sch, copy, "its innermost loops do not run along the source's and the tile's rows", load)
    _check_first_column(sch, copy, block, rows, columns, load)
    return _width(sch, copy, block, choices, load)


def _check_first_column(
    sch: Schedule, copy: SBlockRV, block: s_tir.SBlock, rows: LoopRV, columns: LoopRV, load: ir.TensorLoad
) -> None:
    """Raise IllegalSchedule for boxes that begin inside of 16 bytes, which a GPU calls an illegal instruction."""
    realize, analyzer = sch.get(columns).body, sym.Analyzer()
    first = {loop.loop_var: loop.min for loop in (sch.get(rows), sch.get(columns))}
    values = {iterator.var: replaced(value, first) for iterator, value in zip(block.iter_vars, realize.iter_values)}
    column = analyzer.simplify(replaced(load.indices[-1], values))
    vector = VECTOR_BYTES // dtype_bytes(load.source.dtype)
    if not analyzer.can_prove_equal(tirx.floormod(column, vector), 0):
        raise _no_box(
            sch, copy, f"the column of {load.source.name} that it begins at", column, f"multiples of {vector}"
        )


def _check_shared(
    sch: Schedule, copy: SBlockRV, own: list[LoopRV], block: s_tir.SBlock, blocks: int, apart: int
) -> None:
    """Raise IllegalSchedule where blocks that are so far apart cannot share what they copy."""
    if not 1 < blocks <= MOST_BLOCKS:
        raise _no_box(sch, copy, "blocks that share it", blocks, f"1 to {MOST_BLOCKS}")
    cluster = blocks * apart
    if not 0 < cluster <= MOST_BLOCKS:
        raise _no_box(sch, copy, f"blocks of a cluster, {blocks} of them {apart} apart", cluster, f"1 to {MOST_BLOCKS}")
    grid = [loop for loop in map(sch.get, sch.get_loops(copy)) if thread_tag(loop) == GRID]
    counts = [int(loop.extent) for loop in grid if loop.extent is not None and is_constant(loop.extent)]
    if len(grid) != 1 or len(counts) != 1 or counts[0] % cluster:
        extents = [str(loop.extent) for loop in grid]
        raise _no_box(sch, copy, f"the grid's extents ({GRID})", extents, f"one, a multiple of {cluster} blocks")
    rows = loop_extent(sch, own[-2])
    if rows % PIECE_ROWS or rows < blocks * PIECE_ROWS:
        limit = f"a multiple of {PIECE_ROWS}, for each of {blocks} blocks {PIECE_ROWS} and more"
        raise _no_box(sch, copy, "rows of a box that blocks share", rows, limit)
    analyzer = sym.Analyzer()
    first, rank = (tirx.Var(name, grid[0].loop_var.ty) for name in ("first", "rank"))
    for var, extent in ((first, counts[0] // cluster), (rank, cluster)):
        analyzer.bind(var, ir.Range(0, extent))
    realize = sch.get(own[-1]).body
    values = {iterator.var: value for iterator, value in zip(block.iter_vars, realize.iter_values)}
    _, load = chosen_value(block.body.value)
    for index in load.indices:
        start = replaced(index, values)
        here, leader = (
            replaced(start, {grid[0].loop_var: first * cluster + of_cluster})
            for of_cluster in (rank, tirx.floormod(rank, apart))
        )
        if not analyzer.can_prove_equal(analyzer.simplify(here) - analyzer.simplify(leader), 0):
            problem = f"{blocks} blocks, {apart} apart, copy something else each"
            raise _no_box(sch, copy, problem, index, "the same")


def chosen_value(value: ir.Expr) -> tuple[list[tuple[ir.Expr, ir.Expr]], ir.Expr]:
    """Return the conditions under which something else than the innermost value is copied, each with that; and it."""
    choices = []
    while isinstance(value, ir.Call) and str(value.op.name).endswith("if_then_else"):
        condition, value, other = value.args
        choices.append((condition, other))
    return choices, value


def _goes_along(rows: tirx.For, columns: tirx.For, block: s_tir.SBlock, load: ir.TensorLoad) -> bool:
    """Tell whether a box's rows and columns are the last two dimensions of both its source and its tile."""
    realize, analyzer = columns.body, sym.Analyzer()
    if not isinstance(realize, s_tir.SBlockRealize) or not analyzer.can_prove(realize.predicate):
        return False
    own = {rows.loop_var: rows.min, columns.loop_var: columns.min}

    def place(index: ir.Expr, at: dict[tirx.Var, ir.Expr]) -> ir.Expr:
        values = {iterator.var: replaced(value, at) for iterator, value in zip(block.iter_vars, realize.iter_values)}
        return replaced(index, values)

    for indices in (load.indices, block.body.indices):
        for loop, along in ((rows, -2), (columns, -1)):
            for number, index in enumerate(indices, -len(indices)):
                moved = {**own, loop.loop_var: loop.loop_var}
                analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent), allow_override=True)
                expected = place(index, own) + (loop.loop_var - loop.min if number == along else 0)
                if not analyzer.can_prove_equal(analyzer.simplify(place(index, moved) - expected), 0):
                    return False
    return True


def _width(
    sch: Schedule, copy: SBlockRV, block: s_tir.SBlock, choices: list[tuple[ir.Expr, ir.Expr]], load: ir.TensorLoad
) -> int:
    """Return how many columns panels side by side copy, 0 for all; IllegalSchedule for a condition of another kind."""
    analyzer, width, place = sym.Analyzer(), 0, block.body.indices
    for condition, other in choices:
        if not isinstance(other, tirx.FloatImm | tirx.IntImm) or float(other.value):
            raise _no_box(sch, copy, "what lies beyond the source's edges", other, "zeros")
        for part in terms_of(condition):
            if not isinstance(part, tirx.LT):
                raise _no_box(sch, copy, "a condition that is no edge of the source", part)
            pairs = zip(load.indices, load.source.shape)
            if any(analyzer.can_prove_equal(part.a, at) and analyzer.can_prove(part.b >= size) for at, size in pairs):
                continue
            if not _ends_panels(analyzer, part, place, block.body.buffer.shape) or width not in (0, int(part.b)):
                raise _no_box(sch, copy, "a condition that is no edge of the source", part)
            width = int(part.b)
    return width


def _ends_panels(
    analyzer: sym.Analyzer, part: tirx.LT, place: Sequence[ir.Expr], shape: Sequence[ir.Expr | int]
) -> bool:
    """Tell whether a condition ends the columns of panels side by side inside of the last one."""
    if len(place) < 3 or not is_constant(part.b):
        return False
    panels, panel = int(shape[-3]), int(shape[-1])
    column = place[-3] * panel + place[-1]
    return (panels - 1) * panel < int(part.b) <= panels * panel and analyzer.can_prove_equal(part.a, column)


def encode_tensor_map(
    tensor_map: tirx.Var,
    matrix: tirx.Var,
    sizes: Sequence[ir.Expr | int],
    strides: Sequence[ir.Expr | int],
    box: Sequence[ir.Expr | int],
    swizzle: int,
) -> ir.Expr:
    """Return the host's call that makes a tensor map of a buffer.

    ``sizes`` are from the innermost dimension on, in elements, ``strides`` in bytes and of all but that, ``box`` what
    one instruction copies; ``swizzle`` is CUtensorMapSwizzle.
    """
    return tirx.op.tensormap_encode_tiled(
        tensor_map,
        matrix.data,
        *(*sizes, *strides, *box),
        *(1 for _ in sizes),  # every element of a box, along all dimensions
        descriptor_dtype=str(matrix.dtype),
        rank=len(sizes),
        swizzle=swizzle,
        l2_promotion=TMA_L2_PROMOTION_128B,
    )


@dataclass(frozen=True)
class BoxMap:
    """A tensor map: of which buffer, the rows and columns of its boxes, and whether they are swizzled."""

    source: tirx.Var
    rows: int
    columns: int
    swizzled: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a box's row."""
        return self.columns * dtype_bytes(self.source.dtype)

    def encode(self, tensor_map: tirx.Var) -> list[tirx.Stmt]:
        """Write the host's statements that make it."""
        sizes, itemsize = list(self.source.shape)[::-1], dtype_bytes(self.source.dtype)
        strides = [itemsize * math.prod(sizes[:count]) for count in range(1, len(sizes))]
        box = self.columns, self.rows, *(1 for _ in sizes[2:])
        swizzle = TMA_SWIZZLE_128B if self.swizzled else 0
        call = encode_tensor_map(tensor_map, self.source, sizes, strides, box, swizzle)
        return [tirx.Bind(tensor_map, tirx.op.tvm_stack_alloca("tensormap", 1)), tirx.Evaluate(call)]


class TensorMaps:
    """The tensor maps that a function's kernels need, each made once by its host; ``suffix`` ends their names."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.made: dict[BoxMap, tirx.Var] = {}

    def of(self, described: BoxMap) -> tirx.Var:
        """Return the map of such boxes."""
        name = f"{described.source.name}_{self.suffix}"
        while any(name == other.name and key != described for key, other in self.made.items()):
            name += "_"
        return self.made.setdefault(described, tirx.Var(name, T.handle("tensormap").ty))

    def encoded_in(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Let a function that is not lowered yet begin by making the maps."""
        encoded = [stmt for described, tensor_map in self.made.items() for stmt in described.encode(tensor_map)]
        block = function.body.block
        made = with_body(block, tirx.SeqStmt([*encoded, block.body]))
        return function.with_body(s_tir.SBlockRealize([], True, made))


def check_tma(function: tirx.PrimFunc) -> None:
    """Raise IllegalPipeline for a function that is lowered for a GPU without TMA."""
    target = function.attrs.get("target") if function.attrs else None
    arch = re.fullmatch(r"sm_(\d+)[af]?", str(target.attrs.get("arch", "")) if target is not None else "")
    if arch and int(arch.group(1)) < TMA_ARCH:
        raise IllegalPipeline(
            "a GPU without TMA",
            value=arch.group(),
            limit=f"sm_{TMA_ARCH} and newer",
            remedy="let the block's threads copy (fetch_cooperatively, store_by_rows)",
        )


def count_warps(grid: tirx.For) -> int:
    """Return the warps of a kernel's blocks; IllegalPipeline where a warp's threads are not beside each other."""
    extents = {
        thread_tag(loop): int(loop.extent) for loop in loops_of(grid) if thread_tag(loop).startswith("threadIdx")
    }
    beside = extents.get("threadIdx.x", 1)
    if beside % WARP:
        raise IllegalPipeline(
            "threads beside each other, of which a warp issues copies by TMA",
            loop="threadIdx.x",
            value=beside,
            limit=f"a multiple of {WARP}",
            remedy="bind a loop of that many iterations to threadIdx.x",
        )
    return math.prod(extents.values()) // WARP


def element_address(place: ir.TensorLoad) -> ir.Expr:
    """Return an element's address in the form that TVM moves with the buffer, and counts as a use of it.

    Said to be read, whatever is done there: between reads TVM puts no barriers, which the mbarriers stand for.
    """
    offset: ir.Expr = tirx.const(0, "int32")
    for index, extent in zip(place.indices, place.source.shape):
        offset = offset * extent + index
    return place.source.access_ptr("r", offset=sym.Analyzer().simplify(offset), extent=1)


def elected(name: str, unless: str = "") -> str:
    """Return the CUDA text of a function that is true in one of a warp's threads; ``unless``: where it returns before.

    The compiler knows that one lane is left behind elect.sync; from "thread == 0" it makes a loop over lanes around
    every instruction that takes a tensor map.
    """
    return f"""
__forceinline__ __device__ bool {name}() {{
{unless}  unsigned int elected;
  asm volatile(
      "{{\\n.reg .pred p;\\n"
      "elect.sync _|p, 0xffffffff;\\n"
      "selp.u32 %0, 1, 0, p;\\n}}"
      : "=r"(elected));
  return elected;
}}
"""


def is_elected(name: str) -> ir.Expr:
    """Return the condition, as a CUDA function of that name, that is true in one thread of a block's first warp."""
    return cuda_func_call(name, source_code=elected(name, unless=_BEYOND_FIRST), return_type="bool")


def hold_boxes(address: ir.Expr) -> tirx.Stmt:
    """Return a statement that does nothing, but is a use of a tile for TVM, which makes room for what it sees used."""
    return tirx.Evaluate(cuda_func_call("holds_boxes", address, source_code=_HOLDS))
