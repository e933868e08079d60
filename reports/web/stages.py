"""The page on pipeline depth: curve and model, what each stage costs, advice by workload; filters instead of length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from tensorir_ladder.reports.advice import Sweep, advice_table, fastest_products, size_class
from tensorir_ladder.reports.cases import grouped, slug
from tensorir_ladder.reports.cells import Table, percent
from tensorir_ladder.reports.judgement import is_held_out, judgement_tables, summary
from tensorir_ladder.reports.readme_tables import size_header
from tensorir_ladder.reports.sweep_tables import rows, streams_table
from tensorir_ladder.reports.sweeps import (
    TIE_PCT,
    StageSweep,
    StreamSweep,
    product_sweeps,
    speed_lost_pct,
    stream_sweeps,
)
from tensorir_ladder.reports.web.charts import ANY, INTERVAL, chart
from tensorir_ladder.reports.web.page import Page
from tensorir_ladder.reports.web.sources import SiteSources

USUAL_SIZE = "1024³"
NONE = 0  # the depth of what stages nothing
# What is commonly taught of depth: which sweeps it is about, and from how many stages to how many.
ELEMENTWISE, REDUCTIONS = ("gelu", "scale_shift"), ("row_sum", "softmax")
Row = dict[str, Any]


def pages(sources: SiteSources) -> Iterator[Page]:
    """Yield the page, where any stage count was swept."""
    products, streams = product_sweeps(sources.results), stream_sweeps(sources.results)
    if not products and not streams:
        return
    swept = {slug(sweep.section.gpu) for sweep in (*products, *streams)}
    first = next((gpu for gpu in sources.gpus if gpu in swept), "")
    found = [row for sweep in products for row in _product_rows(sweep)]
    kernels = {row["kernel"]: row["kernel_text"] for row in found}
    kernel = next(iter(kernels), ANY)
    advice = _by_gpu(advice_table, [*products, *streams])
    values = {
        "unswept": {gpu: name for gpu, name in sources.gpus.items() if gpu not in swept},
        "swept": ",".join(swept),
        "summary": summary(products),
        "kernels": kernels,
        "kernel": kernel,
        "variants": {ANY: "all", **{row["variant"]: row["variant"] for row in found}},
        "variant": next((row["variant"] for row in found if row["kernel"] == kernel), ANY),
        "sizes": _sizes(products),
        "usual_size": USUAL_SIZE if USUAL_SIZE in _sizes(products) else ANY,
        "curve": curve_chart(found, first, kernel) if found else "",
        "rows": found,
        "predicted": predicted_chart(found, first, kernel) if any(row["model_us"] for row in found) else "",
        "judged": judgement_tables(products),
        "advice": advice,
        "asked": {gpu: {ANY: "all", **{_word(row[0]): row[0] for row in table.rows}} for gpu, table in advice.items()},
        "usual": _by_gpu(usual_advice_table, [*products, *streams]),
        "workloads": {sweep.workload: sweep.workload.replace("_", " ") for sweep in streams},
        "streams": streams_chart(streams) if streams else "",
        "streams_tables": _by_gpu(streams_table, streams),
    }
    about = "How many stages a software pipeline should have: measured, forecast, and by workload"
    yield Page("stages.html", "How many stages?", "stages.html.j2", values, "Stages", description=about)


def curve_chart(found: Sequence[Row], gpu: str, kernel: str) -> Markup:
    """Draw the ratio to cuBLAS over stages, a panel per size, a colour per variant; dashed what the model forecast."""
    x = {"field": "stages", "type": "ordinal", "title": "stages", "axis": {"labelAngle": 0}}
    title = "speed ÷ cuBLAS's"
    colour = {"field": "variant", "type": "nominal", "title": "variant (dashed: by the model)"}
    tooltip = [
        {"field": "variant"},
        {"field": "size"},
        {"field": "stages"},
        {"field": "ratio", "title": "of cuBLAS", "format": ".3f"},
        {"field": "interval", "title": "95 % interval"},
        {"field": "gflops", "title": "GFLOPS", "format": ",.0f"},
        {"field": "model", "title": "of cuBLAS, by the model", "format": ".3f"},
        {"field": "mark", "title": "note"},
    ]
    y = {"type": "quantitative", "title": title, "scale": {"zero": True}}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "rule", "strokeDash": [5, 4]},
            "encoding": {"y": {"datum": 1, "type": "quantitative"}, "color": {"value": "var(--ink)"}},
        },
        {
            "mark": {"type": "line", "strokeDash": [3, 3], "strokeWidth": 1.5},
            "encoding": {"x": x, "y": {"field": "model", **y}, "color": colour},
        },
        {
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"x": x, "y": {"field": "ratio", **y}, "color": colour},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 1.5},
            "encoding": {"x": x, "y": {"field": "low", **y}, "y2": {"field": "high"}, "color": colour},
        },
        {
            "transform": [INTERVAL],
            "mark": {"type": "point", "size": 55, "filled": True},
            "encoding": {"x": x, "y": {"field": "ratio", **y}, "color": colour, "tooltip": tooltip},
        },
        {
            "transform": [{"filter": "datum.recommended"}],
            "mark": {"type": "point", "size": 190, "filled": False, "strokeWidth": 1.5},
            "encoding": {"x": x, "y": {"field": "ratio", **y}, "color": {"value": "var(--ink)"}},
        },
    ]
    facet = {"field": "size", "type": "nominal", "sort": {"field": "product", "op": "min"}, "title": None}
    spec = {
        "data": {"values": [{name: value for name, value in row.items() if name in CURVE} for row in found]},
        "facet": facet,
        "columns": 3,
        "spec": {"height": 180, "layer": layers},
        "resolve": {"axis": {"x": "independent"}},
    }
    variant = found[0]["variant"]
    return chart(
        spec,
        title="Speed over stages",
        alt="A panel for each size: stages from left to right, upwards the speed over cuBLAS's from zero; a line for "
        "each variant, and a dashed one for what the depth model forecast.",
        note="Solid: measured, with 95 % intervals. Dashed: the depth model. Ring: the depth the model recommends. "
        "The dashed line across: cuBLAS in the same rounds. From zero, so that a small gain looks small.",
        picked={"gpu": gpu, "kernel": kernel, "variant": variant},
        listed="trade-offs",
    )


def predicted_chart(found: Sequence[Row], gpu: str, kernel: str) -> Markup:
    """Draw predicted against measured time of every swept point, held-out shapes marked apart."""
    shown = [{name: row[name] for name in PREDICTED} for row in found if row["model_us"]]
    ends = [row[name] for row in shown for name in ("model_us", "us")]
    domain = [0.8 * min(ends), 1.25 * max(ends)]
    marks = [digit * 10**power for power in range(7) for digit in (1, 3)]
    axis = {"type": "quantitative", "scale": {"type": "log", "domain": domain, "nice": False}}
    places = {"values": marks, "format": "~s" if max(ends) >= 1e5 else ",~g"}
    encoding = {
        "x": {"field": "model_us", "title": "predicted time of a launch, µs (logarithmic)", "axis": places, **axis},
        "y": {"field": "us", "title": "measured, µs (logarithmic)", "axis": places, **axis},
    }
    spec = {
        "data": {"values": shown},
        "height": 380,
        "layer": [
            {
                "data": {"values": [{"model_us": end, "us": end} for end in domain]},
                "mark": {"type": "line", "strokeDash": [5, 4], "strokeWidth": 1},
                "encoding": {**encoding, "color": {"value": "var(--ink)"}},
            },
            {
                "mark": {"type": "point", "size": 60, "filled": False, "strokeWidth": 1.6},
                "encoding": {
                    **encoding,
                    "color": {"field": "stages", "type": "nominal", "title": "stages"},
                    "shape": {"field": "held_out", "type": "nominal", "title": "shape"},
                    "tooltip": [
                        {"field": "variant"},
                        {"field": "size"},
                        {"field": "stages"},
                        {"field": "model_us", "title": "predicted, µs", "format": ",.1f"},
                        {"field": "us", "title": "measured, µs", "format": ",.1f"},
                    ],
                },
            },
        ],
    }
    return chart(
        spec,
        title="Predicted against measured time",
        alt="A point for each swept case: to the right the predicted time, upwards the measured one, both logarithmic; "
        "points on the dashed diagonal were predicted exactly.",
        note="Held out: shapes that set no constant of the model. On the dashed line prediction and measurement agree.",
        picked={"gpu": gpu, "kernel": kernel},
        columns={
            "variant": "variant",
            "size": "size",
            "stages": "stages",
            "model_us": "predicted, µs",
            "us": "measured, µs",
            "held_out": "shape",
        },
    )


def streams_chart(sweeps: Sequence[StreamSweep]) -> Markup:
    """Draw memory-bound workloads over stages, in parts of the copy's rate, a panel per size; what stages nothing as
    rules.
    """
    shown = [row for sweep in sweeps for row in _stream_rows(sweep)]
    x = {"field": "stages", "type": "ordinal", "title": "stages", "axis": {"labelAngle": 0}}
    y = {"type": "quantitative", "title": "bandwidth ÷ the copy's", "scale": {"zero": True}}
    colour = {"field": "form", "type": "nominal", "title": "form", "sort": ["staged", "direct", "torch"]}
    tooltip = [
        {"field": "workload"},
        {"field": "size"},
        {"field": "form"},
        {"field": "stages"},
        {"field": "part", "title": "of the copy", "format": ".3f"},
        {"field": "gb_s", "title": "GB/s", "format": ",.0f"},
        {"field": "tile", "title": "configuration"},
    ]
    encoding = {"x": x, "y": {"field": "part", **y}, "color": colour}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "rule", "strokeDash": [5, 4]},
            "encoding": {"y": {"datum": 1, "type": "quantitative"}, "color": {"value": "var(--ink)"}},
        },
        {
            "mark": {"type": "line"},
            "encoding": {**encoding, "strokeDash": {**colour, "legend": None, "scale": {"range": DASHES}}},
        },
        {
            "transform": [{"filter": "datum.form === 'staged'"}],
            "mark": {"type": "point", "size": 55, "filled": True},
            "encoding": {**encoding, "tooltip": tooltip},
        },
    ]
    facet = {"field": "size", "type": "nominal", "sort": {"field": "bytes", "op": "min"}, "title": None}
    spec = {
        "data": {"values": shown},
        "facet": facet,
        "columns": 4,
        "spec": {"height": 170, "layer": layers},
        "resolve": {"axis": {"x": "independent"}},
    }
    return chart(
        spec,
        title="Memory-bound workloads over stages",
        alt="A panel for each size: stages from left to right, upwards the bandwidth over that of a copy of as many "
        "bytes; lines for the staged form, the direct form, and torch's own operator.",
        note="Bytes: every input read once, every output written once. Direct: from global memory to registers; "
        "it has no stages, and stands as a line across. The dashed line across: a copy of as many bytes.",
        picked={"gpu": shown[0]["gpu"], "workload": shown[0]["workload"]},
        columns={
            "workload": "workload",
            "size": "size",
            "form": "form",
            "stages": "stages",
            "part": "of the copy",
            "gb_s": "GB/s",
        },
    )


CURVE = {"gpu", "kernel", "variant", "size", "product", "stages", "ratio", "low", "high", "gflops", "model"}
CURVE |= {"mark", "recommended"}
PREDICTED = ("gpu", "kernel", "variant", "size", "stages", "model_us", "us", "held_out")
DASHES = [[1, 0], [8, 3], [2, 2]]


def usual_advice_table(sweeps: Sequence[Sweep]) -> Table:
    """Hold what is commonly taught of depth against every sweep that it is about."""
    products = fastest_products([sweep for sweep in sweeps if isinstance(sweep, StageSweep)])
    streams = [sweep for sweep in sweeps if isinstance(sweep, StreamSweep)]
    computing = [sweep for sweep in products if sweep.bound(sweep.preferred) == "compute"]
    small, large = ([s for s in products if size_class(s) == name] for name in ("small", "large"))
    about: list[tuple[str, int, int, Sequence[Sweep]]] = [
        ("memory-bound kernels", 3, 5, streams),
        ("elementwise kernels", 2, 2, [sweep for sweep in streams if sweep.workload in ELEMENTWISE]),
        ("reductions", 4, 4, [sweep for sweep in streams if sweep.workload in REDUCTIONS]),
        ("compute-bound kernels", 2, 3, computing),
        ("matrix products", 3, 3, products),
        ("small products", 1, 2, small),
        ("large products", 3, 5, large),
    ]
    grid = []
    for name, fewest, most, own in about:
        if own:
            right = sum(bool(set(range(fewest, most + 1)) & good_depths(sweep)) for sweep in own)
            advice = str(fewest) if fewest == most else f"{fewest} to {most}"
            grid.append((name, advice, f"{right} of {len(own)}", _fewest_text(own)))
    note = (
        f"Right: a depth of that range is within {TIE_PCT:g} % of the fastest form measured, staged or not. A product "
    )
    note += "counts with the variant and tile that were fastest at its size; small: up to 512³, large: beyond 1536³."
    header = ("workload", "usual advice, stages", "right in", "fewest stages as fast as the fastest")
    return Table("The usual advice, and what was measured", header, tuple(grid), note, left=4)


def good_depths(sweep: Sweep) -> set[int]:
    """Return the stage counts within a tie of the fastest form; 0 stands for nothing staged."""
    times = sweep.times_ms | ({NONE: sweep.direct_ms} if sweep.direct_ms else {})
    fastest = min(times.values())
    return {stages for stages, time in times.items() if speed_lost_pct(time, fastest) <= TIE_PCT}


def _fewest_text(sweeps: Sequence[Sweep]) -> str:
    """Write ``none in 9, 2 in 4``: how often each depth was the fewest that is as fast as the fastest."""
    counted = Counter(min(good_depths(sweep)) for sweep in sweeps)
    words = {NONE: "no staging"} | {count: f"{count} stage{'s' * (count > 1)}" for count in counted if count}
    return ", ".join(f"{words[depth]} in {times}" for depth, times in sorted(counted.items()))


def _by_gpu(make: Any, sweeps: Sequence[Sweep]) -> dict[str, Table]:
    groups = grouped(sweeps, lambda sweep: slug(sweep.section.gpu))
    return {gpu: make(own) for gpu, own in groups.items()}


def _word(text: str) -> str:
    """Write a name as a choice's value, which has no spaces and no commas."""
    return text.replace(" ", "-").replace(",", "")


