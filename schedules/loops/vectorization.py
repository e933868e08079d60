"""Vector loads and stores: how wide they may be, and making them."""

from __future__ import annotations

import re

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Positive, SerialLoop
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import (
    is_multiple,
    is_one,
    loop_extent,
    loop_name,
    loops_below,
    without_carries,
)
from tensorir_ladder.schedules.isa import VECTOR_BYTES

TWO, FOUR = 2, 4  # elements of CUDA's own vectors of small integers: char4, short4


def widest_vector(sch: Schedule, block: SBlockRV, innermost: LoopRV) -> int:
    """Return the elements in the widest legal vector along a block's innermost loop, over all it reads and writes.

    At most 16 bytes; dividing the loop's extent and the last dimension of every buffer (so that rows begin aligned,
    and each vector stays in its row); and contiguous and aligned in every buffer, which is proven from the block's
    indices. The last is not a nicety: TVM 0.27 copies 16 consecutive bytes with cp.async even where the vectorized
    index has a stride, silently, and loads vectors from wherever they begin, which a GPU refuses. And no more than TVM
    can write (:func:`_most_elements`). 1 means scalars.
    """
    stmt = sch.get(block)
    regions = [*stmt.reads, *stmt.writes]
    if not _walks_last_iterator(sch, innermost) or not all(region.source.shape for region in regions):
        return 1  # a buffer of no dimensions is one number for all lanes
    extents = [loop_extent(sch, innermost), *(region.source.shape[-1] for region in regions)]
    width = VECTOR_BYTES // max(dtype_bytes(region.source.dtype) for region in regions)
    width = min(width, _most_elements(stmt))
    while width > 1 and (
        not all(is_multiple(extent, width) for extent in extents)
        or not all(_is_contiguous(region, stmt.iter_vars[-1].var, width) for region in regions)
    ):
        width //= 2
    return max(width, 1)


def vectorize_inner(sch: Schedule, loop: SerialLoop, width: Positive) -> LoopRV:
    """Make the innermost loop's accesses vectors of ``width`` elements.

    ::

        before   for j < 8:  C[i, j] = C_local[i, j]
        after    for j_outer < 2:  C[i, 4·j_outer : 4·j_outer + 4] = C_local[i, 4·j_outer : ...]

    A width of 1 changes nothing. Returns the loop that remains outside (``loop`` itself for width 1).

    Raises
    ------
    IllegalSchedule : for vectors of more than 16 bytes, which no instruction loads or stores.
    """
    widest = max((dtype_bytes(str(buffer.dtype)) for buffer in _buffers_in(sch.get(loop))), default=1)
    if width * widest > VECTOR_BYTES:
        raise IllegalSchedule(
            "vectors are too wide",
            loop=loop_name(sch, loop),
            value=f"{width} elements of {widest} bytes",
            limit=f"{VECTOR_BYTES} bytes",
            remedy=f"give {max(1, VECTOR_BYTES // widest)} or less (widest_vector says how many are legal)",
        )
    if width == 1:
        return loop
    if loop_extent(sch, loop) == width:
        sch.vectorize(loop)
        return loop
    outer, vector = sch.split(loop, [None, width])
    sch.vectorize(vector)
    return outer


def vectorize_write_back(sch: Schedule, write_back: SBlockRV, loop: LoopRV, unroll_scalars: bool = False) -> int:
    """Store a write-back's innermost loop under ``loop`` in the widest legal vectors; returns their width.

    See :func:`widest_vector`; a ragged or unaligned output gets narrower stores, openly. The width is 1
    where the write-back has no loop of its own under ``loop`` (one element per thread). ``unroll_scalars`` writes
    out stores that are single: nvcc makes many copies of a loop whose stores have two conditions.
    """
    own_loops = loops_below(sch, write_back, loop)
    width = widest_vector(sch, write_back, own_loops[-1]) if own_loops else 1
    if own_loops:
        vectorize_inner(sch, own_loops[-1], width)
    if unroll_scalars and width == 1:
        for own in own_loops:
            sch.unroll(own)
    return width


