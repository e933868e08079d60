"""Relax passes of TVM's that fail (docs/tvm.md)."""

from __future__ import annotations

import pytest
from tvm import ir, relax
from tvm.script import ir as I
from tvm.script import relax as R

from support.stock_tvm import failure, still


@I.ir_module
class ItsOwnTranspose:
    @R.function
    def main(x: R.Tensor((8, 8), "float32")) -> R.Tensor((8, 8), "float32"):
        with R.dataflow():
            turned = R.permute_dims(x)
            y = R.matmul(x, turned)
            R.output(y)
        return y


@I.ir_module
class TransposeReadTwice:
    @R.function
    def main(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8, 8), "float32")) -> R.Tensor((8, 8), "float32"):
        with R.dataflow():
            turned = R.permute_dims(w)
            y = R.matmul(x, turned)
            z = R.add(y, turned)
            R.output(z)
        return z


@I.ir_module
class TransposeOfAVector:
    @R.function
    def main(x: R.Tensor((8, 8), "float32"), w: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
        with R.dataflow():
            turned = R.permute_dims(w)
            y = R.matmul(x, turned)
            R.output(y)
        return y


@pytest.mark.parametrize("module", [ItsOwnTranspose, TransposeReadTwice, TransposeOfAVector])
def test_a_transpose_does_not_join_its_product(module: ir.IRModule) -> None:
    said = failure(lambda: relax.transform.FuseTransposeMatmul()(module))
    still(said != "", "schedules/rules/relax_passes.py (ReadTransposed)")
