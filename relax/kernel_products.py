"""A rule for products in Relax modules that explicit kernels take: TMA, warpgroups with roles.

A function of a Relax module that is a product of 16-bit matrices, its sums finished each by itself or with an element
or two for its column (bias, scale, activation), maybe with a residual added, gets launches of the kernels of steps 12
and 13 next to the bodies that :class:`relax.rules.contraction.Contraction` makes, each for a range of rows::

    if m <= 16: as Contraction                       # few rows: the weights stream past
    elif m <= 256: step 12, tiles of 64 x 192        # tensor maps of the rows at hand, a block for each tile
    ...
    elif ...: step 13, tiles of 128 x 192            # many tiles: blocks that stay, whose last wave may be cut
    else: step 13, tiles of 128 x 256

Operands whose rows TMA cannot step over (1001 elements) are copied to such rows first, in workspaces that TVM's
runtime keeps, where that takes less than to load them element by element, as schedules do (:func:`straight_cycles`);
results of such rows are copied back. The kernels are linked with the module (:mod:`relax.linking`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm_ffi
from tvm import ir, sym, te, tirx
from tvm.target import Target

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.codegen.launch_plan import BIAS, RESIDUAL, ROWS_PARAMETER, SECOND
from tensorir_ladder.kernels.codegen.lowering import with_kernels
from tensorir_ladder.kernels.fused_epilogue import BIAS_DTYPES, PLAIN, Written
from tensorir_ladder.kernels.fused_epilogue import Epilogue as Finish
from tensorir_ladder.kernels.kernel_form import KernelForm
from tensorir_ladder.kernels.persistent import persistent
from tensorir_ladder.kernels.residual import adds_residual
from tensorir_ladder.kernels.stream_k import cut_role_cost, plan_for, plans_by_rows, role_cost
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.kernels.warp_specialized import warp_specialized
from tensorir_ladder.relax.linking import DeviceCode, Mapped, device_code, launch
from tensorir_ladder.relax.rules import (
    Body,
    Computation,
    Contraction,
    EpilogueEquation,
    NotTaken,
    Rule,
    by_extent,
    equation_of,
    kernels_of,
    loads_in,
    narrowed,
    product_of,
    steps_of,
    symbolic_extents,
    unless_empty,
)
from tensorir_ladder.relax.rules.rule import HOW, SCHEDULED
from tensorir_ladder.schedules.cost import CLOCK_GHZ, ROUND_CYCLES, Machine
from tensorir_ladder.schedules.inspection import is_constant, is_one
from tensorir_ladder.schedules.isa import PANEL, PTX_TYPES, VECTOR_BYTES, WGMMA_ARCH
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import Choice
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS, Matmul
from tensorir_ladder.torch_ops.menu import Menu, menu_of
from tensorir_ladder.torch_ops.problem import KernelChoice, Setting

LOG = logging.getLogger(__name__)
SCHEDULED_ROWS = 16  # up to so many rows schedules are as fast
LIMITS = (32, *range(64, 1025, 64), *range(1152, 2049, 128), *range(2304, 4097, 256))  # of ranges of rows: whole tiles
MANY_ROWS = 8192  # what rows beyond are taken for
CUT_CYCLES = 6000  # that sums on their way from helpers to owners take, and the kernel that lowers flags
MEMORY_SHARE = 0.27  # of the bytes that all multiprocessors load in a cycle: what device memory gives
SPARSE_ROWS = 32  # up to which narrow tiles are slow: all blocks load the same few rows, the more often the more blocks
FEW_WAVES = 1.5  # up to which blocks with one tile each are faster, and of two tiles that cost the same the smaller
CUT_WAVES = 2  # up to which the last is cut: a large tile's sums on their way to its owner take longer than reckoned
WORTH_STAYING = 0.9  # of their time, where blocks that stay, whose last wave may be cut, are faster all the same
FULL = 0.8  # of such waves: tiles that fill more leave too few multiprocessors idle for what a cut costs
ELEMENTS_PER_CYCLE = 2.06  # that a multiprocessor loads one by one: 4096 x 1001 x 1001 took 0.134 ms on an H200
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
NARROW_TILES = tuple(
    Choice(RoleTile.parse(tile), stages) for tile, stages in (("192x64x64/3x1", 5), ("128x64x64/2x1", 6))
)  # for blocks that stay, of products of no more columns
TURN_CYCLES = 600  # from one tile of a block that stays to its next
DIGITS = 12  # of a digest, by which kernels are told from each other
LEAVE = "leave it to schedules"


@dataclass(frozen=True)
class PlainProduct:
    """``C[i, j] = sum over k of A[i, k] * B[k, j]``, or ``B[j, k]``: a function's parameters, and its extents.

    ``rows`` are the leading extents of A and C together, known or not. What becomes of the sums is ``finish``, of which
    ``vectors``, two at most, may have an element for each column; ``residual`` is added to what is rounded;
    ``rectified``, what is below 0 becomes 0 then.
    """

    a: tirx.Var
    b: tirx.Var
    c: tirx.Var
    rows: tirx.Expr
    n: int
    k: int
    layout: str
    residual: tirx.Var | None = None
    rectified: bool = False
    finish: Finish = PLAIN
    vectors: tuple[tirx.Var, ...] = ()

    @property
    def epilogue(self) -> Finish:
        """Return the epilogue of the sums, with the residual."""
        return replace(self.finish, residual=self.residual is not None, rectified=self.rectified)

    def problem(self, rows: int) -> Matmul:
        """Return the product of so many rows, of matrices as the kernels see them: copied ones have whole lines."""
        written = Matmul(rows, self.n, self.k, str(self.a.dtype), self.layout, str(self.c.dtype))
        if not tma.unreadable(written):
            return written
        n, k = (e if tma.rows_fit(e, written.dtype) else -(-e // PANEL) * PANEL for e in (self.n, self.k))
        return replace(written, n=n, k=k)

    @property
    def copied(self) -> dict[str, int]:
        """The columns of the copies of those matrices that are copied, by the kernels' names."""
        problem = self.problem(1)
        columns = {"A": problem.k, "B": problem.b_shape[1], "C": problem.n, RESIDUAL: problem.n}
        return {name: columns[name] for name, each in self.matrices.items() if int(each.shape[-1]) != columns[name]}

    @property
    def matrices(self) -> dict[str, tirx.Var]:
        """The parameters by the kernels' names."""
        found = {"A": self.a, "B": self.b, "C": self.c, RESIDUAL: self.residual}
        return {name: each for name, each in found.items() if each is not None}

    def with_copies(self, launching: Callable[[dict[str, tirx.Var]], tirx.PrimFunc], target: Target) -> tirx.PrimFunc:
        """Return what ``launching`` makes of the matrices, some of which are copies: made before, or copied back after.

        ::

            A_rows = A, in rows of 1024 elements, zeros beyond 1001               # kernels of the rule for elements
            launch ...(A_rows, B_rows, C)
        """
        vectors = dict(zip((BIAS, SECOND), self.vectors))
        if not self.copied:
            return launching({**self.matrices, **vectors})
        own = {
            name: tirx.decl_buffer([*matrix.shape[:-1], self.copied[name]], matrix.dtype, f"{name}_rows")
            for name, matrix in self.matrices.items()
            if name in self.copied
        }
        function = launching({**self.matrices, **own, **vectors})
        before = [
            _copy(matrix, own[name], target) for name, matrix in self.matrices.items() if name in own.keys() - "C"
        ]
        after = [_copy(own["C"], self.c, target)] if "C" in own else []
        # In one scope, all copies are in use until the launch: TVM does not see by maps alone that it reads them.
        together = tirx.AttrStmt(tirx.const(0, "int32"), "extern_scope", tirx.const(0, "int32"), function.body)
        made = [*map(tirx.AllocBuffer, own.values()), *before, together, *after]
        return unless_empty(function.with_body(tirx.SeqStmt(made)), self.extents)

    @property
    def extents(self) -> list[tirx.Var]:
        """The extents of the result that are known at run time only."""
        return symbolic_extents(tirx.PrimFunc([self.c], tirx.Evaluate(0)))

    @property
    def mapped(self) -> dict[str, Mapped]:
        """Sizes of the matrices that have the rows, and of B, which may have fewer than the kernels multiply."""
        problem, own = self.problem(1), self.n if self.layout == "nt" else self.k
        columns = {"A": problem.k, "C": problem.n, RESIDUAL: problem.n}
        by_rows = {name: Mapped((count, self.rows)) for name, count in columns.items()}
        return {**by_rows, "B": Mapped((problem.b_shape[1], own))}


