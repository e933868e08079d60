"""Loops that a pipeline would break are refused: dependences of every kind, content that stays, and bad arguments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV
from tvm.script import tirx as T

from support.nests import ATTACKS, BEGIN, BROKEN, COPY, END, ONLINE, SUM, USE, nest
from tensorir_ladder.lab.nests import Nest, Outcome, draw, emulated_outcome, run_nests
from tensorir_ladder.schedules.errors import IllegalPipeline
from tensorir_ladder.schedules.inspection import annotated_loops
from tensorir_ladder.schedules.pipeline import (
    buffer_stages,
    check_pipeline,
    explain_pipeline,
    infer_pipeline,
    keep_last_tile,
    pipeline_loop,
    pseudo_code,
    separate_tiles,
    time_table,
)
from tensorir_ladder.schedules.pipeline.pipelining import ASYNC

DRAWN = 50


@T.prim_func(s_tir=True)
def guarded(x: T.Buffer((8, 32), "float32"), y: T.Buffer((8, 32), "float32")):
    """The nest of tilelang's issue 2674: an if around the tile's load and use."""
    near = T.sblock_alloc_buffer((32,), scope="shared")
    for step in range(8):
        if step < 5:
            for lane in range(32):
                with T.sblock("load"):
                    k, i = T.axis.remap("SS", [step, lane])
                    near[i] = x[k, i]
            for lane in range(32):
                with T.sblock("use"):
                    k, i = T.axis.remap("SS", [step, lane])
                    y[k, i] = near[31 - i]


def loop_behind(*statements: str) -> str:
    """The text of a second loop, ``other``, behind a nest's."""
    text = nest(*statements).text
    loop = text[text.index("    for step") :].replace("step", "other")
    return re.sub(r'"s(\d)"', r'"other\1"', loop)


def in_one_block(text: str) -> str:
    """The text of a nest as one kernel: a block of threads runs all of it."""
    start = text.index("    for ")
    around = '    for block in T.thread_binding(1, thread="blockIdx.x"):\n'
    return text[:start] + around + "".join(f"    {line}\n" for line in text[start:].splitlines())


def outcomes(nests: Sequence[Nest]) -> list[Outcome]:
    """What became of nests; those that are neither right nor refused fail the test, with their text."""
    found = list(run_nests(nests))
    bad = [(outcome, one) for outcome, one in zip(found, nests) if outcome.what not in ("right", "refused")]
    assert not bad, "\n\n".join(f"{outcome}\n{one}\n{one.text}" for outcome, one in bad)
    return found


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", BROKEN)
def test_a_loop_that_a_pipeline_breaks_is_refused_by_the_names_of_its_statements(name: str, stages: int) -> None:
    statements, around = BROKEN[name]
    for async_copy in (False, "auto"):
        one = nest(*statements, **around, stages=stages, async_copy=async_copy)
        with pytest.raises(IllegalPipeline) as caught:
            one.pipelined()
        assert len(set(re.findall(r"'(s\d)'", caught.value.problem))) == 2, "both statements are named"
        assert caught.value.loop == "step"


@pytest.mark.emulator
def test_loops_of_many_kinds_are_right_or_refused() -> None:
    hows = [{"stages": 2}, {"stages": 3, "async_copy": "auto"}, {"stages": 4}]
    nests = [
        nest(*statements, **around, **hows[number % len(hows)], number=number)
        for number, (statements, around) in enumerate(ATTACKS)
    ]
    counts = Counter(outcome.what for outcome in outcomes(nests))
    assert counts["right"] >= len(ATTACKS) // 3, counts


