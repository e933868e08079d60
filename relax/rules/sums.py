"""Sums as any rule can take them: none of a single step, none that nobody reads, none in 16 bits for TVM's rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx

from tensorir_ladder.schedules.inspection import is_one

NARROW = ("float16", "bfloat16")
ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Max, tirx.Min)


def without_single_steps(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose reductions take more than one step, or a number of steps that only run time knows.

    ::

        before   for i, k in grid(n, 1):  { if k == 0: s[i] = 0;  s[i] = s[i] + a[i, k] * b[k] }
        after    for i, k in grid(n, 1):  s[i] = 0 + a[i, k] * b[k]

    What is none any rule for elementwise functions takes, and TVM's ``reverse_compute_inline`` computes what follows a
    reduction of one step twice, on what it begins with, too (docs/tvm.md).
    """

    def begun(block: s_tir.SBlock) -> s_tir.SBlock:
        steps = [one.dom.extent for one in block.iter_vars if one.iter_type == tirx.IterVar.CommReduce]
        if not _reduces_to_one_buffer(block) or not all(map(is_one, steps)):
            return block
        first = {block.init.buffer: block.init.value}
        value = tvm_ffi.structural_map(block.body.value, (ir.TensorLoad, lambda load: first.get(load.source, load)))
        store = tirx.BufferStore(block.body.buffer, value, block.body.indices)
        iterators = [tirx.IterVar(one.dom, one.var, tirx.IterVar.DataPar) for one in block.iter_vars]
        return s_tir.SBlock(iterators, block.reads, block.writes, block.name_hint, store, annotations=block.annotations)

    body = tvm_ffi.structural_map(function.body, (s_tir.SBlock, begun))
    return function if body.same_as(function.body) else function.with_body(body)


def without_unread(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function without the loops whose results nothing reads.

    ::

        before   for i, k:  s[i] += x[i, k];     for i:  y[i] = 1          # which was s[i] to the power of 0
        after    for i:  y[i] = 1

    dlight's Reduction would have each block of threads, which has a row of the sum, store all rows of the result.
    """
    if not _has_root(function):
        return function
    parts, kept = _parts(function.body.block.body), set(function.body.block.alloc_buffers)
    needed: list[tirx.Stmt] = []
    read: set[tirx.Var] = set()
    for part in reversed(parts):
        loads, stores = _loads(part), _stores(part)
        if not stores or not stores <= kept - read:
            needed.insert(0, part)
            read |= loads
    if len(needed) == len(parts):
        return function
    gone = kept - {buffer for part in needed for buffer in _loads(part) | _stores(part)}

    def without_gone(block: s_tir.SBlock) -> s_tir.SBlock:
        reads = [region for region in block.reads if region.source not in gone]
        return block if len(reads) == len(block.reads) else _changed(block, reads=reads)

    needed = [tvm_ffi.structural_map(part, (s_tir.SBlock, without_gone)) for part in needed]
    return _with_root(function, needed, [one for one in function.body.block.alloc_buffers if one not in gone])


def summed_in_float32(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function that reduces 16-bit floats in float32, and rounds where the results are read.

    ::

        before   for i, k:  s[i] += a[i, k] * b[k]                             # all of it in bfloat16
        after    for i, k:  s32[i] += float32(a[i, k]) * float32(b[k]);   for i:  s[i] = bfloat16(s32[i])

    PyTorch sums as precisely. And TVM has threads add up bfloat16 in shared memory, the last steps without a barrier
    (docs/tvm.md).
    """
    if not _has_root(function):
        return function
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, blocks.append))
    sums = [block.body.buffer for block in blocks if _reduces_to_one_buffer(block)]
    wide = {
        one: tirx.decl_buffer(one.shape, "float32", name=f"{one.name}_sums") for one in sums if str(one.dtype) in NARROW
    }
    if not wide:
        return function

    def read(load: ir.TensorLoad) -> ir.Expr:
        if load.source not in wide:
            return load
        return tirx.Cast(str(load.source.dtype), tirx.BufferLoad(wide[load.source], load.indices))

    def stored(store: tirx.BufferStore) -> tirx.BufferStore:
        if store.buffer not in wide:
            return store
        return tirx.BufferStore(wide[store.buffer], _in_float32(store.value), store.indices)

    root = function.body.block
    body = tvm_ffi.structural_map(root.body, [(ir.TensorLoad, read), (tirx.BufferStore, stored)])
    body = tvm_ffi.structural_map(body, (tirx.Var, lambda var: wide.get(var, var)))
    rounded = [_rounded(wide[one], one) for one in function.params if one in wide]
    allocated = [one for one in root.alloc_buffers if one not in wide]
    return _with_root(function, [*_parts(body), *rounded], [*allocated, *wide.values()])


