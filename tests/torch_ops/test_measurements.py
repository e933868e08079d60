"""Files of measurements that come with the package: read as what they are, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorir_ladder import gpus
from tensorir_ladder.torch_ops import tuned_here
from tensorir_ladder.torch_ops.errors import DamagedFile

GPU = "NVIDIA Other"
LINE = {"m": 8, "n": 8, "k": 8, "dtype": "float16", "layout": "nn", "step": 12, "tile": "64x128x64/1x1", "stages": 8}
DAMAGE = [b"", b"{", b"5", b"\xff\xfe", b"[" * 100_000, b'{"gpu": 1}', b"[[]]"]


@pytest.mark.parametrize("content", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_rates_file_is_named(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sm_90a-x.json"
    path.write_bytes(content)
    monkeypatch.setattr(gpus, "RATES", tmp_path)
    with pytest.raises(DamagedFile, match="install the package again") as caught:
        gpus.cost_rates.__wrapped__(GPU)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("medians", [[], [0.0], [-1], ["1"], [10**400], None])
def test_rates_that_are_none_are_named(medians: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = gpus.RATES.glob("*h200.json")
    whole = json.loads(file.read_text())
    whole["quantities"]["launch_cycles"]["medians"] = medians
    (tmp_path / file.name).write_text(json.dumps(whole))
    monkeypatch.setattr(gpus, "RATES", tmp_path)
    with pytest.raises(DamagedFile, match=r"h200\.json is damaged"):
        gpus.cost_rates.__wrapped__(GPU)


def test_rates_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "RATES", tmp_path)
    with pytest.raises(DamagedFile, match="launch_cycles"):
        gpus.cost_rates.__wrapped__(GPU)


def test_a_tuned_choice_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-other.json").write_text(json.dumps([LINE]))
    monkeypatch.setattr(tuned_here, "TUNED", tmp_path)
    ((key, found),) = tuned_here.tuned.__wrapped__(GPU).items()
    assert key == (8, 8, 8, "float16", "nn")
    assert str(found) == "step 12, 64x128x64/1x1, 8 stages"
    assert tuned_here.tuned.__wrapped__("../x/NVIDIA Other") == {}


@pytest.mark.parametrize(
    "change",
    [{"m": 0}, {"k": 2**31}, {"m": "8"}, {"step": 5}, {"tile": "big"}, {"tile": None}, {"stages": 0}, {"odd": 1}],
    ids=str,
)
def test_a_tuned_choice_that_is_none_is_named(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-other.json").write_text(json.dumps([LINE | change]))
    monkeypatch.setattr(tuned_here, "TUNED", tmp_path)
    with pytest.raises(DamagedFile, match=r"nvidia-other\.json is damaged"):
        tuned_here.tuned.__wrapped__(GPU)
