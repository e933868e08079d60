"""``rules``: drawn functions offered to the rules for TVM, each right in the emulator or left with a reason."""

from __future__ import annotations

import argparse
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
from tensorir_ladder.harness.environment import tree_state
from tensorir_ladder.harness.lab.drawn_functions import TOGETHER, draw, run_draws
from tensorir_ladder.harness.lab.draws import Outcome
from tensorir_ladder.harness.records import now
from tensorir_ladder.harness.records.kinds import BadDraw, RuleDraws

DRAWN = Drawn(
    "rules",
    run_draws,
    TOGETHER,
    lambda seed, number: draw(seed, number).features,
    recorded=("command", "functions", "taken"),
    good=("right", "left"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many functions are drawn, from which seed."""
    add_draw_options(parser, DRAWN, usual=100)


def run(options: argparse.Namespace, command: str) -> int:
    """Offer functions to the rules, side by side; exit status 1 where one is neither right nor left."""
    check_draw_options(options)
    require_host_compiler()
    if options.only is not None:
        drawn = draw(options.seed, options.only)
        print(drawn.function.script(), drawn.arch, *drawn.sizes)
    started = time.monotonic()
    record = run_drawn(DRAWN, options, lambda found: _record(options, command, found, time.monotonic() - started))
    _print(options, record)
    return WRONG if record.bad else 0


def _record(options: argparse.Namespace, command: str, outcomes: Sequence[Outcome], seconds: float) -> RuleDraws:
    counts = Counter(outcome.what for outcome in outcomes)
    return RuleDraws(
        command=command,
        **tree_state(options.revision),
        recorded_at=now(),
        seed=options.seed,
        functions=len(outcomes),
        right=counts["right"],
        left=counts["left"],
        wrong=counts["wrong"],
        failed=counts["failed"],
        lost=counts["lost"],
        seconds=round(seconds, 1),
        taken=dict(Counter(outcome.text for outcome in outcomes if outcome.what == "right").most_common()),
        features=by_feature(outcomes),
        reasons=dict(Counter(outcome.text for outcome in outcomes if outcome.what == "left").most_common()),
        bad=tuple(BadDraw(o.number, o.what, o.text) for o in outcomes if o.what not in DRAWN.good),
    )


def _print(options: argparse.Namespace, record: RuleDraws) -> None:
    for bad in record.bad:
        print(f"{bad.what}: {bad.text}\n  ladder rules --seed {options.seed} --only {bad.number}")
    for reason, count in record.reasons.items():
        print(f"{count} left: {reason}")
    taken = ", ".join(f"{count} by {rule}" for rule, count in record.taken.items())
    print(
        f"{record.functions} functions: {record.right} right ({taken}), {record.left} left, {record.wrong} wrong, "
        f"{record.failed} not compiled, {record.lost} lost"
    )
