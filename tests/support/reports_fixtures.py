"""Made-up records and listings for the tests of reports: believable, and nowhere near reports/results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tensorir_ladder.harness.records import (
    Candidate,
    CodeFacts,
    DepthForecast,
    Environment,
    GpuState,
    Listing,
    Method,
    Peer,
    Record,
    Resources,
    StreamRecord,
    Timeline,
    Timing,
    Track,
    TunedConfig,
    Verification,
)
from tensorir_ladder.reports.__main__ import main
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.readme import BEGIN, END

SIZES = (256, 512, 1024, 2048, 4096)
NAMES = (
    "step1_naive",
    "step2_shared_tiling",
    "step3_register_tiling",
    "step4_vectorization",
    "step5_pipelining",
    "step6_unrolling",
    "step7_warp_tiling",
    "step8_tensor_cores",
    "step9_async_ring",
    "step10_wgmma",
    "step11_tma_ring",
)
CUBLAS = dict(zip(SIZES, (2800, 16000, 34000, 50000, 51500)))
SPEEDS = (
    (600, 1500, 2300, 2800, 3000),
    (1500, 2600, 3600, 4200, 4500),
    (1590, 6900, 14000, 18500, 20000),
    (1600, 7100, 25400, 30500, 32000),
    (2630, 12050, 32200, 35500, 37000),
    (4300, 14800, 33500, 41000, 45000),
)
VARIANTS = {
    5: ("async", "sync", "register_staged", "writeback", "double_buffer", "double_buffer_pipelined"),
    6: ("full", "none", "unroll4", "unroll8", "unroll16", "unroll32"),
}
REFUSED = {"tile": "512x512x8/1x1", "stages": 1, "time_ms": None, "why": "too many threads (got 262144, limit 1024)"}
CODE = CodeFacts(2, 4, 16, 1, (2,), 3, 1, 3, 120)
RESOURCES = Resources(64, 0, 12288, 128, 256, 8, 0.5, "registers")


def product(step: int, size: int, dtype: str = "float32") -> dict[str, object]:
    """Name a step and a square product as every record does."""
    sizes = dict.fromkeys("mnk", size)
    return {"step": step, "step_name": NAMES[step - 1], **sizes, "layout": "nn", "dtype": dtype}


def timing(label: str, milliseconds: float, rounds: int = 9) -> Timing:
    """Rounds whose median is ``milliseconds``, with a spread of a percent or so."""
    middle = rounds // 2
    return Timing(label, tuple(milliseconds * (1 + 0.004 * (index - middle)) for index in range(rounds)))


def environment(
    gpu: str = "NVIDIA H200",
    at: str = "2026-11-20T10:00:00.000+00:00",
    dirty: bool = False,
    run: str = "",
    uuid: str = "GPU-0",
) -> Environment:
    """A quiet GPU on a clean tree."""
    state = GpuState(1980.0, 3201.0, 120.0, 40.0)
    versions = {"tvm": "0.27.0.post1", "cuda": "13.0", "torch": "2.9"}
    return Environment(
        gpu, uuid, "580.1", 700.0, state, replace(state, power_w=350.0), versions, "abc1234", dirty, at, run
    )


def record(step: int = 4, size: int = 1024, speed: float | None = None, **changes: object) -> Record:
    """One measured case of a step; ``speed`` in GFLOPS; ``changes`` replace fields of the record."""
    column = SIZES.index(size) if size in SIZES else 0
    speed = speed or SPEEDS[step - 1][column]
    milliseconds = 2 * size**3 / (speed * 1e6)
    before = 2 * size**3 / (SPEEDS[step - 2][column] * 1e6)
    cublas = 2 * size**3 / (CUBLAS.get(size, 2800) * 1e6)
    variant = VARIANTS.get(step, ("default",))[0]
    made = Record(
        kind="step",
        **product(step, size),
        variant=variant,
        default_variant=True,
        out_dtype="float32",
        math="ieee",
        stages=4 if step > 4 else 1,
        tile="32x64x16/4x4",
        tile_choice="default",
        timing=timing(NAMES[step - 1], milliseconds),
        baseline=(timing("cuBLAS nn", cublas), timing("cuBLAS nt", cublas * 1.05)),
        previous=timing(f"{NAMES[step - 2]} 32x64x16/4x4", before) if step > 1 else None,
        verification=Verification(True, "gpu", (0, 1, 2), 1e-6, 1e-4, True),
        resources=RESOURCES,
        code=CODE,
        bound="compute",
        predicted_gain_pct=30.0 if step == 5 else None,
        candidates=(),
        source_sha256="0" * 64,
        cubin_sha256="1" * 64,
        arch="sm_90a",
        method=Method(9, 50, 4, "normal(0, 1)", "operands rotated over twice the L2", "CUDA graph", 200.0),
        environment=environment(),
        command=f"python -m harness run --step {step} --size {size}",
    )
    return replace(made, **changes)


def calibration(size: int = 1024) -> Record:
    """cuBLAS against itself."""
    made = record(1, size, speed=CUBLAS[size] * 1.002)
    return replace(made, kind="calibration", step=0, step_name="cublas", variant="cublas", previous=None)


def peer(name: str, size: int, share: float, config: str = "64x64x16, 4 warps, 3 stages") -> Peer:
    """A peer that reaches a share of cuBLAS's speed."""
    return Peer(name, "measured", "", config, timing(name, 2 * size**3 / (share * CUBLAS[size] * 1e6)))


