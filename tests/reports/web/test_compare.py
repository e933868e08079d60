"""What the comparison is made from: kernels of records, their texts, machine code that was compiled of them."""

from __future__ import annotations

import base64
import json
import lzma
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.reports_fixtures import environment, record
from tensorir_ladder.harness.build import lower
from tensorir_ladder.harness.records import RESULTS, RecordError
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.web import compare, machine_code, packing
from tensorir_ladder.reports.web.listings import case_of, compiled_for_reports, kernels, listings
from tensorir_ladder.reports.web.page import File
from tensorir_ladder.reports.web.sources import SiteSources

LINES = st.lists(st.sampled_from(["", "a", "b", "  c {", "}"]), max_size=12).map("\n".join)


@pytest.fixture(scope="module")
def committed() -> SiteSources:
    """The committed records."""
    return SiteSources.of(Paths.of())


def sources_of(folder: Path, *records: Any) -> SiteSources:
    for one in records:
        one.save(folder)
    return SiteSources.of(Paths.of(folder))


def data_of(file: File) -> Any:
    """What a script of the page holds."""
    text = re.fullmatch(r'\(window\.comparison \?\?= \{\}\)\["\w+"\] = "([A-Za-z0-9+/=]*)";\n', file.text)
    return json.loads(zlib.decompress(base64.b64decode(text[1])))


def unrolled(lines: list[str], runs: list[int]) -> str:
    """A text as static/compare.js puts it together."""
    found, place = [], 0
    for skipped, taken in zip(runs[::2], runs[1::2]):
        found += lines[place + skipped : place + skipped + taken]
        place += skipped + taken
    return "\n".join(found)


@given(st.lists(LINES, max_size=6))
def test_packed_texts_come_out_as_they_were(texts: list[str]) -> None:
    packed = packing.pack(texts)
    assert len(set(packed.lines)) == len(packed.lines)
    assert [unrolled(list(packed.lines), list(runs)) for runs in packed.runs] == texts


def test_what_is_no_whole_compressed_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lzma.compress(b"x" * 1000)
    assert packing.unpack_bytes(whole, "file") == b"x" * 1000
    for broken in (b"", b"text", whole[:-9], whole[:20] + b"\0" + whole[21:]):
        with pytest.raises(RecordError, match=r"file .*restore it"):
            packing.unpack_bytes(broken, "file")
    monkeypatch.setattr(packing, "LARGEST_BYTES", 999)
    with pytest.raises(RecordError, match="999"):
        packing.unpack_bytes(whole, "file")


def test_kernels_are_those_of_records_and_every_variant_once(committed: SiteSources) -> None:
    found = kernels(committed)
    assert len({kernel.identity for kernel in found}) == len(found)
    measured = {kernel.record.key for kernel in found if kernel.record}
    keys = {(r.step, r.variant, r.shape, r.environment.gpu) for r in committed.results.records}
    assert {(k.step, k.variant, k.shape, k.gpu) for k in found if k.record} == keys
    assert measured <= {record.key for record in committed.results.records}
    usual = {
        number: [each.name for each in step.variants if not each.debug] for number, step in committed.steps.items()
    }
    variants = {(number, name) for number, names in usual.items() for name in names}
    assert {(kernel.step, kernel.variant) for kernel in found if kernel.listed} >= variants
    assert sum(kernel.counters is not None for kernel in found) == len(committed.results.counters)
    assert sum(kernel.timeline is not None for kernel in found) == len(committed.results.timelines)


def test_the_default_tile_is_taken_where_two_records_are_of_one_kernel(tmp_path: Path) -> None:
    best = replace(record(4, 256), tile_choice="best")
    found = [k for k in kernels(sources_of(tmp_path, best, record(4, 256))) if k.record and k.step == 4]
    assert [(kernel.record.tile_choice, kernel.default) for kernel in found] == [("default", True)]


def test_a_kernel_that_its_step_refuses_has_no_texts_and_the_others_have(tmp_path: Path) -> None:
    unknown = record(4, 1024, tile="1024x1024x1024/1x1", tile_choice="given")
    sources = sources_of(tmp_path, record(4, 1024), unknown, record(5, 1024, variant="gone"))
    own = [kernel for kernel in kernels(sources) if kernel.record]
    made = listings(own, jobs=1)
    assert [kernel.key in made for kernel in own] == [kernel.variant == "default" and kernel.default for kernel in own]
    assert set(next(iter(made.values())).texts) == {"schedule", "tir", "lowered", "cuda"}


def test_kernels_of_one_text_on_two_gpus_share_it(committed: SiteSources) -> None:
    pair = [k for k in kernels(committed) if (k.step, k.shape) == (4, (1024,) * 3) and k.default]
    assert len({kernel.gpu for kernel in pair}) == 2
    made = listings(pair, jobs=1)
    assert len({id(listing) for listing in made.values()}) == 1
    assert all(made[kernel.key].source_sha256 == kernel.record.source_sha256 for kernel in pair)


