"""``menu``: time the menu that the Python call chooses from on drawn shapes, and fit its choice to the GPU.

Constants of formulas are fitted to the times, and trees grown over what formulas and the nearest times leave of them.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.commands.build import build_ahead, hopper_machine
from tensorir_ladder.harness.commands.options import UsageError, add_jobs, seed_number
from tensorir_ladder.harness.commands.printing import progress
from tensorir_ladder.harness.commands.values import between
from tensorir_ladder.harness.grown_trees import (
    FILES,
    Times,
    call_times,
    grow,
    read_menus,
    schedule_times,
    shares_by_trees,
    trees_text,
)
from tensorir_ladder.harness.machines import DEFAULT_ARCH, choosing_machine, machine_for
from tensorir_ladder.harness.menu import (
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
from tensorir_ladder.harness.records import RESULTS, check_writable, load_shapes, write_atomically
from tensorir_ladder.harness.shapes import MOST_SHAPES
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.schedules import left_over as of_schedules
from tensorir_ladder.schedules.workloads import Matmul
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

MENUS = "schedule-menus.json.xz"
NO_GROWER = "scikit-learn is not installed: pip install -e '.[menu]', then ladder menu --grow"
RECORDED = "; of other shapes the time of what the call chose, from records of `ladder bench`"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many shapes of each group, by what seed, for how long, and where the GPU's file lies."""
    text = "what shapes are drawn from; judge the choice by `ladder bench` with another (0)"
    parser.add_argument("--seed", type=seed_number, default=0, help=text)
    parser.add_argument("--count", type=between(1, 200), default=40, help="shapes of each group (40)")
    text = "draw so many of each group, and take the COUNT for which the choice is most in doubt (COUNT)"
    parser.add_argument("--drawn", type=between(1, MOST_SHAPES), metavar="DRAWN", help=text)
    text = f"groups of shapes ({','.join(MENU_GROUPS)})"
    parser.add_argument("--shapes", type=_groups, default=MENU_GROUPS, metavar="GROUPS", help=text)
    text = "begin no shape after so many seconds of timing (none)"
    parser.add_argument("--time-limit", type=between(1, 10**6, float), default=math.inf, metavar="SECONDS", help=text)
    parser.add_argument("--dry-run", action="store_true", help="draw and build, and time nothing")
    text = "time nothing: take the call's times of other shapes from this folder's records of `ladder bench`"
    parser.add_argument("--records", type=Path, metavar="FOLDER", help=text)
    text = "time nothing: grow the trees of all files anew, and those of schedules over their times in this folder"
    parser.add_argument("--grow", type=Path, metavar="FOLDER", nargs="?", const=RESULTS, help=text)
    add_jobs(parser)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the file (torch_ops/costs)")


def _groups(text: str) -> tuple[str, ...]:
    """Read names of MENU_GROUPS, separated by commas."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in MENU_GROUPS]:
        raise argparse.ArgumentTypeError(f"no group {unknown[0]!r}; there are {', '.join(MENU_GROUPS)}")
    return names


def _draw(options: argparse.Namespace, estimates: Estimates) -> list[Matmul]:
    """Draw the shapes: as many as are timed, or of more those whose choice is most in doubt."""
    seed, count, groups, drawn = options.seed, options.count, options.shapes, options.drawn
    if drawn is None:
        return draw_products(seed, count, groups)
    if drawn < count:
        raise UsageError(f"--drawn {drawn}: fewer shapes than --count takes of them, {count}; draw more")
    with progress() as bar:
        watched = functools.partial(bar.track, total=drawn, description="estimating what the choice loses")
        in_doubt = functools.partial(most_doubtful, estimates=estimates, count=count, watched=watched)
        return draw_products(seed, drawn, groups, in_doubt)


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
    try:
        menus = read_menus(results / MENUS)
    except OSError as error:
        raise UsageError(f"--grow {results}: {error}; name a folder that has {MENUS} ({RESULTS})") from error
    machine = machine_for(DEFAULT_ARCH).for_choices()
    for file in all_cost_files():
        _grow_calls(file, out)
    for dtype, name in FILES.items():
        folder = of_schedules.FOLDER if out == FOLDER else out / "grown"
        _write_grown(schedule_times(menus, dtype, machine), folder / f"{name}.json", f"{menus.gpu}, {menus.origin}")
    return 0


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
    """Build all that is timed, time it shape by shape, then fit the constants and write the file."""
    if options.records:
        if options.dry_run or options.drawn:
            raise UsageError("--records times nothing: leave out --dry-run and --drawn")
        return _take_recorded(options.records, options.out)
    if options.grow:
        if options.dry_run or options.drawn:
            raise UsageError("--grow times nothing: leave out --dry-run and --drawn")
        check_writable(options.out)
        return _grow_all(options.grow, options.out)
    machine, compiler = hopper_machine(), toolchain.require_compiler()
    check_writable(options.out)
    known, able = cost_file(machine.name), list(choices())
    estimates = estimates_on(machine.name, able, machine.multiprocessors)
    drawn = _draw(options, estimates)
    taken = {problem: candidates(problem, estimates, machine) for problem in drawn}
    build_ahead([each for of_one in taken.values() for each in of_one], options.jobs)
    if options.dry_run:
        print(f"{sum(map(len, taken.values()))} kernels of {len(drawn)} shapes are built; none is timed: --dry-run")
        return 0
    backend, end = execution.GpuBackend(), time.monotonic() + options.time_limit
    origin = f"{command}, {datetime.now(UTC):%Y-%m-%d}: medians of interleaved rounds in CUDA graphs, L2 cold"
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
