"""What commands share that draw at random and run what they drew, side by side, and go on where they were stopped."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.cli import as_typed
from tensorir_ladder.harness.commands.options import UsageError, add_revision
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.environment import MEASURING_SOURCES, ROOT, sources_digest, tree_state
from tensorir_ladder.harness.records import Journal, append, check_appendable, now
from tensorir_ladder.harness.records.kinds import BadDraw
from tensorir_ladder.harness.workers import Lost, Tell, each_in_a_process
from tensorir_ladder.lab.draws import Draws, Outcome

BAD = ("wrong", "failed", "lost")


@dataclass(frozen=True)
class DrawnRuns:
    """Describe what a command draws: its name, how a process runs some, how many at once, and how one is drawn.

    ``draw(seed, number)`` has features and a text. Its record is of a ``kind``, with fields that all kinds have, and
    ``more`` of the outcomes; ``recorded`` are fields that tell it from others, the second how many were drawn. ``good``
    is what may become of a draw, beside :data:`BAD`.
    """

    command: str
    run: Callable[[Draws, Tell], list[Outcome]]
    together: int
    draw: Callable[[int, int], Any]
    kind: Callable[..., Any]
    more: Callable[[Sequence[Outcome]], dict[str, Any]]
    recorded: tuple[str, ...]
    good: tuple[str, ...]


def add_draw_options(parser: argparse.ArgumentParser, drawn: DrawnRuns, usual: int) -> None:
    """Add how many are drawn, from which seed, and where the record goes."""
    what = drawn.command
    parser.add_argument("--runs", type=int, default=usual, help=f"{what} that are drawn ({usual})")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side (one for each core)")
    parser.add_argument("--limit-s", type=float, default=300, help=f"seconds that {drawn.together} may take (300)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this one alone, and print it")
    parser.add_argument("--out", type=Path, help="file of JSON lines that the record is appended to")
    add_revision(parser)


def check_draw_options(options: argparse.Namespace) -> None:
    """Raise UsageError for numbers without a meaning."""
    if min(options.runs, options.jobs) < 1 or options.limit_s <= 0:
        given = f"--runs {options.runs} --jobs {options.jobs} --limit-s {options.limit_s}"
        raise UsageError(f"{given}: at least 1 of them and 1 process, and more than 0 s")
    if options.only is not None and (options.only < 0 or options.out is not None):
        raise UsageError(f"--only {options.only}: a number from 0 on, and without --out")


def run_drawn(
    drawn: DrawnRuns, options: argparse.Namespace, record_of: Callable[[list[Outcome]], Any], emulate: int = 0
) -> Any:
    """Run all that is drawn and not done yet; append the record of it where one is asked for, and return it."""
    numbers = range(options.runs)
    parts = [Draws(options.seed, tuple(numbers[i : i + drawn.together]), emulate) for i in numbers[:: drawn.together]]
    if options.only is not None:
        parts = [Draws(options.seed, (options.only,), emulate and 1)]
    with _journal(drawn, options, emulate) as journal:
        outcomes = {outcome.number: outcome for outcome in journal.entries} if journal else {}
        left = [part for part in parts if not all(number in outcomes for number in part.numbers)]
        with progress() as bar:
            found = _outcomes(drawn, left, options)
            for some in bar.track(found, len(parts), len(parts) - len(left), description=drawn.command):
                for outcome in some:
                    outcomes[outcome.number] = outcome
                    if journal:
                        journal.add(outcome)
        record = record_of(sorted(outcomes.values(), key=lambda outcome: outcome.number))
        if journal:
            append(options.out, record)
            journal.finish()
    return record


def run_and_record(drawn: DrawnRuns, options: argparse.Namespace, command: str, emulate: int = 0) -> Any:
    """Run all that is drawn, return the record of it, and print what is bad in it, each with what repeats it.

    What is run alone is printed before.
    """
    if options.only is not None:
        print(drawn.draw(options.seed, options.only).text)
    started = time.monotonic()
    record = run_drawn(
        drawn, options, lambda found: record_of(drawn, options, command, found, time.monotonic() - started), emulate
    )
    for bad in record.bad:
        again = as_typed(f"ladder {drawn.command} --seed {options.seed} --only {bad.number}")
        print(f"{bad.what}: {bad.text}\n  {again}")
    return record


def record_of(
    drawn: DrawnRuns, options: argparse.Namespace, command: str, outcomes: Sequence[Outcome], seconds: float
) -> Any:
    """Make the record of what became of draws."""
    counts = Counter(outcome.what for outcome in outcomes)
    return drawn.kind(
        command=command,
        **tree_state(options.revision),
        recorded_at=now(),
        seed=options.seed,
        **{drawn.recorded[1]: len(outcomes)},
        **{what: counts[what] for what in (*drawn.good, *BAD)},
        seconds=round(seconds, 1),
        features=by_feature(outcomes),
        bad=tuple(BadDraw(o.number, o.what, o.text) for o in outcomes if o.what not in drawn.good),
        **drawn.more(outcomes),
    )


def by_feature(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Count what became of draws with each feature."""
    features: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for feature in outcome.features or ("ordinary",):
            features.setdefault(feature, Counter())[outcome.what] += 1
    return {feature: dict(sorted(features[feature].items())) for feature in sorted(features)}


def _journal(
    drawn: DrawnRuns, options: argparse.Namespace, emulate: int
) -> AbstractContextManager[Journal[Outcome] | None]:
    if options.out is None:
        return nullcontext()
    check_appendable(options.out, drawn.recorded)
    plan = [options.out.name, options.seed, options.runs, emulate, sources_digest(ROOT, MEASURING_SOURCES)]
    return Journal(options.out.parent, drawn.command, plan, Outcome)


def _outcomes(drawn: DrawnRuns, parts: Sequence[Draws], options: argparse.Namespace) -> Iterator[list[Outcome]]:
    """Yield what became of draws; of those whose process is gone, each again in a process of its own."""
    gone: list[Draws] = []
    with closing(each_in_a_process(drawn.run, parts, options.jobs, options.limit_s)) as results:
        for part, result in results:
            if not isinstance(result, Lost):
                yield result
            elif len(part.numbers) > 1:
                gone += [Draws(part.seed, (number,), part.emulate) for number in part.numbers]
            else:
                (number,), text = part.numbers, f"{result.doing}: {result.reason}"
                yield [Outcome(number, "lost", text, drawn.draw(part.seed, number).features)]
    if gone:
        yield from _outcomes(drawn, gone, options)
