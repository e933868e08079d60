"""Errors of schedule functions that are asked for something illegal."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any


class IllegalSchedule(ValueError):
    """A schedule, a tile or a workload that cannot be right, refused before TVM or CUDA fails obscurely.

    The message is one sentence: what is wrong, where (block, loop), the value, the limit, the remedy.
    Each part is also an attribute, so that a tuner can react without reading the text.

    Parameters
    ----------
    problem : what is wrong, as a clause ("stage count below 1").
    remedy : what to do instead; always given.
    block, loop : names of the block or loop it happened at, where there is one.
    value, limit : the offending value and the bound it breaks, where there is one.
    """

    def __init__(
        self,
        problem: str,
        *,
        remedy: str,
        block: str | None = None,
        loop: str | None = None,
        value: object = None,
        limit: object = None,
    ) -> None:
        self.problem, self.remedy = problem, remedy
        self.block, self.loop, self.value, self.limit = block, loop, value, limit
        where = [f"block {block!r}"] if block else []
        where += [f"loop {loop!r}"] if loop else []
        facts = [f"got {value}"] if value is not None else []
        facts += [f"limit {limit}"] if limit is not None else []
        head = problem + (f" at {', '.join(where)}" if where else "")
        head += f" ({', '.join(facts)})" if facts else ""
        super().__init__(f"{head}; {remedy}")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        """Say how it is made again in another process, with its parts: a pool's worker may refuse what it is given."""
        parts = {name: getattr(self, name) for name in ("remedy", "block", "loop", "value", "limit")}
        return partial(type(self), **parts), (self.problem,)


class IllegalWorkload(IllegalSchedule):
    """A problem nobody can schedule: a size below 1, an index beyond 31 bits, an unknown dtype or layout."""


class IllegalTile(IllegalSchedule):
    """A tile that does not divide into threads, or that needs more threads, registers or shared memory than exist."""


class IllegalPipeline(IllegalSchedule):
    """A pipeline that TVM would refuse late, or would compile to wrong results."""


class DamagedFile(ValueError):
    """A file of measurements, part of this package, that is not as it was; the message names it, and the remedy."""


def warn(message: str) -> None:
    """Warn of something that is right and may not be what was meant, at the line that called a schedule function."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(f"{__package__}."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
