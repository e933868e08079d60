"""Device memory that a kernel keeps between launches: one set for each stream, since launches of one follow each other.

A kernel whose blocks hand sums to each other (:mod:`.partial_sums`) needs room for these and flags, which are zeros
before the first launch and which every launch leaves as zeros.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from tensorir_ladder.kernels.codegen.launch_plan import PlainBuffer

FLAGS = "int32"


class Room(NamedTuple):
    """Memory for all of a kernel's workspaces, in their order. Who launches keeps it until the launch is recorded."""

    addresses: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]


class Workspaces:
    """A kernel's workspaces: made at a stream's first launch, kept as long as the kernel, never larger.

    What a CUDA graph launches may be replayed in any stream, beside launches of the one where it was captured: each
    launch captured has memory of the graph's own, whose flags the graph lowers first, a few bytes at each replay.
    """

    def __init__(self, buffers: tuple[PlainBuffer, ...]) -> None:
        self._buffers = buffers
        self._by_stream: dict[int, Room] = {}

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def of(self, stream: int, like: torch.Tensor) -> Room:
        """The workspaces for a launch in torch's current stream, whose address is given, on the GPU of a tensor."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            return self._made(like)
        # Of two threads' first launches one makes the room that both take.
        return self._by_stream.get(stream) or self._by_stream.setdefault(stream, self._made(like))

    def _made(self, like: torch.Tensor) -> Room:
        """New memory; only flags are filled."""
        import torch

        tensors = []
        for buffer in self._buffers:
            make = like.new_zeros if buffer.dtype == FLAGS else like.new_empty
            tensors.append(make((prod(buffer.shape),), dtype=getattr(torch, buffer.dtype)))
        return Room(tuple(tensor.data_ptr() for tensor in tensors), tuple(tensors))
