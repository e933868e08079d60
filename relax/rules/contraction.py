"""A rule for products of two operands: the ladder's last schedules, chosen by dtype, target and shape.

A function is brought to its normal form, one product in the loops ``[*batch, rows, columns, reduction]``, and scheduled
by the first *engine* that takes it:

=========  ==================================================  =====================================================
engine     the ladder's                                        takes
=========  ==================================================  =====================================================
wgmma      step 10: warpgroups, a ring filled first            16-bit operands on sm_90a, the first stored by rows
mma        step 9: warps, a ring filled by cp.async            16-bit operands on sm_80 and newer
warps      step 7: ordinary cores, by warps                    float32 with cp.async
threads    step 6: ordinary cores, by threads                  all else
=========  ==================================================  =====================================================

Operands that are computed on their way to shared memory (weights that are unpacked, casts) are no copies that cp.async
could make. With many rows a kernel in front computes them once ("kept"); with few, mma and threads have a form in which
each tile is stored before it is used.

Where only run time knows the number of rows there is a body for each range of it (:data:`RANGES`), with the tile that
should be fastest for its most rows; neighbours share one that is hardly slower for both, and up to 8 rows are for the
kernels of :mod:`relax.rules.decode`. Few rows make few tiles: a long reduction is then cut in parts, which another
kernel adds up (:func:`schedules.recipes.split_reduction`). What a tile costs is for :mod:`schedules.cost` to say.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import tvm_ffi
from tvm import sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError
from tvm.target import Target

from tensorir_ladder.relax.rules.computations import same_number
from tensorir_ladder.relax.rules.decode import MOST_ROWS, lowered_for_few_rows
from tensorir_ladder.relax.rules.few_channels import with_wide_pixels
from tensorir_ladder.relax.rules.normal_form import Product, narrowed, product_of
from tensorir_ladder.relax.rules.ranges import (
    by_extent,
    by_multiple,
    in_multiples,
    symbolic_extents,
    unless_empty,
    written_extents,
)
from tensorir_ladder.relax.rules.rule import HOW, NotTaken, Rule
from tensorir_ladder.schedules.cost import Machine, assumed_machine, block_tile_cost, contraction_cycles
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import (
    computed_operands,
    innermost_iterator,
    is_constant,
    loop_extent,
    operand_regions,
)
from tensorir_ladder.schedules.isa import MMA_ARCH, PANEL, PTX_TYPES
from tensorir_ladder.schedules.loops.last_tile import end_within_tile
from tensorir_ladder.schedules.loops.tiling import K_TILES
from tensorir_ladder.schedules.loops.unrolling import unroll_loop
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.memory.alignment import compute_operand
from tensorir_ladder.schedules.memory.staging import longest_rounds
from tensorir_ladder.schedules.pipeline.first_fill import fill_before_waiting
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.pipeline.pipelining import pipeline_loop, pipeline_reads
from tensorir_ladder.schedules.pipeline.zero_fill import fill_with_zeros
from tensorir_ladder.schedules.recipes.contraction import stage_contraction
from tensorir_ladder.schedules.recipes.split_reduction import add_parts, split_reduction
from tensorir_ladder.schedules.recipes.warp_tiling import stage_for_warps
from tensorir_ladder.schedules.tensor_cores.mma import tensorize_contraction, use_instruction
from tensorir_ladder.schedules.tensor_cores.warpgroup import (
    keep_rows_apart,
    multiply_by_wgmma,
    pipeline_warpgroups,
    stage_for_warpgroups,
)
from tensorir_ladder.schedules.tiles import BlockTile, Choice, TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS, Matmul

LOG = logging.getLogger(__name__)
RANGES = (16, 64, 128, 512, None)  # most rows of each body, where only run time knows their number
RANGES_OF_BATCH = (128, None)
MANY = 2048  # what such an extent is taken for where tiles are chosen for more than the last range has
FEWEST = 16  # of rows, columns and steps, two have so many where a tile is worth it
SELDOM = 64  # and where such an extent is no multiple of 8
MOST_EXPANDED = 4  # bytes of a computed operand that is kept, to one that it is computed from: 16 bits of 4
WHOLE = 8  # elements of a vector of 16 bits each
HARDLY_SLOWER = 1.03  # so much is not worth a body of its own
PARTS = (1, 2, 3, 4, 6, 7, 8, 12, 14, 16)
SHORTEST_PART = 8  # k tiles


@dataclass(frozen=True)
class Shape:
    """Hold what engines and their costs need of a product; extents are None where only run time knows them.

    ``dtype`` is both operands', or "" where they differ; ``a_by_k`` and ``b_by_k`` say that the last dimension of the
    first or the second operand is the reduction's. ``computed`` are the operands that are computed before the product,
    and not just moved; ``kept`` those of them that may be kept: of known extents, and not much more than their source.
    ``result_bytes`` are moved for each result: its own, and those of elements that the epilogue reads for it alone.
    """

    batch: int | None
    rows: int | None
    columns: int | None
    reduction: int | None
    dtype: str
    a_by_k: bool
    b_by_k: bool
    computed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    result_bytes: int = 2

    @classmethod
    def of(cls, product: Product) -> Shape:
        """Read a product's shape."""
        sch, block = product.sch, product.block
        operands = [str(region.source.dtype) for region in operand_regions(sch, block)]
        last = len(sch.get(block).iter_vars) - 1
        computed = tuple(computed_operands(sch, block))
        return cls(
            batch=_known(sch, *product.batch),
            rows=_known(sch, product.rows),
            columns=_known(sch, product.columns),
            reduction=_known(sch, product.reduction),
            dtype=operands[0] if len(set(operands)) == 1 else "",
            a_by_k=innermost_iterator(sch, block, 0) == last,
            b_by_k=innermost_iterator(sch, block, 1) == last,
            computed=computed,
            kept=tuple(operand for operand in computed if _worth_keeping(sch, block, operand)),
            result_bytes=_result_bytes(sch, block),
        )

    def sizes(self, rows: int) -> tuple[int, int, int]:
        """Return m, n and k, those that are not known taken for ``rows``."""
        m, n, k = (rows if size is None else size for size in (self.rows, self.columns, self.reduction))
        return m, n, k


