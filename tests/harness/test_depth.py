"""The depth model: what it says of stage counts, from rates alone, and what it does not cover."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from support.cases import Outcome, make_case
from tensorir_ladder.harness.build import Case, compiled, lower
from tensorir_ladder.harness.machines import GpuSpec, machine_for
from tensorir_ladder.harness.models import depth
from tensorir_ladder.harness.models.depth import (
    NoForecast,
    TileWork,
    forecast,
    hidden_share,
    path_ns,
    step_ns,
    tile_work,
    time_ms,
    wait_ns,
)
from tensorir_ladder.harness.models.rate_files import Curve, Rates
from tensorir_ladder.harness.records import Resources
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.tiles import ThreadTile

RATES = Rates(
    gpu="made up",
    sms=100,
    sm_clock_mhz=1000.0,
    fp32_gflops=25600.0,
    copy_gb_s=2000.0,
    dram_latency_ns=400.0,
    l2_read_gb_s=5000.0,
    shared_latency_ns=20.0,
    fma_latency_ns=4.0,
    cp_async_latency_ns=600.0,
    cp_async_loaded_latency_ns=Curve((2000.0, 10000.0), (600.0, 700.0)),
    launch_ns=500.0,
    barrier_ns=Curve((128.0, 256.0), (10.0, 20.0)),
)
WORK = TileWork(stages=3, threads=128, bytes=6000, instructions=300, accesses=400, chain=0, steps=10, barriers=2)


class FakeMachine(GpuSpec):
    """A machine whose rates are made up."""

    rates = RATES


def case(variant: str = "async", stages: int = 3, size: int = 512, **changes: object) -> Case:
    """Step 5 on the made-up machine."""
    made = make_case(5, (size, size, size), variant, stages=stages, **changes)
    return replace(made, machine=FakeMachine(**vars(machine_for("sm_90a"))))


def resources(blocks_per_sm: int = 8, blocks: int = 128) -> Resources:
    """What a compiler might take."""
    return Resources(64, 0, 18432, 128, blocks, blocks_per_sm, blocks_per_sm / 16, "registers")


def test_the_terms_of_a_step_are_those_of_the_text() -> None:
    """300 instructions of four warps on four schedulers, 10 exposed loads, two barriers; at 1 GHz."""
    path, busy = 300 + 10 * 20 + 2 * 10, 400  # accesses to shared memory take longer than 300 instructions
    assert path_ns(WORK, RATES) == pytest.approx(path)
    assert path_ns(replace(WORK, stages=1), RATES) == pytest.approx(path + 400), "the load is on the way"
    assert depth.throughput_ns(WORK, RATES) == pytest.approx(busy)
    latency = 600 + 100 * (6000 - 2000) / 8000
    assert wait_ns(WORK, RATES, 1) == pytest.approx((latency + path) / 3)
    assert wait_ns(replace(WORK, barriers=1), RATES, 1) == pytest.approx(latency / 2)
    assert wait_ns(replace(WORK, stages=1), RATES, 2) == pytest.approx(2 * 6000 / 50), "bandwidth only"
    assert step_ns(WORK, RATES, 1) == pytest.approx(path)  # alone: its own way through the tile
    assert step_ns(WORK, RATES, 4) == pytest.approx(path + 3 * busy)  # three others in its way


def test_the_loaded_latency_goes_on_beyond_the_curve() -> None:
    assert [depth.latency_ns(asked, RATES) for asked in (1000, 2000, 6000, 10000, 18000)] == [600, 600, 650, 700, 800]


def test_more_stages_hide_more_until_nothing_is_left() -> None:
    shares = [hidden_share(replace(WORK, stages=stages), RATES, 1) for stages in range(1, 7)]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    one_barrier = [hidden_share(replace(WORK, stages=stages, barriers=1), RATES, 1) for stages in range(2, 7)]
    assert all(one <= two for one, two in zip(one_barrier, shares[1:])), "a copy issued after the wait has less time"


def test_a_rolled_ring_of_three_costs_a_remainder() -> None:
    counts = {stages: tile_work(case(stages=stages)).instructions for stages in (1, 2, 3, 4)}
    assert counts[2] == counts[4] == counts[1]
    assert counts[3] == counts[1] + depth.REMAINDER_INSTRUCTIONS
    assert tile_work(case(stages=3)).chain > tile_work(case(stages=4)).chain == 0


def test_a_ring_written_out_pays_for_its_loop_once_a_turn() -> None:
    rolled = tile_work(case(stages=4)).instructions
    unrolled = {stages: tile_work(case("unrolled_ring", stages=stages)).instructions for stages in (3, 4)}
    assert unrolled[4] == rolled - depth.LOOP_INSTRUCTIONS * 3 / 4
    assert unrolled[3] == rolled - depth.LOOP_INSTRUCTIONS * 2 / 3
    assert tile_work(case("unrolled_ring", stages=3)).chain == 0


def test_the_default_tiles_work_is_what_its_machine_code_shows() -> None:
    """Nsight Compute counted on an H200, for 32x64x16/4x4: 6.0 accesses, some 21 instructions a warp and k step."""
    work = tile_work(make_case(5, (1024, 1024, 1024), "async"))
    assert work.accesses / work.warps / 16 == pytest.approx(6.0)
    assert work.instructions / 16 == pytest.approx(20, abs=1.5)


def test_one_slot_stores_what_cp_async_would_have_copied() -> None:
    stored = tile_work(case(stages=1)).accesses - tile_work(case(stages=2)).accesses
    assert stored == pytest.approx((32 + 64) * 16 * 4 / 128)


def test_a_forecast_recommends_the_fewest_stages_that_are_fast() -> None:
    said = forecast(case(), lambda _: resources())
    assert len(said.time_ms) == len(said.occupancy) == len(said.hidden) == 6
    fastest = min(said.time_ms)
    assert said.time_ms[said.recommended - 1] <= fastest * depth.NO_SLOWER
    assert all(time > fastest * depth.NO_SLOWER for time in said.time_ms[: said.recommended - 1])
    assert said.hidden[said.fewest - 1] == 1 > said.hidden[said.fewest - 2]
    assert said.most == 232448 // 6144


def test_stages_that_cost_residents_are_not_recommended() -> None:
    """Eight blocks to a multiprocessor with up to 3 stages, two with more: half the time is lost."""
    said = forecast(
        case("unrolled_ring", size=2048), lambda other: resources(8 if other.stages <= 3 else 1, blocks=2048)
    )
    assert said.recommended <= 3
    assert said.time_ms[3] > 1.2 * said.time_ms[2]


def test_more_residents_need_fewer_stages() -> None:
    """They hide each other's loads."""
    few = forecast(case("one_barrier", size=512), lambda _: resources(8, blocks=100))
    many = forecast(case("one_barrier", size=4096), lambda _: resources(8, blocks=8192))
    assert few.hidden[1] < many.hidden[1]
    assert few.fewest >= many.fewest


