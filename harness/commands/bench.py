"""``bench``: draw shapes that nobody tuned, and measure what takes them by itself beside cuBLAS."""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Sequence
from itertools import chain, zip_longest

from rich.markup import escape

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.commands.build import ScheduleToBuild, ToBuild, build_ahead, called_machine
from tensorir_ladder.harness.commands.measuring import unfinished
from tensorir_ladder.harness.commands.options import UsageError, add_jobs, add_places, seed_number
from tensorir_ladder.harness.commands.printing import console, new_table, progress
from tensorir_ladder.harness.commands.values import between
from tensorir_ladder.harness.machines import DEFAULT_ARCH, GpuSpec, machine_for
from tensorir_ladder.harness.records import RESULTS, ShapeRecord, check_writable, load_shapes, shape_groups
from tensorir_ladder.harness.session import CaseJournal, Session
from tensorir_ladder.harness.shapes import DRAWN, GROUPS, MOST_SHAPES, Drawn, draw_shapes, measure_shape, scheduled_case
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.schedules.workloads import DTYPES
from tensorir_ladder.torch_ops.errors import PaddedCopy

BUILT_TOGETHER = 4  # for each process: what is built before it is measured, and lost to nobody where time is up


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add groups, how many shapes of each, and for how long."""
    names = ",".join(GROUPS)
    parser.add_argument("--shapes", default="all", metavar="GROUPS", help=f"groups of shapes: {names} or all (all)")
    parser.add_argument("--seed", type=seed_number, default=0, help="what shapes are drawn from (0)")
    text = "shapes of each group (200)"
    parser.add_argument("--count", type=between(1, MOST_SHAPES), default=200, help=text)
    parser.add_argument("--dtype", default="float16", help=f"operands: {' | '.join(DTYPES)} (float16)")
    text = "begin no shape after so many seconds; the same command goes on there (none)"
    parser.add_argument("--time-limit", type=between(1, 10**6, float), default=math.inf, metavar="SECONDS", help=text)
    parser.add_argument("--dry-run", action="store_true", help="draw, choose and build, and measure nothing")
    add_jobs(parser)
    add_places(parser)


def run(options: argparse.Namespace, command: str) -> int:
    """Measure shapes of all groups in turn, so that a time limit leaves as many of each."""
    end = time.monotonic() + options.time_limit
    drawn = _drawn(options)
    out = options.out or RESULTS
    check_writable(out)
    if options.dry_run:
        return _build_all(drawn, options.jobs, end)
    backend = execution.GpuBackend()
    session = Session(toolchain.require_compiler(), backend, out, command, DRAWN, revision=options.revision or "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddedCopy)  # each record says what is copied
        left, wrong = _measure(drawn, session, options.jobs, end)
    _print_groups(session, {(one.group, one.seed, one.problem.dtype) for one in drawn})
    if left > len(wrong):
        print(f"{len(drawn) - left} of {len(drawn)} shapes are measured in the time given; the same command goes on")
    if wrong:
        more = f"; {len(wrong)} shapes in all, which the same command checks again" if len(wrong) > 1 else ""
        raise WrongResult(f"{wrong[0]}{more}")
    return 0


def _drawn(options: argparse.Namespace) -> list[Drawn]:
    """Draw the groups' shapes, one of each in turn; UsageError for a group that there is not, or not of the dtype."""
    names = list(GROUPS) if options.shapes == "all" else [name.strip() for name in options.shapes.split(",")]
    if unknown := [name for name in names if name not in GROUPS]:
        raise UsageError(f"--shapes {unknown[0]!r:.40}: one of {', '.join(GROUPS)}, a list of them, or all")
    able = [name for name in names if options.dtype in GROUPS[name].dtypes]
    if not able or (len(able) < len(names) and options.shapes != "all"):
        wrong = next(name for name in names if name not in able)
        raise UsageError(f"--dtype {options.dtype!r:.40} of --shapes {wrong}: {' | '.join(GROUPS[wrong].dtypes)}")
    groups = [draw_shapes(name, options.seed, options.count, options.dtype) for name in dict.fromkeys(able)]
    return [one for one in chain.from_iterable(zip_longest(*groups)) if one is not None]


