"""Recording probes on the GPU at hand, and comparing with what is recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from tensorir_ladder.harness.records import now
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, compile_cubin
from tensorir_ladder.lab.gpu_program import GpuProgram
from tensorir_ladder.lab.traces import transfers, warp, warpgroup
from tensorir_ladder.lab.traces.probe import Probe
from tensorir_ladder.torch_ops.driver import Driver

RECORDED = Path(__file__).parent / "recorded"
ARCH = "sm_90a"  # whose instructions these are
FAMILIES = (
    warp.matrices,
    warp.multiplications,
    warp.others,
    warpgroup.sums,
    warpgroup.descriptors,
    warpgroup.first_operands,
    transfers.loads,
    transfers.stores,
)


class TraceError(ValueError):
    """A recorded trace that cannot be read."""


@dataclass(frozen=True)
class Trace:
    """A probe's output on a GPU, as lines of words; ``text_sha256`` is the digest of the CUDA text that made it."""

    probe: str
    meaning: str
    gpu: str
    driver: str
    nvcc: str
    recorded_at: str
    text_sha256: str
    lines: list[str]

    def save(self, folder: Path) -> Path:
        """Write the trace, a line of JSON for each of its lines; returns the path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.probe}.json"
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


def probes() -> list[Probe]:
    """List every probe of every family."""
    return [probe for family in FAMILIES for probe in family()]


def digest(probe: Probe) -> str:
    """Digest the CUDA text and all that the kernel is given."""
    (launch,) = probe.program.launches
    described = json.dumps([probe.program.cuda, asdict(launch)]).encode()
    return hashlib.sha256(b"".join([described, *(array.tobytes() for array in probe.inputs.values())])).hexdigest()


def read_trace(folder: Path, name: str) -> Trace | None:
    """Read the trace of the probe of that name; None where it is not recorded, TraceError for a file that is none."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Trace)
    except (ValueError, msgspec.MsgspecError) as error:
        raise TraceError(f"{path} is no trace ({error}); delete it and record again") from error


def record(
    wanted: list[Probe], compiler: Compiler, identity: dict[str, Any], driver: Driver, folder: Path
) -> Iterator[tuple[Probe, Trace]]:
    """Run probes on GPU 0 and write their traces, one after the other; what is recorded of the same text is kept.

    Raises CompileError, DriverError.
    """
    kept = {probe.name: trace for probe in wanted if (trace := _kept(probe, identity, folder))}
    missing = [probe for probe in wanted if probe.name not in kept]
    texts = list({probe.program.cuda for probe in missing})
    with ThreadPoolExecutor() as pool:
        compiled: dict[str, Cubin] = dict(zip(texts, pool.map(lambda text: compile_cubin(text, ARCH, compiler), texts)))
    for probe in wanted:
        if probe.name in kept:
            yield probe, kept[probe.name]
            continue
        program = GpuProgram(probe.program, compiled[probe.program.cuda].data, driver)
        made = (str(identity["gpu"]), str(identity["driver"]), compiler.version, now(), digest(probe))
        trace = Trace(probe.name, probe.meaning, *made, probe.lines(program))
        trace.save(folder)
        yield probe, trace


def _kept(probe: Probe, identity: dict[str, Any], folder: Path) -> Trace | None:
    trace = read_trace(folder, probe.name)
    return trace if trace and (trace.text_sha256, trace.gpu) == (digest(probe), identity["gpu"]) else None


def difference(found: list[str], expected: list[str]) -> str:
    """Say where two outputs differ first: line, word, found and expected; "" where nowhere."""
    if len(found) != len(expected):
        return f"{len(found)} lines, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected)):
        if one == other:
            continue
        words, others = one.split(), other.split()
        if len(words) != len(others):
            return f"line {number}: {len(words)} words, expected {len(others)}"
        place = next(at for at, pair in enumerate(zip(words, others)) if pair[0] != pair[1])
        return f"line {number}, word {place}: {words[place]}, expected {others[place]}"
    return ""
