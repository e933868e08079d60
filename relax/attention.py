"""A pass that makes attention in Relax modules one launch of the fused kernel (:mod:`kernels.attention`).

::

    before   q_t, k_t, v_t = permute_dims(q), permute_dims(repeat(k)), permute_dims(repeat(v))
             s = matmul(q_t, k_t);  w = softmax(scaled and masked s);  o = permute_dims(matmul(w, v_t))
    after    o = call_tir(attention, q, k, v)          # tensor maps of the tokens at hand; no scores in memory

Taken are ``R.nn.attention`` and ``R.nn.attention_bias``, and what these are written out as: two products with a softmax
between them, scores times a constant, capped by ``tanh``, cast, masked by ``key <= query``, by a window or by an
operand. Operands are read in the tensors that they are views of (:mod:`relax.attention_operands`). The kernels are
linked with the module (:mod:`relax.linking`). What is left is logged, with the reason, at level debug.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir.transform import PassContext
from tvm.target import Target

from tensorir_ladder.kernels.attention import BY_HEAD, BY_TOKEN, Attention, AttentionForm, attention, form_for
from tensorir_ladder.kernels.codegen.launch_plan import COUNTED
from tensorir_ladder.kernels.codegen.lowering import with_kernels
from tensorir_ladder.relax.attention_operands import (
    BATCH,
    EXTENTS,
    FIRST,
    HEAD,
    HEADS,
    LAST,
    MASKED,
    TOKENS,
    Masking,
    MaskOperand,
    MaskReader,
    Operand,
    keys_later,
    ways_to_read,
    with_numbers,
)
from tensorir_ladder.relax.elements import LEAVE, Elements, number_of
from tensorir_ladder.relax.graphs import is_call
from tensorir_ladder.relax.linking import DeviceCode, Mapped, device_code, launch
from tensorir_ladder.relax.rules import (
    NotTaken,
    closed,
    computations_of,
    loads_in,
    note_failure,
    same_number,
    unless_empty,
)
from tensorir_ladder.relax.rules.rule import HOW, SCHEDULED
from tensorir_ladder.schedules.cost import assumed_machine
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.inspection import is_constant, is_zero
from tensorir_ladder.schedules.isa import WGMMA_ARCH
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.workloads import MAX_ELEMENTS

LOG = logging.getLogger(__name__)
NAME = "attention"  # of the functions, and of the rule that is said to have made them
FEWEST_QUERIES = 16  # of known numbers: fewer leave most of a tile empty, and keys are streamed better by "decode"
FLOATS = ("float16", "bfloat16", "float32", "float64")
TOKENS_TURNED = [0, 2, 1, 3]  # axes of what has tokens and heads exchanged
CAUSAL = {"TopLeft": FIRST, "BottomRight": LAST}  # what TVM's operator calls masks
EXCHANGED = {BY_TOKEN: BY_HEAD, BY_HEAD: BY_TOKEN}
DIGITS = 12  # of a digest, by which kernels are told from each other


@tvm.transform.module_pass(opt_level=0, name="FuseAttention")
class FuseAttention:
    """Make attention of 16-bit operands one function, lowered for ``target`` already; changes nothing for others.

    What fails, which is a defect, leaves attention as it is and is said (:func:`relax.rules.note_failure`).
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        arch = str(self.target.attrs.get("arch", self.target.kind.name))
        if arch != WGMMA_ARCH:
            LOG.debug("no fused attention for %s: the kernel is %s's", arch, WGMMA_ARCH)
            return mod
        kernels = _Kernels(self.target)
        rewriter = _Rewriter(mod)
        for name, function in mod.functions_items():
            found = attention_in(function, mod) if isinstance(function, relax.Function) else {}
            rewriter.launched = {call: one for call, one in zip(found, map(kernels.launched, found.values())) if one}
            if rewriter.launched:
                changed = relax.analysis.remove_all_unused(rewriter.visit_expr(function))
                rewriter.builder_.update_func(name, changed)
        return rewriter.builder_.get()


