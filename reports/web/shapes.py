"""The page on shapes: the ratio to cuBLAS over arithmetic intensity, squares and all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from tensorir_ladder.harness.records import Record
from tensorir_ladder.reports.cases import is_size, shape_of, slug
from tensorir_ladder.reports.figures import intensity
from tensorir_ladder.reports.plot import peaks
from tensorir_ladder.reports.readme_tables import size_header
from tensorir_ladder.reports.selection import Section
from tensorir_ladder.reports.table import short_name
from tensorir_ladder.reports.web.charts import ANY, chart
from tensorir_ladder.reports.web.page import Page
from tensorir_ladder.reports.web.sources import Sources

CALL = "kernels.matmul"  # the peer that is our own call: it chooses step and tile by itself
Row = dict[str, Any]


def pages(sources: Sources) -> Iterator[Page]:
    """Yield the page."""
    found = rows(sources)
    values = {
        "rows": found,
        "chart": shapes_chart(found, next(iter(sources.gpus), "")) if found else "",
        "dtypes": {ANY: "all", **{row["dtype"]: row["dtype"] for row in found}},
        "kinds": {ANY: "all", **{row["kind"]: row["kind"].replace("-", " ") for row in found}},
        "unmeasured": {gpu: name for gpu, name in sources.gpus.items() if gpu not in {row["gpu"] for row in found}},
    }
    about = "The ratio to cuBLAS over arithmetic intensity, for squares and for all other shapes"
    yield Page("shapes.html", "Shapes", "shapes.html.j2", values, "Shapes", description=about)


def rows(sources: Sources) -> list[Row]:
    """Make a row per shape and contender: the fastest step there, and our own call where it was timed."""
    found = []
    for section in sources.results.sections():
        for shape in dict.fromkeys([*section.sizes(), *section.other_shapes(), *section.peer_shapes()]):
            leader = section.leader(shape)
            if leader and leader.verification.passed:
                name = f"step {leader.step}, {short_name(leader.step_name)}"
                again = sources.again(leader)
                timed = leader.ratio_to_cublas, leader.ratio_interval
                found.append(_row(section, leader, "the fastest step", name, *timed, again))
            for peer_name in (name for name in section.peer_names() if name.startswith(CALL)):
                record, peer = section.peer(shape, peer_name) or (None, None)
                if record and peer.timing:
                    timed = record.ratio_of(peer.timing), record.interval_of(peer.timing)
                    found.append(_row(section, record, "our call", peer.config, *timed, record.command))
    return sorted(found, key=lambda row: row["intensity"])


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
        "data": {"values": found},
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
        "bounds a product.",
        picked={"gpu": gpu, "dtype": ANY, "kind": ANY},
        listed="shapes",
    )


def _row(
    section: Section, record: Record, who: str, name: str, ratio: float, interval: tuple[float, float], again: str
) -> Row:
    shape = shape_of(record)
    peak = peaks().get(section.gpu)
    most = peak["peak_gflops"].get(section.arithmetic) if peak else None
    turned = "" if section.layout == "nn" else ", B transposed"
    return {
        "gpu": slug(section.gpu),
        "dtype": section.dtype,
        "kind": _kind(shape),
        "shape": (size_header(shape) if len(set(shape)) == 1 else "×".join(map(str, shape))) + turned,
        "product": record.m * record.n * record.k,
        "intensity": round(intensity(record), 1),
        "balance": round(most / peak["bandwidth_gb_s"], 1) if peak and most else 0,
        "who": who,
        "name": name,
        "ratio": round(ratio, 4),
        "low": round(interval[0], 4),
        "high": round(interval[1], 4),
        "interval": f"{interval[0]:.3f} to {interval[1]:.3f}",
        "past": interval[0] > 1,
        "again": again,
    }


def _kind(shape: tuple[int, int, int]) -> str:
    if is_size(shape):
        return "squares"
    if any(extent % 8 for extent in shape):
        return "any-size"
    return "skinny-or-deep" if max(shape) >= 4 * min(shape) else "near-squares"
