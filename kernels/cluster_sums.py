"""Sums of the parts of a reduction, which are a cluster's blocks: each block adds up and stores a share of the results.

All blocks leave their sums in their own shared memory, as rows of the output tile. Behind a barrier of the cluster each
block reads its share of the rows in all of them, by distributed shared memory, and adds these in the order of the
parts: results are the same to the last bit each time. So all of them read, add and store at once, where one that reads
what all others left would have them wait. Source: PTX ISA, mapa, ld.shared::cluster, barrier.cluster.
"""

from __future__ import annotations

from typing import NamedTuple

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer

from tensorir_ladder.kernels import epilogue
from tensorir_ladder.kernels.held import held
from tensorir_ladder.kernels.roles import Consumer, RoleBlock, await_all_read, meet
from tensorir_ladder.kernels.tiles import SUM_BYTES, RoleTile
from tensorir_ladder.kernels.wgmma import keep
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.isa import VECTOR_BYTES, WARPGROUP, WGMMA_ROWS, wgmma_element

VECTOR = VECTOR_BYTES // SUM_BYTES  # sums of a row that a thread reads of a part at once
ADDED_AT_ONCE = 64  # sums of all parts that a thread has on their way
# Sums of `count` places, `apart` from each other, of a tile with `across` vectors in a row: of all parts, then added.
# Places behind the last are read as if they were that, and are not stored.
_ADD_PARTS = """
__forceinline__ __device__ void {name}(float* sums, void* memory, int first, int place, int end) {{
  unsigned int own = (unsigned int)__cvta_generic_to_shared(memory), there[{parts}];
  float read[{count}][{parts}][4];
#pragma unroll
  for (int part = 0; part < {parts}; ++part)
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there[part]) : "r"(own), "r"(first + part * {cluster}));
#pragma unroll
  for (int i = 0; i < {count}; ++i) {{
    const unsigned int at = min(place + i * {apart}, end - 1), byte = at / {across} * {row_bytes} + at % {across} * 16;
#pragma unroll
    for (int part = 0; part < {parts}; ++part)
      asm volatile("ld.shared::cluster.v4.f32 {{%0, %1, %2, %3}}, [%4];"
                   : "=f"(read[i][part][0]), "=f"(read[i][part][1]), "=f"(read[i][part][2]), "=f"(read[i][part][3])
                   : "r"(there[part] + byte) : "memory");
  }}
#pragma unroll
  for (int i = 0; i < {count}; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {{
      sums[i * 4 + j] = read[i][0][j];
#pragma unroll
      for (int part = 1; part < {parts}; ++part) sums[i * 4 + j] += read[i][part][j];
    }}
}}
"""


def check_parts(parts: int, k_tiles: int) -> None:
    """Raise IllegalTile for more parts than the reduction has k tiles."""
    if parts > k_tiles:
        raise IllegalTile(
            "more parts than the reduction has k tiles", value=parts, limit=k_tiles, remedy="choose fewer parts"
        )


class Share(NamedTuple):
    """A block's part of the reduction: its first k tile, and how many it has."""

    first: Expr
    k_tiles: Expr


