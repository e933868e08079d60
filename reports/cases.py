"""Small words on records' cases: shapes, steps, keys to sort and to group by."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from tensorir_ladder.harness.records import Counters, Record, TunedConfig

Shape = tuple[int, int, int]
Item, Key = TypeVar("Item"), TypeVar("Key")
SIDE_STEP = 64  # sizes on an axis are squares whose side is a multiple of it; other shapes stand in tables


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by a key of theirs, keys and items in the order in which they come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def slug(*parts: str) -> str:
    """Join parts to one part of a file name; a GPU without its maker."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).replace("NVIDIA ", "").lower()).strip("-")


def shape_of(record: Record | Counters | TunedConfig) -> Shape:
    """Return the m, n and k of a record, of counters, or of a tuned configuration."""
    return record.m, record.n, record.k


def shape_label(shape: Shape) -> str:
    """Write ``1024`` for a square product, ``MxNxK`` otherwise."""
    return str(shape[0]) if len(set(shape)) == 1 else "x".join(map(str, shape))


def steps_text(steps: Iterable[int]) -> str:
    """Write ``step 7``, ``steps 1–6``, ``steps 1, 3``."""
    found = sorted(set(steps))
    if len(found) == 1:
        return f"step {found[0]}"
    whole = found == list(range(found[0], found[-1] + 1))
    return f"steps {found[0]}–{found[-1]}" if whole else f"steps {', '.join(map(str, found))}"


def is_size(shape: Shape) -> bool:
    """Tell if a shape has a place on an axis of sizes: a square whose side is a multiple of ``SIDE_STEP``."""
    return len(set(shape)) == 1 and shape[0] % SIDE_STEP == 0


def by_product(shapes: Iterable[Shape]) -> list[Shape]:
    """Sort shapes by the product of their extents, smallest first."""
    return sorted(shapes, key=lambda shape: (math.prod(shape), shape))


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sorting key in which unroll4 comes before unroll16."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))
