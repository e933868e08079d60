"""``fuzz``: random products, steps and configurations through the emulator, each right or refused."""

from __future__ import annotations

import argparse
import json
import random
import warnings
from pathlib import Path

from harness.commands import WRONG
from harness.commands.options import UsageError, numbers
from harness.commands.show import progress
from harness.emulator.fuzz import Tally, draw_case, run_case
from steps.registry import find_steps, get_step

TEXT = "random shapes and configurations of the steps through the emulator: each right, or refused with a reason"


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many, of which steps, and from which seed."""
    parser.add_argument("--step", help="steps: 5 | 1-6 | 1,3 (all)")
    parser.add_argument("--kernels", type=int, default=30, help="cases that are drawn (30)")
    parser.add_argument("--runs", type=int, default=300, help="runs of all of them together (300)")
    parser.add_argument("--seed", type=int, default=0, help="what cases, data and orders are drawn from (0)")
    parser.add_argument("--out", type=Path, help="a file for the tally, as JSON")


def run(options: argparse.Namespace, command: str) -> int:
    """Draw cases and run them; exit status 1 where one is bad."""
    if not 1 <= options.kernels <= options.runs:
        raise UsageError(f"--kernels {options.kernels} --runs {options.runs}: 1 to as many kernels as runs")
    steps = [get_step(number) for number in (numbers(options.step, "--step") if options.step else find_steps())]
    generator, tally = random.Random(options.seed), Tally()
    with progress() as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more stages than k tiles, rows copied in front: not what is looked for
        task = bar.add_task("fuzzing", total=options.runs)
        drawn = 0
        while tally.runs < options.runs:
            # Refusals leave their share of the runs to the cases after them.
            share = max(1, -(-(options.runs - tally.runs) // max(1, options.kernels - drawn)))
            seed = generator.randrange(1 << 30)
            run_case(draw_case(generator.choice, steps), range(seed, seed + share), tally)
            drawn += 1
            bar.update(task, completed=tally.runs)
    for line in tally.bad:
        print(line)
    print(
        f"{tally.runs} runs of {drawn} cases, {tally.kernels} compiled: {tally.right} right, "
        f"{tally.refused} refused, {len(tally.bad)} wrong or at fault"
    )
    if options.out:
        options.out.write_text(json.dumps({"command": command, "cases": drawn, **vars(tally)}, indent=1) + "\n")
    return WRONG if tally.bad else 0
