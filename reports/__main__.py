"""The report commands of ``ladder``: tables, plots, pages and checks from measured records. Measures nothing itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from tensorir_ladder.harness.cli import COMMANDS, STATUS, Parser, as_typed, guarded
from tensorir_ladder.harness.commands import DIFFERENT
from tensorir_ladder.harness.commands.values import UsageError, numbers
from tensorir_ladder.harness.records import KINDS, RESULTS, read_places
from tensorir_ladder.reports.cases import grouped
from tensorir_ladder.reports.cells import Table
from tensorir_ladder.reports.check import findings
from tensorir_ladder.reports.energy import energy_table
from tensorir_ladder.reports.judgement import judgement_tables
from tensorir_ladder.reports.page import write_pages
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.plot import plots, shape_plots, speed_kind, stage_plots
from tensorir_ladder.reports.readme import write_readme
from tensorir_ladder.reports.selection import load
from tensorir_ladder.reports.shapes import rows as rows_of_shapes
from tensorir_ladder.reports.shapes import shapes_table
from tensorir_ladder.reports.sweep_tables import rows, tradeoff_table
from tensorir_ladder.reports.sweeps import chosen_sweeps, product_sweeps
from tensorir_ladder.reports.table import all_tables, row
from tensorir_ladder.reports.templating import Markdown, plain

EXAMPLES = """
examples:
  ladder table                      the ladder in the terminal, a table per GPU and tile choice
  ladder table --step 5 --markdown  step 5 and its variants as Markdown
  ladder table --json | jq '.[0]'   every row for a program, and nothing else on stdout
  ladder stages --step 5 --size 1024  what each stage brings and costs, and the depth model judged
  ladder readme                     after measuring: the README's tables and pictures
  ladder page                       a short page per step, and one on stages with advice by workload
  ladder report                     the site to open in a browser: reports/site/index.html
  ladder listings                   PTX and machine code for the site, where there is a CUDA compiler
  ladder check                      exit 5 and a line per finding if anything is wrong or stale

Records come from `ladder run`. Pages and their plots are written into reports/pages, the site into reports/site,
which git ignores; with --results FOLDER, into that folder.
"""
PIPED_WIDTH = 180


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, as ``ladder`` does."""
    return guarded(lambda given: run(parse(given)), arguments)


def run(options: argparse.Namespace) -> int:
    """Run the command that the options name."""
    return options.command(options, Paths.of(options.results, options.readme))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read a command and its options."""
    own = parsers().get(arguments[0]) if arguments else None
    if own is not None:  # which names its own help where it refuses
        return own.parse_args(arguments[1:])
    parser = Parser("ladder", description=__doc__, epilog=f"{EXAMPLES}{STATUS}")
    _add_commands(parser)
    return parser.parse_args(arguments)


def parsers() -> dict[str, Parser]:
    """Make the parser of each command's options, by its name."""
    return _add_commands(Parser("ladder"))


def _add_commands(parser: Parser) -> dict[str, Parser]:
    commands = parser.add_subparsers(required=True, metavar="command")
    verbs = {
        "table": _table,
        "stages": _stages,
        "shapes": _shapes,
        "energy": _energy,
        "plot": _plot,
        "page": _page,
        "report": _site,
        "readme": _readme,
        "check": _check,
        "listings": _listings,
    }
    for name, command in verbs.items():
        aliases = ["sweep"] if name == "stages" else []  # `ladder sweep` measures
        about = {"help": COMMANDS[name].text, "description": COMMANDS[name].sentences, "epilog": STATUS}
        sub = commands.add_parser(name, aliases=aliases, **about)
        sub.set_defaults(command=command)
        sub.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="records (reports/results)")
        sub.add_argument(
            "--readme", type=Path, metavar="FILE", help="a document with result markers (README.md and docs/results.md)"
        )
        if name in ("table", "stages", "shapes", "energy"):
            of = {"shapes": "group", "energy": "contender"}.get(name, "record")
            form = sub.add_mutually_exclusive_group()
            form.add_argument("--json", action="store_true", help=f"one JSON array on stdout, a row per {of}")
            form.add_argument("--markdown", action="store_true", help="Markdown tables")
        if name in ("table", "stages"):
            sub.add_argument("--step", metavar="STEPS", help="5, 1-6 or 1,3 (all)")
        if name == "stages":
            sub.add_argument("--tile", metavar="TILE", help="MxNxK/TMxTN, as records write it (all)")
            sub.add_argument("--size", metavar="SIZES", help="512,1024 or MxNxK (all)")
    return {name: commands.choices[name] for name in verbs}


def _table(options: argparse.Namespace, paths: Paths) -> int:
    results = load(paths.results, numbers(options.step, "--step") if options.step else None)
    if options.json:
        print(json.dumps([row(record, results.places[record.key]) for record in results.records], indent=1))
        return 0
    if not results.records:
        raise UsageError(f"no records{f' of step {options.step}' if options.step else ''} in {paths.results}")
    _print_tables(all_tables(results), options.markdown)
    if swept := len(product_sweeps(results)):
        print(as_typed(f"{swept} stage sweeps are not among these: ladder stages"))
    return 0


