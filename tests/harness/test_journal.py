"""Journals of unfinished commands: what a killed run has done is there, and one process has a file at a time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.cases import Outcome
from support.fake_gpu import FakeGpu
from tensorir_ladder.harness import build
from tensorir_ladder.harness.commands import counters
from tensorir_ladder.harness.records import Journal, RecordError, check_appendable, check_writable

PLAN = ["run --size 64", "abc", [1, 2, 3]]


@dataclass(frozen=True)
class Part:
    """Something that is done."""

    number: int
    text: str = ""


def opened(folder: Path, plan: list = PLAN) -> Journal[Part]:
    """The journal of a plan."""
    return Journal(folder, "test", plan, Part)


def written(folder: Path) -> Path:
    """The file of an unfinished run that has done two parts."""
    with opened(folder) as journal:
        journal.add(Part(1))
        journal.add(Part(2, "two\nlines"))
    return journal.path


def test_an_unfinished_run_is_gone_on_with_and_a_finished_one_is_forgotten(tmp_path: Path) -> None:
    written(tmp_path)
    with opened(tmp_path) as journal:
        assert journal.entries == [Part(1), Part(2, "two\nlines")]
        journal.add(Part(3))
    with opened(tmp_path, [*PLAN, "more"]) as other:
        assert other.entries == []
    with opened(tmp_path) as journal:
        assert [part.number for part in journal.entries] == [1, 2, 3]
        journal.finish()
    assert list(tmp_path.iterdir()) == []


def test_who_goes_on_with_a_plan_has_its_run_and_another_plan_has_another(tmp_path: Path) -> None:
    written(tmp_path)
    with opened(tmp_path) as journal, opened(tmp_path, [*PLAN, "more"]) as other:
        run = journal.run
        assert len({run, other.run, ""}) == 3
    with opened(tmp_path) as journal:
        assert journal.run == run
        journal.finish()
    with opened(tmp_path) as journal:
        assert journal.run != run


@pytest.mark.parametrize("kept", range(0, 200, 7))
def test_a_run_killed_at_any_byte_is_gone_on_with(kept: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with opened(tmp_path) as journal:
        assert journal.entries == [Part(1), Part(2, "two\nlines")][: max(0, whole[:kept].count(b"\n") - 1)]
        journal.add(Part(9))
    with opened(tmp_path) as journal:
        assert journal.entries[-1] == Part(9)


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (lambda text: b'["step1', ""),
        (lambda text: b"5\n", ":1"),
        (lambda text: b"\xff\xfe\x00\n", ":1"),
        (lambda text: text.replace(b'"plan":"', b'"plan":"0'), ""),
        (lambda text: text + b"{}\n", ":4"),
        (lambda text: text + b'{"number":1,"odd":2}\n', ":4"),
        (lambda text: text + b'{"number":1,"number":2}\n', ":4"),
        (lambda text: text + b"[" * 100_000 + b"\n", ":4"),
        (lambda text: text + b'{"number":1' + b"0" * 5000 + b"}\n", ":4"),
        (lambda text: text + b"\n", ":4"),
    ],
    ids=["text", "number", "binary", "plan", "no part", "unknown", "twice", "deep", "digits", "empty"],
)
def test_what_is_no_journal_is_refused_by_its_place_and_left_alone(damage, place: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(RecordError) as caught:
        opened(tmp_path)
    assert f"{path}{place} " in str(caught.value)
    assert "delete" in str(caught.value)
    assert path.read_bytes() == before


def test_one_process_has_a_journal_at_a_time_and_kill_9_frees_it(tmp_path: Path) -> None:
    holder = (
        "import sys, time; from pathlib import Path; from tensorir_ladder.harness.records import Journal;"
        f"journal = Journal(Path(sys.argv[1]), 'test', {PLAN!r}, dict[str, int]); journal.add({{'number': 7}});"
        "print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RecordError, match="another process runs this command"):
            opened(tmp_path)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    with opened(tmp_path) as journal:
        assert journal.entries == [Part(7)]


def test_a_full_disk_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as journal:
        journal.add(Part(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(RecordError, match="No space left on device"):
                journal.add(Part(2))
        journal.add(Part(3))
    with opened(tmp_path) as journal:
        assert journal.entries == [Part(1), Part(3)]


@pytest.mark.parametrize("name", ["../out", "a/b", "a\nb", "a b", "x" * 300])
def test_a_name_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be a file's name"):
        Journal(tmp_path, name, PLAN, Part)
    assert list(tmp_path.iterdir()) == []


# Before the work


def test_a_file_for_records_is_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "pipe.jsonl").symlink_to("/dev/null")
    (tmp_path / "others.jsonl").write_text('{"gpu": "H200"}\n')
    (tmp_path / "list.jsonl").write_text("[]\n")
    (tmp_path / "own.jsonl").write_text('{"command": "ladder"}\n{"comma')
    before = sorted(tmp_path.iterdir())
    names = (
        "folder.jsonl",
        "pipe.jsonl",
        "others.jsonl",
        "list.jsonl",
        "file/below.jsonl",
        ".own.jsonl",
        "own.json",
        "",
    )
    for name in names:
        with pytest.raises(RecordError, match="--out"):
            check_appendable(tmp_path / name, ("command",))
    for name in ("own.jsonl", "new.jsonl"):
        check_appendable(tmp_path / name, ("command",))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ("compile", "--step", "1"),
        ("traces",),
        ("run", "--step", "1", "--size", "64"),
        ("sweep", "--step", "5", "--size", "64"),
        ("tune", "--step", "5", "--size", "64"),
        ("bandwidth", "--mb", "1"),
        ("timeline", "--step", "11", "--size", "256"),
        ("counters", "--step", "1", "--size", "64"),
        ("microbench",),
    ],
    ids=lambda words: words[0],
)
def test_a_folder_that_takes_no_file_is_refused_before_the_work(
    words: tuple[str, ...],
    gpu: FakeGpu,
    command: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it is compiled")

    monkeypatch.setattr(build, "compile_cubin", never)
    monkeypatch.setattr(counters, "profiler", lambda: "ncu")
    monkeypatch.setattr(counters, "offered_metrics", lambda ncu: {})
    (tmp_path / "file").touch()
    outcome = command(*words, "--out", str(tmp_path / "file"))
    assert outcome.code == 2
    assert "cannot write" in outcome.err
    assert f"{tmp_path / 'file'} (File exists)" in outcome.err
    assert (gpu.races, gpu.loaded, outcome.out) == ([], [], "")


def test_what_dead_processes_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f".h200-steps.jsonl.{gone.pid}.tmp"
    kept = [tmp_path / name for name in (f".x.{os.getpid()}.tmp", "x.tmp", ".x.tmp", f"x.{gone.pid}.tmp", ".x.1.tmp")]
    for path in (left, *kept):
        path.touch()
    check_writable(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
