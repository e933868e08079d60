"""``menu``: time what is chosen from on drawn shapes, and fit the choice to the GPU: the Python call's, and schedules'.

Of the call's kernels constants of formulas are fitted to the times, and trees grown over what formulas and the nearest
times leave of them; of schedules trees are grown over what their formulas leave.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.build import ScheduleToBuild, build_ahead, hopper_machine
from tensorir_ladder.harness.commands.measuring import unfinished
from tensorir_ladder.harness.commands.options import UsageError, add_jobs, seed_number, shapes_in
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.commands.values import between
from tensorir_ladder.harness.grown_trees import (
    FILES,
    Times,
    call_times,
    grow,
    schedule_times,
    shares_by_trees,
    trees_text,
)
from tensorir_ladder.harness.machines import DEFAULT_ARCH, GpuSpec, choosing_machine, machine_for
from tensorir_ladder.harness.menu import (
    LIKELIEST,
    MENU_GROUPS,
    candidates,
    draw_products,
    file_text,
    most_doubtful,
    recorded_times,
    time_menu,
    with_times,
)
from tensorir_ladder.harness.menu_fit import chosen_over_best, fit_one_tile, fit_rates, geometric_mean, rounded
from tensorir_ladder.harness.records import RESULTS, Journal, check_writable, load_shapes, write_atomically
from tensorir_ladder.harness.schedule_menus import (
    DTYPES,
    NAME,
    ScheduleMenus,
    menus_bytes,
    menus_in,
    menus_path,
    read_menus,
    scheduled_candidates,
    time_schedules,
    with_schedule_times,
)
from tensorir_ladder.harness.shapes import MOST_SHAPES, draw_shapes
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.schedules import left_over as of_schedules
from tensorir_ladder.schedules.isa import VECTOR_BYTES
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops import left_over
from tensorir_ladder.torch_ops.choice import choices
from tensorir_ladder.torch_ops.estimates import (
    FOLDER,
    CostFile,
    Estimates,
    all_cost_files,
    cost_file,
    estimates_on,
    other_cost_files,
)

SCHEDULES = "schedules"  # a group of its own: others' files, and other trees
MOST_KERNELS = 64  # that a product is timed with
FEWEST_GROWN = 100  # shapes of which trees are better than another GPU's
NO_GROWER = "scikit-learn is not installed: pip install -e '.[menu]', then ladder menu --grow"
RECORDED = "; of other shapes the time of what the call chose, from records of `ladder bench`"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many shapes of each group, by what seed, for how long, and where the GPU's file lies."""
    text = "what shapes are drawn from; judge the choice by `ladder bench` with another (0)"
    parser.add_argument("--seed", type=seed_number, default=0, help=text)
    parser.add_argument("--count", type=between(1, 200), default=40, help="shapes of each group (40)")
    text = "draw so many of each group, and take the COUNT for which the choice is most in doubt (COUNT)"
    parser.add_argument("--drawn", type=between(1, MOST_SHAPES), metavar="DRAWN", help=text)
    text = f"groups of shapes ({','.join(MENU_GROUPS)}); or {SCHEDULES}: time schedules instead of the call's kernels"
    parser.add_argument("--shapes", type=_groups, default=MENU_GROUPS, metavar="GROUPS", help=text)
    parser.add_argument("--dtype", choices=DTYPES, help=f"operands of {SCHEDULES} (float16)")
    text = "time these products, MxNxK[,MxNxK], instead of drawn ones; their times stand, and nothing is fitted to them"
    parser.add_argument("--shape", metavar="SHAPES", help=text)
    parser.add_argument("--layout", choices=LAYOUTS, help="B as the products of --shape have it stored (nn)")
    text = f"kernels of the call that each product is timed with, the likeliest, where so many are likely ({LIKELIEST})"
    parser.add_argument("--kernels", type=between(2, MOST_KERNELS), metavar="KERNELS", help=text)
    text = "begin no shape after so many seconds of timing (none)"
    parser.add_argument("--time-limit", type=between(1, 10**6, float), default=math.inf, metavar="SECONDS", help=text)
    parser.add_argument("--dry-run", action="store_true", help="draw and build, and time nothing")
    text = "time nothing: take the call's times of other shapes from this folder's records of `ladder bench`"
    parser.add_argument("--records", type=Path, metavar="FOLDER", help=text)
    text = "time nothing: grow the trees of all files anew, and those of schedules over their times in this folder"
    parser.add_argument("--grow", type=Path, metavar="FOLDER", nargs="?", const=RESULTS, help=text)
    add_jobs(parser)
    text = f"folder of the file (torch_ops/costs; of {SCHEDULES} reports/results)"
    parser.add_argument("--out", type=Path, help=text)


