"""Every configuration is checked with a large k as well, once, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.cases import STEPS, make_case
from support.fake_gpu import SHAPE, Command, FakeGpu
from tensorir_ladder.harness import large_k
from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.execution import LlvmBackend
from tensorir_ladder.harness.large_k import LARGE_K, LargeK, large_k_case
from tensorir_ladder.harness.measure import Measurer
from tensorir_ladder.harness.session import Session
from tensorir_ladder.harness.tuning import confirm
from tensorir_ladder.harness.verify import WrongResult

WHERE_K_IS_LARGE = f"x{LARGE_K} "


@pytest.fixture
def large(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The made-up GPU, on which a large k is large; its kernels go wrong there."""
    monkeypatch.setattr(large_k, "LARGE_K", LARGE_K)
    gpu.corrupt = lambda label, c: c.fill(0) if WHERE_K_IS_LARGE in label else None
    return gpu


def only(case: Case) -> Callable[[Case], Any]:
    """Load nothing: the case is not to be built."""

    def load(asked: Case) -> Any:
        raise AssertionError(f"{asked} is built for {case}")

    return load


def right(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    c[...] = a @ b


def test_sizes_of_a_configuration_share_one_check() -> None:
    built: list[str] = []

    def load(case: Case) -> Any:
        built.append(case.problem.shape)
        return right

    checks = LargeK(LlvmBackend(), load)
    case = make_case(4, (33, 17, 50))
    assert {checks.check(replace(case, problem=replace(case.problem, m=m)), 0) for m in (1, 33, 300)} == set(built)
    assert len(built) == 1
    assert int(built[0].split("x")[-1]) >= 1024
    checks.check(make_case(5, (33, 17, 50)), 0)
    assert len(built) == 2


def test_the_configuration_is_kept() -> None:
    for step in (5, 9, 11, 13):
        case = Case.default(STEPS[step], make_case(step, (256, 256, 1024)).problem, make_case(step, SHAPE).machine)
        long = large_k_case(case, "gpu")
        assert isinstance(long, Case)
        assert long.problem.k == LARGE_K
        assert (long.problem.m, long.problem.n) == (case.tile_built.block_m, case.tile_built.block_n)
        assert (long.variant, long.tile, long.stages_built) == (case.variant, case.tile, case.stages_built)


def test_a_k_that_is_large_already_is_its_own_check() -> None:
    case = make_case(4, (16, 16, LARGE_K))
    assert LargeK(LlvmBackend(), only(case)).check(case, 0) == f"16x16x{LARGE_K}"


def test_what_cannot_be_checked_says_why() -> None:
    tensorized = make_case(9, (64, 64, 128))
    assert LargeK(LlvmBackend(), only(tensorized)).check(tensorized, 0).startswith("no large k: through LLVM")
    case = replace(make_case(5, (64, 64, 16), stages=1), stages=1)
    huge = replace(case, tile=type(case.tile).parse("2048x2048x16/4x4"))
    assert LargeK(LlvmBackend(), lambda long: long.validate()).check(huge, 0).startswith("no large k: ")


def test_a_kernel_that_is_wrong_where_k_is_large_is_not_measured(large: FakeGpu, measurer: Measurer) -> None:
    with pytest.raises(WrongResult, match=rf"step4.*x{LARGE_K} float32"):
        measurer.measure(make_case(4, SHAPE))
    assert large.races == []
    large.corrupt = lambda label, c: None
    case = make_case(4, SHAPE)
    block = f"{case.tile_built.block_m}x{case.tile_built.block_n}x{LARGE_K}"
    assert measurer.measure(case).verification.large_k == block


def test_a_tuned_winner_is_checked_with_a_large_k(large: FakeGpu, made: Session) -> None:
    case = make_case(4, SHAPE)
    with pytest.raises(WrongResult, match=rf"x{LARGE_K} float32"):
        confirm(made, [case], case)


def test_verifying_says_what_was_checked(command: Command) -> None:
    outcome = command("verify", "--step", "2", "--tile", "32x64x16/4x4", "--shape", "33x17x50,8x8x8", "--on", "llvm")
    assert outcome.code == 0
    assert outcome.out.count("; also 8x16x8192") == 2
