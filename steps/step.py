"""A step of the ladder: one declaration, ``STEP = Step(…)``, at the end of its file.

A step makes a schedule, or an explicit kernel, for a product and a configuration. All that others must know of it and
of its variants is a field here: nobody reads names or compares numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tensorir_ladder.schedules.errors import IllegalSchedule, IllegalTile
from tensorir_ladder.schedules.tiles import BlockTile, Choice, TileSet
from tensorir_ladder.schedules.workloads import DTYPES, Matmul

if TYPE_CHECKING:
    from tvm import tirx
    from tvm.s_tir import Schedule

    from tensorir_ladder.schedules.cost import Machine
    from tensorir_ladder.schedules.cycles import Planned

Made = TypeVar("Made")
HALVES = ("float16", "bfloat16")  # what tensor cores take without rounding


class UnsupportedDtype(ValueError):
    """Operands in a dtype that a step's variant does not take."""


class UnknownStep(ValueError):
    """A step number or a variant that does not exist."""


@dataclass(frozen=True)
class Variant:
    """One form of a step.

    ``dtypes`` are the operands' dtypes that it takes, the first by default; ``math`` is "ieee", or "tf32", which rounds
    float32 operands to 11 bits first. ``needs_async_copy``: it needs cp.async (sm_80 and newer). ``pipelined``: its k
    loop has stages. ``fewest_stages``: it works with no fewer, of a reduction that has as many k tiles. ``tuned``:
    tuning may take it in the default's place, since it computes the same in the same order. ``debug``: a build that
    says what went wrong, which nobody measures unless asked to. ``tiles`` are those that it chooses among, where the
    step's are not. ``schedule(problem, config, planned)`` makes it in the place of the step's, for products of any
    shape, from what :meth:`Step.plan` returns; ``kernel(problem, config)`` as an explicit kernel.
    What models of its time ask: ``one_barrier`` per k tile; ``unrolled_ring``, so that stage numbers are constants;
    ``unroll``, how many steps of a k tile are written out (None: all); ``modelled``: the depth model covers its loop.
    ``note``: a sentence that its code cannot tell.
    """

    name: str
    dtypes: tuple[str, ...] = DTYPES
    math: str = "ieee"
    needs_async_copy: bool = False
    pipelined: bool = True
    fewest_stages: int = 1
    tuned: bool = False
    debug: bool = False
    tiles: TileSet | None = None
    schedule: Callable[..., Schedule] | None = None
    kernel: Callable[..., tirx.PrimFunc] | None = None
    one_barrier: bool = False
    unrolled_ring: bool = False
    unroll: int | None = 1
    modelled: bool = False
    note: str = ""

    @property
    def plans(self) -> bool:
        """True where what it does beside its tile is planned for each product (:mod:`schedules.plans`)."""
        return self.schedule is not None


