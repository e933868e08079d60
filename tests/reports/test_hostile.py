"""Records that somebody altered: named and left out, or harmless; and texts that would be markup, paths or commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from support.reports_fixtures import calibration, environment, forecast, peers, record, stream, timeline, tuned
from tensorir_ladder.harness.records import Record, bad_lines, gpu_slug, load_records, path_name
from tensorir_ladder.reports import plot
from tensorir_ladder.reports.__main__ import main
from tensorir_ladder.reports.readme import BEGIN, END
from tensorir_ladder.reports.selection import load
from tensorir_ladder.reports.templating import Markdown, clean

HOSTILE = [
    "<script>alert(1)</script>",
    f"--> {END} <!--",
    "a | b || c",
    "`code` ``more``",
    "[text](javascript:alert(1))",
    "x](javascript:alert(1)",
    "![picture](http://example.com/x.png)",
    "<http://example.com> [x]: http://example.com",
    "**bold** __bold__ *it* _it_ ~~gone~~ $x^2$",
    "&lt;b&gt; &amp; &#42;",
    "\\` \\| \\",
    "# heading",
    "- item",
    "1. item",
    "---",
    "a\n\n# b\r\n<br>c",
    "\u202eright to left\u202c",
    "\x1b[31mred\x1b[0m\x07",
    "<img src=x onerror=alert(1)>",
    "é 中文 🙂",
    "{{ 7 * 7 }} {% raw %}",
]
TAGS = ("table", "thead", "tbody", "tr", "th", "td")


def flat(text: str) -> list[Token]:
    """What a reader of Markdown makes of a text, spans and blocks one after another."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    return [inner for token in tokens for inner in (token, *(token.children or ()))]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("around", ["{}", "| a | b |\n|--|--|\n| {} | c |\n", "### {}\n", "end {}.", "x{}y"])
def test_a_text_is_shown_as_it_is_and_nothing_else(text: str, around: str) -> None:
    plain, hostile = (flat(Markdown(around).format(shown)) for shown in ("text", text))
    assert [token.type for token in hostile] == [token.type for token in plain] or "\\" in text or "&" in text
    shown = "".join(token.content for token in hostile if token.type in ("text", "text_special"))
    assert clean(text) in shown
    assert {token.type for token in hostile} <= {token.type for token in plain} | {"text_special"}


@given(st.text(st.sampled_from("ab1 <>|`*_[]()!\\&#;-+.:/~$\n\x1b\u202e'\""), max_size=30))
def test_any_text_is_text(text: str) -> None:
    types = {token.type for token in flat(Markdown("| a |\n|--|\n| x {} y |\n").format(text))}
    assert types <= {*(f"{tag}_{end}" for tag in TAGS for end in ("open", "close")), "inline", "text", "text_special"}


def test_what_is_markdown_already_stays() -> None:
    bold = Markdown("**{}**").format("1.17")
    assert Markdown.escape(bold) == bold == "**1.17**"
    assert Markdown("<br>").join(["a|b", bold]) == "a&#124;b<br>**1.17**"
    assert Markdown("see ") + "<b>" == "see &lt;b&gt;"


@pytest.mark.parametrize("text", [*HOSTILE, "x" * 10_000, "../../README", "", ".", "..", "-rf"])
def test_no_text_becomes_a_path(text: str, tmp_path: Path) -> None:
    assert path_name(gpu_slug(text[:80])) == gpu_slug(text[:80])
    if (text != "---" and not text.isidentifier()) or len(text) > 250:
        with pytest.raises(ValueError, match="cannot be a file's name"):
            path_name(text)


# Whole sets of reports


def hostile(text: str, step: int, size: int = 1024) -> Record:
    """A record whose every free text is that."""
    made, shown = record(step, size, predicted_gain_pct=None), clean(text)[:60]
    state = environment(gpu=f"NVIDIA {shown}")
    state = replace(state, driver=shown, revision=text, gpu_uuid=shown, versions={text: text})
    named = tuple(
        replace(peer, name=f"{shown} {peer.name}", why=text if peer.why else "", config=text) for peer in peers(size)
    )
    return replace(made, environment=state, peers=named, command=text, notes=(text,))


