"""Misuses drawn at random: public schedule functions, each with arguments just outside of what it takes.

A draw takes a function of a group's face, a schedule at some point of its making, and an argument for each parameter,
by the parameter's annotation: blocks, loops, tiles and handles that the schedule has, and numbers within reason. Then
one or two of them become something else: another schedule's block, a loop that is bound or was cut, a number too
large, an empty list, another kind of tile. The call must be refused by an ``IllegalSchedule`` that leaves the schedule
as it was, or be done.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import random
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

import tvm_ffi
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.target import Target

from tensorir_ladder.harness.workers import Tell
from tensorir_ladder.lab.draws import Draws, Outcome
from tensorir_ladder.schedules import loops, memory, pipeline, recipes, tensor_cores, workloads
from tensorir_ladder.schedules.arguments import handles_in, hints_of
from tensorir_ladder.schedules.cost import Machine, assumed_machine
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.faces import takes_schedule
from tensorir_ladder.schedules.inspection import FRAGMENT, SHARED_SCOPES
from tensorir_ladder.schedules.isa import MMA, TF32, MmaInstruction
from tensorir_ladder.schedules.recipes import BandwidthTile, Staging, WeightsTile
from tensorir_ladder.schedules.stamps import Stamps
from tensorir_ladder.schedules.tiles import TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul

GROUPS = ("loops", "memory", "pipeline", "tensor_cores", "recipes")
NUMBERS = (1, 1, 2, 2, 3, 4, 8, 16, 32, 64, 256)
TILES: dict[type, tuple[Any, ...]] = {
    ThreadTile: tuple(map(ThreadTile.parse, ("32x32x16/4x4", "16x16x8/2x2", "24x20x6/4x5"))),
    WarpTile: tuple(map(WarpTile.parse, ("16x32x16/16x32/4x4/1", "32x32x32/32x32/8x4/4"))),
    TensorCoreTile: tuple(map(TensorCoreTile.parse, ("64x64x32/32x32", "32x32x16/16x16"))),
    WarpgroupTile: tuple(map(WarpgroupTile.parse, ("64x64x64/1x1", "128x64x64/2x1", "64x64x64swapped/1x1"))),
    BandwidthTile: (BandwidthTile(64, 1, 2), BandwidthTile(32, 2, 4)),
    Staging: (Staging(2), Staging(1, 1024)),
    WeightsTile: (WeightsTile(1, 1, 1, (4, 1, 1), 8, 32), WeightsTile(2, 4, 1, (1, 1, 1), 16, 16, "columns")),
    MmaInstruction: (*MMA.values(), TF32),
    Planned: (Planned(), Planned(2, (True, False)), Planned(1, (True, True), True, (2, 1), True)),
    Stamps: (Stamps(0), Stamps(3, 8)),
    Machine: (assumed_machine(Target({"kind": "cuda", "arch": "sm_90a"})),),
}
FOREIGN = (None, "matmul", 2.5, 0, -1, 33, 10**9, (), [], (0, 0), (33, 33), (1, 2, 3), {}, True, "32x32x16/4x4", b"x")
SCOPES = (*SHARED_SCOPES, "local", FRAGMENT, "global", "auto", "")


@functools.cache
def public_functions() -> dict[str, Callable[..., Any]]:
    """Return every function of the groups' faces that takes a schedule, by group and name."""
    faces = {group: importlib.import_module(f"tensorir_ladder.schedules.{group}") for group in GROUPS}
    found = {f"{group}.{name}": getattr(face, name) for group, face in faces.items() for name in face.__all__}
    return {name: function for name, function in found.items() if takes_schedule(function)}