@dataclass(frozen=True)
class AttentionMatch:
    """Attention in a Relax module: operands that belong together, and how the result is to lie."""

    q: Operand
    k: Operand
    v: Operand
    scale: float
    causal: bool
    o_layout: str
    from_end: bool = False
    mask: MaskOperand | None = None
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        """Raise NotTaken for operands that do not fit each other; IllegalWorkload for what the kernel does not take."""
        q, k, v = (operand.extents for operand in (self.q, self.k, self.v))
        if any(is_zero(extent) for extent in (*q, *k, *v)):
            raise NotTaken("an operand has no elements", remedy=LEAVE)
        pairs = [(q[BATCH], k[BATCH]), (k[BATCH], v[BATCH]), (k[TOKENS], v[TOKENS]), (k[HEADS], v[HEADS])]
        pairs += [(q[HEAD], k[HEAD]), (k[HEAD], v[HEAD]), (q[HEADS], k[HEADS] * self.k.sharing)]
        if different := [pair for pair in pairs if not same_number(*pair)]:
            said = ", ".join(" and ".join(_shown(extent) for extent in pair) for pair in different)
            raise NotTaken("extents of operands differ", value=said, remedy=LEAVE)
        if len(dtypes := {str(operand.source.ty.dtype) for operand in (self.q, self.k, self.v)}) > 1:
            raise NotTaken("dtypes of operands differ", value=", ".join(sorted(dtypes)), remedy=LEAVE)
        if is_constant(queries := self.extents[1]) and int(queries) < FEWEST_QUERIES:
            raise NotTaken("few queries", value=int(queries), limit=f"{FEWEST_QUERIES} or more", remedy=LEAVE)
        self.problem()

    @property
    def extents(self) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        """Batch, queries and keys, each of which may be known at run time only."""
        return self.q.extents[BATCH], self.q.extents[TOKENS], self.k.extents[TOKENS]

    @property
    def known(self) -> bool:
        """True where run time brings no extent."""
        return all(map(is_constant, self.extents))

    def problem(self) -> Attention:
        """Return what the kernel is made for; of extents that run time brings, with as many blocks as any call has."""
        (heads, head), kv_heads = (int(self.q.extents[axis]) for axis in (HEADS, HEAD)), int(self.k.extents[HEADS])
        batch, queries, keys = (int(extent) if is_constant(extent) else None for extent in self.extents)
        most = (MAX_ELEMENTS - 1) // head
        if batch is None:
            batch, queries = most // max(heads * (queries or 1), kv_heads * (keys or 1)), queries or 1
        layouts = (self.q.layout, self.k.layout, self.v.layout, self.o_layout)
        tokens = most // (batch * heads) if queries is None else queries, keys or 1
        return Attention(
            batch,
            *tokens,
            heads,
            kv_heads,
            head,
            str(self.q.source.ty.dtype),
            self.scale,
            self.causal,
            *layouts,
            from_end=self.from_end,
            mask=self.mask.kind if self.mask else None,
            starts=(self.q.start, self.k.start, self.v.start),
            window=self.window,
            soft_cap=self.soft_cap,
        )

    def form(self, multiprocessors: int) -> AttentionForm:
        """Choose the kernel's form by what is known before run time."""
        batch, queries, _ = (int(extent) if is_constant(extent) else None for extent in self.extents)
        heads, head = (int(self.q.extents[axis]) for axis in (HEADS, HEAD))
        many = None if batch is None else batch * heads
        return form_for(head, multiprocessors, many, queries, self.causal, self.mask.kind if self.mask else None)

    def lowered(self, code: DeviceCode, form: AttentionForm) -> tirx.PrimFunc:
        """Return the function of queries, keys, values and results, in their layouts, that launches the kernel."""
        problem, tile = self.problem(), form.tile
        batch, queries, keys = (
            tirx.const(int(extent), "int32") if is_constant(extent) else tirx.Var(name, "int32")
            for extent, name in zip(self.extents, COUNTED)
        )
        if same_number(*self.extents[1:]):
            keys = queries
        numbers = dict(zip(COUNTED, (batch, queries, keys)))
        given = dict(zip(EXTENTS.values(), (batch, queries, keys)))
        operands = dict(zip("QKV", (self.q, self.k, self.v)))
        shapes = {name: [with_numbers(extent, given) for extent in one.shape] for name, one in operands.items()}
        matrices = {name: tirx.decl_buffer(shape, problem.dtype, name) for name, shape in shapes.items()}
        if self.mask:
            shape = [with_numbers(extent, given) for extent in self.mask.shape]
            matrices["M"] = tirx.decl_buffer(shape, self.mask.kind.dtype, "M")
        result = _Result(batch, queries, problem.heads, problem.head, problem.o_layout, problem.dtype)
        matrices["O"] = tirx.decl_buffer(result.shape, problem.dtype, "O")
        mapped = {name: one.mapped(given) for name, one in operands.items()} | {"O": result.mapped}
        blocks = tirx.floordiv(queries + (tile.rows - 1), tile.rows) * problem.heads * batch
        most = code.plan.grid[0]
        body = launch(code.plan, matrices, mapped, numbers, most if self.known else tirx.min(blocks, most))
        written = [extent for extent in (batch, queries) if not is_constant(extent)]
        made = unless_empty(tirx.PrimFunc([*matrices.values()], body), written)
        if not is_constant(keys) and not keys.same_as(queries):
            some = tirx.any(keys > 0, *(extent == 0 for extent in written))
            said = "K has no keys, and weights of none do not add up to 1"
            check = tirx.AssertStmt(some, ir.StringImm("ValueError"), [ir.StringImm(said)])
            made = made.with_body(tirx.SeqStmt([check, made.body]))
        how = f"TMA, {tile.rows} queries, {tile.keys} keys, {form.stages} stages"
        how += ", causal" * problem.causal
        how += f", a window of {self.window}" if self.window else ""
        how += f", soft cap {self.soft_cap:g}" if self.soft_cap else ""
        how += f", {self.mask.kind}" if self.mask else ""
        made = made.with_attr(SCHEDULED, True).with_attr("tirx.noalias", True).with_attr(HOW, how)
        return with_kernels(closed(made, NAME, numbers_elements=False), code.device)


