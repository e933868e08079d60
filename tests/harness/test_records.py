"""Records: a line each, whole on disk or not there, read back equal, refused by place where they are none."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import math
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cases import STEPS, Outcome
from support.fake_gpu import FakeGpu
from support.reports_fixtures import calibration, environment, listing, record
from tensorir_ladder.harness.bandwidth import WORKLOADS
from tensorir_ladder.harness.cli import parse
from tensorir_ladder.harness.commands.options import cases_named
from tensorir_ladder.harness.machines import MACHINES
from tensorir_ladder.harness.records import (
    DepthForecast,
    Peer,
    Record,
    RecordError,
    StreamRecord,
    Timing,
    bad_lines,
    check_writable,
    load_listings,
    load_records,
    load_streams,
    newest,
    read_place,
    read_places,
    write_atomically,
)
from tensorir_ladder.harness.records.parts import Arch, Dtype, Layout, Math, Name, Tile, TileOrNone
from tensorir_ladder.harness.records.strict import decode
from tensorir_ladder.schedules.tiles import BlockTile
from tensorir_ladder.schedules.workloads import DTYPES, LAYOUTS


def full_disk(*_arguments: object, **_named: object) -> None:
    """Fail as a system call does where no space is left."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def edited(**changes: object) -> str:
    """A record's JSON with fields replaced."""
    return json.dumps({**json.loads(record().to_json()), **changes})


@pytest.mark.parametrize(
    "made",
    [
        record(1),
        record(5, 256),
        calibration(),
        replace(record(), resources=None, code=None, notes=("a", "b"), predicted_gain_pct=None),
        replace(record(), tile_choice="best", candidates=({"tile": "32x32x16/4x4", "time_ms": None, "why": "no"},)),
    ],
    ids=["first step", "pipelined", "calibration", "without figures", "with candidates"],
)
def test_a_record_is_read_back_equal(made: Record, tmp_path: Path) -> None:
    assert Record.from_json(made.to_json()) == made
    place = made.save(tmp_path)
    assert read_place(place) == made
    assert read_places(tmp_path, Record) == {place: made}


def test_a_listing_is_read_back_equal(tmp_path: Path) -> None:
    made = [listing(5, "sync"), listing(5), listing(1)]
    assert [one.save(tmp_path).name for one in made] == ["step5-sync.json", "step5-async.json", "step1-default.json"]
    assert load_listings(tmp_path) == [made[2], made[1], made[0]]


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=40))
def test_the_time_is_the_median_of_the_raw_samples(samples: list[float]) -> None:
    made = replace(record(), timing=Timing("x", tuple(samples)))
    assert made.time_ms == statistics.median(samples)
    assert made.gflops == pytest.approx(2 * made.m * made.n * made.k / made.time_ms / 1e6)
    assert made.timing.spread_pct >= 0
    assert Record.from_json(made.to_json()).timing.samples_ms == tuple(samples)


def test_ratios_use_the_faster_baseline_and_the_same_rounds() -> None:
    made = replace(
        record(),
        m=100,
        n=200,
        k=300,
        timing=Timing("own", (2.0, 1.0, 4.0)),
        baseline=(Timing("cublas-nn", (3.0, 3.0, 3.0)), Timing("cublas-nt", (1.5, 1.0, 2.8))),
        previous=Timing("before", (4.0, 1.5, 8.0)),
    )
    assert made.time_ms == 2.0
    assert made.gflops == 2 * 100 * 200 * 300 / 2e6
    assert made.fastest_baseline.label == "cublas-nt"
    # Round by round 0.75, 1 and 0.7: each is set against cuBLAS's time in its own round.
    assert made.ratio_to_cublas == 0.75
    assert made.ratio_interval == pytest.approx((0.7, 1.0))
    assert made.improvement_over_previous_pct == pytest.approx(100.0)
    assert replace(made, previous=None).improvement_over_previous_pct is None
    assert Timing("one", (3.0,)).spread_pct == 0.0
    assert Timing("four", (1.0, 2.0, 3.0, 4.0)).spread_pct == pytest.approx(100 * 2.5 / 2.5)


