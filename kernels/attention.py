"""Fused attention: both products and the softmax between them, without scores in memory.

``O = softmax(scale · Q Kᵀ, masked) V`` of each head. A block takes 64 queries for each of its consumer warpgroups and
goes along the keys: scores are wgmma's sums, which the softmax turns into weights where they are
(:mod:`.online_softmax`); rounded to 16 bits these are the first operand of the second product, from registers. Source
of the method: Dao, "FlashAttention-2" (arXiv 2307.08691); Shah et al., "FlashAttention-3" (arXiv 2407.08608), for the
overlap of a tile's softmax with the products of the tiles beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.target import Target
from tvm.tirx import Buffer, Var

from tensorir_ladder.kernels import epilogue, tma
from tensorir_ladder.kernels.attention_mask import Mask, MaskedScores
from tensorir_ladder.kernels.codegen.launch_plan import COUNTED
from tensorir_ladder.kernels.fused_epilogue import without
from tensorir_ladder.kernels.held import bound
from tensorir_ladder.kernels.online_softmax import HALVES, OnlineSoftmax
from tensorir_ladder.kernels.panels import TmaPanels
from tensorir_ladder.kernels.ring import Barriers, RingState, check_stages
from tensorir_ladder.kernels.roles import (
    FEWEST_STAGES,
    MOST_STAGES,
    RoleBlock,
    SharedRing,
    give_up_registers,
    release,
    take_registers,
)
from tensorir_ladder.kernels.short_stack import on_a_short_stack
from tensorir_ladder.kernels.tiles import BARRIER_BYTES, MOST_CONSUMERS, RoleTile
from tensorir_ladder.kernels.wgmma import WarpgroupProduct, retire
from tensorir_ladder.schedules.errors import IllegalTile, IllegalWorkload
from tensorir_ladder.schedules.isa import (
    PANEL,
    PTX_TYPES,
    SHARED_KIB,
    STEP,
    WARPGROUP,
    WGMMA_ARCH,
    WGMMA_ROWS,
    WIDEST,
    wgmma_element,
)
from tensorir_ladder.schedules.tiles import WGMMA_REGISTERS
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS

BY_TOKEN, BY_HEAD = "bshd", "bhsd"
LAYOUTS = (BY_TOKEN, BY_HEAD)
FIRST_TURN = 1 + MOST_CONSUMERS  # the number of a named barrier; those before it are the consumers' own
MOST_PLACES = 4  # for queries of different tiles in shared memory; with n of them, n - 1 tiles are loaded ahead
SCALES = (1e-15, 1e15)  # what is left out still has no weight, and the least score times it is a float32
CAPS = (1e-3, 1e6)  # the same
HEADS = (32, 64, 80, 96, 128, 256)  # elements of a head: steps of wgmma, and sums that registers hold


@dataclass(frozen=True)
class Attention:
    """``O[i] = sum over j of w[i, j] · V[j]``, ``w[i] = softmax over j of scale · Q[i] · K[j]``, for each head.

    Q and O have ``heads`` of ``head`` elements, K and V ``kv_heads``, each of which ``heads / kv_heads`` neighbouring
    heads share. ``causal``: query i sees the keys j <= i alone; ``from_end``, as many more as there are more keys than
    queries, so that the last query sees all; with a ``window``, the last ``window`` of these. ``soft_cap``: scaled
    scores become ``soft_cap · tanh(scores / soft_cap)`` (error: :meth:`OnlineSoftmax.cap`). ``mask`` hides further
    keys, or is added to scaled, capped scores. Results of a query that sees no key are zeros. ``starts`` says for Q, K
    and V in which matrix of their tensor map, and in which column there, they begin (:attr:`matrices`): they may be
    parts of larger tensors. Layouts are "bshd" [batch, tokens, heads, head] or "bhsd" [batch, heads, tokens, head].
    Scores, weights' sums and results are added up in float32; weights, at most 1, are rounded to ``dtype`` for the
    second product.

    Raises
    ------
    IllegalWorkload : on construction, for extents below 1, heads that cannot be shared out, elements of a head that are
        not 32, 64, 80, 96, 128 or 256, another dtype or layout, a scale that is not from 1e-15 to 1e15, ``from_end`` or
        a window without ``causal``, a window below 1, a cap that is not from 1e-3 to 1e6, and operands of 2**31
        elements.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head: int
    dtype: str
    scale: float
    causal: bool = False
    q_layout: str = BY_TOKEN
    k_layout: str = BY_TOKEN
    v_layout: str = BY_TOKEN
    o_layout: str = BY_TOKEN
    from_end: bool = False
    mask: Mask | None = None
    starts: tuple[tuple[int, int], ...] = ((0, 0),) * 3
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        extents = (self.batch, self.queries, self.keys, self.heads, self.kv_heads)
        layouts = (self.q_layout, self.k_layout, self.v_layout, self.o_layout)
        elements = self.batch * max(self.queries * self.heads, self.keys * self.kv_heads) * self.head
        masked = prod(self.mask_shape) if self.mask else 0
        for wrong, what, value, limit in (
            (min(extents) < 1, "extents", extents, "1 and more"),
            (self.head not in HEADS, "elements of a head", self.head, " | ".join(map(str, HEADS))),
            (
                self.kv_heads > 0 and self.heads % self.kv_heads,
                "heads that share keys",
                f"{self.heads} heads, {self.kv_heads} of keys",
                "a multiple of the keys' heads",
            ),
            (self.dtype not in PTX_TYPES, "dtype", self.dtype, " | ".join(PTX_TYPES)),
            (not set(layouts) <= set(LAYOUTS), "layouts", layouts, " | ".join(LAYOUTS)),
            (not SCALES[0] <= self.scale <= SCALES[1], "scale", self.scale, "{:g} to {:g}".format(*SCALES)),
            (self.from_end and not self.causal, "mask from the end", "not causal", "causal"),
            (self.window is not None and not self.causal, "window", "not causal", "causal"),
            (self.window is not None and self.window < 1, "window", self.window, "1 and more"),
            (
                self.soft_cap is not None and not CAPS[0] <= self.soft_cap <= CAPS[1],
                "soft cap",
                self.soft_cap,
                "{:g} to {:g}".format(*CAPS),
            ),
            (elements >= MAX_ELEMENTS, "operand", f"{elements} elements", f"below {MAX_ELEMENTS}"),
            (masked >= MAX_ELEMENTS, "mask", f"{masked} elements", f"below {MAX_ELEMENTS}"),
        ):
            if wrong:
                raise IllegalWorkload(
                    f"attention takes no such {what}",
                    value=value,
                    limit=limit,
                    remedy="compute it by two products and a softmax, or in parts",
                )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the operands as they lie, by name: Q, K, V, O."""
        tokens = {"Q": self.queries, "K": self.keys, "V": self.keys, "O": self.queries}
        heads = {"Q": self.heads, "K": self.kv_heads, "V": self.kv_heads, "O": self.heads}
        return {
            name: (self.batch, *((tokens[name], heads[name]) if by_token else (heads[name], tokens[name])), self.head)
            for name, by_token in self._by_token.items()
        }

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """List them as matrices side by side, as tensor maps describe them: how many, rows of tokens, columns."""
        return {
            name: (shape[0], shape[1], shape[2] * shape[3]) if by_token else (shape[0] * shape[1], shape[2], shape[3])
            for (name, shape), by_token in zip(self.shapes.items(), self._by_token.values())
        }

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The mask's shape; empty without one."""
        return self.mask.shape((self.batch, self.heads, self.queries), self.keys) if self.mask else ()

    @property
    def may_be_empty(self) -> bool:
        """True where a query may see no key, or none of the first step's."""
        return self.from_end or self.mask is not None or self.window is not None

    @property
    def score_scale(self) -> float:
        """Return the factor of scores before a mask is added: their cap, where they are tanh of scores by then."""
        return self.scale if self.soft_cap is None else self.soft_cap

    @property
    def softmax_scale(self) -> float:
        """Return the factor of scores in the softmax: 1 with a mask that is added, to scores scaled before."""
        return 1.0 if self.mask and self.mask.is_added else self.score_scale

    def place(self, name: str, one: Expr, head: Expr) -> tuple[Expr, Expr]:
        """Return which matrix of an operand a head of the batch's ``one`` is in, and its first column there."""
        heads = self.heads if name in "QO" else self.kv_heads
        matrix, column = (one, head * self.head) if self._by_token[name] else (one * heads + head, 0)
        first_matrix, first_column = dict(zip("QKV", self.starts)).get(name, (0, 0))
        return matrix + first_matrix if first_matrix else matrix, column + first_column if first_column else column

    @property
    def _by_token(self) -> dict[str, bool]:
        layouts = (self.q_layout, self.k_layout, self.v_layout, self.o_layout)
        return {name: layout == BY_TOKEN for name, layout in zip("QKVO", layouts)}


