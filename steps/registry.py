"""Finds the steps by reading this folder: a new step is one new file, ``stepN_name.py``."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.target import Target

from tensorir_ladder.kernels.stamps import Stamps
from tensorir_ladder.schedules.errors import IllegalTile
from tensorir_ladder.schedules.tiles import BlockTile
from tensorir_ladder.schedules.workloads import DTYPES, Matmul
from tensorir_ladder.steps.config import (
    DEFAULT_STAGES,
    THREAD_TILES,
    TUNING_STAGES,
    StepConfig,
    TileFamily,
    TuningSpace,
)


class MalformedStep(TypeError):
    """A file named like a step that is none."""


class UnsupportedDtype(ValueError):
    """Operands in a dtype that a step's variant does not take."""


class UnknownStep(ValueError):
    """A step number or a variant that does not exist."""


@dataclass(frozen=True)
class Step:
    """One rung of the ladder: a module with VARIANTS and ``schedule(problem, config) -> Schedule``.

    An explicit step has ``kernel(problem, config) -> tirx.PrimFunc`` in its place: TIRx, lowered as it is written.
    """

    number: int
    name: str
    module: ModuleType

    @property
    def title(self) -> str:
        """The first line of the step's docstring."""
        return self.text.splitlines()[0].rstrip(".")

    @property
    def text(self) -> str:
        """The step's docstring."""
        return inspect.getdoc(self.module) or ""

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants' names; the first is the default where the target can run it."""
        return tuple(self.module.VARIANTS)

    def refuses(self, problem: Matmul) -> str:
        """Why the step's kernels take no product of this shape, as a clause; empty if they do."""
        return getattr(self.module, "REFUSES", lambda _: "")(problem)

    @property
    def debug_variants(self) -> tuple[str, ...]:
        """Builds that say what went wrong, which nobody measures unless asked to."""
        return tuple(getattr(self.module, "DEBUG_VARIANTS", ()))

    @property
    def pipelined(self) -> bool:
        """Whether the step has a pipeline, and so a stage count."""
        return bool(getattr(self.module, "PIPELINED", False))

    @property
    def tiles(self) -> TileFamily:
        """The tiles that the step takes."""
        return getattr(self.module, "TILES", THREAD_TILES)

    @property
    def default_stages(self) -> int:
        """Ring slots where nobody names a number."""
        return int(getattr(self.module, "STAGES", DEFAULT_STAGES))

    def fewest_stages(self, variant: str) -> int:
        """The fewest ring slots that a variant works with, of a reduction that has as many k tiles."""
        return getattr(self.module, "FEWEST_STAGES", {}).get(variant, 1)

    def default_for(
        self, problem: Matmul, target: Target, multiprocessors: int, variant: str = ""
    ) -> tuple[BlockTile, int]:
        """The tile and the ring slots that a product gets where nobody names any; those in SPLIT make parts of it."""
        split = (variant or self.variants[0]) in getattr(self.module, "SPLIT", ())
        chosen = self.tiles.choose(problem, target, multiprocessors, split=split)
        return chosen or (self.tiles.default, self.default_stages)

    @property
    def tuning_stages(self) -> tuple[int, ...]:
        """Ring slots that tuning tries, 1 without a pipeline."""
        return getattr(self.module, "TUNING_STAGES", TUNING_STAGES) if self.pipelined else (1,)

    def dtypes(self, variant: str) -> tuple[str, ...]:
        """The operands' dtypes that a variant takes; the first is the default."""
        return getattr(self.module, "DTYPES", {}).get(variant, DTYPES)

    def check_tile(self, tile: BlockTile) -> None:
        """Raise IllegalTile for a tile of another family than the step's."""
        kind = self.tiles.kind
        if not isinstance(tile, kind):
            raise IllegalTile(
                f"{self.name} takes other tiles", value=str(tile), limit=kind.FORM, remedy=f"write e.g. {kind.EXAMPLE}"
            )

    def check_dtype(self, variant: str, dtype: str) -> None:
        """Raise UnsupportedDtype with the dtypes that a variant takes."""
        if dtype not in self.dtypes(variant):
            others = [other for other in self.variants if dtype in self.dtypes(other)]
            remedy = f"; --variant {others[0]} takes it" if others else ""
            raise UnsupportedDtype(
                f"{self.name}[{variant}] takes operands in {' or '.join(self.dtypes(variant))}, not {dtype}{remedy}"
            )

    def math(self, variant: str) -> str:
        """How a variant computes products: "ieee" or "tf32"."""
        return getattr(self.module, "MATH", {}).get(variant, "ieee")

    @property
    def tensorized(self) -> bool:
        """Whether instructions replace loops that the CPU cannot run: then it verifies the schedule before that."""
        return hasattr(self.module, "schedule_before_tensorization")

    @property
    def explicit(self) -> bool:
        """Whether the step is an explicit kernel rather than a schedule."""
        return hasattr(self.module, "kernel")

    @property
    def stamped(self) -> bool:
        """Whether the step is an explicit kernel that can leave time stamps."""
        return self.explicit and "stamps" in inspect.signature(self.module.kernel).parameters

    @property
    def arch(self) -> str:
        """The architecture that the step names in ARCH, since no other has its instructions; else empty.

        Commands that need no GPU take it where nobody names another, and compile for it.
        """
        return getattr(self.module, "ARCH", "")

    @property
    def verified_on(self) -> tuple[str, ...]:
        """The ways to execute that can verify this step, the one that is taken where nobody names any first.

        LLVM is the quickest way without a GPU and needs no compiler; but it runs a tensorized step only in part, and
        an explicit kernel not at all. None for a step that has been compiled and never run.
        """
        on_cpu = ("emulator", "llvm") if self.tensorized else ("emulator",) if self.explicit else ("llvm", "emulator")
        return tuple(getattr(self.module, "VERIFIED_ON", ("gpu", *on_cpu)))

    def unverified(self, backend: str, arch: str) -> str:
        """Why a way to execute cannot verify this step on a machine, as a clause; empty where it can be tried.

        A step that has never run is tried where the GPU is of its architecture.
        """
        if backend in self.verified_on or (backend == "gpu" and arch == self.arch):
            return ""
        if not self.verified_on:
            return f"it has been compiled and never run, for want of an {self.arch}"
        if self.explicit:
            return "an explicit kernel runs on a GPU or in the emulator"
        return f"needs {' or '.join(self.verified_on)}"

    def runs(self, variant: str, async_copy: bool) -> bool:
        """Whether a target can run a variant, given whether it has cp.async."""
        return async_copy or variant not in getattr(self.module, "NEEDS_ASYNC_COPY", ())

    def takes(self, variant: str, dtype: str, async_copy: bool) -> bool:
        """Whether a target can run a variant on operands of a dtype."""
        return self.runs(variant, async_copy) and dtype in self.dtypes(variant)

    def default_variant(self, async_copy: bool = True) -> str:
        """The variant that stands for the step, given whether the target has cp.async."""
        without = getattr(self.module, "WITHOUT_ASYNC_COPY", self.variants[0])
        return self.variants[0] if async_copy else without

    def tuning_space(self, async_copy: bool = True) -> TuningSpace:
        """What tuning this step may vary: tiles; with a pipeline the ring slots; and the variants it names.

        A step names them in TUNED_VARIANTS, which must mean the same arithmetic as its default; without that
        name, and on a target without cp.async, only the default is tuned. UnknownStep names one that is none.
        """
        default = self.default_variant(async_copy)
        named = getattr(self.module, "TUNED_VARIANTS", ()) if async_copy else ()
        for variant in named:
            self.check_variant(variant)
        stages = self.tuning_stages
        variants = tuple(dict.fromkeys((default, *named)))
        return TuningSpace(self.tiles.tuning, stages, variants, self.default_stages)

    def check_variant(self, variant: str) -> None:
        """Raise UnknownStep with the variants there are."""
        if variant not in self.variants:
            raise UnknownStep(f"{self.name} has no variant {variant!r}; it has: {', '.join(self.variants)}")

    def schedule(self, problem: Matmul, config: StepConfig) -> Schedule:
        """The problem, scheduled by this step."""
        self.check_variant(config.variant)
        self.check_tile(config.tile)
        return self.module.schedule(problem, config)

    def kernel(self, problem: Matmul, config: StepConfig, stamps: Stamps | None = None) -> tirx.PrimFunc:
        """The problem as an explicit step's kernel (:attr:`explicit`); with time stamps from one that is stamped."""
        self.check_variant(config.variant)
        self.check_tile(config.tile)
        return self.module.kernel(problem, config, **({"stamps": stamps} if stamps else {}))

    def schedule_for_cpu(self, problem: Matmul, config: StepConfig) -> Schedule:
        """The same before tensorization, of a step that has one (:attr:`tensorized`)."""
        self.check_variant(config.variant)
        self.check_tile(config.tile)
        return self.module.schedule_before_tensorization(problem, config)


