"""Choices among a part of the kernels."""

from typing import Any

import numpy as np
import pytest

from tensorir_ladder.torch_ops import choice
from tensorir_ladder.torch_ops.menu import Menu
from tensorir_ladder.torch_ops.step_kernels import EXCHANGED, UPRIGHT


def only_kernels_of(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Have the call choose among the kernels with one "tile" a block alone, or among all "others", by estimates."""
    times = Menu.times

    def of_part(menu: Menu, *given: Any, **more: Any) -> np.ndarray:
        found = times(menu, *given, **more)
        one_tile = [getattr(each, "kernel", None) in (EXCHANGED, UPRIGHT) for each in menu.kernels]
        return np.where(np.array(one_tile) == (part == "tile"), found, np.inf)

    monkeypatch.setattr(Menu, "times", of_part)
    monkeypatch.setattr(Menu, "fastest", lambda *_: None)
    monkeypatch.setattr(choice, "_choose", choice._choose.__wrapped__)
