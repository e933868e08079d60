"""What schedule functions take: their annotations, checked.

An annotation says an argument's type, and what of that type is legal::

    def stage_in_shared(sch: Schedule, block: SBlockRV, operand: Operand, loop: LoopRV, scope: SharedScope = "shared")

:mod:`schedules.faces` checks both before a public function runs. To a type checker, and inside of the package, the
types are the plain ones: ``Operand`` is an ``int``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import FRAGMENT, SHARED_SCOPES, block_name, loop_name, thread_tag
from tensorir_ladder.schedules.tiles import BlockTile

MOST_THREADS = 1024  # of a block, on every GPU
NO_SEQUENCE = (str, bytes, Mapping)  # though they have a length and elements; arrays of numpy and TVM are sequences
SERIAL = (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call by name, the schedule that it changes, and the errors that it raises."""

    function: str
    sch: Schedule
    values: Mapping[str, Any]
    refusal: type[IllegalSchedule] = IllegalSchedule

    def refused(self, problem: str, **more: Any) -> IllegalSchedule:
        """Return the error for one of them, at the first block and the first loop among them."""
        where = {"block": self._first(SBlockRV, block_name), "loop": self._first(LoopRV, loop_name)}
        return self.refusal(f"{self.function}: {problem}", **where | more)

    def _first(self, kind: type, name: Callable[..., str]) -> str | None:
        """Return the name of the first block or loop among the arguments that the schedule has."""
        if not isinstance(self.sch, Schedule):
            return None
        for handle in (found for value in self.values.values() for found in handles_in(value)):
            if isinstance(handle, kind):
                try:
                    return name(self.sch, handle)
                except (ValueError, IndexError):  # it was cut or fused before this call, or is another schedule's
                    continue
        return None


@dataclasses.dataclass(frozen=True)
class FromOn:
    """Numbers from ``least`` on."""

    least: int

    def check(self, arguments: Arguments, name: str, value: int) -> None:
        """Refuse a number below."""
        if int(value) < self.least:
            limit = f"at least {self.least}"
            raise arguments.refused(f"{name} is too small", value=int(value), limit=limit, remedy=f"give {limit}")


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of some texts."""

    choices: tuple[str, ...]

    def check(self, arguments: Arguments, name: str, value: str) -> None:
        """Refuse another text."""
        if value not in self.choices:
            limit = " | ".join(self.choices)
            raise arguments.refused(f"unknown {name}", value=repr(value), limit=limit, remedy="choose one of these")


class SomeAtLeast:
    """A sequence that is not empty."""

    def check(self, arguments: Arguments, name: str, value: Sequence[object]) -> None:
        """Refuse an empty one."""
        if not value:
            raise arguments.refused(f"{name} is empty", value=0, limit="at least 1", remedy="give one or more")


class ReadBy:
    """The position of an operand among the reads of the argument ``block``."""

    def check(self, arguments: Arguments, name: str, value: int) -> None:
        """Refuse what is no position of one."""
        block = arguments.values["block"]
        count = len(arguments.sch.get(block).reads)
        if not 0 <= int(value) < count:
            raise arguments.refused(
                f"no such {name}",
                block=block_name(arguments.sch, block),
                value=int(value),
                limit=f"0 to {count - 1}" if count else "a block that reads something",
                remedy="count the block's reads from 0",
            )


class FitBlock:
    """A number of threads, or several that are multiplied, for one block."""

    def check(self, arguments: Arguments, name: str, value: int | Sequence[int]) -> None:
        """Refuse more than a block can have."""
        sizes = [int(size) for size in (value if isinstance(value, Sequence) else [value])]
        if math.prod(sizes) > MOST_THREADS:
            raise arguments.refused(
                f"{name} are more than a block can have",
                value=" x ".join(map(str, sizes)),
                limit=MOST_THREADS,
                remedy=f"give up to {MOST_THREADS} in all",
            )


class Unbound:
    """A loop that runs one iteration after another: bound to no threads or blocks, not vectorized or parallel."""

    def check(self, arguments: Arguments, name: str, value: LoopRV) -> None:
        """Refuse a loop of another kind, which TVM would turn into the new kind without a word."""
        loop = arguments.sch.get(value)
        if loop.kind not in SERIAL:
            raise arguments.refused(
                f"{name} is no serial loop",
                loop=loop_name(arguments.sch, value),
                value=thread_tag(loop) or tirx.ForKind(loop.kind).name.lower(),
                limit="a serial loop",
                remedy="call it before the loop is bound, or give another loop",
            )


Count = Annotated[int, FromOn(0)]
Positive = Annotated[int, FromOn(1)]
Operand = Annotated[int, ReadBy()]
ThreadCount = Annotated[Positive, FitBlock()]
Threads = Annotated[tuple[Positive, Positive], FitBlock()]
SharedScope = Annotated[str, OneOf(SHARED_SCOPES)]
RegisterScope = Annotated[str, OneOf(("local", FRAGMENT))]
SerialLoop = Annotated[LoopRV, Unbound()]
SerialLoops = Annotated[Sequence[SerialLoop], SomeAtLeast()]


def checked_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], refusal: type[IllegalSchedule]
) -> Arguments:
    """Return a call's arguments; raise ``refusal`` for the first that is not what the function's annotations say.

    Whole numbers and arrays of numpy and TVM become Python's numbers and lists. TypeError where an argument is missing,
    or one too many, as in any call.
    """
    bound = inspect.signature(function).bind(*args, **named)
    bound.apply_defaults()
    hints, values = hints_of(function), bound.arguments
    first = next(iter(values))
    arguments = Arguments(function.__name__, values[first], values, refusal)
    for name, value in values.items():
        _check(arguments, name, value, hints[name])
        values[name] = _as_python(value)
    return arguments


def _as_python(value: Any) -> Any:
    """Return Python's number for a whole one of numpy or TVM, a list for an array of theirs; all else as it is."""
    if isinstance(value, tuple):
        parts = map(_as_python, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)  # a NamedTuple stays one
    if _is_sequence(value):
        return [_as_python(each) for each in value]
    return int(value) if _is_whole(value) else value


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's annotations, their strings evaluated."""
    return typing.get_type_hints(function, include_extras=True)


