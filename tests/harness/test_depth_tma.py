"""The depth model of step 11: its terms, and what it says of stage counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.cases import make_case
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.machines import GpuSpec, machine_for
from tensorir_ladder.harness.models import depth, depth_tma
from tensorir_ladder.harness.models.depth_tma import BlockWork
from tensorir_ladder.harness.models.rate_files import Curve, Rates
from tensorir_ladder.harness.records import Resources
from tensorir_ladder.kernels.tiles import HopperTile, RoleTile

RATES = Rates(
    gpu="made up",
    sms=100,
    sm_clock_mhz=2000.0,
    fp32_gflops=25600.0,
    copy_gb_s=2000.0,
    dram_latency_ns=400.0,
    shared_bytes_per_clock=128.0,
    cp_async_latency_ns=600.0,
    launch_ns=500.0,
    barrier_ns=Curve((128.0, 256.0), (10.0, 20.0)),
    wgmma_f16_gflops=409600.0,  # a clock of 1 GHz on all 100 multiprocessors
)
WORK = BlockWork(
    stages=3,
    k_tiles=100,
    operations=4096 * 500,
    loaded_bytes=32000,
    port_bytes=80000,
    result_bytes=64000,
    barrier_ns=20,
    resident=1,
    active=100,
)


def resources(blocks_per_sm: int = 1, blocks: int = 64) -> Resources:
    """What a compiler might take."""
    return Resources(90, 0, 98304, 256, blocks, blocks_per_sm, blocks_per_sm / 8, "shared memory")


def case(stages: int = 4, size: int = 1024, **changes: object) -> Case:
    """Step 11 on the made-up machine."""
    made = make_case(11, (size, size, size), "tma_store", stages=stages, dtype="float16")
    machine = type("FakeMachine", (GpuSpec,), {"rates": RATES})
    return replace(made, machine=machine(**vars(machine_for("sm_90a"))), **changes)


def test_power_lowers_the_clock_where_all_multiply() -> None:
    assert depth_tma.clock_ghz(WORK, RATES) == 1.0
    assert depth_tma.clock_ghz(replace(WORK, active=80), RATES) == pytest.approx(1.25)
    assert depth_tma.clock_ghz(replace(WORK, active=10), RATES) == 2.0  # never above that of other work


def test_the_port_or_the_tensor_cores_take_longer() -> None:
    assert depth_tma.multiply_ns(WORK, RATES) == pytest.approx(80000 / 128)
    assert depth_tma.multiply_ns(replace(WORK, port_bytes=10000), RATES) == pytest.approx(500)


def test_a_load_has_the_time_of_all_stages_but_one() -> None:
    load = 600 + 32000 / 64
    assert depth_tma.load_ns(WORK, RATES) == pytest.approx(load)
    assert depth_tma.wait_ns(replace(WORK, stages=1), RATES) == pytest.approx(load + 20 + 625)
    assert depth_tma.wait_ns(replace(WORK, stages=2), RATES) == pytest.approx(load + 20)
    assert depth_tma.wait_ns(WORK, RATES) == pytest.approx((load + 20) / 2)
    assert depth_tma.wait_ns(replace(WORK, stages=6), RATES) == pytest.approx(500)  # the width is left


def test_a_launch_is_blocks_one_after_the_other() -> None:
    one = 100 * 625 + 1100 + 1000
    assert depth_tma.total_ns(WORK, RATES, 100) == pytest.approx(one + 500)
    assert depth_tma.total_ns(WORK, RATES, 101) == pytest.approx(2 * one + 500)
    shared = replace(WORK, resident=2)
    assert depth_tma.total_ns(shared, RATES, 200) == pytest.approx(100 * 2 * 625 + 2100 + 500)


def test_what_is_hidden_grows_to_all() -> None:
    shares = [depth_tma.hidden_share(replace(WORK, stages=stages), RATES) for stages in range(1, 7)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert 0 < shares[1] < 1 == shares[2]


def test_work_is_counted_from_the_tile() -> None:
    tile = HopperTile(block=(128, 256, 64), warpgroups=(2, 1))
    work = depth_tma.block_work(case(tile=tile, stages=3), resources(2, blocks=64), RATES, 20)
    assert work.operations == 2 * 128 * 256 * 64
    assert work.loaded_bytes == (128 + 256) * 64 * 2
    assert work.port_bytes == work.loaded_bytes + 2 * (64 + 256) * 64 * 2  # B is read by each warpgroup
    assert (work.stages, work.k_tiles, work.resident, work.active) == (3, 16, 1, 64)
    tall = depth_tma.block_work(case(tile=HopperTile(block=(256, 128, 64), warpgroups=(2, 1))), resources(), RATES, 20)
    assert tall.port_bytes == tall.loaded_bytes + 4 * (64 + 128) * 64 * 2  # and for each 64 rows


def test_step_11_has_a_forecast() -> None:
    said = depth.forecast(case(), lambda _: resources())
    assert len(said.time_ms) == len(said.hidden) == said.most == 4  # of 48 KiB
    assert said.hidden[0] == 0 < said.hidden[1] < said.hidden[-1] == 1
    assert said.time_ms[0] > said.time_ms[1] > said.time_ms[said.recommended - 1]


def test_a_forecast_is_never_below_the_compulsory_traffic() -> None:
    flat = case()
    flat = replace(flat, problem=replace(flat.problem, m=8192, n=8192, k=64))
    said = depth.forecast(flat, lambda _: resources(1, blocks=100))
    assert min(said.time_ms) >= (8192 * 8192 + 2 * 8192 * 64) * 2 / 2000 / 1e6


def test_the_h200s_sweep_of_a_long_product_is_met_within_a_tenth() -> None:
    """Times in ms measured at 1024x1024x14336, one to six stages; the model's form was settled on them."""
    measured = (0.2473, 0.1814, 0.0961, 0.0733, 0.0689, 0.0689)
    made = make_case(
        11, (1024, 1024, 14336), "tma_store", dtype="float16", tile=HopperTile(block=(128, 128, 64), warpgroups=(2, 1))
    )
    said = depth.forecast(made, lambda _: resources(1, blocks=64))
    assert said.time_ms == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("changes", [{"variant": "bounded"}, {"tile": RoleTile.parse(RoleTile.EXAMPLE)}], ids=str)
def test_other_kernels_are_not_covered(changes: dict) -> None:
    with pytest.raises(depth.NoForecast, match="only step 11, as it is timed, and steps whose threads"):
        depth.forecast(case(**changes), lambda _: resources())


def test_rates_without_wgmma_are_refused() -> None:
    bare = case()
    bare.machine.rates = replace(RATES, wgmma_f16_gflops=None)
    with pytest.raises(depth.NoForecast, match="its rates were not measured"):
        depth.forecast(bare, lambda _: resources())
