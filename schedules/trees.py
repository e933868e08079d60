"""Boosted regression trees: what a formula of a few constants leaves of measured times, as a sum over trees.

They are grown by scikit-learn (:mod:`harness.calibration`) and evaluated by numpy alone. (Friedman, Greedy Function
Approximation: A Gradient Boosting Machine, Annals of Statistics 29, 2001.)
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

LEAF = -1


class Trees(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True, dict=True):
    """Trees over named ``features``, their nodes in preorder: a node, its smaller side, its larger side.

    ``asks``: the feature that a node compares, by its place, or LEAF. ``at``: the largest value of it on the smaller
    side; of a leaf, its summand. Two objects are equal only if they are the same. Raises ValueError for a feature that
    is not there and for trees that are not whole.
    """

    features: tuple[str, ...]
    asks: tuple[int, ...]
    at: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.asks) != len(self.at):
            raise ValueError("nodes of trees are not whole")
        if not all(LEAF <= asked < len(self.features) for asked in self.asks):
            raise ValueError(f"trees ask a feature that is none of {len(self.features)}")
        self._nodes  # noqa: B018 - trees that are not whole are an error of the file

    @functools.cached_property
    def _nodes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the roots, what each node asks, and the two sides of each in turn: of a leaf the leaf itself."""
        sides = np.arange(len(self.asks)).repeat(2)
        roots: list[int] = []
        waiting: list[int] = []  # nodes whose larger side is still to come
        for place, asked in enumerate(self.asks):
            if place == 0 or self.asks[place - 1] == LEAF:
                if waiting:
                    sides[2 * waiting.pop() + 1] = place
                else:
                    roots.append(place)
            if asked != LEAF:
                sides[2 * place] = place + 1
                waiting.append(place)
        if waiting or (self.asks and self.asks[-1] != LEAF):
            raise ValueError("trees end within a tree")
        return np.array(roots, int), np.maximum(np.array(self.asks, int), 0), sides

    @functools.cached_property
    def _at(self) -> np.ndarray:
        return np.array(self.at, float)

    def predict(self, values: dict[str, Any]) -> np.ndarray:
        """Return the sum over all trees for each row of features, given by name as numbers or arrays.

        Raises KeyError for a feature without a value.
        """
        rows = np.empty((max(np.size(values[name]) for name in self.features), len(self.features)))
        for place, name in enumerate(self.features):
            rows[:, place] = values[name]
        (roots, asks, sides), at = self._nodes, self._at
        flat, node = rows.ravel(), np.repeat(roots[None], len(rows), axis=0)
        first = np.arange(len(rows))[:, None] * len(self.features)
        while True:
            further = sides.take(2 * node + (flat.take(first + asks.take(node)) > at.take(node)))
            if np.array_equal(further, node):
                return at.take(node).sum(axis=1)
            node = further
