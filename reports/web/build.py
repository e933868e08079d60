"""The whole site: pages of every module beside this one that has ``pages(sources)``, rendered and put in place."""

from __future__ import annotations

import importlib
import pkgutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tensorir_ladder.harness.commands.values import UsageError
from tensorir_ladder.reports import web
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.web.extra import needed
from tensorir_ladder.reports.web.page import SECTIONS, File, Page, check_addresses, render
from tensorir_ladder.reports.web.sources import SiteSources

STATIC = Path(__file__).parent / "static"
GENERATOR = '<meta name="generator" content="ladder report">'
LARGEST_BYTES = 6 * 10**6


@dataclass(frozen=True)
class BuiltSite:
    """A site as it was written: its files, their bytes together, and the seconds that it took."""

    folder: Path
    files: tuple[Path, ...]
    bytes: int
    seconds: float


def build(folder: Path, paths: Paths) -> BuiltSite:
    """Write the site of a results folder into ``folder``, whole or not at all.

    UsageError where ``folder`` holds something else than an earlier site, where a library of the extra ``report`` is
    missing, or where the site outgrows ``LARGEST_BYTES``.
    """
    started = time.monotonic()
    check_replaceable(folder)
    items = list(contents(SiteSources.of(paths)))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as making:
        fresh = Path(making) / folder.name
        files = _write(items, fresh)
        size = sum(path.stat().st_size for path in files)
        if size > LARGEST_BYTES:
            raise UsageError(f"the site has {size:,} bytes, over {LARGEST_BYTES:,}: show less on its largest pages")
        if folder.exists():
            folder.rename(Path(making) / "before")
        fresh.rename(folder)
    written = tuple(folder / path.relative_to(fresh) for path in files)
    return BuiltSite(folder, written, size, time.monotonic() - started)


def contents(sources: SiteSources) -> Iterator[File]:
    """Yield every file of the site: pages as they were rendered, their data, and what all of them load."""
    items = [item for module in page_modules() for item in module.pages(sources)]
    static = [File(f"static/{path.name}", path.read_text(encoding="utf-8")) for path in sorted(STATIC.iterdir())]
    static.append(File("static/vega.js", vega_script()))
    pages = sorted((item for item in items if isinstance(item, Page)), key=_place)
    files = [*(item for item in items if isinstance(item, File)), *static]
    check_addresses([*pages, *files])
    yield from (File(page.address, render(page, pages, sources.gpus)) for page in pages)
    yield from files


def page_modules() -> list:
    """Import the modules beside this one and return those that make pages."""
    names = [found.name for found in pkgutil.iter_modules(web.__path__, f"{web.__name__}.")]
    return [module for module in map(importlib.import_module, names) if hasattr(module, "pages")]


def vega_script() -> str:
    """Bundle Vega, Vega-Lite and Vega-Embed to one script for a page, whose other names stay inside it."""
    bundle = needed("vl_convert").javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return f"(() => {{{bundle}}})();\n"


def check_replaceable(folder: Path) -> None:
    """Raise UsageError for a folder that holds anything but an earlier site."""
    index = folder / "index.html"
    if not folder.exists() or (index.is_file() and GENERATOR in index.read_text(encoding="utf-8", errors="replace")):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UsageError(f"{folder} holds something else than a site of `ladder report`; move it away first")


def _place(page: Page) -> int:
    return SECTIONS.index(page.section) if page.section else len(SECTIONS)


def _write(items: list[File], folder: Path) -> list[Path]:
    files = []
    for item in items:
        path = folder / item.address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.text if isinstance(item.text, bytes) else item.text.encode())
        files.append(path)
    return files
