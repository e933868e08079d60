"""TVM's Relax pipeline with the rules of this package in front of dlight's: ``relax.get_pipeline("tensorir_ladder")``.

::

    import tensorir_ladder.relax                                          # registers it

    mod = relax.get_pipeline("tensorir_ladder", target=target)(mod)
    ex = tvm.compile(mod, target)                                             # stock: no name, no configuration

What comes out is a Relax module whose functions are scheduled; TVM's own pipeline, which ``tvm.compile`` runs
over it once more, leaves them as they are.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir.transform import Pass, PassContext, Sequential
from tvm.s_tir import dlight
from tvm.target import Target

from tensorir_ladder.relax.attention import FuseAttention
from tensorir_ladder.relax.kernel_products import with_kernels_of_steps
from tensorir_ladder.relax.legalization import legalizations
from tensorir_ladder.relax.linking import link_kernels
from tensorir_ladder.relax.passes import (
    ChannelsLast,
    ComputeInFloat32,
    DequantizeInProduct,
    FoldBatchNorms,
    FoldConstants,
    FoldScales,
    KeepSumsSmall,
    LegalizeScans,
    MergeProducts,
    PatchesAsProducts,
    ReadTransposed,
    RecogniseNorms,
    SimplifyShapes,
    SinkReshapes,
    ViewResults,
    WidenInRows,
    WriteOutAttention,
)
from tensorir_ladder.relax.rules.for_target import as_cuda, dlight_rules, dlight_target, rules
from tensorir_ladder.relax.rules.rule import OPAQUE, Rule, functions_named, is_scheduled
from tensorir_ladder.relax.rules.tensor_intrinsics import import_quickly
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.passes import on_functions

NAME = "tensorir_ladder"


def pipeline(
    target: Target | str | dict[str, object] | None = None, kernels: bool = True, prepare: bool = False
) -> Pass:
    """Make the pipeline: operators to functions, fused; our rules; dlight's for what these leave.

    ``target`` is the GPU to compile for, by default the one that ``with target:`` names when the pipeline runs. With
    ``kernels`` off, attention and plain products of many rows are schedules' too, instead of explicit kernels'. With
    ``prepare``, what is computed from weights alone becomes a function of its own, ``main_transform_params``, whose
    results ``main`` takes in the place of the weights.

    Raises
    ------
    IllegalSchedule : for a target that is no CUDA GPU with sm_80 or newer.
    ValueError : when it runs without a target.
    Exception : of TVM's, with IllegalSchedule's text, when it runs on a function that no rule makes a kernel of.
    """
    given = None if target is None else as_cuda(target)  # here: what is raised in a pass loses its type

    @tvm.transform.module_pass(opt_level=0, name=NAME)
    def run(mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        chosen = given or Target.current(allow_none=True)
        if chosen is None:
            raise ValueError(f"no target; relax.get_pipeline({NAME!r}, target=...), or run it in `with target:`")
        ours, theirs = rules_with(chosen, kernels), dlight_rules()
        mod = fuse_operators(chosen, kernels, prepare)(mod).clone()  # dlight changes the module that it is given
        with chosen, functions_named(mod):
            mod = dlight.ApplyDefaultSchedule(*ours)(mod)
        with dlight_target(chosen), functions_named(mod), import_quickly():
            mod = dlight.ApplyDefaultSchedule(*theirs)(mod)
        _check_kernels(mod)
        mod = on_functions(_closed)(mod)
        return link_kernels(mod) if kernels else mod

    return run


def rules_with(target: Target, kernels: bool) -> tuple[Rule, ...]:
    """List our rules for a target (:func:`relax.rules.rules`), those that launch explicit kernels with ``kernels``."""
    ours = rules(target)
    return with_kernels_of_steps(ours) if kernels else ours


def register() -> None:
    """Let ``relax.get_pipeline`` find the pipeline by its name; again changes nothing."""
    if NAME not in relax.pipeline.PIPELINE_MAP:
        relax.register_pipeline(NAME)(pipeline)


def fuse_operators(target: Target, kernels: bool = False, prepare: bool = False) -> Pass:
    """Make the passes that turn Relax's operators into fused functions, for ``target``: TVM's, and some of ours.

    Products read a transposed operand where it lies (:class:`ReadTransposed`); TVM's own would transpose the weights
    of ``nn.Linear`` by a kernel of its own in every call. With ``kernels``, attention is one launch of an explicit
    kernel where there is one (``relax.attention``), to be linked by :func:`.linking.link_kernels`. With ``prepare``,
    what depends on weights alone is lifted out.
    """

    @tvm.transform.module_pass(opt_level=0, name="fuse_operators")
    def run(mod: ir.IRModule, _context: PassContext) -> ir.IRModule:
        if not any(isinstance(function, relax.Function) for function in mod.functions.values()):
            return mod  # TVM's passes would drop functions that nothing calls
        passes = [
            SimplifyShapes(),
            FoldBatchNorms(),
            ChannelsLast(),
            PatchesAsProducts(),
            FoldConstants(),
            SinkReshapes(),
            RecogniseNorms(),
            *([FoldScales(), MergeProducts()] if prepare else []),
            *([FuseAttention(target)] if kernels else []),
            WriteOutAttention(),
            LegalizeScans(),
            *relax.pipeline.library_dispatch_passes(target),
            ReadTransposed(),
            *([relax.transform.LiftTransformParams()] if prepare else []),
            ComputeInFloat32(),
            relax.transform.LegalizeOps(legalizations()),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            WidenInRows(),
            relax.transform.FuseTIR(),
            relax.transform.AnnotateTIROpPattern(),
            KeepSumsSmall(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            DequantizeInProduct(),
            relax.transform.FuseTIR(),
            ViewResults(),
        ]
        with target:
            return Sequential(passes)(mod)

    return run


def _check_kernels(mod: ir.IRModule) -> None:
    """Raise IllegalSchedule for a function that no rule took: TVM would compile it for the host, silently."""
    for name, function in mod.functions_items():
        if not isinstance(function, tirx.PrimFunc) or is_scheduled(function) or _is_of_the_host(function):
            continue
        loops: list[tirx.Stmt] = []
        tvm_ffi.structural_walk(function.body, ((tirx.For, tirx.AttrStmt), loops.append))
        if not any(map(_launches, loops)):
            raise IllegalSchedule(
                "no rule makes a kernel of the function",
                block=str(name.name_hint),
                remedy="write it with other operators, or schedule it: dlight's rules need loops of fixed bounds",
            )


def _is_of_the_host(function: tirx.PrimFunc) -> bool:
    attrs = function.attrs or {}
    named = attrs.get("target")
    return bool(attrs.get("tirx.is_host_func", False)) or (named is not None and named.kind.name != "cuda")


def _launches(statement: tirx.Stmt) -> bool:
    """Return whether a statement binds threads."""
    if isinstance(statement, tirx.For):
        return statement.kind == tirx.ForKind.THREAD_BINDING
    return str(statement.attr_key) == "thread_extent"


def _closed(function: ir.BaseFunc) -> ir.BaseFunc:
    """Let a later pipeline fuse nothing with a function that is scheduled."""
    if isinstance(function, tirx.PrimFunc) and is_scheduled(function):
        return function.with_attr("op_pattern", OPAQUE)
    return function
