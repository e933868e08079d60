"""``tune``: find the best configuration of a step's declared space for each shape, confirm and keep it.

With ``--gpus`` or ``--tracker``, processes of a fleet start before anything is imported here that takes as long.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tensorir_ladder.harness.commands import WRONG

if TYPE_CHECKING:
    from tensorir_ladder.harness.build import Case
    from tensorir_ladder.harness.fleet.messages import Identity
    from tensorir_ladder.harness.fleet.starting import Parts
    from tensorir_ladder.harness.machines import GpuSpec
    from tensorir_ladder.harness.records import TunedConfig

CANDIDATES = 8
MOST_GPUS = 64
MOST_SECONDS = 1e6
FLEET_ONLY = ("candidates", "exhaustive", "jobs", "key")


@dataclass(frozen=True)
class Begun:
    """Say since when a command runs, and which processes it has started before its options were read."""

    at: float
    parts: Parts | None = None


@contextmanager
def ahead(arguments: Sequence[str]) -> Iterator[Begun]:
    """Start what ``--gpus`` or ``--tracker`` will ask for, by a first look at the options; end it with the block.

    What the look does not understand is left to who reads them in earnest.
    """
    at = time.monotonic()
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = dict(pairwise(words))
    gpus, place = given.get("--gpus", "0"), given.get("--on", "gpu")
    one_of_them = ("--gpus" in words) != ("--tracker" in words)
    if not one_of_them or not gpus.isdecimal() or int(gpus) > MOST_GPUS or {"-h", "--help"} & {*words}:
        yield Begun(at)
        return
    from tensorir_ladder.harness.fleet.starting import likely_parts, without_torch

    with ExitStack() as stack:
        if parts := likely_parts(place, int(gpus)):
            stack.enter_context(parts).start()
            stack.enter_context(without_torch())
        yield Begun(at, parts)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add steps, products, how long to search, and which GPUs measure; what is searched is not for choice."""
    from tensorir_ladder.harness.commands.options import (
        GPU_SIZES,
        MOST_JOBS,
        TUNED,
        add_places,
        add_problem_options,
        add_seed,
    )
    from tensorir_ladder.harness.commands.values import address, between

    add_problem_options(parser, GPU_SIZES)
    budget = "on one GPU: stop searching a step's shape after so many seconds, and confirm the best so far (no limit)"
    seconds = between(0.001, MOST_SECONDS, float)
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help=budget)
    parser.add_argument("--retune", action="store_true", help="measure even what is on disk and still good")
    fleet = parser.add_argument_group("over several GPUs, through TVM's RPC (pip install -e '.[rpc]')")
    own = "start a tracker and a server for each of so many GPUs of this host, which nobody else can reach"
    fleet.add_argument("--gpus", type=between(1, MOST_GPUS), metavar="N", help=own)
    fleet.add_argument("--tracker", type=address, metavar="HOST:PORT", help="use the servers of a tracker that runs")
    fleet.add_argument("--key", help="the servers that are meant, of the tracker's (gpu)")
    by_model = f"measure the best so many of each step's shape by the cost model, and its default ({CANDIDATES})"
    fleet.add_argument("--candidates", type=between(1, 10**6), metavar="K", help=by_model)
    fleet.add_argument("--exhaustive", action="store_true", help="measure all candidates")
    jobs = "processes that build side by side (one for each core)"
    fleet.add_argument("--jobs", type=between(1, MOST_JOBS), metavar="N", help=jobs)
    where = "where servers run kernels (gpu); llvm tries all of this on CPUs, beside numpy, and needs --out"
    fleet.add_argument("--on", choices=("gpu", "llvm"), default="gpu", help=where)
    add_seed(parser)
    add_places(parser)
    parser.set_defaults(variant=TUNED, stages=None, tile="default", arch=None, show=None)


def run(options: argparse.Namespace, command: str, begun: Begun) -> int:
    """Tune each case; exit status 1 where a candidate of one was wrong, though a right one was found."""
    if options.gpus is None and options.tracker is None:
        return _tune_here(options, command)
    return _tune_fleet(options, command, begun)


def _tune_here(options: argparse.Namespace, command: str) -> int:
    from tensorir_ladder.harness.commands.measuring import open_session
    from tensorir_ladder.harness.commands.options import GPU_SIZES, UsageError, cases_of, runs_on_gpu
    from tensorir_ladder.harness.fleet.choices import chosen_of, keep_choice
    from tensorir_ladder.harness.tuning import tune
    from tensorir_ladder.torch_ops.tuned_here import kernel_digest

    if given := [f"--{name}" for name in FLEET_ONLY if getattr(options, name)]:
        raise UsageError(f"{given[0]} is for several GPUs; give --gpus or --tracker as well")
    if options.on == "llvm":
        raise UsageError("--on llvm tries a fleet on CPUs; give --gpus or --tracker as well")
    cases = cases_of(options, GPU_SIZES)
    runs_on_gpu(options)
    session, found = open_session(options, command), []
    for case in cases:
        print(f"{case.step.name} {case.problem.shape} {case.problem.dtype} {case.problem.layout}", flush=True)
        case = replace(case, tile_choice="tuned")
        tuned = tune(session, case, options.budget, options.retune, lambda line: print(f"  {line}", flush=True))
        _print_tuned(tuned)
        if chosen := chosen_of(case, tuned):
            keep_choice(session.out, tuned, kernel_digest(*chosen))
        found.append(tuned)
    return _status(found)


