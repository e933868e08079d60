"""TVM's tensor intrinsics, which are parsed as they are imported: twenty seconds under pytest's call stack."""

from __future__ import annotations

import importlib
from types import ModuleType

from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.relax.rules.tensor_intrinsics import import_quickly


@on_a_short_stack
def tvm_intrinsics() -> ModuleType:
    """Import those for CUDA, in some three seconds."""
    with import_quickly():
        return importlib.import_module("tvm.s_tir.tensor_intrin.cuda")
