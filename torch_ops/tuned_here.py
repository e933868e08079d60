"""What ``ladder tune`` found for products on this user's GPUs: taken before what costs least, if it still holds.

The folder that ``--out`` named is told by $LADDER_TUNED; without it nothing is read. Of a GPU's lines those count that
were found by this TVM, for kernels whose CUDA text is still the same; what does not count is said, once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import tvm
from tvm.target import Target

from tensorir_ladder.gpus import TUNED, read
from tensorir_ladder.kernels.codegen.lowering import generate
from tensorir_ladder.kernels.tiles import HopperTile
from tensorir_ladder.schedules.cost import assumed_machine
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.launcher import TIR_PIPELINE
from tensorir_ladder.torch_ops.problem import KernelChoice, Setting
from tensorir_ladder.torch_ops.step_kernels import KERNELS

FOLDER, FILE = "LADDER_TUNED", "choices.jsonl"
Extent = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
log = logging.getLogger(__name__)


class Tuned(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a GPU's file: a product, and what was fastest."""

    m: Extent
    n: Extent
    k: Extent
    dtype: str
    layout: str
    step: int
    tile: str
    stages: Extent

    def __post_init__(self) -> None:
        if self.step not in KERNELS:
            raise ValueError(f"no kernel of step {self.step}")
        if self.choice.tile.swapped:
            raise ValueError(f"step {self.step} takes no tile of exchanged operands by such a line, as {self.tile} is")

    @property
    def choice(self) -> KernelChoice:
        """The kernel, tile and stages."""
        kernel = KERNELS[self.step]
        return KernelChoice(kernel, kernel.family.parse(self.tile), self.stages)


@functools.cache
def tuned(gpu: str) -> dict[tuple[int, int, int, str, str], KernelChoice]:
    """Read what we found by ``ladder tune`` on a GPU, by m, n, k, dtype and layout."""
    wanted = gpu.lower().replace(" ", "-")
    lines = [line for path in TUNED.glob("*.json") if path.stem == wanted for line in read(path, list[Tuned])]
    return {(line.m, line.n, line.k, line.dtype, line.layout): line.choice for line in lines}


class Found(Tuned, forbid_unknown_fields=True):
    """A line: what was fastest for a product, on which GPU, how fast beside cuBLAS, and by what it was found."""

    gpu: str
    tvm: str
    kernel: str
    ratio_to_cublas: Annotated[float, msgspec.Meta(gt=0)]

    @property
    def problem(self) -> Matmul:
        """The product."""
        return Matmul(self.m, self.n, self.k, self.dtype, self.layout)


def kernel_digest(choice: KernelChoice, problem: Matmul, multiprocessors: int) -> str:
    """Digest the CUDA text of a choice for a product, plain, on a GPU of so many multiprocessors."""
    machine = assumed_machine(Target({"kind": "cuda", "arch": HopperTile.ARCH}))
    setting = Setting(replace(machine, multiprocessors=multiprocessors))
    made = generate(tvm.IRModule({"main": choice.build(problem, setting)}), machine.target, TIR_PIPELINE)
    return hashlib.sha256(made.cuda.encode()).hexdigest()[:16]


def keep(folder: Path, found: Found) -> None:
    """Append a line to the folder's file, unless it is there; OSError where it cannot be written."""
    line = msgspec.json.encode(found) + b"\n"
    with (folder / FILE).open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = file.read()
        if line not in before.splitlines(keepends=True):
            file.write(line if not before or before.endswith(b"\n") else b"\n" + line)


@functools.cache
def tuned_here(problem: Matmul, gpu: str, multiprocessors: int) -> KernelChoice | None:
    """Return what was found to be the fastest for a product on a GPU, and still holds; None where nothing was."""
    folder = os.environ.get(FOLDER)
    lines = _lines(Path(folder, FILE)) if folder else ()
    own = [line for line in lines if line.gpu == gpu and line.problem == problem]
    for line in sorted(own, key=lambda line: -line.ratio_to_cublas):
        if line.tvm != tvm.__version__:
            why = f"TVM {line.tvm}, and this is {tvm.__version__}"
        elif line.kernel != kernel_digest(line.choice, problem, multiprocessors):
            why = "another kernel than this version makes"
        else:
            return line.choice
        log.warning("%s was tuned to step %d, %s by %s: not used", problem.shape, line.step, line.tile, why)
    return None


@functools.cache
def _lines(path: Path) -> tuple[Found, ...]:
    """Read the lines of a file, the last of each product, step and GPU; what is none is left out, with a warning."""
    found: dict[tuple[object, ...], Found] = {}
    try:
        text = path.read_bytes()
    except OSError as error:
        log.warning("$%s: cannot read %s (%s); nothing of it is used", FOLDER, path, error.strerror)
        return ()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            each = msgspec.json.decode(line, type=Found)
            found[each.gpu, each.problem, each.step] = each
        except (ValueError, RecursionError) as error:
            log.warning("%s:%d is left out (%s)", path, number, error)
    return tuple(found.values())
