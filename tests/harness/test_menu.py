"""``ladder menu``: times of what the Python call chooses from, on drawn shapes, and the constants fitted to them."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.cases import Outcome, hopper
from support.fake_gpu import Command
from tensorir_ladder.harness import execution, menu
from tensorir_ladder.harness.commands import menu as menu_command
from tensorir_ladder.harness.menu import (
    CLUSTERS_SINCE,
    ONE_TILE,
    Candidate,
    candidates,
    draw_products,
    file_text,
    most_doubtful,
    recorded_times,
    with_times,
)
from tensorir_ladder.harness.menu_fit import chosen_over_best, fit_rates, geometric_mean
from tensorir_ladder.harness.records import load_shapes
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen import toolchain
from tensorir_ladder.kernels.tiles import RoleTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops import estimates
from tensorir_ladder.torch_ops.choice import choices
from tensorir_ladder.torch_ops.estimates import CostFile, Estimates, cost_file, estimates_on
from tensorir_ladder.torch_ops.few_rows import Streamed, streams
from tensorir_ladder.torch_ops.one_tile import all_tiles, named

H200 = hopper(name="NVIDIA H200")
FILE = msgspec.structs.replace(cost_file("NVIDIA H200"), shapes=())
ALL = list(choices())
H100 = "NVIDIA H100 80GB HBM3"
ESTIMATES = Estimates(ALL, FILE, H200.multiprocessors)


def timed_on(estimates: Estimates, problem: Matmul, noise: random.Random | None = None) -> dict[str, float]:
    """Times of a product's candidates on a made-up GPU, of which the formula with some constants is all there is."""
    times = estimates.times(problem, streamed=streams(problem))
    found = dict(zip(map(str, estimates.kernels), times.menu.tolist()))
    found |= {named(all_tiles().tile(place)): us for place, us in enumerate(times.tiles.tolist())}
    factor = (lambda: math.exp(noise.gauss(0, 0.01))) if noise else (lambda: 1.0)
    return {each.name: found[each.name] * factor() for each in candidates(problem, ESTIMATES, H200)}


def test_a_product_s_candidates_are_the_likeliest_of_all_families() -> None:
    kinds: set[str] = set()
    for problem in draw_products(3, 4):
        taken = candidates(problem, ESTIMATES, H200)
        names = [each.name for each in taken]
        assert len(set(names)) == len(names) > 4
        assert (str(Streamed()) in names) == streams(problem)
        for each in taken[:: len(taken) - 1]:
            choice, product, setting = each.made_for
            of_one_tile = all_tiles().place(each.name) is not None
            name = named(choice.tile) if of_one_tile else str(choice)
            assert (name, product, setting.machine.name) == (each.name, problem, "NVIDIA H200")
        kinds |= {name.split(",")[0].split(" ")[0] for name in names}
    assert {"step", "exchanged", "upright"} <= kinds


def test_products_are_drawn_by_their_seed() -> None:
    assert draw_products(3, 4) == draw_products(3, 4)
    assert len(set(draw_products(3, 40)) & set(draw_products(4, 40))) < len(menu.SIDES) + 8
    assert all(problem.n % 8 == problem.k % 8 == 0 for problem in draw_products(5, 30))


def test_constants_of_another_gpu_are_found() -> None:
    """Launches that wait cost thrice as much there, sums of cut waves are read half as fast, memory is slower.

    What is chosen follows. What a cut costs once is not told by so few times from what its sums cost.
    """
    rates = FILE.rates
    changes = {"waits": 3 * rates.waits, "sums": rates.sums / 2, "memory_bytes": rates.memory_bytes / 1.5}
    other = msgspec.structs.replace(FILE, rates=msgspec.structs.replace(rates, **changes))
    there, noise = Estimates(ALL, other, H200.multiprocessors), random.Random(1)
    found = {problem: timed_on(there, problem, noise) for problem in draw_products(12, 16)}
    file = with_times(FILE, hopper(name="NVIDIA Other"), "made up", found)
    fitted = fit_rates(file, ALL, H200)
    for name, value in changes.items():
        begun, got = getattr(rates, name), getattr(fitted, name)
        assert abs(math.log(got / value)) < 0.75 * abs(math.log(begun / value)), name
    assert fitted.multiply_adds == rates.multiply_adds
    assert max(fitted.efficiency.values()) <= 1
    mended = msgspec.structs.replace(file, rates=fitted)
    assert geometric_mean(chosen_over_best(mended, ALL, H200)) > 0.985


