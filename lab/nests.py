"""Loop nests drawn at random: pipelined each gives what it gives unpipelined, bit for bit, or is refused.

A nest is TVMScript text: copies into shared memory or registers, statements that use them, and features that make a
pipeline's life hard: conditions, offsets, buffers used twice, recurrences, partial copies, updates in place, gathers.
Values are small whole numbers, so that no order of additions rounds. All of a nest follows from seed and number.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.script import tirx as T

from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.harness.build import lower_schedule
from tensorir_ladder.harness.emulation import emulated
from tensorir_ladder.harness.execution import compile_serial
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.harness.workers import Tell
from tensorir_ladder.lab.draws import Draws, Outcome
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import statements_under
from tensorir_ladder.schedules.pipeline import check_pipeline, keep_last_tile, pipeline_loop, separate_tiles
from tensorir_ladder.schedules.pipeline.pipelining import ORDER, STAGE

LOOP, OTHER_LOOP = "step", "other"
POISON = -77.0
TOGETHER = 20  # nests compiled as one module: most of a compilation is the same for all
REMEDIES = {"separate_tiles": separate_tiles, "keep_last_tile": keep_last_tile}
CALLED = re.compile(rf"call ({'|'.join(REMEDIES)})\(sch, loop, '(\w+)'\)")  # in a refusal's remedy
ORDERS = 3  # of threads, and of when asynchronous copies arrive, in the emulator


class UselessRemedy(Exception):
    """A refusal named a function that refuses the loop itself, or after which the refusal is the same."""


@dataclass(frozen=True)
class Nest:
    """A drawn function, and how its loop is to be pipelined: by a stage count, or by stage and order lists."""

    number: int
    text: str
    features: tuple[str, ...]
    stages: int
    async_copy: bool | str = False
    stage: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @cached_property
    def function(self) -> tvm.tirx.PrimFunc:
        """The text, parsed."""
        return tvm.script.from_source(self.text, extra_vars={"T": T})

    @property
    def on_threads(self) -> bool:
        """True where lanes are threads, so that the nest is a kernel."""
        return "blockIdx.x" in self.text

    def pipelined(self) -> Schedule:
        """Pipeline the loop, with what its refusals' remedies say; IllegalPipeline where they name no function."""
        sch = Schedule(self.function)
        blocks = sch.get_child_blocks(sch.get_sblock("root"))
        loops = [loop for block in blocks for loop in sch.get_loops(block)]
        loop = next(loop for loop in loops if str(sch.get(loop).loop_var.name) == LOOP)
        others = [loop for loop in loops if str(sch.get(loop).loop_var.name) == OTHER_LOOP]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # more stages than iterations
            self._pipeline(sch, loop, list(self.stage), list(self.order))
            if others and self.number % 2 and not self.stage:
                self._pipeline(sch, others[0], [], [])
        return sch

    def _pipeline(self, sch: Schedule, loop: LoopRV, stage: list[int], order: list[int]) -> None:
        """Pipeline a loop by lists where they fit, by a stage count where they do not, and follow remedies."""
        listed = bool(stage) and len(stage) == len(statements_under(sch, loop))
        followed: list[str] = []
        while True:
            try:
                if not listed:
                    pipeline_loop(sch, loop, self.stages, self.async_copy)
                    return
                check_pipeline(sch, loop, stage, order, [0] if self.async_copy is True else [])
                sch.annotate(loop, STAGE, stage)
                sch.annotate(loop, ORDER, order)
                return
            except IllegalPipeline as refused:
                call = CALLED.search(refused.remedy)
                if call is None:
                    raise
                if call.group() in followed:
                    raise UselessRemedy(str(refused)) from refused
            followed.append(call.group())
            try:
                REMEDIES[call.group(1)](sch, loop, call.group(2))
            except IllegalPipeline as refused:
                raise UselessRemedy(str(refused)) from refused
            copies = len(statements_under(sch, loop)) - len(stage) if listed else 0  # of the last tile
            order += range(len(stage), len(stage) + copies)
            stage += [max(stage)] * copies if copies else []


