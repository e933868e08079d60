"""A matrix added to a product's rounded results, whose tile comes through the ring as k tiles do.

TMA brings it into stages that are empty, while the last k tiles are still multiplied; consumers read it by ``ldmatrix``
into the registers that their results have, and add pairs.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.codegen.launch_plan import RESIDUAL
from tensorir_ladder.kernels.ring import RingState
from tensorir_ladder.kernels.roles import Consumer, SharedRing, release
from tensorir_ladder.kernels.stamps import Role
from tensorir_ladder.kernels.tiles import RoleTile, SwappedTile
from tensorir_ladder.kernels.wgmma import WarpgroupProduct
from tensorir_ladder.schedules.errors import IllegalWorkload
from tensorir_ladder.schedules.isa import PANEL, PTX_TYPES, ROW_BYTES, WGMMA_ROWS
from tensorir_ladder.schedules.workloads import Matmul


def adds_residual(problem: Matmul, tile: RoleTile) -> bool:
    """Tell whether kernels of a tile can add a residual to a product's results."""
    one_across = not isinstance(tile, SwappedTile) and tile.warpgroups[1] == 1
    return one_across and tile.block_n % PANEL == 0 and epilogue.can_store_by_tma(problem, tile)


class Residual:
    """The tile of a matrix of the results' shape and dtype, in *turns*: a stage each, of some panels of 64 columns.

    ``rectified``: sums below 0 become 0.

    Raises
    ------
    IllegalWorkload : for results that do not leave by TMA, warpgroups side by side, and columns of no whole panels.
    """

    def __init__(self, problem: Matmul, tile: RoleTile, product: WarpgroupProduct, rectified: bool = False) -> None:
        if not adds_residual(problem, tile):
            raise IllegalWorkload(
                "a residual is added where results leave by TMA, in whole panels, by warpgroups below each other",
                value=f"rows of {problem.n} of {problem.out_dtype}, tile {tile}",
                limit="16-bit results, rows of multiples of 16 bytes, one warpgroup across, columns by the 64",
                remedy="choose another tile, or add it afterwards",
            )
        self.problem, self.product, self.rows, self.rectified = problem, product, tile.block_m, rectified
        self.panels, self.panel_bytes = tile.block_n // PANEL, tile.block_m * ROW_BYTES
        self.of_a_turn = min(self.panels, product.stage_bytes // self.panel_bytes)
        self.turns = -(-self.panels // self.of_a_turn)

    def bind(self, pointer: Var) -> Var:
        """Emit the residual's buffer behind a kernel's parameter, and its tensor map; before ``T.device_entry()``."""
        shape = (self.problem.m, self.problem.n)
        matrix = T.match_buffer(pointer, shape, self.problem.out_dtype, align=tma.TMA_STRIDE_BYTES)
        IRBuilder.name(RESIDUAL, matrix)
        return tma.encode_map("residual_map", matrix, self.rows)

    def panels_of(self, turn: int) -> range:
        """Return the panels of a turn."""
        return range(turn * self.of_a_turn, min(self.panels, (turn + 1) * self.of_a_turn))

    def load(self, tensor_map: Var, row: Expr, column: Expr, shared: SharedRing, stage: Expr, turn: int) -> None:
        """Emit one thread's loads of a turn's panels, of the tile that begins at (row, column), into a stage."""
        panels = self.panels_of(turn)
        shared.full.expect(stage, len(panels) * self.panel_bytes)
        for place, panel in enumerate(panels):
            into = shared.ring.ptr_to([stage * self.product.stage_bytes + place * self.panel_bytes])
            tma.load(tensor_map, column + panel * PANEL, row, into, shared.full.at(stage))

    def add(self, packed: Buffer, consumer: Consumer, turn: int) -> None:
        """Emit a thread's additions of a turn's panels, which are there, to its results, two in a register."""
        pair = T.alloc_local((4,), "uint32")
        for place, panel in enumerate(self.panels_of(turn)):
            for row_tile in range(self.product.row_tiles):
                first = consumer.read.stage * self.product.stage_bytes + place * self.panel_bytes
                first = first + (consumer.row + row_tile * WGMMA_ROWS) * ROW_BYTES
                self._add_box(packed, pair, row_tile * self.panels + panel, consumer, first)

    def _add_box(self, packed: Buffer, pair: Buffer, box: int, consumer: Consumer, first: Expr) -> None:
        here = consumer.here
        pairs = f"{PTX_TYPES[self.problem.out_dtype]}x2"
        add, larger = T.ptx[f"add.rn.{pairs}"], T.ptx[f"max.NaN.{pairs}"]
        for square in range(PANEL // 16):
            source = consumer.shared.ring.ptr_to([first + epilogue.piece_of(square, here.warp, here.lane)])
            T.evaluate(T.ptx.ldmatrix.sync.aligned.m8n8.x4.shared.b16(*(pair[i] for i in range(4)), source))
            for i in range(4):
                result = packed[box * PANEL // 4 + square * 4 + i]
                T.evaluate(add(result, result, pair[i]))
                if self.rectified:
                    T.evaluate(larger(result, result, T.uint32(0)))


def load_residual(
    residual: Residual,
    tensor_map: Var,
    corner: tuple[Expr, Expr],
    shared: SharedRing,
    fill: RingState,
    loads: Role,
    k_tiles: Expr | int,
) -> None:
    """Emit, for the producer, the turns behind the k tiles of a tile that begins at ``corner``."""
    for turn in range(residual.turns):
        loads.wait("empty", shared.empty, fill, k_tiles + turn, "producer")
        residual.load(tensor_map, *corner, shared, fill.stage, turn)
        loads.mark("load issued", k_tiles + turn)
        fill.advance()


def add_residual(residual: Residual, packed: Buffer, consumer: Consumer, marks: Role, k_tiles: Expr | int) -> None:
    """Emit, for a consumer, the turns behind its k tiles: wait for each, add it to the results, free its stage."""
    for turn in range(residual.turns):
        marks.wait("full", consumer.shared.full, consumer.read, k_tiles + turn, "consumer")
        residual.add(packed, consumer, turn)
        T.evaluate(T.cuda.warp_sync())
        release(consumer.shared.empty, consumer.read.stage, consumer.here)
        consumer.read.advance()
