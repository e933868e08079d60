"""What fused attention refuses, and its form's choice; tests/kernels/test_attention_attacks.py runs what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tvm.target import Target

from tensorir_ladder.kernels.attention import (
    FEW_BLOCKS,
    LONG,
    LONG_TOKENS,
    USUAL,
    Attention,
    AttentionForm,
    AttentionTile,
    attention,
    form_for,
)
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.isa import WGMMA_ARCH

SMALL = Attention(1, 70, 70, 2, 1, 64, "float16", 64**-0.5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head": 72}, "elements of a head"),
        ({"heads": 6, "kv_heads": 4}, "6 heads, 4 of keys"),
        ({"dtype": "float32"}, "float32"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": 1e-38}, "scale.*1e-15"),  # masked scores, multiplied by it, would weigh
        ({"scale": 1e39}, r"scale.*1e\+15"),
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


ON = 132  # multiprocessors


@pytest.mark.parametrize(
    ("head", "many", "queries", "keys", "form"),
    [
        (128, 32, 8192, 8192, USUAL[128]),
        (128, 32, 512, 512, USUAL[128]),
        (128, 32, 256, 512, FEW_BLOCKS[128]),  # 64 blocks of 128 queries: 128 of 64
        (128, 33, 256, 512, FEW_BLOCKS[128]),
        (128, 34, 256, 512, USUAL[128]),
        (128, 32, 1, 9000, FEW_BLOCKS[128]),
        (64, 1024, 197, 197, USUAL[64]),
        (64, 64, 4096, 4096, LONG[64]),
        (64, 64, 4096, LONG_TOKENS - 1, USUAL[64]),
        (64, 64, LONG_TOKENS - 1, 4096, USUAL[64]),
        (64, 64, LONG_TOKENS, LONG_TOKENS, LONG[64]),
        (64, 12, LONG_TOKENS, 4096, LONG[64]),  # 11 blocks of 192 queries for each head: 132
        (64, 11, LONG_TOKENS, 4096, LONG[64]),  # one wave of 121 blocks, not two of 176
        (64, 4, LONG_TOKENS, 4096, FEW_BLOCKS[64]),
        (64, None, 4096, 4096, USUAL[64]),
        (64, 64, None, 4096, USUAL[64]),
        (64, 64, 4096, None, USUAL[64]),
        (64, 4, 20, None, FEW_BLOCKS[64]),
        (128, None, 1, 1, USUAL[128]),
        (128, 1, None, None, USUAL[128]),
    ],
)
def test_the_form_is_chosen_by_what_is_known(
    head: int, many: int | None, queries: int | None, keys: int | None, form: AttentionForm
) -> None:
    assert form_for(head, ON, many, queries, keys) == form


@pytest.mark.parametrize("forms", [USUAL, FEW_BLOCKS, LONG])
def test_every_form_fits_its_head(forms: dict[int, AttentionForm]) -> None:
    for head, form in forms.items():
        form.tile.check(Target({"kind": "cuda", "arch": WGMMA_ARCH}), head, form.stages)
