"""Reusable TensorIR schedule functions, in groups.

Each function does one thing to one ``tvm.s_tir.Schedule``, takes the block or loop it works on and returns named
handles. None knows which operator it schedules.

loops : cutting, padding, ordering and binding loops
memory : bringing operands closer, to shared memory and registers, and results back
pipeline : software pipelining
tensor_cores : mma.sync, wgmma, fragments
recipes : compositions that work, for others' loop nests
workloads : functions to schedule
tiles, cost, isa : tiles, what they cost on a machine, and what the machine's instructions are
plans, cycles : which tile a product should have, and what its schedule does besides
errors : what is raised where something cannot be right

::

    from tensorir_ladder.schedules import memory, pipeline
    memory.stage_in_shared(sch, block, 0, k_outer);  pipeline.pipeline_loop(sch, k_outer, stages=3)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=(
        "loops",
        "memory",
        "pipeline",
        "tensor_cores",
        "recipes",
        "workloads",
        "tiles",
        "cost",
        "cycles",
        "plans",
        "isa",
        "errors",
    ),
)
