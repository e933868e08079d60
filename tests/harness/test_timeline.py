"""One block's life: stamps in the generated CUDA, the words they leave, the record, the command, the picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.cases import STEPS, Outcome, make_case
from support.reports_fixtures import (
    LOAD_NS,
    MMA_NS,
    environment,
    published,
    role_tracks,
    roles_timeline,
    timeline,
    tracks,
    write_ladder,
    write_timelines,
)
from support.roles import STEPS_WITH_ROLES, roles_case
from tensorir_ladder.harness import timeline as timeline_module
from tensorir_ladder.harness.build import Kernel, UnsupportedCase, compile_module, compiled, lower
from tensorir_ladder.harness.execution import GpuBackend, LlvmBackend
from tensorir_ladder.harness.race import RoundPlan
from tensorir_ladder.harness.records import Timeline, Track, bad_lines, load_timelines
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.timeline import RUNS, NoTimeline, decode, ns_per_clock, take
from tensorir_ladder.harness.verify import SEEDS
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, require_compiler
from tensorir_ladder.kernels.tiles import HopperTile, RoleTile
from tensorir_ladder.reports.check import findings, timeline_problems
from tensorir_ladder.reports.page import step_page
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.plot import timeline_plots
from tensorir_ladder.reports.readme import results_block
from tensorir_ladder.reports.selection import load
from tensorir_ladder.reports.timeline_figure import timeline_figure
from tensorir_ladder.reports.timelines import lives, lives_table, loads, multiplications, waiting_roles
from tensorir_ladder.schedules.stamps import EVENTS, HEADER, Stamps, roles_of

Command = Callable[..., Outcome]
SMALL = HopperTile.parse("64x64x64/1x1")
ROLES = ("loads", "warpgroup 0", "warpgroup 1")
CLOCK_GHZ = 1.5


def ring(stages: int, stamps: Stamps | None = None, variant: str = "tma_store", k: int = 1024) -> Kernel:
    """Step 11 on a small product, lowered."""
    return lower(make_case(11, (128, 128, k), variant, tile=SMALL, stages=stages), stamps)


def with_roles(
    step: int, stamps: Stamps | None = None, variant: str = "", tile: str = "128x128x64/2x1", **given: Any
) -> Kernel:
    """Step 12 or 13 on a small product, lowered for a GPU of 12 multiprocessors, where last waves are cut."""
    return lower(roles_case(step, (512, 512, 4096), tile, variant, sms=12, **given), stamps)


def encode(found: Sequence[Track], roles: Sequence[str], room: int, duration_ns: float) -> list[int]:
    """The words that a kernel with these tracks leaves, at 1.5 clocks a nanosecond."""
    begin_ns, begin = 10**18, 7 * 10**9
    header = (begin_ns, begin, begin_ns + int(duration_ns), begin + int(duration_ns * CLOCK_GHZ), 17)
    words = [*header, *[0] * (len(roles) * len(EVENTS) * room)]
    for track in found:
        row = len(HEADER) + (roles.index(track.role) * len(EVENTS) + EVENTS.index(track.event)) * room
        for number, moment in track.moments.items():
            if number < room:
                words[row + number] = begin + round(moment * CLOCK_GHZ)
    return words


# Stamps in the generated CUDA


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", ["tma_store", "direct"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_without_stamps_the_text_has_no_trace_of_them(stages: int, variant: str) -> None:
    plain, stamped = ring(stages, variant=variant), ring(stages, Stamps(1), variant)
    for word in ("stamp", "calibrate", "clock64", "smid", "warp_sync"):
        assert word not in plain.cuda
    assert len(plain.source.params) == 3
    assert roles_of(plain.source) == ()
    assert len(stamped.source.params) == 4
    # What is left without the stamps' lines is the plain text, but for where expressions are shared.
    theirs = r"\s*(stamp|calibrate|tvm_builtin_cuda_warp_sync)\("
    left = [line for line in stamped.body.splitlines()[1:] if not re.match(theirs, line)]
    without_shared = [[line for line in text if "cse_v" not in line] for text in (left, plain.body.splitlines()[1:])]
    assert without_shared[0] == without_shared[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("step", "variant"), STEPS_WITH_ROLES)
def test_roles_without_stamps_have_no_trace_of_them(step: int, variant: str) -> None:
    tile, consumers = ("128x128x64/2x1", 2) if step == 12 else ("64x64x64/1x1", 1)
    plain, stamped = (with_roles(step, stamps, variant, tile) for stamps in (None, Stamps(1)))
    for word in ("stamp", "calibrate", "clock64", "behind", "smid"):
        assert word not in plain.cuda
    assert len(stamped.source.params) == len(plain.source.params) + 1
    assert stamped.workspaces == list(stamped.source.params[3:-1])
    assert roles_of(stamped.source) == ("producer", *(f"consumer {number}" for number in range(consumers)))
    assert roles_of(plain.source) == ()


@pytest.mark.parametrize("step", [12, 13])
def test_each_role_stamps_its_own_events(step: int) -> None:
    body = with_roles(step, Stamps(3, room=20)).body
    parts = body.split("setmaxnreg_inc")
    marks = [re.findall(r"stamp\(.*, (\d+), (.*), 20, .*\);", part) for part in parts]
    producer, consumer = ({EVENTS[int(row) // 20] for row, _ in own} for own in marks)
    loading = {"load issued", "empty wait begins", "empty wait ends"}
    assert producer == loading
    assert consumer == set(EVENTS) - loading - ({"piece begins"} if step == 12 else set())
    assert len(re.findall(r"\bcalibrate\(", body)) == 2


def test_results_without_boxes_are_stamped() -> None:
    for step in (12, 13):
        case = roles_case(step, (256, 256, 512), "128x128x64/2x1", out_dtype="float32")
        rows = re.findall(r"stamp\(.*, (\d+), .*, 20, .*\);", lower(case, Stamps(0, room=20)).body)
        found = {EVENTS[int(row) // 20] for row in rows}
        assert {"epilogue begins", "results stored"} <= found
        assert not found & {"box begins", "box stored"}


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize(("step", "variant"), [(12, "roles"), (13, "stream"), (13, "multicast")])
def test_stamps_of_roles_cost_no_spills(step: int, variant: str, compiler: Compiler) -> None:
    case = roles_case(step, (4096, 4096, 4096), "128x256x64/2x1", variant, stages=4)
    assert compiled(lower(case, Stamps(66)), compiler).cubin.spill_bytes == 0


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_event_is_stamped_where_it_happens(stages: int) -> None:
    body = ring(stages, Stamps(3, room=20), k=64 * 4 * stages).body
    marks = re.findall(rf"stamp\(\(&\(stamps_ptr\[{len(HEADER)}\]\)\), .*, (\d+), (.*), 20, \((.*)\)\);", body)
    in_flight, ahead = (1, stages - 1) if stages > 1 else (0, 1)
    # Loads before the loop and in it; six of each turn's stage; the end of the last; the epilogue's two.
    assert len(marks) == ahead + stages + 6 * stages + 3
    assert len(re.findall(r"\bcalibrate\(", body)) == 2
    assert all("blockIdx.x) == 3" in speaks for _, _, speaks in marks)
    for event, count in (("load issued", ahead + stages), ("mma retired", stages + 1), ("results stored", 1)):
        assert sum(int(row) == EVENTS.index(event) * 20 for row, _, _ in marks) == count
    numbers = [number for row, number, _ in marks if int(row) == EVENTS.index("mma retired") * 20]
    assert numbers[0].endswith("- 1)") == (in_flight == 1)
    assert numbers[-1] == str(4 * stages * in_flight - 1)  # of one stage the last is stamped in the loop


def test_the_roles_are_in_the_function() -> None:
    case = make_case(11, (256, 256, 512), "tma_store", tile=HopperTile.parse("128x128x64/2x1"), stages=2)
    assert roles_of(lower(case, Stamps(0)).source) == ROLES


def test_a_stamped_kernel_runs_as_it_was_compiled() -> None:
    kernel = ring(2, Stamps(0))
    program = compile_module(kernel.mod, kernel.machine, lambda _: b"", kernel.pass_config, kernel.tir_pipeline)
    assert program.mod.imports[0].inspect_source() == kernel.cuda


@pytest.mark.sampled(3)
@pytest.mark.compiler
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stamps_cost_no_spills_and_leave_wgmma_in_flight(
    stages: int, compiler: Compiler, sass: Callable[[Cubin], str]
) -> None:
    case = make_case(11, (4096, 4096, 4096), "tma_store", tile=HopperTile.parse("128x256x64/2x1"), stages=stages)
    kernel = compiled(lower(case, Stamps(256)), compiler)
    assert kernel.cubin.spill_bytes == 0
    text = sass(kernel.cubin)
    stamps = len(re.findall(r"\bstamp\(\(", kernel.body)) - (stages == 1)  # less the one of number -1
    assert len(re.findall(r"CS2R \w+, SR_CLOCKLO", text)) == stamps + 2
    assert len(re.findall(r"\bHGMMA\b", text)) == 4 * stages
    assert len(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", text)) == (stages if stages > 1 else 0)


def test_a_step_without_stamps_says_so(command: Command) -> None:
    with pytest.raises(
        UnsupportedCase, match=r"step10_wgmma\[rows\] leaves no time stamps; what TMA loads for does, in steps 11 to 13"
    ):
        lower(make_case(10, (256, 256, 256)), Stamps(0))
    outcome = command("timeline", "--step", "9,11")
    assert (outcome.code, outcome.err[:6]) == (2, "error:")
    assert "step9_async_ring[fragments] leaves no time stamps" in outcome.err


# What the words say


def test_words_become_nanoseconds_since_the_block_began() -> None:
    found = tracks(4, 40)
    words = encode(found, ROLES, 64, 40000)
    clock_ns = ns_per_clock([words, encode(found, ROLES, 64, 50000)])
    life = decode(words, ROLES, 64, clock_ns)
    assert clock_ns == pytest.approx(1 / CLOCK_GHZ)
    assert (life.duration_ns, life.multiprocessor) == (40000.0, 17)
    assert {(track.role, track.event) for track in life.tracks} == {(track.role, track.event) for track in found}
    for own in found:
        (read,) = [track for track in life.tracks if (track.role, track.event) == (own.role, own.event)]
        assert read.first == own.first
        assert read.ns == pytest.approx(own.ns, abs=0.5)


def test_what_has_no_room_is_dropped() -> None:
    life = decode(encode(tracks(2, 40), ROLES, 16, 60000), ROLES, 16, 1 / CLOCK_GHZ)
    assert max(len(track.ns) for track in life.tracks) == 16


@pytest.mark.parametrize("missing", ["begin ns", "end ns", "end clock"])
def test_a_block_that_did_not_run_to_its_end_is_refused(missing: str) -> None:
    words = encode(tracks(2, 16), ROLES, 32, 30000)
    broken = list(words)
    broken[HEADER.index(missing)] = 0
    with pytest.raises(NoTimeline, match="not all ran to an end"):
        ns_per_clock([words, broken])


def test_a_number_without_a_stamp_among_others_is_refused() -> None:
    words = encode(tracks(2, 16), ROLES, 32, 30000)
    words[len(HEADER) + 3] = 0
    with pytest.raises(
        NoTimeline, match="loads: load issued has no stamp between the first number, 0, and the last, 1"
    ):
        decode(words, ROLES, 32, 1 / CLOCK_GHZ)


# Taking one, on a made-up GPU


class FakeWords:
    """The stamps' tensor."""

    def __init__(self, count: int) -> None:
        self.words = [0] * count

    def zero_(self) -> None:
        self.words = [0] * len(self.words)

    def cpu(self) -> np.ndarray:
        return np.array(self.words)


