"""``microbench``: measure the GPU's own rates and latencies, which predictions need."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.commands.options import add_revision
from tensorir_ladder.harness.environment import tree_state
from tensorir_ladder.harness.models.rate_files import RATES
from tensorir_ladder.harness.records import check_writable
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.lab.microbench import BENCHMARKS, chosen, measure_rates


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which quantities to measure, and where their file lies."""
    parser.add_argument("--only", metavar="NAME,…", help=f"quantities (all): {', '.join(BENCHMARKS)}")
    add_revision(parser)
    parser.add_argument("--out", type=Path, default=RATES, help="folder for the GPU's file (gpus/rates)")


def run(options: argparse.Namespace, command: str) -> int:
    """Measure the GPU's rates; each is in its file, and printed, before the next begins."""
    benchmarks = chosen(options.only)
    machine, compiler = execution.gpu_machine(), toolchain.require_compiler()
    check_writable(options.out)
    for benchmark in benchmarks:
        if not benchmark.runs_on(machine.arch):
            print(f"{benchmark.name}: not measured, only {benchmark.arch} has the instruction; this is {machine.arch}")
    benchmarks = [benchmark for benchmark in benchmarks if benchmark.runs_on(machine.arch)]
    provenance = {"command": command, **tree_state(options.revision)}
    for name, found, path in measure_rates(machine, compiler, benchmarks, options.out, provenance):
        at = [f"{value:g}: " for value in found.at] or [""]
        shown = ", ".join(f"{place}{median:.4g}" for place, median in zip(at, found.medians))
        over = f" over {found.over}" if found.over else ""
        print(f"{name}{over}: {shown} (samples within {found.spread_pct:.1f} %), in {path}", flush=True)
    return 0
