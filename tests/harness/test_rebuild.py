"""Recorded cases lowered again: a step's, a memory-bound workload's, and one with time stamps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from support.cases import Outcome
from tensorir_ladder.harness.commands import rebuild
from tensorir_ladder.harness.commands.rebuild import difference
from tensorir_ladder.harness.records import Record, StreamRecord, load_records, load_streams, load_timelines


@pytest.fixture(scope="module")
def record() -> Record:
    """A record of step 4."""
    return next(record for record in load_records() if record.step == 4)


@pytest.fixture(scope="module")
def workload() -> StreamRecord:
    """A record of a pipelined workload."""
    return next(record for record in load_streams() if record.stages > 1)


def test_the_recorded_cuda_comes_out_again(record: Record, workload: StreamRecord) -> None:
    stamped = next(timeline for timeline in load_timelines() if timeline.step == 11)
    assert [difference(recorded) for recorded in (record, workload, stamped)] == ["", "", ""]


def test_other_cuda_and_what_is_refused_are_told(record: Record) -> None:
    other = difference(replace(record, source_sha256="0" * 64))
    assert record.source_sha256[:12] in other
    assert "0" * 12 in other
    assert "99" in difference(replace(record, step=99))
    assert "no_variant" in difference(replace(record, variant="no_variant"))


def test_the_command_counts_them_in_processes(command: Callable[..., Outcome]) -> None:
    outcome = command("rebuild", "--step", "3-4", "--limit", "3", "--jobs", "1")
    assert (outcome.code, outcome.out) == (0, "3 of 3 give the recorded CUDA\n")


def test_one_that_differs_ends_with_exit_status_1(
    record: Record, workload: StreamRecord, command: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "load_records", lambda _folder: [record, replace(record, source_sha256="0" * 64)])
    monkeypatch.setattr(rebuild, "load_streams", lambda _folder: [workload])
    monkeypatch.setattr(rebuild, "load_timelines", lambda _folder: [])
    outcome = command("rebuild", "--jobs", "1")
    assert outcome.code == 5
    (line, count) = outcome.out.splitlines()
    assert record.step_name in line
    assert "2 of 3" in count


@pytest.mark.parametrize("options", [("--limit", "0"), ("--jobs", "0"), ("--step", "99")])
def test_nothing_to_do_is_refused(options: tuple[str, str], command: Callable[..., Outcome]) -> None:
    outcome = command("rebuild", *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert options[1] in outcome.err
