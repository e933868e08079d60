"""Schedules' kernels as they are kept and launched, by the emulator and a stand-in for the driver."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from support.cases import small_case
from support.torch_stand_in import Tensor
from tensorir_ladder.emulator import EmulatedProgram
from tensorir_ladder.harness import built_schedules
from tensorir_ladder.harness.build import Case, lower
from tensorir_ladder.harness.built_schedules import (
    HEAD_END,
    SCHEDULES,
    SOURCES,
    LoadedSchedule,
    build_schedule,
    find_schedule,
    load_schedule,
)
from tensorir_ladder.harness.emulation import EmulatorBackend
from tensorir_ladder.harness.execution import GpuBackend, numpy_dtype
from tensorir_ladder.harness.verify import verify_launch
from tensorir_ladder.kernels.codegen.toolchain import Compiler, Cubin
from tensorir_ladder.schedules.cycles import Planned
from tensorir_ladder.torch_ops.driver import Driver

pytestmark = pytest.mark.filterwarnings("ignore:copied to", "ignore:.*more would stay empty")

MADE_UP = SimpleNamespace(version="13.0 made up")
SPLIT = replace(small_case(7, (33, 35, 131), "fitted", stages=2), planned=Planned(3, (True, False)))
BOXES = replace(small_case(10, (130, 72, 712), "boxes", stages=3), planned=Planned(2, (True, False), True, (2, 1)))
PLAIN = small_case(5, (40, 24, 50))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str]:
    """A cache of the test's own, and a compiler that makes nothing of a text; the cases it was asked for."""
    asked: list[str] = []

    def compiled(kernel: Any, _compiler: Any) -> Any:
        asked.append(kernel.label)
        return replace(kernel, cubin=Cubin(b"\x7fELF\n" + kernel.label.encode(), 40, 0, 0))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(built_schedules, "compiled", compiled)
    return asked


@pytest.mark.parametrize("case", [PLAIN, SPLIT, BOXES], ids=str)
def test_what_was_built_is_found_as_it_was_and_not_built_again(case: Case, compiles: list[str]) -> None:
    assert find_schedule(case, MADE_UP) is None
    made = build_schedule(case, MADE_UP)
    assert find_schedule(case, MADE_UP) == build_schedule(case, MADE_UP) == made
    assert compiles == [str(case)]
    assert made.cubin == b"\x7fELF\n" + str(case).encode()
    assert made.digests == lower(case).digests | {"cubin_sha256": made.digests["cubin_sha256"]}
    assert len(made.launches) == lower(case).launches
    early = [launch.overlaps for launch in made.launches]
    assert early == [case is not PLAIN] * len(early)


def test_another_case_or_compiler_has_kernels_of_its_own(compiles: list[str]) -> None:
    build_schedule(SPLIT, MADE_UP)
    others = [
        replace(SPLIT, planned=Planned(3, (True, True))),
        replace(SPLIT, planned=None),
        replace(SPLIT, stages=3),
        replace(SPLIT, problem=replace(SPLIT.problem, layout="nt")),
        replace(SPLIT, machine=replace(SPLIT.machine, multiprocessors=114)),
    ]
    assert not any(find_schedule(other, MADE_UP) for other in others)
    assert find_schedule(SPLIT, SimpleNamespace(version="13.1")) is None


def test_all_sources_that_kernels_follow_from_are_there() -> None:
    assert [pattern for pattern in SOURCES.patterns if not [*SOURCES.root.glob(pattern)]] == []


def test_nothing_is_kept_of_sources_that_were_edited_since(compiles: list[str], monkeypatch) -> None:
    monkeypatch.setattr(SOURCES, "loaded", "of before")
    build_schedule(PLAIN, MADE_UP)
    build_schedule(PLAIN, MADE_UP)
    assert len(compiles) == 2
    assert find_schedule(PLAIN, MADE_UP) is None


@pytest.mark.parametrize("head", [b"", b"{}", b"[", b'{"names":["A"],"launches":[1],"memory":[]}'])
def test_what_cannot_be_read_is_built_again(head: bytes, compiles: list[str]) -> None:
    build_schedule(PLAIN, MADE_UP)
    recipe = SCHEDULES.recipe(built_schedules._made_for(PLAIN), MADE_UP)
    SCHEDULES.cache.put(recipe, SCHEDULES.suffix, head + HEAD_END)
    assert find_schedule(PLAIN, MADE_UP) is None
    assert build_schedule(PLAIN, MADE_UP).launches
    assert len(compiles) == 2


