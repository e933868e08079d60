"""compute-sanitizer's tools: running a prepared kernel alone and under each of them, and reading what they print."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass

from tensorir_ladder.harness.records import read_file, write_atomically
from tensorir_ladder.lab.sanitizer import launch
from tensorir_ladder.lab.sanitizer.preparation import Prepared

COMMAND = "compute-sanitizer"
ALONE = "alone"
TOOLS = ("memcheck", "racecheck", "synccheck")
LIMITS_S = {ALONE: 30, **dict.fromkeys(TOOLS, 90)}  # a kernel takes milliseconds, its process some seconds
CLEAN, FOUND, RIGHT, WRONG, STOPPED, HANG, FAILED = "clean", "found", "right", "wrong", "stopped", "hang", "failed"
PORTS, PRINTED = 64, 20
SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: (\d+) .*)$", re.M)
FIRST_LINE = re.compile(r"^=+ (?!COMPUTE-SANITIZER|.*SUMMARY)(\S.*)$", re.M)


class NoSanitizer(RuntimeError):
    """compute-sanitizer is demanded and missing."""


@dataclass(frozen=True)
class ToolRun:
    """The end of one run.

    ``status`` is RIGHT, WRONG, STOPPED or HANG of a run alone; of one under a tool CLEAN, HANG or FOUND, with the
    ``count`` of its ``summary`` line and the first line that it says. FAILED is a run that says none of these.
    """

    status: str
    count: int = 0
    summary: str = ""
    first: str = ""


@dataclass(frozen=True)
class _Kept:
    cubin: str
    outcome: ToolRun


def require_sanitizer() -> str:
    """Find compute-sanitizer; NoSanitizer says where it comes from."""
    found = shutil.which(COMMAND)
    if found is None:
        raise NoSanitizer(f"no {COMMAND} on PATH; it comes with the CUDA toolkit")
    return found


def version(sanitizer: str) -> str:
    """Ask for the line that names its version."""
    text = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    return next((line for line in text.splitlines() if line.startswith("Version")), text.strip())


@functools.cache
def shared_options(sanitizer: str) -> tuple[str, ...]:
    """List every tool's options; side by side each has a port of its own, where the sanitizer has such a limit."""
    text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, check=True).stdout
    ports = ("--max-connections", str(PORTS)) if "--max-connections" in text else ()
    return ("--print-limit", str(PRINTED), *ports)


def read_outcome(tool: str, text: str) -> ToolRun:
    """Read what a run that ended by itself printed."""
    if tool == ALONE:
        return _read_alone(text)
    summaries = SUMMARY.findall(text)
    if not summaries:
        return ToolRun(FAILED, first=_last_line(text))
    summary, count = summaries[-1]
    if not int(count):
        return ToolRun(CLEAN, 0, summary)
    first = FIRST_LINE.search(text)
    return ToolRun(FOUND, int(count), summary, first.group(1)[:200] if first else "")


def _read_alone(text: str) -> ToolRun:
    line = _last_line(text)
    if line == launch.RIGHT:
        return ToolRun(RIGHT)
    if line.startswith(launch.STOPPED):
        return ToolRun(STOPPED, first=line)
    wrong = re.fullmatch(rf"(\d+) of \d+ {launch.WRONG}", line)
    return ToolRun(WRONG, int(wrong.group(1)), first=line) if wrong else ToolRun(FAILED, first=line)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")[:200]


def run_tool(prepared: Prepared, tool: str, sanitizer: str, limit_s: float) -> ToolRun:
    """Run a kernel, under a tool or ALONE, in a process that is killed at the time limit."""
    under = [] if tool == ALONE else [sanitizer, "--tool", tool, *shared_options(sanitizer)]
    command = [*under, sys.executable, "-m", "tensorir_ladder.lab.sanitizer.launch", str(prepared.folder)]
    # A session of its own, so that the tool's children end with it.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return ToolRun(HANG, summary=f"not done after {limit_s:g} s")
    return read_outcome(tool, text)


def kept_outcome(prepared: Prepared, tool: str) -> ToolRun | None:
    """Read what a tool said of this cubin before; None where it was not asked."""
    path = prepared.folder / f"{tool}.json"
    if not path.exists():
        return None
    kept = read_file(path, _Kept, "delete it, so that the tool is asked again")
    return kept.outcome if kept.cubin == prepared.digest else None


def look(prepared: Prepared, tool: str, sanitizer: str) -> ToolRun:
    """Run a tool, and keep what it says on disk."""
    outcome = run_tool(prepared, tool, sanitizer, LIMITS_S[tool])
    kept = _Kept(prepared.digest, outcome)
    write_atomically(prepared.folder / f"{tool}.json", json.dumps(asdict(kept), indent=1) + "\n")
    return outcome


def look_at_all(kernels: list[Prepared], sanitizer: str, jobs: int) -> Iterator[tuple[Prepared, str, ToolRun]]:
    """Run every kernel alone, then under each tool, so many at a time; what is kept is not run again.

    Of a kernel that hangs no tool would say anything: they report when it ends.
    """
    for tool in (ALONE, *TOOLS):
        wanted = [kernel for kernel in kernels if tool == ALONE or not _hangs(kernel)]
        with ThreadPoolExecutor(jobs) as pool:
            tasks = {}
            for kernel in wanted:
                kept = kept_outcome(kernel, tool)
                if kept and kept.status != FAILED:
                    yield kernel, tool, kept
                else:
                    tasks[pool.submit(look, kernel, tool, sanitizer)] = kernel
            for task in as_completed(tasks):
                yield tasks[task], tool, task.result()


def _hangs(kernel: Prepared) -> bool:
    alone = kept_outcome(kernel, ALONE)
    return alone is not None and alone.status == HANG
