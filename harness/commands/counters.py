"""``counters``: count what the hardware does, by Nsight Compute."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace

from tensorir_ladder.harness.commands.measuring import open_session
from tensorir_ladder.harness.commands.options import GPU_SIZES, add_case_options, add_places, cases_of, runs_on_gpu
from tensorir_ladder.harness.counters import MORE_METRICS, ceiling, count, offered_metrics, profiler
from tensorir_ladder.harness.records import Counters, now


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add cases, and where their counters lie."""
    add_case_options(parser, GPU_SIZES)
    add_places(parser)


def run(options: argparse.Namespace, command: str) -> int:
    """Count for each case; its counters are on disk before the next begins."""
    cases = cases_of(options, GPU_SIZES)
    runs_on_gpu(options, insist=True)
    offered = offered_metrics(profiler())
    if left_out := [metric for name, metric in MORE_METRICS.items() if name not in offered]:
        print(f"left out, since this ncu does not list them: {', '.join(left_out)}", file=sys.stderr)
    session = open_session(options, command)
    for case in cases:
        case = replace(case, stages=case.stages_built)
        product = asdict(case.problem)
        del product["out_dtype"]  # which counts do not depend on
        counters = Counters(
            **case.named,
            **product,
            gpu=session.identity["gpu"],
            values=count(case) | ceiling(case),
            revision=session.revision,
            dirty=session.dirty,
            recorded_at=now(),
            command=command,
        )
        print(f"{case}: wrote {counters.save(session.out)}", flush=True)
    return 0
