"""``nests``: drawn loop nests pipelined and not, each the same bit for bit or refused."""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Sequence

from tensorir_ladder.emulator.compiler import require_host_compiler
from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.commands.drawing import (
    Drawn,
    add_draw_options,
    by_feature,
    check_draw_options,
    run_drawn,
)
from tensorir_ladder.harness.commands.options import UsageError
from tensorir_ladder.harness.environment import tree_state
from tensorir_ladder.harness.lab.draws import Outcome
from tensorir_ladder.harness.lab.nests import TOGETHER, draw, run_draws
from tensorir_ladder.harness.records import now
from tensorir_ladder.harness.records.kinds import BadDraw, Nests

EMULATED = 4  # of so many nests that are kernels one is emulated
DRAWN = Drawn(
    "nests",
    run_draws,
    TOGETHER,
    lambda seed, number: draw(seed, number).features,
    recorded=("command", "nests", "right"),
    good=("right", "refused"),
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
    if options.only is not None:
        print(draw(options.seed, options.only).text)
    started = time.monotonic()
    record = run_drawn(
        DRAWN, options, lambda found: _record(options, command, found, time.monotonic() - started), options.emulate
    )
    _print(options, record)
    return WRONG if record.bad else 0


def _record(options: argparse.Namespace, command: str, outcomes: Sequence[Outcome], seconds: float) -> Nests:
    counts = Counter(outcome.what for outcome in outcomes)
    refused = (outcome.text for outcome in outcomes if outcome.what == "refused")
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
        features=by_feature(outcomes),
        reasons=dict(Counter(map(_reason, refused)).most_common()),
        bad=tuple(BadDraw(o.number, o.what, o.text) for o in outcomes if o.what not in DRAWN.good),
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
