"""docs/tvm.md and the reproductions beside this file tell of the same, line by line."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tvm.md").read_text(encoding="utf-8")
SOURCES = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_*.py"))]
ENTRIES = PAGE.split("\n### ")[1:]


def test_every_reproduction_has_its_entry_and_every_entry_one() -> None:
    named = re.findall(r"`(test_\w+)`", PAGE)
    written = [name for source in SOURCES for name in re.findall(r"^def (test_\w+)", source, re.M)]
    assert sorted(named) == sorted(name for name in written if name not in globals())
    assert len(named) == len(ENTRIES)


def test_what_an_entry_shows_is_what_its_test_runs() -> None:
    for entry in ENTRIES:
        (shown,), (name,) = re.findall(r"```python\n(.*?)```", entry, re.S), re.findall(r"`(test_\w+)`", entry)
        (source,) = (source for source in SOURCES if f"def {name}(" in source)
        lines = {line.strip() for line in source.splitlines()}
        assert not [line for line in shown.splitlines() if line.strip() not in lines], name


def test_ways_around_are_where_the_page_and_the_tests_say() -> None:
    paths = re.findall(r"`((?:schedules|kernels|harness)/[\w/.]+)`", PAGE)
    paths += [path for source in SOURCES for path in re.findall(r'"((?:schedules|kernels|harness)/[\w/]+\.py)', source)]
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]