@dataclass(frozen=True)
class AttentionTile:
    """Queries of a block, 64 to each consumer warpgroup, and keys of a step along them."""

    rows: int = 128
    keys: int = 128

    @property
    def roles(self) -> RoleTile:
        """The tile of the first product, by which roles share registers."""
        return RoleTile((self.rows, self.keys, PANEL), (self.rows // WGMMA_ROWS, 1))

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.rows // WGMMA_ROWS

    def consumer_registers(self, head: int, mask: Mask | None = None) -> int:
        """Return a consumer's registers: results, scores, weights in 16 bits, a mask, and what addresses take."""
        masked = mask.registers(self.keys) if mask else 0
        return head // 2 + self.keys // 2 + self.keys // 4 + masked + WGMMA_REGISTERS

    def stage_bytes(self, head: int) -> int:
        """Return the bytes of a stage: the keys of a step, or their values, in whole panels."""
        return TmaPanels(self.keys, head, "k").bytes

    def smem_bytes(self, head: int, stages: int, places: int = 1) -> int:
        """Return the shared memory of a block: its queries, whose place results take; the ring; the barriers."""
        return places * (TmaPanels(self.rows, head, "k").bytes + 2 * BARRIER_BYTES) + stages * (
            self.stage_bytes(head) + 2 * BARRIER_BYTES
        )

    def places(self, head: int, stages: int) -> int:
        """Return for how many tiles' queries, up to MOST_PLACES, a ring of ``stages`` leaves a block room."""
        most = SHARED_KIB[90] * 1024
        fitting = [count for count in range(1, MOST_PLACES + 1) if self.smem_bytes(head, stages, count) <= most]
        return max(fitting, default=1)

    def violations(self, target: Target, head: int, stages: int, mask: Mask | None = None) -> list[str]:
        """Return a clause for every limit that this tile breaks on ``target``."""
        found = [RoleTile.missing(target)] if RoleTile.missing(target) else []
        if self.rows not in (WGMMA_ROWS, 2 * WGMMA_ROWS, 3 * WGMMA_ROWS):
            return [*found, f"{self.rows} queries, not 64, 128 or 192"]
        if self.keys % STEP or not STEP <= self.keys <= WIDEST:
            return [*found, f"{self.keys} keys, not 16 to {WIDEST} by the {STEP}"]
        registers, share = self.consumer_registers(head, mask), self.roles.consumer_share
        if registers > share:
            found.append(f"{registers} registers a consumer, limit {share}")
        shared, most = self.smem_bytes(head, stages), SHARED_KIB[90] * 1024
        if shared > most:
            found.append(f"{shared} bytes of shared memory, limit {most}")
        return found

    def check(self, target: Target, head: int, stages: int, mask: Mask | None = None) -> None:
        """Raise IllegalTile for what :meth:`violations` names."""
        if found := self.violations(target, head, stages, mask):
            raise IllegalTile(
                "no attention in such tiles: " + "; ".join(found), remedy="take smaller tiles or fewer stages"
            )


@dataclass(frozen=True)
class AttentionForm:
    """A kernel's tile and stages, and how many queries it takes in a time: 1 for those of the usual form."""

    tile: AttentionTile
    stages: int
    speed: float = 1.0


TILE, STAGES = AttentionTile(), 4
HALF, MORE = AttentionTile(WGMMA_ROWS), 3 * WGMMA_ROWS
# By elements of a head; the usual form first:
FORMS = {
    **dict.fromkeys(
        (32, 64), (AttentionForm(TILE, 6), AttentionForm(HALF, 6, 0.7), AttentionForm(AttentionTile(MORE, 96), 6, 1.06))
    ),
    **dict.fromkeys(
        (80, 96), (AttentionForm(TILE, 4), AttentionForm(HALF, 4, 0.7), AttentionForm(AttentionTile(MORE, 80), 4, 1.04))
    ),
    128: (AttentionForm(TILE, 4), AttentionForm(HALF, 4, 0.7), AttentionForm(AttentionTile(MORE, 64), 5, 0.95)),
    256: (AttentionForm(AttentionTile(keys=64), 3), AttentionForm(AttentionTile(WGMMA_ROWS, 64), 4, 0.7)),
}
SM_90A = {"kind": "cuda", "arch": WGMMA_ARCH}


def form_for(
    head: int,
    multiprocessors: int,
    many: int | None = None,
    queries: int | None = None,
    causal: bool = False,
    mask: Mask | None = None,
) -> AttentionForm:
    """Choose the form of a kernel for ``many`` heads, a batch's together, of ``head`` elements each.

    None stands for what only run time knows: the usual form of 128 queries takes that. Else the form whose
    multiprocessor with most tiles is first through, by its number of queries and the form's speed; ``causal`` tiles
    are shared out evenly, and those of 192 queries are no faster then. Speeds were measured on an H200 with 12 heads of
    64, 96 and 128 elements of 197 to 6000 tokens; other heads take those of their neighbours. With a mask that
    registers have no place for, a step takes 64 keys.
    """
    forms = [form for form in FORMS[head] if not (causal and form.tile.rows > TILE.rows)]

    def time_of(form: AttentionForm) -> float:
        tiles = (many or 0) * -(-(queries or 0) // form.tile.rows)
        return -(-tiles // multiprocessors) * form.tile.rows / form.speed

    form = forms[0] if many is None or queries is None else min(forms, key=time_of)
    fits = not form.tile.violations(Target(SM_90A), head, form.stages, mask)
    return form if fits else replace(form, tile=replace(form.tile, keys=PANEL))


@on_a_short_stack
def attention(
    problem: Attention,
    tile: AttentionTile = TILE,
    stages: int = STAGES,
    *,
    workers: int,
    any_rows: bool = False,
) -> tirx.PrimFunc:
    """``main(Q, K, V, M, O)``: blocks that stay, each with one tile of a head's queries after another; M is the mask.

    ::

        producer, one thread, for each tile:      each consumer warpgroup, 64 queries, for each tile:
          load K_0, the queries                     scores = Q K_0ᵀ;  their softmax so far, in place;  O = 0
          for each step j = 1, 2, ...:              for each step j = 1, 2, ...:
            load K_j, V_(j-1)                         wait for O;  scale it down;  weights = rounded scores
          load V of the last step                     scores = Q K_jᵀ                # issued; both run on
                                                      O     += weights V_(j-1)
                                                      wait for the scores;  their softmax so far, beside O
                                                    the same with V of the last step;  O / sum of weights -> TMA store

    Keys and values are the ring's stages in the order in which they are read; while results of one tile leave, the ring
    fills for the next, and its queries come to another place, where that is (:meth:`AttentionTile.places`). Tokens
    beyond the last are zeros on loads, and left out on stores. With ``causal`` a tile ends with the last key that one
    of its queries sees, and tiles of the last queries, which have most to do, come first; blocks take tiles from either
    end of each round by turns, so that none has the longest of all. With a window a tile begins with the step that has
    the first key that one of its queries sees. Consumers issue a step's products in turns, so that
    one computes its softmax while the other's products run.

    ``workers`` blocks are launched, or as many as there are tiles if these are fewer: one for each multiprocessor.

    Operands are three-dimensional (:attr:`Attention.matrices`). With ``any_rows`` the kernel takes any batch and any
    numbers of queries and keys, in three further parameters: who launches it gives tensor maps of the tokens at hand,
    and as many blocks. The numbers of ``problem`` only have to be some.

    Raises
    ------
    IllegalTile : for a tile that wgmma, registers or shared memory do not take.
    IllegalPipeline : for stages below 2 or above 8.
    """
    tile.check(Target(SM_90A), problem.head, stages, problem.mask)
    check_stages(stages, FEWEST_STAGES, MOST_STAGES)
    head = problem.head
    q, k, v = TmaPanels(WGMMA_ROWS, head, "k"), TmaPanels(tile.keys, head, "k"), TmaPanels(head, tile.keys, "n")
    scored = WarpgroupProduct(q, k, tile.keys, problem.dtype)
    summed = WarpgroupProduct(q, v, head, problem.dtype)
    many, high = problem.batch * problem.heads, -(-problem.queries // tile.rows)
    again = any_rows or many * high > workers
    places = tile.places(head, stages) if again else 1
    results = tile.consumers * q.bytes

    @T.prim_func
    def main(
        Q_ptr: T.handle,
        K_ptr: T.handle,
        V_ptr: T.handle,
        M_ptr: T.handle,
        O_ptr: T.handle,
        batch: T.int32,
        queries: T.int32,
        keys: T.int32,
    ):
        maps = T.meta_var(_maps(problem, tile, (Q_ptr, K_ptr, V_ptr, O_ptr)))
        mask = T.meta_var(_mask(problem, M_ptr, any_rows))
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        here = RoleBlock(min(many * high, workers), tile.consumers)
        pool = T.SMEMPool()
        queried = Barriers(pool, places)
        answered = Barriers(pool, places)
        shared = SharedRing(pool, stages, k.bytes, tile.consumers, result_bytes=places * results)
        if here.thread == 0:
            queried.initialize(1)
            answered.initialize(tile.consumers)
        shared.begin(here)
        own_queries = T.meta_var(queries if any_rows else problem.queries)
        own_keys = T.meta_var(keys if any_rows else problem.keys)
        own_many = T.meta_var(batch * problem.heads if any_rows else many)
        own_high = T.meta_var((queries + (tile.rows - 1)) // tile.rows if any_rows else high)
        extents = T.meta_var((own_many, own_high, own_queries, own_keys))
        later = T.meta_var(own_keys - own_queries if problem.from_end else 0)
        rounds = T.meta_var((own_many * own_high + (workers - 1)) // workers)
        if here.warpgroup == 0:  # the producer
            give_up_registers()
            if here.warp == 0 and tma.elected():
                fill = RingState(stages, 1)  # 1: the ring's first turn waits for nobody
                asks = RingState(places, 1)
                for turn in T.serial(rounds):
                    number: T.let = _number(here.number, turn, workers)
                    if number < own_many * own_high:
                        at = T.meta_var(_Place(problem, tile, maps, number, *extents))
                        _fill(shared, fill, k, at.k, at.begin)
                        if again:
                            answered.wait(asks.stage, asks.phase, "producer")
                        queried.expect(asks.stage, results)
                        for group in T.unroll(tile.consumers):
                            into = T.meta_var(asks.stage * results + group * q.bytes)
                            row = T.meta_var(at.row + group * WGMMA_ROWS)
                            _load(q, at.q, row, shared.results, into, queried.at(asks.stage))
                        for step in T.serial(at.steps - 1):
                            _fill(shared, fill, k, at.k, at.begin + (step + 1) * tile.keys)
                            _fill(shared, fill, v, at.v, at.begin + step * tile.keys)
                        _fill(shared, fill, v, at.v, at.begin + (at.steps - 1) * tile.keys)
                        asks.advance()
        else:  # a consumer
            take_registers(tile.roles)
            mine = _Consumer(here, shared, problem, tile, scored, summed)
            turns = T.meta_var(_Turns(tile.consumers, mine.number))
            asked = RingState(places, 0)
            turns.begin()
            for turn in T.serial(rounds):
                number: T.let = _number(here.number, turn, workers)
                if number < own_many * own_high:
                    at = T.meta_var(_Place(problem, tile, maps, number, *extents))
                    first: T.let = at.row + mine.number * WGMMA_ROWS
                    seen = T.meta_var(mine.seen(first + later, own_keys))
                    masked = T.meta_var(mine.masked(mask, at.one, at.own, first, own_queries, own_keys))
                    mine.begin(asked.stage * results)
                    queried.wait(asked.stage, asked.phase, "consumer")
                    mine.score()
                    if places > 1:
                        if turn > 0:
                            before = T.meta_var((asked.stage + places - 1) % places)
                            mine.answered(answered, before)  # whose results have left by now
                    masked.fetch(at.begin)
                    mine.scored(0)
                    mine.cap()
                    masked.apply()
                    seen.leave_out(at.begin)
                    mine.softmax.take(True)
                    for step in T.serial(at.steps - 1):
                        mine.round(step > 0)
                        turns.wait()
                        mine.score()  # issued; it runs on
                        mine.sum()  # so does this
                        turns.pass_on()
                        begin = T.meta_var(at.begin + (step + 1) * tile.keys)
                        masked.fetch(begin)
                        mine.scored(1)
                        mine.cap()
                        masked.apply()
                        seen.leave_out(begin)
                        mine.softmax.take(False)  # beside the sums: no wait for these must stand in this basic block
                    mine.round(at.steps > 1)
                    mine.sum()
                    mine.summed()
                    mine.softmax.divide(mine.sums)
                    mine.store(at.o, first)
                    if again and places == 1:
                        mine.answered(answered, 0)
                    asked.advance()
            if here.warp == 0 and tma.elected():
                tma.await_stores()

    return without(main, *([] if any_rows else COUNTED), *([] if problem.mask else ["M_ptr"]))


def _number(block: Expr, turn: Expr, workers: int) -> Expr:
    """Return the number of a block's tile in a round: from the first of the round's on, or from the last by turns."""
    return turn * workers + T.Select(turn % 2 == 0, block, workers - 1 - block)


class _Place:
    """Emit what a tile's number says: its head ``own`` of the batch's ``one``, its first query and its steps of keys.

    ``begin`` is the first step's first key.
    ``q``, ``k``, ``v`` and ``o`` are where the head's operands begin.
    """

    def __init__(
        self,
        problem: Attention,
        tile: AttentionTile,
        maps: dict[str, Var],
        number: Expr,
        many: Expr,
        high: Expr,
        queries: Expr,
        keys: Expr,
    ) -> None:
        self.one = bound("one", T.truncmod(number, many) // problem.heads)
        self.own = bound("own", T.truncmod(number, many) % problem.heads)
        self.row = bound("row", (high - 1 - T.truncdiv(number, many)) * tile.rows)
        seen, self.begin = keys, 0
        if problem.causal:
            first = self.row + (keys - queries if problem.from_end else 0)  # the last key that the first query sees
            below = first + tile.rows
            seen = tirx.max(tirx.min(keys, below), 1) if problem.from_end else tirx.min(keys, below)
        if problem.window is not None:
            skipped = tirx.max(tirx.min(first - (problem.window - 1), seen - 1), 0)
            self.begin = bound("begin", skipped // tile.keys * tile.keys)
        self.steps = bound("steps", (seen - self.begin + (tile.keys - 1)) // tile.keys)
        sharing = problem.heads // problem.kv_heads
        heads = {"Q": self.own, "K": self.own // sharing, "V": self.own // sharing, "O": self.own}
        self.q, self.k, self.v, self.o = (
            _Head(maps[name], *problem.place(name, self.one, head)) for name, head in heads.items()
        )


class _Head:
    """Place a head of an operand: its tensor map, which of the map's matrices, and its first column there."""

    def __init__(self, tensor_map: Var, number: Expr, column: Expr) -> None:
        self.map, self.column = tma.OneMatrix(tensor_map, number), column


def _maps(problem: Attention, tile: AttentionTile, pointers: tuple[Var, ...]) -> dict[str, Var]:
    """Emit the operands' buffers and the host's encoding of their tensor maps; before ``T.device_entry()``."""
    rows = {"Q": WGMMA_ROWS, "K": tile.keys, "V": tile.keys, "O": WGMMA_ROWS}
    found = {}
    for (name, shape), pointer in zip(problem.matrices.items(), pointers):
        matrix = T.match_buffer(pointer, shape, problem.dtype, align=tma.TMA_STRIDE_BYTES)
        IRBuilder.name(name, matrix)
        columns = min(PANEL, problem.head) if name == "O" else PANEL  # what is loaded beyond a head is not read
        found[name] = tma.encode_map(f"{name.lower()}_map", matrix, rows[name], columns)
    return found


def _mask(problem: Attention, pointer: Var, any_rows: bool) -> Buffer | None:
    """Emit the mask's buffer, of any length where run time brings extents; None without a mask."""
    if problem.mask is None:
        return None
    extents = (
        ((MAX_ELEMENTS - 2, 1, 1), 1) if any_rows else ((problem.batch, problem.heads, problem.queries), problem.keys)
    )
    return problem.mask.bind(pointer, *extents)


def _load(panels: TmaPanels, place: _Head, token: Expr, into: Buffer, offset: Expr, barrier: Expr) -> None:
    """Emit one thread's loads of a head of some tokens, from ``token`` on, to byte ``offset`` of shared memory."""
    along = (token, place.column) if panels.major == "k" else (place.column, token)
    panels.load(place.map, *along, into, offset, barrier)


@T.inline
def _fill(shared, fill, panels, place, token):
    """Emit the producer's wait for the next stage to be empty, and its filling with keys or values."""
    shared.empty.wait(fill.stage, fill.phase, "producer")
    shared.full.expect(fill.stage, panels.bytes)
    _load(panels, place, token, shared.ring, fill.stage * panels.bytes, shared.full.at(fill.stage))
    fill.advance()


@T.meta_class
class _Turns:
    """Turns that so many consumers take, each with a named barrier of its own; nothing where there is one."""

    def __init__(self, consumers: int, number: Expr) -> None:
        self.consumers, self.number = consumers, number

    @T.inline
    def begin(self):
        """Emit the last consumer's word that the first may begin."""
        if self.consumers > 1:
            if self.number == self.consumers - 1:
                T.ptx.bar.arrive(T.uint32(FIRST_TURN), T.uint32(2 * WARPGROUP))

    @T.inline
    def wait(self):
        """Emit the wait for this consumer's turn."""
        if self.consumers > 1:
            T.ptx.bar.sync(T.Cast("uint32", FIRST_TURN + self.number), T.uint32(2 * WARPGROUP))

    @T.inline
    def pass_on(self):
        """Emit the word that the next consumer may begin."""
        if self.consumers > 1:
            after = T.meta_var((self.number + 1) % self.consumers)
            T.ptx.bar.arrive(T.Cast("uint32", FIRST_TURN + after), T.uint32(2 * WARPGROUP))


class _Unmasked:
    """Scores that no mask changes."""

    def fetch(self, begin: Expr) -> None:
        """Emit nothing."""

    def apply(self) -> None:
        """Emit nothing."""


@T.meta_class
class _Masked:
    """Scores that a mask changes, of keys below a bound."""

    def __init__(self, scores: MaskedScores, keys: Expr) -> None:
        self.scores, self.keys = scores, keys

    @T.inline
    def fetch(self, begin):
        """Emit the loads of a step's elements, while its scores are computed."""
        self.scores.fetch(begin, self.keys)

    @T.inline
    def apply(self):
        """Emit what the mask does to a step's scores; a step whose keys are all seen is left as it is."""
        if self.scores.mask.votes:
            if not self.scores.all_seen():
                self.scores.apply()
        else:
            self.scores.apply()


@T.meta_class
class _Seen:
    """The keys that a warpgroup's queries see: those below the first of ``keys`` and of later ones, in the window.

    ``last`` is the last key that the warpgroup's first query sees, if attention is causal.
    """

    def __init__(self, consumer: _Consumer, last: Expr, keys: Expr) -> None:
        here, problem = consumer.here, consumer.problem
        self.softmax, self.lane, self.step, self.window = (
            consumer.softmax,
            here.lane,
            consumer.by_keys.columns,
            problem.window,
        )
        self.all = tirx.min(keys, last + 1) if problem.causal else keys  # keys before this each query sees
        self.some = last + WGMMA_ROWS - (problem.window or 0)  # keys before this not each query sees
        rows = [last + 1 + wgmma_element(here.warp, here.lane, 2 * half)[0] for half in range(HALVES)]
        self.bounds = [T.Bind(tirx.min(keys, row)) if problem.causal else keys for row in rows]
        self.firsts = [row - (problem.window or 0) for row in rows]

    @T.inline
    def leave_out(self, begin):
        """Emit the removal of a step's scores whose keys are not seen; ``begin`` is its first key."""
        if begin + self.step > self.all:
            self.softmax.leave_out([bound - begin for bound in self.bounds], self.lane)
        if self.window is not None:
            if begin < self.some:
                self.softmax.leave_out([first - begin for first in self.firsts], self.lane, True)


@T.meta_class
class _Consumer:
    """A consumer warpgroup: its queries' scores, weights and results, and its place in the ring."""

    def __init__(
        self,
        here: RoleBlock,
        shared: SharedRing,
        problem: Attention,
        tile: AttentionTile,
        by_keys: WarpgroupProduct,
        by_values: WarpgroupProduct,
    ) -> None:
        self.here, self.shared, self.problem = here, shared, problem
        self.by_keys, self.by_values = by_keys, by_values
        self.scores = T.alloc_local((by_keys.registers,), "float32")
        self.sums = T.alloc_local((by_values.registers,), "float32")
        self.weights = T.alloc_local((by_keys.registers // 2,), "uint32")
        self.number = T.Bind(here.warpgroup - 1)
        chains = 2 if problem.head <= PANEL else 1  # 2.5 % faster on an H200; with longer heads as fast, or slower
        self.softmax = OnlineSoftmax(self.scores, problem.softmax_scale, problem.may_be_empty, chains)
        self.own = T.local_scalar("int32")  # its queries' bytes, where its results go at the end
        self.q = T.local_scalar("uint64")
        self.k = T.Bind(by_keys.b.descriptor(shared.ring.ptr_to([0])))
        self.v = T.Bind(by_values.b.descriptor(shared.ring.ptr_to([0])))
        self.read = RingState(shared.stages, 0)
        self.keys_at = T.local_scalar("int32")  # stages that are read
        self.values_at = T.local_scalar("int32")
        for name in ("number", "own", "q", "k", "v", "scores", "sums", "weights", "keys_at", "values_at"):
            IRBuilder.name(name, getattr(self, name))

    @T.inline
    def begin(self, place):
        """Emit the beginning of a tile, whose queries come to byte ``place`` of the block's room for results."""
        self.own = place + self.number * self.by_keys.a.bytes
        self.q = self.by_keys.a.descriptor(self.shared.results.ptr_to([self.own]))
        for register in T.unroll(self.by_values.registers):
            self.sums[register] = T.float32(0)

    def masked(
        self, mask: Buffer | None, one: Expr, own: Expr, first: Expr, queries: Expr, keys: Expr
    ) -> _Masked | _Unmasked:
        """Find the mask's rows for a lane's queries of head ``own`` of the batch's ``one``, from query ``first`` on."""
        if mask is None:
            return _Unmasked()
        rows = []
        for half in range(HALVES):
            query = first + wgmma_element(self.here.warp, self.here.lane, 2 * half)[0]
            row = T.int32(0)
            for axis, extent, place in (
                ("batch", 1, one),
                ("heads", self.problem.heads, own),
                ("queries", queries, tirx.min(query, queries - 1)),
            ):
                row = row * extent + place if axis in self.problem.mask.along else row
            rows.append(T.Bind(row * keys))
        scores = MaskedScores(self.problem.mask, mask, self.scores, self.problem.score_scale, rows, self.here.lane)
        IRBuilder.name("masked", scores.found)
        return _Masked(scores, keys)

    def seen(self, last: Expr, keys: Expr) -> _Seen:
        """Find the keys that the warpgroup's queries see, the first of them up to ``last`` if attention is causal."""
        return _Seen(self, last, keys)

    @T.inline
    def score(self):
        """Emit the product of queries and the next stage's keys, which runs on."""
        self.shared.full.wait(self.read.stage, self.read.phase, "consumer")
        self.keys_at = self.read.stage
        self.by_keys.multiply_beside_ring(self.scores, self.q, self.k, self.keys_at)
        self.read.advance()

    @T.inline
    def sum(self):
        """Emit the product of weights and the next stage's values, which runs on."""
        self.shared.full.wait(self.read.stage, self.read.phase, "consumer")
        self.values_at = self.read.stage
        self.by_values.multiply_from_registers(self.sums, self.weights, self.v, self.values_at, T.bool(True))
        self.read.advance()

    @T.inline
    def scored(self, in_flight):
        """Emit the wait for the scores, beside which other products may be unfinished; their keys' stage is empty."""
        retire(self.scores, in_flight)
        release(self.shared.empty, self.keys_at, self.here)

    def cap(self) -> None:
        """Emit the scores' soft cap, if there is one; its factor comes later (:attr:`Attention.score_scale`)."""
        if self.problem.soft_cap is not None:
            self.softmax.cap(self.problem.scale / self.problem.soft_cap)

    @T.inline
    def summed(self):
        """Emit the wait for the sums; their values' stage is empty."""
        retire(self.sums, 0)
        release(self.shared.empty, self.values_at, self.here)

    @T.inline
    def round(self, are_sums):
        """Emit the rounding of weights to 16 bits, and scale the sums down to them, if there ``are_sums`` by now.

        Accumulators lie as the registers of a first operand do: two neighbours are one of these.
        """
        retire(self.sums, 0)
        if are_sums:
            release(self.shared.empty, self.values_at, self.here)
        self.softmax.scale_down(self.sums)
        epilogue.pack(self.scores, self.weights, self.problem.dtype)

    @T.inline
    def store(self, place, row):
        """Emit the results' way out, through the shared memory of this warpgroup's queries."""
        packed = T.alloc_local((self.by_values.registers // 2,), "uint32")
        epilogue.pack(self.sums, packed, self.problem.dtype)
        T.cuda.warpgroup_sync(1 + self.number)  # no warp's instructions read queries any more
        for box in T.unroll(self.by_values.boxes):
            into = T.meta_var(self.own + box * epilogue.BOX_BYTES)
            epilogue.write_box(packed, self.by_values, box, self.shared.results, into, self.here.warp, self.here.lane)
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.warpgroup_sync(1 + self.number)
        if self.here.warp == 0 and tma.elected():
            for box in T.unroll(self.by_values.boxes):
                source = T.meta_var(self.shared.results.ptr_to([self.own + box * epilogue.BOX_BYTES]))
                epilogue.store_box(place.map, self.by_values, box, source, row, place.column)
            T.ptx.cp.async_.bulk.commit_group()

    @T.inline
    def answered(self, barriers, place):
        """Emit the word that results have left a place, where other queries may come."""
        if self.here.warp == 0 and tma.elected():
            tma.await_stores(True)
            barriers.arrive(place)
