"""Fused attention in the emulator, among memory that is poisoned, held to bounds that follow from its roundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import tvm

from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness.execution import numpy_dtype
from tensorir_ladder.kernels.attention import BY_HEAD, TILE, Attention, AttentionTile, attention
from tensorir_ladder.kernels.codegen.host_code import launch_plan
from tensorir_ladder.kernels.codegen.launch_plan import COUNTED, LaunchPlan, PlannedNumber, TensorMap
from tensorir_ladder.kernels.codegen.lowering import Generated, generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, compile_cubin
from tensorir_ladder.lab.gpu_program import GpuProgram
from tensorir_ladder.schedules.isa import WGMMA_ARCH

NAMES = tuple("QKVO")
BEYOND, APART = 3, 8  # tokens and columns of memory behind those that an operand has
UNTOUCHED = 77.0  # what the output's memory has there
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SINGLE, SMALLEST = 2.0**-24, 2.0**-25
TANH = 2.0**-16  # of tanh.approx, relative


@dataclass(frozen=True)
class Form:
    """A kernel: what it was made for, its tile and stages, and the options that it was made with."""

    problem: Attention
    tile: AttentionTile = TILE
    stages: int = 2
    any_rows: bool = False
    workers: int = 3


@cache
def lowered(form: Form) -> Generated:
    """Make a kernel's text and launch."""
    made = attention(form.problem, form.tile, form.stages, workers=form.workers, any_rows=form.any_rows)
    target = tvm.target.Target({"kind": "cuda", "arch": WGMMA_ARCH})
    return generate(tvm.IRModule({"main": made.with_attr("global_symbol", "main")}), target, "tirx")


def layouts_of(problem: Attention) -> dict[str, str]:
    """Return the layout of each operand, by name."""
    return dict(zip(NAMES, (problem.q_layout, problem.k_layout, problem.v_layout, problem.o_layout)))


