"""Pages of the site from made-up records, without a browser: what they say, refuse and escape."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support.reports_fixtures import (
    environment,
    half,
    peers,
    record,
    stream,
    swept,
    timing,
    write_ladder,
    write_sweeps,
    write_tensor_cores,
)
from tensorir_ladder.harness.cli import parse
from tensorir_ladder.harness.commands.values import UsageError
from tensorir_ladder.harness.records import FunctionTimed, ModelRecord, Peer, RulesTimed, ShapeRecord, read_place
from tensorir_ladder.reports.__main__ import main
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.selection import load
from tensorir_ladder.reports.sweeps import product_sweeps, stream_sweeps
from tensorir_ladder.reports.web import build, extra, models, overview, shapes, stages
from tensorir_ladder.reports.web.charts import chart
from tensorir_ladder.reports.web.page import File, Page, check_addresses, highlight, relative, render
from tensorir_ladder.reports.web.sources import ROOT, SiteSources


def sources_of(folder: Path) -> SiteSources:
    return SiteSources.of(Paths.of(folder))


def html_of(module: ModuleType, folder: Path) -> str:
    sources = sources_of(folder)
    pages = list(module.pages(sources))
    return "".join(render(page, pages, sources.gpus) for page in pages)


class Tags(HTMLParser):
    """Counts elements, and keeps their attributes' names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def test_the_ladders_rows_are_its_records_and_their_commands_are_understood(tmp_path: Path) -> None:
    write_ladder(tmp_path)
    record(5, 2048, peers=peers(2048), environment=environment(at="2026-11-21T10:00:00.000+00:00")).save(tmp_path)
    found = overview.rows(sources_of(tmp_path))
    own = next(
        r for r in load(tmp_path).records if (r.step, r.m, r.tile_choice, r.variant) == (4, 1024, "best", "default")
    )
    (row,) = (r for r in found if r["label"].startswith("4 ") and r["m"] == 1024 and r["config"] == "fastest")
    assert row["ratio"] == pytest.approx(own.ratio_to_cublas, abs=1e-4)
    assert (row["low"], row["high"]) == pytest.approx(own.ratio_interval, abs=1e-4)
    assert row["gain"] == pytest.approx(own.improvement_over_previous_pct, abs=0.1)
    assert row["view"] == "ladder,float32"
    for row in found:
        if not row["peer"]:
            options = parse(shlex.split(row["again"])[1:])
            case = read_place(options.again)
            assert (case.step, case.m) == (row["place"], row["m"])
    names = [row["label"] for row in found if row["peer"]]
    assert names == ["dlight, float32", "triton, float32"]  # tilelang was not installed


def test_the_commands_of_committed_records_are_for_the_projects_root() -> None:
    sources = SiteSources.of(Paths.of())
    command = sources.again(sources.results.records[0])
    assert command.startswith("ladder run --again reports/results/")
    assert (ROOT / command.split()[-1].partition(":")[0]).is_file()


def test_what_failed_its_check_is_no_row(tmp_path: Path) -> None:
    good, bad = record(1, 512), record(2, 512)
    for made in (good, replace(bad, verification=replace(bad.verification, passed=False))):
        made.save(tmp_path)
    assert {row["place"] for row in overview.rows(sources_of(tmp_path))} == {1}


def test_squares_and_other_shapes_stand_in_views_of_their_own(tmp_path: Path) -> None:
    write_tensor_cores(tmp_path)
    half(10, 1024, dtype="bfloat16", out_dtype="bfloat16", previous=None).save(tmp_path)
    half(10, 1024, layout="nt", previous=None).save(tmp_path)
    views = {(row["view"], row["size"] == "all") for row in overview.rows(sources_of(tmp_path))}
    assert views == {
        ("ladder,float16", False),
        ("bfloat16", False),
        ("nt", False),
        ("tf32", False),
        ("shapes", True),
    }


def test_pages_without_records_say_so(tmp_path: Path) -> None:
    assert "ladder run" in html_of(overview, tmp_path)
    assert "<table" not in html_of(shapes, tmp_path)
    assert list(stages.pages(sources_of(tmp_path))) == []
    record(5).save(tmp_path)
    assert "ladder model" in html_of(models, tmp_path)


@pytest.mark.parametrize(
    "hostile", ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7*7 }}"]
)
def test_texts_of_records_stay_texts(tmp_path: Path, hostile: str) -> None:
    def tags(folder: Path, text: str) -> list[tuple[str, tuple[str, ...]]]:
        folder.mkdir()
        for step in (4, 5):
            shown = tuple(replace(peer, config=text, name=f"triton {text}"[:60]) for peer in peers(2048)[:1])
            record(step, 2048, command=text, peers=shown).save(folder)
        write_sweeps(folder)
        return [tag for module in (overview, shapes, stages, models) for tag in Tags(html_of(module, folder)).found]

    assert tags(tmp_path / "hostile", hostile) == tags(tmp_path / "plain", "text")


