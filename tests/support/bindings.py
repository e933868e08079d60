"""Blocks of a scheduled function that leave the domains of their iterators: what TVM takes on trust, and what they
write there lies outside of a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx

from tensorir_ladder.schedules.pipeline.dependences import COUNTED

MOST = 4_000_000  # iterations of the loops that a block's iterators depend on, all of which are gone through
Values = dict[tirx.Var, np.ndarray]


def stray_blocks(function: tirx.PrimFunc) -> list[str]:
    """Go through all iterations of a function's loops, and say which blocks' iterators leave their domains, and how.

    Where a block's condition holds. OverflowError for more iterations than MOST.
    """
    found: list[str] = []
    _walk(function.body, {}, 1, {}, found)
    return found


def _walk(stmt: Any, known: Values, count: int, loops: Mapping[tirx.Var, tirx.For], found: list[str]) -> None:
    """``known``: what variables are, in ``count`` iterations; ``loops``, those around that nothing has depended on."""
    if isinstance(stmt, tirx.For):
        _walk(stmt.body, known, count, {**loops, stmt.loop_var: stmt}, found)
    elif isinstance(stmt, tirx.SeqStmt):
        for each in stmt.seq:
            _walk(each, known, count, loops, found)
    elif isinstance(stmt, tirx.AttrStmt):
        _walk(stmt.body, known, count, loops, found)
    elif isinstance(stmt, s_tir.SBlockRealize):
        _walk_block(stmt, known, count, loops, found)
    elif not isinstance(stmt, tirx.BufferStore | tirx.Evaluate):  # in which there are no blocks
        raise TypeError(f"no way is known through {type(stmt).__name__}")


def _walk_block(realize: Any, known: Values, count: int, loops: Mapping[tirx.Var, tirx.For], found: list[str]) -> None:
    used: list[tirx.Var] = []
    for value in (*realize.iter_values, realize.predicate):
        tvm_ffi.structural_walk(value, (tirx.Var, used.append))
    around = dict(loops)
    for var in used:
        if loop := around.pop(var, None):
            extent = int(loop.extent)
            if (count := count * extent) > MOST:
                raise OverflowError(f"{realize.block.name_hint}: more than {MOST} iterations")
            known = {one: np.repeat(values, extent) for one, values in known.items()}
            known[var] = int(loop.min) + np.tile(np.arange(extent), count // extent)
    holds = np.broadcast_to(np.asarray(_valued(realize.predicate, known), bool), count)
    values = [np.broadcast_to(_valued(value, known), count)[holds] for value in realize.iter_values]
    for iterator, these in zip(realize.block.iter_vars, values):
        first, extent = int(iterator.dom.min), int(iterator.dom.extent)
        if len(these) and not first <= these.min() <= these.max() < first + extent:
            named = f"{realize.block.name_hint}: {iterator.var.name} of {extent}"
            found.append(f"{named} goes from {these.min()} to {these.max()}")
    inside = {var: each[holds] for var, each in known.items()}
    inside |= {iterator.var: these for iterator, these in zip(realize.block.iter_vars, values)}
    if holds.any():
        _walk(realize.block.body, inside, int(holds.sum()), around, found)


def _valued(expr: Any, known: Values) -> Any:
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tirx.Var):
        return known[expr]
    if isinstance(expr, tirx.Not):
        return np.logical_not(_valued(expr.a, known))
    if isinstance(expr, tirx.Cast):
        return _valued(expr.value, known)
    return COUNTED[type(expr)](_valued(expr.a, known), _valued(expr.b, known))
