"""Read what is written in options: whole numbers, ranges and lists of them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

MOST_NUMBERS = 10_000
MOST_DIGITS = 24  # all that could be meant has fewer, and Python refuses to convert thousands


class UsageError(ValueError):
    """A command line that cannot be understood, or asks for something that does not exist; names the value."""


def numbers(text: str, option: str, minimum: int | None = 1) -> list[int]:
    """Read ``5``, ``1-6``, ``1,3`` or mixtures; UsageError names the option and the value."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise UsageError(f"{option} {text!r} is not a number, a range or a list of them (5 | 1-6 | 1,3)")
        first, last = (whole(number, option) for number in (match.group(1), match.group(2) or match.group(1)))
        if not first <= last < first + MOST_NUMBERS:
            raise UsageError(f"{option} {text!r}: {part.strip()} is empty or names more than {MOST_NUMBERS} numbers")
        found += range(first, last + 1)
        if len(found) > MOST_NUMBERS:
            raise UsageError(f"{option} names more than {MOST_NUMBERS} numbers; give fewer")
    if minimum is not None and min(found) < minimum:
        raise UsageError(f"{option} {text!r} names numbers below {minimum}")
    return found


def whole(text: str, option: str) -> int:
    """Read a whole number of at most ``MOST_DIGITS`` digits; UsageError names the option, and how many there are."""
    digits = text.lstrip("-")
    if len(digits) > MOST_DIGITS:
        raise UsageError(
            f"{option} has a number of {len(digits)} digits; at most {MOST_DIGITS} are read, give a smaller"
        )
    return int(text)


def between(least: float, most: float, kind: type = int) -> Callable[[str], float]:
    """Make the ``type`` of an option whose value is a number from ``least`` to ``most``, whole if ``kind`` is int."""

    def read(text: str) -> float:
        try:
            value = kind(text) if len(text) <= 2 * MOST_DIGITS else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what} from {least:g} to {most:g}")
        return value

    read.__name__ = "number"  # by which argparse would name it
    return read


def address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, the ``type`` of an option."""
    match = re.fullmatch(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5})", text)
    if not match or not 0 < int(match[2]) < 65536:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no HOST:PORT, such as 127.0.0.1:9190")
    return match[1].strip("[]"), int(match[2])
