"""One function for all values of an extent that is known at run time only: a body for each range of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx

from tensorir_ladder.relax.rules.rule import NotTaken


def by_extent(
    bodies: Sequence[tuple[int | None, tirx.PrimFunc]], extent: str | tirx.Var | None = None
) -> tirx.PrimFunc:
    """Join lowered forms of one function into one, which chooses among them by its symbolic extent when it is called.

    ::

        before   (8, decode), (64, narrow), (None, wide):  three functions of the same parameters, extent m in each
        after    if m <= 8: decode;  else if m <= 64: narrow;  else: wide

    ``bodies`` are the largest extent that each is for, rising, None (any) for the last, and lowered functions
    (:func:`schedules.pipeline.lower_ahead`). ``extent`` chooses where there are several: one of the last body's, or its
    name. Where it is 0, nothing is launched if the results are empty then.

    Raises
    ------
    NotTaken : for no bodies; for largest extents that do not rise from 1 on and end with None; for bodies of other
        parameters; for an extent that is none of the function's, and several where none is given.
    """
    limits = [most for most, _ in bodies]
    known = [most for most in limits[:-1] if most is not None]
    rise = len(known) == len(limits) - 1 and all(most > below for below, most in zip([0, *known], known))
    if not limits or limits[-1] is not None or not rise:
        raise NotTaken(
            "bodies are for ranges of an extent that rise from 1 on, the last for any",
            value=limits,
            remedy="give each its largest extent, in order, and None to the last",
        )
    last = bodies[-1][1]
    chooser = _chosen(symbolic_extents(last), extent)
    least = 0 if any(var.same_as(chooser) for var in _stored_extents(last)) else -1
    chosen = []
    for low, (most, function) in zip([least, *limits[:-1]], bodies):
        inside = chooser > low if most is None else tirx.all(chooser > low, chooser <= most)
        chosen.append(when(inside, _with_parameters_of(function, last)))
    return last.with_body(tirx.SeqStmt(chosen) if len(chosen) > 1 else chosen[0])


def in_multiples(function: tirx.PrimFunc, extent: tirx.Var, step: int) -> tirx.PrimFunc:
    """Return a function with ``step`` times another variable in the place of a symbolic extent: for multiples alone.

    ::

        before   def f(A: (m, n)):  ...          after    def f(A: (m, 8 * n_8)):  ...      # rows of whole vectors
    """
    count = tirx.Var(f"{extent.name}_{step}", extent.ty)

    def inside(expr: tirx.Expr) -> tirx.Expr:
        return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: count * step if var.same_as(extent) else var))

    shaped = {
        parameter: tirx.decl_buffer([inside(e) for e in parameter.shape], parameter.dtype, parameter.name)
        for parameter in function.params
        if any(var.same_as(extent) for var in symbolic_extents(tirx.PrimFunc([parameter], tirx.Evaluate(0))))
    }
    return function.specialize(shaped)


def by_multiple(multiples: tirx.PrimFunc, others: tirx.PrimFunc, extent: str, step: int) -> tirx.PrimFunc:
    """Join a lowered function for multiples of ``step`` (of :func:`in_multiples`) with one for other extents.

    ::

        after    if n % 8 == 0: multiples, of n // 8;  else: others

    ``extent`` is the name of the extent in ``others``.
    """
    own = _chosen(symbolic_extents(others), extent)
    (count,) = (var for var in symbolic_extents(multiples) if var.name == f"{extent}_{step}")
    taken = {**dict(zip(multiples.params, others.params)), count: tirx.floordiv(own, step)}
    taken |= {v: _chosen(symbolic_extents(others), v.name) for v in symbolic_extents(multiples) if not v.same_as(count)}
    body = tvm_ffi.structural_map(multiples.body, (tirx.Var, lambda var: taken.get(var, var)))
    whole = tirx.floormod(own, step) == 0
    return others.with_body(tirx.SeqStmt([when(whole, body), when(tirx.Not(whole), others.body)]))


def _chosen(extents: list[tirx.Var], wanted: str | tirx.Var | None) -> tirx.Var:
    """Return the extent to choose by; NotTaken where there is none, or it is not said which."""
    found = [e for e in extents if wanted is None or e.name == wanted or e.same_as(wanted)]
    if len(found) != 1:
        raise NotTaken(
            "bodies are chosen by one symbolic extent",
            value=f"{', '.join(e.name for e in extents) or 'none'}" + (f", and {wanted}" if wanted is not None else ""),
            limit=1,
            remedy="name one of the function's by extent=, or give the others their values",
        )
    return found[0]


def when(condition: tirx.Expr, body: tirx.Stmt) -> tirx.Stmt:
    """Return a statement that is executed under a condition, as a loop of one step or none.

    TVM places barriers while kernels still stand in the host's code, and would refuse those that stand in a kernel's
    loop: it takes the host's condition for one that some threads of the kernel fail.
    """
    return tirx.For(tirx.Var("chosen", "int32"), 0, tirx.Select(condition, 1, 0), tirx.ForKind.SERIAL, body)


def unless_empty(function: tirx.PrimFunc, extents: Sequence[tirx.Var]) -> tirx.PrimFunc:
    """Return a lowered function that launches nothing where one of its result's ``extents`` is 0."""
    some = tirx.all(*(extent > 0 for extent in extents)) if extents else None
    return function if some is None else function.with_body(when(some, function.body))