def test_softmax_over_tiles_is_pipelined() -> None:
    """The maximum of the tiles before is no copy, though it goes to registers: the loop writes what it reads."""
    for name, statements in ONLINE.items():
        tiles = 2 if name == "attention" else 1
        for stages in (2, 3, 4):
            sch, loop = scheduled(nest(*statements, before=BEGIN, behind=END))
            plan = pipeline_loop(sch, loop, stages)
            assert plan.roles[:tiles] == ("copy",) * tiles, name
            assert "compute" in plan.roles[tiles:], name
            assert set(plan.roles[tiles:]) <= {"compute", "epilogue"}, name
            assert plan.stage[:tiles] == (0,) * tiles, name
            assert min(plan.stage[tiles:]) == stages - 1, name
    check_pipeline(*scheduled(nest(*ONLINE["sum"], before=BEGIN, behind=END)), [0, 1, 1, 1], range(4))
    hows = [{"stages": stages} for stages in (2, 3, 4)] + [{"stage": (0, 1, 1, 1), "order": (0, 1, 2, 3)}]
    nests = [nest(*ONLINE["sum"], before=BEGIN, behind=END, number=i, **how) for i, how in enumerate(hows)]
    nests += [nest(*ONLINE[name], before=BEGIN, behind=END, number=9 + i, stages=3) for i, name in enumerate(ONLINE)]
    assert {outcome.what for outcome in outcomes(nests)} == {"right"}


def test_a_tile_that_is_used_in_the_iteration_before_is_no_copy_to_load_ahead() -> None:
    """The nest of tilelang's issue 2668: the tile is used first, and then filled for the next iteration."""
    one = nest("total[i] = total[i] + near[i]", "near[i] = x[k, i]", before=(*SUM, "near[i] = T.float32(5)"))
    with pytest.raises(IllegalPipeline, match=r"'s1' fills near.*'s0' reads in the next iteration") as caught:
        pipeline_loop(*scheduled(one))
    assert "before its use" in caught.value.remedy
    for order in ([0, 1], [1, 0]):
        with pytest.raises(IllegalPipeline, match="'s0' reads near and 's1' writes it"):
            check_pipeline(*scheduled(one), [1, 0], order)


TWO_TILES = ("near[i] = x[k, i]", "y[k, i] = near[i]", "near[i] = w[k, i]", "v[k, i] = near[7 - i]")
TWO_LOOPS = nest(COPY, USE).text + loop_behind("near[i] = w[k, i]", "v[k, i] = near[7 - i]")


def test_tiles_that_share_a_buffer_get_one_each() -> None:
    """The nests of tilelang's issues 3031 and 2309: two tiles an iteration, and two loops that share a tile."""
    before = nest(COPY, USE, before=("near[i] = T.float32(3)",)).text
    texts = [nest(*TWO_TILES).text, TWO_LOOPS, before]
    nests = [Nest(3 * i + stages, text, (), stages) for i, text in enumerate(texts) for stages in (2, 3, 4)]
    assert {outcome.what for outcome in outcomes(nests)} == {"right"}
    for text in texts:
        sch, loop = scheduled(Nest(0, text, (), 3))
        plan = pipeline_loop(sch, loop, 3)
        assert set(plan.stage) == {0, 2}
        stages = buffer_stages(sch, loop, plan.stage, plan.order)
        assert {count for name, count in stages.items() if name.startswith("near")} == {3}
    sch, loop = scheduled(nest(*TWO_TILES))
    by_threads(sch)
    assert pipeline_loop(sch, loop, 3, True).async_stages == (0,)


@pytest.mark.parametrize(
    ("statements", "behind"),
    [
        ((COPY, USE), loop_behind("v[k, i] = near[i]", "near[i] = w[k, i]")),
        ((COPY, USE), loop_behind("if other > 2: near[i] = w[k, i]", "v[k, i] = near[i]")),
        ((COPY, USE, "where lane < 4: near[i] = w[k, i]", "v[k, i] = near[i]"), ""),
    ],
)
def test_a_value_that_passes_from_tile_to_tile_keeps_its_buffer(statements: Sequence[str], behind: str) -> None:
    sch, loop = scheduled(Nest(0, nest(*statements).text + behind, (), 3))
    before = sch.mod.script()
    with pytest.raises(IllegalPipeline, match="near"):
        pipeline_loop(sch, loop, 3)
    assert sch.mod.script() == before


READ_BEHIND = nest(COPY, USE, behind=("z[i] = near[7 - i]",)).text
REWRITTEN = {  # by what a refusal names: the nest, and lists for its first loop
    "separate_tiles(sch, loop, 'near')": [
        (nest(*TWO_TILES).text, (0, 1, 0, 1), (0, 1, 2, 3)),
        (TWO_LOOPS, (0, 1), (0, 1)),
    ],
    "keep_last_tile(sch, loop, 'near')": [
        (READ_BEHIND, (0, 1), (0, 1)),
        (nest(*TWO_TILES, behind=("z[i] = near[i]",)).text, (0, 1, 0, 1), (0, 1, 2, 3)),
        (nest(COPY, USE).text + loop_behind("where lane < 4: near[i] = w[k, i]", "v[k, i] = near[i]"), (0, 1), (0, 1)),
    ],
}


