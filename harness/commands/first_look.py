"""One step at a glance: its pipeline, what was verified, what was recorded, and what to type next."""

from __future__ import annotations

from tensorir_ladder.harness.build import Case, Kernel
from tensorir_ladder.harness.cli import as_typed
from tensorir_ladder.harness.explain import pipelined_loops, why
from tensorir_ladder.harness.records import RESULTS, Record, newest, read_places
from tensorir_ladder.schedules.pipeline.explain import time_table
from tensorir_ladder.steps.registry import find_steps


def one_form(cases: list[Case]) -> Case | None:
    """Return the first of the cases where all are of one step and variant; None where there is more to compare."""
    return cases[0] if len({(case.step.number, case.variant) for case in cases}) == 1 else None


def print_opening(kernel: Kernel) -> None:
    """Print the step's title and, where a loop is pipelined, which tile each statement works on when."""
    case = kernel.case
    others = len(case.step.variants) - 1
    print(f"{case.step.title} (variant {case.variant}{f', one of {others + 1}' if others else ''})")
    for loop in pipelined_loops(kernel)[:1]:
        print(f"\nThe k loop, tile by tile:\n{time_table(kernel.schedule, loop)}\n")


def print_closing(kernel: Kernel) -> None:
    """Print what the code is, what was recorded of the case on GPUs that have records, and three commands."""
    case = kernel.case
    print(f"\n{as_typed(why(kernel))}")
    for line in _recorded(case):
        print(line)
    print("\nnext:")
    for command, what in _next(case):
        print(f"  {as_typed(command):<46}  {what}")


def _recorded(case: Case) -> list[str]:
    """Say for each GPU with records of the default tiles how fast the variant was beside cuBLAS, size by size."""
    if not RESULTS.is_dir():
        return []
    by_gpu: dict[str, dict[int, Record]] = {}
    for record in newest(read_places(RESULTS, Record)).values():
        if _is_of(record, case):
            by_gpu.setdefault(record.environment.gpu, {})[record.m] = record
    return [
        f"recorded on {gpu}, of cuBLAS: " + ", ".join(f"{m}³ {of[m].ratio_to_cublas:.2f}" for m in sorted(of))
        for gpu, of in by_gpu.items()
    ]


def _is_of(record: Record, case: Case) -> bool:
    square = record.m == record.n == record.k
    chosen = record.tile_choice == "default" and record.default_stages
    named = (record.kind, record.step, record.variant) == ("step", case.step.number, case.variant)
    operands = (record.dtype, record.layout) == (case.problem.dtype, case.problem.layout)
    return square and chosen and named and operands


def _next(case: Case) -> list[tuple[str, str]]:
    number, steps = case.step.number, sorted(find_steps())
    before = max((other for other in steps if other < number), default=None)
    lines = []
    if before is not None:
        lines.append((f"ladder diff {before} {number}", "what this step changes in the schedule"))
    if case.step.pipelined and not case.explicit:
        lines.append((f"ladder explain {number} --stages {case.stages_built + 1}", "prologue, body and epilogue"))
    if len(case.step.variants) > 1:
        lines.append((f"ladder run --step {number} --all-variants", "its variants, compared"))
    lines.append((f"ladder show {number} --show cuda", "the generated kernel"))
    return lines[:3]