@dataclass(frozen=True)
class _Result:
    """Describe the result, a contiguous tensor; batch and tokens may be known at run time only."""

    batch: tirx.Expr
    tokens: tirx.Expr
    heads: int
    head: int
    layout: str
    dtype: str

    @property
    def shape(self) -> list[tirx.Expr | int]:
        inner = [self.tokens, self.heads] if self.layout == BY_TOKEN else [self.heads, self.tokens]
        return [self.batch, *inner, self.head]

    @property
    def mapped(self) -> Mapped:
        """Describe it as matrices of tokens (:attr:`kernels.attention.Attention.matrices`)."""
        by_token = self.layout == BY_TOKEN
        columns, count = (self.heads * self.head, self.batch) if by_token else (self.head, self.batch * self.heads)
        row_bytes = columns * dtype_bytes(self.dtype)
        return Mapped((columns, self.tokens, count), (row_bytes, self.tokens.astype("int64") * row_bytes))


@dataclass(frozen=True)
class _Scores:
    """Treat scores before their softmax: times ``scale``; ``fill`` in the place of a later key's, if any.

    ``added`` are masks that are added. With a ``soft_cap`` c scores become ``c · tanh(scale · scores / c)`` first.
    """

    scale: float = 1.0
    fill: float | None = None
    added: tuple[relax.Expr, ...] = ()
    soft_cap: float | None = None

    def times(self, factor: float) -> _Scores:
        """Multiply scores first."""
        return replace(self, scale=self.scale * factor)

    def plus(self, mask: relax.Expr) -> _Scores:
        """Add a mask first; NotTaken where the sum is scaled or capped."""
        if self.scale != 1 or self.soft_cap is not None:
            raise NotTaken("a mask is scaled or capped with the scores", value=self.scale, remedy=LEAVE)
        return replace(self, added=(*self.added, mask))

    def capped(self) -> _Scores:
        """Take scores' tanh first, whose factor is the cap; NotTaken for a second one."""
        if self.soft_cap is not None:
            raise NotTaken("scores are capped twice", value=self.soft_cap, remedy=LEAVE)
        return replace(self, soft_cap=self.scale)

    def cast(self, dtype: object) -> _Scores:
        """Cast scores first, which rounds them no more; NotTaken for what is no float of 16 bits or more."""
        if str(dtype) not in FLOATS:
            raise NotTaken("scores are cast", value=dtype, limit=" | ".join(FLOATS), remedy=LEAVE)
        return self

    def of(self, value: ir.Expr, query: ir.Expr, key: ir.Expr) -> _Scores:
        """Compute ``value`` of an element of scores first, that of ``query`` and ``key``; NotTaken for other values."""
        if isinstance(value, ir.TensorLoad):
            return self
        if isinstance(value, tirx.Cast):
            return self.cast(value.ty.dtype).of(value.value, query, key)
        if isinstance(value, tirx.Mul) and isinstance(value.a, tirx.FloatImm):
            return self.times(value.a.value).of(value.b, query, key)
        if isinstance(value, tirx.Mul) and isinstance(value.b, tirx.FloatImm):
            return self.times(value.b.value).of(value.a, query, key)
        if isinstance(value, tirx.Div) and isinstance(value.b, tirx.FloatImm) and value.b.value:
            return self.times(1 / value.b.value).of(value.a, query, key)
        if isinstance(value, ir.Call) and value.op == ir.Op.get("tirx.tanh"):
            return self.capped().of(value.args[0], query, key)
        if self.soft_cap is None and (choice := _choice(value)) is not None:
            condition, *sides = choice
            for kept, other, is_else in ((*sides, False), (*sides[::-1], True)):
                if isinstance(other, tirx.FloatImm) and _says_not_later(condition, is_else, query, key):
                    fill = self.scale * other.value if self.fill is None else self.fill
                    return replace(self, fill=fill).of(kept, query, key)
        raise NotTaken("something else is done to scores", value=value, remedy=LEAVE)


