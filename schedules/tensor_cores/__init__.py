"""Tensor cores: a warp's mma.sync and a warpgroup's wgmma, their fragments and operands.

``__init__.pyi`` lists the names; each is loaded when it is first used, functions behind a guard
(:mod:`schedules.faces`). The intrinsics that traces name are made known to TVM at once.
"""

from tensorir_ladder.schedules import faces
from tensorir_ladder.schedules.tensor_cores import intrinsics as intrinsics

__getattr__, __dir__, __all__ = faces.attach(__name__, __file__)
