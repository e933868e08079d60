"""``nests``: drawn loop nests pipelined and not, each the same bit for bit or refused."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tensorir_ladder.emulator.compiler import require_host_compiler
from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.commands.options import UsageError
from tensorir_ladder.harness.records.kinds import Nests
from tensorir_ladder.lab.commands.drawing import DrawnRuns, add_draw_options, check_draw_options, run_and_record
from tensorir_ladder.lab.draws import Outcome
from tensorir_ladder.lab.nests import TOGETHER, draw, run_draws

EMULATED = 4  # of so many nests that are kernels one is emulated


def _reason(text: str) -> str:
    """Return what was refused, without the names in it."""
    problem = text.partition(" at block")[0].partition(" at loop")[0]
    return re.sub(r"\d+", "N", re.sub(r"\b[a-z]{1,2}\d+\b|(?<= )[xwyvz](?= )", "_", problem))


def _more(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    refused = (outcome.text for outcome in outcomes if outcome.what == "refused")
    return {
        "emulated": sum(outcome.emulated for outcome in outcomes),
        "reasons": dict(Counter(map(_reason, refused)).most_common()),
    }


DRAWN = DrawnRuns(
    "nests", run_draws, TOGETHER, draw, Nests, _more, recorded=("command", "nests", "right"), good=("right", "refused")
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many nests are drawn, from which seed."""
    add_draw_options(parser, DRAWN, usual=200)
    parser.add_argument("--emulate", type=int, default=EMULATED, help=f"emulate each n-th kernel; 0: none ({EMULATED})")


def run(options: argparse.Namespace, command: str) -> int:
    """Run nests side by side; exit status 1 where one is neither right nor refused."""
    check_draw_options(options)
    if options.emulate < 0:
        raise UsageError(f"--emulate {options.emulate}: no less than 0")
    if options.emulate:
        require_host_compiler()
    record = run_and_record(DRAWN, options, command, options.emulate)
    print(
        f"{record.nests} nests: {record.right} right, {record.emulated} of them in the emulator too, "
        f"{record.refused} refused, {record.wrong} wrong, {record.failed} not lowered, {record.lost} lost"
    )
    return WRONG if record.bad else 0
