"""Elements of Relax tensors as expressions of their indices: what is seen through, and what stays a load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import ir, relax, tirx
from tvm.relax import op

from tensorir_ladder.relax.elements import Elements

N = tirx.Var("n", "int64")


def value_of(tensor: relax.Expr) -> tuple[str, Elements]:
    """An element's value in terms of i, j, k, ..., as text."""
    elements = Elements({})
    at = [elements.index(name, extent) for name, extent in zip("ijkl", tensor.ty.shape or ())]
    return str(elements.value(tensor, at)), elements


def normal(tensor: relax.Expr) -> relax.Expr:
    """An expression whose parts have types."""
    return relax.BlockBuilder().normalize(tensor)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.arange(5), "i"),
        (np.arange(6).reshape(2, 3) * 2 + 1, "i * T.int64(6) + j * T.int64(2) + T.int64(1)"),
        (np.ones((2, 2), bool), "T.bool(True)"),
        (np.array([False, True]), "buffer[i]"),
        (np.array([0, 1, 3]), "buffer[i]"),
        (np.array([0.5, 1.5]), "buffer[i]"),
    ],
    ids=str,
)
def test_constants_that_rise_evenly_are_expressions(array: np.ndarray, said: str) -> None:
    assert value_of(relax.const(array, str(array.dtype)))[0] == said


def test_first_elements_that_are_put_in_front_are_seen_through() -> None:
    """As transformers finds where packed sequences begin: no place follows another but the one before it."""
    builder = relax.BlockBuilder()
    with builder.function("main", [relax.Var("x", relax.TensorType([N], "float16"))]):
        with builder.dataflow():
            places = builder.emit(op.arange(0, N, 1, "int64"))
            first = builder.emit(op.strided_slice(places, [0], [0], [1]))
            both = builder.emit(op.concat([builder.emit(op.subtract(first, relax.const(1, "int64"))), places], 0))
            later = builder.emit(op.strided_slice(both, [0], [1], [N + 1]))
            steps = builder.emit(op.subtract(later, builder.emit(op.strided_slice(both, [0], [0], [N]))))
            begins = builder.emit(op.cumsum(builder.emit(op.not_equal(steps, relax.const(1, "int64"))), 0))
            output = builder.emit_output(begins)
        builder.emit_func_output(output)
    made = {binding.var: binding.value for binding in builder.get()["main"].body.blocks[0].bindings}
    elements = Elements(made)
    assert str(elements.value(begins, [elements.index("i", N)])) == "T.bool(False)"


def test_reshapes_split_and_join_known_axes() -> None:
    x = relax.Var("x", relax.TensorType([N, 6, 4], "float16"))
    elements = Elements({})
    shapes: list[Any] = [[N, 24], [N, 2, 12], [N * 6, 4]]
    places = []
    for shape in shapes:
        made = normal(op.reshape(x, shape))
        at = [elements.index(name, extent) for name, extent in zip("ijk", shape)]
        *_, (source, place, _) = elements.places(made, at)
        places.append([str(index) for index in place])
        assert source.same_as(x)
    assert places == [
        ["i", "j // T.int64(4)", "j % T.int64(4)"],
        ["i", "j * T.int64(3) + k // T.int64(4)", "k % T.int64(4)"],
        ["i // T.int64(6)", "i % T.int64(6)", "j"],
    ]


def test_what_is_computed_otherwise_is_a_load() -> None:
    x = relax.Var("x", relax.TensorType([4, 4], "float16"))
    said, elements = value_of(normal(op.nn.relu(x)))
    assert said == "buffer[i, j]"
    (loaded,) = elements.loaded.values()
    assert loaded.op == ir.Op.get("relax.nn.relu")


def test_parts_of_an_uneven_split_begin_where_those_before_end() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([7, 4], "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = builder.emit(op.split(x, 2, axis=0))
            last = builder.emit(relax.TupleGetItem(parts, 1))
            output = builder.emit_output(last)
        builder.emit_func_output(output)
    elements = Elements({binding.var: binding.value for binding in builder.get()["main"].body.blocks[0].bindings})
    *_, (source, place, _) = elements.places(last, [elements.index("i", 3), elements.index("j", 4)])
    assert source.same_as(x)
    assert str(place[0]) == "i + T.int64(4)"
