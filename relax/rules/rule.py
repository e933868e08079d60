"""Rules of ours for dlight, TVM's library of default schedules: take a function whole, or leave it with a reason.

dlight asks rule after rule for a schedule, and takes the first that is not None. A rule of ours answers by a function
that TVM's stock pipeline compiles (:func:`schedules.pipeline.lower_ahead`), never changes the function it was given,
never lets an exception out, and logs why it left a function to the next one::

    logging.getLogger("tensorir_ladder").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from tensorir_ladder.relax.rules.fast_math import survive_fast_math
from tensorir_ladder.relax.rules.limits import limit_indices
from tensorir_ladder.relax.rules.sums import without_single_steps, without_unread
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import DEVICE_SCOPES, is_constant
from tensorir_ladder.schedules.loops.quotients import divide_without_signs
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead

LOG = logging.getLogger(__name__)
SCHEDULED = "tirx.is_scheduled"  # what dlight marks functions with that it need not look at
BY = "tensorir_ladder.rule"  # attribute of a function: the name of the rule that took it
HOW = "tensorir_ladder.schedule"  # attribute of a function, for people: engine, tiles, ranges
OPAQUE = 8  # include/tvm/relax/op_attr_types.h: what FuseOps fuses with nothing
LONGEST = 200  # characters of an error


@dataclass(frozen=True)
class Failure:
    """A defect of a rule: the function that it failed at, the rule's name, and the exception in a line."""

    function: str
    rule: str
    error: str

    def __str__(self) -> str:
        return f"{self.function}: rule {self.rule} failed: {self.error}"


_names: ContextVar[dict[tirx.PrimFunc, str] | None] = ContextVar("names", default=None)
_failures: ContextVar[list[Failure] | None] = ContextVar("failures", default=None)


@contextlib.contextmanager
def functions_named(mod: tvm.IRModule) -> Iterator[None]:
    """Let rules that fail name a module's functions: those that Relax made do not have their names in them."""
    token = _names.set({f: name.name_hint for name, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)})
    try:
        yield
    finally:
        _names.reset(token)


@contextlib.contextmanager
def failures_kept() -> Iterator[list[Failure]]:
    """Give a list of the failures of rules inside, each of which is logged as well."""
    failures: list[Failure] = []
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)


def note_failure(function: str, rule: str, defect: Exception) -> None:
    """Keep a rule's defect for :func:`failures_kept`, and log it as a warning with its traceback; for ``except``."""
    failure = Failure(function, rule, in_a_line(defect))
    if (kept := _failures.get()) is not None:
        kept.append(failure)
    LOG.warning("%s; the function is left to the next rule", failure, exc_info=True)


def in_a_line(error: Exception) -> str:
    """Write an exception as its type and the line of its message that says most: TVM puts a traceback in front."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    named = type(error).__name__
    told = [line for line in lines if line.startswith(f"{named}:")]
    return (told[-1] if told else f"{named}: {lines[0]}")[:LONGEST]


class NotTaken(IllegalSchedule):
    """A function that a rule leaves to the next one, with the reason."""


class Rule(ScheduleRule):
    """Schedules functions of one shape; what remains to be written is :meth:`schedule`."""

    name = ""
    numbers_elements = False  # whether kernels compare elements' numbers, and not rows and columns apart

    def schedule(self, func: tirx.PrimFunc, target: Target) -> Schedule | tirx.PrimFunc:
        """Return a schedule for a function, or the function already lowered.

        Raises
        ------
        IllegalSchedule : (:class:`NotTaken`) for a function that this rule leaves to the next one.
        """
        raise NotImplementedError

    def take(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
        """Return a function scheduled and lowered for ``target``; IllegalSchedule where this rule leaves it.

        Its arithmetic is right under ``--use_fast_math``, with which TVM compiles (:mod:`.fast_math`).
        A call with extents that 32-bit indices do not reach is refused by the function itself.
        """
        if target.kind.name != "cuda":
            remedy = "leave it to a rule for the target"
            raise NotTaken("kernels are CUDA's", value=target.kind.name, limit="cuda", remedy=remedy)
        if is_scheduled(func):
            raise NotTaken("the function has its schedule", remedy="leave it as it is")
        if _flag(func, "tirx.is_host_func"):
            raise NotTaken("the function is the host's", remedy="leave it as it is")
        if isinstance(func.body, s_tir.SBlockRealize) and relax.analysis.has_reshape_pattern(func):
            raise NotTaken("a reshape moves nothing", remedy="leave it to TVM, which makes a view of it")
        scheduled = self.schedule(prepared(func), target)
        if isinstance(scheduled, Schedule):
            scheduled = lower_ahead(scheduled.mod[scheduled.func_working_on], target)
        _check_buffers(scheduled)
        divided = divide_without_signs()(tvm.IRModule({"main": scheduled}))["main"]
        return closed(divided, self.name, self.numbers_elements)

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Schedule | None:
        """Return the scheduled function as dlight takes it, or None where the next rule has its turn.

        ``tunable`` changes nothing. An exception that is no refusal is a defect: it is logged as a warning with its
        traceback, kept for :func:`failures_kept`, and the function is left, too.
        """
        named = str(func.attrs.get("global_symbol", "a function")) if func.attrs else "a function"
        named = (_names.get() or {}).get(func, named)
        try:
            return Schedule(self.take(func, target))
        except IllegalSchedule as reason:
            LOG.debug("%s left %s: %s", self.name, named, reason)
        except Exception as defect:  # noqa: BLE001 - said by note_failure
            note_failure(named, self.name, defect)
        return None


def prepared(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function as rules are given it: right under fast mathematics, and with sums that are some, and read."""
    return without_unread(without_single_steps(survive_fast_math(func)))


def is_scheduled(function: tirx.PrimFunc) -> bool:
    """Tell whether a function has been scheduled by a rule, ours or dlight's."""
    return _flag(function, SCHEDULED)


def _flag(function: tirx.PrimFunc, name: str) -> bool:
    return bool(function.attrs) and bool(function.attrs.get(name, False))


def _check_buffers(function: tirx.PrimFunc) -> None:
    """Raise NotTaken for a kernel's buffer whose size only run time knows, which TVM refuses when it compiles."""
    allocated: list[tirx.Var] = []
    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, lambda made: allocated.append(made.buffer)))
    for buffer in allocated:
        if buffer.scope() not in DEVICE_SCOPES and not all(map(is_constant, buffer.shape)):
            raise NotTaken(
                "a kernel's buffer would have a size that only run time knows",
                value=f"{buffer.name}, {list(buffer.shape)} in {buffer.scope()}",
                remedy="leave it to the next rule",
            )


def closed(function: tirx.PrimFunc, by: str, numbers_elements: bool) -> tirx.PrimFunc:
    """Return a lowered function as Relax's passes leave it alone: they fuse what is not opaque, and look for a root.

    It refuses calls with extents that 32-bit indices do not reach (:func:`limit_indices`), and says ``by`` which rule
    it was scheduled.
    """
    root = s_tir.SBlock([], [], [], "root", limit_indices(function, numbers_elements).body)
    function = function.with_body(s_tir.SBlockRealize([], tirx.const(True, "bool"), root))
    return function.with_attr("op_pattern", OPAQUE).with_attr(BY, by)
