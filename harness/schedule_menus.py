"""Times of schedules on drawn shapes: the tiles and plans that may be the fastest, in the same rounds beside cuBLAS.

Trees are grown over them (:mod:`.calibration`), which correct what :func:`steps.choice.choose_step` takes.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.built_schedules import build_schedule, load_schedule
from tensorir_ladder.harness.call_menus import DIGITS, race_menu, read_times
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.records import gpu_slug
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.plans import candidates
from tensorir_ladder.schedules.tiles import Choice, WarpgroupTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.choice import choose_step
from tensorir_ladder.steps.step import Config

NAME = "schedule-menus.json.xz"  # behind the GPU's
DTYPES = ("float16", "float32")  # which trees are grown for
LIKELIEST = 12  # tiles of a shape, as they would be planned
OTHERWISE = 6  # other plans of these

_OF_BOTH = "tile", "stages", "parts", "operands copied first, each"
ROWS = {
    "float16": ("variant of step 10", *_OF_BOTH, "cluster", "own warp", "microseconds"),
    "float32": ("variant of step 7", *_OF_BOTH, "microseconds"),
}
Row = tuple[Any, ...]  # of a kernel: what it is, then its microseconds
Shape = tuple[int, int, int, float, tuple[Row, ...]]


class ScheduleMenus(msgspec.Struct, frozen=True):
    """Times of schedules on drawn shapes: of each, its sizes, cuBLAS's microseconds, and its kernels' rows.

    ``multiprocessors`` are the GPU's; ``kernel`` says what each row has. ``float32_nt`` are of a B stored [n, k]: what
    is chosen, and the same with tiles that are not transposed (:func:`schedules.memory.stage_transposed`);
    ``float32_rule`` of the same products by the contraction rule's recipe, in two races a shape; ``float32_forms`` by
    step 7's forms, of shapes taken by hand. No trees are grown over these.
    """

    gpu: str
    origin: str
    multiprocessors: int = 132
    shape: tuple[str, ...] = ("m", "n", "k", "microseconds of the faster form of cuBLAS", "kernels")
    kernel: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: dict(ROWS))
    float16: tuple[Shape, ...] = ()
    float32: tuple[Shape, ...] = ()
    float32_nt: tuple[Shape, ...] = ()
    float32_rule: tuple[Shape, ...] = ()
    float32_forms: tuple[Shape, ...] = ()


def menus_path(folder: Path, gpu: str) -> Path:
    """Return where a GPU's times lie in a folder of results."""
    return folder / f"{gpu_slug(gpu)}-{NAME}"


def menus_in(folder: Path) -> list[Path]:
    """List the files of all GPUs' times in a folder."""
    return sorted(folder.glob(f"[!.]*-{NAME}"))


def read_menus(path: Path) -> ScheduleMenus:
    """Read a GPU's times; DamagedFile says what is wrong."""
    return read_times(path, ScheduleMenus, menus_path)


def menus_bytes(menus: ScheduleMenus) -> bytes:
    """Write a GPU's times as its file has them."""
    return lzma.compress(msgspec.json.encode(menus))


def as_planned(kernel: Sequence[Any], dtype: str) -> tuple[Choice, Planned]:
    """Return the tile with its stages, and the rest, of a row of the menus but for its time."""
    if dtype == "float32":
        _, tile, stages, parts, (of_a, of_b) = kernel
        return Choice(WarpTile.parse(tile), stages), Planned(parts, (bool(of_a), bool(of_b)))
    form, tile, stages, parts, (of_a, of_b), (down, across), own = kernel
    planned = Planned(parts, (bool(of_a), bool(of_b)), form == "boxes", (down, across), bool(own))
    return Choice(WarpgroupTile.parse(tile), stages), planned


def as_row(config: Config, planned: Planned) -> Row:
    """Write what a schedule is as a row of the menus has it, but for its time."""
    row = config.variant, str(config.tile), config.stages, planned.parts, [int(first) for first in planned.copied]
    if isinstance(config.tile, WarpTile):
        return row
    return *row, list(planned.cluster), int(planned.own_warp)


def scheduled_candidates(problem: Matmul, machine: GpuSpec) -> list[Case]:
    """List the schedules that a product is timed with: what is chosen today first, then those that cost little more.

    The best plan of each of a few tiles, and a few plans that differ from it in a single field. Each case has its plan
    (``planned``).
    """
    sees = machine.for_choices()
    step, _ = choose_step(problem, sees)
    priced = [
        (found, form.name)
        for form in step.variants
        if form.plans and step.takes(form.name, problem.dtype, machine.has_cp_async)
        for found in candidates(step.tiles_of(form.name), problem, sees)
    ]
    priced.sort(key=lambda each: each[0].cycles)
    best: dict[tuple[str, Choice], Case] = {}
    others = []
    for found, variant in priced:
        tile, stages = found.choice.tile, found.choice.stages
        case = Case(step, problem, variant, tile, machine, stages, planned=found.planned)
        first = best.setdefault((variant, found.choice), case)
        if sum(one != other for one, other in zip(case.planned, first.planned)) == 1:
            others.append((first, case))
    likeliest = list(best.values())[:LIKELIEST]
    return [*likeliest, *[case for first, case in others if first in likeliest][:OTHERWISE]]


def time_schedules(taken: Sequence[Case], backend: GpuBackend, compiler: Compiler) -> tuple[list[float], float]:
    """Check and time a product's schedules: microseconds of each, and of the faster form of cuBLAS.

    Raises WrongResult for a kernel whose result is not the product's; what building raises.
    """
    runs = [(str(case), load_schedule(build_schedule(case, compiler), backend)) for case in taken]
    return race_menu(taken[0].problem, runs, backend)


def with_schedule_times(
    menus: ScheduleMenus, taken: Sequence[Case], us: Sequence[float], cublas_us: float
) -> ScheduleMenus:
    """Return a GPU's times with those of one product's schedules.

    Of a product that was timed before, the new times are put on the scale of its cuBLAS then, which was in the same
    rounds, and stand in the place of the same kernels'.
    """
    problem = taken[0].problem
    sizes, dtype = (problem.m, problem.n, problem.k), problem.dtype
    shapes = {tuple(each[:3]): each for each in getattr(menus, dtype)}
    *_, then_us, rows = shapes.get(sizes, (*sizes, cublas_us, ()))
    kept = {_key(row[:-1]): row for row in rows}
    for case, each in zip(taken, us):
        row = as_row(case.config, case.planned)
        kept[_key(row)] = (*row, _rounded(each * then_us / cublas_us))
    shapes[sizes] = (*sizes, _rounded(then_us), tuple(kept.values()))
    return msgspec.structs.replace(menus, **{dtype: tuple(shapes.values())})


def _key(row: Iterable[Any]) -> bytes:
    """Tell kernels apart, be their lists tuples or not."""
    return msgspec.json.encode(tuple(row))


def _rounded(us: float) -> float:
    return float(f"{us:.{DIGITS + 1}g}")
