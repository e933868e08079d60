"""Masks of fused attention: operands that hide scores or are added to them, read directly from global memory.

A step's elements are read while the tensor cores compute its scores. A mask of bools that is the same for all queries
takes a load and a vote per 32 keys of a step; bits of the vote say which scores are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels.online_softmax import HALVES, NEVER, half_of
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import PTX_TYPES, WARP, wgmma_element

BOOL, SINGLE = "bool", "float32"
DTYPES = (BOOL, *PTX_TYPES, SINGLE)
PAIRS = {BOOL: "unsigned short"} | dict.fromkeys(PTX_TYPES, "unsigned")  # what two elements are read as
AXES = ("batch", "heads", "queries")  # of a mask, in front of its keys
_PAIR = """
__forceinline__ __device__ unsigned pair(const void* first) {{ return *reinterpret_cast<const {both}*>(first); }}
"""
_VOTE = "\n__forceinline__ __device__ unsigned vote(bool seen) { return __ballot_sync(0xffffffffu, seen); }\n"


@dataclass(frozen=True)
class Mask:
    """A contiguous mask [batch, heads, queries, keys]: bools, true where a query sees a key, or numbers to add.

    Numbers are added to the scaled scores in float32. ``along`` names the axes that have the extent of the operands;
    the others have extent 1. ``even_keys``: the number of keys is known to be even, and rows are read by pairs.

    Raises
    ------
    IllegalWorkload : on construction, for other dtypes or axes.
    """

    dtype: str
    along: tuple[str, ...] = AXES
    even_keys: bool = False

    def __post_init__(self) -> None:
        for what, value, known in (("dtypes", {self.dtype}, DTYPES), ("axes", set(self.along), AXES)):
            if not value <= set(known):
                raise IllegalWorkload(
                    f"a mask of attention has no such {what}",
                    value=", ".join(sorted(value - set(known))),
                    limit=" | ".join(known),
                    remedy="cast the mask, or name its axes in front of the keys",
                )

    def __str__(self) -> str:
        return f"mask of {self.dtype} by {', '.join((*self.along, 'keys'))}"

    @property
    def is_added(self) -> bool:
        """True for numbers that are added to scores."""
        return self.dtype != BOOL

    @property
    def votes(self) -> bool:
        """True where a warp reads a step's bools once for all its queries."""
        return not self.is_added and "queries" not in self.along

    @property
    def by_pairs(self) -> bool:
        """True where one load reads two neighbouring elements."""
        return self.even_keys and self.dtype in PAIRS and not self.votes

    def registers(self, keys: int) -> int:
        """Return how many registers of a thread a step of ``keys`` takes."""
        if self.votes:
            return -(-keys // WARP)
        rows = HALVES if "queries" in self.along else 1
        return rows * keys // (4 if self.dtype == SINGLE else 8)

    def shape(self, extents: tuple[int, int, int], keys: int) -> tuple[int, ...]:
        """Return a mask's shape for ``extents`` of batch, heads and queries."""
        return (*(extent if axis in self.along else 1 for axis, extent in zip(AXES, extents)), keys)

    def bind(self, pointer: Var, extents: tuple[int, int, int], keys: int) -> Buffer:
        """Emit the buffer behind a kernel's parameter."""
        dtype = self.dtype if self.is_added else "uint8"
        mask = T.match_buffer(pointer, (prod(self.shape(extents, keys)),), dtype)
        IRBuilder.name("M", mask)
        return mask


@T.meta_class
class MaskedScores:
    """A lane's elements of a mask for a step's scores, and what they do to these.

    ``rows`` are the mask's rows that the lane's two rows of scores read, each by the number of its first element.
    """

    def __init__(self, mask: Mask, buffer: Buffer, scores: Buffer, scale: float, rows: list[Expr], lane: Expr) -> None:
        self.mask, self.buffer, self.scores, self.scale = mask, buffer, scores, scale
        self.rows = rows if "queries" in mask.along else rows[:1]
        self.lane = lane
        self.count = int(scores.shape[0])
        self.bits = (1 << WARP) - 1
        words = mask.registers(2 * self.count)
        self.found = T.alloc_local((words,), SINGLE if mask.dtype == SINGLE else "uint32")

    def fetch(self, begin: Expr, keys: Expr) -> None:
        """Emit the loads of the elements for the keys from ``begin`` on; none at ``keys`` or later is read."""
        if self.mask.votes:
            for word in range(int(self.found.shape[0])):
                key = T.Bind(begin + (word * WARP + self.lane))
                seen = T.if_then_else(key < keys, self.buffer[self.rows[0] + key] != T.uint8(0), T.bool(False))
                T.buffer_store(
                    self.found, T.cuda.func_call("vote", seen, source_code=_VOTE, return_type="uint32"), [word]
                )
            return
        first = T.Bind(begin + wgmma_element(0, self.lane, 0)[1])
        for register in self._own_registers():
            for half, row in enumerate(self.rows):
                key = first + wgmma_element(0, 0, register)[1]
                self._load(self._word(register, half), row, key, keys)

    def all_seen(self) -> Expr:
        """Return whether a step's keys are all seen; only of a mask that votes."""
        found = self.found[0]
        for word in range(1, int(self.found.shape[0])):
            found = T.bitwise_and(found, self.found[word])
        return found == T.uint32(self.bits)

    def apply(self) -> None:
        """Emit the hiding of scores, or their scaling and the mask's addition."""
        if self.mask.votes:
            shift = T.Cast("uint32", wgmma_element(0, self.lane, 0)[1])
            words = [T.Bind(self.found[word] >> shift) for word in range(int(self.found.shape[0]))]
        for register in range(self.count):
            score = self.scores[register]
            if self.mask.votes:
                word, bit = divmod(int(wgmma_element(0, 0, register)[1]), WARP)
                value = self._kept(T.bitwise_and(words[word], T.uint32(1 << bit)), score)
            elif self.mask.is_added:
                value = score * T.float32(self.scale) + self._added(register)
            else:
                word = self.found[self._word(register, half_of(register))]
                value = self._kept(T.bitwise_and(word, T.uint32(0xFF << 8 * (register % 2))), score)
            T.buffer_store(self.scores, value, [register])

    def _own_registers(self) -> list[int]:
        """List registers of the first row, every second of two neighbours where a word has both."""
        step = 1 if self.mask.dtype == SINGLE else 2
        return [register for register in range(0, self.count, step) if half_of(register) == 0]

    def _word(self, register: int, half: int) -> int:
        """Return the word of ``found`` that has a register's element, ``half`` of its row."""
        inside = register // 4 if self.mask.dtype != SINGLE else register // 4 * 2 + register % 2
        return inside * len(self.rows) + (half if len(self.rows) > 1 else 0)

    def _load(self, word: int, row: Expr, key: Expr, keys: Expr) -> None:
        if self.mask.by_pairs:
            text, address = _PAIR.format(both=PAIRS[self.mask.dtype]), T.address_of(self.buffer[row + key])
            value = T.cuda.func_call("pair", address, source_code=text, return_type="uint32")
            value = T.if_then_else(key < keys, value, T.uint32(0))
        elif self.mask.dtype == SINGLE:
            value = T.if_then_else(key < keys, self.buffer[row + key], T.float32(0))
        else:
            width = 16 if self.mask.is_added else 8
            one, other = (
                T.if_then_else(key + i < keys, self._bits(self.buffer[row + key + i]), T.uint32(0)) for i in (0, 1)
            )
            value = T.bitwise_or(one, other << T.uint32(width))
        T.buffer_store(self.found, value, [word])

    def _bits(self, element: Expr) -> Expr:
        return T.Cast("uint32", T.reinterpret("uint16", element) if self.mask.is_added else element)

    def _added(self, register: int) -> Expr:
        word = self.found[self._word(register, half_of(register))]
        if self.mask.dtype == SINGLE:
            return word
        bits = T.Cast("uint16", word >> T.uint32(16 * (register % 2)))
        return T.Cast("float32", T.reinterpret(self.mask.dtype, bits))

    def _kept(self, flag: Expr, score: Expr) -> Expr:
        return T.Select(flag != T.uint32(0), score, T.float32(NEVER))
