"""``depth``: predict each stage count's time by the depth model; needs no GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from rich.markup import escape

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case, Kernel, compiled
from tensorir_ladder.harness.commands.kernels import lowered
from tensorir_ladder.harness.commands.options import LISTING_SIZES, add_case_options, cases_of
from tensorir_ladder.harness.commands.printing import console, new_table, progress, warn
from tensorir_ladder.harness.models import depth
from tensorir_ladder.harness.records import DepthForecast
from tensorir_ladder.kernels.codegen import toolchain

add_options = partial(add_case_options, sizes=LISTING_SIZES)


def run(options: argparse.Namespace, _command: str) -> int:
    """Print the depth model's table for each case; where it predicts times for none of them, that is refused."""
    cases = [case for case in cases_of(options, LISTING_SIZES) if case.step.pipelined]
    if not cases:
        raise depth.NoForecast(f"--step {options.step}: no pipeline, so no stages; see ladder list")
    compiler, lacking = toolchain.require_compiler(), {}
    for machine in dict.fromkeys(case.machine for case in cases):
        if not execution.gpu_present() or machine != execution.gpu_machine():
            warn(f"{machine.arch} is taken as an {machine.gpu}, which is not here")
    for case in cases:
        with progress() as bar:
            counts = bar.track(depth.stage_counts(case), description=f"compiling {case.step.name} by stages")
            kernels = {n: compiled(lowered(replace(case, stages=n)), compiler) for n in counts}
        try:
            said = depth.forecast(case, lambda other, made=kernels: made[other.stages].resources)
        except depth.NoForecast as why_not:
            said, lacking[case] = None, str(why_not)
        _print_depth(case, kernels, said)
    if len(lacking) == len(cases):
        raise depth.NoForecast(f"no times predicted: {'; '.join(dict.fromkeys(lacking.values()))}")
    for case, reason in lacking.items():
        print(f"{replace(case, stages=1)}: no times predicted: {reason}")
    return 0


def _print_depth(case: Case, kernels: dict[int, Kernel], said: DepthForecast | None) -> None:
    title = escape(f"{replace(case, stages=1)}, {case.machine.gpu}")
    predicted = ("stages", "predicted ms", "GFLOPS", "latency hidden")
    occupied = ("shared bytes", "registers", "blocks per SM", "occupancy", "limited by")
    table = new_table(title, (*predicted, *occupied), texts=())
    for stages, kernel in kernels.items():
        found, time = kernel.resources, said.time_ms[stages - 1] if said else None
        speed = ("–", "–", "–")
        if time is not None:
            speed = (f"{time:.4f}", f"{case.problem.flops / time / 1e6:.0f}", f"{said.hidden[stages - 1]:.0%}")
        room = (found.smem_bytes, found.registers, found.blocks_per_sm)
        table.add_row(str(stages), *speed, *map(str, room), f"{found.occupancy:.0%}", found.occupancy_limit)
    console().print(table)
    print(
        f"one more stage costs a block {depth.stage_bytes(case)} bytes of shared memory; {depth.most_stages(case)} fit"
    )
    if said:
        print(f"fewest that hide the latency: {said.fewest}; recommended: {said.recommended}")
