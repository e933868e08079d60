"""Tuning on the made-up GPU of test_session: what is searched, what wins, what is kept, what goes on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tvm

from support.cases import STEPS, THREAD_STEPS, Outcome, make_case, redeclare
from support.fake_gpu import SHAPE, FakeGpu, interrupted, stop_at
from tensorir_ladder.harness import execution, session, tuning
from tensorir_ladder.harness.build import Case, Kernel, lower
from tensorir_ladder.harness.execution import NoGpu
from tensorir_ladder.harness.fleet.for_rules import tuned_machine
from tensorir_ladder.harness.records import RecordError, TunedConfig, load_records, load_tuned
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.tuning import (
    TuningSpace,
    candidates,
    cost,
    default_case,
    median_interval,
    tune,
    tuned_case,
)
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen.toolchain import CompileError
from tensorir_ladder.relax.rules.contraction import Contraction
from tensorir_ladder.relax.rules.normal_form import product_of
from tensorir_ladder.schedules.cost import Measured
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.tiles import BlockTile, Choice, ThreadTile, WarpgroupTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Step
from tensorir_ladder.steps.thread_tiles import DEFAULT, THREAD_TILES

lowered_once = functools.cache(lower)

Command = Callable[..., Outcome]
TILES = (DEFAULT.tile, *(ThreadTile.parse(text) for text in ("32x32x16/4x4", "64x64x16/4x4", "64x64x16/8x4")))
STAGES = (1, 2, 3, 4, 6)
FAST, SECOND = "64x64x16/4x4", "64x64x16/8x4"
LEGAL = len(TILES) * 4  # 1, 2, 3 and 4 stages: there are only 4 k tiles
ARGUMENTS = ("tune", "--step", "5", "--size", "64", "--out")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let step 5 have four tiles, five stage counts and one variant to tune, whatever is shipped; five are a batch.

    Each is lowered once for all tests.
    """
    monkeypatch.setattr(session, "lower", lowered_once)
    choose_among(monkeypatch, TILES)
    redeclare(monkeypatch, 5, tuning_stages=STAGES)
    let_tune(monkeypatch)
    monkeypatch.setattr(tuning, "BATCH", 5)


def choose_among(monkeypatch: pytest.MonkeyPatch, tiles: tuple[BlockTile, ...]) -> None:
    """Let tuning choose among these of threads' tiles."""
    chosen = replace(THREAD_TILES, tuning=tiles)
    for number in THREAD_STEPS:
        redeclare(monkeypatch, number, tiles=chosen)