@dataclasses.dataclass(frozen=True)
class MisusedFunction:
    """A schedule at some point of its making, and all that its functions have returned."""

    sch: Schedule
    values: tuple[Any, ...] = ()

    @functools.cached_property
    def blocks(self) -> list[SBlockRV]:
        """All blocks, inner ones last."""
        (name,) = (function.name_hint for function in self.sch.mod.get_global_vars())
        found = [self.sch.get_sblock(str(self.sch.mod[name].body.block.name_hint), name)]
        for block in found:  # which grows on the way
            found += self.sch.get_child_blocks(block)
        return found

    @functools.cached_property
    def loops(self) -> list[LoopRV]:
        """All loops, one of several handles each."""
        return [loop for block in self.blocks for loop in self.sch.get_loops(block)]

    def of_kind(self, kind: type) -> list[Any]:
        """Return the values of a type."""
        if kind in (SBlockRV, LoopRV):
            named = [handle for value in self.values for handle in handles_in(value) if isinstance(handle, kind)]
            return [*named, *(self.blocks if kind is SBlockRV else self.loops)]
        return [found for value in self.values for found in _parts(value) if isinstance(found, kind)]


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value, and what dataclasses and sequences in it hold."""
    yield value
    if isinstance(value, (list, tuple)):
        held = list(value)
    else:
        held = [getattr(value, each.name) for each in dataclasses.fields(value)] if _is_record(value) else []
    for each in held:
        yield from _parts(each)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _plain(function: Any) -> MisusedFunction:
    return MisusedFunction(Schedule(function))


def _product(dtype: str = "float32") -> tuple[Schedule, SBlockRV]:
    sch = Schedule(Matmul(70, 64, 128, dtype).prim_func())
    return sch, sch.get_sblock("matmul")


def _staged(pipelined: bool) -> MisusedFunction:
    sch, block = _product()
    staged = recipes.stage_contraction(sch, block, TILES[ThreadTile][0], vectorize=True)
    return MisusedFunction(
        sch, (staged, pipeline.pipeline_loop(sch, staged.loops.k_outer, 2)) if pipelined else (staged,)
    )


def _tensorized() -> MisusedFunction:
    sch, block = _product("float16")
    return MisusedFunction(sch, (tensor_cores.tensorize_contraction(sch, block, TILES[TensorCoreTile][0]),))


def _by_warps() -> MisusedFunction:
    sch, block = _product()
    return MisusedFunction(sch, (recipes.stage_for_warps(sch, block, TILES[WarpTile][0]),))


def _dealt_out() -> MisusedFunction:
    sch, block = _product()
    tile = TILES[WarpTile][1]
    loops.pad_to_tile(sch, block, tile.block)
    lanes = loops.interleave_lanes(sch, block, tile.lanes)
    return MisusedFunction(sch, (block, lanes, loops.tile_for_warps(sch, lanes, tile)))


def _by_warpgroups() -> MisusedFunction:
    sch, block = _product("float16")
    return MisusedFunction(sch, (tensor_cores.stage_for_warpgroups(sch, block, TILES[WarpgroupTile][0]),))


def _by_boxes() -> MisusedFunction:
    sch, block = _product("float16")
    return MisusedFunction(sch, (tensor_cores.stage_for_warpgroups(sch, block, TILES[WarpgroupTile][0], by_tma=True),))


def _split() -> MisusedFunction:
    sch, block = _product()
    return MisusedFunction(sch, (recipes.split_reduction(sch, block, 2, 16),))


def _copied() -> MisusedFunction:
    sch, block = _product("float16")
    *_, reduction = sch.get_loops(block)
    outer, _ = sch.split(reduction, [None, 32])
    return MisusedFunction(sch, (block, outer, memory.stage_in_shared(sch, block, 0, outer), reduction))


SUBJECTS: tuple[Callable[[], MisusedFunction], ...] = (
    lambda: _plain(Matmul(70, 64, 128).prim_func()),
    lambda: _plain(Matmul(64, 64, 64, "float16", "nt").prim_func()),
    lambda: _plain(Matmul(64, 64, 32).prim_func(any_m=True)),
    lambda: _plain(workloads.matmul_bias_relu(Matmul(64, 48, 32))),
    lambda: _plain(workloads.batched_matmul(3, Matmul(32, 32, 32))),
    lambda: _plain(workloads.conv2d_nhwc(1, 8, 8, 4, 8, 3)),
    lambda: _plain(workloads.scale_shift((6, 100))),
    lambda: _plain(workloads.row_sum(5, 96)),
    lambda: _plain(workloads.softmax(4, 64)),
    lambda: _staged(pipelined=False),
    lambda: _staged(pipelined=True),
    _tensorized,
    _by_warps,
    _dealt_out,
    _by_warpgroups,
    _by_boxes,
    _split,
    _copied,
)


class MisuseDrawing:
    """Draws arguments of one call, from one generator: of a subject, and of another one that is foreign to it."""

    def __init__(self, generator: random.Random) -> None:
        """Draw both subjects."""
        self.choose = generator.choice
        self.own, self.other = self.choose(SUBJECTS)(), _unchanged(self.choose(SUBJECTS))

    def value(self, hint: Any) -> Any:
        """Draw a value of an annotation's type; LookupError for a type that nothing here has."""
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self.value(inner[0])
        if origin in (typing.Union, types.UnionType):
            return self.value(self.choose(inner))
        if origin is tuple and inner[-1] is not Ellipsis:
            return tuple(self.value(each) for each in inner)
        if origin in (tuple, list, Sequence):
            return [self.value(inner[0]) for _ in range(self.choose((0, 1, 2, 2, 3)))]
        simple = {type(None): (None,), bool: (False, True), int: NUMBERS, str: SCOPES}
        if hint in simple:
            return self.choose(simple[hint])
        found = [*self.own.of_kind(hint), *TILES.get(hint, ())]
        return self.choose(found or made(hint))

    def foreign(self, hint: Any) -> Any:
        """Draw a value that may be of another type, size or schedule than an annotation says."""
        kind = hint if isinstance(hint, type) else None
        theirs = self.other.of_kind(kind) if kind else []
        some = [*self.other.blocks[:2], *self.other.loops[:2], *self.own.blocks[:1], *self.own.loops[:1]]
        tiles = [tile for family in TILES.values() for tile in family[:1]]
        return self.choose([self.choose(each) for each in (FOREIGN, FOREIGN, some, tiles, theirs) if each])


