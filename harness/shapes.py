"""Shapes that nobody tuned: drawn by a seed, in groups, and measured beside cuBLAS.

- ``llm``: the four weights of a Llama layer, stored transposed, for 1 to 8192 tokens;
- ``decode``: the weights of five models, stored transposed, for 1 to 64 tokens;
- ``random8``: extents from 64 to 8192, multiples of 8; ``random``: any;
- ``schedules``: like these two (float32: any), by the last step that is a schedule instead of the Python call;
- ``batches``: 2 to 128 products, extents from 32 to 4096, compared with ``torch.bmm``; every other one unaligned.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.batches import Batch
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.built_schedules import build_schedule, load_schedule
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.models.time import compulsory_bytes
from tensorir_ladder.harness.peers import PeerFailed, call
from tensorir_ladder.harness.race import RoundPlan
from tensorir_ladder.harness.records import ShapeRecord
from tensorir_ladder.harness.roofline import product_roofline
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.verify import IEEE, draw_seeds, verify_launch
from tensorir_ladder.schedules.isa import PTX_TYPES
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.steps.choice import choose_step

SMALLEST, LARGEST, WHOLE, MOST_TOKENS = 64, 8192, 8, 8192
MOST_PRODUCTS, BATCH_EXTENTS = 128, (32, 4096)
BATCH_FLOPS, BATCH_BYTES = (2e9, 500e9), 1e9  # so that neither launches nor checks take most of the time
DRAWN = RoundPlan(rounds=9, warmup_ms=30.0, sample_ms=2.0, half_width=0.01, most_rounds=40, budget_ms=300.0)
# Columns and depth of queries, keys and values as one product, of the output, of gate and up as one, and of down.
LLAMA_3_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_3_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
LLAMA_2_13B = ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824))
LLAMA_32_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
QWEN_25_7B = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))
WEIGHTS = (*LLAMA_3_8B, *LLAMA_3_70B, *LLAMA_2_13B, *LLAMA_32_1B, *QWEN_25_7B)


@dataclass(frozen=True)
class Group:
    """Draw shapes: ``draw(random, dtype, place)`` gives one product of ``dtypes``, the one at ``place`` of the group.

    ``scheduled``: the last step that is a schedule takes them, else the Python call.
    """

    draw: Callable[[random.Random, str, int], Matmul]
    dtypes: tuple[str, ...] = tuple(PTX_TYPES)
    scheduled: bool = False


def _tokens(draw: random.Random, dtype: str, _place: int) -> Matmul:
    return Matmul(_extent(draw, 1, MOST_TOKENS), *draw.choice(LLAMA_3_8B), dtype, "nt")


def _few_tokens(draw: random.Random, dtype: str, _place: int) -> Matmul:
    return Matmul(draw.randint(1, 64), *draw.choice(WEIGHTS), dtype, "nt")


def _any(draw: random.Random, dtype: str, _place: int, whole: int = 1) -> Matmul:
    m, n, k = (whole * _extent(draw, SMALLEST // whole, LARGEST // whole) for _ in range(3))
    return Matmul(m, n, k, dtype)


def _for_schedules(draw: random.Random, dtype: str, place: int) -> Matmul:
    return _any(draw, dtype, place, 1 if dtype == "float32" else WHOLE)


def _batch(draw: random.Random, dtype: str, place: int) -> Batch:
    """Draw a batch of bounded work: n and k are multiples of 8 at even places; layouts change every second place."""
    aligned, layout = place % 2 == 0, LAYOUTS[place // 2 % 2]
    while True:
        count = _extent(draw, 2, MOST_PRODUCTS)
        m, n, k = (_extent(draw, *BATCH_EXTENTS) for _ in range(3))
        if aligned:
            n, k = (-(-extent // WHOLE) * WHOLE for extent in (n, k))
        found = Batch(m, n, k, dtype, layout, batch=count)
        fits = BATCH_FLOPS[0] <= found.flops <= BATCH_FLOPS[1] and compulsory_bytes(found) < BATCH_BYTES
        if fits and (aligned or n % WHOLE or k % WHOLE):
            return found


def _extent(draw: random.Random, least: int, most: int) -> int:
    """Draw an extent, as often from 64 to 128 as from 4096 to 8192."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


GROUPS: Mapping[str, Group] = MappingProxyType(
    {
        "llm": Group(_tokens),
        "random8": Group(partial(_any, whole=WHOLE)),
        "random": Group(_any),
        "decode": Group(_few_tokens),
        "schedules": Group(_for_schedules, (*PTX_TYPES, "float32"), scheduled=True),
        "batches": Group(_batch),
    }
)
MOST_SHAPES = 1000  # of a group: decode has 64 times 20


@dataclass(frozen=True)
class Drawn:
    """One shape of a group, and the seed that draws it."""

    group: str
    seed: int
    problem: Matmul

    def __str__(self) -> str:
        return f"{self.group} {self.problem.shape} {self.problem.layout} {self.problem.dtype}"


def draw_shapes(group: str, seed: int, count: int, dtype: str) -> list[Drawn]:
    """Draw ``count`` different shapes of a group: the same ones by the same seed, of a smaller count the first."""
    draw, found = random.Random(f"{group} {dtype} {seed}"), dict[Matmul, None]()
    while len(found) < count:
        found[GROUPS[group].draw(draw, dtype, len(found))] = None
    return [Drawn(group, seed, problem) for problem in found]


@lru_cache(MOST_SHAPES)  # a command asks when it builds, and when it measures
def scheduled_case(problem: Matmul, machine: GpuSpec) -> Case:
    """Return the step, form and tile that are chosen among the schedules (:func:`steps.choice.choose_step`)."""
    step, config = choose_step(problem, machine.for_choices())
    return Case(step, problem, config.variant, config.tile, machine, config.stages)


def measure_shape(session: Session, drawn: Drawn) -> ShapeRecord:
    """Check what takes a drawn shape, then time it beside both forms of cuBLAS, or torch.bmm; write nothing.

    Raises WrongResult, ImpossibleTime, and what building raises.
    """
    problem, machine, kernel = drawn.problem, execution.gpu_machine(), None
    arena = session.arena(problem)
    if GROUPS[drawn.group].scheduled:
        case = scheduled_case(problem, machine)
        kernel = build_schedule(case, session.compiler)
        run = load_schedule(kernel, session.backend)
        name, config = case.step.name, f"{case.variant} {case.tile}, {case.stages_built} stages"
    else:
        called = call.entrant(arena, call.NAMES[0])
        if called.run is None:
            raise PeerFailed(f"{called.name} {drawn}: {called.why}")
        name, run, config = called.name, called.run, called.config
    checked = verify_launch(run, problem, session.backend, f"{name} {drawn}", draw_seeds(session.seed, 1))
    baseline = arena.baseline()
    rounds = arena.race([(name, run), *baseline], session.plan, beside=tuple(range(1, 1 + len(baseline))))
    held_to = session.said(product_roofline(machine, problem, IEEE, arena.from_memory))
    for timing in rounds.timings:
        held_to.check(timing)
    own, *theirs = rounds.timings
    return ShapeRecord(
        group=drawn.group,
        seed=drawn.seed,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        layout=problem.layout,
        dtype=problem.dtype,
        contender=name,
        config=config,
        timing=own,
        baseline=tuple(theirs),
        verification=checked,
        batch=problem.batch if isinstance(problem, Batch) else 1,
        **session.provenance(kernel, rounds),
    )
