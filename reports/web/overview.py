"""The site's first page: the ladder as one chart and one table, GPU, operands and size chosen at the top."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from tensorir_ladder.harness.records import Peer, Record
from tensorir_ladder.reports.cases import Shape, grouped, is_size, shape_of, slug
from tensorir_ladder.reports.readme_tables import headline, size_header
from tensorir_ladder.reports.selection import FASTEST, Section
from tensorir_ladder.reports.table import is_stage_count, measured_on, short_name
from tensorir_ladder.reports.web.charts import ANY, INTERVAL, chart
from tensorir_ladder.reports.web.page import Page
from tensorir_ladder.reports.web.sources import SiteSources

LADDER, OTHER_SHAPES, TURNED = "ladder", "shapes", "nt"
VIEWS = {
    LADDER: "the ladder",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    TURNED: "B transposed",
    OTHER_SHAPES: "any size",
}
CONFIGURATIONS = {"default": "each step's default", FASTEST: "the fastest measured"}
USUAL_SIZE = "4096"
NOT_DRAWN = ("idea", "address", "file", "size", "m", "dtype", "past", "cublas", "own", "gain", "day")
Row = dict[str, Any]


def pages(sources: SiteSources) -> Iterator[Page]:
    """Yield the overview."""
    found = rows(sources)
    sizes = sorted({row["m"] for row in found if row["size"] != ANY})
    values = {
        "headlines": headlines(sources),
        "rows": found,
        "views": {name: text for name, text in VIEWS.items() if any(name in row["view"].split(",") for row in found)},
        "configurations": CONFIGURATIONS,
        "sizes": {ANY: "all", **{str(size): f"{size}³" for size in sizes}},
        "usual_size": USUAL_SIZE if USUAL_SIZE in map(str, sizes) else ANY,
        "chart": ladder_chart(found, next(iter(sources.gpus), "")) if found else "",
        "never_run": [step for step in sources.steps.values() if step.never_run],
        "machines": machines(sources),
    }
    about = "Each step's speed beside cuBLAS, by GPU, operands and size"
    yield Page("index.html", "The ladder", "overview.html.j2", values, "Overview", description=about)


def rows(sources: SiteSources) -> list[Row]:
    """Make a row per step or peer, shape and configuration, of all GPUs; each says in which views it stands."""
    found = [row for section in sources.results.sections() for row in _section_rows(sources, section)]
    peers = sorted({row["label"] for row in found if row["peer"]}, key=str.casefold)
    behind = max((row["place"] for row in found), default=0) + 1
    found = [row | {"place": behind + peers.index(row["label"])} if row["peer"] else row for row in found]
    return sorted(found, key=lambda row: (row["place"], row["product"]))


def ladder_chart(found: list[Row], gpu: str) -> Markup:
    """Draw ratios step by step, peers behind the steps, a line per size; intervals as bars."""
    shown = [
        {name: value for name, value in row.items() if name not in ("command", "address", "file")} for row in found
    ]
    x = {
        "field": "label",
        "type": "nominal",
        "sort": {"field": "place", "op": "min"},
        "axis": {"title": None, "labelAngle": -40, "labelLimit": 210, "labelOverlap": False},
    }
    size = {
        "field": "shape",
        "type": "nominal",
        "sort": {"field": "product", "op": "min"},
        "title": "m = n = k, or m×n×k",
    }
    beside = {"x": x, "stroke": {**size, "legend": None}}  # colour and shape of points have one legend together
    ratio = {
        "type": "quantitative",
        "scale": {"type": "log", "nice": False},
        "axis": {"values": [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5], "format": "~g"},
        "title": "speed ÷ cuBLAS's, same rounds (logarithmic)",
    }
    tooltip = [
        {"field": "name", "title": "what"},
        {"field": "shape", "title": "size"},
        {"field": "ratio", "title": "of cuBLAS", "format": ".3f"},
        {"field": "interval", "title": "95 % interval"},
        {"field": "speeds", "title": "TFLOPS, ours / cuBLAS's"},
        {"field": "spread", "title": "spread, %", "format": ".1f"},
        {"field": "clock", "title": "SM clock before, after, MHz"},
        {"field": "power", "title": "power before, after, W"},
        {"field": "tile", "title": "configuration"},
        {"field": "again", "title": "measure again"},
    ]
    lines = {
        "mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.6},
        "encoding": {**beside, "y": {"field": "ratio", **ratio}, "detail": {"field": "line"}},
    }
    bars = {
        "mark": {"type": "rule", "strokeWidth": 1.5},
        "encoding": {**beside, "y": {"field": "low", **ratio}, "y2": {"field": "high"}},
    }
    points = {
        "transform": [INTERVAL],
        "mark": {"type": "point", "size": 70, "filled": True},
        "encoding": {"x": x, "y": {"field": "ratio", **ratio}, "color": size, "shape": size, "tooltip": tooltip},
    }
    cublas = {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5},
        "encoding": {"y": {"datum": 1}, "color": {"value": "var(--ink)"}},
    }
    name = {
        "data": {"values": [{}]},
        "mark": {"type": "text", "align": "left", "baseline": "bottom", "dx": 4, "dy": -3, "text": "cuBLAS"},
        "encoding": {"y": {"datum": 1}, "x": {"value": 0}, "color": {"value": "var(--ink)"}},
    }
    spec = {
        "data": {"values": shown},
        "height": 380,
        "layer": [cublas, name, lines, bars, points],
    }
    return chart(
        spec,
        title="Speed relative to cuBLAS, step by step",
        alt="Points for each step and, behind the steps, each peer; upwards the speed over cuBLAS's on a logarithmic "
        "axis, a line for each size. A dashed line marks cuBLAS.",
        note="Dashed: cuBLAS, the faster of its two forms (B as stored, B transposed). Upright bars: 95 % interval. "
        "Peers were timed in rounds of their own with cuBLAS.",
        picked={"gpu": gpu, "view": LADDER, "config": "default"},
        listed="table",
    )


def headlines(sources: SiteSources) -> dict[str, Markup]:
    """Say of each GPU in a sentence how fast its fastest steps are."""
    found = grouped(
        [s for s in sources.results.sections() if LADDER in _views(s) and s.sizes()], lambda section: slug(section.gpu)
    )
    return {gpu: headline([[section] for section in own]) for gpu, own in found.items()}


def machines(sources: SiteSources) -> dict[str, list[str]]:
    """Name, for each GPU, the machine of each ladder, its clocks and days."""
    found = grouped(sources.results.sections(), lambda section: slug(section.gpu))
    return {gpu: [f"{own.title}: {measured_on(own.records)}" for own in sections] for gpu, sections in found.items()}


def _views(section: Section) -> list[str]:
    """Name the views that a section's squares stand in."""
    if section.layout != "nn":
        return [TURNED]
    usual = section.math == "ieee" and section.dtype in ("float32", "float16")
    return [LADDER, section.dtype] if usual else [section.dtype if section.math == "ieee" else section.math]


