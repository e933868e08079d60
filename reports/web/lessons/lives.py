"""A measured timeline as a picture that zooms, and as a Chrome trace for Perfetto."""

from __future__ import annotations

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
        cores = f"{role}: tensor cores" if multiplications(timeline, role) else role
        found += [(cores, "wgmma", span) for span in multiplications(timeline, role)]
        for kind, events in (
            ("epilogue", EPILOGUE),
            ("a box stored", BOX),
            ("wait for a full stage", FULL_WAIT),
            ("wait for an empty stage", EMPTY_WAIT),
        ):
            found += [(f"{role}: threads", kind, span) for span in spans(timeline, role, events)]
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
        event = {"ph": "X", "pid": 1, "tid": names.index(row), "cat": kind, "name": f"{kind} {span.number}"}
        events.append({**event, "ts": round(span.begin / 1e3, 4), "dur": round((span.end - span.begin) / 1e3, 4)})
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":"))


def trace_file(timeline: Timeline) -> File:
    """Make the file that a lesson offers for Perfetto."""
    name = f"step{timeline.step}-{timeline.variant}-{timeline.stages}stages.json"
    return File(f"lessons/traces/{name}", chrome_trace(timeline) + "\n")


def lives_chart(group: Lives, chosen: int) -> Markup:
    """Draw one block's life for the stage count of the page's slider; its window of time is moved by the page."""
    rows = [
        {
            "life": str(timeline.stages),
            "row": row,
            "kind": kind,
            "k": span.number,
            "from": round(span.begin / 1e3, 3),
            "to": round(span.end / 1e3, 3),
        }
        for timeline in group.timelines
        for row, kind, span in bars(timeline)
    ]
    order = list(dict.fromkeys(row for timeline in reversed(group.timelines) for row in rows_of(timeline)))
    longest = max(timeline.duration_ns for timeline in group.timelines) / 1e3
    stages = [row for row in order if row.startswith("stage ")]
    order = [*sorted(stages), *(row for row in order if row not in stages)]
    spec = lives_spec(rows, order)
    alt = f"{group.title}: rows for the stages of the ring and for each role, bars from begin to end. "
    alt += "; ".join(f"{t.stages} stages: the block takes {t.duration_ns / 1e3:.1f} µs" for t in group.timelines)
    return chart(
        spec,
        title=f"One block's life, measured: {group.title}",
        alt=f"{alt}.",
        note=f"Of several launches the one with the median duration; the longest shown takes {longest:.1f} µs. A load "
        "lasts until a warpgroup sees its bytes; a wgmma from when its operands are there and the one before is done.",
        picked={"life": str(chosen)},
        listed=False,  # thousands of rows: the lesson's own table sums them up, and the trace has them all
    )


def lives_spec(rows: list[dict[str, Any]], order: list[str] | None) -> dict[str, Any]:
    """Specify a picture of bars, by "row", "kind", "k", "from" and "to" in µs; its window is from "begin" to "end".

    ``order`` is that of the rows from the top, that of their first bars where it is None.
    """
    return {
        "data": {"values": rows},
        "height": {"step": 24},
        "autosize": {"type": "fit-x", "contains": "padding"},
        "params": [{"name": "begin", "value": 0}, {"name": "end", "value": AT_FIRST_US}],
        "transform": [{"filter": "datum.to >= toNumber(begin) && datum.from <= toNumber(end)"}],
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": order, "title": None, "axis": {"grid": False}},
            "x": {
                "field": "from",
                "type": "quantitative",
                "title": "µs since the block began",
                "scale": {
                    "domainMin": {"expr": "toNumber(begin)"},
                    "domainMax": {"expr": "toNumber(end)"},
                    "nice": False,
                    "zero": False,
                },
            },
            "x2": {"field": "to"},
        },
        "layer": [
            {
                "mark": {"type": "bar", "height": 17, "clip": True, "stroke": "var(--paper)", "strokeWidth": 0.5},
                "encoding": {
                    "color": {
                        "field": "kind",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": list(COLOURS), "range": list(COLOURS.values())},
                        "legend": {"columns": 2},
                    },
                    "tooltip": [
                        {"field": "kind", "title": "what"},
                        {"field": "k", "title": "number"},
                        {"field": "from", "title": "from, µs"},
                        {"field": "to", "title": "to, µs"},
                    ],
                },
            }
        ],
    }