def _measure(drawn: Sequence[Drawn], session: Session, jobs: int, end: float) -> tuple[int, list[WrongResult]]:
    """Build some ahead, then measure each and write it down; return how many are left, and what was wrong of these.

    Time may be up. A wrong result has no speed, and keeps no other shape from being measured.
    """
    wrong: list[WrongResult] = []
    machine = execution.gpu_machine()
    with CaseJournal(session, "bench", drawn) as journal:
        session.run = journal.run
        waiting = unfinished(drawn, journal.has, "shapes")
        for part in _parts(waiting, BUILT_TOGETHER * jobs):
            if time.monotonic() >= end:
                break
            build_ahead([_takes(one, machine) for one in part], jobs)
            with progress() as bar:
                for one in bar.track(part, len(drawn), len(journal.entries), description="measuring"):
                    if time.monotonic() >= end:
                        break
                    try:
                        record = measure_shape(session, one)
                    except WrongResult as error:
                        wrong.append(error)
                        bar.console.print(escape(f"wrong result: {error}"), highlight=False)
                        continue
                    record.save(session.out)
                    journal.add(one)
                    bar.console.print(escape(_line(one, record)), highlight=False)
        left = len(drawn) - len(journal.entries)
        if not left:
            journal.finish()
    return left, wrong


def _parts(drawn: Sequence[Drawn], size: int) -> list[Sequence[Drawn]]:
    return [drawn[first : first + size] for first in range(0, len(drawn), size)]


def _takes(one: Drawn, machine: GpuSpec) -> ToBuild | ScheduleToBuild:
    """Return what takes a shape on a GPU."""
    if GROUPS[one.group].scheduled:
        return ScheduleToBuild(scheduled_case(one.problem, machine))
    return ToBuild.on(called_machine(), one.problem)


def _build_all(drawn: Sequence[Drawn], jobs: int, end: float) -> int:
    """Build what would be measured, and say what takes each shape; no GPU is asked for anything."""
    machine, done = machine_for(DEFAULT_ARCH), 0
    for part in _parts(drawn, BUILT_TOGETHER * jobs):
        if time.monotonic() >= end:
            break
        taken = [_takes(one, machine) for one in part]
        build_ahead(taken, jobs)
        for one, takes in zip(part, taken):
            print(f"{one}: {takes.made_for[0] if isinstance(takes, ToBuild) else takes}", flush=True)
        done += len(part)
    print(f"{done} of {len(drawn)} shapes are built; none is checked or timed: --dry-run")
    return 0


def _line(one: Drawn, record: ShapeRecord) -> str:
    low, high = record.ratio_interval
    speed = f"{record.time_ms:.4f} ms, {record.ratio_to_cublas:.3f} ({low:.3f} to {high:.3f}) of {record.baseline_name}"
    return f"{one}: {speed}, {record.contender}, {record.config}"


def _print_groups(session: Session, wanted: set[tuple[str, int, str]]) -> None:
    """Print a row for each group that was asked for, with all shapes of its that are on disk."""
    title = "Beside the faster form of cuBLAS (batches: torch.bmm), in the same rounds"
    headings = ("group", "dtype", "seed", "shapes", "geometric mean", "worst", "its shape", "at least 1")
    table = new_table(title, headings, texts=("group", "dtype", "its shape"))
    for group in shape_groups(load_shapes(session.out)):
        found, worst = group.summary, group.records[0]
        if found["gpu"] != session.identity["gpu"] or (found["group"], found["seed"], found["dtype"]) not in wanted:
            continue
        named = (found["group"], found["dtype"], str(found["seed"]), str(found["count"]))
        shape = "x".join(map(str, worst.shape))
        ratios = (f"{found['geomean']:.3f}", f"{found['worst']:.3f}", shape, f"{found['share_at_least_1']:.0%}")
        table.add_row(*named, *ratios)
    console().print(table)
