"""``fuzz``: random products, steps and configurations through the emulator or the GPU, each right or refused."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorir_ladder.emulator.compiler import BUILDS, require_host_compiler
from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.commands.options import UsageError, add_jobs, add_revision, numbers
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.commands.values import between
from tensorir_ladder.harness.environment import MEASURING_SOURCES, ROOT, host_cpu, sources_digest, tree_state
from tensorir_ladder.harness.execution import require_gpu
from tensorir_ladder.harness.records import Journal, append, check_appendable
from tensorir_ladder.harness.workers import Lost, each_in_a_process
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.lab.call_draws import ARCHES, ON_HOPPER, run_calls
from tensorir_ladder.lab.draws import Draws
from tensorir_ladder.lab.draws import Outcome as Drawn
from tensorir_ladder.lab.fuzzing import PLACES, Bad, Draw, FuzzOutcome, run_draw, summed_up
from tensorir_ladder.lab.misuses import run_misuses
from tensorir_ladder.steps.registry import find_steps, get_step

SOURCES = (*MEASURING_SOURCES, "emulator/*.py", "emulator/device/*")
RECORDED = ("command", "slots", "executed")  # fields that tell a record of this command
TOGETHER, CALLS_TOGETHER = 40, 5  # misuses, and calls, that a process draws
FIRST_ON_GPU = 10  # the steps before are nothing that the emulator and LLVM could not tell


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many are drawn, of which steps, from which seed, and where they run."""
    parser.add_argument("--step", help="steps: 5 | 1-6 | 1,3 (all that can be verified there; on the GPU from 10 on)")
    parser.add_argument("--on", choices=tuple(PLACES), default="emulator", help="where they run (emulator)")
    parser.add_argument("--kernels", type=int, default=50, help="cases drawn, each with a kernel of its own (50)")
    parser.add_argument("--runs", type=int, default=300, help="runs of all of them together (300)")
    seeds = "what cases, data and orders are drawn from (0)"
    parser.add_argument("--seed", type=between(0, 2**63 - 1), default=0, help=seeds)
    add_jobs(parser)
    seconds = between(0.001, 1e6, float)
    parser.add_argument("--limit-s", type=seconds, default=180, help="seconds that a draw may take (180)")
    parser.add_argument("--only", type=int, metavar="DRAW", help="run this draw alone, as in the run of all")
    misuses = "instead: calls of public schedule functions drawn with wrong arguments, each refused, nothing changed"
    parser.add_argument("--misuses", type=between(1, 10**6), metavar="N", help=misuses)
    calls = "instead: products as torch_ops.matmul takes them without wgmma, small ones in the emulator"
    parser.add_argument("--calls", type=between(1, 10**6), metavar="N", help=calls)
    compiles = "with --calls: large ones, compiled by nvcc for this architecture"
    parser.add_argument("--compile", choices=(*ARCHES, ON_HOPPER), metavar="ARCH", help=compiles)
    parser.add_argument("--out", type=Path, help="file of JSON lines that the record is appended to")
    add_revision(parser)


def run(options: argparse.Namespace, command: str) -> int:
    """Run draws side by side; exit status 1 where one is bad.

    On the GPU the first kernel that hangs ends the run: what shares the GPU with it tells nothing.
    """
    if options.misuses is not None:
        return _run_parts(options, "--misuses", options.misuses, run_misuses)
    if options.calls is not None:
        toolchain.require_compiler() if options.compile else _check_place("emulator")
        return _run_parts(options, "--calls", options.calls, run_calls)
    draws, started = _draws(options), time.monotonic()
    with _journal(options, draws) as journal:
        outcomes = list({outcome.number: outcome for outcome in journal.entries}.values()) if journal else []
        done = {outcome.number for outcome in outcomes}
        left = [draw for draw in draws if draw.number not in done]
        with progress() as bar, closing(each_in_a_process(run_draw, left, options.jobs, options.limit_s)) as results:
            for outcome in bar.track(_outcomes(results), len(draws), len(done), description="fuzzing"):
                outcomes.append(outcome)
                if journal:
                    journal.add(outcome)
                if options.on == "gpu" and any(bad.what == "hung" for bad in outcome.bad):
                    break
        found = summed_up(outcomes)
        if journal:
            record = _record(options, command, found, outcomes, time.monotonic() - started)
            append(options.out, record | {"slots_of_earlier_runs": len(done)})
            if len(outcomes) == len(draws):  # else it stays, so that the run can go on
                journal.finish()
    _print(options, found, outcomes, len(draws))
    return WRONG if any(outcome.bad for outcome in outcomes) else 0


