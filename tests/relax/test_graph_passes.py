"""Passes over graphs of linear layers, norms and constants: what a graph becomes, and that it computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir.transform import Pass

from tensorir_ladder.relax.graphs import of_weights
from tensorir_ladder.relax.legalization import legalizations
from tensorir_ladder.relax.passes import (
    FoldConstants,
    FoldScales,
    MergeProducts,
    PatchesAsProducts,
    RecogniseNorms,
    SinkReshapes,
    ViewResults,
)

op = relax.op
SOME = 5  # of a symbolic extent
Shapes = dict[str, tuple[tuple[Any, ...], str]]


def module(body: Callable[..., relax.Expr], shapes: Shapes, inputs: int = 1) -> tvm.IRModule:
    """A module of one function, whose first parameters are inputs, the others weights."""
    rows = tirx.Var("rows", "int64")
    params = [
        relax.Var(name, relax.TensorType([rows if extent == "rows" else extent for extent in shape], dtype))
        for name, (shape, dtype) in shapes.items()
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params, attrs={"num_input": inputs}):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(body(builder.emit, *params)))
        builder.emit_func_output(out)
    return builder.get()


def drawn(mod: tvm.IRModule) -> list[np.ndarray]:
    """Whole numbers of few bits by 8, so that sums of float16 are exact."""
    random = np.random.default_rng(7)
    shapes = [[SOME if isinstance(e, tirx.Var) else int(e) for e in each.ty.shape] for each in mod["main"].params]
    return [
        (random.integers(-4, 5, shape) / 8).astype(str(each.ty.dtype))
        for shape, each in zip(shapes, mod["main"].params)
    ]


def run(mod: tvm.IRModule, given: list[np.ndarray]) -> np.ndarray:
    legal = relax.transform.LegalizeOps()(mod)
    machine = relax.VirtualMachine(tvm.compile(legal, tvm.target.Target("llvm")), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, given)).numpy()


def operators(mod: tvm.IRModule) -> list[str]:
    """The names of the operators that a function calls, in their order."""
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    return [str(each.value.op.name).removeprefix("relax.") for each in bindings if isinstance(each.value, relax.Call)]


def of_inputs(mod: tvm.IRModule) -> list[str]:
    """The operators that inputs go into."""
    prepared = of_weights(mod["main"])
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    calls = [each.value for each in bindings if isinstance(each.value, relax.Call) and each.var not in prepared]
    return [str(call.op.name).removeprefix("relax.") for call in calls]


def changed(mod: tvm.IRModule, by: Pass, room: float = 0.0) -> tvm.IRModule:
    """A module as a pass makes it, which computes what it did; ``room`` is relative."""
    made = by(mod)
    given = drawn(mod)
    np.testing.assert_allclose(run(made, given), run(mod, given), rtol=room, atol=room)
    return made


def half(**shapes: tuple[Any, ...]) -> Shapes:
    return {name: (shape, "float16") for name, shape in shapes.items()}


# Reshapes

LAYER = half(x=(2, 3, 8), w=(8, 6), b=(6,))


def layer(emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Var:
    product = emit(op.matmul(emit(op.reshape(x, (6, 8))), w))
    return emit(op.reshape(emit(op.add(product, b)), (2, 3, 6)))


def test_a_linear_layer_is_computed_in_the_shape_of_its_input() -> None:
    made = changed(module(lambda emit, x, w, b: op.nn.relu(layer(emit, x, w, b)), LAYER), SinkReshapes())
    assert operators(made) == ["matmul", "add", "nn.relu"]


def test_two_layers_with_an_activation_and_a_residual_between_reshapes() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr, v: relax.Expr) -> relax.Expr:
        flat = emit(op.reshape(x, (6, 8)))
        inner = emit(op.nn.silu(emit(op.matmul(flat, w))))
        return op.reshape(emit(op.add(emit(op.matmul(inner, v)), flat)), (2, 3, 8))

    made = changed(module(body, half(x=(2, 3, 8), w=(8, 6), v=(6, 8))), SinkReshapes())
    assert operators(made) == ["matmul", "nn.silu", "matmul", "add"]


def test_rows_may_be_known_at_run_time_only() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        rows = x.ty.shape[0]
        product = emit(op.matmul(emit(op.reshape(x, (rows * 3, 8))), w))
        return op.reshape(emit(op.add(product, b)), (rows, 3, 6))

    made = changed(module(body, half(x=("rows", 3, 8), w=(8, 6), b=(6,))), SinkReshapes())
    assert operators(made) == ["matmul", "add"]


@pytest.mark.parametrize("shape", [(8, 6), (4, 12), (48,)], ids=str)
def test_reshapes_that_join_other_axes_stay(shape: tuple[int, ...]) -> None:
    made = changed(module(lambda emit, x: op.nn.relu(emit(op.reshape(x, shape))), half(x=(2, 3, 8))), SinkReshapes())
    assert operators(made) == ["reshape", "nn.relu"]


def test_what_is_added_for_each_row_stays_behind_the_reshape() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, c: relax.Expr) -> relax.Expr:
        return op.add(emit(op.reshape(x, (6, 8))), c)

    made = changed(module(body, half(x=(2, 3, 8), c=(6, 8))), SinkReshapes())
    assert operators(made) == ["reshape", "add"]


def test_only_rows_of_the_first_operand_are_split_again() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.matmul(emit(op.reshape(x, (6, 6))), emit(op.reshape(w, (6, 5))))

    changed(module(body, half(x=(2, 3, 6), w=(2, 3, 5))), SinkReshapes())


# Norms


def doubled(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Var:
    return emit(op.add(x, x))


VIEWED = {
    "a result": (lambda emit, x: op.reshape(doubled(emit, x), (-1, 2, 6)), True),
    "a result reshaped twice": (lambda emit, x: op.reshape(emit(op.reshape(doubled(emit, x), (-1, 6))), (-1, 4)), True),
    "an operand": (lambda emit, x: op.reshape(x, (-1, 2, 6)), False),
    "an operand reshaped twice": (lambda emit, x: op.reshape(emit(op.reshape(x, (-1, 6))), (-1, 4)), False),
    "another order": (lambda emit, x: op.permute_dims(doubled(emit, x)), False),
    "a part": (lambda emit, x: op.strided_slice(doubled(emit, x), [1], [0], [2]), False),
}


@pytest.mark.parametrize("rows", [4, "rows"])
@pytest.mark.parametrize("name", VIEWED)
def test_results_that_are_reshaped_last_are_views(name: str, rows: int | str) -> None:
    body, viewed = VIEWED[name]
    mod = relax.transform.LegalizeOps()(module(body, half(x=(rows, 12))))
    after = changed(mod, ViewResults())
    assert ("memory.view" in operators(after)) == viewed


def norm(square: str, dtype: str, turned: bool) -> Callable[..., relax.Expr]:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr) -> relax.Expr:
        wide = emit(op.astype(x, "float32")) if dtype == "float16" else x
        squared = op.power(wide, relax.const(2.0, "float32")) if square == "power" else op.multiply(wide, wide)
        mean = emit(op.mean(emit(squared), axis=[-1], keepdims=True))
        root = emit(op.rsqrt(emit(op.add(mean, relax.const(1e-5, "float32")))))
        normed = emit(op.multiply(root, wide) if turned else op.multiply(wide, root))
        normed = emit(op.astype(normed, dtype)) if dtype == "float16" else normed
        return op.multiply(normed, w) if turned else op.multiply(w, normed)

    return body


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("square", ["power", "product"])
def test_norms_by_the_root_mean_square_become_an_operator(square: str, dtype: str, turned: bool) -> None:
    shapes = {"x": (("rows", 3, 24), dtype), "w": ((24,), dtype)}
    made = changed(
        module(norm(square, dtype, turned), shapes), RecogniseNorms(), room=2e-3 if dtype == "float16" else 1e-6
    )
    assert operators(made) == ["nn.rms_norm"]


def test_a_mean_of_other_squares_is_no_norm() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, y: relax.Expr, w: relax.Expr) -> relax.Expr:
        mean = emit(op.mean(emit(op.multiply(y, y)), axis=[-1], keepdims=True))
        root = emit(op.rsqrt(emit(op.add(mean, relax.const(1e-5, "float32")))))
        return op.multiply(w, emit(op.multiply(x, root)))

    shapes = {"x": ((4, 24), "float32"), "y": ((4, 24), "float32"), "w": ((24,), "float32")}
    assert "nn.rms_norm" not in operators(changed(module(body, shapes), RecogniseNorms()))


# Constants


def test_a_mask_of_positions_is_a_constant() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
        place = emit(op.arange(0, 8, 1, "int64"))
        seen = emit(op.less_equal(emit(op.expand_dims(place, 0)), emit(op.expand_dims(place, 1))))
        so_far = emit(op.cumsum(emit(op.astype(seen, "int32")), axis=1))
        kept = emit(op.where(seen, relax.const(0, "float16"), relax.const(-1, "float16")))
        return op.add(emit(op.add(x, kept)), emit(op.astype(so_far, "float16")))

    made = changed(module(body, half(x=(3, 8, 8))), FoldConstants())
    assert operators(made) == ["add", "add"]


def test_what_depends_on_symbols_or_is_large_stays() -> None:
    def of_symbols(_emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
        return op.zeros(x.ty.shape, "float16")

    def large(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
        return op.add(x, emit(op.sum(emit(op.zeros((1 << 13, 1 << 13), "float16")), axis=[0, 1])))

    assert operators(FoldConstants()(module(of_symbols, half(x=("rows", 8))))) == ["zeros"]
    assert "zeros" in operators(FoldConstants()(module(large, half(x=(8,)))))


def test_comparisons_of_bools_stay() -> None:
    """TVM's code for them is none that LLVM takes; what is behind them stays, too."""

    def body(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
        seen = emit(op.less(emit(op.arange(0, 8, 1, "int64")), relax.const(5, "int64")))
        same = emit(op.equal(seen, emit(op.ones((8,), "bool"))))
        return op.add(x, emit(op.astype(same, "float16")))

    assert operators(FoldConstants()(module(body, half(x=(3, 8))))) == ["equal", "astype", "add"]


def test_each_call_makes_what_its_caller_gets() -> None:
    made = FoldConstants()(module(lambda _emit, _x: op.arange(0, 3, 1, "int64"), half(x=(3,))))
    assert operators(made) == ["arange"]


def test_numbers_with_symbols_are_no_constants() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
        rows = x.ty.shape[0]
        return op.add(emit(op.arange(rows + 1, rows + 11, 1, "float16")), relax.const(1, "float16"))

    mod = module(body, half(x=("rows",)))
    assert operators(FoldConstants()(mod)) == operators(mod)


# Weights that are prepared


def projected(emit: Callable[..., relax.Var], x: relax.Expr, *given: relax.Expr, turned: bool = True) -> relax.Expr:
    """Three projections, two of them with biases, cut into heads and joined."""
    (q, k, v, bias, more) = given
    made = [emit(op.matmul(x, emit(op.permute_dims(weight)) if turned else weight)) for weight in (q, k, v)]
    made[0], made[2] = emit(op.add(made[0], bias)), emit(op.add(more, made[2]))
    q, k, v = (emit(op.reshape(each, (2, 3, int(each.ty.shape[2]) // 4, 4))) for each in made)
    return op.concat([q, k, v], axis=2)


PROJECTIONS = half(x=(2, 3, 8), q=(8, 8), k=(4, 8), v=(4, 8), bias=(8,), more=(4,))


@pytest.mark.parametrize("turned", [True, False], ids=["of torch", "of ONNX"])
def test_projections_of_one_input_are_one_product(turned: bool) -> None:
    as_they_lie = PROJECTIONS if turned else PROJECTIONS | half(q=(8, 8), k=(8, 4), v=(8, 4))
    made = operators(changed(module(partial(projected, turned=turned), as_they_lie), MergeProducts()))
    assert made.count("matmul") == 1
    assert made.count("strided_slice") == 3


def test_projections_by_what_is_no_weight_or_of_other_inputs_stay() -> None:
    every_one = module(projected, PROJECTIONS, inputs=6)
    assert operators(MergeProducts()(every_one)).count("matmul") == 3


def test_a_projection_whose_weights_are_prepared_later_stays() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, k: relax.Expr, q: relax.Expr) -> relax.Expr:
        keys = emit(op.reshape(emit(op.matmul(x, emit(op.permute_dims(k)))), (2, 3, 2, 4)))
        queries = emit(op.multiply(emit(op.matmul(x, emit(op.permute_dims(q)))), relax.const(0.5, "float16")))
        return op.add(keys, emit(op.reshape(queries, (2, 3, 2, 4))))

    mod = changed(module(body, half(x=(2, 3, 8), k=(8, 8), q=(8, 8))), FoldScales())
    changed(mod, MergeProducts())


def test_a_bias_of_one_element_is_added_behind_the_product() -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, q: relax.Expr, k: relax.Expr, b: relax.Expr) -> relax.Expr:
        queries = emit(op.add(emit(op.matmul(x, emit(op.permute_dims(q)))), b))
        keys = emit(op.matmul(x, emit(op.permute_dims(k))))
        return op.add(*(emit(op.reshape(each, (2, 3, 2, 4))) for each in (queries, keys)))

    changed(module(body, half(x=(2, 3, 8), q=(8, 8), k=(8, 8), b=(1,))), MergeProducts())


@pytest.mark.parametrize("by", [FoldScales(), MergeProducts()], ids=["scales", "merging"])
def test_products_of_a_wider_dtype_stay_so(by: Pass) -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, q: relax.Expr, k: relax.Expr) -> relax.Expr:
        products = [emit(op.matmul(x, emit(op.permute_dims(each)), out_dtype="float32")) for each in (q, k)]
        scaled = emit(op.multiply(products[0], relax.const(0.5, "float32")))
        return op.concat([emit(op.reshape(each, (2, 3, 2, 4))) for each in (scaled, *products)], axis=0)

    mod = module(body, half(x=(2, 3, 8), q=(8, 8), k=(8, 8)))
    assert operators(changed(mod, by)) == operators(mod)


def test_projections_that_are_finished_otherwise_stay() -> None:
    def gated(emit: Callable[..., relax.Var], x: relax.Expr, gate: relax.Expr, up: relax.Expr) -> relax.Expr:
        products = [emit(op.matmul(x, emit(op.permute_dims(weight)))) for weight in (gate, up)]
        return op.multiply(emit(op.nn.silu(products[0])), products[1])

    made = MergeProducts()(module(gated, half(x=(2, 3, 8), gate=(6, 8), up=(6, 8))))
    assert operators(made).count("matmul") == 2


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_scale_of_a_layer_goes_into_its_weights(with_bias: bool) -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        made = emit(op.matmul(x, emit(op.permute_dims(w))))
        made = emit(op.add(made, b)) if with_bias else made
        return op.add(x, emit(op.multiply(relax.const(0.25, "float16"), made)))

    made = changed(module(body, half(x=(5, 8), w=(8, 8), b=(8,))), FoldScales())
    assert of_inputs(made) == ["matmul", *(["add"] if with_bias else []), "add"]


@pytest.mark.parametrize("inputs", [1, 2])
def test_scales_of_what_is_read_twice_or_made_of_inputs_stay(inputs: int) -> None:
    def body(emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr) -> relax.Expr:
        made = emit(op.matmul(x, emit(op.permute_dims(w))))
        scaled = emit(op.multiply(made, relax.const(0.5, "float16")))
        return scaled if inputs == 2 else op.add(made, scaled)

    mod = module(body, half(x=(5, 8), w=(8, 8)), inputs)
    assert operators(FoldScales()(mod)) == operators(mod)


# Patches


@pytest.mark.parametrize("window", [(2, 2), (4, 2), (1, 4)], ids=str)
def test_convolutions_of_patches_are_products(window: tuple[int, int]) -> None:
    def body(_emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.nn.conv2d(x, w, strides=window, data_layout="NHWC", kernel_layout="HWIO")

    made = changed(module(body, half(x=("rows", 8, 4, 3), w=(*window, 3, 5))), PatchesAsProducts())
    assert operators(made)[-1] == "matmul"


@pytest.mark.parametrize(
    "options",
    [{"strides": 1}, {"strides": 2, "padding": 1}, {"strides": 2, "dilation": 2}, {"strides": 3}],
    ids=str,
)
def test_other_convolutions_stay(options: dict[str, int]) -> None:
    def body(_emit: Callable[..., relax.Var], x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.nn.conv2d(x, w, **options, data_layout="NHWC", kernel_layout="HWIO")

    side = 3 if options["strides"] == 3 else 2
    made = PatchesAsProducts()(module(body, half(x=(1, 8, 8, 3), w=(side, side, 3, 5))))
    assert operators(made) == ["nn.conv2d"]


# Activations

SPECIAL = [0.0, -0.0, np.inf, np.nan, 6e4, -6e4, 1e-7, -1e-7]


@pytest.mark.parametrize(("name", "power"), [("gelu", 0), ("gelu_tanh", 3), ("silu", 1), ("sigmoid", 0)])
def test_activations_of_16_bits_are_as_near_as_their_dtype_allows(name: str, power: int) -> None:
    x = np.concatenate([np.linspace(-9, 9, 4001), SPECIAL]).astype("float16")
    mod = module(lambda _emit, x: getattr(op if name == "sigmoid" else op.nn, name)(x), half(x=(len(x),)))
    legal = relax.transform.LegalizeOps(legalizations())(mod)
    machine = relax.VirtualMachine(tvm.compile(legal, tvm.target.Target("llvm")), tvm.cpu())
    got = machine["main"](tvm.runtime.tensor(x)).numpy().astype("float64")
    wide = x.astype("float64")
    with np.errstate(all="ignore"):
        wanted = {
            "gelu": lambda: wide * np.vectorize(_normal)(wide),
            "gelu_tanh": lambda: wide / (1 + np.exp(-2 * (2 / np.pi) ** 0.5 * (wide + 0.044715 * wide**power))),
            "silu": lambda: wide / (1 + np.exp(-wide)),
            "sigmoid": lambda: 1 / (1 + np.exp(-wide)),
        }[name]()
    np.testing.assert_allclose(got, wanted, rtol=2**-11 * 1.02, atol=1.5e-7)


def _normal(x: float) -> float:
    """How much of the normal distribution lies below."""
    return 0.5 * math.erfc(-x / 2**0.5)
