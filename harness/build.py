"""From a case to a kernel: schedule, lower, generate CUDA, compile, and say what came out."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule

from tensorir_ladder.harness.any_rows import launched_with_rows, takes_any_rows
from tensorir_ladder.harness.machines import GpuSpec
from tensorir_ladder.harness.records import CodeFacts, Resources
from tensorir_ladder.kernels.codegen import overlap
from tensorir_ladder.kernels.codegen.host_code import WAITS_FOR_PREVIOUS
from tensorir_ladder.kernels.codegen.lowering import cuda_compiler, generate
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin, compile_cubin
from tensorir_ladder.kernels.roles import OVERLAPS
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.schedules.errors import IllegalPipeline, IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.inspection import SHARED_SCOPES, UNROLL_RING, annotated_loops, statements_of
from tensorir_ladder.schedules.loops.serpentine import required_ptxas_options
from tensorir_ladder.schedules.loops.vectorization import dtype_bytes
from tensorir_ladder.schedules.memory.workspaces import pass_workspaces, workspaces
from tensorir_ladder.schedules.pipeline import leave_stamps
from tensorir_ladder.schedules.pipeline.lowering import required_tir_pipeline
from tensorir_ladder.schedules.pipeline.pipelining import ASYNC, ORDER, STAGE, required_pass_config
from tensorir_ladder.schedules.plans import choose
from tensorir_ladder.schedules.stamps import Stamps, roles_of
from tensorir_ladder.schedules.tiles import BlockTile, WarpTile
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.steps.step import Config, Step, Variant

AnyLowered = TypeVar("AnyLowered", bound="Lowered")
ARRAYS = 3  # of a product: A, B and C
MOST_LOCAL_BYTES = 4096  # four times a thread's registers: room for the gaps between rounds of a copy
BLOCK_BARRIERS = ("__syncthreads()", "tvm_builtin_cuda_cta_sync()")  # in CUDA text, the latter of explicit kernels
INSTRUCTIONS = {  # of kernels that meet at mbarriers, as the CUDA text names them where they are called
    "TMA loads": r"cp_async_bulk_tensor_g2s\w*\(",
    "TMA stores": r"cp_async_bulk_tensor_s2g\w*\(",
    "wgmma": r"wgmma\w*_mma_async\w*\(|\bwgmma_m64n\w+\(",
    "tcgen05.mma": r"tcgen05_mma\w*\(",
    "mbarrier waits": r"\bmbarrier_wait\w*\(",
}
MULTIPLICATIONS = ("wgmma", "tcgen05.mma")  # of which a kernel has one


class UnsupportedCase(ValueError):
    """A variant that the target cannot run."""


@dataclass(frozen=True)
class Case:
    """One thing to build: a step's variant of a problem, with a tile and a stage count, for a machine."""

    step: Step
    problem: Matmul
    variant: str
    tile: BlockTile
    machine: GpuSpec
    stages: int
    tile_choice: str = "default"
    planned: Planned | None = None  # as of a Config

    @property
    def form(self) -> Variant:
        """The step's variant."""
        return self.step.variant(self.variant)

    @property
    def explicit(self) -> bool:
        """True for an explicit kernel."""
        return self.step.is_explicit(self.variant)

    @property
    def k_tiles(self) -> int:
        """K tiles of the problem."""
        return -(-self.problem.k // self.tile.block_k)

    @property
    def stages_built(self) -> int:
        """The stages that this case really has: 1 without a pipeline, never more than k tiles."""
        return min(self.stages, self.k_tiles) if self.step.pipelined and self.form.pipelined else 1

    @property
    def stages_held(self) -> int:
        """The stages that shared memory has room for: a ring that works with no fewer than two has them even where the
        reduction is one k tile."""
        return max(self.stages_built, min(self.form.fewest_stages, 2))

    @property
    def tile_built(self) -> BlockTile:
        """The tile that the step makes of the one it was given."""
        return self.step.tile_built(self.tile)

    @property
    def config(self) -> Config:
        """The configuration that the step is asked for."""
        return Config(self.variant, self.tile, self.stages, self.machine.for_choices(), self.planned)

    @property
    def math(self) -> str:
        """The arithmetic of products: "ieee", or "tf32", which rounds float32 operands to 11 bits first."""
        return self.form.math

    @property
    def lacks(self) -> str:
        """A clause: what the machine lacks for the step's variant, or why the step refuses the product; or empty."""
        if self._lacks_cp_async:
            return f"{self.machine.arch} has no cp.async"
        return self.tile.missing(self.machine.target()) or (self.step.refuses(self.problem) if self.explicit else "")

    @property
    def _lacks_cp_async(self) -> bool:
        return self.form.needs_async_copy and not self.machine.has_cp_async

    def validate(self) -> None:
        """Raise for what cannot work: what the step is not made for (:meth:`steps.step.Step.check`), a tile's limits,
        a dtype, cp.async where there is none, or too few stages.
        """
        self.step.check_tile(self.variant, self.tile)
        self.step.check_dtype(self.variant, self.problem.dtype)
        if self._lacks_cp_async:
            without = self.step.default_variant(False)
            remedy = "take step 6" if self.step.variant(without).needs_async_copy else f"use --variant {without}"
            raise UnsupportedCase(
                f"variant {self.variant!r} of {self.step.name} needs cp.async, which {self.machine.arch} lacks; "
                f"{remedy}"
            )
        try:
            self.tile.validate(self.machine.target(), dtype_bytes(self.problem.dtype), self.stages_held)
        except IllegalTile as refused:
            if self.stages <= self.stages_held:
                raise
            made = f"of {self.stages} stages {self.stages_held} are made, one for each k tile"
            raise IllegalTile(f"{made}, and {refused.problem}", remedy=refused.remedy) from None
        self.step.check(self.problem, self.config)
        fewest = self.form.fewest_stages
        if self.stages < min(fewest, self.k_tiles):
            raise IllegalPipeline(
                f"too few stages for {self.step.name}[{self.variant}]",
                value=self.stages,
                limit=f"at least {fewest}",
                remedy="give more stages",
            )

    def check_stamped(self) -> None:
        """Raise UnsupportedCase for a variant whose kernel leaves no time stamps."""
        if not self.stamped:
            name = f"{self.step.name}[{self.variant}]"
            raise UnsupportedCase(f"{name} leaves no time stamps; what TMA loads for does, in steps 11 to 13")

    @property
    def stamped(self) -> bool:
        """True where the kernel can leave time stamps."""
        return self.step.stamped

    @classmethod
    def default(
        cls, step: Step, problem: Matmul, machine: GpuSpec, variant: str = "", stages: int | None = None
    ) -> Case:
        """Make a step's case with the tile chosen for it, and its stages if None; "" is the default variant."""
        variant = variant or step.default_variant(machine.has_cp_async)
        chosen = choose(step.tiles_of(variant), problem, machine.for_choices(), plans=step.variant(variant).plans)
        return cls(step, problem, variant, chosen.tile, machine, stages or chosen.stages)

    @property
    def usual(self) -> bool:
        """True of the step's default variant."""
        return self.variant == self.step.default_variant(self.machine.has_cp_async)

    @property
    def named(self) -> dict[str, Any]:
        """The fields by which every record names a case's kernel."""
        names = {"step": self.step.number, "step_name": self.step.name, "variant": self.variant}
        return names | {"tile": str(self.tile), "stages": self.stages_built}

    def __str__(self) -> str:
        stages = f" {self.stages_built} stages" if self.stages_built > 1 else ""
        stages += f", {self.planned}" if self.planned is not None else ""
        return f"{self.step.name}[{self.variant}] {self.problem.shape} {self.problem.dtype} {self.tile}{stages}"


@dataclass(frozen=True)
class Lowered:
    """A schedule or an explicit kernel, lowered for a machine: CUDA text and, after :func:`compiled`, a cubin.

    ``label`` names it in messages; ``source`` is what was lowered.
    """

    label: str
    machine: GpuSpec
    source: Schedule | tirx.PrimFunc
    device: tvm.IRModule
    host: tvm.IRModule
    cuda: str
    cubin: Cubin | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def explicit(self) -> bool:
        """True where an explicit kernel was lowered."""
        return not isinstance(self.source, Schedule)

    @property
    def schedule(self) -> Schedule:
        """The schedule that was lowered; TypeError for an explicit kernel, which has none."""
        if self.explicit:
            raise TypeError(f"{self.label} is an explicit kernel and has no schedule; take its module, mod")
        return self.source

    @property
    def mod(self) -> tvm.IRModule:
        """The module that was lowered: its function is "main"."""
        return tvm.IRModule({"main": self.source}) if self.explicit else self.source.mod

    @property
    def schedule_for_cpu(self) -> Schedule:
        """The schedule as far as a CPU can run it."""
        return self.schedule

    @property
    def tir_pipeline(self) -> str:
        """The name of the passes that lower it as written."""
        if not self.explicit:
            return required_tir_pipeline(self.mod)
        return overlap.register() if (self.source.attrs or {}).get(OVERLAPS) else "tirx"

    @property
    def launched_early(self) -> bool:
        """True where its kernels wait by themselves for the one before them, which may still run when they begin."""
        return WAITS_FOR_PREVIOUS in self.cuda

    @property
    def pass_config(self) -> dict[str, bool]:
        """The pass configuration without which the schedule is not lowered as written."""
        return required_pass_config(self.mod)

    @property
    def ptxas_options(self) -> tuple[str, ...]:
        """Options of CUDA's assembler without which it does not keep the schedule's order."""
        return required_ptxas_options(self.mod)

    @property
    def source_sha256(self) -> str:
        """Digest of the CUDA text."""
        return hashlib.sha256(self.cuda.encode()).hexdigest()

    @property
    def digests(self) -> dict[str, str]:
        """The fields by which records say what was compiled, and for what."""
        compiled_to = self.cubin.sha256 if self.cubin else ""
        return {"source_sha256": self.source_sha256, "cubin_sha256": compiled_to, "arch": self.machine.arch}

    @property
    def launches(self) -> int:
        """Kernels that one call of the function launches."""
        return len(self.device.functions)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that its kernels leave results in for each other."""
        return sum(map(_bytes_of, self.workspaces))

    @property
    def workspaces(self) -> list[tirx.Var]:
        """That memory, as further arguments: what a schedule allocates, what an explicit kernel takes behind C.

        Time stamps, which come last, are the caller's.
        """
        if not self.explicit:
            return workspaces(self.mod)
        params = list(self.source.params[ARRAYS:])
        return params[:-1] if self.roles else params

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that leave time stamps; empty if the kernel is not stamped."""
        return roles_of(self.mod["main"])

    @cached_property
    def main_kernel(self) -> str:
        """The name of the kernel that the figures below are of: the one with the most shared memory, or text."""
        names = [name.name_hint for name in self.device.functions]
        return max(names, key=lambda name: (self._allocated(name, *SHARED_SCOPES), len(self.text_of(name))))

    def text_of(self, kernel: str) -> str:
        """Cut out a kernel's own CUDA text, without the helper functions before it and the other kernels."""
        definition = rf'^extern "C" __global__ [^{{;]*\b{kernel}\([^{{;]*\{{.*?^}}$'
        return re.search(definition, self.cuda, re.M | re.S).group(0) + "\n"

    @cached_property
    def body(self) -> str:
        """The main kernel's text."""
        return self.text_of(self.main_kernel)

    @cached_property
    def launch(self) -> dict[str, int]:
        """Extents of the main kernel's blockIdx and threadIdx, by name."""
        found = _nodes(self.device[self.main_kernel].body, tirx.AttrStmt)
        return {str(a.node.thread_tag): int(a.value) for a in found if a.attr_key == "thread_extent"}

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self._extent("threadIdx")

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self._extent("blockIdx")

    def _extent(self, prefix: str) -> int:
        return math.prod(extent for tag, extent in self.launch.items() if tag.startswith(prefix))

    @cached_property
    def smem_bytes(self) -> int:
        """Shared memory of a block, static and dynamic, as declared in the lowered kernel and by an explicit one."""
        pools = _nodes(self.source.body, tirx.AttrStmt) if self.explicit else []
        asked = sum(int(pool.value) for pool in pools if pool.attr_key == "tirx.dyn_smem_bytes")
        return self._allocated(self.main_kernel, *SHARED_SCOPES) + asked

    @cached_property
    def local_bytes(self) -> int:
        """Arrays of one thread, as declared in the lowered kernel: what should become registers."""
        return self._allocated(self.main_kernel, "local")

    @property
    def most_local_bytes(self) -> int:
        """The most that a thread of any of its kernels declares."""
        return max(self._allocated(name.name_hint, "local") for name in self.device.functions)

    def _allocated(self, kernel: str, *scopes: str) -> int:
        buffers = [alloc.buffer for alloc in _nodes(self.device[kernel].body, tirx.AllocBuffer)]
        return sum(_bytes_of(buffer) for buffer in buffers if buffer.scope() in scopes)

    @property
    def resources(self) -> Resources | None:
        """Registers, spills, shared memory and occupancy; None while not compiled."""
        if self.cubin is None:
            return None
        machine = self.machine
        resident, limit = machine.blocks_resident(self.threads, self.cubin.registers, self.smem_bytes)
        return Resources(
            registers=self.cubin.registers,
            spill_bytes=self.cubin.spill_bytes,
            smem_bytes=self.smem_bytes,
            threads=self.threads,
            blocks=self.blocks,
            blocks_per_sm=resident,
            occupancy=round(resident * self.threads / machine.threads_per_sm, 4),
            occupancy_limit=limit,
        )

    @property
    def pipeline(self) -> dict[str, list[Any]]:
        """The lists annotated on the pipelined loop, and its statements' names; empty without a pipeline.

        Not those of copies from device memory to device memory, which a kernel in front of a product's makes.
        """
        for loop in annotated_loops(self.mod, STAGE):
            statements = statements_of(loop)
            writes = {region.source.scope() for statement in statements for region in statement.writes}
            if "global" in writes and not any(statement.fills_shared for statement in statements):
                continue
            lists = {key: loop.annotations.get(key) for key in (STAGE, ORDER, ASYNC)}
            found = {key: [int(value) for value in values] for key, values in lists.items() if values is not None}
            return {"statements": [str(statement.name) for statement in statements], **found}
        return {}

    @property
    def loop_body(self) -> str:
        """The text of the loop that matters (:func:`main_loop`), or of a kernel's roles, a loop each."""
        return (self.meets_at_mbarriers and ring_loops(self.body)) or main_loop(self.body)

    @property
    def meets_at_mbarriers(self) -> bool:
        """True where TMA fills a ring, whose stages mbarriers keep: in explicit kernels, and of boxes."""
        return self.explicit or re.search(INSTRUCTIONS["TMA loads"], self.body) is not None

    @property
    def written_out(self) -> bool:
        """True where TVM has written the k loop out, so that counts of its body are counts of the whole kernel."""
        return self.loop_body == self.body


@dataclass(frozen=True)
class Kernel(Lowered):
    """A case, lowered."""

    case: Case = field(kw_only=True)

    @property
    def schedule_for_cpu(self) -> Schedule:
        """The schedule before tensorization, where the step has one."""
        case = self.case
        return case.step.schedule_for_cpu(case.problem, case.config) if case.step.schedule_for_cpu else self.schedule

    @property
    def code(self) -> CodeFacts:
        """Counts in the generated CUDA; a ring that TMA fills has no cp.async, and its waits are for mbarriers."""
        body, loop = self.body, self.loop_body
        tiles = self._k_tiles_in(loop)
        copies = asynchronous_copies(loop)
        waits = [] if self.meets_at_mbarriers else re.findall(r"wait_group_(\d+)\(\)", loop)
        return CodeFacts(
            barriers=sum(map(loop.count, BLOCK_BARRIERS)) // tiles,
            cp_async=len(copies) // tiles,
            cp_async_bytes=max(copies, default=0),
            commit_groups=0 if self.meets_at_mbarriers else loop.count("commit_group()") // tiles,
            wait_groups=tuple(int(count) for count in waits[: len(waits) // tiles]),
            vector_loads=len(re.findall(r"= \*\((?:float|half|uint)[248x1-9]*\*\)\(\w+_ptr", loop)),
            vector_stores_kernel=len(re.findall(r"^\s*\*\((?:float|half|uint)[248x1-9]*\*\)\(", body, re.M)),
            shared_versions=self._shared_versions(),
            kernel_lines=body.count("\n"),
        )

    @property
    def instructions(self) -> dict[str, int]:
        """Counts of instructions in the loop of a ring that TMA fills, or in all of it where that is written out.

        Per k tile, by their names in INSTRUCTIONS, one of MULTIPLICATIONS; stores are counted in the whole kernel. A
        schedule's wgmma is a function, called once a k tile by each warpgroup.
        """
        loop = self.loop_body
        tiles = self._k_tiles_in(loop)
        found = {
            name: len(re.findall(pattern, loop)) // tiles
            for name, pattern in INSTRUCTIONS.items()
            if name not in MULTIPLICATIONS or re.search(pattern, self.body)
        }
        return found | {"TMA stores": len(re.findall(INSTRUCTIONS["TMA stores"], self.body))}

    def _shared_versions(self) -> int:
        """Count the k tiles that fit into the kernel's shared memory; 0 without any.

        As asked for with tiles of warps, whose padding and sums of slices are in the same bytes, and in explicit
        kernels, whose results are.
        """
        case = self.case
        if not self.smem_bytes or self.explicit or isinstance(case.tile, WarpTile):
            return case.stages_built if self.smem_bytes else 0
        return round(self.smem_bytes / case.tile_built.smem_bytes(dtype_bytes(case.problem.dtype)))

    def _k_tiles_in(self, loop: str) -> int:
        """Count the k tiles of one iteration of the k loop: a turn of the ring where that is written out."""
        rings = [int(ring.annotations[UNROLL_RING]) for ring in annotated_loops(self.mod, UNROLL_RING)]
        rings = [self.case.stages_built] if self.explicit else rings
        return rings[0] if rings and re.match(r"\s*for \(int turn", loop) else 1


def _nodes(body: tirx.Stmt, kind: type) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(body, (kind, found.append))
    return found


def _bytes_of(buffer: tirx.Buffer) -> int:
    return math.prod(map(int, buffer.shape)) * dtype_bytes(buffer.dtype)


def asynchronous_copies(text: str) -> list[int]:
    """List the bytes of each cp.async in a text of generated CUDA."""
    return [int(size) for size in re.findall(r"ptx_cp_async_legacy(?:_pred)?_c[ag]_(\d+)", text)]


def main_loop(body: str) -> str:
    """Find the loop over k tiles in a kernel's text: the longest outermost ``for`` in which threads meet.

    Where TVM has written the k loop out (few k tiles, many stages) there is none: then the whole text.
    """
    lines = body.splitlines()
    loops: list[str] = []
    start, depth = None, 0
    for number, line in enumerate(lines):
        if depth == 1 and re.match(r"\s*for \(", line):
            start = number
        depth += line.count("{") - line.count("}")
        if depth == 1 and line.strip() == "}" and start is not None:
            loops.append("\n".join(lines[start : number + 1]))
            start = None
    if any(barrier in body for barrier in BLOCK_BARRIERS):
        loops = [loop for loop in loops if any(barrier in loop for barrier in BLOCK_BARRIERS)]
    return max(loops or [body], key=len)


def ring_loops(body: str) -> str:
    """Find the loops over turns of a ring in an explicit kernel's text, in turn, whichever warps run them."""
    loops = re.findall(r"^( *)(for \(int turn\w* = .*?^\1\})$", body, re.M | re.S)
    return "\n".join(indent + loop for indent, loop in loops)


def lower(case: Case, stamps: Stamps | None = None) -> Kernel:
    """Schedule a case and lower it to CUDA text; needs neither a compiler nor a GPU.

    With ``stamps`` its function has one more output, behind the product. Raises what :meth:`Case.validate` and the
    schedule functions raise; UnsupportedCase for stamps from a step that leaves none.
    """
    case.validate()
    if stamps:
        case.check_stamped()
    make = case.step.maker(case.variant)
    stamped = {"stamps": stamps} if stamps and case.explicit else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = make(case.problem, case.config, **stamped)
        if stamps and not case.explicit:
            source = leave_stamps(source, stamps)
    lowered = lower_schedule(source, case.machine, str(case))
    shared = {part.name: getattr(lowered, part.name) for part in fields(lowered)}
    if takes_any_rows(lowered.device):
        shared |= launched_with_rows(lowered.host, lowered.device, case.problem.m)
    return Kernel(**{**shared, "warnings": tuple(str(warning.message) for warning in caught)}, case=case)


def lower_schedule(source: Schedule | tirx.PrimFunc, machine: GpuSpec, label: str) -> Lowered:
    """Lower any schedule of one function, or an explicit kernel, to CUDA text; needs neither a compiler nor a GPU.

    Raises IllegalSchedule where a thread's own arrays are too large for registers, or a block's for shared memory.
    """
    planned = Lowered(label, machine, source, tvm.IRModule(), tvm.IRModule(), "")
    config = planned.pass_config
    made = generate(pass_workspaces(planned.mod), machine.target(), planned.tir_pipeline, config)
    lowered = replace(planned, device=made.device, host=made.host, cuda=made.cuda)
    if lowered.most_local_bytes > MOST_LOCAL_BYTES:
        raise IllegalSchedule(
            f"{label}: a thread's own arrays are too large for registers, so that it would keep other threads' data",
            value=f"{lowered.most_local_bytes} bytes",
            limit=MOST_LOCAL_BYTES,
            remedy="spread register loads and their stores alike (fetch_cooperatively with load=)",
        )
    if lowered.smem_bytes > (most := machine.smem_per_block_bytes):
        raise IllegalSchedule(
            f"{label}: a block has more shared memory than there is on {machine.arch}",
            value=f"{lowered.smem_bytes} bytes",
            limit=most,
            remedy="give a smaller tile or fewer stages",
        )
    return lowered


def compiled(kernel: AnyLowered, compiler: Compiler) -> AnyLowered:
    """Give a kernel its cubin, from the cache or the compiler."""
    options = kernel.ptxas_options
    return replace(kernel, cubin=compile_cubin(kernel.cuda, kernel.machine.arch, compiler, options, kernel.main_kernel))


@dataclass(frozen=True)
class Program:
    """TVM's executable for the GPU at hand, and the memory that its kernels leave results in for each other.

    ``program["main"](a, b, c)`` runs it; with stamps, ``(a, b, c, words)``. The memory is the program's own: what a
    CUDA graph captured stays valid as long as the program lives, and two calls must not run at once.
    """

    executable: tvm.runtime.Executable
    memory: tuple[Any, ...] = ()

    def __getitem__(self, name: str) -> Callable[..., Any]:
        function = self.executable[name]
        if not self.memory:
            return function
        return lambda *arrays: function(*arrays[:ARRAYS], *self.memory, *arrays[ARRAYS:])


def executable(kernel: Lowered) -> Program:
    """Make the program for the GPU at hand that runs exactly ``kernel.cubin``; call ``executable(kernel)["main"]``."""
    if kernel.cubin is None:
        raise ValueError(f"{kernel.label} is not compiled; call compiled(kernel, compiler) first")

    def deliver(source: str) -> bytes:
        if source != kernel.cuda:
            raise RuntimeError(f"TVM generated other CUDA text for {kernel.label} than the text that was compiled")
        return kernel.cubin.data

    # Zeros, which flags begin as.
    empty = [np.zeros(list(map(int, buffer.shape)), str(buffer.dtype)) for buffer in kernel.workspaces]
    memory = [tvm.runtime.tensor(array, tvm.cuda()) for array in empty]
    program = compile_module(
        pass_workspaces(kernel.mod), kernel.machine, deliver, kernel.pass_config, kernel.tir_pipeline
    )
    return Program(program, tuple(memory))


def compile_module(
    mod: tvm.IRModule,
    machine: GpuSpec,
    deliver: Callable[[str], bytes],
    pass_config: dict[str, bool] | None = None,
    tir_pipeline: str = "",
) -> tvm.runtime.Executable:
    """Build TVM's executable of a module; ``deliver(cuda text)`` gives the cubin that it runs.

    ``tir_pipeline`` names the passes that lower it, those of a scheduled module where none is named.
    """
    with cuda_compiler(deliver), tvm.transform.PassContext(config=pass_config or {}):
        return tvm.compile(mod, target=machine.target(), tir_pipeline=tir_pipeline or required_tir_pipeline(mod))
