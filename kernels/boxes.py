"""Results that leave in portions, through a little shared memory of their own, while other work goes on."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import tma
from tensorir_ladder.kernels.epilogue import (
    BOX_BYTES,
    EIGHT,
    STRIPS,
    StagedRows,
    pack,
    store_box,
    store_rows,
    strip_bytes,
    write_box,
    write_strip,
)
from tensorir_ladder.kernels.roles import WARPS, Consumer
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.isa import ROW_BYTES, WGMMA_ROWS


@T.meta_class
class Boxes:
    """A few boxes of shared memory for each consumer warpgroup, through which results leave while others are written.

    ``results`` are all warpgroups' bytes, ``count`` boxes each. TMA takes a box at a time, which is written again once
    TMA has read it; ``again`` says that tile follows tile: where its boxes are no multiple of ``count``, a tile's first
    is the last's last. Where TMA cannot step over the output's rows, ``tensor_map`` is None: each warp stores strips of
    its own to the ``output`` itself, eight rows of all columns, for whole rows leave in far fewer stores than boxes.
    """

    def __init__(
        self,
        tensor_map: Var | tma.OneMatrix | None,
        product: WarpgroupProduct,
        results: Buffer,
        count: int,
        again: bool = False,
        output: Buffer | tma.PlainMatrix | None = None,
    ) -> None:
        self.tensor_map, self.product, self.results, self.count = tensor_map, product, results, count
        self.output, self.by_tma, self.again = output, tensor_map is not None, again
        self.meets_last = again and product.boxes % count != 0
        self.portions = product.boxes if self.by_tma else product.row_tiles * STRIPS

    def of(self, maps: tma.Maps) -> Boxes:
        """Return the same boxes for another output."""
        return Boxes(maps.c_map, self.product, self.results, self.count, self.again, maps.c)

    def place(self, group: Expr, box: int) -> Expr:
        """Return the byte at which a warpgroup's ``box``-th results are collected."""
        return (group * self.count + box % self.count) * BOX_BYTES

    @T.inline
    def store(self, packed, portion, row, column, group, warp, lane):
        """Emit, for a whole warpgroup, one portion's way out: shared memory, then the output."""
        if self.by_tma:
            if warp == 0 and tma.elected():
                T.ptx.cp.async_.bulk.wait_group.read(self.count - 1)
                if self.meets_last:
                    if portion == 0:
                        T.ptx.cp.async_.bulk.wait_group.read(0)
            T.cuda.warpgroup_sync(1 + group)
            write_box(packed, self.product, portion, self.results, self.place(group, portion), warp, lane)
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.warpgroup_sync(1 + group)
            if warp == 0 and tma.elected():
                place = T.meta_var(self.results.ptr_to([self.place(group, portion)]))
                store_box(self.tensor_map, self.product, portion, place, row, column)
                T.ptx.cp.async_.bulk.commit_group()
        else:
            T.cuda.warp_sync()  # its strip before has been read
            write_strip(packed, self.product, portion, self.results, self._strip_place(group, warp), lane)
            T.cuda.warp_sync()
            self._store_strip(portion, row, column, group, warp, lane)

    def _strip_place(self, group: Expr, warp: Expr) -> Expr:
        """Return the byte of a warp's strip: those of a warpgroup have its boxes' room."""
        return group * (self.count * BOX_BYTES) + warp * strip_bytes(self.product)

    def _store_strip(self, strip: int | Expr, row: Expr, column: Expr, group: Expr, warp: Expr, lane: Expr) -> None:
        """Emit a warp's stores of one of its strips to the output, where the warpgroup has (row, column) and on."""
        results = self.results.ptr_to([self._strip_place(group, warp)])
        above = strip // STRIPS * WGMMA_ROWS + warp * (WGMMA_ROWS // WARPS) + strip % STRIPS * EIGHT
        across = self.product.boxes_across * ROW_BYTES
        rows = StagedRows(1, EIGHT, EIGHT, self.product.columns, across, ROW_BYTES)
        store_rows(results, self.output, (row + above, column), lane, 0, rows)

    @T.inline
    def finish(self, here):
        """Emit the wait until all is stored; where launches overlap until it is read, and the block's memory free."""
        if self.by_tma:
            if here.warp == 0 and tma.elected():
                tma.await_stores(here.overlapped)


@T.meta_class
class LateResults:
    """A consumer's results of one tile, rounded to 16 bits, which leave in portions while it multiplies the next.

    With ``boxes`` None there are none: results have left another way. Of a batch, ``matrices`` have the output, one
    matrix of which a tile's results go to.
    """

    def __init__(self, boxes: Boxes | None, consumer: Consumer, matrices: tma.Matrices | None = None) -> None:
        self.boxes, self.consumer, self.collects = boxes, consumer, boxes is not None
        self.matrices = matrices
        if matrices is not None:
            self.matrix = T.local_scalar("int32")
        self.portions = 0 if boxes is None else boxes.portions
        self.packed = T.alloc_local((consumer.product.registers // 2,), "uint32")
        self.waiting = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.column = T.local_scalar("int32")
        self._begin()

    @T.inline
    def _begin(self):
        self.waiting = 0
        self.row = 0
        self.column = 0
        if self.matrices is not None:
            self.matrix = 0

    @T.inline
    def keep(self, row, column, dtype, matrix):
        """Emit the rounding of the consumer's sums, which belong to the (row, column) of a batch's ``matrix``."""
        pack(self.consumer.sums, self.packed, dtype)
        self.row = row
        self.column = column
        if self.matrices is not None:
            self.matrix = matrix

    @T.inline
    def store(self, marks, portion):
        """Emit one portion's way out, if it waits for that; nothing of one that there is not."""
        if self.collects:
            if self.waiting > 0 and portion < self.portions:
                count = T.meta_var(self.portions)
                here = T.meta_var(self.consumer.here)
                marks.mark("box begins", portion - count, boxes=count)
                boxes = T.meta_var(
                    self.boxes if self.matrices is None else self.boxes.of(self.matrices.of(self.matrix))
                )
                boxes.store(self.packed, portion, self.row, self.column, self.consumer.number, here.warp, here.lane)
                marks.mark("box stored", portion - count, boxes=count)
                marks.mark("results stored", -1, only=portion == count - 1)