def let_tune(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let tuning take these variants of step 5 beside its default."""
    redeclare(monkeypatch, 5, variants=tuple(replace(form, tuned=form.name in names) for form in STEPS[5].variants))


@pytest.fixture
def favoured(gpu: FakeGpu) -> FakeGpu:
    """One tile is the fastest, with 2 stages; a second one comes close."""
    gpu.times |= {FAST: 1.8, f"{FAST} 2 stages": 0.5, f"{SECOND} 2 stages": 0.6}
    return gpu


def tuned_again(made: Session, case: Case, **options: object) -> tuple[TunedConfig, list[str]]:
    """The outcome of tuning, and what it said."""
    said: list[str] = []
    return tune(made, replace(case, tile_choice="tuned"), say=said.append, **options), said


# The space


def test_the_space_of_each_step() -> None:
    for step in STEPS.values():
        space = TuningSpace.of(step)
        family = step.tiles_of(space.variants[0])
        assert space.tiles == (TILES if step.number in THREAD_STEPS else family.tuning)
        assert all(isinstance(tile, family.kind) for tile in space.tiles)
        assert space.stages == step.tuning_stages
        assert (len(space.stages) > 1) == step.pipelined
        called = {12: "roles"}.get(step.number)  # the kernel that products of torch tensors choose
        assert (space.variants[0], space.default_stages) == (called or step.default_variant(), step.stages)
        assert {step.variant(variant).dtypes for variant in space.variants} == {
            step.variant(step.default_variant()).dtypes
        }
        assert {step.variant(variant).math for variant in space.variants} == {"ieee"}


def test_a_step_names_the_variants_that_may_be_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    let_tune(monkeypatch, "sync")
    assert TuningSpace.of(STEPS[5]).variants == ("async", "sync")
    assert TuningSpace.of(STEPS[5], async_copy=False).variants == ("register_staged",)


@pytest.mark.parametrize("step", STEPS.values(), ids=lambda step: step.name)
def test_every_declared_tile_is_legal_somewhere(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_among(monkeypatch, THREAD_TILES.tuning)
    family, target = step.tiles, make_case(step.number, SHAPE).machine.target()
    itemsize = dtype_bytes(step.variant(step.default_variant()).dtypes[0])
    assert set(family.best) < set(family.tuning)
    assert len(set(family.tuning)) == len(family.tuning)
    assert not any(tile.violations(target, itemsize, 2) for tile in family.tuning)


def test_likely_configurations_come_first() -> None:
    combinations = list(TuningSpace(TILES, STAGES, ("async", "sync"), 3).combinations())
    assert [variant for variant, _, _ in combinations] == ["async"] * 20 + ["sync"] * 20
    assert [stages for _, stages, _ in combinations[:20:4]] == [3, 2, 4, 1, 6]
    assert [tile for _, _, tile in combinations[:4]] == list(TILES)


def test_spaces_differ_by_what_they_hold_not_by_order() -> None:
    space = TuningSpace(TILES, (1, 2), ("async",), 3)
    assert TuningSpace(TILES[::-1], (2, 1), ("async",), 3).digest == space.digest
    assert TuningSpace(TILES[1:], (1, 2), ("async",), 3).digest != space.digest
    assert TuningSpace(TILES, (1, 2), ("sync",), 3).digest != space.digest


def test_what_would_build_the_same_is_tried_once() -> None:
    space = TuningSpace(TILES[:1], STAGES, ("async", "sync"), 3)
    legal, illegal = candidates(make_case(5, (64, 64, 48)), space)  # three k tiles
    assert illegal == []
    assert [(case.variant, case.stages) for case in legal] == [
        ("async", 3),
        ("async", 2),
        ("async", 1),
        ("sync", 3),
        ("sync", 2),
    ]


def test_a_space_with_nothing_legal_is_refused(made: Session) -> None:
    space = TuningSpace((ThreadTile(block=(512, 512, 8), thread=(1, 1)),), (1,), ("default",), 1)
    with pytest.raises(IllegalSchedule, match="262144 threads per block, limit 1024"):
        tuning.Search(made, make_case(4, SHAPE), space)


# The search


def test_the_fastest_is_found_and_confirmed_on_other_operands(made: Session, favoured: FakeGpu) -> None:
    tuned, _ = tuned_again(made, make_case(5, SHAPE))
    assert (tuned.winner.tile, tuned.winner.stages, tuned.winner.variant) == (FAST, 2, "async")
    assert (tuned.runner_up.tile, tuned.runner_up.stages) == (SECOND, 2)
    assert tuned.verdict == "confirmed"
    assert tuned.margin_pct == pytest.approx(20.0)
    assert tuned.margin_interval_pct == pytest.approx((20.0, 20.0))
    assert (tuned.seen, tuned.legal) == (LEGAL, LEGAL)
    labels = [re.sub(r".* float32 ", "", timing.label) for timing in tuned.confirmation]
    assert labels == [f"{FAST} 2 stages", f"{SECOND} 2 stages", f"{DEFAULT.tile} 3 stages", "cublas-nn", "cublas-nt"]
    assert (tuned.time_ms, tuned.ratio_to_cublas) == (0.5, 2.0)
    assert tuned.gain_over_default_pct == pytest.approx(300.0)
    assert tuned.method.rounds == tuning.CONFIRMATION.rounds > max(plan.rounds for plan in tuning.HEATS)
    assert tuned.winner == tuned.candidates[0]
    assert favoured.seeds == [0, tuning.CONFIRMATION_SEED]
    assert all("cublas-nn" in labels for labels in favoured.races)
    assert load_tuned(made.out) == [tuned]


def test_each_heat_times_fewer_and_each_candidate_once(made: Session, favoured: FakeGpu) -> None:
    tuned, said = tuned_again(made, make_case(5, SHAPE))
    first = [label for labels in favoured.races[:4] for label in labels if "cublas" not in label]
    assert len(first) == len(set(first)) == LEGAL
    heats = sorted((len(candidate.ratios) for candidate in tuned.candidates), reverse=True)
    assert heats == [3] * 4 + [1] * (LEGAL - 4)
    assert tuned.candidates[0].name == f"async {FAST}, 2 stages"
    assert len(favoured.loaded) == len(set(favoured.loaded)) == LEGAL
    assert said[0] == "heat 1 of 3: 5 of 16 candidates; best async 64x64x16/4x4, 3 stages, 0.556 of cuBLAS"


def test_batches_are_compared_by_their_ratio_to_cublas(made: Session, gpu: FakeGpu) -> None:
    """The GPU is four times as fast in the second race: what is raced there must not win for that."""
    gpu.times[f"{FAST} 3 stages"] = 1.0

    def speed_up(_labels: list[str]) -> None:
        factor = 0.25 if len(gpu.races) == 1 else 1.0
        gpu.jitter = lambda _label, _number: factor

    gpu.before_race = speed_up
    tuned, _ = tuned_again(made, make_case(5, SHAPE))
    assert (tuned.winner.tile, tuned.winner.stages) == (FAST, 3)
    in_second = [candidate for candidate in tuned.candidates if candidate.times_ms[0] < 1.0]
    assert in_second
    assert [candidate.ratios[0] for candidate in in_second] == [0.5] * 5


def test_a_wrong_kernel_cannot_win_and_is_listed(made: Session, favoured: FakeGpu) -> None:
    wrong = f"{FAST} 2 stages"
    favoured.corrupt = lambda label, output: output.fill(0) if wrong in label else None
    tuned, _ = tuned_again(made, make_case(5, SHAPE))
    assert tuned.winner.tile == SECOND
    assert not any(wrong in label for labels in favoured.races for label in labels)
    (listed,) = [candidate for candidate in tuned.candidates if candidate.status == "wrong"]
    assert (listed.tile, listed.stages, listed.times_ms) == (FAST, 2, ())
    assert "worst error" in listed.why


def test_where_all_are_wrong_none_is_kept(made: Session, gpu: FakeGpu) -> None:
    gpu.corrupt = lambda _label, output: output.fill(0)
    with pytest.raises(WrongResult, match="no candidate may be timed"):
        tuned_again(made, make_case(4, SHAPE))
    assert (gpu.races, load_tuned(made.out)) == ([], [])


def test_a_candidate_that_does_not_compile_is_listed(
    made: Session, favoured: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles, broken = session.compiled, {f"{FAST} 2 stages"}

    def compile_some(kernel: Kernel, compiler: object) -> Kernel:
        if any(name in str(kernel.case) for name in broken):
            raise CompileError("ptxas: out of registers")
        return compiles(kernel, compiler)

    monkeypatch.setattr(session, "compiled", compile_some)
    tuned, _ = tuned_again(made, make_case(5, SHAPE))
    assert tuned.winner.tile == SECOND
    assert [c.why for c in tuned.candidates if c.status == "not built"] == ["ptxas: out of registers"]
    assert tuned.seen == tuned.legal == LEGAL
    broken.add("step4")
    with pytest.raises(CompileError, match=r"no candidate may be timed; default .* is not built: ptxas"):
        tuned_again(made, make_case(4, SHAPE))


def test_an_illegal_candidate_is_listed_with_the_reason(
    made: Session, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_among(monkeypatch, (DEFAULT.tile, ThreadTile.parse("128x128x32/8x8")))
    tuned, _ = tuned_again(made, make_case(5, (64, 64, 256), dtype="float64"))
    illegal = {c.name: c.why for c in tuned.candidates if c.status == "illegal"}
    assert "393216 bytes of shared memory in 6 stage(s), limit 232448" in illegal["async 128x128x32/8x8, 6 stages"]
    assert tuned.seen == tuned.legal == 10 - len(illegal)


def test_a_step_is_tuned_over_the_tiles_of_its_own_family(
    made: Session, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest = WarpgroupTile.parse("64x64x64/1x1")
    tiles = (STEPS[10].tiles.default.tile, fastest)
    few = replace(STEPS[10].tiles, choices=(), best=tiles[:1], tuning=tiles)
    redeclare(monkeypatch, 10, tiles=few, tuning_stages=(2, 3, 5))
    gpu.times[f"{fastest} 3 stages"] = 0.125
    case = make_case(10, (128, 128, 512))
    tuned, _ = tuned_again(made, case)
    assert (tuned.winner.tile, tuned.winner.stages, tuned.winner.variant) == (str(fastest), 3, "rows")
    assert {candidate.tile for candidate in tuned.candidates} == set(map(str, tiles))
    assert {candidate.name for candidate in tuned.candidates if candidate.status == "illegal"} == {
        f"rows {tile}, {stages} stages" for tile, stages in ((tiles[0], 2), (tiles[1], 2), (tiles[0], 5))
    }
    assert tuned.default == str(case)
    assert (tuned.dtype, tuned.math) == ("float16", "ieee")
    chosen = tuned_case(made, replace(case, tile_choice="tuned"))
    assert (chosen.tile, chosen.stages) == (fastest, 3)


# The verdict


def test_the_interval_of_the_median() -> None:
    assert median_interval([float(value) for value in range(1, 32)]) == (10.0, 22.0)  # tables of the sign test
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == (1.0, 6.0)
    assert median_interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
    assert median_interval([2.0]) == (2.0, 2.0)


def test_within_the_noise_it_is_a_tie_and_the_cheaper_is_taken(made: Session, gpu: FakeGpu) -> None:
    cheap, dear = f"{FAST} 2 stages", f"{FAST} 4 stages"
    gpu.times |= {cheap: 0.503, dear: 0.5}
    gpu.jitter = lambda label, number: 1 + 0.02 * (number % 2) * (dear in label)
    tuned, _ = tuned_again(made, make_case(5, SHAPE))
    assert (tuned.winner.stages, tuned.runner_up.stages, tuned.verdict) == (2, 4, "tie")
    assert tuned.margin_interval_pct[0] < 0 < tuned.margin_interval_pct[1]
    assert tuned.confirmation[0].label.endswith(cheap)


def test_a_difference_that_a_kernel_has_from_itself_is_a_tie(made: Session, gpu: FakeGpu) -> None:
    gpu.times |= {f"{FAST} 2 stages": 0.5, f"{SECOND} 2 stages": 0.5 * (1 + tuning.RESOLUTION / 2)}
    tuned, _ = tuned_again(made, make_case(5, SHAPE))
    assert tuned.verdict == "tie"
    gpu.times[f"{SECOND} 2 stages"] = 0.5 * (1 + tuning.RESOLUTION * 2)
    assert tuned_again(made, make_case(5, SHAPE), retune=True)[0].verdict == "confirmed"


def test_cheaper_is_fewer_stages_then_less_shared_memory(made: Session) -> None:
    tiles = ThreadTile.parse("32x32x16/4x4"), ThreadTile.parse("64x64x16/4x4")
    small_deep, small, large = (
        make_case(5, SHAPE, tile=tile, stages=stages) for tile, stages in ((tiles[0], 3), (tiles[0], 2), (tiles[1], 2))
    )
    assert cost(made, small) < cost(made, large) < cost(made, small_deep)


def test_a_winner_of_the_search_may_lose_the_confirmation(made: Session, favoured: FakeGpu) -> None:
    def slow_down(_labels: list[str]) -> None:
        if favoured.seeds[-1] == tuning.CONFIRMATION_SEED:
            favoured.times[f"{FAST} 2 stages"] = 0.9

    favoured.before_race = slow_down
    tuned, _ = tuned_again(made, make_case(5, SHAPE))
    assert (tuned.winner.tile, tuned.runner_up.tile, tuned.verdict) == (SECOND, FAST, "confirmed")
    assert tuned.candidates[0].tile == FAST


def test_one_candidate_is_alone(made: Session, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_among(monkeypatch, (DEFAULT.tile,))
    tuned, _ = tuned_again(made, make_case(4, SHAPE))
    assert (tuned.verdict, tuned.runner_up, tuned.margin_pct, tuned.margin_interval_pct) == ("alone", None, None, ())
    assert (tuned.default, tuned.gain_over_default_pct) == (str(default_case(make_case(4, SHAPE))), 0.0)
    assert TunedConfig.from_json(tuned.to_json()) == tuned


# The database


def test_a_killed_search_goes_on_and_measures_nothing_twice(
    favoured: FakeGpu, command: Command, tmp_path: Path
) -> None:
    favoured.before_race = stop_at(3)
    assert interrupted(command, *ARGUMENTS, str(tmp_path)).code != 0
    assert load_tuned(tmp_path) == []
    before, favoured.races, favoured.before_race = favoured.races, [], lambda labels: None
    outcome = command(*ARGUMENTS, str(tmp_path))
    assert outcome.code == 0
    assert "going on with an unfinished search: 10 of 16 candidates are known" in outcome.out
    first_heat = [label for labels in (*before, *favoured.races[:2]) for label in labels if "cublas" not in label]
    assert len(before) == 2
    assert len(first_heat) == len(set(first_heat)) == LEGAL
    (tuned,) = load_tuned(tmp_path)
    assert (tuned.winner.tile, tuned.seen) == (FAST, LEGAL)
    assert [path.name for path in tmp_path.iterdir()] == ["fake-tuned.jsonl"]


def test_a_search_killed_in_a_later_heat_keeps_its_field(favoured: FakeGpu, command: Command, tmp_path: Path) -> None:
    favoured.before_race = stop_at(6)  # four batches, then one race for each heat
    assert interrupted(command, *ARGUMENTS, str(tmp_path)).code != 0
    favoured.races, favoured.before_race = [], lambda labels: None
    assert command(*ARGUMENTS, str(tmp_path)).code == 0
    assert len(favoured.races) == 2  # the last heat and the confirmation


def test_what_is_tuned_is_reused_until_it_is_stale(
    favoured: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(*ARGUMENTS, str(tmp_path)).code == 0
    (first,) = load_tuned(tmp_path)
    favoured.races = []
    outcome = command(*ARGUMENTS, str(tmp_path))
    assert f"tuned on {first.environment.recorded_at}, reused" in outcome.out
    assert f"confirmed: async {FAST}, 2 stages" in outcome.out
    assert favoured.races == []
    assert command(*ARGUMENTS, str(tmp_path), "--retune").code == 0
    assert len(favoured.races) == 7
    favoured.races = []
    redeclare(monkeypatch, 5, tuning_stages=(1, 2, 3))
    assert "reused" not in command(*ARGUMENTS, str(tmp_path)).out
    monkeypatch.setattr(tuning, "kernels_digest", lambda *_: "other kernels")
    races = len(favoured.races)
    assert "reused" not in command(*ARGUMENTS, str(tmp_path)).out
    assert len(favoured.races) == 2 * races > 0


def test_a_stale_unfinished_search_starts_anew(
    favoured: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    favoured.before_race = stop_at(3)
    interrupted(command, *ARGUMENTS, str(tmp_path))
    favoured.races, favoured.before_race = [], lambda labels: None
    monkeypatch.setattr(tuning, "kernels_digest", lambda *_: "other kernels")
    assert "going on" not in command(*ARGUMENTS, str(tmp_path)).out
    assert len(favoured.races) == 7


@pytest.mark.parametrize("content", ["[]", '{"schema": 1}', '{"schema": 99}'])
def test_a_damaged_configuration_is_named_and_searched_for_anew(
    content: str, favoured: FakeGpu, command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fake-tuned.jsonl").write_text(f"{content}\n")
    assert command(*ARGUMENTS, str(tmp_path)).code == 0
    assert "fake-tuned.jsonl:1 is no TunedConfig" in caplog.text
    assert len(favoured.races) == 7


@pytest.mark.parametrize("content", ["[", "[]\n", '{"schema": 1}\n', '{"plan": "0", "schema": 1}\n', "[{}]\n"])
def test_a_damaged_journal_is_refused_by_name(
    content: str, favoured: FakeGpu, command: Command, tmp_path: Path
) -> None:
    favoured.before_race = stop_at(3)
    assert interrupted(command, *ARGUMENTS, str(tmp_path)).code != 0
    (path,) = tmp_path.glob(".unfinished-tune-fake-step5-64x64x64-*")
    path.write_text(path.read_text() + content if content == "[{}]\n" else content)
    favoured.races = []
    outcome = command(*ARGUMENTS, str(tmp_path))
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert str(path) in line
    assert favoured.races == []


def test_a_budget_stops_the_search_and_more_goes_on(made: Session, favoured: FakeGpu) -> None:
    ticks = iter(range(100))
    case = make_case(5, SHAPE)
    tuned, _ = tuned_again(made, case, budget_s=2.0, clock=lambda: float(next(ticks)))
    assert (tuned.seen, tuned.legal, tuned.budget_s) == (10, LEGAL, 2.0)
    assert len(favoured.races) == 3  # two batches and the confirmation
    assert tuned_again(made, case, budget_s=2.0)[1][-1].startswith("tuned on")
    favoured.races = []
    tuned, said = tuned_again(made, case)
    assert said[0] == "going on with an unfinished search: 10 of 16 candidates are known"
    assert (tuned.seen, tuned.legal, tuned.budget_s) == (LEGAL, LEGAL, None)
    assert sum("cublas" not in label for labels in favoured.races[:2] for label in labels) == LEGAL - 10


def test_the_smallest_budget_still_times_a_batch(made: Session, favoured: FakeGpu) -> None:
    tuned, _ = tuned_again(made, make_case(5, SHAPE), budget_s=1e-9)
    assert tuned.seen == 5


# Commands


def test_tune_prints_the_five_fastest_and_the_verdict(favoured: FakeGpu, command: Command, tmp_path: Path) -> None:
    outcome = command(*ARGUMENTS, str(tmp_path))
    assert "16 of 16 legal candidates seen; in the search, of cuBLAS:" in outcome.out
    assert len(re.findall(r"^    \d\.\d{3}  \d\.\d{4} ms  async ", outcome.out, re.M)) == 5
    assert f"confirmed: async {FAST}, 2 stages: 0.5000 ms" in outcome.out
    assert f"+20.00 % (+20.00 to +20.00 %) over the runner-up async {SECOND}, 2 stages" in outcome.out
    assert load_tuned(tmp_path)[0].command == "ladder tune --step 5 --size 64"


def test_tune_with_a_wrong_candidate_exits_1(favoured: FakeGpu, command: Command, tmp_path: Path) -> None:
    favoured.corrupt = lambda label, output: output.fill(0) if f"{FAST} 2" in label else None
    outcome = command(*ARGUMENTS, str(tmp_path))
    assert outcome.code == 1
    assert outcome.err.startswith("error: wrong result: step5_pipelining[async] 64x64x64")
    assert ", 1 wrong;" in outcome.out


def test_run_measures_what_was_tuned(favoured: FakeGpu, command: Command, tmp_path: Path) -> None:
    assert command(*ARGUMENTS, str(tmp_path)).code == 0
    favoured.races = []
    outcome = command("run", "--step", "5", "--size", "64", "--tile", "tuned", "--out", str(tmp_path))
    assert outcome.code == 0
    assert "warning" not in outcome.err
    (record,) = load_records(tmp_path)
    assert (record.tile, record.stages, record.variant, record.tile_choice) == (FAST, 2, "async", "tuned")
    assert favoured.races[0][3].startswith(f"step4_vectorization[default] 64x64x64 float32 {FAST}")


def test_run_does_not_use_a_stale_choice(
    favoured: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(*ARGUMENTS, str(tmp_path)).code == 0
    favoured.races = []
    monkeypatch.setattr(tuning, "kernels_digest", lambda *_: "other kernels")
    outcome = command("run", "--step", "5", "--size", "64", "--tile", "tuned", "--out", str(tmp_path))
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert re.search("step5_pipelining 64x64x64 .* other kernels or versions .* not used; run ladder tune", line)


@pytest.mark.parametrize("option", [(), ("--layout", "nt"), ("--dtype", "float16", "--out-dtype", "float32")])
def test_run_refuses_what_was_not_tuned(
    option: tuple[str, ...], favoured: FakeGpu, command: Command, tmp_path: Path
) -> None:
    outcome = command("run", "--step", "4-5", "--size", "64", "--tile", "tuned", "--out", str(tmp_path), *option)
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert "was not tuned on this GPU" in line
    again = re.search(r"run ladder (tune .*) first", line).group(1).split()
    assert again[:5] == ["tune", "--step", "4", "--shape", "64x64x64"]
    assert set(option) <= set(again)
    assert favoured.races == []


@pytest.mark.parametrize("option", [("--variant", "sync"), ("--variant", "all"), ("--stages", "2")])
def test_tuned_brings_its_own_stages_and_variant(option: tuple[str, str], gpu: FakeGpu, command: Command) -> None:
    outcome = command("run", "--step", "5", "--size", "64", "--tile", "tuned", *option)
    assert (outcome.code, gpu.races) == (2, [])
    assert "brings its own --stages and --variant" in outcome.err


@pytest.mark.parametrize("budget", ["0", "-3", "nan"])
def test_a_budget_must_be_a_time(budget: str, gpu: FakeGpu, command: Command, tmp_path: Path) -> None:
    outcome = command(*ARGUMENTS, str(tmp_path), "--budget", budget)
    assert outcome.code == 2
    assert "--budget" in outcome.err
    assert f"'{budget}' is not a number from 0.001" in outcome.err


def test_tuning_without_a_gpu_is_refused(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NoGpu("torch sees no CUDA device")

    monkeypatch.setattr(execution, "require_gpu", missing)
    outcome = command(*ARGUMENTS, str(tmp_path))
    assert (outcome.code, outcome.err) == (2, "error: torch sees no CUDA device\n")


def test_a_tuned_case_that_the_machine_cannot_run_is_refused(made: Session, favoured: FakeGpu) -> None:
    tuned, _ = tuned_again(made, make_case(5, SHAPE))
    for tile, message in (("512x512x8/1x1", "512x512x8/1x1"), ("512x512x8", "malformed tile")):
        winner = replace(tuned.winner, tile=tile)
        replace(tuned, winner=winner, candidates=(winner,)).save(made.out)
        with pytest.raises(IllegalSchedule, match=message):
            tuned_case(made, replace(make_case(5, SHAPE), tile_choice="tuned"))


def test_a_record_error_names_a_full_disk(made: Session, favoured: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RecordError, match="No space left on device"):
        tuned_again(made, make_case(5, SHAPE))


@pytest.mark.parametrize("change", [{"stages": 10**9}, {"variant": "x"}])
def test_a_winner_that_is_none_of_its_candidates_is_refused(
    change: dict, favoured: FakeGpu, command: Command, tmp_path: Path
) -> None:
    assert command(*ARGUMENTS, str(tmp_path)).code == 0
    (tuned,) = load_tuned(tmp_path)
    replace(tuned, winner=replace(tuned.winner, **change)).save(tmp_path)
    arguments = ("--step", "5", "--size", "64", "--out", str(tmp_path))
    for outcome in (command(*ARGUMENTS, str(tmp_path)), command("run", "--tile", "tuned", *arguments)):
        assert outcome.code == 2
        assert "none of its candidates" in outcome.err


# For the rules


def test_the_rules_take_what_was_tuned(made: Session, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a number of stages that no rule tries by itself, so that it is seen where it comes from."""
    fastest = WarpgroupTile.parse("64x64x64/1x1")
    tiles = (STEPS[10].tiles.default.tile, fastest)
    redeclare(
        monkeypatch, 10, tiles=replace(STEPS[10].tiles, choices=(), best=tiles[:1], tuning=tiles), tuning_stages=(3, 5)
    )
    gpu.times[f"{fastest} 5 stages"] = 0.125
    case = make_case(10, (256, 256, 1024))
    machine = replace(case.machine, gpu="NVIDIA Fake")
    tuned_again(made, case)
    known = tuned_machine(machine, made.out)
    assert known.measured == (Measured((256, 256, 1024), "nn", "float16", Choice(fastest, 5)),)
    for problem, wanted in ((case.problem, True), (Matmul(256, 256, 1024, "float16", "nt"), False)):
        ((_, plans),) = Contraction(known).plans(product_of(problem.prim_func()), known.target)
        assert (plans[0].choice == Choice(fastest, 5)) is wanted
    assert tuned_machine(replace(machine, gpu="NVIDIA H200"), made.out).measured == ()


def test_the_rules_do_not_take_what_another_tvm_or_other_kernels_won_with(
    made: Session, favoured: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case, version = make_case(5, SHAPE), tvm.__version__
    machine = replace(case.machine, gpu="NVIDIA Fake")
    tuned_again(made, case)
    assert len(tuned_machine(machine, made.out).measured) == 1
    monkeypatch.setattr("tensorir_ladder.harness.fleet.for_rules.kernels_digest", lambda *_: "others")
    assert tuned_machine(machine, made.out).measured == ()
    monkeypatch.setattr(tvm, "__version__", "0.1")
    assert tuned_machine(machine, made.out).measured == ()
    assert [line.split(" by ")[1] for line in caplog.messages] == [
        "other kernels than this version makes: not used",
        f"TVM {version}, and this is 0.1: not used",
    ]
