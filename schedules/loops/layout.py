"""Reshaping a block's iteration space and operands: contractions as matrix products, padding to tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.arguments import Positive
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import block_name, innermost_iterator, is_constant, operand_regions


def flatten_contraction(sch: Schedule, block: SBlockRV) -> None:
    """Turn any two-operand contraction into a (batched) matrix product, implicitly (no data is copied).

    Iterators of ``block`` are grouped by what they index and each group is fused: *rows* (first operand
    and output), *columns* (second operand and output), *reduction* (both operands) and, where an
    iterator indexes all three, *batch*::

        before   for n, y, x, o, ry, rx, c:  out[n, y, x, o] += data[n, y + ry, x + rx, c] * weight[ry, rx, c, o]
        after    for row, column, k:         out'[row, column] += data'[row, k] * weight'[k, column]

    with row = (n, y, x), column = o, k = (ry, rx, c). The primed buffers are new, produced and consumed
    by blocks that only re-index; :func:`schedules.memory.inline_data_movement` (of a copy to shared
    memory) and :func:`schedules.memory.accumulate_in_registers` inline these, which makes a convolution
    an implicit GEMM. ``block`` stays valid; its loops are new (``sch.get_loops(block)``).

    Raises
    ------
    IllegalSchedule : if the block has not two operands, or has no rows, columns or reduction, or only one
        step of one of these, or one that only run time knows the number of; if its loops were cut or bound before.
        (:func:`relax.rules.normal_form.product_of` writes such functions anew.)
    """
    _check_plain_loops(sch, block)
    stmt, groups = sch.get(block), _group_iterators(sch, block)
    accesses = [("read", 0), ("read", 1), ("write", 0)]
    regions = [*operand_regions(sch, block), stmt.writes[0]]
    for access, region in zip(accesses, regions):
        contiguous = _vars_of(region.region[-1].min)
        sch.reindex(block, access)
        # The group that walks the buffer's last dimension stays last, so that vectors stay contiguous.
        order = sorted(groups.values(), key=lambda group: any(stmt.iter_vars[p].var in contiguous for p in group))
        _fuse_dimensions(sch, block, access, order)
    extents = [int(iterator.dom.extent) for iterator in stmt.iter_vars]
    sch.transform_block_layout(block, fused_index([group for group in groups.values() if group], extents))


def contraction_loops(sch: Schedule, block: SBlockRV) -> list[LoopRV]:
    """Return the loops of a contraction: any number of batch loops, rows, columns, reduction.

    Raises
    ------
    IllegalSchedule : for a block with fewer than three; for one without a start (``C += A * B``), whose sums could not
        be kept elsewhere; for symbolic int64 extents beside int32 ones.
    """
    loops = sch.get_loops(block)
    check_index_dtypes(sch, block)
    if len(loops) < 3:
        raise IllegalSchedule(
            "a contraction has rows, columns and a reduction",
            block=block_name(sch, block),
            value=f"{len(loops)} loops",
            limit="at least 3",
            remedy="call flatten_contraction first, or schedule this block with bind_elements",
        )
    if sch.get(block).init is None:
        raise IllegalSchedule(
            "a sum that goes on from what its buffer holds",
            block=block_name(sch, block),
            remedy="give the block a start (T.init), and add the buffer in an epilogue",
        )
    return loops


def check_index_dtypes(sch: Schedule, block: SBlockRV) -> None:
    """Raise IllegalSchedule for a symbolic int64 extent beside int32 ones: TVM 0.27 mixes both up in indices."""
    extents = [sch.get(loop).extent for loop in sch.get_loops(block)]
    dtypes = {str(extent.ty.dtype) for extent in extents}
    if len(dtypes) > 1 and (wide := [e for e in extents if not is_constant(e) and str(e.ty.dtype) == "int64"]):
        raise IllegalSchedule(
            "an extent of int64 that only run time knows stands beside extents of int32",
            block=block_name(sch, block),
            value=f"{wide[0]}: int64",
            limit="extents of one dtype",
            remedy="make all of them int32: relax.rules.narrowed(function)",
        )


def _extent(stmt: s_tir.SBlock, positions: list[int]) -> int:
    return math.prod(int(stmt.iter_vars[position].dom.extent) for position in positions)


def _check_plain_loops(sch: Schedule, block: SBlockRV) -> None:
    """Require one loop for each iterator of a block, in their order, around nothing else, of constant extents."""
    loops = [sch.get(loop) for loop in sch.get_loops(block)]
    stmt: tirx.Stmt | None = loops[0] if loops else None
    for loop in loops:
        if not loop.same_as(stmt) or loop.kind == tirx.ForKind.THREAD_BINDING:
            break
        stmt = loop.body
    values = list(stmt.iter_values) if isinstance(stmt, s_tir.SBlockRealize) else []
    remedy = "call it before loops are cut, or write the function anew (relax.rules.normal_form.product_of)"
    if len(values) != len(loops) or not all(v.same_as(loop.loop_var) for v, loop in zip(values, loops)):
        raise IllegalSchedule(
            "its loops are not one for each of its iterators, around it alone",
            block=block_name(sch, block),
            remedy=remedy,
        )
    for loop in loops:
        if not is_constant(loop.extent):
            raise IllegalSchedule(
                "a loop's extent is known at run time only",
                block=block_name(sch, block),
                loop=str(loop.loop_var.name),
                value=loop.extent,
                limit="a constant",
                remedy="write the function anew (relax.rules.normal_form.product_of)",
            )


def _group_iterators(sch: Schedule, block: SBlockRV) -> dict[str, list[int]]:
    """Return the positions of a contraction's iterators by role: batch, rows, columns, reduction."""
    stmt = sch.get(block)
    outputs = _index_vars(stmt.writes[0])
    operands = [_index_vars(region) for region in operand_regions(sch, block)]
    if len(operands) != 2:
        raise IllegalSchedule(
            "a contraction reads two operands",
            block=block_name(sch, block),
            value=f"{len(operands)} operands",
            limit=2,
            remedy="inline or cache the others first",
        )
    groups: dict[str, list[int]] = {"batch": [], "rows": [], "columns": [], "reduction": []}
    for position, iterator in enumerate(stmt.iter_vars):
        in_first, in_second, in_output = (iterator.var in users for users in (*operands, outputs))
        if not in_output:
            groups["reduction"].append(position)
        elif in_first and in_second:
            groups["batch"].append(position)
        else:
            groups["rows" if in_first else "columns"].append(position)
    missing = [role for role in ("rows", "columns", "reduction") if not groups[role]]
    if missing:
        raise IllegalSchedule(
            f"no iterator for {' or '.join(missing)}",
            block=block_name(sch, block),
            remedy="a matrix product needs all three; schedule this block with bind_elements instead",
        )
    single = [role for role in ("rows", "columns", "reduction") if _extent(stmt, groups[role]) == 1]
    if single:
        raise IllegalSchedule(
            f"{' and '.join(single)} of one step cannot be tiled (TVM drops them from the indices)",
            block=block_name(sch, block),
            remedy="schedule this block with bind_elements instead",
        )
    return groups


