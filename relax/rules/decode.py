"""Products of few rows, as decoding a token makes them: the weights stream past once (:func:`recipes.stream_weights`).

``m <= 8`` rows against weights, stored along the reduction or along the columns, of 16-bit floats, float32, or packed
to int8 and int4 with scales; and the same turned round, a matrix with at most 8 columns on its right. For rows known at
run time only, :func:`lowered_for_few_rows` is the lowest range of
:func:`relax.rules.ranges.by_extent`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.s_tir.schedule import ScheduleError
from tvm.target import Target

from tensorir_ladder.relax.rules.normal_form import Product, product_of
from tensorir_ladder.relax.rules.ranges import by_extent, unless_empty, written_extents
from tensorir_ladder.relax.rules.rule import NotTaken, Rule
from tensorir_ladder.relax.rules.unpacking import unpacked_in_float32
from tensorir_ladder.schedules.inspection import is_constant
from tensorir_ladder.schedules.isa import LINE_BYTES, SECTOR_BYTES, WARP
from tensorir_ladder.schedules.loops.residency import least_blocks
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.recipes.streamed_weights import Load, WeightsTile, operand_loads, stream_weights

MOST_ROWS = 8
DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32")
ROWS_OF_BODIES = (1, 2, 4, 8)  # of the bodies for rows that are known at run time only

# What the order of tiles is made of; a tile changes no result. Of a large GPU, with memory of 4.3 TB/s:
MULTIPROCESSORS = 132
NEEDED_BYTES = 6 << 20  # on their way, to hide the latency of its memory
SHARED_PER_WEIGHT = 0.15  # time of a byte through shared memory, in that of a byte of weights
MOST_THREADS = 1024
MOST_LOADS = 8  # vectors of weights that a thread asks for together
MOST_REGISTERS = 104  # of weights, rows and sums of a thread
OTHER_REGISTERS = 24
MOST_SHARED_BYTES = 40 * 1024
UNKNOWN = 1024  # what an extent that is known at run time only counts as


class Decode(Rule):
    """Takes products of at most :data:`MOST_ROWS` rows, or columns, and streams the other operand.

    Rows known at run time only are left to :class:`Contraction`, which has bodies for all ranges of them.
    """

    name = "decode"

    def schedule(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return the function lowered; NotTaken for products of more rows, and for what is no product."""
        return _lowered(product_of(func), target, MOST_ROWS)


def lowered_for_few_rows(func: tirx.PrimFunc, target: Target, most_rows: int = MOST_ROWS) -> tirx.PrimFunc:
    """Lower a product of at most ``most_rows`` rows, known at run time only or before.

    Where they are known at run time only, the function has bodies for 1, 2, 4, ... rows, of which the last takes any
    number, if slowly.

    Raises
    ------
    NotTaken : for more rows, for what is no product, for weights whose vectors run along neither extent.
    """
    product = product_of(func)
    few, _ = _roles(product, most_rows, unknown=True)
    if is_constant(_extent(product, few)):
        return _lowered(product, target, most_rows)
    bodies = [rows for rows in ROWS_OF_BODIES if rows < most_rows] + [most_rows]
    lowered = [_lowered(product_of(func), target, most_rows, rows) for rows in bodies]
    return by_extent(list(zip([*bodies[:-1], None], lowered)))


@dataclass(frozen=True)
class _Shape:
    """Hold what tiles are chosen by: extents, and how the operands' largest buffers are loaded."""

    rows: int
    columns: int
    batch: int
    reduction: int
    weights: Load
    row_width: int
    row_bytes: int
    computed: bool

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights of one step of the reduction."""
        return dtype_bytes(self.weights.buffer.dtype) / self.weights.packed

    def vector_bytes(self, tile: WeightsTile) -> int:
        """Bytes of a tile's vectors of weights, as they are stored."""
        elements = self.weights.width if tile.along == "reduction" else tile.columns
        return elements * dtype_bytes(self.weights.buffer.dtype)


