"""Charts: a Vega-Lite specification becomes an element with a title, a text for who cannot see it, and its table.

The script in static/site.js draws what is in view, in the page's colours, and again when these change; it makes the
table, too, from the same data.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tensorir_ladder.reports.web.page import environment

HARMLESS = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})  # of a script element
ANY = "all"  # a choice that leaves nothing out
# A tooltip's text of an interval, which the browser writes: a row has its ends.
INTERVAL = {
    "calculate": "isValid(datum.low) ? format(datum.low, '.3f') + ' to ' + format(datum.high, '.3f') : ''",
    "as": "interval",
}
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def chart(
    spec: Mapping[str, Any],
    *,
    title: str,
    alt: str,
    note: str = "",
    columns: Mapping[str, str] | None = None,
    picked: Mapping[str, str] | None = None,
    listed: str = "",
) -> Markup:
    """Make the element of a chart whose data are in ``spec["data"]["values"]``.

    ``alt`` says what the chart shows to who cannot see it; ``note`` stands below it. ``columns`` maps fields of the
    data to the headings of the table behind the chart (all fields by default). ``picked`` maps names of the page's
    choices ("gpu") to their values at first; each is a field of the data too: only rows that have the chosen value, or
    a list with it ("4096,8192"), are drawn and listed; all of them where "all" is chosen, and always those that say
    "all" themselves. ``listed`` is the id of a table on the page that has the figures already, in place of one behind.
    """
    made, picked = copy.deepcopy(dict(spec)), dict(picked or {})
    rows: Sequence[Mapping[str, Any]] = made["data"]["values"]
    made.setdefault("width", "container")
    made["params"] = [*made.get("params", []), *({"name": name, "value": value} for name, value in picked.items())]
    own = [{"filter": _picks(name)} for name in picked]
    made["transform"] = [*own, *made.get("transform", [])]
    made["data"] = {"packed": packed(rows)}
    text = json.dumps(made, sort_keys=True)
    return Markup(
        environment()
        .get_template("chart.html.j2")
        .render(
            identity=f"chart-{hashlib.sha256((title + text).encode()).hexdigest()[:10]}",
            spec=Markup(json.dumps(made, separators=(",", ":"), ensure_ascii=False)).translate(HARMLESS),
            title=title,
            alt=alt,
            note=note,
            listed=listed,
            columns=columns or {name: name for name in (rows[0] if rows else {})},
            picked=list(picked),
        )
    )


def packed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write rows column by column, as static/site.js reads them: fields' names once, and numbers to 6 digits.

    A column is written as its different values (``of``) and a place among them for each row (``at``) where that is
    shorter.
    """
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [_short(row.get(name)) for row in rows]
        known = list(dict.fromkeys(json.dumps(value) for value in values))
        places = {text: place for place, text in enumerate(known)}
        at = [places[json.dumps(value)] for value in values]
        by_place = {"of": [json.loads(text) for text in known], "at": at}
        columns[name] = min(values, by_place, key=lambda written: len(json.dumps(written)))
    return {"rows": len(rows), "columns": columns}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _picks(name: str) -> str:
    """Write when a row is shown, as static/site.js decides it of elements."""
    values = f"split(toString(datum.{name}), ',')"
    return f"{name} === '{ANY}' || indexof({values}, {name}) >= 0 || indexof({values}, '{ANY}') >= 0"
