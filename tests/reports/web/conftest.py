"""The site built once, and a browser to open its pages in; skipped, with the reason, where a tool is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.web.build import build

Open = Callable[..., Any]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site as the committed records make it: $LADDER_SITE, where `ladder report` wrote it before."""
    if written := os.environ.get("LADDER_SITE"):
        return Path(written)
    if find_spec("vl_convert") is None:
        pytest.skip("no vl-convert-python; install the extra: report")
    folder = tmp_path_factory.mktemp("site") / "site"
    build(folder, Paths.of())
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, Debian's package, through Playwright."""
    missing = [name for name in ("playwright", "axe_playwright_python") if find_spec(name) is None]
    if missing:
        pytest.skip(f"no {missing[0]}; install the extra: browser")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no chromium on PATH; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    alone = ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium's sandbox does not run for
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=alone)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any, site: Path) -> Iterator[Open]:
    """``open_page("index.html#gpu=…", width=390, dark=True)`` opens a page; what goes wrong in any fails the test."""
    contexts, wrong = [], []

    def open_one(address: str, width: int = 1440, height: int = 900, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda text: wrong.append(text.text) if text.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        # What a page still asked for when it was left is no failure.
        page.on("requestfailed", lambda own: None if "ERR_ABORTED" in own.failure else wrong.append(own.url))
        page.goto(f"{site.as_uri()}/{address}")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not wrong
