"""Times of the call's menu on drawn shapes: the kernels that may be the fastest, in the same rounds beside cuBLAS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.machines import choosing_machine
from tensorir_ladder.harness.peers import call
from tensorir_ladder.harness.race import Contender, RoundPlan
from tensorir_ladder.harness.records import ShapeRecord
from tensorir_ladder.harness.shapes import draw_shapes
from tensorir_ladder.harness.verify import WrongResult, draw_seeds, hold, matmul_trial
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.choice import Choice, Setting, choices, of_one_tile
from tensorir_ladder.torch_ops.driver import cuda_driver
from tensorir_ladder.torch_ops.estimates import CostFile, Estimates, MeasuredShape
from tensorir_ladder.torch_ops.few_rows import Streamed, streams
from tensorir_ladder.torch_ops.kept import are_kept, build_kernel, build_kernels
from tensorir_ladder.torch_ops.launcher import Launcher, load_kernel
from tensorir_ladder.torch_ops.nearby import product_places
from tensorir_ladder.torch_ops.one_tile import all_tiles, named, one_tile_stages

ONE_TILE = re.compile(r"step 12, (\S+), (\d+) stages, launched early")
CLUSTERS_SINCE = "2026-11-25T17:50"  # they begin and end without fences, and parts are added up by all blocks
GROUPS = ("llm", "random8", "decode")  # whose products TMA reads as they lie
SQUARES = "squares"  # powers of two, and a little more, whose rows lie across cache lines
SIDES = tuple(side + more for side in (256, 512, 1024, 2048, 4096, 8192) for more in (0, 24))
MENU_GROUPS = (SQUARES, *GROUPS)
LIKELIEST = 16  # kernels of a shape
APART = 0.5  # of shapes, as :mod:`torch_ops.nearby` places them: some third of a doubling
PLAN = RoundPlan(rounds=9, warmup_ms=25.0, sample_ms=1.0, round_budget_ms=250.0)
DIGITS = 4  # of microseconds that are kept


@dataclass(frozen=True)
class Candidate:
    """A kernel of the menu for a product, by its name; it can be sent to another process."""

    problem: Matmul
    name: str
    gpu: str
    multiprocessors: int

    @property
    def made_for(self) -> tuple[Choice | Streamed, Matmul, Setting]:
        """The kernel's choice, its product, and its setting: see :class:`harness.commands.build.ToBuild`."""
        return self._choice, self.problem, Setting(choosing_machine(self.gpu, self.multiprocessors))

    def is_kept(self, compiler: Compiler) -> bool:
        """Tell whether it was built before."""
        return are_kept([self.made_for], compiler)

    def build(self, compiler: Compiler) -> None:
        """Build it, and keep what was built."""
        build_kernels([self.made_for], compiler)

    @property
    def _choice(self) -> Choice | Streamed:
        place = all_tiles().place(self.name)
        if place is None:
            return next(each for each in (*choices(), Streamed()) if str(each) == self.name)
        stages = one_tile_stages(self.problem, place, self.multiprocessors)
        return of_one_tile(all_tiles().tile(place, self.problem.n), stages)

    def __str__(self) -> str:
        return f"{self.problem.shape} {self.problem.layout}: {self.name}"


def draw_products(
    seed: int, count: int, groups: Sequence[str] = MENU_GROUPS, doubtful: Callable[[list[Matmul]], list[Matmul]] = list
) -> list[Matmul]:
    """Draw ``count`` products of each group by a seed, one of each in turn; before them squares, where asked for.

    ``doubtful`` leaves some of a group's out, as :func:`most_doubtful` does.
    """
    drawn = [
        doubtful([one.problem for one in draw_shapes(name, seed, count, "float16")])
        for name in groups
        if name != SQUARES
    ]
    mixed = [one for of_each in zip_longest(*drawn) for one in of_each if one is not None]
    squares = SIDES if SQUARES in groups else ()
    return list(dict.fromkeys([*(Matmul(side, side, side, "float16") for side in squares), *mixed]))


