"""Batch norms folded into convolutions, and channels last: what a graph becomes, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from support.relax_modules import made_of
from tensorir_ladder.relax.passes import ChannelsLast, FoldBatchNorms

nn = relax.op.nn
Body = Callable[..., relax.Expr]
Shapes = dict[str, tuple[tuple[int | str, ...], str]]
SOME = 3  # of a symbolic extent
IMAGE, WEIGHT = (2, 4, 9, 7), (6, 4, 3, 3)


def convolve(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return nn.conv2d(x, w, padding=1)


def normalize(x: relax.Expr, *vectors: relax.Expr, axis: int = 1) -> relax.Expr:
    return relax.TupleGetItem(nn.batch_norm(x, *vectors, axis=axis, epsilon=1e-3, training=False), 0)


def per_channel(bias: relax.Expr) -> relax.Expr:
    return relax.op.reshape(bias, (1, 6, 1, 1))


def half(**shapes: tuple[int | str, ...]) -> Shapes:
    return {name: (shape, "float16") for name, shape in shapes.items()}


def drawn(mod: tvm.IRModule) -> list[np.ndarray]:
    """Whole numbers of few bits, so that sums of float16 are exact; those called ``v``, variances, are above 0."""
    random, found = np.random.default_rng(5), []
    for parameter in mod["forward"].params:
        shape = [SOME if isinstance(extent, tirx.Var) else int(extent) for extent in parameter.ty.shape]
        array = random.integers(-2, 3, shape).astype(str(parameter.ty.dtype))
        found.append(np.abs(array) + 1 if str(parameter.name) == "v" else array)
    return found


def run(mod: tvm.IRModule, given: Sequence[np.ndarray]) -> np.ndarray:
    legal = relax.transform.LegalizeOps()(relax.transform.DecomposeOpsForInference()(mod))
    machine = relax.VirtualMachine(tvm.compile(legal, tvm.target.Target("llvm")), tvm.cpu())
    return machine["forward"](*map(tvm.runtime.tensor, given)).numpy()


def calls_of(mod: tvm.IRModule, name: str) -> list[relax.Call]:
    found: list[relax.Call] = []

    def note(node: relax.Expr) -> None:
        if isinstance(node, relax.Call) and node.op == tvm.ir.Op.get(f"relax.{name}"):
            found.append(node)

    relax.analysis.post_order_visit(mod["forward"], note)
    return found


def of_activations(mod: tvm.IRModule, name: str) -> list[relax.Call]:
    """Calls whose operand depends on the input ``x``."""
    dependent = {parameter for parameter in mod["forward"].params if str(parameter.name) == "x"}
    for block in mod["forward"].body.blocks:
        for binding in block.bindings:
            if any(used in dependent for used in relax.analysis.free_vars(binding.value)):
                dependent.add(binding.var)
    return [call for call in calls_of(mod, name) if call.args[0] in dependent]


VECTORS = half(g=(6,), b=(6,), m=(6,), v=(6,))


def with_bias(x: relax.Expr, w: relax.Expr, bias: relax.Expr, *vectors: relax.Expr) -> relax.Expr:
    return normalize(relax.op.add(per_channel(bias), convolve(x, w)), *vectors)


def last(x: relax.Expr, w: relax.Expr, *vectors: relax.Expr) -> relax.Expr:
    return normalize(nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"), *vectors, axis=3)


def transposed(x: relax.Expr, w: relax.Expr, *vectors: relax.Expr) -> relax.Expr:
    return normalize(nn.conv2d_transpose(x, w), *vectors)


FOLDED: dict[str, tuple[Shapes, Body]] = {
    "plain": (half(x=IMAGE, w=WEIGHT) | VECTORS, lambda x, w, *vs: normalize(convolve(x, w), *vs)),
    "bias": (half(x=IMAGE, w=WEIGHT, bias=(6,)) | VECTORS, with_bias),
    "channels last": (half(x=(2, 9, 7, 4), w=(3, 3, 4, 6)) | VECTORS, last),
    "grouped": (
        half(x=IMAGE, w=(6, 2, 3, 3)) | VECTORS,
        lambda x, w, *vs: normalize(nn.conv2d(x, w, groups=2, strides=2, dilation=2), *vs),
    ),
    "one axis": (half(x=(2, 4, 9), w=(6, 4, 3)) | VECTORS, lambda x, w, *vs: normalize(nn.conv1d(x, w), *vs)),
    "any batch": (half(x=("n", 4, 9, 7), w=WEIGHT) | VECTORS, lambda x, w, *vs: normalize(convolve(x, w), *vs)),
}
KEPT: dict[str, tuple[Shapes, Body]] = {
    "no convolution": (half(x=(2, 6, 9, 7)) | VECTORS, normalize),
    "transposed convolution": (half(x=IMAGE, w=(4, 6, 3, 3)) | VECTORS, transposed),
    "read twice": (
        half(x=IMAGE, w=WEIGHT) | VECTORS,
        lambda x, w, *vs: (lambda y: relax.op.add(normalize(y, *vs), y))(made(convolve(x, w))),
    ),
}


def made(call: relax.Expr) -> relax.Expr:
    """Give a call a variable, that of the builder in use."""
    return relax.BlockBuilder.current().emit(call)


def in_float32(shapes: Shapes) -> Shapes:
    return {name: (shape, "float32") for name, (shape, _) in shapes.items()}


@pytest.mark.parametrize("name", [*FOLDED, *KEPT])
def test_batch_norms_become_weights_or_a_scale_and_a_shift(name: str) -> None:
    shapes, body = (FOLDED | KEPT)[name]
    mod = made_of(in_float32(shapes), body)
    changed = FoldBatchNorms()(mod)
    given = drawn(mod)
    np.testing.assert_allclose(run(changed, given), run(mod, given), rtol=1e-5, atol=1e-5)
    assert not calls_of(changed, "nn.batch_norm")
    assert bool(of_activations(changed, "multiply")) == (name in KEPT)


def test_folded_weights_depend_on_parameters_alone() -> None:
    shapes, body = FOLDED["bias"]
    mod = FoldBatchNorms()(made_of(shapes, body))
    mod = tvm.IRModule({"forward": mod["forward"].with_attr("num_input", 1)})
    lifted = relax.transform.LiftTransformParams()(mod)
    left = {name for name in ("multiply", "divide", "sqrt", "subtract") if calls_of(lifted, name)}
    assert not left


def test_results_of_a_folded_batch_norm_are_rounded_once() -> None:
    shapes, body = FOLDED["plain"]
    (convolution,) = calls_of(FoldBatchNorms()(made_of(shapes, body)), "nn.conv2d")
    assert str(convolution.ty.dtype) == "float32"
    assert str(convolution.args[1].ty.dtype) == "float16"


def test_batch_norms_in_training_are_left() -> None:
    def body(x: relax.Expr, *vectors: relax.Expr) -> relax.Expr:
        return relax.TupleGetItem(nn.batch_norm(x, *vectors, axis=1, training=True), 0)

    mod = made_of(half(x=(2, 6, 9, 7)) | VECTORS, body)
    assert len(calls_of(FoldBatchNorms()(mod), "nn.batch_norm")) == 1


def between(x: relax.Expr, first: relax.Expr, second: relax.Expr, inner: Body) -> relax.Expr:
    return nn.conv2d(inner(convolve(x, first)), second)


BETWEEN: dict[str, Body] = {
    "relu": nn.relu,
    "clip": lambda y: relax.op.clip(y, 0, 6),
    "constant": lambda y: relax.op.multiply(y, relax.const(np.arange(6, dtype="float16").reshape(6, 1, 1))),
    "scalar": lambda y: relax.op.add(y, relax.const(2, "float16")),
    "rows": lambda y: relax.op.add(y, relax.const(np.arange(7, dtype="float16"))),
    "max pool": lambda y: nn.max_pool2d(y, (3, 3), (2, 2), (1, 0, 1, 2)),
    "mean pool": lambda y: nn.avg_pool2d(y, (2, 2), (2, 2)),
    "adaptive pool": lambda y: nn.adaptive_avg_pool2d(y, (3, 1)),
    "kept mean": lambda y: relax.op.max(y, [2, 3], True),
    "excitation": lambda y: (lambda z: relax.op.multiply(z, relax.op.max(z, [2, 3], True)))(made(y)),
    "concatenation": lambda y: (lambda z: relax.op.strided_slice(relax.op.concat([z, z], 1), [1], [3], [9]))(made(y)),
    "halves": lambda y: (lambda z: relax.op.concat([relax.TupleGetItem(z, 1), relax.TupleGetItem(z, 0)], 1))(
        made(relax.op.split(y, 2, 1))
    ),
    "padding": lambda y: nn.pad(y, [0, 0, 0, 0, 1, 2, 3, 0]),
    "own transposes": lambda y: relax.op.permute_dims(nn.relu(relax.op.permute_dims(y, (0, 2, 3, 1))), (0, 3, 1, 2)),
    "pixels in a row": lambda y: relax.op.reshape(nn.relu(relax.op.reshape(y, (2, 6, 63))), (2, 6, 9, 7)),
    "the same shape": lambda y: relax.op.reshape(y, (2, 6, 9, 7)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_no_transpose_is_left_between_convolutions(name: str) -> None:
    shapes = half(x=IMAGE, first=WEIGHT, second=(5, 6, 1, 1))
    mod = made_of(shapes, lambda *given: between(*given, BETWEEN[name]))
    changed = ChannelsLast()(mod)
    given = drawn(mod)
    np.testing.assert_array_equal(run(changed, given), run(mod, given))
    assert len(of_activations(changed, "permute_dims")) == 2  # at the ends


CONVOLUTIONS: dict[str, tuple[Shapes, Body]] = {
    "strided": (half(x=IMAGE, w=WEIGHT), lambda x, w: nn.conv2d(x, w, strides=(2, 1), padding=(0, 1, 2, 3))),
    "dilated": (half(x=IMAGE, w=WEIGHT), lambda x, w: nn.conv2d(x, w, dilation=(2, 3))),
    "grouped": (half(x=IMAGE, w=(6, 2, 3, 3)), lambda x, w: nn.conv2d(x, w, groups=2)),
    "depthwise": (half(x=IMAGE, w=(8, 1, 3, 3)), lambda x, w: nn.conv2d(x, w, groups=4, padding=1)),
    "one axis": (half(x=(2, 4, 9), w=(6, 4, 3)), lambda x, w: nn.conv1d(x, w, strides=2, padding=1)),
    "three axes": (half(x=(2, 4, 5, 4, 3), w=(6, 4, 2, 2, 2)), nn.conv3d),
    "any batch": (half(x=("n", 4, 9, 7), w=WEIGHT), convolve),
    "added images of fewer axes": (
        half(x=(1, 4, 4, 4), w=(4, 4, 1, 1), y=(4, 4, 4), u=(4, 4, 1)),
        lambda x, w, y, u: relax.op.add(made(nn.conv2d(x, w)), made(nn.conv1d(y, u))),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_with_channels_last_are_the_same(name: str) -> None:
    mod = made_of(*CONVOLUTIONS[name])
    changed = ChannelsLast()(mod)
    given = drawn(mod)
    np.testing.assert_array_equal(run(changed, given), run(mod, given))
    layouts = {str(call.attrs.data_layout) for rank in (1, 2, 3) for call in calls_of(changed, f"nn.conv{rank}d")}
    assert layouts <= {"NWC", "NHWC", "NDHWC"}


NORMS: dict[str, Body] = {
    "layer": lambda y, g, b: nn.layer_norm(y, g, b, axes=[1]),
    "group": lambda y, g, b: nn.group_norm(y, g, b, num_groups=3, channel_axis=1, axes=[2, 3]),
    "instance": lambda y, g, b: nn.instance_norm(y, g, b, channel_axis=1, axes=[2, 3]),
    "softmax": lambda y, g, b: nn.softmax(y, axis=1),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_of_the_same_axes(name: str) -> None:
    shapes = half(x=IMAGE, w=WEIGHT, g=(6,), b=(6,))
    mod = made_of(shapes, lambda x, w, g, b: NORMS[name](convolve(x, w), g, b))
    changed = ChannelsLast()(mod)
    given = drawn(mod)
    np.testing.assert_allclose(run(changed, given), run(mod, given), rtol=2e-2, atol=2e-2)
    assert len(of_activations(changed, "permute_dims")) == 2


ENDS: dict[str, tuple[Body, int]] = {
    "mean": (lambda y: relax.op.max(y, [2, 3], False), 1),
    "classes": (lambda y: relax.op.reshape(relax.op.max(y, [2, 3], True), (2, 6)), 1),
    "tokens": (lambda y: relax.op.permute_dims(relax.op.reshape(y, (2, 6, 63)), (0, 2, 1)), 1),
    "flat": (lambda y: relax.op.reshape(y, (2, 378)), 2),
    "merged batch": (lambda y: relax.op.reshape(y, (12, 63)), 2),
    "another operator": (lambda y: relax.op.flip(y, 1), 2),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_takes_no_transposed_operand_gets_one_transpose(name: str) -> None:
    body, transposes = ENDS[name]
    mod = made_of(half(x=IMAGE, w=WEIGHT), lambda x, w: body(convolve(x, w)))
    changed = ChannelsLast()(mod)
    given = drawn(mod)
    np.testing.assert_array_equal(run(changed, given), run(mod, given))
    assert len(of_activations(changed, "permute_dims")) == transposes


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_modules_are_left(dtype: str) -> None:
    shapes = {"x": ((2, 9, 7, 4), dtype), "w": ((3, 3, 4, 6), dtype)}
    mod = made_of(shapes, lambda x, w: nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"))
    tvm.ir.assert_structural_equal(ChannelsLast()(mod), mod)
    mod = made_of({"x": (IMAGE, "float32"), "w": (WEIGHT, "float32")}, convolve)
    tvm.ir.assert_structural_equal(ChannelsLast()(mod), mod)