def _run_parts(options: argparse.Namespace, what: str, number: int, run: Callable[..., list[Drawn]]) -> int:
    """Run draws in parts, and print those that went wrong."""
    if options.step or options.out or options.on != "emulator":
        raise UsageError(f"{what} takes --seed, --only and --jobs, and no --step, --on or --out")
    wanted = range(number) if options.only is None else [options.only]
    together = TOGETHER if run is run_misuses else CALLS_TOGETHER
    how = (1, "") if not options.compile else (0, options.compile)
    parts = [Draws(options.seed, tuple(wanted[at : at + together]), *how) for at in range(0, len(wanted), together)]
    counts: Counter[str] = Counter()
    with progress() as bar, closing(each_in_a_process(run, parts, options.jobs, options.limit_s)) as results:
        for part, found in bar.track(results, len(parts), 0, description=what.strip("-")):
            lost = isinstance(found, Lost)
            for one in [Drawn(part.numbers[0], "lost", f"{found.doing}: {found.reason}")] if lost else found:
                counts[one.what] += 1
                if one.what in ("wrong", "failed", "lost"):
                    compiled = f" --compile {options.compile}" if options.compile else ""
                    again = f"\n  ladder fuzz {what} 1{compiled} --seed {options.seed} --only {one.number}"
                    repeat = "" if lost else again
                    print(f"{one.what}: {one.text}{repeat}")
    failed = "raised something else or changed the schedule" if run is run_misuses else "raised something"
    print(
        f"{counts.total()} calls: {counts['refused']} refused, {counts['right']} done, {counts['wrong']} wrong, "
        f"{counts['failed']} {failed}, {counts['lost']} ended their process"
    )
    return WRONG if counts["wrong"] or counts["failed"] or counts["lost"] else 0


def _journal(options: argparse.Namespace, draws: list[Draw]) -> AbstractContextManager[Journal[FuzzOutcome] | None]:
    # Runs that differ in their draws or in the sources are not the same.
    if options.out is None:
        return nullcontext()
    check_appendable(options.out, RECORDED)
    plan = [options.out.name, *map(asdict, (draws[0], draws[-1])), sources_digest(ROOT, SOURCES)]
    return Journal(options.out.parent, "fuzz", plan, FuzzOutcome)


def _draws(options: argparse.Namespace) -> list[Draw]:
    if not 1 <= options.kernels <= options.runs:
        raise UsageError(f"--kernels {options.kernels} --runs {options.runs}: 1 to as many kernels as runs")
    if options.only is not None and not (0 <= options.only < options.kernels and options.out is None):
        raise UsageError(f"--only {options.only}: a draw from 0 to {options.kernels - 1}, and without --out")
    given = numbers(options.step, "--step") if options.step else None
    first = FIRST_ON_GPU if options.on == "gpu" else 1
    steps = [get_step(number) for number in given or find_steps() if given or number >= first]
    able = tuple(step.number for step in steps if options.on in step.verified_on(step.variants[0].name))
    if not able or (given and len(able) < len(given)):
        raise UsageError(f"--step {options.step}: not all of them can be verified on the {options.on}; name others")
    _check_place(options.on)
    share, more = divmod(options.runs, options.kernels)
    draws = [Draw(options.seed, number, share + (number < more), able, options.on) for number in range(options.kernels)]
    return draws if options.only is None else [draws[options.only]]


def _check_place(on: str) -> None:
    # Before processes are started.
    if on == "gpu":
        require_gpu()
        toolchain.require_compiler()
    else:
        require_host_compiler()
        BUILDS.folder()  # a cache that cannot be used is said here, and not by each process


def _outcomes(results: Iterator[tuple[Draw, FuzzOutcome | Lost]]) -> Iterator[FuzzOutcome]:
    # A process that is gone is a bad run.
    for draw, result in results:
        if isinstance(result, Lost):
            bad = Bad("hung" if result.hung else "crashed", result.doing, result.reason)
            result = FuzzOutcome(draw.number, *draw.kind, result.doing, bad=[bad])
        yield result


def _record(
    options: argparse.Namespace, command: str, found: dict[str, Any], outcomes: Sequence[FuzzOutcome], seconds: float
) -> dict[str, Any]:
    return {
        "command": command,
        **tree_state(options.revision),
        "on": options.on,
        "host_cpu": host_cpu(),
        **({"gpu": _gpu_name()} if options.on == "gpu" else {}),
        "jobs": options.jobs,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        # A draw is a "slot" in records.
        "slot_seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "slowest_slot_seconds": max(outcome.seconds for outcome in outcomes),
        "slots_asked_for": options.kernels,
        "slots": len(outcomes),
        **found,
        "bad": [{"repeat": _repeat(options, outcome), **asdict(bad)} for outcome, bad in _smallest_first(outcomes)],
    }


def _gpu_name() -> str:
    return str(require_gpu().cuda.get_device_name())


def _smallest_first(outcomes: Sequence[FuzzOutcome]) -> list[tuple[FuzzOutcome, Bad]]:
    pairs = [(outcome, bad) for outcome in outcomes for bad in outcome.bad]
    return sorted(pairs, key=lambda pair: (pair[1].size or float("inf"), pair[0].number))


def _repeat(options: argparse.Namespace, outcome: FuzzOutcome) -> str:
    steps = f" --step {options.step}" if options.step else ""
    counts = f"--kernels {options.kernels} --runs {options.runs} --seed {options.seed} --only {outcome.number}"
    return f"ladder fuzz --on {options.on}{steps} {counts}"


def _print(options: argparse.Namespace, found: dict[str, Any], outcomes: Sequence[FuzzOutcome], asked: int) -> None:
    for outcome, bad in _smallest_first(outcomes):
        print(f"{bad.what}: {bad.case}: {bad.text}\n  {_repeat(options, outcome)}")
    if len(outcomes) < asked:
        print(f"ended after {len(outcomes)} of {asked} draws, since a kernel hangs on the GPU")
    print(
        f"{found['executed'] + found['refused']} runs on the {options.on}, {found['kernels']} kernels: "
        f"{found['right']} right, {found['refused']} refused, {found['wrong']} wrong, {found['fault']} at fault, "
        f"{found['crashed']} crashed, {found['hung']} hung"
    )
