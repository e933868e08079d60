"""A rule for products in Relax modules that explicit kernels take: TMA, warpgroups with roles.

A function of a Relax module that is no more than a product of 16-bit matrices gets launches of step 12's kernels
(:data:`STEPS`) beside the bodies that :class:`schedules.rules.contraction.Contraction` makes, each for a range of
rows::

    if m <= 16: as Contraction                       # few rows: the weights stream past
    elif m <= 256: step 12, tiles of 64 x 192        # tensor maps of the rows at hand, a block for each tile
    ...
    else: step 12, tiles of 128 x 256

The kernels are linked with the module (:mod:`kernels.host_launch`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.target import Target

from tensorir_ladder.kernels import epilogue
from tensorir_ladder.kernels.codegen.launch_plan import RESIDUAL, ROWS_PARAMETER
from tensorir_ladder.kernels.codegen.lowering import with_kernels
from tensorir_ladder.kernels.fused_epilogue import Epilogue as Finish
from tensorir_ladder.kernels.host_launch import DeviceCode, Mapped, device_code, launch
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.stream_k import cut_role_cost, plan_for, plans_by_rows, role_cost
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.inspection import is_constant, is_one
from tensorir_ladder.schedules.isa import PANEL, PTX_TYPES
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.rules import (
    Body,
    Computation,
    Contraction,
    Epilogue,
    NotTaken,
    Rule,
    by_extent,
    equation_of,
    narrowed,
    steps_of,
    symbolic_extents,
    unless_empty,
)
from tensorir_ladder.schedules.rules.rule import HOW, SCHEDULED
from tensorir_ladder.schedules.tiles import Choice
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS, Matmul

LOG = logging.getLogger(__name__)
SCHEDULED_ROWS = 16  # up to so many rows schedules are as fast
STEPS = (12,)  # whose kernels are launched; step 13's takes any number of rows, too, and was not measured so
LIMITS = (32, *range(64, 1025, 64), *range(1152, 2049, 128), *range(2304, 4097, 256))  # of ranges of rows: whole tiles
MANY_ROWS = 8192  # what rows beyond are taken for
CUT_CYCLES = 6000  # that sums on their way from helpers to owners take, and the kernel that lowers flags
MEMORY_SHARE = 0.27  # of the bytes that all multiprocessors load in a cycle: what device memory gives
SPARSE_ROWS = 32  # up to which narrow tiles are slow: all blocks load the same few rows, the more often the more blocks
WORTH_CUTTING = 0.9  # of the time without
FEW_WAVES = 1.5  # up to which blocks with one tile each are faster, and of two tiles that cost the same the smaller
HARDLY_SLOWER = 1.03  # so much is worth neither a range of its own nor a smaller tile
TILES = tuple(
    Choice(RoleTile.parse(tile), stages)
    for tile, stages in (
        ("128x256x64/2x1", 4),
        ("128x192x64/2x1", 4),
        ("192x128x64/3x1", 4),
        ("128x128x64/2x1", 6),
        ("64x256x64/1x1", 5),
        ("64x192x64/1x1", 6),
        ("64x128x64/1x1", 8),
        ("64x64x128/1x1", 6),
    )
)  # large ones first: of two that cost the same in many waves they take less power
DIGITS = 12  # of a digest, by which kernels are told from each other
LEAVE = "leave it to schedules"


@dataclass(frozen=True)
class PlainProduct:
    """``C[i, j] = sum over k of A[i, k] * B[k, j]``, or ``B[j, k]``: a function's parameters, and its extents.

    ``rows`` are the leading extents of A and C together, known or not; ``residual`` is added to what is rounded.
    """

    a: tirx.Var
    b: tirx.Var
    c: tirx.Var
    rows: tirx.Expr
    n: int
    k: int
    layout: str
    residual: tirx.Var | None = None

    def problem(self, rows: int) -> Matmul:
        """Return the product of so many rows."""
        return Matmul(rows, self.n, self.k, str(self.a.dtype), self.layout, str(self.c.dtype))

    @property
    def matrices(self) -> dict[str, tirx.Var]:
        """The parameters by the kernels' names."""
        found = {"A": self.a, "B": self.b, "C": self.c}
        return found if self.residual is None else {**found, RESIDUAL: self.residual}

    @property
    def mapped(self) -> dict[str, Mapped]:
        """Sizes of the matrices that have the rows."""
        columns = {"A": self.k, "C": self.n, RESIDUAL: self.n}
        return {name: Mapped((count, self.rows)) for name, count in columns.items()}


