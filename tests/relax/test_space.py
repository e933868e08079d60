"""Contractions as a space for MetaSchedule: decisions are alive, and what was found is replayed elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from support.functions import check_function
from tensorir_ladder.relax.rules.rule import NotTaken
from tensorir_ladder.relax.rules.space import (
    CheapestFirst,
    FinishContraction,
    MutateChoice,
    TileCost,
    build_ahead,
    contraction_space,
    decisions_of,
    evolution,
    local_builder,
    local_runner,
    record_of,
    schedule_contraction,
)
from tensorir_ladder.relax.rules.tensor_intrinsics import import_quickly
from tensorir_ladder.schedules import workloads
from tensorir_ladder.schedules.cost import assumed_machine
from tensorir_ladder.schedules.pipeline import pipeline_loop
from tensorir_ladder.schedules.pipeline.lowering import lower_ahead
from tensorir_ladder.schedules.recipes import stage_contraction
from tensorir_ladder.schedules.tiles import ThreadTile

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
PRODUCT = workloads.Matmul(64, 128, 96).prim_func()
DECISIONS = [[1, 16, 4], [4, 8, 4], [3, 32], 2, 1]  # rows, columns, k tiles, one of 1 to 4 stages, unrolled


def decided(function: tvm.tirx.PrimFunc, decisions: list | None = None, seed: int = 1) -> Schedule | None:
    """Draw from the space, or decide as given; None where that is no candidate."""
    sch = Schedule(function, seed=seed)
    schedule_contraction(sch)
    if decisions is not None:
        trace = sch.trace
        for inst, decision in zip([inst for inst in trace.insts if inst in trace.decisions], decisions):
            trace = trace.with_decision(inst, decision, remove_postproc=True)
        sch = Schedule(function)
        trace.apply_to_schedule(sch, remove_postproc=True)
    sch.enter_postproc()
    return sch if FinishContraction(TARGET).apply(sch) else None


def test_each_decision_makes_another_module() -> None:
    made = [decided(PRODUCT, DECISIONS)]
    for place, other in enumerate(([2, 8, 4], [8, 4, 4], [6, 16], 0, 0)):
        made.append(decided(PRODUCT, [*DECISIONS[:place], other, *DECISIONS[place + 1 :]]))
    texts = {sch.mod.script() for sch in made if sch is not None}
    assert len(texts) == len(made) == 6


@pytest.mark.parametrize(
    "function",
    [PRODUCT, workloads.Matmul(45, 75, 90, "float16").prim_func(), workloads.conv2d_nhwc(1, 6, 6, 8, 24)],
    ids=["product", "ragged", "convolution"],
)
def test_candidates_compute_what_the_function_does(function: tvm.tirx.PrimFunc) -> None:
    candidates = [sch for seed in range(1, 13) if (sch := decided(function, seed=seed))]
    assert candidates
    check_function(function, lower_ahead(candidates[0].mod["main"], TARGET), TARGET)


def test_what_is_beyond_the_target_is_no_candidate() -> None:
    big = workloads.Matmul(512, 512, 64).prim_func()
    assert decided(big, [[1, 64, 8], [1, 64, 8], [1, 64], 3, 0]) is None  # 4096 threads
    assert decided(PRODUCT, [[16, 2, 2], [64, 2, 1], [3, 32], 0, 0]) is None  # 4 threads
    assert decided(PRODUCT, [[4, 8, 2], [16, 8, 1], [3, 32], 0, 0]) is not None


def searching(strategy: ms.search_strategy.SearchStrategy) -> ms.TuneContext:
    """A search of PRODUCT's space that has not begun."""
    return ms.TuneContext(
        mod=tvm.IRModule({"main": PRODUCT}),
        target=TARGET,
        space_generator=contraction_space(),
        search_strategy=strategy,
        task_name="product",
        num_threads=1,
        rand_state=1,
    )


