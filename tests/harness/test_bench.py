"""``ladder bench``: shapes drawn by a seed, checked and timed beside cuBLAS on the made-up GPU."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.cases import hopper
from support.fake_gpu import Command, FakeArena, FakeBackend, FakeGpu, interrupted, stop_at
from tensorir_ladder.harness import shapes
from tensorir_ladder.harness.commands import bench
from tensorir_ladder.harness.commands.build import ScheduleToBuild, ToBuild
from tensorir_ladder.harness.execution import gpu_arch
from tensorir_ladder.harness.peers import Entrant, call
from tensorir_ladder.harness.records import ShapeRecord, bad_lines, load_shapes, shape_groups, shape_text
from tensorir_ladder.harness.shapes import GROUPS, MOST_SHAPES, WEIGHTS, draw_shapes
from tensorir_ladder.reports.check import shape_problems

ALL = tuple(GROUPS)
DIGESTS = {"source_sha256": "c" * 64, "cubin_sha256": "d" * 64, "arch": "sm_90a"}
CALLED = [name for name in ALL if not GROUPS[name].scheduled]


# Drawing


@pytest.mark.parametrize("group", ALL)
def test_a_seed_draws_the_same_shapes_and_fewer_are_the_first_of_these(group: str) -> None:
    drawn = [one.problem for one in draw_shapes(group, 7, 60, "float16")]
    assert len(set(drawn)) == 60
    assert [one.problem for one in draw_shapes(group, 7, 20, "float16")] == drawn[:20]
    assert len(set(drawn) & {one.problem for one in draw_shapes(group, 8, 60, "float16")}) < 20


def test_groups_are_what_they_say() -> None:
    drawn = {name: [one.problem for one in draw_shapes(name, 1, 200, GROUPS[name].dtypes[-1])] for name in ALL}
    for name in ("random8", "random", "schedules"):
        extents = [extent for one in drawn[name] for extent in (one.m, one.n, one.k)]
        assert min(extents) >= 64
        assert max(extents) <= 8192
        assert min(extents) < 96, "small ones are as frequent as large ones"
        assert max(extents) > 6000
    assert all((one.m % 8, one.n % 8, one.k % 8) == (0, 0, 0) for one in drawn["random8"])
    assert any(one.k % 8 for one in drawn["random"])
    assert any(one.k % 8 for one in drawn["schedules"]), "float32 has any size"
    assert all(one.k % 8 == 0 for one in (each.problem for each in draw_shapes("schedules", 1, 50, "float16")))
    assert {(one.n, one.k) for one in drawn["llm"]} == set(shapes.LLAMA_3_8B)
    assert {one.m for one in drawn["decode"]} <= set(range(1, 65))
    assert len(set(WEIGHTS)) == 20
    assert {one.layout for name in ("llm", "decode") for one in drawn[name]} == {"nt"}


def test_batches_are_aligned_and_not_in_turn_in_both_layouts_and_of_bounded_work() -> None:
    drawn = [one.problem for one in draw_shapes("batches", 1, 200, "float16")]
    assert [one.n % 8 == 0 == one.k % 8 for one in drawn] == [True, False] * 100
    assert [one.layout for one in drawn] == ["nn", "nn", "nt", "nt"] * 50
    assert {2, 3} < {one.batch for one in drawn} <= set(range(2, 129))
    extents = [extent for one in drawn for extent in (one.m, one.n, one.k)]
    assert 32 <= min(extents) < 64
    assert 3000 < max(extents) <= 4096
    assert all(2e9 <= 2 * one.batch * one.m * one.n * one.k <= 500e9 for one in drawn)
    assert len({one.one for one in drawn}) == len(drawn), "and of as many shapes"


def test_as_many_as_may_be_asked_for_can_be_drawn() -> None:
    assert len(draw_shapes("decode", 0, MOST_SHAPES, "bfloat16")) == MOST_SHAPES


# Measuring, on the made-up GPU


@pytest.fixture
def small(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Small shapes, and a call that numpy computes; its kernels are "built" at once."""
    monkeypatch.setattr(shapes, "SMALLEST", 8)
    monkeypatch.setattr(shapes, "LARGEST", 24)
    monkeypatch.setattr(shapes, "MOST_TOKENS", 24)
    monkeypatch.setattr(shapes, "LLAMA_3_8B", ((16, 8), (8, 16)))
    monkeypatch.setattr(shapes, "WEIGHTS", ((16, 24), (8, 40)))
    monkeypatch.setattr(shapes, "MOST_PRODUCTS", 4)
    monkeypatch.setattr(shapes, "BATCH_EXTENTS", (8, 24))
    monkeypatch.setattr(shapes, "BATCH_FLOPS", (0, 1e9))
    gpu.times |= {"kernels.matmul": 0.5, "step10": 2.0, "step7": 1.0}

    def entrant(arena: FakeArena, name: str) -> Entrant:
        (_, multiply), _ = arena.cublas()

        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
            multiply(a, b, c)
            gpu.corrupt(name, c)

        return Entrant(name, run, "step 12, 64x64x64/1x1, 8 stages")

    def loaded(schedule: SimpleNamespace, backend: FakeBackend) -> Callable[..., None]:
        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
            with np.errstate(invalid="ignore"):
                c[...] = backend.reference(schedule.case.problem, a, b).astype(c.dtype)
            gpu.corrupt(str(schedule.case), c)

        return run

    built: list[ToBuild | ScheduleToBuild] = []
    monkeypatch.setattr(call, "entrant", entrant)
    monkeypatch.setattr(bench, "build_ahead", lambda wanted, _jobs: built.extend(wanted))
    monkeypatch.setattr(bench, "called_machine", lambda: hopper(name="NVIDIA H200"))
    monkeypatch.setattr(shapes, "build_schedule", lambda case, _compiler: SimpleNamespace(case=case, digests=DIGESTS))
    monkeypatch.setattr(shapes, "load_schedule", loaded)
    gpu.built = built
    return gpu


