"""Records that count: the newest clean one of each key, in sections that never mix GPUs or workloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.records import (
    Counters,
    ModelRecord,
    Peer,
    Record,
    ShapeGroup,
    StreamRecord,
    Timeline,
    TunedConfig,
    load_counters,
    load_models,
    load_shapes,
    load_streams,
    load_timelines,
    load_tuned,
    newest,
    read_places,
    shape_groups,
)
from tensorir_ladder.reports.cases import Shape, by_product, grouped, is_size, natural, shape_of, slug

LADDER_CHOICES = ("default", "best")
TUNED = "tuned"
MISSING = "missing"  # a peer that was not installed: nothing was learnt of it
FASTEST = "fastest"  # of all that was measured, whatever tile, stages and variant
ARITHMETICS = (("ieee", "float32"), ("ieee", "float16"), ("ieee", "bfloat16"), ("tf32", "float32"))
LAYOUTS = {"nn": "B[K,N]", "nt": "B[N,K]ᵀ"}


@dataclass(frozen=True)
class Section:
    """Records that may stand in one table or plot: one GPU, one dtype, one arithmetic, one layout.

    ``beside`` are the records with peers' times, which count on their own: another measurement of a case without peers
    does not take them away.
    """

    gpu: str
    dtype: str
    out_dtype: str
    math: str
    layout: str
    records: tuple[Record, ...]
    beside: tuple[Record, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """All that its records share, as :func:`section_key` gives it."""
        return self.gpu, self.dtype, self.out_dtype, self.math, self.layout

    @property
    def title(self) -> str:
        """The section in words, GPU first."""
        output = "" if self.out_dtype == self.dtype else f" to {self.out_dtype}"
        return f"{self.gpu}, {self.dtype}{output} ({self.math}), {LAYOUTS.get(self.layout, self.layout)}"

    @property
    def slug(self) -> str:
        """Write what is drawn as part of a file name."""
        special = [self.out_dtype] * (self.out_dtype != self.dtype) + [self.math] * (self.math != "ieee")
        return slug(self.gpu, self.dtype, *special, self.layout)

    @property
    def place(self) -> tuple[Any, ...]:
        """A sorting key: by GPU, then as the ladder goes, B as stored before B transposed."""
        own = (self.math, self.dtype)
        known = ARITHMETICS.index(own) if own in ARITHMETICS else len(ARITHMETICS)
        return (self.gpu, self.layout, known, *own, self.out_dtype)

    @property
    def arithmetic(self) -> str:
        """The operands' dtype and how they are multiplied, as peaks.json names it."""
        return f"{self.dtype} {self.math}"

    @property
    def steps(self) -> list[int]:
        """List the steps measured, in order."""
        return sorted({record.step for record in self.records})

    @property
    def choices(self) -> list[str]:
        """The ladder's tile choices that were measured, of two."""
        return [choice for choice in self.all_choices if choice != TUNED]

    @property
    def all_choices(self) -> list[str]:
        """The ladder's tile choices that were measured, and "tuned" where a tuned configuration was."""
        measured = {record.tile_choice for record in self.records}
        return [choice for choice in (*LADDER_CHOICES, TUNED) if choice in measured]

    @property
    def shown_choices(self) -> list[str]:
        """The configurations a ladder is shown with: the default, and the fastest where others were measured."""
        found = {record.tile_choice == "default" for record in self.records}
        return [name for name, is_default in (("default", True), (FASTEST, False)) if is_default in found]

    def of(self, step: int, shape: Shape | None = None) -> list[Record]:
        """Return the records of a step, at one shape if it is given."""
        return [r for r in self.records if r.step == step and shape in (None, shape_of(r))]

    def shapes(self, choices: Iterable[str]) -> list[Shape]:
        """Return the shapes measured with one of the tile choices, smallest product first."""
        return by_product({shape_of(record) for record in self.records if record.tile_choice in choices})

    def sizes(self) -> list[Shape]:
        """Return the shapes of the ladder that have a place on an axis of sizes, smallest first."""
        return [shape for shape in self.shapes(self.all_choices) if is_size(shape)]

    def other_shapes(self) -> list[Shape]:
        """Return the other shapes of the ladder, which stand in a table of their own."""
        return [shape for shape in self.shapes(self.all_choices) if not is_size(shape)]

    def variants(self, step: int) -> list[str]:
        """Return the variants of a step, the default first, then by name with numbers in order."""
        found = {(not r.default_variant, natural(r.variant), r.variant) for r in self.of(step)}
        return list(dict.fromkeys(name for _, _, name in sorted(found)))

    def variant_choices(self, step: int) -> list[str]:
        """Return the tile choices with which at least two variants of a step were measured at some size."""
        return [choice for choice in self.choices if len(self.variant_lines(step, choice)) > 1]

    def variant_lines(self, step: int, choice: str) -> dict[str, dict[Shape, Record]]:
        """Return the line of each variant of a step, at sizes, those that have none left out."""
        lines = {name: self.line(step, choice, name, at=self.sizes()) for name in self.variants(step)}
        return {name: line for name, line in lines.items() if line}

    def predicts(self, step: int) -> bool:
        """Tell if a step's predicted gain can stand beside its measured one.

        The prediction compares a pipelined loop with a plain one, so it says nothing of a step whose
        predecessor is pipelined already.
        """
        before = [record for record in self.of(step - 1) if record.default_variant]
        predicted = any(record.predicted_gain_pct is not None for record in self.of(step))
        return predicted and all(record.stages == 1 for record in before)

    def pick(self, step: int, choice: str, shape: Shape, variant: str | None = None) -> Record | None:
        """Return the record that stands for a step (or one variant of it) in the ladder, None if not measured.

        A tuned configuration brings its own variant, which then stands for the step; so does the fastest.
        """
        if choice == FASTEST:
            return self.fastest(step, shape)
        found = [r for r in self.of(step, shape) if r.tile_choice == choice]
        found = [r for r in found if (self._stands_for_step(r) if variant is None else r.variant == variant)]
        usual = [record for record in found if record.default_stages]
        return max(usual or found, key=lambda record: record.environment.recorded_at, default=None)

    def fastest(self, step: int, shape: Shape) -> Record | None:
        """Return the record of a step at a shape that comes closest to cuBLAS or passes it; verified ones go first.

        Launched as cuBLAS is: what is launched early is :meth:`fastest_early`.
        """
        return _fastest(record for record in self.of(step, shape) if not record.launched_early)

    def fastest_early(self, shape: Shape) -> Record | None:
        """Return the fastest record at a shape of what is launched while the kernel before it still runs."""
        return _fastest(r for r in self.records if r.launched_early and shape_of(r) == shape)

    def leader(self, shape: Shape) -> Record | None:
        """Return the ladder's fastest record at a shape, launched as cuBLAS is.

        Of the ladder as one run measured it, where there is one and it has the shape, else of all that was measured.
        """
        run = self.ladder_run
        own = [self.pick(step, "default", shape) for step in self.steps]
        if run and any(record and record.environment.run == run for record in own):
            return _fastest(filter(None, own))
        return _fastest(filter(None, (self.fastest(step, shape) for step in self.steps)))

    @property
    def ladder_run(self) -> str:
        """The run that measured the whole ladder as it is shown with default tiles; empty where several did."""
        shown = [record for step in self.steps for record in self.line(step, "default", at=self.sizes()).values()]
        runs = {(record.environment.run, record.environment.gpu_uuid) for record in shown}
        return runs.pop()[0] if len(runs) == 1 else ""

    def gain_fastest(self, step: int, shape: Shape) -> float | None:
        """Return the gain of a step's fastest configuration over that of the step before, by their ratios to cuBLAS."""
        found = [self.fastest(number, shape) for number in (step, step - 1)]
        if not all(record and record.verification.passed for record in found):
            return None
        own, before = (record.ratio_to_cublas for record in found)
        return 100 * (own / before - 1)

    def forecast_gain(self, record: Record) -> float | None:
        """Return the gain over one stage that the depth model forecasts for a record's case; None without a sweep."""
        own = (record.variant, record.tile)
        found = [r.depth for r in self.of(record.step, shape_of(record)) if r.depth and (r.variant, r.tile) == own]
        times = found[-1].time_ms if found else ()
        return 100 * (times[0] / times[record.stages - 1] - 1) if 1 < record.stages <= len(times) else None

    def drawn(self) -> list[Record]:
        """List what the ladder's figures are drawn from: records of its tile choices, or the fastest of a case."""
        sizes = self.sizes()
        fastest = [self.fastest(step, size) for step in self.steps for size in sizes]
        keys = {record.key for record in fastest if record is not None}
        shown = [record for record in self.records if record.tile_choice in self.choices or record.key in keys]
        return [record for record in shown if shape_of(record) in sizes]

    def line(
        self, step: int, choice: str, variant: str | None = None, at: Iterable[Shape] | None = None
    ) -> dict[Shape, Record]:
        """Map the shapes of one line of the ladder, or some of them, to records, where measured."""
        shapes = self.shapes(self.all_choices if choice == FASTEST else (choice,))
        wanted = shapes if at is None else [shape for shape in shapes if shape in at]
        picked = {shape: self.pick(step, choice, shape, variant) for shape in wanted}
        return {shape: record for shape, record in picked.items() if record is not None}

    def gains_at_sizes(self, step: int) -> list[float]:
        """List the gains over the step before wherever an axis of sizes shows them; none where that was not timed."""
        shown = [r for r in self.of(step) if r.tile_choice in self.choices and is_size(shape_of(r))]
        return [gain for record in shown if (gain := shown_gain(record)) is not None]

    def others(self, step: int) -> list[Record]:
        """Return a step's records that no line of the ladder shows: given tiles and other stage counts."""
        lines = [self.line(step, choice, name) for choice in self.all_choices for name in self.variants(step)]
        shown = {record.key for line in lines for record in line.values()}
        return [record for record in self.of(step) if record.key not in shown]

    def peer_shapes(self) -> list[Shape]:
        """Return the shapes at which peers were timed, smallest product first."""
        return by_product({shape_of(record) for record in self._with_peers()})

    def peer_names(self) -> list[str]:
        """List the peers that took part, in the order of their records; not those that were not installed."""
        found = (peer for record in self._with_peers() for peer in record.peers)
        return list(dict.fromkeys(peer.name for peer in found if peer.status != MISSING))

    def peer(self, shape: Shape, name: str) -> tuple[Record, Peer] | None:
        """Find a peer at a shape with its record: the newest that has its time, else the newest that tried."""
        records = [record for record in self._with_peers() if shape_of(record) == shape]
        records.sort(key=lambda record: record.rank, reverse=True)
        found = [(r, peer) for r in records for peer in r.peers if peer.name == name and peer.status != MISSING]
        return next((pair for pair in found if pair[1].timing), found[0] if found else None)

    def _stands_for_step(self, record: Record) -> bool:
        if record.default_variant or record.tile_choice == TUNED:
            return True
        if any(other.default_variant for other in self.of(record.step)):
            return False
        return record.variant == self.variants(record.step)[0]

    def _with_peers(self) -> list[Record]:
        return [record for record in self.beside if record.verification.passed]


