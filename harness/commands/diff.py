"""``diff``: print how two steps' code differs."""

from __future__ import annotations

import argparse
import difflib

from tensorir_ladder.harness.commands.kernels import lowered
from tensorir_ladder.harness.commands.one_kernel import WHERE, add_kernel_options, case_named
from tensorir_ladder.harness.commands.printing import print_code_text
from tensorir_ladder.harness.listings import FORMS, comparable_text, without_numbers


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add both kernels, and the form to compare them in."""
    parser.add_argument("before", help=WHERE)
    parser.add_argument("after", help="another")
    parser.add_argument("--show", choices=FORMS, default="schedule", help="what to compare (schedule)")
    plain = "leave out numbers that compilers give afresh: of registers, labels, common subexpressions"
    parser.add_argument("--plain-names", action="store_true", help=plain)
    add_kernel_options(parser)


def run(options: argparse.Namespace, _command: str) -> int:
    """Print a unified difference; nothing but a sentence where there is none."""
    kernels = [lowered(case_named(text, options)) for text in (options.before, options.after)]
    texts = [comparable_text(kernel, options.show)[1] for kernel in kernels]
    if options.plain_names:
        texts = [without_numbers(text, options.show) for text in texts]
    names = [str(kernel.case) for kernel in kernels]
    found = "\n".join(difflib.unified_diff(*map(str.splitlines, texts), *names, lineterm=""))
    if found:
        print_code_text(found, "diff")
    else:
        print(f"no difference between {names[0]} and {names[1]} in their {FORMS[options.show]}")
    return 0