def plain_product(func: tirx.PrimFunc) -> PlainProduct:
    """Read a function, its indices narrowed, as a product of matrices that lie in memory row by row.

    Its sums may be finished by what takes them and an element for each column, and a matrix be added to that.

    Raises
    ------
    NotTaken : for all else, and for what TMA or the kernels do not take.
    """
    reduction, factors, after = equation_of(func)
    residual, value, rectified = _residual(after)
    finish, vectors = _finish(after, value)
    loads = factors.first, factors.second
    for load in loads if residual is None else (*loads, residual):
        if not isinstance(load, ir.TensorLoad) or not any(load.source.same_as(each) for each in func.params):
            raise NotTaken("an operand is computed", value=load, remedy=LEAVE)
    if len(reduction.reduction) != 1:
        steps = len(reduction.reduction)
        raise NotTaken("sums run along one extent of two or more", value=f"{steps} such extents", remedy=LEAVE)
    (k,), result = [each.var for each in reduction.reduction], _walked(after.buffer, after.indices, reduction)
    for first, second in (loads, loads[::-1]):
        a, b = (_walked(load.source, load.indices, reduction) for load in (first, second))
        if None in (a, b, result) or len(result) < 2 or not _same(a, [*result[:-1], k]):
            continue
        for layout, order in (("nt", [result[-1], k]), ("nn", [k, result[-1]])):
            if _same(b, order) and all(map(is_constant, second.source.shape)):
                rows = _product(first.source.shape[:-1])
                n, steps = int(after.buffer.shape[-1]), int(first.source.shape[-1])
                added = None if residual is None else residual.source
                operands = first.source, second.source, after.buffer
                return _taken(PlainProduct(*operands, rows, n, steps, layout, added, rectified, finish, vectors))
    raise NotTaken("operands are no matrices stored by rows", remedy=LEAVE)


