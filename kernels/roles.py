"""Warpgroups with roles: one loads, the others multiply, each with the registers that its role needs."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx import Var

from tensorir_ladder.kernels.held import bound, held, held_descriptor, named
from tensorir_ladder.kernels.panels import TmaPanels
from tensorir_ladder.kernels.ring import Barriers, RingState
from tensorir_ladder.kernels.tiles import PRODUCER_REGISTERS, RESULT_BOXES, RoleTile
from tensorir_ladder.kernels.tma import Multicast
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.isa import ROW_BYTES, WARPGROUP, WGMMA_ROWS

WARPS = 4  # of a warpgroup
UNSAID = 1  # k tiles that consumers of a block's only tile do not say to be empty: nothing is loaded behind the last
FEWEST_STAGES, MOST_STAGES = 2, 8  # a consumer keeps one k tile's wgmma in flight
MOST_SHARED_STAGES = 16  # of blocks that share loads: what is late for one of them is late for all
OVERLAPS = "overlaps_launches"  # a function's attribute: its kernel waits by itself for the one before it


def give_up_registers() -> None:
    """Emit, for the producer warpgroup: registers beyond 40 a thread go back to the block's pool."""
    T.evaluate(T.ptx["setmaxnreg.dec.sync.aligned.u32"](PRODUCER_REGISTERS))


def take_registers(tile: RoleTile) -> None:
    """Emit, for each consumer warpgroup: wait until the pool has the registers that it may have."""
    T.evaluate(T.ptx["setmaxnreg.inc.sync.aligned.u32"](tile.consumer_share))


def begin_after_last(next_at_once: bool) -> None:
    """Emit the wait until the kernel before in the stream has ended, whose blocks may still run when these begin.

    ``next_at_once`` also lets the next kernel's blocks begin; else :func:`let_next_begin` is said later.
    """
    T.evaluate(T.ptx.griddepcontrol.wait())
    if next_at_once:
        let_next_begin()


def let_next_begin() -> None:
    """Emit the word that the next kernel's blocks may begin, once all of this one's have said so or ended."""
    T.evaluate(T.ptx.griddepcontrol.launch_dependents())


@T.inline
def release(empty: Barriers, stage: Expr, here: RoleBlock):
    """Emit a consumer warp's word that it has read a stage: one arrival in each of the blocks that fill it."""
    if here.cluster > 1:
        if here.is_filled_by(here.lane):
            empty.arrive_at(stage, here.lane)
    elif here.lane == 0:
        empty.arrive(stage)


def arrive_relaxed() -> None:
    """Emit the word that a thread is at the cluster's barrier, which says nothing of its accesses to memory before.

    One that does (``release``, as TVM's ``cluster_sync`` has) is compiled to a fence for the whole GPU: some 0.5 us.
    """
    T.evaluate(T.ptx.barrier.cluster.arrive.relaxed.aligned())


def await_cluster() -> None:
    """Emit the wait until all the cluster's threads are at its barrier; this one has said that it is."""
    T.evaluate(T.ptx.barrier.cluster.wait.acquire.aligned())


@T.inline
def meet(overlapped):
    """Emit the wait of all the cluster's threads for each other: without a fence where launches overlap."""
    if overlapped:
        arrive_relaxed()
        await_cluster()
    else:
        T.cuda.cluster_sync()


@T.inline
def begin_together(here):
    """Emit what must lie between the initialization of barriers and their use, by a block or by its whole cluster."""
    if here.cluster > 1:
        T.ptx.fence.mbarrier_init.release.cluster()
        meet(here.overlapped)
    else:
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()


def await_all_read(consumers: int) -> None:
    """Emit the wait until all of a block's consumers have read the ring's last stage: results may then lie there.

    Nothing is on its way to the ring any more, whichever of the cluster's blocks loaded it. Each load that arrives here
    is of one of this block's k tiles, whose full barrier counts its bytes, and each consumer has waited for every k
    tile's. Nor do instructions read it: each consumer has retired all of its own.
    """
    await_consumers(consumers)


