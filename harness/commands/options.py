"""Add and read the options that several commands share."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import replace
from pathlib import Path

from tensorir_ladder.harness import execution
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.printing import warn
from tensorir_ladder.harness.commands.values import UsageError, between, numbers, whole
from tensorir_ladder.harness.machines import DEFAULT_ARCH, MACHINES, GpuSpec, machine_for
from tensorir_ladder.harness.peers import KINDS
from tensorir_ladder.harness.tuning import STAGE_SET
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.workloads import DTYPES, LAYOUTS, Matmul
from tensorir_ladder.steps.registry import find_steps, get_step
from tensorir_ladder.steps.step import Step

GPU_SIZES, CPU_SIZES, LISTING_SIZES = "256,512,1024,2048,4096", "256", "1024"
EITHER_SIZES = f"{GPU_SIZES} on a GPU, {CPU_SIZES} without"
MOST_JOBS = 512
CHOICES = ("default", "best", "tuned")  # of --tile, in place of a tile
EXPLICIT, TUNED = "explicit", "tuned"  # of --variant: a step's first explicit kernel, and what tuning takes


def add_case_options(parser: argparse.ArgumentParser, sizes: str, sweep: bool = False) -> None:
    """Add options that name cases; a sweep takes several of what the other commands take one of.

    ``sizes`` says which are taken where none is named.
    """
    add_problem_options(parser, sizes)
    several = " (lists and ranges: 1-6, 2,4)" if sweep else ""
    usual = "one step: all of its arithmetic; several steps: default" if sweep else "default"
    parser.add_argument("--variant", help=f"variants' names, default or all ({usual})")
    if not sweep:
        parser.add_argument("--all-variants", action="store_true", help="all variants of the default's arithmetic")
    own = f"the step's own; with --tile best the best of {', '.join(map(str, STAGE_SET))}"
    parser.add_argument("--stages", help=f"stages of each shared operand{several} ({own})")
    tile = "all" if sweep else "default"
    named = "default" + (", all" if sweep else ", best, tuned")
    parser.add_argument("--tile", "--tiles", default=tile, help=f"{named} ({tile}), or a tile as text: {tile_forms()}")
    add_machine_options(parser)
    parser.add_argument("--show", choices=("tir", "lowered", "cuda", "ptx", "sass"), help="print code")


def tile_forms() -> str:
    """Return how tiles are written, family by family, with the steps that take them; docs/glossary.md explains."""
    families: dict[str, list[int]] = {}
    for step in find_steps().values():
        kind = step.tiles.kind
        families.setdefault(f"{kind.FORM}, e.g. {kind.EXAMPLE}", []).append(step.number)
    return "; ".join(f"step {numbers[0]} on {form}" for form, numbers in families.items())


def add_problem_options(parser: argparse.ArgumentParser, sizes: str) -> None:
    """Add options that name steps and products; ``sizes`` says which are taken where none is named."""
    parser.add_argument("--step", help="steps: 5 | 1-6 | 1,3 (all)")
    add_shape_options(parser, sizes)


def add_shape_options(parser: argparse.ArgumentParser, sizes: str) -> None:
    """Add options that name products; ``sizes`` says which are taken where none is named."""
    parser.add_argument("--size", help=f"square sizes: 256,512 ({sizes})")
    parser.add_argument("--shape", help="shapes MxNxK[,MxNxK]; instead of --size")
    parser.add_argument("--dtype", help=f"operands: {' | '.join(DTYPES)} (the first that the step takes)")
    parser.add_argument("--out-dtype", help="output (that of the operands)")
    parser.add_argument("--layout", default="nn", help=f"B as stored: {' | '.join(LAYOUTS)}; nt is [N, K] (nn)")


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add options that say which machine code is for, and where it runs."""
    parser.add_argument("--arch", help=f"one of {', '.join(MACHINES)} (the GPU's, else {DEFAULT_ARCH})")
    places = ("auto", "gpu", "llvm", "emulator")
    parser.add_argument("--on", default="auto", choices=places, help="where to run kernels (auto)")
    text = "draws the order of threads in the emulator; a fault names the one that repeats it (0)"
    add_seed(parser)
    parser.add_argument("--emulator-seed", type=int, default=0, metavar="SEED", help=text)


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Add the option that repeats what data were checked with."""
    text = "first seed of the data to check with, which a wrong result and a record name (fresh ones)"
    parser.add_argument("--seed", type=seed_number, metavar="SEED", help=text)


def seed_number(text: str) -> int:
    """Read a seed."""
    if not re.fullmatch(r"\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no seed: a whole number from 0 on, of at most 18 digits")
    return int(text)


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Add the option that names peers to time in the same rounds."""
    kinds = "; ".join(f"{kind.name}: {kind.what}" for kind in KINDS.values())
    text = f"also time peers in the same rounds: a list, all or none (none). {kinds}"
    parser.add_argument("--peers", default="none", metavar="NAMES", help=text)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add options that say where results and tree lie."""
    add_revision(parser)
    parser.add_argument("--out", type=Path, help="folder for records, or for listings with compile")


def add_jobs(parser: argparse.ArgumentParser, usual: int | None = None) -> None:
    """Add the option of how many processes work side by side; ``usual`` where it is not given, else one a core."""
    text = "processes side by side ({})".format("one for each core" if usual is None else usual)
    parser.add_argument("--jobs", type=between(1, MOST_JOBS), default=usual or os.cpu_count() or 1, help=text)


def add_revision(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the tree's revision."""
    parser.add_argument("--revision", help="what to note as the revision where the tree is a clean copy without git")