def measure(command: Command, folder: Path, *more: str, count: int = 3) -> Any:
    """Bench all groups."""
    return command("bench", "--shapes", "all", "--seed", "5", "--count", str(count), "--out", str(folder), *more)


def test_every_group_is_measured_beside_the_better_form_of_cublas(
    small: FakeGpu, command: Command, tmp_path: Path
) -> None:
    small.times |= {"cublas-nn": 2.0, "cublas-nt": 1.0, "torch.bmm": 1.0}
    outcome = measure(command, tmp_path)
    assert outcome.code == 0
    found = load_shapes(tmp_path)
    assert Counter(record.group for record in found) == dict.fromkeys(ALL, 3)
    drawn = [one.problem for name in ALL for one in draw_shapes(name, 5, 3, "float16")]
    assert {shape_text(record.shape) for record in found} == {one.shape for one in drawn}
    assert {record.seed for record in found} == {5}
    assert {record.ratio_to_cublas for record in found if record.group in CALLED} == {2.0}
    assert {record.ratio_to_cublas for record in found if record.group == "schedules"} == {0.5}
    assert all(record.verification.passed and record.verification.on == "gpu" for record in found)
    assert len({record.environment.run for record in found}) == 1
    assert {"--seed 5" in record.command for record in found} == {True}
    assert Counter(small.besides) == {(1, 2): 15, (1,): 3}
    assert Counter(type(each) for each in small.built) == {ToBuild: 15, ScheduleToBuild: 3}, "all is built ahead"
    compiled = {(record.group == "schedules", record.source_sha256, record.arch) for record in found}
    assert compiled == {(True, DIGESTS["source_sha256"], "sm_90a"), (False, "", "")}
    assert not bad_lines(tmp_path)
    assert not list(tmp_path.glob(".unfinished*"))


def test_a_batch_is_timed_beside_bmm_and_told_by_its_number_of_products(
    small: FakeGpu, command: Command, tmp_path: Path
) -> None:
    small.times["torch.bmm"] = 0.25
    outcome = command("bench", "--shapes", "batches", "--seed", "5", "--count", "3", "--out", str(tmp_path))
    assert outcome.code == 0
    found, drawn = load_shapes(tmp_path), [one.problem for one in draw_shapes("batches", 5, 3, "float16")]
    assert small.races == [["kernels.matmul", "torch.bmm"]] * 3
    assert {each.problem for each in small.built} == set(drawn)
    assert {record.shape for record in found} == {(one.batch, one.m, one.n, one.k) for one in drawn}
    lines = " ".join(outcome.err.split())
    for record in found:
        assert record.gflops == pytest.approx(2 * record.batch * record.m * record.n * record.k / 0.5e6)
        assert f"batches {shape_text(record.shape)} {record.layout}" in lines
    assert lines.count("0.500 (0.500 to 0.500) of torch.bmm") == 3
    text = command("shapes", "--markdown", "--results", str(tmp_path)).out
    assert f"{shape_text(found[0].shape)} 0.50" in text
    assert "torch.bmm" in text


