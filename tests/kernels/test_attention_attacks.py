"""Fused attention attacked: odd shapes in poisoned memory, hostile numbers, all orders, kernels broken on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from support.attention_runs import Form, check, compute, drawn, layouts_of, lowered, right_and_bound
from support.broken_kernels import WRONG
from tensorir_ladder.emulator import KernelFault
from tensorir_ladder.kernels.attention import BY_HEAD, BY_TOKEN, FORMS, TILE, Attention, AttentionTile
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, compile_cubin
from tensorir_ladder.schedules.isa import STEP, WGMMA_ARCH

pytestmark = pytest.mark.emulator

SMALL = Attention(1, 300, 300, 2, 1, 64, "float16", 64**-0.5)
SEEDS = range(6)  # each completion twice: early, late, drawn
SHORT = AttentionTile(64, 64)
CHOSEN = [(head, form) for head, forms in FORMS.items() for form in forms]


def any_rows(tile: AttentionTile = TILE, stages: int = 2, **changed: object) -> Form:
    """A kernel for any number of tokens, made for others than those it is given."""
    return Form(replace(SMALL, **changed), tile, stages, any_rows=True)


# Shapes

TOKENS = [(1, 1), (1, 16), (1, 300), (5, 129), (63, 65), (64, 64), (65, 63), (128, 128), (129, 5), (257, 127), (300, 1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [AttentionTile(), SHORT, AttentionTile(192, 48)], ids=str)
def test_a_kernel_for_any_tokens_is_right_for_all(tile: AttentionTile, causal: bool) -> None:
    form = any_rows(tile, causal=causal)
    for seed, (queries, keys) in enumerate(TOKENS):
        check(form, replace(form.problem, batch=1 + seed % 2, queries=queries, keys=keys), seed)


def test_more_tokens_than_a_kernel_was_made_for_are_right() -> None:
    form = Form(replace(SMALL, queries=1, keys=1, causal=True), SHORT, any_rows=True)
    for seed, (batch, queries, keys) in enumerate([(3, 150, 200), (1, 200, 130), (2, 1, 257)]):
        check(form, replace(form.problem, batch=batch, queries=queries, keys=keys), seed)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (70, 1), (130, 190), (190, 130)])
def test_a_kernel_for_its_own_tokens_is_right(queries: int, keys: int, causal: bool) -> None:
    check(Form(replace(SMALL, queries=queries, keys=keys, causal=causal), SHORT, 3), seed=queries)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tile", "head", "stages"),
    [
        (AttentionTile(64, 16), 64, 2),
        (AttentionTile(64, 176), 128, 2),
        (AttentionTile(128, 128), 128, 2),
        (AttentionTile(128, 80), 128, 3),
        (AttentionTile(192, 64), 128, 4),
        (AttentionTile(64, 32), 64, 8),
    ],
    ids=str,
)
def test_every_kind_of_tile_is_right_in_all_orders(tile: AttentionTile, head: int, stages: int) -> None:
    form = any_rows(tile, stages, head=head, causal=True)
    for seed in SEEDS:
        check(form, replace(form.problem, queries=150 + seed, keys=290 - 20 * seed), seed)


@pytest.mark.parametrize("tile", [TILE, AttentionTile(192, 64)], ids=str)
def test_consumers_that_take_turns_are_right_in_all_orders(tile: AttentionTile) -> None:
    form = any_rows(tile, 3, causal=True)
    for seed in SEEDS:
        check(form, replace(form.problem, queries=1 + 60 * seed, keys=300 - 59 * seed), seed)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("layout", [BY_TOKEN, BY_HEAD])
def test_heads_share_their_own_keys(heads: int, kv_heads: int, layout: str) -> None:
    names = ("q_layout", "k_layout", "v_layout", "o_layout")
    problem = replace(
        SMALL, batch=2, heads=heads, kv_heads=kv_heads, queries=66, keys=70, **dict.fromkeys(names, layout)
    )
    check(Form(problem, SHORT))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layouts", [*product((BY_TOKEN, BY_HEAD), repeat=4)][1:-1:3], ids="-".join)
def test_each_operand_has_a_layout_of_its_own(layouts: tuple[str, str, str, str]) -> None:
    q, k, v, o = layouts
    problem = replace(SMALL, batch=2, heads=4, kv_heads=2, queries=70, keys=66)
    check(Form(replace(problem, q_layout=q, k_layout=k, v_layout=v, o_layout=o), SHORT))


# Numbers


@pytest.mark.sampled(4)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head", [64, 128])
def test_bfloat16_is_right(head: int, causal: bool) -> None:
    form = any_rows(head=head, dtype="bfloat16", causal=causal)
    for seed in SEEDS:
        check(form, replace(form.problem, queries=70 + seed, keys=300 - 40 * seed), seed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_scores_do_not_overflow(dtype: str) -> None:
    form = any_rows(SHORT, dtype=dtype, causal=True)
    for seed, spread in enumerate([30.0, 100.0, 600.0]):
        check(form, form.problem, seed, drawn(form.problem, seed, spread))


@pytest.mark.parametrize("slope", [-40.0, 40.0, -3e4, 3e4])
def test_the_largest_score_may_come_first_or_last(slope: float) -> None:
    """Scores rise or fall from tile to tile: all sums so far, or all to come, count for nothing."""
    form = any_rows(SHORT, causal=True)
    given = drawn(form.problem, 0)
    given["Q"][..., 0] = 1
    given["K"][..., 0] = np.linspace(0, slope, form.problem.keys).astype(np.float16)[None, :, None]
    check(form, given=given)


def test_equal_scores_give_the_mean() -> None:
    form = any_rows(SHORT)
    given = drawn(form.problem, 0)
    given["K"][:] = given["K"][:, :1]
    check(form, given=given)
    given["Q"][:] = 0
    found = compute(form, given)
    np.testing.assert_allclose(found, np.broadcast_to(found[:, :, :1], found.shape), rtol=0, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 50.0])
def test_other_scales_are_right(scale: float) -> None:
    check(Form(replace(SMALL, queries=70, keys=190, scale=scale, causal=True), SHORT))


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_a_bad_key_spoils_only_those_who_see_it(what: float) -> None:
    form = any_rows(AttentionTile(), causal=True)
    for at in (0, 70, 128, 299):
        given = drawn(form.problem, at)
        clean = right_and_bound(form.problem, given)
        given["K"][:, at] = what
        found = compute(form, given, seed=at)
        right, bound = (each[:, :, :at] for each in clean)
        assert (abs(found[:, :, :at] - right) <= bound).all()


def test_a_bad_query_spoils_its_own_row() -> None:
    form = any_rows(AttentionTile())
    given = drawn(form.problem, 0)
    right, bound = right_and_bound(form.problem, given)
    given["Q"][:, 77] = np.nan
    found = compute(form, given)
    others = np.arange(form.problem.queries) != 77
    assert np.isnan(found[:, :, 77]).all()
    assert (abs(found - right) <= bound)[:, :, others].all()


def test_a_query_that_sees_one_key_has_its_value() -> None:
    form = any_rows(AttentionTile(), causal=True)
    given = drawn(form.problem, 3, 5.0)
    found = compute(form, given)
    assert layouts_of(form.problem)["V"] == BY_TOKEN
    np.testing.assert_array_equal(found[:, :, 0], np.repeat(given["V"][:, 0], 2, axis=1).astype(np.float64))


def test_every_order_gives_the_same_to_the_last_bit() -> None:
    form = any_rows(SHORT, 3, causal=True)
    given = drawn(form.problem, 1)
    first = compute(form, given)
    for seed in range(1, 12):
        np.testing.assert_array_equal(compute(form, given, seed=seed, resident=1 + 7 * (seed % 2)), first)


# Broken on purpose: what, of its matches which, replaced by what, and how it is found

BROKEN = {
    "queries not awaited": (r"mbarrier_wait\(.*asked_phase.*;", 0, "", "race"),
    "queries loaded where results still lie": (r"mbarrier_wait\(.*asks_phase.*;", 0, "", "race"),
    "results' place given back before they have left": (r"\w+bulk_wait_group\w+read\w+\(\);", 0, "", None),
    "results' place never given back": (r"\w+mbarrier_arrive_nocount.*asked_slot.*;", 0, "", "deadlock"),
    "the results' own place given back": (
        r"(\w+mbarrier_arrive_nocount.*asked_slot_ptr\[0\] \+ )3",
        0,
        r"\g<1>4",
        None,
    ),
    "keys not awaited": (r"mbarrier_wait\(.*read_phase.*;", 1, "", "race"),
    "values not awaited": (r"mbarrier_wait\(.*read_phase.*;", 2, "", "race"),
    "the last values not awaited": (r"mbarrier_wait\(.*read_phase.*;", 3, "", "race"),
    "keys loaded before the stage is empty": (r"mbarrier_wait\(.*fill_phase.*;", 1, "", "race"),
    "values loaded before the stage is empty": (r"mbarrier_wait\(.*fill_phase.*;", 2, "", "race"),
    "the producer begins in the wrong phase": (r"(fill_phase_ptr\[0\] = )1", 0, r"\g<1>0", "deadlock"),
    "consumers begin in the wrong phase": (r"(read_phase_ptr\[0\] = )0", 0, r"\g<1>1", "deadlock"),
    "the producer's phase does not flip": (r"(fill_phase_ptr\[0\] = .* \^ )1", 1, r"\g<1>0", None),
    "consumers' phase does not flip": (r"(read_phase_ptr\[0\] = .* \^ )1", 1, r"\g<1>0", None),
    "keys never given back": (r"\w+mbarrier_arrive_nocount.*keys_at.*;", 1, "", "deadlock"),
    "values never given back": (r"\w+mbarrier_arrive_nocount.*values_at.*;", 0, "", "deadlock"),
    "values given back twice": (r"\w+mbarrier_arrive_nocount.*values_at.*;", 0, r"\g<0> \g<0>", None),
    "an arrival too few is expected": (r"\(uint\)8\);", 0, "(uint)7);", None),
    "an arrival too many is expected": (r"\(uint\)8\);", 0, "(uint)9);", "deadlock"),
    "bytes too many are expected": (r"\(uint\)8192\);", 1, "(uint)8208);", "deadlock"),
    "bytes too few are expected": (r"\(uint\)8192\);", 1, "(uint)8176);", None),
    "scores not awaited": (r"\w+wgmma_wait_group\w+_1\(\);", 0, "", "register in flight"),
    "the first scores not awaited": (r"\w+wgmma_wait_group\w+_0\(\);", 0, "", "register in flight"),
    "sums and weights not awaited": (r"\w+wgmma_wait_group\w+_0\(\);", 1, "", "register in flight"),
    "the last sums not awaited": (r"\w+wgmma_wait_group\w+_0\(\);", 3, "", "register in flight"),
    "no fence before the first scores": (r"\w+wgmma_fence_\w+\(\);", 0, "", "missing wgmma.fence"),
    "no fence before scores and sums": (r"\w+wgmma_fence_\w+\(\);", 1, "", "missing wgmma.fence"),
    "no fence before the last sums": (r"\w+wgmma_fence_\w+\(\);", 3, "", "missing wgmma.fence"),
    "scores and sums in one group": (r"\w+wgmma_commit_group\w+\(\);", 1, "", "register in flight"),
    "weights rounded once more": (
        r"(\w+cvt_f16x2\w+\(mine_weights_ptr\[5\].*;)([\s\S]*?wgmma_f16_rs\w+\(.*;)",
        0,
        r"\1\2 \1",
        "register in flight",
    ),
    "mbarriers used before they are": (r"\w+cta_sync\(\);", 0, "", None),
    "no fence behind the mbarriers": (r"\w+fence_proxy\w+\(\);", 0, "", "missing proxy fence"),
    "no fence before the results' store": (r"\w+fence_proxy\w+\(\);", 1, "", "missing proxy fence"),
    "no barrier before the results' store": (r"\w+warpgroup_sync\(.*;", 1, "", None),
    "the results' store not awaited": (r"\w+bulk_wait_group\w+\(\);", 1, "", "unawaited"),
    "no key left out": (r"if \(keys < \(+step.*\{", 0, "if (0) {", WRONG),
    "a key too many left out": (r"(mine_scores_ptr\[5\] = \(\()73 <", 0, r"\g<1>74 <", WRONG),
    "sums not scaled down": (r"mine_sums_ptr\[3\] = \(mine_sums.*;", 0, "", WRONG),
    "a weight added to the other row": (r"(softmax_chains_ptr\[1\] \+ mine_scores_ptr\[)13", 0, r"\g<1>15", WRONG),
    "the largest score of two lanes": (r"(max\(.*__shfl_xor_sync\(.*), 2, 32", 2, r"\1, 1, 32", None),
}


def broken(name: str, form: Form) -> str:
    """Change a kernel's text as BROKEN says of that name."""
    pattern, which, replacement, _ = BROKEN[name]
    text = lowered(form).cuda
    start = text.rindex('extern "C" __global__')
    match = [*re.finditer(pattern, text[start:])][which]
    return f"{text[: start + match.start()]}{match.expand(replacement)}{text[start + match.end() :]}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name: str) -> None:
    """With tiles of many steps, and with tiles of one, several of which the ring holds."""
    kind, found = BROKEN[name][-1], ""
    for seed, (stages, keys) in product(SEEDS, ((2, 330), (8, 30))):
        form = replace(any_rows(AttentionTile(128, 64), stages), workers=1)
        problem, text = replace(form.problem, queries=390, keys=keys), broken(name, form)
        try:
            check(form, problem, seed, text=text)
        except KernelFault as fault:
            found = fault.kind
        except AssertionError:
            found = WRONG
        if found:
            break
    assert found
    assert kind in (None, found)