def plan_of(form: Form, problem: Attention) -> LaunchPlan:
    """Launch a kernel on the tokens at hand, which lie ``BEYOND`` tokens and ``APART`` columns apart from others."""
    numbers = dict(zip(COUNTED, (problem.batch, problem.queries, problem.keys)))

    def filled(parameter: object) -> object:
        if isinstance(parameter, PlannedNumber):
            return numbers[parameter.buffer]
        if not isinstance(parameter, TensorMap):
            return parameter
        count, rows, columns = problem.matrices[parameter.buffer]
        row_bytes = 2 * (columns + APART)
        return replace(parameter, sizes=(columns, rows, count), strides=(row_bytes, row_bytes * (rows + BEYOND)))

    plan = launch_plan(lowered(form))
    blocks = -(-problem.queries // form.tile.rows) * problem.heads * problem.batch
    return replace(plan, parameters=tuple(map(filled, plan.parameters)), grid=(min(blocks, form.workers), 1, 1))


def drawn(problem: Attention, seed: int, spread: float = 1.0) -> dict[str, np.ndarray]:
    """Draw Q, K and V as they lie, and M if there is a mask: a quarter of the keys are hidden, or anything is added."""
    draw, dtype = np.random.default_rng(seed), numpy_dtype(problem.dtype)
    given = {name: draw.normal(0, spread, problem.shapes[name]).astype(dtype) for name in "QKV"}
    if problem.mask:
        given["M"] = draw.random(problem.mask_shape) < 0.75
        if problem.mask.is_added:
            added = np.where(given["M"], draw.normal(0, 2, problem.mask_shape), -np.inf)
            given["M"] = added.astype(numpy_dtype(problem.mask.dtype))
    return given


def by_head(array: np.ndarray, layout: str) -> np.ndarray:
    """Turn an operand as it lies to [batch, heads, tokens, head], or back."""
    return array if layout == BY_HEAD else array.transpose(0, 2, 1, 3)


def compute(
    form: Form,
    given: Mapping[str, np.ndarray],
    problem: Attention | None = None,
    seed: int = 0,
    text: str | None = None,
    resident: int = 132,
    compiler: Compiler | None = None,
) -> np.ndarray:
    """Run a kernel, or another ``text`` of it; returns O as [batch, heads, tokens, head] in float64.

    In the emulator, or on the GPU if there is a ``compiler`` for it.
    What lies beyond operands is no number; AssertionError where something beyond the output was written, or an element
    of it was not.
    """
    problem = problem or form.problem
    padded, inside = {}, {}
    for name, (count, rows, columns) in problem.matrices.items():
        poison = UNTOUCHED if name == "O" else np.nan
        padded[name] = np.full((count, rows + BEYOND, columns + APART), poison, numpy_dtype(problem.dtype))
        inside[name] = padded[name][:, :rows, :columns]
        inside[name][:] = np.nan if name == "O" else given[name].reshape(count, rows, columns)
    outside = padded["O"].copy()
    if problem.mask:
        padded["M"] = given["M"].reshape(-1).copy()
    names = tuple(padded)
    program = EmulatedProgram(
        "attention", text or lowered(form).cuda, (plan_of(form, problem),), names, (), resident, names[:3] + names[4:]
    )
    if compiler is None:
        program(*padded.values(), seed=seed)
    else:
        GpuProgram(program, compile_cubin(program.cuda, WGMMA_ARCH, compiler).data)(*padded.values())
    found = inside["O"].astype(np.float64).reshape(problem.shapes["O"])
    count, rows, columns = problem.matrices["O"]
    outside[:, :rows, :columns] = padded["O"][:, :rows, :columns] = 0
    np.testing.assert_array_equal(padded["O"], outside, "memory beyond the output was written")
    return by_head(found, problem.o_layout)


def right_and_bound(problem: Attention, given: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Compute O in float64, and how far off it may be: by rounded weights, a rounded result, and scores in float32."""
    layouts, sharing = layouts_of(problem), problem.heads // problem.kv_heads
    q, k, v = (by_head(given[name].astype(np.float64), layouts[name]) for name in "QKV")
    k, v = (np.repeat(each, sharing, axis=1) for each in (k, v))
    scores = np.einsum("bhid,bhjd->bhij", q, k) * problem.scale
    size = np.einsum("bhid,bhjd->bhij", abs(q), abs(k)).max(-1, keepdims=True) * problem.scale
    capped = 0.0
    if problem.soft_cap is not None:
        scores = problem.soft_cap * np.tanh(scores / problem.soft_cap)
        capped = 2 * TANH * abs(scores).max(-1, keepdims=True)
    if problem.mask and problem.mask.is_added:
        scores = scores + given["M"].astype(np.float64)
        size = size + np.nan_to_num(abs(given["M"].astype(np.float64)), posinf=0).max()
    elif problem.mask:
        scores = np.where(given["M"], scores, -np.inf)
    if problem.causal:
        later = problem.keys - problem.queries if problem.from_end else 0
        seen = np.tri(problem.queries, problem.keys, later, dtype=bool)
        if problem.window is not None:
            seen &= ~np.tri(problem.queries, problem.keys, later - problem.window, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - np.nan_to_num(scores.max(-1, keepdims=True), neginf=0))
    weights /= np.where(weights.any(-1, keepdims=True), weights.sum(-1, keepdims=True), 1)
    right, sizes = (np.einsum("bhij,bhjd->bhid", weights, each) for each in (v, abs(v)))
    unit = UNITS[problem.dtype]
    smallest = SMALLEST * (1 + abs(v).sum(-2, keepdims=True))  # weights and results that have fewer bits
    off = 16 * SINGLE * (1 + size) + capped
    return right, 1.01 * unit * (sizes + abs(right)) + off * sizes + smallest


def check(
    form: Form,
    problem: Attention | None = None,
    seed: int = 0,
    given: Mapping[str, np.ndarray] | None = None,
    text: str | None = None,
    compiler: Compiler | None = None,
) -> None:
    """Run a kernel on drawn or given operands; AssertionError where a result is further off than it may be."""
    problem = problem or form.problem
    given = given or drawn(problem, seed)
    found = compute(form, given, problem, seed, text, compiler=compiler)
    right, bound = right_and_bound(problem, given)
    off = abs(found - right)
    assert (off <= bound).all(), (
        f"{(~(off <= bound)).sum()} of {off.size} results are wrong, first at "
        f"{np.argwhere(~(off <= bound))[0].tolist()}: {found[~(off <= bound)][0]} for {right[~(off <= bound)][0]}"
    )
