"""``mutants``: generated CUDA changed by rule, each change run in the emulator in many orders; what lives is listed."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path

from tensorir_ladder.emulator.compiler import require_host_compiler
from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.commands.options import UsageError, add_revision, numbers
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.environment import ROOT, host_cpu, sources_digest, tree_state
from tensorir_ladder.harness.records import (
    CaughtMutant,
    Journal,
    LivingMutant,
    Mutants,
    append,
    check_appendable,
    now,
)
from tensorir_ladder.harness.workers import Lost, each_in_a_process
from tensorir_ladder.lab.mutants.reasons import reason_for
from tensorir_ladder.lab.mutants.running import ALIVE, ORDERS, REFUSED, Mutant, MutantOutcome, plan, run_mutant
from tensorir_ladder.lab.mutants.subjects import SUBJECTS

FIRST_STEP = 5  # the first with an order in time, which is what most rules change
# What outcomes follow from; reasons are looked up when all are there.
SOURCES = ("emulator/*.py", "emulator/device/*", "schedules/**/*.py", "kernels/**/*.py", "steps/*.py")
SOURCES += (
    "harness/build.py",
    "harness/verify.py",
    *(f"lab/mutants/{name}.py" for name in ("rules", "running", "subjects")),
)
RECORDED = ("command", "caught", "lived")  # fields that tell a record of this command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many mutants there are, of which steps, from which seed."""
    steps = sorted({subject.step for subject in SUBJECTS})
    parser.add_argument("--steps", help=f"steps: 5 | 5-9 | 10,13 ({steps[0]}-{steps[-1]})")
    parser.add_argument("--runs", type=int, default=100, help="mutants that are run (100)")
    parser.add_argument("--seed", type=int, default=0, help="what mutants are drawn from (0)")
    parser.add_argument("--orders", type=int, default=ORDERS, help=f"orders that one must live through ({ORDERS})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side (one for each core)")
    parser.add_argument("--limit-s", type=float, default=120, help="seconds that one may take before it hangs (120)")
    parser.add_argument("--out", type=Path, help="file of JSON lines that the record is appended to")
    add_revision(parser)


def run(options: argparse.Namespace, command: str) -> int:
    """Run mutants side by side; exit status 1 where a harmful one lived.

    What is refused by the compiler is not counted: the next ones of the plan are taken in its place. As long as
    harmful ones live the journal stays, so that a reason can be given without running all of them again.
    """
    steps = _steps(options)
    require_host_compiler()
    with _own_builds(), _journal(options, steps) as journal:
        mutants = plan(options.seed, steps, options.orders)
        done = {outcome.number: outcome for outcome in journal.entries} if journal else {}
        with progress() as bar:
            task = bar.add_task("mutants", total=options.runs)
            while missing := _missing(mutants, done, options.runs):
                bar.update(task, completed=_counted(done.values()))
                for outcome in _outcomes(missing, options.jobs, options.limit_s):
                    done[outcome.number] = outcome
                    if journal:
                        journal.add(outcome)
                    bar.update(task, completed=_counted(done.values()))
        record = _record(options, command, steps, list(done.values()))
        if journal:
            append(options.out, record)
            if not record.harmful:
                journal.finish()
    _print(record)
    return WRONG if record.harmful else 0


def _steps(options: argparse.Namespace) -> tuple[int, ...]:
    able = sorted({subject.step for subject in SUBJECTS})
    asked = numbers(options.steps, "--steps") if options.steps else able
    if unknown := sorted(set(asked) - set(able)):
        raise UsageError(f"--steps {options.steps}: no kernel of step {unknown[0]} is mutated; name some of {able}")
    if min(options.runs, options.orders, options.jobs) < 1 or options.limit_s <= 0:
        given = f"--runs {options.runs} --orders {options.orders} --jobs {options.jobs} --limit-s {options.limit_s}"
        raise UsageError(f"{given}: at least 1 of each, and more than 0 s")
    return tuple(sorted(set(asked)))


@contextmanager
def _own_builds() -> Iterator[None]:
    """Keep mutants' builds in a folder that goes away: nobody needs one twice."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="tensorir-ladder-mutants-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def _journal(
    options: argparse.Namespace, steps: tuple[int, ...]
) -> AbstractContextManager[Journal[MutantOutcome] | None]:
    if options.out is None:
        return nullcontext()
    check_appendable(options.out, RECORDED)
    sources = sources_digest(ROOT, SOURCES)
    return Journal(
        options.out.parent, "mutants", [options.out.name, steps, options.seed, options.orders, sources], MutantOutcome
    )


def _counted(outcomes: Sequence[MutantOutcome]) -> int:
    return sum(outcome.found != REFUSED for outcome in outcomes)


def _missing(mutants: Sequence[Mutant], done: dict[int, MutantOutcome], runs: int) -> list[Mutant]:
    """List what is still to be run so that the first ``runs`` mutants of the plan that count are done."""
    wanted = []
    counted = 0
    for mutant in mutants:
        if counted == runs:
            break
        outcome = done.get(mutant.number)
        if outcome is None:
            wanted.append(mutant)
        counted += outcome is None or outcome.found != REFUSED
    return wanted


def _outcomes(mutants: Sequence[Mutant], jobs: int, limit_s: float) -> Iterator[MutantOutcome]:
    with closing(each_in_a_process(run_mutant, mutants, jobs, limit_s)) as results:
        for mutant, result in results:
            if isinstance(result, Lost):
                result = mutant.outcome("hung" if result.hung else "crashed", result.reason)
            yield result


def _record(
    options: argparse.Namespace, command: str, steps: tuple[int, ...], outcomes: list[MutantOutcome]
) -> Mutants:
    caught: dict[str, list[CaughtMutant]] = {}
    lived = []
    for each in sorted(outcomes, key=lambda outcome: outcome.number):
        if each.found in ALIVE:
            place = (each.subject, each.rule, each.line)
            lived.append(LivingMutant(*place, each.before, each.after, reason_for(each)))
        elif each.found != REFUSED:
            caught.setdefault(each.found, []).append(CaughtMutant(each.subject, each.rule, each.line, each.order))
    return Mutants(
        seed=options.seed,
        steps=steps,
        orders=options.orders,
        jobs=options.jobs,
        subjects=tuple(map(str, SUBJECTS)),
        refused=sum(each.found == REFUSED for each in outcomes),
        caught={found: tuple(mutants) for found, mutants in caught.items()},
        lived=tuple(lived),
        host_cpu=host_cpu(),
        seconds=round(sum(each.seconds for each in outcomes), 1),
        **tree_state(options.revision),
        recorded_at=now(),
        command=command,
    )


def _print(record: Mutants) -> None:
    for reason, count in Counter(mutant.reason for mutant in record.lived if mutant.reason).most_common():
        print(f"{count} lived, harmless: {reason}")
    for mutant in record.harmful:
        place = f"{record.subjects[mutant.subject]}, line {mutant.line}"
        print(f"lived, harmful: {place}, {mutant.rule}:\n  {mutant.before}\n  {mutant.after}")
    found = ", ".join(f"{len(mutants)} {kind}" for kind, mutants in record.caught.items())
    print(
        f"{record.runs} mutants: {record.runs - len(record.lived)} caught ({found}), {len(record.lived)} lived, "
        f"{len(record.harmful)} of them harmful; {record.refused} refused by the compiler are not counted"
    )