def _section_rows(sources: SiteSources, section: Section) -> Iterator[Row]:
    sizes, others = section.sizes(), section.other_shapes()
    for step in section.steps:
        for shape in [*sizes, *others]:
            picked = {name: section.pick(step, name, shape) for name in CONFIGURATIONS}
            for record in {record.key: record for record in picked.values() if record}.values():
                if record.verification.passed:
                    own = ",".join(name for name, each in picked.items() if each is record)
                    yield _step_row(sources, section, record, own)
    for name in section.peer_names():
        for shape in section.peer_shapes():
            found = section.peer(shape, name)
            if found and found[1].timing and not is_stage_count(name) and (shape in sizes or shape in others):
                yield _peer_row(section, *found)


def _step_row(sources: SiteSources, section: Section, record: Record, configuration: str) -> Row:
    name = short_name(record.step_name)
    stages = f", {record.stages} stages" if record.stages > 1 else ""
    gain = record.improvement_over_previous_pct
    return {
        **_row(section, record, record.ratio_to_cublas, record.ratio_interval),
        "config": configuration,
        "peer": False,
        "place": record.step,
        "label": f"{record.step} {name}",
        "name": f"step {record.step}, {name}",
        "idea": sources.idea(record.step),
        "speeds": f"{record.gflops / 1e3:.3g} / {_cublas_tflops(record):.3g}",
        "own": record.gflops / 1e3,
        "spread": round(record.timing.spread_pct, 2),
        "gain": None if gain is None else round(gain, 1) + 0.0,  # never −0.0
        "tile": f"{record.variant}, {record.tile}{stages}",
        "again": sources.again(record),
        "address": f"lessons/step{record.step}.html",
        "file": f"source/{record.step_name}.html",
        "line": f"{'x'.join(map(str, shape_of(record)))} {record.dtype}",
    }


def _peer_row(section: Section, record: Record, peer: Peer) -> Row:
    speed = 2 * record.m * record.n * record.k / (peer.timing.median_ms * 1e9)
    return {
        **_row(section, record, record.ratio_of(peer.timing), record.interval_of(peer.timing)),
        "config": ANY,
        "peer": True,
        "place": 0,
        "label": f"{peer.name}, {section.dtype}",
        "name": f"{peer.name}, {section.dtype}",
        "idea": "",
        "speeds": f"{speed:.3g} / {_cublas_tflops(record):.3g}",
        "own": speed,
        "spread": round(peer.timing.spread_pct, 2),
        "gain": None,
        "tile": peer.config,
        "again": record.command,
        "address": "",
        "file": "",
        "line": f"{'x'.join(map(str, shape_of(record)))} {record.dtype} {peer.name}",
    }


def _row(section: Section, record: Record, ratio: float, interval: tuple[float, float]) -> Row:
    shape: Shape = shape_of(record)
    before, after = record.environment.before, record.environment.after
    square = is_size(shape)
    return {
        "gpu": slug(section.gpu),
        "view": ",".join(_views(section)) if square else OTHER_SHAPES,
        "size": str(record.m) if square else ANY,
        "m": record.m,
        "dtype": section.dtype,
        "shape": size_header(shape) if square else f"{'×'.join(map(str, shape))} {section.dtype}",
        "product": record.m * record.n * record.k,
        "ratio": round(ratio, 4),
        "low": round(interval[0], 4),
        "high": round(interval[1], 4),
        "past": interval[0] > 1,
        "cublas": _cublas_tflops(record),
        "clock": f"{before.sm_clock_mhz:.0f}, {after.sm_clock_mhz:.0f}",
        "power": f"{before.power_w:.0f}, {after.power_w:.0f}",
        "day": record.environment.recorded_at[:10],
    }


def _cublas_tflops(record: Record) -> float:
    return 2 * record.m * record.n * record.k / (record.fastest_baseline.median_ms * 1e9)
