"""``sweep``: measure every combination of tiles, stage counts and variants."""

from __future__ import annotations

import argparse
from dataclasses import replace

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.measuring import measure_cases
from tensorir_ladder.harness.commands.options import (
    GPU_SIZES,
    add_case_options,
    add_peers,
    add_places,
    cases_named,
    numbers,
    runs_on_gpu,
)
from tensorir_ladder.harness.commands.printing import print_records
from tensorir_ladder.harness.execution import NoGpu
from tensorir_ladder.harness.peers import find_peers
from tensorir_ladder.schedules.errors import IllegalSchedule


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add cases, lists of stage counts and all tiles among them, and peers."""
    add_case_options(parser, GPU_SIZES, sweep=True)
    add_places(parser)
    add_peers(parser)


def run(options: argparse.Namespace, command: str) -> int:
    """Measure the combinations that are within the GPU's limits."""
    find_peers(options.peers)  # an unknown one is refused before anything else is done
    combinations = _combinations(options)
    if not runs_on_gpu(options):
        raise NoGpu("a sweep measures, and there is no GPU here for it; compile and verify work without one")
    refusals = {case: refused for case in combinations if (refused := _refusal(case))}
    legal = [case for case in combinations if case not in refusals]
    if not legal:
        raise next(iter(refusals.values()))
    if refusals:
        print(f"{len(refusals)} of {len(combinations)} combinations are illegal and left out")
    print_records(measure_cases(legal, options, command, sweep=True))
    return 0


def _combinations(options: argparse.Namespace) -> list[Case]:
    """List every case of the stage counts, problems, steps, variants and tiles that the options name, once.

    A case has the stages that are really made: more than k tiles are the same kernel again.
    """
    cases: list[Case] = []
    named = cases_named(options, GPU_SIZES, several=True)
    for stages in [None] if options.stages is None else numbers(options.stages, "--stages"):
        for case in named:
            tiles = case.step.tiles_of(case.variant).best if options.tile == "all" else [case.tile]
            asked = case if stages is None else replace(case, stages=stages)
            cases += [replace(asked, tile=tile, tile_choice="given") for tile in tiles]
    return list(dict.fromkeys(replace(case, stages=case.stages_built) for case in cases))


def _refusal(case: Case) -> IllegalSchedule | None:
    # What no other tile or stage count would mend is raised.
    try:
        case.validate()
    except IllegalSchedule as refused:
        return refused
    return None
