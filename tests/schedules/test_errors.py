"""Errors as they come back from the workers of a process pool: one that cannot be made again there ends the pool."""

from __future__ import annotations

import pickle

import pytest

from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile
from tensorir_ladder.torch_ops.driver import DriverError
from tensorir_ladder.torch_ops.errors import WrongDevice


@pytest.mark.parametrize(
    "error",
    [
        IllegalTile("no such tile", value="8x8", limit=3, block="C", loop="i", remedy="take another"),
        IllegalPipeline("too few stages", value=0, remedy="give more"),
        WrongDevice.of_another_gpu("a", 1, 0),
        DriverError("cuLaunchKernel", 1, "CUDA_ERROR_INVALID_VALUE"),
        KernelFault("ring", "race", "two threads", 7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_whole_in_another_process(error: Exception) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
