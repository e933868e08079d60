"""Write down what was found where products of torch tensors look for it (:mod:`torch_ops.tuned_here`)."""

from __future__ import annotations

from pathlib import Path

from tensorir_ladder.harness.build import Case
from tensorir_ladder.harness.records import TunedConfig
from tensorir_ladder.harness.records.writing import cannot_write
from tensorir_ladder.schedules.workloads import Matmul
from tensorir_ladder.torch_ops.problem import KernelChoice
from tensorir_ladder.torch_ops.step_kernels import KERNELS
from tensorir_ladder.torch_ops.tuned_here import FILE, Found, keep


def chosen_of(case: Case, tuned: TunedConfig) -> tuple[KernelChoice, Matmul, int] | None:
    """Return what products of torch tensors would take, for what product, on how many multiprocessors.

    None for a step that they do not choose from or a schedule, another output than the operands' dtype, and what no GPU
    measured.
    """
    multiprocessors = tuned.environment.multiprocessors
    is_called = tuned.step in KERNELS and case.step.is_explicit(tuned.winner.variant)
    if not is_called or tuned.out_dtype != tuned.dtype or not multiprocessors:
        return None
    tile = case.step.tile(tuned.winner.variant, tuned.winner.tile)
    return KernelChoice(KERNELS[tuned.step], tile, tuned.winner.stages), case.problem, multiprocessors


def keep_choice(folder: Path, tuned: TunedConfig, digest: str) -> None:
    """Append it to the folder's file; RecordError where that cannot be written."""
    fields = ("m", "n", "k", "dtype", "layout", "step", "ratio_to_cublas")
    found = Found(
        **{name: getattr(tuned, name) for name in fields},
        tile=tuned.winner.tile,
        stages=tuned.winner.stages,
        gpu=tuned.environment.gpu,
        tvm=tuned.environment.versions["tvm"],
        kernel=digest,
    )
    try:
        keep(folder, found)
    except OSError as error:
        raise cannot_write(folder / FILE, error) from error
