"""Calls of compiled functions that TVM refuses, and could take (docs/tvm.md)."""

from __future__ import annotations

import numpy as np
import tvm
import tvm_ffi
from tvm import te, tirx

from support.stock_tvm import failure, still


def test_empty_tensors_with_torchs_strides_are_refused() -> None:
    """Strides of an empty tensor say nothing: torch counts an extent of 0 as 1 in them, TVM as 0."""
    x = te.placeholder((2, tirx.Var("n", "int32"), 4), "float32", name="x")
    copy = tvm.compile(te.create_prim_func([x, te.compute(x.shape, lambda *at: x[at], name="y")]), "llvm")["main"]
    shape, torchs = (2, 0, 4), (4, 4, 1)
    nothing = np.lib.stride_tricks.as_strided(np.empty(shape, "float32"), shape, [4 * each for each in torchs])
    own = tvm.runtime.empty(shape, "float32")
    assert (tvm_ffi.from_dlpack(nothing).strides, own.strides) == (torchs, (0, 4, 1))
    copy(own, own)
    where = "tests/relax/test_attention.py (empty operands are TVM's own)"
    still("Mismatched x.strides" in failure(lambda: copy(tvm_ffi.from_dlpack(nothing), own)), where)
