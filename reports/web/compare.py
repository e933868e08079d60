"""Compare any two kernels side by side: code in every form, resources, counters, timelines and speed.

All that is known of kernels travels to the browser in scripts that hold deflated JSON: one with what was measured, and
one a step with its texts, which is loaded when the step is chosen.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.listings import FORMS, NEED_COMPILER, NUMBERED, split_text
from tensorir_ladder.harness.records import Record, Timeline, Timing, shape_text
from tensorir_ladder.reports.cases import grouped, shape_label, slug
from tensorir_ladder.reports.selection import LAYOUTS
from tensorir_ladder.reports.web.lessons.lives import AT_FIRST_US, COLOURS, bars
from tensorir_ladder.reports.web.listings import LISTED_SIZES, KernelTexts, ListedKernel, kernels, listings
from tensorir_ladder.reports.web.machine_code import MachineCode, read
from tensorir_ladder.reports.web.packing import pack, unpack_bytes
from tensorir_ladder.reports.web.page import File, Page
from tensorir_ladder.reports.web.sources import SiteSources
from tensorir_ladder.steps.registry import get_step

ADDRESS = "compare.html"
VENDOR = Path(__file__).parent / "vendor"
TITLES = {
    "schedule": "Schedule",
    "tir": "TIR",
    "lowered": "Lowered",
    "cuda": "CUDA",
    "ptx": "PTX",
    "sass": "SASS",
}
# What stands in the tables: by the name of its field, the heading, the unit, how many digits after the point, and
# whether right is set against left.
SPEED = {
    "ratio": ("Ratio to cuBLAS", "", 3, True),
    "tflops": ("Speed", "TFLOPS", 2, True),
    "cublas_tflops": ("cuBLAS in the same rounds", "TFLOPS", 2, False),
    "time_us": ("Time of a launch", "µs", 1, True),
    "spread_pct": ("Spread of the rounds", "%", 1, False),
    "clock_mhz": ("Clock before and after", "MHz", 0, False),
    "power_w": ("Power before and after", "W", 0, False),
    "bound": ("Bound by", "", 0, False),
}
RESOURCES = {
    "registers": ("Registers", "a thread", 0, True),
    "spill_bytes": ("Spilled", "bytes a thread", 0, True),
    "smem_bytes": ("Shared memory", "bytes a block", 0, True),
    "threads": ("Threads", "a block", 0, True),
    "blocks": ("Blocks", "", 0, True),
    "blocks_per_sm": ("Blocks at once", "a multiprocessor", 0, True),
    "occupancy_pct": ("Occupancy", "%", 0, True),
    "occupancy_limit": ("Occupancy limited by", "", 0, False),
}
LOOP = {
    "stages": ("Stages", "", 0, True),
    "barriers": ("Barriers", "a k tile", 0, True),
    "cp_async": ("cp.async", "statements a k tile", 0, True),
    "cp_async_bytes": ("Bytes of a cp.async", "", 0, True),
    "wait_groups": ("Groups that waits leave in flight", "", 0, False),
    "vector_loads": ("Vector loads", "statements a k tile", 0, True),
    "TMA loads": ("TMA loads", "a k tile", 0, True),
    "wgmma": ("wgmma", "a k tile", 0, True),
    "tcgen05.mma": ("tcgen05.mma", "a k tile", 0, True),
    "mbarrier waits": ("mbarrier waits", "a k tile", 0, True),
    "TMA stores": ("TMA stores", "in all", 0, True),
    "kernel_lines": ("Lines of CUDA", "", 0, True),
}
OF_SCHEDULES = ("cp_async", "cp_async_bytes", "wait_groups", "vector_loads")  # explicit kernels have others
FIELDS = {"speed": SPEED, "resources": RESOURCES, "loop": LOOP}
# Left, right, form, and what it shows.
SPEEDS: dict[str, Any] = {
    "data": {"values": []},
    "width": "container",
    "height": 280,
    "encoding": {
        "x": {
            "field": "size",
            "type": "quantitative",
            "title": "m = n = k",
            "scale": {"type": "log", "base": 2, "nice": False},
            "axis": {"values": [256, 512, 1024, 2048, 4096, 8192], "format": "d"},
        },
        "color": {
            "field": "side",
            "type": "nominal",
            "title": None,
            "scale": {"domain": ["Left", "Right"], "range": ["var(--series-2)", "var(--series-1)"]},
        },
    },
    "layer": [
        {
            "mark": "rule",
            "encoding": {
                "y": {"field": "low", "type": "quantitative", "title": "ratio to cuBLAS"},
                "y2": {"field": "high"},
            },
        },
        {"mark": "line", "encoding": {"y": {"field": "ratio", "type": "quantitative"}}},
        {
            "mark": {"type": "point", "filled": True},
            "encoding": {
                "y": {"field": "ratio", "type": "quantitative"},
                "shape": {"field": "side", "type": "nominal", "title": None, "scale": {"domain": ["Left", "Right"]}},
                "tooltip": [
                    {"field": "side", "title": "side"},
                    {"field": "size", "title": "m = n = k"},
                    {"field": "ratio", "title": "ratio to cuBLAS", "format": ".3f"},
                    {"field": "low", "title": "from", "format": ".3f"},
                    {"field": "high", "title": "to", "format": ".3f"},
                    {"field": "tile", "title": "tile"},
                ],
            },
        },
        {
            "mark": {"type": "rule", "strokeDash": [4, 4]},
            "data": {"values": [{"one": 1}]},
            "encoding": {"y": {"datum": 1}},
        },
    ],
}
WINDOW = {"domainMin": {"expr": "toNumber(begin)"}, "domainMax": {"expr": "toNumber(end)"}, "nice": False}
LIVES: dict[str, Any] = {
    "data": {"values": []},
    "width": "container",
    "height": 24,  # for each row, which the page counts
    "autosize": {"type": "fit-x", "contains": "padding"},
    "params": [{"name": "begin", "value": 0}, {"name": "end", "value": AT_FIRST_US}],
    "transform": [{"filter": "datum.to >= toNumber(begin) && datum.from <= toNumber(end)"}],
    "mark": {"type": "bar", "height": 17, "clip": True, "stroke": "var(--paper)", "strokeWidth": 0.5},
    "encoding": {
        "y": {
            "field": "row",
            "type": "nominal",
            "sort": None,
            "title": None,
            "axis": {"grid": False, "labelLimit": 240},
        },
        "x": {"field": "from", "type": "quantitative", "title": "µs since the block began", "scale": WINDOW},
        "x2": {"field": "to"},
        "color": {
            "field": "kind",
            "type": "nominal",
            "title": None,
            "scale": {"domain": list(COLOURS), "range": list(COLOURS.values())},
            "legend": None,  # the page has one, which wraps
        },
        "tooltip": [
            {"field": "kind", "title": "what"},
            {"field": "k", "title": "number"},
            {"field": "from", "title": "from, µs"},
            {"field": "to", "title": "to, µs"},
        ],
    },
}
EXAMPLES = (
    ("4", "5", "cuda", "Steps 4 and 5: what pipelining makes of the loop"),
    ("5:sync", "5:async", "cuda", "Step 5 without and with cp.async"),
    ("5:async", "5:one_barrier_unrolled", "sass", "Two barriers a k tile, or one and the ring written out"),
    ("10~4096x4096x4096", "11~4096x4096x4096", "tir", "wgmma: copies by all threads, or by TMA"),
    ("11~4096x4096x4096", "12~4096x4096x4096", "schedule", "One loop, or warps with roles: with timelines"),
    ("13~4096x4096x4096", "13~4096x4096x4096~h100-80gb-hbm3", "schedule", "The fastest kernel on two GPUs"),
)
FIRST = EXAMPLES[0]


def pages(sources: SiteSources) -> Iterator[Page | File]:
    """Yield the page that compares, and the scripts with its data."""
    found = kernels(sources)
    if not found:
        return
    made = listings(kernel for kernel in found if kernel.listed)
    code = read(sources.paths.results)
    data = index(sources, found, made, code)
    steps = grouped((kernel for kernel in found if kernel.key in made), lambda kernel: kernel.step)
    for step, own in steps.items():
        listed = {made[kernel.key].source_sha256: made[kernel.key] for kernel in own}
        stamped = {kernel.identity: lives(kernel.timeline) for kernel in own if kernel.timeline}
        yield _script(f"compare/step{step}.js", f"step{step}", texts(listed, code) | {"timelines": stamped})
    yield _script("compare/index.js", "index", data)
    viewer = unpack_bytes((VENDOR / "codemirror.js.xz").read_bytes(), "codemirror.js.xz")
    yield _deflated("compare/codemirror.js", "codemirror", viewer)
    yield File("compare/codemirror.LICENSE.txt", (VENDOR / "codemirror.LICENSE.txt").read_text(encoding="utf-8"))
    left, right, form, _ = FIRST
    values = {
        "titles": TITLES,
        "left": left,
        "right": right,
        "form": form,
        "examples": [(f"left={a}&right={b}&show={form}", text) for a, b, form, text in EXAMPLES],
        "compiler": code.compiler if code else "",
        "speeds": SPEEDS,
        "lives": LIVES,
        "colours": COLOURS,
        "shown_us": AT_FIRST_US,
        "longest_us": math.ceil(max((k.timeline.duration_ns / 1e3 for k in found if k.timeline), default=AT_FIRST_US)),
    }
    description = "Two kernels of the ladder side by side: code, resources, counters, timeline, speed."
    yield Page(
        ADDRESS,
        "Compare",
        "compare.html.j2",
        values,
        "Compare",
        scripts=("compare/index.js", "static/compare.js"),
        styles=("static/compare.css",),
        picks_gpu=False,
        description=description,
    )


def index(
    sources: SiteSources, found: list[ListedKernel], made: Mapping[Any, KernelTexts], code: MachineCode | None
) -> dict[str, Any]:
    """Write what is known of every kernel, without its texts, as the page reads it."""
    compiled = code.by_source if code else {}
    gpus = dict.fromkeys(kernel.gpu for kernel in found)
    results = "/".join(sources.paths.results.parts[-2:])
    rows = []
    for kernel in found:
        listing = made.get(kernel.key)
        entry = compiled.get(listing.source_sha256) if listing else None
        row: dict[str, Any] = {
            "id": kernel.identity,
            "step": kernel.step,
            "variant": kernel.variant,
            "product": _product(kernel),
            "size": kernel.shape[0] if len(set(kernel.shape)) == 1 else 0,
            "gpu": slug(kernel.gpu),
            "tile": kernel.tile,
            "stages": kernel.stages,
            "default": kernel.default,
            "resources": _resources(kernel, listing),
            "loop": _loop(kernel, listing),
        }
        if listing:
            row["text"] = listing.source_sha256
            row["timeline"] = kernel.timeline is not None
        if entry and "registers" not in row["resources"]:
            row["resources"] |= {"registers": entry.registers, "spill_bytes": entry.spill_bytes}
        if record := kernel.record:
            row["speed"] = _speed(record)
            row["command"] = f"ladder run --again {results}/{sources.results.places[record.key]}"
            row["revision"] = record.environment.revision[:12]
            row["verified"] = record.verification.passed
            row["other_text"] = bool(listing and listing.source_sha256 != record.source_sha256)
        else:
            row["command"] = command_of(kernel)
        if counters := kernel.counters:
            row["counters"] = counters.values
            row["counters_command"] = counters.command
        rows.append(row)
    return {
        "gpus": {slug(name): name for name in gpus},
        "steps": {number: f"{number} {step.topic.replace('_', ' ')}" for number, step in sources.steps.items()},
        "forms": {form: TITLES[form] for form in FORMS},
        "need_compiler": NEED_COMPILER,
        "never_run": [number for number, step in sources.steps.items() if step.never_run],
        "sizes": LISTED_SIZES,
        "numbered": NUMBERED,
        "fields": FIELDS,
        "kernels": rows,
    }


def texts(own: Mapping[str, KernelTexts], code: MachineCode | None) -> dict[str, Any]:
    """Pack the texts of listings, given by the digest of their CUDA; what a compiler makes of them as far as known.

    By digest and form, the numbers of the two parts of a text.
    """
    numbers: dict[str, int] = {}
    places: dict[str, dict[str, tuple[int, int]]] = {}
    for digest, listing in own.items():
        made = code.of(digest) if code else {}
        forms = listing.texts | {form: split_text(text, form) for form, text in made.items()}
        places[digest] = {
            form: (numbers.setdefault(before, len(numbers)), numbers.setdefault(body, len(numbers)))
            for form, (before, body) in forms.items()
        }
    packed = pack(numbers)
    return {"lines": "\n".join(packed.lines), "runs": packed.runs, "texts": places}


def lives(timeline: Timeline) -> list[tuple[str, str, int, float, float]]:
    """List a timeline's bars: row, kind, number, begin and end in µs."""
    return [
        (row, kind, span.number, *(round(at / 1e3, 3) for at in (span.begin, span.end)))
        for row, kind, span in bars(timeline)
    ]


