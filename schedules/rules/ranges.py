"""One function for all values of an extent that is known at run time only: a body for each range of values."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx

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
    chosen: tirx.Stmt = last.body
    for most, function in reversed(bodies[:-1]):
        chosen = tirx.IfThenElse(extent <= most, _with_parameters_of(function, last), chosen)
    return last.with_body(tirx.IfThenElse(extent > 0, chosen, None))


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
