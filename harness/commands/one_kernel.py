"""Name one kernel on a command line, ``STEP`` or ``STEP:VARIANT``, for the commands that look at it."""

from __future__ import annotations

import argparse
import re

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.options import (
    LISTING_SIZES,
    UsageError,
    add_machine_options,
    add_shape_options,
    cases_of,
    tile_forms,
)

WHERE = "a step, and maybe one of its variants: 5 | 5:sync"


def add_kernel_options(parser: argparse.ArgumentParser) -> None:
    """Add options that say of what shape, tile and machine a kernel is."""
    add_shape_options(parser, LISTING_SIZES)
    parser.add_argument("--stages", help="stages of each shared operand (the step's own)")
    parser.add_argument("--tile", default="default", help=f"default, or a tile as text: {tile_forms()}")
    add_machine_options(parser)


def case_named(text: str, options: argparse.Namespace) -> Case:
    """Return the case that ``STEP`` or ``STEP:VARIANT`` names; UsageError for what is neither, or several sizes."""
    if not (match := re.fullmatch(r"(\d+)(?::([\w.-]+))?", text)):
        raise UsageError(f"{text!r:.40} names no kernel; give {WHERE}")
    named = {"step": match.group(1), "variant": match.group(2) or "default"}
    cases = cases_of(argparse.Namespace(**vars(options) | named), LISTING_SIZES)
    if len(cases) != 1:
        raise UsageError(f"{len(cases)} kernels, where one is looked at; give one size")
    return cases[0]
