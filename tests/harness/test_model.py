"""The model's ceilings: which instruction a kernel goes by, what bounds it, and how near it comes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.cases import STEPS, make_case
from support.reports_fixtures import environment, record
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.commands.printing import record_line
from tensorir_ladder.harness.machines import machine_for
from tensorir_ladder.harness.models import rate_files
from tensorir_ladder.harness.models.rate_files import NEEDED, Quantity, Rates, RatesFile
from tensorir_ladder.harness.models.time import bound, ceiling_share, instruction_ceiling
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.schedules.tiles import BlockTile, TensorCoreTile, ThreadTile, WarpgroupTile, WarpTile

GPU = "NVIDIA Test 1"
CEILINGS = {"mma_f16_gflops": 600e3, "mma_tf32_gflops": 300e3, "wgmma_f16_gflops": 900e3}
KNOWN = {**dict.fromkeys(NEEDED, 1000.0), "fp32_gflops": 60e3, "copy_gb_s": 4000.0}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the rates of a GPU that does not exist, with or without the tensor cores' ceilings."""
    monkeypatch.setattr(rate_files, "RATES", tmp_path)

    def write(numbers: dict[str, float]) -> None:
        quantities = {
            name: Quantity((value,), "", (), "made up", ((value,),), "abc", "now") for name, value in numbers.items()
        }
        RatesFile("sm_90a", GPU, {"sms": 100}, quantities, {}).save(tmp_path)
        rate_files._rates.cache_clear()

    yield write
    rate_files._rates.cache_clear()


def case_of(step: int, size: int = 4096, dtype: str = "float16", variant: str | None = None) -> Case:
    """A step's default tile on that GPU."""
    case = make_case(step, (size, size, size), variant, dtype=dtype, tile=STEPS[step].tiles.default.tile)
    return replace(case, machine=machine_for("sm_90a").of_gpu(GPU, 132))


@pytest.mark.parametrize(
    ("tile", "math", "name"),
    [
        (ThreadTile, "ieee", "fp32_gflops"),
        (WarpTile, "ieee", "fp32_gflops"),
        (TensorCoreTile, "ieee", "mma_f16_gflops"),
        (TensorCoreTile, "tf32", "mma_tf32_gflops"),
        (WarpgroupTile, "ieee", "wgmma_f16_gflops"),
        (HopperTile, "ieee", "wgmma_f16_gflops"),
    ],
)
def test_each_family_of_tiles_has_its_instruction(tile: type[BlockTile], math: str, name: str) -> None:
    rates = Rates(GPU, 100, **{**KNOWN, **CEILINGS})
    assert instruction_ceiling(rates, tile, math) == getattr(rates, name)
    without = Rates(GPU, 100, **KNOWN)
    assert instruction_ceiling(without, tile, math) == (KNOWN["fp32_gflops"] if name == "fp32_gflops" else None)


@pytest.mark.parametrize(("step", "variant", "ceiling"), [(8, None, 600e3), (8, "tf32", 300e3), (10, None, 900e3)])
def test_tensor_cores_are_bound_by_their_ceiling(step: int, variant: str | None, ceiling: float, measured) -> None:
    case = case_of(step, dtype="float32" if variant == "tf32" else "float16", variant=variant)
    kernel = SimpleNamespace(case=case)
    measured(KNOWN)
    assert bound(kernel, 1.0) == "unknown"
    measured(KNOWN | CEILINGS)
    at_the_ceiling_ms = case.problem.flops / ceiling / 1e6
    assert bound(kernel, 1.9 * at_the_ceiling_ms) == "compute"
    assert bound(kernel, 2.1 * at_the_ceiling_ms) == "latency"


def test_tensor_cores_on_thin_products_are_bound_by_memory(measured) -> None:
    measured(KNOWN | CEILINGS)
    case = case_of(8)
    thin = replace(case, problem=replace(case.problem, k=32))
    moved_ms = 2 * (2 * 4096 * 32 + 4096 * 4096) / 4000.0 / 1e6
    assert bound(SimpleNamespace(case=thin), 1.9 * moved_ms) == "memory"
    assert bound(SimpleNamespace(case=thin), 2.1 * moved_ms) == "latency"


def test_a_records_speed_as_a_share_of_its_ceiling(measured) -> None:
    fast = record(4, 1024, speed=30e3, environment=environment(gpu=GPU))
    tensor = replace(record(4, 1024, speed=300e3, environment=environment(gpu=GPU)), step=8, dtype="float16")
    assert ceiling_share(fast) is None
    measured(KNOWN)
    assert ceiling_share(fast) == pytest.approx(0.5)
    assert ceiling_share(tensor) is None
    assert "ceiling" not in record_line(tensor)
    measured(KNOWN | CEILINGS)
    assert ceiling_share(tensor) == pytest.approx(0.5)
    assert "of cuBLAS, 50% of its instruction's ceiling" in record_line(tensor)


@pytest.mark.parametrize("changes", [{"dtype": "float64"}, {"step": 0}, {"arch": ""}])
def test_what_has_no_instruction_of_the_ladder_has_no_share(changes: dict, measured) -> None:
    measured(KNOWN | CEILINGS)
    assert ceiling_share(record(4, environment=environment(gpu=GPU))) is not None
    assert ceiling_share(replace(record(4, environment=environment(gpu=GPU)), **changes)) is None