@functools.cache
def _unchanged(subject: Callable[[], MisusedFunction]) -> MisusedFunction:
    """Make a subject once: nothing is done to it but that its handles are given to other schedules."""
    return subject()


@functools.cache
def made(kind: type) -> list[Any]:
    """Return what any subject has of a type, none of the schedule at hand; LookupError where there is nothing."""
    found = [value for subject in SUBJECTS for value in _unchanged(subject).of_kind(kind)]
    if not found:
        raise LookupError(f"no subject has a {kind.__name__}: add one to SUBJECTS that a public function takes")
    return found


@dataclasses.dataclass(frozen=True)
class Misuse:
    """A call to make: the function's name, the schedule's subject and the arguments besides."""

    name: str
    subject: MisusedFunction
    arguments: dict[str, Any]

    @property
    def features(self) -> tuple[str, ...]:
        """The function."""
        return (self.name,)

    @property
    def text(self) -> str:
        """The call, as Python writes it."""
        return f"{self.name}(sch, {', '.join(f'{name}={_short(value)}' for name, value in self.arguments.items())})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def draw_misuse(seed: int, number: int) -> Misuse:
    """Draw a call; draws take the functions in turn."""
    generator = random.Random(f"misuse {seed} {number}")
    functions = public_functions()
    name = sorted(functions)[number % len(functions)]
    drawing = MisuseDrawing(generator)
    _, *parameters = inspect.signature(functions[name]).parameters
    hints = hints_of(functions[name])
    arguments = {each: drawing.value(hints[each]) for each in parameters}
    for each in generator.sample(parameters, min(len(parameters), generator.choice((1, 1, 2)))):
        arguments[each] = drawing.foreign(hints[each])
    return Misuse(name, drawing.own, arguments)


def try_misuse(number: int, misuse: Misuse) -> Outcome:
    """Make the call: "right" if it was done, "refused" with the schedule as it was, else "failed"."""
    sch, function = misuse.subject.sch, public_functions()[misuse.name]
    before, trace = sch.mod, str(sch.trace)
    alive = [handle for kind in (SBlockRV, LoopRV) for handle in misuse.subject.of_kind(kind) if _is_alive(sch, handle)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(sch, **misuse.arguments)
    except IllegalSchedule as refusal:
        changed = [
            what
            for what, same in (
                ("module", tvm_ffi.structural_equal(sch.mod, before)),
                ("trace", str(sch.trace) == trace),
                ("handles", all(_is_alive(sch, handle) for handle in alive)),
            )
            if not same
        ]
        text = f"{misuse.text}: refused, and changed its {' and '.join(changed)}: {refusal}"
        return Outcome(number, "failed" if changed else "refused", text if changed else str(refusal), misuse.features)
    except Exception as error:  # noqa: BLE001 - what else is raised is what is looked for
        text = f"{misuse.text}: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
        return Outcome(number, "failed", text, misuse.features)
    return Outcome(number, "right", "", misuse.features)


def _is_alive(sch: Schedule, handle: SBlockRV | LoopRV) -> bool:
    try:
        return sch.get(handle) is not None
    except ValueError:
        return False


def run_misuses(draws: Draws, tell: Tell) -> list[Outcome]:
    """Draw some calls and make each; ``tell`` is given each as text before it is made."""
    found = []
    for number in draws.numbers:
        misuse = draw_misuse(draws.seed, number)
        tell(misuse.text)
        found.append(try_misuse(number, misuse))
    return found
