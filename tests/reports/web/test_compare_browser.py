"""The comparison in headless Chromium: every form, every control, links, both widths."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.web.listings import compiled_for_reports
from tensorir_ladder.reports.web.sources import SiteSources

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
SIDES = ("left", "right")


def opened(open_page: Open, address: str = "", **how: Any) -> Any:
    page = open_page(f"compare.html{address}", **how)
    drawn(page)
    return page


def drawn(page: Any, before: str = "") -> str:
    """Wait until the difference is another than the one drawn ``before``; return its number."""
    now = "document.querySelector('#difference').dataset.drawn"
    page.wait_for_function(f"{now} && {now} !== '{before}'")
    return page.evaluate(now)


def do(page: Any, act: Callable[[], Any]) -> str:
    """Change something that draws the difference anew; return what is said of it."""
    before = page.evaluate("document.querySelector('#difference').dataset.drawn")
    act()
    drawn(page, before)
    return page.inner_text("#differences")


def counts(page: Any) -> list[int]:
    """Lines only left, only right, in both."""
    return [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) lines?", page.inner_text("#differences"))]


def part(page: Any, side: str, name: str) -> Any:
    return page.locator(f"#{side} [data-part='{name}']")


def chosen(page: Any) -> dict[str, str]:
    names = ("step", "variant", "product", "gpu", "tile")
    return {f"{side} {name}": part(page, side, name).input_value() for side in SIDES for name in names}


def test_steps_4_and_5_stand_side_by_side_at_first(open_page: Open) -> None:
    page = opened(open_page)
    assert [part(page, side, "step").input_value() for side in SIDES] == ["4", "5"]
    left, right, both = counts(page)
    assert min(left, right, both) > 0
    texts = [page.locator(f".cm-merge-{side} .cm-content").inner_text() for side in "ab"]
    assert all('extern "C" __global__' in text for text in texts)
    assert page.locator(".cm-merge-a .cm-changedLine").count() > 0
    assert page.locator(".cm-merge-b .cm-changedLine").count() > 0
    assert "times" in page.inner_text("#verdict")


@pytest.mark.parametrize("form", ["schedule", "tir", "lowered", "cuda", "ptx", "sass"])
def test_every_form_has_texts(open_page: Open, form: str) -> None:
    page = opened(open_page, f"#left=5:sync&right=6&show={form}&equal=true")
    assert page.locator(".cm-merge-a").count() == 1
    assert sum(counts(page)) > 10
    signs = {"schedule": "def schedule", "tir": "T.prim_func", "lowered": "T.prim_func", "cuda": "__global__"}
    signs |= {"ptx": ".visible .entry", "sass": "Function : main_kernel"}
    assert signs[form] in page.locator(".cm-merge-a .cm-content").inner_text()


def test_what_is_chosen_stands_in_the_address_which_shows_it_again(open_page: Open) -> None:
    page = opened(open_page)
    do(page, lambda: part(page, "left", "step").select_option("11"))
    do(page, lambda: part(page, "right", "step").select_option("13"))
    assert part(page, "left", "product").input_value().startswith("1024³")
    do(page, lambda: part(page, "right", "product").select_option("4096³ float16"))
    do(page, lambda: part(page, "right", "gpu").select_option("h100-80gb-hbm3"))
    do(page, lambda: page.locator("[data-choice='show'][value='tir']").check(force=True))
    do(page, lambda: page.locator("[data-choice='wrap']").uncheck())
    said = do(page, lambda: page.locator("[data-choice='equal']").check())
    again = opened(open_page, page.evaluate("location.hash"))
    assert chosen(again) == chosen(page)
    assert again.inner_text("#differences") == said
    assert again.locator("[data-choice='show'][value='tir']").is_checked()
    assert not again.locator("[data-choice='wrap']").is_checked()
    do(page, page.go_back) if page.evaluate("history.length") > 2 else None


def test_sides_are_swapped(open_page: Open) -> None:
    page = opened(open_page)
    before, lines = chosen(page), counts(page)
    page.click("#swap")
    page.wait_for_function("document.querySelector('#left [data-part=step]').value === '5'")
    page.wait_for_function(f"document.querySelector('#differences').textContent.startsWith('{lines[1]} line')")
    assert {name.replace("left", "right"): value for name, value in before.items() if "left" in name}.items() <= (
        chosen(page).items()
    )
    assert counts(page) == [lines[1], lines[0], lines[2]]


def test_numbers_are_left_out_and_the_preamble_is_shown_where_asked(open_page: Open) -> None:
    page = opened(open_page, "#left=5:async&right=5:one_barrier&show=sass")
    with_numbers = counts(page)
    do(page, lambda: page.locator("[data-choice='plain']").check())
    assert sum(counts(page)[:2]) < sum(with_numbers[:2])
    do(page, lambda: page.locator("[data-choice='show'][value='cuda']").check(force=True))
    own = counts(page)
    do(page, lambda: page.locator("[data-choice='preamble']").check())
    assert counts(page)[2] > own[2] + 50
    do(page, lambda: page.locator("[data-choice='show'][value='schedule']").check(force=True))
    assert page.locator("[data-choice='plain']").is_disabled()


def test_equal_lines_are_folded_and_the_buttons_go_from_difference_to_difference(open_page: Open) -> None:
    page = opened(open_page, "#left=5:async&right=5:one_barrier&show=sass")
    assert page.locator(".cm-collapsedLines").count() > 0
    view = "codemirror.EditorView.findFromDOM(document.querySelector('.cm-merge-b'))"
    places = []
    for button in ("#next", "#next", "#next", "#previous"):
        page.click(button)
        places.append(page.evaluate(f"{view}.state.selection.main.head"))
    first, second, third, back = places
    assert first < second < third
    assert back == second
    in_view = f"(() => {{ const own = {view}.coordsAtPos({back}), box = document.querySelector('.cm-mergeView')"
    in_view += ".getBoundingClientRect(); return own.top >= box.top && own.bottom <= box.bottom; })()"
    page.wait_for_function(in_view)
    do(page, lambda: page.locator("[data-choice='equal']").check())
    assert page.locator(".cm-collapsedLines").count() == 0


def test_the_same_text_is_said_to_be_the_same(open_page: Open) -> None:
    page = opened(open_page, "#left=4&right=5:double_buffer&show=cuda")
    assert "same" in page.inner_text("#differences")
    assert page.locator("#next").is_disabled()


def test_a_text_that_is_not_here_is_said_and_a_link_shows_one_that_is(open_page: Open) -> None:
    page = opened(open_page, "#left=11~4096x4096x4096&right=12~4096x4096x4096&show=sass")
    said = page.locator("#difference").inner_text()
    assert "ladder show 11:boxes" in said
    assert "4096x4096x4096" in said
    do(page, lambda: page.click("#difference a"))
    assert page.locator(".cm-merge-a").count() == 1
    assert chosen(page)["left product"] == "1024³ float16"


def test_a_kernel_that_is_not_known_is_said_to_be_another(open_page: Open) -> None:
    page = opened(open_page, "#left=5:gone~77x77x77&right=99")
    assert all(page.locator(f"#{side} [data-note]").inner_text() for side in SIDES)


def test_tables_show_both_and_what_was_not_measured_with_its_command(open_page: Open) -> None:
    page = opened(open_page)
    ratios = page.locator("[data-table='speed'] tbody tr").first.inner_text()
    assert len(re.findall(r"\d\.\d{3}", ratios)) == 6  # two ratios, each with its interval
    assert page.locator("[data-table='counters'] tbody tr").count() > 10
    assert page.locator("[data-table='resources'] tbody tr").count() == 8
    do(page, lambda: part(page, "right", "step").select_option("14"))
    assert "never run" in page.locator("#right [data-note]").inner_text()
    assert "ladder run --step 14" in page.locator("[data-table='speed']").inner_text()


def test_the_charts_follow_the_choice(open_page: Open) -> None:
    page = opened(open_page, "#left=11:tma_store~4096x4096x4096&right=12:roles~4096x4096x4096&show=cuda")
    for name in ("speeds", "lives"):
        figure = page.locator(f"#{name}")
        figure.scroll_into_view_if_needed()
        page.wait_for_selector(f"#{name}[data-drawn]")
        assert figure.locator(".vega").get_attribute("aria-label")
    bars = "document.querySelectorAll('#lives .mark-rect path').length"
    before = page.evaluate(bars)
    end = page.locator("[data-choice='end']")
    end.evaluate("(own) => { own.value = 40; own.dispatchEvent(new Event('input', { bubbles: true })); }")
    page.wait_for_function(f"{bars} > {before}")
    assert "end=40" in page.evaluate("location.hash")
    do(page, lambda: part(page, "left", "step").select_option("4"))
    do(page, lambda: part(page, "right", "step").select_option("5"))
    page.wait_for_function("document.querySelector('#lives').hidden")
    assert "no time stamps" in page.inner_text("#timelines")


def test_a_phone_shows_one_text_with_both_sides_lines(open_page: Open) -> None:
    page = opened(open_page, width=390)
    assert page.locator(".cm-mergeView").count() == 0
    assert page.locator(".cm-deletedChunk").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_every_example_is_drawn(open_page: Open) -> None:
    page = opened(open_page)
    page.click(".examples summary")
    links = page.locator(".examples a")
    assert links.count() > 3
    for place in range(links.count()):
        address = links.nth(place).get_attribute("href")
        again = opened(open_page, address[address.index("#") :])
        assert again.locator(".cm-mergeView").count() == 1, address
        assert not any(again.locator(f"#{side} [data-note]").inner_text().startswith("There is no") for side in SIDES)
        again.close()


def test_machine_code_of_every_default_kernel_is_in_the_site(site: Path) -> None:
    def read(name: str) -> Any:
        text = (site / f"compare/{name}.js").read_text(encoding="utf-8")
        return json.loads(zlib.decompress(base64.b64decode(text[text.index('= "') + 3 : text.rindex('"')])))

    # Others are kernels of records that the steps of today refuse.
    shown = {kernel["id"]: kernel["text"] for kernel in read("index")["kernels"] if "text" in kernel}
    own = compiled_for_reports(SiteSources.of(Paths.of()))
    assert len(own) > 50
    for step in {kernel.step for kernel in own}:
        texts = read(f"step{step}")["texts"]
        for kernel in (kernel for kernel in own if kernel.step == step):
            assert {"ptx", "sass"} <= set(texts[shown[kernel.identity]]), kernel.identity
