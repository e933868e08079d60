"""What fused attention refuses; tests/kernels/test_attention_attacks.py runs what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensorir_ladder.kernels.attention import Attention, AttentionTile, attention
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalTile, IllegalWorkload

SMALL = Attention(1, 70, 70, 2, 1, 64, "float16", 64**-0.5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head": 80}, "elements of a head"),
        ({"heads": 6, "kv_heads": 4}, "6 heads, 4 of keys"),
        ({"dtype": "float32"}, "float32"),
        ({"scale": 0.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": 1e-38}, "scale.*1e-30"),  # masked scores, multiplied by it, would weigh
        ({"scale": 1e39}, r"scale.*1e\+30"),
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
