"""Lessons: what they draw follows from the plan, what they show is the kernel's, what they name exists."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
from functools import cache
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorir_ladder.harness import cli
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.one_kernel import case_named
from tensorir_ladder.harness.commands.options import LISTING_SIZES, cases_of
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.kernels.stream_k import StreamKPlan, plan_for
from tensorir_ladder.reports.paths import Paths
from tensorir_ladder.reports.web.lessons import code, has_text, lives, pages, plan, waves
from tensorir_ladder.reports.web.lessons.cuda import BARRIER, WAIT, main_loops, readable
from tensorir_ladder.reports.web.lessons.facts import Facts, reference_gpu
from tensorir_ladder.reports.web.lessons.lesson import Lesson
from tensorir_ladder.reports.web.page import Page, render
from tensorir_ladder.reports.web.sources import SiteSources
from tensorir_ladder.schedules.workloads import Matmul

TEXTS = Path(lives.__file__).parents[2] / "templates" / "web" / "lessons"


@cache
def sources() -> SiteSources:
    return SiteSources.of(Paths.of())


def lesson(number: int) -> Lesson:
    return Lesson(sources(), sources().steps[number], Facts(sources().results, reference_gpu(sources().results)))


def test_every_step_has_a_lesson() -> None:
    assert [number for number in sources().steps if not has_text(number)] == []


@pytest.mark.parametrize("text", sorted(TEXTS.glob("step*.j2")), ids=lambda path: path.name.split(".")[0])
def test_commands_that_a_lesson_names_are_commands(text: Path) -> None:
    source = text.read_text(encoding="utf-8").replace("{{ tile }}", "32x64x16/4x4")
    named = re.findall(r"<code>(ladder [a-z]+ [^<]+)</code>", source)
    exercises = re.findall(r'own\.exercise\((\d+), .*?, "(ladder [^"]+)"\)', source, re.S)
    assert [int(number) for number, _ in exercises] in ([1, 2, 3], [1, 2, 3, 4])
    named += [command for _, command in exercises]
    named += re.findall(r'own\.stages\(.*"(ladder [^"]+)"', source)
    for command in named:
        _, *words = shlex.split(unescape(command))
        if "--help" in words:
            assert words[0] in cli.COMMANDS, command
            continue
        options = cli.parse(words)
        if words[0] in ("show", "explain", "diff"):
            kernels = [options.before, options.after] if words[0] == "diff" else [options.kernel]
            assert all(case_named(kernel, options) for kernel in kernels), command
        elif words[0] in ("run", "verify", "compile"):
            assert cases_of(options, LISTING_SIZES, tunes=True), command


@given(stages=st.integers(1, 6), load=st.floats(0.1, 10), multiply=st.floats(0.1, 10), tiles=st.integers(1, 12))
def test_a_ring_does_each_tile_in_order_and_fills_no_stage_in_use(
    stages: int, load: float, multiply: float, tiles: int
) -> None:
    bars = plan.in_a_ring(stages, load, multiply, tiles)
    loads = {bar.tile: bar for bar in bars if bar.what == "load"}
    products = {bar.tile: bar for bar in bars if bar.what == "multiply"}
    assert set(loads) == set(products) == set(range(tiles))
    for tile in range(tiles):
        assert products[tile].begin >= loads[tile].end
        assert tile == 0 or products[tile].begin >= products[tile - 1].end
        assert tile < stages or loads[tile].begin >= products[tile - stages].end
    assert products[tiles - 1].end <= plan.in_turn(load, multiply, tiles)[-1].end + 1e-9


@given(stages=st.integers(2, 6), load=st.floats(0.1, 10), multiply=st.floats(0.1, 10))
def test_a_full_ring_takes_its_period_for_a_turn(stages: int, load: float, multiply: float) -> None:
    ends = [bar.end for bar in plan.in_a_ring(stages, load, multiply, 40 * stages) if bar.what == "multiply"]
    assert ends[-1] - ends[-1 - stages] == pytest.approx(stages * plan.ring_period(stages, load, multiply))


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_plan_is_that_of_the_schedule(stages: int) -> None:
    own = plan.plan_of(sources().kernel(lesson(5).case(stages)))
    assert own is not None
    assert [statement.words for statement in own.statements] == ["copy A", "copy B", "multiply"]
    assert [statement.stage for statement in own.statements] == [0, 0, stages - 1]
    copies, multiplies = own.statements[0], own.statements[2]
    assert [own.tile(copies, column) for column in range(stages)] == list(range(min(stages, plan.SHOWN_TILES)))
    assert own.tile(multiplies, own.columns - 1) == plan.SHOWN_TILES - 1
    assert sum(count for _, count in own.phases) == own.columns
    assert own.pseudo.count("commit_group") == own.deepest + 1


def test_a_step_without_a_pipeline_has_no_plan() -> None:
    assert plan.plan_of(lesson(4).kernel) is None
    assert plan.plan_of(lesson(13).kernel) is None


@pytest.mark.parametrize(
    "text", ["((((int)threadIdx.x) & 3) * 4)", "(((((k_0 + 2) % 3) * 512) + (((int)threadIdx.y) * 64)))"]
)
@given(seed=st.integers(0, 10**6))
def test_a_readable_index_is_the_same_number(text: str, seed: int) -> None:
    drawn = random.Random(seed)
    values = {name: drawn.randrange(1024) for name in ("tx", "ty", "bx", "k_0")}
    written = text.replace("((int)threadIdx.x)", "tx").replace("((int)threadIdx.y)", "ty")
    shown = readable(f"int i = {text};").removeprefix("int i = ").removesuffix(";")
    assert eval(shown, {}, values) == eval(written, {}, values)  # both are made here
    assert len(shown) < len(text)


def test_a_readable_line_says_what_was_written() -> None:
    line = "    *(float4*)(A_shared_ptr + ((((int)threadIdx.y) * 64) + 4)) = *(float4*)(A_ptr + (k_0 * 16));"
    assert readable(line) == "    (float4) A_shared[ty * 64 + 4] = (float4) A[k_0 * 16];"
    line = "mbarrier_wait((&(((uint64_t*)pool_buf_ptr)[(fill_slot_ptr[0] + 28676)])), fill_phase_ptr[0]);"
    shown = readable(line, {"fill_slot", "fill_phase"}, {28676: "empty[0]"})
    assert shown == "mbarrier_wait(&empty[fill_slot], fill_phase);"
    assert readable("int x = (a ? b : (c * 2));") == "int x = (a ? b : (c * 2));"  # which Python does not know


def test_a_loop_keeps_its_barriers_and_waits() -> None:
    (own,) = main_loops(lesson(5).kernel)
    assert [line.kind for line in own].count(BARRIER) == lesson(5).kernel.code.barriers == 2
    assert [line.text.strip() for line in own if line.kind == WAIT] == ["cp_async_wait_group_2();"]
    assert own[0].text.startswith("for")
    assert own[-1].text == "}"
    producer, consumer = main_loops(lesson(12).kernel)
    assert any("&empty[" in line.text for line in producer)
    assert any("wgmma" in line.text for line in consumer)


def test_a_difference_has_every_line_that_changed() -> None:
    before, after = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\nf = 6", "a = 1\nb = 2\nc = 3\nd = 4\ne = 7\nf = 6"
    found = code.difference(before, after)
    text = [(line.change, re.sub("<[^>]+>", "", line.text)) for line in found]
    assert text == [
        ("gap", "…"),
        ("same", "c = 3"),
        ("same", "d = 4"),
        ("removed", "e = 5"),
        ("added", "e = 7"),
        ("same", "f = 6"),
    ]


@pytest.mark.parametrize("shape", [*waves.SHAPES, (8192, 8192, 8192), (1536, 1536, 8192)])
def test_waves_multiply_each_k_tile_once(shape: tuple[int, int, int]) -> None:
    problem = Matmul(*shape, dtype="float16")
    case = Case.default(sources().steps[13], problem, machine_for("sm_90a"))
    for cuts in (False, True):
        own: StreamKPlan = plan_for(problem, case.tile, case.config.machine, cuts=cuts)
        done = [0] * own.tiles
        for worker in range(own.workers):
            for _, tile, count in waves.pieces_of(own, worker):
                done[tile] += count
        assert set(done) == {own.k_tiles}
        assert waves.fewest_k_tiles(own) <= own.k_tiles * -(-own.tiles // own.workers)
        drawn = [(row["next"] - row["block"]) * (row["to"] - row["from"]) for row in waves._rectangles(own)]
        assert sum(drawn) == own.tiles * own.k_tiles


def test_a_trace_has_every_bar_of_its_timeline() -> None:
    timeline = lesson(12).facts.timelines(12)[-1]
    events = json.loads(lives.chrome_trace(timeline))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(lives.bars(timeline)) > 100
    assert all(event["dur"] >= 0 and event["ts"] + event["dur"] <= timeline.duration_ns / 1e3 + 1 for event in spans)
    rows = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in spans} == rows


def rendered(own: SiteSources, *numbers: int) -> list[str]:
    """Render lessons, with links to all of the site's lessons."""
    made = [page for page in pages(own) if isinstance(page, Page)]
    wanted = [f"lessons/step{number}.html" for number in numbers]
    return [render(page, made, own.gpus) for page in made if page.address in wanted]


def test_lessons_without_records_say_so(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    texts = rendered(SiteSources.of(Paths.of(tmp_path / "results")), 5, 10, 13)
    assert len(texts) == 3
    assert all("not measured" in text or "Not measured" in text for text in texts)
    assert not re.search(r'class="figure"', "".join(texts))


def test_figures_name_their_gpu() -> None:
    found = re.findall(r'<data class="figure" value="([^"]+)" title="([^"]+)"', rendered(sources(), 5)[0])
    gpu = reference_gpu(sources().results)
    assert len(found) > 15
    assert all(gpu in title and math.isfinite(float(value)) for value, title in found)