def drawn(
    group: str, m: int, ratio: float, seed: int = 1, at: str = "2026-11-22T10:00:00.000+00:00", batch: int = 1
) -> ShapeRecord:
    like = half(10, 1024)
    own = replace(like.timing, samples_ms=tuple(ms / ratio for ms in like.baseline[0].samples_ms))
    case = {"group": group, "seed": seed, "m": m, "n": 4096, "k": 4096, "layout": "nt", "dtype": "float16"}
    ran = {"contender": "kernels.matmul", "config": "step 13", "timing": own, "baseline": like.baseline}
    known = {name: getattr(like, name) for name in ("source_sha256", "cubin_sha256", "arch", "method", "verification")}
    return ShapeRecord(**case, **ran, **known, environment=environment(at=at), command="ladder bench", batch=batch)


def test_shapes_that_a_seed_drew_stand_beside_the_ladders(tmp_path: Path) -> None:
    record(5).save(tmp_path)
    later = "2026-11-23T10:00:00.000+00:00"
    for made in (drawn("decode", 7, 0.8), drawn("decode", 9, 1.3, 2, later), drawn("decode", 11, 0.9, 2, later)):
        made.save(tmp_path)
    drawn("batches", 300, 0.7, batch=16).save(tmp_path)
    found = shapes.drawn_rows(sources_of(tmp_path))
    assert [(row["shape"], row["ratio"], row["kind"]) for row in found] == [
        ("16×300×4096×4096, B transposed", pytest.approx(0.7), "batches"),
        ("11×4096×4096, B transposed", pytest.approx(0.9), "decode"),
        ("9×4096×4096, B transposed", pytest.approx(1.3), "decode"),
    ]  # of the seed measured last, the worst first
    text = html_of(shapes, tmp_path)
    assert '<option value="decode">' in text
    assert "11x4096x4096 0.90" in text
    assert "16x300x4096x4096 0.70" in text


def test_what_is_usually_advised_is_held_against_every_sweep(tmp_path: Path) -> None:
    for made in [*swept((256, 256, 256)), *swept((2048, 2048, 2048), "compute")]:
        made.save(tmp_path)
    for count in (1, 2, 3, 4):
        stream(stages=count, share=0.8 + 0.02 * count).save(tmp_path)
    stream(variant="direct", share=0.98).save(tmp_path)
    results = load(tmp_path)
    (memory_bound,) = stream_sweeps(results)
    assert stages.good_depths(memory_bound) == {stages.NONE}
    table = stages.usual_advice_table([*product_sweeps(results), memory_bound])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["memory-bound kernels"] == ("3 to 5", "0 of 1", "no staging in 1")
    # Of these curves the first is within a tie of its fastest from 4 stages on, the second at 2 alone.
    assert rows["small products"] == ("1 to 2", "0 of 1", "4 stages in 1")
    assert rows["large products"] == ("3 to 5", "0 of 1", "2 stages in 1")
    assert rows["matrix products"] == ("3", "0 of 2", "2 stages in 1, 4 stages in 1")


def model(**changes: Any) -> ModelRecord:
    like, ours = record(5), (("matmul<0>", "Matmul", 3, 0.1), ("rms_norm", "RMSNorm", 2, 0.02))
    functions = tuple(FunctionTimed(name, rule, False, calls, timing(name, ms)) for name, rule, calls, ms in ours)
    made = (("ladder", 1.0, functions), ("stock", 4.0, ()), ("dlight-sm90", 2.0, ()))
    rules = tuple(
        RulesTimed(
            name, "sm_90a", "measured", "", "float32", 1.0, "0" * 64, like.verification, timing(name, ms), None, own
        )
        for name, ms, own in made
    )
    beside = (Peer("torch", "measured", "", "", timing("torch", 0.9)),)
    case = {
        "model": "llama-layer",
        "extent": "seq",
        "value": 512,
        "symbolic": True,
        "dtype": "float16",
        "shape": (1, 512),
    }
    work = {"bytes_moved": 10**9, "flops": 10**12, "method": like.method, "command": "ladder model --seq 512"}
    return ModelRecord(**case, **work, rules=rules, beside=beside, environment=environment(), **changes)


def test_models_are_shown_beside_others_and_function_by_function(tmp_path: Path) -> None:
    record(5).save(tmp_path)
    model().save(tmp_path)
    text = html_of(models, tmp_path)
    assert "there is no record" not in text
    assert "<strong>4.00</strong>" in text  # of stock TVM
    assert "<strong>2.00</strong>" in text  # of dlight
    assert "matmul&lt;0&gt;" in text
    assert 'data-when="case:llama-layer-seq-512"' in text


def unpacked(columns: dict[str, Any]) -> list[dict[str, Any]]:
    full = {
        name: [own["of"][place] for place in own["at"]] if isinstance(own, dict) else own
        for name, own in columns.items()
    }
    return [dict(zip(full, values)) for values in zip(*full.values())]


