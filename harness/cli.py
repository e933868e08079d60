"""The command line: one grammar for ``python -m harness COMMAND`` and ``python steps/stepN_name.py``."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from harness import depth
from harness.build import Case, Kernel, UnsupportedCase, compiled, lower
from harness.counters import NoProfiler, count
from harness.execution import GpuBackend, LlvmBackend, NoGpu, gpu_arch, gpu_machine, gpu_present, require_gpu
from harness.explain import aspects, why
from harness.microbench import BENCHMARKS, UnknownQuantity, UnsuitableGpu, chosen, measure_rates
from harness.model import predict_tile
from harness.peers import KINDS, UnknownPeer, find_peers
from harness.rate_files import RATES, BadRates, measured_gpus
from harness.records import (
    RESULTS,
    Counters,
    DepthForecast,
    Listing,
    Peer,
    Record,
    RecordError,
    StreamRecord,
    TunedConfig,
    check_writable,
    now,
    read_text,
)
from harness.session import ROOT, Journal, Session, git_state
from harness.streams import DTYPES as STREAM_DTYPES
from harness.streams import MIB, WORKLOADS, StreamCase, lower_stream, measure_streams, stream_cases, verify_stream
from harness.streams import VARIANTS as STREAM_VARIANTS
from harness.targets import DEFAULT_ARCH, MACHINES, UnknownTarget, machine_for
from harness.toolchain import CompileError, NoCompiler, compile_ptx, disassemble, find_compiler, require_compiler
from harness.tuning import tune, tuned_case
from harness.verify import WrongResult, verify
from schedules.errors import IllegalSchedule
from schedules.tiling import TileConfig
from schedules.vectorization import dtype_bytes
from schedules.workloads import DTYPES, LAYOUTS, Matmul
from steps.config import DEFAULT_STAGES, DEFAULT_TILE, STAGE_SET, TILE_SET, TUNING_STAGES, TUNING_TILES
from steps.registry import MalformedStep, Step, UnknownStep, find_steps

STREAM_SIZES, CPU_STREAM_MIB = "1,16,256,1024", 0.25
GPU_SIZES, CPU_SIZES, LISTING_SIZES = "256,512,1024,2048,4096", "256", "1024"
WRONG, BAD_INPUT, NOT_VERIFIED, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141
MOST_NUMBERS = 10_000
REFUSALS = (
    IllegalSchedule,
    UnknownStep,
    UnknownTarget,
    UnsupportedCase,
    UnknownPeer,
    NoCompiler,
    NoGpu,
    NoProfiler,
    CompileError,
    RecordError,
    MalformedStep,
    BadRates,
    UnknownQuantity,
    UnsuitableGpu,
)
EXAMPLES = """examples:
  python -m harness list                                    what there is
  python steps/step5_pipelining.py                          run one step and compare its variants
  python -m harness run --step 1-6 --size 1024              the ladder at one size
  python -m harness run --step 6 --tile best --size 4096    with the best tile of the declared set
  python -m harness verify --step 5 --shape 33x17x50        check a ragged shape
  python -m harness compile --step 5 --variant sync --show cuda
  python -m harness stream --workload softmax --mb 256      memory-bound, 1 to 5 stages, beside a copy
  python -m harness sweep --step 5 --stages 1-6 --size 512  every stage count, each a record
  python -m harness depth --step 5 --size 512               how many stages, by the model; needs no GPU
  python -m harness tune --step 5 --size 1024 --budget 120  the best of a declared space, kept on disk
  python -m harness run --step 5 --size 1024 --tile tuned   measured as it was tuned