def peers(size: int) -> tuple[Peer, ...]:
    """One that was measured, one that failed at 1024, one that is missing."""
    failed = Peer("dlight", "failed", "WrongResult: worst error 3", "rule gpu.Matmul", None)
    dlight = failed if size == 1024 else peer("dlight", size, 0.4, "rule gpu.Matmul")
    return peer("triton", size, 0.8), dlight, Peer("tilelang", "missing", "tilelang is not installed", "", None)


HALF = (  # speeds of steps 8 to 10 in float16, in parts of cuBLAS's
    (0.90, 0.70, 0.50, 0.40, 0.38),
    (1.10, 1.00, 0.80, 0.72, 0.70),
    (0.90, 0.95, 0.98, 1.01, 1.03),
)
HALF_TILES = {8: "128x128x32/64x64", 9: "128x128x32/64x64", 10: "128x256x64/64x256"}


def half(step: int, size: int = 1024, share: float | None = None, **changes: object) -> Record:
    """A case of a step on tensor cores, in float16 unless changed; ``share`` is its ratio to cuBLAS."""
    share = share or HALF[step - 8][SIZES.index(size)]
    own = timing(NAMES[step - 1], 2 * size**3 / (share * CUBLAS[size] * 1e6))
    before = timing(f"{NAMES[step - 2]} {HALF_TILES[step - 1]}", 1.5 * own.median_ms) if step > 8 else None
    case = {"step": step, "step_name": NAMES[step - 1], "dtype": "float16", "out_dtype": "float16"}
    kernel = {"tile": HALF_TILES[step], "stages": 1 if step == 8 else 4, "bound": "unknown"}
    return replace(record(1, size), **{**case, **kernel, "timing": own, "previous": before, **changes})


def write_tensor_cores(folder: Path) -> None:
    """The float16 ladder beside the float32 one: squares, shapes that are none, tuned configurations, tf32."""
    for step in HALF_TILES:
        listing(step, dtype="float16", tile=HALF_TILES[step]).save(folder)
        for size in SIZES:
            half(step, size).save(folder)
            faster = 1.04 * HALF[step - 8][SIZES.index(size)]
            half(step, size, faster, tile_choice="tuned", tile="256x128x64/64x64").save(folder)
        for m, n, k in ((4096, 4096, 14336), (4095, 4095, 4095)):
            peers = (peer("triton", 4096, 0.8),) if step == 10 else ()
            half(step, 4096, m=m, n=n, k=k, peers=peers).save(folder)
    tf32 = {"variant": "tf32", "default_variant": False, "dtype": "float32", "out_dtype": "float32", "math": "tf32"}
    half(9, 1024, **tf32, previous=None).save(folder)
    half(8, 1024, **tf32).save(folder)


def write_peers(folder: Path) -> None:
    """Steps 4 to 6 at two sizes, 5 and 6 beside peers."""
    for size in (1024, 2048):
        record(4, size).save(folder)
        for step in (5, 6):
            record(step, size, peers=peers(size)).save(folder)