def test_records_are_appended_and_read_by_time(tmp_path: Path) -> None:
    times = [f"2026-11-20T10:00:00.00{n}+00:00" for n in (3, 1, 2)]
    made = [replace(record(step), environment=environment(at=at)) for step, at in zip((1, 5, 3), times)]
    file = tmp_path / "h200-steps.jsonl"
    assert [one.save(tmp_path) for one in made] == [f"{file}:{number}" for number in (1, 2, 3)]
    assert list(load_records(tmp_path)) == [made[1], made[2], made[0]]
    assert [read_place(f"{file}:{number}") for number in (1, 2, 3)] == made
    other = replace(made[0], environment=environment(gpu="NVIDIA A100-SXM4 80GB"))
    assert Path(other.save(tmp_path)).name == "a100-sxm4-80gb-steps.jsonl:1"


def test_the_newest_clean_record_of_a_key_counts() -> None:
    times = [f"2026-11-2{day}T10:00:00.000+00:00" for day in range(3)]
    old, new = (replace(record(), environment=environment(at=at)) for at in times[:2])
    dirty = replace(record(), environment=environment(at=times[2], dirty=True))
    other = record(5)
    assert newest({"a": new, "b": old, "c": dirty, "d": other}) == {"a": new, "d": other}
    assert newest({"a": dirty}) == {"a": dirty}
    assert list(newest({"a": old, "b": old})) == ["b"]


TORN = record(5).to_json()[:-30].encode()


@pytest.mark.parametrize("torn", [TORN, TORN + b"\n", b"\0" * 40, b"\xff\xfe\x00\x80", b"<<<<<<< HEAD\n"])
def test_a_torn_line_is_passed_over_and_said_and_the_next_record_is_whole(
    torn: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = record(1), record(4)
    path = Path(first.save(tmp_path).rpartition(":")[0])
    path.write_bytes(path.read_bytes() + torn)
    assert list(load_records(tmp_path)) == [first]
    assert f"{path}:2" in caplog.text
    (named,) = bad_lines(tmp_path)
    assert named.startswith(f"{path}:2 is not whole JSON")
    with pytest.raises(RecordError, match=r"steps\.jsonl:2 is not whole"):
        read_place(f"{path}:2")
    assert second.save(tmp_path) == f"{path}:3"
    assert list(load_records(tmp_path)) == [first, second]


def test_a_last_line_that_lacks_its_end_only_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "h200-steps.jsonl"
    path.write_text(record(1).to_json())
    assert record(4).save(tmp_path) == f"{path}:2"
    assert list(load_records(tmp_path)) == [record(1), record(4)]
    assert bad_lines(tmp_path) == []


def test_processes_that_write_at_once_do_not_mix_their_lines(tmp_path: Path) -> None:
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(save_many, tmp_path, step, 40) for step in (1, 2)]:
            done.result()
    assert bad_lines(tmp_path) == []
    assert Counter(one.step for one in load_records(tmp_path)) == {1: 40, 2: 40}


def save_many(folder: Path, step: int, count: int) -> None:
    """Append a record many times."""
    for _ in range(count):
        record(step).save(folder)


def test_whatever_can_be_measured_can_be_recorded() -> None:
    assert (get_args(Dtype), get_args(Layout)) == (DTYPES, LAYOUTS)
    for step in STEPS.values():
        for name in (step.name, *step.variant_names):
            assert msgspec.convert(name, Name) == name
        for tile in (*step.tiles.best, *step.tiles.tuning):
            assert msgspec.convert(str(tile), Tile) == str(tile)
        assert {variant.math for variant in step.variants} <= set(get_args(Math))
    for arch, machine in MACHINES.items():
        assert msgspec.convert(machine.arch, Arch) == machine.arch, arch
    assert all(msgspec.convert(name, Name) for name in WORKLOADS)