def _fuse_dimensions(sch: Schedule, block: SBlockRV, access: tuple[str, int], groups: list[list[int]]) -> None:
    """Fuse a re-indexed buffer's dimensions by the group of iterators that each belongs to."""
    stmt = sch.get(block)
    region = (stmt.reads if access[0] == "read" else stmt.writes)[access[1]]
    iterators = [iterator.var for iterator in stmt.iter_vars]
    # An iterator of one step may have been simplified away: its dimension is missing, or a constant 0.
    positions = [next((p for p, v in enumerate(iterators) if v.same_as(dim.min)), None) for dim in region.region]
    fused = [[dim for dim, position in enumerate(positions) if position in group] for group in groups]
    constant = [dim for dim, position in enumerate(positions) if position is None]
    fused = [group for group in fused if group]
    fused[0] = constant + fused[0]
    sch.transform_layout(block, access, fused_index(fused, [int(extent) for extent in region.source.shape]))


def pad_to_tile(sch: Schedule, block: SBlockRV, tile: Sequence[Positive]) -> bool:
    """Round each loop of an einsum block up to a multiple of its ``tile`` extent (1 leaves it alone).

    ::

        before   for i < 100, j < 52, k < 36:  C[i, j] += A[i, k] * B[k, j]
        after    A' = A, zero outside;  B' = B, zero outside
                 for i < 128, j < 64, k < 48:  C'[i, j] += A'[i, k] * B'[k, j]
                 C = C' inside

    Costs no memory once the three extra blocks are inlined, which
    :func:`schedules.memory.inline_data_movement` and :func:`schedules.memory.accumulate_in_registers`
    do: loads become predicated with zero fill, the write-back becomes predicated, and the inner loops carry
    no predicate at all. Returns whether anything was padded; where all extents divide, nothing changes. An extent known
    at run time only is always padded.

    Raises
    ------
    IllegalSchedule : if ``tile`` has not one extent per loop; if the block is not an einsum, or sums
        anything else than products of its two operands.
    """
    extents = [sch.get(loop).extent for loop in sch.get_loops(block)]
    if len(tile) != len(extents):
        raise IllegalSchedule(
            "padding needs one tile extent per loop",
            block=block_name(sch, block),
            value=len(tile),
            limit=len(extents),
            remedy="give 1 for a loop to leave alone",
        )
    if all(size == 1 or (is_constant(extent) and int(extent) % size == 0) for extent, size in zip(extents, tile)):
        return False
    if not _sums_products(sch.get(block)):
        raise IllegalSchedule(
            "padding adds zeros, which change a reduction that is no sum of products",
            block=block_name(sch, block),
            remedy="use a tile that divides every extent, or leave the ragged loops to predicates",
        )
    try:
        sch.pad_einsum(block, list(tile))
    except Exception as error:
        raise IllegalSchedule(
            "only an einsum can be padded (each index a plain loop variable)",
            block=block_name(sch, block),
            remedy="call flatten_contraction first, or leave the ragged loops to predicates",
        ) from error
    return True