@pytest.mark.parametrize("call", REWRITTEN)
def test_a_refusal_names_the_function_after_which_the_loop_is_pipelined(call: str) -> None:
    """The nests of tilelang's issues 3031, 2309 and 3039; in short loops, too."""
    nests = []
    for text, stage, order in REWRITTEN[call]:
        with pytest.raises(IllegalPipeline) as caught:
            check_pipeline(*scheduled(Nest(0, text, (), 2)), stage, order)
        assert caught.value.remedy.startswith(f"call {call}, or ")
        for steps in (1, 2, 6):
            short = text.replace("range(6)", f"range({steps})")
            both = int("T.where" not in text)  # an odd number pipelines the second loop, too
            hows = [(2, False), (3, False), (4, False), (2, False, stage, order)]
            nests += [Nest(2 * (len(nests) + at) + both, short, (), *how) for at, how in enumerate(hows)]
    assert not [outcome.text for outcome in outcomes(nests) if outcome.what != "right"]


@pytest.mark.emulator
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("spread", ["threads", "ragged", "vectors"])
def test_rewritten_loops_are_right_with_asynchronous_copies(spread: str, stages: int) -> None:
    for text in (READ_BEHIND, nest(*TWO_TILES, behind=("z[i] = near[i]",)).text, TWO_LOOPS):
        own = text.replace("7 - i", "i") if stages == 2 else text  # two stages of what other threads wrote: TVM errs
        sch = Schedule(replace(nest(), text=in_one_block(own)).function)
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            lanes = sch.get_loops(block)[-1]
            if spread == "threads":
                sch.bind(lanes, "threadIdx.x")
            else:
                outer, inner = sch.split(lanes, [None, 3 if spread == "ragged" else 4])
                sch.bind(inner if spread == "ragged" else outer, "threadIdx.x")
                if spread == "vectors" and sch.get(block).reads[0].source.scope() == "global":
                    sch.vectorize(inner)
        one = Nest(1, sch.mod["main"].script(), (), stages, async_copy=True)
        assert [outcome.what for outcome in outcomes([one])] == ["right"]
        assert emulated_outcome(one, Outcome(1, "right")) == Outcome(1, "right", emulated=True)
        assert any(True for _ in annotated_loops(one.pipelined().mod, ASYNC))


@pytest.mark.parametrize(
    ("statements", "around", "reason"),
    [
        (("if step < 3: near[i] = x[k, i]", USE), {"behind": ("z[i] = near[i]",)}, "may read of it what it has not"),
        (("where lane < 4: near[i] = x[k, i]", USE), {"before": ("near[i] = T.float32(1)",)}, "may read of it what"),
        (
            ("wide[k % 2, i] = x[k, i]", "y[k, i] = wide[k % 2, i]"),
            {"behind": ("z[i] = wide[0, i]",)},
            "other elements",
        ),
        ((COPY, USE), {}, "nothing outside"),
        ((COPY, "z[i] = near[i]"), {}, "in shared memory or registers"),
    ],
)
def test_a_tile_that_the_last_iteration_does_not_make_is_not_kept(
    statements: Sequence[str], around: dict[str, Sequence[str]], reason: str
) -> None:
    sch, loop = scheduled(nest(*statements, **around))
    buffer = "z" if "z[" in statements[1] else "wide" if "wide" in statements[0] else "near"
    before = sch.mod.script()
    with pytest.raises(IllegalPipeline, match=reason) as caught:
        keep_last_tile(sch, loop, buffer)
    assert caught.value.loop == "step"
    assert buffer in caught.value.value
    assert sch.mod.script() == before