def _buffers_in(stmt: tirx.Stmt) -> list[tirx.Var]:
    found: list[tirx.Var] = []
    loads = (ir.TensorLoad, lambda load: found.append(load.source))
    stores = (tirx.BufferStore, lambda store: found.append(store.buffer))
    tvm_ffi.structural_walk(stmt, [loads, stores])
    return found


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype such as "float16"."""
    return int(tvm_ffi.dtype(str(dtype)).itemsize)


def _most_elements(block: s_tir.SBlock) -> int:
    """Return how many elements a vector may have that TVM 0.27 can write as CUDA, which nvcc then takes.

    One of bool; four of fp8 that is not just moved; and four of integers below 4 bytes where a vector holds one value
    in all its lanes, as zeros outside a predicate do, or an element of a row: two of one byte that is no constant. Of
    all else 16 bytes.
    """
    dtypes = {str(region.source.dtype) for region in [*block.reads, *block.writes]}
    tvm_ffi.structural_walk(block.body, (tirx.Cast, lambda cast: dtypes.add(str(cast.ty.dtype))))
    if "bool" in dtypes:
        return 1
    if any(dtype.startswith("float8") for dtype in dtypes):
        just_moved = isinstance(block.body, tirx.BufferStore) and isinstance(block.body.value, ir.TensorLoad)
        return VECTOR_BYTES if just_moved else FOUR
    narrow = {dtype for dtype in dtypes if "int" in dtype and dtype_bytes(dtype) < 4}
    repeated: list[bool] = []
    last = block.iter_vars[-1].var

    def note_load(load: ir.TensorLoad) -> None:
        used: list[bool] = []
        tvm_ffi.structural_walk(load, (tirx.Var, lambda var: used.append(var.same_as(last))))
        repeated.append(str(load.source.dtype) in narrow and not any(used))

    def note_number(number: tirx.IntImm) -> None:
        repeated.append(str(number.ty.dtype) in narrow)

    tvm_ffi.structural_walk(block.body, [(ir.TensorLoad, note_load), (tirx.IntImm, note_number)])
    if any(_is_byte_for_all_lanes(side, last) for side in _sides(block.body)):
        return TWO
    return FOUR if any(repeated) else VECTOR_BYTES


def _sides(body: tirx.Stmt) -> list[ir.Expr]:
    """List what vectors of a block's body may be made of: what it stores, and what it computes with."""
    found: list[ir.Expr] = []

    def note(node: ir.Expr) -> None:
        if isinstance(node, ir.Call):
            found.extend(node.args)
        elif isinstance(node, tirx.Select):
            found.extend([node.true_value, node.false_value])
        elif hasattr(node, "a") and hasattr(node, "b"):
            found.extend([node.a, node.b])

    tvm_ffi.structural_walk(body, [(ir.Expr, note), (tirx.BufferStore, lambda store: found.append(store.value))])
    return found


def _is_byte_for_all_lanes(value: ir.Expr, lane: tirx.Var) -> bool:
    """Return whether an expression is a whole number of one byte, no constant, that does not depend on the lane."""
    if re.fullmatch(r"u?int8", str(getattr(value.ty, "dtype", ""))) is None or isinstance(value, tirx.IntImm):
        return False
    used: list[bool] = []
    tvm_ffi.structural_walk(value, (tirx.Var, lambda var: used.append(var.same_as(lane))))
    return not any(used)


def _walks_last_iterator(sch: Schedule, innermost: LoopRV) -> bool:
    """Return whether the innermost loop steps through its block's last iterator, which indexes the last dimensions."""
    loop, found = sch.get(innermost), []
    binding = loop.body.iter_values[-1]
    tvm_ffi.structural_walk(binding, (tirx.Var, lambda var: found.append(var.same_as(loop.loop_var))))
    return any(found)


def _begins_rows_aligned(buffer: tirx.Var, width: int) -> bool:
    """Prove that strides and offset of a buffer that has its own are multiples of ``width``, elements side by side."""
    strides = list(buffer.strides)
    side_by_side = not strides or is_one(strides[-1])
    return side_by_side and all(is_multiple(number, width) for number in (*strides[:-1], buffer.elem_offset))


def _is_contiguous(region: ir.TensorRegion, variable: tirx.Var, width: int) -> bool:
    """Prove that ``width`` values of ``variable``, from a multiple of it on, index that many elements from one on."""
    group = tirx.Var("group", "int32")
    analyzer = sym.Analyzer()

    def index_at(lane: int, index: tirx.PrimExpr) -> tirx.PrimExpr:
        value = group * width + lane
        found = tvm_ffi.structural_map(index, (tirx.Var, lambda var: value if var.same_as(variable) else var))
        return without_carries(found, analyzer)

    if not all(is_one(dimension.extent) for dimension in region.region) or not _begins_rows_aligned(
        region.source, width
    ):
        return False
    indices = [dimension.min for dimension in region.region]
    if not is_multiple(index_at(0, indices[-1]), width):
        return False
    for lane in range(1, width):
        steps = [analyzer.simplify(index_at(lane, index) - index_at(0, index)) for index in indices]
        if not all(isinstance(step, tirx.IntImm) for step in steps):
            return False
        if any(int(step) for step in steps[:-1]) or int(steps[-1]) != lane:
            return False
    return True