def await_consumers(consumers: int) -> None:
    """Emit the wait of all of a block's consumers for each other."""
    T.evaluate(T.ptx.bar.sync(T.uint32(1 + consumers), T.uint32(consumers * WARPGROUP)))  # others are the warpgroups'


@T.inline
def drain(empty, place, said, here):
    """Emit the producer's wait until all has arrived that consumers of its cluster say of the ring's last k tiles.

    Of as many as the ring has stages, those that are ``said`` to be empty. The cluster's barrier alone would not do:
    a relaxed arrival there may overtake one at an mbarrier, which then would come to a block that has ended.
    """
    if here.overlapped and here.cluster > 1:
        for _ in T.serial(said):
            empty.wait(place.stage, place.phase, "producer")
            place.advance()


@T.inline
def say_done(here):
    """Emit a thread's word that it loads and reads nothing more that its cluster shares, nor arrives anywhere.

    Once all have said so, every load of the cluster has arrived: each consumer has waited for all its full barriers.
    Blocks of parts say nothing: they meet before and behind their sums (:mod:`kernels.cluster_sums`).
    """
    if here.overlapped and here.cluster > 1 and here.parts == 1:
        T.cuda.warp_sync()
        arrive_relaxed()


@T.inline
def end_together(here):
    """Emit the wait for the cluster's other blocks, for which this one may have loads on their way.

    Steps wait for all that the others do, also for what they write to this block's memory, behind a fence. Where
    launches overlap, a block that ends late keeps the next one's waiting: threads :func:`say_done` before they store
    results, which the others need not wait for. Blocks of parts have met.
    """
    if here.cluster > 1 and here.parts == 1:
        T.cuda.warp_sync()
        if here.overlapped:
            await_cluster()
        else:
            T.cuda.cluster_sync()


