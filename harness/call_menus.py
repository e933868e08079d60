"""Times of the call's kernels on shapes: the kernels that may be the fastest, raced with cuBLAS.

A GPU's times lie in ``reports/results``; ``ladder calibrate`` adds to them and makes the GPU's menu from them.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from tensorir_ladder.harness.cublas import Arena
from tensorir_ladder.harness.execution import GpuBackend
from tensorir_ladder.harness.machines import choosing_machine
from tensorir_ladder.harness.race import Contender, RoundPlan
from tensorir_ladder.harness.records import gpu_slug
from tensorir_ladder.harness.shapes import draw_shapes
from tensorir_ladder.harness.verify import WrongResult, draw_seeds, hold, matmul_trial
from tensorir_ladder.kernels.codegen.launch_plan import MatrixRows
from tensorir_ladder.kernels.codegen.toolchain import Compiler
from tensorir_ladder.schedules.cost import Machine
from tensorir_ladder.schedules.errors import DamagedFile
from tensorir_ladder.schedules.workloads import LAYOUTS, Matmul
from tensorir_ladder.torch_ops.driver import cuda_driver
from tensorir_ladder.torch_ops.few_rows import Streamed, streams
from tensorir_ladder.torch_ops.kept import are_kept, build_kernel, build_kernels
from tensorir_ladder.torch_ops.launcher import Launcher, load_kernel
from tensorir_ladder.torch_ops.menu import Extent, Menu, Positive
from tensorir_ladder.torch_ops.problem import KernelChoice, Setting
from tensorir_ladder.torch_ops.step_kernels import name_kernel, parse_kernel, with_stages

NAME = "call-menus.json.xz"  # behind the GPU's
Times = TypeVar("Times")  # of one GPU, which they name
GROUPS = ("llm", "random8", "decode")  # whose products TMA reads unpadded
SQUARES = "squares"  # powers of two, and a little more, whose rows lie across cache lines
SIDES = tuple(side + more for side in (256, 512, 1024, 2048, 4096, 8192) for more in (0, 24))
LIKELIEST = 16  # kernels of a shape
PLAN = RoundPlan(rounds=9, warmup_ms=25.0, sample_ms=1.0, round_budget_ms=250.0)
DIGITS = 4  # of microseconds that are kept


class TimedShape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Times of kernels for one float16 product: places in the file's list of kernels, and microseconds."""

    m: Extent
    n: Extent
    k: Extent
    layout: str
    times: Annotated[tuple[tuple[int, Positive], ...], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"no layout {self.layout!r}")

    @property
    def problem(self) -> Matmul:
        """The product."""
        return Matmul(self.m, self.n, self.k, "float16", self.layout)


class CallMenus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU's times of the call's kernels, by their names; also of kernels that the call no longer has."""

    gpu: str
    multiprocessors: Extent
    origin: str
    kernels: tuple[str, ...] = ()
    shapes: tuple[TimedShape, ...] = ()

    def __post_init__(self) -> None:
        if not all(0 <= place < len(self.kernels) for shape in self.shapes for place, _ in shape.times):
            raise ValueError("times of a kernel that is not listed")


def call_menus_path(folder: Path, gpu: str) -> Path:
    """Return where a GPU's times lie in a folder of results."""
    return folder / f"{gpu_slug(gpu)}-{NAME}"


def read_call_menus(path: Path) -> CallMenus:
    """Read a GPU's times; DamagedFile says what is wrong."""
    return read_times(path, CallMenus, call_menus_path)


def read_times(path: Path, kind: type[Times], path_of: Callable[[Path, str], Path]) -> Times:
    """Read a GPU's packed times, which lie where ``path_of(folder, gpu)`` says; DamagedFile says what is wrong."""
    try:
        times = msgspec.json.decode(lzma.decompress(path.read_bytes()), type=kind)
    except (ValueError, lzma.LZMAError) as error:  # msgspec's errors are ValueErrors
        raise DamagedFile(f"{path} is damaged ({error}); restore it from git") from error
    if path_of(path.parent, times.gpu) != path:
        raise DamagedFile(f"{path} has times of the {times.gpu}, whose name it does not bear; restore it from git")
    return times


def call_menus_bytes(menus: CallMenus) -> bytes:
    """Write a GPU's times as its file has them."""
    return lzma.compress(msgspec.json.encode(menus), preset=9)


