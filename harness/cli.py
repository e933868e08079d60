"""The command line: one grammar for ``python -m harness COMMAND`` and ``python steps/stepN_name.py``.

What a command does and takes is in the module of its name in :mod:`harness.commands`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tensorir_ladder.emulator import EmulatorError, KernelFault
from tensorir_ladder.harness.build import UnsupportedCase
from tensorir_ladder.harness.commands import BAD_INPUT, WRONG
from tensorir_ladder.harness.commands.options import UsageError
from tensorir_ladder.harness.counters import NoProfiler
from tensorir_ladder.harness.execution import NoGpu
from tensorir_ladder.harness.lab.microbench import UnknownQuantity, UnsuitableGpu
from tensorir_ladder.harness.lab.sanitizer.agreement import BadAgreement
from tensorir_ladder.harness.lab.sanitizer.preparation import NotPrepared
from tensorir_ladder.harness.lab.sanitizer.tools import NoSanitizer
from tensorir_ladder.harness.lab.traces import TraceError
from tensorir_ladder.harness.machines import UnknownTarget
from tensorir_ladder.harness.models.depth import NoForecast
from tensorir_ladder.harness.models.rate_files import BadRates
from tensorir_ladder.harness.peers import UnknownPeer
from tensorir_ladder.harness.records import RecordError
from tensorir_ladder.harness.timeline import NoTimeline
from tensorir_ladder.harness.verify import WrongResult
from tensorir_ladder.kernels.codegen.toolchain import CompileError, NoCompiler
from tensorir_ladder.schedules.errors import IllegalSchedule
from tensorir_ladder.steps.registry import MalformedStep
from tensorir_ladder.steps.step import UnknownStep, UnsupportedDtype
from tensorir_ladder.torch_ops.driver import DriverError, NoDriver

COMMANDS = {
    name: import_module(f"tensorir_ladder.harness.commands.{name}")
    for name in (
        "list",
        "run",
        "verify",
        "compile",
        "sweep",
        "stream",
        "counters",
        "timeline",
        "tune",
        "depth",
        "launch",
        "fuzz",
        "traces",
        "sanitize",
        "microbench",
    )
}
INTERRUPTED, BROKEN_PIPE = 130, 141
REFUSALS = (
    UsageError,
    IllegalSchedule,
    UnknownStep,
    UnsupportedDtype,
    UnknownTarget,
    UnsupportedCase,
    UnknownPeer,
    NoCompiler,
    NoGpu,
    EmulatorError,
    NoProfiler,
    NoForecast,
    NoTimeline,
    TraceError,
    BadAgreement,
    NotPrepared,
    NoSanitizer,
    CompileError,
    RecordError,
    MalformedStep,
    BadRates,
    UnknownQuantity,
    UnsuitableGpu,
    NoDriver,
    DriverError,
)
EXAMPLES = """examples:
  python -m harness list                                    what there is
  python steps/step5_pipelining.py                          run one step and compare its variants
  python -m harness run --step 1-6 --size 1024              the ladder at one size
  python -m harness run --step 6 --tile best --size 4096    with the best tile of the declared set
  python -m harness verify --step 5 --shape 33x17x50        check a ragged shape
  python -m harness verify --step 9 --on emulator           the generated CUDA, run and attacked on the CPU
  python -m harness compile --step 5 --variant sync --show cuda
  python -m harness stream --workload softmax --mb 256      memory-bound, 1 to 5 stages, beside a copy
  python -m harness sweep --step 5 --stages 1-6 --size 512  every stage count, each a record
  python -m harness timeline --step 11 --stages 1,2,4       what one block does when; needs a GPU
  python -m harness depth --step 5 --size 512               how many stages, by the model; needs no GPU
  python -m harness launch --step 11 --size 512             host time per launch, TVM's and ours
  python -m harness tune --step 5 --size 1024 --budget 120  the best of a declared space, kept on disk
  python -m harness run --step 5 --size 1024 --tile tuned   measured as it was tuned
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 right, 1 wrong result, 2 refused, 3 could not be verified)."""
    arguments = _join_negative(list(sys.argv[1:] if arguments is None else arguments))
    options = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "harness", *_repeatable(arguments)])
    try:
        return COMMANDS[options.command].run(options, command)
    except KeyboardInterrupt:
        print("interrupted; what is measured is on disk, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except MemoryError:
        print("error: out of memory; give a smaller shape, or run on a GPU", file=sys.stderr)
        return BAD_INPUT
    except KernelFault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return WRONG
    except WrongResult as wrong:
        print(f"error: wrong result: {wrong}", file=sys.stderr)
        return WRONG
    except REFUSALS as refused:
        print(f"error: {refused}", file=sys.stderr)
        return BAD_INPUT


def run_step(file: str) -> None:
    """What ``python steps/stepN_name.py …`` does: ``python -m harness run --step N …``."""
    number = re.match(r"step(\d+)_", Path(file).name).group(1)
    sys.exit(main(["run", "--step", number, *sys.argv[1:]]))


def _parser() -> argparse.ArgumentParser:
    form = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    description = "Build, verify and measure the steps of the ladder."
    parser = argparse.ArgumentParser(prog="python -m harness", description=description, **form)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.TEXT, description=command.TEXT, **form))
    return parser


def _join_negative(arguments: list[str]) -> list[str]:
    """Join an option and a value that begins with a minus, which argparse would take for an option."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _repeatable(arguments: list[str]) -> list[str]:
    """The arguments that say what is measured, without those that say where results and tree lie."""
    places = ("--out", "--revision")
    kept = [argument for argument in arguments if not argument.startswith(tuple(f"{place}=" for place in places))]
    return [word for before, word in zip(["", *kept], kept) if word not in places and before not in places]