def test_tiles_that_cannot_be_separated_are_refused_with_the_reason() -> None:
    for statements, behind, reason in (
        ((COPY, USE), (), "nothing else uses it"),
        ((COPY, USE), ("z[i] = near[i]",), r"outside the loop.*keep_last_tile\(sch, loop, 'near'\)"),
        ((COPY, USE, "where lane < 4: near[i] = w[k, i]", "v[k, i] = near[i]"), (), "nothing else uses it"),
    ):
        with pytest.raises(IllegalPipeline, match=reason):
            separate_tiles(*scheduled(nest(*statements, behind=behind)), "near")
    for function in (separate_tiles, keep_last_tile):
        sch, loop = scheduled(nest(COPY, USE, behind=("z[i] = near[i]",)))
        for name in ("x", "far", ""):
            with pytest.raises(IllegalPipeline, match="no such buffer") as caught:
                function(sch, loop, name)
            assert (caught.value.value, caught.value.limit) == (repr(name), "near | y")
        with pytest.raises(IllegalPipeline, match="buffer"):
            function(sch, loop, None)
    sch, loop = scheduled(nest(COPY, USE, behind=("z[i] = near[i]",)))
    keep_last_tile(sch, loop, "near")
    pipeline_loop(sch, loop, 2)
    with pytest.raises(IllegalPipeline, match="no entry for a copy of near"):
        keep_last_tile(sch, loop, "near")


def test_an_if_around_the_body_is_named() -> None:
    sch = Schedule(guarded)
    for stage in ([0, 1], [0]):
        with pytest.raises(IllegalPipeline, match="if step < 5") as caught:
            check_pipeline(sch, sch.get_loops(sch.get_sblock("load"))[0], stage, list(range(len(stage))))
        assert "condition" in caught.value.remedy


@pytest.mark.sampled(4)
@pytest.mark.emulator
@pytest.mark.parametrize("first", range(0, 200, DRAWN))
def test_drawn_loops_are_right_or_refused_and_most_are_accepted(first: int) -> None:
    counts = Counter(outcome.what for outcome in outcomes([draw(7, first + number) for number in range(DRAWN)]))
    assert counts["right"] >= DRAWN / 3, counts
    assert counts["refused"] >= DRAWN / 20, "nothing hard was drawn"


def test_a_nest_behind_other_threads_needs_two_stages() -> None:
    """TVM asks whether a thread reads what it wrote itself, and gives one stage to what others wrote."""
    text = nest("near[i] = x[k, i]", "y[k, i] = near[7 - i]").text.replace(
        "range(8)", 'T.thread_binding(8, thread="threadIdx.x")'
    )
    kernel = Nest(0, text.replace("    for step", "    for step", 1), (), 2)
    with pytest.raises(IllegalPipeline, match="as other threads wrote it") as caught:
        kernel.pipelined()
    assert "double_buffer_scope" in caught.value.remedy
    assert next(run_nests([Nest(0, text, (), 3)])).what == "right"


@pytest.mark.parametrize(
    "statements",
    [
        ("near[i] = x[k, i]", "where lane < 4: near[i] = w[k, i]", "y[k, i] = near[i]"),
        ("near[i] = x[k, i]", "y[k, i] = near[i]", "x[k, i] = w[k, i]"),
    ],
)
def test_an_asynchronous_copy_may_not_meet_others_in_memory(statements: Sequence[str]) -> None:
    """ "auto" makes no cp.async of such a copy; True is refused by name."""
    sch, loop = scheduled(nest(*statements))
    by_threads(sch)
    assert infer_pipeline(sch, loop, 2).async_stages == ()
    with pytest.raises(IllegalPipeline, match=r"cannot be asynchronous: 's[12]'") as caught:
        pipeline_loop(sch, loop, 2, True)
    assert caught.value.block == "s0"


# Arguments that are none


def by_threads(sch: Schedule) -> None:
    """Spread every statement over threads, which alone can copy asynchronously."""
    for number in range(len(sch.get_child_blocks(sch.get_sblock("root")))):
        sch.bind(sch.get_loops(sch.get_sblock(f"s{number}"))[-1], "threadIdx.x")


def scheduled(one: Nest) -> tuple[Schedule, LoopRV]:
    """A nest's schedule, and the loop to pipeline."""
    sch = Schedule(one.function)
    return sch, sch.get_loops(sch.get_sblock("s0"))[0]


@pytest.fixture
def plain() -> tuple[Schedule, LoopRV]:
    """A copy and its use."""
    return scheduled(nest("near[i] = x[k, i]", "y[k, i] = near[i]"))