def _script(address: str, name: str, data: dict[str, Any]) -> File:
    return _deflated(address, name, json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode())


def _deflated(address: str, name: str, content: bytes) -> File:
    text = base64.b64encode(zlib.compress(content, 9)).decode()
    return File(address, f'(window.comparison ??= {{}})["{name}"] = "{text}";\n')


def _product(kernel: ListedKernel) -> str:
    output = "" if kernel.out_dtype == kernel.dtype else f" to {kernel.out_dtype}"
    layout = "" if kernel.layout == "nn" else f", {LAYOUTS.get(kernel.layout, kernel.layout)}"
    size = shape_label(kernel.shape) + "³" * (len(set(kernel.shape)) == 1)
    return f"{size} {kernel.dtype}{output}{layout}"


def _speed(record: Record) -> dict[str, Any]:
    low, high = record.ratio_interval
    states = (record.environment.before, record.environment.after)
    return {
        "ratio": record.ratio_to_cublas,
        "low": low,
        "high": high,
        "tflops": record.gflops / 1e3,
        "cublas_tflops": _tflops(record, record.fastest_baseline),
        "time_us": record.time_ms * 1e3,
        "spread_pct": record.timing.spread_pct,
        "clock_mhz": " – ".join(f"{state.sm_clock_mhz:.0f}" for state in states),
        "power_w": " – ".join(f"{state.power_w:.0f}" for state in states),
        "bound": record.bound,
    }