def _groups(text: str) -> tuple[str, ...]:
    """Read names of MENU_GROUPS, separated by commas."""
    names = tuple(dict.fromkeys(text.split(",")))
    known = *MENU_GROUPS, SCHEDULES
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no group {unknown[0]!r}; there are {', '.join(known)}")
    if SCHEDULES in names and len(names) > 1:
        raise argparse.ArgumentTypeError(f"{SCHEDULES} have a file of their own: time them by themselves")
    return names


def _products(options: argparse.Namespace, estimates: Estimates) -> list[Matmul]:
    """Draw as many products as are timed, or of more those most in doubt."""
    seed, count, groups, drawn = options.seed, options.count, options.shapes, options.drawn
    if drawn is None:
        return draw_products(seed, count, groups)
    if drawn < count:
        raise UsageError(f"--drawn {drawn}: fewer shapes than --count takes of them, {count}; draw more")
    with progress() as bar:
        watched = functools.partial(bar.track, total=drawn, description="estimating what the choice loses")
        in_doubt = functools.partial(most_doubtful, estimates=estimates, count=count, watched=watched)
        return draw_products(seed, drawn, groups, in_doubt)


def _asked_for(options: argparse.Namespace) -> list[Matmul]:
    """Return the products of ``--shape``; UsageError for rows that kernels of the menu do not read as they lie."""
    if options.drawn:
        raise UsageError("--shape and --drawn exclude each other")
    found = [Matmul(*shape, "float16", options.layout or LAYOUTS[0]) for shape in shapes_in(options.shape)]
    for each in found:
        if any(row * each.itemsize % VECTOR_BYTES for row in (each.n, each.k)):
            raise UsageError(
                f"--shape {each.shape}: kernels of the menu take rows of whole {VECTOR_BYTES} bytes, and the call "
                f"copies or shifts others; give multiples of {VECTOR_BYTES // each.itemsize} for N and K"
            )
    return list(dict.fromkeys(found))


def _take_recorded(folder: Path, out: Path) -> int:
    """Write the files of all GPUs that have one and records in a folder, with the call's times of other shapes."""
    check_writable(out)
    records = load_shapes(folder)
    if not records:
        raise UsageError(f"--records {folder}: no records of drawn shapes; run `ladder bench` first")
    for gpu in sorted({record.environment.gpu for record in records}):
        file = cost_file(gpu)
        if file.gpu != gpu:
            print(f"{gpu} has no file: time its menu first")
            continue
        found = recorded_times(records, file)
        if not found:
            print(f"{gpu}: no shape whose menu is not timed")
            continue
        origin = file.origin.removesuffix(RECORDED) + RECORDED
        file = with_times(file, choosing_machine(gpu, file.multiprocessors), origin, found)
        path = _path(out, gpu)
        write_atomically(path, file_text(file))
        print(f"{gpu}: a time each of {len(found)} shapes, in {path}")
    return 0


def _path(out: Path, gpu: str) -> Path:
    return out / f"{gpu.lower().replace(' ', '-')}.json"


def _grow_all(results: Path, out: Path) -> int:
    """Grow the trees of all GPUs' files, and those of schedules; nothing is timed."""
    if not importlib.util.find_spec("sklearn"):
        raise UsageError(f"--grow: {NO_GROWER}")
    if not (found := [read_menus(path) for path in menus_in(results)]):
        raise UsageError(f"--grow {results}: no file of schedules' times there, as h200-{NAME} in {RESULTS}")
    for file in all_cost_files():
        _grow_calls(file, out)
    for menus in found:
        for dtype in DTYPES:
            _grow_schedules(menus, dtype, out)
    return 0


def _grow_schedules(menus: ScheduleMenus, dtype: str, out: Path) -> None:
    """Grow the trees of a GPU's schedules of a dtype, where enough were timed to do without another GPU's."""
    if (count := len(getattr(menus, dtype))) < FEWEST_GROWN:
        print(f"trees of {dtype} schedules stay as they are: {count} shapes are timed, fewer than {FEWEST_GROWN}")
        return
    machine = machine_for(DEFAULT_ARCH).of_gpu(menus.gpu, menus.multiprocessors).for_choices()
    path = of_schedules.path_of(menus.gpu, FILES[dtype])
    path = path if out == FOLDER else out / "grown" / path.name
    _write_grown(schedule_times(menus, dtype, machine), path, f"{menus.gpu}, {menus.origin}")