class _Drawing:
    """One nest in the making: statements before, in and behind the loop."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.lanes, self.steps = choose.choice((4, 8)), choose.randint(1, 7)
        self.rows = 2 * self.steps + 4
        self.outer = choose.random() < 0.15
        self.threads = choose.random() < 0.3
        self.copies: list[str] = []
        self.middle: list[str] = []
        self.uses: list[str] = []
        self.before: list[str] = []
        self.behind: list[str] = []
        self.sibling: list[str] = []  # the statements of a second loop, before the one that is pipelined or behind it
        self.sibling_first = False
        self.around = ""  # the condition of an if around the loop's body
        self.allocated: dict[str, str] = {}
        self.features: list[str] = []
        self._names = 0

    def buffer(self, name: str, shape: str | int = "", scope: str = "shared", dtype: str = "float32") -> str:
        """Allocate a buffer of all lanes, or of a shape."""
        self.allocated[name] = f'T.sblock_alloc_buffer(({shape or self.lanes},), "{dtype}", scope="{scope}")'
        return name

    def lane_loop(self) -> str:
        """Begin a loop over lanes."""
        return f'T.thread_binding({self.lanes}, thread="threadIdx.x")' if self.threads else f"range({self.lanes})"

    def each_lane(self, target: str, value: str, where: str = "", under: str = "", inside: str = "") -> str:
        """Write a statement of the loop: a block for each lane i of step k; ``where`` knows step and lane."""
        self._names += 1
        name, pad, lines = f"s{self._names}", "", []
        if under:
            lines.append(f"if {under}:")
            pad = "    "
        ragged = not where and not self.threads and self.choose.random() < 0.2
        if ragged:
            lines.append(f"{pad}for lane_0, lane_1 in T.grid({-(-self.lanes // 3)}, 3):")
        else:
            lines.append(f"{pad}for lane in {self.lane_loop()}:")
        lines.append(f'{pad}    with T.sblock("{name}"):')
        pad += " " * 8
        if ragged:
            where = f"lane_0 * 3 + lane_1 < {self.lanes}"
            lines.append(f"{pad}k = T.axis.spatial({self.steps}, step)")
            lines.append(f"{pad}i = T.axis.spatial({self.lanes}, lane_0 * 3 + lane_1)")
        else:
            lines.append(f'{pad}k, i = T.axis.remap("SS", [step, lane])')
        if where:
            lines.append(f"{pad}T.where({where})")
        if inside:
            lines.append(f"{pad}if {inside}:")
            pad += "    "
        lines.append(f"{pad}{target} = {value}")
        return "\n".join(lines)

    def once(self, target: str, value: str) -> str:
        """Write a statement before or behind the loop, for each lane i."""
        self._names += 1
        return (
            f"for lane in {self.lane_loop()}:\n"
            f'    with T.sblock("o{self._names}"):\n'
            f"        i = T.axis.spatial({self.lanes}, lane)\n"
            f"        {target} = {value}"
        )

    def source(self, of: str = "") -> str:
        """Choose what a copy copies."""
        a, last = of or self.choose.choice("xw"), self.lanes - 1
        return self.choose.choice(
            (
                f"{a}[k, i]",
                f"{a}[k, i]",
                f"{a}[k, {last} - i]",
                f"{a}[k + 1, i]",
                f"{a}[2 * k, i]",
                f"{a}[idx[k], i]",
                f"T.if_then_else(k * {self.lanes} + i < {self.steps * self.lanes - 3}, {a}[k, i], T.float32(0))",
            )
        )

    def text(self) -> str:
        """Write the function."""
        body = [*self.copies, *self.middle, *self.uses]
        extent = f"range({self.steps})"
        lines = [
            "@T.prim_func(s_tir=True)",
            "def main("
            + ", ".join(f'{a}: T.Buffer(({self.rows}, {self.lanes}), "float32")' for a in "xwyv")
            + f', z: T.Buffer(({self.lanes},), "float32"), idx: T.Buffer(({self.rows},), "int32")):',
            '    T.func_attr({"global_symbol": "main", "tirx.noalias": True})',
            *(f"    {name} = {how}" for name, how in self.allocated.items()),
        ]
        depth = 1
        if self.threads:
            lines.append('    for block in T.thread_binding(1, thread="blockIdx.x"):')
            depth = 2
        lines += [_indented(part, depth) for part in self.before]
        if self.outer:
            lines.append("    " * depth + "for turn in range(2):")
        inner = depth + self.outer
        sibling = ["    " * inner + f"for {OTHER_LOOP} in {extent}:"] if self.sibling else []
        sibling += [_indented(re.sub(rf"\b{LOOP}\b", OTHER_LOOP, part), inner + 1) for part in self.sibling]
        lines += sibling if self.sibling_first else []
        lines.append("    " * inner + f"for {LOOP} in {extent}:")
        lines += ["    " * (inner + 1) + f"if {self.around}:"] if self.around else []
        lines += [_indented(part, inner + 1 + bool(self.around)) for part in body]
        lines += sibling if not self.sibling_first else []
        lines += [_indented(part, depth) for part in self.behind]
        return "\n".join(lines) + "\n"


def _indented(part: str, depth: int) -> str:
    return "\n".join("    " * depth + line for line in part.splitlines())


# What most nests are made of


def _copy(d: _Drawing, name: str) -> str:
    """Draw a copy in an ordinary form; returns how its lane i is read, with {} in the place of i."""
    scope = "local" if d.choose.random() < 0.15 and not d.threads else "shared"
    form = d.choose.choice(("plain", "plain", "plain", "tile", "halves", "rows"))
    if form == "tile":
        d.buffer(name, d.steps * d.lanes, scope)
        d.copies.append(d.each_lane(f"{name}[k * {d.lanes} + i]", d.source()))
        return f"{name}[k * {d.lanes} + {{}}]"
    if form == "rows":
        d.buffer(name, f"{d.steps}, {d.lanes}", scope)
        d.copies.append(d.each_lane(f"{name}[k, i]", d.source()))
        return f"{name}[k, {{}}]"
    d.buffer(name, scope=scope)
    if form == "halves" and not d.threads:
        half = d.lanes // 2
        d.copies.append(d.each_lane(f"{name}[i]", d.source(), where=f"lane < {half}"))
        d.copies.append(d.each_lane(f"{name}[i]", d.source(), where=f"lane >= {half}"))
    else:
        d.copies.append(d.each_lane(f"{name}[i]", d.source()))
    return f"{name}[{{}}]"


def _ordinary(d: _Drawing) -> list[str]:
    """Draw copies, perhaps a transform, and their uses; returns how copies are read."""
    reads = [_copy(d, name) for name in ("s0", "s1")[: d.choose.randint(1, 2)]]
    if d.choose.random() < 0.3:
        source = d.choose.choice(reads)
        scope = d.choose.choice(("shared", "local"))
        d.buffer("t0", scope="shared" if d.threads else scope)  # another lane's registers nobody can read
        index = "i" if "local" in d.allocated["t0"] or d.threads else d.choose.choice(("i", f"{d.lanes - 1} - i"))
        d.middle.append(d.each_lane("t0[i]", f"{source.format(index)} * T.float32(2)"))
        reads.append("t0[{}]")
    mixed = " + ".join(read.format("i") for read in reads)
    kind = d.choose.choice(("sum", "store", "sum and store", "product a step", "recurrence"))
    if "sum" in kind:
        d.buffer("r0", scope="local")
        d.before.append(d.once("r0[i]", "T.float32(1)"))
        d.uses.append(d.each_lane("r0[i]", f"r0[i] + {mixed}"))
        d.behind.append(d.once("z[i]", "r0[i]"))
    if "store" in kind:
        value = "r0[i]" if "sum" in kind else d.choose.choice(reads).format(f"{d.lanes - 1} - i") + f" + {mixed}"
        d.uses.append(d.each_lane("y[k, i]", value))
    if kind == "product a step":
        d.buffer("r1", scope="local")
        d.middle.append(d.each_lane("r1[i]", "T.float32(0)"))
        d.uses.append(d.each_lane("r1[i]", f"r1[i] + {mixed}"))
        d.uses.append(d.each_lane("y[k, i]", "r1[i] * T.float32(3)"))
    if kind == "recurrence":
        d.uses.append(d.each_lane("y[k + 1, i]", f"y[k, i] + {mixed}"))
    return reads


# What makes a pipeline's life hard: each a feature, of which a nest has none, one or two


def _two_fills(d: _Drawing, reads: list[str]) -> None:
    """One buffer is filled again once it is used."""
    d.uses.append(d.each_lane(reads[0].format("i"), d.source("w")))
    d.uses.append(d.each_lane("v[k + 2, i]", reads[0].format("i")))


def _overlapping_fill(d: _Drawing, reads: list[str]) -> None:
    """A second copy over a part of the first."""
    d.copies.append(d.each_lane(reads[0].format("i"), d.source("w"), where=f"lane < {d.lanes // 2}"))


def _kept_content(d: _Drawing, _: list[str]) -> None:
    """A copy that leaves what was there, in some steps or lanes."""
    how = d.choose.choice(("where step", "where lane", "if around", "if inside", "data"))
    d.buffer("h0")
    some, lanes = "{} % 2 == 0", f"{{}} < {d.lanes // 2} or {{}} == 0"
    where = {
        "where step": some.format("step"),
        "where lane": lanes.format("lane", "step"),
        "data": "step == 0 or idx[step] > 1",
    }
    d.copies.append(
        d.each_lane(
            "h0[i]",
            d.source(),
            where=where.get(how, ""),
            under=some.format("step") if how == "if around" else "",
            inside=d.choose.choice((some.format("k"), lanes.format("i", "k"))) if how == "if inside" else "",
        )
    )
    d.uses.append(d.each_lane("v[k + 3, i]", "h0[i]"))


def _either_source(d: _Drawing, _: list[str]) -> None:
    """A copy from one of two places, by the step: all of it is written always."""
    d.buffer("h1")
    first = d.each_lane("h1[i]", "x[k, i]", under="step < 2")
    second = d.each_lane("h1[i]", "w[k, i]").replace("\n", "\n    ")
    d.copies.append(f"{first}\nelse:\n    {second}")
    d.uses.append(d.each_lane("v[k + 1, i]", "h1[i]"))


def _previous_tile(d: _Drawing, _: list[str]) -> None:
    """A ring made by hand, or a copy that is read a step later."""
    if d.choose.random() < 0.5:
        d.buffer("p0", f"2, {d.lanes}")
        d.copies.append(d.each_lane("p0[k % 2, i]", d.source()))
        d.uses.append(d.each_lane("v[k, i]", "T.if_then_else(k > 0, p0[(k + 1) % 2, i], T.float32(0)) + p0[k % 2, i]"))
    else:
        d.buffer("p0")
        d.copies.insert(0, d.each_lane("v[k, i]", "T.if_then_else(k > 0, p0[i], T.float32(0))"))
        d.copies.append(d.each_lane("p0[i]", d.source()))
        d.uses.append(d.each_lane("v[k + 1, i]", "p0[i] + T.float32(1)"))


def _in_place(d: _Drawing, reads: list[str]) -> None:
    """The input is written where it is, was or will be read."""
    row = d.choose.choice(("k", "k + 1", "k + 2", "k + 4", "2 * k + 1", f"k + {d.steps + 2}"))
    place = d.choose.choice((d.copies, d.middle, d.uses, d.uses, d.uses))
    place.insert(
        d.choose.randint(0, len(place)),
        d.each_lane(f"{d.choose.choice('xw')}[{row}, i]", f"{reads[0].format('i')} + x[k + 3, i]"),
    )


def _copy_of_a_register(d: _Drawing, reads: list[str]) -> None:
    """A copy that reads what the computation updates."""
    d.buffer("c0", scope="local")
    d.before.append(d.once("c0[i]", "T.float32(2)"))
    d.buffer("c1")
    d.copies.append(d.each_lane("c1[i]", "x[k, i] + c0[i]"))
    d.uses.append(d.each_lane("c0[i]", d.choose.choice(("c0[i] + c1[i]", f"c0[i] + {reads[0].format('i')}"))))
    d.behind.append(d.once("w[0, i]", "c0[i]"))


def _computed_address(d: _Drawing, _: list[str]) -> None:
    """A copy from an address that the loop computes."""
    d.buffer("a0", scope="local", dtype="int32")
    d.before.append(d.once("a0[i]", "0"))
    d.buffer("a1")
    d.copies.append(d.each_lane("a1[i]", "x[a0[i], i]"))
    update = d.each_lane("a0[i]", f"(a0[i] + idx[k]) % {d.rows}")
    d.choose.choice((d.copies, d.uses)).append(update)
    d.uses.append(d.each_lane("v[k + 2, i]", "a1[i]"))


def _copy_of_a_result(d: _Drawing, reads: list[str]) -> None:
    """A copy of what an earlier step stored."""
    far = d.choose.choice((1, 2, 3, 4))
    d.buffer("b0")
    d.copies.append(d.each_lane("b0[i]", "v[k, i]"))
    d.uses.append(d.each_lane(f"v[k + {far}, i]", f"b0[i] + {reads[0].format('i')}"))


def _condition_on_a_copy(d: _Drawing, reads: list[str]) -> None:
    """A copy that is read in a condition or an index only."""
    how = d.choose.choice(("where", "inside", "around", "index"))
    read = reads[0]
    if how == "index":
        d.buffer("i0", dtype="int32")
        d.copies.append(d.each_lane("i0[i]", f"idx[(k + i) % {d.rows}]"))
        d.uses.append(d.each_lane("v[k, i]", "x[i0[i], i]"))
        return
    positive = f"{read} > T.float32(0)"
    d.uses.append(
        d.each_lane(
            "v[k, i]",
            "w[k, i]",
            where=positive.format("lane").replace("[k", "[step") if how == "where" else "",
            inside=positive.format("i") if how == "inside" else "",
            under=positive.format("0").replace("[k", "[step") if how == "around" else "",
        )
    )


def _changed_copy(d: _Drawing, reads: list[str]) -> None:
    """A copy that is changed in place before, between or after its uses."""
    place = d.choose.choice((d.middle, d.uses))
    place.append(d.each_lane(reads[0].format("i"), f"{reads[0].format('i')} + T.float32(1)"))
    d.uses.append(d.each_lane("v[k + 1, i]", reads[0].format("i")))


def _carried(d: _Drawing, reads: list[str]) -> None:
    """A sum over the steps in a buffer that nothing sets before the loop."""
    d.buffer("q0", scope=d.choose.choice(("local", "shared")))
    d.uses.append(d.each_lane("q0[i]", f"T.if_then_else(k == 0, T.float32(0), q0[i]) + {reads[0].format('i')}"))
    d.uses.append(d.each_lane("v[k + 1, i]", "q0[i]"))


def _read_behind(d: _Drawing, reads: list[str]) -> None:
    """A copy that is read after the loop once more: filled whole, in part, in halves or by turns, changed or not."""
    how = d.choose.choice(("whole", "whole", "part", "halves", "by turns"))
    lane, half = f"i + k % 2 * {d.lanes}" if how == "by turns" else "i", f"lane < {d.lanes // 2}"
    d.buffer("e0", 2 * d.lanes)
    if how in ("part", "by turns"):
        d.before += [d.once("e0[i]", "T.float32(5)"), d.once(f"e0[i + {d.lanes}]", "T.float32(6)")]
    d.copies.append(d.each_lane(f"e0[{lane}]", d.source(), where=half if how in ("part", "halves") else ""))
    if how == "halves":
        d.copies.append(d.each_lane("e0[i]", d.source(), where=half.replace("<", ">=")))
    if d.choose.random() < 0.2:
        d.uses.append(d.each_lane(f"e0[{lane}]", f"e0[{lane}] + T.float32(1)", where=half))
    d.uses.append(
        d.each_lane("v[k, i]", f"e0[{lane}]", where=half if how == "part" and d.choose.random() < 0.7 else "")
    )
    d.behind.append(d.once("w[1, i]", f"e0[{d.choose.choice(('i', f'{d.lanes - 1} - i'))}]"))
    if how == "by turns":
        d.behind.append(d.once("w[2, i]", f"e0[i + {d.lanes}]"))


def _chain(d: _Drawing, reads: list[str]) -> None:
    """Copies of copies, through registers or shared memory."""
    d.buffer("l0", scope="local")
    d.buffer("l1")
    d.copies.append(d.each_lane("l0[i]", d.source()))
    d.copies.append(d.each_lane("l1[i]", "l0[i]"))
    d.uses.append(d.each_lane("v[k, i]", f"l1[{d.lanes - 1} - i]"))


def _stale_part(d: _Drawing, _: list[str]) -> None:
    """A read of more than the copy writes, beside it: what an earlier step has left."""
    d.buffer("g0", 2 * d.lanes)
    d.before.append(d.once("g0[i]", "T.float32(1)"))
    d.before.append(d.once(f"g0[i + {d.lanes}]", "T.float32(2)"))
    d.copies.append(d.each_lane(f"g0[i + k % 2 * {d.lanes}]", d.source()))
    d.uses.append(d.each_lane("v[k, i]", f"g0[{2 * d.lanes - 1} - i]"))


def _two_tiles(d: _Drawing, reads: list[str]) -> None:
    """One scratch is filled, used, filled with another tile and used again."""
    d.buffer("d0")
    uses = [f"v[k, i] = d0[{index}]" for index in (("i",) if d.threads else ("i", f"{d.lanes - 1} - i"))]
    first, second = d.choose.choice(uses), "y[k, i] = d0[i] + T.float32(3)"
    parts = [("d0[i]", d.source("x")), first.split(" = "), ("d0[i]", d.source("w")), second.split(" = ")]
    if d.choose.random() < 0.3:
        parts[2:3] = [("d0[i]", f"d0[i] + {reads[0].format('i')}")]
    d.uses += [d.each_lane(target, value) for target, value in parts]
    if d.choose.random() < 0.3:
        d.behind.append(d.once("w[4, i]", "d0[i]"))


def _sibling_loop(d: _Drawing, _: list[str]) -> None:
    """A second loop fills and uses the same buffer; it is pipelined, too, where it can be."""
    d.buffer("m0")
    d.copies.append(d.each_lane("m0[i]", d.source()))
    d.uses.append(d.each_lane("v[k, i]", "m0[i]"))
    part = d.choose.choice(("", "", f"lane < {d.lanes // 2}"))
    target = f"y[k + {d.steps + 3}, i]" if d.threads else "w[k, i]"  # no barrier stands behind global stores
    d.sibling = [d.each_lane("m0[i]", d.source(), where=part), d.each_lane(target, "m0[i] * T.float32(2)")]
    d.sibling_first = d.choose.random() < 0.5
    if part and d.sibling_first:
        d.before.append(d.once("m0[i]", "T.float32(4)"))
    if d.choose.random() < 0.3:
        d.behind.append(d.once("w[5, i]", "m0[i]"))


def _online_softmax(d: _Drawing, reads: list[str]) -> None:
    """A maximum of the tiles so far, and a sum that each tile rescales by how far the maximum grew."""
    for name, value in (("n0", "-8"), ("n1", "0"), ("n2", "0")):
        d.buffer(name, scope="local")
        d.before.append(d.once(f"{name}[i]", f"T.float32({value})"))
    read = reads[0].format("i")
    d.uses.append(d.each_lane("n1[i]", "n0[i]"))
    d.uses.append(d.each_lane("n0[i]", f"T.max(n0[i], {read})"))
    scale, addend = "T.float32(2) - (n0[i] - n1[i])", f"{read} - n0[i]"
    if d.choose.random() < 0.5:
        d.uses.append(d.each_lane("n2[i]", f"n2[i] * ({scale}) + {addend}"))
    else:
        d.uses.append(d.each_lane("n2[i]", f"n2[i] * ({scale})"))
        d.uses.append(d.each_lane("n2[i]", f"n2[i] + {addend}"))
    d.behind.append(d.once("w[2, i]", "n2[i]"))
    d.behind.append(d.once("w[3, i]", "n0[i]"))


def _if_around(d: _Drawing, _: list[str]) -> None:
    """A condition around the loop's whole body, of the step or of data."""
    d.around = d.choose.choice(("step < 2", "step % 2 == 0", "step > 0", "idx[step] > 2"))