def test_a_wrong_product_of_a_batch_has_no_speed(small: FakeGpu, command: Command, tmp_path: Path) -> None:
    def corrupt(_label: str, output: np.ndarray) -> None:
        output[-1, 0, 0] += 1

    small.corrupt = corrupt
    outcome = command("bench", "--shapes", "batches", "--seed", "5", "--count", "1", "--out", str(tmp_path))
    (problem,) = (one.problem for one in draw_shapes("batches", 5, 1, "float16"))
    assert outcome.code == 1
    assert f"element ({problem.batch - 1}, 0, 0)" in outcome.err
    assert not load_shapes(tmp_path)


def test_reports_have_one_object_a_group(small: FakeGpu, command: Command, tmp_path: Path) -> None:
    assert measure(command, tmp_path).code == 0
    assert measure(command, tmp_path, "--dtype", "bfloat16").code == 0
    groups = json.loads(command("shapes", "--json", "--results", str(tmp_path)).out)
    assert [(group["dtype"], group["group"]) for group in groups] == sorted(
        itertools.product(["bfloat16", "float16"], ALL)
    )
    named = {"gpu", "dtype", "group", "count", "seed", "geomean", "worst", "share_at_least_1"}
    assert {frozenset(group) for group in groups} == {frozenset(named)}
    by_schedule = next(group for group in groups if group["group"] == "schedules")
    assert by_schedule["geomean"] == pytest.approx(0.5)
    assert (by_schedule["count"], by_schedule["worst"], by_schedule["share_at_least_1"]) == (3, 0.5, 0.0)


@pytest.mark.parametrize("name", ["schedules", "batches"])
def test_reports_have_a_picture_of_each_group(name: str, small: FakeGpu, command: Command, tmp_path: Path) -> None:
    for seed in ("1", "2"):
        assert command("bench", "--shapes", name, "--seed", seed, "--count", "3", "--out", str(tmp_path)).code == 0
    outcome = command("shapes", "--results", str(tmp_path))
    assert outcome.code == 0
    (picture,) = tmp_path.rglob("*shapes-*.png")
    assert str(picture) in outcome.out
    assert f"shapes-{name}-2" in picture.name, "the seed that was measured last"
    (tmp_path / "README.md").write_text("<!-- results:begin -->\n<!-- results:end -->")
    document = ("--results", str(tmp_path), "--readme", str(tmp_path / "README.md"))
    assert command("readme", *document).code == 0
    assert command("page", *document).code == 0
    for path in (tmp_path / "README.md", tmp_path / "pages" / "shapes.md"):
        assert f"| {name} |" in path.read_text()
    assert f"shapes-{name}-2.png" in (tmp_path / "pages" / "shapes.md").read_text()


def test_an_interrupted_bench_goes_on(small: FakeGpu, command: Command, tmp_path: Path) -> None:
    small.before_race = stop_at(6)
    assert interrupted(measure, command, tmp_path).code == 130
    assert len(load_shapes(tmp_path)) == 5
    small.before_race = lambda _labels: None
    outcome = measure(command, tmp_path)
    assert outcome.code == 0
    assert "5 of 18 shapes are done" in outcome.out
    assert len(load_shapes(tmp_path)) == 18
    assert len(small.races) == 18, "none twice"
    assert len({record.environment.run for record in load_shapes(tmp_path)}) == 1