@pytest.mark.parametrize("stage", [10**6, 65, 2**31, 10**5000], ids=["million", "65", "32 bits", "long"])
def test_more_stages_than_memory_holds_are_refused(plain: tuple[Schedule, LoopRV], stage: int) -> None:
    """TVM would write out as many iterations before the loop and behind it."""
    with pytest.raises(IllegalPipeline, match="stage") as caught:
        check_pipeline(*plain, [0, stage], [0, 1])
    assert caught.value.limit
    assert caught.value.remedy
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "values",
    [
        "01",
        b"01",
        None,
        1,
        [0, None],
        [0, "1"],
        [0, 1.0],
        [0, True],
        [0, np.bool_(True)],
        {0: 0, 1: 1},
        [[0], [1]],
        [0, 1j],
    ],
)
@pytest.mark.parametrize("place", range(3))
def test_lists_of_anything_but_whole_numbers_are_refused(
    plain: tuple[Schedule, LoopRV], values: object, place: int
) -> None:
    lists: list[object] = [[0, 1], [0, 1], [0]]
    lists[place] = values
    with pytest.raises(IllegalPipeline, match=("stage", "order", "async_stages")[place]) as caught:
        check_pipeline(*plain, *lists)
    assert caught.value.loop == "step"


def test_whole_numbers_of_numpy_and_tvm_are_taken(plain: tuple[Schedule, LoopRV]) -> None:
    sch, loop = plain
    by_threads(sch)
    check_pipeline(sch, loop, np.array([0, 2]), (np.int64(0), np.uint8(1)), np.array([0]))
    sch.annotate(loop, "software_pipeline_stage", [0, 1])
    check_pipeline(sch, loop, sch.get(loop).annotations["software_pipeline_stage"], range(2))
    sch.unannotate(loop, "software_pipeline_stage")
    assert pipeline_loop(sch, loop, np.int32(2)).stage == (0, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_copy": "maybe"},
        {"async_copy": None},
        {"async_copy": 1},
        {"async_copy": np.array([True, False])},
        {"one_barrier": "yes"},
        {"unroll_ring": 1},
        {"fill_ahead": None},
        {"stages": None},
        {"stages": "3"},
        {"stages": 2.0},
        {"stages": True},
        {"stages": [3]},
        {"stages": -(10**30)},
    ],
)
def test_other_arguments_are_refused_by_name(plain: tuple[Schedule, LoopRV], arguments: dict[str, object]) -> None:
    before = plain[0].mod["main"].script()
    (name,) = arguments
    for function in (infer_pipeline, pipeline_loop):
        with pytest.raises(IllegalPipeline, match="stage" if name == "stages" else name):
            function(*plain, **arguments)
    assert plain[0].mod["main"].script() == before


def test_what_is_no_schedule_and_no_loop_of_it_is_refused(plain: tuple[Schedule, LoopRV]) -> None:
    sch, loop = plain
    block = sch.get_sblock("s0")
    for arguments in ((sch, block), (sch, "step"), (None, loop), (sch.mod, loop)):
        for call in (
            lambda a: check_pipeline(*a, [0, 1], [0, 1]),
            lambda a: pipeline_loop(*a),
            lambda a: infer_pipeline(*a),
        ):
            with pytest.raises(IllegalPipeline, match=r"loop|Schedule"):
                call(arguments)
    sch.split(loop, [None, 2])
    with pytest.raises(IllegalPipeline, match="not in the schedule"):
        check_pipeline(sch, loop, [0, 1], [0, 1])


def test_a_loop_is_pipelined_once() -> None:
    """Inside a pipelined loop nothing is; the same loop again is, with the later lists."""
    sch, loop = scheduled(nest("near[i] = x[k, i]", "y[k, i] = near[i]"))
    outer, inner = sch.split(loop, [2, None])
    for key in ("stage", "order"):
        sch.annotate(outer, f"software_pipeline_{key}", [0])
    with pytest.raises(IllegalPipeline, match="pipelined already"):
        check_pipeline(sch, inner, [0, 1], [0, 1])
    sch, loop = scheduled(nest("near[i] = x[k, i]", "y[k, i] = near[i]"))
    pipeline_loop(sch, loop, 3)
    assert pipeline_loop(sch, loop, 2).stage == (0, 1)