FEATURES: dict[str, Callable[[_Drawing, list[str]], None]] = {
    make.__name__.strip("_").replace("_", " "): make
    for make in (
        _two_fills,
        _overlapping_fill,
        _kept_content,
        _either_source,
        _previous_tile,
        _in_place,
        _copy_of_a_register,
        _computed_address,
        _copy_of_a_result,
        _condition_on_a_copy,
        _changed_copy,
        _carried,
        _read_behind,
        _chain,
        _stale_part,
        _two_tiles,
        _sibling_loop,
        _online_softmax,
        _if_around,
    )
}


def draw(seed: int, number: int) -> Nest:
    """Draw a nest: about half of them ordinary, the others with one or two features."""
    choose = random.Random(f"{seed}-{number}")
    drawing = _Drawing(choose)
    reads = _ordinary(drawing)
    features = choose.sample(list(FEATURES), choose.choice((0, 0, 0, 0, 1, 1, 2)))
    for feature in features:
        FEATURES[feature](drawing, reads)
    stages = choose.choice((2, 2, 3, 4))
    stage: list[int] = []
    order: list[int] = []
    if choose.random() < 0.3:
        copies, others = len(drawing.copies), len(drawing.middle) + len(drawing.uses)
        late = stages - 1
        stage = [0] * copies + [late + (choose.random() < 0.15) for _ in range(others)]
        if choose.random() < 0.3:
            stage[choose.randrange(len(stage))] = choose.randint(0, stages)
        order = list(range(copies + others))
        if choose.random() < 0.5:
            order = [*range(others, others + copies), *range(others)]
        if choose.random() < 0.2:
            choose.shuffle(order)
    asynchronous = choose.choice((False, "auto")) if not stage else choose.choice((False, True))
    return Nest(number, drawing.text(), tuple(features), stages, asynchronous, tuple(stage), tuple(order))