def _tune_fleet(options: argparse.Namespace, command: str, begun: Begun) -> int:
    from tensorir_ladder.harness.commands.options import GPU_SIZES, UsageError, cases_of
    from tensorir_ladder.harness.records import RESULTS

    if options.gpus is not None and options.tracker is not None:
        raise UsageError("--gpus starts a tracker and --tracker uses one; give one of them")
    if options.exhaustive and options.candidates is not None:
        raise UsageError("--exhaustive measures all candidates and --candidates some; give one of them")
    if options.budget is not None:
        raise UsageError("--budget is for one GPU; give --candidates")
    if options.on == "llvm" and options.out is None:
        raise UsageError("--on llvm measures no GPU; give a folder of its own with --out")
    from tensorir_ladder.harness.commands.fleet_lines import FleetLines
    from tensorir_ladder.harness.environment import tree_state
    from tensorir_ladder.harness.fleet import asking, hosting, search
    from tensorir_ladder.harness.fleet.crew import Crew
    from tensorir_ladder.harness.fleet.starting import devices
    from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
    from tensorir_ladder.kernels.codegen import toolchain

    compiler = toolchain.require_compiler().version if options.on == "gpu" else "llvm"
    key, jobs = options.key or "gpu", options.jobs or os.cpu_count() or 1

    def cases_on(machine: GpuSpec) -> list[Case]:
        options.arch = machine.arch
        named = [replace(case, machine=machine, tile_choice="tuned") for case in cases_of(options, GPU_SIZES)]
        return list(dict.fromkeys(named))

    def cases(like: Identity) -> list[Case]:
        machine = machine_for(like.arch or DEFAULT_ARCH)
        return cases_on(machine.of_gpu(like.gpu, like.multiprocessors) if like.arch else machine)

    with ExitStack() as stack:
        lines = stack.enter_context(FleetLines())
        tracker = options.tracker and asking.Tracker(*options.tracker, key)
        parts = begun.parts
        served = list(parts.servers) if parts else []
        if parts is None and options.gpus is not None:
            served = devices(options.on, options.gpus)
        crew = stack.enter_context(Crew(jobs, len(served), parts and parts.source))
        plans = search.Plans(
            None if options.exhaustive else options.candidates or CANDIDATES,
            options.retune,
            jobs,
            seed=options.seed,
        )
        if served:
            if machine := hosting.likely_machine(options.on, served[0]):
                search.build_ahead(crew, options.on, compiler, plans, cases_on(machine), len(served))
            host = hosting.Host(options.on, served, key, say=lines.say, parts=parts)
            tracker = stack.enter_context(host).tracker
        tree = tree_state(options.revision)
        out = options.out or RESULTS
        fleet = search.FleetSearch(
            tracker, options.on, out, command, plans, lines, compiler, tree, len(served), crew, begun.at
        )
        found = fleet.run(cases)
    for tuned in found:
        print(f"{tuned.step_name} {tuned.m}x{tuned.n}x{tuned.k} {tuned.dtype} {tuned.layout}")
        _print_tuned(tuned)
    return _status(found)


def _status(found: Sequence[TunedConfig]) -> int:
    wrong = [candidate.why for tuned in found for candidate in tuned.candidates if candidate.status == "wrong"]
    for why_wrong in wrong:
        print(f"error: wrong result: {why_wrong}", file=sys.stderr)
    return WRONG if wrong else 0


def _print_tuned(tuned: TunedConfig) -> None:
    untimed = [candidate for candidate in tuned.candidates if candidate.status != "timed"]
    counts = {status: sum(c.status == status for c in untimed) for status in ("illegal", "not built", "wrong")}
    others = "".join(f", {count} {status}" for status, count in counts.items() if count)
    print(f"  {tuned.seen} of {tuned.legal} legal candidates seen{others}; in the search, of cuBLAS:")
    for candidate in tuned.candidates[:5]:
        if candidate.ratios:
            print(f"    {candidate.ratios[-1]:.3f}  {candidate.times_ms[-1]:.4f} ms  {candidate.name}")
    print(
        f"  {tuned.verdict}: {tuned.winner.name}: {tuned.time_ms:.4f} ms, {tuned.gflops:.0f} GFLOPS, "
        f"{tuned.ratio_to_cublas:.3f} of cuBLAS, {tuned.gain_over_default_pct:+.1f} % over the default configuration"
    )
    if tuned.runner_up:
        low, high = tuned.margin_interval_pct
        cheaper = "; the cheaper is taken" if tuned.verdict == "tie" else ""
        margin = f"{tuned.margin_pct:+.2f} % ({low:+.2f} to {high:+.2f} %)"
        print(f"  {margin} over the runner-up {tuned.runner_up.name}{cheaper}", flush=True)