def _grow_calls(file: CostFile, out: Path) -> None:
    """Grow the trees of a GPU's file."""
    estimates = Estimates(list(choices()), file, file.multiprocessors, other_cost_files(file.gpu))
    with progress() as bar:
        watched = functools.partial(bar.track, total=len(file.shapes), description=f"leaving out shapes, {file.gpu}")
        times = call_times(estimates, watched)
    path = left_over.path_of(file.gpu)
    _write_grown(times, path if out == FOLDER else out / "grown" / path.name, file.origin)


def _write_grown(times: Times, path: Path, origin: str) -> None:
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, trees_text(grow(times), origin))
    before, after = shares_by_trees(times)
    without, with_trees = (f"{geometric_mean(each):.4f}, {min(each):.3f} at worst" for each in (before, after))
    text = f"{with_trees} by trees grown over the others ({without} without)"
    print(f"{path}: of {len(after)} shapes left out, what is chosen has {text} of the fastest's speed", flush=True)


def run(options: argparse.Namespace, command: str) -> int:
    """Build all that is timed, time it shape by shape, then fit the choice to it."""
    if options.layout and not options.shape:
        raise UsageError("--layout is that of the products of --shape")
    if SCHEDULES in options.shapes:
        if options.records or options.grow:
            raise UsageError(f"--records and --grow time nothing: leave out --shapes {SCHEDULES}")
        if options.shape or options.kernels:
            raise UsageError(f"--shape and --kernels are of the call's kernels: leave out --shapes {SCHEDULES}")
        options.dtype = options.dtype or DTYPES[0]
        return _time_schedules(options, command)
    if options.dtype:
        raise UsageError(
            f"--dtype {options.dtype}: of --shapes {SCHEDULES} alone; the call's kernels are timed in float16"
        )
    options.out = options.out or FOLDER
    for name in ("records", "grow"):
        if getattr(options, name) and (options.dry_run or options.drawn or options.shape or options.kernels):
            raise UsageError(f"--{name} times nothing: leave out --dry-run, --drawn, --shape and --kernels")
    if options.records:
        return _take_recorded(options.records, options.out)
    if options.grow:
        check_writable(options.out)
        return _grow_all(options.grow, options.out)
    return _time_calls(options, command)


def _time_calls(options: argparse.Namespace, command: str) -> int:
    """Time the call's kernels, and, of drawn products, fit constants and trees to the times."""
    asked = _asked_for(options) if options.shape is not None else []
    machine, compiler = hopper_machine(), toolchain.require_compiler()
    check_writable(options.out)
    known, able = cost_file(machine.name), list(choices())
    estimates = estimates_on(machine.name, able, machine.multiprocessors)
    drawn = asked or _products(options, estimates)
    taken = {problem: candidates(problem, estimates, machine, options.kernels or LIKELIEST) for problem in drawn}
    build_ahead([each for of_one in taken.values() for each in of_one], options.jobs)
    if options.dry_run:
        print(f"{sum(map(len, taken.values()))} kernels of {len(drawn)} shapes are built; none is timed: --dry-run")
        return 0
    backend, end = execution.GpuBackend(), time.monotonic() + options.time_limit
    origin = _origin(command)
    if options.shape and known.gpu == machine.name:  # beside the others' times, to which the constants stay fitted
        origin = _joined(known.origin, origin)
    path = _path(options.out, machine.name)
    file, timed = known, 0
    for problem in drawn:
        if time.monotonic() >= end:
            break
        times, cublas_us = time_menu(taken[problem], backend, compiler)
        name, us = min(times.items(), key=lambda pair: pair[1])
        print(f"{problem.shape} {problem.layout}: {us:.2f} us, {cublas_us / us:.3f} of cuBLAS, {name}", flush=True)
        file, timed = with_times(file, machine, origin, {problem: times}), timed + 1
        write_atomically(path, file_text(file))  # what was timed is kept, whatever becomes of the rest
    if not timed:
        print(f"none of {len(drawn)} shapes is timed in the time given, and nothing is written")
        return 0
    if options.shape:
        print(f"{timed} of {len(drawn)} products are timed, in {path}: so they stand in the choice from now on")
        return 0
    print(f"{timed} of {len(drawn)} shapes are timed, in {path}; fitting constants to them", flush=True)
    rates, one_tile = fit_rates(file, able, machine), fit_one_tile(file, machine.multiprocessors)
    file = msgspec.structs.replace(file, rates=rounded(rates), one_tile=rounded(one_tile))
    write_atomically(path, file_text(file))
    shares = chosen_over_best(file, able, machine, others=other_cost_files(machine.name))
    found_best = f"{geometric_mean(shares):.3f} as fast as the best that was timed, {min(shares):.3f} at worst"
    print(f"of shapes left out in turn, what is chosen without trees is {found_best}", flush=True)
    if importlib.util.find_spec("sklearn"):
        _grow_calls(file, options.out)
    else:
        print(f"trees stay as they are: {NO_GROWER}")
    return 0


