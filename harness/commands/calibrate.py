"""``calibrate``: time what is chosen from on this GPU, and fit the choices to it: the Python call's, and schedules'.

Times are added to the GPU's files of results; from all of them follow the constants, the menu and the trees by which
the call chooses (:mod:`torch_ops.menu`), and the trees that correct the model of schedules.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tensorir_ladder.gpus import ScheduleTrees, schedules_path
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.calibration import (
    CallTimes,
    call_shares_left_out,
    geometric_mean,
    grow,
    make_menu,
    menu_bytes,
    schedule_times,
    shares_left_out,
    with_fastest,
)
from tensorir_ladder.harness.call_menus import (
    LIKELIEST,
    CallMenus,
    MenuCandidate,
    call_menus_bytes,
    call_menus_path,
    candidates,
    draw_products,
    read_call_menus,
    time_menu,
    with_times,
)
from tensorir_ladder.harness.call_menus import NAME as CALL_NAME
from tensorir_ladder.harness.commands.build import Ahead, ScheduleToBuild, build_ahead, called_machine
from tensorir_ladder.harness.commands.options import UsageError, add_jobs, seed_number, shapes_in
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.commands.values import between
from tensorir_ladder.harness.machines import DEFAULT_ARCH, GpuSpec, machine_for
from tensorir_ladder.harness.records import RESULTS, check_writable, write_atomically
from tensorir_ladder.harness.schedule_menus import (
    DTYPES,
    ScheduleMenus,
    menus_bytes,
    menus_path,
    read_menus,
    scheduled_candidates,
    time_schedules,
    with_schedule_times,
)
from tensorir_ladder.harness.schedule_menus import NAME as SCHEDULES_NAME
from tensorir_ladder.harness.shapes import draw_shapes
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops import menu as menu_files

CALL = "call"
PARTS = (CALL, *DTYPES)
MOST_KERNELS = 64  # that a product is timed with
FEWEST_FITTED = 100  # shapes from which a fit is better than another GPU's
NO_FITTER = "scikit-learn and scipy, which fit the choices, are not installed: pip install -e '.[menu]'"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is timed, by what seed, for how long, and where the files lie."""
    text = f"what is timed: a list of {', '.join(PARTS)}, the last two of which are schedules (all)"
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar="PARTS", help=text)
    text = "what shapes are drawn from; judge the choice by `ladder bench` with another (0)"
    parser.add_argument("--seed", type=seed_number, default=0, help=text)
    parser.add_argument("--count", type=between(1, 200), default=40, help="shapes of each group (40)")
    text = (
        "time the call's kernels of these products, MxNxK[,MxNxK]; their fastest stand, and nothing is fitted to them"
    )
    parser.add_argument("--shape", metavar="SHAPES", help=text)
    parser.add_argument("--layout", choices=LAYOUTS, help="B as the products of --shape have it stored (nn)")
    text = f"kernels of the call that each product is timed with, the likeliest ({LIKELIEST})"
    parser.add_argument("--kernels", type=between(2, MOST_KERNELS), default=LIKELIEST, metavar="KERNELS", help=text)
    text = "begin no shape after this many seconds of timing (none)"
    parser.add_argument("--time-limit", type=between(1, 10**6, float), default=math.inf, metavar="SECONDS", help=text)
    parser.add_argument("--dry-run", action="store_true", help="draw and build, and time nothing")
    parser.add_argument("--fit", action="store_true", help="time nothing: fit to the files' times of all GPUs")
    add_jobs(parser)
    text = "folder of times and of what is fitted to them (reports/results and gpus/costs)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)


def run(options: argparse.Namespace, command: str) -> int:
    """Time part by part, each as its kernels are built, then fit the choices to all times."""
    if options.layout and not options.shape:
        raise UsageError("--layout is that of the products of --shape")
    if options.shape and (options.fit or options.parts != PARTS):
        raise UsageError("--shape times the call's kernels alone: leave out --fit and --parts")
    results = options.out or RESULTS
    check_writable(results)
    if not (options.dry_run or options.shape):
        _require_fitter()
    if options.fit:
        if options.dry_run:
            raise UsageError("--fit times nothing: leave out --dry-run")
        return _fit_all(options.parts, results, options.out)
    asked = _asked_for(options) if options.shape else []
    machine = execution.gpu_machine() if execution.gpu_present() else machine_for(DEFAULT_ARCH)
    if machine.arch != DEFAULT_ARCH:
        raise UsageError(f"choices are fitted for {DEFAULT_ARCH}, and the {machine.gpu} is {machine.arch}")
    origin = f"{command}, {datetime.now(UTC):%Y-%m-%d}: medians of interleaved rounds in CUDA graphs, L2 cold"
    parts = [_call(machine, results, origin, asked, options)] if CALL in options.parts else []
    if not asked:
        parts += [_schedules(machine, results, origin, dtype, options) for dtype in DTYPES if dtype in options.parts]
    timed = sum(_time(part, options) for part in parts)
    if options.dry_run or not timed:
        print("nothing is timed, and nothing is written")
    elif asked:
        _let_fastest_stand(machine, results, asked, options.out)
    else:
        _fit_all(options.parts, results, options.out, machine.gpu)
    return 0


