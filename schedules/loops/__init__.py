"""Cutting, padding, ordering and binding loops.

``__init__.pyi`` lists the names; each is loaded when it is first used, functions behind a guard
(:mod:`schedules.faces`).
"""

from tensorir_ladder.schedules import faces

__getattr__, __dir__, __all__ = faces.attach(__name__, __file__)
