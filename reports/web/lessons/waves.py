"""How persistent blocks share out tiles, drawn from the plan: which block multiplies which k tiles, wave by wave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from markupsafe import Markup

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.machines import DEFAULT_ARCH, machine_for
from tensorir_ladder.kernels.stream_k import StreamKPlan, plan_for
from tensorir_ladder.reports.web.charts import chart
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Step

WHOLE, OWNED, HELPED = "a whole tile", "the rest of a tile that others began", "the first k tiles of another's tile"
COLOURS = {WHOLE: "var(--series-1)", OWNED: "var(--series-3)", HELPED: "var(--series-2)"}
SHAPES = ((2560, 2560, 4096), (1024, 1024, 14336), (4096, 4096, 4096))  # cut; no whole wave; left as it is


def pieces_of(plan: StreamKPlan, worker: int) -> Iterator[tuple[str, int, int]]:
    """Yield what a worker does, in its order: kind, tile and k tiles."""
    if worker < plan.helpers:
        begin, end = int(plan.begin(worker)), int(plan.begin(worker + 1))
        while end > begin:
            tile = (end - 1) // plan.cut
            count = end - max(begin, tile * plan.cut)
            yield HELPED, plan.first_owned + tile, count
            end -= count
    last = plan.first_owned if plan.helpers else plan.tiles
    for tile in range(worker, last, plan.workers):
        yield WHOLE, tile, plan.k_tiles
    if plan.helpers and 0 <= worker - plan.helpers < plan.owned:
        yield OWNED, plan.first_owned + worker - plan.helpers, plan.k_tiles - plan.cut


def waves_of(step: Step) -> Mapping[str, tuple[StreamKPlan, StreamKPlan]]:
    """Plan some shapes with the step's own tiles, without a cut and as it is; by the shape in words."""
    found = {}
    for shape in SHAPES:
        problem = Matmul(*shape, dtype="float16")
        case = Case.default(step, problem, machine_for(DEFAULT_ARCH))
        plans = [plan_for(problem, case.tile, case.config.machine, cuts=cuts) for cuts in (False, True)]
        found["x".join(map(str, shape))] = (plans[0], plans[1])
    return found


def waves_chart(step: Step) -> Markup:
    """Draw all workers' pieces along k tiles, without and with the cut, for the shape that the page chooses."""
    rows: list[dict[str, Any]] = []
    said = []
    for shape, plans in waves_of(step).items():
        for way, plan in zip(("not cut", "cut"), plans):
            rows += [{"shape": shape, "way": way, **row} for row in _rectangles(plan)]
            said.append(f"{shape}, {way}: {plan.workers} blocks, the last ends after {fewest_k_tiles(plan)} k tiles")
    spec = {
        "data": {"values": rows},
        "height": 330,
        "encoding": {
            "x": {"field": "from", "type": "quantitative", "title": "k tiles multiplied one after the other"},
            "x2": {"field": "to"},
            "y": {
                "field": "block",
                "type": "quantitative",
                "title": "block",
                "scale": {"reverse": True, "nice": False},
                "axis": {"grid": False},
            },
            "y2": {"field": "next"},
        },
        "mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 0.5},
    }
    colour = {
        "field": "kind",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(COLOURS), "range": list(COLOURS.values())},
        "legend": None,  # the lesson has one in words, which a phone can break
    }
    tooltip = [
        {"field": "kind", "title": "what"},
        {"field": "tiles", "title": "output tiles"},
        {"field": "blocks", "title": "blocks"},
        {"field": "from", "title": "from"},
        {"field": "to", "title": "to"},
    ]
    spec["encoding"] |= {"color": colour, "tooltip": tooltip}
    return chart(
        spec,
        title="Which block multiplies what: the plan of step 13, blocks from top to bottom",
        alt="; ".join(said) + ".",
        note="Drawn from the plan (kernels/stream_k.py) for 132 multiprocessors, not measured. White: nothing to do.",
        picked={"shape": "x".join(map(str, SHAPES[0])), "way": "cut"},
        listed="waves-summed",
    )


def fewest_k_tiles(plan: StreamKPlan) -> int:
    """Return the k tiles of the busiest worker."""
    return max(sum(count for _, _, count in pieces_of(plan, worker)) for worker in range(plan.workers))


def _rectangles(plan: StreamKPlan) -> list[dict[str, Any]]:
    """Draw what workers do; neighbours that do the same from the same k tile to the same are one rectangle."""
    alike: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for worker in range(plan.workers):
        at = 0
        for kind, tile, count in pieces_of(plan, worker):
            alike.setdefault((kind, at, at + count), []).append((worker, tile))
            at += count
    rows = []
    for (kind, begin, end), found in alike.items():
        for _, group in groupby(enumerate(found), key=lambda pair: pair[1][0] - pair[0]):
            run = [pair for _, pair in group]
            (block, tile), (last, last_tile) = run[0], run[-1]
            place = {"kind": kind, "block": block, "next": last + 1, "from": begin, "to": end}
            rows.append({**place, "tiles": _span(tile, last_tile), "blocks": _span(block, last)})
    return rows


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{min(first, last)}–{max(first, last)}"
