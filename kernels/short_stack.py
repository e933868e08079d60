"""Parse kernels faster: give functions that have TVM parse one a call stack of their own."""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tvm.script.parser.core.parser import ScriptMacro

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# What frames of expressions that the parser evaluates have for a file, and their module. For one that it does not know,
# inspect looks through all modules that are loaded, twice a frame: a third of the time in which step 13 is lowered.
EVALUATED, EVALUATOR = "<ast>", "tvm.script.parser.core.evaluator"


def on_a_short_stack(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function in a thread of its own, and wait for it: a kernel is then parsed faster, to the same text.

    At some of the statements of a kernel, TVM's parser collects the source of every frame of the call stack
    (:func:`inspect.getouterframes`). Frames of a notebook, of a command line or of pytest cost as much as the kernel's:
    without them step 13 is lowered in about half the time under pytest. At each ``@T.inline`` it does so to find
    itself, for which frames will do.

    What the function raises is raised again; context variables are the caller's.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        vars(inspect)["modulesbyfile"][EVALUATED] = EVALUATOR
        ScriptMacro._find_parser_def = _parser_at_work
        context = contextvars.copy_context()
        with concurrent.futures.ThreadPoolExecutor(1, "parse a kernel") as thread:
            return thread.submit(context.run, function, *args, **kwargs).result()

    return run


def _parser_at_work(_: ScriptMacro) -> Any:
    """Find the parser where TVM's own function does: among the globals of the frames that called this."""
    frame = inspect.currentframe()
    while frame is not None:
        if (parser := frame.f_globals.get(ScriptMacro.parser_object_name)) is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError(f"{ScriptMacro.parser_object_name} not available")