@pytest.mark.parametrize("text", ["\n".join(HOSTILE), *HOSTILE[:6], "x" * 10_000], ids=range(8))
def test_hostile_texts_leave_the_reports_as_they_are(text: str, tmp_path: Path, capsys: Any) -> None:
    for number in (4, 5):
        hostile(text, number).save(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"before {BEGIN}\n{END} after")
    arguments = ["--results", str(tmp_path), "--readme", str(readme)]
    for command in (["readme"], ["page"], ["table"], ["table", "--markdown"], ["table", "--json"], ["readme"]):
        assert main([*command, *arguments]) == 0, command
    assert main(["check", *arguments]) in (0, 5)
    capsys.readouterr()
    written = readme.read_text()
    assert (written.count(BEGIN), written.count(END)) == (1, 1)
    assert written.startswith(f"before {BEGIN}\n")
    assert written.endswith(f"{END} after")
    for path in (readme, *tmp_path.glob("pages/*.md")):
        tokens = flat(path.read_text())
        links = [token.attrs["href"] for token in tokens if token.type == "link_open"]
        assert all(not str(link).startswith(("javascript", "http")) for link in links)
        html = {token.content.strip() for token in tokens if token.type in ("html_inline", "html_block")}
        ours = ("<br>", "<details>", "</details>", "<!-- Generated", "<sub>", "</sub>", "before", BEGIN, END)
        assert all(text.startswith(ours) for text in html), html
        assert max(map(len, path.read_text().splitlines())) < 20_000
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} <= {
        tmp_path, tmp_path / "pages", tmp_path / "plots", tmp_path / "pages" / "plots"
    }  # fmt: skip


def test_a_dollar_in_a_name_is_drawn(tmp_path: Path) -> None:
    for size in (256, 512):
        hostile(r"$\frac{1", 5, size).save(tmp_path)
    drawn = [item.write(tmp_path) for item in plot.ladder_plots(load(tmp_path))]
    assert drawn
    assert all(path.parent == tmp_path and path.is_file() for path in drawn)


# One field altered


def whole() -> Record:
    """A record in which every part that there may be is there."""
    tried = ({"tile": "64x64x16/4x4", "time_ms": 1.0, "stages": 4}, {"tile": "8x8x8/1x1", "time_ms": None, "why": "no"})
    return record(5, peers=peers(1024), depth=forecast((1.0, 0.9)), candidates=tried, notes=("a note",))