def test_times_stand_beside_those_of_the_gpu_s_other_products() -> None:
    one, two = Matmul(64, 64, 64, "float16"), Matmul(64, 128, 64, "float16", "nt")
    names = [str(choice) for choice in ALL]
    first = with_times(FILE, H200, "first", {one: {names[0]: 2.0}, two: {names[1]: 3.0}})
    again = with_times(first, H200, "again", {one: {names[2]: 2.34567}})
    assert [(shape.m, shape.n, shape.times) for shape in again.shapes] == [
        (64, 64, ((2, 2.346),)),
        (64, 128, ((1, 3.0),)),
    ]
    assert len(with_times(first, hopper(name="NVIDIA Other"), "another GPU", {one: {names[2]: 2.0}}).shapes) == 1
    gone = msgspec.structs.replace(first, kernels=("a kernel of before", *first.kernels[1:]))
    assert [shape.n for shape in with_times(gone, H200, "", {}).shapes] == [128]
    assert msgspec.json.decode(file_text(again), type=CostFile) == again


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """A GPU whose times are the formula's; what is built for it."""
    built: list[Candidate] = []

    def timed(taken: list[Candidate], *_: Any) -> tuple[dict[str, float], float]:
        return timed_on(ESTIMATES, taken[0].problem), 5.0

    monkeypatch.setattr(menu_command, "hopper_machine", lambda: H200)
    monkeypatch.setattr(menu_command, "build_ahead", lambda wanted, _jobs: built.extend(wanted))
    monkeypatch.setattr(menu_command, "time_menu", timed)
    monkeypatch.setattr(execution, "GpuBackend", lambda: None)
    monkeypatch.setattr(toolchain, "require_compiler", lambda: None)
    return built


def measure(command: Command, folder: Path, *more: str) -> Outcome:
    """Time few shapes."""
    return command("menu", "--seed", "5", "--count", "2", "--out", str(folder), *more)


def test_a_run_leaves_a_file_that_is_read_again(
    made_up: list[Candidate], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = estimates_on(H200.name, ALL, H200.multiprocessors)
    monkeypatch.setattr(menu_command, "cost_file", lambda _: FILE)
    monkeypatch.setattr(menu_command, "other_cost_files", lambda _: [])
    outcome = measure(command, tmp_path)
    assert outcome.code == 0, outcome
    assert len(made_up) == sum(len(candidates(problem, known, H200)) for problem in draw_products(5, 2))
    monkeypatch.setattr(estimates, "FOLDER", tmp_path)
    read = cost_file("NVIDIA H200")
    sizes = {(shape.m, shape.n, shape.k) for shape in read.shapes}
    assert {(problem.m, problem.n, problem.k) for problem in draw_products(5, 2)} <= sizes
    assert "of cuBLAS" in outcome.out


def test_of_many_products_those_are_timed_whose_choice_is_in_doubt() -> None:
    """Not those that were measured, nor two near each other."""
    measured = Matmul(512, 1024, 1024, "float16")
    beside = [Matmul(512 + 8 * more, 1024, 1024, "float16") for more in (1, 2)]
    others = [Matmul(2000, 3000, 1000, "float16"), Matmul(264, 5000, 4000, "float16", "nt")]
    times = timed_on(ESTIMATES, measured)
    file = with_times(FILE, H200, "made up", {measured: times})
    known = Estimates(ALL, file, H200.multiprocessors)
    taken = most_doubtful([measured, *beside, *others], known, 3)
    assert len(taken) == 3
    assert set(taken) > set(others)
    assert measured not in taken
    assert most_doubtful(others, known, 1) == taken[:1]


def test_more_are_drawn_than_are_timed(made_up: list[Candidate], command: Command, tmp_path: Path) -> None:
    assert measure(command, tmp_path, "--dry-run", "--shapes", "decode,random8", "--drawn", "6").code == 0
    products = {each.problem for each in made_up}
    assert len(products) == 4
    assert products < set(draw_products(5, 6, ["decode", "random8"]))
    fewer = measure(command, tmp_path, "--shapes", "decode", "--drawn", "1")
    assert (fewer.code, "--drawn 1" in fewer.err, "--count" in fewer.err) == (2, True, True)


def times_in(file: CostFile) -> dict[tuple[int, int, int, str], dict[str, float]]:
    """Return a file's times by product and kernel."""
    return {(s.m, s.n, s.k, s.layout): {file.kernels[place]: us for place, us in s.times} for s in file.shapes}


def test_times_of_products_asked_for_stand_and_change_nothing_else(
    made_up: list[Candidate], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants, other products' times and trees are as they were; the call takes what was the fastest."""
    asked = [Matmul(1312, 1128, 6880, "float16", "nt"), Matmul(13, 264, 520, "float16", "nt")]
    timed: dict[Matmul, dict[str, float]] = {}

    def time(taken: list[Candidate], *_: Any) -> tuple[dict[str, float], float]:
        timed[taken[0].problem] = {each.name: round(1 - place / 100, 2) for place, each in enumerate(taken)}
        return timed[taken[0].problem], 5.0

    monkeypatch.setattr(menu_command, "time_menu", time)
    shapes = ",".join(each.shape for each in asked)
    outcome = command("menu", "--shape", shapes, "--layout", "nt", "--kernels", "24", "--out", str(tmp_path))
    assert outcome.code == 0, outcome
    assert {each.problem for each in made_up} == set(timed) == set(asked)
    assert max(map(len, timed.values())) > 17, "more kernels than without --kernels, where so many may be the fastest"
    before = cost_file(H200.name)
    monkeypatch.setattr(estimates, "FOLDER", tmp_path)
    after = cost_file(H200.name)
    assert (after.rates, after.one_tile) == (before.rates, before.one_tile)
    assert after.origin.startswith(before.origin)
    assert not list(tmp_path.glob("grown/*")), "no trees are grown"
    known = {(each.m, each.n, each.k, "nt"): times for each, times in timed.items()}
    assert times_in(after) == times_in(before) | known
    for problem, times in timed.items():
        found = estimates_on(H200.name, ALL, H200.multiprocessors).times(problem)
        assert min(found.menu.min(), found.tiles.min()) == min(times.values())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--shape", "70x99x264"), "multiples of 8"),
        (("--shape", "70x264x99", "--layout", "nt"), "multiples of 8"),
        (("--shape", "70x264"), "MxNxK"),
        (("--shape", ""), "empty value"),
        (("--shape", "0x264x264"), "got 0"),
        (("--layout", "nt"), "--shape"),
        (("--shape", "64x64x64", "--drawn", "9"), "--drawn"),
        (("--shape", "64x64x64", "--shapes", "schedules"), "--shapes schedules"),
        (("--shape", "64x64x64", "--grow"), "--grow"),
        (("--kernels", "9", "--records", "reports/results"), "--records"),
        (("--kernels", "1"), "--kernels"),
    ],
    ids=" ".join,
)
def test_products_that_no_menu_has_are_refused(
    made_up: list[Candidate], command: Command, tmp_path: Path, more: tuple[str, ...], said: str
) -> None:
    outcome = command("menu", *more, "--out", str(tmp_path))
    assert (outcome.code, said in outcome.err, made_up, list(tmp_path.iterdir())) == (2, True, [], [])