def _sizes(products: Sequence[StageSweep]) -> dict[str, str]:
    shapes = sorted({sweep.shape for sweep in products}, key=lambda shape: (math.prod(shape), shape))
    return {ANY: "all"} | {size_header(shape): size_header(shape) for shape in shapes}


def _product_rows(sweep: StageSweep) -> Iterator[Row]:
    forecast = sweep.forecast
    for record, row in zip(sweep.records, rows(sweep)):
        predicted = sweep.predicted_ms(record.stages)
        passed = record.verification.passed
        low, high = record.ratio_interval if passed else (None, None)
        marks = ["the fastest"] * row["best"] + ["recommended by the model"] * row["recommended"]
        more, lost = row["next_stage_smem_bytes"], row["next_stage_occupancy_lost"]
        yield {
            "gpu": slug(sweep.section.gpu),
            "kernel": f"{sweep.step}-{sweep.section.dtype}-{sweep.tile}",
            "kernel_text": f"step {sweep.step}, {sweep.section.dtype}, tile {sweep.tile}",
            "variant": sweep.variant,
            "size": size_header(sweep.shape),
            "product": math.prod(sweep.shape),
            "stages": record.stages,
            "ratio": round(record.ratio_to_cublas, 4) if passed else None,
            "low": low and round(low, 4),
            "high": high and round(high, 4),
            "gflops": round(record.gflops) if passed else None,
            "model": round(sweep.cublas_ms / predicted, 4) if predicted else None,
            "model_us": round(1e3 * predicted, 2) if predicted else None,
            "us": round(1e3 * record.time_ms, 2),
            "held_out": "held out" if is_held_out(sweep) else "of development",
            "recommended": bool(row["recommended"]),
            "best": bool(row["best"]),
            "mark": ", ".join(marks),
            "lost": row["speed_lost_to_best_pct"],
            "smem": row["smem_bytes"],
            "registers": row["registers"],
            "blocks": row["blocks_per_sm"],
            "occupancy": row["occupancy"],
            "limit": row["occupancy_limit"],
            "barriers": row["barriers"],
            "hidden": row["latency_hidden"],
            "next": "" if more is None else f"{more:+,}, {percent(-100 * lost or 0.0, '+.0f')} occupancy",
            "fewest": forecast.fewest if forecast else None,
            "bound": record.bound,
        }


def _stream_rows(sweep: StreamSweep) -> Iterator[Row]:
    def row(form: str, stages: int, part: float, gb_s: float, tile: str) -> Row:
        return {
            "gpu": slug(sweep.section.gpu),
            "workload": sweep.workload,
            "size": sweep.size,
            "bytes": sweep.bytes_moved,
            "form": form,
            "stages": stages,
            "part": round(part, 4),
            "gb_s": round(gb_s),
            "tile": tile,
        }

    staged = [record for record in sweep.records if record.verification.passed]
    for record in staged:
        yield row("staged", record.stages, record.ratio_to_copy, record.gb_s, record.config)
        if direct := sweep.direct:
            yield row("direct", record.stages, direct.ratio_to_copy, direct.gb_s, direct.config)
        if (torch := sweep.torch_gb_s) is not None:
            yield row("torch", record.stages, torch / sweep.copy_gb_s, torch, "")
