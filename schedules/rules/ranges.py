"""One function for all values of an extent that is known at run time only: a body for each range of values."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import s_tir, tirx

from tensorir_ladder.schedules.rules.rule import NotTaken


def by_extent(bodies: Sequence[tuple[int | None, tirx.PrimFunc]]) -> tirx.PrimFunc:
    """Join lowered forms of one function into one, which chooses among them by its symbolic extent when it is called.

    ::

        before   (8, decode), (64, narrow), (None, wide):  three functions of the same parameters, extent m in each
        after    if m <= 8: decode;  else if m <= 64: narrow;  else: wide

    ``bodies`` are the largest extent that each is for, rising, None (any) for the last, and lowered functions
    (:func:`schedules.pipeline.lower_ahead`). An extent of 0 launches nothing.

    Raises
    ------
    NotTaken : for functions without exactly one symbolic extent.
    """
    *_, (_, last) = bodies
    extents = symbolic_extents(last)
    if len(extents) != 1:
        raise NotTaken(
            "bodies are chosen by one symbolic extent",
            value=f"{len(extents)} of them",
            limit=1,
            remedy="give the others their values",
        )
    (extent,) = extents
    chosen, below = [], 0
    for most, function in bodies:
        inside = extent > below if most is None else tirx.all(extent > below, extent <= most)
        chosen.append(_if(inside, _with_parameters_of(function, last)))
        below = most
    return last.with_body(tirx.SeqStmt(chosen) if len(chosen) > 1 else chosen[0])


def _if(condition: tirx.Expr, body: tirx.Stmt) -> tirx.Stmt:
    """Return a statement that is executed under a condition, as a loop of one step or none.

    TVM places barriers while kernels still stand in the host's code, and would refuse those that stand in a kernel's
    loop: it takes the host's condition for one that some threads of the kernel fail.
    """
    return tirx.For(tirx.Var("chosen", "int32"), 0, tirx.Select(condition, 1, 0), tirx.ForKind.SERIAL, body)


def unless_empty(function: tirx.PrimFunc, extents: Sequence[tirx.Var]) -> tirx.PrimFunc:
    """Return a lowered function that launches nothing where one of its result's ``extents`` is 0."""
    some = tirx.all(*(extent > 0 for extent in extents)) if extents else None
    return function if some is None else function.with_body(_if(some, function.body))


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


def _with_parameters_of(function: tirx.PrimFunc, other: tirx.PrimFunc) -> tirx.Stmt:
    """Return a function's body in terms of another's parameters and extents."""
    taken = dict(zip(function.params, other.params))
    taken.update(zip(symbolic_extents(function), symbolic_extents(other)))
    return tvm_ffi.structural_map(function.body, (tirx.Var, lambda var: taken.get(var, var)))
