"""Generated CUDA changed by rule: what is changed, what becomes of it, how a run is kept, and one of each rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.cases import Outcome as Printed
from tensorir_ladder.emulator.source import PREAMBLE_END
from tensorir_ladder.harness.records import RESULTS, Mutants, read_places
from tensorir_ladder.harness.workers import Lost
from tensorir_ladder.lab.commands import mutants as command_module
from tensorir_ladder.lab.mutants import reasons
from tensorir_ladder.lab.mutants.reasons import DOES_THE_SAME, REASONS, STILL_ORDERED, Reason, reason_for
from tensorir_ladder.lab.mutants.rules import RULES, changes_of
from tensorir_ladder.lab.mutants.running import (
    ALIVE,
    LIVED,
    ORDERED,
    REFUSED,
    SAME,
    Mutant,
    MutantOutcome,
    _prepared,
    plan,
    run_mutant,
)
from tensorir_ladder.lab.mutants.subjects import SUBJECTS
from tensorir_ladder.reports.check import mutant_problems

TEXT = f"""  __syncthreads();
{PREAMBLE_END}  int unused = threadIdx.x + 1;
  int row = ((k + 2) % 3);
  if (row < 33) {{
    __syncthreads();
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  }}
"""


def lines_changed(rule: str) -> dict[str, int]:
    """The lines that a rule makes of TEXT, with their numbers."""
    return {
        change.apply(TEXT).split("\n")[change.line - 1].strip(): change.line
        for change in changes_of(TEXT)
        if change.rule == rule
    }


def test_each_match_behind_the_preamble_is_changed_once() -> None:
    first = PREAMBLE_END.count("\n") + 2
    assert lines_changed("barrier dropped") == {"": first + 3}
    assert lines_changed("wait dropped") == {"": first + 4}
    assert lines_changed("wait count") == {'asm volatile("cp.async.wait_group 2;" ::: "memory");': first + 4}
    assert set(lines_changed("index of a stage")) == {
        f"int row = ({index});" for index in ("(k + 3) % 3", "(k + 1) % 3", "(k + 2) % 4", "(k + 2) % 2")
    }
    assert {"if (row < 34) {", "if (row < 32) {", "if (1 || row < 33) {"} < set(lines_changed("predicate"))
    assert not any("unused" in change.before for change in changes_of(TEXT))


def test_a_change_shows_its_line() -> None:
    for change in changes_of(TEXT):
        changed = change.apply(TEXT).split("\n")
        assert len(changed) == len(TEXT.split("\n"))
        assert change.before in TEXT.split("\n")[change.line - 1]
        assert change.after in changed[change.line - 1]
        assert changed != TEXT.split("\n")


# What becomes of a mutant


def mutants_like(subject: int, rule: str, before: str, after: str) -> list[Mutant]:
    """The mutants of a subject whose line reads so."""
    changes = changes_of(_prepared(subject)[1].cuda)
    alike = (c for c in changes if c.rule == rule and before in c.before and after in c.after)
    return [Mutant(0, subject, change) for change in alike if after or not change.new]


def mutant_like(subject: int, rule: str, before: str, after: str) -> Mutant:
    """The first of them."""
    return mutants_like(subject, rule, before, after)[0]


def subject_like(step: int, variant: str) -> int:
    """The number of a step's variant among the subjects."""
    return next(i for i, subject in enumerate(SUBJECTS) if (subject.step, subject.variant) == (step, variant))


SHARING = next(i for i, subject in enumerate(SUBJECTS) if subject.tile.endswith("/2x2"))  # blocks that share loads


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("step", "variant", "rule", "before", "after", "found"),
    [
        (5, "sync", "barrier dropped", "__syncthreads();", "", "race"),
        (5, "sync", "extent", "k_0 < 5", "k_0 < 4", "wrong result"),
        # Beyond an array of registers, which is beside nothing that could be told from it.
        (5, "sync", "extent", "j_2 < 4", "j_2 < 5", "out of bounds"),
        (5, "sync", "index of a stage", "(k_0 + 2) % 3", "(k_0 + 2) % 2", "wrong result"),
        (13, "overlapped", "wait dropped", "griddepcontrol", "", "missing griddepcontrol.wait"),
        # Between the two an owner in another block lowers the flag, and it stays up for the next call.
        (13, "stream", "arrival", "raise_flag(", "raise_flag((", "flag left raised"),
        # The one group's barrier is the other's: who comes first might be taken for one of those that are awaited.
        (12, "roles", "barrier's threads or number", "warpgroup_sync((", "warpgroup_sync(1 + (", "barrier"),
        # What is not masked meets zeros, which it makes no numbers of where it is infinite.
        (10, "awaited", "extent", "ax1_0_ax0_fused_0_15 < 4", "ax1_0_ax0_fused_0_15 < 3", "wrong result"),
    ],
)
def test_what_is_harmful_is_caught(step: int, variant: str, rule: str, before: str, after: str, found: str) -> None:
    told: list[str] = []
    outcome = run_mutant(mutant_like(subject_like(step, variant), rule, before, after), told.append)
    assert outcome.found == found
    assert f"line {outcome.line}: {outcome.after}" in told[0]