def tuned(step: int = 5, size: int = 1024, **changes: object) -> TunedConfig:
    """A tuned configuration with its runner-up, beside the default configuration and cuBLAS."""
    winner = Candidate("async", "64x64x16/4x4", 2, "timed", (0.8,), (0.9,))
    runner_up = Candidate("sync", "128x64x32/8x4", 3, "timed", (0.9,), (0.8,))
    illegal = Candidate("async", "512x512x8/1x1", 2, "illegal", why="too many threads (got 262144, limit 1024)")
    times = {"winner": 0.8, "runner-up": 0.82, "default": 1.0, "cuBLAS nn": 0.76, "cuBLAS nt": 0.78}
    made = TunedConfig(
        **product(step, size),
        out_dtype="float32",
        math="ieee",
        arch="sm_90a",
        winner=winner,
        runner_up=runner_up,
        verdict="confirmed",
        margin_pct=2.5,
        margin_interval_pct=(2.1, 2.9),
        default="default",
        confirmation=tuple(timing(label, milliseconds) for label, milliseconds in times.items()),
        legal=20,
        candidates=(winner, runner_up, illegal),
        space={"tiles": ["64x64x16/4x4", "128x64x32/8x4"], "stages": [2, 3], "variants": ["async", "sync"]},
        space_digest="0" * 16,
        kernels_digest="1" * 16,
        budget_s=60.0,
        method=Method(9, 50, 4, "normal(0, 1)", "operands rotated over twice the L2", "CUDA graph", 200.0),
        environment=environment(),
        command=f"python -m harness tune --step {step} --size {size}",
    )
    return replace(made, **changes)


def listing(step: int = 5, variant: str | None = None, **changes: object) -> Listing:
    """A step's code, different from step to step; ``changes`` replace fields of the listing."""
    names = VARIANTS.get(step, ("default",))
    variant = variant or names[0]
    tir = "\n".join(["def main():", *(f"    statement_{index}()" for index in range(step + 4))]) + "\n"
    made = Listing(
        step=step,
        step_name=NAMES[step - 1],
        title=f"Step {step}, {NAMES[step - 1][6:]}: one idea",
        text=f"Step {step}, {NAMES[step - 1][6:]}: one idea.\n\nIt was slow. Now::\n\n    for k: load\n\nBetter.",
        variant=variant,
        default_variant=variant == names[0],
        shape="1024x1024x1024",
        dtype="float32",
        layout="nn",
        tile="32x64x16/4x4",
        stages=4 if step > 4 else 1,
        arch="sm_90a",
        tir=tir,
        cuda=tir.replace("def main()", "__global__ void kernel()"),
        why=f"{variant}: because of its code.",
        code=CODE,
        resources=RESOURCES,
        pipeline={
            "statements": ["A_shared", "B_shared", "matmul_update"],
            "software_pipeline_stage": [0, 0, 3],
            "software_pipeline_order": [0, 1, 2],
            "software_pipeline_async_stages": [0],
        }
        if step > 4
        else {},
        aspects={"shared memory": "none" if step == 1 else "two tiles", "instruction": f"kind {step}", "same": "equal"},
    )
    return replace(made, **changes)


def write_ladder(folder: Path, variants: bool = True) -> None:
    """A whole ladder with both tile choices and a calibration."""
    for step in range(1, 7):
        for size in SIZES:
            record(step, size).save(folder)
            best = record(step, size, speed=SPEEDS[step - 1][SIZES.index(size)] * 1.08)
            before = (
                replace(best.previous, samples_ms=tuple(t / 1.08 for t in best.previous.samples_ms))
                if best.previous
                else None
            )
            candidates = (
                *({"tile": f"{32 * n}x64x16/4x4", "stages": 1, "time_ms": 1.0 + n} for n in range(1, 12)),
                REFUSED,
            )
            replace(best, tile_choice="best", tile="128x64x32/8x4", candidates=candidates, previous=before).save(folder)
    for step, names in VARIANTS.items() if variants else ():
        for place, name in enumerate(names[1:], 1):
            for size in SIZES:
                speed = SPEEDS[step - 1][SIZES.index(size)] * (1 - 0.07 * place)
                record(step, size, speed=speed, variant=name, default_variant=False).save(folder)
    calibration().save(folder)


# Stage sweeps: shapes of curves as a pipeline has them, not measured values.

