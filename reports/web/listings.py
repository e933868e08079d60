"""Kernels to compare: what records know of them, and their texts, lowered here or, of a compiler, from a record."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from tensorir_ladder.harness.build import Case, lower
from tensorir_ladder.harness.listings import comparable_text
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.harness.records import CodeFacts, Counters, Record, Timeline, shape_text
from tensorir_ladder.reports.cases import slug
from tensorir_ladder.reports.web.sources import SiteSources
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.registry import get_step

LISTED_SIZES = (1024, 4096)  # at which every kernel's texts are made; elsewhere, those of counted and stamped ones
MADE_HERE = ("schedule", "tir", "lowered", "cuda")  # by TVM alone
JOBS = 2
Key = tuple[Any, ...]


@dataclass(frozen=True)
class ListedKernel:
    """A kernel that can be compared, and all that was measured of it.

    ``arch`` is what it is made for; ``record`` its newest measurement, None where it was only built.
    """

    gpu: str
    arch: str
    step: int
    variant: str
    shape: tuple[int, int, int]
    dtype: str
    out_dtype: str
    layout: str
    tile: str
    stages: int
    default: bool  # as its step makes it where nobody names tile or stages
    multiprocessors: int | None = None
    record: Record | None = None
    counters: Counters | None = None
    timeline: Timeline | None = None

    @property
    def key(self) -> Key:
        """Return what two kernels of a page differ in."""
        return (*self.text_key, self.gpu)

    @property
    def text_key(self) -> Key:
        """Return what two kernels' texts may differ by, besides the GPU that they are made for."""
        product = (self.shape, self.dtype, self.out_dtype, self.layout)
        return (self.step, self.variant, *product, self.tile, self.stages)

    @property
    def identity(self) -> str:
        """Its name in an address."""
        dtype = self.dtype + (f">{self.out_dtype}" if self.out_dtype != self.dtype else "")
        case = (f"{self.step}:{self.variant}", shape_text(self.shape), f"{dtype}.{self.layout}")
        return "~".join([*case, self.tile, str(self.stages), slug(self.gpu)])

    @property
    def listed(self) -> bool:
        """True where its texts are shown."""
        square = len(set(self.shape)) == 1 and self.shape[0] in LISTED_SIZES
        return square or self.counters is not None or self.timeline is not None


@dataclass(frozen=True)
class KernelTexts:
    """A kernel's texts by form, each in two parts, what it begins with like others and its own; and what they say."""

    source_sha256: str
    texts: dict[str, tuple[str, str]]
    threads: int
    blocks: int
    smem_bytes: int
    code: CodeFacts
    instructions: dict[str, int]  # an explicit kernel's own, by name


def kernels(sources: SiteSources) -> list[ListedKernel]:
    """List the kernels of all records, and every variant as its step makes it at the listed sizes, measured or not."""
    found: dict[Key, ListedKernel] = {}
    for record in sorted(sources.results.records, key=lambda record: (record.tile_choice != "default", record.stages)):
        kernel = replace(_of(record, record.environment.gpu, record.arch, record.out_dtype), record=record)
        default = record.tile_choice == "default" and record.default_stages
        kernel = replace(kernel, default=default, multiprocessors=record.environment.multiprocessors or None)
        found.setdefault(kernel.key, kernel)
    arches = {kernel.gpu: kernel.arch for kernel in found.values()}
    for counters in sources.results.counters:
        if counters.gpu in arches:
            _join(found, _of(counters, counters.gpu, arches[counters.gpu], counters.dtype), counters=counters)
    for timeline in sources.results.timelines:
        _join(found, _of(timeline, timeline.gpu_name, timeline.arch, timeline.out_dtype), timeline=timeline)
    for kernel in _usual(sources):
        found.setdefault(kernel.key, kernel)
    known = set(sources.steps)
    return sorted((kernel for kernel in found.values() if kernel.step in known), key=_order(sources))


def compiled_for_reports(sources: SiteSources) -> list[ListedKernel]:
    """List the kernels whose PTX and machine code are kept: of every variant, as its step makes it, at one size.

    Neither of builds for debugging nor of another arithmetic than the steps', whose texts are as long as all others.
    """
    forms = {(number, form.name): form for number, step in sources.steps.items() for form in step.variants}
    found = []
    for kernel in kernels(sources):
        usual = kernel.default and set(kernel.shape) == {LISTED_SIZES[0]}
        form = forms.get((kernel.step, kernel.variant))  # None of one that was measured, and is gone
        if usual and form and not form.debug and form.math == "ieee":
            found.append(kernel)
    return found


