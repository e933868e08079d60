"""``compile``: generate and compile code, and write listings of it; needs no GPU."""

from __future__ import annotations

import argparse

from tensorir_ladder.harness.build import Kernel, compiled
from tensorir_ladder.harness.commands.kernels import lowered
from tensorir_ladder.harness.commands.options import LISTING_SIZES, add_case_options, add_places, cases_of
from tensorir_ladder.harness.commands.printing import print_code, print_resources
from tensorir_ladder.harness.explain import aspects, why
from tensorir_ladder.harness.records import Listing, check_writable
from tensorir_ladder.kernels.codegen import toolchain


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add cases, and where listings lie."""
    add_case_options(parser, LISTING_SIZES)
    add_places(parser)


def run(options: argparse.Namespace, _command: str) -> int:
    """Compile the cases; print code, write listings or print what the kernels occupy."""
    cases = cases_of(options, LISTING_SIZES)
    if options.out:
        check_writable(options.out)
    compiler = toolchain.require_compiler()
    kernels = [compiled(lowered(case), compiler) for case in cases]
    for kernel in kernels:
        print_code(kernel, options.show)
        if options.out:
            print(f"wrote {listing(kernel).save(options.out)}")
    if not options.show:
        print(f"compiled by nvcc {compiler.version} ({compiler.origin}) for {kernels[0].case.machine.arch}")
        print_resources(kernels)
    return 0


def listing(kernel: Kernel) -> Listing:
    """Make a compiled kernel's listing."""
    case = kernel.case
    return Listing(
        **case.named,
        title=case.step.title,
        text=case.step.text,
        default_variant=case.usual,
        shape=case.problem.shape,
        dtype=case.problem.dtype,
        layout=case.problem.layout,
        arch=case.machine.arch,
        tir=str(kernel.mod["main"].script()),  # msgspec writes no subclass of str, as TVM gives it
        cuda=kernel.body,
        why=why(kernel),
        code=kernel.code,
        resources=kernel.resources,
        pipeline=kernel.pipeline,
        aspects=aspects(kernel),
    )
