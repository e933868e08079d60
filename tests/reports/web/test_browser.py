"""Every page of the site in headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
# Draws what is far below, too, and tells how many charts there are.
DRAW_ALL = """async () => {
  const figures = [...document.querySelectorAll("figure.chart")].filter((figure) => figure.offsetParent);
  for (const figure of figures) {
    figure.scrollIntoView();
    for (let turn = 0; turn < 400 && !figure.dataset.drawn; turn++) await new Promise((done) => setTimeout(done, 25));
  }
  scrollTo(0, 0);
  return figures.filter((figure) => !figure.dataset.drawn).map((figure) => figure.id);
}"""


def addresses(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))


@pytest.fixture
def some_addresses(site: Path, request: pytest.FixtureRequest) -> list[str]:
    """All addresses; but of lessons and of sources, which are one template each, two and one unless all cases run."""
    kept = {"lessons/step1.html", "lessons/step13.html", "source/step1_naive.html"}
    one_template = re.compile(r"(lessons|source)/step\d+")
    every = request.config.getoption("every_case")
    found = [address for address in addresses(site) if every or address in kept or not one_template.match(address)]
    assert kept <= set(found)
    return found


@pytest.mark.parametrize("width", [1440, 390])
def test_every_page_opens_draws_its_charts_and_fits(
    site: Path, some_addresses: list[str], open_page: Open, width: int
) -> None:
    for address in addresses(site) if width > 1000 else some_addresses:
        page = open_page(address, width=width)
        assert page.evaluate(DRAW_ALL) == [], address
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
        assert page.locator("h1").count() == 1, address
        page.close()


def test_no_link_is_dead(site: Path) -> None:
    texts = {address: (site / address).read_text(encoding="utf-8") for address in addresses(site)}
    identities = {address: set(re.findall(r'\bid="([^"]+)"', text)) for address, text in texts.items()}
    dead = []
    for address, text in texts.items():
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', text):
            path, fragment = urldefrag(link)
            if re.match(r"[a-z]+:", link):
                continue
            target = ((site / address).parent / unquote(path)).resolve() if path else site / address
            name = target.relative_to(site.resolve()).as_posix() if path else address
            anchor = next((part for part in fragment.split("&") if part and "=" not in part), "")
            if not target.is_file() or (anchor and anchor not in identities.get(name, set())):
                dead.append((address, link))
    assert not dead


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(some_addresses: list[str], open_page: Open, dark: bool) -> None:
    from axe_playwright_python.sync_playwright import Axe

    found = []
    for address in some_addresses:
        page = open_page(address, dark=dark)
        page.evaluate(DRAW_ALL)
        for rule in Axe().run(page, options={"preload": False, "resultTypes": ["violations"]}).response["violations"]:
            if rule["impact"] in ("serious", "critical"):
                found.append((address, rule["id"], [node["target"] for node in rule["nodes"]][:3]))
        page.close()
    assert not found


def test_every_choice_is_kept_in_the_address_and_found_again(some_addresses: list[str], open_page: Open) -> None:
    for address in some_addresses:
        page = open_page(address)
        for select in page.locator("select[data-choice]").all():
            if not select.is_visible():
                continue
            name, first = select.get_attribute("data-choice"), select.input_value()
            values = select.evaluate("(own) => [...own.options].map((option) => option.value)")
            for value in [*(v for v in values if v != first), first][:6]:
                if not select.is_visible():
                    break
                select.select_option(value)
                kept = page.evaluate("location.hash")
                assert (f"{name}=" in kept) == (value != first), (address, name, value)
        others = page.locator("select[data-choice]").all()
        chosen = {}
        for select in others:
            values = select.evaluate("(own) => [...own.options].map((option) => option.value)")
            if select.is_visible() and len(values) > 1:
                select.select_option(values[-1])
                chosen[select.get_attribute("data-choice")] = values[-1]
        again = open_page(address + page.evaluate("location.hash"))
        for name, value in chosen.items():
            assert again.locator(f'select[data-choice="{name}"]').first.input_value() == value, (address, name)
        page.close()
        again.close()


def test_the_colours_are_switched_and_kept(site: Path, open_page: Open) -> None:
    page = open_page("index.html")
    page.evaluate(DRAW_ALL)
    paper = "getComputedStyle(document.body).backgroundColor"
    letters = "document.querySelector('.vega svg .role-axis-label text').getAttribute('fill')"
    light, on_light = page.evaluate(paper), page.evaluate(letters)
    page.click("#theme")  # light
    assert page.evaluate(paper) == light
    page.click("#theme")  # dark
    dark = page.evaluate(paper)
    assert dark != light
    page.wait_for_function(f"{letters} !== {on_light!r}")  # charts are drawn again
    page.reload()
    assert page.evaluate(paper) == dark


def test_links_take_the_gpu_along(site: Path, open_page: Open) -> None:
    page = open_page("index.html")
    gpu = page.locator('select[data-choice="gpu"]')
    other = gpu.evaluate("(own) => own.options[1].value")
    gpu.select_option(other)
    page.locator("nav a").last.click()
    page.wait_for_load_state()
    assert page.evaluate("site.choices.gpu") == other