@pytest.mark.emulator  # for its time: TVM parses the texts of all its intrinsics then
def test_a_search_mutates_tiles_and_choices() -> None:
    context = searching(evolution(population=4))
    context.pre_tuning(4, 3, database=ms.database.MemoryDatabase(), cost_model=TileCost())
    candidates = context.generate_measure_candidates()
    assert len(candidates) == len({candidate.sch.mod.script() for candidate in candidates}) == 3


@pytest.mark.emulator  # for its time: TVM parses the texts of all its intrinsics then
def test_the_cheapest_are_finished_first_and_none_twice() -> None:
    model = TileCost()
    strategy = CheapestFirst(model, drawn=300)
    context = searching(strategy)
    context.pre_tuning(9, 4, database=ms.database.MemoryDatabase(), cost_model=model)
    batches = []
    while (batch := context.generate_measure_candidates()) is not None:
        batches.append(batch)
    assert [len(batch) for batch in batches] == [4, 4, 1]
    assert len({candidate.sch.mod.script() for batch in batches for candidate in batch}) == 9
    scores = model.predict(context, batches[0])
    assert list(scores) == sorted(scores, reverse=True)
    tiles = [str(decisions_of(candidate.sch.trace)[0]) for candidate in batches[0]]
    assert max(map(tiles.count, tiles)) <= 2


def candidate(*decisions: object) -> ms.MeasureCandidate:
    sch = decided(PRODUCT, list(decisions))
    assert sch is not None
    return ms.MeasureCandidate(sch, [])


@pytest.fixture(autouse=True)
def _quick_imports() -> Iterator[None]:
    with import_quickly():
        yield


def test_the_cost_model_learns_what_the_tile_does_not_say() -> None:
    context = ms.TuneContext(target=TARGET)
    small, large = candidate([32, 2, 1], [4, 32, 1], [24, 4], 1, 0), candidate([4, 8, 2], [8, 4, 4], [6, 16], 1, 0)
    one, three = (candidate([1, 16, 4], [4, 8, 4], [3, 32], stages, 1) for stages in (0, 2))
    model = TileCost(replace(assumed_machine(TARGET), multiprocessors=1))  # so that the product is no small one
    scores = model.predict(context, [small, large, one])
    assert scores.max() == 1.0
    assert scores[0] < scores[1:].min()  # a thread with one output reads most for it
    slow, fast = (ms.runner.RunnerResult([seconds] * 3, None) for seconds in (2e-3, 1e-3))
    model.update(context, [one, three, small], [slow, fast, ms.runner.RunnerResult(None, "failed")])
    before, after = model.predict(context, [one, three])
    assert before < after
    deep = candidate([4, 8, 2], [8, 4, 4], [6, 16], 2, 0)
    assert model.predict(context, [large, deep]).argmax() == 1  # of another tile too


def test_a_choice_is_made_anew() -> None:
    trace = decided(PRODUCT, DECISIONS).trace
    mutate, seen = MutateChoice(), set()
    for _ in range(12):
        other = mutate.apply(trace)
        choices = [int(value) for inst, value in other.decisions.items() if inst.kind.name == "SampleCategorical"]
        seen.add(tuple(sorted(choices)))
        assert sorted(choices) != [1, 2]
    assert len(seen) > 1


FRESH = """
import json, sys, tvm
from tvm.s_tir import meta_schedule as ms
given = json.load(sys.stdin)
mod, done = (tvm.ir.load_json(given[key]) for key in ("start", "done"))
target = tvm.target.Target(given["target"])
database = ms.database.JSONDatabase(work_dir=given["folder"])
found = database.query_schedule(mod, target, "main")
tvm.ir.assert_structural_equal(found.mod, done)
assert not any(name.startswith("tensorir_ladder") for name in sys.modules)
"""


