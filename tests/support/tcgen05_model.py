"""A model of what runs on beside a block's threads on Blackwell, for the protocol of kernels/tcgen05_ring.py.

The generated CUDA of each elected thread becomes a Python generator, line by line; loads and multiplications are
through when dice say so. That shows wrong phases, missing waits, deadlocks and reads of what is not there yet. It shows
nothing of the numbers, of proxies and fences, or of the hardware.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorir_ladder.harness.build import Kernel

STATEMENTS = (  # of the generated CUDA, and what they are here; whatever else a role's text has, fails to be Python
    (r"for \(int (\w+) = 0; \1 < (\d+); \+\+\1\) \{", r"for \1 in range(\2):"),
    (r"if \((.*)\) \{", r"if \1:"),
    (r"\}", ""),
    (r"(?:int|uint64_t) (\w+ = .*);", r"\1"),
    (r"pass;", "pass"),
    (r"mbarrier_wait\(WORD\[(\d+)\], (.*)\);", r"yield \1, \2"),
    (r"\w*expect_tx_shared_b64\(WORD\[(\d+)\], \(uint\)(\d+)\);", r"gpu.expect(\1, \2)"),
    (
        r"\w*bulk_tensor_g2s\w*\(BYTE\[(\d+)\], .*?&\((\w)_map\)+, (.*), (.*), WORD\[(\d+)\]\);",
        r'gpu.load("\2", *(\1, \3, \4, \5))',
    ),
    (r"\w*tcgen05_mma\w*\(sums, (.*), (.*), (?:\(uint\)\d+, ){5}(.*)\);", r"gpu.multiply(\1, \2, \3)"),
    (r"\w*tcgen05_commit\w*\(WORD\[(\d+)\]\);", r"gpu.commit(\1)"),
    (r"\w*tcgen05_fence_fence__after_thread_sync\(\);", "pass"),
)
ADDRESS = r"(?:\w*cvta_generic_to_shared\()?\(&\({}\[(\d+)\]\)\)\)?"


@dataclass
class Gpu:
    """Barriers, what the ring's bytes hold, and what runs on: loads in any order, multiplications in theirs.

    A loaded box is (operand, column, row) of its matrix, under its first byte; from a load's issue until it is through
    those bytes hold nothing that may be read.
    """

    arrivals: dict[int, int] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    boxes: dict[int, tuple[str, int, int] | None] = field(default_factory=dict)
    loads: list[tuple[int, tuple[str, int, int], int, int]] = field(default_factory=list)
    issued: list[tuple[Any, ...]] = field(default_factory=list)
    products: list[tuple[int, int, bool]] = field(default_factory=list)

    def through(self, barrier: int, parity: int) -> bool:
        """Whether the phase of a parity is over: each phase here takes one arrival, and its bytes."""
        phases = self.arrivals.get(barrier, 0) - bool(self.missing.get(barrier, 0))
        return phases % 2 != parity

    def expect(self, barrier: int, size: int) -> None:
        """One arrival, and bytes to come."""
        assert not self.missing.get(barrier), "the phase before still misses bytes"
        self.arrivals[barrier] = self.arrivals.get(barrier, 0) + 1
        self.missing[barrier] = size

    def load(self, operand: str, place: int, column: int, row: int, barrier: int) -> None:
        """Ask for a box of 64 columns, 128 rows of A or 64 of B."""
        self.boxes[place] = None
        self.loads.append((place, (operand, column, row), barrier, 128 * (128 if operand == "a" else 64)))

    def multiply(self, a: int, b: int, accumulate: bool) -> None:
        """Ask for a multiplication of what two descriptors point at, in units of 16 bytes."""
        self.issued.append((a * 16, b * 16, accumulate))

    def commit(self, barrier: int) -> None:
        """Ask for an arrival behind all multiplications so far."""
        self.issued.append((barrier,))

    def land(self, which: int) -> None:
        """A load is through."""
        place, box, barrier, size = self.loads.pop(which)
        self.boxes[place] = box
        self.missing[barrier] -= size

    def proceed(self, layout: str) -> None:
        """The next multiplication is through, or its commit."""
        done = self.issued.pop(0)
        if len(done) == 1:
            self.arrivals[done[0]] = self.arrivals.get(done[0], 0) + 1
        else:
            steps = self._steps(done[0], 0, "k"), self._steps(done[1], 16384, "k" if layout == "nt" else "n")
            self.products.append((*steps, done[2]))

    def _steps(self, byte: int, first: int, major: str) -> int:
        """Where along k the 16 steps begin that are read from a byte of the slots, each of 24576 bytes."""
        slot, inside = divmod(byte - first, 24576)
        box = self.boxes.get(slot * 24576 + first)
        assert box, "bytes are read that no load has brought"
        step, aside = divmod(inside, 2 if major == "k" else 128)
        assert not aside, "a row is read from its middle"
        return box[1 if major == "k" else 2] + step


def roles(body: str, gpu: Gpu) -> list[Iterator[tuple[int, int]]]:
    """Each elected thread's text as a generator that yields the barriers and parities for which it waits."""
    text = body
    for name, pattern in (("WORD", r"\(\(uint64_t\*\)pool_buf_ptr\)"), ("BYTE", "pool_buf_ptr")):
        text = re.sub(ADDRESS.format(pattern), rf"{name}[\1]", text)
    text = re.sub(r"\(uint64_t\)(\d+)ULL", r"\1", text).replace("(bool)", "0 != ")
    found = []
    shared = re.findall(r"^  (?:int|uint64_t) cse_v\d+ = (?!.*\(int\)).*;$", text, re.M)
    for role in re.findall(r"^  if \(\(warp_id_in_cta == \d\) && \(\w*elect_.*?\{\n(.*?)^  \}", text, re.M | re.S):
        lines = ["def role(gpu, a=0, b=1024):"]
        for line in (*("  " + line for line in shared), *role.splitlines()):
            indent, statement = re.fullmatch(r"( *)(.*)", line).groups()
            for pattern, python in STATEMENTS:
                if match := re.fullmatch(pattern, statement):
                    statement = match.expand(python)
                    break
            lines.append(indent + statement)
        scope: dict[str, Any] = {}
        exec("\n".join(lines), scope)
        found.append(scope["role"](gpu))
    return found