def _choice(value: ir.Expr) -> Sequence[ir.Expr] | None:
    """Return condition and both sides of a choice; None for other expressions."""
    if isinstance(value, tirx.Select):
        return value.condition, value.true_value, value.false_value
    return value.args if isinstance(value, ir.Call) and str(value.op.name).endswith("if_then_else") else None


def _says_not_later(condition: ir.Expr, negated: bool, query: ir.Expr, key: ir.Expr) -> bool:
    """Tell whether a condition, or its opposite, is that a key is not later than a query: ``key <= query``."""
    later = keys_later(condition, negated, query, key)
    return later is not None and is_zero(later)


def _elementwise(function: tirx.PrimFunc, after: _Scores) -> _Scores:
    """Put a function that computes each element of scores from the one at its place in front; NotTaken for others."""
    computation, *more = computations_of(function)
    loads = loads_in(computation.value)
    at = list(computation.indices)
    scores, result = function.params if len(function.params) == 2 else (None, None)
    if more or computation.updates or len(loads) != 1 or len(at) < 2 or not computation.buffer.same_as(result):
        raise NotTaken("something else than one element of scores is read for each", value=function, remedy=LEAVE)
    alike = _same_shape(scores.shape, result.shape)
    if not (loads[0].source.same_as(scores) and alike and tvm_ffi.structural_equal(list(loads[0].indices), at)):
        raise NotTaken("scores are moved", value=loads[0], remedy=LEAVE)
    return after.cast(result.dtype).of(computation.value, *at[-2:])