"""


_warned: set[str] = set()  # a step's variants share their warnings, which are worth saying once


class UsageError(ValueError):
    """An option's value that cannot be understood."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 right, 1 wrong result, 2 refused, 3 could not be verified)."""
    arguments = _join_negative(list(sys.argv[1:] if arguments is None else arguments))
    options = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "harness", *_repeatable(arguments)])
    try:
        commands = {
            "list": _list,
            "run": _run,
            "verify": _verify,
            "compile": _compile,
            "sweep": _sweep,
            "counters": _counters,
            "tune": _tune,
            "microbench": _microbench,
            "depth": _depth,
            "stream": _stream,
        }
        return commands[options.command](options, command)
    except KeyboardInterrupt:
        print("interrupted; what is measured is on disk, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except MemoryError:
        print("error: out of memory; give a smaller shape, or run on a GPU", file=sys.stderr)
        return BAD_INPUT
    except WrongResult as wrong:
        print(f"error: wrong result: {wrong}", file=sys.stderr)
        return WRONG
    except (*REFUSALS, UsageError) as refused:
        print(f"error: {refused}", file=sys.stderr)
        return BAD_INPUT


def _join_negative(arguments: list[str]) -> list[str]:
    """Join an option and a value that begins with a minus, which argparse would take for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _repeatable(arguments: list[str]) -> list[str]:
    """The arguments that say what is measured, without those that say where results and tree lie."""
    places = ("--out", "--revision")
    kept = [argument for argument in arguments if not argument.startswith(tuple(f"{place}=" for place in places))]
    return [word for before, word in zip(["", *kept], kept) if word not in places and before not in places]


def run_step(file: str) -> None:
    """What ``python steps/stepN_name.py …`` does: ``python -m harness run --step N …``."""
    number = re.match(r"step(\d+)_", Path(file).name).group(1)
    sys.exit(main(["run", "--step", number, *sys.argv[1:]]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness",
        description="Build, verify and measure the steps of the ladder.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    texts = {
        "list": "steps, variants, tiles and architectures",
        "run": "verify, then measure where there is a GPU, beside cuBLAS and the step before",
        "verify": "check outputs only",
        "compile": "generate and compile the code, and say what came out; needs no GPU",
        "sweep": "run over tiles, stage counts and variants; each result is a record",
        "stream": "workloads bound by memory, pipelined alike: GB/s beside a copy and torch; each result is a record",
        "counters": "hardware counters by Nsight Compute: pipes, conflicts, stalls; each result is on disk",
        "tune": "measure a step's whole tuning space for each shape, confirm the best, keep it for --tile tuned",
        "depth": "what the depth model says of each stage count: time, memory, occupancy, latency hidden; needs no GPU",
        "microbench": "measure the GPU's own rates and latencies, which predictions need, into harness/rates/",
    }
    for name, text in texts.items():
        sub = commands.add_parser(
            name, help=text, description=text, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == "tune":
            _add_tuning_options(sub)
        elif name == "microbench":
            _add_microbench_options(sub)
        elif name == "stream":
            _add_stream_options(sub)
        elif name != "list":
            _add_options(sub, sweep=name == "sweep")
        if name in ("run", "sweep"):
            kinds = "; ".join(f"{kind.name}: {kind.what}" for kind in KINDS.values())
            peers = f"also time peers in the same rounds: a list, all or none (none). {kinds}"
            sub.add_argument("--peers", default="none", metavar="NAMES", help=peers)
        if name == "run":
            sub.add_argument("--calibrate", action="store_true", help="measure cuBLAS against itself: must give 1.00")
            sub.add_argument(
                "--again", metavar="RECORD", type=Path, help="measure a record's case again, old beside new"
            )
    return parser


def _add_problem_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--step", default="1-6", help="steps: 5 | 1-6 | 1,3 (all)")
    sub.add_argument("--size", help=f"square sizes: 256,512 ({GPU_SIZES} on a GPU, {CPU_SIZES} without)")
    sub.add_argument("--shape", help="shapes MxNxK[,MxNxK]; instead of --size")
    sub.add_argument("--dtype", default="float32", help=f"operands: {' | '.join(DTYPES)} (float32)")
    sub.add_argument("--out-dtype", help="output (that of the operands)")
    sub.add_argument("--layout", default="nn", help=f"B as stored: {' | '.join(LAYOUTS)}; nt is [N, K] (nn)")


def _add_places(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--revision", help="what to note as the revision where the tree is a clean copy without git")
    sub.add_argument("--out", type=Path, help="folder for records, or for listings with compile")


def _add_tuning_options(sub: argparse.ArgumentParser) -> None:
    _add_problem_options(sub)
    budget = "stop searching a step's shape after so many seconds, and confirm the best so far (no limit)"
    sub.add_argument("--budget", type=float, metavar="SECONDS", help=budget)
    sub.add_argument("--retune", action="store_true", help="measure even what is on disk and still good")
    _add_places(sub)
    sub.set_defaults(variant="default", stages=None, tile="default", arch=None, on="gpu", show=None)


def _add_options(sub: argparse.ArgumentParser, sweep: bool) -> None:
    _add_problem_options(sub)
    several = " (lists and ranges: 1-6, 2,4)" if sweep else ""
    sub.add_argument("--variant", help="variants' names, default or all (one step: all; several: default)")
    slots = f"{DEFAULT_STAGES}; with --tile best the best of {', '.join(map(str, STAGE_SET))}"
    sub.add_argument("--stages", help=f"ring slots of each shared operand{several} ({slots})")
    tiles = "MxNxK/TMxTN | default" + (" | all" if sweep else " | best | tuned")
    sub.add_argument("--tile", default="all" if sweep else "default", help=f"{tiles} (default tile: {DEFAULT_TILE})")
    sub.add_argument("--arch", help=f"one of {', '.join(MACHINES)} (the GPU's, else {DEFAULT_ARCH})")
    sub.add_argument("--on", default="auto", choices=("auto", "gpu", "llvm"), help="where to run kernels (auto)")
    sub.add_argument("--show", choices=("tir", "lowered", "cuda", "ptx", "sass"), help="print code")
    _add_places(sub)


def _add_microbench_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--only", metavar="NAME,…", help=f"quantities (all): {', '.join(BENCHMARKS)}")
    sub.add_argument("--revision", help="what to note as the revision where the tree is a clean copy without git")
    sub.add_argument("--out", type=Path, default=RATES, help="folder for the GPU's file (harness/rates)")


def _add_stream_options(sub: argparse.ArgumentParser) -> None:
    names = ",".join(WORKLOADS)
    sub.add_argument("--workload", default=names, help=f"workloads: {names} (all)")
    sub.add_argument("--mb", help=f"MiB (2^20 bytes) of the input: 1,256 or a range ({STREAM_SIZES})")
    sub.add_argument("--variant", default="all", help=f"{' | '.join(STREAM_VARIANTS)} | all (all)")
    sub.add_argument("--stages", default="1-5", help="ring slots of staged inputs, 1 unpipelined: 2 | 1-5 (1-5)")
    sub.add_argument("--dtype", default="float32", help=f"{' | '.join(STREAM_DTYPES)} (float32)")
    sub.add_argument("--arch", help=f"one of {', '.join(MACHINES)} (the GPU's, else {DEFAULT_ARCH})")
    sub.add_argument("--on", default="auto", choices=("auto", "gpu", "llvm"), help="where to run kernels (auto)")
    sub.add_argument("--revision", help="what to note as the revision where the tree is a clean copy without git")
    sub.add_argument("--verify", action="store_true", help="check outputs only, at the sizes given")
    sub.add_argument("--out", type=Path, help="folder for records; they go to its streams/")


def _list(_options: argparse.Namespace, _command: str) -> int:
    table = Table(title="Steps")
    for heading in ("step", "what", "variants (the first is the default)"):
        table.add_column(heading)
    for step in find_steps().values():
        table.add_row(step.name, step.title, ", ".join(step.variants))
    _console().print(table)
    print(f"default tile {DEFAULT_TILE}, {DEFAULT_STAGES} stages; --tile best chooses among {len(TILE_SET)}:")
    print("  " + ", ".join(map(str, TILE_SET)))
    slots = ", ".join(map(str, TUNING_STAGES))
    print(f"tune chooses among these and {len(TUNING_TILES) - len(TILE_SET)} more, with {slots} stages:")
    print("  " + ", ".join(map(str, TUNING_TILES[len(TILE_SET) :])))
    print(f"architectures: {', '.join(MACHINES)}")
    for file in measured_gpus():
        measured = sum(bool(quantity.samples) for quantity in file.quantities.values())
        print(f"rates of {file.gpu} ({file.arch}): {measured} of {len(BENCHMARKS)} measured by microbench")
    print(f"peers (run and sweep --peers): {', '.join(KINDS)}")
    return 0


def _run(options: argparse.Namespace, command: str) -> int:
    peers = find_peers(options.peers)
    if options.calibrate and peers:
        raise UsageError(f"--peers {options.peers}: --calibrate measures cuBLAS against itself; leave out one of them")
    if options.again:
        return _run_again(options, command)
    if options.calibrate:
        return _calibrate(options, command)
    if not _on_gpu(options):
        return _run_without_gpu(options)
    cases = _cases(options, GPU_SIZES, tunes=True)
    records = _measure(cases, options, command)
    _print_records(records)
    if len({case.step.number for case in cases}) == 1 and len({case.variant for case in cases}) > 1:
        _print_variants([_build(case) for case in _per_variant(cases)])
    for record in records:
        if record.predicted_gain_pct is not None and record.default_variant:
            gains = (
                f"predicted {record.predicted_gain_pct:+.0f} %, measured {record.improvement_over_previous_pct:+.0f} %"
            )
            print(f"gain over the step before at {record.m}x{record.n}x{record.k}, tile {record.tile}: {gains}")
    return 0


def _run_without_gpu(options: argparse.Namespace) -> int:
    """Verify through LLVM, say what was and was not done, compare variants by their code."""
    cases = _cases(options, CPU_SIZES)
    kernels, code = [], 0
    if options.out:
        check_writable(options.out)
        print(f"no record will be written to {options.out}: nothing is measured without a GPU")
    why_not = "speed not measured: " + ("--on llvm" if gpu_present() else "no GPU")
    if find_peers(options.peers):
        print(f"peers ({options.peers}) are only timed beside a measured step; {why_not}")
    for case in cases:
        kernel = _build(case)
        kernels.append(kernel)
        code = max(code, _verify_one(kernel, LlvmBackend(), why_not))
        _show(kernel, options.show)
    try:
        require_compiler()
    except NoCompiler as missing:
        print(f"not compiled: {missing}")
    if len(kernels) > 1:
        _print_variants([_build(case) for case in _per_variant(cases)])
    elif kernels[0].resources:
        _print_resources(kernels)
    return 0 if code == NOT_VERIFIED else code


def _verify(options: argparse.Namespace, _command: str) -> int:
    on_gpu = _on_gpu(options)
    backend = GpuBackend() if on_gpu else LlvmBackend()
    codes = []
    for case in _cases(options, GPU_SIZES if on_gpu else CPU_SIZES):
        kernel = compiled(_lower(case), require_compiler()) if on_gpu else _lower(case)
        codes.append(_verify_one(kernel, backend, ""))
        _show(kernel, options.show)
    return max(codes)


def _verify_one(kernel: Kernel, backend, remark: str) -> int:
    """Verify a kernel and print the one line that says how; returns 0, or 3 where it cannot be verified."""
    if backend.name not in kernel.case.step.verified_on:
        print(f"{kernel.case}\nnot verified: needs {' or '.join(kernel.case.step.verified_on)}", flush=True)
        return NOT_VERIFIED
    result = verify(kernel, backend)
    where = {"llvm": "on the CPU (TensorIR through LLVM)", "gpu": "on the GPU"}[backend.name]
    print(f"{kernel.case}: worst error {result.max_error:.2g}, tolerance {result.tolerance:.2g}, whole numbers exact")
    print(f"verified {where}{'; ' + remark if remark else ''}", flush=True)
    return 0


def _compile(options: argparse.Namespace, _command: str) -> int:
    compiler = require_compiler()
    kernels = [compiled(_lower(case), compiler) for case in _cases(options, LISTING_SIZES)]
    for kernel in kernels:
        _show(kernel, options.show)
        if options.out:
            print(f"wrote {listing(kernel).save(options.out)}")
    if not options.show:
        print(f"compiled by nvcc {compiler.version} ({compiler.origin}) for {kernels[0].case.machine.arch}")
        _print_resources(kernels)
    return 0


def _sweep(options: argparse.Namespace, command: str) -> int:
    find_peers(options.peers)  # an unknown one is refused before anything else is done
    if not _on_gpu(options):
        raise NoGpu("a sweep measures, and there is no GPU here; compile and verify work without one")
    tiles = TILE_SET if options.tile == "all" else None
    cases = []
    for stages in _numbers(options.stages or str(DEFAULT_STAGES), "--stages"):
        options.stages = str(stages)
        for case in _cases(
            argparse.Namespace(**{**vars(options), "tile": "default" if tiles else options.tile}), GPU_SIZES
        ):
            cases += [case.with_tile(tile, "given") for tile in tiles or [case.tile]]
    unique = list(dict.fromkeys(cases))
    legal = [
        case
        for case in unique
        if not case.tile.violations(case.machine.target(), dtype_bytes(case.problem.dtype), case.slots)
    ]
    if len(legal) < len(unique):
        print(f"{len(unique) - len(legal)} of {len(unique)} combinations are beyond the GPU's limits and left out")
    _print_records(_measure(legal, options, command))
    return 0


def _counters(options: argparse.Namespace, command: str) -> int:
    require_gpu()
    session = _session(options, command)
    for case in _cases(options, GPU_SIZES):
        case = replace(case, stages=case.slots)
        problem = case.problem
        counters = Counters(
            step=case.step.number,
            step_name=case.step.name,
            variant=case.variant,
            m=problem.m,
            n=problem.n,
            k=problem.k,
            layout=problem.layout,
            dtype=problem.dtype,
            tile=str(case.tile),
            stages=case.slots,
            gpu=session.identity["gpu"],
            values=count(case),
            revision=session.revision,
            dirty=session.dirty,
            recorded_at=now(),
            command=command,
        )
        print(f"{case}: wrote {counters.save(session.out)}", flush=True)
    return 0


def _tune(options: argparse.Namespace, command: str) -> int:
    """Tune each case; exit status 1 where a candidate of one was wrong, though a right one was found."""
    _on_gpu(options)
    if options.budget is not None and not options.budget > 0:
        raise UsageError(f"--budget {options.budget:g}: seconds, more than 0")
    session, wrong = _session(options, command), []
    for case in _cases(options, GPU_SIZES):
        print(f"{case.step.name} {case.problem.shape} {case.problem.dtype} {case.problem.layout}", flush=True)
        case = replace(case, tile_choice="tuned")
        tuned = tune(session, case, options.budget, options.retune, lambda line: print(f"  {line}", flush=True))
        _print_tuned(tuned)
        wrong += [candidate.why for candidate in tuned.candidates if candidate.status == "wrong"]
    for why_wrong in wrong:
        print(f"error: wrong result: {why_wrong}", file=sys.stderr)
    return WRONG if wrong else 0


def _print_tuned(tuned: TunedConfig) -> None:
    """How much of the space was seen, its five fastest, and the verdict of the confirmation."""
    untimed = [candidate for candidate in tuned.candidates if candidate.status != "timed"]
    counts = {status: sum(c.status == status for c in untimed) for status in ("illegal", "not built", "wrong")}
    others = "".join(f", {count} {status}" for status, count in counts.items() if count)
    print(f"  {tuned.seen} of {tuned.legal} legal candidates seen{others}; in the search, of cuBLAS:")
    for candidate in tuned.candidates[:5]:
        if candidate.ratios:
            print(f"    {candidate.ratios[-1]:.3f}  {candidate.times_ms[-1]:.4f} ms  {candidate.name}")
    print(
        f"  {tuned.verdict}: {tuned.winner.name}: {tuned.time_ms:.4f} ms, {tuned.gflops:.0f} GFLOPS, "
        f"{tuned.ratio_to_cublas:.3f} of cuBLAS, {tuned.gain_over_default_pct:+.1f} % over the default configuration"
    )
    if tuned.runner_up:
        low, high = tuned.margin_interval_pct
        cheaper = "; the cheaper is taken" if tuned.verdict == "tie" else ""
        margin = f"{tuned.margin_pct:+.2f} % ({low:+.2f} to {high:+.2f} %)"
        print(f"  {margin} over the runner-up {tuned.runner_up.name}{cheaper}", flush=True)


def _depth(options: argparse.Namespace, _command: str) -> int:
    """Print the depth model's table for each case; where it covers none of them, that is refused."""
    compiler = require_compiler()
    covered = 0
    for case in _cases(options, LISTING_SIZES):
        if not case.step.pipelined or case.variant == "double_buffer":
            continue
        kernels = {n: compiled(_lower(replace(case, stages=n)), compiler) for n in depth.stage_counts(case)}
        try:
            said = depth.forecast(case, lambda other, made=kernels: made[other.stages].resources)
            covered += 1
        except depth.NoForecast as why_not:
            said = None
            print(f"{replace(case, stages=1)}: no times predicted: {why_not}")
        _print_depth(case, kernels, said)
    return 0 if covered else BAD_INPUT


def _print_depth(case: Case, kernels: dict[int, Kernel], said: DepthForecast | None) -> None:
    table = Table(title=escape(f"{replace(case, stages=1)}, {case.machine.gpu or case.machine.arch}"))
    headings = ("stages", "predicted ms", "GFLOPS", "latency hidden", "shared bytes", "registers", "blocks per SM")
    for heading in (*headings, "occupancy", "limited by"):
        table.add_column(heading, justify="right")
    for stages, kernel in kernels.items():
        found, time = kernel.resources, said.time_ms[stages - 1] if said else None
        speed = ("–", "–", "–")
        if time is not None:
            speed = (f"{time:.4f}", f"{case.problem.flops / time / 1e6:.0f}", f"{said.hidden[stages - 1]:.0%}")
        room = (found.smem_bytes, found.registers, found.blocks_per_sm)
        table.add_row(str(stages), *speed, *map(str, room), f"{found.occupancy:.0%}", found.occupancy_limit)
    _console().print(table)
    slot_bytes = case.tile.smem_bytes(dtype_bytes(case.problem.dtype))
    print(f"one more stage costs a block {slot_bytes} bytes of shared memory; {depth.most_stages(case)} fit")
    if said:
        print(f"fewest that hide the latency: {said.fewest}; recommended: {said.recommended}")


def _microbench(options: argparse.Namespace, command: str) -> int:
    """Measure the GPU's rates; each is in its file, and printed, before the next begins."""
    benchmarks = chosen(options.only)
    machine, compiler = gpu_machine(), require_compiler()
    check_writable(options.out)
    revision, dirty = (options.revision, False) if options.revision else git_state(ROOT)
    provenance = {"command": command, "revision": revision, "dirty": dirty}
    for name, found, path in measure_rates(machine, compiler, benchmarks, options.out, provenance):
        at = [f"{value:g}: " for value in found.at] or [""]
        shown = ", ".join(f"{place}{median:.4g}" for place, median in zip(at, found.medians))
        over = f" over {found.over}" if found.over else ""
        print(f"{name}{over}: {shown} (samples within {found.spread_pct:.1f} %), in {path}", flush=True)
    return 0


def _stream(options: argparse.Namespace, command: str) -> int:
    """Measure streams, all cases of a workload and size in the same rounds; or verify them without a GPU."""
    on_gpu = _on_gpu(options)
    sizes = _numbers(options.mb or STREAM_SIZES, "--mb")
    here = options.arch is None and gpu_present()
    cases = stream_cases(
        [name.strip() for name in options.workload.split(",")],
        sizes,
        STREAM_VARIANTS if options.variant == "all" else [options.variant],
        _numbers(options.stages, "--stages"),
        options.dtype,
        gpu_machine() if here else machine_for(options.arch or DEFAULT_ARCH),
    )
    if options.verify or not on_gpu:
        return _verify_streams(cases, options, on_gpu)
    records = _measure_streams(cases, _session(options, command), command)
    _print_streams(records)
    return 0


def _measure_streams(cases: list[StreamCase], session: Session, command: str) -> list[StreamRecord]:
    """Measure streams workload by workload and size by size, each record on disk before the next race."""
    journal = Journal(session.out, command, session.revision, cases)
    groups: dict[tuple[str, tuple[int, ...]], list[StreamCase]] = {}
    for case in cases:
        groups.setdefault((case.workload, case.shape), []).append(case)
    waiting = [group for group in groups.values() if not all(map(journal.has, group))]
    if len(waiting) < len(groups):
        print(f"going on with an interrupted run: {len(groups) - len(waiting)} of {len(groups)} sizes are done")
    session.compile_together(lower_stream(case) for group in waiting for case in group)
    records = []
    with _progress() as progress:
        task = progress.add_task("measuring", total=len(waiting))
        for group in waiting:
            progress.update(task, description=escape(f"{group[0].workload} {'x'.join(map(str, group[0].shape))}"))
            made = measure_streams(session, group)
            for record in made:
                record.save(session.out)
            if len(made) < len(group):
                print(f"{group[0]} and others: {len(group) - len(made)} left out, a block has fewer tiles than stages")
            records += made
            for case in group:
                journal.add(case)
            progress.advance(task)
    journal.finish()
    return records


def _verify_streams(cases: list[StreamCase], options: argparse.Namespace, on_gpu: bool) -> int:
    """Check streams only: on the GPU at the sizes given, else through LLVM at a small one."""
    if options.out:
        check_writable(options.out)
        print(f"no record will be written to {options.out}: nothing is measured")
    if not on_gpu:
        small = [replace(case, shape=case.kind.shape(round(CPU_STREAM_MIB * MIB), case.dtype)) for case in cases]
        cases = list(dict.fromkeys(small))
    backend = GpuBackend() if on_gpu else LlvmBackend()
    for case in cases:
        kernel = lower_stream(case)
        result = verify_stream(case, compiled(kernel, require_compiler()) if on_gpu else kernel, backend)
        print(f"{case}: worst error {result.max_error:.2g}, tolerance {result.tolerance:.2g}", flush=True)
    why_not = "--verify" if on_gpu else "--on llvm" if gpu_present() else "no GPU"
    where = "on the GPU" if on_gpu else f"on the CPU (TensorIR through LLVM) at {CPU_STREAM_MIB} MiB"
    print(f"verified {where}; speed not measured: {why_not}")
    return 0


def _print_streams(records: list[StreamRecord]) -> None:
    table = Table(title="Measured (medians; the copy and torch in the same rounds)")
    headings = ("workload", "shape", "variant", "stages", "ms", "GB/s", "of copy", "torch GB/s", "occupancy", "bound")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("workload", "shape", "variant", "bound") else "right")
    for r in records:
        torch = "–" if r.torch is None else f"{r.bytes_moved / r.torch.median_ms / 1e6:.0f}"
        numbers = (f"{r.timing.median_ms:.4f}", f"{r.gb_s:.0f}", f"{r.ratio_to_copy:.2f}", torch)
        shape = "x".join(map(str, r.shape))
        table.add_row(r.workload, shape, r.variant, str(r.stages), *numbers, f"{r.resources.occupancy:.0%}", r.bound)
    _console().print(table)