def _stages(options: argparse.Namespace, paths: Paths) -> int:
    results = load(paths.results, numbers(options.step, "--step") if options.step else None)
    everything = product_sweeps(results)
    if not everything and not options.json:
        raise UsageError(
            f"no stage sweep{f' of step {options.step}' if options.step else ''} in {paths.results}: a tile and shape "
            "must be measured at two stage counts at least (ladder sweep --stages 1-6 --tile TILE)"
        )
    chosen = chosen_sweeps(everything, options.tile, options.size) if everything else []
    if options.json:
        print(json.dumps([line for sweep in chosen for line in rows(sweep)], indent=1))
        return 0
    groups = grouped(chosen, lambda sweep: sweep.section.slug).values()
    tables = [table for own in groups for table in (*map(tradeoff_table, own), *judgement_tables(own))]
    _print_tables(tables, options.markdown)
    if options.markdown:
        return 0
    print("drawn, with the model's curve and recommendation:")
    wanted = {speed_kind(sweep) for sweep in chosen}
    return _report([plot.path(paths.figures) for plot in stage_plots(results) if plot.kind in wanted])


def _shapes(options: argparse.Namespace, paths: Paths) -> int:
    results = load(paths.results)
    if options.json:
        print(json.dumps(rows_of_shapes(results.shapes), indent=1))
        return 0
    if not results.shapes:
        raise UsageError(f"no drawn shapes in {paths.results}; measure some: ladder bench")
    _print_tables([shapes_table(results.shapes)], options.markdown)
    return 0 if options.markdown else _report([plot.path(paths.figures) for plot in shape_plots(results)])


def _energy(options: argparse.Namespace, paths: Paths) -> int:
    records = load(paths.results).energy
    if options.json:
        print(json.dumps([row for record in records for row in record.energy_rows], indent=1))
        return 0
    if not records:
        raise UsageError(f"no record with energy in {paths.results}; measure one: ladder run --step 13 --energy 3")
    _print_tables([energy_table(records)], options.markdown)
    return 0


def _print_tables(tables: list[Table], markdown: bool) -> None:
    if markdown:
        print("\n\n".join(Markdown("### {}\n\n{}").format(table.title, table.markdown()) for table in tables))
        return
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH  # rich would assume 80 columns and break every cell
    for table in tables:
        grid = RichTable(title=plain(table.title), title_justify="left")
        grid.caption, grid.caption_justify = plain(table.note), "left"
        grid.box = box.SIMPLE_HEAD
        for index, name in enumerate(table.header):
            grid.add_column(plain(name), justify="left" if index < table.left else "right", overflow="fold")
        for cells in table.rows:
            grid.add_row(*map(plain, cells))
        console.print(grid)
        console.print()


def _plot(_: argparse.Namespace, paths: Paths) -> int:
    return _report_made([plot.path(paths.figures) for plot in plots(load(paths.results))], paths)


def _page(_: argparse.Namespace, paths: Paths) -> int:
    return _report_made(write_pages(load(paths.results), paths), paths)


def _report_made(files: list[Path], paths: Paths) -> int:
    """Print files that were made of records; UsageError where there are no records, a sentence where too few."""
    if not any(read_places(paths.results, kind) for kind in KINDS):
        raise UsageError(f"no record in {paths.results}; measure something: ladder run")
    if not files:
        print(f"nothing is drawn of the records in {paths.results}: a curve needs two sizes or stage counts")
    return _report(files)


def _site(_: argparse.Namespace, paths: Paths) -> int:
    from tensorir_ladder.reports.web.build import build  # which needs the extra "report"

    built = build(paths.site, paths)
    print(
        f"{len(built.files)} files, {built.bytes / 1e6:.1f} MB, in {built.seconds:.0f} s; open this one in a browser:"
    )
    return _report([built.folder / "index.html"])


def _listings(_: argparse.Namespace, paths: Paths) -> int:
    from tensorir_ladder.reports.web.listings import compiled_for_reports  # TVM, which other tables do without
    from tensorir_ladder.reports.web.machine_code import write
    from tensorir_ladder.reports.web.sources import SiteSources

    path, count = write(paths.results, compiled_for_reports(SiteSources.of(paths)))
    print(f"PTX and machine code of {count} CUDA texts, {path.stat().st_size:,} bytes:")
    return _report([path])


def _readme(options: argparse.Namespace, paths: Paths) -> int:
    if not paths.documents:
        raise UsageError(f"no README belongs to {paths.results}; give one with --readme FILE")
    return _report(write_readme(load(paths.results), paths))


def _check(options: argparse.Namespace, paths: Paths) -> int:
    problems = findings(paths)
    if problems:
        print(as_typed("\n".join(problems)))
        return DIFFERENT
    results = load(paths.results)
    for record in results.calibrations:
        print(f"cuBLAS against itself: {record.ratio_to_cublas:.3f} ({results.places[record.key]})")
    print(f"{len(results.records)} rows are whole; README and pictures follow from them")
    return 0


def _report(files: list[Path]) -> int:
    for path in files:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
