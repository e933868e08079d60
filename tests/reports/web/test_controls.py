"""Controls of the overview, of stages, shapes and models, in headless Chromium: each changes what is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
ROWS = (
    "(id) => [...document.querySelectorAll(`#${id} tbody tr`)].filter((row) => !row.hidden).map((row) => row.innerText)"
)


def rows(page: Any, table: str) -> list[str]:
    return page.evaluate(ROWS, table)


def drawn(page: Any, place: int = 0) -> Any:
    figure = page.locator("figure.chart").nth(place)
    figure.scroll_into_view_if_needed()
    page.wait_for_function("(place) => document.querySelectorAll('figure.chart')[place].dataset.drawn", arg=place)
    return figure


def column(page: Any, table: str, number: int) -> list[float]:
    cells = f"#{table} tbody tr:not([hidden]) td:nth-child({number})"
    return [float(cell.get_attribute("data-value") or "nan") for cell in page.locator(cells).all()]


def test_operands_configuration_size_and_gpu_choose_the_rows_and_the_points(open_page: Open) -> None:
    page = open_page("index.html")
    points = drawn(page).locator(".mark-symbol.role-mark path")
    whole, shown = rows(page, "ladder"), points.count()
    assert len({row.split("\t")[0] for row in whole}) >= 13
    assert all("4096³" in row for row in whole)
    page.check('input[value="float16"]', force=True)
    half = rows(page, "ladder")
    assert 0 < len(half) < len(whole)
    page.wait_for_function(f"document.querySelectorAll('.mark-symbol.role-mark path').length < {shown}")
    assert "view=float16" in page.evaluate("location.hash")
    page.select_option('[data-choice="size"]', "1024")
    assert all("1024³" in row for row in rows(page, "ladder"))
    page.select_option('[data-choice="size"]', "all")
    assert len(rows(page, "ladder")) > len(half)
    page.check('input[value="shapes"]', force=True)
    assert any("4097×4097×4097" in row for row in rows(page, "ladder"))
    assert not page.locator('[data-choice="size"]').is_visible()
    other = page.locator('[data-choice="gpu"] option').nth(1).get_attribute("value")
    page.check('input[value="ladder"]', force=True)
    ratios = column(page, "ladder", 4)
    page.select_option('[data-choice="gpu"]', other)
    assert column(page, "ladder", 4) != ratios
    page.select_option('[data-choice="gpu"]', index=0)
    page.select_option('[data-choice="config"]', "fastest")
    assert column(page, "ladder", 4) != ratios


def test_a_point_tells_how_it_was_measured(open_page: Open) -> None:
    page = open_page("index.html")
    drawn(page).locator(".mark-symbol.role-mark path").first.hover(force=True)
    told = page.locator("#vg-tooltip-element")
    told.wait_for(state="visible")
    for what in ("of cuBLAS", "95 % interval", "spread", "clock", "power", "ladder run --again reports/results/"):
        assert what in told.inner_text()


def test_tables_are_sorted_by_mouse_and_keyboard_and_the_address_keeps_it(open_page: Open) -> None:
    page = open_page("index.html")
    page.select_option('[data-choice="size"]', "all")
    heading = page.locator("#ladder th button", has_text="of cuBLAS").first
    heading.click()
    found = column(page, "ladder", 4)
    assert found == sorted(found)
    heading.press("Enter")
    found = column(page, "ladder", 4)
    assert found == sorted(found, reverse=True)
    again = open_page("index.html" + page.evaluate("location.hash"))
    assert column(again, "ladder", 4) == found


def test_filters_of_stages_choose_sweeps_and_say_where_there_is_none(open_page: Open) -> None:
    page = open_page("stages.html")
    drawn(page)
    first = rows(page, "trade-offs")
    assert [row.split("\t")[2] for row in first] == ["1", "2", "3", "4", "5", "6"]
    page.select_option('[data-choice="variant"]', "all")
    assert len(rows(page, "trade-offs")) > len(first)
    kernel = page.locator('[data-choice="kernel"] option').last.get_attribute("value")
    page.select_option('[data-choice="kernel"]', kernel)
    nothing = page.locator('[data-none="trade-offs"]')
    assert nothing.is_visible() == (rows(page, "trade-offs") == [])
    page.select_option('[data-choice="size"]', "all")
    assert rows(page, "trade-offs")
    assert not nothing.is_visible()
    asked = page.locator('[data-choice="for"] option').nth(1).get_attribute("value")
    everything = rows(page, "advice-h200")
    page.select_option('[data-choice="for"]', asked)
    page.select_option('[data-choice="class"]', "large")
    assert 0 < len(rows(page, "advice-h200")) < len(everything)
    other = page.locator('[data-choice="gpu"] option').nth(1).get_attribute("value")
    page.select_option('[data-choice="gpu"]', other)
    assert page.locator(f'.empty[data-when="gpu:{other}"]').is_visible() == (
        not page.locator("#trade-offs").is_visible()
    )


def test_the_memory_bound_chart_follows_its_workload(open_page: Open) -> None:
    page = open_page("stages.html#streams")
    place = page.locator("figure.chart").count() - 1
    figure = drawn(page, place)
    before = figure.locator("svg").inner_html()
    page.select_option('[data-choice="workload"]', index=1)
    page.wait_for_function(
        "([at, old]) => document.querySelectorAll('figure.chart')[at].querySelector('svg').innerHTML !== old",
        arg=[place, before],
    )


def test_a_chart_has_its_figures_as_a_table_behind_it(open_page: Open) -> None:
    page = open_page("stages.html")
    box = page.locator("details.behind").first
    box.locator("summary").click()
    box.locator("table").wait_for()
    found = box.locator("tbody tr:not([hidden])")
    few = found.count()
    assert 0 < few < box.locator("tbody tr").count()  # those of the kernel chosen
    assert all(cell.inner_text() not in ("", "undefined") for cell in found.first.locator("td").all())
    box.locator("th button", has_text="measured").click()
    times = [float(cell.get_attribute("data-value")) for cell in found.locator("td:nth-child(5)").all()]
    assert times == sorted(times)
    page.select_option('[data-choice="kernel"]', index=1)
    assert found.first.inner_text() != ""


def test_shapes_are_filtered(open_page: Open) -> None:
    page = open_page("shapes.html")
    drawn(page)
    everything = rows(page, "of-shapes")
    page.select_option('[data-choice="kind"]', "any-size")
    found = rows(page, "of-shapes")
    assert 0 < len(found) < len(everything)
    page.select_option('[data-choice="dtype"]', "float16")
    assert all("float16" in row for row in rows(page, "of-shapes"))


def test_models_say_plainly_where_there_is_no_record(open_page: Open) -> None:
    page = open_page("models.html")
    for gpu in [option.get_attribute("value") for option in page.locator('[data-choice="gpu"] option').all()]:
        page.select_option('[data-choice="gpu"]', gpu)
        said = page.locator(f'.empty[data-when="gpu:{gpu}"]')
        told = page.evaluate("[...document.querySelectorAll('main table')].some((own) => own.offsetParent)")
        assert (said.count() == 1 and said.is_visible()) != told


def test_the_keyboard_reaches_content_and_controls(open_page: Open) -> None:
    page = open_page("index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    for _ in range(3):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.matches(':focus-visible')")


def test_nothing_moves_where_less_motion_is_asked_for(browser: Any, site: Any) -> None:
    page = browser.new_page(reduced_motion="reduce")
    page.goto((site / "index.html").as_uri())
    lasting = (
        "[...document.querySelectorAll('*')].some((own) => parseFloat(getComputedStyle(own).transitionDuration) > 0)"
    )
    assert not page.evaluate(lasting)
    page.close()