def _measure(cases: list[Case], options: argparse.Namespace, command: str) -> list[Record]:
    """Measure cases group by group, the records of one on disk before the next begins.

    A sweep's stage counts of one step, variant, tile and problem are one group, timed in the same rounds.
    """
    session = _session(options, command)
    session.forecasts = options.command == "sweep"
    cases = [tuned_case(session, case, _warn) if case.tile_choice == "tuned" else case for case in cases]
    journal = Journal(session.out, command, session.revision, cases)
    waiting = [case for case in cases if not journal.has(case)]
    if len(waiting) < len(cases):
        print(f"going on with an interrupted run: {len(cases) - len(waiting)} of {len(cases)} cases are done")
    session.prebuild(waiting)
    records = []
    with _progress() as progress:
        task = progress.add_task("measuring", total=len(waiting))
        for group in _groups(waiting, together=options.command == "sweep"):
            progress.update(task, description=escape(str(group[0])))
            for case, record in zip(group, session.measure_together(group)):
                for warning in record.notes:
                    _warn(warning)
                record.save(session.out)
                journal.add(case)
                records.append(record)
                _show(session.load(case)[0] if case.tile_choice != "best" else None, options.show)
                print(_line(record), flush=True)
                progress.advance(task)
    journal.finish()
    return records