def most_doubtful(
    products: Sequence[Matmul],
    estimates: Estimates,
    count: int,
    watched: Callable[[Sequence[Matmul]], Iterable[Matmul]] = iter,
) -> list[Matmul]:
    """Return the ``count`` products for which most is expected to be lost by the choice, the greatest loss first.

    Of products near each other one only: what is measured of it tells of the others. ``watched`` goes through them and
    may show how far it is.
    """
    places = [product_places(each.m, each.n, each.k, each.layout == "nt") for each in products]
    losses = [estimates.odds(each, streams(each)).loss for each in watched(products)]
    taken: list[int] = []
    for number in sorted(range(len(products)), key=lambda each: -losses[each]):
        if all(np.linalg.norm(places[number] - places[other]) > APART for other in taken):
            taken.append(number)
    return [products[number] for number in taken[:count]]


def candidates(problem: Matmul, estimates: Estimates, machine: Machine, likeliest: int = LIKELIEST) -> list[Candidate]:
    """List the kernels that a product is timed with: the ``likeliest`` to be the fastest, and what is chosen today.

    The one that streams weights, too, where it takes the product.
    """
    kernels, tiles, streamed = estimates.kernels, all_tiles(), streams(problem)
    able = np.array([each.takes(problem, machine) for each in kernels])
    odds, times = estimates.odds(problem, streamed), estimates.times(problem, streamed=streamed)
    odds.menu[~able], times.menu[~able] = 0.0, np.inf
    count = len(kernels)
    chosen = int(np.concatenate([times.menu, times.tiles]).argmin())
    likely = np.concatenate([odds.menu, odds.tiles])
    places = [int(place) for place in likely.argsort()[::-1][:likeliest] if likely[place] > 0]
    taken = dict.fromkeys([chosen, *places, *([count - 1] if streamed else [])])
    names = [str(kernels[each]) if each < count else named(tiles.tile(each - count)) for each in taken]
    return [Candidate(problem, name, machine.name, machine.multiprocessors) for name in names]


def time_menu(taken: Sequence[Candidate], backend: GpuBackend, compiler: Compiler) -> tuple[dict[str, float], float]:
    """Check and time a product's kernels: microseconds by their names, and of the faster form of cuBLAS.

    Raises WrongResult for a kernel whose result is not the product's; what building raises.
    """
    problem, torch = taken[0].problem, backend.torch
    runs = []
    for each in taken:
        loaded = load_kernel(build_kernel(*each.made_for, compiler), cuda_driver(), torch.cuda.current_device())
        shapes = {"A": (problem.m, problem.k), "B": problem.b_shape, "C": (problem.m, problem.n)}
        launcher = Launcher(loaded, {name: MatrixRows(*shape, shape[1] * 2) for name, shape in shapes.items()})

        def run(a: Any, b: Any, c: Any, launcher: Launcher = launcher) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            room = launcher.workspaces.of(stream, c)
            launcher(stream, a.data_ptr(), b.data_ptr(), c.data_ptr(), *room.addresses)

        runs.append((str(each), run))
    own, cublas_us = race_menu(problem, runs, backend)
    return dict(zip((each.name for each in taken), own)), cublas_us


def race_menu(problem: Matmul, runs: Sequence[Contender], backend: GpuBackend) -> tuple[list[float], float]:
    """Check kernels of a product, then time them: microseconds of each, and of the faster form of cuBLAS.

    Raises WrongResult, with its name, for a kernel whose result is not the product's.
    """
    arena, trial = Arena(problem, backend), matmul_trial(problem, backend, draw_seeds(None, 1)[0])
    for name, run in runs:
        try:
            hold(run, trial, backend)
        except WrongResult as wrong:
            raise WrongResult(f"{name}: {wrong}") from None
    stored, other, *own = (timing.median_ms * 1e3 for timing in arena.race([*arena.cublas(), *runs], PLAN).timings)
    return own, min(stored, other)


