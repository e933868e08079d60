"""``ladder nests``: a whole run, one that goes on, and what a record says of what went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorir_ladder.harness import cli
from tensorir_ladder.harness.commands import WRONG
from tensorir_ladder.harness.records.kinds import Nests
from tensorir_ladder.lab.commands import drawing, nests
from tensorir_ladder.lab.draws import Draws, Outcome
from tensorir_ladder.lab.nests import FEATURES, draw, emulated_outcome, run_draws

pytestmark = pytest.mark.emulator


def read(path: Path) -> list[Nests]:
    """The records in a file."""
    return [Nests.from_json(line, str(path)) for line in path.read_text().splitlines()]


def test_a_run_leaves_one_record_and_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "llvm-nests.jsonl"
    assert cli.main(["nests", "--runs", "6", "--seed", "3", "--jobs", "1", "--emulate", "0", "--out", str(out)]) == 0
    (record,) = read(out)
    assert (record.nests, record.right + record.refused, record.bad) == (6, 6, ())
    assert sum(sum(counts.values()) for counts in record.features.values()) >= 6
    assert sum(record.reasons.values()) == record.refused
    assert list(tmp_path.iterdir()) == [out]
    assert "6 nests" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """What the journal has is not done again: here that one nest was wrong."""
    out = tmp_path / "llvm-nests.jsonl"
    arguments = ["nests", "--runs", "2", "--seed", "3", "--jobs", "1", "--emulate", "0", "--out", str(out)]
    with drawing._journal(nests.DRAWN, cli.parse(arguments), emulate=0) as journal:
        journal.add(Outcome(0, "right"))
        journal.add(Outcome(1, "wrong", "y"))
    assert cli.main(arguments) == WRONG
    (record,) = read(out)
    assert [(bad.number, bad.what) for bad in record.bad] == [(1, "wrong")]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("wrong", ["--runs=0", "--jobs=0", "--limit-s=0", "--emulate=-1", "--only=-1"])
def test_numbers_without_a_meaning_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["nests", wrong]) == 2
    assert wrong.partition("=")[0] in capsys.readouterr().err


def test_a_nest_follows_from_seed_and_number() -> None:
    drawn = [draw(1, number) for number in range(120)]
    assert [one.text for one in drawn] == [draw(1, number).text for number in range(120)]
    assert {feature for one in drawn for feature in one.features} == set(FEATURES)
    assert any(one.stage for one in drawn)
    assert any(one.on_threads and one.async_copy for one in drawn)
    told: list[str] = []
    assert [found.number for found in run_draws(Draws(1, (4, 5)), told.append)] == [4, 5]
    assert told


def test_an_accepted_kernel_is_run_in_the_emulator() -> None:
    number = next(n for n in range(99) if draw(2, n).on_threads and draw(2, n).async_copy and not draw(2, n).features)
    assert emulated_outcome(draw(2, number), Outcome(number, "right")) == Outcome(number, "right", emulated=True)


def test_reasons_are_counted_without_names() -> None:
    one, other = (nests._reason(f"'s{n}' writes v and 's3' reads it {n} iteration(s) later at block") for n in (1, 2))
    assert one == other
