"""Relax passes of TVM's that fail, and models that they compile to something else (docs/tvm.md)."""

from __future__ import annotations

import re
from unittest import mock

import pytest
from tvm import ir, relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm.support import nvcc

from support.stock_tvm import HOPPER, failure, still


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
    still(said != "", "relax/passes/read_transposed.py")


@I.ir_module
class Squares:
    @R.function
    def main(x: R.Tensor((4, 64), "float32")) -> R.Tensor((4, 64), "float32"):
        with R.dataflow():
            y = R.power(x, R.const(2.0, "float32"))
            R.output(y)
        return y


@I.ir_module
class AdaptivePool:
    @R.function
    def main(x: R.Tensor((1, 2, 3, 4), "float32")) -> R.Tensor((1, 2, 2, 2), "float32"):
        with R.dataflow():
            y = R.nn.adaptive_avg_pool2d(x, (2, 2))
            R.output(y)
        return y


@I.ir_module
class SqueezeAndExcitation:
    @R.function
    def main(
        x: R.Tensor((2, 8, 1, 1), "float32"),
        w: R.Tensor((16, 8, 1, 1), "float32"),
        image: R.Tensor((2, 16, 8, 8), "float32"),
    ) -> R.Tensor((2, 16, 8, 8), "float32"):
        with R.dataflow():
            weights = R.sigmoid(R.nn.conv2d(x, w))
            y = R.multiply(image, weights)
            R.output(y)
        return y


@I.ir_module
class SqueezeAndExcitationOfOne:
    @R.function
    def main(
        x: R.Tensor((1, 4, 1, 1), "float32"),
        w: R.Tensor((5, 4, 1, 1), "float32"),
        image: R.Tensor((1, 5, 8, 8), "float32"),
    ) -> R.Tensor((1, 5, 8, 8), "float32"):
        with R.dataflow():
            weights = R.sigmoid(R.nn.conv2d(x, w))
            y = R.multiply(image, weights)
            R.output(y)
        return y


@I.ir_module
class CausalConvolution:
    @R.function
    def main(x: R.Tensor((1, 256, 16), "float16"), w: R.Tensor((256, 1, 4), "float16")) -> R.Tensor(
        (1, 256, 16), "float16"
    ):
        with R.dataflow():
            padded = R.nn.conv1d(x, w, padding=3, groups=256)
            y = R.strided_slice(padded, axes=[2], begin=[0], end=[16])
            R.output(y)
        return y


@I.ir_module
class ProductOfOneStep:
    @R.function
    def main(x: R.Tensor((8, 1), "float32"), w: R.Tensor((1, 8), "float32")) -> R.Tensor((8, 8), "float32"):
        with R.dataflow():
            y = R.exp(R.matmul(x, w))
            R.output(y)
        return y


@I.ir_module
class SumOfBfloat16:
    @R.function
    def main(x: R.Tensor((4, 256), "bfloat16")) -> R.Tensor((4,), "bfloat16"):
        with R.dataflow():
            y = R.sum(x, axis=1)
            R.output(y)
        return y


def kernels(module: ir.IRModule) -> str:
    """The CUDA of a Relax module, by TVM's own pipeline."""
    imports = relax.build(module, HOPPER).mod.imports
    return "".join(inner.inspect_source() for each in imports for inner in each.imports)


def test_a_power_of_a_negative_number_is_nan() -> None:
    """``powf`` is ``__powf`` under --use_fast_math, which is 2 to the power of a logarithm."""
    with HOPPER, mock.patch.object(nvcc.subprocess, "Popen", side_effect=RuntimeError("not run")) as run:
        failure(lambda: nvcc.compile_cuda("", target_format="ptx", compiler="nvcc"))
    text, options = kernels(Squares), run.call_args.args[0]
    still("powf(x_ptr" in text and "--use_fast_math" in options, "relax/rules/fast_math.py")


def test_an_adaptive_pool_is_no_kernel() -> None:
    text = kernels(AdaptivePool)
    assert "__global__" in kernels(Squares)
    still("__global__" not in text, "relax/legalization.py")


