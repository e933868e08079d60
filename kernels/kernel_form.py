"""How a kernel with roles is made, besides its product, tile and stages: what steps 12 and 13 have in common."""

from __future__ import annotations

from dataclasses import dataclass

from tensorir_ladder.kernels.fused_epilogue import PLAIN, Epilogue
from tensorir_ladder.schedules.stamps import Stamps


@dataclass(frozen=True)
class KernelForm:
    """Say what becomes of the sums, which products a kernel takes, when it begins, and how it can be looked at.

    Parameters
    ----------
    finish : what becomes of each sum before it is rounded.
    columns : of the output and its bias, where B was copied to longer rows; 0: those of the product.
    any_rows : take any number of rows, in a further parameter, up to those of the product.
    overlapped : begin while the kernel before in the stream still runs, and wait for its end before memory is touched
        (programmatic dependent launch).
    next_at_once : let the next kernel begin from the start, instead of when the last products are issued; nothing
        without ``overlapped``. It pays only where the GPU has places for all blocks of both.
    bounded : give up after a bounded number of looks at a barrier, and say which: for debugging.
    stamps : time stamps of the roles, which go to a further buffer; None without.
    """

    finish: Epilogue = PLAIN
    columns: int = 0
    any_rows: bool = False
    overlapped: bool = False
    next_at_once: bool = False
    bounded: bool = False
    stamps: Stamps | None = None


PLAIN_FORM = KernelForm()
