"""Cases as the command line would make them, in their smallest sensible form, and what commands printed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.kernels.blackwell import BlackwellTile
from tensorir_ladder.kernels.tiles import HopperTile, RoleTile
from tensorir_ladder.schedules.cost import Machine as CostMachine
from tensorir_ladder.schedules.tiles import BlockTile, TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.steps.step import Config

ROOT = Path(__file__).resolve().parents[2]


STEPS = find_steps()


EVERY_VARIANT = [(number, variant) for number, step in STEPS.items() for variant in step.variant_names]


THREAD_STEPS = [number for number, step in STEPS.items() if step.tiles.kind is ThreadTile]


# The smallest sensible tile of each family, for tests of what kernels compute.
SMALL_TILES: dict[type[BlockTile], BlockTile] = {
    ThreadTile: ThreadTile(block=(8, 16, 16), thread=(4, 4)),
    WarpTile: WarpTile.parse("16x32x16/16x32/4x4/2"),
    TensorCoreTile: TensorCoreTile.parse("32x32x32/16x32"),
    WarpgroupTile: WarpgroupTile.parse("64x64x64/1x1"),
    HopperTile: HopperTile.parse("64x64x64/1x1"),
    RoleTile: RoleTile.parse("64x64x64/1x1"),
    BlackwellTile: BlackwellTile.parse("128x64x64"),
}


EXPLICIT_STEPS = [number for number, step in STEPS.items() if step.explicit]


SCHEDULED_VARIANTS = [(number, variant) for number, variant in EVERY_VARIANT if not STEPS[number].is_explicit(variant)]


UNOPTIMISED = {"kind": "llvm", "opt-level": 0}


def make_case(
    step: int,
    shape: tuple[int, int, int],
    variant: str | None = None,
    *,
    dtype: str | None = None,
    layout: str = "nn",
    out_dtype: str | None = None,
    tile: BlockTile | None = None,
    stages: int | None = None,
    arch: str = "",
) -> Case:
    """A case as the command line would make it: what is not given is the step's own default."""
    found = STEPS[step]
    machine = machine_for(arch or found.arch or DEFAULT_ARCH)
    variant = variant or found.default_variant(machine.has_cp_async)
    problem = Matmul(*shape, dtype or found.variant(variant).dtypes[0], layout, out_dtype)
    stages = found.stages if stages is None else stages
    return Case(found, problem, variant, tile or found.tiles_of(variant).default.tile, machine, stages)


def small_case(step: int, shape: tuple[int, int, int], variant: str | None = None, **given: Any) -> Case:
    """The same with the smallest sensible tile of the step's family: quick to run on the CPU."""
    found = STEPS[step]
    kind = found.tiles_of(variant or found.variants[0].name).kind
    return make_case(step, shape, variant, tile=SMALL_TILES[kind], **given)


class Outcome(NamedTuple):
    """What a command did: exit status and both outputs."""

    code: int
    out: str
    err: str


def verified_on(outcome: Outcome) -> list[str]:
    """Read where each case was verified from the lines that say so: llvm, emulator or gpu; "" for one that was not."""
    places = {"LLVM": "llvm", "emulator": "emulator", "on the GPU": "gpu"}
    said = [line for line in outcome.out.splitlines() if re.match(r"verified\b|.*\bnot verified\b", line)]
    return [
        "" if "not verified" in line else next(place for word, place in places.items() if word in line) for line in said
    ]


def redeclare(monkeypatch: pytest.MonkeyPatch, number: int, **fields: Any) -> None:
    """Give a step other fields for the time of a test; it stays the same object, which frozen fields do not change."""
    for name, value in fields.items():
        monkeypatch.setitem(vars(STEPS[number]), name, value)


def config(variant: str, tile: BlockTile, stages: int = 3, arch: str = DEFAULT_ARCH) -> Config:
    """Ask for a step on the default machine, or another."""
    return Config(variant, tile, stages, machine_for(arch).for_choices())


def hopper(multiprocessors: int = 132, name: str = "") -> CostMachine:
    """A Hopper GPU of so many multiprocessors, as the steps and the cost model see it."""
    return replace(machine_for(DEFAULT_ARCH).for_choices(), multiprocessors=multiprocessors, name=name)