def test_an_explicit_kernel_is_refused(compiles: list[str]) -> None:
    with pytest.raises(TypeError, match="explicit kernel"):
        build_schedule(small_case(11, (64, 64, 64), "direct"), MADE_UP)


@pytest.mark.emulator
@pytest.mark.parametrize("case", [PLAIN, SPLIT, BOXES], ids=str)
def test_the_launches_alone_make_the_product(case: Case, compiles: list[str]) -> None:
    build_schedule(case, MADE_UP)
    found, backend = find_schedule(case, MADE_UP), EmulatorBackend()
    names = *found.names, *(each.name for each in found.memory)
    memory = tuple((each.shape, numpy_dtype(each.dtype)) for each in found.memory)
    multiprocessors = case.machine.multiprocessors
    program = EmulatedProgram(
        str(case), lower(case).cuda, found.launches, names, memory, multiprocessors, found.names[:2]
    )
    verify_launch(lambda *arrays: program(*arrays, seed=1), case.problem, backend, str(case), seeds=(1,))


class Recorder:
    """libcuda's functions, which note what is launched: kernel, grid, block, attributes, and addresses by place."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.shared: dict[int, int] = {}
        self.maps: dict[int, int] = {}
        self.launched: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: getattr(self, f"_{name}", lambda *_: None)(*arguments) or 0

    def _cuModuleGetFunction(self, function: Any, _module: Any, name: bytes) -> None:
        self.names.append(name.decode())
        function._obj.value = len(self.names)

    def _cuFuncSetAttribute(self, function: Any, _attribute: int, value: int) -> None:
        self.shared[function.value] = value

    def _cuTensorMapEncodeTiled(self, encoded: Any, _dtype: int, _rank: int, address: Any, *_described: Any) -> None:
        self.maps[ctypes.addressof(encoded._obj)] = address.value

    def _cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, _extra: Any) -> None:
        made = config.contents
        kinds = [made.attributes[place].id for place in range(made.attribute_count)]
        given = [
            self.maps[value] if value in self.maps else ctypes.c_uint64.from_address(value).value
            for value in parameters
        ]
        self.launched.append((self.names[function.value - 1], tuple(made.grid), tuple(made.block), kinds, given))


@pytest.mark.parametrize("case", [PLAIN, SPLIT, BOXES], ids=str)
def test_kernels_are_launched_in_their_order_on_what_they_were_built_for(case: Case, compiles: list[str]) -> None:
    built, library = build_schedule(case, MADE_UP), Recorder()
    made: dict[int, Tensor] = {}

    def zeros(shape: tuple[int, ...], dtype: str, device: int) -> Tensor:
        assert device == 0
        tensor = Tensor.empty(shape, dtype)
        tensor.array[...] = 0
        made[tensor.data_ptr()] = tensor
        return tensor

    stream = SimpleNamespace(cuda_stream=7)
    cuda = SimpleNamespace(current_device=lambda: 0, current_stream=lambda: stream)
    torch = SimpleNamespace(cuda=cuda, zeros=zeros, float16="float16", float32="float32")
    loaded = LoadedSchedule(built, torch, Driver(library))
    problem = case.problem
    shapes = (problem.m, problem.k), problem.b_shape, (problem.m, problem.n)
    matrices = [Tensor.empty(shape, problem.dtype) for shape in shapes]
    loaded(*matrices)
    loaded(*matrices)
    assert [tensor.shape for tensor in made.values()] == [each.shape for each in built.memory]
    known = dict(zip(built.names, (matrix.data_ptr() for matrix in matrices)))
    known |= dict(zip((each.name for each in built.memory), made))
    wanted = [
        (
            launch.kernel,
            launch.grid,
            launch.block,
            [4] * (launch.cluster_blocks > 1) + [6] * launch.overlaps,
            [known[parameter.buffer] for parameter in launch.parameters],
        )
        for launch in built.launches
    ]
    assert library.launched == wanted * 2
    assert sorted(library.shared.values()) == sorted(filter(None, (launch.shared_bytes for launch in built.launches)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [PLAIN, SPLIT, BOXES], ids=str)
def test_what_was_kept_makes_the_product_on_a_gpu(case: Case, compiler: Compiler) -> None:
    build_schedule(case, compiler)
    backend = GpuBackend()
    run = load_schedule(find_schedule(case, compiler), backend)
    verify_launch(run, case.problem, backend, str(case), seeds=(1, 2))
