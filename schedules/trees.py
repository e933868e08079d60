"""Boosted regression trees, as files have them: each asks a row of features, and what its leaves say is added up.

They say what a formula of a few constants leaves out, where times were measured of enough kernels. scikit-learn grows
them (:mod:`harness.grown_trees`); evaluating them here takes numpy alone. (Friedman, Greedy Function Approximation: A
Gradient Boosting Machine, Annals of Statistics 29, 2001.)
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensorir_ladder.schedules.errors import DamagedFile

LEAF = -1


class Trees(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Trees over named ``features``, node by node, each tree from its root on and the smaller side of a node first.

    ``asks``: the feature that a node asks, by its place, or LEAF. ``at``: up to what value of it the smaller side is
    taken, which is the next node; of a leaf, what it says. ``skips``: by so many nodes the larger side lies behind; 0
    of a leaf. ``roots``: where trees begin. Raises ValueError for a feature that is not there, and for sides outside of
    their tree.
    """

    features: tuple[str, ...]
    asks: tuple[int, ...]
    at: tuple[float, ...]
    skips: tuple[int, ...]
    roots: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.asks)
        if not (count == len(self.at) == len(self.skips)) or list(self.roots) != sorted({*self.roots}):
            raise ValueError("nodes of trees are not whole")
        if not count or self.roots[:1] != (0,) or self.roots[-1] >= count:
            raise ValueError("trees have no roots")
        ends = np.repeat([*self.roots[1:], count], np.diff([*self.roots, count]))
        asks, sides = np.array(self.asks), np.arange(count) + np.array(self.skips)
        leaf = asks == LEAF
        if not (leaf | ((asks >= 0) & (asks < len(self.features)))).all():
            raise ValueError(f"trees ask a feature that is none of {len(self.features)}")
        if not np.where(leaf, np.array(self.skips) == 0, (sides > np.arange(count) + 1) & (sides < ends)).all():
            raise ValueError("a side of a node lies outside of its tree")

    @functools.cached_property
    def _nodes(self) -> tuple[np.ndarray, ...]:
        """Return what each node asks, up to which value, and both sides: of a leaf the leaf itself."""
        places, asks = np.arange(len(self.asks)), np.array(self.asks)
        leaf = asks == LEAF
        smaller, larger = np.where(leaf, places, places + 1), places + np.array(self.skips)
        return np.maximum(asks, 0), np.array(self.at), np.where(leaf, places, smaller), larger

    def told(self, rows: np.ndarray) -> np.ndarray:
        """Return what all trees say together of each row of features."""
        asks, at, smaller, larger = self._nodes
        node = np.broadcast_to(np.array(self.roots), (len(rows), len(self.roots)))
        row = np.arange(len(rows))[:, None]
        while True:
            further = np.where(rows[row, asks[node]] <= at[node], smaller[node], larger[node])
            if np.array_equal(further, node):
                return at[node].sum(axis=1)
            node = further

    def named(self, values: dict[str, Any]) -> np.ndarray:
        """Return rows of the features that are asked, of values by name that are numbers or arrays.

        Raises KeyError for a feature without a value.
        """
        asked = (np.atleast_1d(np.asarray(values[name], float)) for name in self.features)
        return np.stack(np.broadcast_arrays(*asked), axis=-1)


def read_trees(path: Path) -> Trees:
    """Read trees from a file of this package; DamagedFile says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TreesFile).trees
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise DamagedFile(f"{path} is damaged ({error}); restore it from git, or install the package again") from error


class TreesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trees, and what they were grown over."""

    origin: str
    trees: Trees