@pytest.mark.sampled(3)
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("rule", "before", "after", "found"),
    [
        ("block of a cluster", "(ushort)(5 <<", "(ushort)(4 <<", "deadlock"),  # one block has no columns of B
        ("block of a cluster", "(ushort)(5 <<", "(ushort)(6 <<", "race"),  # they come to one of other columns
        ("block of a cluster", "(ushort)(3 <<", "(ushort)(3 << 1 + ", "cluster"),  # rows of A to a block that is not
        ("block of a cluster", "if ((k_tile & 1)", "if ((k_tile & 2)", "deadlock"),  # nobody's turn
        ("predicate", "if ((k_tile & 1)", "if (1 || (k_tile & 1)", "race"),  # everybody's
        ("arrivals expected", "(uint)12);", "(uint)11);", "race"),  # a stage that somebody may still read
        # The wait behind the last arrival: a block whose shared memory others write to is no more.
        ("barrier dropped", "tvm_builtin_cuda_cluster_sync();", "", "cluster"),
    ],
)
def test_what_harms_blocks_that_share_loads_is_caught(rule: str, before: str, after: str, found: str) -> None:
    assert run_mutant(mutants_like(SHARING, rule, before, after)[-1], lambda _: None).found == found


@pytest.mark.emulator
def test_whose_turn_it_is_to_load_harms_nobody() -> None:
    turns = mutants_like(SHARING, "block of a cluster", "if ((k_tile & 1) == (((int)", "(1 ^ ")
    outcome = run_mutant(turns[-1], lambda _: None)  # of A: that of B is the same
    assert outcome.found in ALIVE
    assert reason_for(outcome)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("rule", "before", "after", "found", "reason"),
    [
        ("coordinate", "* 16), -", "* 17), -", SAME, DOES_THE_SAME),
        ("wait dropped", "bulk_wait_group_read_1();", "", ORDERED, STILL_ORDERED),
    ],
)
def test_what_is_harmless_has_a_reason(rule: str, before: str, after: str, found: str, reason: str) -> None:
    outcome = run_mutant(mutant_like(subject_like(13, "overlapped"), rule, before, after), lambda _: None)
    assert (outcome.found, reason_for(outcome)) == (found, reason)


# A run


def outcomes_by(found: Callable[[Mutant], str]) -> Callable[..., Iterator[tuple[Mutant, MutantOutcome | Lost]]]:
    """Stand in for processes: what becomes of a mutant is said."""

    def each(_work: Any, mutants: Sequence[Mutant], _jobs: int, _limit_s: float) -> Iterator[tuple[Mutant, Any]]:
        for mutant in mutants:
            what = found(mutant)
            yield mutant, Lost("took more than 1 s", "", hung=True) if what == "hung" else mutant.outcome(what)

    return each


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Mutant]:
    """A plan of few mutants."""
    changes = [change for change in changes_of(TEXT) if change.rule == "index of a stage"]
    mutants = [Mutant(number, 0, changes[number % len(changes)]) for number in range(12)]
    monkeypatch.setattr(command_module, "plan", lambda *_: mutants)
    monkeypatch.setattr(command_module, "require_host_compiler", lambda: "c++")
    return mutants


def newest(out: Path) -> Mutants:
    """The last record that was appended to a file."""
    return Mutants.from_json(out.read_text().splitlines()[-1])