def _copy(source: tirx.Var, target: tirx.Var, gpu: Target) -> tirx.Stmt:
    """Write the copying of rows to longer ones, zeros beyond, or to shorter ones."""
    columns = int(source.shape[-1])

    def element(*index: tirx.Var) -> tirx.Expr:
        inside = index[-1] < columns
        return tirx.if_then_else(inside, read(*index), 0) if columns < int(target.shape[-1]) else read(*index)

    read = te.placeholder(source.shape, source.dtype, source.name)
    return kernels_of([read, te.compute(target.shape, element, target.name)], [source, target], gpu)


def _residual(after: EpilogueEquation) -> tuple[ir.TensorLoad | None, tirx.Expr, bool]:
    """Return the element of a matrix like the result that is added last, what it is added to, and if a relu follows.

    None, and what becomes of a sum, where there is no such element.
    """
    value = after.value
    rectified = isinstance(value, tirx.Max) and isinstance(value.b, tirx.FloatImm) and value.b.value == 0
    value = value.a if rectified else value
    terms = (value.a, value.b) if isinstance(value, tirx.Add) else ()
    for one, other in (terms, terms[::-1]) if terms else ():
        alike = isinstance(other, ir.TensorLoad) and all(
            tvm_ffi.structural_equal(list(mine), list(its))
            for mine, its in ((other.indices, after.indices), (other.source.shape, after.buffer.shape))
        )
        if alike:
            return other, one, rectified
    return None, after.value, False


