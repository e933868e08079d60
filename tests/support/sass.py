"""What SASS says of wgmma: whether sums are read, or written by others, while its instructions run."""

from __future__ import annotations

import re

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
PRODUCT = re.compile(r"HGMMA\.\d+x(\d+)x\d+\S*\s+R(\d+)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")


def uses_in_flight(sass: str) -> list[str]:
    """The instructions, in the order of the text, that use registers of the last group before it is waited for."""
    found: list[str] = []
    running: list[range] = []  # the registers of each group
    for match in filter(None, map(INSTRUCTION.match, sass.splitlines())):
        text = match[2]
        if product := PRODUCT.search(text):
            columns, first = map(int, product.groups())
            if "gsb0" in text:
                running.append(range(first, first + columns // 2))
        elif wait := WAIT.search(text):
            left = int(wait[1], 16)
            running = running[-left:] if left else []
        elif running and any(int(number) in running[-1] for number in re.findall(r"\bR(\d+)\b", text)):
            found.append(f"{match[1]}: {text.strip()}")
    return found