def test_a_time_limit_leaves_as_many_of_each_group_and_the_same_command_goes_on(
    small: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def tick(_labels: list[str]) -> None:
        clock[0] += 1.0

    small.before_race = tick
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    outcome = measure(command, tmp_path, "--time-limit", "12", "--jobs", "1")
    assert outcome.code == 0
    assert "12 of 18 shapes" in outcome.out
    assert Counter(record.group for record in load_shapes(tmp_path)) == dict.fromkeys(ALL, 2)
    assert len(small.built) < 18, "what there is no time for is not built"
    assert measure(command, tmp_path, "--time-limit", "600", "--jobs", "1").code == 0, "another limit is the same work"
    assert Counter(record.group for record in load_shapes(tmp_path)) == dict.fromkeys(ALL, 3)
    assert len(small.races) == 18


@pytest.mark.parametrize("wrong", ["kernels.matmul", "step10"])
def test_a_wrong_result_has_no_speed(wrong: str, small: FakeGpu, command: Command, tmp_path: Path) -> None:
    def corrupt(label: str, output: np.ndarray) -> None:
        if wrong in label:
            output[..., 0, 0] += 1

    small.corrupt = corrupt
    outcome = measure(command, tmp_path)
    assert outcome.code == 1
    assert wrong in outcome.err
    right = [name for name in ALL if GROUPS[name].scheduled != (wrong == "step10")]
    assert Counter(record.group for record in load_shapes(tmp_path)) == dict.fromkeys(right, 3), "others are measured"
    assert f"{18 - 3 * len(right)} shapes in all" in outcome.err
    small.corrupt = lambda label, output: None
    races = len(small.races)
    assert measure(command, tmp_path).code == 0, "the same command goes on with what was wrong"
    assert Counter(record.group for record in load_shapes(tmp_path)) == dict.fromkeys(ALL, 3)
    assert len(small.races) == 18
    assert races == 3 * len(right)


def test_a_call_that_refuses_is_no_shape_that_is_left_out(
    small: FakeGpu, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "entrant", lambda _arena, name: Entrant(name, None, "", "failed", "no tile fits"))
    outcome = measure(command, tmp_path)
    assert outcome.code == 2
    assert "no tile fits" in outcome.err


def test_float32_is_what_schedules_take(small: FakeGpu, command: Command, tmp_path: Path) -> None:
    assert measure(command, tmp_path, "--dtype", "float32").code == 0
    found = load_shapes(tmp_path)
    assert {(record.group, record.contender) for record in found} == {("schedules", "step7_warp_tiling")}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--shapes", "squares"), "'squares'.*llm"),
        (("--shapes", "llm,"), "''.*llm"),
        (("--shapes", "llm", "--dtype", "float32"), "float32.*llm"),
        (("--dtype", "float64"), "float64"),
        (("--count", "0"), "'0' is not a whole number"),
        (("--count", "1001"), "from 1 to 1000"),
        (("--seed", "-1"), "no seed"),
        (("--time-limit", "0.5"), "from 1 to"),
        (("--time-limit", "nan"), "from 1 to"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: tuple[str, ...], named: str, small: FakeGpu, command: Command, tmp_path: Path
) -> None:
    outcome = command("bench", *arguments, "--out", str(tmp_path))
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert re.search(named, line), line
    assert small.races == []


def test_without_a_gpu_a_dry_run_builds_and_measures_nothing(small: FakeGpu, command: Command, tmp_path: Path) -> None:
    outcome = measure(command, tmp_path, "--dry-run")
    assert outcome.code == 0
    assert (len(small.built), small.races) == (18, [])
    lines = outcome.out.splitlines()
    assert sum(line.startswith(ALL) for line in lines) == 18
    assert not list(tmp_path.glob("*.jsonl"))


# Records


def test_a_record_is_read_as_it_was_written_and_the_newest_counts(
    small: FakeGpu, command: Command, tmp_path: Path
) -> None:
    assert measure(command, tmp_path).code == 0
    first = load_shapes(tmp_path)
    assert [ShapeRecord.from_json(record.to_json()) for record in first] == first
    assert {record.batch > 1 for record in first if record.group == "batches"} == {True}
    older = next(record for record in first if record.batch == 1)
    assert ShapeRecord.from_json(older.to_json().replace(',"batch":1', "")) == older, "one of a single product"
    small.times["kernels.matmul"] = 4.0
    assert measure(command, tmp_path).code == 0
    (group,) = (each for each in shape_groups(load_shapes(tmp_path)) if each.summary["group"] == "llm")
    assert (group.summary["count"], group.summary["worst"]) == (3, 0.25)
    assert len(group.losers) == 3
    with pytest.raises(ValueError, match="baseline"):
        ShapeRecord.from_json(first[0].to_json().replace('"baseline":[', '"baseline":[],"was":['))


def test_one_form_of_cublas_is_no_evidence_and_of_a_batch_one_baseline_is(
    small: FakeGpu, command: Command, tmp_path: Path
) -> None:
    assert measure(command, tmp_path, count=1).code == 0
    for record in load_shapes(tmp_path):
        assert not list(shape_problems(record))
        alone = replace(record, baseline=record.baseline[:1])
        assert list(shape_problems(alone)) == ["cuBLAS was measured in fewer than two forms"] * (record.batch == 1)


def test_intensity_counts_each_byte_once(small: FakeGpu, command: Command, tmp_path: Path) -> None:
    assert measure(command, tmp_path, count=1).code == 0
    for record in load_shapes(tmp_path):
        m, n, k = record.shape[-3:]
        assert record.intensity == pytest.approx(m * n * k / (m * k + k * n + m * n))


@pytest.mark.gpu
def test_every_group_is_measured_on_a_gpu(command: Command, tmp_path: Path) -> None:
    if gpu_arch() != "sm_90a":
        pytest.skip("no sm_90")
    outcome = command("bench", "--seed", "2", "--count", "1", "--out", str(tmp_path))
    assert outcome.code == 0, outcome.err
    assert Counter(record.group for record in load_shapes(tmp_path)) == dict.fromkeys(ALL, 1)
    assert all(record.verification.passed for record in load_shapes(tmp_path))
