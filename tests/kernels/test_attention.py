"""What fused attention refuses, and its form's choice; tests/kernels/test_attention_attacks.py runs what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tvm.target import Target

from tensorir_ladder.kernels.attention import (
    FORMS,
    Attention,
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
        attention(replace(SMALL, head=128), tile, stages, workers=132)


ON = 132  # multiprocessors


@pytest.mark.parametrize(
    ("head", "many", "queries", "causal", "rows"),
    [
        (128, 32, 8192, False, 128),
        (128, 32, 8192, True, 128),
        (128, 32, 256, False, 64),  # 64 tiles of 128 queries: 128 of 64
        (128, 33, 256, True, 64),
        (128, 34, 256, False, 128),
        (128, 32, 1, False, 64),
        (64, 12, 1500, False, 192),  # one round of 96 tiles, not two of 144
        (64, 12, 1500, True, 128),  # whose work is shared out evenly
        (128, 12, 1500, False, 192),
        (64, 1024, 197, False, 128),
        (64, None, 4096, False, 128),
        (64, 64, None, False, 128),
        (64, 4, 20, False, 64),
        (128, None, 1, False, 128),
    ],
)
def test_the_form_is_chosen_by_what_is_known(
    head: int, many: int | None, queries: int | None, causal: bool, rows: int
) -> None:
    assert form_for(head, ON, many, queries, causal).tile.rows == rows


@pytest.mark.parametrize("head", FORMS)
def test_every_form_fits_its_head(head: int) -> None:
    for form in FORMS[head]:
        form.tile.check(Target({"kind": "cuda", "arch": WGMMA_ARCH}), head, form.stages)