def _groups(cases: list[Case], together: bool) -> list[list[Case]]:
    """Cases that are timed in the same rounds: those that differ in their stage count only, or each alone."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(replace(case, stages=0) if together else case, []).append(case)
    return list(groups.values())


def _run_again(options: argparse.Namespace, command: str) -> int:
    old = Record.from_json(read_text(options.again), origin=str(options.again))
    session = _session(options, command)
    problem = Matmul(old.m, old.n, old.k, old.dtype, old.layout, old.out_dtype)
    if old.kind == "calibration":
        new = session.calibrate(problem)
    else:
        steps = find_steps()
        if old.step not in steps:
            raise UnknownStep(f"{options.again} measured step {old.step}, which is not in steps/")
        tile, machine = TileConfig.parse(old.tile), machine_for(old.arch)
        new = session.measure(Case(steps[old.step], problem, old.variant, tile, machine, old.stages, "given"))
    new.save(session.out)
    for label, record in (("old", old), ("new", new)):
        print(f"{label} {record.environment.recorded_at} {record.environment.gpu}: {_line(record)}")
    return 0


def _calibrate(options: argparse.Namespace, command: str) -> int:
    session = _session(options, command)
    for problem in _problems(options, GPU_SIZES):
        record = session.calibrate(problem)
        record.save(session.out)
        print(_line(record), flush=True)
    return 0


def _session(options: argparse.Namespace, command: str) -> Session:
    """A session whose output folder is known to take records."""
    out = options.out or RESULTS
    check_writable(out)
    return Session(
        require_compiler(),
        GpuBackend(),
        out,
        command,
        tune_stages=options.stages is None,
        revision=options.revision or "",
        peers=tuple(find_peers(getattr(options, "peers", "none"))),  # counters has no peers
    )


def listing(kernel: Kernel) -> Listing:
    """A compiled kernel's listing, for the pages."""
    case = kernel.case
    return Listing(
        step=case.step.number,
        step_name=case.step.name,
        title=case.step.title,
        text=case.step.text,
        variant=case.variant,
        default_variant=case.variant == case.step.default_variant(case.machine.has_cp_async),
        shape=case.problem.shape,
        dtype=case.problem.dtype,
        layout=case.problem.layout,
        tile=str(case.tile),
        stages=case.slots,
        arch=case.machine.arch,
        tir=kernel.schedule.mod["main"].script(),
        cuda=kernel.body,
        why=why(kernel),
        code=kernel.code,
        resources=kernel.resources,
        pipeline=kernel.pipeline,
        aspects=aspects(kernel),
    )