def written_extents(function: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the extents known at run time only of the parameters that a function's blocks write, each once."""
    written: list[tirx.Var] = []
    tvm_ffi.structural_walk(
        function.body, (s_tir.SBlock, lambda block: written.extend(region.source for region in block.writes))
    )
    results = [p for p in function.params if any(p.same_as(buffer) for buffer in written)]
    return symbolic_extents(tirx.PrimFunc(results, tirx.Evaluate(0)))


def symbolic_extents(function: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the extents of a function's parameters that are known at run time only, each once."""
    found: list[tirx.Var] = []
    for parameter in function.params:
        for extent in getattr(parameter, "shape", ()):
            tvm_ffi.structural_walk(
                extent, (tirx.Var, lambda v: None if any(v.same_as(f) for f in found) else found.append(v))
            )
    return found


def _stored_extents(function: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the extents known at run time only of the parameters that a lowered function stores to."""
    views: dict[tirx.Var, tirx.Var] = {parameter: parameter for parameter in function.params}
    stored: list[tirx.Var] = []

    def declared(stmt: tirx.DeclBuffer) -> None:
        if isinstance(stmt.data, ir.Call) and stmt.data.op.name == "tirx.buffer_data":
            views[stmt.buffer] = views.get(stmt.data.args[0], stmt.data.args[0])

    note = (tirx.BufferStore, lambda store: stored.append(views.get(store.buffer, store.buffer)))
    tvm_ffi.structural_walk(function.body, [(tirx.DeclBuffer, declared), note], order="pre")
    results = [p for p in function.params if any(p.same_as(buffer) for buffer in stored)]
    return symbolic_extents(tirx.PrimFunc(results, tirx.Evaluate(0)))


def _with_parameters_of(function: tirx.PrimFunc, other: tirx.PrimFunc) -> tirx.Stmt:
    """Return a function's body in terms of another's parameters and extents; NotTaken where these are others."""
    taken = dict(zip(function.params, other.params))
    for mine, theirs in zip(function.params, other.params):
        own, its = (symbolic_extents(tirx.PrimFunc([one], tirx.Evaluate(0))) for one in (mine, theirs))
        taken |= dict(zip(own, its))
    here, there = ([_shown(one, taken) for one in function.params], [_shown(one, {}) for one in other.params])
    if here != there:
        raise NotTaken(
            "bodies take the same parameters",
            value=", ".join(here),
            limit=", ".join(there),
            remedy="lower one function",
        )
    return tvm_ffi.structural_map(function.body, (tirx.Var, lambda var: taken.get(var, var)))


def _shown(parameter: tirx.Var, taken: Mapping[tirx.Var, tirx.Var]) -> str:
    """Write a parameter's shape and dtype, each extent in other variables."""
    if not hasattr(parameter.ty, "shape"):
        return str(parameter.ty)
    extents = [tvm_ffi.structural_map(e, (tirx.Var, lambda var: taken.get(var, var))) for e in parameter.shape]
    return f"{parameter.dtype}[{', '.join(map(str, extents))}]"
