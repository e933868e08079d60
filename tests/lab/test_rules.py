"""``ladder rules``: drawn functions, a whole run, and what a record says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tvm import tirx

from tensorir_ladder.harness import cli
from tensorir_ladder.harness.records.kinds import RuleDraws
from tensorir_ladder.lab import rule_draws
from tensorir_ladder.lab.commands import drawing
from tensorir_ladder.lab.commands import rules as command
from tensorir_ladder.lab.drawn_functions import KINDS, STEPS, DrawnFunction
from tensorir_ladder.lab.drawn_modules import OPERATORS
from tensorir_ladder.lab.draws import Draws
from tensorir_ladder.lab.rule_draws import draw, run_drawn, run_draws
from tensorir_ladder.relax.rules import NotTaken, Rule


def test_what_is_drawn_follows_from_seed_and_number() -> None:
    drawn = [draw(1, number) for number in range(400)]
    assert [one.text for one in drawn[:20]] == [draw(1, number).text for number in range(20)]
    features = {feature for one in drawn for feature in one.features}
    assert {*KINDS, *STEPS, *OPERATORS, "symbolic", "batch", "int4", "int8", "written B A"} <= features
    for one in drawn:
        if isinstance(one, DrawnFunction):
            shapes = [[one.sizes[0].get(str(getattr(e, "name", e)), 1) for e in p.shape] for p in one.function.params]
        else:
            shapes = [list(array.shape) for call in one.calls() for array in call]
        assert all(size > 0 for shape in shapes for size in shape)


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize("first", [10, 22, 32])
def test_what_is_drawn_is_right_or_left(first: int) -> None:
    for outcome in run_draws(Draws(4, tuple(range(first, first + 10))), print):
        assert outcome.what in ("right", "left"), outcome


@pytest.mark.emulator
def test_a_run_leaves_one_record_and_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "emulator-rules.jsonl"
    assert cli.main(["rules", "--runs", "4", "--seed", "3", "--jobs", "1", "--out", str(out)]) == 0
    (record,) = (RuleDraws.from_json(line, str(out)) for line in out.read_text().splitlines())
    assert (record.functions, record.right + record.left, record.bad) == (4, 4, ())
    assert sum(record.taken.values()) >= record.right  # a module has several functions
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
    monkeypatch.setattr(rule_draws, "rules", lambda target: (Broken(),))
    numbers = {kind: next(n for n in range(99) if kind in draw(0, n).features) for kind in ("product", "rows")}
    assert run_drawn(draw(0, numbers["rows"])).text == "broken: a reason"
    outcome = run_drawn(draw(0, numbers["product"]))
    assert (outcome.what, "ZeroDivisionError" in outcome.text) == ("failed", True)
    options = cli.parse(["rules", "--revision", "0" * 40])
    record = drawing.record_of(command.DRAWN, options, "ladder rules", [outcome], 1.0)
    assert (record.failed, record.bad[0].number, record.bad[0].what) == (1, numbers["product"], "failed")


@pytest.mark.parametrize("wrong", ["--runs=0", "--jobs=0", "--limit-s=0", "--only=-1"])
def test_numbers_without_a_meaning_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rules", wrong]) == 2
    assert wrong.partition("=")[0] in capsys.readouterr().err