def attention_in(function: relax.Function, mod: ir.IRModule) -> dict[relax.Call, AttentionMatch]:
    """List attention in a Relax function by the call that makes its result; log what is left, and why."""
    blocks = function.body.blocks if isinstance(function.body, relax.SeqExpr) else []
    searches = [_Search(block, mod) for block in blocks if isinstance(block, relax.DataflowBlock)]
    return dict(found for search in searches for found in search.found())


class _Search:
    """A block of Relax's in which attention is looked for: what makes each variable, and who reads it."""

    def __init__(self, block: relax.DataflowBlock, mod: ir.IRModule) -> None:
        self.mod = mod
        self.made = {each.var: each.value for each in block.bindings if isinstance(each, relax.VarBinding)}
        self.readers = relax.analysis.udchain(block)
        self.elements = Elements(self.made)

    def found(self) -> Iterator[tuple[relax.Call, AttentionMatch]]:
        """List what is found by the call that makes its result."""
        for var, value in self.made.items():
            one = None
            with _left_with_a_reason(var.name):
                one = self._read(value)
            if one is not None:
                result, one = self._result(var, one)
                yield self.made[result], one

    def _read(self, value: relax.Expr) -> AttentionMatch | None:
        """Read attention; None for what is none, NotTaken and IllegalWorkload for what the kernel does not take."""
        if is_call(value, "nn.attention", "nn.attention_bias"):
            return self._operator(value)
        if is_call(value, "matmul"):
            weights = self._maker(value.args[0])
            weights = self._maker(weights.args[0]) if is_call(weights, "astype") else weights
            return self._written_out(value) if is_call(weights, "nn.softmax") else None
        return None

    def _maker(self, operand: relax.Expr) -> relax.Expr | None:
        return self.made.get(operand) if isinstance(operand, relax.Var) else None

    def _alone(self, operand: relax.Expr) -> relax.Call:
        """Return the call that makes an operand which one call alone reads; NotTaken for others."""
        made = self._maker(operand) if isinstance(operand, relax.DataflowVar) else None
        if not isinstance(made, relax.Call) or len(self.readers[operand]) != 1:
            raise NotTaken("scores or weights are read elsewhere, or come from elsewhere", value=operand, remedy=LEAVE)
        return made

    def _result(self, var: relax.Var, one: AttentionMatch) -> tuple[relax.Var, AttentionMatch]:
        """Return the variable that is to have the result: the last that only exchanges tokens and heads, or nothing."""
        found, layout, last = var, one.o_layout, one.o_layout
        while len(readers := self.readers[var] if isinstance(var, relax.DataflowVar) else ()) == 1:
            made = self._maker(readers[0])
            if _axes(made) == TOKENS_TURNED:
                layout = EXCHANGED[layout]
            elif not (is_call(made, "reshape") and _same_shape(made.ty.shape, var.ty.shape)):
                break
            var = readers[0]
            found, last = var, layout
        return found, replace(one, o_layout=last)

    def _operator(self, call: relax.Call) -> AttentionMatch:
        """Read TVM's operator; NotTaken where it does what the kernel does not."""
        q, k, v = (
            ways_to_read(self.elements, operand, (0, 2, 1, 3), tokens)
            for operand, tokens in zip(call.args, ("queries", "keys", "keys"))
        )
        causal, window = call.attrs.causal_mask, call.attrs.window_size
        if causal not in (None, *CAUSAL):
            raise NotTaken("a mask of another kind", value=causal, remedy=LEAVE)
        if call.attrs.scale is None and not is_constant(call.args[0].ty.shape[HEAD]):
            raise NotTaken("a head is as long as run time says", value=q[-1].extents[HEAD], remedy=LEAVE)
        scale = int(q[-1].extents[HEAD]) ** -0.5 if call.attrs.scale is None else float(call.attrs.scale.value)
        masking = Masking(
            frozenset() if causal is None else frozenset({CAUSAL[causal]}),
            window=None if window is None else int(window),
        )
        extents = [call.args[0].ty.shape[place] for place in (0, 2, 1)] + [call.args[1].ty.shape[1]]
        for bias in call.args[3:]:
            masking &= MaskReader(self.elements, extents).added(bias)
        return _joined(q, k, v, scale, masking, BY_TOKEN, same_number(*extents[2:]))

    def _written_out(self, product: relax.Call) -> AttentionMatch:
        """Read two products with a softmax between them, upwards; NotTaken where more happens, or others read it."""
        softmax = self._alone(product.args[0])
        softmax = self._alone(softmax.args[0]) if is_call(softmax, "astype") else softmax
        if softmax.attrs.axis not in (-1, HEAD):
            raise NotTaken("a softmax of other rows", value=softmax.attrs.axis, limit=-1, remedy=LEAVE)
        made, scores = self._alone(softmax.args[0]), _Scores()
        while not is_call(made, "matmul"):
            scores, before = self._before(made, scores)
            made = self._alone(before)
        if scores.fill is not None and scores.fill > MASKED:
            raise NotTaken("masked scores have some weight", value=scores.fill, limit=MASKED, remedy=LEAVE)
        q = ways_to_read(self.elements, made.args[0], (0, 1, 2, 3), "queries")
        k = ways_to_read(self.elements, made.args[1], (0, 1, 3, 2), "keys")
        v = ways_to_read(self.elements, product.args[1], (0, 1, 2, 3), "keys")
        if product.ty.dtype != v[0].source.ty.dtype:
            raise NotTaken("results are not of the operands' dtype", value=product.ty.dtype, remedy=LEAVE)
        masking = Masking(frozenset() if scores.fill is None else frozenset({FIRST}))
        extents = [*made.ty.shape]
        for mask in scores.added:
            masking &= MaskReader(self.elements, extents).added(mask)
        one = _joined(q, k, v, scores.scale, masking, BY_HEAD, same_number(*extents[2:]))
        return replace(one, soft_cap=scores.soft_cap)

    def _before(self, call: relax.Call, after: _Scores) -> tuple[_Scores, relax.Expr]:
        """Put what a call does to scores in front, and return whose they are; NotTaken for other calls."""
        if is_call(call, "astype"):
            return after.cast(call.ty.dtype), call.args[0]
        if is_call(call, "multiply", "divide"):
            one, other = call.args if is_call(call, "divide") or number_of(call.args[0]) is None else call.args[::-1]
            if number := float(number_of(other) or 0):
                return after.times(1 / number if is_call(call, "divide") else number), one
        if is_call(call, "tanh"):
            return after.capped(), call.args[0]
        if is_call(call, "add"):
            scores = next((operand for operand in call.args if self._are_scores(operand)), None)
            if scores is not None:
                return after.plus(next(operand for operand in call.args if not operand.same_as(scores))), scores
        if is_call(call, "call_tir") and len(call.args) == 2 and len(call.args[1].fields) == 1:
            return _elementwise(self.mod[call.args[0]], after), call.args[1].fields[0]
        raise NotTaken("something else is done to scores", value=call.op, remedy=LEAVE)

    def _are_scores(self, operand: relax.Expr) -> bool:
        """Tell whether an operand is a product, which may be scaled, cast or masked."""
        made = self._maker(operand)
        while isinstance(made, relax.Call) and made.args and not is_call(made, "matmul"):
            number = len(made.args) > 1 and number_of(made.args[0]) is not None
            made = self._maker(made.args[1 if number else 0])
        return is_call(made, "matmul")


