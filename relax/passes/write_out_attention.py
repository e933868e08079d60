"""Attention that no fused kernel takes becomes two products with a softmax between them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import tvm
from tvm import ir, relax, te, tirx
from tvm.ir.transform import PassContext
from tvm.relax import op

from tensorir_ladder.kernels.attention import BY_HEAD
from tensorir_ladder.relax.attention_operands import BATCH, HEAD, HEADS, TOKENS, Operand, ways_to_read
from tensorir_ladder.relax.elements import Elements
from tensorir_ladder.relax.rules import NotTaken, same_number
from tensorir_ladder.schedules.inspection import is_constant

NAMES = ("relax.nn.attention", "relax.nn.attention_bias")
NARROW = ("float16", "bfloat16")
LEAST = -1e30  # a masked score: weights of a query that sees no key are equal, and not NaN
TURNED, LAST_TURNED = [0, 2, 1, 3], [0, 1, 3, 2]
ORDER = {True: (BATCH, HEADS, TOKENS, HEAD), False: (BATCH, TOKENS, HEADS, HEAD)}  # by heads, by tokens


@tvm.transform.module_pass(opt_level=0, name="WriteOutAttention")
class WriteOutAttention:
    """Write out ``R.nn.attention`` and ``R.nn.attention_bias``, with scores and their softmax in float32.

    ::

        before   o = nn.attention_bias(q, k, v, bias, causal_mask="TopLeft")               # float16, by tokens
        after    s = matmul(q_t, transpose(k_t), out_dtype="float32") * scale + bias       # q_t, k_t, v_t by heads
                 w = astype(softmax(max(where(key <= query, s, -1e30), -1e30)), "float16")
                 o = permute_dims(matmul(w, v_t), [0, 2, 1, 3])

    TVM's own legalization makes one function of all this, which no rule schedules well. Heads that share keys and
    values become rows of one product, [batch, heads of keys, sharing heads * queries, head], and are not repeated.
    Attention with a window is left.
    """

    def transform_module(self, mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        """Rewrite each Relax function of a module."""
        rewriter = _WrittenOut(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
                bindings = [binding for block in function.body.blocks for binding in block.bindings]
                made = {each.var: each.value for each in bindings if isinstance(each, relax.VarBinding)}
                if any(_is_attention(value) for value in made.values()):
                    rewriter.made = made
                    changed = relax.analysis.remove_all_unused(rewriter.visit_expr(function))
                    rewriter.builder_.update_func(name, changed)
        return rewriter.builder_.get()


def _is_attention(value: relax.Expr) -> bool:
    named = isinstance(value, relax.Call) and isinstance(value.op, ir.Op) and value.op.name in NAMES
    return named and value.attrs.window_size is None


@relax.expr_functor.mutator
class _WrittenOut(relax.PyExprMutator):
    made: Mapping[relax.Var, relax.Expr] = MappingProxyType({})

    def visit_call_(self, call: relax.Call) -> relax.Expr:  # what the mutator's base class calls it
        if not _is_attention(call):
            return super().visit_call_(call)
        emit, dtype = self.builder_.emit, str(call.args[0].ty.dtype)
        wide = "float32" if dtype in NARROW else dtype
        ways = [self._ways(operand, tokens) for operand, tokens in zip(call.args, ("queries", "keys", "keys"))]
        sharing = max({way.sharing for way in ways[1]} & {way.sharing for way in ways[2]}, default=1)
        q, k, v = (self._by_heads(*each) for each in zip(call.args, ways, (1, sharing, sharing)))
        batch, heads, queries, head = q.ty.shape
        grouped = [batch, heads // sharing, queries * sharing]
        if sharing > 1:
            q = emit(op.reshape(q, [*grouped, head]))
        scores = emit(op.matmul(q, emit(op.permute_dims(k, LAST_TURNED)), out_dtype=wide))
        scores = emit(op.multiply(scores, relax.const(self._scale(call, head), wide)))
        keys, masked = k.ty.shape[2], len(call.args) > 3 or call.attrs.causal_mask is not None
        if sharing > 1 and masked:
            scores = emit(op.reshape(scores, [batch, heads, queries, keys]))
        weights = emit(op.nn.softmax(self._masked(call, scores) if masked else scores))
        weights = weights if wide == dtype else emit(op.astype(weights, dtype))
        if sharing > 1 and masked:
            weights = emit(op.reshape(weights, [*grouped, keys]))
        made = emit(op.matmul(weights, v))
        if sharing > 1:
            made = emit(op.reshape(made, [batch, heads, queries, made.ty.shape[3]]))
        return op.permute_dims(made, TURNED)

    def _scale(self, call: relax.Call, head: ir.Expr) -> float:
        if call.attrs.scale is None and not is_constant(head):
            raise ValueError(f"attention without a scale needs heads of known size, not {head}")
        return int(head) ** -0.5 if call.attrs.scale is None else float(call.attrs.scale.value)

    def _masked(self, call: relax.Call, scores: relax.Expr) -> relax.Expr:
        """Mask scaled scores, [batch, heads, queries, keys]."""
        emit, wide = self.builder_.emit, str(scores.ty.dtype)
        for bias in call.args[3:]:
            bias = self.visit_expr(bias)
            bias = bias if str(bias.ty.dtype) == wide else emit(op.astype(bias, wide))
            scores = emit(op.maximum(emit(op.add(scores, bias)), relax.const(LEAST, wide)))
        if call.attrs.causal_mask is None:
            return scores
        from_the_end = call.attrs.causal_mask == "BottomRight"

        def causal(scores: te.Tensor) -> te.Tensor:
            later = scores.shape[3] - scores.shape[2] if from_the_end else 0
            hidden = tirx.const(LEAST, wide)
            return te.compute(
                scores.shape, lambda b, h, i, j: tirx.Select(j <= i + later, scores[b, h, i, j], hidden), name="causal"
            )

        return self.builder_.emit_te(causal, scores, primfunc_name_hint="causal")

    def _ways(self, operand: relax.Expr, tokens: str) -> list[Operand]:
        """List whole tensors of four axes that an operand is, with tokens and heads exchanged, or heads repeated."""
        with suppress(NotTaken):  # the operand itself will do
            ways = ways_to_read(Elements(self.made), operand, ORDER[False], tokens)
            return [way for way in ways if way.factor == 1 and _is_whole(way)]
        return []

    def _by_heads(self, operand: relax.Expr, ways: list[Operand], sharing: int) -> relax.Expr:
        """Return an operand as [batch, heads, tokens, head]."""
        way = next((way for way in ways[::-1] if way.sharing == sharing), None)
        source = self.visit_expr(operand if way is None else way.source)
        if way is not None and way.layout == BY_HEAD:
            return source
        return self.builder_.emit(op.permute_dims(source, TURNED))


def _is_whole(way: Operand) -> bool:
    """Tell whether an operand is all of a tensor, in the order of its layout's axes."""
    shape, order = way.source.ty.shape, ORDER[way.layout == BY_HEAD]
    whole = len(shape) == len(order) and all(same_number(*pair) for pair in zip(shape, (way.extents[i] for i in order)))
    return whole and way.start == (0, 0)
