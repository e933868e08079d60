"""TVM's Relax modules: passes over graphs, rules for their functions, and explicit kernels that these launch.

Importing this registers the Relax pipeline "tensorir_ladder" (:mod:`.pipelines`); nothing of TVM's is changed.

pipelines : the passes in their order, our rules, dlight's for what these leave
passes, legalization : what TVM's own passes lack
rules : one function in, one scheduled function out
kernel_products, attention : functions that launch explicit kernels, which :mod:`.linking` compiles
explanation : which rule took which function, and why others left it

``__init__.pyi`` lists the names; each is loaded when it is first used.
"""

import lazy_loader

from tensorir_ladder.relax import pipelines as _registers

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_registers.register()
