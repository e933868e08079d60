"""``ladder rules``: drawn functions, a whole run, and what a record says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tvm import tirx

from tensorir_ladder.harness import cli
from tensorir_ladder.harness.commands import drawing
from tensorir_ladder.harness.commands import rules as command
from tensorir_ladder.harness.lab import drawn_functions
from tensorir_ladder.harness.lab.drawn_functions import KINDS, STEPS, draw, run_draws, run_function
from tensorir_ladder.harness.lab.draws import Draws
from tensorir_ladder.harness.records.kinds import RuleDraws
from tensorir_ladder.schedules.rules import NotTaken, Rule


def test_a_function_follows_from_seed_and_number() -> None:
    drawn = [draw(1, number) for number in range(150)]
    assert [one.function.script() for one in drawn[:20]] == [draw(1, number).function.script() for number in range(20)]
    features = {feature for one in drawn for feature in one.features}
    assert {*KINDS, *STEPS, "symbolic", "batch", "int4", "int8", "written B A"} <= features
    for one in drawn:
        for parameter in one.function.params:
            extents = [one.sizes[0][e.name] if isinstance(e, tirx.Var) else 1 for e in parameter.shape]
            assert all(size > 0 for size in extents)


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("part", range(3))
def test_drawn_functions_are_right_or_left(part: int) -> None:
    for outcome in run_draws(Draws(16, tuple(range(10 * part, 10 * part + 10))), print):
        assert outcome.what in ("right", "left"), outcome


@pytest.mark.emulator
def test_a_run_leaves_one_record_and_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "emulator-rules.jsonl"
    assert cli.main(["rules", "--runs", "4", "--seed", "3", "--jobs", "1", "--out", str(out)]) == 0
    (record,) = (RuleDraws.from_json(line, str(out)) for line in out.read_text().splitlines())
    assert (record.functions, record.right + record.left, record.bad) == (4, 4, ())
    assert sum(record.taken.values()) == record.right
    assert sum(record.reasons.values()) == record.left
    assert list(tmp_path.iterdir()) == [out]
    assert "4 functions" in capsys.readouterr().out


class Broken(Rule):
    """Takes everything, and leaves the function as it is: nothing is bound to threads."""

    name = "broken"

    def schedule(self, func: tirx.PrimFunc, target: object) -> tirx.PrimFunc:
        """See :class:`Rule`."""
        if "product" in func.script():
            raise ZeroDivisionError("a defect")
        raise NotTaken("a reason", remedy="none")


def test_a_rule_that_fails_is_told_from_one_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_functions, "rules", lambda target: (Broken(),))
    numbers = {kind: next(n for n in range(99) if kind in draw(0, n).features) for kind in ("product", "rows")}
    assert run_function(draw(0, numbers["rows"])).text == "broken: a reason"
    outcome = run_function(draw(0, numbers["product"]))
    assert (outcome.what, "ZeroDivisionError" in outcome.text) == ("failed", True)
    options = cli.parse(["rules", "--revision", "0" * 40])
    record = drawing.record_of(command.DRAWN, options, "ladder rules", [outcome], 1.0)
    assert (record.failed, record.bad[0].number, record.bad[0].what) == (1, numbers["product"], "failed")


@pytest.mark.parametrize("wrong", ["--runs=0", "--jobs=0", "--limit-s=0", "--only=-1"])
def test_numbers_without_a_meaning_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rules", wrong]) == 2
    assert wrong.partition("=")[0] in capsys.readouterr().err
