"""Software pipelining: what runs ahead of what, checked, made, explained and lowered.

``__init__.pyi`` lists the names; each is loaded when it is first used, functions behind a guard
(:mod:`schedules.faces`).
"""

from tensorir_ladder.schedules import faces
from tensorir_ladder.schedules.errors import IllegalPipeline

__getattr__, __dir__, __all__ = faces.attach(__name__, __file__, IllegalPipeline)
