"""``traces``: record on the GPU what instructions do with layouts, and hold the emulator to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensorir_ladder import emulator
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.commands import DIFFERENT
from tensorir_ladder.harness.commands.options import UsageError
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.environment import gpu_identity
from tensorir_ladder.harness.records import check_writable
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.lab.traces import RECORDED, difference, probes, record
from tensorir_ladder.lab.traces.recording import ARCH
from tensorir_ladder.torch_ops.driver import cuda_driver


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which probes to record, and where their traces go."""
    parser.add_argument("--only", default="", metavar="WORD", help="probes whose names have this in them (all)")
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the traces, one file each (the tests')")


def run(options: argparse.Namespace, _command: str) -> int:
    """Record what is missing; where there is a C++ compiler, exit status 5 if the emulator does otherwise."""
    wanted = [probe for probe in probes() if options.only in probe.name]
    if not wanted:
        raise UsageError(f"--only {options.only}: no probe has that in its name; leave it out for all")
    check_writable(options.out)
    execution.require_gpu()
    if (arch := execution.gpu_arch()) != ARCH:
        raise UsageError(f"the GPU here is {arch}, and the probes have {ARCH}'s instructions; run on an H100 or H200")
    compares, differing = emulator.find_host_compiler() is not None, []
    with progress() as bar:
        traces = record(wanted, toolchain.require_compiler(), gpu_identity(), cuda_driver(), options.out)
        for probe, trace in bar.track(traces, len(wanted), description="recording"):
            if compares and (unlike := difference(probe.lines(probe.program), trace.lines)):
                differing.append(f"{probe.name}: the emulator differs at {unlike}")
    print("\n".join([*differing, f"{len(wanted)} traces in {options.out}"]))
    if compares:
        print(f"the emulator does the same in {len(wanted) - len(differing)} of {len(wanted)}")
    return DIFFERENT if differing else 0