def plain_product(func: tirx.PrimFunc) -> PlainProduct:
    """Read a function, its indices narrowed, as a product of matrices that lie in memory row by row, and a residual.

    Raises
    ------
    NotTaken : for all else, and for what TMA or the kernels do not take.
    """
    reduction, factors, after = equation_of(func)
    residual = _residual(after)
    loads = factors.first, factors.second
    for load in loads if residual is None else (*loads, residual):
        if not isinstance(load, ir.TensorLoad) or not any(load.source.same_as(each) for each in func.params):
            raise NotTaken("an operand is computed", value=load, remedy=LEAVE)
    (k, *more), result = [each.var for each in reduction.reduction], _walked(after.buffer, after.indices, reduction)
    for first, second in (loads, loads[::-1]):
        a, b = (_walked(load.source, load.indices, reduction) for load in (first, second))
        if more or None in (a, b, result) or len(result) < 2 or not _same(a, [*result[:-1], k]):
            continue
        for layout, order in (("nt", [result[-1], k]), ("nn", [k, result[-1]])):
            if _same(b, order) and all(map(is_constant, second.source.shape)):
                rows = _product(first.source.shape[:-1])
                n, steps = int(after.buffer.shape[-1]), int(first.source.shape[-1])
                added = None if residual is None else residual.source
                return _taken(PlainProduct(first.source, second.source, after.buffer, rows, n, steps, layout, added))
    raise NotTaken("operands are no matrices stored by rows", remedy=LEAVE)


def _residual(after: Epilogue) -> ir.TensorLoad | None:
    """Return the element of a matrix like the result that is added to a rounded sum, None where none is; NotTaken."""
    rounded = after.total.astype(str(after.buffer.dtype))
    if tvm_ffi.structural_equal(after.value, rounded):
        return None
    terms = (after.value.a, after.value.b) if isinstance(after.value, tirx.Add) else ()
    for one, other in (terms, terms[::-1]) if terms else ():
        alike = isinstance(other, ir.TensorLoad) and all(
            tvm_ffi.structural_equal(list(mine), list(its))
            for mine, its in ((other.indices, after.indices), (other.source.shape, after.buffer.shape))
        )
        if alike and tvm_ffi.structural_equal(one, rounded):
            return other
    raise NotTaken("something else than a residual follows the sums", value=after.value, remedy=LEAVE)


def _walked(buffer: tirx.Var, indices: Sequence[tirx.Expr], within: Computation) -> list[tirx.Var] | None:
    """List the iterators that walk through a buffer, each along one whole dimension; None where others do."""
    extents = {each.var: each.dom.extent for each in (*within.spatial, *within.reduction)}
    found = [(index, extent) for index, extent in zip(indices, buffer.shape) if not is_one(extent)]
    whole = all(index in extents and sym.Analyzer().can_prove_equal(extents[index], extent) for index, extent in found)
    return [index for index, _ in found] if whole else None


def _same(ones: Sequence[tirx.Var], others: Sequence[tirx.Var]) -> bool:
    return len(ones) == len(others) and all(one.same_as(other) for one, other in zip(ones, others))


def _product(extents: Sequence[tirx.Expr]) -> tirx.Expr:
    found: tirx.Expr = tirx.const(1, "int32")
    for extent in extents:
        found = found * extent
    return sym.Analyzer().simplify(found)


def _taken(product: PlainProduct) -> PlainProduct:
    """Return a product that the kernels take; NotTaken for others."""
    problem = product.problem(1)
    operands = {str(product.a.dtype), str(product.b.dtype)}
    if len(operands) > 1 or not operands < set(PTX_TYPES):
        raise NotTaken("operands are not both float16 or bfloat16", value=sorted(operands), remedy=LEAVE)
    if why := epilogue.untaken(problem):
        raise NotTaken(why, remedy=LEAVE)
    if not all(epilogue.can_store_by_tma(problem, each.tile) for each in TILES):
        raise NotTaken("results cannot leave by TMA", value=f"rows of {product.n} {product.c.dtype}", remedy=LEAVE)
    return product


