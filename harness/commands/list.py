"""``list``: what there is to choose from."""

from __future__ import annotations

import argparse

from harness.commands.show import console, new_table
from harness.microbench import BENCHMARKS
from harness.peers import KINDS
from harness.rate_files import measured_gpus
from harness.targets import MACHINES
from steps.config import DEFAULT_STAGES, DEFAULT_TILE, TILE_SET, TUNING_STAGES, TUNING_TILES
from steps.registry import find_steps

TEXT = "steps, variants, tiles and architectures"


def add_options(_parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(_options: argparse.Namespace, _command: str) -> int:
    """Print steps, tiles, architectures, GPUs with rates and peers."""
    headings = ("step", "what", "variants (the first is the default)")
    table = new_table("Steps", headings, texts=headings)
    for step in find_steps().values():
        table.add_row(step.name, step.title, ", ".join(step.variants))
    console().print(table)
    print(f"default tile {DEFAULT_TILE}, {DEFAULT_STAGES} stages; --tile best chooses among {len(TILE_SET)}:")
    print("  " + ", ".join(map(str, TILE_SET)))
    slots = ", ".join(map(str, TUNING_STAGES))
    print(f"tune chooses among these and {len(TUNING_TILES) - len(TILE_SET)} more, with {slots} stages:")
    print("  " + ", ".join(map(str, TUNING_TILES[len(TILE_SET) :])))
    print(f"architectures: {', '.join(MACHINES)}")
    for file in measured_gpus():
        measured = sum(bool(quantity.samples) for quantity in file.quantities.values())
        print(f"rates of {file.gpu} ({file.arch}): {measured} of {len(BENCHMARKS)} measured by microbench")
    print(f"peers (run and sweep --peers): {', '.join(KINDS)}")
    return 0
