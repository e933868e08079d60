"""Build workloads bound by memory, verify them, and measure their bandwidth beside a copy of as many bytes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.harness.build import Lowered, asynchronous_copies, compiled, executable, lower_schedule
from tensorir_ladder.harness.execution import Backend, GpuBackend, device_properties
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.models.time import stream_bound
from tensorir_ladder.harness.race import Contender, Racecourse, require_room, sets_needed
from tensorir_ladder.harness.records import StreamRecord, Verification, shape_text
from tensorir_ladder.harness.roofline import stream_roofline
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.verify import WALK, Trial, WrongResult, draw_seeds, epsilon, half_units, hold
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.loops.vectorization import VECTOR_BYTES, dtype_bytes
from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.recipes import BandwidthTile, Staging, spread_elements, spread_reduction, spread_rows
from tensorir_ladder.schedules.workloads import gelu, row_sum, scale_shift, softmax

MIB = 2**20
DTYPES = ("float32", "float16")
VARIANTS = ("direct", "staged")
SEEDS = 2
SCALE, SHIFT = 1.5, 0.25
FUNCTIONS = 32  # eps of what erf, exponentials and divisions may be off, fast ones as nvcc is told to use
MOST_TILES, LEAST_TILES = 8, 5  # of a block: enough for as many stages, few enough that all blocks end together
WAVES = 4  # blocks for each multiprocessor, where that leaves a block LEAST_TILES


def _elements(nbytes: int, dtype: str) -> tuple[int, ...]:
    return (max(1, nbytes // dtype_bytes(dtype)),)


def _rows_of(row_bytes: int, nbytes: int, dtype: str) -> tuple[int, ...]:
    return (max(1, nbytes // row_bytes), row_bytes // dtype_bytes(dtype))


def _schedule_elements(name: str, sch: Schedule, tile: BandwidthTile, staging: Staging | None) -> LoopRV:
    return spread_elements(sch, sch.get_sblock(name), tile, staging).tiles


def _schedule_row_sum(sch: Schedule, tile: BandwidthTile, staging: Staging | None) -> LoopRV:
    return spread_reduction(sch, sch.get_sblock("row_sum"), tile, staging).chunks


def _schedule_softmax(sch: Schedule, tile: BandwidthTile, staging: Staging | None) -> LoopRV:
    reductions = [sch.get_sblock(name) for name in ("row_max", "exp_sum")]
    return spread_rows(sch, sch.get_sblock("softmax"), reductions, tile, staging).rows


def erf(xp: Any, x: Any) -> Any:
    """Compute the error function of an array of ``xp``, numpy or torch."""
    return xp.special.erf(x) if hasattr(xp, "special") else np.vectorize(math.erf, otypes=[np.float64])(x)


def _softmax_reference(xp: Any, x: Any) -> Any:
    powers = xp.exp(x - xp.amax(x, 1)[:, None])
    return powers / xp.sum(powers, 1)[:, None]


@dataclass(frozen=True)
class Workload:
    """A workload: its function, its schedule, and what its output and its speed are compared with.

    ``shape`` gives the input's shape for a number of bytes and a dtype; ``schedule`` returns the loop to
    pipeline; ``reference(xp, x)`` computes in float64 with numpy or torch as ``xp``; ``rounding(xp, x, y)`` is how far
    float32 arithmetic may be off, element by element, in units of its eps, given the reference ``y``;
    ``operator(torch, x, y)`` is torch's own. ``flops`` are operations per input element, each of the formula's as one
    (exp and erf too).
    """

    function: Callable[[tuple[int, ...], str], tirx.PrimFunc]
    shape: Callable[[int, str], tuple[int, ...]]
    schedule: Callable[[Schedule, BandwidthTile, Staging | None], LoopRV]
    threads: int
    reference: Callable[[Any, Any], Any]
    rounding: Callable[[Any, Any, Any], Any]
    operator: Callable[[Any, Any, Any], Any]
    flops: int
    output_dimensions: int | None = None  # of the input's, from the left; None: all


WORKLOADS = {
    "scale_shift": Workload(
        lambda shape, dtype: scale_shift(shape, SCALE, SHIFT, dtype),
        _elements,
        partial(_schedule_elements, "scale_shift"),
        threads=256,
        reference=lambda xp, x: SCALE * x + SHIFT,
        rounding=lambda xp, x, y: abs(SCALE * x) + SHIFT,  # a multiplication and an addition, or one of both
        operator=lambda torch, x, y: torch.add(torch.tensor(SHIFT, dtype=x.dtype), x, alpha=SCALE, out=y),
        flops=2,
    ),
    "gelu": Workload(
        gelu,
        _elements,
        partial(_schedule_elements, "gelu"),
        threads=256,
        reference=lambda xp, x: x / 2 * (1 + erf(xp, x * math.sqrt(0.5))),
        rounding=lambda xp, x, y: FUNCTIONS * abs(x),  # 1 + erf, next to 0 of negative x, has the errors of 1
        operator=lambda torch, x, y: torch.ops.aten.gelu.out(x, approximate="none", out=y),
        flops=5,
    ),
    "row_sum": Workload(
        lambda shape, dtype: row_sum(*shape, dtype),
        partial(_rows_of, 32 * 1024),
        _schedule_row_sum,
        threads=128,
        reference=lambda xp, x: xp.sum(x, 1),
        rounding=lambda xp, x, y: WALK * x.shape[1] ** 0.5 * (xp.sqrt(xp.sum(x * x, 1)) + abs(y)),
        operator=lambda torch, x, y: torch.sum(x, 1, out=y),
        flops=1,
        output_dimensions=1,
    ),
    "softmax": Workload(
        lambda shape, dtype: softmax(*shape, dtype),
        partial(_rows_of, 16 * 1024),
        _schedule_softmax,
        threads=256,
        reference=_softmax_reference,
        rounding=lambda xp, x, y: FUNCTIONS * y,
        operator=lambda torch, x, y: torch.ops.aten._softmax.out(x, 1, False, out=y),
        flops=7,
    ),
}


@dataclass(frozen=True)
class BandwidthCase:
    """A workload of a shape to build, direct or with so many stages in shared memory, for a machine."""

    workload: str
    shape: tuple[int, ...]
    dtype: str
    variant: str
    stages: int
    machine: GpuSpec

    @property
    def kind(self) -> Workload:
        """The workload's entry in WORKLOADS."""
        return WORKLOADS[self.workload]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The output's shape."""
        return self.shape[: self.kind.output_dimensions]

    @property
    def bytes_moved(self) -> int:
        """Bytes of the input and of the output, each once."""
        return (math.prod(self.shape) + math.prod(self.output_shape)) * dtype_bytes(self.dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations, as :class:`Workload` counts them."""
        return self.kind.flops * math.prod(self.shape)

    @property
    def tile(self) -> BandwidthTile:
        """Cut the workload: direct, a tile to a block; staged, as many tiles as leave each multiprocessor WAVES."""
        if self.variant == "direct":
            return BandwidthTile(self.kind.threads, 4 if len(self.shape) == 1 else 2, 1)
        one = self.shape[-1] * dtype_bytes(self.dtype) if len(self.shape) > 1 else 2 * VECTOR_BYTES * self.kind.threads
        tiles = math.prod(self.shape) * dtype_bytes(self.dtype) // one
        wanted = tiles // (WAVES * self.machine.multiprocessors)
        return BandwidthTile(self.kind.threads, 2, min(MOST_TILES, max(LEAST_TILES, wanted)))

    def __str__(self) -> str:
        stages = f" {self.stages} stage{'s' if self.stages > 1 else ''}" if self.variant == "staged" else ""
        return f"{self.workload}[{self.variant}] {shape_text(self.shape)} {self.dtype}{stages}"


def bandwidth_cases(
    workloads: Sequence[str],
    sizes_mib: Sequence[float],
    variants: Sequence[str],
    stages: Sequence[int],
    dtype: str,
    machine: GpuSpec,
) -> list[BandwidthCase]:
    """List every case of these lists, by workload and size; ``stages`` are those of staged cases.

    Raise IllegalWorkload for an unknown name and for a size beyond 32-bit indexing.
    """
    for name, known, what in (
        *((workload, tuple(WORKLOADS), "workload") for workload in workloads),
        *((variant, VARIANTS, "variant") for variant in variants),
        (dtype, DTYPES, "dtype of a workload"),
    ):
        if name not in known:
            raise IllegalWorkload(
                f"unknown {what}", value=repr(name), limit=" | ".join(known), remedy="choose one of these"
            )
    cases = [
        BandwidthCase(workload, WORKLOADS[workload].shape(round(size * MIB), dtype), dtype, variant, count, machine)
        for workload in workloads
        for size in sizes_mib
        for variant in variants
        for count in (stages if variant == "staged" else (1,))
    ]
    for shape, workload in {(case.shape, case.workload) for case in cases}:
        WORKLOADS[workload].function(shape, dtype)  # refuses what cannot be indexed, before anything is built
    return cases


def lower_workload(case: BandwidthCase) -> Lowered:
    """Schedule a case, pipelined by ``pipeline_loop`` where it has several stages, and lower it to CUDA text.

    Raises what the workloads, the schedule functions and the pipeline raise for illegal sizes.
    """
    sch = Schedule(case.kind.function(case.shape, case.dtype))
    staging = Staging(case.stages, case.machine.smem_per_block_bytes) if case.variant == "staged" else None
    loop = case.kind.schedule(sch, case.tile, staging)
    if staging:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # fewer tiles than stages: the record has the stages made
            pipeline_loop(sch, loop, case.stages, "auto" if case.machine.has_cp_async else False)
    return lower_schedule(sch, case.machine, str(case))


def verify_workload(
    case: BandwidthCase,
    kernel: Lowered,
    backend: Backend,
    run: Callable | None = None,
    seeds: Sequence[int] = (),
) -> Verification:
    """Run a case on normal data of each seed, fresh ones where none are given, and check it as products are checked.

    ``run`` stands in for the kernel where it is loaded already. Raises WrongResult, naming the case.
    """
    run, seeds, found = run or backend.load(kernel), tuple(seeds) or draw_seeds(None, SEEDS), []
    for seed in seeds:
        try:
            found.append(hold(partial(_checked_sum, case, backend, run), workload_trial(case, backend, seed), backend))
        except WrongResult as wrong:
            where = f"{case} on {backend.name}, seed {seed} (--seed {seed} repeats it)"
            raise WrongResult(f"{where}: {wrong}") from None
    error, limit = max(found, key=lambda pair: pair[0] / pair[1])
    return Verification(True, backend.name, seeds, error, limit, integers_exact=False)


def workload_trial(case: BandwidthCase, backend: Backend, seed: int) -> Trial:
    """Draw a case's input, and compute what it must give and how far off each element may be.

    What the workload's own arithmetic explains, and half a unit in the last place of the output.
    """
    x = backend.normal(seed, case.shape, case.dtype)
    wide = backend.float64(x)
    reference = case.kind.reference(backend.xp, wide)
    error = epsilon("float32") * case.kind.rounding(backend.xp, wide, reference)
    limit = error + half_units(backend, abs(reference) + error, case.dtype)
    return Trial({"x": x}, reference, limit, case.dtype)


def _checked_sum(case: BandwidthCase, backend: Backend, run: Callable, x: Any, y: Any) -> None:
    # Errors within their limits, all of one sign, would leave a softmax's rows with another sum than 1.
    run(x, y)
    if case.workload != "softmax":
        return
    off = float(abs(backend.xp.sum(backend.float64(y), 1) - 1).max())
    most = epsilon(case.dtype) + FUNCTIONS * epsilon("float32")
    if not off <= most:
        raise WrongResult(f"a row's sum is {off:.3g} from 1, limit {most:.3g}")


def stages_built(kernel: Lowered) -> int:
    """Count the staged operand's stages as scheduled: 1 without a pipeline."""
    stage = kernel.pipeline.get("software_pipeline_stage", [0])
    return max(stage) - min(stage) + 1


class BandwidthCourse(Racecourse):
    """Inputs, outputs and a pair of buffers to copy, in as many sets as it takes to find the L2 cold."""

    def __init__(self, case: BandwidthCase, backend: GpuBackend) -> None:
        torch, floats = backend.torch, -(-case.bytes_moved // 8)

        def operands(seed: int) -> tuple[Any, ...]:
            # One set: input, poisoned output, source and destination of the copy.
            x = backend.normal(seed, case.shape, case.dtype)
            y = backend.poisoned(case.output_shape, case.dtype)
            return x, y, *(torch.zeros(floats, dtype=torch.float32, device="cuda") for _ in range(2))

        number = sets_needed(case.bytes_moved, device_properties(backend.torch).L2_cache_size)
        require_room(backend.torch, number * 2 * case.bytes_moved)  # with the copy's pair
        super().__init__(backend, [operands(n) for n in range(number)], case.bytes_moved)

    def beside(self, case: BandwidthCase) -> list[Contender]:
        """Return a copy in two forms, and torch's own operator.

        The driver's copy fell to two thirds of a kernel's rate with buffers of 1 GiB, on an H200; a negation moves
        as many bytes by an ordinary kernel.
        """
        return [
            ("copy", lambda x, y, source, target: target.copy_(source)),
            ("copy, negated", lambda x, y, source, target: self.torch.neg(source, out=target)),
            ("torch", lambda x, y, source, target: case.kind.operator(self.torch, x, y)),
        ]


def measure_workloads(session: Session, cases: Sequence[BandwidthCase]) -> list[StreamRecord]:
    """Verify and time cases of one workload and shape, all in the same rounds, beside a copy and torch.

    A case that gets fewer stages than it asks for, because a block has no more tiles, is left out where another has
    that many already.
    """
    built: dict[tuple[str, int], tuple[BandwidthCase, Lowered, Callable, Verification]] = {}
    for case in cases:
        kernel = lower_workload(case)
        if (case.variant, stages_built(kernel)) not in built:
            kernel = compiled(kernel, session.compiler)
            run = executable(kernel)["main"]
            checked = verify_workload(case, kernel, session.backend, run, draw_seeds(session.seed, SEEDS))
            built[case.variant, stages_built(kernel)] = case, kernel, run, checked
    session.backend.torch.cuda.empty_cache()
    course = BandwidthCourse(cases[0], session.backend)
    own = [(kernel.label, partial(_on_own, run)) for _, kernel, run, _ in built.values()]
    rounds = course.race([*own, *course.beside(cases[0])], session.plan)
    held_to = session.said(stream_roofline(cases[0].machine, course.from_memory * cases[0].bytes_moved))
    for timing in rounds.timings:
        held_to.check(timing)
    *timings, copied, negated, torch = rounds.timings
    copy = min(copied, negated, key=lambda timing: timing.median_ms)
    return [
        _record(session, case, kernel, checked, rounds, timing, copy, torch)
        for (case, kernel, _, checked), timing in zip(built.values(), timings)
    ]


def _on_own(run: Callable, x: Any, y: Any, _source: Any, _target: Any) -> None:
    run(x, y)


def _record(session, case, kernel, checked, rounds, timing, copy, torch) -> StreamRecord:
    return StreamRecord(
        workload=case.workload,
        shape=case.shape,
        dtype=case.dtype,
        variant=case.variant,
        stages=stages_built(kernel),
        config=str(case.tile),
        bytes_moved=case.bytes_moved,
        flops=case.flops,
        timing=timing,
        copy=copy,
        torch=torch,
        verification=checked,
        resources=kernel.resources,
        barriers=kernel.loop_body.count("__syncthreads()"),
        cp_async=len(asynchronous_copies(kernel.loop_body)),
        bound=stream_bound(case.machine, case.bytes_moved, case.flops, timing.median_ms),
        **session.provenance(kernel, rounds),
    )