def handles_in(value: object) -> list[SBlockRV | LoopRV]:
    """Return all blocks and loops in a value: itself, elements of a sequence, fields of a dataclass."""
    if isinstance(value, (SBlockRV, LoopRV)):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, BlockTile)):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    return [found for each in value for found in handles_in(each)] if isinstance(value, (list, tuple)) else []


def _check(arguments: Arguments, name: str, value: Any, hint: Any) -> None:
    """Check one value against one annotation."""
    if get_origin(hint) is Annotated:
        base, *limits = get_args(hint)
        _check(arguments, name, value, base)
        for limit in limits:
            limit.check(arguments, name, value)
        return
    if get_origin(hint) in (typing.Union, types.UnionType):
        fitting = [member for member in get_args(hint) if _is_of(value, member)]
        if not fitting:
            raise _wrong_type(arguments, name, value, hint)
        return _check(arguments, name, value, fitting[0])
    if not _is_of(value, hint):
        if isinstance(hint, type) and issubclass(hint, BlockTile):
            hint.check_family(value)
        raise _wrong_type(arguments, name, value, hint)
    if hint in (SBlockRV, LoopRV):
        _check_handle(arguments, name, value, hint)
    elif get_origin(hint) is tuple and get_args(hint)[-1] is not Ellipsis:
        if len(value) != len(get_args(hint)):
            count, limit = len(value), f"{len(get_args(hint))} numbers"
            raise arguments.refused(f"{name} of another length", value=count, limit=limit, remedy=f"give {limit}")
        for at, (each, of_each) in enumerate(zip(value, get_args(hint))):
            _check(arguments, f"{name}[{at}]", each, of_each)
    elif get_origin(hint) in (tuple, list, Sequence):
        for at, each in enumerate(value):
            _check(arguments, f"{name}[{at}]", each, get_args(hint)[0])
    elif dataclasses.is_dataclass(hint):
        _check_parts(arguments, name, value)


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotation's outermost type."""
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return True
    if hint is type(None):
        return value is None
    if get_origin(hint) is Annotated:
        return _is_of(value, get_args(hint)[0])
    if get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_of(value, member) for member in get_args(hint))
    if get_origin(hint) in (tuple, list, Sequence):
        return _is_sequence(value)
    return _is_whole(value) if hint is int else isinstance(value, hint)


def _is_sequence(value: Any) -> bool:
    return all(hasattr(value, each) for each in ("__len__", "__getitem__")) and not isinstance(value, NO_SEQUENCE)


def _is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, numpy's and TVM's too."""
    if isinstance(value, tirx.IntImm):
        return str(value.ty.dtype) != "bool"
    try:
        return not isinstance(value, bool) and operator.index(value) is not None
    except TypeError:
        return False


def _wrong_type(arguments: Arguments, name: str, value: Any, hint: Any) -> IllegalSchedule:
    how = {SBlockRV: "what sch.get_sblock(name) returns", LoopRV: "one of sch.get_loops(block)"}
    wanted = _plain(hint)
    return arguments.refused(
        f"{name} is of another type",
        value=value if isinstance(value, float) else f"{type(value).__name__} {reprlib.repr(value)}",
        limit=wanted,
        remedy=f"give {how.get(hint, 'one of these types' if '|' in wanted else f'a value of type {wanted}')}",
    )


def _plain(hint: Any) -> str:
    """Write an annotation without the names of modules and without limits."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(_plain, get_args(hint)))
    if get_origin(hint):
        return f"{get_origin(hint).__name__}[{', '.join(map(_plain, get_args(hint)))}]"
    return {type(None): "None", Ellipsis: "..."}.get(hint) or str(getattr(hint, "__name__", hint))


def _check_handle(arguments: Arguments, name: str, handle: SBlockRV | LoopRV, kind: type) -> None:
    """Refuse a handle of another schedule, and one whose block or loop is gone."""
    what = "block" if kind is SBlockRV else "loop"
    try:
        stmt = arguments.sch.get(handle)
    except IndexError:
        problem, value = f"{name} is a {what} of another schedule", "another schedule's"
    except ValueError:
        problem, value = f"{name} is a {what} that is not in the schedule any more", f"a former {what}"
    else:
        if kind is LoopRV or stmt.writes:
            return
        problem, value = f"{name} is a block that computes nothing", "a block without writes"
    call = "sch.get_sblock(name)" if kind is SBlockRV else "sch.get_loops(block)"
    raise arguments.refused(problem, value=value, limit=f"a {what} of sch", remedy=f"give what {call} returns now")


def _check_parts(arguments: Arguments, name: str, value: Any) -> None:
    """Refuse handles of another schedule in a dataclass; loops that were cut or fused meanwhile may be among them."""
    for handle in handles_in(value):
        try:
            arguments.sch.get(handle)
        except IndexError:
            raise arguments.refused(
                f"{name} has blocks or loops of another schedule",
                value="another schedule's",
                limit="those of sch",
                remedy="give what the functions called with this schedule returned",
            ) from None
        except ValueError:
            continue