def _tflops(record: Record, timing: Timing) -> float:
    return 2 * record.m * record.n * record.k / (timing.median_ms * 1e9)


def _resources(kernel: ListedKernel, listing: KernelTexts | None) -> dict[str, Any]:
    used = kernel.record.resources if kernel.record else None
    if used is None:
        return {name: getattr(listing, name) for name in ("threads", "blocks", "smem_bytes")} if listing else {}
    own = {name: getattr(used, name) for name in RESOURCES if name != "occupancy_pct"}
    return own | {"occupancy_pct": 100 * used.occupancy}


def _loop(kernel: ListedKernel, listing: KernelTexts | None) -> dict[str, Any]:
    code = kernel.record.code if kernel.record and kernel.record.code else listing.code if listing else None
    if code is None:
        return {"stages": kernel.stages}
    own: dict[str, Any] = {name: getattr(code, name) for name in ("barriers", "kernel_lines")}
    own |= listing.instructions if listing else {}
    step = get_step(kernel.step)
    is_gone = kernel.variant not in step.variant_names  # but records of it are kept
    if not (step.explicit if is_gone else step.is_explicit(kernel.variant)):
        own |= {name: getattr(code, name) for name in OF_SCHEDULES}
        own["wait_groups"] = ", ".join(map(str, code.wait_groups)) or "none"
    return {"stages": kernel.stages, **own}


def command_of(kernel: ListedKernel) -> str:
    """Write the command that measures a kernel which no record has."""
    case = f"--step {kernel.step} --variant {kernel.variant} --shape {shape_text(kernel.shape)} --dtype {kernel.dtype}"
    layout = f" --layout {kernel.layout}" if kernel.layout != "nn" else ""
    return f"ladder run {case}{layout} --tile {kernel.tile} --stages {kernel.stages}"