def cases_of(options: argparse.Namespace, sizes: str, tunes: bool = False) -> list[Case]:
    """List the cases that the options name, each of which can be built; see :func:`cases_named`."""
    cases = cases_named(options, sizes, tunes)
    for case in cases:
        case.validate()
    return cases


def cases_named(options: argparse.Namespace, sizes: str, tunes: bool = False, several: bool = False) -> list[Case]:
    """List the cases that the options name, in the order in which they share most: by problem, then by step.

    Of several steps, those that the machine cannot run are left out, with a warning. ``sizes`` are taken
    where the options name none; ``tunes`` says that the command can find a tile by measuring. With ``several``,
    ``--stages`` and ``--tile all`` may name many, which the caller goes through: the cases have the defaults.
    """
    machine = machine_of(options)
    steps = _steps(options.step)
    stages = None if several else options.stages
    tile = "default" if several and options.tile == "all" else options.tile
    asked, *more = numbers(stages, "--stages", minimum=None) if stages is not None else [None]
    if more or (asked is not None and asked < 1):
        raise UsageError(f"--stages {stages}: one number, at least 1 (1 is unpipelined); sweep takes several")
    choice = tile if tile in CHOICES else "given"
    if choice in ("best", "tuned") and not tunes:
        raise UsageError(f"--tile {choice} is found by measuring, and only run measures for it; name a tile")
    if getattr(options, "all_variants", False) and options.variant is not None:
        raise UsageError("--all-variants and --variant exclude each other")
    named = options.variant not in (None, "default") or getattr(options, "all_variants", False)
    if choice == "tuned" and (stages is not None or named):
        raise UsageError("--tile tuned brings its own --stages and --variant; leave them out, or name a tile")
    whole = getattr(options, "all_variants", several and len(steps) == 1)
    cases = [
        _case(step, problem, variant, machine, tile, asked)
        for shape in shapes_of(options, sizes)
        for step in steps
        for variant in _variants(step, options.variant, options.dtype, whole, machine.has_cp_async)
        for problem in [problem_of(options, shape, step.variant(variant).dtypes[0])]
    ]
    return cases if len(steps) == 1 else _without_lacking(cases)


def _without_lacking(cases: list[Case]) -> list[Case]:
    """Leave out cases that the machine cannot run, with a warning; UsageError where none is left."""
    lacking = {case.step.name: case.lacks for case in cases if case.lacks}
    clauses = "; ".join(f"{name}, since {lacks}" for name, lacks in lacking.items())
    able = [case for case in cases if not case.lacks]
    if not able:
        raise UsageError(f"no step is left: {clauses}; name other steps, or another --arch")
    if lacking:
        warn(f"left out: {clauses}")
    return able


def problem_of(options: argparse.Namespace, shape: tuple[int, int, int], dtype: str = "float32") -> Matmul:
    """Make the product of a shape that the options ask for; ``dtype`` is taken where they name none."""
    return Matmul(*shape, options.dtype or dtype, options.layout, options.out_dtype)


def shapes_of(options: argparse.Namespace, sizes: str) -> list[tuple[int, int, int]]:
    """Read the shapes that ``--shape`` or ``--size`` name, or else ``sizes``."""
    if options.size is not None and options.shape is not None:
        raise UsageError("--size and --shape exclude each other")
    if options.shape is not None:
        return shapes_in(options.shape)
    squares = numbers(sizes if options.size is None else options.size, "--size", minimum=None)
    return [(size, size, size) for size in squares]


