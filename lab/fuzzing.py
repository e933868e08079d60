"""Fuzzing: products, steps and configurations drawn at random, each right or refused with a reason.

A *draw* has a step's variant, and a number of runs. Cases are drawn until one is not refused, each refusal taking one
run; that case has what is left, each run on other data and in another order of threads. All of a draw follows from the
seed and its number, so that draws can be run in any order, and one of them again.
"""

from __future__ import annotations

import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.harness.build import Case, Kernel, UnsupportedCase, compiled, lower
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import Backend, GpuBackend, gpu_machine
from tensorir_ladder.harness.machines import DEFAULT_ARCH, GpuSpec, machine_for
from tensorir_ladder.harness.verify import NORMAL, SPECIAL, WHOLE, WrongResult, check_run
from tensorir_ladder.harness.workers import Tell
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.lab.drawn_tiles import Choose, draw_tile
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.plans import able_plans
from tensorir_ladder.schedules.tiles import BlockTile, Choice
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.steps.registry import find_steps
from tensorir_ladder.steps.step import Step

REFUSALS = (IllegalSchedule, UnsupportedCase)
STAGES, MOST_PARTS = range(1, 7), 6
DATA = (NORMAL, WHOLE, SPECIAL, WHOLE)  # of seeds in turn
MULTIPROCESSORS = (2, 2, 3, 3, 4, 5, 6, 8)  # a cluster needs two; with few, tiles make several waves
# What columns and reductions are multiples of. TMA refuses rows that are no multiples of 16 bytes.
GRAINS, EXPLICIT_GRAINS = (1, 1, 1, 2, 4, 8), (1, *[8] * 9)
EMULATED_DEPTH, EMULATED_WORK = 1600, 30_000_000  # multiply-adds: a run well under a second


@dataclass(frozen=True)
class FuzzPlace:
    """A place to run drawn cases, which decides how large they are.

    ``machine(choose)`` is the machine that a case is built for; ``largest(step, variant, tile, m, n)`` the largest m, n
    and k, k of a product of that m and n; ``load(kernel, seed)`` the backend that makes a kernel's arrays, and the
    kernel as a function of them.
    """

    machine: Callable[[Choose], GpuSpec]
    largest: Callable[[Step, str, BlockTile, int, int], tuple[int, int, int]]
    load: Callable[[Kernel, int], tuple[Backend, Callable[..., Any]]]