def _require_fitter() -> None:
    """Raise UsageError where what fits is not installed, before anything is timed."""
    if not importlib.util.find_spec("sklearn") or not importlib.util.find_spec("scipy"):
        raise UsageError(NO_FITTER)


@dataclass(frozen=True)
class _Part:
    """Describe what a part times: its products, the kernels of each, and how.

    ``time(taken)`` times a product's, writes the file, and returns a line for the user.
    """

    name: str
    products: Sequence[Matmul]
    candidates: Callable[[Matmul], list[Any]]
    ahead: Callable[[Any], Ahead]
    time: Callable[[list[Any]], str]


def _time(part: _Part, options: argparse.Namespace) -> int:
    """Build all that a part times, then time it product by product; return how many products were timed."""
    with progress() as bar:
        watched = bar.track(part.products, len(part.products), description=f"{part.name}: choosing")
        taken = [part.candidates(problem) for problem in watched]
    build_ahead([part.ahead(each) for of_one in taken for each in of_one], options.jobs)
    if options.dry_run:
        print(f"{part.name}: {sum(map(len, taken))} kernels of {len(taken)} shapes are built")
        return 0
    end, timed, wrong = time.monotonic() + options.time_limit, 0, []
    for of_one in taken:
        if time.monotonic() >= end:
            break
        try:
            print(part.time(of_one), flush=True)
            timed += 1
        except WrongResult as error:  # one of many: the others are timed
            wrong.append(error)
            print(f"wrong result: {error}", flush=True)
    print(f"{part.name}: {timed} of {len(taken)} shapes are timed")
    if wrong:
        raise WrongResult(f"{wrong[0]}; {len(wrong)} shapes in all, which the same command times again")
    return timed


def _call(machine: GpuSpec, results: Path, origin: str, asked: list[Matmul], options: argparse.Namespace) -> _Part:
    """Return the call's part: products that were asked for, or drawn ones that the file has no times of."""
    path, gpu = call_menus_path(results, machine.gpu), called_machine()
    empty = CallMenus(machine.gpu, machine.multiprocessors, "")
    known = {each.problem for each in (read_call_menus(path) if path.exists() else empty).shapes}
    products = asked or [each for each in draw_products(options.seed, options.count) if each not in known]
    menu, compiler = menu_files.menu_of(str(gpu.target), gpu.name, gpu.multiprocessors), toolchain.require_compiler()

    def timed(taken: list[MenuCandidate]) -> str:
        times, cublas_us = time_menu(taken, execution.GpuBackend(), compiler)
        menus = read_call_menus(path) if path.exists() else empty
        menus = msgspec.structs.replace(menus, origin=_joined(menus.origin, origin))
        write_atomically(path, call_menus_bytes(with_times(menus, taken[0].problem, times)))
        name, us = min(times.items(), key=lambda pair: pair[1])
        return (
            f"{taken[0].problem.shape} {taken[0].problem.layout}: {us:.2f} us, {cublas_us / us:.3f} of cuBLAS, {name}"
        )

    def likely(problem: Matmul) -> list[MenuCandidate]:
        return candidates(problem, menu, gpu, options.kernels)

    return _Part(CALL, products, likely, lambda each: each, timed)


def _schedules(machine: GpuSpec, results: Path, origin: str, dtype: str, options: argparse.Namespace) -> _Part:
    """Return the part of schedules in a dtype: drawn products that the file has no times of."""
    path, compiler = menus_path(results, machine.gpu), toolchain.require_compiler()
    empty = ScheduleMenus(machine.gpu, "", machine.multiprocessors)
    known = {tuple(each[:3]) for each in getattr(read_menus(path) if path.exists() else empty, dtype)}
    drawn = [one.problem for one in draw_shapes("schedules", options.seed, options.count, dtype)]

    def timed(taken: list[Case]) -> str:
        own, cublas_us = time_schedules(taken, execution.GpuBackend(), compiler)
        menus = read_menus(path) if path.exists() else empty
        menus = msgspec.structs.replace(menus, origin=_joined(menus.origin, origin))
        write_atomically(path, menus_bytes(with_schedule_times(menus, taken, own, cublas_us)))
        us, fastest = min(zip(own, map(str, taken)))
        chosen = f"the chosen one takes {own[0] / us:.3f} times as long"
        return f"{fastest}: {us:.2f} us, {cublas_us / us:.3f} of cuBLAS, {chosen}"

    def likely(problem: Matmul) -> list[Case]:
        return scheduled_candidates(problem, machine)

    products = [each for each in drawn if (each.m, each.n, each.k) not in known]
    return _Part(dtype, products, likely, ScheduleToBuild, timed)


