"""Choices among a part of the kernels."""

import numpy as np
import pytest

from tensorir_ladder.torch_ops.estimates import Estimates, Times


def only_kernels_of(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Have the call choose among the "menu", or the "tiles" of step 12, alone."""
    times = Estimates.times

    def of_part(estimates: Estimates, *given: object, **more: object) -> Times:
        found = times(estimates, *given, **more)
        other = {"menu": "tiles", "tiles": "menu"}[part]
        return found._replace(**{other: np.full_like(getattr(found, other), np.inf)})

    monkeypatch.setattr(Estimates, "times", of_part)