def _lowered(product: Product, target: Target, most_rows: int, rows: int | None = None) -> tirx.PrimFunc:
    """Schedule a product in its normal form, and lower it; ``rows`` of a body where run time has their number."""
    few, weights = _roles(product, most_rows, unknown=rows is not None)
    product = unpacked_in_float32(product, weights)
    shape = _shape(product, few, weights, rows)
    registers = int(target.attrs.get("registers_per_block", 65536))
    tile = min(_tiles(shape, registers), key=lambda tile: _cost(tile, shape), default=None)
    if tile is None:
        raise NotTaken("no tile streams these weights", value=shape.weights, remedy="leave it to the next rule")
    sch = product.sch
    results = written_extents(sch.mod[sch.func_working_on])
    try:
        stream_weights(sch, product.block, tile, weights)
    except ScheduleError as error:
        raise NotTaken("TVM cannot schedule the product so", remedy="leave it to the next rule") from error
    resident = _resident(tile, shape, registers)
    return unless_empty(_bounded(lower_ahead(sch.mod[sch.func_working_on], target), resident), results)


def _resident(tile: WeightsTile, shape: _Shape, registers: int) -> int:
    """Return how many blocks a multiprocessor should hold: as many as there are for it, and as registers allow."""
    most = registers // ((_registers(tile, shape) + OTHER_REGISTERS) * tile.threads)
    return max(1, min(-(-_blocks(tile, shape) // MULTIPROCESSORS), most))


def _bounded(function: tirx.PrimFunc, resident: int) -> tirx.PrimFunc:
    """Say how many blocks a multiprocessor holds: for more than there are, CUDA's assembler would save registers.

    It then loads vectors one by one, and few are on their way.
    """

    def bounded(stmt: tirx.AttrStmt) -> tirx.Stmt:
        if stmt.attr_key != "thread_extent" or str(stmt.node.thread_tag) != "blockIdx.x":
            return stmt
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, least_blocks(resident, stmt.body))

    return tvm_ffi.structural_map(function, (tirx.AttrStmt, bounded))


def _roles(product: Product, most_rows: int, unknown: bool) -> tuple[str, int]:
    """Return which extent is the few rows, and which operand the weights; NotTaken where neither extent is small."""
    candidates = (("rows", 1), ("columns", 0))
    for role, weights in candidates:
        extent = _extent(product, role)
        if is_constant(extent) and int(extent) <= most_rows:
            return role, weights
    for role, weights in candidates:
        if unknown and not is_constant(_extent(product, role)):
            return role, weights
    raise NotTaken(
        "weights are streamed for few rows",
        value=f"{_extent(product, 'rows')} rows, {_extent(product, 'columns')} columns",
        limit=most_rows,
        remedy="leave it to the rule for contractions",
    )


def _extent(product: Product, role: str) -> tirx.PrimExpr:
    return product.sch.get(getattr(product, role)).extent


def _number(extent: tirx.PrimExpr) -> int:
    return int(extent) if is_constant(extent) else UNKNOWN


def _shape(product: Product, few: str, weights: int, rows: int | None) -> _Shape:
    """Read what tiles are chosen by."""
    sch = product.sch
    if len(sch.get(product.block).reads) != 2:
        raise NotTaken("a matrix is multiplied with itself", remedy="leave it to the rule for contractions")
    loads = [operand_loads(sch, product.block, operand) for operand in (0, 1)]
    for load in (load for operand in loads for load in operand):
        if str(load.buffer.dtype) not in DTYPES:
            raise NotTaken("a dtype that is not streamed", value=load.buffer.dtype, limit=DTYPES, remedy="cast it")
    if not all(loads) or not loads[weights][0].along:
        raise NotTaken(
            "the weights' vectors run along neither extent of the product",
            value=[load.buffer.name for load in loads[weights]],
            remedy="leave it to the rule for contractions",
        )
    others = [load for load in loads[1 - weights] if load.along == "reduction"]
    return _Shape(
        rows=rows or int(_extent(product, few)),
        columns=_number(_extent(product, "columns" if few == "rows" else "rows")),
        batch=math.prod(_number(sch.get(loop).extent) for loop in product.batch),
        reduction=_number(_extent(product, "reduction")),
        weights=loads[weights][0],
        row_width=max((load.width for load in others), default=1),
        row_bytes=max((dtype_bytes(load.buffer.dtype) for load in others), default=4),
        computed=len(loads[weights]) > 1 or loads[weights][0].packed > 1,
    )


def _tiles(shape: _Shape, registers: int) -> Iterator[WeightsTile]:
    """List tiles that a thread block with so many registers in all can hold."""
    along_k = shape.weights.along == "reduction"
    powers = [1 << power for power in range(11)]
    own_columns = (
        (1, 2, 4) if along_k else [w for w in powers if not shape.weights.width % w and w * 4 >= shape.weights.width]
    )
    vectors = -(-shape.reduction // (shape.weights.width * shape.weights.packed)) if along_k else 1
    fitting = [part for part in range(8, 257, 8) if vectors % part == 0 and part not in powers]
    for reduction_threads, column_threads in itertools.product((*powers, *fitting), powers):
        threads = reduction_threads * column_threads
        if threads > MOST_THREADS or threads % WARP:
            continue
        for loads, columns in itertools.product(range(1, MOST_LOADS + 1), own_columns):
            if along_k and loads % columns:
                continue
            tile = _tile(shape, loads, columns, column_threads, reduction_threads)
            used = _registers(tile, shape)
            fits = used <= MOST_REGISTERS and (used + OTHER_REGISTERS) * threads <= registers
            if fits and tile.shares_out and tile.shared_bytes <= MOST_SHARED_BYTES:
                yield tile


def _tile(shape: _Shape, loads: int, columns: int, column_threads: int, reduction_threads: int) -> WeightsTile:
    width, packed = shape.weights.width, shape.weights.packed
    if shape.weights.along != "reduction":  # the result's columns, or its rows where these are the many
        return WeightsTile(
            shape.rows, columns, 1, (1, loads, packed), column_threads, reduction_threads, along="columns"
        )
    stored = math.gcd(width, max(1, shape.row_width // packed))  # elements as stored, for one vector of the rows
    unit = (width // stored, stored, packed)
    return WeightsTile(shape.rows, columns, loads // columns, unit, column_threads, reduction_threads)


def _registers(tile: WeightsTile, shape: _Shape) -> int:
    """Estimate a thread's registers: weights on their way, rows (of two steps, if weights are unpacked), sums."""
    weights = _loads(tile) * max(1, shape.vector_bytes(tile) // 4)
    if shape.computed and _is_ragged(tile, shape):
        weights *= 4  # loaded element by element
    step = math.prod(tile.unit[1:])
    rows = -(-tile.rows * step * shape.row_bytes // 4)
    return weights + tile.rows * tile.columns + (2 * rows + step if shape.computed else rows)


def _loads(tile: WeightsTile) -> int:
    """Return the vectors of weights that a thread asks for together."""
    return tile.columns * tile.steps if tile.along == "reduction" else tile.unit[1]


def _is_ragged(tile: WeightsTile, shape: _Shape) -> bool:
    return bool(shape.columns % tile.block_columns or shape.reduction % tile.block_k)


def _blocks(tile: WeightsTile, shape: _Shape) -> int:
    return shape.batch * -(-shape.columns // tile.block_columns)


def _cost(tile: WeightsTile, shape: _Shape) -> float:
    """Put tiles into order by the time that they would take, in that of a byte of weights::

    bytes loaded, ragged ends counted in, each dearer where too few are on their way, or side by side, or
    where many rows are read for few columns  +  sums through shared memory
    """
    blocks = _blocks(tile, shape)
    iterations = -(-shape.reduction // tile.block_k)
    threads = blocks * tile.threads
    real = shape.batch * shape.columns * shape.reduction * shape.weight_bytes
    loaded = blocks * tile.block_columns * iterations * tile.block_k * shape.weight_bytes
    on_their_way = threads * _loads(tile) * shape.vector_bytes(tile)
    missing = min(NEEDED_BYTES, real) / on_their_way
    idle = max(1.0, MULTIPROCESSORS / blocks) ** 0.5
    beside = tile.reduction_threads if tile.along == "reduction" else tile.column_threads
    run = beside * shape.vector_bytes(tile)
    short = (1 + 0.05 * max(0.0, math.log2(LINE_BYTES / run))) * max(1.0, SECTOR_BYTES / run)
    again = 4 if shape.computed and _is_ragged(tile, shape) else 1
    rows = 1 + 0.06 * shape.rows * (1 if tile.along == "columns" else 2 / tile.columns)
    small = 1 + 0.02 * abs(math.log2(tile.threads / 256))
    sums = 2 * 4 * threads * tile.rows * tile.columns * SHARED_PER_WEIGHT
    return loaded * max(1.0, missing) * (1 + 0.02 * missing) * idle * short * again * rows * small + sums