def test_a_database_gives_the_same_module_to_a_process_that_knows_nothing_of_it(tmp_path: Path) -> None:
    mod, sch = tvm.IRModule({"main": PRODUCT}), decided(PRODUCT, DECISIONS)
    record_of(mod, sch, TARGET, 1e-3, ms.database.JSONDatabase(work_dir=str(tmp_path)))
    given = {"start": tvm.ir.save_json(mod), "done": tvm.ir.save_json(sch.mod), "folder": str(tmp_path)}
    given["target"] = {"kind": "cuda", "arch": "sm_90a"}
    done = subprocess.run([sys.executable, "-c", FRESH], input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_was_found_otherwise_is_asked_first() -> None:
    """A tile of the ladder's own, scheduled by the recipe, beside what a search has found."""
    mod, searched, tuned = tvm.IRModule({"main": PRODUCT}), ms.database.MemoryDatabase(), ms.database.MemoryDatabase()
    record_of(mod, decided(PRODUCT, DECISIONS), TARGET, 2e-3, searched)
    by_recipe = Schedule(PRODUCT)
    staged = stage_contraction(
        by_recipe, by_recipe.get_sblock("matmul"), ThreadTile(block=(32, 64, 16), thread=(4, 4)), vectorize=True
    )
    pipeline_loop(by_recipe, staged.loops.k_outer, 3)
    record_of(mod, by_recipe, TARGET, 1e-3, tuned)
    found = ms.database.OrderedUnionDatabase(tuned, searched).query_schedule(mod, TARGET, "main")
    tvm.ir.assert_structural_equal(found.mod, by_recipe.mod)
    found = ms.database.OrderedUnionDatabase(ms.database.MemoryDatabase(), searched).query_schedule(mod, TARGET, "main")
    tvm.ir.assert_structural_equal(found.mod, decided(PRODUCT, DECISIONS).mod)


def test_candidates_are_built_with_asynchronous_copies() -> None:
    sch = decided(PRODUCT, DECISIONS)
    assert "ptx_cp_async" in build_ahead(sch.mod, TARGET).imports[0].inspect_source()


@pytest.mark.emulator  # for its time: two processes import TVM
def test_builders_link_candidates_and_import_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    subprocess.run([sys.executable, "-c", "import tvm"], check=True)
    (tmp_path / "imported").unlink()  # what TVM does otherwise
    before = dict(os.environ)
    (made,) = local_builder(max_workers=1).build([ms.builder.BuilderInput(decided(PRODUCT, DECISIONS).mod, TARGET)])
    assert made.error_msg is None
    assert b"ptx_cp_async" in Path(made.artifact_path).read_bytes()
    shutil.rmtree(Path(made.artifact_path).parent)
    assert not (tmp_path / "imported").exists()
    assert dict(os.environ) == before


@pytest.mark.gpu
def test_candidates_are_built_and_run_in_processes_of_their_own() -> None:
    builder, runner = local_builder(max_workers=2), local_runner()
    mods = [decided(PRODUCT, DECISIONS).mod, decided(PRODUCT, [*DECISIONS[:3], 0, 0]).mod]
    made = builder.build([ms.builder.BuilderInput(mod, TARGET) for mod in mods])
    assert [one.error_msg for one in made] == [None, None]
    arguments = ms.arg_info.ArgInfo.from_entry_func(mods[0], False)
    inputs = [ms.runner.RunnerInput(one.artifact_path, "cuda", arguments) for one in made]
    results = [future.result() for future in runner.run(inputs)]
    assert [one.error_msg for one in results] == [None, None]
    assert all(0 < float(seconds) < 1 for one in results for seconds in one.run_secs)


def test_what_is_no_contraction_of_constant_extents_is_refused() -> None:
    a = te.placeholder((16, 16), "float32", "A")
    with pytest.raises(NotTaken, match="got 0 reductions, limit 1"):
        schedule_contraction(Schedule(te.create_prim_func([a, te.compute((16, 16), lambda i, j: a[i, j] + 1.0)])))
    with pytest.raises(NotTaken, match="extents that are constants"):
        schedule_contraction(Schedule(workloads.Matmul(64, 64, 64).prim_func(any_m=True)))
