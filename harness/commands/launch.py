"""``launch``: host time of one launch, by TVM's executable, by the project's own launcher, and by Python calls."""

from __future__ import annotations

import argparse
from functools import partial

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.commands.kernels import lowered
from tensorir_ladder.harness.commands.options import EXPLICIT, UsageError, add_case_options, cases_of, runs_on_gpu
from tensorir_ladder.harness.commands.printing import console, new_table
from tensorir_ladder.harness.host_time import LAUNCHES, host_time_us, ways_to_launch
from tensorir_ladder.kernels.codegen import toolchain

SIZES = "512"  # small, so that the GPU keeps up
add_options = partial(add_case_options, sizes=SIZES)


def run(options: argparse.Namespace, _command: str) -> int:
    """Print a row for each case."""
    if options.variant is None and not options.all_variants:
        options.variant = EXPLICIT
    cases = [case for case in cases_of(options, SIZES) if case.explicit]
    if not cases:
        raise UsageError(f"--step {options.step}: no explicit kernel, which the launcher is for; take step 11")
    runs_on_gpu(options, insist=True)
    backend, compiler = execution.GpuBackend(), toolchain.require_compiler()
    for case in cases:
        ways = ways_to_launch(lowered(case), compiler, backend)
        table = new_table(f"{case}, µs of host time per call, median of rounds of {LAUNCHES}", tuple(ways), texts=())
        table.add_row(*(f"{host_time_us(call, backend.torch.cuda.synchronize):.2f}" for call in ways.values()))
        console().print(table)
    return 0
