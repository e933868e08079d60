"""``sweep``: measure every combination of tiles, stage counts and variants."""

from __future__ import annotations

import argparse
from dataclasses import replace

from harness.build import Case
from harness.commands.measuring import measure_cases
from harness.commands.options import GPU_SIZES, add_case_options, add_peers, cases_of, numbers, runs_on_gpu
from harness.commands.show import print_records
from harness.execution import NoGpu
from harness.peers import find_peers
from schedules.vectorization import dtype_bytes

TEXT = "run over tiles, stage counts and variants; each result is a record"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Cases, lists of stage counts and all tiles among them, and peers."""
    add_case_options(parser, sweep=True)
    add_peers(parser)


def run(options: argparse.Namespace, command: str) -> int:
    """Measure the combinations that are within the GPU's limits."""
    find_peers(options.peers)  # an unknown one is refused before anything else is done
    if not runs_on_gpu(options):
        raise NoGpu("a sweep measures, and there is no GPU here; compile and verify work without one")
    combinations = _combinations(options)
    legal = [case for case in combinations if not _violations(case)]
    if len(legal) < len(combinations):
        beyond = len(combinations) - len(legal)
        print(f"{beyond} of {len(combinations)} combinations are beyond the GPU's limits and left out")
    print_records(measure_cases(legal, options, command, sweep=True))
    return 0


def _combinations(options: argparse.Namespace) -> list[Case]:
    """Every case of the stage counts, problems, steps, variants and tiles that the options name, once.

    With the slots that it really has: more stages than k tiles are the same kernel again.
    """
    all_tiles = options.tile == "all"
    one_tile = "default" if all_tiles else options.tile
    cases: list[Case] = []
    for stages in [None] if options.stages is None else map(str, numbers(options.stages, "--stages")):
        one_count = argparse.Namespace(**{**vars(options), "stages": stages, "tile": one_tile})
        for case in cases_of(one_count, GPU_SIZES):
            tiles = case.step.tiles.best if all_tiles else [case.tile]
            cases += [case.with_tile(tile, "given") for tile in tiles]
    return list(dict.fromkeys(replace(case, stages=case.slots) for case in cases))


def _violations(case: Case) -> list[str]:
    return case.tile.violations(case.machine.target(), dtype_bytes(case.problem.dtype), case.slots)