# What the CUDA compiler makes of it

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s*(?:@!?U?P\w+ )?([\w.]+) (?:P\w, )*(.*?) *;", re.M)
NO_RESULT = ("ST", "BAR", "SYNCS", "UTMA", "R2UR", "WARPGROUP")


@pytest.mark.sampled(4)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("tile", "head"),
    [*((form.tile, head) for head, form in CHOSEN), (AttentionTile(64, 176), 128)],
    ids=str,
)
def test_the_compiler_leaves_registers_in_flight_alone(
    tile: AttentionTile, head: int, compiler: Compiler, sass: Callable[[Cubin], str]
) -> None:
    """Between a product whose weights are in registers and the wait for it, in the code's order, none is written."""
    form = any_rows(tile, head=head, causal=True)
    cubin = compile_cubin(lowered(form).cuda, WGMMA_ARCH, compiler)
    assert cubin.spill_bytes == 0
    lent: set[int] = set()
    products = 0
    for opcode, operands in INSTRUCTION.findall(sass(cubin)):
        written = re.match(r"R(\d+)", operands)
        if opcode.startswith("HGMMA") and (found := re.match(r"R(\d+), R(\d+), gdesc", operands)):
            sums, weights = map(int, found.groups())
            lent |= {*range(sums, sums + head // 2), *range(weights, weights + 4)}
            products += 1
        elif opcode.startswith("WARPGROUP.DEPBAR") and operands.endswith("0x0"):
            lent.clear()
        elif written and not opcode.startswith(("HGMMA", *NO_RESULT)):
            assert int(written.group(1)) not in lent, f"{opcode} {operands}"
    assert products == 2 * tile.keys // STEP


# On the GPU

ON_GPU = [
    any_rows(TILE, 4, head=128, heads=8, kv_heads=2),
    any_rows(TILE, 4, head=128, heads=8, kv_heads=2, causal=True),
    any_rows(TILE, 2, head=64, heads=6, kv_heads=3, causal=True, dtype="bfloat16", k_layout=BY_HEAD, o_layout=BY_HEAD),
    any_rows(TILE, 4, head=128, causal=True, v_layout=BY_HEAD, q_layout=BY_HEAD),
    *(any_rows(form.tile, form.stages, head=head, causal=True) for head, form in CHOSEN),
    any_rows(AttentionTile(192, 64), 3, head=128, dtype="bfloat16"),
    any_rows(AttentionTile(64, 176), 2, head=128, causal=True),
    any_rows(AttentionTile(64, 16), 8, causal=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ON_GPU)))
def test_the_gpu_is_right_in_poisoned_memory(number: int, compiler: Compiler) -> None:
    form = ON_GPU[number]
    for seed, (queries, keys) in enumerate([*TOKENS, (1000, 1), (1, 3000), (1025, 777), (777, 1025)]):
        problem = replace(form.problem, batch=1 + seed % 3, queries=queries, keys=keys)
        check(form, problem, seed, compiler=compiler)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ON_GPU)))
def test_the_gpu_gives_the_same_to_the_last_bit_each_time(number: int, compiler: Compiler) -> None:
    """Blocks enough that each multiprocessor has several, at other moments each time."""
    form = ON_GPU[number]
    problem = replace(form.problem, batch=4, queries=1025, keys=1500)
    given = drawn(problem, number)
    first = compute(form, given, problem, compiler=compiler)
    for _ in range(10):
        np.testing.assert_array_equal(compute(form, given, problem, compiler=compiler), first)


@pytest.mark.gpu
def test_the_gpu_takes_large_scores(compiler: Compiler) -> None:
    for seed, (spread, dtype) in enumerate(product((30.0, 600.0), ("float16", "bfloat16"))):
        form = any_rows(TILE, 4, head=128, dtype=dtype, causal=True)
        check(form, form.problem, seed, drawn(form.problem, seed, spread), compiler=compiler)