def _finish(after: EpilogueEquation, value: tirx.Expr) -> tuple[Finish, tuple[tirx.Var, ...]]:
    """Return how sums become ``value``, of the result's dtype, and the vectors of which it takes elements by columns.

    Raises NotTaken for what takes anything else than the sum and elements of two vectors.
    """
    if tvm_ffi.structural_equal(value, after.total.astype(str(after.buffer.dtype))):
        return PLAIN, ()
    loads, column = loads_in(value), after.indices[-1]
    vectors = tuple(dict.fromkeys(load.source for load in loads))
    by_columns = all(len(load.indices) == 1 and load.indices[0].same_as(column) for load in loads)
    if len(vectors) > 2 or not by_columns or any(not is_constant(each.shape[0]) for each in vectors):
        raise NotTaken("sums are finished by more than two elements for each column", value=value, remedy=LEAVE)
    dtypes = [str(vector.dtype) for vector in vectors]
    elements = {vector: tirx.Var(name, dtype) for vector, name, dtype in zip(vectors, (BIAS, SECOND), dtypes)}
    taken = tvm_ffi.structural_map(value, (ir.TensorLoad, lambda load: elements[load.source]))
    read: list[tirx.Var] = []
    tvm_ffi.structural_walk(taken, (tirx.Var, read.append))
    known = (after.total, *elements.values())
    if any(not any(var.same_as(own) for own in known) for var in read) or not set(dtypes) <= set(BIAS_DTYPES):
        raise NotTaken("sums are finished by what kernels do not take", value=value, remedy=LEAVE)
    bias, second = (*dtypes, "", "")[:2]
    written = Written(bias=bias, second=second, value=taken, total=after.total, elements=tuple(elements.values()))
    return written, vectors


def _walked(buffer: tirx.Var, indices: Sequence[tirx.Expr], within: Computation) -> list[tirx.Var] | None:
    """List the iterators that walk through a buffer, each one whole dimension, the last along rows, or return None."""
    extents = {each.var: each.dom.extent for each in (*within.spatial, *within.reduction)}
    found = [(index, extent) for index, extent in zip(indices, buffer.shape) if not is_one(extent)]
    whole = all(index in extents and sym.Analyzer().can_prove_equal(extents[index], extent) for index, extent in found)
    return [index for index, _ in found] if whole and not is_one(buffer.shape[-1]) else None


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
    if product.vectors and problem.n != product.n:
        raise NotTaken("columns of copies have no element of the vector", value=product.n, remedy=LEAVE)
    if why := epilogue.untaken(problem):  # of copies, where there are some
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
        added = (", finished" if self.product.finish != PLAIN else "") + ", residual" * (
            self.product.residual is not None
        )
        copied = ", ".join(self.product.copied)
        copies = f", rows of {copied} copied to whole lines" if copied else ""
        return f"TMA, step {self.step} {self.choice.tile}, {self.choice.stages} stages{added}{copies}"

    @property
    def kernel(self) -> tuple[Choice, int]:
        """Tell the product's kernels from each other: by tile, stages and step."""
        return self.choice, self.step

    def code(self, target: Target, machine: Machine) -> DeviceCode:
        """Make and lower the kernel."""
        problem, tile, stages = self.product.problem(self.most), self.choice.tile, self.choice.stages
        form = KernelForm(self.product.epilogue, any_rows=not self.known, overlapped=self.step == 13)
        if self.step == 13:
            kernel = persistent(problem, tile, stages, form, machine=machine)
        else:
            kernel = warp_specialized(problem, tile, stages, form)
        made_of = repr((self.step, problem, tile, stages, form, machine)).encode()
        name = f"tma_{self.step}_{problem.shape}_{hashlib.sha256(made_of).hexdigest()[:DIGITS]}"
        return device_code(kernel, name, target)

    def lowered(
        self, func: tirx.PrimFunc, matrices: dict[str, tirx.Var], code: DeviceCode, machine: Machine
    ) -> tirx.PrimFunc:
        """Return the function as this launch, of ``matrices``."""
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
        body = launch(code.plan, matrices, self.product.mapped, numbers, blocks, flags)
        made = tirx.PrimFunc(func.params, body, func.ret_type, func.attrs).with_attr(SCHEDULED, True)
        return unless_empty(made, self.product.extents)


