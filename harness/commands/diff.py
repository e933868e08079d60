"""``diff``: print how two steps' code differs."""

from __future__ import annotations

import argparse
import difflib

from tensorir_ladder.harness.commands.kernels import lowered
from tensorir_ladder.harness.commands.one_kernel import WHERE, add_kernel_options, case_named
from tensorir_ladder.harness.commands.printing import FORMS, print_code_text, text_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add both kernels, and the form to compare them in."""
    parser.add_argument("before", help=WHERE)
    parser.add_argument("after", help="another")
    parser.add_argument("--show", choices=FORMS, default="schedule", help="what to compare (schedule)")
    add_kernel_options(parser)


def run(options: argparse.Namespace, _command: str) -> int:
    """Print a unified difference; nothing but a sentence where there is none."""
    kernels = [lowered(case_named(text, options)) for text in (options.before, options.after)]
    texts = [text_of(kernel, options.show).splitlines() for kernel in kernels]
    names = [str(kernel.case) for kernel in kernels]
    found = "\n".join(difflib.unified_diff(*texts, *names, lineterm=""))
    if found:
        print_code_text(found, "diff")
    else:
        print(f"no difference between {names[0]} and {names[1]} in their {FORMS[options.show]}")
    return 0