@T.meta_class
class ClusterSums:
    """The blocks of a cluster that have a tile's ``parts``; ``here`` says which of these this block multiplies.

    Where blocks share loads, a cluster has such blocks for the tile of each that do. ``exchanged``: the instruction's
    rows are the output's columns.
    """

    def __init__(self, tile: RoleTile, here: RoleBlock, exchanged: bool = False) -> None:
        self.tile, self.here, self.exchanged = tile, here, exchanged
        self.parts, self.part, self.overlapped = tile.parts, here.part, here.overlapped
        self.threads = tile.consumers * WARPGROUP
        share = -(-tile.block_m * tile.block_n // (VECTOR * self.parts * self.threads))
        self.at_once = max(1, min(share, ADDED_AT_ONCE // (VECTOR * self.parts)))  # of a thread's places

    @T.inline
    def meet(self):
        """Emit the wait of all the cluster's threads for each other; what they wrote before is there behind it."""
        if self.parts > 1:
            T.cuda.warp_sync()
            T.cuda.cluster_sync()

    @T.inline
    def separate(self):
        """Emit the wait of all the cluster's threads until none of them reads what another block has left any more.

        Else a block could end before. What a thread has read it has used by then; results on their way to memory need
        not have arrived there: a fence would wait for them (:func:`kernels.roles.arrive_relaxed`).
        """
        if self.parts > 1:
            T.cuda.warp_sync()
            meet(self.overlapped)

    def share_of(self, k_tiles: int) -> Share:
        """Return this block's share of the reduction: as many k tiles as the others', give or take one."""
        if self.parts == 1:
            return Share(0, k_tiles)
        first, behind = ((self.part + more) * k_tiles // self.parts for more in (0, 1))
        return Share(held("first", first, self.overlapped), held("count", behind - first, self.overlapped))

    @T.inline
    def store(self, mine, memory, output, corner, finish, bias, aligned):
        """Emit the consumers' way of the tile's sums to the output's ``corner``, through ``memory``, the ring's.

        ``aligned``: the output begins at a multiple of 16 bytes. The producer's warps :meth:`meet` and
        :meth:`separate` meanwhile.
        """
        self.leave(mine, memory)
        self.meet()
        self.add_and_store(mine, memory, output, corner, finish, bias, aligned)
        self.separate()

    @T.inline
    def leave(self, mine, memory):
        """Emit a consumer's writing of its sums to the block's ``memory``, the ring's, once all consumers have read it.

        See :func:`kernels.roles.await_all_read`.
        """
        await_all_read(mine.here.consumers)
        self._write(mine, memory)

    def _write(self, mine: Consumer, memory: Buffer) -> None:
        """Emit it: neighbours in a row by one instruction, where a thread has them."""
        product, together = mine.product, 1 if self.exchanged else 2
        for register in range(0, product.registers, together):
            row_tile, inside = divmod(register, product.registers_per_tile)
            down, across = wgmma_element(mine.here.warp, mine.here.lane, inside)
            down = mine.row + row_tile * WGMMA_ROWS + down
            across = mine.column + across
            row, column = (across, down) if self.exchanged else (down, across)
            place = memory.ptr_to([(row * self.tile.sum_pitch + column) * SUM_BYTES])
            kind = "st.shared.f32" if self.exchanged else "st.shared.v2.f32"
            T.evaluate(T.ptx[kind](place, *(mine.sums[register + i] for i in range(together))))

    @T.inline
    def add_and_store(self, mine, memory, output, corner, finish, bias, aligned):
        """Emit the consumers' adding of this block's share of the tile, and its way out to the output's ``corner``.

        A share is as many places of four results as the others', give or take one, of the rows that the output has.
        """
        across = T.meta_var(self.tile.block_n // VECTOR)
        rows = T.meta_var(T.min(self.tile.block_m, output.shape[0] - corner[0]))
        places: T.let = (rows if self.here.cluster == 1 else T.max(rows, 0)) * across  # 0 of a tile beyond the output
        begin: T.let = self.part * places // self.parts
        end: T.let = (self.part + 1) * places // self.parts
        together = T.meta_var(self.threads * self.at_once)
        sums = T.alloc_local((VECTOR * self.at_once,), "float32")
        for turn in T.serial((end - begin + together - 1) // together):
            first: T.let = begin + turn * together + mine.here.thread - WARPGROUP  # the producer's come before
            self._add(sums, memory, first, end)
            for i in T.unroll(self.at_once):
                place: T.let = first + i * self.threads
                if place < end:
                    row = T.meta_var(corner[0] + place // across)
                    column = T.meta_var(corner[1] + place % across * VECTOR)
                    finish.apply_along(bias, sums, i * VECTOR, VECTOR, column)
                    epilogue.store_four(sums, i * VECTOR, output, row, column, aligned)

    def _add(self, sums: Buffer, memory: Buffer, place: Expr, end: Expr) -> None:
        pitch, across, count = self.tile.sum_pitch, self.tile.block_n // VECTOR, self.at_once
        name = f"add_{count}_of_{self.parts}_parts"
        sizes = {"across": across, "row_bytes": pitch * SUM_BYTES, "apart": self.threads}
        text = _ADD_PARTS.format(name=name, parts=self.parts, count=count, cluster=self.here.cluster, **sizes)
        arguments = T.address_of(sums[0]), memory.ptr_to([0]), self.here.member, place, end
        T.evaluate(T.cuda.func_call(name, *arguments, source_code=text))
        if self.overlapped:
            keep(sums)  # all that was read is there, also of places that are not stored
