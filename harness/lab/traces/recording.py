"""Recording probes on the GPU at hand, and comparing with what is recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tensorir_ladder.harness.lab.gpu_program import GpuProgram
from tensorir_ladder.harness.lab.traces import transfers, warp, warpgroup
from tensorir_ladder.harness.lab.traces.probe import Probe
from tensorir_ladder.harness.records import now
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, compile_cubin
from tensorir_ladder.torch_ops.driver import Driver

RECORDED = Path(__file__).parent / "recorded"
ARCH = "sm_90a"  # whose instructions these are
FAMILIES = (
    warp.matrices,
    warp.multiplications,
    warp.others,
    warpgroup.sums,
    warpgroup.descriptors,
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
        found = json.loads(path.read_text(encoding="utf-8"))
        return Trace(**{field.name: found[field.name] for field in fields(Trace)})
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{path} is no trace ({error}); delete it and record again") from error


def record(
    wanted: list[Probe], compiler: Compiler, identity: dict[str, Any], driver: Driver, folder: Path
) -> Iterator[tuple[Probe, Trace]]:
    """Run probes on GPU 0 and write their traces, one after the other; what is recorded of the same text is kept.

    Raises CompileError, DriverError.
    """
    missing = [probe for probe in wanted if not _is_recorded(probe, identity, folder)]
    texts = list({probe.program.cuda for probe in missing})
    with ThreadPoolExecutor() as pool:
        compiled: dict[str, Cubin] = dict(zip(texts, pool.map(lambda text: compile_cubin(text, ARCH, compiler), texts)))
    for probe in wanted:
        if probe not in missing:
            yield probe, read_trace(folder, probe.name)
            continue
        program = GpuProgram(probe.program, compiled[probe.program.cuda].data, driver)
        gpu = (str(identity["gpu"]), str(identity["driver"]))
        lines = probe.lines(program)
        trace = Trace(probe.name, probe.meaning, *gpu, compiler.version, now(), digest(probe), lines)
        trace.save(folder)
        yield probe, trace


def _is_recorded(probe: Probe, identity: dict[str, Any], folder: Path) -> bool:
    trace = read_trace(folder, probe.name)
    return trace is not None and (trace.text_sha256, trace.gpu) == (digest(probe), identity["gpu"])


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