@pytest.mark.usefixtures("planned")
def test_what_the_compiler_refuses_is_replaced_and_what_lives_is_listed(
    command: Callable[..., Printed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {0: REFUSED, 1: SAME, 2: "hung", 3: LIVED}
    monkeypatch.setattr(command_module, "each_in_a_process", outcomes_by(lambda m: found.get(m.number, "race")))
    out = tmp_path / "emulator-mutants.jsonl"
    printed = command("mutants", "--steps", "5", "--runs", "6", "--out", str(out), "--revision", "f" * 40)
    record = newest(out)
    assert (record.runs, record.refused) == (6, 1)
    assert {kind: len(mutants) for kind, mutants in record.caught.items()} == {"hung": 1, "race": 3}
    assert [mutant.reason for mutant in record.lived] == [DOES_THE_SAME, ""]
    assert printed.code == 1
    assert record.harmful[0].after in printed.out
    assert any("harmful" in problem for problem in mutant_problems(record))
    # Given the reason, the same command is done without running anything again.
    why = Reason(record.harmful[0].rule, "", "nobody looks at it", (5,))
    monkeypatch.setattr(reasons, "REASONS", (why,))
    monkeypatch.setattr(command_module, "each_in_a_process", outcomes_by(lambda _: "crashed"))
    assert command("mutants", "--steps", "5", "--runs", "6", "--out", str(out), "--revision", "f" * 40).code == 0
    assert [mutant.reason for mutant in newest(out).lived] == [DOES_THE_SAME, "nobody looks at it"]
    assert newest(out).caught == record.caught
    assert not [*mutant_problems(newest(out))]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_run_that_was_killed_goes_on(
    command: Callable[..., Printed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: list[Mutant]
) -> None:
    run_again: list[int] = []

    def found(mutant: Mutant) -> str:
        run_again.append(mutant.number)
        if len(run_again) == 4:
            raise KeyboardInterrupt
        return "race"

    monkeypatch.setattr(command_module, "each_in_a_process", outcomes_by(found))
    arguments = ("mutants", "--runs", "6", "--out", str(tmp_path / "mutants.jsonl"))
    assert command(*arguments).code == 130
    assert command(*arguments).code == 0
    assert run_again == [0, 1, 2, 3, 3, 4, 5]
    assert newest(tmp_path / "mutants.jsonl").runs == 6
    assert len(planned) > 6


@pytest.mark.parametrize("wrong", [("--steps", "4"), ("--runs", "0"), ("--limit-s", "0"), ("--steps", "x")])
def test_a_run_that_cannot_be_is_refused(command: Callable[..., Printed], wrong: tuple[str, str]) -> None:
    refused = command("mutants", *wrong)
    assert refused.code == 2
    assert wrong[1] in refused.err


# Reasons, and what is recorded


def test_a_reason_is_of_its_rule_and_step() -> None:
    outcome = MutantOutcome(0, subject_like(13, "stream"), "fence dropped", 1, "wgmma_fence();", "", LIVED)
    reason = Reason("fence dropped", r"wgmma_fence", "why", (11, 13), ("stream",))
    assert reason.fits(outcome)
    assert not Reason("wait dropped", r"wgmma_fence", "why", (13,)).fits(outcome)
    assert not Reason("fence dropped", r"wgmma_fence", "why", (11,)).fits(outcome)
    assert not Reason("fence dropped", r"wgmma_fence", "why", (13,), ("whole",)).fits(outcome)


def test_reasons_are_of_rules_that_there_are() -> None:
    assert {reason.rule for reason in REASONS} <= {rule.name for rule in RULES}
    assert len({(reason.rule, reason.pattern) for reason in REASONS}) == len(REASONS)


def test_a_thousand_are_recorded_and_none_of_them_is_harmful() -> None:
    record = max(read_places(RESULTS, Mutants).values(), key=lambda record: record.runs)
    assert record.runs >= 1000
    assert record.steps == tuple(range(5, 14))
    assert not [*mutant_problems(record)]
    used = {record.subjects[mutant.subject] for mutants in record.caught.values() for mutant in mutants}
    assert used == set(record.subjects)
    assert {mutant.rule for mutants in record.caught.values() for mutant in mutants} == {rule.name for rule in RULES}


@pytest.mark.emulator
def test_a_mutant_of_each_rule_is_caught_or_harmless() -> None:
    drawn = plan(1, (5, 9, 11, 13), orders=8)
    first = {mutant.change.rule: mutant for mutant in reversed(drawn)}
    assert len(first) >= 19
    for mutant in {mutant.number: mutant for mutant in (*first.values(), *drawn[:8])}.values():
        outcome = run_mutant(mutant, lambda _: None)
        assert outcome.found not in ALIVE or reason_for(outcome), outcome
