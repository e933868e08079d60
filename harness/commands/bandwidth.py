"""``bandwidth``: measure workloads bound by memory beside a copy and torch, or verify them without a GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from tensorir_ladder.harness.bandwidth import (
    DTYPES,
    MIB,
    SEEDS,
    VARIANTS,
    WORKLOADS,
    BandwidthCase,
    bandwidth_cases,
    lower_workload,
    measure_workloads,
    verify_workload,
)
from tensorir_ladder.harness.build import compiled
from tensorir_ladder.harness.commands.kernels import PLACES, backend_for, why_on_the_cpu
from tensorir_ladder.harness.commands.measuring import open_session, unfinished
from tensorir_ladder.harness.commands.options import add_machine_options, add_revision, machine_of, numbers, runs_on_gpu
from tensorir_ladder.harness.commands.printing import console, new_table, progress
from tensorir_ladder.harness.records import StreamRecord, check_writable, shape_text
from tensorir_ladder.harness.session import CaseJournal, Session
from tensorir_ladder.harness.verify import draw_seeds
from tensorir_ladder.kernels.codegen import toolchain

SIZES_MIB, CPU_MIB = "1,16,256,1024", 0.25


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add workloads, sizes, variants and stage counts."""
    names = ",".join(WORKLOADS)
    parser.add_argument("--workload", default=names, help=f"workloads: {names} (all)")
    parser.add_argument("--mb", help=f"MiB (2^20 bytes) of the input: 1,256 or a range ({SIZES_MIB})")
    parser.add_argument("--variant", default="all", help=f"{' | '.join(VARIANTS)} | all (all)")
    parser.add_argument("--stages", default="1-5", help="stages of staged inputs, 1 unpipelined: 2 | 1-5 (1-5)")
    parser.add_argument("--dtype", default="float32", help=f"{' | '.join(DTYPES)} (float32)")
    add_machine_options(parser)
    add_revision(parser)
    parser.add_argument("--verify", action="store_true", help="check outputs only, at the sizes given")
    parser.add_argument("--out", type=Path, help="folder for records")


def run(options: argparse.Namespace, command: str) -> int:
    """Measure all cases of a workload and size in the same rounds; or verify them without a GPU."""
    on_gpu = runs_on_gpu(options)
    sizes = numbers(options.mb or SIZES_MIB, "--mb")
    cases = bandwidth_cases(
        [name.strip() for name in options.workload.split(",")],
        sizes,
        VARIANTS if options.variant == "all" else [options.variant],
        numbers(options.stages, "--stages"),
        options.dtype,
        machine_of(options),
    )
    if options.verify or not on_gpu:
        return _verify(cases, options, on_gpu)
    _print_records(_measure(cases, open_session(options, command)))
    return 0


def _measure(cases: list[BandwidthCase], session: Session) -> list[StreamRecord]:
    groups: dict[tuple[str, tuple[int, ...]], list[BandwidthCase]] = {}
    for case in cases:
        groups.setdefault((case.workload, case.shape), []).append(case)
    records = []
    with CaseJournal(session, "bandwidth", cases) as journal, progress() as bar:
        waiting = unfinished(groups.values(), lambda group: all(map(journal.has, group)), "sizes")
        session.compile_together(lower_workload(case) for group in waiting for case in group)
        task = bar.add_task("measuring", total=len(waiting))
        for group in waiting:
            bar.update(task, description=escape(f"{group[0].workload} {shape_text(group[0].shape)}"))
            made = measure_workloads(session, group)
            for record in made:
                record.save(session.out)
            if len(made) < len(group):
                print(f"{group[0]} and others: {len(group) - len(made)} left out, a block has fewer tiles than stages")
            records += made
            for case in group:
                journal.add(case)
            bar.advance(task)
        journal.finish()
    return records


def _verify(cases: list[BandwidthCase], options: argparse.Namespace, on_gpu: bool) -> int:
    if options.out:
        check_writable(options.out)
        print(f"no record will be written to {options.out}: nothing is measured")
    if not on_gpu:
        small = [replace(case, shape=case.kind.shape(round(CPU_MIB * MIB), case.dtype)) for case in cases]
        cases = list(dict.fromkeys(small))
    backend = backend_for(options, ("gpu", "llvm", "emulator"))
    for case in cases:
        kernel = lower_workload(case)
        kernel = compiled(kernel, toolchain.require_compiler()) if on_gpu else kernel
        result = verify_workload(case, kernel, backend, seeds=draw_seeds(options.seed, SEEDS))
        print(f"{case}: worst error {result.max_error:.2g}, tolerance {result.tolerance:.2g}", flush=True)
    why_not = "--verify" if on_gpu else why_on_the_cpu(options.on)
    where = PLACES[backend.name] + ("" if on_gpu else f" at {CPU_MIB} MiB")
    print(f"verified {where}; speed not measured: {why_not}")
    return 0


def _print_records(records: list[StreamRecord]) -> None:
    headings = ("workload", "shape", "variant", "stages", "ms", "GB/s", "of copy", "torch GB/s", "occupancy", "bound")
    title = "Measured (medians; the copy and torch in the same rounds)"
    table = new_table(title, headings, texts=("workload", "shape", "variant", "bound"))
    for r in records:
        torch = "–" if r.torch is None else f"{r.bytes_moved / r.torch.median_ms / 1e6:.0f}"
        case = (r.workload, shape_text(r.shape), r.variant, str(r.stages))
        numbers = (f"{r.timing.median_ms:.4f}", f"{r.gb_s:.0f}", f"{r.ratio_to_copy:.2f}", torch)
        table.add_row(*case, *numbers, f"{r.resources.occupancy:.0%}", r.bound)
    console().print(table)
