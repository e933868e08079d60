"""A pipeline's plan as pictures: which tile each statement works on when, and the same on an axis of time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from tensorir_ladder.reports.web.charts import chart

if TYPE_CHECKING:
    from tensorir_ladder.harness.build import Kernel

SHOWN_TILES = 5  # of a reduction that is long enough to see prologue, body and epilogue
DRAWN_TILES = 8  # on the axis of time
NUMBER_PX = 11  # that a k tile's number takes
# TVM's names of statements, in words.
WORDS = (
    (r"\(prologue\)$", "read the tile's first fragments"),
    (r"\(body\)$", "multiply, reading a step ahead"),
    (r"\(epilogue\)$", "multiply the tile's last step"),
    (r"^arrived$", "wait: the tile has landed"),
    (r"^retire$", "await the multiplication"),
    (r"^A_.*\+B_", "copy A and B"),
    (r"^A_", "copy A"),
    (r"^B_", "copy B"),
    (r"^matmul_update", "multiply"),
)
ORDER = "software_pipeline_order"
STAGE = "software_pipeline_stage"
ASYNC = "software_pipeline_async_stages"


@dataclass(frozen=True)
class PlanStatement:
    """A statement of a pipelined loop: TVM's name, its pipeline stage, its place in the body, and if it is awaited."""

    name: str
    stage: int
    order: int
    asynchronous: bool

    @property
    def words(self) -> str:
        """Say what it does."""
        return next((words for pattern, words in WORDS if re.search(pattern, self.name)), self.name)


@dataclass(frozen=True)
class LoopPlan:
    """A k loop's pipeline with a number of stages: its statements in the loop's order, and all of it as text."""

    stages: int
    statements: tuple[PlanStatement, ...]
    pseudo: str
    explained: str

    @property
    def deepest(self) -> int:
        """The last pipeline stage: how many iterations the last statement runs behind the first."""
        return max((statement.stage for statement in self.statements), default=0)

    @property
    def columns(self) -> int:
        """The time steps of a reduction of ``SHOWN_TILES`` k tiles."""
        return SHOWN_TILES + self.deepest

    def phase(self, column: int) -> str:
        """Name the part of the pipelined code that a time step belongs to."""
        return "prologue" if column < self.deepest else "body" if column < SHOWN_TILES else "epilogue"

    @property
    def phases(self) -> list[tuple[str, int]]:
        """The parts of the code, each with the time steps that it takes."""
        names = [self.phase(column) for column in range(self.columns)]
        return [(name, names.count(name)) for name in dict.fromkeys(names)]

    def tile(self, statement: PlanStatement, column: int) -> int | None:
        """Return which k tile a statement works on in a time step; None where it has nothing to do."""
        tile = column - statement.stage
        return tile if 0 <= tile < SHOWN_TILES else None


def plan_of(kernel: Kernel) -> LoopPlan | None:
    """Read the plan of a kernel's k loop, the outermost with a pipeline; None of a kernel without one."""
    from tensorir_ladder.harness.explain import pipelined_loops
    from tensorir_ladder.schedules.inspection import statements_under
    from tensorir_ladder.schedules.pipeline import explain_pipeline, pseudo_code

    loops, sch = pipelined_loops(kernel), None if kernel.explicit else kernel.schedule
    if not loops or sch is None:
        return None
    noted = sch.get(loops[0]).annotations
    stage, order, asynchronous = ([int(value) for value in noted.get(name, [])] for name in (STAGE, ORDER, ASYNC))
    statements = tuple(
        PlanStatement(own.name, stage[place], order[place], stage[place] in asynchronous)
        for place, own in enumerate(statements_under(sch, loops[0]))
    )
    explained = "\n\n".join(explain_pipeline(sch, loop) for loop in loops)
    return LoopPlan(kernel.case.stages_built, statements, pseudo_code(sch, loops[0]), explained)


@dataclass(frozen=True)
class Bar:
    """Place what happens to a k tile from ``begin`` to ``end``: its load, or its multiplication."""

    what: str
    tile: int
    begin: float
    end: float


def in_turn(load: float, multiply: float, tiles: int = DRAWN_TILES) -> list[Bar]:
    """Lay out k tiles without a pipeline: each is loaded, then multiplied."""
    whole = load + multiply
    return [
        bar
        for tile in range(tiles)
        for bar in (
            Bar("load", tile, tile * whole, tile * whole + load),
            Bar("multiply", tile, tile * whole + load, (tile + 1) * whole),
        )
    ]


