"""``show``: print a step's schedule, and what becomes of it."""

from __future__ import annotations

import argparse

from tensorir_ladder.harness.commands.kernels import lowered
from tensorir_ladder.harness.commands.one_kernel import WHERE, add_kernel_options, case_named
from tensorir_ladder.harness.commands.printing import print_form
from tensorir_ladder.harness.listings import FORMS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the kernel, and the forms to show it in."""
    parser.add_argument("kernel", help=WHERE)
    parser.add_argument("--show", choices=FORMS, help="what to print behind the schedule's source")
    add_kernel_options(parser)


def run(options: argparse.Namespace, _command: str) -> int:
    """Print the schedule's source, and the form asked for."""
    case = case_named(options.kernel, options)
    kernel = lowered(case)
    for form in dict.fromkeys(["schedule", options.show or "schedule"]):
        print_form(kernel, form)
    return 0
