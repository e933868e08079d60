"""Reusable TensorIR schedule functions.

Each function does one thing to one ``tvm.s_tir.Schedule``, takes the block or loop it works on and
returns named handles. None knows which operator it schedules.
"""

from .alignment import AlignedOperand, align_operands, unaligned_operands
from .caching import (
    CooperativeFetch,
    accumulate_in_registers,
    accumulate_per_tile,
    fetch_cooperatively,
    initialize_before,
    inline_data_movement,
    stage_in_shared,
    stage_through_registers,
)
from .contraction import StagedContraction, stage_contraction
from .errors import IllegalPipeline, IllegalSchedule, IllegalTile, IllegalWorkload
from .fragments import FRAGMENT, lower_fragments, registers_of
from .layout import flatten_contraction, pad_to_tile
from .lowering import required_tir_pipeline
from .pipeline_check import check_pipeline
from .pipeline_report import explain_pipeline
from .pipelining import PipelinePlan, double_buffer, infer_pipeline, pipeline_loop, required_pass_config
from .split_reduction import SplitReduction, add_parts, parts_to_fill, split_reduction
from .streaming import (
    CombinedReduction,
    SpreadElements,
    SpreadReduction,
    SpreadRows,
    Staging,
    StreamTile,
    spread_elements,
    spread_reduction,
    spread_rows,
)
from .swizzling import swizzle_rows
from .tensorization import (
    FragmentLoad,
    MmaInstruction,
    TensorCoreTile,
    TensorizedContraction,
    WarpLoops,
    accumulate_fragment,
    load_fragments,
    stage_in_swizzled,
    tensorize_contraction,
    tile_to_warps,
    use_instruction,
)
from .tiling import (
    BlockTile,
    TileConfig,
    TiledLoops,
    bind_elements,
    bind_grid,
    bind_threads,
    raster_blocks,
    tile_contraction,
)
from .unrolling import unroll_loop
from .vectorization import vectorize_inner, vectorize_write_back, widest_vector
from .warpgroup import (
    WarpgroupContraction,
    WarpgroupLoops,
    WarpgroupTile,
    lay_out_accumulators,
    lay_out_panels,
    multiply_by_wgmma,
    pipeline_warpgroups,
    spread_fragment,
    stage_for_warpgroups,
    store_by_rows,
    tile_for_warpgroups,
)
from .wgmma import Wgmma
from .workloads import (
    Matmul,
    batched_matmul,
    conv2d_nhwc,
    depthwise_conv2d_nhwc,
    gelu,
    matmul_bias_relu,
    row_sum,
    scale_shift,
    softmax,
)
from .workspaces import pass_workspaces, workspace_bytes, workspaces

__all__ = [
    "AlignedOperand",
    "BlockTile",
    "CombinedReduction",
    "CooperativeFetch",
    "FRAGMENT",
    "FragmentLoad",
    "IllegalPipeline",
    "IllegalSchedule",
    "IllegalTile",
    "IllegalWorkload",
    "Matmul",
    "MmaInstruction",
    "PipelinePlan",
    "SplitReduction",
    "SpreadElements",
    "SpreadReduction",
    "SpreadRows",
    "StagedContraction",
    "Staging",
    "StreamTile",
    "TensorCoreTile",
    "TensorizedContraction",
    "TileConfig",
    "TiledLoops",
    "WarpLoops",
    "WarpgroupContraction",
    "WarpgroupLoops",
    "WarpgroupTile",
    "Wgmma",
    "accumulate_fragment",
    "accumulate_in_registers",
    "accumulate_per_tile",
    "add_parts",
    "align_operands",
    "batched_matmul",
    "bind_elements",
    "bind_grid",
    "bind_threads",
    "check_pipeline",
    "conv2d_nhwc",
    "depthwise_conv2d_nhwc",
    "double_buffer",
    "explain_pipeline",
    "fetch_cooperatively",
    "flatten_contraction",
    "gelu",
    "infer_pipeline",
    "initialize_before",
    "inline_data_movement",
    "lay_out_accumulators",
    "lay_out_panels",
    "load_fragments",
    "lower_fragments",
    "matmul_bias_relu",
    "multiply_by_wgmma",
    "pad_to_tile",
    "parts_to_fill",
    "pass_workspaces",
    "pipeline_loop",
    "pipeline_warpgroups",
    "raster_blocks",
    "registers_of",
    "required_pass_config",
    "required_tir_pipeline",
    "row_sum",
    "scale_shift",
    "softmax",
    "split_reduction",
    "spread_elements",
    "spread_fragment",
    "spread_reduction",
    "spread_rows",
    "stage_contraction",
    "stage_for_warpgroups",
    "stage_in_shared",
    "stage_in_swizzled",
    "stage_through_registers",
    "store_by_rows",
    "swizzle_rows",
    "tensorize_contraction",
    "tile_contraction",
    "tile_for_warpgroups",
    "tile_to_warps",
    "unaligned_operands",
    "unroll_loop",
    "use_instruction",
    "vectorize_inner",
    "vectorize_write_back",
    "widest_vector",
    "workspace_bytes",
    "workspaces",
]