def test_a_convolution_of_one_pixel_fails_in_dlight() -> None:
    said = failure(lambda: relax.build(SqueezeAndExcitation, HOPPER))
    still("consumers of the cache-write stage" in said, "relax/rules/for_target.py")


def test_a_product_with_an_image_goes_past_shared_memory_in_dlight() -> None:
    """Five channels, sixteen threads along them, and no condition on the store but for the threads of each sum."""
    text = kernels(SqueezeAndExcitationOfOne)
    (guard,) = re.findall(r"if \((.*)\) \{\n *\w+_shared\w*\[\(\(int\)threadIdx\.y\)\] = red_buf0", text)
    still(re.search(r"_shared\w*\[5\]", text) and "threadIdx.y" not in guard, "relax/rules/for_target.py")


def test_a_slice_behind_a_convolution_fails_in_dlight() -> None:
    said = failure(lambda: relax.build(CausalConvolution, HOPPER))
    still("no attribute 'value'" in said, "relax/rules/for_target.py")


def test_what_follows_a_reduction_of_one_step_is_computed_twice() -> None:
    text = kernels(ProductOfOneStep)
    begun = re.search(r"(\w+\[.*\]) = expf\(0x0p.*\n *(\w+\[.*\]) = expf\(\((\w+\[.*\]) \+ \(", text)
    still(begun and len(set(begun.groups())) == 1, "relax/rules/sums.py")


def test_threads_sum_up_bfloat16_without_a_barrier() -> None:
    text = kernels(SumOfBfloat16)
    last = text[text.index("w_8_0 = ") : text.index("w_1_0 = ")]
    still(last.count("red_buf0") > 4 and "__sync" not in last, "relax/rules/sums.py")


@I.ir_module
class CumulativeSum:
    @R.function
    def main(x: R.Tensor((2, 600), "int64")) -> R.Tensor((2, 600), "int64"):
        with R.dataflow():
            y = R.cumsum(x, axis=1)
            R.output(y)
        return y


@I.ir_module
class CumulativeProduct:
    @R.function
    def main(x: R.Tensor((2, 300), "float32")) -> R.Tensor((2, 300), "float32"):
        with R.dataflow():
            y = R.cumprod(x, axis=1)
            R.output(y)
        return y


@I.ir_module
class UnknownSum:
    @R.function
    def main(x: R.Tensor(ndim=2, dtype="int64")) -> R.Tensor(ndim=2, dtype="int64"):
        with R.dataflow():
            y = R.cumsum(x, axis=1)
            R.output(y)
        return y


@I.ir_module
class SliceUpToASymbol:
    @R.function
    def main(x: R.Tensor(("n + 1",), "float32"), y: R.Tensor(("n",), "float32")) -> R.Tensor(("n",), "float32"):
        n = T.int64()
        with R.dataflow():
            z = R.add(R.strided_slice(x, axes=[-1], begin=[0], end=[n]), y)
            R.output(z)
        return z


def test_threads_of_a_cumulative_sum_read_what_others_write() -> None:
    text = kernels(CumulativeSum)
    read = text.index("make_longlong4(shared_buf_ptr[")
    written = text.index("*(longlong4*)(shared_buf_ptr", read)
    still("__syncthreads" not in text[read:written], "relax/passes/legalize_scans.py")


def test_threads_of_a_cumulative_product_share_their_places() -> None:
    text = kernels(CumulativeProduct)
    shared = re.findall(r"(\w*_ptr)\[0\] = \(\(int\)", text)
    still(
        shared and all(f"int* __restrict__ {name}" in text for name in shared),
        "relax/passes/legalize_scans.py",
    )


def test_a_sum_of_unknown_shape_is_not_dispatched() -> None:
    with HOPPER:
        said = failure(lambda: relax.backend.DispatchSortScan()(UnknownSum))
    still(said != "", "relax/passes/legalize_scans.py")


def test_a_slice_up_to_a_symbol_is_not_legalized() -> None:
    said = failure(lambda: relax.transform.LegalizeOps()(SliceUpToASymbol))
    still("axis < src_tensor_dim" in said, "relax/passes/simplify_shapes.py")
