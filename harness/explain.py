"""Explain why a variant is fast or not, by its generated code."""

from __future__ import annotations

import re

from tvm.s_tir.schedule import LoopRV

from tensorir_ladder.harness.build import MULTIPLICATIONS, Case, Kernel, lower
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.schedules.pipeline.pipelining import STAGE
from tensorir_ladder.steps.registry import find_steps


def why(kernel: Kernel) -> str:
    """Say in one or two sentences, from the generated CUDA: stages, copies, waits, barriers; identical code first."""
    twin = _identical(kernel)
    if twin:
        return f"The generated kernel is the same, character for character, as that of {twin}: no gain is possible."
    code, stages = kernel.code, kernel.code.shared_versions
    scope = "in all, the k loop being written out" if kernel.written_out else "per k tile"
    if kernel.meets_at_mbarriers:
        counts = kernel.instructions
        multiplies = next(name for name in MULTIPLICATIONS if name in counts)
        sentence = (
            f"{_counted(counts['TMA loads'], 'TMA load')} and {counts[multiplies]} {multiplies} {scope}; "
            f"{_counted(stages, 'stage')}, each with an mbarrier that counts its bytes."
        )
    elif code.cp_async:
        waits = ", ".join(f"wait_group {count}" for count in code.wait_groups) or "no wait"
        copies = f"{code.cp_async} cp.async statements of {code.cp_async_bytes} bytes a thread"
        flight = max(code.wait_groups, default=0) + _waits_first(kernel)
        tiles = f"up to {flight} k tile{'s' * (flight != 1)} stay in flight while one is multiplied"
        sentence = f"{copies} {scope}, {stages} stages, {waits}{'' if kernel.written_out else f': {tiles}'}."
    elif stages > 1 and _stores_from_registers(kernel):
        sentence = (
            f"{stages} stages; a tile's loads go to registers one iteration before their store to shared memory, "
            f"so that they are in flight across the arithmetic."
        )
    elif stages > 1:
        sentence = (
            f"{stages} stages, but each load is stored to shared memory by the same statement: the thread waits for "
            f"it before it computes, and nothing is in flight."
        )
    elif stages == 1:
        sentence = "One stage: loads and arithmetic take turns."
    else:
        sentence = "No shared memory: every operand is loaded by the thread that uses it."
    if kernel.case.form.note:
        sentence += f" {kernel.case.form.note}"
    return f"{sentence} {code.barriers} barrier{'s' * (code.barriers != 1)} {scope}.{_occupancy(kernel)}"


def pipelined_loops(kernel: Kernel) -> list[LoopRV]:
    """Return the loops of a kernel's schedule that have a software pipeline, the outermost first."""
    if kernel.explicit:
        return []
    sch, found = kernel.schedule, []
    blocks = [sch.get_sblock("root")]
    while blocks:
        block = blocks.pop(0)
        blocks += sch.get_child_blocks(block)
        for loop in sch.get_loops(block):
            if STAGE in sch.get(loop).annotations and not any(sch.get(loop).same_as(sch.get(other)) for other in found):
                found.append(loop)
    return found


def no_pipeline(kernel: Kernel) -> str:
    """Say in a sentence why a kernel has no loop with a software pipeline."""
    name = f"{kernel.case.step.name}[{kernel.case.variant}]"
    if kernel.explicit:
        return (
            f"{name} is an explicit kernel: its roles hand stages to each other by mbarriers, no loop is annotated; "
            f"ladder timeline --step {kernel.case.step.number} records on a GPU what runs when."
        )
    return f"{name} has no software pipeline: loads and arithmetic take turns."


def aspects(kernel: Kernel) -> dict[str, str]:
    """Return what differs between neighbouring steps, by aspect."""
    code, case = kernel.code, kernel.case
    resources = kernel.resources
    rows = {
        "outputs per thread": case.tile.outputs if case.tile_built == case.tile else "1",
        "operands come from": "shared memory" if code.shared_versions else "global memory, through the caches",
        "shared memory": f"{kernel.smem_bytes} bytes, {code.shared_versions} stage(s)"
        if code.shared_versions
        else "none",
        "global loads": _loads(kernel),
        "output stores": _stores(kernel),
        "barriers per k tile": f"{code.barriers}{' in all, the k loop being written out' * kernel.written_out}",
        "waits": _waits(kernel),
        "k loop": _loop_form(kernel),
        "parameters": ", ".join(_parameters(kernel)) or "none",
        "lines of generated CUDA": str(code.kernel_lines),
    }
    if resources:
        rows["registers per thread"] = str(resources.registers)
        rows["occupancy"] = f"{resources.occupancy:.0%}, limited by {resources.occupancy_limit}"
    return rows