def _sums_products(stmt: s_tir.SBlock) -> bool:
    """Recognise a block that computes ``out = 0`` and ``out += a * b``, operands and product possibly cast."""
    store, start = stmt.body, stmt.init
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return False
    terms = [store.value.a, store.value.b]
    multiplied = [term for term in map(_uncast, terms) if isinstance(term, tirx.Mul)]
    products = [term for term in multiplied if _is_load(term.a) and _is_load(term.b)]
    sums = [term for term in terms if isinstance(term, ir.TensorLoad) and term.source.same_as(store.buffer)]
    zero = isinstance(start, tirx.BufferStore) and isinstance(start.value, (tirx.FloatImm, tirx.IntImm))
    return len(products) == len(sums) == 1 and zero and float(start.value.value) == 0


def check_product(sch: Schedule, block: SBlockRV) -> None:
    """Raise IllegalSchedule for a block that is no sum of products ``A[rows, k] * B[k, columns]`` from 0 on."""
    stmt, name = sch.get(block), block_name(sch, block)
    if not _sums_products(stmt):
        raise IllegalSchedule(
            "tensor cores add up products of two operands, from 0 on",
            block=name,
            value=str(getattr(stmt.body, "value", "several statements")),
            limit="C += A * B",
            remedy="write the function anew (relax.rules.normal_form.product_of), or call stage_contraction",
        )
    *_, rows, columns, _ = (iterator.var for iterator in stmt.iter_vars)
    first, second = (_index_vars(region) for region in operand_regions(sch, block))
    if columns in first or rows in second:
        raise IllegalSchedule(
            "the product's first operand has columns, or its second one rows",
            block=name,
            value=str(_product_in(stmt)),
            limit="A[rows, k] * B[k, columns]",
            remedy="write the operands in the other order",
        )


