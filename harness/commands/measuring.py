"""Measure cases so that what is measured is on disk, and an interrupted command goes on."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from rich.markup import escape

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.printing import print_code, progress, record_line, warn
from tensorir_ladder.harness.measure import Measurer
from tensorir_ladder.harness.peers import find_peers
from tensorir_ladder.harness.records import RESULTS, Record, check_writable
from tensorir_ladder.harness.session import CaseJournal, Session
from tensorir_ladder.harness.tuning import tuned_case
from tensorir_ladder.kernels.codegen import toolchain

Item = TypeVar("Item")


def open_session(options: argparse.Namespace, command: str) -> Session:
    """Open a session whose output folder is known to take records."""
    out = options.out or RESULTS
    check_writable(out)
    compiler, gpu = toolchain.require_compiler(), execution.GpuBackend()
    return Session(compiler, gpu, out, command, revision=options.revision or "", seed=getattr(options, "seed", None))


def measure_cases(cases: list[Case], options: argparse.Namespace, command: str, sweep: bool = False) -> list[Record]:
    """Measure cases group by group, the records of one on disk before the next begins.

    A sweep's stage counts and variants of one step, tile and problem are one group, timed in the same rounds; a group
    that an interrupted run had only begun to write down is timed anew, as a whole.
    """
    session = open_session(options, command)
    peers, turns = tuple(find_peers(options.peers)), 0 if sweep else options.energy
    measurer = Measurer(session, options.stages is None, peers, forecasts=sweep, energy_turns=turns)
    cases = [tuned_case(session, case) if case.tile_choice == "tuned" else case for case in cases]
    with CaseJournal(session, "sweep" if sweep else "run", cases) as journal:
        session.run = journal.run  # an interrupted command that goes on is one run, as long as its GPU is the same
        groups = _groups(cases, together=sweep)
        begun = unfinished(groups, lambda group: all(map(journal.has, group)), "groups" if sweep else "cases")
        waiting = [case for group in begun for case in group]
        session.prebuild([*waiting, *session.large_k_cases(waiting)])
        records = list(_measured(begun, measurer, journal, options.show))
        journal.finish()
    return records


def _measured(groups: list[list[Case]], measurer: Measurer, journal: CaseJournal, show: str | None) -> Iterator[Record]:
    session = measurer.session
    with progress() as bar:
        task = bar.add_task("measuring", total=sum(map(len, groups)))
        for group in groups:
            bar.update(task, description=escape(str(group[0])))
            for case, record in zip(group, measurer.measure_together(group)):
                for warning in record.notes:
                    warn(warning)
                record.save(session.out)
                journal.add(case)
                if case.tile_choice != "best":
                    print_code(session.load(case)[0], show)
                print(record_line(record), flush=True)
                bar.advance(task)
                yield record


def unfinished(items: Iterable[Item], done: Callable[[Item], bool], what: str) -> list[Item]:
    """List the items that an interrupted run of the same command left to do; say how many are done, if any are."""
    items = list(items)
    waiting = [item for item in items if not done(item)]
    if len(waiting) < len(items):
        print(f"going on with an interrupted run: {len(items) - len(waiting)} of {len(items)} {what} are done")
    return waiting


def _groups(cases: list[Case], together: bool) -> list[list[Case]]:
    """Group the cases to time in the same rounds: those that differ in stage count and variant only, or each alone."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(replace(case, stages=0, variant="") if together else case, []).append(case)
    return list(groups.values())