def test_a_chart_has_its_data_and_texts_and_picks_among_them() -> None:
    rows = [
        {"gpu": name, "x": place, "y": 1 / 3 if place else None}
        for place, name in enumerate(["a", "a", "a", "</script>"])
    ]
    made = str(chart({"data": {"values": rows}, "mark": "point"}, title="T <b>", alt='a "text"', picked={"gpu": "a"}))
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', made, re.S)
    spec = json.loads(text)
    assert unpacked(spec["data"]["packed"]["columns"]) == [
        row | {"y": pytest.approx(row["y"], rel=1e-5) if row["y"] else None} for row in rows
    ]
    assert spec["params"] == [{"name": "gpu", "value": "a"}]
    assert 'data-picked="gpu"' in made
    assert "T &lt;b&gt;" in made
    assert "&#34;text&#34;" in made


@pytest.mark.parametrize("address", ["../index.html", "/etc/x.html", "a//b.html", "a/./b.html", "", "a\\b.html"])
def test_addresses_stay_inside_the_site(address: str) -> None:
    with pytest.raises(UsageError, match=r"inside the site"):
        check_addresses([File(address, "")])


def test_two_files_cannot_have_one_address() -> None:
    with pytest.raises(UsageError, match=r"static/a\.js"):
        check_addresses([File("static/a.js", ""), File("static/a.js", "")])


@pytest.mark.parametrize(
    ("source", "target", "link"),
    [
        ("index.html", "lessons/step5.html#why", "lessons/step5.html#why"),
        ("lessons/step5.html", "static/site.css", "../static/site.css"),
        ("lessons/step5.html", "lessons/step4.html", "step4.html"),
    ],
)
def test_links_are_relative(source: str, target: str, link: str) -> None:
    assert relative(source, target) == link


def test_code_is_coloured_and_escaped() -> None:
    made = str(highlight("if (a < b) { x[0] = 1; }", "cuda"))
    assert "&lt;" in made
    assert 'tabindex="0"' in made
    assert re.sub(r"<[^>]+>", "", made).replace("&lt;", "<").strip() == "if (a < b) { x[0] = 1; }"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[SiteSources], Iterator[Page]]], None]:
    """Have the site be made by one function, without the charts' script, which takes seconds to bundle."""

    def make(pages: Callable[[SiteSources], Iterator[Page]]) -> None:
        monkeypatch.setattr(build, "page_modules", lambda: [SimpleNamespace(pages=pages)])
        monkeypatch.setattr(build, "vega_script", lambda: "")

    return make


def test_the_command_writes_the_site_and_again_over_it(
    tmp_path: Path, small: Any, capsys: pytest.CaptureFixture
) -> None:
    record(5).save(tmp_path)
    small(overview.pages)
    for _ in range(2):
        assert main(["report", "--results", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "site" / "index.html")
    static = {path.name for path in (tmp_path / "site" / "static").iterdir()}
    assert static == {path.name for path in build.STATIC.iterdir()} | {"vega.js"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".site")] == []


def test_a_folder_that_is_no_site_is_left_alone(tmp_path: Path, small: Any, capsys: pytest.CaptureFixture) -> None:
    record(5).save(tmp_path)
    small(overview.pages)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "thesis.tex").write_text("all of it")
    assert main(["report", "--results", str(tmp_path)]) == 2
    assert "move it away" in capsys.readouterr().err
    assert (tmp_path / "site" / "thesis.tex").read_text() == "all of it"


def test_a_site_that_cannot_be_made_leaves_the_one_before(tmp_path: Path, small: Any) -> None:
    record(5).save(tmp_path)
    small(overview.pages)
    assert main(["report", "--results", str(tmp_path)]) == 0
    before = (tmp_path / "site" / "index.html").read_text()

    def broken(sources: SiteSources) -> Iterator[Page]:
        yield from overview.pages(sources)
        yield Page("later.html", "later", "overview.html.j2", {})  # lacks what the template needs

    small(broken)
    assert main(["report", "--results", str(tmp_path)]) == 4
    assert (tmp_path / "site" / "index.html").read_text() == before


def test_a_site_beyond_its_size_is_refused(tmp_path: Path, small: Any, capsys: pytest.CaptureFixture) -> None:
    def large(sources: SiteSources) -> Iterator[Page | File]:
        yield from overview.pages(sources)
        yield File("static/large.js", "x" * build.LARGEST_BYTES)

    record(5).save(tmp_path)
    small(large)
    assert main(["report", "--results", str(tmp_path)]) == 2
    assert f"{build.LARGEST_BYTES:,}" in capsys.readouterr().err


def test_a_missing_library_is_named_with_its_extra() -> None:
    with pytest.raises(UsageError, match=r"no_such_library.*\[report\]"):
        extra.needed("no_such_library")
