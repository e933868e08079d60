"""Loop nests written by hand, a statement a line, and what pipelining them may do wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tensorir_ladder.lab.nests import LOOP, Nest

LANES, STEPS, ROWS = 8, 6, 20
ALLOCATED = {  # where no other scope is said
    "near": "shared",
    "next": "shared",
    "wide": "shared",
    "total": "local",
    "part": "local",
    "held": "local",
    "where_to": "local",
    "top": "local",
    "old": "local",
}
SHAPES = {"wide": f"{STEPS + 2}, {LANES}"}


def nest(
    *loop: str,
    before: Sequence[str] = (),
    behind: Sequence[str] = (),
    scopes: dict[str, str] | None = None,
    number: int = 0,
    **how: Any,
) -> Nest:
    """A nest of statements such as ``near[i] = x[k, i]``, each for all lanes i of step k.

    A statement may stand behind ``where CONDITION:`` (of the block, of step and lane), ``if CONDITION:`` (around it) or
    ``inside CONDITION:`` (around its store, of k and i). ``how`` is how the loop is pipelined: fields of a nest.
    """
    scopes = ALLOCATED | (scopes or {})
    written = "\n".join((*before, *loop, *behind))
    lines = [
        "@T.prim_func(s_tir=True)",
        "def main("
        + ", ".join(f'{a}: T.Buffer(({ROWS}, {LANES}), "float32")' for a in "xwyv")
        + f', z: T.Buffer(({LANES},), "float32"), idx: T.Buffer(({ROWS},), "int32")):',
        '    T.func_attr({"global_symbol": "main", "tirx.noalias": True})',
    ]
    for name, scope in scopes.items():
        if re.search(rf"\b{name}\[", written):
            dtype = "int32" if name == "where_to" else "float32"
            lines.append(
                f'    {name} = T.sblock_alloc_buffer(({SHAPES.get(name, LANES)},), "{dtype}", scope="{scope}")'
            )
    for place, statement in enumerate(before):
        lines += _written(f"before{place}", statement, "    ", "")
    lines.append(f"    for {LOOP} in range({STEPS}):")
    for place, statement in enumerate(loop):
        lines += _written(f"s{place}", statement, "        ", LOOP)
    for place, statement in enumerate(behind):
        lines += _written(f"behind{place}", statement, "    ", "")
    return Nest(number, "\n".join(lines) + "\n", (), **({"stages": 3} | how))


def _written(name: str, statement: str, pad: str, step: str) -> list[str]:
    kind, condition, store = re.fullmatch(r"(?:(where|if|inside) (.*?): )?(.*)", statement).groups()
    lines = []
    if kind == "if":
        lines.append(f"{pad}if {condition}:")
        pad += "    "
    lines += [f"{pad}for lane in range({LANES}):", f'{pad}    with T.sblock("{name}"):']
    pad += " " * 8
    axes = f'k, i = T.axis.remap("SS", [{step}, lane])' if step else f"i = T.axis.spatial({LANES}, lane)"
    lines.append(pad + axes)
    if kind == "where":
        lines.append(f"{pad}T.where({condition})")
    if kind == "inside":
        lines.append(f"{pad}if {condition}:")
        pad += "    "
    return [*lines, pad + store]


USE = "y[k, i] = near[i] * T.float32(2)"
SUM = ("total[i] = T.float32(1)",)
COPY = "near[i] = x[k, i]"

# Softmax as attention computes it: a maximum, a sum and a product that every tile rescales.
BEGIN = ("top[i] = T.float32(-100)", "total[i] = T.float32(0)", "held[i] = T.float32(0)")
END = ("z[i] = total[i]", "y[0, i] = top[i]", "v[0, i] = held[i]")
NEW_TOP = ("old[i] = top[i]", "top[i] = T.max(top[i], near[i])")
ONLINE: dict[str, Sequence[str]] = {
    "sum": (
        "near[i] = x[k, i]",
        *NEW_TOP,
        "total[i] = total[i] * T.exp(old[i] - top[i]) + T.exp(near[i] - top[i])",
    ),
    "rescaled first": (
        "near[i] = x[k, i]",
        *NEW_TOP,
        "total[i] = total[i] * T.exp(old[i] - top[i])",
        "total[i] = total[i] + T.exp(near[i] - top[i])",
    ),
    "rescaled last": (
        "near[i] = x[k, i]",
        *NEW_TOP,
        "part[i] = T.exp(near[i] - top[i])",
        "old[i] = T.exp(old[i] - top[i])",
        "total[i] = total[i] * old[i] + part[i]",
    ),
    "attention": (
        "near[i] = x[k, i]",
        "next[i] = w[k, i]",
        *NEW_TOP,
        "part[i] = T.exp(near[i] - top[i])",
        "total[i] = total[i] * T.exp(old[i] - top[i]) + part[i]",
        "held[i] = held[i] * T.exp(old[i] - top[i])",
        "held[i] = held[i] + part[i] * next[i]",
    ),
}

# What the issue that asked for these checks found accepted and wrong, by its names.
BROKEN: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "a copy under where keeps old content": (("where step % 2 == 0: near[i] = x[k, i]", USE), {}),
    "a partial copy": (("where lane < 4 or step == 0: near[i] = x[k, i]", USE), {}),
    "an if around the copy": (("if step % 2 == 0: near[i] = x[k, i]", USE), {}),
    "an if inside the copy": (("inside k % 3 == 0: near[i] = x[k, i]", USE), {}),
    "the previous tile": (
        ("wide[k % 2, i] = x[k, i]", "y[k, i] = T.if_then_else(k > 0, wide[(k + 1) % 2, i], T.float32(0))"),
        {},
    ),
    "the tile of the step before": (("wide[k + 1, i] = x[k, i]", "y[k, i] = wide[k, i] + wide[k + 1, i]"), {}),
    "an update in place, one ahead": ((COPY, USE, "x[k + 1, i] = near[i] + T.float32(1)"), {}),
    "the input written after it is read": (
        (COPY, "y[k, i] = near[i] + w[k, i]", "w[k, i] = x[k + 1, i]"),
        {"stage": (0, 2, 0), "order": (0, 1, 2)},
    ),
    "a write ahead of the copies": ((COPY, USE, "next[i] = w[k + 1, i]", "w[k + 2, i] = near[i] + next[i]"), {}),
    "a copy of a register that compute updates": (
        ("near[i] = x[k, i] + total[i]", "total[i] = total[i] + near[i]"),
        {"before": SUM, "behind": ("z[i] = total[i]",)},
    ),
    "a copy at an address computed in the loop": (
        ("near[i] = x[where_to[i], i]", USE, "where_to[i] = (where_to[i] + idx[k]) % 20"),
        {"before": ("where_to[i] = 0",), "behind": ("z[i] = T.Cast('float32', where_to[i])",)},
    ),
}

# More of these kinds: right, or refused.
CARRY = {"before": SUM, "behind": ("z[i] = total[i]",)}
NEXT = "next[i] = w[k, i]"
ADD = "total[i] = total[i] + near[i]"
ATTACKS: tuple[tuple[Sequence[str], dict[str, Any]], ...] = (
    ((COPY, USE, "near[i] = w[k, i]", "v[k, i] = near[i] * T.float32(3)"), {}),
    ((COPY, USE), {}),
    ((COPY, NEXT, "y[k, i] = near[i] + next[7 - i]"), {}),
    ((COPY, ADD), CARRY),
    ((COPY, ADD, "y[k, i] = total[i]"), CARRY),
    ((COPY, "y[k, i] = total[i]", ADD), CARRY),
    ((COPY, "near[i] = w[k, i]", USE), {}),
    ((COPY, "where lane < 4: near[i] = w[k, i]", USE), {}),
    (("where lane < 4: near[i] = x[k, i]", "where lane >= 4: near[i] = w[k, i]", USE), {}),
    (("where lane < 5: near[i] = x[k, i]", "where lane >= 4: near[i] = w[k, i]", USE), {}),
    (("where lane < 3: near[i] = x[k, i]", "where lane >= 4 or step == 0: near[i] = w[k, i]", USE), {}),
    ((COPY, USE, "near[i] = near[i] + T.float32(1)", "v[k, i] = near[i]"), {}),
    ((COPY, "near[i] = near[i] + T.float32(1)", USE), {}),
    ((COPY, "near[i] = near[i] + total[i]", "total[i] = total[i] + near[i]", USE), CARRY),
    ((COPY, "next[i] = near[7 - i]", "y[k, i] = next[i] + near[i]"), {}),
    ((COPY, "held[i] = near[i]", "y[k, i] = held[i]"), {}),
    (("held[i] = x[k, i]", "near[i] = held[i]", "y[k, i] = near[7 - i]"), {}),
    (("held[i] = x[k, i]", "near[i] = held[i]", "y[k, i] = near[7 - i] + held[i]"), {}),
    (("held[i] = x[k, i]", "near[i] = held[i]", "held[i] = w[k, i]", "y[k, i] = near[7 - i] + held[i]"), {}),
    (("y[k, i] = T.if_then_else(k > 0, near[i], T.float32(0))", COPY, "v[k, i] = near[i]"), {}),
    ((COPY, "y[k, i] = near[i]", "v[k + 1, i] = y[k, i]"), {}),
    ((COPY, "y[k + 1, i] = y[k, i] + near[i]"), {}),
    (("near[i] = y[k, i]", "y[k + 1, i] = near[i] + x[k, i]"), {"before": ("y[0, i] = T.float32(1)",)}),
    (
        ("near[i] = y[k, i]", "y[k + 4, i] = near[i] + x[k, i]"),
        {"before": tuple(f"y[{r}, i] = w[{r}, i]" for r in range(4))},
    ),
    (
        ("near[i] = y[k, i]", "y[k + 2, i] = near[i] + x[k, i]"),
        {"before": tuple(f"y[{r}, i] = w[{r}, i]" for r in range(4))},
    ),
    ((COPY, "x[k, i] = near[i] * T.float32(2)"), {}),
    ((COPY, "x[k + 2, i] = near[i] * T.float32(2)"), {}),
    ((COPY, "x[k + 3, i] = near[i] * T.float32(2)"), {}),
    ((COPY, "x[k + 12, i] = near[i] * T.float32(2)"), {}),
    (("near[i] = x[k + 1, i]", "x[k, i] = near[i] * T.float32(2)"), {}),
    (("near[i] = x[2 * k, i]", "x[2 * k + 1, i] = near[i]"), {}),
    (("near[i] = x[2 * k, i]", "x[k, i] = near[i]"), {}),
    (("near[i] = x[k, i]", "x[2 * k, i] = near[i]"), {}),
    (("near[i] = x[5 - k, i]", "x[k, i] = near[i]"), {}),
    (("near[i] = x[k % 2, i]", "x[(k + 1) % 2, i] = near[i]"), {}),
    (("near[i] = x[k % 3 + 3, i]", "x[k % 3, i] = near[i]"), {}),
    (("near[i] = x[idx[k], i]", "y[k, i] = near[i]"), {}),
    (("near[i] = x[idx[k], i]", "x[idx[k + 1], i] = near[i]"), {}),
    (("near[i] = x[k, i]", "x[idx[k], i] = near[i]"), {}),
    (("near[i] = x[k, i]", "y[idx[k], i] = near[i]"), {}),
    (("near[i] = x[k, i]", "idx[k + 1] = T.Cast('int32', near[i]) % 2 + 3", "v[k, i] = w[idx[k], i]"), {}),
    (("near[i] = w[idx[k], i]", "y[k, i] = near[i]", "idx[k + 1] = k + 2"), {}),
    (("where idx[step] > 5 or step == 0: near[i] = x[k, i]", USE), {}),
    (("if idx[step] > 5: near[i] = x[k, i]", USE), {"before": ("near[i] = T.float32(1)",)}),
    (("if step > 2: near[i] = x[k, i]", "if step > 2: y[k, i] = near[i]"), {}),
    (("if step > 2: near[i] = x[k, i]", "if step > 3: y[k, i] = near[i]"), {}),
    (("if step > 3: near[i] = x[k, i]", "if step > 2: y[k, i] = near[i]"), {"before": ("near[i] = T.float32(1)",)}),
    (("where lane < 6: near[i] = x[k, i]", "where lane < 6: y[k, i] = near[i]"), {}),
    (("where lane < 6: near[i] = x[k, i]", "where lane < 4: y[k, i] = near[i + 2]"), {}),
    (("where lane < 6: near[i] = x[k, i]", "where lane < 5: y[k, i] = near[i + 2]"), {"behind": ("z[i] = near[i]",)}),
    ((COPY, "inside near[i] > T.float32(0): y[k, i] = w[k, i]"), {}),
    ((COPY, "where near[lane] > T.float32(0): y[k, i] = w[k, i]"), {}),
    ((COPY, "if near[0] > T.float32(0): y[k, i] = w[k, i]"), {}),
    ((COPY, "y[k, i] = T.if_then_else(near[i] > T.float32(0), near[i], w[k, i])"), {}),
    ((COPY, USE), {"behind": ("z[i] = near[i]",)}),
    ((COPY, USE), {"before": ("near[i] = T.float32(3)",)}),
    (("wide[k % 2, i] = x[k, i]", "y[k, i] = wide[k % 2, i]"), {}),
    (("wide[k % 2, i] = x[k, i]", "y[k, i] = wide[0, i]"), {"before": ("wide[0, i] = T.float32(3)",)}),
    (("wide[k, i] = x[k, i]", "y[k, i] = wide[k, 7 - i]"), {}),
    (("wide[k, i] = x[k, i]", "y[k, i] = wide[k, i] + T.if_then_else(k > 0, wide[k - 1, i], T.float32(0))"), {}),
    (("wide[k, i] = x[k, i]", "wide[k + 1, i] = w[k, i]", "y[k, i] = wide[k, i] + wide[k + 1, i]"), {}),
    (("wide[k, i] = x[k, i]", "y[k, i] = wide[k, i]"), {"behind": ("z[i] = wide[3, i]",)}),
    ((COPY, "part[i] = T.float32(0)", "part[i] = part[i] + near[i]", "y[k, i] = part[i]"), {}),
    ((COPY, "part[i] = T.if_then_else(k == 0, T.float32(0), part[i]) + near[i]", "y[k, i] = part[i]"), {}),
    ((COPY, "if step == 0: part[i] = T.float32(0)", "part[i] = part[i] + near[i]", "y[k, i] = part[i]"), {}),
    ((COPY, "part[i] = near[i]", "y[k, i] = part[i]", "part[i] = w[k, i]", "v[k, i] = part[i]"), {}),
    ((COPY, "next[i] = T.if_then_else(k > 0, next[i], T.float32(0)) + near[i]", "y[k, i] = next[i]"), {}),
    ((COPY, ADD, "near[i] = total[i]", "y[k, i] = near[7 - i]"), CARRY),
    (("near[i] = total[i]", "y[k, i] = near[7 - i]", "total[i] = total[i] + x[k, i]"), CARRY),
    (("near[i] = x[k, i]", "total[i] = near[i]", "y[k, i] = total[i] + w[k, i]"), CARRY),
    (("near[i] = x[k, i]", "y[k, i] = total[i] + near[i]", "total[i] = near[i]"), CARRY),
    ((COPY, "z[i] = near[i]", "y[k, i] = z[i]"), {}),
    ((COPY, "z[i] = near[i]", "y[k, 7 - i] = z[i] + near[i]"), {}),
    ((COPY, "y[k, i] = near[i]", "y[k, i] = y[k, i] + w[k, i]"), {}),
    ((COPY, "y[0, i] = near[i]", "v[k, i] = y[0, 7 - i]"), {}),
    ((COPY, NEXT, "y[k, i] = near[i]", "y[k + 1, i] = next[i]"), {}),
    ((COPY, NEXT, "y[k + 1, i] = near[i]", "y[k, i] = next[i]"), {}),
)