@dataclass(frozen=True)
class MenuCandidate:
    """A kernel of the menu for a product, by its name; it can be sent to another process."""

    problem: Matmul
    name: str
    gpu: str
    multiprocessors: int

    @property
    def made_for(self) -> tuple[KernelChoice | Streamed, Matmul, Setting]:
        """The kernel's choice, its product, and its setting: see :class:`harness.commands.build.ToBuild`."""
        choice = parse_kernel(self.name)
        if isinstance(choice, KernelChoice):
            choice = with_stages(choice, self.problem, self.multiprocessors)
        return choice, self.problem, Setting(choosing_machine(self.gpu, self.multiprocessors))

    def is_kept(self, compiler: Compiler) -> bool:
        """Tell whether it was built before."""
        return are_kept([self.made_for], compiler)

    def build(self, compiler: Compiler) -> None:
        """Build it, and keep what was built."""
        build_kernels([self.made_for], compiler)

    def __str__(self) -> str:
        return f"{self.problem.shape} {self.problem.layout}: {self.name}"


def draw_products(seed: int, count: int) -> list[Matmul]:
    """Return squares, then ``count`` products of each group by a seed, one of each in turn."""
    drawn = [[one.problem for one in draw_shapes(name, seed, count, "float16")] for name in GROUPS]
    mixed = [one for of_each in zip_longest(*drawn) for one in of_each if one is not None]
    return list(dict.fromkeys([*(Matmul(side, side, side, "float16") for side in SIDES), *mixed]))


def candidates(problem: Matmul, menu: Menu, machine: Machine, likeliest: int = LIKELIEST) -> list[MenuCandidate]:
    """List the kernels that a product is timed with: those of the menu with the least estimates, the least first.

    Always the kernel that streams weights where it takes the product.
    """
    able = np.array(
        [streams(problem) if isinstance(each, Streamed) else each.takes(problem, machine) for each in menu.kernels]
    )
    us = menu.times(problem, able=able)
    places = [place for place in us.argsort()[:likeliest].tolist() if able[place] and np.isfinite(us[place])]
    names = [name_kernel(menu.kernels[place]) for place in places]
    if streams(problem) and str(Streamed()) not in names:
        names.append(str(Streamed()))
    return [MenuCandidate(problem, name, machine.name, machine.multiprocessors) for name in names]


def time_menu(
    taken: Sequence[MenuCandidate], backend: GpuBackend, compiler: Compiler
) -> tuple[dict[str, float], float]:
    """Check and time a product's kernels: microseconds by their names, and of the faster form of cuBLAS.

    Raises WrongResult for a kernel whose result is not the product's; what building raises.
    """
    problem, torch = taken[0].problem, backend.torch
    runs = []
    for each in taken:
        loaded = load_kernel(build_kernel(*each.made_for, compiler), cuda_driver(), torch.cuda.current_device())
        shapes = {"A": (problem.m, problem.k), "B": problem.b_shape, "C": (problem.m, problem.n)}
        launcher = Launcher(loaded, {name: MatrixRows(*shape, shape[1] * 2) for name, shape in shapes.items()})

        def run(a: Any, b: Any, c: Any, launcher: Launcher = launcher) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            room = launcher.workspaces.of(stream, c)
            launcher(stream, a.data_ptr(), b.data_ptr(), c.data_ptr(), *room.addresses)

        runs.append((str(each), run))
    own, cublas_us = race_menu(problem, runs, backend)
    return dict(zip((each.name for each in taken), own)), cublas_us


def race_menu(problem: Matmul, runs: Sequence[Contender], backend: GpuBackend) -> tuple[list[float], float]:
    """Check kernels of a product, then time them: microseconds of each, and of the faster form of cuBLAS.

    Raises WrongResult, with its name, for a kernel whose result is not the product's.
    """
    arena, trial = Arena(problem, backend), matmul_trial(problem, backend, draw_seeds(None, 1)[0])
    for name, run in runs:
        try:
            hold(run, trial, backend)
        except WrongResult as wrong:
            raise WrongResult(f"{name}: {wrong}") from None
    stored, other, *own = (timing.median_ms * 1e3 for timing in arena.race([*arena.cublas(), *runs], PLAN).timings)
    return own, min(stored, other)


def with_times(menus: CallMenus, problem: Matmul, times: dict[str, float]) -> CallMenus:
    """Return a GPU's times with a product's, in the place of those that it had of this product."""
    names = list(dict.fromkeys([*menus.kernels, *times]))
    key = problem.m, problem.n, problem.k, problem.layout
    placed = tuple((names.index(name), float(f"{us:.{DIGITS}g}")) for name, us in times.items())
    shapes = {(each.m, each.n, each.k, each.layout): each for each in menus.shapes}
    shapes[key] = TimedShape(*key, placed)
    return msgspec.structs.replace(menus, kernels=tuple(names), shapes=tuple(shapes.values()))