@pytest.mark.parametrize(
    ("variant", "k", "counts"),
    [("rows", 512, [3, 4]), ("awaited", 512, [2, 3, 4]), ("rows", 128, [2]), ("rows", 64, [1])],
)
def test_stage_counts_begin_where_the_variant_does(variant: str, k: int, counts: list[int]) -> None:
    assert depth.stage_counts(make_case(10, (512, 512, k), variant)) == counts


def test_a_short_reduction_has_no_more_stages_than_tiles() -> None:
    short = replace(case(), problem=replace(case().problem, k=40))
    assert depth.stage_counts(short) == [1, 2, 3]
    assert len(forecast(short, lambda _: resources()).time_ms) == 3


def test_a_tile_that_fits_once_gets_one_stage() -> None:
    assert depth.stage_counts(case(tile=ThreadTile(block=(256, 256, 64), thread=(16, 16)))) == [1]


def test_no_launch_is_faster_than_its_compulsory_traffic() -> None:
    flat = replace(case(), problem=replace(case().problem, m=8192, n=8192, k=1))
    compulsory_ms = (8192 * 8192 + 2 * 8192) * 4 / 2000 / 1e6
    assert time_ms(flat, RATES, 2, 8) >= compulsory_ms


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "sync"}, "only loops whose loads are cp.async"),
        ({"variant": "register_staged"}, "only loops whose loads are cp.async"),
        ({"dtype": "float64"}, "only float32 operands"),
        ({"dtype": "float16"}, "only float32 operands"),
        ({"size": 510}, "whole 16-byte vectors"),
    ],
)
def test_what_the_model_does_not_cover_is_said(changes: dict[str, str], message: str) -> None:
    with pytest.raises(NoForecast, match=message):
        forecast(case(**changes), lambda _: resources())


def test_a_machine_without_rates_has_no_forecast() -> None:
    with pytest.raises(NoForecast, match=r"sm_80.* run ladder microbench"):
        forecast(make_case(5, (512, 512, 512), "async", arch="sm_80"), lambda _: resources())


def test_a_curve_is_straight_between_its_points() -> None:
    curve = RATES.barrier_ns
    assert [depth.at(curve, place) for place in (64, 128, 192, 256, 1024)] == [10, 10, 15, 20, 20]


@pytest.mark.compiler
def test_the_command_says_what_each_stage_brings(command, compiler: Compiler) -> None:
    outcome: Outcome = command("depth", "--step", "5", "--variant", "one_barrier", "--shape", "256x256x80")
    assert outcome.code == 0, outcome.err
    assert "step5_pipelining[one_barrier] 256x256x80" in outcome.out
    assert "one more stage costs a block 6144 bytes of shared memory; 37 fit" in outcome.out
    found = compiled(lower(make_case(5, (256, 256, 80), "one_barrier", stages=4)), compiler).resources
    row = next(line for line in outcome.out.splitlines() if line.startswith("│") and line.split("│")[1].strip() == "4")
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[4:7] == [str(found.smem_bytes), str(found.registers), str(found.blocks_per_sm)]


@pytest.mark.compiler
def test_the_command_says_where_no_rates_are_known(command) -> None:
    outcome = command("depth", "--step", "5", "--variant", "async", "--shape", "256x256x64", "--arch", "sm_80")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("error: no times predicted: ")
    assert re.search("sm_80 .*NVIDIA A100", outcome.err.splitlines()[0]), "whose limits and rates are taken"
    assert (outcome.out + outcome.err).count("no times predicted") == 1
    assert "ladder microbench" in outcome.err
    assert "24576" in outcome.out, "what fits is known without rates"


def test_the_command_refuses_a_machine_without_a_compiler(command, no_compiler) -> None:
    outcome = command("depth", "--step", "5", "--size", "256")
    assert outcome.code == 2
    assert "no CUDA compiler" in outcome.err


def test_a_step_without_a_pipeline_has_no_depth(command) -> None:
    outcome = command("depth", "--step", "3", "--size", "64")
    assert outcome.code == 2
    assert outcome.err.startswith("error: --step 3: no pipeline")