def _origin(command: str) -> str:
    return f"{command}, {datetime.now(UTC):%Y-%m-%d}: medians of interleaved rounds in CUDA graphs, L2 cold"


def _time_schedules(options: argparse.Namespace, command: str) -> int:
    """Time schedules, and grow trees over all times that the GPU's file then has."""
    if options.drawn:
        raise UsageError(f"--drawn: {SCHEDULES} are timed as they are drawn; give --count")
    out, compiler = options.out or RESULTS, toolchain.require_compiler()
    check_writable(out)
    machine = execution.gpu_machine() if execution.gpu_present() else machine_for(DEFAULT_ARCH)
    if machine.arch != DEFAULT_ARCH:
        raise UsageError(
            f"--shapes {SCHEDULES}: trees are grown for {DEFAULT_ARCH}, and the {machine.gpu} is {machine.arch}"
        )
    path, drawn = menus_path(out, machine.gpu), draw_shapes(SCHEDULES, options.seed, options.count, options.dtype)
    products = [one.problem for one in drawn]
    if options.dry_run:
        count = len(_schedules_built(products, machine, options.jobs))
        print(f"{count} schedules of {len(drawn)} shapes are built; none is timed: --dry-run")
        return 0
    backend, empty, wrong = execution.GpuBackend(), ScheduleMenus(machine.gpu, "", machine.multiprocessors), []
    with Journal(out, "menu", [command, machine.gpu, list(map(str, products))], str) as journal:
        waiting = unfinished(products, lambda problem: str(problem) in journal.entries, "shapes")
        built = _schedules_built(waiting, machine, options.jobs)
        end = time.monotonic() + options.time_limit
        for problem, of_one in itertools.groupby(built, lambda case: case.problem):
            if time.monotonic() >= end:
                break
            taken = list(of_one)
            try:
                own, cublas_us = time_schedules(taken, backend, compiler)
            except WrongResult as error:  # one of many: the others are timed
                wrong.append(error)
                print(f"wrong result: {error}", flush=True)
                continue
            us, fastest = min(zip(own, map(str, taken)))
            chosen = f"the chosen one takes {own[0] / us:.3f} times as long"
            print(f"{fastest}: {us:.2f} us, {cublas_us / us:.3f} of cuBLAS, {chosen}", flush=True)
            menus = read_menus(path) if path.exists() else empty  # another run may have added to it since
            menus = msgspec.structs.replace(menus, origin=_joined(menus.origin, _origin(command)))
            menus = with_schedule_times(menus, taken, own, cublas_us)
            write_atomically(path, menus_bytes(menus))  # what was timed is kept, whatever becomes of the rest
            journal.add(str(problem))
        timed = len(journal.entries)
        if timed == len(drawn):
            journal.finish()
    if wrong:
        raise WrongResult(f"{wrong[0]}; {len(wrong)} shapes in all, which the same command times again")
    if not timed:
        print(f"none of {len(drawn)} shapes is timed in the time given, and nothing is written")
        return 0
    print(f"{timed} of {len(drawn)} shapes are timed, in {path}")
    if importlib.util.find_spec("sklearn"):
        _grow_schedules(read_menus(path), options.dtype, FOLDER if options.out is None else out)
    else:
        print(f"trees stay as they are: {NO_GROWER}")
    return 0


def _joined(known: str, origin: str) -> str:
    """Note once where times are from that a file has more."""
    return known if origin in known else f"{known}; {origin}".removeprefix("; ")


def _schedules_built(products: Sequence[Matmul], machine: GpuSpec, jobs: int) -> list[Case]:
    """List all schedules that products are timed with, product by product, when all are built."""
    with progress() as bar:
        watched = bar.track(products, len(products), description="choosing")
        taken = [case for problem in watched for case in scheduled_candidates(problem, machine)]
    build_ahead([ScheduleToBuild(case) for case in taken], jobs)
    return taken