def _identical(kernel: Kernel) -> str | None:
    case, steps = kernel.case, find_steps()
    names = case.step.variant_names
    family = case.step.tiles_of(case.variant)
    variants = [name for name in names[: names.index(case.variant)] if case.step.tiles_of(name) == family]
    alike = [
        step
        for step in steps.values()
        if step.number < case.step.number and step.tiles == case.step.tiles_of(case.variant)
    ]
    earlier = [(step, step.default_variant(case.machine.has_cp_async)) for step in alike]
    for step, variant in (*((case.step, variant) for variant in variants), *reversed(earlier)):
        other = Case(step, case.problem, variant, case.tile, case.machine, case.stages)
        if not step.takes(variant, case.problem.dtype, case.machine.has_cp_async):
            continue
        try:
            body = lower(other).body
        except IllegalSchedule:  # e.g. a variant that needs more stages
            continue
        if body == kernel.body:
            return f"{step.name}[{variant}]"
    return None


def _waits_first(kernel: Kernel) -> bool:
    # With one barrier the k loop waits before it issues its copies, which are then in flight as well.
    loop = kernel.loop_body
    return -1 < loop.find("wait_group") < loop.find("ptx_cp_async_legacy")


def _stores_from_registers(kernel: Kernel) -> bool:
    return bool(re.search(r"(?:_shared|shmem)_ptr[^=;]*= [^=;]*_local_ptr", kernel.loop_body))


def _occupancy(kernel: Kernel) -> str:
    resources = kernel.resources
    if resources is None:
        return ""
    return (
        f" {resources.registers} registers and {resources.smem_bytes} bytes of shared memory let "
        f"{resources.blocks_per_sm} blocks share a multiprocessor (occupancy {resources.occupancy:.0%}, "
        f"limited by {resources.occupancy_limit})."
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _waits(kernel: Kernel) -> str:
    if kernel.meets_at_mbarriers:
        count = kernel.instructions["mbarrier waits"]
        return f"{_counted(count, 'mbarrier')} by {'its phase' if count == 1 else 'their phases'}"
    return ", ".join(f"wait_group {count}" for count in kernel.code.wait_groups) or "none"


def _stores(kernel: Kernel) -> str:
    if kernel.meets_at_mbarriers and kernel.instructions["TMA stores"]:
        return f"TMA, {kernel.instructions['TMA stores']} {'a warpgroup' if kernel.explicit else 'by one thread'}"
    return "vectors" if kernel.code.vector_stores_kernel else "scalars"


def _loads(kernel: Kernel) -> str:
    if kernel.meets_at_mbarriers:
        return f"TMA, {kernel.instructions['TMA loads']} by one thread"
    code = kernel.code
    if code.cp_async:
        return f"cp.async of {code.cp_async_bytes} bytes"
    return "vectors" if code.vector_loads else "scalars"


def _loop_form(kernel: Kernel) -> str:
    if kernel.explicit:
        filled = _counted(max(kernel.case.stages_built - 1, 1), "stage")
        return f"first {filled} filled, then turns of the ring written out"
    stages = kernel.pipeline.get("software_pipeline_stage", [])
    form = f"prologue, body, epilogue; stages {stages}" if stages else "one loop"
    unrolled = {variant.unroll for variant in kernel.case.step.variants} != {1}
    return f"{form}; k_inner unrolled: {kernel.case.variant}" if unrolled else form


def _parameters(kernel: Kernel) -> list[str]:
    case = kernel.case
    names = [f"threads {case.tile.threads[0]} × {case.tile.threads[1]}"]
    names += [f"block_k {case.tile.block_k}"] if kernel.smem_bytes else []
    names += [f"tile {case.tile}"] if case.tile_built == case.tile else []
    names += [f"stages {case.stages_built}"] if case.step.pipelined else []
    return names
