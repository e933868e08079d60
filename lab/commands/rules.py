"""``rules``: drawn functions and Relax modules as the pipeline makes them, each right in the emulator or named."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tensorir_ladder.emulator.compiler import require_host_compiler
from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.records.kinds import RuleDraws
from tensorir_ladder.lab.commands.drawing import DrawnRuns, add_draw_options, check_draw_options, run_and_record
from tensorir_ladder.lab.draws import Outcome
from tensorir_ladder.lab.rule_draws import TOGETHER, draw, run_draws


def _more(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    taken = Counter(rule for o in outcomes if o.what == "right" for rule in o.text.split(", "))
    reasons = Counter(o.text for o in outcomes if o.what == "left")
    return {"taken": dict(taken.most_common()), "reasons": dict(reasons.most_common())}


DRAWN = DrawnRuns(
    "rules",
    run_draws,
    TOGETHER,
    draw,
    RuleDraws,
    _more,
    recorded=("command", "functions", "taken"),
    good=("right", "left"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many functions are drawn, from which seed."""
    add_draw_options(parser, DRAWN, usual=100)


def run(options: argparse.Namespace, command: str) -> int:
    """Run what the pipeline makes of draws, side by side; exit status 1 where one is neither right nor left."""
    check_draw_options(options)
    require_host_compiler()
    record = run_and_record(DRAWN, options, command)
    _print(record)
    return WRONG if record.bad else 0


def _print(record: RuleDraws) -> None:
    for reason, count in record.reasons.items():
        print(f"{count} left: {reason}")
    taken = ", ".join(f"{count} by {rule}" for rule, count in record.taken.items())
    print(
        f"{record.functions} functions: {record.right} right ({taken}), {record.left} left, {record.wrong} wrong, "
        f"{record.failed} not compiled, {record.lost} lost"
    )