@dataclass(frozen=True)
class Config:
    """A request to build a step: the variant's name, the tile, and the machine that it is for.

    ``stages`` are k tiles of both operands in shared memory, for the steps that pipeline (others ignore it): n stages
    keep n − 1 tiles on their way, 1 is no pipeline. ``planned``: in how many parts the reduction goes, which operands
    are copied first, and so on, for variants that find that by the cost model where it is None (:meth:`Step.plan`).
    """

    variant: str
    tile: Any  # of the family that the step takes
    stages: int
    machine: Machine
    planned: Planned | None = None

    def k_tiles(self, problem: Matmul) -> int:
        """Return how many k tiles a product has."""
        return -(-problem.k // self.tile.block_k)

    def stages_of(self, problem: Matmul) -> int:
        """Return the stages that a product can fill: no more than it has k tiles."""
        return min(self.stages, self.k_tiles(problem))


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the ladder.

    Either ``schedule(problem, config)`` makes a TVM schedule, or ``kernel(problem, config)`` an explicit TIRx kernel,
    lowered as it is written; a variant may have a kernel of its own (:meth:`maker`). Where instructions replace loops
    that the CPU cannot run, ``schedule_for_cpu`` makes the same schedule before that. ``text`` is the file's
    docstring. ``tiles`` are those that it takes; ``tile_built`` is what it makes of one; ``stages`` are taken where
    nobody names a number, ``tuning_stages`` what tuning tries.
    ``variants``: the first stands for the step, ``without_async_copy`` on targets that lack cp.async. ``stamped``: its
    explicit kernels take ``stamps``, and leave time stamps. ``arch``: the only architecture with its instructions.
    ``never_run``: it has been compiled only. ``refuses(problem)`` says why its explicit kernels take no product of a
    shape, as a clause. Two steps are the same if they are the same object.
    """

    number: int
    topic: str
    text: str
    tiles: TileSet
    variants: tuple[Variant, ...]
    schedule: Callable[[Matmul, Config], Schedule] | None = None
    schedule_for_cpu: Callable[[Matmul, Config], Schedule] | None = None
    kernel: Callable[..., tirx.PrimFunc] | None = None
    stages: int = 1
    tuning_stages: tuple[int, ...] = (1,)
    pipelined: bool = False
    tile_built: Callable[[Any], BlockTile] = lambda tile: tile
    without_async_copy: str = ""
    stamped: bool = False
    arch: str = ""
    never_run: bool = False
    refuses: Callable[[Matmul], str] = lambda problem: ""

    def __post_init__(self) -> None:
        names = self.variant_names
        if not names or len(set(names)) < len(names):
            raise TypeError(f"step {self.number} has the variants {names}: at least one, each with a name of its own")
        if (self.schedule is None) == (self.kernel is None):
            raise TypeError(
                f"step {self.number} has schedule {self.schedule} and kernel {self.kernel}: give one of them"
            )
        if self.text is None and sys.flags.optimize > 1:  # python -OO, which keeps no docstrings
            object.__setattr__(self, "text", f"Step {self.number}, {self.topic.replace('_', ' ')}.")
        if not (self.text or "").strip():  # a file without a docstring has None
            raise TypeError(f"step {self.number} has no text: give its file a docstring and pass text=__doc__")

    @property
    def name(self) -> str:
        """``stepN_topic``, as its file is called."""
        return f"step{self.number}_{self.topic}"

    @property
    def title(self) -> str:
        """The first line of the step's text."""
        return self.text.strip().splitlines()[0].rstrip(".")

    @property
    def variant_names(self) -> tuple[str, ...]:
        """The variants' names; the first stands for the step where the target can run it."""
        return tuple(variant.name for variant in self.variants)

    @property
    def explicit(self) -> bool:
        """True where an explicit kernel stands for the step, False for a schedule."""
        return self.kernel is not None

    def is_explicit(self, variant: str) -> bool:
        """Return whether a variant is an explicit kernel."""
        return self.explicit or self.variant(variant).kernel is not None

    def maker(self, variant: str) -> Callable[..., Any]:
        """Return what makes a variant of a problem and a configuration: its own kernel, or what makes the step."""
        make = self.variant(variant).kernel or self.kernel or self.schedule
        if make is None:
            raise TypeError(f"{self.name} has neither a schedule nor a kernel")
        return make

    @property
    def tensorized(self) -> bool:
        """True where instructions replace loops that the CPU cannot run: it then verifies the schedule before that."""
        return self.schedule_for_cpu is not None

    def verified_on(self, variant: str) -> tuple[str, ...]:
        """Return the ways to execute that can verify a variant, the one that is taken where nobody names any first.

        LLVM is the quickest way without a GPU and needs no compiler; but it runs a tensorized step only in part, and
        an explicit kernel not at all. None for a step that has been compiled and never run.
        """
        if self.never_run:
            return ()
        if self.is_explicit(variant):
            return ("gpu", "emulator")
        return ("gpu", *(("emulator", "llvm") if self.tensorized else ("llvm", "emulator")))

    def variant(self, name: str) -> Variant:
        """Return the variant of that name; UnknownStep lists those there are."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise UnknownStep(f"{self.name} has no variant {name!r}; it has: {', '.join(self.variant_names)}")

    def tiles_of(self, name: str) -> TileSet:
        """Return the tiles that a variant chooses among."""
        return self.variant(name).tiles or self.tiles

    def tile(self, variant: str, text: str) -> BlockTile:
        """Read a variant's tile; IllegalTile for a text that is none."""
        return self.tiles_of(variant).kind.parse(text)

    def plan(self, problem: Matmul, config: Config) -> Planned:
        """Return what a schedule does beside its tile: what the configuration says, or else what should be fastest.

        Raises TypeError for a variant that plans nothing.
        """
        if config.planned is not None:
            return config.planned
        if not self.variant(config.variant).plans:
            raise TypeError(f"{self.name}[{config.variant}] plans nothing")
        from tensorir_ladder.schedules.plans import cheapest_plan  # which a step without plans does not stand on

        formula, choice = self.tiles_of(config.variant).formula, Choice(config.tile, config.stages)
        return cheapest_plan(formula, choice, problem, config.machine)

    def default_variant(self, async_copy: bool = True) -> str:
        """Return the variant that stands for the step, given whether the target has cp.async."""
        return self.variants[0].name if async_copy else self.without_async_copy or self.variants[0].name

    def tuned_variants(self, async_copy: bool = True) -> tuple[str, ...]:
        """Return the variants that tuning takes; only the default on a target without cp.async.

        Where explicit kernels of a step are tuned, which products of torch tensors choose from, it is these alone.
        """
        tuned = [variant.name for variant in self.variants if variant.tuned and async_copy]
        explicit = [name for name in tuned if self.is_explicit(name)]
        return tuple(dict.fromkeys(explicit or (self.default_variant(async_copy), *tuned)))

    def takes(self, variant: str, dtype: str, async_copy: bool) -> bool:
        """Return whether a target can run a variant on operands of a dtype."""
        form = self.variant(variant)
        return (async_copy or not form.needs_async_copy) and dtype in form.dtypes

    def check(self, problem: Matmul, config: Config) -> None:
        """Raise for what its schedule or kernel cannot be asked for.

        UnknownStep for another step's variant, IllegalTile for another family's tile, IllegalWorkload for a product
        that a schedule's tiles pad beyond 2³¹ elements, IllegalSchedule for what a variant cannot plan.
        """
        self.check_tile(config.variant, config.tile)
        if not self.is_explicit(config.variant):
            problem.check_padded(self.tile_built(config.tile).block)
        if config.planned is not None:
            self._check_planned(problem, config, config.planned)

    def _check_planned(self, problem: Matmul, config: Config, planned: Planned) -> None:
        from tensorir_ladder.schedules.plans import able_plans  # which a step without plans does not stand on

        form, formula = self.variant(config.variant), self.tiles_of(config.variant).formula
        if not form.plans:
            raise IllegalSchedule(f"{self.name}[{form.name}] plans nothing", value=planned, remedy="leave planned out")
        most = config.k_tiles(problem)
        if not 1 <= planned.parts <= most:
            raise IllegalSchedule(
                f"{self.name}[{form.name}] does not sum a reduction of {most} k tiles in such parts",
                value=planned.parts,
                limit=f"1 to {most}",
                remedy="give others, or leave planned out",
            )
        choice = Choice(config.tile, config.stages)
        ways = able_plans(formula, choice, problem, config.machine, planned.parts)
        for name, value, able in zip(planned._fields, planned, zip(*ways)):
            if value not in able:
                raise IllegalSchedule(
                    f"{self.name}[{form.name}] {config.tile} cannot take {problem.shape} {problem.layout} so",
                    value=f"{name} {value}",
                    limit=" or ".join(map(str, dict.fromkeys(able))),
                    remedy="give one of these, or leave planned out",
                )

    def check_tile(self, variant: str, tile: BlockTile) -> None:
        """Raise IllegalTile for a tile of another family than the variant's."""
        kind = self.tiles_of(variant).kind
        if not isinstance(tile, kind):
            raise IllegalTile(
                f"{self.name} takes other tiles", value=str(tile), limit=kind.FORM, remedy=f"write e.g. {kind.EXAMPLE}"
            )

    def check_dtype(self, variant: str, dtype: str) -> None:
        """Raise UnsupportedDtype with the dtypes that a variant takes."""
        taken = self.variant(variant).dtypes
        if dtype not in taken:
            others = [other.name for other in self.variants if dtype in other.dtypes]
            remedy = f"; --variant {others[0]} takes it" if others else ""
            raise UnsupportedDtype(
                f"{self.name}[{variant}] takes operands in {' or '.join(taken)}, not {dtype}{remedy}"
            )

    def unverified(self, variant: str, backend: str, arch: str) -> str:
        """Return why a way to execute cannot verify a variant on a machine, as a clause; empty where it can be tried.

        A step that has never run is tried where the GPU is of its architecture.
        """
        ways = self.verified_on(variant)
        if backend in ways or (backend == "gpu" and arch == self.arch):
            return ""
        if not ways:
            return f"it has been compiled and never run, for want of an {self.arch}"
        if self.is_explicit(variant):
            return "an explicit kernel runs on a GPU or in the emulator"
        return f"needs {' or '.join(ways)}"


def checked(make: Callable[..., Made]) -> Callable[..., Made]:
    """Have a step's ``schedule`` or ``kernel`` ask its file's STEP first (:meth:`Step.check`), whoever calls it.

    A variant that has a ``schedule`` is made by that one, as :meth:`Step.plan` says.
    """

    @functools.wraps(make)
    def check_and_make(problem: Matmul, config: Config, **more: Any) -> Any:
        step: Step = make.__globals__["STEP"]
        step.check(problem, config)
        if own := step.variant(config.variant).schedule:
            return own(problem, config, step.plan(problem, config), **more)
        return make(problem, config, **more)

    return check_and_make
