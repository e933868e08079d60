"""What formulas and the nearest times leave of kernels' times: features of products and kernels, told by trees.

Times near by say what kernels have in common (:mod:`.nearby`); what a kernel takes more for one shape alone depends on
how its tiles, waves and k tiles end there, which is no matter of distance. Trees are grown over what is left of times
of products left out (:mod:`schedules.trees`; ``grown/`` has a file for each GPU, written by ``ladder menu``; others are
taken for an H200).

Of 3,018 shapes of an H200, left out in turn, 88 were chosen below 0.9 of the fastest that was timed without trees, 55
with them; of 1,096 of an H100 42 and 32.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorir_ladder.schedules.trees import Trees, read_trees
from tensorir_ladder.torch_ops.kernel_cost import LINE
from tensorir_ladder.torch_ops.nearby import beyond_edges, kernel_places
from tensorir_ladder.torch_ops.one_tile import SECTOR
from tensorir_ladder.torch_ops.rates import MODELLED

if TYPE_CHECKING:
    from tensorir_ladder.torch_ops.estimates import Asked

FOLDER = Path(__file__).parent / "grown"


class Kernels(NamedTuple):
    """Kernels as times are told by, an element each: their families, tiles, parts, clusters and kinds.

    ``held``: blocks of a multiprocessor; ``waves`` of tiles of the product in question; ``former``, how many times the
    stages of the kernel that was timed those of today's are.
    """

    family: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    depth: np.ndarray
    parts: np.ndarray
    down: np.ndarray
    across: np.ndarray
    cuts: np.ndarray
    stays: np.ndarray
    stages: np.ndarray
    held: np.ndarray
    waves: np.ndarray
    former: np.ndarray

    def at(self, places: np.ndarray) -> Kernels:
        """Return some of them, in their order."""
        return Kernels(*(each[places] for each in self))

    def places(self, m: Any, n: Any) -> np.ndarray:
        """Place the kernels for a product of these rows and columns, or one for each, as :mod:`.nearby` has them."""
        sizes = (np.log2(each) for each in (self.rows, self.columns, self.depth))
        clusters, kinds = (np.log2(self.down), np.log2(self.across)), (self.cuts, self.stays)
        more = {"beyond": beyond_edges((m, n), (self.rows, self.columns)), "former": self.former}
        return kernel_places(self.family, *sizes, self.parts, *clusters, *kinds, waves=self.waves, **more)


def features(asked: Asked, kernels: Kernels, us: np.ndarray, deviation: np.ndarray) -> dict[str, Any]:
    """Return by name what trees may ask of kernels for a product, numbers or arrays.

    ``us``: microseconds by the formula; ``deviation``: how unsure the nearest times are of their difference from it.
    """
    m, n, k, nt, a_row, b_row = asked
    over, beyond = beyond_edges((m, n), (kernels.rows, kernels.columns))
    down, across = -(-m // kernels.rows), -(-n // kernels.columns)  # tiles
    return {
        **{name: each for name, each in kernels._asdict().items() if name != "former"},
        "m": m,
        "n": n,
        "k": k,
        "transposed": nt,
        "a_across_lines": np.mod(a_row, LINE) != 0,
        "b_across_lines": np.mod(b_row, LINE) != 0,
        "a_within_sectors": np.mod(a_row, SECTOR) != 0,
        "b_within_sectors": np.mod(b_row, SECTOR) != 0,
        "rows_of_last": np.mod(m, kernels.rows),
        "columns_of_last": np.mod(n, kernels.columns),
        "columns_of_last_line": np.mod(n, LINE),
        "k_of_last_line": np.mod(k, LINE),
        "rows_beyond": over,
        "columns_beyond": beyond,
        "last_wave": np.mod(kernels.waves, 1),
        "unfilled": np.ceil(kernels.waves) / kernels.waves,
        "k_tiles": -(-k // (kernels.depth * kernels.parts)),
        "tile": kernels.rows * kernels.columns,
        "results": np.asarray(m, float) * n,
        "operands": (np.asarray(m, float) + n) * k,
        "last_down": np.mod(down, kernels.down),
        "last_across": np.mod(across, kernels.across),
        "formula_us": us,
        "deviation": deviation,
    }


@functools.cache
def trees_of(gpu: str) -> Trees:
    """Read a GPU's trees, or those of ``rates.MODELLED`` where it has none; DamagedFile names a bad file."""
    path = path_of(gpu)
    return read_trees(path if path.exists() else path_of(MODELLED))


def path_of(gpu: str) -> Path:
    """Return where the trees of a GPU lie."""
    return FOLDER / f"{gpu.lower().replace(' ', '-')}.json"
