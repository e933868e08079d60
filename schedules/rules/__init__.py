"""Rules for dlight, TVM's library of default schedules, made of the same schedule functions, and a pipeline of them.

Importing this registers the Relax pipeline "tensorir_ladder" (:mod:`.relax_pipeline`); nothing of TVM's is changed.
``__init__.pyi`` lists the names; each is loaded when it is first used.
"""

import lazy_loader

from tensorir_ladder.schedules.rules import relax_pipeline as _registers

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_registers.register()
