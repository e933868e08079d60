"""A measured timeline as a picture that zooms, and as a Chrome trace for Perfetto."""

from __future__ import annotations

import gzip
import json
from typing import Any

from markupsafe import Markup

from tensorir_ladder.harness.records import Timeline
from tensorir_ladder.reports.timelines import (
    BOX,
    EMPTY_WAIT,
    EPILOGUE,
    FULL_WAIT,
    Lives,
    Span,
    loads,
    multiplications,
    spans,
    waiting_roles,
)
from tensorir_ladder.reports.web.charts import chart
from tensorir_ladder.reports.web.page import File

COLOURS = {
    "load, until seen": "var(--series-1)",
    "wgmma": "var(--series-2)",
    "wait for a full stage": "var(--series-5)",
    "wait for an empty stage": "var(--series-4)",
    "epilogue": "var(--series-3)",
    "a box stored": "var(--series-6)",
}
AT_FIRST_US = 12.0  # what is shown before anybody zooms


def bars(timeline: Timeline) -> list[tuple[str, str, Span]]:
    """Return what a timeline says as (row, kind, span): loads by stage, then what each role does and waits for."""
    found = [(f"stage {span.number % timeline.stages}", "load, until seen", span) for span in loads(timeline)]
    for role in waiting_roles(timeline):
        cores = f"{role}, cores" if multiplications(timeline, role) else role
        found += [(cores, "wgmma", span) for span in multiplications(timeline, role)]
        for kind, events in (
            ("epilogue", EPILOGUE),
            ("a box stored", BOX),
            ("wait for a full stage", FULL_WAIT),
            ("wait for an empty stage", EMPTY_WAIT),
        ):
            found += [(f"{role}, threads", kind, span) for span in spans(timeline, role, events)]
    return found


def rows_of(timeline: Timeline) -> list[str]:
    """List the rows of a timeline's picture, from the top."""
    own = [row for row, _, _ in bars(timeline)]
    stages = [f"stage {number}" for number in range(timeline.stages)]
    return [*stages, *dict.fromkeys(row for row in own if row not in stages)]


def chrome_trace(timeline: Timeline) -> str:
    """Write a timeline in Chrome's trace format, which Perfetto opens: a thread per row, complete events in µs."""
    names = rows_of(timeline)
    case = f"step {timeline.step} {timeline.variant}, {timeline.stages} stages, block {timeline.block}"
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{timeline.environment.gpu}: {case}"}},
        *(
            {"ph": "M", "pid": 1, "tid": place, "name": "thread_name", "args": {"name": name}}
            for place, name in enumerate(names)
        ),
        *(
            {"ph": "M", "pid": 1, "tid": place, "name": "thread_sort_index", "args": {"sort_index": place}}
            for place in range(len(names))
        ),
    ]
    for row, kind, span in bars(timeline):
        when = {"ts": round(span.begin / 1e3, 3), "dur": round((span.end - span.begin) / 1e3, 3)}
        events.append({"ph": "X", "pid": 1, "tid": names.index(row), "name": kind, **when, "args": {"k": span.number}})
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":"))


def trace_file(timeline: Timeline) -> File:
    """Make the file that a lesson offers for Perfetto, which opens it packed."""
    name = f"step{timeline.step}-{timeline.variant}-{timeline.stages}stages.json.gz"
    return File(f"lessons/traces/{name}", gzip.compress(chrome_trace(timeline).encode(), mtime=0))


def lives_chart(group: Lives, chosen: int) -> Markup:
    """Draw one block's life for the stage count of the page's choice; its window of time is moved by the page."""
    order = list(dict.fromkeys(row for timeline in group.timelines for row in rows_of(timeline)))
    stages = [row for row in order if row.startswith("stage ")]
    order = [*(row for row in order if row not in stages), *sorted(stages)]
    kinds = list(COLOURS)
    # Numbers for rows and kinds, which the chart looks up: there are thousands of bars.
    rows = [
        {
            "life": str(timeline.stages),
            "r": order.index(row),
            "c": kinds.index(kind),
            "k": span.number,
            "a": round(span.begin / 1e3, 3),
            "b": round(span.end / 1e3, 3),
        }
        for timeline in group.timelines
        for row, kind, span in bars(timeline)
    ]
    longest = max(timeline.duration_ns for timeline in group.timelines) / 1e3
    spec = {
        "data": {"values": rows},
        "height": 24 * len(order),
        "params": [{"name": "begin", "value": 0}, {"name": "end", "value": AT_FIRST_US}],
        "transform": [
            {"filter": "datum.b >= begin && datum.a <= end"},
            {"calculate": f"{json.dumps(order)}[datum.r]", "as": "row"},
            {"calculate": f"{json.dumps(kinds)}[datum.c]", "as": "kind"},
        ],
        "encoding": {
            "y": {
                "field": "row",
                "type": "nominal",
                "sort": None,
                "scale": {"domain": order},
                "title": None,
                "axis": {"grid": False},
            },
            "x": {
                "field": "a",
                "type": "quantitative",
                "title": "µs since the block began",
                "scale": {"domainMin": {"expr": "begin"}, "domainMax": {"expr": "end"}, "nice": False, "zero": False},
            },
            "x2": {"field": "b"},
        },
        "mark": {"type": "bar", "height": 17, "clip": True, "stroke": "var(--paper)", "strokeWidth": 0.5},
    }
    spec["encoding"] |= {
        "color": {
            "field": "kind",
            "type": "nominal",
            "title": None,
            "scale": {"domain": kinds, "range": list(COLOURS.values())},
            "legend": None,  # the lesson has one in words, which a phone can break
        },
        "tooltip": [
            {"field": "kind", "title": "what"},
            {"field": "k", "title": "number"},
            {"field": "a", "title": "from, µs"},
            {"field": "b", "title": "to, µs"},
        ],
    }
    alt = f"{group.title}: rows for each role and for the stages of the ring, bars from begin to end. "
    alt += "; ".join(f"{t.stages} stages: the block takes {t.duration_ns / 1e3:.1f} µs" for t in group.timelines)
    return chart(
        spec,
        title=f"One block's life, measured: {group.title}",
        alt=f"{alt}.",
        note=f"Of several launches the one with the median duration; the longest shown takes {longest:.1f} µs. A load "
        "lasts until a warpgroup sees its bytes; a wgmma from when its operands are there and the one before is done.",
        picked={"life": str(chosen)},
        listed="lives-summed",  # thousands of bars; the trace has them all
    )