@T.meta_class
class RoleBlock:
    """A thread's place: its block, among ``cluster`` that share loads, and its place among the block's warpgroups.

    These are ``producers``, one if it is not said how many, and ``consumers``.
    Of blocks that share ``across`` are beside each other, whose tiles have the same rows, and the others below these.
    Where the reduction has ``parts``, a cluster has so many blocks of each part; those of a part share their loads, and
    have numbers in a row.
    ``overlapped``: launches overlap, as the call's do and those of step 13's variant of that name; blocks then begin
    and end with no more order than they need. All other kernels of the steps keep the form that was measured.
    """

    def __init__(
        self,
        blocks: int,
        consumers: int,
        cluster: int = 1,
        across: int = 1,
        overlapped: bool = False,
        producers: int = 1,
        parts: int = 1,
    ) -> None:
        self.number = named("block", T.cta_id([blocks]))
        rank = named("member", T.cta_id_in_cluster([cluster * parts])) if cluster * parts > 1 else 0
        self.member = held("held_member", rank % cluster if parts > 1 else rank, overlapped and cluster > 1)
        self.part = held("held_part", rank // cluster if cluster > 1 else rank, overlapped) if parts > 1 else 0
        self.warpgroup = named("warpgroup", T.warpgroup_id([producers + consumers]))
        self.warp = named("warp", T.warp_id_in_wg([WARPS]))
        self.lane = named("lane", T.lane_id([32]))
        self.thread = named("thread", T.thread_id([(producers + consumers) * WARPGROUP]))
        self.cluster, self.parts, self.consumers, self.overlapped = cluster, parts, consumers, overlapped
        self.down, self.across = cluster // across, across
        # The larger group's blocks have numbers in a row, whose multiprocessors are neighbours: up to 1.4 times faster.
        self.down_first = self.down >= self.across

    @property
    def below(self) -> Expr:
        """The block's place among those of its cluster that are below each other."""
        if self.down == 1 or self.across == 1:
            return 0 if self.down == 1 else self.member
        return self.member % self.down if self.down_first else self.member // self.across

    @property
    def beside(self) -> Expr:
        """The block's place among those of its cluster that are beside each other."""
        if self.down == 1 or self.across == 1:
            return 0 if self.across == 1 else self.member
        return self.member // self.down if self.down_first else self.member % self.across

    @property
    def of_its_rows(self) -> Multicast:
        """The cluster's blocks beside this one, itself among them: what they read of A is the same."""
        if self.down_first:
            return Multicast(self.across, self._of_its_part(self.below), self.down, self.beside)
        return Multicast(self.across, self._of_its_part(self.below * self.across), 1, self.beside)

    @property
    def of_its_columns(self) -> Multicast:
        """The cluster's blocks above and below this one, itself among them: what they read of B is the same."""
        if self.down_first:
            return Multicast(self.down, self._of_its_part(self.beside * self.down), 1, self.below)
        return Multicast(self.down, self._of_its_part(self.beside), self.across, self.below)

    def _of_its_part(self, member: Expr) -> Expr:
        """Return the number in the cluster of one of the blocks that have this one's part."""
        return member if self.parts == 1 else self.part * self.cluster + member

    @property
    def fillers(self) -> int:
        """The number of blocks that fill this one's stages, which are those whose stages it fills."""
        return self.down + self.across - 1

    def is_filled_by(self, member: Expr) -> Expr:
        """Tell whether a number is that of a block that fills this one's stages: by its bit, without a branch."""
        if min(self.down, self.across) == 1 and self.parts == 1:
            return member < self.cluster
        fillers = T.Cast("uint32", self.of_its_rows.mask) | T.Cast("uint32", self.of_its_columns.mask)
        return T.bitwise_and(T.shift_right(fillers, T.Cast("uint32", member)), T.uint32(1)) != T.uint32(0)


@T.meta_class
class SharedRing:
    """A block's shared memory: a ring of stages, each with a full and an empty barrier, and room for results.

    ``result_bytes`` of the block: by default two boxes of 64 × 64 for each consumer. With ``in_ring`` they lie in the
    ring's memory, from its beginning: for who knows that the ring is read, and that nothing more is loaded.
    ``arrivals`` make a stage full, beside the bytes that TMA brings: by default that of the thread that says how many.
    """

    def __init__(
        self,
        pool: T.SMEMPool,
        stages: int,
        stage_bytes: int,
        consumers: int,
        bounded: bool = False,
        result_bytes: int = 0,
        in_ring: bool = False,
        arrivals: int = 1,
    ) -> None:
        self.stages, self.arrivals = stages, arrivals
        result_bytes = result_bytes or consumers * RESULT_BOXES * WGMMA_ROWS * ROW_BYTES
        ring_bytes = max(stages * stage_bytes, result_bytes if in_ring else 0)
        self.ring = named("ring", pool.alloc((ring_bytes,), "uint8", align=1024))
        if in_ring:
            self.results = self.ring
        else:
            boxes = pool.alloc((result_bytes,), "uint8", align=1024)
            self.results = named("results", boxes)
        self.full = Barriers(pool, stages, bounded)
        self.empty = Barriers(pool, stages, bounded)
        pool.commit()

    @T.inline
    def begin(self, here):
        """Emit the barriers' initialization, and what must lie before their use."""
        if here.thread == 0:
            self.full.initialize(self.arrivals)
            self.empty.initialize(here.consumers * WARPS * here.fillers)
        begin_together(here)


def loads_shares(product: WarpgroupProduct, blocks_of_a: int, blocks_of_b: int) -> bool:
    """Tell whether blocks that read the same A, so many, or the same B, load a share of each k tile of it.

    Else they load whole ones in turn. Shares arrive more evenly; in clusters both ways turns are faster.
    """
    return min(blocks_of_a, blocks_of_b) == 1 and product.a.shares(blocks_of_a) and product.b.shares(blocks_of_b)


def loaded_rows(product: WarpgroupProduct, blocks_of_a: int, blocks_of_b: int) -> tuple[int, int]:
    """Return the rows of the boxes of A and of B by which :func:`load_together` loads."""
    shares = loads_shares(product, blocks_of_a, blocks_of_b)
    return product.a.box_rows(blocks_of_a if shares else 1), product.b.box_rows(blocks_of_b if shares else 1)


@T.inline
def load_together(product, maps, corner, shared, stage, k_tile, of_a, of_b):
    """Emit one thread's loads of this block's part of a k tile, for all blocks that read the same.

    ``of_a`` and ``of_b`` are the :class:`Multicast` of either operand: a share of it each, or the whole where it is the
    block's turn (:func:`loads_shares`). The block's own stage is full with the bytes of both, whoever loads them.
    """
    first = T.meta_var(stage * product.stage_bytes)
    second = T.meta_var(first + product.a.bytes)
    full = T.meta_var(shared.full.at(stage))
    shared.full.expect(stage, product.loaded_bytes)
    if loads_shares(product, of_a.blocks, of_b.blocks):
        product.a.load(maps.a_map, corner[0], corner[2], shared.ring, first, full, of_a.place, of_a.blocks, of_a)
        product.b.load(maps.b_map, corner[1], corner[2], shared.ring, second, full, of_b.place, of_b.blocks, of_b)
    else:
        if k_tile % of_a.blocks == of_a.place:
            product.a.load(maps.a_map, corner[0], corner[2], shared.ring, first, full, to=of_a)
        if k_tile % of_b.blocks == of_b.place:
            product.b.load(maps.b_map, corner[1], corner[2], shared.ring, second, full, to=of_b)


@T.meta_class
class Consumer:
    """A consumer warpgroup: its part of the block tile, its sums, and its place in the ring.

    It has one k tile's wgmma in flight while it issues the next, and then says that the former's stage is empty.
    """

    def __init__(self, here: RoleBlock, shared: SharedRing, product: WarpgroupProduct, tile: RoleTile) -> None:
        self.here, self.shared, self.product = here, shared, product
        self.sums = named("sums", T.alloc_local((product.registers,), "float32"))
        self.last = T.local_scalar("int32")
        self.number = bound("consumer", here.warpgroup - 1)
        self.row = bound("group_row", self.number // tile.warpgroups[1] * tile.group_m)
        self.column = bound("group_column", self.number % tile.warpgroups[1] * tile.group_n)
        a, b = product.a.extent_offset(self.row), product.a.bytes + product.b.extent_offset(self.column)
        self.a, self.b = self._descriptor("a", product.a, a), self._descriptor("b", product.b, b)
        self.holds_there = here.overlapped and here.cluster > 1
        if self.holds_there:
            self.there = bound("there", shared.empty.there(0, here.lane, here.is_filled_by(here.lane)))
        self.read = RingState(shared.stages, 0)
        self._begin()

    def _descriptor(self, name: str, panels: TmaPanels, place: Expr) -> Var:
        """Emit where the warpgroup's part of an operand lies in a stage."""
        bind = held_descriptor if self.product.holds else bound
        return bind(name, panels.descriptor(self.shared.ring.ptr_to([place])))

    @T.inline
    def _begin(self):
        self.last = 0

    @T.inline
    def multiply(self, marks, k_tile, accumulate):
        """Emit the wgmma of a k tile that is there, which runs on; ``accumulate``: there are sums already."""
        self.product.multiply(self.sums, self.a, self.b, self.read.stage, accumulate)
        marks.mark("mma issued", k_tile)

    @T.inline
    def retire_former(self, marks, k_tile, is_one):
        """Emit the wait for the wgmma of the k tile before, if that ``is_one``, whose stage is empty then; advance."""
        retire(self.sums, 1)
        if is_one:
            self.say_empty(marks, k_tile - 1)
        self.last = self.read.stage
        self.read.advance()

    @T.inline
    def say_empty(self, marks, k_tile):
        """Emit the word that the last stage is read, to each block that fills it."""
        marks.mark("mma retired", k_tile)
        if self.holds_there:
            self.shared.empty.arrive_there(self.last, self.there)
        else:
            release(self.shared.empty, self.last, self.here)