def run_nests(nests: Sequence[Nest]) -> Iterator[Outcome]:
    """Run nests, pipelined and not, many compiled together; yields what became of each, in their order."""
    for start in range(0, len(nests), TOGETHER):
        yield from _run_together(nests[start : start + TOGETHER])


def run_draws(draws: Draws, tell: Tell) -> list[Outcome]:
    """Run draws, saying what is under way: work for a process of its own."""
    nests = [draw(draws.seed, number) for number in draws.numbers]
    tell(f"nests {draws.numbers[0]} to {draws.numbers[-1]}")
    outcomes = [replace(found, features=nest.features) for nest, found in zip(nests, run_nests(nests))]
    for place, nest in enumerate(nests):
        if outcomes[place].what == "right" and nest.on_threads and draws.emulate and nest.number % draws.emulate == 0:
            tell(f"nest {nest.number} in the emulator")
            outcomes[place] = emulated_outcome(nest, outcomes[place])
    return outcomes


def emulated_outcome(nest: Nest, outcome: Outcome) -> Outcome:
    """Run the CUDA of an accepted nest, too: waits, barriers and threads side by side, which LLVM has not."""
    sch, machine, label = nest.pipelined(), machine_for(DEFAULT_ARCH), f"nest {nest.number}"
    try:
        lower_schedule(Schedule(nest.function), machine, label)
    except tvm.error.InternalError:
        return outcome  # unpipelined, too, TVM makes no CUDA of shared memory that is read in a condition
    expected = _outputs([nest], {nest.number: sch})[nest.number][0]
    try:
        program = emulated(lower_schedule(sch, machine, label), operands=())  # all arrays are compared
        for seed in range(ORDERS):
            arrays = data(nest)
            program(*arrays, seed=seed)
            if different := _different(expected, arrays):
                return replace(outcome, what="wrong", text=f"{different} in the emulator, order {seed}")
    except KernelFault as fault:
        return replace(outcome, what="wrong", text=f"in the emulator: {fault}")
    return replace(outcome, emulated=True)


