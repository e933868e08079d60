"""Tensor cores: a warp's mma.sync and a warpgroup's wgmma, their fragments and operands.

``__init__.pyi`` lists the names; each is loaded when it is first used. The intrinsics that traces name are made
known to TVM at once.
"""

import lazy_loader

from tensorir_ladder.schedules.tensor_cores import intrinsics as intrinsics

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