def find_steps(folder: Path | None = None) -> dict[int, Step]:
    """Every step of ``folder`` (this one), by number; MalformedStep names a file that is not well-formed."""
    folder = folder or Path(__file__).parent
    steps: dict[int, Step] = {}
    for path in sorted(folder.glob("step*.py")):
        match = re.fullmatch(r"step(\d+)_(\w+)\.py", path.name)
        if not match:
            raise MalformedStep(f"{path.name} is not named stepN_name.py; rename it or move it out of {folder.name}/")
        try:
            module = importlib.import_module(f"tensorir_ladder.{folder.name}.{path.stem}")
        except (SyntaxError, ImportError) as error:
            raise MalformedStep(f"{path.name} cannot be imported: {error}") from error
        problems = [
            what
            for what, present in (
                ("a docstring", bool(inspect.getdoc(module))),
                ("VARIANTS, a non-empty tuple of names", _are_names(getattr(module, "VARIANTS", ()))),
                ("either schedule(problem, config) or kernel(problem, config)", _makes_one_thing(module)),
            )
            if not present
        ]
        number = int(match.group(1))
        if problems or number in steps:
            raise MalformedStep(f"{path.name} lacks {', '.join(problems) or 'a number of its own'}")
        steps[number] = Step(number, path.stem, module)
    return dict(sorted(steps.items()))


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) for name in value)


def _makes_one_thing(module: ModuleType) -> bool:
    """Whether a step's module has one of both functions, and not the other as well."""
    return sum(callable(getattr(module, name, None)) for name in ("schedule", "kernel")) == 1


def get_step(number: int) -> Step:
    """The step of that number; UnknownStep lists those there are."""
    steps = find_steps()
    if number not in steps:
        raise UnknownStep(f"no step {number}; there are {', '.join(map(str, steps))}")
    return steps[number]