@dataclass(frozen=True)
class MeasuredLaunch:
    """A kernel of the call's menu (:mod:`torch_ops.menu`), for a product whose rows are known."""

    product: PlainProduct
    choice: KernelChoice
    rows: int

    def __str__(self) -> str:
        finished = ", finished" if self.product.finish != PLAIN else ""
        return f"TMA, {self.choice}{finished}{', residual' if self.product.residual is not None else ''}"

    @property
    def kernel(self) -> KernelChoice:
        """Tell the product's kernels from each other."""
        return self.choice

    def code(self, target: Target, machine: Machine) -> DeviceCode:
        """Make and lower the kernel."""
        problem = self.product.problem(self.rows)
        finish = self.product.epilogue
        kernel = self.choice.build(problem, Setting(machine, finish=finish))
        digest = hashlib.sha256(repr((str(self.choice), problem, finish, machine)).encode()).hexdigest()[:DIGITS]
        return device_code(kernel, f"tma_{self.choice.kernel.step}_{problem.shape}_{digest}", target)

    def lowered(
        self, func: tirx.PrimFunc, matrices: dict[str, tirx.Var], code: DeviceCode, _machine: Machine
    ) -> tirx.PrimFunc:
        """Return the function as this launch, of ``matrices``."""
        body = launch(code.plan, matrices, self.product.mapped, {}, code.plan.grid[0])
        made = tirx.PrimFunc(func.params, body, func.ret_type, func.attrs).with_attr(SCHEDULED, True)
        return unless_empty(made, self.product.extents)


def measured_launch(product: PlainProduct, machine: Machine) -> MeasuredLaunch | None:
    """Choose from the call's menu for a product of known rows; None for other GPUs than the menu's, and for copies.

    Left out are kernels in clusters, which no launch here makes, those whose last wave is cut, and those that cannot
    add a residual where there is one.
    """
    if product.copied or str(machine.target.attrs.get("arch")) != WGMMA_ARCH:
        return None
    rows = int(product.rows)
    problem, menu = product.problem(rows), menu_of(str(machine.target), machine.name, machine.multiprocessors)
    able = _launched_alone(menu)
    if product.residual is not None:
        able &= np.array([may and adds_residual(problem, each.tile) for may, each in zip(able, menu.kernels)])
    us = menu.times(problem, able=able)
    for place in us.argsort():
        if not math.isfinite(us[place]):
            return None
        if menu.kernels[place].takes(problem, machine):
            return MeasuredLaunch(product, menu.built(menu.kernels[place], problem), rows)
    return None


def _launched_alone(menu: Menu) -> np.ndarray:
    """Tell which kernels of a menu are launched without clusters, and cut no wave."""

    def alone(each: object) -> bool:
        if not isinstance(each, KernelChoice):
            return False
        tile, kernel = each.tile, each.kernel
        return tile.cluster == (1, 1) and tile.parts == 1 and kernel.blocks == 1 and not kernel.cuts

    return np.array([alone(each) for each in menu.kernels])