@pytest.mark.parametrize("samples", [(), (math.nan,), (math.inf,), ("fast",)])
def test_what_could_not_be_read_back_is_not_written(samples: tuple, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="samples_ms"):
        replace(record(), timing=Timing("x", samples)).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def families(kind: type[BlockTile] = BlockTile) -> list[type[BlockTile]]:
    """All families of tiles that have a form, however deep."""
    below = [family for sub in kind.__subclasses__() for family in families(sub)]
    return list(dict.fromkeys([*([kind] if "FORM" in dir(kind) else []), *below]))


@pytest.mark.parametrize("family", families(), ids=lambda family: family.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_tile_s_text_is_read_back_by_its_family_by_records_and_by_options(
    family: type[BlockTile], data: st.DataObject
) -> None:
    groups = [tuple(data.draw(st.integers(1, 99_999)) for _ in range(count)) for count in family._lengths()]
    tile = family(*(group if len(group) > 1 else group[0] for group in groups))
    assert family.parse(str(tile)) == tile
    for kind in (Tile, TileOrNone):
        assert decode(json.dumps(str(tile)), kind, "a tile") == str(tile)
    takers = [step for step in STEPS.values() if type(example_of(step.tiles.kind, family)) is family]
    for step in {step.tiles.kind: step for step in takers}.values():
        words = ["run", "--step", str(step.number), "--tile", str(tile), "--arch", "sm_90a"]
        assert {case.tile for case in cases_named(parse(words), "256")} == {tile}


def example_of(kind: type[BlockTile], family: type[BlockTile]) -> BlockTile | None:
    """What a step's kind of tile reads another family's example as, if anything."""
    try:
        return kind.parse(family.EXAMPLE)
    except ValueError:
        return None


@pytest.mark.parametrize("variant", ["boxes", "all"])
def test_a_swapped_tile_is_measured_recorded_and_measured_again(
    variant: str, gpu: FakeGpu, command: Callable[..., Outcome], tmp_path: Path
) -> None:
    words = ("--step", "10", "--variant", variant, "--shape", "64x64x256", "--out", str(tmp_path))
    assert command("run", *words).code == 0
    (found,) = (place for place, made in read_places(tmp_path, Record).items() if made.variant == "boxes")
    old = read_place(found)
    assert "swapped" in old.tile
    assert command("run", "--again", found, "--out", str(tmp_path)).code == 0
    assert {made.tile for made in load_records(tmp_path) if made.variant == "boxes"} == {old.tile}


def test_the_key_tells_cases_apart_and_repetitions_not() -> None:
    made = record(5)
    again = replace(made, timing=Timing("x", (1.0,)), environment=environment(at="2027-01-01T00:00:00.000+00:00"))
    assert again.key == made.key
    others = [
        replace(made, **change)
        for change in (
            {"m": 7},
            {"layout": "nt"},
            {"dtype": "float16", "out_dtype": "float16"},
            {"dtype": "float16", "out_dtype": "float32"},
            {"variant": "sync"},
            {"stages": 9},
            {"tile_choice": "best"},
            {"tile_choice": "given"},
            {"environment": environment(gpu="NVIDIA A100")},
        )
    ]
    assert len({one.key for one in (made, *others)}) == len(others) + 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("null", "Expected"),
        ('"text"', "Expected"),
        ("{}", "missing required field"),
        (edited(schema=2), "$.schema"),
        (edited(timing={"label": "x"}), "$.timing"),
        (edited(timing=5), "$.timing"),
        (edited(m="many"), "$.m"),
        (edited(m=True), "$.m"),
        (edited(environment={}), "$.environment"),
        (edited(environment=[]), "$.environment"),
        (edited(verification=None), "$.verification"),
        (edited(method=3), "$.method"),
        (json.dumps({k: v for k, v in json.loads(record().to_json()).items() if k != "baseline"}), "baseline"),
        (listing().to_json().strip(), "missing required field"),
        (edited(timing=None), "$.timing"),
        (edited(timing={"label": "x", "samples_ms": []}), "$.timing.samples_ms"),
        (edited(timing={"label": "x", "samples_ms": ["fast"]}), "$.timing.samples_ms"),
        (edited(baseline=[]), "$.baseline"),
    ],
)
def test_what_is_no_record_is_named_by_its_place_and_left_out(
    text: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = record(1).save(tmp_path)
    with Path(place.rpartition(":")[0]).open("a") as file:
        file.write(text + "\n")
    record(4).save(tmp_path)
    assert list(load_records(tmp_path)) == [record(1), record(4)]
    (named,) = bad_lines(tmp_path)
    assert "h200-steps.jsonl:2 is no Record" in named
    assert says in named
    assert "\n" not in named
    assert named in caplog.text
    with pytest.raises(RecordError, match=r"h200-steps\.jsonl:2 is no Record"):
        read_place(f"{tmp_path / 'h200-steps.jsonl'}:2")


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder-steps.jsonl").mkdir()
    with pytest.raises(RecordError, match=r"folder-steps\.jsonl"):
        list(load_records(tmp_path))
    with pytest.raises(RecordError, match="no results folder"):
        list(load_records(tmp_path / "nowhere"))
    (tmp_path / "listings").mkdir()
    (tmp_path / "listings" / "step1-default.json").write_text("{")
    with pytest.raises(RecordError, match=r"step1-default\.json"):
        load_listings(tmp_path)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(record(1).save(tmp_path).rpartition(":")[0])
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(RecordError, match="No space left on device") as caught:
        record(5).save(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "--out" in str(caught.value)
    with pytest.raises(RecordError):
        check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_failed_replacement_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomically(tmp_path / "file", "old")
    for failing in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, full_disk)
            with pytest.raises(RecordError):
                write_atomically(path, "new")
        assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [check_writable, record().save], ids=["check_writable", "save"])
