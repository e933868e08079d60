"""Microbenchmarks of the GPU at hand: the constants of the models, each by a small kernel of its own.

The kernels are ``lab/probes.cu``; TVM launches each through a PrimFunc that does nothing but call it, so that
there is one way to compile and to launch in this project. Every quantity is the median of :data:`ROUNDS` rounds
after warming up, each between device events; the raw values are kept. A kernel's output is compared with what its
loop must leave, and its rate with what is physically plausible: what the compiler threw away is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tvm
from tvm.backend.cuda.op import cuda_func_call
from tvm.script import tirx as T

from tensorir_ladder.harness.environment import gpu_identity, gpu_state, versions
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.models.rate_files import Quantity, RatesFile, path_of, read_rates_file
from tensorir_ladder.harness.records import now
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen.lowering import cuda_compiler
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin

SOURCE = Path(__file__).resolve().parent / "probes.cu"
PROBES = (
    *("chase", "chase_shared", "fma_chain", "fma_many", "read_shared", "meet", "nothing", "copy", "read"),
    *("round_trip", "stream_async", "mma_f16", "mma_tf32"),
)
WGMMA_PROBES, WGMMA_ARCH = ("wgmma_f16",), "sm_90a"
ROUNDS = 9
ARRAY_BYTES = 2**30
CHASE_BYTES, L2_CHASE_BYTES, L2_READ_BYTES = 2**28, 2**24, 24 * 2**20
LINE_WORDS = 32  # one visit per 128 bytes
CHAINS = 16  # of probes.cu
STREAM_THREADS = 256
SETTLE_S, SETTLED = 4.0, 0.003  # at most so long, until two readings of the clock differ by less than this share
# Copies under way in each of 256 threads, and blocks per multiprocessor: 16 bytes each, from 4 to 96 KiB.
IN_FLIGHT = ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (6, 2), (8, 2), (8, 3))
HOLD_STEPS = 2**14  # barriers of one block, some tenths of a millisecond, in which the host queues what is timed
BARRIER_THREADS = (64, 128, 256, 512, 1024)
FRAGMENTS = 4  # of A that a warp multiplies, and of B at the most; of probes.cu
WARPS = (4, 8, 16)  # per multiprocessor, and
COLUMNS = (1, 2, 4)  # fragments of B per warp, that mma.sync is tried with
WARPGROUPS = ((1, 1), (2, 1), (1, 2))  # of a block, and blocks per multiprocessor, that wgmma is tried with
PRODUCTS, WGMMA_PRODUCTS = 2**19, 2**13  # instructions per multiprocessor and launch
BURST = 8  # launches of one sample
TF32_BITS = -(2**13)  # all but the last 13 bits of a float32
SUMS_WITHIN = 0.05  # room for what up to 2**15 sums lose where the tensor cores cut off; less than a step in twenty


class UnknownQuantity(ValueError):
    """A quantity that no microbenchmark measures."""


class UnsuitableGpu(RuntimeError):
    """A GPU that the probes cannot run on, or that is not as ``harness/machines.py`` has it."""


def probes_for(arch: str) -> tuple[str, ...]:
    """List the probes whose instructions an architecture has."""
    return PROBES + (WGMMA_PROBES if arch == WGMMA_ARCH else ())


def probe_module(arch: str) -> tvm.IRModule:
    """Make one PrimFunc per probe that an architecture can run.

    Each is ``probe(source, sink, marks, grid, threads, first, steps, width, count)``. ``source`` and ``sink`` are int32
    arrays, ``marks`` two int64 (cycles, nanoseconds); ``grid`` blocks of ``threads``; the last four are the probe's own
    numbers (``lab/probes.cu``).
    """
    text = SOURCE.read_text(encoding="utf-8")
    return tvm.IRModule({name: _probe(name, text) for name in probes_for(arch)})


def _probe(name: str, text: str) -> tvm.tirx.PrimFunc:
    @T.prim_func(s_tir=True, private=False)
    def probe(
        source_handle: T.handle,
        sink_handle: T.handle,
        marks_handle: T.handle,
        grid: T.int32,
        threads: T.int32,
        first: T.int32,
        steps: T.int32,
        width: T.int32,
        count: T.int32,
    ):
        source_words, sink_words = T.int32(), T.int32()
        source = T.match_buffer(source_handle, (source_words,), "int32")
        sink = T.match_buffer(sink_handle, (sink_words,), "int32")
        marks = T.match_buffer(marks_handle, (2,), "int64")
        for _block in T.thread_binding(grid, thread="blockIdx.x"):
            for _thread in T.thread_binding(threads, thread="threadIdx.x"):
                T.evaluate(
                    cuda_func_call(
                        name, source.data, sink.data, marks.data, first, steps, width, count, source_code=text
                    )
                )

    return probe.with_attr("global_symbol", f"{name}_probe")


def build_probes(machine: GpuSpec, compiler: Compiler) -> tvm.runtime.Executable:
    """Build all probes as one executable; where a GPU is present, of the cubin that the project's own nvcc made."""
    if not machine.has_cp_async:
        raise UnsuitableGpu(f"the microbenchmarks need cp.async, which {machine.arch} lacks; run on sm_80 or newer")
    with cuda_compiler(lambda source: compile_cubin(source, machine.arch, compiler).data):
        return tvm.compile(probe_module(machine.arch), target=machine.target())


