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
SCALES = (1e-15, 1e15)  # what is left out still has no weight, and the least score times it is a float32
HEADS = (32, 64, 80, 96, 128, 256)  # elements of a head: steps of wgmma, and sums that registers hold


@dataclass(frozen=True)
class Attention:
    """``O[i] = sum over j of w[i, j] · V[j]``, ``w[i] = softmax over j of scale · Q[i] · K[j]``, for each head.

    Q and O have ``heads`` of ``head`` elements, K and V ``kv_heads``, each of which ``heads / kv_heads`` neighbouring
    heads share. ``causal``: query i sees the keys j <= i alone; ``from_end``, as many more as there are more keys than
    queries, so that the last query sees all. ``mask`` hides further keys, or is added to scaled scores. Results of a
    query that sees no key are zeros. ``starts`` says for Q, K and V in which matrix of their tensor map, and in which
    column there, they begin (:attr:`matrices`): they may be parts of larger tensors. Layouts are
    "bshd" [batch, tokens, heads, head] or "bhsd" [batch, heads, tokens, head]. Scores, weights' sums and results are
    added up in float32; weights, at most 1, are rounded to ``dtype`` for the second product.

    Raises
    ------
    IllegalWorkload : on construction, for extents below 1, heads that cannot be shared out, elements of a head that are
        not 32, 64, 80, 96, 128 or 256, another dtype or layout, a scale that is not from 1e-15 to 1e15, ``from_end``
        without ``causal``, and operands of 2**31 elements.
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
        return self.from_end or self.mask is not None

    @property
    def softmax_scale(self) -> float:
        """Return the factor of scores in the softmax: 1 with a mask that is added, to scores scaled before."""
        return 1.0 if self.mask and self.mask.is_added else self.scale

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

    def smem_bytes(self, head: int, stages: int) -> int:
        """Return the shared memory of a block: its queries, whose place results take; the ring; the barriers."""
        return (
            TmaPanels(self.rows, head, "k").bytes
            + stages * (self.stage_bytes(head) + 2 * BARRIER_BYTES)
            + BARRIER_BYTES
        )

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
    """A kernel's tile, its stages, and whether its consumers take turns (:func:`attention`)."""

    tile: AttentionTile
    stages: int
    in_turns: bool = False


TILE, STAGES = AttentionTile(), 4
# By elements of a head (form_for says when each is chosen):
USUAL = {
    **dict.fromkeys((32, 64), AttentionForm(TILE, 6)),
    **dict.fromkeys((80, 96, 128), AttentionForm(TILE, 5, in_turns=True)),
    256: AttentionForm(AttentionTile(keys=64), 4, in_turns=True),
}
FEW_BLOCKS = {
    **dict.fromkeys((32, 64), AttentionForm(AttentionTile(WGMMA_ROWS), 6)),
    **dict.fromkeys((80, 96, 128), AttentionForm(AttentionTile(WGMMA_ROWS), 4)),
    256: AttentionForm(AttentionTile(WGMMA_ROWS, 64), 4),
}
LONG = {64: AttentionForm(AttentionTile(3 * WGMMA_ROWS, 96), 6, in_turns=True)}
LONG_TOKENS = 2048  # of which blocks of 192 queries pad less than a tenth, and which are some 20 steps of keys
SM_90A = {"kind": "cuda", "arch": WGMMA_ARCH}


def form_for(
    head: int,
    multiprocessors: int,
    many: int | None = None,
    queries: int | None = None,
    keys: int | None = None,
    mask: Mask | None = None,
) -> AttentionForm:
    """Choose the form of a kernel for ``many`` heads, a batch's together, of ``head`` elements each.

    None stands for what only run time knows. With a mask that registers have no place for, a step takes 64 keys. Heads
    of 32, 80, 96 and 256 elements take forms of their neighbours, not timed. Forms of heads of 64 and 128 were timed on
    an H200 with torch's SDPA, causal and not:

    - 128 queries, 128 keys, as a rule. In turns one consumer's softmax lies beside the other's products: causal heads
      of 128 gain by that, heads of 64 lose by it where there are two steps of keys (197 tokens).
    - 64 queries where multiprocessors suffice for twice the blocks of 128: faster at 128 tokens and 32 heads of 128.
    - 192 queries, 96 keys, in turns, for heads of 64, from ``LONG_TOKENS`` queries and keys on, if each multiprocessor
      has a block then: faster at 4096 tokens, much slower at 197. And where its waves of blocks take fewer queries:
      12 heads of 1500 tokens are 144 blocks of 128 queries, two waves, or 96 of 192. Tokens that only run time knows
      may be few.
    """
    form = _unmasked_form(head, multiprocessors, many, queries, keys)
    fits = not form.tile.violations(Target(SM_90A), head, form.stages, mask)
    return form if fits else replace(form, tile=replace(form.tile, keys=PANEL))