def _run_together(nests: Sequence[Nest]) -> Iterator[Outcome]:
    accepted: dict[int, Schedule] = {}
    reasons: dict[int, str] = {}
    failures: dict[int, str] = {}
    for nest in nests:
        try:
            accepted[nest.number] = nest.pipelined()
        except IllegalPipeline as refused:
            reasons[nest.number] = str(refused)
        except UselessRemedy as useless:
            failures[nest.number] = f"useless remedy: {useless}"
    chosen = [nest for nest in nests if nest.number in accepted]
    try:
        outputs = _outputs(chosen, accepted)
    except Exception:
        if len(chosen) == 1:
            raise
        outputs = {}
    for nest in nests:
        if nest.number in reasons:
            yield Outcome(nest.number, "refused", reasons[nest.number])
        elif nest.number in failures:
            yield Outcome(nest.number, "failed", failures[nest.number])
        else:
            yield _compared(nest, accepted[nest.number], outputs.get(nest.number))


def _compared(nest: Nest, sch: Schedule, outputs: Any) -> Outcome:
    if outputs is None:
        try:
            outputs = _outputs([nest], {nest.number: sch})[nest.number]
        except Exception as error:  # noqa: BLE001 - an accepted nest that TVM cannot lower is what is looked for
            return Outcome(nest.number, "failed", f"{type(error).__name__}: {str(error)[-300:]}")
    plain, pipelined = outputs
    different = _different(plain, pipelined)
    return Outcome(nest.number, "wrong" if different else "right", different)


