"""``list``: show what there is to choose from."""

from __future__ import annotations

import argparse

from tensorir_ladder.harness.commands.printing import console, new_table
from tensorir_ladder.harness.machines import MACHINES
from tensorir_ladder.harness.models.rate_files import measured_gpus
from tensorir_ladder.harness.peers import KINDS
from tensorir_ladder.schedules.tiles import TileSet
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.steps.step import Step


def add_options(_parser: argparse.ArgumentParser) -> None:
    """Add nothing: it takes no options."""


def run(_options: argparse.Namespace, _command: str) -> int:
    """Print steps, tiles, architectures, GPUs with rates and peers."""
    headings = ("step", "what", "variants (the first is the default)")
    table = new_table("Steps", headings, texts=headings)
    for step in find_steps().values():
        table.add_row(step.name, step.title, ", ".join(step.variant_names))
    console().print(table)
    _print_tiles(list(find_steps().values()))
    print(f"architectures: {', '.join(MACHINES)}")
    for file in measured_gpus():
        measured = sum(bool(quantity.samples) for quantity in file.quantities.values())
        print(f"rates of {file.gpu} ({file.arch}): {measured} measured by microbench")
    print("rates of all other GPUs: estimated, not measured (gpus/estimates)")
    print(f"peers (run and sweep --peers): {', '.join(KINDS)}")
    return 0


def _print_tiles(steps: list[Step]) -> None:
    families: dict[TileSet, dict[str, Step]] = {}  # with the steps, or variants, that take each
    for step in steps:
        families.setdefault(step.tiles, {})[str(step.number)] = step
        for variant in step.variants:
            if variant.kernel and variant.tiles and not variant.debug:
                families.setdefault(variant.tiles, {})[f"{step.number}[{variant.name}]"] = step
    for family, own in families.items():
        pipelined, numbers = [step for step in own.values() if step.pipelined], ", ".join(own)
        stages = f", {pipelined[-1].stages} stages" if pipelined else ""
        print(f"steps {numbers}: tiles {family.kind.FORM}, default {family.default.tile}{stages}")
        print(f"  --tile best chooses among {len(family.best)}: {', '.join(map(str, family.best))}")
        stages_tried = f", with {', '.join(map(str, pipelined[-1].tuning_stages))} stages" if pipelined else ""
        more = family.tuning[len(family.best) :]
        print(f"  tune chooses among these and {len(more)} more{stages_tried}: {', '.join(map(str, more))}")
