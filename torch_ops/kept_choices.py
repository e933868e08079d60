"""Find again what an earlier process chose for a product.

Choosing reads the times of all files of costs first, which takes some tenths of a second in each process. A choice
follows from the product, the GPU, these files and this project's sources: of all these it is kept, a line of JSON
(:mod:`kernels.codegen.build_cache`).
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from tensorir_ladder.kernels.codegen.build_cache import BuildCache, digest_sources
from tensorir_ladder.kernels.shifting import SHIFTS
from tensorir_ladder.kernels.tiles import ClusterTile, HopperTile, RoleTile
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.torch_ops import estimates, left_over, rates
from tensorir_ladder.torch_ops.choice import EXCHANGED, KERNELS, MENU, UPRIGHT, AnyChoice, Choice
from tensorir_ladder.torch_ops.few_rows import Streamed
from tensorir_ladder.torch_ops.kept import SOURCES
from tensorir_ladder.torch_ops.shifted import Shifting
from tensorir_ladder.torch_ops.short_reductions import Unaligned

CHOICES, SUFFIX = BuildCache("choices"), ".json"
OFFERED = (*MENU, EXCHANGED, UPRIGHT, *KERNELS.values())  # the last of them to batches, and any number of rows
STREAMED, UNALIGNED, SHIFTING = range(len(OFFERED), len(OFFERED) + 3)


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice: the place of its kernel in OFFERED, or STREAMED without tile and stages, UNALIGNED without stages.

    Or SHIFTING, without stages too, and the operands that it shifts.
    """

    kernel: int
    tile: str = ""
    stages: int = 0
    shifts: str = ""

    @property
    def choice(self) -> AnyChoice | None:
        """The choice; None for one that there is not, IllegalSchedule for a tile that is none."""
        if self.kernel == STREAMED:
            return Streamed()
        if self.kernel == UNALIGNED:
            return Unaligned(HopperTile.parse(self.tile))
        if self.kernel == SHIFTING:
            return Shifting(ClusterTile.parse(self.tile), self.shifts) if self.shifts in SHIFTS else None
        if not 0 <= self.kernel < STREAMED:
            return None
        kernel = OFFERED[self.kernel]
        if not kernel.tiles:  # they follow from the product
            return Choice(kernel, RoleTile.parse(self.tile), self.stages)
        listed = (each for each in kernel.tiles if (str(each.tile), each.stages) == (self.tile, self.stages))
        return next((Choice(kernel, each.tile, each.stages) for each in listed), None)


def find_choice(*asked: object) -> AnyChoice | None:
    """Return what was chosen where the same was asked; None where that is not kept, or cannot be read."""
    kept = CHOICES.find(_recipe(asked), SUFFIX)
    if kept is None:
        return None
    try:
        return msgspec.json.decode(kept.content, type=_Line).choice
    except (ValueError, IllegalSchedule):  # msgspec's errors are ValueErrors
        return None


def keep_choice(choice: AnyChoice, *asked: object) -> None:
    """Keep what was chosen where this was asked."""
    line = _Line(STREAMED)
    if isinstance(choice, Unaligned):
        line = _Line(UNALIGNED, str(choice.tile))
    elif isinstance(choice, Shifting):
        line = _Line(SHIFTING, str(choice.tile), shifts=choice.shifts)
    elif isinstance(choice, Choice):
        line = _Line(OFFERED.index(choice.kernel), str(choice.tile), choice.stages)
    CHOICES.put(_recipe(asked), SUFFIX, msgspec.json.encode(line))


def _recipe(asked: tuple[object, ...]) -> str:
    measured = [_digest(folder) for folder in (estimates.FOLDER, left_over.FOLDER, rates.FOLDER)]
    return msgspec.json.encode([*asked, *measured, SOURCES.loaded], enc_hook=str).decode()


@functools.cache
def _digest(folder: Path) -> str:
    return digest_sources(folder, ["*.json"])