def straight_cycles(choice: Choice, parts: int, product: PlainProduct, rows: int, machine: Machine) -> float:
    """Return the cycles that a schedule takes at least to load operands in pieces no longer than their rows allow.

    ::

        tiles of the busiest multiprocessor · k tiles of a part · pieces of a k tile of A and B / pieces a cycle

    A row of 1001 elements begins at a multiple of 2 bytes by chance only, so that each element is loaded by itself.
    """
    tile, size = choice.tile, dtype_bytes(product.a.dtype)
    busiest = -(-rows // tile.block_m) * -(-product.n // tile.block_n) * parts / machine.multiprocessors
    lengths = int(product.a.shape[-1]), int(product.b.shape[-1])
    one, other = (math.gcd(length * size, VECTOR_BYTES) // size for length in lengths)  # elements of a piece
    pieces = (min(rows, tile.block_m) / one + min(product.n, tile.block_n) / other) * tile.block_k
    return math.ceil(busiest) * math.ceil(-(-product.k // tile.block_k) / parts) * pieces / ELEMENTS_PER_CYCLE


def leaving_cycles(choice: Choice, problem: Matmul, machine: Machine) -> float:
    """Return about how many cycles step 12 takes: where a block leaves after its tile, the next one fills its ring."""
    return role_cost(choice, problem, machine) + (math.ceil(_waves(choice, problem, machine)) - 1) * ROUND_CYCLES


def staying_cycles(choice: Choice, problem: Matmul, machine: Machine) -> float:
    """Return about how many cycles step 13 takes, whose blocks stay, and load a tile while they store the one before.

    ResNet-50's 1x1 convolutions of short reductions (56x64-64w1, -256w1, 56x256-64w1, 28x128-512w1) took 8.4, 19.7,
    17.7 and 12.6 µs on an H200; by step 12 16.4, 31.9, 30.0 and 19.5.
    """
    tile, waves = choice.tile, math.ceil(_waves(choice, problem, machine))
    if plan_for(problem, tile, machine).cuts:
        return cut_role_cost(choice, problem, machine) + waves * TURN_CYCLES + CUT_CYCLES
    stored = tile.block_m * tile.block_n / machine.rates.stored_results_per_cycle
    looped = role_cost(choice, replace(problem, m=tile.block_m, n=tile.block_n), machine) - stored
    return waves * (max(looped, stored) + TURN_CYCLES) + stored


def _waves(choice: Choice, problem: Matmul, machine: Machine) -> float:
    """Return how many tiles there are to each multiprocessor."""
    return math.prod(choice.tile.counts(problem)[:2]) / machine.multiprocessors


CYCLES = {12: leaving_cycles, 13: staying_cycles}  # that a step takes


def copying_cycles(product: PlainProduct, rows: int, machine: Machine) -> float:
    """Return the cycles of the kernels that copy a product's matrices: bytes read and written, and launches."""
    problem, rates = product.problem(rows), machine.rates
    heights = {"A": rows, "B": problem.b_shape[0], "C": rows, RESIDUAL: rows}
    moved = sum(2 * heights[name] * columns * problem.itemsize for name, columns in product.copied.items())
    return (moved / rates.copying_gb_s + 1e3 * rates.copying_us * len(product.copied)) * CLOCK_GHZ


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

    What it makes must be linked with their kernels (:func:`relax.linking.link_kernels`).
    """

    def schedule(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return the function lowered, with a body or a launch for each range of rows where these are symbolic."""
        func = narrowed(func)
        try:
            product = plain_product(func)
            each = _rows_of_each(product, symbolic_extents(func))
            scheduled = self._scheduled_rows(func, product, each, target)
            found = self._launches(product, scheduled, each, target)
        except NotTaken as reason:
            LOG.debug("no TMA kernel: %s", reason)
            found = []
        if not found:
            return super().schedule(func, target)
        few = self.bodies(func, target, scheduled) if 0 < each <= scheduled else []
        machine = self._machine_of(target)
        made = {each.kernel: each.code(target, machine) for _, each in reversed(found)}

        def launching(matrices: dict[str, tirx.Var]) -> tirx.PrimFunc:
            bodies = [(most, each.lowered(func, matrices, made[each.kernel], machine)) for most, each in found]
            return by_extent(bodies) if len(bodies) > 1 else bodies[0][1]

        launched = product.with_copies(launching, target)
        joined = by_extent([*((body.most, body.lowered) for body in few), (None, launched)]) if few else launched
        kernels = ir.IRModule({name: one for code in made.values() for name, one in code.device.functions_items()})
        how = [*few, *(Body(most, launched, str(each)) for most, each in found)]
        return with_kernels(joined, kernels).with_attr(HOW, "; ".join(map(str, how)))

    def _scheduled_rows(self, func: tirx.PrimFunc, product: PlainProduct, each: int, target: Target) -> int:
        """Return up to how many rows schedules take less time than kernels; NotTaken where they do for any number."""
        machine, most_rows = self._machine_of(target), SCHEDULED_ROWS
        if not product.copied:
            return most_rows
        menu = ProductMenu(product, machine)
        for most, (plan, *_) in self.plans(product_of(func), target):
            rows = int(product.rows) if not each else MANY_ROWS if most is None else most * each
            best = menu.best(rows, None)
            launched = CYCLES[best.step](best.choice, product.problem(rows), machine)
            straight = straight_cycles(plan.choice, plan.parts, product, rows, machine)
            if straight <= launched + copying_cycles(product, rows, machine):
                if most is None:
                    raise NotTaken("copies of rows for TMA take longer than to load elements", value=rows, remedy=LEAVE)
                most_rows = max(most_rows, rows)
        return most_rows

    def _launches(
        self, product: PlainProduct, scheduled: int, each: int, target: Target
    ) -> list[tuple[int | None, Launch | MeasuredLaunch]]:
        """List launches by the most steps of the symbolic extent that each is for; none where schedules are better."""
        menu = ProductMenu(product, self._machine_of(target))
        if not each:
            rows = int(product.rows)
            if rows <= scheduled:
                return []
            measured = measured_launch(product, self._machine_of(target))
            return [(None, measured or menu.best(rows, None))]
        found: list[tuple[int | None, Launch]] = []
        steps = dict.fromkeys(limit // each for limit in LIMITS if limit > scheduled and limit >= each)
        for most in (*steps, None):
            launch = menu.best(most * each if most else MANY_ROWS, found[-1][1] if found and most else None)
            if found and found[-1][1].kernel == launch.kernel:
                found.pop()
            found.append((most, launch))
        return found


def _rows_of_each(product: PlainProduct, extents: Sequence[tirx.Var]) -> int:
    """Return how many rows there are to each step of the one symbolic extent; 0 without such a one, else NotTaken."""
    if is_constant(product.rows):
        return 0
    each = steps_of(product.rows, extents[0]) if len(extents) == 1 else 0
    if not each:
        raise NotTaken("rows are no multiple of one extent", value=product.rows, remedy=LEAVE)
    return each


class ProductMenu:
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
        leaving = self._least(leaving_cycles, problem, 1)
        if (waves := _waves(leaving, problem, self.machine)) > FEW_WAVES:
            step, choice = 13, self._least(staying_cycles, problem, HARDLY_SLOWER if waves > CUT_WAVES else 1)
        elif staying := self._faster(leaving, problem):
            step, choice = 13, staying
        else:
            step, choice = 12, leaving
        cost = CYCLES[step]
        least = cost(choice, problem, self.machine)
        if before and before.step == step and cost(before.choice, problem, self.machine) <= HARDLY_SLOWER * least:
            return before
        return self._launch(choice, step, rows)

    def _launch(self, choice: Choice, step: int, rows: int) -> Launch:
        """Return a launch for so many rows where that is what the product has, for any number otherwise."""
        if is_constant(self.product.rows):
            return Launch(self.product, choice, step, rows, True)
        problem = self.product.problem(1)
        any_number = (MAX_ELEMENTS - 1) // max(problem.n, problem.k)
        return Launch(self.product, choice, step, any_number // choice.tile.block_m * choice.tile.block_m, False)

    def _faster(self, leaving: Choice, problem: Matmul) -> Choice | None:
        """Return step 13's tile where it gains on step 12's few waves; memory's time at least counts."""
        waves, choice = _waves(leaving, problem, self.machine), self._least(staying_cycles, problem, 1)
        if waves > FULL * math.ceil(waves):
            return None
        moved = sum(math.prod(shape) for shape in ((problem.m, problem.k), problem.b_shape, (problem.m, problem.n)))
        loaded = self.machine.multiprocessors * self.machine.rates.load_bytes_per_cycle
        memory = moved * dtype_bytes(problem.dtype) / (MEMORY_SHARE * loaded) + CUT_CYCLES
        cycles = max(staying_cycles(choice, problem, self.machine), memory)
        return choice if cycles <= WORTH_STAYING * leaving_cycles(leaving, problem, self.machine) else None

    def _least(
        self,
        cost: Callable[[Choice, Matmul, Machine], float],
        problem: Matmul,
        slack: float,
    ) -> Choice:
        """Return the first tile that costs no more than ``slack`` times the least."""
        narrow = NARROW_TILES if cost is staying_cycles and problem.n <= PANEL else ()
        tiles = [each for each in (*narrow, *self.tiles) if problem.m > SPARSE_ROWS or each.tile.block_n > PANEL]
        cycles = [cost(each, problem, self.machine) for each in tiles]
        return next(each for each, own in zip(tiles, cycles) if own <= slack * min(cycles))


def with_kernels_of_steps(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """List rules with :class:`TmaContraction` in the place of :class:`Contraction`."""
    return tuple(TmaContraction(rule.machine) if type(rule) is Contraction else rule for rule in rules)
