"""``run``: verify, and measure where there is a GPU; or measure cuBLAS against itself, or a record's case again."""

from __future__ import annotations

import argparse

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands import NOT_VERIFIED
from tensorir_ladder.harness.commands.first_look import one_form, print_closing, print_opening
from tensorir_ladder.harness.commands.kernels import backend_for, built, lowered, verify_one, why_on_the_cpu
from tensorir_ladder.harness.commands.measuring import measure_cases, open_session
from tensorir_ladder.harness.commands.options import (
    CHOICES,
    EITHER_SIZES,
    GPU_SIZES,
    UsageError,
    add_case_options,
    add_peers,
    add_places,
    placed_cases,
    problem_of,
    shapes_of,
)
from tensorir_ladder.harness.commands.printing import (
    print_code,
    print_energy,
    print_records,
    print_variants,
    record_line,
)
from tensorir_ladder.harness.commands.values import between
from tensorir_ladder.harness.environment import energy_counter
from tensorir_ladder.harness.measure import Measurer
from tensorir_ladder.harness.peers import find_peers
from tensorir_ladder.harness.records import check_writable, read_place, shape_text
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.codegen.toolchain import NoCompiler
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.steps.step import UnknownStep

MOST_SECONDS = 600


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add cases, peers, and what to measure instead."""
    add_case_options(parser, EITHER_SIZES)
    add_places(parser)
    add_peers(parser)
    parser.add_argument("--calibrate", action="store_true", help="measure cuBLAS against itself: must give 1.00")
    where = "measure a record's case again, old beside new; `ladder table --json` names its place"
    parser.add_argument("--again", metavar="FILE:LINE", help=where)
    text = "also measure energy and clock, so long for each case, cuBLAS's forms and peers, each launched without pause"
    parser.add_argument("--energy", type=between(1, MOST_SECONDS), default=0, metavar="SECONDS", help=text)


def run(options: argparse.Namespace, command: str) -> int:
    """Measure the cases, or do without a GPU what can be done."""
    peers = find_peers(options.peers)
    if options.calibrate and peers:
        raise UsageError(f"--peers {options.peers}: --calibrate measures cuBLAS against itself; leave out one of them")
    if options.energy and (options.again or options.calibrate):
        other = "--again" if options.again else "--calibrate"
        raise UsageError(f"--energy and {other} exclude each other; leave out one of them")
    if options.again:
        return _run_again(options, command)
    if options.calibrate:
        return _calibrate(options, command)
    cases, on_gpu = placed_cases(options, tunes=True)
    if not on_gpu:
        return _run_without_gpu(cases, options)
    if options.energy:
        energy_counter()  # refused before anything is built
    alone = one_form(cases)
    records = measure_cases(cases, options, command)
    if alone:
        print_opening(lowered(alone))
    print_records(records)
    if options.energy:
        print_energy(records)
    if len({case.step.number for case in cases}) == 1 and len({case.variant for case in cases}) > 1:
        print_variants([built(case) for case in _per_variant(cases)])
    for record in records:
        if record.predicted_gain_pct is not None and record.default_variant:
            predicted, measured = record.predicted_gain_pct, record.improvement_over_previous_pct
            where = f"{shape_text(record.shape)}, tile {record.tile}"
            print(f"gain over the step before at {where}: predicted {predicted:+.0f} %, measured {measured:+.0f} %")
    if alone:
        print_closing(built(alone))
    return 0


def _run_without_gpu(cases: list[Case], options: argparse.Namespace) -> int:
    if options.energy:
        why = execution.why_none() or why_on_the_cpu(options.on)
        raise UsageError(f"--energy {options.energy} reads a GPU's counter: {why}; or leave out --energy")
    if options.tile in CHOICES[1:]:
        what = f"--tile {options.tile} is found by measuring, which takes a GPU"
        raise UsageError(f"{what}: {execution.why_none() or why_on_the_cpu(options.on)}; name a tile")
    kernels, code = [], 0
    if options.out:
        check_writable(options.out)
        print(f"no record will be written to {options.out}: nothing is measured without a GPU")
    why_not = f"speed not measured: {why_on_the_cpu(options.on)}"
    if find_peers(options.peers):
        print(f"peers ({options.peers}) are only timed beside a measured step; {why_not}")
    alone = one_form(cases)
    for case in cases:
        kernel = built(case)
        if case is alone:
            print_opening(kernel)
        kernels.append(kernel)
        code = max(
            code, verify_one(kernel, backend_for(options, case.step.verified_on(case.variant)), options, why_not)
        )
        print_code(kernel, options.show)
    try:
        toolchain.require_compiler()
    except NoCompiler as missing:
        print(f"not compiled: {missing}")
    if alone:
        print_closing(kernels[0])
    elif len(kernels) > 1:
        print_variants([built(case) for case in _per_variant(cases)])
    return 0 if code == NOT_VERIFIED else code


def _run_again(options: argparse.Namespace, command: str) -> int:
    old = read_place(options.again)
    measurer = Measurer(open_session(options, command), peers=tuple(find_peers(options.peers)))
    problem = Matmul(old.m, old.n, old.k, old.dtype, old.layout, old.out_dtype)
    if old.kind == "calibration":
        new = measurer.calibrate(problem)
    else:
        steps = find_steps()
        if old.step not in steps:
            raise UnknownStep(f"{options.again} measured step {old.step}, which is not in steps/")
        tile, machine = steps[old.step].tile(old.variant, old.tile), execution.gpu_machine()
        new = measurer.measure(Case(steps[old.step], problem, old.variant, tile, machine, old.stages, "given"))
    new.save(measurer.session.out)
    for label, record in (("old", old), ("new", new)):
        print(f"{label} {record.environment.recorded_at} {record.environment.gpu}: {record_line(record)}")
    return 0


def _calibrate(options: argparse.Namespace, command: str) -> int:
    problems = [problem_of(options, shape) for shape in shapes_of(options, GPU_SIZES)]
    session = open_session(options, command)
    for problem in problems:
        record = Measurer(session).calibrate(problem)
        record.save(session.out)
        print(record_line(record), flush=True)
    return 0


def _per_variant(cases: list[Case]) -> list[Case]:
    """Pick the first case of every step and variant."""
    first: dict[tuple[int, str], Case] = {}
    for case in cases:
        first.setdefault((case.step.number, case.variant), case)
    return list(first.values())
