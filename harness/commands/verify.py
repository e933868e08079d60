"""``verify``: check outputs, on the GPU or without."""

from __future__ import annotations

import argparse
from functools import partial

from tensorir_ladder.harness.build import compiled
from tensorir_ladder.harness.commands.kernels import backend_for, lowered, verify_one
from tensorir_ladder.harness.commands.options import EITHER_SIZES, add_case_options, placed_cases
from tensorir_ladder.harness.commands.printing import print_code
from tensorir_ladder.kernels.codegen import toolchain

add_options = partial(add_case_options, sizes=EITHER_SIZES)


def run(options: argparse.Namespace, _command: str) -> int:
    """Verify each case; exit status 3 where one cannot be."""
    cases, on_gpu = placed_cases(options)
    codes = []
    for case in cases:
        kernel = compiled(lowered(case), toolchain.require_compiler()) if on_gpu else lowered(case)
        codes.append(verify_one(kernel, backend_for(options, case.step.verified_on(case.variant)), options, ""))
        print_code(kernel, options.show)
    return max(codes)