def in_a_ring(stages: int, load: float, multiply: float, tiles: int = DRAWN_TILES) -> list[Bar]:
    """Lay out k tiles in a ring: a load begins when its stage is free, a multiplication when its tile is there.

    A tile's stage is free when the tile ``stages`` before it is multiplied. So k tiles follow each other every
    max(multiply, (load + multiply) / stages), once the ring is full.
    """
    loads: list[Bar] = []
    products: list[Bar] = []
    for tile in range(tiles):
        begin = products[tile - stages].end if tile >= stages else 0.0
        loads.append(Bar("load", tile, begin, begin + load))
        ready = max(loads[-1].end, products[-1].end if products else 0.0)
        products.append(Bar("multiply", tile, ready, ready + multiply))
    return [*loads, *products]


def ring_period(stages: int, load: float, multiply: float) -> float:
    """Return the time from one k tile to the next in a full ring."""
    return max(multiply, (load + multiply) / stages) if stages > 1 else load + multiply


def time_chart(
    stages: Sequence[int], chosen: int, load: float, multiply: float, lengths: str, unit: str = "µs"
) -> Markup:
    """Draw k tiles without and with a ring of as many stages as the page's slider says, on one axis of time.

    ``load`` and ``multiply`` are in ``unit``; ``lengths`` says where they come from.
    """
    rows: list[dict[str, Any]] = []
    for count in stages:
        before = [("in turn", bar) for bar in in_turn(load, multiply)]
        with_ring = [
            (f"stage {bar.tile % count}" if bar.what == "load" else "multiply", bar)
            for bar in in_a_ring(count, load, multiply)
        ]
        rows += [{"stages": str(count), "row": row, **_drawn(bar)} for row, bar in (*before, *with_ring)]
    names = ["in turn", "multiply", *(f"stage {n}" for n in range(max(stages)))]
    room = NUMBER_PX * DRAWN_TILES * (load + multiply)  # where a bar is long enough for its number
    spec = {
        "data": {"values": rows},
        "height": 26 * len(names),
        "encoding": {
            "y": {
                "field": "row",
                "type": "nominal",
                "sort": None,
                "scale": {"domain": names},
                "title": None,
                "axis": {"grid": False},
            },
            "x": {
                "field": "begin",
                "type": "quantitative",
                "title": f"time, {unit}",
                "scale": {"domain": [0, DRAWN_TILES * (load + multiply)], "nice": False},
            },
            "x2": {"field": "end"},
        },
        "layer": [
            {
                "mark": {"type": "bar", "height": 18, "stroke": "var(--paper)", "strokeWidth": 1},
                "encoding": {
                    "color": {
                        "field": "what",
                        "type": "nominal",
                        "title": None,
                        "scale": {
                            "domain": ["load", "multiply"],
                            "range": ["var(--series-1)", "var(--series-2)"],
                        },
                    },
                    "tooltip": [
                        {"field": "what", "title": "what"},
                        {"field": "tile", "title": "k tile"},
                        {"field": "begin", "title": f"from, {unit}", "format": ".3~f"},
                        {"field": "end", "title": f"to, {unit}", "format": ".3~f"},
                    ],
                },
            },
            {
                "transform": [{"calculate": "(datum.begin + datum.end) / 2", "as": "middle"}],
                "mark": {"type": "text", "fontSize": 11, "color": "var(--paper)", "fontWeight": "bold"},
                "encoding": {
                    "x": {"field": "middle", "type": "quantitative"},
                    "x2": None,
                    "text": {"field": "tile", "type": "nominal"},
                    "opacity": {
                        "condition": {"test": f"(datum.end - datum.begin) * width > {room}", "value": 1},
                        "value": 0,
                    },
                },
            },
        ],
    }
    ends = {count: in_a_ring(count, load, multiply)[-1].end for count in stages}
    alt = f"{DRAWN_TILES} k tiles on an axis of time. In turn they take {DRAWN_TILES * (load + multiply):.3g} {unit}; "
    alt += ", ".join(f"with {count} stages {end:.3g}" for count, end in ends.items()) + f" {unit}."
    return chart(
        spec,
        title="Without a pipeline (top row), and with a ring of stages",
        alt=alt,
        note=f"Numbers: k tiles. Drawn from the plan, not measured; {lengths}. A stage's row shows its loads.",
        columns={"row": "row", "what": "what", "tile": "k tile", "begin": f"from, {unit}", "end": f"to, {unit}"},
        picked={"stages": str(chosen)},
    )


def _drawn(bar: Bar) -> Mapping[str, Any]:
    return {"what": bar.what, "tile": bar.tile, "begin": round(bar.begin, 4), "end": round(bar.end, 4)}