SWEPT = (  # shape, curve, fastest speed; 768 and the rectangle are held out
    ((256, 256, 256), "latency", 5000),
    ((768, 768, 768), "latency", 15000),
    ((512, 2048, 1024), "flat", 25000),
    ((1024, 1024, 1024), "compute", 30000),
)
CURVES = {  # speed by stages, in parts of the fastest
    "latency": (0.55, 0.80, 0.93, 1.0, 0.995, 0.99),
    "compute": (0.86, 1.0, 0.96, 0.955, 0.90, 0.88),
    "flat": (0.996, 1.0, 0.99, 0.98, 0.97, 0.96),
}
TILE = "64x64x16/4x4"


def forecast(times_ms: tuple[float, ...], recommended: int = 4, fewest: int = 4) -> DepthForecast:
    """A forecast whose occupancy falls with each stage."""
    occupancy = tuple(max(0.125, 0.5 - 0.0625 * index) for index in range(len(times_ms)))
    hidden = tuple(min(1.0, index / max(1, fewest - 1)) for index in range(len(times_ms)))
    return DepthForecast(times_ms, occupancy, hidden, fewest, len(times_ms), recommended)


def triton_stages(cublas_ms: float) -> tuple[Peer, ...]:
    """Triton by stages and tuned, and three that cannot be had."""
    stages = [
        Peer(f"triton-{n}stage{'s' * (n > 1)}", "measured", "", f"num_stages={n}", timing("triton", cublas_ms / share))
        for n, share in enumerate((0.5, 0.62, 0.7, 0.71, 0.69), 1)
    ]
    tuned = Peer("triton", "measured", "", "64x64x32, 4 warps, 3 stages", timing("triton", cublas_ms / 0.74))
    missing = Peer("tilus", "missing", "no module named tilus", "", None)
    failed = Peer("tilelang", "failed", "its output is off by 3e-2", "", None)
    return (*stages, tuned, missing, failed)


def swept(
    shape: tuple[int, int, int] = (1024, 1024, 1024),
    curve: str = "latency",
    top: float = 30000,
    counts: tuple[int, ...] = (1, 2, 3, 4, 5, 6),
    recommended: int = 4,
    **changes: object,
) -> list[Record]:
    """One case of step 5 at several stage counts; ``top`` is its fastest speed in GFLOPS."""
    m, n, k = shape
    speeds = [top * share for share in CURVES[curve]]
    times = tuple(2 * m * n * k / (speed * 1e6) for speed in speeds)
    model = forecast(tuple(time * (1.05 + 0.02 * index) for index, time in enumerate(times)), recommended)
    cublas = 2 * m * n * k / (1.2 * top * 1e6)
    made = []
    for stages in counts:
        resources = replace(RESOURCES, smem_bytes=8192 * stages, blocks_per_sm=9 - stages, occupancy=(9 - stages) / 16)
        own = record(
            5,
            m=m,
            n=n,
            k=k,
            stages=stages,
            tile=TILE,
            tile_choice="given",
            timing=timing("step5_pipelining", times[stages - 1]),
            baseline=(timing("cuBLAS nn", cublas), timing("cuBLAS nt", cublas * 1.05)),
            previous=timing("step4_vectorization", times[0]),
            resources=resources,
            bound="latency" if curve == "latency" else "compute",
            depth=model,
            peers=triton_stages(cublas),
            command="python -m harness sweep --step 5 --stages 1-6 --size 1024",
            cubin_sha256=f"{changes.get('variant', 'async')} with {stages}",
        )
        made.append(replace(own, **changes))
    return made