def _joined(
    q: Sequence[Operand],
    k: Sequence[Operand],
    v: Sequence[Operand],
    scale: float,
    masking: Masking,
    o_layout: str,
    as_many: bool,
) -> AttentionMatch:
    """Choose among ways to read operands: as far back as they go, keys and values with their heads repeated alike.

    Numbers that queries and keys are multiplied by go to the scale. ``as_many``: keys are as many as queries.
    """
    q, v = [way for way in q if way.sharing == 1], [way for way in v if way.factor == 1]
    alike = {way.sharing for way in k} & {way.sharing for way in v}
    if not alike:
        raise NotTaken("heads of keys and values are repeated otherwise", remedy=LEAVE)
    if len(masking.causal) == len(CAUSAL) and not as_many:
        raise NotTaken("causal from both ends", value=sorted(masking.causal), remedy=LEAVE)
    wanted = zip((q, k, v), (1, max(alike), max(alike)))
    chosen = [[way for way in ways if way.sharing == sharing][-1] for ways, sharing in wanted]
    scale *= chosen[0].factor * chosen[1].factor
    from_end = LAST in masking.causal and not as_many
    return AttentionMatch(*chosen, scale, bool(masking.causal), o_layout, from_end, masking.operand, masking.window)


@contextlib.contextmanager
def _left_with_a_reason(what: str) -> Iterator[None]:
    """Go on where something is left, and log why; where it failed, which is a defect, say that as rules do."""
    try:
        yield
    except IllegalSchedule as reason:
        LOG.debug("%s is no fused attention: %s", what, reason)
    except Exception as defect:  # noqa: BLE001 - schedules compute what this fails at
        note_failure(what, NAME, defect)


