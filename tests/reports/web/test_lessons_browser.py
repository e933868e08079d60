"""Lessons in headless Chromium: the slider, the window of time, the traces."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
DRAWN = "document.querySelector('.life figure.chart')?.dataset.drawn === 'true'"
BARS = "document.querySelectorAll('.life svg .mark-rect path').length"


def test_the_slider_chooses_the_plan_and_is_kept_in_the_address(open_page: Open) -> None:
    page = open_page("lessons/step5.html")
    assert page.locator("table.plan:visible caption").inner_text().startswith("3 stages")
    page.locator("#stages").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#stages-shown").inner_text() == "4"
    assert page.locator("table.plan:visible caption").inner_text().startswith("4 stages")
    assert "stages=4" in page.url
    again = open_page(f"lessons/step5.html#{page.url.split('#')[1]}")
    assert again.locator("table.plan:visible caption").inner_text().startswith("4 stages")
    page.locator("#stages").fill("1")
    assert page.locator("table.plan:visible").count() == 0


def test_the_window_shows_more_of_a_block_s_life(open_page: Open) -> None:
    page = open_page("lessons/step11.html")
    page.locator(".life").scroll_into_view_if_needed()
    page.wait_for_function(DRAWN)
    few = page.evaluate(BARS)
    page.locator("label", has=page.locator("input[name=window][value=all]")).click()
    page.wait_for_function(f"{BARS} > {few}")
    assert "window=all" in page.url
    page.locator("label", has=page.locator("input[name=window][value='3']")).click()
    page.wait_for_function(f"{BARS} < {few}")


def test_traces_are_there_and_whole(site: Path, open_page: Open) -> None:
    page = open_page("lessons/step12.html")
    links = [link.get_attribute("href") for link in page.locator("a[download]").all()]
    assert links
    for link in links:
        trace = json.loads(gzip.decompress((site / "lessons" / link).read_bytes()))
        assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}


def test_a_step_s_exercises_open(open_page: Open) -> None:
    page = open_page("lessons/step5.html", width=390)
    for answer in page.locator(".exercise details").all():
        answer.locator("summary").click()
        assert answer.locator("p").first.is_visible()