def with_times(file: CostFile, machine: Machine, origin: str, found: dict[Matmul, dict[str, float]]) -> CostFile:
    """Return a GPU's file with what was found: beside what it has of other products, or, of another GPU's, alone."""
    gpu = machine.name
    taken = {name for times in found.values() for name in times} | set(file.kernels if file.gpu == gpu else ())
    tiles = sorted(name for name in taken if all_tiles().place(name) is not None)
    names = (*map(str, (*choices(), Streamed())), *tiles)
    shapes = (
        {} if file.gpu != gpu else {(s.m, s.n, s.k, s.layout): _renamed(s, file.kernels, names) for s in file.shapes}
    )
    for problem, times in found.items():
        key = problem.m, problem.n, problem.k, problem.layout
        placed = tuple((names.index(name), float(f"{us:.{DIGITS}g}")) for name, us in times.items())
        shapes[key] = MeasuredShape(*key, placed)
    return CostFile(
        gpu,
        machine.multiprocessors,
        origin,
        file.rates,
        file.one_tile,
        names,
        tuple(shape for shape in shapes.values() if shape is not None),
    )


def _renamed(shape: MeasuredShape, old: Sequence[str], new: Sequence[str]) -> MeasuredShape | None:
    """Place times in a new list of kernels; None where no kernel of them is in it."""
    times = tuple((new.index(old[place]), us) for place, us in shape.times if old[place] in new)
    return msgspec.structs.replace(shape, times=times) if times else None


def recorded_times(records: Iterable[ShapeRecord], file: CostFile) -> dict[Matmul, dict[str, float]]:
    """Take the call's times of float16 products that a GPU's file has none of from its records of drawn shapes.

    Or one only. Of kernels that the choice offers, and without copies in front, which it estimates apart; not of
    clusters before CLUSTERS_SINCE, which were other kernels.
    """
    known = {(shape.m, shape.n, shape.k, shape.layout) for shape in file.shapes if len(shape.times) > 1}
    wanted = file.gpu, "float16", call.NAMES[0]
    menu, found = {*map(str, (*choices(), Streamed()))}, {}
    for record in sorted(records, key=lambda each: each.environment.recorded_at):  # the newest counts
        other = (record.environment.gpu, record.dtype, record.contender) != wanted
        if other or (*record.shape, record.layout) in known:
            continue
        problem = Matmul(*record.shape, record.dtype, record.layout)
        name = record.config if record.config in menu else _one_tile(record.config, problem, file.multiprocessors)
        place = all_tiles().place(name)
        clustered = place is not None and all_tiles().cluster[place] > 1
        before = clustered and record.environment.recorded_at < CLUSTERS_SINCE
        if name and not before:
            found[problem] = {name: record.time_ms * 1e3}
    return found


def _one_tile(config: str, problem: Matmul, multiprocessors: int) -> str:
    """Return the name of a tile of step 12 by what the call says of it; empty for others."""
    if not (match := ONE_TILE.fullmatch(config)):
        return ""
    try:
        tile, stages = RoleTile.parse(match[1]), int(match[2])
        place = all_tiles().place(named(tile))
    except ValueError:  # no tile, or one that files have no name for
        return ""
    return "" if place is None else named(tile, stages_then(problem, place, stages, multiprocessors))


def stages_then(problem: Matmul, place: int, stages: int, multiprocessors: int) -> int:
    """Return the stages of a ring that was timed if a product's tile has another number of them today; else 0."""
    k_tiles = -(-problem.k // int(all_tiles().depth[place]))
    today = one_tile_stages(problem, place, multiprocessors)
    return stages if all_tiles().upright[place] and min(stages, k_tiles) != min(today, k_tiles) else 0


def file_text(file: CostFile) -> str:
    """Write a file as JSON, a line for each shape."""
    head = msgspec.to_builtins(msgspec.structs.replace(file, shapes=()))
    del head["shapes"]
    lines = ",\n".join("  " + msgspec.json.encode(shape).decode() for shape in file.shapes)
    text = msgspec.json.format(msgspec.json.encode(head), indent=1).decode()
    return f'{text[:-2]},\n "shapes": [\n{lines}\n ]\n}}\n'
