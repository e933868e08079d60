"""Run drawn functions and Relax modules as the Relax pipeline makes them: each is right in the emulator, or is named.

Half of what is drawn are functions (:mod:`.drawn_functions`), half modules (:mod:`.drawn_modules`). What our rules
decline is run as dlight schedules it: users get that.
"""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.workers import Tell
from tensorir_ladder.kernels.codegen.arithmetic import evaluate
from tensorir_ladder.lab.drawn_functions import DrawnFunction, draw_function
from tensorir_ladder.lab.drawn_modules import DrawnModule, draw_module
from tensorir_ladder.lab.draws import Draws, Outcome
from tensorir_ladder.lab.function_check import WrongFunction, check_function, symbols_of
from tensorir_ladder.lab.module_check import NoKernel, check_module
from tensorir_ladder.relax import fuse_operators, pipeline
from tensorir_ladder.relax.rules import Rule, rules
from tensorir_ladder.relax.rules.rule import BY, failures_kept, is_scheduled
from tensorir_ladder.schedules.errors import IllegalSchedule

TOGETHER = 10  # draws that a process runs before it reports
ARCHS = ("sm_80", "sm_90a", "sm_90a")
DLIGHT, VIEW = "dlight", "a view"  # what took a function, and what a module without functions is


def draw(seed: int, number: int) -> DrawnFunction | DrawnModule:
    """Draw a function or a module."""
    choose = random.Random(f"{seed}-{number}")
    drawn = choose.choice((draw_function, draw_module))
    return drawn(choose, number, choose.choice(ARCHS))


def run_draws(draws: Draws, tell: Tell) -> list[Outcome]:
    """Run draws, saying what is under way: work for a process of its own."""
    outcomes = []
    for number in draws.numbers:
        tell(f"number {number}")
        outcomes.append(run_drawn(draw(draws.seed, number)))
    return outcomes


def run_drawn(drawn: DrawnFunction | DrawnModule) -> Outcome:
    """Run what the pipeline makes of a function or a module in the emulator."""
    with warnings.catch_warnings(), _no_log():
        warnings.simplefilter("ignore", UserWarning)  # more stages than iterations
        return _run_module(drawn) if isinstance(drawn, DrawnModule) else _run_function(drawn)


@contextlib.contextmanager
def _no_log() -> Iterator[None]:
    """Keep tracebacks of rules that fail out of the output: outcomes name them."""
    log = logging.getLogger("tensorir_ladder")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class _Failed(Exception):
    """A rule that fails instead of declining."""


def _asked(function: tirx.PrimFunc, target: Target) -> tuple[Rule, tirx.PrimFunc] | str:
    """Return the rule that takes a function, and what it makes of it; why all decline, where none does."""
    left = []
    for rule in rules(target):
        try:
            return rule, rule.take(function, target)
        except IllegalSchedule as reason:
            left.append(f"{rule.name}: {reason.problem}")
        except Exception as error:  # a rule that fails is what is looked for
            raise _Failed(f"{rule.name}: {type(error).__name__}: {error}") from error
    return "; ".join(left)


def _run_function(drawn: DrawnFunction) -> Outcome:
    target = machine_for(drawn.arch).target()

    def run() -> Outcome:
        asked = _asked(drawn.function, target)
        if isinstance(asked, str):
            after = pipeline(target, kernels=False)(tvm.IRModule({"main": drawn.function}))["main"]
            if not is_scheduled(after):
                raise NoKernel("a function without a schedule", value=asked, remedy="schedule it")
            outcome = Outcome(drawn.number, "left", asked, drawn.features)
        else:
            rule, after = asked
            outcome = Outcome(drawn.number, "right", rule.name, drawn.features)
        _check_function(drawn, after, target)
        return outcome

    return _outcome_of(drawn, run)


def _check_function(drawn: DrawnFunction, after: tirx.PrimFunc, target: Target) -> None:
    for sizes in drawn.sizes:
        check_function(
            drawn.function,
            after,
            target,
            sizes,
            arrays=_whole_numbers(drawn.function, sizes, drawn.number),
            seed=drawn.number,
            runs=2,
            slack=drawn.slack,
        )


def _run_module(drawn: DrawnModule) -> Outcome:
    target = machine_for(drawn.arch).target()

    def run() -> Outcome:
        with failures_kept() as failures:
            after = pipeline(target, kernels=False)(drawn.module)
        if ours := [str(failure) for failure in failures if not failure.rule.startswith(DLIGHT)]:
            raise _Failed("; ".join(ours))
        functions = {name.name_hint: one for name, one in after.functions_items() if isinstance(one, tirx.PrimFunc)}
        by = {name: str((one.attrs or {}).get(BY, DLIGHT)) for name, one in functions.items()}
        check_module(drawn.module, after, target, drawn.calls(), seed=drawn.number, narrow=drawn.narrow)
        if DLIGHT not in by.values():
            return Outcome(drawn.number, "right", ", ".join(sorted(by.values())) or VIEW, drawn.features)
        fused = {name.name_hint: one for name, one in fuse_operators(target)(drawn.module).functions_items()}
        reasons = {str(_asked(fused[name], target)) for name, rule in by.items() if rule == DLIGHT}
        return Outcome(drawn.number, "left", " | ".join(sorted(reasons)), drawn.features)

    return _outcome_of(drawn, run)


def _outcome_of(drawn: DrawnFunction | DrawnModule, run: Callable[[], Outcome]) -> Outcome:
    try:
        return run()
    except (WrongFunction, KernelFault) as error:
        what, found = "wrong", error
    except Exception as error:  # noqa: BLE001 - a rule that fails, and what TVM cannot compile, are looked for
        what, found = "failed", error
    return Outcome(drawn.number, what, f"{drawn.arch}: {type(found).__name__}: {str(found)[-300:]}", drawn.features)


def _whole_numbers(function: tirx.PrimFunc, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Draw small ones, whose sums of products are whole numbers in float16, too."""
    random, drawn = np.random.default_rng(seed), {}
    values = {symbol: sizes[str(symbol.name)] for symbol in symbols_of(function) if symbol.name in sizes}
    for parameter in function.params[:-1]:
        if str(parameter.dtype) in ("int8", "int32"):
            shape = [int(evaluate(extent, values) or 0) for extent in parameter.shape]
            drawn[str(parameter.name)] = random.integers(-2, 3, shape)
    return drawn