GONE = object()
BIG, DEEP = 10**400, json.loads("[" * 500 + "]" * 500)
NAMED: list[tuple[str, Any]] = [
    *[(name, value) for name in ("m", "n", "k") for value in (0, -1, 2**31, 1.5, "8", None, True, BIG, GONE)],
    *[("stages", value) for value in (0, -3, 2**31, 2.5, "4", None)],
    *[("step", value) for value in (-1, 10**6, "5", None, 5.5)],
    *[
        ("step_name", value)
        for value in ("../../README", "a/b", ".hidden", "", "a\nb", "-x", "x" * 300, 5, "a b", "a\0")
    ],
    *[("variant", value) for value in ("../x", "<b>", "", "a|b", None)],
    *[
        ("tile", value)
        for value in ("", "big", "0x64x16/4x4", "64x64x16/4x4/../..", "64x64", "1" * 40, "64x64x16/4x4 ")
    ],
    *[("dtype", value) for value in ("float8", "", 4)],
    *[("out_dtype", value) for value in ("int32", None)],
    *[("layout", value) for value in ("tt", "NN")],
    *[("kind", value) for value in ("guess", None)],
    *[("math", value) for value in ("fast", 3)],
    *[("tile_choice", value) for value in ("mine", None)],
    *[("bound", value) for value in ("luck", None)],
    *[("default_variant", value) for value in (1, "yes")],
    *[
        ("timing.samples_ms", value)
        for value in ([], [0.0] * 9, [-1.0] * 9, [1e400] * 9, ["1"] * 9, 5, [None] * 9, [1e12] * 9)
    ],
    *[("baseline", value) for value in ([], {}, None)],
    *[("baseline.0.samples_ms", value) for value in ([1.0] * 3, [BIG] * 9)],
    *[("previous", value) for value in ([], "fast", {"label": "x"})],
    *[("verification.passed", value) for value in (False, "yes", None)],
    *[("verification.max_error", value) for value in (1e9, "small", BIG)],
    *[("verification.tolerance", value) for value in (-1.0, None)],
    *[("method.rounds", value) for value in (-1, 5, 10**30, "9")],
    *[
        ("environment.recorded_at", value)
        for value in ("yesterday", "2026-13-01T00:00:00.000+00:00", "", 5, "2026-11-20")
    ],
    *[("environment.gpu", value) for value in ("", "\u202eNVIDIA", "a\nb", "x" * 300, None)],
    *[("environment.dirty", value) for value in (True, 1)],
    *[("environment.before", value) for value in ({}, None, [])],
    *[("resources.registers", value) for value in (-1, "64")],
    *[("resources.occupancy", value) for value in (-0.5, "half")],
    *[("code.cp_async", value) for value in (-1, None)],
    *[("peers.0.status", value) for value in ("maybe", "missing")],
    *[("peers.0.name", value) for value in ("", "a\x1b[0m", 7)],
    *[("peers.0.timing", value) for value in (None, {"label": "x", "samples_ms": [1.0]})],
    *[("depth.time_ms", value) for value in ([], [0.0, 1.0], ["1"])],
    *[("depth.recommended", value) for value in (0, "4")],
    *[("candidates.0", value) for value in ({}, {"tile": "x", "time_ms": 1.0}, 5)],
    *[("candidates.0.time_ms", value) for value in (-1.0, "fast")],
    *[("notes", value) for value in ("text", [5], DEEP)],
    *[("command", value) for value in (DEEP, None, "half \ud800")],
    *[("schema", value) for value in (2, "1", None)],
    *[
        (name, value)
        for name in ("unknown", "timing.unknown", "peers.0.unknown", "candidates.0.unknown")
        for value in (1, None)
    ],
    *[(name, GONE) for name in ("timing", "kind", "environment.gpu", "timing.label", "verification", "peers.0.status")],
]
HARMLESS: list[tuple[str, Any]] = [
    *[("command", text) for text in ("x" * 10_000, HOSTILE[0])],
    ("notes", GONE),
    ("peers", GONE),
    ("depth", None),
    ("step", 999),
    ("m", 2**31 - 1),
    ("timing.samples_ms", [1e-6] * 9),
    ("timing.samples_ms", [1e8] * 9),
    ("previous", None),
    ("resources", None),
    ("code", None),
    ("predicted_gain_pct", 1e15),
]


def altered(path: str, value: Any, n: int = 1024) -> str:
    """The whole record's line, as another case, with one field replaced, added or taken away."""
    data = json.loads(whole().to_json()) | {"n": n}
    *parents, name = path.split(".")
    place: Any = data
    for parent in parents:
        place = place[int(parent)] if parent.isdigit() else place[parent]
    key = int(name) if name.isdigit() else name
    if value is GONE:
        del place[key]
    else:
        place[key] = value
    return json.dumps(data)


def ids(pair: tuple[str, Any]) -> str:
    """Name an alteration."""
    return f"{pair[0]}={'gone' if pair[1] is GONE else ascii(pair[1])[:30]}"


def between(folder: Path, line: str | bytes) -> None:
    """Put a line between two whole records."""
    record(1, 256).save(folder)
    with (folder / "h200-steps.jsonl").open("ab") as file:
        file.write((line if isinstance(line, bytes) else line.encode()) + b"\n")
    record(1, 512).save(folder)


