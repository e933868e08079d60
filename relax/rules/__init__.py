"""Rules for dlight, TVM's library of default schedules, made of schedule functions: one takes a function, or leaves it.

``__init__.pyi`` lists the names; each is loaded when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
