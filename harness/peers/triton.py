"""A peer: a plain Triton matmul that we wrote, tuned over a fixed list of blocks, warps and stages.

Triton pipelines the k loop by ``num_stages``; the kernel's source does not. 1 is no pipeline; from 2 on loads are
asynchronous. For N stages Triton 3.6 buffers N − 1 k tiles in float32 and N in half precision (by the shared memory
that it reports for sm_90), so that its 3 stages hold as much as our 2 in float32.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.peers.entrant import Entrant, PeerFailed, PeerKind, PeerMissing, reason, say
from tensorir_ladder.harness.race import FINAL, TUNING, RoundPlan
from tensorir_ladder.harness.verify import WrongResult, draw_seeds, verify_launch
from tensorir_ladder.schedules.workloads import Matmul

STAGE_COUNTS = (1, 2, 3, 4, 5)
BAND_HEIGHT = 8  # blocks of rows whose programs share B's blocks in the L2 cache
FINALISTS_PER_STAGE = 2
INSTALL_HINT = ".venv/bin/python -m pip install triton (it comes with torch for Linux)"
# (block_m, block_n, block_k, warps). Float32 runs on the FMA pipes, with 16 to 64 accumulators a thread: 128 spill on
# sm_90. Half precision runs on the tensor cores, which need a large block_k.
FLOAT32_BLOCKS = (
    (32, 32, 32, 2),
    (64, 32, 32, 4),
    (64, 64, 16, 4),
    (64, 64, 32, 4),
    (64, 64, 32, 8),
    (128, 64, 16, 4),
    (128, 64, 32, 8),
    (64, 128, 16, 4),
    (128, 128, 16, 8),
    (128, 128, 32, 8),
)
HALF_BLOCKS = (
    (32, 32, 64, 2),
    (64, 64, 64, 4),
    (128, 64, 64, 4),
    (64, 128, 64, 4),
    (128, 128, 32, 4),
    (128, 128, 64, 4),
    (128, 128, 64, 8),
    (128, 256, 64, 8),
)
BLOCKS = {"float32": FLOAT32_BLOCKS, "float16": HALF_BLOCKS, "bfloat16": HALF_BLOCKS}
# Half precision, where only the best of all stage counts is wanted: few configurations, so that large shapes are tuned
# quickly; after each block its stage counts. Large blocks read least from memory, and four stages of the largest take
# 192 KiB of shared memory; small blocks make enough programs of small shapes.
HALF_SHORTLIST = (
    ((128, 256, 64, 8), (2, 3, 4)),
    ((256, 128, 64, 8), (3, 4)),
    ((128, 128, 64, 8), (3, 4)),
    ((128, 128, 64, 4), (3, 5)),
    ((128, 128, 32, 4), (4,)),
    ((128, 64, 64, 4), (4,)),
    ((64, 128, 64, 4), (4,)),
    ((64, 64, 64, 4), (3, 5)),
    ((32, 32, 64, 2), (5,)),
)


@dataclass(frozen=True)
class TritonCall:
    """One launch of a kernel: its programs, its arguments in order, and its constants and options by name."""

    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class BlockConfig:
    """One way to run the kernel: the block of C and k that a program takes, its warps, Triton's num_stages."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        stages = "1 stage" if self.stages == 1 else f"{self.stages} stages"
        return f"{self.block_m}x{self.block_n}x{self.block_k}, {self.warps} warps, {stages}"

    def programs(self, problem: Matmul) -> int:
        """Count the blocks that C is cut into."""
        return -(-problem.m // self.block_m) * -(-problem.n // self.block_n)

    def divides(self, problem: Matmul) -> bool:
        """Tell whether nothing of a block lies outside the operands."""
        return not (problem.m % self.block_m or problem.n % self.block_n or problem.k % self.block_k)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants and options that both kernels take."""
        block = {"block_m": self.block_m, "block_n": self.block_n, "block_k": self.block_k}
        return block | {"band_height": BAND_HEIGHT, "num_warps": self.warps, "num_stages": self.stages}

    def call(self, problem: Matmul, operands: tuple[Any, Any, Any]) -> TritonCall:
        """Describe one launch: ``operands``, then sizes and strides in elements."""
        b_steps = (problem.n, 1) if problem.layout == "nn" else (1, problem.k)
        arguments = (*operands, problem.m, problem.n, problem.k, problem.k, 1, *b_steps, problem.n, 1)
        return TritonCall(self.programs(problem), arguments, self.constants | {"whole": self.divides(problem)})


@dataclass(frozen=True)
class Tuning:
    """Times of the finalists in milliseconds, and the reason why a configuration could not take part."""

    times_ms: dict[BlockConfig, float]
    skipped: dict[BlockConfig, str]
    declared: int

    def best(self, stages: int | None = None) -> BlockConfig | None:
        """Return the fastest configuration, of one stage count if given; None where none of that count ran."""
        rivals = [config for config in self.times_ms if stages in (None, config.stages)]
        return min(rivals, key=lambda config: self.times_ms[config], default=None)

    @property
    def summary(self) -> str:
        """Say in a sentence how many configurations were tried, and why the others were not."""
        ran = f"fastest of {self.declared - len(self.skipped)} of {self.declared} declared configurations"
        reasons = "; ".join(f"{config}: {why}" for config, why in self.skipped.items())
        return f"{ran}; skipped: {reasons}" if reasons else ran


def declared_configs(dtype: str, every_stage: bool = False) -> list[BlockConfig]:
    """List every block of a dtype with every stage count; for 16 bits :data:`HALF_SHORTLIST` unless ``every_stage``.

    PeerFailed for a dtype that the kernel does not multiply as our steps do.
    """
    if dtype not in BLOCKS:
        raise PeerFailed(f"the Triton kernel accumulates in float32, which {dtype} does not allow")
    whole = tuple((block, STAGE_COUNTS) for block in BLOCKS[dtype])
    listed = whole if every_stage or dtype == "float32" else HALF_SHORTLIST
    return [BlockConfig(*block, count) for block, counts in listed for count in counts]


def launch(kernel: Any, problem: Matmul, config: BlockConfig) -> Callable[[Any, Any, Any], None]:
    """Make ``run(a, b, c)`` for one fixed configuration, on torch's current stream."""

    def run(*operands: Any) -> None:
        call = config.call(problem, operands)
        kernel[(call.programs,)](*call.arguments, **call.constants)

    return run


def compile_all(
    kernel: Any, problem: Matmul, configs: list[BlockConfig], operands: tuple[Any, Any, Any], smem_limit: int
) -> dict[BlockConfig, str]:
    """Compile configurations side by side, into Triton's cache; returns those that cannot run, each with the reason."""
    import triton

    waiting = {}
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            call = config.call(problem, operands)
            waiting[config] = kernel.warmup(*call.arguments, **call.constants, grid=(1,))
    skipped = {}
    for config, compiled in waiting.items():
        try:
            built = compiled.result() if isinstance(compiled, triton.FutureKernel) else compiled
            if built.metadata.shared > smem_limit:
                skipped[config] = f"needs {built.metadata.shared} bytes of shared memory, limit {smem_limit}"
        except (triton.TritonError, RuntimeError) as error:
            skipped[config] = reason(error)
    return skipped


def tune(kernel: Any, arena: Arena, machine: GpuSpec, configs: list[BlockConfig]) -> Tuning:
    """Check every configuration, time all in the same rounds, then the fastest of each stage count again."""
    import triton

    problem, started = arena.problem, time.perf_counter()
    say(f"triton: compiling {len(configs)} configurations for {problem.shape} {problem.dtype}")
    skipped = compile_all(kernel, problem, configs, arena.sets[0], machine.smem_per_block_bytes)
    say(f"triton: compiled after {time.perf_counter() - started:.1f} s; checking and timing")
    for config in [config for config in configs if config not in skipped]:
        try:
            verify_launch(launch(kernel, problem, config), problem, arena.backend, str(config), draw_seeds(count=1))
        except (triton.TritonError, WrongResult) as error:
            skipped[config] = reason(error)
    right = [config for config in configs if config not in skipped]
    for config, why in skipped.items():
        say(f"triton: skipped {config}: {why}")
    if not right:
        raise PeerFailed(f"none of {len(configs)} configurations ran: {next(iter(skipped.values()))}")
    tuning = Tuning(_finals(kernel, arena, right), skipped, len(configs))
    say(f"triton: chose {tuning.best()} after {time.perf_counter() - started:.1f} s")
    return tuning


def _finals(kernel: Any, arena: Arena, configs: list[BlockConfig]) -> dict[BlockConfig, float]:
    first = _times(kernel, arena, configs, TUNING)
    ranked = sorted(configs, key=lambda config: (config.stages, first[config]))
    alike = itertools.groupby(ranked, key=lambda config: config.stages)
    finalists = [config for _, rivals in alike for config in itertools.islice(rivals, FINALISTS_PER_STAGE)]
    return _times(kernel, arena, finalists, FINAL)


def _times(kernel: Any, arena: Arena, configs: list[BlockConfig], plan: RoundPlan) -> dict[BlockConfig, float]:
    rounds = arena.race([(str(config), launch(kernel, arena.problem, config)) for config in configs], plan)
    return {config: timing.median_ms for config, timing in zip(configs, rounds.timings)}


def load_kernel(module: str = "tensorir_ladder.harness.peers.triton_kernel") -> Any:
    """Import the kernel of a module, which Triton compiles at its first launch.

    PeerMissing without Triton, or with one that is too old to compile side by side.
    """
    try:
        import triton

        matmul = importlib.import_module(module).matmul
    except ImportError as error:
        raise PeerMissing(f"triton cannot be imported ({error}); {INSTALL_HINT}") from error
    if not hasattr(triton, "AsyncCompileMode"):
        raise PeerMissing(f"triton {triton.__version__} is too old, 3.6 or newer is needed; {INSTALL_HINT}")
    return matmul


def enter(arena: Arena, machine: GpuSpec, every_stage: bool = False) -> list[Entrant]:
    """Enter Triton's best configuration and, with ``every_stage``, the best of each stage count after it."""
    kernel = load_kernel()
    tuning = tune(kernel, arena, machine, declared_configs(arena.problem.dtype, every_stage))

    def entrant(name: str, stages: int | None) -> Entrant:
        config = tuning.best(stages)
        if config is None:
            why = next((why for skipped, why in tuning.skipped.items() if skipped.stages == stages), "not declared")
            return Entrant(name, status="failed", why=f"no configuration of {stages} stages ran: {why}")
        return Entrant(name, launch(kernel, arena.problem, config), str(config), why=tuning.summary)

    stages = STAGE_COUNTS if every_stage else ()
    return [entrant("triton", None), *(entrant(stage_name(count), count) for count in stages)]


def stage_name(stages: int) -> str:
    """Name, as ``triton-1stage``, ``triton-2stages``, …, the peer that is Triton's best with so many stages."""
    return f"triton-{stages}stage" + ("s" if stages > 1 else "")


KIND = PeerKind("triton", "our own Triton kernel, tuned", ("triton",), enter, "triton")
STAGES_KIND = PeerKind(
    "triton-stages",
    "triton, and its best with each of 1 to 5 stages",
    ("triton", *map(stage_name, STAGE_COUNTS)),
    functools.partial(enter, every_stage=True),
    "triton",
    in_all=False,
)
