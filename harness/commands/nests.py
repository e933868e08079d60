"""``nests``: drawn loop nests pipelined and not, each the same bit for bit or refused."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

from tensorir_ladder.emulator.compiler import require_host_compiler
from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.commands.options import UsageError, add_revision
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.environment import MEASURING_SOURCES, ROOT, sources_digest, tree_state
from tensorir_ladder.harness.lab.nests import TOGETHER, Draws, Outcome, draw, run_draws
from tensorir_ladder.harness.lab.workers import Lost, each_in_a_process
from tensorir_ladder.harness.records import Journal, append, check_appendable, now
from tensorir_ladder.harness.records.kinds import BadNest, Nests

RECORDED = ("command", "nests", "right")  # fields that tell a record of this command
EMULATED = 4  # of so many nests that are kernels one is emulated


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many nests are drawn, from which seed."""
    parser.add_argument("--runs", type=int, default=200, help="nests that are drawn (200)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (0)")
    parser.add_argument("--emulate", type=int, default=EMULATED, help=f"emulate each n-th kernel; 0: none ({EMULATED})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side (one for each core)")
    parser.add_argument("--limit-s", type=float, default=300, help=f"seconds that {TOGETHER} nests may take (300)")
    parser.add_argument("--only", type=int, metavar="NEST", help="run this nest alone, and print it")
    parser.add_argument("--out", type=Path, help="file of JSON lines that the record is appended to")
    add_revision(parser)


def run(options: argparse.Namespace, command: str) -> int:
    """Run nests side by side; exit status 1 where one is neither right nor refused."""
    draws, started = _draws(options), time.monotonic()
    if options.only is not None:
        print(draw(options.seed, options.only).text)
    with _journal(options) as journal:
        outcomes = {outcome.number: outcome for outcome in journal.entries} if journal else {}
        left = [part for part in draws if not all(number in outcomes for number in part.numbers)]
        with progress() as bar:
            for found in bar.track(_outcomes(left, options), len(draws), len(draws) - len(left), description="nests"):
                for outcome in found:
                    outcomes[outcome.number] = outcome
                    if journal:
                        journal.add(outcome)
        record = _record(options, command, list(outcomes.values()), time.monotonic() - started)
        if journal:
            append(options.out, record)
            journal.finish()
    _print(options, record)
    return WRONG if record.bad else 0


def _draws(options: argparse.Namespace) -> list[Draws]:
    if min(options.runs, options.jobs) < 1 or options.limit_s <= 0 or options.emulate < 0:
        given = f"--runs {options.runs} --jobs {options.jobs} --limit-s {options.limit_s} --emulate {options.emulate}"
        raise UsageError(f"{given}: at least 1 nest and process, more than 0 s, and no less than 0")
    if options.only is not None and (options.only < 0 or options.out is not None):
        raise UsageError(f"--only {options.only}: a number from 0 on, and without --out")
    if options.emulate:
        require_host_compiler()
    if options.only is not None:
        return [Draws(options.seed, (options.only,), options.emulate and 1)]
    parts = [range(first, min(first + TOGETHER, options.runs)) for first in range(0, options.runs, TOGETHER)]
    return [Draws(options.seed, tuple(part), options.emulate) for part in parts]


def _journal(options: argparse.Namespace) -> AbstractContextManager[Journal[Outcome] | None]:
    if options.out is None:
        return nullcontext()
    check_appendable(options.out, RECORDED)
    plan = [options.out.name, options.seed, options.runs, options.emulate, sources_digest(ROOT, MEASURING_SOURCES)]
    return Journal(options.out.parent, "nests", plan, Outcome)


def _outcomes(draws: Sequence[Draws], options: argparse.Namespace) -> Iterator[list[Outcome]]:
    """Yield what became of nests; of those whose process is gone, each again in a process of its own."""
    gone: list[Draws] = []
    with closing(each_in_a_process(run_draws, draws, options.jobs, options.limit_s)) as results:
        for part, result in results:
            if not isinstance(result, Lost):
                yield result
            elif len(part.numbers) > 1:
                gone += [Draws(part.seed, (number,), part.emulate) for number in part.numbers]
            else:
                text = f"{result.doing}: {result.reason}"
                yield [Outcome(part.numbers[0], "lost", text, draw(part.seed, part.numbers[0]).features)]
    if gone:
        yield from _outcomes(gone, options)


def _record(options: argparse.Namespace, command: str, outcomes: Sequence[Outcome], seconds: float) -> Nests:
    counts = Counter(outcome.what for outcome in outcomes)
    features: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for feature in outcome.features or ("ordinary",):
            features.setdefault(feature, Counter())[outcome.what] += 1
    refused = (outcome.text for outcome in outcomes if outcome.what == "refused")
    ordered = sorted(outcomes, key=lambda outcome: outcome.number)
    return Nests(
        command=command,
        **tree_state(options.revision),
        recorded_at=now(),
        seed=options.seed,
        nests=len(outcomes),
        right=counts["right"],
        refused=counts["refused"],
        wrong=counts["wrong"],
        failed=counts["failed"],
        lost=counts["lost"],
        emulated=sum(outcome.emulated for outcome in outcomes),
        seconds=round(seconds, 1),
        features={feature: dict(sorted(features[feature].items())) for feature in sorted(features)},
        reasons=dict(Counter(map(_reason, refused)).most_common()),
        bad=tuple(BadNest(o.number, o.what, o.text) for o in ordered if o.what not in ("right", "refused")),
    )


def _reason(text: str) -> str:
    """Return what was refused, without the names in it."""
    problem = text.partition(" at block")[0].partition(" at loop")[0]
    return re.sub(r"\d+", "N", re.sub(r"\b[a-z]{1,2}\d+\b|(?<= )[xwyvz](?= )", "_", problem))


def _print(options: argparse.Namespace, record: Nests) -> None:
    for bad in record.bad:
        print(f"{bad.what}: {bad.text}\n  ladder nests --seed {options.seed} --only {bad.number}")
    print(
        f"{record.nests} nests: {record.right} right, {record.emulated} of them in the emulator too, "
        f"{record.refused} refused, {record.wrong} wrong, {record.failed} not lowered, {record.lost} lost"
    )
