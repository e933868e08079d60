"""The order in which blocks take the output's tiles."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

ROWS_TOGETHER = 16  # rows of tiles that blocks take side by side, those of a cluster counted


def of_batch(tile: Expr, tiles: int, batch: int) -> tuple[Expr, Expr]:
    """Return a tile's product within the batch, and its number within that product, which has ``tiles`` of them."""
    return (0, tile) if batch == 1 else (tile // tiles, tile % tiles)


def grouped(block: Expr, rows: int | Expr, columns: int, group: int = ROWS_TOGETHER) -> tuple[Expr, Expr]:
    """Row and column of a block's tile: down ``group`` rows of tiles, then to the next column.

    ::

        before   0 1 2 3        after, group = 2    0 2 4 6
                 4 5 6 7                            1 3 5 7
                 ...                                8 ...

    Blocks that run together then share operands in the L2 cache: 132 of them touch 8 rows and 17 columns of tiles
    instead of some 2 and 66. The last group may have fewer rows. ``rows`` may be known only when the kernel runs.
    """
    first = block // (group * columns) * group
    height = group if isinstance(rows, int) and rows % group == 0 else tirx.min(rows - first, group)
    inside = block % (group * columns)
    return first + inside % height, inside // height
