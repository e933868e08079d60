"""Print tables of records and kernels, code, warnings and progress."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table

from tensorir_ladder.harness.build import Kernel
from tensorir_ladder.harness.cli import as_typed
from tensorir_ladder.harness.explain import why
from tensorir_ladder.harness.listings import FORMS, LANGUAGES, text_of
from tensorir_ladder.harness.models.time import ceiling_share, predict_tile
from tensorir_ladder.harness.records import Peer, Record, shape_text


def warn(text: str) -> None:
    """Print a warning, apart from the results."""
    print(f"warning: {as_typed(text)}", file=sys.stderr)


def console() -> Console:
    """Open standard output, wide enough for the tables where it is not a terminal."""
    wide = Console()
    wide.width = max(wide.width, 120)
    return wide


def progress() -> Progress:
    """Make a bar on standard error that says how much is done and how long the rest takes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True))


def new_table(title: str, headings: Sequence[str], texts: Collection[str], no_wrap: bool = False) -> Table:
    """Make a table without rows; ``texts`` are the headings of columns of words, all others hold numbers."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, no_wrap=no_wrap, justify="left" if heading in texts else "right")
    return table


def print_form(kernel: Kernel, form: str) -> None:
    """Print a kernel in one of FORMS under a heading, in colours on a terminal."""
    step = kernel.case.step
    print(f"# {FORMS[form]} of {step.name if form == 'schedule' else kernel.case}")
    print_code_text(text_of(kernel, form), LANGUAGES.get(form, "text"))


def print_code_text(text: str, language: str) -> None:
    """Print code, in colours on a terminal."""
    if sys.stdout.isatty():
        Console(soft_wrap=True).print(Syntax(text, language, theme="ansi_dark", background_color="default"))
    else:
        print(text)


def print_code(kernel: Kernel, what: str | None) -> None:
    """Print a kernel as ``--show`` asks for it, if it does; its CUDA text whole, as a compiler takes it."""
    if what is not None:
        print(kernel.cuda if what == "cuda" else text_of(kernel, what))


def record_line(record: Record) -> str:
    """Put a record in a line, and each peer in one more."""
    gain = record.improvement_over_previous_pct
    over = "" if gain is None else f", {gain:+.0f} % over the step before"
    share = ceiling_share(record)
    ceiling = "" if share is None else f", {share:.0%} of its instruction's ceiling"
    stages = f" {record.stages} stages" if record.stages > 1 else ""
    low, high = record.ratio_interval
    return (
        f"{record.step_name}[{record.variant}] {shape_text(record.shape)} {record.tile}{stages}: "
        f"{record.time_ms:.4f} ms, {record.gflops:.0f} GFLOPS, {record.ratio_to_cublas:.2f} ({low:.3f} to {high:.3f}) "
        f"of cuBLAS{ceiling}{over}" + "".join(f"\n  {_peer_line(record, peer)}" for peer in record.peers)
    )


def _peer_line(record: Record, peer: Peer) -> str:
    if peer.timing is None:
        return f"{peer.name}: {peer.status}, {peer.why}"
    return f"{peer.name}: {peer.timing.median_ms:.4f} ms, {record.ratio_of(peer.timing):.0%} of cuBLAS, {peer.config}"


def print_records(records: list[Record]) -> None:
    """Print measured cases, one a row, with a column for each peer."""
    title = "Measured (medians; cuBLAS, the step before and peers, in percent of cuBLAS, in the same rounds)"
    names = list(dict.fromkeys(peer.name for record in records for peer in record.peers))
    headings = ("step", "shape", "tile", "stages", "ms", "GFLOPS", "of cuBLAS", "over previous", "bound", *names)
    table = new_table(title, headings, texts=("step", "shape", "tile", "bound"))
    for r in records:
        gain = r.improvement_over_previous_pct
        numbers = (
            f"{r.time_ms:.4f}",
            f"{r.gflops:.0f}",
            f"{r.ratio_to_cublas:.2f}",
            "" if gain is None else f"{gain:+.0f} %",
        )
        case = (f"{r.step} {r.variant}", shape_text(r.shape), r.tile, str(r.stages))
        peers = {peer.name: f"{r.ratio_of(peer.timing):.0%}" if peer.timing else peer.status for peer in r.peers}
        table.add_row(*case, *numbers, r.bound, *(peers.get(name, "") for name in names))
    console().print(table)


def print_energy(records: list[Record]) -> None:
    """Print what each contender draws, a row each, beside cuBLAS's form that is faster without pause."""
    title = "Energy and clock of each, launched without pause (medians of turns)"
    headings = ("contender", "shape", "J a product", "of cuBLAS's", "W", "SM MHz", "C", "us", "speed, of cuBLAS's")
    table = new_table(title, headings, texts=("contender", "shape"))
    for record in records:
        for row in record.energy_rows:
            name = f"{record.step} {record.variant}" if row["contender"] == record.timing.label else row["contender"]
            numbers = (f"{row['joules']:#.4g}", f"{row['joules_to_cublas']:.3f}", f"{row['watts']:.0f}")
            state = (f"{row['sm_clock_mhz']:.0f}", f"{row['temperature_c']:.0f}")
            table.add_row(name, row["shape"], *numbers, *state, f"{row['us']:.2f}", f"{row['speed_to_cublas']:.3f}")
    console().print(table)


def print_resources(kernels: list[Kernel]) -> None:
    """Print what each compiled kernel occupies."""
    headings = ("case", "registers", "spilled bytes", "shared bytes", "threads", "occupancy", "limited by")
    table = new_table("From the compiler", headings, texts=headings)
    for kernel in kernels:
        r = kernel.resources
        figures = (r.registers, r.spill_bytes, r.smem_bytes, r.threads, f"{r.occupancy:.0%}", r.occupancy_limit)
        table.add_row(escape(str(kernel.case)), *map(str, figures))
    console().print(table)


def print_variants(kernels: list[Kernel]) -> None:
    """Compare variants by their generated code, and say why each is faster or not."""
    headings = ("variant", "stages", "cp.async", "waits", "barriers", "registers", "bytes", "occupancy")
    table = new_table("The generated code, per k tile", headings, texts=("variant",), no_wrap=True)
    several = len({kernel.case.step.number for kernel in kernels}) > 1
    names = [f"{k.case.step.number} {k.case.variant}" if several else k.case.variant for k in kernels]
    for name, kernel in zip(names, kernels):
        code, resources = kernel.code, kernel.resources
        waits = ", ".join(map(str, code.wait_groups)) or "–"
        figures = ("–", "–") if resources is None else (str(resources.registers), f"{resources.occupancy:.0%}")
        counts = [f"{count} in all" if kernel.written_out else count for count in (code.cp_async, code.barriers)]
        row = (name, code.shared_versions, counts[0], waits, counts[1])
        table.add_row(*map(str, row), figures[0], str(kernel.smem_bytes), figures[1])
    console().print(table)
    for name, kernel in zip(names, kernels):
        print(f"{name}: {why(kernel)}")
    _print_prediction(kernels[0])


def _print_prediction(kernel: Kernel) -> None:
    if tile := predict_tile(kernel):
        print(
            f"predicted for {kernel.case}, per k tile and multiprocessor: load {tile.load_ns:.0f} ns, "
            f"compute {tile.compute_ns:.0f} ns, {tile.resident_blocks} resident block(s); "
            f"N·(load + compute) = N·{tile.sequential_ns:.0f} ns, N·max(load / (stages − 1), blocks·compute) = "
            f"N·{tile.pipelined_ns:.0f} ns with {tile.stages} stages: gain {tile.gain_pct:+.0f} %"
        )