def stream(
    workload: str = "gelu",
    variant: str = "staged",
    stages: int = 1,
    share: float = 0.9,
    mib: int = 256,
    **changes: object,
) -> StreamRecord:
    """A memory-bound workload at a share of the copy's 4 TB/s."""
    bytes_moved = mib * 2**20
    copy = bytes_moved / (4000 * 1e6)
    like = record(5)
    made = StreamRecord(
        workload=workload,
        shape=(bytes_moved // 8 // 4096, 4096),
        dtype="float32",
        variant=variant,
        stages=stages,
        config="256 threads, 4 elements a thread",
        bytes_moved=bytes_moved,
        flops=bytes_moved // 4,
        timing=timing(f"{workload} {variant}", copy / share),
        copy=timing("copy", copy),
        torch=None if workload == "scale_shift" else timing("torch", copy / 0.85),
        verification=like.verification,
        resources=replace(RESOURCES, smem_bytes=4096 * stages if variant == "staged" else 0, occupancy=0.75),
        barriers=1 if variant == "staged" else 0,
        cp_async=2 if stages > 1 else 0,
        bound="memory" if mib > 16 else "latency",
        source_sha256="0" * 64,
        cubin_sha256="1" * 64,
        arch="sm_90a",
        method=like.method,
        environment=environment(),
        command="python -m harness streams --stages 1-5",
    )
    return replace(made, **changes)


def write_sweeps(folder: Path) -> None:
    """Sweeps of two variants of step 5 over development and held-out shapes, and of two memory-bound workloads."""
    for shape, curve, top in SWEPT:
        for variant, factor in (("async", 1.0), ("one_barrier", 1.04)):
            for own in swept(shape, curve, factor * top, recommended=4 if curve == "latency" else 2):
                replace(own, variant=variant, default_variant=variant == "async").save(folder)
    for workload, factor in (("scale_shift", 1.0), ("softmax", 0.9)):
        for mib in (8, 512):
            for stages, share in enumerate((0.88, 0.93, 0.95, 0.94), 1):
                stream(workload, stages=stages, share=factor * share, mib=mib).save(folder)
            stream(workload, "direct", share=0.8 if workload == "softmax" else 0.955, mib=mib).save(folder)


# Timelines: a ring as it would run with these times, in nanoseconds; not measured values.

LOAD_NS, MMA_NS, ISSUE_NS, STAMP_NS, EPILOGUE_NS = 1100.0, 620.0, 60.0, 8.0, 3000.0


def tracks(stages: int, k_tiles: int, groups: int = 2) -> tuple[Track, ...]:
    """Make up step 11's stamps: thread 0 loads, all warpgroups wait, multiply, and meet once per k tile."""
    in_flight, ahead = (1, stages - 1) if stages > 1 else (0, 1)
    issued = [700.0 + 100 * k for k in range(min(ahead, k_tiles))]
    seen: dict[tuple[str, int], list[float]] = {}

    def note(event: str, moment: float) -> None:
        """Each warpgroup sees it, one a little after the other."""
        for group in range(groups):
            seen.setdefault((event, group), []).append(round(moment + 12 * group, 1))

    now, done = 750.0, []
    for k in range(k_tiles):
        note("full wait begins", now)
        now = max(now, issued[k] + LOAD_NS) + 20
        note("full wait ends", now)
        done.append(max(now, done[-1] if done else 0) + MMA_NS)
        now += ISSUE_NS
        note("mma issued", now)
        if k >= in_flight:
            now = max(now, done[k - in_flight]) + STAMP_NS
            note("mma retired", now)
            note("empty wait begins", now + STAMP_NS)
            now += 30
            note("empty wait ends", now)
        if k + ahead < k_tiles:
            issued.append(now + 40)
        now += 40
    for k in range(k_tiles - in_flight, k_tiles):
        now = max(now, done[k]) + STAMP_NS
        note("mma retired", now)
    note("epilogue begins", now + 10)
    note("results stored", now + EPILOGUE_NS)
    own = [Track(f"warpgroup {group}", event, 0, tuple(moments)) for (event, group), moments in seen.items()]
    return (Track("loads", "load issued", 0, tuple(issued)), *own)


def role_tracks(stages: int, k_tiles: int, pieces: int = 1, consumers: int = 2, boxes: int = 4) -> tuple[Track, ...]:
    """Make up the stamps of step 12's roles, or of step 13's with ``pieces`` of its work."""
    seen: dict[tuple[str, str], list[float]] = {}
    last = pieces * k_tiles
    issued, released = [], [0.0] * stages
    free = [0.0] * consumers  # when the tensor cores are done with what a consumer asked for
    now, load = [800.0 + 40 * number for number in range(consumers)], 700.0
    persists = pieces > 1

    def note(number: int, event: str, moment: float) -> None:
        seen.setdefault((f"consumer {number}", event), []).append(round(moment, 1))

    def store(number: int) -> None:
        note(number, "box begins", now[number])
        now[number] += EPILOGUE_NS / 8
        note(number, "box stored", now[number])

    done: list[list[float]] = [[] for _ in range(consumers)]
    for k in range(last):
        seen.setdefault(("producer", "empty wait begins"), []).append(load)
        load = max(load + STAMP_NS, released[k]) + STAMP_NS
        seen.setdefault(("producer", "empty wait ends"), []).append(load)
        load += 30
        issued.append(load)
        piece, own = divmod(k, k_tiles)
        for number in range(consumers):
            if persists and own == 0:
                note(number, "piece begins", now[number] - 5)
            note(number, "full wait begins", now[number])
            now[number] = max(now[number], issued[k] + LOAD_NS) + STAMP_NS
            note(number, "full wait ends", now[number])
            free[number] = max(now[number], free[number]) + MMA_NS
            done[number].append(free[number])
            now[number] += ISSUE_NS
            note(number, "mma issued", now[number])
            if piece and own < boxes:
                store(number)
                if own == boxes - 1:
                    note(number, "results stored", now[number])
            if own:
                now[number] = max(now[number], done[number][k - 1]) + STAMP_NS
                note(number, "mma retired", now[number])
            if own == k_tiles - 1:
                now[number] = max(now[number], done[number][k]) + STAMP_NS
                note(number, "mma retired", now[number])
                note(number, "epilogue begins", now[number] + 5)
                now[number] += 160
                note(number, "sums free", now[number])
                now[number] += 20
        released.append(max(now) + 10)
    for number in range(consumers):
        for _ in range(boxes):
            store(number)
        note(number, "results stored", now[number] + EPILOGUE_NS / 3)
    own = [Track(role, event, 0, tuple(moments)) for (role, event), moments in seen.items()]
    return (Track("producer", "load issued", 0, tuple(issued)), *own)


def roles_timeline(step: int, stages: int = 4, size: int = 4096) -> Timeline:
    """A block of step 12, or of step 13 with 4 tiles."""
    own = role_tracks(stages, size // 64, 4 if step == 13 else 1)
    end = max(max(track.ns) for track in own) + 20
    return timeline(
        stages,
        size,
        step=step,
        step_name={12: "step12_warp_specialization", 13: "step13_persistent"}[step],
        variant={12: "roles", 13: "stream"}[step],
        tracks=own,
        durations_ns=(end + 400, end - 300, end, end + 900, end - 100),
        command=f"python -m harness timeline --step {step} --size 4096",
    )


def timeline(stages: int = 4, size: int = 4096, **changes: object) -> Timeline:
    """Step 11's block in the middle of the grid; ``changes`` replace fields of the record."""
    own = tracks(stages, size // 64)
    end = max(max(track.ns) for track in own) + 20
    made = Timeline(
        **product(11, size, "float16"),
        variant="tma_store",
        out_dtype="float16",
        tile="128x256x64/2x1",
        stages=stages,
        block=size * size // 128 // 256 // 2,
        blocks=size * size // 128 // 256,
        multiprocessor=17,
        room=256,
        clock_mhz=1755.0,
        durations_ns=(end + 400, end - 300, end, end + 900, end - 100),
        kept=2,
        tracks=own,
        plain=timing("step11_tma_ring", end / 1e6 * 4),
        stamped=timing("step11_tma_ring stamped", end / 1e6 * 4.02),
        verification=Verification(True, "gpu", (0, 1, 2), 1e-3, 1e-2, True),
        source_sha256="0" * 64,
        cubin_sha256="1" * 64,
        arch="sm_90a",
        method=Method(9, 2, 2, "normal(0, 1)", "operands rotated over twice the L2", "CUDA graph", 250.0),
        environment=environment(),
        command="python -m harness timeline --step 11 --size 4096 --stages 1,2,4",
    )
    return replace(made, **changes)


def published(folder: Path) -> Paths:
    """The README of a folder's records, and its pictures, beside them."""
    readme = folder / "README.md"
    readme.write_text(f"{BEGIN}{END}")
    assert main(["readme", "--results", str(folder), "--readme", str(readme)]) == 0
    return Paths.of(folder, readme)


def write_timelines(folder: Path) -> None:
    """Step 11 at three stage counts, with its listing."""
    listing(11, dtype="float16", tile="128x256x64/2x1").save(folder)
    for stages in (1, 2, 4):
        timeline(stages).save(folder)