def listings(wanted: Iterable[ListedKernel], jobs: int = JOBS) -> dict[Key, KernelTexts]:
    """Make the texts of kernels, by their keys; what is the same on two GPUs is lowered once.

    A kernel of which the steps of today make nothing, since they refuse it, has none.
    """
    groups: dict[Key, list[ListedKernel]] = {}
    for kernel in wanted:
        digest = kernel.record.source_sha256 if kernel.record else kernel.gpu
        groups.setdefault((*kernel.text_key, digest), []).append(kernel)
    firsts = [group[0] for group in groups.values()]
    if min(jobs, len(firsts)) < 2:
        made: list[KernelTexts | None] = list(map(_listing, firsts))
    else:
        # A fresh interpreter: one that has threads, as TVM starts them, cannot be copied.
        with ProcessPoolExecutor(min(jobs, os.cpu_count() or 1), get_context("spawn")) as pool:
            made = list(pool.map(_listing, reversed(firsts)))[::-1]  # later steps take longest
    return {kernel.key: one for one, group in zip(made, groups.values()) if one for kernel in group}


def case_of(kernel: ListedKernel) -> Case:
    """Make the case that builds a kernel, on the GPU that it is for."""
    step, problem = get_step(kernel.step), Matmul(*kernel.shape, kernel.dtype, kernel.layout, kernel.out_dtype)
    machine = machine_for(kernel.arch).of_gpu(kernel.gpu, kernel.multiprocessors)
    return Case(step, problem, kernel.variant, step.tile(kernel.variant, kernel.tile), machine, kernel.stages)


def _listing(kernel: ListedKernel) -> KernelTexts | None:
    try:
        made = lower(case_of(kernel))
    except ValueError:  # all that a case is refused for: its step, variant, tile, schedule
        return None
    texts = {form: comparable_text(made, form) for form in MADE_HERE}
    counted = made.instructions if made.meets_at_mbarriers else {}
    return KernelTexts(made.source_sha256, texts, made.threads, made.blocks, made.smem_bytes, made.code, counted)


def _usual(sources: SiteSources) -> Iterator[ListedKernel]:
    """Yield every variant of every step at the first listed size, as the step makes it for the GPU of its architecture.

    Debug builds are left out. On other GPUs there is nothing to tell of what was not measured.
    """
    size = LISTED_SIZES[0]
    for step in sources.steps.values():
        machine = machine_for(step.arch or DEFAULT_ARCH)
        for variant in step.variants:
            if variant.debug:
                continue
            case = Case.default(step, Matmul(size, size, size, variant.dtypes[0]), machine, variant.name)
            product = ((size, size, size), case.problem.dtype, case.problem.out_dtype, case.problem.layout)
            form = (step.number, variant.name, *product, str(case.tile), case.stages_built)
            yield ListedKernel(machine.gpu, machine.arch, *form, True)


def _of(item: Record | Counters | Timeline, gpu: str, arch: str, out_dtype: str) -> ListedKernel:
    product = (item.shape, item.dtype, out_dtype, item.layout)
    return ListedKernel(gpu, arch, item.step, item.variant, *product, item.tile, item.stages, False)


def _join(found: dict[Key, ListedKernel], kernel: ListedKernel, **more: Any) -> None:
    found[kernel.key] = replace(found.get(kernel.key, kernel), **more)


def _order(sources: SiteSources) -> Any:
    gpus = list(sources.gpus.values())
    places = {(n, v): at for n, step in sources.steps.items() for at, v in enumerate(step.variant_names)}

    def order(kernel: ListedKernel) -> tuple[Any, ...]:
        place = places.get((kernel.step, kernel.variant), len(places))
        product = (math.prod(kernel.shape), kernel.shape, kernel.dtype, kernel.layout)
        gpu = gpus.index(kernel.gpu) if kernel.gpu in gpus else len(gpus)
        return (kernel.step, place, *product, gpu, not kernel.default, kernel.tile, kernel.stages)

    return order
