"""Running a mutant: until it is caught, or has done the same as the unchanged text in all orders."""

from __future__ import annotations

import functools
import random
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tensorir_ladder.emulator import EmulatedProgram, EmulatorError, KernelFault
from tensorir_ladder.harness.build import Case, lower
from tensorir_ladder.harness.emulation import EmulatorBackend, emulated
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.harness.verify import NORMAL, WHOLE, WrongResult, check_run
from tensorir_ladder.harness.workers import Tell
from tensorir_ladder.lab.mutants.rules import Change, changes_of
from tensorir_ladder.lab.mutants.subjects import SUBJECTS

ORDERS, ORDERS_OF_THE_SAME, INFINITIES_IN = 16, 6, 1
REFUSED, SAME, ORDERED, EQUAL, LIVED, WRONG = "refused", "same", "ordered", "equal", "lived", "wrong result"
ALIVE = (SAME, ORDERED, EQUAL, LIVED)


@dataclass
class MutantOutcome:
    """Tell what became of a mutant: its number in the plan, its subject's, its change, and what was found.

    ``found`` is the fault's kind, WRONG, "hung" or "crashed"; SAME where it lives and its threads do the same as those
    of the unchanged text, to the last bit of the output; ORDERED where they access and multiply the same, and only wait
    or signal otherwise; EQUAL where they do not, but all outputs are the same to the last bit; LIVED where not even
    that is so; or REFUSED, by the compiler. ``text`` says more, ``order`` is the seed that found it.
    """

    number: int
    subject: int
    rule: str
    line: int
    before: str
    after: str
    found: str
    text: str = ""
    order: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Mutant:
    """A change of a subject's text: ``number`` in the plan, ``subject`` among SUBJECTS."""

    number: int
    subject: int
    change: Change
    orders: int = ORDERS

    def outcome(self, found: str, text: str = "") -> MutantOutcome:
        """Say what became of it."""
        change = self.change
        return MutantOutcome(
            self.number, self.subject, change.rule, change.line, change.before, change.after, found, text
        )


@functools.cache
def _prepared(subject: int) -> tuple[Case, EmulatedProgram]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more stages than k tiles, rows copied in front: not what is looked for
        lowered = lower(SUBJECTS[subject].case)
    return lowered.case, emulated(lowered)


@functools.cache
def _ran_unchanged(subject: int, order: int) -> _Ran:
    return _ran(*_prepared(subject), order)


def plan(seed: int, steps: Sequence[int], orders: int = ORDERS) -> list[Mutant]:
    """Draw the order in which all mutants of the steps' subjects are taken: of each rule and subject one, and again."""
    draw, piles = random.Random(seed), []
    for number, subject in enumerate(SUBJECTS):
        if subject.step in steps:
            by_rule: dict[str, list[Change]] = {}
            for change in changes_of(_prepared(number)[1].cuda):
                by_rule.setdefault(change.rule, []).append(change)
            piles += [(number, draw.sample(changes, len(changes))) for changes in by_rule.values()]
    taken = []
    for depth in range(max((len(changes) for _, changes in piles), default=0)):
        layer = [(number, changes[depth]) for number, changes in piles if depth < len(changes)]
        taken += draw.sample(layer, len(layer))
    return [Mutant(at, number, change, orders) for at, (number, change) in enumerate(taken)]


def run_mutant(mutant: Mutant, tell: Tell) -> MutantOutcome:
    """Build a mutant and run it, in one order after the other until it is caught."""
    started, outcome = time.monotonic(), mutant.outcome(LIVED)
    tell(f"{SUBJECTS[mutant.subject]}, line {outcome.line}: {outcome.after}")
    case, program = _prepared(mutant.subject)
    _ran_unchanged(mutant.subject, 0)  # the unchanged text is right, else nothing is told of the changed one
    changed = replace(program, cuda=mutant.change.apply(program.cuda))
    try:
        library = changed.library
    except EmulatorError as error:
        return mutant.outcome(REFUSED, str(error))
    try:
        _run(case, changed, mutant, outcome)
    finally:
        for file in library.parent.glob(f"{library.name}*"):  # nobody needs it again
            file.unlink()
    outcome.seconds = round(time.monotonic() - started, 3)
    return outcome


def _run(case: Case, program: EmulatedProgram, mutant: Mutant, outcome: MutantOutcome) -> None:
    same = accesses_same = output_same = True
    for order in range(mutant.orders):
        outcome.order = order
        try:
            found, unchanged = _ran(case, program, order), _ran_unchanged(mutant.subject, order)
            if order == INFINITIES_IN:
                _check_infinities(case, program, order)
        except KernelFault as fault:
            outcome.found, outcome.text = fault.kind, str(fault)
            return
        except WrongResult as wrong:
            outcome.found, outcome.text = WRONG, str(wrong)
            return
        same = same and found == unchanged
        output_same = output_same and found.output == unchanged.output
        accesses_same = accesses_same and output_same and found.accesses == unchanged.accesses
        if same and order + 1 == ORDERS_OF_THE_SAME:
            break
    outcome.found = SAME if same else ORDERED if accesses_same else EQUAL if output_same else LIVED


class _Ran(NamedTuple):
    """Keep digests of a run: of all deeds, of accesses, and of the output's bits."""

    deeds: tuple[int, ...]
    accesses: tuple[int, ...]
    output: int


def _ran(case: Case, program: EmulatedProgram, order: int) -> _Ran:
    """Run in one order, and check the product."""
    found: list[_Ran] = []

    def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        deeds = program(a, b, c, seed=order)
        output = zlib.crc32(c.tobytes())
        found.append(_Ran(tuple(each.all for each in deeds), tuple(each.accesses for each in deeds), output))

    check_run(run, case.problem, EmulatorBackend(), order, WHOLE if order % 2 else NORMAL, case.math)
    return found[0]


def _check_infinities(case: Case, program: EmulatedProgram, order: int) -> None:
    """Multiply positive numbers with a row of A and a column of B infinite: so are one row and column of the product.

    What is read where nothing belongs, and multiplied by zero, is not a number then.
    """
    problem, backend = case.problem, EmulatorBackend()
    a, b = (
        np.abs(backend.normal(order, shape, problem.dtype)) + numpy_dtype(problem.dtype).type(0.5)
        for shape in ((problem.m, problem.k), problem.b_shape)
    )
    a[1, :] = np.inf
    b[(slice(None), 0) if problem.layout == "nn" else (0, slice(None))] = np.inf
    output = backend.poisoned((problem.m, problem.n), problem.out_dtype)
    program(a, b, output, seed=order)
    expected = np.zeros(output.shape, bool)
    expected[1, :] = expected[:, 0] = True
    found = output.astype(np.float32)
    if np.isnan(found).any() or (np.isinf(found) != expected).any():
        raise WrongResult("infinite or no numbers elsewhere than in the infinite operands' row and column")