def _cases(options: argparse.Namespace, sizes: str, tunes: bool = False) -> list[Case]:
    """The cases that the options name, in the order in which they share most: by problem, then by step."""
    here = options.arch is None and gpu_present()
    machine = gpu_machine() if here else machine_for(options.arch or DEFAULT_ARCH)
    steps = _steps(options.step)
    stages, *more = _numbers(options.stages or str(DEFAULT_STAGES), "--stages", minimum=None)
    if stages < 1 or more:
        raise UsageError(f"--stages {options.stages}: one number, at least 1 (1 is unpipelined); sweep takes several")
    choice = options.tile if options.tile in ("default", "best", "tuned") else "given"
    if choice in ("best", "tuned") and not tunes:
        raise UsageError(f"--tile {choice} is found by measuring, so only run takes it, and only on a GPU; name a tile")
    if choice == "tuned" and (options.stages is not None or options.variant not in (None, "default")):
        raise UsageError("--tile tuned brings its own --stages and --variant; leave them out, or name a tile")
    tile = TileConfig.parse(options.tile) if choice == "given" else DEFAULT_TILE
    alone = len(steps) == 1 and choice != "tuned"
    cases = [
        Case(step, problem, variant, tile, machine, stages, choice)
        for problem in _problems(options, sizes)
        for step in steps
        for variant in _variants(step, options.variant, alone=alone, has_cp_async=machine.has_cp_async)
    ]
    for case in cases:
        case.validate()
    return cases