def step_through(
    kernel: Kernel, seed: int, eager: float, change: tuple[str, str] | None = None
) -> list[tuple[int, int]]:
    """Run the roles until the tile is done, and return where along k its multiplications began, in A and in B.

    ``eager`` is how likely what runs on goes on while a thread could; 0 is as late as barriers allow. ``change`` is a
    pattern in the text and what to put in its place.
    """
    gpu, dice, body = Gpu(), random.Random(seed), kernel.body
    if change:
        body, changes = re.subn(*change, body)
        assert changes
    (done,) = re.findall(r"< 4\) \{\s*mbarrier_wait\(\(&\(\(\(uint64_t\*\)pool_buf_ptr\)\[(\d+)\]\)\), 0\)", body)
    threads = {thread: next(thread) for thread in roles(body, gpu)}
    while not gpu.through(int(done), 0):
        ready = [thread for thread, waits in threads.items() if gpu.through(*waits)]
        running = [*range(len(gpu.loads)), *["multiply"] * bool(gpu.issued)]
        assert ready or running, f"deadlock: threads wait for {list(threads.values())}"
        if ready and not (running and dice.random() < eager):
            thread = dice.choice(ready)
            try:
                threads[thread] = next(thread)
            except StopIteration:
                del threads[thread]
        elif (which := dice.choice(running)) == "multiply":
            gpu.proceed(kernel.case.problem.layout)
        else:
            gpu.land(which)
    assert [*threads, *gpu.issued, *gpu.loads] == [], "done is not the end"
    assert [accumulate for _, _, accumulate in gpu.products] == [False] + [True] * (len(gpu.products) - 1)
    return [product[:2] for product in gpu.products]
