"""The page on shapes: the ratio to cuBLAS over arithmetic intensity, squares and all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from tensorir_ladder.harness.records import Record, ShapeRecord, Timing
from tensorir_ladder.reports.cases import grouped, is_size, slug
from tensorir_ladder.reports.figures import intensity
from tensorir_ladder.reports.plot import peaks
from tensorir_ladder.reports.readme_tables import size_header
from tensorir_ladder.reports.shapes import latest, shapes_table
from tensorir_ladder.reports.table import short_name
from tensorir_ladder.reports.web.charts import ANY, INTERVAL, chart
from tensorir_ladder.reports.web.page import Page
from tensorir_ladder.reports.web.sources import SiteSources

CALL = "kernels.matmul"  # the peer that is our own call: it chooses step and tile by itself
Row = dict[str, Any]


def pages(sources: SiteSources) -> Iterator[Page]:
    """Yield the page."""
    found, drawn = rows(sources), drawn_rows(sources)
    everything = sorted([*found, *drawn], key=lambda row: row["intensity"])
    by_gpu = grouped(latest(sources.results.shapes), lambda group: slug(group.summary["gpu"]))
    values = {
        "rows": found,
        "chart": shapes_chart(everything, next(iter(sources.gpus), "")) if everything else "",
        "dtypes": {ANY: "all", **{row["dtype"]: row["dtype"] for row in everything}},
        "kinds": {ANY: "all", **{row["kind"]: row["kind"].replace("-", " ") for row in everything}},
        "drawn": {gpu: shapes_table(own) for gpu, own in by_gpu.items()},
        "unmeasured": {gpu: name for gpu, name in sources.gpus.items() if gpu not in {r["gpu"] for r in everything}},
    }
    about = "The ratio to cuBLAS over arithmetic intensity, for squares and for all other shapes"
    yield Page("shapes.html", "Shapes", "shapes.html.j2", values, "Shapes", description=about)


def rows(sources: SiteSources) -> list[Row]:
    """Make a row per shape and contender: the fastest step there, and our own call where it was timed."""
    found = []
    for section in sources.results.sections():
        for shape in dict.fromkeys([*section.sizes(), *section.other_shapes(), *section.peer_shapes()]):
            leader = section.leader(shape)
            if leader and leader.verification.passed:
                what = (
                    "the fastest step",
                    f"step {leader.step}, {short_name(leader.step_name)}",
                    sources.again(leader),
                )
                found.append(_row(leader, leader.timing, intensity(leader), *what))
            for name in (name for name in section.peer_names() if name.startswith(CALL)):
                record, peer = section.peer(shape, name) or (None, None)
                if record and peer.timing:
                    what = ("our call", peer.config, record.command)
                    found.append(_row(record, peer.timing, intensity(record), *what))
    return sorted(found, key=lambda row: row["intensity"])


def drawn_rows(sources: SiteSources) -> list[Row]:
    """Make a row per shape that a seed drew, of each GPU, operands and group what was drawn last."""
    records = [record for group in latest(sources.results.shapes) for record in group.records]
    return [
        _row(r, r.timing, r.intensity, "drawn by a seed", _what(r), r.command) | {"kind": r.group}
        for r in records
        if r.verification.passed
    ]


def shapes_chart(found: Sequence[Row], gpu: str) -> Markup:
    """Draw ratios over arithmetic intensity; a line upright where the GPU's memory and arithmetic balance."""
    x = {
        "field": "intensity",
        "type": "quantitative",
        "title": "operations a byte (logarithmic)",
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 20},
        "axis": {"values": [2**power for power in range(15)], "format": "~g"},
    }
    y = {
        "field": "ratio",
        "type": "quantitative",
        "title": "speed ÷ cuBLAS's (logarithmic)",
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 20},
        "axis": {"values": [0.125, 0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8], "format": "~g"},
    }
    colour = {"field": "dtype", "type": "nominal", "title": "operands"}
    tooltip = [
        {"field": "shape", "title": "m×n×k"},
        {"field": "dtype", "title": "operands"},
        {"field": "who", "title": "whose"},
        {"field": "name", "title": "what"},
        {"field": "ratio", "title": "of cuBLAS", "format": ".3f"},
        {"field": "interval", "title": "95 % interval"},
        {"field": "intensity", "title": "operations a byte", "format": ".0f"},
        {"field": "again", "title": "measure again"},
    ]
    spec = {
        "data": {"values": [{name: value for name, value in row.items() if name != "product"} for row in found]},
        "height": 380,
        "layer": [
            {
                "mark": {"type": "rule", "strokeDash": [5, 4]},
                "encoding": {"y": {"datum": 1}, "color": {"value": "var(--ink)"}},
            },
            {
                "transform": [{"filter": "datum.balance > 0"}, {"aggregate": [], "groupby": ["balance", "dtype"]}],
                "mark": {"type": "rule", "strokeDash": [1, 3], "strokeWidth": 1.5},
                "encoding": {"x": {**x, "field": "balance"}, "color": colour},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
            },
            {
                "transform": [INTERVAL],
                "mark": {"type": "point", "size": 75, "filled": False, "strokeWidth": 1.8},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": colour,
                    "shape": {"field": "who", "type": "nominal", "title": "whose"},
                    "tooltip": tooltip,
                },
            },
        ],
    }
    return chart(
        spec,
        title="Ratio to cuBLAS over arithmetic intensity",
        alt="A point for each shape: to the right its operations per byte, logarithmic, upwards the speed over "
        "cuBLAS's; a dashed line across marks cuBLAS.",
        note="Operations over the bytes that must move at least: A and B read once, C written once. Dotted: where "
        "the GPU's peak arithmetic and its memory's bandwidth balance, for each kind of operands; left of it, memory "
        "bounds a product. A batch is one point, its number of products in front, compared with torch.bmm.",
        picked={"gpu": gpu, "dtype": ANY, "kind": ANY},
        columns={
            "shape": "m × n × k",
            "dtype": "operands",
            "who": "whose",
            "name": "what",
            "intensity": "operations a byte",
            "ratio": "of cuBLAS",
            "low": "interval from",
            "high": "to",
        },
    )


def _row(record: Record | ShapeRecord, timing: Timing, per_byte: float, who: str, name: str, again: str) -> Row:
    """Describe a contender's time beside the cuBLAS of a record's rounds."""
    gpu, shape = record.environment.gpu, record.shape
    math = record.math if isinstance(record, Record) else "ieee"
    peak = peaks().get(gpu)
    most = peak["peak_gflops"].get(f"{record.dtype} {math}") if peak else None
    ratio, (low, high) = record.ratio_of(timing), record.interval_of(timing)
    turned = "" if record.layout == "nn" else ", B transposed"
    return {
        "gpu": slug(gpu),
        "dtype": record.dtype,
        "kind": _kind(shape),
        "shape": (size_header(shape) if len(set(shape)) == 1 else "×".join(map(str, shape))) + turned,
        "product": record.m * record.n * record.k,
        "intensity": round(per_byte, 1),
        "balance": round(most / peak["bandwidth_gb_s"], 1) if peak and most else 0,
        "who": who,
        "name": name,
        "ratio": round(ratio, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "again": again,
    }


def _what(record: ShapeRecord) -> str:
    """Name what was timed: of our call what it chose, which begins with the step."""
    return record.config if record.contender == CALL else f"{record.contender}, {record.config}"


def _kind(shape: tuple[int, ...]) -> str:
    if is_size(shape):
        return "squares"
    if any(extent % 8 for extent in shape):
        return "any-size"
    return "skinny-or-deep" if max(shape) >= 4 * min(shape) else "near-squares"