def _variants(step: Step, choice: str | None, alone: bool, has_cp_async: bool) -> list[str]:
    if choice == "all" or (choice is None and alone):
        return [variant for variant in step.variants if step.runs(variant, has_cp_async)]
    if choice in (None, "default"):
        return [step.default_variant(has_cp_async)]
    chosen = [name.strip() for name in choice.split(",")]
    for name in chosen:
        step.check_variant(name)
    return chosen


def _problems(options: argparse.Namespace, sizes: str) -> list[Matmul]:
    if options.size is not None and options.shape is not None:
        raise UsageError("--size and --shape exclude each other")
    if options.shape is not None:
        shapes = []
        for text in options.shape.split(","):
            match = re.fullmatch(r"(-?\d+)x(-?\d+)x(-?\d+)", text.strip())
            if not match:
                raise UsageError(f"--shape {text!r} is not MxNxK; write for example 1024x512x256")
            shapes.append(tuple(map(int, match.groups())))
    else:
        shapes = [
            (size, size, size)
            for size in _numbers(sizes if options.size is None else options.size, "--size", minimum=None)
        ]
    return [Matmul(*shape, options.dtype, options.layout, options.out_dtype) for shape in shapes]


def _steps(text: str) -> list[Step]:
    steps = find_steps()
    chosen = _numbers(text, "--step")
    for number in chosen:
        if number not in steps:
            raise UnknownStep(f"no step {number}; there are {', '.join(map(str, steps))}")
    return [steps[number] for number in chosen]


