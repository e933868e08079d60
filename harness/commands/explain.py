"""``explain``: tell a step's software pipeline: statements, time table, prologue, body and epilogue."""

from __future__ import annotations

import argparse

from tensorir_ladder.harness.commands.kernels import lowered
from tensorir_ladder.harness.commands.one_kernel import WHERE, add_kernel_options, case_named
from tensorir_ladder.harness.explain import no_pipeline, pipelined_loops
from tensorir_ladder.schedules.pipeline.explain import explain_pipeline


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the kernel."""
    parser.add_argument("kernel", help=WHERE)
    add_kernel_options(parser)


def run(options: argparse.Namespace, _command: str) -> int:
    """Print :func:`schedules.pipeline.explain_pipeline` of each pipelined loop, the outermost first."""
    kernel = lowered(case_named(options.kernel, options))
    print(f"{kernel.case.step.title}\n{kernel.case}")
    loops = pipelined_loops(kernel)
    if not loops:
        print(f"\n{no_pipeline(kernel)}")
    for loop in loops:
        print(f"\n{explain_pipeline(kernel.schedule, loop)}")
    return 0