def machine_of(options: argparse.Namespace) -> GpuSpec:
    """Find the machine: that of ``--arch``, or of the steps' own architecture, else the GPU here, else the default."""
    arch = _arch_asked_for(options)
    here = options.arch is None and execution.gpu_present() and arch in ("", execution.gpu_arch())
    return execution.gpu_machine() if here else machine_for(arch or DEFAULT_ARCH)


def _arch_asked_for(options: argparse.Namespace) -> str:
    """Name ``--arch``'s architecture, or else the one that all steps named with ``--step`` need; or none."""
    named = getattr(options, "step", None)
    if options.arch is not None or named is None:
        return options.arch or ""
    needed = {step.arch for step in _steps(named)}
    return needed.pop() if len(needed) == 1 else ""


def placed_cases(options: argparse.Namespace, tunes: bool = False) -> tuple[list[Case], bool]:
    """List the cases that the options name, and tell whether they run on the GPU; see :func:`cases_of`.

    Default sizes are the GPU's or the CPU's. What the options refuse is said before that a GPU is missing.
    """
    demanded = cases_of(options, GPU_SIZES, tunes) if options.on == "gpu" else []
    on_gpu = runs_on_gpu(options)
    return demanded or cases_of(options, GPU_SIZES if on_gpu else CPU_SIZES, tunes), on_gpu


def runs_on_gpu(options: argparse.Namespace, insist: bool = False) -> bool:
    """Tell whether kernels run on the GPU; NoGpu where one is asked for in vain, UsageError for another's ``--arch``.

    Steps of another architecture than the GPU's do not, and are refused where ``--on gpu`` or ``insist`` insists.
    """
    insist = insist or options.on == "gpu"
    if insist:
        execution.require_gpu()
    on_gpu = insist or (options.on == "auto" and execution.gpu_present())
    arch = _arch_asked_for(options)
    if not on_gpu or arch in ("", execution.gpu_arch()):
        return on_gpu
    if options.arch is None and not insist:
        return False
    asked = f"--step {options.step} needs an {arch}" if options.arch is None else f"--arch {arch}"
    raise UsageError(f"{asked}: the GPU here is {execution.gpu_arch()}; compile works for any architecture")


def _steps(text: str | None) -> list[Step]:
    return list(find_steps().values()) if text is None else [get_step(number) for number in numbers(text, "--step")]


def _case(step: Step, problem: Matmul, variant: str, machine: GpuSpec, tile: str, stages: int | None) -> Case:
    # With the default tile until a command finds another.
    case = Case.default(step, problem, machine, variant, stages)
    if tile in CHOICES:
        return replace(case, tile_choice=tile)
    try:
        given = step.tile(variant, tile)
    except IllegalTile as refused:
        raise UsageError(f"--tile {tile!r} for {step.name}: {refused}") from None
    return replace(case, tile=given, stages=stages or step.stages, tile_choice="given")


def _variants(step: Step, choice: str | None, dtype: str | None, whole: bool, has_cp_async: bool) -> list[str]:
    """List the variants that ``--variant`` names; those that take ``dtype``, or the default's, where it means several.

    Another arithmetic than the default's, and a debug build, are meant only where asked for, by name or by "all".
    Commands that are for explicit kernels or for tuning mean EXPLICIT and TUNED.
    """
    default = step.default_variant(has_cp_async)
    if choice == "all" or (choice is None and whole):
        usual = step.variant(default)
        fitting = [variant for variant in step.variants if (dtype or usual.dtypes[0]) in variant.dtypes]
        if choice is None:
            fitting = [variant for variant in fitting if variant.math == usual.math and not variant.debug]
        return [variant.name for variant in fitting if has_cp_async or not variant.needs_async_copy] or [default]
    if choice in (None, "default"):
        return [default]
    if choice == EXPLICIT:
        return [next((variant.name for variant in step.variants if step.is_explicit(variant.name)), default)]
    if choice == TUNED:
        return list(step.tuned_variants(has_cp_async)[:1])
    chosen = [name.strip() for name in choice.split(",")]
    for name in chosen:
        step.variant(name)
    return chosen


def shapes_in(text: str) -> list[tuple[int, int, int]]:
    """Read what ``--shape`` names: MxNxK[,MxNxK]."""
    return [_shape(each) for each in text.split(",")]


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(-?\d+)x(-?\d+)x(-?\d+)", text.strip())
    if not match:
        raise UsageError(f"--shape {text!r} is not MxNxK; write for example 1024x512x256")
    return tuple(whole(number, "--shape") for number in match.groups())