def reports_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the reports; what check says. Both whole records must be shown."""
    assert main(["table", "--markdown", "--results", str(folder)]) == 0
    capsys.readouterr()
    assert main(["table", "--json", "--results", str(folder)]) == 0
    shown = {(row["step"], row["m"]) for row in json.loads(capsys.readouterr().out)}
    assert {(1, 256), (1, 512)} <= shown
    return main(["check", "--results", str(folder)]), capsys.readouterr().out


def test_as_many_are_altered_as_the_attack_altered() -> None:
    assert len(NAMED) + len(HARMLESS) >= 82
    assert Record.from_json(whole().to_json()) == whole()


def test_an_altered_record_is_named(tmp_path: Path, capsys: Any) -> None:
    between(tmp_path, "\n".join(altered(*pair, n=1000 + number) for number, pair in enumerate(NAMED)))
    status, said = reports_on(tmp_path, capsys)
    assert status == 5
    for number, pair in enumerate(NAMED, 2):
        lines = [
            line
            for line in said.splitlines()
            if line.startswith((f"h200-steps.jsonl:{number}: ", f"h200-steps.jsonl:{number} "))
        ]
        assert lines, f"{ids(pair)} is not named"
        assert all(len(line) < 500 for line in lines), ids(pair)
    assert {record.m for record in load(tmp_path).records} == {256, 512, 1024}


@pytest.mark.parametrize("pair", HARMLESS, ids=ids)
def test_what_is_not_named_is_harmless(pair: tuple[str, Any], tmp_path: Path, capsys: Any) -> None:
    between(tmp_path, altered(*pair))
    reports_on(tmp_path, capsys)
    assert bad_lines(tmp_path) == []
    assert len(load(tmp_path).records) == 3


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 200_000,
        b'{"a":' * 5000,
        b'{"m": 1' + b"0" * 5000 + b"}",
        b"\xff\xfe\x00",
        b"\x00" * 50,
        b'{"m": NaN}',
        b"-Infinity",
        whole().to_json().encode().replace(b'"m":', b'"m":1,"m":', 1),
        whole().to_json().encode()[:-200],
        whole().to_json().encode().replace(b"a note", b"a \xc3 note"),
        whole().to_json().encode().replace(b"a note", b"a \\u0000 note"),
        b'"' + b"x" * (2**24 + 100) + b'"',
        calibration().to_json().encode().replace(b'"step"', b'"stop"'),
        b"{}",
        b"null",
    ],
    ids=range(15),
)
def test_a_line_that_is_no_record_is_named(line: bytes, tmp_path: Path, capsys: Any) -> None:
    between(tmp_path, line)
    status, said = reports_on(tmp_path, capsys)
    assert status == 5
    (named,) = [text for text in said.splitlines() if "h200-steps.jsonl:2 " in text]
    assert len(named) < 500
    assert len(list(load_records(tmp_path))) == 2


@pytest.mark.parametrize("made", [stream(), timeline(), tuned()], ids=["stream", "timeline", "tuned"])
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_other_kinds_are_named_too_or_harmless(made: Any, data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    record(1, 256).save(folder)
    plain = json.loads(made.to_json())
    values = st.sampled_from([None, 0, -1, BIG, "", "../x", [], {}, 1e300, True, "\u202e", [[]], {"a": 1}, "a\0"])
    paths: list[tuple[Any, ...]] = list(leaves(plain))
    *parents, name = data.draw(st.sampled_from(paths))
    place = plain
    for parent in parents:
        place = place[parent]
    place[name] = data.draw(values)
    (folder / f"h200-{made.FILE}.jsonl").write_text(json.dumps(plain) + "\n")
    for command in (["table", "--markdown"], ["stages", "--json"], ["check"]):
        assert main([*command, "--results", str(folder)]) in (0, 5)


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Any:
    """The places of all fields and elements of a record."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, inner in inside:
        yield (*place, name)
        yield from leaves(inner, (*place, name))


# A record's text as a path


def test_a_name_that_leads_out_of_its_folder_overwrites_nothing(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "a" / "b"
    readme = tmp_path / "README.md"
    readme.write_text("mine")
    record(5).save(folder)
    line = record(5, m=512).to_json().replace("step5_pipelining", "../../../README")
    with (folder / "h200-steps.jsonl").open("a") as file:
        file.write(line + "\n")
    assert main(["page", "--results", str(folder)]) == 0
    assert main(["check", "--results", str(folder)]) == 5
    assert "h200-steps.jsonl:2 is no Record" in capsys.readouterr().out
    assert readme.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["a", "README.md"] or len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace("65889", "-1"),
        lambda text: text.replace("65889", "1" + "0" * 400),
        lambda text: text.replace('"origin"', '"source"'),
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: "\x00",
    ],
    ids=range(7),
)
def test_damaged_peaks_are_one_error(
    damage: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "peaks.json"
    path.write_text(damage(plot.PEAKS.read_text()))
    monkeypatch.setattr(plot, "PEAKS", path)
    record(1).save(tmp_path)
    assert main(["check", "--results", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}")
    assert "restore it from git" in line
