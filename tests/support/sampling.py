"""Which cases of a test run where one in some is enough."""

from __future__ import annotations

import zlib
from collections.abc import Collection


def sample(names: Collection[str], one_in: int) -> set[str]:
    """Keep one name in ``one_in``, at least one, and the same of the same names always.

    Those of the least digests: cases are named by several parameters, and of every n-th of them the last parameter
    might have one value.
    """
    return set(sorted(names, key=lambda name: zlib.crc32(name.encode()))[: -(-len(names) // one_in)])