def _let_fastest_stand(machine: GpuSpec, results: Path, asked: Iterable[Matmul], out: Path | None) -> None:
    """Write the fastest kernels of products into the GPU's menu."""
    times, file = read_call_menus(call_menus_path(results, machine.gpu)), menu_files.read_menu(machine.gpu)
    shapes = {each.problem: each for each in times.shapes}
    for problem in asked:
        if problem in shapes:
            file = with_fastest(file, times, shapes[problem])
    path = _fitted(menu_files.path_of(machine.gpu), out)
    write_atomically(path, menu_bytes(file))
    print(f"their fastest kernels stand in {path}: the choice takes them from now on")


def _fit_all(parts: Sequence[str], results: Path, out: Path | None, gpu: str = "") -> int:
    """Fit the choices of the GPU, or of all whose times lie in a folder."""
    calls, schedules = (
        [each for each in map(read, sorted(results.glob(f"[!.]*-{name}"))) if each.gpu == (gpu or each.gpu)]
        for read, name in ((read_call_menus, CALL_NAME), (read_menus, SCHEDULES_NAME))
    )
    if not calls and not schedules:
        raise UsageError(f"--fit: no file of times in {results}, as h200-{CALL_NAME} in {RESULTS}")
    for menus in calls if CALL in parts else ():
        if _enough(CALL, menus.gpu, len(menus.shapes)):
            call = CallTimes(menus)
            path = _fitted(menu_files.path_of(menus.gpu), out)
            write_atomically(path, menu_bytes(make_menu(call)))
            _print_shares(path, *call_shares_left_out(call))
    for menus in schedules if {*DTYPES} & {*parts} else ():
        _fit_schedules(menus, out)
    return 0


def _fit_schedules(menus: ScheduleMenus, out: Path | None) -> None:
    """Grow the trees of a GPU's schedules over all of its times."""
    if not all(_enough(f"schedules in {dtype}", menus.gpu, len(getattr(menus, dtype))) for dtype in DTYPES):
        return
    model = machine_for(DEFAULT_ARCH).of_gpu(menus.gpu, menus.multiprocessors).for_choices()
    times = {dtype: schedule_times(menus, dtype, model) for dtype in DTYPES}
    path = _fitted(schedules_path(menus.gpu), out)
    trees = ScheduleTrees(menus.gpu, menus.origin, warps=grow(times["float32"]), warpgroups=grow(times["float16"]))
    write_atomically(path, msgspec.json.encode(trees) + b"\n")
    for dtype, of_one in times.items():
        _print_shares(f"{path}, {dtype}", *shares_left_out(of_one))


def _enough(what: str, gpu: str, shapes: int) -> bool:
    if shapes < FEWEST_FITTED:
        print(f"{gpu}: {what} is not fitted to {shapes} shapes, fewer than {FEWEST_FITTED}")
    return shapes >= FEWEST_FITTED


def _print_shares(what: object, formula: list[float], corrected: list[float]) -> None:
    without, with_trees = (f"{geometric_mean(each):.4f}, {min(each):.3f} at worst" for each in (formula, corrected))
    text = f"{with_trees}; {without} by the formula alone"
    print(f"{what}: of {len(corrected)} shapes left out, what is chosen has {text}, of the fastest's speed", flush=True)


def _fitted(path: Path, out: Path | None) -> Path:
    """Return where a fitted file is written: in its place in the package, or in the folder that was named."""
    return out / path.name if out else path


def _parts(text: str) -> tuple[str, ...]:
    """Read names of PARTS, separated by commas."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return names


def _asked_for(options: argparse.Namespace) -> list[Matmul]:
    """Return the products of ``--shape``; UsageError for rows that kernels of the menu cannot read unpadded."""
    found = [Matmul(*shape, "float16", options.layout or LAYOUTS[0]) for shape in shapes_in(options.shape)]
    for each in found:
        if any(row * each.itemsize % VECTOR_BYTES for row in (each.n, each.k)):
            raise UsageError(
                f"--shape {each.shape}: kernels of the menu take rows of whole {VECTOR_BYTES} bytes, and the call "
                f"copies or shifts others; give multiples of {VECTOR_BYTES // each.itemsize} for N and K"
            )
    return list(dict.fromkeys(found))


def _joined(known: str, origin: str) -> str:
    """Note once where times are from that a file has more."""
    return known if origin in known else f"{known}; {origin}".removeprefix("; ")