def test_a_folder_that_cannot_be_written(write: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RecordError, match="cannot write") as caught:
            write(folder)
        assert str(folder) in str(caught.value)


def test_check_writable_makes_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_what_later_versions_added_is_read_and_may_be_missing() -> None:
    made = record()
    peers = (
        Peer("triton", "measured", "", "64x64x16, 3 stages", made.timing),
        Peer("tilus", "missing", "not installed", "", None),
    )
    forecast = DepthForecast((2.0, 1.0, 1.1), (0.5, 0.5, 0.25), (0.0, 0.9, 1.0), 3, 30, 2)
    richer = replace(made, peers=peers, depth=forecast)
    assert Record.from_json(richer.to_json()) == richer
    older = {key: value for key, value in json.loads(made.to_json()).items() if key not in ("peers", "depth")}
    assert Record.from_json(json.dumps(older)) == made


def test_a_stream_record_comes_back_as_it_was(tmp_path: Path) -> None:
    made = record()
    shared = {name: getattr(made, name) for name in ("timing", "verification", "resources", "method", "environment")}
    stream = StreamRecord(
        workload="gelu", shape=(64, 128), dtype="float32", variant="staged", stages=3, config="256 threads",
        bytes_moved=65536, flops=8192, copy=made.baseline[0], torch=None, barriers=2, cp_async=1, bound="memory",
        source_sha256="", cubin_sha256="", arch="sm_90a", command="", **shared,
    )  # fmt: skip
    later = replace(made.environment, recorded_at="2026-12-01T00:00:00.000+00:00")
    newer = replace(stream, environment=later)
    for item in (stream, newer):
        item.save(tmp_path)
    assert load_streams(tmp_path) == [newer]
    assert stream.ratio_to_copy == pytest.approx(made.baseline[0].median_ms / made.timing.median_ms)