def _shown(extent: tirx.Expr) -> str:
    return str(int(extent) if is_constant(extent) else extent)


def _same_shape(one: Sequence[tirx.Expr], other: Sequence[tirx.Expr]) -> bool:
    return len(one) == len(other) and all(map(same_number, one, other))


def _axes(call: relax.Expr | None) -> list[int] | None:
    """Return which axes of its operand those of a call's result are; None for calls that exchange none."""
    if not is_call(call, "permute_dims"):
        return None
    count = call.args[0].ty.ndim
    return [*range(count)][::-1] if call.attrs.axes is None else [int(axis) % count for axis in call.attrs.axes]


class _Kernels:
    """Lowered kernels for a target, each once, and the functions that launch them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.multiprocessors = assumed_machine(target).multiprocessors
        self.codes: dict[tuple[Attention, AttentionForm, bool], DeviceCode] = {}

    def launched(self, one: AttentionMatch) -> tuple[AttentionMatch, tirx.PrimFunc] | None:
        """Make the function that launches attention's kernel; None, and a line in the log, where there is none."""
        with _left_with_a_reason(NAME):
            form = one.form(self.multiprocessors)
            return one, one.lowered(self._code(one.problem(), form, one.known), form)
        return None

    def _code(self, problem: Attention, form: AttentionForm, known: bool) -> DeviceCode:
        made_of = problem, form, known
        if made_of not in self.codes:
            digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:DIGITS]
            kernel = attention(
                problem,
                form.tile,
                form.stages,
                workers=self.multiprocessors,
                any_rows=not known,
            )
            self.codes[made_of] = device_code(kernel, f"{NAME}_{problem.heads}x{problem.head}_{digest}", self.target)
        return self.codes[made_of]


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    """Puts launches in the place of the calls that make what was found."""

    launched: Mapping[relax.Call, tuple[AttentionMatch, tirx.PrimFunc]] = MappingProxyType({})

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        if call not in self.launched:
            return super().visit_call_(call)
        one, function = self.launched[call]
        sources = [operand.source for operand in (one.q, one.k, one.v, *([one.mask] if one.mask else []))]
        operands = [self.visit_expr(source) for source in sources]
        return relax.call_tir(self.builder_.add_func(function, NAME), operands, call.ty)