def test_machine_code_counts_for_its_own_cuda_alone(committed: SiteSources, tmp_path: Path) -> None:
    code = machine_code.read(RESULTS)
    step5 = next(k for k in compiled_for_reports(committed) if (k.step, k.variant) == (5, "async"))
    listing = listings([step5], jobs=1)[step5.key]
    texts = compare.texts({listing.source_sha256: listing}, code)
    assert set(texts["texts"][listing.source_sha256]) == {"schedule", "tir", "lowered", "cuda", "ptx", "sass"}
    lines = texts["lines"].split("\n")
    before, own = texts["texts"][listing.source_sha256]["sass"]
    assert "LDGSTS" in unrolled(lines, texts["runs"][own])
    assert "sm_90a" in unrolled(lines, texts["runs"][before])
    other = replace(listing, source_sha256="0" * 64)
    assert set(compare.texts({"0" * 64: other}, code)["texts"]["0" * 64]) == {"schedule", "tir", "lowered", "cuda"}


def test_the_committed_machine_code_is_of_todays_cuda(committed: SiteSources) -> None:
    code = machine_code.read(RESULTS)
    quick = {kernel.text_key: kernel for kernel in compiled_for_reports(committed) if kernel.step <= 5}
    for kernel in quick.values():
        known = lower(case_of(kernel)).source_sha256 in code.by_source
        assert known, f"{kernel.identity}: where there is a CUDA compiler, {machine_code.COMMAND}"


def test_the_recorded_cubins_are_those_that_were_measured(committed: SiteSources) -> None:
    code = machine_code.read(RESULTS)
    same = compiler = 0
    for one in committed.results.records:
        entry = code.by_source.get(one.source_sha256)
        if entry and f"nvcc {one.environment.versions.get('nvcc')}" == code.compiler:
            compiler += 1
            same += entry.cubin_sha256 == one.cubin_sha256
    assert same == compiler > 0


@pytest.mark.parametrize(
    "changed",
    [
        {"kernels": [{"source_sha256": "0" * 64}]},
        {"texts": []},
        {"compiler": "\u202e"},
        {"schema": 2},
        {"more": 1},
    ],
)
def test_machine_code_that_somebody_altered_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    digests = {"source_sha256": "0" * 64, "cubin_sha256": "1" * 64}
    entry = {**digests, "arch": "sm_90a", "registers": 32, "spill_bytes": 0, "ptx": 0, "sass": 1}
    whole = {"compiler": "nvcc 13", "kernels": [entry], "texts": ["a", "b"], "schema": 1}
    path = tmp_path / machine_code.FILE
    path.write_bytes(lzma.compress(json.dumps(whole).encode()))
    assert machine_code.read(tmp_path).of("0" * 64) == {"ptx": "a", "sass": "b"}
    path.write_bytes(lzma.compress(json.dumps(whole | changed).encode()))
    with pytest.raises(RecordError, match=machine_code.COMMAND):
        machine_code.read(tmp_path)


@pytest.mark.compiler
def test_machine_code_is_written_and_read_again(committed: SiteSources, tmp_path: Path) -> None:
    from tensorir_ladder.kernels.codegen.toolchain import find_tool

    if find_tool("cuobjdump") is None:
        pytest.skip("no cuobjdump")
    assert machine_code.read(tmp_path) is None
    steps = [kernel for kernel in compiled_for_reports(committed) if kernel.step in (1, 2)]
    path, count = machine_code.write(tmp_path, steps)
    assert (path.name, count) == (machine_code.FILE, 2)  # the same text for both GPUs
    code = machine_code.read(tmp_path)
    for entry in code.kernels:
        texts = code.of(entry.source_sha256)
        assert ".visible .entry main_kernel" in texts["ptx"]
        assert "EXIT" in texts["sass"]
        assert entry.registers > 0


def test_the_page_shows_what_was_measured_and_how_to_measure_the_rest(tmp_path: Path) -> None:
    sources = sources_of(tmp_path, record(4, 1024), record(5, 1024, tile_choice="default"))
    found = kernels(sources)
    data = compare.index(sources, found, {}, None)
    rows = {(row["step"], row["variant"]): row for row in data["kernels"] if row["product"] == "1024³ float32"}
    assert rows[4, "default"]["speed"]["ratio"] == pytest.approx(record(4, 1024).ratio_to_cublas)
    assert rows[4, "default"]["resources"]["registers"] == 64
    assert rows[4, "default"]["command"].endswith("-steps.jsonl:1")
    assert "speed" not in rows[5, "sync"]
    assert rows[5, "sync"]["command"].startswith("ladder run --step 5 --variant sync --shape 1024x1024x1024")


def test_what_records_say_does_not_become_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    monkeypatch.setattr(compare, "kernels", lambda sources: [k for k in kernels(sources) if k.record])
    items = list(compare.pages(sources_of(tmp_path, record(4, 1024, environment=environment(gpu=hostile)))))
    files = {item.address: item for item in items if isinstance(item, File)}
    assert hostile in data_of(files["compare/index.js"])["gpus"].values()
    assert not any("<img" in file.text for file in files.values())