def test_a_run_without_time_for_a_shape_writes_nothing(
    made_up: list[Candidate], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", itertools.count(step=10**6).__next__)
    outcome = measure(command, tmp_path, "--shapes", "decode", "--time-limit", "1")
    assert outcome.code == 0, outcome
    assert "none of 2" in outcome.out
    assert not list(tmp_path.iterdir())


def test_what_was_timed_before_a_fault_is_kept(
    made_up: list[Candidate], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = draw_products(5, 2, ["decode"])

    def timed(taken: list[Candidate], *_: Any) -> tuple[dict[str, float], float]:
        if taken[0].problem == second:
            raise WrongResult("made up")
        return timed_on(ESTIMATES, taken[0].problem), 5.0

    monkeypatch.setattr(menu_command, "time_menu", timed)
    monkeypatch.setattr(menu_command, "cost_file", lambda _: FILE)
    assert measure(command, tmp_path, "--shapes", "decode").code == 1
    monkeypatch.setattr(estimates, "FOLDER", tmp_path)
    kept = {(shape.m, shape.n, shape.k) for shape in cost_file("NVIDIA H200").shapes}
    assert (first.m, first.n, first.k) in kept
    assert (second.m, second.n, second.k) not in kept


def test_a_dry_run_times_and_writes_nothing(made_up: list[Candidate], command: Command, tmp_path: Path) -> None:
    outcome = measure(command, tmp_path, "--dry-run")
    assert outcome.code == 0, outcome
    assert made_up
    assert not list(tmp_path.iterdir())


def test_some_groups_are_timed_alone(made_up: list[Candidate], command: Command, tmp_path: Path) -> None:
    assert measure(command, tmp_path, "--dry-run", "--shapes", "decode").code == 0
    assert {each.problem for each in made_up} == set(draw_products(5, 2, ["decode"]))
    outcome = measure(command, tmp_path, "--shapes", "decode,cubes")
    assert outcome.code == 2
    assert "cubes" in outcome.err
    assert "squares" in outcome.err
    assert not list(tmp_path.iterdir())


def test_what_was_timed_is_kept_where_the_fit_fails(
    made_up: list[Candidate], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ArithmeticError("made up")

    monkeypatch.setattr(menu_command, "fit_rates", fails)
    assert measure(command, tmp_path, "--shapes", "decode").code != 0
    monkeypatch.setattr(estimates, "FOLDER", tmp_path)
    kept = {(shape.m, shape.n, shape.k) for shape in cost_file("NVIDIA H200").shapes}
    assert {(problem.m, problem.n, problem.k) for problem in draw_products(5, 2, ["decode"])} <= kept


RESULTS = load_shapes()


SEEDS = (2069,)  # that the call and the schedules were judged by


def in_clusters(config: str) -> bool:
    """Tell whether what the call says of a kernel names a tile of step 12 whose blocks are clusters."""
    match = ONE_TILE.fullmatch(config)
    return bool(match) and RoleTile.parse(match[1]).cluster_size > 1


def test_times_of_the_call_are_taken_from_records_of_drawn_shapes() -> None:
    """Of products that the file has no times of; not of schedules, of other GPUs, nor behind copies."""
    records = [each for each in RESULTS if each.environment.gpu == H200.name and each.seed in SEEDS]
    schedules = {Matmul(*each.shape, each.dtype, each.layout) for each in records if each.group == "schedules"}
    records = [each for each in records if each.group != "schedules"]
    timed = {(shape.m, shape.n, shape.k, shape.layout) for shape in FILE.shapes if len(shape.times) > 1}
    found = recorded_times(RESULTS, FILE)
    records.sort(key=lambda each: each.environment.recorded_at)
    plain = [
        each
        for each in records
        if (*each.shape, each.layout) not in timed
        and not re.search("; |as they lie|shifted", each.config)
        and (each.environment.recorded_at >= CLUSTERS_SINCE or not in_clusters(each.config))
    ]
    assert len(plain) > 400
    said: dict[Matmul, list[tuple[str, float]]] = {}  # some are of two groups
    for each in plain:
        said.setdefault(Matmul(*each.shape, "float16", each.layout), []).append((each.config, each.time_ms * 1e3))
    for problem, pairs in said.items():
        ((name, us),) = found[problem].items()
        tile = all_tiles().place(name)
        text = name if tile is None else f"{all_tiles().tile(tile, problem.n)},"
        assert us == [time for config, time in pairs if text in config][-1]
    assert not found.keys() & {Matmul(*each.shape, "float16", each.layout) for each in records if ";" in each.config}
    assert len(schedules) == 400
    assert not found.keys() & schedules
    one = plain[0]
    menu = {str(each): 2.0 for each in ALL[:2]}
    known = with_times(FILE, H200, "", {Matmul(*one.shape, "float16", one.layout): menu})
    assert len(recorded_times(plain, known)) == len(recorded_times(plain, FILE)) - 1
    for form in ("/1x1/8,", "/1x1/1/1x4,"):  # clusters: of parts, and of shared loads
        one_of = next(each for each in plain if re.search(form, each.config))
        at = [replace(one_of.environment, recorded_at=f"2026-11-25T{hour}:00:00.000+00:00") for hour in (17, 18)]
        before, since = (recorded_times([replace(one_of, environment=each)], FILE) for each in at)
        assert (before, len(since)) == ({}, 1)
    for change in ({"dtype": "bfloat16"}, {"contender": "step10_wgmma"}, {"config": "step 12, 8x8x8/9x9/9, 2 stages"}):
        assert not recorded_times([replace(one, **change)], FILE)


def test_files_learn_from_records_without_a_gpu(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, own = (next(each for each in RESULTS if each.environment.gpu == gpu) for gpu in (H100, H200.name))
    plain = next(each for each in RESULTS if each.environment.gpu == H200.name and each.config in map(str, ALL))
    nowhere = replace(other, environment=replace(other.environment, gpu="NVIDIA Nowhere"))
    records, out = tmp_path / "records", tmp_path / "costs"
    for each in (own, plain, nowhere):
        each.save(records)
    monkeypatch.setattr(menu_command, "cost_file", lambda _: FILE)
    outcome = command("menu", "--records", str(records), "--out", str(out))
    assert outcome.code == 0, outcome
    assert "NVIDIA Nowhere has no file" in outcome.out
    (path,) = out.iterdir()
    file = msgspec.json.decode(path.read_bytes(), type=CostFile)
    assert (plain.m, plain.n, plain.k) in {(shape.m, shape.n, shape.k) for shape in file.shapes}
    assert file.origin.endswith("`ladder bench`")
    for more in (("--dry-run",), ("--drawn", "50")):
        refused = command("menu", "--records", str(records), "--out", str(out), *more)
        assert (refused.code, more[0] in refused.err) == (2, True)
    (tmp_path / "none").mkdir()
    nothing = command("menu", "--records", str(tmp_path / "none"), "--out", str(out))
    assert (nothing.code, "no records" in nothing.err) == (2, True)


@pytest.mark.gpu
def test_kernels_are_checked_and_timed() -> None:
    backend, problem = execution.GpuBackend(), Matmul(256, 512, 512, "float16")
    taken = candidates(problem, ESTIMATES, H200)[:3]
    times, cublas_us = menu.time_menu(taken, backend, toolchain.require_compiler())
    assert set(times) == {each.name for each in taken}
    assert min(*times.values(), cublas_us) > 0