def _unmasked_form(
    head: int, multiprocessors: int, many: int | None, queries: int | None, keys: int | None
) -> AttentionForm:
    usual, long = USUAL[head], LONG.get(head)
    if many is None or queries is None:
        return usual
    if 2 * many * -(-queries // usual.tile.rows) <= multiprocessors:
        return FEW_BLOCKS[head]
    if long is None:
        return usual
    blocks = [many * -(-queries // form.tile.rows) for form in (usual, long)]
    waves = [-(-own // multiprocessors) * form.tile.rows for own, form in zip(blocks, (usual, long))]
    fills = blocks[1] >= multiprocessors and keys is not None and min(queries, keys) >= LONG_TOKENS
    return long if fills or waves[1] < waves[0] else usual


@on_a_short_stack
def attention(
    problem: Attention,
    tile: AttentionTile = TILE,
    stages: int = STAGES,
    *,
    any_rows: bool = False,
    in_turns: bool = False,
) -> tirx.PrimFunc:
    """``main(Q, K, V, M, O)``: each block computes the results of some queries of one head; M is the mask, if any.

    ::

        producer, one thread:                     each consumer warpgroup, 64 queries:
          load the queries                          scores = Q K_0ᵀ;  their softmax so far, in place;  O = 0
          load K_0                                  for each step j = 1, 2, ...:
          for each step j = 1, 2, ...:                wait for O;  scale it down;  weights = rounded scores
            load K_j, V_(j-1)                         scores = Q K_jᵀ                # issued; both run on
          load V of the last step                     O     += weights V_(j-1)
                                                      wait for the scores;  their softmax so far, beside O
                                                    the same with V of the last step;  O / sum of weights -> TMA store

    Keys and values are the ring's stages in the order in which they are read. Tokens beyond the last are zeros on
    loads, and left out on stores. With ``causal`` a block ends with the last key that one of its queries sees, and
    blocks of the last queries, which have most to do, come first. With ``in_turns`` consumers issue a step's products
    one after the other, so that one's softmax lies beside the other's products.

    Operands are three-dimensional (:attr:`Attention.matrices`). With ``any_rows`` the kernel takes any batch and any
    numbers of queries and keys, in three further parameters: who launches it gives tensor maps of the tokens at hand,
    and a block for each tile of queries of each head. The numbers of ``problem`` only have to be some.

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
    many, tiles = problem.batch * problem.heads, -(-problem.queries // tile.rows)
    sharing = problem.heads // problem.kv_heads

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
        here = RoleBlock(tiles * many, tile.consumers)
        pool = T.SMEMPool()
        queried = Barriers(pool, 1)
        shared = SharedRing(pool, stages, k.bytes, tile.consumers, result_bytes=tile.consumers * q.bytes)
        if here.thread == 0:
            queried.initialize(1)
        shared.begin(here)
        all_heads = T.meta_var(batch * problem.heads if any_rows else many)
        high = T.meta_var((queries + (tile.rows - 1)) // tile.rows if any_rows else tiles)
        last_key = T.meta_var(keys if any_rows else problem.keys)
        one: T.let = T.truncmod(here.number, all_heads) // problem.heads
        own: T.let = T.truncmod(here.number, all_heads) % problem.heads
        row: T.let = (high - 1 - T.truncdiv(here.number, all_heads)) * tile.rows
        later = T.meta_var(last_key - (queries if any_rows else problem.queries) if problem.from_end else 0)
        seen: T.let = _seen(problem, last_key, row + tile.rows + later)
        steps: T.let = (seen + (tile.keys - 1)) // tile.keys
        q_place = T.meta_var(_Place(maps["Q"], *problem.place("Q", one, own)))
        k_place = T.meta_var(_Place(maps["K"], *problem.place("K", one, own // sharing)))
        v_place = T.meta_var(_Place(maps["V"], *problem.place("V", one, own // sharing)))
        o_place = T.meta_var(_Place(maps["O"], *problem.place("O", one, own)))
        if here.warpgroup == 0:  # the producer
            give_up_registers()
            if here.warp == 0 and tma.elected():
                fill = RingState(stages, 1)  # 1: the ring's first turn waits for nobody
                queried.expect(0, q.bytes * tile.consumers)
                for group in T.unroll(tile.consumers):
                    _load(q, q_place, row + group * WGMMA_ROWS, shared.results, group * q.bytes, queried.at(0))
                _fill(shared, fill, k, k_place, 0)
                for step in T.serial(steps - 1):
                    _fill(shared, fill, k, k_place, (step + 1) * tile.keys)
                    _fill(shared, fill, v, v_place, step * tile.keys)
                _fill(shared, fill, v, v_place, (steps - 1) * tile.keys)
        else:  # a consumer
            take_registers(tile.roles)
            mine = _Consumer(here, shared, problem, tile, scored, summed)
            turns = T.meta_var(_Turns(tile.consumers if in_turns else 1, mine.number))
            first: T.let = row + mine.number * WGMMA_ROWS
            bounds = T.meta_var(mine.bounds(first + later, last_key))
            clear = T.meta_var(tirx.min(last_key, first + later + 1) if problem.causal else last_key)  # seen by all
            masked = T.meta_var(mine.masked(mask, one, own, first, queries if any_rows else problem.queries, last_key))
            queried.wait(0, 0, "consumer")
            mine.score()
            masked.fetch(0)
            mine.scored(0)
            masked.apply()
            if tile.keys > clear:
                mine.softmax.leave_out(bounds, here.lane)
            mine.softmax.take(True)
            turns.begin()
            for step in T.serial(steps - 1):
                mine.round(step > 0)
                turns.wait()
                mine.score()  # issued; it runs on
                mine.sum()  # so does this
                turns.pass_on()
                masked.fetch((step + 1) * tile.keys)
                mine.scored(1)
                masked.apply()
                if (step + 2) * tile.keys > clear:
                    begin = T.meta_var((step + 1) * tile.keys)
                    mine.softmax.leave_out((bounds[0] - begin, bounds[1] - begin), here.lane)
                mine.softmax.take(False)  # beside the sums: no wait for these must stand in this basic block
            mine.round(steps > 1)
            mine.sum()
            mine.summed()
            mine.softmax.divide(mine.sums)
            mine.store(o_place, first)

    return without(main, *([] if any_rows else COUNTED), *([] if problem.mask else ["M_ptr"]))


def _seen(problem: Attention, keys: Expr, bound: Expr) -> Expr:
    """Return how many keys a block goes along: all, or those below a bound, but at least one."""
    if not problem.causal:
        return keys
    return tirx.max(tirx.min(keys, bound), 1) if problem.from_end else tirx.min(keys, bound)


class _Place:
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


def _load(panels: TmaPanels, place: _Place, token: Expr, into: Buffer, offset: Expr, barrier: Expr) -> None:
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
        self.softmax = OnlineSoftmax(self.scores, problem.softmax_scale, problem.may_be_empty)
        self.own = T.Bind(self.number * by_keys.a.bytes)  # its queries' bytes, where its results go at the end
        self.q = T.Bind(by_keys.a.descriptor(shared.results.ptr_to([self.own])))
        self.k = T.Bind(by_keys.b.descriptor(shared.ring.ptr_to([0])))
        self.v = T.Bind(by_values.b.descriptor(shared.ring.ptr_to([0])))
        self.read = RingState(shared.stages, 0)
        self.keys_at = T.local_scalar("int32")  # stages that are read
        self.values_at = T.local_scalar("int32")
        for name in ("number", "own", "q", "k", "v", "scores", "sums", "weights", "keys_at", "values_at"):
            IRBuilder.name(name, getattr(self, name))
        for register in range(by_values.registers):
            T.buffer_store(self.sums, T.float32(0), [register])

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
        scores = MaskedScores(self.problem.mask, mask, self.scores, self.problem.scale, rows, self.here.lane)
        IRBuilder.name("masked", scores.found)
        return _Masked(scores, keys)

    def bounds(self, first: Expr, keys: Expr) -> tuple[Expr, ...]:
        """Return, for each of a lane's rows, the first key that it does not see; ``first`` is the warpgroup's query."""
        rows = [first + wgmma_element(self.here.warp, self.here.lane, 2 * half)[0] for half in range(HALVES)]
        return tuple(T.Bind(tirx.min(keys, row + 1)) if self.problem.causal else keys for row in rows)

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
            epilogue.store_boxes(place.map, self.by_values, self.shared.results, self.own, row, place.column)