@dataclass(frozen=True)
class Results:
    """A results folder as reports see it: of each case the record that counts, by kind.

    ``places`` says where the records of steps and calibrations stand, by key. ``energy`` are the records that have
    joules, which count on their own, as those ``beside`` peers do.
    """

    records: tuple[Record, ...] = ()
    beside: tuple[Record, ...] = ()
    calibrations: tuple[Record, ...] = ()
    counters: tuple[Counters, ...] = ()
    streams: tuple[StreamRecord, ...] = ()
    tuned: tuple[TunedConfig, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    models: tuple[ModelRecord, ...] = ()
    shapes: tuple[ShapeGroup, ...] = ()
    energy: tuple[Record, ...] = ()
    places: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def sections(self) -> list[Section]:
        """Return the records, by GPU, dtype, arithmetic and layout, in the order of the ladder."""
        groups, beside = grouped(self.records, section_key), grouped(self.beside, section_key)
        sections = [Section(*key, tuple(group), tuple(beside.get(key, ()))) for key, group in groups.items()]
        return sorted(sections, key=lambda section: section.place)

    def steps(self) -> list[int]:
        """List the steps measured, in order."""
        return sorted({item.step for item in (*self.records, *self.timelines)})

    def step_name(self, step: int) -> str:
        """Return the name of a step's file, without its ending."""
        return next(item.step_name for item in (*self.records, *self.timelines) if item.step == step)

    def default_variant(self, step: int) -> str | None:
        """Return the variant that stands for a step, None where it was not measured."""
        return next((r.variant for r in self.records if r.step == step and r.default_variant), None)

    def tuned_in(self, section: Section, steps: Iterable[int]) -> list[TunedConfig]:
        """Return the tuned configurations of some steps, for a section's GPU, dtype, arithmetic and layout."""
        return [tuned for tuned in self.tuned if section_key(tuned) == section.key and tuned.step in steps]


def load(folder: Path, steps: Iterable[int] | None = None) -> Results:
    """Read the records of a folder that count, of some steps or all; RecordError names the first that is none.

    Of each case the newest counts, or else that of the newest run which measured its whole ladder.
    """
    everything = read_places(folder, Record)
    of_runs = ladder_runs(everything)
    replaced = {record.key for record in of_runs.values()}
    chosen = {place: record for place, record in newest(everything).items() if record.key not in replaced} | of_runs
    with_peers = newest({place: record for place, record in everything.items() if record.peers})
    with_energy = newest({place: record for place, record in everything.items() if record.energy})
    places = {record.key: Path(place).name for place, record in chosen.items()}
    wanted = None if steps is None else set(steps)

    def kept(found: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(item for item in found if wanted is None or item.step in wanted)

    records = sorted(chosen.values(), key=_row_order)
    return Results(
        records=kept(record for record in records if record.kind == "step"),
        beside=kept(sorted(with_peers.values(), key=_row_order)),
        calibrations=tuple(record for record in records if record.kind == "calibration"),
        counters=kept(load_counters(folder)),
        streams=tuple(load_streams(folder)),
        tuned=kept(load_tuned(folder)),
        timelines=kept(load_timelines(folder)),
        models=tuple(load_models(folder)) if wanted is None else (),
        shapes=tuple(shape_groups(load_shapes(folder))) if wanted is None else (),
        energy=kept(sorted(with_energy.values(), key=_row_order)),
        places=places,
    )


def ladder_runs(places: Mapping[str, Record]) -> dict[str, Record]:
    """Find, of each section, the records of the newest run that measured its whole ladder, by place.

    The ladder: every step and size that anyone measured with the default variant, tile and stages. A run is one
    command on one GPU; its absolute figures may stand in one table. What is not clean or failed its check is no part.
    """
    shown = {place: record for place, record in places.items() if _is_of_ladder(record)}
    found: dict[str, Record] = {}
    for own in grouped(shown, lambda place: section_key(shown[place])).values():
        whole = {(shown[place].step, shape_of(shown[place])) for place in own}
        sound = [p for p in own if shown[p].environment.run and shown[p].rank[0] and shown[p].verification.passed]
        runs = grouped(sound, lambda place: (shown[place].environment.run, shown[place].environment.gpu_uuid))
        complete = [
            {shown[place].key: place for place in run}.values()
            for run in runs.values()
            if {(shown[place].step, shape_of(shown[place])) for place in run} == whole
        ]
        # Places are in the order of time.
        newest_run = max(complete, key=lambda run: max(shown[place].rank for place in run), default=())
        found |= {place: shown[place] for place in newest_run}
    return found


def _is_of_ladder(record: Record) -> bool:
    usual = record.default_variant and record.default_stages and record.tile_choice == "default"
    return record.kind == "step" and usual and is_size(shape_of(record))


def _fastest(records: Iterable[Record]) -> Record | None:
    return max(records, key=lambda record: (record.verification.passed, record.ratio_to_cublas), default=None)


def section_key(record: Record | TunedConfig) -> tuple[str, ...]:
    """Give what two records must share to stand in one table."""
    return (record.environment.gpu, record.dtype, record.out_dtype, record.math, record.layout)


def shown_gain(record: Record) -> float | None:
    """Return the gain over the step before, None for the first step and for a record that failed its check."""
    return record.improvement_over_previous_pct if record.verification.passed else None


def _row_order(record: Record) -> tuple:
    case = (*section_key(record), record.step, not record.default_variant, natural(record.variant))
    return (*case, record.tile_choice != "default", record.tile_choice, record.stages, *shape_of(record), record.tile)