def _numbers(text: str, option: str, minimum: int | None = 1) -> list[int]:
    """Read ``5``, ``1-6``, ``1,3`` or mixtures; UsageError names the option and the value."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise UsageError(f"{option} {text!r} is not a number, a range or a list of them (5 | 1-6 | 1,3)")
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if not first <= last < first + MOST_NUMBERS:
            raise UsageError(f"{option} {text!r}: {part.strip()} is empty or names more than {MOST_NUMBERS} numbers")
        numbers += range(first, last + 1)
    if minimum is not None and min(numbers) < minimum:
        raise UsageError(f"{option} {text!r} names numbers below {minimum}")
    return numbers


def _on_gpu(options: argparse.Namespace) -> bool:
    if options.on == "gpu":
        require_gpu()
    on_gpu = options.on == "gpu" or (options.on == "auto" and gpu_present())
    if on_gpu and options.arch not in (None, gpu_arch()):
        raise UsageError(f"--arch {options.arch}: the GPU here is {gpu_arch()}; compile works for any architecture")
    return on_gpu


def _build(case: Case) -> Kernel:
    """Lowered, and compiled where there is a compiler."""
    compiler, kernel = find_compiler(), _lower(case)
    return compiled(kernel, compiler) if compiler else kernel


def _lower(case: Case) -> Kernel:
    """Lowered; each warning of the schedule is printed once."""
    kernel = lower(case)
    for warning in kernel.warnings:
        if warning not in _warned:
            _warned.add(warning)
            _warn(warning)
    return kernel


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _per_variant(cases: list[Case]) -> list[Case]:
    """The first case of every step and variant."""
    first: dict[tuple[int, str], Case] = {}
    for case in cases:
        first.setdefault((case.step.number, case.variant), case)
    return list(first.values())


def _show(kernel: Kernel | None, what: str | None) -> None:
    if kernel is None or what is None:
        return
    if what == "ptx":
        print(compile_ptx(kernel.cuda, kernel.case.machine.arch, require_compiler()))
    elif what == "sass":
        print(disassemble(compiled(kernel, require_compiler()).cubin))
    else:
        text = {"tir": kernel.schedule.mod["main"].script, "lowered": kernel.device.script, "cuda": lambda: kernel.cuda}
        print(text[what]())


def _line(record: Record) -> str:
    gain = record.improvement_over_previous_pct
    over = "" if gain is None else f", {gain:+.0f} % over the step before"
    stages = f" {record.stages} stages" if record.stages > 1 else ""
    return (
        f"{record.step_name}[{record.variant}] {record.m}x{record.n}x{record.k} {record.tile}{stages}: "
        f"{record.time_ms:.4f} ms, {record.gflops:.0f} GFLOPS, {record.ratio_to_cublas:.2f} of cuBLAS{over}"
        + "".join(f"\n  {_peer_line(record, peer)}" for peer in record.peers)
    )


def _peer_line(record: Record, peer: Peer) -> str:
    """A peer in percent of cuBLAS with its configuration, or why it has no time."""
    if peer.timing is None:
        return f"{peer.name}: {peer.status}, {peer.why}"
    return f"{peer.name}: {peer.timing.median_ms:.4f} ms, {record.ratio_of(peer.timing):.0%} of cuBLAS, {peer.config}"


def _print_records(records: list[Record]) -> None:
    table = Table(
        title="Measured (medians; cuBLAS, the step before and peers, in percent of cuBLAS, in the same rounds)"
    )
    names = list(dict.fromkeys(peer.name for record in records for peer in record.peers))
    headings = ("step", "shape", "tile", "stages", "ms", "GFLOPS", "of cuBLAS", "over previous", "bound", *names)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("step", "shape", "tile", "bound") else "right")
    for r in records:
        gain = r.improvement_over_previous_pct
        case = f"{r.step} {r.variant}"
        shape = f"{r.m}x{r.n}x{r.k}"
        numbers = (
            f"{r.time_ms:.4f}",
            f"{r.gflops:.0f}",
            f"{r.ratio_to_cublas:.2f}",
            "" if gain is None else f"{gain:+.0f} %",
        )
        peers = {peer.name: f"{r.ratio_of(peer.timing):.0%}" if peer.timing else peer.status for peer in r.peers}
        table.add_row(case, shape, r.tile, str(r.stages), *numbers, r.bound, *(peers.get(name, "") for name in names))
    _console().print(table)


def _print_resources(kernels: list[Kernel]) -> None:
    table = Table(title="From the compiler")
    for heading in ("case", "registers", "spilled bytes", "shared bytes", "threads", "occupancy", "limited by"):
        table.add_column(heading)
    for kernel in kernels:
        r = kernel.resources
        figures = (r.registers, r.spill_bytes, r.smem_bytes, r.threads, f"{r.occupancy:.0%}", r.occupancy_limit)
        table.add_row(escape(str(kernel.case)), *map(str, figures))
    _console().print(table)


def _print_variants(kernels: list[Kernel]) -> None:
    """Compare variants by their generated code, and say why each is faster or not."""
    table = Table(title="The generated code, per k tile")
    for heading in ("variant", "slots", "cp.async", "waits", "barriers", "registers", "bytes", "occupancy"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "variant" else "right")
    several = len({kernel.case.step.number for kernel in kernels}) > 1
    names = [f"{k.case.step.number} {k.case.variant}" if several else k.case.variant for k in kernels]
    for name, kernel in zip(names, kernels):
        code, resources = kernel.code, kernel.resources
        waits = ", ".join(map(str, code.wait_groups)) or "–"
        figures = ("–", "–") if resources is None else (str(resources.registers), f"{resources.occupancy:.0%}")
        row = (name, code.shared_versions, code.cp_async, waits, code.barriers)
        table.add_row(*map(str, row), figures[0], str(kernel.smem_bytes), figures[1])
    _console().print(table)
    for name, kernel in zip(names, kernels):
        print(f"{name}: {why(kernel)}")
    prediction = predict_tile(kernels[0])
    if prediction:
        print(
            f"predicted for {kernels[0].case}, per k tile and multiprocessor: load {prediction.load_ns:.0f} ns, "
            f"compute {prediction.compute_ns:.0f} ns, {prediction.resident_blocks} resident block(s); "
            f"N·(load + compute) = N·{prediction.sequential_ns:.0f} ns, N·max(load, compute) = "
            f"N·{prediction.pipelined_ns:.0f} ns with {prediction.slots} slots: gain {prediction.gain_pct:+.0f} %"
        )


def _console() -> Console:
    """Standard output, wide enough for the tables where it is not a terminal."""
    console = Console()
    console.width = max(console.width, 120)
    return console


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True))
