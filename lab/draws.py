"""What is drawn at random and run: some numbers of a seed's, and what became of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Tell what became of one draw: "right", "refused" or "left" (and why), "wrong", "failed" or "lost"."""

    number: int
    what: str
    text: str = ""
    features: tuple[str, ...] = ()
    emulated: bool = False


@dataclass(frozen=True)
class Draws:
    """Some of what a seed draws: ``numbers``; of each ``emulate``-th that is a kernel the CUDA is run too.

    ``arch``: the architecture that all are for; "" for any that can be drawn.
    """

    seed: int
    numbers: tuple[int, ...]
    emulate: int = 0
    arch: str = ""