def _different(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> str:
    return ", ".join(name for name, one, other in zip("xwyvz", ones, others) if not np.array_equal(one, other))


def _outputs(nests: Sequence[Nest], accepted: dict[int, Schedule]) -> dict[int, tuple[list[np.ndarray], ...]]:
    functions = {}
    for nest in nests:
        for name, function in (("plain", nest.function), ("pipelined", accepted[nest.number].mod["main"])):
            symbol = f"{name}{nest.number}"
            functions[symbol] = function.with_attr("global_symbol", symbol)
    compiled = compile_serial(tvm.IRModule(functions)) if functions else {}
    return {
        nest.number: tuple(_arrays(compiled[f"{name}{nest.number}"], nest) for name in ("plain", "pipelined"))
        for nest in nests
    }


def _arrays(run: Callable[..., None], nest: Nest) -> list[np.ndarray]:
    """Run a function on the same data as its fellow; returns every array that it may write."""
    tensors = [tvm.runtime.tensor(array) for array in data(nest)]
    run(*tensors)
    return [tensor.numpy() for tensor in tensors[:5]]


def data(nest: Nest) -> list[np.ndarray]:
    """Make a nest's arrays: two inputs of small whole numbers, three outputs of poison, and indices of rows."""
    shapes = [tuple(int(extent) for extent in p.ty.shape) for p in nest.function.params]
    values = np.random.default_rng(nest.number)
    x, w = (values.integers(-3, 4, shape).astype(np.float32) for shape in shapes[:2])
    y, v, z = (np.full(shape, POISON, np.float32) for shape in shapes[2:5])
    return [x, w, y, v, z, values.integers(0, shapes[5][0], shapes[5]).astype(np.int32)]