@dataclass(frozen=True)
class ContractionPlan:
    """Say how a product is scheduled: by which engine, with which tile and stages, its reduction in how many parts."""

    engine: Engine
    choice: Choice
    parts: int = 1

    def __str__(self) -> str:
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        return f"{self.engine.name} {self.choice.tile}, {self.choice.stages} stages{parts}"


Obstacle = Callable[[Shape, Machine], str]
Build = Callable[[Schedule, SBlockRV, Shape, ContractionPlan], None]


@dataclass(frozen=True)
class Engine:
    """One way to compute a product.

    ``obstacle(shape, machine)`` says why it does not take a shape, "" where it does. ``choices(shape)`` are its tiles;
    ``cost(choice, sizes, shape, machine, parts)`` orders them. ``build(sch, block, shape, plan)`` schedules, and raises
    IllegalSchedule for what it cannot. ``splits``: reductions may be cut in parts. ``rings``: its k loop is a pipeline,
    which takes two k tiles. ``fewest_rows``: it is no use for fewer.
    """

    name: str
    obstacle: Obstacle
    choices: Callable[[Shape], tuple[Choice, ...]]
    cost: Callable[[Choice, tuple[int, int, int], Shape, Machine, int], float]
    build: Build
    splits: bool = False
    rings: bool = False
    fewest_rows: int = 1

    def plan(self, shape: Shape, rows: int, machine: Machine) -> ContractionPlan | None:
        """Return what should be fastest for a product, unknown extents taken for ``rows``; None where no tile fits."""
        itemsize, sizes = dtype_bytes(shape.dtype or "float32"), shape.sizes(rows)
        if sizes[0] < self.fewest_rows:
            return None
        legal = [
            choice
            for choice in self._measured(shape, machine) or self.choices(shape)
            if not choice.tile.violations(machine.target, itemsize, choice.stages)
            and not (self.rings and sizes[2] <= choice.tile.block_k)
        ]
        plans = [ContractionPlan(self, choice, parts) for choice in legal for parts in self._parts(shape, choice)]
        return min(plans, key=lambda plan: self.cost(plan.choice, sizes, shape, machine, plan.parts), default=None)

    def _measured(self, shape: Shape, machine: Machine) -> list[Choice]:
        """List what was measured for one plain product of these extents with this engine's tiles, none or one."""
        extents = shape.rows, shape.columns, shape.reduction
        found = machine.measured_choices(extents, "nt" if shape.b_by_k else "nn", shape.dtype)
        if not found or shape.batch != 1 or not shape.a_by_k or shape.computed:
            return []
        family = type(self.choices(shape)[0].tile)
        return [choice for choice in found if type(choice.tile) is family]

    def _parts(self, shape: Shape, choice: Choice) -> list[int]:
        """List the numbers of parts that a reduction can be cut in, all of the same whole k tiles."""
        if not self.splits or shape.batch != 1 or shape.reduction is None or shape.columns is None:
            return [1]
        k_tiles, rest = divmod(shape.reduction, choice.tile.block_k)
        return [p for p in PARTS if p == 1 or not (rest or k_tiles % p or k_tiles // p < SHORTEST_PART)]


@dataclass(frozen=True)
class Body:
    """A function lowered for at most so many steps of its symbolic extent, None for any, and how, for people."""

    most: int | None
    lowered: tirx.PrimFunc
    how: str

    def __str__(self) -> str:
        return self.how if self.most is None else f"up to {self.most}: {self.how}"


class Contraction(Rule):
    """Takes any function around one sum of products, by tensor cores where the target has some for its dtype.

    ``machine`` is the GPU that tiles are chosen for; without one, what the target's architecture suggests
    (:func:`schedules.cost.assumed_machine`). Results do not depend on it. Not taken: vectors, products of fewer than
    16 in two of rows, columns and steps.
    """

    name = "contraction"

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine

    def schedule(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return the function lowered, with a body for each range of rows where these are symbolic.

        Rows of an operand or of the result whose length is symbolic are whole vectors where that is a multiple of 8: a
        body of its own for these. Convolutions of pixels with few channels are those of a copied image
        (:func:`relax.rules.few_channels.with_wide_pixels`).
        """
        func = narrowed(func)
        try:
            wide = with_wide_pixels(func, self._machine_of(target), target)
        except NotTaken as reason:
            LOG.debug("no image of wide pixels: %s", reason)
        else:
            made = wide.joined(self.schedule(wide.function, target))
            return made.with_attr(HOW, f"{made.attrs[HOW]}, of an image copied to whole vectors")
        ragged = _row_length(func)
        bodies = self.bodies(in_multiples(func, ragged, WHOLE) if ragged is not None else func, target)
        joined = by_extent([(body.most, body.lowered) for body in bodies]) if len(bodies) > 1 else bodies[0].lowered
        how = "; ".join(map(str, bodies))
        if ragged is not None:
            joined = by_multiple(joined, self.any_extent(func, target).lowered, ragged.name, WHOLE)
        return joined.with_attr(HOW, how)

    def bodies(self, func: tirx.PrimFunc, target: Target, most_rows: int | None = None) -> list[Body]:
        """Return the lowered forms of a function, by rising extent; those for at most so many rows where that is given.

        Raises
        ------
        NotTaken : for no product, or one that no engine takes; for a target that is not the machine's.
        """
        product = product_of(func)
        shape = Shape.of(product)
        planned = self.plans(product, target, most_rows)
        few = _few_rows(func, target, each) if (each := _rows_of_each(product, shape)) else []
        return [*few, *(first_lowered(func, shape, most, plans, target) for most, plans in planned)]

    def plans(
        self, product: Product, target: Target, most_rows: int | None = None
    ) -> list[tuple[int | None, list[ContractionPlan]]]:
        """Return the plans of the engines that take a product, the first engine's first, for each range of its rows.

        A range is the most that the symbolic extent may be, None for any; ``most_rows`` leaves out those of more rows.
        Raises NotTaken as :meth:`bodies`.
        """
        shape, machine = Shape.of(product), self._machine_of(target)
        _check_worthwhile(shape)
        each = _rows_of_each(product, shape)
        planned: list[tuple[int | None, int, list[ContractionPlan]]] = []
        for most, rows in _ranges(each, shape) if each else [(None, shape.rows or MANY)]:
            if most_rows is not None and rows > most_rows:
                break
            plans = plans_of(shape, rows, machine)
            while planned and _serves(plans, planned[-1][2], shape, planned[-1][1], machine):
                planned.pop()
            planned.append((most, rows, plans))
        return [(most, plans) for most, _, plans in planned]

    def any_extent(self, func: tirx.PrimFunc, target: Target) -> Body:
        """Return the one form of a function for all its extents, made for those that are seldom met: of small tiles."""
        shape = Shape.of(product_of(func))
        return first_lowered(func, shape, None, plans_of(shape, SELDOM, self._machine_of(target)), target)

    def _machine_of(self, target: Target) -> Machine:
        """Return the machine to choose for; NotTaken for a target that is not the machine's."""
        if self.machine is None:
            return assumed_machine(target)
        wanted, own = (str(one.attrs.get("arch", "")) for one in (target, self.machine.target))
        if wanted != own:
            raise NotTaken(
                "the target is not the machine's", value=wanted, limit=own, remedy="describe the target's GPU"
            )
        return self.machine


def plans_of(shape: Shape, rows: int, machine: Machine) -> list[ContractionPlan]:
    """Return the plan of each engine that takes a shape, the fastest engine's first."""
    able = [engine for engine in ENGINES if not engine.obstacle(shape, machine)]
    return [plan for engine in able if (plan := engine.plan(shape, rows, machine))]


def _serves(
    plans: list[ContractionPlan], fewer: list[ContractionPlan], shape: Shape, rows: int, machine: Machine
) -> bool:
    """Return whether the first of ``plans`` is hardly slower for ``rows`` than that of ``fewer``, made for them."""
    if not plans or not fewer or plans[0].engine != fewer[0].engine:
        return False
    if plans[0].choice.tile.block_m > max(rows, fewer[0].choice.tile.block_m):
        return False  # the cost does not count what it takes to fill up rows with zeros
    here, there = (
        plan.engine.cost(plan.choice, shape.sizes(rows), shape, machine, plan.parts) for plan in (plans[0], fewer[0])
    )
    return here <= HARDLY_SLOWER * there


def _few_rows(func: tirx.PrimFunc, target: Target, each: int) -> list[Body]:
    """Return the body for so few rows that the other operand streams past, none where there is no such form."""
    most = MOST_ROWS // each
    try:
        return [Body(most, lowered_for_few_rows(func, target), "decode")] if most else []
    except IllegalSchedule as reason:
        LOG.debug("no body for few rows: %s", reason)
        return []


def first_lowered(
    func: tirx.PrimFunc, shape: Shape, most: int | None, plans: Sequence[ContractionPlan], target: Target
) -> Body:
    """Lower a function by the first plan that can schedule it; NotTaken with all reasons where none can."""
    reasons = []
    for plan in plans:
        try:
            return Body(most, _lowered(product_of(func), shape, plan, target), str(plan))
        except (ValueError, ScheduleError) as reason:  # TVM's, too, of bounds that do not fit into 32 bits
            LOG.debug("%s cannot schedule the product: %s", plan, reason)
            reasons.append(f"{plan}: {reason}")
    raise NotTaken("no engine takes the product", value="; ".join(reasons), remedy="leave it to another rule")


def _lowered(product: Product, shape: Shape, plan: ContractionPlan, target: Target) -> tirx.PrimFunc:
    """Schedule a product by a plan, and lower it ahead."""
    sch, block = product.sch, product.block
    if plan.parts > 1:
        split = split_reduction(sch, block, plan.parts, plan.choice.tile.block_k)
        add_parts(sch, split)
        block = split.partial
    function = sch.mod[sch.func_working_on]
    plan.engine.build(sch, block, shape, plan)
    return unless_empty(lower_ahead(sch.mod[sch.func_working_on], target), written_extents(function))


def _check_worthwhile(shape: Shape) -> None:
    """Raise NotTaken for vectors, and for products that leave most of any tile empty."""
    sizes = {"rows": shape.rows, "columns": shape.columns, "steps": shape.reduction}
    if 1 in (shape.rows, shape.columns):
        raise NotTaken("a product with one row or column streams a matrix", remedy="leave it to a rule for few rows")
    small = [f"{size} {role}" for role, size in sizes.items() if size is not None and size < FEWEST]
    if len(small) > 1:
        raise NotTaken(
            "the product leaves most of any tile empty",
            value=" and ".join(small),
            limit=f"{FEWEST} or more in two of rows, columns and steps",
            remedy="leave it to another rule",
        )


def _ranges(each: int, shape: Shape) -> list[tuple[int | None, int]]:
    """List the most that a symbolic extent may be for each body, None for any, and the rows that it is made for.

    There are ``each`` rows to a step of the extent. Batches fill a GPU with fewer rows.
    """
    ranges = RANGES if shape.batch == 1 else RANGES_OF_BATCH
    return [(most and most // each, most or MANY) for most in ranges if most is None or most >= each]


def _row_length(func: tirx.PrimFunc) -> tirx.Var | None:
    """Return the symbolic extent by which rows of a 16-bit parameter are that long, None where there is no one such.

    None, too, where an extent is computed from others: TVM gives no values to such.
    """
    extents = [extent for parameter in func.params for extent in getattr(parameter, "shape", ())]
    if not all(is_constant(extent) or isinstance(extent, tirx.Var) for extent in extents):
        return None
    found: list[tirx.Var] = []
    for parameter in func.params:
        if hasattr(parameter.ty, "shape") and len(parameter.shape) > 1 and dtype_bytes(parameter.dtype) == 2:
            found += [e for e in parameter.shape[-1:] if isinstance(e, tirx.Var) and not any(map(e.same_as, found))]
    return found[0] if len(found) == 1 else None


def _rows_of_each(product: Product, shape: Shape) -> int:
    """Return how many rows there are to each step of the one symbolic extent; 0 without such a one."""
    extents = symbolic_extents(product.sch.mod[product.sch.func_working_on])
    if shape.rows is not None or len(extents) != 1:
        return 0
    return steps_of(product.sch.get(product.rows).extent, extents[0])


def _worth_keeping(sch: Schedule, block: SBlockRV, operand: int) -> bool:
    """Return whether a computed operand has known extents, and at most 4 times the bytes that it is computed from."""
    buffer = operand_regions(sch, block)[operand].source
    producers = [sch.get(p) for p in sch.get_producers(block)]
    read = [r.source for p in producers if p.writes[0].source.same_as(buffer) for r in p.reads]
    if not all(is_constant(extent) for one in (buffer, *read) for extent in one.shape):
        return False
    size, *sources = (math.prod(map(int, one.shape)) * dtype_bytes(one.dtype) for one in (buffer, *read))
    return size <= MOST_EXPANDED * sum(sources)


def _result_bytes(sch: Schedule, block: SBlockRV) -> int:
    """Return how many bytes are moved for each result: it is written, and what the epilogue reads of its shape read."""
    product = sch.get(block)
    epilogue = [sch.get(consumer) for consumer in sch.get_consumers(block)]
    written = next(each.writes[0].source for each in (*epilogue, product))
    read = [region.source for each in epilogue for region in each.reads]
    beside = [buffer for buffer in read if not buffer.same_as(product.writes[0].source)]
    beside = [b for b in beside if len(b.shape) == len(written.shape) and all(map(same_number, b.shape, written.shape))]
    return sum(dtype_bytes(buffer.dtype) for buffer in (written, *beside))


def steps_of(rows: tirx.Expr, extent: tirx.Var) -> int:
    """Return how many rows there are to each step of a symbolic extent, 0 where they are no multiple of it."""
    analyzer = sym.Analyzer()
    once = analyzer.simplify(tvm_ffi.structural_map(rows, (tirx.Var, lambda var: tirx.IntImm(str(var.ty.dtype), 1))))
    each = int(once) if is_constant(once) else 0
    return each if analyzer.can_prove_equal(rows, extent * each) else 0


def _known(sch: Schedule, *loops: LoopRV) -> int | None:
    """Return the product of loops' extents, None where one is known at run time only."""
    found = 1
    for loop in loops:
        extent = sch.get(loop).extent
        if not is_constant(extent):
            return None
        found *= int(extent)
    return found


def _of_copies(obstacle: Obstacle) -> Obstacle:
    """Return what says no to operands that are computed on their way, beside what ``obstacle`` says no to."""
    return lambda shape, machine: (
        obstacle(shape, machine) or ("an operand is computed on its way" if shape.computed else "")
    )


def _of_kept(obstacle: Obstacle) -> Obstacle:
    """Return what says no unless all operands that are computed may be kept, beside what ``obstacle`` says no to."""
    return lambda shape, machine: (
        obstacle(shape, machine)
        or ("" if shape.computed and shape.computed == shape.kept else "no operand for a kernel in front to compute")
    )


def _keeping(build: Build) -> Build:
    """Return what has a kernel in front compute operands that are no plain copies, before it builds."""

    def build_behind(sch: Schedule, block: SBlockRV, shape: Shape, plan: ContractionPlan) -> None:
        for operand in shape.computed:
            compute_operand(sch, block, operand)
        build(sch, block, shape, plan)

    return build_behind


# wgmma


def _no_wgmma(shape: Shape, machine: Machine) -> str:
    if lacking := WarpgroupTile.missing(machine.target):
        return lacking
    if shape.dtype not in PTX_TYPES:
        return f"operands of {shape.dtype or 'two dtypes'}"
    return "" if shape.a_by_k else "the first operand is not stored by rows"


def _warpgroup_choices(shape: Shape) -> tuple[Choice, ...]:
    """List tiles of one warpgroup for few rows, of two for many; narrow ones with k tiles of twice the depth, too."""
    widths = [width for width in WIDTHS if shape.b_by_k or width % PANEL == 0]
    tiles = [WarpgroupTile(block=(rows, n, 64), warpgroups=(rows // 64, 1)) for rows in (64, 128) for n in widths]
    tiles += [WarpgroupTile(block=(64, n, 128), warpgroups=(1, 1)) for n in widths if n <= NARROW]
    tiles.append(WarpgroupTile(block=(256, 128, 64), warpgroups=(2, 1)))
    return tuple(Choice(t, stages) for t in tiles for stages in (3, 4, 6, 8) if stages > 3 or t.block_n <= SQUARE)


FEWEST_FOR_KEPT = 128  # rows with which it pays to write a computed operand down
SQUARE = 128  # columns up to which blocks with rings of three stages share a multiprocessor
NARROW = 112  # columns of a tile of which a k tile of 64 steps keeps little on its way
WIDTHS = (32, 48, 64, 96, 112, 128, 160, 192, 224, 256)


def _by_warpgroups(sch: Schedule, block: SBlockRV, shape: Shape, plan: ContractionPlan) -> None:
    tile, stages = cast(WarpgroupTile, plan.choice.tile), plan.choice.stages
    # Of a product smaller than a tile, TVM keeps rows that leave the operands behind them unaligned for wgmma.
    whole = shape.columns is not None and shape.columns >= tile.block_n and (shape.rows or tile.block_m) >= tile.block_m
    # Nor can it bound a tile of rows that are the product of two extents known at run time only, or eights of one.
    one = len(symbolic_extents(sch.mod[sch.func_working_on])) <= 1 and not _come_in_eights(sch, block)
    by_rows = whole and plan.parts == 1 and one
    if by_rows:
        keep_rows_apart(sch, block)
    staged = stage_for_warpgroups(sch, block, tile, store_rows=by_rows, k_tiles=_pipelined_together(tile))
    rounds = longest_rounds(sch, staged.copies)
    fill_with_zeros(sch, rounds)
    ring = pipeline_warpgroups(sch, staged.loops.k_outer, stages)
    if ring.stages > 1:
        fill_before_waiting(sch, rounds, ring)
    multiply_by_wgmma(sch, staged.loops, staged.instruction)


def _pipelined_together(tile: BlockTile) -> int:
    """Return how many k tiles of an unknown number are one pipeline: twice as many with tiles for many rows."""
    return 2 * K_TILES if isinstance(tile, WarpgroupTile) and tile.block_m > PANEL else K_TILES


def _come_in_eights(sch: Schedule, block: SBlockRV) -> bool:
    """Tell whether only run time knows how many rows there are, and that is a multiple of 8 whatever it is."""
    *_, rows, _columns, _reduction = sch.get_loops(block)
    extent = sch.get(rows).extent
    return not is_constant(extent) and sym.Analyzer().can_prove_equal(extent % WHOLE, 0)


# mma.sync


def _no_mma(shape: Shape, machine: Machine) -> str:
    arch = re.fullmatch(r"sm_(\d+)[af]?", str(machine.target.attrs.get("arch", "")))
    if not arch or int(arch.group(1)) < MMA_ARCH:
        return f"{machine.target.attrs.get('arch', 'the target')} is older than sm_{MMA_ARCH}"
    return "" if shape.dtype in PTX_TYPES else f"operands of {shape.dtype or 'two dtypes'}"


MMA_TILES = (
    Choice(TensorCoreTile(block=(128, 128, 64), warp=(64, 64)), stages=3),
    Choice(TensorCoreTile(block=(128, 64, 64), warp=(64, 32)), stages=4),
    Choice(TensorCoreTile(block=(64, 128, 64), warp=(32, 64)), stages=4),
    Choice(TensorCoreTile(block=(64, 64, 64), warp=(32, 32)), stages=4),
    Choice(TensorCoreTile(block=(32, 128, 64), warp=(32, 32)), stages=5),
    Choice(TensorCoreTile(block=(32, 64, 64), warp=(16, 32)), stages=6),
    Choice(TensorCoreTile(block=(16, 128, 64), warp=(16, 32)), stages=5),
    Choice(TensorCoreTile(block=(16, 64, 64), warp=(16, 16)), stages=8),
    Choice(TensorCoreTile(block=(16, 32, 128), warp=(16, 16)), stages=8),
)


def _by_warps_of_tensor_cores(sch: Schedule, block: SBlockRV, shape: Shape, plan: ContractionPlan) -> None:
    tile, stages = cast(TensorCoreTile, plan.choice.tile), plan.choice.stages
    scope = tile.shared_scope(dtype_bytes(shape.dtype), stages)
    tensorized = tensorize_contraction(sch, block, tile, scope=scope, hide_reads=True)
    loops = tensorized.loops
    ahead = pipeline_reads(sch, loops.k_step, stages)
    stages = _fitting(sch, loops.k_outer, stages)
    fill_with_zeros(sch, loops.k_outer)
    pipeline_loop(sch, loops.k_outer, stages, True, one_barrier=True, unroll_ring=True, fill_ahead=ahead)
    use_instruction(sch, loops, tensorized.loads, tensorized.instruction)


def _by_warps_of_tensor_cores_stored(sch: Schedule, block: SBlockRV, shape: Shape, plan: ContractionPlan) -> None:
    tile = cast(TensorCoreTile, plan.choice.tile)
    tensorized = tensorize_contraction(sch, block, tile, scope=tile.shared_scope(dtype_bytes(shape.dtype)))
    use_instruction(sch, tensorized.loops, tensorized.loads, tensorized.instruction)


# ordinary cores


def _no_warps(shape: Shape, machine: Machine) -> str:
    if shape.dtype != "float32":
        return f"operands of {shape.dtype or 'two dtypes'}"
    if not machine.has_cp_async:
        return "the target has no cp.async"
    return "" if shape.reduction is not None else "a reduction whose length only run time knows"


WARP_TILES = (
    Choice(WarpTile(block=(128, 128, 16), warp=(32, 128), thread=(8, 16)), stages=3),
    Choice(WarpTile(block=(64, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(32, 64, 32), warp=(32, 64), thread=(8, 8), slices=4), stages=4),
    Choice(WarpTile(block=(32, 64, 64), warp=(32, 64), thread=(8, 8), slices=8), stages=3),
    Choice(WarpTile(block=(16, 32, 64), warp=(16, 32), thread=(4, 4), slices=4), stages=3),
)
# Where the second operand's rows run along k, too, as weights of a linear layer do, its tiles are turned on their way.
# Threads with 8x8 outputs are the fastest then: on an H200 2048 x 11008 x 4096 takes 0.95 of cuBLAS's speed so, not
# turned 0.88 by the fastest of the tiles above, 0.69 by the first; 512 x 4096 x 4096 0.88, 0.72 and 0.53.
TURNED_TILES = (
    Choice(WarpTile(block=(128, 128, 32), warp=(32, 64), thread=(8, 8)), stages=2),
    Choice(WarpTile(block=(64, 64, 32), warp=(32, 64), thread=(8, 8), slices=2), stages=2),
    *WARP_TILES[2:],
)
THREAD_TILES = (
    Choice(ThreadTile(block=(32, 64, 16), thread=(4, 4)), stages=3),
    Choice(ThreadTile(block=(16, 32, 32), thread=(2, 2)), stages=3),
)


def _turns(shape: Shape) -> bool:
    """Tell whether the second operand's tiles are turned: copied as they are, not computed, and of rows along k."""
    return shape.b_by_k and 1 not in shape.computed


def _warp_choices(shape: Shape) -> tuple[Choice, ...]:
    return TURNED_TILES if _turns(shape) else WARP_TILES


def _by_warps(sch: Schedule, block: SBlockRV, shape: Shape, plan: ContractionPlan) -> None:
    tile, stages = cast(WarpTile, plan.choice.tile), plan.choice.stages
    warps = stage_for_warps(sch, block, tile, scope=tile.shared_scope(4, stages), transposed=_turns(shape))
    stages = _fitting(sch, warps.k_outer, stages)
    if warps.steps is not None:
        end_within_tile(sch, warps.k_outer, warps.k_inner, warps.steps)
    ahead = tile.steps_ahead > 0 and pipeline_reads(sch, warps.k_inner, stages)
    unroll_loop(sch, warps.k_inner)
    pipeline_loop(sch, warps.k_outer, stages, True, one_barrier=True, fill_ahead=ahead)


def _by_threads(sch: Schedule, block: SBlockRV, shape: Shape, plan: ContractionPlan) -> None:
    tile, stages = cast(ThreadTile, plan.choice.tile), plan.choice.stages
    staged = stage_contraction(sch, block, tile, vectorize=True, scope=tile.shared_scope(8, stages))
    stages = _fitting(sch, staged.loops.k_outer, stages)
    pipeline_loop(sch, staged.loops.k_outer, stages, True, one_barrier=True)
    unroll_loop(sch, staged.loops.k_inner)


def _by_threads_stored(sch: Schedule, block: SBlockRV, shape: Shape, plan: ContractionPlan) -> None:
    tile = cast(ThreadTile, plan.choice.tile)
    staged = stage_contraction(sch, block, tile, vectorize=True, scope=tile.shared_scope(8))
    unroll_loop(sch, staged.loops.k_inner)


def _no_thread_ring(shape: Shape, machine: Machine) -> str:
    if not machine.has_cp_async:
        return "the target has no cp.async"
    return "" if shape.reduction is not None else "a reduction whose length only run time knows"


def _fitting(sch: Schedule, loop: LoopRV, stages: int) -> int:
    """Return the stages that a loop can fill."""
    return min(stages, loop_extent(sch, loop))


def _cycles(choice: Choice, sizes: tuple[int, int, int], shape: Shape, machine: Machine, parts: int) -> float:
    filled = _pipelined_together(choice.tile) if shape.reduction is None else None
    batch, moved = shape.batch or 1, shape.result_bytes
    return contraction_cycles(choice, sizes, machine, batch=batch, parts=parts, result_bytes=moved, filled=filled)


def _outputs(choice: Choice, sizes: tuple[int, int, int], shape: Shape, machine: Machine, parts: int) -> float:
    m, n, k = sizes
    rows = min(m * (shape.batch or 1), (MAX_ELEMENTS - 1) // max(n, k))  # so many as a Matmul may have
    return block_tile_cost(choice, Matmul(rows, n, k), machine, parts)


WGMMA = Engine("wgmma", _of_copies(_no_wgmma), _warpgroup_choices, _cycles, _by_warpgroups, splits=True)
MMA = Engine(
    "mma", _of_copies(_no_mma), lambda shape: MMA_TILES, _cycles, _by_warps_of_tensor_cores, splits=True, rings=True
)


def _kept(engine: Engine, obstacle: Obstacle, build: Build) -> Engine:
    """Put a kernel in front of an engine that writes computed operands down, where there are rows enough for it."""
    name, obstacle, build = f"{engine.name}, kept", _of_kept(obstacle), _keeping(build)
    return replace(engine, name=name, obstacle=obstacle, build=build, splits=False, fewest_rows=FEWEST_FOR_KEPT)


ENGINES = (
    WGMMA,
    _kept(WGMMA, _no_wgmma, _by_warpgroups),
    MMA,
    _kept(MMA, _no_mma, _by_warps_of_tensor_cores),
    Engine("mma, stored", _no_mma, lambda shape: MMA_TILES, _cycles, _by_warps_of_tensor_cores_stored),
    Engine("warps", _no_warps, _warp_choices, _outputs, _by_warps, rings=True),
    Engine("threads", _no_thread_ring, lambda shape: THREAD_TILES, _outputs, _by_threads, rings=True),
    Engine("threads, stored", lambda shape, machine: "", lambda shape: THREAD_TILES, _outputs, _by_threads_stored),
)
