"""Charts: a Vega-Lite specification becomes an element with a title, a text for who cannot see it, and its table.

The script in static/site.js draws what is in view, in the page's colours, and again when these change.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tensorir_ladder.reports.web.page import environment

ANY = "all"  # a choice that leaves nothing out
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def chart(
    spec: Mapping[str, Any],
    *,
    title: str,
    alt: str,
    note: str = "",
    columns: Mapping[str, str] | None = None,
    picked: Mapping[str, str] | None = None,
    listed: bool = True,
) -> Markup:
    """Make the element of a chart whose data are in ``spec["data"]["values"]``.

    ``alt`` says what the chart shows to who cannot see it; ``note`` stands below it. ``columns`` maps fields of the
    data to the headings of the table behind the chart (all fields by default). ``picked`` maps names of the page's
    choices ("gpu") to their values at first; each is a field of the data too: only rows that have the chosen value are
    drawn and listed, all of them where it is "all". Without ``listed`` there is no table behind it.
    """
    made, picked = copy.deepcopy(dict(spec)), dict(picked or {})
    rows: Sequence[Mapping[str, Any]] = made["data"]["values"]
    made.setdefault("width", "container")
    made["params"] = [*made.get("params", []), *({"name": name, "value": value} for name, value in picked.items())]
    own = [{"filter": f"{name} === '{ANY}' || toString(datum.{name}) === {name}"} for name in picked]
    made["transform"] = [*own, *made.get("transform", [])]
    text = json.dumps(made, sort_keys=True)
    return Markup(
        environment()
        .get_template("chart.html.j2")
        .render(
            identity=f"chart-{hashlib.sha256((title + text).encode()).hexdigest()[:10]}",
            spec=made,
            title=title,
            alt=alt,
            note=note,
            columns=columns or {name: name for name in (rows[0] if rows else {})},
            rows=[({name: row[name] for name in picked}, row) for row in rows if listed],
        )
    )
