"""Errors as they come back from the workers of a process pool: one that cannot be made again here ends the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile
from tensorir_ladder.torch_ops.driver import DriverError
from tensorir_ladder.torch_ops.errors import WrongDevice


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as workers:
        yield workers


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (partial(IllegalTile, "no such tile", value="8x8", limit=3, block="C", loop="i", remedy="other"), IllegalTile),
        (partial(IllegalPipeline, "too few stages", value=0, remedy="give more"), IllegalPipeline),
        (partial(WrongDevice.of_another_gpu, "a", 1, 0), WrongDevice),
        (partial(DriverError, "cuLaunchKernel", 1, "CUDA_ERROR_INVALID_VALUE"), DriverError),
        (partial(KernelFault, "ring", "race", "two threads", 7), KernelFault),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_errors_arrive_whole_from_a_worker(
    pool: ProcessPoolExecutor, make: Callable[[], Exception], kind: type[Exception]
) -> None:
    here, arrived = make(), pool.submit(make).result(timeout=300)
    assert type(arrived) is type(here) is kind
    assert (str(arrived), vars(arrived)) == (str(here), vars(here))