def check_sums(sch: Schedule, block: SBlockRV, accumulator: str) -> None:
    """Raise IllegalSchedule for a product (:func:`check_product`) that is computed in another dtype than sums are."""
    stmt = sch.get(block)
    dtypes = [str(_product_in(stmt).ty.dtype), str(stmt.body.buffer.dtype)]
    if dtypes != [accumulator, accumulator]:
        raise IllegalSchedule(
            f"tensor cores multiply and add up in {accumulator}",
            block=block_name(sch, block),
            value=f"products in {dtypes[0]}, sums in {dtypes[1]}",
            limit=accumulator,
            remedy=f'cast each operand before they are multiplied: A.astype("{accumulator}") * ...',
        )


def _product_in(stmt: s_tir.SBlock) -> tirx.Mul:
    """Return the product that a block adds up."""
    terms = map(_uncast, (stmt.body.value.a, stmt.body.value.b))
    return next(term for term in terms if isinstance(term, tirx.Mul))


def _is_load(value: tirx.PrimExpr) -> bool:
    return isinstance(_uncast(value), ir.TensorLoad)


def _uncast(value: tirx.PrimExpr) -> tirx.PrimExpr:
    while isinstance(value, tirx.Cast):
        value = value.value
    return value


def _index_vars(region: ir.TensorRegion) -> set[tirx.Var]:
    return set().union(*(_vars_of(dimension.min) for dimension in region.region))


def _vars_of(index: tirx.PrimExpr) -> set[tirx.Var]:
    found: set[tirx.Var] = set()
    tvm_ffi.structural_walk(index, (tirx.Var, lambda var: found.add(var)))
    return found


def fused_index(groups: list[list[int]], extents: list[int]) -> tirx.IndexMap:
    """Return an index map that fuses each group of positions, row-major, into one index."""
    variables = [tirx.Var(f"i{position}", "int32") for position in range(len(extents))]
    fused = []
    for group in groups:
        index: tirx.PrimExpr = tirx.const(0, "int32")
        for position in group:
            index = index * extents[position] + variables[position]
        fused.append(sym.Analyzer().simplify(index))
    return tirx.IndexMap(variables, fused, None)


def reindex_along_rows(sch: Schedule, block: SBlockRV, operand: int) -> None:
    """Give an operand a dimension for each of the block's iterators that index it; what its rows run along stays last.

    ::

        before   C[part, j] += B[part * 64 + k, j]
        after    C[part, j] += B'[part, k, j]                # sch.reindex alone: B'[part, j, k], with scattered rows

    B' is a new buffer, for copies to inline (:func:`schedules.memory.inline_data_movement`).
    """
    last = innermost_iterator(sch, block, operand)
    sch.reindex(block, ("read", operand))
    stmt, region = sch.get(block), operand_regions(sch, block)[operand].region
    (row,) = [place for place, dimension in enumerate(region) if dimension.min.same_as(stmt.iter_vars[last].var)]
    order = [*(place for place in range(len(region)) if place != row), row]
    if row != len(region) - 1:
        mapped = index_map(len(region), lambda *index: [index[place] for place in order])
        sch.transform_layout(block, ("read", operand), mapped)


def index_map(rank: int, place: Callable[..., Sequence[tirx.PrimExpr]]) -> tirx.IndexMap:
    """Return the index map that takes ``rank`` indices to what ``place`` makes of them, simplified."""
    variables = [tirx.Var(f"i{position}", "int32") for position in range(rank)]
    analyzer = sym.Analyzer()
    return tirx.IndexMap(variables, [analyzer.simplify(index) for index in place(*variables)], None)