@pytest.mark.parametrize("kind", ["parallel", "vectorize", "thread", "unroll"])
def test_only_serial_loops_are_pipelined(plain: tuple[Schedule, LoopRV], kind: str) -> None:
    text = nest("near[i] = x[k, i]", "y[k, i] = near[i]").text
    loops = {
        "parallel": "T.parallel(6)",
        "vectorize": "T.vectorized(6)",
        "thread": 'T.thread_binding(6, thread="threadIdx.y")',
        "unroll": "T.unroll(6)",
    }
    sch, loop = scheduled(Nest(0, text.replace("step in range(6)", f"step in {loops[kind]}"), (), 2))
    if kind == "unroll":
        pipeline_loop(sch, loop, 2)
        return
    with pytest.raises(IllegalPipeline, match="one after the other"):
        pipeline_loop(sch, loop, 2)


@pytest.mark.parametrize("where", ["step in range(n)", "step in range(6)"])
def test_extents_known_at_run_time_only_are_refused(where: str) -> None:
    text = nest("near[i] = x[k, i]", "y[k, i] = near[i]").text
    text = text.replace('idx: T.Buffer((20,), "int32"))', 'idx: T.Buffer((20,), "int32"), n: T.int32)')
    text = text.replace("step in range(6)", where)
    if where.endswith("6)"):
        text = text.replace("lane in range(8)", "lane in range(n)", 1)
    sch, loop = scheduled(Nest(0, text, (), 2))
    for call in (lambda: check_pipeline(sch, loop, [0, 1], [0, 1]), lambda: pipeline_loop(sch, loop)):
        with pytest.raises(IllegalPipeline, match="known at run time only") as caught:
            call()
        assert caught.value.loop == "step"


def test_a_block_that_tvm_takes_apart_is_refused() -> None:
    """Directly under the loop it counts what stands in a block: one list entry is too few."""
    text = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer((6, 2), "float32"), y: T.Buffer((6, 2), "float32")):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
    near = T.sblock_alloc_buffer((2,), "float32", scope="shared")
    for step in range(6):
        with T.sblock("s0"):
            k = T.axis.spatial(6, step)
            near[0] = x[k, 0]
            near[1] = x[k, 1]
        for lane in range(2):
            with T.sblock("s1"):
                k, i = T.axis.remap("SS", [step, lane])
                y[k, i] = near[i]
"""
    with pytest.raises(IllegalPipeline, match="statements of the loop") as caught:
        pipeline_loop(*scheduled(Nest(0, text, (), 2)), 2)
    assert caught.value.block == "s0"


def test_an_order_counts_in_a_single_iteration_too() -> None:
    text = nest("near[i] = x[k, i]", "y[k, i] = near[i]", "y[k, i] = w[k, i]").text.replace(
        "step in range(6)", "step in range(1)"
    )
    sch, loop = scheduled(Nest(0, text, (), 2))
    with pytest.raises(IllegalPipeline, match="writes y and 's2' writes it in the same iteration"):
        check_pipeline(sch, loop, [0, 1, 0], [0, 2, 1])


@pytest.mark.parametrize("shifted", [False, True])
def test_arrays_that_may_be_one_are_not_read_ahead_of_what_is_written(shifted: bool) -> None:
    made = nest("near[i] = x[k, i]", "w[k + 1, i] = near[i]" if shifted else "w[k, i] = near[i]")
    without = replace(made, text=made.text.replace(', "tirx.noalias": True', ""))
    sch, loop = scheduled(without)
    with pytest.raises(IllegalPipeline, match=r"w and x may be one.*noalias") if shifted else nullcontext():
        pipeline_loop(sch, loop, 2)
    sch, loop = scheduled(made)
    assert pipeline_loop(sch, loop, 2).stage == (0, 1)


@pytest.mark.parametrize("order", [None, [0, 0], [0, 1, 2]])
def test_lists_that_do_not_fit_the_loop_are_not_explained(plain: tuple[Schedule, LoopRV], order: list[int]) -> None:
    sch, loop = plain
    sch.annotate(loop, "software_pipeline_stage", [0, 1])
    if order:
        sch.annotate(loop, "software_pipeline_order", order)
    for show in (explain_pipeline, time_table, pseudo_code):
        with pytest.raises(IllegalPipeline, match="order"):
            show(sch, loop)
