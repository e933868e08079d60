"""Softmax of rows that come tile by tile, in the registers in which a warpgroup has its scores.

Sums are kept relative to the largest score so far; when a larger one comes, what was summed up is scaled down once.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.schedules.isa import WARP, wgmma_element

HALVES = 2  # rows of an instruction's 64 that a lane has elements of: eight apart
NEIGHBOURS = (1, 2)  # flips of a lane's number that reach the four lanes which share a row
EVERY_LANE = 0xFFFFFFFF
NEVER = -3e38  # a score that no weight is left of
LEAST = -1e20  # a row's largest score is taken to be at least this: below it no weight is left
_TANH = """
__forceinline__ __device__ float tanh_approx(float x) {
  asm("tanh.approx.f32 %0, %0;" : "+f"(x));
  return x;
}
"""


def half_of(register: int) -> int:
    """Return which of a lane's two rows a register of an accumulator belongs to."""
    return register // 2 % HALVES


@T.meta_class
class OnlineSoftmax:
    """A lane's part of the softmax of its two rows, over all tiles of scores so far.

    ::

        most'   = max(most, max(scores))
        factor  = exp(scale * (most - most'))             # what the sums so far are to be multiplied by
        weights = exp(scale * (scores - most'))           # in the scores' registers
        total   = total * factor + sum(weights)           # of this lane's columns; the row's when all are through

    ``scores`` are a warpgroup's accumulators (:func:`schedules.isa.wgmma_element`) of one tile after the other;
    ``scale`` is above 0. The first tile must have a score in each row that is not left out, unless rows
    ``may_be_empty``: sums of a row without scores are zeros. A row's largest score and its sum are found by
    ``chains`` of dependent operations, which are independent of each other.
    """

    def __init__(self, scores: Buffer, scale: float, may_be_empty: bool = False, chains: int = 1) -> None:
        self.scores, self.may_be_empty, self.count = scores, may_be_empty, chains
        self.scale = T.float32(scale * math.log2(math.e))  # powers of 2 are what the hardware computes
        self.most = T.alloc_local((HALVES,), "float32")
        self.total = T.alloc_local((HALVES,), "float32")
        self.factor = T.alloc_local((HALVES,), "float32")
        self.base = T.alloc_local((HALVES,), "float32")
        self.chains = T.alloc_local((chains,), "float32")

    def leave_out(self, bounds: Sequence[Expr], lane: Expr, below: bool = False) -> None:
        """Emit the removal of scores whose column is not below its row's bound, or, of those that are ``below``."""
        for half in range(HALVES):
            inside = T.Bind(
                bounds[half] - wgmma_element(0, lane, 0)[1]
            )  # of the columns that begin at the lane's first
            for register in self._registers(half):
                column = wgmma_element(0, 0, register)[1]
                kept = column >= inside if below else column < inside
                T.buffer_store(self.scores, T.Select(kept, self.scores[register], T.float32(NEVER)), [register])

    def cap(self, factor: float) -> None:
        """Emit ``scores = tanh(factor · scores)`` by one instruction each, to 2^-16.5 of the result on an H200.

        PTX allows 2^-11, which is the rounding of a tanh to float16.
        """
        for register in range(int(self.scores.shape[0])):
            value = self.scores[register] * T.float32(factor)
            value = T.cuda.func_call("tanh_approx", value, source_code=_TANH, return_type="float32")
            T.buffer_store(self.scores, value, [register])

    def take(self, first: bool) -> None:
        """Emit the step above for a tile of scores; ``first``: there is nothing to scale down."""
        for half in range(HALVES):
            self._find_most(half, first)
        for half in range(HALVES):
            for number, register in enumerate(self._registers(half)):
                weight = T.exp2(self.scores[register] * self.scale - self.base[half])
                T.buffer_store(self.scores, weight, [register])
                chain, so_far = number % self.count, self.scores[register]
                T.buffer_store(self.chains, so_far if number < self.count else self.chains[chain] + so_far, [chain])
            found = self._joined(lambda one, other: one + other)
            T.buffer_store(self.total, found if first else self.total[half] * self.factor[half] + found, [half])

    def scale_down(self, sums: Buffer) -> None:
        """Emit the multiplication of sums of weights so far, in the same rows, by the last tile's factor."""
        for register in range(int(sums.shape[0])):
            T.buffer_store(sums, sums[register] * self.factor[half_of(register)], [register])

    def divide(self, sums: Buffer) -> None:
        """Emit the division of sums of weights by the weights' own sum, when all tiles are through."""
        for half in range(HALVES):
            for flip in NEIGHBOURS:
                T.buffer_store(self.total, self.total[half] + self._flipped(self.total[half], flip), [half])
            factor = T.float32(1) / self.total[half]
            if self.may_be_empty:
                factor = T.Select(self.total[half] > T.float32(0), factor, T.float32(0))
            T.buffer_store(self.factor, factor, [half])
        self.scale_down(sums)

    def _find_most(self, half: int, first: bool) -> None:
        """Emit a row's largest score so far, and from it the factor."""
        most = self.base  # a register that is free until then
        for number, register in enumerate(self._registers(half)):
            chain, score = number % self.count, self.scores[register]
            T.buffer_store(self.chains, score if number < self.count else tirx.max(self.chains[chain], score), [chain])
        T.buffer_store(most, self._joined(tirx.max), [half])
        for flip in NEIGHBOURS:
            T.buffer_store(most, tirx.max(most[half], self._flipped(most[half], flip)), [half])
        if self.may_be_empty:
            T.buffer_store(most, tirx.max(most[half], T.float32(LEAST)), [half])
        if not first:
            T.buffer_store(most, tirx.max(most[half], self.most[half]), [half])
            T.buffer_store(self.factor, T.exp2((self.most[half] - most[half]) * self.scale), [half])
        else:
            T.buffer_store(self.factor, T.float32(1), [half])
        T.buffer_store(self.most, most[half], [half])
        T.buffer_store(self.base, self.most[half] * self.scale, [half])

    def _joined(self, operation: Callable[[Expr, Expr], Expr]) -> Expr:
        """Return what a row's chains come to together."""
        return reduce(operation, (self.chains[chain] for chain in range(self.count)))

    def _flipped(self, value: Expr, flip: int) -> Expr:
        """Return the value of the lane whose number differs in the bits of ``flip``."""
        return T.tvm_warp_shuffle_xor(T.uint32(EVERY_LANE), value, flip, WARP, WARP)

    def _registers(self, half: int) -> list[int]:
        return [register for register in range(int(self.scores.shape[0])) if half_of(register) == half]