def _in_float32(value: ir.Expr) -> ir.Expr:
    """Return an expression of 16-bit floats in float32, its arithmetic as well."""
    if isinstance(value, tirx.FloatImm):
        return tirx.const(float(value.value), "float32")
    if isinstance(value, ARITHMETIC):
        return type(value)(_in_float32(value.a), _in_float32(value.b))
    if isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == "float32":
        return value.value  # what was rounded for the arithmetic's sake
    return tirx.Cast("float32", value)


def _rounded(source: tirx.Var, to: tirx.Var) -> tirx.Stmt:
    """Write the loops that copy a buffer of float32 to a narrower one."""
    loops = [tirx.Var(f"i{axis}", extent.ty.dtype) for axis, extent in enumerate(to.shape)]
    places = [tirx.Var(f"v_i{axis}", extent.ty.dtype) for axis, extent in enumerate(to.shape)]
    iterators = [
        tirx.IterVar(ir.Range(0, extent), place, tirx.IterVar.DataPar) for extent, place in zip(to.shape, places)
    ]
    regions = [
        tirx.BufferRegion(buffer, [ir.Range.from_min_extent(place, 1) for place in places]) for buffer in (source, to)
    ]
    store = tirx.BufferStore(to, tirx.Cast(str(to.dtype), tirx.BufferLoad(source, places)), places)
    stmt: tirx.Stmt = s_tir.SBlockRealize(
        loops, True, s_tir.SBlock(iterators, regions[:1], regions[1:], f"{to.name}_rounded", store)
    )
    for loop, extent in reversed([*zip(loops, to.shape)]):
        stmt = tirx.For(loop, tirx.const(0, extent.ty.dtype), extent, tirx.ForKind.SERIAL, stmt)
    return stmt


def _reduces_to_one_buffer(block: s_tir.SBlock) -> bool:
    """Return whether a block reduces, and its body is one store; a comparison of two buffers' elements has two."""
    return isinstance(block.init, tirx.BufferStore) and isinstance(block.body, tirx.BufferStore)


def _has_root(function: tirx.PrimFunc) -> bool:
    return isinstance(function.body, s_tir.SBlockRealize) and not function.body.block.iter_vars


def _with_root(function: tirx.PrimFunc, parts: Sequence[tirx.Stmt], allocated: Iterable[tirx.Var]) -> tirx.PrimFunc:
    """Return a function whose root block has these statements and buffers."""
    body = tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]
    root = _changed(function.body.block, body=body, alloc_buffers=[*allocated])
    return function.with_body(s_tir.SBlockRealize([], True, root))


def _changed(block: s_tir.SBlock, **fields: object) -> s_tir.SBlock:
    """Return a block with other fields."""
    own = ("iter_vars", "reads", "writes", "name_hint", "body")
    more = ("init", "alloc_buffers", "match_buffers", "annotations")
    return s_tir.SBlock(**{name: fields.get(name, getattr(block, name)) for name in (*own, *more)})


def _parts(body: tirx.Stmt) -> list[tirx.Stmt]:
    return [*body.seq] if isinstance(body, tirx.SeqStmt) else [body]


def _loads(stmt: tirx.Stmt) -> set[tirx.Var]:
    """Return the buffers that a statement reads, or whose parts its blocks give other names."""
    found: set[tirx.Var] = set()
    callbacks = [
        (ir.TensorLoad, lambda load: found.add(load.source)),
        (s_tir.SBlock, lambda block: found.update(part.source.source for part in block.match_buffers)),
    ]
    tvm_ffi.structural_walk(stmt, callbacks)
    return found


def _stores(stmt: tirx.Stmt) -> set[tirx.Var]:
    """Return the buffers that a statement stores to; none where it does more."""
    found: set[tirx.Var] = set()
    calls: list[tirx.Evaluate] = []
    tvm_ffi.structural_walk(
        stmt, [(tirx.BufferStore, lambda store: found.add(store.buffer)), (tirx.Evaluate, calls.append)]
    )
    return set() if calls else found
