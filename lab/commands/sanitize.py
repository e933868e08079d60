"""``sanitize``: kernels broken on purpose, and whole ones, by the emulator and by compute-sanitizer."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from tensorir_ladder.emulator.compiler import BUILDS
from tensorir_ladder.harness import execution
from tensorir_ladder.harness.commands import DIFFERENT
from tensorir_ladder.harness.commands.options import add_jobs, add_revision
from tensorir_ladder.harness.commands.printing import console, new_table, progress
from tensorir_ladder.harness.environment import gpu_identity, tree_state
from tensorir_ladder.harness.records import check_appendable, now
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.lab.sanitizer.agreement import AgreementRow, read, row_of, save, tally
from tensorir_ladder.lab.sanitizer.judgement import AGREE, CANNOT_SEE, DISAGREE
from tensorir_ladder.lab.sanitizer.preparation import prepare, prepared_kernels, subject_names
from tensorir_ladder.lab.sanitizer.tools import ALONE, TOOLS, look_at_all, require_sanitizer, version


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which half of the work to do, and where its parts lie."""
    parser.add_argument("--prepare", action="store_true", help="compile, and ask the emulator; needs no GPU")
    parser.add_argument("--work", type=Path, default=Path("build/sanitize"), help="folder of parts (build/sanitize)")
    module = "module that names the kernels (support.broken_kernels: with PYTHONPATH=tests in the project's root)"
    parser.add_argument("--kernels", default="support.broken_kernels", metavar="MODULE", help=module)
    add_jobs(parser, usual=min(16, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="file of JSON lines that the record is appended to")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of a file's newest record")
    add_revision(parser)


def run(options: argparse.Namespace, command: str) -> int:
    """Prepare, or look at what is prepared, or show; exit status 5 where emulator and tools disagree."""
    if options.prepare:
        return _prepare(options)
    rows = read(options.show) if options.show else _look(options, command)
    _print(rows)
    return DIFFERENT if any(row.verdict == DISAGREE for row in rows) else 0


def _prepare(options: argparse.Namespace) -> int:
    compiler, kinds = toolchain.require_compiler(), Counter()
    BUILDS.folder()  # a cache that cannot be used is said here, and not by each process
    with progress() as bar:
        kernels = prepare(options.kernels, options.work, compiler, options.jobs)
        for kernel in bar.track(kernels, len(subject_names(options.kernels)), description="preparing"):
            kinds[kernel.emulator.kind or "nothing"] += 1
    counted = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
    print(f"{kinds.total()} kernels in {options.work}; the emulator finds {counted}")
    return 0


def _look(options: argparse.Namespace, command: str) -> list[AgreementRow]:
    if options.out:
        check_appendable(options.out, ("command", "kernels", "sanitizer"))
    kernels = prepared_kernels(options.work)
    execution.require_gpu()
    sanitizer, identity = require_sanitizer(), gpu_identity()
    with progress() as bar:
        runs = len(kernels) * (1 + len(TOOLS))  # those of kernels that hang are left out
        for _ in bar.track(look_at_all(kernels, sanitizer, options.jobs), runs, description="looking"):
            pass
    rows = [row_of(kernel) for kernel in kernels]
    if options.out:
        provenance = {"gpu": identity["gpu"], "driver": identity["driver"], "sanitizer": version(sanitizer)}
        provenance |= {"recorded_at": now(), **tree_state(options.revision), "command": command}
        save(rows, provenance, options.out)
    return rows


def _print(rows: list[AgreementRow]) -> None:
    verdicts = (AGREE, CANNOT_SEE, DISAGREE)
    table = new_table("Emulator and compute-sanitizer", ("the emulator finds", *verdicts), texts={"the emulator finds"})
    for kind, counts in sorted(tally(rows).items()):
        table.add_row(kind, *(str(counts[verdict]) for verdict in verdicts))
    console().print(table)
    for row in sorted(rows, key=lambda row: verdicts.index(row.verdict)):
        if row.verdict != AGREE:
            runs = ", ".join(f"{tool} {row.runs[tool].status}" for tool in (ALONE, *TOOLS) if tool in row.runs)
            print(f"{row.name}: {row.verdict}: {row.why}\n  emulator: {row.emulator.kind or 'nothing'}; {runs}")