class Bench:
    """The GPU at hand with the probes loaded, and a GiB to read and one to write."""

    def __init__(self, machine: GpuSpec, compiler: Compiler) -> None:
        self.torch = torch = GpuBackend().torch
        self.device = device_facts(torch, machine)
        require_memory(torch)
        executable = build_probes(machine, compiler)
        self.probes = {name: executable[f"{name}_probe"] for name in probes_for(machine.arch)}
        self.sms = self.device["sms"]
        words = ARRAY_BYTES // 4
        seeded = torch.Generator("cuda").manual_seed(0)
        self.source = torch.randint(0, 1 << 16, (words,), dtype=torch.int32, device="cuda", generator=seeded)
        self.sink = torch.zeros(words, dtype=torch.int32, device="cuda")
        self.marks = torch.zeros(2, dtype=torch.int64, device="cuda")

    def launch(self, probe: str, *, grid=1, threads=1, first=0, steps=0, width=1, count=0, source: Any = None) -> None:
        """Launch a probe on the current stream; ``source`` stands in for the GiB of random words."""
        arrays = (self.source if source is None else source, self.sink, self.marks)
        self.probes[probe](*arrays, grid, threads, first, steps, width, count)

    def sample(
        self, run: Callable[[int], None], check: Callable[[int], None] | None = None, cold: bool = False
    ) -> list[float]:
        """Time ``run(round)`` in nanoseconds, per round; round 0 warms up and is not among them.

        ``check(round)`` follows each run; with ``cold`` the L2 is filled with other, clean data before each.
        """
        times = []
        for number in range(ROUNDS + 1):
            if cold:
                self.sink.amax()
            self.launch("meet", threads=1024, steps=HOLD_STEPS)
            start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(number)
            end.record()
            self.torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e6)
            if check:
                check(number)
        return times[1:]

    def times(self, probe: str, expected: Any, cold: bool = False, **launch: int) -> list[float]:
        """Time a probe as :meth:`sample` does; each of its threads leaves a word, of which ``expect`` is asked."""
        words = launch.get("grid", 1) * launch.get("threads", 1)
        return self.sample(lambda _: self.launch(probe, **launch), lambda _: self.expect(probe, words, expected), cold)

    def expect(self, what: str, words: int, expected: Any) -> None:
        """Raise WrongResult unless the first ``words`` of the sink, or their sum modulo 2³², are as expected."""
        found = self.sink[:words]
        if isinstance(expected, int):
            right = (int(found.sum(dtype=self.torch.int64)) - expected) % 2**32 == 0
        else:
            right = bool((found == expected).all())
        if not right:
            raise WrongResult(f"probe {what} left {found[:4].tolist()} …, expected {str(expected)[:80]}: not recorded")

    def expect_near(self, what: str, expected: Any) -> None:
        """Raise WrongResult unless the sink begins with these float32 sums, within SUMS_WITHIN of their RMS."""
        found = self.sink.view(self.torch.float32)[: len(expected)]
        error, rms = float((found - expected).abs().max()), float(expected.square().mean().sqrt())
        if not error <= SUMS_WITHIN * rms:
            raise WrongResult(f"probe {what} is off by {error:.4g}, where sums are about {rms:.4g}: not recorded")

    def total(self, words: int) -> int:
        """Sum the first words of the source."""
        return int(self.source[:words].sum(dtype=self.torch.int64))

    def settle(self) -> None:
        """Keep the GPU busy until its clock stays where it is."""
        begun, before = time.perf_counter(), 0.0
        while time.perf_counter() - begun < SETTLE_S:
            for _ in range(20):
                self.launch("fma_many", grid=2 * self.sms, threads=1024, steps=2**14)
            self.torch.cuda.synchronize()
            clock = self.clock_mhz()
            if time.perf_counter() - begun > SETTLE_S / 8 and abs(clock - before) < SETTLED * clock:
                return
            before = clock

    def clock_mhz(self) -> float:
        """The SM clock during the last probe that holds a stopwatch."""
        cycles, nanoseconds = self.marks.tolist()
        return 1e3 * cycles / nanoseconds

    @cached_property
    def chain(self) -> tuple[Any, Any]:
        """:func:`chase_ring` over :data:`CHASE_BYTES`."""
        return chase_ring(self.torch, CHASE_BYTES)


