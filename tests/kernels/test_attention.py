"""Fused attention: right beside numpy for every form, and refused where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.kernels.attention import BY_HEAD, TILE, Attention, AttentionTile, attention
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import COUNTED, LaunchPlan, Planned, TensorMap
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile, IllegalWorkload

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
SMALL = Attention(1, 70, 70, 2, 1, 64, "float16", 64**-0.5)
slow = pytest.mark.emulator
WRONG = 77.0  # what memory has where nothing may be written


def lowered(problem: Attention, tile: AttentionTile, stages: int, **form: bool) -> Any:
    """The kernel's text and launch."""
    made = attention(problem, tile, stages, bounded=True, **form)
    return generate(tvm.IRModule({"main": made.with_attr("global_symbol", "main")}), TARGET, "tirx")


def of_numbers(plan: LaunchPlan, problem: Attention, tile: AttentionTile) -> LaunchPlan:
    """The launch of a kernel for any number of tokens, with maps of the tokens at hand, as a host function makes it."""
    numbers = dict(zip(COUNTED, (problem.batch, problem.queries, problem.keys)))

    def filled(parameter: Any) -> Any:
        if isinstance(parameter, Planned):
            return numbers[parameter.buffer]
        if not isinstance(parameter, TensorMap):
            return parameter
        count, rows, columns = problem.matrices[parameter.buffer]
        return replace(parameter, sizes=(columns, rows, count), strides=(2 * columns, 2 * columns * rows))

    blocks = -(-problem.queries // tile.rows) * problem.heads * problem.batch
    return replace(plan, parameters=tuple(map(filled, plan.parameters)), grid=(blocks, 1, 1))


def reference(problem: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """By float64, [batch, heads, tokens, head]."""
    shared = problem.heads // problem.kv_heads
    k, v = (np.repeat(each, shared, axis=1) for each in (k, v))
    scores = np.einsum("bhid,bhjd->bhij", q, k) * problem.scale
    if problem.causal:
        scores = np.where(np.tri(problem.queries, problem.keys, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v)


def by_head(array: np.ndarray, layout: str) -> np.ndarray:
    """[batch, heads, tokens, head] of an operand as it lies, and back."""
    return array if layout == BY_HEAD else array.transpose(0, 2, 1, 3)


def run(
    problem: Attention,
    tile: AttentionTile = TILE,
    stages: int = 2,
    *,
    seed: int = 0,
    made_for: Attention | None = None,
    spread: float = 1.0,
    in_turns: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """What the emulator computes, and what is right."""
    made = lowered(made_for or problem, tile, stages, any_rows=made_for is not None, in_turns=in_turns)
    plan = launch_plan(made)
    if made_for is not None:
        plan = of_numbers(plan, problem, tile)
    program = EmulatedProgram("attention", made.cuda, (plan,), tuple("QKVO"), (), 132, tuple("QKV"))
    draw = np.random.default_rng(seed)
    dtype = numpy_dtype(problem.dtype)
    layouts = dict(zip("QKVO", (problem.q_layout, problem.k_layout, problem.v_layout, problem.o_layout)))
    arrays = {name: draw.normal(0, spread, shape).astype(dtype) for name, shape in problem.shapes.items()}
    right = reference(problem, *(by_head(arrays[name].astype("float64"), layouts[name]) for name in "QKV"))
    arrays["O"][:] = WRONG
    before = {name: arrays[name].copy() for name in "QKV"}
    program(*(arrays[name].reshape(problem.matrices[name]) for name in "QKVO"), seed=seed)
    for name, one in before.items():
        np.testing.assert_array_equal(arrays[name], one)
    return by_head(arrays["O"].astype("float64"), layouts["O"]), right


def check(problem: Attention, *args: Any, **kwargs: Any) -> None:
    """Fail where results are not right to within the rounding of weights and results."""
    found, right = run(problem, *args, **kwargs)
    spread = kwargs.get("spread", 1.0)
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[problem.dtype]
    np.testing.assert_allclose(found, right, rtol=4 * unit, atol=6 * unit * spread)


@slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (1, 1), (1, 300), (300, 129), (128, 128)])
def test_results_are_right(queries: int, keys: int, causal: bool) -> None:
    check(replace(SMALL, queries=queries, keys=keys, causal=causal))


@slow
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", [AttentionTile(64, 64), AttentionTile(128, 96), AttentionTile(128, 128)])
def test_tiles_and_types_are_right(tile: AttentionTile, dtype: str, head: int) -> None:
    problem = Attention(2, 100, 200, 2, 1, head, dtype, head**-0.5, causal=True)
    check(problem, tile, 3, seed=tile.keys + head)


@slow
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("tile", [AttentionTile(192, 96), AttentionTile(128, 64), AttentionTile(64, 64)])
def test_consumers_may_take_turns(tile: AttentionTile, in_turns: bool) -> None:
    check(replace(SMALL, queries=250, keys=300, causal=True), tile, 2, in_turns=in_turns)


@slow
@pytest.mark.parametrize("layouts", [("bshd", "bhsd", "bshd", "bhsd"), ("bhsd", "bshd", "bhsd", "bshd"), ("bhsd",) * 4])
def test_operands_may_lie_by_head(layouts: tuple[str, ...]) -> None:
    names = ("q_layout", "k_layout", "v_layout", "o_layout")
    check(replace(SMALL, batch=2, queries=100, keys=140, heads=4, kv_heads=2, **dict(zip(names, layouts))))


@slow
@pytest.mark.parametrize("seed", range(6))
def test_copies_and_instructions_may_be_early_or_late(seed: int) -> None:
    check(replace(SMALL, queries=130, keys=700, heads=1), AttentionTile(128, 64), 2 + seed % 3, seed=seed)


@slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 1), (1, 5, 260), (2, 200, 130), (3, 128, 128)])
def test_a_kernel_for_any_number_of_tokens_takes_these(batch: int, queries: int, keys: int, causal: bool) -> None:
    made_for = replace(SMALL, queries=4096, keys=4096, causal=causal, k_layout="bhsd")
    check(replace(made_for, batch=batch, queries=queries, keys=keys), made_for=made_for)


@slow
def test_scores_may_be_large() -> None:
    found, right = run(
        replace(SMALL, keys=300, scale=1.0), spread=12.0
    )  # up to some 5000: e to the power of it has no float32
    np.testing.assert_allclose(found, right, rtol=0.02, atol=0.1)


# What is refused


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head": 80}, "elements of a head"),
        ({"heads": 6, "kv_heads": 4}, "6 heads, 4 of keys"),
        ({"dtype": "float32"}, "float32"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"keys": 0}, "extents"),
        ({"o_layout": "sbhd"}, "layouts"),
        ({"queries": 2**26}, "operand"),
    ],
)
def test_what_attention_does_not_take_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(IllegalWorkload, match=said):
        replace(SMALL, **changed)


@pytest.mark.parametrize(
    ("tile", "stages", "error", "said"),
    [
        (AttentionTile(256, 64), 2, IllegalTile, "256 queries"),
        (AttentionTile(128, 72), 2, IllegalTile, "72 keys"),
        (AttentionTile(192, 128), 2, IllegalTile, "registers a consumer"),
        (AttentionTile(128, 128), 7, IllegalTile, "bytes of shared memory"),
        (AttentionTile(128, 64), 1, IllegalPipeline, "2 to 8"),
    ],
)
def test_every_limit_of_a_tile_is_named(tile: AttentionTile, stages: int, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attention(replace(SMALL, head=128), tile, stages)
