"""What kernels take beside a formula, told by what others took: Gaussian process regression.

The logarithm of a time over the formula's is taken for a sum of four: what all kernels differ by for a product, and one
kernel by itself, both alike for products near each other; what one differs by for this very product; and the time's own
error. Kernels differ alike where they are near each other. The nearest times then say the likeliest
difference of any kernel for any product, and how sure that is (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, equations 2.23 and 2.24). Its constants are the likeliest for the H200's times (their section 5.4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorir_ladder.torch_ops.kernel_cost import LINE
from tensorir_ladder.torch_ops.one_tile import EIGHT, SECTOR

FEWEST_ROWS = 16  # fewer cost the same
NEAREST = 640  # times that are asked: a choice takes 24 ms on one core by as many, 5 by half; more say little more
# How far products are from each other: doublings of m, n and k; rows that lie across cache lines, B's as A's; rows
# that begin within sectors of them.
M, N, K, LINES, SECTORS = 1.37, 1.35, 1.14, 0.87, 2.13
# And kernels: doublings of a tile's rows, columns and k steps, parts of the reduction, doublings of a cluster's blocks
# down and across, a last wave that is cut, blocks that stay, doublings of the waves of tiles, of those that the last
# one, not filled, takes the place of, and of the product's rows and columns where tiles reach beyond its edges (these
# two by what the choice of 2,990 shapes left out in turn loses: 0.0204 without, 0.0197 by 2, 0.0198 by 3); doublings of
# a ring's stages since the time was taken.
KERNEL = np.array([0.62, 0.5, 0.39, 2.13, 0.7, 0.74, 0.91, 0.53, 1.08, 3.44, 2.0, 2.0, 1.0])
# And another GPU, of products and of kernels: of 52 shapes left out in turn, an H100's choice took 0.989 of the best
# times with the H200's beside its own, 0.983 with its own alone, and 0.980 with the H200's alone.
OTHER_PRODUCT, OTHER_KERNEL = 0.5, 0.3
ANOTHER = 100.0  # as far as kernels are apart that say nothing of each other
# Standard deviations, and how far they are alike.
COMMON, COMMON_FAR = 0.062, 3.1
OWN, OWN_FAR = 0.075, 4.0
SAME, SAME_FAR = 0.039, 0.1
ERROR, SLOW_ERROR, SLOWEST = 0.024, 0.154, 3.0  # of a time; more for each time that it is the shape's fastest; at most


def by_the_eight(m: Any) -> Any:
    """Round rows up to what kernels take: beyond eight they come by the eight."""
    return np.where(np.asarray(m) <= EIGHT, m, -(-np.asarray(m) // EIGHT) * EIGHT)


def product_places(m: Any, n: Any, k: Any, nt: Any, a_row: Any = None, b_row: Any = None) -> np.ndarray:
    """Place products, a row each: numbers or arrays of sizes, and of whether B is stored transposed.

    ``a_row`` and ``b_row`` are the elements that rows of the operands begin apart; without gaps between them if None.
    """
    a_row = k if a_row is None else a_row
    b_row = np.where(nt, k, n) if b_row is None else b_row
    across = np.mod(np.where(nt, n, b_row), LINE) != 0, np.mod(a_row, LINE) != 0
    flags = [LINES * np.asarray(flag) for flag in (nt, *across)]
    flags += [SECTORS * (np.mod(row, SECTOR) != 0) for row in (b_row, a_row)]
    sizes = M * np.log2(np.maximum(by_the_eight(m), FEWEST_ROWS)), N * np.log2(n), K * np.log2(k)
    return np.stack(np.broadcast_arrays(*sizes, *flags), axis=-1)


def kernel_places(family: Any, *kind: Any, waves: Any, beyond: Sequence[Any], former: Any = 1) -> np.ndarray:
    """Place kernels, a row each: which family, of which others say nothing, and what KERNEL lists.

    ``waves`` of tiles; ``beyond``, by how much the tiles' rows and columns are more than the product's; ``former``, how
    many times the stages that a kernel was timed with it has today.
    """
    unfilled = np.where(np.asarray(waves) < 1, 1, np.ceil(waves) / waves)
    doublings = map(np.log2, (waves, unfilled, *beyond, former))
    scaled = (far * np.asarray(each) for far, each in zip(KERNEL, (*kind, *doublings), strict=True))
    return np.stack(np.broadcast_arrays(ANOTHER * np.asarray(family), *scaled), axis=-1)


def beyond_edges(extents: Sequence[Any], blocks: Sequence[Any]) -> list[Any]:
    """Return what blocks of these extents cover of a product's, over what it has, dimension by dimension."""
    return [-(-extent // block) * block / extent for extent, block in zip(extents, blocks)]


class Expected(NamedTuple):
    """Say what the logarithms of kernels' times should differ by from the formula's, and how sure that is."""

    off: np.ndarray
    covariance: np.ndarray

    @property
    def deviation(self) -> np.ndarray:
        """Standard deviations."""
        return np.sqrt(np.maximum(self.covariance.diagonal(), 0.0))


class Measured(NamedTuple):
    """Times of a GPU's kernels beside the formula.

    ``products`` and ``kernels`` have a place in each row. Of each time: of which product (``of``, its row), of which
    kernel, the logarithm of the time over the formula's (``off``), how many times the product's fastest (``slower``).
    """

    products: np.ndarray
    of: np.ndarray
    kernels: np.ndarray
    off: np.ndarray
    slower: np.ndarray


class Nearby:
    """Tell kernels' differences from a formula by what was measured, on this GPU and on ``others``.

    Each GPU has a formula of its own; what its kernels differ by from it is some of what they do on another.
    """

    def __init__(self, own: Measured, *others: Measured) -> None:
        far = [0.0, *(1.0 for _ in others)]
        parts, first = [], 0
        for each, away in zip((own, *others), far):
            order = np.argsort(each.of, kind="stable")
            places = _with_gpu(each.products, OTHER_PRODUCT * away), _with_gpu(each.kernels, OTHER_KERNEL * away)
            parts.append((places[0], each.of[order] + first, places[1][order], each.off[order], each.slower[order]))
            first += len(each.products)
        self.products, of, self.kernels, self.off, slower = map(np.concatenate, zip(*parts))
        self.errors = ERROR**2 + (SLOW_ERROR * (np.minimum(slower, SLOWEST) - 1)) ** 2
        self.counts = np.bincount(of, minlength=len(self.products))
        self.ends = np.cumsum(self.counts)

    def expected(self, product: np.ndarray, kernels: np.ndarray, without: Sequence[int] | np.ndarray = ()) -> Expected:
        """Return what kernels' times for a product should differ by from the formula's.

        Only the times of the nearest products are asked, some NEAREST of them; a guess where none are near by.
        ``without`` those of some of this GPU's products, rows of its ``products``.
        """
        product, kernels = _with_gpu(product[None], 0.0), _with_gpu(kernels, 0.0)
        apart = _apart(self.products, product)[:, 0]
        apart[list(without)] = np.inf
        nearest = np.argsort(apart)[: len(apart) - len(without)]
        nearest = nearest[: np.searchsorted(np.cumsum(self.counts[nearest]), NEAREST) + 1]
        counts = self.counts[nearest]
        first = np.repeat(self.ends[nearest] - counts - (np.cumsum(counts) - counts), counts)
        times = first + np.arange(len(first))
        of, known = np.repeat(np.arange(len(nearest)), counts), self.kernels[times]
        common, own = _alike(apart[nearest])
        between = common[of, None] + own[of, None] * _alike_kernels(known, kernels)
        places = self.products[nearest]
        common, own = (each.repeat(counts, 0).repeat(counts, 1) for each in _alike(_apart(places, places)))
        among = common + own * _alike_kernels(known, known)
        among[np.diag_indices(len(among))] += self.errors[times]
        solved = np.linalg.solve(among, np.column_stack([self.off[times], between]))
        common, own = _alike(np.zeros(()))
        themselves = common + own * _alike_kernels(kernels, kernels)
        return Expected(between.T @ solved[:, 0], themselves - between.T @ solved[:, 1:])


def _with_gpu(places: np.ndarray, far: float) -> np.ndarray:
    """Add how far another GPU is as a coordinate."""
    return np.concatenate([places, np.full((len(places), 1), far)], axis=1)


def _alike(apart: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return covariances of products so far apart (squared): of what all kernels differ by, and of each one's own."""
    common = COMMON**2 * np.exp((-0.5 / COMMON_FAR**2) * apart)
    own = OWN**2 * np.exp((-0.5 / OWN_FAR**2) * apart)
    return common, own + SAME**2 * np.exp((-0.5 / SAME_FAR**2) * apart)


def _alike_kernels(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return what part of each kernel's own difference is another's."""
    return np.exp(-0.5 * _apart(ones, others))


def _apart(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return squared distances of each row from each other's."""
    squared = (ones**2).sum(1)[:, None] + (others**2).sum(1) - 2 * (ones @ others.T)
    return np.maximum(squared, 0.0)