def chase_ring(torch: Any, size_bytes: int) -> tuple[Any, Any]:
    """Link all lines of an array in one random cycle; also the places in the order of the visits."""
    order = torch.randperm(size_bytes // (4 * LINE_WORDS), device="cuda").to(torch.int32) * LINE_WORDS
    links = torch.zeros(size_bytes // 4, dtype=torch.int32, device="cuda")
    links[order.long()] = order.roll(-1)
    return links, order


def device_facts(torch: Any, machine: GpuSpec) -> dict[str, int]:
    """Ask the driver for its limits; UnsuitableGpu where they contradict the limits in ``harness/machines.py``."""
    properties = torch.cuda.get_device_properties(0)
    limits = {
        "smem_per_block_bytes": properties.shared_memory_per_block_optin,
        "smem_per_sm_bytes": properties.shared_memory_per_multiprocessor,
        "threads_per_sm": properties.max_threads_per_multi_processor,
        "registers_per_sm": properties.regs_per_multiprocessor,
        "warp_size": properties.warp_size,
    }
    for name, value in limits.items():
        if value != (known := getattr(machine, name)):
            table = f"harness/machines.py has {known} for {machine.arch}; correct the table first"
            raise UnsuitableGpu(f"the driver reports {name} = {value}, {table}")
    return {"sms": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size, **limits}


def require_memory(torch: Any) -> None:
    """Raise UnsuitableGpu where the arrays and what checks them would not fit."""
    free, needed = torch.cuda.mem_get_info()[0] / 2**30, 4 * ARRAY_BYTES / 2**30
    if free < needed:
        what = f"{free:.1f} GiB of device memory are free, the microbenchmarks need {needed:.0f}"
        raise UnsuitableGpu(f"{what}; end what else runs on the GPU")


Points = Iterator[tuple[float | None, list[float]] | tuple[float | None, list[float], str]]


@dataclass(frozen=True)
class Benchmark:
    """One quantity: how it is measured, what is varied, and between which values it can be believed.

    ``measure`` yields the samples of one point after the other, as (value varied or None, samples), and last, where
    it chose something, what. ``arch`` is the only architecture that has what it measures; "" where all have.
    """

    name: str
    how: str
    over: str
    plausible: tuple[float, float]
    measure: Callable[[Bench], Points]
    arch: str = ""

    def runs_on(self, arch: str) -> bool:
        """Return whether an architecture has what is measured."""
        return self.arch in ("", arch)


BENCHMARKS: dict[str, Benchmark] = {}


def quantity(low: float, high: float, over: str = "", arch: str = "") -> Callable[[Callable[[Bench], Points]], Any]:
    """Declare a function as the measurement of the quantity of its name; its docstring says how."""

    def declare(measure: Callable[[Bench], Points]) -> Callable[[Bench], Points]:
        how = " ".join((measure.__doc__ or measure.__name__).split())  # python -OO keeps no docstrings
        BENCHMARKS[measure.__name__] = Benchmark(measure.__name__, how, over, (low, high), measure, arch)
        return measure

    return declare


@quantity(500, 4000)
def sm_clock_mhz(bench: Bench) -> Points:
    """Cycles over nanoseconds of one block, all multiprocessors busy with multiply-adds"""
    clocks: list[float] = []
    busy = {"grid": 2 * bench.sms, "threads": 1024, "steps": 2**15}
    bench.sample(lambda _: bench.launch("fma_many", **busy), lambda _: clocks.append(bench.clock_mhz()))
    yield None, clocks[1:]


@quantity(1000, 1e6)
def fp32_gflops(bench: Bench) -> Points:
    """Independent multiply-adds in registers, 16 chains a thread, 2048 threads per multiprocessor (1024 twice)"""
    yield None, _fma_gflops(bench, 2 * bench.sms, 1024, 2**15)


@quantity(1000, 1e6)
def fp32_gflops_one_warp_per_scheduler(bench: Bench) -> Points:
    """Independent multiply-adds as those of fp32_gflops, 4 warps per multiprocessor"""
    yield None, _fma_gflops(bench, bench.sms, 128, 2**18)


def _fma_gflops(bench: Bench, grid: int, threads: int, steps: int) -> list[float]:
    lanes = bench.torch.arange(threads, device="cuda", dtype=bench.torch.int32).repeat(grid)
    expected = CHAINS * (lanes + steps) + sum(range(CHAINS))
    times = bench.times("fma_many", expected, grid=grid, threads=threads, steps=steps)
    return [2 * CHAINS * steps * grid * threads / ns for ns in times]


@quantity(0.5, 20)
def fma_latency_ns(bench: Bench) -> Points:
    """One thread's chain of dependent multiply-adds"""
    steps = 2**21
    yield None, [ns / steps for ns in bench.times("fma_chain", steps, steps=steps)]


@quantity(3, 100)
def shared_latency_ns(bench: Bench) -> Points:
    """One thread's chain of dependent 4-byte loads from shared memory"""
    steps = 2**18
    yield None, [ns / steps for ns in bench.times("chase_shared", 33 * steps % 1024, steps=steps)]


@quantity(100, 3000)
def dram_latency_ns(bench: Bench) -> Points:
    """One thread's chain of dependent loads over 256 MiB, one random visit per 128-byte line, each line once, L2
    filled with other data before; address arithmetic included"""
    yield None, _chase(bench, *bench.chain, steps=2**14, cold=True)


@quantity(50, 1000)
def l2_latency_ns(bench: Bench) -> Points:
    """One thread's chain of dependent loads as that of dram_latency_ns, over 16 MiB, all of it visited before"""
    links, order = chase_ring(bench.torch, L2_CHASE_BYTES)
    bench.launch("chase", steps=len(order), source=links)
    yield None, _chase(bench, links, order, steps=2**14, cold=False)


def _chase(bench: Bench, links: Any, order: Any, steps: int, cold: bool) -> list[float]:
    # Each round goes on from where the one before ended, so that no line is met twice.
    firsts = [int(order[number * steps % len(order)]) for number in range(ROUNDS + 2)]
    times = bench.sample(
        lambda number: bench.launch("chase", first=firsts[number], steps=steps, source=links),
        lambda number: bench.expect("chase", 1, firsts[number + 1]),
        cold,
    )
    return [ns / steps for ns in times]


@quantity(20, 20000)
def copy_gb_s(bench: Bench) -> Points:
    """Bytes read and written of a copy of 1 GiB, by our kernel (16 bytes a lane, 4 loads under way) or torch's copy_,
    whichever is faster"""

    def check(_number: int) -> None:
        if not bench.torch.equal(bench.sink, bench.source):
            raise WrongResult("probe copy left another content than its source's: not recorded")
        bench.sink.zero_()

    own = bench.sample(lambda _: bench.launch("copy", grid=8 * bench.sms, threads=256, count=ARRAY_BYTES // 16), check)
    torchs = bench.sample(lambda _: bench.sink.copy_(bench.source), check)
    yield None, [2 * ARRAY_BYTES / ns for ns in min(own, torchs, key=statistics.median)]


@quantity(20, 20000)
def read_gb_s(bench: Bench) -> Points:
    """Sums of 1 GiB, 16 bytes a lane, 4 loads under way, 2048 threads per multiprocessor"""
    yield None, _read(bench, ARRAY_BYTES, passes=1)


@quantity(100, 100000)
def l2_read_gb_s(bench: Bench) -> Points:
    """Sums as those of read_gb_s, of 24 MiB, 64 times in one launch, past the first-level cache"""
    yield None, _read(bench, L2_READ_BYTES, passes=64)


def _read(bench: Bench, size_bytes: int, passes: int) -> list[float]:
    expected, launch = passes * bench.total(size_bytes // 4), {"grid": 8 * bench.sms, "threads": 256}
    times = bench.times("read", expected, **launch, steps=passes, count=size_bytes // 16)
    return [passes * size_bytes / ns for ns in times]


@quantity(16, 160)
def shared_bytes_per_clock(bench: Bench) -> Points:
    """Conflict-free 16-byte loads by 1024 threads of each multiprocessor, over the cycles of one block"""
    steps, threads = 2**12, 1024
    rates: list[float] = []
    expected = _shared_sums(bench, steps, threads)

    def check(_number: int) -> None:
        bench.expect("read_shared", threads * bench.sms, expected)
        rates.append(8 * 16 * threads * steps / int(bench.marks[0]))

    bench.sample(lambda _: bench.launch("read_shared", grid=bench.sms, threads=threads, steps=steps), check)
    yield None, rates[1:]


def _shared_sums(bench: Bench, steps: int, threads: int) -> Any:
    words = bench.source[:2048] & 7
    starts = bench.torch.arange(1024, device="cuda")
    eight = sum(words[starts + 128 * part] for part in range(8))
    cycle = sum(eight[(starts + 32 * step) % 1024] for step in range(32))  # the starts come back after 32 steps
    return (cycle * (steps // 32))[:threads].repeat(bench.sms)


@quantity(1, 2000, over="threads per block")
def barrier_ns(bench: Bench) -> Points:
    """__syncthreads in a loop, one block per multiprocessor"""
    steps = 2**15
    for threads in BARRIER_THREADS:
        times = bench.times("meet", bench.sink.new_tensor(steps), grid=bench.sms, threads=threads, steps=steps)
        yield threads, [ns / steps for ns in times]


@quantity(100, 5000)
def cp_async_latency_ns(bench: Bench) -> Points:
    """cp.async of 16 bytes by each of 256 threads from places not visited before, commit, wait_group 0, barrier; one
    block on the whole GPU"""
    yield None, _round_trips(bench, grid=1, width=1)


@quantity(100, 20000, over="bytes per multiprocessor and round trip")
def cp_async_loaded_latency_ns(bench: Bench) -> Points:
    """As cp_async_latency_ns, by one block on every multiprocessor at once, 1 to 8 times 16 bytes a thread"""
    for width in (1, 2, 4, 8):
        yield 16 * STREAM_THREADS * width, _round_trips(bench, bench.sms, width)


def _round_trips(bench: Bench, grid: int, width: int) -> list[float]:
    # Of ``width`` vectors a thread; no tile is visited twice in a launch.
    torch = bench.torch
    heads = bench.source.view(-1, width * STREAM_THREADS, 4)[:, :STREAM_THREADS, 0].sum(1, dtype=torch.int64)
    tiles = len(heads)
    steps = min(2**11, tiles // grid)

    def check(number: int) -> None:
        visits = torch.arange(number * grid * steps, (number + 1) * grid * steps, device="cuda")
        # The kernel's index wraps at 2³²; the number of tiles is a power of two, so that this changes nothing.
        bench.expect("round_trip", grid * STREAM_THREADS, int(heads[visits * 40503 % tiles].sum()))

    launch = {"grid": grid, "threads": STREAM_THREADS, "steps": steps, "width": width, "count": ARRAY_BYTES // 16}
    times = bench.sample(
        lambda number: bench.launch("round_trip", first=number * grid * steps, **launch), check, cold=True
    )
    return [ns / steps for ns in times]


@quantity(10, 20000, over="bytes in flight per multiprocessor")
def in_flight_gb_s(bench: Bench) -> Points:
    """Little's law: 256 threads of each block keep 1 to 8 cp.async of 16 bytes under way, 1 to 3 blocks per
    multiprocessor, through up to 1 GiB"""
    for copies, blocks in IN_FLIGHT:
        grid = blocks * bench.sms
        steps = ARRAY_BYTES // (16 * STREAM_THREADS * grid)
        words = 4 * STREAM_THREADS * grid * steps
        launch = {"grid": grid, "threads": STREAM_THREADS, "steps": steps, "width": copies}
        times = bench.times("stream_async", bench.total(words), cold=True, **launch)
        yield 16 * STREAM_THREADS * copies * blocks, [4 * words / ns for ns in times]


@quantity(200, 20000)
def launch_ns(bench: Bench) -> Points:
    """An empty kernel of one warp, 1000 times in a CUDA graph"""
    launches, stream = 1000, bench.torch.cuda.Stream()
    with bench.torch.cuda.stream(stream):
        bench.launch("nothing", threads=32)
    bench.torch.cuda.synchronize()
    graph = bench.torch.cuda.CUDAGraph()
    with bench.torch.cuda.graph(graph):
        for _ in range(launches):
            bench.launch("nothing", threads=32)
    yield None, [ns / launches for ns in bench.sample(lambda _: graph.replay())]


@quantity(0.5, 5000)
def block_start_ns(bench: Bench) -> Points:
    """A grid of empty blocks of one warp, 16384 for each multiprocessor: time of one block of one multiprocessor"""
    blocks = 2**14
    times = bench.sample(lambda _: bench.launch("nothing", grid=blocks * bench.sms, threads=32))
    yield None, [ns / blocks for ns in times]


@quantity(5000, 1e7)
def mma_f16_gflops(bench: Bench) -> Points:
    """mma.sync.m16n8k16 of normally distributed float16 in registers, sums in float32; 8 launches in a row of
    524288 instructions per multiprocessor"""
    yield _fastest(bench, "mma_f16", _mma_setups, _normal((max(WARPS), FRAGMENTS * 32 * 6 * 2), "float16"))


@quantity(2000, 1e7)
def mma_tf32_gflops(bench: Bench) -> Points:
    """mma.sync.m16n8k8 as for mma_f16_gflops, float32 cut to TF32"""
    values = _normal((max(WARPS), FRAGMENTS * 32 * 6), "float32")
    yield _fastest(bench, "mma_tf32", _mma_setups, (values.view("int32") & TF32_BITS).view("float32"))


@quantity(50000, 1e7, arch=WGMMA_ARCH)
def wgmma_f16_gflops(bench: Bench) -> Points:
    """wgmma.m64n256k16 of normally distributed float16 in shared memory, 128-byte swizzle, sums in float32, 4 to 8
    instructions of a warpgroup under way; 8 launches in a row of 8192 instructions per multiprocessor"""
    yield _fastest(bench, "wgmma_f16", _wgmma_setups, _normal((128 + 256, 64), "float16"))


@dataclass(frozen=True)
class TensorCoreSetup:
    """One way to keep the tensor cores busy: how; the launch, and the operations of one multiprocessor in it; the sums
    that a block's threads must leave."""

    how: str
    launch: dict[str, int]
    operations: int
    sums: np.ndarray


def _normal(shape: tuple[int, int], dtype: str) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def _mma_setups(values: np.ndarray, sms: int) -> Iterator[TensorCoreSetup]:
    depth = 32 // values.itemsize
    for warps, columns in itertools.product(WARPS, COLUMNS):
        accumulators = FRAGMENTS * columns
        steps = PRODUCTS // (warps * accumulators)
        yield TensorCoreSetup(
            f"{warps} warps per multiprocessor, {accumulators} accumulators a warp",
            {"grid": sms, "threads": 32 * warps, "steps": steps, "width": columns},
            PRODUCTS * 2 * 16 * 8 * depth,
            steps * mma_sums(values[:warps], columns),
        )


def mma_sums(values: np.ndarray, columns: int) -> np.ndarray:
    """Reckon each lane's sum of one step of ``mma_f16`` or ``mma_tf32``; a row of ``values`` is what one warp loads.

    By the fragments of the PTX ISA: lane 4·g + t has rows g and g + 8 of A and column g of B, of each the places t in
    both halves of k; and of C rows g and g + 8, columns 2·t and 2·t + 1.
    """
    packed = 4 // values.itemsize
    a, b = np.split(values.astype("float64"), [FRAGMENTS * 32 * 4 * packed], axis=1)
    a = a.reshape(-1, FRAGMENTS, 8, 4, 2, 2, packed).sum((1, 5)).reshape(-1, 8, 8 * packed)
    b = b.reshape(-1, FRAGMENTS, 4, 2, 8 * packed)[:, :columns].sum((1, 3))
    return (a @ b.swapaxes(1, 2)).reshape(-1)


def _wgmma_setups(values: np.ndarray, sms: int) -> Iterator[TensorCoreSetup]:
    for groups, blocks in WARPGROUPS:
        steps = WGMMA_PRODUCTS // (4 * groups * blocks)
        yield TensorCoreSetup(
            f"{groups} warpgroup(s) a block, {blocks} block(s) per multiprocessor",
            {"grid": blocks * sms, "threads": 128 * groups, "steps": steps},
            WGMMA_PRODUCTS * 2 * 64 * 256 * 16,
            steps * wgmma_sums(values)[: 128 * groups],
        )


def wgmma_sums(values: np.ndarray) -> np.ndarray:
    """Reckon each thread's sum of one step of ``wgmma_f16``: a warp has 16 rows of C, lanes as in ``mma_sums``."""
    a, b = np.split(values.astype("float64"), [128])
    return (a.reshape(8, 2, 8, 64).sum(1) @ b.reshape(32, 4, 2, 64).sum((0, 2)).T).reshape(-1)


def _fastest(
    bench: Bench, probe: str, setups_of: Callable[[np.ndarray, int], Iterator[TensorCoreSetup]], values: np.ndarray
) -> tuple[None, list[float], str]:
    setups, operands = list(setups_of(values, bench.sms)), words_on_gpu(bench.torch, values)
    rates = [_burst_gflops(bench, probe, setup, operands) for setup in setups]
    best = max(range(len(setups)), key=lambda number: statistics.median(rates[number]))
    return None, rates[best], f"; the fastest of {len(setups)} setups: {setups[best].how}"


def words_on_gpu(torch: Any, values: np.ndarray) -> Any:
    """Put values on the GPU as the int32 words that probes take."""
    return torch.from_numpy(values.view("int32").reshape(-1)).cuda()


def _burst_gflops(bench: Bench, probe: str, setup: TensorCoreSetup, operands: Any) -> list[float]:
    expected = bench.torch.from_numpy(setup.sums).float().cuda().repeat(setup.launch["grid"])

    def burst(_number: int) -> None:
        # Again and again, so that the clock of a busy GPU is what counts.
        for _ in range(BURST):
            bench.launch(probe, source=operands, **setup.launch)

    times = bench.sample(burst, lambda _: bench.expect_near(probe, expected))
    return [BURST * setup.operations * bench.sms / ns for ns in times]


def chosen(only: str | None) -> list[Benchmark]:
    """Choose the benchmarks named, comma between them, in their order; all without names."""
    names = list(BENCHMARKS) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in BENCHMARKS:
            raise UnknownQuantity(f"--only {name!r} is no quantity; there are {', '.join(BENCHMARKS)}")
    return [benchmark for name, benchmark in BENCHMARKS.items() if name in names]


def measure_quantity(bench: Bench, benchmark: Benchmark, revision: str) -> Quantity:
    """Measure one quantity; WrongResult for outputs that are not right and medians that cannot be believed."""
    points = list(benchmark.measure(bench))
    medians = tuple(statistics.median(samples) for _, samples, *_ in points)
    low, high = benchmark.plausible
    for median in medians:
        if not low <= median <= high:
            raise WrongResult(f"{benchmark.name} = {median:.4g} is not between {low:g} and {high:g}: not recorded")
    return Quantity(
        medians=medians,
        over=benchmark.over,
        at=tuple(at for at, *_ in points if at is not None),
        origin=benchmark.how + "".join(choice for _, _, *choices in points for choice in choices),
        samples=tuple(tuple(samples) for _, samples, *_ in points),
        revision=revision,
        recorded_at=now(),
    )


def measure_rates(
    machine: GpuSpec, compiler: Compiler, benchmarks: list[Benchmark], out: Path, provenance: dict[str, Any]
) -> Iterator[tuple[str, Quantity, Path]]:
    """Measure quantities one after the other, each in the GPU's file before the next begins.

    A file that is there keeps the quantities that are not measured anew. ``provenance`` (command, revision,
    dirty) goes into the file as it is. Yields each quantity's name, what was found, and the file.
    """
    path = path_of(machine.arch, machine.gpu, out)
    kept = read_rates_file(path).quantities if path.exists() else {}
    bench = Bench(machine, compiler)
    bench.settle()
    environment = provenance | gpu_identity()
    environment |= {"before": vars(gpu_state()), "versions": versions(GpuBackend(), compiler.version)}
    environment |= {"probes_sha256": hashlib.sha256(SOURCE.read_bytes()).hexdigest(), "recorded_at": now()}
    file = RatesFile(machine.arch, machine.gpu, bench.device, kept, environment)
    for benchmark in benchmarks:
        found = measure_quantity(bench, benchmark, provenance["revision"])
        environment["after"] = vars(gpu_state())
        file = msgspec.structs.replace(file, quantities={**file.quantities, benchmark.name: found})
        yield benchmark.name, found, file.save(out)