@pytest.fixture
def stamping(made: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session whose stamped kernels compute the product and leave words, of longer blocks from run to run."""
    launches: list[int] = []

    def executable(kernel: Kernel) -> dict[str, Any]:
        problem, names, stages = kernel.case.problem, kernel.roles, kernel.case.stages_built
        of_step = tracks if names[0] == "loads" else role_tracks
        found = of_step(stages, -(-problem.k // 64), **{"groups" if of_step is tracks else "consumers": len(names) - 1})

        def run(a: np.ndarray, b: np.ndarray, c: np.ndarray, words: FakeWords) -> None:
            with np.errstate(invalid="ignore"):
                c[...] = LlvmBackend().reference(problem, a, b).astype(c.dtype)
            launches.append(1)
            words.words = encode(found, names, Stamps(0).room, 50000 + 100 * len(launches))

        return {"main": run}

    monkeypatch.setattr(timeline_module, "executable", executable)
    monkeypatch.setattr(
        timeline_module, "compiled", lambda kernel, _compiler: replace(kernel, cubin=Cubin(b"", 1, 0, 0))
    )
    made.backend.torch.zeros = lambda count, dtype, device: FakeWords(count)
    made.backend.torch.int64 = "int64"
    return made


def test_the_median_run_of_the_middle_block_is_kept(stamping: Session) -> None:
    case = make_case(11, (256, 256, 320), "tma_store", tile=SMALL, stages=3)
    taken = take(stamping, case)
    assert (taken.block, taken.blocks, taken.multiprocessor, taken.stages) == (8, 16, 17, 3)
    assert len(taken.durations_ns) == RUNS
    assert taken.duration_ns == sorted(taken.durations_ns)[RUNS // 2]
    assert taken.roles == ("loads", "warpgroup 0")
    assert len(taken.moments("warpgroup 0", "mma retired")) == 5
    assert (taken.plain.label, taken.stamped.label) == (str(case), f"{case} stamped")
    assert taken.verification.passed
    assert len(taken.verification.seeds) == SEEDS
    assert Timeline.from_json(taken.to_json()) == taken


def test_a_block_beyond_the_grid_is_refused(stamping: Session) -> None:
    with pytest.raises(NoTimeline, match=r"--block 16: .* has 16 blocks, from 0 on"):
        take(stamping, make_case(11, (256, 256, 320), "tma_store", tile=SMALL, stages=3), block=16)


def test_the_command_writes_a_record_per_stage_count(
    command: Command, stamping: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tensorir_ladder.harness.commands.timeline.open_session", lambda options, command: stamping)
    small = ("--tile", str(SMALL), "--shape", "256x256x320")
    outcome = command("timeline", "--step", "11", "--stages", "3-4", *small, "--out", str(tmp_path))
    assert (outcome.code, outcome.err) == (0, "")
    assert [taken.stages for taken in load_timelines(tmp_path)] == [3, 4]
    assert "block 8 of 16 on multiprocessor 17, 5" in outcome.out
    assert outcome.out.count("wrote") == 2


def test_every_stage_count_is_checked_before_the_first_is_run(command: Command) -> None:
    outcome = command("timeline", "--step", "11", "--stages", "3,9")
    assert outcome.code == 2
    assert "shared memory" in outcome.err


def test_without_a_gpu_the_command_says_so(command: Command) -> None:
    outcome = command("timeline", "--step", "11", "--size", "256")
    assert outcome.code == 2
    assert "GPU" in outcome.err


# Records


def test_a_timeline_survives_its_file_and_the_newest_counts(tmp_path: Path) -> None:
    first, second = timeline(2), timeline(2, environment=environment(at="2026-11-21T10:00:00.000+00:00"))
    places = {taken.save(tmp_path) for taken in (first, second, timeline(4))}
    assert len(places) == 3
    assert load_timelines(tmp_path) == [second, timeline(4)]
    dirty = environment(at="2026-11-22T10:00:00.000+00:00", dirty=True)
    timeline(2, environment=dirty).save(tmp_path)
    assert load_timelines(tmp_path)[0] == second


@pytest.mark.parametrize(
    "garble",
    [
        lambda data: data.pop("tracks"),
        lambda data: data["tracks"][0].pop("ns"),
        lambda data: data["tracks"][0].update(ns=[]),
        lambda data: data["tracks"][0].update(ns=["soon"]),
        lambda data: data["tracks"][0].update(role=7),
        lambda data: data.update(tracks=[3]),
        lambda data: data.update(tracks=data["tracks"][:1]),
        lambda data: data.update(tracks=data["tracks"][1:]),
        lambda data: data.update(kept=5),
        lambda data: data.update(clock_mhz="fast"),
        lambda data: data.update(schema=99),
    ],
)
def test_a_corrupt_timeline_is_named_and_left_out(tmp_path: Path, garble: Callable[[dict], None]) -> None:
    place = timeline().save(tmp_path)
    path = Path(place.rpartition(":")[0])
    data = json.loads(path.read_text())
    garble(data)
    path.write_text(json.dumps(data))
    assert load_timelines(tmp_path) == []
    (bad,) = bad_lines(tmp_path)
    assert bad.startswith(f"{place} is no Timeline")


# What a timeline says


def test_spans_are_those_of_the_ring() -> None:
    taken = timeline(4)
    assert waiting_roles(taken) == ["warpgroup 0", "warpgroup 1"]
    assert [span.number for span in loads(taken)] == list(range(64))
    assert loads(taken)[0].end - loads(taken)[0].begin == pytest.approx(LOAD_NS + 20)
    products = multiplications(taken, "warpgroup 0")
    assert products[10].end - products[10].begin == pytest.approx(MMA_NS)
    assert all(before.end <= after.begin for before, after in pairwise(products))


def test_an_end_that_nobody_waited_for_is_not_called_seen() -> None:
    seen = {stages: [span.seen for span in multiplications(timeline(stages), "warpgroup 0")] for stages in (1, 2, 4)}
    assert all(seen[1])
    assert all(seen[4])
    assert seen[2] == [False] * 63 + [True]


def test_the_table_says_where_the_time_goes(tmp_path: Path) -> None:
    write_timelines(tmp_path)
    (group,) = lives(load(tmp_path))
    table = lives_table(group)
    assert [row[0] for row in table.rows] == ["1", "2", "4"]
    assert [row[6] for row in table.rows] == ["35%", "≤ 100%", "100%"]
    assert [row[7] for row in table.rows] == ["2.99"] * 3
    assert lives(load(tmp_path), step=12) == []


def test_cases_have_pictures_of_their_own(tmp_path: Path) -> None:
    write_timelines(tmp_path)
    timeline(2, size=1024).save(tmp_path)
    timeline(2, layout="nt").save(tmp_path)
    assert len({drawn.file_name for drawn in timeline_plots(load(tmp_path))}) == 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """A complete set of reports with timelines."""
    folder = tmp_path_factory.mktemp("lives")
    write_ladder(folder, variants=False)
    write_timelines(folder)
    return published(folder)


def test_pages_and_readme_show_the_picture(site: Paths) -> None:
    assert findings(site) == []
    results = load(site.results)
    (drawn,) = timeline_plots(results)
    with Image.open(site.plots / drawn.file_name) as image:
        assert image.width == 9 * 160
    page, readme = step_page(results, 11), site.documents[0].read_text()
    for text in (page, readme):
        assert f"plots/{drawn.file_name})" in text
        assert "## One block's life" in text
    assert "| ≤ 100% |" in page
    assert "(step 11)" in readme


def test_without_timelines_nothing_is_said_of_them(tmp_path: Path) -> None:
    write_ladder(tmp_path, variants=False)
    results = load(tmp_path)
    assert list(timeline_plots(results)) == []
    readme = tmp_path / "README.md"
    readme.touch()
    block = results_block(results, Paths.of(tmp_path, readme), readme)
    for text in (*(step_page(results, step) for step in results.steps()), block):
        assert "One block's life" not in text


def test_a_picture_of_other_stamps_is_stale(site: Paths, tmp_path: Path) -> None:
    (drawn,) = timeline_plots(load(site.results))
    write_timelines(tmp_path)
    moved = [replace(track, ns=tuple(moment + 1 for moment in track.ns)) for track in timeline(2).tracks]
    timeline(2, tracks=tuple(moved)).save(tmp_path)
    (other,) = timeline_plots(load(tmp_path))
    assert drawn.is_current(site.plots)
    assert (other.file_name, other.is_current(site.plots)) == (drawn.file_name, False)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"tracks": (*tracks(2, 9), Track("x", "mma issued", 0, (3.0, 2.0)))}, "x: mma issued goes back in time"),
        ({"tracks": (*tracks(2, 9), Track("x", "mma issued", 0, (-3.0,)))}, "lies outside the block's"),
        ({"tracks": (*tracks(2, 9), Track("x", "mma issued", 0, (1e9,)))}, "lies outside the block's"),
        (
            {
                "tracks": (
                    *tracks(2, 9),
                    Track("x", "full wait begins", 0, (9.0,)),
                    Track("x", "full wait ends", 0, (8.0,)),
                )
            },
            "x: full wait ends comes before full wait begins",
        ),
        ({"environment": environment(dirty=True)}, "uncommitted changes"),
        ({"verification": replace(timeline().verification, passed=False)}, "not verified"),
        ({"plain": replace(timeline().plain, samples_ms=(1.0,))}, "1 samples in 9 rounds"),
    ],
)
def test_a_timeline_that_is_no_evidence_is_found(changes: dict[str, Any], finding: str) -> None:
    assert list(timeline_problems(timeline())) == []
    assert any(finding in problem for problem in timeline_problems(timeline(**changes)))


@pytest.mark.parametrize("step", [12, 13])
def test_roles_have_a_picture(step: int, tmp_path: Path) -> None:
    for stages in (2, 4):
        taken = roles_timeline(step, stages)
        assert list(timeline_problems(taken)) == []
        assert waiting_roles(taken) == ["producer", "consumer 0", "consumer 1"]
        assert len(loads(taken)) == len(multiplications(taken, "consumer 1")) == (64 if step == 12 else 256)
        taken.save(tmp_path)
    (drawn,) = timeline_plots(load(tmp_path))
    figure = timeline_figure(drawn.section)
    labels = set().union(*(axes.get_legend_handles_labels()[1] for axes in figure.axes))
    assert {"wait for an empty stage", "rounded", "a box stored"} <= labels
    assert ("a tile begins" in labels) == (step == 13)
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_the_command_leaves_out_stage_counts_that_a_step_does_not_take(
    command: Command, stamping: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tensorir_ladder.harness.commands.timeline.open_session", lambda options, command: stamping)
    small = ("--tile", "64x64x64/1x1", "--shape", "256x256x1024")
    outcome = command("timeline", "--step", "12", *small, "--out", str(tmp_path))
    assert (outcome.code, outcome.err) == (0, "")
    assert [(taken.step, taken.stages) for taken in load_timelines(tmp_path)] == [(12, 3), (12, 4)]
    assert command("timeline", "--step", "12", "--stages", "1", *small).code == 2


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("step", "variant", "stages", "multiplies"),
    [
        *((11, "tma_store", stages, "warpgroup 1") for stages in (1, 2, 4)),
        (11, "boxes", 4, "warpgroup 1"),
        (12, "own_warp", 4, "consumer 1"),
    ],
)
def test_a_real_block_leaves_a_timeline_that_makes_sense(
    step: int, variant: str, stages: int, multiplies: str, tmp_path: Path
) -> None:
    plan = RoundPlan(rounds=7, warmup_ms=20.0)
    session = Session(require_compiler(), GpuBackend(), tmp_path, "a test", plan=plan)
    tile = STEPS[step].tile(variant, "128x128x64/2x1")
    taken = take(session, make_case(step, (1024, 1024, 2048), variant, tile=tile, stages=stages))
    problems = [problem for problem in timeline_problems(taken) if "uncommitted" not in problem]
    assert problems == []
    assert [len(loads(taken)), len(multiplications(taken, multiplies))] == [32, 32]
    assert 500 < taken.clock_mhz < 2500


@pytest.mark.gpu
@pytest.mark.parametrize("step", [12, 13])
@pytest.mark.parametrize("stages", [2, 4])
def test_real_roles_leave_a_timeline_that_makes_sense(stages: int, step: int, tmp_path: Path) -> None:
    session = Session(require_compiler(), GpuBackend(), tmp_path, "a test", plan=RoundPlan(rounds=7, warmup_ms=20.0))
    variant = {12: "roles"}.get(step)
    case = make_case(step, (4096, 4096, 1024), variant, tile=RoleTile.parse("128x128x64/2x1"), stages=stages)
    taken = take(session, case)
    assert [problem for problem in timeline_problems(taken) if "uncommitted" not in problem] == []
    assert waiting_roles(taken) == ["producer", "consumer 0", "consumer 1"]
    assert len(loads(taken)) == len(multiplications(taken, "consumer 1")) >= 16
    assert 500 < taken.clock_mhz < 2500
