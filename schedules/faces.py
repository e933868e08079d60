"""The face of a group: its public functions, each of which is refused as a whole or done as a whole.

The package of a group gets its names from here (:func:`attach`). What it hands out for a function that takes a
schedule is the function behind a guard::

    memory.stage_in_shared(sch, block, 0, loop)     arguments are checked (:mod:`schedules.arguments`)
                                                    the schedule is copied: 0.2 ms
                                                    staging.stage_in_shared(sch, block, 0, loop)
                                                    on an error: the copy takes the schedule's place

An error of TVM becomes an :class:`IllegalSchedule` with TVM's reason; errors of Python's own types, which a mistake in
this package would raise, stay what they are. Within the package functions call each other without a guard.

Importing any group registers the compilation pipeline :data:`schedules.passes.PIPELINE`, which lowers what functions
made.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import lazy_loader
import tvm
import tvm_ffi
from tvm.error import InternalError
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.tirx.compilation_pipeline import register_tir_pipeline

from tensorir_ladder.schedules.arguments import Arguments, checked_arguments
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.passes import PIPELINE

SHOWN = 300  # characters of TVM's reason
TVM_ERRORS = (ScheduleError, InternalError)
PASSED_ON = (ValueError, IndexError, TypeError)  # Python's types, which TVM's functions raise, too


def attach(
    package: str, file: str, refusal: type[IllegalSchedule] = IllegalSchedule
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package, from its stub; functions are guarded.

    ``refusal`` is the error for wrong arguments.
    """
    load, names, public = lazy_loader.attach_stub(package, file)

    def guarded_name(name: str) -> Any:
        value = load(name)
        if takes_schedule(value):
            value = guarded(value, refusal)
        vars(sys.modules[package])[name] = value  # so that this is called once for each name
        return value

    return guarded_name, names, public


def takes_schedule(value: object) -> bool:
    """Return whether something is a function whose first argument is a schedule."""
    if not inspect.isfunction(value):
        return False
    first = next(iter(inspect.signature(value).parameters.values()), None)
    return first is not None and first.annotation in (Schedule, "Schedule")


def guarded(function: Callable[..., Any], refusal: type[IllegalSchedule]) -> Callable[..., Any]:
    """Return a schedule function that checks its arguments first, and leaves the schedule as it was where it fails."""

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        arguments = checked_arguments(function, args, named, refusal)
        kept = _copy(arguments.sch)
        before = arguments.sch.mod
        try:
            return function(**arguments.values)
        except Exception as error:
            restored = _restore(arguments.sch, kept, before)
            if _is_of_tvm(error):
                raise _refused_by_tvm(arguments, error, restored) from error
            raise

    return checked


def _copy(sch: Schedule) -> Schedule | None:
    """Return a copy of a schedule, in which its handles stay valid; None where blocks are instructions already.

    TVM 0.27 cannot copy a schedule behind ``sch.tensorize``.
    """
    try:
        return sch.copy()
    except InternalError:
        return None


def _restore(sch: Schedule, kept: Schedule | None, before: Any) -> bool:
    """Let a schedule be what it was; False where it was changed and there is no copy."""
    if kept is None:
        return bool(tvm_ffi.structural_equal(sch.mod, before))
    changed = Schedule.__new__(Schedule)  # which takes the changed one with it
    changed.__move_handle_from__(sch)
    sch.__move_handle_from__(kept)
    return True


def _is_of_tvm(error: Exception) -> bool:
    if isinstance(error, IllegalSchedule):
        return False
    return isinstance(error, TVM_ERRORS) or (isinstance(error, PASSED_ON) and hasattr(error, "__tvm_ffi_error__"))


def _refused_by_tvm(arguments: Arguments, error: Exception, restored: bool) -> IllegalSchedule:
    """Return the refusal for what TVM would not do."""
    left = "" if restored else "; the schedule has instructions, and was changed on the way: make it anew"
    return arguments.refused(
        f"TVM cannot do this here: {_reason(error)}",
        remedy=f"give it a loop nest like the one that help({arguments.function}) shows{left}",
    )


def _reason(error: Exception) -> str:
    """Return the sentence in which TVM says why."""
    text = str(error)
    found = re.search(r"^Error message: (.*)", text, re.MULTILINE)
    reason = found.group(1) if found else re.sub(r"^.*Check failed: .*?: ", "", text.strip().splitlines()[-1])
    return reason if len(reason) <= SHOWN else f"{reason[:SHOWN]} ..."


def _pipeline() -> tuple[tvm.transform.Pass, ...]:
    from tensorir_ladder.schedules.pipeline import lowering  # here: nothing is lowered while schedules are written

    return lowering.tir_pipeline()


register_tir_pipeline(PIPELINE, _pipeline)