@dataclass(frozen=True)
class Launch:
    """A kernel of a step with its tile, for at most so many rows: step 13's, whose last wave may be cut, or step 12's.

    ``known``: the rows are known, and the kernel is made for them; otherwise it takes any number.
    """

    product: PlainProduct
    choice: Choice
    step: int
    most: int
    known: bool

    def __str__(self) -> str:
        added = "" if self.product.residual is None else ", residual"
        return f"TMA, step {self.step} {self.choice.tile}, {self.choice.stages} stages{added}"

    @property
    def kernel(self) -> tuple[Choice, int]:
        """Tell the product's kernels from each other: by tile, stages and step."""
        return self.choice, self.step

    def code(self, target: Target, machine: Machine) -> DeviceCode:
        """Make and lower the kernel."""
        problem, tile, stages = self.product.problem(self.most), self.choice.tile, self.choice.stages
        more = {"finish": Finish(residual=self.product.residual is not None), "any_rows": not self.known}
        if self.step == 13:
            kernel = persistent(problem, tile, stages, machine=machine, overlapped=True, **more)
        else:
            kernel = warp_specialized(problem, tile, stages, **more)
        made_of = repr((self.step, problem, tile, stages, more, machine)).encode()
        name = f"tma_{self.step}_{problem.shape}_{hashlib.sha256(made_of).hexdigest()[:DIGITS]}"
        return device_code(kernel, name, target)

    def lowered(self, func: tirx.PrimFunc, code: DeviceCode, machine: Machine) -> tirx.PrimFunc:
        """Return the function as this launch."""
        rows, tile = self.product.rows, self.choice.tile
        numbers: dict[str, tirx.Expr | int] = {ROWS_PARAMETER: rows}
        blocks, flags = code.plan.grid[0], False
        if self.step == 13:
            plans = [plan_for(self.product.problem(self.most), tile, machine)]
            if not self.known:
                plans = plans_by_rows(self.product.problem(self.most), tile, machine)
                for name in ("helpers", "cut"):
                    numbers[name] = _by_rows(rows, tile.block_m, [getattr(plan, name) for plan in plans])
            flags = any(plan.helpers for plan in plans) and (self.known or numbers["helpers"] > 0)
        elif not self.known:
            blocks = blocks // -(-self.most // tile.block_m) * tirx.floordiv(rows + (tile.block_m - 1), tile.block_m)
        body = launch(code.plan, self.product.matrices, self.product.mapped, numbers, blocks, flags)
        made = tirx.PrimFunc(func.params, body, func.ret_type, func.attrs).with_attr(SCHEDULED, True)
        return unless_empty(made, symbolic_extents(tirx.PrimFunc([self.product.c], tirx.Evaluate(0))))


def _by_rows(rows: tirx.Expr, step: int, values: Sequence[int]) -> tirx.Expr:
    """Return the first value for up to ``step`` rows, the second for up to twice as many, ...; 0 for more.

    Searched by halves, by comparisons of the rows alone: TVM's passes take seconds over a long chain of choices.
    """
    runs: list[tuple[int, int]] = []  # the most rows that each value is for
    for place, value in enumerate(values, start=1):
        if runs and runs[-1][1] == value:
            runs.pop()
        runs.append((place * step, value))

    def among(few: Sequence[tuple[int, int]]) -> tirx.Expr:
        if len(few) == 1:
            return tirx.const(few[0][1], "int32")
        half = len(few) // 2
        return tirx.Select(rows <= few[half - 1][0], among(few[:half]), among(few[half:]))

    return tirx.Select(rows <= runs[-1][0], among(runs), tirx.const(0, "int32"))


