"""``rebuild``: lower recorded cases again, and compare their CUDA with the text that was measured."""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.bandwidth import BandwidthCase, lower_workload
from tensorir_ladder.harness.build import Case, Lowered, lower
from tensorir_ladder.harness.commands import DIFFERENT
from tensorir_ladder.harness.commands.options import UsageError, add_jobs, numbers
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.commands.values import between
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.records import (
    RESULTS,
    Record,
    StreamRecord,
    Timeline,
    load_records,
    load_streams,
    load_timelines,
    shape_text,
)
from tensorir_ladder.schedules.stamps import Stamps
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import get_step

Recorded = Record | StreamRecord | Timeline
# A fresh interpreter: one that has threads, as TVM starts them, cannot be copied.
CONTEXT = multiprocessing.get_context("spawn")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which records, and how many processes."""
    parser.add_argument("--step", help="steps whose records to take: 5 | 1-6 | 1,3 (all, and memory-bound workloads)")
    parser.add_argument("--limit", type=between(1, 10**9), help="take so many, spread over all of them (all)")
    add_jobs(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of records (reports/results)")


def run(options: argparse.Namespace, _command: str) -> int:
    """Lower each distinct case in a process of several; exit status 5 where the CUDA of one differs."""
    steps = numbers(options.step, "--step") if options.step else None
    found: list[Recorded] = [record for record in load_records(options.results) if record.kind == "step"]
    found += [*load_timelines(options.results), *load_streams(options.results)]
    if steps:
        found = [record for record in found if not isinstance(record, StreamRecord) and record.step in steps]
    chosen = _spread(list({_identity(record): record for record in found}.values()), options.limit)
    if not chosen:
        raise UsageError(f"no records{f' of step {options.step}' if steps else ''} in {options.results}")
    differing = []
    pool = ProcessPoolExecutor(min(options.jobs, len(chosen)), CONTEXT)
    try:
        with progress() as bar:
            work = {pool.submit(difference, record): record for record in chosen}
            for done in bar.track(as_completed(work), len(work), description="lowering"):
                if why := done.result():
                    differing.append(f"{_name(work[done])}: {why}")
    finally:
        pool.shutdown(cancel_futures=True)
    print("\n".join([*sorted(differing), f"{len(chosen) - len(differing)} of {len(chosen)} give the recorded CUDA"]))
    return DIFFERENT if differing else 0


def difference(record: Recorded) -> str:
    """Lower a record's case; say how its CUDA differs from the recorded one, or why it is refused; empty if equal."""
    try:
        digest = hashlib.sha256(lowered_again(record).cuda.encode()).hexdigest()
    except ValueError as refused:  # all that a case is refused for: its step, tile, dtype, schedule
        return str(refused)
    return "" if digest == record.source_sha256 else f"CUDA {digest[:12]}, recorded {record.source_sha256[:12]}"


def lowered_again(record: Recorded) -> Lowered:
    """Lower the case of a record for the machine that it was measured on."""
    machine = machine_for(record.arch).of_gpu(record.environment.gpu, record.environment.multiprocessors or None)
    if isinstance(record, StreamRecord):
        case = (record.workload, record.shape, record.dtype, record.variant, record.stages)
        return lower_workload(BandwidthCase(*case, machine))
    step, problem = get_step(record.step), Matmul(*record.shape, record.dtype, record.layout, record.out_dtype)
    case = Case(step, problem, record.variant, step.tile(record.variant, record.tile), machine, record.stages)
    return lower(case, Stamps(record.block, record.room) if isinstance(record, Timeline) else None)


def _spread(records: list[Recorded], limit: int | None) -> list[Recorded]:
    most = min(limit or len(records), len(records))
    return [records[place * len(records) // most] for place in range(most)]


def _identity(record: Recorded) -> tuple[Any, ...]:
    # Records of the same case and digest are one to look at.
    if isinstance(record, StreamRecord):
        own: tuple[Any, ...] = (record.workload,)
    else:
        own = (record.step, record.layout, record.out_dtype, record.tile, getattr(record, "block", None))
    case = (record.shape, record.dtype, record.variant, record.stages)
    return (type(record), *own, *case, record.arch, record.environment.gpu, record.source_sha256)


def _name(record: Recorded) -> str:
    name, tile = (record.workload, "") if isinstance(record, StreamRecord) else (record.step_name, f" {record.tile}")
    what = f"{name}[{record.variant}] {shape_text(record.shape)} {record.dtype}{tile}"
    kind = " with stamps" if isinstance(record, Timeline) else ""
    return f"{what} {record.stages} stages{kind}, recorded {record.environment.recorded_at}"