def _largest_emulated(step: Step, variant: str, tile: BlockTile, m: int, n: int) -> tuple[int, int, int]:
    if not step.is_explicit(variant):  # those that may cut a reduction have a longer one
        return 96, 96, 320 if any(form.plans for form in step.variants) else 128
    outputs = -(-m // tile.block_m) * -(-n // tile.block_n) * tile.block_m * tile.block_n
    return 3 * tile.block_m, 2 * tile.block_n, max(tile.block_k, min(EMULATED_DEPTH, EMULATED_WORK // outputs))


def _load_emulated(kernel: Kernel, seed: int) -> tuple[Backend, Callable[..., Any]]:
    backend = EmulatorBackend(seed)
    return backend, backend.load(kernel)


def _load_on_gpu(kernel: Kernel, _seed: int) -> tuple[Backend, Callable[..., Any]]:
    backend = GpuBackend()
    return backend, backend.load(compiled(kernel, toolchain.require_compiler()))


def _small_machine(choose: Choose) -> GpuSpec:
    # With few multiprocessors small products fill it several times.
    return replace(machine_for(DEFAULT_ARCH), multiprocessors=choose(MULTIPROCESSORS))


PLACES = {
    "emulator": FuzzPlace(_small_machine, _largest_emulated, _load_emulated),
    "gpu": FuzzPlace(lambda _: gpu_machine(), lambda *_: (2000, 2000, 8000), _load_on_gpu),
}


@dataclass(frozen=True)
class Draw:
    """Runs of one case of a step's variant: ``number`` of those that ``seed`` draws from ``steps``."""

    seed: int
    number: int
    runs: int
    steps: tuple[int, ...]
    on: str = "emulator"

    @property
    def kind(self) -> tuple[int, str]:
        """The draw's step and variant: draws take all of them in turn, in a drawn order."""
        steps = find_steps()
        kinds = [(number, variant) for number in self.steps for variant in steps[number].variant_names]
        random.Random(self.seed).shuffle(kinds)
        return kinds[self.number % len(kinds)]


@dataclass(frozen=True)
class Bad:
    """A run that is not right: ``what`` is wrong, fault, crashed or hung; ``size`` is m · n · k, 0 if unknown."""

    what: str
    case: str
    text: str
    size: int = 0


@dataclass
class FuzzOutcome:
    """The end of a draw: runs that were right, refusals' reasons, and at most one bad run, which is its last."""

    number: int
    step: int
    variant: str
    case: str = ""
    right: int = 0
    refused: list[str] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    seconds: float = 0.0


def choose_tile(choose: Choose, step: Step, variant: str) -> BlockTile:
    """Take one of the tiles that a step's variant tunes over, or, as often, any that its family can express."""
    if choose((False, True)):
        return draw_tile(choose, step.tiles_of(variant).kind)
    family = step.tiles_of(variant)
    tiles = (family.default.tile, *family.tuning)
    # Of small tiles, more often: products have several of them, and reductions many k tiles.
    return choose((*tiles, *[tile for tile in tiles if tile.block_m == 64] * 2) if step.is_explicit(variant) else tiles)


def draw_case(
    choose: Choose,
    step: Step,
    variant: str,
    place: FuzzPlace,
    choose_tile: Callable[[Choose, Step, str], BlockTile] = choose_tile,
) -> Case:
    """Draw a case of a step's variant: every other part is chosen by ``choose(choices)``."""
    tile = choose_tile(choose, step, variant)
    rows, columns, _ = place.largest(step, variant, tile, 1, 1)
    explicit = step.is_explicit(variant)
    m, n = choose(range(1, rows + 1)), _multiple(choose, explicit, columns)
    depth = place.largest(step, variant, tile, m, n)[2]
    k = _multiple(choose, explicit, depth, depth * 3 // 4 if explicit and choose((False, True)) else 0)
    problem = Matmul(m, n, k, choose(step.variant(variant).dtypes), choose(LAYOUTS))
    case = Case(step, problem, variant, tile, place.machine(choose), choose(STAGES), "given")
    return replace(case, planned=_draw_plan(choose, case))


def _draw_plan(choose: Choose, case: Case) -> Planned | None:
    """Draw what a schedule does beside its tile; None, as often, for what its cost model says."""
    if not case.form.plans or case.tile.misfits() or choose((False, True)):
        return None
    formula, choice = case.step.tiles_of(case.variant).formula, Choice(case.tile, case.stages)
    parts = choose(range(1, min(case.k_tiles, MOST_PARTS) + 1))
    return choose(able_plans(formula, choice, case.problem, case.config.machine, parts))


def _multiple(choose: Choose, explicit: bool, largest: int, above: int = 0) -> int:
    grain = choose(EXPLICIT_GRAINS if explicit else GRAINS)
    fewest = above // grain + 1
    return grain * choose(range(fewest, max(fewest, largest // grain) + 1))


def run_case(case: Case, place: FuzzPlace, seeds: Sequence[int], outcome: FuzzOutcome) -> None:
    """Run a case once for each seed, which draws data and the order of threads, and note what becomes of it.

    Odd seeds draw small whole numbers, whose product must be exact; every fourth draws special values.
    """
    try:
        kernel = lower(case)
    except REFUSALS as refusal:
        outcome.refused.append(_reason(refusal))
        return
    backend, run = place.load(kernel, seeds[0])
    for seed in seeds:
        try:
            check_run(run, case.problem, backend, seed, DATA[seed % len(DATA)], case.math)
        except (KernelFault, WrongResult) as found:
            what = "fault" if isinstance(found, KernelFault) else "wrong"
            size = case.problem.m * case.problem.n * case.problem.k
            outcome.bad.append(Bad(what, describe(case), f"seed {seed}: {found}", size))
            return
        outcome.right += 1


def _reason(refusal: Exception) -> str:
    # What all for one reason have in common.
    return re.sub(r"\d+(x\d+)*", "N", getattr(refusal, "problem", str(refusal)).split(";")[0])


def describe(case: Case) -> str:
    """Put a case into words, with all that was drawn."""
    asked = f"{case.stages} stages asked for, {case.machine.multiprocessors} multiprocessors"
    return f"{case} {case.problem.layout}, {asked}"


def run_draw(draw: Draw, tell: Tell) -> FuzzOutcome:
    """Draw a draw's case and run it; ``tell`` is given each case in words before it is built."""
    started, (number, variant) = time.monotonic(), draw.kind
    outcome, place, step = FuzzOutcome(draw.number, number, variant), PLACES[draw.on], find_steps()[number]
    while not outcome.right and not outcome.bad and len(outcome.refused) < draw.runs:
        generator = random.Random(f"{draw.seed} {draw.number} {len(outcome.refused)}")
        case = draw_case(generator.choice, step, variant, place)
        outcome.case = describe(case)
        tell(outcome.case)
        first = generator.randrange(1 << 20) * 1000
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more stages than k tiles, rows copied in front: not what is looked for
            run_case(case, place, range(first, first + draw.runs - len(outcome.refused)), outcome)
    outcome.seconds = round(time.monotonic() - started, 3)
    return outcome


def summed_up(outcomes: Sequence[FuzzOutcome]) -> dict[str, Any]:
    """Count, over all draws and over each step's: runs executed and refused, with the reasons, and what was bad."""

    def counts(some: Sequence[FuzzOutcome]) -> dict[str, Any]:
        bad = [found.what for outcome in some for found in outcome.bad]
        reasons = Counter(reason for outcome in some for reason in outcome.refused)
        return {
            "kernels": sum(bool(outcome.right or outcome.bad) for outcome in some),
            "executed": sum(outcome.right for outcome in some) + len(bad),
            "right": sum(outcome.right for outcome in some),
            **{what: bad.count(what) for what in ("wrong", "fault", "crashed", "hung")},
            "refused": sum(reasons.values()),
            "reasons": dict(reasons.most_common()),
        }

    steps = sorted({outcome.step for outcome in outcomes})
    by_step = {str(step): counts([outcome for outcome in outcomes if outcome.step == step]) for step in steps}
    return counts(outcomes) | {"steps": by_step}