class TmaContraction(Contraction):
    """Takes what :class:`Contraction` takes, and has plain products of many rows done by steps 12 and 13.

    What it makes must be linked with their kernels (:func:`kernels.host_launch.link_kernels`).
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return the function lowered, with a body or a launch for each range of rows where these are symbolic."""
        func = narrowed(func)
        try:
            found = self._launches(plain_product(func), symbolic_extents(func), target)
        except NotTaken as reason:
            LOG.debug("no TMA kernel: %s", reason)
            found = []
        if not found:
            return super().schedule(func, target)
        few = self.bodies(func, target, SCHEDULED_ROWS) if found[0][0] is not None else []
        machine = self._machine_of(target)
        made = {each.kernel: each.code(target, machine) for _, each in reversed(found)}
        bodies = [
            *few,
            *(Body(most, each.lowered(func, made[each.kernel], machine), str(each)) for most, each in found),
        ]
        joined = by_extent([(body.most, body.lowered) for body in bodies]) if len(bodies) > 1 else bodies[0].lowered
        kernels = ir.IRModule({name: one for code in made.values() for name, one in code.device.functions_items()})
        return with_kernels(joined, kernels).with_attr(HOW, "; ".join(map(str, bodies)))

    def _launches(
        self, product: PlainProduct, extents: Sequence[tirx.Var], target: Target
    ) -> list[tuple[int | None, Launch]]:
        """List launches by the most steps of the symbolic extent that each is for; none where schedules are better."""
        menu = Menu(product, self._machine_of(target))
        if is_constant(product.rows):
            rows = int(product.rows)
            return [(None, menu.best(rows, None))] if rows > SCHEDULED_ROWS else []
        each = steps_of(product.rows, extents[0]) if len(extents) == 1 else 0
        if not 1 <= each <= SCHEDULED_ROWS:
            raise NotTaken("rows are no multiple of one extent", value=product.rows, remedy=LEAVE)
        found: list[tuple[int | None, Launch]] = []
        for limit in (*LIMITS, None):
            launch = menu.best(limit or MANY_ROWS, found[-1][1] if found and limit else None)
            if found and found[-1][1].kernel == launch.kernel:
                found.pop()
            found.append((limit and limit // each, launch))
        return found


class Menu:
    """The launches that a product may be made by, and what each costs; NotTaken where the machine holds none."""

    def __init__(self, product: PlainProduct, machine: Machine) -> None:
        size = dtype_bytes(product.a.dtype)
        self.product, self.machine = product, machine
        self.tiles = [each for each in TILES if not each.tile.violations(machine.target, size, each.stages)]
        if not self.tiles:
            raise NotTaken("the machine holds no TMA kernel", value=machine.target.attrs.get("arch"), remedy=LEAVE)

    def best(self, rows: int, before: Launch | None) -> Launch:
        """Return what should be fastest for so many rows; where it hardly loses, ``before``, which is so for fewer."""
        problem = self.product.problem(rows)
        step, cost = 12, role_cost
        choice, cut = self._least(role_cost, problem, 1), self._least(cut_role_cost, problem, 1)
        many = math.prod(choice.tile.counts(problem)[:2]) > FEW_WAVES * self.machine.multiprocessors
        if 13 in STEPS and many:
            step, cost, choice = 13, cut_role_cost, self._least(cut_role_cost, problem, HARDLY_SLOWER)
        elif 13 in STEPS and self._with_sums(cut, problem) <= WORTH_CUTTING * role_cost(choice, problem, self.machine):
            step, cost, choice = 13, cut_role_cost, cut
        least = cost(choice, problem, self.machine)
        if before and before.step == step and cost(before.choice, problem, self.machine) <= HARDLY_SLOWER * least:
            return before
        if is_constant(self.product.rows):
            return Launch(self.product, choice, step, rows, True)
        any_number = (MAX_ELEMENTS - 1) // max(self.product.n, self.product.k)
        return Launch(self.product, choice, step, any_number // choice.tile.block_m * choice.tile.block_m, False)

    def _with_sums(self, choice: Choice, problem: Matmul) -> float:
        """Return the cycles of a kernel whose last wave is cut, with what its helpers' sums take; memory's at least."""
        moved = sum(math.prod(shape) for shape in ((problem.m, problem.k), problem.b_shape, (problem.m, problem.n)))
        loaded = self.machine.multiprocessors * self.machine.rates.load_bytes_per_cycle
        memory = moved * dtype_bytes(problem.dtype) / (MEMORY_SHARE * loaded)
        return max(cut_role_cost(choice, problem, self.machine), memory) + CUT_CYCLES

    def _least(self, cost: Callable[[Choice, Matmul, Machine], float], problem: Matmul, slack: float) -> Choice:
        """Return the first tile that costs no more than ``slack`` times the least."""
        tiles = [each for each in self.tiles if problem.m > SPARSE_ROWS or each.tile.block_n > PANEL]
        cycles = [cost(each, problem, self.machine) for each in tiles]
        return next(each for each, own in zip(tiles, cycles) if own <= slack * min(cycles))


def with_kernels_of_steps(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """List rules with :class:`TmaContraction` in the place of :class:`Contraction`."""
    return tuple(TmaContraction(rule.machine) if type(rule) is Contraction else rule for rule in rules)
