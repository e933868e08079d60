"""``tune``: find the best configuration of a step's declared space for each shape, confirm and keep it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.commands.measuring import open_session
from tensorir_ladder.harness.commands.options import (
    GPU_SIZES,
    UsageError,
    add_places,
    add_problem_options,
    add_seed,
    cases_of,
    runs_on_gpu,
)
from tensorir_ladder.harness.records import TunedConfig
from tensorir_ladder.harness.tuning import tune


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add steps, products and how long to search; what is searched is not for choice."""
    add_problem_options(parser, GPU_SIZES)
    budget = "stop searching a step's shape after so many seconds, and confirm the best so far (no limit)"
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=budget)
    parser.add_argument("--retune", action="store_true", help="measure even what is on disk and still good")
    add_seed(parser)
    add_places(parser)
    parser.set_defaults(variant="default", stages=None, tile="default", arch=None, on="gpu", show=None)


def run(options: argparse.Namespace, command: str) -> int:
    """Tune each case; exit status 1 where a candidate of one was wrong, though a right one was found."""
    runs_on_gpu(options)
    if options.budget is not None and not options.budget > 0:
        raise UsageError(f"--budget {options.budget:g}: seconds, more than 0")
    session, wrong = open_session(options, command), []
    for case in cases_of(options, GPU_SIZES):
        print(f"{case.step.name} {case.problem.shape} {case.problem.dtype} {case.problem.layout}", flush=True)
        case = replace(case, tile_choice="tuned")
        tuned = tune(session, case, options.budget, options.retune, lambda line: print(f"  {line}", flush=True))
        _print_tuned(tuned)
        wrong += [candidate.why for candidate in tuned.candidates if candidate.status == "wrong"]
    for why_wrong in wrong:
        print(f"error: wrong result: {why_wrong}", file=sys.stderr)
    return WRONG if wrong else 0


def _print_tuned(tuned: TunedConfig) -> None:
    untimed = [candidate for candidate in tuned.candidates if candidate.status != "timed"]
    counts = {status: sum(c.status == status for c in untimed) for status in ("illegal", "not built", "wrong")}
    others = "".join(f", {count} {status}" for status, count in counts.items() if count)
    print(f"  {tuned.seen} of {tuned.legal} legal candidates seen{others}; in the search, of cuBLAS:")
    for candidate in tuned.candidates[:5]:
        if candidate.ratios:
            print(f"    {candidate.ratios[-1]:.3f}  {candidate.times_ms[-1]:.4f} ms  {candidate.name}")
    print(
        f"  {tuned.verdict}: {tuned.winner.name}: {tuned.time_ms:.4f} ms, {tuned.gflops:.0f} GFLOPS, "
        f"{tuned.ratio_to_cublas:.3f} of cuBLAS, {tuned.gain_over_default_pct:+.1f} % over the default configuration"
    )
    if tuned.runner_up:
        low, high = tuned.margin_interval_pct
        cheaper = "; the cheaper is taken" if tuned.verdict == "tie" else ""
        margin = f"{tuned.margin_pct:+.2f} % ({low:+.2f} to {high:+.2f} %)"
        print(f"  {margin} over the runner-up {tuned.runner_up.name}{cheaper}", flush=True)
