"""The data of one step's lesson page, from the step, its generated kernel and the benchmark records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import urlencode

from markupsafe import Markup

from tensorir_ladder.harness.build import Case, Kernel
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.harness.models.time import instruction_ceiling, tile_times
from tensorir_ladder.harness.records import shape_text
from tensorir_ladder.kernels.stream_k import StreamKPlan
from tensorir_ladder.reports.cases import slug
from tensorir_ladder.reports.cells import Table
from tensorir_ladder.reports.counters import counters_tables
from tensorir_ladder.reports.page import records_table
from tensorir_ladder.reports.timelines import Lives, lives, lives_table, loads, multiplications
from tensorir_ladder.reports.web.lessons import code, measured, plan, waves
from tensorir_ladder.reports.web.lessons import lives as pictures
from tensorir_ladder.reports.web.lessons.cuda import CudaLine, main_loops
from tensorir_ladder.reports.web.lessons.facts import HALF_FROM, Facts
from tensorir_ladder.reports.web.sources import SiteSources
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Step

SMALL_SIZE, LARGE_SIZE = 1024, 4096
LARGE_FROM = 7  # the first step that is shown at LARGE_SIZE
COMPARED_WITH = {8: 4}  # the step that code is compared with, if it is not the previous one
DEEPEST = 6
ROLES = ("the producer", "a consumer")
# First and last line of each excerpt that shows a schedule's idea, if the whole difference is longer.
ESSENCE = {
    5: (("stage, order =", "async_stages ="), ("sch.annotate(loops", "async_stages)")),
    6: (("pipeline_loop(", "unroll_loop("),),
    7: (
        ("loops = tile_for_warps", "sum_slices"),
        ("walk_serpentine(", "walk_serpentine("),
        ("stage_in_padded(", "stage_in_padded("),
        ("read_through_registers(", "read_through_registers("),
        ("reads_ahead =", "pipeline_loop("),
    ),
    8: (
        ("instruction = fitting", "instruction = fitting"),
        ("loops = tile_to_warps", "loops = tile_to_warps"),
        ("accumulate_fragment(", "accumulate_fragment("),
        ("stage_in_swizzled(", "load_fragments("),
        ("use_instruction(", "use_instruction("),
    ),
    10: (
        ("stage_in_panels(", "stage_in_panels("),
        ("hide_reads(", "hide_reads("),
        ("in_flight =", "multiply_by_wgmma("),
    ),
    11: (("store_by_tma(", "store_by_rows("), ("stage_by_tma(", "pipeline_warpgroups(")),
    12: (("pipeline_warpgroups(", "launch_early("),),
}
# First and last line of each excerpt of an explicit kernel.
PARTS = {
    13: (("while work.tile", "work.advance"), ("while work.tile", "work.advance")),
    14: (("def fill(", "product.load("), ("def multiply(", "commit("), ("def multiply_and_fill", "fill((stage")),
}


@dataclass(frozen=True)
class Lesson:
    """A step's lesson; ``facts``: measurements of the GPU that the text quotes."""

    sources: SiteSources
    step: Step
    facts: Facts

    @property
    def number(self) -> int:
        """The step's number."""
        return self.step.number

    @property
    def title(self) -> str:
        """Return what the step is called, without its number."""
        name = self.step.title.partition(", ")[2] or self.step.title
        return name[0].upper() + name[1:]

    @property
    def short(self) -> str:
        """The step's name in a few words."""
        return self.step.title.partition(", ")[2].partition(":")[0]

    @property
    def size(self) -> int:
        """The side of the product whose kernel the lesson shows."""
        return LARGE_SIZE if self.number >= LARGE_FROM else SMALL_SIZE

    def case(self, stages: int | None = None) -> Case:
        """Return the case shown: the default variant and tile, and the default stages unless some are given."""
        dtype = self.step.variants[0].dtypes[0]
        problem = Matmul(self.size, self.size, self.size, dtype=dtype)
        return Case.default(self.step, problem, machine_for(self.step.arch or DEFAULT_ARCH), stages=stages)

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel shown, lowered."""
        return self.sources.kernel(self.case())

    # --- the code ----------------------------------------------------------------------------------------------------
    @property
    def compared_with(self) -> Step | None:
        """The step that the code is compared with; None for explicit kernels."""
        if self.step.explicit:
            return None
        return self.sources.steps.get(COMPARED_WITH.get(self.number, self.number - 1))

    @cached_property
    def file(self) -> str:
        """The file that implements the step."""
        return code.step_source(self.step)[0]

    @cached_property
    def difference(self) -> list[code.CodeLine]:
        """The step's own code: what differs from the step compared with, or its essential part."""
        before = self.compared_with
        if before:
            return code.difference(self._shown_source(before), self._shown_source(self.step))
        return code.whole(self._shown_source(self.step))

    @cached_property
    def essence(self) -> list[code.CodeLine]:
        """The lines that show the idea; empty if the whole difference is shown."""
        if self.number not in ESSENCE:
            return []
        return code.whole(code.parts(code.step_source(self.step)[1], ESSENCE[self.number]))

    def _shown_source(self, step: Step) -> str:
        _, source = code.step_source(step)
        return code.parts(source, PARTS[step.number]) if step.number in PARTS else source

    def compared(self, form: str) -> str:
        """Return the address that compares this step's kernel with the other step's, in one view (``form``)."""
        before = self.compared_with or self.sources.steps[self.number - 1]
        sides = [Lesson(self.sources, step, self.facts).identity for step in (before, self.step)]
        return "compare.html#" + urlencode({"left": sides[0], "right": sides[1], "show": form})

    @property
    def identity(self) -> str:
        """The kernel's name in addresses of compare.html."""
        case = self.case()
        shape = shape_text((self.size,) * 3)
        product = (f"{self.number}:{case.variant}", shape, f"{case.problem.dtype}.{case.problem.layout}")
        gpu = case.machine.gpu if self.step.never_run else self.facts.gpu
        return "~".join([*product, str(case.tile), str(case.stages_built), slug(gpu)])

    @cached_property
    def aspects(self) -> Table | None:
        """List how the generated code differs from the other step's; that of steps that never ran, from step 11's."""
        from tensorir_ladder.harness.explain import aspects

        before = self.sources.steps.get(COMPARED_WITH.get(self.number, 11 if self.step.never_run else self.number - 1))
        if before is None:
            return None
        other = Lesson(self.sources, before, self.facts)
        old, new = aspects(other.kernel), aspects(self.kernel)
        names = list(dict.fromkeys((*old, *new)))
        rows = tuple((n, old.get(n, ""), new.get(n, "")) for n in names if old.get(n) != new.get(n))
        header = ("", f"step {before.number}", f"step {self.number}")
        note = f"{other.kernel.case}; {self.kernel.case}."
        return Table(f"Step {before.number} beside step {self.number}", header, rows, note, left=3)

    # --- the pipeline ------------------------------------------------------------------------------------------------
    @cached_property
    def stage_counts(self) -> list[int]:
        """The stage counts of the page's slider; empty for a step without a pipeline."""
        if not self.step.pipelined:
            return []
        case = self.case()
        fewest = case.form.fewest_stages
        return [n for n in range(fewest, DEEPEST + 1) if self._fits(n)]

    def _fits(self, stages: int) -> bool:
        from tensorir_ladder.schedules.errors import IllegalSchedule

        try:
            self.case(stages).validate()
        except IllegalSchedule:
            return False
        return True

    @property
    def chosen_stages(self) -> int:
        """The stages that the slider begins with."""
        return self.case().stages_built

    @cached_property
    def plans(self) -> list[plan.LoopPlan]:
        """The loop's plan at each stage count of the slider above 1; empty for explicit kernels."""
        if self.step.explicit:
            return []
        made = [plan.plan_of(self.sources.kernel(self.case(stages))) for stages in self.stage_counts if stages > 1]
        return [own for own in made if own]

    @cached_property
    def lengths(self) -> tuple[float, float, str, str] | None:
        """Return the load and multiply times of a k tile in the picture, their source, and the unit."""
        if self.step.never_run:
            return (
                2.0,
                1.0,
                "this step is not measured: a load is drawn twice as long as a multiplication",
                "lengths",
            )
        if self.lives:
            first = self.lives[0].first
            load = statistics.median(span.end - span.begin for span in loads(first))
            roles = [multiplications(first, role) for role in first.roles]
            product = statistics.median(s.end - s.begin for own in roles for s in own if s.seen)
            source = f"lengths are medians of the measured timeline with {first.stages} "
            source += f"stage{'s' * (first.stages > 1)}, {self.facts.gpu}"
            return load / 1e3, product / 1e3, source, "µs"
        rates = self.facts.rates
        case = self.case()
        ceiling = rates and instruction_ceiling(rates, type(case.tile), case.math)
        if not rates or not ceiling:
            return None
        gb_s = rates.l2_read_gb_s if self.number >= HALF_FROM else rates.copy_gb_s
        load, product = tile_times(case.tile, case.problem.dtype, rates, ceiling, gb_s)
        source = f"a load takes {rates.dram_latency_ns:.0f} ns and its bytes at a multiprocessor's share of "
        source += f"{gb_s:,.0f} GB/s, a multiplication the tile's operations at the measured peak, {self.facts.gpu}"
        return load / 1e3, product / 1e3, source, "µs"

    @cached_property
    def time_chart(self) -> Markup | None:
        """The pipeline on an axis of time, by the slider."""
        if not self.stage_counts or self.lengths is None:
            return None
        load, product, source, unit = self.lengths
        return plan.time_chart(self.stage_counts, self.chosen_stages, load, product, source, unit)

    # --- what was measured -------------------------------------------------------------------------------------------
    @cached_property
    def lives(self) -> list[Lives]:
        """The step's timelines, by case: those of its default variant, where there are such."""
        found = lives(self.sources.results, self.number)
        here = [group for group in found if group.first.environment.gpu == self.facts.gpu]
        return [group for group in here if group.first.variant == self.step.default_variant()] or here

    def life_chart(self, group: Lives) -> Markup:
        """Draw a case's timelines."""
        return pictures.lives_chart(group, max(t.stages for t in group.timelines))

    @property
    def life_colours(self) -> dict[str, str]:
        """The legend of a timeline's bars: names with their colours."""
        return pictures.COLOURS

    @property
    def wave_colours(self) -> dict[str, str]:
        """The legend of what persistent blocks do: names with their colours."""
        return waves.COLOURS

    def life_table(self, group: Lives) -> Table:
        """Summarize a case's timelines."""
        return lives_table(group)

    @cached_property
    def brought(self) -> Markup | None:
        """Plot this step's and the previous step's ratio to cuBLAS over sizes."""
        return measured.brought_chart(self.sources.results, self.number, self.facts.gpu)

    @cached_property
    def stages_chart(self) -> Markup | None:
        """The step's speed over stages."""
        return measured.stages_chart(self.facts, self.number)

    @cached_property
    def swept_sizes(self) -> dict[str, str]:
        """The shapes in the menu of the stages chart."""
        return measured.swept_sizes(self.facts, self.number)

    @property
    def first_swept(self) -> str | None:
        """The shape that is shown first."""
        return measured.first_size(self.swept_sizes) if self.swept_sizes else None

    def variants(self, size: int) -> Table | None:
        """Compare the step's variants at a size."""
        return measured.variants_rows(self.facts, self.step, size)

    @cached_property
    def counters(self) -> list[Table]:
        """Hardware counters of this step and of the previous one."""
        section = self.facts.section(self.number)
        return counters_tables(self.sources.results, self.number, section) if section else []

    @cached_property
    def records(self) -> list[tuple[str, Table]]:
        """All records of the step's default variant, by section."""
        sections = [s for s in self.sources.results.sections() if self.number in s.steps]
        return [(section.title, records_table(section, self.number)) for section in sections]

    def latency(self, variant: str, tile: str, size: str) -> measured.Latency | None:
        """Return the latency arithmetic of a swept case."""
        return measured.latency_of(self.facts, self.step, variant, tile, size)

    def latency_table(self, latency: measured.Latency) -> Table:
        """Compare models and measurement by stages."""
        return measured.latency_table(latency)

    def streams_table(self, size: str) -> Table:
        """Show the memory-bound workloads of a size class over stages."""
        return measured.streams_table(self.facts.streams_of(size))

    # --- the generated code ------------------------------------------------------------------------------------------
    @cached_property
    def loops(self) -> list[tuple[str, list[CudaLine]]]:
        """The kernel's main loop, or those of its roles, each with a title."""
        found = main_loops(self.kernel)
        names = ROLES if len(found) > 1 else ("",)
        return list(zip([*names, *[""] * len(found)], found))

    def same_code(self, variant: str, other: str, number: int | None = None) -> bool:
        """Return whether a variant's code is identical to that of ``other`` (of step ``number``)."""
        step = self.sources.steps[number or self.number]
        pair = [replace(self.case(), variant=variant), replace(self.case(), step=step, variant=other)]
        return len({self.sources.kernel(case).body for case in pair}) == 1

    # --- pictures of one step ----------------------------------------------------------------------------------------
    @cached_property
    def waves_chart(self) -> Markup:
        """Draw how persistent blocks share out their tiles."""
        return waves.waves_chart(self.step)

    @cached_property
    def waves(self) -> list[tuple[str, StreamKPlan, int, int]]:
        """Return each shape's stream-K plan, and the busiest block's k tiles without and with the split."""
        found = waves.waves_of(self.step)
        return [(shape, plans[1], *map(waves.fewest_k_tiles, plans)) for shape, plans in found.items()]

    def neighbours(self, steps: Sequence[Step]) -> tuple[Step | None, Step | None]:
        """Return the previous step and the next one."""
        own = [step.number for step in steps]
        place = own.index(self.number)
        return (steps[place - 1] if place else None), (steps[place + 1] if place + 1 < len(steps) else None)
