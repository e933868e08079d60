"""``timeline``: record what each role of one block does when, by time stamps in the kernel."""

from __future__ import annotations

import argparse
from dataclasses import replace

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.measuring import open_session
from tensorir_ladder.harness.commands.options import add_places, add_problem_options, cases_named, numbers
from tensorir_ladder.harness.records import Timeline
from tensorir_ladder.harness.timeline import take

SIZES, STAGES = "4096", "3,4"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add steps, products, stage counts, and the block."""
    add_problem_options(parser, SIZES)
    parser.add_argument("--stages", help=f"stage counts: 4 | 3-6 | 3,4 ({STAGES}, where the step takes them)")
    parser.add_argument("--variant", default="default", help="variants' names, default, explicit or all (default)")
    parser.add_argument("--tile", default="default", help="a tile as `list` writes the step's, or default (default)")
    parser.add_argument("--block", type=int, help="which block of the grid (its middle one)")
    add_places(parser)
    parser.set_defaults(arch=None, on="gpu")


def run(options: argparse.Namespace, command: str) -> int:
    """Take each case's timeline; it is on disk before the next begins."""
    cases = _cases(options)
    execution.require_gpu()
    session = open_session(options, command)
    for case in cases:
        timeline = take(session, case, options.block)
        print(f"{case}: {_in_words(timeline)}; wrote {timeline.save(session.out)}", flush=True)
    return 0


def _cases(options: argparse.Namespace) -> list[Case]:
    named = cases_named(options, SIZES, several=True)
    if options.step is not None:
        for case in named:
            case.check_stamped()
    stamped = [case for case in named if case.stamped]
    depths = numbers(options.stages or STAGES, "--stages")
    cases = list(dict.fromkeys(replace(case, stages=stages) for case in stamped for stages in depths))
    if options.stages is None:
        cases = [case for case in cases if case.stages >= case.form.fewest_stages]
    for case in cases:
        case.validate()
    return cases


def _in_words(timeline: Timeline) -> str:
    cost = 100 * (timeline.stamped.median_ms / timeline.plain.median_ms - 1)
    return (
        f"block {timeline.block} of {timeline.blocks} on multiprocessor {timeline.multiprocessor}, "
        f"{timeline.duration_ns / 1e3:.1f} µs, run {timeline.kept + 1} of {len(timeline.durations_ns)}; "
        f"a launch takes {cost:+.1f} % with stamps"
    )
